"""Skewed arrivals of up to 1,024 simulated ranks, against closed forms.

This extends figure 9 of Li et al., "Taming unbalanced training workloads in deep learning with partial collective
operations", PPoPP 2020.

    python benchmarks/simulated_scale.py [--ranks 2,8,...] [--sizes 4K,64K,1M,4M] [--iterations 16]

The product's own protocol code in virtual time, on networks with stated latency (alpha) and bandwidth (1 / beta);
computation is free. Rank r arrives r skews late. `round` is the time from the arrival that opens a round to its last
rank's result, `wait` the mean over the ranks. Both stand beside the closed forms of `closed_forms.py`; majority's are
those of the ranks that were drawn. `full/this` compares mean waits; its ceiling is that of free communication.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
from closed_forms import Model, ceiling, mean_wait, openers, shown
from common import Record, numbers, parser

from asyncoll import Communicator, Reduction
from asyncoll.bench.claims import Cells
from asyncoll.bench.plan import ITEM_BYTES, parse_sizes
from asyncoll.bench.skewed import MODES, expected, half
from asyncoll.bench.waiting import NAMES
from asyncoll.testing import simulate
from asyncoll.transport.messages.simulated import Network

Row = dict[str, Any]
# The paper's machine has a Cray Aries network: alpha is 1.5 to 5 us, and bandwidth 10 GB/s.
NETWORKS = {
    "Aries-like": Network(latency_s=2e-6, bandwidth_bytes_per_s=10e9),
    "10 Gbit/s Ethernet": Network(latency_s=30e-6, bandwidth_bytes_per_s=1.25e9),
}
RANKS = "2,4,8,12,16,32,64,100,128,256,512,1024"
MEMORY = 1 << 26  # the most bytes of all ranks' arrays together; larger worlds are left out
SHORT_BYTES, SHORT_SKEW_S, LONG_SKEW_S = 1 << 18, 1e-3, 0.1  # the paper's skew, or one that a long array fits into


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=numbers, default=numbers(RANKS))
    options.add_argument("--sizes", type=parse_sizes, default=parse_sizes("4K,64K,1M,4M"))
    options.add_argument("--iterations", type=int, default=16, help="rounds of majority; the others are all alike")
    record = Record(options, "simulated_scale")
    chosen = record.arguments
    raw: dict[str, list[Row]] = {}
    together: dict[str, list[Row]] = {}
    for network, links in NETWORKS.items():
        raw[network] = []
        together[network] = [
            together_row(ranks, size, links) for size in chosen.sizes for ranks in chosen.ranks if fits(ranks, size)
        ]
        record.table(f"{stated(network)}; allreduce, all ranks arrive together", together_table(together[network]))
        for size in chosen.sizes:
            worlds = [ranks for ranks in chosen.ranks if fits(ranks, size)]
            rows = [row for ranks in worlds for row in world(ranks, size, links, chosen.iterations)]
            raw[network] += rows
            title = (
                f"SIMULATED: {network}, alpha {1e6 * links.latency_s:g} us, {links.bandwidth_bytes_per_s / 1e9:g} GB/s"
            )
            record.table(f"{title}; {size} bytes; rank r arrives r x {1e3 * skew(size):g} ms late", table(rows))
    plot(record, raw)
    record.write({"skewed": raw, "together": together}, cells(next(iter(raw.values()))))


def cells(rows: list[Row]) -> Cells:
    """What the page of benchmarks shows: mean waits of the shortest arrays on one network, in seconds."""
    named: Cells = {}
    for row in rows:
        if row["size"] == rows[0]["size"]:
            named.setdefault(f"{row['ranks']:,} ranks", {})[NAMES.get(row["mode"], row["mode"])] = row["wait_s"]
    return named


def fits(ranks: int, size: int) -> bool:
    return ranks * size <= MEMORY


def stated(network: str) -> str:
    links = NETWORKS[network]
    speed = f"alpha {1e6 * links.latency_s:g} us, {links.bandwidth_bytes_per_s / 1e9:g} GB/s"
    return f"SIMULATED: {network}, {speed}"


def world(ranks: int, size: int, network: Network, iterations: int) -> list[Row]:
    """One row for each mode."""
    model = Model(ranks, network.latency_s, network.bandwidth_bytes_per_s)
    rows: list[Row] = []
    for mode in MODES:
        rounds = run(mode, model, size, network, iterations if mode == "majority" else 1)
        rows.append(summary(mode, model, size, rounds))
        rows[-1]["ratio"] = rows[0]["wait_s"] / rows[-1]["wait_s"]
    return rows


def skew(size: int) -> float:
    return SHORT_SKEW_S if size <= SHORT_BYTES else LONG_SKEW_S


# -- in virtual time ------------------------------------------------------------------------------


def run(mode: str, model: Model, size: int, network: Network, iterations: int) -> list[Row]:
    """One row for each round: the rank that opened it, its time from then on, and the mean wait."""
    pause_s = 2 * model.round(mode, size) + model.ranks * skew(size)  # longer than any round: they do not overlap

    async def rank(comm: Communicator) -> list[tuple[float, int]]:
        loop, x = asyncio.get_running_loop(), np.empty(size // ITEM_BYTES, np.float32)
        call, begin_s, found = caller(comm, mode), loop.time() + pause_s, []
        for _ in range(iterations):
            x.fill(1)
            await asyncio.sleep(begin_s + comm.rank * skew(size) - loop.time())
            came_s = loop.time()
            active = await call(x)
            found.append((loop.time() - came_s, active))
            assert (x == active).all()
            begin_s += pause_s
            await asyncio.sleep(begin_s - loop.time())
            if mode != "full":  # a synchronous round takes the contributions that were too late
                x.fill(0)
                await call(x)
            begin_s += pause_s
        return found

    everyones = simulate(model.ranks, rank, network).results
    return [
        one_round(mode, model.ranks, skew(size), [found[index] for found in everyones]) for index in range(iterations)
    ]


def together_row(ranks: int, size: int, network: Network) -> Row:
    """An allreduce that all ranks call at once, as its closed form assumes."""
    model = Model(ranks, network.latency_s, network.bandwidth_bytes_per_s)

    async def rank(comm: Communicator) -> float:
        loop, x = asyncio.get_running_loop(), np.ones(size // ITEM_BYTES, np.float32)
        await asyncio.sleep(1.0 - loop.time())
        await comm.allreduce(x)
        assert (x == comm.size).all()
        return loop.time() - 1.0

    took_s = max(simulate(ranks, rank, network).results)
    formula_s = model.allreduce(size)
    return {"ranks": ranks, "size": size, "algorithm": model.algorithm(size), "s": took_s, "formula_s": formula_s}


def one_round(mode: str, ranks: int, skew_s: float, found: Sequence[tuple[float, int]]) -> Row:
    waits, active = [wait for wait, _ in found], found[0][1]
    opener = ranks - 1 if mode == "full" else active - 1
    ended_s = max(place * skew_s + waits[place] for place in range(opener + 1))
    return {"opener": opener, "active": active, "round_s": ended_s - opener * skew_s, "wait_s": statistics.mean(waits)}


def caller(comm: Communicator, mode: str) -> Callable[[Any], Awaitable[int]]:
    """A call of `mode` that returns the number of ranks in its result."""

    async def full(x: Any) -> int:
        await comm.allreduce(x)
        return comm.size

    async def wait_avoiding(x: Any) -> int:
        return (await reductions[mode](x)).active

    reductions: dict[str, Callable[[Any], Awaitable[Reduction]]] = {
        "majority": lambda x: comm.majority_allreduce(x, sync_every=2),
        "quorum": lambda x: comm.quorum_allreduce(x, quorum=half(comm.size), sync_every=2),
        "solo": lambda x: comm.solo_allreduce(x, sync_every=2),
    }
    return full if mode == "full" else wait_avoiding


# -- against theory -------------------------------------------------------------------------------


def summary(mode: str, model: Model, size: int, rounds: list[Row]) -> Row:
    drawn = [round_["opener"] for round_ in rounds]
    formula_s = model.round(mode, size)
    return {
        "ranks": model.ranks,
        "size": size,
        "mode": mode,
        "algorithm": model.round_algorithm(mode, size),
        "round_s": statistics.mean(round_["round_s"] for round_ in rounds),
        "round_formula_s": formula_s,
        "wait_s": statistics.mean(round_["wait_s"] for round_ in rounds),
        "wait_formula_s": mean_wait(model.ranks, drawn, skew(size), formula_s),
        "wait_any_draw_s": mean_wait(model.ranks, openers(mode, model.ranks), skew(size), formula_s),
        "nap": statistics.mean(round_["active"] for round_ in rounds),
        "expected_nap": expected(mode, model.ranks)[1],
        "ceiling": ceiling(mode, model.ranks),
        "rounds": rounds,
    }


def table(rows: list[Row]) -> list[list[str]]:
    lines = [["ranks", "mode", "algorithm", "round (us)", "formula", "off"]]
    lines[0] += ["wait (us)", "formula", "off", "any draw", "full/this", "ceiling", "NAP", "expected"]
    for row in rows:
        times = [*against(row["round_s"], row["round_formula_s"]), *against(row["wait_s"], row["wait_formula_s"])]
        any_draw = f"{1e6 * row['wait_any_draw_s']:.1f}"
        counts = [f"{row['ratio']:.2f}", shown(row["ceiling"]), f"{row['nap']:.1f}", f"{row['expected_nap']:.1f}"]
        lines.append([str(row["ranks"]), row["mode"], row["algorithm"], *times, any_draw, *counts])
    return lines


def together_table(rows: list[Row]) -> list[list[str]]:
    lines = [["bytes", "ranks", "algorithm", "allreduce (us)", "formula", "off"]]
    for row in rows:
        lines.append([str(row["size"]), str(row["ranks"]), row["algorithm"], *against(row["s"], row["formula_s"])])
    return lines


def against(simulated_s: float, formula_s: float) -> list[str]:
    off = simulated_s / formula_s - 1 if formula_s else 0.0
    return [f"{1e6 * simulated_s:.1f}", f"{1e6 * formula_s:.1f}", f"{100 * off:+.1f} %"]


def plot(record: Record, raw: dict[str, list[Row]]) -> None:
    """The first size: mean waits by world size, simulated as dots beside the closed forms (of any draw) as lines."""
    with record.figure(len(raw)) as panels:
        for axes, (network, found) in zip(panels, raw.items(), strict=True):
            for colour, mode in enumerate(MODES):
                rows = [row for row in found if row["mode"] == mode and row["size"] == found[0]["size"]]
                ranks = [row["ranks"] for row in rows]
                axes.plot(ranks, [1e3 * row["wait_s"] for row in rows], "o", color=f"C{colour}", label=mode)
                axes.plot(ranks, [1e3 * row["wait_any_draw_s"] for row in rows], "-", color=f"C{colour}", linewidth=0.8)
            axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="mean wait, ms (simulated)", title=network)
            axes.legend()


if __name__ == "__main__":
    main()
