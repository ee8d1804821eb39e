"""All that leaves a rank, and who hears what comes beside executions: signals and control messages.

A peer may have come to something before this rank has. So what nobody here listens to yet is kept, up to a bound, and
whoever asks for it later hears that first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from asyncoll.errors import ProtocolError
from asyncoll.statistics import Traffic
from asyncoll.transport import Buffer, Transport, wire

_EARLY_MAX = 1 << 16  # signals and announcements kept for what does not exist here yet

SignalHandler: TypeAlias = Callable[[int, int, int, int, Buffer], None]  # source, number, step, fingerprint, payload
Asked = TypeVar("Asked", wire.Announce, wire.Where, wire.Here)  # control messages for whoever asks for them


class Router:
    """The messages of one rank. All that it sends counts in `traffic`."""

    def __init__(self, transport: Transport, traffic: Traffic) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self._transport = transport
        self._traffic = traffic
        self._handlers: dict[int, SignalHandler] = {}
        self._listeners: dict[tuple[type, int], Callable[[int, Any], None]] = {}
        self._early_signals: dict[int, list[tuple[int, int, int, int, Buffer]]] = {}
        self._early_controls: dict[tuple[type, int], list[tuple[int, Any]]] = {}
        self._early_count = 0

    def send(self, dest: int, frames: list[Buffer]) -> None:
        """Send one message."""
        self._traffic.messages_sent += 1
        if len(frames) > 1:
            self._traffic.bytes_sent += len(frames[1])
        self._transport.send(dest, frames)

    def signal(self, dest: int, context: int, number: int, step: int, fingerprint: int, payload: Buffer = b"") -> None:
        """Tell the handler of `context` at `dest`. The payload, at most a segment, does not wait for credit."""
        self.send(dest, [wire.encode(wire.SIGNAL, context, number, step, fingerprint), payload])

    def tell(self, dest: int, message: wire.Control) -> None:
        """Send a control message."""
        self.send(dest, wire.encode_control(message))

    def on_signal(self, context: int, handler: SignalHandler) -> None:
        """Signals for `context` go to `handler`, those that have come already first."""
        self._handlers[context] = handler
        for signal in self._early_signals.pop(context, []):
            self._early_count -= 1
            handler(*signal)

    def on_control(self, kind: type[Asked], communicator: int, listener: Callable[[int, Asked], None]) -> None:
        """Messages of that kind for `communicator` go to `listener`, those that have come already first."""
        self._listeners[kind, communicator] = listener
        for source, message in self._early_controls.pop((kind, communicator), []):
            self._early_count -= 1
            listener(source, message)

    def signalled(self, source: int, header: wire.Header, payload: Buffer) -> None:
        """A signal came."""
        signal = (source, header.number, header.step, header.fingerprint, payload)
        handler = self._handlers.get(header.context)
        if handler is not None:
            handler(*signal)
        else:
            self._count_early()
            self._early_signals.setdefault(header.context, []).append(signal)

    def told(self, source: int, message: wire.Announce | wire.Where | wire.Here) -> None:
        """A control message came."""
        listener = self._listeners.get((type(message), message.communicator))
        if listener is not None:
            listener(source, message)
        else:
            self._count_early()
            self._early_controls.setdefault((type(message), message.communicator), []).append((source, message))

    def _count_early(self) -> None:
        self._early_count += 1
        if self._early_count > _EARLY_MAX:
            raise ProtocolError(f"more than {_EARLY_MAX} messages for operations that nobody here has opened")
