"""What prevents a rank from meeting the others is said at once, by a UsageError that names the remedy."""

from __future__ import annotations

import os
import tempfile

import pytest
from click.testing import CliRunner

import asyncoll
from asyncoll import UsageError, cli, notebook
from asyncoll.world import meeting

WORLD = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "ASYNCOLL_DEADLINE_S": "20"}


async def main(comm: asyncoll.Communicator) -> None:
    raise AssertionError("there is no other rank")


@pytest.fixture(autouse=True)
def world(monkeypatch):
    for name, value in WORLD.items():
        monkeypatch.setenv(name, value)


def test_a_wrong_address_is_noticed_before_the_other_ranks_come(monkeypatch):
    monkeypatch.setenv("ASYNCOLL_ADDRESS", "203.0.113.9")
    with pytest.raises(UsageError, match=r"ASYNCOLL_ADDRESS=203.0.113.9 is no address of this host"):
        asyncoll.run(main)


@pytest.fixture
def without_proc(monkeypatch):
    """A host on which /proc is not mounted."""

    def elsewhere(known):
        def ask(path="."):
            return known(f"/nowhere{path}" if str(path).startswith("/proc") else path)

        return ask

    for owner, name in ((os, "listdir"), (os.path, "exists")):
        monkeypatch.setattr(owner, name, elsewhere(getattr(owner, name)))


@pytest.mark.usefixtures("without_proc")
def test_a_host_without_proc_is_refused():
    with pytest.raises(UsageError, match="a rank needs /proc"):
        asyncoll.run(main)
    with pytest.raises(UsageError, match="a rank needs /proc"):
        notebook.run(main, ranks=2)
    told = CliRunner().invoke(cli.main, ["launch", "-n", "2", __file__])
    assert told.exit_code == 2
    assert "Error: a rank needs /proc, which shows processes: mount it" in told.output


@pytest.mark.usefixtures("without_proc")
def test_doctor_examines_a_host_without_proc():
    told = CliRunner().invoke(cli.main, ["doctor"])
    assert told.exit_code == 1
    assert "warning: a rank needs /proc, which shows processes: mount it" in told.output
    assert "\none host: no, no /proc; several hosts: no, no /proc" in told.output


def test_a_folder_for_temporary_files_that_is_full_is_refused(monkeypatch):
    def full(*args, **more):
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", full)
    with pytest.raises(UsageError, match="set TMPDIR to a folder"):
        meeting._machine()
