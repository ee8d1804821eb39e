"""The claims of the page of benchmarks (`claims.toml`): what shows each of them, and whether it holds."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

Cell = float | str  # a number in the unit of its column, or words in its place
Cells = dict[str, dict[str, Cell]]  # by row and column
MISSING = "not run"
_CELL = re.compile(r"\{([^:{}]+):([^{}]+)\}")
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_BYTES = ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


@dataclass(frozen=True, slots=True)
class Bound:
    """What a cell has to be for the claim to hold."""

    cell: tuple[str, str]
    least: float = 0.0
    most: float = float("inf")

    def holds(self, value: float) -> bool:
        return self.least <= value <= self.most


@dataclass(frozen=True, slots=True)
class ClaimRun:
    """What measures cells: a module of `asyncoll.bench`, or a script of the repository."""

    module: str = ""
    script: str = ""
    options: Any = ""  # of a module's `cells`: a table; of a script: words
    quick: Mapping[str, Any] | None = None  # the options of a module in a quick run


@dataclass(frozen=True, slots=True)
class FasterPeer:
    """A cell in which a peer is faster."""

    heading: str
    ours: str
    peer: str
    what: str
    mine_s: float
    theirs_s: float


@dataclass(frozen=True, slots=True)
class Claim:
    """One section of the page."""

    name: str
    heading: str
    text: str
    rows: tuple[str, ...]
    columns: Mapping[str, str]  # the unit of each
    plot: str
    caption: str
    measures: tuple[str, ...]
    runs: tuple[ClaimRun, ...]
    holds: tuple[Bound, ...] = ()
    peers: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of each system of ours, by row or by column

    @property
    def modules(self) -> tuple[ClaimRun, ...]:
        """The runs that need no peer."""
        return tuple(run for run in self.runs if run.module)

    def sentence(self, cells: Cells) -> str:
        """The text, with its cells."""
        return _CELL.sub(lambda found: self.shown(cells, found[1], found[2]), self.text)

    def shown(self, cells: Cells, row: str, column: str) -> str:
        """A cell as text: empty if there is no such cell, "not run" if its row or column was not measured."""
        value = cells.get(row, {}).get(column)
        if value is None:
            return "" if row in cells and any(column in found for found in cells.values()) else MISSING
        return value if isinstance(value, str) else show(value, self.columns[column])

    def losses(self, cells: Cells) -> Iterator[FasterPeer]:
        """Where a peer is faster."""
        if not set(self.peers) <= set(self.rows):
            by_system = cells
        else:
            in_seconds = [column for column, unit in self.columns.items() if unit == "s"]
            by_system = {column: {row: cells[row].get(column, "") for row in cells} for column in in_seconds}
        for what, systems in by_system.items():
            for ours, peers in self.peers.items():
                for peer in peers:
                    mine, theirs = systems.get(ours), systems.get(peer)
                    if isinstance(mine, float) and isinstance(theirs, float) and theirs < mine:
                        yield FasterPeer(self.heading, ours, peer, what, mine, theirs)


def load() -> dict[str, Claim]:
    """All claims by name, in the order of the page."""
    found = tomllib.loads((files("asyncoll.bench") / "claims.toml").read_text())
    return {name: _claim(name, entry) for name, entry in found.items()}


def _claim(name: str, entry: dict[str, Any]) -> Claim:
    lists = {key: tuple(value) for key, value in entry.items() if isinstance(value, list)}
    lists["runs"] = tuple(ClaimRun(**run) for run in entry["runs"])
    lists["holds"] = tuple(Bound(tuple(bound.pop("cell")), **bound) for bound in entry.get("holds", ()))
    return Claim(name, **entry | lists)


def merged(parts: Iterable[Cells]) -> Cells:
    """The cells of several runs. A row may have cells of several."""
    cells: Cells = {}
    for part in parts:
        for row, found in part.items():
            cells.setdefault(row, {}).update(found)
    return cells


def judge(claim: Claim, cells: Cells) -> list[tuple[str, bool]]:
    """For each bound whose cell was measured: the cell and its bound in words, and whether it holds."""
    found = []
    for bound in claim.holds:
        row, column = bound.cell
        value = cells.get(row, {}).get(column)
        if isinstance(value, float):
            unit = claim.columns[column]
            limit = f"at least {show(bound.least, unit)}" if bound.least else f"at most {show(bound.most, unit)}"
            found.append((f"{row}, {column}: {show(value, unit)} ({limit})", bound.holds(value)))
    return found


def show(value: float, unit: str) -> str:
    """2.1 us, 9.3 ms or 214 us of seconds; 97.8 % of a share; 1.64, 53.3 or 257 of a ratio; 200 of a number."""
    if unit == "s":
        return show_seconds(value)
    if unit == "times":
        return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
    return f"{100 * value:.1f} %" if unit == "share" else f"{value:.0f}"


def show_seconds(value: float) -> str:
    """A time to a twentieth of it at least: two digits, or three if the first one is 1."""
    scale, name = next(((scale, name) for scale, name in _SECONDS if value >= 0.9995 * scale), _SECONDS[-1])
    mantissa = value / scale
    digits = 3 if f"{mantissa:.1e}"[0] == "1" else 2
    exponent = int(f"{mantissa:.{digits - 1}e}".partition("e")[2])
    places = max(0, digits - 1 - exponent)
    return f"{mantissa:.{places}f} {name}"


def show_bytes(size: int) -> str:
    """1 KiB, 256 KiB or 100 MiB."""
    scale, name = next((scale, name) for scale, name in _BYTES if size >= scale)
    return f"{size / scale:g} {name}"
