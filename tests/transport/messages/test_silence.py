"""A silent process of this host: one that waits for a processor is slow, and one that cannot run is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
import zmq

from asyncoll.testing.contract import _Recorder
from asyncoll.transport.messages import monitor
from asyncoll.transport.messages.patience import Patience
from asyncoll.transport.messages.zeromq import ZeroMQTransport, ipc_address
from asyncoll.transport.processes import Thread, is_frozen, threads
from asyncoll.transport.virtual_time import VirtualTimeLoop
from tests.support.processes import PATIENCE_S
from tests.support.properties import given, st

PEER = """
import asyncio, sys
from asyncoll.testing.contract import _Recorder
from asyncoll.transport.messages.zeromq import ZeroMQTransport

async def main(*peers):
    transport = ZeroMQTransport(1, 2, b"job", freeze_s=0)
    transport.peers = peers
    transport.bind(peers[1])
    await transport.start(_Recorder())
    print("connected", flush=True)
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""
FREEZE_S = 0.1
LOOKS = 5
STATES = st.sampled_from("RSDTtI")
SWITCHES = st.tuples(st.sampled_from("012"), st.sampled_from("012"))
THREAD = st.builds(Thread, STATES, SWITCHES)
SHOWN = st.dictionaries(st.integers(1, 4), THREAD, max_size=4)


@given(SHOWN, SHOWN, st.booleans())
def test_a_process_is_frozen_if_nothing_of_it_has_run_or_is_about_to(before, after, woken):
    """As threads come and go. A thread that has run has left its processor since, or has it still."""
    runs = {number for number, thread in after.items() if thread.state == "R"}
    ran = {number for number, thread in after.items() if thread != before.get(number)}
    is_stopped = {thread.state for thread in after.values()} <= {"T", "t"}
    assert is_frozen(before, after, woken=woken) == (is_stopped or (woken and not runs and not ran))


def test_what_the_kernel_shows_of_threads():
    own = threads(os.getpid())
    assert own[os.getpid()].state == "R"
    assert len(own[os.getpid()].switches) == 2
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert is_frozen({}, threads(child.pid), woken=False)
        child.kill()
    assert threads(child.pid) == {}


@pytest.mark.parametrize("ends_as", ["it is stopped", "it does not move"])
def test_a_silent_process_is_lost_once_it_cannot_run_and_not_while_it_waits_for_a_processor(
    monkeypatch, tmp_path, ends_as
):
    """The process is stopped, and the kernel is made to show it as one that no processor is left for."""
    peers = [ipc_address(tmp_path, rank) for rank in range(2)]
    looks = 0

    def shown(pid: int) -> dict[int, Thread]:
        nonlocal looks
        looks += 1
        if looks > LOOKS and ends_as == "it is stopped":
            return threads(pid)
        return {pid: Thread("R" if looks <= LOOKS else "S", ("1", "1"))}

    async def main(peer: subprocess.Popen[str]) -> None:
        transport, receiver = ZeroMQTransport(0, 2, b"job", freeze_s=FREEZE_S), _Recorder()
        transport.peers = peers
        transport.bind(peers[0])
        try:
            await transport.start(receiver)
            assert peer.stdout is not None
            await asyncio.to_thread(peer.stdout.readline)
            monkeypatch.setattr(monitor, "threads", shown)
            peer.send_signal(signal.SIGSTOP)
            await asyncio.wait_for(receiver.until(lambda: bool(receiver.losses)), PATIENCE_S)
        finally:
            await transport.close()
        assert looks > LOOKS
        assert receiver.losses == [(1, 0)]

    with subprocess.Popen([sys.executable, "-c", PEER, *peers], stdout=subprocess.PIPE, text=True) as peer:
        try:
            asyncio.run(main(peer))
        finally:
            peer.kill()


class _Dealer:
    """In place of a socket: the test tells what happens to its connection."""

    def setsockopt(self, option: int, value: int) -> None: ...

    def connect(self, address: str) -> None: ...

    def close(self, linger: int) -> None: ...


