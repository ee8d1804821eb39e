"""Message to frames and back. No sockets, no clock, no pickle.

A message is a fixed header and, in frames of their own, a payload of raw tensor bytes (DATA) or msgpack (CONTROL) and
a piggyback that goes along with DATA. The header names the execution that the message belongs to, (context, number),
the step inside it, and the fingerprint of what its sender believes that execution to be. `number` means: of DATA, GRANT
and SIGNAL, the call or the round; of CREDIT, bytes.
"""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias, get_args

import msgpack

from asyncoll.errors import ProtocolError

MAGIC: Final = b"ac"
VERSION: Final = 1
SEGMENT_BYTES: Final = 1 << 20  # the largest payload of one DATA message; 1 MiB moved fastest through ZeroMQ
PIGGYBACK_BYTES: Final = 1 << 18  # the largest piggyback: the participation list of 16,384 ranks
CONTROL_BYTES: Final = 1 << 16  # the largest payload of one CONTROL message
MAX_FRAME_BYTES: Final = SEGMENT_BYTES

DATA: Final = 1  # one segment of one array, for a posted receive
GRANT: Final = 2  # the receive for a long array is posted: send it
CREDIT: Final = 3  # so many bytes of yours have been consumed
SIGNAL: Final = 4  # for the handler of a persistent operation; its payload may be empty
CONTROL: Final = 5  # msgpack, rare
_PAYLOAD_LIMITS: Final = {DATA: SEGMENT_BYTES, GRANT: 0, CREDIT: 0, SIGNAL: SEGMENT_BYTES, CONTROL: CONTROL_BYTES}

_HEADER: Final = struct.Struct("<2sBBIQQQ")
HEADER_BYTES: Final = _HEADER.size

Buffer: TypeAlias = Any  # whatever offers the buffer protocol: bytes, memoryview, numpy array, zmq.Frame


class Header(NamedTuple):
    kind: int
    step: int
    context: int
    number: int
    fingerprint: int


def encode(kind: int, context: int = 0, number: int = 0, step: int = 0, fingerprint: int = 0) -> bytes:
    return _HEADER.pack(MAGIC, VERSION, kind, step, context, number, fingerprint)


def decode(frames: list[Buffer]) -> Header:
    """The header of a message.

    Raises ProtocolError (its source still unknown) for anything that `encode` and this module's limits rule out.
    """
    try:
        magic, version, *fields = _HEADER.unpack(frames[0])
    except (struct.error, IndexError) as error:
        raise ProtocolError(f"a header must be one frame of {HEADER_BYTES} bytes: {error}") from None
    if magic != MAGIC:
        raise ProtocolError(f"a header starts with {MAGIC!r}, got {magic!r}: this is not an asyncoll peer")
    if version != VERSION:
        raise ProtocolError(f"wire version {version}, expected {VERSION}: run the same asyncoll at every rank")
    header = Header._make(fields)
    limit = _PAYLOAD_LIMITS.get(header.kind)
    if limit is None:
        raise ProtocolError(f"unknown kind of message {header.kind}")
    expected = 2 if limit else 1
    if header.kind == DATA and len(frames) == 3:
        if len(frames[2]) > PIGGYBACK_BYTES:
            raise ProtocolError(f"a piggyback of more than {PIGGYBACK_BYTES} bytes")
    elif len(frames) != expected:
        raise ProtocolError(f"a message of kind {header.kind} has {expected} frames, got {len(frames)}")
    if limit and len(frames[1]) > limit:
        raise ProtocolError(f"a payload of more than {limit} bytes")
    return header


@dataclass(frozen=True, slots=True)
class Announce:
    """A persistent operation now exists: what a rank must know to take part before its own first call."""

    communicator: int
    name: str
    layout: str
    op: str
    opening: str
    quorum: int
    candidates: int
    seed: int
    sync_every: int
    history: int
    group_size: int
    fixed: bool
    buckets: str
    site: str


@dataclass(frozen=True, slots=True)
class Dispute:
    """Your message for (context, number) does not match mine, which is `description`. What was yours?"""

    communicator: int
    context: int
    number: int
    description: str


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Two ranks of a communicator called different things."""

    communicator: int
    text: str


@dataclass(frozen=True, slots=True)
class Abort:
    """A rank gave up; communicator 0 means the whole world."""

    communicator: int
    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class Broken:
    """`source` broke the protocol: nothing it says can be trusted, so the world ends."""

    source: int
    text: str


@dataclass(frozen=True, slots=True)
class Hello:
    """Who I am, to be named in errors."""

    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class Lost:
    """I have noticed that `rank` is gone."""

    rank: int
    cause: str
    host: str
    pid: int
    last_seen_ms: int
    doing: str


@dataclass(frozen=True, slots=True)
class Where:
    """What are you doing? A call of mine on this communicator is overdue."""

    communicator: int


@dataclass(frozen=True, slots=True)
class Here:
    """The answer to Where."""

    communicator: int
    calls: int  # numbered ones begun so far
    inside: str  # the names of those that are not over, one a line
    doing: str


@dataclass(frozen=True, slots=True)
class Overdue:
    """A call of mine was not over in time, which ends the communicator. Ranks are listed with commas between them."""

    communicator: int
    text: str
    arrived: str
    missing: str


Control: TypeAlias = Announce | Dispute | Mismatch | Abort | Broken | Hello | Lost | Where | Here | Overdue
_CONTROLS: Final[dict[str, type[Control]]] = {cls.__name__: cls for cls in get_args(Control)}
_FIELD_TYPES: Final = {"int": int, "str": str, "bool": bool}


def encode_control(message: Control) -> list[Buffer]:
    """The frames of a control message. Long texts are cut, so that it always fits."""
    values = [getattr(message, field.name) for field in dataclasses.fields(message)]
    short = [_short(value) if isinstance(value, str) else value for value in values]
    return [encode(CONTROL), msgpack.packb([type(message).__name__, *short])]


def _short(text: str) -> str:
    """At most 8 KiB of `text`, in characters that msgpack can write."""
    return text.encode("utf-8", "backslashreplace")[:8192].decode("utf-8", "ignore")


def decode_control(payload: Buffer) -> Control:
    """Raises ProtocolError for anything but one of the messages above, field by field."""
    try:
        name, *values = msgpack.unpackb(payload, max_str_len=CONTROL_BYTES, max_array_len=64, max_map_len=0)
        cls = _CONTROLS[name]
    except Exception as error:  # msgpack raises many kinds; each means: not a control message
        raise ProtocolError(f"not a control message: {error!r}") from None
    fields = dataclasses.fields(cls)
    if len(fields) != len(values):
        raise ProtocolError(f"{name} has {len(fields)} fields, got {len(values)}")
    for field, value in zip(fields, values, strict=True):
        if type(value) is not _FIELD_TYPES[str(field.type)]:
            raise ProtocolError(f"{name}.{field.name} must be {field.type}, got {type(value).__name__}")
    return cls(*values)
