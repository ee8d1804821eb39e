"""Lost, frozen and late ranks are named at every rank; a rank that only computes is not."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

import asyncoll
from asyncoll import AsyncollError, Communicator, DeadlineError, PeerLostError, UsageError
from asyncoll.runtime.failures import WORLD
from asyncoll.testing import Crash, Network, Pause, simulate
from asyncoll.transport import Loss
from asyncoll.world.environment import Environment
from tests.support.places import SCRIPTS
from tests.support.processes import LIGHT, PATIENCE_S
from tests.support.ranks import failures

SIZES = [2, 3, 4, 5, 8, 13]
SCRIPT = SCRIPTS / "runtime/one_rank_is_lost.py"


# -- lost ranks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_a_loss_that_one_rank_notices_reaches_all_ranks(size):
    """Only its neighbours exchange heartbeats with a frozen process."""

    async def act(comm: Communicator) -> None:
        await comm.barrier()
        if comm.rank == size - 1:
            await asyncio.sleep(100)
        if comm.rank == 0:
            comm._core.member.endpoint.lost(Loss(size - 1, "it has no heartbeat", 0.5))
        await comm.barrier()

    raised = failures(size, act, simulate)
    assert sorted(raised) == list(range(size))[: len(raised)]
    for rank in range(size - 1):
        assert type(raised[rank]) is PeerLostError
        assert (raised[rank].rank, raised[rank].cause, raised[rank].last_seen_s) == (
            size - 1,
            "it has no heartbeat",
            0.5,
        )


def test_processes_are_not_checked_once_the_lost_rank_is_known(monkeypatch):
    """The check takes time, and the calls in shared memory have the error already."""

    async def act(comm: Communicator) -> None:
        endpoint = comm._core.member.endpoint
        endpoint.lost(Loss(1, "it has no heartbeat", 0.5))
        error = endpoint.lost_in_memory(Loss(0, "it died while it was changing shared memory"))
        assert (error.rank, error.cause) == (1, "it has no heartbeat")

    failures(2, lambda comm: act(comm) if comm.rank == 0 else asyncio.sleep(0), simulate)


@pytest.mark.parametrize("size", [3, 5])
def test_survivors_that_notice_a_death_in_different_ways_name_the_same_process(size):
    """Each keeps what it has noticed or heard first, so that none waits for the others before it raises."""

    async def act(comm: Communicator) -> None:
        await comm.barrier()
        endpoint = comm._core.member.endpoint
        if comm.rank == 0:
            endpoint.lost_in_memory(Loss(1, "it died while it was changing shared memory"))
        if comm.rank == 2:
            endpoint.lost(Loss(1, "its process has ended", 0.5))
        await (asyncio.sleep(100) if comm.rank == 1 else comm.barrier())

    raised = [error for rank, error in sorted(failures(size, act, in_shared_memory).items()) if rank != 1]
    assert len(raised) == size - 1
    assert {(error.rank, error.ranks) for error in raised} == {(1, (1,))}
    assert len({(error.host, error.pid) for error in raised}) == 1
    told = [(error.cause, error.last_seen_s) for error in raised]
    assert told[:2] == [("it died while it was changing shared memory", 0.0), ("its process has ended", 0.5)]
    assert {*told} == {*told[:2]}, "the others have heard of one of them"


def in_shared_memory(size, main):
    return simulate(size, main, shared_memory=True)


@pytest.mark.parametrize("by_thread", [False, True])
def test_two_locks_that_meet_different_lost_owners_report_one_cause(by_thread):
    """The first report counts at once, before the runtime's loop has ended the calls that wait."""

    async def act(comm: Communicator) -> None:
        endpoint = comm._core.member.endpoint
        await comm.barrier()
        if comm.rank == 0:
            reports: list[BaseException] = []

            def report(rank: int) -> None:
                reports.append(endpoint.lost_in_memory(Loss(rank, "it died while it was changing shared memory")))

            for rank in (1, 2):
                if by_thread:
                    thread = threading.Thread(target=report, args=(rank,))
                    thread.start()
                    thread.join()
                else:
                    report(rank)
            assert [error.rank for error in reports] == [1, 1]
            assert not endpoint.membership.lost, "the rest happens on the loop"
        if comm.rank != 1:
            await comm.barrier()

    raised = failures(3, act, in_shared_memory)
    assert {rank: (type(error), error.rank) for rank, error in raised.items()} == dict.fromkeys(
        (0, 2), (PeerLostError, 1)
    )


