"""The launcher on several hosts, over a stub of ssh (`tests/stubs/ssh`) that runs the agents on this machine."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

import asyncoll
from asyncoll import cli
from asyncoll.errors import ProtocolError, UsageError
from asyncoll.launch import launch as launch_here
from asyncoll.launch import parse_hosts
from asyncoll.launch.frames import FRAME_BYTES_MAX, Frames, send
from asyncoll.launch.host import Sources
from asyncoll.launch.launcher import Launcher, is_reachable
from asyncoll.launch.output import open_output
from asyncoll.launch.placement import Placement
from asyncoll.launch.remote import travelling
from asyncoll.launch.supervisor import Failure, Supervisor
from asyncoll.launch.verdict import explain, tell_stopped
from tests.launch.test_deaths import job
from tests.launch.test_launch import SCRIPTS, await_ready, check_suspends, launch, pids, runs, start, until
from tests.support.places import STUBS
from tests.support.processes import PATIENCE_S

LIGHT = {"ASYNCOLL_PRELOAD": ""}


@pytest.fixture
def hosts(monkeypatch):
    """The variables of a launcher that finds the stub of ssh; the folders of its hosts are empty in the end."""
    folder = tempfile.mkdtemp(prefix="hosts-", dir="/tmp")  # a short path, for sockets
    variables = {**LIGHT, "STUB_HOSTS": folder, "PATH": f"{STUBS}{os.pathsep}{os.environ['PATH']}"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for host in "ab":
        Path(folder, host).mkdir()
    yield variables
    until(lambda: not any(os.listdir(host) for host in Path(folder).iterdir()))
    shutil.rmtree(folder)


# What is asked for.


def test_hosts_are_read_from_a_text():
    assert parse_hosts("a:4, me@b:2,[fe80::1%eth0]:1") == {"a": 4, "me@b": 2, "fe80::1%eth0": 1}
    for text in ("", "a", "a:", ":4", "a:x", "a:4,,b:4", "-oProxyCommand=x:2", "a b:2", "fe80::1:2", "a:-1"):
        with pytest.raises(UsageError, match="is not HOST:RANKS"):
            parse_hosts(text)
    with pytest.raises(UsageError, match="a is given twice"):
        parse_hosts("a:4,b:4,a:1")
    with pytest.raises(UsageError, match="at least one rank on host b, not 0"):
        Placement(parse_hosts("a:4,b:0"))
    with pytest.raises(UsageError, match="at least one host"):
        Placement({})


def test_ranks_are_numbered_host_by_host():
    placement = Placement({"a": 3, "b": 1, "c": 13})
    assert placement.size == 17
    assert [placement.host_of(rank) for rank in range(17)] == ["a"] * 3 + ["b"] + ["c"] * 13
    assert placement.ranks_of("c") == range(4, 17)


def test_variables_that_travel():
    environ = {
        "ASYNCOLL_FREEZE_S": "2",
        "ASYNCOLL_ADDRESS": "10.0.0.1",
        "ASYNCOLL_FOLDER": "/tmp/x",
        "PYTHONPATH": "/lib",
        "OMP_NUM_THREADS": "2",
        "PATH": "/bin",
        "DATA": "/data",
    }
    assert travelling(environ, ["DATA"]).keys() == environ.keys() - {"ASYNCOLL_ADDRESS", "ASYNCOLL_FOLDER", "PATH"}
    with pytest.raises(UsageError, match="--env LOST: LOST is not set here"):
        travelling(environ, ["LOST"])


def test_frames_of_any_cut_and_none_that_is_too_long():
    reader, writer = os.pipe()
    messages = [{"fork": 1, "environment": {"A": "\udcff"}}, {}, {"data": b"\xff" * 1000}]
    for message in messages:
        send(writer, message)
    os.close(writer)
    with open(reader, "rb") as stream:
        data = stream.read()
    for cut in (1, 3, 7, len(data)):
        frames = Frames()
        assert [m for at in range(0, len(data), cut) for m in frames.feed(data[at : at + cut])] == messages
    too_long = b"\xc6" + (FRAME_BYTES_MAX + 1).to_bytes(4, "big") + bytes(FRAME_BYTES_MAX)
    for wrong in too_long, b"\xc1", b"\x07", b"\x80\xc1":
        with pytest.raises(ProtocolError):
            Frames().feed(wrong)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--hosts", "a:1", "-n", "2", "x.py"], "either -n RANKS, for this host, or --hosts"),
        (["x.py"], "either -n RANKS, for this host, or --hosts"),
        (["-n", "2", "--env", "HOME", "x.py"], "--env goes with --hosts"),
        (["--hosts", "a:1,b", "x.py"], "'b' is not HOST:RANKS"),
        (["--hosts", "a:10000000", "x.py"], "a host has at most 999999 ranks, not 10000000"),
    ],
)
def test_impossible_options_are_refused(arguments, complaint):
    run = CliRunner().invoke(cli.main, ["launch", *arguments])
    assert run.exit_code == 2
    assert complaint in " ".join(run.output.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "program", "complaint"),
    [
        (
            {"nowhere": 1, "b": 1},
            "ignores_signals.py",
            "host nowhere: ssh cannot run a program there: .*resolve.*BatchMode=yes now",
        ),
        (
            {"bare": 1},
            "ignores_signals.py",
            r"host bare: it has no /.*python.*exec: not found; Python must be at the same path",
        ),
        ({"empty": 1}, "ignores_signals.py", r"host empty: .*cannot import asyncoll from .*No module named 'asyncoll'"),
        (
            {"old": 1},
            "ignores_signals.py",
            f"host old: it has asyncoll 0.0.9, and this host has {asyncoll.__version__}",
        ),
        ({"chatty": 1}, "ignores_signals.py", "host chatty: .*not begun with its greeting"),
        ({"a": 1, "b": 1}, "missing.py", "host [ab]: no such script: .*missing.py"),
        ({"outer": 1}, "ignores_signals.py", "host outer: cannot listen at 192.0.2.1"),
    ],
)
def test_a_host_that_cannot_start_its_ranks_is_an_error(names, program, complaint, hosts):
    with pytest.raises(UsageError, match=complaint):
        launch_here(names, [str(SCRIPTS / "launch" / program)])


@pytest.mark.slow
def test_what_ssh_says_of_a_failed_connection_is_told_once(hosts):
    with start("--hosts", "nowhere:1", SCRIPTS / "launch/ignores_signals.py", env=hosts) as process:
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert err.lower().count("resolve") == 1, err


# How a job runs and ends.


PLACE = """
import contextlib, os, pathlib
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR DATA SECRET".split()
print(*(os.environ.get(name) for name in names), os.getcwd())
path = pathlib.Path(os.environ["ASYNCOLL_KEY_FILE"])
key = path.read_bytes()
seen = []
for process in pathlib.Path("/proc").glob("[0-9]*"):
    for name in ("cmdline", "environ"):
        with contextlib.suppress(OSError):  # it ends right now, or belongs to another user
            seen += [process] * (key in (process / name).read_bytes())
