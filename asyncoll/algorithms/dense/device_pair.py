"""One message between two ranks of a large tensor of a device: through device memory that both read, or as bytes.

The receiver says with its grant that its tensor is on a device, too. Then the sender may show the tensor in its block
(`windows`). So the two ranks agree in each message anew, and a sender or a receiver in the memory of the host needs to
know nothing of it.

The host sees the end of each copy before it tells the other rank. The receiver writes to its own tensor only, and reads
nothing from a rank that is lost. A call that fails does not give its place of the block back: the other rank may read
it, or may have read it and not know of the failure.
"""

from __future__ import annotations

import asyncio

from asyncoll.algorithms.dense.message_call import MessageCall
from asyncoll.algorithms.dense.pair_memory import PairMemory
from asyncoll.algorithms.dense.windows import Answer, Windows, until_moved
from asyncoll.algorithms.seam.arrival import unless_failed
from asyncoll.runtime.member import Member
from asyncoll.runtime.signature import Signature
from asyncoll.tensors.reductions import Array
from asyncoll.tensors.staged import Staged
from asyncoll.transport.staging import BlockPart, Transfer

_BYTES = 0  # the step of the whole array, if it goes as bytes
_WINDOWS = 2  # that of the first window


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

    def _windows(self, peer: int) -> Windows:
        return Windows(self._member, self._memory, self._lane, peer, self._staged.mark.nbytes, _WINDOWS)

    async def _send(self, mine: Array, dest: int) -> None:
        lane, memory = self._lane, self._memory
        await lane.offer(dest, _BYTES)
        if lane.is_granted(dest, _WINDOWS) and memory.offers(self._staged.opened_device):
            windows = self._windows(dest)
            await self._over(self._come())
            place = await windows.place()
            # After a refusal the two ranks do not try again: this tensor and later ones go through the host.
            has_read = await windows.show(place, self._write)
            memory.give_back(place)
            if has_read:
                lane.traffic.sent(mine.nbytes)
                return
        self._staged.fetch()
        await unless_failed(self._member, self._staged.arrived, "a tensor from a device")
        await lane.send(dest, _BYTES, mine)

    async def _receive(self, into: Array, source: int) -> None:
        lane, windows = self._lane, self._windows(source)
        shown = windows.expect()
        lane.grant(source, _WINDOWS)
        # The sender chooses between the two: it knows only by the grant above that this rank could read its block.
        whole = lane.post(source, _BYTES, into)
        coming = asyncio.ensure_future(windows.grant_once_ready(self._come))  # bytes may come meanwhile
        try:
            await lane.wait_for_one(shown, whole)
        finally:
            coming.cancel()
        if shown.complete:
            if self._memory.opens(source, self._staged.opened_device):
                await windows.read(shown, self._read, may_end=False)
                self._staged.got_result()
                return
            await windows.answer(0, Answer.REFUSED)
        await lane.wait(whole)

    async def _write(self, part: BlockPart) -> bool:
        await self._over(self._memory.exchange.write(self._staged.mark, [part]))
        return True

    async def _read(self, part: BlockPart) -> Answer:
        await self._over(self._memory.exchange.read(self._staged.mark, [part]))
        return Answer.READ

    def _come(self) -> Transfer:
        """It is over once the stream of the tensor has come to the call."""
        transfer: Transfer = self._staged.mark.come()
        self._staged.waits_for(transfer)
        return transfer

    async def _over(self, transfer: Transfer) -> None:
        """Return once it is over. Raises DeviceError, and the failure of the communicator."""
        self._staged.waits_for(transfer)
        error = await until_moved(self._member, transfer)
        if error is not None:
            raise self._staged.failure(error)
