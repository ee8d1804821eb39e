"""A silent process of this host: one that waits for a processor is slow, and one that cannot run is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from conftest import PATIENCE_S
from hypothesis import given
from hypothesis import strategies as st

from asyncoll.testing.contract import _Recorder
from asyncoll.transport.messages import zeromq
from asyncoll.transport.messages.zeromq import ZeroMQTransport, ipc_address
from asyncoll.transport.processes import Thread, is_frozen, threads

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
            monkeypatch.setattr(zeromq, "threads", shown)
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
