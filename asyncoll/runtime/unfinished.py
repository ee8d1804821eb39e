"""Trainings that have not ended: the models of their ranks differ, and without an error nothing would say so.

A rank that leaves its world with one raises UsageError (`check`). A program that never leaves is warned as the
interpreter ends. An exception that ends the program is enough: nothing is added to it.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Collection
from pathlib import Path

from asyncoll.errors import UsageError
from asyncoll.runtime.endpoint import Endpoint
from asyncoll.runtime.failures import Departed, Failure
from asyncoll.runtime.member import Member
from asyncoll.runtime.signature import Site, place_outside
from asyncoll.transport.wire import Abort

_PACKAGE = f"{Path(__file__).parents[1]}/"
_WORDS = "ends without finish() of"


class Training:
    """A training at one rank. It is known here from a step after which the ranks differ, also if its trainer is gone.

    One rank alone has nothing to end.
    """

    def __init__(self, kind: str, member: Member) -> None:
        """`kind` is the class that the program has made, in the line that leads here."""
        self._site = Site(*place_outside(sys._getframe(), (_PACKAGE,)))
        self._kind = kind
        self._round = 0
        self._differs = ""
        self.member = member

    def __str__(self) -> str:
        return f"{self._kind}, made at {self._site} (round {self._round}: {self._differs})"

    def note(self, round_: int, differs: str) -> None:
        """The training is at this round. `differs` says what does at the ranks if it ends now; empty: nothing."""
        self._round, self._differs = round_, differs
        if not differs or self.member.group.size == 1 or self._is_aborted_here():
            self.end()  # an abort of this rank is that of its step, which has an error of its own
        elif self not in _unfinished:
            if not _unfinished:  # the newest function is called first: this one while the rank is still in its world
                atexit.unregister(_warn)
                atexit.register(_warn)
            _unfinished[self] = None

    def end(self) -> None:
        """The program has ended the training, or does not want its result."""
        _unfinished.pop(self, None)

    def may_end(self) -> bool:
        """Whether nothing but the program has prevented its end. Any other failure was an error already.

        Parts of a model that are under way abort the communicator as the program drops its trainer, without an error.
        """
        failure = self._failure()
        if isinstance(failure, Abort):
            return self._is_aborted_here() or _WORDS in failure.reason  # another rank has found the same
        return failure is None or isinstance(failure, Departed)

    def _is_aborted_here(self) -> bool:
        failure = self._failure()
        return isinstance(failure, Abort) and failure.rank == self.member.endpoint.number

    def _failure(self) -> Failure | None:
        return self.member.endpoint.failures.of(self.member.communicator)


_unfinished: dict[Training, None] = {}  # of this process, in order
os.register_at_fork(after_in_child=_unfinished.clear)


def check(endpoint: Endpoint) -> None:
    """Raise UsageError if the rank of `endpoint` has trainings that have not ended."""
    if error := _error([training for training in list(_unfinished) if training.member.endpoint is endpoint]):
        raise error


def forget(endpoint: Endpoint) -> None:
    """The rank of `endpoint` has left its world."""
    for training in list(_unfinished):
        if training.member.endpoint is endpoint:
            training.end()


def program_error() -> BaseException | None:
    """The exception that has ended the program, as the interpreter ends.

    An interactive interpreter has noted that of some statement.
    """
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)


def _error(trainings: Collection[Training]) -> UsageError | None:
    open_ones = [training for training in trainings if training.may_end()]
    if not open_ones:
        return None
    return UsageError(
        f"rank {open_ones[0].member.endpoint.number} {_WORDS} {' and of '.join(map(str, open_ones))}: "
        "call it at every rank after the last step, or discard() if the result is not wanted"
    )


def _warn() -> None:
    if program_error() is None and (error := _error(_unfinished)) and sys.stderr is not None:
        print(f"asyncoll: warning: {error}", file=sys.stderr)
    _unfinished.clear()
