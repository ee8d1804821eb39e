"""Blocks of device memory of CUDA, without CUDA: a stand-in for its library, whose memory is that of the host.

In whole worlds its memory is that of emulated devices, with their hazards.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import io
import os
import re
import uuid
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import asyncoll
from asyncoll.tensors.reductions import DTYPES, check_reduction, reducer, storage
from asyncoll.testing import run_ranks
from asyncoll.transport.staging import HANDLE_BYTES, BlockPart, RefusedError, cuda, ipc
from asyncoll.transport.staging.ipc import CudaExchange, Gpu, Runtime, loaded_runtime, reduce_on_device, relaxed
from tests.support.emulated_cuda import emulated_cuda

NBYTES = 1 << 12
SIZES = "short=64,device=64,device_window=1024"
ILLEGAL = "CUDA error: an illegal memory access was encountered"
OPS = [op for op in asyncoll.ReduceOp if op is not asyncoll.AVG_ACTIVE]


class Library:
    """Functions of libcudart, of one process. Those of all share `exported`."""

    def __init__(self, exported):
        self.exported = exported
        self.allocated, self.opened, self.peers, self.pending = {}, [], set(), 0
        self.fails, self.raises = {}, {}  # codes and exceptions, by function
        for name in ("cudaMalloc", "cudaFree", "cudaIpcGetMemHandle", "cudaIpcOpenMemHandle"):
            setattr(self, name, Function(self, name))
        self.cudaDeviceEnablePeerAccess = Function(self, "cudaDeviceEnablePeerAccess")
        self.cudaGetErrorString = Function(self, "cudaGetErrorString")

    def _cudaGetErrorString(self, code):  # noqa: N802
        return {2: b"out of memory", 201: b"invalid device context", 217: b"peer access is not supported"}[code]

    def cudaGetLastError(self):  # noqa: N802
        code, self.pending = self.pending, 0
        return code

    def _cudaMalloc(self, address, nbytes):  # noqa: N802
        memory = np.zeros(nbytes.value, np.uint8)
        address._obj.value = memory.ctypes.data
        self.allocated[memory.ctypes.data] = memory

    def _cudaFree(self, address):  # noqa: N802
        del self.allocated[address.value]

    def _cudaIpcGetMemHandle(self, handle, address):  # noqa: N802
        raw = os.urandom(64)
        ctypes.memmove(handle, raw, 64)
        self.exported[raw] = address.value

    def _cudaIpcOpenMemHandle(self, address, handle, flags):  # noqa: N802
        assert flags == 1
        address._obj.value = self.exported[bytes(handle)]
        self.opened.append(address._obj.value)

    def _cudaDeviceEnablePeerAccess(self, device, flags):  # noqa: N802
        assert flags.value == 0
        self.pending = 704 if device.value in self.peers else 0
        self.peers.add(device.value)
        return self.pending


class Function:
    """A function of a library, with attributes as of ctypes."""

    def __init__(self, library, name):
        self._library = library
        self._name = name

    def __call__(self, *arguments):
        if self._name in self._library.raises:
            raise self._library.raises[self._name]
        code = self._library.fails.get(self._name, 0)
        if code:
            self._library.pending = code
            return code
        assert not self._library.pending, "an error of before was not cleared"
        return getattr(self._library, f"_{self._name}")(*arguments) or 0


class Done:
    """A transfer that is over."""

    error = None

    def __init__(self, nbytes):
        self.nbytes = self.moved = nbytes


def at_once(nbytes, work, mark):
    work()
    return Done(nbytes)


class HostGpu(Gpu):
    """Its memory is that of the host. Which GPUs there are, and what fails, is for the test to say."""

    def __init__(self, uuid, numbers=None):
        self.uuid, self.queue, self.numbers, self.fails = uuid, at_once, numbers or {uuid: 0}, set()

    def current(self):
        if "current" in self.fails:
            raise RuntimeError(ILLEGAL)
        return contextlib.nullcontext()

    def index_of(self, uuid):
        if uuid not in self.numbers:
            raise RefusedError("it is not visible")
        return self.numbers[uuid]

    def bytes_at(self, address, nbytes):
        if "bytes_at" in self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.from_numpy(np.frombuffer((ctypes.c_char * nbytes).from_address(address), np.uint8))


class Mark:
    is_changed = False

    def __init__(self, content):
        self.content = content


def exchanges(count, uuids=None):
    """Of `count` processes, and their libraries."""
    exported = {}
    libraries = [Library(exported) for _ in range(count)]
    uuids = uuids or [b"U" * 16] * count
    made = [CudaExchange(HostGpu(uuid), Runtime(each), NBYTES) for uuid, each in zip(uuids, libraries, strict=True)]
    return made, libraries


def test_blocks_pass_bytes_and_are_used_again():
    made, libraries = exchanges(3)
    for each in made:
        assert len(each.handle) == HANDLE_BYTES
        each.open({rank: other.handle for rank, other in enumerate(made)})
    tensors = [torch.full((1000,), rank + 1, dtype=torch.int32) for rank in range(3)]
    marks = [Mark(x.view(torch.uint8)) for x in tensors]
    for each, mark in zip(made, marks, strict=True):
        each.write(mark, [BlockPart(made.index(each), 64, 400, 800)])
    made[1].reduce(asyncoll.SUM, "int32", 64, 400)
    made[2].read(marks[2], [BlockPart(1, 64, 0, 400), BlockPart(1, 464, 400, 400)])
    assert tensors[2].tolist() == [6] * 100 + [2] * 100 + [3] * 800
    assert [mark.is_changed for mark in marks] == [False, False, True]
    before = [(list(library.opened), list(library.allocated)) for library in libraries]
    assert [len(opened) for opened, _ in before] == [2, 2, 2]
    for each in made:
        assert each.shut()
    for each in made:
        each.free()
    again = [CudaExchange(HostGpu(b"U" * 16), each._runtime, NBYTES) for each in reversed(made)]
    for each in again:
        each.open({rank: other.handle for rank, other in enumerate(again)})
    assert [(library.opened, list(library.allocated)) for library in libraries] == before
    CudaExchange(HostGpu(b"U" * 16), again[0]._runtime, NBYTES)
    assert len(libraries[2].allocated) == 2


@pytest.mark.parametrize(
    ("function", "code", "reason"),
    [
        ("cudaMalloc", 2, "cudaMalloc: out of memory"),
        ("cudaIpcGetMemHandle", 201, "cudaIpcGetMemHandle: invalid device context"),
        ("cudaIpcOpenMemHandle", 201, "cudaIpcOpenMemHandle: invalid device context"),
    ],
)
def test_an_error_of_the_driver_is_a_reason_and_leaves_nothing(function, code, reason):
    """No open block, and no error for the next call of the thread."""
    (first,), (theirs,) = exchanges(1)
    library = Library(theirs.exported)
    library.fails[function] = code
    with pytest.raises(RefusedError, match=reason):
        _open(library, first)
    assert not library.pending
    assert not library.opened
    assert len(library.allocated) == (function == "cudaIpcOpenMemHandle")  # it waits for the next communicator


def _open(library, first):
    made = CudaExchange(HostGpu(b"U" * 16), Runtime(library), NBYTES)
    made.open({0: made.handle, 1: first.handle})


def test_a_handle_that_does_not_fit():
    made, libraries = exchanges(3, [b"U" * 16, b"U" * 16, b"V" * 16])
    one, same, other = made
    short = CudaExchange(HostGpu(b"U" * 16), Runtime(Library({})), NBYTES // 2)
    for handle, reason in [
        (other.handle, "the block of group rank 2: it is not visible"),
        (short.handle, "the block of group rank 2: it has 2048 bytes instead of 4096"),
        (b"", "the block of group rank 2: its handle has 0 bytes instead of 96"),
    ]:
        with pytest.raises(RefusedError, match=reason):
            one.open({0: one.handle, 1: same.handle, 2: handle})
    assert len(libraries[0].opened) == 1


def test_a_handle_that_another_process_has_too(monkeypatch):
    """As with separate PID namespaces: the handles of CUDA are equal, and the block is another one all the same."""
    monkeypatch.setattr(Library, "_cudaIpcGetMemHandle", lambda self, handle, address: None)
    (one, other), (library, _) = exchanges(2)
    assert one.handle[:64] == other.handle[:64]
    library.exported[bytes(64)] = address = other._runtime.addresses[other.handle]
    one.open({0: one.handle, 1: other.handle})
    assert library.opened == [address]


def test_two_gpus_of_one_process():
    """Each lets itself use the memory of the other, once, or as another program has done before."""
    numbers, library = {b"U" * 16: 0, b"V" * 16: 1}, Library({})
    library.peers.add(1)
    runtime = Runtime(library)
    one, same, other = (CudaExchange(HostGpu(each * 16, numbers), runtime, NBYTES) for each in (b"U", b"U", b"V"))
    one.open({0: one.handle, 1: same.handle})
    assert library.peers == {1}
    other.open({0: one.handle, 1: other.handle})
    assert library.peers == {0, 1}
    one.open({0: one.handle, 1: other.handle})
    assert not library.pending
    library.fails["cudaDeviceEnablePeerAccess"] = 217
    with pytest.raises(RefusedError, match="of group rank 1: cudaDeviceEnablePeerAccess: peer access is not supported"):
        same.open({0: same.handle, 1: other.handle})


# -- what torch says, and raises --------------------------------------------------------------------


def test_what_torch_raises_is_a_reason():
    (exchange,), _ = exchanges(1)
    exchange._gpu.fails.add("current")
    with pytest.raises(RefusedError, match=f"RuntimeError: {ILLEGAL}"):
        exchange.open({0: exchange.handle})


def test_a_block_that_torch_does_not_take():
    """It is not allocated, or opened, another time."""
    (first, other), (library, _) = exchanges(2)
    first._gpu.fails.add("bytes_at")
    runtime = Runtime(Library({}))
    for _ in range(2):
        with pytest.raises(RefusedError, match="of group rank 0: OutOfMemoryError: CUDA out of memory"):
            first.open({0: other.handle, 1: first.handle})
        assert len(library.opened) == 1
        with pytest.raises(torch.OutOfMemoryError):
            CudaExchange(first._gpu, runtime, NBYTES)
        assert len(runtime._library.allocated) == 1


@pytest.fixture
def known(monkeypatch):
    """The UUIDs of GPUs, of which this process sees three. The second is a peer of the first, and none else."""
    known = [uuid.uuid4() for _ in range(4)]
    properties = [SimpleNamespace(uuid=str(each)) for each in known]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one.index, other) == (0, 1))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    return known


def test_which_memory_a_gpu_reads(known):
    """Its own, also under another number, and that of its peers."""
    first, second = Gpu(0, at_once), Gpu(1, at_once)
    assert [first.index_of(each.bytes) for each in known[:2]] == [0, 1]
    assert second.index_of(known[1].bytes) == 1
    for gpu, other in [(second, known[0]), (first, known[2])]:
        with pytest.raises(RefusedError, match=f"{gpu.place} cannot read the memory of GPU-{other}: they are no peers"):
            gpu.index_of(other.bytes)
    with pytest.raises(RefusedError, match=f"GPU-{known[3]} is not visible here, where CUDA_VISIBLE_DEVICES is 4,5,6"):
        first.index_of(known[3].bytes)


@pytest.mark.usefixtures("known")
def test_torch_that_copies_memory_of_another_gpu(monkeypatch):
    memory = torch.zeros(8, dtype=torch.uint8)
    monkeypatch.setattr(torch, "as_tensor", lambda x, device: memory)
    assert Gpu(0, at_once).bytes_at(memory.data_ptr(), 8) is memory
    monkeypatch.setattr(torch, "as_tensor", lambda x, device: memory.clone())
    with pytest.raises(RefusedError, match=r"copies the memory of another GPU .*: torch 2.9 or newer is needed"):
        Gpu(0, at_once).bytes_at(memory.data_ptr(), 8)


@pytest.fixture
def maps(monkeypatch):
    """Replaces what the kernel tells of the memory of this process: a torch for CUDA has a library there."""
    loaded_runtime.cache_clear()
    yield lambda text: monkeypatch.setattr("builtins.open", lambda path, **options: io.StringIO(text))
    loaded_runtime.cache_clear()


def test_a_library_that_is_deleted(maps):
    """As after an update of the package while the program runs."""
    maps("7f00-7f01 r-xp 00000000 00:00 0    /no/such/libcudart.so.12 (deleted)\n")
    with pytest.raises(RefusedError, match=r"OSError: /no/such/libcudart.so.12 \(deleted\)"):
        loaded_runtime()


def test_the_mode_of_captures_of_a_thread(monkeypatch):
    library, modes = Library({}), [0]

    def exchange(mode):
        modes.append(mode._obj.value)
        mode._obj.value = modes[-2]
        return 0

    library.cudaThreadExchangeStreamCaptureMode = exchange
    monkeypatch.setattr(ipc, "loaded_runtime", lambda: Runtime(library))
    with relaxed():
        assert modes == [0, 2]
    assert modes == [0, 2, 0]
    del library.cudaThreadExchangeStreamCaptureMode  # an old one
    with relaxed():
        pass


def test_no_library_is_loaded(maps):
    maps("")
    with relaxed():  # nothing is to be done
        pass
    with pytest.raises(RefusedError, match="torch has loaded 0 libraries libcudart, and one is needed"):
        loaded_runtime()


def test_reductions_have_the_bits_of_the_host():
    rng, known = np.random.default_rng(5), CudaExchange.reduces
    for dtype in DTYPES:
        for op in (op for op in OPS if _is_defined(op, dtype) and known(None, op, dtype)):
            values = torch.tensor(rng.standard_normal((3, 500)) * 100).to(getattr(torch, dtype))
            flats = [build_back(row) for row in values]
            expected = np.empty_like(flats[0])
            reducer(op, dtype)(expected, flats, 3 if op is asyncoll.AVG else 1)
            parts = [row.clone().view(torch.uint8) for row in values]
            reduce_on_device(parts[1], parts, op, dtype)
            assert parts[1].numpy().tobytes() == expected.tobytes(), (op, dtype)
            assert parts[0].equal(values[0].view(torch.uint8))


def build_back(row):
    """The elements of a torch tensor, as reductions of the host take them."""
    return row.clone().view(torch.uint8).numpy().view(storage(str(row.dtype).removeprefix("torch.")))


def _is_defined(op, dtype):
    try:
        return check_reduction(op, dtype)
    except asyncoll.UsageError:
        return False


# -- in a world -----------------------------------------------------------------------------------


class DeviceLibrary(Library):
    """Its blocks are tensors of an emulated device, which `as_tensor` finds."""

    def __init__(self, gpu):
        super().__init__({})
        self.gpu = gpu
        self.copies_for_others = False  # as_tensor
        self.reductions, self.runtimes = 0, []
        self._places = {}  # of blocks: that of who sees them first, and has made them

    def _cudaMalloc(self, address, nbytes):  # noqa: N802
        with self.gpu.stream("cudaMalloc"):
            x = self.gpu.tensor(torch.zeros(nbytes.value, dtype=torch.uint8))
        self.gpu.values(x)  # everything that comes later is ordered after it
        address._obj.value = x.data_ptr()
        self.allocated[x.data_ptr()] = x

    def as_tensor(self, memory, device):
        (address, _), (nbytes,) = (memory.__cuda_array_interface__[each] for each in ("data", "shape"))
        is_own = self._places.setdefault(address, device) == device
        x = self.allocated[address][:nbytes]
        return x if is_own or not self.copies_for_others else x.clone()

    def reduce(self, into, parts, op, dtype):
        """`reduce_on_device`, whose operations of torch the emulation does not have."""

        def on_host(into, *parts):
            parts = [part.view(storage(dtype)).copy() for part in parts]
            reducer(op, dtype)(into.view(storage(dtype)), parts, len(parts) if op is asyncoll.AVG else 1)

        self.reductions += 1
        self.gpu.compute(on_host, into, reads=parts)


@contextlib.contextmanager
def opened(seed=0, turned_by="thread", *, are_apart=False):
    """An emulated device with a library. `are_apart`: each rank has its own runtime, as in a process of its own."""
    with emulated_cuda(seed, turned_by) as gpu, pytest.MonkeyPatch.context() as patch:
        library = DeviceLibrary(gpu)
        library.runtimes.append(Runtime(library))

        def loaded_runtime():
            library.runtimes.extend([Runtime(library)] * are_apart)
            return library.runtimes[-1]

        patch.setattr(cuda, "loaded_runtime", loaded_runtime)
        patch.setattr(ipc, "reduce_on_device", library.reduce)
        patch.setattr(torch, "as_tensor", library.as_tensor)
        patch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuid.UUID(int=index)))
        patch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
        yield gpu, library


@pytest.fixture
def short_windows(monkeypatch):
    monkeypatch.setenv("ASYNCOLL_SIZES", SIZES)


def bits(gpu, x):
    values = gpu.values(x) if gpu.holds(x) else x.contiguous().view(-1).view(torch.uint8).numpy()
    return values.tobytes()


@pytest.mark.usefixtures("short_windows")
@pytest.mark.parametrize(("size", "are_apart"), [(2, True), (3, False), (5, True)])
def test_collectives_through_blocks(size, are_apart):
    """All of them at the same time, on two GPUs. No block is in use in the end."""

    async def results(comm, make, op):
        last = comm.size - 1
        calls = [comm.allreduce(make(), op), comm.broadcast(make(), last), comm.allgather(make())]
        return await asyncio.gather(*calls, comm.reduce_scatter(make(), op), comm.allreduce(make()[::2], op))

    with opened(size, are_apart=are_apart) as (gpu, library):

        async def main(comm):
            for dtype, count, op in [("float32", 700, asyncoll.AVG), ("bfloat16", 1500, asyncoll.SUM)]:
                values = np.random.default_rng([comm.rank, count]).standard_normal(count)
                x = torch.tensor(values).to(getattr(torch, dtype))
                expected = await results(comm, x.clone, op)
                found = await results(comm, lambda x=x: gpu.tensor(x.clone(), comm.rank % 2), op)
                assert [bits(gpu, one) for one in found] == [bits(gpu, one) for one in expected]
            await comm.barrier()

        run_ranks(size, main, "shm")
        assert library.reductions
        assert not gpu._copies_of_host
        unused = [handle for runtime in library.runtimes for handles in runtime._unused.values() for handle in handles]
        assert (len(library.allocated), len(unused)) == (size, size)
        assert len(library.opened) == are_apart * size * (size - 1)


def test_a_program_that_goes_on_while_a_block_is_written():
    """Its work comes after the copy. Blocks stay open until that has ended."""
    with opened(turned_by="program") as (gpu, _):
        device = cuda.CudaDevice(0)
        exchange = device.share(NBYTES)
        exchange.open({0: exchange.handle})
        x = gpu.tensor(torch.ones(100))
        mark = device.mark(x)
        exchange.write(mark, [BlockPart(0, 0, 0, 400)])
        mark.join()
        gpu.compute(lambda array: np.add(array, 1, out=array), x)
        assert not exchange.shut()
        gpu.run()
        device.close()
        assert exchange.shut()
        exchange.free()


THROUGH_HOST = {  # what is said if a function raises before ranks use their blocks
    "cudaMalloc": "tensors of cuda:[01] go through memory of the host, at all ranks: OSError: broken",
    "cudaIpcOpenMemHandle": "at all ranks: the block of group rank [01]: OSError: broken",
}


@pytest.mark.usefixtures("short_windows")
@pytest.mark.parametrize("function", [*THROUGH_HOST])
def test_what_is_raised_in_a_world(function, caplog):
    """The calls go through the host. The world ends as always."""
    with opened(are_apart=True) as (gpu, library):
        library.raises[function] = OSError("broken")
        run_ranks(2, lambda comm: sums(comm, gpu), "shm")
        assert not library.reductions
    texts = [record.getMessage() for record in caplog.records]
    assert texts
    assert all(re.search(THROUGH_HOST[function], text) for text in texts)


@pytest.mark.usefixtures("short_windows")
def test_a_world_with_torch_that_copies_memory_of_another_gpu(caplog):
    with opened() as (gpu, library):
        library.copies_for_others = True
        run_ranks(2, lambda comm: sums(comm, gpu), "shm")
        assert not library.reductions
    (record,) = caplog.records
    assert "torch 2.9 or newer is needed" in record.getMessage()


async def sums(comm, gpu):
    x = gpu.tensor(torch.full((700,), float(comm.rank + 1)), comm.rank)
    assert (gpu.values(await comm.allreduce(x)) == comm.size * (comm.size + 1) / 2).all()
