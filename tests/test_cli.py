"""All commands of `asyncoll`: bad values of their options, and a place in which some cannot run."""

from __future__ import annotations

import os
import pty
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import asyncoll
from asyncoll.cli import EXIT_CODES, main
from asyncoll.testing.laws.story import ALL_KINDS
from tests.support.places import SCRIPTS, STUBS
from tests.support.processes import LIGHT, PATIENCE_S

COMMAND = [sys.executable, "-m", "asyncoll"]
IN_NO_FOLDER = 'cd "$1" && rmdir "$1" && shift && exec "$@"'
NOTEBOOK = """
from asyncoll import notebook

async def main(comm):
    return comm.rank

assert notebook.run(main, ranks=2) == [0, 1]
"""


def run_in_no_folder(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    return subprocess.run(
        ["sh", "-c", IN_NO_FOLDER, "sh", str(folder), *command], capture_output=True, text=True, timeout=PATIENCE_S
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["launch", "-n", "2", str(SCRIPTS / "launch/ignores_signals.py"), "SIGINT"],
        ["launch", "-n", "1", "-m", "json.tool"],
        ["launch", "--hosts", "a:1", str(SCRIPTS / "launch/ignores_signals.py")],
        ["laws", "--seed", "1"],
        ["faults", "--sample", "1"],
        ["bench", "allreduce", "--sizes", "4"],
        ["bench", "tune"],
    ],
    ids=" ".join,
)
def test_a_deleted_folder_is_refused_where_processes_or_torch_need_one(tmp_path, arguments):
    run = run_in_no_folder(tmp_path / "gone", *COMMAND, *arguments)
    assert run.returncode == 2
    assert "Error: the current folder has been deleted: go to one that exists (cd)" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("asyncoll.errors", ["laws"]),
        ("click", ["launch", "-n", "1", "-m", "this"]),
        ("asyncoll.launch.launcher", ["launch", "-n", "1", "-m", "this"]),
        ("numpy", ["doctor"]),
        ("asyncoll.transport.keys", ["key", "no.key"]),
        ("numpy", ["laws", "--seeds", "0:1"]),
        ("asyncoll.testing.faults.matrix", ["faults", "--sample", "1"]),
        ("asyncoll.bench.commands", ["bench", "tune"]),
        ("numpy", ["bench", "allreduce", "--sizes", "4"]),
    ],
    ids=str,
)
def test_an_interrupt_during_an_import_ends_a_command(tmp_path, module, arguments):
    """In whatever module the command is, from its first line on."""
    variables = {"PYTHONPATH": str(STUBS / "interrupts"), "INTERRUPTED_IMPORT": module}
    run = subprocess.run(
        [*COMMAND, *arguments], env=os.environ | variables, cwd=tmp_path, capture_output=True, text=True
    )
    assert (run.returncode, run.stdout, run.stderr, [*tmp_path.iterdir()]) == (130, "", "", [])


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--version"], ["launch", "--help"], ["doctor", "--json"]], ids=" ".join)
def test_a_full_disk_is_one_line(arguments):
    with open("/dev/full", "w") as full:
        run = subprocess.run([*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (run.returncode, run.stderr) == (1, "Error: the output cannot be written: No space left on device\n")


@pytest.mark.slow
def test_a_closed_output_stops_no_command():
    laws = [*COMMAND, "laws", "--kind", "solo", "--seeds", "0:1", "--sizes", "2"]
    run = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *laws], stderr=subprocess.PIPE, text=True)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            {"ASYNCOLL_TRANPORT": "zmq"},
            "ASYNCOLL_TRANPORT in the environment is not a variable of asyncoll: did you mean",
        ),
        ({"ASYNCOLL_TRANSPORT": "smoke"}, "ASYNCOLL_TRANSPORT='smoke' in the environment: use one of shm, zmq"),
    ],
    ids=["name", "value"],
)
@pytest.mark.parametrize(
    "arguments",
    [
        ["launch", "-n", "1", "program.py"],
        ["laws", "--seeds", "0:1"],
        ["faults", "--sample", "1"],
        ["bench", "allreduce", "--sizes", "4"],
        ["bench", "tune"],
    ],
    ids=" ".join,
)
def test_a_wrong_variable_is_refused_by_every_command_but_doctor(arguments, setting, words):
    result = CliRunner().invoke(main, arguments, env=setting)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


@pytest.mark.parametrize("command", ["launch", "laws", "faults", "bench allreduce", "bench pingpong"])
def test_an_unknown_transport_is_refused(command):
    result = CliRunner().invoke(main, [*command.split(), "--transport", "smoke"])
    assert result.exit_code == 2
    assert "'smoke' is not one of" in result.output


