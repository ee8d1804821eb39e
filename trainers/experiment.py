"""One training run at one rank: an algorithm, a workload, an emulated machine, and a record of the steps."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import Progress
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.profiler import record_function

import asyncoll
from asyncoll.training import Trainer
from trainers.algorithms import ALGORITHMS, Algorithm
from trainers.consensus import Consensus
from trainers.devices import own_device, synchronize
from trainers.imbalance import Balanced, Real
from trainers.report import Record, Report, collect
from trainers.saving import Saving
from trainers.settings import Settings
from trainers.tracing import check_rounds, tracing
from trainers.workloads import WORKLOADS, Workload

_SCORING_SHARE = 0.05  # of rank 0's time, so that large models do not make it the slowest rank


async def experiment(comm: asyncoll.Communicator, algorithm: str, settings: Settings) -> Report | None:
    """Train and report. Collective; rank 0 gets the report, the other ranks None.

    With `settings.checkpoints` the run goes on from the newest checkpoint that all ranks have; the report is then of
    the rounds after it. Raises UsageError for settings that are impossible together, or with this number of ranks.
    """
    _check(comm, settings)
    workload = WORKLOADS[settings.workload](
        comm.rank, comm.size, settings.batch, settings.seed, full=settings.full, data=settings.data
    )
    workload.move(own_device(settings.device, comm.local_rank))
    consensus = Consensus()
    scheduler = make_scheduler(settings, workload)
    trainer = make_trainer(comm, algorithm, settings, scheduler, workload, consensus)
    saving = Saving(comm, algorithm, settings, trainer, scheduler, workload)
    await saving.resume()
    machine = Machine(comm, workload, settings, ALGORITHMS[algorithm])
    await trainer.start()
    await comm.barrier()
    record = Record(comm, trainer)
    with _progress(comm) as progress, tracing(comm, settings.trace) as trace:
        task = progress.add_task(algorithm, total=settings.rounds, completed=trainer.round)
        while trainer.round < settings.rounds:
            await machine.step(trainer, record)
            trace.end_step()
            saving.save()
            _score(workload, record)
            progress.update(task, completed=trainer.round)
        record.end_rounds()
        await trainer.finish()
        await comm.barrier()  # all ranks are done
    record.score(workload.score())
    return await collect(comm, algorithm, settings, workload, record, await consensus.collect(comm))


def make_scheduler(settings: Settings, workload: Workload) -> LRScheduler:
    """A new optimizer of the workload's model, and its schedule, of which it is the `optimizer`."""
    optimizer = workload.optimizer(settings.learning_rate, settings.momentum)
    return LambdaLR(optimizer, lambda passed: _triangle(passed + 1, settings.rounds))


def make_trainer(
    comm: asyncoll.Communicator,
    algorithm: str,
    settings: Settings,
    scheduler: LRScheduler,
    workload: Workload,
    consensus: Consensus,
) -> Trainer:
    """The algorithm's object around the workload's model, its optimizer and the schedule."""
    entry = ALGORITHMS[algorithm]
    options: dict[str, Any] = {
        "clip_norm": settings.clip_norm,
        "accumulate": settings.accumulate,
        "buffers": settings.buffers,
        "scheduler": scheduler,
        **settings.options,
    }
    if entry.is_seeded:
        options["seed"] = settings.seed
    if entry.is_observed:
        options["observe"] = consensus.observe
    return entry.trainer(comm, workload.model, scheduler.optimizer, **options)


def learning_rate(round_: int, settings: Settings) -> float:
    """The rate of the step that applies the result of round `round_`: a triangle over the rounds.

    It rises first, because the global batch is P times the local one, and falls then, so that runs end converged and
    can be compared. It follows rounds and not local steps, so that ranks which skip rounds agree on it.
    """
    return settings.learning_rate * _triangle(round_, settings.rounds)


def _triangle(round_: int, rounds: int) -> float:
    along = round_ / (rounds + 1)
    return max(0.0, 2 * min(along, 1 - along))


class Machine:
    """The emulated machine of one rank, which computes for a longer time than the real one."""

    def __init__(self, comm: asyncoll.Communicator, workload: Workload, settings: Settings, entry: Algorithm) -> None:
        self._comm = comm
        self._device = next(workload.model.parameters()).device
        self._is_emulated = bool(settings.compute_s) or not isinstance(settings.imbalance, (Balanced, Real))
        self._workload = workload
        self._settings = settings
        self._in_thread = entry.is_served  # the loop of the program goes on while this rank computes
        is_mean = settings.options.get("op", asyncoll.AVG) is asyncoll.AVG  # other reductions take no weights
        self._is_weighted = entry.is_weighted and workload.is_weighted and is_mean
        self._backward_s = 0.0  # of the batch before

    async def step(self, trainer: Trainer, record: Record) -> None:
        """One gradient, of `accumulate` batches. A late rank is late with the first of them."""
        aim = trainer.round + 1
        for batch in range(self._settings.accumulate):
            late_for = aim if batch == 0 else None
            if self._in_thread:
                await asyncoll.offload(self._compute, late_for)
            else:
                self._compute(late_for)
            called_s = time.perf_counter()
            with record_function("step"):
                reduction = await trainer.step(weight=self._workload.weight if self._is_weighted else None)
            record.step(reduction, time.perf_counter() - called_s)

    def _compute(self, late_for: int | None) -> None:
        """Compute the gradient of a batch; a late rank of round `late_for` takes longer.

        Time passes before `backward()`, so that algorithms that send during `backward()` get no gradient of a late rank
        early. Sleeping blocks the caller on purpose, as computing would: the runtime must answer all the same.
        """
        settings, comm = self._settings, self._comm
        started_s = time.perf_counter()
        with record_function("forward"):
            loss = self._workload.loss()
        self._wait_for_device()
        real_s = time.perf_counter() - started_s + self._backward_s
        step_s = max(settings.compute_s, real_s)
        if late_for is not None:
            whole_s = settings.accumulate * step_s
            step_s += settings.imbalance.delay_s(settings.seed, late_for, comm.rank, comm.size, whole_s)
        time.sleep(step_s - real_s)
        started_s = time.perf_counter()
        with record_function("backward"):
            loss.backward()
        self._wait_for_device()
        self._backward_s = time.perf_counter() - started_s

    def _wait_for_device(self) -> None:
        """Only where times are stretched: otherwise the work of a device overlaps with what follows."""
        if self._is_emulated:
            synchronize(self._device)


def _score(workload: Workload, record: Record) -> None:
    """Score the model of rank 0, unless that has taken too large a share of the time so far."""
    if record.is_kept and record.scoring_s <= _SCORING_SHARE * record.elapsed_s():
        started_s = time.perf_counter()
        record.score(workload.score())
        record.scoring_s += time.perf_counter() - started_s


def _check(comm: asyncoll.Communicator, settings: Settings) -> None:
    if isinstance(settings.imbalance, Real) and settings.compute_s:
        raise asyncoll.UsageError("--imbalance real takes the machine as it is: leave out --compute")
    if settings.trace is not None:
        check_rounds(settings.rounds)
    settings.imbalance.delay_s(settings.seed, 1, comm.rank, comm.size)  # raises if it needs more ranks


def _progress(comm: asyncoll.Communicator) -> Progress:
    """A progress bar at rank 0 and on a terminal; none in a pipe, as under the launcher."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=comm.rank != 0 or not console.is_terminal)
