"""The record of a run, summed up over all ranks: a value, a table, a JSON file."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table

import asyncoll
from asyncoll.testing import least_round_s
from asyncoll.training import Trainer
from trainers.algorithms import ALGORITHMS
from trainers.consensus import Distance
from trainers.imbalance import Real, are_drawn
from trainers.settings import Settings
from trainers.workloads import Workload

MEGABYTE = 1e6


class Call(NamedTuple):
    """One step that has returned a reduction."""

    round: int
    active: int
    included: bool
    lag: int
    group: int  # a checksum of the ranks that were reduced over


class Point(NamedTuple):
    """The score of rank 0's model after a round; wall time since the common start."""

    wall_s: float
    round: int
    score: float


class Record:
    """One rank's record of a run. It starts when it is made."""

    def __init__(self, comm: asyncoll.Communicator, trainer: Trainer) -> None:
        self.is_kept = comm.rank == 0  # scores are those of rank 0's model
        self.calls: list[Call] = []
        self.curve: list[Point] = []
        self.scoring_s = 0.0
        self.gradients = 0
        self.waited_s = 0.0
        self.traffic = Traffic(0, 0)
        self._comm = comm
        self.first = trainer.round  # that of the checkpoint
        self._trainer = trainer
        self._before = Traffic.of(comm)
        self._started_s = time.perf_counter()

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started_s

    def step(self, reduction: asyncoll.Reduction | None, waited_s: float) -> None:
        """Record one call of `Trainer.step`, and its time."""
        self.gradients += 1
        self.waited_s += waited_s
        if reduction is not None:
            group = zlib.crc32(repr(reduction.group).encode())
            self.calls.append(Call(reduction.round, reduction.active, reduction.included, reduction.lag, group))

    def score(self, score: float) -> None:
        """Record the score of the model as it is now."""
        self.curve.append(Point(self.elapsed_s(), self._trainer.round, score))

    def end_rounds(self) -> None:
        """This rank has made its last step. The end of the training has other traffic."""
        now = Traffic.of(self._comm)
        self.traffic = Traffic(now.bytes_sent - self._before.bytes_sent, now.messages - self._before.messages)


class Traffic(NamedTuple):
    """The bytes that a rank has sent, and the messages of its wait-avoiding rounds."""

    bytes_sent: int
    messages: int

    @classmethod
    def of(cls, comm: asyncoll.Communicator) -> Traffic:
        """Totals until now."""
        totals = comm.statistics()
        return cls(totals.bytes_sent, totals.messages_sent - sum(call.messages_sent for call in totals.calls.values()))


