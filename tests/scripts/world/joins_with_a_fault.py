"""Joins worlds that the environment alone describes, with a fault at one rank; prints how each rank ended, as JSON.

Each argument is a case, as JSON: its name, the number of ranks, their environment, `faults` by rank, and perhaps
`deadline_s`, `hosts`, `slow` (by rank, the phase that it enters once the folder of sockets is gone) and `first` (the
rank that enters the phase "slots" first). The cases run side by side, because their ranks mostly wait. All ranks are
forked from this process, which has loaded torch once for all of them.
"""

import asyncio
import contextlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch.distributed  # noqa: F401 (for the ranks)

import asyncoll
from asyncoll.launch.rank_environment import reserve_port
from asyncoll.transport import joining
from asyncoll.transport.memory import arena, fd_passing
from asyncoll.transport.messages import shared_payloads, zeromq
from asyncoll.world import connecting, meeting, sealed_store, store

HERE = tempfile.gettempdir()
LIMIT_S = 60  # for a case that hangs
PHASES = {  # in their order: where a rank is when it enters this function
    "nonce": (sealed_store.SealedStore, "begin_session"),
    "host": (meeting, "_machine"),
    "folder": (meeting, "check_folder"),
    "listen": (fd_passing, "_listen"),
    "connect": (fd_passing, "_connect"),
    "hello": (fd_passing._Link, "send"),
    "collect": (fd_passing, "_receive_segments"),
    "slots": (shared_payloads.SlottedTransport, "start"),
    "start": (zeromq.ZeroMQTransport, "start"),
    "lock": (arena.HostArena, "_open_control_block"),
    "barrier": (connecting, "barrier"),
}


def fail(kind, phase):
    """Have this process killed or stopped, or an exception raised, when it enters a phase."""

    def act():
        if kind == "refuses":
            raise asyncoll.UsageError("no route at all")
        os.kill(os.getpid(), signal.SIGKILL if kind == "dies" else signal.SIGSTOP)
        threading.Event().wait()  # another thread may take the signal, and this one went on until then

    before(phase, act)


def before(phase, act):
    """Have this process call `act` when it enters a phase."""
    owner, name = PHASES[phase]
    inner = getattr(owner, name)

    def wrapped(*arguments):
        act()
        return inner(*arguments)

    setattr(owner, name, wrapped)


def await_no_folder():
    """Until the first rank has removed its folder of sockets."""
    while [*Path(tempfile.gettempdir()).glob("asyncoll-*")]:
        threading.Event().wait(0.01)


def await_file(path):
    while not path.exists():
        threading.Event().wait(0.01)


def expect(victim):
    """Time counts only while this rank waits for `victim` alone, however slowly all others come.

    The victim may be the last one in an earlier phase, too. So the time ends when others are missing again.
    """
    begin, check = joining.Joining.__init__, joining.Joining.check
    limits, counting = {}, set()

    def begin_without_limit(self, rank, size, limit_s=1e6):
        begin(self, rank, size, 1e6)
        limits[self] = limit_s

    def check_when_alone(self, missing, what, **more):
        if self in limits:
            is_alone = list(missing()) == [victim]
            if is_alone and self not in counting:
                counting.add(self)
                begin(self, self._rank, self._size, limits[self])
            elif not is_alone and self in counting:
                counting.remove(self)
                begin(self, self._rank, self._size, 1e6)
        check(self, missing, what, **more)

    joining.Joining.__init__, joining.Joining.check = begin_without_limit, check_when_alone


def come_late(folder, size, rank):
    """When all others have said that they wait for this rank alone."""
    others = [folder / f"{other}.err" for other in range(size) if other != rank]
    while not all(other.exists() and f"waiting for rank {rank} " in other.read_text() for other in others):
        threading.Event().wait(0.01)


async def main(comm):
    x = np.ones(10)
    await comm.allreduce(x)
    return float(x[0])


