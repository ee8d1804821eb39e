"""Failures: every failure reaches all ranks as an error that names its cause, and no rank hangs.

Most worlds here are simulated. There a wait that never ends is a DeadlockError, not a test that hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import logging
import os
import random
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
import zmq
from zmq.utils.monitor import parse_monitor_message

from asyncoll import (
    AVG,
    AVG_ACTIVE,
    MAX,
    SUM,
    AbortedError,
    AsyncollError,
    ClosedError,
    Communicator,
    DeadlockError,
    MismatchError,
    PeerLostError,
    ProtocolError,
    UsageError,
    deadline,
)
from asyncoll.algorithms.rounds.engine import Result
from asyncoll.algorithms.rounds.wait_avoiding import WaitAvoiding
from asyncoll.arguments import digest
from asyncoll.runtime.executions import Executions
from asyncoll.testing import Crash, Cut, Network, Pause, run_ranks, simulate
from asyncoll.transport import MAX_FRAME_BYTES, wire
from asyncoll.transport.messages import zeromq
from asyncoll.transport.messages.simulated import SimulatedWorld
from asyncoll.transport.wire import SEGMENT_BYTES
from tests.support.cases import looped
from tests.support.processes import PATIENCE_S
from tests.support.ranks import failures as failures_in

Act = Callable[[Communicator], Coroutine[Any, Any, Any]]
JITTERY = Network(latency_s=10e-6, jitter_s=50e-6)


def run_zmq(size: int, main: Act) -> None:
    run_ranks(size, main, transport="zmq")


def run_shm(size: int, main: Act) -> None:
    run_ranks(size, main, transport="shm")


def run_simulated(size: int, main: Act) -> None:
    simulate(size, main, JITTERY)


def run_in_memory(size: int, main: Act) -> None:
    simulate(size, main, JITTERY, shared_memory=True)


anyhow = pytest.mark.parametrize("run", [run_simulated, run_in_memory], ids=["messages", "memory"])


async def for_ever(call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    while True:
        await call()


def failures(
    size: int, act: Act, run: Callable[[int, Act], object] = run_simulated, survivors: int = 0
) -> dict[int, Exception]:
    return failures_in(size, act, run, survivors)


# -- mismatched calls ----------------------------------------------------------------------------


async def skip_one(comm: Communicator) -> None:
    if comm.rank:
        await comm.allreduce(np.ones(3))
    await comm.barrier()


async def other_order(comm: Communicator) -> None:
    calls = [lambda: comm.allreduce(np.ones(3)), lambda: comm.allgather(np.ones(3))]
    for call in calls if comm.rank else reversed(calls):
        await call()


def differ(zero: Callable[[Communicator], Any], others: Callable[[Communicator], Any]) -> Act:
    async def act(comm: Communicator) -> None:
        await (zero if comm.rank == 0 else others)(comm)
        await comm.barrier()  # some ranks may complete the call before any rank can notice the mismatch

    return act


MISMATCHES: dict[str, tuple[Act, str, str]] = {
    "operation": (
        differ(lambda c: c.allgather(np.ones(3)), lambda c: c.allreduce(np.ones(3))),
        "allgather #1 of 3 float64",
        "allreduce #1 of 3 float64, SUM",
    ),
    "order": (other_order, "allgather #1", "allreduce #1"),
    "skipped call": (skip_one, "barrier #1", "allreduce #1"),
    "dtype": (
        differ(lambda c: c.allreduce(np.ones(3, "f4")), lambda c: c.allreduce(np.ones(3, "f8"))),
        "of 3 float32",
        "of 3 float64",
    ),
    "count": (
        differ(lambda c: c.allreduce(np.ones(3)), lambda c: c.allreduce(np.ones(4))),
        "of 3 float64",
        "of 4 float64",
    ),
    "long count": (
        differ(lambda c: c.allreduce(np.ones(3)), lambda c: c.allreduce(np.ones(1 << 19))),
        "of 3 float64",
        "of 524288 float64",
    ),
    "reduction": (
        differ(lambda c: c.allreduce(np.ones(3), MAX), lambda c: c.allreduce(np.ones(3), SUM)),
        "float64, MAX",
        "float64, SUM",
    ),
    "root": (
        differ(lambda c: c.broadcast(np.ones(3), 1), lambda c: c.broadcast(np.ones(3), 2)),
        "root 1",
        "root 2",
    ),
    "each waits for the other": (
        differ(lambda c: c.broadcast(np.ones(3), 1), lambda c: c.broadcast(np.ones(3), 0)),
        "root 1",
        "root 0",
    ),
    "each waits to send to the other": (
        differ(lambda c: c.gather(np.ones(1 << 18), 1), lambda c: c.gather(np.ones(1 << 18), 0)),
        "root 1",
        "root 0",
    ),
}


@anyhow
@looped("size", [3, 4, 7])
@pytest.mark.parametrize("kind", MISMATCHES)
def test_a_mismatch_reaches_all_ranks_and_names_both_calls(kind, size, run):
    act, zero, others = MISMATCHES[kind]
    raised = failures(size, act, run)
    assert sorted(raised) == list(range(size))
    for error in raised.values():
        assert type(error) is MismatchError
        text = str(error)
        assert zero in text
        assert others in text
        assert text.count("test_failures.py:") == 2
        assert "rank 0 called" in text


@anyhow
@pytest.mark.parametrize("kind", MISMATCHES)
@looped("late", range(3))
def test_a_late_rank_raises_the_same_mismatch(kind, late, run):
    """Early messages of its peers belong to another call. It must not use them, whatever their size."""

    async def act(comm: Communicator) -> None:
        await asyncio.sleep(comm.rank == late)
        await MISMATCHES[kind][0](comm)

    raised = failures(3, act, run)
    assert {type(error) for error in raised.values()} == {MismatchError}


@pytest.mark.parametrize("run", [run_zmq, run_shm], ids=["zmq", "shm"])
@pytest.mark.parametrize("kind", MISMATCHES)
def test_a_mismatch_over_sockets(kind, run):
    raised = failures(3, MISMATCHES[kind][0], run)
    assert sorted(raised) == [0, 1, 2]
    assert {type(error) for error in raised.values()} == {MismatchError}


async def send_around(comm: Communicator) -> None:
    await asyncio.gather(
        comm.send(np.ones(3), (comm.rank + 1) % comm.size), comm.recv(np.ones(3), (comm.rank - 1) % comm.size)
    )


OF_AN_EPOCH: dict[str, Act] = {
    "allreduce": lambda comm: comm.allreduce(np.ones(3)),
    "barrier": lambda comm: comm.barrier(),
    "send/recv": send_around,
    "solo allreduce": lambda comm: comm.solo_allreduce(np.ones(3), sync_every=1),
    "group allreduce": lambda comm: comm.group_allreduce(np.ones(3), group_size=comm.size, sync_every=1),
}


@pytest.mark.parametrize("run", [run_in_memory, run_shm])  # by message, what is of another epoch never meets it
@pytest.mark.parametrize("kind", OF_AN_EPOCH)
def test_a_call_of_another_epoch_is_a_mismatch_that_names_it(kind, run):
    async def act(comm: Communicator) -> None:
        group = dataclasses.replace(comm._core.member.group, communicator=7, epoch=1 + int(comm.rank == 1))
        of_epoch = Communicator(comm._core.split(group), comm.hosts)
        await OF_AN_EPOCH[kind](of_epoch)
        await of_epoch.barrier()

    raised = failures(3, act, run)
    assert {type(error) for error in raised.values()} == {MismatchError}
    text = str(raised[0])
    assert kind in text
    assert "epoch 2" in text.replace("=", " ")


@anyhow
def test_a_mismatch_names_the_lines_of_the_calls(run):
    async def act(comm: Communicator) -> None:
        if comm.rank == 0:
            await comm.reduce(np.ones(2), 0)  # one side
        else:
            await comm.reduce(np.ones(2), 1)  # the other

    first = act.__code__.co_firstlineno
    for error in failures(3, act, run).values():
        assert f"root 0 at test_failures.py:{first + 2}" in str(error)
        assert f"root 1 at test_failures.py:{first + 4}" in str(error)


def test_an_exception_while_a_message_is_handled_ends_the_world(monkeypatch):
    """It would end the transport's reader otherwise, and all ranks would wait."""
    arrived = Executions.arrived

    def fail(self: Executions, source: int, *rest: Any) -> None:
        if source == 2:
            raise MemoryError("a defect")
        arrived(self, source, *rest)

    async def act(comm: Communicator) -> None:
        await comm.barrier()
        if comm.rank == 0:
            monkeypatch.setattr(Executions, "arrived", fail)
        await comm.barrier()

    for error in failures(3, act).values():
        assert type(error) is AbortedError
        assert "could not handle a message of rank 2: MemoryError: a defect" in str(error)


