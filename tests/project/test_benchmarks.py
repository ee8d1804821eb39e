"""The scripts in `benchmarks/`: their closed forms, against sums by hand and the simulator, and their tables."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import torch.distributed as dist

from asyncoll.bench import claims
from asyncoll.bench.skewed import MODES, expected
from asyncoll.testing import run_ranks
from asyncoll.transport.messages.simulated import Network
from tests.support.places import ROOT
from tests.support.processes import PATIENCE_S
from trainers.settings import flags

BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = (
    "dc_s3gd_overlap",
    "ddp",
    "demo",
    "gpu",
    "group_propagation",
    "long_messages",
    "long_run",
    "message_cost",
    "rpc",
    "simulated_scale",
    "skewed_arrivals",
    "solo_overhead",
    "sparse_network",
    "sparse_training",
    "sparse_words",
    "start_stop",
    "startup",
    "torch_backend",
    "training_overhead",
    "two_level_scale",
    "two_levels",
)
REPRODUCE = BENCHMARKS / "reproduce"
STUDIES = ("cifar_severe", "dc_s3gd", "oktopk", "video", "wagma")
REPRODUCTIONS = (*STUDIES, "hyperplane", "ported_script", "throughput")
NETWORK = Network(latency_s=2e-6, bandwidth_bytes_per_s=10e9)


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the folder of the scripts on the path, because they import each other."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(REPRODUCE))


def load(name: str) -> Any:
    return importlib.import_module(name)


@pytest.mark.parametrize("path", [*SCRIPTS, *(f"reproduce/{name}" for name in REPRODUCTIONS)])
def test_every_script_has_help(path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", [f"{path}.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(BENCHMARKS / f"{path}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert f"python benchmarks/{path}.py" in printed
    assert "--out" in printed


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_runs_flags_that_the_program_has(name: str) -> None:
    module = load(name)
    studies = [value for value in vars(module).values() if type(value).__name__ == "Study"]
    assert studies
    for study in studies:
        assert set(study.paper) <= set(study.methods)
        for algorithm, *arguments in study.methods.values():
            click.Command(algorithm, params=flags(algorithm)).make_context(algorithm, [*arguments, *study.common])


def test_the_throughput_of_small_simulated_worlds() -> None:
    throughput = load("throughput")
    for name, figure in throughput.FIGURES.items():
        short = dataclasses.replace(figure, elements=1 << 10)
        rows = [throughput.run(short, method, 4, 3) for method in figure.methods]
        assert len({row["rounds_per_s"] for row in rows}) > 1, name
        lines = throughput.table(short, rows)
        assert len({len(line) for line in lines}) == 1
        assert lines[-1][4:6] == ["1.00", "1.00"]
        if throughput.solo in figure.methods.values():
            assert figure.rounds >= 2 * throughput.LIMITER, name


def test_the_ported_script_is_compared_by_loss_and_time() -> None:
    ported = load("ported_script")
    base = [ported.Point(4, 4.0, 10.0), ported.Point(8, 3.0, 20.0)]
    eager = [ported.Point(4, 4.1, 6.0), ported.Point(8, 2.9, 12.0)]
    lines = ported.table({"DDP, Gloo": [base], "EagerSGD": [eager]})
    assert lines[2][1:7] == ["2.9000", "2.9000", "12.0", "12.0", "0.60", "0.60"]
    assert lines[2][7] == "0.1000"
    assert ported.reaches(eager, 1.0) is None


# -- closed forms ---------------------------------------------------------------------------------


def test_with_free_communication_the_mean_wait_is_that_of_the_micro_benchmark() -> None:
    forms = load("closed_forms")
    for ranks in (2, 7, 8, 32):
        for mode in MODES:
            wait = forms.mean_wait(ranks, forms.openers(mode, ranks), 1.0, 0.0)
            assert wait == pytest.approx(expected(mode, ranks)[0])


def test_a_late_rank_waits_for_the_rest_of_a_round() -> None:
    forms = load("closed_forms")
    assert forms.mean_wait(4, [0], 1.0, 2.5) == pytest.approx((2.5 + 1.5 + 0.5 + 0.0) / 4)
    assert forms.mean_wait(2, [1], 1.0, 0.5) == pytest.approx((1.5 + 0.5) / 2)


@pytest.mark.parametrize("size", [4 << 10, 1 << 20, 4 << 20])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_powers_of_two_match_the_closed_forms_in_the_simulator(ranks: int, size: int) -> None:
    row = load("simulated_scale").together_row(ranks, size, NETWORK)
    assert row["s"] == pytest.approx(row["formula_s"], rel=0.01, abs=1e-9)


@pytest.mark.parametrize("ranks", [3, 6, 7, 13])
def test_other_sizes_take_at_most_the_closed_forms(ranks: int) -> None:
    row = load("simulated_scale").together_row(ranks, 64, NETWORK)
    assert row["s"] <= 1.01 * row["formula_s"]


@pytest.mark.parametrize("mode", MODES)
def test_coordinated_rounds_take_at_most_the_closed_forms(mode: str) -> None:
    rows = {row["mode"]: row for row in load("simulated_scale").world(8, 4096, NETWORK, 2)}
    assert rows[mode]["wait_s"] <= 1.01 * rows[mode]["wait_formula_s"]


def test_activated_rounds_match_the_closed_forms() -> None:
    simulated = load("simulated_scale")
    rows = {row["mode"]: row for row in simulated.world(8, 160 << 10, NETWORK, 2)}
    for row in rows.values():
        assert row["wait_s"] == pytest.approx(row["wait_formula_s"], rel=0.02)
    assert rows["full"]["ratio"] == 1
    assert rows["solo"]["nap"] == 1
    assert rows["quorum"]["nap"] == 4
    lines = simulated.table(list(rows.values()))
    assert [line[1] for line in lines] == ["mode", *MODES]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize("call", ["allreduce", "solo", "majority", "solo, alone"])
@pytest.mark.parametrize("size", [1 << 10, 1 << 16, 1 << 19])
def test_calls_on_two_levels_match_the_closed_forms(call: str, size: int) -> None:
    """The rank that calls alone is nearer to the hosts that lead some rounds than the form assumes."""
    scale = load("two_level_scale")
    rows = [scale.row(call, hosts, each, size) for hosts, each in ((2, 4), (8, 2))]
    assert [len(line) for line in scale.table(rows)] == [8, 8, 8]
    for row in rows:
        least = 0.9 if call == "solo, alone" else 0.99
        assert least * row["formula_s"] <= row["s"] <= 1.01 * row["formula_s"]


@pytest.mark.parametrize(
    ("ranks", "group_size", "rounds"),
    [(4, 2, 2), (64, 8, 2), (64, 2, 6), (1000, 10, 3), (9, 4, 2), (5, 5, 1), (1, 2, 0)],
)
def test_rounds_by_formula(ranks: int, group_size: int, rounds: int) -> None:
    assert load("group_propagation").rounds_by_formula(ranks, group_size) == rounds


@pytest.mark.parametrize("size", range(2, 70))
def test_an_update_reaches_all_ranks_in_logarithmic_time(size: int) -> None:
    for group_size in range(2, size + 1):
        least, power = 0, 1
        while power < size:
            power *= group_size
            least += 1
        worst = max(load("group_propagation").propagation(size, group_size, first) for first in range(1, 13))
        exact = size.bit_count() == group_size.bit_count() == 1
        assert least <= worst <= least + (0 if exact else 1 if group_size >= 5 else 2)


# -- tables ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_script_writes_its_folder(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "group_propagation.py"), "--worlds", "8:2,9:3", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert "log_S P" in done.stdout
    assert (tmp_path / "group_propagation.png").stat().st_size
    written = json.loads((tmp_path / "group_propagation.json").read_text())
    assert [(row["formula"], row["measured"]) for row in written["raw"]] == [(3, 3), (2, 2)]
    assert [row["fixed"]["reached"][-1] for row in written["raw"]] == [2, 3]
    assert {"command", "options", "machine", "tables"} <= set(written)


def test_skewed_arrivals_sums_up_repeats() -> None:
    skewed, plan = load("skewed_arrivals"), load("skewed_arrivals").BenchPlan("solo", 32, (4096,), skew_s=1e-3)

    def found(mean_us: float) -> dict[str, float]:
        return {"mean_us": mean_us, "median_us": mean_us, "nap": 1.0}

    means = {"full": 20e3, "majority": 10e3, "quorum": 8e3, "solo": 2e3, "Gloo": 40e3}
    cost = {"messages": 10.0, "message_us": 100.0, "cpu_us": 1e3, "wall_us": 2e3}
    repeat = {
        "skewed": {mode: found(mean) for mode, mean in means.items()},
        "together": {mode: found(1e3) for mode in means},
        "chained": dict.fromkeys(MODES, cost),
    }
    rows = {mode: skewed.summary(plan, [repeat] * 3, mode) for mode in means}
    assert (rows["solo"]["ratio"], rows["solo"]["over_gloo"], rows["Gloo"]["ratio"]) == (10, 20, 0.5)
    assert (rows["majority"]["ceiling"], rows["solo"]["ceiling"]) == (pytest.approx(2.91, abs=0.01), None)
    assert rows["majority"]["by_processor"] < 20e3 / rows["majority"]["expected_us"]
    lines = skewed.table(list(rows.values()))
    assert len({len(line) for line in lines}) == 1
    assert "53.32" in lines[4]


def test_hyperplane_compares_with_both_and_the_paper() -> None:
    hyperplane = load("hyperplane")

    def report(speed: float, score: float) -> dict[str, Any]:
        return {"steps_per_s": speed, "final_score": score, "active_mean": 8.0, "stale_share": 0.0}

    speeds = {"synchronous": 2.0, hyperplane.DDP: 1.6, "solo": 3.2, "majority": 2.4}
    lines = hyperplane.table(0.2, {method: [report(speed, 0.9)] * 3 for method, speed in speeds.items()})
    solo = dict(zip(lines[0], lines[3], strict=True))
    assert (solo["over synchronous"], solo[f"over {hyperplane.DDP}"], solo["paper"]) == ("1.60", "2.00", "1.50")
    assert (solo["loss/synchronous"], solo["allows"]) == ("1.00", "1.67")


# -- the page -------------------------------------------------------------------------------------


def test_the_page_is_what_its_records_give() -> None:
    """`python benchmarks/page.py` writes it."""
    for name, text in load("page").files(claims.load()).items():
        assert (ROOT / name).read_text() == text, name


@pytest.mark.parametrize("claim", claims.load().values(), ids=lambda claim: claim.name)
def test_a_claim_is_complete(claim: claims.Claim) -> None:
    assert len(claim.rows) <= 6
    assert len(claim.columns) <= 5
    assert set(claim.columns.values()) <= {"s", "times", "share", "number"}
    for place in (*claim.measures, *(run.script for run in claim.runs)):
        assert (ROOT / place).exists(), place
    for run in claim.modules:
        assert set(run.options) == set(run.quick), "a quick run has the same options"
    cells = load("page").cells_of(load("page").record_of(claim))
    assert cells.keys() & set(claim.rows), "a record"
    for row, column in (*re.findall(r"\{([^:{}]+):([^{}]+)\}", claim.text), *(bound.cell for bound in claim.holds)):
        assert row in claim.rows, row
        assert column in claim.columns, column
    lists = set(claim.peers) | {peer for peers in claim.peers.values() for peer in peers}
    assert lists <= {*claim.rows, *claim.columns, *(column for found in cells.values() for column in found)}


def test_a_number_that_links_to_the_page_stands_in_its_section() -> None:
    """So a number of another page changes with the record."""
    sections = load("page").sections()
    links = 0
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for text, anchor in re.findall(r"\[([^\]]*)\]\([\w./]*benchmarks\.md#([\w-]+)\)", page.read_text()):
            assert anchor in sections, (page, anchor)
            for number in re.findall(r"\d+(?:\.\d+)?(?: (?:us|ms|s|%)\b)?", text):
                links += 1
                assert number in sections[anchor], (page, number, anchor)
    assert links


def test_a_record_of_other_code_is_marked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    page, claim = load("page"), claims.load()["rpc"]
    monkeypatch.setattr(page, "age", lambda its: 3 if its.name == claim.name else 0)
    assert f"## {claim.heading}\n\n*Older than the code: 3 commits" in page.marked((ROOT / page.PAGE).read_text())
    assert page.tell_ages({claim.name: claim}) == 1
    assert "make benchmarks CLAIM=rpc" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_a_record_of_a_commit_that_is_gone_is_as_old_as_its_day(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A history that is rewritten has other commits: the site must be built all the same."""
    page = load("page")
    monkeypatch.setattr(page, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    page.git("init", "-q")
    for day in (1, 3):
        (tmp_path / "code.py").write_text(str(day))
        page.git("add", "code.py")
        monkeypatch.setenv("GIT_COMMITTER_DATE", f"2026-01-0{day}T12:00:00Z")
        page.git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "code")
    first, last = page.git("rev-parse", "HEAD~"), page.git("rev-parse", "HEAD")
    for commit, date, commits in ((first, "2026-01-01", 1), (last, "2026-01-03", 0), ("0badc0de", "2026-01-02", 1)):
        assert page.commits_since({"commit": commit, "date": date}, ["code.py"]) == commits


