"""Skewed arrivals: rank r arrives r skews late. Measures the waits and the number of active ranks.

This is figure 9 of Li et al., "Taming unbalanced training workloads in deep learning with partial collective
operations", PPoPP 2020.

    python benchmarks/skewed_arrivals.py [--ranks 32,8] [--skew 1ms] [--size 4K] [--iterations 128] [--repeats 3]

asyncoll's modes (`asyncoll bench solo`), Gloo's allreduce and, where `mpirun` and mpi4py are installed, Open MPI's, in
turn, all with the same protocol: fresh input, barrier, sleep of rank x skew, timed call. A number is the mean over all
ranks and calls, and of several repeats the median. The ranks drawn for majority average out over many calls only.

Two bounds stand beside the ratio full/this. `ceiling`: with free communication, only the expected waits count. `by
processor`: the same full, as measured, over this mode's waits if a round, once it is open, ends after the processor
time of its messages, shared by all cores (`costs`, measured in the same run): a model, not a law. It is what holds the
message form back when ranks outnumber cores.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from closed_forms import ceiling, mean_wait, openers, shown
from common import Record, ask, numbers, parser
from skewed_ranks import MPI_RANK, Row

from asyncoll.bench.plan import MODES, BenchPlan, parse_duration, parse_sizes
from asyncoll.bench.runs import rows_of
from asyncoll.bench.skewed import expected, half

RANKS = str(Path(__file__).with_name("skewed_ranks.py"))
MPI = "Open MPI"
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1", "-n"]
SETTLE_S = 1e-3  # sleep of all ranks after a barrier, for each rank of the world, so that they arrive together
# Section 6.1 and figure 9: how many times shorter the mean latency is than MPI_Allreduce's, and the active processes.
PAPER = {"full": ("1", "32"), "majority": ("2.46", "about 16"), "solo": ("53.32", "about 1")}
PAPER_RANKS = 32


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=numbers, default=[32, 8])
    options.add_argument("--skew", type=parse_duration, default=1e-3)
    options.add_argument("--size", type=lambda text: parse_sizes(text)[0], default=4096)
    options.add_argument("--iterations", type=int, default=128, help="counted calls of each mode in a repeat")
    options.add_argument("--repeats", type=int, default=3)
    record = Record(options, "skewed_arrivals")
    chosen = record.arguments
    raw: dict[int, Any] = {}
    for ranks in chosen.ranks:
        plan = BenchPlan("solo", ranks, (chosen.size,), skew_s=chosen.skew, iterations=chosen.iterations)
        repeats = [measure(plan) for _ in range(chosen.repeats)]
        rows = [summary(plan, repeats, mode) for mode in (*MODES, *peers())]
        title = f"{ranks} ranks, rank r arrives r x {1e3 * plan.skew_s:g} ms late, {chosen.size} bytes"
        record.table(f"{title} (paper: section 6.1)", table(rows))
        record.table(f"{ranks} ranks, where the time goes: what a round costs", costs(rows))
        raw[ranks] = {"repeats": repeats, "summary": rows}
    plot(record, raw)
    of_peers = [row for row in raw[chosen.ranks[0]]["summary"] if row["mode"] in peers()]
    record.write(raw, {row["mode"]: {"mean wait": row["mean_us"] / 1e6} for row in of_peers})


# -- measuring ------------------------------------------------------------------------------------


def measure(plan: BenchPlan) -> dict[str, Any]:
    """One repeat: every system with the skew, and the cost of a call when all ranks arrive together."""
    skewed = by_mode(rows_of(plan))
    together_plan = BenchPlan("solo", plan.ranks, plan.sizes, skew_s=0.0, iterations=plan.iterations)
    settle_s = SETTLE_S * plan.ranks
    ours = ask(plan.ranks, RANKS, {"system": "asyncoll", "plan": together_plan.to_json(), "settle_s": settle_s})
    together = by_mode(ours["together"])
    for peer in peers():
        skewed[peer] = ask_peer(peer, plan, 0.0)
        together[peer] = ask_peer(peer, together_plan, settle_s)
    if any(row["wrong"] for row in (*skewed.values(), *together.values())):
        sys.exit(f"wrong results: {skewed}, {together}")
    return {"skewed": skewed, "together": together, "chained": ours["chained"]}


def by_mode(rows: list[Row]) -> dict[str, Row]:
    """Without the bound, which is infinite for solo, and then no JSON. The summary has the ceiling."""
    return {row["mode"]: {key: value for key, value in row.items() if key != "bound"} for row in rows}


def peers() -> list[str]:
    installed = shutil.which(MPIRUN[0]) is not None and importlib.util.find_spec("mpi4py") is not None
    return ["Gloo", *[MPI] * installed]


def ask_peer(peer: str, plan: BenchPlan, settle_s: float) -> Row:
    question = {"system": peer, "plan": plan.to_json(), "settle_s": settle_s}
    if peer == "Gloo":
        row: Row = ask(plan.ranks, RANKS, question)
        return row
    command = [*MPIRUN, str(plan.ranks), sys.executable, RANKS, MPI_RANK, json.dumps(question)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    mpi_row: Row = json.loads(printed.splitlines()[-1])
    return mpi_row


# -- summing up -----------------------------------------------------------------------------------


def summary(plan: BenchPlan, repeats: list[dict[str, Any]], mode: str) -> Row:
    def median(kind: str, which: str, key: str) -> float:
        return float(np.median([repeat[kind][which][key] for repeat in repeats]))

    def ratio(base: str) -> float:
        runs = [repeat["skewed"] for repeat in repeats]
        return float(np.median([run[base]["mean_us"] / run[mode]["mean_us"] for run in runs]))

    ours = mode in MODES
    role = mode if ours else "full"
    skews, nap = expected(role, plan.ranks)
    row = {
        "ranks": plan.ranks,
        "mode": mode,
        "mean_us": median("skewed", mode, "mean_us"),
        "median_us": median("skewed", mode, "median_us"),
        "expected_us": 1e6 * skews * plan.skew_s,
        "ratio": ratio("full"),
        "over_gloo": ratio("Gloo"),
        "ceiling": ceiling(role, plan.ranks),
        "nap": median("skewed", mode, "nap"),
        "expected_nap": nap,
        "together_us": median("together", mode, "mean_us"),
    }
    if ours:
        costs = {key: median("chained", mode, key) for key in ("messages", "message_us", "cpu_us", "wall_us")}
        share_us = costs["cpu_us"] / min(plan.ranks, cores())
        least_s = mean_wait(plan.ranks, openers(mode, plan.ranks), plan.skew_s, 1e-6 * share_us)
        by_processor = median("skewed", "full", "mean_us") / (1e6 * least_s)
        row |= costs | {"share_us": share_us, "by_processor": by_processor if mode != "full" else 1.0}
    return row


def cores() -> int:
    return len(os.sched_getaffinity(0))


# -- showing --------------------------------------------------------------------------------------


def table(rows: list[Row]) -> list[list[str]]:
    headings = ["", "mean (us)", "median (us)", "expected mean (us)", "full/this", "paper", "ceiling", "by processor"]
    lines = [[*headings, "Gloo/this", "NAP", "expected", "paper"]]
    for row in rows:
        paper, paper_nap = PAPER.get(row["mode"], ("-", "-")) if row["ranks"] == PAPER_RANKS else ("-", "-")
        times = [f"{row[key]:.0f}" for key in ("mean_us", "median_us", "expected_us")]
        bound = f"{row['by_processor']:.2f}" if "by_processor" in row else "-"
        ratios = [f"{row['ratio']:.2f}", paper, shown(row["ceiling"]), bound, f"{row['over_gloo']:.2f}"]
        lines.append([name(row), *times, *ratios, f"{row['nap']:.2f}", f"{row['expected_nap']:.1f}", paper_nap])
    if MPI not in peers():
        lines.append([MPI, "not installed", *["-"] * (len(lines[0]) - 2)])
    return lines


def costs(rows: list[Row]) -> list[list[str]]:
    """Latency when all arrive together; messages and processor time of one of many rounds in a row."""
    columns = [("messages", "messages a round"), ("message_us", "processor us a message")]
    columns += [("share_us", f"a round's, by {cores()} cores (us)"), ("wall_us", "a round, in a row (us)")]
    lines = [["", "mean, all together (us)", "this/full", *(heading for _, heading in columns)]]
    for row in rows:
        cells = [f"{row[key]:.0f}" if key in row else "-" for key, _ in columns]
        lines.append(
            [name(row), f"{row['together_us']:.0f}", f"{row['together_us'] / rows[0]['together_us']:.2f}", *cells]
        )
    return lines


def name(row: Row) -> str:
    return f"quorum {half(row['ranks'])}" if row["mode"] == "quorum" else str(row["mode"])


def plot(record: Record, raw: dict[int, Any]) -> None:
    with record.figure(len(raw)) as panels:
        for axes, (ranks, found) in zip(panels, raw.items(), strict=True):
            rows = found["summary"]
            places = np.arange(len(rows))
            axes.bar(places - 0.2, [row["mean_us"] / 1e3 for row in rows], 0.4, label="measured")
            axes.bar(places + 0.2, [row["expected_us"] / 1e3 for row in rows], 0.4, label="with free communication")
            for place, row in zip(places, rows, strict=True):
                axes.annotate(f"NAP {row['nap']:.1f}", (place, row["mean_us"] / 1e3), ha="center", va="bottom")
            axes.set(ylabel="mean wait, ms", title=f"{ranks} ranks", xticks=places)
            axes.set_xticklabels([name(row) for row in rows])
            axes.legend()


if __name__ == "__main__":
    main()
