"""The trainers' invariants, with many ranks in one process; their settings, workloads and reports."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from conftest import PATIENCE_S, looped

import asyncoll
from asyncoll.testing import run_ranks, simulate
from asyncoll.transport.messages.simulated import Network
from trainers.__main__ import main as cli
from trainers.allreduce_sgd import allreduce_sgd
from trainers.consensus import Consensus
from trainers.dc_s3gd import compensate, dc_s3gd
from trainers.demo import PRELOAD
from trainers.eager_sgd import Partial, eager_sgd
from trainers.experiment import experiment, learning_rate
from trainers.imbalance import OneRandom
from trainers.replicas import resynchronise
from trainers.report import Report
from trainers.settings import TRAINERS, Settings
from trainers.time_model import expected_round_s, least_round_s
from trainers.wagma_sgd import Order, merge, wagma_sgd
from trainers.workloads import Digits, Hyperplane

SIZES = [1, 3, 4]
SCRIPTS = Path(__file__).parent / "scripts"
PRELOADED = {**os.environ, "ASYNCOLL_PRELOAD": PRELOAD}  # for launched ranks: loaded once, and not by each of them


pytestmark = pytest.mark.usefixtures("one_thread")


Optimizing = Callable[[torch.nn.Module], torch.optim.Optimizer]


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


OPTIMIZERS = [momentum, adam]


# -- the time model ------------------------------------------------------------------------------


@looped("ranks", [2, 4, 8])
def test_the_recursion_respects_the_bounds(ranks: int) -> None:
    expected = {
        rule: expected_round_s(rule, 0.1, OneRandom(0.2), ranks, average_every=25, rounds=1500)
        for rule in ("synchronous", "solo", "majority")
    }
    assert expected["synchronous"] == pytest.approx(least_round_s("synchronous", 0.1, 0.2, ranks))
    assert least_round_s("solo", 0.1, 0.2, ranks) <= expected["solo"] < expected["majority"]
    assert least_round_s("majority", 0.1, 0.2, ranks) <= expected["majority"] < expected["synchronous"]


@pytest.mark.parametrize("partial", ["solo", "majority"])
def test_the_recursion_predicts_the_protocol_in_virtual_time(partial: Partial) -> None:
    imbalance, rounds, size = OneRandom(0.2), 150, 8

    async def main(comm: asyncoll.Communicator) -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

        async def gradient(round_: int) -> None:
            await asyncio.sleep(0.1 + imbalance.delay_s(0, round_, comm.rank, size))

        async for _ in eager_sgd(comm, model, optimizer, gradient, rounds=rounds, partial=partial, average_every=25):
            pass

    measured_s = simulate(size, main).virtual_s / rounds
    assert measured_s == pytest.approx(expected_round_s(partial, 0.1, imbalance, size, 25), rel=0.15)


# -- synchronous ---------------------------------------------------------------------------------


def parameters(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@looped("size", SIZES)
def test_allreduce_sgd_is_sgd_on_the_concatenated_batch(size: int) -> None:
    rounds = 6

    async def main(comm: asyncoll.Communicator) -> torch.Tensor:
        workload = Digits(comm.rank, comm.size, batch=8, seed=3)
        optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.1, momentum=0.9)

        async def gradient(round_: int) -> None:
            workload.loss().backward()

        done = [step.round async for step in allreduce_sgd(comm, workload.model, optimizer, gradient, rounds=rounds)]
        assert done == list(range(1, rounds + 1))
        return parameters(workload.model)

    replicas = run_ranks(size, main)
    assert all(torch.equal(replica, replicas[0]) for replica in replicas)

    shares = [Digits(rank, size, batch=8, seed=3) for rank in range(size)]
    model = shares[0].model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(rounds):
        images, labels = map(torch.cat, zip(*(share.next_batch() for share in shares), strict=True))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    torch.testing.assert_close(replicas[0], parameters(model), rtol=1e-4, atol=1e-5)


def test_the_first_models_need_not_be_equal() -> None:
    async def main(comm: asyncoll.Communicator) -> torch.Tensor:
        torch.manual_seed(comm.rank)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        async def gradient(round_: int) -> None:
            model(torch.ones(1, 2)).sum().backward()

        async for _ in allreduce_sgd(comm, model, optimizer, gradient, rounds=1):
            pass
        return parameters(model)

    replicas = run_ranks(3, main)
    assert all(torch.equal(replica, replicas[0]) for replica in replicas)


# -- eager ---------------------------------------------------------------------------------------


@looped("partial", ["solo", "majority"])
@looped("size", SIZES)
def test_eager_sgd_ends_with_one_model_at_the_last_round(size: int, partial: Partial) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[torch.Tensor, list[int]]:
        workload = Digits(comm.rank, comm.size, batch=8, seed=0)
        optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.1)

        async def gradient(round_: int) -> None:
            workload.loss().backward()

        steps = eager_sgd(comm, workload.model, optimizer, gradient, rounds=7, partial=partial, average_every=3)
        seen = [step.round async for step in steps]
        return parameters(workload.model), seen

    results = run_ranks(size, main)
    assert all(torch.equal(model, results[0][0]) for model, _ in results)
    for _, rounds in results:
        assert rounds[-1] == 7
        assert rounds == sorted(set(rounds))  # each result is applied once


@pytest.mark.parametrize("partial", ["solo", "majority"])
@looped("size", [2, 3, 4, 7])
@looped("average_every", [1, 5, 100])
def test_late_ranks_skip_rounds_but_no_average(size: int, partial: Partial, average_every: int) -> None:
    rounds = 23

    async def main(comm: asyncoll.Communicator) -> tuple[int, list[int], torch.Tensor]:
        averages = 0
        allreduce = comm.allreduce

        def counted(x: torch.Tensor, op: asyncoll.ReduceOp) -> object:
            nonlocal averages
            averages += 1
            return allreduce(x, op)

        comm.allreduce = counted  # type: ignore[method-assign, assignment]
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        async def gradient(round_: int) -> None:
            late = comm.rank == size - 1 and round_ % 4 == 1
            model(torch.full((1, 2), float(comm.rank))).sum().backward()
            await asyncio.sleep(1.0 + 6.5 * late)

        steps = eager_sgd(comm, model, optimizer, gradient, rounds=rounds, partial=partial, average_every=average_every)
        seen = [step.round async for step in steps]
        return averages, seen, parameters(model)

    results = simulate(size, main).results
    for averages, seen, model in results:
        assert averages == rounds // average_every + 1
        assert seen[-1] == rounds
        assert torch.equal(model, results[0][2])
    if average_every == 100 and partial == "solo":
        assert len(results[-1][1]) < rounds == len(results[0][1])


def state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    """All state that the next step depends on, as bytes."""
    kept = [v for p in model.parameters() for _, v in sorted(optimizer.state[p].items()) if v is not None]
    return b"".join(tensor.detach().numpy().tobytes() for tensor in [*model.parameters(), *kept])


def straggle(seed: int, comm: asyncoll.Communicator, round_: int) -> float:
    """Seconds that a step takes: mostly one, sometimes as long as five rounds."""
    draw = np.random.default_rng((seed, comm.rank, round_)).random()
    return 1.0 + 4.5 * (draw < 0.15) + 0.5 * draw


@dataclass
class Trace:
    """The record of one rank."""

    states: dict[int, bytes]  # after the round; the end is round 0
    skipped: int
    missed: int
    synchronous: list[int]


def eager_traces(size: int, seed: int, optimizing: Optimizing, **rules: Any) -> list[Trace]:
    async def main(comm: asyncoll.Communicator) -> Trace:
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        optimizer = optimizing(model)
        samples = torch.Generator().manual_seed(comm.rank)

        async def gradient(round_: int) -> None:
            model(torch.randn(2, 3, generator=samples)).square().sum().backward()
            await asyncio.sleep(straggle(seed, comm, round_))

        trace = Trace({}, 0, 0, [])
        async for done in eager_sgd(comm, model, optimizer, gradient, rounds=30, **rules):
            trace.states[done.round] = state(model, optimizer)
            trace.skipped += done.skipped
            trace.missed += len(done.missed)
            if done.synchronous:
                trace.synchronous.append(done.round)
        trace.states[0] = state(model, optimizer)
        return trace

    results: list[Trace] = simulate(size, main, Network(jitter_s=1e-3), seed=seed).results
    return results


def assert_equal_at(traces: list[Trace], rounds: Iterable[int]) -> None:
    for round_ in rounds:
        assert len({trace.states[round_] for trace in traces if round_ in trace.states}) == 1, f"round {round_}"


@looped("optimizing", OPTIMIZERS)
@pytest.mark.parametrize(
    "rules",
    [
        {"partial": "solo"},
        {"partial": "majority"},
        {"partial": "majority", "candidates": 2},
        {"partial": "quorum", "quorum": 2},
        {"partial": "quorum", "sync_every": 7},
    ],
    ids=str,
)
def test_with_history_replicas_are_equal_to_the_bit_in_every_round(
    rules: dict[str, Any], optimizing: Optimizing
) -> None:
    missed = 0
    for seed in range(8):
        traces = eager_traces(2 + seed % 4, seed, optimizing, history=30, **rules)
        assert_equal_at(traces, range(31))
        assert not any(trace.skipped for trace in traces)
        missed += sum(trace.missed for trace in traces)
    assert missed  # somebody was late


@looped("optimizing", OPTIMIZERS)
@pytest.mark.parametrize("partial", ["solo", "majority", "quorum"])
def test_replicas_beyond_the_history_are_equal_again_after_a_synchronous_round(
    partial: Partial, optimizing: Optimizing
) -> None:
    skipped = 0
    for seed in range(10):
        quorum = 1 if partial == "quorum" else None
        rules = {"partial": partial, "quorum": quorum, "history": 1, "sync_every": 8}
        traces = eager_traces(3 + seed % 3, seed, optimizing, **rules)
        assert all(trace.synchronous == [8, 16, 24] for trace in traces)
        assert_equal_at(traces, [8, 9, 16, 17, 24, 25, 0])
        skipped += sum(trace.skipped for trace in traces)
    assert skipped  # somebody was too late


@looped("seed", range(5))
def test_a_history_as_long_as_a_period_is_never_overrun(seed: int) -> None:
    traces = eager_traces(4, seed, momentum, history=6, sync_every=8)  # rounds 1 to 6 before 7; 8 waits
    assert not any(trace.skipped for trace in traces)
    assert_equal_at(traces, range(31))


def test_an_overrun_history_without_synchronous_rounds_is_an_error() -> None:
    words = r"rank \d came \d+ rounds late .* history=1 .*: \d+ results are lost.* sync_every.* history of at least"
    with pytest.raises(asyncoll.UsageError, match=words):
        eager_traces(3, 0, momentum, history=1)


@looped(
    ("rules", "words"),
    [
        ({"history": 3, "average_every": 2}, "average_every is for training with history=0"),
        ({"partial": "some"}, "partial is solo, majority or quorum"),
        ({"partial": "quorum", "quorum": 4}, "quorum 4 is not between 1 and the number of ranks, 3"),
        ({"partial": "quorum", "quorum": 0}, "quorum 0 is not between"),
        ({"partial": "majority", "candidates": 4}, "candidates 4"),
    ],
)
def test_impossible_options_are_usage_errors(rules: dict[str, Any], words: str) -> None:
    with pytest.raises(asyncoll.UsageError, match=words):
        eager_traces(3, 0, momentum, **rules)


@looped(("size", "quorum", "least"), [(4, 3, 3), (5, None, 3), (3, 3, 3)])
def test_every_round_has_a_quorum(size: int, quorum: int | None, least: int) -> None:
    async def main(comm: asyncoll.Communicator) -> list[int]:
        model = torch.nn.Linear(2, 1)

        async def gradient(round_: int) -> None:
            model(torch.ones(1, 2)).sum().backward()
            await asyncio.sleep(straggle(1, comm, round_))

        steps = eager_sgd(comm, model, momentum(model), gradient, rounds=20, partial="quorum", quorum=quorum)
        return [done.active async for done in steps]

    assert min(active for of_rank in simulate(size, main).results for active in of_rank) >= least


@looped("size", range(1, 10))
def test_a_quorum_is_a_majority_unless_it_is_given(size: int) -> None:
    """The default was once half of the ranks: of two ranks one, so every round was solo."""

    async def main(comm: asyncoll.Communicator) -> list[int]:
        model = torch.nn.Linear(2, 1)

        async def gradient(round_: int) -> None:
            model(torch.ones(1, 2)).sum().backward()
            await asyncio.sleep(1 + 0.1 * comm.rank)  # so ranks arrive one after another

        steps = eager_sgd(comm, model, momentum(model), gradient, rounds=10, partial="quorum")
        return [done.active async for done in steps]

    assert min(active for of_rank in simulate(size, main).results for active in of_rank) == size // 2 + 1


@pytest.mark.parametrize("optimizing", OPTIMIZERS)
@looped(("losses", "source"), [([0, 0, 0], None), ([2, 0, 0], 1), ([0, 0, 5], 0), ([3, 1, 2], 1), ([2, 2, 2], 0)])
def test_the_rank_that_lost_least_is_the_source(losses: list[int], source: int | None, optimizing: Optimizing) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[bytes, bytes]:
        torch.manual_seed(comm.rank)
        model = torch.nn.Linear(2, 3)
        optimizer = optimizing(model)
        flat = asyncoll.flatten(model)
        for _ in range(1 + comm.rank):
            flat.gradients.fill_(1.0 + comm.rank)
            optimizer.step()
        before = state(model, optimizer)
        await resynchronise(comm, model, flat, optimizer, losses[comm.rank])
        return before, state(model, optimizer)

    results = run_ranks(3, main)
    befores = [before for before, _ in results]
    assert [after for _, after in results] == (befores if source is None else [befores[source]] * 3)


def test_a_state_of_numbers_is_resynchronised_and_an_object_is_an_error() -> None:
    async def main(comm: asyncoll.Communicator) -> int:
        model = torch.nn.Linear(2, 1)
        optimizer = momentum(model)
        flat = asyncoll.flatten(model)
        optimizer.state[model.weight]["steps"] = 7 - comm.rank
        await resynchronise(comm, model, flat, optimizer, lost=1)
        steps: int = optimizer.state[model.weight]["steps"]
        assert steps == 7
        optimizer.state[model.weight]["steps"] = object()
        await resynchronise(comm, model, flat, optimizer, lost=1)
        return steps

    with pytest.raises(asyncoll.UsageError, match="SGD keeps 'steps' as a object"):
        run_ranks(2, main)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_on_real_sockets_a_rank_that_lost_results_ends_with_the_others_bits(optimizer: str) -> None:
    main = runpy.run_path(str(SCRIPTS / "late_replica.py"))["main"]
    results = run_ranks(3, lambda comm: main(comm, optimizer), transport="zmq")
    assert len({digest for digest, _, _ in results}) == 1
    assert results[-1][1] > 0


@pytest.mark.slow
def test_in_real_processes_a_rank_that_lost_results_ends_with_the_others_bits() -> None:
    launch = [sys.executable, "-m", "asyncoll.cli", "launch", "-n", "3", SCRIPTS / "late_replica.py"]
    done = subprocess.run([*map(str, launch)], env=PRELOADED, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"weights and state (\w+), (\d+) results lost, (\d+) caught up", done.stdout)
    assert len(lines) == 3
    assert len({digest for digest, _, _ in lines}) == 1
    assert max(int(lost) for _, lost, _ in lines) > 0


# -- WAGMA ---------------------------------------------------------------------------------------


def plain(optimizing: Optimizing, rounds: int, batch: int = 8) -> torch.Tensor:
    """The steps of the optimizer alone, without a trainer."""
    workload = Digits(0, 1, batch, seed=2)
    optimizer = optimizing(workload.model)
    for _ in range(rounds):
        optimizer.zero_grad()
        workload.loss().backward()
        optimizer.step()
    return parameters(workload.model)


ALONE: dict[str, Callable[..., Any]] = {
    "wagma": wagma_sgd,
    "wagma, average first": functools.partial(wagma_sgd, order="average-then-step"),
    "dc_s3gd": dc_s3gd,
    "eager": functools.partial(eager_sgd, history=5, sync_every=4),
}


@looped("optimizing", OPTIMIZERS)
@looped("trainer", ALONE)
def test_one_rank_is_the_bare_optimizer_bit_for_bit(trainer: str, optimizing: Optimizing) -> None:
    async def main(comm: asyncoll.Communicator) -> torch.Tensor:
        workload = Digits(0, 1, batch=8, seed=2)

        async def gradient(round_: int) -> None:
            workload.loss().backward()

        optimizer = optimizing(workload.model)
        async for _ in ALONE[trainer](comm, workload.model, optimizer, gradient, rounds=12):
            pass
        return parameters(workload.model)

    assert torch.equal(run_ranks(1, main)[0], plain(optimizing, rounds=12))


async def together(comm: asyncoll.Communicator) -> float:
    """The same virtual time at every rank, not in the past."""
    now = torch.tensor([asyncio.get_running_loop().time()], dtype=torch.float64)
    return float(await comm.allreduce(now, op=asyncoll.MAX)) + 1.0


def test_wagma_in_one_group_without_late_ranks_is_synchronous_sgd() -> None:
    """Averaging models and averaging gradients are the same for a linear optimizer, up to rounding."""

    async def main(comm: asyncoll.Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        async def trained(trainer: Callable[..., Any]) -> torch.Tensor:
            workload = Digits(comm.rank, comm.size, batch=8, seed=4)
            loop = asyncio.get_running_loop()
            started_s = await together(comm)

            async def gradient(round_: int) -> None:
                workload.loss().backward()
                await asyncio.sleep(started_s + round_ - loop.time())  # all ranks arrive at one instant

            async for done in trainer(comm, workload.model, momentum(workload.model), gradient, rounds=12):
                assert (done.active, done.included, done.skipped) == (comm.size, True, 0)
            return parameters(workload.model)

        wagma = functools.partial(wagma_sgd, group_size=comm.size, sync_every=5)
        return await trained(wagma), await trained(allreduce_sgd)

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
        async for done in wagma_sgd(comm, model, optimizer, gradient, rounds=25, **rules):
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
    async def main(comm: asyncoll.Communicator) -> tuple[dict[int, bytes], bytes, list[Any]]:
        workload = Digits(comm.rank, comm.size, batch=8, seed=0)
        consensus = Consensus()
        after: dict[int, bytes] = {}

        async def gradient(round_: int) -> None:
            workload.loss().backward()
            await asyncio.sleep(straggle(size, comm, round_))

        model = workload.model
        rules: dict[str, Any] = {"sync_every": 6, "order": order, "observe": consensus.observe}
        async for done in wagma_sgd(comm, model, optimizing(model), gradient, rounds=20, **rules):
            if done.synchronous:
                after[done.round] = parameters(model).numpy().tobytes()
        return after, parameters(model).numpy().tobytes(), await consensus.collect(comm)

    results = simulate(size, main).results
    assert len({end for _, end, _ in results}) == 1
    for after, _, distances in results:
        assert list(after) == [6, 12, 18]
        assert [round_ for round_, _ in distances] == [6, 12, 18, 20]
        assert all(0.0 < distance < 1.0 for _, distance in distances)
        assert distances == results[0][2]
        if order == "step-then-average":  # otherwise each rank has taken a step of its own since
            assert after == results[0][0]


def test_the_groups_default_to_the_square_root_of_the_ranks() -> None:
    async def main(comm: asyncoll.Communicator) -> int:
        model = torch.nn.Linear(2, 1)

        async def gradient(round_: int) -> None:
            await asyncio.sleep(1.0)

        async for done in wagma_sgd(comm, model, momentum(model), gradient, rounds=1):
            return len(done.group)
        raise AssertionError

    sizes = {size: max(simulate(size, main).results) for size in (1, 2, 4, 5, 9, 10, 16)}
    assert sizes == {1: 1, 2: 2, 4: 2, 5: 3, 9: 3, 10: 4, 16: 4}


def digits_score(trainer: Callable[..., Any], size: int, **rules: Any) -> float:
    """Test accuracy after the default 180 rounds, one random rank of each late by two steps."""
    settings = Settings()

    async def main(comm: asyncoll.Communicator) -> float:
        workload = Digits(comm.rank, comm.size, settings.batch, settings.seed)
        optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.0)

        async def gradient(round_: int) -> None:
            workload.loss().backward()
            await asyncio.sleep(0.1 + OneRandom(0.2).delay_s(0, round_, comm.rank, comm.size))

        def schedule(round_: int) -> None:
            optimizer.param_groups[0]["lr"] = learning_rate(round_, settings)

        rounds = settings.rounds
        async for _ in trainer(comm, workload.model, optimizer, gradient, rounds=rounds, schedule=schedule, **rules):
            pass
        return workload.score()

    score: float = simulate(size, main).results[0]
    return score


def test_wagma_with_stragglers_learns_as_well_as_synchronous_sgd() -> None:
    synchronous = digits_score(allreduce_sgd, 4)
    assert synchronous > 0.96
    for order in get_args(Order):
        assert digits_score(wagma_sgd, 4, order=order) > synchronous - 0.02


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

        async for _ in wagma_sgd(comm, model, momentum(model), gradient, rounds=3, **rules):
            pass

    with pytest.raises(asyncoll.UsageError, match=words):
        run_ranks(3, main)


def test_the_consensus_distance_is_a_root_mean_square_over_ranks() -> None:
    async def main(comm: asyncoll.Communicator) -> list[Any]:
        own, mean = torch.tensor([float(comm.rank), 3.0]), torch.tensor([1.0, 3.0])
        consensus = Consensus()
        consensus.observe(10, own, mean)
        consensus.observe(20, mean, mean)
        consensus.observe(20, own, mean)  # the average at the end, after a synchronous round
        return await consensus.collect(comm)

    for distances in run_ranks(3, main):
        assert distances == [(10, pytest.approx(math.sqrt((1 + 0 + 1) / 3 / 10))), (20, 0.0)]


# -- DC-S3GD -------------------------------------------------------------------------------------


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

        steps = dc_s3gd(comm, workload.model, optimizer, gradient, rounds=10)
        done = [step async for step in steps]
        assert [step.round for step in done] == list(range(1, 11))
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

        async for _ in dc_s3gd(comm, model, optimizer, gradient, rounds=rounds, lambda0=lambda0):
            pass
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


def test_the_allreduce_overlaps_the_gradient() -> None:
    """Iterations take max(compute, allreduce) and not their sum (equation 14), in virtual time."""
    rounds, compute_s = 20, 1.0

    def measure(trainer: Callable[..., Any], compute_s: float) -> float:
        async def main(comm: asyncoll.Communicator) -> None:
            model = torch.nn.Linear(250, 10)

            async def gradient(round_: int) -> None:
                await asyncio.sleep(compute_s)

            async for _ in trainer(comm, model, momentum(model), gradient, rounds=rounds):
                pass

        return simulate(4, main, Network(bandwidth_bytes_per_s=20e3)).virtual_s

    sending_s = measure(allreduce_sgd, 0.0) / (rounds + 1)  # the broadcast at the start is about one more
    assert 0.5 < sending_s / compute_s < 2.0
    ideal_s = rounds * max(sending_s, compute_s) + 2 * sending_s
    assert measure(dc_s3gd, compute_s) == pytest.approx(ideal_s, rel=0.1)
    assert measure(allreduce_sgd, compute_s) == pytest.approx((rounds + 1) * sending_s + rounds * compute_s, rel=0.1)


class TroubleError(Exception):
    """An exception of a user's gradient."""


