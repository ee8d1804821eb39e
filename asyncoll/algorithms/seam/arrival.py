"""The arrival of a call's tensors from devices: the call begins before it, and its algorithm runs after it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from asyncoll.algorithms.seam.collectives import Body, Collectives
from asyncoll.runtime.copies_back import CommunicatorCopiesBack
from asyncoll.runtime.member import Member
from asyncoll.tensors.staged import Arriving, begin_all

T = TypeVar("T")


class Arrival:
    """The tensors of one call that are staged. A failure ends the call as any other does, inside of its context."""

    def __init__(self, member: Member, tensors: Sequence[Arriving]) -> None:
        """In the caller's thread, before the call starts. The copies begin. Raises DeviceError if one cannot."""
        self._member = member
        self._tensors = tensors
        self._error: BaseException | None = None
        begin_all(tensors, CommunicatorCopiesBack(member))

    async def then(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which begins once the tensors have arrived, or have failed, or this is cancelled."""
        try:
            await self.complete()
        except (Exception, asyncio.CancelledError) as error:
            self._error = error
        return await work

    def before(self, body: Body[T]) -> Body[T]:
        """`body`, which raises first what has kept the tensors from arriving."""

        async def checked(collectives: Collectives) -> T:
            if self._error is not None:
                raise self._error
            return await body(collectives)

        return checked

    async def complete(self) -> None:
        """Return once the tensors have arrived. Raises DeviceError, or the error of the communicator if that fails."""
        if all(tensor.has_arrived for tensor in self._tensors):  # small ones often have, and then no task has to wait
            await self._all()
        else:
            await unless_failed(self._member, self._all, "tensors from a device")

    def join(self) -> None:
        """Where the caller goes on: its work comes after all copies."""
        for tensor in self._tensors:
            tensor.join()

    async def _all(self) -> None:
        for tensor in self._tensors:
            await tensor.arrived()


async def unless_failed(member: Member, work: Callable[[], Coroutine[Any, Any, None]], what: str) -> None:
    """Await `work()`, which is cancelled if the communicator fails. Raises the error of the communicator then.

    `what` describes the wait, for the report of a deadlock.
    """
    with member.watch(what) as ended:
        task = asyncio.ensure_future(work())
        try:
            await asyncio.wait([task, ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()
        await (ended if ended.done() else task)


async def to_its_end(work: Awaitable[T]) -> T:
    """The result of `work`. A cancellation is put off to the next time that this task waits."""
    task, is_cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled and (waiting := asyncio.current_task()) is not None:
        # Otherwise they count as two, and `asyncio.timeout` raises TimeoutError for one only.
        waiting.uncancel()
        waiting.cancel()
    return task.result()
