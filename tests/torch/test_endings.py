"""How groups of torch.distributed, and children of their ranks, end: in worlds of real processes."""

from __future__ import annotations

import os

import pytest

from tests.support.places import SCRIPTS
from tests.support.processes import WHOLE_END

SCRIPT = SCRIPTS / "torch/ends_of_groups.py"


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_messages_end_with_their_group_and_children_by_themselves(forked_world, transport):
    environment = os.environ | {"ASYNCOLL_TRANSPORT": transport} | WHOLE_END
    for rank in forked_world(environment, 3, SCRIPT, "unmatched", "matched", "children"):
        assert rank.end() == (0, "passed\n", "")


@pytest.mark.slow
def test_an_interrupted_call_leaves_no_rank_waiting(forked_world):
    for rank in forked_world(os.environ | WHOLE_END, 2, SCRIPT, "interruptions"):
        assert rank.end() == (0, "passed\n", "")
