"""Our tests of torch.distributed's features. Each is a function of the backend's name that runs on every rank.

They come to the backend by its name alone. Each compares values with what one process computes, and fails if the
backend's results are off by one: `python -m torch_tests sabotage` shows it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

MODULES = ("collectives", "dropped", "ddp", "sharding", "parallel", "programs")


class Feature(NamedTuple):
    run: Callable[[str], None]  # given the backend's name, on every rank; without a process group if `alone`
    alone: bool  # the function makes its process groups itself
    sabotage: str | None  # what a backend must get wrong for this test to fail: "floats", "bytes"; None: nothing does
    sizes: tuple[int, ...] | None  # None: any


FEATURES: dict[str, Feature] = {}


def feature(
    *, alone: bool = False, sabotage: str | None = "floats", sizes: tuple[int, ...] | None = None
) -> Callable[[Callable[[str], None]], Callable[[str], None]]:
    """Add a function to the list of features."""

    def add(run: Callable[[str], None]) -> Callable[[str], None]:
        FEATURES[run.__name__] = Feature(run, alone, sabotage, sizes)
        return run

    return add


def load() -> dict[str, Feature]:
    """All features by name."""
    for module in MODULES:
        importlib.import_module(f"{__name__}.{module}")
    return FEATURES
