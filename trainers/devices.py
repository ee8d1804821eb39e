"""The device that a rank trains on."""

from __future__ import annotations

import re

import torch

import asyncoll


def parse_device(text: str) -> str:
    """`text`, if it is cpu, cuda or cuda:N. Raises ValueError otherwise."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise ValueError(f"{text!r} is no device: use cpu, cuda or cuda:0")
    return text


def own_device(name: str, local_rank: int) -> torch.device:
    """The device of the rank with this number on its host. With `cuda`, the ranks take the visible GPUs in turn.

    Raises UsageError if it is not there.
    """
    if name == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not torch.cuda.is_available() or not count:
        raise asyncoll.UsageError(f"--device {name}: torch {torch.__version__} sees no GPU here; leave --device out")
    index = torch.device(name).index
    if index is None:
        return torch.device("cuda", local_rank % count)
    if index >= count:
        raise asyncoll.UsageError(f"--device {name}: there are {count} visible GPUs, from cuda:0 to cuda:{count - 1}")
    return torch.device(name)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all work that is queued on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
