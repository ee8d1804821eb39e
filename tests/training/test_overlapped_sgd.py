"""Allreduces that overlap `backward()`: against synchronous SGD, to the bit."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import backend_registration

import asyncoll
from asyncoll.testing import run_ranks
from asyncoll.testing.devices.fake import Hazard
from asyncoll.training import AllreduceSGD, OverlappedSGD
from asyncoll.training.device_hooks import GradientStreams, compute_here
from asyncoll.training.overlapped_sgd import Bucket, cut
from tests.support.cases import looped
from tests.support.emulated_cuda import emulated_cuda
from tests.support.places import SCRIPTS
from tests.support.training_loops import Algorithm, loss, network, on_batches, parameters, plain, trained

SIZES = [1, 2, 3, 4, 5]
Ranks = Callable[[int, Callable[[asyncoll.Communicator], Any]], list[Any]]


@pytest.fixture
def ranks(simulated: Callable[..., Any]) -> Ranks:
    """The results of the ranks, in virtual time."""
    return lambda size, main: simulated(size, main).results


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.9, weight_decay=1e-4)


def replicas(ranks: Ranks, size: int, algorithm: Algorithm) -> list[torch.Tensor]:
    """The parameters at every rank, which are the same to the bit."""

    async def main(comm: asyncoll.Communicator) -> torch.Tensor:
        model = network()
        done = await trained(algorithm(comm, model, momentum(model)), on_batches(comm, model), 6)
        assert [step.round for step in done] == list(range(1, 7))
        assert all(step.included and step.active == size for step in done)
        return parameters(model)

    models = ranks(size, main)
    assert all(torch.equal(model, models[0]) for model in models)
    return models


@looped("size", SIZES)
@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
def test_overlapped_training_is_synchronous_training_to_the_bit(bucket_bytes: int, size: int, ranks: Ranks) -> None:
    overlapped = replicas(ranks, size, partial(OverlappedSGD, bucket_bytes=bucket_bytes))
    assert torch.equal(overlapped[0], replicas(ranks, size, AllreduceSGD)[0])


def test_overlapped_training_over_real_memory_and_on_one_loop(run: Ranks) -> None:
    overlapped = replicas(run, 3, partial(OverlappedSGD, bucket_bytes=1))
    assert torch.equal(overlapped[0], replicas(run, 3, AllreduceSGD)[0])


@looped(
    ("sizes", "least", "buckets"),
    [
        ([3, 4, 5], 1, [Bucket(7, 12, 1), Bucket(3, 7, 1), Bucket(0, 3, 1)]),
        ([3, 4, 5], 6, [Bucket(3, 12, 2), Bucket(0, 3, 1)]),
        ([3, 4, 5], 9, [Bucket(3, 12, 2), Bucket(0, 3, 1)]),
        ([3, 4, 5], 100, [Bucket(0, 12, 3)]),
        ([100, 1], 8, [Bucket(0, 101, 2)]),
        ([], 8, []),
    ],
)
def test_buckets_are_slices_from_the_end_to_the_beginning(sizes: list[int], least: int, buckets: list[Bucket]) -> None:
    assert cut(sizes, least) == buckets


class Recorder:
    """A communicator that records the number of elements of its averages."""

    def __init__(self, comm: asyncoll.Communicator) -> None:
        self._comm = comm
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def allreduce(self, x: torch.Tensor, op: asyncoll.ReduceOp) -> Awaitable[torch.Tensor]:
        self.sizes.append(x.numel())
        return self._comm.allreduce(x, op)


class TwoWays(torch.nn.Module):
    """Applies its layers in one of two orders, so that gradients come in one of two orders."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False)])
        self.unused = torch.nn.Linear(2, 3, bias=False)

    def forward(self, x: torch.Tensor, backwards: bool, everything: bool) -> torch.Tensor:
        for layer in reversed(self.layers) if backwards else self.layers:
            x = layer(x)
        return x.square().sum() + (self.unused.weight.sum() if everything else 0.0)


