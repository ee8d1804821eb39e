"""Futures without a result, which tell one waiter that something has come."""

from __future__ import annotations

import asyncio
import contextlib


def settle(future: asyncio.Future[None]) -> None:
    """End the wait for `future`, on its loop. Without effect if it is done: its waiter may have been cancelled."""
    if not future.done():
        future.set_result(None)


def settle_from_any_thread(future: asyncio.Future[None]) -> None:
    """End the wait for `future`. Without effect if its loop is closed, and with that the task that waits."""
    with contextlib.suppress(RuntimeError):
        future.get_loop().call_soon_threadsafe(settle, future)
