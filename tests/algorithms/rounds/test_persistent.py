"""The common parts of all wait-avoiding operations: buckets, candidates, statistics, and ranks that leave."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from asyncoll import AVG, MAX, ClosedError, MismatchError
from asyncoll.algorithms.rounds.operation import Opening, Operation
from asyncoll.tensors.reductions import ReduceOp
from asyncoll.testing import Network, run_ranks, simulate
from tests.support.cases import SIZES, looped

JITTER = Network(latency_s=1e-4, jitter_s=2e-3)


# -- buckets -------------------------------------------------------------------------------------


def test_buckets_of_any_dtype_share_one_round(run):
    async def main(comm):
        base = np.ones((6, 2), np.int16)
        x = [
            torch.full((3, 2), 1.5, dtype=torch.bfloat16),
            np.full(4, 2.0),
            base[:, 1],
            torch.ones(()),
            np.full((2, 2), 3.0),
            np.empty(0, bool),
            torch.ones(90_000),
        ]
        reduction = await comm.solo_allreduce(tuple(x), sync_every=1)
        assert reduction.active == comm.size
        return x, base

    for x, base in run(3, main):
        assert x[0].dtype == torch.bfloat16
        assert x[0].tolist() == [[4.5, 4.5]] * 3
        assert x[1].tolist() == [6.0] * 4
        assert base.tolist() == [[1, 3]] * 6
        assert x[3].item() == 3
        assert x[4].tolist() == [[9.0, 9.0]] * 2
        assert (x[6] == 3).all()


@pytest.mark.parametrize("kind", ["solo", "majority", "quorum"])
def test_a_round_takes_all_buckets_of_a_rank_or_none(kind, simulated):
    async def main(comm):
        generator = np.random.default_rng(comm.rank)
        options = {"quorum": 2} if kind == "quorum" else {}
        newest = 0
        while newest < 15:
            await asyncio.sleep(generator.exponential(0.01))
            x = [np.zeros(comm.size, dtype) for dtype in (np.float32, np.int64, np.float32)]
            for bucket in x:
                bucket[comm.rank] = newest + 1
            reduction = await getattr(comm, f"{kind}_allreduce")(x, history=3, **options)
            for buckets in (*reduction.missed, x):
                assert buckets[0].tolist() == buckets[1].tolist() == buckets[2].tolist()
            assert np.count_nonzero(x[0]) == reduction.active
            newest = reduction.round

    for seed in range(10):
        simulated(5, main, JITTER, seed)


def test_missed_buckets_are_averaged_and_have_the_shapes_of_the_callers_tensors(simulated):
    async def main(comm):
        if comm.rank == 1:
            await asyncio.sleep(10)
        newest, shapes = 0, []
        while newest < 3:
            x = [torch.full((2, 2), 4.0), np.full(3, 8.0)]
            reduction = await comm.solo_allreduce(x, op=AVG, history=5)
            newest = reduction.round
            shapes += [(old[0].tolist(), old[1].tolist()) for old in (*reduction.missed, x)]
        return shapes

    assert simulated(2, main).results == [[([[2.0, 2.0]] * 2, [4.0] * 3)] * 3] * 2


def test_other_buckets_under_a_name_are_a_mismatch(simulated):
    async def main(comm):
        await comm.solo_allreduce([np.ones(3), np.ones(2, int)], sync_every=1)
        x = [np.ones(3), np.ones(2, int)] if comm.rank else [np.ones(3), np.ones(3, int)]
        await comm.solo_allreduce(x, sync_every=1)

    with pytest.raises(MismatchError, match=r"3 float64 \+ 3 int64.*3 float64 \+ 2 int64"):
        simulated(3, main)


# -- candidates ----------------------------------------------------------------------------------


@looped("size", SIZES)
def test_candidates_are_distinct_and_evenly_drawn(size):
    for candidates in range(1, size + 1):
        operation = Operation("x", (), ReduceOp.SUM, Opening.MAJORITY, candidates=candidates)
        drawn = [operation.drawn(number, size) for number in range(1, 301)]
        assert all(len(set(places)) == candidates and set(places) <= set(range(size)) for places in drawn)
        counts = np.bincount(np.ravel(drawn), minlength=size)
        expected = 300 * candidates / size
        assert abs(counts - expected).max() <= 5 * expected**0.5


@pytest.mark.parametrize("candidates", [1, 2, 4, 8])
def test_more_candidates_wait_less(candidates, simulated):
    """Arrivals one after another: the first of m candidates among P ranks is the (P + 1) / (m + 1)-th on average.

    Every second round is synchronous and gets zeros, so it takes the contributions that were too late for the last one.
    """

    async def main(comm):
        active = []
        for _ in range(200):
            await comm.barrier()
            await asyncio.sleep(comm.rank * 0.01)
            x = np.ones(1)
            await comm.majority_allreduce(x, candidates=candidates, sync_every=2)
            active.append(x[0])
            await comm.majority_allreduce(np.zeros(1), candidates=candidates, sync_every=2)
        return active

    active = simulated(8, main).results[0]
    assert abs(np.mean(active) - 9 / (candidates + 1)) < 0.5


# -- statistics ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "waited", "late", "in_memory"), [(1, 9, 9, False), (1 << 17, 10, 9, False), (1, 10, 10, True)]
)
def test_statistics_count_waits_and_late_arrivals(count, waited, late, in_memory):
    """A contribution that opens a round carries the statistics of its sender from before this wait."""

    async def main(comm):
        for _ in range(10):
            await comm.barrier()
            await asyncio.sleep(comm.rank)
            await comm.quorum_allreduce(np.ones(count), quorum=3, name="q")
        await comm.barrier()
        return comm.statistics().operations["q"]

    everyone = simulate(4, main, shared_memory=in_memory).results
    for rank, found in enumerate(everyone):
        assert (found.rounds, found.calls) == (10, 10)
        np.testing.assert_allclose(found.waits_s, [2 * waited, waited, 0, 0], atol=0.1)
        np.testing.assert_allclose(
            found.late_s, [0, 0, 0, late], atol=0.1
        )  # messages tell of the tenth time in round 11
        assert found.active == {3: 1, 4: 9}  # the late rank's are stale, but not lost
        assert found.stale == (1.0 if rank == 3 else 0.0)
        assert found.lag == {0: 10}


def test_lag_is_counted_in_rounds(simulated):
    async def main(comm):
        newest = 0
        while newest < 9:
            await asyncio.sleep(3.5 if comm.rank else 1)
            newest = (await comm.solo_allreduce(np.ones(1), name="s")).round
        return comm.statistics().operations["s"]

    prompt, late = simulated(2, main, Network(latency_s=1e-6)).results
    assert prompt.lag == {0: 9}
    assert late.lag == {2: 1, 3: 1, 1: 1} or sum(lag * calls for lag, calls in late.lag.items()) == 9 - late.calls
    assert late.stale > 0.5


# -- several at once, leaving --------------------------------------------------------------------


@looped("size", [1, 2, 3, 5, 8])
@looped("sync_every", [0, 1, 3])
@pytest.mark.parametrize("kind", ["solo", "majority", "quorum", "candidates", "group"])
def test_ranks_may_make_different_numbers_of_calls(kind, sync_every, size, simulated):
    """Ranks that have left take part in the remaining rounds, so no rank waits for a call that is never made."""
    calls = {
        "solo": lambda c, x: c.solo_allreduce(x, sync_every=sync_every),
        "majority": lambda c, x: c.majority_allreduce(x, sync_every=sync_every),
        "quorum": lambda c, x: c.quorum_allreduce(x, quorum=c.size, sync_every=sync_every),
        "candidates": lambda c, x: c.majority_allreduce(x, candidates=c.size // 2 + 1, sync_every=sync_every),
        "group": lambda c, x: c.group_allreduce(x, group_size=c.size // 2 + 1, sync_every=sync_every),
    }

    async def main(comm):
        for _ in range(2 + 3 * comm.rank):
            await asyncio.sleep(0.01 * (size - comm.rank))
            await calls[kind](comm, np.ones(2))
        return comm.statistics().operations[{"candidates": "majority"}.get(kind, kind)].calls

    for seed in range(5):  # a call that waits for ever is a DeadlockError here
        assert simulated(size, main, JITTER, seed).results == [2 + 3 * rank for rank in range(size)]


@pytest.mark.parametrize("sync_every", [0, 1])
def test_an_operation_may_be_called_first_after_other_ranks_have_left(sync_every, simulated):
    async def main(comm):
        if comm.rank == 0:
            return 0
        await asyncio.sleep(1)
        return (await comm.quorum_allreduce(np.ones(1), quorum=comm.size, sync_every=sync_every)).active

    assert simulated(3, main).results == [0, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["zmq", "shm"])
@pytest.mark.parametrize("sync_every", [0, 1, 2])
def test_ranks_may_make_different_numbers_of_calls_over_real_sockets(sync_every, transport):
    async def main(comm):
        for _ in range(3 * comm.rank):
            await comm.quorum_allreduce(np.ones(2), quorum=comm.size, sync_every=sync_every)
        return True

    assert run_ranks(4, main, transport) == [True] * 4


@pytest.mark.parametrize("transport", ["inproc", "zmq", "shm"])
def test_closing_with_rounds_in_flight(transport):
    """Ranks leave while their own calls wait. Each call ends, with a round or with an error."""
    outcomes = []

    async def outcome(call):
        try:
            outcomes.append((await call).round)
        except ClosedError:
            outcomes.append(0)

    async def main(comm):
        calls = [
            comm.solo_allreduce(np.ones(300_000), name="long"),
            comm.majority_allreduce(np.ones(3), name="majority", seed=5),
            comm.quorum_allreduce(np.ones(3), name="quorum", quorum=comm.size),
            comm.group_allreduce(np.ones(3), group_size=2, name="group"),
        ]
        return [asyncio.ensure_future(outcome(call)) for call in calls]

    for tasks in run_ranks(3, main, transport=transport):
        assert all(task.done() for task in tasks)
    assert len(outcomes) == 12
    assert set(outcomes) <= {0, 1}


def test_one_stalled_operation_does_not_stop_the_others(simulated):
    """A quorum that never meets blocks neither other operations nor operations of its name in other communicators."""

    async def main(comm):
        half = await comm.split(comm.rank % 2)
        stuck = comm.quorum_allreduce(np.ones(1), quorum=comm.size, name="all") if comm.rank == 0 else None
        rounds = [
            await asyncio.gather(
                comm.solo_allreduce(np.ones(5), name="a"),
                comm.majority_allreduce([np.ones(2), np.ones(3, int)], name="b", sync_every=1),
                half.quorum_allreduce(np.ones(4), quorum=half.size, name="all"),
                half.group_allreduce(np.ones(4), group_size=2, name="c", op=MAX),
            )
            for _ in range(5)
        ]
        assert rounds[-1][2].round == 5
        if stuck is not None:
            assert (await stuck).active == 1  # the others have left by then
        return rounds[-1][1].active

    assert simulated(6, main, JITTER).results == [6] * 6
