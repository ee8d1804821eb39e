"""Typed stubs: objects with the methods of a class, each of which calls the method of that name at a peer."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cache, partial
from typing import Annotated, Any, NamedTuple, TypeVar

from asyncoll.arguments import text
from asyncoll.errors import MismatchError, UsageError
from asyncoll.rpc import hints
from asyncoll.rpc.client import Client, Request
from asyncoll.rpc.device_place import DevicePlace
from asyncoll.rpc.service import METHODS, Function, Method, Parameter, public_methods
from asyncoll.runtime.uncopied import Uncopied

S = TypeVar("S")
Proxy = Annotated[S, "the methods run at a peer"]  # to a type checker `Proxy[Service]` is a Service
_description = cache(partial(hints.dataclasses_in, (Method,)))  # what an answer to METHODS may contain


class Peer(NamedTuple):
    """A peer that can be called."""

    client: Client
    number: int  # as the carrier of `client` numbers its peers
    name: str  # in errors
    place: DevicePlace | None = None  # for tensors in results


async def methods(peer: Peer) -> list[Method]:
    """The descriptions of the functions at `peer`."""
    found: list[Method] = await peer.client.call(Request(peer.number, METHODS, (), {}, _description()))
    return found


def stub(peer: Peer, cls: Callable[..., S], name: str | None) -> Proxy[S]:
    """An object with the methods of the class `cls`, which call the object that is registered at `peer` as `name`.

    `cls` must be a class. It is annotated as a callable, because type checkers reject a Protocol as `type[S]`.
    """
    return _Stub(peer, cls, name)  # type: ignore[return-value]


class _Stub(Uncopied):
    """An object whose methods are those of a class and run at a peer."""

    def __init__(self, peer: Peer, cls: Any, name: str | None) -> None:
        if not isinstance(cls, type):
            raise UsageError(f"a stub is described by a class, got {cls!r:.60}")
        prefix = f"{text(name, 'name')}." if name else ""
        self._peer = peer
        self._class_name = cls.__qualname__
        self._functions = {own: _described(prefix + own, cls, own, method) for own, method in public_methods(cls)}
        self._has_been_matched = False

    def __repr__(self) -> str:
        return f"<{self._class_name} at {self._peer.name}>"

    def _title(self) -> str:
        return f"a proxy of {self._class_name}"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # Such names are of protocols, such as those of `copy`: they are no functions of the peer.
        if name.startswith("_"):
            raise AttributeError(name)
        function = self._functions.get(name)
        if function is None:
            raise AttributeError(f"{self._class_name} has no public method {name!r}")

        method = partial(self._stream if function.streams else self._call, function)
        self.__dict__[name] = method  # found without `__getattr__` from now on
        return method

    async def _call(self, function: Function, /, *args: Any, **kwargs: Any) -> Any:
        result = await self._peer.client.call(await self._request(function, args, kwargs))
        function.check_result(result)
        return result

    async def _stream(self, function: Function, /, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        items = self._peer.client.stream(await self._request(function, args, kwargs))
        try:
            async for item in items:
                function.check_result(item)
                yield item
        finally:
            await items.aclose()

    async def _request(self, function: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Request:
        """A call of `function`, once the methods match those at the peer."""
        if not self._has_been_matched:
            await self._match()
        return Request(self._peer.number, function.name, args, kwargs, function.types, self._peer.place)

    async def _match(self) -> None:
        """Compare the methods with those at the peer. Raises MismatchError."""
        there = {method.name: method for method in await methods(self._peer)}
        for function in self._functions.values():
            mine, found = function.describe(), there.get(function.name)
            if found is None or not _matches(mine, found):
                shown = found if found is not None else "nothing of that name"
                hint = ""
                if found is not None and found.streams and not mine.streams:
                    hint = f": declare it {_as_stream(mine.name, found.returns)}"
                raise MismatchError(
                    f"the stub {self._class_name} says {mine}, but at {self._peer.name} there is {shown}{hint}"
                )
        self._has_been_matched = True


def _described(name: str, cls: type, own: str, method: Callable[..., Any]) -> Function:
    is_unbound = not isinstance(inspect.getattr_static(cls, own), staticmethod | classmethod)
    function = Function(name, method, is_unbound=is_unbound)
    if function.is_coroutine and hints.is_stream(function.returns):
        items = hints.text(hints.items(function.returns))
        raise UsageError(
            f"{cls.__qualname__}.{own} is `async def`, so a caller awaits it before the stream: "
            f"declare it {_as_stream(own, items)}"
        )
    if not (function.is_coroutine or function.streams):
        raise UsageError(
            f"{cls.__qualname__}.{own} is a plain function, but is awaited where it runs elsewhere: make it `async def`"
        )
    return function


def _as_stream(name: str, items: str) -> str:
    """How a stub declares a stream. The body of an async generator makes one of `async def`; a Protocol has none."""
    return f"`def {name.rpartition('.')[2]}(...) -> AsyncIterator[{items or 'Any'}]`, without `async`"


def _matches(mine: Method, there: Method) -> bool:
    """Whether the service accepts every call that the stub allows."""
    if mine.streams != there.streams or not _agree(mine.returns, there.returns):
        return False
    if not all(map(_parameters_match, mine.parameters, there.parameters)):
        return False
    beyond = there.parameters[len(mine.parameters) :]
    return len(mine.parameters) <= len(there.parameters) and all(parameter.has_default for parameter in beyond)


def _parameters_match(mine: Parameter, there: Parameter) -> bool:
    same = (mine.name, mine.kind) == (there.name, there.kind)
    return same and _agree(mine.annotation, there.annotation) and (there.has_default or not mine.has_default)


def _agree(mine: str, there: str) -> bool:
    return not mine or not there or mine == there
