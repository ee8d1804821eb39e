"""The backend of ranks that share an arena: calls use shared memory, and their callers' threads carry them out."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import cache, partial
from types import TracebackType
from typing import Any, TypeVar, cast

import numpy as np

from asyncoll.algorithms.dense.arriving import arrived
from asyncoll.algorithms.dense.compiled import LEARNT, CompiledCalls
from asyncoll.algorithms.dense.device_collectives import DeviceCollectives
from asyncoll.algorithms.dense.device_pair import DevicePair
from asyncoll.algorithms.dense.device_rpc import DeviceRpc
from asyncoll.algorithms.dense.group_memory import GroupMemory
from asyncoll.algorithms.dense.message_call import MessageCall
from asyncoll.algorithms.dense.pair_memory import PairMemory
from asyncoll.algorithms.dense.rendezvous import DisagreementError, RendezvousArea
from asyncoll.algorithms.dense.shared_call import SharedCall, keep_nothing
from asyncoll.algorithms.dense.tuning import Sizes, choose
from asyncoll.algorithms.rounds.compiled_rounds import rounds_in_memory
from asyncoll.algorithms.rounds.directory import Directory, Rounds
from asyncoll.algorithms.rounds.one_sided import OneSidedRounds, Setting
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.algorithms.rounds.operation_registry import OperationRegistry
from asyncoll.algorithms.rounds.round_record import Memory
from asyncoll.algorithms.seam.call import Call
from asyncoll.algorithms.seam.short_calls import Entry, GeneralCalls, NoShortCalls, ShortCalls, signature_of
from asyncoll.algorithms.seam.ways import Shape, Way, begin
from asyncoll.arguments import digest
from asyncoll.errors import AsyncollError, NonFiniteError, ProtocolError
from asyncoll.rpc.carrier import Carrier
from asyncoll.rpc.memory_carrier import MemoryCarrier
from asyncoll.runtime.member import Member
from asyncoll.runtime.shared_work import SharedWork
from asyncoll.runtime.signature import Signature, Site
from asyncoll.tensors.reductions import Array, ReduceOp
from asyncoll.tensors.staged import Staged
from asyncoll.transport import Arena
from asyncoll.transport.control_block import failure
from asyncoll.transport.lease import Lease
from asyncoll.transport.wire import Dispute

T = TypeVar("T")
_AGAIN_S = 0.005  # between two looks whether the calls of wait-avoiding operations are over
_RECENT = 256  # calls whose description is kept, for reports of a mismatch and of a lost rank


class MemoryCall(SharedCall):
    """The `Collectives` of one call in memory, and what a failure of the call does."""

    def __init__(self, member: Member, area: RendezvousArea, call: Signature) -> None:
        super().__init__(area, call.number, call.fingerprint())
        self._member = member
        self._call = call
        area.begin(call.number)

    async def __aenter__(self) -> MemoryCall:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, Exception | asyncio.CancelledError):
                await self._fail(error)
        finally:
            self._member.endpoint.in_memory.enter(self._call.operation, self.traffic)
            self._area.end(self._call.number)

    async def _fail(self, error: BaseException) -> None:
        """End the communicator, and return the caller's arrays to it."""
        member = self._member
        if isinstance(error, DisagreementError):
            _dispute(member, member.communicator, self._call.number, str(self._call), error.rank)
            # The answer of that rank ends the communicator, with an error that names both calls.
            await failure(self._area.control_block)
        elif not isinstance(error, NonFiniteError):  # with that one the call is over at all ranks
            member.failed(self._call, error)
            await self._withdraw()

    async def _withdraw(self) -> None:
        """Withdraw the arrays of a failed call, however often the caller is cancelled meanwhile.

        The other ranks read these arrays in place, so the caller must not get them back while a rank reads. Without
        effect if a rank has died while it held the lock of the control block.
        """
        group, lost = self._member.group, self._member.endpoint.membership.lost
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                with contextlib.suppress(AsyncollError):
                    await self.retreat(lambda rank: group.ranks[rank] in lost)
                return


