"""The interface below RPC: a carrier moves messages between ranks, or between a service and its clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from asyncoll.tensors.reductions import Array

HEAD_BYTES = 1 << 16  # the largest head of a message; arrays travel beside it
ARRAYS_MAX = 1 << 16  # the most arrays beside one head

Deliver = Callable[[int, bytes, Sequence[Array]], None]  # source, head, arrays


class Carrier(Protocol):
    """Moves messages between peers. A peer is a number: a world rank, or a client in the order of connections.

    Reliable. A message whose `send` has returned is delivered before any message that is sent later. All methods are
    called on the caller's loop, and messages are delivered there. A carrier bounds the memory that it holds for each
    peer, so `send` to a slow peer waits.
    """

    # Whether `send_nowait` may be called in any thread for messages without arrays.
    sends_in_any_thread: bool

    def open(self, deliver: Deliver) -> None:
        """Begin to receive. `deliver` gets the source, the head and the arrays of each message.

        The arrays are flat, of dtype uint8, writable, and belong to the receiver. If `deliver` raises ProtocolError,
        the peer has violated the protocol: no later message of it is delivered.
        """

    def send_nowait(self, dest: int, head: bytes, arrays: Sequence[Array] = ()) -> bool:
        """Send one message if it is not too long and can be sent without a wait; returns whether it was.

        Raises as `send`. The arrays may be changed once this has returned.
        """

    async def send(self, dest: int, head: bytes, arrays: Sequence[Array] = ()) -> None:
        """Send one message: `head`, of at most HEAD_BYTES, and flat uint8 arrays of any length.

        Returns once the arrays may be changed. If `send` is cancelled, the message arrives whole or not at all.
        """

    async def close(self) -> None:
        """Stop. Idempotent. Messages that arrive later are dropped."""
