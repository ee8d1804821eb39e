"""The compiled core: which one is chosen and why, how it is built, and its lock between threads."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import threading
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from conftest import PATIENCE_S
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from asyncoll import _core
from asyncoll.algorithms.dense.compiled import meetings_of
from asyncoll.algorithms.dense.rendezvous import RendezvousArea
from asyncoll.algorithms.dense.tuning import choose
from asyncoll.errors import AsyncollError, UsageError
from asyncoll.testing import fuzz_core
from asyncoll.transport.control_block import control_block_bytes
from asyncoll.transport.memory.arena import local_world
from asyncoll.transport.memory.mutex import MUTEX_BYTES, RobustMutex

ROOT = Path(__file__).parent.parent
PLATFORM = sysconfig.get_platform().replace("-", "_")
# Stands in for the C compiler: it writes its arguments into the file after -o, or fails.
COMPILER = """#!/bin/sh
[ -z "$BROKEN" ] || { echo "native.c:1: error" >&2; exit 1; }
for argument; do [ "$last" = -o ] && echo "$@" > "$argument"; last=$argument; done
"""
NOWHERE = "/nowhere/cc"

needs_core = pytest.mark.skipif(_core.native is None, reason="the compiled core is not there")

# -- which core ---------------------------------------------------------------------------------


def test_the_environment_chooses_the_core():
    assert _core.load("python") == (None, "ASYNCOLL_CORE=python")
    native, reason = _core.load("")
    if native is None:
        assert "this installation has none" in reason
        with pytest.raises(UsageError, match=r"ASYNCOLL_CORE=c, and the compiled core cannot be used: this installat"):
            _core.load("c")
    else:
        assert (native.__name__, reason) == ("asyncoll._core.native", "it has been built")
        assert _core.load("c") == (native, "ASYNCOLL_CORE=c")
    with pytest.raises(UsageError, match="ASYNCOLL_CORE=rust: set it to c or to python"):
        _core.load("rust")


def test_a_rank_that_is_forked_may_do_without_the_core_of_its_parent(monkeypatch):
    assert _core.of_rank() is _core.native
    monkeypatch.setenv("ASYNCOLL_CORE", "python")
    assert _core.of_rank() is None


@pytest.mark.slow
@pytest.mark.parametrize("command", [["doctor"], ["launch", "-n", "2", "no_such_program.py"], ["laws", "--seed", "1"]])
def test_commands_report_a_wrong_core_without_a_traceback(command):
    done = subprocess.run(
        [sys.executable, "-m", "asyncoll.cli", *command],
        env={**os.environ, "ASYNCOLL_CORE": "rust"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 2
    assert "Error: ASYNCOLL_CORE=rust: set it to c or to python, or not at all" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def checkout(tmp_path):
    """The folder of the core in a checkout in which the core is older than a source."""
    folder = tmp_path / "asyncoll" / "_core"
    folder.mkdir(parents=True)
    for name, changed_s in (("native.c", 980), ("native.h", 2000), ("native.abi3.so", 990)):
        (folder / name).write_text("")
        os.utime(folder / name, (0, changed_s))
    shutil.copy(_core.__file__, folder)
    return folder


def load(file: Path, name: str):
    """The module in `file`, as a new one."""
    spec = spec_from_file_location(name, file)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_core_that_is_older_than_its_sources_is_not_used(checkout, monkeypatch):
    monkeypatch.delenv("ASYNCOLL_CORE", raising=False)
    with pytest.warns(RuntimeWarning, match=r"not used: it is older than native\.h; `make core` builds it again"):
        module = load(checkout / "__init__.py", "asyncoll._core")
    with pytest.warns(RuntimeWarning, match="not used"), pytest.raises(UsageError, match=r"older than native\.h"):
        module.load("c")


@pytest.mark.parametrize("environment", [{"RANK": "1"}, {"RANK": "0", "ASYNCOLL_FOLDER": "/x"}, {}, {"RANK": "0"}])
def test_one_process_of_a_job_warns_of_a_core_that_is_not_used(checkout, environment, monkeypatch):
    """The launcher, which has neither variable; or rank 0 of another launcher. At the line that imports the package."""
    for name in ("ASYNCOLL_CORE", "RANK", "ASYNCOLL_FOLDER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = load(checkout / "__init__.py", "asyncoll._core")
    is_first = environment in ({}, {"RANK": "0"})
    assert [each.filename for each in caught] == [__file__] * is_first
    assert module.native is None
    assert "older" in module.reason


# -- how it is built ------------------------------------------------------------------------------


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A copy of what a build needs. The compiler is a script, and the headers of Python need not exist."""
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "asyncoll/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".gitignore").write_text("*.abi3.so\n")
    shutil.copytree(ROOT / "asyncoll" / "_core", tmp_path / "asyncoll" / "_core", ignore=shutil.ignore_patterns("*.so"))
    compiler = tmp_path / "cc"
    compiler.write_text(COMPILER)
    compiler.chmod(stat.S_IRWXU)
    for name in ("CFLAGS", "LDFLAGS", "BROKEN", "ASYNCOLL_BUILD_CORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CC", str(compiler))
    header = tmp_path / "include" / "Python.h"
    header.parent.mkdir()
    header.touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(header.parent))
    return tmp_path


