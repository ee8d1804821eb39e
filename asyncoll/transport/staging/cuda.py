"""The devices of CUDA, by torch. This module imports torch, so it is imported when there is a tensor of CUDA.

`tests/support/emulated_cuda.py` emulates the parts of torch that are used here. What a driver does, real copies, locks
and the reuse of memory, only a GPU shows: docs/design/staging.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from asyncoll.errors import DeviceError, UsageError, describe
from asyncoll.forks import address_of, refusal
from asyncoll.tensors.reductions import Array
from asyncoll.transport.joining import in_daemon_thread
from asyncoll.transport.staging.ipc import CudaExchange, Gpu, loaded_runtime, refusing, relaxed
from asyncoll.transport.staging.landing import Landing, Watcher
from asyncoll.transport.staging.pins import Pins

_CHUNK = 1 << 22  # bytes of one copy: `moved` grows by it
_REGISTRATION = 1 << 26  # bytes that are pinned at once: a driver fails for hundreds of gigabytes
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all contexts of the process
_URGENT = -1  # priority of the streams of copies
# The device waits so long for copies that are under way when it closes.
_PATIENCE_S = 5.0
logger = logging.getLogger("asyncoll")


class CudaMark:
    """Implements `Mark`. The tensor, and its packed copy, live until the host has seen the last event of a copy."""

    def __init__(self, device: CudaDevice, x: torch.Tensor) -> None:
        """In the caller's thread, whose current stream packs `x` if it has to be packed."""
        self.nbytes: int = x.numel() * x.itemsize
        self._device = device
        self.stream = torch.cuda.current_stream(device.place)
        self._x = x.detach()
        self._is_packed = not self._x.is_contiguous()
        self.content = self._x.contiguous().view(-1).view(torch.uint8)
        self.ready = _recorded(self.stream)
        self.has_come = False  # as far as the host has seen
        self._ends: dict[torch.cuda.Stream, torch.cuda.Event] = {}  # of the last copy on each stream
        self.is_changed = False  # by a copy
        self._unpacked: torch.cuda.Event | None = None

    def come(self) -> Landing:
        return self._device.queue_shared(1, _do_nothing, self)

    def fetch(self, start: int, into: Array) -> Landing:
        device, transfer = self._device, Landing(into.nbytes)

        def copy(first: int, last: int, is_pinned: bool) -> Callable[[], None]:
            host, content = into[first:last], self.content[start + first : start + last]
            target = torch.from_numpy(host) if is_pinned else device.bounce(last - first)
            target.copy_(content, non_blocking=True)

            def landed() -> None:
                if not is_pinned:
                    host[:] = target.numpy()
                transfer.advance(last)

            return landed

        return device.copy(transfer, self, into, device.outwards, copy)

    def put(self, source: Array, start: int) -> Landing:
        device, transfer = self._device, Landing(source.nbytes)
        self.is_changed = True

        def copy(first: int, last: int, is_pinned: bool) -> Callable[[], None]:
            host, content = source[first:last], self.content[start + first : start + last]
            if is_pinned:
                staged = torch.from_numpy(host)
            else:
                staged = device.bounce(last - first)
                staged.numpy()[:] = host
            content.copy_(staged, non_blocking=True)
            return lambda: transfer.advance(last)

        return device.copy(transfer, self, source, device.inwards, copy)

    def copied(self, stream: torch.cuda.Stream, end: torch.cuda.Event) -> None:
        """A part of a copy on `stream` ends with the event `end`."""
        self._ends[stream] = end

    def events(self) -> tuple[torch.cuda.Event, ...]:
        """What comes after the mark and its copies waits for these."""
        return (self.ready, *self._ends.values())

    def queue(
        self,
        work: Callable[..., object],
        *writes: torch.Tensor,
        reads: Sequence[torch.Tensor] = (),
        after: Sequence[CudaMark] = (),
    ) -> Landing:
        device, transfer = self._device, Landing(sum(x.nbytes for x in writes))
        channel = device.channel_after([self, *after])
        with _on(channel.stream):
            _carry_out(work, writes, reads)
        device.watch(channel, self, partial(transfer.advance, transfer.nbytes), transfer, writes, reads)
        return transfer

    def aside(self) -> contextlib.AbstractContextManager[None]:
        return _on(self._device.channel_after([self]).stream)

    def like(self, dtype: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, CudaMark]:
        # Otherwise torch would reuse its memory in the order of another stream.
        with _on(self.stream):
            x = self._device.empty(dtype, shape)
            return x, CudaMark(self._device, x)

    def join(self) -> None:
        device = self._device
        device.check()
        current = torch.cuda.current_stream(device.place)
        for stream in {current, self.stream}:
            for event in self.events():
                stream.wait_event(event)
        if not (self._is_packed and self.is_changed):
            return
        if self._unpacked is None:
            with torch.inference_mode(), _on(current):
                packed = self.content.view(self._x.dtype).view(self._x.shape)
                self._x.copy_(packed, non_blocking=True)
            self._unpacked = _recorded(current)
        # The latter, too, because the packed copy is memory of its order.
        for stream in {current, self.stream}:
            stream.wait_event(self._unpacked)