@looped("size", [2, 3, 6])
def test_point_to_point_mismatch_reaches_both_ends(size):
    async def act(comm: Communicator) -> None:
        if comm.rank == 0:
            await comm.send(np.ones(3), 1)
        elif comm.rank == 1:
            await comm.recv(np.ones(4), 0)
        await comm.barrier()

    for error in failures(size, act).values():
        assert type(error) is MismatchError
        assert "of 3 float64" in str(error)
        assert "of 4 float64" in str(error)


SOLO = {"x": np.ones(3), "name": "g"}
OPTIONS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "sync_every": ("solo", {"sync_every": 2}, "solo", {"sync_every": 3}),
    "seed": ("majority", {"seed": 1}, "majority", {"seed": 2}),
    "quorum": ("quorum", {"quorum": 1}, "quorum", {"quorum": 2}),
    "opening": ("solo", {}, "majority", {}),
    "reduction": ("solo", {"op": MAX}, "solo", {}),
    "count": ("solo", {"x": np.ones(2)}, "solo", {}),
    "dtype": ("solo", {"x": np.ones(3, "f4")}, "solo", {}),
}


@anyhow
@looped("size", [2, 5])
@pytest.mark.parametrize("what", OPTIONS)
def test_mismatched_wait_avoiding_options_reach_all_ranks(what, size, run):
    ours, our_options, theirs, their_options = OPTIONS[what]

    async def act(comm: Communicator) -> None:
        opening, options = (ours, our_options) if comm.rank == 0 else (theirs, their_options)
        while True:  # a rank may complete rounds before it learns of the mismatch
            given = {**SOLO, **options}
            await getattr(comm, f"{opening}_allreduce")(given.pop("x").copy(), **given)

    raised = failures(size, act, run)
    assert sorted(raised) == list(range(size))
    for error in raised.values():
        assert type(error) is MismatchError
        assert str(error).count("test_failures.py:") == 2
        assert str(error).count("allreduce 'g'") == 2


# -- use after the end ---------------------------------------------------------------------------

CALLS: dict[str, Callable[[Communicator], Any]] = {
    "allreduce": lambda c: c.allreduce(np.ones(2)),
    "broadcast": lambda c: c.broadcast(np.ones(2)),
    "reduce": lambda c: c.reduce(np.ones(2)),
    "reduce_scatter": lambda c: c.reduce_scatter(np.ones(c.size)),
    "allgather": lambda c: c.allgather(np.ones(2)),
    "allgatherv": lambda c: c.allgatherv(np.ones(c.rank)),
    "gather": lambda c: c.gather(np.ones(2)),
    "scatter": lambda c: c.scatter([np.ones(2)] * c.size),
    "alltoall": lambda c: c.alltoall(np.ones(c.size)),
    "alltoallv": lambda c: c.alltoallv([np.ones(2)] * c.size),
    "barrier": lambda c: c.barrier(),
    "send and recv": lambda c: c.send(np.ones(2), 1) if c.rank == 0 else c.recv(np.ones(2), 0),
    "solo": lambda c: c.solo_allreduce(np.ones(2)),
    "majority": lambda c: c.majority_allreduce(np.ones(2)),
    "quorum": lambda c: c.quorum_allreduce(np.ones(2), quorum=1),
    "split": lambda c: c.split(0),
}


@looped("call", CALLS)
def test_use_after_close(call):
    async def main(comm: Communicator) -> Communicator:
        return comm

    for comm in run_ranks(2, main):

        async def late(comm: Communicator = comm) -> None:
            await CALLS[call](comm)

        with pytest.raises(ClosedError):
            asyncio.run(late())
        comm.abort("too late")  # sends nothing
        assert comm.statistics().rank == comm.rank


