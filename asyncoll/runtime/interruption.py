"""Whether a signal handler may raise an exception in this thread, between any two bytecodes.

Python runs signal handlers in the main thread. A handler that raises (a watchdog's SIGALRM, `sys.exit` at SIGTERM, the
SIGCHLD handler of torch's DataLoader) interrupts the code that runs there at any point, also inside a critical section
of shared memory. Python code cannot protect a critical section from it. So while the program has such a handler, the
main thread leaves all work on shared memory to the runtime's thread, where no handler runs.
"""

from __future__ import annotations

import functools
import signal
import threading
from _signal import getsignal as _getsignal  # type: ignore[import-not-found]  # `signal`'s takes 0.5 us for its enum
from collections.abc import Callable
from typing import Any

# Without the real-time signals: programs rarely handle them, and to check them would take half of the time.
_SIGNALS = tuple(int(number) for number in signal.valid_signals() if number < signal.SIGRTMIN)
# Modules whose handlers do not raise: those of event loops schedule a callback, and asyncio's handler of SIGINT cancels
# the main task the first time.
_LOOPS = ("asyncio.", "uvloop.")


def may_interrupt() -> bool:
    """Whether a signal handler may raise in the calling thread: in the main thread, if the program has handlers."""
    return threading.get_ident() == threading.main_thread().ident and handlers_may_raise()


def handlers_may_raise() -> bool:
    """Whether the program has signal handlers of its own. Takes about a microsecond.

    The answer is found anew each time: a handler that is kept would keep what it refers to. That of asyncio refers to
    the main task, and its error to the whole world.
    """
    return any(map(_may_raise, filter(callable, map(_getsignal, _SIGNALS))))


def handlers_may_run() -> bool:
    """Whether a signal may have the program do something: as `handlers_may_raise`, and real-time signals count."""
    real_time = range(signal.SIGRTMIN, signal.SIGRTMAX + 1)
    return handlers_may_raise() or any(callable(_getsignal(number)) for number in real_time)


def _may_raise(handler: Callable[..., Any]) -> bool:
    # Python's own handler of SIGINT raises, too. It does not count, because it ends the program. Every Python program
    # has it unless it sets another: if it counted, the main thread could never work on shared memory.
    if handler is signal.default_int_handler:
        return False
    function = handler.func if isinstance(handler, functools.partial) else handler
    return not str(getattr(function, "__module__", "")).startswith(_LOOPS)