async def unprintable(comm):
    class MuteError(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    if comm.rank == 1:
        raise MuteError
    await comm.barrier()


async def nested(comm):
    async with asyncoll.connect():
        pass


async def connect_for(seconds):
    try:
        async with asyncio.timeout(seconds), asyncoll.connect():
            return "connected"
    except TimeoutError:
        return "timed out"


def thrice():
    return [asyncoll.run(main) for _ in range(3)]


def hasty():
    """Rank 1 gives up the first world at once, and finds the store of it still open when it comes for the second."""
    came, rank = Path(tempfile.gettempdir(), "rank 1 has come again"), int(os.environ["RANK"])
    close, reach = sealed_store.SealedStore.close, store._reach_store

    def slow(*arguments):
        while not came.exists():
            threading.Event().wait(0.01)
        close(*arguments)

    def quick(*arguments):
        reached = reach(*arguments)
        came.touch()
        return reached

    async def give_up(comm):
        if comm.rank == 1:
            raise ValueError("enough")
        await comm.barrier()

    if rank == 0:
        sealed_store.SealedStore.close = slow
    with contextlib.suppress(ValueError, asyncoll.AbortedError):
        asyncoll.run(give_up)
    sealed_store.SealedStore.close = close
    if rank == 1:
        store._reach_store = quick
    return asyncoll.run(main)


PROGRAMS = {
    "main": lambda: asyncoll.run(main),
    "unprintable": lambda: asyncoll.run(unprintable),
    "nested": lambda: asyncoll.run(nested),
    "impatient": lambda: asyncio.run(connect_for(0.5)),
    "thrice": thrice,
    "hasty": hasty,
}


def be_rank(case, rank, folder):
    os.environ["RANK"] = str(rank)
    os.environ.update(case.get("env", {}))
    joining._FIRST_WARNING_S = 0.2
    if "files" in case:
        resource.setrlimit(resource.RLIMIT_NOFILE, tuple(case["files"]))
    if case.get("hosts"):  # each rank on one of its own, where it sees no other's processes
        meeting._machine = sealed_store.process_space = lambda: f"host {rank}"
    if str(rank) in case.get("slow", {}):
        before(case["slow"][str(rank)], await_no_folder)
    for victim, fault in case.get("faults", {}).items():
        if int(victim) != rank:
            if "deadline_s" in case:
                expect(int(victim))
        elif fault == "late":
            come_late(folder, case["size"], rank)
        else:
            fail(*fault.split())
    if "first" in case:
        came = folder / "first"
        before("slots", came.touch if rank == case["first"] else lambda: await_file(came))
    try:
        is_faulty = str(rank) in case.get("faults", {})  # and comes to its fault, however slowly
        with asyncoll.deadline(1e6 if is_faulty else case.get("deadline_s", 1e6)):
            print(json.dumps({"result": PROGRAMS[case.get("program", "main")]()}))
    except asyncoll.AsyncollError as error:
        named = {name: getattr(error, name) for name in ("rank", "missing") if hasattr(error, name)}
        print(json.dumps({"error": type(error).__name__, "text": str(error), **named}))


def fork(case, rank, folder):
    pid = os.fork()
    if pid:
        return pid
    try:
        for file, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT), file)
        be_rank(case, rank, folder)
        sys.stdout.flush()
    except BaseException as error:
        print(repr(type(error)), file=sys.stderr, flush=True)
    finally:
        os._exit(0)


def play(case):
    """What each rank said at its end (None if nothing), and what it wrote meanwhile."""
    with reserve_port() as holder, tempfile.TemporaryDirectory(dir=HERE) as name:
        folder = Path(name)
        place = {"WORLD_SIZE": case["size"], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": holder.getsockname()[1]}
        os.environ.update({key: str(value) for key, value in place.items()}, TMPDIR=name + case.get("folder", ""))
        os.makedirs(os.environ["TMPDIR"], exist_ok=True)
        tempfile.tempdir = None
        faults = case.get("faults", {})
        pids = {rank: fork(case, rank, folder) for rank in range(case["size"]) if faults.get(str(rank)) != "absent"}
        running = dict(pids)
        signal.alarm(LIMIT_S)
        try:
            for rank, pid in pids.items():
                if not faults.get(str(rank), "").startswith("stops"):
                    os.waitpid(pid, 0)
                    del running[rank]
        except TimeoutError:
            pass  # a rank that hangs says nothing, and so its test fails
        finally:
            signal.alarm(0)
            for pid in running.values():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        said = {rank: (folder / f"{rank}.out").read_text() for rank in pids}
        return [
            {
                "said": json.loads(said[rank]) if said.get(rank) else None,
                "wrote": (folder / f"{rank}.err").read_text() if rank in pids else "",
            }
            for rank in range(case["size"])
        ]


def give_up(*_):
    raise TimeoutError


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, give_up)
    cases = [json.loads(case) for case in sys.argv[1:]]
    with ProcessPoolExecutor(len(cases), multiprocessing.get_context("fork")) as players:  # `Pool` may hang at its end
        print(json.dumps(list(players.map(play, cases))))
