"""How the members of one epoch connect to newcomers, beside their calls.

An attempt makes a whole endpoint of the next epoch, with connections and shared memory among members and newcomers.
Then the ranks agree on that epoch. If one of them is lost meanwhile, the endpoint is of no use, and another attempt
begins.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from asyncoll.errors import describe
from asyncoll.runtime.endpoint import Endpoint, NextEpoch
from asyncoll.runtime.failures import WORLD
from asyncoll.transport import settle

logger = logging.getLogger("asyncoll")


@dataclass(frozen=True, slots=True)
class GrowthAttempt:
    """An attempt to form `epoch` with these members: those of the epoch before that live, and then newcomers."""

    number: int  # of the world's attempts, from 0
    epoch: int
    members: tuple[int, ...]


class NewcomerSource(Protocol):
    """The processes that wait to join a world: `world.newcomers.Newcomers`."""

    def begin(self, epoch: int, members: tuple[int, ...]) -> GrowthAttempt | None:
        """Begin an attempt with all newcomers that wait. None if there is none. Blocks. Raises ServiceLostError."""
        ...

    def count(self) -> int:
        """The number of newcomers that wait, and were in no attempt. Blocks. Raises ServiceLostError."""
        ...

    async def connect(self, attempt: GrowthAttempt, number: int, succession: NextEpoch) -> Endpoint:
        """The endpoint of the member `number` in the epoch of `attempt`, connected to all others.

        Raises an AsyncollError if that fails; then all that it has opened is closed.
        """
        ...

    def end(self) -> None:
        """The world is over: those that wait learn it. Blocks."""
        ...


class Linking:
    """The newest attempt of one rank, on the runtime's loop."""

    def __init__(
        self, connect: Callable[[GrowthAttempt], Awaitable[Endpoint]], changed: Callable[[GrowthAttempt, bool], None]
    ) -> None:
        """`changed` is called with True once this rank is connected to all of an attempt, and with False if no more."""
        self.attempt: GrowthAttempt | None = None  # that is under way, or has succeeded
        self._connect = connect
        self._changed = changed
        self._connecting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # of attempts, and of ends of endpoints
        self._settled: asyncio.Future[None] | None = None  # of the newest attempt
        # Until an epoch is installed: a decision may name the members of one that was given up.
        self._endpoints: dict[GrowthAttempt, Endpoint] = {}

    @property
    def is_linked(self) -> bool:
        """Whether the newest attempt has succeeded."""
        return self.attempt in self._endpoints

    def begin(self, attempt: GrowthAttempt) -> None:
        """Connect to all of `attempt`."""
        self.give_up()
        self.attempt = attempt
        self._settled = asyncio.get_running_loop().create_future()
        self._connecting = self._spawn(self._link(attempt))

    async def settled(self) -> None:
        """Wait until no attempt is under way. One that is given up may go on to close what it has opened."""
        if self._settled is not None:
            await asyncio.wait([self._settled])

    def give_up(self) -> None:
        """The newest attempt cannot succeed any more, or its newcomers are not wanted now."""
        attempt, self.attempt = self.attempt, None
        if attempt is None or self._connecting is None or self._settled is None:
            return
        self._connecting.cancel()  # it closes what it has opened
        settle(self._settled)
        if attempt in self._endpoints:
            self._changed(attempt, False)

    def take(self, members: tuple[int, ...]) -> Endpoint | None:
        """The endpoint among these `members`; None if there is none. Closes all others."""
        self.attempt = None
        found = [endpoint for attempt, endpoint in self._endpoints.items() if attempt.members == members]
        for endpoint in self._endpoints.values():
            if endpoint not in found:
                self._spawn(_discard(endpoint))
        self._endpoints.clear()
        return found[0] if found else None

    async def close(self) -> None:
        """This rank leaves the world."""
        self.give_up()
        while self._tasks or self._endpoints:
            self.take(())
            await asyncio.wait(self._tasks)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _link(self, attempt: GrowthAttempt) -> None:
        try:
            self._endpoints[attempt] = await self._connect(attempt)
        except Exception as error:
            logger.info("attempt %d to connect to newcomers has failed: %s", attempt.number, describe(error))
        finally:
            if self.attempt is attempt and self._settled is not None:
                settle(self._settled)
                self.attempt = attempt if attempt in self._endpoints else None
        if self.attempt is attempt:
            endpoint = self._endpoints[attempt]
            self._changed(attempt, True)
            endpoint.failures.on_failure(WORLD, lambda *_: self.give_up() if self.attempt is attempt else None)


async def _discard(endpoint: Endpoint) -> None:
    await endpoint.close()
    if endpoint.arena is not None:
        endpoint.arena.close()
