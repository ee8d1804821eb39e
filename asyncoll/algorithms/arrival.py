"""The arrival of a call's tensors from devices: the call begins before it, and its algorithm runs after it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from asyncoll.algorithms.backend import Body, Collectives
from asyncoll.tensors.staged import Staged

T = TypeVar("T")


class Arrival:
    """The tensors of one call that are staged. A failure ends the call as any other does, inside of its context."""

    def __init__(self, tensors: Sequence[Staged]) -> None:
        """In the caller's thread. Their copies begin."""
        self._tensors = tensors
        self._error: BaseException | None = None
        for tensor in tensors:
            tensor.begin()

    async def then(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which begins once the tensors have arrived, or have failed, or this is cancelled."""
        try:
            for tensor in self._tensors:
                await tensor.arrived()
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

    def join(self) -> None:
        for tensor in self._tensors:
            tensor.join()
