"""CUDA without hardware: what `transport.staging.cuda` uses of torch, carried out by the streams of a fake device.

Tensors say that they are on "cuda:0", and show nothing to the host. The hazards are those of `FakeDevice`, and:

- memory of the device is freed while another stream uses it, so that the next tensor of its stream gets it in use;
- a new tensor is used by a stream which nothing orders with the one that it was made on;
- two copies use the same bytes of the host, one of them writes, and nothing orders them;
- a copy which the host does not wait for is of memory that is not pinned, or not all in one registration;
- the host spins until an event comes, or a capture is disturbed, on its stream or by another thread.

What it cannot show: how a driver copies, what it locks, and how torch reuses memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import weakref
from unittest import mock

import numpy as np
import torch

from asyncoll.forks import address_of
from asyncoll.tensors import staged
from asyncoll.testing.devices.fake import POISON, FakeDevice, Hazard
from asyncoll.testing.devices.order import latest

_DEFAULT = "default"
_REFUSED = 1  # cudaErrorInvalidValue
_GLOBAL, _RELAXED = 0, 2  # of cudaStreamCaptureMode


class Tensor(torch.Tensor):
    """A tensor of an emulated device. Views are views of `inner`, the tensor of the fake device."""

    gpu = None  # the `Gpu` that is in use

    @staticmethod
    def __new__(cls, inner, memory):
        x = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=memory.place,
        )
        x.inner, x.memory = inner, memory
        return x

    def data_ptr(self):
        return self.inner.data_ptr()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name, kwargs = func.__name__, kwargs or {}
        if name in _VIEWS:
            with torch._C.DisableTorchFunctionSubclass():
                viewed = func(*(each.inner if isinstance(each, cls) else each for each in args), **kwargs)
            return cls(viewed, args[0].memory)
        if name == "data_ptr":
            return args[0].inner.data_ptr()
        if name == "copy_":
            return cls.gpu.copy(*args, **kwargs)
        if name in ("contiguous", "clone"):
            return args[0] if name == "contiguous" and args[0].is_contiguous() else cls.gpu.clone(args[0])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"the emulation has no {func}")


_VIEWS = {"detach", "view", "reshape", "t", "__getitem__", "expand", "as_strided"}


class Memory:
    """A piece of the memory of an emulated device, as long as tensors refer to it."""

    def __init__(self, place):
        self.place = place
        self.is_inference = torch.is_inference_mode_enabled()


class Stream:
    """torch.cuda.Stream."""

    def __init__(self, device=None, priority=0, name=None):
        self.device = device
        self.name = name or f"stream {next(_numbers)}"

    def wait_event(self, event):
        event.wait(self)

    def wait_stream(self, other):
        event = Event()
        event.record(other)
        event.wait(self)

    def __eq__(self, other):
        return self.name == other.name

    def __hash__(self):
        return hash(self.name)


_numbers = iter(range(1 << 60))


class Event:
    """torch.cuda.Event."""

    def __init__(self, enable_timing=False, blocking=False):
        self._blocking = blocking
        self._operation = None

    def record(self, stream):
        self._operation, self._come = Tensor.gpu.record(stream.name)

    def wait(self, stream):
        if self._operation is not None:
            Tensor.gpu.wait(stream.name, self._operation)

    def synchronize(self):
        if not self._blocking:
            Tensor.gpu.note("the host spins until an event comes")
        Tensor.gpu.check_mode()
        self._come.wait()
        Tensor.gpu.saw(self._operation)


class Runtime:
    """What `ipc.relaxed` uses of `ipc.loaded_runtime()`."""

    def __init__(self, gpu):
        self._gpu = gpu

    def exchange_capture_mode(self, mode):
        before = getattr(self._gpu.modes, "mode", _GLOBAL)
        self._gpu.modes.mode = mode
        return before


class Driver:
    """What torch.cuda.cudart() returns."""

    def __init__(self, gpu):
        self._gpu = gpu

    def cudaGetErrorString(self, code):  # noqa: N802
        return {_REFUSED: "invalid argument"}[code]

    def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802
        self._gpu.check_thread()
        self._gpu.check_mode()
        if self._gpu.refuses_after == 0:
            self._gpu.pending_error_of = threading.current_thread()
            return _REFUSED
        self._gpu.refuses_after -= 1
        self._gpu.pin(_bytes_at(address, nbytes))
        self._gpu.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802
        self._gpu.check_thread()
        self._gpu.check_mode()
        nbytes = self._gpu.registered.pop(address, None)
        if nbytes is None:
            return _REFUSED
        self._gpu.unpin(_bytes_at(address, nbytes))
        return 0


class Gpu(FakeDevice):
    """The devices of an emulated process. Use `emulated_cuda`."""

    def __init__(self, seed, turned_by, count):
        super().__init__(seed, turned_by, "cuda")
        self.count = count
        self.captured = set()  # names of streams
        self.registered = {}  # bytes, by address
        self.refuses_after = 1 << 60  # pins
        self.modes = threading.local()  # of cudaStreamCaptureMode
        self.pending_error_of = None  # a thread
        self.free_bytes = 1 << 60
        self._known = weakref.WeakValueDictionary()  # Memory, by address of the inner tensor
        self._copies_of_host = []  # (ticket, start, stop, writes)
        self._seen = {}  # the clock of what the host has seen the end of
        self._allocated = set()  # addresses of pinned memory of torch

    # -- what a program does --------------------------------------------------------------------------

    def tensor(self, x, index=0):
        """Move the dense CPU tensor `x`, which owns all of its memory, to a device. `x` is of no use any more."""
        if x.nbytes > self.free_bytes:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {x.nbytes} bytes.")
        inner = FakeDevice.tensor(self, x)
        memory = Memory(torch.device("cuda", index))
        self._known[inner.untyped_storage().data_ptr()] = memory
        weakref.finalize(memory, self._free, inner.untyped_storage().data_ptr(), self._stream)
        return Tensor(inner, memory)

    def made(self, x, index):
        """A new tensor: its memory may be in use by what its stream, and no other one, has queued before."""
        made = self.tensor(x, index)
        with self._streams.lock:
            memory = self._memory(made.inner)
            self._use(self._order.queue(self._stream), memory, 0, len(memory.content), writes=True)
        return made

    def compute(self, function, *writes, reads=()):
        super().compute(function, *map(_inner, writes), reads=[*map(_inner, reads)])

    def carry_out(self, work, writes, reads):
        """What `cuda._carry_out` does: operations of torch would need a driver."""
        self.check()
        FakeDevice.queue(self, work, *map(_inner, writes), reads=[*map(_inner, reads)])

    def values(self, x):
        found = super().values(_inner(x))
        self._order._passed = latest(*self._order._streams.values())  # the device's thread may free memory from here on
        return found

    def holds(self, x):
        return isinstance(x, Tensor)

    # -- what a test does -----------------------------------------------------------------------------

    def fail(self, error):
        """The device is broken: all that the program asks of it raises, as after an access to no memory."""
        self._broken = error

    def run(self):
        """Carry all queued work out."""
        self._streams.run()

    # -- what torch does ------------------------------------------------------------------------------

    def check_thread(self):
        if self.pending_error_of is threading.current_thread():
            self.note("a thread goes on although the driver keeps an error for it")

    def check_mode(self):
        """What this thread does now disturbs a capture of another, unless it has asked not to."""
        if self.captured and getattr(self.modes, "mode", _GLOBAL) != _RELAXED:
            self.note("a thread disturbs the capture of another")

    def check(self):
        self.check_thread()
        if self._broken is not None:
            raise RuntimeError(f"CUDA error: {self._broken}")

    def record(self, stream):
        self.check()
        come = threading.Event()
        with self._streams.lock:
            operation = self._add(self._order.queue(stream), _steps(come.set))
        return operation, come

    def wait(self, stream, operation):
        self.check()
        with self._streams.lock:
            if stream in self.captured:
                self.note("a captured stream waits for work that is not captured")
            self._wait(stream, [operation])

    def saw(self, operation):
        self.check()
        with self._streams.lock:
            self._order.seen_by_all(operation.ticket)  # as it raises `moved`, which cannot be observed here
            self._seen = latest(self._seen, operation.ticket.clock)

    def clone(self, x):
        copy = self.tensor(torch.empty(tuple(x.shape), dtype=x.dtype), x.device.index)
        self.compute(lambda into, source: np.copyto(into, source), copy, reads=[x])
        return copy

    def copy(self, into, source, non_blocking=False):
        self.check()
        assert non_blocking, "the host waits for a copy"
        assert not torch.is_grad_enabled() or not (into.requires_grad or source.requires_grad)
        if isinstance(into, Tensor) and into.memory.is_inference and not torch.is_inference_mode_enabled():
            raise RuntimeError("Inplace update to inference tensor outside InferenceMode is not allowed")
        if isinstance(into, Tensor) and isinstance(source, Tensor):
            self.compute(lambda into, source: np.copyto(into, source), into, reads=[source])
        elif isinstance(into, Tensor):
            self._from_host(into, source)
        else:
            self._to_host(into, source)
        return into

    def _to_host(self, into, source):
        host = _bytes_at(into.data_ptr(), into.nbytes)
        with self._streams.lock:
            host[:] = POISON

            def move(elements):
                if (host != POISON).any():
                    self.note("the host has written memory that a copy from the device has still to write")
                host[:] = np.ascontiguousarray(elements).reshape(-1).view(np.uint8)

            self._use_of_host(host, writes=True)
            self.compute(move, reads=[source])

    def _from_host(self, into, source):
        host = _bytes_at(source.data_ptr(), source.nbytes)
        with self._streams.lock:
            before = host.copy()

            def move(elements):
                if (host != before).any():
                    self.note("the host has written memory that a copy to the device has still to read")
                elements[...] = before.view(elements.dtype).reshape(elements.shape)

            self._use_of_host(host, writes=False)
            self.compute(move, into)

    def _use_of_host(self, host, *, writes):
        """The next operation of the current stream uses these bytes of the host."""
        start, stop = address_of(host), address_of(host) + host.nbytes
        ranges = [(each, each + nbytes) for each, nbytes in self.registered.items()]
        pinned = (*ranges, *self._allocated)
        if host.nbytes and not any(first <= start and stop <= last for first, last in pinned):
            self.note(f"a copy of {host.nbytes} bytes which are not in one piece of pinned memory")
        clock = latest(self._seen, self._order._streams.get(self._stream, {}))
        number = clock.get(self._stream, 0) + 1
        kept = []
        for stream, other, first, last, wrote in self._copies_of_host:
            if self._seen.get(stream, 0) >= other:
                continue
            kept.append((stream, other, first, last, wrote))
            if (writes or wrote) and max(start, first) < min(stop, last) and clock.get(stream, 0) < other:
                self.note("two copies use the same memory of the host, and nothing orders them")
        self._copies_of_host = [*kept, (self._stream, number, start, stop, writes)]

    def _free(self, address, stream):
        """No tensor refers to the memory any more: the next tensor of its stream may get it."""
        if not address:  # all tensors without elements have this one
            return
        with self._streams.lock:
            memory = self._memories.pop(address)
            self._use(self._order.queue(stream), memory, 0, len(memory.content), writes=True)
            if (memory.decoy != POISON).any():
                self.note("the host has written to the memory of a tensor of the device")

    def unpin(self, block):
        with self._streams.lock:
            start, stop = address_of(block), address_of(block) + block.nbytes
            for stream, number, first, last, _ in [] if self._broken else self._copies_of_host:  # or no copy goes on
                if self._seen.get(stream, 0) < number and max(start, first) < min(stop, last):
                    self.note("memory was unpinned while it was copied")
            super().unpin(block)

    def host_memory(self, nbytes):
        """Pinned memory of torch."""
        block = np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8)[:nbytes]
        limits = address_of(block), address_of(block) + nbytes
        self._allocated.add(limits)
        self._kept = [*getattr(self, "_kept", []), block]  # torch does not reuse it before copies are over
        return torch.from_numpy(block)


def _inner(x):
    return x.inner if isinstance(x, Tensor) else x


def _steps(act):
    act()
    return
    yield


def _bytes_at(address, nbytes):
    """These bytes, which are not kept alive by it."""
    if not nbytes:
        return np.empty(0, np.uint8)
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), np.uint8)


@contextlib.contextmanager
def emulated_cuda(seed=0, turned_by="thread", count=2):
    """A `Gpu`, whose devices torch shows as CUDA in the meantime. Raises Hazard in the end if there were any."""
    gpu = Gpu(seed, turned_by, count)
    empty = torch.empty

    def empty_anywhere(*shape, device=None, pin_memory=False, **options):
        if pin_memory:
            return gpu.host_memory(*shape)
        if device is None or torch.device(device).type != "cuda":
            return empty(*shape, device=device, **options)
        return gpu.made(empty(*shape, **options), torch.device(device).index)

    @contextlib.contextmanager
    def stream(each):
        with gpu.stream(each.name):
            yield

    cuda = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: count,
        "get_device_capability": lambda device=None: (9, 0),
        "current_stream": lambda device=None: Stream(device, name=gpu._stream),
        "stream": stream,
        "Stream": Stream,
        "Event": Event,
        "device": lambda place: contextlib.nullcontext(),
        "cudart": lambda: Driver(gpu),
        "is_current_stream_capturing": lambda: gpu._stream in gpu.captured,
    }
    with contextlib.ExitStack() as patched:
        patched.enter_context(mock.patch.multiple(torch.cuda, **cuda))
        patched.enter_context(mock.patch.object(torch, "empty", empty_anywhere))
        plain = staged._is_plain
        patched.enter_context(mock.patch.object(staged, "_is_plain", lambda x: isinstance(x, Tensor) or plain(x)))
        patched.enter_context(mock.patch("asyncoll.transport.staging.cuda._carry_out", gpu.carry_out))
        patched.enter_context(mock.patch("asyncoll.transport.staging.ipc.loaded_runtime", return_value=Runtime(gpu)))
        Tensor.gpu = gpu
        try:
            yield gpu
        finally:
            gpu.run()
            gpu.close()
    if gpu.hazards:
        raise Hazard("; ".join(gpu.hazards))
