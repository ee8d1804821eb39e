"""Which store of epochs the ranks of a job have: one that outlives them, and is of their world alone."""

from __future__ import annotations

import pytest

from asyncoll import UsageError
from asyncoll.runtime.epochs import Decision
from asyncoll.transport.keys import Key
from asyncoll.world.environment import Environment
from asyncoll.world.epoch_stores import decisions_of

KEY = Key(bytes(range(32)))


def launched(job):
    """The environment of a rank of `asyncoll launch -n 3`, with a folder as a world makes it."""
    for world in "12":
        (job / world).mkdir(exist_ok=True)
    return Environment(1, 3, str(job), "", 0, shares_memory=True, run="")


def test_ranks_of_one_world_have_one_store_and_the_next_world_has_another(tmp_path):
    of_ranks = [decisions_of(launched(tmp_path), "1", KEY) for _ in range(2)]
    assert [each.decide(Decision(2, (rank,))) for rank, each in enumerate(of_ranks)] == [Decision(2, (0,))] * 2
    assert decisions_of(launched(tmp_path), "2", KEY).read(2) is None


def test_an_entry_of_another_job_or_another_world_is_refused(tmp_path):
    decisions_of(launched(tmp_path), "1", KEY).decide(Decision(2, (0,)))
    with pytest.raises(UsageError, match="none of this job"):
        decisions_of(launched(tmp_path), "1", Key(bytes(reversed(range(32))))).read(2)
    (tmp_path / "1/epochs").rename(tmp_path / "2/epochs")
    with pytest.raises(UsageError, match="none of this job"):
        decisions_of(launched(tmp_path), "2", KEY).read(2)


def test_ranks_that_meet_in_a_store_of_rank_0_have_none():
    assert decisions_of(Environment(1, 3, "", "127.0.0.1", 1, shares_memory=True, run=""), "1", KEY) is None
