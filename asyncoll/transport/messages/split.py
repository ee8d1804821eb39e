"""Messages whose payload goes beside them: what steers is encrypted, bulk is not.

CURVE moves a quarter of what plain tcp moves. So a long payload to another host takes a plain connection, which only a
rank can have opened, and all the rest one that is encrypted. Each of the two is first in, first out; the receiver
joins them again, in the order of the messages.
"""

from __future__ import annotations

import asyncio
import struct
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence

from asyncoll.transport import Buffer, Receiver, check_frames
from asyncoll.transport.messages.zeromq import ZeroMQTransport

THRESHOLD_BYTES = 1 << 16  # payloads from here on go beside
_WHOLE, _APART = b"\0", b"\1"  # how the first frame of a message between hosts begins
_LENGTH = struct.Struct("<I")  # bytes of the payload, if it is apart; then comes the first frame itself
_PATIENCE_S = 1.0  # a connection for payloads that is gone alone means that its rank is leaving, or lost


class SplitTransport:
    """The `Transport` `messages`, with another for long `payloads` to the ranks in `apart`, those of other hosts."""

    def __init__(self, messages: ZeroMQTransport, payloads: ZeroMQTransport, apart: Collection[int]) -> None:
        self.rank = messages.rank
        self.size = messages.size
        self._messages = messages
        self._payloads = payloads
        self._apart = frozenset(apart)
        self._joint = _Joint(self._apart, self._collect)

    async def start(self, receiver: Receiver) -> None:
        self._joint.receiver = receiver
        await self._payloads.start(_Payloads(self._joint))
        await self._messages.start(self._joint)

    def send(self, dest: int, frames: Sequence[Buffer]) -> None:
        if dest not in self._apart:
            self._messages.send(dest, frames)
            return
        check_frames(dest, self.size, frames)
        if len(frames) > 1 and len(frames[1]) >= THRESHOLD_BYTES:
            first = b"".join((_APART, _LENGTH.pack(len(frames[1])), frames[0]))
            self._payloads.send(dest, (b"", frames[1]))
            self._messages.send(dest, (first, *frames[2:]))
        else:
            self._messages.send(dest, (b"".join((_WHOLE, frames[0])), *frames[1:]))

    async def drain(self, dest: int) -> None:
        if dest in self._apart:
            await self._payloads.drain(dest)
        await self._messages.drain(dest)

    async def close(self, *, flush: bool = False) -> None:
        """The messages last: when their connection ends, peers take it that all payloads have come."""
        self._joint.close()
        await self._payloads.close(flush=flush)
        await self._messages.close(flush=flush)

    def _collect(self) -> None:
        self._payloads.collect()
        self._messages.collect()


class _Joint:
    """A `Receiver` before the real one: it gives messages their payloads back."""

    receiver: Receiver

    def __init__(self, apart: frozenset[int], collect: Callable[[], None]) -> None:
        """`collect` makes both transports hand over what has come."""
        self._apart = apart
        self._collect = collect
        self._messages: defaultdict[int, deque[list[Buffer]]] = defaultdict(deque)  # the first waits for its payload
        self._payloads: defaultdict[int, deque[Buffer]] = defaultdict(deque)
        self._lost: set[int] = set()

    def received(self, source: int, frames: list[Buffer]) -> None:
        if source not in self._apart:
            self.receiver.received(source, frames)
        elif source not in self._lost:
            self._messages[source].append(frames)
            self._join(source)

    def received_payload(self, source: int, payload: Buffer) -> None:
        if source not in self._lost:
            self._payloads[source].append(payload)
            self._join(source)

    def lost(self, source: int, cause: str, last_seen_s: float = 0.0) -> None:
        if source in self._lost:
            return
        if source in self._apart:
            self._collect()
        self._lost.add(source)
        self.receiver.lost(source, cause, last_seen_s)

    def close(self) -> None:
        """Hand over nothing more."""
        self._lost.update(self._apart)

    def _join(self, source: int) -> None:
        messages, payloads = self._messages[source], self._payloads[source]
        while messages and source not in self._lost:
            whole = _whole(messages[0], payloads)
            if whole is None:
                return
            messages.popleft()
            self.receiver.received(source, whole)


class _Payloads:
    """A `Receiver` for what goes beside the messages."""

    def __init__(self, joint: _Joint) -> None:
        self._joint = joint

    def received(self, source: int, frames: list[Buffer]) -> None:
        self._joint.received_payload(source, frames[-1])

    def lost(self, source: int, cause: str, last_seen_s: float = 0.0) -> None:
        cause = f"{cause}, that for payloads"
        asyncio.get_running_loop().call_later(_PATIENCE_S, self._joint.lost, source, cause, last_seen_s)


def _whole(frames: list[Buffer], payloads: deque[Buffer]) -> list[Buffer] | None:
    """The message as it was sent; None if its payload has not come yet.

    What nobody can have sent so stays as it is, and its receiver will refuse it.
    """
    first = bytes(frames[0])
    if first[:1] == _WHOLE:
        return [first[1:], *frames[1:]]
    start = len(_APART) + _LENGTH.size
    if first[:1] != _APART or len(first) < start:
        return frames
    if not payloads:
        return None
    payload = payloads.popleft()
    if len(payload) != _LENGTH.unpack_from(first, len(_APART))[0]:
        return frames
    return [first[start:], payload, *frames[1:]]
