"""Gossip: averages with neighbours, push-sum and pairwise averages. Laws for any number of ranks, and failures."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from functools import partial

import numpy as np
import pytest
import torch

from asyncoll import AbortedError, DeadlineError, DeviceError, MismatchError, PeerLostError, UsageError, deadline
from asyncoll.algorithms.gossip import graphs
from asyncoll.algorithms.gossip.graphs import Graph, partners, period
from asyncoll.testing import Crash, Network, Pause, fake_device, run_ranks, simulate
from tests.support.cases import SIZES, case, looped
from tests.support.ranks import failures

JITTERY = Network(latency_s=10e-6, jitter_s=50e-6)
GRAPHS = [("ring", 1), ("exponential", 1), ("exponential", 2), ("exponential", 3), ("exponential", 100)]
memory = pytest.mark.parametrize("memory", [False, True], ids=["messages", "memory"])
worlds = pytest.mark.parametrize("transport", ["inproc", "shm", "zmq"])


# -- graphs --------------------------------------------------------------------------------------


@looped("size", SIZES)
@looped("name, peers", GRAPHS)
def test_sources_and_destinations_fit_each_other(name, peers, size):
    for iteration in range(8):
        graph = Graph(name, iteration, peers)
        edges = [(rank, dest) for rank in range(size) for dest in graph.destinations(size, rank)]
        assert sorted(edges) == sorted((source, rank) for rank in range(size) for source in graph.sources(size, rank))
        assert len(set(edges)) == len(edges)  # no rank is sent the same twice
        assert all(source != dest for source, dest in edges)
        degrees = {len(graph.sources(size, rank)) for rank in range(size)}
        assert degrees == ({0} if size == 1 else {2 - (size == 2)} if name == "ring" else degrees)
        assert size == 1 or 1 <= max(degrees) <= max(peers, 2 * (name == "ring"))


def test_distances_of_the_exponential_graph():
    assert [Graph("exponential", t).distances(8) for t in range(4)] == [(1,), (2,), (4,), (1,)]
    assert [Graph("exponential", t).distances(9) for t in range(5)] == [(1,), (2,), (4,), (8,), (1,)]
    assert [Graph("exponential", t, 2).distances(17) for t in range(4)] == [(1, 2), (3, 6), (1, 9), (1, 2)]
    assert Graph("exponential", 5, 100).distances(4) == (1, 2, 3)
    assert [period(size, 1) for size in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 2, 3, 3, 4]


@looped("size", range(2, 40))
@looped("name", graphs.GRAPHS)
def test_partners_are_a_connected_bipartite_graph(name, size):
    for rank in range(size):
        for other in partners(name, size, rank):
            assert (rank + other) % 2 == 1
            assert rank in partners(name, size, other)
    reached, edge = {0}, {0}
    while edge:
        edge = {other for rank in edge for other in partners(name, size, rank)} - reached
        reached |= edge
    assert len(reached) == size


def test_one_rank_has_no_partner():
    assert partners("ring", 1, 0) == partners("exponential", 1, 0) == ()


# -- averages and push-sum: laws -----------------------------------------------------------------


def matrix(size, graph):
    """Row r: the weights of the ranks in the mean of rank r."""
    weights = np.zeros((size, size))
    for rank in range(size):
        members = (rank, *graph.sources(size, rank))
        weights[rank, list(members)] = 1 / len(members)
    return weights


@memory
@looped("size", SIZES)
@looped("name, peers", GRAPHS)
def test_averages_are_those_of_a_doubly_stochastic_matrix(name, peers, size, memory):
    async def main(comm):
        x = np.eye(size)[comm.rank]
        await comm.neighbor_average(x, graph=name, iteration=3, peers=peers)
        return x

    result = np.array(simulate(size, main, JITTERY, shared_memory=memory).results)
    np.testing.assert_allclose(result, matrix(size, Graph(name, 3, peers)), rtol=1e-15)
    np.testing.assert_allclose(result.sum(0), 1)
    np.testing.assert_allclose(result.sum(1), 1)


UNIT = 6.0**5  # so that five divisions by 2 or 3 are exact


async def pushes(comm, graph, peers, lead, elements=5):
    """Five iterations of push-sum, with `lead` calls under way. Returns the mass left, what each call sent and got."""
    x, weight = np.arange(float(elements)) * UNIT * (comm.rank + 1), np.full(1, UNIT)
    flying, sent, got = [], [], []

    async def receive():
        received, received_weight = await flying.pop(0)
        got.append(np.append(received, received_weight))
        np.add(x, received, out=x)
        weight[0] += received_weight

    for iteration in range(5):
        parts = len(Graph(graph, iteration, peers).distances(comm.size)) + 1
        before = x.copy(), weight.copy()
        flying.append(comm.push_sum(x, weight, graph=graph, iteration=iteration, peers=peers))
        assert (x == before[0] / parts).all()  # at once
        assert weight == before[1] / parts
        sent.append(np.append(x, weight))
        if len(flying) > lead:
            await receive()
        await asyncio.sleep(float(np.random.default_rng([comm.rank, iteration]).uniform(0, 1e-3)))
    while flying:
        await receive()
    return np.append(x, weight), sent, got


@memory
@looped("size", SIZES)
@looped("name, peers, lead", [("ring", 1, 0), ("exponential", 1, 0), ("exponential", 1, 2), ("exponential", 2, 1)])
def test_push_sum_conserves_mass_to_the_bit(name, peers, lead, size, memory):
    check_pushes(size, name, peers, 5, lambda comm: pushes(comm, name, peers, lead), memory)


@memory
@looped("size, lead", [(2, 0), (3, 2), (5, 1)])
def test_a_long_push_is_not_overwritten_before_it_is_received(size, lead, memory):
    """300,000 elements are above one segment of a message, and above one window of shared memory."""
    check_pushes(size, "exponential", 2, 300_000, lambda comm: pushes(comm, "exponential", 2, lead, 300_000), memory)


def check_pushes(size, name, peers, elements, main, memory):
    world = simulate(size, main, JITTERY, shared_memory=memory)
    left, sent, got = (np.array(each) for each in zip(*world.results, strict=True))
    expected = np.append(np.arange(float(elements)) * sum(range(1, size + 1)), size)
    np.testing.assert_array_equal(left.sum(0), expected * UNIT)
    for iteration in range(5):  # and no mass is lost under way
        for rank in range(size):
            sources = list(Graph(name, iteration, peers).sources(size, rank))
            np.testing.assert_array_equal(got[rank, iteration], sent[sources, iteration].sum(0))


@memory
@looped("size", [2, 4, 8, 16])
def test_push_sum_reaches_consensus_in_one_period(size, memory):
    async def main(comm):
        x, weight = np.full(3, float(comm.rank)), np.ones(1)
        for iteration in range(period(size, 1)):
            received, received_weight = await comm.push_sum(x, weight, iteration=iteration)
            x += received
            weight += received_weight
        return x / weight

    for x in simulate(size, main, JITTERY, shared_memory=memory).results:
        assert (x == (size - 1) / 2).all()


@looped("size", [1, 2, 3, 6, 7])
def test_unequal_weights_are_carried_along(size):
    """The de-biased values tend to the mean of the numerators over that of the weights."""

    async def main(comm):
        x, weight = np.full(3, float(comm.rank)), np.array(1.0 + comm.rank)
        for iteration in range(60):
            received, received_weight = await comm.push_sum(x, weight, iteration=iteration)
            x += received
            weight += received_weight
        return x / weight

    for x in run_ranks(size, main):
        np.testing.assert_allclose(x, sum(range(size)) / sum(range(1, size + 1)), rtol=1e-12)


# -- neighbours only -----------------------------------------------------------------------------

LONG_S = 1000.0


@memory
@looped("elements", [3, 400_000])
@looped("size", [7, 9, 17])
def test_only_ranks_that_depend_on_a_late_one_wait_for_it(size, elements, memory):
    """After k iterations of the ring exactly the ranks within distance k of the late one have waited."""

    async def main(comm):
        clock = asyncio.get_running_loop().time
        x, times = np.zeros(elements), []
        await asyncio.sleep(LONG_S if comm.rank == 0 else 0)
        for _ in range(3):
            await comm.neighbor_average(x)
            times.append(clock() >= LONG_S)
        return times

    for rank, waited in enumerate(simulate(size, main, JITTERY, shared_memory=memory).results):
        distance = min(rank, size - rank)
        assert waited == [distance <= count for count in (1, 2, 3)]


@memory
def test_a_push_waits_for_its_sources_and_not_for_its_destinations(memory):
    async def main(comm):
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(LONG_S if comm.rank == 0 else 0)
        await comm.push_sum(np.zeros(3), np.ones(1))  # distance 1: of all others, rank 1 receives from rank 0
        return clock() >= LONG_S

    assert simulate(6, main, JITTERY, shared_memory=memory).results == [True, True, *[False] * 4]


# -- tensors -------------------------------------------------------------------------------------


TENSORS = {
    "float64": np.arange(6.0).reshape(2, 3),
    "float32": np.arange(6, dtype="f4"),
    "float16": torch.arange(6, dtype=torch.float16),
    "bfloat16": torch.arange(6, dtype=torch.bfloat16).reshape(3, 2),
    "complex": np.arange(6.0) * 1j,
    "transposed": torch.arange(6, dtype=torch.float32).reshape(2, 3).t(),
    "strided": np.arange(12.0)[::2],
    "big endian": np.arange(6, dtype=">f4"),
    "empty": np.zeros((0, 3)),
    "no dimensions": np.array(8.0),
    "long": np.ones(300_000),
    "long half": torch.ones(600_000, dtype=torch.float16),
}


def of_rank(tensor, rank):
    """A tensor like `tensor`, with its layout, for each rank another one."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype) if is_torch(tensor) else None
    if copy is None:
        copy = np.empty(2 * len(tensor), tensor.dtype)[::2] if tensor.strides == (16,) else np.empty_like(tensor)
    copy[...] = 4 * tensor + 12 * rank
    return copy


