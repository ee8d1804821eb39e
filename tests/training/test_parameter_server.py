"""Parameter servers: against loops by hand for a forced order of arrivals, bounds, ends, checkpoints and errors."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import os
import random
import re
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import asyncoll
from asyncoll.testing import Crash, Network, run_ranks, simulate
from asyncoll.training import DCASGD, ParameterServerSGD
from asyncoll.training.parameter_server import ModelServer
from tests.support.cases import case, looped
from tests.support.places import SCRIPTS
from tests.support.processes import PATIENCE_S, ForkedRank

SCRIPT = SCRIPTS / "training/asynchronous_server.py"
# Launched ranks load these once, and not each. The first step of an optimizer imports torch._dynamo.
SIZES = [1, 2, 3, 4, 5, 8]
NETWORK = Network(latency_s=1e-3, jitter_s=1e-3)
Optimizing = Callable[[torch.nn.Module], torch.optim.Optimizer]
TRAINERS: dict[str, Callable[..., ParameterServerSGD]] = {
    "unbounded": ParameterServerSGD,
    "bounded": functools.partial(ParameterServerSGD, staleness=1),
    "compensated": DCASGD,
    "compensated, adaptive": functools.partial(DCASGD, adaptive=True),
}


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5, weight_decay=1e-3)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def network(seed: int = 1) -> torch.nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(5, 5), torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
        )
    model[0].requires_grad_(False)
    return model


def scalar() -> torch.nn.Linear:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    return model


def loss(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * rank + step))
    return (model(inputs) - inputs[:, :3].sin()).square().mean()


def parameters(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def flat_gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


# -- the algorithms ------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("optimizing", [momentum, adam])
def test_alone_it_is_plain_training_to_the_bit(trainer: str, optimizing: Optimizing) -> None:
    async def main(comm: asyncoll.Communicator) -> torch.Tensor:
        model = network()
        optimizer = optimizing(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        sgd = TRAINERS[trainer](comm, model, optimizer, clip_norm=0.2, accumulate=2, scheduler=scheduler)
        for step in range(12):
            loss(model, 0, step).backward()
            reduction = await sgd.step()
            assert (reduction is None) == (step % 2 == 0)
            assert reduction is None or (reduction.round, reduction.skipped) == (sgd.round, 0) == (step // 2 + 1, 0)
        await sgd.finish()
        return parameters(model)

    model = network()
    optimizer = optimizing(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for step in range(0, 12, 2):
        optimizer.zero_grad()
        loss(model, 0, step).backward()
        loss(model, 0, step + 1).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= 2
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        scheduler.step()
    assert torch.equal(run_ranks(1, main)[0], parameters(model))


def by_hand(order: Sequence[int], size: int, optimizing: Optimizing, kind: str) -> tuple[torch.Tensor, list[int]]:
    """The final model, and the staleness of each gradient, if gradients arrive in this order of workers."""
    server = network()
    optimizer = optimizing(server)
    workers = [copy.deepcopy(server) for _ in range(size)]
    versions, steps = [0] * size, [0] * size
    mean_square = torch.tensor(0.0)
    stale = []
    for version, worker in enumerate(order):
        model = workers[worker]
        model.zero_grad()
        loss(model, worker, steps[worker]).backward()
        g = flat_gradient(model)
        w, w_bak = (
            torch.cat([p.detach().flatten() for p in m.parameters() if p.requires_grad]) for m in (server, model)
        )
        mean_square = 0.95 * mean_square + (1 - 0.95) * g * g
        if kind == "constant":
            g = g + 0.04 * g * g * (w - w_bak)
        elif kind == "adaptive":
            g = g + 2 / (mean_square + 1e-7).sqrt() * g * g * (w - w_bak)
        trained = [p for p in server.parameters() if p.requires_grad]
        for parameter, part in zip(trained, g.split([p.numel() for p in trained]), strict=True):
            parameter.grad = part.view(parameter.shape)
        optimizer.step()
        model.load_state_dict(server.state_dict())
        stale.append(version - versions[worker])
        versions[worker] = version + 1
        steps[worker] += 1
    return parameters(server), stale


def in_order(
    order: Sequence[int], size: int, optimizing: Optimizing, trainer: Callable[..., ParameterServerSGD]
) -> tuple[torch.Tensor, list[int]]:
    """The same, of the trainer: each worker computes its gradient at once, and sends it when it is its turn."""
    stale = [-1] * len(order)
    turns = [asyncio.Event() for _ in range(len(order) + 1)]
    turns[0].set()

    async def main(comm: asyncoll.Communicator) -> torch.Tensor:
        model = network(1 + comm.rank)  # start() gives all rank 0's
        sgd = trainer(comm, model, optimizing(model))
        await sgd.start()
        for step, turn in enumerate(index for index, worker in enumerate(order) if worker == comm.rank):
            loss(model, comm.rank, step).backward()
            await turns[turn].wait()
            reduction = await sgd.step()
            assert reduction is not None
            stale[turn] = reduction.skipped
            turns[turn + 1].set()
        await sgd.finish()
        assert sgd.round == len(order) // size
        return parameters(model)

    results = run_ranks(size, main)
    assert all(torch.equal(result, results[0]) for result in results)
    return results[0], stale


@looped("size", SIZES)
@pytest.mark.parametrize("optimizing", [momentum, adam])
def test_a_forced_order_of_arrivals_gives_the_bits_of_the_loop_written_by_hand(
    optimizing: Optimizing, size: int
) -> None:
    order = random.Random(size).choices(range(size), k=4 * size)
    expected, stale = by_hand(order, size, optimizing, "plain")
    assert size == 1 or any(stale)
    for trainer in (ParameterServerSGD, functools.partial(DCASGD, lambda0=0.0)):
        result, skipped = in_order(order, size, optimizing, trainer)
        assert torch.equal(result, expected)
        assert skipped == stale


@looped("size", SIZES)
@pytest.mark.parametrize("kind", ["constant", "adaptive"])
def test_compensation_is_that_of_the_paper(kind: str, size: int) -> None:
    order = random.Random(size).choices(range(size), k=4 * size)
    expected, stale = by_hand(order, size, momentum, kind)
    result, skipped = in_order(order, size, momentum, functools.partial(DCASGD, adaptive=kind == "adaptive"))
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-7)
    assert skipped == stale
    uncorrected, _ = by_hand(order, size, momentum, "plain")
    assert torch.equal(uncorrected, expected) == (size == 1)


def at_random(comm: asyncoll.Communicator, seed: int) -> random.Random:
    return random.Random(1000 * seed + comm.rank)


@looped("size", SIZES)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_gradient_is_applied_once_and_all_end_with_one_model(
    trainer: str, size: int, simulated: Callable[..., Any]
) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[float, int, int]:
        model, draw = scalar(), at_random(comm, size)
        sgd = TRAINERS[trainer](comm, model, torch.optim.SGD(model.parameters(), lr=1.0))
        await sgd.start()
        steps = draw.randrange(9)  # ranks leave their loops at different steps
        for _ in range(steps):
            await asyncio.sleep(draw.random())
            (model.weight * -(2.0 ** -(comm.rank % 3))).sum().backward()
            if isinstance(sgd, DCASGD):
                model.weight.grad.zero_()  # nothing to correct
            await sgd.step()
        await sgd.finish()
        return model.weight.item(), sgd.round, steps

    results = simulated(size, main, NETWORK).results
    total = sum(steps * 2.0 ** -(rank % 3) for rank, (_, _, steps) in enumerate(results))
    for weight, round_, _ in results:
        assert weight == (0 if trainer.startswith("compensated") else total)
        assert round_ == sum(steps for _, _, steps in results) // size


@looped("size", SIZES)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_loop_over_rounds_ends_at_every_rank(trainer: str, size: int) -> None:
    rounds = 4

    async def main(comm: asyncoll.Communicator) -> tuple[int, int, float]:
        model = network()
        optimizer = momentum(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        sgd = TRAINERS[trainer](comm, model, optimizer, scheduler=scheduler)
        await sgd.start()
        steps, before = 0, 0
        while sgd.round < rounds:
            await asyncio.sleep(1.0 + 2.5 * comm.rank)
            loss(model, comm.rank, steps).backward()
            reduction = await sgd.step()
            assert reduction is not None
            assert before <= reduction.round == sgd.round
            assert (reduction.active, reduction.included, reduction.group) == (1, True, (comm.rank,))
            before = sgd.round
            steps += 1
        await sgd.finish()
        assert optimizer.param_groups[0]["lr"] == 0.125 * 0.5**sgd.round
        return steps, sgd.round, parameters(model).sum().item()

    results = simulate(size, main, NETWORK).results
    assert len({(round_, model) for _, round_, model in results}) == 1
    assert rounds <= results[0][1] == sum(steps for steps, _, _ in results) // size
    if trainer != "bounded" and size > 1:
        assert results[0][0] > results[-1][0]  # the slowest rank has made fewer steps


@pytest.mark.parametrize("trainer", TRAINERS)
def test_frozen_models_and_empty_trainings_end_well(trainer: str) -> None:
    async def main(comm: asyncoll.Communicator) -> torch.Tensor:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).requires_grad_(False)
        sgd = TRAINERS[trainer](comm, model, torch.optim.SGD(model.parameters(), lr=1.0), clip_norm=1.0, name="first")
        await sgd.start()
        for _ in range(comm.rank):
            model(torch.randn(3, 2))
            await sgd.step()
        await sgd.finish()
        empty = TRAINERS[trainer](comm, model, torch.optim.SGD(model.parameters(), lr=1.0), name="second")
        await empty.finish()
        return torch.cat([parameters(model), *(buffer.flatten() for buffer in model.buffers())])

    results = run_ranks(3, main)
    assert all(torch.equal(result, results[0]) for result in results)


def test_the_scheduler_of_rank_0_follows_the_clock_of_the_server() -> None:
    async def main(comm: asyncoll.Communicator) -> float:
        model = scalar()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        sgd = ParameterServerSGD(comm, model, optimizer, scheduler=scheduler)
        await sgd.start()
        await asyncio.sleep(0 if comm.rank else 100)  # rank 0 makes its only step after all of rank 1's
        for _ in range(6 if comm.rank else 1):
            model.weight.grad.fill_(-1.0)
            await sgd.step()
        await sgd.finish()
        return model.weight.item()

    assert simulate(2, main).results == [2 * (1 + 0.5 + 0.25) + 0.125] * 2


# -- staleness -----------------------------------------------------------------------------------


class Observed(ModelServer):
    """A server that records how far ahead of the slowest each worker is when its gradient comes, and its staleness."""

    def __init__(self, trainer: ParameterServerSGD, staleness: int | None) -> None:
        super().__init__(trainer, staleness)
        self.made = dict.fromkeys(range(trainer.comm.size), 0)
        self.ahead: list[int] = []
        self.skipped: list[int] = []

    def correct(self, worker: int, skipped: int) -> None:
        self.ahead.append(self.made[worker] - min(self.made.values()))
        self.skipped.append(skipped)
        self.made[worker] += 1

    async def leave(self, worker: int) -> None:
        await super().leave(worker)
        del self.made[worker]


class Observing(ParameterServerSGD):
    def _make_server(self) -> ModelServer:
        self.observed = Observed(self, self._staleness)
        return self.observed


def race(size: int, seed: int, staleness: int | None) -> Observed:
    """Workers of different speeds make different numbers of steps."""

    async def main(comm: asyncoll.Communicator) -> Observed | None:
        model, draw = scalar(), at_random(comm, seed)
        sgd = Observing(comm, model, torch.optim.SGD(model.parameters(), lr=1.0), staleness=staleness)
        await sgd.start()
        mean_s = draw.choice([0.1, 1.0, 5.0])
        for _ in range(draw.randrange(6)):
            await asyncio.sleep(draw.expovariate(1 / mean_s))
            model.weight.grad.fill_(1.0)
            await sgd.step()
        await sgd.finish()
        return sgd.observed if comm.rank == 0 else None

    observed = simulate(size, main, NETWORK, seed).results[0]
    assert isinstance(observed, Observed)
    return observed


def test_a_worker_is_never_more_than_the_bound_ahead_of_the_slowest_and_none_waits_for_ever() -> None:
    """A deadlock is an error in virtual time."""
    tight, beyond = [], []
    for seed in range(300):
        size, staleness = 2 + seed % 3, seed // 3 % 3
        with case(seed=seed):
            bounded = race(size, seed, staleness)
            assert max(bounded.ahead, default=0) <= staleness
            assert max(bounded.skipped, default=0) <= (size - 1) * (2 * staleness + 1)
            tight.append(max(bounded.ahead, default=0) == staleness)
    for seed in range(10):
        beyond.append(max(race(3, seed, None).ahead, default=0) > 2)
    assert sum(tight) > 150  # a smaller bound would be broken
    assert any(beyond)  # and so would this one without the option


def test_without_a_bound_staleness_is_that_of_the_others_updates() -> None:
    """Equal workers: in the long run each gradient has missed one of each other worker's updates."""

    async def main(comm: asyncoll.Communicator) -> list[int]:
        model, draw = scalar(), at_random(comm, 1)
        sgd = ParameterServerSGD(comm, model, torch.optim.SGD(model.parameters(), lr=1.0))
        await sgd.start()
        skipped = []
        for _ in range(200):
            await asyncio.sleep(1 + 0.1 * draw.random())
            model.weight.grad.fill_(1.0)
            reduction = await sgd.step()
            assert reduction is not None
            skipped.append(reduction.skipped)
        await sgd.finish()
        return skipped[20:180]

    of_all = [skipped for of_rank in simulate(5, main).results for skipped in of_rank]
    assert sum(of_all) / len(of_all) == pytest.approx(4, rel=0.02)


