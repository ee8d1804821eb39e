"""Every textbook collective, against numpy, at awkward numbers of ranks."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

import asyncoll
from asyncoll import AVG, BAND, BOR, BXOR, MAX, MIN, PROD, SUM, UsageError
from asyncoll.algorithms.dense import by_size, on_lane
from asyncoll.algorithms.seam.call import Call
from asyncoll.runtime.signature import site_outside
from asyncoll.tensors.operands import as_operand
from asyncoll.tensors.reductions import DTYPES, combiner, fill_neutral
from asyncoll.testing import Network, simulate
from tests.support.cases import SIZES, case, looped

sizes = pytest.mark.parametrize("size", SIZES)
ALGORITHMS = [on_lane.tree, on_lane.recursive_doubling, on_lane.rabenseifner, on_lane.ring, on_lane.rings]


def counts(size: int) -> list[int]:
    """The lengths that one world runs, another one first at each size: the first call of a communicator is special."""
    lengths = [0, 1, 7, 5000, 300_000]
    first = size % len(lengths)
    return lengths[first:] + lengths[:first]


def rows(size: int, count: int, dtype: str = "int64") -> np.ndarray:
    """A different array for each rank: small whole numbers, so that every sum is exact."""
    return np.random.default_rng([size, count]).integers(-9, 10, (size, count)).astype(dtype)


@sizes
def test_allreduce(size, run):
    lengths = {count: rows(size, count, "float32") for count in counts(size)}
    sums = {count: data.sum(0) for count, data in lengths.items()}

    async def main(comm):
        for count, data in lengths.items():
            with case(count=count):
                x = data[comm.rank].copy()
                assert await comm.allreduce(x) is x
                assert np.array_equal(x, sums[count])

    run(size, main)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@looped("size", SIZES)
@looped("count", [0, 1, 5, 100, 3001])
def test_each_allreduce_gives_every_rank_the_same_bits(size, algorithm, count, monkeypatch):
    data = np.random.default_rng(count).standard_normal((size, count)).astype("complex64") * (1 + 0.3j)
    monkeypatch.setattr(by_size, "allreduce", lambda lane, x, combine, whole=0: algorithm(lane, x, combine))

    async def main(comm):
        return await comm.allreduce(data[comm.rank].copy(), PROD)

    results = simulate(size, main, Network(jitter_s=1e-4), seed=count).results
    for x in results:
        assert x.tobytes() == results[0].tobytes()
    np.testing.assert_allclose(results[0], data.prod(0), rtol=1e-3)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@looped("size", SIZES)
@looped("count", [0, 5, 3001])
def test_piggybacked_data_reaches_every_rank(size, algorithm, count, monkeypatch):
    """A round's participation list, here among messages that overtake each other and come before they are asked for."""
    monkeypatch.setattr(by_size, "allreduce", lambda lane, x, combine, whole=0: algorithm(lane, x, combine))

    async def main(comm):
        for _ in range(3):
            reduction = await comm.group_allreduce(np.ones(count), group_size=size, sync_every=1)
            assert reduction.active == size
        return comm.statistics().operations["group"].active

    assert simulate(size, main, Network(jitter_s=1e-2), seed=count).results == [{size: 3}] * size


@sizes
def test_broadcast_reduce_gather_and_scatter(size, run):
    lengths = {count: rows(size, count) for count in counts(size)}
    greatest = {count: data.max(0) for count, data in lengths.items()}

    async def main(comm):
        for count, data in lengths.items():
            for root in sorted({0, size - 1}):
                with case(count=count, root=root):
                    await one_root(comm, data, greatest[count], root)

    async def one_root(comm, data, greatest, root):
        rank = comm.rank
        got = await comm.broadcast(data[rank].copy(), root)
        assert np.array_equal(got, data[root])
        x = data[rank].copy()
        assert await comm.reduce(x, root, MAX) is x
        assert np.array_equal(x, greatest if rank == root else data[rank])
        gathered = await comm.gather(data[rank], root)
        if rank == root:
            assert np.array_equal(gathered, data)
        else:
            assert gathered is None
        parts = [np.full((place, 2), place, "f4") for place in range(size)]
        mine = await comm.scatter(parts if rank == root else None, root)
        np.testing.assert_array_equal(mine, parts[rank])

    run(size, main)


