"""The injection points of calls of tensors on devices: the passages of the copies to the host."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from unittest import mock

from asyncoll.tensors.staged import CopiesBack
from asyncoll.transport.staging.mirrors import Mirror

BEGUN = "begun"  # the copy is queued; in the thread of the caller
LANDED = "landed"  # it has arrived; in the thread of the runtime
STAGING_POINTS = (BEGUN, LANDED)


class StagingPoint:
    """A context manager that counts in `count` how often this process passes the point of this name, on all threads.

    It calls `passed(number)` at each passing, with numbers from 1, in the thread that passes. All ranks of a process
    are counted.
    """

    def __init__(self, name: str, passed: Callable[[int], None] = lambda number: None) -> None:
        self.count = 0
        self._name = name
        self._passed = passed
        self._numbers = itertools.count(1)  # `next` of it is atomic
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> StagingPoint:
        begin, arrived = Mirror.begin, Mirror.arrived

        def begin_and_pass(mirror: Mirror, back: CopiesBack) -> None:
            begin(mirror, back)
            self._pass(BEGUN)

        async def arrive_and_pass(mirror: Mirror) -> None:
            await arrived(mirror)
            self._pass(LANDED)

        self._undo.enter_context(mock.patch.object(Mirror, "begin", begin_and_pass))
        self._undo.enter_context(mock.patch.object(Mirror, "arrived", arrive_and_pass))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _pass(self, name: str) -> None:
        if name == self._name:
            self.count = number = next(self._numbers)
            self._passed(number)