# -- the server beside a worker ------------------------------------------------------------------


@looped("transport", ["inproc", "shm"])
def test_the_server_answers_while_rank_0_computes_in_a_thread(transport: str) -> None:
    others_are_done = threading.Event()

    def compute(model: torch.nn.Module) -> torch.Tensor:
        before = parameters(model)
        assert others_are_done.wait(PATIENCE_S)
        assert torch.equal(parameters(model), before)  # updates go to the server's model
        loss(model, 0, 0).backward()
        return before

    async def main(comm: asyncoll.Communicator) -> int:
        model = network()
        sgd = ParameterServerSGD(comm, model, momentum(model))
        await sgd.start()
        if comm.rank == 0:
            before = await asyncoll.offload(compute, model)
            reduction = await sgd.step()
            assert not torch.equal(parameters(model), before)
        else:
            for step in range(5):
                loss(model, 1, step).backward()
                reduction = await sgd.step()
            others_are_done.set()
        await sgd.finish()
        assert reduction is not None
        return reduction.skipped

    assert run_ranks(2, main, transport) == [5, 0]


def test_the_optimizer_of_rank_0_is_the_programs_between_steps() -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        model = network()
        optimizer = momentum(model)
        sgd = ParameterServerSGD(comm, model, optimizer)
        for step in range(3):
            loss(model, comm.rank, step).backward()
            await sgd.step()
            held = [id(p) for group in optimizer.param_groups for p in group["params"]]
            assert held == [id(p) for p in model.parameters()]
            assert len(optimizer.state) == (4 if comm.rank == 0 else 0)
            assert set(optimizer.state) <= set(model.parameters())
        await sgd.finish()

    run_ranks(3, main)


