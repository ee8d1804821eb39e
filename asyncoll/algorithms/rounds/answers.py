"""The awaitable of a call that is over: a coroutine without a frame.

The counterpart of `asyncoll.runtime.progress._Ended` for calls that need no runner, because they touch nothing that
another thread or rank could be waiting for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine, Generator
from typing import Any

from asyncoll.algorithms.rounds.reduction import Reduction


class PythonAnswer(Coroutine[Any, Any, Reduction]):
    """Returns `result`, which tells of `rounds` rounds up to `number`.

    If it has no receiver, it adds these rounds to `owed`, that of the `Engine`. If it `turns`, the loop turns once
    before. Its counterpart in C is in asyncoll/_core/answers.c.
    """

    __slots__ = ("_number", "_owed", "_result", "_rounds", "_turns")

    def __init__(self, result: Reduction, owed: deque[Any], rounds: int, number: int, turns: bool, /) -> None:
        self._owed = owed
        self._rounds = rounds
        self._number = number
        self._turns = turns
        self._result: Reduction | None = result

    def __await__(self) -> Generator[Any, None, Reduction]:
        return self  # an iterator is enough for `await`

    def __iter__(self) -> PythonAnswer:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any, /) -> Any:
        if self._turns:
            self._turns = False
            return None  # what `asyncio.sleep(0)` yields
        result, self._result = self._result, None
        if result is None:
            raise RuntimeError("cannot reuse already awaited coroutine")
        raise StopIteration(result)

    def throw(self, error: Any, /, *more: Any) -> Any:
        self.close()
        raise error

    def close(self) -> None:
        result, self._result = self._result, None
        if result is not None:
            self._owed.append((self._rounds, self._number))

    def __del__(self) -> None:
        if getattr(self, "_result", None) is not None:  # not set if a signal handler raised during `__init__`
            self.close()
