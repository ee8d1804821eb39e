"""The messages of RPC, to bytes and back. Pure: nothing here waits or sends.

The head of a message is a fixed header, a name and a body, which is a value that `codec` has encoded. Arrays travel
beside the head. A body that is too long for the head travels as the first of the arrays.
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

VERSION: Final = 2
CALL: Final = 1  # call a function with these arguments; answered by RESULT or ERROR
NOTIFY: Final = 2  # the same without a result: RESULT has no body
STREAM: Final = 3  # the same for a generator: answered by any number of ITEM, then RESULT or ERROR
CANCEL: Final = 4  # the caller does not wait for that call any more; always answered by RESULT or ERROR
CREDIT: Final = 5  # the caller has taken `number` items of that stream
RESULT: Final = 6
ERROR: Final = 7  # the body is an exception, encoded by `failure`
ITEM: Final = 8
SHOW_RESULT: Final = 9  # a tensor of the next answer to a call can be read: see `shown`
SHOW_ARGUMENT: Final = 10  # the same of a call that follows

MAX_DEPTH: Final = 32  # nested calls, each of which waits for the next
CALLS_MAX: Final = 256  # calls under way from one peer to another, at each depth
ITEMS_MAX: Final = 16  # items of one stream that have been sent and not taken

_HEADER = struct.Struct("<BBBBHQd")  # version, kind, flags, number, bytes of the name, call, seconds
_APART, _ON_DEVICE = 1, 2  # flags: the body is an array; tensors may be shown
_BODY_MAX = HEAD_BYTES - _HEADER.size


class Message(NamedTuple):
    """One message of RPC.

    `call` is the caller's number of the call. `number` is the depth of a call, or the items of a CREDIT. `seconds` is
    the time until the caller's deadline, or infinity.
    """

    kind: int
    call: int
    number: int
    seconds: float
    name: str
    body: bytes
    is_on_device: bool = False  # the sender reads results, or arguments of this function, if they are shown


def encode(
    kind: int,
    call: int,
    body: bytes = b"",
    arrays: Sequence[Array] = (),
    *,
    name: str = "",
    number: int = 0,
    seconds: float | None = None,
    is_on_device: bool = False,
) -> tuple[bytes, Sequence[Array]]:
    """The head of a message, and the arrays that travel beside it. `seconds` is as `remaining_s` returns it."""
    raw = name.encode() if name else b""
    apart = len(raw) + len(body) > _BODY_MAX
    if apart:
        arrays, body = [np.frombuffer(body, np.uint8), *arrays], b""
    seconds = math.inf if seconds is None else max(0.0, seconds)
    flags = apart * _APART + is_on_device * _ON_DEVICE
    return _HEADER.pack(VERSION, kind, flags, number, len(raw), call, seconds) + raw + body, arrays


def decode(head: bytes, arrays: Sequence[Array]) -> tuple[Message, Sequence[Array]]:
    """The message, and the arrays that its body refers to. Raises ProtocolError for other bytes."""
    try:
        version, kind, flags, number, length, call, seconds = _HEADER.unpack_from(head)
        start = _HEADER.size + length
        name, body = head[_HEADER.size : start].decode() if length else "", head[start:]
    except (struct.error, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a message of RPC: {error}") from None
    if version != VERSION:
        raise ProtocolError(f"version {version} of RPC, expected {VERSION}: run the same asyncoll at both ends")
    is_known = CALL <= kind <= SHOW_ARGUMENT and flags <= _APART + _ON_DEVICE
    if not is_known or len(head) < start or not seconds >= 0 or number > MAX_DEPTH:
        raise ProtocolError(f"a message of kind {kind}, {seconds} seconds, number {number}")
    if flags & _APART:
        if body or not arrays:
            raise ProtocolError("a message whose body is missing")
        body, arrays = arrays[0].tobytes(), arrays[1:]
    return Message(kind, call, number, seconds, name, body, bool(flags & _ON_DEVICE)), arrays
