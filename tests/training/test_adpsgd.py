"""AD-PSGD: against the paper's algorithm by hand, ranks at their own pace, cancelled steps, and its end."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np
import pytest
import torch

import asyncoll
from asyncoll.testing import Network, run_ranks, simulate
from asyncoll.training import ADPSGD
from tests.support.cases import looped
from tests.support.training_loops import (
    Optimizing,
    adam,
    loss,
    momentum,
    network,
    parameters,
    plain,
    quadratic,
    quadratic_slope,
    whole,
)
from tests.support.training_loops import state as state_of

SIZES = [2, 3, 4, 5, 8]
STEPS = 6
RATE = 0.1


def by_hand(size: int, partners: dict[tuple[int, int], int]) -> tuple[list[Any], Any]:
    """Algorithm 1 with ranks that take turns: a step of rank 0, its average, a step of rank 1, and so on.

    `partners` has the passive rank of the average after step k of an active rank. Returns the models as they are
    between a step and the average after it, at which the next gradients are taken; and the mean at the end.
    """
    x = np.tile(quadratic(size)[0], (size, 1))
    seen = [x.copy()]
    for k in range(STEPS):
        taken = np.empty_like(x)
        for rank in range(size):
            x[rank] -= RATE * quadratic_slope(rank, seen[-1][rank], k + 1)
            taken[rank] = x[rank]
            if (rank, k) in partners:
                pair = [rank, partners[rank, k]]
                x[pair] = x[pair].mean(axis=0)
        seen.append(taken)
    return seen[1:], x.mean(axis=0)


@looped("size", SIZES)
@pytest.mark.parametrize("graph", ["ring", "exponential"])
def test_it_is_the_papers_algorithm_by_hand(size: int, graph: Any) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[list[Any], list[tuple[int, ...]], Any]:
        model = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
        model.weight.data.copy_(torch.from_numpy(quadratic(size)[comm.rank]))
        sgd = ADPSGD(comm, model, torch.optim.SGD(model.parameters(), lr=RATE), graph=graph, seed=size)
        await sgd.start()
        loop = asyncio.get_running_loop()
        models, ranks = [], []
        for k in range(STEPS):
            await asyncio.sleep(10.0 * (k + 1) + comm.rank - loop.time())  # an average takes far less than a second
            assert model.weight.grad is not None
            x = parameters(model).numpy()
            model.weight.grad.copy_(torch.from_numpy(quadratic_slope(comm.rank, x, k + 1)))
            reduction = await sgd.step()
            assert reduction is not None
            assert reduction.round == sgd.round == k + 1
            ranks.append(reduction.ranks)
            models.append(parameters(model).numpy())
        await sgd.finish()
        return models, ranks, parameters(model).numpy()

    results = simulate(size, main, Network(jitter_s=1e-3)).results
    partners = {}
    for rank, (_, ranks, _) in enumerate(results):
        assert ranks[0] == (rank,)  # a step reports the average that the step before has begun
        for k, members in enumerate(ranks[1:]):
            assert len(members) == 2 - rank % 2
            assert rank in members
            if rank % 2 == 0:
                (partners[rank, k],) = set(members) - {rank}
    assert all(passive % 2 == 1 for passive in partners.values())
    if graph == "ring":
        assert all((passive - active) % size in (1, size - 1) for (active, _), passive in partners.items())
    expected, end = by_hand(size, partners)  # without the last averages, which no step reports
    for rank, (models, _, left) in enumerate(results):
        for k in range(STEPS - 1):
            np.testing.assert_allclose(models[k], expected[k][rank], rtol=1e-12)
        np.testing.assert_allclose(left, end, rtol=1e-12)
        assert left.tobytes() == results[0][2].tobytes()


@looped("optimizing", [momentum, adam])
def test_alone_it_is_plain_training_to_the_bit(optimizing: Optimizing) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[Any, ...]:
        model = network()
        optimizer = optimizing(model)
        sgd = ADPSGD(comm, model, optimizer)
        for step in range(5):
            loss(model, 0, step).backward()
            await sgd.step()
        await sgd.finish()
        return whole(model), state_of(optimizer)

    model = network()
    optimizer = optimizing(model)
    for step in range(5):
        optimizer.zero_grad()
        loss(model, 0, step).backward()
        optimizer.step()
    assert run_ranks(1, main) == [(whole(model), state_of(optimizer))]


def whole_steps(comm: asyncoll.Communicator, model: torch.nn.Linear) -> None:
    """A gradient whose steps are exact, and so are their means over two ranks: rank 0's is -1, rank 1's is -2, ..."""
    assert model.weight.grad is not None
    model.weight.grad.fill_(-1.0 - comm.rank)


def scalar() -> torch.nn.Linear:
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    return model


@looped("size", [2, 3, 5, 8])
@looped("seed", range(3))
def test_ranks_at_their_own_pace_lose_no_step(size: int, seed: int) -> None:
    """They end after different numbers of steps. The mean of all models moves by the sum of all steps."""

    async def main(comm: asyncoll.Communicator) -> float:
        model = scalar()
        sgd = ADPSGD(comm, model, torch.optim.SGD(model.parameters(), lr=1.0), seed=seed)
        await sgd.start()
        draw = np.random.default_rng((seed, comm.rank))
        for _ in range(3 + 2 * comm.rank):
            await asyncio.sleep(draw.exponential())
            whole_steps(comm, model)
            await sgd.step()
        assert sgd.round == 3 + 2 * comm.rank
        await sgd.finish()
        return model.weight.item()

    results = simulate(size, main, Network(jitter_s=0.5), seed=seed).results
    assert len(set(results)) == 1
    assert results[0] == pytest.approx(sum((3 + 2 * rank) * (1 + rank) for rank in range(size)) / size, rel=1e-12)


@looped("is_last", [False, True])
def test_a_cancelled_step_loses_no_gradient(is_last: bool) -> None:
    """It is cancelled while the average before it is under way; the next step adds its change, or the end does."""

    async def main(comm: asyncoll.Communicator) -> tuple[float, int]:
        model = scalar()
        sgd = ADPSGD(comm, model, torch.optim.SGD(model.parameters(), lr=1.0))
        await sgd.start()
        for step in range(3 if is_last else 6):
            whole_steps(comm, model)
            stepping = asyncio.ensure_future(sgd.step())
            if comm.rank == 0 and step == 2:
                await asyncio.sleep(1.0)
                assert not stepping.done()
                stepping.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await stepping
                assert sgd.round == 3
            else:
                await stepping
        await sgd.finish()
        return model.weight.item(), sgd.round

    steps = 3 if is_last else 6
    assert simulate(2, main, Network(latency_s=5.0)).results == [(steps * 1.5, steps)] * 2


@looped("steps", [0, 1, 4])
@looped("transport", ["shm", "zmq"])
def test_all_ranks_leave_with_one_model_and_nothing_is_left(steps: int, transport: str) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[dict[str, bytes], float]:
        model = network(seed=comm.rank)
        sgd = ADPSGD(comm, model, momentum(model))
        await sgd.start()
        for step in range(steps + comm.rank):
            loss(model, comm.rank, step).backward()
            await sgd.step()
        await sgd.finish()
        return whole(model), float(await comm.allreduce(torch.ones(1)))

    results = run_ranks(3, main, transport)
    assert results == [(results[0][0], 3.0)] * 3


def test_a_program_that_drops_an_average_under_way_goes_on_without_a_warning() -> None:
    async def main(comm: asyncoll.Communicator) -> float:
        model = network()
        sgd = ADPSGD(comm, model, plain(model))
        await sgd.start()
        loss(model, comm.rank, 1).backward()
        await sgd.step()
        sgd.discard()
        del sgd
        gc.collect()
        return float(await comm.allreduce(torch.ones(1)))

    assert simulate(4, main).results == [4.0] * 4


def test_a_weight_is_refused() -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        model = network()
        loss(model, comm.rank, 1).backward()
        await ADPSGD(comm, model, plain(model)).step(weight=3.0)

    with pytest.raises(asyncoll.UsageError, match="ADPSGD takes no weight: it averages models, and not gradients"):
        run_ranks(1, main)
