"""`Work`: a call under way, as torch.distributed knows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work as TorchWork

from asyncoll.runtime.handles import Handle


class Work(TorchWork):
    """One or more calls. `wait` returns when the outputs hold the results."""

    def __init__(
        self, handles: Sequence[Handle[Any]], outputs: Sequence[Any], deliver: Callable[[list[Any]], None] | None = None
    ) -> None:
        """`outputs` is the value of the future. `deliver` moves the results of all calls to the outputs, once."""
        super().__init__()
        self._handles = handles
        self._outputs = outputs
        self._deliver = deliver
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        limit_s = timeout.total_seconds() or None
        results = [handle.wait(limit_s) for handle in self._handles]
        deliver, self._deliver = self._deliver, None
        if deliver is not None:
            deliver(results)
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

    def result(self) -> Sequence[Any]:
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        if self._future is None:
            self._future = torch.futures.Future()
            left = len(self._handles)

            def ended() -> None:
                nonlocal left
                left -= 1
                if not left:
                    self._complete()

            for handle in self._handles:
                handle.when_done(ended)
            if not self._handles:
                self._complete()
        return self._future

    def _complete(self) -> None:
        assert self._future is not None
        try:
            self.wait()
        except Exception as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(self._outputs)
