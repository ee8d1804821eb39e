"""The matrix of faults: checks many cells in several processes, and prints how soon all survivors raised."""

from __future__ import annotations

import itertools
import json
import os
import statistics
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from asyncoll.testing.checking import answers, serve
from asyncoll.testing.faults.cell_processes import happen
from asyncoll.testing.faults.cells import DEATH_S, FREEZE_S, JOINING, KINDS, Cell
from asyncoll.testing.faults.checked_calls import OPERATIONS
from asyncoll.testing.faults.host_networks import remove_networks_of_the_dead
from asyncoll.testing.faults.judging import Verdict, judge
from asyncoll.testing.faults.programs import PROGRAMS
from asyncoll.testing.faults.staged_calls import STAGED
from asyncoll.testing.progress_bar import progress

_ROWS = (*OPERATIONS, *STAGED, *PROGRAMS, JOINING)  # of the table
_MODULE = "asyncoll.testing.faults.matrix"  # this one
_LATE = f" (right errors after more than {DEATH_S * 1e3:.0f} ms, or {FREEZE_S:g} s after a freeze: failed, too)"
_WIDTH_MAX = 10_000  # of a table that is not folded
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # in a process that forks ranks


def check_cell(cell: Cell) -> Verdict:
    """Run the cell among real processes, which are forked from this one, and check it."""
    return judge(cell, happen(cell))


def check_cells(cells: Sequence[Cell], jobs: int) -> Generator[Verdict, None, None]:
    """The verdicts on all cells, as they come, of up to `jobs` processes. They have ended when the iterator has."""
    environ = _ONE_THREAD | os.environ
    try:
        with closing(answers(_MODULE, map(asdict, cells), min(jobs, len(cells)), environ)) as found:
            for cell, *parts in found:
                yield Verdict(Cell(**cell), *map(tuple, parts))
    finally:
        remove_networks_of_the_dead()


def sweep(cells: Sequence[Cell], jobs: int, *, as_json: bool = False) -> bool:
    """Check all cells. Prints broken cells as they are found, then the table, also after Ctrl-C.

    With `as_json` it prints a JSON object for each cell instead. Returns whether all cells passed.
    """
    verdicts: list[Verdict] = []
    try:
        with progress("cells", len(cells)) as advance, closing(check_cells(cells, jobs)) as found:
            for verdict in found:
                verdicts.append(verdict)
                advance(verdict.cell.name)
                if as_json:
                    results = {"heard_s": verdict.heard_s, "broken": verdict.broken, "late": verdict.late}
                    print(json.dumps(asdict(verdict.cell) | results), flush=True)
                elif complaints := [*verdict.broken, *verdict.late]:
                    print("\n  ".join([f"asyncoll faults {verdict.cell}", *complaints]), flush=True)
    finally:
        if verdicts and not as_json:
            show(verdicts)
    return not any(verdict.broken or verdict.late for verdict in verdicts)


def show(verdicts: Sequence[Verdict]) -> None:
    """Print the tables of times, and how many cells have failed."""
    console = Console()
    print("time from a fault to the errors of all survivors: median/max in ms (-: no errors)")
    for table in _tables(verdicts, console):
        console.print(table)
    broken, late = (sum(map(bool, each)) for each in ([v.broken for v in verdicts], [v.late for v in verdicts]))
    print(f"{len(verdicts)} cells, {broken} broken, {late} late{_LATE if late else ''}")


def _answer(cell: dict[str, Any]) -> list[Any]:
    verdict = check_cell(Cell(**cell))
    return [cell, verdict.broken, verdict.heard_s, verdict.said]


def _tables(verdicts: Sequence[Verdict], console: Console) -> Iterator[Table]:
    """Tables of times from the fault to the survivors' errors: median and maximum in ms; "-" for no errors.

    Each has as many faults as fit into the width of the console.
    """
    kinds = [kind for kind in KINDS if any(verdict.cell.kind == kind for verdict in verdicts)]
    while kinds:
        tables = (_table(verdicts, kinds[:count]) for count in range(len(kinds), 0, -1))
        table = next(table for table in tables if len(table.columns) == 2 or _fits(table, console))
        yield table
        del kinds[: len(table.columns) - 1]


def _fits(table: Table, console: Console) -> bool:
    return console.measure(table, options=console.options.update_width(_WIDTH_MAX)).maximum <= console.width


def _table(verdicts: Sequence[Verdict], kinds: Sequence[str]) -> Table:
    """The table of these faults."""
    found: defaultdict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        found[verdict.cell.operation, verdict.cell.kind].append(verdict)
    headings = [Column(heading, overflow="fold") for heading in ("", *kinds)]
    table = Table(*headings, box=SIMPLE)
    for operation in _ROWS:
        if any((operation, kind) in found for kind in kinds):
            table.add_row(operation, *(_entry(found[operation, kind]) for kind in kinds))
    return table


def _entry(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return ""
    heard_ms = [1e3 * heard_s for heard_s in itertools.chain(*(verdict.heard_s for verdict in verdicts))]
    text = f"{statistics.median(heard_ms):.0f}/{max(heard_ms):.0f}" if heard_ms else "-"
    broken = sum(bool(verdict.broken) for verdict in verdicts)
    return f"{text}\n{broken} of {len(verdicts)} broken" if broken else text


if __name__ == "__main__":
    serve(_answer)
