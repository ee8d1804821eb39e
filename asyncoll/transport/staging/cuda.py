"""The devices of CUDA, by torch. This module imports torch, so it is imported when there is a tensor of CUDA.

**Nothing here has run on a GPU.** `tests/emulated_cuda.py` emulates the parts of torch that are used here; what it
cannot show is what a driver does: real copies, locks, the reuse of memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from asyncoll.errors import DeviceError, UsageError, describe
from asyncoll.forks import address_of, refusal
from asyncoll.tensors.reductions import Array
from asyncoll.transport.staging.ipc import CudaExchange, Gpu, loaded_runtime, refusing
from asyncoll.transport.staging.landing import Landing, Watcher
from asyncoll.transport.staging.pins import Pins

_CHUNK = 1 << 22  # bytes of one copy: `moved` grows by it
_REGISTRATION = 1 << 26  # bytes that are pinned at once: a driver fails for hundreds of gigabytes
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all contexts of the process
_URGENT = -1  # priority of the streams of copies
logger = logging.getLogger("asyncoll")


class CudaMark:
    """Implements `Mark`. The tensor, and its packed copy, live until the host has seen the last event of a copy."""

    def __init__(self, device: CudaDevice, x: torch.Tensor) -> None:
        """In the caller's thread, whose current stream packs `x` if it has to be packed."""
        self.nbytes: int = x.numel() * x.itemsize
        self._device = device
        self._stream = torch.cuda.current_stream(device.place)
        self._x = x.detach()
        self._is_packed = not self._x.is_contiguous()
        self.content = self._x.contiguous().view(-1).view(torch.uint8)
        self.ready = _recorded(self._stream)
        self._ends: dict[torch.cuda.Stream, torch.cuda.Event] = {}  # of the last copy on each stream
        self.is_changed = False  # by a copy
        self._unpacked: torch.cuda.Event | None = None

    def fetch(self, start: int, into: Array) -> Landing:
        return self._device.copy_to_host(self, start, into)

    def put(self, source: Array, start: int) -> Landing:
        self.is_changed = True
        return self._device.copy_from_host(source, self, start)

    def copied(self, stream: torch.cuda.Stream, end: torch.cuda.Event) -> None:
        """A part of a copy on `stream` ends with the event `end`."""
        self._ends[stream] = end

    def queue(self, work: Callable[..., object], *writes: torch.Tensor, reads: Sequence[torch.Tensor] = ()) -> None:
        self._device.queue_after((self.ready, *self._ends.values()), self, work, writes, reads)

    def like(self, dtype: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, CudaMark]:
        with _on(self._stream):  # else its memory would be reused in the order of another stream
            x = self._device.empty(dtype, shape)
            return x, CudaMark(self._device, x)

    def join(self) -> None:
        device = self._device
        device.check()
        current = torch.cuda.current_stream(device.place)
        for stream in {current, self._stream}:
            for event in (self.ready, *tuple(self._ends.values())):
                stream.wait_event(event)
        if not (self._is_packed and self.is_changed):
            return
        if self._unpacked is None:
            with torch.inference_mode(), _on(current):
                packed = self.content.view(self._x.dtype).view(self._x.shape)
                self._x.copy_(packed, non_blocking=True)
            self._unpacked = _recorded(current)
        for stream in {current, self._stream}:  # the latter, too, because the packed copy is memory of its order
            stream.wait_event(self._unpacked)