def is_torch(tensor):
    return isinstance(tensor, torch.Tensor)


def values(tensor):
    """The values of `tensor` as an array whose sums are not rounded."""
    return tensor.double().numpy() if is_torch(tensor) else tensor.astype(complex if np.iscomplexobj(tensor) else float)


def check_like(result, tensor):
    assert type(result) is type(tensor)
    assert result.shape == tensor.shape
    assert result.dtype == (tensor.dtype if is_torch(tensor) else tensor.dtype.newbyteorder("="))


async def exchange_every_way(comm, tensor):
    """Four ranks: every exchange of gossip with a tensor like `tensor`."""
    mine, *others = (values(of_rank(tensor, (comm.rank + step) % 4)) for step in (0, 1, 2, 3))

    x = of_rank(tensor, comm.rank)
    assert await comm.neighbor_average(x) is x
    np.testing.assert_allclose(values(x), (mine + others[0] + others[2]) / 3, rtol=4e-3)

    x, weight = of_rank(tensor, comm.rank), torch.ones((), dtype=torch.float64)
    received, received_weight = await comm.push_sum(x, weight, iteration=1)
    check_like(received, x)
    np.testing.assert_array_equal(values(x), mine / 2)
    np.testing.assert_array_equal(values(received), others[1] / 2)
    assert float(weight) == received_weight == 0.5

    gossip = await comm.gossip(of_rank(tensor, comm.rank))
    partner = await gossip.exchange()
    assert (partner is None) == comm.rank % 2
    x = of_rank(tensor * 0, comm.rank)
    assert await gossip.update(x) is x
    model = await gossip.close()
    check_like(model, x)
    total = await comm.allreduce(values(model))
    np.testing.assert_allclose(total, mine + sum(others) + 72, rtol=4e-2)  # the updates: 12 times each rank's number


