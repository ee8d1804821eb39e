"""Calls between the ranks of a communicator: `comm.rpc`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from asyncoll.arguments import whole
from asyncoll.errors import ProtocolError, UsageError
from asyncoll.rpc import stub
from asyncoll.rpc.carrier import Carrier
from asyncoll.rpc.client import FOREIGN_LOOP
from asyncoll.rpc.exchange import Exchange
from asyncoll.rpc.service import FunctionRegistry, Method
from asyncoll.rpc.stub import Peer, Proxy
from asyncoll.runtime.failures import Failure, error_of
from asyncoll.runtime.member import Member

MakeCarrier = Callable[[Callable[[int, ProtocolError], None]], Carrier]  # told what to do about a broken protocol
T = TypeVar("T")
S = TypeVar("S")


class Rpc:
    """Functions of every rank that the others may call. Get it as `comm.rpc`.

    What can be passed and returned: None, bool, int, float, complex, str, bytes, list, tuple, set, dict, dataclasses,
    numpy arrays and scalars, and torch tensors on the CPU, nested in each other. Everything is copied, for a rank that
    calls itself too. A dataclass arrives where the function's annotations name it, or those of a function that is
    registered here under the same name.

    A call begins when it is awaited, and runs on the loop of the rank that is called, or in a thread there if it is a
    plain function. A rank whose program has not come to `comm.rpc` yet is waited for. Register what the others may call
    before the first `await` that follows, or before a barrier. Calls to one rank are bounded, in number and bytes of
    arguments: more of them wait for their turn.

    Every call raises: UsageError for what cannot be sent, an unknown function or wrong arguments; RemoteError if the
    function raised; DeadlineError at the end of `asyncoll.deadline`, which goes for the calls that the function makes,
    or of ASYNCOLL_DEADLINE_S seconds; PeerLostError, AbortedError or ClosedError if the world ends. Cancelling a call
    cancels the function, as soon as the rank hears of it, unless it is a plain one, which nothing can stop; no other
    call is harmed.
    """

    def __init__(self, member: Member, make_carrier: MakeCarrier) -> None:
        """On the program's loop, where all of its calls are made. Raises UsageError on another."""
        self._loop = asyncio.get_running_loop()
        if self._loop is not member.runner.home:
            raise UsageError(FOREIGN_LOOP)
        endpoint = member.endpoint
        self._ranks = member.group.ranks
        self._check_not_forked = endpoint.check_not_forked
        self._registry = FunctionRegistry()
        broken = lambda rank, error: member.post(partial(endpoint.failures.broken, rank, error))  # noqa: E731
        self._exchange = Exchange(
            make_carrier(broken), self._registry, self._ranks.index, broken, "this communicator", endpoint.patience_s
        )
        member.post(partial(endpoint.failures.on_failure, member.communicator, self._failed))

    def register(self, what: T, *, name: str | None = None) -> T:
        """Let the other ranks call `what`; returns it, so that it serves as a decorator.

        A function is called by its own name, or by `name`. Of any other object the public methods are, as `method`, or
        `name.method`. Arguments are checked against annotations. An async generator is read with `stream`.

        Arrays that a function returns or yields are read until they have been sent: return a copy of what others may
        change meanwhile.
        """
        self._registry.add(what, name)
        return what

    async def call(self, rank: int, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """What the function `name` returns at `rank`."""
        return await self._exchange.client.call(self._of_world(rank), name, args, kwargs, self._registry.types_of(name))

    async def call_all(self, ranks: Iterable[int], name: str, /, *args: Any, **kwargs: Any) -> dict[int, Any]:
        """What `name` returns at each of `ranks`, which it is called at at the same time, by rank.

        Waits for all of them. If some failed, raises an ExceptionGroup of their errors, in the order of `ranks`.
        """
        called = list(ranks)
        for rank in called:  # nothing is sent if one of them is wrong
            self._of_world(rank)
            if called.count(rank) > 1:
                raise UsageError(f"{name}: rank {rank} is named {called.count(rank)} times")
        calls = [asyncio.ensure_future(self.call(rank, name, *args, **kwargs)) for rank in called]
        try:
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
        except asyncio.CancelledError:
            await asyncio.wait(calls)
            raise
        failed = {rank: error for rank, error in zip(called, outcomes, strict=True) if isinstance(error, Exception)}
        if failed:
            where = ", ".join(map(str, failed))
            raise ExceptionGroup(f"{name} failed at rank{'s' * (len(failed) > 1)} {where}", list(failed.values()))
        return dict(zip(called, outcomes, strict=True))

    async def notify(self, rank: int, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Have `name` called at `rank`, and wait neither for its end nor for its result.

        Returns once the arguments may be changed. What one task sends to one rank begins there in that order, and
        before this rank has left the world; what has not ended by the end of the world is cancelled. If the function
        raises, that rank logs it.
        """
        await self._exchange.client.notify(self._of_world(rank), name, args, kwargs)

    def stream(self, rank: int, name: str, /, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """The items that the async generator `name` yields at `rank`, for `async for`.

        It runs at most 16 items, or 8 MiB, ahead of who reads it. Leaving the loop early, or `aclose()`, cancels it.
        """
        types = self._registry.types_of(name)
        return self._exchange.client.stream(self._of_world(rank), name, args, kwargs, types)

    async def methods(self, rank: int) -> list[Method]:
        """Everything that can be called at `rank`."""
        return await stub.methods(self._peer(rank))

    def proxy(self, rank: int, service: Callable[..., S], *, name: str | None = None) -> Proxy[S]:
        """What looks like a `service`, whose methods run at `rank`.

        `service` describes what is registered there: it is its class, a Protocol, or any class with the same methods,
        all of them `async def` or async generators, as they are awaited. What is registered may be plain functions. The
        first call raises MismatchError if the two do not match. Results are checked against annotations.
        """
        return stub.stub(self._peer(rank), service, name)

    async def flush(self) -> None:
        """Wait until everything that this rank has notified of has begun."""
        await self._exchange.flush()

    async def close(self) -> None:
        """End all calls, from here and to here."""
        await self._exchange.close()

    def _peer(self, rank: int) -> Peer:
        return Peer(self._exchange.client, self._of_world(rank), f"rank {rank}")

    def _of_world(self, rank: int) -> int:
        """Peers are ranks of the world; the caller's are places in the group."""
        self._check_not_forked()
        place = whole(rank, "a rank")
        if not 0 <= place < len(self._ranks):
            raise UsageError(f"rank {place} is not one of the ranks 0 to {len(self._ranks) - 1}")
        return self._ranks[place]

    def _failed(self, failure: Failure) -> None:
        """On the runtime's loop."""
        make = partial(error_of, failure)
        if asyncio.get_running_loop() is self._loop:
            self._exchange.fail(make)
        else:
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody is left to be told
                self._loop.call_soon_threadsafe(self._exchange.fail, make)
