"""One training run at one rank: a trainer, a workload, an emulated machine, and a record of the calls."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

import asyncoll
from trainers.allreduce_sgd import allreduce_sgd
from trainers.consensus import Consensus
from trainers.dc_s3gd import dc_s3gd
from trainers.eager_sgd import eager_sgd
from trainers.oktopk_sgd import oktopk_sgd
from trainers.report import Call, Point, Report, collect
from trainers.settings import Settings
from trainers.wagma_sgd import wagma_sgd
from trainers.workloads import WORKLOADS, Workload


async def experiment(comm: asyncoll.Communicator, trainer: str, settings: Settings) -> Report | None:
    """Train and report. Collective; rank 0 gets the report, the other ranks None."""
    workload = WORKLOADS[settings.workload](comm.rank, comm.size, settings.batch, settings.seed)
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.0, momentum=settings.momentum)
    calls: list[Call] = []
    curve: list[Point] = []
    consensus = Consensus()
    newest = 0
    with _progress(comm) as progress:
        task = progress.add_task(trainer, total=settings.rounds)
        await comm.barrier()
        started = time.perf_counter()
        async for done in _train(comm, trainer, settings, workload, optimizer, consensus):
            calls.append(Call(newest + 1, done.round, done.active, done.included, min(done.group)))
            newest = done.round
            if comm.rank == 0:  # scoring takes a few milliseconds at most
                curve.append(Point(time.perf_counter() - started, newest, workload.score()))
            progress.update(task, completed=newest)
        await comm.barrier()  # all ranks are done
        wall_s = time.perf_counter() - started
    curve.append(Point(wall_s, newest, workload.score()))
    return await collect(comm, trainer, settings, workload.metric, calls, curve, consensus)


def learning_rate(round_: int, settings: Settings) -> float:
    """The rate of the step that applies the result of round `round_`: a triangle over the rounds.

    It rises first, because the global batch is P times the local one, and falls then, so that runs end converged and
    can be compared. It follows rounds and not local steps, so that ranks which skip rounds agree on it.
    """
    along = round_ / (settings.rounds + 1)
    return settings.learning_rate * 2 * min(along, 1 - along)


def _train(
    comm: asyncoll.Communicator,
    trainer: str,
    settings: Settings,
    workload: Workload,
    optimizer: torch.optim.Optimizer,
    consensus: Consensus,
) -> AsyncIterator[asyncoll.Reduction]:
    async def gradient(round_: int) -> None:
        started = time.perf_counter()
        workload.loss().backward()
        delay_s = settings.imbalance.delay_s(settings.seed, round_, comm.rank, comm.size)
        # Blocks this rank's loop on purpose, as real computation would. The runtime must answer all the same.
        time.sleep(max(0.0, settings.compute_s - (time.perf_counter() - started)) + delay_s)  # noqa: ASYNC251

    def schedule(round_: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(round_, settings)

    common: dict[str, Any] = {"rounds": settings.rounds, "schedule": schedule}
    given = comm, workload.model, optimizer, gradient
    match trainer:
        case "allreduce_sgd":
            return allreduce_sgd(*given, **common)
        case "eager_sgd":
            return eager_sgd(
                *given,
                **common,
                partial=settings.partial,
                candidates=settings.candidates,
                quorum=settings.quorum,
                history=settings.history,
                sync_every=settings.sync_every,
                average_every=settings.average_every,
                seed=settings.seed,
            )
        case "wagma_sgd":
            return wagma_sgd(
                *given,
                **common,
                group_size=settings.group_size,
                sync_every=settings.sync_every,
                order=settings.order,
                fixed=settings.fixed,
                observe=consensus.observe,
            )
        case "dc_s3gd":
            return dc_s3gd(*given, **common, lambda0=settings.lambda0)
        case "oktopk_sgd":
            return oktopk_sgd(
                *given,
                **common,
                algorithm=settings.algorithm,
                density=settings.density,
                accumulate=settings.accumulate,
                thresholds_every=settings.thresholds_every,
                regions_every=settings.regions_every,
                warm_up=settings.warm_up,
            )
    raise asyncoll.UsageError(f"there is no trainer {trainer!r}")


def _progress(comm: asyncoll.Communicator) -> Progress:
    """A progress bar at rank 0 and on a terminal; none in a pipe, as under the launcher."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=comm.rank != 0 or not console.is_terminal)
