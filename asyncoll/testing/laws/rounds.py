"""The laws of wait-avoiding collectives. A law yields the breaches in a story; its docstring states the law.

The contribution of a rank to a group allreduce replaces its last one and stays, as models do in WAGMA-SGD (Li et al.,
TPDS 2021). In all other kinds contributions add up and are consumed, as gradients are in eager-SGD (Li et al.,
"Taming unbalanced training workloads in deep learning with partial collective operations", PPoPP 2020).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from asyncoll.algorithms.rounds.grouping import partition
from asyncoll.algorithms.rounds.operation import Opening, Operation
from asyncoll.algorithms.rounds.policies import allows, check_rank
from asyncoll.tensors.reductions import Array, ReduceOp
from asyncoll.testing.laws.story import NAP_S, Cancelled, Case, MadeCall, Story


@dataclass(frozen=True, slots=True)
class Breach:
    """The round (0 in a world of gossip) and the rank at which a law is broken, and what is wrong there."""

    round: int
    rank: int
    what: str


Law = Callable[[Story], Iterator[Breach]]


def agreement(story: Story) -> Iterator[Breach]:
    """All members of a round's group get the same value, the same `active` and the same group, the one of the round."""
    for (number, group), calls in story.rounds.items():
        first = calls[0]
        for call in calls:
            if call.rank not in group or set(group) not in map(set, _groups(story.case, number)):
                yield Breach(number, call.rank, f"its group was {group}")
            if not np.array_equal(call.sum, first.sum):
                yield Breach(number, call.rank, f"it got another value than rank {first.rank}")
            given, expected = call.reduction, first.reduction
            if (given.active, given.ranks) != (expected.active, expected.ranks):
                yield Breach(number, call.rank, f"it got other contributors than rank {first.rank}")


def wholeness(story: Story) -> Iterator[Breach]:
    """All tensors of a contribution enter the same rounds."""
    for call in _calls(story):
        for result in (call.sum, *call.missed):
            if np.any(result != result[0]):
                yield Breach(call.round, call.rank, "the tensors of its result hold different contributions")


def exactly_once(story: Story) -> Iterator[Breach]:
    """No contribution is in two rounds, nor twice in one."""
    so_far = np.zeros((story.case.calls, story.case.size), np.int64)
    for number, value, _ in _sums(story):
        so_far += value
        for index, rank in np.argwhere((value < 0) | (so_far > 1) & (value > 0)).tolist():
            yield Breach(number, rank, f"its contribution of call {index} is counted again")


def conservation(story: Story) -> Iterator[Breach]:
    """All rounds together hold every submitted contribution, and nothing else.

    A cancelled call has submitted its contribution. A call that ended by an exception of a signal handler may have.
    Every round is returned by a call, unless only cancelled calls have waited for it. A call waits for one round.
    """
    case = story.case
    unknown = _unknown(story)
    for count, number in enumerate(unknown, 1):
        if sum(call.turn <= number for call in story.cancelled) < count:
            yield Breach(number, 0, "no call returned it")
    total = np.zeros((case.calls, case.size), np.int64)
    for _, value, _ in _sums(story):
        total += value
    for call in _submitted(story):
        if isinstance(call, Cancelled) and call.unsure and not total[call.index, call.rank]:
            continue
        total[call.index, call.rank] -= 1
        due = _due(story, call)
        may_be_unknown = any(call.aim <= number <= due for number in unknown)
        if total[call.index, call.rank] < 0 and not may_be_unknown and due <= case.rounds:
            yield Breach(call.aim, call.rank, f"its contribution of call {call.index} is in no round")
    for index, rank in np.argwhere(total > 0).tolist():
        yield Breach(case.rounds, rank, f"a sum holds a contribution of call {index}, which it never made")


def one_each(story: Story) -> Iterator[Breach]:
    """The sum of a group holds at most one contribution of each rank."""
    for number, value, _ in _sums(story):
        for rank in np.flatnonzero(np.abs(value).sum(0) > 1).tolist():
            yield Breach(number, rank, f"the sum holds its contributions {np.flatnonzero(value[:, rank]).tolist()}")


def newest(story: Story) -> Iterator[Breach]:
    """The sum of a group holds the newest contributions of its members at the start of the round, and no others."""
    for number, value, group in _sums(story):
        for rank in range(story.case.size):
            found = np.flatnonzero(value[:, rank])
            held = int(found[0]) if len(found) else -1
            oldest, newest = _staged(story.calls[rank], number) if rank in group else (-1, -1)
            if not oldest <= held <= newest:
                yield Breach(number, rank, f"the sum holds its call {held}, not {oldest} to {newest} (-1: none)")


