"""The runtime's thread: what replaces it is refused, and what interrupts it ends every wait with its reason."""

from __future__ import annotations

import _thread
import os
import socket
from functools import partial

import pytest

import asyncoll
from asyncoll import UsageError, notebook
from tests.support.places import SCRIPTS

SCRIPT = SCRIPTS / "runtime/interrupted_runtime_thread.py"
AT_A_CALLBACK = SCRIPT.with_name("interrupted_callback.py")
WORLD = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def spawn(function, args=(), kwargs=None):
    raise AssertionError("no thread is started")


def test_sockets_that_only_threads_of_eventlet_can_use_are_refused(monkeypatch):
    async def main(comm: asyncoll.Communicator) -> None: ...

    for name, value in WORLD.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        socket, "socket", type("GreenSocket", (socket.socket,), {"__module__": "eventlet.greenio.base"})
    )
    with pytest.raises(UsageError, match=r"^eventlet has replaced the sockets.*socket=False"):
        asyncoll.run(main)


@pytest.mark.parametrize("library", ["gevent", "eventlet"])
@pytest.mark.parametrize(
    "enter",
    [asyncoll.run, lambda main: asyncoll.init(), partial(notebook.run, ranks=2)],
    ids=["run", "init", "notebook"],
)
def test_threads_that_a_library_has_replaced_are_refused(monkeypatch, library, enter):
    async def main(comm: asyncoll.Communicator) -> None: ...

    for name, value in WORLD.items():
        monkeypatch.setenv(name, value)
    spawn.__module__ = f"{library}.thread"
    monkeypatch.setattr(_thread, "start_new_thread", spawn)
    with pytest.raises(UsageError, match=f"^{library} has replaced the threads"):
        enter(main)


@pytest.mark.parametrize(
    "enter",
    [
        asyncoll.connect,
        lambda: asyncoll.rpc.connect("ipc:///nowhere"),
        lambda: asyncoll.rpc.serve(object(), "ipc:///nowhere"),
    ],
    ids=["connect", "rpc.connect", "rpc.serve"],
)
def test_coroutines_of_another_library_are_refused(enter):
    async def main() -> None:
        async with enter():
            raise AssertionError("it has entered")

    with pytest.raises(UsageError, match=r"^asyncoll runs on asyncio.*trio"):
        main().send(None)  # as trio does: without a loop of asyncio


@pytest.mark.parametrize("transport", ["shm", "zmq"])
@pytest.mark.parametrize("way", ["exit", "interrupt", "stop", "sent"])
def test_whatever_interrupts_the_thread_of_the_runtime_ends_every_wait(forked_world, way, transport):
    ranks = forked_world(os.environ | {"ASYNCOLL_TRANSPORT": transport}, 3, SCRIPT, way)
    for code, out, err in (rank.end() for rank in ranks):
        assert code == 0, err
        assert out.startswith("rank 1 aborted: its runtime was interrupted: "), (out, err)


@pytest.mark.parametrize("error", ["exit", "error"])
@pytest.mark.parametrize(
    "callback",
    [
        *("_Crossing.begin_here", "_Crossing._done", "_Crossing._discard"),
        *("_Run.begin", "HandleRunner._adopt", "HandleRunner._settle"),
    ],
)
def test_a_call_whose_beginning_or_end_is_interrupted_has_an_end(forked_world, callback, error):
    # By message each call of a loop crosses to that of the runtime; in memory a handle is adopted.
    transport = {"ASYNCOLL_TRANSPORT": "zmq" if callback.startswith("_Crossing") else "shm"}
    ranks = forked_world(os.environ | transport, 3, AT_A_CALLBACK, callback, error)
    for code, out, err in (rank.end() for rank in ranks):
        assert code == 0, err
        assert out.startswith("rank 1 aborted: its runtime was interrupted: "), (out, err)
