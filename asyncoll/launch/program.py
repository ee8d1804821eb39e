"""The user's program, run as `python script.py` or `python -m module` would run it."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import sys
import types
from importlib.machinery import ModuleSpec, SourceFileLoader
from typing import Any, NamedTuple

from asyncoll.errors import UsageError

_MODULE = re.compile(r"\w+(\.\w+)*")  # its name


class Program(NamedTuple):
    """`argv[0]` is a script's path, or with `module` a module's name; the rest are the program's arguments."""

    argv: tuple[str, ...]
    module: bool = False

    def check(self) -> None:
        """Raise UsageError if it cannot start. Imports nothing and runs nothing."""
        name = self.argv[0]
        if self.module:
            if name.endswith(".py") or not _MODULE.fullmatch(name):
                raise UsageError(f"{name!r} is not the name of a module: give one, or leave out -m to run a script")
            sys.path.insert(0, os.getcwd())
            try:
                if _locate(name).submodule_search_locations is not None:
                    _locate(f"{name}.__main__", f"{name} is a package without __main__")
            finally:
                del sys.path[0]
        elif not name:
            raise UsageError("the name of the script is empty: give one")
        elif not os.path.exists(name):
            if _MODULE.fullmatch(name) and not name.endswith(".py"):
                raise UsageError(f"no such script: {name}; to run a module of this name, put -m before it")
            raise UsageError(f"no such script: {name}")
        elif not os.path.isfile(name):
            raise UsageError(f"not a script: {name}")
        elif not os.access(name, os.R_OK):
            raise UsageError(f"cannot read the script: {name}")

    def run(self) -> None:
        """Run the program in this process, with `__main__`, `sys.argv` and `sys.path[0]` of its own."""
        name, *arguments = self.argv
        if not os.environ.get("PYTHONSAFEPATH"):
            sys.path.insert(0, os.getcwd() if self.module else os.path.dirname(os.path.realpath(name)))
        main = types.ModuleType("__main__")
        code = _load_module(name, main) if self.module else _load_script(name, main)
        sys.argv = [str(main.__file__) if self.module else name, *arguments]
        sys.orig_argv = [sys.executable, *(["-m"] if self.module else []), *self.argv]
        sys.modules["__main__"] = main
        exec(code, main.__dict__)


def _load_script(path: str, main: types.ModuleType) -> Any:
    absolute = os.path.abspath(path)
    main.__dict__.update(__file__=absolute, __cached__=None, __loader__=SourceFileLoader("__main__", absolute))
    with io.open_code(absolute) as file:
        return compile(file.read(), absolute, "exec", dont_inherit=True)


def _load_module(name: str, main: types.ModuleType) -> Any:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {name}", name=name)
    main.__dict__.update(
        __spec__=spec,
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=spec.loader,
        __package__=spec.parent,
    )
    return spec.loader.get_code(spec.name)  # type: ignore[attr-defined]


def _locate(name: str, complaint: str = "") -> ModuleSpec:
    """As importlib.util.find_spec, which would import the parent packages."""
    parent = name.rpartition(".")[0]
    path = _locate(parent).submodule_search_locations if parent else None
    if not parent or path is not None:
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path)
            if spec is not None:
                return spec
    raise UsageError(complaint or f"no module named {name}")
