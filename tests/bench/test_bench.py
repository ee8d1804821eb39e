"""`asyncoll bench`: its options, the checks of what it measures, and its output."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from click.testing import CliRunner

from asyncoll.algorithms.dense import by_size as algorithms
from asyncoll.algorithms.dense.tuning import TABLE, VARIABLE, choose
from asyncoll.bench import tune
from asyncoll.bench.dense_calls import bus_bandwidth
from asyncoll.bench.plan import MODES, BenchPlan, parse_duration, parse_sizes
from asyncoll.bench.runs import measure
from asyncoll.bench.skewed import bound, expected
from asyncoll.bench.table import aligned, show
from asyncoll.bench.tune import IN_PIECES, setting
from asyncoll.cli import main
from asyncoll.testing import run_ranks
from tests.support.places import ROOT
from tests.support.processes import LIGHT, PATIENCE_S


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["bench", *arguments])
    return result.exit_code, result.output


def rows(*arguments: str) -> list[dict]:
    code, output = invoke(*arguments, "--transport", "inproc", "--json")
    assert code == 0, output
    return [json.loads(line) for line in output.splitlines()]


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4", [4]),
        ("4,1K,1M", [4, 1 << 10, 1 << 20]),
        ("4:64", [4, 16, 64]),
        ("4:100", [4, 16, 64, 100]),
        ("8:8", [8]),
        ("1m:2g", [1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28, 1 << 30, 1 << 31]),
    ],
)
def test_sizes(text: str, sizes: Sequence[int]) -> None:
    assert parse_sizes(text) == tuple(sizes)


@pytest.mark.parametrize("text", ["", "x", "0", "-4", "6", "4,", "8:4", "4:", "1.5K", "4:8:16"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not|goes down"):
        parse_sizes(text)


def test_durations() -> None:
    assert [parse_duration(text) for text in ("1ms", "500us", "0.1s", "0s")] == [1e-3, 500e-6, 0.1, 0]
    for text in ("1", "ms", "-1ms", "1m"):
        with pytest.raises(ValueError, match="is not a duration"):
            parse_duration(text)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["allreduce", "-n", "0"], "0 is not in the range 1<=x<=1024"),
        (["pingpong", "-n", "3"], "No such option '-n'"),
        (["allreduce", "--sizes", "x"], "'x' is not a size such as"),
        (["solo", "--skew", "fast"], "'fast' is not a duration such as"),
        (["allreduce", "--transport", "pigeon"], "'pigeon' is not one of"),
    ],
)
def test_usage_errors_name_the_mistake(arguments: Sequence[str], complaint: str) -> None:
    code, output = invoke(*arguments)
    assert code == 2
    assert complaint in output


def test_a_gpu_that_is_not_there_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, output = invoke("allreduce", "--device", "cuda", "--sizes", "4")
    assert code == 2
    assert "sees no GPU here; leave --device out" in output
    code, output = invoke("allreduce", "--device", "cuda", "--registered")
    assert code == 2
    assert "--registered is memory of the host" in output


def test_a_plan_is_unchanged_by_json() -> None:
    plan = BenchPlan("solo", 4, (4, 8), "tcp", 0.5, 7)
    assert BenchPlan.from_json(plan.to_json()) == plan


def test_expected_values_of_the_paper() -> None:
    """The 32 ranks, 1 ms apart, of figure 9 of Li et al. (PPoPP 2020)."""
    assert expected("full", 32) == (15.5, 32)
    assert expected("majority", 32) == (pytest.approx(5.328, abs=1e-3), 16.5)
    assert expected("solo", 32) == (0, 1)
    assert expected("full", 32)[0] / expected("majority", 32)[0] == pytest.approx(2.91, abs=0.01)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_expected_values_by_counting(ranks: int) -> None:
    """Rank `opener` opens the round; the ranks before it wait."""
    waits = [sum(opener - rank for rank in range(opener)) / ranks for opener in range(ranks)]
    openers = {"full": [ranks - 1], "quorum": [max(1, ranks // 2) - 1], "solo": [0], "majority": range(ranks)}
    for mode, possible in openers.items():
        wait, active = expected(mode, ranks)
        assert wait == pytest.approx(sum(waits[opener] for opener in possible) / len(possible))
        assert active == pytest.approx(sum(opener + 1 for opener in possible) / len(possible))


def test_bus_bandwidth() -> None:
    assert bus_bandwidth(3.0, 2) == 3.0
    assert bus_bandwidth(3.0, 4) == 4.5
    assert bus_bandwidth(3.0, 1) == 0


@pytest.mark.parametrize("ranks", ["1", "2", "3"])
def test_allreduce(ranks: str) -> None:
    found = rows("allreduce", "-n", ranks, "--sizes", "4,64K")
    assert [(row["size"], row["count"], row["type"], row["redop"], row["wrong"]) for row in found] == [
        (4, 1, "float32", "sum", 0),
        (65536, 16384, "float32", "sum", 0),
    ]
    for row in found:
        assert 0 < row["time_us"] <= row["p99_us"]
        assert row["algbw"] == pytest.approx(row["size"] / row["time_us"] / 1e3)


def test_pingpong() -> None:
    (row,) = rows("pingpong", "--sizes", "2M")
    assert (row["benchmark"], row["ranks"], row["transport"], row["size"]) == ("pingpong", 2, "inproc", 2 << 20)
    assert (row["wrong"], row["bandwidth"]) == (0, pytest.approx(row["size"] / row["time_us"] / 1e3))


def test_solo() -> None:
    found = rows("solo", "-n", "4", "--sizes", "4,8", "--skew", "100us", "--iterations", "8")
    assert [(row["size"], row["mode"], row["wrong"]) for row in found] == [(s, m, 0) for s in (4, 8) for m in MODES]
    for row in found:
        least = {"full": 4, "quorum": 2}.get(row["mode"], 1)
        assert least <= row["nap"] <= 4
        assert row["bound"] >= 1
    assert [row["bound"] for row in found if row["mode"] in ("full", "solo")] == [1, math.inf] * 2


def test_the_bound_of_majority_is_that_of_its_draws() -> None:
    assert bound("majority", 32, 20_000) == pytest.approx(15.5 / expected("majority", 32)[0], rel=0.03)
    assert bound("majority", 32, 64) == pytest.approx(2.32, abs=0.01)  # these draws have many late ranks
    assert bound("quorum", 32, 64) == pytest.approx(15.5 / 3.75)


def test_text_is_aligned_under_a_headline() -> None:
    code, output = invoke("allreduce", "--sizes", "4", "--transport", "inproc")
    headline, headings, line = output.splitlines()
    assert code == 0
    assert headline.startswith("# allreduce, 2 ranks, inproc")
    assert len(headings) == len(line)
    assert aligned([["a", "bcd"], ["10", "2"]]) == " a  bcd\n10    2"


def test_a_wrong_result_is_counted(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    async def lazy(lane: object, x: object, combine: object, whole: int) -> None:
        pass

    monkeypatch.setattr(algorithms, "allreduce", lazy)
    plan = BenchPlan("allreduce", 2, (64,), transport="inproc")
    run_ranks(2, lambda comm: measure(comm, plan))
    row = json.loads(capfd.readouterr().out)
    assert row["wrong"] == 2 * 16 * (3 + 300)  # ranks, elements, calls
    assert show(plan, (each for each in [row]), as_json=False) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("benchmark", "transport"), [("allreduce", "tcp"), ("solo", "zmq")])
def test_real_processes(benchmark: str, transport: str) -> None:
    command = [sys.executable, "-X", "dev", "-W", "error", "-m", "asyncoll", "bench", benchmark]
    more = ["--skew", "100us", "--iterations", "5"] if benchmark == "solo" else []
    finished = subprocess.run(
        [*command, "-n", "2", "--sizes", "64", "--transport", transport, "--json", *more],
        cwd=ROOT,
        env=os.environ | (LIGHT if transport == "zmq" else {}),  # ranks of several hosts meet in a store of torch
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    # Loops in development mode report each callback of more than 0.1 s, and a busy machine makes them.
    told = [line for line in finished.stderr.splitlines() if "Executing <" not in line]
    assert (finished.returncode, told) == (0, [])
    found = [json.loads(line) for line in finished.stdout.splitlines()]
    assert [row["wrong"] for row in found] == [0] * len(found)
    assert {row["transport"] for row in found} == {transport}


def test_tuning_shows_all_times_and_what_it_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(plan: BenchPlan) -> list[dict]:
        sizes = choose(plan.ranks, os.environ)
        penalty = abs(sizes.chunk - 65536) + abs(sizes.piece - 1048576) + 64 * (sizes.short == 64)
        return [{"time_us": float(size + penalty)} for size in plan.sizes]

    monkeypatch.setattr(tune, "rows_of", timed)
    code, output = invoke("tune", "-n", "2", "--json")
    *timings, setting_ = map(json.loads, output.splitlines())
    assert code == 0
    assert {each["what"]: each["bytes"] for each in timings if each["chosen"]} == {
        "chunk": 65536,
        "piece": 1048576,
        "short": 1048576,
    }
    assert "chunk=65536" in setting_["here"]
    code, output = invoke("tune", "-n", "2")
    assert code == 0
    assert output.splitlines()[0].split() == ["what", "bytes", "time", "(us)", "of", "time", "(us)", "of", "chosen"]
    assert output.splitlines()[-1] == f"here:     {VARIABLE}={setting_['here']}"


@pytest.mark.parametrize("runs", [0, 3, 15, 19, 31, 32])
def test_an_interrupt_of_tuning_shows_what_was_measured(runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    done = itertools.count()

    def timed(plan: BenchPlan) -> list[dict]:
        if next(done) == runs:
            raise KeyboardInterrupt
        return [{"time_us": float(size)} for size in plan.sizes]

    monkeypatch.setattr(tune, "rows_of", timed)
    code, output = invoke("tune", "-n", "2", "--json")
    timings = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    lengths = 9  # of an array, for "short"
    assert code != 0
    assert len(timings) == min(runs, 5) + min(max(runs - 15, 0), 5) + lengths * (runs == 32)
    assert [each["what"] for each in timings if each["chosen"]] == ["chunk", "piece"][: runs // 15]


@pytest.mark.parametrize("ranks", [*TABLE, 17])
def test_the_setting_that_tuning_prints_chooses_these_sizes(ranks):
    for sizes in (choose(ranks, {}), choose(ranks, {})._replace(**IN_PIECES)):
        assert choose(2, {VARIABLE: setting(sizes)}) == sizes
