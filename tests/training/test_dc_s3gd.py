"""DC-S3GD: against the paper's algorithm by hand, its correction, and its overlap."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

import asyncoll
from asyncoll.testing import Network, run_ranks, simulate
from asyncoll.training import DCS3GD, AllreduceSGD
from asyncoll.training.dc_s3gd import add_on_device, compensate
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
    trained,
)

OPTIMIZERS = [momentum, adam]


@pytest.mark.parametrize("optimizing", OPTIMIZERS)
@looped("size", [2, 3, 4, 5])
def test_every_rank_steps_from_the_same_average_to_the_bit(size: int, optimizing: Optimizing) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[list[bytes], bytes]:
        workload = Digits(comm.rank, comm.size, batch=8, seed=0)
        optimizer = optimizing(workload.model)
        averages: list[bytes] = []
        optimizer.register_step_pre_hook(lambda *_: averages.append(parameters(workload.model).numpy().tobytes()))

        async def gradient(round_: int) -> None:
            workload.loss().backward()
            await asyncio.sleep(straggle(size, comm, round_))

        done = await trained(DCS3GD(comm, workload.model, optimizer), gradient, 10)
        assert [step.round for step in done] == list(range(2, 11))  # the first step has no average to take
        assert all(step.group == tuple(range(size)) and step.active == size for step in done)
        return averages, parameters(workload.model).numpy().tobytes()

    results = simulate(size, main, Network(jitter_s=1e-3)).results
    assert len(results[0][0]) == len(set(results[0][0])) == 10
    assert all(result == results[0] for result in results)


@looped("lambda0", [0.0, 0.2])
def test_dc_s3gd_equals_the_papers_algorithm_by_hand(lambda0: float) -> None:
    """Algorithm 1 by hand, in numpy and double precision, for two ranks that fit a line with momentum."""
    rounds, rate, mu = 15, 0.05, 0.9
    points = np.random.default_rng(3).normal(size=(2, rounds, 4, 3))

    def slope(w: Any, x: Any) -> Any:
        return 2 * x.T @ (x @ w - x.sum(axis=1)) / len(x)

    async def main(comm: asyncoll.Communicator) -> Any:
        model = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=mu)

        async def gradient(round_: int) -> None:
            x = torch.from_numpy(points[comm.rank, round_ - 1])
            torch.nn.functional.mse_loss(model(x)[:, 0], x.sum(dim=1)).backward()

        await trained(DCS3GD(comm, model, optimizer, lambda0=lambda0), gradient, rounds)
        return parameters(model).numpy()

    mean = np.zeros(3)
    velocity = [slope(mean, points[rank, 0]) for rank in range(2)]
    steps = [-rate * v for v in velocity]
    w = [mean + step for step in steps]
    for t in range(1, rounds):
        g = [slope(w[rank], points[rank, t]) for rank in range(2)]
        for rank in range(2):
            distance = sum(steps) / 2 - steps[rank]
            raw = g[rank] * g[rank] * distance
            g[rank] = g[rank] + lambda0 * np.linalg.norm(g[rank]) / np.linalg.norm(raw) * raw
        mean = mean + sum(steps) / 2
        velocity = [mu * v + g[rank] for rank, v in enumerate(velocity)]
        steps = [-rate * v for v in velocity]
        w = [mean + step for step in steps]
    for result in run_ranks(2, main):
        np.testing.assert_allclose(result, (w[0] + w[1]) / 2, rtol=1e-10)


def test_the_correction_is_a_fixed_share_of_the_gradient() -> None:
    g, distance = torch.tensor([3.0, -4.0]), torch.tensor([0.5, 0.25])
    raw = np.array([9 * 0.5, 16 * 0.25])
    compensate(g, distance, lambda0=0.2)
    np.testing.assert_allclose(g.numpy(), [3.0, -4.0] + 0.2 * 5.0 / np.linalg.norm(raw) * raw, rtol=1e-6)


@looped(
    ("gradient", "distance"),
    [([1.0, 2.0], [0.0, 0.0]), ([0.0, 0.0], [1.0, 1.0]), ([1.0, 0.0], [0.0, 1.0]), ([1e30, 1.0], [1.0, 1.0])],
)
def test_nothing_is_corrected_without_a_direction(gradient: list[float], distance: list[float]) -> None:
    g = torch.tensor(gradient)
    compensate(g, torch.tensor(distance), lambda0=0.2)
    assert torch.equal(g, torch.tensor(gradient))


def test_small_gradients_are_corrected_as_large_ones_are() -> None:
    large, small = torch.tensor([3.0, -4.0]), torch.tensor([3e-10, -4e-10])
    compensate(large, torch.tensor([1.0, 2.0]), lambda0=0.2)
    compensate(small, torch.tensor([1e-10, 2e-10]), lambda0=0.2)
    torch.testing.assert_close(small * 1e10, large)


def test_the_correction_is_one_step_for_all_pieces_of_a_large_model() -> None:
    before = torch.cat([torch.full((3 << 19,), 2.0), torch.full((1 << 20,), -1.0)])
    g, distance = before.clone(), torch.full_like(before, 1e-3)
    compensate(g, distance, lambda0=0.2)
    added, whole = ((x.double() ** 2).sum().sqrt() for x in (g - before, before))
    assert float(added / whole) == pytest.approx(0.2, rel=1e-3)
    assert float((g - before)[0] / (g - before)[-1]) == pytest.approx(4.0, rel=1e-4)  # as g∘g∘D


@looped("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_device_corrects_as_the_host(dtype: torch.dtype) -> None:
    draw = np.random.default_rng(0)
    for scale in (1.0, 1e-30, 0.0, float("inf")):
        g = torch.from_numpy(draw.standard_normal(1000)).to(dtype)
        distance = torch.from_numpy(scale * draw.standard_normal(1000)).to(dtype)
        on_host, on_device = g.clone(), g.clone()
        compensate(on_host, distance.clone(), lambda0=0.2)
        add_on_device(on_device, distance * g * g, lambda0=0.2)
        torch.testing.assert_close(on_device, on_host)


def test_a_correction_waits_for_no_device() -> None:
    """Tensors of "meta" have no values to wait for."""
    g, distance = (torch.ones(3, device="meta") for _ in range(2))
    compensate(g, distance, lambda0=0.2)


def test_the_allreduce_overlaps_the_gradient() -> None:
    """Iterations take max(compute, allreduce) and not their sum (equation 14), in virtual time."""
    rounds, compute_s = 20, 1.0

    def measure(algorithm: Algorithm, compute_s: float) -> float:
        async def main(comm: asyncoll.Communicator) -> None:
            model = torch.nn.Linear(250, 10)

            async def gradient(round_: int) -> None:
                await asyncio.sleep(compute_s)

            await trained(algorithm(comm, model, momentum(model)), gradient, rounds)

        return simulate(4, main, Network(bandwidth_bytes_per_s=20e3)).virtual_s

    sending_s = measure(AllreduceSGD, 0.0) / (rounds + 1)  # the broadcast at the start is about one more
    assert 0.5 < sending_s / compute_s < 2.0
    ideal_s = rounds * max(sending_s, compute_s) + 2 * sending_s
    assert measure(DCS3GD, compute_s) == pytest.approx(ideal_s, rel=0.1)
    assert measure(AllreduceSGD, compute_s) == pytest.approx((rounds + 1) * sending_s + rounds * compute_s, rel=0.1)


class TroubleError(Exception):
    """An exception of a user's gradient."""


