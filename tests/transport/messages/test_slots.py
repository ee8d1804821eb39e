"""Payloads in slots of shared memory: the contract of a transport, the owners of slots, and malicious peers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import uvloop

from asyncoll.errors import AbortedError, PeerLostError, ProtocolError, UsageError
from asyncoll.testing import check_transport, run_ranks
from asyncoll.transport import MAX_FRAME_BYTES, wire
from asyncoll.transport.memory import arena
from asyncoll.transport.messages import shared_payloads, zeromq
from asyncoll.transport.messages.shared_payloads import SLOTS, THRESHOLD_BYTES, SlottedTransport
from tests.support.places import SCRIPTS
from tests.support.processes import LIGHT, PATIENCE_S
from tests.support.ranks import Keeper

pytestmark = pytest.mark.slow

LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
SCRIPT = SCRIPTS / "transport/messages/long_messages.py"


@contextlib.contextmanager
def slotted_world(size):
    with zeromq.local_world(size) as transports, arena.local_world(size) as arenas:
        yield list(map(SlottedTransport, transports, arenas))


class Frames(Keeper):
    """A `Receiver` that keeps the frames themselves, and not copies."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def received(self, source, frames):
        self.keep(self.messages, (source, frames))

    def lost(self, loss):
        self.keep(self.losses, loss)

    async def take(self, count=1):
        return [frames for _, frames in await super().take(count)]


def in_world(size, main):
    """Run `main(transports, keepers)` with started transports."""

    async def everything():
        with slotted_world(size) as transports:
            keepers = [Frames() for _ in transports]
            starts = zip(transports, keepers, strict=True)
            try:
                await asyncio.gather(*(transport.start(keeper) for transport, keeper in starts))
                await main(transports, keepers)
            finally:
                for transport in transports:
                    await transport.close()

    asyncio.run(everything())


def long(number, nbytes=THRESHOLD_BYTES):
    return np.random.default_rng(number).integers(0, 256, nbytes, np.uint8)


def owners(transport):
    """The owner cells of all slots of this rank that are not free."""
    return [owner for owner in transport._outgoing._control_block.cells[:SLOTS] if owner]


def in_slot(frame):
    return isinstance(frame, memoryview) and frame.nbytes >= THRESHOLD_BYTES


# -- the contract ---------------------------------------------------------------------------------


@LOOPS
def test_the_contract(loop):
    check_transport(slotted_world, loop)


@LOOPS
def test_the_contract_with_slots_for_everything(loop, monkeypatch):
    monkeypatch.setattr(shared_payloads, "THRESHOLD_BYTES", 0)
    check_transport(slotted_world, loop)


@pytest.mark.parametrize("count", [0, 1])
def test_the_contract_with_few_slots(count, monkeypatch):
    monkeypatch.setattr(shared_payloads, "SLOTS", count)
    monkeypatch.setattr(shared_payloads, "THRESHOLD_BYTES", 1000)
    check_transport(slotted_world)


# -- messages that use a slot ---------------------------------------------------------------------


def test_only_long_payloads_to_other_ranks_use_slots():
    long_, short = bytes(long(1)), bytes(THRESHOLD_BYTES - 1)

    async def main(transports, keepers):
        for dest, payload, slotted in ((1, long_, True), (1, short, False), (0, long_, False)):
            transports[0].send(dest, [b"header", payload])
            ((header, received),) = await keepers[dest].take()
            assert (bytes(header), bytes(received), in_slot(received)) == (b"header", payload, slotted)
        transports[0].send(1, [long_])
        assert [bytes(frame) for frame in (await keepers[1].take())[0]] == [long_], "a header that is long"

    in_world(2, main)


def test_messages_to_other_hosts_use_no_slots():
    async def main(transports, keepers):
        transports[0]._neighbours = frozenset({1})
        for dest in (1, 2):
            transports[0].send(dest, [b"", long(dest)])
            ((_, payload),) = await keepers[dest].take()
            assert in_slot(payload) == (dest == 1)
            assert bytes(payload) == bytes(long(dest))

    in_world(3, main)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, np.asarray])