class _Monitor:
    def __init__(self, socket: object, events: int, handle: Callable[[int, int], None]) -> None:
        self.handle = handle

    def start(self) -> None: ...

    def read(self) -> None: ...

    def close(self) -> None: ...


GAPS_S = st.sampled_from([0.0, 1.0, 29.0, 31.0])
SILENCES_S = st.sampled_from([0.3, 0.45, 0.55, 0.9, 1.9, 4.0, 20.0])


@given(st.lists(st.tuples(GAPS_S, SILENCES_S), min_size=1, max_size=8))
def test_a_silence_of_another_host_may_take_longer_while_answers_come_late(story):
    """In virtual time: a silence of 0.5 s is a loss, or one of four times the longest of the last half minute."""
    lost: list[float] = []

    async def main() -> None:
        now_s = asyncio.get_running_loop().time
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(monitor, "Monitor", _Monitor)
            heartbeat = monitor.Heartbeat(_Dealer(), "tcp://b:1", Patience(0.5), lambda: None, lost.append)
        tell = heartbeat._monitor.handle
        tell(zmq.EVENT_HANDSHAKE_SUCCEEDED, 0)
        answers: list[tuple[float, float]] = []
        for gap_s, silence_s in story:
            await asyncio.sleep(gap_s)
            began_s = now_s()
            await asyncio.sleep(0.25)
            tell(zmq.EVENT_DISCONNECTED, 0)
            tell(zmq.EVENT_CONNECTED, 0)
            await asyncio.sleep(silence_s - 0.25)
            late = [its_s for at_s, its_s in answers if began_s + silence_s - at_s < 30]
            limit_s = max([0.5, *(4 * its_s for its_s in late)])
            assert bool(lost) == (silence_s > limit_s)
            if lost:
                assert lost[0] >= 0.5
                return
            tell(zmq.EVENT_HANDSHAKE_SUCCEEDED, 0)
            answers.append((now_s(), silence_s))
        heartbeat.close()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())


class _SlowHost:
    """A relay to `port`. Its first connection, for messages, passes; later ones have their first answers late."""

    def __init__(self, port: int, late_s: float) -> None:
        self._port = port
        self._late_s = late_s
        self._closing = contextlib.ExitStack()
        self._answering: list[asyncio.Task[None]] = []
        self.has_answered = [asyncio.Event() for _ in range(8)]  # by connection

    async def listen(self) -> str:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self._closing.callback(server.close)
        return f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        self._closing.close()

    def fall_silent(self, connection: int) -> None:
        self._answering[connection].cancel()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passing = asyncio.ensure_future(self._pass(reader, writer))
        self._closing.callback(passing.cancel)
        self._closing.callback(writer.close)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_connection("127.0.0.1", self._port)
        self._closing.callback(outer.close)
        answer = asyncio.ensure_future(self._answer(len(self._answering), inner, writer))
        self._closing.callback(answer.cancel)
        self._answering.append(answer)
        while data := await reader.read(1 << 16):
            outer.write(data)

    async def _answer(self, connection: int, inner: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(self._late_s if connection else 0)
        while data := await inner.read(1 << 16):
            writer.write(data)
            self.has_answered[connection].set()


def test_a_process_of_another_host_that_answers_late_is_not_lost():
    """It has shown by its first answer that it waits for a processor."""

    async def main() -> None:
        transport, peer = ZeroMQTransport(0, 2, b"job", freeze_s=0.2), ZeroMQTransport(1, 2, b"job", freeze_s=0)
        receiver, closing = _Recorder(), contextlib.ExitStack()
        try:
            port = int(peer.bind("tcp://127.0.0.1:0").rpartition(":")[2])
            await peer.start(_Recorder())
            host = _SlowHost(port, 1.0)
            closing.callback(host.close)
            transport.peers = ["", await host.listen()]
            await transport.start(receiver)
            host.fall_silent(1)
            await asyncio.wait_for(host.has_answered[2].wait(), PATIENCE_S)
            assert receiver.losses == []
        finally:
            closing.close()
            await transport.close()
            await peer.close()

    asyncio.run(main())
