"""Tensors of RPC that go from the device of one rank to that of another, through device memory that both read.

The sender tells its peer by RPC that a tensor comes, and shows it in its block (`PairMemory`), window by window, as a
message between two ranks (`device_pair`). The peer answers each window. Unlike a message, this may end early without
harm to the communicator: a sender whose call is cancelled, or whose device fails, says END in the place of a window,
and a peer that cannot read a window answers so, and to each one after it. So both know when nobody reads the place of
the block any more, and it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque

import numpy as np

from asyncoll.algorithms.dense.pair_memory import PairMemory
from asyncoll.arguments import digest
from asyncoll.errors import AsyncollError, ProtocolError
from asyncoll.rpc.device_route import LandingTensor
from asyncoll.runtime.group import Lane
from asyncoll.runtime.matching import Receive
from asyncoll.runtime.member import Member
from asyncoll.runtime.signature import Signature, Site
from asyncoll.tensors.reductions import Array
from asyncoll.tensors.staged import Staged
from asyncoll.transport.staging import BlockPart, Transfer, set_when_moved

_READY = 0  # the step that the reader grants when its stream has come to its tensor
_WINDOWS = 1  # the step of the first window, in both directions: where it is, and the answer
# Answers: read; the block cannot be read here; nobody wants the tensor, or a copy has failed.
_READ, _REFUSED, _UNREAD = 1, 0, 2
_END = -1  # in the place of a window


class DeviceRpc:
    """Implements `rpc.device_route.DeviceRoute`."""

    def __init__(self, member: Member, memory: PairMemory) -> None:
        self.member = member
        self.memory = memory

    def reads(self, peer: int, device: object) -> bool:
        rank = self.member.group.ranks.index(peer)
        return rank != self.member.group.rank and self.memory.may_take(device, rank)

    def shows(self, peer: int, tensor: Staged) -> bool:
        rank = self.member.group.ranks.index(peer)
        is_other = rank != self.member.group.rank
        return is_other and self.memory.takes(tensor.mirror.nbytes, tensor.opened_device, rank)

    def showing(self, peer: int, tensor: Staged) -> DeviceShowing:
        return DeviceShowing(self, self.member.group.ranks.index(peer), tensor)

    async def read(self, peer: int, number: int, nbytes: int, landing: LandingTensor | None) -> None:
        source = self.member.group.ranks.index(peer)
        try:
            await self.member.runner.start(self._read(source, number, nbytes, landing))
        except Exception as error:  # if it is the communicator's, its calls raise it
            self.member.failed("a tensor of RPC", error)

    def lane(self, source: int, dest: int, number: int, nbytes: int) -> Lane:
        group = self.member.group
        context = digest(group.communicator, "a tensor of RPC", source, dest)
        site = Site(DeviceRpc.lane.__code__, 0, f"from rank {group.ranks[source]} to rank {group.ranks[dest]}")
        return self.member.lane(Signature("a tensor of RPC", number, "uint8", nbytes, "", site), context)

    def windows(self, nbytes: int) -> range:
        """Where they begin."""
        return range(0, nbytes, self.memory.window)

    async def over(self, transfer: Transfer) -> BaseException | None:
        """Return once it is over: its error. Raises the failure of the communicator."""
        with self.member.watch("a copy of device memory") as ended:
            set_when_moved(transfer, transfer.nbytes, ended)
            await ended
        return transfer.error if transfer.moved < transfer.nbytes else None

    async def _read(self, source: int, number: int, nbytes: int, landing: LandingTensor | None) -> None:
        memory, where, answer = self.memory, np.empty(1, np.int64), _UNREAD if landing is None else _READ
        with self.lane(source, self.member.group.rank, number, nbytes) as lane:
            ready = asyncio.ensure_future(self._grant_once_ready(lane, source, landing))
            for index, start in enumerate(self.windows(nbytes), _WINDOWS):
                try:
                    await lane.recv(source, index, where)
                finally:
                    ready.cancel()
                if where[0] == _END:
                    return
                part = BlockPart(source, int(where[0]), start, min(memory.window, nbytes - start))
                if not 0 <= part.offset <= memory.nbytes - part.nbytes:
                    raise ProtocolError(
                        f"byte {part.offset} of a block of device memory that has {memory.nbytes}", source
                    )
                if landing is not None and answer == _READ:
                    answer = await self._copy(part, landing)
                    landing.is_whole = answer == _READ and start + part.nbytes == nbytes
                await lane.send(source, index, np.array([answer]))

    async def _grant_once_ready(self, lane: Lane, source: int, landing: LandingTensor | None) -> None:
        """The sender may give up meanwhile. An error of the device shows in the copy that follows."""
        with contextlib.suppress(AsyncollError):  # of the communicator, which ends the wait for windows
            if landing is not None:
                await self.over(landing.mark.come())
            lane.grant(source, _READY)

    async def _copy(self, part: BlockPart, landing: LandingTensor) -> int:
        """Copy a window to its tensor. Returns the answer."""
        if not self.memory.opens(part.rank, landing.device):
            return _REFUSED
        self.member.check()  # nothing is read from a rank that is lost
        try:
            transfer = self.memory.exchange.read(landing.mark, [part])
        except Exception:  # of the device, which the copy from the host will raise, if it cannot be made either
            return _UNREAD
        return _READ if await self.over(transfer) is None else _UNREAD


class DeviceShowing:
    """Implements `rpc.device_route.Showing`: one tensor, at its sender."""

    def __init__(self, route: DeviceRpc, dest: int, tensor: Staged) -> None:
        self._is_given_up = False
        self._route = route
        self._memory = route.memory
        self._dest = dest
        self._tensor = tensor
        self._shown = deque[tuple[Receive, Array]]()  # windows that are not answered, with their answers
        self._begun = 0  # windows that were shown, or END
        self._error: BaseException | None = None  # of the device
        self._lock = threading.Lock()  # after `give_up` no copy begins

    def give_up(self) -> None:
        with self._lock:
            self._is_given_up = True

    async def run(self, number: int) -> bool:
        return await self._route.member.runner.start(self._run(number))

    async def _run(self, number: int) -> bool:
        memory = self._memory
        with self._route.lane(self._route.member.group.rank, self._dest, number, self._tensor.mark.nbytes) as lane:
            if not memory.offers(self._tensor.opened_device):
                await self._say(lane, _END)
                return False
            if await self._is_ready(lane):
                place = await memory.place()
                is_read = await self._show(lane, place)
                await self._end(lane)
                memory.give_back(place)
            else:
                is_read = False
                await self._end(lane)
        if self._error is not None:
            raise self._tensor.failure(self._error)
        return is_read

    async def _is_ready(self, lane: Lane) -> bool:
        """Wait until the streams of both tensors have come to them. Returns False if the device has failed."""
        self._error = await self._route.over(self._tensor.mark.come())
        if self._error is None:
            await lane.offer(self._dest, _READY)
        return self._error is None

    async def _show(self, lane: Lane, place: int) -> bool:
        """Show the windows, to the last one if all goes well. Returns whether the peer has read all of them."""
        memory, nbytes = self._memory, self._tensor.mark.nbytes
        ahead = 2 if memory.is_read_by(self._dest) else 1  # windows that are shown at a time
        for index, start in enumerate(self._route.windows(nbytes)):
            if len(self._shown) == ahead and not await self._is_read(lane):
                return False
            part = BlockPart(lane.rank, place + index % 2 * memory.window, start, min(memory.window, nbytes - start))
            if not await self._is_written(part):
                return False
            await self._say(lane, part.offset)
        while self._shown:
            if not await self._is_read(lane):
                return False
        return True

    async def _is_written(self, part: BlockPart) -> bool:
        """Copy a window to the block, unless it is given up. Returns whether it is there."""
        try:
            with self._lock:
                if self._is_given_up:
                    return False
                transfer = self._memory.exchange.write(self._tensor.mark, [part])
        except Exception as error:
            self._error = error
        else:
            self._error = await self._route.over(transfer)
        return self._error is None

    async def _say(self, lane: Lane, where: int) -> None:
        index, self._begun = self._begun, self._begun + 1
        if where != _END:
            answer = np.empty(1, np.int64)
            self._shown.append((lane.post(self._dest, _WINDOWS + index, answer), answer))
        await lane.send(self._dest, _WINDOWS + index, np.array([where]))

    async def _is_read(self, lane: Lane) -> bool:
        """Wait for the oldest answer."""
        receive, answer = self._shown.popleft()
        await lane.wait(receive)
        if answer[0] != _UNREAD:
            self._memory.answered(self._dest, has_read=bool(answer[0] == _READ))
        return bool(answer[0] == _READ)

    async def _end(self, lane: Lane) -> None:
        """Show no more windows, and return once the peer reads none."""
        if self._begun < len(self._route.windows(self._tensor.mark.nbytes)):
            await self._say(lane, _END)
        while self._shown:
            await self._is_read(lane)
