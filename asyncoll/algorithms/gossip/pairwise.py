"""Asynchronous pairwise averages of models that ranks keep.

Lian, Zhang, Zhang, Liu, "Asynchronous decentralized parallel stochastic gradient descent" (AD-PSGD), ICML 2018.

An active rank asks a passive one. Both send each other their models over a lane of the two, and both compute the
average. A rank is in one average at a time. An active rank waits for a passive one while it is in an average, and a
passive rank waits for no rank but the one that it averages with, so no circle of ranks waits.

All of it runs on the runtime's loop, so a passive rank answers while its program computes. The two models of an average
must not change while they are sent. An update that comes meanwhile is kept beside the model and added after the
average. That is the same as if it had come after the average, so updates and averages are atomic, and an update waits
for no other rank.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any, NamedTuple, TypeVar

import numpy as np

from asyncoll.algorithms.core import Core
from asyncoll.algorithms.gossip.graphs import is_active, partners
from asyncoll.algorithms.seam.arrival import Arrival, to_its_end
from asyncoll.algorithms.seam.call import Call
from asyncoll.algorithms.seam.collectives import Collectives
from asyncoll.arguments import digest
from asyncoll.errors import DeviceError, ProtocolError, UsageError, describe
from asyncoll.runtime.pending import PendingCall
from asyncoll.runtime.port import Port
from asyncoll.runtime.signature import Signature, Site, site_outside
from asyncoll.runtime.standstill import Kind
from asyncoll.runtime.uncopied import Uncopied
from asyncoll.tensors import shapes
from asyncoll.tensors.operands import Operand, as_operand
from asyncoll.tensors.reductions import Array, ReduceOp, combiner, reducer
from asyncoll.tensors.staged import Staged
from asyncoll.transport import settle
from asyncoll.transport.wire import Buffer

T = TypeVar("T")


class _GossipExchange(NamedTuple):
    """A call of `Gossip.exchange`, in errors."""

    gossip: Signature
    number: int
    active: int
    passive: int
    site: Site

    @property
    def key(self) -> str:
        return f"average {self.number} of {self.gossip.key}"

    def __str__(self) -> str:
        return f"an average of rank {self.active} with rank {self.passive} at {self.site}, of {self.gossip}"


class Gossip(Uncopied):
    """The model of this rank, which other ranks average with theirs while the program computes.

    `Communicator.gossip` makes it. The model is a copy in memory of its own. `update` adds to it and reads it,
    `exchange` averages it with that of another rank, and `close` ends the gossip at all ranks. A call starts when it is
    made; the coroutine only waits for its end.

    Even ranks are *active*: their `exchange` begins an average with a *passive* rank, which is odd. A passive rank
    answers in the runtime's thread, so its program makes no call for it and may compute. After an average the two
    models have the same bits. Each update and each average is atomic: they have the same result as if they had come one
    after another. So the sum of all models changes by updates only, up to the rounding of averages.

    Source: Lian, Zhang, Zhang, Liu, "Asynchronous decentralized parallel stochastic gradient descent" (AD-PSGD), ICML
    2018, algorithm 1.

    Example:

        model = np.full(4, float(comm.rank))
        gossip = await comm.gossip(model)
        for _ in range(3):
            gradient = 0.1 * model  # this rank computes, and others average with it meanwhile
            await gossip.exchange()
            model = await gossip.update(-gradient)
        model = await gossip.close()
    """

    def __init__(self, core: Core, call: Signature, operand: Operand, graph: str, seed: int) -> None:
        """`call` is the call that makes the gossip at all ranks. `operand` is like the model, which `begin` gives."""
        self._core = core  # of the communicator, which this rank does not leave before
        self._member = member = core.member
        self._calls = core.calls
        self._pending = core.pending
        self._call = call
        self._operand = operand._replace(flat=operand.flat[:0].copy())  # its kind, dtype and shape
        self._size, self._rank = member.group.size, member.group.rank
        self._partners = partners(graph, self._size, self._rank)
        self._seed = seed
        self._port = Port(member, str(call.number), call.fingerprint(), kind="gossip")
        self._combine = combiner(ReduceOp.SUM, operand.dtype)
        self._average = reducer(ReduceOp.AVG, operand.dtype)
        self._closed = False
        self._begun = 0  # calls of `exchange` at this rank, if it is active
        self._asked: Counter[int] = Counter()  # of those, by passive rank
        self._begun_updates = 0  # of tensors of devices
        # The rest belongs to the runtime's loop.
        self._ended_updates = 0
        self._model = self._theirs = self._late = self._operand.flat
        self._has_late = False
        self._turn = asyncio.Lock()  # held during an average
        self._newest: Counter[int] = Counter()  # the number of the newest request, by active rank
        self._done: Counter[int] = Counter()  # averages that are over at this rank, by partner
        self._expected: Counter[int] | None = None  # at the end: averages by partner
        self._over: asyncio.Future[None] | None = None

    def begin(self, model: Array) -> None:
        """Copy the model, and answer the other ranks from here on. In any thread."""
        self._model = model.copy()
        self._theirs = np.empty_like(self._model)  # the model of the other rank of an average
        self._late = np.empty_like(self._model)  # updates during an average
        self._member.post(lambda: self._port.open(self._requested))

    def __repr__(self) -> str:
        return f"<Gossip of rank {self._rank} of {self._size}, {'active' if self.active else 'passive'}>"

    @property
    def active(self) -> bool:
        """Whether `exchange` of this rank begins averages: its number is even, and there are other ranks."""
        return bool(self._partners) and is_active(self._rank)

    @property
    def averages(self) -> int:
        """The number of averages that this rank's model has been in so far."""
        return self._done.total()

    # -- calls ------------------------------------------------------------------------------------

    def update(self, x: T) -> Coroutine[Any, Any, T]:
        """Add `x` to this rank's model, and put the model into `x`.

        Local: no other rank takes part, and it waits for none. An update of zeros only reads the model. An update that
        comes during an average is added to its result; `x` is then the model before that average, plus the updates.

        Leave `x` alone from the call until the coroutine has ended.

        Cancellation does not take the update back: it is added once. `x` is no longer in use when CancelledError is
        raised; its content is undefined.

        Args:
            x: numpy array or torch tensor of any layout, writable, with the dtype and the number of elements of the
                model.

        Returns:
            `x` itself, which holds the model.

        Raises:
            UsageError: when called: `x` is not such a tensor; `close` has been called; or this thread runs no event
                loop.
            ClosedError: when called, if this rank has left the world; when awaited, if it leaves meanwhile.
            MismatchError, PeerLostError, AbortedError, DeadlineError, ProtocolError: when awaited: the communicator has
                ended.

        Example:

            gossip = await comm.gossip(np.zeros(4))
            model = await gossip.update(np.full(4, float(comm.rank)))  # four times this rank's number
            await gossip.close()
        """
        operand = as_operand(x, writable=True, may_stage=True)
        own = self._operand
        if operand.dtype != own.dtype or operand.flat.size != self._call.elements:
            has = f"{operand.flat.size} elements of {operand.dtype}"
            raise UsageError(f"the model has {self._call.elements} elements of {own.dtype}, and this update {has}")
        self._check()
        if operand.staged is not None:
            return self._update_from_device(operand, operand.staged, x)
        return self._member.runner.start(self._update(operand, x))

    def _update_from_device(self, operand: Operand, staged: Staged, x: T) -> Coroutine[Any, Any, T]:
        """Update the model once the tensor has arrived, also if the caller is cancelled before: it is added once."""
        arrival, runner = Arrival(self._member, [staged]), self._member.runner

        async def arrived() -> T:
            try:
                await to_its_end(arrival.complete())
                return await self._update(operand, x)
            except DeviceError as error:
                self._member.abort(f"an update of {self._call} is lost: {error}")
                raise
            finally:
                self._ended_updates += 1
                self._settle()

        self._begun_updates += 1
        try:
            return runner.resuming(runner.start(arrived()), arrival.join)
        # A signal handler has raised, and `close` waits for this update.
        except BaseException as error:
            self._member.abort(f"an update of {self._call} was interrupted: {describe(error)}")
            raise

    def exchange(self) -> Coroutine[Any, Any, int | None]:
        """At an active rank: average the model with that of a passive rank. At a passive rank it does nothing.

        The passive rank is drawn from the neighbours in the graph by a hash of the seed, this rank and the number of
        this call, so a run draws the same ranks again. Its program makes no call. The next call may be made before this
        one is over; it begins after it.

        Cancellation stops the wait only: the average is carried out. Neither model is lost, and `close` waits for it.

        Returns:
            The passive rank. None at a passive rank, and if there is only one rank.

        Raises:
            UsageError: when called: `close` has been called; or this thread runs no event loop.
            ClosedError: when called, if this rank has left the world; when awaited, if it leaves meanwhile.
            PeerLostError: when awaited: a rank of the world is gone or frozen.
            MismatchError, AbortedError, ProtocolError: when awaited: the communicator has ended.
            DeadlineError: when awaited: the average has taken longer than `asyncoll.deadline` or ASYNCOLL_DEADLINE_S
                allows.

        Example:

            gossip = await comm.gossip(np.full(4, float(comm.rank)))
            partner = await gossip.exchange()
            assert (partner is None) == (comm.rank % 2 == 1)
            await gossip.close()
        """
        self._check()
        if not self.active:
            return self._member.runner.start(_nothing())
        draw = digest("partner", self._seed, self._rank, self._begun)
        passive = self._partners[draw % len(self._partners)]
        call = _GossipExchange(self._call, self._begun + 1, self._rank, passive, site_outside())
        ranks = self._member.group.ranks
        pending = self._pending.enter(call, Kind.PAIR, ranks=(ranks[self._rank], ranks[passive]))
        try:
            self._begun += 1
            self._asked[passive] += 1
            return self._member.runner.start(self._exchange(call, pending))
        except BaseException as error:
            # A signal handler has raised between the number and the start. At the end that rank waits for the average.
            self._pending.leave(pending)
            self._member.abort(f"{call} was interrupted: {describe(error)}")
            raise

    def close(self) -> Coroutine[Any, Any, Any]:
        """End the gossip at all ranks, when all averages are over, and give the model.

        Collective: every rank of the communicator makes this call, at the same position among its collective calls.
        Averages that are under way, cancelled calls among them, are completed first. Afterwards nothing of the gossip
        is left: no task, no message under way, no copy of the model. Later calls of `update`, `exchange` and `close`
        are UsageErrors.

        A rank that leaves the world without this call needs no other end, but its partners get no answers then.

        Cancellation of a call under way aborts the communicator, because the other ranks wait for this rank: their
        pending and later calls raise AbortedError.

        Returns:
            The model of this rank: a new tensor of the kind, dtype and shape of that given to `Communicator.gossip`.

        Raises:
            UsageError: when called: it has been called before; or this thread runs no event loop.
            ClosedError: when called, if this rank has left the world; when awaited, if it leaves meanwhile.
            MismatchError: when awaited: another rank has made a different call at this position.
            PeerLostError: when awaited: a rank of the world is gone or frozen.
            AbortedError: when awaited: a rank has aborted the communicator, has cancelled a collective call, or has
                left the world with an exception.
            DeadlineError: when awaited: the call has taken longer than `asyncoll.deadline` or ASYNCOLL_DEADLINE_S
                allows.

        Example:

            gossip = await comm.gossip(np.full(4, float(comm.rank)))
            await gossip.exchange()
            model = await gossip.close()
            await comm.allreduce(model, op=asyncoll.AVG)  # (size - 1) / 2 everywhere
        """
        self._check()
        call = self._calls.number("Gossip.close", "", -1, self._call.key, site_outside())
        self._closed = True
        asked, rows = shapes.rows(self._size, 1), shapes.rows(self._size, 1)
        for passive, count in self._asked.items():
            asked[passive][...] = count

        async def body(collectives: Collectives) -> Counter[int]:
            await collectives.alltoall(asked, rows)
            return Counter({rank: int(row[0]) for rank, row in enumerate(rows)})

        closing, staged = self._finish(self._calls.start(Call(call, body))), self._operand.staged
        return closing if staged is None else self._member.runner.resuming(closing, staged.join)

    def _check(self) -> None:
        self._member.check_caller()
        if self._closed:
            raise UsageError("this gossip is closed: make another with Communicator.gossip")

    async def _finish(self, counting: Coroutine[Any, Any, Counter[int]]) -> Any:
        """`counting` gives the averages that each active rank has begun with this one. No rank begins another."""
        counts = await counting
        return await self._member.runner.start(self._end(counts + self._asked))

    # -- on the runtime's loop --------------------------------------------------------------------

    async def _update(self, operand: Operand, x: T) -> T:
        """Without an await, so that a cancelled call has added its update, too."""
        self._port.check()
        delta = operand.flat
        if not self._turn.locked():
            self._combine(self._model, delta)
            delta[...] = self._model
        else:
            if self._has_late:
                self._combine(self._late, delta)
            else:
                self._late[...] = delta
                self._has_late = True
            delta[...] = self._model
            self._combine(delta, self._late)
        operand.write_back()
        return x

    async def _exchange(self, call: _GossipExchange, pending: PendingCall) -> int:
        """Wait for an average, which is a task of its own: it goes on if the caller is cancelled."""
        try:
            with self._port.watch(str(call)) as done:
                self._port.spawn(self._begin(call, done))
                await done
        finally:
            self._pending.leave(pending)
        return call.passive

    async def _begin(self, call: _GossipExchange, done: asyncio.Future[None]) -> None:
        """At the active rank: an average, from the request on."""
        async with self._turn:
            self._port.send(call.passive, call.number, 0)
            await self._swap(call.passive, call.active, call.number)
        settle(done)
        self._settle()

    def _requested(self, active: int, number: int, step: int, payload: Buffer) -> None:
        """At a passive rank: the request of an average. Its fields are untrusted; raises ProtocolError."""
        del step, payload
        if active not in self._partners or is_active(self._rank) or not self._newest[active] < number:
            raise ProtocolError(f"average {number} of {self._call}, which this rank does not expect")
        self._newest[active] = number
        self._port.spawn(self._answer(active, number))

    async def _answer(self, active: int, number: int) -> None:
        """At a passive rank: an average."""
        async with self._turn:
            await self._swap(active, active, number)
        self._settle()

    async def _swap(self, partner: int, active: int, number: int) -> None:
        """Replace the model by the average with that of `partner`. `number` counts the averages of `active`."""
        pair = self._port.group.subset(tuple(sorted((self._rank, partner))))
        # A passive rank has averages of several active ranks: the number of the lane tells these apart.
        with self._port.lane(pair, number * self._size + active, lambda: f"average {number} of {self._call}") as lane:
            other = 1 - lane.rank
            await lane.exchange(other, self._model, other, self._theirs, step=0)
        # A sum of two is the same in both orders.
        self._average(self._model, [self._model, self._theirs], 2)
        if self._has_late:
            self._combine(self._model, self._late)
            self._has_late = False
        self._done[partner] += 1

    async def _end(self, expected: Counter[int]) -> Any:
        """Wait for the `expected` averages by partner and for updates, then forget the gossip. Returns the model."""
        with self._port.watch(f"the averages that are under way of {self._call}") as over:
            self._expected, self._over = expected, over
            self._settle()
            await over
        self._port.close()
        model, empty = self._model, self._model[:0].copy()
        self._model = self._theirs = self._late = empty
        return self._operand.like(model, self._operand.shape)

    def _settle(self) -> None:
        """Wake `_end` if all averages and updates are over."""
        are_over = self._done == self._expected and self._ended_updates == self._begun_updates
        if self._over is not None and not self._over.done() and are_over:
            self._over.set_result(None)


async def _nothing() -> None:
    """Of a passive rank."""
