"""Functions of a server as steps: a plain one, and a coroutine that is awaited after its first step was made."""

from __future__ import annotations

import contextvars
import inspect
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any


def plain(fn: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call a plain function."""
    try:
        return fn(*args, **kwargs)
    # In a coroutine it would count as the end of that.
    except StopIteration as error:
        raise RuntimeError(f"{fn!r} raised StopIteration") from error


async def awaited(result: Awaitable[Any]) -> Any:
    return await result


async def outcome(result: Any, error: BaseException | None) -> Any:
    """The outcome of a plain function: its exception, or its result; if that is an awaitable, the result of that."""
    if error is not None:
        raise error
    return await result if inspect.isawaitable(result) else result


@types.coroutine
def resumed(steps: Coroutine[Any, Any, Any], waits_for: Any, context: contextvars.Context) -> Generator[Any, Any, Any]:
    """Await a coroutine whose first step was made, in `context`, and has yielded `waits_for`."""
    try:
        while True:
            try:
                value = yield waits_for
            except GeneratorExit:
                context.run(steps.close)
                raise
            except BaseException as error:
                waits_for = context.run(steps.throw, error)
            else:
                waits_for = context.run(steps.send, value)
    except StopIteration as end:
        return end.value
