"""Events of calls and rounds: what a record of them is made from, whatever carries them out.

The calls of all carriers pass a few places of `algorithms.calls` and `algorithms.rounds.operations`, which tell of
their events. Only `opened` is for the carriers: each opens rounds in a way of its own. The compiled core tells of the
calls that it carries out as a whole. While nothing is traced, `Trace.sink` is None, and an event costs one look at it.

This is the seam for records of calls. It keeps, counts and shows nothing itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeVar

from asyncoll.runtime import deadlines
from asyncoll.runtime.event_kinds import What
from asyncoll.runtime.signature import Site

T = TypeVar("T")


class Traced(Protocol):
    """What an event is about: a call, or the operation of a round."""

    @property
    def verb(self) -> str:
        """What the rank does: `allreduce`, `solo allreduce`, `join`."""

    @property
    def name(self) -> str:
        """Of the operation; of another call, its reduction, its root or its peer."""

    @property
    def epoch(self) -> int:
        """The membership of the world that its ranks are of."""

    @property
    def site(self) -> Site | None:
        """The place of the call in the program; None for a round."""


class Event(NamedTuple):
    """One event at one rank. Ranks are those of the communicator."""

    what: What
    at_s: float  # by `deadlines.clock`: the same clock at all ranks of a host, virtual time in a simulated world
    rank: int  # at which it has happened
    about: Traced
    key: int  # of the call: with its verb and `rank`, all events of one call have the same; 0 for a round
    number: int  # of the numbered call, or of the round; 0 if that is not known yet, or there is none
    ranks: tuple[int, ...]  # whose contributions are reduced; otherwise the rank itself
    nbytes: int = 0  # at BEGIN: the size of this rank's tensors
    included: bool = True  # at END: whether the contribution is in the result; otherwise it came late


class Sink(Protocol):
    """Where events go: a `collections.deque` with a bound is a ring of the newest."""

    def append(self, event: Any, /) -> object:
        """An event, or what stands for one (`events_of`). In the thread in which it happens, also under locks."""


Switch = Callable[[Callable[[Any], object] | None], object]


class Trace:
    """The events of the calls and rounds of one communicator at one rank. Its methods may be called in any thread."""

    __slots__ = ("_keys", "_size", "_switches", "rank", "sink")

    def __init__(self, rank: int, size: int) -> None:
        self.sink: Sink | None = None
        self.rank = rank
        self._size = size
        self._keys = itertools.count(1)  # of calls that have no number; `next` of it is atomic
        self._switches: list[Switch] = []

    @contextlib.contextmanager
    def into(self, sink: Sink) -> Iterator[None]:
        """Put the events of the `with` block into `sink`. Of a call that is under way at its ends it gets a part."""
        before = self.sink
        self._switch(sink)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, sink: Sink | None) -> None:
        self.sink = sink
        for switch in self._switches:
            switch(None if sink is None else sink.append)

    def compiled(self, switch: Switch) -> None:
        """Tell the compiled core where the events of its calls go, by `switch(append)`, now and at each change."""
        self._switches.append(switch)
        switch(None if self.sink is None else self.sink.append)

    @property
    def everyone(self) -> tuple[int, ...]:
        """All ranks, as `Event.ranks`."""
        return tuple(range(self._size))

    def opened(self, operation: Traced, number: int) -> None:
        """This rank has opened round `number` of `operation`."""
        if self.sink is not None:
            self.tell(What.OPEN, operation, number=number)

    # -- events: each method is for a caller that has found a sink --------------------------------

    def tell(
        self,
        what: What,
        about: Traced,
        key: int = 0,
        number: int = 0,
        *,
        at_s: float | None = None,
        ranks: tuple[int, ...] | None = None,
        nbytes: int = 0,
        included: bool = True,
    ) -> None:
        """An event, now or at `at_s`, with these fields of `Event`."""
        # Another thread may have switched it off.
        if (sink := self.sink) is not None:
            at_s, ranks = deadlines.now_s() if at_s is None else at_s, (self.rank,) if ranks is None else ranks
            sink.append(Event(what, at_s, self.rank, about, key, number, ranks, nbytes, included))

    def begin(self, about: Traced, nbytes: int, number: int = 0, *, at_s: float | None = None) -> int:
        """A call begins. Returns its key, which is its number if it has one."""
        key = number or next(self._keys)
        self.tell(What.BEGIN, about, key, number, at_s=at_s, nbytes=nbytes)
        return key

    def reduced(self, about: Traced, number: int, ranks: tuple[int, ...], key: int = 0) -> None:
        """This rank has the result of the contributions of `ranks`, in a numbered call or a round."""
        self.tell(What.REDUCE, about, key, number, ranks=ranks)

    def over(self, about: Traced, nbytes: int, came_s: float, number: int, *, included: bool = True) -> None:
        """A call without a number that began at `came_s` is over at once. `number` is that of its message, or round."""
        key = self.begin(about, nbytes, at_s=came_s)
        self.tell(What.ARRIVE, about, key, at_s=came_s)
        self.tell(What.END, about, key, number, included=included)

    def give_up(self, about: Traced, key: int, error: BaseException, number: int = 0) -> None:
        """A call ends with `error`."""
        is_cancelled = isinstance(error, asyncio.CancelledError | GeneratorExit)
        self.tell(What.CANCEL if is_cancelled else What.FAIL, about, key, number)

    async def follow(
        self,
        about: Traced,
        key: int,
        work: Coroutine[Any, Any, T],
        end: Callable[[int, T], None],
        number: int = 0,
        *,
        arrives: bool = False,
    ) -> T:
        """`work`, which carries out a call that has begun. With `arrives` it takes part at once.

        `end(key, result)` tells that the call is over.
        """
        if arrives:
            self.tell(What.ARRIVE, about, key, number)
        try:
            result = await work
        except BaseException as error:
            self.give_up(about, key, error, number)
            raise
        end(key, result)
        return result


def events_of(ring: deque[Any]) -> list[Event]:
    """Take the events out of `ring`, a sink, in the order in which they have happened."""
    taken = [ring.popleft() for _ in range(len(ring))]
    # The compiled core puts a function and its arguments in place of an event: it runs no bytecode within a call.
    events = [each if isinstance(each, Event) else each[0](*each[1:]) for each in taken]
    # A call that is over at once tells of its beginning at its end.
    return sorted(events, key=attrgetter("at_s"))
