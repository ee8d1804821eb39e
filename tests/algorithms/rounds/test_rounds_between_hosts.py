"""Wait-avoiding rounds of ranks on several hosts: in memory on each, between agents by message."""

from __future__ import annotations

import asyncio
import collections
import functools
import os
import random

import numpy as np
import pytest

from asyncoll import AVG, MAX, AbortedError, MismatchError, PeerLostError, UsageError
from asyncoll.algorithms.rounds import operation_registry
from asyncoll.algorithms.rounds.agent import Agent
from asyncoll.algorithms.rounds.agent_signals import (
    AGAIN,
    AGENTS,
    ASK,
    CLAIM,
    HERE,
    OPEN,
    REMIND,
    RESULT,
    TEAM,
    WATCH,
    step_of,
)
from asyncoll.algorithms.rounds.engine import ARRIVED, GONE, LATE
from asyncoll.algorithms.rounds.host_record import HostRecord
from asyncoll.algorithms.rounds.operation_registry import OperationRegistry
from asyncoll.errors import ProtocolError
from asyncoll.testing import Crash, Cut, Network, Pause, run_ranks, simulate
from asyncoll.transport.keys import write_key
from tests.support.cases import looped
from tests.support.places import SCRIPTS

MIXED = (0, 1, 0, 2, 0, 1, 0)  # hosts of four, two and one ranks


def on_hosts(hosts, main, network=None, seed=0):
    return simulate(len(hosts), main, network, seed, shared_memory=True, hosts=hosts)


@looped("kind", ["solo", "majority", "quorum"])
def test_every_contribution_is_in_one_round_on_any_hosts(kind):
    async def main(comm):
        model = np.zeros(5)
        gradients = np.ones(5)
        for step in range(3 + comm.rank % 3):
            await asyncio.sleep(0.01 * (comm.rank + step))
            reduction = await getattr(comm, f"{kind}_allreduce")(gradients, history=100)
            assert len(reduction.group) == comm.size
            model += sum(reduction.results())
            gradients[:] = 1
        last = await comm.join(kind, gradients)
        model += sum(last.results()) if last else 0
        return model.tolist()

    models = on_hosts(MIXED, main).results
    steps = sum(3 + rank % 3 for rank in range(len(MIXED)))
    assert models == [[float(steps)] * 5] * len(MIXED)


@looped("fixed", [False, True])
def test_models_of_groups_on_several_hosts(fixed):
    """A model stays as it is in the memory of its host, for the rounds that its rank does not come to."""

    async def main(comm):
        for step in range(5):
            await asyncio.sleep(1 if comm.rank == 3 else 0.1)
            x = np.array([2.0**comm.rank, step])
            reduction = await comm.group_allreduce(x, group_size=3, fixed=fixed, name="models")
            assert x[0] == sum(2.0**rank for rank in reduction.ranks)
            assert set(reduction.ranks) <= set(reduction.group)
            assert comm.rank in reduction.group
        return len(reduction.group)

    assert set(on_hosts(MIXED, main).results) == {2, 3}


def test_a_quorum_counts_ranks_and_not_hosts():
    async def main(comm):
        await asyncio.sleep(comm.rank)
        reduction = await comm.quorum_allreduce(np.ones(1), quorum=4)
        return reduction.round, reduction.ranks

    assert on_hosts((0, 0, 0, 1, 2), main).results == [(1, (0, 1, 2, 3))] * 5


def test_weights_averages_and_other_reductions_of_several_arrays():
    async def main(comm):
        rank = comm.rank
        x, y, z = np.full(3, float(rank)), np.full(2, rank, "f4"), np.full(2, rank)
        await comm.solo_allreduce([x, y], op=AVG, weight=rank, sync_every=1, name="weighted")
        await comm.solo_allreduce(z, op=MAX, sync_every=1, name="greatest")
        return x[0], y[1], z[1]

    assert on_hosts((0, 0, 1, 1), main).results == [(7 / 3, np.float32(7 / 3), 3)] * 4


