"""The record of a run, summed up over all ranks: a value, a table, a JSON file."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table

import asyncoll
from trainers.consensus import Consensus, Distance
from trainers.settings import Settings


class Call(NamedTuple):
    """One call of the collective: the round that it aimed at (the newest seen + 1), and the round that it was given."""

    aimed: int
    round: int
    active: int
    included: bool
    leader: int  # the lowest rank of the group that was summed


class Point(NamedTuple):
    """The score of rank 0's model after a round; wall time since the common start."""

    wall_s: float
    round: int
    score: float


@dataclass(frozen=True, slots=True)
class Report:
    """A finished run.

    `final_score` is measured in `metric`. `active` is, for each number of contributors, the number of sums with so many
    (one sum for each round and group). `lag` is, for each number of rounds between the round that a call aimed at and
    the one it was given, the number of such calls; 0 is in time, or late by so little that the round is still the
    newest. `stale_share` is the share of all calls whose contribution was not in the round they were given. `consensus`
    has the distances of the models before each average of all of them.
    """

    trainer: str
    settings: dict[str, Any]
    metric: str
    ranks: int
    rounds: int
    wall_s: float
    steps_per_s: float
    gradients_per_s: float
    time_to_target_s: float | None
    final_score: float
    active_mean: float
    active: dict[int, int]
    lag: dict[int, int]
    stale_share: float
    curve: list[Point]
    consensus: list[Distance]

    def write(self, path: Path) -> None:
        """Write all of it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    def table(self) -> Table:
        """The numbers, for a terminal."""
        table = Table("measure", "value", title=f"{self.trainer}, {self.ranks} ranks, {self.settings['workload']}")
        target = self.settings["target"]
        rows = [
            ("rounds", f"{self.rounds}"),
            ("wall time", f"{self.wall_s:.2f} s"),
            ("steps per second (rounds)", f"{self.steps_per_s:.2f}"),
            ("gradients per second, all ranks", f"{self.gradients_per_s:.2f}"),
            (f"time to {target:.1%}", seconds(self.time_to_target_s)),
            (f"final {self.metric}", f"{self.final_score:.2%}"),
            ("active ranks per sum, mean", f"{self.active_mean:.2f}"),
            ("sums by active ranks", histogram(self.active)),
            ("calls by lag", histogram(self.lag)),
            ("stale contributions", f"{self.stale_share:.1%}"),
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
    trainer: str,
    settings: Settings,
    metric: str,
    calls: Sequence[Call],
    curve: Sequence[Point],
    consensus: Consensus,
) -> Report | None:
    """Gather all ranks' calls and sum them up at rank 0, which has the curve. Collective; the other ranks get None."""
    distances = await consensus.collect(comm)
    mine = torch.tensor(calls, dtype=torch.int64).flatten()
    everyone = [Call(*row) for rows in await comm.allgatherv(mine) for row in rows.view(-1, len(Call._fields)).tolist()]
    if comm.rank != 0:
        return None
    active = {
        (call.round, call.leader): call.active for call in everyone
    }  # the rank that opened the round has a call of it
    wall_s = curve[-1].wall_s
    return Report(
        trainer=trainer,
        settings=_plain(settings),
        metric=metric,
        ranks=comm.size,
        rounds=settings.rounds,
        wall_s=wall_s,
        steps_per_s=settings.rounds / wall_s,
        gradients_per_s=len(everyone) / wall_s,
        time_to_target_s=next((p.wall_s for p in curve if p.score >= settings.target), None),
        final_score=curve[-1].score,
        active_mean=sum(active.values()) / len(active),
        active=_count(active.values()),
        lag=_count(call.round - call.aimed for call in everyone),
        stale_share=sum(not call.included for call in everyone) / len(everyone),
        curve=list(curve),
        consensus=distances,
    )


def seconds(value: float | None) -> str:
    """A time as text, or "not reached"."""
    return "not reached" if value is None else f"{value:.2f} s"


def histogram(counts: dict[int, int]) -> str:
    """ "value: count" for each value, in order."""
    return "  ".join(f"{value}: {count}" for value, count in counts.items())


def _count(values: Iterable[int]) -> dict[int, int]:
    return dict(sorted(Counter(values).items()))


def _plain(settings: Settings) -> dict[str, Any]:
    fields = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    return {k: v if isinstance(v, int | float | str | None) else str(v) for k, v in fields.items()}
