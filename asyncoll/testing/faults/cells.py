"""The cells of the matrix (a fault, an operation, a moment), and the plan that a seed draws for a cell."""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import signal
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from asyncoll.errors import UsageError
from asyncoll.launch.placement import HERE, Placement
from asyncoll.testing.faults.checked_calls import OPERATIONS
from asyncoll.testing.faults.core_points import core_points, operations_passing
from asyncoll.testing.faults.host_faults import CutHost, DownHost, KillHost, StopHost
from asyncoll.testing.faults.injectors import (
    MOMENTS,
    Disconnect,
    Exit,
    Fault,
    HoldGil,
    Kill,
    Orphan,
    Raise,
    Signal,
    Slow,
    Stop,
)
from asyncoll.testing.faults.programs import PROGRAMS, EarlyReturn
from asyncoll.testing.faults.record_points import RECORD
from asyncoll.testing.faults.staged_calls import STAGED
from asyncoll.testing.faults.staging_points import STAGING_POINTS

DEATH_S = 0.1  # after a death, every survivor must have raised within this time
# After a freeze they have this time.
FREEZE_S = 1.0
MIXED = "shm-mixed"  # shared memory, and every second rank does without the compiled core
_AT_CORE_POINTS = ("kill", "stop")  # the faults that strike at the injection points of the compiled core, and at RECORD
_RECORDED = ("solo", "majority", "quorum", "group", "synchronous_solo", "eager_step")  # operations that pass RECORD
_LINGERING_S = 0.3
_LETTERS = "abcdefgh"  # names of hosts
_PARTS = ("fault", "operation", "moment")  # of the name of a cell
_PASSINGS = 20  # the fault strikes when the victim passes the point for a drawn time, up to this
_STEPS = 5000  # the same at RECORD
_ELEMENTS = (8, 20_000, 300_000)  # lengths of a rank's array: short and long ones take different algorithms
_RECORDED_MAX = 20_000  # elements of a call that its caller's thread carries out
_ELEMENTS_BETWEEN_HOSTS = (8, 20_000, 1_200_000)  # the longest passes in windows
JOINING = "joining"  # in place of an operation: the fault strikes while the ranks join, at a time that the seed draws
JOINING_DEADLINE_S = 4.0  # for all ranks to join; who vanishes before it has a connection is missed only then
_JOINING_S = 0.5  # up to this long after the start of the processes


class TroubleError(Exception):
    """Raised by the program of a rank in a cell."""


@dataclass(frozen=True, slots=True)
class FaultKind:
    """A fault, and the errors and times that the matrix expects of the survivors."""

    make: Callable[[], Fault]
    # The types of error of which every survivor raises one, naming the victim. Empty: no rank may notice the fault.
    told: tuple[str, ...] = ()
    within_s: float = 0.0  # every survivor must raise within this time after the fault
    lasts_s: float = 0.0  # duration of the fault
    lingers_s: float = 0.0  # a process that has ended looks alive to the locks of the others for this time
    stops: bool = False  # the processes of the lost ranks are stopped, and continue when all others have ended
    leaves_a_child: bool = False  # the victim leaves a child process, which the driver kills
    of_host: bool = False  # all ranks of the victim's host are lost
    signal: int = 0  # that each of their processes gets; 0: the fault strikes their network
    leaves_running: bool = False  # the processes of the lost ranks go on, and lose all others
    of_program: bool = False  # an end of PROGRAMS only: those of `run` leave their world by it


