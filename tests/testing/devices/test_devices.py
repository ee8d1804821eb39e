"""Fake devices: the contract of a device, the hazards that they notice, and the faults that they have."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import uvloop

from asyncoll.tensors.reductions import ReduceOp
from asyncoll.testing import FakeDevice, Hazard, check_device, fake_device
from asyncoll.testing.devices.fake import POISON
from asyncoll.transport.staging import BlockPart, RefusedError, arrived
from asyncoll.transport.virtual_time import VirtualTimeLoop

COUNT = 4096
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


class Program:
    """A `DeviceProgram` of a fake device."""

    def __init__(self, device):
        self.device = device
        self.tensor, self.values, self.hold = device.tensor, device.values, device.hold

    def add(self, x, value):
        self.device.compute(lambda array: np.add(array, value, out=array), x)

    def stream(self):
        return self.device.stream("side")


@contextlib.contextmanager
def opened(seed=0, turned_by="thread", kind=FakeDevice):
    with fake_device(seed, turned_by) as device:
        device.__class__ = kind
        yield Program(device)


# -- the contract ---------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_the_contract_on_a_thread(loop):
    check_device(opened, loop)


@pytest.mark.parametrize("seed", range(12))
def test_the_contract_in_virtual_time(seed):
    check_device(lambda: opened(seed, "loop"), VirtualTimeLoop)


class Hasty(FakeDevice):
    """Copies to the host do not wait for the program's work."""

    def fetch(self, mark, start, into):
        mark.event = self.mark(torch.empty(0)).event
        return super().fetch(mark, start, into)


class Deaf(FakeDevice):
    """Work after `join` does not wait for what was put."""

    def join(self, mark):
        mark.copies.clear()
        super().join(mark)


class Shifted(FakeDevice):
    """A part of a tensor goes to its beginning."""

    def put(self, source, mark, start):
        return super().put(source, mark, 0)


class Flat(FakeDevice):
    """A tensor is taken for a contiguous one."""

    def mark(self, x):
        return super().mark(x.as_strided((x.numel(),), (1,)))


class OfOneStream(FakeDevice):
    """Only the stream of `join` waits."""

    def join(self, mark):
        mark.stream = self._stream
        super().join(mark)


class Early(FakeDevice):
    """Bytes are told before they have arrived."""

    def fetch(self, mark, start, into):
        transfer = super().fetch(mark, start, into)
        transfer.when_moved = lambda nbytes, callback: callback()
        return transfer


class Twice(FakeDevice):
    """Callbacks are called twice."""

    def fetch(self, mark, start, into):
        transfer = super().fetch(mark, start, into)
        when_moved = transfer.when_moved

        def register(nbytes, callback):
            for _ in range(2):
                when_moved(nbytes, callback)

        transfer.when_moved = register
        return transfer


class Lazy(FakeDevice):
    """A clone is a view."""

    def clone(self, x):
        return x


class Rash(FakeDevice):
    """Work that is queued does not wait for the work before."""

    def queue(self, work, *writes, reads=()):
        work(*(torch.from_numpy(self._elements(x)) for x in (*writes, *reads)))


class Aside(FakeDevice):
    """`join` does not wait for work of its mark."""

    def queue_after(self, marks, work, writes, reads):
        copies = list(marks[0].copies)
        transfer = super().queue_after(marks, work, writes, reads)
        marks[0].copies = copies
        return transfer


class Deserted(FakeDevice):
    """Work of a mark does not wait for the copies of others."""

    def queue_after(self, marks, work, writes, reads):
        return super().queue_after(marks[:1], work, writes, reads)


class InTurn(FakeDevice):
    """Copies wait for those of other streams."""

    def _channel(self, stream, mark):
        return stream


class Tied(FakeDevice):
    """Copies of a mark that has come wait for those of marks that have not."""

    def _channel(self, stream, mark):
        return f"{stream} of {mark.stream}"


