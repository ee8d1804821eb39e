"""The activation broadcast tree, as operations of a schedule (seed 000, section 4.1 and figure 6).

Whoever opens a round tells the rank 2^j further for every j; whoever hears it on edge i tells those on the edges above
i: the union of P binomial trees, one rooted at each rank, with every edge used at most once a round. The paper's
partners `rank xor 2^j` reach everyone only when P is a power of two; `rank + 2^j mod P` reaches everyone for any P.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from asyncoll.runtime.schedule import Schedule


class Step(NamedTuple):
    """An operation of a round's schedule."""

    kind: str
    edge: int = 0


OPEN = Step("open")  # this rank opens the round
REDUCE = Step("reduce")  # this rank gives its contribution and joins the reduction


@lru_cache(maxsize=256)
def heard(edge: int) -> Step:
    return Step("heard", edge)


def edges(size: int) -> range:
    """The edges of a rank: number j leads from rank r to rank (r + 2^j) mod size."""
    return range((size - 1).bit_length())


@lru_cache(maxsize=64)
def activation(size: int, *, flood: bool = False) -> Schedule[Step]:
    """The schedule of a round that any of its openers may start; take a `fresh` one for each round.

    With `flood` every rank uses all of its edges. A group may be done with a round before others have heard of it, and
    its members do not pass on any more what they hear late.
    """
    schedule: Schedule[Step] = Schedule()
    schedule.add(OPEN)
    for edge in edges(size):
        schedule.add(heard(edge))
    for edge in edges(size):
        heeded = edges(size) if flood else range(edge)
        schedule.add(Step("forward", edge), after_any=[OPEN, *map(heard, heeded)])
    schedule.add(REDUCE, after_any=[OPEN, *(heard(edge) for edge in edges(size))])
    return schedule


@lru_cache(maxsize=64)
def synchronous(size: int) -> Schedule[Step]:
    """The schedule of a round that waits for every rank; take a `fresh` one for each round.

    The same edges carry a dissemination barrier: a rank uses edge j once it is open itself and has heard all edges
    below j. A rank that has heard all of its edges knows that every rank is open. No rank reduces before that, so a
    late rank finds no reduction under way that uses the memory of a caller.
    """
    schedule: Schedule[Step] = Schedule()
    schedule.add(OPEN)
    for edge in edges(size):
        schedule.add(heard(edge))
    for edge in edges(size):
        schedule.add(Step("forward", edge), after=[OPEN, *map(heard, range(edge))])
    schedule.add(REDUCE, after=[OPEN, *map(heard, edges(size))])
    return schedule
