"""Which operations on a device are ordered, whatever their speed: vector clocks.

Mattern, "Virtual time and global states of distributed systems", 1989. Each stream counts its operations. The clock of
an operation has, for each stream, the last operation that certainly comes before it. Two operations that use the same
bytes, one of them to write, must be ordered; whether they are shows when they are queued, not only when they collide.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Clock = dict[str, int]  # by stream: the number of its last operation


@dataclass(slots=True, eq=False)
class Ticket:
    """An operation in the order: the number of it on its stream, and what comes before it."""

    stream: str
    number: int
    clock: Clock
    seen: int = 0  # the bytes of a copy that the host knows to have arrived


@dataclass(slots=True)
class _Access:
    ticket: Ticket
    start: int
    stop: int
    first: int  # the byte of the copy at `start`
    writes: bool


class Order:
    """The order of the operations of one device."""

    def __init__(self) -> None:
        self._host: Clock = {}  # what the host has seen the end of
        self._streams: dict[str, Clock] = {}

    def queue(self, stream: str, *after: Ticket) -> Ticket:
        """Queue an operation on `stream`, which waits for the operations `after` as well."""
        clock = _latest(self._host, self._streams.get(stream, {}), *(ticket.clock for ticket in after))
        clock[stream] = clock.get(stream, 0) + 1
        self._streams[stream] = clock
        return Ticket(stream, clock[stream], clock)

    def seen(self, ticket: Ticket) -> None:
        """The host has seen the end of the operation: what it queues from here on comes later."""
        self._host = _latest(self._host, ticket.clock)

    def seen_all(self) -> None:
        """The host has seen the end of everything that is queued."""
        self._host = _latest(self._host, *self._streams.values())


@dataclass(slots=True)
class Accesses:
    """The uses of one piece of device memory."""

    _known: list[_Access] = field(default_factory=list)

    def add(self, ticket: Ticket, start: int, stop: int, *, writes: bool) -> str:
        """Note that the operation uses these bytes. Returns what it collides with; "" if nothing."""
        collision = ""
        for known in self._known:
            until = min(stop, known.stop)
            if (writes or known.writes) and max(start, known.start) < until and not _is_before(known, until, ticket):
                verb = "writes" if known.writes else "reads"
                collision = f"an operation of stream {known.ticket.stream!r} that {verb} bytes {known.start} to {until}"
        if writes:  # later uses collide with this one, or with none that it covers
            self._known = [each for each in self._known if not (start <= each.start and each.stop <= stop)]
        self._known.append(_Access(ticket, start, stop, start, writes))
        return collision


def _is_before(known: _Access, until: int, ticket: Ticket) -> bool:
    """Whether `known` has used its bytes up to `until` before the operation of `ticket` begins."""
    earlier = known.ticket
    return ticket.clock.get(earlier.stream, 0) >= earlier.number or earlier.seen >= until - known.first


def _latest(*clocks: Clock) -> Clock:
    latest: Clock = {}
    for clock in clocks:
        for stream, number in clock.items():
            latest[stream] = max(number, latest.get(stream, 0))
    return latest
