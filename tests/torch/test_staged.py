"""Process groups of torch with tensors of devices without hardware, in worlds of real processes."""

from __future__ import annotations

import os

import pytest

from tests.support.places import SCRIPTS

SCRIPT = SCRIPTS / "torch/device_tensors.py"
WINDOWS = "short=8192,staged=65536"  # the longest tensors go in windows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "cases", "more"),
    [
        (3, ["streams", "mixed", "refused", "failed", "emulated"], {"ASYNCOLL_SIZES": WINDOWS}),
        (2, ["mixed", "some"], {"ASYNCOLL_TRANSPORT": "zmq"}),
    ],
)
def test_calls(forked_world, size, cases, more):
    for rank, each in enumerate(forked_world(os.environ | {"ASYNCOLL_FREEZE_S": "20"} | more, size, SCRIPT, *cases)):
        code, out, err = each.end()
        assert (code, out) == (0, "passed\n"), (rank, code, out, err)
