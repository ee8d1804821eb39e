"""Damages of checkpoints: a value is missing, of another type, negative, NaN, or of another size."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch


def places(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in nested dicts and lists."""
    children = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for key, value in children:
        yield (*path, key)
        yield from places(value, (*path, key))


def damages(value: Any) -> Iterator[tuple[str, Any]]:
    """Values that may not be in the place of `value`, by name."""
    others: list[Any] = ["abc", 1.5, 7, [1], {"a": 1}, (), None, True, torch.ones(2)]
    for other in others:
        if type(other) is not type(value) and value is not None:
            yield f"a {type(other).__name__}", other
    if type(value) is int:
        yield "negative", -3
        yield "huge", 1 << 70
    if type(value) is float:
        yield "negative", -1.0
        yield "NaN", math.nan
    if isinstance(value, torch.Tensor):
        yield "NaN", torch.full_like(value, math.nan)
        yield "longer", torch.cat([value, value])
        yield "of another dtype", value.to(torch.int64)


def damaged(state: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each state that lacks a value of `state`, or has another one in its place."""
    for path in places(state):
        *above, last = path

        def parent(of: dict[str, Any], above: list[Any] = above) -> Any:
            for key in above:
                of = of[key]
            return of

        value = parent(state)[last]
        if isinstance(parent(state), dict):
            without = copy.deepcopy(state)
            del parent(without)[last]
            yield f"{path} is missing", without
        for name, other in damages(value):
            changed = copy.deepcopy(state)
            parent(changed)[last] = other
            yield f"{path} is {name}", changed
