"""Wrong inputs of `asyncoll` and most of its commands: one error that says what to do, and nothing happens."""

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
    ("--min-ranks 2 program.py", "give either -n RANKS, for this host, or --hosts HOST:RANKS"),
    ("-n 2 --min-ranks program.py", "'program.py' is not a valid whole number"),
    ("-n 2 --min-ranks 0 program.py", "'--min-ranks': 0 is not in the range x>=1"),
    ("-n 2 --min-ranks 1.5 program.py", "'1.5' is not a valid whole number"),
    ("-n 2 --min-ranks 3 program.py", "--min-ranks 3: the job has 2 ranks; give 1 to 2"),
    ("--hosts a:1,b:1 --min-ranks 3 program.py", "--min-ranks 3: the job has 2 ranks; give 1 to 2"),
    ("-n 2 --min-nodes 1 program.py", "Did you mean '--min-ranks'?"),
    ("program.py -n 2 --min-ranks 1", "-n after the program is an argument of the program: put it before"),
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
    ("folder", "folder is a folder: give a file in it"),
    ("dangling", "dangling exists"),
    (".", ". is a folder"),
    ("/dev/full", "/dev/full exists"),
    ("none/key", "cannot write a key to none/key: make the folder none first"),
    ("folder/none/key", "cannot write a key to folder/none/key: make the folder folder/none first"),
    ("file/key", "cannot write a key to file/key: Not a directory"),
    ("/proc/key", "cannot write a key to /proc/key: No such file or directory"),
    ("~nobody/key", "cannot write a key to ~nobody/key: make the folder ~nobody first"),
    ("x" * 300, "File name too long"),
    ("x/" * 3000, "File name too long"),
    ("-x", "No such option '-x'"),
    ("--force new", "No such option '--force'"),
    ("--json new", "No such option '--json'"),
    ("--key-file new", "No such option '--key-file'"),
    ("--mode 0644 new", "No such option '--mode'"),
    ("-- -x", "'-x' is an option; give a path"),
]
LISTENS = "--listen 127.0.0.1:0"
STORE = [
    ("", "Missing option '--listen'"),
    ("--listen", "Option '--listen' requires an argument"),
    ("--key-file file", "Missing option '--listen'"),
    ("--listen 127.0.0.1", "--listen '127.0.0.1': give HOST:PORT, as in 10.0.0.1:29600"),
    ("--listen 127.0.0.1:", "give HOST:PORT"),
    ("--listen :29600", "give HOST:PORT"),
    ("--listen 127.0.0.1:x", "give HOST:PORT"),
    ("--listen 127.0.0.1:-1", "give HOST:PORT"),
    ("--listen 127.0.0.1:65536", "give HOST:PORT"),
    ("--listen 127.0.0.1:٣", "give HOST:PORT"),
    ("--listen ::1:29600", "give HOST:PORT"),
    ("--listen tcp://127.0.0.1:29600", "give HOST:PORT"),
    (LISTENS, "a store needs a key, which the ranks have, too: make one with `asyncoll key ~/.asyncoll.key`"),
    (f"{LISTENS} here", "Got unexpected extra argument (here)"),
    (f"{LISTENS} --port 5", "No such option '--port'"),
    (f"{LISTENS} -n 2", "No such option '-n'"),
    (f"{LISTENS} --key file", "Did you mean '--key-file'?"),
    (f"{LISTENS} --key-file none", "File 'none' does not exist"),
    (f"{LISTENS} --key-file folder", "File 'folder' is a directory"),
    (f"{LISTENS} --key-file file", "others than its owner have rights to file (mode 0644): use `chmod go= file`"),
    (f"{LISTENS} --key-file empty", "empty is no key: it must have 32 bytes; make one with `asyncoll key FILE`"),
]
FAULTS = [
    ("kill", "Got unexpected extra argument (kill)"),
    ("--cells kill", "--cells: 'kill' names no cell: use FAULT/OPERATION/MOMENT, such as 'kill/*/inside'"),
    ("--cells kil/*/inside", "no fault is 'kil'; there is kill, gil"),
    ("--cells KILL/*/inside", "no fault is 'KILL'; there is kill, linger"),
    ("--cells kill/reduc/inside", "no operation of kill is 'reduc'; there is reduce"),
    ("--cells kill/reduce/insde", "no moment of kill/reduce is 'insde'; there is inside"),
    ("--cells kill/reduce/inside,", "--cells: '' names no cell"),
    ("--cells kill/reduce/inside/", "'kill/reduce/inside/' names no cell: use FAULT/OPERATION/MOMENT"),
    ("--cells kill-host/*/inside", "kill-host needs --hosts N, of at least 2"),
    ("--cells kill/joining/inside", "joining needs --hosts N, of at least 2"),
    ("--cells return/reduce/inside", "no operation of return is 'reduce'; there is init_allreduce"),
    ("--sample 1.5", "'1.5' is not a valid whole number"),
    ("--seeds 5:5", "'5:5' are no seeds: use FROM:TO, such as 0:200, or a count"),
    ("--seeds 1 --seed 2", "give --seed or --seeds, not both"),
    ("--seed -1", "'--seed': -1 is not in the range"),
    ("-n 1", "'-n' / '--ranks': 1 is not in the range 2<=x<=1024"),
    ("--nproc 2", "Did you mean '--ranks'?"),
    ("--jobs 0", "'--jobs': 0 is not in the range 1<=x<=1024"),
    ("--hosts 5", "--hosts: 4 ranks are on 1 to 4 hosts, not 5"),
    ("--hosts a:2", "'a:2' is not a valid whole number"),
    ("--transport tcp", "'tcp' is not one of 'shm', 'zmq', 'shm-mixed'"),
    ("--json cells.json", "Got unexpected extra argument (cells.json)"),
]
TABLES = {"": ASYNCOLL, "launch": LAUNCH, "doctor": DOCTOR, "key": KEY, "store": STORE, "faults": FAULTS}
INPUTS = [(f"{command} {words}", complaint) for command, table in TABLES.items() for words, complaint in table]
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
    monkeypatch.setenv("HOME", str(tmp_path))  # without a key
    Path("program.py").write_text("open('started', 'w')")
    Path("file").touch(mode=0o644)
    Path("empty").touch(mode=0o600)
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