@pytest.mark.parametrize("piggyback", [[], [b""], [b"piggyback"], [bytes(wire.PIGGYBACK_BYTES)]], ids=len)
def test_payloads_of_every_buffer_type_arrive(kind, piggyback):
    async def main(transports, keepers):
        for number, nbytes in enumerate((THRESHOLD_BYTES, THRESHOLD_BYTES + 1, MAX_FRAME_BYTES)):
            transports[0].send(1, [b"header", kind(long(number, nbytes)), *piggyback])
            ((header, payload, *rest),) = await keepers[1].take()
            assert in_slot(payload)
            assert [bytes(frame) for frame in (header, *rest)] == [b"header", *piggyback]
            assert bytes(payload) == bytes(long(number, nbytes))

    in_world(2, main)


def test_a_payload_is_read_only():
    async def main(transports, keepers):
        transports[0].send(1, [b"", long(1)])
        ((_, payload),) = await keepers[1].take()
        assert payload.readonly

    in_world(2, main)


# -- the owners of slots --------------------------------------------------------------------------


def test_a_slot_is_used_again_after_its_payload_was_dropped():
    async def main(transports, keepers):
        for number in range(3 * SLOTS):
            transports[0].send(1, [b"", long(number)])
            ((_, payload),) = await keepers[1].take()
            assert in_slot(payload)
            assert bytes(payload) == bytes(long(number))
            del payload
            await transports[1].drain(0)
        assert len(transports[0]._outgoing._addresses) <= 2
        assert owners(transports[0]) == []

    in_world(2, main)


def test_without_free_slots_messages_carry_their_payloads():
    async def main(transports, keepers):
        for number in range(SLOTS + 5):
            transports[0].send(1, [b"", long(number)])
            await transports[0].drain(1)
        held = [payload for _, payload in await keepers[1].take(SLOTS + 5)]
        assert [in_slot(payload) for payload in held] == [True] * SLOTS + [False] * 5
        assert owners(transports[0]) == [-2] * SLOTS

        del held[3]
        for number in (100, 101):
            transports[0].send(1, [b"", long(number)])
        transports[1].send(0, [b"other"])  # `send` returns the slot of the dropped payload
        transports[0].send(1, [b"", long(102)])
        later = [payload for _, payload in await keepers[1].take(3)]
        assert [in_slot(payload) for payload in later] == [False, False, True]

        numbers = [*range(3), *range(4, SLOTS + 5), 100, 101, 102]
        assert [bytes(payload) for payload in held + later] == [bytes(long(number)) for number in numbers]
        held.clear()
        later.clear()
        await transports[1].drain(0)
        assert owners(transports[0]) == []
        assert len(transports[0]._outgoing._addresses) == SLOTS

    in_world(2, main)


@pytest.mark.parametrize(
    "part_of",
    [
        lambda payload: payload[10:20],
        lambda payload: payload.cast("i")[5:],
        lambda payload: np.frombuffer(payload, np.uint8)[7:].view(),
        lambda payload: np.asarray(payload)[::1000].reshape(-1, 1),
    ],
    ids=["slice", "cast", "frombuffer", "asarray"],
)
def test_a_view_of_a_payload_keeps_the_slot(part_of):
    async def main(transports, keepers):
        transports[0].send(1, [b"", long(1)])
        ((_, payload),) = await keepers[1].take()
        part = part_of(payload)
        del payload
        await transports[1].drain(0)
        assert owners(transports[0]) == [-2]
        del part
        await transports[1].drain(0)
        assert owners(transports[0]) == []

    in_world(2, main)


def test_a_payload_may_be_dropped_while_its_lock_is_held():
    async def main(transports, keepers):
        transports[0].send(1, [b"", long(1)])
        ((_, payload),) = await keepers[1].take()
        with transports[1]._incoming.control_blocks[0]:
            del payload
        assert owners(transports[0]) == [-2]
        transports[1].send(0, [b"other"])
        assert owners(transports[0]) == []

    in_world(2, main)


