"""The futures of calls, and the threads that complete them: callbacks run there, and may wait for further calls."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from asyncoll.runtime.handles import Gate, waiting_threads

_IDLE_S = 10.0  # a thread without work ends after so long
_ANOTHER_END = Gate()  # never open: a thread without work waits for the end of another call


def future_of(tensors: Iterable[Tensor]) -> torch.futures.Future[Any]:
    """A future whose value, or that of a future that follows it, has `tensors`.

    With tensors of CUDA, torch notes where the current streams of the thread that completes it are. The streams of who
    waits for it, and those of callbacks, which torch chooses, wait for these points.
    """
    devices = {x.device for x in tensors if not x.is_cpu}
    return torch.futures.Future(devices=list(devices)) if devices else torch.futures.Future()


class FutureThreads:
    """Runs functions, each at once. A thread that has nothing to do is used again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = 0  # threads that wait, less the functions in the queue
        self._count = 0  # of all threads
        self._queue = queue.SimpleQueue[Callable[[], None]]()

    def run(self, function: Callable[[], None]) -> None:
        """Call `function`, which must not raise, in one of the threads; in this one if the system refuses a first one.

        If it refuses a further one, `function` waits until a thread has nothing to do.
        """
        with self._lock:
            is_one_free = self._free > 0
            self._free -= is_one_free
        if is_one_free:
            self._queue.put(function)
            return
        thread = threading.Thread(target=self._serve, args=(function,), name="asyncoll-future", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the limit of threads is reached
            with self._lock:
                is_one_left = self._count > 0
                self._free -= is_one_left
            if is_one_left:
                self._queue.put(function)
            else:
                function()

    def _serve(self, function: Callable[[], None]) -> None:
        with self._lock:
            self._count += 1
        while True:
            function()
            # It holds the tensors of its call.
            del function
            with self._lock:
                self._free += 1
            while True:
                try:
                    waiting_threads[threading.get_ident()] = _ANOTHER_END
                    function = self._queue.get(timeout=_IDLE_S)
                    break
                except queue.Empty:
                    with self._lock:
                        # Otherwise a function is about to be in the queue.
                        if self._free > 0:
                            self._free -= 1
                            self._count -= 1
                            return
                finally:
                    del waiting_threads[threading.get_ident()]


threads = FutureThreads()
os.register_at_fork(after_in_child=threads.__init__)  # type: ignore[misc]  # a child has none of them
