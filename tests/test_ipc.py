"""Blocks of device memory of CUDA, without CUDA: a stand-in for its library, whose memory is that of the host."""

from __future__ import annotations

import contextlib
import ctypes
import os
import uuid
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import asyncoll
from asyncoll.tensors.reductions import DTYPES, check_reduction, reducer, storage
from asyncoll.transport.staging import HANDLE_BYTES, Part, RefusedError
from asyncoll.transport.staging.ipc import CudaExchange, Gpu, Runtime, loaded_runtime, reduce_on_device

NBYTES = 1 << 12
OPS = [op for op in asyncoll.ReduceOp if op is not asyncoll.AVG_ACTIVE]


class Library:
    """Functions of libcudart, of one process. Those of all share `exported`."""

    def __init__(self, exported):
        self.exported = exported
        self.allocated, self.opened, self.fails, self.pending = {}, [], {}, 0
        for name in ("cudaMalloc", "cudaFree", "cudaIpcGetMemHandle", "cudaIpcOpenMemHandle"):
            setattr(self, name, Function(self, name))
        self.cudaGetErrorString = Function(self, "cudaGetErrorString")

    def _cudaGetErrorString(self, code):  # noqa: N802
        return {2: b"out of memory", 201: b"invalid device context"}[code]

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


class Function:
    """A function of a library, with attributes as of ctypes."""

    def __init__(self, library, name):
        self._library = library
        self._name = name

    def __call__(self, *arguments):
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
    """Its memory is that of the host."""

    def __init__(self, uuid):
        self.uuid, self.queue = uuid, at_once

    def current(self):
        return contextlib.nullcontext()

    def reads(self, uuid):
        return uuid == self.uuid

    def bytes_at(self, address, nbytes):
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
        each.write(mark, [Part(made.index(each), 64, 400, 800)])
    made[1].reduce(asyncoll.SUM, "int32", 64, 400)
    made[2].read(marks[2], [Part(1, 64, 0, 400), Part(1, 464, 400, 400)])
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
    assert len(library.allocated) == (function == "cudaIpcOpenMemHandle")  # freed when the communicator ends


def _open(library, first):
    made = CudaExchange(HostGpu(b"U" * 16), Runtime(library), NBYTES)
    made.open({0: made.handle, 1: first.handle})


def test_a_handle_that_does_not_fit():
    made, libraries = exchanges(3, [b"U" * 16, b"U" * 16, b"V" * 16])
    one, same, other = made
    short = CudaExchange(HostGpu(b"U" * 16), Runtime(Library({})), NBYTES // 2)
    for handle, reason in [
        (other.handle, "GPU 5656.*, of group rank 2, cannot be read from here"),
        (short.handle, "the block of group rank 2 has 2048 bytes instead of 4096"),
        (b"", "the handle of group rank 2 has 0 bytes instead of 88"),
    ]:
        with pytest.raises(RefusedError, match=reason):
            one.open({0: one.handle, 1: same.handle, 2: handle})
    assert len(libraries[0].opened) == 1


def test_which_memory_a_gpu_reads(monkeypatch):
    """Its own, also under another number, and that of its peers. The second is a peer of the first, and none else."""
    known = [uuid.uuid4() for _ in range(4)]
    properties = [SimpleNamespace(uuid=str(each)) for each in known]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one.index, other) == (0, 1))
    assert [Gpu(0, at_once).reads(each.bytes) for each in known] == [True, True, False, False]
    assert [Gpu(1, at_once).reads(each.bytes) for each in known] == [False, True, False, False]


def test_no_library_is_loaded():
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
