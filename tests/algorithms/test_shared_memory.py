"""Collectives and rounds in shared memory, beyond the tests that run with and without it.

Most worlds here run twice: in real memory, where ranks of one loop take turns only when they wait, and in simulated
memory, where the work of different ranks interleaves at random.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import random
from collections import Counter

import numpy as np
import pytest
import torch

from asyncoll import AVG, MAX, PROD, SUM, AbortedError, Communicator, MismatchError, UsageError
from asyncoll.algorithms.dense.tuning import VARIABLE
from asyncoll.algorithms.rounds.block_table import BlockTable
from asyncoll.algorithms.rounds.one_sided import OneSidedRounds
from asyncoll.tensors.reductions import DTYPES
from asyncoll.testing import Network, run_ranks, simulate
from asyncoll.transport.control_block import PythonControlBlock
from tests.algorithms.dense.test_collectives import INTEGER, LAYOUTS, SENSIBLE, expected, plain
from tests.support.cases import SIZES, looped

SHORT, CHUNK, PIECE, WINDOW, CALLS = (
    1 << 14,
    1 << 15,
    1 << 15,
    1 << 17,
    4,
)  # small, so that short arrays are cut into many pieces
LIMITS = [limit + more for limit in {0, SHORT, CHUNK, WINDOW, 2 * WINDOW} for more in (-4, 0, 4) if limit + more >= 0]
sizes = pytest.mark.parametrize("size", SIZES)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setenv(VARIABLE, f"short={SHORT},chunk={CHUNK},piece={PIECE},window={WINDOW},calls={CALLS}")


def in_virtual_time(size, main, seed=0, jitter_s=1e-3):
    return simulate(size, main, Network(latency_s=1e-3, jitter_s=jitter_s), seed, shared_memory=True).results


@pytest.fixture(params=["shm", "memory"])
def run(request):
    return functools.partial(run_ranks, transport="shm") if request.param == "shm" else in_virtual_time


def make(comm, data, registered):
    """A copy of `data`, an array or a tensor, in registered memory or elsewhere."""
    x = comm.empty(tuple(data.shape), data.dtype)
    if not registered:
        x = x.clone() if isinstance(x, torch.Tensor) else x.copy()
    x[...] = data
    return x


# -- what lies where -----------------------------------------------------------------------------

WHO = {
    "all registered": lambda rank: True,
    "none": lambda rank: False,
    "every other": lambda rank: rank % 2 == 1,
    "the first": lambda rank: rank == 0,
    "all but the first": lambda rank: rank > 0,
}


@sizes
@looped("who", WHO)
def test_allreduce_sums_in_the_order_of_ranks_wherever_the_arrays_lie(size, who, run):
    """Around the lengths where an array is cut into chunks and windows."""
    data = np.random.default_rng(size).standard_normal((size, 5 * WINDOW // 8), np.float32)

    async def main(comm):
        for nbytes in [*LIMITS, 5 * WINDOW // 2]:
            x = make(comm, data[comm.rank, : nbytes // 4], WHO[who](comm.rank))
            assert await comm.allreduce(x) is x
            assert x.tobytes() == functools.reduce(np.add, data[:, : nbytes // 4]).tobytes(), nbytes
            x.fill(-1)  # no rank may read it any more

    run(size, main)


@looped("dtype", DTYPES)
@pytest.mark.parametrize("who", ["all registered", "every other"])
def test_every_dtype_and_reduction_of_registered_tensors(dtype, who):
    values = torch.from_numpy(np.random.default_rng(1).integers(0, 4, (3, 20_000)))
    stacked = values.to(getattr(torch, dtype))

    async def main(comm):
        for op in SENSIBLE.get(dtype, INTEGER):
            x = make(comm, stacked[comm.rank], WHO[who](comm.rank))
            await comm.allreduce(x, op)
            torch.testing.assert_close(x, expected(op, stacked), rtol=1e-2, atol=1e-2)
            y = make(comm, stacked[comm.rank], WHO[who](comm.rank))
            await comm.solo_allreduce(y, op=op, sync_every=1, name=op.name)
            torch.testing.assert_close(y, x, rtol=1e-2, atol=1e-2)

    in_virtual_time(3, main)


@looped("dtype", [torch.float16, torch.bfloat16])
@looped("op", [SUM, AVG, PROD])
@pytest.mark.parametrize("who", WHO)
def test_halves_are_added_in_single_precision_and_rounded_once(dtype, op, who):
    size, count = 7, 5000
    stacked = torch.randn(size, count, generator=torch.Generator().manual_seed(1)).to(dtype)
    total = functools.reduce(torch.mul if op is PROD else torch.add, stacked.float())
    once = (total / size if op is AVG else total).to(dtype)

    async def main(comm):
        x = make(comm, stacked[comm.rank], WHO[who](comm.rank))
        await comm.allreduce(x, op)
        assert torch.equal(x, once)
        shard = await comm.reduce_scatter(stacked[comm.rank], op)
        assert torch.equal(shard, torch.tensor_split(once, size)[comm.rank])
        assert torch.equal(
            await comm.reduce(stacked[comm.rank].clone(), 3, op), once if comm.rank == 3 else stacked[comm.rank]
        )

    in_virtual_time(size, main)


@looped("layout", LAYOUTS)
def test_layouts_meet_registered_tensors(layout):
    """The tensor of one rank has some layout, and those of the others are registered."""

    async def main(comm):
        original = LAYOUTS[layout]()
        x = original
        if comm.rank and not str(original.dtype).startswith(">"):
            x = comm.empty(tuple(original.shape), original.dtype)
            x[...] = original.detach() if isinstance(original, torch.Tensor) else original
        await comm.allreduce(x)
        return x

    for x in in_virtual_time(3, main):
        np.testing.assert_array_equal(plain(x), 3 * plain(LAYOUTS[layout]()))


def test_views_of_registered_tensors_are_reduced_and_their_neighbours_unchanged(run):
    async def main(comm):
        whole = comm.empty((5, 70_000), torch.float32)
        whole[...] = -1.0
        rows, column, scalar = whole[1:3], whole[3, ::7], whole[4, 5]
        for view in (rows, column, scalar):
            view.fill_(comm.rank + 1.0)
            await comm.allreduce(view)
        column.fill_(comm.rank + 1.0)
        await comm.solo_allreduce([rows, column], sync_every=1)
        return whole

    for whole in run(3, main):
        reference = torch.full((5, 70_000), -1.0)
        reference[1:3], reference[3, ::7], reference[4, 5] = 18, 6, 6
        assert torch.equal(whole, reference)


def test_registered_memory_lives_as_long_as_any_view_of_it(run):
    async def main(comm):
        kept = []
        for value in range(4):
            tensor = comm.empty((4, 100_000), np.float32)
            tensor.fill(value)
            kept.append(tensor[value % 4, ::3] if value % 2 else torch.from_numpy(tensor)[1])
            del tensor
            gc.collect()
        assert [{float(x) for x in np.unique(view)} for view in kept] == [{float(value)} for value in range(4)]
        await comm.barrier()

    run(2, main)


def test_registered_memory_is_reused():
    async def main(comm):
        arena, made = comm._core.backend.memory, set()
        for _ in range(50):
            x = comm.empty(1000, np.float64)
            made.add(arena.locate(x))
            del x
        await comm.barrier()
        return len(made)

    assert max(run_ranks(2, main, transport="shm")) < 5


def test_the_tensors_of_a_split_are_registered_for_the_world_and_vice_versa(run):
    async def main(comm):
        half = await comm.split(comm.rank % 2)
        for owner, user in [(comm, half), (half, comm)]:
            x = owner.empty(200_000, np.float64)
            x.fill(1)
            await user.allreduce(x)
            assert (x == user.size).all()
            await user.solo_allreduce(x, sync_every=1)
            assert (x == user.size**2).all()

    run(5, main)


# -- every collective, in windows -----------------------------------------------------------------


@sizes
def test_collectives_of_many_windows(size, run):
    count = 7 * WINDOW // 16 + 3  # float64: three windows and a half
    data = np.random.default_rng(size).integers(-9, 10, (size, count)).astype(np.float64)

    async def main(comm):
        rank, root = comm.rank, size // 2
        for registered in (False, True):
            x = make(comm, data[rank], registered)
            await comm.broadcast(x, root)
            np.testing.assert_array_equal(x, data[root])
            x.fill(-1)  # no rank may read it any more
            x = make(comm, data[rank], registered)
            await comm.reduce(x, root, MAX)
            np.testing.assert_array_equal(x, data.max(0) if rank == root else data[rank])
            x = make(comm, data[rank], registered)
            gathered = await comm.gather(x, root)
            assert (gathered is None) == (rank != root)
            if rank == root:
                np.testing.assert_array_equal(gathered, data)
            np.testing.assert_array_equal(await comm.allgather(x), data)
            shard = await comm.reduce_scatter(x)
            np.testing.assert_array_equal(shard, np.array_split(data.sum(0), size)[rank])
            np.testing.assert_array_equal(x, data[rank])
        parts = [data[place, : 1 + place * count // size] for place in range(size)]
        np.testing.assert_array_equal(await comm.scatter(parts if rank == root else None, root), parts[rank])

    run(size, main)


@sizes
def test_lengths_may_be_very_different_or_zero(size, run):
    generator = np.random.default_rng(size)
    lengths = generator.choice([0, 0, 1, 5, 70_001, 300_000], (size, size))

    def piece(source, dest):
        return np.full(lengths[source, dest], 100 * source + dest, np.int32)

    async def main(comm):
        rank = comm.rank
        for source, x in enumerate(await comm.allgatherv(piece(rank, 0))):
            np.testing.assert_array_equal(x, piece(source, 0), strict=True)
        for source, x in enumerate(await comm.alltoallv([piece(rank, dest) for dest in range(size)])):
            np.testing.assert_array_equal(x, piece(source, rank), strict=True)
        x = await comm.scatter([piece(0, dest) for dest in range(size)] if rank == 0 else None)
        np.testing.assert_array_equal(x, piece(0, rank), strict=True)
        rows = np.concatenate([np.full((20_000, 2), 100 * rank + dest) for dest in range(size)])
        blocks = [np.full((20_000, 2), 100 * source + rank) for source in range(size)]
        np.testing.assert_array_equal(await comm.alltoall(rows), np.concatenate(blocks))

    run(size, main)


# -- many at once -----------------------------------------------------------------------------------


def some_calls(comm, number):
    """The `number`-th call, short or long, of one of several collectives; and a function that checks its result."""
    size, kind = comm.size, number % 6
    count = (1, 3000, 100_000, 200_000)[number % 4]
    if kind == 0:
        return comm.barrier(), lambda _: True
    if kind == 1:
        x = make(comm, np.full(count, comm.rank + number, np.int64), number % 3 == comm.rank % 3)
        return comm.allreduce(x), lambda y: y is x and (x == size * number + size * (size - 1) // 2).all()
    if kind == 2:
        x = make(comm, np.full(count, comm.rank), bool(number % 5))
        return comm.broadcast(x, number % size), lambda _: (x == number % size).all()
    if kind == 3:
        x = make(comm, np.ones(count, np.float32), registered=True)
        return comm.allreduce(x), lambda _: (x == size).all()
    if kind == 4:
        x = np.full(count + comm.rank, comm.rank)
        return comm.allgatherv(
            x
        ), lambda ys: [(len(y), *np.unique(y)) for y in ys] == [(count + rank, rank) for rank in range(size)]
    x = np.arange(size).repeat(count // 10 + 1)
    return comm.alltoall(x), lambda y: (y == comm.rank).all()


@sizes
def test_many_calls_in_flight_may_be_awaited_in_any_order(size, run):
    """More calls than rendezvous areas. Each rank awaits them in an order of its own."""

    async def main(comm):
        draw = random.Random(f"{size} {comm.rank}")
        calls = [some_calls(comm, number) for number in range(4 * CALLS + size % 2)]
        await asyncio.sleep(draw.choice([0, 1e-3]))
        tasks = [asyncio.ensure_future(call) for call, _ in calls]
        for number in draw.sample(range(len(calls)), len(calls)):
            assert calls[number][1](await tasks[number]), number

    run(size, main)


@looped("seed", range(20))
def test_short_calls_overtake_long_ones(seed):
    """Rendezvous areas are used in turn, and one may be free for a moment between two rendezvous of a long call."""

    async def main(comm):
        program, draw = random.Random(seed), random.Random(f"{seed} {comm.rank}")
        calls = []
        for number in range(100):
            is_long = program.random() < 0.3
            x = np.ones(400_000 if is_long else 10, np.float32)
            calls.append(comm.broadcast(x, number % comm.size) if is_long else comm.allreduce(x))
            if draw.random() < 0.3:
                await asyncio.sleep(1e-3)
        for call in calls:
            x = await call
            assert set(np.unique(x)) == {1 if x.size > 10 else comm.size}

    simulate(2, main, Network(latency_s=1e-4, jitter_s=1e-3), seed, shared_memory=True)


def test_calls_that_are_awaited_after_the_next_ones(run):
    async def main(comm):
        waiting = []
        for number in range(40):
            waiting.append(some_calls(comm, number))
            if comm.rank == number % comm.size or len(waiting) > 2 + comm.rank:
                call, is_right = waiting.pop()
                assert is_right(await call), number
        for call, is_right in waiting:
            assert is_right(await call)

    run(4, main)


@looped("seed", range(3))
def test_communicators_run_at_once(seed, run):
    """A rank is in several communicators, and each rank calls them in an order of its own."""

    async def main(comm):
        draw = random.Random(f"{seed} {comm.rank}")
        colors = [(comm.rank % 2, 0), (comm.rank // 3, 0), (0, -comm.rank)]
        parts = [comm, *[await comm.split(color, key) for color, key in colors]]

        async def use(part):
            for number in range(12):
                await asyncio.sleep(draw.choice([0, 0, 1e-3]))
                call, is_right = some_calls(part, number)
                assert is_right(await call)
                x = np.full(1000, 1 << part.rank)
                reduction = await part.solo_allreduce(x, sync_every=3)
                assert reduction.synchronous == (reduction.round % 3 == 0)

        await asyncio.gather(*(use(part) for part in draw.sample(parts, len(parts))))

    run(7, main)


# -- cancellation -------------------------------------------------------------------------------------


async def give_up(call, after_s):
    """Await `call` for `after_s` seconds. Returns whether it was cancelled before it was done."""
    try:
        await asyncio.wait_for(call, after_s)
    except TimeoutError:
        return True
    return False


CANCELLED = {
    "short allreduce": (lambda comm, x: comm.allreduce(x[:100]), {6.0}),
    "allreduce of a window": (lambda comm, x: comm.allreduce(x[:100_000]), {6.0}),
    "long allreduce": (lambda comm, x: comm.allreduce(x), {6.0}),
    "long broadcast": (lambda comm, x: comm.broadcast(x, 1), {2.0}),
    "long allgather": (lambda comm, x: comm.allgather(x), {1.0, 2.0, 3.0}),
}


@pytest.mark.parametrize("what", CANCELLED)
@looped("who", [0, 1, 2])
@looped("others", ["registered", "not"])
def test_the_tensor_of_a_cancelled_call_is_the_callers_and_changes_no_result(what, who, others):
    """No rank writes to it any more, and every result is right."""
    call, result = CANCELLED[what]
    outcomes = Counter()

    async def main(comm, seed, end):
        draw = random.Random(f"{seed} {comm.rank}")
        await asyncio.sleep(draw.uniform(0, 5e-3))
        x = make(comm, np.full(300_000, comm.rank + 1.0, np.float32), others == "registered" or comm.rank == who)
        if comm.rank == who:
            outcomes["given up"] += await give_up(call(comm, x), draw.uniform(1e-4, 1e-2))
            x.fill(-7)
        else:
            try:
                assert set(np.unique(await call(comm, x))) == result
                outcomes["done"] += 1
            except AbortedError:
                outcomes["aborted"] += 1
        await end.wait()
        if comm.rank == who:
            assert (x == -7).all()
        comm.abort("it is over")
        await comm.barrier()

    for seed in range(30):
        with pytest.raises(AbortedError):
            in_virtual_time(3, functools.partial(main, seed=seed, end=asyncio.Barrier(3)), seed)
    assert outcomes["given up"]
    assert outcomes["aborted"]


# -- rounds -------------------------------------------------------------------------------------------


@looped("seed", range(10))
@pytest.mark.parametrize("quorum", [1, 2])
@pytest.mark.parametrize("count", [2, 60_000])
def test_registered_contributions_of_cancelled_calls_count_once_and_are_not_read_later(count, quorum, seed):
    """Every contribution is a different power of two. Its memory is overwritten as soon as it is the caller's again."""
    rounds: dict[int, int] = {}
    calls, last, given_up = 15, 30, []

    async def main(comm):
        draw = random.Random(f"{seed} {comm.rank}")
        newest = 0
        for call in itertools.count():
            if newest == last:
                return
            await asyncio.sleep(draw.uniform(0, 2e-3))
            x = make(comm, np.full(count, 1 << (comm.rank * calls + call) if call < calls else 0), registered=True)
            patience_s = draw.choice([None, draw.uniform(1e-4, 4e-3)])
            work = comm.quorum_allreduce(x, quorum=quorum, history=last, sync_every=last)
            try:
                reduction = await asyncio.wait_for(work, patience_s)
            except TimeoutError:
                given_up.append(call)
                x.fill(-1 << 50)
                continue
            newest = reduction.round
            for number, result in enumerate((*reduction.missed, x), newest - len(reduction.missed)):
                assert rounds.setdefault(number, int(result[0])) == result[0]
                assert (result == result[0]).all()

    in_virtual_time(3, main, seed, jitter_s=2e-3)
    assert given_up
    assert sum(rounds.values()) == (1 << (3 * calls)) - 1