def never_back(story: Story) -> Iterator[Breach]:
    """A later round never holds an older contribution of a rank than an earlier round did."""
    so_far = np.full(story.case.size, -1)
    for number, value, _ in _sums(story):
        held = np.where(value.any(0), value.argmax(0), so_far)
        for rank in np.flatnonzero(held < so_far).tolist():
            yield Breach(number, rank, f"the sum holds its call {held[rank]}; an earlier round held {so_far[rank]}")
        so_far = np.maximum(so_far, held)


def staleness(story: Story) -> Iterator[Breach]:
    """A contribution enters no round before the one that its call aims at, and none after the next synchronous one."""
    entered: dict[tuple[int, int], int] = {}
    for number, value, _ in _sums(story):
        for index, rank in np.argwhere(value).tolist():
            entered.setdefault((rank, index), number)
    for call in _submitted(story):
        number, due = entered.get((call.rank, call.index), call.aim), _due(story, call)
        if not call.aim <= number <= due:
            what = f"its contribution of call {call.index} entered round {number}, and was due by round {due}"
            yield Breach(call.aim, call.rank, what)


def inclusion(story: Story) -> Iterator[Breach]:
    """`included` is true if and only if the returned sum holds the contribution of the call."""
    for call in _calls(story):
        if bool(call.sum[0, call.index, call.rank]) != call.included:
            yield Breach(call.round, call.rank, f"call {call.index} returned included={call.included}")


def contributors(story: Story) -> Iterator[Breach]:
    """`ranks` are the ranks with a contribution in the sum, and `active` is their number."""
    for call in _calls(story):
        found = np.flatnonzero(call.sum[0].any(0)).tolist()
        if (found, len(found)) != (list(call.reduction.ranks), call.reduction.active):
            given = f"ranks={call.reduction.ranks}, active={call.reduction.active}"
            yield Breach(call.round, call.rank, f"{given}, but ranks {found} are in the sum")


def quorum(story: Story) -> Iterator[Breach]:
    """A round has at least as many contributors as must arrive to open it, not counting ranks that have ended.

    A cancelled call takes part in a round, too, so the rank that cancels may need one round more than the others.
    """
    for call in _calls(story):
        ended = sum(story.ended(rank, call.round) for rank in range(story.case.size))
        if call.reduction.active < (least := story.case.quorum - ended):
            yield Breach(call.round, call.rank, f"{call.reduction.active} ranks contributed, fewer than {least}")


def drawn_ranks(story: Story) -> Iterator[Breach]:
    """A round that waits for a drawn rank has a contribution of one, unless one of them has ended."""
    for call in _calls(story):
        drawn = _drawn(story.case, call.round)
        if drawn and not any(rank in call.reduction.ranks or story.ended(rank, call.round) for rank in drawn):
            yield Breach(call.round, call.rank, f"none of the drawn ranks {drawn} contributed")


def permission(story: Story) -> Iterator[Breach]:
    """A round of a policy begins with contributions of ranks of which the policy says that it may, or of all.

    Ranks that have ended count as arrived.
    """
    case = story.case
    for call in _calls(story) if case.kind == "policy" else ():
        ended = {rank for rank in range(case.size) if story.ended(rank, call.round)}
        if not (case.is_synchronous(call.round) or _may_begin(case, call.round, {*call.reduction.ranks, *ended})):
            yield Breach(call.round, call.rank, f"{case.policy!r} does not let it begin with {call.reduction.ranks}")


def synchrony(story: Story) -> Iterator[Breach]:
    """Every `sync_every`-th round, and no other, waits for all: each running rank contributes, and gets its result.

    It is called synchronous, at all ranks alike, unless a rank has ended. A rank whose call is cancelled contributes,
    too, and may get no result.
    """
    case = story.case
    told: dict[int, bool] = {}
    for call in _calls(story):
        said, is_due = call.reduction.synchronous, case.is_synchronous(call.round)
        has_ended = any(story.ended(rank, call.round) for rank in range(case.size))
        if (
            said != told.setdefault(call.round, said)
            or (said and not is_due)
            or (is_due and not said and not has_ended)
        ):
            yield Breach(call.round, call.rank, f"call {call.index} returned synchronous={said}")
    for number, value, _ in _sums(story):
        for rank in np.flatnonzero(~value.any(0)).tolist() if case.is_synchronous(number) else ():
            if not story.ended(rank, number):
                yield Breach(number, rank, "it did not contribute to this synchronous round")
    for number in filter(case.is_synchronous, range(1, case.rounds + 1)):
        gave_up = {call.rank for call in story.cancelled if call.aim <= number}
        for rank in set(range(case.size)) - gave_up:
            is_in = any(call.round == number and call.included for call in story.calls[rank])
            if not is_in and not story.ended(rank, number):
                yield Breach(number, rank, "it was not in this synchronous round")


