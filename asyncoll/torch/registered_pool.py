"""Registered memory for tensors of a few sizes that come and go in each step, as those of FSDP2."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncoll.blocking import BlockingCommunicator


class RegisteredPool:
    """Keeps the memory of tensors that are gone for the next ones of the same size.

    The kernel takes a quarter of a millisecond to clear each fresh megabyte, about as long as a copy of it. The pool
    holds as much as was in use at one time, and frees it with the process group.
    """

    def __init__(self, comm: BlockingCommunicator) -> None:
        self._comm = comm
        self._unused: defaultdict[int, deque[Any]] = defaultdict(deque)  # by size in bytes

    def allocate(self, count: int, dtype: torch.dtype) -> Tensor:
        """A tensor of `count` elements of undefined content. Its memory returns to the pool with its last view."""
        nbytes = count * dtype.itemsize
        if not nbytes:
            return torch.empty(count, dtype=dtype)
        unused = self._unused[nbytes]
        try:
            block = unused.popleft()
        except IndexError:
            block = self._comm.empty(nbytes, np.uint8)
        owner = np.frombuffer(block.data, np.uint8)  # the last view of the tensor ends it
        weakref.finalize(owner, unused.append, block)
        return torch.from_numpy(owner).view(dtype)
