"""A device without hardware, which notices what a real one would only do wrong now and then."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from asyncoll.forks import address_of
from asyncoll.tensors.reductions import Array, build, dtype_name, storage, torch_view
from asyncoll.testing.devices.fake_exchange import POISON, FakeExchange
from asyncoll.testing.devices.order import Accesses, Order, Ticket
from asyncoll.testing.devices.streams import FakeTransfer, Streams, StreamWork, TurnedBy
from asyncoll.transport.staging import RefusedError
from asyncoll.transport.staging.mirrors import staging

_DEFAULT, _OUT, _IN = "default", "out", "in"
_SLICES_MAX = 5  # of one copy


class Hazard(AssertionError):  # noqa: N818
    """The device was used in a way that gives wrong results, at least now and then."""


@dataclass
class _DeviceMemory:
    """A piece of the memory of the device, and how it is used."""

    content: Array  # its bytes
    accesses: Accesses = field(default_factory=Accesses)
    decoy: Array | None = None  # the memory of the program's tensor, which the host must not touch
    owner: Any = None  # keeps the memory of `decoy`


@dataclass(eq=False)
class FakeMark:
    """A `Mark` of a fake device: where the elements are, packed, and the operation that comes before all copies."""

    _device: FakeDevice
    x: Any
    memory: _DeviceMemory
    start: int
    stream: str
    event: StreamWork
    copies: list[StreamWork] = field(default_factory=list)
    is_changed: bool = False  # by a copy
    unpacked: list[StreamWork] = field(default_factory=list)  # the one that has given the tensor its values

    def __post_init__(self) -> None:
        self.nbytes = int(self.x.nbytes)

    @property
    def elements(self) -> Array:
        """Their bytes."""
        return self.memory.content[self.start : self.start + self.nbytes]

    def come(self) -> FakeTransfer:
        return self._device.come(self)

    def fetch(self, start: int, into: Array) -> FakeTransfer:
        return self._device.fetch(self, start, into)

    def put(self, source: Array, start: int) -> FakeTransfer:
        return self._device.put(source, self, start)

    def queue(
        self, work: Callable[..., object], *writes: Any, reads: Sequence[Any] = (), after: Sequence[FakeMark] = ()
    ) -> FakeTransfer:
        return self._device.queue_after((self, *after), work, writes, reads)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        with self._device.stream(self._device.stream_after([self])):
            yield

    def like(self, dtype: str, shape: tuple[int, ...]) -> tuple[Any, FakeMark]:
        with self._device.stream(self.stream):
            x = self._device.empty(dtype, shape)
            return x, self._device.mark(x)

    def join(self) -> None:
        self._device.join(self)


class FakeDevice:
    """A `Device` in the memory of this process, for tests of code that copies between a device and the host.

    Its tensors are CPU tensors of torch, made by `tensor`. Their own memory holds POISON only, and the device keeps
    their elements elsewhere, so code that touches them directly gets nonsense. Copies arrive in slices of random
    length, and streams go on in random order, both drawn from `seed`.

    `turned_by` says what drives the streams: a "thread" of the device, timers of the running "loop" (for virtual time),
    or the "program", by `turn`. Use `fake_device`, which raises the hazards that the device has noticed:

    - memory of the device is used by two operations, one of which writes, and nothing orders them;
    - the host writes what a copy reads, or what a copy has still to write;
    - memory is pinned twice, or not in whole pages; it is unpinned under a copy, or not pinned, or never;
    - the host writes to the memory of a tensor;
    - bytes of a block that ranks share (`Device.share`) are used before a host has seen the end of an earlier use;
    - such a block is opened, or used, after it was freed, or freed while it is open.

    A host that reads what has not arrived, or the memory of a tensor, gets POISON. What a thread has not seen itself to
    have arrived is not over for it.
    """

    def __init__(self, seed: int = 0, turned_by: TurnedBy = "thread", name: str = "fake:0") -> None:
        self.name = name
        self.hazards: list[str] = []
        self._random = np.random.default_rng([seed, 1])
        self._streams = Streams(seed, turned_by)
        self._order = Order((_DEFAULT, _OUT, _IN))
        self._memories: dict[int, _DeviceMemory] = {}  # by the address of the decoy
        self._many = 64  # of them: look for those whose tensors are gone
        self._current = threading.local()
        self._pinned: dict[int, int] = {}  # bytes, by address
        self._copying: list[FakeTransfer] = []
        self._count = 0  # of copies
        self._failures: dict[int, tuple[BaseException, bool]] = {}
        self._broken: BaseException | None = None
        self._refuses_pins = False
        self._refused: set[str] = set()

    # -- what a program does --------------------------------------------------------------------------

    def tensor(self, x: Any) -> Any:
        """Move the dense CPU tensor `x` of torch, which owns all of its memory, to this device. Returns `x`."""
        owner = x.untyped_storage()
        decoy = _bytes_of(owner)
        with self._streams.lock:
            self._forget_unused()
            self._memories[owner.data_ptr()] = _DeviceMemory(decoy.copy(), decoy=decoy, owner=owner)
        decoy[:] = POISON
        return x

    def compute(self, function: Callable[..., object], *writes: Any, reads: Sequence[Any] = ()) -> None:
        """Queue `function` on the current stream. It gets numpy arrays of the tensors `writes`, and then of `reads`."""
        self._compute(function, writes, reads)

    def hold(self) -> Callable[[], None]:
        """Queue work on the current stream that is over once the function that is returned has been called."""
        with self._streams.lock:
            return self._streams.hold(self._order.queue(self._stream))

    def values(self, x: Any) -> Array:
        """The elements of `x` once all queued work is done, as a numpy array. The calling thread does that work."""
        with self._streams.lock:
            self._streams.run()
            self._order.seen_all()
            return self._elements(x).copy()

    @contextlib.contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """Make stream `name` the current one of this thread. The tasks of a loop share its thread, as on a real one."""
        before, self._current.stream = self._stream, name
        try:
            yield
        finally:
            self._current.stream = before

    # -- what a test does -----------------------------------------------------------------------------

    def turn(self) -> bool:
        """Let one operation go a step on. Returns whether there was one."""
        return self._streams.turn()

    def fail_copy(self, number: int, error: BaseException, *, sticky: bool = False) -> None:
        """The copy with this number, from 0, fails in its middle; with `sticky` all later work fails as well."""
        self._failures[number] = error, sticky

    def refuse(self, what: Literal["share memory", "open memory", "close memory"]) -> None:
        """`share`, or `open` or `shut` of what other ranks have shared, raises RefusedError from here on."""
        self._refused.add(what)

    def refuse_pins(self) -> None:
        """`pin` returns False from here on."""
        self._refuses_pins = True

    def finish(self) -> None:
        """Carry all queued work out, in the calling thread."""
        self._streams.run()

    # -- the `Device` ---------------------------------------------------------------------------------

    def holds(self, x: Any) -> bool:
        try:
            return x.untyped_storage().data_ptr() in self._memories
        # Such a tensor has no memory of its own: it is sparse, fake or nested.
        except (RuntimeError, NotImplementedError):
            return False

    def check(self) -> None:
        """Every stream takes copies."""

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Any:
        return self.tensor(build(np.empty(math.prod(shape), storage(dtype)), dtype, shape, as_torch=True))

    def clone(self, x: Any) -> Any:
        copy = self.empty(dtype_name(x.dtype), tuple(x.shape))
        self.compute(np.copyto, copy, reads=[x])
        return copy

    def queue(self, work: Callable[..., object], *writes: Any, reads: Sequence[Any] = ()) -> None:
        self.compute(self._in_torch(work, (*writes, *reads)), *writes, reads=reads)

    def queue_after(
        self, marks: Sequence[FakeMark], work: Callable[..., object], writes: Sequence[Any], reads: Sequence[Any]
    ) -> FakeTransfer:
        with self._streams.lock, self.stream(self.stream_after(marks)):
            written = np.empty(sum(x.nbytes for x in writes), np.uint8)
            operation = self._compute(self._in_torch(work, (*writes, *reads)), writes, reads)
            transfer = FakeTransfer(self._order, operation.ticket, written, self._streams.lock)

            def end() -> None:
                transfer.advance(0 if self._broken else written.nbytes, self._broken)

            marks[0].copies.append(self._add(self._order.queue(self._stream), _once(end)))
            return transfer

    def stream_after(self, marks: Sequence[FakeMark]) -> str:
        """A stream of the device whose work comes after the marks and their copies."""
        with self._streams.lock:
            late = next((mark for mark in marks if not mark.event.is_over), marks[0])
            channel = self._channel(_IN, late)
            self._wait(channel, [operation for mark in marks for operation in (mark.event, *mark.copies)])
            return channel

    def mark(self, x: Any) -> FakeMark:
        with self._streams.lock:
            memory, (start, stop) = self._memory(x), _extent(x)
            ticket = self._order.queue(self._stream)
            steps: Iterator[None] = iter(())
            if not x.is_contiguous():
                elements, packed = self._elements(x), np.full(x.nbytes, POISON, np.uint8)
                self._use(ticket, memory, start, stop, writes=False)
                steps = _once(lambda: _copy(packed.view(elements.dtype), elements.reshape(-1)))
                memory, start = _DeviceMemory(packed), 0
                self._use(ticket, memory, 0, packed.nbytes, writes=True)
            return FakeMark(self, x, memory, start, self._stream, self._add(ticket, steps))

    def come(self, mark: FakeMark) -> FakeTransfer:
        with self._streams.lock:
            ticket = self._order.queue(self._channel(_IN, mark), mark.event.ticket)
            transfer = FakeTransfer(self._order, ticket, np.empty(1, np.uint8), self._streams.lock)
            self._add(ticket, _once(lambda: transfer.advance(0 if self._broken else 1, self._broken)), [mark.event])
            return transfer

    def fetch(self, mark: FakeMark, start: int, into: Array) -> FakeTransfer:
        source = mark.elements[start : start + into.nbytes]

        def move(first: int, last: int) -> None:
            if (into[first:last] != POISON).any():
                self.note("the host has written memory that a copy from the device has still to write")
            into[first:last] = source[first:last]

        with self._streams.lock:
            into[:] = POISON
            return self.queue_copy(_OUT, into, move, (mark, start), writes=False)

    def put(self, source: Array, mark: FakeMark, start: int) -> FakeTransfer:
        into, before = mark.elements[start : start + source.nbytes], source.copy()

        def move(first: int, last: int) -> None:
            if (source[first:last] != before[first:last]).any():
                self.note("the host has written memory that a copy to the device has still to read")
            into[first:last] = source[first:last]

        with self._streams.lock:
            return self.queue_copy(_IN, source, move, (mark, start), writes=True)

    def join(self, mark: FakeMark) -> None:
        with self._streams.lock:
            before = [mark.event, *mark.copies, *mark.unpacked]
            if mark.x.is_contiguous() or not mark.is_changed or mark.unpacked:
                self._wait(self._stream, before)
                self._wait(mark.stream, before)
                return
            elements = self._elements(mark.x)
            ticket = self._order.queue(self._stream, *(operation.ticket for operation in before))
            self._use(ticket, mark.memory, 0, mark.nbytes, writes=False)
            self._use(ticket, self._memory(mark.x), *_extent(mark.x), writes=True)
            packed = mark.memory.content.view(elements.dtype)
            steps = _once(lambda: _copy(elements, packed.reshape(elements.shape)))
            mark.unpacked.append(self._add(ticket, steps, before))
            if mark.stream != self._stream:
                self._wait(mark.stream, mark.unpacked)

    def pin(self, block: Array) -> bool:
        with self._streams.lock:
            address, nbytes = address_of(block), block.nbytes
            if self._refuses_pins:
                return False
            if not nbytes or address % mmap.PAGESIZE or nbytes % mmap.PAGESIZE:
                self.note(f"{nbytes} bytes at {address:#x} are not whole pages, and were pinned")
            if any(address < other + size and other < address + nbytes for other, size in self._pinned.items()):
                self.note(f"{nbytes} bytes at {address:#x} were pinned twice")
            self._pinned[address] = nbytes
            return True

    def pinned(self, nbytes: int) -> Array | None:
        return None

    def unpin(self, block: Array) -> None:
        with self._streams.lock:
            address, nbytes = address_of(block), block.nbytes
            if self._pinned.pop(address, None) != nbytes:
                self.note(f"{nbytes} bytes at {address:#x} were unpinned, and not pinned before")
            if any(_overlap(copy.host, block) for copy in self._copying if not copy.is_over):
                self.note(f"{nbytes} bytes at {address:#x} were unpinned while they were copied")

    def share(self, nbytes: int) -> FakeExchange:
        self.check_share("share memory")
        return FakeExchange(self, nbytes)

    def close(self) -> bool:
        self._streams.close()
        if self._pinned:
            self.note(f"{len(self._pinned)} blocks were never unpinned")
        for memory in self._memories.values():
            self._check(memory)
        return all(copy.is_over for copy in self._copying)

    # -- operations ---------------------------------------------------------------------------------

    @property
    def _stream(self) -> str:
        return getattr(self._current, "stream", _DEFAULT)

    def _compute(self, function: Callable[..., object], writes: Sequence[Any], reads: Sequence[Any]) -> StreamWork:
        with self._streams.lock:
            tensors = (*writes, *reads)
            arrays = [self._elements(x) for x in tensors]
            ticket = self._order.queue(self._stream)
            for index, x in enumerate(tensors):
                self._use(ticket, self._memory(x), *_extent(x), writes=index < len(writes))
            return self._add(ticket, _once(lambda: self._broken or function(*arrays)))

    def _in_torch(self, work: Callable[..., object], tensors: Sequence[Any]) -> Callable[..., None]:
        """`work` as a function of numpy arrays of `tensors`."""
        dtypes = [dtype_name(x.dtype) for x in tensors]

        def carry_out(*arrays: Array) -> None:
            try:
                work(*map(torch_view, arrays, dtypes))
            # Content that makes no sense raises here. A real device does no more work after it.
            except Exception as error:
                self._broken = error

        return carry_out

    def _add(self, ticket: Ticket, steps: Iterator[None], after: Sequence[StreamWork] = ()) -> StreamWork:
        operation = StreamWork(ticket, steps, after)
        self._streams.add(operation)
        return operation

    def _wait(self, stream: str, operations: Sequence[StreamWork]) -> None:
        ticket = self._order.queue(stream, *(operation.ticket for operation in operations))
        self._add(ticket, iter(()), operations)

    def queue_copy(
        self,
        stream: str,
        other: Array,
        move: Callable[[int, int], None],
        of: tuple[FakeMark, int] | None = None,
        *,
        writes: bool = False,
    ) -> FakeTransfer:
        """Queue a copy between `other`, and the bytes of a mark from the given one on. `move` copies a slice.

        With `writes` the mark's bytes are written, else read. None: it uses no tensor.
        """
        with self._streams.lock:
            events = [of[0].event] if of else []
            channel = self._channel(stream, of[0]) if of else stream
            ticket = self._order.queue(channel, *(event.ticket for event in events))
            transfer = FakeTransfer(self._order, ticket, other, self._streams.lock)
            failure = self._failures.get(self._count)
            self._count += 1
            self._copying = [*(copy for copy in self._copying if not copy.is_over), transfer]
            operation = self._add(ticket, self._slices(transfer, move, failure), events)
            if of:
                mark, first = of[0], of[0].start + of[1]
                self._use(ticket, mark.memory, first, first + other.nbytes, writes=writes)
                mark.is_changed |= writes
                mark.copies.append(operation)
            return transfer

    def _channel(self, stream: str, mark: FakeMark) -> str:
        """Where a copy of `mark` waits: on `stream` if it has nothing to wait for, which would hold up others there."""
        return stream if mark.event.is_over else f"{stream} of {mark.stream}"

    def check_share(self, what: str) -> None:
        """Raises RefusedError if it is refused to do that."""
        if what in self._refused:
            raise RefusedError(f"{self.name} is told not to {what}")

    def _slices(
        self, transfer: FakeTransfer, move: Callable[[int, int], None], failure: tuple[BaseException, bool] | None
    ) -> Iterator[None]:
        count = self._random.integers(1, _SLICES_MAX, endpoint=True)
        ends = sorted({*self._random.integers(0, transfer.nbytes + 1, count - 1).tolist(), transfer.nbytes} - {0})
        for end in ends:
            if failure is not None and end == ends[len(ends) // 2]:
                error, is_sticky = failure
                self._broken = error if is_sticky else self._broken
                return transfer.advance(transfer.done, error)
            if self._broken is not None:
                return transfer.advance(transfer.done, self._broken)
            move(transfer.done, end)
            transfer.advance(end)
            yield
        return None

    # -- memory -------------------------------------------------------------------------------------

    def _forget_unused(self) -> None:
        """Forget the memory of tensors that are gone, if there is much. Operations that use it keep it."""
        if len(self._memories) < self._many:
            return
        for address, memory in list(self._memories.items()):
            if _is_unused(memory.owner):
                self._check(memory)
                del self._memories[address]
        self._many = 2 * len(self._memories) + 64

    def _check(self, memory: _DeviceMemory) -> None:
        if memory.decoy is not None and (memory.decoy != POISON).any():
            self.note("the host has written to the memory of a tensor of the device")

    def _memory(self, x: Any) -> _DeviceMemory:
        return self._memories[x.untyped_storage().data_ptr()]

    def _elements(self, x: Any) -> Array:
        """The elements of `x` on the device, as an array of its shape and layout."""
        dtype = storage(dtype_name(x.dtype))
        strides = [stride * dtype.itemsize for stride in x.stride()]
        content = self._memory(x).content
        return np.ndarray(tuple(x.shape), dtype, content.data, x.storage_offset() * dtype.itemsize, strides)

    def _use(self, ticket: Ticket, memory: _DeviceMemory, start: int, stop: int, *, writes: bool) -> None:
        if other := memory.accesses.add(ticket, start, stop, writes=writes):
            verb = "writes" if writes else "reads"
            self.note(f"an operation of stream {ticket.stream!r} {verb} memory, and nothing orders it with {other}")
        memory.accesses.forget(self._order)

    def note(self, hazard: str) -> None:
        self.hazards.append(f"{self.name}: {hazard}")


@contextlib.contextmanager
def fake_device(seed: int = 0, turned_by: TurnedBy = "thread", name: str = "fake:0") -> Iterator[FakeDevice]:
    """A `FakeDevice`, closed in the end. Calls of this process take its tensors meanwhile.

    Raises Hazard if the block has ended and the device has noticed hazards.
    """
    device = FakeDevice(seed, turned_by, name)
    try:
        with staging(device):
            try:
                yield device
            finally:
                device.finish()
    finally:
        device.close()
    if device.hazards:
        raise Hazard("; ".join(device.hazards))


def _bytes_of(storage: Any) -> Array:
    """The memory of an untyped storage of torch."""
    if not storage.nbytes():
        return np.empty(0, np.uint8)
    return np.frombuffer((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()), np.uint8)


def _is_unused(storage: Any) -> bool:
    """Whether no tensor has this untyped storage of torch any more: the reference of its Python object is the last.

    Those without bytes all have the same address.
    """
    count: int = sys.modules["torch"]._C._storage_Use_Count(storage._cdata)
    return storage.nbytes() > 0 and count == 1


def _extent(x: Any) -> tuple[int, int]:
    """The bytes of its storage that `x` may use: the first one, and the one after the last."""
    if not x.numel():
        return 0, 0
    first = x.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return first * x.itemsize, (last + 1) * x.itemsize


def _overlap(x: Array, y: Array) -> bool:
    return address_of(x) < address_of(y) + y.nbytes and address_of(y) < address_of(x) + x.nbytes


def _once(act: Callable[[], object]) -> Iterator[None]:
    act()
    return
    yield


def _copy(into: Array, source: Array) -> None:
    into[...] = source
