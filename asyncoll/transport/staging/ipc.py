"""Memory of a GPU that the processes of a host read from each other: raw blocks of CUDA, by torch and CUDA IPC.

`tests/transport/staging/test_ipc.py` checks what needs no GPU: errors of the
driver, handles, and the bits of reductions. Handles are plain bytes. Blocks come from `cudaMalloc`, because torch's
allocator moves and frees the memory of tensors, and torch's own sharing of tensors is private, and needs file
descriptors with expandable segments.

To free or to close a block, CUDA waits for all work of the GPU, and the runtime's loop would wait with it. So a block
of this process that is not used any more stays for the next communicator, and one that was opened stays open. Both end
with the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any
from uuid import UUID

import torch

from asyncoll.errors import describe
from asyncoll.tensors.reductions import HALVES, ReduceOp, torch_function
from asyncoll.transport.staging import HANDLE_BYTES, BlockPart, RefusedError, Transfer

_HANDLE = struct.Struct("=64s16sQ8s")  # the handle of CUDA IPC, the UUID of the GPU, the bytes of the block, a nonce
_NONCE_BYTES = 8  # CUDA does not say that handles differ between processes, for instance of different PID namespaces
_GRAIN = 1 << 21  # bytes: smaller allocations of CUDA share a page of the GPU, and so would their handles
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag that there is
_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_ALREADY_ENABLED = 704  # cudaErrorPeerAccessAlreadyEnabled


@contextlib.contextmanager
def refusing(what: str = "") -> Iterator[None]:
    """Every error becomes a RefusedError, whose reason begins with `what`: of the driver, of torch, and of ctypes."""
    try:
        yield
    except Exception as error:
        reason = str(error) if isinstance(error, RefusedError) else describe(error)
        raise RefusedError(what + reason) from error


class _IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t, which is passed by value."""

    _fields_ = (("raw", ctypes.c_ubyte * 64),)


class Runtime:
    """The functions of the CUDA runtime that torch has loaded. They raise RefusedError, with the driver's reason.

    The current device of the thread is that of the memory.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self.lock = threading.Lock()  # of the blocks: the ranks of this process share them
        self.addresses: dict[bytes, int] = {}  # of the blocks of this process, by handle: CUDA opens none where it is
        self.opened: dict[tuple[bytes, bytes], int] = {}  # those of others, by the UUID of the reading GPU and handle
        self._unused: dict[bytes, list[bytes]] = {}  # handles of blocks of this process, by GPU and size
        library.cudaGetErrorString.restype = ctypes.c_char_p
        library.cudaIpcOpenMemHandle.argtypes = (ctypes.POINTER(ctypes.c_void_p), _IpcHandle, ctypes.c_uint)

    def block(self, uuid: bytes, nbytes: int) -> bytes:
        """The handle of an unused block of the current device, whose UUID is `uuid`. Raises RefusedError."""
        with self.lock:
            if unused := self._unused.setdefault(_kind(uuid, nbytes), []):
                return unused.pop()
        address = self.allocate(-(-nbytes // _GRAIN) * _GRAIN)
        try:
            handle = _HANDLE.pack(self.export(address), uuid, nbytes, os.urandom(_NONCE_BYTES))
        except Exception:
            # The reason is the first error.
            with contextlib.suppress(RefusedError):
                self.free(address)
            raise
        self.addresses[handle] = address
        return handle

    def give_back(self, handle: bytes) -> None:
        """No rank uses the block any more. It stays allocated, for the next `block` of its kind."""
        _, uuid, nbytes, _ = _HANDLE.unpack(handle)
        self._unused[_kind(uuid, nbytes)].append(handle)

    def allocate(self, nbytes: int) -> int:
        address = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value or 0

    def free(self, address: int) -> None:
        self._call("cudaFree", ctypes.c_void_p(address))

    def export(self, address: int) -> bytes:
        handle = _IpcHandle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        address = ctypes.c_void_p()
        self._call(
            "cudaIpcOpenMemHandle", ctypes.byref(address), _IpcHandle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
        )
        return address.value or 0

    def exchange_capture_mode(self, mode: int) -> int:
        """Set what this thread may not do while streams are captured. Returns what was set before."""
        exchanged = ctypes.c_int(mode)
        self._call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(exchanged))
        return exchanged.value

    def enable_peer_access(self, device: int) -> None:
        """Let the current device use the memory of that one, which is of this process."""
        self._call("cudaDeviceEnablePeerAccess", ctypes.c_int(device), ctypes.c_uint(0), accepts=_ALREADY_ENABLED)

    def _call(self, function: str, *arguments: Any, accepts: int = 0) -> None:
        code = getattr(self._library, function)(*arguments)
        if code:
            # Otherwise the next call of this thread would fail with the same error.
            self._library.cudaGetLastError()
        if code not in (0, accepts):
            raise RefusedError(f"{function}: {self._library.cudaGetErrorString(code).decode()}")


def _kind(uuid: bytes, nbytes: int) -> bytes:
    """What all blocks have in common that can replace each other."""
    return _HANDLE.pack(b"", uuid, nbytes, b"")


@cache
@refusing()
def loaded_runtime() -> Runtime:
    """The one that torch has loaded. Raises RefusedError if it is not found."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "libcudart" in line}
    if len(paths) != 1:
        raise RefusedError(f"torch has loaded {len(paths)} libraries libcudart, and one is needed")
    return Runtime(ctypes.CDLL(paths.pop()))


