"""Receives from any source: which message each receive takes, and that no message is lost."""

from __future__ import annotations

import asyncio
import os
import warnings

import numpy as np
import pytest

from asyncoll import ClosedError, DeadlineError, MismatchError, PeerLostError, UsageError, deadline
from asyncoll.errors import Reason, reported_failure
from asyncoll.testing import Crash, Network, run_ranks, simulate
from tests.support.cases import SIZES, case, looped
from tests.support.places import SCRIPTS
from tests.support.receiving import LONG, SHORT, message, take_with_cancellations

SCRIPT = SCRIPTS / "runtime/receives_from_any_source.py"
WEATHER = Network(latency_s=1e-4, jitter_s=1e-3)


def counts_of(seed: int, size: int) -> np.ndarray:
    """How many messages each rank sends to each other one, with each of two tags."""
    counts = np.random.default_rng([seed, size]).integers(0, 4 if size < 6 else 2, (size, size, 2))
    counts[np.arange(size), np.arange(size)] = 0
    return counts


async def trade(comm, seed: int) -> None:
    """Ranks send at random, in any order of the tags; named receives and those from any source take all of it."""
    size, me = comm.size, comm.rank
    counts, random = counts_of(seed, size), np.random.default_rng([seed, me])
    sends, left = [], counts[me].copy()
    while left.any():
        dest, tag = random.choice(np.argwhere(left))
        number = counts[me, dest, tag] - left[dest, tag]
        left[dest, tag] -= 1
        sends.append(comm.send(message(me, number, LONG if tag else SHORT), dest, tag))
    named = {(s, t): random.integers(counts[s, me, t] + 1) for s in range(size) for t in range(2)}
    first = [
        (s, t, k, comm.recv(np.empty(LONG if t else SHORT, int), s, t)) for (s, t), n in named.items() for k in range(n)
    ]
    rest = [
        (t, comm.recv_any(np.empty(LONG if t else SHORT, int), t))
        for t in range(2)
        for _ in range(counts[:, me, t].sum() - sum(named[s, t] for s in range(size)))
    ]
    await asyncio.gather(*sends)
    for source, _, number, receive in first:
        assert (await receive == message(source, number, 1)).all()
    for tag, receive in rest:
        x, source = await receive
        assert (x == message(source, named[source, tag], 1)).all()
        named[source, tag] += 1
    assert all(named[s, t] == counts[s, me, t] for s in range(size) for t in range(2))


def test_messages_of_one_sender_and_tag_are_taken_in_order(run):
    for size in SIZES[1:]:
        with case(size=size):
            run(size, lambda comm: trade(comm, 1))


@looped("memory", [False, True])
def test_they_are_in_every_weather(memory):
    for seed in range(20):
        with case(seed=seed):
            simulate(2 + seed % 5, lambda comm, seed=seed: trade(comm, seed), WEATHER, seed, shared_memory=memory)


@looped("elements", [SHORT, LONG])
def test_the_message_that_came_first_is_taken_first(elements):
    arrivals = [1, 2, 1, 1, 3, 2]

    async def main(comm):
        sends = []
        if comm.rank:
            for number, source in enumerate(arrivals):
                if source == comm.rank:
                    await comm.recv(np.empty(1), 0, tag=1)
                    sending = comm.send(np.full(elements, number), 0, tag=7)
                    await comm.send(np.ones(1), 0, tag=2)
                    await asyncio.sleep(0)
                    sends.append(sending)
            await asyncio.gather(*sends)
            return None
        for source in arrivals:
            await comm.send(np.ones(1), source, tag=1)
            await comm.recv(np.empty(1), source, tag=2)
            await asyncio.sleep(1.0)  # of virtual time
        return [(await comm.recv_any(np.empty(elements, int), 7))[1] for _ in arrivals]

    assert simulate(4, main).results[0] == arrivals


