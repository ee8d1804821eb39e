"""The compiled module. Memory is writable, of one dimension and contiguous."""

from collections.abc import Callable
from typing import Any

from asyncoll.transport.control_block import Mutex
from asyncoll.transport.memory.mutex import RobustMutex

class ControlBlock:
    """Implements `transport.control_block.ControlBlock`."""

    cells: memoryview
    created: bool
    interleaved: bool
    passing: Callable[[], None] | None

    def __new__(
        cls,
        memory: memoryview,
        doorbells: tuple[int, ...],
        mutex: RobustMutex,
        local_rank: int,
        error: type[Exception],
        created: bool,
    ) -> ControlBlock: ...
    def __enter__(self) -> ControlBlock: ...
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...
    def abandon(self, mutex: Mutex) -> None: ...
    def wake(self, at_most: int = ...) -> None: ...
    def ring_at_next_wake(self, doorbell: int) -> None: ...
    def wake_futex(self, cell: int) -> None: ...

class Meetings:
    """Implements `algorithms.dense.meetings.Meetings`."""

    def __new__(
        cls,
        control_block: ControlBlock,
        view: Callable[[int, int], Any],
        differs: type[Exception],
        size: int,
        rank: int,
        calls: int,
        short_bytes: int,
    ) -> Meetings: ...
    def arrive(self, number: int, fingerprint: int, array: Any) -> int: ...
    def publish(self, number: int, done: int, is_clear: bool) -> None: ...
    def complete(self, number: int, done: int, array: Any, is_clear: bool) -> bool: ...
    def look(self, number: int, done: int, polls: int, sleep_ns: int) -> bool: ...
