"""Ok-Topk SGD, its baselines, and allreduces that overlap `backward()`: against synchronous SGD and by hand."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
from conftest import looped

import asyncoll
from asyncoll.testing import run_ranks
from trainers.allreduce_sgd import allreduce_sgd
from trainers.oktopk_sgd import Accumulate, Algorithm, oktopk_sgd
from trainers.overlap import Bucket, Overlap, cut, overlapped_sgd
from trainers.workloads import Digits, DigitsWide

SIZES = [1, 2, 3, 4, 5]
ALGORITHMS = get_args(Algorithm)
SPARSE = [algorithm for algorithm in ALGORITHMS if algorithm != "dense-overlapped"]
COMPLETE = [algorithm for algorithm in ALGORITHMS if algorithm != "gaussiank"]  # at density 1; its threshold is above 0
RATE = 0.125  # a power of two: exact
Ranks = Callable[[int, Callable[[asyncoll.Communicator], Any]], list[Any]]
Trainer = Callable[..., AsyncIterator[asyncoll.Reduction]]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def ranks(simulated: Callable[..., Any]) -> Ranks:
    """The results of the ranks, in virtual time."""
    return lambda size, main: simulated(size, main).results


def plain(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=1e-4)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def parameters(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def network() -> torch.nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def loss(model: torch.nn.Module, rank: int, round_: int) -> torch.Tensor:
    """The gradient of a batch that belongs to this rank and round."""
    x = torch.from_numpy(np.random.default_rng((rank, round_)).normal(size=(4, 5)).astype("f4"))
    result: torch.Tensor = model(x).square().mean()
    return result


def on_batches(comm: asyncoll.Communicator, model: torch.nn.Module) -> Callable[[int], Awaitable[None]]:
    async def gradient(round_: int) -> None:
        loss(model, comm.rank, round_).backward()

    return gradient


def whole_numbers(comm: asyncoll.Communicator, model: torch.nn.Module) -> Callable[[int], Awaitable[None]]:
    """Gradients whose sums and products with `RATE` are exact, in any order."""

    async def gradient(round_: int) -> None:
        draw = np.random.default_rng((comm.rank, round_))
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.add_(torch.from_numpy(draw.integers(-50, 51, tuple(parameter.shape)).astype("f4")))

    return gradient


def trained(
    ranks: Ranks,
    size: int,
    trainer: Trainer,
    optimizing: Callable[[torch.nn.Module], torch.optim.Optimizer] = plain,
    gradients: Callable[..., Callable[[int], Awaitable[None]]] = on_batches,
    rounds: int = 6,
) -> list[torch.Tensor]:
    """The parameters at every rank, which are the same to the bit."""

    async def main(comm: asyncoll.Communicator) -> torch.Tensor:
        model = network()
        done = [step async for step in trainer(comm, model, optimizing(model), gradients(comm, model), rounds=rounds)]
        assert [step.round for step in done] == list(range(1, rounds + 1))
        assert all(step.included and step.active == size for step in done)
        return parameters(model)

    replicas = ranks(size, main)
    assert all(torch.equal(replica, replicas[0]) for replica in replicas)
    return replicas


# -- algorithm 2 ----------------------------------------------------------------------------------


@looped("size", SIZES)
@pytest.mark.parametrize("algorithm", COMPLETE)
def test_at_full_density_it_is_synchronous_sgd(algorithm: Algorithm, size: int, ranks: Ranks) -> None:
    full = functools.partial(oktopk_sgd, algorithm=algorithm, density=1.0, thresholds_every=1)
    synchronous = functools.partial(trained, ranks, size, allreduce_sgd)
    torch.testing.assert_close(trained(ranks, size, full)[0], synchronous()[0], rtol=1e-5, atol=1e-6)
    exact = trained(ranks, size, full, gradients=whole_numbers)
    assert torch.equal(exact[0], synchronous(gradients=whole_numbers)[0])


@looped("size", SIZES)
@pytest.mark.parametrize("algorithm", SPARSE)
def test_replicas_are_equal_to_the_bit(algorithm: Algorithm, size: int, ranks: Ranks) -> None:
    rules: dict[str, Any] = {"density": 0.1, "thresholds_every": 3, "regions_every": 4, "accumulate": "gradients"}
    trained(ranks, size, functools.partial(oktopk_sgd, algorithm=algorithm, **rules), momentum, rounds=9)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_replicas_are_equal_over_real_memory_and_on_one_loop(algorithm: Algorithm, run: Ranks) -> None:
    trained(run, 3, functools.partial(oktopk_sgd, algorithm=algorithm, density=0.1))


def largest(x: Any, k: int) -> Any:
    kept = np.argsort(-np.abs(x), kind="stable")[:k]
    return np.where(np.isin(np.arange(x.size), kept), x, 0)


@pytest.mark.parametrize("accumulate", get_args(Accumulate))
def test_it_equals_the_papers_algorithm_by_hand(accumulate: Accumulate, ranks: Ranks) -> None:
    """Algorithm 2 by hand, in numpy and double precision, with changing rates; the authors' variant with momentum."""
    size, rounds, n, k, mu = 3, 12, 20, 4, 0.9
    gradients = np.random.default_rng(7).normal(size=(size, rounds, n))

    async def main(comm: asyncoll.Communicator) -> Any:
        model = torch.nn.Linear(n, 1, bias=False, dtype=torch.float64)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=mu if accumulate == "gradients" else 0.0)

        async def gradient(round_: int) -> None:
            assert model.weight.grad is not None
            model.weight.grad.copy_(torch.from_numpy(gradients[comm.rank, round_ - 1]))

        def schedule(round_: int) -> None:
            optimizer.param_groups[0]["lr"] = 1 / round_

        rules: dict[str, Any] = {"schedule": schedule, "accumulate": accumulate, "density": k / n}
        async for _ in oktopk_sgd(comm, model, optimizer, gradient, rounds=rounds, thresholds_every=1, **rules):
            pass
        return parameters(model).numpy()

    w, velocity, residuals = np.zeros(n), np.zeros(n), np.zeros((size, n))
    for t in range(rounds):
        rate = 1 / (t + 1)
        residuals += gradients[:, t] * (rate if accumulate == "updates" else 1)
        chosen = np.array([largest(of_rank, k) for of_rank in residuals])
        u = largest(chosen.sum(axis=0), k)
        residuals[(chosen != 0) & (u != 0)] = 0
        velocity = mu * velocity + u / size
        w -= u / size if accumulate == "updates" else rate * velocity
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
@pytest.mark.parametrize("algorithm", SPARSE)
def test_nothing_is_lost_in_a_training(algorithm: Algorithm, size: int, ranks: Ranks) -> None:
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
        steps = oktopk_sgd(witness, model, plain(model), whole_numbers(comm, model), rounds=rounds, **rules)  # type: ignore[arg-type]
        async for _ in steps:
            pass
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
@pytest.mark.parametrize("algorithm", ["dense", "dense-overlapped"])
def test_dense_gradients_are_synchronous_training_to_the_bit(
    algorithm: Algorithm, optimizing: Any, size: int, ranks: Ranks
) -> None:
    dense = functools.partial(oktopk_sgd, algorithm=algorithm, accumulate="gradients")
    replicas = trained(ranks, size, dense, optimizing)
    assert torch.equal(replicas[0], trained(ranks, size, allreduce_sgd, optimizing)[0])


