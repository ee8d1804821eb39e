"""Wait-avoiding rounds by example. Their laws, over hundreds of seeds, are in test_laws.py."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from functools import partial

import numpy as np
import pytest

from asyncoll import AVG, MAX, SUM, AbortedError, Reduction
from asyncoll.testing import Network, run_ranks, simulate
from tests.support.cases import SIZES, looped
from tests.support.places import SCRIPTS

JITTER = Network(latency_s=1e-4, jitter_s=2e-3)


def test_short_history_counts_dropped_results_as_skipped(simulated):
    async def main(comm):
        if comm.rank == 1:
            await asyncio.sleep(10.5)
        newest = 0
        while newest < 10:
            x = np.ones(1)
            reduction = await comm.solo_allreduce(x, history=3)
            newest = reduction.round
            if comm.rank == 1:
                return reduction.round, reduction.skipped, len(reduction.missed)
            await asyncio.sleep(1)
        return None

    assert simulated(2, main).results[1] == (10, 6, 3)


@pytest.mark.parametrize("size", [3, 5, 8])
def test_a_sleeping_trainer_delays_no_rank_and_its_contribution_counts_later(size, simulated):
    async def main(comm):
        loop = asyncio.get_running_loop()
        if comm.rank == 1:
            await asyncio.sleep(100)  # before its first call: its runtime must take part all the same
        sums = []
        newest = 0
        while newest < 20:
            await asyncio.sleep(0.01)
            x = np.ones(3)
            newest = (await comm.solo_allreduce(x)).round
            sums.append(x[0])
        return loop.time(), sums

    results = simulated(size, main).results
    assert max(when for rank, (when, _) in enumerate(results) if rank != 1) < 1
    assert results[1][1] == results[0][1][-1:]


def test_quorum_guarantees_and_majority_expects_half_of_the_ranks(simulated):
    async def main(comm, kind):
        seen = []
        for _ in range(100):
            await comm.barrier()
            await asyncio.sleep(comm.rank * 0.01)
            seen.append((await kind(comm)).active)
            await asyncio.sleep(1)
        return seen

    fresh = np.ones
    quorum = simulated(8, lambda comm: main(comm, lambda c: c.quorum_allreduce(fresh(1), quorum=5))).results
    assert all(active >= 5 for seen in quorum for active in seen)
    majority = simulated(8, lambda comm: main(comm, lambda c: c.majority_allreduce(fresh(1)))).results[0]
    assert min(majority) < 4 < max(majority)


@looped("size", SIZES)
def test_the_default_quorum_is_more_than_half_of_the_ranks(size, simulated):
    async def main(comm):
        await asyncio.sleep(comm.rank)
        return (await comm.quorum_allreduce(np.ones(1))).active

    assert simulated(size, main).results[0] == size // 2 + 1


def test_sync_every_waits_for_all_and_flushes_what_was_stale(simulated):
    async def main(comm):
        newest, active = 0, {}
        while newest < 12:
            await asyncio.sleep(1 if comm.rank == 2 else 0.1)
            reduction = await comm.solo_allreduce(np.ones(1), sync_every=4)
            newest = reduction.round
            active[newest] = (reduction.active, reduction.synchronous)
        return active

    for active in simulated(3, main).results:
        for number, (count, synchronous) in active.items():
            assert synchronous == (number % 4 == 0)
            assert count == 3 or not synchronous


def test_a_late_rank_catches_up(simulated):
    """After one long delay a rank is in step again, because it numbers its calls by rounds and not by its own count."""

    async def main(comm):
        newest, late = 0, []
        while newest < 40:
            await asyncio.sleep(1.0 if comm.rank == 0 and newest == 5 else 0.1)
            reduction = await comm.solo_allreduce(np.ones(1))
            late.append(reduction.skipped)
            newest = reduction.round
        return late

    late = simulated(4, main, Network(jitter_s=1e-5)).results[0]
    assert max(late) >= 8
    assert late[-20:] == [0] * 20


def test_an_awaited_initiator_opens_its_round_late(simulated):
    """Most ranks wait for the drawn rank, which makes a late call for an older round. That call opens their round."""

    async def main(comm):
        loop = asyncio.get_running_loop()
        newest = 0
        while newest < 30:
            late = comm.rank == newest % comm.size
            await asyncio.sleep(0.3 if late else 0.1)
            newest = (await comm.majority_allreduce(np.ones(1), history=30)).round
        return loop.time()

    assert max(simulated(4, main).results) < 30 * 0.2


@pytest.mark.parametrize("dtype", ["float16", "bool", "int16", "complex64"])
@pytest.mark.parametrize("count", [0, 1, 40_000])
def test_dtypes_sizes_and_layouts(dtype, count, run):
    async def main(comm):
        base = np.ones((count, 2), dtype)
        x = base[:, 1]
        reduction = await comm.solo_allreduce(x, op=MAX if dtype != "complex64" else SUM, sync_every=1)
        assert reduction.active == comm.size
        return base

    for base in run(5, main):
        np.testing.assert_array_equal(base[:, 0], np.ones(count, dtype))
        np.testing.assert_array_equal(base[:, 1], np.full(count, 5 if dtype == "complex64" else 1, dtype))


def test_average_divides_by_size_in_the_missed_results_too(simulated):
    async def main(comm):
        if comm.rank == 1:
            await asyncio.sleep(10)
        values, newest = [], 0
        while newest < 3:
            x = np.full(2, 6.0)
            reduction = await comm.solo_allreduce(x, op=AVG, history=5)
            values += [old[0] for old in reduction.missed] + [x[0]]
            newest = reduction.round
        return values

    assert simulated(2, main).results == [[3.0, 3.0, 3.0]] * 2


def test_operations_and_communicators_are_independent(simulated):
    async def main(comm):
        half = await comm.split(comm.rank % 2)
        calls = [
            comm.solo_allreduce(np.full(4, 1.0), name="a", sync_every=1),
            comm.majority_allreduce(np.full(9, 2), name="b", sync_every=1),
            half.solo_allreduce(np.full(2, 3.0), name="a", sync_every=1),
            comm.allreduce(np.ones(3)),
        ]
        return [getattr(done, "active", None) for done in await asyncio.gather(*calls)]

    assert simulated(6, main, JITTER).results == [[6, 6, 3, None]] * 6


def test_calls_on_one_name_take_turns(simulated):
    async def main(comm):
        done = await asyncio.gather(*(comm.solo_allreduce(np.ones(1), sync_every=1) for _ in range(5)))
        return [reduction.round for reduction in done]

    assert simulated(3, main).results == [[1, 2, 3, 4, 5]] * 3


def test_same_seed_same_trace():
    async def main(comm):
        newest = 0
        while newest < 12:
            await asyncio.sleep(0.01 * (1 + comm.rank % 3))
            newest = (await comm.majority_allreduce(np.ones(1))).round

    def run(seed: int):
        return simulate(9, main, JITTER, seed)

    assert run(5).trace == run(5).trace
    assert run(5).trace != run(6).trace


def test_statistics_count_rounds_and_traffic():
    async def main(comm):
        for _ in range(3):
            await comm.solo_allreduce(np.ones(8), name="mine", sync_every=1)
        return comm.statistics()

    for rank, statistics in enumerate(run_ranks(2, main)):
        assert statistics.rank == rank
        assert statistics.operations["mine"].rounds == 3
        assert statistics.bytes_sent >= 3 * 64
        assert statistics.messages_received > 3


def test_a_thousand_ranks():
    """Ten solo rounds of 1,024 ranks, one of them five times slower (benchmarks/history has wall times)."""

    async def main(comm):
        newest, counts = 0, Counter()
        while newest < 10:
            await asyncio.sleep(0.05 if comm.rank == 7 else 0.01)
            reduction = await comm.solo_allreduce(np.ones(1, np.int64))
            newest = reduction.round
            counts[reduction.active] += 1
        return counts

    results = simulate(1024, main, Network(jitter_s=1e-6), seed=1).results
    assert all(sum(counts.values()) == 10 for rank, counts in enumerate(results) if rank != 7)
    assert sum(results[7].values()) <= 3


def test_overlapping_calls_of_one_rank_each_count_in_their_own_round(simulated):
    async def main(comm):
        if comm.rank == 0:
            x, y = np.array([1]), np.array([10])
            done = await asyncio.gather(*(comm.quorum_allreduce(z, quorum=2) for z in (x, y)))
        else:
            x, y = np.array([1000]), np.array([10000])
            done = [await comm.quorum_allreduce(z, quorum=2) for z in (x, y)]
        return [(x[0], y[0]), [(reduction.active, reduction.included) for reduction in done]]

    assert simulated(2, main).results == [[(1001, 10010), [(2, True)] * 2]] * 2


def test_the_failure_of_a_split_does_not_reach_the_world(simulated):
    async def main(comm):
        half = await comm.split(comm.rank % 2)
        if comm.rank == 0:
            call = half.quorum_allreduce(np.ones(1), quorum=2)
            await asyncio.sleep(5e-6)
            half.abort("give up")
            with pytest.raises(AbortedError, match="give up"):
                await call
        await asyncio.sleep(1)
        return int((await comm.allreduce(np.array([1])))[0])

    assert simulated(4, main).results == [4] * 4


def test_a_rank_that_has_finished_still_opens_rounds_for_the_others(simulated):
    """Every rank stops after its own number of calls. Ranks that stop first must not block the late one."""

    async def main(comm):
        for _ in range(6):
            await asyncio.sleep(3 if comm.rank == 0 else 0.2)
            last = await comm.majority_allreduce(np.ones(1))
        return last.round

    for seed in range(10):
        assert simulated(4, main, JITTER, seed).results[0] >= 6


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("history", [0, 2])
def test_rounds_that_end_in_one_turn_do_not_change_a_result_being_delivered(seed, history, simulated):
    """The message of one round is slow. Those of later rounds have arrived before it, so all end in one turn."""

    async def main(comm):
        values, newest = {}, 0
        while newest < 60:
            x = np.full(4, newest + 1.0) if comm.rank == 0 else np.zeros(4)
            newest = (await comm.solo_allreduce(x, history=history)).round
            values[newest] = x[0]
            await asyncio.sleep(1e-3 if comm.rank == 0 else 0)
        return values

    prompt, *others = simulated(4, main, Network(latency_s=1e-5, jitter_s=1e-2), seed).results
    for values in others:
        assert all(value == prompt[number] for number, value in values.items() if number in prompt)


@pytest.mark.parametrize("kind", ["short", "long", "long with history", "short group", "long group"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_call_is_cancelled_in_a_synchronous_round_while_a_rank_is_late(size, kind, simulated):
    """The wait ends before the late rank arrives. The contribution is in the round once, and `x` is not written."""
    count = 5 if "short" in kind else 200_000
    all_have_cancelled = asyncio.Barrier(size)

    async def main(comm):
        def call(x):
            if "group" in kind:
                return comm.group_allreduce(x, group_size=2, sync_every=1)
            return comm.solo_allreduce(x, sync_every=1, history=3 * ("history" in kind))

        late = comm.rank == size - 1
        x = np.full(count, comm.rank + 1.0)
        if not late:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await call(x)
            x[:] = -1  # it is the caller's again
        await all_have_cancelled.wait()  # for ever, if the wait for the late rank did not end
        y = x if late else np.zeros(count)
        first = await call(y)
        assert late or (x == -1).all()
        assert (first.round, first.active, first.skipped) == (1, size, 0)
        if "group" not in kind:  # there the second contribution may replace the first
            assert (y == size * (size + 1) / 2).all()
        second = await call(z := np.zeros(count))
        assert (second.round, second.skipped, second.missed) == (2, 0, ())
        return y[0], z[0]

    assert len(set(simulated(size, main).results)) == 1


OPENED_BY_ARRIVALS = {
    "quorum": lambda comm, x: comm.quorum_allreduce(x, quorum=comm.size - 1),
    "synchronous": lambda comm, x: comm.solo_allreduce(x, sync_every=1),
    "synchronous group": lambda comm, x: comm.group_allreduce(x, group_size=2, sync_every=1),
    "quorum with history": lambda comm, x: comm.quorum_allreduce(x, quorum=comm.size - 1, history=1),
}


@pytest.mark.parametrize("kind", OPENED_BY_ARRIVALS)
@pytest.mark.parametrize("count", [5, 200_000])
def test_a_cancelled_caller_counts_as_arrived(kind, count, simulated):
    """The round that it has waited for goes on with its contribution, and its next call is late for it."""
    call, size = OPENED_BY_ARRIVALS[kind], 4
    last = size - 1 if "synchronous" in kind else size - 2  # the rank whose arrival opens round 1
    all_have_cancelled, round_is_over = asyncio.Barrier(size), asyncio.Barrier(size)

    async def main(comm):
        x = comm.empty(count, np.float64) if comm.rank % 2 else np.empty(count)
        x[:] = comm.rank + 1
        if comm.rank < last:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await call(comm, x)
            x[:] = -1  # it is the caller's again
        await all_have_cancelled.wait()
        told = await call(comm, x) if comm.rank == last else None
        await round_is_over.wait()
        if comm.rank < last:
            assert (x == -1).all()
            told = await call(comm, x := np.zeros(count))
        if told is None:
            return 0
        assert (told.round, told.active, told.included) == (1, last + 1, comm.rank == last)
        assert (told.skipped, told.missed) == (0, ())
        return x[0]

    sums = simulated(size, main).results
    assert sums == [sum(range(1, last + 2))] * (last + 1) + [0] * (size - 1 - last)


@pytest.mark.parametrize("kind", ["quorum", "synchronous"])
@pytest.mark.parametrize("count", [5, 200_000])
def test_the_last_rank_to_arrive_is_cancelled(kind, count, simulated):
    """At whichever moment after its arrival that is, the callers that wait get their result."""
    call, size = OPENED_BY_ARRIVALS[kind], 3
    last = size - 1 if kind == "synchronous" else size - 2
    given_up = Counter()

    async def main(comm, steps, end):
        x = np.full(count, comm.rank + 1.0)
        if comm.rank < last:
            assert (await call(comm, x)).round == 1
            assert (x == sum(range(1, last + 2))).all()
        elif comm.rank == last:
            await asyncio.sleep(0.1)
            work = asyncio.ensure_future(call(comm, x))
            for _ in range(steps):
                await asyncio.sleep(0)
            work.cancel()
            await asyncio.wait([work])
            given_up[work.cancelled()] += 1
        await end.wait()

    for steps in range(1, 12):
        for seed in range(4):
            end = asyncio.Barrier(size)
            simulated(size, partial(main, steps=steps, end=end), Network(latency_s=1e-4, jitter_s=1e-4), seed)
    assert given_up[True]


@pytest.mark.parametrize("count", [5, 200_000])
def test_all_callers_are_cancelled_and_the_last_rank_leaves(count, simulated):
    """No caller is there to open the round. The next call does, or is late for it, and misses no contribution."""
    all_have_cancelled = asyncio.Barrier(3)

    async def main(comm):
        if comm.rank < 2:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await comm.quorum_allreduce(np.full(count, comm.rank + 1.0), quorum=3)
        await all_have_cancelled.wait()
        if comm.rank:
            return None
        await asyncio.sleep(1)
        told = await comm.quorum_allreduce(x := np.zeros(count), quorum=3)
        return told.round, told.active, x[0]

    assert simulated(3, main).results[0] == (1, 2, 3.0)


# -- what is told of which round -------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("history", [0, 16])
def test_each_round_is_reported_once_although_one_of_several_calls_is_cancelled(simulated, size, history):
    """Three calls are in flight, and one is cancelled, at a rank and a moment that differ between worlds."""

    async def main(comm, turns, victim):
        calls = [asyncio.ensure_future(comm.solo_allreduce(np.ones(3), history=history)) for _ in range(3)]
        if comm.rank == turns % comm.size:
            for _ in range(turns):
                await asyncio.sleep(1e-4 if comm.size > 1 else 0)
            calls[victim].cancel()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        answers = [answer for answer in answers if isinstance(answer, Reduction)]
        answers.append(await comm.solo_allreduce(np.zeros(3), history=history))
        assert all(len(answer.missed) <= history for answer in answers)
        return len(answers), sum(1 + len(answer.missed) + answer.skipped for answer in answers), answers[-1].round

    given_up = 0
    for turns in range(24):
        for victim in range(3):
            world = simulated(size, partial(main, turns=turns, victim=victim), Network(latency_s=1e-4))
            for answers, told, newest in world.results:
                given_up += 4 - answers
                assert told == newest
    assert given_up


@pytest.mark.slow
def test_an_answer_that_is_taken_back_leaves_the_memory_of_its_caller_at_once(forked_world):
    """The program may change that memory before the thread of the runtime has run."""
    environment = os.environ | {"ASYNCOLL_TRANSPORT": "zmq"}
    for rank in forked_world(environment, 2, SCRIPTS / "algorithms/rounds/closes_an_answered_call.py"):
        code, out, err = rank.end()
        assert (code, out) == (0, "answered\n"), err