async def exchange_from_devices(comm, make):
    """The results of every exchange of gossip of tensors that `make(seed)` gives."""
    results = [await comm.neighbor_average(make(comm.rank)), await comm.neighbor_average(make(1), graph="exponential")]
    x = make(comm.rank + 1)
    received, _ = await comm.push_sum(x, np.ones(1), iteration=1, peers=2)
    results += [x, received]
    gossip = await comm.gossip(make(comm.rank), seed=3)
    results.append(await gossip.update(make(9)))
    await comm.barrier()
    for rank in range(comm.size):  # in turn: the bits depend on the order
        if rank == comm.rank:
            await gossip.exchange()
        await comm.barrier()
    gossip.update(make(5)).close()  # it is added all the same
    results.append(await gossip.close())
    return results


@worlds
@looped("size", [1, 2, 3, 5])
def test_tensors_of_devices_give_the_bits_of_the_host(size, transport):
    """Odd ranks have ordinary tensors in the last of the three runs."""
    with fake_device(size) as device:

        def shown(x):
            return device.values(x).tobytes() if device.holds(x) else x.contiguous().view(torch.uint8).numpy().tobytes()

        async def main(comm):
            for dtype in (torch.float32, torch.bfloat16, torch.complex128):
                told = []
                for move in (lambda x: x, device.tensor, device.tensor if comm.rank % 2 else lambda x: x):

                    def make(seed, dtype=dtype, move=move):
                        return move(torch.arange(24).add(seed).to(dtype)).view(6, 4).t()[::2]

                    results = await exchange_from_devices(comm, make)
                    assert {device.holds(x) for x in results} == {move == device.tensor}
                    told.append([shown(x) for x in results])
                assert told[0] == told[1] == told[2]

        run_ranks(size, main, transport)


