"""Ranks on hosts that are network namespaces: which addresses they use, and what they say if these do not connect."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from conftest import ForkedRank, case

from asyncoll.transport.keys import write_key

SCRIPTS = Path(__file__).parent / "scripts"
HOSTS = "abc"
OURS = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "TORCHELASTIC_", "ASYNCOLL_")
PORTS = itertools.count(29_500)
pytestmark = pytest.mark.slow


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def address(host, network=0):
    return f"10.7{8 + network}.0.{1 + HOSTS.index(host)}"


@pytest.fixture(scope="module")
def networks():
    """Three hosts on two networks: eth0, with IPv4 and IPv6, and eth1, with IPv4. The names of their namespaces."""
    prefix = f"addresses-{os.getpid()}"
    names = {host: f"{prefix}-{host}" for host in HOSTS}
    with contextlib.ExitStack() as undo:
        try:
            for name in (prefix, *names.values()):
                ip("netns", "add", name)
                undo.callback(ip, "netns", "del", name)
            for network in (0, 1):
                ip("-n", prefix, "link", "add", f"bridge{network}", "type", "bridge")
                ip("-n", prefix, "link", "set", f"bridge{network}", "up")
                for host, name in names.items():
                    own, port = f"eth{network}", f"{host}{network}"
                    ip("link", "add", own, "netns", name, "type", "veth", "peer", "name", port, "netns", prefix)
                    ip("-n", prefix, "link", "set", port, "master", f"bridge{network}", "up")
                    ip("-n", name, "addr", "add", f"{address(host, network)}/24", "dev", own)
                    if network == 0:
                        ip("-n", name, "addr", "add", f"fd00::{1 + HOSTS.index(host)}/64", "dev", own, "nodad")
                    ip("-n", name, "link", "set", own, "up")
            for name in names.values():
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', '') or error}")
        yield names


@pytest.fixture
def start(networks, template, tmp_path):
    """Starts one rank on each of the `hosts`: `start(hosts, {host: variables}, **variables of all)`."""
    write_key(tmp_path / "key")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    with contextlib.ExitStack() as stack:

        def started(hosts, of_host=None, **more):
            port, ranks = next(PORTS), []
            for rank, host in enumerate(hosts):
                folder = tmp_path / f"{port} {rank}"
                folder.mkdir()
                temporary = tmp_path / f"{port} {host}"
                temporary.mkdir(exist_ok=True)
                chosen = {"MASTER_ADDR": address(hosts[0]), **more, **(of_host or {}).get(host, {})}
                (folder / "hosts").write_text(chosen.pop("names", ""))
                place = {"RANK": str(rank), "WORLD_SIZE": str(len(hosts)), "MASTER_PORT": str(port)}
                here = {"NAMESPACE": networks[host], "HOST": host, "HOSTS": str(folder / "hosts")}
                world = {
                    "ASYNCOLL_KEY_FILE": str(tmp_path / "key"),
                    "ASYNCOLL_FREEZE_S": "20",
                    "TMPDIR": str(temporary),
                }
                command = [SCRIPTS / "namespace.py", SCRIPTS / "reaching.py"]
                ranks.append(ForkedRank(template, command, plain | place | here | world | chosen, folder))
                stack.callback(ranks[-1].kill)
            return ranks

        yield started


def ends(ranks):
    """What each rank has said."""
    found = []
    for rank in ranks:
        code, out, err = rank.end()
        assert code == 0, err
        found.append({**json.loads(out), "wrote": err})
    return found


NAMED = "127.0.0.1 localhost\n10.78.0.1 a\nfd00::1 a\n"


@pytest.mark.parametrize(
    ("variables", "listens"),
    [
        ({}, "10.78.0."),
        ({"ASYNCOLL_INTERFACE": "ib0, eth1"}, "10.79.0."),
        ({"MASTER_ADDR": "fd00::1"}, "[fd00::"),
        ({"MASTER_ADDR": "[fd00::1]", "ASYNCOLL_ENCRYPT": "all"}, "[fd00::"),
        ({"MASTER_ADDR": "a", "names": NAMED}, ("10.78.0.", "[fd00::")),
        ({"ASYNCOLL_PORTS": "30000-30003"}, "10.78.0."),
    ],
)
def test_ranks_listen_where_they_are_told(start, variables, listens):
    for end in ends(start("ab", **variables)):
        assert end.get("result") == 2.0, end
        urls = [peer.removeprefix("tcp://").rpartition(":") for peer in end["peers"] if peer.startswith("tcp:")]
        assert urls, end
        assert all(host.startswith(listens) for host, _, _ in urls), end
        assert "ASYNCOLL_PORTS" not in variables or {30_000 <= int(port) <= 30_003 for *_, port in urls} == {True}, end


def test_clocks_of_hosts_may_be_hours_apart(start):
    assert [end.get("result") for end in ends(start("ab", {"b": {"LATE_S": "7200"}}))] == [2.0, 2.0]


UNLIKE = [
    ({"b": {"VERSION": "0.0.7"}}, r"different versions of asyncoll: .*0\.0\.7 \(rank 1, host b\)"),
    ({"b": {"ASYNCOLL_INTERFACE": "ib7"}}, r"ASYNCOLL_INTERFACE=ib7: this host \(b\) has no such interface"),
    ({"b": {"ASYNCOLL_ADDRESS": "192.0.2.1"}}, r"192\.0\.2\.1 is no address of this host \(b has .*NAT"),
]
APART = [
    (
        {"a": {"MASTER_ADDR": "a", "names": "127.0.1.1 a\n"}, "b": {"MASTER_ADDR": "a", "names": NAMED}},
        r"not in the store at 127\.0\.1\.1:|MASTER_ADDR must be an address of rank 0's host",
    ),
    ({"b": {"MASTER_ADDR": "nowhere"}}, r"not in the store|MASTER_ADDR must be an address of rank 0's host"),
]
UNREACHABLE = {"a": {"ASYNCOLL_ADDRESS": "192.0.2.1", "ASYNCOLL_INTERFACE": "eth1"}}


def test_hosts_that_do_not_meet_say_what_to_set(start):
    """The worlds form, and wait for their deadlines, at the same time."""
    unlike = [(start("ab", of_host), complaint) for of_host, complaint in UNLIKE]
    apart = [(start("ab", of_host, ASYNCOLL_DEADLINE_S="4"), complaint) for of_host, complaint in APART]
    unreachable = start("ab", UNREACHABLE, ASYNCOLL_DEADLINE_S="4")
    for ranks, complaint in [*unlike, *apart]:
        with case(complaint=complaint):
            for end in ends(ranks):
                assert re.search(complaint, end.get("text", "")), end
    heard, said = ends(unreachable)
    assert heard["error"] in ("DeadlineError", "PeerLostError"), heard  # it may see only that rank 1 has given up
    assert "(b) gets no answer from tcp://192.0.2.1:" in said["text"], said
    assert "of rank 0; set ASYNCOLL_INTERFACE" in said["text"], said


def test_hosts_with_different_keys_name_each_other(start, tmp_path):
    write_key(tmp_path / "other")
    for rank, end in enumerate(ends(start("ab", {"b": {"ASYNCOLL_KEY_FILE": str(tmp_path / "other")}}))):
        assert (
            f"the nonce of rank {1 - rank} (host '{'ba'[rank]}') is not sealed with the key of this job" in end["text"]
        )
