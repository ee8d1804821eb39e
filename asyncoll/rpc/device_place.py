"""The device on which one end of RPC wants the torch tensors that it receives."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from asyncoll.errors import DeviceError, ProtocolError
from asyncoll.rpc.device_route import DeviceRoute, LandingTensor
from asyncoll.tensors.operands import as_operand
from asyncoll.tensors.staged import CopiesBack, Staged, Stager

NONE_LANDED: Mapping[int, LandingTensor] = {}


class DevicePlace:
    """Where the tensors of results, or of arguments, belong."""

    def __init__(self, stager: Stager, back: CopiesBack, route: DeviceRoute | None = None) -> None:
        self._stager = stager
        self._back = back
        self._route = route

    def reads(self, peer: int) -> bool:
        """Whether `peer` may show tensors that belong here."""
        return self._route is not None and self._route.reads(peer, self._stager.device)

    def arrivals(self) -> Arrivals:
        """For tensors that are shown. They belong to the stream that is current here."""
        return Arrivals(self.staged())

    def placing(self, landed: Mapping[int, LandingTensor] = NONE_LANDED) -> Placing:
        """For one message, where the program goes on with it. `landed` are its tensors that have come, by array."""
        return Placing(self, landed)

    def staged(self) -> Staged:
        """An empty tensor, like which others are made, and which has begun. Raises DeviceError and UsageError."""
        staged = self._stager.stage(self._stager.empty("uint8", (0,)), is_read=False)
        staged.begin(self._back)
        return staged


class Arrivals:
    """The tensors of one message after the other that others show to this rank. On the loop of the program."""

    def __init__(self, like: Staged) -> None:
        self._like = like
        self._landings: dict[int, LandingTensor] = {}  # by array of the next message

    def land(self, index: int, nbytes: int) -> LandingTensor | None:
        """A place for that array. None: the device has no memory for it. Raises ProtocolError."""
        if index in self._landings:
            raise ProtocolError(f"array {index} is shown twice")
        try:
            landing = self._landings[index] = LandingTensor(self._like, *self._like.fresh(nbytes))
        except DeviceError:
            return None
        return landing

    def come(self) -> dict[int, LandingTensor]:
        """The tensors that have come for the next message, which is here."""
        landings, self._landings = self._landings, {}
        return {index: landing for index, landing in landings.items() if landing.is_whole}


class Placing:
    """Implements `codec.TensorPlace`: puts the tensors of one message on the device. `join` follows."""

    def __init__(self, place: DevicePlace, landed: Mapping[int, LandingTensor]) -> None:
        self._place = place
        self._landed = landed

    def take(self, x: Any) -> Any:
        operand = as_operand(x)
        return self._like.like(operand.flat, operand.dtype, operand.shape)

    def shown(self, index: int) -> Any:
        landing = self._landed.get(index)
        return None if landing is None else landing.x

    def as_bools(self, flat: Any) -> None:
        self._like.queue(_at_most_one, flat)

    def join(self) -> None:
        """What the thread queues from here on comes after all copies. In any thread, again and again.

        Raises DeviceError.
        """
        if "_like" in self.__dict__:
            self._like.join()
        for landing in self._landed.values():
            landing.join()

    @cached_property
    def _like(self) -> Staged:
        """Made when it is needed: most messages have few tensors."""
        return self._place.staged()


def _at_most_one(flat: Any) -> None:
    flat.clamp_(max=1)
