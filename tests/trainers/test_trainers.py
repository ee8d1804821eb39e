"""The program `python -m trainers`: its loop, settings, reports, command line, demo and time model."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import click
import pytest
import torch
from click.testing import CliRunner

import asyncoll
from asyncoll.testing import Waiting, expected_round_s, least_round_s, run_ranks, simulate
from asyncoll.training import EagerSGD
from tests.support.cases import looped
from tests.support.places import SCRIPTS
from trainers.__main__ import main as cli
from trainers.algorithms import ALGORITHMS
from trainers.consensus import Consensus
from trainers.devices import own_device
from trainers.experiment import Machine, experiment, learning_rate, make_scheduler, make_trainer
from trainers.imbalance import IMBALANCES, OneRandom, Real, Rotating, are_drawn, parse_imbalance
from trainers.report import Record, Report, bound
from trainers.settings import Settings, flags
from trainers.workloads import WORKLOADS, Digits, Hyperplane

SIZES = [1, 3, 4]
EVERYONE = {"allreduce_sgd", "overlapped_sgd", "dc_s3gd", "oktopk_sgd"}  # each round has a gradient of every rank


# -- the time model ------------------------------------------------------------------------------


@looped("ranks", [2, 4, 8])
def test_the_recursion_respects_the_bounds(ranks: int) -> None:
    for text in ("one-random:200ms", "rotating:200ms:10", "all-skewed:50ms-400ms", "fixed-skewed:50ms-400ms"):
        imbalance = parse_imbalance(text)
        drawn = are_drawn(imbalance)
        for rule in ("synchronous", "solo", "majority"):
            expected_s = expected_round_s(rule, 0.1, imbalance, ranks, average_every=0, rounds=400)
            least_s = least_round_s(Waiting(rule), 0.1, imbalance, ranks, rounds=400, are_drawn=drawn)
            assert least_s <= expected_s + 1e-9, f"{text}, {rule}"
            if rule == "synchronous":
                assert least_s == pytest.approx(expected_s)


def test_the_bounds_are_those_of_one_random_late_rank() -> None:
    def least(rule: Literal["synchronous", "solo", "majority", "quorum"], **rules: int) -> float:
        return least_round_s(Waiting(rule, **rules), 0.1, OneRandom(0.2), 4, rounds=50, are_drawn=True)

    assert least("synchronous") == pytest.approx(0.3)
    assert least("solo") == pytest.approx(0.1)
    assert least("majority") == pytest.approx(0.1 + 0.2 / 4)
    assert least("majority", candidates=2) == pytest.approx(0.1)  # at most one of two is late
    assert least("quorum", quorum=3) == pytest.approx(0.1)
    assert least("quorum", quorum=4) == pytest.approx(0.3)
    assert least("solo", sync_every=5) == pytest.approx((4 * 0.1 + 0.3) / 5)


def test_ranks_that_meet_rarely_hide_each_others_delays() -> None:
    rounds, imbalance = 60, Rotating(0.2, 1)

    def least(steps: int) -> float:
        return least_round_s(Waiting("synchronous", steps=steps), 0.1, imbalance, 3, rounds=rounds)

    assert least(1) == pytest.approx(0.3)
    assert least(3) == pytest.approx(0.1 + 0.2 / 3)  # each rank is late once
    assert least(0) == pytest.approx(0.1 + 0.2 / 3)


def test_a_real_machine_has_no_bound() -> None:
    assert bound("allreduce_sgd", Settings(compute_s=0.1, imbalance=Real()), 4) is None
    assert bound("allreduce_sgd", Settings(compute_s=0.1, imbalance=OneRandom(0.2)), 4) == pytest.approx(1 / 0.3)


@pytest.mark.parametrize("partial", ["solo", "majority"])
def test_the_recursion_predicts_the_protocol_in_virtual_time(partial: Literal["solo", "majority"]) -> None:
    imbalance, rounds, size = OneRandom(0.2), 100, 8

    async def main(comm: asyncoll.Communicator) -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        sgd = EagerSGD(comm, model, optimizer, partial=partial, average_every=25)
        await sgd.start()
        while sgd.round < rounds:
            model(torch.ones(1, 1)).sum().backward()
            await asyncio.sleep(0.1 + imbalance.delay_s(0, sgd.round + 1, comm.rank, size))
            await sgd.step()
        await sgd.finish()

    measured_s = simulate(size, main).virtual_s / rounds
    assert measured_s == pytest.approx(expected_round_s(partial, 0.1, imbalance, size, 25), rel=0.15)


# -- the registry --------------------------------------------------------------------------------


@looped("algorithm", ALGORITHMS)
def test_options_are_arguments_of_the_class(algorithm: str) -> None:
    entry = ALGORITHMS[algorithm]
    parameters = inspect.signature(entry.trainer).parameters
    assert {option.name for option in entry.options} <= set(parameters)
    assert entry.is_seeded is ("seed" in parameters)
    common = {name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty}
    assert common == {"comm", "model", "optimizer", "options"}


@looped("algorithm", ALGORITHMS)
def test_every_flag_has_a_name_of_its_own(algorithm: str) -> None:
    names = [flag.name for flag in flags(algorithm)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_has_the_spellings_of_asyncoll(option):
    assert "Usage: " in CliRunner().invoke(cli, ["eager_sgd", option], catch_exceptions=False).output


def test_list_names_everything_with_its_paper() -> None:
    output = CliRunner().invoke(cli, ["list"], catch_exceptions=False).output
    for name in (*ALGORITHMS, *WORKLOADS, *IMBALANCES):
        assert f" {name} " in output
    assert "Lian et al., NeurIPS 2017" in output


# -- the loop ------------------------------------------------------------------------------------


def test_the_rate_rises_and_falls_by_rounds() -> None:
    settings = Settings(rounds=9, learning_rate=0.5)
    rates = [learning_rate(round_, settings) for round_ in range(1, settings.rounds + 1)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.4, 0.3, 0.2, 0.1])


def test_each_step_of_the_optimizer_has_the_rate_of_its_round() -> None:
    settings = Settings.of("allreduce_sgd", rounds=5, batch=8, accumulate=2)
    seen: list[float] = []

    async def main(comm: asyncoll.Communicator) -> None:
        workload = Digits(comm.rank, comm.size, 8, 0)
        scheduler = make_scheduler(settings, workload)
        trainer = make_trainer(comm, "allreduce_sgd", settings, scheduler, workload, Consensus())
        trainer.optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"]))
        for _ in range(settings.rounds * settings.accumulate):
            workload.loss().backward()
            await trainer.step()

    run_ranks(1, main)
    assert seen == pytest.approx([learning_rate(round_, settings) for round_ in range(1, 6)])


def run_experiment(size: int, algorithm: str, settings: Settings) -> Report:
    async def main(comm: asyncoll.Communicator) -> Report | None:
        return await experiment(comm, algorithm, settings)

    report, *others = run_ranks(size, main)
    assert report is not None
    assert not any(others)
    return report


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_digits_are_learnt(algorithm: str) -> None:
    # A server takes a whole step with the gradient of each rank: with the rate of a mean, the result depends on timing.
    rate = 0.25 if ALGORITHMS[algorithm].is_served else None
    report = run_experiment(4, algorithm, Settings.of(algorithm, rounds=120, learning_rate=rate))
    assert report.final_score > 0.96
    assert report.time_to_target_s is not None


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@looped("size", SIZES)
def test_a_report_accounts_for_every_round_and_call(algorithm: str, size: int, tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    settings = Settings.of(algorithm, rounds=5, target=1.0, report=path, imbalance=OneRandom(0.0), accumulate=2)
    report = run_experiment(size, algorithm, settings)
    assert report.rounds == 5
    assert report.curve[-1].round >= 5
    assert report.time_to_target_s is None
    assert 0.0 <= report.stale_share < 1.0
    if report.active_mean is not None:
        assert report.active_mean <= size
    if algorithm in EVERYONE:
        first = int(algorithm == "dc_s3gd")  # which has no average to take in its first step
        assert (report.active, report.lag) == ({size: 5 - first}, {0: (5 - first) * size})
        assert report.gradients_per_s == pytest.approx(2 * size * report.steps_per_s)
    assert [round_ for round_, _ in report.consensus] == ([5] if algorithm == "wagma_sgd" else [])

    report.write(path)
    read = json.loads(path.read_text())
    assert read["settings"]["imbalance"] == "one-random:0ms"
    assert read["settings"]["report"] == str(path)
    assert set(ALGORITHMS[algorithm].defaults()) <= set(read["settings"])
    assert read["ranks"] == size
    assert read["machine"]["torch"] == torch.__version__
    assert read["is_synthetic"] is False
    assert read["curve"][-1] == [report.wall_s, report.curve[-1].round, report.final_score]
    assert set(read) == set(Report.__dataclass_fields__)


@looped(
    ("algorithm", "workload", "options", "is_weighted"),
    [
        ("allreduce_sgd", "language", {}, True),
        ("eager_sgd", "language", {}, True),
        ("eager_sgd", "language", {"op": asyncoll.AVG_ACTIVE}, False),
        ("wagma_sgd", "language", {}, False),
        ("allreduce_sgd", "digits", {}, False),
    ],
)
def test_steps_have_the_weight_of_their_batch(
    algorithm: str, workload: str, options: dict[str, Any], is_weighted: bool
) -> None:
    settings = Settings.of(algorithm, workload, batch=2, accumulate=3, **options)
    batches, given = WORKLOADS[workload](0, 1, settings.batch, 0), []

    class Stub:
        round = 0

        async def step(self, *, weight: float | None) -> None:
            given.append((weight, batches.weight))

    async def main(comm: asyncoll.Communicator) -> None:
        trainer: Any = Stub()
        await Machine(comm, batches, settings, ALGORITHMS[algorithm]).step(trainer, Record(comm, trainer))

    run_ranks(1, main)
    assert len(given) == 3
    for weight, own in given:
        assert weight == (own if is_weighted else None)


def test_a_local_step_is_no_call_and_still_a_gradient() -> None:
    report = run_experiment(3, "local_sgd", Settings.of("local_sgd", rounds=9, every=3))
    assert report.active == {3: 3}
    assert report.gradients_per_s == pytest.approx(3 * report.steps_per_s)


def test_bytes_are_those_of_the_gradients() -> None:
    async def main(comm: asyncoll.Communicator) -> Report | None:
        return await experiment(comm, "allreduce_sgd", Settings.of("allreduce_sgd", rounds=6))

    report, *_ = run_ranks(2, main, transport="zmq")
    parameters = 64 * 64 + 64 + 64 * 10 + 10
    assert report.bytes_per_round == pytest.approx(4 * parameters, rel=0.1)


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_bytes_of_rounds_are_reported_where_they_are_counted(transport: str) -> None:
    async def main(comm: asyncoll.Communicator) -> Report | None:
        return await experiment(comm, "eager_sgd", Settings.of("eager_sgd", rounds=6))

    report, *_ = run_ranks(3, main, transport=transport)
    assert (report.bytes_per_round is None) is (transport == "shm")


def test_the_bound_is_that_of_the_options() -> None:
    rules = {"rounds": 4, "compute_s": 0.001, "imbalance": OneRandom(0.004)}
    solo = run_experiment(2, "eager_sgd", Settings.of("eager_sgd", **rules))
    everyone = run_experiment(2, "eager_sgd", Settings.of("eager_sgd", **rules, partial="quorum", quorum=2))
    assert solo.steps_per_s_bound == pytest.approx(1000)
    assert everyone.steps_per_s_bound == pytest.approx(200)
    assert everyone.steps_per_s < 200


@pytest.fixture
def small_hyperplane(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"DIMENSIONS": 64, "POINTS": 1024, "HELD_OUT": 256}.items():
        monkeypatch.setattr(Hyperplane, name, value)


@pytest.mark.usefixtures("small_hyperplane")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_hyperplane_is_learnt(algorithm: str) -> None:
    own = {"density": 0.2} if algorithm == "oktopk_sgd" else {}  # so few rounds: 1 / 0.02 are 50
    report = run_experiment(4, algorithm, Settings.of(algorithm, "hyperplane", batch=32, rounds=60, **own))
    assert report.metric == "R² on held-out points"
    assert report.final_score > 0.9
    assert report.curve[0].score < 0.5


# -- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_hyperplane")
@looped("algorithm", ["allreduce_sgd", "oktopk_sgd", "dc_s3gd", "local_sgd", "dpsgd", "sgp"])
def test_a_run_that_was_stopped_goes_on_with_the_same_bits(algorithm: str, tmp_path: Path) -> None:
    folder = tmp_path / algorithm
    rules = {"batch": 8, "rounds": 13, "momentum": 0.5, "accumulate": 2}
    settings = Settings.of(algorithm, "hyperplane", **rules, checkpoints=folder, checkpoint_every=3)
    unbroken = run_experiment(3, algorithm, settings)
    for path in folder.glob("round-12-rank-0-*"):  # rank 0 was killed before it could save this round
        path.unlink()
    resumed = run_experiment(3, algorithm, settings)
    assert (unbroken.rounds, resumed.rounds) == (13, 13 - 9)
    assert resumed.final_score == unbroken.final_score


@pytest.mark.usefixtures("small_hyperplane")
@looped("algorithm", ["eager_sgd", "wagma_sgd", "adpsgd"])
def test_a_late_rank_goes_on_from_the_round_of_the_others(algorithm: str, tmp_path: Path) -> None:
    late = {"compute_s": 0.001, "imbalance": OneRandom(0.004)}
    rules: dict[str, Any] = {} if algorithm == "adpsgd" else {"sync_every": 2}
    rules |= {"batch": 8, "rounds": 7, "checkpoints": tmp_path / algorithm, "checkpoint_every": 4}
    settings = Settings.of(algorithm, "hyperplane", **rules, **late)
    assert [run_experiment(3, algorithm, settings).rounds for _ in range(2)] == [7, 3]


@looped(
    ("algorithm", "given", "words"),
    [
        ("parameter_server", {}, "its ranks pass different rounds"),
        ("eager_sgd", {}, "set --sync-every, now 0"),
        ("wagma_sgd", {"checkpoint_every": 12}, "set --sync-every, now 10"),
        ("allreduce_sgd", {"rounds": 4}, "the checkpoint is of round 4, and --rounds is 4"),
        ("local_sgd", {}, "algorithm 'AllreduceSGD', and not 'LocalSGD'"),
        ("allreduce_sgd", {"workload": "digits-wide"}, "this state is that of another workload"),
    ],
)
def test_impossible_checkpoints_are_usage_errors(
    algorithm: str, given: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = tmp_path / words
    run_experiment(1, "allreduce_sgd", Settings.of("allreduce_sgd", rounds=4, checkpoints=folder, checkpoint_every=2))
    settings = Settings.of(algorithm, **{"checkpoints": folder, "rounds": 8, **given})
    with pytest.raises(asyncoll.UsageError, match=words):
        run_experiment(1, algorithm, settings)


# -- settings ------------------------------------------------------------------------------------


def test_settings_follow_what_is_given_then_the_workload_then_the_algorithm() -> None:
    assert Settings.of("allreduce_sgd") == Settings()
    assert Settings.of("wagma_sgd").options["sync_every"] == 10
    assert Settings.of("wagma_sgd", sync_every=0).options["sync_every"] == 0
    assert Settings.of("eager_sgd").options["sync_every"] == 0
    assert Settings.of("dc_s3gd", "hyperplane").rounds == 96
    assert Settings.of("dc_s3gd", "hyperplane", rounds=7, batch=None) == Settings.of("dc_s3gd", "hyperplane", rounds=7)


# -- the command line ----------------------------------------------------------------------------


@looped(
    ("arguments", "words"),
    [
        (["eager_sgd", "--compute", "10"], "'10' is not a duration such as 100ms"),
        (["eager_sgd", "--imbalance", "one-random:soon"], "'soon' is not a duration"),
        (["eager_sgd", "--imbalance", "real", "--compute", "10ms"], "leave out --compute"),
        (["eager_sgd", "--imbalance", "k-random:3:10ms"], "3 ranks of each round, and there are 1"),
        (["eager_sgd", "--partial", "some"], "'some' is none of solo|majority|quorum|FILE:NAME"),
        (["eager_sgd", "--partial", "none.py:half"], "there is no file 'none.py'"),
        (["eager_sgd", "--partial", f"{__file__}:unheard"], "registers no policy 'unheard'"),
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
        (["eager_sgd", "--quorum", "1"], "quorum=1 belongs to partial=\"quorum\", and partial is 'solo'"),
        (["eager_sgd", "--history", "3", "--average-every", "5"], "with history no replica drifts"),
        (["allreduce_sgd", "--density", "0.1"], "No such option"),
        (["oktopk_sgd", "--density", "0"], "0.0 is not in the range"),
        (["oktopk_sgd", "--algorithm", "best"], "'best' is not one of"),
        (["oktopk_sgd", "--algorithm", "dense-overlapped"], "'dense-overlapped' is not one of"),
        (["oktopk_sgd", "--residual", "updates", "--momentum", "0.9"], "take residual='gradients'"),
        (["oktopk_sgd", "--residual", "updates", "--clip-norm", "1"], "take residual='gradients'"),
        (["allreduce_sgd", "--clip-norm", "0"], "0.0 is not in the range"),
        (["allreduce_sgd", "--accumulate", "0"], "0 is not in the range"),
        (["allreduce_sgd", "--buffers", "some"], "'some' is not one of"),
        (["allreduce_sgd", "--data", "here"], "reads no files"),
        (["eager_sgd", "--batch", "2000"], "a batch of 2000 is more than a rank's share of 1257 samples"),
        (["allreduce_sgd", "--workload", "cats"], "'cats' is not"),
        (["allreduce_sgd", "--device", "gpu"], "'gpu' is no device: use cpu, cuda or cuda:0"),
        (["allreduce_sgd", "--device", "cuda:"], "'cuda:' is no device"),
        (["eager_sgd", "--average-every", "-1"], "-1 is not in the range"),
        (["demo", "--ranks", "1"], "1 is not in the range"),
        (["compare"], "Missing option '--algorithms'"),
        (["compare", "--algorithms", "some_sgd"], "'some_sgd' is not an algorithm"),
        (["compare", "--algorithms", "eager_sgd,eager_sgd"], "eager_sgd more than once"),
        (["compare", "--algorithms", "eager_sgd:partial=some"], "'some' is none of"),
        (["compare", "--algorithms", "allreduce_sgd:partial=solo"], "allreduce_sgd:partial=solo: No such option"),
        (["compare", "--algorithms", "eager_sgd", "--seeds", "0"], "--seeds: '0' are no seeds: use FROM:TO"),
        (["compare", "--algorithms", "eager_sgd", "--imbalance", "some"], "'some' is none of"),
        (["compare", "--algorithms", "eager_sgd", "-n", "1"], "1 is not in the range"),
    ],
)
def test_bad_flags_are_usage_errors(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


@pytest.mark.parametrize("count", [0, 2])
def test_ranks_of_a_host_take_its_gpus_in_turn(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert own_device("cpu", 3) == torch.device("cpu")
    if not count:
        with pytest.raises(asyncoll.UsageError, match="sees no GPU here; leave --device out"):
            own_device("cuda", 0)
        return
    assert [own_device("cuda", rank).index for rank in range(5)] == [0, 1, 0, 1, 0]
    assert own_device("cuda:1", 0).index == 1
    with pytest.raises(asyncoll.UsageError, match="there are 2 visible GPUs, from cuda:0 to cuda:1"):
        own_device("cuda:2", 0)


def test_one_process_alone_trains_and_reports(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    flags = ["--rounds", "3", "--report", str(report), "--clip-norm", "1", "--accumulate", "2", "--buffers", "local"]
    result = CliRunner().invoke(cli, ["eager_sgd", *flags], catch_exceptions=False)
    assert result.exit_code == 0
    assert "final test accuracy" in result.output
    read = json.loads(report.read_text())
    assert read["ranks"] == 1
    assert math.isclose(read["settings"]["clip_norm"], 1.0)
    assert read["settings"]["accumulate"] == 2


def test_a_policy_of_a_file_starts_the_rounds() -> None:
    words = ["--partial", f"{SCRIPTS / 'trainers/waits_for_all.py'}:all"]
    given = click.Command("eager_sgd", params=flags("eager_sgd")).make_context("eager_sgd", words).params
    settings = Settings.of("eager_sgd", **given | {"rounds": 3, "compute_s": 0.001})
    report = run_experiment(3, "eager_sgd", settings)
    assert report.active == {3: 3}
    assert report.steps_per_s_bound is None  # nothing is known of the policy
    assert report.settings["partial"] == "all"


def test_a_trace_has_backward_and_the_step_of_each_round(tmp_path: Path) -> None:
    settings = Settings.of("overlapped_sgd", rounds=9, trace=tmp_path / "new")
    run_experiment(1, "overlapped_sgd", settings)  # a process has one profiler
    events = json.loads((tmp_path / "new" / "rank-0.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert [names.count(name) for name in ("forward", "backward", "step")] == [4, 4, 4]


def test_a_run_that_is_too_short_for_a_trace_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(asyncoll.UsageError, match="records steps 4 to 7, and --rounds is 6: use more"):
        run_experiment(1, "allreduce_sgd", Settings.of("allreduce_sgd", rounds=6, trace=tmp_path))


@pytest.mark.slow
def test_a_run_is_plotted(tmp_path: Path, forked: Callable[..., tuple[int, str, str]]) -> None:
    """In a process of its own, because matplotlib keeps its fonts open."""
    plot = tmp_path / "new" / "plot.png"
    video = ("--workload", "video", "--batch", "2")  # needs no scikit-learn, which takes a second to import
    code, _, err = forked(dict(os.environ), "-m", "trainers", "eager_sgd", "--rounds", "2", "--plot", plot, *video)
    assert code == 0, err
    assert plot.read_bytes().startswith(b"\x89PNG")
