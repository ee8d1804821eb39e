"""Short meetings: the single rendezvous of an allreduce of a short array, or of a barrier, without any waiting.

A rank arrives with its array. If the arrays are shorter than `Sizes.shown`, the last rank to arrive reduces copies of
all, because it runs already: to share them, it would have to wake the others and wait for them, which takes longer. It
publishes the result, and the others complete with it.

Longer arrays are reduced where the ranks show them: registered ones are not copied. Each rank that is there claims
chunks, reduces them, and writes the result to all ranks. With the compiled core registered arrays of up to `Sizes.long`
meet here, too, and so do private arrays, which the ranks read through the kernel. `PythonMeetings` and the compiled
core implement the steps, on the same records of the staging area (`staging`). In Python, only the last rank claims
chunks here.
"""

from __future__ import annotations

from typing import Protocol

from asyncoll.algorithms.dense.staging import DisagreementError, StagingArea
from asyncoll.tensors.reductions import Array

# What `Meetings.arrive` returns.
WAITING = 0  # other ranks are missing
LAST = 1  # all ranks have arrived, and this one reduces
NOT_FREE = 2  # ranks are still at an earlier rendezvous of the record: nothing has changed
OVER = 3  # all ranks have arrived, and this one has reduced and published


class Meetings(Protocol):
    """The short meetings of one communicator at one rank: one for each call `number`.

    `done` is the number of bytes of the result, or 1 for a barrier. `is_clear` says that no earlier call is under way
    at this rank. Arrays are flat and contiguous; None for a barrier. All methods raise the error of a lost lock.
    """

    def arrive(
        self,
        number: int,
        fingerprint: int,
        array: Array | None,
        address: int,
        kernel: int,
        divisor: int,
        is_clear: bool,
        /,
    ) -> int:
        """Show a copy of `array`, or `array` itself, which is registered at `address`, unless that is 0.

        Returns WAITING, LAST, NOT_FREE or OVER. The address is 0 below `Sizes.shown` bytes. With the compiled core it
        may be negative: `array` is at its negation in private memory (`peers`), and must live until the call is over.

        With the compiled core, the last rank reduces by `kernel` (`tensors.reductions.kernel_number`) and `divisor`,
        and has the result in `array`, unless `kernel` is 0. It is WAITING if another rank still reduces a chunk. The
        caller has checked that the call that used the record before is over at this rank. Raises DisagreementError if
        another rank has made another call with this number.
        """

    def publish(self, number: int, done: int, is_clear: bool, /) -> None:
        """The result is where the others look for it: tell them, and leave. For the rank that was the last."""

    def complete(self, number: int, done: int, array: Array | None, is_clear: bool, /) -> bool:
        """Copy the result into `array`, and leave. Returns False, and does nothing, if there is no result yet."""

    def look(self, number: int, done: int, polls: int, sleep_ns: int, kernel: int, divisor: int, /) -> bool:
        """Block the thread for a short time, until there seems to be a result; returns whether there is.

        It yields the core at most `polls` times, and then sleeps for at most `sleep_ns` nanoseconds if it can. With the
        compiled core it reduces chunks meanwhile, by `kernel` and `divisor`.
        """


class PythonMeetings:
    """Implements `Meetings`. Its counterpart in C is in asyncoll/_core/meetings.c."""

    def __init__(self, staging: StagingArea) -> None:
        self._staging = staging

    def arrive(
        self,
        number: int,
        fingerprint: int,
        array: Array | None,
        address: int,
        kernel: int,
        divisor: int,
        is_clear: bool,
        /,
    ) -> int:
        del kernel, divisor, is_clear
        staging = self._staging
        rendezvous = staging.rendezvous(number, 0, fingerprint)
        if not rendezvous.is_free_now():
            return NOT_FREE
        staging.note(number)
        return LAST if rendezvous.arrive_shortly(array, address) else WAITING

    def publish(self, number: int, done: int, is_clear: bool, /) -> None:
        del is_clear  # the staging area knows
        self._staging.rendezvous(number, 0, 0).leave(reduced=done)

    def complete(self, number: int, done: int, array: Array | None, is_clear: bool, /) -> bool:
        del is_clear
        staging = self._staging
        return staging.rendezvous(number, 0, 0).complete_shortly(done, array)

    def look(self, number: int, done: int, polls: int, sleep_ns: int, kernel: int, divisor: int, /) -> bool:
        del polls, sleep_ns, kernel, divisor  # the arena's own numbers
        rendezvous = self._staging.rendezvous(number, 0, 0)
        return self._staging.arena.look(lambda: rendezvous.is_reduced(done))


def meetings_of(staging: StagingArea) -> Meetings:
    """The meetings of this rank: those of the compiled core, if its arena uses that."""
    native = staging.arena.native
    if native is None:
        return PythonMeetings(staging)
    sizes, view = staging.sizes, staging.arena.view
    meetings: Meetings = native.Meetings(
        staging.control_block,
        view,
        DisagreementError,
        staging.size,
        staging.rank,
        sizes.calls,
        sizes.short,
        staging.shown,
        sizes.chunk,
        staging.arena.cores,
    )
    return meetings
