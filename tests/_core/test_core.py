"""The compiled core: which one is chosen and why, how it is built, and its lock between threads."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import threading
import warnings
import zipfile
import zlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from itertools import count
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from asyncoll import _core
from asyncoll.algorithms.dense.compiled import meetings_of
from asyncoll.algorithms.dense.rendezvous import RendezvousArea
from asyncoll.algorithms.dense.tuning import choose
from asyncoll.algorithms.rounds.block_layout import BlockLayout
from asyncoll.algorithms.rounds.compiled_rounds import rounds_of
from asyncoll.algorithms.rounds.operation import Opening, Operation
from asyncoll.algorithms.rounds.operation_registry import OperationRegistry
from asyncoll.algorithms.rounds.reduction import SLOTS, Reduction
from asyncoll.algorithms.rounds.round_cells import ENGINE_CELLS
from asyncoll.algorithms.rounds.round_record import Memory, RoundRecord
from asyncoll.errors import AsyncollError, UsageError
from asyncoll.runtime.event_kinds import What
from asyncoll.runtime.group import Group
from asyncoll.runtime.trace import Trace
from asyncoll.tensors.reductions import ReduceOp
from asyncoll.transport.control_block import control_block_bytes
from asyncoll.transport.lock_cells import MUTEX_BYTES
from asyncoll.transport.memory.arena import local_world
from asyncoll.transport.memory.mutex import RobustMutex
from tests.fuzz import core as fuzz_core
from tests.support.places import ROOT
from tests.support.processes import PATIENCE_S

PLATFORM = sysconfig.get_platform().replace("-", "_")
# Stands in for the C compiler: it writes its arguments into the file after -o, or fails.
COMPILER = """#!/bin/sh
[ -z "$BROKEN" ] || { echo "native.c:1: error" >&2; exit 1; }
for argument; do [ "$last" = -o ] && echo "$@" > "$argument"; last=$argument; done
"""
NOWHERE = "/nowhere/cc"


def load(file: Path, name: str):
    """The module in `file`, as a new one."""
    spec = spec_from_file_location(name, file)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BUILD = load(ROOT / "hatch_build.py", "hatch_build")
DECLARING = {name: import_module(f"asyncoll.{name.removesuffix('.py').replace('/', '.')}") for name in BUILD.DECLARING}

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
        [sys.executable, "-m", "asyncoll", *command],
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


def test_a_core_that_is_older_than_its_sources_is_not_used(checkout, monkeypatch):
    monkeypatch.delenv("ASYNCOLL_CORE", raising=False)
    with pytest.warns(RuntimeWarning, match=r"not used: it is older than native\.h; `make core` builds it again"):
        module = load(checkout / "__init__.py", "asyncoll._core")
    with pytest.warns(RuntimeWarning, match="not used"), pytest.raises(UsageError, match=r"older than native\.h"):
        module.load("c")


@needs_core
def test_a_core_that_was_built_from_other_declarations_is_not_used(checkout, monkeypatch):
    """A core of another checkout, or one that was built before a cell was added."""
    monkeypatch.delenv("ASYNCOLL_CORE", raising=False)
    os.utime(checkout / "native.abi3.so", (0, 3000))
    for name, module in DECLARING.items():
        file = checkout.parent / name
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(module.__file__, file)
    assert load(checkout / "__init__.py", "asyncoll._core").native is _core.native
    file.write_text(file.read_text() + "MORE = 1\n")
    obstacle = r"it was built from another algorithms/rounds/round_cells\.py; `make core` builds it again"
    with pytest.warns(RuntimeWarning, match=f"not used: {obstacle}"):
        module = load(checkout / "__init__.py", "asyncoll._core")
    with pytest.warns(RuntimeWarning, match="not used"), pytest.raises(UsageError, match=obstacle):
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
    declaring = [f"asyncoll/{name}" for name in BUILD.DECLARING]
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "asyncoll/__init__.py", *declaring):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
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


@pytest.mark.parametrize("changed", ["_core/native.h", "transport/lock_cells.py"])
def test_a_build_in_place_follows_the_sources(sources, monkeypatch, capsys, changed):
    build = load(sources / "hatch_build.py", "hatch_build_of_a_test").build_in_place
    build()
    core_of(sources).write_text("fresh")
    build()
    assert core_of(sources).read_text() == "fresh"
    now = core_of(sources).stat().st_mtime
    os.utime(sources / "asyncoll" / changed, (now, now + 1))
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


# -- what it is generated from --------------------------------------------------------------------


@needs_core
def test_the_core_was_built_from_these_declarations():
    texts = {name: Path(module.__file__).read_bytes() for name, module in DECLARING.items()}
    assert dict(_core.native.declarations) == {name: f"{zlib.crc32(text):08x}" for name, text in texts.items()}


def test_declarations_need_no_other_package():
    for name, module in DECLARING.items():
        imported = re.findall(r"^(?:from|import) (\S+)", Path(module.__file__).read_text(), re.MULTILINE)
        assert set(imported) <= {"__future__", "enum", "typing"}, name


def test_a_declaration_has_the_same_value_in_c(tmp_path):
    """Each function is compared at drawn arguments, and each constant, in a library of the header alone."""
    try:
        compiler = BUILD._compiler()
    except BUILD.BuildError:
        pytest.skip("there is no C compiler")
    functions = [
        each
        for module in DECLARING.values()
        for each in vars(module).values()
        if isinstance(each, FunctionType) and "asyncoll" in each.__module__
    ]
    source = '#include <stdbool.h>\n#include <stdint.h>\n#define EXPORTED __attribute__((visibility("default")))\n'
    source += "".join(
        f"static inline int64_t {name}(int64_t a, int64_t b) {{ return a {sign} b ? a : b; }}\n"
        for name, sign in (("least", "<"), ("larger", ">"))
    )
    source += re.sub("static inline", "EXPORTED", BUILD.declarations())
    (tmp_path / "declared.c").write_text(source)
    subprocess.run(
        [*compiler, "-shared", "-fPIC", "-Wall", "-Werror", "declared.c", "-o", "declared.so"], cwd=tmp_path, check=True
    )
    library = ctypes.CDLL(str(tmp_path / "declared.so"))
    draw = np.random.default_rng(1)
    assert functions
    for function in functions:
        in_c = getattr(library, function.__name__)
        in_c.restype = ctypes.c_bool if function.__annotations__["return"] == "bool" else ctypes.c_int64
        for most in [3, 70, 1 << 20] * 50:  # products of two fit into a cell
            drawn = [int(each) for each in draw.integers(1, most, function.__code__.co_argcount)]
            assert in_c(*map(ctypes.c_int64, drawn)) == function(*drawn), (function.__name__, drawn)
    enums = dict(re.findall(r"enum \{ (\w+) = (-?\d+) \};", source))
    assert enums["WITHDRAWN"] == "8"
    assert {f"WHAT_{each.name}": str(each.value) for each in What}.items() <= enums.items()
    assert enums["RANK_CELLS_LATE_NS"] == str(DECLARING["algorithms/rounds/round_cells.py"].COLUMN.late_ns)


@pytest.mark.parametrize("rule", ["x = 1\n    return x", "return [a]", "return -a", "return a < 1 < 2", "return a / 2"])
def test_a_rule_that_c_cannot_have_ends_the_build(rule, sources):
    file = sources / "asyncoll" / "transport" / "lock_cells.py"
    file.write_text(f"{file.read_text()}\n\ndef rule(a: int) -> int:\n    {rule}\n")
    build = load(sources / "hatch_build.py", "hatch_build_of_a_test")
    with pytest.raises(build.BuildError, match=r"in C"):
        build.compile_core(core_of(sources))
    assert not core_of(sources).exists()


# -- what it reads out of shared memory ------------------------------------------------------------


@needs_core
@pytest.mark.parametrize("seed", [1, 2])
def test_damaged_shared_memory_and_wrong_arguments_are_used_or_refused(seed):
    """AddressSanitizer looks at this test, too. `python -m tests.fuzz.core --inputs 1000000` tries more."""
    fuzz_core.fuzz(seed, 10_000)


@needs_core
def test_cells_that_change_meanwhile_are_used_or_refused():
    fuzz_core.fuzz(1, 4_000, writers=True)


# -- what it declines: before anything has changed -------------------------------------------------

SIZES = choose(2, {})
NO_KERNEL = 1 << 20


def kernel(dtype: str = "float32") -> int:
    return _core.native.find_kernel("sum", dtype)


@needs_core
def test_an_unknown_reduction_or_dtype_has_no_kernel():
    assert kernel() > 0
    assert [_core.native.find_kernel(*what) for what in (("median", "float32"), ("sum", "complex64"), ("", ""))] == [
        0
    ] * 3


@needs_core
@pytest.mark.parametrize("number", [-1, 0, NO_KERNEL])
def test_an_unknown_kernel_is_declined(number):
    native, x, index = _core.native, np.ones(16, np.float32), np.arange(16, dtype=np.int32)

    def try_all(area: RendezvousArea) -> None:
        meetings = meetings_of(area, native)
        calls = short_calls(meetings)
        for each in (
            lambda: native.reduce(number, x, [x], 1),
            lambda: native.reduce_to_all(number, [x], 1),
            lambda: native.reduce_from_peers(number, (os.getpid(),), (x.ctypes.data,), 0, x, 0, 64, index, 1),
            lambda: native.Pieces(area.control_block, 0, 1, 0, [x], x, 64, number, 1, True, 1),
            lambda: meetings.arrive(1, 5, x, 0, number, 1, True),
            lambda: meetings.look(1, SIZES.shown, 1, 1, number, 1),
            lambda: calls.learn("float32", ReduceOp.SUM, 64, object(), 5, 1, 64, number, 1),
        ):
            before = area.control_block.cells.tolist()
            with pytest.raises(ValueError, match=r"kernel|no reduction|no pieces|no kind"):
                each()
            assert area.control_block.cells.tolist() == before
        assert calls.allreduce(x, ReduceOp.SUM) is None, "Python makes the call"

    with local_world(1) as (arena,):
        try_all(RendezvousArea(arena, 1, 0, 7, SIZES))
    assert (x == 1).all()


def short_calls(meetings: Any) -> Any:
    """Those of a communicator that has none of the other parts: it can learn, and declines every call."""
    names = "general rest runner home held endpoint failures unused end note place_outside reported running_loop expiry"
    parts = dict.fromkeys([*names.split(), "may_raise"]) | {"array_type": np.ndarray, "unfinished": set(), "turns": {}}
    return _core.native.ShortCalls(meetings, (0, 0, 0), 1, 1, 64, own=[], blocks=[], **parts)


@needs_core
def test_bytes_that_are_no_elements_are_declined():
    with local_world(1) as (arena,):
        meetings = meetings_of(RendezvousArea(arena, 1, 0, 7, SIZES), _core.native)
        with pytest.raises(ValueError, match="no reduction of 6 bytes"):
            meetings.arrive(1, 5, np.zeros(6, np.uint8), 0, kernel(), 1, True)
        with pytest.raises(ValueError, match="no kind of short calls"):
            short_calls(meetings).learn("float32", ReduceOp.SUM, 6, object(), 5, 1, 6, kernel(), 1)
        del meetings


@contextlib.contextmanager
def arguments_of_rounds():
    """Valid arguments of `Rounds`, of a solo allreduce of four floats by two ranks."""
    operation = Operation("x", (("float32", 4),), ReduceOp.SUM, Opening.SOLO)
    with local_world(2, (None,)) as arenas:
        group = Group((0, 1), 0, 7)
        memory = Memory(arenas[0], OperationRegistry(arenas[0], 2, 0, 7), group)
        record = RoundRecord(memory, operation, BlockLayout.of(operation), lambda into, sources: None, Trace(0, 2))
        given = {"find_kernel": _core.native.find_kernel, "Rounds": dict}
        arguments = rounds_of(SimpleNamespace(**given), arenas[0], group, operation, BlockLayout.of(operation), record)
        image = memoryview(bytearray(MUTEX_BYTES + control_block_bytes(len(record.cells), 2)))
        RobustMutex.initialize(image[:MUTEX_BYTES])
        mutex = RobustMutex(image[:MUTEX_BYTES], 0, (0, 1))
        arguments["control_block"] = _core.native.ControlBlock(image, (1, 1, 1, 1), mutex, 0, AsyncollError, True)
        yield arguments
        arguments.clear()
        del record, memory


@needs_core
@pytest.mark.parametrize(
    "wrong",
    [
        {"ranks": 0},
        {"ranks": 3},
        {"history": -1},
        {"sync_every": -1},
        {"size": 3},
        {"rank": 2},
        {"cores": 0},
        {"parts": ((0, 16, NO_KERNEL),)},
        {"parts": ((0, 15, 1),)},
        {"parts": ((64, 16, 1),)},
    ],
)
def test_rounds_that_the_core_does_not_know_are_declined(wrong):
    with arguments_of_rounds() as arguments:
        assert _core.native.Rounds(**arguments) is not None
        before = arguments["control_block"].cells.tolist()
        with pytest.raises(ValueError, match=r"no rounds|has a kernel|number of cells"):
            _core.native.Rounds(**arguments | wrong)
        assert arguments["control_block"].cells.tolist() == before


@needs_core
@pytest.mark.parametrize("slots", [SLOTS[:-1], (*SLOTS, SLOTS[0]), (SLOTS[1], SLOTS[0], *SLOTS[2:])])
def test_a_reduction_with_other_fields_is_declined(slots):
    order, engine = ([0], set(), {}), memoryview(bytearray(8 * ENGINE_CELLS)).cast("q")
    with arguments_of_rounds() as arguments:
        rounds = _core.native.Rounds(**arguments)
        with pytest.raises(ValueError, match="cannot be over at once"):
            rounds.attach(Reduction, slots, (count(), *order), deque(), engine, 1, 64)
        assert rounds.at_once(np.ones(4, np.float32)) is None, "Python makes the call"
        rounds.attach(Reduction, SLOTS, (count(), *order), deque(), engine, 1, 64)
        del rounds


@needs_core
def test_elements_of_another_dtype_of_the_same_width_are_declined():
    """Their bits would be taken for numbers that they are not."""
    native, index, x = _core.native, np.arange(4, dtype=np.int32), np.ones(4, np.float32)
    bits, counts = x.view(np.int32), np.zeros(4, np.int64)
    assert native.sum_parts([index], [x], 0, 4, index.copy(), x.copy()) == 4
    tries = [
        lambda: native.sum_parts([index], [bits], 0, 4, index.copy(), x.copy()),
        lambda: native.sum_parts([x], [x], 0, 4, index.copy(), x.copy()),
        lambda: native.sum_parts([index.view(np.uint32)], [x], 0, 4, index.copy(), x.copy()),
        lambda: native.common(index, x, index.copy()),
        lambda: native.select(x, 1, index.copy(), bits.copy()),
        lambda: native.select(bits, 1, index.copy(), x.copy()),
        lambda: native.keep_largest(index.copy(), x.copy(), 2),
        lambda: native.count_magnitudes(x, 0, 3, counts),
        lambda: native.count_magnitudes(bits, 0, 3, counts.view(np.float64)),
    ]
    for each in tries:
        with pytest.raises(ValueError, match=r"belong together|widths"):
            each()
    assert not counts.any()


@needs_core
@pytest.mark.parametrize(("number", "address", "divisor"), [(-1, 0, 1), (1, -8, 1), (1, 0, 0)])
def test_a_meeting_refuses_wrong_numbers(number, address, divisor):
    with local_world(1) as (arena,):
        meetings = meetings_of(RendezvousArea(arena, 1, 0, 7, choose(2, {})), _core.native)
        with pytest.raises(ValueError, match=r"negative|positive"):
            meetings.arrive(number, 5, None, address, 0, divisor, True)
        del meetings


# -- what callers await -----------------------------------------------------------------------------


@needs_core
@pytest.mark.parametrize("kind", ["Answer", "ShortCall"])
def test_a_result_is_handed_over_without_a_stop_iteration(kind):
    """Python 3.11 does not inherit this slot of a base class, and makes an exception for each result without it."""
    slot_of = ctypes.pythonapi.PyType_GetSlot
    slot_of.restype, slot_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_int)
    am_send = 81
    assert slot_of(getattr(_core.native, kind), am_send)


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

    def release_later() -> None:
        assert Interrupted.waits.wait(PATIENCE_S)
        other.release()

    def hold() -> Future[None]:
        other.acquire()
        return releasing.submit(release_later)

    with ThreadPoolExecutor(1) as releasing:  # a mutex is released by the thread that has acquired it
        released = releasing.submit(hold).result(PATIENCE_S)
        with pytest.raises(KeyboardInterrupt), block:
            pytest.fail("the handler has raised before the critical section")
        released.result(PATIENCE_S)
    other.acquire()  # it is free, and nothing is lost
    other.release()
