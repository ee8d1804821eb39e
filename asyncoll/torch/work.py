"""`Work`: calls under way, as torch.distributed knows them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work as TorchWork

from asyncoll.runtime.handles import Handle

Deliver = Callable[[list[Any]], None]


class Work(TorchWork):
    """One or more calls of a process group.

    `wait` returns when the outputs hold the results: the caller may use them, or free them, at once. Callbacks of the
    future run in threads of their own, and may make and wait for further calls.
    """

    def __init__(self, handles: Sequence[Handle[Any]], outputs: Any, deliver: Deliver | None = None) -> None:
        """`outputs` is the value of the future. `deliver` moves the results of the calls to the outputs."""
        super().__init__()
        self._handles = handles
        self._outputs = outputs
        self._deliver = deliver
        self._delivering = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None
        self._left = len(handles)  # calls that are not over; counted once there is a future

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all calls. After `timeout`, unless that is 0, TimeoutError is raised, and the calls go on."""
        limit_s = timeout.total_seconds() or None
        results = [handle.wait(limit_s) for handle in self._handles]
        if self._deliver is not None:
            with self._delivering:
                if self._deliver is not None:
                    self._deliver(results)
                    self._deliver = None
        return True

    def is_completed(self) -> bool:
        return all(handle.done() for handle in self._handles)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        try:
            self.wait()
        except Exception as error:
            return error
        return None

    def result(self) -> Any:
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        if self._future is None:
            self._future = torch.futures.Future()
            if not self._handles:
                self._future.set_result(self._outputs)
            for handle in self._handles:
                handle.when_done(self._count)
        return self._future

    def _count(self) -> None:
        self._left -= 1  # in the thread of the runtime, or before this rank has another thread for it
        if not self._left:
            threading.Thread(target=self._complete, name="asyncoll-future", daemon=True).start()

    def _complete(self) -> None:
        future = self._future
        assert future is not None
        try:
            self.wait()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(self._outputs)