@pytest.mark.parametrize("count", [3, 3000], ids=["through the opener", "among agents"])
@looped("paused", range(7))
def test_no_process_delays_those_of_other_hosts_unless_it_is_alone_on_its_own(paused, count):
    """Rank 6 is alone on its host."""
    hosts = (0, 1, 0, 1, 0, 1, 2)

    async def main(comm):
        now, newest = asyncio.get_running_loop().time, 0
        await comm.solo_allreduce(np.ones(count))
        await asyncio.sleep(2 - now())
        if comm.rank == paused:
            await asyncio.sleep(100)
        sums = []
        while newest < 30:
            await asyncio.sleep(0.01)
            x = np.ones(count)
            reduction = await comm.solo_allreduce(x)
            newest = reduction.round
            sums.append(x[0])
        return now()

    network = Network(faults=[Pause(paused, 1.0, 80.0)])
    ended = on_hosts(hosts, main, network).results
    waits = paused == 6
    assert all((when > 80) == waits for rank, when in enumerate(ended) if rank != paused), ended


STOPS = [
    ((0, 0, 0, 1, 1, 1), (0,)),
    ((0, 1, 0, 2, 1, 2), (1,)),
    ((0, 0, 0, 1, 1, 1), (0, 1)),  # both agents of a host
    ((0, 0, 0, 1, 1, 1, 0), (0, 1, 3, 4)),  # those of both hosts
]


@pytest.mark.parametrize("count", [3, 3000], ids=["through the opener", "among agents"])
def test_processes_that_stop_delay_nobody_as_long_as_one_of_their_host_runs(count):
    """At any moment, also in the middle of a round that they carry out."""

    async def main(comm, stopped, moment):
        now, newest, amid, sums = asyncio.get_running_loop().time, 0, False, {}
        await comm.solo_allreduce(np.ones(count))
        if comm.rank in stopped:
            await asyncio.sleep(moment - now())
            agent = comm._core.backend.operations.known["solo"]._agent
            amid = bool(agent._opened or agent._attempts)  # the opener, or it takes part for its host
            await asyncio.sleep(20 - now())
        while newest < 20:
            await asyncio.sleep(0.005)
            x = np.ones(count)
            newest = (await comm.solo_allreduce(x)).round
            sums[newest] = x[-1]
        return now(), amid, sums

    amid = []
    for seed in range(40):
        hosts, stopped = STOPS[seed % len(STOPS)]
        moment = 0.04 + 0.001 * seed
        network = Network(jitter_s=1e-3, faults=[Pause(rank, moment, 15.0) for rank in stopped])
        told = functools.partial(main, stopped=stopped, moment=moment)
        for rank, (ended, was_amid, sums) in enumerate(results := on_hosts(hosts, told, network, seed).results):
            amid.append(was_amid)
            assert rank in stopped or ended < 10, (seed, rank)
            assert all(results[other][2].get(number, x) == x for other in range(rank) for number, x in sums.items())
    assert amid.count(True) > 3


@pytest.mark.parametrize("count", [3, 3000], ids=["through the opener", "among agents"])
def test_a_process_that_stops_before_it_wakes_the_others_delays_nobody(count, monkeypatch):
    """It has changed the memory, and released the lock. Here it never rings."""
    lost = []

    def silent(change):
        def change_silently(record, *arguments):
            change(record, *arguments)
            lost.extend(record.control_block._ringing)
            record.control_block._ringing.clear()

        return change_silently

    async def main(comm):
        x = np.ones(count)
        await comm.barrier()
        for _ in range(10):
            x[:] = 1
            await comm.solo_allreduce(x, name="x", sync_every=1)
        return asyncio.get_running_loop().time()

    monkeypatch.setattr(HostRecord, "_publish", silent(HostRecord._publish))
    monkeypatch.setattr(HostRecord, "conclude", silent(HostRecord.conclude))
    ended = on_hosts((0, 1, 0, 1, 0, 1, 0), main).results
    assert len(lost) > 10
    assert max(ended) < 3


