"""`asyncoll.ray` with real actors. Ray takes seconds to start, so one cluster of two nodes serves all tests.

It runs in a process of its own: the threads and files of a driver stay for as long as the process.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.places import SCRIPTS
from tests.support.processes import PATIENCE_S
from tests.world.test_program_ends import told_by_ray

pytestmark = pytest.mark.slow
DRIVER = SCRIPTS / "ray/driver.py"


@pytest.fixture(scope="module")
def told():
    """What the driver tells of each case, by its name."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'asyncoll[ray]'")
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        environment = os.environ | {
            "RAY_TMPDIR": folder,
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_DEDUP_LOGS": "0",
        }
        done = subprocess.run(
            [sys.executable, str(DRIVER), folder],
            env=environment,
            cwd=DRIVER.parent,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads((Path(folder) / "told.json").read_text())


def test_the_command_of_the_documentation_runs(told):
    code, output = told["page"]
    assert (code, output.splitlines()[-1:]) == (0, ["[0.5, 0.5]"])


def test_the_rank_that_fails_by_itself_is_the_cause(told):
    error = told["raise"]
    assert error["type"] == "RemoteError"
    assert error["text"].startswith("ValueError at rank 1: boom")
    _, place, *followers = error[
        "notes"
    ]  # the page of the error first; a rank that is slow to fail is cancelled, and not among them
    assert place.startswith("rank 1 ran on host ")
    assert all(re.match(r"ranks? (0|2|0, 2) failed too: .*rank 1 ", note) for note in followers), followers


def test_each_end_of_a_program_is_told(told):
    """As the table in docs/concepts/failures.md has it."""
    for end, outcome in told["ends"].items():
        told_by_ray(end, outcome)


def test_a_killed_rank_is_the_cause(told):
    error = told["kill"]
    assert error["type"] == "PeerLostError"
    assert error["text"].startswith("rank 1 (host ")


def test_a_rank_that_aborts_and_ends_well_is_not_called_lost(told):
    error = told["abort"]
    assert error["type"] == "RemoteError"
    assert error["text"].startswith("AbortedError at rank 0: rank 1 aborted: enough")


def test_a_node_that_is_lost_ends_its_ranks_and_is_the_cause(told):
    ((rank, has_ended),) = told["ranks there"]
    assert has_ended
    assert told["lost node"]["type"] == "PeerLostError"
    assert told["lost node"]["text"].startswith(f"rank {rank} (host ")


def test_an_interrupted_driver_leaves_no_actor(told):
    assert told["interrupt"]["type"] == "KeyboardInterrupt"
    assert told["have ended"] == [True, True]


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("no room", "DeadlineError", "even when all is free, only 4 of these ranks fit"),
        ("no ranks", "UsageError", "ranks=0: give a whole number from 1 on"),
        ("no coroutine", "UsageError", "needs an `async def main"),
        ("a lock", "UsageError", "cannot be sent to the ranks"),
        ("no such placement", "UsageError", "give one of pack, spread"),
        ("no resources", "UsageError", "nothing that Ray could reserve"),
        ("a negative amount", "UsageError", "give numbers from 0 on"),
        ("a tiny amount", "UsageError", "cannot go beyond 0.0001"),
        ("no name", "UsageError", "give numbers from 0 on"),
        ("a result", "RemoteError", "TypeError at rank 0: "),
    ],
)
def test_what_cannot_be_is_refused(told, name, kind, words):
    assert told[name]["type"] == kind
    assert words in told[name]["text"]


def test_a_worker_of_ray_train_joins_by_the_store_of_its_process_group(forked_world):
    ranks = forked_world(dict(os.environ), 2, DRIVER.with_name("world_beside_a_process_group.py"))
    for rank, process in enumerate(ranks):
        code, out, err = process.end()
        assert (code, out) == (0, f"{rank} [1]\n" * 2), err


def test_a_trial_runs_its_ranks_in_its_own_placement_group_without_torch(told):
    ran, *refused = told["trial"]
    assert ran["result"] == [[1, 0, False], [1, 1, False]]
    for error in refused:
        assert "do not fit into the placement group around this program" in error["text"]


def test_the_ranks_for_which_bundles_have_room():
    room = pytest.importorskip("asyncoll.ray.bundles")._room
    one, tenth = {"CPU": 1.0}, {"CPU": 0.1}
    assert room([one], {}, tenth) == 10
    assert room([one, one, one], {}, one) == 3
    assert room([one, one, one], one, one) == 2
    assert room([one, {"CPU": 1.0, "GPU": 1.0}], one, {"GPU": 1}) == 1
    assert room([{"CPU": 2.0}], tenth, one) == 1


def test_the_last_second_of_a_wait_for_room_is_not_full_of_warnings(caplog, monkeypatch):
    placement = pytest.importorskip("asyncoll.ray.bundles")
    now_s = [0.0]
    waits = []

    class Full:
        def wait(self, seconds):  # of a placement group: for whole seconds
            waits.append(int(seconds))
            now_s[0] += int(seconds) + 0.01
            return False

    monkeypatch.setattr(placement.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(placement, "_shortage", lambda *_: "they need more")
    with pytest.raises(placement.DeadlineError, match="after 8 s: start nodes"):
        placement._await_room(Full(), 2, {"CPU": 1}, "pack", 8)
    assert waits == [5, 3]
    assert [record.args[1] for record in caplog.records] == [5.01]
