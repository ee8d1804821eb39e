"""Ok-Topk SGD and its baselines: against synchronous SGD and by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import numpy as np
import pytest
import torch

import asyncoll
from asyncoll.testing import run_ranks
from asyncoll.training import AllreduceSGD, OkTopkSGD
from asyncoll.training import oktopk_sgd as module
from tests.support.cases import looped
from tests.support.training_loops import (
    Algorithm,
    Gradient,
    adam,
    loss,
    network,
    on_batches,
    parameters,
    plain,
    train,
    trained,
)
from trainers.workloads import Digits, DigitsWide

SIZES = [1, 2, 3, 4, 5]
METHODS = get_args(module.Algorithm)
RESIDUALS = get_args(module.Residual)
COMPLETE = [method for method in METHODS if method != "gaussiank"]  # at density 1; its threshold is above 0
Ranks = Callable[[int, Callable[[asyncoll.Communicator], Any]], list[Any]]


@pytest.fixture
def ranks(simulated: Callable[..., Any]) -> Ranks:
    """The results of the ranks, in virtual time."""
    return lambda size, main: simulated(size, main).results


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.9, weight_decay=1e-4)


def whole_numbers(comm: asyncoll.Communicator, model: torch.nn.Module) -> Gradient:
    """Gradients whose sums and products with the rate of `plain` are exact, in any order."""

    async def gradient(round_: int) -> None:
        draw = np.random.default_rng((comm.rank, round_))
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.add_(torch.from_numpy(draw.integers(-50, 51, tuple(parameter.shape)).astype("f4")))

    return gradient


def replicas(
    ranks: Ranks,
    size: int,
    algorithm: Algorithm,
    optimizing: Callable[[torch.nn.Module], torch.optim.Optimizer] = plain,
    gradients: Callable[..., Gradient] = on_batches,
    rounds: int = 6,
) -> list[torch.Tensor]:
    """The parameters at every rank, which are the same to the bit."""

    async def main(comm: asyncoll.Communicator) -> torch.Tensor:
        model = network()
        done = await trained(algorithm(comm, model, optimizing(model)), gradients(comm, model), rounds)
        assert [step.round for step in done] == list(range(1, rounds + 1))
        assert all(step.included and step.active == size for step in done)
        return parameters(model)

    models = ranks(size, main)
    assert all(torch.equal(model, models[0]) for model in models)
    return models


# -- algorithm 2 ----------------------------------------------------------------------------------


@looped("size", SIZES)
@pytest.mark.parametrize("algorithm", COMPLETE)
def test_at_full_density_it_is_synchronous_sgd(algorithm: str, size: int, ranks: Ranks) -> None:
    full = partial(OkTopkSGD, algorithm=algorithm, density=1.0, thresholds_every=1)
    synchronous = partial(replicas, ranks, size, AllreduceSGD)
    torch.testing.assert_close(replicas(ranks, size, full)[0], synchronous()[0], rtol=1e-5, atol=1e-6)
    exact = replicas(ranks, size, full, gradients=whole_numbers)
    assert torch.equal(exact[0], synchronous(gradients=whole_numbers)[0])


@looped("size", SIZES)
@pytest.mark.parametrize("algorithm", METHODS)
def test_replicas_are_equal_to_the_bit(algorithm: str, size: int, ranks: Ranks) -> None:
    rules: dict[str, Any] = {"density": 0.1, "thresholds_every": 3, "regions_every": 4, "residual": "gradients"}
    replicas(ranks, size, partial(OkTopkSGD, algorithm=algorithm, **rules), momentum, rounds=9)


@pytest.mark.parametrize("algorithm", METHODS)
def test_replicas_are_equal_over_real_memory_and_on_one_loop(algorithm: str, run: Ranks) -> None:
    replicas(run, 3, partial(OkTopkSGD, algorithm=algorithm, density=0.1))


def largest(x: Any, k: int) -> Any:
    kept = np.argsort(-np.abs(x), kind="stable")[:k]
    return np.where(np.isin(np.arange(x.size), kept), x, 0)


@pytest.mark.parametrize("residual", RESIDUALS)
def test_it_equals_the_papers_algorithm_by_hand(residual: str, ranks: Ranks) -> None:
    """Algorithm 2 by hand, in numpy and double precision, with changing rates; the authors' variant with momentum."""
    size, rounds, n, k, mu = 3, 12, 20, 4, 0.9
    gradients = np.random.default_rng(7).normal(size=(size, rounds, n))

    async def main(comm: asyncoll.Communicator) -> Any:
        model = torch.nn.Linear(n, 1, bias=False, dtype=torch.float64)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=mu if residual == "gradients" else 0.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda round_: 1 / (round_ + 1))

        async def gradient(round_: int) -> None:
            assert model.weight.grad is not None
            model.weight.grad.copy_(torch.from_numpy(gradients[comm.rank, round_ - 1]))

        sgd = OkTopkSGD(comm, model, optimizer, residual=residual, density=k / n, scheduler=scheduler)
        await trained(sgd, gradient, rounds)
        return parameters(model).numpy()

    w, velocity, residuals = np.zeros(n), np.zeros(n), np.zeros((size, n))
    for t in range(rounds):
        rate = 1 / (t + 1)
        residuals += gradients[:, t] * (rate if residual == "updates" else 1)
        chosen = np.array([largest(of_rank, k) for of_rank in residuals])
        u = largest(chosen.sum(axis=0), k)
        residuals[(chosen != 0) & (u != 0)] = 0
        velocity = mu * velocity + u / size
        w -= u / size if residual == "updates" else rate * velocity
    for result in ranks(size, main):
        np.testing.assert_allclose(result, w, rtol=1e-12)