def history(story: Story) -> Iterator[Breach]:
    """A rank late by at most `history` rounds gets each result that it missed, once, oldest first.

    `skipped` counts older results, so every round between two calls of a rank is accounted for. If calls of a rank
    overlap and one has no receiver, a later call may report its rounds; as skipped, if a call between them had an
    answer. No call gets a missed result from before the round that an earlier call got.
    """
    values = {number: value for number, value, _ in _sums(story)}
    for calls in story.calls:
        alarmed = {each.rank for each in story.cancelled if each.unsure}
        told = 0
        for call in calls:
            if all(other.alone for other in calls) and call.rank not in alarmed:
                yield from _completes(call, values, story.case.history)
            else:
                yield from _matches(call, values, told)
            told = max(told, call.round)
        if story.case.kind != "group":  # two rounds of a group may have equal results, as contributions stay
            yield from _balances(calls, alarmed)


def _completes(call: MadeCall, values: dict[int, Array], history: int) -> Iterator[Breach]:
    """The call reports every round since the call before it."""
    late = call.round - call.aim
    kept = min(late, history)
    if (len(call.missed), call.reduction.skipped) != (kept, late - kept):
        returned = f"{len(call.missed)} missed results and skipped={call.reduction.skipped}"
        yield Breach(call.round, call.rank, f"call {call.index} aimed at round {call.aim} and returned {returned}")
    for number, result in zip(range(call.round - kept, call.round), call.missed, strict=False):
        if number in values and not np.array_equal(result[0], values[number]):
            yield Breach(call.round, call.rank, f"call {call.index} got a wrong missed result for round {number}")


def _matches(call: MadeCall, values: dict[int, Array], told: int) -> Iterator[Breach]:
    """The missed results of the call are results of rounds between round `told` and its own, oldest first."""
    are_known = all(number in values for number in range(told + 1, call.round))  # a call returned each of them
    since = told
    for result in call.missed:
        equal = [number for number, value in values.items() if np.array_equal(result[0], value)]
        later = [number for number in equal if since < number < call.round]
        if later:
            since = later[0]
        elif equal or are_known:
            yield Breach(call.round, call.rank, f"call {call.index} got a missed result of no round since {since}")


def _balances(calls: list[MadeCall], alarmed: set[int]) -> Iterator[Breach]:
    """Each round so far has been reported once, whenever no other call of the rank is in flight.

    For an alarmed rank only an upper bound holds: the exception of the signal handler may come after the answer and
    before the caller has it.
    """
    reported: list[Array] = []
    count = 0
    for call in calls:
        count += 1 + len(call.missed) + call.reduction.skipped
        for result in (call.sum, *call.missed):
            if result.any() and any(np.array_equal(result, other) for other in reported):
                yield Breach(call.round, call.rank, f"call {call.index} got a result that its rank had got before")
            reported.append(result)
        if count > call.round or (call.alone and count != call.round and call.rank not in alarmed):
            yield Breach(call.round, call.rank, f"up to call {call.index} it got reports of {count} rounds")


def farewell(story: Story) -> Iterator[Breach]:
    """A rank that has joined was told of each round once, as a result, as a missed one, or as one that it skips.

    So was a rank whose calls were cancelled, or never awaited. For an alarmed rank only an upper bound holds.
    """
    alarmed = {each.rank for each in story.cancelled if each.unsure}
    for joined in story.joined:
        calls = story.calls[joined.rank]
        told = joined.told + sum(1 + len(call.missed) + call.reduction.skipped for call in calls)
        if told > joined.newest or (told < joined.newest and joined.rank not in alarmed):
            yield Breach(joined.newest, joined.rank, f"it was told of {told} rounds until it had joined")


def lag(story: Story) -> Iterator[Breach]:
    """`lag` is the number of rounds from the one that the call aimed at to the one that it was given.

    The call after a cancelled one may aim at a later round than its caller knows.
    """
    for calls in story.calls:
        gave_up = any(each.rank == call.rank for call in calls[:1] for each in story.cancelled)
        for call in calls:
            late = call.round - call.aim
            least = 0 if gave_up else late
            if not least <= call.reduction.lag <= late:
                yield Breach(call.round, call.rank, f"call {call.index}, {late} rounds late, got {call.reduction.lag}")