class OverlappedCall(MemoryCall):
    """The same for one tensor of a device: an allreduce, reduce, broadcast, allgather or reduce_scatter.

    If all ranks can read each other's device memory, the tensors pass through that. Otherwise the tensor goes through
    its mirror, which is used while it arrives, and returns while it is used.
    """

    overlaps = True

    def __init__(
        self, member: Member, area: RendezvousArea, call: Signature, staged: Staged, memory: GroupMemory
    ) -> None:
        super().__init__(member, area, call)
        self._staged = staged
        self._memory = memory

    async def allreduce(self, x: Array, op: ReduceOp, dtype: str) -> None:
        if await self._is_on_devices(offers=self._offers_to_reduce(op, dtype)):
            await self._on_device().allreduce(op, dtype)
        else:
            await self._reduce_in_windows(self._reduction(x, op, dtype)._replace(staged=self._staged))

    async def reduce(self, x: Array, op: ReduceOp, dtype: str, root: int) -> None:
        self._staged.fetch()
        what = self._reduction(x, op, dtype, is_wanted=self.rank == root)._replace(staged=self._staged)
        await arrived(self._staged, min(self._area.sizes.piece, x.nbytes))
        await self._reduce_shown(await self._come_with_slot(what), what)

    async def broadcast(self, x: Array, root: int) -> None:
        if await self._are_on_devices(offers=self._offers()):
            await self._on_device().broadcast(root)
        else:
            await self._broadcast_in_windows(x.view(np.uint8), root)

    async def allgather(self, blocks: Sequence[Array]) -> None:
        if await self._are_on_devices(offers=self._offers()):
            await self._on_device().allgather()
        else:
            await arrived(self._staged, blocks[self.rank].nbytes)
            blocks[self.rank].view(np.uint8)[...] = self._staged.mirror
            await super().allgather(blocks)

    async def reduce_scatter(self, chunks: Sequence[Array], shard: Array, op: ReduceOp, dtype: str) -> None:
        if await self._are_on_devices(offers=self._offers_to_reduce(op, dtype)):
            await self._on_device().reduce_scatter([chunk.nbytes for chunk in chunks], op, dtype)
        else:
            await arrived(self._staged, self._staged.mirror.nbytes)
            await super().reduce_scatter(chunks, shard, op, dtype)

    def _on_device(self) -> DeviceCollectives:
        return DeviceCollectives(self, self._memory, self._staged)

    def _offers(self) -> bool:
        """Whether this rank can show its tensor in memory of its device."""
        staged = self._staged
        return staged.mark.nbytes > self._area.sizes.device and self._memory.offers(staged.opened_device)

    def _offers_to_reduce(self, op: ReduceOp, dtype: str) -> bool:
        return self._offers() and self._memory.exchange.reduces(op, dtype)

    async def _are_on_devices(self, *, offers: bool) -> bool:
        """`_is_on_devices`, in calls in which a rank that does not offer goes on at once."""
        if offers:
            return await self._is_on_devices(offers=True)
        self._staged.fetch()
        return False

    async def _is_on_devices(self, *, offers: bool) -> bool:
        """Whether the call uses memory of devices: if all ranks offer it. Otherwise the tensor is fetched."""
        if not offers:
            self._staged.fetch()
        rendezvous = await self.come()
        rendezvous.arrive(0, self._staged.mark.nbytes if offers else 0, windows=True)
        await rendezvous.all_arrived()
        is_on_devices = rendezvous.is_on_devices() and await self._memory.agree(rendezvous)
        if offers and not is_on_devices:
            self._staged.fetch()
        await self.leave(rendezvous)
        return is_on_devices

    async def _broadcast_in_windows(self, raw: Array, root: int) -> None:
        staged = self._staged

        def take(source: int, start: int, piece: Array) -> None:
            del source
            raw[start : start + piece.size] = piece
            staged.put(start + piece.size)

        if self.rank == root:
            await self._show(raw, keep_nothing, {}, staged)
        else:
            await self._show(None, take, {root: raw.size})


