"""Calls in memory that use tensors of devices while these arrive: the bits, the overlap, and calls that end early."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial

import numpy as np
import pytest
import torch

import asyncoll
from asyncoll.errors import AbortedError, DeviceError
from asyncoll.testing import FakeDevice, fake_device, run_ranks, simulate

# Windows are shorter than all arrays that are not short. Arrays that are not on devices are copied as a whole, read in
# private memory, or reduced in pieces.
SIZES = "short=64,staged=2048,window=1024,chunk=256,piece=512,whole=4096,private_max=8192"
COUNTS = [511, 512, 513, 1500, 5001]  # of float32


@pytest.fixture(autouse=True)
def short_windows(monkeypatch):
    monkeypatch.setenv("ASYNCOLL_SIZES", SIZES)


def normal(dtype, seed, count):
    """Elements whose sums depend on the order of the additions."""
    values = np.random.default_rng(seed).standard_normal(count)
    return torch.tensor(values).to(getattr(torch, dtype))


def bits(device, x):
    return device.values(x).tobytes() if device.holds(x) else x.view(torch.uint8).numpy().tobytes()


def registered(comm, x):
    return comm.empty(x.shape, x.dtype).copy_(x)


async def results(comm, make):
    """Of the calls that overlap, each with a tensor of its own that `make` gives."""
    return [
        await comm.allreduce(make()),
        await comm.allreduce(make(), asyncoll.AVG),
        await comm.broadcast(make(), root=comm.size // 2),
        await comm.reduce(make(), root=comm.size // 3),
    ]


@pytest.mark.parametrize(
    ("size", "transport"),
    [
        *((size, "shm") for size in (1, 2, 3, 4, 6, 7, 9, 17)),
        (5, "shm-mixed"),
        (13, "shm-mixed"),
        (8, "inproc"),
        (3, "zmq"),
    ],
)
def test_the_bits_are_those_of_the_host(size, transport):
    """In worlds where all ranks, or some, have tensors on devices. The others have registered ones, or not."""
    with fake_device(size) as device:

        async def main(comm):
            rank = comm.rank

            def moved(x, case):
                if case == 0 or (rank + case) % 3 == 0:
                    return device.tensor(x.clone())
                return registered(comm, x) if (rank + case) % 3 == 1 else x.clone()

            for turn, count in enumerate(COUNTS if size < 9 else COUNTS[2:]):
                x = normal(["float32", "bfloat16", "float16"][turn % 3], [rank, count], count * (1 + (turn % 3 > 0)))
                expected = await results(comm, x.clone)
                for case in range(2):
                    found = await results(comm, lambda x=x, case=case: moved(x, case))
                    for one, other in zip(expected, found, strict=True):
                        assert bits(device, other) == bits(device, one), (count, case)

        run_ranks(size, main, transport)


class Watched(FakeDevice):
    """Notes, for each copy to the device, whether a tensor is still arriving."""

    def fetch(self, mark, start, into):
        self.fetched.append(super().fetch(mark, start, into))
        return self.fetched[-1]

    def put(self, source, mark, start):
        self.early.append((start, any(transfer.done < transfer.nbytes for transfer in self.fetched)))
        return super().put(source, mark, start)


@pytest.mark.parametrize(("call", "total", "returns"), [("allreduce", 3, 3), ("reduce", 3, 1), ("broadcast", 0, 2)])
def test_the_first_window_returns_before_the_last_one_has_arrived(call, total, returns):
    with fake_device(3, "program") as device:
        device.__class__, device.fetched, device.early = Watched, [], []

        async def main(comm):
            x = device.tensor(torch.full((5000,), float(comm.rank)))
            work = asyncio.ensure_future(getattr(comm, call)(x))
            await asyncio.sleep(1)
            while comm.rank == 0 and device.turn():
                await asyncio.sleep(1)  # all ranks do what they can, in virtual time
            await work
            assert (device.values(x) == total).all() or comm.rank

        simulate(3, main, shared_memory=True)
    of_first = [is_early for start, is_early in device.early if start == 0]
    assert of_first == [True] * returns


def test_a_call_that_is_cancelled_in_its_middle():
    """Rank 1 gives it up, at any time; the program goes on with the tensor."""
    ends = set()

    async def main(comm, seed):
        with fake_device(seed, "loop", f"fake:{comm.rank}") as device:
            x = device.tensor(torch.ones(20_000))
            try:
                async with asyncio.timeout(0.00005 * seed if comm.rank == 1 else None):
                    await comm.allreduce(x)
                ends.add("")
            except (TimeoutError, AbortedError) as error:
                ends.add((comm.rank == 1, type(error)))
            device.compute(lambda array: np.add(array, 1, out=array), x)
            device.values(x)

    for seed in range(30):
        simulate(2 + seed % 4, partial(main, seed=seed), seed=seed, shared_memory=True)
    assert ends == {"", (True, TimeoutError), (False, AbortedError)}


async def calls(comm, x):
    await comm.allreduce(x)
    while True:
        await comm.barrier()
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("copy", range(4))
def test_a_copy_of_a_window_that_fails(copy):
    """The first copy of rank 1 is that to the host. The others are windows that return, for which no call waits."""
    errors = {}

    async def main(comm):
        with fake_device(copy, "loop", f"fake:{comm.rank}") as device:
            if comm.rank == 1:
                device.fail_copy(copy, OSError("no such bus"))
            x = device.tensor(torch.ones(5000))
            with pytest.raises((DeviceError, AbortedError), match="fake:1 has failed: OSError: no such bus") as caught:
                await calls(comm, x)
            device.values(x)
        errors[comm.rank] = type(caught.value)

    with pytest.raises(DeviceError) if copy else contextlib.nullcontext():  # as rank 1 leaves the world
        simulate(3, main, seed=copy, shared_memory=True)
    assert errors == {0: AbortedError, 1: AbortedError if copy else DeviceError, 2: AbortedError}