@sizes
def test_reduce_scatter_allgather_and_alltoall(size, run):
    table = np.random.default_rng(0).integers(0, 99, (size, 3 * size, 2))
    lengths = {count: rows(size, count) for count in counts(size)}
    shards = {count: np.array_split(data.sum(0), size) for count, data in lengths.items()}

    async def main(comm):
        for count, data in lengths.items():
            with case(count=count):
                await parts(comm, data, shards[count][comm.rank])

    async def parts(comm, data, shard):
        rank = comm.rank
        assert np.array_equal(await comm.allgather(data[rank]), data)
        assert np.array_equal(await comm.reduce_scatter(data[rank].copy()), shard)
        received = await comm.alltoall(table[rank])
        assert np.array_equal(received, np.concatenate([t[3 * rank : 3 * rank + 3] for t in table]))

    run(size, main)


@sizes
def test_allgatherv_and_alltoallv_take_different_shapes(size, run):
    def piece(source, dest):
        return torch.full((source % 3, dest % 4), 10.0 * source + dest, dtype=torch.bfloat16)

    async def main(comm):
        rank = comm.rank
        for place, x in enumerate(await comm.allgatherv(piece(rank, rank))):
            assert torch.equal(x, piece(place, place))
        sent = [piece(rank, dest) for dest in range(size)]
        for place, x in enumerate(await comm.alltoallv(sent)):
            assert torch.equal(x, piece(place, rank))

    run(size, main)


@looped("size", SIZES)
def test_barrier_waits_for_the_last_rank(size, simulated):
    async def main(comm):
        import asyncio

        loop = asyncio.get_running_loop()
        await asyncio.sleep(comm.rank)
        await comm.barrier()
        return loop.time()

    assert min(simulated(size, main).results) >= size - 1


@pytest.mark.parametrize("size", [3, 6])
def test_collectives_of_one_call_do_not_mix(size):
    """A rank that is done with one begins the next, while others have not posted their receives of the first."""
    orders = np.random.default_rng(size).integers(8, size=(20, 4))

    async def one(calls, which, turn):
        rank, root = calls.rank, turn % calls.size
        x, mine = np.full(3, rank), np.full(1, rank)
        blocks = [np.full(1, each) for each in range(size)]
        total = size * (size - 1) // 2
        if which == 0:
            await calls.barrier()
        elif which == 1:
            await calls.allreduce(x, SUM, "int64")
            assert (x == total).all()
        elif which == 2:
            await calls.reduce(x, SUM, "int64", root)
            assert (x == (total if rank == root else rank)).all()
        elif which == 3:
            await calls.reduce_scatter(blocks, mine, SUM, "int64")
            assert mine == size * rank
        elif which == 4:
            await calls.broadcast(x, root)
            assert (x == root).all()
        elif which == 5:
            await calls.scatter(blocks, mine, root)
            assert mine == rank
        elif which == 6:
            got = [np.empty(1, int) if each != rank else mine for each in range(size)]
            await calls.allgather(got)
            assert got == blocks
        else:
            got = [np.empty(1, int) for _ in range(size)]
            await calls.alltoall([mine] * size, got)
            assert got == blocks

    async def main(comm):
        draw = np.random.default_rng([size, comm.rank])
        for order in orders:

            async def body(calls, order=order):
                for turn, which in enumerate(order):
                    if draw.integers(2):
                        await asyncio.sleep(draw.exponential(1e-3))
                    await one(calls, which, turn)

            await comm._calls.start(Call(comm._calls.number("barrier", "", -1, "", site_outside()), body))

    simulate(size, main, Network(jitter_s=1e-3))


