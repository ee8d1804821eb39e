"""Trainings with sparse allreduces, and the accuracy of their selection.

This is section 5, with figures 5 and 6, of Li and Hoefler, "Near-optimal sparse allreduce for distributed deep
learning" (Ok-Topk), PPoPP 2022.

    python benchmarks/sparse_training.py [--ranks 4,8] [--seeds 0] [--workloads digits:180,digits-wide:120]

*Trainings.* Real processes by message (`--transport zmq`), each method of `asyncoll.training.OkTopkSGD` in turn, with
the same model, data, order of samples and learning rates; residual="updates", the paper's algorithm 2. `oktopk` has new
thresholds in each round and so sends k elements, as topka, topkdsa and gtopk do; `oktopk, 32 rounds` reuses them for so
many, as the paper. `dense-overlapped` is `OverlappedSGD`, with buckets of 1 MiB. Time is that of the caller, per round,
the mean of all ranks: `selection` is what `comm.sparse_allreduce` does before it returns its awaitable, `communication`
what is awaited (with what the algorithm computes meanwhile: sums, global thresholds), `compute` the gradient (and,
overlapped, what starts the buckets in it). A round is longer by the update. Words of 4 bytes received are counted by
the transport.

*Counts.* Digits among more ranks, in one process (`asyncoll.testing.simulate`), at a constant learning rate; times mean
nothing there. `plain sum` is the share of elements that are chosen, exactly, by any rank, `topkdsa` what its result
holds. The paper's settings are other networks; its numbers stand beside ours as an orientation.
xi is |Topk(mean acc) - Topk(mean Topk(acc))| / |mean of the ranks' steps|, exactly, from the accumulators of a training
with Ok-Topk (equation 5).
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import torch
from common import Record, ask, numbers, parser, program

import asyncoll
from asyncoll.testing import simulate
from asyncoll.training import OkTopkSGD, OverlappedSGD, Trainer
from trainers.experiment import learning_rate
from trainers.settings import Settings
from trainers.workloads import WORKLOADS

Options = dict[str, Any]
OVERLAPPED = "dense-overlapped"
REUSED = "oktopk, 32 rounds"  # the paper's thresholds
METHODS: dict[str, Options] = {
    "dense": {"algorithm": "dense"},
    OVERLAPPED: {"bucket_bytes": 1 << 20},
    "topka": {"algorithm": "topka"},
    "topkdsa": {"algorithm": "topkdsa"},
    "gtopk": {"algorithm": "gtopk"},
    "gaussiank": {"algorithm": "gaussiank"},
    "oktopk": {"algorithm": "oktopk"},
    REUSED: {"algorithm": "oktopk", "thresholds_every": 32},
}
DENSITIES = {"digits": 0.02, "digits-wide": 0.01}
FOLLOWING = "oktopk, following"  # thresholds that follow the counts, as in the authors' code
OFTEN = "oktopk, 4 rounds"
COUNTED: dict[str, Options] = {
    "oktopk": {"algorithm": "oktopk"},
    REUSED: METHODS[REUSED],
    FOLLOWING: {"algorithm": "oktopk", "thresholds_every": 32, "feedback": asyncoll.Feedback()},
    OFTEN: {"algorithm": "oktopk", "thresholds_every": 4},
    "gaussiank": {"algorithm": "gaussiank"},
    "topkdsa": {"algorithm": "topkdsa"},
}
# Section 5: density of TopkDSA's result by ranks and density.
PAPER_DENSITIES = {(16, 0.01): "13.2 %", (32, 0.02): "34.5 %"}
COUNTED_BATCH = 32  # each of 32 ranks has 39 images
COUNTED_RATE = 0.1
PHASES = 4  # of a training, for counts that change
PRELOAD = "numpy,torch,torch._dynamo,sklearn.datasets,sklearn.model_selection,asyncoll"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=numbers, default=[4, 8])
    options.add_argument("--seeds", type=numbers, default=[0])
    options.add_argument("--workloads", type=pairs, default=pairs("digits:180,digits-wide:120"), help="with rounds")
    options.add_argument("--counted", type=worlds, default=worlds("16:0.01:240,32:0.02:100"), help=worlds.__doc__)
    record = Record(options, "sparse_training")
    os.environ.setdefault("ASYNCOLL_PRELOAD", PRELOAD)
    torch.set_num_threads(1)
    chosen = record.arguments
    trained = [
        training(record, workload, rounds, ranks, chosen.seeds)
        for workload, rounds in chosen.workloads
        for ranks in chosen.ranks
    ]
    counted = [counting(record, *world, chosen.seeds[0]) for world in chosen.counted]
    plot(record, counted)
    record.write({"trained": trained, "counted": counted})


def pairs(text: str) -> list[tuple[str, int]]:
    parts = (part.partition(":") for part in text.split(","))
    return [(workload, int(rounds)) for workload, _, rounds in parts]


def worlds(text: str) -> list[tuple[int, float, int]]:
    """ranks:density:rounds"""
    parts = (part.split(":") for part in text.split(","))
    return [(int(ranks), float(density), int(rounds)) for ranks, density, rounds in parts]


# -- trainings ------------------------------------------------------------------------------------


def training(record: Record, workload: str, rounds: int, ranks: int, seeds: list[int]) -> dict[str, Any]:
    """All methods, once for each seed, and two tables of them."""
    question = {"workload": workload, "rounds": rounds}
    runs = [ask(ranks, __file__, {**question, "seed": seed}, transport="zmq") for seed in seeds]
    density = DENSITIES[workload]
    title = f"{workload}, {runs[0]['elements']:,} parameters, {ranks} ranks, density {density:.0%}, {rounds} rounds"
    record.table(f"{title}, seeds {seeds}; milliseconds per round", training_table(runs))
    record.table(
        f"{title}: selected by a rank, and in the sum, over k (mean deviation from k), by quarter of the training",
        counts_table({method: runs[0]["methods"][method] for method in ("oktopk", REUSED, "gaussiank")}),
    )
    return {**question, "ranks": ranks, "density": density, "runs": runs}


def training_table(runs: list[dict[str, Any]]) -> list[list[str]]:
    lines = [["", "accuracy", "over dense", "words", "of dense", "selected/k", "in the sum/k"]]
    lines[0] += ["selection", "communication", "compute", "round"]
    dense = [run["methods"]["dense"] for run in runs]
    for method in METHODS:
        found = [run["methods"][method] for run in runs]
        score, dense_score = mean(found, "score"), mean(dense, "score")
        words, dense_words = mean(found, "words"), mean(dense, "words")
        lines.append(
            [
                method,
                f"{score:.1%}",
                f"{100 * (score - dense_score):+.1f}",
                f"{words:,.0f}",
                f"{words / dense_words:.1%}",
                *(over_k(found, counts) for counts in ("selected", "summed")),
                *(f"{1e3 * mean(found, part):.2f}" for part in ("selection_s", "communication_s", "compute_s")),
                f"{1e3 * mean(found, 'round_s'):.2f}",
            ]
        )
    return lines


def mean(found: list[dict[str, Any]], key: str) -> float:
    return statistics.fmean(run[key] for run in found)


def over_k(found: list[dict[str, Any]], counts: str) -> str:
    values = [value for run in found for value in run[counts]["mean"]]
    return f"{statistics.fmean(values):.2f}" if values else "-"


def counts_table(runs: dict[str, dict[str, Any]]) -> list[list[str]]:
    lines = [["", *(f"{which}, {1 + phase}/{PHASES}" for which in ("local", "global") for phase in range(PHASES))]]
    for method, found in runs.items():
        cells = []
        for counts in ("selected", "summed"):
            both = zip(
                np.array_split(found[counts]["mean"], PHASES),
                np.array_split(found[counts]["deviation"], PHASES),
                strict=True,
            )
            cells += [f"{means.mean():.2f} ({deviations.mean():.0%})" for means, deviations in both]
        lines.append([method, *cells])
    return lines


def rank(question: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = asyncoll.run(measure, question)
    return found


async def measure(comm: asyncoll.Communicator, question: dict[str, Any]) -> dict[str, Any]:
    density = DENSITIES[question["workload"]]
    settings = Settings.of("oktopk_sgd", density=density, **question)
    elements = parameters_of(settings)
    return {
        "seed": settings.seed,
        "elements": elements,
        "methods": {name: await train(comm, settings, elements, name, METHODS[name]) for name in METHODS},
    }


def parameters_of(settings: Settings) -> int:
    model = WORKLOADS[settings.workload](0, 1, 1, settings.seed).model
    return sum(parameter.numel() for parameter in model.parameters())


async def train(
    comm: asyncoll.Communicator, settings: Settings, elements: int, name: str, options: Options
) -> dict[str, Any]:
    """One training; means over ranks, the same at every rank."""
    watched, counts = Stopwatch(comm), Counts(settings, elements)
    workload = WORKLOADS[settings.workload](comm.rank, comm.size, settings.batch, settings.seed)
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.0)
    if name == OVERLAPPED:
        sgd: Trainer = OverlappedSGD(watched, workload.model, optimizer, **options)
    else:
        sgd = sparse_trainer(watched, workload.model, optimizer, settings, counts, name=name, **options)
    await sgd.start()
    before = words_received(comm)
    await comm.barrier()
    started_s = time.perf_counter()
    while sgd.round < settings.rounds:
        computing_s = time.perf_counter()
        workload.loss().backward()
        watched.compute_s += time.perf_counter() - computing_s
        optimizer.param_groups[0]["lr"] = learning_rate(sgd.round + 1, settings)
        await sgd.step()
    await sgd.finish()
    watched.round_s = time.perf_counter() - started_s
    words = words_received(comm) - before
    of_rank = [watched.selection_s, watched.communication_s, watched.compute_s, watched.round_s, words]
    means = await comm.allreduce(np.array(of_rank) / settings.rounds, op=asyncoll.AVG)
    keys = ("selection_s", "communication_s", "compute_s", "round_s", "words")
    return {"score": workload.score(), **dict(zip(keys, means.tolist(), strict=True)), **await counts.collect(comm)}


def sparse_trainer(
    comm: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, settings: Settings, counts: Counts, **own: Any
) -> OkTopkSGD:
    rules: Options = {"density": settings.options["density"], "residual": "updates", "observe": counts.observe}
    return OkTopkSGD(comm, model, optimizer, **rules, **own)


def words_received(comm: asyncoll.Communicator) -> float:
    """The words received by the calls that carry updates."""
    calls = comm.statistics().calls
    return sum(calls[operation].words_received for operation in ("sparse_allreduce", "allreduce") if operation in calls)


class Stopwatch:
    """A communicator that measures how long its caller selects, and waits for allreduces."""

    def __init__(self, comm: asyncoll.Communicator) -> None:
        self._comm = comm
        self.selection_s = self.communication_s = self.compute_s = self.round_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def sparse_allreduce(self, x: torch.Tensor, **options: Any) -> Awaitable[asyncoll.SparseReduction]:
        started_s = time.perf_counter()
        call = self._comm.sparse_allreduce(x, **options)
        self.selection_s += time.perf_counter() - started_s
        return self._wait(call)

    def allreduce(self, x: torch.Tensor, op: asyncoll.ReduceOp) -> Awaitable[torch.Tensor]:
        return self._wait(self._comm.allreduce(x, op))

    async def _wait(self, call: Awaitable[Any]) -> Any:
        started_s = time.perf_counter()
        result = await call
        self.communication_s += time.perf_counter() - started_s
        return result


class Counts:
    """The numbers of elements that this rank selected, and that were in the sum, over k, by round."""

    def __init__(self, settings: Settings, elements: int) -> None:
        self._k = max(1, round(settings.options["density"] * elements))
        self._selected: list[float] = []
        self._summed: list[float] = []

    def observe(self, round_: int, total: asyncoll.SparseReduction) -> None:
        self._selected.append(total.selected / self._k)
        self._summed.append(len(total.indices) / self._k)

    async def collect(self, comm: asyncoll.Communicator) -> dict[str, Any]:
        """For each round, over all ranks: the mean, and the mean distance from 1."""
        selected, summed = np.array(self._selected), np.array(self._summed)
        means = await comm.allreduce(selected.copy(), op=asyncoll.AVG)
        deviations = await comm.allreduce(np.abs(selected - 1), op=asyncoll.AVG)
        return {
            "selected": {"mean": means.tolist(), "deviation": deviations.tolist()},
            "summed": {"mean": summed.tolist(), "deviation": np.abs(summed - 1).tolist()},
        }


# -- counts among many ranks ----------------------------------------------------------------------


def counting(record: Record, ranks: int, density: float, rounds: int, seed: int) -> dict[str, Any]:
    settings = Settings.of(
        "oktopk_sgd", rounds=rounds, density=density, batch=COUNTED_BATCH, seed=seed, learning_rate=COUNTED_RATE
    )
    elements = parameters_of(settings)
    xis = {name: Xi(ranks, max(1, round(density * elements))) for name in ("oktopk", REUSED)}
    found = {}
    for name, options in COUNTED.items():
        watch = xis[name].watch if name in xis else lambda comm: comm
        found[name] = count(settings, ranks, elements, name, options, watch)
    title = f"digits, {ranks} ranks, density {density:.0%}, {rounds} rounds at rate {COUNTED_RATE}, seed {seed}"
    record.table(
        f"{title}: selected by a rank, and in the sum, over k (mean deviation from k), by quarter",
        counts_table(found),
    )
    lines = [["accumulators of", "plain sum", "topkdsa", "paper", "xi, mean", "median", "largest", "below P in"]]
    lines += [density_line(name, ranks, density, found["topkdsa"], xi) for name, xi in xis.items()]
    record.table(f"{title}: density of results, and xi, over all rounds", lines)
    watched = {name: {"xi": xi.values, "plain_sum": xi.densities} for name, xi in xis.items()}
    return {"ranks": ranks, "density": density, "elements": elements, "methods": found, "watched": watched}


def count(
    settings: Settings,
    ranks: int,
    elements: int,
    name: str,
    options: Options,
    watch: Callable[[asyncoll.Communicator], Any],
) -> dict[str, Any]:
    async def main(comm: asyncoll.Communicator) -> dict[str, Any]:
        workload = WORKLOADS[settings.workload](comm.rank, comm.size, settings.batch, settings.seed)
        optimizer = torch.optim.SGD(workload.model.parameters(), lr=settings.learning_rate)
        counts = Counts(settings, elements)
        sgd = sparse_trainer(watch(comm), workload.model, optimizer, settings, counts, **options)
        await sgd.start()
        while sgd.round < settings.rounds:
            workload.loss().backward()
            await sgd.step()
        await sgd.finish()
        return {"score": workload.score(), **await counts.collect(comm)}

    started_s = time.perf_counter()
    found: dict[str, Any] = simulate(ranks, main, shared_memory=True).results[0]
    print(f"# {ranks} ranks, {name}: {found['score']:.1%}, {time.perf_counter() - started_s:.0f} s", flush=True)
    return found


class Xi:
    """The accumulators of all ranks of one process, and xi of each round."""

    def __init__(self, ranks: int, k: int) -> None:
        self._ranks, self._k = ranks, k
        self._accumulators: dict[int, dict[int, np.ndarray]] = defaultdict(dict)
        self._residuals: dict[int, dict[int, np.ndarray]] = defaultdict(dict)
        self.values: list[float] = []
        self.densities: list[float] = []  # of the plain sum of what the ranks choose

    def watch(self, comm: asyncoll.Communicator) -> Watched:
        return Watched(comm, self)

    def before(self, round_: int, rank: int, x: torch.Tensor) -> None:
        self._accumulators[round_][rank] = x.numpy().astype(np.float64)

    def after(self, round_: int, rank: int, x: torch.Tensor) -> None:
        """Record the residual. The round has ended here, so all ranks have begun it, and have ended the one before."""
        self._residuals[round_][rank] = x.numpy().astype(np.float64)
        if rank == 0:
            self._evaluate(self._accumulators.pop(round_), self._residuals.pop(round_ - 1, {}))

    def _evaluate(self, accumulators: dict[int, np.ndarray], residuals: dict[int, np.ndarray]) -> None:
        everyones = list(accumulators.values())
        ideal = sum(everyones) / self._ranks
        steps = ideal - sum(residuals.values()) / self._ranks
        chosen = [largest(accumulator, self._k) for accumulator in everyones]
        total = sum(chosen) / self._ranks
        apart = np.linalg.norm(largest(ideal, self._k) - largest(total, self._k))
        self.values.append(float(apart / np.linalg.norm(steps)))
        self.densities.append(float(np.mean(np.any([part != 0 for part in chosen], axis=0))))


class Watched:
    """A communicator that passes the inputs and the residuals of its sparse allreduces to `Xi`."""

    def __init__(self, comm: asyncoll.Communicator, xi: Xi) -> None:
        self._comm, self._xi = comm, xi
        self._round = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    async def sparse_allreduce(self, x: torch.Tensor, **options: Any) -> asyncoll.SparseReduction:
        self._round += 1
        self._xi.before(self._round, self._comm.rank, x)
        total = await self._comm.sparse_allreduce(x, **options)
        self._xi.after(self._round, self._comm.rank, x)
        return total


def largest(x: np.ndarray, k: int) -> np.ndarray:
    """`x` with all but its k elements of the largest magnitudes set to 0."""
    kept = np.argpartition(np.abs(x), -k)[-k:]
    result = np.zeros_like(x)
    result[kept] = x[kept]
    return result


def density_line(name: str, ranks: int, density: float, topkdsa: dict[str, Any], xi: Xi) -> list[str]:
    return [
        name,
        f"{statistics.fmean(xi.densities):.1%}",
        f"{density * statistics.fmean(topkdsa['summed']['mean']):.1%}",
        PAPER_DENSITIES.get((ranks, density), "-"),
        f"{statistics.fmean(xi.values):.2f}",
        f"{statistics.median(xi.values):.2f}",
        f"{max(xi.values):.2f}",
        f"{statistics.fmean(value < ranks for value in xi.values):.0%}",
    ]


def plot(record: Record, counted: list[dict[str, Any]]) -> None:
    """Figures 5 and 6: xi, and selected counts, over the rounds."""
    with record.figure(2) as (left, right):
        for place, found in enumerate(counted):
            for name, style in (("oktopk", "-"), (REUSED, ":")):
                label = f"{name}, P = {found['ranks']}, d = {found['density']:.0%}"
                left.plot(found["watched"][name]["xi"], f"C{place}{style}", label=label, linewidth=0.8)
            left.axhline(found["ranks"], color=f"C{place}", linewidth=0.8, linestyle="--")
        for name in ("oktopk", FOLLOWING, OFTEN, "gaussiank"):
            right.plot(counted[0]["methods"][name]["selected"]["mean"], label=name, linewidth=0.8)
        right.axhline(1, color="grey", linewidth=0.8, linestyle="--")
        left.set(xlabel="round", ylabel="xi (dashed: P)", yscale="log")
        right.set(xlabel="round", ylabel="selected by a rank, over k", yscale="log")
        right.set_title(f"P = {counted[0]['ranks']}, d = {counted[0]['density']:.0%}")
        left.legend()
        right.legend()


if __name__ == "__main__":
    program(main, rank)
