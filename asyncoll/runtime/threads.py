"""Whether the threads of Python are those of the system, which the runtime needs."""

import _thread
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
