"""Builds the compiled core (asyncoll/_core) with the C compiler of this machine; without one, asyncoll is pure Python.

`ASYNCOLL_BUILD_CORE=0` builds none, and `=1` makes a failure an error. `CC`, `CFLAGS` and `LDFLAGS` are respected.

Run as a program, this builds the core in place, if a source file is newer: `make` does so before everything else.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "ASYNCOLL_BUILD_CORE"
FOLDER = Path(__file__).parent / "asyncoll" / "_core"
TARGET = FOLDER / "native.abi3.so"
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
    sources = sorted(map(str, FOLDER.glob("*.c")))
    flags = [*FLAGS, f"-I{_headers()}", *shlex.split(os.environ.get("CFLAGS", ""))]
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
    newest = max(source.stat().st_mtime for source in [*FOLDER.glob("*.[ch]"), Path(__file__)])
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
