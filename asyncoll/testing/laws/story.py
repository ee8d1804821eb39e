"""A drawn world (`Case`), and the record of all answers that its ranks got (`Story`). The laws judge the story.

A case is drawn from (kind, size, seed) alone, so these three replay it. Every call of every rank adds 1 to an element
of its own, so a sum shows which contributions, of which ranks and calls, are in it.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import warnings
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from asyncoll import kinds
from asyncoll.algorithms.dense.by_size import DOUBLING_MAX_BYTES
from asyncoll.algorithms.rounds.by_coordinator import COORDINATED_MAX_BYTES
from asyncoll.algorithms.rounds.policies import register_policy
from asyncoll.algorithms.rounds.reduction import Reduction
from asyncoll.communicator import Communicator
from asyncoll.errors import UsageError
from asyncoll.tensors.reductions import Array
from asyncoll.testing.devices import FakeDevice
from asyncoll.testing.laws import methods
from asyncoll.testing.laws.tensors import ContributionLayout, Tensors
from asyncoll.transport.messages.simulated import Crash, Fault, Network, Pause, Silence

KINDS = kinds.OF_ROUNDS
GOSSIP = "gossip"
DENSE = "dense"
SPARSE = "sparse"
TRAINING = "training"
ENDING = "ending"
EPOCHS = "epochs"
ALL_KINDS = kinds.ALL
_WITH_HISTORY = ("solo", "majority", "quorum", "policy")
_ROUNDS = 12
_ITEM_BYTES = 8
_CANCELS = 4  # the most calls that the impatient or the careless rank of a world gives up
_ALARM_S = 0.0005  # mean time from the start of a call to the signal: about as long as a call takes, so many hit it
_OVERLAPS = (1, 1, 2, 4)  # drawn: the most calls of one rank that are in flight at the same time
Program = TypeVar("Program")
Played = TypeVar("Played")
STEP_S = 0.01  # mean computation of a trainer between two calls; the slow rank of a world takes five times as long
_FORK_AT = (1, 3, 5)  # odd calls: their contributions are in registered memory
_SLOW_BYTES_PER_S = 1e7  # a long message takes as long as some steps
_HALF = "half"  # the policy of worlds that are given none
register_policy(_HALF, lambda view: 2 * view.count() >= view.size and any(map(view.has, view.drawn)))
NAP_S = 1000.0  # the sleep of a trainer, longer than all the rest of a world


@dataclass(frozen=True, slots=True)
class Case:
    """One world: the operation and its options, what each rank does, and the simulated network."""

    kind: str
    size: int
    seed: int
    sync_every: int
    history: int
    buckets: int  # tensors in a contribution
    padding: int  # leading elements that stay 0, because short and long arrays take different algorithms
    group_size: int
    fixed: bool
    slow: int  # the rank that computes five times as long
    sleeper: int | None  # the rank that sleeps NAP_S once
    nap_before: int  # the call of the sleeper before which it sleeps
    quitter: int | None  # the rank that leaves the world before the others
    quits_after: int  # calls of the quitter
    impatient: int | None  # the rank that cancels some of its calls
    careless: int | None  # the rank that loses some of its calls: it never awaits them; not where ranks are processes
    gathers: bool  # ranks stay in the world until all have the last round; only if none leaves early, or overlaps calls
    joins: bool  # ranks that have made a call join the operation at their end
    network: Network
    overlap: int  # the most calls that a rank has in flight at the same time
    alarmed: int | None  # the rank whose signal handler raises in some of its calls; only where ranks are processes
    forking: int | None  # the rank that forks a child; only where ranks are processes
    forks_at: int  # the call in which it forks
    on_devices: tuple[int, ...]  # the ranks that have devices; only where that is asked for
    hosts: tuple[int, ...]  # the host of each rank; only where ranks are on several
    bare: int | None  # the host whose ranks share no memory; only there
    method: str = ""  # perhaps a file, a colon, and the name of a policy or a sparse algorithm; empty: as drawn
    rounds: int = _ROUNDS

    @property
    def quorum(self) -> int:
        """The number of ranks that must arrive before a round opens."""
        return {"quorum": self.size // 2 + 1, "full": self.size}.get(self.kind, 1)

    @property
    def candidates(self) -> int:
        return max(1, round(self.size / 3)) if self.kind in ("candidates", "policy") else 1

    @property
    def method_name(self) -> str:
        return self.method.rpartition(":")[2]

    @property
    def policy(self) -> str:
        return self.method_name or _HALF

    @property
    def calls(self) -> int:
        """The most calls that a rank makes. Each answer is of a newer round, so at most `rounds` calls return."""
        return self.rounds + _CANCELS + max(_OVERLAPS) - 1

    @property
    def layout(self) -> ContributionLayout:
        if self.kind == GOSSIP:
            return ContributionLayout(1, self.padding, self.calls, self.size, ("float64",))
        return ContributionLayout(self.buckets, self.padding, self.calls, self.size)

    @property
    def sync_offset(self) -> int:
        """So that the last round waits for all, and nothing stays staged."""
        return -self.rounds % self.sync_every

    def is_synchronous(self, number: int) -> bool:
        return (number + self.sync_offset) % self.sync_every == 0

    def name(self, rank: int) -> str:
        """The name of the operation, as a string of a different type at each rank: names of equal text must match."""
        return _STRINGS[(rank + self.seed) % len(_STRINGS)](self.kind)

    def number(self, rank: int) -> Any:
        """The quorum, as a numpy integer at every other rank, or by default: numbers of equal value must match."""
        if self.kind == "quorum" and rank % 3 == 2:
            return None
        return np.int64(self.quorum) if rank % 2 else self.quorum


class _String(str):
    """A subclass of `str`, as a user may pass."""


_Name = StrEnum("_Name", [kind.upper() for kind in KINDS])  # type: ignore[misc]  # the values are in lower case
_STRINGS: tuple[Callable[[str], str], ...] = (str, np.str_, _String, _Name)


def draw(kind: str, size: int, seed: int) -> Case:
    """The case of `kind`, `size` and `seed`. Raises UsageError for an unknown kind, no ranks or a negative seed.

    The kind may name a method (`methods.split`).
    """
    kind, method = methods.split(kind)
    if kind not in ALL_KINDS:
        raise UsageError(f"unknown kind {kind!r}: use one of {', '.join(ALL_KINDS)}")
    if size < 1 or seed < 0:
        raise UsageError(f"a world has at least one rank, and seeds count from 0: got size {size} and seed {seed}")
    generator = np.random.default_rng([seed, size, ALL_KINDS.index(kind)])

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
        method=method,
        size=size,
        seed=seed,
        sync_every=one_of(3, 4, 5, 6, 7, _ROUNDS),
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
        network=_draw_network(kind, size, seed, Network(1e-4, one_of(1e-4, 2e-3, 2e-2), faults=pauses)),
        overlap=one_of(*_OVERLAPS),
        forking=one_of(None, rank()) if size > 1 else None,
        forks_at=one_of(*_FORK_AT),
        alarmed=one_of(None, rank()) if kind != "group" and size > 1 else None,
        on_devices=tuple(rank for rank in range(size) if one_of(True, False)),
        **_draw_hosts(size, seed),
        **_draw_ends(kind, size, seed),
    )


def _draw_network(kind: str, size: int, seed: int, network: Network) -> Network:
    """May let the end of a rank overtake its last messages. Where programs raise, it has no pauses, and may be slow."""
    generator = np.random.default_rng([seed, size, ALL_KINDS.index(kind), 2])  # of its own, as in `_draw_hosts`
    network = replace(network, ends_overtake=bool(generator.integers(2)))
    if kind == EPOCHS:
        return replace(network, faults=_draw_deaths(size, generator))
    if kind != ENDING:
        return network
    return replace(network, faults=(), bandwidth_bytes_per_s=_SLOW_BYTES_PER_S if generator.integers(2) else math.inf)


def _draw_deaths(size: int, generator: np.random.Generator) -> list[Fault]:
    """Some ranks die, or are taken for lost; one lives. Some at the same time, some while the others agree on that."""
    ranks = generator.permutation(size)[: generator.integers(size)].tolist()
    near = generator.choice([0.0, 1e-4, 1e-2, 0.3])
    kinds = [Silence if generator.integers(4) == 0 else Crash for _ in ranks]
    return [kind(rank, 0.5 + float(generator.uniform(0, near))) for kind, rank in zip(kinds, ranks, strict=True)]


def _draw_hosts(size: int, seed: int) -> dict[str, Any]:
    """At most five hosts, of uneven sizes. Their ranks follow each other or are mixed. One may have no arena."""
    # With a generator of its own, the rest of a case is the same on any hosts.
    generator = np.random.default_rng([seed, size])
    hosts = generator.integers(1 + generator.integers(min(size, 5)), size=size)
    hosts = np.sort(hosts) if generator.integers(2) else hosts
    bare = int(hosts[0]) if generator.integers(4) == 0 else None
    return {"hosts": tuple(hosts.tolist()), "bare": bare}


def _draw_ends(kind: str, size: int, seed: int) -> dict[str, Any]:
    generator = np.random.default_rng([seed, size, ALL_KINDS.index(kind), 1])  # of its own, as in `_draw_hosts`
    careless, gathers = generator.integers(3) == 0, generator.integers(3) == 0
    rank, joins = int(generator.integers(size)), generator.integers(2) == 0
    if kind not in KINDS or kind == "group":
        return {"careless": None, "gathers": bool(gathers), "joins": False}
    return {"careless": rank if careless else None, "gathers": bool(gathers), "joins": bool(joins)}


@dataclass(frozen=True, slots=True, repr=False)  # debug mode of asyncio formats task results: a quarter of the time
class MadeCall:
    """One call and its answer. `sum` and `missed` count contributions by [bucket, number of the call, rank]."""

    rank: int
    index: int
    aim: int  # the round after the newest one that earlier calls of this rank returned
    sum: Array
    missed: tuple[Array, ...]
    reduction: Reduction  # without the tensors of the missed results
    wait_s: float  # 0 unless `alone`, and where a call before it was lost and may have been under way
    alone: bool  # no other call of its rank was in flight

    @property
    def round(self) -> int:
        return self.reduction.round

    @property
    def included(self) -> bool:
        return self.reduction.included


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A cancelled call. Its contribution stays in the operation; if `unsure`, it may never have been submitted."""

    rank: int
    index: int
    aim: int  # the round after the newest one that its rank had got when the call was made
    turn: int  # the round after the newest one that the calls before it returned: it may have waited for those
    unsure: bool = False  # the signal handler raised, perhaps before the call was made


