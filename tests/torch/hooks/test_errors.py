"""Errors of communication hooks are those of both libraries, and name the user's line: in worlds of real processes."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.places import SCRIPTS

SCRIPT = SCRIPTS / "torch/hooks/failing_hooks.py"
BOTH = "asyncoll torch"
PLACED = f"""allreduce {SCRIPT.name}
eager_sgd {BOTH} {SCRIPT.name}
oktopk {BOTH} {SCRIPT.name}
dc_s3gd {BOTH} {SCRIPT.name}
"""  # C++ code makes an error of its own of that of a bucket in `allreduce`
IN_FINISH = f"dc_s3gd {BOTH} {SCRIPT.name}\n"
NOT_FINITE = f"eager_sgd {BOTH}\noktopk {BOTH}\n"


@pytest.mark.slow
def test_an_error_at_all_ranks(forked_world):
    """The mismatches are those of the call in which the ranks compare what they begin with."""
    ranks = forked_world(os.environ | {"ASYNCOLL_FREEZE_S": "20"}, 3, SCRIPT, "mismatches", "not_finite")
    said = PLACED.replace("allreduce", f"allreduce {BOTH}") + IN_FINISH + NOT_FINITE
    assert [rank.end()[:2] for rank in ranks] == [(0, said)] * 3


@pytest.mark.slow
def test_a_death(forked_world):
    """A rank that learns of the death before its call of `allreduce` begins has the error itself, and not C++'s."""
    ranks = forked_world(os.environ | {"ASYNCOLL_FREEZE_S": "20"}, 3, SCRIPT, "deaths")
    ends = [rank.end()[:2] for rank in ranks]
    said = [(code, text.replace(f"allreduce {BOTH}", "allreduce")) for code, text in ends]
    assert said == [(0, PLACED), (-signal.SIGKILL, ""), (0, PLACED)]