# -- checkpoints ---------------------------------------------------------------------------------


def copied(state: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(state)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_alone_a_checkpoint_gives_the_bits_of_an_unbroken_run(trainer: str) -> None:
    def training(first: int, last: int, saved: list[Any] | None) -> Any:
        async def main(comm: asyncoll.Communicator) -> Any:
            model = network()
            optimizer = adam(model)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
            sgd = TRAINERS[trainer](comm, model, optimizer, scheduler=scheduler)
            parts = model, optimizer, scheduler, sgd
            for part, state in zip(parts, saved or [], strict=False):
                part.load_state_dict(state)
            await sgd.start()
            for step in range(first, last):
                loss(model, 0, step).backward()
                await sgd.step()
            states = [copied(part.state_dict()) for part in parts]
            await sgd.finish()
            return parameters(model), states

        return run_ranks(1, main)[0]

    unbroken, _ = training(0, 8, None)
    _, saved = training(0, 3, None)
    resumed, _ = training(3, 8, saved)
    assert torch.equal(unbroken, resumed)


@looped("size", [2, 3, 5])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_checkpoint_of_rank_0_is_the_servers_state_of_one_moment(trainer: str, size: int) -> None:
    async def first(comm: asyncoll.Communicator) -> Any:
        model, draw = network(), at_random(comm, size)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6, momentum=0.5)
        sgd = TRAINERS[trainer](comm, model, optimizer)
        await sgd.start()
        saved = []
        for step in range(6):
            await asyncio.sleep(draw.random())
            loss(model, comm.rank, step).backward()
            await sgd.step()
            if sgd._server is not None:
                assert torch.equal(sgd._flat.trainable, sgd._server.parameters)
            saved.append([copied(part.state_dict()) for part in (model, optimizer, sgd)])
        await sgd.finish()
        return saved

    saved = simulate(size, first, NETWORK).results
    for state in saved[0]:
        updates = state[2]["own"]["updates"]
        assert state[2]["round"] == updates // size

    for others_load in ("nothing", "rank 0's", "their own"):

        async def second(comm: asyncoll.Communicator, others_load: str = others_load) -> Any:
            model = network(comm.rank)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
            sgd = TRAINERS[trainer](comm, model, optimizer)
            loaded = saved[0][3] if comm.rank == 0 or others_load == "rank 0's" else saved[comm.rank][-1]
            if comm.rank == 0 or others_load != "nothing":
                for part, state in zip((model, optimizer, sgd), loaded, strict=True):
                    part.load_state_dict(state)
            await sgd.start()
            began = sgd.round, parameters(model), optimizer.param_groups[0]["lr"]
            for step in range(2):
                loss(model, comm.rank, step).backward()
                await sgd.step()
            await sgd.finish()
            return began, sgd.round

        model = network()
        model.load_state_dict(saved[0][3][0])
        state = saved[0][3][2]
        for rank, ((round_, began, rate), ended) in enumerate(run_ranks(size, second)):
            assert round_ == state["round"] or (rank == 0 and round_ > state["round"])  # others have begun before
            assert rate == 2.0**-6
            assert torch.equal(began, parameters(model))
            assert ended == (state["own"]["updates"] + 2 * size) // size


