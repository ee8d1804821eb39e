"""The process that loads numpy, torch and asyncoll once, and forks the ranks.

It stays single-threaded. When the control socket ends, because the job is over or because the launcher was killed, it
kills every descendant and removes the job's folder.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import shutil
import signal
import socket
import sys
from contextlib import suppress

from asyncoll.launch import control, process_tree, rank
from asyncoll.launch.program import Program

BOOT = """
import sys
sys.path.insert(0, sys.argv[1])
from asyncoll.launch.{} import main
sys.path.append(sys.path.pop(0))
main()
"""
LEFT_TO_THE_LAUNCHER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def command(module: str, channel: int, program: Program, *more: str) -> list[str]:
    """The command line that runs `main` of a module of this package. It leaves `sys.path` as it is.

    The arguments of `main` are `more`, the channel, and the program.
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    boot = [sys.executable, "-P", "-c", BOOT.format(module), root]
    return [*boot, *more, str(channel), str(int(program.module)), *program.argv]


def main() -> None:
    """Serve until the job ends, or until a fork has made this process a rank; then run that rank."""
    folder, channel, module, *argv = sys.argv[2:]
    program = Program(tuple(argv), bool(int(module)))
    signal.pthread_sigmask(signal.SIG_SETMASK, LEFT_TO_THE_LAUNCHER)
    process_tree.adopt_orphans()
    loaded = preload()
    template = Template(socket.socket(fileno=int(channel)), folder)
    if not template.serve():
        # A regular exit would first tear down torch, which takes time.
        os._exit(0)
    # A fork has no copies of the template's other threads. This looks after the fork, because OpenBLAS ends its threads
    # before a fork.
    if loaded and len(os.listdir(f"/proc/{os.getppid()}/task")) == 1:
        rank.run(program.run, template.channel)
    else:
        os.set_inheritable(template.channel.fileno(), True)
        os.execv(sys.executable, command("rank", template.channel.fileno(), program))


def preload() -> bool:
    """Import the modules that ranks will use. False if that has failed.

    Modules may then be half imported, so no program may run in a fork of this process.
    """
    try:
        for name in os.environ.get("ASYNCOLL_PRELOAD", "numpy,torch,asyncoll").split(","):
            if name:
                module = importlib.import_module(name)
                for public in module.__all__ if name == "asyncoll" else ():
                    getattr(module, public)  # asyncoll loads its public names at their first use
    except Exception as error:
        print(f"asyncoll: every rank starts afresh, because loading once failed: {error!r}", file=sys.stderr)
        return False
    gc.collect()
    # A collection would write to, and so copy, the pages that the ranks share.
    gc.freeze()
    return True


class Template:
    """Forks ranks, reaps them, and forwards signals to them."""

    def __init__(self, channel: socket.socket, folder: str) -> None:
        self.channel = channel
        self._folder = folder  # of the job
        self._ranks: dict[int, int] = {}  # the living ranks, by pid
        self._wake, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)

    def serve(self) -> bool:
        """True in a process that has become a rank; False at the end of the job."""
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            ready = {file for file, _ in poll.poll()}
            if self._wake.fileno() in ready:
                self._wake.recv(4096)
                self._reap()
            if self.channel.fileno() in ready:
                received = control.receive_files(self.channel)
                if received is None:
                    process_tree.kill_descendants()
                    shutil.rmtree(self._folder, ignore_errors=True)
                    return False
                message, files = received
                if "fork" not in message:
                    self._signal(message["signal"], message["ranks"])
                elif self._fork(message["fork"], message["environment"], *files):
                    return True

    def _fork(self, number: int, environment: dict[str, str], out: int, err: int) -> bool:
        template = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            process_tree.die_with_parent(template)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._wake.close()
            self._waker.close()
            os.dup2(out, 1)
            os.dup2(err, 2)
            os.environ.update(environment)
        else:
            with suppress(OSError):
                # In both processes: a signal that is sent now must find the group.
                os.setpgid(pid, pid)
            self._ranks[pid] = number
            self._tell(started=number, pid=pid)
        os.close(out)
        os.close(err)
        return pid == 0

    def _signal(self, signum: int, ranks: list[int]) -> None:
        for pid, number in self._ranks.items():
            if number in ranks:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signum)
                    if signum != signal.SIGSTOP:
                        os.killpg(pid, signal.SIGCONT)  # a stopped process handles no signal before it continues

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                pid, status = ended
                if pid in self._ranks:
                    self._tell(exited=self._ranks.pop(pid), code=os.waitstatus_to_exitcode(status))

    def _tell(self, **message: object) -> None:
        # The launcher is gone: the next read finds the end.
        with suppress(OSError):
            control.send(self.channel, message)
