"""The activation broadcast tree, as operations of a schedule.

Source: Li, Ben-Nun, Di Girolamo, Alistarh, Hoefler, "Taming unbalanced training workloads in deep learning with partial
collective operations", PPoPP 2020, section 4.1.1 and figure 6.

The rank that opens a round signals the rank 2^j further for every j. A rank that is signalled on edge i signals the
ranks on the edges above i. This is the union of P binomial trees, one rooted at each rank. Every edge is used at most
once a round. The paper's partners `rank xor 2^j` reach all ranks only if P is a power of two. `rank + 2^j mod P`
reaches all ranks for any P.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from asyncoll.runtime.schedule import Schedule


class ActivationStep(NamedTuple):
    """An operation of a round's schedule."""

    kind: str
    edge: int = 0


OPEN = ActivationStep("open")  # this rank opens the round
REDUCE = ActivationStep("reduce")  # this rank gives its contribution and joins the reduction


@lru_cache(maxsize=256)
def heard(edge: int) -> ActivationStep:
    """The signal of the round has arrived on `edge`."""
    return ActivationStep("heard", edge)


def edges(size: int) -> range:
    """The edges of a rank: number j leads from rank r to rank (r + 2^j) mod size."""
    return range((size - 1).bit_length())


@lru_cache(maxsize=64)
def activation(size: int, *, flood: bool = False) -> Schedule[ActivationStep]:
    """The schedule of a round that any of its openers may start; take a `fresh` one for each round.

    With `flood` every rank signals on all of its edges, whichever edge it was signalled on. Rounds in groups need that:
    a member of a group may end the round before it is signalled on every edge. It drops later signals of that round and
    does not forward them. Without `flood` a rank was left behind in about one of a hundred random runs.
    """
    schedule: Schedule[ActivationStep] = Schedule()
    schedule.add(OPEN)
    for edge in edges(size):
        schedule.add(heard(edge))
    for edge in edges(size):
        # The edges below j are enough without `flood`: a rank signalled on edge i is the root of a subtree that spans
        # the edges above i, so the ranks on the lower edges are reached by other ranks.
        earlier = edges(size) if flood else range(edge)
        schedule.add(ActivationStep("forward", edge), after_any=[OPEN, *map(heard, earlier)])
    schedule.add(REDUCE, after_any=[OPEN, *(heard(edge) for edge in edges(size))])
    return schedule


@lru_cache(maxsize=64)
def synchronous(size: int) -> Schedule[ActivationStep]:
    """The schedule of a round that waits for every rank; take a `fresh` one for each round.

    The same edges carry a dissemination barrier. A rank signals on edge j once it is open itself and was signalled on
    all edges below j. A rank that was signalled on all of its edges knows that every rank is open. No rank reduces
    before that. Without the barrier a rank would begin the reduction in its caller's memory, and would need that memory
    until the last rank has come; a cancelled caller would have to wait as long.
    """
    schedule: Schedule[ActivationStep] = Schedule()
    schedule.add(OPEN)
    for edge in edges(size):
        schedule.add(heard(edge))
    for edge in edges(size):
        schedule.add(ActivationStep("forward", edge), after=[OPEN, *map(heard, range(edge))])
    schedule.add(REDUCE, after=[OPEN, *map(heard, edges(size))])
    return schedule
