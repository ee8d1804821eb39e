"""The contract suite of devices: `check_device` checks the promises of every `Device`."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import numpy as np

from asyncoll.tensors.reductions import DTYPES, Array, ReduceOp, build, storage
from asyncoll.testing.contract import checking
from asyncoll.transport.staging import HANDLE_BYTES, BlockPart, Device, Mark, RefusedError, Transfer, arrived

_COUNT = 50_000  # elements
_PATIENCE_S = 20.0  # of a check that fails


class DeviceProgram(Protocol):
    """What a program does with a device, for the contract suite."""

    @property
    def device(self) -> Device: ...

    def tensor(self, x: Any) -> Any:
        """The dense CPU tensor `x`, moved to the device."""

    def add(self, x: Any, value: int) -> None:
        """Queue slow work on the current stream that adds `value` to the int32 tensor `x`."""

    def values(self, x: Any) -> Array:
        """The elements of `x` once all queued work is done, as an array of their bits."""

    def stream(self) -> contextlib.AbstractContextManager[object]:
        """Make another stream the current one."""

    def hold(self) -> Callable[[], None]:
        """Queue work on the current stream that is over once the function that is returned has been called."""


OpenDevice = Callable[[], contextlib.AbstractContextManager[DeviceProgram]]


def check_device(
    open_device: OpenDevice, loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
) -> None:
    """Check the device that `open_device()` yields. Raises AssertionError, naming the promise, if one is broken.

    Every check opens a device, runs on a new loop from `loop_factory`, and closes it there.
    """
    for check in _CHECKS:
        with checking(check, loop_factory) as runner:
            runner.run(_checked(open_device, check))


async def _checked(open_device: OpenDevice, check: Callable[[DeviceProgram], Awaitable[None]]) -> None:
    with open_device() as program:
        await check(program)


def _numbers(count: int = _COUNT) -> Array:
    return np.arange(count, dtype=np.int32)


def _tensor(program: DeviceProgram, array: Array, dtype: str = "int32") -> Any:
    return program.tensor(build(array.copy().reshape(-1), dtype, array.shape, as_torch=True))


def _host(nbytes: int) -> Array:
    return np.zeros(nbytes, np.uint8)


def _fetched(program: DeviceProgram, x: Any) -> tuple[Mark, Array, Transfer]:
    """A mark of `x`, memory of the host, and the copy to it."""
    mark = program.device.mark(x)
    into = _host(mark.nbytes)
    return mark, into, mark.fetch(0, into)


async def _arrived(program: DeviceProgram, x: Any) -> tuple[Mark, Array]:
    """A mark of `x`, and its bytes on the host."""
    mark, into, transfer = _fetched(program, x)
    await arrived(transfer)
    return mark, into


def _give_back(mark: Mark, into: Array) -> Transfer:
    """Copy `into` to the tensor of `mark`, before the work that is queued from here on."""
    put = mark.put(into, 0)
    mark.join()
    return put


async def _fetches_what_was_queued(program: DeviceProgram) -> None:
    """a copy to the host has the values that the work before `mark` gives the tensor"""
    x = _tensor(program, _numbers())
    program.add(x, 5)
    mark, into, transfer = _fetched(program, x)
    await arrived(transfer)
    assert (into.view(np.int32) == _numbers() + 5).all()
    assert mark.nbytes == transfer.nbytes == transfer.moved == into.nbytes
    assert transfer.error is None


async def _arrives_in_order(program: DeviceProgram) -> None:
    """bytes arrive in order, and those that have arrived can be used while others come"""
    x = _tensor(program, _numbers())
    _, into, transfer = _fetched(program, x)
    for part in range(0, transfer.nbytes + 1, transfer.nbytes // 8):
        await arrived(transfer, part)
        assert transfer.moved >= part
        assert (into[:part] == _numbers().view(np.uint8)[:part]).all()


async def _tells_at_once(program: DeviceProgram) -> None:
    """a callback for bytes that have arrived is called at once, and each callback is called once"""
    x = _tensor(program, _numbers(100))
    _, _, transfer = _fetched(program, x)
    calls: list[int] = []
    for _ in range(2):
        transfer.when_moved(transfer.nbytes, lambda: calls.append(transfer.moved))
    await arrived(transfer)
    assert calls == [transfer.nbytes] * 2
    transfer.when_moved(1, lambda: calls.append(-1))
    assert calls[2:] == [-1]


async def _put_comes_between(program: DeviceProgram) -> None:
    """what is put comes after the work before `mark`, and before the work after `join`; the host waits for neither"""
    x, source = _tensor(program, _numbers()), _numbers() * 3
    program.add(x, 1)
    mark = program.device.mark(x)
    transfer = mark.put(source.view(np.uint8), 0)
    mark.join()
    program.add(x, 7)
    await arrived(transfer)
    source[:] = -1
    assert (program.values(x) == _numbers() * 3 + 7).all()


async def _goes_there_and_back(program: DeviceProgram) -> None:
    """a tensor can be fetched, changed at the host, and put back, again and again"""
    x = _tensor(program, _numbers())
    for turn in range(5):
        program.add(x, 1)
        mark, into = await _arrived(program, x)
        into.view(np.int32)[:] += turn
        _give_back(mark, into)
    assert (program.values(x) == _numbers() + 5 + 10).all()


async def _takes_windows(program: DeviceProgram) -> None:
    """parts of a tensor are copied for themselves, and go back before others have come"""
    x = _tensor(program, _numbers())
    program.add(x, 1)
    mark = program.device.mark(x)
    whole, window = _host(mark.nbytes), mark.nbytes // 4
    parts = [(start, whole[start : start + window]) for start in range(0, mark.nbytes, window)]
    fetched = [mark.fetch(start, part) for start, part in parts]
    for (start, part), transfer in zip(parts, fetched, strict=True):
        await arrived(transfer)
        part.view(np.int32)[:] *= 2
        mark.put(part, start)
    mark.join()
    program.add(x, 1)
    assert (program.values(x) == 2 * (_numbers() + 1) + 1).all()


async def _packs_any_layout(program: DeviceProgram) -> None:
    """a tensor of any layout is copied packed, and what lies between its elements keeps its value"""
    whole = _tensor(program, _numbers(600).reshape(20, 30))
    for x in (whole.t(), whole[::3, 1::2], whole[2], whole[:, 3]):
        before, elements = program.values(whole), program.values(x)
        program.add(whole, 1)
        mark, into = await _arrived(program, x)
        assert (into.view(np.int32) == elements.reshape(-1) + 1).all()
        into.view(np.int32)[:] += 100
        _give_back(mark, into)
        program.add(whole, 1)
        assert (program.values(x) == elements + 102).all()
        assert program.values(whole).sum() == before.sum() + 2 * whole.numel() + 100 * x.numel()


async def _joins_again(program: DeviceProgram) -> None:
    """a second `join` orders the work that comes after it, and does not change the tensor"""
    whole = _tensor(program, _numbers(600).reshape(20, 30))
    for x in (whole.t(), whole):
        program.add(whole, 1)
        mark, into = await _arrived(program, x)
        _give_back(mark, into)
        program.add(whole, 1)
        mark.join()
        with program.stream():
            mark.join()
    assert (program.values(whole).reshape(-1) == _numbers(600) + 4).all()


async def _follows_streams(program: DeviceProgram) -> None:
    """`mark` and `join` order the copies with the current streams of both, which may differ"""
    for turn in range(4):
        whole = _tensor(program, _numbers().reshape(100, -1))
        x = whole.t() if turn % 2 else whole
        elements = program.values(x)
        with program.stream():
            program.add(x, 1)
            mark, into, transfer = _fetched(program, x)
        await arrived(transfer)
        into.view(np.int32)[:] *= 2
        _give_back(mark, into)
        with program.stream():
            program.add(x, 1)
            mark = program.device.mark(x)
        mark.join()
        program.add(x, 1)
        assert (program.values(x) == 2 * (elements + 1) + 2).all()


async def _takes_any_size(program: DeviceProgram) -> None:
    """tensors without elements, or without dimensions, are copied like others"""
    for shape in ((0,), (3, 0), (), (1,)):
        array = np.full(shape, 5, np.int32)
        x = _tensor(program, array)
        mark, into = await _arrived(program, x)
        assert (into.view(np.int32) == array.reshape(-1)).all()
        into.view(np.int32)[:] = 6
        put = _give_back(mark, into)
        await arrived(put)
        assert (program.values(x) == array + 1).all()


async def _keeps_bits(program: DeviceProgram) -> None:
    """every dtype goes there and back without a change, whatever its bits"""
    for dtype in DTYPES:
        bits = np.random.default_rng(7).integers(0, 2 if dtype == "bool" else 256, 9000, np.uint8)
        array = bits[: 9000 // 16 * 16].view(storage(dtype))
        x = _tensor(program, array, dtype)
        mark, into = await _arrived(program, x)
        assert (into == array.view(np.uint8)).all(), dtype
        _give_back(mark, into[::-1].copy() if dtype == "bool" else into)
        wanted = array[::-1] if dtype == "bool" else array
        assert (program.values(x).reshape(-1).view(np.uint8) == wanted.copy().view(np.uint8)).all(), dtype


async def _clones(program: DeviceProgram) -> None:
    """`empty` and `clone` make contiguous tensors of the device; a clone has the values of the work before"""
    whole = _tensor(program, _numbers(600).reshape(20, 30))
    program.add(whole, 1)
    copy = program.device.clone(whole.t())
    program.add(whole, 1)
    assert (program.values(copy) == _numbers(600).reshape(20, 30).T + 1).all()
    new = program.device.empty("bfloat16", (3, 2))
    for x in (copy, new):
        assert x.is_contiguous()
        assert program.device.holds(x)
    assert str(new.dtype) == "torch.bfloat16"
    assert tuple(new.shape) == (3, 2)


async def _queues_work(program: DeviceProgram) -> None:
    """queued work sees what the work before gives its tensors, of any layout, and comes before the work after"""
    whole, other = _tensor(program, _numbers(600).reshape(20, 30)), _tensor(program, _numbers(300).reshape(20, 15))
    x = whole.t()[::2]
    program.add(x, 1)
    program.device.queue(lambda into, source: into.mul_(2).add_(source.t()), x, reads=[other])
    program.add(x, 1)
    expected = 2 * (_numbers(600).reshape(20, 30)[:, ::2].T + 1) + _numbers(300).reshape(20, 15).T + 1
    assert (program.values(x) == expected).all()
    assert (program.values(whole)[:, 1::2] == _numbers(600).reshape(20, 30)[:, 1::2]).all()


async def _queues_work_of_a_mark(program: DeviceProgram) -> None:
    """work of a mark comes after it and the copies of others, and before the work after `join`, on both streams"""
    for _ in range(3):
        x, other, source = _tensor(program, _numbers()), _tensor(program, _numbers()), _numbers() * 3
        with program.stream():
            program.add(x, 1)
            mark = program.device.mark(x)
        other_mark = program.device.mark(other)
        other_mark.put(source.view(np.uint8), 0)
        end = mark.queue(lambda into, source: into.mul_(2).add_(source), x, reads=[other], after=[other_mark])
        mark.join()
        with program.stream():
            program.add(x, 1)
        await arrived(end)
        assert end.moved == end.nbytes == 4 * _COUNT
        assert (program.values(x) == 2 * (_numbers() + 1) + source + 1).all()


async def _holds_up_no_other_stream(program: DeviceProgram) -> None:
    """copies wait for no work of other streams, and for none at all once the host has seen one of their mark"""
    with program.stream():
        early, into, transfer = _fetched(program, _tensor(program, _numbers()))
        idle, _, fetched = _fetched(program, _tensor(program, _numbers()))
        await arrived(transfer)
        await arrived(fetched)
        release = program.hold()
        try:
            later = _tensor(program, _numbers())
            mark, late, held = _fetched(program, later)
            unread = program.device.mark(_tensor(program, _numbers()))
            waiting = [
                held,
                unread.come(),
                unread.put(_numbers().view(np.uint8), 0),
                mark.queue(lambda x: x.add_(1), later),
            ]
            waiting.append(idle.queue(lambda x: x.add_(1), later, after=[mark]))
        except BaseException:
            release()
            raise
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await _copies_in_all_ways(program, early, into)
            other = program.device.mark(_tensor(program, _numbers()))
            await _copies_in_all_ways(program, other, _host(other.nbytes))
            await _shares(program, other)
        assert not any(transfer.moved for transfer in waiting)
    finally:
        release()
    for transfer in waiting:
        await arrived(transfer)
    assert (late.view(np.int32) == _numbers()).all()
    mark.join()
    idle.join()
    assert (program.values(later) == _numbers() + 2).all()


async def _copies_in_all_ways(program: DeviceProgram, mark: Mark, into: Array) -> None:
    await arrived(mark.come())
    await arrived(mark.fetch(0, into))
    await arrived(mark.put(into, 0))
    await arrived(mark.queue(lambda x: x.add_(1), _tensor(program, _numbers(5)), after=[mark]))
    with mark.aside():
        x = _tensor(program, _numbers(5))
        program.add(x, 1)
        _, found, transfer = _fetched(program, x)
    await arrived(transfer)
    assert (found.view(np.int32) == _numbers(5) + 1).all()


async def _makes_tensors_beside(program: DeviceProgram) -> None:
    """a new tensor is in the order of the stream that was current in `mark`, and of that of its own `join`"""
    with program.stream():
        x = _tensor(program, _numbers())
        mark = program.device.mark(x)
    new, its_mark = mark.like("int32", (2, 3))
    put = its_mark.put(_numbers(6).view(np.uint8), 0)
    with program.stream():
        its_mark.join()
        program.add(new, 1)
    assert (program.values(new) == _numbers(6).reshape(2, 3) + 1).all()
    assert program.device.holds(new)
    await arrived(put)


async def _copies_many(program: DeviceProgram) -> None:
    """copies of many tensors are under way at the same time"""
    tensors = [_tensor(program, _numbers(count)) for count in range(1, 4000, 200)]
    for x in tensors:
        program.add(x, 1)
    copies = [_fetched(program, x) for x in tensors]
    await asyncio.gather(*(arrived(transfer) for _, _, transfer in copies))
    for x, (mark, into, _) in zip(tensors, copies, strict=True):
        assert (into.view(np.int32) == _numbers(x.numel()) + 1).all()
        _give_back(mark, into)


async def _survives_cancellation(program: DeviceProgram) -> None:
    """a cancelled wait has no effect on the copy, or on other waits"""
    x = _tensor(program, _numbers())
    _, into, transfer = _fetched(program, x)
    waits = [asyncio.ensure_future(arrived(transfer)) for _ in range(2)]
    await asyncio.sleep(0)
    waits[0].cancel()
    await waits[1]
    assert (into.view(np.int32) == _numbers()).all()


async def _pins(program: DeviceProgram) -> None:
    """copies of pinned memory are right, and a block can be pinned again after it was unpinned"""
    x = _tensor(program, _numbers(4096))
    pages = np.frombuffer(mmap.mmap(-1, 16384), np.uint8)
    for turn in range(2):
        is_pinned = program.device.pin(pages)
        program.add(x, 1)
        mark = program.device.mark(x)
        await arrived(mark.fetch(0, pages))
        assert (pages.view(np.int32) == _numbers(4096) + turn + 1).all()
        mark.join()
        if is_pinned:
            program.device.unpin(pages)


async def _shares(program: DeviceProgram, mark: Mark) -> None:
    """Copy 4,096 bytes of a tensor into a block, reduce them there, and copy them back."""
    try:
        exchange = program.device.share(4096)
    except RefusedError:
        return
    exchange.open({0: exchange.handle})
    await arrived(exchange.write(mark, [BlockPart(0, 0, 0, 4096)]))
    await arrived(exchange.reduce(ReduceOp.SUM, "int32", 0, 4096))
    await arrived(exchange.read(mark, [BlockPart(0, 0, 0, 4096)]))
    assert exchange.shut()
    exchange.free()


async def _shares_memory(program: DeviceProgram) -> None:
    """a block of a device that shares memory takes parts of tensors, is reduced in place, and gives them back"""
    try:
        exchange = program.device.share(1 << 16)
    except RefusedError:
        return
    exchange.open({0: exchange.handle})
    x = _tensor(program, _numbers(4096))
    program.add(x, 1)
    mark = program.device.mark(x)
    await arrived(exchange.write(mark, [BlockPart(0, 1024, 4096, 4096), BlockPart(0, 5120, 8192, 4096)]))
    assert exchange.reduces(ReduceOp.SUM, "int32")
    await arrived(exchange.reduce(ReduceOp.SUM, "int32", 1024, 8192))
    await arrived(exchange.read(mark, [BlockPart(0, 1024, 0, 4096), BlockPart(0, 5120, 4096, 4096)]))
    mark.join()
    program.add(x, 1)
    expected = np.concatenate([_numbers(4096)[1024:3072], _numbers(4096)[2048:]]) + 2
    assert (program.values(x) == expected).all()
    assert len(exchange.handle) == HANDLE_BYTES
    assert exchange.shut()
    exchange.free()


_CHECKS: list[Callable[[DeviceProgram], Awaitable[None]]] = [
    _fetches_what_was_queued,
    _arrives_in_order,
    _tells_at_once,
    _put_comes_between,
    _goes_there_and_back,
    _takes_windows,
    _packs_any_layout,
    _joins_again,
    _follows_streams,
    _takes_any_size,
    _keeps_bits,
    _clones,
    _queues_work,
    _queues_work_of_a_mark,
    _makes_tensors_beside,
    _holds_up_no_other_stream,
    _copies_many,
    _survives_cancellation,
    _pins,
    _shares_memory,
]
