"""Waiting, in a thread without an event loop, for work that makes several calls."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar, cast

import torch

from asyncoll.blocking import BlockingCommunicator
from asyncoll.runtime.handles import Handle, HandleRunner

T = TypeVar("T")


def complete(comm: BlockingCommunicator, work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that awaits calls of `comm`. It runs on the runtime's loop, with this deadline.

    An exception of a signal handler (Ctrl-C) ends the wait, and the work goes on, as a call does.
    """
    runner = cast(HandleRunner, comm._core.member.runner)
    handle: Handle[T] = runner.start(work)
    return handle.wait()


def complete_on(device: torch.device, comm: BlockingCommunicator, work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that awaits calls of `comm`, on tensors of `device`.

    The runtime's thread has a current stream of its own. So the work that the program has queued is over before, and
    that of `work` afterwards: the host waits.
    """
    if device.type != "cuda":
        return complete(comm, work)
    torch.cuda.synchronize(device)
    result = complete(comm, work)
    torch.cuda.synchronize(device)
    return result
