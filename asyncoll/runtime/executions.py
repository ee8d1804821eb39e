"""Executions of operations by message: sends, receives, flow control and mismatch detection.

An execution is one call of a collective, or one round, at one rank. Its key is (context, number), which is the same at
all ranks.

*Flow control.* An array of up to one segment is short: it is sent at once and waits at the receiver until the receive
is posted. A window for each pair of ranks bounds the bytes that wait there. A long array waits at the sender until its
receive is posted (message GRANT). So a long array never occupies memory twice at the receiver, and no message has to
wait behind it. A long message of one rank to another is announced while it waits (message OFFER), because a receive
from any source is posted for a sender only once something of it has come.

*Early and late messages.* A message may arrive before this rank opens its execution, and after the execution has ended
here. Early segments are kept in the mailbox of the execution. An execution that only receives can be undone: what has
come is then early again, for another call with the same key.

*Mismatches.* Every message carries the fingerprint of the call that its sender has made. If two fingerprints differ,
the rank that notices sends a Dispute with its own call; the other rank answers to all members with a Mismatch, which
names both calls. Ranks that wait for each other are compared by `checks`.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from asyncoll.errors import ProtocolError
from asyncoll.runtime.checks import Checks
from asyncoll.runtime.failures import WORLD, Failure, Failures, break_off
from asyncoll.runtime.matching import Key, Mailbox, Receive
from asyncoll.runtime.membership import Membership
from asyncoll.runtime.router import Router
from asyncoll.runtime.signature import END
from asyncoll.tensors.reductions import Array
from asyncoll.transport import Buffer, Transport, settle, wire
from asyncoll.transport.wire import SEGMENT_BYTES

WINDOW_BYTES = 64 * SEGMENT_BYTES  # short arrays from one rank to another that the receiver has not consumed
_MESSAGE_COST = 64  # bytes that a message takes of the window beside its payload: bounds empty messages, too
# Finished executions that can still be named in a mismatch; others for which a CHECK has come: a rank may be checked
# for one that it has long forgotten.
_RECENT_MAX = 256
_MARK = 0xFFFFFFFF << 32


class Identity(NamedTuple):  # not a frozen dataclass: that takes five times as long to make
    """Identifies one execution: the values that its ranks must agree on, and its description for errors."""

    communicator: int
    members: tuple[int, ...]  # world ranks
    epoch: int
    context: int
    number: int
    fingerprint: int
    describe: Callable[[], str]


def marked(fingerprint: int, communicator: int) -> int:
    """`fingerprint` with the mark of `communicator` in its upper half.

    A message whose context is a digest tells its communicator by it, also where no receive is posted. Two communicators
    have the same mark with a probability of 2^-32, the same as for two fingerprints. Closing one of such a pair drops
    what the other has not received yet. One in a million programs with a hundred groups at once has such a pair.
    """
    return communicator & _MARK | fingerprint & ~_MARK


class EarlyExecution:
    """An execution of which messages have come, and that this rank has not opened."""

    __slots__ = ("fingerprints", "granted", "is_undone", "mailbox", "piggybacks", "serial")

    def __init__(self, serial: int) -> None:
        """`serial` is the order in which executions became known here."""
        self.serial = serial
        self.is_undone = False  # its segments are granted or credited already
        self.mailbox = Mailbox()
        self.granted: set[Key] = set()  # destinations whose receive is posted
        self.fingerprints: dict[int, int] = {}  # by source
        self.piggybacks: list[tuple[int, Buffer]] = []  # source and bytes

    def is_of(self, communicator: int) -> bool:
        """Whether what has come is of a call (`marked`) on `communicator`."""
        return any(marked(each, communicator) == each for each in self.fingerprints.values())


class Execution:
    """One execution of one operation that is open at this rank."""

    __slots__ = ("beside", "checked", "granted", "identity", "is_undone", "mailbox", "piggyback", "serial", "waits")

    def __init__(
        self,
        identity: Identity,
        piggyback: Array | None,
        serial: int,
        early: EarlyExecution | None,
    ) -> None:
        """`serial` is the order in which executions became known here: that of `early`, if it was known before."""
        self.identity = identity
        self.piggyback = piggyback  # holds the maximum of all that have come
        self.beside: list[Buffer] = [] if piggyback is None else [piggyback.view(np.uint8)]  # goes with every array
        self.serial = serial
        self.is_undone = early is not None and early.is_undone
        self.mailbox = Mailbox() if early is None else early.mailbox
        self.granted: set[Key] = set() if early is None else early.granted
        self.waits: dict[asyncio.Future[None], Key | None] = {}  # the waits of this rank; the key if for a grant
        self.checked: set[int] = set()  # the world ranks that were asked whether they are in this call (`checks`)

    def awaited(self) -> set[int]:
        """The world ranks that this rank waits for now."""
        if not self.waits:
            return set()
        return {rank for rank, _ in (*self.mailbox.posted, *filter(None, self.waits.values()))}


class _FlowControl:
    """Flow control between this rank and one peer, in bytes, in both directions."""

    __slots__ = ("_lock", "early_bytes", "earned_bytes", "outstanding_bytes", "waiters")

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of `outstanding_bytes`, which `Executions.send_directly` changes in any thread
        self.outstanding_bytes = 0  # sent to the peer, and not credited yet
        self.early_bytes = 0  # of the peer, waiting here for a receive
        self.earned_bytes = 0  # of the peer, consumed here, and not credited yet
        self.waiters: list[asyncio.Future[None]] = []  # sends that wait for credit

    def outstanding(self, nbytes: int) -> bool:
        """Count bytes sent to the peer, or taken back (negative). Returns False if the window has no room for them."""
        with self._lock:
            if self.outstanding_bytes + nbytes > WINDOW_BYTES:
                return False
            self.outstanding_bytes += nbytes
            return True


class _Links(dict[int, _FlowControl]):
    """Flow control with each peer. From any thread: `setdefault` is one atomic step."""

    def __missing__(self, peer: int) -> _FlowControl:
        return self.setdefault(peer, _FlowControl())


class Executions:
    """The executions of one rank. Everything but `send_directly` runs on the runtime's loop.

    In, from `group.Lane` (the calls of this rank): `open`, `post`, `wait`, `send`, `end`. In, from callers in any
    thread: `send_directly`, a whole execution that sends one short array. In, from the endpoint (messages of peers):
    `arrived`, `granted`, `offered`, `credited`, `checked`, `answer`. In, from `Failures`: `_break_off`, which ends the
    waits of a failed communicator. Out: DATA, GRANT, OFFER, CREDIT, CHECK and Dispute messages through the router;
    mismatches and protocol errors to `Failures`; futures that the coroutines of this rank await.
    """

    def __init__(self, transport: Transport, router: Router, failures: Failures, membership: Membership) -> None:
        self._transport = transport
        self._membership = membership
        self._router = router
        self._failures = failures
        self._open: dict[tuple[int, int], Execution] = {}
        self._early: dict[tuple[int, int], EarlyExecution] = {}
        self._finished: dict[tuple[int, int], Identity] = {}  # the last _RECENT_MAX
        self._abandoned: dict[tuple[int, int], int] = {}  # ended by an exception: their communicators
        self._links = _Links()
        # Executions that callers have carried out in their threads, until the runtime's loop needs to know of them.
        self._sent_directly: deque[Identity] = deque(maxlen=_RECENT_MAX)
        # By context, for executions that this class does not keep (rounds): a function that returns the world ranks of
        # the one with a number, and its text; None if it is unknown.
        self.described: dict[int, Callable[[int], tuple[tuple[int, ...], str] | None]] = {}
        self._last_heard: dict[int, tuple[int, int]] = {}  # by source: the execution of its last message
        self._serials = itertools.count(1)  # of executions as they become known here
        # By context: called after each message that comes before its execution is open.
        self.on_early: dict[int, Callable[[], None]] = {}
        self._checks = Checks(self._open.values, self._check)
        self._checked: dict[tuple[int, int], dict[int, int]] = {}  # executions not open here: fingerprints by source
        failures.on_failure(WORLD, self._break_off)

    def open(self, identity: Identity, piggyback: Array | None = None) -> Execution:
        """Begin an execution at this rank. Raises the error of the communicator if it has failed.

        `piggyback` is a short array that every message carries. It becomes, in place and element by element, the
        maximum of this array and of all that arrive.
        """
        self._failures.check(identity.communicator)
        key = (identity.context, identity.number)
        assert key not in self._open, f"{identity.describe()} is already open"
        early = self._early.pop(key, None)
        serial = early.serial if early else next(self._serials)
        execution = self._open[key] = Execution(identity, piggyback, serial, early)
        if early is not None:
            for source, fingerprint in early.fingerprints.items():
                if fingerprint != identity.fingerprint:
                    # These segments belong to another call than this one.
                    execution.mailbox.forget(source)
                    self._dispute(source, identity)
            # Until now there was nothing here to merge them with.
            for source, its in early.piggybacks:
                if early.fingerprints[source] == identity.fingerprint:
                    self._merge_piggyback(source, execution, its)
        # Peers that asked about this execution before it was open here are answered now, if the calls differ.
        for source, fingerprint in self._checked.pop(key, {}).items():
            if fingerprint != identity.fingerprint:
                self._dispute(source, identity)
        return execution

    def end(self, execution: Execution, *, completed: bool) -> None:
        """Forget an execution. If it was not `completed`, messages that still arrive for it are dropped."""
        identity = execution.identity
        key = (identity.context, identity.number)
        del self._open[key]
        # Peers go on sending until they learn of the failure. What they send must not open the execution again.
        if not completed:
            self._abandoned[key] = identity.communicator
            return
        # A message for a call that is over comes from a rank that makes another one. It can be told of the last calls
        # by name; a rank that keeps them all would fill its memory.
        self._finished[key] = identity
        if len(self._finished) > _RECENT_MAX:
            del self._finished[next(iter(self._finished))]

    def post(self, execution: Execution, source: int, step: int, receive: Receive) -> None:
        """Post a receive from world rank `source`. Does not wait; `wait` does.

        Raises ProtocolError, or the error of the communicator, if segments that came early do not fit.
        """
        try:
            early = execution.mailbox.post((source, step), receive)
            # A second credit for the same bytes would let the sender exceed the window.
            if execution.is_undone:
                return
            if early:
                self._links[source].early_bytes -= sum(map(cost_of, early))
                _check_whole(receive)
        except ProtocolError as error:
            self._failures.broken(source, error)
            self._failures.check(execution.identity.communicator)
            raise
        # The sender of a long array waits until this rank has memory for it. A short one has come out of the window.
        if receive.into.nbytes > SEGMENT_BYTES:
            self.grant(execution, source, step)
        else:
            for payload in early:
                self._earn(source, cost_of(payload))

    async def wait(self, execution: Execution, *receives: Receive) -> None:
        """Wait until one of `receives`, none of which is complete yet, is. Raises the error of the communicator."""
        # A failure ends the waits that it finds. It would not end one that begins afterwards.
        self._failures.check(execution.identity.communicator)
        future = asyncio.get_running_loop().create_future()
        for receive in receives:
            receive.on_complete = partial(settle, future)
        execution.waits[future] = None
        self._checks.waits()
        try:
            await future
        finally:
            del execution.waits[future]

    def send_nowait(self, execution: Execution, dest: int, step: int, data: Array) -> bool:
        """Send the flat array `data` to world rank `dest` if it is short and the window has room; return whether so.

        The transport copies the data. This path has no coroutine, because most messages are short and the window is
        wide.
        """
        if data.nbytes > SEGMENT_BYTES or not self._links[dest].outstanding(data.nbytes + _MESSAGE_COST):
            return False
        self._router.send(dest, _frames(wire.DATA, execution.identity, step, data.view(np.uint8), *execution.beside))
        return True

    def send_directly(self, identity: Identity, dest: int, data: Array) -> bool:
        """Carry out an execution of which this rank's part is to send the short array `data` to world rank `dest`.

        Returns False, and does nothing, if that needs the runtime's loop: because the window or the transport is full,
        or a communicator has failed. From any thread, under the conditions of
        `Transport.send_directly`. The loop need not wake: it enters the execution when it next looks for one.
        """
        cost = data.nbytes + _MESSAGE_COST
        if self._failures.any:
            return False
        link = self._links[dest]
        if not link.outstanding(cost):
            return False
        # Noted first, because a Dispute may come before `send_directly` returns. If the transport refuses, the note
        # does no harm: the same execution is opened on the loop.
        self._sent_directly.append(identity)
        sent = self._router.send_directly(dest, _frames(wire.DATA, identity, 0, data.view(np.uint8)))
        # The window was charged first: the loop may send to this peer between the two steps.
        if not sent:
            link.outstanding(-cost)
        return sent

    def _enter_direct(self) -> None:
        """Enter the executions that callers have carried out in their threads."""
        while self._sent_directly:
            identity = self._sent_directly.popleft()
            # An open one is of the same call, which the transport has refused to send directly.
            if not self._failures.any and (identity.context, identity.number) not in self._open:
                self.end(self.open(identity), completed=True)

    async def send(self, execution: Execution, dest: int, step: int, data: Array, *, offers: bool = False) -> None:
        """Send the flat array `data` to world rank `dest`. `data` must not change until this returns.

        Waits for credit (short arrays) or for the posted receive (long arrays). With `offers` a long array is announced
        while it waits. Raises the error of the communicator.
        """
        if data.nbytes <= SEGMENT_BYTES:
            while not self.send_nowait(execution, dest, step, data):
                await self._wait_for_credit(execution, dest)
            return
        if offers:
            await self.offer(execution, dest, step)
        else:
            await self._wait_for_grant(execution, dest, step)
        # One grant is for one array: the receiver has memory for that, and not for the next one of this step.
        execution.granted.discard((dest, step))
        raw = data.view(np.uint8)
        for start in range(0, raw.size, SEGMENT_BYTES):
            segment = raw[start : start + SEGMENT_BYTES]
            self._router.send(dest, _frames(wire.DATA, execution.identity, step, segment, *execution.beside))
            # The transport copies what it queues. Without this wait it would have a copy of the whole array.
            await self._transport.drain(dest)

    async def offer(self, execution: Execution, dest: int, step: int) -> None:
        """Announce a long array to world rank `dest`, and return once its receive is posted: `send` follows."""
        if (dest, step) not in execution.granted:
            self._failures.check(execution.identity.communicator)
            self._router.send(dest, _frames(wire.OFFER, execution.identity, step))
        await self._wait_for_grant(execution, dest, step)

    def grant(self, execution: Execution, source: int, step: int) -> None:
        """Tell world rank `source` that this rank takes `step`, before it posts the receive of a long array."""
        # Otherwise the array has been granted already.
        if not execution.is_undone:
            self._router.send(source, _frames(wire.GRANT, execution.identity, step))

    async def _wait_for_credit(self, execution: Execution, dest: int) -> None:
        identity = execution.identity
        what = f"{identity.describe()}: rank {dest} has not consumed what it was sent"
        # Not among the waits of the execution, about which `checks` asks: the window is shared by all calls, and the
        # peer may fail to consume another one.
        with self._failures.watch(identity.communicator, what) as future:
            self._links[dest].waiters.append(future)
            await future

    async def _wait_for_grant(self, execution: Execution, dest: int, step: int) -> None:
        key = (dest, step)
        self._failures.check(execution.identity.communicator)
        if key not in execution.granted:
            future = asyncio.get_running_loop().create_future()
            execution.waits[future] = key
            self._checks.waits()
            try:
                await future
            finally:
                del execution.waits[future]

    def waiting(self) -> list[str]:
        """One line for each receive and each grant that this rank waits for."""
        lines = []
        for execution in self._open.values():
            if not execution.waits:
                continue
            what = execution.identity.describe()
            lines += [f"{what}: step {step} from rank {source}" for source, step in execution.mailbox.waiting_for()]
            to = [key for key in execution.waits.values() if key is not None]
            lines += [f"{what}: rank {dest} has not posted its receive for step {step}" for dest, step in to]
        return lines

    def _break_off(self, failure: Failure, communicator: int) -> None:
        """End every wait of `communicator`; WORLD means all of them."""
        # The futures wake their tasks in a later turn of the loop, so no execution comes or goes in this loop.
        for execution in self._open.values():
            if communicator in (WORLD, execution.identity.communicator):
                for future in execution.waits:
                    break_off(future, failure)

    # -- executions that wait for any of several messages -----------------------------------------

    def serial(self, context: int, number: int, source: int) -> int | None:
        """The order in which the first message of an execution came; None if none of world rank `source` has come.

        The execution is not open here.
        """
        early = self._early.get((context, number))
        return early.serial if early is not None and source in early.fingerprints else None

    def undo(self, identity: Identity, source: int, step: int, receive: Receive) -> None:
        """Undo an execution of which this rank's part is to receive one array from world rank `source`.

        It is open, or has ended as completed. What has come is kept for the next call with this key, and what still
        comes, too. `receive.into` is not used afterwards.
        """
        key = (identity.context, identity.number)
        self._finished.pop(key, None)
        execution = self._open.pop(key, None)
        # It was the first to come, so it is served before all that have come since: its serial is less than theirs.
        early = self._early[key] = EarlyExecution(0 if execution is None else execution.serial)
        early.fingerprints[source] = identity.fingerprint
        early.is_undone = True
        if execution is not None:
            early.mailbox, early.granted = execution.mailbox, execution.granted
        early.mailbox.undo((source, step), receive)
        self._tell_early(identity.context)

    def _tell_early(self, context: int) -> None:
        wake = self.on_early.get(context)
        if wake is not None:
            wake()

    # -- incoming messages ------------------------------------------------------------------------

    def arrived(self, source: int, header: wire.Header, payload: Buffer, piggyback: Buffer | None = None) -> None:
        """A DATA message of world rank `source`: one segment, and the piggyback if there is one.

        Raises ProtocolError if the segment does not fit its receive, or if more than the window waits here.
        """
        execution = self._matching_execution(source, header)
        if execution is None:
            return
        if piggyback is not None:
            self._merge_piggyback(source, execution, piggyback)
        receive = execution.mailbox.arrive((source, header.step), payload)
        if receive is not None:
            _check_whole(receive)
            # Segments of a long array come after a grant, and take no room in the window.
            if receive.into.nbytes <= SEGMENT_BYTES:
                self._earn(source, cost_of(payload))
            return
        if execution.is_undone:
            return
        link = self._links[source]
        link.early_bytes += cost_of(payload)
        # A peer that keeps the rules waits for credit before it has sent so much. Another one must not fill the memory.
        if link.early_bytes > WINDOW_BYTES:
            raise ProtocolError(f"{link.early_bytes} bytes without a posted receive; the window allows {WINDOW_BYTES}")
        self._tell_early(header.context)

    def offered(self, source: int, header: wire.Header) -> None:
        """An OFFER message: a long array of world rank `source` waits for its receive."""
        if self._matching_execution(source, header) is not None:
            self._tell_early(header.context)

    def granted(self, source: int, header: wire.Header) -> None:
        """A GRANT message: world rank `source` has posted its receive for a long array."""
        execution = self._matching_execution(source, header)
        if execution is not None:
            key = (source, header.step)
            execution.granted.add(key)
            if isinstance(execution, Execution):
                for future, awaited in execution.waits.items():
                    if awaited == key:
                        settle(future)

    def credited(self, source: int, amount: int) -> None:
        """A CREDIT message: world rank `source` has consumed `amount` bytes of short arrays.

        Raises ProtocolError if that is more than this rank has sent.
        """
        link = self._links[source]
        if amount > link.outstanding_bytes:
            raise ProtocolError(f"a credit of {amount} bytes, but only {link.outstanding_bytes} are outstanding")
        link.outstanding(-amount)
        # Each of them looks again whether the window has room for its array, and may wait once more.
        waiters, link.waiters = link.waiters, []
        for future in waiters:
            settle(future)

    def _merge_piggyback(self, source: int, execution: Execution | EarlyExecution, piggyback: Buffer) -> None:
        """Take the element-wise maximum of this rank's piggyback and the one that came from `source`."""
        if isinstance(execution, EarlyExecution):
            execution.piggybacks.append((source, piggyback))
            return
        mine = execution.piggyback
        if mine is None or len(piggyback) != mine.nbytes:
            text = f"a piggyback of {len(piggyback)} bytes, which does not fit {execution.identity.describe()}"
            self._failures.broken(source, ProtocolError(text))
            return
        np.maximum(mine, np.frombuffer(piggyback, np.uint8).view(mine.dtype), out=mine)

    def _matching_execution(self, source: int, header: wire.Header) -> Execution | EarlyExecution | None:
        """The execution that a message of `source` belongs to; None if it is abandoned or the fingerprints differ."""
        key = (header.context, header.number)
        # The message may be of an execution that a caller of this rank has carried out in its thread.
        if self._sent_directly:
            self._enter_direct()
        if key in self._abandoned:
            return None
        if key in self._finished:
            # A rank that exchanges with some ranks only may be done when one that it did not wait for sends to it: that
            # one has made another call, and would wait for ever.
            if self._finished[key].fingerprint != header.fingerprint:
                self._dispute(source, self._finished[key])
            return None
        self._last_heard[source] = key
        execution = self._open.get(key)
        if execution is None:
            early = self._early.get(key) or self._early.setdefault(key, EarlyExecution(next(self._serials)))
            early.fingerprints[source] = header.fingerprint
            return early
        if execution.identity.fingerprint != header.fingerprint:
            self._dispute(source, execution.identity)
            return None
        return execution

    def _earn(self, source: int, amount: int) -> None:
        """`amount` bytes of `source` have been consumed. Sends credit in batches of a quarter of the window.

        A credit for each array would double the number of short messages.
        """
        link = self._links[source]
        link.earned_bytes += amount
        if link.earned_bytes >= WINDOW_BYTES // 4:
            self._router.send(source, [wire.encode(wire.CREDIT, self._membership.epoch, number=link.earned_bytes)])
            link.earned_bytes = 0

    # -- mismatches -------------------------------------------------------------------------------

    def _check(self, execution: Execution, rank: int) -> None:
        """Ask world rank `rank`, which `execution` waits for, whether it is in the same call."""
        self._router.send(rank, _frames(wire.CHECK, execution.identity))

    def checked(self, source: int, header: wire.Header) -> None:
        """A CHECK message: world rank `source` waits for this rank in an execution."""
        if self._sent_directly:
            self._enter_direct()
        key = (header.context, header.number)
        identity = self._identity(key)
        # This rank may come to the call later, and compares then.
        if identity is None:
            self._checked.setdefault(key, {})[source] = header.fingerprint
            if len(self._checked) > _RECENT_MAX:
                del self._checked[next(iter(self._checked))]
        elif identity.fingerprint != header.fingerprint:
            self._dispute(source, identity)

    def _dispute(self, source: int, identity: Identity) -> None:
        """Tell `source` that the calls differ. Its answer, a Mismatch that names both calls, goes to every member."""
        question = wire.Dispute(identity.communicator, identity.context, identity.number, identity.describe())
        self._router.tell(source, question)

    def forget(self, communicator: int) -> None:
        """No message for an execution of `communicator` is under way."""
        for key in [key for key, identity in self._finished.items() if identity.communicator == communicator]:
            del self._finished[key]
        for key in [key for key, owner in self._abandoned.items() if owner == communicator]:
            del self._abandoned[key]
        # Messages that this rank has not received, and collectives that not all ranks have made: it has failed.
        for key in [key for key, early in self._early.items() if early.is_of(communicator)]:
            early = self._early.pop(key)
            for source, payload in early.mailbox.early() if not early.is_undone else ():
                self._links[source].early_bytes -= cost_of(payload)
                self._earn(source, cost_of(payload))

    def answer(self, source: int, dispute: wire.Dispute) -> None:
        """A Dispute message: fail the communicator at all members, with the calls of `source` and of this rank."""
        self._enter_direct()
        identity = self._identity((dispute.context, dispute.number))
        known = (identity.members, identity.describe()) if identity else None
        if known is None and dispute.context in self.described:
            known = self.described[dispute.context](dispute.number)
        members, mine = known or ((source,), "another operation, long ago")
        theirs, ours = (self._membership.numbers[rank] for rank in (source, self._router.rank))
        text = f"rank {theirs} {_did(dispute.description)}, but rank {ours} {_did(mine)}"
        self._failures.mismatch(dispute.communicator, members, text)

    def last_call(self, source: int) -> str:
        """The description of the execution of the last message of `source`; empty if there is none."""
        return self.described_call(*self._last_heard.get(source, (0, 0)))

    def described_call(self, context: int, number: int) -> str:
        """The description of an open or recently finished execution; empty if there is none."""
        identity = self._identity((context, number))
        return identity.describe() if identity else ""

    def _identity(self, key: tuple[int, int]) -> Identity | None:
        """The identity of an open or recently finished execution; None if there is none."""
        execution = self._open.get(key)
        return execution.identity if execution is not None else self._finished.get(key)


def _frames(kind: int, identity: Identity, step: int = 0, *more: Buffer) -> list[Buffer]:
    """A message of the execution `identity`."""
    return [wire.encode(kind, identity.epoch, identity.context, identity.number, step, identity.fingerprint), *more]


def _check_whole(receive: Receive) -> None:
    """Raise ProtocolError if a short array is incomplete: its sender sends it as one segment."""
    if receive.into.nbytes <= SEGMENT_BYTES and not receive.complete:
        raise ProtocolError(f"a segment of {receive.filled} elements; {receive.into.size} were expected")


def _did(call: str) -> str:
    """What a rank did that made the call of this description. The end of its program is no call of the user."""
    return f"has come to {call}" if call.startswith(END) else f"called {call}"


def cost_of(payload: Buffer) -> int:
    """The bytes that a message with this payload takes of the window."""
    return len(payload) + _MESSAGE_COST
