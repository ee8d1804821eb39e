"""The wire format: encodes messages as frames and decodes frames. No sockets, no clock, no pickle.

A message has one to three frames: a fixed header; a payload, of raw tensor bytes (DATA, SIGNAL) or msgpack (CONTROL);
and, with DATA only, a piggyback. The header has the epoch that the message belongs to. It identifies the execution by
(context, number), the step in it, and a fingerprint of the sender's description of that execution. `number` is the
number of the call or the round for DATA, GRANT, OFFER, CHECK and SIGNAL, and a count of bytes for CREDIT.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, TypeAlias, get_args, get_type_hints

import msgpack

from asyncoll.errors import ProtocolError

MAGIC: Final = b"ac"
VERSION: Final = 2
SEGMENT_BYTES: Final = 1 << 20  # the largest payload of one DATA message; 1 MiB moved fastest through ZeroMQ
PIGGYBACK_BYTES: Final = 1 << 18  # the largest piggyback: the participation list of 16,384 ranks
CONTROL_BYTES: Final = 1 << 16  # the largest payload of one CONTROL message
_TEXT_BYTES: Final = 1 << 13  # the longest text in a CONTROL message
MAX_FRAME_BYTES: Final = SEGMENT_BYTES

DATA: Final = 1  # one segment of one array, for a posted receive
GRANT: Final = 2  # the receive for a long array is posted: send it
CREDIT: Final = 3  # `number` bytes of the receiver's DATA have been consumed
SIGNAL: Final = 4  # for the handler of a persistent operation; the payload may be empty
CONTROL: Final = 5  # one of the rare messages below, in msgpack
OFFER: Final = 6  # a long array waits at the sender for its GRANT: for a receiver that does not know yet who sends
CHECK: Final = 7  # the sender has waited for the receiver: are both in the same call?
_PAYLOAD_LIMITS: Final = {
    DATA: SEGMENT_BYTES,
    GRANT: 0,
    CREDIT: 0,
    SIGNAL: SEGMENT_BYTES,
    CONTROL: CONTROL_BYTES,
    OFFER: 0,
    CHECK: 0,
}

OF_NO_EPOCH: Final = 0  # of a CONTROL message about a process, which may be in another epoch than the receiver

_NUMBER: Final = struct.Struct("<I")
_HEADER: Final = struct.Struct("<2sBBIIQQQ")  # magic, version, and the fields of `Header`
HEADER_BYTES: Final = _HEADER.size

Buffer: TypeAlias = Any  # any object with the buffer protocol: bytes, memoryview, numpy array, zmq.Frame


class Header(NamedTuple):
    """The header of a message, without magic and version."""

    kind: int
    epoch: int
    step: int
    context: int
    number: int
    fingerprint: int


def encode(kind: int, epoch: int, context: int = 0, number: int = 0, step: int = 0, fingerprint: int = 0) -> bytes:
    """Return the header frame of a message: `epoch` and `step` have 32 bits, the other numbers 64."""
    return _HEADER.pack(MAGIC, VERSION, kind, epoch, step, context, number, fingerprint)


def decode(frames: list[Buffer]) -> Header:
    """Check a message, whose frames are untrusted, and return its header.

    Raises ProtocolError, without a source, unless the header is one of `encode`'s and the frames are within the limits.
    """
    try:
        magic, version, kind, epoch, step, context, number, fingerprint = _HEADER.unpack(frames[0])
    except (struct.error, IndexError) as error:
        raise ProtocolError(f"a header must be one frame of {HEADER_BYTES} bytes: {error}") from None
    if magic != MAGIC:
        raise ProtocolError(f"a header starts with {MAGIC!r}, got {magic!r}: this is not an asyncoll peer")
    if version != VERSION:
        raise ProtocolError(f"wire version {version}, expected {VERSION}: run the same asyncoll at every rank")
    limit = _PAYLOAD_LIMITS.get(kind)
    if limit is None:
        raise ProtocolError(f"unknown kind of message {kind}")
    expected = 2 if limit else 1
    if kind == DATA and len(frames) == 3:
        if len(frames[2]) > PIGGYBACK_BYTES:
            raise ProtocolError(f"a piggyback of more than {PIGGYBACK_BYTES} bytes")
    elif len(frames) != expected:
        raise ProtocolError(f"a message of kind {kind} has {expected} frames, got {len(frames)}")
    if limit and len(frames[1]) > limit:
        raise ProtocolError(f"a payload of more than {limit} bytes")
    return Header(kind, epoch, step, context, number, fingerprint)


def is_control(frames: list[Buffer]) -> bool:
    """Whether a message, whose frames are untrusted, is a CONTROL message."""
    try:
        return decode(frames).kind == CONTROL
    except ProtocolError:
        return False


class Announce(NamedTuple):
    """Announces a persistent operation, so that a rank can take part before its own first call of it."""

    communicator: int
    name: str
    layout: str
    op: str
    opening: str
    quorum: int
    candidates: int
    seed: int
    policy: str
    sync_every: int
    sync_offset: int
    history: int
    group_size: int
    fixed: bool
    weighted: bool
    buckets: str
    site: str


class Dispute(NamedTuple):
    """Reports that the receiver's message for (context, number) does not match the sender's call, `description`.

    The receiver answers with a Mismatch, which names both calls.
    """

    communicator: int
    context: int
    number: int
    description: str


class Mismatch(NamedTuple):
    """Reports that two ranks of a communicator have made different calls, and so ends the communicator."""

    communicator: int
    text: str


class Abort(NamedTuple):
    """Reports that `rank` has aborted a communicator; 0 means the whole world."""

    communicator: int
    rank: int
    reason: str


class Broken(NamedTuple):
    """Reports that rank `source` has sent a malformed message, and so ends the world."""

    source: int
    text: str


class Hello(NamedTuple):
    """Tells the sender's host and process id, for error messages."""

    host: str
    pid: int


