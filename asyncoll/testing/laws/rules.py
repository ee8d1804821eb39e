"""The laws of wait-avoiding collectives. Each is given a story and yields where it is broken; its docstring states it.

Contributions to a group allreduce replace and stay; in all other kinds they add up and are consumed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from asyncoll.algorithms.rounds.grouping import partition
from asyncoll.algorithms.rounds.operation import Opening, Operation
from asyncoll.tensors.reductions import Array, ReduceOp
from asyncoll.testing.laws.story import NAP_S, Call, Cancelled, Case, Story


@dataclass(frozen=True, slots=True)
class Breach:
    """Where a law is broken."""

    round: int
    rank: int
    what: str


Law = Callable[[Story], Iterator[Breach]]


def agreement(story: Story) -> Iterator[Breach]:
    """All members of a round's group are given one value, one `active` and one group, which is the round's."""
    for (number, group), calls in story.rounds.items():
        first = calls[0]
        for call in calls:
            if call.rank not in group or set(group) not in map(set, _groups(story.case, number)):
                yield Breach(number, call.rank, f"it was in the group {group}")
            if not np.array_equal(call.sum, first.sum):
                yield Breach(number, call.rank, f"it was given another value than rank {first.rank}")
            if call.reduction.active != first.reduction.active:
                yield Breach(number, call.rank, f"it was told another number of contributors than rank {first.rank}")


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
    """What was submitted is what was summed: all rounds together hold every contribution of every call.

    A call that is cancelled has submitted, too; one that an exception of a signal handler has ended may have.
    """
    case = story.case
    given = {number for number, _, _ in _sums(story)}
    unknown = [number for number in range(1, case.rounds + 1) if number not in given]
    if not story.cancelled:  # otherwise a round may have been for a caller alone who has given up
        yield from (Breach(number, 0, "nobody was given it") for number in unknown)
    total = np.zeros((case.calls, case.size), np.int64)
    for _, value, _ in _sums(story):
        total += value
    for call in _submitted(story):
        if isinstance(call, Cancelled) and call.unsure and not total[call.index, call.rank]:
            continue
        total[call.index, call.rank] -= 1
        if total[call.index, call.rank] < 0 and not unknown and _due(story, call) <= case.rounds:
            yield Breach(call.aim, call.rank, f"its contribution of call {call.index} is in no round")
    for index, rank in np.argwhere(total > 0).tolist():
        yield Breach(case.rounds, rank, f"a contribution of call {index} that it never made is in a sum")


def one_each(story: Story) -> Iterator[Breach]:
    """Of each rank, a group's sum holds one contribution at most: that of one call, once."""
    for number, value, _ in _sums(story):
        for rank in np.flatnonzero(np.abs(value).sum(0) > 1).tolist():
            yield Breach(number, rank, f"the sum holds its calls {np.flatnonzero(value[:, rank]).tolist()}")


def newest(story: Story) -> Iterator[Breach]:
    """A group's sum is of its members' newest contributions: those staged when the round began, of no other rank."""
    for number, value, group in _sums(story):
        for rank in range(story.case.size):
            found = np.flatnonzero(value[:, rank])
            held = int(found[0]) if len(found) else -1
            oldest, newest = _staged(story.calls[rank], number) if rank in group else (-1, -1)
            if not oldest <= held <= newest:
                yield Breach(number, rank, f"the sum holds call {held} of it, not {oldest} to {newest} (-1: none)")


def never_back(story: Story) -> Iterator[Breach]:
    """A later round never holds an older contribution of a rank than an earlier round did."""
    so_far = np.full(story.case.size, -1)
    for number, value, _ in _sums(story):
        held = np.where(value.any(0), value.argmax(0), so_far)
        for rank in np.flatnonzero(held < so_far).tolist():
            yield Breach(number, rank, f"it holds call {held[rank]}, and an earlier round held {so_far[rank]}")
        so_far = np.maximum(so_far, held)


