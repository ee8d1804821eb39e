"""Calls between the ranks of a communicator: `comm.rpc`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from asyncoll.arguments import flag, whole
from asyncoll.errors import ProtocolError, UsageError
from asyncoll.rpc import stub
from asyncoll.rpc.carrier import Carrier
from asyncoll.rpc.client import FOREIGN_LOOP, Request
from asyncoll.rpc.device_place import DevicePlace
from asyncoll.rpc.device_route import DeviceRoute
from asyncoll.rpc.exchange import RpcExchange
from asyncoll.rpc.service import FunctionRegistry, Method
from asyncoll.rpc.stub import Peer, Proxy
from asyncoll.runtime.copies_back import CommunicatorCopiesBack
from asyncoll.runtime.failures import Failure, error_of
from asyncoll.runtime.member import Member
from asyncoll.runtime.uncopied import Uncopied
from asyncoll.tensors import registered

MakeCarrier = Callable[[Callable[[int, ProtocolError], None]], Carrier]  # takes the handler of protocol errors
T = TypeVar("T")
S = TypeVar("S")


class Rpc(Uncopied):
    """Remote calls between the ranks of a communicator. Get this object as `comm.rpc`.

    A rank registers functions by name, and any rank of the communicator, itself included, calls them. Only the caller
    and the callee take part. Ranks are those of the communicator. Each communicator has functions of its own.

    ```python
    @comm.rpc.register
    def mean(batch: torch.Tensor, scale: float = 1.0) -> float:
        return scale * float(batch.mean())

    await comm.barrier()  # every rank has registered its functions
    value = await comm.rpc.call(1, "mean", torch.ones(64), scale=2.0)  # 2.0
    ```

    **Use.** Call all methods on the loop of the program; on another loop they raise UsageError. Register functions
    before the first `await` after the first use of `comm.rpc`, or before a barrier: a call that arrives earlier finds
    no function. A call to a rank that has not used `comm.rpc` yet waits until it does, or until its program ends, when
    it has no functions.

    **Values.** Arguments and results are None, bool, int (64 bits), float, complex, str, bytes, list, tuple, set, dict,
    dataclasses, numpy arrays and scalars, and torch tensors of any supported dtype and shape, nested in each other up
    to 64 levels. The receiver gets copies, which it may change, also in a call of a rank to itself. A
    dataclass arrives only if an annotation names it: at the callee an annotation of the function; at the caller an
    annotation of a function that is registered there under the same name, or of the class that `proxy` was given.

    **Devices.** Tensors may be on a device that calls take tensors of. A message is sent once they have arrived at the
    host, with the values that they have where the call begins, where the function returns, or where the generator
    yields: the work that is queued on the thread's current stream comes before. The loop does not wait meanwhile. The
    receiver gets tensors on the CPU, and by `to` on a device. If a device fails, the call raises DeviceError, which
    names the rank whose device it is.

    **Where functions run.** A call starts when it is awaited. Coroutine functions and async generators run on the loop
    of the callee's program. Plain functions run in threads, or on that loop if they are registered with `inline`. A
    callee that blocks its loop answers late, but is not taken for lost. A coroutine function that has not waited yet
    runs in a task that makes the first steps of many calls; it keeps that task if it waits.

    **Limits.** A rank has at most 256 calls and 64 MiB of arguments under way to one other rank, at each depth of
    nested calls; further calls wait. A call with more arguments than that is under way alone. Calls may be nested 32
    deep: a function that is called may call others.

    **Errors.** A call raises UsageError for a value that cannot be sent, an unknown function, or arguments that do not
    match the function's signature and annotations (the function has not run), and for a result with a dataclass that no
    annotation names; RemoteError if the function raised; DeadlineError at the end of `asyncoll.deadline`, or after
    ASYNCOLL_DEADLINE_S seconds; PeerLostError, AbortedError, ProtocolError or ClosedError if the world ends. The calls
    that a function makes inherit the deadline of its caller.

    **Cancellation.** Cancelling a call cancels the function as soon as the callee learns of it, and so does the end of
    its caller's process. A coroutine function, or a generator that waits, gets CancelledError at its `await`; a
    generator that waits for its reader gets GeneratorExit at its `yield`. A plain function cannot be stopped and runs
    to its end; its result is dropped. Other calls are not affected.
    """

    def __init__(
        self,
        member: Member,
        make_carrier: MakeCarrier,
        route: DeviceRoute | None,
        registry: FunctionRegistry | None = None,
    ) -> None:
        """Made on the program's loop, on which all calls are made. Raises UsageError on another loop.

        `registry` has the functions of the epoch before.
        """
        self._loop = asyncio.get_running_loop()
        if self._loop is not member.runner.home:
            raise UsageError(FOREIGN_LOOP)
        endpoint = member.endpoint
        self._member = member
        self._route = route
        self._place: DevicePlace | None = None
        self._ranks = member.group.ranks
        self._check_not_forked = endpoint.check_not_forked
        self.registry = FunctionRegistry(registry)
        broken = lambda rank, error: member.post(partial(endpoint.failures.broken, rank, error))  # noqa: E731
        self._exchange = RpcExchange(
            make_carrier(broken),
            self.registry,
            self._ranks.index,
            broken,
            "this communicator",
            endpoint.patience_s,
            route,
        )
        member.post(partial(endpoint.failures.on_failure, member.communicator, self._failed))

    def register(self, what: T, *, name: str | None = None, inline: bool = False) -> T:
        """Let all ranks of the communicator call `what` at this rank. Returns `what`, so it is usable as a decorator.

        `what` is a function, a coroutine function or an async generator function, which is called by its own name or by
        `name`. Or it is an object, whose public methods are called as `method`, or as `name.method`. Arguments are
        checked against the annotations. An async generator is read with `stream`, all others are called with `call` or
        `notify`. Local: sends nothing. Raises UsageError for a name that is registered already, and for annotations
        that cannot be resolved.

        `inline` says that plain functions are short: they run on the loop's thread, without the hand-off to another
        thread and back, which takes longer than a short function. An inline function blocks the loop while it runs. It
        must not wait: neither for a lock, nor for input, nor for another call. UsageError for a coroutine function or
        an async generator, which run on the loop anyway, and for an object that has one.

        Arrays that a function returns or yields are not copied before they are sent. Return a copy of an array that
        other code may change meanwhile, such as another coroutine. A tensor of a device may be changed on the stream
        that was current where the function returned: that comes after the copy to the host. Return a clone if another
        stream may change it.
        """
        self.registry.add(what, name, inline=flag(inline, "inline"), place=self._place)
        return what

    async def call(self, rank: int, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function `name` at `rank` and return its result. Errors and cancellation: see `Rpc`.

        The arguments may be changed once the call has returned.
        """
        types = self.registry.types_of(name)
        return await self._exchange.client.call(Request(self._of_world(rank), name, args, kwargs, types, self._place))

    async def call_all(self, ranks: Iterable[int], name: str, /, *args: Any, **kwargs: Any) -> dict[int, Any]:
        """Call the function `name` at each of `ranks` at the same time. Returns the results by rank.

        Waits for all calls, also after a failure. If some fail, raises an ExceptionGroup of their errors, in the order
        of `ranks`. Raises UsageError, and sends nothing, if a rank does not exist or is named twice. Cancelling it
        cancels all calls.
        """
        called = list(ranks)
        for rank in called:  # before the first call is sent
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
        """Call the function `name` at `rank` without waiting for its end. There is no result.

        Returns once the arguments may be changed; it may have to wait for a slot. Notifications that one task sends to
        one rank begin there in that order, and before this rank has left the world. A function that still runs at the
        end of the world is cancelled. An exception of the function is logged at `rank`.
        """
        await self._exchange.client.notify(Request(self._of_world(rank), name, args, kwargs))

    def stream(self, rank: int, name: str, /, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """The items that the async generator `name` yields at `rank`, as an async generator.

        ```python
        import contextlib

        async with contextlib.aclosing(comm.rpc.stream(1, "batches", 100)) as batches:
            async for batch in batches:
                ...  # `break` ends the generator at rank 1, too
        ```

        The call starts with the first item. The generator runs at most 16 items, or 8 MiB, ahead of its reader.
        `aclose()`, or cancelling the reader, cancels the generator. To leave the loop is not enough while a variable
        still refers to the stream: use `contextlib.aclosing`. An exception of the generator is raised after the items
        that came before. At the end of a deadline the generator is cancelled, and a slow reader gets DeadlineError when
        it next asks for an item.
        """
        types = self.registry.types_of(name)
        return self._exchange.client.stream(Request(self._of_world(rank), name, args, kwargs, types, self._place))

    def to(self, device: object) -> Rpc:
        """These calls for `device`: tensors that calls return or yield, and tensors in the arguments of functions
        registered by it, are on it.

        `await comm.rpc.to("cuda:0").call(1, "forward", x)` returns a tensor of that device. The methods of
        `comm.rpc.to("cuda:0").proxy(1, Model)` return such tensors, too. `comm.rpc.to("cuda:0").register(forward)` lets
        other ranks call `forward` with arguments on that device, from wherever they are sent.

        The device is one of this rank; the other end need not know it. Where the caller goes on, or the function
        begins, the current stream waits for the copies, and the host does not. A copy that fails aborts the
        communicator. numpy arrays stay at the host. Between ranks that read each other's device memory, tensors of more
        than 1 MiB do not pass through the host if they are on devices at both ends. For arguments that holds once a
        call of the function has been answered, because the caller does not know of it before.

        Local. Raises UsageError if calls take no tensors of `device`: a name such as "cuda:0", or a `torch.device`.
        """
        on_device = self._alias()
        stager = registered.current().devices.stager_named(device)
        on_device._place = DevicePlace(stager, CommunicatorCopiesBack(self._member), self._route)
        return on_device

    async def methods(self, rank: int) -> list[Method]:
        """The functions that `rank` has registered, with their parameters, annotations and docstrings."""
        return await stub.methods(self._peer(rank))

    def proxy(self, rank: int, service: Callable[..., S], *, name: str | None = None) -> Proxy[S]:
        """An object with the methods of `service`, each of which calls the method of that name at `rank`.

        ```python
        model = comm.rpc.proxy(0, Model)  # rank 0 has called comm.rpc.register(Model())
        loss = await model.evaluate(batch)
        ```

        `service` is the class of the registered object, a Protocol, or any class with the same methods. Its methods
        must be `async def`, or streams, because callers await them; the registered methods may be plain functions. A
        stream is an async generator. A Protocol, whose methods have no body, declares it without `async`:

        ```python
        from collections.abc import AsyncGenerator
        from typing import Protocol

        class Model(Protocol):
            async def size(self) -> int: ...
            def complete(self, prompt: str) -> AsyncGenerator[str, None]: ...
        ```

        With AsyncIterator in place of AsyncGenerator it works, too, but a type checker then refuses
        `contextlib.aclosing`.

        `name` is the name that the object was registered with, if any. To a type checker the proxy is a `service`.

        Creating a proxy sends nothing. The first call compares names, parameters and annotations with the registered
        methods, and raises MismatchError if they differ. Results are checked against the annotations: UsageError.
        """
        return stub.stub(self._peer(rank), service, name)

    async def flush(self) -> None:
        """Wait until all notifications from this rank have begun. Called as the rank leaves the world."""
        await self._exchange.client.flush()

    async def close(self) -> None:
        """End all calls from and to this rank with ClosedError. Called as the rank leaves the world."""
        await self._exchange.close()

    def _peer(self, rank: int) -> Peer:
        return Peer(self._exchange.client, self._of_world(rank), f"rank {rank}", self._place)

    def _of_world(self, rank: int) -> int:
        """The world rank of a rank of this communicator. The exchange and the carriers use world ranks."""
        self._check_not_forked()
        group_rank = rank if type(rank) is int else whole(rank, "a rank")
        if not 0 <= group_rank < len(self._ranks):
            raise UsageError(f"rank {group_rank} is not one of the ranks 0 to {len(self._ranks) - 1}")
        return self._ranks[group_rank]

    def _failed(self, failure: Failure, _: int) -> None:
        """The communicator has failed: end all calls. On the runtime's loop, which may be in another thread."""
        make = partial(error_of, failure)
        if asyncio.get_running_loop() is self._loop:
            self._exchange.fail(make)
        else:
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed: there are no calls any more
                self._loop.call_soon_threadsafe(self._exchange.fail, make)