def test_a_failure_calls_its_listeners_once_also_at_the_end_of_the_world():
    heard: list[Any] = []

    async def act(comm: Communicator) -> None:
        endpoint = comm._core.member.endpoint
        endpoint.failures.on_failure(WORLD, lambda failure, communicator: heard.append(failure))
        endpoint.lost(Loss(1, "it has no heartbeat", 0.5))
        await endpoint.close()
        endpoint.failures.fail(heard[0])

    failures(2, lambda comm: act(comm) if comm.rank == 0 else asyncio.sleep(0), simulate)
    assert len(heard) == 1


def test_a_loss_is_noted_even_if_the_endpoint_has_closed_meanwhile():
    """A failed call in shared memory waits for all ranks that may use its memory, except the lost ones."""

    async def act(comm: Communicator) -> None:
        endpoint = comm._core.member.endpoint
        endpoint.lost_in_memory(Loss(1, "it died while it was changing shared memory"))
        await endpoint.close()
        assert not endpoint.membership.lost, "the callback comes later"
        await asyncio.sleep(0)
        assert endpoint.membership.lost == {1}

    failures(2, lambda comm: act(comm) if comm.rank == 0 else asyncio.sleep(0), in_shared_memory)


def test_a_rank_that_leaves_at_once_tells_the_loss_that_it_has_noticed():
    """Otherwise the others would report the rank that leaves."""

    async def act(comm: Communicator) -> None:
        endpoint = comm._core.member.endpoint
        await comm.barrier()
        if comm.rank == 0:
            waiting = asyncio.ensure_future(comm.recv(np.ones(3), 1))
            await asyncio.sleep(1)
            endpoint.lost_in_memory(Loss(1, "it died while it was changing shared memory"))
            await endpoint.close(flush=True)
            await waiting
        await comm.barrier()

    raised = failures(3, act, in_shared_memory)
    assert [(type(error), error.rank) for error in raised.values()] == [(PeerLostError, 1)] * 3


@pytest.mark.parametrize("size", SIZES)
def test_the_error_names_the_last_known_call_of_the_lost_rank(size, simulated):
    async def act(comm: Communicator) -> None:
        await comm.allreduce(np.ones(3))
        await comm.allgather(np.ones(2))
        await asyncio.sleep(2 if comm.rank else 0)
        await comm.barrier()

    faults = Network(faults=[Crash(size - 1, 1.0)])
    raised = failures(size, act, lambda n, main: simulated(n, main, faults), survivors=size - 1)
    assert sorted(raised) == list(range(size - 1))
    doing = {error.doing.partition(" at ")[0] for error in raised.values()}
    assert doing & {"allreduce #1 of 3 float64, SUM", "allgather #2 of 2 float64"}
    assert doing <= {"allreduce #1 of 3 float64, SUM", "allgather #2 of 2 float64", "joining the world", ""}


