"""The carrier of RPC between ranks of one host: messages in shared memory.

The sender writes a message into the inbox of the receiver, from its own loop; no other thread takes part. Short arrays
are part of the message. Longer arrays are copied once, into memory that the sender lends; the receiver gets views of
that memory. It returns the memory when no view is referenced any more.

*Flow control.* A sender waits while the inbox is full, or while too much lent memory is unread. So the memory under way
is bounded, however slow the receiver is. This cannot deadlock: a sender waits for a reader only, and a reader never
waits for a sender. The reader is a task of its own at each rank, which delivers messages by plain calls. Memory that a
receiver keeps is not bounded, and delays no sender.

*Polling.* After each message the reader polls its inbox for a short time, with a turn of its loop between two polls;
then it sleeps until a sender wakes it. So two ranks that exchange messages find each other awake, and the other tasks
of the loop are not delayed. The sender of a long message wakes the reader before the last part of its copy, so that the
reader polls when the message comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import types
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from asyncoll.arguments import digest
from asyncoll.errors import AsyncollError, ClosedError, ProtocolError, UsageError
from asyncoll.rpc.carrier import HEAD_BYTES, Deliver
from asyncoll.rpc.packing import Packing, unpack
from asyncoll.tensors.reductions import Array
from asyncoll.transport import Arena, Wait, settle
from asyncoll.transport.memory.lending import Borrower, Lender
from asyncoll.transport.memory.ring import RETURNED, Inbox, InboxClosedError, RingMessage, encode, encode_head

INLINE_BYTES = 1 << 15  # arrays that are copied into the inbox; from 50 KiB on, lending is faster
AT_ONCE_BYTES = 1 << 22  # arrays that are copied without a turn for other tasks; at most about 0.4 ms
ANNOUNCED_BYTES = 1 << 18  # arrays from this size on are announced: their copy takes as long as to wake a reader
WINDOW_BYTES = 1 << 26  # memory that is lent to a peer and unread; or one message, however long
_BATCH = 32  # messages to send or deliver before other tasks of the loop get a turn
logger = logging.getLogger("asyncoll")


class MemoryCarrier:
    """A `Carrier` between the ranks of one host, on the loop on which it is opened. Peers are world ranks.

    In: `send` (tasks of this rank), and messages of peers, read by the task `_read`. Out: `deliver`; the inboxes of
    peers.
    """

    def __init__(
        self,
        arena: Arena,
        context: int,
        ranks: tuple[int, ...],
        check: Callable[[], None],
        broken: Callable[[int, ProtocolError], None],
    ) -> None:
        """`context` names this carrier at all `ranks` (of the world) that take part. A context is used once.

        `check` raises if the world has failed. `broken` handles a rank that violates the protocol, -1 if the rank is
        unknown; nothing is received after that.
        """
        self._arena = arena
        self._context = context
        self._ranks = ranks
        self._check_world = check
        self._broken = broken
        self._inbox = self._inbox_of(arena.ranks[arena.local_rank])
        # Where ranks share a thread, the control block has no lock.
        self.sends_in_any_thread = not self._inbox.control_block.interleaved
        self._lender = Lender(arena, self._inbox.control_block, RETURNED)
        self._borrower = Borrower(arena)
        self._outboxes: dict[int, _Outbox] = {}
        self._deliver: Deliver = _drop
        self._reader: asyncio.Task[None] | None = None
        self._sent = 0
        self._is_closed = False

    def open(self, deliver: Deliver) -> None:
        """Begin to receive, on the loop that runs here. Messages that came before are delivered first.

        If `deliver` raises ProtocolError, the source has violated the protocol.
        """
        self._deliver = deliver
        self._reader = asyncio.get_running_loop().create_task(self._read())

    def send_nowait(self, dest: int, head: bytes, arrays: Sequence[Array] = ()) -> bool:
        """Send a message if that needs no wait. The first message to a rank is not sent here: it opens the inbox.

        Without arrays, in any thread, between processes: this reads what the loop's thread changes in single steps, and
        the lock of the inbox guards the rest.
        """
        outbox = self._outboxes.get(dest)
        if outbox is None or len(head) > HEAD_BYTES or self._is_closed:
            return False
        try:
            return outbox.send_nowait(head, arrays) if arrays else outbox.put_head(head)
        except InboxClosedError:
            return True

    async def send(self, dest: int, head: bytes, arrays: Sequence[Array] = ()) -> None:
        """Send one message to the world rank `dest`. It is delivered before messages that are sent after this returns.

        Returns once the message is in the inbox of `dest`. If that inbox is closed, the message is dropped. If this is
        cancelled, the message is in the inbox as a whole or not at all.

        Raises UsageError if the head is too long or the host has no memory left for the arrays, PeerLostError if a rank
        died while it had the lock of the inbox, and the errors of `check` while it waits.
        """
        if len(head) > HEAD_BYTES:
            raise UsageError(f"a head of {len(head)} bytes exceeds the limit of {HEAD_BYTES}")
        # In memory there may always be room: a task that only sends would never let its loop turn.
        self._sent += 1
        if self._sent % _BATCH == 0:
            await asyncio.sleep(0)
        self._check_open()
        outbox = self._outboxes.get(dest) or self._open_outbox(dest)
        with contextlib.suppress(InboxClosedError):
            await outbox.send(head, arrays)

    async def close(self) -> None:
        """Stop. Received arrays stay valid as long as the arena exists. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._deliver = _drop
        with contextlib.suppress(AsyncollError):
            self._inbox.close()
            # What has come is taken, and dropped: the memory that was lent with it has to return.
            while self._inbox.has_messages():
                self._receive()
        with contextlib.suppress(AsyncollError):
            self._borrower.give_back()
            self._lender.close()
        # This wakes the tasks that wait to send. They call `_check`, and raise.
        self._arena.recheck()
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

    def _open_outbox(self, rank: int) -> _Outbox:
        if rank not in self._ranks:
            raise UsageError(f"rank {rank} is not one of {self._ranks}")
        outbox = self._outboxes[rank] = _Outbox(rank, self._inbox_of(rank), self._arena, self._lender, self._check)
        return outbox

    def _inbox_of(self, rank: int) -> Inbox:
        return Inbox(self._arena, digest("inbox", self._context, rank))

    # -- receiving --------------------------------------------------------------------------------

    async def _read(self) -> None:
        """The reader: delivers messages, and returns the memory that this rank has dropped."""
        wait = Wait(self._inbox.control_block, self._has_work)
        try:
            while True:
                if not self._has_work():
                    await self._arena.wait(wait, self._check, lambda: "messages of other ranks", yielding=True)
                self._inbox.hear()
                self._borrower.give_back()
                if self._inbox.has_messages():
                    self._receive()
                    # The tasks that the messages have woken run before the next poll, which keeps the loop for a while.
                    await turn()
        except ProtocolError as error:
            self._broken(error.source, error)
        # Other parts of the runtime report the failure of the world.
        except AsyncollError:
            return
        # An error of this library: without a failure, callers would wait for ever for their answers.
        except Exception as error:
            logger.exception("the inbox cannot be read")
            self._broken(-1, ProtocolError(f"the inbox cannot be read: {error!r}"))

    def _has_work(self) -> bool:
        inbox = self._inbox
        return inbox.has_messages() or inbox.has_announcements() or bool(self._borrower.dropped)

    def _receive(self) -> None:
        for message in self._inbox.take():
            source = self._arena.ranks[message.source]
            # All ranks of the host can write here, also those that are not of this communicator.
            if source not in self._ranks:
                raise ProtocolError("a message from a rank outside of this communicator", source)
            try:
                self._deliver(source, message.head, self._arrays(source, message))
            except ProtocolError as error:
                raise ProtocolError(str(error), source) from error

    def _arrays(self, source: int, message: RingMessage) -> Sequence[Array]:
        """The arrays of a message, in the message itself or in memory that `source` has lent."""
        if not message.arrays:
            return ()
        if not message.address:
            return unpack(message.inline, message.arrays)
        lender = (self._outboxes.get(source) or self._open_outbox(source)).inbox.control_block
        body = self._borrower.borrow(lender, RETURNED, message.address, message.nbytes)
        return unpack(body.data, message.arrays)


