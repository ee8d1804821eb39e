"""Standard streams that are closed, as those of some daemons."""

from __future__ import annotations

import os

_STDERR = 2


def fill_gaps() -> None:
    """Open /dev/null in place of each standard descriptor that is closed.

    Otherwise the next file or socket would take its number. libuv ends a process that closes one of those numbers, and
    a program that this one starts would write its output to it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