def test_payloads_may_be_dropped_in_other_threads():
    async def main(transports, keepers):
        checked = []

        def check(number):
            checked.append(bytes(held.pop(number)[1]) == bytes(long(number)))

        for start in range(0, 4 * SLOTS, SLOTS // 2):
            held = {}
            for number in range(start, start + SLOTS // 2):
                transports[0].send(1, [b"", long(number)])
                (held[number],) = await keepers[1].take()
            threads = [threading.Thread(target=check, args=(number,)) for number in held]
            for thread in threads:
                thread.start()
            transports[1].send(0, [b"meanwhile"])
            for thread in threads:
                thread.join()
        assert checked == [True] * 4 * SLOTS
        await transports[1].drain(0)
        assert owners(transports[0]) == []

    in_world(2, main)


def test_without_memory_left_messages_carry_their_payloads(monkeypatch):
    def refuse(*_):
        tried.append(1)
        raise UsageError("the host has not so much left")

    tried = []

    async def main(transports, keepers):
        monkeypatch.setattr(transports[0]._arena, "allocate", refuse)
        for _ in range(3):
            transports[0].send(1, [b"", long(1)])
        for _, payload in await keepers[1].take(3):
            assert not in_slot(payload)
            assert bytes(payload) == bytes(long(1))
        assert tried == [1], "the failed allocation is not repeated"

    in_world(2, main)


def test_a_payload_in_a_slot_outlives_its_sender():
    async def main(transports, keepers):
        transports[0].send(1, [b"", long(1)])
        await transports[0].close(flush=True)
        transports[0].send(1, [b"", long(2)])
        await keepers[1].until(lambda: keepers[1].losses)
        ((_, payload),) = await keepers[1].take()
        assert bytes(payload) == bytes(long(1))
        assert keepers[1].messages == []

    in_world(2, main)


# -- untrusted input ------------------------------------------------------------------------------

HEADER = wire.encode(wire.DATA, 1, 1, 1, 1, 1)
TAKEN, FOR_ANOTHER, FREE = 0, 1, 2  # slots of rank 0, in the state that rank 1 finds


@pytest.mark.parametrize(
    "frames",
    [
        [HEADER, bytes([FREE, 2]), b"", b""],
        [HEADER, bytes([FOR_ANOTHER, 2]), b"", b""],
        [HEADER, bytes([SLOTS, 2]), b"", b""],
        [HEADER, bytes([255, 255]), b"", b""],
        [HEADER, bytes([TAKEN, 0]), b"", b""],
        [HEADER, bytes([TAKEN, 1]), b"", b""],
        [HEADER, bytes([TAKEN, 4]), b"", b""],
        [HEADER, b"", b"", b""],
        [HEADER, bytes([TAKEN]), b"", b""],
        [HEADER, bytes([TAKEN, 2, 0]), b"", b""],
        [HEADER, bytes(MAX_FRAME_BYTES), b"", b""],
        [b"", bytes([TAKEN, 2]), b"", b""],
        [HEADER, bytes([TAKEN, 3]), bytes(wire.PIGGYBACK_BYTES + 1), b""],
        [HEADER, bytes([TAKEN, 2]), b"", b"", b""],
    ],
)
def test_markers_are_not_trusted(frames):
    """The receiver gets frames that `wire.decode` rejects."""

    async def main(transports, keepers):
        control_block = transports[0]._outgoing._control_block
        transports[0]._outgoing._allocate()
        with control_block:
            control_block.cells[TAKEN], control_block.cells[2 * SLOTS + TAKEN] = 2, THRESHOLD_BYTES
            control_block.cells[SLOTS + TAKEN] = transports[0]._outgoing._addresses[0]
            control_block.cells[FOR_ANOTHER] = 3
        transports[0]._inner.send(1, frames)
        (received,) = await keepers[1].take()
        with pytest.raises(ProtocolError):
            wire.decode(received)

    in_world(3, main)


@pytest.mark.parametrize(
    ("address", "nbytes"),
    [(-64, 64), (1 << 62, 64), (0, -1), (0, MAX_FRAME_BYTES + 1), ("end", 64), (-(1 << 63), (1 << 63) - 1)],
)
def test_control_blocks_are_not_trusted(address, nbytes):
    async def main(transports, keepers):
        where = transports[0]._arena._capacity - nbytes // 2 if address == "end" else address
        with transports[0]._outgoing._control_block as control_block:
            control_block.cells[0], control_block.cells[SLOTS], control_block.cells[2 * SLOTS] = 2, where, nbytes
        transports[0]._inner.send(1, [HEADER, bytes([0, 2]), b"", b""])
        (received,) = await keepers[1].take()
        with pytest.raises(ProtocolError):
            wire.decode(received)

    in_world(2, main)


def test_a_payload_cannot_be_received_twice():
    async def main(transports, keepers):
        transports[0].send(1, [HEADER, long(1)])
        transports[0]._inner.send(1, [HEADER, bytes([0, 2]), b"", b""])
        first, second = await keepers[1].take(2)
        assert bytes(first[1]) == bytes(long(1))
        with pytest.raises(ProtocolError):
            wire.decode(second)

    in_world(2, main)


def test_a_bad_marker_ends_the_world_and_names_its_source():
    async def main(comm):
        if comm.rank == 0:
            comm._core.member.endpoint.transport._inner.send(1, [HEADER, b"\xff\xff", b"", b""])
        await comm.recv(np.empty(1), 1 - comm.rank)

    with pytest.raises(ProtocolError, match=r"rank 0 broke the protocol: .* got 4") as caught:
        run_ranks(2, main, transport="shm")
    assert caught.value.source == 0


def test_a_rank_that_died_with_the_lock_of_a_control_block_is_lost():
    """The lock reports the loss to the rank that reads a message there. Other messages still pass."""
    reports = []

    def report(loss):
        reports.append(loss)
        return AbortedError(0, "the world has failed before")

    async def main(transports, keepers):
        transports[1]._arena.on_loss(report)
        transports[0].send(1, [b"one", long(1)])
        await keepers[1].take()
        thread = threading.Thread(target=transports[2]._incoming.control_blocks[0].__enter__)
        thread.start()  # for a robust mutex, a thread that ends is an owner that dies
        thread.join()
        transports[0].send(1, [b"two", long(2)])
        (frames,) = await keepers[1].take()
        assert (bytes(frames[1]), in_slot(frames[1])) == (bytes(long(2)), False)
        transports[0]._inner.send(1, [b"three", bytes([0, 2]), b"", b""])
        transports[0].send(1, [b"four"])
        assert [[bytes(frame) for frame in frames] for frames in await keepers[1].take()] == [[b"four"]]
        assert [loss.rank for loss in reports] == [2]
        with pytest.raises(PeerLostError, match="rank 2 is gone"), transports[0]._outgoing._control_block:
            pass

    in_world(3, main)


# -- whole worlds ---------------------------------------------------------------------------------


def test_messages_that_wait_for_their_receives_arrive_intact():
    """More messages than slots wait at the receiver before the first receive is posted."""

    async def main(comm):
        count = SLOTS + SLOTS // 2  # fits into the window of the endpoint
        if comm.rank == 0:
            for number in range(count):
                await comm.send(long(number, MAX_FRAME_BYTES), 1, tag=number)
        await comm.barrier()
        if comm.rank == 1:
            for number in reversed(range(count - 5)):
                received = await comm.recv(np.empty(MAX_FRAME_BYTES, np.uint8), 0, tag=number)
                assert np.array_equal(received, long(number, MAX_FRAME_BYTES))

    run_ranks(2, main, transport="shm")


def test_real_processes(tmp_path):
    temporary = tmp_path / "t"
    temporary.mkdir()
    command = [sys.executable, "-W", "error", "-m", "asyncoll", "launch", "-n", "3", str(SCRIPT)]
    env = os.environ | LIGHT | {"TMPDIR": str(temporary)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(line.partition(": ")[2] for line in done.stdout.splitlines()) == [
        f"{rank}: all right" for rank in range(3)
    ]
    assert not list(temporary.glob("asyncoll*")), "folders of sockets are left"