class Witness:
    """A communicator that records the accumulators before and after its sparse allreduces."""

    def __init__(self, comm: asyncoll.Communicator) -> None:
        self._comm = comm
        self.before: list[torch.Tensor] = []
        self.after: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    async def sparse_allreduce(self, x: torch.Tensor, **options: Any) -> asyncoll.SparseReduction:
        self.before.append(x.clone())
        total = await self._comm.sparse_allreduce(x, **options)
        self.after.append(x.clone())
        return total


@looped("size", SIZES)
@pytest.mark.parametrize("algorithm", METHODS)
def test_nothing_is_lost_in_a_training(algorithm: str, size: int, ranks: Ranks) -> None:
    """All gradients = all applied results + all residuals, at every element, exactly, after every round."""
    rounds = 9

    async def main(comm: asyncoll.Communicator) -> tuple[Any, Any, Any, Any]:
        model, witness = network(), Witness(comm)
        applied = []

        def observe(round_: int, total: asyncoll.SparseReduction) -> None:
            assert round_ == len(applied) + 1
            u = torch.zeros(parameters(model).numel())
            u[total.indices.long()] = total.values
            lost = torch.zeros_like(u)
            lost[total.lost_indices.long()] = total.lost_values
            applied.append((u, lost))

        rules: dict[str, Any] = {"algorithm": algorithm, "density": 0.1, "thresholds_every": 4, "observe": observe}
        sgd = OkTopkSGD(witness, model, plain(model), **rules)  # type: ignore[arg-type]
        await trained(sgd, whole_numbers(comm, model), rounds)
        kept = [torch.zeros_like(witness.before[0]), *witness.after]
        given = [acc - residual for acc, residual in zip(witness.before, kept, strict=False)]
        return torch.stack(given), applied, torch.stack(kept[1:]), parameters(model)

    results = ranks(size, main)
    assert all(torch.equal(model, results[0][3]) for _, _, _, model in results)
    given = sum(given for given, _, _, _ in results)
    kept = sum(kept for _, _, kept, _ in results)
    for round_ in range(rounds):
        applied = sum(u for u, _ in results[0][1][: round_ + 1])
        lost = sum(lost for _, of_rank, _, _ in results for _, lost in of_rank[: round_ + 1])
        assert torch.equal(given[: round_ + 1].sum(dim=0), applied + lost + kept[round_])
        assert algorithm == "gtopk" or not torch.any(torch.as_tensor(lost))
        assert torch.any(kept[round_] != 0) == (algorithm != "dense")


# -- the authors' variant, and warm-up ------------------------------------------------------------


@looped("size", SIZES)
@pytest.mark.parametrize("optimizing", [momentum, adam])
def test_dense_gradients_are_synchronous_training_to_the_bit(optimizing: Any, size: int, ranks: Ranks) -> None:
    dense = partial(OkTopkSGD, algorithm="dense", residual="gradients")
    models = replicas(ranks, size, dense, optimizing)
    assert torch.equal(models[0], replicas(ranks, size, AllreduceSGD, optimizing)[0])


@looped("optimizing", [momentum, adam])
@pytest.mark.parametrize("algorithm", COMPLETE)
def test_one_rank_at_full_density_is_the_bare_optimizer_to_the_bit(algorithm: str, optimizing: Any) -> None:
    full = partial(OkTopkSGD, algorithm=algorithm, residual="gradients", density=1.0, thresholds_every=1)
    alone = replicas(run_ranks, 1, full, optimizing)[0]
    model = network()
    optimizer = optimizing(model)
    for round_ in range(1, 7):
        optimizer.zero_grad()
        loss(model, 0, round_).backward()
        optimizer.step()
    assert torch.equal(alone, parameters(model))


