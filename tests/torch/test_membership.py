"""How the processes of torch.distributed form a world, and leave it: in worlds of real processes."""

from __future__ import annotations

import os

import pytest

from asyncoll.transport.keys import write_key
from tests.support.places import SCRIPTS
from tests.support.processes import WHOLE_END

SCRIPT = SCRIPTS / "torch/joins_and_leaves.py"
# By case: the ranks that do not end well. Each dies, or raises an exception on purpose.
CASES = {
    "stores": (),
    "leaves": (),
    "groups": (),
    "misuse": (),
    "forks": (),
    "fails": (0,),
    "ends": (),
    "dies": (1,),
    "mixed": (),
}


def play(forked_world, tmp_path, size, case, **more):
    env = os.environ | {"ASYNCOLL_FREEZE_S": "20", "FOLDER": str(tmp_path), "GLOO_SOCKET_IFNAME": "lo"} | more
    return [rank.end() for rank in forked_world(env, size, SCRIPT, case)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_processes_of_torch_form_and_leave_worlds(forked_world, tmp_path, case):
    for rank, (code, out, err) in enumerate(play(forked_world, tmp_path, 3, case, **WHOLE_END)):
        assert rank in CASES[case] or (code, out) == (0, "passed\n"), (rank, code, out, err)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_worlds_of_one_place_follow_each_other_whichever_rank_is_late(forked_world, tmp_path, seed):
    count = 2 + seed % 3
    assert play(forked_world, tmp_path, count, "cycles", SEED=str(seed)) == [(0, "passed\n", "")] * count


@pytest.mark.slow
@pytest.mark.parametrize("case", ["leaves", "fails", "ends"])
def test_ranks_leave_by_message(forked_world, tmp_path, case):
    ends = play(forked_world, tmp_path, 3, case, ASYNCOLL_TRANSPORT="zmq", **WHOLE_END)
    for rank, (code, out, err) in enumerate(ends):
        assert rank in CASES[case] or (code, out) == (0, "passed\n"), (rank, code, out, err)


@pytest.mark.slow
def test_a_process_alone_is_a_world(forked_world, tmp_path):
    assert play(forked_world, tmp_path, 1, "alone") == [(0, "passed\n", "")]


@pytest.mark.slow
def test_ranks_with_a_key_meet_in_the_store_of_torch(forked_world, tmp_path):
    key = tmp_path / "key"
    for path in (key, tmp_path / "key.other"):
        write_key(path)
    assert play(forked_world, tmp_path, 2, "keyed", ASYNCOLL_KEY_FILE=str(key)) == [(0, "passed\n", "")] * 2
