"""Ranks on several hosts: which addresses they use, and process groups of torch there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

import pytest
from torch.distributed import HashStore

from asyncoll.errors import PeerLostError, UsageError
from asyncoll.testing.contract import _Recorder
from asyncoll.transport.keys import write_key
from asyncoll.transport.messages.split import SplitTransport
from asyncoll.transport.messages.tcp_payloads import TcpPayloads
from asyncoll.transport.messages.zeromq import ZeroMQTransport
from asyncoll.world import meeting
from asyncoll.world.environment import Environment
from tests.support.places import SCRIPTS


@pytest.mark.slow
@pytest.mark.parametrize("case", ["groups", "dies"])
def test_process_groups_of_torch_on_two_hosts(forked_world, tmp_path, case):
    """Ranks 0 and 1 are on one host, rank 2 on another one."""
    write_key(tmp_path / "key")
    hosts = {"RANKS_PER_HOST": "2", "ASYNCOLL_KEY_FILE": str(tmp_path / "key")}
    env = os.environ | {"ASYNCOLL_FREEZE_S": "20", "FOLDER": str(tmp_path)} | hosts
    ranks = forked_world(env, 3, SCRIPTS / "world/on_own_hosts.py", SCRIPTS / "torch/joins_and_leaves.py", case)
    for rank, (code, out, err) in enumerate(rank.end() for rank in ranks):
        assert (case, rank) == ("dies", 1) or (code, out) == (0, "passed\n"), (rank, code, out, err)


def test_a_rank_that_gives_up_joining_can_tell_the_others():
    """Also if the stream for payloads was the first that could not connect."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        refused = f"tcp://127.0.0.1:{server.getsockname()[1]}"

    async def main():
        streams = [ZeroMQTransport(0, 2, b"job"), TcpPayloads(0, 2, b"job")]
        for stream in streams:
            stream.peers = [stream.bind("tcp://127.0.0.1:0"), refused]
        streams[0].are_bound = True
        transport = SplitTransport(*streams, {1})
        with pytest.raises(PeerLostError, match="refuses connections"):
            await transport.start(_Recorder())
        transport.send(1, [b"rank 1 is lost"])
        await transport.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("variables", "address"),
    [({}, None), ({"MASTER_ADDR": "127.0.0.1"}, "127.0.0.1"), ({"ASYNCOLL_ADDRESS": "127.0.0.2"}, "127.0.0.2")],
)
def test_a_store_without_an_address_needs_one_between_hosts(variables, address, monkeypatch):
    for name in ("MASTER_ADDR", "ASYNCOLL_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    environment = Environment.of_store(HashStore(), 0, 2)
    fails = pytest.raises(
        UsageError, match=r"several hosts.*set MASTER_ADDR .*ASYNCOLL_INTERFACE .*or ASYNCOLL_ADDRESS"
    )
    with contextlib.nullcontext() if address else fails:
        assert meeting._place(environment, "") == (address, address)


def test_an_address_that_other_hosts_do_not_reach_is_refused():
    """On some systems the name of a host means a loopback address there, and its address on the network elsewhere."""
    names = ("node0", "node0", "node1")
    for addresses in (["tcp://127.0.0.1:1"] * 3, ["tcp://10.0.0.1:1"] * 3, ["tcp://[fe80::1%eth0]:1"] * 3, [""] * 3):
        meeting._check_reachable(addresses, names)
    with pytest.raises(UsageError, match=r"rank 1 \(host node0\) listens at tcp://127.0.1.1:7,.* as ASYNCOLL_ADDRESS"):
        meeting._check_reachable(["tcp://10.0.0.1:7", "tcp://127.0.1.1:7", "tcp://10.0.0.2:7"], names)