class Again(FakeDevice):
    """Each `join` unpacks."""

    def join(self, mark):
        mark.unpacked = []
        super().join(mark)


class Misplaced(FakeDevice):
    """A part of a tensor goes to the beginning of the block."""

    def share(self, nbytes):
        exchange = super().share(nbytes)
        write = exchange.write
        exchange.write = lambda mark, parts: write(mark, [part._replace(offset=0) for part in parts])
        return exchange


BROKEN = {
    Hasty: "_fetches_what_was_queued",
    Deaf: "_put_comes_between",
    Shifted: "_takes_windows",
    Flat: "_packs_any_layout",
    OfOneStream: "_follows_streams",
    Early: "_fetches_what_was_queued",
    Twice: "_tells_at_once",
    Lazy: "_clones",
    Rash: "_queues_work",
    Aside: "_queues_work_of_a_mark",
    Deserted: "_queues_work_of_a_mark",
    InTurn: "_holds_up_no_other_stream",
    Tied: "_holds_up_no_other_stream",
    Again: "_joins_again",
    Misplaced: "_shares_memory",
}


@pytest.mark.parametrize(("kind", "check"), BROKEN.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_the_contract_notices_a_broken_device(kind, check):
    with pytest.raises(AssertionError, match=check):
        check_device(lambda: opened(1, "loop", kind), VirtualTimeLoop)


# -- hazards --------------------------------------------------------------------------------------


def pages(count=COUNT):
    return np.frombuffer(mmap.mmap(-1, 4 * count), np.uint8)


def increment(device, x):
    device.compute(lambda array: np.add(array, 1, out=array), x)


def fetched(device, x):
    """A mark of `x`, and pages with its bytes, which the host has seen to arrive."""
    mark = device.mark(x)
    into = pages()[: mark.nbytes]
    transfer = mark.fetch(0, into)
    while transfer.moved != transfer.nbytes:
        device.turn()
    return mark, into


def changed_after_the_mark(device, x):
    mark = device.mark(x)
    increment(device, x)
    mark.fetch(0, pages())


def changed_during_the_copy(device, x):
    device.mark(x).fetch(0, pages())
    increment(device, x)


def used_without_join(device, x):
    mark, into = fetched(device, x)
    mark.put(into, 0)
    increment(device, x)


def used_on_a_stream_that_has_not_joined(device, x):
    mark, into = fetched(device, x)
    mark.put(into, 0)
    mark.join()
    with device.stream("other"):
        increment(device, x)


def read_on_a_stream_that_has_not_joined(device, x):
    mark, into = fetched(device, x)
    mark.put(into, 0)
    with device.stream("other"):
        device.compute(lambda into, source: np.copyto(into, source), device.tensor(torch.empty(COUNT)), reads=[x])


def put_before_all_has_arrived(device, x):
    mark, into = device.mark(x), pages()
    transfer = mark.fetch(0, into)
    while not transfer.moved:
        device.turn()
    assert transfer.moved < transfer.nbytes
    mark.put(np.zeros(4 * COUNT, np.uint8), 0)


def put_before_this_thread_has_seen_that_all_has_arrived(device, x):
    threads = ThreadPoolExecutor(1)
    mark, into = threads.submit(fetched, device, x).result()
    mark.put(into, 0)


def changed_during_the_copy_after_many_uses(device, x):
    for _ in range(50):
        increment(device, x)
        device.compute(lambda array: None, reads=[x])
        device.values(x)
    changed_during_the_copy(device, x)


def changed_after_many_uses_on_another_stream(device, x):
    with device.stream("other"):
        for _ in range(64):
            device.compute(lambda array: None, reads=[x])
    increment(device, x)


def host_writes_what_has_not_arrived(device, x):
    into = pages()
    device.mark(x).fetch(0, into)
    into[-1] = 1


def host_writes_what_is_put(device, x):
    mark, into = fetched(device, x)
    mark.put(into, 0)
    into[-1] += 1


def unpinned_during_the_copy(device, x):
    into = pages()
    device.pin(into)
    device.mark(x).fetch(0, into)
    device.unpin(into)


def pinned_twice(device, x):
    into = pages()
    device.pin(into)
    device.pin(into[4096:])
    device.unpin(into[4096:])
    device.unpin(into)


def unpinned_twice(device, x):
    into = pages()
    device.pin(into)
    device.unpin(into)
    device.unpin(into)


def pinned_in_part_of_a_page(device, x):
    into = pages()[64:]
    device.pin(into)
    device.unpin(into)


def never_unpinned(device, x):
    device.pin(pages())


def touched_by_the_host(device, x):
    x.zero_()


def touched_by_the_host_before_it_was_dropped(device, x):
    device.tensor(torch.ones(3)).zero_()
    for _ in range(99):
        device.tensor(torch.ones(3))


def shared(device):
    """The blocks of two ranks."""
    both = [device.share(COUNT) for _ in range(2)]
    for each in both:
        each.open(dict(enumerate(other.handle for other in both)))
    return both


def over(device, transfer):
    while transfer.moved != transfer.nbytes:
        device.turn()


def read_by_another_rank_before_the_host_has_seen_its_end(device, x):
    one, other = shared(device)
    one.write(device.mark(x), [BlockPart(0, 0, 0, 100)])
    while device.turn():
        pass
    other.read(device.mark(x), [BlockPart(0, 64, 200, 100)])


def reduced_before_the_host_has_seen_its_end(device, x):
    one, other = shared(device)
    one.write(device.mark(x), [BlockPart(0, 0, 0, 128)])
    other.reduce(ReduceOp.SUM, "int32", 0, 64)


def overwritten_while_another_rank_reads(device, x):
    one, other = shared(device)
    mark = device.mark(x)
    over(device, one.write(mark, [BlockPart(0, 0, 0, 128)]))
    other.read(mark, [BlockPart(0, 64, 128, 64)])
    one.write(mark, [BlockPart(0, 0, 0, 100)])


def block_freed_while_it_is_open(device, x):
    shared(device)[0].free()


def block_opened_after_it_was_freed(device, x):
    one, other = (device.share(COUNT) for _ in range(2))
    one.free()
    with pytest.raises(RefusedError):
        other.open({0: one.handle, 1: other.handle})


def block_used_after_it_was_freed(device, x):
    one, other = shared(device)
    assert one.shut()
    one.free()
    other.read(device.mark(x), [BlockPart(0, 0, 0, 64)])


def tensor_changed_while_it_is_copied_into_a_block(device, x):
    one, _ = shared(device)
    one.write(device.mark(x), [BlockPart(0, 0, 0, COUNT)])
    increment(device, x)


HAZARDS = {
    changed_after_the_mark: "stream 'out of default' reads memory, and nothing orders it with .*'default' that writes",
    changed_during_the_copy: "stream 'default' writes memory, and nothing orders it with .*'out of default' that reads",
    used_without_join: "stream 'default' writes memory, and nothing orders it with .*'in' that writes",
    used_on_a_stream_that_has_not_joined: "stream 'other' writes memory",
    read_on_a_stream_that_has_not_joined: "stream 'other' reads memory, and nothing orders it with .*'in' that writes",
    put_before_all_has_arrived: "stream 'in' writes memory, and nothing orders it with .*'out of default' that reads",
    put_before_this_thread_has_seen_that_all_has_arrived: "stream 'in' writes memory, and nothing orders it with",
    changed_during_the_copy_after_many_uses: "stream 'default' writes memory, and nothing orders it .*'out of default'",
    changed_after_many_uses_on_another_stream: "stream 'default' writes memory, and nothing orders it with .*'other'",
    host_writes_what_has_not_arrived: "the host has written memory that a copy from the device has still to write",
    host_writes_what_is_put: "the host has written memory that a copy to the device has still to read",
    unpinned_during_the_copy: "were unpinned while they were copied",
    pinned_twice: "were pinned twice",
    unpinned_twice: "were unpinned, and not pinned before",
    pinned_in_part_of_a_page: "are not whole pages",
    never_unpinned: "1 blocks were never unpinned",
    read_by_another_rank_before_the_host_has_seen_its_end: "bytes of a block are read, and no",
    reduced_before_the_host_has_seen_its_end: "bytes of a block are read, and no host has seen that they were written",
    overwritten_while_another_rank_reads: "a block are written, and no host has seen that they were read",
    block_freed_while_it_is_open: "a block was freed while ranks had it open",
    block_opened_after_it_was_freed: "a block was opened after it had been freed",
    block_used_after_it_was_freed: "a block was used after it had been freed",
    tensor_changed_while_it_is_copied_into_a_block: "'default' writes memory, .* with .*'exchange: write of default'",
    touched_by_the_host: "the host has written to the memory of a tensor",
    touched_by_the_host_before_it_was_dropped: "the host has written to the memory of a tensor",
}


@pytest.mark.parametrize(("misuse", "hazard"), HAZARDS.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_each_hazard_is_noticed(misuse, hazard):
    with pytest.raises(Hazard, match=hazard), fake_device(3, "program") as device:
        misuse(device, device.tensor(torch.arange(COUNT, dtype=torch.int32)))


def test_what_has_not_arrived_is_poison():
    with fake_device(0, "program") as device:
        into = pages()
        transfer = device.mark(device.tensor(torch.zeros(COUNT))).fetch(0, into)
        assert (into == POISON).all()
        while transfer.moved < transfer.nbytes:
            assert (into[: transfer.moved] == 0).all()
            assert (into[transfer.moved :] == POISON).all()
            device.turn()


def test_a_tensor_shows_nothing_to_the_host():
    with fake_device(0, "program") as device:
        x = device.tensor(torch.ones(5, dtype=torch.uint8))
        assert device.holds(x[1:])
        assert x.tolist() == [POISON] * 5
        assert device.values(x).tolist() == [1] * 5


def test_a_long_run_keeps_its_speed():
    """What can cause no hazard any more is forgotten."""
    with fake_device(0, "program") as device:
        x, table, empty = [device.tensor(torch.zeros(count)) for count in (COUNT, COUNT, 0)]
        for turn in range(200):
            increment(device, x)
            device.compute(lambda array: None, reads=[table])
            mark, into = fetched(device, device.tensor(torch.full((2 * COUNT,), float(turn)))[::2])
            mark.put(into, 0)
            mark.join()
        assert max(len(device._memory(each).accesses._known) for each in (x, table)) < 40
        assert len(device._memories) < 140
        assert not device.values(empty).size


# -- faults ---------------------------------------------------------------------------------------


def test_a_copy_fails():
    async def main():
        with fake_device(0, "loop") as device:
            device.fail_copy(1, OSError("no more"))
            x = device.tensor(torch.zeros(COUNT))
            copies = [device.mark(x).fetch(0, pages()) for _ in range(3)]
            await arrived(copies[0])
            with pytest.raises(OSError, match="no more"):
                await arrived(copies[1])
            await arrived(copies[1], copies[1].moved)
            await arrived(copies[2])

    run_in_virtual_time(main)


def test_an_error_that_stays():
    async def main():
        with fake_device(0, "loop") as device:
            device.fail_copy(0, OSError("broken"), sticky=True)
            x = device.tensor(torch.zeros(COUNT))
            for _ in range(2):
                with pytest.raises(OSError, match="broken"):
                    await arrived(device.mark(x).fetch(0, pages()))
            increment(device, x)
            assert not device.values(x).any()

    run_in_virtual_time(main)


def test_the_driver_refuses_to_pin():
    with fake_device() as device:
        device.refuse_pins()
        assert not device.pin(pages())


def run_in_virtual_time(main):
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())