@looped("call", [*CALLS, "sparse"])
def test_a_call_without_a_loop_is_refused_before_it_is_numbered(call, run):
    """A call that is numbered and then fails makes the other ranks wait for it at the end of the world."""
    without_a_loop = CALLS | {"sparse": lambda c: c.sparse_allreduce(np.ones(2), density=1)}
    refused = []

    async def main(comm: Communicator) -> None:
        def make() -> None:
            with pytest.raises(UsageError, match="needs a running event loop"):
                without_a_loop[call](comm)
            refused.append(comm.rank)

        if comm.rank == 0:
            thread = threading.Thread(target=make)
            thread.start()
            thread.join()
        assert (await comm.allreduce(np.ones(1)))[0] == 2
        assert (await comm.solo_allreduce(np.ones(1), sync_every=1)).active == 2

    run(2, main)
    assert refused == [0]


@anyhow
@looped("call", CALLS)
def test_abort_ends_every_call_everywhere(call, run):
    async def act(comm: Communicator) -> None:
        if comm.rank == 2:
            comm.abort("enough")
            comm.abort("more than enough")
        while True:
            await CALLS[call](comm)
            await comm.barrier()

    raised = failures(3, act, run)
    assert sorted(raised) == [0, 1, 2]
    for error in raised.values():
        assert type(error) is AbortedError
        assert (error.rank, error.reason) == (2, "enough")


def test_abort_of_a_split_communicator_ends_only_that():
    async def main(comm: Communicator) -> None:
        part = await comm.split(comm.rank % 2)
        assert part is not None
        if comm.rank == 2:
            part.abort("the even ones give up")
        if comm.rank % 2 == 0:
            with pytest.raises(AbortedError, match="rank 2 aborted: the even ones give up"):
                await asyncio.gather(*(part.barrier() for _ in range(9)))
            with pytest.raises(AbortedError):
                await part.solo_allreduce(np.ones(1))
        else:
            assert (await part.allreduce(np.ones(1)))[0] == part.size
        assert (await comm.allreduce(np.ones(1)))[0] == comm.size

    simulate(5, main, JITTERY)


@pytest.mark.parametrize("run", [run_ranks, run_zmq, run_simulated], ids=["inproc", "zmq", "simulated"])
def test_the_error_of_a_rank_is_raised_unchanged(run):
    class OwnError(Exception):
        pass

    original = OwnError("rank 1 is unwell")

    async def main(comm: Communicator) -> None:
        await comm.barrier()
        if comm.rank == 1:
            raise original
        await comm.barrier()

    with pytest.raises(OwnError) as caught:
        run(3, main)
    assert caught.value is original


def test_survivors_raise_the_cause_before_they_are_stopped():
    """In virtual time, because a busy machine gives the survivors little time."""
    told = []

    async def main(comm: Communicator) -> None:
        await comm.barrier()
        if comm.rank == 1:
            await asyncio.sleep(0)
            raise KeyError("lost it")
        try:
            await comm.barrier()
        except AbortedError as error:
            told.append((comm.rank, error.rank, error.reason))
            raise

    with pytest.raises(KeyError, match="lost it"):
        simulate(3, main)
    assert sorted(told) == [(0, 1, "KeyError: 'lost it'"), (2, 1, "KeyError: 'lost it'")]


@anyhow
def test_a_rank_that_leaves_after_a_failure_tells_its_error_where_that_is_not_known(run):
    async def main(comm):
        part = await comm.split(0)
        if comm.rank < 2:
            with contextlib.suppress(MismatchError):
                await comm.allreduce(np.ones(1 + comm.rank))
        else:
            with pytest.raises(PeerLostError, match=r"it has left: after MismatchError: .*float64"):
                await part.barrier()

    run(3, main)


# -- faults of a simulated world -----------------------------------------------------------------


@looped("in_memory", [False, True])
@looped("size", [2, 3, 5])
@pytest.mark.parametrize("call", CALLS)
def test_every_survivor_raises_after_a_crash(call, size, in_memory):
    async def act(comm: Communicator) -> None:
        while True:
            await CALLS[call](comm)
            await comm.barrier()

    def run(size: int, main: Act) -> None:
        simulate(size, main, Network(jitter_s=5e-5, faults=[Crash(rank=1, at_s=1e-3)]), shared_memory=in_memory)

    raised = failures(size, act, run, survivors=size - 1)
    assert sorted(raised) == [rank for rank in range(size) if rank != 1]
    for error in raised.values():
        assert type(error) is PeerLostError
        assert (error.rank, error.cause) == (1, "it crashed")


def test_a_rank_that_has_caught_a_failure_may_leave():
    """No rank needs it any more. The crashed rank has no result; the others have theirs."""

    async def main(comm: Communicator) -> str:
        with pytest.raises(PeerLostError):
            await for_ever(comm.barrier)
        return "saved what there was"

    report = simulate(3, main, Network(faults=[Crash(rank=1, at_s=1e-3)]))
    assert report.results == ["saved what there was", None, "saved what there was"]


def test_a_permanent_cut_is_a_deadlock_whose_report_lists_the_waits():
    async def main(comm: Communicator) -> None:
        await asyncio.sleep(1)
        if comm.rank == 0:
            await comm.send(np.ones(1), 1, tag=7)
        elif comm.rank == 1:
            await comm.recv(np.ones(1), 0, tag=7)

    with pytest.raises(DeadlockError) as caught:
        simulate(2, main, Network(faults=[Cut(0, 1, at_s=0.5)]))
    text = str(caught.value)
    assert "rank 1: send/recv #1 of 1 float64, from rank 0 to rank 1, tag 7 at test_failures.py:" in text
    assert "step 0 from rank 0" in text
    assert "rank 0: the end of its program #1" in text


def test_the_report_of_a_deadlock_lists_long_sends_and_rounds():
    async def main(comm: Communicator) -> None:
        if comm.rank == 0:
            await comm.send(np.ones(1 << 18), 1)
        elif comm.rank == 1:
            await comm.quorum_allreduce(np.ones(1), quorum=3, name="grads")

    with pytest.raises(DeadlockError) as caught:
        simulate(3, main)
    text = str(caught.value)
    assert "rank 0: send/recv #1 of 262144 float64" in text
    assert "rank 1 has not posted its receive" in text
    assert "rank 1: quorum allreduce 'grads'" in text
    assert "round 1" in text