def test_receives_of_a_tag_take_messages_in_the_order_in_which_they_were_made(run):
    async def main(comm):
        if comm.rank:
            for number in range(6):
                await comm.send(np.full(LONG if number % 2 else SHORT, number), 0, tag=4)
            return []
        calls = []
        for number in range(6):
            x = np.empty(LONG if number % 2 else SHORT, int)
            calls.append(comm.recv_any(x, 4) if number in (0, 3, 4) else comm.recv(x, 1, 4))
        got = [await call for call in calls]
        return [int(x[0][0] if isinstance(x, tuple) else x[0]) for x in got]

    assert run(2, main)[0] == list(range(6))


def test_tags_and_communicators_do_not_mix(run):
    async def main(comm):
        other = await comm.split(0, key=-comm.rank)
        if comm.rank == 1:
            await comm.send(np.array([1]), 0, tag=1)
            await comm.send(np.array([2]), 0, tag=2)
            await other.send(np.array([3]), 2, tag=2)
        elif comm.rank == 0:
            assert await other.recv_any(np.array([0]), 2) == (np.array([3]), 1)
            assert await comm.recv_any(np.array([0]), 2) == (np.array([2]), 1)
            assert await comm.recv_any(np.array([0]), 1) == (np.array([1]), 1)

    run(3, main)


def test_it_receives_into_any_layout_and_no_elements(run):
    async def main(comm):
        if comm.rank:
            await comm.send(np.arange(6), 0)
            await comm.send(np.empty(0), 0)
        else:
            x = np.zeros((3, 4), int)
            y, sender = await comm.recv_any(x[:, ::2])
            assert y.base is x
            assert x.tolist() == [[0, 0, 1, 0], [2, 0, 3, 0], [4, 0, 5, 0]]
            assert sender == 1
            assert (await comm.recv_any(np.empty(0)))[1] == 1

    run(2, main)


# -- cancellation -----------------------------------------------------------------------------------------------


@looped("memory", [False, True])
def test_a_cancelled_receive_loses_no_message(memory):
    total = 0
    for seed in range(30):
        with case(seed=seed):
            world = simulate(
                2 + seed % 3,
                lambda comm, seed=seed: take_with_cancellations(comm, seed),
                WEATHER,
                seed,
                shared_memory=memory,
            )
            total += sum(world.results)
    assert total > 300


@looped("transport", ["inproc", "zmq", "shm"])
def test_it_loses_none_on_real_transports(transport):
    assert sum(run_ranks(3, lambda comm: take_with_cancellations(comm, 1), transport)) > 0


@pytest.mark.parametrize("elements", [SHORT, LONG, 80 * LONG])
def test_what_a_cancelled_receive_was_receiving_goes_to_the_next_one(elements):
    """Also if more comes than the window allows that no receive waits for."""

    async def main(comm):
        if comm.rank == 1:
            for number in range(3):
                await comm.send(message(1, number, elements), 0)
            return 0
        got, cancelled = [], 0
        for delay_s in np.arange(0.0, 6.0, 0.25):
            task = asyncio.ensure_future(comm.recv_any(np.zeros(elements, int)))
            await asyncio.sleep(float(delay_s))
            task.cancel()
            await asyncio.wait([task])
            cancelled += task.cancelled()
            got += [] if task.cancelled() else [task.result()[0]]
            if len(got) == 3:
                break
        assert all((x == message(1, number, 1)).all() for number, x in enumerate(got))
        return cancelled

    assert simulate(2, main, Network(latency_s=1.0)).results[0] >= 3


def test_a_receive_that_is_never_awaited_takes_no_message(run):
    async def main(comm):
        if comm.rank == 1:
            await comm.send(np.array([1]), 0)
            await comm.barrier()
            await comm.send(np.array([2]), 0)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # of Python: it was never awaited
                comm.recv_any(np.array([0]))  # before the message comes
                dropped = comm.recv_any(np.array([0]))
                await comm.barrier()
                del dropped  # with a message
                await asyncio.sleep(0)
            assert await comm.recv_any(np.array([0])) == (np.array([1]), 1)
            assert await comm.recv(np.array([0]), 1) == [2]

    run(2, main)


# -- errors -----------------------------------------------------------------------------------------------------