def wheel(sources: Path) -> tuple[str, set[str]]:
    """The tag of a new wheel, and the files of the core in it."""
    (path,) = WheelBuilder(str(sources)).build(directory=str(sources / "dist"), versions=["standard"])
    with zipfile.ZipFile(path) as archive:
        files = {Path(name).name for name in archive.namelist() if "/_core/" in name}
    return Path(path).stem.removeprefix("asyncoll-0.1.0-"), files


def core_of(sources: Path) -> Path:
    return sources / "asyncoll" / "_core" / "native.abi3.so"


def test_a_wheel_with_the_core_is_for_this_architecture_and_all_versions_of_python(sources):
    core_of(sources).write_text("that of the checkout")
    assert wheel(sources) == (f"cp311-abi3-{PLATFORM}", {"__init__.py", "native.pyi", "native.abi3.so"})
    assert core_of(sources).read_text() == "that of the checkout"


@pytest.mark.parametrize("obstacle", ["no compiler", "no headers", "broken", "refused"])
def test_a_wheel_without_the_core_is_for_every_platform(sources, obstacle, monkeypatch, capfd):
    core_of(sources).write_text("that of the checkout")
    if obstacle == "no compiler":
        monkeypatch.setenv("CC", NOWHERE)
    elif obstacle == "no headers":
        (sources / "include" / "Python.h").unlink()
    else:
        monkeypatch.setenv(*(("BROKEN", "1") if obstacle == "broken" else ("ASYNCOLL_BUILD_CORE", "0")))
    assert wheel(sources) == ("py3-none-any", {"__init__.py", "native.pyi"})
    warned = capfd.readouterr().err.count("no compiled core, so asyncoll runs in pure Python")
    assert warned == (obstacle != "refused")
    monkeypatch.setenv("ASYNCOLL_BUILD_CORE", "1")
    if obstacle != "refused":
        with pytest.raises(SystemExit):
            wheel(sources)
        assert "ASYNCOLL_BUILD_CORE=1, and the compiled core cannot be built: the" in capfd.readouterr().err


def test_an_editable_installation_has_its_core_in_place(sources, monkeypatch):
    def install() -> None:
        builder = WheelBuilder(str(sources))
        (hook,) = builder.get_build_hooks(str(sources / "dist")).values()
        hook.initialize("editable", builder.get_default_build_data())
        hook.finalize("editable", {}, "")

    install()
    assert "-Wall -Wextra" in core_of(sources).read_text()
    monkeypatch.setenv("CC", NOWHERE)
    install()
    assert not core_of(sources).exists(), "an old one"


def test_the_source_distribution_builds_the_core(sources):
    (path,) = SdistBuilder(str(sources)).build(directory=str(sources / "dist"), versions=["standard"])
    shutil.unpack_archive(path, sources / "unpacked", filter="data")
    assert wheel(sources / "unpacked" / "asyncoll-0.1.0")[0] == f"cp311-abi3-{PLATFORM}"


