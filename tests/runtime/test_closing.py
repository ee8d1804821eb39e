"""Communicators that are closed before the world ends: their memory, tables and names come back."""

from __future__ import annotations

import asyncio
import os

import numpy as np
import pytest

from asyncoll import AbortedError, ClosedError, MismatchError, PeerLostError, UsageError, deadline
from asyncoll.runtime.executions import WINDOW_BYTES
from asyncoll.testing import Crash, Network, run_ranks, simulate
from asyncoll.transport.wire import SEGMENT_BYTES
from tests.support.cases import SIZES, case, looped
from tests.support.footprint import PATIENCE_S, different, footprint, measured, objects, settled, warmed
from tests.support.places import SCRIPTS

SCRIPT = SCRIPTS / "runtime/closes_and_drops_groups.py"
WEATHER = Network(latency_s=1e-4, jitter_s=1e-3)


async def use(part, seed: int) -> None:
    """Calls of all kinds, some of which are under way when this rank closes."""
    random = np.random.default_rng([seed, part.rank])
    size = part.size
    assert (await part.allreduce(np.ones(5)) == size).all()
    late = [part.allreduce(np.full(count, 1.0)) for count in (3, 3000, 300_000)]
    if size > 1:
        sending = part.send(np.array([part.rank]), (part.rank + 1) % size, tag=seed)
        assert await part.recv_any(np.array([-1]), tag=seed) == (np.array([(part.rank - 1) % size]),) * 2
        await sending
    await asyncio.sleep(float(random.uniform(0, 1e-3)))
    part.close()
    for call in late:
        assert (await call == size).all()
    with pytest.raises(ClosedError, match="closed"):
        part.allreduce(np.ones(5))
    part.close()


@looped("size", SIZES)
def test_ranks_close_at_any_time_and_nothing_is_left(size, run):
    async def main(comm):
        await warmed(comm)
        await use(await comm.split(0), 9)  # the transport, too, allocates what it keeps
        before = await measured(comm)
        for seed in range(3):
            colors = np.random.default_rng([seed, size]).integers(0, 3, size)
            await use(await comm.split(int(colors[comm.rank])), seed)
        return before, await measured(comm)

    for rank, (before, after) in enumerate(run(size, main)):
        assert before == after, (rank, different(before, after))


@looped("memory", [False, True])
def test_they_do_in_every_weather(memory):
    async def main(comm, seed):
        await warmed(comm)
        await use(await comm.split(0), 9)
        before = await measured(comm)
        for step in range(4):
            await use(await comm.split(0, key=comm.rank * (-1) ** step), 10 * seed + step)
        return before, await measured(comm)

    for seed in range(15):
        with case(seed=seed):
            world = simulate(
                2 + seed % 4, lambda comm, seed=seed: main(comm, seed), WEATHER, seed, shared_memory=memory
            )
            for before, after in world.results:
                assert before == after, different(before, after)


