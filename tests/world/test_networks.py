"""Ranks on hosts that are network namespaces: which addresses they use, and what they say if these do not connect."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from asyncoll.transport.keys import write_key
from asyncoll.transport.processes import is_gone
from tests.support.places import SCRIPTS
from tests.support.processes import PATIENCE_S, ForkedRank

HOSTS = "abc"
OURS = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "TORCHELASTIC_", "ASYNCOLL_")
PORTS = itertools.count(29_500)
pytestmark = pytest.mark.slow


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=PATIENCE_S)


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
                # So that the rules of `block` precede, and a packet that is refused is answered.
                ip("-n", name, "rule", "add", "pref", "100", "lookup", "local")
                ip("-n", name, "rule", "del", "pref", "0")
                ip("netns", "exec", name, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/conf/all/forwarding")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', '') or error}")
        yield names


@pytest.fixture
def block(networks):
    """A firewall: `block(host, ports, answer)` drops ("blackhole") or rejects ("prohibit") what comes to these ports.

    It comes on `interface`, which is "lo" for what the host sends itself.

    A rule of routing does that; it needs no package.
    """
    with contextlib.ExitStack() as undo:

        def blocked(host, ports, answer, interface="eth0"):
            rule = ["iif", interface, "ipproto", "tcp", "dport", ports, answer]
            ip("-n", networks[host], "rule", "add", "pref", "10", *rule)
            undo.callback(ip, "-n", networks[host], "rule", "del", *rule)

        yield blocked


@pytest.fixture
def start(networks, template, tmp_path):
    """Starts one rank on each of the `hosts`: `start(hosts, {host: variables}, **variables of all)`.

    `first` is the first of these ranks, and `size` that of their world.
    """
    write_key(tmp_path / "key")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    with contextlib.ExitStack() as stack:
        short = Path(stack.enter_context(tempfile.TemporaryDirectory()))  # the path of a socket has 108 bytes at most

        def started(hosts, of_host=None, *, first=0, size=0, **more):
            ranks = []
            more = {"MASTER_ADDR": address(hosts[0]), "MASTER_PORT": str(next(PORTS)), **more}
            for rank, host in enumerate(hosts, first):
                folder = Path(tempfile.mkdtemp(dir=tmp_path))
                temporary = short / f"{more['MASTER_PORT']} {host}"
                temporary.mkdir(exist_ok=True)
                chosen = {**more, **(of_host or {}).get(host, {})}
                (folder / "hosts").write_text(chosen.pop("names", ""))
                place = {"RANK": str(rank), "WORLD_SIZE": str(size or len(hosts))}
                here = {"NAMESPACE": networks[host], "HOST": host, "HOSTS": str(folder / "hosts")}
                world = {
                    "ASYNCOLL_KEY_FILE": str(tmp_path / "key"),
                    "ASYNCOLL_FREEZE_S": "20",
                    "TMPDIR": str(temporary),
                }
                command = [SCRIPTS / "world/in_network_namespace.py", SCRIPTS / "world/joins_and_prints_addresses.py"]
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


def await_words(rank, words):
    """Until the rank, which waits for others, has logged these words."""
    while words not in rank.wrote():
        assert not is_gone(rank.pid)
        threading.Event().wait(0.01)


OWN, OTHER = "10.78.0.1 a\n", "10.78.0.3 a\n"
NAMED = "127.0.0.1 localhost\n10.78.0.1 a\nfd00::1 a\n"


@pytest.mark.parametrize(
    ("variables", "listens"),
    [
        ({}, "10.78.0."),
        ({"ASYNCOLL_INTERFACE": "ib0, eth1"}, "10.79.0."),
        ({"MASTER_ADDR": "fd00::1"}, "[fd00::"),
        ({"MASTER_ADDR": "[fd00::1]", "ASYNCOLL_ENCRYPT": "all"}, "[fd00::"),
        ({"MASTER_ADDR": "a", "names": NAMED}, ("10.78.0.", "[fd00::")),
        # The first refuses, to the second there is no route, and the third does not answer.
        ({"MASTER_ADDR": "a", "names": "10.79.0.3 a\n2001:db8::1 a\n10.79.0.9 a\n10.78.0.1 a\n"}, "10.78.0."),
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


def test_a_rank_behind_a_nat_is_reached_at_its_advertised_address(start, networks):
    """Host c stands for the NAT."""
    command = [sys.executable, SCRIPTS / "world/relays_connections.py", address("c"), address("b"), "30000", "30001"]
    within = ["ip", "netns", "exec", networks["c"], *map(str, command)]
    with subprocess.Popen(within, stdout=subprocess.PIPE, text=True) as relay:
        try:
            assert relay.stdout.readline() == "listens\n"
            behind = {"ASYNCOLL_ADDRESS": address("c"), "ASYNCOLL_INTERFACE": "eth0", "ASYNCOLL_PORTS": "30000-30001"}
            ranks = ends(start("ab", {"b": behind}))
        finally:
            relay.kill()
    assert [end.get("result") for end in ranks] == [2.0] * 2, ranks
    assert {"tcp://10.78.0.3:30000", "tcp://10.78.0.3:30001"} < {*ranks[0]["peers"]}


@pytest.mark.skipif(not Path("/proc/self/ns/time").exists(), reason="the kernel has no time namespaces")
def test_clocks_of_hosts_may_be_days_apart(start):
    """Two ranks of host b have clocks of their own, as in containers, so they do not share the times in an arena."""
    first, *others = ends(start("abb", {"b": {"AHEAD_S": "700000"}}))
    assert [end.get("result") for end in (first, *others)] == [3.0] * 3
    assert min(end["clock_s"] for end in others) > first["clock_s"] + 600_000
    assert [sum(peer.startswith("ipc:") for peer in end["peers"]) for end in others] == [1, 1], others  # its own


def test_hosts_that_do_not_meet_say_what_to_set(start):
    """Most of them wait for their deadline, side by side."""
    master = r"MASTER_ADDR must be an address of rank 0's host"
    loopback = r"the store at 127\.0\.1\.1:\d+, which only this host reaches .*set MASTER_ADDR"
    cases = [
        ({"b": {"VERSION": "0.0.7"}}, r"different versions of asyncoll: .*0\.0\.7 \(rank 1, host b\)"),
        ({"b": {"ASYNCOLL_PORTS": "30000-30000"}}, r"30000-30000 are in use; each rank of a host needs two of them"),
        ({"b": {"ASYNCOLL_INTERFACE": "ib7"}}, r"ASYNCOLL_INTERFACE=ib7: this host \(b\) has no such interface"),
        ({"b": {"ASYNCOLL_ADDRESS": "192.0.2.1"}}, r"192\.0\.2\.1 is no address of this host \(b has .*NAT"),
        ({"a": {"names": "127.0.1.1 a\n"}, "b": {"names": NAMED}}, f"{loopback}|{master}"),
        ({"a": {"names": OWN}, "b": {"names": OTHER}}, f"not in the store at 10.78.0.1:|{master}"),
        ({"a": {"names": OTHER}, "b": {"names": OWN}}, f"MASTER_ADDR=a.*: 10.78.0.3 is no address|{master}"),
        ({"a": {"names": OWN}}, f"not in the store at 10.78.0.1:|{master}"),
        ({"b": {"names": OWN}}, f"MASTER_ADDR=a is not the name of a host: .* for rank 0 it must be|{master}"),
    ]
    worlds = []
    for of_host, complaint in cases:
        waits = any("names" in variables for variables in of_host.values())
        more = {"MASTER_ADDR": "a", "ASYNCOLL_DEADLINE_S": "2"} if waits else {}
        worlds.append((start("ab", of_host, **more), complaint))
    for ranks, complaint in worlds:
        for end in ends(ranks):
            assert re.search(complaint, end.get("text", "")), (complaint, end)


FIREWALLS = [  # at host b: its ports, that which is closed, what a packet to it finds, and the variables of all
    ("30000-30001", "30000", "prohibit", {}),
    ("30002-30003", "30002", "blackhole", {"ASYNCOLL_ENCRYPT": "all"}),
    ("30004-30005", "30005", "blackhole", {}),  # of the connection for payloads alone
]


def test_a_firewall_is_an_error_at_all_ranks(start, block):
    worlds = []
    for ports, closed, answer, more in FIREWALLS:
        block("b", closed, answer)
        worlds.append((closed, start("ab", {"b": {"ASYNCOLL_PORTS": ports}}, ANSWER_S="0.5", **more)))
    block("c", "29500-29999", "blackhole")
    outside = start("cb", ASYNCOLL_DEADLINE_S="2")
    named = start("cb", MASTER_ADDR="c", names="10.78.0.3 c\n10.79.0.3 c\n", ASYNCOLL_DEADLINE_S="2")
    block("a", "29498", "blackhole", "lo")
    alone = start("a", size=2, MASTER_PORT="29498", ASYNCOLL_DEADLINE_S="2")
    for closed, ranks in worlds:
        missed, told = ends(ranks)
        said = (
            rf"host \(a\) gets no answer from tcp://10\.78\.0\.2:{closed} of rank 1 .*: set .*ASYNCOLL_PORTS, and open"
        )
        assert missed["error"] == "UsageError", missed
        assert re.search(said, missed["text"]), missed
        assert re.search(rf"rank 0 .*could not join.*{said}", told["text"]), told
    serves, waits = ends(outside)
    assert re.search(r"rank 1 \(not in the store at 10\.78\.0\.3:\d+, which their hosts must reach", serves["text"]), (
        serves
    )
    assert re.search(r"store at 10\.78\.0\.3:\d+: .*; MASTER_ADDR must be .*MASTER_PORT open", waits["text"]), waits
    answers = r"no answer \(10\.78\.0\.3\), Connection refused \(10\.79\.0\.3\)"
    assert re.search(rf"at c:\d+: {answers}; .*as a number, if the name has several", ends(named)[1]["text"])
    assert (
        "does not reach its own store at 10.78.0.1:29498: its host is overloaded, or has a firewall there"
        in ends(alone)[0]["text"]
    )


def test_a_second_job_at_one_port_is_refused_and_the_first_goes_on(start):
    first = start("ab", size=3, MASTER_PORT="29499")
    await_words(first[0], "waiting for rank 2 (")
    here, there = ends(start("ab", size=3, MASTER_PORT="29499"))
    assert "rank 0 cannot listen on MASTER_ADDR=10.78.0.1, MASTER_PORT=29499" in here["text"], here
    assert re.search(r"rank 1 of the world .* is process \d+ on host b already", there["text"]), there
    late = start("b", first=2, size=3, MASTER_ADDR=address("a"), MASTER_PORT="29499")
    joined = ends(first + late)
    assert [end.get("result") for end in joined] == [3.0] * 3, joined


def test_hosts_with_different_keys_name_each_other(start, tmp_path):
    write_key(tmp_path / "other")
    for rank, end in enumerate(ends(start("ab", {"b": {"ASYNCOLL_KEY_FILE": str(tmp_path / "other")}}))):
        assert (
            f"the nonce of rank {1 - rank} (host '{'ba'[rank]}') is not sealed with the key of this job" in end["text"]
        )


def test_a_rank_without_a_key_is_named(start):
    here, there = ends(start("ab", {"b": {"ASYNCOLL_KEY_FILE": "", "HOME": "/nowhere"}}))
    assert "of rank 1 (host 'b') is not sealed with the key of this job (rank 1 has none): give all" in here["text"]
    assert "of rank 0 (host 'a') is not sealed with the key of this job (rank 1, host b, has none)" in there["text"]


def test_an_address_at_which_another_rank_listens_is_named(start):
    here = {"ASYNCOLL_PORTS": "30006-30007"}
    other = {"ASYNCOLL_ADDRESS": address("c"), "ASYNCOLL_INTERFACE": "eth0"}
    ranks = ends(start("abc", {"b": here | other, "c": here}, ANSWER_S="0.5"))
    said = r"tcp://10\.78\.0\.3:30007 answers this host \([ac]\), but not as rank 1 of this job: .*ASYNCOLL_ADDRESS"
    assert [bool(re.search(said, end.get("text", ""))) for end in ranks] == [True] * 3, ranks


def test_a_network_that_drops_long_packets_is_named(start, networks):
    """A port of the switch carries less than the interfaces of the hosts, and switches say nothing about that."""
    switch = networks["a"].removesuffix("-a")
    for host in "abc":  # whose packets are to be no longer than the network's
        ip("-n", networks[host], "link", "set", "eth0", "gso_max_segs", "1")
    ip("-n", switch, "link", "set", "b0", "mtu", "400")  # less than what the store has to say to a rank
    ip("-n", switch, "link", "set", "c0", "mtu", "1400")
    try:
        *_, last = start("aaab")
        worlds = [start("ac", ANSWER_S="0.5", ASYNCOLL_ENCRYPT=encrypt) for encrypt in ("control", "all")]
        for end in (end for ranks in worlds for end in ends(ranks)):
            said = r"has connected to tcp://10\.78\.0\.\d:\d+ of rank \d, but long packets do not arrive .*set the MTU"
            assert re.search(said, end.get("text", "")), end
        await_words(last, "which serves the store, and it does not answer: its process is stopped, or the network")
    finally:
        for port in ("b0", "c0"):
            ip("-n", switch, "link", "set", port, "mtu", "1500")


def test_a_rank_that_gets_no_answer_says_from_where_and_what_to_set(start):
    unreachable = {"a": {"ASYNCOLL_ADDRESS": "192.0.2.1", "ASYNCOLL_INTERFACE": "eth1"}}
    told, missed = ends(start("ab", unreachable, ANSWER_S="0.5"))
    assert missed["error"] == "UsageError", missed
    said = r"\(b\) gets no answer from tcp://192\.0\.2\.1:\d+ of rank 0 .*: set ASYNCOLL_INTERFACE"
    for end in (told, missed):
        assert re.search(said, end["text"]), end
