"""Eager-SGD: equal replicas although ranks are late, skip rounds, lose results, and leave at different rounds."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import runpy
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pytest
import torch
from torch import nn

import asyncoll
from asyncoll.extending import register_policy
from asyncoll.testing import Network, run_ranks, simulate
from asyncoll.torch.hooks import EagerSGDState
from asyncoll.training import EagerSGD, WagmaSGD
from asyncoll.training.eager_sgd import HISTORY, Partial
from asyncoll.training.step import Step
from tests.support.cases import looped
from tests.support.places import SCRIPTS
from tests.support.processes import ForkedRank
from tests.support.training_loops import (
    Digits,
    Optimizing,
    adam,
    bits,
    loss,
    momentum,
    network,
    parameters,
    state,
    straggle,
    train,
    whole,
)

SIZES = [1, 3, 4]
PARTIALS = (*get_args(Partial), "most")
register_policy("most", lambda view: 2 * view.count() > view.size)
OPTIMIZERS = [momentum, adam]
SCRIPT = SCRIPTS / "training/rank_later_than_history.py"


@looped("partial", ["solo", "majority"])
@looped("size", SIZES)
def test_eager_sgd_ends_with_one_model_at_the_last_round(size: int, partial: Partial) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[torch.Tensor, list[int]]:
        workload = Digits(comm.rank, comm.size, batch=8, seed=0)
        optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.1)

        async def gradient(round_: int) -> None:
            workload.loss().backward()

        sgd = EagerSGD(comm, workload.model, optimizer, partial=partial, average_every=3)
        seen = [step.round async for step in train(sgd, gradient, 7)]
        assert sgd.round >= 7
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

    async def main(comm: asyncoll.Communicator) -> tuple[int, int, list[int], torch.Tensor]:
        averages = 0
        allreduce = comm.allreduce

        def counted(x: torch.Tensor, op: asyncoll.ReduceOp = asyncoll.SUM) -> object:
            nonlocal averages
            averages += op is asyncoll.AVG
            return allreduce(x, op)

        comm.allreduce = counted  # type: ignore[method-assign, assignment]
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        async def gradient(round_: int) -> None:
            late = comm.rank == size - 1 and round_ % 4 == 1
            model(torch.full((1, 2), float(comm.rank))).sum().backward()
            await asyncio.sleep(1.0 + 6.5 * late)

        sgd = EagerSGD(comm, model, optimizer, partial=partial, average_every=average_every)
        seen = [step.round async for step in train(sgd, gradient, rounds)]
        return averages, sgd.round, seen, parameters(model)

    results = simulate(size, main).results
    for averages, end, seen, model in results:
        assert rounds <= end <= rounds + 1  # the last round takes gradients that were too late
        assert averages == rounds // average_every + 1  # all ranks leave after the same round, and average once more
        assert seen[-1] == rounds
        assert (end, bits(model)) == (results[0][1], bits(results[0][3]))
    if average_every == 100 and partial == "solo":
        assert len(results[-1][2]) < rounds == len(results[0][2])


@dataclass
class Trace:
    """The record of one rank."""

    states: dict[int, Any]  # after the round; the end is round 0
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
        async for done in train(EagerSGD(comm, model, optimizer, **rules), gradient, 30):
            trace.states[done.round] = whole(model), state(optimizer)
            trace.skipped += done.skipped
            trace.missed += len(done.missed)
            if done.synchronous:
                trace.synchronous.append(done.round)
        trace.states[0] = whole(model), state(optimizer)
        return trace

    results: list[Trace] = simulate(size, main, Network(jitter_s=1e-3), seed=seed).results
    return results


def assert_equal_at(traces: list[Trace], rounds: Iterable[int]) -> None:
    for round_ in rounds:
        assert len({str(trace.states[round_]) for trace in traces if round_ in trace.states}) == 1, f"round {round_}"


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
        kept = {} if seed % 2 else {"history": 30}  # by default more
        traces = eager_traces(2 + seed % 4, seed, optimizing, **kept, **rules)
        assert_equal_at(traces, range(31))
        assert not any(trace.skipped for trace in traces)
        missed += sum(trace.missed for trace in traces)
    assert missed  # a rank was late


@looped("optimizing", OPTIMIZERS)
@pytest.mark.parametrize("partial", ["solo", "majority", "quorum"])
def test_replicas_beyond_the_history_are_equal_again_after_a_synchronous_round(
    partial: Partial, optimizing: Optimizing
) -> None:
    skipped = 0
    for seed in range(5):
        quorum = 1 if partial == "quorum" else None
        rules = {"partial": partial, "quorum": quorum, "history": 1, "sync_every": 8}
        traces = eager_traces(3 + seed % 3, seed, optimizing, **rules)
        assert all(trace.synchronous == [8, 16, 24] for trace in traces)
        assert_equal_at(traces, [8, 9, 16, 17, 24, 25, 0])
        skipped += sum(trace.skipped for trace in traces)
    assert skipped  # a rank was too late


@looped("seed", range(5))
def test_a_history_as_long_as_a_period_is_never_overrun(seed: int) -> None:
    traces = eager_traces(4, seed, momentum, history=6, sync_every=8)  # rounds 1 to 6 before 7; 8 waits
    assert not any(trace.skipped for trace in traces)
    assert_equal_at(traces, range(31))


@looped(
    ("rules", "rounds", "recovers", "skipped"),
    [
        ({}, 65, False, 0),
        ({}, 66, True, 1),
        ({"history": 3}, 5, True, 1),
        ({"average_every": 100}, 5, False, 4),
        ({"history": 0}, 5, False, 4),
    ],
)
def test_a_trainer_keeps_64_results_unless_it_averages_models(
    rules: dict[str, int], rounds: int, recovers: bool, skipped: int
) -> None:
    """A late rank gets the newest result, and those that were kept."""

    async def main(comm: asyncoll.Communicator) -> Step | None:
        model = network()
        sgd, late = EagerSGD(comm, model, momentum(model), **rules), None  # type: ignore[arg-type]
        await sgd.start()
        await comm.barrier()
        await asyncio.sleep(rounds * comm.rank)
        while sgd.round < rounds:
            loss(model, comm.rank, sgd.round).backward()
            late = await sgd.step()
        await sgd.finish()
        return late

    late = simulate(2, main).results[1]
    assert (late.recovered, late.skipped) == (recovers, skipped)
    assert inspect.signature(EagerSGDState).parameters["history"].default == HISTORY == 64


# -- recovery ------------------------------------------------------------------------------------


class Late(NamedTuple):
    """One rank of a training in which ranks are late."""

    states: dict[int, Any]  # after the round; the end is round 0
    recovered: list[int]
    rates: list[float]
    longest_s: float  # of its steps in which it did not recover


def recoveries(size: int, late: Collection[int], history: int, optimizing: Optimizing, **rules: Any) -> list[Late]:
    """Train until round 40. Each of the ranks `late` sleeps for eleven rounds of the others, again and again."""

    async def main(comm: asyncoll.Communicator) -> Late:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = optimizing(model)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=40)
        samples = torch.Generator().manual_seed(comm.rank)
        sgd = EagerSGD(comm, model, optimizer, history=history, scheduler=scheduler, **rules)
        found, now = Late({}, [], [], 0.0), asyncio.get_running_loop().time
        longest_s = 0.0
        await sgd.start()
        while sgd.round < 40:
            model(torch.randn(4, 3, generator=samples)).square().mean().backward()
            await asyncio.sleep(11.5 if comm.rank in late and sgd.round < 30 else 1.0)
            began_s = now()
            done = await sgd.step()
            if done.recovered:
                found.recovered.append(done.round)
                assert done.skipped
            else:
                longest_s = max(longest_s, now() - began_s)
            assert done.round == sgd.round == scheduler.last_epoch
            found.states[done.round] = {name: bits(p) for name, p in model.named_parameters()}, state(optimizer)
        await sgd.finish()
        found.states[0] = whole(model), state(optimizer)
        return found._replace(rates=scheduler.get_last_lr(), longest_s=longest_s)

    results: list[Late] = simulate(size, main, Network(jitter_s=1e-3)).results
    return results


@looped("optimizing", OPTIMIZERS)
@looped("history", [1, 4])
@looped(("size", "late"), [(2, {1}), (3, {0}), (4, {1, 3}), (5, {0, 1, 2, 3}), (7, {1, 2, 3, 4, 5, 6})])
def test_a_rank_later_than_the_history_goes_on_from_the_state_of_another(
    size: int, late: set[int], history: int, optimizing: Optimizing
) -> None:
    results = recoveries(size, late, history, optimizing)
    for round_ in set.union(*(set(each.states) for each in results)):
        assert len({repr(each.states[round_]) for each in results if round_ in each.states}) == 1, round_
    assert all(each.recovered == [] or rank in late for rank, each in enumerate(results))
    assert sum(len(each.recovered) for each in results) >= len(late)
    assert all(each.rates == results[0].rates for each in results)
    assert all(each.longest_s < 0.1 for each in results)  # of virtual time: nothing waits for a late rank


@pytest.mark.parametrize("partial", ["majority", "quorum"])
def test_a_rank_recovers_from_ranks_that_wait_for_it(partial: Partial) -> None:
    """Rounds of all but one rank go on without the late one; the ranks then wait for it in a round of a quorum."""
    rules: dict[str, Any] = {"quorum": 3} if partial == "quorum" else {"candidates": 4}
    results = recoveries(4, {2}, 1, momentum, partial=partial, **rules)
    assert results[2].recovered
    assert all(each.states[0] == results[0].states[0] for each in results)


def test_the_only_rank_in_time_gives_its_state_while_it_ends() -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[list[bool], Any, str]:
        model = network()
        optimizer = momentum(model)
        sgd = EagerSGD(comm, model, optimizer, history=1)
        await sgd.start()
        recovered = []
        while sgd.round < 20:
            loss(model, comm.rank, sgd.round + 1).backward()
            await asyncio.sleep(1.0 if comm.rank == 1 else 100.0)  # the others come when rank 1 waits in `finish`
            recovered.append((await sgd.step()).recovered)
        await sgd.finish()
        return recovered, whole(model), state(optimizer)

    results = simulate(4, main).results
    assert [recovered for recovered, _, _ in results] == [[True], [False] * 20, [True], [True]]
    assert all(each[1:] == results[0][1:] for each in results)


def test_a_rank_that_recovers_gets_no_weights_that_another_one_has_between_its_steps() -> None:
    """As in a validation with averaged weights that awaits something."""

    async def main(comm: asyncoll.Communicator) -> tuple[bool, float]:
        model = torch.nn.Linear(2, 1)
        torch.nn.init.zeros_(model.weight)
        sgd = EagerSGD(comm, model, torch.optim.SGD(model.parameters(), lr=0.1), history=1)
        await sgd.start()
        has_recovered = False
        while sgd.round < 30:
            model(torch.ones(1, 2)).sum().backward()
            if comm.rank == 0 and sgd.round == 2:
                await asyncio.sleep(5.3)
            step = await sgd.step()
            has_recovered |= step is not None and step.recovered
            weight = model.weight.detach().clone()
            torch.nn.init.constant_(model.weight, 1000.0)
            await asyncio.sleep(0.4)
            with torch.no_grad():
                model.weight.copy_(weight)
        await sgd.finish()
        return has_recovered, float(model.weight.detach().max())

    results = simulate(3, main).results
    assert results[0][0]
    assert len({weight for _, weight in results}) == 1
    assert results[0][1] < 0


def test_buffers_of_a_rank_that_recovers_are_those_of_the_other_unless_they_are_local() -> None:
    async def main(comm: asyncoll.Communicator, buffers: Literal["broadcast", "local"]) -> int:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        sgd = EagerSGD(comm, model, momentum(model), history=1, buffers=buffers)
        await sgd.start()
        while sgd.round < 20:
            model(torch.randn(4, 3)).square().sum().backward()
            await asyncio.sleep(1.0 + 100.0 * comm.rank)
            await sgd.step()
        seen = int(model[1].num_batches_tracked)
        await sgd.finish()
        return seen

    assert simulate(2, lambda comm: main(comm, "broadcast")).results == [20, 20]
    assert simulate(2, lambda comm: main(comm, "local")).results == [20, 1]


@looped("seed", range(8))
def test_a_recovery_that_is_cancelled_is_made_by_the_next_step_and_loses_no_gradient(seed: int) -> None:
    """The models are the sum of all gradients, exactly: also of those that were computed with models of long ago."""
    size = 2 + seed % 4

    async def main(comm: asyncoll.Communicator) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        model = torch.nn.Linear(6, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        sgd = EagerSGD(comm, model, optimizer, history=1)
        await sgd.start()
        draw = np.random.default_rng((seed, comm.rank))
        total, cancelled, recovered = torch.zeros(6), 0, 0
        while sgd.round < 60:
            gradient = torch.from_numpy(draw.integers(-50, 51, 6).astype("f4"))
            model(gradient[None]).sum().backward()
            total += gradient
            await asyncio.sleep(1.0 if comm.rank == 0 else draw.exponential(6.0))
            step = asyncio.ensure_future(sgd.step())
            if comm.rank and draw.random() < 0.5:
                await asyncio.sleep(draw.exponential(1e-3))
                step.cancel()
            (outcome,) = await asyncio.gather(step, return_exceptions=True)
            if isinstance(outcome, asyncio.CancelledError):
                cancelled += 1
            else:
                assert isinstance(outcome, Step), outcome
                recovered += outcome.recovered
        await sgd.finish()
        return parameters(model), total, cancelled, recovered

    results = simulate(size, main, Network(jitter_s=1e-3), seed=seed).results
    expected = -0.25 / size * sum(total for _, total, _, _ in results)
    for model, _, _, _ in results:
        torch.testing.assert_close(model, expected, rtol=1e-5, atol=1e-4)
        assert torch.equal(model, results[0][0])
    assert sum(cancelled for _, _, cancelled, _ in results)
    assert sum(recovered for _, _, _, recovered in results)


@looped(
    ("rules", "words"),
    [
        ({"history": 3, "average_every": 2}, "average_every is for training with history=0"),
        ({"partial": "some"}, "one of solo, majority, quorum.*, not 'some': asyncoll.extending.register_policy adds"),
        ({"quorum": 2}, "quorum=2 belongs to partial=\"quorum\", and partial is 'solo'"),
        ({"partial": "majority", "quorum": 2}, "quorum=2 belongs to partial=\"quorum\", and partial is 'majority'"),
        ({"candidates": 2}, "candidates=2 belongs to partial=\"majority\", and partial is 'solo'"),
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

        sgd = EagerSGD(comm, model, momentum(model), partial="quorum", quorum=quorum)
        return [done.active async for done in train(sgd, gradient, 20)]

    assert min(active for of_rank in simulate(size, main).results for active in of_rank) >= least


@looped("size", range(1, 10))
def test_a_quorum_is_a_majority_unless_it_is_given(size: int) -> None:
    """The default was once half of the ranks: of two ranks one, so every round was solo."""

    async def main(comm: asyncoll.Communicator) -> list[int]:
        model = torch.nn.Linear(2, 1)

        async def gradient(round_: int) -> None:
            model(torch.ones(1, 2)).sum().backward()
            await asyncio.sleep(1 + 0.1 * comm.rank)  # so ranks arrive one after another

        sgd = EagerSGD(comm, model, momentum(model), partial="quorum")
        return [done.active async for done in train(sgd, gradient, 10)]

    assert min(active for of_rank in simulate(size, main).results for active in of_rank) == size // 2 + 1


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_on_real_sockets_a_rank_that_lost_results_ends_with_the_others_bits(optimizer: str) -> None:
    main = runpy.run_path(str(SCRIPT))["main"]
    results = run_ranks(3, lambda comm: main(comm, optimizer), transport="zmq")
    assert len({digest for digest, _, _ in results}) == 1
    assert results[-1][1] > 0


@pytest.mark.slow
def test_in_real_processes_a_rank_that_lost_results_ends_with_the_others_bits(
    forked_world: Callable[..., list[ForkedRank]],
) -> None:
    lines = []
    for rank in forked_world(dict(os.environ), 3, SCRIPT):
        code, out, err = rank.end()
        assert code == 0, err
        lines += re.findall(r"weights and state (\w+), (\d+) results lost, (\d+) caught up", out)
    assert len(lines) == 3
    assert len({digest for digest, _, _ in lines}) == 1
    assert max(int(lost) for _, lost, _ in lines) > 0


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"ASYNCOLL_TRANSPORT": "zmq"}], ids=["memory", "messages"])
@pytest.mark.parametrize("ends", ["steps", "ends"])
def test_in_real_processes_a_rank_that_stands_still_recovers(
    forked_world: Callable[..., list[ForkedRank]], tmp_path: Path, ends: str, more: dict[str, str]
) -> None:
    os.mkfifo(tmp_path / "go on")
    lines = []
    for rank in forked_world(os.environ | more, 2, SCRIPT.with_name("rank_that_pauses.py"), str(tmp_path), ends):
        code, out, err = rank.end()
        assert code == 0, err
        lines.append(re.findall(r"(\w+) after round (\d+), (\d+) recovered", out))
    ((digest, last, never),), ((other, end, once),) = lines
    assert (digest, last, never, once) == (other, end, "0", "1")


# -- the end -------------------------------------------------------------------------------------


def ends(size: int, seed: int, stop: Callable[[int], int], **rules: Any) -> list[tuple[int, Any, str]]:
    """The newest round, the model and the optimizer at ranks that leave after round `stop(rank)`, or a later one."""

    async def main(comm: asyncoll.Communicator) -> tuple[int, Any, str]:
        model = network()
        optimizer = momentum(model)
        sgd = EagerSGD(comm, model, optimizer, **rules)
        await sgd.start()
        while sgd.round < stop(comm.rank):
            loss(model, comm.rank, sgd.round + 1).backward()
            await asyncio.sleep(straggle(seed, comm, sgd.round))
            await sgd.step()
        await sgd.finish()
        return sgd.round, whole(model), state(optimizer)

    results: list[tuple[int, Any, str]] = simulate(size, main, Network(jitter_s=1e-3), seed=seed).results
    return results


@pytest.mark.parametrize("partial", PARTIALS)
@looped("history", [0, 30])
@looped("seed", range(6))
def test_ranks_that_leave_at_different_rounds_have_equal_models(partial: str, history: int, seed: int) -> None:
    results = ends(2 + seed % 4, seed, lambda rank: 3 + (5 * rank + seed) % 11, partial=partial, history=history)
    assert len({round_ for round_, _, _ in results}) == 1
    assert all(model == results[0][1] for _, model, _ in results)
    if history:
        assert all(kept == results[0][2] for _, _, kept in results)


@pytest.mark.parametrize("partial", PARTIALS)
@looped("seed", range(6))
def test_ranks_that_leave_before_an_average_have_equal_models(partial: str, seed: int) -> None:
    rules: dict[str, Any] = {"partial": partial, "average_every": 4}
    results = ends(2 + seed % 4, seed, lambda rank: 3 + (5 * rank + seed) % 11, **rules)
    assert len({round_ for round_, _, _ in results}) == 1
    assert all(model == results[0][1] for _, model, _ in results)


@pytest.mark.parametrize("algorithm", [EagerSGD, WagmaSGD])
def test_a_rank_that_ends_without_a_step_is_an_error_that_names_it(algorithm: type[EagerSGD | WagmaSGD]) -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        model = network()
        sgd = algorithm(comm, model, momentum(model))
        await sgd.start()
        for round_ in range(3 if comm.rank else 0):
            loss(model, comm.rank, round_ + 1).backward()
            await sgd.step()
        await sgd.finish()

    with pytest.raises(asyncoll.UsageError, match="rank 0 ends the training without a step"):
        simulate(3, main)


@pytest.mark.parametrize("partial", PARTIALS)
@looped("history", [1, 30])
@looped("seed", range(6))
def test_ranks_that_leave_before_a_synchronous_round_have_equal_models(partial: str, history: int, seed: int) -> None:
    rules: dict[str, Any] = {"partial": partial, "history": history, "sync_every": 4}
    results = ends(2 + seed % 4, seed, lambda rank: 3 + (5 * rank + seed) % 11, **rules)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize(
    ("rules", "most"),
    [({"sync_every": 4}, 3), ({"sync_every": 1}, 0), ({"average_every": 4}, 4), ({"average_every": 1}, 1), ({}, 20)],
)
@pytest.mark.parametrize("partial", ["solo", "quorum"])
def test_a_late_gradient_is_no_older_than_the_rules_let_it(partial: str, rules: dict[str, Any], most: int) -> None:
    """The age of a gradient: rounds between the one that its rank aimed at, and the one that took it."""

    async def main(comm: asyncoll.Communicator) -> tuple[list[int], dict[int, int]]:
        held = torch.nn.Parameter(torch.zeros(20))  # the gradient of each step of rank 0 is at an element of its own
        sgd = EagerSGD(comm, torch.nn.ParameterList([held]), torch.optim.SGD([held], lr=1.0), partial=partial, **rules)
        await sgd.start()
        aims: list[int] = []
        taken: dict[int, int] = {}
        while sgd.round < 60:
            await asyncio.sleep(20.0 if comm.rank == 0 and len(aims) in (0, 3) else 1.0)
            (held[len(aims) % 20] * (comm.rank == 0)).backward()
            aims.append(sgd.round + 1)
            await sgd.step()
            for index in held.detach().nonzero().flatten().tolist():
                taken.setdefault(index, sgd.round)
        await sgd.finish()
        return aims, taken

    results = simulate(4, main).results
    taken = {index: min(seen.get(index, 99) for _, seen in results) for index in range(5)}
    assert max(taken[index] - results[0][0][index] for index in taken) == most


# -- cancellation --------------------------------------------------------------------------------


@pytest.mark.parametrize("partial", PARTIALS)
@looped("accumulate", [1, 2])
@looped("seed", range(4))
def test_every_gradient_counts_once_although_steps_are_cancelled(partial: str, accumulate: int, seed: int) -> None:
    """The models are the sum of all gradients, exactly, of which those of cancelled steps are a part."""
    size = 4

    async def main(comm: asyncoll.Communicator) -> tuple[torch.Tensor, torch.Tensor, int]:
        model = torch.nn.Linear(6, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        sgd = EagerSGD(comm, model, optimizer, partial=partial, history=60, accumulate=accumulate)
        await sgd.start()
        draw = np.random.default_rng((seed, comm.rank))
        total, cancelled = torch.zeros(6), 0
        for call in range(1, 12 * accumulate + 1):
            gradient = torch.from_numpy(draw.integers(-50, 51, 6).astype("f4")) * accumulate
            model(gradient[None]).sum().backward()
            total += gradient / accumulate
            step = asyncio.ensure_future(sgd.step())
            await asyncio.sleep(straggle(seed, comm, call))
            if comm.rank != 0 and draw.random() < 0.3:
                step.cancel()
            (outcome,) = await asyncio.gather(step, return_exceptions=True)
            assert outcome is None or isinstance(outcome, asyncoll.Reduction | asyncio.CancelledError)
            cancelled += isinstance(outcome, asyncio.CancelledError)
        await sgd.finish()
        return parameters(model), total, cancelled

    results = simulate(size, main, Network(jitter_s=1e-3), seed=seed).results
    expected = -0.25 / size * sum(total for _, total, _ in results)
    assert all(torch.equal(model, expected) for model, _, _ in results)
    assert partial == "solo" or sum(cancelled for _, _, cancelled in results)  # a solo step waits for no rank


def test_a_step_that_is_cancelled_while_models_are_averaged_ends_the_communicator() -> None:
    """The others may already have the mean, which this rank lacks."""

    async def main(comm: asyncoll.Communicator) -> BaseException:
        model = torch.nn.Linear(6, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        sgd = EagerSGD(comm, model, optimizer, average_every=1)
        await sgd.start()
        model(torch.ones(6)).sum().backward()
        if comm.rank > 0:
            await asyncio.sleep(2)
        step = asyncio.ensure_future(sgd.step())
        if comm.rank == 0:
            await asyncio.sleep(1)  # its solo round is over, and it waits for the models of the others
            step.cancel()
        (outcome,) = await asyncio.gather(step, return_exceptions=True)
        assert isinstance(outcome, BaseException)
        return outcome

    cancelled, *others = simulate(3, main).results
    assert isinstance(cancelled, asyncio.CancelledError)
    for outcome in others:
        assert isinstance(outcome, asyncoll.AbortedError)
        assert "rank 0 aborted" in str(outcome)