@looped("optimizing", [momentum, adam])
@pytest.mark.parametrize("algorithm", COMPLETE)
def test_one_rank_at_full_density_is_the_bare_optimizer_to_the_bit(algorithm: Algorithm, optimizing: Any) -> None:
    full = functools.partial(oktopk_sgd, algorithm=algorithm, accumulate="gradients", density=1.0, thresholds_every=1)
    alone = trained(run_ranks, 1, full, optimizing)[0]
    model = network()
    optimizer = optimizing(model)
    for round_ in range(1, 7):
        optimizer.zero_grad()
        loss(model, 0, round_).backward()
        optimizer.step()
    assert torch.equal(alone, parameters(model))


@looped("size", [1, 3, 4])
@pytest.mark.parametrize("accumulate", get_args(Accumulate))
def test_dense_rounds_come_first_and_leave_no_residual(accumulate: Accumulate, size: int, ranks: Ranks) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[list[torch.Tensor], list[int], list[torch.Tensor]]:
        model, witness = network(), Witness(comm)
        seen: list[int] = []
        steps = oktopk_sgd(
            witness,  # type: ignore[arg-type]
            model,
            plain(model),
            on_batches(comm, model),
            rounds=7,
            accumulate=accumulate,
            warm_up=4,
            density=0.1,
            observe=lambda round_, total: seen.append(len(total.indices)),
        )
        return [parameters(model) async for _ in steps], seen, witness.after

    dense = functools.partial(oktopk_sgd, algorithm="dense", accumulate=accumulate)
    n = parameters(network()).numel()
    for models, seen, residuals in ranks(size, main):
        assert seen[:4] == [n] * 4
        assert max(seen[4:]) < n
        assert [bool(torch.any(residual)) for residual in residuals] == [False] * 4 + [True] * 3
        assert torch.equal(models[3], trained(ranks, size, dense, rounds=4)[0])


