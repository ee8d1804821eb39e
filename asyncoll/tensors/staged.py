"""Tensors in memory that the host does not read, such as that of a GPU: calls use a mirror of them.

The library does not know the kinds of devices here. Each rank opens the devices of its tensors at their first call, by
the function that its `Devices` have got.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from asyncoll.errors import DeviceError, UsageError, describe
from asyncoll.tensors.reductions import Array

Work = Callable[..., object]  # operations of torch on tensors of a device; see `Device.queue`


class CopiesBack(Protocol):
    """Is told of each copy of a result to a device: no call waits for it."""

    def begun(self) -> None:
        """In the thread that makes the copy."""

    def ended(self, error: DeviceError | None) -> None:
        """In any thread. Neither blocks nor raises."""


class Arriving(Protocol):
    """What comes from a device before the algorithm of a call runs."""

    @property
    def awaited(self) -> str:
        """The name of its device while the call waits for elements from there; empty otherwise. In any thread."""

    @property
    def has_arrived(self) -> bool:
        """Whether `arrived` has nothing to wait for. In any thread."""

    def begin(self, back: CopiesBack) -> None:
        """In the caller's thread: begin to copy the elements. The work that the program has queued comes before.

        `back` is told of the copies of results, and of a `join` that fails. Raises DeviceError if the device has
        failed.
        """

    async def arrived(self) -> None:
        """Return once the host has the elements. On the runtime's loop. Raises DeviceError if the device fails."""

    def join(self) -> None:
        """In a thread that goes on: the work that it queues from here on comes after all copies. Mirrors are gone."""


class Staged(Arriving, Protocol):
    """A tensor of a device, and its mirror."""

    mirror: Array  # the elements, as flat bytes, once they have arrived

    device: str  # the name of the device, for errors
    opened_device: Any  # its `transport.staging.Device`

    @property
    def mark(self) -> Any:
        """Its `transport.staging.Mark`, once it has begun."""

    is_deferred: bool  # whether the algorithm of the call fetches the elements, if it needs them at the host

    def defer(self, *, may_share: bool) -> None:
        """Before `begin`, which copies nothing then. `may_share`: the tensor may need no mirror, and no `room`."""

    def keep(self) -> None:
        """After `defer`, before `begin`: copy the tensor on its device, so that the program may change its own."""

    def fetch(self) -> None:
        """Begin to copy the elements to the mirror. After `defer` and `begin`, at most once."""

    def when_arrived(self, nbytes: int, callback: Callable[[], None]) -> None:
        """Call `callback` once, in any thread or at once, when the first `nbytes` have arrived, or never will.

        It must neither block nor raise. `check_arrived` follows.
        """

    def check_arrived(self, nbytes: int) -> None:
        """The first `nbytes` are used from here on. Raises DeviceError if they have not arrived."""

    def waits_for(self, transfer: Any) -> None:
        """The call waits for `transfer`, a copy between memories of the device, instead of `fetch`."""

    def put(self, nbytes: int | None = None) -> None:
        """The first `nbytes` of the mirror, or all, have the result: copy those to the tensor that were not copied yet.

        They have arrived, and do not change any more. After `begin`.
        """

    def result(self, nbytes: int) -> Any:
        """Make a new flat tensor that the device fills, and return its mark; the next `like` returns that tensor."""

    def fresh(self, nbytes: int) -> tuple[Any, Any]:
        """A new flat tensor of so many bytes, and its mark, which `join` leaves out. Raises as `like`."""

    def order(self) -> None:
        """The work that the thread queues from here on comes after the copies so far, as after `join`; they go on."""

    def got_result(self) -> None:
        """The tensor itself has got the result: `put` has no effect from here on."""

    def failure(self, error: BaseException) -> DeviceError:
        """What to raise for this error of a copy."""

    def room(self, nbytes: int) -> Array:
        """Flat bytes of undefined content for a result, of which `like` then needs no copy."""

    def like(self, flat: Array, dtype: str, shape: tuple[int, ...]) -> Any:
        """A new tensor of the device, which gets the elements `flat`; they do not change any more. After `begin`.

        Raises DeviceError if the device has too little memory.
        """

    def queue(self, work: Work, *writes: Any, reads: Sequence[Any] = ()) -> None:
        """Carry out `work(*writes, *reads)` on the device, after all copies to it so far; `join` comes after it."""

    def aside(self) -> AbstractContextManager[None]:
        """Work that this thread queues meanwhile comes after the copies so far, and not after the program's later work.

        After `begin`.
        """

    def made(self, work: Work, dtype: str, shape: tuple[int, ...], reads: Sequence[Any]) -> Any:
        """A new tensor of the device, to which `queue` has `work` write. Raises DeviceError as `like`."""