class Lost(NamedTuple):
    """Reports the loss of the member `rank`; if other members are in `ranks`, that of its whole host."""

    rank: int
    cause: str
    host: str
    pid: int
    last_seen_ms: int  # the age of the last sign of life
    doing: str  # the last known activity of the rank
    ranks: str  # all that are lost, separated by commas


class Where(NamedTuple):
    """Asks for a Here: a call of the sender on this communicator has exceeded its deadline."""

    communicator: int
    number: int  # of that call, 0 for a call without one


class Here(NamedTuple):
    """Answers a Where."""

    communicator: int
    number: int  # as in Where
    calls: int  # the number of numbered calls begun so far
    made: str  # the name of the call of that number; empty if it has not begun, or is long over
    inside: str  # the names of the calls that are not complete, one in each line
    arriving: str  # of those, the names of the calls whose tensors have not arrived from their devices
    doing: str  # the current activity of the rank


class Overdue(NamedTuple):
    """Reports that a call of the sender has exceeded its deadline, and so ends the communicator."""

    communicator: int
    text: str
    arrived: str  # ranks, separated by commas
    missing: str  # ranks, separated by commas


class Still(NamedTuple):
    """Reports that the sender stands still: it is in calls, and nothing has happened there for some seconds."""

    stamp: int  # of this standstill, in the order of those of the sender
    question: int  # the number of the Stillness that this answers; 0 for a report
    is_sure: int  # 1 if nothing but the end of a call wakes the sender's program
    sent: int  # messages to other ranks, without those of a standstill
    received: int
    waits: str  # its calls, one in each line
    begun: str  # in each line a communicator, and the number of the last call of all its ranks
    doing: str  # its calls, for people


class Stillness(NamedTuple):
    """Asks for another Still if nothing has happened at the receiver since that of `stamp`."""

    stamp: int
    number: int  # of this question


class Deadlock(NamedTuple):
    """Reports that all ranks wait for each other for ever, and so ends the world."""

    communicator: int
    text: str


class Unused(NamedTuple):
    """Tells that the sender, which has left, sends no more messages for a communicator, and uses no memory of it."""

    communicator: int


class Leave(NamedTuple):
    """Reports that the sender takes no part in calls after number `calls` of a communicator; other ranks go on."""

    communicator: int
    calls: int  # the sender completes all numbered calls up to this one
    in_order: bool  # False: its program has ended without leaving, or leaves because of an error
    cause: str
    rank: int  # the receivers lose this member by it: the sender, or another one that has left before


class Returned(NamedTuple):
    """Reports that the sender, whose program has ended, sends and receives nothing more on a communicator."""

    communicator: int