def staleness(story: Story) -> Iterator[Breach]:
    """A contribution enters no round before the one that its call aimed at, and none after the next synchronous one."""
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
    """`included` says whether the call's own contribution is in the sum that it returned."""
    for call in _calls(story):
        if bool(call.sum[0, call.index, call.rank]) != call.included:
            yield Breach(call.round, call.rank, f"call {call.index} was told included={call.included}")


def contributors(story: Story) -> Iterator[Breach]:
    """`active` is the number of ranks that have a contribution in the sum."""
    for call in _calls(story):
        if (count := np.count_nonzero(call.sum[0].any(0))) != call.reduction.active:
            yield Breach(call.round, call.rank, f"active={call.reduction.active}, but the sum is of {count} ranks")


def quorum(story: Story) -> Iterator[Breach]:
    """A round has at least as many contributors as had to arrive to open it, but for ranks that have ended.

    A call that was given up stands for a round, too: so one rank may need a round more than all others.
    """
    for call in _calls(story):
        ended = sum(story.ended(rank, call.round) for rank in range(story.case.size))
        if call.reduction.active < (least := story.case.quorum - ended):
            yield Breach(call.round, call.rank, f"{call.reduction.active} contributed, at least {least} must have")


def synchrony(story: Story) -> Iterator[Breach]:
    """Every `sync_every`-th round, and no other, is synchronous: all ranks that go on contribute and are given it."""
    case = story.case
    for call in _calls(story):
        if call.reduction.synchronous != case.is_synchronous(call.round):
            yield Breach(call.round, call.rank, f"call {call.index} was told synchronous={call.reduction.synchronous}")
    for number in range(case.sync_every, case.rounds + 1, case.sync_every):
        gave_up = {call.rank for call in story.cancelled if call.aim <= number}
        for rank in set(range(case.size)) - gave_up:
            there = any(call.round == number and call.included for call in story.calls[rank])
            if not there and not story.ended(rank, number):
                yield Breach(number, rank, "it was not in this synchronous round")


def history(story: Story) -> Iterator[Breach]:
    """A rank late by at most `history` rounds gets each result that it missed, once, oldest first.

    `skipped` counts the older ones, so no round between two calls of a rank is unaccounted for. Among overlapping
    calls, the rounds of one that was given up may be told by any later one.
    """
    values = {number: value for number, value, _ in _sums(story)}
    for calls in story.calls:
        alarmed = {each.rank for each in story.cancelled if each.unsure}
        for call in calls:
            if all(other.alone for other in calls) and call.rank not in alarmed:
                yield from _completes(call, values, story.case.history)
            else:
                yield from _matches(call, values)
        if story.case.kind != "group":  # whose results may be the same again
            yield from _balances(calls, alarmed)


def _completes(call: Call, values: dict[int, Array], history: int) -> Iterator[Breach]:
    """It tells of every round since the call before."""
    late = call.round - call.aim
    kept = min(late, history)
    if (len(call.missed), call.reduction.skipped) != (kept, late - kept):
        told = f"{len(call.missed)} missed results and skipped={call.reduction.skipped}"
        yield Breach(call.round, call.rank, f"it aimed at round {call.aim} and was given {told}")
    for number, result in zip(range(call.round - kept, call.round), call.missed, strict=False):
        if number in values and not np.array_equal(result[0], values[number]):
            yield Breach(call.round, call.rank, f"call {call.index} was given something else as its missed result")


def _matches(call: Call, values: dict[int, Array]) -> Iterator[Breach]:
    """Missed results are those of older rounds, oldest first."""
    older = iter([number for number in values if number < call.round])
    if any(number not in values for number in range(1, call.round)):  # some were given to nobody but as missed results
        return
    for result in call.missed:
        if not any(np.array_equal(result[0], values[number]) for number in older):
            yield Breach(call.round, call.rank, f"call {call.index} was given something else as its missed result")


