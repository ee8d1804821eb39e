"""Which operations on a device are ordered, whatever their speed: vector clocks.

Mattern, "Virtual time and global states of distributed systems", 1989. Each stream counts its operations. The clock of
an operation has, for each stream, the last operation that certainly comes before it. Two operations that use the same
bytes, one of them to write, must be ordered; whether they are shows when they are queued, not only when they collide.

Each thread of the host has a clock, too: what it has seen the end of. A device does not notice how threads wait for
each other, so what one of them has seen orders nothing that another one queues.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

Clock = dict[str, int]  # by stream: the number of its last operation


@dataclass(slots=True, eq=False)
class Ticket:
    """An operation in the order: the number of it on its stream, and what comes before it."""

    stream: str
    number: int
    clock: Clock
    seen: dict[int, int] = field(default_factory=dict)  # by thread: the bytes of a copy that it knows to have arrived


@dataclass(slots=True)
class _Access:
    ticket: Ticket
    start: int
    stop: int
    first: int  # the byte of the copy at `start`
    writes: bool


class Order:
    """The order of the operations of one device."""

    def __init__(self, streams: Iterable[str]) -> None:
        """`streams` are there from the beginning."""
        self._threads: dict[int, Clock] = {}  # what each thread of the host has seen the end of
        self._streams: dict[str, Clock] = {stream: {} for stream in streams}
        self._passed: Clock = {}

    def queue(self, stream: str, *after: Ticket) -> Ticket:
        """Queue an operation on `stream`, which waits for the operations `after` as well."""
        thread = self._threads.get(threading.get_ident(), {})
        before = self._streams.get(stream, {})
        clock = latest(self._passed, thread, before, *(ticket.clock for ticket in after))
        clock[stream] = clock.get(stream, 0) + 1
        self._streams[stream] = clock
        return Ticket(stream, clock[stream], clock)

    def seen(self, ticket: Ticket) -> None:
        """This thread has seen the end of the operation: what it queues from here on comes later."""
        thread = threading.get_ident()
        self._threads[thread] = latest(self._threads.get(thread, {}), ticket.clock)

    def seen_by_all(self, ticket: Ticket) -> None:
        """A thread has seen the end of the operation, and tells all others at once."""
        self._passed = latest(self._passed, ticket.clock)

    def seen_all(self) -> None:
        """This thread has seen the end of everything that is queued."""
        self._threads[threading.get_ident()] = latest(*self._streams.values())

    def passed(self) -> Clock:
        """The operations that come before all that are queued from here on, on known streams or by known threads.

        Streams and threads that are not known yet are taken to come after them, too.
        """
        self._passed = latest(self._passed, _earliest(self._streams.values()), _earliest(self._threads.values()))
        return self._passed


@dataclass(slots=True)
class Accesses:
    """The uses of one piece of device memory."""

    _known: list[_Access] = field(default_factory=list)
    _many: int = 16

    def add(self, ticket: Ticket, start: int, stop: int, *, writes: bool) -> str:
        """Note that the operation uses these bytes. Returns what it collides with; "" if nothing."""
        collision = ""
        for known in self._known:
            until = min(stop, known.stop)
            if (writes or known.writes) and max(start, known.start) < until and not _is_before(known, until, ticket):
                verb = "writes" if known.writes else "reads"
                collision = f"an operation of stream {known.ticket.stream!r} that {verb} bytes {known.start} to {until}"
        # Later uses collide with this one, or with none that it covers.
        if writes:
            self._known = [each for each in self._known if not (start <= each.start and each.stop <= stop)]
        self._known.append(_Access(ticket, start, stop, start, writes))
        return collision

    def forget(self, order: Order) -> None:
        """Forget uses that collide with no later one, if there are many."""
        if len(self._known) < self._many:
            return
        passed = order.passed()
        self._known = [each for each in self._known if passed.get(each.ticket.stream, 0) < each.ticket.number]
        self._many = 2 * len(self._known) + 16


def _is_before(known: _Access, until: int, ticket: Ticket) -> bool:
    """Whether `known` has used its bytes up to `until` before the operation of `ticket` begins."""
    earlier = known.ticket
    seen = earlier.seen.get(threading.get_ident(), 0)
    return ticket.clock.get(earlier.stream, 0) >= earlier.number or seen >= until - known.first


def latest(*clocks: Clock) -> Clock:
    """What is in any of `clocks`."""
    found: Clock = {}
    for clock in clocks:
        for stream, number in clock.items():
            found[stream] = max(number, found.get(stream, 0))
    return found


def _earliest(clocks: Collection[Clock]) -> Clock:
    """What is in all `clocks`."""
    streams = set.intersection(*map(set, clocks)) if clocks else set()
    return {stream: min(clock[stream] for clock in clocks) for stream in streams}
