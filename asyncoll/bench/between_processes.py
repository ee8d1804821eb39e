"""The claim about TCP: what encryption costs, and a sparse allreduce beside the dense one, over loopback."""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path
from unittest import mock

from asyncoll.bench.claims import Cells
from asyncoll.bench.plan import BenchPlan
from asyncoll.bench.runs import rows_of
from asyncoll.transport.keys import write_key

SHORT, LONG, SHARED = 64, 64 << 20, 25 << 20  # bytes


def cells(repeats: int) -> Cells:
    """Times over loopback between two ranks, medians of the repeats, and their ratios to those of the plain call."""
    with tempfile.TemporaryDirectory(prefix="asyncoll-") as folder:
        key = Path(folder) / "key"
        write_key(key)
        control = {"ASYNCOLL_KEY_FILE": str(key)}
        settings = {"plain": {}, "control": control, "all": control | {"ASYNCOLL_ENCRYPT": "all"}}
        runs: dict[str, list[list[float]]] = {name: [] for name in (*settings, "sums")}
        for _ in range(repeats):
            for name, environment in settings.items():
                runs[name].append(_seconds(BenchPlan("pingpong", 2, (SHORT, LONG), transport="tcp"), environment))
            dense, sparse = (BenchPlan(name, 2, (SHARED,), transport="tcp") for name in ("allreduce", "sparse"))
            runs["sums"].append(_seconds(dense, control) + _seconds(sparse, control))
    medians = {name: [statistics.median(column) for column in zip(*found, strict=True)] for name, found in runs.items()}
    (short, long), (dense_s, sparse_s) = medians["plain"], medians["sums"]
    return {
        "half a round trip, 64 B": _row(medians["control"][0], short),
        "64 MiB, control encrypted": _row(medians["control"][1], long),
        "64 MiB, all encrypted": _row(medians["all"][1], long),
        "allreduce, 25 MiB": _row(dense_s, dense_s),
        "allreduce, 25 MiB, Ok-Topk": _row(sparse_s, dense_s),
    }


def _seconds(plan: BenchPlan, environment: dict[str, str]) -> list[float]:
    with mock.patch.dict(os.environ, environment):
        return [row["time_us"] / 1e6 for row in rows_of(plan)]


def _row(seconds: float, plain_s: float) -> dict[str, float | str]:
    return {"time": seconds, "over the plain one": seconds / plain_s}
