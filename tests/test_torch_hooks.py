"""Communication hooks of DistributedDataParallel, in worlds of real processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "torch_hooks.py"
CASES = ("allreduce", "eager", "eager_loses", "sabotage", "sparse", "delayed", "checkpoints", "refusals")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "cases", "more"),
    [
        (3, CASES, {}),
        (2, ("allreduce", "eager"), {}),
        (2, ("eager", "sparse", "delayed"), {"ASYNCOLL_TRANSPORT": "zmq"}),
    ],
    ids=["all", "two ranks", "by message"],
)
def test_hooks(forked_world, size, cases, more):
    for rank, each in enumerate(forked_world(os.environ | {"ASYNCOLL_FREEZE_S": "20"} | more, size, SCRIPT, *cases)):
        code, out, err = each.end()
        assert (code, out) == (0, "passed\n"), (rank, code, out, err)
