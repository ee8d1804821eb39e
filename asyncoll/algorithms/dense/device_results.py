"""Results of RPC that go from the device of the callee to that of the caller, through device memory that both read.

The callee tells its caller by RPC that a tensor comes, and shows it in its block (`PairMemory`), window by window, as a
message between two ranks (`device_pair`). The caller answers each window. Unlike a message, this may end early without
harm to the communicator: a callee whose caller has given up, or whose device fails, says END in the place of a window,
and a caller that cannot read a window answers so, and to each one after it. So both know when nobody reads the place of
the block any more, and it returns.

A rank shows one tensor at a time to each other one, so a rank that stands still holds one place of the block.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque

import numpy as np

from asyncoll.algorithms.dense.pair_memory import PairMemory
from asyncoll.arguments import digest
from asyncoll.errors import AsyncollError, DeviceError, ProtocolError
from asyncoll.rpc.device_route import Landing
from asyncoll.runtime.group import Lane
from asyncoll.runtime.matching import Receive
from asyncoll.runtime.member import Member
from asyncoll.runtime.signature import Signature, Site
from asyncoll.tensors.reductions import Array
from asyncoll.tensors.staged import Staged
from asyncoll.transport.staging import Part, Transfer, set_when_moved

# Answers: read; the block cannot be read here; nobody wants the tensor, or a copy has failed.
_READ, _REFUSED, _UNREAD = 1, 0, 2
_END = -1  # in the place of a window
_AHEAD = 2  # windows that are shown at a time


class DeviceResults:
    """Implements `rpc.device_route.DeviceRoute`."""

    def __init__(self, member: Member, memory: PairMemory) -> None:
        self.member = member
        self.memory = memory
        self.turns: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)  # by group rank
        self._numbers: Counter[int] = Counter()  # of tensors, by group rank

    def reads(self, peer: int, device: object) -> bool:
        return self._takes(peer, 1 << 62, device)

    def shows(self, peer: int, tensor: Staged) -> bool:
        return self._takes(peer, tensor.mirror.nbytes, tensor.opened_device)

    def showing(self, peer: int, tensor: Staged) -> Showing:
        dest = self.member.group.ranks.index(peer)
        self._numbers[dest] += 1
        return Showing(self, dest, self._numbers[dest], tensor)

    async def read(self, peer: int, number: int, nbytes: int, landing: Landing | None) -> None:
        source = self.member.group.ranks.index(peer)
        try:
            await self.member.runner.start(self._read(source, number, nbytes, landing))
        except ProtocolError as error:
            self.member.failed("a result of RPC", error)
        except AsyncollError:  # the communicator has failed, which its calls raise
            pass

    def lane(self, source: int, dest: int, number: int, nbytes: int) -> Lane:
        group = self.member.group
        context = digest(group.communicator, "result of RPC", source, dest)
        site = Site(DeviceResults.lane.__code__, 0, f"from rank {group.ranks[source]} to rank {group.ranks[dest]}")
        return self.member.lane(Signature("result of RPC", number, "uint8", nbytes, "", site), context)

    def windows(self, nbytes: int) -> range:
        """Where they begin."""
        return range(0, nbytes, self.memory.window)

    async def over(self, transfer: Transfer) -> BaseException | None:
        """Return once it is over: its error. Raises the failure of the communicator."""
        with self.member.watch("a copy of device memory") as ended:
            set_when_moved(transfer, transfer.nbytes, ended)
            await ended
        return transfer.error if transfer.moved < transfer.nbytes else None

    def _takes(self, peer: int, nbytes: int, device: object) -> bool:
        rank = self.member.group.ranks.index(peer)
        return rank != self.member.group.rank and self.memory.takes(nbytes, device, rank)

    async def _read(self, source: int, number: int, nbytes: int, landing: Landing | None) -> None:
        memory, where, answer = self.memory, np.empty(1, np.int64), _UNREAD if landing is None else _READ
        with self.lane(source, self.member.group.rank, number, nbytes) as lane:
            for index, start in enumerate(self.windows(nbytes)):
                await lane.recv(source, index, where)
                if where[0] == _END:
                    return
                part = Part(source, int(where[0]), start, min(memory.window, nbytes - start))
                if not 0 <= part.offset <= memory.nbytes - part.nbytes:
                    raise ProtocolError(
                        f"byte {part.offset} of a block of device memory that has {memory.nbytes}", source
                    )
                if landing is not None and answer == _READ:
                    answer = await self._copy(part, landing)
                    landing.is_whole = answer == _READ and start + part.nbytes == nbytes
                await lane.send(source, index, np.array([answer]))

    async def _copy(self, part: Part, landing: Landing) -> int:
        """Copy a window to its tensor. Returns the answer."""
        if not self.memory.opens(part.rank, landing.device):
            return _REFUSED
        self.member.check()  # nothing is read from a rank that is lost
        try:
            transfer = self.memory.exchange.read(landing.mark, [part])
        except Exception:  # of the device, which the copy from the host will raise, if it cannot be made either
            return _UNREAD
        return _READ if await self.over(transfer) is None else _UNREAD


class Showing:
    """Implements `rpc.device_route.Showing`: one tensor, at its sender."""

    def __init__(self, route: DeviceResults, dest: int, number: int, tensor: Staged) -> None:
        self.number = number
        self._route = route
        self._dest = dest
        self._tensor = tensor
        self._is_given_up = False
        self._shown = deque[tuple[Receive, Array]]()  # windows that are not answered, with their answers
        self._begun = 0  # windows that were shown, or END

    def give_up(self) -> None:
        self._is_given_up = True

    async def run(self) -> bool:
        return await self._route.member.runner.start(self._run())

    async def _run(self) -> bool:
        route, error = self._route, None
        mark, device = self._tensor.mark, self._tensor.opened_device
        async with route.turns[self._dest]:
            with route.lane(route.member.group.rank, self._dest, self.number, mark.nbytes) as lane:
                is_taken = route.memory.takes(mark.nbytes, device, self._dest)  # until another one is refused
                if self._is_given_up or not is_taken or not route.memory.offers(device):
                    await self._say(lane, _END)
                    return False
                place = await route.memory.place()
                try:
                    has_read = await self._show(lane, place)
                except DeviceError as failed:  # raised below: the lane has come to its end
                    has_read, error = False, failed
                if not has_read:
                    await self._end(lane)
                route.memory.give_back(place)
        if error is not None:
            raise error
        return has_read

    async def _show(self, lane: Lane, place: int) -> bool:
        """Show all windows. Returns whether the peer has read them; it has answered all of them then."""
        memory, mark = self._route.memory, self._tensor.mark
        for index, start in enumerate(self._route.windows(mark.nbytes)):
            if len(self._shown) == _AHEAD and not await self._is_read(lane):
                return False
            if self._is_given_up:
                return False
            part = Part(
                lane.rank, place + index % _AHEAD * memory.window, start, min(memory.window, mark.nbytes - start)
            )
            await self._write(part)
            await self._say(lane, part.offset)
        while self._shown:
            if not await self._is_read(lane):
                return False
        return True

    async def _write(self, part: Part) -> None:
        try:
            failed = await self._route.over(self._route.memory.exchange.write(self._tensor.mark, [part]))
        except AsyncollError:
            raise
        except Exception as error:
            failed = error
        if failed is not None:
            raise self._tensor.failure(failed)

    async def _say(self, lane: Lane, where: int) -> None:
        index, self._begun = self._begun, self._begun + 1
        if where != _END:
            answer = np.empty(1, np.int64)
            self._shown.append((lane.post(self._dest, index, answer), answer))
        await lane.send(self._dest, index, np.array([where]))

    async def _is_read(self, lane: Lane) -> bool:
        """Wait for the oldest answer."""
        receive, answer = self._shown.popleft()
        await lane.wait(receive)
        if answer[0] != _UNREAD:
            self._route.memory.answered(self._dest, has_read=bool(answer[0] == _READ))
        return bool(answer[0] == _READ)

    async def _end(self, lane: Lane) -> None:
        """Show no more windows, and return once the peer reads none."""
        if self._begun < len(self._route.windows(self._tensor.mark.nbytes)):
            await self._say(lane, _END)
        while self._shown:
            await self._is_read(lane)
