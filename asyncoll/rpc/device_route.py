"""Results that go from the device of a callee to that of its caller, and not through the host, where two ranks can.

A caller that wants results on a device says so in its call. The callee then shows it each long tensor of a result
before the answer: SHOW names the tensor, and a `DeviceRoute` moves it. In the answer that tensor is an empty array.
What the caller has not read goes by its mirror, as without a route.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from asyncoll.errors import AsyncollError, DeviceError, ProtocolError
from asyncoll.forks import address_of
from asyncoll.rpc import fetching, protocol
from asyncoll.rpc.carrier import ARRAYS_MAX, Carrier
from asyncoll.tensors.reductions import Array
from asyncoll.tensors.staged import CopiesBack, Staged, Stager

_SHOWN = struct.Struct("<IQQ")  # which array of the answer, its bytes, the number of the tensor
_BYTES_MAX = 1 << 48
_NOTHING = np.empty(0, np.uint8)


@dataclass(eq=False)
class Landing:
    """A new flat tensor of bytes, to which a result comes."""

    x: Any
    mark: Any  # its `transport.staging.Mark`
    device: Any  # its `transport.staging.Device`
    is_whole: bool = False  # the host has seen the end of all copies


class Showing(Protocol):
    """One tensor at the rank that shows it."""

    number: int  # by which the peer reads it

    async def run(self) -> bool:
        """Show it to its peer, which reads that number. Returns whether the peer has read it. Raises DeviceError.

        It ends when nobody uses the memory of the tensor any more. Cancelled only as the communicator ends.
        """

    def give_up(self) -> None:
        """The peer need not read the rest."""


class DeviceRoute(Protocol):
    """Moves tensors between the devices of two ranks. Peers are world ranks. `reads` and `shows` are for any thread."""

    def reads(self, peer: int, device: object) -> bool:
        """Whether tensors that `peer` shows may come to `device` here."""

    def shows(self, peer: int, tensor: Staged) -> bool:
        """Whether `tensor`, which has not begun, may be shown to `peer`."""

    def showing(self, peer: int, tensor: Staged) -> Showing:
        """`tensor`, which does not change any more, for `peer`."""

    async def read(self, peer: int, number: int, nbytes: int, landing: Landing | None) -> None:
        """Read that tensor of `peer`, which has so many bytes. None: tell the peer that nobody wants it."""


class Results:
    """What this rank shows to its callers. On the loop of the program, but for `begin`."""

    def __init__(self, carrier: Carrier, route: DeviceRoute | None) -> None:
        self._carrier = carrier
        self._route = route
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, peer: int, tensors: Sequence[Staged], *, are_shown: bool) -> None:
        """`fetching.begin_to_answer`, but for those that can be shown to `peer` if it wants that."""
        for tensor in tensors:
            if are_shown and self._route is not None and tensor.mirror.nbytes and self._route.shows(peer, tensor):
                tensor.defer(may_share=True)
                tensor.keep()
        fetching.begin_to_answer(tensors)

    async def show(self, peer: int, call: int, arrays: Sequence[Array], tensors: Sequence[Staged]) -> list[Array]:
        """Show the deferred ones of `tensors` to `peer`. Returns `arrays`, of which those that it has read are empty.

        The others are fetched then. Raises DeviceError. If it is cancelled, the peer is told.
        """
        left = list(arrays)
        places = {address_of(array): index for index, array in enumerate(arrays) if array.nbytes}
        for tensor in tensors:
            if tensor.is_deferred:
                index = places[address_of(tensor.mirror)]
                if await self._has_shown(peer, call, index, tensor):
                    left[index] = _NOTHING
                else:
                    tensor.fetch()
        return left

    async def close(self) -> None:
        """End what is under way, as the communicator ends."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _has_shown(self, peer: int, call: int, index: int, tensor: Staged) -> bool:
        route = self._route
        assert route is not None, "it is deferred"
        if not route.shows(peer, tensor):  # no more: another one was refused
            return False
        showing = route.showing(peer, tensor)
        body = _SHOWN.pack(index, tensor.mark.nbytes, showing.number)
        outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._run(peer, protocol.encode(protocol.SHOW, call, body), showing, outcome))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await outcome
        except asyncio.CancelledError:
            showing.give_up()
            raise

    async def _run(
        self, peer: int, message: tuple[bytes, Sequence[Array]], showing: Showing, outcome: asyncio.Future[bool]
    ) -> None:
        """Its own task: it comes to its end also if nobody waits for that."""
        has_read = False
        try:
            await self._carrier.send(peer, *message)
            has_read = await showing.run()
        except DeviceError as error:
            if not outcome.done():
                outcome.set_exception(error)
        except AsyncollError:  # the communicator has failed, which ends the call
            pass
        finally:
            if not outcome.done():
                outcome.set_result(has_read)


