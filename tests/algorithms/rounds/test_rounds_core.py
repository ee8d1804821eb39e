"""Rounds in memory with and without the compiled core: the same calls get the same answers, also in mixed worlds."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest

from asyncoll import AVG, AVG_ACTIVE, MAX, SUM, _core
from asyncoll.algorithms.rounds import compiled_rounds as compiled_module
from asyncoll.algorithms.rounds import operation as operation_module
from asyncoll.algorithms.rounds.compiled_rounds import DECLARED, CompiledRounds, rounds_in_memory
from asyncoll.algorithms.rounds.engine import Delivery
from asyncoll.algorithms.rounds.lone_rounds import LoneRounds
from asyncoll.algorithms.rounds.one_sided import LENT_MIN_BYTES, OneSidedRounds, Setting
from asyncoll.algorithms.rounds.operation import Opening, Operation
from asyncoll.algorithms.rounds.operation_registry import OperationRegistry
from asyncoll.algorithms.rounds.repeats import Repeat
from asyncoll.algorithms.rounds.round_record import Memory
from asyncoll.errors import AsyncollError
from asyncoll.runtime.group import Group
from asyncoll.runtime.progress import SharedLoop
from asyncoll.runtime.trace import Trace
from asyncoll.tensors.operands import bundle
from asyncoll.testing import run_ranks
from asyncoll.testing.laws import check_laws
from asyncoll.testing.laws.story import KINDS
from asyncoll.transport.control_block import Turn
from asyncoll.transport.memory.arena import local_world

OPENINGS = [opening for opening in Opening if opening is not Opening.POLICY]  # which the core leaves to Python
needs_core = pytest.mark.skipif(_core.native is None, reason="the compiled core is not there")
SHORT = (1, 7, 100)  # elements
LONG = (5000, 9000, 20_000, 40_000)  # of one chunk or several
DTYPES = ("float32", "float64", "int64", "float16", "complex64")


class Rank:
    """The rounds of one rank, whose calls are driven by hand: each runs until it waits, or until it is resumed."""

    def __init__(self, arena, operation):
        size = len(arena.ranks)
        group = Group(tuple(range(size)), arena.local_rank, 7)
        self.registry = OperationRegistry(arena, size, arena.local_rank, 7)
        self.rounds = rounds_in_memory(
            Setting(Memory(arena, self.registry, group), str, Trace(group.rank, group.size), lambda: False),
            operation,
            1 << 22,
        )
        self.operation = operation
        self.arena = arena
        self.memory = {}  # registered, by size: for long contributions
        self.rest = self.wait = self.given = None
        self.loses = True  # one answer in five
        self.answers = []
        self.at_once = 0  # whole calls in one step

    def registered(self, x):
        """`x` in registered memory."""
        if x.nbytes not in self.memory:
            self.memory[x.nbytes] = self.arena.view(self.arena.allocate(x.nbytes), x.nbytes)
        array = self.memory[x.nbytes].view(x.dtype)
        array[:] = x
        return array

    def call(self, x, weight=1.0):
        self.given = bundle(x, self.operation.op, weight)
        at_once = self.rounds.at_once if x.dtype.name == self.operation.layout[0][0] else None
        if at_once is not None and (whole := at_once(x)) is not None:
            self.at_once += 1
            self.note_whole(whole)
            return
        answer = (self.rounds.begin or self.rounds.call)(self.given)
        if isinstance(answer, Delivery):
            self.note(answer)
        else:
            self.rest = answer
            self.step(lambda: answer.send(None))

    def step(self, act):
        try:
            self.wait = act()
        except StopIteration as stop:
            self.rest = self.wait = None
            self.note(stop.value)

    def resume(self):
        if self.rest is not None and self.wait.ready():
            self.step(lambda: self.rest.send(None))

    def cancel(self):
        """The coroutine may wait for a round that uses its memory; no round of short contributions does."""
        with contextlib.suppress(asyncio.CancelledError):
            self.rest.throw(asyncio.CancelledError())
        self.rest = self.wait = None
        self.answers.append("cancelled")

    def note_whole(self, answer):
        """As `note`, of a call in one step. An answer that is taken back was not awaited."""
        if self.loses and len(self.answers) % 5 == 3:
            del answer
            self.answers.append(("taken back", content(self.given)))
            return
        try:
            while True:
                assert answer.send(None) is None  # the loop turns
        except StopIteration as stop:
            told = stop.value
        results = [(told.round, told.ranks, told.group, told.synchronous, None)]
        assert told.active == len(told.ranks)
        assert told.result is (self.given.given if told.ranks else None)
        self.answers.append((results, told.included, told.skipped, told.lag, [], content(self.given)))

    def note(self, delivery):
        """Write down what the caller is told, and release the delivery, or, one time in five, take it back."""
        if delivery is None:  # there was nothing to tell a rank that has joined
            self.answers.append(None)
            return
        operation, result = self.operation, delivery.results[-1]
        weights = [each.weight if operation.weighted else None for each in delivery.results]
        results = [
            (each.number, each.ranks, each.members, each.synchronous, weight)
            for each, weight in zip(delivery.results, weights, strict=True)
        ]
        if result.ranks:
            size = len(result.members) if operation.op is AVG and not operation.weighted else 1
            self.given.write(result.parts, len(result.ranks) if operation.op is AVG_ACTIVE else size)
        values = [part.tobytes() for each in delivery.results[:-1] for part in each.parts]
        lost = self.loses and len(self.answers) % 5 == 3
        told = (results, delivery.included, delivery.skipped, delivery.lag, values)
        self.answers.append((*(("taken back",) if lost else told), content(self.given)))
        self.rounds.release(delivery)
        if lost:
            self.rounds.take_back(delivery)


def content(given):
    arrays = given.given if isinstance(given.given, list) else [given.given]
    return [array.tobytes() for array in arrays]


def drawn(seed, counts=SHORT):
    """A world drawn from `seed`: its size, its operation, and the rest of the draw."""
    draw = np.random.default_rng(seed)
    size = int(draw.choice([1, 2, 3, 4, 5, 8, 9, 13]))
    dtype = str(draw.choice(DTYPES))
    op = [SUM, MAX, AVG_ACTIVE, AVG][draw.integers(4)] if dtype.startswith("float") else SUM
    carried = "float32" if dtype == "float16" and op in (AVG, AVG_ACTIVE) else dtype
    opening = OPENINGS[draw.integers(len(OPENINGS))]
    options = {
        "quorum": int(draw.integers(1, size + 1)) if opening is Opening.QUORUM else 1,
        "candidates": int(draw.integers(1, size + 1)) if opening is Opening.MAJORITY else 1,
        "seed": int(draw.integers(9)),
        "sync_every": int(draw.choice([0, 0, 3])),
        "history": int(draw.choice([0, 0, 2, 5])),
        "weighted": op is AVG and bool(draw.integers(2)),
    }
    if opening is Opening.SOLO and draw.integers(2):
        options |= {"group_size": int(draw.integers(1, size + 1)), "fixed": bool(draw.integers(2))}
    count = int(draw.choice(counts))
    return draw, size, dtype, Operation("g", ((carried, count),), op, opening, **options)


def story(seed, natives, counts=SHORT):
    """What all ranks are told in a world in which the draw decides which rank calls, is cancelled or leaves."""
    draw, size, dtype, operation = drawn(seed, counts)
    with local_world(size, natives) as arenas:
        ranks = [Rank(arena, operation) for arena in arenas]
        for index in range(40 * size):
            rank = ranks[draw.integers(size)]
            values, weight = draw.integers(-9, 9, operation.layout[0][1]), float(draw.integers(3))
            is_cancelled = not draw.integers(8)
            if rank.rest is None:
                x = values.astype(dtype)
                x = rank.registered(x) if x.nbytes >= LENT_MIN_BYTES and draw.integers(2) else x
                rank.call(x, weight if operation.weighted else 1.0)
            elif is_cancelled:
                rank.cancel()
            for other in ranks:
                other.resume()
            if index == 25 * size:
                ranks[0].registry.depart()
                ranks[0] = ranks[-1]  # it makes no more calls
        totals = [rank.rounds.statistics() for rank in ranks]
        for rank in ranks:
            if rank.rest is not None:
                rank.cancel()
        told = [rank.answers for rank in ranks], [(each.rounds, each.active, each.lag, each.stale) for each in totals]
        return told, sum(rank.at_once for rank in ranks)


@needs_core
@pytest.mark.parametrize("seed", range(40))
def test_the_same_calls_get_the_same_answers_with_and_without_the_core(seed):
    expected, in_one_step = story(seed, [None])
    assert expected[1][0][0] > 0
    assert not in_one_step
    assert story(seed, [_core.native])[0] == expected
    assert story(seed, [_core.native, None])[0] == expected
    assert story(seed, [None, _core.native])[0] == expected


@needs_core
@pytest.mark.parametrize("seed", range(100, 114))
def test_long_contributions_get_the_same_answers_with_and_without_the_core(seed):
    expected = story(seed, [None], LONG)
    assert expected[0][1][0][0] > 0
    for natives in ([_core.native], [_core.native, None], [None, _core.native]):
        assert story(seed, natives, LONG) == expected


@needs_core
@pytest.mark.parametrize("seed", range(40))
def test_the_rules_read_the_same_cells_alike_in_python_and_in_c(seed):
    draw, size, dtype, operation = drawn(seed)
    x = np.ones(operation.layout[0][1], operation.layout[0][0])
    with local_world(size, [_core.native]) as arenas:
        rounds = Rank(arenas[draw.integers(size)], operation).rounds
        if not isinstance(rounds, CompiledRounds):
            assert dtype.startswith("complex")  # there is no kernel
            return
        record, compiled = rounds._rounds, rounds._compiled
        record.blocks.provide(size + 1)
        before = record.cells.tolist()
        for _ in range(30):
            for cell, value in enumerate(before):
                record.cells[cell] = value
            latest = record.cells[record._head.latest] = int(draw.integers(1, 20))
            for rank, row in enumerate(record._row):
                record.cells[row.here] = latest + int(draw.integers(2))
                record.cells[rank] = int(draw.integers(4) == 0)  # gone
            compiled.plan(latest + 1, operation.drawn(latest + 1, size), tuple(operation.groups(latest + 1, size)))
            assert rounds._engine.aim == 1
            record.cells[record._mine.here] = latest + 1
            assert compiled.is_needed(latest + 1) is record.may_open()
            record.cells[record._mine.here] = latest
            opens = record.late_call_opens()
            assert rounds._begin_compiled([x.copy()], 1.0).number == (latest + 1 if opens else 0)


def rules_of_each_kind(size):
    """An operation for each rule by which rounds of `size` ranks may begin, with and without synchronous rounds."""
    for every in (0, 2):
        for opening, option, numbers in (
            (Opening.SOLO, "candidates", [1]),
            (Opening.MAJORITY, "candidates", range(1, size + 1)),
            (Opening.QUORUM, "quorum", range(1, size + 1)),
        ):
            for number in numbers:
                yield Operation("x", (("float64", 1),), SUM, opening, sync_every=every, **{option: number})


@needs_core
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_rules_are_alike_in_python_and_in_c_in_every_small_state(size):
    """Each rank is absent, has arrived, or is gone; round 6 waits for all of them, if the kind has such."""
    absent, here, gone = range(3)
    for operation in rules_of_each_kind(size):
        with local_world(size, [_core.native]) as arenas:
            ranks = [Rank(arena, operation).rounds for arena in arenas]
            ranks[0]._rounds.blocks.provide(size + 1)
            before = ranks[0]._rounds.cells.tolist()
            for state in itertools.product((absent, here, gone), repeat=size):
                for number, (rank, rounds) in itertools.product((5, 6), enumerate(ranks)):
                    record, compiled = rounds._rounds, rounds._compiled
                    cells = record.cells
                    for cell, value in enumerate(before):
                        cells[cell] = value
                    cells[record._head.latest] = number - 1
                    for each, row in enumerate(record._row):
                        cells[row.here] = number * (state[each] == here)
                        cells[each] = state[each] == gone
                    compiled.plan(number, operation.drawn(number, size), tuple(operation.groups(number, size)))
                    case = operation, state, number, rank
                    if state[rank] == here:
                        assert compiled.is_needed(number) is record.may_open(), case
                    else:
                        opens = record.late_call_opens()
                        assert rounds._begin_compiled([np.ones(1)], 1.0).number == number * opens, case


@needs_core
def test_calls_that_need_no_other_rank_are_one_step_in_the_core():
    assert sum(story(seed, [_core.native])[1] for seed in range(12)) > 50


class Interleaved:
    """Solo calls of long arrays, during which other ranks make calls wherever one of them has released the lock.

    Call number n contributes 1 as its element n. So a result tells which contributions it has.
    """

    def __init__(self, seed, natives):
        self.draw = np.random.default_rng(seed)
        self.count = int(self.draw.choice(LONG))
        self.natives = natives
        self.results = {}  # by round: the calls that it has contributions of
        self.told = []  # (rank, call, round, whether its contribution is in)
        self.calls = self.nested = 0
        self.running = []  # the ranks whose calls are under way
        self.errors = []

    def passed(self, point):
        if point in ("round-filled", "round-helped", "round-copied") and self.draw.integers(3):
            idle = [rank for rank in self.ranks if rank.rest is None and rank not in self.running]
            if idle and self.calls < CALLS:
                self.nested += 1
                try:
                    self.call(idle[self.draw.integers(len(idle))])
                except BaseException as error:  # the core would only report it
                    self.errors.append(error)

    def call(self, rank):
        number, self.calls = self.calls, self.calls + 1
        x = np.zeros(self.count, np.float32)
        x[number] = 1
        if x.nbytes >= LENT_MIN_BYTES and self.draw.integers(2):
            x = rank.registered(x)
        self.running.append(rank)
        answer = (rank.rounds.begin or rank.rounds.call)(bundle(x, SUM, 1.0))
        self.running.remove(rank)
        if isinstance(answer, Delivery):
            self.note(rank, number, x, answer)
        else:
            rank.rest, rank.wait = (number, x, answer), None
            self.resume(rank)

    def resume(self, rank):
        if rank.rest is None or rank in self.running or (rank.wait is not None and not rank.wait.ready()):
            return
        number, x, rest = rank.rest
        self.running.append(rank)
        try:
            rank.wait = rest.send(None)
        except StopIteration as stop:
            rank.rest = None
            self.note(rank, number, x, stop.value)
        self.running.remove(rank)

    def note(self, rank, number, x, delivery):
        result = delivery.results[-1]
        if result.ranks:
            bundle(x, SUM, 1.0).write(result.parts)
        rank.rounds.release(delivery)
        assert set(np.unique(x)) <= {0, 1}, "a contribution is counted twice"
        contributions = frozenset(np.flatnonzero(x).tolist()) if result.ranks else frozenset()
        assert self.results.setdefault(result.number, contributions) == contributions
        self.told.append((rank, number, result.number, delivery.included))

    def run(self):
        with local_world(4, self.natives) as arenas:
            operation = Operation("g", (("float32", self.count),), SUM, Opening.SOLO)
            self.ranks = [Rank(arena, operation) for arena in arenas]
            before = _core.native.watch(self.passed)
            try:
                while self.calls < CALLS or any(rank.rest for rank in self.ranks):
                    rank = self.ranks[self.draw.integers(4)]
                    if rank.rest is None and self.calls < CALLS:
                        self.call(rank)
                    for other in self.ranks:
                        self.resume(other)
            finally:
                _core.native.watch(before)
            for _ in range(2):  # the second one at the latest opens a round, which takes what is staged
                self.call(self.ranks[0])
            totals = self.ranks[0].rounds.statistics()
            blocks = self.ranks[0].rounds._rounds.blocks
            free, made = blocks._cells[blocks._head : blocks._head + 2].tolist()
            unused = sum(len(rank.rounds._unused) for rank in self.ranks)
            self.ranks = []
        return totals, made - free - unused


CALLS = 60


@needs_core
@pytest.mark.parametrize("seed", range(12))
def test_other_ranks_may_do_anything_where_a_long_call_has_released_the_lock(seed):
    natives = [[_core.native], [_core.native, None], [_core.native, _core.native, None]][seed % 3]
    world = Interleaved(seed, natives)
    totals, used_blocks = world.run()
    assert not world.errors
    assert world.nested > 5
    counted = [number for contributions in world.results.values() for number in contributions]
    assert sorted(counted) == list(range(world.calls))
    assert totals.rounds == len(world.results)  # each round was told to the rank that opened it
    for _, number, result, included in world.told:
        assert included == any(number in has for each, has in world.results.items() if each <= result)
    assert used_blocks == 1  # that of the newest result


@needs_core
@pytest.mark.parametrize("natives", [[_core.native], [_core.native, None], [None, _core.native]])
@pytest.mark.parametrize("count", [3, 40_000])
def test_a_caller_that_waited_gets_its_own_round_after_others(natives, count):
    operation = Operation("g", (("float32", count),), SUM, Opening.QUORUM, quorum=2)
    with local_world(3, natives) as arenas:
        first, waiting, late = (Rank(arena, operation) for arena in arenas)
        for rank in (waiting, first, late, first, late):  # rounds 1, late, 2
            rank.call(np.ones(count, np.float32))
        for rank in (first, waiting):
            rank.resume()
        told = [[results[0][0] for results, *_ in rank.answers] for rank in (first, late, waiting)]
        assert told == [[1, 2], [1, 2], [1]]


@pytest.mark.parametrize("natives", [[_core.native], [None]])
@pytest.mark.parametrize("count", [3, 40_000])
def test_the_next_call_begins_when_it_is_known_whether_the_answer_before_has_a_receiver(natives, count):
    """Otherwise a call in another thread would wait for a further round, which may never come."""
    operation = Operation("g", (("float32", count),), SUM, Opening.QUORUM, quorum=2)
    with local_world(2, natives) as arenas:
        first, second = (Rank(arena, operation) for arena in arenas)
        first.call(np.ones(count, np.float32))
        calls = [rank.rounds.call(bundle(np.ones(count, np.float32), SUM, 1.0)) for rank in (second, second)]
        with pytest.raises(StopIteration) as stop:
            calls[0].send(None)
        turn = calls[1].send(None)
        assert not turn.is_set
        second.rounds.take_back(stop.value.value)
        second.rounds.release(stop.value.value)
        assert turn.is_set
        with pytest.raises(StopIteration) as stop:
            calls[1].send(None)
        assert [result.number for result in stop.value.value.results] == [1]
        second.rounds.release(stop.value.value)


def alone(seed, make):
    """What one rank is told that calls and joins."""
    draw, _, dtype, operation = drawn(seed)
    operation = replace(operation, quorum=1, candidates=1, group_size=min(operation.group_size, 1))
    with local_world(1, [None]) as arenas:
        rank = Rank(arenas[0], operation)
        rank.rounds, rank.loses = make(rank), False  # after a lost answer only a rank alone opens a round
        for _ in range(10 + seed % 5):
            values, weight = draw.integers(-9, 9, operation.layout[0][1]), float(draw.integers(3))
            rank.call(values.astype(dtype), weight if operation.weighted else 1.0)
        rest = rank.rounds.join()
        rank.step(lambda: rest.send(None))
        totals = rank.rounds.statistics()
        return rank.answers, totals.rounds, totals.active, totals.lag, totals.stale


def in_memory(rank):
    return rank.rounds


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_alone_is_told_what_it_would_be_told_in_memory(seed):
    async def main():
        return alone(seed, lambda rank: LoneRounds(rank.operation, str, SharedLoop(), Trace(0, 1)))

    told = asyncio.run(main())
    assert told == alone(seed, in_memory)
    assert told[1] == 10 + seed % 5


@needs_core
@pytest.mark.parametrize("kind", KINDS)
def test_all_laws_hold_where_only_some_ranks_use_the_core(kind):
    for size in (2, 5):
        check_laws(kind, size, seed=3, transport="shm-mixed")


@needs_core
def test_a_peer_that_writes_anything_into_the_cells_breaks_its_world_and_not_the_process():
    draw, refused = np.random.default_rng(1), 0
    for seed in range(30):
        _, size, _, operation = drawn(seed)
        x = np.ones(operation.layout[0][1], operation.layout[0][0])
        with local_world(size, [_core.native]) as arenas:
            ranks = [Rank(arena, operation) for arena in arenas]
            cells = ranks[0].rounds._control_block.cells
            has_kernel = isinstance(ranks[0].rounds, CompiledRounds)  # there is none for complex numbers
            for _ in range(30 if has_kernel else 0):
                rank = ranks[draw.integers(size)]
                try:
                    rank.rounds._begin_compiled([x.copy()], 1.0)
                except (ValueError, IndexError, RuntimeError, AsyncollError):
                    refused += 1
                at = draw.integers(len(cells), size=20)
                for cell in at:
                    cells[cell] = draw.choice([-1, 0, 1, 5, 1 << 20, (1 << 63) - 1, -(1 << 63)])
    assert refused


@needs_core
def test_a_whole_call_finds_cells_that_a_peer_has_changed():
    outcomes = set()
    for seed in range(150):
        draw = np.random.default_rng(seed)
        operation = Operation("g", (("float32", 3),), SUM, OPENINGS[seed % len(OPENINGS)], quorum=1 + seed % 2)
        with local_world(2, [_core.native]) as arenas:
            ranks = [Rank(arena, operation) for arena in arenas]
            for _ in range(6):
                for rank in ranks:
                    if rank.rest is None:
                        rank.call(np.ones(3, np.float32))
                    rank.resume()
            cells = ranks[0].rounds._control_block.cells
            used = np.flatnonzero(cells)  # above all these matter
            for _ in range(4):
                cell = int(draw.choice(used)) if draw.integers(2) else int(draw.integers(len(cells)))
                values = [-1, 0, 1, 5, min(cells[cell], 1 << 40) + 1, 1 << 20, (1 << 63) - 1, -(1 << 63)]
                cells[cell] = values[draw.integers(len(values))]
                outcome = ranks[draw.integers(2)].rounds.at_once(np.ones(3, np.float32))
                assert not isinstance(outcome, Exception) or isinstance(outcome, ValueError | AsyncollError)
                outcomes.add(type(outcome) if isinstance(outcome, Exception) else outcome is None)
            for rank in ranks:
                if rank.rest is not None:
                    rank.rest.close()
    assert outcomes >= {True, False, ValueError}


@needs_core
def test_the_compiled_rounds_check_what_they_are_given():
    operation = Operation("g", (("float32", 3),), SUM, Opening.MAJORITY)
    with local_world(2, [_core.native]) as arenas:
        compiled = Rank(arenas[0], operation).rounds._compiled
        with pytest.raises(ValueError, match="another size"):
            compiled.begin([np.ones(4, np.float32)], 1.0, 1, [], -1)
        with pytest.raises(ValueError, match="each part"):
            compiled.begin([], 1.0, 1, [], -1)
        with pytest.raises(ValueError, match="no rank 2"):
            compiled.plan(1, (2,), ((0, 1),))
        with pytest.raises(ValueError, match="count from 1"):
            compiled.begin([np.ones(3, np.float32)], 1.0, 0, [], -1)


@dataclass(frozen=True)
class OperationWithNewOption(Operation):
    patience: int = 0


LEFT_TO_PYTHON = {"policy"}  # options of operations that the core declines


def test_every_option_is_declared_to_the_core_or_left_to_python():
    assert Operation.defaults().keys() - LEFT_TO_PYTHON == DECLARED


@needs_core
def test_the_core_declines_what_it_does_not_declare():
    known = Operation("g", (("float32", 3),), SUM, Opening.SOLO)
    declined = OperationWithNewOption("declined", known.layout, SUM, Opening.SOLO, patience=1)
    with local_world(2, [_core.native]) as arenas:
        declared = OperationWithNewOption("new", known.layout, SUM, Opening.SOLO)
        assert isinstance(Rank(arenas[0], declared).rounds, CompiledRounds)
        assert type(Rank(arenas[0], declined).rounds) is OneSidedRounds


@needs_core
def test_the_core_declines_rules_of_a_form_that_it_does_not_follow(monkeypatch):
    class NewRule(NamedTuple):
        ranks: int = 1
        drawn: bool = False
        patient: bool = False

    for module in (operation_module, compiled_module):
        monkeypatch.setattr(module, "Rule", NewRule)
    kept, declined = (Operation("g", (("float32", 3),), SUM, Opening.SOLO, seed=seed) for seed in (0, 1))
    declined.__dict__["rule"] = NewRule(patient=True)
    with local_world(2, [_core.native]) as arenas:
        assert isinstance(Rank(arenas[0], kept).rounds, CompiledRounds)
    with local_world(2, [_core.native]) as arenas:
        assert type(Rank(arenas[0], declined).rounds) is OneSidedRounds


# -- turns of whole calls, while signal handlers raise ---------------------------------------------


class StruckTurn(Turn):
    """A turn whose first `set` is interrupted by the exception of a signal handler, before it has done anything."""

    __slots__ = ("error",)

    def __init__(self, error):
        super().__init__()
        self.error = error

    def set(self):
        error, self.error = self.error, None
        if error is not None:
            raise error
        super().set()


@contextlib.contextmanager
def whole_call_rank():
    """A rank of two, the first call of which will be over in one step."""
    operation = Operation("g", (("float32", 3),), SUM, Opening.SOLO)
    with local_world(2, [_core.native]) as arenas:
        rank = Rank(arenas[0], operation)
        rank.loses = False
        for _ in range(5):  # the first ones allocate blocks
            rank.call(np.ones(3, np.float32))
        assert rank.at_once
        yield rank


@needs_core
@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt])
def test_a_handler_that_raises_as_a_whole_call_ends_does_not_lose_the_turn(kind):
    with whole_call_rank() as rank:
        error = kind("of a handler")
        rounds, order = rank.rounds, rank.rounds._order
        now, x = order.now[0], np.ones(3, np.float32)
        turn = order.waiting[now + 1] = StruckTurn(error)
        with pytest.raises(kind) as raised:
            rounds.at_once(x)
        assert raised.value is error
        assert order.now[0] == now + 1
        assert turn.is_set
        assert not order.waiting
        ((count, lost),) = rounds._engine.owed  # the answer was lost with the exception
        assert count == 1
        rank.call(x)  # its turn is now, and it tells of the lost round
        assert rank.answers[-1][0][0][0] == lost
        assert order.now[0] == now + 2


@needs_core
def test_a_whole_call_before_its_turn_is_none_and_leaves_its_turn_to_the_next():
    with whole_call_rank() as rank:
        rounds, order = rank.rounds, rank.rounds._order
        before, steps = next(order.numbers), rounds.statistics().calls
        assert order.is_now(before)
        assert rounds.at_once(np.ones(3, np.float32)) is None
        assert order.over == {before + 1}
        assert order.is_now(before)
        assert rounds.statistics().calls == steps
        order.end(before)
        assert order.is_now(before + 2)
        assert not order.over
        assert rounds.at_once(np.ones(3, np.float32)) is not None
        assert order.is_now(before + 3)


@needs_core
def test_a_whole_call_passes_over_the_turns_of_calls_that_have_ended():
    with whole_call_rank() as rank:
        rounds, order = rank.rounds, rank.rounds._order
        now = order.now[0]
        order.over.update({now + 1, now + 2})
        turn = order.waiting[now + 3] = Turn()
        assert rounds.at_once(np.ones(3, np.float32)) is not None
        assert order.is_now(now + 3)
        assert turn.is_set
        assert not order.over


@needs_core
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_the_exception_of_a_handler_in_a_repeated_call_does_not_end_the_communicator(kind):
    async def main(comm):
        error = kind("of a handler")
        for _ in range(4):
            await comm.solo_allreduce(np.ones(3), name=f"of rank {comm.rank}")
        name = f"of rank {comm.rank}"
        assert isinstance(comm._core.operations.repeats[name], Repeat)
        order = comm._core.operations._known[name]._order
        turn = order.waiting[order.now[0] + 1] = StruckTurn(error)
        with pytest.raises(kind) as raised:
            comm.solo_allreduce(np.ones(3), name=name)
        assert raised.value is error
        assert turn.is_set
        reduction = await comm.solo_allreduce(np.ones(3), name=name)
        assert (reduction.round, reduction.skipped, reduction.included) == (5, 0, False)  # the one that was lost
        await comm.barrier()

    run_ranks(2, main, transport="shm")


@needs_core
def test_a_whole_call_returns_the_failure_of_its_rounds_and_ends_its_turn():
    with whole_call_rank() as rank:
        rounds, now = rank.rounds, rank.rounds._order.now[0]
        turn = rounds._order.waiting[now + 1] = Turn()
        with contextlib.suppress(KeyError), rounds._control_block:
            raise KeyError  # in the middle of a critical section: the lock is lost
        assert isinstance(rounds.at_once(np.ones(3, np.float32)), AsyncollError)
        assert rounds._order.is_now(now + 1)
        assert turn.is_set