def test_the_checkpoint_of_a_worker_is_refused_at_the_server() -> None:
    async def main(comm: asyncoll.Communicator) -> Any:
        model = network()
        sgd = ParameterServerSGD(comm, model, momentum(model))
        for step in range(2):
            loss(model, comm.rank, step).backward()
            await sgd.step()
        state = sgd.state_dict()
        await sgd.finish()
        return state

    _, of_worker = run_ranks(2, main)

    async def resume(comm: asyncoll.Communicator) -> None:
        model = network()
        with pytest.raises(asyncoll.UsageError, match="algorithm 'ParameterServerSGD', and not 'DCASGD'"):
            DCASGD(comm, model, momentum(model)).load_state_dict(of_worker)
        ParameterServerSGD(comm, model, momentum(model)).load_state_dict(of_worker)

    with pytest.raises(asyncoll.UsageError, match="is that of another rank: load the one that rank 0 has saved"):
        run_ranks(2, resume)


def test_a_checkpoint_of_another_lambda_is_refused() -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        model = network()
        state = DCASGD(comm, model, momentum(model), adaptive=True).state_dict()
        with pytest.raises(asyncoll.UsageError, match="another kind of lambda"):
            DCASGD(comm, model, momentum(model)).load_state_dict(state)

    run_ranks(1, main)