@looped("size", SIZES)
def test_buckets_start_in_one_order_for_gradients_in_any_order(size: int, ranks: Ranks) -> None:
    """Ranks go through the layers in different orders, and use the last parameter in some rounds only."""

    async def main(comm: asyncoll.Communicator) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        async def run(algorithm: Algorithm, comm: Any) -> torch.Tensor:
            torch.manual_seed(0)
            model = TwoWays()

            async def gradient(round_: int) -> None:
                x = torch.full((1, 4), 0.1 * (1 + comm.rank))
                model(x, backwards=(comm.rank + round_) % 2 == 0, everything=(comm.rank + round_) % 3 == 0).backward()

            await trained(algorithm(comm, model, plain(model)), gradient, 4)
            return parameters(model)

        recorder = Recorder(comm)
        overlapped = await run(partial(OverlappedSGD, bucket_bytes=1), recorder)
        return recorder.sizes, overlapped, await run(AllreduceSGD, comm)

    for sizes, overlapped, synchronous in ranks(size, main):
        assert sizes == [6, 16, 4, 16] * 4
        assert torch.equal(overlapped, synchronous)


def test_buckets_start_while_backward_goes_on() -> None:
    async def main(comm: asyncoll.Communicator) -> list[list[int]]:
        recorder, model = Recorder(comm), network()
        seen: list[list[int]] = []

        def hidden(gradient: torch.Tensor) -> None:
            seen.append(list(recorder.sizes))

        sgd = OverlappedSGD(recorder, model, plain(model), bucket_bytes=1)  # type: ignore[arg-type]
        await sgd.start()
        x = model[1](model[0](torch.ones(2, 5)))
        x.register_hook(hidden)
        model[2](x).sum().backward()
        seen.append(list(recorder.sizes))
        await sgd.step()
        await sgd.finish()
        model(torch.ones(2, 5)).sum().backward()
        seen.append(list(recorder.sizes))
        return seen

    everything = [3, 24, 8, 40]
    for within, at_the_end, without_hooks in run_ranks(2, main):
        assert within[:1] == everything[:1]
        assert len(within) < len(at_the_end)
        assert at_the_end == without_hooks == everything


def test_buckets_of_an_accumulated_gradient_start_in_the_last_backward(ranks: Ranks) -> None:
    async def main(comm: asyncoll.Communicator) -> list[int]:
        recorder, model = Recorder(comm), network()
        sgd = OverlappedSGD(recorder, model, plain(model), bucket_bytes=1, accumulate=3)  # type: ignore[arg-type]
        await sgd.start()
        started = []
        for _ in range(6):
            model(torch.ones(2, 5)).sum().backward()
            started.append(len(recorder.sizes))
            await sgd.step()
        return started

    assert ranks(3, main) == [[0, 0, 4, 4, 4, 8]] * 3


@looped("size", SIZES)
@looped("accumulate", [2, 3, 7])
def test_an_accumulated_gradient_has_the_bits_of_synchronous_training(size: int, accumulate: int, ranks: Ranks) -> None:
    def replicas_of(algorithm: Algorithm) -> list[torch.Tensor]:
        async def main(comm: asyncoll.Communicator) -> torch.Tensor:
            model = network()
            sgd = algorithm(comm, model, momentum(model), accumulate=accumulate)
            await sgd.start()
            for call in range(4 * accumulate):
                loss(model, comm.rank, call).backward()
                await sgd.step()
            await sgd.finish()
            return parameters(model)

        return ranks(size, main)

    synchronous = replicas_of(AllreduceSGD)
    for model in replicas_of(partial(OverlappedSGD, bucket_bytes=200)):
        assert torch.equal(model, synchronous[0])


@looped(
    ("accumulate", "values", "faulty", "words"),
    [
        (1, [1.0, torch.nan, 1.0], (1,), "in the gradient of rank 1: look at the loss"),
        (3, [1.0, torch.nan, 1.0], (1,), "in the gradient of rank 1: look at the loss"),
        (1, [torch.inf, 1.0, torch.nan], (0, 2), "in the gradient of rank 0, 2: look at the loss"),
        (1, [3e38, 3e38, 3e38], (), "only after the ranks were added up"),
    ],
)
def test_an_average_that_is_not_finite_names_its_ranks_at_every_rank(
    values: list[float], faulty: tuple[int, ...], words: str, accumulate: int, ranks: Ranks
) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[tuple[int, ...], str, float]:
        model = network()
        sgd = OverlappedSGD(comm, model, plain(model), bucket_bytes=64, accumulate=accumulate)
        await sgd.start()
        for round_ in range(1, 3):
            for call in range(accumulate):
                before = parameters(model)
                factor = values[comm.rank] if round_ == 2 and call == accumulate - 1 else 1.0
                (model[2].bias.sum() * factor).backward()
                if round_ == 1 or call < accumulate - 1:
                    await sgd.step()
        with pytest.raises(asyncoll.NonFiniteError) as caught:
            await sgd.step()
        assert torch.equal(parameters(model), before)
        loss(model, comm.rank, 1).backward()  # a program may go on
        for _ in range(accumulate):
            await sgd.step()
        await sgd.finish()
        return caught.value.ranks, str(caught.value), float(parameters(model).sum())

    results = ranks(3, main)
    assert results == [results[0]] * 3
    named, message, total = results[0]
    assert named == faulty
    assert "the averaged gradient for round 2 holds NaN or infinity" in message
    assert words in message
    assert np.isfinite(total)