class _Channel(NamedTuple):
    """A stream of copies, and the thread that waits for their ends, in order."""

    stream: torch.cuda.Stream
    watcher: Watcher


class CudaDevice:
    """Implements `Device`: "cuda:`index`" of this process.

    The driver copies only pinned memory while the host goes on. So other memory, which no call uses unless the driver
    has no pinned memory, is copied to or from pinned memory of torch's: by the caller in `put`, and by the thread that
    sees the end in `fetch`.

    What waits for the program's work must hold up nothing else. So there is a channel for each stream of the program,
    and copies of its marks wait there, in the order of that stream. Copies that have nothing to wait for, because the
    host has seen an end of another copy of the mark, are on free channels.
    """

    def __init__(self, index: int) -> None:
        """Raises DeviceError if the device cannot be used."""
        self._process = os.getpid()
        self.place = torch.device("cuda", index)
        self.name = str(self.place)
        try:
            streams = [self._stream() for _ in range(3)]
        except (RuntimeError, AssertionError) as error:
            raise DeviceError(f"{self.name} cannot be used: {describe(error)}") from error
        self._pins = Pins()
        self._owned: set[int] = set()  # addresses of those that are memory of torch's
        self.refusal = ""  # why the driver has last refused to pin memory
        watcher = self._watcher()
        self.outwards, self.inwards, self._shared = (_Channel(stream, watcher) for stream in streams)
        self._watchers = [watcher]
        # By stream of the program, of which torch has at most 32 of a priority; and of work that is `aside`.
        self._channels: dict[torch.cuda.Stream, _Channel] = {self.inwards.stream: self.inwards}
        self._lock = threading.Lock()  # of the channels

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

    def pinned(self, nbytes: int) -> Array | None:
        try:
            block: Array = _pinned(nbytes).numpy()
        except RuntimeError as error:
            logger.warning("%s has no pinned memory, so copies take a detour: %s", self.name, describe(error))
            return None
        start = address_of(block)
        self._owned.add(start)
        self._pins.add(start, nbytes)
        return block

    def unpin(self, block: Array) -> None:
        for start in self._pins.within(address_of(block), block.nbytes):
            self._pins.remove(start)
            if start in self._owned:
                self._owned.remove(start)
            elif why := self._asked("cudaHostUnregister", start):
                logger.warning("%s does not unpin memory: %s", self.name, why)

    @refusing()
    def share(self, nbytes: int) -> CudaExchange:
        runtime = loaded_runtime()
        return CudaExchange(Gpu(self.place.index, self.queue_shared), runtime, nbytes)

    def close(self) -> bool:
        for watcher in self._watchers:
            watcher.end()
        return all(watcher.has_ended(_PATIENCE_S) for watcher in self._watchers)

    # -- for marks ------------------------------------------------------------------------------------

    def copy(
        self,
        transfer: Landing,
        mark: CudaMark,
        host: Array,
        free: _Channel,
        copy: Callable[[int, int, bool], Callable[[], None]],
    ) -> Landing:
        """Queue the parts of a transfer by `copy`, which returns what is to be done once the part has landed."""
        try:
            channel = self._channel(mark, free)
            channel.stream.wait_event(mark.ready)
            for first, last, is_pinned in self._pins.pieces(address_of(host), host.nbytes, _CHUNK):
                with torch.inference_mode(), _on(channel.stream):
                    landed = copy(first, last, is_pinned)
                self.watch(channel, mark, landed, transfer, host)
        except Exception as error:
            transfer.fail(error)
        return transfer

    def bounce(self, nbytes: int) -> torch.Tensor:
        """Pinned memory of torch's, through which memory that is not pinned is copied."""
        try:
            return _pinned(nbytes)
        except RuntimeError as error:
            raise DeviceError(
                f"{self.name} has no pinned memory, which copies need, neither of ours "
                f"({self.refusal or 'not tried'}) nor of torch's ({describe(error)}): free memory of the host, or "
                "allow this process more of it (ulimit, containers), or pass x.cpu()"
            ) from error

    def queue_shared(self, nbytes: int, work: Callable[[], None], mark: CudaMark | None) -> Landing:
        """Queue `work` on blocks of device memory that ranks share: that of `ipc.Gpu`."""
        transfer = Landing(nbytes)
        landed = partial(transfer.advance, nbytes)
        try:
            channel = self._channel(mark, self._shared)
            if mark is not None:
                channel.stream.wait_event(mark.ready)
            try:
                with torch.inference_mode(), _on(channel.stream):
                    work()
            except Exception as error:  # told once what was queued before it is over: until then it uses the blocks
                landed = partial(transfer.fail, error)
            self.watch(channel, mark, landed, transfer)
        except Exception as error:
            transfer.fail(error)
        return transfer

    # -- channels --------------------------------------------------------------------------------------

    def _channel(self, mark: CudaMark | None, free: _Channel) -> _Channel:
        """Where a copy of `mark` waits for its end: `free` if it has nothing else to wait for."""
        if mark is None or mark.has_come:
            return free
        with self._lock:
            channel = self._channels.get(mark.stream)
            if channel is None:
                channel = _Channel(self._stream(), self._watcher())
                self._channels[mark.stream] = self._channels[channel.stream] = channel
                self._watchers.append(channel.watcher)
            return channel

    def channel_after(self, marks: Sequence[CudaMark]) -> _Channel:
        """Where what comes after the marks and their copies waits."""
        channel = self._channel(next((each for each in marks if not each.has_come), marks[0]), self.inwards)
        for event in (event for each in marks for event in each.events()):
            channel.stream.wait_event(event)
        return channel

    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.place, priority=_URGENT)

    def _watcher(self) -> Watcher:
        return Watcher(self.name, self._inside())

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """For threads of ours."""
        with torch.cuda.device(self.place), relaxed():
            yield

    def watch(
        self, channel: _Channel, mark: CudaMark | None, landed: Callable[[], None], transfer: Landing, *kept: object
    ) -> None:
        """Call `landed` once what is queued on the channel has ended. Until then `mark` and `kept` live."""
        end = _recorded(channel.stream, is_awaited=True)
        if mark is not None:
            mark.copied(channel.stream, end)
        channel.watcher.watch(end, partial(_land, landed, mark, *kept), transfer.fail)

    # -- pinning ------------------------------------------------------------------------------------

    def _asked(self, function: str, *arguments: int) -> str:
        """Call a function of the driver. Returns why it has refused; "" if it has not.

        The driver keeps an error for the next call of the same thread. So this is a thread of its own, with which the
        error ends.
        """

        def ask() -> str:
            driver = torch.cuda.cudart()
            with self._inside():
                code = getattr(driver, function)(*arguments)
            return "" if int(code) == 0 else str(driver.cudaGetErrorString(code))

        try:
            return in_daemon_thread(ask, f"asyncoll-{self.name}-pinning").result()
        except Exception as error:
            return describe(error)

    def _refused(self, why: str) -> None:
        if not self.refusal:
            logger.warning("%s does not pin memory of ours, so copies use that of torch, if any: %s", self.name, why)
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
            "whose nvidia-smi shows a GPU, or tensors of the CPU"
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


def _do_nothing() -> None: ...


def _carry_out(work: Callable[..., object], writes: Sequence[torch.Tensor], reads: Sequence[torch.Tensor]) -> None:
    """Queue operations of torch on the current stream. No graph is recorded."""
    with torch.inference_mode():
        work(*writes, *reads)


def _land(landed: Callable[[], None], mark: CudaMark | None, *_kept: object) -> None:
    if mark is not None:
        mark.has_come = True
    landed()
