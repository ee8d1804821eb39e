"""The matrix of faults: checks many cells in several processes, and prints how soon all survivors raised."""

from __future__ import annotations

import itertools
import json
import os
import statistics
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from asyncoll.testing.checking import answers, serve
from asyncoll.testing.faults.cell_processes import happen
from asyncoll.testing.faults.cells import JOINING, KINDS, Cell
from asyncoll.testing.faults.checked_calls import OPERATIONS
from asyncoll.testing.faults.host_networks import remove_networks_of_the_dead
from asyncoll.testing.faults.judging import Verdict, judge
from asyncoll.testing.faults.programs import PROGRAMS
from asyncoll.testing.faults.staged_calls import STAGED
from asyncoll.testing.progress_bar import progress

_ROWS = (*OPERATIONS, *STAGED, *PROGRAMS, JOINING)  # of the table
_MODULE = "asyncoll.testing.faults.matrix"  # this one
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
        broken, late = (sum(map(bool, each)) for each in ([v.broken for v in verdicts], [v.late for v in verdicts]))
        if verdicts and not as_json:
            Console().print(_table(verdicts))
            print(f"{len(verdicts)} cells, {broken} broken, {late} late")
    return not broken and not late


def _answer(cell: dict[str, Any]) -> list[Any]:
    verdict = check_cell(Cell(**cell))
    return [cell, verdict.broken, verdict.heard_s, verdict.said]


def _table(verdicts: Sequence[Verdict]) -> Table:
    """The table of times from the fault to the survivors' errors: median and maximum in ms; "-" for no errors."""
    found: defaultdict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        found[verdict.cell.operation, verdict.cell.kind].append(verdict)
    kinds = [kind for kind in KINDS if any((operation, kind) in found for operation in _ROWS)]
    headings = [Column(heading, overflow="fold") for heading in ("median/max ms", *kinds)]
    table = Table(*headings, title="time from a fault to the errors of all survivors (-: no errors)", box=SIMPLE)
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
    return f"{text}, {broken} of {len(verdicts)} broken" if broken else text


if __name__ == "__main__":
    serve(_answer)