# -- errors --------------------------------------------------------------------------------------


def outcomes(size: int, act: Callable[[asyncoll.Communicator, ParameterServerSGD], Any], **options: Any) -> list[str]:
    """The error of each rank in a world where every rank trains until `act` or a step raises."""
    raised: list[str] = [""] * size

    async def main(comm: asyncoll.Communicator) -> None:
        model = network()
        sgd = options.get("trainer", ParameterServerSGD)(comm, model, options.get("optimizing", momentum)(model))
        await sgd.start()
        try:
            for step in range(30):
                await asyncio.sleep(1 + 0.1 * comm.rank)
                loss(model, comm.rank, step).backward()
                await act(comm, sgd)
                await sgd.step()
        except (asyncoll.AsyncollError, asyncio.CancelledError) as error:
            raised[comm.rank] = f"{type(error).__name__}: {error}"
        await asyncio.sleep(100)  # no rank leaves before all have raised

    with contextlib.suppress(asyncoll.AsyncollError):  # whether a failed communicator can be left is another test
        simulate(size, main, NETWORK)
    return raised


def test_a_gradient_that_is_not_finite_names_its_rank_everywhere() -> None:
    async def act(comm: asyncoll.Communicator, sgd: ParameterServerSGD) -> None:
        if comm.rank == 2 and sgd.round == 3:
            next(p for p in sgd.model.parameters() if p.requires_grad).grad[0] = float("nan")
            try:
                await sgd.step()
            except asyncoll.NonFiniteError as error:
                comm.abort(str(error))  # as a program that ends does
                raise

    raised = outcomes(3, act)
    assert re.match(r"NonFiniteError: the gradient of rank 2 for round 4 holds NaN", raised[2])
    assert all(re.match(r"AbortedError: rank 2 aborted: the gradient of rank 2", raised[rank]) for rank in (0, 1))