class _OutgoingMessage(NamedTuple):
    """An encoded message, and the memory that is lent with it; address 0 means none."""

    raw: bytes
    address: int = 0
    nbytes: int = 0


class _Outbox:
    """Sends to the inbox of one peer, for all tasks of this rank.

    Tasks that find the inbox full queue here. One task, the pump, moves the queue: with a lock that each sender takes
    in turn, every message would take a turn of the loop.
    """

    def __init__(self, rank: int, inbox: Inbox, arena: Arena, lender: Lender, check: Callable[[], None]) -> None:
        self.inbox = inbox
        self.pump: asyncio.Task[None] | None = None
        self._rank = rank
        self._arena = arena
        self._lender = lender
        self._check = check
        self._queue: deque[tuple[_OutgoingMessage, asyncio.Future[None]]] = deque()  # messages that wait for room
        self._long = asyncio.Lock()  # one long message is copied at a time, so that its memory counts in the window
        self._unread: deque[tuple[int, int]] = deque()  # lent memory: the end of its message in the ring, and its bytes
        self._unread_bytes = 0

    async def send(self, head: bytes, arrays: Sequence[Array]) -> None:
        """Wait for room, and put the message into the inbox. Cannot be undone."""
        local_rank = self._arena.local_rank
        if not arrays:
            await self._put(_OutgoingMessage(encode_head(local_rank, head)))
            return
        packing = Packing(arrays)
        if packing.nbytes <= INLINE_BYTES:
            await self._put(_OutgoingMessage(encode(RingMessage(local_rank, head, len(arrays), packing.joined()))))
            return
        async with self._long:
            while not self._fits_window(packing.nbytes):
                await self._until(partial(self.inbox.is_read, self._unread[0][0]))
            address = self._lender.take(packing.nbytes)
            try:
                for _ in self._copies(packing, address):
                    await asyncio.sleep(0)
                await self._put(self._lending(head, packing, address))
            finally:
                self._lender.keep_unless_lent(address)

    def send_nowait(self, head: bytes, arrays: Sequence[Array]) -> bool:
        """Send a message if the arrays are not too long and no wait is necessary; returns whether it was done."""
        packing = Packing(arrays)
        # A message must not overtake those that wait for room.
        if packing.nbytes > AT_ONCE_BYTES or self._queue:
            return False
        if packing.nbytes <= INLINE_BYTES:
            raw = encode(RingMessage(self._arena.local_rank, head, len(arrays), packing.joined()))
            with self.inbox.control_block:
                return self.inbox.put(raw) is not None
        if self._long.locked() or not self._fits_window(packing.nbytes):
            return False
        try:
            address = self._lender.take(packing.nbytes)
        # No memory is left. `send`, which follows, raises that to the caller.
        except UsageError:
            return False
        try:
            for _ in self._copies(packing, address):
                pass
            with self.inbox.control_block:
                return self._try_put(self._lending(head, packing, address))
        finally:
            self._lender.keep_unless_lent(address)

    def _fits_window(self, nbytes: int) -> bool:
        """Whether a long message may be lent, which is so once the peer has read enough of those before it."""
        while self._unread and self._unread_bytes + nbytes > WINDOW_BYTES:
            end, oldest = self._unread[0]
            if not self.inbox.is_read(end):
                return False
            self._unread.popleft()
            self._unread_bytes -= oldest
        return True

    def _copies(self, packing: Packing, address: int) -> Iterator[None]:
        """Copy the arrays into the block at `address`, and announce the message before the last part."""
        for is_last in packing.fill(self._arena.view(address, packing.nbytes)):
            if not is_last:
                yield
            elif packing.nbytes >= ANNOUNCED_BYTES:
                self.inbox.announce()

    def _lending(self, head: bytes, packing: Packing, address: int) -> _OutgoingMessage:
        message = RingMessage(self._arena.local_rank, head, packing.count, b"", address, packing.nbytes)
        return _OutgoingMessage(encode(message), address, packing.nbytes)

    def put_head(self, head: bytes) -> bool:
        """Put a message without arrays into the inbox unless others wait or there is no room; return whether so."""
        if self._queue:
            return False
        raw = encode_head(self._arena.local_rank, head)
        with self.inbox.control_block:
            return self.inbox.put(raw) is not None

    async def _put(self, message: _OutgoingMessage) -> None:
        if not self._queue:
            with self.inbox.control_block:
                if self._try_put(message):
                    return
        put = asyncio.get_running_loop().create_future()
        self._queue.append((message, put))
        if self.pump is None:
            self.pump = asyncio.get_running_loop().create_task(self._pump())
        await put

    def _try_put(self, message: _OutgoingMessage) -> bool:
        """Put the message into the inbox if there is room; return whether so. Call it with the lock held."""
        raw, address, nbytes = message
        end = self.inbox.put(raw)
        if end is None:
            return False
        # Only now: the peer gives back what it finds in its inbox, and nothing else.
        if address:
            self._lender.lend(address)
            self._unread.append((end, nbytes))
            self._unread_bytes += nbytes
        return True

    async def _pump(self) -> None:
        """Move the queue into the inbox, as many messages under one lock as there is room for."""
        try:
            while self._queue:
                with self.inbox.control_block:
                    # `done` means that the sender was cancelled.
                    while self._queue and (self._queue[0][1].done() or self._try_put(self._queue[0][0])):
                        _, put = self._queue.popleft()
                        settle(put)
                if self._queue:
                    await self._until(partial(self.inbox.has_room, len(self._queue[0][0].raw)))
        except Exception as error:
            for _, put in self._queue:
                if not put.done():
                    put.set_exception(error)
            self._queue.clear()
        finally:
            self.pump = None

    async def _until(self, ready: Callable[[], bool]) -> None:
        what = f"rank {self._rank} to read its messages"
        await self._arena.wait(Wait(self.inbox.control_block, ready), self._check, lambda: what, yielding=True)


@types.coroutine
def turn() -> Generator[None, None, None]:
    """Let the loop run other tasks: `asyncio.sleep(0)` at half of its price."""
    yield


def _drop(source: int, head: bytes, arrays: Sequence[Array]) -> None:
    pass
