"""`asyncoll store`: a process that keeps the entries of jobs, and outlives their ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from click.testing import CliRunner

import asyncoll
from asyncoll import ServiceLostError, UsageError, cli
from asyncoll.launch.rank_environment import reserve_port
from asyncoll.runtime.epochs import Decision
from asyncoll.transport.keys import Key, write_key
from asyncoll.world.environment import Environment
from asyncoll.world.epoch_stores import decisions_of
from asyncoll.world.remote_store import BoundedStore, RemoteStore
from asyncoll.world.write_once import ENTRY_BYTES
from tests.support.places import SCRIPTS
from tests.support.processes import PATIENCE_S

SESSION = Key(b"of one run")


@contextmanager
def served(key_file, port=0):
    command = [sys.executable, "-m", "asyncoll", "store", "--listen", f"127.0.0.1:{port}", "--key-file", str(key_file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = process.stdout.readline()
            assert said.startswith("the store listens at 127.0.0.1:"), process.stderr.read()
            yield process, int(said.rpartition(":")[2])
        finally:
            process.kill()


@pytest.fixture(scope="module")
def key_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("key") / "key"
    write_key(path)
    return path


@pytest.fixture(scope="module")
def port(key_file):
    with served(key_file) as (_, port):
        yield port


def rank(port, key_file, rank=0):
    return Environment(
        rank, 3, "", "127.0.0.1", 1, True, "job", key_file=str(key_file), epoch_store=("localhost", port)
    )


def test_the_first_entry_stays(port, key_file):
    store = RemoteStore("127.0.0.1", port, key_file, "first")
    assert store.read("epoch-2") is None
    entry = os.urandom(ENTRY_BYTES)
    assert store.compare_and_set("epoch-2", entry) == entry
    assert store.compare_and_set("epoch-2", b"second") == entry == store.read("epoch-2")


def test_all_that_write_at_once_get_the_same(port, key_file):
    store = RemoteStore("127.0.0.1", port, key_file, "at-once")
    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(lambda n: store.compare_and_set("epoch-2", b"%d" % n), range(12)))) == 1


@pytest.mark.parametrize(("name", "entry"), [("../x", b"x"), ("x" * 201, b"x"), ("a", bytes(ENTRY_BYTES + 1))])
def test_names_and_sizes_are_checked_at_both_ends(port, key_file, name, entry):
    store = RemoteStore("127.0.0.1", port, key_file, "checked")
    with pytest.raises(UsageError):
        store.compare_and_set(name, entry)
    service = BoundedStore()
    with pytest.raises(UsageError):
        service.compare_and_set(f"{service.name()}-{name}", entry)


def test_a_store_that_is_full_keeps_what_it_has():
    for store in (BoundedStore(entries=1), BoundedStore(nbytes=5)):
        first, second = (f"{store.name()}-{name}" for name in "ab")
        assert store.compare_and_set(first, b"three") == b"three"
        with pytest.raises(UsageError, match="it is full"):
            store.compare_and_set(second, b"x")
        assert store.compare_and_set(first, b"x") == b"three"


def test_a_store_that_is_started_anew_decides_nothing_for_jobs_of_the_earlier_one(key_file):
    with served(key_file) as (first, port):
        decisions = decisions_of(rank(port, key_file), "job/1", SESSION)
        first.kill()
        first.wait()
        with served(key_file, port), pytest.raises(ServiceLostError, match="it has been started anew"):
            decisions.decide(Decision(2, (0,)))


def test_ranks_of_one_run_agree_and_other_runs_with_the_same_name_and_key_have_entries_of_their_own(port, key_file):
    of_ranks = [decisions_of(rank(port, key_file, number), "job/1", SESSION) for number in range(2)]
    assert [each.decide(Decision(2, (number,))) for number, each in enumerate(of_ranks)] == [Decision(2, (0,))] * 2
    for world, session in (("job/1", Key(b"of another run")), ("job/2", SESSION)):
        assert decisions_of(rank(port, key_file), world, session).read(2) is None


def test_a_rank_without_the_key_of_the_store_is_told_at_once(port, tmp_path):
    write_key(tmp_path / "other")
    with pytest.raises(ServiceLostError, match=f"with the key in {tmp_path}/other"):
        decisions_of(rank(port, tmp_path / "other"), "job/1", SESSION)
    with pytest.raises(UsageError, match="ASYNCOLL_STORE needs the key of that store"):
        decisions_of(rank(port, ""), "job/1", SESSION)


def test_a_store_ends_at_ctrl_c_and_is_lost_then(key_file):
    with served(key_file) as (process, port):
        decisions = decisions_of(rank(port, key_file), "job/1", SESSION)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (130, "")
    with pytest.raises(ServiceLostError, match=rf"the store of epochs at localhost:{port} does not answer"):
        decisions.read(2)


@pytest.mark.slow
@pytest.mark.parametrize("is_there", [True, False])
def test_ranks_look_for_the_store_as_they_join(is_there, key_file):
    command = [sys.executable, str(SCRIPTS / "world/joins_three_worlds.py")]
    with served(key_file) as (process, port), reserve_port() as holder:
        if not is_there:
            process.kill()
            process.wait()
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(holder.getsockname()[1]), "WORLD_SIZE": "2"}
        environ = os.environ | place | {"ASYNCOLL_KEY_FILE": str(key_file), "ASYNCOLL_STORE": f"127.0.0.1:{port}"}
        ranks = [
            subprocess.Popen(command, env=environ | {"RANK": rank}, stderr=subprocess.PIPE, text=True) for rank in "01"
        ]
        said = [rank.communicate(timeout=PATIENCE_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [int(not is_there)] * 2, said
    assert is_there or all(f"the store of epochs at 127.0.0.1:{port} does not answer" in each for each in said)


@pytest.mark.slow
def test_survivors_go_on_by_it(port, key_file, forked_world):
    place = {"ASYNCOLL_KEY_FILE": str(key_file), "ASYNCOLL_STORE": f"127.0.0.1:{port}"}
    ends = [rank.end() for rank in forked_world(place, 3, SCRIPTS / "world/shrinks.py", "1")]
    assert [(code, out) for code, out, _ in ends] == [(0, "went on\n"), (-signal.SIGKILL, ""), (0, "went on\n")], ends


@pytest.mark.parametrize(
    ("listen", "complaint"),
    [
        ("127.0.0.1", "--listen '127.0.0.1': give HOST:PORT"),
        ("127.0.0.1:65536", "give HOST:PORT"),
        ("fd00::1:5", "give HOST:PORT"),
        ("0.0.0.0:0", "means every interface"),
        ("203.0.113.9:0", "cannot listen on tcp://203.0.113.9:0: Cannot assign requested address; give an address of"),
        ("host0:0", "give the host as localhost, or as the IP address"),
    ],
)
def test_an_impossible_address_is_refused(listen, complaint, key_file):
    told = CliRunner().invoke(cli.main, ["store", "--listen", listen, "--key-file", str(key_file)])
    assert told.exit_code == 2
    assert complaint in " ".join(told.output.split())


def test_a_port_that_is_in_use_is_refused(port, key_file):
    told = CliRunner().invoke(cli.main, ["store", "--listen", f"127.0.0.1:{port}", "--key-file", str(key_file)])
    assert told.exit_code == 2
    assert "Address already in use; give another port, or 0 for a free one\n" in told.output


def test_a_store_needs_a_key(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    told = CliRunner().invoke(cli.main, ["store", "--listen", "127.0.0.1:0"])
    assert told.exit_code == 2
    assert "a store needs a key" in told.output


@pytest.mark.parametrize("text", ["host0", "host0:", ":1", "host0:0", "host0:1x", "::1:5"])
def test_a_wrong_variable_is_refused(text, monkeypatch):
    monkeypatch.setenv("ASYNCOLL_STORE", text)
    with pytest.raises(UsageError, match=r"ASYNCOLL_STORE=.*: give HOST:PORT"):
        asyncoll.run(main)


async def main(comm):
    raise AssertionError("there is no world")
