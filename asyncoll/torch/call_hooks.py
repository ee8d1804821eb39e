"""The hooks of a program around the calls of a process group, and the check for NaN, which is one.

Torch 2.14 has both, but its C++ code runs them for backends of C++ alone. Here they work with every torch.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asyncoll.errors import UsageError

_SETTING = "TORCH_DIST_NAN_CHECK"
_NAMES = "SEND RECV BROADCAST ALLREDUCE REDUCE ALLGATHER REDUCE_SCATTER ALLTOALL BARRIER SCATTER GATHER"
_torch: Any = torch._C._distributed_c10d
HookOpName: Any = getattr(_torch, "HookOpName", None) or enum.Enum("HookOpName", _NAMES)


class PreHookArgs(NamedTuple):
    """What a hook before a call gets, with the names of torch's `PreHookArgs`."""

    name: Any  # of HookOpName
    async_op: bool
    input_tensors: list[Tensor]  # those that the call changes in place among them
    output_tensors: list[Tensor]
    root: int  # or the other rank of a message; -1: none
    op_id: int


class PostHookArgs(NamedTuple):
    """What a hook after the beginning of a call gets, with the names of torch's `PostHookArgs`."""

    name: Any
    async_op: bool
    work: Any
    op_id: int


class CallHooks:
    """The hooks of one group at one rank, which run in the thread that makes a call."""

    def __init__(self, rank: int) -> None:
        self.before: dict[int | str, Callable[[PreHookArgs], Any]] = {}
        self.after: dict[int, Callable[[PostHookArgs], Any]] = {}
        self._ids = count()
        if os.environ.get(_SETTING) == "1":
            self.before[_SETTING] = lambda call: _check_for_nan(call, rank)

    def __bool__(self) -> bool:
        return bool(self.before or self.after)

    def begin(
        self, name: str, inputs: list[Tensor], outputs: Sequence[Tensor] = (), *, root: int, is_async: bool = True
    ) -> PreHookArgs:
        """Run the hooks before a call."""
        call = PreHookArgs(getattr(HookOpName, name), is_async, inputs, list(outputs), root, next(self._ids))
        for hook in list(self.before.values()):
            hook(call)
        return call

    def end(self, call: PreHookArgs, work: Any) -> None:
        """Run the hooks after `call` has begun."""
        for hook in list(self.after.values()):
            hook(PostHookArgs(call.name, call.async_op, work, call.op_id))


def _check_for_nan(call: PreHookArgs, rank: int) -> None:
    """Raise UsageError if `rank` gives NaN to the call. What a broadcast overwrites may hold it."""
    if call.name == HookOpName.BROADCAST and call.root != rank:
        return
    for x in call.input_tensors:
        if _has_nan(x.detach()):
            raise UsageError(
                f"NaN found in input tensor of {call.name.name.lower()} at rank {rank} of the group: the tensor of "
                f"shape {list(x.shape)} and {x.dtype}. {_SETTING}=1 asks for this check; look at the loss of this step"
            )


def _has_nan(x: Tensor) -> bool:
    # This dtype has no NaN.
    if not (x.is_floating_point() or x.is_complex()) or x.dtype is torch.float4_e2m1fn_x2:
        return False
    return bool(torch.isnan(x).any())