@pytest.mark.parametrize("size", SIZES[1:])
def test_long_arrays_wait_for_their_receive_and_short_ones_do_not(size, run):
    async def main(comm):
        right, left = (comm.rank + 1) % size, (comm.rank - 1) % size
        for count in (0, 3, 1 << 20):
            x = np.full(count, comm.rank, "f4")
            sending = comm.send(x, right, tag=5)
            y = await comm.recv(np.empty(count, "f4"), left, tag=5)
            await sending
            assert (y == left).all()

    run(size, main)


def test_messages_of_one_tag_keep_their_order_and_tags_do_not_mix(run):
    async def main(comm):
        if comm.rank == 0:
            for value in range(20):
                await comm.send(np.array([value]), 1, tag=value % 2)
            return []
        odd = [int((await comm.recv(np.zeros(1, "i8"), 0, tag=1))[0]) for _ in range(10)]
        even = [int((await comm.recv(np.zeros(1, "i8"), 0, tag=0))[0]) for _ in range(10)]
        return odd + even

    assert run(2, main)[1] == [*range(1, 20, 2), *range(0, 20, 2)]


def test_calls_may_be_awaited_in_any_order(run):
    async def main(comm):
        first, second = np.ones(3), np.full(3, 2.0)
        a, b = comm.allreduce(first), comm.allreduce(second)
        if comm.rank % 2:
            await a
            await b
        else:
            await b
            await a
        return first[0], second[0]

    assert set(run(4, main)) == {(4.0, 8.0)}


# -- dtypes and layouts --------------------------------------------------------------------------

SENSIBLE = {
    "bool": [SUM, PROD, MIN, MAX, BAND, BOR, BXOR],
    **{key: [SUM, AVG, PROD, MIN, MAX] for key in ("float64", "float32", "float16", "bfloat16")},
    **{key: [SUM, AVG, PROD] for key in ("complex64", "complex128")},
}
INTEGER = [SUM, PROD, MIN, MAX, BAND, BOR, BXOR]
REFERENCE = {
    SUM: lambda t: t.sum(0),
    PROD: lambda t: t.prod(0),
    MIN: lambda t: t.amin(0),
    MAX: lambda t: t.amax(0),
    AVG: lambda t: t.sum(0) / t.shape[0],
}


def expected(op, stacked: torch.Tensor) -> torch.Tensor:
    dtype = stacked.dtype
    if op in (BAND, BOR, BXOR):
        ufunc = {BAND: np.bitwise_and, BOR: np.bitwise_or, BXOR: np.bitwise_xor}[op]
        return torch.from_numpy(ufunc.reduce(stacked.numpy(), 0))
    if dtype == torch.bool:
        return stacked.any(0) if op in (SUM, MAX) else stacked.all(0)
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    return REFERENCE[op](stacked.to(wide)).to(dtype)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_every_dtype_and_reduction(size, run):
    values = torch.from_numpy(np.random.default_rng(1).integers(0, 4, (size, 6)))

    async def main(comm):
        for dtype in DTYPES:
            for op in SENSIBLE.get(dtype, INTEGER):
                with case(dtype=dtype, op=op):
                    await reduced(comm, values.to(getattr(torch, dtype)), op)

    async def reduced(comm, stacked, op):
        x = stacked[comm.rank].clone()
        await comm.allreduce(x, op)
        torch.testing.assert_close(x, expected(op, stacked), rtol=1e-2, atol=1e-2)
        if stacked.dtype != torch.bfloat16:
            y = stacked[comm.rank].clone().numpy()
            await comm.allreduce(y, op)
            torch.testing.assert_close(torch.from_numpy(y), x, rtol=0, atol=0)

    run(size, main)


def test_neutral_elements_change_nothing():
    """The contribution of a rank that has none, in rounds that reduce over all ranks."""
    for dtype in DTYPES:
        for op in SENSIBLE.get(dtype, INTEGER):
            with case(dtype=dtype, op=op):
                values = as_operand(torch.tensor([0, 1, 3]).to(getattr(torch, dtype))).flat
                neutral = np.empty_like(values)
                fill_neutral(neutral, op, dtype)
                combined = values.copy()
                combiner(op, dtype)(combined, neutral)
                np.testing.assert_array_equal(combined, values)


