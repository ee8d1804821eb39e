"""Where the array of a benchmark is: in memory of the host, or on a GPU."""

from __future__ import annotations

import os
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncoll.bench.plan import BenchPlan
from asyncoll.communicator import Communicator
from asyncoll.errors import UsageError

if TYPE_CHECKING:
    from asyncoll.tensors.reductions import Array


class OnHost:
    """A float32 array in memory of the host; with `registered`, in that of the world."""

    def __init__(self, comm: Communicator, count: int, *, registered: bool) -> None:
        self.x: Any = comm.empty(count, "float32") if registered else np.empty(count, np.float32)

    def fill(self, values: Array) -> None:
        self.x[...] = values

    def allreduce(self, comm: Communicator) -> Awaitable[object]:
        return comm.allreduce(self.x)

    def values(self) -> Array:
        return np.asarray(self.x)


def gpu_of(local_rank: int) -> Any:
    """The device of torch for the rank with this number on its host: the ranks take the visible GPUs in turn."""
    import torch

    return torch.device("cuda", local_rank % torch.cuda.device_count())


class OnGpu:
    """A float32 tensor on a GPU."""

    def __init__(self, comm: Communicator, count: int) -> None:
        import torch

        self._torch = torch
        self._device = gpu_of(comm.local_rank)
        self.x: Any = torch.empty(count, device=self._device)

    def fill(self, values: Array) -> None:
        self.x.copy_(self._torch.from_numpy(values))
        self._torch.cuda.synchronize(self._device)

    async def allreduce(self, comm: Communicator) -> None:
        """The call, and the copy of its result to the GPU."""
        await comm.allreduce(self.x)
        self._torch.cuda.synchronize(self._device)

    def values(self) -> Array:
        return np.asarray(self.x.cpu())


def check(plan: BenchPlan) -> None:
    """Raise UsageError unless the device of the plan is there, and memory of this host for an array at every rank."""
    if plan.device == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if plan.ranks * max(plan.sizes) > memory:
            arrays = f"{plan.ranks} arrays of {max(plan.sizes)} bytes"
            raise UsageError(f"--sizes: {arrays} do not fit into the memory of this host, {memory} bytes")
        return
    import torch

    if plan.registered:
        raise UsageError("--registered is memory of the host: leave it out with --device cuda")
    if not torch.cuda.is_available():
        raise UsageError(f"--device cuda: torch {torch.__version__} sees no GPU here; leave --device out")
