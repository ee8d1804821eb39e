"""Calls without an event loop, in worlds of real processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "blocking.py"
FOR_SEVERAL = [
    "threads",
    "dropped",
    "leaves",
    "awaited",
    "late",
    "differs",
    "overdue",
    "dies",
    "forks",
    "interrupted",
    "ends",
    "raises",
]


def play(forked_world, size, case, **more):
    dead = {0} if case == "dies" else set()
    for rank, each in enumerate(forked_world(os.environ | {"ASYNCOLL_FREEZE_S": "20"} | more, size, SCRIPT, case)):
        code, out, err = each.end()
        assert rank in dead or (code, out, err) == (0, "passed\n", ""), (rank, code, out, err)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_call_gives_a_handle_with_its_result(forked_world, size):
    play(forked_world, size, "collectives")


@pytest.mark.slow
@pytest.mark.parametrize("case", FOR_SEVERAL)
def test_handles(forked_world, case):
    play(forked_world, 3, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["threads", "dropped", "leaves"])
def test_handles_of_a_world_of_one(forked_world, case):
    play(forked_world, 1, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["collectives", "threads", "late"])
@pytest.mark.parametrize("more", [{"ASYNCOLL_TRANSPORT": "zmq"}, {"ASYNCOLL_CORE": "python"}], ids=["zmq", "python"])
def test_handles_by_message_and_without_the_core(forked_world, case, more):
    play(forked_world, 3, case, **more)
