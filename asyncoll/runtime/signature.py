"""The signature of a call: what all ranks must agree on, as a fingerprint to compare and as text for errors."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from asyncoll.arguments import digest
from asyncoll.tensors.reductions import storage

END = "the end of its program"  # the operation of the barrier with which a rank leaves
Place = tuple[CodeType, int]  # the code that makes a call, and the instruction of the call in it
_TRAINERS = f"{Path(__file__).parents[1]}/training"  # make their calls for the user's line that awaits them
_BACKWARD = ("/torch/autograd/graph.py", "/torch/autograd/__init__.py", "/torch/_tensor.py")  # run hooks of trainers
_WAYS_OUT = (f"{Path(__file__).parents[1]}/", f"{Path(asyncio.__file__).parent}/", contextlib.__file__)
reported: ContextVar[Place | None] = ContextVar("asyncoll_place", default=None)


class Site(NamedTuple):
    """A line of the user's code that makes a call. It appears in errors only."""

    code: CodeType
    instruction: int  # of the call, in bytes: its line is looked up only for an error
    remark: str = ""  # on the call

    @property
    def line(self) -> int:
        lines = (line for first, end, line in self.code.co_lines() if first <= self.instruction < end)
        return next(lines, None) or self.code.co_firstlineno

    def __str__(self) -> str:
        place = f"{self.code.co_filename.rpartition('/')[2]}:{self.line}"
        return f"{place} ({self.remark})" if self.remark else place


def site_outside() -> Site:
    """The place of the call in the user's code: the first frame outside the folder of the module that calls this."""
    return Site(*place_outside(sys._getframe(1)))


def place_outside(frame: FrameType, libraries: tuple[str, ...] = ()) -> Place:
    """The place of the first frame outside the folder of the module of `frame`, which that frame returns to.

    Trainers are left out, and so are files whose names begin with one of `libraries`. In a context of `reported_at` it
    is that place.
    """
    if (place := reported.get()) is not None:
        return place
    folder = _folder_of(frame.f_code.co_filename)
    while (caller := frame.f_back) is not None:
        frame, file = caller, caller.f_code.co_filename
        if _folder_of(file) not in (folder, _TRAINERS) and not (libraries and file.startswith(libraries)):
            break
    return frame.f_code, frame.f_lasti


def place_of_end(frame: FrameType) -> Place:
    """The place in the user's code from which the end of a world, in `frame`, is reached.

    What leads there, be it a context that ends or a loop that runs the program, is no code of the user's.
    """
    return place_outside(frame, _WAYS_OUT)


@contextlib.contextmanager
def reported_at(place: Place) -> Iterator[None]:
    """Calls that a library makes in the `with` block for its user are reported at `place`, a line of the user's.

    Tasks that are created inside inherit it. They run apart from the user's code, so no frame leads there.
    """
    token = reported.set(place)
    try:
        yield
    finally:
        reported.reset(token)


@lru_cache(maxsize=256)
def _folder_of(file: str) -> str:
    return _TRAINERS if file.endswith(_BACKWARD) else file.rpartition("/")[0]


class Signature(NamedTuple):
    """A call that all ranks of the communicator must make alike."""

    operation: str
    number: int  # 0: not known yet
    dtype: str
    elements: int  # -1: not compared
    detail: str
    site: Site
    epoch: int = 1  # that of `Group`

    def fingerprint(self) -> int:
        """A hash of 64 bits, equal at all ranks that make the same call.

        The line of code is not part of it: ranks may make a call at different lines. Nor is the number: ranks compare
        only calls with the same number.
        """
        return _fingerprint(self.operation, self.dtype, self.elements, self.detail, self.epoch)

    @property
    def verb(self) -> str:
        return self.operation

    @property
    def name(self) -> str:
        return self.detail

    @property
    def nbytes(self) -> int:
        """The size of the elements; 0 if they are not compared."""
        return self.elements * storage(self.dtype).itemsize if self.dtype and self.elements > 0 else 0

    @property
    def key(self) -> str:
        """The name of the call, equal at all ranks. Ranks name their pending calls to each other by it."""
        return f"{self.operation} #{self.number} {self.detail}"

    def __str__(self) -> str:
        what = "" if self.elements < 0 else f" of {self.elements}"
        more = f", {self.detail}" if self.detail else ""
        number = f" #{self.number}" if self.number else ""
        epoch = f" in epoch {self.epoch}" if self.epoch > 1 else ""
        text = f"{self.operation}{number}{what} {self.dtype}{more}{epoch} at {self.site}"
        return text.replace("  ", " ").replace(" ,", ",")


@lru_cache(maxsize=1024)
def _fingerprint(operation: str, dtype: str, count: int, detail: str, epoch: int) -> int:
    return digest(operation, dtype, count, detail, epoch)
