"""The claim about failures: the time from a fault to the error at the last survivor, in real processes."""

from __future__ import annotations

import multiprocessing
import os
import statistics
from concurrent.futures import ProcessPoolExecutor

from asyncoll.bench.claims import Cells
from asyncoll.testing.faults.cells import select
from asyncoll.testing.faults.matrix import check_cell

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
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process that forks ranks has one thread
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return {row: _times(process, kind, draws) for row, kind in KINDS.items()}


def _times(process: ProcessPoolExecutor, kind: str, draws: int) -> dict[str, float | str]:
    chosen = select(f"{kind}/*", sample=1, repeat=draws, seed=0, transport="shm", size=RANKS)
    verdicts = list(process.map(check_cell, chosen))
    if broken := [verdict for verdict in verdicts if verdict.broken]:
        raise RuntimeError(f"asyncoll faults {broken[0].cell}: {'; '.join(broken[0].broken)}")
    last_s = [max(verdict.heard_s) for verdict in verdicts if verdict.heard_s]
    return {"median": statistics.median(last_s), "longest": max(last_s), "draws": float(len(last_s))}