def test_frozen_parameters_stay_and_the_others_learn(ranks: Ranks) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        model = network()
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model[2].parameters(), lr=RATE)
        async for _ in oktopk_sgd(comm, model, optimizer, on_batches(comm, model), rounds=3, density=0.2):
            pass
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
        ({"accumulate": "all"}, "accumulate is one of updates, gradients, not 'all'"),
        ({"warm_up": -1}, "warm_up is a number of rounds, not -1"),
        ({"density": 0.0}, "density is above 0 and at most 1, not 0.0"),
        ({"algorithm": "dense-overlapped", "bucket_bytes": 0}, "a bucket has at least one byte, not 0"),
    ],
)
def test_impossible_options_are_usage_errors(rules: dict[str, Any], words: str) -> None:
    with pytest.raises(asyncoll.UsageError, match=words):
        trained(run_ranks, 2, functools.partial(oktopk_sgd, **rules))


def only_one_layer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model[0].parameters(), lr=RATE)


@pytest.mark.parametrize("optimizing", [momentum, adam, only_one_layer])
@pytest.mark.parametrize("algorithm", ["oktopk", "dense-overlapped"])
def test_updates_need_plain_sgd_of_all_parameters(algorithm: Algorithm, optimizing: Any) -> None:
    with pytest.raises(asyncoll.UsageError, match="accumulate='updates' is plain SGD on all trainable parameters"):
        trained(run_ranks, 2, functools.partial(oktopk_sgd, algorithm=algorithm), optimizing)


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
            async for _ in oktopk_sgd(comm, model, plain(model), gradient, rounds=5, density=0.1):
                pass
        assert caught.value.ranks == (1,)
        return before, parameters(model)

    for before, after in ranks(3, main):
        assert torch.equal(before, after)


# -- overlap --------------------------------------------------------------------------------------


@looped("size", SIZES)
@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
def test_overlapped_training_is_synchronous_training_to_the_bit(bucket_bytes: int, size: int, ranks: Ranks) -> None:
    overlapped = functools.partial(overlapped_sgd, bucket_bytes=bucket_bytes)
    replicas = trained(ranks, size, overlapped, momentum)
    assert torch.equal(replicas[0], trained(ranks, size, allreduce_sgd, momentum)[0])


def test_overlapped_training_over_real_memory_and_on_one_loop(run: Ranks) -> None:
    replicas = trained(run, 3, functools.partial(overlapped_sgd, bucket_bytes=1), momentum)
    assert torch.equal(replicas[0], trained(run, 3, allreduce_sgd, momentum)[0])


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
    """A communicator that records the number of elements of its allreduces."""

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
        async def run(trainer: Trainer, comm: Any) -> torch.Tensor:
            torch.manual_seed(0)
            model = TwoWays()

            async def gradient(round_: int) -> None:
                x = torch.full((1, 4), 0.1 * (1 + comm.rank))
                model(x, backwards=(comm.rank + round_) % 2 == 0, everything=(comm.rank + round_) % 3 == 0).backward()

            async for _ in trainer(comm, model, plain(model), gradient, rounds=4):
                pass
            return parameters(model)

        recorder = Recorder(comm)
        overlapped = await run(functools.partial(overlapped_sgd, bucket_bytes=1), recorder)
        return recorder.sizes, overlapped, await run(allreduce_sgd, comm)

    for sizes, overlapped, synchronous in ranks(size, main):
        assert sizes == [6, 16, 4, 16] * 4
        assert torch.equal(overlapped, synchronous)


