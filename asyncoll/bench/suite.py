"""`asyncoll bench suite`: measures the claims that need no peer on this host. `asyncoll bench compare`: two results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from asyncoll.bench.claims import Cells, Claim, ClaimRun, judge, load, merged, show
from asyncoll.errors import UsageError


def measure(run: ClaimRun, *, quick: bool) -> Cells:
    """The cells of a module of this package."""
    options: Mapping[str, Any] = (run.quick or {}) if quick else run.options
    cells: Cells = import_module(f"asyncoll.bench.{run.module}").cells(**options)
    return cells


def chosen(names: tuple[str, ...]) -> list[Claim]:
    """The claims of these names that can be measured without a peer; all of them without names."""
    able = {name: claim for name, claim in load().items() if claim.modules}
    if unknown := [name for name in names if name not in able]:
        raise UsageError(f"--claim {unknown[0]!r:.80}: asyncoll bench suite measures {', '.join(able)}")
    return [able[name] for name in names or able]


def write(file: Path, found: Mapping[str, Cells]) -> None:
    """Write the cells of all claims so far. Raises UsageError if the file cannot be written."""
    try:
        file.write_text(json.dumps({"claims": found}, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"--json: cannot write to {file}: {error.strerror}; give another file") from error


def cells_of(claim: Claim, *, quick: bool) -> Cells:
    """What its modules measure."""
    return merged(measure(run, quick=quick) for run in claim.modules)


def verdicts(claim: Claim, cells: Cells) -> Iterator[tuple[bool, str]]:
    """For each bound of the claim: whether it holds on this host, and a line that says so."""
    for words, holds in judge(claim, cells):
        yield holds, f"{'holds' if holds else 'does not hold here'}: {claim.heading}: {words}"


def compared(first: Path, second: Path) -> list[dict[str, Any]]:
    """All cells that both files have, each with its values, of `asyncoll bench suite --json` or benchmarks/results.

    Raises UsageError.
    """
    found, claims = [], load()
    one, two = _read(first), _read(second)
    for name in (name for name in claims if name in one and name in two):
        for row, column, value in _numbers(one[name]):
            other = two[name].get(row, {}).get(column)
            if isinstance(other, float):
                place = {"claim": name, "row": row, "column": column, "unit": claims[name].columns.get(column, "s")}
                found.append({**place, "first": value, "second": other})
    if not found:
        raise UsageError(f"{first} and {second} have no cell in common: give results of the same claims")
    return found


def shown(cell: dict[str, Any]) -> list[str]:
    """A line of the table of `compared` cells. Its last column is the second value over the first."""
    unit, first, second = cell["unit"], cell["first"], cell["second"]
    ratio = show(second / first, "times") if first else "-"
    return [cell["claim"], cell["row"], cell["column"], show(first, unit), show(second, unit), ratio]


def _numbers(cells: Cells) -> Iterator[tuple[str, str, float]]:
    for row, found in cells.items():
        for column, value in found.items():
            if isinstance(value, float):
                yield row, column, value


def _read(path: Path) -> dict[str, Cells]:
    """The cells by claim."""
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        if "runs" in document:
            document = {"claims": {document["claim"]: merged(run["cells"] for run in document["runs"])}}
        found = document["claims"].items()
        return {name: {row: dict(values) for row, values in cells.items()} for name, cells in found}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{path} is no result of `asyncoll bench suite --json` or of `make benchmarks`: give one that is"
        ) from error
