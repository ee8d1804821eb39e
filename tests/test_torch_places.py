"""Errors of communication hooks name the user's line, in worlds of real processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "torch_places.py"
HOOKS = ("allreduce", "eager_sgd", "oktopk", "dc_s3gd")


def lines(*hooks):
    return "".join(f"{hook} {SCRIPT.name}\n" for hook in hooks)


@pytest.mark.slow
def test_a_mismatch_names_the_lines_of_the_program(forked_world):
    for rank in forked_world(os.environ | {"ASYNCOLL_FREEZE_S": "20"}, 3, SCRIPT, "mismatches"):
        assert rank.end()[:2] == (0, lines(*HOOKS, "dc_s3gd"))  # the last one in `finish`


@pytest.mark.slow
def test_a_death_names_a_line_of_the_program(forked_world):
    ranks = forked_world(os.environ | {"ASYNCOLL_FREEZE_S": "20"}, 3, SCRIPT, "deaths")
    assert [rank.end()[:2] for rank in ranks] == [(0, lines(*HOOKS)), (-signal.SIGKILL, ""), (0, lines(*HOOKS))]