@pytest.mark.parametrize("how", ["raise", "cancel", "stop"])
def test_dc_s3gd_leaves_no_call_under_way(how: str) -> None:
    """However the training ends, the next collective is correct."""

    async def main(comm: asyncoll.Communicator) -> float:
        model = torch.nn.Linear(3, 1)

        async def gradient(round_: int) -> None:
            model(torch.ones(1, 3)).sum().backward()
            if how == "raise" and round_ == 4:
                raise TroubleError
            await asyncio.sleep(1.0)

        async def train() -> None:
            async for done in dc_s3gd(comm, model, momentum(model), gradient, rounds=9):
                if how == "stop" and done.round == 4:
                    break

        task = asyncio.ensure_future(train())
        if how == "cancel":
            await asyncio.sleep(3.5 + 0.1 * comm.rank)  # in the gradient of the same round at all ranks
            task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(outcome, {"raise": TroubleError, "cancel": asyncio.CancelledError, "stop": type(None)}[how])
        return float(await comm.allreduce(torch.ones(1)))

    assert simulate(3, main).results == [3.0] * 3


# -- the driver ----------------------------------------------------------------------------------


def test_the_rate_rises_and_falls_by_rounds() -> None:
    settings = Settings(rounds=9, learning_rate=0.5)
    rates = [learning_rate(round_, settings) for round_ in range(1, settings.rounds + 1)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.4, 0.3, 0.2, 0.1])