def test_a_peer_that_is_faster_is_on_the_page() -> None:
    columns, unit = {"ours": "s", "theirs": "s"}, ("theirs",)
    claim = dataclasses.replace(claims.load()["ddp"], rows=("a", "b"), columns=columns, peers={"ours": unit})
    cells: claims.Cells = {"a": {"ours": 2.0, "theirs": 1.0}, "b": {"ours": 1.0, "theirs": 2.0}}
    rows: claims.Cells = {"ours": {"a": 2.0, "b": 1.0}, "theirs": {"a": 1.0, "b": 2.0}}
    turned = dataclasses.replace(claim, rows=("ours", "theirs"), columns={"a": "s", "b": "s"})
    for found in (*claim.losses(cells), *turned.losses(rows)):
        assert (found.what, found.ours, found.peer, found.mine_s, found.theirs_s) == ("a", "ours", "theirs", 2.0, 1.0)
    assert len([*claim.losses(cells), *turned.losses(rows)]) == 2


# -- gpu.py --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["order", "lifetime", "mixed", "rounds", "cancelled"])
def test_checks_of_a_gpu_hold_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a check that fails on a GPU has found something."""
    checks = load("gpu_checks")
    monkeypatch.setattr(checks, "own", lambda comm: torch.device("cpu"))
    monkeypatch.setattr(checks, "COUNT", 1003)
    for function in ("_sleep", "synchronize", "Stream"):
        monkeypatch.setattr(torch.cuda, function, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    run_ranks(3, next(check.body for check in checks.CHECKS if check.name == name))


def test_the_check_of_process_groups_on_a_gpu_holds_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("asyncoll", store=dist.HashStore(), rank=0, world_size=1)
    try:
        checks, host = load("gpu_torch"), torch.device("cpu")
        monkeypatch.setattr(checks, "STEPS", 3)
        checks.bits(host)
        checks.ddp(host)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("told", "lost", "code", "found"),
    [
        ({0: "pass", 1: "pass"}, (), 0, "pass"),
        ({0: "pass", 1: "not here: needs two GPUs"}, (), 0, "not here: needs two GPUs"),
        ({0: "pass"}, (1,), 137, "pass"),
        ({0: "pass"}, (), 1, "FAIL: no answer of ranks [1]: AssertionError: no"),
        ({0: "pass", 1: "pass"}, (), 1, "FAIL: exit status 1"),
    ],
)
def test_the_verdict_on_a_check_of_a_gpu(
    told: dict[int, str], lost: tuple[int, ...], code: int, found: str, tmp_path: Path
) -> None:
    for rank, values in told.items():
        (tmp_path / str(rank)).write_text(json.dumps(values))
    check = load("gpu_checks").Check("name", "what", None, lost=lost)
    assert load("gpu").verdict(check, 2, code, "Traceback\nAssertionError: no\n", tmp_path)[0] == found


def test_a_measurement_of_a_gpu_names_its_targets() -> None:
    measurement = load("gpu_times").Measurement("name", "what", None, (("share", "least", 0.7), ("ms", "most", 2.0)))
    assert measurement.judge({"share": 0.75, "ms": 1.0, "GB/s": 50.0}) == (
        "pass: share 0.75 (at least 0.7), ms 1 (at most 2), GB/s 50"
    )
    assert measurement.judge({"share": 0.65, "ms": 1.0}).startswith("FAIL")


def test_the_hidden_share_is_of_the_work_beside_the_busiest_stream() -> None:
    hidden = load("gpu_checks").hidden
    kernels = [(0.0, 10.0), (12.0, 20.0)]
    assert hidden({7: kernels, 8: [(8.0, 13.0)], 9: [(19.0, 24.0)]}) == pytest.approx(0.4)
    with pytest.raises(AssertionError, match="no work of the calls"):
        hidden({7: kernels})


def test_nothing_is_checked_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--all"])
    with pytest.raises(SystemExit, match="2"):
        load("gpu").main()
    assert "sees no GPU: nothing was checked" in capsys.readouterr().err