class Resumed:
    """Processes that stop, and read from their connections in any order when they go on.

    `Pause` keeps the order in which messages were sent. Of a process that was stopped, only the order of each source
    holds.
    """

    def __init__(self, rank, at_s, seed, patch):
        self.at_s, self.until_s = at_s, at_s + 0.7
        self._rank = rank
        self._random = random.Random(seed)
        self._held = collections.defaultdict(list)  # by source
        self._received = Agent.received
        patch.setattr(Agent, "received", lambda agent, *signal: self._signalled(agent, signal))

    def _signalled(self, agent, signal):
        loop = asyncio.get_running_loop()
        if agent._port.group.rank != self._rank or not self.at_s <= loop.time() < self.until_s:
            self._received(agent, *signal)
            return
        if not self._held:
            loop.call_at(self.until_s, self._resume, agent)
        self._held[signal[0]].append(signal)

    def _resume(self, agent):
        while self._held:
            source = self._random.choice(sorted(self._held))
            asyncio.get_running_loop().call_soon(self._received, agent, *self._held[source].pop(0))
            if not self._held[source]:
                del self._held[source]


@looped("count, seed", [(count, seed) for count in (3, 3000) for seed in (4, 5, 23, 31, 41, 47)])
def test_no_attempt_is_left_when_a_stopped_process_has_gone_on(count, seed, monkeypatch):
    hosts, stopped, at_s = (0, 0, 0, 1, 1, 1), (0, 1, 3, 4)[seed % 4], 0.04 + 0.0007 * seed

    async def main(comm):
        now, given, taken, round_ = asyncio.get_running_loop().time, 0, 0.0, 0
        random_ = random.Random(100 * seed + comm.rank)
        while now() < 1:
            x = np.ones(count)
            reduction = await comm.solo_allreduce(x, history=1000)
            given, round_ = given + 1, reduction.round
            taken += sum(result[0] for result in reduction.results())
            await asyncio.sleep(random_.uniform(0.0025, 0.0075))
        await asyncio.sleep(1)
        agent = comm._core.backend.operations.known["solo"]._agent
        left = [key for key in agent._attempts if key[0] < round_]
        last = await comm.join("solo", np.zeros(count))
        taken += sum(result[0] for result in last.results()) if last else 0
        return given, taken, left

    resumed = Resumed(stopped, at_s, seed, monkeypatch)
    network = Network(jitter_s=1e-3, faults=[Pause(stopped, resumed.at_s, 0.7 - 1e-6)])
    given, taken, left = zip(*on_hosts(hosts, main, network, seed).results, strict=True)
    assert set(taken) == {sum(given)}
    assert left == ([],) * len(hosts)


def test_models_of_groups_while_agents_are_stopped():
    hosts, stopped = (0, 0, 0, 1, 1, 1, 0), (0, 3)

    async def main(comm):
        newest = 0
        while newest < 30:
            await asyncio.sleep(0.005)
            x = np.array([2.0**comm.rank] * 3000)
            reduction = await comm.group_allreduce(x, group_size=3, name="models")
            newest = reduction.round
            assert x[-1] == sum(2.0**rank for rank in reduction.ranks)
            assert set(reduction.ranks) <= set(reduction.group)
        return asyncio.get_running_loop().time()

    faults = [Pause(rank, 0.05 + 0.003 * rank, 15.0) for rank in stopped]
    ended = on_hosts(hosts, main, Network(jitter_s=1e-3, faults=faults)).results
    assert all(when < 10 for rank, when in enumerate(ended) if rank not in stopped), ended


@looped("count, cut", [(1, ()), (3000, (1,))])
def test_an_agent_acts_on_what_only_it_was_told_before_the_round(count, cut):
    """Rank 4 is cut off from agent 0. What it tells agent 1 may come before agent 0 has published the last round.

    Agent 1 finds that out by itself: agent 0 may stop before it could tell.
    """

    async def main(comm):
        now = asyncio.get_running_loop().time
        await comm.solo_allreduce(np.ones(count), sync_every=100)
        await comm.barrier()
        await asyncio.sleep(1 - now())
        for _ in range(20 if comm.rank == 4 else 0):
            await comm.solo_allreduce(np.ones(count), sync_every=100)
        ended = now()
        await asyncio.sleep(200)
        return ended

    for seed in range(5):
        network = Network(jitter_s=0.02, faults=[Cut(0, rank, 0.9, 100.0) for rank in (4, *cut)])
        assert on_hosts((0, 0, 1, 1, 1), main, network, seed).results[4] < 10


