"""Trainings that go on after deaths: no gradient of a survivor is lost or counts twice, and all have one model."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncoll
from asyncoll.testing import Crash, Network, run_ranks, simulate
from asyncoll.training import (
    DPSGD,
    SGP,
    AllreduceSGD,
    Checkpoints,
    EagerSGD,
    ElasticBatches,
    LocalSGD,
    OverlappedSGD,
    WagmaSGD,
)
from tests.support.places import ROOT, SCRIPTS
from tests.support.processes import LIGHT, PATIENCE_S, TRAINING

CALLS = 20
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass
class Case:
    """A world whose ranks train one parameter, which has an element for each call of each rank: its gradient is -1."""

    seed: int
    size: int = 4
    faults: list[Crash] = field(default_factory=list)
    padding: int = 0  # elements before those
    shared: bool = False
    hosts: list[int] | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of EagerSGD
    weighs: bool = False
    slow: int = 0
    latency_s: float = 1e-4

    @classmethod
    def drawn(cls, seed: int) -> Case:
        draw = np.random.default_rng(seed)

        def one_of(*values: Any) -> Any:
            return values[draw.integers(len(values))]

        size = one_of(2, 3, 4, 5, 6, 7, 8, 9, 13)
        victims = draw.permutation(size)[: draw.integers(1, size)].tolist()
        at_s, near_s = draw.uniform(0, 0.25), one_of(0.0, 1e-4, 1e-3, 1e-2, 0.1)
        partial = one_of("solo", "majority", "quorum")
        return cls(
            seed,
            size,
            [Crash(rank, at_s + draw.uniform(0, near_s)) for rank in victims],
            one_of(0, 0, 300, 20_000),
            shared=one_of(False, True),
            hosts=np.sort(draw.integers(3, size=size)).tolist() if draw.integers(4) == 0 else None,
            options={"partial": partial, "sync_every": one_of(0, 0, 5)}
            | ({"quorum": size} if partial == "quorum" and draw.integers(2) else {}),
            weighs=one_of(False, False, True),
            slow=int(draw.integers(size)),
            latency_s=one_of(1e-4, 1e-4, 5e-3),  # the long one: ranks die in calls, and not between them
        )

    @property
    def survivors(self) -> list[int]:
        return sorted(set(range(self.size)) - {fault.rank for fault in self.faults})

    def trainer(self, kind: type[Any], comm: asyncoll.Communicator, model: torch.nn.Module) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        options: dict[str, Any] = self.options if kind is EagerSGD else {}
        if kind is LocalSGD:
            options = {"every": 3}
        elif kind is OverlappedSGD:
            options = {"bucket_bytes": 1000}
        if kind is EagerSGD and not self.weighs:
            options = options | {"op": asyncoll.SUM}
        return kind(comm, model, optimizer, elastic=True, scheduler=scheduler, **options)

    def run(self, kind: type[Any]) -> dict[int, tuple[Array, int]]:
        """By rank that has lived to the end: its parameter, and the steps of its scheduler."""
        ends: dict[int, tuple[Array, int]] = {}

        async def main(comm: asyncoll.Communicator) -> None:
            rank, draw = comm.rank, np.random.default_rng([self.seed, comm.rank])
            model = torch.nn.Linear(self.padding + self.size * CALLS, 1, bias=False)
            torch.nn.init.zeros_(model.weight)
            x = torch.zeros(model.in_features)
            sgd = self.trainer(kind, comm, model)
            await sgd.start()
            for call in range(CALLS):
                await asyncio.sleep((0.04 if rank == self.slow else 0.01) * draw.random())
                x.zero_()[self.padding + rank * CALLS + call] = -1.0
                model(x).sum().backward()
                weight = 1.0 + call % 3 if self.weighs and kind in (EagerSGD, AllreduceSGD) else None
                step = await sgd.step(weight=weight, metrics={"call": call})
                if step is not None:  # else it is between two averages
                    assert (step.round, step.epoch) == (sgd.round, sgd.comm.epoch)
                    assert set(step.metrics) <= {"call"}
            await sgd.finish()
            ends[rank] = model.weight.detach().numpy()[0].copy(), sgd._scheduler.last_epoch

        network = Network(self.latency_s, 1e-4, faults=self.faults, hosts=self.hosts)
        simulate(self.size, main, network, self.seed, shared_memory=self.shared, hosts=self.hosts)
        return ends

    def check(self, kind: type[Any]) -> None:
        ends = self.run(kind)
        assert [*sorted(ends.keys() - {fault.rank for fault in self.faults})] == self.survivors
        values, steps = ends[self.survivors[0]]
        for rank in self.survivors:
            np.testing.assert_array_equal(ends[rank][0], values)
            assert ends[rank][1] == steps or kind is WagmaSGD  # whose ranks may end at different rounds
        calls = values[self.padding :].reshape(self.size, CALLS)
        assert (calls[self.survivors] > 0).all(), "a gradient of a survivor is lost"
        if kind is EagerSGD and not self.weighs:  # a sum counts them
            assert set(calls.ravel().tolist()) <= {0.0, 1.0}, "a gradient counts twice"


@pytest.mark.parametrize("seed", range(12))
def test_eager_sgd_goes_on_after_deaths(seed: int) -> None:
    Case.drawn(seed).check(EagerSGD)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", [AllreduceSGD, OverlappedSGD, LocalSGD, WagmaSGD])
def test_other_trainings_go_on_after_deaths(kind: type[Any], seed: int) -> None:
    Case.drawn(1000 + seed).check(kind)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", [EagerSGD, AllreduceSGD])
def test_a_death_while_it_starts_or_ends(kind: type[Any], shared: bool) -> None:
    """Of the rank whose model all others take, and of another one: at moments from the first to the last message."""

    async def main(comm: asyncoll.Communicator) -> float:
        moments.append(asyncio.get_running_loop().time())
        model = torch.nn.Linear(4, 1)
        sgd = kind(comm, model, torch.optim.SGD(model.parameters(), lr=0.1), elastic=True)
        await sgd.start()
        moments.append(asyncio.get_running_loop().time())
        for _ in range(3):
            model(torch.ones(4)).backward()
            await sgd.step()
        moments.append(asyncio.get_running_loop().time())
        await sgd.finish()
        return sum(parameter.sum().item() for parameter in model.parameters())

    moments: list[float] = []
    end = simulate(4, main, Network(1e-4), shared_memory=shared).virtual_s
    begun, *_, joins = sorted(moments)
    started = sorted(moments)[4]
    for at_s in (*np.linspace(begun, started, 4), *np.linspace(joins, end, 4)):
        for rank in (0, 1):
            report = simulate(4, main, Network(1e-4, faults=[Crash(rank, float(at_s))]), shared_memory=shared)
            assert len({report.results[other] for other in range(4) if other != rank}) == 1


@pytest.mark.parametrize("seed", [*range(4), 138])  # the last one: some die while all start
@pytest.mark.parametrize("kind", [EagerSGD, AllreduceSGD, LocalSGD])
def test_each_sample_is_used_once_in_an_epoch(kind: type[Any], seed: int) -> None:
    """Also those that were dealt to a rank that died; the batches that are left at the end are fewer than the ranks."""
    case, samples, epochs = Case.drawn(2000 + seed), 200, 3
    faults = [Crash(fault.rank, fault.at_s / 5) for fault in case.faults]  # before a rank has used all of its batches
    ends: dict[int, Array] = {}

    async def main(comm: asyncoll.Communicator) -> None:
        rank, draw = comm.rank, np.random.default_rng([seed, comm.rank])
        model = torch.nn.Linear(samples, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        options = {EagerSGD: {"op": asyncoll.SUM}, AllreduceSGD: {}, LocalSGD: {"every": 3}}[kind]
        sgd = kind(comm, model, optimizer, elastic=True, **options)
        await sgd.start()
        batches, is_over = ElasticBatches(samples, 3, epochs), False
        while not is_over:
            batches.deal(sgd)
            for indices in batches:
                await asyncio.sleep((0.04 if rank == case.slow else 0.01) * draw.random())
                x = torch.zeros(samples)
                x[indices] = -1.0
                model(x).sum().backward()
                await sgd.step()
                if batches.deal(sgd):
                    break
            else:
                is_over = True
        await sgd.finish()
        ends[rank] = model.weight.detach().numpy()[0].copy()

    simulate(case.size, main, Network(case.latency_s, 1e-4, faults=faults), seed, shared_memory=case.shared)
    (times, *_) = (ends[rank] for rank in case.survivors)
    if kind is EagerSGD:
        assert times.max() == epochs
        assert (epochs - times).sum() < 3 * case.size
    else:  # by the number of ranks of each epoch
        assert (times > 0).all()
        assert (times <= epochs).all()


@pytest.mark.parametrize("wrong", [(0, 1), (1, 0), (1, 1, 0)])
def test_batches_of_nothing_are_an_error(wrong: tuple[int, ...]) -> None:
    with pytest.raises(asyncoll.UsageError, match="samples, batch_size and epochs are at least 1"):
        ElasticBatches(*wrong)
    with pytest.raises(asyncoll.UsageError, match="call deal"):
        list(ElasticBatches(1, 1))


def test_batches_are_those_of_a_sampler() -> None:
    """In the order of the data without a seed; the last batch of an epoch has fewer samples."""

    async def main(comm: asyncoll.Communicator) -> list[list[int]]:
        model = torch.nn.Linear(1, 1)
        sgd = AllreduceSGD(comm, model, torch.optim.SGD(model.parameters(), lr=0.1), elastic=True)
        batches = ElasticBatches(5, 2, 2, seed=None)
        assert batches.deal(sgd)
        assert not batches.deal(sgd)
        loader = torch.utils.data.DataLoader(torch.arange(5), batch_sampler=batches)
        return [batch.tolist() for batch in loader]

    assert run_ranks(2, main) == [[[0, 1], [4], [2, 3]], [[2, 3], [0, 1], [4]]]


@pytest.mark.parametrize("kind", [EagerSGD, AllreduceSGD])
def test_a_checkpoint_is_for_any_number_of_ranks(kind: type[Any], tmp_path: Path) -> None:
    def made(comm: asyncoll.Communicator, **options: Any) -> tuple[torch.nn.Module, Any]:
        model = torch.nn.Linear(3, 1)
        return model, kind(comm, model, torch.optim.SGD(model.parameters(), lr=0.1), **options)

    async def first(comm: asyncoll.Communicator) -> None:
        model, sgd = made(comm, elastic=True)
        await sgd.start()
        while sgd.comm.size == 4 or sgd.round < 12:
            await asyncio.sleep(0.01)
            model(torch.ones(3)).backward()
            step = await sgd.step()
            checkpoints = Checkpoints(sgd.comm, tmp_path)
            checkpoints.save(step.round, model=model.state_dict(), sgd=sgd.state_dict())
        await sgd.finish()

    async def then(comm: asyncoll.Communicator) -> int:
        model, sgd = made(comm, elastic=True)
        saved = Checkpoints(comm, tmp_path).newest_of_any()
        assert saved is not None
        model.load_state_dict(saved["model"])
        sgd.load_state_dict(saved["sgd"])
        _, strict = made(comm)
        with pytest.raises(asyncoll.UsageError, match="has ranks 3, and not 2"):
            strict.load_state_dict(saved["sgd"])
        with pytest.raises(asyncoll.UsageError, match="takes that of `newest_of_any`"):
            await Checkpoints(comm, tmp_path).newest()
        await sgd.start()
        model(torch.ones(3)).backward()
        round_ = int((await sgd.step()).round)
        await sgd.finish()
        return round_

    simulate(4, first, Network(1e-4, faults=[Crash(1, 0.0451)]))
    assert all(round_ >= 12 for round_ in run_ranks(2, then))


def test_metrics_of_a_step_in_which_a_rank_died_are_those_of_the_rank() -> None:
    async def main(comm: asyncoll.Communicator) -> list[dict[str, float]]:
        model = torch.nn.Linear(2, 1)
        sgd = AllreduceSGD(comm, model, torch.optim.SGD(model.parameters(), lr=0.1), elastic=True)
        await sgd.start()
        found = []
        for _ in range(20):
            model(torch.ones(2)).backward()
            await asyncio.sleep(0.01)
            found.append((await sgd.step(metrics={"rank": comm.rank})).metrics)
        return found

    found = simulate(3, main, Network(1e-4, faults=[Crash(2, 0.1007)])).results
    means = {0: 0.0, 1: 1.0}
    for rank in (0, 1):
        assert {metrics["rank"] for metrics in found[rank]} <= {1.0, 0.5, means[rank]}
        assert found[rank][0] == {"rank": 1.0}
        assert found[rank][-1] == {"rank": 0.5}


def test_what_cannot_go_on_says_so() -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for kind in (DPSGD, SGP):
            with pytest.raises(asyncoll.UsageError, match=f"{kind.__name__} cannot go on after a death"):
                kind(comm, model, optimizer, elastic=True)
        with pytest.raises(asyncoll.UsageError, match="elastic needs history"):
            EagerSGD(comm, model, optimizer, elastic=True, history=0)

    run_ranks(2, main)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_processes_are_killed(transport: str) -> None:
    """At random moments, up to the last one; one survives at least."""
    command = [sys.executable, "-W", "error", "-m", "asyncoll", "launch", "-n", "4", "--min-ranks", "1"]
    command += ["--transport", transport, str(SCRIPTS / "training" / "trains_over_deaths.py")]
    done = subprocess.run(
        command,
        env=os.environ | LIGHT | TRAINING,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    lines = [line.split(": ", 1)[1] for line in done.stdout.splitlines()]
    assert (done.returncode, len(set(lines))) == (0, 1), done.stdout + done.stderr
    assert lines[0].startswith("trained on")
