"""Tensors of RPC that go from the device of one rank to that of another, through device memory that both read.

The sender tells its peer by RPC that a tensor comes, and shows it in its block (`windows`), as a message between two
ranks (`device_pair`). Unlike a message, this may end early without harm to the communicator: a sender whose call is
cancelled, or whose device fails, says END in the place of a window, and a peer that cannot read a window answers so,
and to each one after it. So both know when nobody reads the place of the block any more, and it returns.
"""

from __future__ import annotations

import asyncio
import threading

from asyncoll.algorithms.dense.pair_memory import PairMemory
from asyncoll.algorithms.dense.windows import Answer, Windows, until_moved
from asyncoll.arguments import digest
from asyncoll.errors import DeviceError
from asyncoll.rpc.device_route import LandingTensor
from asyncoll.runtime.group import Lane
from asyncoll.runtime.member import Member
from asyncoll.runtime.signature import Signature, Site
from asyncoll.tensors.staged import Staged
from asyncoll.transport.staging import BlockPart, Transfer

_WINDOWS = 1  # the step of the first window


class DeviceRpc:
    """Shows tensors of RPC in device memory, and reads those of peers. Implements `rpc.device_route.DeviceRoute`."""

    def __init__(self, member: Member, memory: PairMemory) -> None:
        self.member = member
        self.memory = memory

    def reads(self, peer: int, device: object) -> bool:
        return self.memory.may_take(device, self.member.group.ranks.index(peer))

    def shows(self, peer: int, tensor: Staged) -> bool:
        rank = self.member.group.ranks.index(peer)
        return self.memory.takes(tensor.mirror.nbytes, tensor.opened_device, rank)

    def showing(self, peer: int, tensor: Staged) -> DeviceShowing:
        return DeviceShowing(self, self.member.group.ranks.index(peer), tensor)

    async def read(self, peer: int, number: int, nbytes: int, landing: LandingTensor | None) -> None:
        source = self.member.group.ranks.index(peer)
        try:
            await self.member.runner.start(self._read(source, number, nbytes, landing))
        # If the failure is the communicator's, its calls raise it.
        except Exception as error:
            self.member.failed("a tensor of RPC", error)

    def lane(self, source: int, dest: int, number: int, nbytes: int) -> Lane:
        group = self.member.group
        context = digest(group.communicator, "a tensor of RPC", source, dest)
        site = Site(DeviceRpc.lane.__code__, 0, f"from rank {group.ranks[source]} to rank {group.ranks[dest]}")
        return self.member.lane(Signature("a tensor of RPC", number, "uint8", nbytes, "", site), context)

    async def _read(self, source: int, number: int, nbytes: int, landing: LandingTensor | None) -> None:
        async def copy(part: BlockPart) -> Answer:
            if landing is None:
                return Answer.UNREAD
            answer = await self._copy(part, landing)
            landing.is_whole = answer == Answer.READ and part.start + part.nbytes == nbytes
            return answer

        with self.lane(source, self.member.group.rank, number, nbytes) as lane:
            windows = Windows(self.member, self.memory, lane, source, nbytes, _WINDOWS)
            come = None if landing is None else landing.mark.come
            ready = asyncio.ensure_future(windows.grant_once_ready(come))  # the sender may give up meanwhile
            try:
                await windows.read(windows.expect(), copy, may_end=True)
            finally:
                ready.cancel()

    async def _copy(self, part: BlockPart, landing: LandingTensor) -> Answer:
        """Copy a window to its tensor. Returns the answer."""
        if not self.memory.opens(part.rank, landing.device):
            return Answer.REFUSED
        # Nothing is read from a rank that is lost: its memory may be gone, or used for something else.
        self.member.check()
        # An error of the device is not raised here: the tensor comes through the host then, and that copy tells more.
        try:
            transfer = self.memory.exchange.read(landing.mark, [part])
        except Exception:
            return Answer.UNREAD
        return Answer.READ if await until_moved(self.member, transfer) is None else Answer.UNREAD


class DeviceShowing:
    """Implements `rpc.device_route.Showing`: one tensor, at its sender."""

    def __init__(self, route: DeviceRpc, dest: int, tensor: Staged) -> None:
        self._is_given_up = False
        self._route = route
        self._member = route.member
        self._memory = route.memory
        self._dest = dest
        self._tensor = tensor
        self._lock = threading.Lock()  # after `give_up` no copy begins

    def give_up(self) -> None:
        with self._lock:
            self._is_given_up = True

    async def run(self, number: int) -> bool:
        return await self._member.runner.start(self._run(number))

    async def _run(self, number: int) -> bool:
        memory, nbytes, place, is_read, failure = self._memory, self._tensor.mark.nbytes, None, False, None
        with self._route.lane(self._member.group.rank, self._dest, number, nbytes) as lane:
            windows = Windows(self._member, memory, lane, self._dest, nbytes, _WINDOWS)
            try:
                if memory.offers(self._tensor.opened_device):
                    await self._over(self._tensor.mark.come())
                    place = await windows.place()
                    is_read = await windows.show(place, self._write)
            except DeviceError as error:
                failure = error
            # Also after an error of this rank's device: the peer waits for windows, and may still read one.
            await windows.end()
            if place is not None:
                memory.give_back(place)
        if failure is not None:
            raise failure
        return is_read

    async def _write(self, part: BlockPart) -> bool:
        """Copy a window to the block. Returns whether it is there: not if it is given up. Raises DeviceError."""
        try:
            with self._lock:
                if self._is_given_up:
                    return False
                transfer = self._memory.exchange.write(self._tensor.mark, [part])
        except Exception as error:
            raise self._tensor.failure(error) from None
        await self._over(transfer)
        return True

    async def _over(self, transfer: Transfer) -> None:
        """Return once it is over. Raises DeviceError, and the failure of the communicator."""
        error = await until_moved(self._member, transfer)
        if error is not None:
            raise self._tensor.failure(error)
