"""The streams of a fake device: queues of operations, of which one at random goes a step on at each turn."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol

import numpy as np

from asyncoll.testing.devices.order import Ticket

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


class Streams:
    """All streams of a device. Operations of one stream are carried out in the order in which they were queued."""

    def __init__(self, seed: int, turned_by: TurnedBy) -> None:
        self._random = np.random.default_rng(seed)
        self._queues: dict[str, deque[StreamWork]] = {}
        self.lock = threading.RLock()
        turners: dict[str, Callable[[Streams], _Turner]] = {
            "thread": _TurningThread,
            "loop": _Loop,
            "program": _ProgramTurns,
        }
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


class _Turner(Protocol):
    """What turns the streams."""

    def wake(self) -> None:
        """There is a new operation."""

    def close(self) -> None: ...


class _ProgramTurns:
    """The program turns the streams itself: nothing moves until it does."""

    def __init__(self, streams: Streams) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class _TurningThread:
    """A thread turns the streams, with pauses of random length."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
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


class _Loop:
    """Timers of the running loop turn the streams: for virtual time, in which a seed decides everything."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._timer: asyncio.TimerHandle | None = None

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
