"""What a GPU changes for the hooks of `backward()`: the thread that runs them, and the streams of the gradients.

torch computes the gradients of a GPU in a thread of its own, which also runs their hooks. `set_multithreading_enabled`
turns that off for a thread that calls `backward()`, which waits for the other one in any case.

torch runs a hook with a current stream that is the one on which the forward pass has used the parameter. Streams are
joined at the end of `backward()` only.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from typing import Any

import torch


class _Mode(threading.local):
    """The mode of autograd in this thread."""

    users = 0  # how many need it
    changed: torch.autograd.grad_mode.set_multithreading_enabled | None = None  # for the first of them


_mode = _Mode()


def compute_here(trainer: object) -> weakref.finalize[Any, Any]:
    """From here on, `backward()` of this thread computes all gradients in this thread, and runs all hooks in it.

    That lasts until the result is called, in this thread, or `trainer` is gone: a training that ends by an exception
    has no other end. The last one gives this thread back the mode that it had.
    """
    if not _mode.users:
        _mode.changed = torch.autograd.grad_mode.set_multithreading_enabled(False)
    _mode.users += 1
    undo = weakref.finalize(trainer, _undo, threading.get_ident(), asyncio.get_running_loop())
    undo.atexit = False
    return undo


def _undo(thread: int, loop: asyncio.AbstractEventLoop) -> None:
    """`compute_as_before` in the thread, which `loop` runs in. The garbage collector may call it in any other."""
    if threading.get_ident() == thread:
        _compute_as_before()
        return
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(_compute_as_before)


def _compute_as_before() -> None:
    _mode.users -= 1
    if not _mode.users and _mode.changed is not None:
        _mode.changed.__exit__(None, None, None)


class GradientStreams:
    """The streams of a GPU on which gradients were computed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: set[torch.cuda.Stream] = set()

    def note(self) -> None:
        """In the hook of a gradient."""
        self._streams.add(torch.cuda.current_stream(self._device))

    def join(self) -> None:
        """Work that is queued on the current stream from here on comes after all gradients that were noted."""
        current = torch.cuda.current_stream(self._device)
        for stream in self._streams - {current}:
            current.wait_stream(stream)
