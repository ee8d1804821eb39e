"""The carrier between ranks of one host: messages in shared memory, with nobody between the two loops.

A message is written into its receiver's inbox. Short arrays lie in it; longer ones are copied once, into memory that
the sender lends, and the receiver gets the arrays where they lie. It gives the memory back when it holds none of them
any more.

*Waiting.* A sender waits while an inbox is full, or while too much that was lent to its owner is unread. So what is on
the way is bounded, however slow the receiver. Two ranks never wait for each other so: whoever waits to send waits for a
reader, and a reader waits for nobody. It is a task of its own at each rank, takes what is there, delivers it by a plain
call and goes on, whatever the senders of its rank wait for. What a receiver holds on to is not bounded, and delays
nobody.

*Looking.* The reader looks for a while after each message, and lets its loop turn between two looks; then it sleeps
until a sender rings. So two ranks that talk find each other awake, and the other tasks of a loop do not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from asyncoll.arguments import digest
from asyncoll.errors import AsyncollError, ClosedError, PeerLostError, ProtocolError, UsageError
from asyncoll.rpc.carrier import HEAD_BYTES, Deliver
from asyncoll.rpc.packing import Packing, unpack
from asyncoll.tensors.reductions import Array
from asyncoll.transport import Arena, Wait
from asyncoll.transport.memory.lending import Borrower, Lender
from asyncoll.transport.memory.ring import RETURNED, Inbox, InboxClosedError, Message, encode

INLINE_BYTES = 1 << 15  # of arrays in an inbox; from 50 KiB on it would take longer than to lend them
WINDOW_BYTES = 1 << 26  # lent to a peer and not read by it yet; or one message, however long
_BATCH = 32  # messages that are sent or delivered before the loop may do something else
logger = logging.getLogger("asyncoll")


class InMemory:
    """A `Carrier` between ranks of one host, of which this is one; it may send to itself too."""

    def __init__(
        self,
        arena: Arena,
        context: int,
        ranks: tuple[int, ...],
        check: Callable[[], None],
        broken: Callable[[int, ProtocolError], None],
        lost: Callable[[PeerLostError], AsyncollError],
    ) -> None:
        """`context` is this carrier's name at all `ranks` of the world that take part. One is never used again.

        `check` raises if there is nothing to wait for any more. `broken` is told of a rank that has written what it
        must not, or -1 where that is unknown: nothing is received from then on. `lost` is told of one that has died
        over an inbox, and returns what to raise.
        """
        self._arena = arena
        self._context = context
        self._ranks = ranks
        self._check_world = check
        self._broken = broken
        self._lost = lost
        self._inbox = self._inbox_of(arena.ranks[arena.local_rank])
        self._lender = Lender(arena, self._inbox.control_block, RETURNED)
        self._borrower = Borrower(arena)
        self._outboxes: dict[int, _Outbox] = {}
        self._deliver: Deliver = _drop
        self._reader: asyncio.Task[None] | None = None
        self._sent = 0
        self._is_closed = False

    def open(self, deliver: Deliver) -> None:
        """Begin to receive, on the loop that runs here. What came before is there.

        If `deliver` raises ProtocolError, the source has written what it must not.
        """
        self._deliver = deliver
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def send(self, dest: int, head: bytes, arrays: Sequence[Array] = ()) -> None:
        """Send one message to the rank `dest`. It is delivered before all that are sent after this has returned.

        Returns once it is in the inbox of `dest`, or dropped, if that has closed. If it is cancelled, it is there as a
        whole or not at all.

        Raises UsageError if the head is too long or the host has no memory left for the arrays, PeerLostError if
        somebody died over the inbox, and whatever `check` raises while it waits.
        """
        if len(head) > HEAD_BYTES:
            raise UsageError(f"a head of {len(head)} bytes exceeds the limit of {HEAD_BYTES}")
        self._sent += 1
        if self._sent % _BATCH == 0:
            await asyncio.sleep(0)
        self._check_open()
        outbox = self._outboxes.get(dest) or self._meet(dest)
        try:
            await outbox.send(head, arrays)
        except InboxClosedError:
            return
        except PeerLostError as error:
            raise self._lost(error) from None

    async def close(self) -> None:
        """Stop. What was received stays its holder's, as long as the arena lasts. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._deliver = _drop
        with contextlib.suppress(AsyncollError):
            self._inbox.close()
            while self._inbox.has_messages():
                self._receive()
        with contextlib.suppress(AsyncollError):
            self._borrower.give_back()
            self._lender.close()
        self._arena.recheck()  # those who wait to send hear of it
        tasks = [outbox.pump for outbox in self._outboxes.values() if outbox.pump is not None]
        if self._reader is not None:
            self._reader.cancel()
            tasks.append(self._reader)
        if tasks:
            await asyncio.wait(tasks)

    def _check(self) -> None:
        self._check_open()
        self._check_world()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this carrier is closed")

    def _meet(self, rank: int) -> _Outbox:
        if rank not in self._ranks:
            raise UsageError(f"rank {rank} is not one of {self._ranks}")
        outbox = self._outboxes[rank] = _Outbox(rank, self._inbox_of(rank), self._arena, self._lender, self._check)
        return outbox

    def _inbox_of(self, rank: int) -> Inbox:
        return Inbox(self._arena, digest("inbox", self._context, rank))

    # -- receiving --------------------------------------------------------------------------------

    async def _read(self) -> None:
        wait = Wait(self._inbox.control_block, self._has_work)
        try:
            while True:
                if not self._has_work():
                    await self._arena.wait(wait, self._check, lambda: "messages of other ranks", yielding=True)
                self._borrower.give_back()
                if self._inbox.has_messages():
                    self._receive()
                    await asyncio.sleep(0)  # those whom it concerns come first
        except ProtocolError as error:
            self._broken(error.source, error)
        except PeerLostError as error:
            self._lost(error)
        except AsyncollError:  # the world's failure
            return
        except Exception as error:  # or those who wait for an answer would wait for ever
            logger.exception("the inbox cannot be read")
            self._broken(-1, ProtocolError(f"the inbox cannot be read: {error!r}"))

    def _has_work(self) -> bool:
        return self._inbox.has_messages() or self._borrower.has_dropped()

    def _receive(self) -> None:
        for message in self._inbox.take(_BATCH):
            source = self._arena.ranks[message.source]
            if source not in self._ranks:
                raise ProtocolError("a message from somebody who takes no part", source)
            try:
                self._deliver(source, message.head, self._arrays(source, message))
            except ProtocolError as error:
                raise ProtocolError(str(error), source) from error

    def _arrays(self, source: int, message: Message) -> Sequence[Array]:
        if not message.arrays:
            return ()
        if not message.address:
            return unpack(message.inline, message.arrays)
        lender = (self._outboxes.get(source) or self._meet(source)).inbox.control_block
        body = self._borrower.borrow(lender, RETURNED, message.address, message.nbytes)
        return unpack(body.data, message.arrays)


