"""The compiled module. Memory is writable, of one dimension and contiguous."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from types import CodeType, FrameType, ModuleType
from typing import Any

import numpy as np

from asyncoll import transport
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

class Rounds:
    """The rounds of one operation at one rank. All methods but `plan` raise the error of a lost lock.

    `arrays` are the contribution, one flat array for each entry of the operation's layout. If the call is over, they
    have its result. ValueError: a peer has written cells that make no sense.
    """

    def __new__(
        cls,
        control_block: transport.ControlBlock,
        segments: tuple[Any, ...],
        size: int,
        rank: int,
        history: int,
        limit: int,
        nbytes: int,
        ranks: int,
        drawn: bool,
        sync_every: int,
        sync_offset: int,
        keeps: bool,
        long: bool,
        cores: int,
        parts: tuple[tuple[int, int, int], ...],
    ) -> Rounds: ...
    def begin(
        self, arrays: Sequence[Any], weight: float, aim: int, unused: Sequence[int], lent: int, /
    ) -> tuple[Any, ...] | int:
        """Drop the blocks `unused`, and begin a call that aims at round `aim`. Returns the fields of `Begun`.

        `lent` is the address of the one array if it is registered, so that rounds may read it in place; or -1. Long
        contributions are copied and reduced without the GIL.
        A number says instead what is missing: the `plan` of the round of that number, or, if it is negative, so many
        free blocks. The call has contributed nothing then; the blocks `unused` are dropped.
        """

    def resume(self, arrays: Sequence[Any], aim: int, number: int, came_ns: int, ticket: int, /) -> Any:
        """Look again for a call that waits for round `number`: open it if this rank may, and reduce chunks of it.

        Returns as `begin`.
        """

    def attach(
        self,
        reduction: type,
        slots: tuple[Any, ...],
        turns: tuple[Iterator[int], list[int], set[int], dict[int, Any]],
        owed: deque[Any],
        cells: memoryview,
        divisor: int,
        calls_per_turn: int,
        /,
    ) -> None:
        """Before the first `at_once`, which returns awaitables of a `reduction`, a class with `slots`.

        `turns` are the attributes of the `CallOrder`, `owed` and `cells` those of the `Engine`.
        Results are divided by `divisor`, or, if that is 0, by the number of contributors. After so many calls in a row
        that are over at once the caller's loop turns.
        """

    def at_once(self, array: Any, /) -> Answer | Exception | None:
        """A whole call of a contribution that is one flat array of the dtype of the operation.

        Returns an awaitable with the result, or the error of a lost lock. Returns None, and has done nothing, if the
        call would have to wait, or Python has to decide something.
        """

    def trace(self, append: Callable[[Any], object] | None, make: Callable[[int, float, int], Any], /) -> None:
        """From now on pass the rounds that this rank opens to `append`, if it is not None.

        Each is a tuple `(make, what, at_s, number)`, which stands for `make(what, at_s, number)`: see `runtime.trace`.
        """

    def is_needed(self, number: int, /) -> bool:
        """Whether a call that waits for round `number` has to look again. Without the lock the answer is a hint."""

    def plan(self, number: int, drawn: tuple[int, ...], groups: tuple[Sequence[int], ...], /) -> None:
        """The ranks that are drawn for round `number`, and its groups."""

class Awaitable(Coroutine[Any, Any, Any]):
    """What the callers of whole calls await."""

    result: Any  # None once it has been handed over
    def __await__(self) -> Generator[Any, None, Any]: ...
    def send(self, value: Any, /) -> Any: ...
    def throw(self, error: Any, /, *more: Any) -> Any: ...
    def close(self) -> None: ...

class Answer(Awaitable):
    """A call of rounds that is over."""

class Meetings:
    """The single rendezvous of an allreduce, or of a barrier, at one rank, without any waiting: one for each `number`.

    `done` is the number of bytes of the result, or 1 for a barrier. `is_clear` says that no earlier call is under way
    at this rank. Arrays are flat and contiguous; None for a barrier. All methods raise the error of a lost lock.
    """

    def __new__(
        cls,
        control_block: transport.ControlBlock,
        view: Callable[[int, int], Any],
        differs: type[Exception],
        size: int,
        rank: int,
        calls: int,
        short_bytes: int,
        shown_min: int,
        chunk_max: int,
        cores: int,
    ) -> Meetings: ...
    def arrive(
        self, number: int, fingerprint: int, array: Any, address: int, kernel: int, divisor: int, is_clear: bool, /
    ) -> int:
        """Show a copy of `array`, or `array` itself, which is registered at `address`, unless that is 0.

        Returns 0: other ranks are missing, or still reduce a chunk; 1: the record is not free, and nothing has changed;
        2: this rank has reduced and published.

        The address is 0 below `Sizes.shown` bytes. If it is negative, `array` is at its negation in private memory
        (`peers`), and must live until the call is over. The last rank reduces by `kernel` (`reductions.kernel_number`)
        and `divisor`, and has the result in `array`. The caller has checked that the call that used the record before
        is over at this rank. Raises DisagreementError if another rank has made another call with this number, and
        ValueError, before anything has changed, if there is no such kernel.
        """

    def complete(self, number: int, done: int, array: Any, is_clear: bool, /) -> bool:
        """Copy the result into `array`, and leave. Returns False, and does nothing, if there is no result yet."""

    def look(self, number: int, done: int, polls: int, sleep_ns: int, kernel: int, divisor: int, /) -> bool:
        """Block the thread for a short time, until there seems to be a result; returns whether there is.

        It yields the core at most `polls` times, then sleeps for at most `sleep_ns` nanoseconds if it can, and reduces
        chunks meanwhile, by `kernel` and `divisor`.
        """

class ShortCall(Awaitable):
    """A call that `ShortCalls` has begun."""

    array: np.ndarray[Any, Any] | None
    block: Any  # shared memory with a copy of `array`, which takes part in its place, or None: a `Block`
    result: Any  # what the caller gets
    entry: Any  # `algorithms.seam.short_calls.Entry`
    since_s: float  # when it began, as a time of `runtime.deadlines`; 0 if it has failed at once
    expires_s: float | None  # the end of its deadline
    def look(self) -> bool: ...
    def claim(self) -> bool: ...
    def finish(self) -> Coroutine[Any, Any, Any]: ...

class ShortCalls:
    """Implements `algorithms.seam.short_calls.ShortCalls`."""

    last: int
    libraries: tuple[str, ...]
    def __new__(
        cls,
        meetings: Meetings,
        segment: tuple[int, int, int],
        polls: int,
        sleep_ns: int,
        calls_per_turn: int,
        /,
        *,
        general: Any,
        rest: Any,
        runner: Any,
        home: asyncio.AbstractEventLoop | None,
        held: dict[Any, Any] | None,
        endpoint: Any,
        failures: Any,
        unused: Any,
        own: list[Any],
        blocks: list[Any],
        unfinished: set[int],
        turns: dict[int, Any],
        end: Callable[[int], None],
        note: Callable[[Any], None],
        place_outside: Callable[[FrameType, tuple[str, ...]], tuple[CodeType, int]],
        reported: Callable[[], tuple[CodeType, int] | None],
        running_loop: Callable[[], asyncio.AbstractEventLoop],
        expiry: Callable[[], float | None],
        array_type: type,
        may_raise: Callable[[], bool],
    ) -> ShortCalls: ...
    def allreduce(self, x: Any, op: object, /) -> Coroutine[Any, Any, Any] | None: ...
    def allreduce_view(
        self, x: Any, op: object, array: np.ndarray[Any, Any], key: str, /
    ) -> Coroutine[Any, Any, Any] | None: ...
    def barrier(self) -> Coroutine[Any, Any, Any] | None: ...
    def learn(
        self,
        key: object,
        op: object,
        nbytes: int,
        plan: Any,
        fingerprint: int,
        divisor: int,
        done: int,
        kernel: int,
        ways: int,
        /,
    ) -> None: ...
    def counts(self) -> list[tuple[Any, int, int]]: ...
    def latest(self) -> tuple[Any, float] | None: ...
    def trace(self, append: Callable[[Any], object] | None, make: Callable[[int, float, Any], Any], /) -> None:
        """From now on pass the events of calls to `append`, if it is not None.

        Each is a tuple `(make, what, at_s, entry)`, which stands for `make(what, at_s, entry)`: see `runtime.trace`.
        """

class Pieces:
    """The steps of `algorithms.dense.pieces` at one rank."""

    def __new__(
        cls,
        control_block: Any,
        first: int,
        stride: int,
        rank: int,
        slots: Sequence[np.ndarray[Any, Any]],
        array: np.ndarray[Any, Any],
        piece: int,
        kernel: int,
        divisor: int,
        is_wanted: bool,
        polls: int,
        /,
    ) -> Pieces: ...
    def perform(self, step: int, stop: int, /) -> int: ...

class NativeCore(ModuleType):
    """The module itself."""

    @property
    def ControlBlock(self) -> type[ControlBlock]: ...  # noqa: N802
    @property
    def Meetings(self) -> type[Meetings]: ...  # noqa: N802
    @property
    def Pieces(self) -> type[Pieces]: ...  # noqa: N802
    @property
    def Rounds(self) -> type[Rounds]: ...  # noqa: N802
    @property
    def ShortCalls(self) -> type[ShortCalls]: ...  # noqa: N802
    def find_kernel(self, op: str, dtype: str, portable: bool = False, /) -> int:
        """The number of the kernel that reduces `dtype` by the ReduceOp of the value `op`; 0 if there is none.

        `portable`: the kernel for any processor, even if there is one for this processor.
        """

    def reduce(
        self, kernel: int, into: np.ndarray[Any, Any], arrays: Sequence[np.ndarray[Any, Any]], divisor: int, /
    ) -> None:
        """As the function that `tensors.reductions.reducer` returns. Releases the GIL while it reads more than 64 KiB.

        Raises ValueError for an unknown kernel, and for arrays of different sizes.
        """

    def reduce_to_all(self, kernel: int, arrays: Sequence[np.ndarray[Any, Any]], divisor: int, /) -> None:
        """Reduce `arrays`, in their order, into all of them. Otherwise as `reduce`."""

    def select(
        self, x: np.ndarray[Any, Any], least: int, indices: np.ndarray[Any, Any], values: np.ndarray[Any, Any], /
    ) -> int:
        """Write the indices, ascending, of the elements of `x` whose magnitudes are at least `least`, and their values.

        `x` and `values` are integer views of elements of 4 or 8 bytes; `indices` are int32 or int64, as many as
        `values`. `least` is at least 1. Returns the number of elements; if that is larger, there was no room for the
        last of them. Releases the GIL for long arrays. Raises ValueError for arrays that do not belong together.
        """

    def keep_largest(self, indices: np.ndarray[Any, Any], values: np.ndarray[Any, Any], k: int, /) -> tuple[int, int]:
        """Move the `k` elements of the largest magnitudes, and their indices, to the front, in their order.

        Of equal ones the first are taken. `indices` and `values` are as `select` writes them. Returns the number of
        elements, which is `k` unless there are fewer, and the k-th largest magnitude, 0 if there are fewer. Releases
        the GIL for long arrays. Raises ValueError for arrays that do not belong together.
        """

    def count_magnitudes(
        self, values: np.ndarray[Any, Any], least: int, shift: int, counts: np.ndarray[Any, Any], /
    ) -> None:
        """Add to `counts[i]` the number of values for which magnitude - `least` >> `shift` is i.

        Other values are not counted. `values` are an integer view; `counts` is of int64. Releases the GIL for long
        arrays. Raises ValueError for arrays of other widths.
        """

    def sum_parts(
        self,
        indices: Sequence[np.ndarray[Any, Any]],
        values: Sequence[np.ndarray[Any, Any]],
        first: int,
        end: int,
        found_indices: np.ndarray[Any, Any],
        found_values: np.ndarray[Any, Any],
        /,
    ) -> int:
        """Add up parts of a vector, in their order.

        Indices are int32 or int64 from `first` to below `end`, ascending in each part; values are float32 or float64.
        The sums that are not 0 are written into `found_indices` and `found_values`, which have room for the elements of
        all parts. Returns their number. Releases the GIL for long parts. Raises ValueError for indices that are out of
        order or in another region, and for arrays that do not belong together.
        """

    def common(self, one: np.ndarray[Any, Any], other: np.ndarray[Any, Any], found: np.ndarray[Any, Any], /) -> int:
        """Write into `found`, at least as long as `one`, the indices that `one` and `other` have. Returns their number.

        All are of int32, or of int64; `one` and `other` are ascending. Releases the GIL for long arrays. Raises
        ValueError for arrays of other widths or lengths.
        """

    declarations: tuple[tuple[str, str], ...]
    """The modules of the package whose declarations the core was built from, and the CRC-32 of the text of each."""

    points: tuple[str, ...]
    """The names of the injection points of the compiled core: the steps of its primitives."""

    def watch(self, passed: Callable[[str], None] | None, /) -> Callable[[str], None] | None:
        """Call `passed` with the name of each injection point that a thread of this process passes; None: no longer.

        Returns what was called before. The callable runs in the thread that passes the point, perhaps with a lock of
        shared memory held, so it must not use any. An exception in it is reported as unraisable, and the primitive goes
        on.
        """

    def read_memory(self, pid: int, address: int, into: np.ndarray[Any, Any], /) -> None:
        """Copy the memory at `address` of process `pid`. Releases the GIL. Raises OSError if it fails."""

    def reduce_from_peers(
        self,
        kernel: int,
        pids: tuple[int, ...],
        addresses: tuple[int, ...],
        rank: int,
        own: np.ndarray[Any, Any],
        first: int,
        last: int,
        scratch: np.ndarray[Any, Any],
        divisor: int,
        /,
    ) -> None:
        """Reduce bytes `first` to `last` of the arrays at `addresses`, in order, into those of `own`, number `rank`.

        `scratch` has at least a page for each other array. Releases the GIL. Raises OSError as `read_memory`; the bytes
        of `own` may have been reduced in part then.
        """
