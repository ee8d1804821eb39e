"""Local SGD: against a loop by hand, its averages, its end, and its checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

import asyncoll
from asyncoll.testing import run_ranks, simulate
from asyncoll.training import AllreduceSGD, LocalSGD
from tests.support.cases import looped

SIZES = [1, 2, 3, 4, 5, 8]
Optimizing = Callable[[torch.nn.Module], torch.optim.Optimizer]


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def network(seed: int = 1) -> torch.nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def loss(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * rank + step))
    return (model(inputs) - inputs[:, :3].sin()).square().mean()


def parameters(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def plain(optimizing: Optimizing, rank: int, steps: int) -> torch.Tensor:
    model = network()
    optimizer = optimizing(model)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
    return parameters(model)


@pytest.mark.parametrize("optimizing", [momentum, adam])
def test_alone_it_is_plain_training_to_the_bit(optimizing: Optimizing) -> None:
    async def main(comm: asyncoll.Communicator) -> torch.Tensor:
        model = network()
        sgd = LocalSGD(comm, model, optimizing(model), every=3)
        for step in range(7):
            loss(model, comm.rank, step).backward()
            await sgd.step()
        await sgd.finish()
        return parameters(model)

    assert torch.equal(run_ranks(1, main)[0], plain(optimizing, 0, 7))


@looped("size", SIZES)
@pytest.mark.parametrize("optimizing", [momentum, adam])
def test_it_is_the_loop_written_by_hand(optimizing: Optimizing, size: int, simulated: Callable[..., Any]) -> None:
    steps, every = 7, 3

    async def main(comm: asyncoll.Communicator) -> tuple[list[int | None], torch.Tensor]:
        model = network(comm.rank)  # start() gives all rank 0's
        sgd = LocalSGD(comm, model, optimizing(model), every=every)
        await sgd.start()
        rounds: list[int | None] = []
        for step in range(steps):
            loss(model, comm.rank, step).backward()
            reduction = await sgd.step()
            rounds.append(reduction.round if reduction else None)
        await sgd.finish()
        return rounds, parameters(model)

    models = [network(0) for _ in range(size)]
    optimizers = [optimizing(model) for model in models]
    for step in range(1, steps + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss(model, rank, step - 1).backward()
            optimizer.step()
        if step % every == 0 or step == steps:
            mean = [sum(group) / size for group in zip(*(model.parameters() for model in models), strict=True)]
            with torch.no_grad():
                for model in models:
                    for parameter, value in zip(model.parameters(), mean, strict=True):
                        parameter.copy_(value)
    results = simulated(size, main).results
    assert all(rounds == [None, None, 3, None, None, 6, None] for rounds, _ in results)
    assert all(torch.equal(model, results[0][1]) for _, model in results)
    torch.testing.assert_close(results[0][1], parameters(models[0]), rtol=1e-5, atol=1e-6)


@looped("size", SIZES)
def test_an_average_in_each_step_is_synchronous_sgd_up_to_rounding(size: int) -> None:
    def training(trainer: Callable[..., Any]) -> Callable[[asyncoll.Communicator], Any]:
        async def main(comm: asyncoll.Communicator) -> torch.Tensor:
            model = network()
            sgd = trainer(comm, model, momentum(model))
            for step in range(5):
                loss(model, comm.rank, step).backward()
                assert await sgd.step() is not None
            await sgd.finish()
            return parameters(model)

        return main

    local = run_ranks(size, training(lambda *given: LocalSGD(*given, every=1)))
    synchronous = run_ranks(size, training(AllreduceSGD))
    torch.testing.assert_close(local[0], synchronous[0], rtol=1e-4, atol=1e-6)


@looped("steps", range(8))
def test_the_end_takes_the_average_that_is_due_and_no_other(steps: int) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[torch.Tensor, int]:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sgd = LocalSGD(comm, model, optimizer, every=3)
        for _ in range(steps):
            (model.weight * -float(comm.rank)).sum().backward()  # each step adds the rank
            await sgd.step()
        before = allreduces(comm)
        await sgd.finish()
        return model.weight.item(), allreduces(comm) - before

    def allreduces(comm: asyncoll.Communicator) -> int:
        calls = comm.statistics().calls
        return calls["allreduce"].calls if "allreduce" in calls else 0

    for weight, averages in run_ranks(4, main):
        assert weight == steps * 1.5  # the mean rank
        assert averages == (steps % 3 != 0)


def test_fast_ranks_wait_only_where_models_are_averaged() -> None:
    async def main(comm: asyncoll.Communicator) -> list[float]:
        model = network()
        sgd = LocalSGD(comm, model, momentum(model), every=4)
        await sgd.start()
        begun = asyncio.get_running_loop().time()
        ends = []
        for step in range(4):
            await asyncio.sleep(1.0 + comm.rank)
            loss(model, comm.rank, step).backward()
            await sgd.step()
            ends.append(asyncio.get_running_loop().time() - begun)
        await sgd.finish()
        return ends

    fast, slow = simulate(2, main).results
    assert fast[:3] == pytest.approx([1, 2, 3], abs=1e-2)
    assert fast[3] == pytest.approx(slow[3], abs=1e-2) == pytest.approx(8, abs=1e-2)


@looped("killed_at", range(1, 7))
def test_a_checkpoint_of_any_step_gives_the_bits_of_an_unbroken_run(killed_at: int) -> None:
    size, steps = 3, 8

    def training(first: int, last: int, saved: list[Any] | None) -> list[Any]:
        async def main(comm: asyncoll.Communicator) -> Any:
            model = network(comm.rank)
            optimizer = momentum(model)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
            sgd = LocalSGD(comm, model, optimizer, every=3, scheduler=scheduler)
            if saved is not None:
                for part, state in zip((model, optimizer, scheduler, sgd), saved[comm.rank], strict=True):
                    part.load_state_dict(state)
            await sgd.start()
            for step in range(first, last):
                loss(model, comm.rank, step).backward()
                await sgd.step()
            if last < steps:
                sgd.discard()
                return [
                    {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in part.items()}
                    for part in (part.state_dict() for part in (model, optimizer, scheduler, sgd))
                ]
            await sgd.finish()
            return parameters(model)

        return run_ranks(size, main)

    unbroken = training(0, steps, None)
    resumed = training(killed_at, steps, training(0, killed_at, None))
    assert all(torch.equal(model, unbroken[0]) for model in (*unbroken, *resumed))


def test_impossible_arguments_are_refused() -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        model = network()
        with pytest.raises(asyncoll.UsageError, match="every is a number of local steps, at least 1, not 0"):
            LocalSGD(comm, model, momentum(model), every=0)
        sgd = LocalSGD(comm, model, momentum(model))
        loss(model, 0, 0).backward()
        with pytest.raises(
            asyncoll.UsageError, match="LocalSGD takes no weight: it averages models, and not gradients"
        ):
            await sgd.step(weight=3)

    run_ranks(1, main)


@looped("transport", ["shm", "zmq"])
def test_the_loss_falls(transport: str) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[float, float]:
        model = network()
        sgd = LocalSGD(comm, model, momentum(model), every=5)
        before = loss(model, 50, 0).item()
        for step in range(60):
            loss(model, comm.rank, step).backward()
            await sgd.step()
        await sgd.finish()
        return before, loss(model, 50, 0).item()

    for before, after in run_ranks(2, main, transport):
        assert after < 0.5 * before
