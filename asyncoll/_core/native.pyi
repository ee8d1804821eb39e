"""The compiled module. Memory is writable, of one dimension and contiguous."""

from collections.abc import Callable

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
