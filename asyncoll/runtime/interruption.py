"""Whether a signal handler may raise an exception in this thread, between any two steps of Python.

Python runs signal handlers in the main thread. One that raises (a watchdog's SIGALRM, `sys.exit` at SIGTERM, the
SIGCHLD handler of torch's DataLoader) ends whatever that thread does, also what must not be left half done. So as long
as there is such a handler, the main thread leaves all work on shared memory to the runtime's thread.
"""

from __future__ import annotations

import functools
import signal
import threading
from _signal import getsignal as _getsignal  # type: ignore[import-not-found]  # `signal`'s takes 0.5 us for its enum
from collections.abc import Callable
from typing import Any

# Those of real time are left out: they have no meaning of their own, and would be half of the time.
_SIGNALS = tuple(int(number) for number in signal.valid_signals() if number < signal.SIGRTMIN)
# The handlers of event loops only make a note, and asyncio's for SIGINT cancels the main task the first time.
_LOOPS = ("asyncio.", "uvloop.")

_known: tuple[tuple[object, ...], bool] = ((), False)  # the handlers at the last look, and whether one may raise


def may_interrupt() -> bool:
    """Whether a signal handler may raise in the thread that asks: the main one, if the program has such handlers."""
    return threading.get_ident() == threading.main_thread().ident and handlers_may_raise()


def handlers_may_raise() -> bool:
    """Whether the program has signal handlers of its own. Takes some us."""
    global _known
    handlers = tuple(map(_getsignal, _SIGNALS))
    if handlers != _known[0]:
        _known = handlers, any(map(_may_raise, handlers))
    return _known[1]


def _may_raise(handler: Callable[..., Any] | int | None) -> bool:
    if not callable(handler) or handler is signal.default_int_handler:
        return False
    function = handler.func if isinstance(handler, functools.partial) else handler
    return not str(getattr(function, "__module__", "")).startswith(_LOOPS)
