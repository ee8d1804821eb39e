"""Messages over the pipes of ssh: msgpack maps, one after another."""

from __future__ import annotations

import os
from typing import Any

import msgpack

from asyncoll.errors import ProtocolError

FRAME_BYTES_MAX = 1 << 22  # the arguments and the environment of a program have at most 2 MiB together


def send(descriptor: int, message: dict[str, Any]) -> None:
    """Write a message. Blocks while the other side does not read. Raises OSError if it is gone."""
    rest = memoryview(msgpack.packb(message, unicode_errors="surrogateescape"))
    while rest:
        rest = rest[os.write(descriptor, rest) :]


class Frames:
    """The messages in a stream of bytes. No I/O."""

    def __init__(self) -> None:
        self._unpacker = msgpack.Unpacker(max_buffer_size=FRAME_BYTES_MAX, unicode_errors="surrogateescape")

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that are complete with `data`. Raises ProtocolError for a stream that has none."""
        try:
            self._unpacker.feed(data)
            messages = list(self._unpacker)
        except (ValueError, msgpack.UnpackException) as error:
            raise ProtocolError(
                f"what comes is not msgpack, or longer than {FRAME_BYTES_MAX} bytes: {error}"
            ) from error
        for message in messages:
            if not isinstance(message, dict):
                raise ProtocolError(f"a message is a {type(message).__name__}, not a map")
        return messages
