"""Wrong inputs of `asyncoll`, `launch`, `doctor` and `key`: one error that says what to do, and nothing happens."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from asyncoll.cli import main

ASYNCOLL = [
    ("lanch", "Did you mean one of: 'bench', 'launch'?"),
    ("launch.py", "Did you mean 'launch'?"),
    ("doctr", "Did you mean 'doctor'?"),
    ("LAUNCH", "No such command 'LAUNCH'"),
    ("run program.py", "No such command 'run'"),
    ("program.py", "program.py is not a command: `asyncoll launch -n RANKS program.py` runs a program"),
    ("-n 2 program.py", "No such option '-n' here: it belongs after launch or"),
    ("--hosts a:1", "No such option '--hosts' here: it belongs after launch"),
    ("--json", "No such option '--json' here: it belongs after launch or doctor"),
    ("--nproc 2 program.py", "No such option '--nproc'"),
    ("--verson", "Did you mean '--version'?"),
    ("--help=1", "Option '--help' does not take a value"),
    ("--version=1", "Option '--version' does not take a value"),
    ("-x", "No such option '-x'"),
    ("--", "Missing command"),
    ("-", "No such command '-'"),
    ("*", "No such command '*'"),
    ("0", "No such command '0'"),
    ("bench nothing", "No such command 'nothing'"),
    ("bench -n 2", "No such option '-n' here: it belongs after"),
]
LAUNCH = [
    ("", "Missing argument 'SCRIPT|MODULE [ARGS]...'"),
    ("-n 2", "Missing argument 'SCRIPT|MODULE [ARGS]...'"),
    ("program.py", "give either -n RANKS, for this host, or --hosts HOST:RANKS"),
    ("-n 2 --hosts a:1 program.py", "give either -n RANKS, for this host, or --hosts HOST:RANKS"),
    ("-n 0 program.py", "'-n' / '--ranks': 0 is not in the range x>=1"),
    ("--ranks -1 program.py", "'-n' / '--ranks': -1 is not in the range x>=1"),
    ("-n 2.5 program.py", "'2.5' is not a valid whole number"),
    ("-np 2 program.py", "'p' is not a valid whole number"),
    ("-n 999999999999 program.py", "open files, the limit is"),
    ("--nproc 2 program.py", "No such option '--nproc'. Did you mean '--ranks'?"),
    ("--nproc-per-node=2 program.py", "Did you mean '--ranks'?"),
    ("--rank 2 program.py", "Did you mean '--ranks'?"),
    ("program.py -n 2", "-n after the program is an argument of the program: put it before"),
    ("program.py -n2", "-n after the program is an argument of the program: put it before"),
    ("program.py --ranks=2", "--ranks after the program is an argument of the program: put it before"),
    ("program.py --hosts a:1", "--hosts after the program is an argument of the program: put it before"),
    ("-n 2 nowhere.py", "no such script: nowhere.py"),
    ("-n 2 package.train", "no such script: package.train; to run a module of this name, put -m before it"),
    ("-n 2 folder", "not a script: folder"),
    ("-n 2 -m no.such", "no module named no"),
    ("-n 2 -m program.py", "'program.py' is not the name of a module: give one, or leave out -m to run a script"),
    ("-n 2 -m ../program", "'../program' is not the name of a module"),
    ("-n 2 --timeout 0 program.py", "'--timeout': 0.0 is not in the range x>0"),
    ("-n 2 --timeout 10s program.py", "'10s' is not a valid number of seconds"),
    ("-n 2 --transport tcp program.py", "'tcp' is not one of 'shm', 'zmq'"),
    ("-n 2 --backend zmq program.py", "Did you mean '--transport'?"),
    ("-n 2 --env HOME program.py", "--env goes with --hosts: ranks of this host have its environment"),
    ("--hosts a:1 --env HOME=1 program.py", "--env HOME=1: give the name alone"),
    ("--hosts a:1 --env NOT_SET program.py", "NOT_SET is not set here: export it, or leave out --env"),
    ("--hosts a program.py", "--hosts a: 'a' is not HOST:RANKS; give a host and its number of ranks"),
    ("--hosts a:0 program.py", "a job has at least one rank on host a"),
    ("--hosts a:1,a:1 program.py", "a is given twice; give each host once"),
    ("-n 2 --json folder program.py", "folder is not a regular file: give another path for the report"),
    ("-n 2 --json none/report program.py", "cannot write the report none/report: No such file or directory"),
    ("-n 2 --json -m program", "'-m' is an option; give a path (of a file of this name: ./-m)"),
    ("-n 2 --report r.json program.py", "Did you mean '--json'?"),
    ("-n 2 --log-dir file program.py", "cannot write logs to file: File exists; give another folder"),
    ("-n 2 --verbose program.py", "No such option '--verbose'"),
]
DOCTOR = [
    ("here", "Got unexpected extra argument (here)"),
    ("--jsn", "Did you mean '--json'?"),
    ("--json findings.json", "Got unexpected extra argument (findings.json)"),
    ("--json=findings.json", "Option '--json' does not take a value"),
    ("--gpus", "Did you mean '--gpu'?"),
    ("--gpu=0", "Option '--gpu' does not take a value"),
    ("--cuda", "No such option '--cuda'"),
    ("-n 4", "-n goes with --ways: without it, nothing depends on the number of ranks"),
    ("--ways -n 0", "'-n' / '--ranks': 0 is not in the range 1<=x<=1024"),
    ("--ways -n 1025", "'-n' / '--ranks': 1025 is not in the range 1<=x<=1024"),
    ("--ways -n two", "'two' is not a valid whole number"),
    ("--ways -n", "Option '-n' requires an argument"),
    ("--ways --nproc 4", "Did you mean '--ranks'?"),
    ("--ways --gpu", "--ways shows the ways of calls alone: leave out --gpu and --key-file"),
    ("--ways --key-file file", "--ways shows the ways of calls alone: leave out --gpu and --key-file"),
    ("--key file", "Did you mean '--key-file'?"),
    ("--key-file", "Option '--key-file' requires an argument"),
    ("--key-file nowhere", "File 'nowhere' does not exist"),
    ("--key-file folder", "File 'folder' is a directory"),
    ("--key-file --gpu", "'--gpu' is an option; give a path"),
    ("--keyfile file", "Did you mean '--key-file'?"),
]
KEY = [
    ("", "Missing argument 'FILE'"),
    ("one two", "Got unexpected extra argument (two)"),
    ("file", "file exists: if it is a key of yours, use that one; else give another file"),
    ("folder", "folder exists: if it is a key of yours, use that one; else give another file"),
    ("dangling", "dangling exists"),
    (".", ". exists"),
    ("/dev/full", "/dev/full exists"),
    ("none/key", "cannot write a key to none/key: No such file or directory"),
    ("folder/none/key", "cannot write a key to folder/none/key: No such file or directory"),
    ("file/key", "cannot write a key to file/key: Not a directory"),
    ("/proc/key", "cannot write a key to /proc/key: No such file or directory"),
    ("~nobody/key", "cannot write a key to ~nobody/key: No such file or directory"),
    ("x" * 300, "File name too long"),
    ("x/" * 3000, "File name too long"),
    ("-x", "No such option '-x'"),
    ("--force new", "No such option '--force'"),
    ("--json new", "No such option '--json'"),
    ("--key-file new", "No such option '--key-file'"),
    ("--mode 0644 new", "No such option '--mode'"),
    ("-- -x", "'-x' is an option; give a path"),
]
INPUTS = [
    (f"{command} {words}", complaint)
    for command, table in (("", ASYNCOLL), ("launch", LAUNCH), ("doctor", DOCTOR), ("key", KEY))
    for words, complaint in table
]
NO_SIZE = "in the environment is no number of ranks: give one with -n"
VARIABLES = [
    ({"ASYNCOLL_TRANSPORT": "foo"}, "launch", "ASYNCOLL_TRANSPORT='foo' in the environment: use one of shm, zmq"),
    ({"ASYNCOLL_FREEZE_S": "abc"}, "launch", "ASYNCOLL_FREEZE_S='abc' in the environment: give a number of seconds"),
    ({"ASYNCOLL_FREEZE_S": "1e9"}, "launch", "give 0.02 to 86400 seconds, or 0 for never"),
    ({"ASYNCOLL_DEADLINE_S": "-1"}, "launch", "ASYNCOLL_DEADLINE_S='-1' in the environment: give a number of seconds"),
    ({"ASYNCOLL_STOPPED_S": "x"}, "launch", "ASYNCOLL_STOPPED_S='x' in the environment: give a number of seconds"),
    ({"ASYNCOLL_ENCRYPT": "yes"}, "launch", "ASYNCOLL_ENCRYPT='yes' in the environment: use one of control, all"),
    ({"ASYNCOLL_PORTS": "7"}, "launch", "give the first and the last port, as in 30000-30015"),
    ({"ASYNCOLL_FREZE_S": "1"}, "launch", "did you mean ASYNCOLL_FREEZE_S?"),
    ({"ASYNCOLL_SIZES": "a"}, "launch", "ASYNCOLL_SIZES: 'a' is not NAME=NUMBER; the names are"),
    ({"WORLD_SIZE": "abc"}, "doctor --ways", f"WORLD_SIZE='abc' {NO_SIZE}"),
    ({"WORLD_SIZE": "0"}, "doctor --ways", f"WORLD_SIZE='0' {NO_SIZE}"),
    ({"ASYNCOLL_SIZES": "a"}, "doctor --ways", "ASYNCOLL_SIZES: 'a' is not NAME=NUMBER; the names are"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a program that would leave a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    Path("program.py").write_text("open('started', 'w')")
    Path("file").touch()
    Path("folder").mkdir()
    Path("dangling").symlink_to("nowhere")
    return tmp_path


def check_refused(words: list[str], complaint: str) -> None:
    before = sorted(os.walk("."))
    told = CliRunner().invoke(main, words)
    assert (told.exit_code, type(told.exception)) == (2, SystemExit), told.output
    error = told.output.partition("Error: ")[2]
    assert complaint in error
    assert error.endswith("\n")
    assert error.count("\n") == 1
    assert sorted(os.walk(".")) == before


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("words", "complaint"), INPUTS, ids=lambda value: value[:50])
def test_a_wrong_input_is_one_error_that_says_what_to_do(words: str, complaint: str) -> None:
    check_refused(words.split(), complaint)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("variables", "command", "complaint"), VARIABLES, ids=lambda value: str(value)[:40])
def test_a_wrong_variable_is_one_error_that_says_what_to_do(
    variables: dict[str, str], command: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    check_refused([*command.split(), *["-n", "2", "program.py"] * (command == "launch")], complaint)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("", "No such command ''"),
        ("launch -n 2", "the name of the script is empty"),
        ("launch -n 2 -m", "'' is not the name of a module"),
        ("launch --hosts", "Missing argument"),
        ("launch -n", "'' is not a valid whole number"),
        ("launch --json", "an empty path; give one"),
        ("launch --log-dir", "an empty path; give one"),
        ("doctor --key-file", "an empty path; give one"),
        ("key", "an empty path; give one"),
    ],
)
def test_an_empty_value_is_refused(command: str, complaint: str) -> None:
    check_refused([*command.split(), ""], complaint)
