"""Exceptions of calls: encoded as text at the callee, and decoded as another exception at the caller; time limits."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import traceback
from collections.abc import Callable
from typing import Any

from asyncoll.errors import AsyncollError, DeadlineError, DeviceError, ProtocolError, RemoteError, UsageError, text_of
from asyncoll.rpc import codec

# A wrong call, an exception of the function, the end of the caller's deadline, a device that has failed.
_USAGE, _RAISED, _LATE, _DEVICE = range(4)
_NAME_MAX, _MESSAGE_MAX, _TRACE_MAX = 200, 2000, 8000  # characters; a traceback keeps its last ones

_LIBRARIES = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    os.path.dirname(concurrent.futures.__file__) + os.sep,
    os.path.dirname(asyncio.__file__) + os.sep,
)


class CallerError(Exception):
    """A wrong call, for which no function has run; the message is for the caller."""


class LateError(Exception):
    """The caller's deadline has passed; not a deadline that the function set itself."""


class FetchError(Exception):
    """A tensor does not arrive from its device at the callee, or has no place on it."""


class Limit:
    """A context manager that raises `late()` if its block takes longer than `seconds`; None: never.

    A TimeoutError of the block itself passes. This is a class, because a generator takes 2 us longer for each call.
    """

    def __init__(self, seconds: float | None, late: Callable[[], Exception]) -> None:
        self._late = late
        self._timeout = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *exception: Any) -> None:
        try:
            await self._timeout.__aexit__(*exception)
        except TimeoutError:
            raise self._late() from None


_KINDS = {CallerError: _USAGE, LateError: _LATE, FetchError: _DEVICE}


def encode(error: BaseException) -> bytes:
    """The body of an ERROR message for `error`."""
    kind = next((kind for cause, kind in _KINDS.items() if isinstance(error, cause)), _RAISED)
    message = "it was cancelled there" if isinstance(error, asyncio.CancelledError) else text_of(error)
    texts = type(error).__name__, message, _trace(error) if kind == _RAISED else ""
    name, message, trace = (text.encode("utf-8", "backslashreplace").decode() for text in texts)  # valid Unicode
    return codec.encode([kind, name[:_NAME_MAX], message[:_MESSAGE_MAX], trace[-_TRACE_MAX:]])[0]


def decode(body: bytes, rank: int) -> AsyncollError:
    """The exception to raise at the caller; `rank` is the callee, -1 for a service. Raises ProtocolError."""
    parts = codec.decode(body)
    if type(parts) is not list or [type(part) for part in parts] != [int, str, str, str]:
        raise ProtocolError("the body of an ERROR message is not an encoded exception")
    kind, name, message, trace = parts
    if kind == _USAGE:
        return UsageError(f"{callee(rank)}: {message}")
    if kind == _LATE:
        return DeadlineError(f"{callee(rank)}: {message}")
    if kind == _DEVICE:
        return DeviceError(message if rank >= 0 else f"{callee(rank)}: {message}")  # it names the rank
    return RemoteError(rank, name, message, trace)


def callee(rank: int) -> str:
    """The peer that is called, for errors; `rank` is -1 for a service."""
    return f"rank {rank}" if rank >= 0 else "the service"


def _trace(error: BaseException) -> str:
    """The traceback without the leading frames of this library and asyncio, if frames of the function remain."""
    inner = error.__traceback__
    while inner is not None and inner.tb_frame.f_code.co_filename.startswith(_LIBRARIES):
        inner = inner.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, inner or error.__traceback__))
    except Exception as failure:  # code of the user's exception class runs here; causes may be nested too deep
        return f"(a traceback that cannot be formatted: {type(failure).__name__})"