def liveness(story: Story) -> Iterator[Breach]:
    """A sleeping trainer delays only synchronous and full rounds, and rounds that it alone may open."""
    for call in _calls(story):
        if call.wait_s > NAP_S / 2 and not _waits_for_the_sleeper(story.case, call.round):
            yield Breach(call.round, call.rank, f"call {call.index} waited for {call.wait_s:.0f} s")


_ALWAYS: tuple[Law, ...] = (inclusion, contributors, synchrony, history, farewell, lag, liveness)
_CONSUMED: tuple[Law, ...] = (exactly_once, conservation, staleness, quorum, drawn_ranks, permission)
_DRAWN = ("majority", "candidates")  # kinds
_STAYING: tuple[Law, ...] = (one_each, never_back, newest, staleness)


def laws_of(kind: str) -> tuple[Law, ...]:
    """The laws of a kind, in the order in which they are checked: later laws rely on earlier ones."""
    return (agreement, wholeness, *(_STAYING if kind == "group" else _CONSUMED), *_ALWAYS)


def _calls(story: Story) -> Iterator[MadeCall]:
    return (call for mine in story.calls for call in mine)


def _submitted(story: Story) -> Iterator[MadeCall | Cancelled]:
    return itertools.chain(_calls(story), story.cancelled)


def _due(story: Story, call: MadeCall | Cancelled) -> int:
    """The last synchronous round that may take this contribution.

    That is the next synchronous round. Each call that the rank cancelled since it last got a result may have been its
    part in one, and moves the limit by one synchronous round.
    """
    turn = call.turn if isinstance(call, Cancelled) else call.aim
    before = [each for each in story.cancelled if each.rank == call.rank and each.index < call.index]
    given_up = sum(each.turn == turn for each in before)
    every, offset = story.case.sync_every, story.case.sync_offset
    return ((turn - 1 + offset) // every + 1 + given_up) * every - offset


def _sums(story: Story) -> Iterator[tuple[int, Array, tuple[int, ...]]]:
    """(round, sum, group) of every result that a call returned, oldest first."""
    return ((number, calls[0].sum[0], group) for (number, group), calls in story.rounds.items())


def _unknown(story: Story) -> list[int]:
    """The rounds that no call returned."""
    given = {number for number, _, _ in _sums(story)}
    return [number for number in range(1, story.case.rounds + 1) if number not in given]


def _groups(case: Case, number: int) -> Iterable[tuple[int, ...]]:
    if case.kind != "group" or case.is_synchronous(number):
        return (tuple(range(case.size)),)
    return partition(case.size, case.group_size, 1 if case.fixed else number)


def _staged(calls: list[MadeCall], number: int) -> tuple[int, int]:
    """The oldest and the newest call of a rank whose contribution may be its newest one in round `number`; -1 for none.

    A late call returns the newest result at once, while the next round may already run. Then its contribution enters
    the round after that one.
    """

    oldest = [call.index for call in calls if call.round + (0 if call.included else 2) <= number]
    newest = [call.index for call in calls if call.round + (0 if call.included else 1) <= number]
    return max(oldest, default=-1), max(newest, default=-1)


def _drawn(case: Case, number: int) -> tuple[int, ...]:
    """The ranks of which a round waits for one; none if it waits for any ranks."""
    return _drawing(case).drawn(number, case.size) if case.kind in _DRAWN else ()


def _drawing(case: Case) -> Operation:
    return Operation(case.kind, (), ReduceOp.SUM, Opening.MAJORITY, candidates=case.candidates, seed=case.seed)


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A `RoundView`: these ranks have arrived."""

    number: int
    size: int
    drawn: tuple[int, ...]
    ranks: frozenset[int]

    @property
    def arrived(self) -> int:
        return len(self.ranks)

    def count(self) -> int:
        return len(self.ranks)

    def has(self, rank: int) -> bool:
        check_rank(rank, self.size)
        return rank in self.ranks


def _may_begin(case: Case, number: int, ranks: Iterable[int]) -> bool:
    """Whether the policy lets a round begin when these ranks have arrived."""
    view = _Arrived(number, case.size, _drawing(case).drawn(number, case.size), frozenset(ranks))
    return view.count() == case.size or allows(case.policy, view)


def _waits_for_the_sleeper(case: Case, number: int) -> bool:
    if case.kind == "policy" and not _may_begin(case, number, {*range(case.size)} - {case.sleeper}):
        return True
    return _drawn(case, number) == (case.sleeper,) or case.is_synchronous(number) or case.quorum == case.size