class MemoryBackend:
    """The `Backend` in shared memory."""

    def __init__(self, member: Member, arena: Arena) -> None:
        self._member = member
        self.memory = arena
        self.operations = Directory(member)
        group, endpoint = member.group, member.endpoint
        sizes = choose(group.size, os.environ)
        self._lease = Lease(arena)
        lease = cast(Arena, self._lease)  # it has all that a communicator uses
        self._give_back: Callable[[], None] | None = None  # the memory of the lease, once it has ended
        self._rounds: list[OneSidedRounds] = []
        self._area = RendezvousArea(lease, group.size, group.rank, digest(group.communicator, "rendezvous area"), sizes)
        self._registry = OperationRegistry(lease, group.size, group.rank, group.communicator)
        member.at_failure(self._registry.close)
        self._devices = GroupMemory(self._area, member)
        self._pairs = PairMemory(self._area, member)
        self.device_route = DeviceRpc(member, self._pairs)
        self._blocks = (self._devices.block, self._pairs.block)
        endpoint.at_part += [block.shut for block in self._blocks]
        endpoint.at_end += [block.end for block in self._blocks]
        member.post(partial(endpoint.failures.on_failure, group.communicator, self._failed))
        self._recent: deque[Signature | Entry] = deque(maxlen=_RECENT)
        self._work: Callable[..., SharedWork[Any]] = partial(SharedWork, lease, check=member.check)
        self._learn: dict[str, Callable[[Signature], None]] = {}  # by operation: those whose kinds the core learns
        endpoint.at_depart.append(self._registry.depart)
        endpoint.executions.described[group.communicator] = self._describe
        endpoint.membership.last_calls.append(self._last_call)
        member.at_end(lambda: endpoint.executions.described.pop(group.communicator, None))

    def short_calls(self, general: GeneralCalls) -> ShortCalls:
        core, member, note = self.memory.native, self._member, self._recent.append
        if core is None:
            return NoShortCalls()
        closing, failures = member.endpoint, member.endpoint.failures
        compiled = CompiledCalls(core, self._area, general, member, closing, failures, note, self.collectives_of)
        self._learn = dict.fromkeys(LEARNT, compiled.learn)
        return compiled.calls

    def collectives(self, call: Call[Any]) -> MemoryCall:
        if call.overlapping is not None:
            return begin(device_ways(self._area.sizes), Shape(call.overlapping.mirror.nbytes), self, call)
        learn = self._learn.get(call.signature.operation)
        if learn is not None:
            learn(call.signature)
        return self.collectives_of(call.signature)

    def in_device_memory(self, call: Call[Any]) -> MemoryCall | None:
        """Collectives that show the call's tensor where it is. Declines if device memory cannot be shared here."""
        return None if self._devices.is_refused else self.in_windows(call)

    def in_windows(self, call: Call[Any]) -> MemoryCall:
        """Collectives that use the call's tensor while it arrives."""
        assert call.overlapping is not None
        call.overlapping.defer(may_share=not self._devices.is_refused)
        self._recent.append(call.signature)
        return OverlappedCall(self._member, self._area, call.signature, call.overlapping, self._devices)

    def in_mirror(self, call: Call[Any]) -> MemoryCall:
        """Collectives that use the call's tensor once it has arrived."""
        return self.collectives_of(call.signature)

    def collectives_of(self, call: Signature) -> MemoryCall:
        self._recent.append(call)
        return MemoryCall(self._member, self._area, call)

    def pair(self, call: Signature, context: int, peer: int, staged: Staged | None) -> MessageCall:
        if staged is None:
            return MessageCall(self._member, call, context)  # a rendezvous in memory is one of all ranks
        return begin(pair_ways(self._pairs.least), Shape(staged.mirror.nbytes), self, call, context, peer, staged)

    def pair_in_blocks(self, call: Signature, context: int, peer: int, staged: Staged) -> DevicePair | None:
        """Those that show the tensor in device memory. Declines where the ranks are known not to share it."""
        takes = self._pairs.takes(staged.mirror.nbytes, staged.opened_device, peer)
        return DevicePair(self._member, call, context, staged, self._pairs) if takes else None

    def pair_by_message(self, call: Signature, context: int, peer: int, staged: Staged) -> MessageCall:
        """Those that send the tensor's mirror."""
        return MessageCall(self._member, call, context)

    def start(
        self, work: Coroutine[Any, Any, T], describe: Callable[[], str], nbytes: int, discarded: Callable[[], None]
    ) -> Coroutine[Any, Any, T]:
        """Start `work`, which awaits only conditions of shared memory. The runtime's loop runs all of it if it is long.

        A long copy or reduction in the caller's thread would block the program's event loop.
        """
        driven = self._work(work, what=describe)
        if nbytes > self._area.sizes.long and not self._member.runner.may_block():
            return self._member.runner.start(driven.finish(), discarded)
        return self._member.runner.drive(driven, discarded)

    def here(self, work: Coroutine[Any, Any, T], describe: Callable[[], str]) -> Coroutine[Any, Any, T]:
        return self._work(work, what=describe).finish()

    async def open(self, operation: Operation, site: Site) -> Rounds:
        """Make `operation`, or join it if another rank has made it.

        Ranks of a host need no announcement. A rank finds the operation in the registry at its first call; until then
        the others need nothing of it.
        """
        member = self._member
        group, endpoint = member.group, member.endpoint

        def describe() -> str:
            return f"{operation} at {site}"

        context = digest(member.communicator, "persistent", operation.name)
        # Before the registry is entered: a rank that finds the entry may ask at once for the call of this rank.
        endpoint.executions.described[context] = lambda _: (group.members, describe())
        member.at_end(lambda: endpoint.executions.described.pop(context, None))
        try:
            memory = Memory(cast(Arena, self._lease), self._registry, group)
            setting = Setting(memory, describe, member.trace, lambda: bool(endpoint.membership.lost))
            rounds = rounds_in_memory(setting, operation, self._area.sizes.long)
        except DisagreementError as disagreement:
            _dispute(member, context, 1, describe(), disagreement.rank)
            await self._registry.failure()
            raise
        self.operations.add(rounds)
        self._rounds.append(rounds)
        return rounds

    # -- the end, as of `runtime.lifetime.CommunicatorPart` ---------------------------------------------------

    def is_idle(self, wake: Callable[[], None]) -> bool:
        if not all(rounds.is_idle() for rounds in self._rounds):
            asyncio.get_running_loop().call_later(_AGAIN_S, wake)  # seldom: no call tells of its end
            return False
        return all([self._area.is_idle(wake), *(block.is_idle(wake) for block in self._blocks)])

    def retire(self) -> None:
        with contextlib.suppress(AsyncollError):  # a rank has died in a critical section: the world has failed
            self._registry.depart()

    def finished(self) -> None:
        endpoint = self._member.endpoint
        endpoint.at_depart.remove(self._registry.depart)
        endpoint.membership.last_calls.remove(self._last_call)
        for block in self._blocks:
            block.shut()
        self._give_back = self._lease.end()

    def forget(self) -> None:
        assert self._give_back is not None
        for block in self._blocks:
            block.close()
            self._member.endpoint.at_part.remove(block.shut)
            self._member.endpoint.at_end.remove(block.end)
        self._give_back()

    def _failed(self, *_failure: object) -> None:
        for block in self._blocks:
            block.close_when_failed()

    # -- RPC --------------------------------------------------------------------------------------

    def carrier(self, broken: Callable[[int, ProtocolError], None]) -> Carrier:
        member = self._member
        context = digest(member.communicator, "rpc")
        return MemoryCarrier(self.memory, context, member.group.ranks, member.check, broken)

    # -- reports: disagreements of ranks, and the last call of a lost rank ------------------------

    def _describe(self, number: int) -> tuple[tuple[int, ...], str] | None:
        """The members of call `number` and its description; None if it is not among the recent calls."""
        recent = {call.number: call for call in self._newest()}
        return (self._member.group.members, str(recent[number])) if number in recent else None

    def _last_call(self, rank: int) -> str:
        """The last call that world rank `rank` has begun, as this rank describes it; empty if unknown."""
        ranks = self._member.group.ranks
        number = self._area.begun(ranks.index(rank)) if rank in ranks else 0
        begun = [call for call in self._newest() if call.number <= number]
        return str(begun[-1]) if begun else ""

    def _newest(self) -> list[Signature]:
        """The recent calls. A copy, because the caller's thread may append meanwhile."""
        return [call if isinstance(call, Signature) else signature_of(call) for call in list(self._recent)]


