"""The page of compatibility: what its records give, and the metadata that promises no more."""

from __future__ import annotations

import ctypes
import importlib
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.places import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script `compatibility/run.py`, whose folder is on the path."""
    monkeypatch.syspath_prepend(str(ROOT / "compatibility"))
    return importlib.import_module("run")


def numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


def test_the_page_is_what_its_records_give(run: Any) -> None:
    """`python compatibility/run.py` writes it."""
    assert run.PAGE.read_text() == run.page()


def test_each_row_has_a_record_and_each_failure_a_reason(run: Any) -> None:
    for environment in run.ENVIRONMENTS:
        assert environment.record, environment.name
        reasons = run.DECLARED.get("reasons", {}).get(environment.name, {})
        assert sorted(reasons) == sorted(run.failing(environment.record)), environment.name
    rows = {environment.name for environment in run.ENVIRONMENTS}
    assert rows == {path.stem for path in run.RECORDS.iterdir()}


def test_the_lower_bounds_are_those_that_were_run(run: Any) -> None:
    (lowest,) = [environment for environment in run.ENVIRONMENTS if environment.packages == "lowest"]
    assert not run.failing(lowest.record)
    versions = lowest.record["versions"]
    assert PROJECT["requires-python"] == f">={lowest.python}"
    for name, bound in (requirement.split(">=") for requirement in PROJECT["dependencies"]):
        run_with, promised = numbers(versions[name]), numbers(bound)
        assert run_with[: len(promised)] == promised, name
        assert not any(run_with[len(promised) :]), name


def test_the_classifiers_name_the_pythons_that_passed(run: Any) -> None:
    classifiers = [re.fullmatch(r".* :: Python :: (3\.\d+)", each) for each in PROJECT["classifiers"]]
    passed = {
        environment.python
        for environment in run.ENVIRONMENTS
        if "checks" in environment.record and not run.failing(environment.record)
    }
    assert {found[1] for found in classifiers if found} == passed


@pytest.mark.skipif(not (shutil.which("cc") and shutil.which("readelf")), reason="there is no compiler")
def test_empty_libraries_stand_in_for_those_that_a_library_needs(run: Any, tmp_path: Path) -> None:
    folder = tmp_path / "torch" / "lib"
    folder.mkdir(parents=True)

    def build(name: str, source: str, *options: str) -> None:
        (tmp_path / "x.c").write_text(source)
        command = ["cc", "-shared", "-fPIC", "x.c", "-o", str(folder / name), f"-Wl,-soname,{name}", *options]
        subprocess.run(command, check=True, cwd=tmp_path)

    (tmp_path / "versions").write_text("V1 { global: cudaCount; };")
    build("libcudacount.so.1", "int cudaCount(void) { return 1; }", "-Wl,--version-script=versions")
    build("libnvcount.so.1", "int nvCount(void) { return 1; }")
    needed = [str(folder / name) for name in ("libcudacount.so.1", "libnvcount.so.1")]
    source = "int cudaCount(void), nvCount(void); int torch_count(void) { return cudaCount() + nvCount(); }"
    build("libtorch.so", source, *needed, "-Wl,-rpath,$ORIGIN")
    for path in needed:
        Path(path).unlink()
    assert run.supply(tmp_path)
    assert ctypes.CDLL(str(folder / "libtorch.so")).torch_count() == 200
    assert not run.supply(tmp_path)
