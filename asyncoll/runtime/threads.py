"""What the runtime needs of the program: threads of the system, and an event loop of asyncio."""

import _thread
import asyncio
import socket
import types
from typing import NoReturn

from asyncoll.errors import UsageError


def check_threads() -> None:
    """Raise UsageError if gevent or eventlet has replaced threads, or sockets that only its own threads can use.

    The runtime's loop would then run in the thread of the program's loop, and neither could go on. Sockets of gevent
    work in any thread.
    """
    start: object = _thread.start_new_thread
    if not isinstance(start, types.BuiltinFunctionType):
        _refuse("threads", getattr(start, "__module__", None))
    elif socket.socket.__module__.startswith("eventlet."):
        _refuse("sockets", socket.socket.__module__)


def _refuse(what: str, module: object) -> NoReturn:
    library = str(module or "a library").partition(".")[0]
    raise UsageError(
        f"{library} has replaced the {what} of Python (monkey patching), and asyncoll needs those of the system: leave "
        "them alone, as `gevent.monkey.patch_all(thread=False)` or `eventlet.monkey_patch(thread=False, socket=False)` "
        "do, or use asyncoll in a process without the patch"
    )


def program_loop() -> asyncio.AbstractEventLoop:
    """The running loop of this thread. Raises UsageError if there is none, as under trio or curio."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise UsageError(
            "asyncoll runs on asyncio, and no event loop of asyncio runs in this thread: start the program by "
            "`asyncoll.run` or `asyncio.run`; under trio or another library of coroutines call `asyncoll.init`, and "
            "`Handle.wait`, in a thread (as by `trio.to_thread.run_sync`)"
        ) from None