KINDS: dict[str, FaultKind] = {
    "kill": FaultKind(Kill, ("PeerLostError",), DEATH_S),
    "linger": FaultKind(Kill, ("PeerLostError",), DEATH_S + _LINGERING_S, lingers_s=_LINGERING_S),
    "orphan": FaultKind(Orphan, ("PeerLostError",), DEATH_S, leaves_a_child=True),
    "exit": FaultKind(lambda: Exit(3), ("PeerLostError",), DEATH_S),
    "raise": FaultKind(lambda: Raise(TroubleError("a fault")), ("AbortedError",), DEATH_S),
    # PeerLostError if the handler has raised in the middle of an RPC message.
    "signal": FaultKind(Signal, ("AbortedError", "PeerLostError"), DEATH_S),
    # Ctrl-C, which cancels `main`.
    "interrupt": FaultKind(lambda: Signal(signal.SIGINT), ("AbortedError", "PeerLostError"), DEATH_S),
    "terminate": FaultKind(lambda: Signal(signal.SIGTERM), ("PeerLostError",), DEATH_S),
    "crash": FaultKind(lambda: Signal(signal.SIGSEGV), ("PeerLostError",), DEATH_S),
    "fatal": FaultKind(lambda: Signal(signal.SIGABRT), ("PeerLostError",), DEATH_S),  # a fatal error of the interpreter
    "return": FaultKind(lambda: Raise(EarlyReturn()), ("AbortedError", "PeerLostError"), DEATH_S, of_program=True),
    "disconnect": FaultKind(Disconnect, ("PeerLostError",), DEATH_S),
    "stop": FaultKind(Stop, ("PeerLostError",), FREEZE_S, stops=True),
    "kill-host": FaultKind(KillHost, ("PeerLostError",), DEATH_S, of_host=True, signal=signal.SIGKILL),
    "stop-host": FaultKind(StopHost, ("PeerLostError",), FREEZE_S, of_host=True, signal=signal.SIGSTOP, stops=True),
    "down-host": FaultKind(DownHost, ("PeerLostError",), FREEZE_S, of_host=True, leaves_running=True),
    "cut-host": FaultKind(CutHost, ("PeerLostError",), FREEZE_S, of_host=True, leaves_running=True),
    "gil": FaultKind(lambda: HoldGil(5.0), lasts_s=5.0),
    "slow": FaultKind(lambda: Slow(10.0, 1.0), lasts_s=1.0),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell in one world. Equal cells draw equal plans."""

    kind: str
    operation: str
    moment: str  # one of MOMENTS or STAGING_POINTS, RECORD, or an injection point of the compiled core
    transport: str
    size: int
    seed: int
    hosts: int = 1

    @property
    def placement(self) -> Placement:
        """The hosts of the ranks. The first ones have a rank more if the number of ranks makes that necessary."""
        if self.hosts == 1:
            return Placement({HERE: self.size})
        return Placement({_LETTERS[host]: len(range(host, self.size, self.hosts)) for host in range(self.hosts)})

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that are lost."""
        victim, place = CellPlan.draw(self).victim, self.placement
        return tuple(place.ranks_of(place.host_of(victim))) if KINDS[self.kind].of_host else (victim,)

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.operation}/{self.moment}"

    @property
    def is_at_core_point(self) -> bool:
        return self.moment not in (*MOMENTS, *STAGING_POINTS, RECORD)

    def does_without_core(self, rank: int) -> bool:
        """Whether the rank does without the compiled core although there may be one."""
        return self.transport == MIXED and rank % 2 == 1

    def __str__(self) -> str:
        hosts = f" --hosts {self.hosts}" if self.hosts > 1 else ""
        return f"--cells {self.name} --transport {self.transport} -n {self.size}{hosts} --seed {self.seed}"


@dataclass(frozen=True, slots=True)
class CellPlan:
    """The choices that the seed of a cell makes."""

    victim: int
    elements: int
    depth: float  # position of "inside" among the injection points of the call, in [0, 1)

    def passing(self, cell: Cell) -> int:
        """At RECORD or a point of the compiled core: the number of the passing at which the fault strikes."""
        return 1 + int(self.depth * (_PASSINGS if cell.is_at_core_point else _STEPS))

    @property
    def joining_s(self) -> float:
        """While the ranks join: the seconds from the start of the processes to the fault."""
        return self.depth * _JOINING_S

    @classmethod
    def draw(cls, cell: Cell) -> CellPlan:
        random = np.random.default_rng([cell.seed, zlib.crc32(cell.name.encode())])
        lengths = _ELEMENTS if cell.hosts == 1 else _ELEMENTS_BETWEEN_HOSTS
        elements = int(random.choice(lengths)) // cell.size * cell.size
        victim, depth = int(random.integers(cell.size)), float(random.random())
        if cell.is_at_core_point:
            passing = operations_passing(cell.moment, cell.size, mixed=cell.transport == MIXED)
            elements = int(random.choice(passing[cell.operation])) // cell.size * cell.size
            victim -= cell.does_without_core(victim)
        if cell.moment == RECORD:
            elements = min(elements, _RECORDED_MAX)
            if cell.transport == MIXED and not cell.does_without_core(victim):
                victim = max(victim - 1, 1)
        return cls(victim, max(elements, cell.size), depth)