async def averages(comm, x):
    """The average of all ranks' `x`, by every call that supports AVG, complete at every rank."""
    for average in [comm.allreduce, comm.reduce]:
        y = x.clone()
        await average(y, op=AVG)
        await comm.broadcast(y)
        yield y
    rows = await comm.allgatherv(await comm.reduce_scatter(x, op=AVG))
    yield torch.cat(rows)
    for number, call in enumerate([comm.solo_allreduce, comm.majority_allreduce, comm.group_allreduce]):
        options = {"group_size": comm.size} if number == 2 else {}
        y, z = x.clone(), torch.ones(3)
        await call(y, op=AVG, sync_every=1, name=f"one {number}", **options)
        yield y
        buckets = [x.clone(), z, x.clone()]
        await call(buckets, op=AVG, sync_every=1, name=f"buckets {number}", **options)
        assert bool((z == 1).all())
        yield buckets[0]
        yield buckets[2]


@looped("dtype", [torch.float16, torch.bfloat16])
@looped("count", [1, 70_000])
@looped("size", [2, 3])
def test_an_average_of_halves_is_rounded_once(size, count, dtype, run):
    """By message, the average of 40000 and 40000 was once infinite: float16 cannot hold the sum."""
    draw = torch.Generator().manual_seed(size)
    values = torch.randint(1, 256, (size, count), generator=draw) * 128  # so float32 adds up exactly, in any order
    values[:, 0] = 40_000
    stacked = values.to(dtype)
    expected = (stacked.float().sum(0) / size).to(dtype)

    async def main(comm):
        return [y async for y in averages(comm, stacked[comm.rank])]

    for told in run(size, main):
        assert len(told) == 12
        for y in told:
            torch.testing.assert_close(y, expected, rtol=0, atol=0)


def test_missed_averages_of_halves_are_rounded_once_too(simulated):
    async def main(comm):
        if comm.rank == 1:
            await asyncio.sleep(10)
        for _ in range(1 if comm.rank == 1 else 3):
            x = torch.full((3,), 60_000.0, dtype=torch.float16)
            reduction = await comm.solo_allreduce(x, op=AVG, history=3)
        return reduction.missed

    missed = simulated(2, main).results[1]
    assert [x.tolist() for x in missed] == [[30_000] * 3] * 2
    assert {x.dtype for x in missed} == {torch.float16}


def test_halves_at_one_rank_and_floats_at_another_are_a_mismatch(simulated):
    """Both are packed as float32."""

    async def main(comm):
        x = torch.ones(3, dtype=torch.float16 if comm.rank else torch.float32)
        with pytest.raises(asyncoll.MismatchError, match="3 float16"):
            await comm.solo_allreduce(x, op=AVG, sync_every=1)

    simulated(2, main)


@looped("dtype", DTYPES)
def test_undefined_reductions_are_refused(dtype, run):
    async def main(comm):
        for op in set(asyncoll.ReduceOp) - set(SENSIBLE.get(dtype, INTEGER)) - {asyncoll.AVG_ACTIVE}:
            with pytest.raises(UsageError, match=f"{op.name} is not defined for {dtype}"):
                await comm.allreduce(torch.ones(2).to(getattr(torch, dtype)), op)
        await comm.barrier()  # a refused call has taken no number

    run(2, main)


LAYOUTS = {
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).t(),
    "strided": lambda: torch.arange(12.0)[::3],
    "column": lambda: torch.arange(12.0).reshape(3, 4)[:, 1],
    "channels last": lambda: torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "0-d": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 5),
    "leaf": lambda: torch.ones(3, requires_grad=True),
    "conjugated": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negated": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "numpy transposed": lambda: np.arange(12.0).reshape(3, 4).T,
    "numpy reversed": lambda: np.arange(5)[::-1],
    "numpy big-endian": lambda: np.arange(5, dtype=">f4"),
    "numpy 0-d": lambda: np.array(3.0),
    "numpy matrix": lambda: np.arange(6.0).reshape(2, 3).view(np.matrix),
    "numpy matrix transposed": lambda: np.arange(6.0).reshape(2, 3).view(np.matrix).T,
    "numpy record array": lambda: np.arange(3.0).view(np.recarray),
    "numpy fortran": lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
}


