"""Ranks in the process of the test: what they hear, and how they fail."""

from __future__ import annotations

import asyncio
import contextlib

from asyncoll.errors import AsyncollError


class Keeper:
    """Records messages and other events, and lets tests wait for them."""

    def __init__(self):
        self.messages = []
        self.changed = asyncio.Event()

    def keep(self, kept, what):
        kept.append(what)
        self.changed.set()

    async def until(self, condition):
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    async def take(self, count=1):
        """Wait for `count` messages, then remove and return the first `count`."""
        await self.until(lambda: len(self.messages) >= count)
        taken, self.messages = self.messages[:count], self.messages[count:]
        return taken


def failures(size, act, run, survivors=0):
    """The errors of `act(comm)` by rank, in a world of `run(size, main)`. No rank leaves before all are done."""
    raised = {}
    begin, end = asyncio.Barrier(size), asyncio.Barrier(survivors or size)

    async def main(comm):
        await begin.wait()
        try:
            await act(comm)
        except AsyncollError as error:
            raised[comm.rank] = error
        await end.wait()

    with contextlib.suppress(AsyncollError):  # whether a failed communicator can be left is another test
        run(size, main)
    return raised
