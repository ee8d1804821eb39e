"""The parts of a rank that its forked children give up: connections, shared memory and event loops.

A forked child has copies of all descriptors and mappings of its parent, and none of its threads. A connection that the
child keeps open looks to peers like a living parent. Data that the child writes to shared memory reaches all ranks. So
every object that owns such a resource registers here. In the child it gives the resource up before any other code runs.
The parent waits for that, so that the child gets its copies of tensors before the parent changes them.

Python runs these hooks whenever it forks: in `os.fork`, in multiprocessing, for the workers of a DataLoader. It does
not run them if C code forks, or if a program is executed at once (subprocess); there the kernel closes the descriptors
and mappings.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import io
import ipaddress
import logging
import os
import select
import signal
import socket
import threading
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from asyncoll.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

Identity = tuple[int, int]  # of a file: its device and inode
logger = logging.getLogger("asyncoll")


class Owner(Protocol):
    """An object that owns resources which a forked child must give up."""

    def abandon(self, parent: int) -> None:
        """Give them up; called in a forked child of process `parent`.

        This must not wait for any lock: the thread that holds it may not exist in the child.
        """


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()
_parent = 0  # the process in which the owners have registered
_forking = threading.RLock()  # held from before a fork until after it, because the pipe belongs to one fork
_pipe: tuple[io.FileIO, io.FileIO] | None = None  # the parent waits until the child has closed it
_PATIENCE_S = 10.0  # how long a fork waits for the fork of another thread
_open: dict[Identity, list[int]] = {}  # in a child: its descriptors, by file
_given_up: set[int] = set()  # in a child: the descriptors that it gives up
_arrays: dict[int, weakref.ref[np.ndarray[Any, Any]]] = {}  # the arrays that a child gets copies of, by id


def register(owner: Owner) -> None:
    """Call `owner.abandon` in every forked child, as long as `owner` exists."""
    global _parent
    _parent = os.getpid()
    _owners.add(owner)


def unregister(owner: Owner) -> None:
    """Forget `owner`: it has nothing more to give up."""
    _owners.discard(owner)


def _before() -> None:
    """The hook before a fork; it repeats `_prepare` until that succeeds.

    Signal handlers may raise in it. Python ignores an exception in such a hook, and forks. The same holds for
    `_after_in_parent`.
    """
    while True:
        try:
            return _prepare()
        except BaseException:
            continue


def _after_in_parent() -> None:
    global _pipe
    pipe, _pipe = _pipe, None
    while True:
        try:
            return _await_child(pipe)
        except BaseException:
            continue


def _prepare() -> None:
    global _pipe
    _forking.acquire(timeout=_PATIENCE_S)
    if _owners and _pipe is None:
        with contextlib.suppress(OSError):  # too many open files: the parent does not wait
            _pipe = _files(*os.pipe())


def _files(reader: int, writer: int) -> tuple[io.FileIO, io.FileIO]:
    """Both ends as file objects. Closing them twice does no harm, and they close themselves if they are lost."""
    return io.FileIO(reader), io.FileIO(writer, "wb")


def _await_child(pipe: tuple[io.FileIO, io.FileIO] | None) -> None:
    if pipe is not None:
        # Before another thread may fork, because its child must not inherit it.
        pipe[1].close()
    # The loop ends with this error: this thread no longer holds the lock.
    with contextlib.suppress(RuntimeError):
        while True:
            _forking.release()
    if pipe is not None and not pipe[0].closed:
        pipe[0].read(1)  # returns at the end of the file: the child has finished or died, or the fork has failed
        pipe[0].close()


def _after_in_child() -> None:
    global _forking, _pipe
    pipe, _forking, _pipe = _pipe, threading.RLock(), None
    if not _owners:
        return
    _list_descriptors()
    for owner in list(_owners):
        try:
            owner.abandon(_parent)
        except Exception:
            logger.exception("a forked child could not give up all that belongs to process %d", _parent)
    _replace(_given_up)
    for done in (_owners, _open, _given_up, _arrays):
        done.clear()
    for end in pipe or ():
        end.close()


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)


# -- descriptors ----------------------------------------------------------------------------------


def _list_descriptors() -> None:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            _open.setdefault(identity(int(name)), []).append(int(name))


def identity(descriptor: int) -> Identity:
    """The file that `descriptor` refers to."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def copies_of(file: Identity) -> list[int]:
    """The descriptors of this child that refer to `file`. For `abandon`."""
    return list(_open.get(file, ()))


def give_up(descriptors: Iterable[int]) -> None:
    """Let these descriptors of a child refer to nothing, after all owners have been called."""
    _given_up.update(descriptors)


def _replace(descriptors: Iterable[int]) -> None:
    """Let the descriptors refer to an unused eventfd.

    The numbers stay in use, because their owners may still close them, and would then close another file. An eventfd
    can be watched, which a loop that the child leaves may still do.
    """
    nothing = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    for descriptor in descriptors:
        os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


