"""Deadlines of calls: `deadline`, and the remaining time of the current context."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from asyncoll.arguments import real
from asyncoll.errors import UsageError
from asyncoll.transport.virtual_time import VirtualTimeLoop

expiry: ContextVar[float | None] = ContextVar("asyncoll_deadline", default=None)  # its end by `now_s`, if any


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Limit the time of all calls that are made inside the `with` block to `seconds` from now.

    ```python
    with asyncoll.deadline(5.0):
        await comm.allreduce(x)  # DeadlineError at every rank if it takes longer
    ```

    `seconds` is a number above 0, or infinity for no limit; UsageError otherwise. Of nested deadlines the earliest
    applies. A rank sets a deadline for its own calls; the other ranks need not set one. Tasks that are created inside
    inherit it. The limit counts wall-clock time, or virtual time in a simulated world.

    - A collective, or a `send` or `recv`, that is overdue raises DeadlineError at every rank of its communicator, and
      ends the communicator, because its peers would wait for ever. The error names the ranks that have arrived, the
      ranks that are missing, and where these are. A rank is also missing if its tensor has not arrived from its device.
    - A call of a wait-avoiding operation that is overdue does the same. To stop waiting for one round and continue, use
      `asyncio.timeout` instead.
    - An RPC that is overdue raises DeadlineError at its caller only. The function is cancelled at its callee. The calls
      that the function makes inherit the remaining time.

    The block itself is not interrupted: code that calls nothing of this library, and calls that were made before, are
    not affected.
    """
    length_s = real(seconds, "a deadline")
    if not length_s > 0:
        raise UsageError(f"a deadline is a number of seconds above 0, got {seconds!r}")
    ends_s = min(now_s() + length_s, math.inf if (outer_s := expiry.get()) is None else outer_s)
    token = expiry.set(ends_s if ends_s < math.inf else None)
    try:
        yield
    finally:
        expiry.reset(token)


def lift() -> None:
    """Remove the deadline from the current context, for background work that outlives the call that creates it."""
    expiry.set(None)


def remaining_s() -> float | None:
    """The seconds until the deadline of the current context, negative after it; None without a deadline."""
    expires = expiry.get()
    return None if expires is None else expires - now_s()


def now_s() -> float:
    """The time of `clock`, in seconds."""
    return clock()()


def clock() -> Callable[[], float]:
    """The clock of deadlines: virtual time in a simulated world, `time.monotonic` elsewhere.

    Not `loop.time()`: uvloop updates its time once for each turn of the loop, so it stands still while a task computes.
    """
    with contextlib.suppress(RuntimeError):
        loop = asyncio.get_running_loop()
        if isinstance(loop, VirtualTimeLoop):
            return loop.time
    return time.monotonic  # noqa: TID251 (there is no virtual time here)