class FailingError(Exception):
    pass


class Failing(torch.optim.SGD):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps == 7:
            raise FailingError("the optimizer is out of order")
        return super().step(closure)


def test_an_error_of_the_server_reaches_all_workers_with_its_cause() -> None:
    async def act(comm: asyncoll.Communicator, sgd: ParameterServerSGD) -> None:
        pass

    raised = outcomes(3, act, optimizing=Failing)
    assert sum(text.startswith("RemoteError: FailingError at rank 0: the optimizer is") for text in raised) == 1
    assert all("FailingError at rank 0: the optimizer is out of order" in text for text in raised)


def test_a_correction_that_overflows_is_an_error_that_changes_nothing() -> None:
    async def act(comm: asyncoll.Communicator, sgd: ParameterServerSGD) -> None:
        if comm.rank == 1:
            for parameter in sgd.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(1e20)

    raised = outcomes(2, act, trainer=DCASGD)
    expected = r"NonFiniteError at rank 0: update \d+, with the gradient of rank 1, holds NaN or infinity"
    assert all(re.search(expected, text) for text in raised)


@looped("victim", [0, 1])
def test_a_cancelled_step_ends_the_communicator(victim: int) -> None:
    async def act(comm: asyncoll.Communicator, sgd: ParameterServerSGD) -> None:
        if comm.rank == victim and sgd.round == 2:
            step = asyncio.ensure_future(sgd.step())
            await asyncio.sleep(0)
            step.cancel()
            await step

    raised = outcomes(3, act)
    assert raised[victim].startswith("CancelledError")
    others = [text for rank, text in enumerate(raised) if rank != victim]
    assert all(re.match(rf"AbortedError: rank {victim} aborted: a call of the parameter", text) for text in others)