print(key.hex(), oct(path.stat().st_mode), oct(path.parent.stat().st_mode), seen)
"""


@pytest.mark.slow
def test_ranks_have_the_place_the_variables_and_the_key_of_their_job(hosts, tmp_path):
    (tmp_path / "place.py").write_text(PLACE)
    env = {**hosts, "DATA": "here", "SECRET": "not for them"}
    run = launch("--hosts", "a:1,b:2", "--env", "DATA", "--log-dir", "logs", "place.py", env=env, cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    logs = [(tmp_path / "logs" / f"rank-{rank}.out").read_text() for rank in range(3)]
    assert sorted(run.stdout.splitlines()) == sorted(
        f"{rank}: {line}" for rank in range(3) for line in logs[rank].splitlines()
    )
    places = [line.splitlines()[0] for line in logs]
    assert places == [
        f"{rank} 3 {local} {ranks} {group} 127.0.0.1 here None {tmp_path}"
        for rank, (local, ranks, group) in enumerate([(0, 1, 0), (0, 2, 1), (1, 2, 1)])
    ]
    keys = {tuple(line.splitlines()[1].split(maxsplit=1)) for line in logs}
    assert [rights for _, rights in keys] == ["0o100600 0o40700 []"]  # one key, and no process shows it


@pytest.mark.slow
def test_a_failure_on_another_host_stops_the_job(hosts, tmp_path):
    file = tmp_path / "report.json"
    run = launch("--hosts", "a:1,b:2", "--json", file, SCRIPTS / "launch/ends_as_told.py", "raise", env=hosts)
    assert run.returncode == 1
    report = json.loads(file.read_text())
    assert (report["first"]["rank"], report["first"]["host"], report["first"]["kind"]) == (1, "b", "ValueError")
    ends = [(entry["host"], entry["exit_code"], entry["signal"]) for entry in report["ranks"]]
    begun = ("a", 143, "SIGTERM") if ends[0][1] else ("a", None, None)  # that host may be slow to start its rank
    assert ends == [begun, ("b", 1, None), ("b", 143, "SIGTERM")]
    assert run.stderr.startswith("rank 1 (host b) failed (exit code 1) after")
    assert "ValueError: rank one is unwell" in run.stderr
    assert run.stderr.endswith("\nranks 0, 2 were stopped because rank 1 failed\n")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["interrupt", "kill the launcher", "kill the agent", "kill the template"])
def test_nothing_is_left_on_any_host(how, hosts, tmp_path):
    program, report = SCRIPTS / "launch/starts_a_child_and_kills_it.py", tmp_path / "report.json"
    with start("--hosts", "a:1,b:1", "--json", report, program, tmp_path, env=hosts) as process:
        await_ready(process, 2)
        template = int((tmp_path / "template-1").read_text())
        agent = parent(template)
        victims = {"kill the launcher": process.pid, "kill the agent": agent, "kill the template": template}
        os.kill(victims.get(how, process.pid), signal.SIGKILL if how in victims else signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert len(pids(tmp_path)) == 4
    until(lambda: not any(map(runs, [template, agent, *pids(tmp_path)])))
    why = {
        "interrupt": "SIGINT: the ranks get 10 s",
        "kill the launcher": "",
        "kill the agent": "rank 1 was lost after .* s: host b: the connection to it ended",
        "kill the template": "rank 1 was lost after .* s: host b: the process that starts the ranks died",
    }[how]
    assert all(part in err for part in why.split(".*"))
    assert process.returncode == {"interrupt": 130, "kill the launcher": -signal.SIGKILL}.get(how, 1)
    assert report.exists() == (how != "kill the launcher")
    if how in ("kill the agent", "kill the template"):
        told = json.loads(report.read_text())
        assert (told["first"]["rank"], told["first"]["host"], told["first"]["kind"]) == (1, "b", "lost")
        assert told["ranks"][1]["exit_code"] is None


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
def test_a_job_goes_on_without_a_rank_and_without_a_host(hosts, tmp_path):
    with job(tmp_path, 4, 1, "--hosts", "a:2,b:2", env=hosts) as it:
        it.kill(0)
        it.hears(f"rank 0 (host a, pid {it.pid(0)}) was killed by SIGKILL ", "; the job goes on with 3 ranks")
        os.kill(parent(parent(it.pid(2))), signal.SIGKILL)  # the agent
        it.hears("ranks 2, 3 were lost after ", "; the job goes on with 1 rank")
        it.end(1)
        code, err, report = it.ended()
    assert (code, err, report["first"]) == (0, "", None)
    told = [(each["rank"], each["host"], each["kind"]) for each in report["deaths"]]
    assert told == [(0, "a", "signal"), (2, "b", "lost"), (3, "b", "lost")]


@pytest.mark.slow
def test_ranks_of_all_hosts_decide_in_the_store_of_the_launcher(hosts):
    run = launch("--hosts", "a:2,b:1", SCRIPTS / "launch/decides_on_an_epoch.py", env=hosts)
    assert (run.returncode, run.stderr) == (0, "")
    said = [line.partition(": ")[2] for line in run.stdout.splitlines()]
    assert (said.count("None True b''"), len(said), len(set(said))) == (3, 6, 2)


@pytest.mark.slow
def test_survivors_of_all_hosts_go_on(hosts):
    """The coordinator dies, and then the second rank of the other host."""
    run = launch("--hosts", "a:2,b:2", "--min-ranks", 2, SCRIPTS / "world/shrinks.py", "0", "3", env=hosts)
    assert (run.returncode, run.stdout.count("went on")) == (0, 2), run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("has_job", [False, True], ids=["before the job", "after it"])
def test_an_agent_that_does_not_understand_its_launcher_says_so_and_ends(has_job):
    command = [sys.executable, "-c", "from asyncoll.launch import host_agent; host_agent.main()"]
    environ = {**os.environ, "SSH_CONNECTION": "127.0.0.1 50000 127.0.0.1 22"}
    program = [str(SCRIPTS / "launch/starts_a_child_and_kills_it.py")]
    job = {"argv": program, "module": False, "folder": os.getcwd(), "size": 1, "key": b"", "environment": LIGHT}
    with subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ) as process:
        assert process.stdout.readline() == f"asyncoll agent {asyncoll.__version__}\n".encode()
        if has_job:
            send(process.stdin.fileno(), job)
            assert "ready" in str(Frames().feed(process.stdout.read(1 << 16)))
        os.write(process.stdin.fileno(), b"\xff" * 100)
        told = Frames().feed(process.stdout.read())
    assert (process.returncode, "what comes to it is not of a launcher" in str(told)) == (0, True), told


def test_a_first_host_that_others_do_not_reach_is_noticed():
    for addresses in (["127.0.0.1"] * 2, ["10.0.0.1", "10.0.0.2"], ["10.0.0.1", "127.0.1.1"], ["fe80::1%eth0", "::1"]):
        assert is_reachable(addresses[0], addresses)
    for address in ("127.0.1.1", "::1"):
        assert not is_reachable(address, [address, "10.0.0.2"])


@pytest.mark.slow
def test_a_host_that_does_not_answer_is_given_up_at_the_third_interrupt(hosts, tmp_path):
    with start("--hosts", "a:1,b:1", SCRIPTS / "launch/starts_a_child_and_kills_it.py", tmp_path, env=hosts) as process:
        await_ready(process, 2)
        template = int((tmp_path / "template-1").read_text())
        agent = parent(template)
        os.kill(agent, signal.SIGSTOP)
        for said in ("SIGINT: the ranks get 10 s", "killing the ranks", "killing the ranks"):
            process.send_signal(signal.SIGINT)
            while not process.stderr.readline().startswith(said):
                assert process.poll() is None
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    until(lambda: not any(map(runs, [template, agent, *pids(tmp_path)])))


@pytest.mark.parametrize("news", [{"started": 0, "pid": 7}, {"exited": 2, "code": 0}, {"output": -1, "data": b"x"}])
def test_news_of_a_rank_that_is_not_on_the_host_break_the_protocol(news):
    ours, its = socket.socketpair()
    with ours, its, selectors.DefaultSelector() as selector, open_output(2, None) as output:
        launcher = Launcher(Placement({"a": 1, "b": 1}), None, 1.0, None, output, ours, Sources(selector))
        with pytest.raises(ProtocolError, match="which is not on it"):
            launcher.hear("b", news)


# What is said of it.


def test_a_lost_host_is_the_root_cause_and_named_once():
    supervisor = Supervisor(5, 0.0, lambda signum, ranks: None)
    reset = "ConnectionResetError: of a connection of its own"
    supervisor.failed(Failure(0, 1, 1.0, traceback="Traceback", summary=reset))
    supervisor.lost([2, 3], "host b: the connection to it ended", 1.01)
    supervisor.tick(2.0)
    assert (supervisor.root, supervisor.running) == (supervisor.failures[2], {0, 1, 4})
    assert list(explain(supervisor, [[]] * 5, {}, {rank: "aabbc"[rank] for rank in range(5)})) == [
        "ranks 2, 3 were lost after 1.0 s: host b: the connection to it ended",
        f"rank 0 failed too: {reset}",
        "ranks 1, 4 were stopped because rank 2 was lost",
    ]


def test_stopped_ranks_are_named_with_their_hosts():
    said = tell_stopped([1], {0: 10, 1: 11}, 1.0, {0: "a", 1: "b"})
    assert said.startswith("rank 1 (host b, pid 11) is stopped and every other rank has ended")


def test_ranks_of_all_hosts_are_suspended_and_continued_with_the_launcher(hosts, tmp_path):
    check_suspends(tmp_path, "--hosts", "a:1,b:2", env=hosts)
