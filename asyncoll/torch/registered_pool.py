"""Registered memory for tensors of a few sizes that come and go in each step, as those of FSDP2."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncoll.blocking import BlockingCommunicator


class RegisteredPool:
    """Keeps the memory of tensors that are gone for the next ones of the same size.

    The kernel takes a quarter of a millisecond to clear each fresh megabyte, about as long as a copy of it. The pool
    holds at most as much as was in use at one time, and frees it with the process group.
    """

    def __init__(self, comm: BlockingCommunicator) -> None:
        self._comm = comm
        self._lock = threading.Lock()
        self._gone = deque[Any]()  # blocks of tensors that are gone. Finalizers only append: any thread may run them
        self._unused: dict[int, list[Any]] = {}  # by size in bytes, the size that was used last at the end
        self._used_bytes = self._most_bytes = self._unused_bytes = 0

    def allocate(self, count: int, dtype: torch.dtype) -> Tensor:
        """A tensor of `count` elements of undefined content. Its memory returns to the pool with its last view."""
        nbytes = count * dtype.itemsize
        if not nbytes:
            return torch.empty(count, dtype=dtype)
        with self._lock:
            block = self._take(nbytes)
        owner = np.frombuffer(block.data, np.uint8)  # the last view of the tensor ends it
        weakref.finalize(owner, self._gone.append, block)
        return torch.from_numpy(owner).view(dtype)

    def _take(self, nbytes: int) -> Any:
        """A block of `nbytes`: an unused one, or a new one."""
        self._collect()
        used_bytes = self._used_bytes + nbytes
        self._most_bytes = max(self._most_bytes, used_bytes)
        if nbytes in self._unused:
            block = self._pop(nbytes)
        else:
            while used_bytes + self._unused_bytes > self._most_bytes:
                self._pop(next(iter(self._unused)))
            block = self._comm.empty(nbytes, np.uint8)
        self._used_bytes = used_bytes
        return block

    def _collect(self) -> None:
        while self._gone:
            block = self._gone.popleft()
            self._used_bytes -= block.nbytes
            self._unused_bytes += block.nbytes
            self._unused.setdefault(block.nbytes, []).append(block)

    def _pop(self, nbytes: int) -> Any:
        blocks = self._unused.pop(nbytes)
        block = blocks.pop()
        if blocks:
            self._unused[nbytes] = blocks
        self._unused_bytes -= nbytes
        return block
