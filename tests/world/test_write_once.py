"""The entries that decide on epochs: the first writer wins, whatever the store, and all read the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from asyncoll import ServiceLostError, UsageError
from asyncoll.runtime.epochs import Decision
from asyncoll.transport.keys import Key
from asyncoll.world.write_once import ENTRY_BYTES, Decisions, FolderStore, MemoryStore, TorchStore

KEY = Key(b"of this job")


@pytest.fixture(params=["folder", "torch", "memory"])
def store(request, tmp_path):
    if request.param == "memory":
        return MemoryStore()
    if request.param == "folder":
        return FolderStore(tmp_path / "store")
    from torch.distributed import HashStore

    return TorchStore(HashStore(), "job/")


def test_the_first_entry_stays(store):
    assert store.read("epoch-2") is None
    assert store.compare_and_set("epoch-2", b"\0first\xff") == b"\0first\xff"
    assert store.compare_and_set("epoch-2", b"second") == b"\0first\xff"
    assert store.read("epoch-2") == b"\0first\xff"
    assert store.read("epoch-3") is None


def test_all_that_write_at_once_get_the_same(store):
    with ThreadPoolExecutor(8) as threads:
        held = set(threads.map(lambda n: store.compare_and_set("epoch-2", b"%d" % n), range(64)))
    assert held == {store.read("epoch-2")}


@pytest.mark.parametrize(("name", "entry"), [("", b"x"), ("../x", b"x"), ("a", b""), ("a", bytes(ENTRY_BYTES + 1))])
def test_names_and_sizes_are_checked(store, name, entry):
    with pytest.raises(UsageError):
        store.compare_and_set(name, entry)


def test_an_entry_may_have_the_largest_size(store):
    entry = os.urandom(ENTRY_BYTES)
    assert store.compare_and_set("a", entry) == entry == store.read("a")


def test_files_are_for_the_user_alone_and_none_is_left(tmp_path):
    store = FolderStore(tmp_path / "store")
    for _ in range(2):
        store.compare_and_set("epoch-2", b"x")
    assert [each.name for each in (tmp_path / "store").iterdir()] == ["epoch-2"]
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "store" / "epoch-2").stat().st_mode & 0o777 == 0o600


def test_a_folder_that_is_open_to_others_is_refused(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(UsageError, match="chmod 700"):
        FolderStore(tmp_path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be in"):
        FolderStore(tmp_path / "no" / "store")


def test_a_folder_that_is_gone_is_a_lost_store(tmp_path):
    store = FolderStore(tmp_path / "store")
    (tmp_path / "store").rmdir()
    with pytest.raises(ServiceLostError, match="does not answer"):
        store.compare_and_set("epoch-2", b"x")
    with pytest.raises(ServiceLostError, match="the folder is gone"):
        store.read("epoch-2")


def test_an_entry_outlives_its_writer(tmp_path):
    program = f"""
import os, pathlib, signal
from asyncoll.world.write_once import FolderStore
FolderStore(pathlib.Path({str(tmp_path / "store")!r})).compare_and_set("epoch-2", b"x")
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == -signal.SIGKILL
    assert FolderStore(tmp_path / "store").read("epoch-2") == b"x"


def test_a_store_of_torch_over_tcp_that_has_ended_is_lost():
    """In a process of its own, because torch keeps descriptors of a store that has ended."""
    program = """
from torch.distributed import TCPStore
from asyncoll import ServiceLostError
from asyncoll.world.write_once import TorchStore
server = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
store = TorchStore(TCPStore("127.0.0.1", server.port, 1, wait_for_workers=False), "job/")
print(store.compare_and_set("a", b"\\xff"), store.compare_and_set("a", b"x"), store.read("a"), store.read("b"))
del server
for ask in (lambda: store.read("a"), lambda: store.compare_and_set("a", b"x")):
    try:
        ask()
    except ServiceLostError as error:
        print(str(error)[:40])
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    told = "the store of epochs job/ does not answer"
    assert ran.stdout.splitlines() == [r"b'\xff' b'\xff' b'\xff' None", told, told]


# -- decisions in it ---


def test_the_first_proposal_is_the_decision(store):
    decisions = Decisions(store, KEY)
    assert decisions.read(2) is None
    assert decisions.decide(Decision(2, (0, 2, 13))) == Decision(2, (0, 2, 13))
    assert decisions.decide(Decision(2, (2, 13))) == Decision(2, (0, 2, 13)) == decisions.read(2)
    assert decisions.decide(Decision(3, (2,))) == Decision(3, (2,))


def test_an_epoch_may_have_a_thousand_members(store):
    proposal = Decision(2, tuple(range(999_998_977, 10**9)))
    assert Decisions(store, KEY).decide(proposal) == proposal


def test_two_jobs_with_one_store_are_told_apart(store):
    Decisions(store, KEY).decide(Decision(2, (0, 1)))
    with pytest.raises(UsageError, match="none of this job"):
        Decisions(store, Key(b"of another job")).read(2)
    with pytest.raises(UsageError, match="none of this job"):
        Decisions(store, Key(b"of another job")).decide(Decision(2, (0,)))


def test_an_entry_of_another_epoch_is_refused():
    """As if somebody had copied it."""
    store = MemoryStore()
    Decisions(store, KEY).decide(Decision(2, (0, 1)))
    store.compare_and_set("epoch-3", store.read("epoch-2"))
    with pytest.raises(UsageError, match="none of this job"):
        Decisions(store, KEY).read(3)


@pytest.mark.parametrize("members", ["", "1,0", "0,0", "-1", "0,,1", "x", "²", "1" * 10, ",".join(["1"] * 5000)])
def test_members_that_no_decision_has_are_refused(members):
    from asyncoll.world.sealed_entries import seal

    store = MemoryStore()
    store.compare_and_set("epoch-2", seal(["2", members], "epoch-2", KEY))
    with pytest.raises(UsageError, match="none of this job"):
        Decisions(store, KEY).read(2)


def test_what_others_have_written_is_refused():
    from torch.distributed import HashStore

    theirs = HashStore()
    theirs.set("job/epoch-2", "no base64")
    with pytest.raises(UsageError, match="none of this job"):
        Decisions(TorchStore(theirs, "job/"), KEY).read(2)