def test_a_build_in_place_follows_the_sources(sources, monkeypatch, capsys):
    build = load(sources / "hatch_build.py", "hatch_build_of_a_test").build_in_place
    build()
    core_of(sources).write_text("fresh")
    build()
    assert core_of(sources).read_text() == "fresh"
    now = core_of(sources).stat().st_mtime
    os.utime(sources / "asyncoll" / "_core" / "native.h", (now, now + 1))
    monkeypatch.setenv("BROKEN", "1")
    with pytest.raises(SystemExit, match="the C compiler has failed"):
        build()
    assert not core_of(sources).exists()
    monkeypatch.delenv("BROKEN")
    build()
    assert "native.c" in core_of(sources).read_text()
    monkeypatch.setenv("ASYNCOLL_BUILD_CORE", "0")
    build()
    assert not core_of(sources).exists()
    monkeypatch.delenv("ASYNCOLL_BUILD_CORE")
    monkeypatch.setenv("CC", NOWHERE)
    build()
    assert not core_of(sources).exists()
    assert capsys.readouterr().err.count("no compiled core, so asyncoll runs in pure Python") == 1


@pytest.mark.parametrize("value", ["yes", "2"])
def test_a_wrong_setting_of_the_build_is_an_error(sources, value, monkeypatch):
    monkeypatch.setenv("ASYNCOLL_BUILD_CORE", value)
    with pytest.raises(SystemExit, match=f"ASYNCOLL_BUILD_CORE={value}: set it to 0 or to 1"):
        wheel(sources)


# -- what it reads out of shared memory ------------------------------------------------------------


@needs_core
@pytest.mark.parametrize("seed", [1, 2])
def test_damaged_shared_memory_and_wrong_arguments_are_used_or_refused(seed):
    """AddressSanitizer looks at this test, too. `python -m asyncoll.testing.fuzz_core --inputs 1000000` tries more."""
    fuzz_core.fuzz(seed, 10_000)


@needs_core
def test_cells_that_change_meanwhile_are_used_or_refused():
    fuzz_core.fuzz(1, 4_000, writers=True)


@needs_core
@pytest.mark.parametrize(("number", "address", "divisor"), [(-1, 0, 1), (1, -8, 1), (1, 0, 0)])
def test_a_meeting_refuses_wrong_numbers(number, address, divisor):
    with local_world(1) as (arena,):
        meetings = meetings_of(RendezvousArea(arena, 1, 0, 7, choose(2, {})), _core.native)
        with pytest.raises(ValueError, match=r"negative|positive"):
            meetings.arrive(number, 5, None, address, 0, divisor, True)
        del meetings


# -- its lock -------------------------------------------------------------------------------------


def test_threads_that_wait_for_a_lock_let_its_owner_run():
    """Two threads of each of three ranks, with and without the core; one owns the lock when the others want it.

    ThreadSanitizer looks at this test, too.
    """
    rounds = 50
    with local_world(3, (_core.native, None)) as arenas:
        blocks = [arena.control_block(7, 1) for arena in arenas] * 2
        meeting = threading.Barrier(len(blocks))

        def own(block):
            for _ in range(rounds):
                with block:
                    before = block.cells[0]
                    meeting.wait()
                    block.cells[0] = before + 1
                meeting.wait()

        def follow(block):
            for _ in range(rounds):
                meeting.wait()
                with block:
                    block.cells[0] += 1
                meeting.wait()

        with ThreadPoolExecutor(len(blocks)) as pool:
            done = [pool.submit(role, block) for role, block in zip([own, *[follow] * 5], blocks, strict=True)]
        assert [each.exception() for each in done] == [None] * len(blocks)
        assert blocks[0].cells[0] == rounds * len(blocks)
        blocks.clear()


class Interrupted(RobustMutex):
    """A signal handler raises in a thread that has waited for the lock, just after that has acquired it."""

    waits = threading.Event()

    def resume(self, failure: int) -> None:
        self.waits.set()
        super().resume(failure)
        raise KeyboardInterrupt


@needs_core
def test_a_signal_handler_that_raises_after_a_wait_for_the_lock_loses_no_rank():
    memory = memoryview(bytearray(MUTEX_BYTES + control_block_bytes(4, 1)))
    RobustMutex.initialize(memory[:MUTEX_BYTES])
    mutex, other = (kind(memory[:MUTEX_BYTES], 0, (5,)) for kind in (Interrupted, RobustMutex))
    block = _core.native.ControlBlock(memory, (), mutex, 0, AsyncollError, True)
    is_held = threading.Event()

    def hold() -> None:
        with other:
            is_held.set()
            assert Interrupted.waits.wait(PATIENCE_S)

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(hold)
        assert is_held.wait(PATIENCE_S)
        with pytest.raises(KeyboardInterrupt), block:
            pytest.fail("the handler has raised before the critical section")
        holding.result()
    with other:  # it is free, and nothing is lost
        pass