def test_an_unknown_transport_of_a_program_is_refused_before_a_rank_starts():
    from asyncoll.launch import launch
    from asyncoll.testing import check_laws

    with pytest.raises(asyncoll.UsageError, match="unknown transport 'smoke': use one of shm, zmq"):
        launch(2, ["program.py"], transport="smoke")
    with pytest.raises(asyncoll.UsageError, match="unknown transport 'smoke': use one of simulated, memory"):
        check_laws("solo", 2, 0, transport="smoke")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32:replace", "utf-16-le", "cp037"])
def test_ranks_that_write_no_ascii_are_refused(encoding):
    command = [*COMMAND, "launch", "-n", "1", "-m", "this"]
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    run = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=PATIENCE_S)
    said = run.stderr.decode(encoding.partition(":")[0])
    assert run.returncode == 2
    assert f"Error: PYTHONIOENCODING={encoding}: lines of ranks" in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii:backslashreplace", "shift_jis"])
def test_ranks_write_in_any_encoding_that_contains_ascii(encoding):
    command = [*COMMAND, "launch", "-n", "2", "-m", "this"]
    environment = os.environ | LIGHT | {"PYTHONIOENCODING": encoding}
    run = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=PATIENCE_S)
    lines = run.stdout.decode(encoding.partition(":")[0]).splitlines()
    assert sorted(line for line in lines if "Explicit" in line) == [
        f"{rank}: Explicit is better than implicit." for rank in range(2)
    ]
    assert not run.stderr


@pytest.mark.slow
def test_a_deleted_folder_is_no_hindrance_where_nothing_needs_one(tmp_path):
    program = tmp_path / "in_a_cell.py"  # not -c: there, Python 3.13.0 cannot import socket from a deleted folder
    program.write_text(NOTEBOOK)
    for number, command in enumerate(
        (
            [*COMMAND, "doctor"],
            [*COMMAND, "key", str(tmp_path / "key")],
            [*COMMAND, "bench", "allreduce", "--sizes", "4", "--transport", "inproc"],
            [sys.executable, str(program)],
        )
    ):
        run = run_in_no_folder(tmp_path / str(number), *command)
        assert run.returncode == 0, run


def test_a_key_that_cannot_be_written_is_an_error_and_leaves_no_file(tmp_path):
    def no_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    command = [*COMMAND, "key", str(tmp_path / "key")]
    run = subprocess.run(command, preexec_fn=no_room, capture_output=True, text=True, timeout=PATIENCE_S)
    assert run.returncode == 2
    assert f"Error: cannot write a key to {tmp_path}/key: File too large" in run.stderr
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("option", ["-V", "--version"])
def test_the_version_is_that_of_the_package(option):
    run = subprocess.run([*COMMAND, option], capture_output=True, text=True, timeout=PATIENCE_S)
    assert run.stdout == f"asyncoll {asyncoll.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["bench"]], ids=["asyncoll", "bench"])
def test_a_group_without_a_command_prints_its_help_and_succeeds(arguments):
    run = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert run.stdout.startswith("Usage: ")
    assert run.stderr == ""


@pytest.mark.parametrize(("no_color", "heading"), [("", b"\x1b[1mOptions\x1b[0m:\r\n"), ("1", b"\nOptions:\r\n")])
def test_headings_of_helps_are_bold_on_a_terminal(no_color, heading):
    ours, terminal = pty.openpty()
    with open(ours, "rb", buffering=0) as screen, open(terminal, "wb") as output:
        environ = os.environ | {"NO_COLOR": no_color}
        subprocess.run([*COMMAND, "key", "--help"], stdout=output, env=environ, timeout=PATIENCE_S, check=True)
        assert heading in screen.read(1 << 16)


def test_the_help_ends_with_the_exit_codes_of_the_page_of_commands():
    help_ = " ".join(CliRunner().invoke(main, ["--help"]).output.partition("Exit codes:")[2].split())
    for code, meaning in EXIT_CODES.items():
        assert f"{code} {meaning}" in help_


