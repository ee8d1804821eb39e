"""Tensors that go from the device of one rank to that of another, and not through the host, where two ranks can.

A message whose receiver wants its tensors on a device leaves out the long ones: the sender shows each of them before it
sends the message. SHOW names the tensor, and a `DeviceRoute` moves it. In the message that tensor is an empty array.
What the receiver has not read goes by its mirror, as without a route.

A caller that wants results on a device says so in its call, and a function that wants arguments there in its answers.

The two ranks number the tensors alike, in the order of their SHOWs. A tensor that waits for work of the program on its
stream holds up no other.
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from asyncoll.errors import AsyncollError, DeviceError, ProtocolError
from asyncoll.forks import address_of
from asyncoll.rpc import protocol
from asyncoll.rpc.carrier import ARRAYS_MAX, Carrier
from asyncoll.rpc.device_place import Arrivals
from asyncoll.rpc.device_route import DeviceRoute, Showing
from asyncoll.runtime.progress import see
from asyncoll.tensors.reductions import Array
from asyncoll.tensors.staged import Staged

_SHOWN = struct.Struct("<IQ")  # which array of the message, and its bytes
_BYTES_MAX = 1 << 48
_NOTHING = np.empty(0, np.uint8)


class ShownMessage(NamedTuple):
    """A message whose tensors are shown before it is sent."""

    kind: int  # of the SHOW
    peer: int
    call: int
    name: str = ""  # of the function, for its arguments


class Sender:
    """What this rank shows to others. On the loop of the program, but for `defer`."""

    def __init__(self, carrier: Carrier, route: DeviceRoute | None) -> None:
        self._carrier = carrier
        self._route = route
        self._turns: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)  # by peer
        self._numbers: Counter[int] = Counter()  # of tensors, by peer
        self._tasks: dict[ShownMessage, asyncio.Task[bool]] = {}

    def defer(self, peer: int, tensors: Sequence[Staged], *, are_kept: bool) -> None:
        """Before they begin: defer those that can be shown to `peer`.

        `are_kept`: the program may change them before the message is sent.
        """
        for tensor in tensors:
            if self._route is None or not tensor.mirror.nbytes or not self._route.shows(peer, tensor):
                continue
            if are_kept:
                try:
                    tensor.keep()
                except DeviceError:  # too little memory for that: it goes by its mirror
                    continue
            tensor.defer(may_share=True)

    async def show(self, message: ShownMessage, arrays: Sequence[Array], tensors: Sequence[Staged]) -> list[Array]:
        """Show the deferred ones of `tensors`, which have begun.

        Returns `arrays`, of which those that the peer has read are empty. The others are fetched then. Raises
        DeviceError. If it is cancelled, what is under way ends later: see `when_over`.
        """
        left = list(arrays)
        places = {address_of(array): index for index, array in enumerate(arrays) if array.nbytes}
        for tensor in tensors:
            if tensor.is_deferred:
                index = places[address_of(tensor.mirror)]
                if await self._show_one(message, index, tensor):
                    left[index] = _NOTHING
                else:
                    tensor.fetch()
        return left

    def when_over(self, message: ShownMessage, callback: Callable[[], None]) -> None:
        """Call `callback` once the peer is shown nothing of `message` any more: at once, or later."""
        task = self._tasks.get(message)
        if task is None:
            callback()
        else:
            task.add_done_callback(lambda _: callback())

    async def close(self) -> None:
        """End what is under way, as the communicator ends."""
        await _end(self._tasks.values())

    async def _show_one(self, message: ShownMessage, index: int, tensor: Staged) -> bool:
        """Show a tensor, and wait. Returns whether the peer has read it."""
        assert self._route is not None, "it is deferred"
        showing = self._route.showing(message.peer, tensor)
        task = self._tasks[message] = asyncio.create_task(self._run(message, index, tensor, showing))
        task.add_done_callback(lambda _: self._tasks.pop(message))
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            showing.give_up()
            task.add_done_callback(see)
            raise
        return not task.cancelled() and task.result()

    async def _run(self, message: ShownMessage, index: int, tensor: Staged, showing: Showing) -> bool:
        """In a task of its own: it comes to its end also if the call is cancelled and does not wait for that."""
        kind, peer, call, name = message
        assert self._route is not None
        async with self._turns[peer]:
            # Since the call began another tensor was refused, or this one is given up.
            if not self._route.shows(peer, tensor):
                return False
            number = self._numbers[peer] = self._numbers[peer] + 1
            body = _SHOWN.pack(index, tensor.mark.nbytes)
            try:
                await self._carrier.send(peer, *protocol.encode(kind, call, body, name=name))
            # The communicator has failed, which ends the call.
            except AsyncollError:
                return False
        try:
            return await showing.run(number)
        except DeviceError:
            raise
        except AsyncollError:  # as above
            return False


class Reader:
    """Reads what others show to this rank. On the loop of the program."""

    def __init__(self, route: DeviceRoute | None) -> None:
        self._route = route
        self._numbers: Counter[int] = Counter()  # of tensors, by peer
        self._tasks: set[asyncio.Task[None]] = set()

    def read(self, peer: int, body: bytes, arrivals: Arrivals | None) -> None:
        """`peer` shows a tensor, as SHOW says. None: nobody waits for it. Raises ProtocolError."""
        if self._route is None:
            raise ProtocolError("a tensor is shown, and there is no memory of devices to read it")
        try:
            index, nbytes = _SHOWN.unpack(body)
        except struct.error:
            raise ProtocolError(f"{len(body)} bytes in place of a tensor that is shown") from None
        if index >= ARRAYS_MAX or not 0 < nbytes < _BYTES_MAX:
            raise ProtocolError(f"a tensor of {nbytes} bytes, which is array {index}")
        self._numbers[peer] += 1
        landing = None if arrivals is None else arrivals.land(index, nbytes)
        task = asyncio.create_task(self._route.read(peer, self._numbers[peer], nbytes, landing))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End what is under way, as the communicator ends."""
        await _end(self._tasks)


async def _end(tasks: Collection[asyncio.Task[Any]]) -> None:
    under_way = list(tasks)
    for task in under_way:
        task.cancel()
    if under_way:
        await asyncio.wait(under_way)
