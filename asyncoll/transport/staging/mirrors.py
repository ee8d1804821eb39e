"""Mirrors: blocks of registered memory that hold the elements of a device's tensors during a call."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from asyncoll.errors import DeviceError, UsageError, describe
from asyncoll.forks import address_of
from asyncoll.tensors import staged
from asyncoll.tensors.reductions import Array, dtype_name
from asyncoll.tensors.staged import CopiesBack, Work
from asyncoll.transport.staging import Device, Mark, Transfer, arrived
from asyncoll.transport.staging.pool import Pool

_NOTHING = np.empty(0, np.uint8)
# A rank that leaves the world waits so long for copies that are under way.
_PATIENCE_S = 5.0
logger = logging.getLogger("asyncoll")
_stuck: list[DeviceStager] = []  # whose copies have never ended: their memory must stay mapped


class Mirror:
    """Implements `tensors.staged.Staged`. The block is free once the call and the device have released it."""

    def __init__(self, stager: DeviceStager, x: Any, *, is_read: bool) -> None:
        self.device = stager.device.name
        self.opened_device = stager.device
        self._stager = stager
        self._x = x
        self._is_read = is_read
        self._back: CopiesBack | None = None
        self._marks: list[Mark] = []  # of the tensor, and of new ones
        self._fetched: Transfer | None = None
        self._result: Any = None  # of `result`
        self.is_deferred = self._may_share = False
        self._returned = 0  # the bytes that have been put
        self._rooms: set[int] = set()  # addresses of what `room` has given
        self.mirror: Array = stager.pool.empty(x.numel() * x.itemsize, is_copied=False)

    def begin(self, back: CopiesBack) -> None:
        self._back = back
        with self._stager.failing():
            self._marks.append(self.opened_device.mark(self._x))
        # Here, because to pin memory takes long, and other threads must not wait for it.
        if not self._may_share:
            self._stager.pool.pin(self.mirror)
        if not self.is_deferred:
            self.fetch()

    @property
    def mark(self) -> Mark:
        return self._marks[0]

    def defer(self, *, may_share: bool) -> None:
        self.is_deferred = True
        self._may_share = may_share

    def keep(self) -> None:
        self._x = self._stager.clone(self._x.detach())

    def fetch(self) -> None:
        if self._is_read:
            self._stager.pool.pin(self.mirror)
            self._fetched = self._stager.under_way(self.mark.fetch(0, self.mirror))

    async def arrived(self) -> None:
        if self._fetched is not None:
            with self._stager.failing():
                await arrived(self._fetched)

    @property
    def awaited(self) -> str:
        fetched = self._fetched
        is_awaited = fetched is not None and fetched.error is None and fetched.moved < fetched.nbytes
        return self.device if is_awaited else ""

    @property
    def has_arrived(self) -> bool:
        return not self.awaited

    def waits_for(self, transfer: Transfer) -> None:
        self._fetched = transfer

    def when_arrived(self, nbytes: int, callback: Callable[[], None]) -> None:
        if self._fetched is None:
            callback()
        else:
            self._fetched.when_moved(nbytes, callback)

    def check_arrived(self, nbytes: int) -> None:
        fetched = self._fetched
        if fetched is not None and fetched.moved < nbytes and fetched.error is not None:
            raise self._stager.failure(fetched.error) from fetched.error

    def put(self, nbytes: int | None = None) -> None:
        start, self._returned = self._returned, self.mirror.nbytes if nbytes is None else nbytes
        if start < self._returned:
            self._stager.pool.pin(self.mirror)
            self._put(self.mirror[start : self._returned], self.mark, start)

    def result(self, nbytes: int) -> Mark:
        with self._stager.failing():
            self._result, mark = self.mark.like(dtype_name(self._x.dtype), (nbytes // self._x.itemsize,))
        self._marks.append(mark)
        return mark

    def fresh(self, nbytes: int) -> tuple[Any, Mark]:
        with self._stager.failing():
            return self.mark.like("uint8", (nbytes,))

    def order(self) -> None:
        with self._stager.failing():
            for mark in self._marks:
                mark.join()

    def got_result(self) -> None:
        self._returned = self.mirror.nbytes

    def failure(self, error: BaseException) -> DeviceError:
        return self._stager.failure(error)

    def room(self, nbytes: int) -> Array:
        if self._may_share:  # then it needs none, and to pin memory takes long
            return np.empty(nbytes, np.uint8)
        room = self._stager.room(nbytes)
        self._rooms.add(address_of(room))
        return room

    def like(self, flat: Array, dtype: str, shape: tuple[int, ...]) -> Any:
        if self._result is not None:
            return self._result.view(shape)
        content = flat.view(np.uint8)
        if address_of(content) not in self._rooms:
            content = self._stager.room(flat.nbytes)
            content[...] = flat.view(np.uint8)
        with self._stager.failing():
            x, mark = self.mark.like(dtype, shape)
        self._marks.append(mark)
        self._put(content, mark, 0)
        return x

    def queue(self, work: Work, *writes: Any, reads: Sequence[Any] = ()) -> None:
        with self._stager.failing():
            transfer = self.mark.queue(work, *writes, reads=reads, after=self._marks)
        self._tell_end(transfer)

    def aside(self) -> contextlib.AbstractContextManager[None]:
        with self._stager.failing():
            return self.mark.aside()

    def made(self, work: Work, dtype: str, shape: tuple[int, ...], reads: Sequence[Any]) -> Any:
        with self._stager.failing():
            x, mark = self.mark.like(dtype, shape)
            transfer = mark.queue(work, x, reads=reads, after=self._marks)
        self._marks.append(mark)
        self._tell_end(transfer)
        return x

    def join(self) -> None:
        has_failed = self._fetched is not None and self._fetched.error is not None
        self.mirror, self._fetched = _NOTHING, None
        try:
            for mark in self._marks:
                mark.join()
        except Exception as error:
            if has_failed:  # the call has raised it
                return
            # The caller goes on without its result.
            assert self._back is not None, "the call has begun"
            self._back.begun()
            self._back.ended(self._stager.failure(error))

    def _put(self, source: Array, mark: Mark, start: int) -> None:
        self._tell_end(mark.put(source, start))

    def _tell_end(self, transfer: Transfer) -> None:
        """No call waits for the transfer: its end is told."""
        back, stager = self._back, self._stager
        stager.under_way(transfer)
        assert back is not None, "the call has begun"

        def ended() -> None:
            back.ended(None if transfer.error is None else stager.failure(transfer.error))

        back.begun()
        transfer.when_moved(transfer.nbytes, ended)


class DeviceStager:
    """Stages the tensors of one device through mirrors. Implements `tensors.staged.Stager`."""

    def __init__(self, device: Device, pages: Callable[[int], Array], owner: str = "", *, owns: bool = False) -> None:
        """Mirrors are in memory of `pages`. The device closes with this if this `owns` it.

        Errors name the `owner`, such as "rank 3".
        """
        self.device = device
        self.name = device.name
        self._owner = owner
        self.pool = Pool(device, pages)
        self._owns = owns
        self._under_way: set[Transfer] = set()

    def holds(self, x: Any) -> bool:
        return self.device.holds(x)

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Any:
        with self.failing():
            return self.device.empty(dtype, shape)

    def queue(self, work: Work, *writes: Any, reads: Sequence[Any] = ()) -> None:
        with self.failing():
            self.device.queue(work, *writes, reads=reads)

    def clone(self, x: Any) -> Any:
        with self.failing():
            return self.device.clone(x)

    def room(self, nbytes: int) -> Array:
        """Pinned memory, if there is any: other memory is copied by a detour."""
        try:
            return self.pool.empty(nbytes)
        except UsageError:  # too little memory of the kind that ranks share
            return np.empty(nbytes, np.uint8)

    def stage(self, x: Any, *, is_read: bool) -> Mirror:
        with self.failing():
            self.device.check()
        return Mirror(self, x, is_read=is_read)

    def under_way(self, transfer: Transfer) -> Transfer:
        """Note that memory of the pool is in use until the end of `transfer`."""
        self._under_way.add(transfer)
        transfer.when_moved(transfer.nbytes, partial(self._under_way.discard, transfer))
        return transfer

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Raise the errors of the device as DeviceError."""
        try:
            with staged.naming(self._owner):
                yield
        except (UsageError, DeviceError):
            raise
        except Exception as error:
            raise self.failure(error) from error

    def failure(self, error: BaseException) -> DeviceError:
        what = str(error) if isinstance(error, DeviceError) else f"{self.name} has failed: {describe(error)}"
        return DeviceError(f"{self._owner}: {what}" if self._owner else what)

    async def close(self) -> None:
        must_end = self._owns or self.pool.is_pinned
        if (must_end and not await self._settled()) or (self._owns and not self.device.close()):
            _stuck.append(self)
            logger.error(
                "%s has not ended its work %g s after %s has left the world: their memory stays pinned until this "
                "process ends",
                self.name,
                _PATIENCE_S,
                self._owner or "its rank",
            )
            return
        self.pool.close()

    async def _settled(self) -> bool:
        """Whether all copies have come to their ends."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                for transfer in tuple(self._under_way):
                    with contextlib.suppress(Exception):
                        await arrived(transfer)
        except TimeoutError:
            return False
        return True


@contextlib.contextmanager
def staging(device: Device) -> Iterator[None]:
    """Calls of this process take tensors of `device`, which torch takes for those of the CPU.

    All copies are over when the block ends.
    """
    staged.hidden.append(device)
    try:
        yield
    finally:
        staged.hidden.remove(device)
        for stager in staged.stagers:
            if isinstance(stager, DeviceStager) and stager.device is device:
                stager.pool.close()
