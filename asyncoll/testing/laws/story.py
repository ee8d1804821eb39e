"""A drawn world, and the story of what its ranks were told: all that the laws are judged by.

A case is drawn from (kind, size, seed) alone, so a seed replays it. Every call of every rank adds 1 to an element of
its own: a sum shows exactly whose contributions, of which call, are in it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from asyncoll.algorithms.dense.on_lane import DOUBLING_MAX_BYTES
from asyncoll.algorithms.rounds.by_coordinator import COORDINATED_MAX_BYTES
from asyncoll.algorithms.rounds.operations import Reduction
from asyncoll.communicator import Communicator
from asyncoll.errors import UsageError
from asyncoll.tensors.reductions import Array
from asyncoll.transport.messages.simulated import Network, Pause

_OPERATIONS: dict[str, Callable[[Communicator, Any, Case], Awaitable[Reduction]]] = {
    "solo": lambda comm, x, case: comm.solo_allreduce(
        x, name=case.name(comm.rank), sync_every=case.sync_every, history=case.history
    ),
    "majority": lambda comm, x, case: comm.majority_allreduce(
        x, name=case.name(comm.rank), seed=case.seed, sync_every=case.sync_every, history=case.history
    ),
    "quorum": lambda comm, x, case: comm.quorum_allreduce(
        x, name=case.name(comm.rank), quorum=case.number(comm.rank), sync_every=case.sync_every, history=case.history
    ),
    "full": lambda comm, x, case: comm.quorum_allreduce(
        x, name=case.name(comm.rank), quorum=case.number(comm.rank), sync_every=case.sync_every
    ),
    "candidates": lambda comm, x, case: comm.majority_allreduce(
        x, name=case.name(comm.rank), seed=case.seed, candidates=case.candidates, sync_every=case.sync_every
    ),
    "group": lambda comm, x, case: comm.group_allreduce(
        x, name=case.name(comm.rank), group_size=case.group_size, fixed=case.fixed, sync_every=case.sync_every
    ),
}
KINDS = tuple(_OPERATIONS)
_WITH_HISTORY = ("solo", "majority", "quorum")
_ROUNDS = 12
_ITEM_BYTES = 8
_CANCELS = 4  # calls at most that the impatient rank of a world gives up
_ALARM_S = 0.0005  # between the beginning of a call and the signal, on average: about as long as a call takes
_OVERLAPS = (1, 1, 2, 4)  # calls of one rank that may be under way at the same time
_STEP_S = 0.01  # what a trainer computes between two calls, on average; one of each world takes five times as long
_FORK_AT = (1, 3, 5)  # calls whose contributions are registered
NAP_S = 1000.0  # longer than all the rest of a world


@dataclass(frozen=True, slots=True)
class Case:
    """One world: its operation, its trainers' manners, and the weather."""

    kind: str
    size: int
    seed: int
    sync_every: int  # divides `rounds`: the last round waits for all, so nothing stays staged
    history: int
    buckets: int  # tensors in a contribution
    padding: int  # elements of each that say nothing: short and long arrays go different ways
    group_size: int
    fixed: bool
    slow: int  # the rank that takes five times as long
    sleeper: int | None  # the rank whose trainer naps once,
    nap_before: int  # before this call
    quitter: int | None  # the rank that ends before the others,
    quits_after: int  # so many calls
    impatient: int | None  # the rank that cancels some of its calls
    network: Network
    overlap: int  # the most calls that a rank has under way at the same time
    alarmed: int | None  # the rank whose signal handler raises in some of its calls, where it is a process of its own
    forking: int | None  # the rank that forks a child, where it is a process of its own,
    forks_at: int  # in this call
    rounds: int = _ROUNDS

    @property
    def quorum(self) -> int:
        """How many ranks must have arrived before a round opens."""
        return {"quorum": (self.size + 1) // 2, "full": self.size}.get(self.kind, 1)

    @property
    def candidates(self) -> int:
        return max(1, round(self.size / 3)) if self.kind == "candidates" else 1

    @property
    def calls(self) -> int:
        """How many calls a rank may make: each answer is of a newer round than the one before."""
        return self.rounds + _CANCELS + max(_OVERLAPS) - 1

    def is_synchronous(self, number: int) -> bool:
        return number % self.sync_every == 0

    def name(self, rank: int) -> str:
        """The operation's, as a string of another type at each rank: they are equal."""
        return _STRINGS[(rank + self.seed) % len(_STRINGS)](self.kind)

    def number(self, rank: int) -> Any:
        """The quorum, as numpy has it at every other rank."""
        return np.int64(self.quorum) if rank % 2 else self.quorum


class _String(str):
    """A string of the user's own."""


class _Name(StrEnum):
    SOLO = "solo"
    MAJORITY = "majority"
    QUORUM = "quorum"
    FULL = "full"
    CANDIDATES = "candidates"
    GROUP = "group"


_STRINGS: tuple[Callable[[str], str], ...] = (str, np.str_, _String, _Name)


def draw(kind: str, size: int, seed: int) -> Case:
    """The case that these three stand for."""
    if kind not in KINDS:
        raise UsageError(f"unknown kind {kind!r}: use one of {', '.join(KINDS)}")
    if size < 1 or seed < 0:
        raise UsageError(f"a world has at least one rank, and seeds count from 0: got size {size} and seed {seed}")
    generator = np.random.default_rng([seed, size, KINDS.index(kind)])

    def one_of(*values: Any) -> Any:
        return values[generator.integers(len(values))]

    def rank() -> int:
        return int(generator.integers(size))

    pauses = [
        Pause(rank(), float(generator.uniform(0, 0.3)), float(generator.exponential(0.2)))
        for _ in range(one_of(0, 1, 3))
    ]
    return Case(
        kind=kind,
        size=size,
        seed=seed,
        sync_every=one_of(3, 4, 6, _ROUNDS),
        history=one_of(0, 1, 3, _ROUNDS) if kind in _WITH_HISTORY else 0,
        buckets=one_of(1, 2),
        padding=one_of(0, 0, COORDINATED_MAX_BYTES // size // _ITEM_BYTES, DOUBLING_MAX_BYTES // _ITEM_BYTES),
        group_size=1 + rank(),
        fixed=one_of(False, False, True),
        slow=rank(),
        sleeper=one_of(None, rank()),
        nap_before=one_of(0, 1, 3),
        quitter=one_of(None, None, rank()) if size > 1 else None,
        quits_after=one_of(1, 3, 6),
        impatient=one_of(None, rank()) if kind != "group" and size > 1 else None,
        network=Network(1e-4, one_of(1e-4, 2e-3, 2e-2), faults=pauses),
        overlap=one_of(*_OVERLAPS),
        forking=one_of(None, rank()) if size > 1 else None,
        forks_at=one_of(*_FORK_AT),
        alarmed=one_of(None, rank()) if kind != "group" and size > 1 else None,
    )


@dataclass(frozen=True, slots=True, repr=False)  # asyncio prints what its tasks return: a quarter of the time
class Call:
    """One call and its answer. A sum counts contributions by [bucket, number of the call, rank]."""

    rank: int
    index: int
    aim: int  # the round after the last one that this rank had seen
    sum: Array
    missed: tuple[Array, ...]
    reduction: Reduction  # without the tensors of the missed results
    wait_s: float  # 0 unless it was alone
    alone: bool  # no other call of its rank was under way when it was made

    @property
    def round(self) -> int:
        return self.reduction.round

    @property
    def included(self) -> bool:
        return self.reduction.included


class Answer(NamedTuple):
    """What a call returned: the fields of `Call` after the first three."""

    sum: Array
    missed: tuple[Array, ...]
    reduction: Reduction
    wait_s: float
    alone: bool


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A call that was given up. Its contribution stays in, unless that is unsure."""

    rank: int
    index: int
    aim: int  # the round after the newest that its rank had been given when it was made
    turn: int  # the round after the newest that the calls before it were given: it may have waited for those
    unsure: bool = False  # an exception came, perhaps before the call was made


Part = tuple[list[Call], list[Cancelled]]  # what one rank has done, in order


@dataclass(frozen=True, slots=True)
class Story:
    """A world that has ended."""

    case: Case
    calls: list[list[Call]]  # by rank, in order
    cancelled: list[Cancelled]
    messages: int = 0
    rounds: dict[tuple[int, tuple[int, ...]], list[Call]] = field(
        default_factory=dict
    )  # (round, group): who was given it

    def __post_init__(self) -> None:
        for call in sorted((call for mine in self.calls for call in mine), key=lambda call: call.round):
            self.rounds.setdefault((call.round, call.reduction.group), []).append(call)

    def ended(self, rank: int, number: int) -> bool:
        """Whether this rank makes no call for round `number` any more."""
        return self.calls[rank][-1].round < number


async def take_part(comm: Communicator, case: Case) -> Part:
    """Call at random moments until the last round is seen, and keep every answer."""
    return await _Trainer(comm, case).run()


class AlarmError(Exception):
    """What the signal handler of a case raises."""


def _ring(*_: object) -> None:
    raise AlarmError


def _ignore_alarms(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What a signal handler raises while the loop runs a callback ends that callback, and goes to the log."""
    if not isinstance(context.get("exception"), AlarmError):
        loop.default_exception_handler(context)


class _Trainer:
    """One rank of a case."""

    def __init__(self, comm: Communicator, case: Case) -> None:
        self._comm = comm
        self._case = case
        self._generator = np.random.default_rng([case.seed, comm.rank])
        self._step_s = _STEP_S * (5 if comm.rank == case.slow else 1)
        self._begun = 0  # calls, or at least their tasks
        self._answers: dict[int, Answer] = {}  # by index of the call
        self._child = 0  # its process id
        self._aims: dict[int, int] = {}  # by index of the call: the round that it aimed at, at the earliest

    async def run(self) -> Part:
        case, rank = self._case, self._comm.rank
        while self._seen() < case.rounds and not (rank == case.quitter and len(self._answers) >= case.quits_after):
            await asyncio.sleep(self._generator.exponential(self._step_s))
            if rank == case.sleeper and len(self._answers) == case.nap_before:
                await asyncio.sleep(NAP_S)
            if rank == case.alarmed:
                await self._call_alarmed()
            else:
                await self._call_together(int(self._generator.integers(1, case.overlap + 1)))
        self._look_after_child()
        return self._part()

    def _given_up(self) -> list[int]:
        """While no call is under way."""
        return [index for index in self._aims if index not in self._answers]

    def _seen(self) -> int:
        return max((answer.reduction.round for answer in self._answers.values()), default=0)

    async def _call_together(self, count: int) -> None:
        """So many calls, all under way at the same time. The impatient rank may give one of them up."""
        is_impatient = self._comm.rank == self._case.impatient and len(self._given_up()) < _CANCELS
        first, self._begun = self._begun, self._begun + count
        calls = [asyncio.create_task(self._call(first + number, alone=count == 1)) for number in range(count)]
        if is_impatient:
            victim = int(self._generator.integers(count))
            if self._generator.random() < 0.5:
                self._cancel_at_answer(int(self._generator.integers(victim + 1)), calls[victim])
            else:
                await asyncio.wait(calls, timeout=float(self._generator.exponential(_STEP_S)))
                calls[victim].cancel()
        await asyncio.wait(calls)
        for call in calls:
            if not call.cancelled():  # before its first step: then it made no call
                call.result()

    async def _call_alarmed(self) -> None:
        """One call, in which a signal handler may raise, in the main thread and between any two steps of Python."""
        index, self._begun = self._begun, self._begun + 1
        is_alarmed = len(self._given_up()) < _CANCELS
        asyncio.get_running_loop().set_exception_handler(_ignore_alarms)
        signal.signal(signal.SIGALRM, _ring)
        try:
            signal.setitimer(signal.ITIMER_REAL, float(self._generator.exponential(_ALARM_S)) if is_alarmed else 0)
            await self._call(index, alone=True)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except AlarmError:
            pass  # it rings once

    def _cancel_at_answer(self, others: int, call: asyncio.Task[None]) -> None:
        """Cancel `call` when an answer is ready, after so many others; if it is its own, before its caller gets it.

        Nothing but the runtime knows this moment, so its method is shadowed until then.
        """
        operations, loop = self._comm._core.operations, asyncio.get_running_loop()
        answer = operations.contribute
        left = others

        async def contribute(*arguments: Any) -> Reduction:
            nonlocal left
            reduction = await answer(*arguments)
            if left == 0:
                if asyncio.get_running_loop() is loop:
                    call.cancel()
                else:
                    loop.call_soon_threadsafe(call.cancel)
            left -= 1
            return reduction

        operations.contribute = contribute  # type: ignore[assignment, method-assign]
        call.add_done_callback(lambda _: vars(operations).pop("contribute", None))

    async def _call(self, index: int, *, alone: bool) -> None:
        case, now = self._case, asyncio.get_running_loop().time
        self._aims[index] = self._seen() + 1
        contribution = _contribution(case, self._comm, index)
        if (self._comm.rank, index) == (case.forking, case.forks_at):
            self._fork(contribution)
        given, began = _counts(contribution, case), now()
        try:
            reduction = await _OPERATIONS[case.kind](self._comm, contribution, case)
        except asyncio.CancelledError:
            _scribble(contribution)
            return
        value, waited_s = _counts(contribution, case), now() - began
        if not reduction.active:  # a group that had nothing to give leaves the tensors as they are
            value -= given
        missed = tuple(_counts(result, case) for result in reduction.missed)
        self._answers[index] = Answer(value, missed, replace(reduction, missed=()), waited_s if alone else 0.0, alone)

    def _fork(self, contribution: Any) -> None:
        """A child writes into its copy of what is registered, and calls; it lives on while the parent's call runs."""
        self._child = os.fork()
        if self._child:
            return
        _scribble(contribution)
        could_call = 1
        try:
            self._comm.barrier().close()
        except UsageError:
            could_call = 0
        finally:
            os._exit(could_call)

    def _look_after_child(self) -> None:
        if self._child and os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1]):
            raise RuntimeError("a forked child of this rank could call")

    def _part(self) -> Part:
        """A call aims at the round after the newest that the calls before it were given."""
        calls: list[Call] = []
        cancelled: list[Cancelled] = []
        aim = 1
        for index in sorted(self._aims):  # without those whose tasks were cancelled before their first steps
            if index in self._answers:
                answer = self._answers[index]
                calls.append(Call(self._comm.rank, index, aim, *answer))
                aim = answer.reduction.round + 1
            else:
                unsure = self._comm.rank == self._case.alarmed
                cancelled.append(Cancelled(self._comm.rank, index, self._aims[index], aim, unsure))
        return calls, cancelled


def _contribution(case: Case, comm: Communicator, index: int) -> Any:
    """1 in the element of this call alone, in every bucket, behind the padding. Every other call's are registered."""
    own = case.padding + index * case.size + comm.rank
    dtypes = (np.int64, np.float64)[: case.buckets]
    make = comm.empty if index % 2 else np.empty
    buckets = [make(case.padding + case.calls * case.size, dtype) for dtype in dtypes]
    for bucket in buckets:
        bucket.fill(0)
        bucket[own] = 1
    return buckets if case.buckets > 1 else buckets[0]


def _counts(x: Any, case: Case) -> Array:
    buckets = x if isinstance(x, list) else [x]
    return np.stack([bucket[case.padding :].reshape(case.calls, case.size) for bucket in buckets]).astype(np.int64)


def _scribble(x: Any) -> None:
    """The tensors of a call that was given up are the caller's again."""
    for bucket in x if isinstance(x, list) else [x]:
        bucket.fill(-7)
