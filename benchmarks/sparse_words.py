"""Table 1 of Ok-Topk (Li & Hoefler, PPoPP 2022) measured: words received per rank and round; and BERT by closed forms.

    python benchmarks/sparse_words.py [--ranks 2,...,1024] [--period 32]

The words of every sparse allreduce are those that `SparseReduction.words_received` has counted, control words (counts,
boundaries, histograms) included; a closed form gives their number. Up to 64 ranks are real ones in one
process; more are simulated. `mean` is over ranks and rounds, `most` that of the rank which received most, and `data`
the mean without control words; whether they lie between the bounds, and if not, how far off, is said at the end.
Ok-Topk's thresholds are exact in every round and its regions cut in every round, so each has all control words there
can be, and the selected counts are exact; a second table has whole periods tau', with thresholds that are reused,
against bounds for the k that was asked for. Accumulators are drawn anew for every round, from fixed seeds: `normal`; or
`skewed`, where an eighth of each rank's choice lies in the first tenth of the vector and is a hundred times as large,
so that almost all of the sum falls into few ranks' regions. DenseOvlp is Dense in buckets, of the same words.

All times are SIMULATED: the product's own code in virtual time, on networks with stated alpha and beta, computation
and selection free. The plot is for a vector that no simulator holds, BERT's: closed forms of our algorithms, whose
largest deviation from the simulator, over all that was simulated here, is printed. DenseOvlp overlaps its allreduces
with the last two thirds of a stated compute time, the backward pass.
"""

from __future__ import annotations

import asyncio
import functools
import math
from typing import Any, NamedTuple

import numpy as np
from closed_forms import Model, Sparse, overlapped
from common import Record, numbers, parser

from asyncoll import Communicator
from asyncoll.algorithms.sparse.sparse_operations import ALGORITHMS
from asyncoll.tensors.reductions import Array
from asyncoll.testing import run_ranks, simulate
from asyncoll.transport.messages.simulated import Network

Row = dict[str, Any]
NETWORKS = {
    "Aries-like": Network(latency_s=1.5e-6, bandwidth_bytes_per_s=10e9),
    "10 Gbit/s Ethernet": Network(latency_s=30e-6, bandwidth_bytes_per_s=1.25e9),
}
RANKS = "2,3,4,8,12,16,32,64,256,1024"
REAL_MAX = 64  # ranks
DENSITY = 0.01
ELEMENTS = 500_000
# Of more than 64 ranks: all of them hold the result, and what is gathered for it, in the same memory.
FEWER = {"topkdsa": 100_000, "dense": 100_000, "topka": 20_000, "gaussiank": 20_000}
LONG, LONG_MAX = 32_000_000, 4  # elements, among so many ranks at most
EXACT_ROUNDS = 2  # of real ranks
VARIANTS = ("normal", "skewed")
SEED = 5
LABELS = {
    "oktopk": "Ok-Topk",
    "topka": "TopkA",
    "topkdsa": "TopkDSA",
    "gtopk": "gTopk",
    "gaussiank": "Gaussiank",
    "dense": "Dense",
}
OVERLAPPED = "DenseOvlp"
BERT, BERT_RANKS = 133_547_324, tuple(2**power for power in range(1, 11))
PERIODS = 32, 64  # tau' and tau, as in the paper's experiments
# An iteration of BERT on one of the paper's GPUs takes this or less: 400,000 took 47 hours, all included.
COMPUTE_S = 0.4
BUCKET_BYTES = 25 << 20  # as torch's DistributedDataParallel
PAPER = "3.29 to 12.95"  # times faster than the others, at 256 GPUs


class World(NamedTuple):
    """One configuration of ranks, elements, density and distribution."""

    method: str
    ranks: int
    elements: int
    variant: str = "normal"
    period: int = 1  # tau' and tau

    @property
    def k(self) -> int:
        return round(DENSITY * self.elements)

    def forms(self, network: Network) -> Sparse:
        return forms(self.ranks, self.elements, network, (self.period, self.period))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=numbers, default=numbers(RANKS))
    options.add_argument("--period", type=int, default=PERIODS[0], help="Ok-Topk's tau' and tau, and so many rounds")
    record = Record(options, "sparse_words")
    chosen = record.arguments
    real_ranks = [ranks for ranks in chosen.ranks if ranks <= REAL_MAX]
    raw = {**measure_words(record, chosen.ranks), **measure_periods(record, real_ranks, chosen.period)}
    raw |= measure_times(record, chosen.ranks)
    print(f"\n{deviations(raw)}")
    raw["bert"] = [bert(ranks, name) for name in NETWORKS for ranks in BERT_RANKS]
    for name in NETWORKS:
        record.table(f"{stated(name)}: BERT, {100 * DENSITY:g} %, closed forms", bert_table(raw["bert"], name))
    plot(record, raw["bert"])
    record.write(raw)


