"""How long a call may take: `deadline`, inherited by everything that is called under it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from asyncoll.errors import UsageError
from asyncoll.transport.virtual_time import VirtualTimeLoop

expiry: ContextVar[float | None] = ContextVar("asyncoll_deadline", default=None)  # by `now_s`; None: no deadline


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Calls that are made inside must be over in `seconds` from now; of nested deadlines the earliest holds.

    A collective that is not raises DeadlineError at every rank, which names who has come and where the others are, and
    ends its communicator: its peers cannot be left waiting. To give up waiting for one rank's part in a wait-avoiding
    round, and go on, use `asyncio.timeout` instead. An RPC that is not over in time raises DeadlineError to its caller,
    and is cancelled at its callee; what a handler calls inherits what is left.
    """
    if not seconds > 0:
        raise UsageError(f"a deadline is a number of seconds above 0, got {seconds!r}")
    ends_s = min(now_s() + seconds, math.inf if (outer_s := expiry.get()) is None else outer_s)
    token = expiry.set(ends_s if ends_s < math.inf else None)
    try:
        yield
    finally:
        expiry.reset(token)


def lift() -> None:
    """No deadline holds here any more: for what serves others, and outlives the call that made it."""
    expiry.set(None)


def expires_s() -> float | None:
    """When the deadline that holds here ends, by `now_s`; None if there is none."""
    return expiry.get()


def remaining_s() -> float | None:
    """Seconds until then, negative afterwards."""
    expires = expiry.get()
    return None if expires is None else expires - now_s()


def now_s() -> float:
    """The time by `clock`."""
    return clock()()


def clock() -> Callable[[], float]:
    """What deadlines are measured by: virtual time in a simulated world, and elsewhere the system's monotonic clock.

    The loop's own clock stands still while the loop computes.
    """
    with contextlib.suppress(RuntimeError):
        loop = asyncio.get_running_loop()
        if isinstance(loop, VirtualTimeLoop):
            return loop.time
    return time.monotonic  # noqa: TID251 (see above)
