"""How one process goes from epoch to epoch: it carries out what `runtime.epochs.step` says.

The agreement begins at a rank when its program asks for the next epoch (`next`): then it is in no call of this one.
What has been noticed and told before waits until then. A loss alone changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from asyncoll.errors import AsyncollError, ClosedError, EvictedError, ProtocolError, describe
from asyncoll.runtime import epochs
from asyncoll.runtime.ahead import Ahead
from asyncoll.runtime.endpoint import Endpoint
from asyncoll.runtime.epochs import Agreement, Decision
from asyncoll.runtime.linking import GrowthAttempt, Linking, NewcomerSource
from asyncoll.runtime.progress import offload
from asyncoll.runtime.router import EARLY_MAX
from asyncoll.transport import Buffer, Loss, settle, wire
from asyncoll.transport.among_members import AmongMembers

logger = logging.getLogger("asyncoll")
C = TypeVar("C")  # the communicator of all ranks
_LOOK_S = 0.2  # between two looks for newcomers
_REGROUP_LOOKS = 10
_LOOKS_END_S = 1e9  # a simulated world in which nothing else happens ends then


class DecisionStore(Protocol):
    """The decisions on epochs, in a store that outlives the ranks: `world.write_once.Decisions`."""

    def decide(self, proposal: Decision) -> Decision:
        """Write `proposal` unless its epoch is decided. Returns the decision."""
        ...

    def read(self, epoch: int) -> Decision | None:
        """The decision on `epoch`; None if there is none yet."""
        ...


class Succession(Generic[C]):
    """The epochs of one process, on the runtime's loop.

    In: `next` and `watch`, from the program; `lost`, `heard`, `link` and `keep`, from the endpoint of the newest epoch.
    Out: messages to other processes, entries of the store, a new endpoint for each epoch, and `installed`, which makes
    its communicator.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        decisions: DecisionStore,
        overdue_s: float,
        installed: Callable[[Endpoint], C],
        newcomers: NewcomerSource | None = None,
    ) -> None:
        """`endpoint` is that of this process's first epoch. After `overdue_s` a smaller part of the ranks may go on.

        `newcomers` are those of the world; None if it cannot have any.
        """
        self.endpoint = endpoint
        self.newcomers = newcomers
        self._decisions = decisions
        self._overdue_s = overdue_s
        self._installed = installed
        self._events: asyncio.Queue[epochs.Event] = asyncio.Queue()
        self._linking = Linking(self._connect, self._linked)
        self._beginning = asyncio.Lock()  # an attempt
        self._watching: asyncio.Task[None] | None = None
        self._move(endpoint)
        membership = endpoint.membership
        self._state = Agreement(membership.numbers[endpoint.rank], membership.epoch, membership.numbers)
        self._ahead = Ahead()
        self._agreeing: asyncio.Task[None] | None = None
        self._shrinks = False  # the agreement under way is without newcomers
        self._waiters: list[asyncio.Future[None]] = []
        self._evicted: EvictedError | None = None
        self._newest: C | None = None

    async def next(self, epoch: int, *, grows: bool = False) -> C:
        """Wait for an epoch after `epoch`, and return what `installed` has made of the newest.

        If it `grows`, it has the newcomers that wait, unless a rank is lost. The agreement goes on if this is
        cancelled. Raises EvictedError, and ServiceLostError if the store does not answer; then it may be called again.
        """
        while self._newest is None or self.endpoint.membership.epoch <= epoch:
            if self._evicted is not None:
                raise EvictedError(*self._evicted.args)
            if self._agreeing is None:
                self._agreeing = asyncio.get_running_loop().create_task(self._agree(grows=grows))
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        return self._newest

    def absent(self) -> list[int]:
        """The ranks of this epoch that this one waits for: the coordinator, or at that those that are not ready."""
        state = self._state
        coordinator, *others = state.living
        ready = {number for number, message in state.ready if message.epoch == state.epoch + 1}
        missing = set(others) - ready if coordinator == state.rank else {coordinator}
        return sorted(self.endpoint.membership.numbers.index(number) for number in missing)

    @property
    def linked(self) -> int:
        """The number of newcomers that this rank is connected to. In any thread."""
        attempt = self._linking.attempt if self._linking.is_linked else None
        return len(attempt.members) - self.endpoint.size if attempt is not None else 0

    def watch(self) -> None:
        """Look for newcomers from now on, whenever this rank is the coordinator."""
        if self._watching is None and self.newcomers is not None:
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    def waiting(self) -> list[str]:
        """One line for each wait of this process in the newest epoch, and for each rank that the next one waits for."""
        names = map(self.endpoint.membership.name, self.absent()) if self._agreeing is not None else ()
        return [*self.endpoint.own_waits(), *(f"the next epoch waits for {name}" for name in names)]

    async def over(self) -> None:
        """All ranks leave the world in good order: newcomers that wait learn it."""
        if self.newcomers is not None and not self.endpoint.rank:
            await offload(self.newcomers.end)

    async def close(self) -> None:
        """This rank leaves the world."""
        for task in (self._agreeing, self._watching):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        await self._linking.close()
        self._wake(ClosedError("this rank has left the world"))

    # -- from the endpoint ------------------------------------------------------------------------

    def lost(self, number: int, *, is_dead: bool) -> None:
        """The process of this member number is lost, or has left; with `is_dead` it has ended for certain."""
        self._linking.give_up()
        if number in self._state.members:  # else a newcomer, which is given up
            self._events.put_nowait(epochs.LostRank(number, is_dead))

    def heard(self, source: int, message: wire.ReadyForNext | wire.Decided) -> None:
        """A message of member number `source`. Raises ProtocolError for one that no rule sends, and for too many."""
        if self._events.qsize() > EARLY_MAX:
            raise ProtocolError(f"more than {EARLY_MAX} messages for an epoch that this rank has not asked for")
        if isinstance(message, wire.ReadyForNext):
            sets = (frozenset(wire.unpacked(field)) for field in (message.lost, message.dead, message.linked))
            self._events.put_nowait(epochs.Heard(source, epochs.Ready(message.epoch, *sets)))
            return
        decision = Decision(message.epoch, wire.unpacked(message.members))
        is_new = decision.epoch > self._state.epoch
        if is_new and not set(decision.members) <= {*self._state.members, *self._candidates}:
            raise ProtocolError(f"epoch {decision.epoch} with members that epoch {self._state.epoch} has not")
        if is_new and self._agreeing is None and self._state.rank not in decision.members:
            self._give_up()  # its calls would wait for ever
        self._events.put_nowait(epochs.Heard(source, decision))

    def link(self, message: wire.BeginLink) -> None:
        """The coordinator has begun an attempt. Raises ProtocolError for one that cannot be."""
        epoch, members = self._state.epoch, wire.unpacked(message.members)
        if members[: self.endpoint.size] != self.endpoint.membership.numbers or self.newcomers is None:
            raise ProtocolError(f"an attempt to form epoch {epoch + 1} with the members {members}")
        self._begin(GrowthAttempt(message.attempt, epoch + 1, members))

    def keep(self, source: int, header: wire.Header, frames: list[Buffer]) -> None:
        """A message of member number `source` in a later epoch. Raises ProtocolError for too many."""
        self._ahead.keep(source, header, frames)

    # -- newcomers --------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            try:
                if self._linking.is_linked and not self.endpoint.rank:
                    await self._regroup()
                if self._agreeing is None:
                    await self._recruit()
            except Exception as error:  # the store may answer again, or the host have room for files
                logger.warning("rank %d cannot look for newcomers: %s", self._state.rank, describe(error))
            await asyncio.sleep(_LOOK_S)

    async def _regroup(self) -> None:
        """Give up an attempt if more newcomers wait: those that are in it register again, too."""
        attempt, newcomers = self._linking.attempt, self.newcomers
        assert newcomers is not None
        more = await offload(newcomers.count)
        if not more or self._agreeing is not None or self._linking.attempt is not attempt:
            return
        expected = self.linked + more
        self._linking.give_up()
        for _ in range(_REGROUP_LOOKS):
            await asyncio.sleep(_LOOK_S)
            if await offload(newcomers.count) >= expected:
                break

    async def _recruit(self) -> None:
        """As the coordinator: begin an attempt, unless one is under way, no newcomer waits, or a rank is lost."""
        async with self._beginning:
            endpoint, numbers = self.endpoint, self.endpoint.membership.numbers
            if self.newcomers is None or endpoint.rank or self._linking.attempt is not None or endpoint.is_broken:
                return
            attempt = await offload(self.newcomers.begin, endpoint.membership.epoch + 1, numbers)
            if attempt is None or endpoint is not self.endpoint or endpoint.is_broken or self._shrinks:
                return
            for rank in range(1, endpoint.size):
                endpoint.router.tell(rank, wire.BeginLink(attempt.number, wire.packed(attempt.members)))
            self._begin(attempt)

    def _begin(self, attempt: GrowthAttempt) -> None:
        self._candidates.update(attempt.members[self.endpoint.size :])
        self._linking.begin(attempt)

    async def _connect(self, attempt: GrowthAttempt) -> Endpoint:
        assert self.newcomers is not None
        return await self.newcomers.connect(attempt, self._state.rank, self)

    def _linked(self, attempt: GrowthAttempt, is_linked: bool) -> None:
        for number in attempt.members[self.endpoint.size :]:
            self._events.put_nowait(epochs.Linked(number) if is_linked else epochs.Unlinked(number))
        if not is_linked and self._agreeing is None and self._state.told is None:
            self._linking.take(())  # no other rank counts on it

    # -- the agreement ----------------------------------------------------------------------------

    async def _agree(self, *, grows: bool) -> None:
        """Carry out the rule, until this rank is in the next epoch, or evicted."""
        loop, wait_s = asyncio.get_running_loop(), self._overdue_s
        try:
            self._shrinks = not grows or self.endpoint.is_broken
            if not self._shrinks:
                await self._recruit()
                await self._linking.settled()
            else:
                self._linking.give_up()
            self._events.put_nowait(epochs.WantedNext(self._state.epoch))
            await self._read(self._state.epoch + 1)  # the others may have gone on long ago
            look_s = loop.time() + wait_s
            epoch = self._state.epoch
            while self._state.epoch == epoch:
                try:
                    async with asyncio.timeout_at(look_s if wait_s < _LOOKS_END_S else None):
                        event = await self._events.get()
                except TimeoutError:
                    event, wait_s = epochs.ChangeOverdue(), 2 * wait_s
                    look_s = loop.time() + wait_s
                    self._tell_all()
                await self._happen(event)
                if self._evicted is not None:
                    return
        except Exception as error:
            self._wake(error)
        finally:
            self._agreeing, self._shrinks = None, False

    async def _happen(self, event: epochs.Event) -> None:
        """Carry out one step.

        If this rank enters an epoch of which it knows a loss, the rule goes on at once. Here the next change waits for
        the program: else two communicators of it could be of different epochs at different ranks.
        """
        known = self._state
        self._state, actions = epochs.step(known, event)
        installs = [action for action in actions if isinstance(action, epochs.Install)]
        if installs:
            self._state = replace(self._state, told=None, is_asking=False)
            told = [each for each in actions if isinstance(each, epochs.Send) and isinstance(each.message, Decision)]
            actions = [*told, *installs]  # first, because after it the connections to all others end
        for action in actions:
            match action:
                case epochs.Send(number, message):
                    self._send(number, message)
                case epochs.CompareAndSet(proposal):
                    await self._decide(proposal)
                case epochs.Read(epoch):
                    await self._read(epoch)
                case epochs.ReportLoss(number, _):
                    self._report(number, "another rank has lost it")
                case epochs.Install(decision):
                    await self._install(decision, known.dead)
                case epochs.Evict(decision):
                    self._evict(decision)

    def _send(self, number: int, message: epochs.Ready | Decision) -> None:
        if isinstance(message, Decision):
            told: wire.Control = wire.Decided(message.epoch, wire.packed(message.members))
        else:
            sets = (wire.packed(sorted(each)) for each in (message.lost, message.dead, message.linked))
            told = wire.ReadyForNext(message.epoch, *sets)
        if number in self._places:  # else a newcomer, which looks into the store
            self._transport.send(self._places[number], wire.encode_control(told, wire.OF_NO_EPOCH))

    def _tell_all(self) -> None:
        """Tell all members which ones are lost. Only some may know: a rank may die amid telling the others."""
        if self._state.told is not None:
            coordinator, ready = self._state.told
            for number in self._state.living:
                if number not in (coordinator, self._state.rank):
                    self._send(number, ready)

    async def _decide(self, proposal: Decision) -> None:
        try:
            self._events.put_nowait(epochs.StoreAnswered(await offload(self._decisions.decide, proposal)))
        except AsyncollError:
            self._state, _ = epochs.step(self._state, epochs.StoreSilent())
            raise

    async def _read(self, epoch: int) -> None:
        decision = await offload(self._decisions.read, epoch)
        if decision is not None:
            self._events.put_nowait(epochs.Found(decision))

    # -- its outcome ------------------------------------------------------------------------------

    async def _install(self, decision: Decision, dead: frozenset[int]) -> None:
        """`dead` are processes that have ended, or have left: no thread of theirs writes any more."""
        before, numbers = self.endpoint, decision.members
        linked = self._linking.take(numbers)
        if linked is None and not self._places.keys() >= set(numbers):  # it has lost newcomers that it was linked with
            self._evict(decision)
            return
        if linked is None:
            places = [self._places[number] for number in numbers]
            to_kill = {self._places[number] for number in before.neighbours_lost().difference(numbers, dead)}
            transport = AmongMembers(self._transport, places, to_kill)
            self.endpoint = before.next(decision.epoch, numbers, transport)
            before.retire(decision.epoch)
            await self.endpoint.start()
        else:
            self.endpoint, linked.is_ahead = linked, False
            before.retire(decision.epoch)
            self._move(linked)
        self._newest = self._installed(self.endpoint)
        for source, frames in self._ahead.take(decision.epoch):
            self.endpoint.received(numbers.index(source), frames)
        for number in sorted(self._state.lost.intersection(numbers)):
            self._report(number, "it was lost while the ranks agreed on the epoch")
        self._wake()

    def _move(self, endpoint: Endpoint) -> None:
        """Go on with the connections of `endpoint`. It may have noticed losses before this rank was in its epoch."""
        self._transport = endpoint.transport  # among all processes that this one has ever been connected to there
        self._places = {number: rank for rank, number in enumerate(endpoint.membership.numbers)}  # in `_transport`
        self._candidates: set[int] = set()  # member numbers in attempts
        for rank in endpoint.membership.lost:
            self._events.put_nowait(epochs.LostRank(endpoint.membership.numbers[rank]))

    def _evict(self, decision: Decision) -> None:
        self._give_up()
        self._evicted = EvictedError(
            f"the other ranks have gone on without this one: epoch {decision.epoch} has {len(decision.members)} ranks. "
            "They had no sign of life of it, or could not reach it (give ranks more time with ASYNCOLL_FREEZE_S)"
        )
        self._wake(self._evicted)

    def _give_up(self) -> None:
        self._report(self._state.rank, "the other ranks have taken it for lost, and have gone on without it")

    def _report(self, number: int, cause: str) -> None:
        """Fail the communicators of this epoch, and tell the others."""
        endpoint = self.endpoint
        rank = endpoint.membership.rank_of(number, -1)
        if rank >= 0 and rank not in endpoint.membership.lost:
            endpoint.report(Loss(rank, cause), is_known=False)

    def _wake(self, error: BaseException | None = None) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if error is None:
                settle(waiter)
            elif not waiter.done():
                waiter.set_exception(error)
                waiter.exception()  # mark it as seen: its task may be gone
