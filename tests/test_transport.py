"""One contract, every transport."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import uvloop

from asyncoll.testing import Network, check_transport
from asyncoll.transport import inproc, zeromq
from asyncoll.transport.simulated import SimulatedWorld
from asyncoll.transport.virtual_time import VirtualTimeLoop

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.mark.parametrize("loop", LOOPS, ids=["asyncio", "uvloop"])
def test_inproc(loop):
    check_transport(lambda size: contextlib.nullcontext(inproc.world(size)), loop)


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS, ids=["asyncio", "uvloop"])
def test_zeromq(loop):
    check_transport(zeromq.local_world, loop)


@pytest.mark.parametrize(
    "network",
    [Network(), Network(latency_s=1e-3, jitter_s=5e-3), Network(bandwidth_bytes_per_s=1e6, jitter_s=1e-4)],
    ids=["plain", "jitter", "slow"],
)
def test_simulated(network):
    check_transport(
        lambda size: contextlib.nullcontext(SimulatedWorld(size, network, seed=3).transports), VirtualTimeLoop
    )
