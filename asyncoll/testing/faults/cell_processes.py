"""Runs a cell among real processes: forks the ranks, records their reports and ends, and finds what they leave."""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import socket
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncoll import _core
from asyncoll.launch import control, process_tree
from asyncoll.launch.rank_environment import job_folder, rank_environment, threads
from asyncoll.testing.faults.cells import JOINING, JOINING_DEADLINE_S, KINDS, MIXED, Cell
from asyncoll.testing.faults.host_networks import HostNetworks, host_networks
from asyncoll.testing.faults.programs import PROGRAMS
from asyncoll.testing.faults.rank_program import be_rank
from asyncoll.testing.faults.staged_calls import STAGED
from asyncoll.transport.system_calls import needed

PATIENCE_S = 30.0  # a rank that has not ended this long after the end of the fault hangs
_PORT = 29_500  # of the store; each host has all ports of its own
_STACKS_S = 0.2  # time that a hanging rank gets to write its stacks
_LEFTOVERS_S = 10.0  # time that helper processes get to end by themselves after the ranks

Told = dict[str, Any]


@dataclass(slots=True)
class CellStory:
    """The reports of the ranks, in the order of their arrival, and how the ranks ended."""

    told: list[Told] = field(default_factory=list)
    hung: dict[int, str] = field(default_factory=dict)  # by rank: the stacks of a rank that hung
    codes: dict[int, int] = field(default_factory=dict)  # by rank: the exit code, negative for a signal
    output: dict[int, str] = field(default_factory=dict)  # by rank
    left: list[str] = field(default_factory=list)  # files, shared memory and processes that the ranks left

    def of(self, rank: int, what: str) -> Told | None:
        """The first report of this kind by this rank, or None."""
        return next((each for each in self.told if each["rank"] == rank and each["what"] == what), None)


def happen(cell: Cell) -> CellStory:
    """Run the cell and return its story. The calling process must have one thread, because it forks."""
    process_tree.adopt_orphans()
    for module in _needed(cell):
        importlib.import_module(module)  # once, and not in each rank
    before = _shared_memory()
    with tempfile.TemporaryDirectory(prefix="asyncoll-cell-") as folder:
        temporary = Path(folder, "t")
        temporary.mkdir()
        with job_folder() as job, _networks(cell) as networks:
            world = _CellWorld(cell, Path(folder), temporary, job, networks)
            world.run()
        story = world.story
        left = [path.relative_to(temporary) for path in temporary.rglob("*")]
        story.left += [f"{path} in TMPDIR" for path in left if str(path) not in cell.placement.hosts]
    story.left += [f"{name} in /dev/shm" for name in _shared_memory() - before]
    return story


def _needed(cell: Cell) -> tuple[str, ...]:
    """What ranks of the cell import of torch: the store of several hosts, and what devices and DDP take of it."""
    if cell.operation in PROGRAMS:
        return "torch.distributed", "torch._dynamo"
    return ("torch.distributed",) if cell.hosts > 1 or cell.operation in STAGED else ()


