"""The claim about failures: the time from a fault to the error at the last survivor, in real processes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial

from asyncoll.bench.claims import Cells
from asyncoll.testing.faults.cells import select
from asyncoll.testing.faults.judging import Verdict
from asyncoll.testing.faults.matrix import check_cells

RANKS = 4
KINDS = {
    "killed": "kill",
    "ended without a word": "exit",
    "exception": "raise",
    "sockets cut": "disconnect",
    "frozen": "stop",
}


def cells(draws: int) -> Cells:
    """A row for each kind of fault; each draw has another operation, victim and moment. Raises RuntimeError."""
    drawn = partial(select, sample=1, seeds=range(draws), transport="shm", size=RANKS)
    verdicts = list(check_cells([cell for kind in KINDS.values() for cell in drawn(f"{kind}/*")], jobs=1))
    if broken := [verdict for verdict in verdicts if verdict.broken]:
        raise RuntimeError(f"asyncoll faults {broken[0].cell}: {'; '.join(broken[0].broken)}")
    return {row: _times([each for each in verdicts if each.cell.kind == kind]) for row, kind in KINDS.items()}


def _times(verdicts: Sequence[Verdict]) -> dict[str, float | str]:
    last_s = [max(verdict.heard_s) for verdict in verdicts if verdict.heard_s]
    return {"median": statistics.median(last_s), "longest": max(last_s), "draws": float(len(last_s))}
