"""How the ranks of a communicator carry out its calls.

A `Backend` is chosen once for each communicator (`algorithms.choice`). It supplies the dense collectives, the carrier
of RPC and the memory of registered tensors. Point to point goes by message under every backend, but for long tensors on
devices whose memory both ranks read.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from asyncoll.algorithms.seam.call import Call
from asyncoll.algorithms.seam.collectives import Collectives
from asyncoll.algorithms.seam.short_calls import GeneralCalls, ShortCalls
from asyncoll.errors import ProtocolError
from asyncoll.rpc.carrier import Carrier
from asyncoll.rpc.device_route import DeviceRoute
from asyncoll.runtime.lifetime import CommunicatorPart
from asyncoll.runtime.signature import Signature
from asyncoll.tensors.registered import SharedMemory
from asyncoll.tensors.staged import Staged

T = TypeVar("T")


class Backend(CommunicatorPart, Protocol):
    """How the ranks of one communicator carry out their calls, at one of them."""

    @property
    def memory(self) -> SharedMemory | None:
        """Where registered tensors lie. None: in ordinary memory."""

    @property
    def device_route(self) -> DeviceRoute | None:
        """How results of RPC go from device to device. None: through the host."""

    def short_calls(self, general: GeneralCalls) -> ShortCalls:
        """Make what starts usual calls beside `general`."""

    def collectives(self, call: Call[Any]) -> Collectives:
        """The collectives of `call`. Called once for each call, in the order of numbers. The ranks may differ in them.

        If `call.overlapping` is used while it arrives, it is deferred, copied back meanwhile, and `Staged.put` follows.
        """

    def pair(self, call: Signature, context: int, peer: int, staged: Staged | None) -> Collectives:
        """The collectives of call `call.number` of `context`, a call with group rank `peer`. It uses `pass_on` only.

        `staged` is its tensor, if that is on a device. If the two ranks read each other's device memory, these
        collectives overlap: they need no mirror, or fetch it. The two ranks may differ in it.
        """

    def start(
        self, work: Coroutine[Any, Any, T], describe: Callable[[], str], nbytes: int, discarded: Callable[[], None]
    ) -> Coroutine[Any, Any, T]:
        """Start `work`, which uses collectives or rounds of this backend. Returns a coroutine that waits for it.

        `nbytes` is the size of this rank's contribution. `discarded` is called, as by `Runner.start`, if no caller gets
        the result. `describe` describes the work, for the report of a deadlock.
        """

    def here(self, work: Coroutine[Any, Any, T], describe: Callable[[], str]) -> Coroutine[Any, Any, T]:
        """A coroutine for a task of the runtime's loop, which runs `work`, as of `start`, from its beginning on."""

    def carrier(self, broken: Callable[[int, ProtocolError], None]) -> Carrier:
        """Make the carrier of RPC between the ranks. It calls `broken` for a rank that breaks its protocol."""