class Ending(NamedTuple):
    """Reports that the sender has left all communicators, and ends its connections once it has the answer."""

    in_order: bool  # as in Leave
    cause: str
    rank: int  # a member number, because the receiver may be in another epoch


class EndingSeen(NamedTuple):
    """Answers an Ending."""

    rank: int  # that ends


class ReadyForNext(NamedTuple):
    """Tells the coordinator that the sender is ready for the next epoch. Ranks are member numbers, by `packed`."""

    epoch: int  # the next one
    lost: bytes
    dead: bytes  # those of `lost` whose processes have ended for certain
    linked: bytes  # processes that wait to join, and that the sender is linked with


class Decided(NamedTuple):
    """Tells the members of an epoch: member numbers, by `packed`."""

    epoch: int
    members: bytes


class BeginLink(NamedTuple):
    """Tells the members of an epoch to connect to newcomers: an attempt to form the next one."""

    attempt: int
    members: bytes  # of the next epoch: member numbers, by `packed`


Control: TypeAlias = (
    Announce
    | Dispute
    | Mismatch
    | Abort
    | Broken
    | Hello
    | Lost
    | Where
    | Here
    | Overdue
    | Still
    | Stillness
    | Deadlock
    | Leave
    | Returned
    | Ending
    | EndingSeen
    | ReadyForNext
    | Decided
    | BeginLink
    | Unused
)
_CONTROLS: Final[dict[str, type[Control]]] = {cls.__name__: cls for cls in get_args(Control)}
# The receiver needs them, also if it is in another epoch than the sender.
_OF_NO_EPOCH: Final = (Hello, Ending, EndingSeen, ReadyForNext, Decided)
# They are resolved once: to do so takes 5 to 30 us.
_FIELDS: Final = {name: get_type_hints(cls) for name, cls in _CONTROLS.items()}


def encode_control(message: Control, epoch: int) -> list[Buffer]:
    """Return the frames of a control message of a sender that is in `epoch`.

    Long texts are cut, so that the payload fits into CONTROL_BYTES.
    """
    values: list[Any] = [type(message).__name__, *message]
    for index, value in enumerate(values):
        if isinstance(value, str):  # UTF-8, and so msgpack, has no code for lone surrogates
            values[index] = value.encode("utf-8", "backslashreplace")[:_TEXT_BYTES].decode("utf-8", "ignore")
    if isinstance(message, _OF_NO_EPOCH):
        epoch = OF_NO_EPOCH
    return [encode(CONTROL, epoch), msgpack.packb(values)]


def decode_control(payload: Buffer) -> Control:
    """Return the control message in an untrusted payload.

    Raises ProtocolError unless the payload is one of the messages above, with fields of the right types.
    """
    try:
        # The limits make msgpack refuse a header that announces a huge object, before it allocates memory.
        name, *values = msgpack.unpackb(payload, max_str_len=CONTROL_BYTES, max_array_len=64, max_map_len=0)
        cls = _CONTROLS[name]
    # msgpack raises many kinds; each means: not a control message.
    except Exception as error:
        raise ProtocolError(f"not a control message: {error!r}") from None
    types = _FIELDS[name]
    if len(types) != len(values):
        raise ProtocolError(f"{name} has {len(types)} fields, got {len(values)}")
    for (field, expected), value in zip(types.items(), values, strict=True):
        # Not `isinstance`, because True is an int, too.
        if type(value) is not expected:
            raise ProtocolError(f"{name}.{field} must be {expected.__name__}, got {type(value).__name__}")
    return cls(*values)


def packed(numbers: Iterable[int]) -> bytes:
    """Member numbers, from the lowest on, as bytes of a message."""
    return b"".join(map(_NUMBER.pack, numbers))


def unpacked(field: bytes) -> tuple[int, ...]:
    """The inverse of `packed`. Raises ProtocolError for other bytes, and for numbers that are not in order."""
    if len(field) % _NUMBER.size:
        raise ProtocolError(f"{len(field)} bytes are no member numbers")
    numbers = tuple(number for (number,) in _NUMBER.iter_unpack(field))
    if list(numbers) != sorted(set(numbers)):
        raise ProtocolError("member numbers that are not in order")
    return numbers