def run_experiment(size: int, trainer: str, settings: Settings) -> Report:
    async def main(comm: asyncoll.Communicator) -> Report | None:
        return await experiment(comm, trainer, settings)

    report, *others = run_ranks(size, main)
    assert report is not None
    assert not any(others)
    return report


@pytest.mark.parametrize("trainer", TRAINERS)
def test_digits_are_learnt(trainer: str) -> None:
    report = run_experiment(4, trainer, Settings.of(trainer))
    assert report.final_score > 0.96
    assert report.time_to_target_s is not None


@pytest.mark.parametrize("trainer", TRAINERS)
@looped("size", SIZES)
def test_a_report_accounts_for_every_round_and_call(trainer: str, size: int, tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    settings = Settings.of(trainer, rounds=5, target=1.0, report=path, imbalance=OneRandom(0.0))
    report = run_experiment(size, trainer, settings)
    assert report.rounds == 5
    if trainer != "wagma_sgd":  # where each group has a sum of its own
        assert sum(report.active.values()) == 5
    assert [round_ for round_, _ in report.consensus] == ([5] if trainer == "wagma_sgd" else [])
    assert sum(report.lag.values()) <= 5 * size
    assert 0.0 <= report.stale_share < 1.0
    assert report.active_mean <= size
    assert report.curve[-1].round == 5
    assert report.time_to_target_s is None
    if trainer in ("allreduce_sgd", "dc_s3gd", "oktopk_sgd"):
        assert (report.active, report.lag, report.stale_share) == ({size: 5}, {0: 5 * size}, 0.0)

    report.write(path)
    read = json.loads(path.read_text())
    assert read["settings"]["imbalance"] == "one-random:0ms"
    assert read["settings"]["report"] == str(path)
    assert read["ranks"] == size
    assert read["curve"][-1] == [report.wall_s, 5, report.final_score]
    assert set(read) == set(Report.__dataclass_fields__)


# -- workloads -----------------------------------------------------------------------------------


@pytest.fixture
def small_hyperplane(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"DIMENSIONS": 64, "POINTS": 1024, "HELD_OUT": 256}.items():
        monkeypatch.setattr(Hyperplane, name, value)


@pytest.mark.usefixtures("small_hyperplane")
@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_hyperplane_is_learnt(trainer: str) -> None:
    settings = Settings.of(trainer, "hyperplane", batch=32, rounds=60, density=0.2)  # so few rounds: 1 / 0.02 are 50
    report = run_experiment(4, trainer, settings)
    assert report.metric == "R² on held-out points"
    assert report.final_score > 0.9
    assert report.curve[0].score < 0.5


def test_settings_follow_what_is_given_then_the_workload_then_the_trainer() -> None:
    assert Settings.of("allreduce_sgd") == Settings()
    assert Settings.of("wagma_sgd").sync_every == 10
    assert Settings.of("wagma_sgd", sync_every=0).sync_every == 0
    assert Settings.of("dc_s3gd", "hyperplane").rounds == 96
    assert Settings.of("dc_s3gd", "hyperplane", rounds=7, batch=None) == Settings.of("dc_s3gd", "hyperplane", rounds=7)


# -- the command line ----------------------------------------------------------------------------


@looped(
    ("arguments", "words"),
    [
        (["eager_sgd", "--compute", "10"], "'10' is not a duration such as 100ms"),
        (["eager_sgd", "--imbalance", "one-random:soon"], "'soon' is not a duration"),
        (["eager_sgd", "--partial", "some"], "'some' is not one of"),
        (["allreduce_sgd", "--partial", "solo"], "No such option"),
        (["wagma_sgd", "--partial", "solo"], "No such option"),
        (["eager_sgd", "--group-size", "2"], "No such option"),
        (["eager_sgd", "--lambda0", "0"], "No such option"),
        (["dc_s3gd", "--lambda0", "-1"], "-1.0 is not in the range"),
        (["wagma_sgd", "--order", "any"], "'any' is not one of"),
        (["wagma_sgd", "--group-size", "0"], "0 is not in the range"),
        (
            ["wagma_sgd", "--group-size", "2", "--rounds", "1"],
            "group_size 2 is not between 1 and",
        ),
        (["eager_sgd", "--partial", "quorum", "--quorum", "2"], "quorum 2 is not between 1 and"),
        (["eager_sgd", "--partial", "majority", "--candidates", "2"], "candidates 2"),
        (["eager_sgd", "--average-every", "5"], "with history no replica drifts"),
        (["allreduce_sgd", "--density", "0.1"], "No such option"),
        (["oktopk_sgd", "--density", "0"], "0.0 is not in the range"),
        (["oktopk_sgd", "--algorithm", "best"], "'best' is not one of"),
        (["oktopk_sgd", "--momentum", "0.9"], "take accumulate='gradients'"),
        (["eager_sgd", "--batch", "2000"], "a batch of 2000 is more than a rank's share of 1257 samples"),
        (["allreduce_sgd", "--workload", "cats"], "'cats' is not"),
        (["eager_sgd", "--average-every", "-1"], "-1 is not in the range"),
        (["demo", "--ranks", "1"], "1 is not in the range"),
    ],
)
def test_bad_flags_are_usage_errors(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_one_process_alone_trains_and_reports(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    flags = ["--rounds", "3", "--report", str(report)]
    result = CliRunner().invoke(cli, ["eager_sgd", *flags], catch_exceptions=False)
    assert result.exit_code == 0
    assert "final test accuracy" in result.output
    assert json.loads(report.read_text())["ranks"] == 1


@pytest.mark.slow
def test_the_launcher_runs_a_trainer_that_plots(tmp_path: Path) -> None:
    path, plot = tmp_path / "report.json", tmp_path / "plot.png"
    launch = [sys.executable, "-m", "asyncoll.cli", "launch", "-n", "3", "-m", "trainers", "eager_sgd"]
    done = subprocess.run(
        [*launch, "--rounds", "4", "--partial", "majority", "--report", str(path), "--plot", str(plot)],
        env=PRELOADED,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(path.read_text())["ranks"] == 3
    assert plot.read_bytes().startswith(b"\x89PNG")
