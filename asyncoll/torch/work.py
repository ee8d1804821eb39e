"""`Work`: calls under way, as torch.distributed knows them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import torch
from torch.distributed import Work as TorchWork

from asyncoll.runtime.deadlines import now_s
from asyncoll.runtime.handles import Handle
from asyncoll.runtime.uncopied import Uncopied
from asyncoll.torch import recording
from asyncoll.torch.errors import WaitTimeoutError, of_torch
from asyncoll.torch.futures import future_of, threads
from asyncoll.torch.uncompiled import uncompiled

_making = threading.Lock()  # of the future of a work


def _renew_lock() -> None:
    """In a forked child: another thread of the parent may have had the lock."""
    global _making
    _making = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


class Work(Uncopied, TorchWork):
    """One or more calls of a process group.

    `wait` returns when the outputs hold the results: the caller may use them, or free them, at once. With outputs on a
    device it returns when their results are on the way, and the current stream of its thread waits for them. Another
    method that tells that the calls are over does the same. The calls go on whether or not anything waits, and also if
    this object is dropped. Any thread may call the methods. Until the end of the calls the program must not resize the
    storages of their tensors, as with every backend; it may drop the tensors.

    Callbacks of the future run in threads of their own, or in the thread that waits, and may wait for further calls.
    """

    def __init__(self, handles: Sequence[Handle[Any]], outputs: list[Any], record: Any = None) -> None:
        """`outputs` is the value of the future; `record` is of `recording.begin`."""
        super().__init__()
        self.handles = handles
        self._outputs = outputs
        self._begun: torch.futures.Future[None] | None = None  # completed to complete the next one
        self._future: torch.futures.Future[Any] | None = None
        self._completions = count()
        self._recorded: torch.futures.Future[Any] | None = None
        if record is not None:
            self._make_future(record)

    # -- the end of the calls ---------------------------------------------------------------------

    @uncompiled
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until all calls are over.

        Args:
            timeout: unless it is 0, the longest time to wait. The calls go on afterwards.

        Raises:
            TimeoutError: the calls are not over after `timeout`; also a DistBackendError.
            DistBackendError: a call has failed. It is also the error of the library: PeerLostError, MismatchError,
                AbortedError, DeadlineError, ClosedError.
        """
        seconds = timeout.total_seconds()
        ends_s = now_s() + seconds if seconds > 0 else None
        try:
            for handle in self.handles:
                handle.wait(None if ends_s is None else ends_s - now_s())
        except TimeoutError as error:
            raise WaitTimeoutError(f"Timed out waiting: {error}") from None
        except Exception as error:
            self._settle()
            raise of_torch(error) from None
        self._settle()
        return True

    def synchronize(self) -> None:
        """Wait for the calls, without a limit."""
        self.wait()

    @uncompiled
    def is_completed(self) -> bool:
        """Whether all calls are over, in success or not."""
        if not self._are_over():
            return False
        for handle in self.handles:
            handle.resume()
        return True

    def _are_over(self) -> bool:
        return all(handle.done() for handle in self.handles)

    def is_success(self) -> bool:
        """Whether all calls are over, and none has failed."""
        return self.is_completed() and self.exception() is None

    @uncompiled
    def exception(self) -> BaseException | None:
        """The error of the first call that has failed; None if none has, or if they are not all over."""
        if not self._are_over():
            return None
        for handle in self.handles:
            try:
                handle.wait()
            except Exception as error:
                return of_torch(error)
        return None

    def result(self) -> list[Any]:
        """The outputs. They hold the results after `wait`."""
        return self._outputs

    def source_rank(self) -> int:
        """The rank in the group that has sent the message of a `recv`, which this waits for.

        Raises RuntimeError for other calls.
        """
        source = self.handles[0].wait() if self.handles else None
        if not isinstance(source, int):
            raise RuntimeError("only a receive has a source")
        return source

    _source_rank = source_rank

    # -- the future -------------------------------------------------------------------------------

    @uncompiled
    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the outputs, as a list. If a call fails, waiting for it raises a RuntimeError with the text."""
        return self._future or self._make_future()

    def get_future_result(self) -> torch.futures.Future[int]:
        """A future of 0 for success; of 1 after a deadline, and 2 after any other error."""
        made: torch.futures.Future[int] = torch.futures.Future()
        self.get_future().add_done_callback(lambda _: made.set_result(self._outcome()))
        return made

    def _outcome(self) -> int:
        error = self.exception()
        return 0 if error is None else 1 if isinstance(error, TimeoutError) else 2

    def _make_future(self, record: Any = None) -> torch.futures.Future[Any]:
        with _making:
            if self._future is not None:
                return self._future
            # An exception that is set in Python is a value for C++. One that a callback raises is an error.
            begun = self._begun = future_of(self._outputs)
            self._future = begun.then(self._value)
            if record is not None:
                self._recorded = recording.end_with(record, self._future)
        if record is None and self._are_over():  # DDP reads the value of a future of what it has waited for
            self._complete()
            return self._future
        ended = count(1)

        def end() -> None:
            if next(ended) == len(self.handles):
                threads.run(self._complete)

        for handle in self.handles:
            handle.when_done(end)
        return self._future

    def _value(self, _: Any) -> list[Any]:
        error = self.exception()
        if error is not None:
            raise error
        return self._outputs

    def _complete(self) -> None:
        """Complete the future, unless another thread has begun to."""
        begun = self._begun
        if begun is not None and not next(self._completions):
            begun.set_result(None)

    def _settle(self) -> None:
        """All calls are over: return when the future is completed, too, if there is one."""
        future = self._recorded or self._future
        if future is None:
            return
        # Otherwise it was made in another thread: a record that ends in this one is no asynchronous one.
        if self._recorded is None:
            self._complete()
        # The error of the call, which `wait` raises.
        with contextlib.suppress(RuntimeError):
            future.wait()