@dataclass(frozen=True, slots=True)
class Joined:
    """The end of a rank that has joined. No call of it was in flight."""

    rank: int
    newest: int  # the newest round that it was told of
    told: int  # the rounds that its join has told of, those that it skips among them


Part = tuple[list[MadeCall], list[Cancelled], list[Joined]]  # the calls of one rank, in order, and its end


@dataclass(frozen=True, slots=True)
class Story:
    """All answers and cancelled calls of a world that has ended."""

    case: Case
    calls: list[list[MadeCall]]  # by rank, in order
    cancelled: list[Cancelled]
    messages: int = 0
    joined: list[Joined] = field(default_factory=list)
    rounds: dict[tuple[int, tuple[int, ...]], list[MadeCall]] = field(default_factory=dict)  # calls by (round, group)

    def __post_init__(self) -> None:
        for call in sorted((call for mine in self.calls for call in mine), key=lambda call: call.round):
            self.rounds.setdefault((call.round, call.reduction.group), []).append(call)

    @property
    def steps(self) -> int:
        return self.case.rounds

    def ended(self, rank: int, number: int) -> bool:
        """Whether the last call of this rank returned a round before `number`."""
        return self.calls[rank][-1].round < number


class WorldStory(NamedTuple, Generic[Program, Played]):
    """A world without rounds, or with other calls beside them, that has ended."""

    program: Program  # of all ranks, drawn from the case
    parts: list[Played]  # by rank
    messages: int
    steps: int  # of all ranks


