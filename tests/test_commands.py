"""All commands of `asyncoll`: places in which they cannot run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PATIENCE_S

COMMAND = [sys.executable, "-m", "asyncoll.cli"]
SCRIPTS = Path(__file__).parent / "scripts"
IN_NO_FOLDER = 'cd "$1" && rmdir "$1" && shift && exec "$@"'
NOTEBOOK = """
from asyncoll import notebook

async def main(comm):
    return comm.rank

assert notebook.run(main, ranks=2) == [0, 1]
"""


def run_in_no_folder(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    return subprocess.run(
        ["sh", "-c", IN_NO_FOLDER, "sh", str(folder), *command], capture_output=True, text=True, timeout=PATIENCE_S
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["launch", "-n", "2", str(SCRIPTS / "deaf.py"), "SIGINT"],
        ["launch", "-n", "1", "-m", "json.tool"],
        ["launch", "--hosts", "a:1", str(SCRIPTS / "deaf.py")],
        ["laws", "--seed", "1"],
        ["faults", "--sample", "1"],
        ["bench", "allreduce", "--sizes", "4"],
        ["bench", "tune"],
    ],
    ids=" ".join,
)
def test_a_deleted_folder_is_refused_where_processes_or_torch_need_one(tmp_path, arguments):
    run = run_in_no_folder(tmp_path / "gone", *COMMAND, *arguments)
    assert run.returncode == 2
    assert "Error: the current folder has been deleted: go to one that exists (cd)" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_a_deleted_folder_is_no_hindrance_where_nothing_needs_one(tmp_path):
    for number, command in enumerate(
        (
            [*COMMAND, "doctor"],
            [*COMMAND, "key", str(tmp_path / "key")],
            [*COMMAND, "bench", "allreduce", "--sizes", "4", "--transport", "inproc"],
            [sys.executable, "-c", NOTEBOOK],
        )
    ):
        run = run_in_no_folder(tmp_path / str(number), *command)
        assert run.returncode == 0, run
