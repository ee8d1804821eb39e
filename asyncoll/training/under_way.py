"""A collective that a trainer has started, and awaits in a later step, if the program makes one."""

from __future__ import annotations

import weakref
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class UnderWay(Generic[T]):
    """The call of a collective, to be awaited once or not at all.

    A program may end between two steps, with an error of its own for example. The call then runs to its end in the
    background, or fails with the communicator. A coroutine that nobody awaits is also a RuntimeWarning of Python, which
    would distract from the program's error.
    """

    def __init__(self, call: Coroutine[Any, Any, T]) -> None:
        self._call = call
        # Not `__del__`: the garbage collector may finalize the coroutine of a cycle, which warns, before this object.
        weakref.finalize(self, call.close)

    def __await__(self) -> Generator[Any, Any, T]:
        return self._call.__await__()
