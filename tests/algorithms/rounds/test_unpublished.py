"""A rank that dies in the middle of a round loses no contribution of another rank, and doubles none.

Wherever a rank changes the record of rounds, what it has left so far is judged as if it had been killed there: each
contribution of another rank is in one published round, or in what `unpublished` finds, and nowhere twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from functools import partial

import numpy as np
import pytest

from asyncoll import SUM, AbortedError, _core
from asyncoll.algorithms.rounds import round_record
from asyncoll.algorithms.rounds.compiled_rounds import rounds_in_memory
from asyncoll.algorithms.rounds.engine import Delivery
from asyncoll.algorithms.rounds.one_sided import Setting
from asyncoll.algorithms.rounds.operation import Opening, Operation
from asyncoll.algorithms.rounds.operation_registry import OperationRegistry
from asyncoll.algorithms.rounds.round_cells import Head, RankCells, kept_rounds
from asyncoll.algorithms.rounds.round_record import Memory
from asyncoll.algorithms.rounds.unpublished import unpublished, whole_results
from asyncoll.runtime.group import Group
from asyncoll.runtime.trace import Trace
from asyncoll.tensors.operands import bundle
from asyncoll.testing import run_ranks
from asyncoll.testing.faults.left_record import left_of
from asyncoll.transport.memory.arena import local_world
from tests.support.places import SCRIPTS
from tests.support.processes import LIGHT

needs_core = pytest.mark.skipif(_core.native is None, reason="the compiled core is not there")
CALLS = 12  # of each rank
STAGED, SOURCE = 64, 128  # addresses


def cells(ticket=0, taken=0, staged=False, source=False, latest=0, running=0):
    row = RankCells(*[0] * len(RankCells._fields))._replace(
        ticket=ticket, taken=taken, staged_at=STAGED * staged, source_at=SOURCE * source
    )
    return Head(0, latest, running, 0, 0, 0), row


@pytest.mark.parametrize(
    ("when", "left", "published", "addresses"),
    [
        ("nothing has happened", cells(), 0, []),
        ("staged", cells(ticket=1, staged=True), 0, [STAGED]),
        ("a short round has taken it, and is not published", cells(1, 1, staged=True), 0, [STAGED]),
        ("a short round is published, and it is not cleared", cells(1, 1, staged=True, latest=1), 1, []),
        ("it is cleared", cells(1, 1, latest=1), 1, []),
        ("a further one is staged", cells(2, 1, staged=True, latest=1), 1, [STAGED]),
        ("a long round begins, and has taken nothing", cells(1, 0, staged=True, running=1), 0, [STAGED]),
        ("its source is written", cells(1, 0, staged=True, source=True, running=1), 0, [STAGED]),
        ("it has taken it", cells(1, 1, staged=True, source=True, running=1), 0, [SOURCE]),
        ("it has taken it, and cleared it", cells(1, 1, source=True, running=1), 0, [SOURCE]),
        ("a further one is staged meanwhile", cells(2, 1, True, True, running=1), 0, [SOURCE, STAGED]),
        ("it is published, and runs", cells(2, 1, True, True, latest=1, running=1), 1, [STAGED]),
        ("it is over", cells(2, 1, True, True, latest=1), 1, [STAGED]),
        ("the next one begins: the source is an old one", cells(2, 1, True, True, latest=1, running=2), 1, [STAGED]),
    ],
)
def test_where_a_contribution_is_at_each_step_of_a_round(when, left, published, addresses):
    assert unpublished(*left, published) == addresses, when


def test_which_results_are_whole():
    """All that are kept but the oldest, in whose place the next round writes its own."""
    assert list(whole_results(0, 3)) == []
    assert list(whole_results(2, 3)) == [1, 2]
    assert list(whole_results(9, 3)) == [6, 7, 8, 9]
    assert list(whole_results(9, 0)) == [9]
    assert all(len(whole_results(9, history)) == kept_rounds(history) - 1 for history in range(9))


class World:
    """Ranks of one thread, which call in turns that a seed draws. Element [rank, call] of a contribution is 1."""

    def __init__(self, arenas, operation, seed, *, registered):
        self.draw = np.random.default_rng(seed)
        self.size = len(arenas)
        self.elements = operation.layout[0][1]
        self.rounds = [self.join(arena, operation) for arena in arenas]
        self.arrays = [self.array(arena) if registered else np.zeros(self.elements) for arena in arenas]
        self.called = [0] * self.size
        self.waiting = {}  # by rank: the call that waits, and for what
        self.acting = []  # the last one would be killed; those before have released the lock
        self.published = np.zeros((self.size, CALLS))  # the sum of all published rounds
        self.latest = 0
        self.cells = b""
        self.judged = 0
        self.broken = []

    def join(self, arena, operation):
        group = Group(tuple(range(self.size)), arena.local_rank, 7)
        registry = OperationRegistry(arena, self.size, arena.local_rank, 7)
        return rounds_in_memory(
            Setting(Memory(arena, registry, group), str, Trace(group.rank, group.size), lambda: False),
            operation,
            1 << 22,
        )

    def array(self, arena):
        nbytes = 8 * self.elements
        return arena.view(arena.allocate(nbytes), nbytes).view(np.float64)

    def act(self):
        """A rank that does nothing now makes a call, goes on with one, or is cancelled in it."""
        rank = int(self.draw.choice([rank for rank in range(self.size) if rank not in self.acting]))
        self.acting.append(rank)
        if rank not in self.waiting:
            if self.called[rank] < CALLS:
                self.call(rank)
        elif self.draw.integers(6) == 0:
            rest, _ = self.waiting.pop(rank)
            with contextlib.suppress(asyncio.CancelledError):  # its contribution stays in
                self.waiting[rank] = rest, rest.throw(asyncio.CancelledError)
        elif self.waiting[rank][1].ready():
            self.go_on(rank, self.waiting.pop(rank)[0])
        self.acting.pop()

    def call(self, rank):
        x = self.arrays[rank]
        x[:] = 0
        self.contributions(x)[rank, self.called[rank]] = 1
        self.called[rank] += 1
        begun = (self.rounds[rank].begin or self.rounds[rank].call)(bundle(x, SUM, 1.0))
        if isinstance(begun, Delivery):
            self.rounds[rank].release(begun)
        else:
            self.go_on(rank, begun)

    def go_on(self, rank, rest):
        try:
            self.waiting[rank] = rest, rest.send(None)
        except StopIteration as stop:
            self.rounds[rank].release(stop.value)
        except asyncio.CancelledError:
            pass

    def contributions(self, x):
        """The elements of `x` that calls set, by [rank, call]."""
        return x[-self.size * CALLS :].reshape(self.size, CALLS)

    def judge(self, where):
        """As if the acting rank were killed now."""
        self.judged += 1
        record = self.rounds[0]._rounds
        cells = bytes(record.cells[self.size : record._begun])
        if cells == self.cells:
            return
        self.cells = cells
        for rank, rounds in enumerate(self.rounds):
            left = left_of(rounds)
            for number in range(self.latest + 1, left.latest + 1):
                self.published += self.contributions(left.results[number])
            self.latest = left.latest
            if rank == self.acting[-1]:
                is_right = self.published[rank].max() <= 1  # only its own process could read its row
            else:
                total = self.published[rank] + self.contributions(left.staged)[rank]
                is_right = np.array_equal(total, np.arange(CALLS) < left.ticket)
            if not is_right:
                self.broken.append((where, self.acting[-1], rank, left, self.published[rank].copy()))

    def passed(self, point):
        """A point of the core. If it has released the lock, other ranks may do anything meanwhile."""
        self.judge(point)
        if point in ("round-filled", "round-helped") and self.is_long and len(self.acting) < self.size:
            self.act()

    def trace(self, frame, event, _):
        """Judge between any two opcodes of the record in Python."""
        if frame.f_code.co_filename != round_record.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.judge(f"{frame.f_code.co_name}:{frame.f_lineno}")
        return self.trace

    @property
    def is_long(self):
        return not self.rounds[0]._rounds.reduces_at_once

    @contextlib.contextmanager
    def watched(self, native):
        if native is None:
            before = sys.gettrace()
            sys._getframe().f_trace_opcodes = True  # Python 3.12 tells of opcodes only if a frame has asked before
            sys.settrace(self.trace)
            undo = partial(sys.settrace, before)
        else:
            undo = partial(native.watch, native.watch(self.passed))
        try:
            yield
        finally:
            undo()


OPERATIONS = {
    "solo": {"opening": Opening.SOLO},
    "majority": {"opening": Opening.MAJORITY},
    "quorum": {"opening": Opening.QUORUM, "quorum": 2},
    "synchronous solo": {"opening": Opening.SOLO, "sync_every": 2},
    "solo with history": {"opening": Opening.SOLO, "history": 3},
}
LENGTHS = {"short": (0, False), "long": (20_000, False), "registered": (20_000, True)}  # elements that stay 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", OPERATIONS)
@pytest.mark.parametrize("core", [pytest.param("c", marks=needs_core), "python"])
def test_a_death_anywhere_in_a_round_loses_and_doubles_nothing(core, kind, length, seed):
    (padding, registered), size = LENGTHS[length], 3
    operation = Operation("g", (("float64", padding + size * CALLS),), SUM, **OPERATIONS[kind])
    native = _core.native if core == "c" else None
    with local_world(size, [native]) as arenas:
        world = World(arenas, operation, seed, registered=registered)
        with world.watched(native):
            for _ in range(6 * size * CALLS):
                world.act()
        for rest, _ in world.waiting.values():
            rest.close()
        assert not world.broken, world.broken[0]
        assert world.judged > size * CALLS
        assert world.called == [CALLS] * size
        assert world.latest > 3


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", OPERATIONS)
@pytest.mark.parametrize("core", [pytest.param("c", marks=needs_core), "python"])
def test_no_rank_opens_a_round_of_a_failed_communicator(core, kind, length):
    """A caller that would open one waits, until it hears of the failure. The running round is carried out."""
    (padding, registered), size = LENGTHS[length], 3
    operation = Operation("g", (("float64", padding + size * CALLS),), SUM, **OPERATIONS[kind])
    with local_world(size, [_core.native if core == "c" else None]) as arenas:
        world = World(arenas, operation, 1, registered=registered)
        for _ in range(2 * CALLS):
            world.act()
        record = world.rounds[0]._rounds
        newest = max(record.latest, record.running)
        registry = OperationRegistry(arenas[1], size, 1, 7)
        registry.close()
        for _ in range(6 * size * CALLS):
            world.act()
        assert (record.latest, record.running) == (newest, 0)
        assert not record.may_close()
        assert any(left.ticket > left.published for left in map(left_of, world.rounds))
        for rest, _ in world.waiting.values():
            rest.close()
        late = OperationRegistry(arenas[2], size, 2, 7).enter(1, 2, 100)
        assert late.cells[size] == 1, "an operation that is made later is open"


@pytest.mark.parametrize("transport", ["shm", "shm-mixed"])
def test_a_failure_closes_the_rounds(transport):
    async def main(comm):
        await comm.solo_allreduce(np.ones(1))
        with contextlib.suppress(AbortedError):  # which may come before a rank has left the barrier
            await comm.barrier()
            if comm.rank == 1:
                comm.abort("enough")
            while True:
                await comm.solo_allreduce(np.ones(1))
        (rounds,) = comm._core.backend.operations
        async with asyncio.timeout(10):
            while not rounds._rounds.cells[comm.size]:
                await asyncio.sleep(0.001)

    run_ranks(3, main, transport)


# -- real processes --------------------------------------------------------------------------------

SHORT_POINTS = ("filled", "staged", "arrived", "opened", "reduced", "taken", "granted", "published", "left", "copied")
LONG_POINTS = ("staged", "opened", "taken", "claimed", "helped", "counted", "granted", "published")
DEATHS = [
    *[("c", ("solo", "quorum")[nth % 2], "short", f"round-{point}") for nth, point in enumerate(SHORT_POINTS)],
    *[("c", ("quorum", "solo")[nth % 2], "long", f"round-{point}") for nth, point in enumerate(LONG_POINTS)],
    *[("c", "majority", length, "round-taken") for length in ("short", "long")],
    *[("c", "solo", "registered", f"round-{point}") for point in ("taken", "granted")],
    *[("c", kind, length, "instruction") for kind, length in (("solo", "short"), ("quorum", "registered"))],
    *[("python", kind, length, "opcode") for kind in ("solo", "majority", "quorum") for length in LENGTHS],
]


@pytest.mark.parametrize(("core", "kind", "length", "point"), DEATHS)
def test_survivors_of_a_killed_process_find_all_that_they_have_contributed(
    forked_world, tmp_path, core, kind, length, point
):
    if core == "c" and _core.native is None:
        pytest.skip("the compiled core is not there")
    draw = np.random.default_rng(DEATHS.index((core, kind, length, point)))
    passing, victim = str(draw.integers(1, {"instruction": 200, "opcode": 5000}.get(point, 10))), int(draw.integers(3))
    environment = os.environ | LIGHT | {"TMPDIR": str(tmp_path), _core.VARIABLE: core}
    ranks = forked_world(
        environment, 3, SCRIPTS / "algorithms/rounds/dies_in_a_round.py", kind, length, victim, point, passing
    )
    for number, rank in enumerate(ranks):
        code, out, err = rank.end()
        if number == victim:
            assert code in (-signal.SIGKILL, -signal.SIGALRM), err
        else:
            assert (code, out) == (1, "all right\n"), err
