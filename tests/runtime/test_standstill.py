"""Ranks that wait for each other in different calls: an error where no call can come, and otherwise a warning."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncoll import DeadlineError, DeadlockError, ProtocolError, deadline
from asyncoll.runtime import standstill
from asyncoll.runtime.failures import Failures
from asyncoll.runtime.progress import SharedLoop
from asyncoll.runtime.standstill import Kind, Report, ToldCall, can_go_on
from asyncoll.testing import Network, simulate
from asyncoll.testing.laws import check_laws
from asyncoll.transport.wire import Still, Stillness
from tests.support.cases import looped
from tests.support.places import SCRIPTS
from tests.support.properties import given, st

SCRIPT = SCRIPTS / "runtime/calls_that_wait_for_each_other.py"
WORLD = 7  # a communicator
ALL, PAIR, ANY, ROUND = Kind


def receiving(source, dest):
    return ToldCall(WORLD, 0, PAIR, 2, f"{source} to {dest}")


def in_collective(number, size, communicator=WORLD):
    return ToldCall(communicator, number, ALL, size, f"call {number}")


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([Report([in_collective(1, 2)], {WORLD: 1}), Report([receiving(0, 1)], {WORLD: 0})], False),
        ([Report([in_collective(1, 2)], {WORLD: 1}), Report([receiving(0, 1)], {WORLD: 1})], True),
        ([Report([receiving(1, 0)], {}), Report([receiving(0, 1)], {})], False),
        ([Report([receiving(1, 0)], {}), Report([receiving(1, 0)], {})], True),
        ([Report([ToldCall(WORLD, 0, ANY, 2, "any")], {}), Report([receiving(1, 0)], {})], True),
        ([Report([ToldCall(WORLD, 0, ANY, 2, "any")], {}), Report([ToldCall(WORLD, 0, ANY, 2, "any")], {})], False),
        (
            [Report([ToldCall(WORLD, 0, ROUND, 2, "solo")], {}), Report([ToldCall(WORLD, 0, ROUND, 2, "solo")], {})],
            True,
        ),
        ([Report([ToldCall(WORLD, 0, ROUND, 2, "solo")], {}), Report([in_collective(3, 2)], {WORLD: 3})], False),
    ],
)
def test_which_calls_have_all_that_they_need(reports, expected):
    assert can_go_on(reports) is expected
    assert can_go_on(reports[::-1]) is expected


@given(st.lists(st.lists(st.integers(0, 3), max_size=5), min_size=1, max_size=5))
def test_ranks_in_one_order_of_collectives_always_go_on(calls):
    """However far each has come: the ranks that are least far have the call that they are in, at all of its ranks."""
    size = len(calls)
    reports = []
    for each in calls:
        made = len(each) + 1
        reports.append(Report([in_collective(number, size) for number in range(1, made + 1)], {WORLD: made}))
    assert can_go_on(reports)


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(standstill, "STILL_S", 0.06)
    monkeypatch.setattr(standstill, "_TICK_S", 0.02)


class Sleeping:
    """Whether any rank of a simulated world computes: in virtual time that is a sleep."""

    def __init__(self, monkeypatch):
        self.count = self.reports = 0
        sleep, report = asyncio.sleep, standstill.Standstill._still

        async def counted(delay, result=None):
            self.count += 1
            try:
                return await sleep(delay, result)
            finally:
                self.count -= 1

        def reported(rank, question):
            self.reports += 1
            return report(rank, question)

        monkeypatch.setattr(asyncio, "sleep", counted)
        monkeypatch.setattr(standstill.Standstill, "_still", reported)
        monkeypatch.setattr(SharedLoop, "is_stuck", lambda _: not self.count)


@pytest.mark.parametrize("transport", ["simulated", "memory", "hosts"])
@pytest.mark.parametrize("kind", ["solo", "majority", "quorum", "dense", "gossip", "sparse"])
def test_no_world_that_goes_on_is_told_that_it_cannot(kind, transport, monkeypatch, soon):
    """The worlds of the laws, where ranks stand still while others compute, or the network is slow."""
    sleeping = Sleeping(monkeypatch)
    for seed in range(12):
        check_laws(kind, (2, 3, 5, 8)[seed % 4], seed, transport=transport)
    assert sleeping.reports


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_rank_is_told_with_all_calls(size, memory, monkeypatch, soon):
    Sleeping(monkeypatch)
    told = []

    async def main(comm):
        try:
            await (comm.recv(np.empty(3), 1) if comm.rank == 0 else comm.barrier())
        except DeadlockError as error:
            told.append(str(error))
            raise

    with pytest.raises(DeadlockError):
        simulate(size, main, Network(latency_s=1e-3), shared_memory=memory)
    assert len(told) == size
    assert len(set(told)) == 1
    assert re.search(r"rank 0, in send/recv .*test_standstill.py:\d+ for \d", told[0])
    for rank in range(1, size):
        assert re.search(rf"rank {rank}, in barrier #1 at test_standstill.py:\d+ for \d", told[0])


def test_one_warning_where_a_timer_may_make_the_call(soon, caplog):
    async def main(comm):
        if comm.rank == 1:
            asyncio.get_running_loop().call_later(100.0, lambda: asyncio.ensure_future(comm.send(np.empty(3), 0)))
        if comm.rank == 0:
            await comm.recv(np.empty(3), 1)
        await comm.barrier()

    with caplog.at_level(logging.WARNING, "asyncoll"):
        simulate(3, main)
    assert [record.getMessage()[:36] for record in caplog.records] == ["all ranks wait in different calls. T"]


@pytest.mark.parametrize(("received", "asks"), [(3, False), (4, True)])
def test_a_message_that_no_rank_has_received_yet_is_waited_for(received, asks):
    """The question may come before it, by another connection."""
    asked = []
    router = SimpleNamespace(
        size=2, rank=1, tell=lambda rank, message: asked.append((rank, message)), sent_to=[0, 0], received_from=[0, 0]
    )
    membership: Any = SimpleNamespace(ended=set(), members=(0, 1))
    hearer = standstill.Standstill(router, Failures(router, membership), membership)
    hearer.received(0, Still(1, 0, 1, 3, 1, "7 0 2 2 1 to 0", "7 0", ""))
    hearer.received(1, Still(1, 0, 1, 1, received - 1, "7 1 1 2 barrier", "7 1", ""))
    assert asked == ([(0, Stillness(1, 1))] if asks else [])


def test_a_deadline_of_the_program_is_waited_for(soon, caplog):
    async def main(comm):
        with deadline(50.0):
            await (comm.recv(np.empty(3), 1) if comm.rank == 0 else comm.barrier())

    with pytest.raises(DeadlineError):
        simulate(3, main)
    assert not caplog.records


@pytest.mark.parametrize(
    ("waits", "begun"), [("1 2 1", ""), ("x 2 1 3 k", ""), ("1 2 9 3 k", ""), ("", "1"), ("", "1 x")]
)
def test_nonsense_of_a_peer_is_a_protocol_error(waits, begun):
    with pytest.raises(ProtocolError):
        standstill._report(0, Still(1, 0, 1, 0, 0, waits, begun, ""))


# -- processes --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@looped("mode", ["other_calls", "rounds", "parts", "leaving", "hooks"])
@pytest.mark.parametrize("settings", [{}, {"ASYNCOLL_TRANSPORT": "zmq"}, {"ASYNCOLL_CORE": "python"}])
def test_processes_that_can_not_go_on_raise_at_every_rank(forked_world, mode, settings):
    world = [each.end() for each in forked_world(os.environ | settings, 3, SCRIPT, mode)]
    for rank, (code, out, err) in enumerate(world):
        assert (code, err) == (0, ""), (rank, out, err)
        assert out.startswith("DeadlockError: all ranks wait in different calls"), (rank, out)
        assert len(re.findall(r"rank \d \(host .*?, pid \d+\), in .*? at \S+:\d+ for \d", out)) == 3, out
        groups = re.findall(r"on a communicator of the ranks (\d, \d)", out)
        assert groups == (["0, 1", "1, 2", "0, 2"] if mode == "parts" else []), out


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"ASYNCOLL_TRANSPORT": "zmq"}])
def test_processes_whose_lowest_rank_leaves_as_they_stand_still_raise(forked_world, settings):
    world = [each.end() for each in forked_world(os.environ | settings, 3, SCRIPT, "departed")]
    assert [(code, err) for code, _, err in world] == [(0, "")] * 3, world
    assert world[0][1] == "passed\n"
    for _, out, _ in world[1:]:
        assert out.startswith("DeadlockError: all ranks wait in different calls"), out
        assert re.findall(r"rank (\d) \(host .*?, pid \d+\), in .*? at \S+:\d+ for \d", out) == ["1", "2"], out


@pytest.mark.slow
@looped("mode, warnings", [("another_thread", 1), ("a_limit", 0), ("a_handler", 1), ("a_loop", 1), ("computing", 0)])
def test_processes_that_may_go_on_are_warned_at_most_once(forked_world, mode, warnings):
    world = [each.end() for each in forked_world(os.environ, 3, SCRIPT, mode)]
    assert [(code, out.splitlines()[-1], err) for code, out, err in world] == [(0, "passed", "")] * 3
    text = "all ranks wait in different calls. They wait for ever, unless"
    assert [out.count(text) for _, out, _ in world] == [warnings, 0, 0]