@contextlib.contextmanager
def relaxed() -> Iterator[None]:
    """Let this thread wait for events, pin and allocate while other threads capture CUDA graphs.

    In the mode "global", which is that of torch, CUDA forbids it to threads that have not asked for it, and the capture
    fails. Without effect if the runtime of CUDA is not found.
    """
    try:
        runtime = loaded_runtime()
        before = runtime.exchange_capture_mode(_RELAXED)
    except (RefusedError, AttributeError):
        yield
        return
    try:
        yield
    finally:
        # The device is broken, which copies tell.
        with contextlib.suppress(RefusedError):
            runtime.exchange_capture_mode(before)


Queue = Callable[[int, Callable[[], None], Any], Transfer]


class Gpu:
    """What the exchange uses of "cuda:`index`" of this process."""

    def __init__(self, index: int, queue: Queue) -> None:
        """`queue(nbytes, work, mark)` queues `work`, which moves `nbytes`, on a stream of the device.

        It comes after `mark`, unless that is None, and the mark's `join` after it.
        """
        self.place = torch.device("cuda", index)
        self.queue = queue
        self.uuid = _uuid(index)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the device that of this thread, which disturbs no capture of another."""
        with torch.cuda.device(self.place), relaxed():
            yield

    def index_of(self, uuid: bytes) -> int:
        """The number of a GPU whose memory this one can read. Raises RefusedError, with the reason, if it cannot.

        NVIDIA documents that cudaIpcOpenMemHandle also opens memory of GPUs that are not visible here. It is refused
        all the same: cudaDeviceCanAccessPeer does not know them, and what torch does with such memory was not tried.
        """
        if uuid == self.uuid:
            return self.place.index
        name = f"GPU-{UUID(bytes=uuid)}"  # as nvidia-smi shows it
        index = next((each for each in range(torch.cuda.device_count()) if _uuid(each) == uuid), None)
        if index is None:
            raise RefusedError(
                f"{name} is not visible here, where CUDA_VISIBLE_DEVICES is "
                f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}: make the GPUs of all ranks visible to all ranks"
            )
        if not torch.cuda.can_device_access_peer(self.place, index):
            raise RefusedError(f"{self.place} cannot read the memory of {name}: they are no peers")
        return index

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        """The memory there, as a flat tensor of the device, which does not keep it allocated.

        Raises RefusedError if torch copies it.
        """

        class IpcMemory:
            def __init__(self) -> None:
                shape, data = (nbytes,), (address, False)
                self.__cuda_array_interface__ = {"shape": shape, "typestr": "|u1", "data": data, "version": 3}

        x = torch.as_tensor(IpcMemory(), device=self.place)
        if x.data_ptr() != address:
            raise RefusedError(
                f"torch {torch.__version__} copies the memory of another GPU instead of using it: torch 2.9 or newer "
                "is needed between GPUs"
            )
        return x


def _uuid(index: int) -> bytes:
    """The UUID of a device that this process sees: 16 bytes."""
    return UUID(str(torch.cuda.get_device_properties(index).uuid)).bytes


class CudaExchange:
    """Implements `transport.staging.Exchange`. Marks have their elements in `content`, and say if they `is_changed`."""

    def __init__(self, gpu: Gpu, runtime: Runtime, nbytes: int) -> None:
        """Raises RefusedError if the GPU has too little memory, or exports none."""
        self._gpu = gpu
        self._runtime = runtime
        with gpu.current():
            self.handle = runtime.block(gpu.uuid, nbytes)
            try:
                self._own = gpu.bytes_at(runtime.addresses[self.handle], nbytes)
            except Exception:
                runtime.give_back(self.handle)
                raise
        self._blocks: dict[int, torch.Tensor] = {}  # by rank
        self._transfers: list[Transfer] = []

    @refusing()
    def open(self, handles: Mapping[int, bytes]) -> None:
        opened = {}
        with self._gpu.current():
            for rank, handle in handles.items():
                with refusing(f"the block of group rank {rank}: "):
                    opened[rank] = self._opened(handle)
        self._blocks |= opened

    def reduces(self, op: ReduceOp, dtype: str) -> bool:
        if dtype.startswith("complex"):  # products and quotients of a GPU may be rounded in another way
            return op is ReduceOp.SUM
        return not (dtype in ("uint16", "uint32", "uint64") and op in (ReduceOp.MIN, ReduceOp.MAX))  # torch has none

    def write(self, mark: Any, parts: Sequence[BlockPart]) -> Transfer:
        def copy() -> None:
            for into, source in self._places(mark, parts):
                into.copy_(source, non_blocking=True)

        return self._queue(sum(part.nbytes for part in parts), copy, mark)

    def read(self, mark: Any, parts: Sequence[BlockPart]) -> Transfer:
        def copy() -> None:
            for source, into in self._places(mark, parts):
                into.copy_(source, non_blocking=True)

        mark.is_changed = True
        return self._queue(sum(part.nbytes for part in parts), copy, mark)

    def _places(self, mark: Any, parts: Sequence[BlockPart]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The bytes of the block, and of the tensor, of each part."""
        for rank, offset, start, nbytes in parts:
            yield self._blocks[rank][offset : offset + nbytes], mark.content[start : start + nbytes]

    def reduce(self, op: ReduceOp, dtype: str, offset: int, nbytes: int) -> Transfer:
        parts = [self._blocks[rank][offset : offset + nbytes] for rank in sorted(self._blocks)]
        into = self._own[offset : offset + nbytes]
        return self._queue(nbytes, lambda: reduce_on_device(into, parts, op, dtype))

    def under_way(self) -> list[Transfer]:
        return [each for each in self._transfers if each.moved < each.nbytes and each.error is None]

    @refusing()
    def shut(self) -> bool:
        if self.under_way():
            return False
        self._blocks = {}
        return True

    @refusing()
    def free(self) -> None:
        self._runtime.give_back(self.handle)

    def _opened(self, handle: bytes) -> torch.Tensor:
        if len(handle) != HANDLE_BYTES:
            raise RefusedError(f"its handle has {len(handle)} bytes instead of {HANDLE_BYTES}")
        raw, uuid, nbytes, _ = _HANDLE.unpack(handle)
        if nbytes != self._own.numel():
            raise RefusedError(f"it has {nbytes} bytes instead of {self._own.numel()}")
        peer, key = self._gpu.index_of(uuid), (self._gpu.uuid, handle)
        here = self._runtime.addresses.get(handle)
        if here is None:
            with self._runtime.lock:
                here = self._runtime.opened.get(key) or self._runtime.open(raw)
                self._runtime.opened[key] = here
        elif uuid != self._gpu.uuid:
            self._runtime.enable_peer_access(peer)
        return self._gpu.bytes_at(here, nbytes)

    def _queue(self, nbytes: int, work: Callable[[], None], mark: Any = None) -> Transfer:
        transfer = self._gpu.queue(nbytes, work, mark)
        self._transfers = [*self.under_way(), transfer]
        return transfer


def reduce_on_device(into: torch.Tensor, parts: Sequence[torch.Tensor], op: ReduceOp, dtype: str) -> None:
    """Reduce bytes of elements of `dtype` in the order of `parts`, of which `into` may be one.

    The bits are those of the host, but for the payload of NaN, and the sign of the MIN or MAX of zeros of both signs.
    """
    unsigned = dtype.removeprefix("u") if dtype in ("uint16", "uint32", "uint64") else dtype
    kind, function = getattr(torch, unsigned), torch_function(op)  # sums of unsigned integers have the bits of signed
    first, *others = (part.view(kind) for part in parts)
    total = first.float() if dtype in HALVES else first.clone()
    for other in others:
        function(total, other.float() if dtype in HALVES else other, out=total)
    # By a tensor: torch multiplies by the reciprocal if the divisor is a number, which rounds another way.
    if op is ReduceOp.AVG:
        total.div_(torch.full((), len(parts), dtype=total.dtype, device=total.device))
    into.view(kind).copy_(total)
