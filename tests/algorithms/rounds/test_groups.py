"""The group allreduce of WAGMA-SGD (Li et al., TPDS 2021): its groups, the spread of updates, and its results."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from asyncoll import AVG
from asyncoll.algorithms.rounds.grouping import partition
from asyncoll.testing import Network, run_ranks

JITTER = Network(latency_s=1e-4, jitter_s=2e-3)


def by_masks(size: int, group_size: int, turn: int) -> set[tuple[int, ...]]:
    """Algorithm 1 of the paper, corrected: partners differ in log2 S bits, from bit t log2 S on, going round."""
    bits, width = size.bit_length() - 1, group_size.bit_length() - 1
    masks = [1 << ((turn * width + phase) % bits) for phase in range(width)]
    groups = set()
    for rank in range(size):
        group = {rank}
        for mask in masks:
            group |= {member ^ mask for member in group}
        groups.add(tuple(sorted(group)))
    return groups


@pytest.mark.parametrize("bits", range(1, 8))
def test_powers_of_two_are_grouped_as_in_the_paper(bits):
    for width in range(bits + 1):
        for turn in range(3 * bits):
            assert set(partition(1 << bits, 1 << width, turn + 1)) == by_masks(1 << bits, 1 << width, turn)


def test_the_papers_example():
    assert partition(8, 4, 1) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert set(partition(8, 4, 2)) == {(0, 1, 4, 5), (2, 3, 6, 7)}


@pytest.mark.parametrize("size", [*range(1, 20), 33, 100])
def test_groups_partition_the_ranks(size):
    for group_size in range(1, size + 1):
        for number in range(1, 12):
            groups = partition(size, group_size, number)
            assert sorted(rank for group in groups for rank in group) == list(range(size))
            assert len(groups) == math.ceil(size / group_size)
            assert max(map(len, groups)) - min(map(len, groups)) <= 1
            assert max(map(len, groups)) <= group_size


@pytest.mark.parametrize(("size", "group_size"), [(4, 2), (6, 4), (9, 3), (13, 4), (7, 7), (5, 1)])
@pytest.mark.parametrize("fixed", [False, True])
def test_sums_are_those_of_the_group(size, group_size, fixed, simulated):
    """No rank is late. Rank r contributes 2^r, so the sum shows the ranks that are in it."""

    async def main(comm):
        for number in range(1, 8):
            await comm.barrier()
            x = np.array([1 << comm.rank])
            call = comm.group_allreduce(x, group_size=group_size, fixed=fixed, sync_every=4)
            reduction = await call
            groups = partition(size, group_size, 1 if fixed else number)
            expected = tuple(range(size)) if number == 4 else next(group for group in groups if comm.rank in group)
            assert (reduction.round, reduction.group) == (number, expected)
            assert reduction.synchronous == (number == 4)
            assert x[0] & ~sum(1 << rank for rank in expected) == 0
            if number > 1:  # every rank has contributed at least once, and contributions stay
                assert x[0] == sum(1 << rank for rank in expected)
                assert reduction.active == len(expected)

    simulated(size, main)


def test_a_late_rank_contributes_its_older_model_and_is_told_so(simulated):
    async def main(comm):
        x = np.array([10.0 + comm.rank])
        await comm.group_allreduce(x, group_size=2, sync_every=1, name="first")
        seen = []
        for model in (1.0, 2.0, 3.0):
            await asyncio.sleep(10.0 if comm.rank == 1 and model == 2.0 else 0.1)
            x = np.array([model, 10.0**comm.rank])
            reduction = await comm.group_allreduce(x, group_size=2)
            seen.append((reduction.round, reduction.included, x.tolist()))
        return seen

    on_time, late = simulated(2, main, Network(latency_s=1e-6)).results
    assert on_time[1] == (2, True, [2.0 + 1.0, 11.0])  # the model of rank 1 from before
    assert on_time[2] == (3, True, [3.0 + 1.0, 11.0])
    assert late[1] == (3, False, [3.0 + 1.0, 11.0])
    assert late[2][1:] == (True, [3.0 + 3.0, 11.0])


def test_average_divides_by_the_number_of_contributed_models(simulated):
    import torch

    async def main(comm):
        if comm.rank == 2:
            await asyncio.sleep(5)
        x = torch.full((3,), float(comm.rank), dtype=torch.bfloat16)
        reduction = await comm.group_allreduce(x, group_size=3, op=AVG)
        return reduction.active, x.tolist()

    results = simulated(3, main).results
    assert results[0][0] in (1, 2)
    assert results[0][1] == [0.0] * 3 if results[0][0] == 1 else [0.5] * 3
    assert results[2] == results[0]


def test_a_fixed_group_may_be_many_rounds_ahead_of_another(simulated):
    """A member of one group sleeps. The other continues, and its signals are kept for the rounds of the sleeper."""

    async def main(comm):
        newest = 0
        while newest < 300:
            await asyncio.sleep(0.001)
            newest = (await comm.group_allreduce(np.ones(1), group_size=2, fixed=True)).round
        return comm.statistics().operations["group"].rounds

    network = Network(latency_s=1e-5, jitter_s=5e-3)
    assert min(simulated(6, main, network, seed=3).results) >= 300


@pytest.mark.parametrize("size", [2, 5, 8])
def test_at_a_synchronous_round_all_models_are_equal(size, simulated):
    async def main(comm):
        generator = np.random.default_rng(comm.rank)
        model, newest, at_sync = np.full(4, float(comm.rank)), 0, {}
        while newest < 12:
            await asyncio.sleep(generator.exponential(0.01))
            x = model.copy()
            reduction = await comm.group_allreduce(x, group_size=max(1, size // 2), sync_every=4)
            model = x / reduction.active if reduction.included else (x + model) / (reduction.active + 1)
            newest = reduction.round
            if reduction.synchronous:
                at_sync[newest] = model.tolist()
        return at_sync

    for seed in range(20):
        first, *others = simulated(size, main, JITTER, seed).results
        assert sorted(first) == [4, 8, 12]
        assert all(other == first for other in others)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_groups_over_real_sockets(transport):
    async def main(comm):
        newest = 0
        while newest < 20:
            x = [np.array([1 << comm.rank]), np.ones(70_000, np.float32)]
            reduction = await comm.group_allreduce(x, group_size=3, sync_every=5)
            if reduction.active:  # otherwise no rank of the group had arrived, and x is unchanged
                assert reduction.active == int(x[0][0]).bit_count()
                assert (x[1] == reduction.active).all()
            assert int(x[0][0]) & ~sum(1 << rank for rank in reduction.group) == 0
            newest = reduction.round
        return comm.statistics().operations["group"].rounds

    assert min(run_ranks(7, main, transport)) >= 20


def test_a_group_without_contributions_leaves_the_tensor_unchanged(simulated):
    async def main(comm):
        if comm.rank:
            await asyncio.sleep(1)  # rank 0, a group of its own, has opened the first round long ago
        x = np.full(3, 1.0 + comm.rank)
        reduction = await comm.group_allreduce(x, group_size=1, op=AVG)
        return reduction.active, x.tolist()

    assert simulated(3, main).results == [(1, [1.0] * 3), (0, [2.0] * 3), (0, [3.0] * 3)]


@pytest.mark.parametrize("sync_every", [0, 30])
@pytest.mark.parametrize(("size", "group_size"), [(2, 1), (5, 1), (4, 2), (6, 2), (13, 4)])
def test_a_group_that_runs_far_ahead_waits_for_the_others(size, group_size, sync_every, simulated, monkeypatch):
    """A rank keeps signals of a bounded number of later rounds, so no rank may be further ahead."""

    monkeypatch.setattr("asyncoll.algorithms.rounds.wait_avoiding.EARLY_MAX", 4)

    async def main(comm):
        newest = 0
        while newest < 100:
            x = np.ones(1)
            reduction = await comm.group_allreduce(x, group_size=group_size, fixed=True, sync_every=sync_every)
            newest = reduction.round
            if sync_every and newest % sync_every == 0:
                assert x[0] == size
        return newest

    network = Network(latency_s=1e-5, jitter_s=5e-3)
    assert min(simulated(size, main, network, seed=1).results) >= 100
