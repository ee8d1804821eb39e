"""The functions of the package that a call enters: how much a reader of that call has to know."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import asyncoll

PACKAGE = str(Path(asyncoll.__file__).parent)
TESTING = f"{PACKAGE}/testing/"
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")  # functions in Python 3.11 only


class Walk:
    """A context in which the functions are noted that this thread enters. Those in C, and those of worlds, are not.

    It ends early when a function of the names `until` is entered, which is not noted.
    """

    def __init__(self, until: tuple[str, ...] = ()) -> None:
        self.functions: set[tuple[str, str]] = set()  # file and name
        self._until = until

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.functions}

    def __enter__(self) -> Self:
        sys.setprofile(self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if code.co_qualname in self._until:
            sys.setprofile(None)
            return
        if event != "call" or code.co_name in COMPREHENSIONS:
            return
        if code.co_filename.startswith(PACKAGE) and not code.co_filename.startswith(TESTING):
            self.functions.add((code.co_filename, code.co_qualname))