@pytest.mark.parametrize("fault", [Pause(1, 0.0, 2.0), Cut(0, 1, 0.0, 2.0)], ids=["pause", "cut"])
def test_a_pause_or_a_temporary_cut_only_delays(fault):
    async def main(comm: Communicator) -> list[float]:
        sums = [(await comm.allreduce(np.full(2, comm.rank + 1.0)))[0] for _ in range(5)]
        return [*sums, (await comm.solo_allreduce(np.ones(1), sync_every=1)).active]

    plain = simulate(3, main)
    delayed = simulate(3, main, Network(faults=[fault]))
    assert delayed.results == plain.results == [[6.0] * 5 + [3]] * 3
    assert plain.virtual_s < 2 <= delayed.virtual_s


# -- cancellation --------------------------------------------------------------------------------

SYNCHRONOUS = [call for call in CALLS if call not in ("solo", "majority", "quorum", "send and recv")]


@anyhow
@looped("how", ["wait_for", "cancel"])
@pytest.mark.parametrize("call", SYNCHRONOUS)
def test_cancelling_a_collective_aborts_it_at_all_ranks(call, how, run):
    outcomes = set()
    who = 0 if call in ("reduce", "gather") else 1  # a rank that waits for other ranks

    for seed in range(12):
        patience_s = random.Random(seed).uniform(0, 50e-6)

        async def cancelled(comm: Communicator, patience_s: float = patience_s) -> None:
            if how == "wait_for":
                await asyncio.wait_for(CALLS[call](comm), patience_s)
                return
            task = asyncio.create_task(CALLS[call](comm))
            await asyncio.sleep(patience_s)
            task.cancel()
            await task

        async def act(comm: Communicator) -> None:
            if comm.rank == who:
                try:
                    await cancelled(comm)
                except (TimeoutError, asyncio.CancelledError):
                    outcomes.add("cancelled")
                else:
                    outcomes.add("in time")
                    comm.abort(f"{call} came in time")
            else:
                await asyncio.sleep(25e-6)
            while True:
                await CALLS[call](comm)
                await comm.barrier()  # a root that waits for no rank completes at once

        raised = failures(3, act, run)
        assert sorted(raised) == [0, 1, 2]
        for error in raised.values():
            assert type(error) is AbortedError
            assert error.rank == who
            assert call in error.reason
    assert "cancelled" in outcomes


def test_a_cancelled_call_no_longer_uses_the_callers_memory():
    async def act(comm: Communicator) -> None:
        x = np.ones(1 << 17)
        if comm.rank == 1:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(comm.allreduce(x), 1e-5)
            x[:] = 7
        else:
            await asyncio.sleep(1e-5)
            await comm.allreduce(x)
        with pytest.raises(AbortedError):
            await comm.barrier()
        assert set(x) == {7.0}
        await comm.barrier()

    simulated = failures(3, act)
    assert type(simulated[1]) is AbortedError


def wait_avoiding(comm: Communicator, opening: str, x: np.ndarray) -> Coroutine[Any, Any, Any]:
    options = {"quorum": 2} if opening == "quorum" else {}
    return getattr(comm, f"{opening}_allreduce")(x, name="g", **options)


SHORT, LONG = 1, 1 << 17  # elements: one rank sums the short ones, and long ones are lent and reduced in place


