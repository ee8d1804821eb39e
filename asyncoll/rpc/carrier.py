"""The seam under RPC: who carries a message to another rank, or between a service and its clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from asyncoll.tensors.reductions import Array

HEAD_BYTES = 1 << 16  # the most that the structured part of a message may take; arrays go beside it
ARRAYS_MAX = 1 << 16  # beside one head

Deliver = Callable[[int, bytes, Sequence[Array]], None]  # source, head, arrays


class Carrier(Protocol):
    """Moves messages between peers, which are numbers: ranks of the world, or clients in the order they came.

    Reliable. A message whose `send` has returned is delivered before any that is sent after that. Everything is called
    on the caller's loop, and what comes is delivered there. It bounds what it holds for each peer: whoever sends to a
    slow one waits.
    """

    def open(self, deliver: Deliver) -> None:
        """Begin to receive. The arrays that are delivered are flat, of bytes, writable, and their receiver's own.

        If `deliver` raises ProtocolError, the peer has broken the rules of RPC: nothing more is delivered from it.
        """

    async def send(self, dest: int, head: bytes, arrays: Sequence[Array] = ()) -> None:
        """Send one message: `head`, of at most HEAD_BYTES, and flat uint8 arrays of any length.

        Returns once the arrays may be reused. If it is cancelled, the message arrives whole or not at all.
        """

    async def close(self) -> None:
        """Stop. Idempotent. What is received later is dropped."""
