"""The compiled core: primitives in shared memory, in C, on the memory layout that the Python code declares.

It is optional. Ranks with and without it work together in one world. `ASYNCOLL_CORE=c` demands it, and
`ASYNCOLL_CORE=python` does without it; otherwise a rank uses it if it has been built.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from asyncoll.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

    from asyncoll._core.native import ControlBlock, Meetings, Pieces, Rounds, ShortCalls

VARIABLE = "ASYNCOLL_CORE"
_NOT_BUILT = (
    "this installation has none; with a C compiler, `ASYNCOLL_BUILD_CORE=1 pip install --force-reinstall --no-deps "
    "--no-binary asyncoll asyncoll` builds it, or says why it cannot, and so does `make` in a checkout"
)


class Core(Protocol):
    """The compiled module, `native.pyi`."""

    __file__: str | None

    def __hash__(self) -> int: ...

    @property
    def ControlBlock(self) -> type[ControlBlock]: ...  # noqa: N802

    @property
    def Meetings(self) -> type[Meetings]: ...  # noqa: N802

    @property
    def Pieces(self) -> type[Pieces]: ...  # noqa: N802

    @property
    def Rounds(self) -> type[Rounds]: ...  # noqa: N802

    @property
    def ShortCalls(self) -> type[ShortCalls]: ...  # noqa: N802

    def find_kernel(self, op: str, dtype: str, portable: bool = False, /) -> int: ...

    def reduce(
        self, kernel: int, into: np.ndarray[Any, Any], arrays: Sequence[np.ndarray[Any, Any]], divisor: int, /
    ) -> None: ...


def load(wanted: str) -> tuple[Core | None, str]:
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


def _compiled(folder: str) -> tuple[Core | None, str]:
    """The compiled module; or None, and why it cannot be used."""
    changed_s = {entry.name: entry.stat().st_mtime for entry in os.scandir(folder)}
    built_s = changed_s.get("native.abi3.so")
    if built_s is None:
        return None, _NOT_BUILT
    # Only a checkout has sources. A core that is older than the Python code may know another layout of memory.
    newer = sorted(name for name, time_s in changed_s.items() if name.endswith((".c", ".h")) and time_s > built_s)
    if newer:
        obstacle = f"it is older than {', '.join(newer)}; `make core` builds it again"
        warnings.warn(f"the compiled core is not used: {obstacle}", RuntimeWarning, stacklevel=2)
        return None, obstacle
    try:
        from asyncoll._core import native
    except ImportError as error:
        warnings.warn(f"the compiled core is not used: it cannot be loaded ({error})", RuntimeWarning, stacklevel=2)
        return None, f"it cannot be loaded ({error})"
    return native, ""


native, reason = load(os.environ.get(VARIABLE, ""))
"""The module `asyncoll._core.native`, or None if this process does without it, and why."""
