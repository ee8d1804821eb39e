"""The environment variables of a rank: accepted and refused values."""

from __future__ import annotations

import pytest

from asyncoll.errors import UsageError
from asyncoll.world.environment import Environment

WORLD = {"RANK": "0", "WORLD_SIZE": "1"}


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
@pytest.mark.parametrize("text", ["²", "--1", "1.0", "-", "one"])
def test_the_error_names_the_variable_that_is_not_a_number(name, text):
    with pytest.raises(UsageError, match=f"{name}='{text}' in the environment is not a number"):
        Environment.read(WORLD | {name: text})


@pytest.mark.parametrize("text", ["0.001", "3e6"])
def test_a_freeze_time_that_zeromq_cannot_measure_is_refused(text):
    with pytest.raises(UsageError, match=r"ASYNCOLL_FREEZE_S=.*: give 0.02 to 86400 seconds, or 0 for never"):
        Environment.read(WORLD | {"ASYNCOLL_FREEZE_S": text})


@pytest.mark.parametrize("seconds", [0, 0.02, 86_400])
def test_the_bounds_of_the_freeze_time_are_accepted(seconds):
    assert Environment.read(WORLD | {"ASYNCOLL_FREEZE_S": str(seconds)}).freeze_s == seconds