@pytest.mark.parametrize("how", ["raise", "cancel", "stop"])
@pytest.mark.parametrize("is_ended", [True, False])
def test_the_next_collective_is_correct_however_the_training_ends(is_ended: bool, how: str) -> None:
    """An average is under way between two steps. The program may end the training, or leave it as it is."""

    async def main(comm: asyncoll.Communicator) -> tuple[bytes, float]:
        model = torch.nn.Linear(3, 1)
        sgd = DCS3GD(comm, model, momentum(model))

        async def train() -> None:
            await sgd.start()
            while not (how == "stop" and sgd.round == 4):
                model(torch.full((1, 3), 1.0 + comm.rank)).sum().backward()
                if how == "raise" and sgd.round == 3:
                    raise TroubleError
                await asyncio.sleep(1.0)
                await sgd.step()

        task = asyncio.ensure_future(train())
        if how == "cancel":
            await asyncio.sleep(3.5 + 0.1 * comm.rank)  # in the gradient of the same round at all ranks
            task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(outcome, {"raise": TroubleError, "cancel": asyncio.CancelledError, "stop": type(None)}[how])
        if is_ended:
            await sgd.finish()
        else:
            sgd.discard()
        return bits(parameters(model)), float(await comm.allreduce(torch.ones(1)))

    results = simulate(3, main).results
    assert [total for _, total in results] == [3.0] * 3
    assert len({model for model, _ in results}) == (1 if is_ended else 3)


@pytest.mark.parametrize(
    ("rules", "weight", "words"),
    [
        ({"lambda0": -0.1}, None, "lambda0 is a share of the gradient, at least 0, not -0.1"),
        ({"lambda0": float("inf")}, None, "lambda0 is .* not inf"),
        ({"lambda0": float("nan")}, None, "lambda0 is .* not nan"),
        ({}, 2.0, "DCS3GD takes no weight: it averages models"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(rules: dict[str, Any], weight: float | None, words: str) -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        model = torch.nn.Linear(3, 1)
        await DCS3GD(comm, model, momentum(model), **rules).step(weight=weight)

    with pytest.raises(asyncoll.UsageError, match=words):
        run_ranks(2, main)
