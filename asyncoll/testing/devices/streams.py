"""The streams of a fake device, and its copies: queues of operations, of which one at random goes on at each turn."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np

from asyncoll.tensors.reductions import Array
from asyncoll.testing.devices.order import Order, Ticket

TurnedBy = Literal["thread", "loop", "program"]
_PAUSE_S = 0.0005  # at most, between two turns


class StreamWork:
    """Work on a stream. `steps` does a part of it at each step; `after` are the operations that it waits for."""

    def __init__(self, ticket: Ticket, steps: Iterator[None], after: Sequence[StreamWork] = ()) -> None:
        self.ticket = ticket
        self.is_over = False
        self._steps = steps
        self._after = after

    def may_go_on(self) -> bool:
        return all(operation.is_over for operation in self._after)

    def step(self) -> None:
        try:
            next(self._steps)
        except StopIteration:
            self.is_over = True


class FakeTransfer:
    """A `Transfer` of a fake device."""

    def __init__(self, order: Order, ticket: Ticket, host: Array, lock: threading.RLock) -> None:
        self.nbytes = host.nbytes
        self.error: BaseException | None = None
        self.host = host
        self.done = 0  # bytes that have arrived; reading this tells the host nothing
        self.is_seen = False  # whether the host knows that it is over
        self._order = order
        self._ticket = ticket
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        self._lock = lock

    @property
    def is_over(self) -> bool:
        return self.error is not None or self.done == self.nbytes

    @property
    def moved(self) -> int:
        """Reading it tells this thread: operations that it queues from here on come after these bytes."""
        with self._lock:
            self._ticket.seen[threading.get_ident()] = self.done
            if self.is_over:
                self.is_seen = True
                self._order.seen(self._ticket)
            return self.done

    def when_moved(self, nbytes: int, callback: Callable[[], None]) -> None:
        with self._lock:
            self._waiting.append((nbytes, callback))
            self._tell()

    def advance(self, done: int, error: BaseException | None = None) -> None:
        with self._lock:
            self.done, self.error = done, error
            self._tell()

    def _tell(self) -> None:
        due = [each for each in self._waiting if self.error is not None or each[0] <= self.done]
        self._waiting = [each for each in self._waiting if each not in due]
        for _, callback in due:
            callback()


class Streams:
    """All streams of a device. Operations of one stream are carried out in the order in which they were queued."""

    def __init__(self, seed: int, turned_by: TurnedBy) -> None:
        self._random = np.random.default_rng(seed)
        self._queues: dict[str, deque[StreamWork]] = {}
        self.lock = threading.RLock()
        turners: dict[TurnedBy, type[_Turner]] = {"thread": _TurningThread, "loop": _Loop, "program": _Turner}
        self._turner = turners[turned_by](self)

    def add(self, operation: StreamWork) -> None:
        with self.lock:
            self._queues.setdefault(operation.ticket.stream, deque()).append(operation)
        self._turner.wake()

    def hold(self, ticket: Ticket) -> Callable[[], None]:
        """Add an operation that is over once the function that is returned has been called."""
        gate = StreamWork(ticket, iter(()))
        self.add(StreamWork(ticket, iter(()), [gate]))

        def release() -> None:
            with self.lock:
                gate.step()
            self._turner.wake()

        return release

    def turn(self) -> bool:
        """Let one operation go a step on. Returns whether there was one."""
        with self.lock:
            ready = [queue for queue in self._queues.values() if queue and queue[0].may_go_on()]
            if not ready:
                return False
            queue = ready[self._random.integers(len(ready))]
            queue[0].step()
            if queue[0].is_over:
                queue.popleft()
            return True

    def run(self) -> None:
        """Turn until all operations are over, but for those that wait for one that is held."""
        while self.turn():
            pass

    def pause_s(self) -> float:
        """Mostly 0."""
        return max(0.0, self._random.random() * 4 - 3) * _PAUSE_S

    def close(self) -> None:
        """Carry all operations out, and end what turns the streams."""
        self.run()
        self._turner.close()


class _Turner:
    """What turns the streams. This one does not: nothing moves until the program turns them itself."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def wake(self) -> None:
        """There is a new operation."""

    def close(self) -> None:
        """Stop turning."""


class _TurningThread(_Turner):
    """A thread turns the streams, with pauses of random length."""

    def __init__(self, streams: Streams) -> None:
        super().__init__(streams)
        self._is_closed = False
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._turn, name="asyncoll-fake-device", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._changed.set()

    def close(self) -> None:
        self._is_closed = True
        self._changed.set()
        self._thread.join()

    def _turn(self) -> None:
        pause = threading.Event()
        while not self._is_closed:
            self._changed.wait()
            self._changed.clear()
            while self._streams.turn():
                if pause_s := self._streams.pause_s():
                    pause.wait(pause_s)


class _Loop(_Turner):
    """Timers of the running loop turn the streams: for virtual time, in which a seed decides everything."""

    _timer: asyncio.TimerHandle | None = None

    def wake(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._streams.pause_s(), self._turn)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _turn(self) -> None:
        self._timer = None
        if self._streams.turn():
            self.wake()