class Stager(Protocol):
    """Stages the tensors of one device for one rank."""

    device: Any  # its `transport.staging.Device`

    name: str  # the name of the device

    def holds(self, x: Any) -> bool:
        """Whether the torch tensor `x` is on the device."""

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Any:
        """A new contiguous tensor on the device, with undefined content. Raises DeviceError if it cannot be made."""

    def queue(self, work: Work, *writes: Any, reads: Sequence[Any] = ()) -> None:
        """Carry out `work(*writes, *reads)` on the device, after the work that the program has queued."""

    def clone(self, x: Any) -> Any:
        """A copy of `x` on the device, made after the work that the program has queued."""

    def stage(self, x: Any, *, is_read: bool) -> Staged:
        """`x`, of any strides, with memory for its elements; unless `is_read`, that gets none.

        Raises UsageError if there is too little memory, or the device takes no copies now.
        """

    async def close(self) -> None:
        """Return once no copy is under way, and the memory of mirrors can be unmapped."""


def begin_all(tensors: Sequence[Arriving], back: CopiesBack) -> None:
    """Begin all of them. If one raises, the work of this thread comes after the copies of those before it."""
    for index, tensor in enumerate(tensors):
        try:
            tensor.begin(back)
        except BaseException:
            for begun in tensors[:index]:
                begun.join()
            raise


class HiddenDevice(Protocol):
    """A device, such as one without hardware, whose tensors torch takes for those of the CPU."""

    name: str  # as programs give it: "fake:0"

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Any:
        """A new contiguous tensor on the device."""

    def holds(self, x: Any) -> bool:
        """Whether the torch tensor `x` is on the device."""


hidden: list[HiddenDevice] = []  # that this process uses
stagers: list[Stager] = []  # that the ranks of this process have opened


def is_hidden(x: Any) -> bool:
    """Whether the torch tensor `x` is on a hidden device."""
    return any(device.holds(x) for device in hidden)


@contextlib.contextmanager
def naming(owner: str) -> Iterator[None]:
    """Errors of devices that are raised in it name their `owner`, such as "rank 3", if there is one."""
    try:
        yield
    except (UsageError, DeviceError) as error:
        if not owner:
            raise
        raise type(error)(f"{owner}: {error}") from error.__cause__


def check_plain(x: Any) -> None:
    """Raise UsageError unless the elements of the torch tensor `x`, of a device, are in memory that `x` has there."""
    if not _is_plain(x):
        raise UsageError(
            f"a {type(x).__name__} without plain memory on {x.device} is not supported: pass a dense tensor that has "
            "its storage, such as x.to_local() of a DTensor, and make the call outside of vmap, grad and compiled code"
        )


def _is_plain(x: Any) -> bool:
    import torch

    # A subclass that carries its operations out itself, such as a masked or a fake tensor, has other tensors inside.
    # One that does not, such as a parameter, is the memory alone.
    is_apart = type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if is_apart or torch._C._functorch.is_functorch_wrapped_tensor(x) or x.is_nested or x._is_zerotensor():
        return False
    # A sparse tensor is refused later, by an error that says what to do with it.
    return x.layout is not torch.strided or not x.numel() or bool(x.untyped_storage().nbytes())


class Devices:
    """The devices of one rank's tensors."""

    def __init__(self, open_stager: Callable[[Any], Stager], owner: str = "") -> None:
        """`open_stager(x)` opens the device of the tensor `x`. Raises UsageError if it cannot be used.

        Errors name the `owner`, such as "rank 3", if there is one.
        """
        self._open = open_stager
        self._owner = owner
        self._stagers: list[Stager] = []
        self._lock = threading.Lock()

    def stager_of(self, x: Any) -> Stager:
        """What stages the torch tensor `x`, which is on a device. Raises UsageError if that cannot be used."""
        with self._lock, self.naming():
            check_plain(x)
            for known in self._stagers:
                if known.holds(x):
                    return known
            stager = self._open(x)
            self._stagers.append(stager)
            stagers.append(stager)
            return stager

    def stager_named(self, device: object) -> Stager:
        """What stages the tensors of a device that the program names: "cuda:0", "cuda", or a `torch.device`.

        Raises UsageError if that cannot be used.
        """
        with self.naming():
            x = _tensor_of(device)
        return self.stager_of(x)

    def naming(self) -> AbstractContextManager[None]:
        """Errors of devices that are raised in it name the owner."""
        return naming(self._owner)

    @property
    def names(self) -> str:
        """The names of those that are open, for errors."""
        return ", ".join(stager.name for stager in self._stagers)

    async def close(self) -> None:
        """Before the memory of mirrors is unmapped."""
        while self._stagers:
            stager = self._stagers.pop()
            stagers.remove(stager)
            await stager.close()


def _tensor_of(device: object) -> Any:
    """A tensor on the device of that name."""
    for known in hidden:
        if known.name == str(device):
            try:
                return known.empty("uint8", (0,))
            except Exception as error:
                raise DeviceError(f"{known.name} has failed: {describe(error)}") from error
    import torch

    try:
        place = torch.device(device)  # type: ignore[call-overload]
        if place.type == "cpu":
            raise UsageError("cpu is the memory of the host: leave the device out")
        return torch.empty(0, dtype=torch.uint8, device=place)
    except (TypeError, RuntimeError, AssertionError) as error:
        raise UsageError(f"a tensor on {device!r:.60} cannot be made: {describe(error):.300}") from None
