"""D-PSGD: against the paper's algorithm by hand, its end, and its refusals."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

import asyncoll
from asyncoll.testing import Network, run_ranks, simulate
from asyncoll.training import DPSGD
from tests.support.cases import looped
from tests.support.training_loops import loss, momentum, network, parameters, plain, quadratic, quadratic_slope, whole

SIZES = [1, 2, 3, 4, 5, 8]
STEPS = 6
RATE = 0.1


def by_hand(size: int) -> tuple[list[Any], Any]:
    """Algorithm 1: x = Wx - ηG, with G at x. The models after each step, and their mean at the end."""
    ring = np.zeros((size, size))
    for rank in range(size):
        members = {rank, (rank - 1) % size, (rank + 1) % size}
        ring[rank, list(members)] = 1 / len(members)  # 1/3 each; 1/2 for two ranks
    x = np.tile(quadratic(size)[0], (size, 1))
    models = []
    for k in range(STEPS):
        x = ring @ x - RATE * np.array([quadratic_slope(rank, x[rank], k + 1) for rank in range(size)])
        models.append(x)
    return models, x.mean(axis=0)


@looped("size", SIZES)
def test_it_is_the_papers_algorithm_by_hand(size: int) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[list[Any], list[tuple[int, ...]], Any]:
        model = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
        model.weight.data.copy_(torch.from_numpy(quadratic(size)[comm.rank]))
        sgd = DPSGD(comm, model, torch.optim.SGD(model.parameters(), lr=RATE))
        await sgd.start()
        models, ranks = [], []
        for k in range(STEPS):
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

    expected, end = by_hand(size)
    results = simulate(size, main, Network(jitter_s=1e-3)).results
    for rank, (models, ranks, left) in enumerate(results):
        for k in range(STEPS):
            np.testing.assert_allclose(models[k], expected[k][rank], rtol=1e-12)
        assert ranks == [tuple(sorted({rank, (rank - 1) % size, (rank + 1) % size}))] * STEPS
        np.testing.assert_allclose(left, end, rtol=1e-12)
        assert left.tobytes() == results[0][2].tobytes()


def test_a_late_rank_delays_its_neighbours_only() -> None:
    """In the first step; those of its neighbours wait in the second one."""

    async def main(comm: asyncoll.Communicator) -> list[float]:
        model = network()
        sgd = DPSGD(comm, model, plain(model))
        await sgd.start()
        begun = asyncio.get_running_loop().time()
        ends = []
        for step in range(2):
            await asyncio.sleep(10.0 if comm.rank == 0 and step == 0 else 1.0)
            loss(model, comm.rank, step).backward()
            await sgd.step()
            ends.append(asyncio.get_running_loop().time() - begun)
        await sgd.finish()
        return ends

    ends = np.array(simulate(6, main).results)
    np.testing.assert_allclose(ends[:, 0], [10, 10, 1, 1, 1, 10], atol=0.1)
    np.testing.assert_allclose(ends[:, 1], [11, 11, 11, 2, 11, 11], atol=0.1)


@looped("steps", [0, 1, 4])
@looped("transport", ["shm", "zmq"])
def test_all_ranks_leave_with_one_model_and_nothing_is_left(steps: int, transport: str) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[dict[str, bytes], float]:
        model = network(seed=comm.rank)
        sgd = DPSGD(comm, model, momentum(model))
        await sgd.start()
        for step in range(steps):
            loss(model, comm.rank, step).backward()
            await sgd.step()
        await sgd.finish()
        return whole(model), float(await comm.allreduce(torch.ones(1)))

    results = run_ranks(3, main, transport)
    assert results == [(results[0][0], 3.0)] * 3


def test_a_weight_is_refused() -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        model = network()
        loss(model, comm.rank, 1).backward()
        await DPSGD(comm, model, plain(model)).step(weight=3.0)

    with pytest.raises(asyncoll.UsageError, match="DPSGD takes no weight: it averages models, and not gradients"):
        run_ranks(1, main)
