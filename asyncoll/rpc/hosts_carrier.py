"""The carrier of RPC between ranks of several hosts: in memory to the ranks of this host, by message to the others."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from asyncoll.rpc.carrier import Carrier, Deliver
from asyncoll.tensors.reductions import Array


class HostsCarrier:
    """A `Carrier` of two. All messages between two ranks take the same one, so they keep their order."""

    sends_in_any_thread = False

    def __init__(self, near: Carrier, here: Collection[int], far: Carrier) -> None:
        """`near` carries to the world ranks `here`, `far` to all others."""
        self._near = near
        self._here = frozenset(here)
        self._far = far

    def open(self, deliver: Deliver) -> None:
        self._near.open(deliver)
        self._far.open(deliver)

    def send_nowait(self, dest: int, head: bytes, arrays: Sequence[Array] = ()) -> bool:
        return self._to(dest).send_nowait(dest, head, arrays)

    async def send(self, dest: int, head: bytes, arrays: Sequence[Array] = ()) -> None:
        await self._to(dest).send(dest, head, arrays)

    async def close(self) -> None:
        try:
            await self._near.close()
        finally:
            await self._far.close()

    def _to(self, dest: int) -> Carrier:
        return self._near if dest in self._here else self._far