@worlds
def test_a_rank_goes_on_with_its_part_of_a_push_on_a_device(transport):
    """It may use and change the tensor at once: another stream than that of the call, and other calls."""
    with fake_device() as device:

        def add(into, other):
            device.compute(lambda x, y: np.add(x, y, out=x), into, reads=[other])

        async def main(comm):
            x = device.tensor(torch.full((2000,), 64.0 * (comm.rank + 1)))
            weight, pushes = np.ones(1), []
            for iteration in range(4):
                pushes.append(comm.push_sum(x, weight, iteration=iteration))
                add(x, x)  # while a copy of it is under way
            assert (device.values(x) == 64 * (comm.rank + 1)).all()
            got = []
            for push in pushes:
                received, weights = await push
                got.append((device.values(received)[0], weights))
                add(x, received)
            sources = [[(comm.rank - distance) % 3 for distance in (1, 2)][iteration % 2] for iteration in range(4)]
            assert got == [(32.0 * (source + 1), 2.0 ** -(turn + 1)) for turn, source in enumerate(sources)]
            assert (device.values(x) == 64 * (comm.rank + 1) + sum(each for each, _ in got)).all()

        run_ranks(3, main, transport)


def test_an_update_from_a_device_is_added_if_its_caller_is_cancelled():
    """Before the tensor has arrived. The end of the gossip waits for it."""
    with fake_device(0, "program") as device:

        async def main(comm):
            gossip = await comm.gossip(np.full(50, 1.0))
            update = asyncio.ensure_future(gossip.update(device.tensor(torch.full((50,), 4.0, dtype=torch.float64))))
            await asyncio.sleep(0)
            update.cancel()
            closing = asyncio.ensure_future(gossip.close())
            for _ in range(50):
                await asyncio.sleep(0)
            assert not closing.done()
            while device.turn():
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await update
            model = await closing
            while device.turn():
                await asyncio.sleep(0)
            assert (model == 5).all()

        run_ranks(1, main)


@worlds
def test_an_update_from_a_device_fails(transport):
    with fake_device() as device:
        device.fail_copy(0, OSError("no such bus"))

        async def main(comm):
            gossip = await comm.gossip(np.ones(50))
            with pytest.raises((DeviceError, AbortedError), match="fake:0 has failed: OSError: no such bus") as raised:
                await (gossip.update(device.tensor(torch.ones(50).double())) if comm.rank == 1 else gossip.close())
            return type(raised.value)

        assert run_ranks(3, main, transport) == [AbortedError, DeviceError, AbortedError]


def test_the_weight_of_a_push_is_in_memory_of_the_host():
    with fake_device() as device:

        async def main(comm):
            with pytest.raises(UsageError, match="takes no tensors of a device"):
                comm.push_sum(np.ones(3), device.tensor(torch.ones(1, dtype=torch.float64)))

        run_ranks(1, main)


@worlds
def test_tensors_of_every_kind(transport):
    async def main(comm):
        for kind, tensor in TENSORS.items():
            with case(kind=kind):
                await exchange_every_way(comm, tensor)

    run_ranks(4, main, transport)


@memory
def test_halves_are_summed_in_float32(memory):
    async def main(comm):
        for dtype in (torch.float16, torch.bfloat16):
            x = torch.full((3,), [2048.0, 1.0, 1.0, 1.0][comm.rank], dtype=dtype)
            await comm.neighbor_average(x, graph="exponential", peers=3)
            assert x[0] == torch.tensor(2051 / 4).to(dtype)

    simulate(4, main, shared_memory=memory)


