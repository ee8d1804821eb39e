"""The claim about late ranks: the mean waits of skewed arrivals (`skewed`), beside the paper's ratios."""

from __future__ import annotations

import math

from asyncoll.bench.claims import Cells
from asyncoll.bench.plan import BenchPlan
from asyncoll.bench.runs import rows_of

BYTES, SKEW_S = 4096, 1e-3
PAPER = {"full": 1.0, "majority": 2.46, "solo": 53.32}  # figure 9 of the eager-SGD paper, on 32 nodes
PAPER_RANKS = 32
NAMES = {"full": "synchronous", "quorum": "quorum of half"}  # of modes, on the page


def cells(ranks: int, iterations: int) -> Cells:
    """A row for each rule."""
    found: Cells = {}
    for row in rows_of(BenchPlan("solo", ranks, (BYTES,), skew_s=SKEW_S, iterations=iterations)):
        mode: str = row["mode"]
        found[NAMES.get(mode, mode)] = {
            "mean wait": row["mean_us"] / 1e6,
            "times less": row["ratio"],
            "bound": row["bound"] if math.isfinite(row["bound"]) else "none",
            **({"paper": PAPER[mode]} if ranks == PAPER_RANKS and mode in PAPER else {}),
        }
    return found