def select(
    pattern: str, sample: int | None, seeds: Sequence[int], transport: str, size: int, hosts: int = 1
) -> list[Cell]:
    """The cells that match `pattern` (several patterns are separated by commas).

    `sample` cells are drawn for each of the seeds; None takes all. Raises UsageError if no cell matches, or if there
    are more `hosts` than ranks.
    """
    if not 1 <= hosts <= min(size, len(_LETTERS)):
        raise UsageError(f"--hosts: {size} ranks are on 1 to {min(size, len(_LETTERS))} hosts, not {hosts}")
    triples = list(_between_hosts() if hosts > 1 else _on_a_host(transport, size))
    patterns = pattern.split(",")
    for each in patterns:
        if not any(fnmatch.fnmatch("/".join(triple), each) for triple in triples):
            raise UsageError(f"--cells: {each!r:.80} names no cell: {_why_none(each.split('/'), triples, hosts)}")
    chosen = [triple for triple in triples if any(fnmatch.fnmatch("/".join(triple), each) for each in patterns)]
    cells: list[Cell] = []
    for seed in seeds:
        drawn = chosen
        if sample is not None and sample < len(chosen):
            indices = np.random.default_rng(seed).choice(len(chosen), sample, replace=False)
            drawn = [chosen[index] for index in sorted(indices)]
        cells += [Cell(*triple, transport, size, seed, hosts) for triple in drawn]
    return cells


def _why_none(parts: Sequence[str], triples: Sequence[tuple[str, str, str]], hosts: int) -> str:
    """The first part of a pattern that matches nothing after the parts before it, and what there is in its place."""
    if len(parts) != len(_PARTS):
        return "use FAULT/OPERATION/MOMENT, such as 'kill/*/inside'; asyncoll faults --help lists them"
    if hosts == 1 and fnmatch.filter((name for name, kind in KINDS.items() if kind.of_host), parts[0]):
        return f"{parts[0]} needs --hosts N, of at least 2"
    if hosts == 1 and parts[1] == JOINING:
        return f"{JOINING} needs --hosts N, of at least 2"
    for place, part in enumerate(parts):
        known = list(dict.fromkeys(triple[place] for triple in triples))
        if not (matching := fnmatch.filter(known, part)):
            break
        triples = [triple for triple in triples if triple[place] in matching]
    near = difflib.get_close_matches(part, known, n=5) or known
    of = f" of {'/'.join(parts[:place])}" if place else ""
    return f"no {_PARTS[place]}{of} is {part!r:.40}; there is {', '.join(near)}"


def _on_a_host(transport: str, size: int) -> Iterator[tuple[str, str, str]]:
    kinds = [name for name, kind in KINDS.items() if not kind.of_host]
    of_runs = [name for name in kinds if not KINDS[name].of_program]
    yield from itertools.product(of_runs, OPERATIONS, MOMENTS)
    yield from itertools.product(of_runs, STAGED, (*MOMENTS, *STAGING_POINTS))
    yield from itertools.product(kinds, PROGRAMS, MOMENTS)
    if transport != "zmq":
        lingering = itertools.product(["linger"], core_points()[:1])  # between taking and signing a lock
        for kind, point in itertools.chain(itertools.product(_AT_CORE_POINTS, core_points()), lingering):
            for operation in operations_passing(point, size, mixed=transport == MIXED):
                yield kind, operation, point
    if transport == MIXED or (transport == "shm" and not core_points()):
        yield from itertools.product(_AT_CORE_POINTS, _RECORDED, (RECORD,))


def _between_hosts() -> Iterator[tuple[str, str, str]]:
    of_runs = [name for name, kind in KINDS.items() if not kind.of_program]
    yield from itertools.product(of_runs, OPERATIONS, MOMENTS)
    yield from itertools.product(KINDS, PROGRAMS, MOMENTS)
    yield from ((name, JOINING, "inside") for name, kind in KINDS.items() if kind.of_host)
