"""`asyncoll doctor`: its findings on this host, and its warnings."""

from __future__ import annotations

import json
import os
import pty
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
from click.testing import CliRunner

from asyncoll import _core
from asyncoll.cli import main
from asyncoll.doctor import WORLD, Findings, cpu_quota, examine, memory_limit
from asyncoll.transport.keys import write_key
from asyncoll.world.network import addresses
from tests.support.processes import PATIENCE_S


@pytest.fixture(autouse=True)
def _no_world(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*WORLD, "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "ASYNCOLL_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "198.51.100.7")


def test_text_and_json_have_the_same_findings() -> None:
    findings = json.loads(CliRunner().invoke(main, ["doctor", "--json"], catch_exceptions=False).output)
    text = CliRunner().invoke(main, ["doctor"], catch_exceptions=False).output
    assert findings["sections"]["versions"]["numpy"] == numpy.__version__
    for name, value in findings["sections"]["versions"].items():
        assert any(line.split(None, 1) == [name, value] for line in text.splitlines())
    assert "a world of one" in text
    assert findings["warnings"] == []


def test_thread_choices_equal_those_of_the_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    choices = examine(Findings()).sections["choices"]
    assert choices["socket folder"] == "/tmp"
    assert choices["threads per rank"] == "OMP_NUM_THREADS=3 OPENBLAS_NUM_THREADS=3"


def test_the_core_is_named_with_the_reason() -> None:
    shown = examine(Findings()).sections["choices"]["core"]
    if _core.native is None:
        assert shown == f"pure Python: {_core.reason}"
    else:
        assert shown == f"compiled ({_core.native.__file__}): {_core.reason}"
    assert shown in CliRunner().invoke(main, ["doctor"], catch_exceptions=False).output


def test_socket_folder_has_a_short_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    assert examine(Findings()).sections["choices"]["socket folder"] != str(long)


def test_address_leads_to_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert examine(Findings()).sections["choices"]["tcp address"] == "127.0.0.1 (interface lo)"
    monkeypatch.setenv("ASYNCOLL_INTERFACE", "none7")
    found = examine(Findings()).sections
    assert "ASYNCOLL_INTERFACE=none7: this host" in found["choices"]["tcp address"]
    assert "127.0.0.1" in found["interfaces"]["lo"]


@pytest.mark.parametrize(
    ("world", "warning"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set alone"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is not a rank of WORLD_SIZE=2"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK=one is not a rank"),
        ({"ASYNCOLL_FOLDER": "/nowhere"}, "not the folder of a running job"),
    ],
)
def test_warnings_on_incomplete_or_impossible_worlds(
    world: dict[str, str], warning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    findings = examine(Findings())
    assert findings.sections["world"] == world
    assert [warning in text for text in findings.warnings] == [True]


def test_warning_on_a_host_name_of_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    assert "127.0.1.1" in " ".join(examine(Findings()).warnings)


def test_warning_on_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (128, 256))
    findings = examine(Findings())
    assert findings.sections["host"]["open files"] == "128 at once, which a rank may raise to 256"
    assert "only 256 files may be open at once (ulimit -Hn): too few for worlds of more than 11 ranks" in " ".join(
        findings.warnings
    )


def test_warning_on_too_few_open_files_for_any_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 64))
    assert "(ulimit -Hn): too few for any world of several ranks" in " ".join(examine(Findings()).warnings)


def test_no_warning_on_a_low_soft_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    assert "files" not in " ".join(examine(Findings()).warnings)


def test_warning_on_processes_of_an_unknown_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert "SLURM_PROCID=1" in " ".join(examine(Findings()).warnings)


