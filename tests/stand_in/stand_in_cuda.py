"""torch.cuda without a GPU: tensors of "cuda:0" have their elements in memory of the host. All work is done at once.

Whole programs run with it, in as many processes as they like: this shows which calls they make, in which thread, on
which stream, and with which values. It cannot show that something is not ordered, unless torch's sanitizer of streams
is on (TORCH_CUDA_SANITIZER=1), which is told of all events; `emulated_cuda.py` and `asyncoll.testing.fake_device` can.

Variables of the environment: STAND_IN_DEVICES, the number of devices; STAND_IN_REFUSES, what the driver refuses, such
as "pins,ipc".
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import threading
import time
import types
import uuid
from pathlib import Path

LIBRARY = (
    Path(__file__).parents[2] / "build" / "stand_in" / "libcudart_stand_in.so"
)  # as `transport.staging.ipc` finds it
_loaded = ctypes.CDLL(str(LIBRARY))  # before torch, which asks once whether there is CUDA

import torch  # noqa: E402
from torch.cuda import _gpu_trace as trace  # noqa: E402

NAME = "stand-in"
MEMORY = 1 << 32  # bytes, as in tensors.cpp
CLOCK = 2e9  # cycles in a second
_COUNT = int(os.environ.get("STAND_IN_DEVICES", "1"))
_REFUSED = os.environ.get("STAND_IN_REFUSES", "").split(",")
_native = torch.ops.stand_in
_capturing: set[int] = set()  # threads
_registered: dict[int, int] = {}  # bytes, by address
_events = itertools.count(1)


def _index(device=None):
    """The index of a device: None, a number, a name or a torch.device."""
    if not isinstance(device, int) and device is not None:
        device = torch.device(device).index
    return _native.current_device() if device is None or device < 0 else device


# -- streams and events ---------------------------------------------------------------------------


class Stream:
    def __init__(self, device=None, priority=0, stream_id=None):
        self.device_index = _index(device)
        self.device = torch.device("cuda", self.device_index)
        self.priority = priority
        if stream_id is None:
            stream_id = _native.new_stream()
            trace.StreamCreationCallbacks.fire_callbacks(stream_id)
        self.stream_id = self.cuda_stream = stream_id

    def wait_event(self, event):
        event.wait(self)

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def query(self):
        return True

    def synchronize(self):
        trace.StreamSynchronizationCallbacks.fire_callbacks(self.cuda_stream)

    def __eq__(self, other):
        return isinstance(other, Stream) and (self.stream_id, self.device) == (other.stream_id, other.device)

    def __hash__(self):
        return hash((self.stream_id, self.device))


class Event:
    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self._number = next(_events)
        self._at = None
        trace.EventCreationCallbacks.fire_callbacks(self._number)

    def record(self, stream=None):
        self._at = time.perf_counter()
        trace.EventRecordCallbacks.fire_callbacks(self._number, (stream or current_stream()).cuda_stream)

    def wait(self, stream=None):
        trace.EventWaitCallbacks.fire_callbacks(self._number, (stream or current_stream()).cuda_stream)

    def query(self):
        return True

    def synchronize(self):
        trace.EventSynchronizationCallbacks.fire_callbacks(self._number)

    def elapsed_time(self, end):
        return (end._at - self._at) * 1e3


def current_stream(device=None):
    return Stream(_index(device), stream_id=_native.current_stream(_index(device)))


def set_stream(stream):
    _native.set_device(stream.device_index)
    _native.set_stream(stream.device_index, stream.stream_id)


@contextlib.contextmanager
def stream(stream):
    if stream is None:
        yield
        return
    with device(None):
        before = current_stream(stream.device)
        set_stream(stream)
        try:
            yield
        finally:
            set_stream(before)


class device(contextlib.ContextDecorator):  # noqa: N801
    def __init__(self, device):
        self._index = _index(device)

    def __enter__(self):
        self._before = _native.current_device()
        _native.set_device(self._index)

    def __exit__(self, *raised):
        _native.set_device(self._before)


def synchronize(device=None):
    trace.DeviceSynchronizationCallbacks.fire_callbacks()


@contextlib.contextmanager
def graph(graph, pool=None, stream=None):
    _capturing.add(threading.get_ident())
    try:
        yield
    finally:
        _capturing.discard(threading.get_ident())


# -- devices and the driver -----------------------------------------------------------------------


class Driver:
    """What torch.cuda.cudart() returns."""

    def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802
        if "pins" in _REFUSED:
            return 801
        if address % 4096 or not nbytes:
            return 1
        if any(address < other + size and other < address + nbytes for other, size in _registered.items()):
            return 712
        _registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802
        return 0 if _registered.pop(address, None) else 713

    def cudaGetErrorString(self, code):  # noqa: N802
        return {1: "invalid argument", 712: "already registered", 713: "not registered", 801: "not supported"}[code]


def get_device_properties(device=None):
    number = uuid.UUID(int=_index(device) + 1)
    return types.SimpleNamespace(name=NAME, total_memory=MEMORY, major=9, minor=0, multi_processor_count=1, uuid=number)


_REPLACED = {
    "CUDAGraph": object,
    "Event": Event,
    "Stream": Stream,
    "_is_in_bad_fork": lambda: False,
    "_lazy_init": lambda: None,
    "_sleep": lambda cycles: time.sleep(cycles / CLOCK),
    "can_device_access_peer": lambda device, other: False,
    "cudart": Driver,
    "current_device": _native.current_device,
    "current_stream": current_stream,
    "default_stream": lambda device=None: Stream(device, stream_id=0),
    "device": device,
    "device_count": lambda: _COUNT,
    "empty_cache": lambda: None,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_name": lambda device=None: NAME,
    "get_device_properties": get_device_properties,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "get_rng_state_all": lambda: [torch.get_rng_state()],
    "graph": graph,
    "is_available": lambda: True,
    "is_current_stream_capturing": lambda: threading.get_ident() in _capturing,
    "is_initialized": lambda: True,
    "manual_seed": lambda seed: None,  # the generator is that of the host
    "manual_seed_all": lambda seed: None,
    "mem_get_info": lambda device=None: (MEMORY, MEMORY),
    "memory_allocated": lambda device=None: 0,
    "set_device": lambda device: _native.set_device(_index(device)),
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
    "set_stream": set_stream,
    "stream": stream,
    "synchronize": synchronize,
}


def _trace(address, is_allocated):
    callbacks = trace.MemoryAllocationCallbacks if is_allocated else trace.MemoryDeallocationCallbacks
    callbacks.fire_callbacks(address)


for _name, _value in _REPLACED.items():
    setattr(torch.cuda, _name, _value)
_resize_on_host = torch.UntypedStorage.resize_


def _resize(storage, nbytes):
    if storage.device.type != "cuda":
        return _resize_on_host(storage, nbytes)
    x = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (0,), (1,))
    _native.resize_storage(x, nbytes)
    return storage


torch.UntypedStorage.resize_ = _resize
torch.Tensor.record_stream = lambda self, stream: None
if "TORCH_CUDA_SANITIZER" in os.environ:
    import atexit

    _told = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int)(_trace)
    _loaded.stand_in_trace(_told)
    atexit.register(_loaded.stand_in_trace, None)
