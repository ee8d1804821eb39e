"""Messages over the pipes of ssh: msgpack maps, each with its length in front."""

from __future__ import annotations

import os
from typing import Any

import msgpack

from asyncoll.errors import ProtocolError

FRAME_BYTES_MAX = 1 << 22  # the arguments and the environment of a program have at most 2 MiB together
_LENGTH_BYTES = 4


def send(descriptor: int, message: dict[str, Any]) -> None:
    """Write a message. Blocks while the other side does not read. Raises OSError if it is gone."""
    body = msgpack.packb(message, unicode_errors="surrogateescape")
    rest = memoryview(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


class Frames:
    """The messages in a stream of bytes. No I/O."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that are complete with `data`. Raises ProtocolError for a stream that has none."""
        self._rest += data
        messages = []
        while len(self._rest) >= _LENGTH_BYTES:
            length = int.from_bytes(self._rest[:_LENGTH_BYTES], "little")
            if length > FRAME_BYTES_MAX:
                raise ProtocolError(f"a message of {length} bytes is announced; {FRAME_BYTES_MAX} are allowed")
            end = _LENGTH_BYTES + length
            if len(self._rest) < end:
                break
            messages.append(_unpack(self._rest[_LENGTH_BYTES:end]))
            self._rest = self._rest[end:]
        return messages


def _unpack(body: bytes) -> dict[str, Any]:
    try:
        message = msgpack.unpackb(body, unicode_errors="surrogateescape")
    except ValueError as error:
        raise ProtocolError(f"a message is not msgpack: {error}") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"a message is a {type(message).__name__}, not a map")
    return message
