"""Metrics: numbers that ride along with contributions, through every carrier, exactly once with each."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

import asyncoll
from asyncoll.testing import Network, run_ranks, simulate
from asyncoll.training import EagerSGD, LocalSGD
from tests.support.cases import looped
from tests.support.training_loops import ALGORITHMS, AT_OWN_PACE, DETERMINISTIC, loss, network, plain, straggle

KINDS: dict[str, Any] = {
    "solo": lambda comm, x, **more: comm.solo_allreduce(x, **more),
    "majority": lambda comm, x, **more: comm.majority_allreduce(x, **more),
    "quorum": lambda comm, x, **more: comm.quorum_allreduce(x, **more),
}
CARRIERS: dict[str, Any] = {
    "messages": {},
    "memory": {"shared_memory": True},
    "hosts": {"hosts": lambda size: [rank * 2 // size for rank in range(size)], "shared_memory": True},
}
ROUNDS = 12


def contributions(comm: asyncoll.Communicator, call: int) -> dict[str, float]:
    """Powers of two, so that a sum shows which calls of which ranks are in it; one key belongs to each rank alone."""
    value = 2.0 ** (call - 20)
    return {"all": 0.1 + call, f"rank {comm.rank}": value} if call % 3 else {f"rank {comm.rank}": value}


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("kind", KINDS)
@looped("count", [3, 300_000])
@looped("op", [asyncoll.AVG, asyncoll.MAX])
@looped(("size", "seed"), [(1, 0), (2, 1), (3, 2), (5, 3)])
def test_metrics_are_taken_with_their_contribution_once(
    kind: str, carrier: str, count: int, op: asyncoll.ReduceOp, size: int, seed: int
) -> None:
    """Each call adds 1 to an element of its own, so the reduction tells which calls are in a round, if it adds up."""

    async def main(comm: asyncoll.Communicator) -> tuple[int, dict[int, Any]]:
        newest, call, rounds = 0, 0, {}
        while newest < ROUNDS:
            await asyncio.sleep(straggle(seed, comm, call))
            x = np.zeros((count, 1), "f4")
            x[0] = 1
            metrics = asyncoll.Metrics(contributions(comm, call))
            done = await KINDS[kind](comm, [x, metrics], op=op, history=ROUNDS, sync_every=ROUNDS)
            call += 1
            for round_, (_, each) in enumerate([*done.missed, (x, metrics)], done.round - len(done.missed)):
                rounds[round_] = each.means()
            newest = done.round
        return call, rounds

    more = {name: value(size) if callable(value) else value for name, value in CARRIERS[carrier].items()}
    if size == 1:
        more = {}
    results = simulate(size, main, Network(jitter_s=1e-3), seed=seed, **more).results
    for rank, (calls, _) in enumerate(results):
        key, found = f"rank {rank}", []
        for round_ in range(1, ROUNDS + 1):
            (mean,) = {repr(rounds[round_].get(key)) for _, rounds in results if round_ in rounds}
            if mean != "None":
                # A mean of consecutive powers of two tells which they are.
                (those,) = [
                    range(first, last)
                    for first in range(calls)
                    for last in range(first + 1, calls + 1)
                    if np.mean([2.0 ** (call - 20) for call in range(first, last)]) == float(mean)
                ]
                found += those
        assert found == list(range(calls))  # the last round is synchronous: nothing stays staged


@pytest.mark.parametrize("transport", ["inproc", "zmq", "shm"])
def test_metrics_are_means_over_the_contributions_that_hold_them(transport: Any) -> None:
    async def main(comm: asyncoll.Communicator) -> dict[str, float]:
        x = torch.ones(3, dtype=torch.bfloat16)
        values = {"loss": torch.tensor(0.1 * (1 + comm.rank), dtype=torch.float64), "all": np.float32(0.5)}
        if comm.rank:
            values["some"] = comm.rank  # type: ignore[assignment]
        metrics = asyncoll.Metrics(values)
        await comm.quorum_allreduce([x, metrics], quorum=3, op=asyncoll.AVG, weight=float(comm.rank))
        assert torch.equal(x, torch.ones(3, dtype=torch.bfloat16))
        return metrics.means()

    expected = {"loss": pytest.approx(0.2, rel=1e-15), "all": 0.5, "some": 1.5}  # not rounded to bfloat16, nor weighted
    assert run_ranks(3, main, transport=transport) == [expected] * 3


@looped(
    ("values", "words"),
    [
        ({f"key {index}": 1 for index in range(65)}, "more than 64"),
        ({"loss": torch.ones(2)}, r"'loss' is a tensor of shape \[2\]"),
        ({"loss": torch.ones(1)}, r"shape \[1\]"),
        ({"loss": torch.tensor(1j)}, "'loss' is a tensor"),
        ({"loss": np.ones(3)}, "'loss' is a ndarray"),
        ({"loss": "1"}, "'loss' is a str"),
        ({"loss": None}, "'loss' is a NoneType"),
        ({"loss": 1j}, "'loss' is a complex"),
        ({"loss": 10**400}, "'loss' is too large"),
        ({"": 1}, "1 to 112 bytes"),
        ({"x" * 113: 1}, "1 to 112 bytes"),
        ({"a\0b": 1}, "1 to 112 bytes"),
        ({3: 1}, "must be a string, got 3"),
        ({"caf\udce9": 1}, "must be Unicode text"),
        ({"loss": torch.ones((), device="meta")}, "'loss' is a tensor that cannot be read"),
        ({"loss": torch.nn.UninitializedParameter()}, "'loss' is a tensor that cannot be read"),
        ([1], "a dict of numbers by name"),
        (1, "a dict of numbers by name"),
        ("loss", "a dict of numbers by name"),
        (torch.ones(2), "a dict of numbers by name"),
    ],
)
def test_metrics_that_are_no_numbers_are_usage_errors(values: Any, words: str) -> None:
    with pytest.raises(asyncoll.UsageError, match=words):
        asyncoll.Metrics(values)


def test_a_nested_tensor_is_no_number() -> None:
    loss = torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)  # takes a second, not when tests are found
    with pytest.raises(asyncoll.UsageError, match="'loss' is a tensor of shape"):
        asyncoll.Metrics({"loss": loss})


def test_keys_may_be_any_text_and_values_any_number() -> None:
    values = {
        "ä" * 56: 1,
        "x" * 112: True,
        " ": -0.0,
        "inf": float("inf"),
        "nan": torch.tensor(float("nan")),
        "f": 2**60,
    }
    means = asyncoll.Metrics(values).means()
    assert means.pop("nan") != means["inf"]
    assert means == {"ä" * 56: 1.0, "x" * 112: 1.0, " ": -0.0, "inf": float("inf"), "f": 2.0**60}


def test_more_keys_in_a_round_than_there_is_room_for_are_an_error_at_all_ranks() -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        metrics = asyncoll.Metrics({f"{comm.rank} {index}": 1 for index in range(40)})
        await comm.quorum_allreduce([np.ones(3), metrics], quorum=comm.size)
        with pytest.raises(asyncoll.UsageError, match="more than 64 different metrics"):
            metrics.means()

    run_ranks(3, main)


def test_a_contribution_has_one_metrics_and_a_tensor_beside_it() -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        metrics = asyncoll.Metrics({"loss": 1})
        for x in ([metrics], [np.ones(1), metrics, asyncoll.Metrics()]):
            with pytest.raises(asyncoll.UsageError, match="one Metrics at most"):
                await comm.solo_allreduce(x)
        with pytest.raises(asyncoll.UsageError, match=r"expected a numpy array .* as in \[x, metrics\]"):
            await comm.solo_allreduce(metrics)

    run_ranks(1, main)


# -- trainers ------------------------------------------------------------------------------------

WITH_METRICS = {
    name: algorithm for name, algorithm in ALGORITHMS.items() if name not in ("dpsgd", "sgp", "sgp with overlap")
}


@pytest.mark.parametrize("algorithm", WITH_METRICS)
@looped("size", [1, 2, 4])
@looped("accumulate", [1, 2])
def test_metrics_of_a_step_are_those_of_its_round(algorithm: str, size: int, accumulate: int) -> None:
    async def main(comm: asyncoll.Communicator) -> tuple[dict[int, dict[str, float]], list[float]]:
        model = network()
        sgd = WITH_METRICS[algorithm](comm, model, plain(model), accumulate=accumulate)
        found, given, call = {}, [], 0
        await sgd.start()
        while sgd.round < 12:
            loss(model, comm.rank, sgd.round + 1).backward()
            await asyncio.sleep(straggle(size, comm, sgd.round))
            call += 1
            given.append(float(call))
            done = await sgd.step(metrics={"loss": call, f"own {comm.rank}": torch.tensor(call)} if call % 5 else {})
            if done is not None:
                found[done.round] = done.metrics
        await sgd.finish()
        return found, given

    results = simulate(size, main, Network(jitter_s=1e-3)).results
    groups = algorithm.startswith("wagma")  # each has metrics of its own
    for round_ in set.union(*(set(found) for found, _ in results)):
        assert groups or len({repr(found[round_]) for found, _ in results if round_ in found}) == 1
    assert {"loss"} | {f"own {rank}" for rank in range(size)} >= set.union(
        *(set(means) for found, _ in results for means in found.values())
    )
    if algorithm == "synchronous":
        assert results[0][0][1] == {"loss": (1 + accumulate) / 2} | {
            f"own {rank}": (1 + accumulate) / 2 for rank in range(size)
        }
        assert results[0][0][5 if accumulate == 1 else 3] == ({} if accumulate == 1 else results[0][0][3])


def test_local_sgd_averages_the_metrics_of_all_steps_since_the_last_average() -> None:
    async def main(comm: asyncoll.Communicator) -> list[Any]:
        model = network()
        sgd = LocalSGD(comm, model, plain(model), every=3)
        await sgd.start()
        steps = []
        for call in range(6):
            loss(model, comm.rank, call).backward()
            steps.append(await sgd.step(metrics={"loss": call + 10 * comm.rank}))
        await sgd.finish()
        return [None if step is None else step.metrics for step in steps]

    assert run_ranks(2, main) == [[None, None, {"loss": 6.0}, None, None, {"loss": 9.0}]] * 2


@pytest.mark.parametrize("algorithm", [*AT_OWN_PACE, "dpsgd", "sgp", "sgp with overlap"])
def test_algorithms_without_rounds_of_all_take_no_metrics(algorithm: str) -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        model = network()
        sgd = (AT_OWN_PACE | DETERMINISTIC)[algorithm](comm, model, plain(model))
        await sgd.start()
        loss(model, comm.rank, 1).backward()
        with pytest.raises(asyncoll.UsageError, match="takes no metrics"):
            await sgd.step(metrics={"loss": 1})
        await sgd.step()
        await sgd.finish()

    run_ranks(2, main)


@pytest.mark.parametrize("algorithm", ["synchronous", "eager", "wagma"])
def test_metrics_begin_with_the_first_step_or_never(algorithm: str) -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        model = network()
        for begins in (False, True):
            more = {} if algorithm == "synchronous" else {"name": f"begins {begins}"}
            sgd = ALGORITHMS[algorithm](comm, model, plain(model), **more)
            await sgd.start()
            for call in range(3):
                loss(model, comm.rank, 1).backward()
                if call and not begins:
                    with pytest.raises(
                        asyncoll.UsageError, match="has begun without metrics: give `metrics` in the first"
                    ):
                        await sgd.step(metrics={"loss": 1})
                done = await sgd.step(metrics={} if begins and not call else None)
                assert done is not None
                assert done.metrics == {}
            await sgd.finish()

    run_ranks(2, main)


def test_ranks_of_which_one_begins_without_metrics_are_told_so() -> None:
    async def main(comm: asyncoll.Communicator) -> None:
        model = network()
        sgd = EagerSGD(comm, model, plain(model))
        await sgd.start()
        for _ in range(3):
            loss(model, comm.rank, 1).backward()
            await sgd.step(metrics={"loss": 1} if comm.rank else None)

    with pytest.raises((asyncoll.MismatchError, ExceptionGroup), match="eager-sgd"):
        run_ranks(2, main)