def measure_words(record: Record, sizes: list[int]) -> dict[str, list[Row]]:
    rows = []
    for variant in VARIANTS:
        most = max(sizes) if variant == "normal" else REAL_MAX
        worlds = [(method, ranks) for method in ALGORITHMS for ranks in sizes if ranks <= most]
        of_variant = [counted(World(method, ranks, elements(method, ranks), variant)) for method, ranks in worlds]
        record.table(f"Words received per rank and round, {variant}; exact counts", words_table(of_variant))
        rows += of_variant
    return {"words": rows}


def measure_periods(record: Record, sizes: list[int], period: int) -> dict[str, list[Row]]:
    rows = []
    for variant in VARIANTS:
        of_variant = [counted(World("oktopk", ranks, ELEMENTS, variant, period)) for ranks in sizes]
        title = f"Ok-Topk, {variant}: the mean of a period of {period} rounds, thresholds reused"
        record.table(title, words_table(of_variant))
        rows += of_variant
    return {"periods": rows}


def measure_times(record: Record, sizes: list[int]) -> dict[str, list[Row]]:
    rows = []
    for name in NETWORKS:
        sparse = [timed(world, name) for world in simulated_worlds(sizes, name)]
        record.table(f"{stated(name)}: a round, exact thresholds, against the closed form", times_table(sparse))
        buckets = [overlap(ranks, name) for ranks in sizes if ranks <= REAL_MAX and ranks.bit_count() == 1]
        record.table(f"{stated(name)}: {OVERLAPPED}, against the closed form", times_table(buckets))
        rows += [*sparse, *buckets]
    return {"simulated": rows}


def stated(name: str) -> str:
    network = NETWORKS[name]
    speed = f"{network.bandwidth_bytes_per_s / 1e9:g} GB/s"
    return f"SIMULATED: {name}, alpha {1e6 * network.latency_s:g} us, beta 4 B / {speed}"


def forms(ranks: int, count: int, network: Network, periods: tuple[int, int]) -> Sparse:
    """Of `count` elements, for independent choices of one density."""
    links = Model(ranks, network.latency_s, network.bandwidth_bytes_per_s)
    return Sparse(links, count, DENSITY * count, count * (1 - (1 - DENSITY) ** ranks), *periods)


def elements(method: str, ranks: int) -> int:
    return ELEMENTS if ranks <= REAL_MAX else FEWER.get(method, ELEMENTS)


# -- words, measured ------------------------------------------------------------------------------