@looped(("count", "seed"), [*((SHORT, seed) for seed in range(8)), *((LONG, seed) for seed in range(2))])
@pytest.mark.parametrize("opening", ["solo", "majority", "quorum"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_cancelled_contributions_count_exactly_once(size, opening, count, seed, monkeypatch):
    """Each contribution is another power of two, so a sum shows which are in it, and how often."""
    calls = 60 // size
    rounds: dict[int, set[int]] = {}
    publish = WaitAvoiding._publish

    def observe(self: WaitAvoiding, result: Result) -> None:
        rounds.setdefault(result.number, set()).update(np.unique(result.parts[0]).tolist())
        publish(self, result)

    monkeypatch.setattr(WaitAvoiding, "_publish", observe)
    cancelled = []

    async def main(comm: Communicator) -> None:
        draw = random.Random(f"{seed} {comm.rank}")
        for call in range(calls):
            x = np.full(count, 1 << (comm.rank * calls + call))
            patience_s = draw.choice([1.0, draw.uniform(0, 200e-6)])
            try:
                await asyncio.wait_for(wait_avoiding(comm, opening, x), patience_s)
            except TimeoutError:
                cancelled.append((comm.rank, call))
            x[:] = -1  # the memory is the caller's again
            await asyncio.sleep(draw.uniform(0, 100e-6))
        await comm.barrier()  # all contributions are staged: the round after the next includes all of them
        newest = np.array([comm.statistics().operations["g"].rounds])
        last = int((await comm.allreduce(newest, MAX))[0]) + 2
        while (await wait_avoiding(comm, opening, np.zeros(count, np.int64))).round < last:
            pass
        await comm.barrier()
        operation = comm._core.backend.operations.known["g"]
        assert operation._staged is None or not operation._staged[0].any()
        assert not operation._waiting

    simulate(size, main, JITTERY, seed)
    assert cancelled
    assert {len(values) for values in rounds.values()} == {1}, "ranks disagree"
    assert sum(value for values in rounds.values() for value in values) == (1 << (size * calls)) - 1


# -- bad inputs ----------------------------------------------------------------------------------

ones = np.ones(4)
masked = np.ma.array(np.ones(4), mask=[0, 1, 0, 0])
frozen = np.ones(4)
frozen.flags.writeable = False
BAD: dict[str, tuple[Callable[[Communicator], Any], str]] = {
    "a list": (lambda c: c.allreduce([1, 2]), "numpy|torch"),
    "None": (lambda c: c.allreduce(None), "numpy|torch"),
    "objects": (lambda c: c.allgather(np.array([object()])), "dtype"),
    "texts": (lambda c: c.broadcast(np.array(["a"])), "dtype"),
    "read-only": (lambda c: c.allreduce(frozen), "read-only|writ"),
    "read-only into recv": (lambda c: c.recv(frozen, (c.rank + 1) % 3), "read-only|writ"),
    "sparse": (lambda c: c.allreduce(torch.ones(2).to_sparse()), "dense"),
    "on no device": (lambda c: c.allreduce(torch.ones(2, device="meta")), "meta|cpu|CPU"),
    "expanded": (lambda c: c.allreduce(torch.ones(1).expand(3)), "clone|overlap|expand|contiguous"),
    "reduction by name": (lambda c: c.allreduce(ones, "sum"), "unknown reduction"),
    "average of whole numbers": (lambda c: c.allreduce(np.ones(2, int), AVG), "use SUM"),
    "reduce: reduction": (lambda c: c.reduce(ones, 0, None), "unknown reduction"),
    "reduce_scatter: reduction": (lambda c: c.reduce_scatter(ones, 3), "unknown reduction"),
    "solo: reduction": (lambda c: c.solo_allreduce(ones, op="max"), "unknown reduction"),
    "broadcast: root": (lambda c: c.broadcast(ones, 3), "ranks 0 to 2"),
    "broadcast: negative root": (lambda c: c.broadcast(ones, -1), "ranks 0 to 2"),
    "broadcast: root None": (lambda c: c.broadcast(ones, None), "root"),
    "broadcast: root 1.5": (lambda c: c.broadcast(ones, 1.5), "root"),
    "broadcast: root by name": (lambda c: c.broadcast(ones, "0"), "root"),
    "reduce: root": (lambda c: c.reduce(ones, 3), "ranks 0 to 2"),
    "gather: root": (lambda c: c.gather(ones, 3), "ranks 0 to 2"),
    "scatter: root": (lambda c: c.scatter([ones] * 3, 3), "ranks 0 to 2"),
    "reduce_scatter: 0-d": (lambda c: c.reduce_scatter(np.array(1.0)), "reshape"),
    "alltoall: 0-d": (lambda c: c.alltoall(np.array(1.0)), "reshape"),
    "alltoall: rows": (lambda c: c.alltoall(np.ones(4)), "alltoallv"),
    "alltoallv: too few": (lambda c: c.alltoallv([ones]), "each of the 3 ranks, got 1"),
    "alltoallv: None": (lambda c: c.alltoallv(None), "each of the 3 ranks, got None"),
    "alltoallv: a number": (lambda c: c.alltoallv(3), "each of the 3 ranks"),
    "alltoallv: dtypes": (lambda c: c.alltoallv([ones, ones, ones.astype("f4")]), "one dtype"),
    "alltoallv: a list inside": (lambda c: c.alltoallv([ones, ones, [1]]), "numpy|torch"),
    "send: dest": (lambda c: c.send(ones, 3), "ranks 0 to 2"),
    "send: dest None": (lambda c: c.send(ones, None), "dest"),
    "send: to itself": (lambda c: c.send(ones, c.rank), "itself"),
    "recv: source": (lambda c: c.recv(ones, -1), "ranks 0 to 2"),
    "recv: from itself": (lambda c: c.recv(ones, c.rank), "itself"),
    "send: tag": (lambda c: c.send(ones, (c.rank + 1) % 3, tag="a"), "tag"),
    "split: color": (lambda c: c.split("red"), "color"),
    "split: color too large": (lambda c: c.split(1 << 70), "color"),
    "split: key": (lambda c: c.split(0, key="first"), "key"),
    "solo: sync_every": (lambda c: c.solo_allreduce(ones, sync_every=-1), "sync_every"),
    "solo: sync_every None": (lambda c: c.solo_allreduce(ones, sync_every=None), "sync_every"),
    "solo: sync_every 1.5": (lambda c: c.solo_allreduce(ones, sync_every=1.5), "sync_every"),
    "solo: name": (lambda c: c.solo_allreduce(ones, name=3), "name"),
    "solo: a novel as name": (lambda c: c.solo_allreduce(ones, name="x" * 10_000), "name"),
    "solo: a list": (lambda c: c.solo_allreduce([1.0]), "numpy|torch"),
    "majority: seed": (lambda c: c.majority_allreduce(ones, seed="x"), "seed"),
    "majority: seed too large": (lambda c: c.majority_allreduce(ones, seed=1 << 70), "seed"),
    "quorum: 0": (lambda c: c.quorum_allreduce(ones, quorum=0), "between 1 and"),
    "quorum: 4": (lambda c: c.quorum_allreduce(ones, quorum=4), "between 1 and"),
    "candidates: 0": (lambda c: c.majority_allreduce(ones, candidates=0), "between 1 and"),
    "candidates: 4": (lambda c: c.majority_allreduce(ones, candidates=4), "between 1 and"),
    "group_size: 0": (lambda c: c.group_allreduce(ones, group_size=0), "between 1 and"),
    "group_size: 4": (lambda c: c.group_allreduce(ones, group_size=4), "between 1 and"),
    "group_size: 2.0": (lambda c: c.group_allreduce(ones, group_size=2.0), "whole number"),
    "a masked array": (lambda c: c.allreduce(masked), "pass x.filled"),
    "gather: a masked array": (lambda c: c.gather(masked), "pass x.filled"),
    "alltoallv: a masked array": (lambda c: c.alltoallv([ones, ones, masked]), "pass x.filled"),
    "send: a masked array": (lambda c: c.send(masked, 1), "pass x.filled"),
    "recv: a masked array": (lambda c: c.recv(masked, 1), "pass x.filled"),
    "solo: a masked array": (lambda c: c.solo_allreduce(masked), "pass x.filled"),
    "a masked bucket": (lambda c: c.solo_allreduce([ones, masked]), "pass x.filled"),
    "sparse: a masked array": (lambda c: c.sparse_allreduce(masked, density=1), "pass x.filled"),
    "a tensor without memory": (lambda c: c.allreduce(torch._efficientzerotensor(3)), "without plain memory"),
    "no buckets": (lambda c: c.solo_allreduce([]), "at least one"),
    "a bucket of objects": (lambda c: c.solo_allreduce([ones, "x"]), "numpy|torch"),
    "average of whole buckets": (lambda c: c.solo_allreduce([ones, np.ones(2, int)], op=AVG), "use SUM"),
    "AVG_ACTIVE of integers": (lambda c: c.solo_allreduce(np.ones(2, int), op=AVG_ACTIVE), "use SUM"),
    "allreduce: AVG_ACTIVE": (lambda c: c.allreduce(ones, AVG_ACTIVE), "use AVG"),
    "reduce: AVG_ACTIVE": (lambda c: c.reduce(ones, 0, AVG_ACTIVE), "use AVG"),
    "reduce_scatter: AVG_ACTIVE": (lambda c: c.reduce_scatter(ones, AVG_ACTIVE), "use AVG"),
    "quorum: 1.5": (lambda c: c.quorum_allreduce(ones, quorum=1.5), "quorum"),
}


@looped("what", BAD)
def test_bad_input_is_refused_with_advice_and_takes_no_number(what):
    call, advice = BAD[what]

    async def main(comm: Communicator) -> None:
        if comm.rank != 1:
            with pytest.raises(UsageError, match=advice):
                await call(comm)
        await comm.barrier()
        assert (await comm.allreduce(np.ones(1)))[0] == 3
        assert (await comm.solo_allreduce(np.ones(1), sync_every=1)).active == 3

    simulate(3, main)


def test_scatter_needs_parts_at_the_root_only():
    async def main(comm: Communicator) -> None:
        for parts in (None, [np.ones(1)]):
            if comm.rank == 0:
                with pytest.raises(UsageError, match="each of the 3 ranks"):
                    await comm.scatter(parts)
        assert (await comm.scatter([np.ones(1)] * 3 if comm.rank == 0 else None))[0] == 1

    simulate(3, main)


def test_an_abort_with_an_empty_or_unusual_reason_reaches_all_ranks():
    for reason in ["", "caf\udce9", "x" * 100_000, ValueError("an object")]:

        async def act(comm: Communicator, reason: Any = reason) -> None:
            if comm.rank == 0:
                comm.abort(reason)
            await comm.barrier()

        raised = failures(3, act)
        assert {type(error) for error in raised.values()} == {AbortedError}


def test_numpy_integers_are_accepted():
    """A NumPy integer identifies the same execution as an int of the same value."""

    async def main(comm: Communicator) -> None:
        number = np.int64 if comm.rank == 0 else int
        x = np.array([float(comm.rank)])
        if comm.rank == 0:
            await comm.send(x, np.int64(1), tag=np.int64(3))
        elif comm.rank == 1:
            await comm.recv(x, np.int32(0), tag=3)
        await comm.broadcast(x, number(2))
        part = await comm.split(number(5), key=number(0))
        assert part is not None
        assert (await part.allreduce(np.ones(1)))[0] == comm.size
        assert (await comm.quorum_allreduce(x, quorum=number(3), seed=number(4), sync_every=number(2))).active == 3

    simulate(3, main)


# -- invalid bytes -------------------------------------------------------------------------------


def routers_address(comm: Communicator, rank: int) -> str:
    return comm._core.member.endpoint.transport.peers[rank]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0)


async def visit(address: str, frames: list[bytes], done: Callable[[zmq.Socket], bool], identity: bytes = b"") -> None:
    """Send `frames` from a socket outside of the world, and stay connected until `done`."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        if identity:
            dealer.routing_id = identity
        monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            dealer.connect(address)
            dealer.send_multipart(frames)
            await until(lambda: done(monitor))
        finally:
            dealer.disable_monitor()
            monitor.close()


def happened(event: int, monitor: zmq.Socket) -> bool:
    return monitor.poll(0) > 0 and parse_monitor_message(monitor.recv_multipart())["event"] == event


STRANGE = {
    "garbage": [b"\xff" * 100],
    "nothing": [b""],
    "a valid message": [wire.encode(wire.GRANT, 1, 1, 2, 3)],
    "an abort": wire.encode_control(wire.Abort(0, 1, "for fun"), 1),
    "many frames": [b""] * 1000,
}


@pytest.mark.slow
@pytest.mark.parametrize("identity", [b"", b"asyncoll", b"asyncoll" + bytes(8)], ids=["none", "short", "wrong"])
@pytest.mark.parametrize("what", STRANGE)
def test_unauthenticated_are_dropped_and_logged(what, identity, caplog):
    caplog.set_level(logging.WARNING, "asyncoll")

    async def main(comm: Communicator) -> None:
        if comm.rank == 0:
            frames = STRANGE[what]
            await visit(routers_address(comm, 1), frames, lambda _: "unauthenticated peer" in caplog.text, identity)
            assert f"rank 1 dropped a message from an unauthenticated peer ({len(frames)} frames)" in caplog.text
        assert (await comm.allreduce(np.ones(3)))[0] == comm.size

    run_zmq(3, main)


@pytest.mark.slow
def test_an_unauthenticated_oversized_frame_ends_only_its_connection():
    async def main(comm: Communicator) -> None:
        if comm.rank == 0:
            ended = partial(happened, zmq.EVENT_DISCONNECTED)
            await visit(routers_address(comm, 1), [b"", bytes(MAX_FRAME_BYTES + 1)], ended)
        assert (await comm.allreduce(np.ones(3)))[0] == comm.size

    run_zmq(3, main)


@pytest.mark.slow
def test_a_second_connection_cannot_send_as_a_connected_rank():
    """ZeroMQ keeps the first connection of a routing id, and drops messages of a second."""

    async def main(comm: Communicator) -> None:
        if comm.rank == 0:
            identity = comm._core.member.endpoint.transport._routing_ids[2]
            frames = wire.encode_control(wire.Abort(0, 2, "I am not rank 2"), 1)
            barriers: list[asyncio.Future[Any]] = []  # once the frame has arrived

            def over(monitor: zmq.Socket) -> bool:
                if not barriers and happened(zmq.EVENT_HANDSHAKE_SUCCEEDED, monitor):
                    barriers.append(asyncio.gather(*(comm.barrier() for _ in range(20))))
                return bool(barriers) and barriers[0].done()

            await visit(routers_address(comm, 1), frames, over, identity)
            await barriers[0]
        else:
            for _ in range(20):
                await comm.barrier()
        assert (await comm.allreduce(np.ones(3)))[0] == comm.size

    run_zmq(3, main)


def announced(**fields: Any) -> list[bytes]:
    """A well-formed announcement with impossible values in `fields`."""
    plain = {"name": "g", "layout": "float32:1", "op": "SUM", "opening": "SOLO", "quorum": 1, "candidates": 1}
    values = {field: kind() for field, kind in get_type_hints(wire.Announce).items()}
    communicator = digest("epoch", 1, 0, 1, 2)
    return wire.encode_control(wire.Announce(**values | {"communicator": communicator} | plain | fields), 1)


GARBAGE = {
    "garbage": [b"\xff" * 100],
    "nothing": [b""],
    "truncated": [wire.encode(wire.GRANT, 1)[:-1]],
    "too many frames": [wire.encode(wire.GRANT, 1), b""],
    "too few frames": [wire.encode(wire.DATA, 1)],
    "no msgpack": [wire.encode(wire.CONTROL, 1), b"\xc1"],
    "wrong field": [wire.encode(wire.CONTROL, 1), b"\x94\xa5Abort\x01\x02\x03"],
    "credit for unsent bytes": [wire.encode(wire.CREDIT, 1, number=1 << 40)],
    "data of no epoch": [wire.encode(wire.DATA, wire.OF_NO_EPOCH), b""],
    "impossible dtype": announced(layout="float13:1"),
    "no layout": announced(layout=""),
    "half a layout": announced(layout="float32:1,int8"),
    "impossible reduction": announced(op="SUMS"),
    "senseless reduction": announced(op="AVG", layout="float32:1,int8:1"),
    "negative count": announced(layout="float32:-5"),
    "impossible quorum": announced(opening="QUORUM", quorum=9),
    "no quorum": announced(opening="QUORUM", quorum=0),
    "too many candidates": announced(opening="MAJORITY", candidates=4),
    "no candidates": announced(opening="MAJORITY", candidates=0),
    "groups larger than the world": announced(group_size=4),
    "negative groups": announced(group_size=-1),
    "negative sync_every": announced(sync_every=-1),
    "negative history": announced(history=-1),
    "weights of a sum": announced(weighted=True),
}


def sends(frames: list[bytes]) -> Act:
    async def act(comm: Communicator) -> None:
        await comm.barrier()  # all ranks have joined
        if comm.rank == 1:
            comm._core.member.endpoint.transport.send(2, frames)
        for _ in range(20):
            await comm.barrier()

    return act


@pytest.mark.parametrize("run", [run_simulated, pytest.param(run_zmq, marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", GARBAGE)
def test_the_error_names_a_rank_that_violates_the_protocol(what, run, caplog):
    raised: dict[int, Exception] = {}
    end = asyncio.Barrier(3)  # as soon as one rank raises, the others are stopped

    async def main(comm: Communicator) -> None:
        try:
            await sends(GARBAGE[what])(comm)
        except AsyncollError as error:
            raised[comm.rank] = error
            await end.wait()
            raise

    with pytest.raises(ProtocolError, match="rank 1 broke the protocol") as caught:
        run(3, main)
    assert caught.value.source == 1
    assert str(raised[2]) == str(caught.value)


@pytest.mark.parametrize("what", ["garbage", "wrong field"])
def test_a_protocol_violation_reaches_all_ranks(what):
    """Also ranks that wait for the rank that got the bytes."""
    raised = failures(3, sends(GARBAGE[what]))
    assert type(raised[2]) is ProtocolError
    assert {type(raised[rank]) for rank in (0, 1)} <= {ProtocolError, AbortedError, PeerLostError}


@looped("first", ["posted", "arrived"])
@looped("payload", [b"", b"x" * 3, b"x" * 100])
def test_data_of_a_wrong_size_is_refused_before_and_after_the_receive(payload, first):
    """The header is valid, but the payload does not fit the receive of a round."""

    refused_in_a_round([payload], first)


@pytest.mark.parametrize("first", ["posted", "arrived"])
def test_a_piggyback_of_a_wrong_size_is_refused(first):
    refused_in_a_round([b"", b"x" * 5], first)


def refused_in_a_round(frames: list[bytes], first: str) -> None:
    """Rank 1 sends `frames` as a part of a round, before or after rank 0 has posted its receive."""

    async def act(comm: Communicator) -> None:
        x = np.ones(1 << 17)
        await comm.solo_allreduce(x, sync_every=1)
        operation = comm._core.backend.operations.known["solo"]
        if comm.rank == 1:
            header = wire.encode(wire.DATA, 1, operation._port._context, 2, 1, operation._port._fingerprint)
            comm._core.member.endpoint.transport.send(0, [header, *frames])
            await asyncio.sleep(1)
        elif first == "arrived":
            await asyncio.sleep(0.5)
        await comm.solo_allreduce(x, sync_every=1)

    raised = failures(2, act)
    assert sorted(raised) == [0, 1]
    assert type(raised[0]) is ProtocolError
    assert raised[0].source == 1


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_call_after_others_have_left_is_a_mismatch(size):
    async def main(comm: Communicator) -> None:
        await comm.barrier()
        if comm.rank == 0:
            await comm.barrier()

    with pytest.raises(MismatchError, match=r"(?=.*barrier #2)(?=.*the end of its program #2 at test_failures.py)"):
        simulate(size, main)


# -- calls after a cancelled one -----------------------------------------------------------------


async def cancelled(call: Coroutine[Any, Any, Any], after_s: float) -> bool:
    """Cancel `call` after `after_s`; return False if it has returned before."""
    try:
        await asyncio.wait_for(call, after_s)
    except TimeoutError:
        return True
    return False


@pytest.mark.parametrize("count", [SHORT, LONG])
@looped("opening", ["solo", "majority", "quorum"])
def test_the_call_after_a_cancelled_one_gets_the_result_in_memory_of_its_own(opening, count):
    async def main(comm: Communicator) -> tuple[int, float]:
        x = np.full(count, 1.0 + comm.rank)
        if comm.rank == 0:
            assert await cancelled(wait_avoiding(comm, opening, x), 1e-3)
            x[:] = 1000
        reduction = await wait_avoiding(comm, opening, x)
        return reduction.round, x[0]

    slow = Network(latency_s=1e-3, bandwidth_bytes_per_s=1e9)
    for seed in range(5):
        (first, mine), (second, theirs) = simulate(2, main, slow, seed).results
        assert first != second or mine == theirs


@pytest.mark.parametrize("history", [0, 100])
def test_the_next_call_reports_the_rounds_of_a_cancelled_one_as_missed_or_skipped(history):
    """The result is ready on the runtime's loop when the caller is cancelled."""

    async def main(comm: Communicator) -> list[tuple[int, int, int]]:
        told = []
        for call in range(5):
            work = asyncio.ensure_future(comm.solo_allreduce(np.ones(1), history=history))
            if call == 2:
                while comm.statistics().operations["solo"].calls < 3:
                    await asyncio.sleep(0)
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await work
                    pytest.fail("it had been answered before")
                continue
            reduction = await work
            told.append((reduction.round, len(reduction.missed), reduction.skipped))
        return told

    after = (4, 1, 0) if history else (4, 0, 1)
    assert run_ranks(1, main)[0] == [(1, 0, 0), (2, 0, 0), after, (5, 0, 0)]


@pytest.mark.slow
def test_every_round_is_reported_when_calls_time_out_over_real_sockets():
    async def main(comm: Communicator) -> None:
        last = 0
        for _ in range(100):
            work = comm.solo_allreduce(np.ones(4), history=1000)
            try:
                reduction = await asyncio.wait_for(work, 300e-6)
            except TimeoutError:
                continue
            assert reduction.round - len(reduction.missed) - reduction.skipped == last + 1
            last = reduction.round

    run_zmq(3, main)


def test_buckets_that_are_divided_differently_are_a_mismatch():
    async def main(comm: Communicator) -> None:
        buckets = [np.ones(2), np.ones(4)]
        await comm.quorum_allreduce(buckets if comm.rank else buckets[::-1], quorum=2)

    with pytest.raises(MismatchError, match=r"buckets=.*buckets="):
        simulate(2, main)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_reason_of_a_rank_is_known_where_the_end_of_its_connection_comes_first(size, monkeypatch):
    def announce_at_once(world: SimulatedWorld, source: int, cause: str) -> None:
        world._lose(source, cause)  # other messages of `source` are under way

    monkeypatch.setattr(SimulatedWorld, "announce_loss", announce_at_once)
    seen: dict[int, str] = {}

    async def main(comm: Communicator) -> None:
        await comm.barrier()
        if comm.rank == size - 1:
            raise LookupError("lost my data")
        try:
            await comm.barrier()
        except AsyncollError as error:
            seen[comm.rank] = f"{type(error).__name__}: {error}"
            raise

    with pytest.raises(LookupError):
        simulate(size, main, Network(latency_s=1e-3, jitter_s=1e-3))
    reason = f"AbortedError: rank {size - 1} aborted: LookupError: lost my data"
    assert seen == dict.fromkeys(range(size - 1), reason)


def test_the_reason_of_a_rank_comes_behind_messages_that_are_read_late(monkeypatch):
    """More is under way than the sockets hold, for longer than these take to close."""
    monkeypatch.setattr(zeromq, "_HIGH_WATER_MARK", 1)
    seen: list[str] = []

    async def main(comm: Communicator) -> None:
        await comm.barrier()
        transport = comm._core.member.endpoint.transport
        if comm.rank == 0:
            await asyncio.sleep(0.05)  # the other rank reads no more
            late = [comm.send(np.ones(SEGMENT_BYTES), 1, tag=tag) for tag in range(3)]
            await asyncio.sleep(0.05)
            for each in late:
                each.close()
            raise LookupError("lost my data")
        transport._loop.remove_reader(transport._router.fileno())
        again_s = 3 * zeromq._FLUSH_MS / 1000

        def read_again() -> None:
            transport._loop.add_reader(transport._router.fileno(), transport._read)
            transport._read()

        transport._loop.call_later(again_s, read_again)
        try:
            await comm.barrier()
        except AsyncollError as error:
            seen.append(str(error))
            raise

    with pytest.raises(LookupError):
        run_ranks(2, main, "zmq")
    assert seen == ["rank 0 aborted: LookupError: lost my data"]


# -- what a world leaves -------------------------------------------------------------------------


async def raise_own(call: Coroutine[Any, Any, Any], comm: Communicator) -> None:
    call.close()
    raise LookupError("lost my data")


async def raise_beside(call: Coroutine[Any, Any, Any], comm: Communicator) -> None:
    beside = asyncio.ensure_future(call)
    beside.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    await asyncio.sleep(0)
    raise LookupError("lost my data")


async def abort_world(call: Coroutine[Any, Any, Any], comm: Communicator) -> None:
    comm.abort("no more")
    await call


async def cancel(call: Coroutine[Any, Any, Any], comm: Communicator) -> None:
    beside = asyncio.ensure_future(call)
    await asyncio.sleep(0)
    beside.cancel()
    await asyncio.wait([beside])  # it may be over before
    beside.cancelled() or beside.exception()
    raise LookupError("lost my data")


async def call_another(call: Coroutine[Any, Any, Any], comm: Communicator) -> None:
    await asyncio.gather(comm.reduce(np.ones(7)), call)


ENDS = [raise_own, raise_beside, abort_world, cancel, call_another]
LEFT_CALLS: dict[str, Callable[[Communicator], Coroutine[Any, Any, Any]]] = {
    "short allreduce": lambda c: c.allreduce(np.ones(SHORT)),
    "long allreduce": lambda c: c.allreduce(np.ones(LONG)),
    "barrier": lambda c: c.barrier(),
    "gather": lambda c: c.gather(np.ones(SHORT)),
    "solo_allreduce": lambda c: c.solo_allreduce(np.ones(SHORT)),
    "recv": lambda c: c.recv(np.ones(SHORT), (c.rank + 1) % c.size),
}


def memory_files() -> list[str]:
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return [link for link in map(os.path.realpath, links) if "memfd:" in link]


@pytest.mark.parametrize("transport", ["shm", "shm-mixed"])  # with the compiled core, and one rank with it
@pytest.mark.parametrize("kind", LEFT_CALLS)
def test_failed_worlds_in_one_process_leave_no_memory(kind, transport):
    before = memory_files()

    async def main(end: Callable[..., Coroutine[Any, Any, None]], comm: Communicator) -> None:
        part = await comm.split(0)
        for count in (SHORT, SHORT, LONG):  # the core knows the second one
            await asyncio.gather(*(each.allreduce(np.ones(count)) for each in (comm, part)))
        call = LEFT_CALLS[kind](part if comm.size > 2 else comm)
        with deadline(PATIENCE_S):
            await (end(call, comm) if comm.rank == 0 else asyncio.gather(call, comm.barrier()))
            await comm.barrier()

    for size, end in itertools.product((2, 3), ENDS):
        with pytest.raises((LookupError, AsyncollError)):
            run_ranks(size, partial(main, end), transport)
    gc.collect()
    assert memory_files() == before