@looped("victim, staleness", [(rank, bound) for rank in range(3) for bound in (None, 0)])
def test_a_lost_rank_is_an_error_at_the_others(victim: int, staleness: int | None) -> None:
    raised: dict[int, BaseException] = {}

    async def main(comm: asyncoll.Communicator) -> None:
        model = network()
        sgd = ParameterServerSGD(comm, model, momentum(model), staleness=staleness)
        await sgd.start()
        try:
            for step in range(100):
                await asyncio.sleep(1.0 + comm.rank)
                loss(model, comm.rank, step).backward()
                await sgd.step()
        except asyncoll.AsyncollError as error:
            raised[comm.rank] = error
        await asyncio.sleep(100)

    with contextlib.suppress(asyncoll.AsyncollError):
        simulate(3, main, Network(latency_s=1e-3, faults=(Crash(victim, at_s=20.5),)))
    assert sorted(raised) == [rank for rank in range(3) if rank != victim]
    assert all(isinstance(error, asyncoll.PeerLostError) and error.rank == victim for error in raised.values())


def test_impossible_arguments_are_refused() -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        model = network()
        for trainer, options, message in [
            (ParameterServerSGD, {"staleness": -1}, "staleness is a number of steps, at least 0, or None, not -1"),
            (ParameterServerSGD, {"name": "two words"}, "name is an identifier, not 'two words'"),
            (DCASGD, {"lambda0": -1.0}, "lambda0 is at least 0, not -1.0"),
            (DCASGD, {"lambda0": float("nan")}, "lambda0 is at least 0, not nan"),
            (DCASGD, {"decay": 1.0}, "decay is at least 0 and below 1, not 1.0"),
        ]:
            with pytest.raises(asyncoll.UsageError, match=re.escape(message)):
                trainer(comm, model, momentum(model), **options)
        sgd = ParameterServerSGD(comm, model, momentum(model))
        loss(model, 0, 0).backward()
        with pytest.raises(asyncoll.UsageError, match="applies each gradient alone"):
            await sgd.step(weight=3)
        await sgd.finish()
        with pytest.raises(asyncoll.UsageError, match="registered already"):
            await ParameterServerSGD(comm, model, momentum(model)).start()
        again = ParameterServerSGD(comm, model, momentum(model), name="again")
        await again.start()
        await again.finish()

    run_ranks(1, main)


@looped("trainer", TRAINERS)
def test_the_loss_falls(trainer: str) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[float, float]:
        model, draw = network(), at_random(comm, 0)
        sgd = TRAINERS[trainer](comm, model, torch.optim.SGD(model.parameters(), lr=0.2))
        await sgd.start()
        before, step = loss(model, 50, 0).item(), 0
        while sgd.round < 60:
            await asyncio.sleep(draw.random())
            loss(model, comm.rank, step).backward()
            await sgd.step()
            step += 1
        await sgd.finish()
        return before, loss(model, 50, 0).item()

    for before, after in simulate(3, main).results:
        assert after < 0.5 * before


# -- real processes ------------------------------------------------------------------------------


@pytest.mark.slow
def test_processes_end_with_one_model(forked_world: Callable[..., list[ForkedRank]]) -> None:
    lines = []
    for rank in forked_world(dict(os.environ), 3, SCRIPT):
        code, out, err = rank.end()
        assert code == 0, err
        lines += re.findall(r"model (\w+) after (\d+) rounds", out)
    assert len(lines) == 3
    assert len(set(lines)) == 1


@pytest.mark.slow
def test_a_killed_process_is_an_error_at_the_survivor(forked_world) -> None:
    """The ranks have no launcher, because it would stop the others soon after the first death."""
    ranks = forked_world(os.environ | {"ASYNCOLL_TRANSPORT": "shm"}, 2, SCRIPT, "1")
    (code, out, err), (killed, _, _) = [rank.end() for rank in ranks]
    assert (code, out) == (0, "rank 1 is lost\n"), err
    assert killed == -signal.SIGKILL
