"""Calls to CUDA, answered by the CPU: most of PyTorch's distributed tests ask for GPUs and need none.

The tests then run with CPU tensors. What they say of CUDA itself (streams, graphs, memory) is not tested.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def map_cuda(devices: int) -> None:
    """Let this process and its children believe in `devices` GPUs whose memory is the CPU's."""
    from torch.testing._internal import common_distributed, common_utils

    for module in (common_distributed, common_utils):
        module.TEST_CUDA = True
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: devices
    cuda.current_device = lambda: 0
    cuda.manual_seed = torch.default_generator.manual_seed
    for name in (
        "manual_seed_all",
        "set_device",
        "synchronize",
        "empty_cache",
        "_lazy_init",
        "reset_peak_memory_stats",
    ):
        setattr(cuda, name, lambda *_, **__: None)  # each its own: torch.compile keeps a table of them
    for name in ("device", "stream"):
        setattr(cuda, name, lambda *_: contextlib.nullcontext())
    for name in ("Stream", "Event", "current_stream", "default_stream"):
        setattr(cuda, name, type(name, (_Stream,), {}))
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self.clone()
    module: Any = torch.nn.Module
    module.cuda = lambda self, *_: self
    module_to = module.to
    module.to = lambda self, *args, **kw: module_to(self, *map(_mapped, args), **kw)
    _without_devices(DistributedDataParallel)
    _Mapped().__enter__()  # for good, in this thread and in the children that it forks


class _Stream:
    """A stream or an event of a device that has done everything already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = CPU

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


def _without_devices(ddp: Any) -> None:
    init: Callable[..., None] = ddp.__init__

    def on_cpu(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kw: Any
    ) -> None:
        init(self, module, None, None, *args, **kw)

    ddp.__init__ = on_cpu


class _Mapped(TorchFunctionMode):
    """Every device that torch's functions and methods are given is the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs and kwargs["device"] is not None:
            kwargs = {**kwargs, "device": CPU}
        if getattr(func, "__name__", "") == "to":
            args = (args[0], *map(_mapped, args[1:]))
        return func(*args, **kwargs)


def _mapped(x: Any) -> Any:
    """The CPU for a device, as torch accepts them; anything else as it is."""
    is_device = isinstance(x, torch.device | str) or (isinstance(x, int) and not isinstance(x, bool))
    return CPU if is_device else x
