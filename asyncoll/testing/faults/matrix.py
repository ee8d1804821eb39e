"""The matrix of faults: checks many cells in several processes, and prints how soon all survivors raised."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from asyncoll.testing.faults.cell_processes import happen
from asyncoll.testing.faults.cells import JOINING, KINDS, Cell
from asyncoll.testing.faults.checked_calls import OPERATIONS
from asyncoll.testing.faults.judging import Verdict, judge
from asyncoll.testing.faults.programs import PROGRAMS
from asyncoll.testing.faults.staged_calls import STAGED

_ROWS = (*OPERATIONS, *STAGED, *PROGRAMS, JOINING)  # of the table


def check_cell(cell: Cell) -> Verdict:
    """Run the cell among real processes, which are forked from this one, and check it."""
    return judge(cell, happen(cell))


def sweep(cells: Sequence[Cell], jobs: int) -> bool:
    """Check all cells. Prints broken cells as they are found, then the table. Returns whether all cells passed."""
    console = Console(stderr=True)
    verdicts: list[Verdict] = []
    # Each process forks the ranks of its cells, so it must have one thread: the threads of BLAS are off.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    processes = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
    with processes as pool, Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("cells", total=len(cells))
        for done in as_completed([pool.submit(check_cell, cell) for cell in cells]):
            verdicts.append(verdict := done.result())
            bar.advance(task)
            if complaints := [*verdict.broken, *verdict.late]:
                print("\n  ".join([f"asyncoll faults {verdict.cell}", *complaints]), flush=True)
    Console().print(_table(verdicts))
    broken, late = (sum(map(bool, each)) for each in zip(*((v.broken, v.late) for v in verdicts), strict=True))
    print(f"{len(cells)} cells, {broken} broken, {late} late")
    return not broken and not late


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