def test_a_contribution_of_a_paused_rank_is_used():
    """Its agents take it from memory, without asking."""

    async def main(comm):
        await comm.solo_allreduce(np.zeros(1))
        await asyncio.sleep(1)
        if comm.rank == 2:
            call = asyncio.ensure_future(comm.majority_allreduce(np.full(1, 5.0), candidates=4, sync_every=2))
            return (await call).round
        await asyncio.sleep(1)
        x = np.ones(1)
        reduction = await comm.majority_allreduce(x, candidates=4, sync_every=2)
        return asyncio.get_running_loop().time() < 10, reduction.ranks, x[0]

    results = on_hosts((0, 0, 0, 1), main, Network(faults=[Pause(2, 1.5, 50.0)])).results
    assert all(in_time and 2 in ranks for in_time, ranks, _ in results[:2])


def test_a_contribution_crosses_the_network_once_for_each_host():
    hosts, count = (0, 0, 0, 0, 1, 1, 1, 1), 100_000

    async def main(comm):
        await comm.solo_allreduce(np.ones(count, "f4"), sync_every=1)

    long = [nbytes for _, source, dest, nbytes in on_hosts(hosts, main).trace if nbytes > 10_000]
    assert sum(long) == pytest.approx(2 * 4 * count, rel=0.01)


def test_ranks_that_know_different_operations_of_one_name_are_told():
    async def main(comm, different):
        with pytest.raises(MismatchError, match=r"called solo allreduce 'x' of \d float64.*but it exists as solo"):
            await comm.solo_allreduce(np.ones(2 if comm.rank == different else 3), name="x", sync_every=1)

    for different in range(4):
        on_hosts((0, 0, 0, 1), lambda comm, rank=different: main(comm, rank))


@looped("lost", range(5))
def test_a_lost_process_is_named_at_all_others(lost):
    """Whether it is an agent or not, and even if it is all of its host."""

    async def calls(comm):
        while True:
            await comm.solo_allreduce(np.ones(3), sync_every=2)

    async def main(comm):
        with pytest.raises(PeerLostError, match=f"rank {lost} "):
            await calls(comm)
        return True

    ended = on_hosts((0, 0, 0, 1, 2), main, Network(jitter_s=1e-3, faults=[Crash(lost, 0.1)])).results
    assert ended == [None if rank == lost else True for rank in range(5)]


def test_statistics_have_the_times_of_the_ranks_of_all_hosts():
    """Those of the rounds before the newest: a host tells its times when it takes part, while its callers wait."""

    async def main(comm):
        for _ in range(3):
            await asyncio.sleep(1 + comm.rank)
            await comm.quorum_allreduce(np.ones(1), quorum=4)
        await comm.barrier()
        return comm.statistics().operations["quorum"]

    for statistics in on_hosts((0, 1, 0, 1), main).results:
        assert statistics.rounds == 3
        assert statistics.active == {4: 3}
        assert statistics.waits_s == pytest.approx((6, 4, 2, 0), abs=0.1)


def test_times_between_hosts_are_exact_after_days():
    """They are those of all rounds so far: float32 would count them in steps of 60 ms."""
    days_s = 864_000.0

    async def main(comm):
        for _ in range(11):
            await asyncio.sleep(0.01 if comm.rank else 0)
            await comm.quorum_allreduce(np.ones(1), quorum=4)
            if comm.statistics().operations["quorum"].calls == 1:
                await asyncio.sleep(days_s if comm.rank else 0)
        await comm.barrier()
        return comm.statistics().operations["quorum"].waits_s[0]

    for waited in on_hosts((0, 1, 0, 1), main).results:
        assert waited == pytest.approx(days_s + 0.1, abs=0.005)