def test_limits_of_control_groups_version_2(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text("1024\n")
    assert cpu_quota(tmp_path) == 1.5
    assert memory_limit(2048, tmp_path) == 1024
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert cpu_quota(tmp_path) is None
    assert memory_limit(2048, tmp_path) is None


def test_limits_of_control_groups_version_1(tmp_path: Path) -> None:
    os.mkdir(tmp_path / "cpu")
    os.mkdir(tmp_path / "memory")
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("50000\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert cpu_quota(tmp_path) == 0.5
    assert memory_limit(2048, tmp_path) is None
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    assert cpu_quota(tmp_path) is None
    assert cpu_quota(tmp_path / "nowhere") is None


# The verdict.


@pytest.fixture
def key(tmp_path: Path) -> str:
    write_key(tmp_path / "key")
    return str(tmp_path / "key")


def verdict(*arguments: str, code: int = 0) -> str:
    told = CliRunner().invoke(main, ["doctor", *arguments], catch_exceptions=False)
    assert told.exit_code == code
    return told.output.splitlines()[-1]


def test_the_last_line_says_which_jobs_can_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ASYNCOLL_INTERFACE", outer_interface())
    assert verdict() == "one host: yes; several hosts: no, no key"
    assert verdict("--key-file", key) == "one host: yes; several hosts: yes"
    monkeypatch.setenv("ASYNCOLL_KEY_FILE", key)
    assert verdict() == "one host: yes; several hosts: yes"


def outer_interface() -> str:
    """One with an address that other hosts might reach."""
    names = [name for name, its in addresses() if its and name != "lo"]
    if not names:
        pytest.skip("this host has no interface but loopback")
    return names[0]


@pytest.mark.parametrize(
    ("variables", "obstacle", "warning"),
    [
        ({"ASYNCOLL_FREZE_S": "1"}, "wrong settings", "did you mean ASYNCOLL_FREEZE_S?"),
        ({"ASYNCOLL_TRANSPORT": "foo"}, "wrong settings", "ASYNCOLL_TRANSPORT='foo' in the environment: use one of"),
        ({"ASYNCOLL_SIZES": "a"}, "wrong settings", "ASYNCOLL_SIZES: 'a' is not NAME=NUMBER"),
    ],
)
def test_exit_code_1_if_no_job_of_this_host_can_run(
    variables: dict[str, str], obstacle: str, warning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    told = CliRunner().invoke(main, ["doctor"], catch_exceptions=False)
    assert told.exit_code == 1
    assert f"one host: no, {obstacle}; several hosts: no, {obstacle}" in told.output.splitlines()[-1]
    assert warning in told.output
    findings = CliRunner().invoke(main, ["doctor", "--json"], catch_exceptions=False)
    assert (findings.exit_code, json.loads(findings.output)["obstacles"]["one host"]) == (1, [obstacle])


@pytest.mark.parametrize(
    ("variables", "obstacle", "warning"),
    [
        ({"ASYNCOLL_INTERFACE": "none7"}, "no address", "ASYNCOLL_INTERFACE=none7: this host"),
        ({"MASTER_ADDR": "127.0.0.1"}, "no address", "ranks would listen at 127.0.0.1"),
        ({"ASYNCOLL_KEY_FILE": "/none"}, "no usable key", "cannot read the key /none"),
        ({"ASYNCOLL_KEY_FILE": __file__}, "no usable key", ""),
    ],
)
def test_what_several_hosts_lack_is_a_warning(
    variables: dict[str, str], obstacle: str, warning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    findings = examine(Findings())
    assert obstacle in findings.obstacles["several hosts"]
    assert findings.obstacles["one host"] == []
    assert warning in " ".join(findings.warnings)


def test_a_key_whose_bytes_are_the_same_is_none(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_bytes(bytes(32))
    told = CliRunner().invoke(main, ["doctor", "--key-file", str(file)], catch_exceptions=False).output
    assert f"{file} is no key: all its bytes are the same; make one with `asyncoll key FILE`" in told
    assert "no usable key" in told.splitlines()[-1]


def test_the_variables_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    told = CliRunner().invoke(main, ["doctor", "--key-file", key], catch_exceptions=False).output
    assert "none in the environment: a world of one" in told
    assert "ASYNCOLL_KEY_FILE" not in told
    monkeypatch.setenv("ASYNCOLL_FREEZE_S", "abc")
    findings = json.loads(CliRunner().invoke(main, ["doctor", "--json"], catch_exceptions=False).output)
    assert findings["sections"]["world"] == {"ASYNCOLL_FREEZE_S": "abc"}


def test_colours_on_a_terminal_unless_they_are_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(no_color: str) -> bytes:
        monkeypatch.setenv("NO_COLOR", no_color)
        ours, terminal = pty.openpty()
        with open(ours, "rb", buffering=0) as screen, open(terminal, "wb") as output:
            subprocess.run([sys.executable, "-m", "asyncoll", "doctor"], stdout=output, timeout=PATIENCE_S, check=True)
            return screen.read(1 << 16)

    assert shown("").startswith(b"\x1b[1mversions\x1b[0m")
    assert b"\x1b" not in shown("1")


def test_an_interrupt_prints_what_has_been_found(tmp_path: Path) -> None:
    """The look-up of the name of the host takes a minute."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_NAMES)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "asyncoll", "doctor"]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "the name of this host, or its GPUs, are still looked up\n"
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert time.monotonic() - begun < 10  # within a second on a host with free processors
    assert (process.returncode, err) == (130, "")
    assert out.startswith("versions\n")
    assert "\none host: yes; several hosts: " in out


SLOW_NAMES = """
import socket, threading

def slow(name):
    threading.Event().wait(60)

socket.gethostbyname = slow
"""
