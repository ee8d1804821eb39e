"""Connections for long payloads between hosts: who may connect, what arrives, and what is left when one ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import select
import socket
import struct
from types import SimpleNamespace

import numpy as np
import pytest
import uvloop

from asyncoll import forks
from asyncoll.errors import ProtocolError, UsageError
from asyncoll.transport import MAX_FRAME_BYTES, Loss
from asyncoll.transport.keys import Key
from asyncoll.transport.messages import payload_handshake, reach, tcp_payloads
from asyncoll.transport.messages.payload_stream import HEAD_BYTES, Long, PayloadMemory, PayloadReader, PayloadWriter
from asyncoll.transport.messages.split import SplitTransport
from asyncoll.transport.messages.tcp_payloads import TcpPayloads
from asyncoll.world import network
from tests.support.processes import PATIENCE_S

JOB = b"the secret of a run"
KEY = b"of one stream"


def long(payload, *third):
    return Long(0, [b"first", payload, *third])


def stream_of(messages, key=KEY):
    """The bytes of these messages on a connection."""
    writer, stream = PayloadWriter(key), bytearray()

    def write(parts):
        stream.extend(b"".join(parts))
        return sum(map(len, parts))

    writer._write = write
    for message in messages:
        writer.send(message)
    return bytes(stream)


class Rank:
    """One rank, what it has received, and which ranks it has lost."""

    def __init__(self, rank, size, address="tcp://127.0.0.1", ports=()):
        self.payloads = TcpPayloads(rank, size, JOB)
        self.address = self.payloads.bind(address if ports else f"{address}:0", ports)
        self.received = []
        self.lost = []
        self.changed = asyncio.Event()

    def begin(self):
        self.payloads.connect(self._receive, self._lose)

    def _receive(self, source, message):
        first, payload = message.frames
        assert (message.before, first) == (0, b"first")
        self.received.append((source, payload))
        self.changed.set()

    def send(self, dest, payload):
        self.payloads.send(dest, long(payload))

    def _lose(self, loss):
        self.lost.append((loss.rank, loss.cause, len(self.received)))
        self.changed.set()

    async def until(self, condition):
        while not condition():
            self.changed.clear()
            await self.changed.wait()


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@contextlib.asynccontextmanager
async def world(size, *place, begun=True):
    """The ranks of a world, connected if they have `begun`; at the end no descriptor is left."""
    before = descriptors()
    ranks = [Rank(rank, size, *place) for rank in range(size)]
    for each in ranks:
        each.payloads.peers = [other.address for other in ranks]
    if begun:
        await join(ranks)
    try:
        yield ranks
    finally:
        for each in ranks:
            await each.payloads.close()
    assert descriptors() == before


async def join(ranks):
    for each in ranks:
        each.begin()
    await asyncio.gather(*(each.payloads.connected() for each in ranks))


def run(main):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def where(rank):
    host, _, port = rank.address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


async def connect_to(rank):
    connection = socket.socket()
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, where(rank))
    except OSError:
        connection.close()
        raise
    return connection


async def until(condition):
    while not condition():
        await asyncio.sleep(0)


def narrow(ranks):
    """Let the kernel take little of what rank 0 sends to rank 1, and nothing if rank 1 does not read."""
    ranks[0].payloads._peers[1].writer.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    ranks[1].payloads._peers[0].reader.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)


# -- who may connect ------------------------------------------------------------------------------


def test_a_peer_without_the_key_is_rejected_and_the_world_forms(caplog):
    caplog.set_level(logging.WARNING, "asyncoll")

    async def main():
        async with world(2, begun=False) as ranks:
            ranks[0].begin()
            with await connect_to(ranks[0]) as stranger, pytest.raises(OSError, match=r"closed the connection|reset"):
                await payload_handshake.introduce(stranger, Key(b"another"), 1, 0)
            ranks[1].begin()
            await asyncio.gather(*(each.payloads.connected() for each in ranks))
            ranks[1].send(0, b"payload")
            await ranks[0].until(lambda: ranks[0].received)
            assert ranks[0].received == [(1, b"payload")]

    run(main)
    assert "rejected a connection from 127.0.0.1: it does not have this job's key" in caplog.text


@pytest.mark.parametrize(
    ("rank", "reason"),
    [(0, "sends no payloads to this one"), (2, "has connected before"), (5, "sends no payloads to this one")],
)
def test_a_peer_with_the_key_must_be_another_rank_that_has_not_connected(caplog, rank, reason):
    caplog.set_level(logging.WARNING, "asyncoll")

    async def main():
        async with world(3, begun=False) as ranks:
            ranks[0].begin()
            ends = [await connect_to(ranks[0]) for _ in range(1 + (rank == 2))]
            with contextlib.ExitStack() as closing:
                for end in ends:
                    closing.enter_context(end)
                    await payload_handshake.introduce(end, Key(JOB), rank, 0)
                await until(lambda: f"rank {rank} {reason}" in caplog.text)

    run(main)


def test_a_recorded_handshake_opens_no_other_connection():
    async def main():
        ends = socket.socketpair(), socket.socketpair()
        with contextlib.ExitStack() as closing:
            for end in (*ends[0], *ends[1]):
                closing.enter_context(end)
                end.setblocking(False)
            loop = asyncio.get_running_loop()
            first = asyncio.create_task(payload_handshake.introduce(ends[0][0], Key(JOB), 1, 0))
            await loop.sock_sendall(ends[0][1], bytes(16))
            recorded = await loop.sock_recv(ends[0][1], 1000)
            assert len(recorded) == payload_handshake._INTRODUCTION.size
            await loop.sock_sendall(ends[1][0], recorded)
            with pytest.raises(ProtocolError, match="does not have this job's key"):
                await payload_handshake.welcome(ends[1][1], Key(JOB), 0)
            await loop.sock_sendall(ends[0][1], bytes(32))  # it cannot prove that it has the key
            with pytest.raises(ProtocolError, match="does not have this job's key"):
                await first

    run(main)


def test_a_crowd_of_silent_connections_does_not_keep_a_rank_out():
    async def main():
        async with world(2, begun=False) as ranks:
            ranks[0].begin()
            with contextlib.ExitStack() as crowd:
                silent = [crowd.enter_context(await connect_to(ranks[0])) for _ in range(300)]
                ranks[1].begin()
                await asyncio.gather(*(each.payloads.connected() for each in ranks))
                loop = asyncio.get_running_loop()
                for each in silent:  # all are ended once the world has formed
                    with contextlib.suppress(ConnectionResetError):
                        while await loop.sock_recv(each, 100):
                            pass
            with pytest.raises(ConnectionRefusedError):  # and nobody listens any more
                await connect_to(ranks[0])

    run(main)


def test_a_crowd_that_comes_at_once_is_bounded():
    """Each further connection closes one, before the loop runs any other code."""

    async def main():
        async with world(2, begun=False) as ranks:
            ranks[0].begin()
            listener, most = ranks[0].payloads._listener, tcp_payloads._STRANGERS_MAX + 2 * 2
            before = descriptors()
            with contextlib.ExitStack() as crowd:
                for number in range(1, most + 20):
                    crowd.enter_context(socket.create_connection(where(ranks[0])))
                    assert select.select([listener], [], [], PATIENCE_S)[0]
                    ranks[0].payloads._accept(listener)
                    assert descriptors() - before == number + min(number, most)
            ranks[1].begin()
            await asyncio.gather(*(each.payloads.connected() for each in ranks))

    run(main)


def test_a_world_may_have_the_ports_of_one_that_has_just_ended():
    """Its connections still have them. Two worlds at the same time do not share them."""
    address = f"tcp://127.{1 + os.getpid() // 65536 % 250}.{os.getpid() // 256 % 256}.{1 + os.getpid() % 250}"

    async def main():
        async with world(2, address) as ranks:  # no other process uses this address
            port = where(ranks[0])[1]
        again = Rank(0, 2, address, [port])
        with pytest.raises(UsageError, match=f"all ports of ASYNCOLL_PORTS={port}-{port} are in use"):
            Rank(1, 2, address, [port])
        await again.payloads.close()

    run(main)


def test_a_moment_without_free_descriptors_delays_joining():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def main():
        async with world(2, begun=False) as ranks:
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
            try:
                with pytest.raises(UsageError, match="Too many open files"):
                    ranks[0].payloads.bind("tcp://127.0.0.1:0")
                for each in ranks:
                    each.begin()
                for _ in range(10):
                    await asyncio.sleep(0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            await asyncio.gather(*(each.payloads.connected() for each in ranks))

    run(main)


@pytest.mark.parametrize("address", ["tcp://192.0.2.1:0", "tcp://somewhere:0", "tcp://127.0.0.1", "tcp://[::1:x"])
def test_an_address_that_cannot_be_listened_on_is_an_error(address):
    payloads = TcpPayloads(0, 2, JOB)
    with pytest.raises(UsageError, match=r"192\.0\.2\.1|somewhere|127\.0\.0\.1|::1"):
        payloads.bind(address)
    payloads.discard()


def test_the_zone_of_an_address_of_one_link_stays():
    """uvloop reads it in the text, and `bind` the number."""
    number = socket.if_nametoindex("lo")
    resolved = reach.resolved("tcp://[fe80::1%lo]:5")
    assert resolved == (socket.AF_INET6, ("fe80::1%lo", 5, 0, number))


# -- what arrives ---------------------------------------------------------------------------------


def test_payloads_that_the_kernel_has_no_room_for_arrive_in_order_and_unchanged():
    async def main():
        async with world(2) as ranks:
            narrow(ranks)
            payload, count = np.empty(MAX_FRAME_BYTES, np.uint8), 10
            for number in range(count):
                payload[:] = number
                ranks[0].send(1, payload)
            assert not ranks[0].payloads._peers[1].drained.is_set()
            payload[:] = 255
            await ranks[0].payloads.drain(1)
            await ranks[1].until(lambda: len(ranks[1].received) == count)
            for number, (source, received) in enumerate(ranks[1].received):
                assert (source, len(received)) == (0, MAX_FRAME_BYTES)
                assert (np.frombuffer(received, np.uint8) == number).all()

    run(main)


@pytest.mark.parametrize("seed", range(20))
def test_a_stream_may_be_cut_anywhere(seed):
    draw = np.random.default_rng(seed)
    messages = []
    for number, size in enumerate(draw.choice([1, 2, 3, 4, 5, 100, 70_000], 12)):
        thirds = [draw.bytes(int(nbytes)) for nbytes in draw.choice([0, 1, 50], number % 2)]
        messages.append((number, [draw.bytes(number), draw.bytes(int(size)), *thirds]))
    stream = stream_of(Long(*each) for each in messages)
    cuts = sorted(int(cut) for cut in draw.integers(0, len(stream), 30))
    with reading() as (end, reader):
        received = []
        for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            end.sendall(stream[start:stop])
            received += read_all(reader)
        assert received == messages


@contextlib.contextmanager
def reading():
    """The other end of a connection, and its reader."""
    ends = socket.socketpair()
    with ends[0], ends[1]:
        ends[1].setblocking(False)
        yield ends[0], PayloadReader(ends[1], PayloadMemory(), KEY)


def read_all(reader):
    """The messages that are there: `Long.before`, and the frames."""
    received = []
    with contextlib.suppress(BlockingIOError):
        while True:
            message = reader.read()
            received += [] if message is None else [(message.before, [bytes(frame) for frame in message.frames])]
    return received


MESSAGES = [long(b"a payload"), long(b"another"), long(b"the last", b"third")]


def changed(stream, at):
    return stream[:at] + bytes([stream[at] ^ 1]) + stream[at + 1 :]


@pytest.mark.parametrize(
    "forge",
    [
        lambda stream: changed(stream, 0),  # the length of a payload
        lambda stream: changed(stream, 8),  # what comes before
        lambda stream: changed(stream, 17),  # the first frame
        lambda stream: changed(stream, HEAD_BYTES - 1),  # the proof
        lambda stream: changed(stream, -1 % len(stream)),  # the third frame
        lambda stream: stream[: HEAD_BYTES + 9] * 2,  # repeated
        lambda stream: stream[HEAD_BYTES + 9 :],  # dropped
        lambda _: stream_of(MESSAGES, b"of another stream"),
    ],
)
def test_only_payloads_can_be_changed_by_others(forge):
    stream = stream_of(MESSAGES)
    with reading() as (end, reader):
        end.sendall(forge(stream) + bytes(100))
        with pytest.raises(ProtocolError, match="a message that it has not sent"):
            read_all(reader)
    with reading() as (end, reader):
        end.sendall(changed(stream, HEAD_BYTES))
        assert [frames[1] for _, frames in read_all(reader)] == [b"` payload", b"another", b"the last"]


def test_memory_of_dropped_payloads_is_used_again_and_that_of_others_is_not():
    memory = PayloadMemory()
    kept = memory.take(MAX_FRAME_BYTES).data.toreadonly()
    part = np.frombuffer(memory.take(MAX_FRAME_BYTES).data, np.uint8).view(np.float32)[5:10]
    dropped = memory.take(MAX_FRAME_BYTES)
    places = [np.frombuffer(each, np.uint8).ctypes.data for each in (kept, dropped)]
    del dropped
    again = memory.take(MAX_FRAME_BYTES - 7)
    assert again.ctypes.data == places[1] != places[0]
    others = [memory.take(MAX_FRAME_BYTES).ctypes.data for _ in range(1)]
    assert part.ctypes.data - 20 not in [*others, again.ctypes.data]
    del part
    assert len(memory._blocks) == 2  # of `others` and of `part`


# -- what ends ------------------------------------------------------------------------------------


def head(payload, third=0):
    return struct.pack("<II", payload, third).ljust(HEAD_BYTES, b"\0")


@pytest.mark.parametrize(
    ("cut", "cause"),
    [
        (lambda stream: stream[:-1], "its connection closed"),
        (lambda stream: stream[:-9], "its connection closed"),
        (
            lambda stream: stream[: -9 - HEAD_BYTES] + head(MAX_FRAME_BYTES + 1),
            f"payload of {MAX_FRAME_BYTES + 1} bytes",
        ),
        (lambda stream: stream[: -9 - HEAD_BYTES] + head(0), "payload of 0 bytes"),
        (lambda stream: stream[: -9 - HEAD_BYTES] + head(1, MAX_FRAME_BYTES + 2), "third frame"),
    ],
    ids=["in a payload", "in a head", "too long", "empty", "too long a third frame"],
)
def test_a_stream_that_ends_or_breaks_the_protocol_is_a_loss_after_whole_payloads(cut, cause):
    async def main():
        async with world(2) as ranks:
            connection = ranks[1].payloads._peers[0].writer.connection
            key = ranks[1].payloads._key_of(1, 0)
            connection.sendall(cut(stream_of([long(b"payload"), long(b"9 letters")], key)))
            connection.shutdown(socket.SHUT_WR)
            await ranks[0].until(lambda: ranks[0].lost)
            assert ranks[0].received == [(1, b"payload")]
            ((rank, told, before),) = ranks[0].lost
            assert (rank, before) == (1, 1)
            assert cause in told
            ranks[0].send(1, b"too late")
            await ranks[0].payloads.drain(1)

    run(main)


def test_a_rank_that_closes_while_payloads_wait_for_it_frees_its_sender():
    async def main():
        async with world(2) as ranks:
            ranks[1].payloads._loop.remove_reader(ranks[1].payloads._peers[0].reader.connection)  # it computes
            narrow(ranks)
            for _ in range(10):
                ranks[0].send(1, bytes(MAX_FRAME_BYTES))
            assert not ranks[0].payloads._peers[1].drained.is_set()
            drained = asyncio.create_task(ranks[0].payloads.drain(1))
            await ranks[1].payloads.close()
            await drained
            await ranks[0].until(lambda: ranks[0].lost)
            assert [rank for rank, *_ in ranks[0].lost] == [1]

    run(main)


def test_a_rank_that_falls_silent_while_payloads_wait_for_it_frees_its_sender():
    """The heartbeats on the other stream notice it; the connections for payloads would stay open for minutes."""
    lost = []
    messages = SimpleNamespace(rank=0, size=2, collect=lambda: None)

    async def main():
        async with world(2) as ranks:
            ranks[1].payloads._loop.remove_reader(ranks[1].payloads._peers[0].reader.connection)
            streams = SplitTransport(messages, ranks[0].payloads, {1})
            streams._reassembly.receiver = SimpleNamespace(lost=lost.append)
            for _ in range(40):
                ranks[0].send(1, bytes(MAX_FRAME_BYTES))
            drained = asyncio.create_task(ranks[0].payloads.drain(1))
            streams._reassembly.lost(Loss(1, "it is silent", 0.5))
            await drained
            ranks[0].send(1, bytes(MAX_FRAME_BYTES))  # dropped
            await ranks[0].payloads.drain(1)
            assert (lost, ranks[0].lost) == ([Loss(1, "it is silent", 0.5)], [])

    run(main)


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "of what waits"])
def test_a_write_that_fails_is_a_loss_at_both_ranks_and_no_gap(waits):
    def fail(parts):
        raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

    async def main():
        async with world(2) as ranks:
            narrow(ranks)
            payloads = ranks[0].payloads
            ranks[0].send(1, b"first")
            if waits:
                ranks[0].send(1, bytes(MAX_FRAME_BYTES))
                assert not payloads._peers[1].drained.is_set()
            writer = payloads._peers[1].writer
            write, writer._write = writer._write, fail
            ranks[0].send(1, b"second")
            await payloads.drain(1)
            writer._write = write
            ranks[0].send(1, b"third")
            for each in ranks:
                await each.until(lambda each=each: each.lost)
            assert ranks[1].received == [(0, b"first")]
            cause = f"a payload could not be sent to it: [Errno {errno.ENOBUFS}] {os.strerror(errno.ENOBUFS)}"
            assert [each.lost for each in ranks] == [[(1, cause, 0)], [(0, "its connection closed", 1)]]

    run(main)


def test_what_was_sent_before_a_flushing_end_arrives(monkeypatch):
    monkeypatch.setattr(tcp_payloads, "_FLUSH_S", PATIENCE_S)

    async def main():
        async with world(2) as ranks:
            for number in range(10):
                ranks[0].send(1, bytes([number]) * MAX_FRAME_BYTES)
            await ranks[0].payloads.close(flush=True)
            await ranks[1].until(lambda: ranks[1].lost)
            assert [payload[0] for _, payload in ranks[1].received] == list(range(10))

    run(main)


def test_a_forked_child_can_tell_all_connections_of_its_parent():
    """`forks.give_up_connections` finds them by the addresses of the world, however these are written."""

    async def main():
        for address in ["tcp://127.0.0.1", *["tcp://[0:0::0001]"] * network.is_own("::1")]:
            async with world(3, address) as ranks:
                known = {forks.canonical(each.address) for each in ranks}
                for each in ranks:
                    connections = [end for peer in each.payloads._peers.values() for end in peer.connections()]
                    assert len(connections) == 4
                    assert all(known.intersection(forks.ends_of(end.fileno())) for end in connections)

    run(main)


@pytest.mark.parametrize(
    ("address", "same"),
    [
        ("tcp://[fe80::1%lo]:5", "tcp://[FE80:0::0001%NUMBER]:5"),
        ("tcp://[::1]:5", "tcp://[0::1%NUMBER]:5"),
        ("tcp://[::ffff:10.0.0.1]:5", "tcp://[::ffff:a00:1]:5"),
        ("tcp://localhost:5", "tcp://127.0.0.1:5"),
    ],
)
def test_spellings_of_one_address_are_equal(address, same):
    same = same.replace("NUMBER", str(socket.if_nametoindex("lo")))
    assert forks.canonical(address) == forks.canonical(same)


def test_other_addresses_differ():
    others = [
        "tcp://[fe80::1%1]:5",
        "tcp://[fe80::1%2]:5",
        "tcp://[fe80::1%1]:6",
        "tcp://[fe80::2%1]:5",
        "ipc://[::1]:5",
    ]
    others += ["tcp://[fe80::1%none]:5", "tcp://[x]:5", "tcp://10.0.0.1:5", "tcp://[::a00:1]:5", ""]
    assert len(set(map(forks.canonical, others))) == len(others)
