"""Messages of earlier and later epochs: dropped and kept; windows and early messages, which begin anew."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import numpy as np
import pytest

from asyncoll import ProtocolError
from asyncoll.communicator import Communicator
from asyncoll.runtime.executions import WINDOW_BYTES
from asyncoll.runtime.failures import WORLD
from asyncoll.runtime.router import EARLY_MAX
from asyncoll.testing import Network, run_ranks, simulate
from asyncoll.transport import wire
from asyncoll.transport.wire import SEGMENT_BYTES

Main = Callable[[Communicator], Coroutine[Any, Any, object]]


def simulated(size: int, main: Main) -> list[object]:
    return simulate(size, main, Network(jitter_s=5e-5)).results


def over(transport: str) -> Callable[[int, Main], list[object]]:
    return partial(run_ranks, transport=transport)


@pytest.mark.parametrize("run", [simulated, over("inproc"), over("zmq")], ids=["simulated", "inproc", "zmq"])
@pytest.mark.parametrize("size", [*range(2, 10), 13, 17])
def test_ranks_enter_an_epoch_one_after_another(size, run):
    """What the first ones send waits at the others: arrays, rounds and announcements."""

    async def main(comm: Communicator) -> list[float]:
        sums = []
        for epoch in range(2, 5):
            await asyncio.sleep(1e-3 * ((comm.rank * epoch) % size))
            comm = await comm.shrink()
            assert comm.epoch == epoch
            for _ in range(3):
                sums.append((await comm.allreduce(np.full(3, float(comm.rank))))[0])
                ones = np.ones(3)
                await comm.solo_allreduce(ones, sync_every=1)
                sums.append(ones[0])
            await comm.barrier()
        return sums

    assert run(size, main) == [[size * (size - 1) / 2, float(size)] * 9] * size


def test_windows_begin_anew():
    """In each epoch rank 0 sends as much as the window has room for, of which rank 1 receives one array."""

    async def main(comm: Communicator) -> None:
        x = np.ones(SEGMENT_BYTES, np.uint8)
        for _ in range(3):
            comm = await comm.shrink()
            if comm.rank == 0:
                for tag in range(WINDOW_BYTES // SEGMENT_BYTES - 1):
                    await comm.send(x, 1, tag=tag)
            else:
                await comm.recv(np.empty_like(x), 0, tag=0)
            await comm.barrier()

    simulated(2, main)


def test_what_is_of_an_earlier_epoch_is_dropped():
    """Without credit, answer or dispute; an abort of it ends nothing."""

    async def main(comm: Communicator) -> None:
        comm = await comm.shrink()
        endpoint = comm._core.member.endpoint
        if comm.rank:
            sent, received = endpoint.traffic.messages_sent, endpoint.traffic.messages_received
            for kind in (wire.GRANT, wire.CREDIT, wire.OFFER, wire.CHECK):
                endpoint.received(0, [wire.encode(kind, 1, 7, 1 << 40, 3, 4)])
            endpoint.received(0, [wire.encode(wire.DATA, 1, 7, 1, 3, 4), bytes(WINDOW_BYTES // 2)[:SEGMENT_BYTES]])
            endpoint.received(0, [wire.encode(wire.SIGNAL, 1, 7, 1, 3, 4), b""])
            endpoint.received(0, wire.encode_control(wire.Abort(WORLD, 0, "long ago"), 1))
            endpoint.received(0, wire.encode_control(wire.Unused(7), 1))
            assert (endpoint.traffic.messages_sent, endpoint.traffic.messages_received) == (sent, received + 8)
            assert not endpoint.executions._early
            assert not endpoint.router._early_count
        assert (await comm.allreduce(np.ones(3)))[0] == comm.size

    simulated(2, main)


FLOODS = {
    "data": ([wire.encode(wire.DATA, 9), bytes(SEGMENT_BYTES)], WINDOW_BYTES // SEGMENT_BYTES),
    "signals": ([wire.encode(wire.SIGNAL, 9), b""], EARLY_MAX + 1),
    "control": (wire.encode_control(wire.Unused(7), 9), EARLY_MAX + 1),
}


@pytest.mark.parametrize("what", FLOODS)
def test_what_is_of_later_epochs_is_bounded(what):
    frames, count = FLOODS[what]

    async def main(comm: Communicator) -> None:
        endpoint = comm._core.member.endpoint
        await comm.barrier()
        if comm.rank == 1:
            for _ in range(count - 1):
                endpoint.received(0, frames)
            assert not endpoint.failures.any
            endpoint.received(0, frames)
        await comm.barrier()

    with pytest.raises(ProtocolError, match="later epoch"):
        simulated(2, main)