def test_the_help_of_laws_names_all_kinds():
    help_ = " ".join(CliRunner().invoke(main, ["laws", "--help"]).output.split())
    assert f"{', '.join(ALL_KINDS)}; or all." in help_


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["laws", "--seed", "9" * 26],
            "'--seed': 99999999999999999999999999 is not in the range 0<=x<=999999999999999999",
        ),
        (["laws", "--seeds", "0:" + "9" * 26], "'--seeds': '0:99999999999999999999999999' are no seeds: use FROM:TO"),
        (["laws", "--seeds", "0:1000001"], "at most 1000000 seeds"),
        (["laws", "--seeds", "٣:٤"], "'--seeds': '٣:٤' are no seeds"),
        (["laws", "--seeds", "0:" + "9" * 5000], "of at most 18 digits"),
        (["laws", "--sizes", "99999999999", "--seed", "1"], "'--sizes': '99999999999' is no number of ranks"),
        (["laws", "--sizes", "1-99999999999"], "up to 1024"),
        (["laws", "--sizes", "٣"], "'--sizes': '٣' is no number of ranks"),
        (["laws", "--jobs", "99999999"], "'--jobs': 99999999 is not in the range 1<=x<=1024"),
        (["laws", "--kind", ""], "unknown kind ''"),
        (["faults", "-n", "100000000", "--sample", "1"], "'-n' / '--ranks': 100000000 is not in the range 2<=x<=1024"),
        (["faults", "--seed", "9" * 26], "'--seed': 99999999999999999999999999 is not in the range"),
        (["faults", "--jobs", "99999999999"], "'--jobs': 99999999999 is not in the range 1<=x<=1024"),
        (["faults", "--hosts", "99999999999"], "4 ranks are on 1 to 4 hosts, not 99999999999"),
        (["launch", "-n", "9" * 23, "x.py"], "ranks need"),
        (["launch", "-n", "2", str(SCRIPTS)], "not a script"),
        (["launch", "-n", "2", ""], "the name of the script is empty"),
        (["launch", "-n", "2", "--timeout", "nan", __file__], "the timeout must be positive, not nan"),
        (["launch", "-n", "2", "--log-dir", "", __file__], "'--log-dir': an empty path"),
        (["launch", "-n", "2", "--log-dir", __file__, __file__], "cannot write logs"),
        (["launch", "--hosts", "a:٣", __file__], "--hosts a:٣: 'a:٣' is not HOST:RANKS"),
        (
            ["launch", __file__, "-n", "2"],
            "-n after the program is an argument of the program: put it before, as in",
        ),
        (["launch", __file__, "--hosts", "a:1"], "--hosts after the program is an argument of the program"),
        (["launch", "-n", "2", "--nproc", "2", __file__], "No such option '--nproc'."),
        (["launch", "-n", "2", "--time-out", "2", __file__], "No such option '--time-out'. Did you mean '--timeout'?"),
        (["faults", "--sample", "0"], "'--sample': 0 is not in the range x>=1"),
        (["key", ""], "'FILE': an empty path"),
        (["key", str(SCRIPTS)], "is a folder: give a file in it"),
        (["key", "/none/key"], "cannot write a key to /none/key: make the folder /none first"),
        (["bench", "allreduce", "--sizes", "٤"], "'--sizes': '٤' is not a size"),
        (["bench", "allreduce", "--sizes", "9" * 5000], "is not a size"),
        (["bench", "allreduce", "--sizes", "100000G"], "--sizes: 2 arrays of 107374182400000 bytes do not fit"),
        (
            ["bench", "allreduce", "-n", "99999999", "--transport", "inproc"],
            "'-n' / '--ranks': 99999999 is not in the range 1<=x<=1024",
        ),
        (["bench", "pingpong", "-n", "2"], "No such option '-n'"),
        (["bench", "solo", "--skew", "1e400s"], "'--skew': '1e400s' is not a duration"),
        (["bench", "solo", "--skew", "9" * 400 + "s"], "is not a duration"),
        (["bench", "solo", "--iterations", "9" * 21], "'--iterations': 999999999999999999999 is not in the range"),
        (["bench", "tune", "-n", "99999999"], "'-n' / '--ranks': 99999999 is not in the range 2<=x<=1024"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_a_bad_value_is_one_error_that_names_it(arguments, complaint):
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.output.count("Error: "), type(result.exception)) == (2, 1, SystemExit)
    assert complaint in result.output


@pytest.mark.slow
@pytest.mark.parametrize("timeout", ["1e400", "1e8"])
def test_a_timeout_beyond_those_of_the_kernel_is_none_too_early(tmp_path, timeout):
    (tmp_path / "script.py").write_text("print('done')")
    command = [*COMMAND, "launch", "-n", "1", "--timeout", timeout, str(tmp_path / "script.py")]
    environment = os.environ | {"ASYNCOLL_PRELOAD": ""}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (run.returncode, run.stdout) == (0, "0: done\n"), run
