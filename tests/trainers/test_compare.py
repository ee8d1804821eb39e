"""`python -m trainers compare`: its arguments, its table, its files, and runs that fail."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from tests.support.cases import looped
from tests.support.places import SCRIPTS
from tests.support.processes import PATIENCE_S, TRAINING, processes_with
from trainers.__main__ import main as cli
from trainers.compare import Compared, comparison, parse_algorithms, parse_seeds
from trainers.plots import aligned
from trainers.report import Point, Report
from trainers.runs import Run
from trainers.settings import Settings

POLICY = f"{SCRIPTS / 'trainers/waits_for_all.py'}:all"
REPORT = Report(
    algorithm="allreduce_sgd",
    settings=Settings.of("allreduce_sgd").plain(),
    metric="test accuracy",
    is_synthetic=False,
    machine={},
    ranks=4,
    rounds=10,
    wall_s=5.0,
    steps_per_s=2.0,
    steps_per_s_bound=2.5,
    gradients_per_s=8.0,
    time_to_target_s=4.0,
    final_score=0.96,
    active_mean=4.0,
    active={4: 10},
    lag_mean=0.0,
    lag={0: 40},
    stale_share=0.0,
    waited_s=0.01,
    bytes_per_round=2e6,
    consensus=[],
    curve=[Point(1.0, 2, 0.5), Point(5.0, 10, 0.96)],
)


def compared(label: str, *changes: dict[str, Any]) -> Compared:
    """An algorithm with a run for each of the `changes` of `REPORT`."""
    runs = [Run(dataclasses.asdict(dataclasses.replace(REPORT, **change))) for change in changes]
    return Compared(label, "allreduce_sgd", [], runs)


def cells(*algorithms: Compared) -> dict[str, dict[str, str]]:
    """The text of the table, by algorithm and column."""
    table = comparison(algorithms)
    names = [str(column.header).replace("\n", " ") for column in table.columns]
    rows = zip(*(column.cells for column in table.columns), strict=True)
    return {str(row[0]): dict(zip(names, map(str, row), strict=True)) for row in rows}


# -- arguments -----------------------------------------------------------------------------------


@looped(
    ("text", "label", "algorithm", "arguments"),
    [
        ("eager_sgd", "eager_sgd", "eager_sgd", []),
        ("eager_sgd:partial=majority", "eager_sgd:partial=majority", "eager_sgd", ["--partial", "majority"]),
        (
            f"eager_sgd:partial={POLICY}:candidates=2",
            f"eager_sgd:partial={POLICY}:candidates=2",
            "eager_sgd",
            ["--partial", POLICY, "--candidates", "2"],
        ),
        (
            " wagma_sgd:fixed:group_size=2:learning_rate=0.1",
            "wagma_sgd:fixed:group_size=2:learning_rate=0.1",
            "wagma_sgd",
            ["--fixed", "--group-size", "2", "--learning-rate", "0.1"],
        ),
    ],
)
def test_options_follow_the_name(text: str, label: str, algorithm: str, arguments: list[str]) -> None:
    first, other = parse_algorithms(f"{text},allreduce_sgd")
    assert (first.label, first.algorithm, first.arguments) == (label, algorithm, arguments)
    assert (other.label, other.arguments) == ("allreduce_sgd", [])


@looped("text", ["", "eager_sgd,", "eager_sgd:partial", "eager_sgd:quorum=0", "eager_sgd:some=1", "eager_sgd:rounds=1"])
def test_bad_algorithms_are_usage_errors(text: str) -> None:
    with pytest.raises(click.UsageError):
        parse_algorithms(text)


def test_file_names_have_no_special_signs() -> None:
    (found,) = parse_algorithms("eager_sgd:partial=majority")
    assert re.fullmatch(r"[\w.=-]+", found.file_name)


def test_missing_tensorboard_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    result = CliRunner().invoke(cli, ["compare", "--algorithms", "eager_sgd", "--tensorboard"])
    assert result.exit_code == 2
    assert "asyncoll[tensorboard]" in " ".join(result.output.split())


# -- the table -----------------------------------------------------------------------------------


def test_seeds_are_a_range_or_a_count() -> None:
    assert (parse_seeds("2:5"), parse_seeds("3")) == (range(2, 5), range(3))
    for text in ("", "5:5", "-1:2", "a", "1:2:3"):
        with pytest.raises(click.UsageError, match="are no seeds: use FROM:TO, such as 0:3, or a count"):
            parse_seeds(text)


def test_a_row_has_means_over_seeds_and_their_range() -> None:
    first = compared("first", {}, {"steps_per_s": 4.0, "final_score": 0.98, "time_to_target_s": 2.0})
    second = compared("second", {"steps_per_s": 6.0, "time_to_target_s": 1.0, "stale_share": 0.25})
    found = cells(first, second)
    assert found["first"]["steps/s"] == "3.00"
    assert found["first"]["ratio"] == "1.00x"
    assert found["first"]["final test accuracy"] == "97.00% (96.00 to 98.00)"
    assert found["first"]["time to 96%"] == "3.00 s"
    assert found["second"]["ratio"] == "2.00x"
    assert found["second"]["speed-up"] == "3.00x"
    assert found["second"]["theory allows"] == "2.50"
    assert found["second"]["stale"] == "25.0%"
    assert found["second"]["MB per rank and round"] == "2"


def test_what_is_not_known_is_no_number() -> None:
    unknown = dict.fromkeys(("steps_per_s_bound", "active_mean", "lag_mean", "bytes_per_round"))
    first, second = compared("first", unknown, unknown), compared("second", {"time_to_target_s": None})
    partly = compared("partly", {}, {"time_to_target_s": None})
    found = cells(first, second, partly)
    assert {found["first"][name] for name in ("theory allows", "active", "lag", "MB per rank and round")} == {"-"}
    assert (found["second"]["time to 96%"], found["second"]["speed-up"]) == ("not reached", "-")
    assert (found["partly"]["time to 96%"], found["partly"]["speed-up"]) == ("4.00 s (1 of 2)", "-")


def test_synthetic_data_are_named() -> None:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(comparison([compared("first", {"is_synthetic": True})]))
    assert "synthetic data" in captured.get()


def test_runs_are_compared_at_equal_times() -> None:
    short, long = [Point(1.0, 1, 0.0), Point(3.0, 5, 1.0)], [Point(2.0, 1, 0.5), Point(6.0, 9, 0.7)]
    times_s, scores = aligned([short, long])
    assert (times_s[0], times_s[-1]) == (2.0, 6.0)
    assert scores[:, 0].tolist() == pytest.approx([0.5, 0.5])
    assert scores[:, -1].tolist() == pytest.approx([1.0, 0.7])  # a run that has ended keeps its score
    times_s, scores = aligned([short])
    assert (times_s.tolist(), scores.tolist()) == ([1.0, 3.0], [[0.0, 1.0]])


# -- whole ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_failing_run_is_reported_and_the_others_go_on(
    tmp_path: Path, forked: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = forked(
        os.environ | TRAINING,
        *("-m", "trainers", "compare", "--folder", tmp_path),
        *("--algorithms", "eager_sgd:partial=quorum:quorum=3,allreduce_sgd", "-n", "2"),
        *("--seeds", "1", "--rounds", "3", "--compute", "1ms", "--imbalance", "one-random:2ms"),
        *("--workload", "video", "--batch", "2"),  # needs no scikit-learn, which takes a second to import
    )
    assert code == 1, err
    assert "quorum 3 is not between 1 and" in out
    assert "one-random:2ms" in out  # the table's title
    read = json.loads((tmp_path / "compare.json").read_text())
    failed, finished = read["algorithms"]
    assert list(failed["failures"]) == ["0"]
    assert not failed["runs"]
    assert not finished["failures"]
    assert finished["runs"][0]["settings"]["compute_s"] == pytest.approx(0.001)
    assert read["machine"]["torch"]
    assert (tmp_path / "score.png").exists()


@pytest.mark.slow
def test_ctrl_c_shows_the_runs_so_far_and_leaves_no_process(tmp_path: Path) -> None:
    options = [
        "--seeds",
        "99",
        "-n",
        "2",
        "--rounds",
        "3",
        "--compute",
        "1ms",
        "--workload",
        "video",
        "--batch",
        "2",
        "--folder",
    ]
    command = ["compare", "--algorithms", "allreduce_sgd", *options, str(tmp_path / "runs")]
    memory = {name for name in os.listdir("/dev/shm") if name.startswith("asyncoll")}
    with subprocess.Popen(
        [sys.executable, "-m", "trainers", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | TRAINING | {"TMPDIR": str(tmp_path)},
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert re.match("allreduce_sgd, seed 0: .* steps/s", first), err
    assert process.returncode == 130, err
    assert "ratio of steps/s" in out  # the table
    assert "Traceback" not in err
    assert re.search(r"interrupted: \d of 99 done", err)
    assert json.loads((tmp_path / "runs" / "compare.json").read_text())["algorithms"][0]["runs"]
    assert processes_with(str(tmp_path)) == []
    assert {name for name in os.listdir("/dev/shm") if name.startswith("asyncoll")} <= memory
