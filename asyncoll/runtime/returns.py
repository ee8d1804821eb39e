"""The copies of results back to devices. No call waits for them; the end of the world does."""

from __future__ import annotations

import asyncio
import threading

from asyncoll.errors import DeviceError


class Returns:
    """The returns of one rank. On the runtime's loop, but for `begun`, which may be called in any thread."""

    def __init__(self) -> None:
        self.any = False  # whether there has been one; for other threads, too
        self._under_way = 0
        self._lock = threading.Lock()  # of that number
        self._error: DeviceError | None = None  # the first
        self._waiting: list[asyncio.Future[None]] = []

    def begun(self) -> None:
        self.any = True
        with self._lock:
            self._under_way += 1

    def ended(self, error: DeviceError | None) -> None:
        with self._lock:
            self._under_way -= 1
        self._error = self._error or error
        self._tell()

    def over(self) -> asyncio.Future[None]:
        """A future that is done once none is under way."""
        self._waiting.append(asyncio.get_running_loop().create_future())
        over = self._waiting[-1]
        self._tell()
        return over

    def check(self) -> None:
        """Raise the error of the first that has failed."""
        if self._error is not None:
            raise self._error

    def _tell(self) -> None:
        while self._waiting and not self._under_way:
            self._waiting.pop().set_result(None)