def accumulator(world: World, rank: int, round_: int) -> Array:
    draw = np.random.default_rng([SEED, rank, round_])
    x = draw.standard_normal(world.elements, np.float32)
    if world.variant == "skewed":
        hot = x[: world.elements // 10]
        is_large = draw.random(hot.size) < world.k / 8 / hot.size
        hot *= np.where(is_large, 0.0, 1e-3)
        hot[is_large] = 100 * np.sign(draw.standard_normal(int(is_large.sum()))) + draw.standard_normal(is_large.sum())
    return x


class Found(NamedTuple):
    """By rank and round; and the time of the last round, if it was simulated."""

    words: Array
    selected: Array
    last_s: float = math.nan


def counted(world: World) -> Row:
    """The words that every rank has received."""
    found = real(world) if world.ranks <= REAL_MAX else simulated(world, "Aries-like")
    lower, upper = bounds(world, float(found.selected.mean()) if world.method == "gaussiank" else world.k)
    formula = world.forms(NETWORKS["Aries-like"])
    return {
        **world._asdict(),
        "k": world.k,
        "selected": float(found.selected.mean()),
        "mean": float(found.words.mean()),
        "most": float(found.words.mean(axis=1).max()),
        "control": formula.words(world.method, of_control=True),
        "formula": formula.words(world.method),
        "lower": lower,
        "upper": upper,
    }


def real(world: World) -> Found:
    async def rank(comm: Communicator) -> list[tuple[float, int]]:
        return [await one(comm, world, round_) for round_ in range(max(EXACT_ROUNDS, world.period))]

    words, selected = np.moveaxis(np.array(run_ranks(world.ranks, rank)), 2, 0)
    return Found(words, selected)


@functools.cache
def simulated(world: World, name: str) -> Found:
    """A round that all ranks begin together."""

    async def rank(comm: Communicator) -> tuple[float, int, float]:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(1.0 - loop.time())
        found = await one(comm, world, 0)
        return *found, loop.time() - 1.0

    words, selected, seconds = np.array(simulate(world.ranks, rank, NETWORKS[name]).results).T
    return Found(words[:, None], selected[:, None], float(seconds.max()))


async def one(comm: Communicator, world: World, round_: int) -> tuple[float, int]:
    """The words that this rank has received, and the elements it has given."""
    x = accumulator(world, comm.rank, round_)
    reduction = await comm.sparse_allreduce(
        x,
        density=DENSITY,
        algorithm=world.method,
        thresholds_every=world.period,
        regions_every=world.period,
    )
    return reduction.words_received, reduction.selected


def bounds(world: World, k: float) -> tuple[float, float]:
    """The lower and upper bounds of Table 1."""
    n, ranks = world.elements, world.ranks
    others = (ranks - 1) / ranks
    return {
        "oktopk": (2 * k * others, 6 * k * others),
        "topka": (2 * k * (ranks - 1), 2 * k * (ranks - 1)),
        "topkdsa": (4 * k * others, (2 * k + n) * others),
        "gtopk": (0, 4 * k * math.log2(ranks)),
        "gaussiank": (2 * k * (ranks - 1), 2 * k * (ranks - 1)),
        "dense": (2 * n * others, 2 * n * others),
    }[world.method]


# -- times, simulated -----------------------------------------------------------------------------


def simulated_worlds(ranks: list[int], network: str) -> list[World]:
    """Powers of two, which the closed forms are about; of the largest worlds, one network's will do.

    The small worlds are those of long vectors, too, whose parts go in segments and wait for grants.
    """
    most = max(ranks) if network == "Aries-like" else REAL_MAX
    powers = [size for size in ranks if size.bit_count() == 1 and size <= most]
    worlds = [World(method, size, elements(method, size)) for method in ALGORITHMS for size in powers]
    return worlds + [World(method, size, LONG) for method in ALGORITHMS for size in powers if size <= LONG_MAX]


def timed(world: World, name: str) -> Row:
    formula_s = world.forms(NETWORKS[name]).seconds(world.method)
    return {**world._asdict(), "network": name, "s": simulated(world, name).last_s, "formula_s": formula_s}


def overlap(ranks: int, name: str) -> Row:
    """Eight buckets of one size that become ready one after another, each a third of an allreduce after the last."""
    network, bucket = NETWORKS[name], ELEMENTS // 8
    links = Model(ranks, network.latency_s, network.bandwidth_bytes_per_s)
    ready_s = [place * links.allreduce(4 * bucket) / 3 for place in range(8)]

    async def rank(comm: Communicator) -> float:
        loop, works = asyncio.get_running_loop(), []
        for due_s in ready_s:
            await asyncio.sleep(1.0 + due_s - loop.time())
            works.append(comm.allreduce(np.ones(bucket, np.float32)))
        for work in works:
            await work
        return loop.time() - 1.0

    took_s = max(simulate(ranks, rank, network).results)
    formula_s = overlapped(links, 4 * bucket, ready_s)
    world = {"method": OVERLAPPED, "ranks": ranks, "elements": ELEMENTS, "network": name}
    return {**world, "s": took_s, "formula_s": formula_s}


# -- BERT, by closed forms ------------------------------------------------------------------------


def bert(ranks: int, name: str) -> Row:
    found = forms(ranks, BERT, NETWORKS[name], PERIODS)
    words = {label: found.words(method) for method, label in LABELS.items()}
    iterations = {label: COMPUTE_S + found.seconds(method) for method, label in LABELS.items()}
    words[OVERLAPPED] = words["Dense"]
    buckets = math.ceil(4 * BERT / BUCKET_BYTES)
    ready_s = [COMPUTE_S / 3 + COMPUTE_S * 2 / 3 * (place + 1) / buckets for place in range(buckets)]
    iterations[OVERLAPPED] = max(COMPUTE_S, overlapped(found.links, 4 * BERT // buckets, ready_s))
    return {"ranks": ranks, "network": name, "words": words, "iteration_s": iterations}


# -- showing --------------------------------------------------------------------------------------


def words_table(rows: list[Row]) -> list[list[str]]:
    lines = [
        [
            "method",
            "ranks",
            "n",
            "k",
            "selected",
            "mean",
            "most",
            "control",
            "lower",
            "upper",
            "data in",
            "mean in",
            "most in",
        ]
    ]
    for row in rows:
        numbers_ = [row[name] for name in ("ranks", "elements", "k", "selected", "mean", "most", "control")]
        limits = [row["lower"], row["upper"]]
        lines.append(
            [
                row["method"],
                *(f"{number:.0f}" for number in (*numbers_, *limits)),
                within(row["mean"] - row["control"], *limits),
                within(row["mean"], *limits),
                within(row["most"], *limits),
            ]
        )
    return lines


def within(words: float, lower: float, upper: float) -> str:
    """Whether words lie within bounds, up to rounding: where bounds coincide, the mean of exact words is rounded."""
    if words < lower * (1 - 1e-9):
        return f"{100 * (words / lower - 1):+.2f} %"
    return "yes" if words <= upper * (1 + 1e-9) else f"{100 * (words / upper - 1):+.2f} %"


def deviations(raw: Row) -> str:
    """How far the closed forms are off at most. Words: where choices are independent and as many as wanted."""
    normal = [row for row in raw["words"] if row["variant"] == "normal"]
    words = max(normal, key=lambda row: abs(row["mean"] / row["formula"] - 1))
    lines = [
        f"words: {100 * (words['mean'] / words['formula'] - 1):+.2f} % ({words['method']}, {words['ranks']} ranks)"
    ]
    for method in (*ALGORITHMS, OVERLAPPED):
        rows = [row for row in raw["simulated"] if row["method"] == method]
        worst = max(rows, key=lambda row: abs(row["s"] / row["formula_s"] - 1))
        off = f"{100 * (worst['s'] / worst['formula_s'] - 1):+.1f} %"
        lines.append(f"simulated time of {method}: {off} ({worst['ranks']} ranks, {worst['network']})")
    return "Largest deviation from the closed forms\n  " + "\n  ".join(lines)


def times_table(rows: list[Row]) -> list[list[str]]:
    lines = [["method", "ranks", "n", "simulated (us)", "formula", "off"]]
    for row in rows:
        off = row["s"] / row["formula_s"] - 1
        cells = [f"{1e6 * row['s']:.1f}", f"{1e6 * row['formula_s']:.1f}", f"{100 * off:+.1f} %"]
        lines.append([row["method"], str(row["ranks"]), str(row["elements"]), *cells])
    return lines


def bert_table(rows: list[Row], name: str) -> list[list[str]]:
    labels = (*LABELS.values(), OVERLAPPED)
    lines = [["ranks", *(f"{label}, M words" for label in labels), *(f"{label}, ms" for label in labels), "faster by"]]
    for row in rows:
        if row["network"] != name:
            continue
        words, times = row["words"], row["iteration_s"]
        others = [times[label] / times["Ok-Topk"] for label in labels if label != "Ok-Topk"]
        faster = f"{min(others):.2f} to {max(others):.2f}" + (f" (paper: {PAPER})" if row["ranks"] == 256 else "")
        cells = [*(f"{words[label] / 1e6:.2f}" for label in labels), *(f"{1e3 * times[label]:.0f}" for label in labels)]
        lines.append([str(row["ranks"]), *cells, faster])
    return lines


def plot(record: Record, rows: list[Row]) -> None:
    """BERT: words, and what an iteration takes beyond its compute time on each network."""
    styles = dict(zip((*LABELS.values(), OVERLAPPED), ("o-", "s-", "^-", "v-", "s--", "x-", "x--"), strict=True))
    with record.figure(1 + len(NETWORKS)) as panels:
        for axes, name in zip(panels, ("", *NETWORKS), strict=True):
            shown = [row for row in rows if row["network"] == (name or "Aries-like")]
            for label, style in styles.items():
                words = [row["words"][label] / 1e6 for row in shown]
                beyond_ms = [1e3 * (row["iteration_s"][label] - COMPUTE_S) for row in shown]
                axes.plot(BERT_RANKS, beyond_ms if name else words, style, label=label, markersize=4)
            quantity = f"simulated ms beyond {COMPUTE_S:g} s of compute" if name else "million words a round"
            axes.set(yscale="log", xlabel="ranks", ylabel=quantity, title=name or "received by a rank, in the mean")
            axes.set_xscale("log", base=2)
            axes.legend(fontsize=7)


if __name__ == "__main__":
    main()