ROUNDS = {
    "solo": lambda comm, x: comm.solo_allreduce(x),
    "solo with history": lambda comm, x: comm.solo_allreduce(x, history=3),
    "majority": lambda comm, x: comm.majority_allreduce(x, history=1),
    "quorum": lambda comm, x: comm.quorum_allreduce(x, quorum=2),
    "group": lambda comm, x: comm.group_allreduce(x, group_size=2, sync_every=5),
}


@pytest.mark.parametrize("kind", ROUNDS)
def test_blocks_are_reused(kind, monkeypatch):
    """The number of blocks is bounded, for any number of rounds and cancelled calls."""
    made = Counter()
    provide = BlockTable.provide

    def count(self, number):
        before = self._cells[self._head + 1]
        provide(self, number)
        made["blocks"] += int(self._cells[self._head + 1] - before)

    monkeypatch.setattr(BlockTable, "provide", count)

    async def main(comm, rounds):
        draw = random.Random(comm.rank)
        newest = 0
        while newest < rounds:
            call = ROUNDS[kind](comm, make(comm, np.ones(100), draw.random() < 0.5))
            if draw.random() < 0.2:
                await give_up(call, draw.uniform(0, 2e-3))
                continue
            newest = (await call).round
            await asyncio.sleep(draw.expovariate(1000))

    def blocks(rounds):
        made.clear()
        in_virtual_time(4, functools.partial(main, rounds=rounds), rounds)
        return made["blocks"]

    few, many = blocks(150), blocks(600)
    assert few > 0
    assert many <= few + 4