def test_messages_that_were_never_received_free_their_part_of_the_window(run):
    x = np.zeros(SEGMENT_BYTES, np.uint8)

    async def main(comm):
        for _ in range(WINDOW_BYTES // SEGMENT_BYTES + 1):
            part = await comm.split(0)
            if comm.rank:
                await part.send(x, 0)
            await part.barrier()
            part.close()
        await settled(comm)
        if comm.rank:
            await comm.send(x, 0)
        else:
            await comm.recv(x, 1)
            assert footprint(comm)["current"] == 0

    run(2, main)


def test_a_rank_that_closes_early_leaves_the_calls_of_the_others_right(run):
    async def main(comm):
        part = await comm.split(0)
        x = np.full(1000, float(comm.rank))
        if comm.rank == 0:
            call = part.allreduce(x)
            part.close()
            await call
        else:
            await asyncio.sleep(0.01)
            await part.allreduce(x)
            await asyncio.sleep(0.01)
        assert (x == 3).all()
        again = await comm.split(0)
        assert (await again.allreduce(np.ones(1000)) == 3).all()
        assert (await again.allgather(np.full(70_000, comm.rank)))[2, -1] == 2
        if comm.rank:
            part.close()
        await settled(comm, still_open=1)
        assert (await again.allreduce(np.ones(1000)) == 3).all()

    run(3, main)


@looped("closers", [{1}, {0, 2}])
def test_a_call_that_needs_a_rank_that_has_closed_fails_at_once_and_names_it(closers, run):
    """Without an end of the calls of the closed rank, these would wait for the deadline, 300 s."""

    async def main(comm):
        part, untouched = await comm.split(0), await comm.split(0)
        x = np.full(100_000, float(comm.rank))
        late = [part.allreduce(np.full(count, 1.0)) for count in (3, 3000, 300_000)]
        if comm.rank in closers:
            sending = part.send(np.full(200_000, 7.0), 3)
            part.close()
            await sending
        else:
            if comm.rank == 3:
                for closer in closers:
                    assert (await part.recv(np.zeros(200_000), closer) == 7).all()
            for call in (lambda: part.allreduce(x), part.barrier, lambda: part.allgather(x)):
                with pytest.raises(PeerLostError, match="it has left: it has closed this communicator") as caught:
                    await call()
                assert caught.value.rank in closers
                assert caught.value.left_in_order
            part.close()
        for call in late:
            assert (await call == 4).all()
        assert (await untouched.allreduce(np.ones(3)) == 4).all()
        untouched.close()
        await settled(comm)
        return len(comm._core.member.endpoint.departures.open)

    assert run(4, main) == [1] * 4


async def use_and_drop(comm, seed: int) -> None:
    """Calls of a communicator that is dropped while some of them are under way."""
    random = np.random.default_rng([seed, comm.rank])
    part = await comm.split(0)
    assert (await part.allreduce(np.ones(5)) == comm.size).all()
    late = [part.allreduce(np.full(count, 1.0)) for count in (3, 3000, 300_000)]
    await asyncio.sleep(float(random.uniform(0, 1e-3)))
    del part
    for call in late:
        assert (await call == comm.size).all()


@looped("size", SIZES)
def test_ranks_drop_a_communicator_at_any_time_and_nothing_is_left(size, run):
    async def main(comm):
        await warmed(comm)
        await use_and_drop(comm, 9)
        before = await measured(comm)
        for seed in range(3):
            await use_and_drop(comm, seed)
        await comm.split(0)  # nothing takes the result
        return before, await measured(comm)

    for rank, (before, after) in enumerate(run(size, main)):
        assert before == after, (rank, different(before, after))


def test_a_rank_that_has_dropped_a_communicator_is_named(run):
    async def main(comm):
        part = await comm.split(0)
        if comm.rank == 0:
            del part
            await comm.barrier()
            return
        with pytest.raises(PeerLostError, match="its program has ended, or has dropped this communicator") as caught:
            with deadline(PATIENCE_S):
                await part.allreduce(np.ones(3))
        assert caught.value.rank == 0
        assert caught.value.left_in_order
        await comm.barrier()

    run(3, main)


def test_what_uses_a_communicator_keeps_it(run):
    async def main(comm):
        part = await comm.split(0)
        gossip = await part.gossip(np.full(3, float(comm.rank)))
        rounds = [part.solo_allreduce(np.ones(3)), part.push_sum(np.ones(3), np.ones(1))]
        part.rpc.register(abs)
        remote = part.rpc
        del part
        for call in rounds:
            await call
        assert await remote.call(1 - comm.rank, "abs", -1) == 1
        if gossip.active:
            await gossip.exchange()
        assert (await gossip.close() == 0.5).all()

    run(2, main)


def test_a_forked_child_that_drops_a_communicator_disturbs_nothing():
    async def main(comm):
        part = [await comm.split(0)]
        assert told_by_a_child(part.clear) == b""
        assert (await part[0].allreduce(np.ones(3)) == comm.size).all()

    run_ranks(2, main, "shm")


def told_by_a_child(act):
    """What a forked child that calls `act()` writes to its standard error, where Python names ignored exceptions."""
    reader, writer = os.pipe()
    if child := os.fork():
        os.close(writer)
        with open(reader, "rb") as told:
            text = told.read()
        os.waitpid(child, 0)
        return text
    os.dup2(writer, 2)
    act()
    os._exit(0)


def test_messages_of_a_rank_that_has_closed(run):
    """A pair call with it fails; a receive from any source fails only when no source is left."""

    async def main(comm):
        part = await comm.split(0)
        if comm.rank == 0:
            x = np.zeros(1)
            waiting = part.recv_any(x, tag=1)
            await comm.barrier()  # rank 1 has closed
            assert (await waiting)[1] == 2
            with pytest.raises(PeerLostError, match="closed this communicator") as caught:
                await part.recv_any(x, tag=1)
            assert caught.value.rank in (1, 2)
        elif comm.rank == 1:
            part.close()
            await comm.barrier()
        else:
            await comm.barrier()
            await asyncio.sleep(0.1)
            await part.send(np.ones(1), 0, tag=1)
        part.close()
        part = await comm.split(0)
        if comm.rank == 1:
            part.close()
        else:
            with pytest.raises(PeerLostError, match="closed this communicator") as caught:
                await part.recv(np.zeros(1), 1)
            assert caught.value.rank == 1
            part.close()
        await settled(comm)

    run(3, main)


@looped("transport", ["inproc", "shm", "shm-mixed"])
def test_hundreds_of_groups_take_no_more_memory_than_some(transport):
    count = 150

    async def main(comm):
        found = []
        for number in range(count):
            async with await comm.split(comm.rank % (1 + number % 3)) as part:
                assert (await part.allreduce(np.ones(1 + number % 5)) == part.size).all()
                await part.barrier()
            if number in (count // 2, count - 1):
                found.append(await measured(comm))
        return found

    for first, last in run_ranks(4, main, transport):
        assert first == last, different(first, last)


@looped("transport", ["inproc", "shm"])
def test_objects_are_collected(transport):
    """All of Python's and of the compiled core's, but for the last calls, which reports of errors describe."""

    async def main(comm):
        counts = []
        for _ in range(3):
            for _ in range(5):
                async with await comm.split(0) as part:
                    await part.allreduce(np.ones(3))
                    await part.allreduce(np.ones(3))
                    if transport == "shm":
                        await part.solo_allreduce(np.ones(3))
                        await part.solo_allreduce(np.ones(3))
                del part
            await settled(comm)
            counts.append(objects())
            await comm.barrier()
        return counts

    for _, before, after in run_ranks(2, main, transport):
        assert before == after, different(before, after)
        assert before["Core"] == 2


def test_memory_of_wait_avoiding_operations_comes_back():
    async def main(comm):
        await comm.allreduce(np.ones(300_000))
        await warmed(comm)
        before = None
        for _ in range(3):
            part = await comm.split(0)
            for _ in range(3):
                await part.solo_allreduce(np.ones(70_000), name="long")
                await part.quorum_allreduce(np.ones(7), quorum=2, name="short")
            part.solo_allreduce(np.ones(7), name="under way").close()
            part.close()
            with pytest.raises(ClosedError, match="closed"):
                part.quorum_allreduce(np.ones(7), quorum=2, name="short")
            after = await measured(comm)
            before = before or after
        assert before == after, different(before, after)

    run_ranks(3, main, "shm")
    simulate(3, main, WEATHER, shared_memory=True)


def test_a_rank_that_has_closed_holds_up_no_round_of_the_others(run):
    async def main(comm):
        part = await comm.split(0)
        await part.quorum_allreduce(np.ones(3), quorum=part.size)
        await comm.barrier()
        if comm.rank == 0:
            part.close()
        else:
            await part.quorum_allreduce(np.ones(3), quorum=part.size)
            part.close()

    run(3, main)


def test_a_failed_communicator_can_be_closed_and_leaves_the_others_as_they_are(run):
    async def fail(part):
        async with part:
            if part.rank == 1:
                await asyncio.sleep(0.01)
                part.abort("enough")
            await part.allreduce(np.ones(300_000))
            await part.allreduce(np.ones(300_000))

    async def main(comm):
        await warmed(comm)
        before = None
        for _ in range(3):
            part = await comm.split(0)
            await part.allreduce(np.ones(3))
            with pytest.raises(AbortedError):
                await fail(part)
            assert (await comm.allreduce(np.ones(3)) == comm.size).all()
            after = await measured(comm)
            before = before or after
        assert not comm._core.member.endpoint.failures.any
        return before, after

    for before, after in run(3, main):
        assert before == after, different(before, after)


def test_a_killed_rank_between_closing_and_reuse_is_named():
    async def main(comm):
        if comm.rank == 2:
            part = await comm.split(0)
            part.close()
            await asyncio.sleep(1000.0)
        part = await comm.split(0)
        part.close()
        with pytest.raises(PeerLostError) as caught:
            await comm.split(0)
        return caught.value.rank

    for memory in (False, True):
        report = simulate(3, main, Network(faults=[Crash(2, at_s=1.0)]), shared_memory=memory)
        assert report.results == [2, 2, None]


def test_a_closed_gossip_leaves_nothing_and_an_open_one_answers_on(run):
    async def main(comm):
        async with await comm.split(0) as part:
            gossip = await part.gossip(np.full(3, float(comm.rank)))
            await gossip.exchange()
            model = await gossip.close()
            assert model.shape == (3,)
        await settled(comm)
        part = await comm.split(0)
        gossip = await part.gossip(np.full(3, float(comm.rank)))
        if comm.rank % 2:
            part.close()
        await comm.barrier()
        if comm.rank % 2 == 0:
            await gossip.exchange()
        await comm.barrier()
        part.close()
        with pytest.raises(ClosedError, match="closed"):
            gossip.exchange()

    run(3, main)


def test_what_can_not_be_closed_and_what_stays():
    async def main(comm):
        with pytest.raises(UsageError, match="all ranks closes with the world"):
            comm.close()
        part = await comm.split(0)
        x = part.empty(1000, "f8")
        part.close()
        x[:] = comm.rank
        assert (await comm.allreduce(x) == 3).all()
        del x
        await comm.barrier()
        served = await comm.split(0)
        served.rpc.register(abs)
        await comm.barrier()
        if comm.rank:
            served.close()
        await comm.barrier()
        if not comm.rank:
            assert await served.rpc.call(1, "abs", -1) == 1
        await comm.barrier()

    run_ranks(3, main, "shm")


LEFT = {
    "another call": (MismatchError, "allreduce #1 of . float64"),
    "no call": (PeerLostError, "rank 1 is gone: .*its program has ended, or has dropped this"),
    "an abort": (AbortedError, "rank 1 aborted: no reason"),
}


@pytest.mark.parametrize("meets", LEFT)
def test_a_collective_of_a_part_that_fails_as_its_rank_leaves_is_raised_there(meets, run):
    """Its program has kept no handle, and the other rank has done something else."""

    async def main(comm):
        part = await comm.split(0)
        if comm.rank == 0 or meets == "another call":
            part.allreduce(np.ones(3 + comm.rank)).close()
        elif meets == "an abort":
            await asyncio.sleep(0.1)
            part.abort("no reason")

    kind, text = LEFT[meets]
    with pytest.raises(kind, match=text):
        run(2, main)


def test_a_part_without_calls_that_fails_as_its_rank_leaves_is_no_error(run):
    async def main(comm):
        part = await comm.split(0)
        await part.allreduce(np.ones(3))
        if comm.rank == 1:
            await asyncio.sleep(0.1)
            part.abort("no reason")

    run(2, main)


@pytest.mark.slow
@looped(
    "settings, groups",
    [({}, 250), ({"ASYNCOLL_CORE": "python"}, 120), ({"ASYNCOLL_TRANSPORT": "zmq"}, 120)],
)
def test_groups_of_processes_give_everything_back(forked_world, settings, groups):
    for rank, each in enumerate(forked_world(os.environ | settings, 4, SCRIPT, str(groups))):
        code, out, err = each.end()
        assert (code, out, err) == (0, "passed\n", ""), (rank, code, out, err)
