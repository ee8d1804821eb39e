"""What a wait-avoiding call tells of its round (`Reduction`), and the averages that depend on it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

import asyncoll
from asyncoll import AVG, AVG_ACTIVE, MismatchError, UsageError
from asyncoll.testing import Network, simulate
from tests.support.cases import looped

MANY = 70  # ranks: their bitmap takes more than one cell of shared memory
LONG = 200_000  # elements: by message more than a coordinator takes


# -- contributors, lag and time -------------------------------------------------------------------


@looped("size, count", [(1, 3), (2, 3), (5, 3), (8, LONG), (MANY, 3), (MANY, 4000)])
def test_a_reduction_tells_contributors_lag_and_wait(size, count, simulated):
    """The even ranks come at 0 s. The odd ones come late, and stay for the next round, to which they do not come."""
    even, odd = tuple(range(0, size, 2)), tuple(range(1, size, 2))

    async def main(comm):
        is_late = comm.rank % 2
        await asyncio.sleep(5.0 * is_late)
        told = [await comm.quorum_allreduce(np.ones(count), quorum=len(even))]
        if not is_late:
            await asyncio.sleep(10.0 + comm.rank)
            told.append(await comm.quorum_allreduce(np.ones(count), quorum=len(even)))
        await comm.barrier()
        return [(each.ranks, each.active, each.lag, round(each.waited_s, 1)) for each in told]

    results = simulated(size, main).results
    both = tuple(range(size))
    for rank in even:
        first, second = (even, len(even), 0, 0.0), (both, size, 0, float(even[-1] - rank))
        assert results[rank] == [first, second]
    assert [results[rank] for rank in odd] == [[(even, len(even), 0, 0.0)]] * len(odd)


def test_lag_counts_the_rounds_that_have_begun_meanwhile(simulated):
    async def main(comm):
        if comm.rank == 1:
            await asyncio.sleep(10)
            late = await comm.solo_allreduce(np.ones(1))
            return late.round, late.lag, late.skipped
        for _ in range(4):
            newest = await comm.solo_allreduce(np.ones(1))
            assert newest.lag == 0
        return newest.round

    assert simulated(2, main).results == [4, (4, 3, 3)]


# -- results --------------------------------------------------------------------------------------


def copies(x):
    return [copies(part) for part in x] if isinstance(x, list | tuple) else x.tolist()


KINDS = {
    "array": lambda value: np.full((2, 2), value),
    "strided": lambda value: np.full((2, 4), value)[:, ::2],
    "tensor": lambda value: torch.full((3,), value, dtype=torch.bfloat16),
    "parameter": lambda value: torch.nn.Parameter(torch.full((3,), value)),
    "list": lambda value: [np.full(3, value), torch.full((2,), value), np.full(2, value, "f2")],
    "tuple": lambda value: (np.full(3, value), np.full(2, value, "f4")),
}


@looped("kind", KINDS)
def test_results_are_those_of_all_rounds_and_stay_while_x_is_overwritten(kind, simulated):
    async def main(comm):
        if comm.rank == 1:
            await asyncio.sleep(10)
        applied, newest = [], 0
        while newest < 4:
            x = KINDS[kind](float(newest + 1))
            reduction = await comm.solo_allreduce(x, history=8)
            results = reduction.results()
            assert len(results) == 1 + len(reduction.missed)
            assert (results[-1] is x) == (not reduction.missed)
            expected = [copies(result) for result in results]
            for part in x if isinstance(x, list | tuple) else [x]:
                part.detach().zero_() if isinstance(part, torch.Tensor) else part.fill(0)
            if reduction.missed:
                assert [copies(result) for result in results] == expected
            applied += expected
            newest = reduction.round
        return applied

    prompt, late = simulated(2, main).results
    assert prompt == late
    assert len(prompt) == 4


def test_results_without_history_are_the_callers_tensor(run):
    async def main(comm):
        x = comm.empty(5, np.float32)
        x.fill(1)
        (result,) = (await comm.solo_allreduce(x, sync_every=1)).results()
        assert result is x
        return result[0]

    assert run(3, main) == [3] * 3


def test_a_group_without_contributors_has_no_result(simulated):
    """Rank 0 opens the round of its own group. Rank 1 comes late for it, and its group had no contribution."""

    async def main(comm):
        await asyncio.sleep(comm.rank)
        reduction = await comm.group_allreduce(np.ones(2), group_size=1)
        return reduction.active, reduction.ranks, len(reduction.results())

    assert simulated(2, main).results == [(1, (0,), 1), (0, (), 0)]


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_contributors_of_a_group_are_its_members_with_a_model(group_size, simulated):
    async def main(comm):
        await asyncio.sleep(comm.rank * 1e-3)
        told = []
        for _ in range(12):
            await asyncio.sleep(0.5 if comm.rank == 3 else 0.01)
            x = np.zeros(comm.size)
            x[comm.rank] = 1
            reduction = await comm.group_allreduce(x, group_size=group_size)
            assert set(reduction.ranks) <= set(reduction.group)
            if reduction.active:
                assert np.flatnonzero(x).tolist() == list(reduction.ranks)
            told.append(reduction.active)
        return told

    told = simulated(7, main).results
    assert max(max(actives) for actives in told) >= group_size - 1


# -- averages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float16, torch.bfloat16, np.complex64])
def test_avg_active_divides_by_the_contributors_of_each_round(dtype, simulated):
    """In the missed results too. Rank 2 is late, and its contribution is in the round after the four that it missed."""

    def tensor(value):
        return torch.full((3,), value, dtype=dtype) if isinstance(dtype, torch.dtype) else np.full(3, value, dtype)

    async def main(comm):
        values, newest = [], 0
        if comm.rank == 2:
            await asyncio.sleep(10)
        while newest < (4 if comm.rank == 2 else 5):
            await asyncio.sleep(20 if newest == 4 else 0)
            x = tensor(2.0 + comm.rank)
            reduction = await comm.quorum_allreduce(x, op=AVG_ACTIVE, quorum=2, history=8)
            values += [float(result[0].real) for result in reduction.results()]
            newest = reduction.round
        await comm.barrier()
        return values

    *prompt, late = simulated(3, main).results
    assert prompt == [[2.5] * 4 + [3.0]] * 2
    assert late == [2.5] * 4


def test_avg_active_is_avg_in_groups(simulated):
    async def main(comm):
        x, y = np.full(3, 1.0 + comm.rank), np.full(3, 1.0 + comm.rank)
        one = await comm.group_allreduce(x, group_size=2, op=AVG, sync_every=1, name="one")
        other = await comm.group_allreduce(y, group_size=2, op=AVG_ACTIVE, sync_every=1, name="other")
        assert (one.active, other.active) == (comm.size, comm.size)
        return x[0], y[0]

    assert simulated(3, main).results == [(2.0, 2.0)] * 3


# -- weights --------------------------------------------------------------------------------------


CALLS = 30  # the most calls of a rank


def weights(rank):
    return np.random.default_rng([7, rank]).integers(0, 9, CALLS)


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("padding", [0, LONG // 10])
@looped("size", [1, 2, 5])
def test_each_contribution_counts_by_its_own_weight_in_one_round(size, padding, registered, simulated):
    """Stale ones too. Each call adds to an element of its own, so a result shows the shares of all contributions."""
    all_weights = np.stack([weights(rank) for rank in range(size)])

    async def main(comm):
        generator = np.random.default_rng([3, comm.rank])
        rounds, newest, calls = {}, 0, 0
        while newest < 8:
            await asyncio.sleep(generator.exponential(0.01))
            weight = int(all_weights[comm.rank, calls])
            x = (comm.empty if registered else np.empty)(padding + size * CALLS, np.float64)
            x.fill(0)
            x[padding + comm.rank * CALLS + calls] = 1.0 if weight else np.inf
            given = np.float32(weight) if comm.rank else weight
            reduction = await comm.solo_allreduce(x, op=AVG, weight=given, history=8, sync_every=8)
            results = reduction.results()
            for number, result in enumerate(results, reduction.round + 1 - len(results)):
                rounds[number] = result[padding:].reshape(size, CALLS).copy()
            newest, calls = reduction.round, calls + 1
        return rounds, calls

    for seed in range(4):
        results = simulated(size, main, Network(latency_s=1e-4, jitter_s=5e-3), seed).results
        found = np.zeros((size, CALLS), int)
        for number in range(1, 9):
            shares = [rounds[number] for rounds, _ in results]
            assert all((each == shares[0]).all() for each in shares)
            inside = all_weights * (shares[0] > 0)
            np.testing.assert_allclose(shares[0], inside / max(1, inside.sum()))
            found += inside > 0
        made = np.array([np.arange(CALLS) < calls for _, calls in results])
        assert (found == (made & (all_weights > 0))).all()


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, torch.bfloat16, np.complex64])
@pytest.mark.parametrize("count", [5, 200_000])
def test_a_weighted_average_has_the_samples_of_all_contributors(dtype, count, run):
    def tensor(value):
        return (
            torch.full((count,), value, dtype=dtype) if isinstance(dtype, torch.dtype) else np.full(count, value, dtype)
        )

    async def main(comm):
        one, two = tensor(float(comm.rank)), [tensor(float(comm.rank)), np.full(3, comm.rank + 1.0), tensor(8.0)]
        await comm.solo_allreduce(one, op=AVG, weight=2.0 * comm.rank, sync_every=1)
        await comm.solo_allreduce(two, op=AVG, weight=comm.rank, sync_every=1, name="buckets")
        return [float(part[0].real) for part in (one, *two)]

    size = 3  # 1 * 1 + 2 * 2 of 1 + 2
    expected = [5 / 3, 5 / 3, 8 / 3, 8.0]
    for result in run(size, main):
        np.testing.assert_allclose(result, expected, rtol=1e-2 if dtype in (np.float16, torch.bfloat16) else 1e-6)


def test_a_round_of_no_weight_gives_zeros_and_zero_weight_contributes_nothing(run):
    async def main(comm):
        x, y = np.full(4, np.nan), np.full(4, np.inf if comm.rank else 3.0)
        await comm.quorum_allreduce(x, op=AVG, quorum=comm.size, weight=0)
        await comm.quorum_allreduce(y, op=AVG, quorum=comm.size, weight=0.0 if comm.rank else 0.5)
        return x.tolist(), y.tolist()

    assert run(3, main) == [([0.0] * 4, [3.0] * 4)] * 3


def test_a_group_averages_by_weight(simulated):
    async def main(comm):
        x = np.full(2, float(comm.rank))
        reduction = await comm.group_allreduce(x, group_size=2, op=AVG, weight=comm.rank + 1, sync_every=1)
        assert reduction.active == 4
        return x[0]

    assert simulated(4, main).results == [(2 + 6 + 12) / 10] * 4


def test_weights_at_one_rank_only_are_a_mismatch(simulated):
    async def main(comm):
        await comm.quorum_allreduce(np.ones(2), op=AVG, quorum=2, weight=None if comm.rank else 1)

    with pytest.raises(MismatchError, match="weighted"):
        simulated(2, main)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "1", True, 1j])
def test_a_weight_that_is_none_is_refused_before_the_call_has_any_effect(weight):
    async def main(comm):
        with pytest.raises(UsageError, match="weight"):
            comm.solo_allreduce(np.ones(2), op=AVG, weight=weight)
        assert not comm.statistics().operations

    simulate(2, main)


@pytest.mark.parametrize("op", [op for op in asyncoll.ReduceOp if op is not AVG])
def test_weights_are_for_averages(op):
    async def main(comm):
        x = np.ones(2, int if op.name.startswith("B") else float)
        with pytest.raises(UsageError, match="or use AVG"):
            comm.majority_allreduce(x, op=op, weight=1)
        with pytest.raises(UsageError, match="not defined for int64"):
            comm.quorum_allreduce(np.ones(2, int), op=AVG, weight=1)

    simulate(2, main)