class AlarmError(Exception):
    """Raised by the signal handler of a case."""


def _ring(*_: object) -> None:
    raise AlarmError


def _ignore_alarms(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Keep AlarmError out of the log: the loop logs what a signal handler raises inside a callback."""
    if not isinstance(context.get("exception"), AlarmError):
        loop.default_exception_handler(context)


class CaseRank:
    """One rank of a case."""

    def __init__(self, comm: Communicator, case: Case, *seed: int) -> None:
        """`seed` is that of what this rank draws while the world runs, beside that of the case."""
        self._comm = comm
        self._case = case
        self._generator = np.random.default_rng([case.seed, *seed, comm.rank])
        self._step_s = STEP_S * (5 if comm.rank == case.slow else 1)

    async def _compute(self) -> None:
        await asyncio.sleep(self._generator.exponential(self._step_s))

    @staticmethod
    async def _finish(calls: Sequence[asyncio.Task[None]]) -> None:
        """Wait for all calls. Raises the error of one that was not cancelled."""
        await asyncio.wait(calls)
        # A task that was cancelled before its first step has made no call. Errors that nobody takes are printed.
        for error in [call.exception() for call in calls if not call.cancelled()]:
            if error is not None:
                raise error


class StoryTrainer(CaseRank):
    """A rank that trains."""

    def __init__(self, comm: Communicator, case: Case, device: FakeDevice | None = None) -> None:
        super().__init__(comm, case)
        self._tensors = Tensors(case.layout, comm, device)
        self._gathers = case.gathers and case.quitter is None and case.overlap == 1
        self._begun = 0  # number of calls for which a task was made
        self._lost = -1  # index of the newest call that has no receiver, and may be under way until a later one is over
        self._answers: dict[int, MadeCall] = {}  # by index of the call; `aim` as in `_aims`
        self._child = 0  # process id of the forked child; 0 if there is none
        self._aims: dict[int, int] = {}  # by index of the call: the earliest round that it aims at

    async def run(self) -> Part:
        """Make calls at random moments until one returns the last round. Returns all answers and cancelled calls."""
        case, rank = self._case, self._comm.rank
        while self._seen() < case.rounds and not (rank == case.quitter and len(self._answers) >= case.quits_after):
            await self._compute()
            if rank == case.sleeper and len(self._answers) == case.nap_before:
                await asyncio.sleep(NAP_S)
            if rank == case.alarmed:
                await self._call_alarmed()
            elif rank == case.careless and self._may_give_up() and self._generator.random() < 0.5:
                await self._call_carelessly()
            else:
                await self._call_together(int(self._generator.integers(1, case.overlap + 1)))
        self._look_after_child()
        if self._gathers:
            # No round comes after the last one.
            await self._comm.barrier()
        joined = [await self._join()] if case.joins and self._aims else []
        return *self._part(), joined

    def _may_give_up(self) -> bool:
        """Whether one more call may be cancelled. Valid only while no call is in flight.

        A task that was cancelled before its first step has made no call, but its index is used up, too.
        """
        return self._begun - len(self._answers) < _CANCELS

    def _seen(self) -> int:
        return max((call.round for call in self._answers.values()), default=0)

    async def _call_together(self, count: int) -> None:
        """Make `count` calls that are in flight at the same time. The impatient rank may cancel one of them."""
        is_impatient = self._comm.rank == self._case.impatient and self._may_give_up()
        first, self._begun = self._begun, self._begun + count
        calls = [asyncio.create_task(self._call(first + number, alone=count == 1)) for number in range(count)]
        if is_impatient:
            victim = int(self._generator.integers(count))
            if self._generator.random() < 0.5:
                self._cancel_at_answer(int(self._generator.integers(victim + 1)), calls[victim])
            else:
                await asyncio.wait(calls, timeout=float(self._generator.exponential(STEP_S)))
                calls[victim].cancel()
        await self._finish(calls)

    async def _call_alarmed(self) -> None:
        """Make one call in which a signal handler may raise, in the main thread, between any two bytecodes."""
        is_alarmed = self._may_give_up()
        index, self._begun = self._begun, self._begun + 1
        asyncio.get_running_loop().set_exception_handler(_ignore_alarms)
        signal.signal(signal.SIGALRM, _ring)
        try:
            signal.setitimer(signal.ITIMER_REAL, float(self._generator.exponential(_ALARM_S)) if is_alarmed else 0)
            await self._call(index, alone=True)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except AlarmError:
            pass  # `setitimer` without an interval fires once

    async def _call_carelessly(self) -> None:
        """Make a call that is lost, and another one, which is awaited.

        The first one is lost before the other is made, while that is under way, or after its answer. If ranks gather,
        it is lost before: otherwise the other may wait for a round after the last one.
        """
        first, self._begun = self._begun, self._begun + 2
        moment = 0 if self._gathers else int(self._generator.integers(3))
        lost = [self._begin(first)[-1]]  # the only reference
        if moment == 0:
            await self._lose(first, lost)
        other = asyncio.create_task(self._call(first + 1, alone=moment == 0))
        await asyncio.sleep(0)  # so it is made
        if moment == 1:
            await self._lose(first, lost)
        await other
        if moment == 2:
            await self._lose(first, lost)

    async def _lose(self, index: int, lost: list[Coroutine[Any, Any, Reduction]]) -> None:
        """Drop the call, close it, or cancel its task, which has not made a step."""
        match int(self._generator.integers(3)):
            case 0:
                self._lost = index
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", RuntimeWarning)  # it was never awaited
                    lost.clear()
            case 1:
                self._lost = index
                lost.pop().close()
            case _:
                task = asyncio.ensure_future(lost.pop())
                task.cancel()
                await asyncio.wait([task])

    def _cancel_at_answer(self, others: int, call: asyncio.Task[None]) -> None:
        """Cancel `call` at the moment at which an answer is ready, after `others` other answers.

        If the answer is its own, the caller does not get it. Only the runtime knows this moment, so its method is
        replaced until the call ends.
        """
        operations, loop = self._comm._core.operations, asyncio.get_running_loop()
        answer = operations.hand_over
        left = others

        def hand_over(*arguments: Any) -> Reduction:
            nonlocal left
            reduction = answer(*arguments)
            if left == 0:
                if asyncio.get_running_loop() is loop:
                    call.cancel()
                else:
                    loop.call_soon_threadsafe(call.cancel)
            left -= 1
            return reduction

        operations.hand_over = hand_over  # type: ignore[assignment, method-assign]
        call.add_done_callback(lambda _: vars(operations).pop("hand_over", None))

    async def _call(self, index: int, *, alone: bool) -> None:
        tensors, now = self._tensors, asyncio.get_running_loop().time
        began, is_after_lost = now(), self._lost > max(self._answers, default=-1)
        contribution, given, call = self._begin(index)
        try:
            reduction = await call
        except asyncio.CancelledError:
            tensors.scribble(contribution)
            return
        wait_s = now() - began if alone and not is_after_lost else 0.0
        # A round without contributors leaves the caller's tensors unchanged.
        value = tensors.counts(contribution, less=0 if reduction.active else given)
        missed = tuple(map(tensors.counts, reduction.missed))
        tensors.scribble(contribution)
        reduction = replace(reduction, missed=(), result=None)
        self._answers[index] = MadeCall(
            self._comm.rank, index, self._aims[index], value, missed, reduction, wait_s, alone
        )

    def _begin(self, index: int) -> tuple[Any, Array, Coroutine[Any, Any, Reduction]]:
        """Make call `index`. Returns its tensors, what they contribute, and the coroutine."""
        self._aims[index] = self._seen() + 1
        tensors = self._tensors
        with tensors.stream(index):
            contribution = tensors.contribution(index)
            if (self._comm.rank, index) == (self._case.forking, self._case.forks_at):
                self._fork(contribution)
            given = tensors.counts(contribution)
            return contribution, given, _reduced(self._case, self._comm, contribution)

    def _fork(self, contribution: Any) -> None:
        """Fork a child that overwrites its copy of the registered contribution, and tries to make a call.

        The child runs while the parent's call is in flight. Its writes must not reach the parent, and its call must be
        refused.
        """
        self._child = os.fork()
        if self._child:
            return
        self._tensors.scribble(contribution)
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

    async def _join(self) -> Joined:
        last = await self._comm.join(self._case.name(self._comm.rank), self._tensors.contribution(0))
        if last is None:
            return Joined(self._comm.rank, self._seen(), 0)
        return Joined(self._comm.rank, last.round, len(last.results()) + last.skipped)

    def _part(self) -> tuple[list[MadeCall], list[Cancelled]]:
        """The calls in order, each with its aim: the round after the newest one that earlier calls returned."""
        calls: list[MadeCall] = []
        cancelled: list[Cancelled] = []
        aim = 1
        for index in sorted(self._aims):  # a task that was cancelled before its first step has no aim, and is left out
            if index in self._answers:
                calls.append(replace(self._answers[index], aim=aim))
                aim = calls[-1].round + 1
            else:
                unsure = self._comm.rank == self._case.alarmed
                cancelled.append(Cancelled(self._comm.rank, index, self._aims[index], aim, unsure))
        return calls, cancelled


def _reduced(case: Case, comm: Communicator, x: Any) -> Coroutine[Any, Any, Reduction]:
    """The call of the case's operation."""
    options: dict[str, Any] = {
        "name": case.name(comm.rank),
        "sync_every": case.sync_every,
        "sync_offset": case.sync_offset,
    }
    if case.kind == "group":
        return comm.group_allreduce(x, group_size=case.group_size, fixed=case.fixed, **options)
    options["history"] = case.history
    if case.kind == "policy":
        return comm.policy_allreduce(x, policy=case.policy, candidates=case.candidates, seed=case.seed, **options)
    if case.kind == "solo":
        return comm.solo_allreduce(x, **options)
    if case.kind in ("quorum", "full"):
        return comm.quorum_allreduce(x, quorum=case.number(comm.rank), **options)
    return comm.majority_allreduce(x, seed=case.seed, candidates=case.candidates, **options)
