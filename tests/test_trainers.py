"""The trainers' invariants, on many ranks in one process, and what drives and measures them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import asyncoll
from asyncoll.testing import run_ranks, simulate
from trainers.__main__ import main as cli
from trainers.allreduce_sgd import allreduce_sgd
from trainers.eager_sgd import Partial, eager_sgd
from trainers.experiment import experiment, learning_rate
from trainers.imbalance import AllSkewed, Balanced, OneRandom, parse_duration, parse_imbalance
from trainers.report import Report
from trainers.settings import Settings
from trainers.time_model import expected_round_s, least_round_s
from trainers.workloads import Digits

SIZES = [1, 3, 4]


# -- imbalance -----------------------------------------------------------------------------------


def test_durations_and_schedules_are_parsed() -> None:
    assert parse_duration("100ms") == pytest.approx(0.1)
    assert parse_duration("0.2s") == pytest.approx(0.2)
    assert parse_imbalance("none") == Balanced()
    assert parse_imbalance("one-random:200ms") == OneRandom(0.2)
    assert parse_imbalance("all-skewed:50ms-0.4s") == AllSkewed(0.05, 0.4)


@pytest.mark.parametrize("text", ["100", "ms", "-1s", "1 s", "1m", "", "1e3ms", "nans"])
def test_bad_durations_say_so(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration such as 100ms"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["", "some", "none:1s", "all-skewed:400ms-50ms", "all-skewed:50ms", "one-random"])
def test_bad_schedules_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"none of|not a duration|longer to a shorter"):
        parse_imbalance(text)


@pytest.mark.parametrize("imbalance", [Balanced(), OneRandom(0.2), AllSkewed(0.05, 0.4)])
def test_a_schedule_prints_as_it_is_parsed(imbalance: Balanced | OneRandom | AllSkewed) -> None:
    assert parse_imbalance(str(imbalance)) == imbalance


def test_one_random_delays_exactly_one_rank_and_all_equally_often() -> None:
    late: Counter[int] = Counter()
    rounds, size = 2000, 5
    for round_ in range(1, rounds + 1):
        delays = [OneRandom(0.2).delay_s(7, round_, rank, size) for rank in range(size)]
        assert sorted(delays) == [0.0] * (size - 1) + [0.2]
        late[delays.index(0.2)] += 1
    # Binomial(2000, 1/5): mean 400, deviation 18.
    assert all(abs(late[rank] - rounds / size) < 5 * 18 for rank in range(size))


def test_all_skewed_spreads_evenly_and_shifts_by_one_rank() -> None:
    skew, size = AllSkewed(0.05, 0.4), 8
    rounds = [[skew.delay_s(0, round_, rank, size) for rank in range(size)] for round_ in range(1, size + 1)]
    for before, after in pairwise(rounds):
        assert sorted(before) == pytest.approx([0.05 * (1 + k) for k in range(size)])
        assert after == before[1:] + before[:1]
    assert [sum(of_rank) / size for of_rank in zip(*rounds, strict=True)] == pytest.approx([0.225] * size)


# -- the time model ------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4, 8])
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


@pytest.mark.parametrize("size", SIZES)
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


@pytest.mark.parametrize("partial", ["solo", "majority"])
@pytest.mark.parametrize("size", SIZES)
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
@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("average_every", [1, 5, 100])
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


def test_digits_are_learnt() -> None:
    report = run_experiment(4, "allreduce_sgd", Settings())
    assert report.final_score > 0.96
    assert report.time_to_target_s is not None


@pytest.mark.parametrize("trainer", ["allreduce_sgd", "eager_sgd"])
@pytest.mark.parametrize("size", SIZES)
def test_a_report_accounts_for_every_round_and_call(trainer: str, size: int, tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    report = run_experiment(size, trainer, Settings(rounds=5, target=1.0, report=path, imbalance=OneRandom(0.0)))
    assert sum(report.active.values()) == report.rounds == 5
    assert sum(report.lag.values()) <= 5 * size
    assert 0.0 <= report.stale_share < 1.0
    assert 1.0 <= report.active_mean <= size
    assert report.curve[-1].round == 5
    assert report.time_to_target_s is None
    if trainer == "allreduce_sgd":
        assert (report.active, report.lag, report.stale_share) == ({size: 5}, {0: 5 * size}, 0.0)

    report.write(path)
    read = json.loads(path.read_text())
    assert read["settings"]["imbalance"] == "one-random:0ms"
    assert read["settings"]["report"] == str(path)
    assert read["ranks"] == size
    assert read["curve"][-1] == [report.wall_s, 5, report.final_score]
    assert set(read) == set(Report.__dataclass_fields__)


# -- the command line ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["eager_sgd", "--compute", "10"], "'10' is not a duration such as 100ms"),
        (["eager_sgd", "--imbalance", "one-random:soon"], "'soon' is not a duration"),
        (["eager_sgd", "--partial", "some"], "'some' is not one of"),
        (["allreduce_sgd", "--partial", "solo"], "No such option"),
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
    assert "final test score" in result.output
    assert json.loads(report.read_text())["ranks"] == 1


@pytest.mark.slow
def test_the_launcher_runs_a_trainer_that_plots(tmp_path: Path) -> None:
    path, plot = tmp_path / "report.json", tmp_path / "plot.png"
    launch = [sys.executable, "-m", "asyncoll.cli", "launch", "-n", "3", "-m", "trainers", "eager_sgd"]
    done = subprocess.run(
        [*launch, "--rounds", "4", "--partial", "majority", "--report", str(path), "--plot", str(plot)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(path.read_text())["ranks"] == 3
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("partial", ["solo", "majority"])
def test_with_history_late_replicas_stay_equal_to_the_bit(partial: Partial) -> None:
    """No average before the comparison: every rank has applied every result once, in order."""

    async def main(comm: asyncoll.Communicator) -> tuple[bytes, int]:
        workload = Digits(comm.rank, comm.size, batch=8, seed=1)
        optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.1, momentum=0.9)

        async def gradient(round_: int) -> None:
            workload.loss().backward()
            await asyncio.sleep(0.5 if (round_ + comm.rank) % 5 == 0 else 0.1)

        lags, weights = 0, b""
        steps = eager_sgd(comm, workload.model, optimizer, gradient, rounds=25, partial=partial, history=25)
        async for reduction in steps:
            lags += len(reduction.missed)
            weights = b"".join(p.detach().numpy().tobytes() for p in workload.model.parameters())
        return weights, lags

    results = simulate(3, main).results
    assert len({weights for weights, _ in results}) == 1
    assert sum(lags for _, lags in results) > 0