@looped("count", [1, 3000])
def test_a_signal_that_no_agent_sends_is_refused(count):
    async def main(comm):
        await comm.solo_allreduce(np.ones(count), sync_every=1)
        agent = comm._core.backend.operations.known["solo"]._agent
        next_two = [2, 3]
        while len({agent._leading_host(number) for number in next_two}) == 1:
            await comm.solo_allreduce(np.ones(count), sync_every=1)
            next_two = [number + 1 for number in next_two]
        await comm.barrier()
        if comm.rank == 0:
            one, two = np.array([3], "<i4").tobytes(), np.array([0, 4], "<i4").tobytes()
            led, other = sorted(next_two, key=agent._leading_host)  # the first is opened on this host
            strange = [(1, number, ARRIVED, b"") for number in range(other + 3, other + 9)]
            strange += [(4, led, step_of(OPEN, 1), b""), (1, other, step_of(OPEN, 1), b""), (1, led, 77, b"")]
            strange += [(1, led, WATCH, b""), (1, led, REMIND, b"")]
            strange += [(4, other, step_of(kind, 1), b"") for kind in (CLAIM, AGAIN)] + [(4, other, ARRIVED, b"")]
            strange += [(1, led, step_of(kind, attempt), b"") for kind in (OPEN, AGAIN) for attempt in (0, 1 << 10)]
            strange += [(1, led, step_of(ASK, 1), b""), (1, led, HERE, one)]
            strange += [(1, led, LATE, one), (1, led, GONE, b"abc"), (1, led, GONE, b""), (1, led, GONE, one)]
            strange += [(rank, led, step_of(TEAM, 1), ranks) for rank in range(5) for ranks in (b"", one, two[:4])]
            strange += [(rank, led, step_of(RESULT, 1), b"1234") for rank in range(5)]
            for signal in strange:
                with pytest.raises(ProtocolError):
                    agent.received(*signal)
        await comm.barrier()

    assert AGENTS == 2
    on_hosts((0, 0, 1, 1, 1), main)


@pytest.mark.slow
def test_real_arenas_of_several_hosts():
    async def main(comm):
        last = 0
        while last < 30:
            x = np.ones(20_000)
            reduction = await comm.quorum_allreduce(x, quorum=4, sync_every=10)
            assert (x == x[0]).all()
            assert x[0] >= reduction.active >= 4
            last = reduction.round
        await comm.join("quorum", x)
        return True

    assert all(run_ranks(7, main, "shm", hosts=MIXED))


@pytest.mark.slow
def test_stopped_processes(forked_world, tmp_path):
    write_key(tmp_path / "key")
    hosts = {"RANKS_PER_HOST": "3", "ASYNCOLL_KEY_FILE": str(tmp_path / "key")}
    env = os.environ | {"ASYNCOLL_FREEZE_S": "20"} | hosts
    ranks = forked_world(env, 4, SCRIPTS / "world/on_own_hosts.py", SCRIPTS / "algorithms/rounds/stopped_agent.py")
    for rank, (code, out, err) in enumerate(rank.end() for rank in ranks):
        assert (code, out) == (0, "passed\n"), (rank, code, out, err)


def test_an_operation_for_which_the_caller_has_no_room_is_made_nowhere(monkeypatch):
    monkeypatch.setattr(operation_registry, "MAX_OPERATIONS", 3)

    async def main(comm):
        if comm.rank == 0:
            for name in "abc":
                await comm.solo_allreduce(np.ones(2), name=name)
            with pytest.raises(UsageError, match="at most 3 operations"):
                await comm.solo_allreduce(np.ones(2), name="d")
        await comm.barrier()
        await comm.solo_allreduce(np.ones(2), name="a")
        return set(comm.statistics().operations)

    assert on_hosts((0, 0, 1, 1), main).results == [set("abc")] * 4


@pytest.mark.parametrize("full", [0, 1])
def test_a_host_without_room_for_an_operation_of_another_host_ends_the_communicator(full, monkeypatch):
    enter = OperationRegistry.enter

    def refuse(self, context, fingerprint, cells):
        if self._arena.ranks[0] // 2 == full:
            raise UsageError("the memory is full")
        return enter(self, context, fingerprint, cells)

    monkeypatch.setattr(OperationRegistry, "enter", refuse)
    caller = 2 * (1 - full)

    async def main(comm):
        half = await comm.split(0)
        told = rf"host {full} cannot take part in .*'a'.* by rank {caller} .* memory is full"
        with pytest.raises(AbortedError, match=told):
            await (half.solo_allreduce(np.ones(2), name="a") if comm.rank == caller else half.barrier())
        await comm.barrier()

    on_hosts((0, 0, 1, 1), main)
