"""One rank as a member of one communicator: what every part of a call needs to know and may do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncoll.errors import AsyncollError, PeerLostError, ProtocolError, UsageError, describe
from asyncoll.runtime.endpoint import Endpoint
from asyncoll.runtime.group import Group
from asyncoll.runtime.progress import Runner


class Member:
    """The rank's endpoint, the communicator's group, and the runner of the runtime."""

    __slots__ = ("communicator", "endpoint", "group", "runner")

    def __init__(self, endpoint: Endpoint, group: Group, runner: Runner) -> None:
        self.endpoint = endpoint
        self.group = group
        self.runner = runner
        self.communicator = group.communicator

    def check(self) -> None:
        """Raise what has ended the communicator, if anything has."""
        failures = self.endpoint.failures
        if failures.any:  # seldom
            failures.check(self.communicator)

    def check_open(self) -> None:
        """Raises ClosedError after the end of the world, and UsageError in a forked child of its process."""
        if self.endpoint.closed:
            self.endpoint.check_open()

    def check_caller(self) -> None:
        """As `check_open`, and raises UsageError in a thread without a running loop.

        A call needs a loop to be awaited on. One that failed after it was numbered would be missed by all other ranks.
        """
        if self.endpoint.closed:
            self.endpoint.check_open()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise UsageError(
                "a call needs a running event loop, and this thread has none: make it inside an `async def`, and from "
                "another thread pass that to asyncio.run_coroutine_threadsafe, with the loop of the program"
            ) from None

    def post(self, what: Callable[[], None]) -> None:
        """Call `what` on the runtime's loop, soon. From any thread."""
        self.runner.post(what)

    def abort(self, reason: str) -> None:
        """End the communicator at all of its ranks. From any thread."""
        group = self.group
        self.post(lambda: self.endpoint.failures.abort(group.communicator, group.ranks, reason))

    def mismatch(self, text: str) -> None:
        """Ranks have called different things, which ends the communicator. From any thread."""
        group = self.group
        self.post(lambda: self.endpoint.failures.mismatch(group.communicator, group.ranks, text))

    def noticed(self, error: PeerLostError) -> AsyncollError:
        """A lost rank was noticed in shared memory, in any thread. Returns the error to raise."""
        return self.endpoint.noticed(error, self.post)

    def failed(self, call: object, error: BaseException) -> None:
        """`call`, which the other ranks wait for, has ended with `error`. Unless they know of it, abort."""
        if isinstance(error, asyncio.CancelledError):
            self.abort(f"{call} was cancelled")
        elif not isinstance(error, AsyncollError) or isinstance(error, ProtocolError):
            self.abort(f"{call} failed: {describe(error)}")
