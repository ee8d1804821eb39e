"""The messages of RPC, to bytes and back.

A message is a fixed form, a name and a body, which is a value as `codec` writes it. A body that is too long for the
head travels as the first of the arrays.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from asyncoll.errors import ProtocolError
from asyncoll.rpc.carrier import HEAD_BYTES
from asyncoll.tensors.reductions import Array

VERSION: Final = 1
CALL: Final = 1  # a function, and its arguments; answered by RESULT or ERROR
NOTIFY: Final = 2  # the same, but RESULT says only that it is over
STREAM: Final = 3  # the same, answered by any number of ITEM, and at last RESULT or ERROR
CANCEL: Final = 4  # nobody waits for that call any more; always answered by RESULT or ERROR
CREDIT: Final = 5  # `number` items of that stream have been taken
RESULT: Final = 6
ERROR: Final = 7  # the body is a `Failure`
ITEM: Final = 8

MAX_DEPTH: Final = 32  # of calls that wait for calls
CALLS_MAX: Final = 256  # under way from one peer to another, at each depth
ITEMS_MAX: Final = 16  # of one stream that have not been taken

_FORM = struct.Struct("<BBBBHQd")  # version, kind, whether the body is apart, number, length of the name, call, seconds
_BODY_MAX = HEAD_BYTES - _FORM.size


class Message(NamedTuple):
    """`number` is the depth of a call, or that of a credit; `seconds` remain until the deadline, or it is infinite."""

    kind: int
    call: int
    number: int
    seconds: float
    name: str
    body: bytes


def encode(
    kind: int,
    call: int,
    body: bytes = b"",
    arrays: Sequence[Array] = (),
    *,
    name: str = "",
    number: int = 0,
    seconds: float = math.inf,
) -> tuple[bytes, Sequence[Array]]:
    """The head of a message, and its arrays."""
    raw = name.encode()
    apart = len(raw) + len(body) > _BODY_MAX
    if apart:
        arrays, body = [np.frombuffer(body, np.uint8), *arrays], b""
    return _FORM.pack(VERSION, kind, apart, number, len(raw), call, seconds) + raw + body, arrays


def decode(head: bytes, arrays: Sequence[Array]) -> tuple[Message, Sequence[Array]]:
    """The message, and the arrays of its body. Raises ProtocolError for what `encode` does not make."""
    try:
        version, kind, apart, number, length, call, seconds = _FORM.unpack_from(head)
        start = _FORM.size + length
        name, body = str(head[_FORM.size : start], "utf-8"), head[start:]
    except (struct.error, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a message of RPC: {error}") from None
    if version != VERSION:
        raise ProtocolError(f"version {version} of RPC, expected {VERSION}: run the same asyncoll at both ends")
    if not CALL <= kind <= ITEM or len(head) < start or not seconds >= 0 or number > MAX_DEPTH:
        raise ProtocolError(f"a message of kind {kind}, {seconds} seconds, number {number}")
    if apart:
        if body or not arrays:
            raise ProtocolError("a message whose body is missing")
        body, arrays = arrays[0].tobytes(), arrays[1:]
    return Message(kind, call, number, seconds, name, body), arrays
