"""The user's signals, as bytes on a socket that a loop can wait for."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stop_signals() -> Iterator[socket.socket]:
    """A socket. Each byte read from it is the number of a signal. Signals that are ignored (nohup) stay ignored."""
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        before = {signum: signal.getsignal(signum) for signum in STOPPING}
        taken = [signum for signum in STOPPING if before[signum] is not signal.SIG_IGN]
        wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for signum in taken:
            signal.signal(signum, lambda *_: None)
        try:
            yield reader
        finally:
            for signum in taken:
                signal.signal(signum, before[signum])
            signal.set_wakeup_fd(wakeup)