@pytest.mark.parametrize("place", ["messages", "memory", "hosts"])
@pytest.mark.parametrize("elements", [3, 1 << 19])  # by message: for a coordinator, and for a tree
def test_the_error_names_the_last_known_round_of_the_lost_rank(place, elements):
    async def act(is_after_a_collective: bool, comm: Communicator) -> None:
        if is_after_a_collective:
            await comm.allreduce(np.ones(3))
        for _ in range(2):
            await comm.quorum_allreduce(np.ones(3), quorum=comm.size, name="few")
        for _ in range(3):
            await comm.quorum_allreduce(np.ones(elements), quorum=comm.size)
        await asyncio.sleep(20 if comm.rank else 0)
        await comm.quorum_allreduce(np.ones(elements), quorum=comm.size)

    hosts = [rank // 2 for rank in range(4)] if place == "hosts" else None
    for is_after_a_collective in (False, True):
        for lost in (1, 3):
            faults = Network(faults=[Crash(lost, 10.0)])
            world = partial(simulate, network=faults, shared_memory=place != "messages", hosts=hosts)
            raised = failures(4, partial(act, is_after_a_collective), world, survivors=3)
            doing = [error.doing.partition(" at ")[::2] for error in raised.values()]
            assert all("joining" not in first for first, _ in doing)
            told = [text for text in doing if "round 3 of quorum allreduce 'quorum'" in " ".join(text)]
            assert told == doing


@pytest.mark.parametrize("place", ["messages", "memory"])
def test_the_last_known_round_of_a_rank_that_was_always_late_is_one_with_its_contribution(place):
    async def act(comm: Communicator) -> None:
        if comm.rank == 2:
            await asyncio.sleep(1)
        for _ in range(3 if comm.rank == 0 else 1):
            await comm.solo_allreduce(np.ones(3))
        await asyncio.sleep(2 if comm.rank == 0 else 20)
        reduction = await comm.solo_allreduce(np.ones(3))
        assert comm.rank or 2 in reduction.ranks
        await asyncio.sleep(10)
        await comm.solo_allreduce(np.ones(3))

    faults = Network(faults=[Crash(2, 5.0)])
    raised = failures(3, act, partial(simulate, network=faults, shared_memory=place == "memory"), survivors=2)
    last = {error.doing.partition(" of ")[0] for error in raised.values()}
    assert last == {"round 4"}


@pytest.mark.parametrize(("at_s", "is_told"), [(7.5, True), (8.5, False), (9.5, False), (11.5, False)])
def test_a_loss_after_the_last_call_of_all_ranks_is_not_reported(at_s, is_told):
    """A message takes 1 s and a barrier 3 s. The barriers: joining, the call, the last call of all, leaving."""

    async def main(comm: Communicator) -> int:
        await comm.barrier()
        return comm.rank

    def run() -> list[int | None]:
        return simulate(5, main, Network(latency_s=1.0, faults=[Crash(1, at_s)])).results

    if is_told:
        with pytest.raises(PeerLostError):
            run()
    else:
        assert run() == [0, None, 2, 3, 4]


# -- late ranks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("late", [0, 1])
def test_a_deadline_error_names_the_arrived_and_the_missing_ranks(size, late, simulated):
    async def act(comm: Communicator) -> None:
        await comm.barrier()
        if comm.rank == late:
            await asyncio.sleep(10)
        with asyncoll.deadline(3):
            await comm.allreduce(np.ones(4))

    raised = failures(size, act, simulated)
    others = tuple(rank for rank in range(size) if rank != late)
    assert sorted(raised) == list(range(size))
    for error in raised.values():
        assert type(error) is DeadlineError
        assert (error.arrived, error.missing) == (others, (late,))
        assert "allreduce #2 of 4 float64, SUM at test_liveness.py" in str(error)
        assert f"missing: rank {late}, in its own code for 3.0 s, after barrier #1 at test_liveness.py" in str(error)


def test_a_rank_in_another_call_is_missing_and_the_error_names_the_call(simulated):
    async def act(comm: Communicator) -> None:
        if comm.rank == 2:
            await comm.recv(np.ones(1), 1)
        with asyncoll.deadline(1):
            await comm.barrier()

    raised = failures(3, act, simulated)
    assert sorted(raised) == [0, 1, 2]
    assert {(error.arrived, error.missing) for error in raised.values()} == {((0, 1), (2,))}
    assert "rank 2, in send/recv #1 of 1 float64, from rank 1 to rank 2, tag 0 at test_liveness.py" in str(raised[0])


def test_the_error_of_a_pair_names_only_its_two_ranks(simulated):
    async def act(comm: Communicator) -> None:
        if comm.rank == 0:
            with asyncoll.deadline(1):
                await comm.recv(np.ones(1), 2)
        await asyncio.sleep(5)
        await comm.barrier()

    raised = failures(4, act, simulated)
    assert {(error.arrived, error.missing) for error in raised.values()} == {((0,), (2,))}


def test_a_rank_that_has_completed_the_call_has_arrived(simulated):
    """Some ranks of a reduction complete it before the others."""

    async def act(comm: Communicator) -> None:
        if comm.rank == 2:
            await asyncio.sleep(10)
        with asyncoll.deadline(1):
            await comm.reduce(np.ones(4))
        await asyncio.sleep(10)
        await comm.barrier()

    raised = failures(4, act, simulated)
    assert {(error.arrived, error.missing) for error in raised.values()} == {((0, 1, 3), (2,))}


def test_a_rank_that_is_in_another_call_of_that_number_or_has_completed_one_is_missing():
    async def act(comm: Communicator) -> None:
        if comm.rank == 0:
            with asyncoll.deadline(0.05):  # before the ranks have been asked whether they are in the same call
                await comm.broadcast(np.ones(4), root=1)
        elif comm.rank == 1:
            await comm.gather(np.ones(4), root=2)
        elif comm.rank == 2:
            await asyncio.sleep(10)
        else:
            await comm.scatter(root=0)
        await comm.barrier()

    for error in failures(4, act, simulate).values():
        assert (error.arrived, error.missing) == ((0,), (1, 2, 3))
        assert "rank 1, in barrier #2" in str(error)
        assert "rank 3, in scatter #1" in str(error)


def test_a_rank_that_does_not_answer_is_missing():
    async def act(comm: Communicator) -> None:
        await comm.barrier()
        await asyncio.sleep(2)
        with asyncoll.deadline(1):
            await comm.barrier()

    frozen = Network(faults=[Pause(1, 1.5, 1000)])
    raised = failures(3, act, lambda n, main: simulate(n, main, frozen))
    assert (raised[0].arrived, raised[0].missing) == ((0, 2), (1,))
    assert "missing: rank 1, which does not answer" in str(raised[0])


@pytest.mark.parametrize("opening", ["majority", "quorum"])
def test_a_deadline_applies_to_rounds(opening, simulated):
    async def act(comm: Communicator) -> None:
        rules: dict[str, Any] = {"quorum": 3} if opening == "quorum" else {"candidates": 3}
        if comm.rank == 1:
            await asyncio.sleep(10)
        with asyncoll.deadline(2):
            await getattr(comm, f"{opening}_allreduce")(np.ones(2), sync_every=1, name="g", **rules)

    raised = failures(3, act, simulated)
    assert {(error.arrived, error.missing) for error in raised.values()} == {((0, 2), (1,))}


def test_a_call_before_its_deadline_and_the_next_are_not_affected(simulated):
    async def main(comm: Communicator) -> float:
        for seconds in (3, 100):
            with asyncoll.deadline(seconds):
                await asyncio.sleep(2 * comm.rank)
                await comm.barrier()
        await asyncio.sleep(200 * comm.rank)
        return float((await comm.allreduce(np.ones(1)))[0])

    assert simulated(2, main).results == [2, 2]


def test_of_nested_deadlines_the_earliest_applies(simulated):
    async def act(comm: Communicator) -> None:
        with asyncoll.deadline(1), asyncoll.deadline(50):
            await asyncio.sleep(20 * comm.rank)
            await comm.barrier()

    raised = failures(2, act, simulated)
    assert "was not over after 1." in str(raised[0])


def test_a_deadline_of_one_communicator_does_not_end_another(simulated):
    async def main(comm: Communicator) -> str:
        half = await comm.split(comm.rank % 2)
        if comm.rank == 0:
            await asyncio.sleep(5)
        with asyncoll.deadline(1):
            try:
                await half.barrier()
            except DeadlineError as error:
                return f"missing {error.missing}"
        return "fine"

    async def act(comm: Communicator) -> tuple[str, float]:
        told = await main(comm)
        await asyncio.sleep(10)
        return told, (await comm.allreduce(np.ones(1)))[0]

    late, fine = ("missing (0,)", 4.0), ("fine", 4.0)
    assert simulated(4, act).results == [late, fine, late, fine]


@pytest.mark.parametrize("seconds", [0, -1, math.nan])
def test_a_deadline_is_a_number_of_seconds(seconds):
    with pytest.raises(UsageError, match="a number of seconds above 0"), asyncoll.deadline(seconds):
        pytest.fail("it was accepted")


@pytest.mark.parametrize("seconds", ["x", "5", None, [], True, np.True_, 1j])
def test_a_deadline_is_a_real_number(seconds):
    with pytest.raises(UsageError, match="a deadline must be a number, got "), asyncoll.deadline(seconds):
        pytest.fail("it was accepted")


@pytest.mark.parametrize("name", ["ASYNCOLL_FREEZE_S", "ASYNCOLL_DEADLINE_S"])
@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_limits_in_the_environment_are_checked(name, text):
    world = {"RANK": "0", "WORLD_SIZE": "1", name: text}
    with pytest.raises(UsageError, match=f"{name}='{text}' in the environment: give a number of seconds"):
        Environment.read(world)


def test_limits_in_the_environment():
    world = {"RANK": "0", "WORLD_SIZE": "1"}
    default = Environment.read(world)
    chosen = Environment.read(world | {"ASYNCOLL_FREEZE_S": "3", "ASYNCOLL_DEADLINE_S": "7.5"})
    none = Environment.read(world | {"ASYNCOLL_FREEZE_S": "0", "ASYNCOLL_DEADLINE_S": "0"})
    assert (default.freeze_s, default.deadline_s) == (0.5, 1800)
    assert (chosen.freeze_s, chosen.deadline_s) == (3, 7.5)
    assert (none.freeze_s, none.deadline_s) == (0, math.inf)


# -- real processes -------------------------------------------------------------------------------


def told(transport: str, *arguments: object, ranks: int = 4, **settings: str) -> dict[str, str]:
    """The last line that each of the ranks of a launched job prints, by rank."""
    command = [sys.executable, "-m", "asyncoll", "launch", "-n", ranks, "--transport", transport, SCRIPT, *arguments]
    environment = os.environ | LIGHT | settings
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert "stopped" in arguments or "Traceback" not in done.stderr, done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


# Shorter than the script holds the GIL, and longer than a busy machine lets a process wait.
FREEZE = {"ASYNCOLL_FREEZE_S": "2"}
both = pytest.mark.parametrize("transport", ["shm", "zmq"])


@pytest.mark.slow
@both
@pytest.mark.parametrize("elements", [3, 1_000_000])
def test_every_survivor_names_a_dead_process(elements, transport):
    """Rank 1 exits with code 0, so that the launcher does not stop the others before they print their errors."""
    assert told(transport, "exits", elements) == dict.fromkeys("023", "rank 1 is dead")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("core", ["", "python"])
def test_every_survivor_names_a_process_that_died_before_it_signed_a_lock(core, ranks):
    """Also if that process does not look dead for a third of a second."""
    heard = told("shm", "exits with a lock", 3, 0.3, ranks=ranks, ASYNCOLL_CORE=core)
    assert heard == dict.fromkeys("0234"[: ranks - 1], "rank 1 is dead")


@pytest.mark.slow
@both
def test_every_survivor_names_a_stopped_process(transport):
    heard = told(transport, "stopped", 3, **FREEZE)
    heard.pop("1", None)  # the error of the stopped rank depends on the ranks that are left when it continues
    assert heard == dict.fromkeys("023", "rank 1 is frozen")


@pytest.mark.slow
@both
def test_a_rank_that_holds_the_gil_is_not_frozen(transport):
    assert told(transport, "holds the GIL", 3, **FREEZE) == dict.fromkeys("0123", "all 4 are there")


@pytest.mark.slow
@both
def test_a_rank_that_computes_answers_after_a_deadline(transport):
    heard = told(transport, "is late", 3, ASYNCOLL_DEADLINE_S="3")
    assert heard == dict.fromkeys("0123", "arrived (0, 1, 3), missing (2,) in its own code")


# -- lost hosts -----------------------------------------------------------------------------------


def losses(size, hosts, *faults, act=None, seed=0):
    """The PeerLostError of each rank, and when it was raised, in a world where ranks of `hosts` call for ever."""
    raised = {}

    async def main(comm: Communicator) -> None:
        try:
            if act is not None:
                await act(comm)
            while True:
                await comm.allreduce(np.ones(7))
                await asyncio.sleep(1e-3)
        except PeerLostError as error:
            raised[comm.rank] = error, asyncio.get_running_loop().time()
            await asyncio.sleep(5)  # a rank that leaves tells all others
            raise

    network = Network(latency_s=1e-4, jitter_s=1e-4, faults=faults)
    with pytest.raises(AsyncollError):
        simulate(size, main, network, seed, shared_memory=True, hosts=hosts)
    return raised


@pytest.mark.parametrize(("hosts", "gone"), [("aabb", "b"), ("abbab", "a"), ("aabbbccb", "b"), ("abc", "c")])
def test_a_host_that_vanishes_is_named_with_its_ranks(hosts, gone):
    ranks = tuple(rank for rank, host in enumerate(hosts) if host == gone)
    for seed in range(4):
        dies_s = 0.01 + np.random.default_rng(seed).uniform(0, 1e-4, len(ranks))  # faster than any message
        raised = losses(len(hosts), hosts, *map(Crash, ranks, dies_s.tolist()), seed=seed)
        assert raised.keys() == set(range(len(hosts))).difference(ranks)
        for error, at_s in raised.values():
            assert (error.ranks, error.rank, error.host) == (ranks, ranks[0], gone)
            assert at_s < max(dies_s) + 2e-3


def test_the_text_names_the_host_or_the_rank():
    assert str(PeerLostError(2, "it crashed", "b", 7, ranks=(2, 3))) == "host b (ranks 2, 3) is gone: it crashed"
    assert str(PeerLostError(2, "it crashed", "b", 7, ranks=(2,))) == "rank 2 (host b, pid 7) is gone: it crashed"
    assert PeerLostError(2, "it crashed").ranks == (2,)


@pytest.mark.parametrize("victim", range(5))
def test_a_rank_of_a_living_host_is_reported_without_delay(victim):
    raised = losses(5, "abbab", Crash(victim, 0.01))
    assert raised.keys() == set(range(5)) - {victim}
    for error, at_s in raised.values():
        assert error.ranks == (victim,)
        assert at_s < 0.012


SILENCE = [Pause(rank, 1e-3, 10) for rank in (2, 3)]


def noticed(lost):
    """Rank 0 notices the silence of these ranks, one heartbeat apart, from 0.01 s on."""

    async def act(comm: Communicator) -> None:
        for beat, rank in enumerate(lost if comm.rank == 0 else ()):
            await asyncio.sleep(0.125 if beat else 0.01)
            comm._core.member.endpoint.lost(Loss(rank, "it is silent", 0.5))

    return act


@pytest.mark.parametrize(("lost", "named", "after_s"), [((3, 2), (2, 3), 0.125), ((3,), (3,), 0.25)])
def test_silences_of_a_host_are_noticed_a_heartbeat_apart(lost, named, after_s):
    """A rank that neither is lost nor answers delays the report by a quarter of a second."""
    raised = losses(4, "aabb", *SILENCE, act=noticed(lost))
    for rank in (0, 1):
        error, at_s = raised[rank]
        assert (error.ranks, error.host) == (named, "b")
        assert 0 <= at_s - 0.01 - after_s < 2e-3


def test_a_rank_that_leaves_reports_a_loss_that_is_held_back():
    async def act(comm: Communicator) -> None:
        await asyncio.sleep(0.01)
        if comm.rank == 0:
            endpoint = comm._core.member.endpoint
            endpoint.lost(Loss(2, "it is silent", 0.5))
            assert not endpoint.failures.any
            await endpoint.close(flush=True)

    error, at_s = losses(4, "aabb", *SILENCE, act=act)[1]
    assert (error.ranks, error.host) == ((2,), "b")
    assert at_s < 0.012