@looped("sent, expected", [("i8", "f8"), ("i8", "i4")])
@pytest.mark.parametrize(("elements", "given"), [(3, 4), (LONG, LONG + 1), (SHORT, LONG), (LONG, SHORT), (3, 3)])
def test_a_mismatch_names_both_calls(sent, expected, elements, given, simulated):
    async def main(comm):
        try:
            if comm.rank == 1:
                await comm.send(np.zeros(elements, sent), 0, tag=5)
                await comm.barrier()
            else:
                await comm.recv_any(np.zeros(given, expected), 5)
        except MismatchError as error:
            return str(error)

    first, second = simulated(2, main).results
    names = {"i8": "int64", "i4": "int32", "f8": "float64"}
    assert first == second
    assert f"#1 of {elements} {names[sent]}, from rank 1 to rank 0, tag 5 at test_receives.py" in first
    assert f"#1 of {given} {names[expected]}, from rank 1 to rank 0, tag 5 at test_receives.py" in first


def test_the_loss_of_any_rank_ends_it_with_its_name():
    async def main(comm):
        if comm.rank == 2:
            await asyncio.sleep(1000.0)
        with pytest.raises(PeerLostError) as caught:
            await comm.recv_any(np.empty(3))
        return caught.value.rank

    faults = [Crash(2, at_s=1.0)]
    assert simulate(4, main, Network(faults=faults)).results == [2, 2, None, 2]


def test_it_goes_on_until_all_other_ranks_have_left():
    async def main(comm):
        part = await comm.split(0)
        if comm.rank:
            await asyncio.sleep(3.0 - comm.rank)
            await part.send(np.full(1, comm.rank), 0)
            part.close()
            await asyncio.sleep(10.0)
            return None
        taken = [await part.recv_any(np.zeros(1, int)) for _ in range(2)]
        with pytest.raises(PeerLostError, match="closed this communicator"):
            await part.recv_any(np.zeros(1, int))
        return taken

    assert simulate(3, main).results[0] == [(np.full(1, 2), 2), (np.full(1, 1), 1)]


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("awaited", ["recv", "recv_any", "send", "recv in a part", "allreduce in a part"])
def test_a_rank_whose_program_has_ended_ends_what_waits_for_it(awaited, memory):
    """Once what it has left under way is over: its last message arrives."""
    sends = []

    async def main(comm):
        part = await comm.split(0)
        if comm.rank:
            sends.append(asyncio.ensure_future(comm.send(message(comm.rank, 0, LONG), 0, tag=1)))
            return
        calls = {
            "recv": lambda: comm.recv(np.empty(3), 1),
            "recv_any": lambda: comm.recv_any(np.empty(3)),
            "send": lambda: comm.send(np.empty(LONG), 1),
            "recv in a part": lambda: part.recv(np.empty(3), 1),
            "allreduce in a part": lambda: part.allreduce(np.empty(3)),
        }
        call = asyncio.ensure_future(calls[awaited]())
        for rank in range(1, comm.size):
            assert (await comm.recv(np.empty(LONG, int), rank, 1) == message(rank, 0, 1)).all()
        await call

    with pytest.raises(PeerLostError, match=r"rank [12] .*its program has ended") as caught:
        simulate(3, main, Network(latency_s=0.05), shared_memory=memory)
    assert caught.value.left_in_order
    assert reported_failure(caught.value) is None  # so nothing blames the rank


def test_a_task_that_outlives_its_program_sends_nothing(run):
    tasks = []

    async def outlive(comm):
        while not comm._core.member.endpoint.departed:
            await asyncio.sleep(1e-3)
        for call in (
            lambda: comm.send(np.ones(3), 1),
            lambda: comm.recv(np.ones(3), 1),
            lambda: comm.recv_any(np.ones(3)),
        ):
            with pytest.raises(ClosedError, match="the program of this rank has ended"):
                call()

    async def main(comm):
        if comm.rank == 0:
            tasks.append(asyncio.create_task(outlive(comm)))
        else:
            while not tasks or not tasks[0].done():
                await asyncio.sleep(1e-3)
            tasks[0].result()

    run(2, main)


