"""Calls without an event loop, in worlds of real processes."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "without_loop.py"
FOR_SEVERAL = [
    "threads",
    "dropped",
    "unfetched",
    "leaves",
    "closes",
    "begins",
    "awaited",
    "shared",
    "callbacks",
    "timeouts",
    "documents",
    "late",
    "differs",
    "overdue",
    "dies",
    "forks",
    "interrupted",
    "interruptions",
    "ends",
    "raises",
]


@pytest.fixture
def play(forked_world, tmp_path):
    """Plays a case in a world of `size` ranks, each of which must pass."""
    return partial(_play, forked_world, tmp_path)


def _play(forked_world, tmp_path, size, case, **more):
    environment = os.environ | {"ASYNCOLL_FREEZE_S": "20", "FLAGS": str(tmp_path)} | more
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
@pytest.mark.parametrize("case", ["collectives", "threads", "late"])
@pytest.mark.parametrize("more", [{"ASYNCOLL_TRANSPORT": "zmq"}, {"ASYNCOLL_CORE": "python"}], ids=["zmq", "python"])
def test_handles_by_message_and_without_the_core(play, case, more):
    play(3, case, **more)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["differs", "interruptions"])
def test_handles_without_the_core(play, case):
    play(3, case, ASYNCOLL_CORE="python")