class TroubleError(Exception):
    """An exception of a user's gradient."""


@pytest.mark.parametrize("how", ["raise", "twice", "cancel"])
def test_a_failed_step_ends_the_training_everywhere_and_leaves_no_call(how: str, ranks: Ranks) -> None:
    """A program fails between `backward()` and `step()`, or its step is cancelled while a late rank computes."""
    own = {"raise": TroubleError, "cancel": asyncio.CancelledError, "twice": asyncoll.UsageError}[how]
    outcomes: dict[int, BaseException] = {}

    async def main(comm: asyncoll.Communicator) -> None:
        model = network()

        async def gradient(round_: int) -> None:
            model(torch.ones(1, 5)).sum().backward()
            if comm.rank == 1 and round_ == 2 and how == "raise":
                raise TroubleError("no more data")
            if comm.rank == 1 and round_ == 2 and how == "twice":
                model(torch.ones(1, 5)).sum().backward()
            await asyncio.sleep(1.0 if comm.rank == 1 else 2.0)

        task = asyncio.ensure_future(trained(OverlappedSGD(comm, model, plain(model), bucket_bytes=1), gradient, 4))
        if how == "cancel" and comm.rank == 1:
            asyncio.get_running_loop().call_later(3.5, task.cancel)  # in the step of the second round
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        assert outcome is not None
        outcomes[comm.rank] = outcome
        if comm.rank == 1 and how != "cancel":
            comm.abort("its program has failed")  # as at the end of a process

    ranks(3, main)
    assert isinstance(outcomes[1], own)
    for rank in (0, 2):
        assert isinstance(outcomes[rank], asyncoll.AbortedError)
        assert outcomes[rank].rank == 1
        reason = "was cancelled" if how == "cancel" else "its program has failed"
        assert reason in str(outcomes[rank])
    outcomes.clear()
    gc.collect()  # a call that was never awaited would be a warning, and so an error of this test


@pytest.mark.parametrize("buckets", [0, 1, 4], ids=lambda buckets: f"{buckets} started")
def test_a_gradient_without_a_step_is_dropped_at_the_end(buckets: int, ranks: Ranks) -> None:
    """The calls of its buckets end, and none of it is in the model or in the gradients."""

    async def main(comm: asyncoll.Communicator) -> tuple[torch.Tensor, float]:
        model = network()
        sgd = OverlappedSGD(comm, model, plain(model), bucket_bytes=1)
        await trained_but_not_ended(sgd, comm, model)
        before = parameters(model)
        if buckets == 1:  # the bias of the last layer
            model[2].weight.requires_grad_(False)
            model[2].bias.sum().backward()
            model[2].weight.requires_grad_(True)
        elif buckets:
            model(torch.ones(2, 5)).sum().backward()
        await sgd.finish()
        assert torch.equal(before, parameters(model))
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
        total = float(await comm.allreduce(torch.ones(1)))
        assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())
        return before, total

    for model, total in ranks(3, main):
        assert total == 3.0
        assert torch.equal(model, replicas_of_two_rounds(ranks))


async def trained_but_not_ended(sgd: OverlappedSGD, comm: asyncoll.Communicator, model: torch.nn.Module) -> None:
    await sgd.start()
    while sgd.round < 2:
        await on_batches(comm, model)(sgd.round + 1)
        await sgd.step()


def replicas_of_two_rounds(ranks: Ranks) -> torch.Tensor:
    async def main(comm: asyncoll.Communicator) -> torch.Tensor:
        model = network()
        await trained(AllreduceSGD(comm, model, plain(model)), on_batches(comm, model), 2)
        return parameters(model)

    model: torch.Tensor = ranks(3, main)[0]
    return model


def test_a_trainer_that_is_dropped_without_an_end_starts_no_calls_and_is_freed(ranks: Ranks) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[bool, int]:
        recorder, model = Recorder(comm), network()
        sgd = OverlappedSGD(recorder, model, plain(model), bucket_bytes=1)  # type: ignore[arg-type]
        await sgd.start()
        known = weakref.ref(sgd)
        del sgd
        gc.collect()
        model(torch.ones(1, 5)).sum().backward()
        return known() is None, len(recorder.sizes)

    assert ranks(2, main) == [(True, 0)] * 2


def test_backward_on_another_thread_is_a_usage_error() -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        model = network()

        async def gradient(round_: int) -> None:
            await asyncoll.offload(lambda: model(torch.ones(1, 5)).sum().backward())

        await trained(OverlappedSGD(comm, model, plain(model)), gradient, 1)

    with pytest.raises(asyncoll.UsageError, match="on the thread of the loop"):
        run_ranks(2, main)


# -- a GPU ---------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"), reason="older torch")
def test_gradients_of_a_device_are_averaged_while_backward_goes_on(forked: Callable[..., tuple[int, str, str]]) -> None:
    """Outside of the training torch runs the hooks in a thread of its own, as it does for a GPU."""
    script = SCRIPTS / "training/gradients_of_another_thread.py"
    code, out, err = forked(dict(os.environ), script)
    assert code == 0, err
    assert out.splitlines() == [
        *["[False, True, True, True, False] [True, True, True] True"] * 2,
        "[True, False, False, True]",
    ]


def gradients_of_two_streams(join: bool) -> list[float]:
    """Two parts of a bucket are computed on two streams, and it is read on the second."""
    with emulated_cuda() as gpu:
        gradients = gpu.tensor(torch.zeros(4))
        streams = GradientStreams(torch.device("cuda", 0))
        for name, part in (("one", gradients[:2]), ("other", gradients[2:])):
            with gpu.stream(name):
                gpu.compute(lambda array: array.__iadd__(1), part)
                streams.note()
        total = gpu.tensor(torch.zeros(4))
        with gpu.stream("other"):
            if join:
                streams.join()
            gpu.compute(lambda into, source: np.copyto(into, source), total, reads=[gradients])
            return gpu.values(total).tolist()


def test_a_bucket_comes_after_gradients_of_all_streams() -> None:
    with pytest.raises(Hazard):
        gradients_of_two_streams(join=False)
    assert gradients_of_two_streams(join=True) == [1.0] * 4


def is_multithreaded() -> bool:
    return torch._C._is_multithreading_enabled()


class Owner:
    """For a trainer."""


@pytest.mark.parametrize("before", [True, False])
def test_the_mode_of_autograd_comes_back_with_the_last_trainer(before: bool) -> None:
    async def main() -> None:
        first, other = Owner(), Owner()
        for _ in range(2):
            undos = [compute_here(first), compute_here(other)]
            undos[0]()
            undos[0]()
            assert not is_multithreaded()
            undos[1]()
            assert is_multithreaded() is before
        compute_here(first), compute_here(other)
        del first
        assert not is_multithreaded()
        owners = [other]
        del other
        thread = threading.Thread(target=owners.clear)
        thread.start()
        thread.join()
        assert not is_multithreaded()
        await asyncio.sleep(0)
        assert is_multithreaded() is before

    with torch.autograd.grad_mode.set_multithreading_enabled(before):
        asyncio.run(main())


def test_a_training_that_ends_by_an_exception_gives_the_mode_of_autograd_back() -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        model = network()
        sgd = OverlappedSGD(comm, model, plain(model))
        sgd._streams = GradientStreams(torch.device("cuda", 0))
        await sgd.start()
        assert not is_multithreaded()
        raise KeyError(1)

    with pytest.raises(KeyError):
        run_ranks(1, main)
    gc.collect()
    assert is_multithreaded()


@looped(
    ("rules", "weight", "words"),
    [
        ({"bucket_bytes": 0}, None, "a bucket has at least one byte, not 0"),
        ({}, 3.0, "OverlappedSGD takes no weight: its gradients are on their way"),
    ],
)
def test_what_cannot_be_overlapped_is_a_usage_error(rules: dict[str, Any], weight: float | None, words: str) -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        model = network()
        sgd = OverlappedSGD(comm, model, plain(model), **rules)
        await sgd.start()
        model(torch.ones(1, 5)).sum().backward()
        await sgd.step(weight=weight)

    with pytest.raises(asyncoll.UsageError, match=words):
        run_ranks(2, main)