def _shared_memory() -> set[str]:
    """The shared memory of this library, found by its names: other programs of the machine use /dev/shm, too."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("asyncoll")}


def _networks(cell: Cell) -> contextlib.AbstractContextManager[HostNetworks | None]:
    return host_networks(list(cell.placement.hosts)) if cell.hosts > 1 else contextlib.nullcontext()


class _CellWorld:
    def __init__(self, cell: Cell, folder: Path, temporary: Path, job: Path, networks: HostNetworks | None) -> None:
        self.story = CellStory()
        self._networks = networks
        self._job = job
        self._temporary = temporary
        self._cell = cell
        self._kind = KINDS[cell.kind]
        self._folder = folder
        self._transport = "shm" if cell.transport == MIXED else cell.transport
        self._environment = {**threads(cell.size, os.environ), **os.environ}
        self._began_s = time.monotonic()
        self._pids: dict[int, int] = {}

    def run(self) -> None:
        ours, theirs = control.pair()
        with ours:
            with theirs:
                for rank in range(self._cell.size):
                    self._fork(rank, theirs)
            self._listen(ours, time.monotonic() + self._kind.lasts_s + PATIENCE_S)
            self._end_what_hangs()
            self._hear(ours)
        self._look_for_processes()
        for rank in range(self._cell.size):
            self.story.output[rank] = self._output(rank).read_text(errors="replace")

    def _output(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}"

    def _fork(self, rank: int, channel: socket.socket) -> None:
        driver = os.getpid()
        pid = os.fork()
        if pid:
            self._pids[rank] = pid
            return
        try:
            process_tree.die_with_parent(driver)
            output = os.open(self._output(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.environ.update(self._environment | self._place(rank))
            if self._cell.does_without_core(rank):
                os.environ[_core.VARIABLE] = "python"
            tempfile.tempdir = None
            be_rank(self._cell, rank, channel, self._began_s)
        finally:
            os._exit(1)

    def _place(self, rank: int) -> dict[str, str]:
        """The variables that describe the rank's place. Moves this process there."""
        placement = self._cell.placement
        if self._networks is None:
            folders = {"ASYNCOLL_FOLDER": str(self._job), "TMPDIR": str(self._temporary)}
            return folders | rank_environment(rank, placement, "127.0.0.1", 0, self._transport)
        host = placement.host_of(rank)
        self._networks.enter(host)
        temporary = self._temporary / host  # ranks that share it share memory
        temporary.mkdir(exist_ok=True)
        first = self._networks.address(placement.host_of(0))
        world = {"ASYNCOLL_KEY_FILE": str(self._job / "job"), "ASYNCOLL_FOLDER": "", "TMPDIR": str(temporary)}
        if self._cell.operation == JOINING:
            world["ASYNCOLL_DEADLINE_S"] = str(JOINING_DEADLINE_S)
        where = rank_environment(rank, placement, first, _PORT, self._transport)
        return world | self._networks.environment(host) | where

    # -- until all have ended ---------------------------------------------------------------------

    def _listen(self, channel: socket.socket, until_s: float) -> None:
        with needed("pidfd_open"):
            running = {os.pidfd_open(pid): rank for rank, pid in self._pids.items()}  # readable when the rank has ended
        is_continued = False
        try:
            while running and (patience_s := until_s - time.monotonic()) > 0:
                ready, _, _ = select.select([channel.fileno(), *running], [], [], patience_s)
                self._hear(channel)
                for death in running.keys() & set(ready):
                    self._reap(running.pop(death))
                    os.close(death)
                # Stopped ranks continue once all others have ended: they must end, too, and leave nothing.
                if self._kind.stops and set(running.values()) <= set(self._cell.lost) and not is_continued:
                    for rank in running.values():
                        os.kill(self._pids[rank], signal.SIGCONT)
                    is_continued = True
        finally:
            for death in running:
                os.close(death)

    def _hear(self, channel: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while told := control.receive(channel):
                self.story.told.append(told)

    def _reap(self, rank: int) -> None:
        _, status = os.waitpid(self._pids.pop(rank), 0)
        self.story.codes[rank] = os.waitstatus_to_exitcode(status)

    # -- and after --------------------------------------------------------------------------------

    def _end_what_hangs(self) -> None:
        for pid in self._pids.values():
            os.kill(pid, signal.SIGUSR1)  # faulthandler writes the stacks
            os.kill(pid, signal.SIGCONT)  # a stopped rank handles no signal
        if self._pids:
            time.sleep(_STACKS_S)
        for rank, pid in list(self._pids.items()):
            os.kill(pid, signal.SIGKILL)
            self.story.hung[rank] = self._output(rank).read_text(errors="replace")
            self._reap(rank)

    def _look_for_processes(self) -> None:
        if self._kind.leaves_a_child:
            for pid in process_tree.children():
                os.kill(pid, signal.SIGKILL)
        until_s = time.monotonic() + _LEFTOVERS_S
        while (children := process_tree.children()) and time.monotonic() < until_s:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG) != (0, 0):
                    pass
            time.sleep(0.005)
        self.story.left += [f"process {pid}" for pid in children]
        process_tree.kill_descendants()
