"""The router of one rank: sends every message, and dispatches signals and control messages to their handlers.

A peer may use an operation or a communicator before this rank creates it. So the router keeps messages without a
handler, up to a bound, and delivers them first when the handler is registered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from asyncoll.errors import ProtocolError
from asyncoll.runtime.membership import Membership
from asyncoll.statistics import Traffic
from asyncoll.transport import Buffer, Transport, wire

EARLY_MAX = 1 << 16  # messages kept without a handler, for all contexts together

SignalHandler: TypeAlias = Callable[[int, int, int, int, Buffer], None]  # source, number, step, fingerprint, payload
Handled = TypeVar(
    "Handled", wire.Announce, wire.Where, wire.Here, wire.Leave, wire.Returned, wire.Unused
)  # control messages with a registered listener


class Router:
    """The messages of one rank, on the runtime's loop. Every message that it sends counts in `traffic`.

    In, from the endpoint (messages of peers): `signalled` and `told`. In, from all parts of the runtime and the
    operations: `send`, `tell`, `on_signal` and `on_control`. In, from any thread: `send_directly`. Out: the transport,
    and the registered handlers.
    """

    def __init__(self, transport: Transport, traffic: Traffic, membership: Membership) -> None:
        self._membership = membership
        self.rank = transport.rank
        self.size = transport.size
        self._transport = transport
        self._traffic = traffic
        self._counting = threading.Lock()  # of the messages sent, in `_traffic` and `sent_to`
        self.sent_to, self.received_from = [0] * self.size, [0] * self.size  # how many messages, by rank
        self._handlers: dict[int, SignalHandler] = {}
        self._registering = threading.Lock()  # of a listener, while a message for it may come
        self._listeners: dict[tuple[type, int], Callable[[int, Any], None]] = {}
        self._early_signals: dict[int, list[tuple[int, int, int, int, Buffer]]] = {}  # by context
        self._early_controls: dict[tuple[type, int], list[tuple[int, Any]]] = {}  # by type and communicator
        self._early_count = 0

    def send(self, dest: int, frames: list[Buffer]) -> None:
        """Send one message to the world rank `dest`. Never waits; the frames may be reused when it returns."""
        self._count_sent(dest, frames)
        self._transport.send(dest, frames)

    def send_directly(self, dest: int, frames: list[Buffer]) -> bool:
        """Send one message in this thread, without the runtime's loop, if that is possible. Returns whether it was.

        May be called in any thread in which no signal handler may raise.
        """
        if not self._transport.send_directly(dest, frames):
            return False
        self._count_sent(dest, frames)
        return True

    def _count_sent(self, dest: int, frames: list[Buffer]) -> None:
        nbytes = len(frames[1]) if len(frames) > 1 else 0
        with self._counting:
            self._traffic.messages_sent += 1
            self.sent_to[dest] += 1
            self._traffic.bytes_sent += nbytes

    def tell(self, dest: int, message: wire.Control) -> None:
        """Send a control message to the world rank `dest`."""
        self.send(dest, wire.encode_control(message, self._membership.epoch))

    def on_signal(self, context: int, handler: SignalHandler) -> None:
        """Pass signals for `context` to `handler`, beginning with those that have come already."""
        self._handlers[context] = handler
        for signal in self._early_signals.pop(context, []):
            self._early_count -= 1
            handler(*signal)

    def off_signal(self, context: int) -> None:
        """Forget the handler of `context`: no signal for it is under way."""
        del self._handlers[context]

    def on_control(self, kind: type[Handled], communicator: int, listener: Callable[[int, Handled], None]) -> None:
        """Pass control messages of type `kind` for `communicator` to `listener`, beginning with the early ones.

        In any thread.
        """
        with self._registering:
            self._listeners[kind, communicator] = listener
            early = self._early_controls.pop((kind, communicator), [])
            self._early_count -= len(early)
        for source, message in early:
            listener(source, message)

    def off_control(self, kind: type[Handled], communicator: int) -> None:
        """Forget the listener: no such message for `communicator` is under way."""
        del self._listeners[kind, communicator]

    def signalled(self, source: int, header: wire.Header, payload: Buffer) -> None:
        """A SIGNAL message of `source`. Raises ProtocolError if too many messages have no handler here."""
        signal = (source, header.number, header.step, header.fingerprint, payload)
        handler = self._handlers.get(header.context)
        if handler is not None:
            handler(*signal)
        else:
            self._count_early()
            self._early_signals.setdefault(header.context, []).append(signal)

    def told(
        self, source: int, message: wire.Announce | wire.Where | wire.Here | wire.Leave | wire.Returned | wire.Unused
    ) -> None:
        """A CONTROL message of `source`. Raises ProtocolError if too many messages have no listener here."""
        key = type(message), message.communicator
        with self._registering:
            listener = self._listeners.get(key)
            # A late answer, on a communicator that is closed by now, is dropped.
            if listener is None and not isinstance(message, wire.Here):
                self._count_early()
                self._early_controls.setdefault(key, []).append((source, message))
        if listener is not None:
            listener(source, message)

    def _count_early(self) -> None:
        self._early_count += 1
        if self._early_count > EARLY_MAX:
            raise ProtocolError(f"more than {EARLY_MAX} messages for operations that this rank has not opened")