def give_up_connections(addresses: Iterable[str]) -> None:
    """Give up the sockets that listen at one of `addresses`, or are connected from or to one.

    These are `ipc://path` or `tcp://ip:port`, in any spelling.
    """
    known = set(map(canonical, addresses))
    for descriptors in _open.values():
        give_up(descriptor for descriptor in descriptors if known.intersection(ends_of(descriptor)))


def ends_of(descriptor: int) -> Iterator[str]:
    """Both `canonical` addresses of a stream socket, as far as it has them; nothing for any other descriptor."""
    try:
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
            return
        connection = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return
    with connection:
        for end in (connection.getsockname, connection.getpeername):
            # The socket may not be connected.
            with contextlib.suppress(OSError):
                match end():
                    case str(path):
                        yield f"ipc://{path}"
                    case host, port:
                        yield f"tcp://{host}:{port}"
                    case host, port, _, zone:
                        yield canonical(f"tcp://[{host}%{zone}]:{port}")


def canonical(address: str) -> str:
    """`address` in the one spelling that can be compared: an IPv6 address has many, also for its zone."""
    if not address.startswith("tcp://["):
        return address.replace("tcp://localhost:", "tcp://127.0.0.1:")
    host, _, port = address.removeprefix("tcp://[").rpartition("]")
    host, _, zone = host.partition("%")
    try:
        known = ipaddress.IPv6Address(host)
        # Another address means the same in every zone.
        if not known.is_link_local:
            zone = "0"
        elif not zone.isdigit():
            zone = str(socket.if_nametoindex(zone))
    except (ValueError, OSError):  # no socket of this host has this address
        return address
    return f"tcp://[{known.compressed}%{zone}]{port}"


# -- memory ---------------------------------------------------------------------------------------


def copy_for_children(array: np.ndarray[Any, Any]) -> None:
    """Give each forked child a copy of `array`, a flat array of bytes in shared memory, as long as `array` exists."""
    key = id(array)
    _arrays[key] = weakref.ref(array, lambda _: _arrays.pop(key, None))


def arrays_within(start: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Address and number of bytes of those arrays that start in this range of addresses."""
    for array in [reference() for reference in list(_arrays.values())]:
        if array is not None and start <= (address := address_of(array)) < start + nbytes:
            yield address, array.nbytes


def address_of(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


# -- what a child is told -------------------------------------------------------------------------


def refusal(parent: int) -> UsageError:
    """The error for a forked child of process `parent` that uses the world of its parent."""
    return UsageError(
        f"this communicator belongs to process {parent}, and process {os.getpid()} is a forked child of it: call it in "
        f"process {parent} alone, and hand the child what it needs before the fork, or through a pipe"
    )


# -- loops ----------------------------------------------------------------------------------------


def isolate(loop: asyncio.AbstractEventLoop) -> None:
    """Give a forked child its own epoll and its own wake-up descriptors, in place of those that `loop` shares.

    A child that closes or runs the loop would otherwise remove the parent's descriptors from the parent's epoll, and
    consume the parent's wake-ups. This is for loops that the child leaves; they serve no other purpose afterwards.
    """
    if loop.is_closed():
        return
    number = getattr(loop, "_get_backend_id", None) or getattr(getattr(loop, "_selector", None), "fileno", None)
    if number is None:  # a loop in virtual time
        return
    epoll: int = number()
    with select.epoll() as fresh:
        for descriptor, events in _watched(epoll):
            if _renew(loop, descriptor):
                fresh.register(descriptor, events)
        os.dup2(fresh.fileno(), epoll, inheritable=False)


def _watched(epoll: int) -> list[tuple[int, int]]:
    """The descriptors that `epoll` watches, and for which events."""
    lines = [line.split() for line in Path(f"/proc/self/fdinfo/{epoll}").read_text().splitlines()]
    return [(int(line[1]), int(line[3], 16)) for line in lines if line and line[0] == "tfd:"]


def _renew(loop: Any, descriptor: int) -> bool:
    """Replace `descriptor`, if it wakes `loop`, by one of this process's own. Returns whether it does."""
    if os.readlink(f"/proc/self/fd/{descriptor}") == "anon_inode:[eventfd]":  # of uvloop
        fresh = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        os.dup2(fresh, descriptor, inheritable=False)
        os.close(fresh)
        return True
    reader, writer = getattr(loop, "_ssock", None), getattr(loop, "_csock", None)  # of asyncio
    if reader is None or writer is None or reader.fileno() != descriptor:
        return False
    ends = socket.socketpair()
    for end, old in zip(ends, (reader, writer), strict=True):
        with end:
            end.setblocking(False)
            os.dup2(end.fileno(), old.fileno(), inheritable=False)
    return True


def silence_signals() -> None:
    """Stop Python from reporting the child's signals to the parent's loop. Python 3.12 does this itself."""
    # This may not be the main thread, which alone may do it.
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)


def keep(thing: object) -> None:
    """Never destroy `thing`: its finalizer would fail in a process that did not make it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
