"""The claims of the page of benchmarks: how their cells are shown and judged, and their measurements on a host."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from asyncoll.bench import between_processes, claims, late_training, suite, waiting
from asyncoll.bench.plan import BenchPlan, Row
from asyncoll.bench.runs import rows_of
from asyncoll.cli import main
from tests.support.processes import PATIENCE_S

HOLDS: claims.Cells = {"solo": {"times less": 200.0}, "majority": {"times less": 2.0}, "quorum of half": {}}


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (2.06e-6, "s", "2.1 us"),
        (9.293e-3, "s", "9.3 ms"),
        (214e-6, "s", "214 us"),
        (0.9996e-3, "s", "1.00 ms"),
        (1.349, "s", "1.35 s"),
        (95.746e-3, "s", "96 ms"),
        (3e-8, "s", "0.030 us"),
        (0.978, "share", "97.8 %"),
        (1.5, "times", "1.50"),
        (53.32, "times", "53.3"),
        (257.4, "times", "257"),
        (200.0, "number", "200"),
    ],
)
def test_numbers_are_short(value: float, unit: str, shown: str) -> None:
    assert claims.show(value, unit) == shown


def test_sizes_are_binary() -> None:
    assert [claims.show_bytes(size) for size in (4, 1024, 1 << 18, 100 << 20)] == ["4 B", "1 KiB", "256 KiB", "100 MiB"]


def test_a_sentence_has_its_cells() -> None:
    claim = dataclasses.replace(claims.load()["waiting"], text="{solo:times less} and {Gloo:times less}, {solo:paper}")
    cells: claims.Cells = {"solo": {"times less": 200.0}, "majority": {"paper": 2.46}}
    assert claim.sentence(cells) == "200 and not run, "
    assert claim.shown(cells, "solo", "bound") == "not run"


def test_only_what_was_measured_is_judged() -> None:
    found = claims.judge(claims.load()["waiting"], HOLDS | {"solo": {"times less": 3.0}})
    assert [holds for _, holds in found] == [False, True]
    assert found[0][0] == "solo, times less: 3.00 (at least 20.0)"


def test_the_quick_suite_has_the_claims_without_peers() -> None:
    assert [claim.name for claim in suite.chosen(())] == ["training", "waiting", "between-processes", "failures"]


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["bench", *arguments])
    return result.exit_code, result.output


def test_the_suite_says_what_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cells = dict(HOLDS)
    monkeypatch.setattr(suite, "measure", lambda run, quick: cells if quick else {})
    file = tmp_path / "here.json"
    code, output = invoke("suite", "--quick", "--claim", "waiting", "--json", str(file))
    assert code == 0, output
    assert "holds: A late rank costs microseconds: solo, times less: 200 (at least 20.0)" in output
    assert json.loads(file.read_text()) == {"claims": {"waiting": HOLDS}}
    cells["majority"] = {"times less": 1.0}
    code, output = invoke("suite", "--quick", "--claim", "waiting")
    assert code == 1
    assert "does not hold here: A late rank costs microseconds: majority" in output


def test_an_interrupt_of_the_suite_leaves_no_empty_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(run: claims.ClaimRun, quick: bool) -> claims.Cells:
        raise KeyboardInterrupt

    monkeypatch.setattr(suite, "measure", interrupted)
    file = tmp_path / "cells.json"
    code, _ = invoke("suite", "--claim", "waiting", "--json", str(file))
    assert (code != 0, file.exists()) == (True, False)


def test_a_claim_with_peers_is_refused() -> None:
    code, output = invoke("suite", "--claim", "rpc")
    assert code == 2
    assert "--claim 'rpc': asyncoll bench suite measures training, waiting," in output


def test_two_results_are_compared(tmp_path: Path) -> None:
    here, there, other = (tmp_path / f"{name}.json" for name in ("here", "there", "other"))
    here.write_text(json.dumps({"claims": {"waiting": HOLDS}}))
    there.write_text(json.dumps({"claim": "waiting", "runs": [{"cells": {"solo": {"times less": 100.0}}}]}))
    other.write_text("{}")
    code, output = invoke("compare", str(here), str(there))
    assert code == 0
    assert output.splitlines()[1].split() == ["waiting", "solo", "times", "less", "200", "100", "0.50"]
    code, output = invoke("compare", str(here), str(there), "--json")
    cell = {"claim": "waiting", "row": "solo", "column": "times less", "unit": "times", "first": 200.0, "second": 100.0}
    assert (code, json.loads(output)) == (0, cell)
    code, output = invoke("compare", str(here), str(other))
    assert code == 2
    assert "other.json is no result of `asyncoll bench suite --json`" in output


def test_sparse_calls_lose_nothing() -> None:
    (row,) = rows_of(BenchPlan("sparse", 3, (1 << 16,), transport="inproc"))
    assert (row["wrong"], row["size"]) == (0, 1 << 16)


def rows_of_one_loop_or_tcp(plan: BenchPlan) -> list[Row]:
    """By TCP only with all encrypted, and of a sparse call: each launch of several hosts loads torch."""
    is_of_tcp = "ASYNCOLL_ENCRYPT" in os.environ or plan.benchmark == "sparse"
    return rows_of(plan if is_of_tcp else dataclasses.replace(plan, transport="inproc"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "options"),
    [
        (waiting, {"ranks": 2, "iterations": 2}),
        (late_training, {"ranks": 2, "rounds": 4}),
        (between_processes, {"repeats": 1}),
    ],
)
def test_modules_measure_rows_of_their_claims(
    module: Any, options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LONG", "SHARED"):
        monkeypatch.setattr(between_processes, name, 1 << 16)
    monkeypatch.setattr(between_processes, "rows_of", rows_of_one_loop_or_tcp)
    name = module.__name__.rpartition(".")[2]
    claim = next(claim for claim in claims.load().values() if any(run.module == name for run in claim.modules))
    cells = module.cells(**options)
    assert set(cells) <= set(claim.rows)
    assert {column for found in cells.values() for column in found} <= set(claim.columns)


@pytest.mark.slow
def test_times_of_failures() -> None:
    """In a process of its own: that of `spawn` outlives the call."""
    program = "import json; from asyncoll.bench import fault_times; print(json.dumps(fault_times.cells(draws=1)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    claim = claims.load()["failures"]
    cells = json.loads(done.stdout.splitlines()[-1])
    assert set(cells) == set(claim.rows)
    assert all(0 < found["median"] <= found["longest"] for found in cells.values())
