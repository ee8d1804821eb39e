"""The training program: imbalance, the time model, consensus, experiments, workloads, reports, the command line."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from conftest import PATIENCE_S, looped
from training_loops import trained

import asyncoll
from asyncoll.testing import run_ranks, simulate
from asyncoll.training import EagerSGD
from asyncoll.training.eager_sgd import Partial
from trainers.__main__ import main as cli
from trainers.consensus import Consensus
from trainers.demo import PRELOAD
from trainers.experiment import experiment, learning_rate
from trainers.imbalance import AllSkewed, Balanced, OneRandom, parse_duration, parse_imbalance
from trainers.report import Report
from trainers.settings import TRAINERS, Settings
from trainers.time_model import expected_round_s, least_round_s
from trainers.workloads import WORKLOADS, Hyperplane

SIZES = [1, 3, 4]
PRELOADED = {**os.environ, "ASYNCOLL_PRELOAD": PRELOAD}  # for launched ranks: loaded once, and not by each of them


pytestmark = pytest.mark.usefixtures("one_thread")


# -- imbalance -----------------------------------------------------------------------------------


def test_durations_and_schedules_are_parsed() -> None:
    assert parse_duration("100ms") == pytest.approx(0.1)
    assert parse_duration("0.2s") == pytest.approx(0.2)
    assert parse_imbalance("none") == Balanced()
    assert parse_imbalance("one-random:200ms") == OneRandom(0.2)
    assert parse_imbalance("all-skewed:50ms-0.4s") == AllSkewed(0.05, 0.4)


@looped("text", ["100", "ms", "-1s", "1 s", "1m", "", "1e3ms", "nans"])
def test_bad_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration such as 100ms"):
        parse_duration(text)


@looped("text", ["", "some", "none:1s", "all-skewed:400ms-50ms", "all-skewed:50ms", "one-random"])
def test_bad_schedules_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"none of|not a duration|longer to a shorter"):
        parse_imbalance(text)


@looped("imbalance", [Balanced(), OneRandom(0.2), AllSkewed(0.05, 0.4)])
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

        await trained(EagerSGD(comm, model, optimizer, partial=partial, average_every=25), gradient, rounds)

    measured_s = simulate(size, main).virtual_s / rounds
    assert measured_s == pytest.approx(expected_round_s(partial, 0.1, imbalance, size, 25), rel=0.15)


# -- consensus ----------------------------------------------------------------------------------


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


def epoch(size: int, batch: int) -> torch.Tensor:
    """All points that `size` ranks see in one epoch, in an order of their own."""
    shares = [Hyperplane(rank, size, batch, seed=5) for rank in range(size)]
    rows = [torch.cat(share.next_batch(), dim=1) for share in shares for _ in range(1024 // size // batch)]
    points = torch.cat(rows)
    return points[points[:, 0].argsort()]


@pytest.mark.usefixtures("small_hyperplane")
def test_the_points_do_not_depend_on_the_number_of_ranks() -> None:
    alone = epoch(1, 128)
    assert len(alone) == len(alone[:, 0].unique()) == 1024
    assert torch.equal(epoch(4, 64), alone)
    assert torch.equal(epoch(8, 128), alone)


@pytest.mark.usefixtures("small_hyperplane")
@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_hyperplane_is_learnt(trainer: str) -> None:
    settings = Settings.of(trainer, "hyperplane", batch=32, rounds=60, density=0.2)  # so few rounds: 1 / 0.02 are 50
    report = run_experiment(4, trainer, settings)
    assert report.metric == "R² on held-out points"
    assert report.final_score > 0.9
    assert report.curve[0].score < 0.5


def test_the_hyperplane_has_the_papers_size() -> None:
    share = Hyperplane(rank=5, size=256, batch=8, seed=0)
    assert sum(p.numel() for p in share.model.parameters()) == 8193
    x, y = share.next_batch()
    assert (x.shape, y.shape) == ((8, 8192), (8, 1))
    assert Hyperplane.POINTS == 32768


@looped("workload", WORKLOADS)
def test_a_batch_above_the_share_is_a_usage_error(workload: str) -> None:
    with pytest.raises(asyncoll.UsageError, match=r"a batch of 64 is more than a rank's share of \d+ samples"):
        WORKLOADS[workload](0, 1000, 64, 0)


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
