"""A failure of a call, on its way back: from an exception to words, and to an exception again."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import traceback
from types import TracebackType

from asyncoll.errors import AsyncollError, DeadlineError, ProtocolError, RemoteError, UsageError, text_of
from asyncoll.rpc import codec

_USAGE, _RAISED, _LATE = range(3)  # whose fault it was: the caller's, the function's, nobody's
_NAME_MAX, _MESSAGE_MAX, _TRACE_MAX = 200, 2000, 8000  # characters; of a traceback the last ones

_MACHINERY = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    os.path.dirname(concurrent.futures.__file__) + os.sep,
    os.path.dirname(asyncio.__file__) + os.sep,
)


class CallerError(Exception):
    """The call makes no sense, so that no function has been called; the message is for its caller."""


class LateError(Exception):
    """The caller's deadline has passed, and not one of the function's own."""


def encode(error: BaseException) -> bytes:
    """What becomes of `error` at the caller."""
    kind, trace = _RAISED, ""
    if isinstance(error, CallerError):
        kind = _USAGE
    elif isinstance(error, LateError):
        kind = _LATE
    else:
        trace = _trace(error)
    name, message, trace = map(_valid, (type(error).__name__, _message(error), trace))
    return codec.encode([kind, name[:_NAME_MAX], message[:_MESSAGE_MAX], trace[-_TRACE_MAX:]])[0]


def decode(body: bytes, rank: int) -> AsyncollError:
    """The error to raise at the caller."""
    parts = codec.decode(body)
    if type(parts) is not list or [type(part) for part in parts] != [int, str, str, str]:
        raise ProtocolError("not a failure")
    kind, name, message, trace = parts
    if kind == _USAGE:
        return UsageError(f"{_place(rank)}: {message}")
    if kind == _LATE:
        return DeadlineError(f"{_place(rank)}: {message}")
    return RemoteError(rank, name, message, trace)


def _trace(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(type(error), error, _beyond_machinery(error.__traceback__)))
    except Exception as failure:  # the user's own class, or one in another without end
        return f"(a traceback that cannot be formatted: {type(failure).__name__})"


def _beyond_machinery(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the function on."""
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename.startswith(_MACHINERY):
        inner = inner.tb_next
    return inner or trace


def _message(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "it was cancelled there"
    return text_of(error)


def _valid(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _place(rank: int) -> str:
    return f"rank {rank}" if rank >= 0 else "the service"
