"""A call of all ranks of a communicator, as a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from asyncoll.algorithms.seam.collectives import Body
from asyncoll.runtime.progress import ignore
from asyncoll.runtime.signature import Signature
from asyncoll.tensors.staged import Arriving, Staged

T = TypeVar("T")

# Calls that are over at a rank only after all ranks have contributed to its result.
REDUCING = frozenset(("allreduce", "allreduce_coalesced", "reduce_scatter", "sparse_allreduce", "barrier"))


class Call(NamedTuple, Generic[T]):
    """One rank's part of a call of all ranks: what it is, and what it does."""

    signature: Signature  # what all ranks agree on, the number of the call, and its place in the program
    body: Body[T]  # what it does with the collectives of this call; returns the result
    nbytes: int = 0  # of this rank's contribution
    staged: Sequence[Arriving] = ()  # its tensors on devices: the body runs once they have arrived
    # The tensor of `staged` that the collective may use while it arrives; such a call has one collective only.
    overlapping: Staged | None = None
    discarded: Callable[[], None] = ignore  # called if no caller gets the result (`Runner.start`)
