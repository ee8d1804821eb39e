"""Training throughput of up to 1,024 simulated ranks, beside the papers' figures: SIMULATED, in virtual time.

    python benchmarks/reproduce/throughput.py [--figures wagma-resnet,wagma-ppo,eager-resnet-300,...] [--rounds N]

- WAGMA: Li, Ben-Nun, Nadiradze, Di Girolamo, Dryden, Alistarh, Hoefler, "Breaking (global) barriers in parallel
  stochastic optimization with wait-avoiding group averaging", IEEE TPDS 2021, section V: ResNet-50 with two delayed
  ranks, Transformer, and reinforcement learning with a heavy tail.
- eager-SGD: Li, Ben-Nun, Di Girolamo, Alistarh, Hoefler, "Taming unbalanced training workloads in deep learning with
  partial collective operations", PPoPP 2020, section 6.2.2: ResNet-50, four delayed ranks of 64.
- Ok-Topk: Li, Hoefler, "Near-optimal sparse allreduce for distributed deep learning", PPoPP 2022, section 5: BERT.

The training objects of `asyncoll.training` run over a simulated network with stated latency (alpha) and bandwidth (1 /
beta). A rank computes by sleeping, for a time that is drawn from the published distribution. The tensor is short, and
each byte of payload takes the time of as many as the paper's model has (`Network.payload_scale`), so that a thousand
ranks fit into memory; headers, and the counts of sparse methods, are not exactly those of the long tensor. Reductions
cost no time. eager-SGD waits for all ranks in every 33rd solo round, as its authors' code does; its figures have two
such rounds. `gradients/s` counts the gradients of all ranks, divided by the number of ranks. Baselines have the same
bandwidth-optimal allreduce as ours; the papers' had their own, so ratios to them may differ.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import Record, parser

from asyncoll import Communicator
from asyncoll.testing import simulate
from asyncoll.training import ADPSGD, DPSGD, SGP, AllreduceSGD, EagerSGD, LocalSGD, OkTopkSGD, Trainer, WagmaSGD
from asyncoll.transport.messages.simulated import Network
from trainers.imbalance import Balanced, Imbalance, KRandom, Trace

Make = Callable[[Communicator, torch.nn.Module, torch.optim.Optimizer], Trainer]
ELEMENTS = 1 << 14  # of the short tensor: long enough for the allreduce of long tensors
SPARSE_ELEMENTS = 1 << 20  # at 256 ranks each rank's region must have several selected elements
ALPHA_S, BYTES_PER_S = 2e-6, 10e9  # the papers' machine has a Cray Aries network: 1.5 to 5 us, about 10 GB/s
LIMITER = 33  # the authors' code of eager-SGD makes every 33rd solo round wait for all ranks
RESNET_S = 1 / 1.56  # PPoPP 2020, section 6.2.2: a single node makes 1.56 steps/s with 128 images, on the same machine
# PPoPP 2022, section 5.4.3: Ok-Topk makes 400,000 iterations on 32 GPUs in 47 hours. This is a whole iteration, with
# communication, as the paper states no time of the computation alone. So it is at most 0.42 s.
BERT_S = 0.42
SEED = 0


@dataclass(frozen=True)
class HeavyTail:
    """Whole steps of distributed PPO in Habitat: 1.7 to 43.5 s, median below 2 s (TPDS 2021, section V).

    The paper states no more. Here a step is 1.7 s and a log-normal rest of median 0.2 s, clipped.
    """

    def delay_s(self, seed: int, round_: int, rank: int, size: int, computed_s: float = 0.0) -> float:
        rest = math.exp(math.log(0.2) + 1.5 * np.random.default_rng((seed, round_, rank)).standard_normal())
        return min(1.7 + rest, 43.5) - computed_s


@dataclass(frozen=True)
class Figure:
    """One figure of a paper: its model, its steps, and what it states of the last method over the others."""

    title: str
    parameters: int
    compute_s: float
    imbalance: Imbalance
    ranks: tuple[int, ...]
    methods: dict[str, Make]
    paper: dict[tuple[str, int], str] = field(default_factory=dict)  # by (method, ranks): ours over that method
    elements: int = ELEMENTS
    rounds: int = 24


def wagma(sync_every: int) -> Make:
    return lambda *given: WagmaSGD(*given, sync_every=sync_every)


def compared(sync_every: int, peers: int) -> dict[str, Make]:
    """The methods of WAGMA's comparison (section V-A), without eager-SGD, which is in its ResNet figure only."""
    return {
        "Allreduce-SGD": AllreduceSGD,
        "local SGD": lambda *given: LocalSGD(*given, every=1),
        "D-PSGD": DPSGD,
        "AD-PSGD": ADPSGD,
        f"SGP, {peers} peer{'s' if peers > 1 else ''}": lambda *given: SGP(*given, peers=peers),
        "WAGMA-SGD": wagma(sync_every),
    }