@looped("wait_s", [0.0, 5.0])
def test_the_departure_of_the_rank_whose_message_it_has_taken_ends_it(wait_s):
    """In good order a rank leaves after its sends; this one is in the middle of a long array."""

    async def main(comm):
        part = await comm.split(0)
        if comm.rank == 1:
            sending = asyncio.ensure_future(part.send(np.zeros(LONG, int), 0))
            await asyncio.sleep(0.6)
            part._end(Reason("it is done"))
            await asyncio.gather(sending, return_exceptions=True)
        elif comm.rank == 0:
            await asyncio.sleep(wait_s)  # the rank leaves after, or before
            with pytest.raises(PeerLostError, match="rank 1"):
                await part.recv_any(np.zeros(LONG, int))
        await asyncio.sleep(20.0)

    simulate(3, main, Network(latency_s=0.4))


def test_a_deadline_tells_where_all_ranks_are():
    async def main(comm):
        if comm.rank == 0:
            with (
                deadline(5.0),
                pytest.raises(DeadlineError, match=r"from any rank to rank 0, tag 3.*missing") as caught,
            ):
                await comm.recv_any(np.empty(3), 3)
            assert "send/recv of 3 float64, from any rank" in str(caught.value)
            assert "in its own code" in str(caught.value)
        else:
            await asyncio.sleep(50.0)

    simulate(3, main)


def test_bad_arguments_are_refused_at_once(run):
    async def main(comm):
        if comm.size == 1:
            with pytest.raises(UsageError, match="one rank"):
                comm.recv_any(np.empty(3))
        with pytest.raises(UsageError):
            comm.recv_any([1, 2, 3])
        with pytest.raises(UsageError, match="tag"):
            comm.recv_any(np.empty(3), tag=0.5)

    run(1, main)
    run(2, main)


def test_its_calls_are_counted(run):
    async def main(comm):
        if comm.rank == 1:
            await comm.send(np.zeros(3, "i8"), 0)
        else:
            await comm.recv_any(np.zeros(3, "i8"))
            calls = comm.statistics().calls["send/recv"]
            assert (calls.calls, calls.bytes_received) == (1, 24)

    run(2, main)


def test_nothing_is_left_of_tags_that_were_used_once():
    async def main(comm):
        for tag in range(50):
            if comm.rank:
                await comm.send(np.zeros(3), 0, tag)
            else:
                await comm.recv_any(np.zeros(3), tag)
        receives, executions = comm._calls._receives, comm._core.member.endpoint.executions
        assert not receives._queues
        assert not receives._returned
        assert not executions.on_early
        assert not executions._open
        assert not executions._early

    simulate(3 - 1, main)


# -- processes --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@looped(
    "settings",
    [{}, {"ASYNCOLL_TRANSPORT": "zmq", "ASYNCOLL_ENCRYPT": "all"}, {"ASYNCOLL_CORE": "python"}],
)
def test_no_message_is_lost_among_processes(forked_world, settings):
    for rank, each in enumerate(forked_world(os.environ | settings, 3, SCRIPT, "cancels")):
        code, out, err = each.end()
        assert (code, err) == (0, ""), (rank, code, out, err)
        assert out.startswith("passed")


@pytest.mark.slow
def test_a_killed_rank_ends_it_and_without_an_event_loop_it_gives_a_handle(forked_world):
    for rank, each in enumerate(forked_world(os.environ, 3, SCRIPT, "blocking")):
        code, out, err = each.end()
        assert rank == 2 or (code, out, err) == (0, "passed\n", ""), (rank, code, out, err)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["outlives", "outlives without a loop"])
def test_a_process_that_waits_for_one_whose_program_has_ended_tells_the_others(forked_world, mode):
    world = [each.end() for each in forked_world(os.environ, 3, SCRIPT, mode)]
    assert world == [(0, "PeerLostError of rank 1\n", ""), *[(0, "AbortedError of rank 0\n", "")] * 2]