def test_bad_arguments_are_refused_and_change_nothing():
    async def main(comm):
        for x in (np.arange(3), np.ones(3, bool), torch.arange(3)):
            for call in (comm.neighbor_average, comm.gossip, lambda x: comm.push_sum(x, np.ones(1))):
                with pytest.raises(UsageError, match="convert to a float"):
                    call(x)
        x = np.ones(3)
        for weight in (1.0, np.ones(2), np.ones(1, "f4"), None):
            with pytest.raises(UsageError):
                comm.push_sum(x, weight)
        for options in ({"graph": "star"}, {"peers": 0}, {"iteration": -1}, {"iteration": 1.5}):
            with pytest.raises(UsageError):
                comm.push_sum(x, np.ones(1), **options)
            with pytest.raises(UsageError):
                comm.neighbor_average(x, **options)
        with pytest.raises(UsageError, match="two neighbours"):
            comm.neighbor_average(x, peers=2)
        with pytest.raises(UsageError):
            comm.gossip(x, graph="star")
        gossip = await comm.gossip(x)
        for bad in (np.ones(4), np.ones(3, "f4"), np.arange(3), [1.0]):
            with pytest.raises(UsageError):
                gossip.update(bad)
        assert (x == 1).all()
        await gossip.close()
        for call in (gossip.exchange, gossip.close, lambda: gossip.update(x)):
            with pytest.raises(UsageError, match="closed"):
                call()
        assert (await comm.allreduce(x) == comm.size).all()

    run_ranks(3, main)


# -- pairwise averages ---------------------------------------------------------------------------


async def adpsgd(comm, graph, seed, steps=6):
    """Ranks that update and average at random times. Returns the model, the updates and the number of averages."""
    random = np.random.default_rng([seed, comm.rank])
    model = np.full(4, float(comm.rank << 40))
    given = model.copy()
    gossip = await comm.gossip(model, graph=graph, seed=seed)
    for _ in range(steps):
        await asyncio.sleep(float(random.exponential(20e-6)))  # about as long as an average takes
        calls = [gossip.exchange()] if random.random() < 0.7 else []
        if random.random() < 0.7:
            delta = np.full(4, float(int(random.integers(100)) << 40))
            given += delta
            calls.append(gossip.update(delta))
        await asyncio.gather(*calls)
    model = await gossip.close()
    return model, given, gossip.averages


def check_sum(results):
    np.testing.assert_array_equal(sum(model for model, *_ in results), sum(given for _, given, _ in results))
    averages = [count for *_, count in results]
    assert sum(averages[::2]) == sum(averages[1::2])
    return sum(averages[::2])


@memory
@looped("size", SIZES)
@looped("graph", graphs.GRAPHS)
def test_pairwise_averages_conserve_the_sum_to_the_bit(graph, size, memory):
    world = simulate(size, lambda comm: adpsgd(comm, graph, size), JITTERY, size, shared_memory=memory)
    assert (check_sum(world.results) > 0) == (size > 1)


@pytest.mark.parametrize("part", range(2))
def test_no_deadlock_in_five_hundred_worlds(part):
    """`simulate` raises DeadlockError if all ranks wait."""
    for seed in range(part, 500, 2):
        size = 2 + seed % 3
        with_memory = seed % 10 == 0
        pause = Pause(seed % size, 40e-6, 100e-6)
        world = simulate(
            size,
            lambda comm, seed=seed: adpsgd(comm, graphs.GRAPHS[seed % 2], seed, steps=3),
            Network(latency_s=5e-6, jitter_s=60e-6, faults=[pause]),
            seed,
            shared_memory=with_memory,
        )
        check_sum(world.results)


@worlds
@looped("elements", [4, 300_000])
def test_a_pair_has_the_same_bits_after_an_average(elements, transport):
    async def main(comm):
        gossip = await comm.gossip(np.random.default_rng(comm.rank).standard_normal(elements))
        for _ in range(3):
            await gossip.exchange()
        return await gossip.close()

    one, other = run_ranks(2, main, transport)
    np.testing.assert_array_equal(one, other)