@looped("layout", LAYOUTS)
def test_every_layout_is_reduced_in_place(layout, run):
    async def main(comm):
        x, original = LAYOUTS[layout](), LAYOUTS[layout]()
        assert await comm.allreduce(x) is x
        received = await comm.allgather(original)
        return x, original, received

    for x, original, received in run(3, main):
        assert x.dtype == original.dtype
        assert x.shape == original.shape
        np.testing.assert_array_equal(plain(x), 3 * plain(original))
        np.testing.assert_array_equal(plain(received), np.stack([plain(original)] * 3))


def plain(x) -> np.ndarray:
    return np.asarray(x) if isinstance(x, np.ndarray) else x.detach().resolve_conj().resolve_neg().numpy()


def test_memory_between_the_elements_of_a_strided_tensor_is_unchanged(run):
    async def main(comm):
        base = np.zeros((4, 4))
        await comm.allreduce(base[1:3, ::2] + 1)
        view = base[1:3, ::2]
        view += 1
        await comm.allreduce(view)
        return base

    for base in run(2, main):
        assert base.sum() == 8
        np.testing.assert_array_equal(base[1:3, ::2], 2)


COUNTS = ("messages_sent", "messages_received", "bytes_sent", "bytes_received")


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_totals_of_a_rank_are_the_sums_of_its_calls(size, run):
    """In shared memory, a rank that had reduced megabytes once reported 13 bytes sent."""

    async def main(comm):
        part = await comm.split(comm.rank % 2)
        before = comm.statistics()
        for some in (comm, part):
            await some.allreduce(np.ones(3))
            await some.allreduce(np.ones(100_000))
            await some.broadcast(np.ones(1000))
            await some.alltoallv([np.ones(200)] * some.size)
        sending = comm.send(np.ones(1000), (comm.rank + 1) % size) if size > 1 else None
        if sending is not None:
            await comm.recv(np.ones(1000), (comm.rank - 1) % size)
            await sending
        after, of_part = comm.statistics(), part.statistics()
        assert all(getattr(after, count) == getattr(of_part, count) for count in COUNTS)
        calls = [*after.calls.values(), *of_part.calls.values()]
        for count in COUNTS:
            total, of_calls = getattr(after, count), sum(getattr(call, count) for call in calls)
            assert total >= of_calls
            assert not count.startswith("bytes") or total - of_calls < 4096  # of control messages
        return after.bytes_sent - before.bytes_sent

    assert all((grown > 800_000) == (size > 1) for grown in run(size, main))


# -- split ---------------------------------------------------------------------------------------


@sizes
def test_split_orders_by_key_and_colours_do_not_mix(size, run):
    async def main(comm):
        part = await comm.split(comm.rank % 3, key=-comm.rank)
        members = [rank for rank in range(size) if rank % 3 == comm.rank % 3][::-1]
        assert (part.size, part.rank) == (len(members), members.index(comm.rank))
        got = await part.allgather(np.array([comm.rank]))
        assert got.ravel().tolist() == members
        reduction = await part.solo_allreduce(np.ones(1), sync_every=1)
        assert reduction.active == part.size
        nobody = await comm.split(None)
        assert nobody is None
        again = await part.split(0)
        total = await again.allreduce(np.array([comm.rank]))
        assert total[0] == sum(members)

    run(size, main)


def test_local_rank_and_local_size_count_the_ranks_of_a_host(run):
    async def main(comm):
        return comm.local_rank, comm.local_size, len(comm.hosts)

    assert run(3, main) == [(0, 3, 3), (1, 3, 3), (2, 3, 3)]
