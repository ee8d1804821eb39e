"""Hashes of 64 bits of tensors and plain values, which are the same at every rank."""

from __future__ import annotations

import hashlib
import numbers
from typing import Any

import torch
from torch import Tensor, nn

from asyncoll.torch.memory import copyable


def fingerprint(value: Any) -> int:
    """A hash of the bits of `value`, for a tensor of int64.

    `value` is a tensor, a number, a string, or dicts, lists and tuples of them. Of others, such as a function or a
    tensor without plain memory, only the class counts: nothing tells those of two processes apart.
    """
    bits = hashlib.blake2b(digest_size=8)
    _add(bits, value)
    return int.from_bytes(bits.digest(), "little", signed=True)


def _add(bits: Any, value: Any) -> None:
    match value:
        case Tensor() if type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_meta:
            bits.update(f"{value.dtype}{list(value.shape)}".encode())
            block = copyable(value.detach().cpu())  # it keeps the memory of `flat`
            bits.update(block.flat)
        case dict():
            bits.update(f"dict {len(value)}".encode())
            for key in sorted(value, key=repr):
                _add(bits, key)
                _add(bits, value[key])
        case list() | tuple():
            bits.update(f"list {len(value)}".encode())
            for item in value:
                _add(bits, item)
        case numbers.Number() | str() | bytes() | None:
            bits.update(repr(value).encode())
        case _:
            bits.update(type(value).__name__.encode())