class _Parcel(NamedTuple):
    """An encoded message, and the memory that is lent with it, if its address is not 0."""

    raw: bytes
    address: int = 0
    nbytes: int = 0


class _Outbox:
    """The way to one peer's inbox, for all tasks of this rank."""

    def __init__(self, rank: int, inbox: Inbox, arena: Arena, lender: Lender, check: Callable[[], None]) -> None:
        self.inbox = inbox
        self.pump: asyncio.Task[None] | None = None
        self._rank = rank
        self._arena = arena
        self._lender = lender
        self._check = check
        self._queue: deque[tuple[_Parcel, asyncio.Future[None]]] = deque()  # those that wait for room
        self._long = asyncio.Lock()  # one long message at a time is made, or there would be no bound
        self._unread: deque[tuple[int, int]] = deque()  # of what was lent: where the message ends, and its bytes
        self._unread_bytes = 0

    async def send(self, head: bytes, arrays: Sequence[Array]) -> None:
        """Wait for room, and put the message into the inbox. Nothing can undo that."""
        local_rank = self._arena.local_rank
        if not arrays:
            await self._put(_Parcel(encode(Message(local_rank, head))))
            return
        packing = Packing(arrays)
        if packing.nbytes <= INLINE_BYTES:
            await self._put(_Parcel(encode(Message(local_rank, head, len(arrays), packing.joined()))))
            return
        async with self._long:
            await self._make_room(packing.nbytes)
            address = self._lender.take(packing.nbytes)
            try:
                for _ in packing.fill(self._arena.view(address, packing.nbytes)):
                    await asyncio.sleep(0)
                raw = encode(Message(local_rank, head, len(arrays), b"", address, packing.nbytes))
                await self._put(_Parcel(raw, address, packing.nbytes))
            finally:
                self._lender.keep_unless_lent(address)

    async def _put(self, parcel: _Parcel) -> None:
        if not self._queue:
            with self.inbox.control_block:
                if self._is_put(parcel):
                    return
        put = asyncio.get_running_loop().create_future()
        self._queue.append((parcel, put))
        if self.pump is None:
            self.pump = asyncio.get_running_loop().create_task(self._pump())
        await put

    def _is_put(self, parcel: _Parcel) -> bool:
        """Put it into the inbox, if there is room. Under the lock."""
        raw, address, nbytes = parcel
        end = self.inbox.put(raw)
        if end is None:
            return False
        if address:
            self._lender.lend(address)
            self._unread.append((end, nbytes))
            self._unread_bytes += nbytes
        return True

    async def _pump(self) -> None:
        """Put what is in the queue: all that there is room for at once, or each would take a turn of the loop."""
        try:
            while self._queue:
                with self.inbox.control_block:
                    self._put_first()
                if self._queue:
                    await self._until(partial(self.inbox.has_room, len(self._queue[0][0].raw)))
        except Exception as error:
            for _, put in self._queue:
                if not put.done():
                    put.set_exception(error)
            self._queue.clear()
        finally:
            self.pump = None

    def _put_first(self) -> None:
        while self._queue:
            parcel, put = self._queue[0]
            if not put.done():  # or it was cancelled
                if not self._is_put(parcel):
                    return
                put.set_result(None)
            self._queue.popleft()

    async def _make_room(self, nbytes: int) -> None:
        """Wait until so much more may be on the way."""
        while self._unread and self._unread_bytes + nbytes > WINDOW_BYTES:
            end, oldest = self._unread[0]
            await self._until(partial(self.inbox.is_read, end))
            self._unread.popleft()
            self._unread_bytes -= oldest

    async def _until(self, ready: Callable[[], bool]) -> None:
        await self._arena.wait(Wait(self.inbox.control_block, ready), self._check, self._what, yielding=True)

    def _what(self) -> str:
        return f"rank {self._rank} to read what it was sent"


def _drop(source: int, head: bytes, arrays: Sequence[Array]) -> None:
    pass
