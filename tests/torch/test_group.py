"""Process groups of torch.distributed, in worlds of real processes."""

from __future__ import annotations

import os

import pytest

from tests.support.places import SCRIPTS
from tests.support.processes import WHOLE_END

SCRIPT = SCRIPTS / "torch/calls_of_groups.py"


def play(forked_world, size, *cases, **more):
    for rank, each in enumerate(forked_world(os.environ | {"ASYNCOLL_FREEZE_S": "20"} | more, size, SCRIPT, *cases)):
        code, out, err = each.end()
        assert (code, out) == (0, "passed\n"), (rank, code, out, err)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_call_gives_the_values_that_it_must(forked_world, size):
    play(forked_world, size, "values")


@pytest.mark.slow
def test_the_values_by_message(forked_world):
    play(forked_world, 2, "values", ASYNCOLL_TRANSPORT="zmq")


@pytest.mark.slow
def test_the_checks_of_values_fail_if_the_calls_do_nothing(forked_world):
    play(forked_world, 2, "sabotaged")


@pytest.mark.slow
def test_what_a_group_promises(forked_world):
    cases = [
        "mismatches",
        "overdue",
        "waits",
        "callbacks",
        "usage",
        "identity",
        "allocated",
        "monitored",
        "aborted",
        "recorded",
        "hooked",
        "not_a_number",
    ]
    play(forked_world, 3, *cases, "joins", "mixed")


@pytest.mark.slow
def test_calls_in_compiled_functions(forked_world):
    play(forked_world, 2, "compiled", **WHOLE_END)
