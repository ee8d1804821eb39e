"""Collective calls of one communicator at one rank: numbered, described, and started in the form that suits them.

Ranks of one host that share an arena meet in memory; all others, and all pairs, go by message.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

from asyncoll.algorithms.dense.by_message import MessageCall
from asyncoll.algorithms.dense.forms import Form
from asyncoll.algorithms.dense.in_memory import SharedCall
from asyncoll.algorithms.dense.staging import DisagreementError, StagingArea
from asyncoll.algorithms.dense.tuning import choose
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.arguments import digest
from asyncoll.errors import AsyncollError, PeerLostError, ProtocolError, UsageError, describe
from asyncoll.runtime.endpoint import Endpoint
from asyncoll.runtime.group import Group, Lane
from asyncoll.runtime.numbering import Numbering
from asyncoll.runtime.pending import PendingCall, PendingCalls
from asyncoll.runtime.progress import Runner
from asyncoll.runtime.work import Work
from asyncoll.statistics import Ledger
from asyncoll.transport.control_block import Turn, Wait, failure
from asyncoll.transport.wire import Dispute

T = TypeVar("T")
_RECENT = 256  # calls whose description is kept to explain a mismatch


class Site(NamedTuple):
    """A place in the user's code."""

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path.rpartition('/')[2]}:{self.line}"


class Signature(NamedTuple):
    """One call as its peers must have made it too."""

    operation: str
    number: int
    dtype: str
    elements: int  # -1: any
    detail: str
    site: Site

    def fingerprint(self) -> int:
        return _fingerprint(self.operation, self.dtype, self.elements, self.detail)

    @property
    def key(self) -> str:
        return f"{self.operation} #{self.number} {self.detail}"

    def __str__(self) -> str:
        what = "" if self.elements < 0 else f" of {self.elements}"
        more = f", {self.detail}" if self.detail else ""
        return f"{self.operation} #{self.number}{what} {self.dtype}{more} at {self.site}".replace("  ", " ")


class Round(NamedTuple):
    """One call of a wait-avoiding operation."""

    operation: Operation
    site: Site

    @property
    def key(self) -> str:
        return f"{self.operation.name!r}"

    def __str__(self) -> str:
        return f"a round of {self.operation} at {self.site}"


@lru_cache(maxsize=1024)
def _fingerprint(operation: str, dtype: str, count: int, detail: str) -> int:
    return digest(operation, dtype, count, detail)