class CudaDevice:
    """Implements `Device`: "cuda:`index`" of this process.

    The driver copies only pinned memory while the host goes on. So other memory is copied to or from pinned memory of
    torch's, a part at a time: by the caller in `put`, and by the device's thread in `fetch`.
    """

    def __init__(self, index: int) -> None:
        """Raises DeviceError if the device cannot be used."""
        self._process = os.getpid()
        self.place = torch.device("cuda", index)
        self.name = str(self.place)
        try:
            self._out, self._in, self._shared = (torch.cuda.Stream(self.place, priority=_URGENT) for _ in range(3))
        except (RuntimeError, AssertionError) as error:
            raise DeviceError(f"{self.name} cannot be used: {describe(error)}") from error
        self._pins = Pins()
        self.refusal = ""  # why the driver has last refused to pin memory
        self._watcher = Watcher(self.name, torch.cuda.device(self.place))

    def holds(self, x: Any) -> bool:
        return bool(x.device == self.place)

    def empty(self, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device=self.place)

    def clone(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach().clone(memory_format=torch.contiguous_format)

    def queue(self, work: Callable[..., object], *writes: torch.Tensor, reads: Sequence[torch.Tensor] = ()) -> None:
        _carry_out(work, writes, reads)

    def mark(self, x: torch.Tensor) -> CudaMark:
        return CudaMark(self, x)

    def check(self) -> None:
        if os.getpid() != self._process:
            raise refusal(self._process)
        with torch.cuda.device(self.place):
            if torch.cuda.is_current_stream_capturing():
                raise UsageError(
                    f"the current stream of {self.name} is captured by a CUDA graph, and a call cannot be part of one: "
                    "make the call, and await it, outside of the capture"
                )

    def pin(self, block: Array) -> bool:
        start = address_of(block)
        for offset in range(0, block.nbytes, _REGISTRATION):
            nbytes = min(_REGISTRATION, block.nbytes - offset)
            if why := self._asked("cudaHostRegister", start + offset, nbytes, _PORTABLE):
                self.unpin(block)
                self._refused(why)
                return False
            self._pins.add(start + offset, nbytes)
        return True

    def unpin(self, block: Array) -> None:
        for start in self._pins.within(address_of(block), block.nbytes):
            self._pins.remove(start)
            if why := self._asked("cudaHostUnregister", start):
                logger.warning("%s does not unpin memory: %s", self.name, why)

    @refusing()
    def share(self, nbytes: int) -> CudaExchange:
        return CudaExchange(Gpu(self.place.index, self._queue_shared), loaded_runtime(), nbytes)

    def close(self) -> None:
        self._watcher.close()

    # -- for marks ------------------------------------------------------------------------------------

    def queue_after(
        self,
        before: Sequence[torch.cuda.Event],
        mark: CudaMark,
        work: Callable[..., object],
        writes: Sequence[torch.Tensor],
        reads: Sequence[torch.Tensor],
    ) -> None:
        """`mark.queue(work, *writes, reads=reads)`, after `before` and the earlier copies to the device."""
        for event in before:
            self._in.wait_event(event)
        with _on(self._in):
            _carry_out(work, writes, reads)
        end = _recorded(self._in, is_awaited=True)
        mark.copied(self._in, end)
        self._watcher.watch(end, partial(_land, _nothing, writes, reads), _ignore)  # a copy that comes later fails, too

    def copy_to_host(self, mark: CudaMark, start: int, into: Array) -> Landing:
        """`mark.fetch(start, into)`."""

        def copy(first: int, last: int, is_pinned: bool) -> Callable[[], None]:
            host, content = into[first:last], mark.content[start + first : start + last]
            target = torch.from_numpy(host) if is_pinned else _pinned(last - first)
            target.copy_(content, non_blocking=True)

            def landed() -> None:
                if not is_pinned:
                    host[:] = target.numpy()
                transfer.advance(last)

            return landed

        transfer = Landing(into.nbytes)
        return self._copy(transfer, mark, into, self._out, copy)

    def copy_from_host(self, source: Array, mark: CudaMark, start: int) -> Landing:
        """`mark.put(source, start)`."""

        def copy(first: int, last: int, is_pinned: bool) -> Callable[[], None]:
            host, content = source[first:last], mark.content[start + first : start + last]
            if is_pinned:
                staged = torch.from_numpy(host)
            else:
                staged = _pinned(last - first)
                staged.numpy()[:] = host
            content.copy_(staged, non_blocking=True)
            return lambda: transfer.advance(last)

        transfer = Landing(source.nbytes)
        return self._copy(transfer, mark, source, self._in, copy)

    def _copy(
        self,
        transfer: Landing,
        mark: CudaMark,
        host: Array,
        stream: torch.cuda.Stream,
        copy: Callable[[int, int, bool], Callable[[], None]],
    ) -> Landing:
        """Queue the parts of a transfer by `copy`, which returns what is to be done once the part has landed."""
        try:
            stream.wait_event(mark.ready)
            for first, last, is_pinned in self._pins.pieces(address_of(host), host.nbytes, _CHUNK):
                with torch.inference_mode(), _on(stream):
                    landed = copy(first, last, is_pinned)
                end = _recorded(stream, is_awaited=True)
                mark.copied(stream, end)
                self._watcher.watch(end, partial(_land, landed, mark, host), transfer.fail)
        except Exception as error:
            transfer.fail(error)
        return transfer

    def _queue_shared(self, nbytes: int, work: Callable[[], None], mark: CudaMark | None) -> Landing:
        """Queue `work` on blocks of device memory that ranks share: that of `ipc.Gpu`."""
        transfer, stream = Landing(nbytes), self._shared
        try:
            if mark is not None:
                stream.wait_event(mark.ready)
            with torch.inference_mode(), _on(stream):
                work()
            end = _recorded(stream, is_awaited=True)
            if mark is not None:
                mark.copied(stream, end)
            self._watcher.watch(end, partial(_land, partial(transfer.advance, nbytes), mark), transfer.fail)
        except Exception as error:
            transfer.fail(error)
        return transfer

    # -- pinning ------------------------------------------------------------------------------------

    def _asked(self, function: str, *arguments: int) -> str:
        """Call a function of the driver. Returns why it has refused; "" if it has not.

        The driver keeps an error for the next call of the same thread. So this is a thread of its own, with which the
        error ends.
        """
        reasons: list[str] = []

        def run() -> None:
            try:
                driver = torch.cuda.cudart()
                with torch.cuda.device(self.place):
                    code = getattr(driver, function)(*arguments)
                reasons.append("" if int(code) == 0 else driver.cudaGetErrorString(code))
            except Exception as error:
                reasons.append(describe(error))

        thread = threading.Thread(target=run, name=f"asyncoll-{self.name}-pinning", daemon=True)
        thread.start()
        thread.join()
        return reasons[0]

    def _refused(self, why: str) -> None:
        if not self.refusal:
            logger.warning("%s does not pin memory, so copies take a detour: %s", self.name, why)
        self.refusal = why


def open_device(index: int) -> CudaDevice:
    """The device "cuda:`index`". Raises UsageError, with the reason, if this process cannot use it."""
    name = f"a tensor on cuda:{index}"
    if torch.cuda._is_in_bad_fork():
        raise UsageError(
            f"{name}, but process {os.getpid()} was forked from one that had used CUDA, so it cannot use it: start it "
            'by multiprocessing.get_context("spawn"), or use CUDA in the child only'
        )
    if not torch.cuda.is_available():
        raise UsageError(
            f"{name}, but torch {torch.__version__} finds no device of CUDA: use a build of torch with CUDA on a host "
            "whose nvidia-smi shows a GPU, or pass x.cpu()"
        )
    if index >= torch.cuda.device_count():
        raise UsageError(
            f"{name}, but this process sees {torch.cuda.device_count()} devices of CUDA, from cuda:0 on: look at "
            f"CUDA_VISIBLE_DEVICES, which is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}"
        )
    return CudaDevice(index)


@contextlib.contextmanager
def _on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Make `stream` the current one.

    The device first: else torch would go back to the device of before, and make a context there, which takes memory.
    """
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def _recorded(stream: torch.cuda.Stream, *, is_awaited: bool = False) -> torch.cuda.Event:
    """An event after the work that `stream` has now. A host to which it matters (`is_awaited`) sleeps until then."""
    event = torch.cuda.Event(blocking=is_awaited)
    event.record(stream)
    return event


def _pinned(nbytes: int) -> torch.Tensor:
    """Pinned memory of torch's, which torch does not reuse before the copies of it are over."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _carry_out(work: Callable[..., object], writes: Sequence[torch.Tensor], reads: Sequence[torch.Tensor]) -> None:
    """Queue operations of torch on the current stream. No graph is recorded."""
    with torch.inference_mode():
        work(*writes, *reads)


def _nothing() -> None: ...


def _ignore(error: BaseException) -> None: ...


def _land(landed: Callable[[], None], *_kept: object) -> None:
    landed()
