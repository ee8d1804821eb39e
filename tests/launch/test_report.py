"""The report of `asyncoll launch --json`: how each job, and each of its ranks, has ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from asyncoll.errors import UsageError
from asyncoll.launch import launch as launch_here
from asyncoll.launch.report import clear
from tests.launch.test_launch import LIGHT, at_once, await_ready, launch, start
from tests.support.places import SCRIPTS
from tests.support.processes import PATIENCE_S

pytestmark = pytest.mark.slow

ENDS_AS_TOLD = SCRIPTS / "launch/ends_as_told.py"
WAITS = SCRIPTS / "launch/ignores_signals.py"


def read(file: Path) -> dict[str, Any]:
    """The report, whose parts have the right form."""
    report = json.loads(file.read_text())
    assert list(report) == ["exit_code", "seconds", "first", "deaths", "ranks"]
    for entry in report["deaths"]:
        assert list(entry) == ["rank", "host", "pid", "kind", "error", "after_s"]
    assert [entry["rank"] for entry in report["ranks"]] == list(range(len(report["ranks"])))
    for entry in report["ranks"]:
        assert list(entry) == ["rank", "host", "pid", "exit_code", "signal", "ended_s"]
        assert entry["ended_s"] is None or 0 <= entry["ended_s"] <= report["seconds"]
    return report


def line_of(text: str) -> str:
    lines = ENDS_AS_TOLD.read_text().splitlines()
    return f"{ENDS_AS_TOLD}:{next(number for number, line in enumerate(lines, 1) if text in line)}"


def test_a_job_that_succeeds(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text("an old one")
    program = tmp_path / "program.py"
    program.write_text("import os\nprint(os.environ['RANK'], os.getpid())")
    run = launch("-n", 3, "--json", file, program)
    report = read(file)
    assert (run.returncode, report["exit_code"], report["first"]) == (0, 0, None)
    pids = [int(line.split()[-1]) for line in sorted(run.stdout.splitlines())]
    assert [(entry["host"], entry["pid"], entry["exit_code"], entry["signal"]) for entry in report["ranks"]] == [
        (socket.gethostname(), pid, 0, None) for pid in pids
    ]
    assert sorted(os.listdir(tmp_path)) == ["program.py", "report.json"]


UNWELL = "ValueError: rank one is unwell"
FAILURES = [
    ("raise", 1, None, "ValueError", UNWELL, line_of('rank one is unwell")')),
    ("status", 7, None, "SystemExit", "SystemExit: 7", line_of("sys.exit(7)")),
    ("message", 1, None, "SystemExit", "SystemExit: rank one gives up", line_of("gives up")),
    ("abrupt", 9, None, "exit", "failed (exit code 9)", None),
    ("kill", 137, "SIGKILL", "signal", "was killed by SIGKILL", None),
    ("crash", 139, "SIGSEGV", "signal", "was killed by SIGSEGV", None),
]


def test_a_rank_that_fails_is_the_first_failure(tmp_path: Path) -> None:
    at_once(_is_told, [(tmp_path / how, how, *told) for how, *told in FAILURES])


def _is_told(file: Path, how: str, code: int, signum: str | None, kind: str, error: str, place: str | None) -> None:
    run = launch("-n", 3, "--json", file, ENDS_AS_TOLD, how)
    report = read(file)
    assert run.returncode == report["exit_code"] == code
    others = report["ranks"][0], report["ranks"][2]
    assert [(entry["exit_code"], entry["signal"]) for entry in others] == [(143, "SIGTERM")] * 2
    failed = report["ranks"][1]
    assert (failed["exit_code"], failed["signal"]) == (code, signum)
    traceback = report["first"].pop("traceback")
    named = {name: failed[name] for name in ("rank", "host", "pid")}
    assert report["first"] == {**named, "kind": kind, "error": error, "place": place}
    deaths = [{**named, "kind": kind, "error": error}] if signum else []
    assert [{name: each[name] for name in each if name != "after_s"} for each in report["deaths"]] == deaths
    assert (traceback or "").endswith(f"\n{UNWELL}\n") == (how == "raise")


@pytest.mark.parametrize(
    ("interrupts", "code", "signum"), [(1, 0, None), (2, 137, "SIGKILL")], ids=["once", "a second time"]
)
def test_a_job_that_is_interrupted(interrupts: int, code: int, signum: str | None, tmp_path: Path) -> None:
    answers = ["SIGINT"] * (interrupts == 1)
    with start("-n", 2, "--json", tmp_path / "report.json", WAITS, *answers) as process:
        await_ready(process, 2)
        for _ in range(interrupts):
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            process.stderr.readline()  # it has heard the signal
        assert process.wait(PATIENCE_S) == 130
    report = read(tmp_path / "report.json")
    assert (report["exit_code"], report["first"]) == (130, None)
    assert [(entry["exit_code"], entry["signal"]) for entry in report["ranks"]] == [(code, signum)] * 2


def test_a_job_that_is_interrupted_before_there_is_a_rank(tmp_path: Path) -> None:
    environment = {"ASYNCOLL_PRELOAD": "import_without_end", "PYTHONPATH": str(SCRIPTS / "launch")}
    with start("-n", 2, "--json", tmp_path / "report.json", WAITS, env=environment) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)
    report = read(tmp_path / "report.json")
    assert (report["exit_code"], report["first"]) == (130, None)
    assert [(entry["pid"], entry["exit_code"], entry["ended_s"]) for entry in report["ranks"]] == [
        (None, None, None)
    ] * 2


def test_a_job_that_runs_into_its_timeout(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    assert launch("-n", 2, "--timeout", "2", "--json", file, "-m", "http.server", "0").returncode == 124
    report = read(file)
    assert (report["exit_code"], report["first"]) == (124, None)
    assert {entry["signal"] for entry in report["ranks"]} <= {"SIGTERM", None}  # None: it has not been started in time


def test_a_rank_that_stays_stopped(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    environment = {**LIGHT, "ASYNCOLL_STOPPED_S": "0.1", "ASYNCOLL_FREEZE_S": "0"}
    program = tmp_path / "stops.py"
    program.write_text("import os, signal\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), signal.SIGSTOP)\n")
    assert launch("-n", 2, "--json", file, program, env=environment).returncode == 147
    report = read(file)
    assert (report["first"]["rank"], report["first"]["kind"]) == (1, "signal")
    assert report["first"]["error"] == "was stopped by a signal"


@pytest.mark.parametrize(
    ("source", "kind", "line"),
    [
        ("x = (\n", "SyntaxError", 1),
        ("import json\n\njson.loads('{')\n", "JSONDecodeError", 3),
        (
            "import numpy\nimport asyncoll\n\n\nasync def main(comm):\n    await comm.send(1, 5)\n\n\n"
            "asyncoll.run(main)\n",
            "UsageError",
            6,
        ),
    ],
    ids=["a program that does not compile", "an error of a library", "an error of asyncoll"],
)
def test_the_place_is_a_line_of_the_program(source: str, kind: str, line: int, tmp_path: Path) -> None:
    program, file = tmp_path / "program.py", tmp_path / "report.json"
    program.write_text(source)
    launch("-n", 1, "--json", file, program)
    first = read(file)["first"]
    assert (first["kind"], first["place"]) == (kind, f"{program}:{line}")


def test_a_report_is_a_file_as_others_and_follows_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("folder/report.json")
    (tmp_path / "folder").mkdir()
    mask = os.umask(0o027)
    try:
        launch("-n", 1, "--json", tmp_path / "link", "-m", "this")
    finally:
        os.umask(mask)
    assert (tmp_path / "link").is_symlink()
    assert stat.S_IMODE((tmp_path / "folder/report.json").stat().st_mode) == 0o640


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        (".", "is not a regular file"),
        ("/dev/null", "is not a regular file"),
        ("nowhere/report.json", "No such file or directory"),
        ("/proc/report.json", "cannot write the report /proc/report.json"),
        (f"{'x' * 300}", "File name too long"),
    ],
    ids=["a folder", "a device", "no folder", "no right", "a long name"],
)
def test_a_report_that_cannot_be_written_starts_nothing(path: str, complaint: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"open({str(tmp_path / 'started')!r}, 'w')")
    run = launch("-n", 1, "--json", path, program, cwd=tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    assert complaint in " ".join(run.stderr.split())
    assert os.listdir(tmp_path) == ["program.py"]


def test_a_report_that_is_lost_in_the_end_is_told_and_does_not_change_the_exit_code(tmp_path: Path) -> None:
    program, folder = tmp_path / "program.py", tmp_path / "folder"
    folder.mkdir()
    program.write_text(f"import os, sys\nos.rmdir({str(folder)!r})\nsys.exit(3)")
    run = launch("-n", 1, "--json", folder / "report.json", program)
    assert run.returncode == 3
    assert run.stderr.endswith(
        f"cannot write the report {folder}/report.json: No such file or directory; give another path\n"
    )


def test_the_function_writes_the_same_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCOLL_PRELOAD", "")
    assert launch_here(1, ["this"], module=True, report=tmp_path / "report.json") == 0
    assert read(tmp_path / "report.json")["ranks"][0]["exit_code"] == 0
    with pytest.raises(UsageError, match="give another path for the report"):
        clear(tmp_path)
