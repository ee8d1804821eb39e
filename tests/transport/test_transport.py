"""The contract of a transport, for each implementation."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import socket
import stat
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import uvloop
import zmq

from asyncoll.algorithms import calls
from asyncoll.errors import MismatchError
from asyncoll.runtime import executions
from asyncoll.runtime.executions import Executions, Identity
from asyncoll.runtime.failures import Failures
from asyncoll.runtime.membership import Membership
from asyncoll.runtime.router import Router
from asyncoll.statistics import Traffic
from asyncoll.testing import Disconnect, Network, check_transport, run_ranks
from asyncoll.testing.contract import _ContractWorld, _Recorder
from asyncoll.transport import MAX_FRAME_BYTES, Loss, wire
from asyncoll.transport.among_members import AmongMembers
from asyncoll.transport.memory import fd_passing
from asyncoll.transport.messages import inproc, split, zeromq
from asyncoll.transport.messages.monitor import Monitor
from asyncoll.transport.messages.payload_stream import Long
from asyncoll.transport.messages.simulated import SimulatedWorld
from asyncoll.transport.messages.split import SplitTransport
from asyncoll.transport.messages.tcp_payloads import TcpPayloads
from asyncoll.transport.virtual_time import VirtualTimeLoop
from tests.support.processes import FREEZE_S

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.mark.parametrize("loop", LOOPS, ids=["asyncio", "uvloop"])
def test_inproc(loop):
    check_transport(lambda size: contextlib.nullcontext(inproc.world(size)), loop)


class Entered(AmongMembers):
    """Among all processes but the first, from its start on."""

    def __init__(self, inner):
        super().__init__(inner, range(1, inner.size))

    async def start(self, receiver):
        await self._inner.start(self)
        await super().start(receiver)


def test_members_of_a_later_epoch():
    check_transport(lambda size: contextlib.nullcontext(list(map(Entered, inproc.world(size + 1)[1:]))))


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS, ids=["asyncio", "uvloop"])
def test_zeromq(loop):
    check_transport(zeromq.local_world, loop)


@contextlib.contextmanager
def messages(path):
    transport = zeromq.ZeroMQTransport(0, 1, b"test")
    transport.bind(f"ipc://{path}")
    yield
    asyncio.run(transport.close())


@pytest.mark.slow
@pytest.mark.parametrize("listening", [messages, partial(fd_passing._listen, backlog=1)], ids=["messages", "memory"])
def test_only_the_user_of_a_rank_can_open_its_sockets(tmp_path, listening):
    """Independently of the rights of the folder."""
    path: Path = tmp_path / "s"
    with listening(path):
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@contextlib.contextmanager
def over_tcp(size, encrypted=False):
    transports = [
        zeromq.ZeroMQTransport(rank, size, b"test", encrypted=encrypted, freeze_s=FREEZE_S) for rank in range(size)
    ]
    addresses = [transport.bind("tcp://127.0.0.1:0") for transport in transports]
    for transport in transports:
        transport.peers = addresses
    yield transports


@contextlib.contextmanager
def in_two_streams(size, threshold_bytes=split.THRESHOLD_BYTES):
    payloads = [TcpPayloads(rank, size, b"test") for rank in range(size)]
    addresses = [each.bind("tcp://127.0.0.1:0") for each in payloads]
    for each in payloads:
        each.peers = addresses
    with over_tcp(size, encrypted=True) as messages:
        others = [set(range(size)) - {rank} for rank in range(size)]
        yield [SplitTransport(*each, threshold_bytes) for each in zip(messages, payloads, others, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("loop", LOOPS, ids=["asyncio", "uvloop"])
def test_zeromq_over_tcp(loop, encrypted):
    check_transport(partial(over_tcp, encrypted=encrypted), loop)


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [1, 10_000, split.THRESHOLD_BYTES])
@pytest.mark.parametrize("loop", LOOPS, ids=["asyncio", "uvloop"])
def test_payloads_in_a_second_stream(loop, threshold):
    check_transport(partial(in_two_streams, threshold_bytes=threshold), loop)


@pytest.mark.parametrize("open_world", [zeromq.local_world, over_tcp, in_two_streams], ids=["unix", "tcp", "streams"])
def test_two_threads_send_at_the_same_time(open_world):
    """Messages of both arrive whole, in the order of their thread; of two frames, which must not mix."""
    each, length = 300, zeromq._PACKED_MAX + 1

    async def main():
        with open_world(2) as transports:
            world = _ContractWorld(transports)
            await world.start()
            accepted = []

            def send_directly():
                for index in range(each):
                    if transports[0].send_directly(1, [b"direct %d" % index, bytes(length)]):
                        accepted.append(b"direct %d" % index)

            thread = threading.Thread(target=send_directly)
            thread.start()
            for index in range(each):
                transports[0].send(1, [b"posted %d" % index, bytes(length)])
                await asyncio.sleep(0)
            thread.join()
            received = [frames for _, frames in await world.recorders[1].next_messages(each + len(accepted))]
            assert all(frames[1:] == [bytes(length)] for frames in received)
            heads = [frames[0] for frames in received]
            assert [head for head in heads if head.startswith(b"direct")] == accepted != []
            assert [head for head in heads if head.startswith(b"posted")] == [b"posted %d" % i for i in range(each)]
            for transport in transports:
                await transport.close()

    asyncio.run(main())


def test_a_direct_send_does_not_overtake_messages_that_wait():
    async def main():
        with zeromq.local_world(2) as transports:
            world = _ContractWorld(transports)
            await world.start()
            waiting = transports[0]._peers[1].queue
            waiting.append([b"first"])
            assert not transports[0].send_directly(1, [b"second"])
            waiting.clear()
            assert transports[0].send_directly(1, [b"second"])
            assert await world.recorders[1].next_messages(1) == [(0, [b"second"])]
            for transport in transports:
                await transport.close()

    asyncio.run(main())


class Stream:
    """Records the messages of rank 0 in a world of 3."""

    rank, size, accepts = 0, 3, True

    def __init__(self):
        self.sent = []

    def send(self, dest, frames):
        self.sent.append((dest, bytes(frames[-1])))

    def send_directly(self, dest, frames):
        if self.accepts:
            self.send(dest, frames)
        return self.accepts


class LongStream(Stream):
    def send(self, dest, message):
        self.sent.append((dest, message.before, message.frames))

    def drop(self, rank):
        raise NotImplementedError  # no rank is lost here


def test_only_long_payloads_to_other_hosts_use_the_second_stream():
    messages, payloads, long, short = Stream(), LongStream(), bytes(100), bytes(99)
    transport = SplitTransport(messages, payloads, {1}, threshold_bytes=100)
    for dest, payload in ((1, short), (2, long), (1, long)):
        transport.send(dest, [b"header", payload])
    assert messages.sent == [(1, short), (2, long)]
    assert not transport.send_directly(1, [b"header", long])
    assert transport.send_directly(1, [b"header", short])
    transport.send(1, [b"header", long, b"third"])
    assert messages.sent[2:] == [(1, short)]
    assert payloads.sent == [(1, 1, [b"header", long]), (1, 2, [b"header", long, b"third"])]


@pytest.mark.parametrize("seed", range(50))
def test_messages_of_two_streams_are_delivered_in_the_order_in_which_they_were_sent(seed):
    """However one stream is ahead of the other; a direct send that was refused has no place in the order."""
    draw = random.Random(seed)
    messages, payloads, received = Stream(), LongStream(), []
    sender = SplitTransport(messages, payloads, {1}, threshold_bytes=100)
    messages.send = lambda dest, frames: messages.sent.append(list(frames))
    for number in range(20):
        first = b"%d" % number
        if draw.random() < 0.5:
            sender.send(1, [first, bytes(100)])
        else:
            messages.accepts = False
            assert not sender.send_directly(1, [b"refused", b""])
            messages.accepts = True
            draw.choice([sender.send, sender.send_directly])(1, [first, b""])
    reassembly = split._Reassembly(frozenset({0}), lambda: None, lambda _: None)
    reassembly.receiver = SimpleNamespace(received=lambda _, frames: received.append(int(frames[0])))
    long = [Long(before, frames) for _, before, frames in payloads.sent]
    while messages.sent or long:
        if long and (not messages.sent or draw.random() < 0.5):
            reassembly.received_long(0, long.pop(0))
        else:
            reassembly.received(0, messages.sent.pop(0))
    assert received == list(range(20))


def test_a_rank_that_ends_in_the_middle_of_a_long_message_can_still_say_why():
    told = []
    reassembly = split._Reassembly(frozenset({0}), lambda: None, lambda _: None)
    reassembly.receiver = SimpleNamespace(received=lambda _, frames: told.append(frames), lost=told.append)
    why = wire.encode_control(wire.Abort(1, 0, "out of memory"), 1)
    for frames in ([wire.encode(wire.DATA, 1), b"short"], why, [b"nothing that was ever sent", b""]):
        reassembly.received(0, [*split._counted(1, frames)])
    assert told == []
    reassembly.lost(Loss(0, "its connection closed"))
    assert told == [why, Loss(0, "its connection closed")]


def test_a_direct_send_stays_within_the_window():
    stream, size = Stream(), calls._DIRECT_MAX_BYTES
    membership = Membership(stream.size)
    router = Router(stream, Traffic(), membership)
    rank = Executions(stream, router, Failures(router, membership), membership)
    x = np.zeros(size, np.uint8)
    count = 0
    while rank.send_directly(Identity(1, (0, 1), 1, 2, count + 1, 3, str), 1, x):
        count += 1
    fits = executions.WINDOW_BYTES // (size + executions._MESSAGE_COST)
    assert count == fits == len(stream.sent) == router._traffic.messages_sent
    assert router._traffic.bytes_sent == fits * size
    rank.credited(1, size + executions._MESSAGE_COST)
    assert rank.send_directly(Identity(1, (0, 1), 1, 2, fits + 2, 3, str), 1, x)
    assert not rank.send_directly(Identity(1, (0, 1), 1, 2, fits + 3, 3, str), 1, x)


@pytest.mark.parametrize("elements", [4, 1 << 18], ids=["short", "long"])
@pytest.mark.parametrize("sender_is_first", [True, False], ids=["sent first", "received first"])
def test_a_direct_send_takes_part_in_the_mismatch_check(elements, sender_is_first):
    """A long receive asks its sender for the array: that message may come before the other send, or after it."""
    ended = []

    async def main(comm):
        try:
            if comm.rank == sender_is_first:
                await comm.barrier()
            call = comm.send(np.ones(3), 1) if comm.rank == 0 else comm.recv(np.ones(elements), 0)
            if comm.rank != sender_is_first:
                await comm.barrier()
            await call
            await comm.barrier()
        except MismatchError as error:
            ended.append(str(error))

    run_ranks(2, main, transport="zmq")
    assert len(ended) == 2
    for text in ended:
        assert "send/recv #1 of 3 float64" in text
        assert f"send/recv #1 of {elements} float64" in text


@pytest.mark.slow
def test_a_rank_without_its_stream_for_payloads_is_lost(monkeypatch):
    monkeypatch.setattr(split, "_LEAVING_S", 0.0)

    async def main():
        with in_two_streams(2) as transports:
            world = _ContractWorld(transports)
            await world.start()
            transports[1].send(0, [b"a message", bytes(100_000)])
            await world.recorders[0].next_messages(1)
            await transports[1]._payloads.close()
            await world.recorders[0].until(lambda: bool(world.recorders[0].losses))
            assert world.recorders[0].losses == [(1, 1)]
            for transport in transports:
                await transport.close()

    asyncio.run(main())


def begin_handshake(payloads):
    """A connection to `payloads` that says nothing. Without one a close that flushes nothing waits for nothing."""
    connection, accepted = socket.socketpair()
    accepted.setblocking(False)
    payloads._strangers[accepted] = task = payloads._loop.create_task(payloads._welcome(accepted, "a stranger"))
    task.add_done_callback(partial(payloads._welcomed, accepted))
    return connection


@pytest.mark.parametrize("flush", [False, True])
def test_a_transport_whose_close_is_cancelled_is_closed(flush):
    async def main():
        with contextlib.ExitStack() as stack, in_two_streams(2) as transports:
            world = _ContractWorld(transports)
            await world.start()
            stack.enter_context(begin_handshake(transports[0]._payloads))
            if flush:  # the other rank does not read it
                transports[1]._payloads._loop.remove_reader(transports[1]._payloads._peers[0].reader.connection)
                for _ in range(40):
                    transports[0].send(1, [b"header", bytes(MAX_FRAME_BYTES)])
            closing = asyncio.create_task(transports[0].close(flush=flush))
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.wait([closing])
            found = closing.cancelled(), transports[0]._payloads._closed, transports[0]._messages._context.closed
            for transport in transports:
                transport._payloads.discard()
                transport._messages.discard()
            assert found == (True, True, True)

    asyncio.run(main())


def test_a_fault_disconnects_both_streams():
    async def main():
        with in_two_streams(2) as transports:
            world = _ContractWorld(transports)
            await world.start()
            endpoint = SimpleNamespace(transport=transports[0])
            core = SimpleNamespace(member=SimpleNamespace(endpoint=endpoint))
            Disconnect().strike(SimpleNamespace(comm=SimpleNamespace(_core=core)))
            for recorder, transport in zip(world.recorders, transports, strict=True):
                await recorder.until(lambda recorder=recorder: bool(recorder.losses))
                await transport.close()

    asyncio.run(main())


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_transports_that_were_never_started_are_closed():
    before = descriptors()
    with pytest.raises(LookupError), zeromq.local_world(2) as transports:
        raise LookupError
    assert descriptors() == before, transports


@contextlib.contextmanager
def descriptors_left(count):
    """A context manager in which this process can open `count` descriptors."""
    opened = [os.dup(0) for _ in range(count + 1)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened[-1], limits[1]))
    for descriptor in opened:
        os.close(descriptor)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("left", range(8))
def test_a_transport_that_could_not_be_started_can_be_closed(tmp_path, left):
    """Whichever of the sockets for the peers cannot be made."""

    async def main():
        before = descriptors()
        transport = zeromq.ZeroMQTransport(0, 8, b"test")
        transport.peers = [zeromq.ipc_address(tmp_path, rank) for rank in range(8)]
        transport.bind(transport.peers[0])
        with descriptors_left(left), pytest.raises(zmq.ZMQError, match="Too many open files") as error:
            await transport.start(_Recorder())
        await transport.close()
        assert descriptors() == before, error  # which keeps sockets alive, as it does in a program

    asyncio.run(main())


class Lossy(inproc.InprocTransport):
    """Drops a frame of some messages, which violates the contract."""

    def send(self, dest, frames):
        super().send(dest, frames if len(frames[-1]) != 3 else frames[:1])


def test_the_contract_notices_a_broken_promise():
    def world(size):
        peers = []
        peers.extend(Lossy(rank, size, peers) for rank in range(size))
        return contextlib.nullcontext(peers)

    with pytest.raises(AssertionError, match="in order, whole and unchanged"):
        check_transport(world)


@pytest.mark.parametrize(
    "network",
    [Network(), Network(latency_s=1e-3, jitter_s=5e-3), Network(bandwidth_bytes_per_s=1e6, jitter_s=1e-4)],
    ids=["plain", "jitter", "slow"],
)
def test_simulated(network):
    check_transport(
        lambda size: contextlib.nullcontext(SimulatedWorld(size, network, seed=3).transports), VirtualTimeLoop
    )


def test_a_monitor_that_cannot_be_made_leaves_no_socket_open():
    made = []

    class Context(zmq.Context):
        def socket(self, *args, **more):
            made.append(super().socket(*args, **more))
            return made[-1]

    with Context() as context:
        context.socket(zmq.DEALER).close()
        with pytest.raises(zmq.ZMQError):
            Monitor(made[0], zmq.EVENT_CONNECTED, lambda event, value: None)
        left = [socket for socket in made if not socket.closed]
        context.destroy(linger=0)  # if one is left, the context could not end
    assert len(made) == 2
    assert not left
