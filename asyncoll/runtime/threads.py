"""What the runtime needs of the program: threads of the system, and an event loop of asyncio."""

import _thread
import asyncio
import types

from asyncoll.errors import UsageError


def check_threads() -> None:
    """Raise UsageError if a library, such as gevent or eventlet, has replaced threads by something of its own.

    The runtime's loop would then run in the thread of the program's loop, and neither could go on.
    """
    start: object = _thread.start_new_thread
    if not isinstance(start, types.BuiltinFunctionType):
        library = str(getattr(start, "__module__", "")).partition(".")[0] or "a library"
        raise UsageError(
            f"{library} has replaced the threads of Python (monkey patching), and asyncoll needs those of the system: "
            "leave threads alone, as `gevent.monkey.patch_all(thread=False)` or `eventlet.monkey_patch(thread=False)`, "
            "or use asyncoll in a process without the patch"
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
