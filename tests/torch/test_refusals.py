"""Wrong arguments of calls of torch.distributed: errors at all ranks, in worlds of real processes."""

from __future__ import annotations

import os

import pytest

from tests.support.places import SCRIPTS

SCRIPT = SCRIPTS / "torch/wrong_arguments.py"


@pytest.mark.slow
@pytest.mark.parametrize(("size", "transport"), [(1, "shm"), (2, "shm"), (3, "shm"), (5, "shm"), (3, "zmq")])
def test_a_refused_call_is_an_error_at_all_ranks(forked_world, size, transport):
    settings = os.environ | {"ASYNCOLL_FREEZE_S": "20", "ASYNCOLL_TRANSPORT": transport}
    for rank, each in enumerate(forked_world(settings, size, SCRIPT)):
        code, out, err = each.end()
        assert (code, out) == (0, "passed\n"), (rank, code, out, err)
