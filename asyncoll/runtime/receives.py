"""The receives of one rank on one communicator: which message each of them takes.

Sender and receiver number the messages of each tag independently. So a receive from a named rank takes the next number
of that rank. A receive from any source takes the number of the message that came first, once one has come. Until then
it waits, and all later receives of its tag wait behind it, in the order in which they were made. That is the order of
MPI: a message goes to the first receive that accepts it.

A receive from any source whose result has no receiver is undone, and its number is the next one again.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Callable
from functools import lru_cache

from asyncoll.arguments import digest
from asyncoll.errors import AsyncollError
from asyncoll.runtime.group import Lane
from asyncoll.runtime.matching import Receive
from asyncoll.runtime.member import Member
from asyncoll.runtime.numbering import Numbering
from asyncoll.runtime.signature import Signature
from asyncoll.tensors.reductions import Array
from asyncoll.transport import settle


@lru_cache(maxsize=64)
def pair_context(communicator: int, source: int, dest: int, tag: int) -> int:
    """The context of the messages from group rank `source` to `dest` with `tag`: they have an order of their own."""
    return digest(communicator, "pair", source, dest, tag)


class Named:
    """A receive from group rank `source`, which waits for its number."""

    def __init__(self, source: int) -> None:
        self.source = source
        self.number = 0
        self.served: asyncio.Future[None] | None = None

    def begin(self, source: int, number: int) -> None:
        """The receive takes message `number` of `source`."""
        self.number = number
        if self.served is not None:
            settle(self.served)


class FromAny:
    """A receive of one array from any source: the message that it takes, once it has one.

    On the runtime's loop. It begins as soon as there is a message, in the same step: so it has either taken a message,
    which `undo` gives back, or none.
    """

    def __init__(self, member: Member, call: Callable[[int, int], Signature], tag: int, into: Array) -> None:
        """`call(source, number)` describes the receive of message `number` of `source`."""
        self.source: int | None = None  # the sender, a group rank, once it has taken a message, and the number of that
        self.number = 0
        self.task: asyncio.Task[object] | None = None  # that carries it out
        self.is_complete = False
        self.is_undone = False
        self._member = member
        self._call = call
        self.tag = tag
        self._receive = Receive(into)
        self._lane: Lane | None = None
        self._error: AsyncollError | None = None
        self.served: asyncio.Future[None] | None = None

    def begin(self, source: int, number: int) -> None:
        """The receive takes message `number` of `source`."""
        member, self.source, self.number = self._member, source, number
        context = pair_context(member.communicator, source, member.group.rank, self.tag)
        lane = member.lane(self._call(source, number), context)
        try:
            lane.__enter__()
            self._lane = lane
            self._receive = lane.post(source, 0, self._receive.into)
        except AsyncollError as error:  # of the communicator, or because the message does not fit
            self._error = error
        if self.served is not None:
            settle(self.served)

    async def end(self) -> Lane:
        """Wait until the array is complete. Cancelling this changes nothing: `undo` follows."""
        if self._error is not None:
            raise self._error
        assert self._lane is not None
        await self._lane.wait(self._receive)
        self._lane.__exit__(None, None, None)
        self.is_complete = True
        return self._lane

    def fail(self) -> None:
        """The communicator has failed."""
        if self._lane is not None:
            self._lane.__exit__(AsyncollError, None, None)

    def undo(self) -> None:
        """The message, which it has taken, was not taken."""
        self.is_undone = True
        if self._lane is not None:
            assert self.source is not None
            self._lane.undo(self.source, 0, self._receive)


class Receives:
    """The order of the receives of one rank. On the runtime's loop, in the order in which the calls were made."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._numbers: defaultdict[int, Numbering] = defaultdict(Numbering)  # by source
        self._returned: dict[
            tuple[int, int], list[int]
        ] = {}  # by source and tag: numbers of undone receives, ascending
        # By tag: the receives that wait for a message from any source, and those behind them. The first is of any.
        self._queues: dict[int, deque[Named | FromAny]] = {}

    def number_now(self, source: int, tag: int) -> int | None:
        """The number of the message that a receive from `source` takes; None if it has to wait for other receives."""
        return None if tag in self._queues else self._take(source, tag)

    async def number(self, source: int, tag: int) -> int:
        """The same, after the receives that it has to wait for. Raises the error of the communicator."""
        named = Named(source)
        self._queues[tag].append(named)
        await self._wait_in_queue(named, tag, f"a receive from rank {source}, tag {tag}")
        return named.number

    async def from_any(self, receive: FromAny, describe: Callable[[], str]) -> Lane:
        """Carry out `receive`. Raises the error of the communicator. Cancelling this undoes the receive."""
        tag, receive.task = receive.tag, asyncio.current_task()
        # `discard` came before the first step of this task.
        if receive.is_undone:
            raise asyncio.CancelledError
        self._member.check()
        # Only while receives of any source wait: until then, messages are received without a look at this object.
        if tag not in self._queues:
            self._queues[tag] = deque()
            self._listen(tag)
        self._queues[tag].append(receive)
        self._serve(tag)
        try:
            if receive.source is None:
                await self._wait_in_queue(receive, tag, describe())
            return await receive.end()
        except asyncio.CancelledError:
            self._undo(receive)
            raise
        except AsyncollError:
            receive.fail()
            raise

    def discard(self, receive: FromAny) -> None:
        """The result of `receive` has no receiver: end it, and undo it. Idempotent."""
        if receive.is_complete:
            self._undo(receive)
        elif receive.task is None:
            # The task has not made its first step yet.
            receive.is_undone = True
        else:
            receive.task.cancel()

    def _undo(self, receive: FromAny) -> None:
        """A message that `receive` has taken is the next of its source again, unless the communicator has failed."""
        has_failed = self._member.endpoint.failures.has_failed(self._member.communicator)
        if receive.source is None or receive.is_undone or has_failed:
            return
        # It is taken first, before newer ones: messages of one source are received in the order of their sends.
        insort(self._returned.setdefault((receive.source, receive.tag), []), receive.number)
        receive.undo()

    async def _wait_in_queue(self, receive: Named | FromAny, tag: int, what: str) -> None:
        try:
            with self._member.endpoint.failures.watch(self._member.communicator, what) as receive.served:
                await receive.served
        except BaseException:
            # Those behind it may have waited for this one alone.
            if receive in self._queues.get(tag, ()):
                self._queues[tag].remove(receive)
                self._serve(tag)
            raise

    def _serve(self, tag: int) -> None:
        """Let all receives begin that can, in their order."""
        queue = self._queues.get(tag)
        while queue:
            # A receive from one source begins without a message, as it does elsewhere. One from any source needs one.
            source = queue[0].source
            if source is None and (source := self._first(tag)) is None:
                return
            queue.popleft().begin(source, self._take(source, tag))
        if queue is not None and self._queues.pop(tag, None) is not None:
            self._listen(tag, until=True)

    def _listen(self, tag: int, *, until: bool = False) -> None:
        """Serve the receives of `tag` after each message of the tag that comes; with `until`, no more."""
        executions = self._member.endpoint.executions
        for source in self._sources():
            if until:
                del executions.on_early[self._context(source, tag)]
            else:
                executions.on_early[self._context(source, tag)] = lambda: self._serve(tag)

    def _first(self, tag: int) -> int | None:
        """The source whose next message came first; None if none has come."""
        executions, ranks = self._member.endpoint.executions, self._member.group.ranks
        found: list[tuple[int, int]] = []
        for source in self._sources():
            serial = executions.serial(self._context(source, tag), self._next(source, tag), ranks[source])
            if serial is not None:
                found.append((serial, source))
        return min(found)[1] if found else None

    def _sources(self) -> list[int]:
        return [rank for rank in range(self._member.group.size) if rank != self._member.group.rank]

    def _context(self, source: int, tag: int) -> int:
        return pair_context(self._member.communicator, source, self._member.group.rank, tag)

    def _next(self, source: int, tag: int) -> int:
        """The number that `_take` takes next."""
        returned = self._returned.get((source, tag))
        return returned[0] if returned else self._numbers[source].peek(tag)

    def _take(self, source: int, tag: int) -> int:
        if self._returned and (returned := self._returned.get((source, tag))):
            number = returned.pop(0)
            if not returned:
                del self._returned[source, tag]
            return number
        return self._numbers[source].next(tag)
