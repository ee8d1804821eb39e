"""The ways of a call: the algorithm, or the memory, that takes it, and those that follow if that one declines.

A table lists the ways of one kind of call in the order in which they are tried. Each room declares its own tables, and
`algorithms.choice` puts them together for a world. The first way that takes a call carries it out. A way that declines
has changed nothing. UCC selects collectives like this (github.com/openucx/ucc, `ucc_coll_init`): by collective, kind of
memory and bytes, and on to the next algorithm where one is not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar, cast

from asyncoll.algorithms.seam.collectives import Body, Collectives
from asyncoll.errors import UsageError
from asyncoll.tensors.reductions import Array, ReduceOp

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
    needs: str = ""  # what else `begin` requires; without that it declines no array that it takes
    compiled: int = 0  # the compiled core carries out the same, and calls it so (`dense.meeting_cells`); 0: it does not

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

OWN: list[Way[Any]] = []  # while it is not empty, the compiled core declines all calls
_REDUCTIONS = ("allreduce", "reduce")  # their calls name what the bits mean
_OF_AN_ARRAY = (*_REDUCTIONS, "broadcast")


@contextmanager
def added(way: Way[Any]) -> Iterator[None]:
    """Calls that begin meanwhile try `way` before those of the package, also if they are awaited later.

    All ranks add the same ways, in the same order, around the same calls: otherwise these fail with MismatchError,
    which compares the names. `way.call` is "allreduce", "reduce" or "broadcast"; other calls may consist of these.
    `way.begin` gets the `Collectives` of the call and the arguments of that method. It declines at all ranks or at
    none. Otherwise it returns a coroutine that awaits methods of these `Collectives` only. Tensors of devices have
    arrived, and are copied back afterwards.

    Raises UsageError for a way that cannot be tried.
    """
    _check(way)
    OWN.append(way)
    try:
        yield
    finally:
        OWN.remove(way)


def _check(way: Way[Any]) -> None:
    named = f"a way of the program for {way.call!r}, {way.name!r}"
    if way.call not in _OF_AN_ARRAY:
        raise UsageError(f"{named}: only {', '.join(_OF_AN_ARRAY)} have ways of the program")
    if way.dtypes and way.call not in _REDUCTIONS:
        raise UsageError(f"{named}: a {way.call} copies bytes, whatever they mean; leave out `dtypes`")
    if way != way._replace(counts_link=False, compiled=0):
        raise UsageError(f"{named}: leave out `counts_link` and `compiled`, which are for ways of the package")


def with_own(body: Body[R]) -> Body[R]:
    """`body`, whose collectives try first the ways that the program has now."""
    ways = tuple(OWN)
    return lambda collectives: body(cast(Collectives, _WithOwn(collectives, ways)))


class _WithOwn:
    """`collectives` that try `ways` first."""

    def __init__(self, collectives: Collectives, ways: Sequence[Way[Any]]) -> None:
        self._collectives = collectives
        self._ways = ways

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collectives, name)

    def allreduce(self, x: Array, op: ReduceOp, dtype: str) -> Coroutine[Any, Any, None]:
        return self._begin("allreduce", dtype, x, op, dtype)

    def reduce(self, x: Array, op: ReduceOp, dtype: str, root: int) -> Coroutine[Any, Any, None]:
        return self._begin("reduce", dtype, x, op, dtype, root)

    def broadcast(self, x: Array, root: int) -> Coroutine[Any, Any, None]:
        return self._begin("broadcast", "", x, root)

    def _begin(self, call: str, dtype: str, x: Array, *arguments: Any) -> Coroutine[Any, Any, None]:
        collectives = self._collectives
        general = Way(call, "", lambda _, *arguments: getattr(collectives, call)(*arguments), "")
        ways = [way for way in self._ways if way.call == call]
        shape = Shape(x.nbytes, dtype, has_parts=x.size >= collectives.size)
        return begin((*ways, general), shape, collectives, x, *arguments)


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