def _balances(calls: list[Call], alarmed: set[int]) -> Iterator[Breach]:
    """Whenever no other call is under way, each round so far was told once.

    An answer may have reached its caller, and an exception of a signal handler have come before the next step.
    """
    told: list[Array] = []
    count = 0
    for call in calls:
        count += 1 + len(call.missed) + call.reduction.skipped
        for result in (call.sum, *call.missed):
            if result.any() and any(np.array_equal(result, other) for other in told):
                yield Breach(call.round, call.rank, f"call {call.index} was given a result that it had been given")
            told.append(result)
        if count > call.round or (call.alone and count != call.round and call.rank not in alarmed):
            yield Breach(call.round, call.rank, f"after call {call.index} it has been told of {count} rounds")


def liveness(story: Story) -> Iterator[Breach]:
    """A trainer that naps delays no rounds but those that wait for it: synchronous, full, or for it alone to open."""
    for call in _calls(story):
        if call.wait_s > NAP_S / 2 and not _waits_for_the_sleeper(story.case, call.round):
            yield Breach(call.round, call.rank, f"call {call.index} waited for {call.wait_s:.0f} s")


_ALWAYS: tuple[Law, ...] = (inclusion, contributors, synchrony, history, liveness)
_CONSUMED: tuple[Law, ...] = (exactly_once, conservation, staleness, quorum)
_STAYING: tuple[Law, ...] = (one_each, never_back, newest, staleness)


def laws_of(kind: str) -> tuple[Law, ...]:
    """The laws of a kind; the later ones rely on the earlier ones."""
    return (agreement, wholeness, *(_STAYING if kind == "group" else _CONSUMED), *_ALWAYS)


def _calls(story: Story) -> Iterator[Call]:
    return (call for mine in story.calls for call in mine)


def _submitted(story: Story) -> Iterator[Call | Cancelled]:
    return itertools.chain(_calls(story), story.cancelled)


def _due(story: Story, call: Call | Cancelled) -> int:
    """The synchronous round that takes this contribution at the latest.

    That is the next one, but each call that this rank had given up since it last heard of a round may have been its
    part in one of those.
    """
    turn = call.turn if isinstance(call, Cancelled) else call.aim
    before = [each for each in story.cancelled if each.rank == call.rank and each.index < call.index]
    given_up = sum(each.turn == turn for each in before)
    sync_every = story.case.sync_every
    return ((turn - 1) // sync_every + 1 + given_up) * sync_every


def _sums(story: Story) -> Iterator[tuple[int, Array, tuple[int, ...]]]:
    """(round, its sum, its group) of all that anybody was given, oldest first."""
    return ((number, calls[0].sum[0], group) for (number, group), calls in story.rounds.items())


def _groups(case: Case, number: int) -> Iterable[tuple[int, ...]]:
    if case.kind != "group" or case.is_synchronous(number):
        return (tuple(range(case.size)),)
    return partition(case.size, case.group_size, 1 if case.fixed else number)


def _staged(calls: list[Call], number: int) -> tuple[int, int]:
    """The oldest and the newest call of a rank whose contribution may be its newest in round `number`; -1: none yet.

    A late call is given the newest result at once, while the round after it may be running already. Then its
    contribution enters the one after that.
    """
    oldest = [call.index for call in calls if call.round + (0 if call.included else 2) <= number]
    newest = [call.index for call in calls if call.round + (0 if call.included else 1) <= number]
    return max(oldest, default=-1), max(newest, default=-1)


def _waits_for_the_sleeper(case: Case, number: int) -> bool:
    drawing = Operation(case.kind, (), ReduceOp.SUM, Opening.MAJORITY, candidates=case.candidates, seed=case.seed)
    only_it = case.kind in ("majority", "candidates") and drawing.drawn(number, case.size) == (case.sleeper,)
    return only_it or case.is_synchronous(number) or case.quorum == case.size