class Calls:
    """Starts the calls of one rank."""

    def __init__(self, endpoint: Endpoint, group: Group, runner: Runner) -> None:
        self._endpoint = endpoint
        self._group = group
        self._runner = runner
        self._number = 0
        self._unstarted: Signature | None = None  # numbered
        self._pairs: defaultdict[tuple[int, int], Numbering] = defaultdict(Numbering)  # messages by (source, dest)
        self._recent: deque[Signature] = deque(maxlen=_RECENT)
        self.ledger = Ledger()
        self._check = partial(endpoint.failures.check, group.communicator)
        self._pending = PendingCalls(endpoint, group, runner.post)
        self._staging: StagingArea | None = None
        self.arena = endpoint.shared_by(group.ranks)
        if self.arena is not None:
            sizes = choose(group.size, os.environ)
            self._staging = StagingArea(
                self.arena, group.size, group.rank, digest(group.communicator, "staging area"), sizes
            )
            endpoint.executions.on_dispute(group.communicator, self._describe)
            endpoint.membership.on_trace(self._trace)

    def number(self, operation: str, dtype: str, count: int, detail: str, site: Site) -> Signature:
        """The next call. The caller's checks are done: whatever raises UsageError comes before this.

        A signal handler may have raised between the number of the last call and its start. The others wait for it.
        """
        self.check_caller()
        if self._unstarted is not None:
            self.abort(f"{self._unstarted} was interrupted before it had begun")
        self._number += 1
        self._unstarted = call = Signature(operation, self._number, dtype, count, detail, site)
        return call

    def start(
        self,
        call: Signature,
        body: Callable[[Form], Coroutine[Any, Any, T]],
        nbytes: int = 0,
        discarded: Callable[[], None] = lambda: None,
    ) -> Coroutine[Any, Any, T]:
        """Start a call of all ranks, with so many bytes of this rank's; returns what waits for it.

        `discarded` is called, on any thread, if that is cancelled or never awaited: the call may be over by then.
        """
        pending = self._pending.enter(call, call.number)
        try:
            self._unstarted = None
            if self._staging is None:
                lead = self._group.communicator
                return self._by_message(call, pending, lead, lambda lane: body(MessageCall(lane)), discarded)
            self._recent.append(call)
            self._staging.begin(call.number)
            work = self._in_memory(self._staging, call, pending, body)
            return self._start_in_memory(work, call.__str__, nbytes, discarded)
        except BaseException as error:
            self._pending.leave(pending)
            self.abort(f"{call} was interrupted: {describe(error)}")
            raise

    def start_round(
        self, call: Round, body: Coroutine[Any, Any, T], discarded: Callable[[], None]
    ) -> Coroutine[Any, Any, T]:
        """Start a call of a wait-avoiding operation; `discarded` as above."""
        pending = self._pending.enter(call)

        async def work() -> T:
            try:
                return await body
            except PeerLostError as error:
                raise self._endpoint.noticed(error, self._runner.post) from None
            except Exception as error:
                self._tell_of(call, error)
                raise
            finally:
                self._pending.leave(pending)

        try:
            if self._staging is None:
                return self._runner.start(work(), discarded)
            return self._start_in_memory(work(), call.__str__, call.operation.nbytes, discarded)
        except BaseException:
            self._pending.leave(pending)
            raise

    def _start_in_memory(
        self, body: Coroutine[Wait | Turn, None, T], what: Callable[[], str], nbytes: int, discarded: Callable[[], None]
    ) -> Coroutine[Any, Any, T]:
        """Start what awaits nothing but conditions of memory. If it is long, it is the runtime's from the start."""
        assert self._staging is not None
        work = Work(self._staging.arena, body, self._check, what)
        if nbytes > self._staging.sizes.long:
            return self._runner.start(work.finish(), discarded)
        return self._runner.drive(work, discarded)

    def start_pair(
        self, call: Signature, source: int, dest: int, tag: int, body: Callable[[Lane], Awaitable[T]]
    ) -> Coroutine[Any, Any, T]:
        """Start a call of two ranks."""
        pending = self._pending.enter(call, ranks=(self._group.ranks[source], self._group.ranks[dest]))
        return self._by_message(call, pending, digest(self._group.communicator, "pair", source, dest, tag), body)

    def number_pair(self, source: int, dest: int, tag: int) -> int:
        """The caller's checks are done, `check_caller` among them."""
        return self._pairs[source, dest].next(tag)

    def abort(self, reason: str) -> None:
        """Give up, and tell the others. From any thread."""
        group = self._group
        self._runner.post(lambda: self._endpoint.failures.abort(group.communicator, group.ranks, reason))

    # -- by message -------------------------------------------------------------------------------

    def _by_message(
        self,
        call: Signature,
        pending: PendingCall,
        context: int,
        body: Callable[[Lane], Awaitable[T]],
        discarded: Callable[[], None] = lambda: None,
    ) -> Coroutine[Any, Any, T]:
        lane = Lane(self._endpoint.executions, self._group, context, call.number, call.fingerprint(), call.__str__)

        async def work() -> T:
            try:
                with lane:
                    return await body(lane)
            except (Exception, asyncio.CancelledError) as error:
                self._abort_for(call, error)
                raise
            finally:
                self._pending.leave(pending)
                self.ledger.enter(call.operation, lane.traffic)

        return self._runner.start(work(), discarded)

    def _abort_for(self, call: Signature, error: BaseException) -> None:
        """A call that ends in any way that its peers do not know of ends the communicator."""
        if isinstance(error, asyncio.CancelledError):
            self.abort(f"{call} was cancelled")
        else:
            self._tell_of(call, error)

    def _tell_of(self, call: Signature | Round, error: BaseException) -> None:
        """Whatever is no failure that all know of, others would wait for in vain."""
        if not isinstance(error, AsyncollError) or isinstance(error, ProtocolError):
            self.abort(f"{call} failed: {describe(error)}")

    # -- in memory --------------------------------------------------------------------------------

    async def _in_memory(
        self, staging: StagingArea, call: Signature, pending: PendingCall, body: Callable[[Form], Awaitable[T]]
    ) -> T:
        form = SharedCall(staging, call.number, call.fingerprint())
        try:
            self._check()
            return await body(form)
        except DisagreementError as disagreement:
            self._dispute(call, disagreement.place)
            await failure(staging.control_block)  # the communicator fails as soon as that rank has said what it called
            raise
        except PeerLostError as error:
            lost = self._endpoint.noticed(error, self._runner.post)
            await self._retreat(form)
            raise lost from None
        except (Exception, asyncio.CancelledError) as error:
            self._abort_for(call, error)
            await self._retreat(form)
            raise
        finally:
            self._pending.leave(pending)
            self.ledger.enter(call.operation, form.traffic)
            self._endpoint.in_memory.enter(call.operation, form.traffic)
            staging.end(call.number)

    async def _retreat(self, form: SharedCall) -> None:
        """Withdraw the arrays of a failed call, however often the caller is cancelled meanwhile.

        Without effect if a rank has died while it held the lock of the control block.
        """
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                with contextlib.suppress(PeerLostError):
                    await form.retreat(lambda place: self._group.ranks[place] in self._endpoint.membership.lost)
                return

    def _dispute(self, call: Signature, place: int) -> None:
        peer, context = self._group.ranks[place], self._group.communicator
        question = Dispute(context, context, call.number, str(call))
        self._runner.post(lambda: self._endpoint.router.tell(peer, question))

    def _describe(self, number: int) -> tuple[tuple[int, ...], str] | None:
        """Who took part in call `number`, and what it was, if it is not too long ago."""
        recent = {call.number: call for call in list(self._recent)}
        return (self._group.ranks, str(recent[number])) if number in recent else None

    def _trace(self, rank: int) -> str:
        """The last call that `rank` has begun, of those that this rank has numbered too, and in its words."""
        assert self._staging is not None
        number = self._staging.begun(self._group.ranks.index(rank)) if rank in self._group.ranks else 0
        begun = [call for call in list(self._recent) if call.number <= number]
        return str(begun[-1]) if begun else ""

    def check(self) -> None:
        """Raises what has ended this communicator, if anything has."""
        self.check_open()
        self._check()

    def check_not_forked(self) -> None:
        """Raises UsageError in a forked child of this process."""
        self._endpoint.check_not_forked()

    def check_open(self) -> None:
        """Raises ClosedError after the end of the world, and UsageError in a forked child of its process."""
        if self._endpoint.closed:
            self._endpoint.check_open()

    def check_caller(self) -> None:
        """Raises ClosedError after the end of the world, and UsageError in a thread without a running loop.

        A call needs a loop to be awaited on. One that failed after it was numbered would be missed by all other ranks.
        """
        self.check_open()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise UsageError(
                "a call needs a running event loop, and this thread has none: make it inside an `async def`, and from "
                "another thread pass that to asyncio.run_coroutine_threadsafe, with the loop of the program"
            ) from None