def _dispute(member: Member, context: int, number: int, description: str, rank: int) -> None:
    """Ask group rank `rank` which call it has made as number `number` of `context`."""
    # Posted to the runtime's loop: this may run in the caller's thread, which must not use the router.
    question = Dispute(member.communicator, context, number, description)
    member.post(lambda: member.tell(rank, question))


_NEEDS = "devices that read each other's memory"


@cache
def device_ways(sizes: Sizes) -> tuple[Way[MemoryCall], ...]:
    """The ways of a call whose only tensor is on a device. The ranks may differ in them."""
    way = partial(Way[MemoryCall], "one tensor of a device")
    shared, staged = max(sizes.device, sizes.short), max(sizes.staged, sizes.short)
    return (
        way("device memory", MemoryBackend.in_device_memory, "no copy to the host", over=shared, needs=_NEEDS),
        way("windows", MemoryBackend.in_windows, "a part is reduced while the next one arrives", over=staged),
        way("mirror", MemoryBackend.in_mirror, "a copy at the host, used once it is whole"),
    )


@cache
def pair_ways(least: int) -> tuple[Way[MessageCall], ...]:
    """The ways of a tensor of a device between two ranks, which may differ in them."""
    way = partial(Way[MessageCall], "send, recv of a tensor of a device")
    return (
        way("device memory", MemoryBackend.pair_in_blocks, "no copy to the host", over=least, needs=_NEEDS),
        way("mirror", MemoryBackend.pair_by_message, "a copy at the host, sent once it is whole"),
    )
