"""Which store of epochs the ranks of a job have: one that outlives them, and is of their world alone."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from asyncoll import ServiceLostError, UsageError
from asyncoll.runtime.epochs import Decision
from asyncoll.transport.keys import Key
from asyncoll.world.environment import Environment
from asyncoll.world.epoch_stores import decisions_of

KEY = Key(bytes(range(32)))


def launched(job):
    """The environment of a rank of `asyncoll launch -n 3`."""
    return Environment.read({"RANK": "1", "WORLD_SIZE": "3", "ASYNCOLL_FOLDER": str(job)})


def test_ranks_of_one_world_have_one_store_and_the_next_world_has_another(tmp_path):
    of_ranks = [decisions_of(launched(tmp_path), "1", KEY) for _ in range(2)]
    assert [each.decide(Decision(2, (rank,))) for rank, each in enumerate(of_ranks)] == [Decision(2, (0,))] * 2
    assert decisions_of(launched(tmp_path), "2", KEY).read(2) is None


def test_an_entry_of_another_job_or_another_world_is_refused(tmp_path):
    """As if somebody had copied it."""
    first, second = (decisions_of(launched(tmp_path), world, KEY) for world in "12")
    folders = list(tmp_path.iterdir())
    first.decide(Decision(2, (0,)))
    for folder in folders:
        if not (folder / "epoch-2").exists():
            (folder / "epoch-2").write_bytes((folders[1 - folders.index(folder)] / "epoch-2").read_bytes())
    with pytest.raises(UsageError, match="none of this job"):
        second.read(2)


def test_ranks_that_meet_in_a_store_of_rank_0_have_none():
    assert decisions_of(Environment(1, 3, "", "127.0.0.1", 1, shares_memory=True, run=""), "1", KEY) is None


def test_ranks_of_torchrun_have_the_store_of_its_agent():
    agent, environment = HashStore(), Environment(1, 3, "", "127.0.0.1", 1, shares_memory=True, run="")
    decisions_of(environment, "1", KEY, agent).decide(Decision(2, (0,)))
    assert decisions_of(environment, "1", KEY, agent).read(2) == Decision(2, (0,))
    assert decisions_of(environment, "2", KEY, agent).read(2) is None


def test_a_launcher_that_is_gone_is_a_lost_store(tmp_path):
    environment = Environment(1, 3, "", "127.0.0.1", 1, shares_memory=True, run="", launcher=str(tmp_path / "store"))
    with pytest.raises(ServiceLostError, match="the store of epochs of the launcher does not answer"):
        decisions_of(environment, "1", KEY).read(2)


def test_a_process_group_of_launched_ranks_has_the_folder_of_the_job(tmp_path):
    """It meets in a store of torch, which rank 0 serves."""
    environ = {"ASYNCOLL_FOLDER": str(tmp_path), "MASTER_ADDR": "127.0.0.1"}
    environment = Environment.of_store(HashStore(), 1, 3, environ)
    decisions_of(environment, "1", KEY).decide(Decision(2, (0,)))
    assert [*tmp_path.glob("epochs-*/epoch-2")]
