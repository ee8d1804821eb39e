"""How the carrier of RPC by message hands segments to the router: in the caller's thread, or on the runtime's loop."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from asyncoll.rpc.message_carrier import MessageCarrier
from asyncoll.transport import Buffer, wire

SHORT, LONG = b"x", bytes(1 << 14)


class Router:
    """Notes the segments that it is given: their numbers, and whether the caller's thread has sent them."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, bool]] = []
        self.takes = True

    def on_signal(self, context: int, handler: Any) -> None:
        pass

    def send(self, dest: int, frames: list[Buffer]) -> None:
        self.sent.append((wire.decode(frames).number, False))

    def send_directly(self, dest: int, frames: list[Buffer]) -> bool:
        if self.takes:
            self.sent.append((wire.decode(frames).number, True))
        return self.takes


class Runtime:
    """A carrier, and what it has posted to a runtime's loop, which runs when the test says so."""

    def __init__(self) -> None:
        self.router, self.posted = Router(), []
        group: Any = SimpleNamespace(ranks=(0, 1), communicator=1, epoch=1)
        router: Any = self.router
        self.carrier = MessageCarrier(router, group, self.posted.append, lambda rank, error: None)

    def turn(self) -> None:
        while self.posted:
            self.posted.pop(0)()


@pytest.fixture
def runtime():
    return Runtime()


def test_the_callers_thread_sends_short_segments(runtime):
    for number in range(3):
        runtime.carrier.post(1, 0, number, SHORT)
    assert runtime.router.sent == [(0, True), (1, True), (2, True)]
    assert not runtime.posted


def test_no_segment_overtakes_one_that_was_posted(runtime):
    runtime.router.takes = False
    runtime.carrier.post(1, 0, 0, SHORT)
    runtime.router.takes = True
    runtime.carrier.post(1, 0, 1, SHORT)
    assert not runtime.router.sent
    runtime.turn()
    runtime.carrier.post(1, 0, 2, LONG)
    runtime.carrier.post(1, 0, 3, SHORT)
    runtime.turn()
    runtime.carrier.post(1, 0, 4, SHORT)
    assert runtime.router.sent == [(0, False), (1, False), (2, False), (3, False), (4, True)]


def test_a_segment_is_posted_if_a_signal_handler_may_raise(runtime):
    def raises(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGUSR1, raises)
    try:
        runtime.carrier.post(1, 0, 0, SHORT)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not runtime.router.sent
    runtime.turn()
    assert runtime.router.sent == [(0, False)]


def test_nothing_is_sent_after_the_end(runtime):
    asyncio.run(runtime.carrier.close())
    runtime.carrier.post(1, 0, 0, SHORT)
    assert not runtime.router.sent
    assert not runtime.posted
