"""WAGMA-SGD: averages in groups, weights that add up to one, and one model after each average over all ranks."""

from __future__ import annotations

import asyncio
import dataclasses
from functools import partial
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import asyncoll
from asyncoll.testing import run_ranks, simulate
from asyncoll.training import AllreduceSGD, WagmaSGD
from asyncoll.training.wagma_sgd import Order, merge
from tests.support.cases import looped
from tests.support.training_loops import (
    Algorithm,
    Digits,
    Optimizing,
    adam,
    bits,
    momentum,
    parameters,
    straggle,
    train,
    trained,
)

OPTIMIZERS = [momentum, adam]


async def together(comm: asyncoll.Communicator) -> float:
    """The same virtual time at every rank, not in the past."""
    now = torch.tensor([asyncio.get_running_loop().time()], dtype=torch.float64)
    return float(await comm.allreduce(now, op=asyncoll.MAX)) + 1.0


def test_wagma_in_one_group_without_late_ranks_is_synchronous_sgd() -> None:
    """Averaging models and averaging gradients are the same for a linear optimizer, up to rounding."""

    async def main(comm: asyncoll.Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        async def outcome(algorithm: Algorithm) -> torch.Tensor:
            workload = Digits(comm.rank, comm.size, batch=8, seed=4)
            loop = asyncio.get_running_loop()
            started_s = await together(comm)

            async def gradient(round_: int) -> None:
                workload.loss().backward()
                await asyncio.sleep(started_s + round_ - loop.time())  # all ranks arrive at one instant

            async for done in train(algorithm(comm, workload.model, momentum(workload.model)), gradient, 12):
                assert (done.active, done.included, done.skipped) == (comm.size, True, 0)
            return parameters(workload.model)

        wagma = partial(WagmaSGD, group_size=comm.size, sync_every=5)
        return await outcome(wagma), await outcome(AllreduceSGD)

    for averaged, synchronous in simulate(4, main).results:
        torch.testing.assert_close(averaged, synchronous, rtol=1e-4, atol=1e-5)


@looped("size", [2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("order", ["step-then-average", "average-then-step"])
@looped("fixed", [False, True])
def test_weights_of_a_merge_add_up_to_one(size: int, order: Order, fixed: bool) -> None:
    """Without steps and with equal models, no model changes, to the bit, whichever rank is late."""

    async def main(comm: asyncoll.Communicator) -> tuple[int, list[int]]:
        model = torch.nn.Linear(2, 1)
        torch.nn.init.ones_(model.weight)
        torch.nn.init.ones_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        async def gradient(round_: int) -> None:
            await asyncio.sleep(straggle(size, comm, round_))

        stale, rounds = 0, []
        rules: dict[str, Any] = {"sync_every": 9, "order": order, "fixed": fixed}
        async for done in train(WagmaSGD(comm, model, optimizer, **rules), gradient, 25):
            assert torch.equal(parameters(model), torch.ones(3))
            assert comm.rank in done.group
            stale += not done.included
            rounds.append(done.round)
        assert torch.equal(parameters(model), torch.ones(3))
        return stale, rounds

    results = simulate(size, main, seed=size).results
    assert any(stale for stale, _ in results)
    for _, rounds in results:
        assert rounds == sorted(set(rounds))
        assert {9, 18, 25} <= set(rounds)


def test_a_merge_adds_the_own_model_only_if_it_was_too_late() -> None:
    total, own = torch.tensor([6.0]), torch.tensor([9.0])
    fresh = asyncoll.Reduction(round=3, active=2, included=True, skipped=0, synchronous=False)
    assert merge(total, own, fresh) == 3.0
    assert merge(total, own, dataclasses.replace(fresh, included=False)) == 5.0
    assert merge(torch.zeros(1), own, dataclasses.replace(fresh, included=False, active=0)) == 9.0


@looped("optimizing", OPTIMIZERS)
@pytest.mark.parametrize("order", ["step-then-average", "average-then-step"])
@looped("size", [2, 3, 4, 6])
def test_wagma_has_one_model_after_each_average_of_all(size: int, order: Order, optimizing: Optimizing) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[dict[int, bytes], bytes, list[Any], list[bytes]]:
        workload = Digits(comm.rank, comm.size, batch=8, seed=0)
        after: dict[int, bytes] = {}
        distances: list[tuple[int, float]] = []
        means: list[bytes] = []

        def observe(round_: int, own: torch.Tensor, mean: torch.Tensor) -> None:
            distances.append((round_, float((own - mean).norm() / mean.norm())))
            means.append(bits(mean))

        async def gradient(round_: int) -> None:
            workload.loss().backward()
            await asyncio.sleep(straggle(size, comm, round_))

        model = workload.model
        sgd = WagmaSGD(comm, model, optimizing(model), sync_every=6, order=order, observe=observe)
        async for done in train(sgd, gradient, 20):
            if done.synchronous:
                after[done.round] = bits(parameters(model))
        assert means[-1] == bits(parameters(model))
        return after, bits(parameters(model)), distances, means

    results = simulate(size, main).results
    assert len({end for _, end, _, _ in results}) == 1
    for after, _, distances, means in results:
        assert list(after) == [6, 12, 18]
        assert [round_ for round_, _ in distances] == [6, 12, 18, 20]
        assert all(0.0 < distance < 1.0 for _, distance in distances)
        assert means == results[0][3]
        if order == "step-then-average":  # otherwise each rank has taken a step of its own since
            assert after == results[0][0]


def test_the_groups_default_to_the_square_root_of_the_ranks() -> None:
    async def main(comm: asyncoll.Communicator) -> int:
        model = torch.nn.Linear(2, 1)

        async def gradient(round_: int) -> None:
            await asyncio.sleep(1.0)

        (done,) = await trained(WagmaSGD(comm, model, momentum(model)), gradient, 1)
        return len(done.group)

    sizes = {size: max(simulate(size, main).results) for size in (1, 2, 4, 5, 9, 10, 16)}
    assert sizes == {1: 1, 2: 2, 4: 2, 5: 3, 9: 3, 10: 4, 16: 4}


def digits_score(algorithm: Algorithm, size: int) -> float:
    """Test accuracy after 180 rounds, in each of which one random rank is late by two steps."""
    rounds = 180

    async def main(comm: asyncoll.Communicator) -> float:
        workload = Digits(comm.rank, comm.size, batch=32, seed=0)
        optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.5)
        peak = rounds // 5
        scheduler = LambdaLR(optimizer, lambda round_: min((round_ + 1) / peak, (rounds - round_) / (rounds - peak)))

        async def gradient(round_: int) -> None:
            workload.loss().backward()
            is_late = np.random.default_rng((0, round_)).integers(comm.size) == comm.rank
            await asyncio.sleep(0.3 if is_late else 0.1)

        await trained(algorithm(comm, workload.model, optimizer, scheduler=scheduler), gradient, rounds)
        return workload.score()

    score: float = simulate(size, main).results[0]
    return score


def test_wagma_with_stragglers_learns_as_well_as_synchronous_sgd() -> None:
    synchronous = digits_score(AllreduceSGD, 4)
    assert synchronous > 0.96
    for order in get_args(Order):
        assert digits_score(partial(WagmaSGD, order=order), 4) > synchronous - 0.02


@looped("size", [2, 3, 4, 5])
@looped("seed", range(4))
def test_ranks_that_leave_at_different_rounds_have_equal_models(size: int, seed: int) -> None:
    async def main(comm: asyncoll.Communicator) -> bytes:
        workload = Digits(comm.rank, comm.size, batch=8, seed=4)
        sgd = WagmaSGD(comm, workload.model, momentum(workload.model), sync_every=4)
        await sgd.start()
        while sgd.round < 3 + (5 * comm.rank + seed) % 11:
            workload.loss().backward()
            await asyncio.sleep(straggle(seed, comm, sgd.round))
            await sgd.step()
        await sgd.finish()
        return bits(parameters(workload.model))

    models = simulate(size, main, seed=seed).results
    assert all(model == models[0] for model in models)


@pytest.mark.parametrize("order", get_args(Order))
def test_a_cancelled_step_loses_no_gradient(order: Order) -> None:
    """It is cancelled while it waits for a late rank. The local step is in this rank's model, and training goes on."""

    async def main(comm: asyncoll.Communicator) -> tuple[int, bytes]:
        model = torch.nn.Linear(2, 1)
        sgd = WagmaSGD(comm, model, torch.optim.SGD(model.parameters(), lr=1.0), sync_every=1, order=order)
        await sgd.start()

        async def step() -> None:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.fill_(-1.0)
            await sgd.step()

        if comm.rank == 0:
            before = parameters(model)
            stepping = asyncio.ensure_future(step())
            await asyncio.sleep(1.0)
            stepping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stepping
            assert torch.equal(parameters(model), before + 1.0)
        else:
            await asyncio.sleep(2.0)
        while sgd.round < 4:
            await step()
        await sgd.finish()
        return sgd.round, bits(parameters(model))

    results = simulate(2, main).results
    assert results == [(4, results[0][1])] * 2


@looped(
    ("rules", "words"),
    [
        ({"order": "both"}, "order is step-then-average or average-then-step"),
        ({"group_size": 4}, "group_size 4"),
        ({"group_size": 0}, "group_size 0"),
    ],
)
def test_impossible_wagma_options_are_usage_errors(rules: dict[str, Any], words: str) -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        model = torch.nn.Linear(2, 1)

        async def gradient(round_: int) -> None:
            pass

        await trained(WagmaSGD(comm, model, momentum(model), **rules), gradient, 3)

    with pytest.raises(asyncoll.UsageError, match=words):
        run_ranks(3, main)
