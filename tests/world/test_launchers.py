"""Variables of launchers that describe a part of a world: refused, so that no rank runs alone in silence."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from asyncoll.errors import UsageError
from asyncoll.transport.keys import write_key
from asyncoll.world.environment import Environment

STEP = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
BATCH = STEP | {"SLURM_STEP_ID": "4294967291"}


@pytest.mark.parametrize(
    "environ",
    [
        STEP,
        {"PMIX_RANK": "0", "PMIX_NAMESPACE": "job"},
        {"PMI_RANK": "0"},
        {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "4"},
        {"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "4"},
        {"PALS_RANKID": "0"},
        {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"},
        {"LOCAL_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "29500"},
        {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "head", "MASTER_PORT": "29500"},
        BATCH | {"PMIX_RANK": "0"},
        STEP | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "a,b", "SLURM_DISTRIBUTION": "arbitrary"},
        STEP | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "a,b", "SLURM_HET_SIZE": "2"},
    ],
)
def test_rank_0_is_refused_as_the_others_are(environ):
    with pytest.raises(UsageError, match=r"processes that .* has started .*RANK and WORLD_SIZE"):
        Environment.read(environ)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        BATCH,
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
        STEP | {"SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0", "LOCAL_RANK": "0"},
        {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"},
        {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    ],
)
def test_a_program_beside_no_other_is_alone(environ):
    assert Environment.read(environ) is None


def test_a_worker_of_ray_train_without_variables_is_refused(monkeypatch):
    def outside():
        raise RuntimeError("`get_context` cannot be used outside of a Ray Train training function")

    def be_worker(size):
        context = SimpleNamespace(get_world_size=lambda: size)
        monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=lambda: context))

    be_worker(1)
    assert Environment.read({}) is None
    be_worker(4)
    with pytest.raises(UsageError, match=r"one of 4 workers of Ray Train.* TorchTrainer, or call asyncoll\.ray\.run"):
        Environment.read({})
    assert Environment.read({"RANK": "0", "WORLD_SIZE": "1"}).size == 1
    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=outside))
    assert Environment.read({}) is None


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "8"), ("RANK", "0")])
def test_a_variable_that_contradicts_the_launcher_is_refused(name, value):
    environ = STEP | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    assert (Environment.read(environ).rank, Environment.read(environ).size) == (1, 2)
    with pytest.raises(UsageError, match=f"{name}={value} .* rank 1 of 2: set both RANK and WORLD_SIZE, or neither"):
        Environment.read(environ | {name: value})


def test_srun_tells_the_host_of_rank_0_unless_the_user_has_chosen_the_order_of_hosts():
    """The list of hosts is sorted, and rank 0 runs on the first one of the user."""
    step = STEP | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "a[03-04,7],b"}
    assert Environment.read(step | {"SLURM_DISTRIBUTION": "cyclic"}).master_addr == "a03"
    for order in ({"SLURM_DISTRIBUTION": "arbitrary"}, {"SLURM_HET_SIZE": "2"}):
        with pytest.raises(UsageError, match=r"SLURM_STEP_NUM_TASKS=4.* do not tell all: set MASTER_ADDR \("):
            Environment.read(step | order)
        assert Environment.read(step | order | {"MASTER_ADDR": "b"}).master_addr == "b"
        assert Environment.read(step | order | {"SLURM_STEP_NUM_NODES": "1"}).master_addr == "127.0.0.1"


def test_the_key_in_the_home_folder_is_found(tmp_path):
    world = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1", "HOME": str(tmp_path)}
    assert Environment.read(world).key_file == ""
    key = tmp_path / ".asyncoll.key"
    write_key(key)
    assert Environment.read(world).key_file == str(key)
    assert Environment.read(world | {"ASYNCOLL_KEY_FILE": "other"}).key_file == "other"
    assert Environment.read(world | {"ASYNCOLL_FOLDER": "folder"}).key_file == ""  # the launcher has made one
    assert Environment.read(world | {"HOME": ""}).key_file == ""