def test_a_passive_rank_answers_while_its_program_waits_for_something_else():
    async def main(comm):
        gossip = await comm.gossip(np.full(3, float(comm.rank)))
        if comm.rank == 0:
            assert await gossip.exchange() == 1
            assert (await gossip.update(np.zeros(3)) == 0.5).all()
            assert asyncio.get_running_loop().time() < LONG_S
        else:
            await asyncio.sleep(LONG_S)
            assert (await gossip.update(np.ones(3)) == 1.5).all()
        return float((await gossip.close())[0])

    assert simulate(2, main, JITTERY).results == [0.5, 1.5]


def test_an_update_does_not_wait_for_an_average():
    """Rank 1 hears the request only after a long pause. The model of rank 0 is on its way until then."""

    async def main(comm):
        gossip = await comm.gossip(np.full(3, 4.0 * comm.rank))
        if comm.rank == 0:
            await asyncio.sleep(0.6)
            exchanging = asyncio.ensure_future(gossip.exchange())
            await asyncio.sleep(1.0)
            assert (await gossip.update(np.ones(3)) == 1).all()
            assert (await gossip.update(np.ones(3)) == 2).all()
            assert not exchanging.done()
            await exchanging
            assert (await gossip.update(np.zeros(3)) == 4).all()
        return (await gossip.close()).tolist()

    network = Network(faults=[Pause(1, 0.5, LONG_S)])
    assert simulate(2, main, network).results == [[4.0] * 3, [2.0] * 3]


@memory
def test_a_cancelled_average_is_carried_out(memory):
    async def main(comm, seed):
        random = np.random.default_rng([seed, comm.rank])
        gossip = await comm.gossip(np.full(3, float(comm.rank << 40)), seed=seed)
        cancelled = 0
        for _ in range(4):
            calls = [gossip.exchange, lambda: gossip.update(np.full(3, 8.0))]
            task = asyncio.ensure_future(calls[int(random.integers(2))]())
            await asyncio.sleep(float(random.exponential(20e-6)))
            cancelled += task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        model = await gossip.close()
        total = await comm.allreduce(model.copy())
        assert comm._core.member.endpoint.waiting() == []
        assert len(comm._core.member.endpoint._services) == 0
        return total[0] % 8, cancelled

    total = 0
    for seed in range(30):
        results = simulate(3, lambda comm, seed=seed: main(comm, seed), JITTERY, seed, shared_memory=memory).results
        assert {rest for rest, _ in results} == {0.0}
        total += sum(count for _, count in results)
    assert total > 50


# -- failures ------------------------------------------------------------------------------------


def differ(zero, others):
    async def act(comm):
        await (zero if comm.rank == 0 else others)(comm)
        await comm.barrier()

    return act


def push(**options):
    return lambda comm: comm.push_sum(np.ones(3), np.ones(1), **options)


def mean(**options):
    return lambda comm: comm.neighbor_average(np.ones(3), **options)


MISMATCHES = {
    "iteration": (push(iteration=0), push(iteration=1), "iteration 0", "iteration 1"),
    "peers": (push(peers=1), push(peers=2), "peers 1", "peers 2"),
    "graph": (push(graph="ring"), push(), "push_sum #1 of 3 float64, ring graph", "exponential graph, peers 1"),
    "graph of averages": (mean(), mean(graph="exponential"), "ring graph", "exponential graph"),
    "call": (push(), mean(), "push_sum #1", "neighbor_average #1"),
    "dense call": (push(), lambda c: c.allreduce(np.ones(3)), "push_sum #1", "allreduce #1"),
    "dense call of one rank": (lambda c: c.barrier(), push(iteration=1), "barrier #1", "push_sum #1"),
    "gossip": (lambda c: c.gossip(np.ones(3)), lambda c: c.gossip(np.ones(3), seed=1), "seed 0", "seed 1"),
}


@memory
@looped("size", [3, 4, 5, 8])
@pytest.mark.parametrize("kind", MISMATCHES)
def test_a_mismatch_reaches_all_ranks_and_names_both_calls(kind, size, memory):
    zero, others, first, second = MISMATCHES[kind]
    run = partial(simulate, network=JITTERY, shared_memory=memory)
    raised = failures(size, differ(zero, others), run, 0)
    assert sorted(raised) == list(range(size))
    for error in raised.values():
        assert type(error) is MismatchError
        assert first in str(error)
        assert second in str(error)


