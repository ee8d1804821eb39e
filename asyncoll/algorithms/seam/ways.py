"""The ways of a call: the algorithm, or the memory, that takes it, and those that follow if that one declines.

A table lists the ways of one kind of call in the order in which they are tried. Each room declares its own tables, and
`algorithms.choice` puts them together for a world. The first way that takes a call carries it out. A way that declines
has changed nothing. UCC selects collectives like this (github.com/openucx/ucc, `ucc_coll_init`): by collective, kind of
memory and bytes, and on to the next algorithm where one is not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np

from asyncoll.algorithms.seam.call import Call
from asyncoll.algorithms.seam.collectives import Collectives
from asyncoll.errors import UsageError, describe
from asyncoll.runtime.signature import Signature
from asyncoll.tensors.reductions import DTYPES, Array, ReduceOp

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
    by_core: bool = False  # the compiled core carries it out: without one it declines all calls
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

OWN: list[Way[Any]] = []  # of all ranks of this process: while it is not empty, the compiled core declines all calls
_blocks: ContextVar[tuple[list[Way[Any]], ...]] = ContextVar("asyncoll_ways", default=())  # emptied at their ends
_REDUCTIONS = ("allreduce", "reduce")  # their calls name what the bits mean
_GENERAL = -1  # the number of a way of the package
_OF_AN_ARRAY = (*_REDUCTIONS, "broadcast")


@contextmanager
def added(way: Way[Any]) -> Iterator[None]:
    """Calls that begin meanwhile try `way` before those of the package, also if they are awaited later.

    All ranks add the same ways, in the same order, around the same calls: otherwise these fail with MismatchError,
    which compares the names. The block has the way, and so have tasks that start in it, until it ends. So ranks that
    share a process each add their own, or one is added around the whole world. A thread that starts in the block has it
    if it runs in a copy of the context (`contextvars.copy_context`). Meanwhile the compiled core carries out no whole
    calls in this process.

    `way.call` is "allreduce", "reduce" or "broadcast"; other calls may consist of these. `way.begin` gets the
    `Collectives` of the call and the arguments of that method. The array is read-only until it returns. It declines at
    all ranks or at none: before a call that it could take, all ranks compare in a short step which way each of them
    takes, and fail if they differ. Otherwise it returns a coroutine that awaits methods of these `Collectives` only.
    Tensors of devices have arrived, and are copied back afterwards.

    Raises UsageError for a way that cannot be tried.
    """
    _check(way)
    block = [way]
    OWN.append(way)
    _blocks.set((*_blocks.get(), block))
    try:
        yield
    finally:
        block.clear()  # tasks that go on keep the block
        _blocks.set(tuple(filter(None, _blocks.get())))
        OWN.remove(way)


def own() -> tuple[Way[Any], ...]:
    """The ways that the program has added here and now, in order."""
    return tuple(way for block in _blocks.get() for way in block)


def _check(way: Way[Any]) -> None:
    named = f"a way of the program for {way.call!r}, {way.name!r}"
    if way.call not in _OF_AN_ARRAY:
        raise UsageError(f"{named}: only {', '.join(_OF_AN_ARRAY)} have ways of the program")
    if way.dtypes and way.call not in _REDUCTIONS:
        raise UsageError(f"{named}: a {way.call} copies bytes, whatever they mean; leave out `dtypes`")
    if isinstance(way.dtypes, str) or not set(way.dtypes) <= set(DTYPES):
        raise UsageError(f"{named}: `dtypes` is {way.dtypes!r}; give a tuple of names of {', '.join(DTYPES)}")
    if max(way.over, -1) >= way.up_to:
        raise UsageError(f"{named}: it takes no array; give `over`, {way.over}, fewer bytes than `up_to`, {way.up_to}")
    if not callable(way.begin):
        raise UsageError(f"{named}: `begin` is {way.begin!r}; give a function that returns a coroutine, or None")
    if way != way._replace(counts_link=False, by_core=False, compiled=0):
        raise UsageError(f"{named}: leave out `counts_link`, `by_core` and `compiled`: for the package alone")


def with_own(call: Call[R]) -> Call[R]:
    """`call`, whose collectives try first the ways that the program has now, if any. These use whole arrays."""
    ways, body = own(), call.body
    if not ways:
        return call
    return call._replace(
        body=lambda collectives: body(cast(Collectives, _WithOwn(collectives, ways, call.signature))), overlapping=None
    )


class _WithOwn:
    """The `collectives` of a call that try `ways` first."""

    def __init__(self, collectives: Collectives, ways: Sequence[Way[Any]], call: Signature) -> None:
        self._collectives = collectives
        self._ways = ways
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collectives, name)

    def allreduce(self, x: Array, op: ReduceOp, dtype: str) -> Coroutine[Any, Any, None]:
        return self._carry_out("allreduce", dtype, x, op, dtype)

    def reduce(self, x: Array, op: ReduceOp, dtype: str, root: int) -> Coroutine[Any, Any, None]:
        return self._carry_out("reduce", dtype, x, op, dtype, root)

    def broadcast(self, x: Array, root: int) -> Coroutine[Any, Any, None]:
        return self._carry_out("broadcast", "", x, root)

    async def _carry_out(self, verb: str, dtype: str, x: Array, *arguments: Any) -> None:
        tried: list[int] = []
        ways = [way._replace(begin=partial(self._try, tried, way)) for way in self._ways if way.call == verb]
        general = Way(verb, "", lambda *arguments: (_GENERAL, getattr(self._collectives, verb)(*arguments)), "")
        shape = Shape(x.nbytes, dtype, has_parts=x.size >= self._collectives.size)
        taken, work = begin((*ways, general), shape, x, *arguments)
        try:
            if tried:  # at all ranks or at none: they have the same shape
                await self._check_agreement(taken)
        except BaseException:
            work.close()
            raise
        await work

    def _try(self, tried: list[int], way: Way[Any], x: Array, *arguments: Any) -> tuple[int, Any] | None:
        """What `way` begins, and its number. It cannot change the array here, where it may still decline."""
        tried.append(self._ways.index(way))
        shown = x.view()
        shown.flags.writeable = False
        try:
            work = way.begin(self._collectives, shown, *arguments)
        except Exception as error:
            remedy = "it may raise nothing before its coroutine, nor change the array, which is read-only until then"
            raise UsageError(f"the way {way.name!r} of {self._call} raised {describe(error)}: {remedy}") from error
        if not isinstance(work, Coroutine | None):
            remedy = "it is a function that returns a coroutine, or None if it declines"
            raise UsageError(f"`begin` of the way {way.name!r} of {self._call} returned {work!r:.60}: {remedy}")
        shown.flags.writeable = x.flags.writeable
        return None if work is None else (tried[-1], work)

    async def _check_agreement(self, taken: int) -> None:
        """Raise UsageError at all ranks unless all of them take the way number `taken`."""
        numbers = [np.full(1, taken) for _ in range(self._collectives.size)]
        await self._collectives.allgather(numbers)
        names = ["a way of the package" if it == _GENERAL else self._ways[it.item()].name for it in numbers]
        if len(set(names)) > 1:
            told = ", ".join(f"rank {rank} takes {name}" for rank, name in enumerate(names))
            remedy = "let `begin` decline by what all ranks know alike, such as the operation, the dtype and the length"
            raise UsageError(f"the ranks take different ways for {self._call} ({told}): {remedy}")


# -- for people ----------------------------------------------------------------------------------


def limits(way: Way[Any]) -> str:
    """The bytes that `way` takes, in words."""
    over, up_to = way.over, way.up_to
    least = f"from {size(over + 1)}" if over % 2 else f"over {size(over)}"
    most = f"under {size(up_to + 1)}" if up_to % 2 else f"up to {size(up_to)}"
    words = [least] * (over >= 0) + [most] * (up_to < MANY)
    return " ".join(words + ["a link"] * way.counts_link) if words else "any"


def size(nbytes: int) -> str:
    """`nbytes` in the largest unit that keeps it whole; else in KiB, rounded."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} bytes" if nbytes < 1 << 10 else f"{nbytes / (1 << 10):.1f} KiB"
