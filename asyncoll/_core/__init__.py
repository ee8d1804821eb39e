"""The compiled core: primitives in shared memory, in C, on the cells that Python modules declare.

It is optional. Ranks with and without it work together in one world. `ASYNCOLL_CORE=c` demands it, and
`ASYNCOLL_CORE=python` does without it; otherwise a rank uses it if it has been built.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, cast
from zlib import crc32

from asyncoll.errors import UsageError

if TYPE_CHECKING:
    from asyncoll._core.native import NativeCore as NativeCore
else:
    NativeCore = ModuleType

VARIABLE = "ASYNCOLL_CORE"
_NOT_BUILT = (
    "this installation has none; with a C compiler, `ASYNCOLL_BUILD_CORE=1 pip install --force-reinstall --no-deps "
    "--no-binary asyncoll asyncoll` builds it, or says why it cannot, and so does `make` in a checkout"
)


def load(wanted: str) -> tuple[NativeCore | None, str]:
    """The compiled module, or None, and why. `wanted` is the value of ASYNCOLL_CORE.

    Raises UsageError if `wanted` is unknown, or demands a core that cannot be loaded.
    """
    if wanted not in ("", "c", "python"):
        raise UsageError(f"{VARIABLE}={wanted}: set it to c or to python, or not at all")
    if wanted == "python":
        return None, f"{VARIABLE}=python"
    native, obstacle = _compiled(os.path.dirname(__file__))
    if native is None and wanted == "c":
        raise UsageError(f"{VARIABLE}=c, and the compiled core cannot be used: {obstacle}")
    return native, obstacle or (f"{VARIABLE}=c" if wanted else "it has been built")


def _compiled(folder: str) -> tuple[NativeCore | None, str]:
    """The compiled module; or None, and why it cannot be used."""
    changed_s = {entry.name: entry.stat().st_mtime for entry in os.scandir(folder)}
    built_s = changed_s.get("native.abi3.so")
    if built_s is None:
        return None, _NOT_BUILT
    # Only a checkout has sources.
    newer = sorted(name for name, time_s in changed_s.items() if name.endswith((".c", ".h")) and time_s > built_s)
    if newer:
        return None, _refused(f"it is older than {', '.join(newer)}; `make core` builds it again")
    try:
        from asyncoll._core import native
    except ImportError as error:
        return None, _refused(f"it cannot be loaded ({error})")
    core = cast(NativeCore, native)
    others = _other_declarations(Path(folder).parent, core.declarations)
    if others:  # it knows other cells than the Python code
        return None, _refused(f"it was built from another {', '.join(others)}; `make core` builds it again")
    return core, ""


def _other_declarations(package: Path, declarations: Sequence[tuple[str, str]]) -> list[str]:
    """The modules whose text is not that from which the core was built. A frozen program has no such files."""
    files = {name: package / name for name, _ in declarations}
    return [
        name for name, crc in declarations if files[name].exists() and f"{crc32(files[name].read_bytes()):08x}" != crc
    ]


def _refused(obstacle: str) -> str:
    """Warn that the core is not used, and return why."""
    _warn(f"the compiled core is not used: {obstacle}")
    return obstacle


def _warn(message: str) -> None:
    """Warn at the line outside of this package that imports it. Once for a job: its launcher warns, or else rank 0."""
    if "ASYNCOLL_FOLDER" in os.environ or os.environ.get("RANK", "0") != "0":
        return
    skipped = os.path.dirname(os.path.dirname(__file__)), os.path.dirname(importlib.__file__), "<frozen importlib"
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(skipped):
        frame = frame.f_back
    file, line = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else (__file__, 1)
    warnings.warn_explicit(message, RuntimeWarning, file, line)


def of_rank() -> NativeCore | None:
    """The core of a rank that joins a world: a rank that was forked may have another ASYNCOLL_CORE than its parent."""
    wanted = os.environ.get(VARIABLE, "")
    return native if wanted == _wanted else load(wanted)[0]


_wanted = os.environ.get(VARIABLE, "")
native, reason = load(_wanted)
"""The module `asyncoll._core.native`, or None if this process does without it, and why."""
