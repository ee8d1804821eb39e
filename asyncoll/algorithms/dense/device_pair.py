"""One message between two ranks of a large tensor of a device: through device memory that both read, or as bytes.

The receiver says with its grant that its tensor is on a device, too. Then the sender may show the tensor in its block
(`PairMemory`), window by window, and tells the receiver where each of them is. The receiver copies it from there, and
answers. So the two ranks agree in each message anew, and a sender or a receiver in the memory of the host needs to know
nothing of it.

A message takes a place in the block of its sender once the streams of both tensors have come to their calls. So work of
the program that stands still there, such as a call of NCCL that waits for another rank, holds up no other message.

The host sees the end of each copy before it tells the other rank. The receiver writes to its own tensor only, and reads
nothing from a rank that is lost. A call that fails does not give its place of the block back: the other rank may read
it, or may have read it and not know of the failure.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

import numpy as np

from asyncoll.algorithms.dense.message_call import MessageCall
from asyncoll.algorithms.dense.pair_memory import PairMemory
from asyncoll.algorithms.seam.arrival import unless_failed
from asyncoll.errors import AsyncollError, DeviceError, ProtocolError
from asyncoll.runtime.matching import Receive
from asyncoll.runtime.member import Member
from asyncoll.runtime.signature import Signature
from asyncoll.tensors.reductions import Array
from asyncoll.tensors.staged import Staged
from asyncoll.transport.staging import BlockPart, Transfer, set_when_moved

_BYTES = 0  # the step of the whole array, if it goes as bytes
_READY = 1  # the step that the receiver grants when its stream has come to the call
_WINDOWS = 2  # the step of the first window, in both directions: where it is, and the answer
_READ, _REFUSED = 1, 0  # answers


class DevicePair(MessageCall):
    """Its `pass_on` sends the tensor or receives it. It has no other method of `Collectives`."""

    overlaps = True

    def __init__(self, member: Member, call: Signature, context: int, staged: Staged, memory: PairMemory) -> None:
        """To send it, `staged` is deferred (`Staged.defer`)."""
        super().__init__(member, call, context)
        self._staged = staged
        self._memory = memory

    async def pass_on(self, mine: Array | None, dest: int, into: Array | None, source: int) -> None:
        if mine is not None:
            await self._send(mine, dest)
        if into is not None:
            await self._receive(into, source)

    # -- the sender -------------------------------------------------------------------------------

    async def _send(self, mine: Array, dest: int) -> None:
        lane, memory = self._lane, self._memory
        await lane.offer(dest, _BYTES)
        if lane.is_granted(dest, _WINDOWS) and memory.offers(self._staged.opened_device):
            has_read = await self._show(dest)
            # After a refusal the two ranks do not try again: this tensor and later ones go through the host.
            memory.answered(dest, has_read=has_read)
            if has_read:
                lane.traffic.sent(mine.nbytes)
                return
        self._staged.fetch()
        await unless_failed(self._member, self._staged.arrived, "a tensor from a device")
        await lane.send(dest, _BYTES, mine)

    async def _show(self, dest: int) -> bool:
        """Show the tensor to `dest`, window by window. Returns whether it has read it; otherwise it has refused."""
        lane, memory, mark = self._lane, self._memory, self._staged.mark
        await self._over(mark.come())
        await lane.offer(dest, _READY)
        place, shown = await memory.place(), deque[tuple[Receive, Array]]()
        # Two windows are shown at a time, so that one is written while the other is read. Until the peer has read a
        # first one, it may refuse, and a second window would be copied in vain.
        ahead = 2 if memory.is_read_by(dest) else 1
        for index, start in enumerate(range(0, mark.nbytes, memory.window)):
            if len(shown) == ahead and not await self._is_read(*shown.popleft()):
                memory.give_back(place)
                return False
            part = BlockPart(
                lane.rank, place + index % 2 * memory.window, start, min(memory.window, mark.nbytes - start)
            )
            await self._over(memory.exchange.write(mark, [part]))
            answer = np.empty(1, np.int64)
            shown.append((lane.post(dest, _WINDOWS + index, answer), answer))
            await lane.send(dest, _WINDOWS + index, np.array([part.offset]))
        has_read = all([await self._is_read(*each) for each in shown])
        memory.give_back(place)
        return has_read

    async def _is_read(self, receive: Receive, answer: Array) -> bool:
        await self._lane.wait(receive)
        return bool(answer[0] == _READ)

    # -- the receiver -----------------------------------------------------------------------------

    async def _receive(self, into: Array, source: int) -> None:
        lane, where = self._lane, np.empty(1, np.int64)
        shown = lane.post(source, _WINDOWS, where)
        lane.grant(source, _WINDOWS)
        # The sender chooses between the two: it knows only by the grant above that this rank could read its block.
        whole = lane.post(source, _BYTES, into)
        coming = asyncio.ensure_future(self._grant_once_ready(source))
        try:
            await lane.wait_for_one(shown, whole)
        finally:
            coming.cancel()
        if shown.complete:
            if self._memory.opens(source, self._staged.opened_device):
                await self._read(source, where)
                return
            await self._answer(source, 0, _REFUSED)
        await lane.wait(whole)

    async def _grant_once_ready(self, source: int) -> None:
        """Bytes may come meanwhile. An error of the device shows in the copy that follows."""
        try:
            with contextlib.suppress(DeviceError):
                await self._over(self._staged.mark.come())
        except AsyncollError:  # of the communicator, which ends the call
            return
        self._lane.grant(source, _READY)

    async def _read(self, source: int, where: Array) -> None:
        """Copy the windows of `source` into the tensor. The first one is shown, at byte `where` of its block."""
        lane, memory, mark = self._lane, self._memory, self._staged.mark
        for index, start in enumerate(range(0, mark.nbytes, memory.window)):
            if index:
                await lane.recv(source, _WINDOWS + index, where)
            part = BlockPart(source, int(where[0]), start, min(memory.window, mark.nbytes - start))
            # A peer that breaks the protocol must not make this rank read outside of the block.
            if not 0 <= part.offset <= memory.nbytes - part.nbytes:
                raise ProtocolError(f"byte {part.offset} of a block of device memory that has {memory.nbytes}", source)
            await self._over(memory.exchange.read(mark, [part]))
            await self._answer(source, index, _READ)
        self._staged.has_result()

    async def _answer(self, source: int, index: int, answer: int) -> None:
        await self._lane.send(source, _WINDOWS + index, np.array([answer]))

    async def _over(self, transfer: Transfer) -> None:
        """Return once it is over. Raises DeviceError, and the failure of the communicator."""
        self._staged.waits_for(transfer)
        with self._member.watch("a copy of device memory") as ended:
            set_when_moved(transfer, transfer.nbytes, ended)
            await ended
        if transfer.moved < transfer.nbytes and transfer.error is not None:
            raise self._staged.failure(transfer.error)