@dataclass(frozen=True, slots=True)
class Report:
    """A finished run. One that went on from a checkpoint has the rounds after it only.

    `steps_per_s` are rounds per second; `steps_per_s_bound` is the most that the time model allows, None if it knows no
    bound. `gradients_per_s` counts the batches of all ranks. `final_score` is measured in `metric`.

    `active` is, for each number of contributors, the number of sums with so many (one sum for each round and group).
    `lag` is, for each number of rounds between the round that a call aimed at and the one it was given, the number of
    such calls; 0 is in time, or late by so little that the round is still the newest. `stale_share` is the share of all
    calls whose contribution was not in the round they were given. `waited_s` are the mean seconds of a call of
    `Trainer.step`: waiting for other ranks, communication, and the update. `bytes_per_round` are the bytes that a rank
    has sent, mean over ranks and rounds; None if rounds went through shared memory, where they are not counted.
    `consensus` has the distances of the models before each average of all of them.
    """

    algorithm: str
    settings: dict[str, Any]
    metric: str
    is_synthetic: bool
    machine: dict[str, str | int]
    ranks: int
    rounds: int
    wall_s: float
    steps_per_s: float
    steps_per_s_bound: float | None
    gradients_per_s: float
    time_to_target_s: float | None
    final_score: float
    active_mean: float | None
    active: dict[int, int]
    lag_mean: float | None
    lag: dict[int, int]
    stale_share: float
    waited_s: float
    bytes_per_round: float | None
    consensus: list[Distance]
    curve: list[Point]

    def write(self, path: Path) -> None:
        """Write all of it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    def table(self) -> Table:
        """The numbers, for a terminal."""
        workload = self.settings["workload"] + (", synthetic data" if self.is_synthetic else "")
        table = Table("measure", "value", title=f"{self.algorithm}, {self.ranks} ranks, {workload}")
        target = self.settings["target"]
        rows = [
            ("rounds", f"{self.rounds}"),
            ("wall time", f"{self.wall_s:.2f} s"),
            ("steps per second (rounds)", f"{self.steps_per_s:.2f}"),
            ("  theory allows at most", number(self.steps_per_s_bound)),
            ("gradients per second, all ranks", f"{self.gradients_per_s:.2f}"),
            (f"time to {target:.1%}", seconds(self.time_to_target_s)),
            (f"final {self.metric}", f"{self.final_score:.2%}"),
            ("active ranks per sum, mean", number(self.active_mean)),
            ("sums by active ranks", histogram(self.active)),
            ("calls by lag", histogram(self.lag)),
            ("stale contributions", f"{self.stale_share:.1%}"),
            ("waiting and update per step", f"{1000 * self.waited_s:.1f} ms"),
            ("sent per rank and round", megabytes(self.bytes_per_round)),
        ]
        if self.consensus:
            distances = [distance for _, distance in self.consensus]
            spread = f"mean {statistics.fmean(distances):.2%}, largest {max(distances):.2%}"
            rows.append((f"consensus distance at {len(distances)} averages", spread))
        for measure, value in rows:
            table.add_row(measure, value)
        return table


async def collect(
    comm: asyncoll.Communicator,
    algorithm: str,
    settings: Settings,
    workload: Workload,
    record: Record,
    consensus: list[Distance],
) -> Report | None:
    """Gather all ranks' records and sum them up at rank 0, which has the curve. Collective; the others get None."""
    mine = torch.tensor(record.calls, dtype=torch.int64).flatten()
    calls = [Call(*row) for rows in await comm.allgatherv(mine) for row in rows.view(-1, len(Call._fields)).tolist()]
    sums = torch.tensor([record.gradients, record.waited_s, *record.traffic], dtype=torch.float64)
    gradients, waited_s, bytes_sent, messages = (await comm.allreduce(sums)).tolist()
    if comm.rank != 0:
        return None
    rounds = settings.rounds - record.first
    active = {(call.round, call.group): call.active for call in calls}  # the rank that opened a round has a call of it
    wall_s = record.curve[-1].wall_s
    is_counted = bool(bytes_sent) and (messages >= rounds or not comm.statistics().operations)
    return Report(
        algorithm=algorithm,
        settings=settings.plain(),
        metric=workload.metric,
        is_synthetic=workload.is_synthetic,
        machine=machine(),
        ranks=comm.size,
        rounds=rounds,
        wall_s=wall_s,
        steps_per_s=rounds / wall_s,
        steps_per_s_bound=bound(algorithm, settings, comm.size),
        gradients_per_s=gradients / wall_s,
        time_to_target_s=next((p.wall_s for p in record.curve if p.score >= settings.target), None),
        final_score=record.curve[-1].score,
        active_mean=_mean(active.values()),
        active=_count(active.values()),
        lag_mean=_mean(call.lag for call in calls),
        lag=_count(call.lag for call in calls),
        stale_share=_mean(not call.included for call in calls) or 0.0,
        waited_s=waited_s / gradients,
        bytes_per_round=bytes_sent / comm.size / rounds if is_counted else None,
        consensus=consensus,
        curve=record.curve,
    )


def machine() -> dict[str, str | int]:
    """The versions and the cores of this machine, which readers need to judge the numbers."""
    return {
        "asyncoll": asyncoll.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
    }


def bound(algorithm: str, settings: Settings, ranks: int) -> float | None:
    """The most rounds per second that the time model allows."""
    waiting = ALGORITHMS[algorithm].waiting(settings.options, ranks)
    imbalance = settings.imbalance
    if waiting is None or isinstance(imbalance, Real):  # nobody knows how long a real step takes
        return None
    least_s = least_round_s(
        waiting,
        settings.accumulate * settings.compute_s,
        imbalance,
        ranks,
        rounds=settings.rounds,
        seed=settings.seed,
        are_drawn=are_drawn(imbalance),
    )
    return 1 / least_s if least_s else None


def seconds(value: float | None) -> str:
    """A time as text, or "not reached"."""
    return "not reached" if value is None else f"{value:.2f} s"


def megabytes(value: float | None) -> str:
    """Bytes as text, or "not counted"."""
    return "not counted" if value is None else f"{value / MEGABYTE:.3g} MB"


def number(value: float | None) -> str:
    """A number as text, or "-"."""
    return "-" if value is None else f"{value:.2f}"


def histogram(counts: Mapping[int, int]) -> str:
    """ "value: count" for each value, in order."""
    return "  ".join(f"{value}: {count}" for value, count in counts.items())


def _count(values: Iterable[int]) -> dict[int, int]:
    return dict(sorted(Counter(values).items()))


def _mean(values: Iterable[float]) -> float | None:
    found: Sequence[float] = list(values)
    return sum(found) / len(found) if found else None
