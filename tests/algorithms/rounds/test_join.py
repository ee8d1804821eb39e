"""`join`: a rank has no more contributions for an operation, and ends with the same newest round as all others."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np
import pytest

from asyncoll import AVG, SUM, AbortedError, PeerLostError, UsageError
from asyncoll.testing import Kill, Network, fault, run_ranks
from tests.support.cases import SIZES, looped

JITTER = Network(latency_s=1e-4, jitter_s=5e-3)
LONG = 140_000  # elements: by message more than a coordinator takes
MOST = 16  # calls of a rank

KINDS = {
    "solo": lambda comm, x, **options: comm.solo_allreduce(x, **options),
    "majority": lambda comm, x, **options: comm.majority_allreduce(x, **options),
    "candidates": lambda comm, x, **options: comm.majority_allreduce(x, candidates=-(-comm.size // 2), **options),
    "quorum": lambda comm, x, **options: comm.quorum_allreduce(x, **options),
    "full": lambda comm, x, **options: comm.quorum_allreduce(x, quorum=comm.size, **options),
}


def drawn(kind, seed, rank):
    return np.random.default_rng([sorted(KINDS).index(kind), seed, rank])


async def story(comm, kind, seed, padding=0, **options):
    """Calls of a random number at random moments, and a join. Returns the results by round, and what was told.

    Each contribution adds 1 to an element of its own. Some calls are cancelled, some are not awaited before the next.
    """
    generator = drawn(kind, seed, comm.rank)
    rounds, told, cells = {}, 0, comm.size * MOST
    calls = int(generator.integers(1, MOST))

    def note(reduction):
        nonlocal told
        results = reduction.results()
        for number, result in enumerate(results, reduction.round + 1 - len(results)):
            rounds[number] = result[padding:].copy()
        told += len(results) + reduction.skipped

    def call(index):
        x = comm.empty(padding + cells, np.float64) if index % 2 else np.empty(padding + cells)
        x.fill(0)
        x[padding + comm.rank * MOST + index] = 1
        return asyncio.ensure_future(KINDS[kind](comm, x, name=kind, **options))

    for index in range(calls):
        await asyncio.sleep(generator.exponential(0.01))
        work = call(index)
        if generator.random() < 0.2:
            await asyncio.sleep(generator.exponential(0.005))
            work.cancel()
        await asyncio.wait([work])
        if not work.cancelled():
            note(work.result())
    last = await comm.join(kind, np.zeros(padding + cells))
    if last is not None:
        assert last.included
        note(last)
    return rounds, told, calls


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding", [0, LONG])
@pytest.mark.parametrize("sync_every", [0, 3])
@pytest.mark.parametrize("history", [0, 2, 4 * MOST])
def test_ranks_that_join_at_random_rounds_end_at_one(kind, padding, sync_every, history, simulated):
    """Nothing hangs, each contribution is in exactly one round, and all know the same newest round, to the bit."""
    for seed in range(2 if padding else 6):
        size = (1, 2, 3, 5)[seed % 4] if padding else (1, 2, 3, 4, 7, 9)[seed]

        async def main(comm, seed=seed):
            return await story(comm, kind, seed, padding, sync_every=sync_every, history=history)

        results = simulated(size, main, JITTER, seed).results
        newest = max(rounds and max(rounds) for rounds, _, _ in results)
        known = {}
        for rounds, told, _ in results:
            assert max(rounds) == newest
            assert told == newest, "each round was told once, or counted as skipped"
            for number, result in rounds.items():
                assert (known.setdefault(number, result) == result).all()
        if history == 4 * MOST:
            assert sorted(known) == list(range(1, newest + 1))
            total = sum(known.values()).reshape(size, MOST)
            made = np.array([np.arange(MOST) < calls for _, _, calls in results])
            assert (total == made).all()


@pytest.mark.parametrize("kind", KINDS)
@looped("size", SIZES)
def test_replicas_that_leave_their_loops_at_different_rounds_end_equal(kind, size, simulated):
    async def main(comm):
        generator = drawn(kind, 1, comm.rank)
        model = np.zeros(3)
        for _ in range(1 + comm.rank % 5):
            await asyncio.sleep(generator.exponential(0.01))
            x = generator.standard_normal(3)
            for result in (await KINDS[kind](comm, x, op=AVG, history=99, name=kind)).results():
                model = 0.9 * model + result
        last = await comm.join(kind, x)
        for result in last.results() if last else ():
            model = 0.9 * model + result
        return model.tolist()

    assert len({tuple(model) for model in simulated(size, main, JITTER).results}) == 1


@pytest.mark.parametrize("kind", ["quorum", "full", "synchronous", "majority"])
@pytest.mark.parametrize("count", [2, LONG])
def test_no_round_waits_for_a_rank_that_has_joined(kind, count, simulated):
    """Two of three ranks join at once. The third one makes ten more calls, and none of them waits."""

    async def main(comm):
        loop = asyncio.get_running_loop()

        def call():
            x = np.ones(count)
            if kind == "synchronous":
                return comm.solo_allreduce(x, sync_every=1, name="a")
            return KINDS[kind](comm, x, name="a")

        await call()
        if comm.rank == 0:
            began = loop.time()
            for _ in range(10):
                newest = (await call()).round
            assert loop.time() - began < 1
            await asyncio.sleep(5)
        x = np.zeros(count)
        last = await comm.join("a", x)
        assert loop.time() >= 5
        if comm.rank == 0:
            return newest if last is None else last.round
        assert last is not None
        return last.round

    assert len(set(simulated(3, main).results)) == 1


def test_a_rank_that_was_told_of_all_rounds_is_told_nothing(run):
    async def main(comm):
        x = np.ones(4)
        for _ in range(3):
            await comm.quorum_allreduce(x, quorum=comm.size)
        y = np.full(4, -1.0)
        assert await comm.join("quorum", y) is None
        return y.tolist()

    assert run(3, main) == [[-1.0] * 4] * 3


@pytest.mark.parametrize("count", [4, LONG])
def test_what_is_staged_when_the_last_rank_joins_is_in_one_more_round(count, run):
    async def main(comm):
        if comm.rank:
            await comm.solo_allreduce(np.ones(count))
        else:
            await comm.barrier()
            await comm.solo_allreduce(np.full(count, 5.0))  # late for it
        if comm.rank:
            await comm.barrier()
        x = [np.full(count, -1.0)]
        last = await comm.join("solo", x[0])
        return None if last is None else (last.round, x[0][0], last.ranks, last.included)

    results = run(2, main)
    assert results[0] == results[1]


def test_a_rank_that_leaves_its_program_counts_as_joined(simulated):
    for count in (2, LONG):

        async def main(comm, count=count):
            await comm.solo_allreduce(np.ones(count))
            if comm.rank:
                await asyncio.sleep(comm.rank)
                await comm.join("solo", np.zeros(count))

        simulated(4, main)


@pytest.mark.parametrize("history", [0, 3])
def test_the_round_of_a_cancelled_call_is_told_by_the_join(history, simulated):
    """The call is cancelled at any moment, also when its answer is ready and its caller does not know of it."""

    async def main(comm, steps):
        x, y = np.full(3, 1.0 + comm.rank), np.zeros(3)
        work = asyncio.ensure_future(comm.quorum_allreduce(x, quorum=comm.size, history=history))
        if comm.rank == 0:
            for _ in range(steps):
                await asyncio.sleep(2e-5 if steps % 2 else 0)
            work.cancel()
        await asyncio.wait([work])
        last = await comm.join("quorum", y)
        assert (last is None) == (not work.cancelled())
        if last is not None:
            assert (last.round, last.skipped, last.missed) == (1, 0, ())
        return work.cancelled(), (x if last is None else y).tolist()

    cancelled = 0
    for steps in range(24):
        results = simulated(3, partial(main, steps=steps), Network(latency_s=1e-4)).results
        assert [values for _, values in results] == [[6.0] * 3] * 3
        cancelled += results[0][0]
    assert cancelled > 0


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("history", [0, 8])
@pytest.mark.parametrize("size", [1, 2, 3])
@looped("give_up", ["cancelled", "closed", "dropped"])
def test_the_round_of_a_call_that_is_given_up_after_a_newer_answer_is_told_as_skipped(give_up, size, history, run):
    """By the join, if there is no call in between. Its result is older than one that the rank has had: `x` stays."""

    async def main(comm):
        calls = [comm.solo_allreduce(np.ones(1), name="a", history=history) for _ in range(2)]
        second = await calls.pop()
        if give_up == "cancelled":
            task = asyncio.ensure_future(calls.pop())
            task.cancel()
            await asyncio.wait([task])
        elif give_up == "closed":
            calls.pop().close()
        else:
            calls.clear()
        y = np.full(1, -1.0)
        last = await comm.join("a", y)
        assert last is None or last.result is not None or (y[0], last.round) == (-1, second.round)
        told = [
            (len(answer.results()) + answer.skipped, answer.round) for answer in (second, last) if answer is not None
        ]
        return sum(count for count, _ in told), told[-1][1]

    for told, newest in run(size, main):
        assert told == newest


def test_a_join_waits_for_earlier_calls_that_nobody_awaits(simulated):
    async def main(comm):
        x = [np.full(2, 1.0) for _ in range(3)]
        for each in x:
            comm.quorum_allreduce(each, quorum=comm.size).close()
        y = np.zeros(2)
        last = await comm.join("quorum", y)
        return [each[0] for each in x], last and last.round

    results = simulated(3, main).results
    assert [values for values, _ in results] == [[3.0] * 3] * 3


@pytest.mark.parametrize("transport", ["inproc", "zmq", "shm"])
def test_on_real_transports(transport):
    async def main(comm):
        for _ in range(1 + 2 * comm.rank):
            await comm.quorum_allreduce(x := np.full(1000, 1.0), history=50)
        last = await comm.join("quorum", x)
        return (await comm.allreduce(np.array([last.round if last else 0]), op=SUM))[0] > 0

    assert run_ranks(4, main, transport=transport) == [True] * 4


@pytest.mark.parametrize("count", [2, LONG])
def test_a_dead_rank_is_lost_and_not_waited_for(count, simulated):
    """It dies at any moment of its join, or before."""
    for point in range(9):
        raised, both_know = {}, asyncio.Barrier(2)

        async def main(comm, point=point, raised=raised, both_know=both_know):
            try:
                await comm.quorum_allreduce(np.ones(count), quorum=comm.size)
                where = {"injection_point": point} if point else {"at": "before"}
                with fault(comm, Kill(), rank=2, **where):
                    await asyncio.sleep(comm.rank)
                    await comm.join("quorum", np.zeros(count))
                while True:
                    await comm.barrier()
                    await asyncio.sleep(1e-5)
            except PeerLostError as error:
                raised[comm.rank] = error.rank
                await both_know.wait()  # leaving would be another loss
                raise

        with pytest.raises(PeerLostError):
            simulated(3, main)
        assert raised == {0: 2, 1: 2}


def test_a_cancelled_join_aborts_the_communicator(simulated):
    async def main(comm):
        await comm.solo_allreduce(np.ones(1))
        if comm.rank == 2:
            await asyncio.sleep(10)
        elif comm.rank == 1:
            with pytest.raises(AbortedError, match=r"join of solo allreduce 'solo'.* was cancelled"):
                await comm.join("solo", np.zeros(1))
        else:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await comm.join("solo", np.zeros(1))
        return asyncio.get_running_loop().time()

    assert [round(time) for time in simulated(3, main).results] == [1, 1, 10]


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@looped("seed", range(4))
def test_in_groups_a_rank_that_has_joined_holds_up_no_round_of_all(size, seed, simulated):
    """No round waits for it, and no round is synchronous without it; its last model stays in its groups."""

    async def main(comm):
        x, seen, last = np.zeros(1), [], 3 + (5 * comm.rank + seed) % 11
        newest = 0
        while newest < last:
            await asyncio.sleep(1e-3 * ((comm.rank + seed) % 3 + 1))
            x[:] = comm.rank
            reduction = await comm.group_allreduce(x, group_size=2, sync_every=4)
            newest = reduction.round
            seen.append((newest, reduction.synchronous, reduction.active))
        assert await comm.join("group", x) is None
        await comm.barrier()
        return last, seen

    results = simulated(size, main).results
    first = min(last for last, _ in results)
    for _, seen in results:
        for number, synchronous, active in seen:
            if synchronous:
                assert number % 4 == 0
                assert active == size
            elif number % 4 == 0:
                assert number > first


BAD = {
    "never called": (lambda comm: comm.join("other", np.zeros(2)), "has made no call named 'other'"),
    "size": (lambda comm: comm.join("solo", np.zeros(3)), "same dtypes and sizes"),
    "dtype": (lambda comm: comm.join("solo", np.zeros(2, "f4")), "same dtypes and sizes"),
    "buckets": (lambda comm: comm.join("solo", [np.zeros(1), np.zeros(1)]), "same dtypes and sizes"),
    "no tensor": (lambda comm: comm.join("solo", 3), "numpy array"),
    "no name": (lambda comm: comm.join(3, np.zeros(2)), "name must be a string"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused_and_has_no_effect(what, simulated):
    call, advice = BAD[what]

    async def main(comm):
        await comm.solo_allreduce(np.ones(2))
        with pytest.raises(UsageError, match=advice):
            call(comm)
        await comm.solo_allreduce(np.ones(2))
        await comm.join("solo", np.zeros(2))
        for again in (lambda: comm.solo_allreduce(np.ones(2)), lambda: comm.solo_allreduce([np.ones(2)])):
            with pytest.raises(UsageError, match="has joined 'solo'"):
                again()
        assert await comm.join("solo", np.zeros(2)) is None

    simulated(2, main)


def test_a_rank_that_has_joined_is_refused_each_time():
    """Not by the shortest way either, which calls take that are repeated."""

    async def main(comm):
        for _ in range(3):
            await comm.solo_allreduce(np.ones(2), name="r")
        await comm.join("r", np.zeros(2))
        for _ in range(3):
            with pytest.raises(UsageError, match="has joined 'r'"):
                comm.solo_allreduce(np.ones(2), name="r")

    run_ranks(2, main, "shm")
