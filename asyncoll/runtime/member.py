"""One rank as a member of one communicator: the handle through which calls reach the runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from asyncoll.errors import AbortedError, AsyncollError, ClosedError, DeviceError, ProtocolError, UsageError, describe
from asyncoll.runtime.endpoint import Endpoint, NextEpoch
from asyncoll.runtime.executions import Identity, marked
from asyncoll.runtime.failures import Closed, Departed, Failure
from asyncoll.runtime.group import Group, Lane
from asyncoll.runtime.interruption import may_interrupt
from asyncoll.runtime.progress import Runner
from asyncoll.runtime.router import Handled
from asyncoll.runtime.signature import Signature
from asyncoll.runtime.trace import Trace
from asyncoll.tensors.reductions import Array
from asyncoll.transport.wire import Abort, Control


class Member:
    """The endpoint of the rank, the group of the communicator, and the runner of the runtime, as one value.

    The methods may be called from any thread. They post their work to the runtime's loop.
    """

    def __init__(self, endpoint: Endpoint, group: Group, runner: Runner) -> None:
        self.endpoint = endpoint
        self.group = group
        self.runner = runner
        self.communicator = group.communicator
        self.trace = Trace(group.rank, group.size)
        self.is_closed = False  # this rank makes no more calls
        self.ports = 0  # open ones of operations in which the runtime takes part for the other ranks
        self.watch = partial(endpoint.failures.watch, self.communicator)  # a future that a failure of it ends
        self.post = runner.post  # schedules a callback on the runtime's loop
        self._aborted: str | None = None  # the reason for which this rank has aborted the communicator
        self._forget: list[Callable[[], object]] = []

    def among(self, ranks: tuple[int, ...]) -> Member:
        """This rank as a member of a subset of the communicator: of these group ranks, in this order."""
        return Member(self.endpoint, self.group.subset(ranks), self.runner)

    def at_end(self, forget: Callable[[], object]) -> None:
        """Call `forget` once no rank uses the communicator any more. Not at the end of the world."""
        self._forget.append(forget)

    def knows_rounds(self, last_round: Callable[[int], tuple[int, str]]) -> None:
        """`last_round` tells the last known round of a world rank, for errors: `Membership.last_rounds`."""
        known = self.endpoint.membership.last_rounds
        known.append(last_round)
        self.at_end(lambda: known.remove(last_round))

    def succession(self, what: str) -> NextEpoch:
        """The epochs of this process. Raises UsageError for `what` if the ranks have no store of epochs."""
        endpoint = self.endpoint
        if endpoint.succession is None:
            raise UsageError(f"{what} needs a store of epochs that outlives the ranks: {endpoint.store_advice}")
        return endpoint.succession

    def forget(self) -> None:
        """Run the callbacks of `at_end`, and forget the communicator in the endpoint. On the runtime's loop."""
        while self._forget:
            self._forget.pop()()
        self.endpoint.executions.forget(self.communicator)
        self.endpoint.failures.forget(self.communicator)

    def check(self) -> None:
        """Raise the error of the communicator if it or the world has failed."""
        failures = self.endpoint.failures
        if failures.any:  # seldom
            failures.check(self.communicator)

    @property
    def has_failed(self) -> bool:
        """Whether any communicator of this rank, or the world, has failed."""
        return self.endpoint.failures.any

    def check_open(self) -> None:
        """Raise ClosedError if this rank has closed the communicator, or has left the world.

        Raises AbortedError instead if it has aborted the communicator before, and UsageError in a forked child.
        """
        if not (self.is_closed or self.endpoint.closed):
            return
        self.endpoint.check_not_forked()
        if self._aborted is not None:
            raise AbortedError(self.endpoint.number, self._aborted)
        if self.is_closed:
            self.check()  # what has ended it tells more
        raise ClosedError("this communicator is closed: it takes no more calls")

    def check_caller(self) -> None:
        """Raise ClosedError if the communicator is closed, and UsageError in a thread without a running loop.

        A call needs a loop to be awaited on. All other ranks would wait for a call that fails after it is numbered.
        """
        if self.is_closed or self.endpoint.closed:
            self.check_open()
        try:
            self.runner.caller()
        except RuntimeError:
            raise UsageError(
                "a call needs a running event loop, and this thread has none: make it inside an `async def`, and from "
                "another thread pass that to asyncio.run_coroutine_threadsafe, with the loop of the program"
            ) from None

    def check_program(self) -> None:
        """Check the caller of a send or a receive. Raises ClosedError, too, once the program of this rank has ended.

        The others know by then that it sends and receives nothing more.
        """
        self.check_caller()
        if self.endpoint.departed:
            raise ClosedError("the program of this rank has ended: a task or function that outlives it sends nothing")

    def lane(self, call: Signature, context: int) -> Lane:
        """The lane of `call`, which is execution `call.number` of `context`."""
        fingerprint = marked(call.fingerprint(), self.communicator)
        return Lane(self.endpoint.executions, self.group, context, call.number, fingerprint, call.__str__)

    def send_directly(self, call: Signature, context: int, dest: int, data: Array) -> bool:
        """Carry out `call`, in which this rank sends `data` to group rank `dest`, in the calling thread.

        Returns False, and does nothing, if the call needs the runtime's loop. The call is execution `call.number` of
        `context`.
        """
        # A message must not be sent in part.
        if may_interrupt():
            return False
        group = self.group
        fingerprint = marked(call.fingerprint(), group.communicator)
        identity = Identity(
            group.communicator, group.members, group.epoch, context, call.number, fingerprint, call.__str__
        )
        return self.endpoint.executions.send_directly(identity, group.ranks[dest], data)

    def is_gone(self, rank: int) -> bool:
        """Whether the process of group rank `rank`, which is on this host, is known to have ended."""
        return self.endpoint.membership.is_gone(self.group.ranks[rank])

    @property
    def host(self) -> str:
        """The name of this rank's host, for errors."""
        return self.endpoint.membership.process(self.endpoint.rank).host

    def tell(self, rank: int, message: Control) -> None:
        """Send a control message to group rank `rank`. On the runtime's loop."""
        self.endpoint.router.tell(self.group.ranks[rank], message)

    def on_control(self, kind: type[Handled], handle: Callable[[int, Handled], None]) -> None:
        """Call `handle(source, message)` for each control message of type `kind`; `source` is a rank of the world."""
        self.endpoint.router.on_control(kind, self.communicator, handle)
        self.at_end(lambda: self.endpoint.router.off_control(kind, self.communicator))

    def at_failure(self, listener: Callable[[], None]) -> None:
        """Call `listener()` on the runtime's loop when the communicator fails at all of its ranks. From any thread.

        Not when it ends at this rank alone, or in order: the calls of the others go on.
        """

        def failed(failure: Failure, communicator: int) -> None:
            del communicator
            if not isinstance(failure, Closed | Departed):
                # Later: the waits of this rank end before the listener, which may wait for the lock of a stopped rank.
                asyncio.get_running_loop().call_soon(listener)

        self.post(partial(self.endpoint.failures.on_failure, self.communicator, failed))

    def abort(self, reason: str) -> None:
        """Fail the communicator at all of its ranks with an AbortedError of this rank.

        Without effect once this rank has left the world.
        """
        if self.endpoint.closed:
            return
        if self._aborted is None and not self.is_closed:
            self._aborted = reason
        failures, communicator, ranks = self.endpoint.failures, self.communicator, self.group.members
        failure = Abort(communicator, self.endpoint.number, reason)
        # At once, and not on the runtime's loop: no later call of this rank begins.
        failures.record(failure, communicator)
        self.post(lambda: failures.give_up(failure, communicator, ranks))

    def mismatch(self, text: str) -> None:
        """Fail the communicator at all of its ranks with a MismatchError: the ranks have made different calls."""
        group = self.group
        self.post(lambda: self.endpoint.failures.mismatch(group.communicator, group.members, text))

    def failed(self, call: object, error: BaseException) -> None:
        """Abort the communicator, because `call`, which the other ranks wait for, has ended with `error`.

        Does nothing if `error` is an error of the communicator, which the other ranks know already.
        """
        if isinstance(error, asyncio.CancelledError):
            self.abort(f"{call} was cancelled")
        elif not isinstance(error, AsyncollError) or isinstance(error, DeviceError | ProtocolError | UsageError):
            self.abort(f"{call} failed: {describe(error)}")
