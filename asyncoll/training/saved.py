"""Reading what a checkpoint has saved: a value that is missing, or no such value, is an error that names it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

import asyncoll

_ROUNDS_MAX = 1 << 31


def entry(saved: object, key: str, is_right: Callable[[Any], bool], what: str) -> Any:
    """The value of `key`, which is `what` if it `is_right`. Raises UsageError otherwise."""
    if not isinstance(saved, dict):
        raise asyncoll.UsageError(f"the checkpoint is damaged: a {type(saved).__name__} is in place of its {key!r}")
    if key not in saved:
        raise asyncoll.UsageError(f"the checkpoint is damaged: it has no {key!r}: go back to an older one")
    value = saved[key]
    if not is_right(value):
        shown = f"a tensor of {value.dtype} and shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise asyncoll.UsageError(
            f"the checkpoint is damaged: its {key!r} is {shown:.80}, and not {what}: go back to an older one"
        )
    return value


def origin(saved: object, key: str) -> int | str:
    """What tells where a checkpoint is from; "missing" if that is no checkpoint of this kind."""
    if isinstance(saved, dict) and key not in saved:
        return "missing"
    value: int | str = entry(saved, key, lambda value: type(value) in (int, str), "a number or a text")
    return value


def count(saved: object, key: str) -> int:
    """A number of rounds, or of updates."""
    value: int = entry(saved, key, is_count, "a number of rounds")
    return value


def is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _ROUNDS_MAX


def table(saved: object, key: str) -> dict[str, Any]:
    """A dict with strings as keys."""
    is_right = lambda value: isinstance(value, dict) and all(isinstance(name, str) for name in value)  # noqa: E731
    value: dict[str, Any] = entry(saved, key, is_right, "a dict")
    return value


def positive(saved: object, key: str) -> float:
    """A finite number above 0."""
    is_right = lambda value: type(value) is float and 0 < value < math.inf  # noqa: E731
    value: float = entry(saved, key, is_right, "a number above 0")
    return value


def tensor(saved: object, key: str, like: Tensor) -> Tensor:
    """A tensor of the dtype and shape of `like`, on any device, whose elements are finite."""

    def is_right(value: object) -> bool:
        if not isinstance(value, Tensor) or (value.dtype, value.shape) != (like.dtype, like.shape):
            return False
        return bool(torch.isfinite(value).all())

    what = f"a finite tensor of {like.dtype} and shape {list(like.shape)}"
    value: Tensor = entry(saved, key, is_right, what)
    return value


def sparse(own: dict[str, Any], residual: Tensor, operations: Iterable[str]) -> dict[str, Any]:
    """The states of sparse allreduces that `own` has, among them those of `operations`. Loads the residual, too."""
    found, states = tensor(own, "residual", residual), table(own, "operations")
    for operation in operations:
        entry(states, operation, lambda value: value is None or isinstance(value, dict), "a dict")
    residual.copy_(found)
    return states