def test_a_call_that_waits_for_earlier_ones_is_woken_by_them_only(monkeypatch):
    """Otherwise all waiting calls check each change, and the time of n calls in flight grows as n squared."""
    slept = 0
    sleep = PythonControlBlock.ring_at_next_wake

    def count(control_block: PythonControlBlock, doorbell: int) -> None:
        nonlocal slept
        slept += 1
        sleep(control_block, doorbell)

    monkeypatch.setattr(PythonControlBlock, "ring_at_next_wake", count)

    async def main(comm: Communicator, calls: int) -> None:
        arrays = [np.ones(3) for _ in range(calls)]
        await asyncio.gather(*[comm.allreduce(x) for x in arrays])
        assert all((x == comm.size).all() for x in arrays)

    def sleeps(calls: int) -> float:
        nonlocal slept
        slept = 0
        simulate(3, lambda comm: main(comm, calls), Network(jitter_s=1e-3), shared_memory=True)
        return slept / calls

    assert sleeps(800) < 2 * sleeps(50)


def test_calls_that_wait_for_earlier_ones_fail_with_their_communicator(run):
    """No call is left waiting for its turn."""

    async def main(comm: Communicator) -> int:
        part = await comm.split(0)
        if comm.rank == 1:
            call = asyncio.ensure_future(part.barrier())  # the others' first call, as another operation
            await asyncio.gather(call, return_exceptions=True)
            return 0
        calls = [part.allreduce(np.ones(3)) for _ in range(50)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        return sum(isinstance(outcome, MismatchError) for outcome in outcomes)

    assert run(3, main) == [50, 0, 50]


@pytest.mark.parametrize("count", [100, 100_000, 2_000_000])
def test_a_rank_without_room_for_a_call_ends_it_for_all(count):
    """The call is numbered by then, and the others would wait for this rank."""

    def refuse(nbytes):
        raise UsageError(f"no room for {nbytes} bytes: use smaller tensors")

    async def main(comm):
        try:
            await comm.barrier()  # a slow rank may still be in it when the call of rank 1 has failed
            if comm.rank == 1:
                comm._core.backend.memory.allocate = refuse
            await comm.allreduce(np.ones(count))
        except (AbortedError, UsageError) as error:
            failures[comm.rank] = error
            if len(failures) == 3:
                have_failed.set()
            await have_failed.wait()  # the first rank that raises ends the others
            raise

    failures, have_failed = {}, asyncio.Event()
    with pytest.raises((AbortedError, UsageError), match="no room"):
        run_ranks(3, main, "shm")
    assert {rank: type(error) for rank, error in failures.items()} == {0: AbortedError, 1: UsageError, 2: AbortedError}
    assert "no room for" in str(failures[0])


def test_a_late_call_is_given_no_round_after_the_one_that_takes_its_contribution(monkeypatch):
    """Other ranks may open rounds between any two critical sections of the call."""

    async def at_once(self):
        return None

    def rounds_meanwhile(self, call):
        if self._rank == 1 and not others:
            others.extend(comms[0].solo_allreduce(np.ones(4)) for _ in range(2))
        return deliver(self, call)

    others, comms, deliver = [], {}, OneSidedRounds._deliver
    monkeypatch.setattr(OneSidedRounds, "_pause", at_once)
    monkeypatch.setattr(OneSidedRounds, "_deliver", rounds_meanwhile)

    async def main(comm):
        comms[comm.rank] = comm
        x = np.full(4, 10.0)
        if comm.rank == 0:
            await comm.solo_allreduce(np.ones(4))
            await comm.barrier()
            await comm.barrier()
            return [(await other).active for other in others]
        await comm.barrier()
        late = await comm.solo_allreduce(x)
        await comm.barrier()
        return late.round, late.included, x.tolist()

    # Rank 1 does without the core: in that a late call is one critical section.
    assert run_ranks(2, main, "shm-mixed") == [[2, 1], (1, False, [1.0] * 4)]