def solo(*given: Any) -> Trainer:
    """eager-SGD with solo allreduces, and its authors' limiter."""
    return EagerSGD(*given, history=0, sync_every=LIMITER)


def eager(delay_s: float, paper: str) -> Figure:
    """ResNet-50 of the eager-SGD paper with four random ranks late; `paper`: what it states at 64 ranks."""
    return Figure(
        f"eager-SGD, ResNet-50, four random ranks {1000 * delay_s:g} ms late",
        25_559_081,
        RESNET_S,
        KRandom(4, delay_s),
        (8, 16, 32, 64),
        {
            "Allreduce-SGD": AllreduceSGD,
            "majority": lambda *given: EagerSGD(*given, partial="majority", history=64),
            "solo": solo,
        },
        {("Allreduce-SGD", 64): paper},
        rounds=2 * LIMITER,
    )


def sparse(algorithm: Any) -> Make:
    return lambda *given: OkTopkSGD(*given, algorithm=algorithm, density=0.01)


FIGURES = {
    "wagma-resnet": Figure(
        "WAGMA, ResNet-50, two random ranks 320 ms late",
        25_559_081,
        RESNET_S,
        KRandom(2, 0.32),
        (4, 16, 64, 256),
        {"eager-SGD": solo, **compared(10, 2)},
        {
            ("local SGD", 64): "1.25",
            ("Allreduce-SGD", 64): "1.26",
            ("D-PSGD", 64): "1.23",
            ("SGP, 2 peers", 64): "1.25",
            ("eager-SGD", 64): "1.13",
            ("AD-PSGD", 64): "below 1",
        },
        rounds=2 * LIMITER,
    ),
    "wagma-transformer": Figure(
        "WAGMA, Transformer, sentences of different lengths",
        61_362_176,
        0.0,
        Trace("language", 1.0),
        (4, 16, 64),
        compared(8, 1),
    ),
    "wagma-ppo": Figure(
        "WAGMA, distributed PPO, heavy tail",
        8_476_421,
        0.0,
        HeavyTail(),
        (16, 64, 256, 1024),
        compared(8, 4),
        {("local SGD", 1024): "2.33", ("D-PSGD", 1024): "1.88", ("SGP, 4 peers", 1024): "2.10"},
    ),
    "eager-resnet-300": eager(0.3, "1.25 (Deep500), 1.14 (Horovod)"),
    "eager-resnet-460": eager(0.46, "1.23 or 1.29 (Deep500), 1.22 or 1.27 (Horovod)"),
    "oktopk-bert": Figure(
        "Ok-Topk, BERT, density 1 %, compute time assumed",
        133_547_324,
        BERT_S,
        Balanced(),
        (32, 64, 256),
        {
            "dense": AllreduceSGD,
            "TopkA": sparse("topka"),
            "TopkDSA": sparse("topkdsa"),
            "gTopk": sparse("gtopk"),
            "Gaussiank": sparse("gaussiank"),
            "Ok-Topk": sparse("oktopk"),
        },
        {("Gaussiank", 256): "3.29 to 12.95 over all", ("dense", 256): "3.29 to 12.95 over all"},
        SPARSE_ELEMENTS,
    ),
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--figures", type=lambda text: text.split(","), default=list(FIGURES))
    options.add_argument("--rounds", type=int, default=None, help="by default those of each figure")
    options.add_argument("--ranks-max", type=int, default=1024)
    record = Record(options, "throughput")
    chosen = record.arguments
    raw: dict[str, list[dict[str, Any]]] = {}
    for name in chosen.figures:
        figure = FIGURES[name]
        worlds = [ranks for ranks in figure.ranks if ranks <= chosen.ranks_max]
        rounds = chosen.rounds or figure.rounds
        raw[name] = [run(figure, method, ranks, rounds) for ranks in worlds for method in figure.methods]
        record.table(f"SIMULATED: {figure.title}; {stated(figure)}", table(figure, raw[name]))
    plot(record, raw)
    record.write(raw)


def stated(figure: Figure) -> str:
    return (
        f"{figure.parameters / 1e6:.1f} M parameters, {figure.compute_s:.3g} s and {figure.imbalance}, "
        f"alpha {1e6 * ALPHA_S:g} us, {BYTES_PER_S / 1e9:g} GB/s, seed {SEED}"
    )


# -- in virtual time ------------------------------------------------------------------------------


class Vector(torch.nn.Module):
    """A model that is one parameter."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(elements))


def run(figure: Figure, method: str, ranks: int, rounds: int) -> dict[str, Any]:
    """The throughput of one method."""

    async def rank(comm: Communicator) -> tuple[float, int]:
        model = Vector(figure.elements)
        trainer = figure.methods[method](comm, model, torch.optim.SGD(model.parameters(), lr=0.01))
        noise = torch.from_numpy(np.random.default_rng((SEED, comm.rank)).standard_normal(figure.elements, np.float32))
        await trainer.start()
        loop = asyncio.get_running_loop()
        started, steps = loop.time(), 0
        while trainer.round < rounds:
            late_s = figure.imbalance.delay_s(SEED, trainer.round + 1, comm.rank, comm.size, figure.compute_s)
            await asyncio.sleep(figure.compute_s + late_s)
            model.x.grad = noise.clone()  # as after `backward()`; the trainer puts it into its flat tensor
            await trainer.step()
            steps += 1
        ended = loop.time() - started
        await trainer.finish()
        return ended, steps

    network = Network(
        latency_s=ALPHA_S, bandwidth_bytes_per_s=BYTES_PER_S, payload_scale=figure.parameters / figure.elements
    )
    torch.set_num_threads(1)
    found = simulate(ranks, rank, network, seed=SEED).results
    wall_s = max(ended for ended, _ in found)
    row = {
        "method": method,
        "ranks": ranks,
        "virtual_s": wall_s,
        "rounds_per_s": rounds / wall_s,
        "gradients_per_s": sum(steps for _, steps in found) / ranks / wall_s,
    }
    print(f"# {figure.title}, {ranks} ranks, {method}: {row['gradients_per_s']:.3f} gradients/s a rank", flush=True)
    return row


# -- showing --------------------------------------------------------------------------------------


def table(figure: Figure, rows: list[dict[str, Any]]) -> list[list[str]]:
    """`ours over it` is the ratio of the figure's last method to the row's, in gradients and in rounds per second."""
    lines = [["ranks", "method", "gradients/s", "rounds/s", "ours over it, gradients", "ours over it, rounds", "paper"]]
    *_, ours = figure.methods
    for row in rows:
        own = next(each for each in rows if each["method"] == ours and each["ranks"] == row["ranks"])
        lines.append(
            [
                f"{row['ranks']}",
                row["method"],
                f"{row['gradients_per_s']:.3f}",
                f"{row['rounds_per_s']:.3f}",
                f"{own['gradients_per_s'] / row['gradients_per_s']:.2f}",
                f"{own['rounds_per_s'] / row['rounds_per_s']:.2f}",
                figure.paper.get((row["method"], row["ranks"]), ""),
            ]
        )
    return lines


def plot(record: Record, raw: dict[str, list[dict[str, Any]]]) -> None:
    with record.figure(len(raw)) as panels:
        for axes, (name, rows) in zip(panels, raw.items(), strict=True):
            for method in FIGURES[name].methods:
                own = [row for row in rows if row["method"] == method]
                axes.plot([row["ranks"] for row in own], [row["gradients_per_s"] for row in own], "o-", label=method)
            axes.set(xscale="log", xlabel="ranks, simulated", ylabel="gradients/s of a rank")
            axes.set_title(f"SIMULATED: {FIGURES[name].title}")
            axes.legend()


if __name__ == "__main__":
    main()
