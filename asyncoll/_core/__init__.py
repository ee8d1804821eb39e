"""The compiled core: primitives in shared memory, in C, on the memory layout that the Python code declares.

It is optional. Ranks with and without it work together in one world. `ASYNCOLL_CORE=c` demands it, and
`ASYNCOLL_CORE=python` does without it; otherwise a rank uses it if it has been built.
"""

from __future__ import annotations

import os
from types import ModuleType

VARIABLE = "ASYNCOLL_CORE"


def _load() -> tuple[ModuleType | None, str]:
    """The compiled module, or None, and the reason."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "c", "python"):
        raise ImportError(f"{VARIABLE}={wanted}: set it to c or to python, or not at all")
    if wanted == "python":
        return None, f"{VARIABLE}=python"
    try:
        from asyncoll._core import native
    except ImportError as error:
        if wanted == "c":
            raise ImportError(
                f"{VARIABLE}=c, but the compiled core cannot be loaded ({error}): install a C compiler and run "
                "ASYNCOLL_BUILD_CORE=1 pip install --force-reinstall asyncoll"
            ) from error
        return None, f"it has not been built ({error})"
    return native, f"{VARIABLE}=c" if wanted else "it has been built"


native, reason = _load()
"""The module `asyncoll._core.native`, or None if this process does without it, and why."""
