"""A thousand calls of each kind, cancelled at random points: the next call is right, and no wait remains."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import uvloop

from asyncoll import AbortedError, Communicator
from asyncoll.algorithms.seam.arrival import to_its_end
from asyncoll.runtime.endpoint import Endpoint
from asyncoll.runtime.progress import SharedLoop
from asyncoll.testing import Network, run_ranks, simulate
from asyncoll.transport.joining import Joining
from asyncoll.transport.messages import inproc
from asyncoll.transport.virtual_time import VirtualTimeLoop
from asyncoll.world import rank_links
from asyncoll.world.world import World
from tests.support.cancelling import cancelled_in_turn, interrupt, nothing_is_pending
from tests.support.cases import case
from tests.support.places import SCRIPTS
from tests.support.processes import LIGHT, PATIENCE_S

WEATHER = Network(latency_s=10e-6, jitter_s=50e-6)
THOUSAND = 1000
TIMES = 20  # calls in one world of virtual time; real worlds take longer to start and to end
REAL_TIMES = 120
WORLDS_MAX = 400

memory = pytest.mark.parametrize("memory", [False, True], ids=["messages", "memory"])


async def cancelled(call, delay_s: float) -> bool:
    """Cancel `call` after `delay_s`; return False if it was over by then."""
    task = asyncio.ensure_future(call)
    await asyncio.sleep(delay_s)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return True
    except AbortedError:  # another rank has cancelled first
        pass
    return False


def delay_s(random) -> float:
    """A random delay in seconds, from the first steps of a call to well after its end."""
    return float(10 ** random.uniform(-7, -3))


def cancel_many(count: float, cancelled_in: Callable[[int], int]) -> None:
    """Run `cancelled_in(seed)`, which returns how many calls were cancelled in time, until they are `count`."""
    total = 0
    for seed in range(1, WORLDS_MAX):
        with case(seed=seed):
            total += cancelled_in(seed)
        if total >= count:
            return
    pytest.fail(f"only {total} calls of {WORLDS_MAX} worlds were cancelled: the delays miss the calls")


@memory
def test_after_a_cancelled_collective_the_next_is_right(memory):
    async def main(comm: Communicator, seed: int) -> int:
        random = np.random.default_rng([seed, comm.rank])
        return await interrupt(comm, seed, TIMES, lambda call: cancelled(call, delay_s(random)))

    def cancelled_in(seed: int) -> int:
        return sum(simulate(3, partial(main, seed=seed), WEATHER, seed, shared_memory=memory).results)

    cancel_many(THOUSAND, cancelled_in)


async def contribute(comm: Communicator, random, cancel, times: int = TIMES) -> tuple[int, int, int]:
    """The sums that this rank contributes and receives in all its calls, and how many of them it cancels.

    A solo round waits for no rank, so any rank may cancel. Rounds that wait are cancelled in test_laws.
    """
    given = got = count = 0

    async def call(value: int) -> None:
        nonlocal got
        reduction = await comm.solo_allreduce(x := np.full(5, value), history=10 * times)
        assert all(np.ptp(each) == 0 for each in (x, *reduction.missed))
        got += sum(int(each[0]) for each in (x, *reduction.missed))
        assert reduction.skipped == 0

    for _ in range(times):
        given += (value := int(random.integers(1, 1000)))
        if random.random() < 0.5:
            count += await cancel(call(value))
        else:
            await call(value)
    for _ in range(3):  # late for a round; includes all staged contributions; returns that result
        await comm.barrier()
        await call(0)
    await comm.barrier()
    await nothing_is_pending(comm)
    return given, got, count


def check_contributions(results) -> int:
    """Every rank has received each contribution of every rank once."""
    given, got, counts = zip(*results, strict=True)
    assert set(got) == {sum(given)}
    return sum(counts)


@memory
def test_after_a_cancelled_wait_the_round_continues_and_the_next_call_is_right(memory):
    async def main(comm: Communicator, seed: int) -> tuple[int, int, int]:
        random = np.random.default_rng([seed, comm.rank])
        return await contribute(comm, random, lambda call: cancelled(call, delay_s(random)))

    def cancelled_in(seed: int) -> int:
        return check_contributions(simulate(3, partial(main, seed=seed), WEATHER, seed, shared_memory=memory).results)

    cancel_many(THOUSAND, cancelled_in)


def test_a_call_that_is_over_at_once_and_closed_cannot_be_awaited():
    async def main(comm: Communicator) -> float:
        x = np.ones(20_000)
        await comm.allreduce(x)  # the core carries out the next call of its kind
        if comm.rank:
            await comm.recv(np.empty(1), 0)
        call = comm.allreduce(x)
        if comm.rank == 0:
            await comm.send(np.zeros(1), 1)
            await call
        else:  # the last to arrive
            call.close()
            with pytest.raises(RuntimeError, match="cannot reuse"):
                await call
        await comm.barrier()  # without the core the call goes on
        return float(x[0])

    assert simulate(2, main, shared_memory=True).results == run_ranks(2, main) == [4, 4]


@pytest.mark.slow
@pytest.mark.parametrize("is_awaited", [True, False], ids=["cancelled", "never awaited"])
def test_the_next_call_tells_of_an_answer_that_was_there_at_once_and_lost(is_awaited):
    async def main(comm: Communicator) -> None:
        if comm.rank == 0:
            for value in range(1, 10):
                lost = comm.solo_allreduce(np.full(5, 10 * value), history=2)
                if is_awaited:
                    task = asyncio.ensure_future(lost)
                    task.cancel()
                    assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
                    del task
                del lost
                await asyncio.sleep(0)
                reduction = await comm.solo_allreduce(x := np.full(5, value), history=2)
                # It opens no round, so its own contribution is in the round of the next lost call.
                assert (reduction.round, int(x[0]), reduction.missed) == (value, 10 * value + value - 1, ())
                assert (reduction.included, reduction.skipped) == (False, 0)
        await comm.barrier()

    run_ranks(2, main, "shm")


@pytest.mark.slow
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("transport", ["inproc", "zmq"])  # in memory a solo round is over before it can be cancelled
def test_the_same_on_real_loops(transport, new_loop, monkeypatch):
    monkeypatch.setattr("uvloop.new_event_loop", new_loop)

    async def main(comm: Communicator, seed: int) -> tuple[int, int, int]:
        random = np.random.default_rng([seed, comm.rank])
        turns = lambda call: cancelled_in_turn(call, int(random.integers(1, 20)))  # noqa: E731
        return await contribute(comm, random, turns, REAL_TIMES)

    def cancelled_in(seed: int) -> int:
        return check_contributions(run_ranks(3, partial(main, seed=seed), transport))

    cancel_many(THOUSAND / 4, cancelled_in)  # on each of two loops and two transports


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "loop"), [("shm", "asyncio"), ("shm", "uvloop"), ("zmq", "asyncio")])
def test_collectives_are_cancelled_across_threads_and_processes(transport, loop, tmp_path):
    """In a world of processes the runtime has a loop and a thread of its own."""
    program = [str(SCRIPTS / "algorithms/cancelled_collectives.py"), loop, "200"]
    launch = [sys.executable, "-m", "asyncoll", "launch", "-n", "3", "--transport", transport, "--timeout"]
    launch.append(str(PATIENCE_S))
    environment = os.environ | LIGHT | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([*launch, *program], env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.count("all right") == 3, done.stdout + done.stderr
    assert done.returncode == 0


# -- what is around a call ------------------------------------------------------------------------


def test_a_timeout_that_is_put_off_is_a_timeout():
    async def goes_on():
        for _ in range(5):
            await asyncio.sleep(0)
        return "its end"

    async def main():
        async with asyncio.timeout(0):
            assert await to_its_end(goes_on()) == "its end"
            await asyncio.sleep(0)

    with pytest.raises(TimeoutError):
        asyncio.run(main())


# -- joining --------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_rank_that_is_cancelled_again_while_it_meets_the_others_closes_its_connections(times, monkeypatch):
    """The thread in which it meets them cannot be cancelled, and opens what nothing else would close."""
    closed, go_on = [], threading.Event()

    async def close():
        closed.append("transport")

    def meet(*_):
        until_joined = contextlib.ExitStack()
        until_joined.callback(closed.append, "until joined")
        go_on.wait()
        return SimpleNamespace(until_joined=until_joined, arena=None, transport=SimpleNamespace(close=close))

    async def main():
        meeting = asyncio.create_task(rank_links.meeting(None, Joining(0, 2)))
        for _ in range(times):
            await asyncio.sleep(0)
            meeting.cancel()
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.wait([meeting])
        assert meeting.cancelled()

    monkeypatch.setattr(rank_links, "meet", meet)
    asyncio.run(main())
    assert closed == ["transport", "until joined"]


def test_a_cancellation_at_the_end_of_a_wait_for_the_others_is_not_lost():
    async def is_over_after(turns: int) -> bool:
        waiting = asyncio.create_task(Joining(0, 2).over(asyncio.sleep(0), lambda: [1], "not there yet"))
        for _ in range(turns):
            await asyncio.sleep(0)
        if not waiting.cancel():
            return True
        await asyncio.wait([waiting])
        assert waiting.cancelled(), turns
        return False

    turns = 1
    while not asyncio.run(is_over_after(turns)):
        turns += 1
    assert turns > 2


def test_a_rank_that_is_cancelled_between_joining_and_its_next_step_leaves_the_world():
    """The other rank is in the world by then, and would wait for it."""
    told = []

    async def rank(transport, inside):
        try:
            async with World(Endpoint(transport), SharedLoop()) as comm:
                inside.append(comm.rank)
                await comm.barrier()
        except AbortedError as error:
            told.append(str(error))

    async def cancelled_after(turns: int) -> bool:
        """Whether the rank came inside before it was cancelled."""
        inside: list[int] = []
        first, second = (asyncio.create_task(rank(transport, inside)) for transport in inproc.world(2))
        for _ in range(turns):
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first, second])
        return 0 in inside

    turns, was_inside = 2, False  # after the first of them it has not joined yet
    while not was_inside:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:  # which notices that nothing goes on
            was_inside = runner.run(cancelled_after(turns))
        turns += 1
    assert turns > 3
    assert set(told) == {"rank 0 aborted: CancelledError: "}


def test_a_rank_that_is_cancelled_while_it_leaves_closes_its_connections():
    async def main():
        (transport,) = inproc.world(1)
        endpoint = Endpoint(transport)

        async def rank():
            async with World(endpoint, SharedLoop()):
                endpoint.spawn(asyncio.Event().wait(), 0)  # leaving waits for the end of it

        leaving = asyncio.create_task(rank())
        while not endpoint.closed:
            await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
        assert leaving.cancelled()
        assert transport._closed

    asyncio.run(main())