def test_buckets_start_while_backward_goes_on() -> None:
    async def main(comm: asyncoll.Communicator) -> list[list[int]]:
        recorder, model = Recorder(comm), network()
        seen: list[list[int]] = []

        def hidden(gradient: torch.Tensor) -> None:
            seen.append(list(recorder.sizes))

        flat = asyncoll.flatten(model)
        with Overlap(recorder, model, flat, bucket_bytes=1) as overlap:  # type: ignore[arg-type]
            async with overlap.step():
                x = model[1](model[0](torch.ones(2, 5)))
                x.register_hook(hidden)
                model[2](x).sum().backward()
                seen.append(list(recorder.sizes))
        model(torch.ones(2, 5)).sum().backward()
        seen.append(list(recorder.sizes))
        return seen

    everything = [3, 24, 8, 40]
    for within, at_the_end, without_hooks in run_ranks(2, main):
        assert within[:1] == everything[:1]
        assert len(within) < len(at_the_end)
        assert at_the_end == without_hooks == everything


class TroubleError(Exception):
    """An exception of a user's gradient."""


@pytest.mark.parametrize("how", ["raise", "cancel", "twice"])
def test_a_failed_step_aborts_and_leaves_no_call_under_way(how: str, ranks: Ranks) -> None:
    own = {"raise": TroubleError, "cancel": asyncio.CancelledError, "twice": asyncoll.UsageError}[how]
    outcomes: dict[int, BaseException] = {}

    async def main(comm: asyncoll.Communicator) -> None:
        model = network()

        async def gradient(round_: int) -> None:
            model(torch.ones(1, 5)).sum().backward()
            if comm.rank == 1 and round_ == 2:
                if how == "raise":
                    raise TroubleError("no more data")
                if how == "twice":
                    model(torch.ones(1, 5)).sum().backward()
                await asyncio.sleep(10.0)
            await asyncio.sleep(1.0)

        async def train() -> None:
            overlapped = overlapped_sgd(comm, model, plain(model), gradient, rounds=4, bucket_bytes=1)
            async for _ in overlapped:
                pass

        task = asyncio.ensure_future(train())
        if how == "cancel" and comm.rank == 1:
            asyncio.get_running_loop().call_later(4.0, task.cancel)
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        assert outcome is not None
        outcomes[comm.rank] = outcome
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())

    ranks(3, main)
    assert isinstance(outcomes[1], own)
    for rank in (0, 2):
        assert isinstance(outcomes[rank], asyncoll.AbortedError)
        assert outcomes[rank].rank == 1
        assert "a step with overlapped gradients failed" in str(outcomes[rank])


def test_backward_on_another_thread_is_a_usage_error() -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        model = network()

        async def gradient(round_: int) -> None:
            await asyncoll.offload(lambda: loss(model, comm.rank, round_).backward())

        async for _ in overlapped_sgd(comm, model, plain(model), gradient, rounds=1):
            pass

    with pytest.raises(asyncoll.UsageError, match="on the thread of the loop"):
        run_ranks(2, main)


def test_a_training_that_ends_early_leaves_no_hooks(ranks: Ranks) -> None:
    async def main(comm: asyncoll.Communicator) -> float:
        model = network()
        steps = oktopk_sgd(comm, model, plain(model), on_batches(comm, model), rounds=9, algorithm="dense-overlapped")
        async for done in steps:
            if done.round == 2:
                break
        await steps.aclose()  # type: ignore[attr-defined]
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        return float(await comm.allreduce(torch.ones(1)))

    assert ranks(3, main) == [3.0] * 3


# -- the workload ---------------------------------------------------------------------------------


def test_the_wide_network_has_a_million_parameters_and_the_same_digits() -> None:
    wide, narrow = DigitsWide(0, 4, 8, 0), Digits(0, 4, 8, 0)
    assert sum(p.numel() for p in wide.model.parameters()) == 1_045_450
    for mine, other in zip(wide.next_batch(), narrow.next_batch(), strict=True):
        assert torch.equal(mine, other)
