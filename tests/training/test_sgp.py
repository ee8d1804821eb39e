"""SGP: against the paper's algorithm by hand, with and without overlap, its records, and its end."""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import asyncoll
from asyncoll.testing import Network, run_ranks, simulate
from asyncoll.training import SGP
from tests.support.cases import looped
from tests.support.training_loops import (
    bits,
    loss,
    network,
    parameters,
    plain,
    quadratic,
    quadratic_slope,
    trained,
    whole,
)

SIZES = [1, 2, 3, 4, 5, 8]
STEPS = 6
RATE = 0.1


class ByHand(NamedTuple):
    models: list[Any]  # z of all ranks, after each step
    sources: list[list[tuple[int, ...]]]  # whose parts were added, by step and rank
    end: Any


def destinations(size: int, rank: int, iteration: int, peers: int) -> list[int]:
    """The exponential graph: distances j (m + 1)^i, where i goes through the powers of m + 1 below the size."""
    peers = min(peers, size - 1)
    powers = [power for power in ((peers + 1) ** i for i in range(size)) if power < size] or [1]
    power = powers[iteration % len(powers)]
    return sorted({(rank + j * power) % size for j in range(1, peers + 1)} - {rank})


def by_hand(size: int, peers: int, overlap: bool) -> ByHand:
    """Algorithm 1, and its overlapped form, in which a step adds the parts of the step before."""
    x, q = quadratic(size).copy(), np.ones(size)
    x[:] = x[0]  # all begin with rank 0's model
    models, sources, under_way = [], [], []
    for k in range(STEPS):
        z = x / q[:, None]
        x = x - RATE * np.array([quadratic_slope(rank, z[rank], k + 1) for rank in range(size)])
        out = [destinations(size, rank, k, peers) for rank in range(size)]
        x, q = (mass / (1 + len(out[0])) for mass in (x, q))
        parts = [(to, rank, x[rank].copy(), q[rank]) for rank in range(size) for to in out[rank]]
        added, under_way = (under_way, parts) if overlap else (parts, [])
        for to, _, dx, dq in added:
            x[to] += dx
            q[to] += dq
        sources.append([tuple(sorted(rank for to, rank, _, _ in added if to == own)) for own in range(size)])
        models.append(x / q[:, None])
    for to, _, dx, dq in under_way:
        x[to] += dx
        q[to] += dq
    return ByHand(models, sources, x.sum(axis=0) / q.sum())


@looped("size", SIZES)
@pytest.mark.parametrize("overlap", [False, True])
@looped("peers", [1, 2])
def test_it_is_the_papers_algorithm_by_hand(size: int, overlap: bool, peers: int) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[list[Any], list[asyncoll.Reduction], Any]:
        model = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
        model.weight.data.copy_(torch.from_numpy(quadratic(size)[comm.rank]))
        sgd = SGP(comm, model, torch.optim.SGD(model.parameters(), lr=RATE), peers=peers, overlap=overlap)
        await sgd.start()
        models, reductions = [], []
        for k in range(STEPS):
            assert model.weight.grad is not None
            z = parameters(model).numpy()
            model.weight.grad.copy_(torch.from_numpy(quadratic_slope(comm.rank, z, k + 1)))
            reduction = await sgd.step()
            assert reduction is not None
            reductions.append(reduction)
            models.append(parameters(model).numpy())
        await sgd.finish()
        return models, reductions, parameters(model).numpy()

    expected = by_hand(size, peers, overlap)
    results = simulate(size, main, Network(jitter_s=1e-3)).results
    for rank, (models, reductions, end) in enumerate(results):
        for k in range(STEPS):
            np.testing.assert_allclose(models[k], expected.models[k][rank], rtol=1e-12)
            ranks = tuple(sorted((rank, *expected.sources[k][rank])))
            assert (reductions[k].ranks, reductions[k].group, reductions[k].active) == (ranks, ranks, len(ranks))
            assert reductions[k].round == k + 1
        np.testing.assert_allclose(end, expected.end, rtol=1e-12)
        assert end.tobytes() == results[0][2].tobytes()


def test_parts_are_added_in_the_step_after_with_overlap() -> None:
    """So the first record has this rank alone, and the second the sources of the first exchange."""

    async def main(comm: asyncoll.Communicator) -> list[tuple[int, ...]]:
        model = network()

        async def gradient(round_: int) -> None:
            loss(model, comm.rank, round_).backward()

        return [done.ranks for done in await trained(SGP(comm, model, plain(model), overlap=True), gradient, 3)]

    assert run_ranks(4, main)[0] == [(0,), (0, 3), (0, 2)]  # distances 1 and 2


@looped("overlap", [False, True])
@looped("steps", [0, 1, 4])
@looped("transport", ["shm", "zmq"])
def test_all_ranks_leave_with_one_model_and_nothing_is_left(overlap: bool, steps: int, transport: str) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[dict[str, bytes], float]:
        model = network(seed=comm.rank)
        sgd = SGP(comm, model, plain(model), overlap=overlap)
        await sgd.start()
        for step in range(steps):
            loss(model, comm.rank, step).backward()
            await sgd.step()
        await sgd.finish()
        return whole(model), float(await comm.allreduce(torch.ones(1)))

    results = run_ranks(3, main, transport)
    assert results == [(results[0][0], 3.0)] * 3


def test_a_program_that_drops_parts_under_way_ends_the_communicator_without_a_warning() -> None:
    reasons: list[str] = []

    async def main(comm: asyncoll.Communicator) -> None:
        model = network()
        sgd = SGP(comm, model, plain(model), overlap=True)
        await sgd.start()
        loss(model, comm.rank, 1).backward()
        await sgd.step()
        del sgd
        gc.collect()
        try:
            while True:
                await comm.barrier()
        except asyncoll.AbortedError as error:
            reasons.append(str(error))

    with pytest.raises(asyncoll.UsageError, match=r"ends without finish\(\) of SGP"):
        run_ranks(2, main)
    assert len(reasons) == 2
    for reason in reasons:
        assert "never awaited: the mass that it received is lost" in reason


def test_a_checkpoint_of_the_other_overlap_is_refused() -> None:
    async def main(comm: asyncoll.Communicator) -> bytes:
        model = network()
        states = {overlap: SGP(comm, model, plain(model), overlap=overlap) for overlap in (False, True)}
        await states[True].start()
        loss(model, comm.rank, 1).backward()
        await states[True].step()
        with pytest.raises(asyncoll.UsageError, match="saved with another setting of overlap: use the same"):
            states[False].load_state_dict(states[True].state_dict())
        await states[True].finish()
        return bits(parameters(model))

    assert len(set(run_ranks(2, main))) == 1


@looped(
    ("rules", "weight", "words"),
    [
        ({"peers": 0}, None, "peers is a number of ranks, at least 1, not 0"),
        ({}, 3.0, "SGP takes no weight: it averages models, and not gradients"),
    ],
)
def test_impossible_arguments_are_refused(rules: dict[str, Any], weight: float | None, words: str) -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        model = network()
        sgd = SGP(comm, model, plain(model), **rules)
        loss(model, comm.rank, 1).backward()
        await sgd.step(weight=weight)

    with pytest.raises(asyncoll.UsageError, match=words):
        run_ranks(1, main)
