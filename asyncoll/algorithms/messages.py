"""Sends and receives of tensors, as the public calls make them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol, TypeVar

from asyncoll.algorithms.calls import Calls
from asyncoll.algorithms.seam.collectives import Collectives
from asyncoll.errors import describe
from asyncoll.runtime.member import Member
from asyncoll.runtime.signature import Signature, Site
from asyncoll.tensors.operands import Placed, staged_parts
from asyncoll.tensors.reductions import Array

T = TypeVar("T")


class Content(Placed, Protocol):
    """A tensor that is sent or received."""

    @property
    def flat(self) -> Array:
        """Its elements, or a copy of them; of a received tensor the room for them."""

    @property
    def dtype(self) -> str: ...

    @property
    def elements(self) -> int:
        """How many it has."""

    def write_back(self) -> None:
        """Put what was received in `flat` into the caller's tensor."""


class Messages:
    """The sends and receives of one rank. All checks of arguments come before. `site` is the line that makes a call."""

    def __init__(self, member: Member, calls: Calls) -> None:
        self._member = member
        self._calls = calls
        self._rank = member.group.rank

    def send(self, x: Content, dest: int, tag: int, site: Site) -> Coroutine[Any, Any, None]:
        """Start to send `x` to rank `dest`. Raises what `Member.check_program` raises."""
        self._member.check_program()
        detail, staged = f"from rank {self._rank} to rank {dest}, tag {tag}", staged_parts([x])

        async def body(pair: Collectives) -> None:
            await pair.pass_on(x.flat, dest, None, dest)

        def start() -> Coroutine[Any, Any, None]:
            call = self._signature(x, self._calls.number_send(dest, tag), detail, site)
            return self._calls.start_send(call, dest, tag, x.flat, body, staged)

        return self._start(detail, start)

    def recv(self, x: Content, source: int, tag: int, site: Site, result: T) -> Coroutine[Any, Any, T]:
        """Start to receive from rank `source` into `x`. The coroutine returns `result`."""
        self._member.check_program()
        detail = f"from rank {source} to rank {self._rank}, tag {tag}"

        async def body(pair: Collectives) -> T:
            await pair.pass_on(None, source, x.flat, source)
            x.write_back()
            return result

        call = self._signature(x, 0, detail, site)
        return self._start(detail, partial(self._calls.start_receive, call, source, tag, body, staged_parts([x])))

    def recv_any(self, x: Content, tag: int, site: Site, result: Callable[[int], T]) -> Coroutine[Any, Any, T]:
        """Start to receive from any rank into `x`. The coroutine returns `result(sender)`."""
        self._member.check_program()

        def call(source: int | None, number: int) -> Signature:
            sender = "any rank" if source is None else f"rank {source}"
            return self._signature(x, number, f"from {sender} to rank {self._rank}, tag {tag}", site)

        def received(source: int) -> T:
            x.write_back()
            return result(source)

        return self._calls.start_receive_from_any(call, tag, x.flat, received, staged_parts([x]))

    def _start(self, detail: str, start: Callable[[], Coroutine[Any, Any, T]]) -> Coroutine[Any, Any, T]:
        try:
            return start()
        except BaseException as error:
            # A signal handler has raised between the number and the start. The peer waits for this number, and the next
            # message would have the next one.
            self._member.abort(f"send/recv {detail} was interrupted: {describe(error)}")
            raise

    def _signature(self, x: Content, number: int, detail: str, site: Site) -> Signature:
        return Signature("send/recv", number, x.dtype, x.elements, detail, site, self._member.group.epoch)
