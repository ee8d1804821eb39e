"""Builds the compiled core (asyncoll/_core) with the C compiler of this machine; without one, asyncoll is pure Python.

The cells in shared memory, the arithmetic on them, and the kinds of events are declared in Python (DECLARING). The
header `declared.h`, which is written before the core is compiled, has them for C.

`ASYNCOLL_BUILD_CORE=0` builds none, and `=1` makes a failure an error. `CC`, `CFLAGS` and `LDFLAGS` are respected.

Run as a program, this builds the core in place, if a source file is newer: `make` does so before everything else.
"""

from __future__ import annotations

import ast
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "ASYNCOLL_BUILD_CORE"
FOLDER = Path(__file__).parent / "asyncoll" / "_core"
TARGET = FOLDER / "native.abi3.so"
# The modules of the package that declare what C repeats. They import nothing but the standard library.
DECLARING = (
    "transport/lock_cells.py",
    "runtime/event_kinds.py",
    "algorithms/dense/meeting_cells.py",
    "algorithms/rounds/round_cells.py",
)
# -fwrapv: peers may have written any numbers into the cells that the core counts in.
FLAGS = ("-std=gnu11", "-O3", "-fwrapv", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-shared", "-pthread")
PURE = "asyncoll runs in pure Python, which is slower and gives the same results"


class BuildError(Exception):
    """The core cannot be built. `compiled` tells whether a compiler has tried, and printed why it failed."""

    def __init__(self, message: str, *, compiled: bool = False) -> None:
        super().__init__(message)
        self.compiled = compiled


def is_wanted() -> bool:
    """Whether the environment wants a core."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise SystemExit(f"{VARIABLE}={value}: set it to 0 or to 1, or not at all")
    return value != "0"


def is_demanded() -> bool:
    """Whether the environment wants an error if there is no core."""
    return os.environ.get(VARIABLE) == "1"


def compile_core(target: Path) -> None:
    """Compile all C files into the module `target`. If that raises BuildError, `target` does not exist."""
    target.unlink(missing_ok=True)
    _check_python()
    new = target.with_suffix(".new")  # another process must not load half of a file
    (target.parent / "declared.h").write_text(declarations())
    sources = sorted(map(str, FOLDER.glob("*.c")))
    flags = [*FLAGS, f"-I{target.parent}", f"-I{_headers()}", *shlex.split(os.environ.get("CFLAGS", ""))]
    command = [*_compiler(), *flags, *sources, *shlex.split(os.environ.get("LDFLAGS", "")), "-o", str(new)]
    if subprocess.run(command, check=False).returncode:
        raise BuildError(f"the C compiler has failed, see above ({shlex.join(command)})", compiled=True)
    new.replace(target)


def _compiler() -> list[str]:
    """The command of the compiler: `CC`, or the one that has built Python, or cc."""
    candidates = [os.environ["CC"]] if os.environ.get("CC") else [sysconfig.get_config_var("CC") or "cc", "cc"]
    for command in map(shlex.split, candidates):
        if shutil.which(command[0]):
            return command
    raise BuildError(
        f"there is no C compiler ({' or '.join(candidates)}): install one, such as Debian's gcc and libc6-dev"
    )


def _check_python() -> None:
    if sys.platform != "linux":
        raise BuildError("only on Linux do ranks share memory")
    if platform.python_implementation() != "CPython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise BuildError("the core needs CPython with a GIL")


def _headers() -> str:
    """The folder of Python.h."""
    folder = sysconfig.get_path("include")
    if not os.path.exists(os.path.join(folder, "Python.h")):
        raise BuildError(f"there is no {folder}/Python.h: install the headers of Python, such as Debian's python3-dev")
    return folder


# -- the header ---------------------------------------------------------------------------------


def declarations() -> str:
    """The header of C: the constants, cells and functions of DECLARING, under the same names.

    A class of named cells gives a constant for each: `Head.latest` is HEAD_LATEST. So does one of numbers from 0 on.
    DECLARATIONS tells from which text of each module they are: `asyncoll._core` compares that when it loads the core.
    """
    sources = {name: (FOLDER.parent / name).read_bytes() for name in DECLARING}
    versions = ", ".join(f'{{"{name}", "{zlib.crc32(source):08x}"}}' for name, source in sources.items())
    lines = ["/* Written by hatch_build.py. clang-format off */", f"#define DECLARATIONS {versions}"]
    for name, source in sources.items():
        lines += ["", f"/* asyncoll/{name} */", *_constants(FOLDER.parent / name)]
        lines += [_function(node) for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return "\n".join(lines) + "\n"


def _constants(module: Path) -> Iterator[str]:
    for name, value in runpy.run_path(str(module)).items():
        if name.isupper() and type(value) is int:
            yield f"enum {{ {name} = {value} }};"
        named = getattr(value, "_fields", getattr(value, "__members__", ())) if isinstance(value, type) else ()
        for index, field in enumerate(named):
            yield f"enum {{ {'_'.join(re.findall('[A-Z][a-z]*', name)).upper()}_{field.upper()} = {index} }};"


def _function(node: ast.FunctionDef) -> str:
    parameters = ", ".join(f"int64_t {parameter.arg}" for parameter in node.args.args)
    kind = "bool" if isinstance(node.returns, ast.Name) and node.returns.id == "bool" else "int64_t"
    match node.body:
        case [ast.Return(ast.expr() as result)] | [ast.Expr(), ast.Return(ast.expr() as result)]:
            pass
        case _:
            raise BuildError(f"{node.name} is not one expression, so it cannot be written in C")
    return f"static inline {kind} {node.name}({parameters}) {{ return {_expression(result)}; }}"


_OPERATORS = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "/",
    ast.Mod: "%",
    ast.LShift: "<<",
    ast.BitOr: "|",
    ast.And: "&&",
    ast.Or: "||",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}


def _expression(node: ast.expr) -> str:
    """In C, where a quotient is rounded down like that of Python, because the operands are not negative."""
    match node:
        case ast.Constant(value=int(value)):
            return f"INT64_C({value})"
        case ast.Name(id=name):
            return name
        case ast.BoolOp(op, operands):
            return f"({f' {_OPERATORS[type(op)]} '.join(map(_expression, operands))})"
        case ast.BinOp(left, op, right) | ast.Compare(left, [op], [right]) if type(op) in _OPERATORS:
            return f"({_expression(left)} {_OPERATORS[type(op)]} {_expression(right)})"
        case ast.UnaryOp(ast.Not(), operand):
            return f"(!{_expression(operand)})"
        case ast.IfExp(test, body, orelse):
            return f"({_expression(test)} ? {_expression(body)} : {_expression(orelse)})"
        case ast.Call(ast.Name(id=name), arguments):
            called = {"min": "least", "max": "larger"}.get(name, name)
            return f"{called}({', '.join(map(_expression, arguments))})"
    raise BuildError(f"{ast.unparse(node)} cannot be written in C")


class CoreBuildHook(BuildHookInterface[Any]):
    """Adds the compiled core to a wheel, or to the folder of an editable installation."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wanted = is_wanted()
        self._folder = tempfile.TemporaryDirectory(prefix="asyncoll-core-")
        # The core in a checkout's folder belongs to that checkout, so a wheel gets one that is built elsewhere.
        target = TARGET if version == "editable" else Path(self._folder.name) / TARGET.name
        if not wanted:
            target.unlink(missing_ok=True)
            return
        try:
            compile_core(target)
        except BuildError as error:
            if is_demanded():
                self._folder.cleanup()
                self.app.abort(f"{VARIABLE}=1, and the compiled core cannot be built: {error}")
            self.app.display_warning(f"no compiled core, so {PURE}: {error}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        if target != TARGET:
            build_data["force_include"][str(target)] = str(TARGET.relative_to(self.root))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._folder.cleanup()


def build_in_place() -> None:
    """Build the core in this folder if it is missing, or older than its sources."""
    if not is_wanted():
        TARGET.unlink(missing_ok=True)
        return
    sources = [*FOLDER.glob("*.[ch]"), *(FOLDER.parent / name for name in DECLARING), Path(__file__)]
    newest = max(source.stat().st_mtime for source in sources)
    if TARGET.exists() and TARGET.stat().st_mtime > newest:
        return
    try:
        compile_core(TARGET)
    except BuildError as error:
        if is_demanded() or error.compiled:  # here the sources are being changed, so a failure is not passed over
            raise SystemExit(f"hatch_build.py: {error}") from None
        print(f"hatch_build.py: no compiled core, so {PURE}: {error}", file=sys.stderr)


if __name__ == "__main__":
    build_in_place()
