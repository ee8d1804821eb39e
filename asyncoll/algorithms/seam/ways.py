"""The ways of a call: the algorithm, or the memory, that takes it, and those that follow if that one declines.

A table lists the ways of one kind of call in the order in which they are tried. Each room declares its own tables, and
`algorithms.choice` puts them together for a world. The first way that takes a call carries it out. A way that declines
has changed nothing. UCC selects collectives like this (github.com/openucx/ucc, `ucc_coll_init`): by collective, kind of
memory and bytes, and on to the next algorithm where one is not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar, cast

from asyncoll.algorithms.seam.collectives import Collectives

R = TypeVar("R")
MANY = 1 << 62  # more bytes than an array has


class Shape(NamedTuple):
    """What a choice depends on."""

    nbytes: int  # of the array
    dtype: str = ""
    link_nbytes: int = 0  # of all arrays that pass the same link in this call, if there are others
    has_parts: bool = True  # whether there is an element for each rank


class Way(NamedTuple, Generic[R]):
    """A way of one kind of call, and what it takes."""

    call: str
    name: str
    begin: Callable[..., R | None]  # with the arguments of the call; None if it declines, and has changed nothing
    why: str
    over: int = -1  # the bytes of the longest array that is too short for it
    up_to: int = MANY  # the bytes of the longest array that it takes
    counts_link: bool = False  # these limits are of all arrays that pass the same link
    is_cut: bool = False  # into a part for each rank: it takes no array of fewer elements
    dtypes: Collection[str] = ()  # that it takes; empty: all
    needs: str = ""  # what else `begin` requires

    def takes(self, shape: Shape) -> bool:
        """Whether it takes arrays of `shape`. It may still decline a call."""
        nbytes = max(shape.nbytes, shape.link_nbytes) if self.counts_link else shape.nbytes
        fits = self.over < nbytes <= self.up_to and (shape.has_parts or not self.is_cut)
        return fits and (not self.dtypes or shape.dtype in self.dtypes)


def begin(ways: Sequence[Way[R]], shape: Shape, *arguments: Any) -> R:
    """Begin a call of `arguments` by the first of `ways` that takes it. The last one takes all calls."""
    for way in ways:
        if way.takes(shape) and (begun := way.begin(*arguments)) is not None:
            return begun
    raise AssertionError(f"no way takes a call of {shape}")


# -- ways of the program -------------------------------------------------------------------------

OWN: list[Way[Any]] = []


@contextmanager
def added(way: Way[Any]) -> Iterator[None]:
    """Calls that begin meanwhile try `way` before those of the package. All ranks add the same ways in the same order.

    `way.call` is the name of a method of `Collectives` whose first argument is an array, and `way.begin` gets the
    `Collectives` of the call and the arguments of that method. It must decline at all ranks or at none.
    """
    OWN.append(way)
    try:
        yield
    finally:
        OWN.remove(way)


def own(call: str) -> list[Way[Any]]:
    """The ways of the program for `call`."""
    return [way for way in OWN if way.call == call]


def with_own(collectives: Collectives) -> Collectives:
    """`collectives` that try the ways of the program first."""
    return cast(Collectives, _WithOwn(collectives))


class _WithOwn:
    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def __getattr__(self, name: str) -> Any:
        method, ways = getattr(self._collectives, name), own(name)
        if not ways:
            return method

        def call(x: Any, *arguments: Any) -> Any:
            general = Way(name, "", lambda _, *arguments: method(*arguments), "")
            # A reduction names what the bits mean: bfloat16 lies in arrays of uint16.
            dtype = next((each for each in arguments if type(each) is str), x.dtype.name)
            shape = Shape(x.nbytes, dtype)
            return begin((*ways, general), shape, self._collectives, x, *arguments)

        return call


# -- for people ----------------------------------------------------------------------------------


def limits(way: Way[Any]) -> str:
    """The bytes that `way` takes, in words."""
    over, up_to = way.over, way.up_to
    least = f"from {size(over + 1)}" if over % 2 else f"over {size(over)}"
    most = f"under {size(up_to + 1)}" if up_to % 2 else f"up to {size(up_to)}"
    return " ".join([least] * (over > 0) + [most] * (up_to < MANY)) or "any"


def size(nbytes: int) -> str:
    """`nbytes` in the largest unit that keeps it whole."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} bytes"
