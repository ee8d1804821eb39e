"""What a rank has sent and received: in all, or in one execution of one operation."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from dataclasses import dataclass

WORD_BYTES = 4  # the papers count words of a float32 or an int32
_UNCOUNTED_MAX = 256


@dataclass(slots=True)
class Traffic:
    """Messages, and bytes of payload. Signals and headers are messages without payload.

    In shared memory, bytes received are those read in other ranks' memory, and bytes sent those written or shown where
    others read them, once, however many do; messages are the pieces.
    """

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0

    @property
    def words_sent(self) -> float:
        """In words of 4 bytes, as the papers count."""
        return self.bytes_sent / WORD_BYTES

    @property
    def words_received(self) -> float:
        return self.bytes_received / WORD_BYTES

    def sent(self, nbytes: int) -> None:
        """One more message."""
        self.messages_sent += 1
        self.bytes_sent += nbytes

    def received(self, nbytes: int) -> None:
        """One more message."""
        self.messages_received += 1
        self.bytes_received += nbytes


@dataclass(slots=True)
class CallStatistics(Traffic):
    """Of all calls of one operation that have ended here."""

    calls: int = 0

    def add(self, call: Traffic) -> None:
        self.calls += 1
        self.messages_sent += call.messages_sent
        self.messages_received += call.messages_received
        self.bytes_sent += call.bytes_sent
        self.bytes_received += call.bytes_received


class Ledger:
    """What the calls of one communicator have cost, by operation. Calls end on any thread."""

    def __init__(self) -> None:
        self._ended: deque[tuple[str, Traffic]] = deque()  # not in the totals yet: to append takes no lock
        self._totals: dict[str, CallStatistics] = {}
        self._lock = threading.Lock()

    def enter(self, operation: str, traffic: Traffic) -> None:
        self._ended.append((operation, traffic))
        if len(self._ended) > _UNCOUNTED_MAX:
            self.totals()

    def totals(self) -> dict[str, CallStatistics]:
        with self._lock:
            while self._ended:
                operation, traffic = self._ended.popleft()
                self._totals.setdefault(operation, CallStatistics()).add(traffic)
            return {operation: dataclasses.replace(total) for operation, total in self._totals.items()}
