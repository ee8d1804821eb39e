"""Dense calls of ranks on several hosts: they meet in the memory of each host, and hosts exchange by message."""

from __future__ import annotations

import asyncio
import functools
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import asyncoll
from asyncoll.algorithms.dense import two_level
from asyncoll.algorithms.dense.two_level import EXCHANGES, TwoLevelCall
from asyncoll.errors import MismatchError
from asyncoll.runtime.hosts import Hosts
from asyncoll.statistics import Traffic
from asyncoll.testing import run_ranks, simulate
from asyncoll.transport.messages.simulated import Network
from tests.support.cases import looped

LAYOUTS = ["01", "001", "010", "0012", "01101", "000111", "0120120"]  # `asyncoll laws --kind dense` draws others
JITTERY = Network(jitter_s=1e-4)
COUNTS = (0, 1, 17, 5000)


@functools.cache  # each rank needs those of all
def drawn(rank, count):
    return torch.randint(0, 4, (count,), generator=torch.Generator().manual_seed(count + rank))


def values(rank, count, dtype):
    return drawn(rank, count).to(dtype)


async def every_call(comm, counts=COUNTS):
    """Every dense call, compared with its definition. Returns an allreduce of floats, whose bits must agree."""
    size, rank = comm.size, comm.rank
    for count in counts:
        root = count % size
        for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.bool):
            of_all = torch.stack([values(each, count, dtype) for each in range(size)]).double()
            op = asyncoll.MAX if dtype is torch.bool else asyncoll.SUM
            expected = of_all.amax(0) if dtype is torch.bool else of_all.sum(0)
            assert torch.equal(await comm.allreduce(values(rank, count, dtype), op=op), expected.to(dtype))
            mine = await comm.reduce(values(rank, count, dtype), root=root, op=op)
            assert torch.equal(mine, expected.to(dtype) if rank == root else values(rank, count, dtype))
        mean = await comm.allreduce(values(rank, count, torch.bfloat16), op=asyncoll.AVG)
        sums = torch.stack([values(each, count, torch.float32) for each in range(size)]).sum(0)
        assert torch.equal(mean, (sums / size).bfloat16())
        assert (await comm.broadcast(torch.full((count,), rank), root=root) == root).all()
        ranks = torch.arange(size)[:, None].expand(size, count)
        assert torch.equal(torch.stack(tuple(await comm.allgather(torch.full((count,), rank)))), ranks)
        assert torch.equal(torch.stack(tuple(await comm.alltoall(torch.full((size, count), rank)))), ranks)
        shard = await comm.reduce_scatter(ranks + rank)
        assert (shard.flatten() == rank * size + size * (size - 1) // 2).all()
        await comm.barrier()
    return (await comm.allreduce(np.random.default_rng(rank).standard_normal(9973))).tobytes()


@pytest.mark.parametrize("hosts", [*LAYOUTS, "00001111", "0123012301"])
def test_an_array_with_a_share_for_each_leader_is_reduced_where_it_lies(hosts):
    """By each leader, its own part first: it must not be read once more where the sum is."""

    async def main(comm):
        return sorted({float(each) for each in await comm.allreduce(np.ones(16_384, np.float32))})

    world = simulate(len(hosts), main, JITTERY, shared_memory=True, hosts=hosts)
    assert world.results == [[len(hosts)]] * len(hosts)


@pytest.mark.parametrize("hosts", LAYOUTS)
def test_every_call_on_every_layout(hosts):
    results = simulate(len(hosts), every_call, JITTERY, seed=len(hosts), shared_memory=True, hosts=hosts).results
    assert len(set(results)) == 1


@pytest.mark.parametrize("hosts", [*LAYOUTS, "0" * 6 + "1" * 7, "01234567801234567"])
@pytest.mark.parametrize("memory", [True, False], ids=["memory", "messages"])
def test_every_call_in_many_windows(hosts, memory, monkeypatch):
    """The bits of reductions of blocks do not depend on the windows."""
    bits = []

    async def main(comm):
        x = np.random.default_rng(comm.rank).standard_normal((comm.size, 700)).astype(np.float32)
        shard = await comm.reduce_scatter(x)
        half = await comm.reduce_scatter(torch.from_numpy(x).bfloat16(), op=asyncoll.AVG)
        uneven = await comm.allgatherv(np.arange(100 * comm.rank, 100 * comm.rank + 3 * comm.rank % 7))
        await every_call(comm, (1, 700))
        return shard.tobytes(), half.view(torch.int16).numpy().tobytes(), [each.tobytes() for each in uneven]

    for nbytes in (1 << 22, 1 << 12):
        monkeypatch.setattr(two_level, "_WINDOW_BYTES", nbytes)
        bits.append(simulate(len(hosts), main, JITTERY, shared_memory=memory, hosts=hosts).results)
    assert bits[0] == bits[1]


def test_hosts_without_memory():
    assert len(set(simulate(5, every_call, JITTERY, hosts="01011").results)) == 1


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_real_memory_and_sockets(transport):
    assert len(set(run_ranks(5, every_call, transport, hosts="01101"))) == 1


async def calls_of_functions(comm):
    """Every rank calls every rank, with an array and a stream."""

    async def shifted(x, by):
        return x + by

    async def counting(count):
        for number in range(count):
            yield np.full(1000, number)

    comm.rpc.register(shifted)
    comm.rpc.register(counting)
    await comm.barrier()
    for dest in range(comm.size):
        for count in (0, 10, 100_000):
            x = np.arange(count) + comm.rank
            assert (await comm.rpc.call(dest, "shifted", x, dest) == x + dest).all()
        assert [int(item[0]) async for item in comm.rpc.stream(dest, "counting", 3)] == [0, 1, 2]
    await comm.barrier()


@pytest.mark.parametrize("hosts", ["0011", "01101"])
def test_rpc_of_a_host_passes_through_its_memory(hosts):
    trace = simulate(len(hosts), calls_of_functions, JITTERY, shared_memory=True, hosts=hosts).trace
    sizes = [payload for _, source, dest, payload in trace if hosts[source] == hosts[dest]]
    assert max(sizes, default=0) < 1000
    assert any(payload > 100_000 for *_, payload in trace)


def test_rpc_between_hosts_of_real_memory():
    run_ranks(5, calls_of_functions, "shm", hosts="01101")


def test_local_ranks_count_on_each_host():
    async def main(comm):
        part = await comm.split(0 if comm.rank else None, key=-comm.rank)  # ranks 4, 3, 2, 1
        return comm.local_rank, comm.local_size, part and (part.local_rank, part.local_size)

    assert run_ranks(5, main, hosts="01101") == [
        (0, 2, None),
        (0, 3, (2, 3)),
        (1, 3, (1, 3)),
        (1, 2, (0, 1)),
        (2, 3, (0, 3)),
    ]


def test_long_arrays_pass_in_windows():
    """Of 4 MiB: three and a part."""

    async def main(comm):
        x = np.full(3_400_000, comm.rank, "f4")
        return (await comm.allreduce(x)).min(), x.max(), (await comm.broadcast(x, root=2)).sum()

    for least, most, total in simulate(5, main, JITTERY, shared_memory=True, hosts="00101").results:
        assert (least, most, total) == (10, 10, 34_000_000)


@pytest.mark.parametrize("passing", ["scatter", "gather", "neighbor_average"])
def test_a_call_by_message_passes_the_memory_of_an_earlier_call_on_only_after_that(passing):
    """Every 4th call uses the same memory. Call 5 uses none, and is over while call 1, of two windows, needs it."""

    async def main(comm):
        calls = {
            "scatter": lambda: comm.scatter([np.ones(3)] * comm.size if comm.rank == 0 else None),
            "gather": lambda: comm.gather(np.ones(3)),
            "neighbor_average": lambda: comm.neighbor_average(np.ones(3)),
        }
        long = asyncio.ensure_future(comm.allreduce(np.ones(1_000_000)))
        if comm.rank == 1:
            await long
        works = [comm.barrier(), comm.barrier(), comm.barrier(), calls[passing](), *(comm.barrier() for _ in range(4))]
        await asyncio.gather(*works)
        return set(await long)

    world = simulate(6, main, JITTERY, shared_memory=True, hosts="000001")
    assert world.results == [{6.0}] * 6


def test_hosts_may_be_several_windows_ahead():
    """Of the root, whose host comes late: their shares are short messages, which wait for no receive."""

    async def main(comm):
        await asyncio.sleep(comm.rank < 4)
        return (await comm.reduce(np.full(9_000_000, comm.rank, "i1"), root=0))[[0, 4_200_000, -1]].tolist()

    assert simulate(8, main, JITTERY, shared_memory=True, hosts="00001111").results[0] == [28, 28, 28]


def test_each_byte_crosses_the_network_once_per_host():
    hosts, nbytes = "00001111", 80_000

    async def main(comm):
        await comm.allreduce(np.ones(nbytes // 8))

    trace = simulate(8, main, Network(), shared_memory=True, hosts=hosts).trace
    between = sum(payload for _, source, dest, payload in trace if hosts[source] != hosts[dest])
    assert between == 2 * nbytes  # each of the two hosts sends as much as the array has
    assert not sum(payload for _, source, dest, payload in trace if hosts[source] == hosts[dest])


@pytest.mark.parametrize("odd", range(4))
def test_calls_that_do_not_match_are_errors_at_all_ranks(odd):
    """Also if the ranks of each host agree among each other."""
    heard = []

    async def main(comm):
        differs = comm.rank // 2 == odd - 2 if odd >= 2 else comm.rank == odd
        try:
            await comm.allreduce(np.ones(8 if differs else 9))
        except MismatchError:
            heard.append((comm.rank, asyncio.get_running_loop().time() < 1))
            await asyncio.sleep(1)  # a rank that leaves tells all others

    simulate(4, main, JITTERY, shared_memory=True, hosts="0011")
    assert sorted(heard) == [(rank, True) for rank in range(4)]


COLLECTIVES = {
    "barrier": lambda comm, x: comm.barrier(),
    "allreduce": lambda comm, x: comm.allreduce(x),
    "reduce": lambda comm, x: comm.reduce(x, root=2),
    "broadcast": lambda comm, x: comm.broadcast(x, root=0),
    "gather": lambda comm, x: comm.gather(x, root=0),
    "scatter": lambda comm, x: comm.scatter([x] * comm.size, root=0),
    "alltoall": lambda comm, x: comm.alltoall(np.stack([x] * comm.size)),
}


ONE_WAY = ["gather", "scatter", "reduce"]


@pytest.mark.parametrize("count", [0, 4])
@looped("one, other", [each for each in itertools.product(ONE_WAY, COLLECTIVES) if each[0] != each[1]])
@looped("odd", [{0}, {1}, {2, 3}])
def test_calls_that_go_other_ways_meet(count, one, other, odd):
    """In the memory of hosts, between leaders, and by message alone."""
    heard = []

    async def main(comm):
        try:
            await COLLECTIVES[other if comm.rank in odd else one](comm, np.ones(count, np.float32))
            for _ in range(2):  # ranks that do not wait for each other complete these before they know
                await comm.barrier()
        except MismatchError as error:
            heard.append(str(error))
            await asyncio.sleep(1)

    simulate(4, main, shared_memory=True, hosts="0011")
    assert len(heard) == 4
    assert all(f"{one} #1" in text and f"{other} #1" in text for text in heard)


@pytest.mark.parametrize("rank", range(5))
def test_a_cancelled_call_ends_all_ranks(rank):
    heard = []

    async def main(comm):
        call = asyncio.create_task(comm.allreduce(np.ones(100_000))) if comm.rank != (rank + 1) % 5 else None
        await asyncio.sleep(0.01)
        if comm.rank == rank:
            call.cancel()
        try:
            await (call or asyncio.sleep(1))
            await comm.barrier()
        except (asyncio.CancelledError, asyncoll.AbortedError):
            heard.append(comm.rank)

    simulate(5, main, JITTERY, shared_memory=True, hosts="00110")
    assert sorted(heard) == [0, 1, 2, 3, 4]


def test_the_layout():
    hosts = Hosts.of("abaab", 3)
    assert (hosts.ranks, hosts.mine, hosts.place) == (((0, 2, 3), (1, 4)), 0, 2)
    assert (hosts.here, hosts.leaders, hosts.is_leader, hosts.host[4]) == ((0, 2, 3), 2, False, 1)
    assert Hosts.of("abaab", 4).team == (2, 4)
    assert hosts.carried[0] == [(0, 3), (1,)]
    assert hosts.carried[1] == [(2,), (4,)]
    assert hosts.carried[1] is hosts.carried[1]  # computed once


@looped("rest", [100, 4000, 7000])
def test_a_share_of_a_short_window_has_room(rest):
    """It may be larger than one of a full window, as fewer leaders have a share."""
    hosts = Hosts.of([rank // 200 for rank in range(400)], 0)
    call = TwoLevelCall(hosts, SimpleNamespace(rank=0, size=400), None, None, [])
    windows = call._windows(np.zeros(2 * (1 << 20) + rest, "f4"), in_place=False)
    assert [window.mine.size for window in windows] == [window.shares[0].size for window in windows]


class Within:
    """A host whose second reduction waits, or fails."""

    rank, traffic = 0, Traffic()

    def __init__(self, error):
        self.error = error
        self.is_second = False

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def reduce_scatter(self, *_):
        await asyncio.sleep(0.1)
        if self.is_second and self.error is not None:
            raise self.error
        if self.is_second:
            await asyncio.Event().wait()
        self.is_second = True

    alltoall = reduce_scatter


class Between(Within):
    """Leaders that never end an exchange."""

    size = 4

    def __init__(self):
        self.began, self.ended = 0, 0

    async def allreduce(self, *_):
        self.began += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.ended += 1

    reduce_scatter = allgather = allreduce


X = np.zeros(3_000_000, "f4")
CALLS = {
    "allreduce": lambda call: call.allreduce(X, asyncoll.SUM, "float32"),
    "reduce_scatter": lambda call: call.reduce_scatter(np.split(X, 4), X[:750_000].copy(), asyncoll.SUM, "float32"),
    "allgather": lambda call: call.allgather(np.split(X, 4)),
}


@pytest.mark.parametrize("error", [None, ZeroDivisionError()])
@pytest.mark.parametrize("name", CALLS)
def test_no_exchange_of_a_window_outlives_its_call(error, name):
    """Whether the call fails within the host or is cancelled there."""

    async def main(comm):
        within, between = Within(error), Between()
        call = TwoLevelCall(Hosts.of("aaab", 0), between, within, lambda work: work, [between] * EXCHANGES)
        with pytest.raises(ZeroDivisionError if error else TimeoutError):
            async with asyncio.timeout(1), call:
                await CALLS[name](call)
        assert (between.began, between.ended) == (1, 1)

    simulate(1, main)
