"""Builds the compiled core with whatever C compiler there is; without one, the package is pure Python.

`ASYNCOLL_BUILD_CORE=0` builds none, and `=1` makes a failure an error. Run as a program, this builds the core in place.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path(__file__).parent / "asyncoll" / "_core"
TARGET = FOLDER / "native.abi3.so"
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-shared", "-pthread")


def compile_core() -> None:
    """Compile all C files into the module. Raises OSError or CalledProcessError if that fails."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    include = f"-I{sysconfig.get_path('include')}"
    more = shlex.split(os.environ.get("CFLAGS", ""))
    sources = sorted(map(str, FOLDER.glob("*.c")))
    made = TARGET.with_suffix(".new")  # a process may have the old one loaded
    subprocess.run([*compiler, *FLAGS, include, *more, *sources, "-o", str(made)], check=True)
    made.replace(TARGET)


class CoreBuildHook(BuildHookInterface[Any]):
    """Adds the compiled core to the wheel, or to the folder of an editable installation."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wanted = os.environ.get("ASYNCOLL_BUILD_CORE", "")
        TARGET.unlink(missing_ok=True)
        if self.target_name != "wheel" or wanted == "0":
            return
        try:
            compile_core()
        except (OSError, subprocess.CalledProcessError) as error:
            if wanted == "1":
                raise
            self.app.display_warning(f"the compiled core was not built, so asyncoll runs in pure Python: {error}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["artifacts"].append(str(TARGET.relative_to(Path(self.root))))


if __name__ == "__main__":
    sys.exit(compile_core())
