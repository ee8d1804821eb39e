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
from enum import IntEnum

import numpy as np

from asyncoll.algorithms.dense.pair_memory import PairMemory
from asyncoll.arguments import digest
from asyncoll.errors import AsyncollError, DeviceError, ProtocolError
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
_END = -1  # in the place of a window


class WindowAnswer(IntEnum):
    """The reader's answer to one window."""

    REFUSED = 0  # it cannot open the block: both ranks use mirrors from now on
    READ = 1
    UNREAD = 2  # the tensor is not wanted any more, or the reader's copy has failed: says nothing about the block


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
        # If the failure is the communicator's, its calls raise it.
        except Exception as error:
            self.member.failed("a tensor of RPC", error)

    def lane(self, source: int, dest: int, number: int, nbytes: int) -> Lane:
        group = self.member.group
        context = digest(group.communicator, "a tensor of RPC", source, dest)
        site = Site(DeviceRpc.lane.__code__, 0, f"from rank {group.ranks[source]} to rank {group.ranks[dest]}")
        return self.member.lane(Signature("a tensor of RPC", number, "uint8", nbytes, "", site), context)

    def windows(self, nbytes: int) -> range:
        """Where they begin."""
        return range(0, nbytes, self.memory.window)

    async def wait_until_moved(self, transfer: Transfer) -> BaseException | None:
        """Return once it is over: its error. Raises the failure of the communicator."""
        with self.member.watch("a copy of device memory") as ended:
            set_when_moved(transfer, transfer.nbytes, ended)
            await ended
        return transfer.error if transfer.moved < transfer.nbytes else None

    async def _read(self, source: int, number: int, nbytes: int, landing: LandingTensor | None) -> None:
        memory, where = self.memory, np.empty(1, np.int64)
        answer = WindowAnswer.UNREAD if landing is None else WindowAnswer.READ
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
                # A peer that breaks the protocol must not make this rank read outside of the block.
                if not 0 <= part.offset <= memory.nbytes - part.nbytes:
                    raise ProtocolError(
                        f"byte {part.offset} of a block of device memory that has {memory.nbytes}", source
                    )
                if landing is not None and answer == WindowAnswer.READ:
                    answer = await self._copy(part, landing)
                    landing.is_whole = answer == WindowAnswer.READ and start + part.nbytes == nbytes
                await lane.send(source, index, np.array([answer]))

    async def _grant_once_ready(self, lane: Lane, source: int, landing: LandingTensor | None) -> None:
        """The sender may give up meanwhile. An error of the device shows in the copy that follows."""
        # A failure of the communicator ends the wait for windows, too.
        with contextlib.suppress(AsyncollError):
            if landing is not None:
                await self.wait_until_moved(landing.mark.come())
            lane.grant(source, _READY)

    async def _copy(self, part: BlockPart, landing: LandingTensor) -> WindowAnswer:
        """Copy a window to its tensor. Returns the answer."""
        if not self.memory.opens(part.rank, landing.device):
            return WindowAnswer.REFUSED
        # Nothing is read from a rank that is lost: its memory may be gone, or used for something else.
        self.member.check()
        # An error of the device is not raised here: the tensor comes through the host then, and that copy tells more.
        try:
            transfer = self.memory.exchange.read(landing.mark, [part])
        except Exception:
            return WindowAnswer.UNREAD
        return WindowAnswer.READ if await self.wait_until_moved(transfer) is None else WindowAnswer.UNREAD


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
        self._lock = threading.Lock()  # after `give_up` no copy begins

    def give_up(self) -> None:
        with self._lock:
            self._is_given_up = True

    async def run(self, number: int) -> bool:
        return await self._route.member.runner.start(self._run(number))

    async def _run(self, number: int) -> bool:
        memory, place, is_read, failure = self._memory, None, False, None
        with self._route.lane(self._route.member.group.rank, self._dest, number, self._tensor.mark.nbytes) as lane:
            if not memory.offers(self._tensor.opened_device):
                await self._announce(lane, _END)
                return False
            try:
                await self._wait_for_streams(lane)
                place = await memory.place()
                is_read = await self._show(lane, place)
            except DeviceError as error:
                failure = error
            # Also after an error of this rank's device: the peer waits for windows, and may still read one.
            await self._end(lane)
            if place is not None:
                memory.give_back(place)
        if failure is not None:
            raise failure
        return is_read

    async def _wait_for_streams(self, lane: Lane) -> None:
        """Wait until the streams of both tensors have come to them. Raises DeviceError."""
        await self._wait_until_moved(self._tensor.mark.come())
        await lane.offer(self._dest, _READY)

    async def _wait_until_moved(self, transfer: Transfer) -> None:
        error = await self._route.wait_until_moved(transfer)
        if error is not None:
            raise self._tensor.failure(error)

    async def _show(self, lane: Lane, place: int) -> bool:
        """Show the windows, to the last one if all goes well. Returns whether the peer has read all of them."""
        memory, nbytes = self._memory, self._tensor.mark.nbytes
        # As in a message of two ranks: one window is written while the other is read, once the peer has read one.
        ahead = 2 if memory.is_read_by(self._dest) else 1
        for index, start in enumerate(self._route.windows(nbytes)):
            if len(self._shown) == ahead and not await self._take_answer(lane):
                return False
            part = BlockPart(lane.rank, place + index % 2 * memory.window, start, min(memory.window, nbytes - start))
            if not await self._write_window(part):
                return False
            await self._announce(lane, part.offset)
        while self._shown:
            if not await self._take_answer(lane):
                return False
        return True

    async def _write_window(self, part: BlockPart) -> bool:
        """Copy a window to the block. Returns whether it is there: not if it is given up. Raises DeviceError."""
        try:
            with self._lock:
                if self._is_given_up:
                    return False
                transfer = self._memory.exchange.write(self._tensor.mark, [part])
        except Exception as error:
            raise self._tensor.failure(error) from None
        await self._wait_until_moved(transfer)
        return True

    async def _announce(self, lane: Lane, where: int) -> None:
        """Tell the peer where the next window is, or END, and expect its answer."""
        index, self._begun = self._begun, self._begun + 1
        if where != _END:
            answer = np.empty(1, np.int64)
            self._shown.append((lane.post(self._dest, _WINDOWS + index, answer), answer))
        await lane.send(self._dest, _WINDOWS + index, np.array([where]))

    async def _take_answer(self, lane: Lane) -> bool:
        """Wait for the oldest answer, and tell it to `PairMemory`. Returns whether the peer has read the window."""
        receive, answer = self._shown.popleft()
        await lane.wait(receive)
        has_read = bool(answer[0] == WindowAnswer.READ)
        if answer[0] != WindowAnswer.UNREAD:
            self._memory.answered(self._dest, has_read=has_read)
        return has_read

    async def _end(self, lane: Lane) -> None:
        """Show no more windows, and return once the peer reads none."""
        if self._begun < len(self._route.windows(self._tensor.mark.nbytes)):
            await self._announce(lane, _END)
        while self._shown:
            await self._take_answer(lane)