class Arrivals:
    """The results of one call that come to a device here. On the loop of the program."""

    def __init__(self, stager: Stager, back: CopiesBack) -> None:
        """Where the call begins: its results belong to the stream that is current there."""
        self._place = stager.stage(stager.empty("uint8", (0,)), is_read=False)
        self._place.begin(back)
        self._landings: dict[int, Landing] = {}  # by array of the next answer

    def land(self, index: int, nbytes: int) -> Landing | None:
        """A place for that array of the next answer. None: the device has no memory for it."""
        try:
            x, mark = self._place.fresh(nbytes)
        except DeviceError:
            return None
        self._landings[index] = landing = Landing(x, mark, self._place.opened_device)
        return landing

    def come(self) -> dict[int, Landing]:
        """Those that have come for the next answer, by array."""
        landings, self._landings = self._landings, {}
        return {index: landing for index, landing in landings.items() if landing.is_whole}

    def joined(self, landings: Mapping[int, Landing]) -> dict[int, Any]:
        """Their tensors, where the caller goes on. Raises DeviceError."""
        try:
            for landing in landings.values():
                landing.mark.join()
        except Exception as error:
            raise self._place.failure(error) from error
        return {index: landing.x for index, landing in landings.items()}


class DevicePlace:
    """Where a caller wants the tensors of its results: implements `codec.Place`."""

    def __init__(self, stager: Stager, back: CopiesBack, route: DeviceRoute | None = None) -> None:
        self._stager = stager
        self._back = back
        self._route = route

    def __call__(self, x: Any) -> Any:
        return self._stager.take(x, self._back)

    def arrivals(self, peer: int) -> Arrivals | None:
        """Where a call to `peer` begins: for results that `peer` may show. None: it cannot."""
        if self._route is None or not self._route.reads(peer, self._stager.device):
            return None
        return Arrivals(self._stager, self._back)


class Reader:
    """Reads what callees show to this rank. On the loop of the program."""

    def __init__(self, route: DeviceRoute | None) -> None:
        self._route = route
        self._tasks: set[asyncio.Task[None]] = set()

    def read(self, peer: int, body: bytes, arrivals: Arrivals | None) -> None:
        """`peer` shows a tensor, as SHOW says. None: nobody waits for it. Raises ProtocolError."""
        if self._route is None:
            raise ProtocolError("a tensor is shown, and there is no memory of devices to read it")
        try:
            index, nbytes, number = _SHOWN.unpack(body)
        except struct.error:
            raise ProtocolError(f"{len(body)} bytes in place of a tensor that is shown") from None
        if index >= ARRAYS_MAX or not 0 < nbytes < _BYTES_MAX or not 0 < number < 1 << 62:
            raise ProtocolError(f"tensor {number} of {nbytes} bytes, which is array {index}")
        landing = None if arrivals is None else arrivals.land(index, nbytes)
        task = asyncio.create_task(self._route.read(peer, number, nbytes, landing))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End what is under way, as the communicator ends."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
