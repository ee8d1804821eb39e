"""Tensors on devices at the other places that make or take tensors, on devices without hardware."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import asyncoll
from asyncoll.errors import DeviceError, UsageError
from asyncoll.tensors.reductions import DTYPES
from asyncoll.testing import fake_device, run_ranks
from tests.transport.staging.test_staging import TRANSPORTS, bits, increment


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_empty_makes_tensors_of_a_device(transport):
    with fake_device() as device:

        async def main(comm):
            for dtype in DTYPES:
                for shape in (3, (), (2, 0), (4, 5)):
                    x = comm.empty(shape, getattr(torch, dtype), device="fake:0")
                    assert device.holds(x) or not x.numel()
                    like = comm.empty(shape, getattr(torch, dtype), device=torch.device("cpu"))
                    assert not device.holds(like)
                    assert (x.dtype, x.shape) == (like.dtype, like.shape)
                    assert x.is_contiguous()
            x = comm.empty((100, 3), torch.float32, device="fake:0")
            device.compute(lambda array: array.fill(comm.rank), x)
            for _ in range(3):  # the same tensor again and again, also in two calls at a time
                gathered = comm.allgather(x)
                assert (device.values(await comm.allgather(x)) == np.arange(comm.size)[:, None, None]).all()
                assert (device.values(await gathered) == np.arange(comm.size)[:, None, None]).all()
            increment(device, x)
            assert (device.values(await comm.allreduce(x)) == comm.size * (comm.size + 1) / 2).all()

        run_ranks(3, main, transport)


def test_empty_refuses_what_a_device_cannot_make(monkeypatch):
    with fake_device() as device:

        def refuse(dtype, shape):
            raise MemoryError("no room")

        async def main(comm):
            with pytest.raises(UsageError, match="a tensor on 'cuda:7' cannot be made"):
                comm.empty(3, torch.float32, device="cuda:7")
            with pytest.raises(UsageError, match="a tensor on fake:0 is one of torch: pass a torch dtype"):
                comm.empty(3, "float32", device="fake:0")
            with pytest.raises(UsageError, match="negative"):
                comm.empty(-3, torch.float32, device="fake:0")
            monkeypatch.setattr(device, "empty", refuse)
            with pytest.raises(DeviceError, match="fake:0 has failed: MemoryError: no room"):
                comm.empty(3, torch.float32, device="fake:0")

        run_ranks(1, main, "inproc")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_flat_tensors_of_a_model_on_a_device(transport):
    """The calls, and the checks of the model, leave its memory alone.

    torch's operations see poison in it, so the flat tensors move to the device after they are made.
    """
    with fake_device() as device:

        async def main(comm):
            results = []
            for move in (lambda x: x, device.tensor):
                torch.manual_seed(comm.rank)
                model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
                flat = asyncoll.flatten(model, buffers=True)
                model(torch.randn(4, 5)).sum().backward()
                for x in (flat.parameters, flat.gradients, flat.buffers):
                    move(x)
                await comm.broadcast(flat.parameters)
                await comm.allreduce(flat.gradients, op=asyncoll.AVG)
                await comm.allreduce(flat.buffers, op=asyncoll.AVG)
                results.append([bits(device, x) for x in (flat.parameters, flat.gradients, flat.buffers)])
            assert results[0] == results[1]

        run_ranks(2, main, transport)