@looped("size", [1, 3, 4])
@pytest.mark.parametrize("residual", RESIDUALS)
def test_dense_rounds_come_first_and_leave_no_residual(residual: str, size: int, ranks: Ranks) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[list[torch.Tensor], list[int], list[torch.Tensor]]:
        model, witness = network(), Witness(comm)
        seen: list[int] = []
        sgd = OkTopkSGD(
            witness,  # type: ignore[arg-type]
            model,
            plain(model),
            residual=residual,
            warm_up=4,
            density=0.1,
            observe=lambda round_, total: seen.append(len(total.indices)),
        )
        return [parameters(model) async for _ in train(sgd, on_batches(comm, model), 7)], seen, witness.after

    dense = partial(OkTopkSGD, algorithm="dense", residual=residual)
    n = parameters(network()).numel()
    for models, seen, residuals in ranks(size, main):
        assert seen[:4] == [n] * 4
        assert max(seen[4:]) < n
        assert [bool(torch.any(residual)) for residual in residuals] == [False] * 4 + [True] * 3
        assert torch.equal(models[3], replicas(ranks, size, dense, rounds=4)[0])


def test_frozen_parameters_stay_and_the_others_learn(ranks: Ranks) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        model = network()
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.125)
        await trained(OkTopkSGD(comm, model, optimizer, density=0.2), on_batches(comm, model), 3)
        return parameters(model[0]), parameters(model[2])

    before = network()
    for frozen, learnt in ranks(3, main):
        assert torch.equal(frozen, parameters(before[0]))
        assert not torch.equal(learnt, parameters(before[2]))


# -- what makes no sense --------------------------------------------------------------------------


@looped(
    ("rules", "words"),
    [
        ({"algorithm": "best"}, "algorithm is one of oktopk, topka, .* not 'best'"),
        ({"residual": "all"}, "residual is one of updates, gradients, not 'all'"),
        ({"warm_up": -1}, "warm_up is a number of rounds, not -1"),
        ({"density": 0.0}, "density is above 0 and at most 1, not 0.0"),
        ({"clip_norm": 1.0}, "clip_norm needs a dense gradient: take residual='gradients'"),
    ],
)
def test_impossible_options_are_usage_errors(rules: dict[str, Any], words: str) -> None:
    with pytest.raises(asyncoll.UsageError, match=words):
        replicas(run_ranks, 2, partial(OkTopkSGD, **({"residual": "updates"} | rules)))


def tenth(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def only_one_layer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model[0].parameters(), lr=0.125)


@pytest.mark.parametrize("optimizing", [momentum, adam, only_one_layer])
@pytest.mark.parametrize("algorithm", ["oktopk", "dense"])
def test_updates_need_plain_sgd_of_all_parameters(algorithm: str, optimizing: Any) -> None:
    with pytest.raises(asyncoll.UsageError, match="residual='updates' is plain SGD on all trainable parameters"):
        replicas(run_ranks, 2, partial(OkTopkSGD, algorithm=algorithm, residual="updates"), optimizing)


@looped(
    ("optimizing", "options", "residual"),
    [
        (tenth, {}, "updates"),
        (momentum, {}, "gradients"),
        (adam, {}, "gradients"),
        (only_one_layer, {}, "gradients"),
        (tenth, {"clip_norm": 1.0}, "gradients"),
    ],
)
def test_the_residual_holds_updates_by_default_where_it_can(
    optimizing: Any, options: dict[str, Any], residual: str
) -> None:
    rules = {"density": 0.2, **options}
    given = replicas(run_ranks, 2, partial(OkTopkSGD, residual=residual, **rules), optimizing)
    assert torch.equal(replicas(run_ranks, 2, partial(OkTopkSGD, **rules), optimizing)[0], given[0])
    if residual == "updates":  # which products with this rate round in another way
        other = replicas(run_ranks, 2, partial(OkTopkSGD, residual="gradients", **rules), optimizing)
        assert not torch.equal(other[0], given[0])


def test_a_gradient_that_is_not_finite_is_an_error_at_every_rank(ranks: Ranks) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        model = network()
        before = model

        async def gradient(round_: int) -> None:
            nonlocal before
            before = parameters(model)
            await on_batches(comm, model)(round_)
            if round_ == 3 and comm.rank == 1:
                model[0].weight.grad[0, 0] = torch.nan

        with pytest.raises(asyncoll.NonFiniteError) as caught:
            await trained(OkTopkSGD(comm, model, plain(model), density=0.1), gradient, 5)
        assert caught.value.ranks == (1,)
        return before, parameters(model)

    for before, after in ranks(3, main):
        assert torch.equal(before, after)


# -- the workload ---------------------------------------------------------------------------------


def test_the_wide_network_has_a_million_parameters_and_the_same_digits() -> None:
    wide, narrow = DigitsWide(0, 4, 8, 0), Digits(0, 4, 8, 0)
    assert sum(p.numel() for p in wide.model.parameters()) == 1_045_450
    for mine, other in zip(wide.next_batch(), narrow.next_batch(), strict=True):
        assert torch.equal(mine, other)
