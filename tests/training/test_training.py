"""What all algorithms have in common: start, accumulation, weights, clipping, schedules, scaling, buffers, the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
)

import asyncoll
from asyncoll.testing import Network, run_ranks, simulate
from asyncoll.training import AllreduceSGD, EagerSGD, LocalSGD, OkTopkSGD, OverlappedSGD, Trainer, WagmaSGD
from asyncoll.training.eager_sgd import Partial
from tests.support.cases import looped
from tests.support.ranks import failures
from tests.support.training_loops import (
    ALGORITHMS,
    AT_OWN_PACE,
    DETERMINISTIC,
    Algorithm,
    Optimizing,
    adam,
    adamw,
    bits,
    loss,
    momentum,
    nesterov,
    network,
    on_batches,
    parameters,
    plain,
    state,
    straggle,
    trained,
    whole,
)

SIZES = [1, 2, 3, 4, 5]
ROUNDS = 8
OPTIMIZERS = [momentum, nesterov, adamw]
WHOLE_GRADIENTS: dict[str, Algorithm] = ALGORITHMS | {
    "sparse": partial(OkTopkSGD, density=1.0, residual="gradients"),  # at density 1 all elements are sent
}
AVERAGED_GRADIENTS: dict[str, Algorithm] = {
    "synchronous": AllreduceSGD,
    "overlapped": partial(OverlappedSGD, bucket_bytes=64),
    "eager, all": partial(EagerSGD, sync_every=1, history=1),
}
LOCAL_STEPS = ["dc_s3gd", "local", "dpsgd", "sgp", "sgp with overlap"]
EQUAL_REPLICAS: dict[str, Algorithm] = AVERAGED_GRADIENTS | {
    "sparse": DETERMINISTIC["sparse"],
    "eager with history": partial(EagerSGD, history=30),
}


def ranks(size: int, main: Callable[[asyncoll.Communicator], Any]) -> list[Any]:
    return simulate(size, main, Network(jitter_s=1e-3)).results


async def calls(sgd: Trainer, rounds: int, zero_grad: Callable[[str], None] = lambda place: None) -> None:
    """A loop whose batches follow its own calls, so that gradients are accumulated from different batches."""
    zero_grad("before start")
    await sgd.start()
    call = 0
    while sgd.round < rounds:
        call += 1
        zero_grad("before backward")
        loss(sgd.model, sgd.comm.rank, call).backward()
        await sgd.step()
        zero_grad("after step")
    await sgd.finish()


# -- one rank ------------------------------------------------------------------------------------


def alone(optimizing: Optimizing, accumulate: int, clip_norm: float | None, is_scheduled: bool) -> tuple[Any, ...]:
    """The training without this library."""
    model = network()
    optimizer = optimizing(model)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=ROUNDS + 1) if is_scheduled else None
    for round_ in range(ROUNDS):
        optimizer.zero_grad()
        for call in range(1, accumulate + 1):
            (loss(model, 0, round_ * accumulate + call) / accumulate).backward()
        if clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        if scheduler:
            scheduler.step()
    return whole(model), state(optimizer)


@looped("optimizing", OPTIMIZERS)
@looped(
    ("accumulate", "clip_norm", "is_scheduled"),
    [(1, None, False), (1, 0.05, False), (4, None, False), (1, None, True), (4, 0.05, True)],
)
@pytest.mark.parametrize("algorithm", WHOLE_GRADIENTS)
def test_one_rank_is_plain_training_to_the_bit(
    algorithm: str, optimizing: Optimizing, accumulate: int, clip_norm: float | None, is_scheduled: bool
) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[Any, ...]:
        model = network()
        optimizer = optimizing(model)
        scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=ROUNDS + 1) if is_scheduled else None
        options: dict[str, Any] = {"accumulate": accumulate, "clip_norm": clip_norm, "scheduler": scheduler}
        await calls(WHOLE_GRADIENTS[algorithm](comm, model, optimizer, **options), ROUNDS)
        return whole(model), state(optimizer)

    assert ranks(1, main)[0] == alone(optimizing, accumulate, clip_norm, is_scheduled)


# -- the gradient --------------------------------------------------------------------------------


def batches(rank: int, accumulate: int, lengths: Callable[[int], int]) -> list[Tensor]:
    draw = np.random.default_rng((7, rank))
    return [torch.from_numpy(draw.normal(size=(lengths(rank + call), 5))) for call in range(accumulate)]


def slope(model: nn.Module, x: Tensor) -> Tensor:
    """The mean loss of a batch; 0 for none."""
    result: Tensor = model(x).square().mean() if len(x) else model(torch.zeros(1, 5).double()).sum() * 0.0
    return result


@looped("size", SIZES)
@looped("accumulate", [1, 2, 3])
@looped(("is_weighted", "lengths"), [(False, lambda i: 3), (True, lambda i: 1 + 3 * i % 7), (True, lambda i: i % 3)])
@pytest.mark.parametrize("algorithm", AVERAGED_GRADIENTS)
def test_the_gradient_is_that_of_all_batches_together(
    algorithm: str, size: int, accumulate: int, is_weighted: bool, lengths: Callable[[int], int]
) -> None:
    """With weights for batches of different lengths, of which some have no samples."""
    if is_weighted and algorithm == "overlapped":
        return  # refuses weights

    async def main(comm: asyncoll.Communicator) -> Tensor:
        model = network().double()
        before = parameters(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sgd = AVERAGED_GRADIENTS[algorithm](comm, model, optimizer, accumulate=accumulate)
        await sgd.start()
        for x in batches(comm.rank, accumulate, lengths):
            slope(model, x).backward()
            reduction = await sgd.step(weight=float(len(x)) if is_weighted else None)
        assert reduction is not None
        assert (reduction.round, sgd.round) == (1, 1)
        await sgd.finish()
        return before - parameters(model)

    model = network().double()
    together = torch.cat([x for rank in range(size) for x in batches(rank, accumulate, lengths)])
    slope(model, together).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    for gradient in ranks(size, main):
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)


def test_an_end_that_fails_is_no_end() -> None:
    """A second call must not return as if all models were equal."""

    async def main(comm: asyncoll.Communicator) -> dict[str, bytes]:
        model = network()
        sgd = LocalSGD(comm, model, plain(model), every=5)
        await sgd.start()
        loss(model, comm.rank, 1).backward()
        await sgd.step()
        model.append(nn.Linear(3, 1))
        for _ in range(2):
            with pytest.raises(asyncoll.UsageError, match=r"the parameter 3.weight .* was added to the model"):
                await sgd.finish()
        del model[3]
        await sgd.finish()
        return whole(model)

    results = ranks(3, main)
    assert results == [results[0]] * 3


def test_calls_that_only_accumulate_send_nothing() -> None:
    async def main(comm: asyncoll.Communicator) -> list[bool]:
        model = network()
        sgd = AllreduceSGD(comm, model, plain(model), accumulate=3)
        await sgd.start()
        before = parameters(model)
        seen = []
        for call in range(1, 8):
            loss(model, comm.rank, call).backward()
            traffic = comm.statistics()
            reduction = await sgd.step()
            assert (reduction is None) == (traffic == comm.statistics()) == (sgd.round == (call - 1) // 3)
            seen.append(reduction is not None)
        after = parameters(model)
        await sgd.finish()
        assert torch.equal(after, parameters(model))  # the gradient of the last call is dropped
        assert not torch.equal(before, after)
        return seen

    assert ranks(3, main) == [[False, False, True, False, False, True, False]] * 3


@looped(("first", "second"), [(None, 2.0), (2.0, None)])
def test_weights_in_some_steps_only_are_a_usage_error(first: float | None, second: float | None) -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        model = network()
        sgd = AllreduceSGD(comm, model, plain(model))
        await sgd.step(weight=first)
        await sgd.step(weight=second)

    with pytest.raises(asyncoll.UsageError, match="give a weight in every step at every rank, or in none"):
        run_ranks(2, main)


@looped("weight", [-1.0, float("nan"), float("inf")])
def test_an_impossible_weight_is_a_usage_error(weight: float) -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        model = network()
        await AllreduceSGD(comm, model, plain(model)).step(weight=weight)

    with pytest.raises(asyncoll.UsageError, match=rf"a weight is a number of samples, at least 0, not {weight}"):
        run_ranks(2, main)


@looped("accumulate", [1, 3])
@looped("size", [1, 3])
@pytest.mark.parametrize("algorithm", ALGORITHMS | AT_OWN_PACE)
def test_zero_grad_in_any_place_of_the_loop_does_no_harm(algorithm: str, size: int, accumulate: int) -> None:
    def models(*places: str) -> list[dict[str, bytes]]:
        async def main(comm: asyncoll.Communicator) -> dict[str, bytes]:
            model = network()
            optimizer = momentum(model)
            sgd = (ALGORITHMS | AT_OWN_PACE)[algorithm](comm, model, optimizer, accumulate=accumulate)

            def zero_grad(place: str) -> None:
                if place in places:
                    optimizer.zero_grad()
                    assert all(parameter.grad is None for parameter in model.parameters())

            await calls(sgd, 4, zero_grad)
            return whole(model)

        return simulate(size, main).results

    plainly = models()
    for places in [("before start",), ("before backward",), ("after step",), ("before start", "after step")]:
        assert models(*places) == plainly, places


@pytest.mark.parametrize("algorithm", ALGORITHMS | AT_OWN_PACE | EQUAL_REPLICAS)
def test_a_first_step_that_is_cancelled_is_no_wrong_use_of_the_next(algorithm: str) -> None:
    """The next one begins the training, unless the cancellation has ended the communicator."""

    async def main(comm: asyncoll.Communicator, turns: int) -> None:
        model = network()
        sgd = (ALGORITHMS | AT_OWN_PACE | EQUAL_REPLICAS)[algorithm](comm, model, momentum(model))
        loss(model, comm.rank, 0).backward()
        step = asyncio.ensure_future(sgd.step())
        for _ in range(turns):
            await asyncio.sleep(0)
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        loss(model, comm.rank, 1).backward()
        with contextlib.suppress(asyncoll.AbortedError, asyncoll.PeerLostError):
            await sgd.step()
        sgd.discard()

    for turns in range(12):
        with contextlib.suppress(asyncoll.AbortedError):
            simulate(2, lambda comm, turns=turns: main(comm, turns))


@looped("set_to_none", [True, False])
@looped("accumulate", [1, 2])
def test_zero_grad_discards_the_gradients_of_no_step(accumulate: int, set_to_none: bool) -> None:
    def models(*, discards: bool) -> list[dict[str, bytes]]:
        async def main(comm: asyncoll.Communicator) -> dict[str, bytes]:
            model = network()
            optimizer = momentum(model)
            sgd = AllreduceSGD(comm, model, optimizer, accumulate=accumulate)
            await sgd.start()
            for call in range(3 * accumulate):
                if discards:
                    loss(model, comm.rank, 100 + call).backward()
                    optimizer.zero_grad(set_to_none=set_to_none)
                loss(model, comm.rank, call).backward()
                await sgd.step()
            await sgd.finish()
            return whole(model)

        return ranks(2, main)

    assert models(discards=True) == models(discards=False)


# -- clipping ------------------------------------------------------------------------------------


@looped("size", SIZES)
@pytest.mark.parametrize("algorithm", EQUAL_REPLICAS)
def test_clipping_leaves_all_replicas_equal_to_the_bit(algorithm: str, size: int) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[list[float], int, dict[str, bytes], str]:
        model = network()
        optimizer = momentum(model)
        norms: list[float] = []

        def measure(*_: Any) -> None:
            norms.append(float(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()))

        optimizer.register_step_pre_hook(measure)
        sgd = EQUAL_REPLICAS[algorithm](comm, model, optimizer, clip_norm=0.05)
        await trained(sgd, on_batches(comm, model), 6)
        return norms, sgd.round, whole(model), state(optimizer)

    results = ranks(size, main)
    assert all(result == results[0] for result in results)
    norms, round_ = results[0][:2]
    assert len(norms) == round_ >= 6
    assert max(norms) == pytest.approx(0.05, rel=1e-4)  # it was clipped


@looped("size", SIZES)
def test_the_averaged_gradient_is_clipped_and_not_the_parts_of_the_average(size: int) -> None:
    async def main(comm: asyncoll.Communicator) -> Tensor:
        model = network()
        before = parameters(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        await trained(AllreduceSGD(comm, model, optimizer, clip_norm=0.01), on_batches(comm, model), 1)
        return before - parameters(model)

    model = network()
    for rank in range(size):
        (loss(model, rank, 1) / size).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    for step in ranks(size, main):
        torch.testing.assert_close(step, expected, rtol=1e-3, atol=1e-7)


# -- schedules -----------------------------------------------------------------------------------


@looped("size", [1, 2, 4])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_schedule_follows_rounds_also_those_that_a_rank_skips(algorithm: str, size: int) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[int, int, list[float], int]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = LambdaLR(optimizer, lambda round_: 1 / (1 + round_))
        sgd = ALGORITHMS[algorithm](comm, model, optimizer, scheduler=scheduler)
        steps = 0

        def check(*_: Any) -> None:
            nonlocal steps
            steps += 1
            assert optimizer.param_groups[0]["lr"] == 1 / (1 + sgd.round)  # a step of round 1 has the first rate

        optimizer.register_step_pre_hook(check)

        async def gradient(round_: int) -> None:
            loss(model, comm.rank, round_).backward()
            await asyncio.sleep(straggle(size, comm, round_))

        await trained(sgd, gradient, 16)
        assert scheduler.last_epoch == 16  # and not for the round that `finish` makes
        return sgd.round, steps, scheduler.get_last_lr(), comm.rank

    results = ranks(size, main)
    assert len({round_ for round_, _, _, _ in results}) == 1
    assert all(rates == results[0][2] for _, _, rates, _ in results)
    if algorithm == "eager" and size == 4:
        assert min(steps for _, steps, _, _ in results) < results[0][0]  # a rank has skipped rounds


FIXED_LENGTHS: dict[str, Callable[[torch.optim.Optimizer, int], LRScheduler]] = {
    "one cycle": lambda optimizer, rounds: OneCycleLR(optimizer, max_lr=0.1, total_steps=rounds),  # raises after them
    "polynomial": lambda optimizer, rounds: PolynomialLR(optimizer, rounds),
    "cosine": lambda optimizer, rounds: CosineAnnealingLR(optimizer, rounds),  # rises again after them
    "sequence": lambda optimizer, rounds: SequentialLR(
        optimizer,
        [LinearLR(optimizer, 0.1, total_iters=2), OneCycleLR(optimizer, max_lr=0.1, total_steps=rounds - 2)],
        [2],
    ),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # a worker of a server steps no optimizer
@pytest.mark.parametrize("schedule", FIXED_LENGTHS)
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, *AT_OWN_PACE])
def test_a_schedule_as_long_as_the_loop_passes_its_end(algorithm: str, schedule: str) -> None:
    """The last rank is late, so that its gradient is staged where the loop ends, and `finish` makes a round for it."""
    rounds = 9

    async def main(comm: asyncoll.Communicator) -> tuple[int, int]:
        model = network()
        scheduler = FIXED_LENGTHS[schedule](optimizer := plain(model), rounds)
        sgd = (ALGORITHMS | AT_OWN_PACE)[algorithm](comm, model, optimizer, scheduler=scheduler)

        async def gradient(round_: int) -> None:
            loss(model, comm.rank, round_).backward()
            await asyncio.sleep(1 + 1.5 * (comm.rank == comm.size - 1))

        await trained(sgd, gradient, rounds)
        return sgd.round, scheduler.last_epoch

    ends = ranks(3, main)
    assert {last for _, last in ends} == {rounds}
    assert (rounds + 1 in {round_ for round_, _ in ends}) == algorithm.startswith("eager")


# -- synchronous rounds --------------------------------------------------------------------------


@pytest.mark.parametrize("begin", [0, 1, 5, 8])
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize(
    "algorithm",
    [
        *(partial(EagerSGD, partial=kind, history=history) for kind in get_args(Partial) for history in (0, 9)),
        partial(WagmaSGD, group_size=1),
        partial(WagmaSGD, fixed=True),
    ],
)
def test_synchronous_rounds_are_multiples_before_and_after_a_checkpoint(
    algorithm: Algorithm, size: int, begin: int
) -> None:
    async def main(comm: asyncoll.Communicator) -> list[int]:
        model = network()
        sgd = algorithm(comm, model, plain(model), sync_every=4)
        sgd.load_state_dict({**sgd.state_dict(), "round": begin})

        async def gradient(round_: int) -> None:
            loss(model, comm.rank, round_).backward()
            await asyncio.sleep(straggle(size, comm, round_))

        return [done.round for done in await trained(sgd, gradient, 20) if done.synchronous]

    assert ranks(size, main) == [[round_ for round_ in (4, 8, 12, 16, 20) if round_ > begin]] * size


# -- scaling -------------------------------------------------------------------------------------


@looped("optimizing", [momentum, adam])
@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS | AT_OWN_PACE if name not in ("sparse", "dc_asgd")])
def test_at_one_rank_an_overflow_is_a_step_that_is_not_taken(algorithm: str, optimizing: Optimizing) -> None:
    def scale_of(step: int) -> float:
        return torch.inf if step == 3 else 1.0

    async def main(comm: asyncoll.Communicator) -> tuple[dict[str, bytes], float]:
        model = network()
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1000)
        sgd = (ALGORITHMS | AT_OWN_PACE)[algorithm](comm, model, optimizing(model), scaler=scaler)

        async def gradient(round_: int) -> None:
            (scaler.scale(loss(model, comm.rank, round_)) * scale_of(round_)).backward()

        await trained(sgd, gradient, 5)
        return whole(model), scaler.get_scale()

    model = network()
    optimizer, scaler = optimizing(model), torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1000)
    for step in range(1, 6):
        optimizer.zero_grad()
        (scaler.scale(loss(model, 0, step)) * scale_of(step)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert ranks(1, main) == [(whole(model), scaler.get_scale())]


@looped("size", [2, 3])
@pytest.mark.parametrize("algorithm", ["synchronous", "eager, all", "sparse"])
def test_a_gradient_that_overflows_counts_as_zeros_and_lowers_the_scale_of_its_rank(algorithm: str, size: int) -> None:
    late = size - 1

    def models(is_scaled: bool) -> list[tuple[dict[str, bytes], float]]:
        async def main(comm: asyncoll.Communicator) -> tuple[dict[str, bytes], float]:
            model = network()
            scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1000, enabled=is_scaled)
            sgd = (EQUAL_REPLICAS | ALGORITHMS)[algorithm](comm, model, momentum(model), scaler=scaler)

            async def gradient(round_: int) -> None:
                overflow = comm.rank == late and round_ == 3
                factor = (torch.inf if is_scaled else 0.0) if overflow else 1.0
                (scaler.scale(loss(model, comm.rank, round_)) * factor).backward()

            await trained(sgd, gradient, 5)
            return whole(model), scaler.get_scale()

        return ranks(size, main)

    scaled, plainly = models(is_scaled=True), models(is_scaled=False)
    assert [model for model, _ in scaled] == [model for model, _ in plainly]
    assert [scale for _, scale in scaled] == [16.0] * late + [8.0]


def test_overlapped_gradients_have_one_scale_at_all_ranks() -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[dict[str, bytes], float]:
        model = network()
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1000)
        sgd = OverlappedSGD(comm, model, momentum(model), scaler=scaler, bucket_bytes=64)

        async def gradient(round_: int) -> None:
            factor = torch.inf if comm.rank == 1 and round_ == 3 else 1.0
            (scaler.scale(loss(model, comm.rank, round_)) * factor).backward()

        await trained(sgd, gradient, 5)
        assert torch.isfinite(parameters(model)).all()
        return whole(model), scaler.get_scale()

    results = ranks(3, main)
    assert results == [(results[0][0], 8.0)] * 3


# -- buffers -------------------------------------------------------------------------------------


AVERAGES: dict[str, Algorithm] = AVERAGED_GRADIENTS | {
    "sparse": DETERMINISTIC["sparse"],
    "eager with averages": partial(EagerSGD, sync_every=1, average_every=1),
    "wagma": partial(WagmaSGD, sync_every=1),
    "local": partial(LocalSGD, every=1),
}  # in each step


def with_statistics() -> nn.Sequential:
    model = network()
    model.insert(1, nn.BatchNorm1d(8))
    return model


@pytest.mark.parametrize("buffers", ["broadcast", "average", "local"])
@pytest.mark.parametrize("algorithm", AVERAGES)
def test_buffers_are_treated_as_the_option_says(algorithm: str, buffers: str) -> None:
    """In each round that makes the models equal, and at the end."""
    size = 3

    async def main(comm: asyncoll.Communicator) -> list[list[Tensor]]:
        model = with_statistics()
        sgd = AVERAGES[algorithm](comm, model, plain(model), buffers=buffers)
        await sgd.start()
        seen = []
        for round_ in range(1, 4):
            for _ in range(comm.rank + 1):  # so that the counts differ, too
                model(torch.full((2, 5), float(comm.rank)) + torch.randn(2, 5))
            loss(model, comm.rank, round_).backward()
            seen.append([buffer.clone() for buffer in model.buffers()])
            reduction = await sgd.step()
            assert reduction is not None
            assert reduction.active == size
            seen.append([buffer.clone() for buffer in model.buffers()])
        await sgd.finish()
        seen.append([buffer.clone() for buffer in model.buffers()])
        return seen

    seen = list(zip(*ranks(size, main), strict=True))  # by moment, then by rank: mean, variance, count
    for before, after in [*zip(seen[:-1:2], seen[1:-1:2], strict=True), (seen[-2], seen[-1])]:
        kind = "broadcast" if buffers == "local" and after is seen[-1] else buffers
        for rank in range(size):
            for index, own in enumerate(after[rank]):
                if kind == "local":
                    assert torch.equal(own, before[rank][index])
                elif kind == "broadcast" or not own.is_floating_point():
                    assert torch.equal(own, before[0][index])
                else:
                    assert torch.equal(own, after[0][index])
                    mean = torch.stack([each[index] for each in before]).mean(dim=0)
                    torch.testing.assert_close(own, mean)


# -- the start -----------------------------------------------------------------------------------


@looped("size", [2, 3])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_different_first_models_need_a_start(algorithm: str, size: int) -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        model = network(seed=comm.rank)
        loss(model, comm.rank, 1).backward()
        await ALGORITHMS[algorithm](comm, model, momentum(model)).step()

    words = r"the model of rank \d was not the one .* await start\(\) before the first backward\(\), or build"
    with pytest.raises(asyncoll.UsageError, match=words):
        run_ranks(size, main)


@pytest.mark.parametrize("algorithm", DETERMINISTIC)
def test_a_start_makes_different_first_models_equal(algorithm: str) -> None:
    def models(seed: Callable[[int], int]) -> list[dict[str, bytes]]:
        async def main(comm: asyncoll.Communicator) -> dict[str, bytes]:
            model = network(seed=seed(comm.rank))
            await trained(DETERMINISTIC[algorithm](comm, model, momentum(model)), on_batches(comm, model), 3)
            return whole(model)

        return ranks(3, main)

    assert models(lambda rank: 1 + rank) == models(lambda rank: 1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_without_a_start_the_first_step_starts_and_loses_no_gradient(algorithm: str) -> None:
    def models(does_start: bool) -> list[dict[str, bytes]]:
        async def main(comm: asyncoll.Communicator) -> dict[str, bytes]:
            model = network()
            sgd = ALGORITHMS[algorithm](comm, model, momentum(model))
            if does_start:
                await sgd.start()
                await sgd.start()  # without effect
            for round_ in (1, 2, 3):
                loss(model, comm.rank, round_).backward()
                await sgd.step()
            await sgd.finish()
            return whole(model)

        return simulate(3, main).results

    assert models(does_start=True) == models(does_start=False)


# -- the end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_training_ends_once(algorithm: str, steps: int) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[dict[str, bytes], float]:
        model = network(seed=comm.rank)
        sgd = ALGORITHMS[algorithm](comm, model, momentum(model))
        if steps:
            await trained(sgd, on_batches(comm, model), steps)
        elif "eager" in algorithm or "wagma" in algorithm:  # rounds of the others might wait for this rank
            with pytest.raises(asyncoll.UsageError, match="ends the training without a step"):
                await sgd.finish()
            return {}, float(await comm.allreduce(torch.ones(1)))
        await sgd.finish()
        await sgd.finish()  # without effect
        ended = whole(model)
        loss(model, comm.rank, 1).backward()
        with pytest.raises(asyncoll.UsageError, match="the training has ended: make a new trainer"):
            await sgd.step()
        assert whole(model) == ended
        return ended, float(await comm.allreduce(torch.ones(1)))

    results = ranks(3, main)
    assert results == [(results[0][0], 3.0)] * 3


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_second_training_goes_on_from_the_first(algorithm: str) -> None:
    name = {"name": "second"} if "eager" in algorithm or "wagma" in algorithm or algorithm == "sparse" else {}

    async def main(comm: asyncoll.Communicator) -> list[bytes]:
        model = network()
        optimizer = momentum(model)
        after = []
        for options in ({}, name):
            sgd = ALGORITHMS[algorithm](comm, model, optimizer, **options)
            assert sgd.round == 0
            await trained(sgd, on_batches(comm, model), 4)
            after.append(bits(parameters(model)))
        return after

    results = ranks(3, main)
    assert all(result == results[0] for result in results)
    assert len(set(results[0])) == 2


# -- errors --------------------------------------------------------------------------------------


@looped(
    ("options", "words"),
    [
        ({"clip_norm": 0.0}, "clip_norm is a norm above 0, or None, not 0.0"),
        ({"clip_norm": float("nan")}, "clip_norm is a norm above 0, or None, not nan"),
        ({"accumulate": 0}, "accumulate is a number of backward passes, at least 1, not 0"),
        ({"buffers": "none"}, "buffers is one of broadcast, average, local, not 'none'"),
    ],
)
def test_impossible_options_are_usage_errors(options: dict[str, Any], words: str) -> None:
    check_refused(options, words)


@looped(
    ("scheduler", "words"),
    [
        (lambda: ReduceLROnPlateau(plain(network())), "ReduceLROnPlateau needs a metric"),
        (lambda: LambdaLR(plain(network()), lambda round_: 1.0), "the scheduler belongs to another optimizer"),
    ],
)
def test_impossible_schedulers_are_usage_errors(scheduler: Callable[[], Any], words: str) -> None:
    check_refused({"scheduler": scheduler()}, words)


def check_refused(options: dict[str, Any], words: str) -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        model = network()
        AllreduceSGD(comm, model, plain(model), **options)

    with pytest.raises(asyncoll.UsageError, match=words):
        run_ranks(1, main)


@pytest.mark.parametrize("algorithm", ["synchronous", *LOCAL_STEPS, "eager with history", "wagma"])
def test_a_loss_that_is_nan_names_its_step_and_its_rank_everywhere(algorithm: str) -> None:
    def run(size: int, main: Callable[[asyncoll.Communicator], Any]) -> None:
        simulate(size, main)

    models: dict[int, bool] = {}

    async def act(comm: asyncoll.Communicator) -> None:
        model = network()
        sgd = ALGORITHMS[algorithm](comm, model, momentum(model))

        async def gradient(round_: int) -> None:
            factor = torch.nan if comm.rank == 1 and round_ >= 3 else 1.0
            (loss(model, comm.rank, round_) * factor).backward()

        try:
            await trained(sgd, gradient, 50)
        except asyncoll.NonFiniteError as error:
            comm.abort(str(error))  # as at the end of a process
            raise
        finally:
            models[comm.rank] = bool(torch.isfinite(parameters(model)).all())

    raised = failures(3, act, run)
    own = raised[1]
    assert isinstance(own, asyncoll.NonFiniteError)
    assert own.ranks == (1,)
    words = r"the gradient of rank 1 for round \d+ holds NaN or infinity: look at the loss"
    for rank in range(3):
        with pytest.raises(asyncoll.AsyncollError, match=words):
            raise raised[rank]
    assert all(isinstance(raised[rank], asyncoll.AbortedError) and raised[rank].rank == 1 for rank in (0, 2))
    assert models == {0: True, 1: True, 2: True}


def test_a_parameter_that_is_added_to_the_model_is_an_error_before_anything_is_sent() -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        model = network()
        sgd = AllreduceSGD(comm, model, plain(model))
        await sgd.start()
        model.append(nn.Linear(3, 1))
        loss(model, comm.rank, 1).backward()
        await sgd.step()

    with pytest.raises(asyncoll.UsageError, match=r"the parameter 3.weight .* was added to the model"):
        run_ranks(2, main)
