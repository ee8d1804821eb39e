"""Counts of messages and bytes: of a rank, of one execution of one operation, and totals by operation."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

WORD_BYTES = 4  # the papers count words of a float32 or an int32
_UNCOUNTED_MAX = 256  # ended calls that wait to be added up, which bounds the memory of a program that never asks


@dataclass(slots=True)
class Traffic:
    """Messages, and bytes of payload. Signals and headers are messages without payload.

    In shared memory a message is one piece of an array. Bytes received are those read from other ranks' memory. Bytes
    sent are those made readable for other ranks, counted once however many ranks read them.
    """

    messages_sent: int = 0
    """Messages sent."""

    messages_received: int = 0
    """Messages received."""

    bytes_sent: int = 0
    """Bytes of payload sent."""

    bytes_received: int = 0
    """Bytes of payload received."""

    @property
    def words_sent(self) -> float:
        """The bytes sent, in words of 4 bytes: the unit of the papers."""
        return self.bytes_sent / WORD_BYTES

    @property
    def words_received(self) -> float:
        """The bytes received, in words of 4 bytes."""
        return self.bytes_received / WORD_BYTES

    def sent(self, nbytes: int) -> None:
        """Count one message with `nbytes` bytes of payload."""
        self.messages_sent += 1
        self.bytes_sent += nbytes

    def received(self, nbytes: int) -> None:
        """Count one message with `nbytes` bytes of payload."""
        self.messages_received += 1
        self.bytes_received += nbytes

    @classmethod
    def total(cls, parts: Iterable[Traffic]) -> Traffic:
        """The sum of `parts`."""
        counts = [[getattr(part, name) for name in _COUNTED] for part in parts]
        return cls(*map(sum, zip(*counts, strict=True)))


_COUNTED = tuple(field.name for field in dataclasses.fields(Traffic))


@dataclass(slots=True)
class CallStatistics(Traffic):
    """Totals of all calls of one operation that have ended at this rank."""

    calls: int = 0
    """The number of calls."""

    def add(self, call: Traffic, times: int = 1) -> None:
        """Count so many calls with the traffic of `call` each."""
        self.calls += times
        for name in _COUNTED:
            setattr(self, name, getattr(self, name) + times * getattr(call, name))


class Ledger:
    """Totals of the calls of one communicator, by operation. Calls may end on any thread."""

    def __init__(self) -> None:
        self._ended: deque[tuple[str, Traffic, int]] = deque()  # not in the totals yet: appending takes no lock
        self.sources: list[Callable[[], None]] = []  # called before the totals are told: they enter what they counted
        self._totals: dict[str, CallStatistics] = {}
        self._lock = threading.Lock()

    def enter(self, operation: str, traffic: Traffic, times: int = 1) -> None:
        """Count so many calls of `operation` that have ended with `traffic` each."""
        self._ended.append((operation, traffic, times))
        if len(self._ended) > _UNCOUNTED_MAX:
            self._add_up()

    def drop(self, source: Callable[[], None]) -> None:
        """`source` has nothing more to enter."""
        source()
        self.sources = [each for each in self.sources if each != source]  # not in place: another thread may read it

    def totals(self) -> dict[str, CallStatistics]:
        """Copies of the totals, by operation. From any thread."""
        for source in self.sources:
            source()
        return self._add_up()

    def _add_up(self) -> dict[str, CallStatistics]:
        with self._lock:
            # Short calls of one kind share one `Traffic`: they are counted first, because adding takes longer.
            ended: dict[tuple[str, int], tuple[Traffic, int]] = {}
            while self._ended:
                operation, traffic, times = self._ended.popleft()
                key = operation, id(traffic)
                ended[key] = traffic, ended[key][1] + times if key in ended else times
            for (operation, _), (traffic, times) in ended.items():
                self._totals.setdefault(operation, CallStatistics()).add(traffic, times)
            return {operation: dataclasses.replace(total) for operation, total in self._totals.items()}
