"""Calls without an event loop, in worlds of real processes."""

from __future__ import annotations

import asyncio
import os
from functools import partial

import numpy as np
import pytest

from asyncoll.errors import UsageError
from asyncoll.extending import register_policy
from asyncoll.testing import run_ranks
from tests.support.places import SCRIPTS
from tests.support.processes import WHOLE_END

SCRIPT = SCRIPTS / "blocking/calls_without_loop.py"
FOR_SEVERAL = [
    "threads",
    "dropped",
    "given_up",
    "drawn",
    "unfetched",
    "leaves",
    "unwaited",
    "closes",
    "begins",
    "awaited",
    "shared",
    "callbacks",
    "timeouts",
    "documents",
    "late",
    "looked_at",
    "watched",
    "aborts",
    "differs",
    "overdue",
    "dies",
    "forks",
    "interrupted",
    "interruptions",
    "ends",
    "raises",
]
ENDING = ("leaves", "closes", "ends", "raises")


@pytest.fixture
def play(forked_world, tmp_path):
    """Plays a case in a world of `size` ranks, each of which must pass."""
    return partial(_play, forked_world, tmp_path)


def _play(forked_world, tmp_path, size, case, **more):
    environment = os.environ | {"ASYNCOLL_FREEZE_S": "20", "FLAGS": str(tmp_path)} | more
    environment |= WHOLE_END if case in ENDING else {}
    dead = {0} if case == "dies" else set()
    for rank, each in enumerate(forked_world(environment, size, SCRIPT, case)):
        code, out, err = each.end()
        assert rank in dead or (code, out, err) == (0, "passed\n", ""), (rank, code, out, err)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_call_gives_a_handle_with_its_result(play, size):
    play(size, "collectives")


@pytest.mark.slow
@pytest.mark.parametrize("case", FOR_SEVERAL)
def test_handles(play, case):
    play(3, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["threads", "dropped", "leaves", "documents"])
def test_handles_of_a_world_of_one(play, case):
    play(1, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["collectives", "threads", "given_up", "late", "unwaited"])
@pytest.mark.parametrize("more", [{"ASYNCOLL_TRANSPORT": "zmq"}, {"ASYNCOLL_CORE": "python"}], ids=["zmq", "python"])
def test_handles_by_message_and_without_the_core(play, case, more):
    play(3, case, **more)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["differs", "interruptions"])
def test_handles_without_the_core(play, case):
    play(3, case, ASYNCOLL_CORE="python")


def every_call(comm):
    """Each method of a communicator that begins a call, by name, and the arrays that it may change."""
    size, right, left = comm.size, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x, weight = np.full(4 * size, 2.0), np.ones(1)
    rounds = {"sync_every": 1}
    register_policy("all", lambda view: view.count() == view.size)
    return (x, weight), {
        "allreduce": lambda: comm.allreduce(x),
        "broadcast": lambda: comm.broadcast(x),
        "reduce": lambda: comm.reduce(x),
        "reduce_scatter": lambda: comm.reduce_scatter(x.reshape(size, -1)),
        "allgather": lambda: comm.allgather(x),
        "allgatherv": lambda: comm.allgatherv(x),
        "gather": lambda: comm.gather(x),
        "scatter": lambda: comm.scatter([x] * size if comm.rank == 0 else None),
        "alltoall": lambda: comm.alltoall(x.reshape(size, -1)),
        "alltoallv": lambda: comm.alltoallv([x] * size),
        "barrier": comm.barrier,
        "send": lambda: comm.send(x, right),
        "recv": lambda: comm.recv(x, left),
        "recv_any": lambda: comm.recv_any(x),
        "solo_allreduce": lambda: comm.solo_allreduce(x, **rounds),
        "majority_allreduce": lambda: comm.majority_allreduce(x, **rounds),
        "quorum_allreduce": lambda: comm.quorum_allreduce(x, **rounds),
        "policy_allreduce": lambda: comm.policy_allreduce(x, policy="all", **rounds),
        "group_allreduce": lambda: comm.group_allreduce(x, group_size=size, **rounds),
        "sparse_allreduce": lambda: comm.sparse_allreduce(x, density=0.5),
        "neighbor_average": lambda: comm.neighbor_average(x),
        "push_sum": lambda: comm.push_sum(x, weight),
        "gossip": lambda: comm.gossip(x),
        "split": lambda: comm.split(0),
        "join": lambda: comm.join("solo", x),
    }


@pytest.mark.parametrize("transport", ["inproc", "shm", "zmq"])
def test_a_call_in_a_thread_without_a_loop_is_refused_before_it_has_a_number(transport):
    async def main(comm):
        arrays, calls = every_call(comm)
        begun = {name for name, method in vars(type(comm)).items() if "Coroutine" in str(returns(method))}
        assert {name for name in begun if not name.startswith("_")} == set(calls)
        for times in range(3):  # later calls take the ways of repeated ones
            for name, call in calls.items():
                if name == "join" and times < 2:
                    continue
                before = [array.copy() for array in arrays]
                with pytest.raises(UsageError, match="running event loop"):
                    await asyncio.to_thread(call)
                for array, content in zip(arrays, before, strict=True):
                    np.testing.assert_array_equal(array, content)
                if name == "send":
                    await asyncio.gather(call(), calls["recv"]())
                elif name == "recv_any":
                    await asyncio.gather(call(), calls["send"]())
                elif name != "recv":
                    made = await call()
                    if name == "gossip":
                        for act in (made.exchange, made.close, lambda made=made: made.update(np.ones(arrays[0].size))):
                            with pytest.raises(UsageError, match="running event loop"):
                                await asyncio.to_thread(act)
                        await made.close()
            await comm.barrier()
        arrays[0][:] = 1
        return float((await comm.allreduce(arrays[0]))[0])

    assert run_ranks(2, main, transport) == [2.0] * 2


def returns(method):
    return getattr(method, "__annotations__", {}).get("return", "")
