"""Whether the packages that asyncoll stands on are new enough. Their bounds are those of its metadata, which pip keeps.

A program that has installed another version later is told at its first use of asyncoll. `import torch`, which imports
the package, too, stays silent: it may be of a program that does not use asyncoll.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from asyncoll.errors import UsageError


def check() -> None:
    """Raise UsageError if a package is too old."""
    if texts := list(too_old()):
        raise UsageError("; ".join(texts))


def too_old() -> Iterator[str]:
    """What is too old, and what to install: a text for each package. What is not installed is not told."""
    for name, bound in _bounds():
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        if _release(installed) < _release(bound):
            yield f"asyncoll needs {name} {bound} or newer, and {installed} is installed: pip install '{name}>={bound}'"


def _bounds() -> list[tuple[str, str]]:
    """The packages without which asyncoll is not installed, and the oldest version of each."""
    try:
        required = requires("asyncoll") or []
    # This is a checkout that is not installed.
    except PackageNotFoundError:
        return []
    found = (re.fullmatch(r"([\w-]+) ?>=([\d.]+)", each) for each in required)
    return [(match[1], match[2]) for match in found if match]


def _release(text: str) -> list[int]:
    """The numbers of a version: those of "2.13.0+cpu" are 2 and 13."""
    match = re.match(r"\d+(\.\d+)*", text)
    numbers = [int(number) for number in match[0].split(".")] if match else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers
