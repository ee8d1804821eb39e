"""Equal models at all ranks: at the start, at the end, and after a loop that is left early."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import asyncoll
from asyncoll.testing import run_ranks, simulate
from asyncoll.training import DCS3GD, AllreduceSGD, Trainer
from asyncoll.training.replicas import _decoded, _encoded, resynchronise
from asyncoll.transport.messages.simulated import Network
from tests.support.cases import looped
from tests.support.places import SCRIPTS
from tests.support.processes import ForkedRank
from tests.support.training_loops import ALGORITHMS, Gradient, Optimizing, bits, state, train, trained, whole

SCRIPT = SCRIPTS / "training/every_algorithm_on_one_model.py"
ROUNDS = 6
SIZES = [1, 2, 3, 5, 6, 8, 13]  # training is costly: one size of each kind, not all that the collectives are run at

State = dict[str, bytes]

EQUAL_IN_EACH_ROUND = ["synchronous", "overlapped", "sparse"]
EQUAL_IN_SYNCHRONOUS_ROUNDS = ["eager with history", "eager beyond history", "wagma"]


class Mixed(torch.nn.Module):
    """A model with trained, frozen and tied parameters, and buffers of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).requires_grad_(False)
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4, momentum=None))
        self.tied = torch.nn.Linear(4, 4)
        self.tied.weight = self.body[0].weight
        self.register_buffer("features", torch.randn(4, 3).T, persistent=False)
        self.register_buffer("mask", torch.full((3,), torch.finfo(torch.float32).min))
        self.register_buffer("positions", torch.arange(3).expand(2, 3))
        self.register_buffer("seen", torch.rand(5) < 0.5)
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("phase", torch.randn(2, dtype=torch.complex64))
        self.register_buffer("level", torch.rand(3).bfloat16())
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("unused", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.level = self.level * 0.9 + float(x.mean())  # a new tensor in place of the old one
        return self.tied(self.body(self.frozen(x))) @ self.features.T


def slow_momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.8, 0.99))


OPTIMIZERS = [slow_momentum, adam]


def parameters(model: torch.nn.Module) -> State:
    return {name: bits(parameter) for name, parameter in model.named_parameters()}


def batches(comm: asyncoll.Communicator, model: torch.nn.Module) -> Gradient:
    """Gradients of random batches; ranks differ in speed, so that some are late."""
    samples = torch.Generator().manual_seed(comm.rank)

    async def gradient(round_: int) -> None:
        model(torch.randn(3, 4, generator=samples)).square().mean().backward()
        await asyncio.sleep(1.0 + 2.5 * ((comm.rank + round_) % 5 == 0))

    return gradient


@looped("size", SIZES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_ranks_end_with_one_model_including_buffers(algorithm: str, size: int) -> None:
    """Each algorithm meets memory and messages in turn, and so does each size."""
    shared_memory = (list(ALGORITHMS).index(algorithm) + SIZES.index(size)) % 2 == 0

    async def main(comm: asyncoll.Communicator) -> tuple[State, State]:
        torch.default_generator.manual_seed(comm.rank)
        model = Mixed()
        before = whole(model)
        gradient = batches(comm, model)
        await trained(ALGORITHMS[algorithm](comm, model, slow_momentum(model)), gradient, ROUNDS)
        return before, whole(model)

    results = simulate(size, main, Network(jitter_s=1e-3), shared_memory=shared_memory).results
    first, last = results[0]
    assert all(after == last for _, after in results)
    assert first["body.1.running_mean"] != last["body.1.running_mean"]
    constant = ["frozen.0.weight", "frozen.0.bias", "features", "mask", "positions", "seen", "empty", "phase"]
    assert {name: last[name] for name in constant} == {name: first[name] for name in constant}


@looped("size", [3, 5, 6])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("is_all_frozen", [False, True])
def test_frozen_parameters_equal_those_of_rank_0_to_the_bit(is_all_frozen: bool, algorithm: str, size: int) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[bytes, bytes]:
        torch.default_generator.manual_seed(comm.rank)
        model = torch.nn.Sequential(torch.nn.Linear(4, 50), torch.nn.Linear(50, 1))
        (model if is_all_frozen else model[0]).requires_grad_(False)
        before = bits(model[0].weight)

        async def gradient(round_: int) -> None:
            if not is_all_frozen:
                model(torch.ones(3, 4)).square().mean().backward()
            await asyncio.sleep(1.0 + comm.rank)

        await trained(ALGORITHMS[algorithm](comm, model, slow_momentum(model)), gradient, ROUNDS)
        return before, bits(model[0].weight)

    results = simulate(size, main).results
    assert all(after == results[0][0] for _, after in results)


@looped("optimizing", OPTIMIZERS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("loaded", [{0}, {1, 2}], ids=["rank 0 alone", "all but rank 0"])
def test_every_rank_starts_with_the_optimizer_of_rank_0(
    loaded: set[int], algorithm: str, optimizing: Optimizing
) -> None:
    """The checkpoints that other ranks have loaded have no effect."""

    def outcome(loaded: set[int]) -> list[tuple[State, str]]:
        async def main(comm: asyncoll.Communicator) -> tuple[State, str]:
            torch.default_generator.manual_seed(0)
            model = Mixed()
            optimizer = optimizing(model)
            if comm.rank in loaded:
                for _ in range(3):  # as after load_state_dict
                    optimizer.zero_grad()
                    model(torch.randn(3, 4)).square().mean().backward()
                    optimizer.step()
                optimizer.zero_grad()
                optimizer.param_groups[0].update(lr=0.02, initial_lr=0.1)
            await trained(ALGORITHMS[algorithm](comm, model, optimizer), batches(comm, model), ROUNDS)
            return whole(model), state(optimizer)

        return simulate(3, main).results

    everyone = {0, 1, 2}
    assert outcome(loaded) == outcome(everyone if 0 in loaded else set())


@looped("optimizing", OPTIMIZERS)
@pytest.mark.parametrize("algorithm", [*EQUAL_IN_EACH_ROUND, "eager with history"])
def test_replicas_whose_optimizer_rank_0_alone_has_loaded_are_equal(algorithm: str, optimizing: Optimizing) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[State, str]:
        model = Mixed()
        optimizer = optimizing(model)
        if comm.rank == 0:
            model(torch.ones(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        await trained(ALGORITHMS[algorithm](comm, model, optimizer), batches(comm, model), ROUNDS)
        return parameters(model), state(optimizer)

    results = simulate(4, main).results
    assert all(result == results[0] for result in results)


async def stepped(sgd: Trainer, gradient: Gradient, is_last: Callable[[asyncoll.Reduction | None], bool]) -> None:
    """A loop that is left early, and not ended."""
    await sgd.start()
    is_left = False
    while not is_left:
        await gradient(sgd.round + 1)
        is_left = is_last(await sgd.step())


@looped("size", [2, 3, 5])
@pytest.mark.parametrize("algorithm", EQUAL_IN_EACH_ROUND)
def test_a_loop_left_early_leaves_one_model(algorithm: str, size: int, simulated: Callable[..., Any]) -> None:
    async def main(comm: asyncoll.Communicator) -> State:
        model = Mixed()
        sgd = ALGORITHMS[algorithm](comm, model, slow_momentum(model))
        await stepped(sgd, batches(comm, model), lambda done: sgd.round == 4)
        return whole(model)

    results = simulated(size, main).results
    assert all(after == results[0] for after in results)


@pytest.mark.parametrize("stop", [0, 1, 4, 9])
@looped("size", SIZES)
def test_dc_s3gd_ended_early_leaves_the_average(size: int, stop: int, simulated: Callable[..., Any]) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[State, float]:
        model = Mixed()
        sgd = DCS3GD(comm, model, slow_momentum(model))
        await trained(sgd, batches(comm, model), stop)
        assert sgd.round == stop
        return whole(model), float(await comm.allreduce(torch.ones(1)))

    results = simulated(size, main).results
    assert all(result == (results[0][0], size) for result in results)


@looped("size", [2, 3, 5])
@pytest.mark.parametrize("algorithm", EQUAL_IN_SYNCHRONOUS_ROUNDS)
def test_a_loop_left_in_a_synchronous_round_leaves_one_model(algorithm: str, size: int) -> None:
    async def main(comm: asyncoll.Communicator) -> State:
        model = Mixed()
        sgd = ALGORITHMS[algorithm](comm, model, slow_momentum(model))
        await stepped(
            sgd,
            batches(comm, model),
            lambda done: done is not None and done.synchronous and done.round >= 8,
        )
        return whole(model)

    results = simulate(size, main, Network(jitter_s=1e-3)).results
    assert all(after == results[0] for after in results)


@looped("optimizing", OPTIMIZERS)
@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "sparse"])
def test_one_rank_is_plain_training_including_buffers(algorithm: str, optimizing: Optimizing) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[State, str]:
        torch.default_generator.manual_seed(1)
        model = Mixed()
        optimizer = optimizing(model)
        await trained(ALGORITHMS[algorithm](comm, model, optimizer), batches(comm, model), ROUNDS)
        return whole(model), state(optimizer)

    async def plain(comm: asyncoll.Communicator) -> tuple[State, str]:
        torch.default_generator.manual_seed(1)
        model = Mixed()
        optimizer = optimizing(model)
        gradient = batches(comm, model)
        for round_ in range(1, ROUNDS + 1):
            optimizer.zero_grad()
            await gradient(round_)
            optimizer.step()
        return whole(model), state(optimizer)

    assert simulate(1, main).results == simulate(1, plain).results


class Cache(torch.nn.Module):
    """Keeps a table that grows with the longest input, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.register_buffer("table", torch.empty(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > len(self.table):
            self.table = torch.arange(float(len(x)))
        return self.layer(x[:, None]) + self.table[: len(x), None]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_buffers_may_have_different_sizes_at_the_ranks(algorithm: str) -> None:
    async def main(comm: asyncoll.Communicator) -> int:
        model = Cache()

        async def gradient(round_: int) -> None:
            model(torch.ones(6 - comm.rank)).sum().backward()

        async for done in train(ALGORITHMS[algorithm](comm, model, slow_momentum(model)), gradient, ROUNDS):
            if done.round % 2 == comm.rank % 2 and done.round < ROUNDS:  # a validation with longer inputs
                with torch.inference_mode():
                    model(torch.ones(6 + done.round))
        return len(model.table)

    assert simulate(3, main).results == [10, 10, 10]


def train_with(change: Callable[[Any], Optimizing | None]) -> None:
    """Synchronous SGD of three ranks; rank 2 changes its model, or has another optimizer."""

    async def main(comm: asyncoll.Communicator) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
        optimizing = (change(model) if comm.rank == 2 else None) or slow_momentum
        await trained(AllreduceSGD(comm, model, optimizing(model)), batches(comm, model), 2)

    run_ranks(3, main)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: adam, "the optimizer is Adam on rank 2, but SGD on rank 0"),
        (
            lambda model: model[0].requires_grad_(False) and None,
            "parameter 0.weight is .* frozen on rank 2, but .* trained",
        ),
        (lambda model: model.append(torch.nn.Linear(1, 1)) and None, "parameter 3.weight is .* on rank 2, but missing"),
        (
            lambda model: model.register_buffer("b", torch.ones(1)),
            "buffer b is float32 on rank 2, but missing on rank 0",
        ),
        (
            lambda model: lambda model: torch.optim.SGD(list(model.parameters())[::-1], lr=0.1),
            "parameter group 0 is 2.bias, .* on rank 2, but 0.weight, .* on rank 0",
        ),
    ],
)
def test_another_model_or_optimizer_is_an_error_that_names_it(change: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(asyncoll.UsageError, match=words):
        train_with(change)


def test_a_state_that_cannot_be_sent_is_an_error_that_names_it() -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        model = torch.nn.Linear(4, 1)
        optimizer = slow_momentum(model)
        optimizer.state[model.weight]["plan"] = object()
        await trained(AllreduceSGD(comm, model, optimizer), batches(comm, model), 2)

    with pytest.raises(asyncoll.UsageError, match="SGD keeps 'plan' as a object"):
        run_ranks(2, main)


class Counting(torch.optim.SGD):
    """Counts its steps in an entry of the state that belongs to no parameter; the learning rate follows the count."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        kept = self.state["global"]
        kept["steps"] = kept.get("steps", torch.tensor(0)) + 1
        self.param_groups[0]["lr"] = 0.1 / int(kept["steps"])
        super().step(closure)


@pytest.mark.parametrize("loaded", [0, 1])
@pytest.mark.parametrize("algorithm", [*EQUAL_IN_EACH_ROUND, "eager with history"])
def test_state_of_no_parameter_equals_that_of_rank_0(algorithm: str, loaded: int) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[State, int]:
        model = Mixed()
        optimizer = Counting(model.parameters(), momentum=0.9)
        if comm.rank == loaded:
            for _ in range(7):
                optimizer.step()
        sgd = ALGORITHMS[algorithm](comm, model, optimizer)
        await trained(sgd, batches(comm, model), ROUNDS)
        return parameters(model), int(optimizer.state["global"]["steps"]) - sgd.round

    results = simulate(3, main).results
    assert all(result == results[0] for result in results)
    assert results[0][1] == (7 if loaded == 0 else 0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_trained_tensor_outside_of_the_model_is_an_error(algorithm: str) -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        model = Mixed()
        scale = torch.nn.Parameter(torch.ones(1, 2))
        optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": scale}], lr=0.1)
        await trained(ALGORITHMS[algorithm](comm, model, optimizer), batches(comm, model), 1)

    words = r"parameter group 1 of the optimizer has a tensor of shape \[1, 2\] that is no parameter of the model"
    with pytest.raises(asyncoll.UsageError, match=words):
        run_ranks(2, main)


class Channels(torch.nn.Module):
    """A convolution in channels_last order, which flattening makes contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.convolution(x)


@pytest.mark.parametrize("loaded", [0, 1])
@pytest.mark.parametrize(
    "optimizing",
    [
        lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True),
    ],
    ids=["adam", "momentum"],
)
def test_a_fused_optimizer_loaded_for_another_memory_format_steps_as_a_plain_one(
    optimizing: Optimizing, loaded: int
) -> None:
    def outcome(is_fused: bool) -> list[torch.Tensor]:
        async def main(comm: asyncoll.Communicator) -> torch.Tensor:
            torch.default_generator.manual_seed(0)
            model = Channels()
            optimizer = optimizing(model)
            optimizer.param_groups[0]["fused"] = is_fused

            async def gradient(round_: int) -> None:
                model(torch.randn(3, 2, 4, 4)).square().mean().backward()

            if comm.rank == loaded:
                for _ in range(3):
                    await gradient(0)
                    optimizer.step()
                    optimizer.zero_grad()
            torch.default_generator.manual_seed(1)
            await trained(AllreduceSGD(comm, model, optimizer), gradient, 2)
            return model.convolution.weight.detach().clone()

        return simulate(2, main).results

    fused, plain = outcome(True), outcome(False)
    assert bits(fused[0]) == bits(fused[1])
    torch.testing.assert_close(fused[0], plain[0])


def test_numpy_numbers_keep_their_type() -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[str, str]:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=numpy.float32(0.1 + comm.rank))
        if comm.rank == 0:
            numbers = [numpy.int64(-3), numpy.uint8(7), numpy.float16(0.1), numpy.float64(0.1), numpy.bool_(True)]
            optimizer.state[model.weight] = {"numbers": numbers, numpy.int32(5): numpy.float64("inf")}
        await AllreduceSGD(comm, model, optimizer).start()
        return repr(optimizer.state[model.weight]), repr(optimizer.param_groups[0]["lr"])

    results = run_ranks(3, main)
    assert results == [results[0]] * 3
    assert results[0][1] == repr(numpy.float32(0.1))


def test_numbers_lists_and_tensors_of_any_kind_are_shared() -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[dict[str, Any], dict[str, Any]]:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5 - comm.rank / 8))
        optimizer.param_groups[0]["hook"] = main  # of a type that stays each rank's own
        if comm.rank == 0:
            kept = {"steps": 7, "best": float("inf"), "pairs": [(1, 2.5), (True, None)], "name": "a", "by": {"x": (3,)}}
            tensors = {"empty": torch.empty(0), "flags": torch.tensor([True, False]), "old": [torch.ones(2).half()]}
            optimizer.state[model.weight] = kept | tensors
            optimizer.param_groups[0]["betas"] = (0.5, 0.1 + 0.2)
        await AllreduceSGD(comm, model, optimizer).start()
        return optimizer.state[model.weight], optimizer.param_groups[0]

    results = run_ranks(3, main)
    for kept, options in results:
        assert repr(kept) == repr(results[0][0])
        assert {**options, "params": None} == {**results[0][1], "params": None}


Kept = tuple[State, str]


def kept(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Kept:
    return parameters(model), state(optimizer)


@pytest.mark.parametrize("optimizing", OPTIMIZERS)
@looped(("losses", "source"), [([0, 0, 0], None), ([2, 0, 0], 1), ([0, 0, 5], 0), ([3, 1, 2], 1), ([2, 2, 2], 0)])
def test_the_rank_that_lost_least_is_the_source(losses: list[int], source: int | None, optimizing: Optimizing) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[Kept, Kept]:
        torch.default_generator.manual_seed(comm.rank)
        model = torch.nn.Linear(2, 3)
        optimizer = optimizing(model)
        flat = asyncoll.flatten(model)
        for _ in range(1 + comm.rank):
            flat.gradients.fill_(1.0 + comm.rank)
            optimizer.step()
        before = kept(model, optimizer)
        await resynchronise(comm, (flat.parameters,), optimizer, losses[comm.rank])
        return before, kept(model, optimizer)

    results = run_ranks(3, main)
    befores = [before for before, _ in results]
    assert [after for _, after in results] == (befores if source is None else [befores[source]] * 3)


def test_a_state_of_numbers_is_resynchronised_and_an_object_is_an_error() -> None:
    async def main(comm: asyncoll.Communicator) -> int:
        model = torch.nn.Linear(2, 1)
        optimizer = slow_momentum(model)
        flat = asyncoll.flatten(model)
        optimizer.state[model.weight]["steps"] = 7 - comm.rank
        await resynchronise(comm, (flat.parameters,), optimizer, lost=1)
        steps: int = optimizer.state[model.weight]["steps"]
        assert steps == 7
        optimizer.state[model.weight]["steps"] = object()
        await resynchronise(comm, (flat.parameters,), optimizer, lost=1)
        return steps

    with pytest.raises(asyncoll.UsageError, match="SGD keeps 'steps' as a object"):
        run_ranks(2, main)


@pytest.mark.slow
def test_in_real_processes_all_ranks_end_with_one_model(forked_world: Callable[..., list[ForkedRank]]) -> None:
    lines = []
    for rank in forked_world(dict(os.environ), 3, SCRIPT):
        code, out, err = rank.end()
        assert code == 0, err
        lines += re.findall(r"(\w+) (\w+): model (\w+)", out)
    assert len(lines) == 18
    assert len(set(lines)) == 6


def test_a_state_that_a_rank_lacks_is_made_on_the_device_of_its_model() -> None:
    """Adam has sums on the device of the parameters, and a count on the CPU."""
    found: list[torch.Tensor] = []
    made: list[torch.Tensor] = []
    described = _encoded({"sum": torch.empty(3, device="meta"), "step": torch.tensor(1.0)}, found)
    for own in (None, {"sum": torch.empty(3), "step": torch.tensor(0.0)}):
        _decoded(json.loads(json.dumps(described)), own, made, torch.device("meta"))
    assert [x.device.type for x in made] == ["meta", "cpu"] * 2