@memory
@looped("late", range(4))
@looped("kind", MISMATCHES)
def test_a_late_rank_raises_the_same_mismatch(kind, late, memory):
    async def act(comm):
        await asyncio.sleep(comm.rank == late)
        await differ(*MISMATCHES[kind][:2])(comm)

    raised = failures(4, act, partial(simulate, network=JITTERY, shared_memory=memory), 0)
    assert {type(error) for error in raised.values()} == {MismatchError}
    assert len(raised) == 4


@memory
@pytest.mark.parametrize("other", [push(iteration=0), lambda c: c.barrier()], ids=["iteration", "barrier"])
def test_ranks_that_are_done_notice_another_call_of_late_ranks(other, memory):
    """Ranks 1 and 3 exchange with each other and are done, before ranks 0 and 2 make another call and send to them."""

    async def act(comm):
        if comm.rank % 2:
            await comm.push_sum(np.ones(3), np.ones(1), iteration=1)
            await comm.barrier()
        else:
            await asyncio.sleep(1.0)
            await other(comm)

    raised = failures(4, act, partial(simulate, network=JITTERY, shared_memory=memory), 0)
    assert {type(error) for error in raised.values()} == {MismatchError}
    assert len(raised) == 4
    assert all("push_sum #1 of 3 float64, exponential graph, peers 1, iteration 1" in str(e) for e in raised.values())


def test_a_rank_that_leaves_without_closing_is_a_mismatch():
    async def act(comm):
        gossip = await comm.gossip(np.ones(3))
        if comm.rank:
            await gossip.close()
            await comm.barrier()

    with pytest.raises(MismatchError, match=r"Gossip\.close"):
        simulate(3, act, JITTERY)


async def for_ever(call):
    while True:
        await call()


async def averages_for_ever(comm):
    await for_ever(lambda: comm.neighbor_average(np.ones(3)))


async def pushes_for_ever(comm):
    iterations = itertools.count()
    await for_ever(lambda: comm.push_sum(np.ones(3), np.ones(1), iteration=next(iterations)))


async def gossips_for_ever(comm):
    gossip = await comm.gossip(np.ones(3))
    while True:
        await gossip.exchange()
        await gossip.update(np.ones(3))
        await asyncio.sleep(1e-4)


@memory
@pytest.mark.parametrize("act", [averages_for_ever, pushes_for_ever, gossips_for_ever])
@looped("victim", range(3))
def test_a_crashed_rank_is_lost_for_all_others(victim, act, memory):
    network = Network(latency_s=10e-6, jitter_s=50e-6, faults=[Crash(victim, 0.01)])
    raised = failures(3, act, partial(simulate, network=network, shared_memory=memory), 2)
    assert {type(error) for error in raised.values()} == {PeerLostError}
    assert {error.rank for error in raised.values()} == {victim}


@worlds
def test_a_cancelled_exchange_with_neighbours_aborts_the_communicator(transport):
    async def main(comm):
        part = await comm.split(0, key=comm.rank)
        x, weight = np.ones(3), np.ones(1)
        if comm.rank == 0:
            call = asyncio.ensure_future(part.push_sum(x, weight, graph="ring"))
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await comm.barrier()
        else:
            await comm.barrier()
            with pytest.raises(AbortedError, match="push_sum #1"):  # at the latest in a later call
                await for_ever(lambda: part.push_sum(x, weight, graph="ring"))
        assert (await comm.allreduce(np.ones(3)) == comm.size).all()

    run_ranks(3, main, transport)


def test_a_push_that_is_never_awaited_aborts_the_communicator():
    async def main(comm):
        part = await comm.split(0, key=comm.rank)
        calling = part.push_sum(np.ones(3), np.ones(1))
        if comm.rank != 1:
            await calling
        await comm.barrier()
        del calling
        with pytest.raises(AbortedError, match="the mass that it received is lost"):
            await for_ever(part.barrier)
        await comm.barrier()

    with pytest.warns(RuntimeWarning, match="never awaited"):
        simulate(3, main, JITTERY)


def test_an_average_has_a_deadline():
    """The network of rank 1 stands still when rank 0 asks it."""

    async def main(comm):
        gossip = await comm.gossip(np.ones(3))
        await asyncio.sleep(2.0)
        with deadline(5.0 if comm.rank == 0 else 500.0):
            call = gossip.exchange() if comm.rank == 0 else gossip.close()
        with pytest.raises(DeadlineError, match="an average of rank 0 with rank 1"):
            await call

    simulate(2, main, Network(faults=[Pause(1, 1.0, 60.0)]))
