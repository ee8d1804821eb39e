"""The pool of pinned memory for mirrors: what it keeps, and when it pins, unpins and frees."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from asyncoll.errors import UsageError
from asyncoll.forks import address_of
from asyncoll.tensors.registered import RegisteredMemory
from asyncoll.transport.memory import arena, inproc
from asyncoll.transport.staging.pins import Pins
from asyncoll.transport.staging.pool import Pool

MIB = 1 << 20


class Driver:
    """A device that has only pins, and memory of which there is `room`."""

    def __init__(self):
        self.blocks = {}  # bytes, by address
        self.pins = 0
        self.room = 1 << 40
        self.refuses = False
        self.has_own = False
        self.sizes = []

    def pages(self, nbytes):
        if sum(self.blocks.values()) + nbytes > self.room:
            raise UsageError("no room")
        self.sizes.append(nbytes)
        return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)

    def pin(self, block):
        assert block.nbytes % mmap.PAGESIZE == address_of(block) % mmap.PAGESIZE == 0
        if self.refuses:
            return False
        assert self.blocks.setdefault(address_of(block), block.nbytes) == block.nbytes
        self.pins += 1
        return True

    def pinned(self, nbytes):
        if not self.has_own:
            return None
        own = np.zeros(nbytes, np.uint8)
        self.blocks[address_of(own)] = nbytes
        return own

    def unpin(self, block):
        block[:1] = 1  # it is still mapped
        assert self.blocks.pop(address_of(block)) == block.nbytes


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def pool(driver):
    return Pool(driver, driver.pages)


@pytest.mark.parametrize("nbytes", [1, 300, 4096, MIB - 1, MIB, MIB + 1, 5 * MIB, 100 * MIB + 7])
def test_memory_is_used_again_when_its_last_view_is_gone(pool, driver, nbytes):
    first = pool.empty(nbytes)
    assert first.nbytes == nbytes
    assert driver.sizes[0] <= max(nbytes * 5 / 4, MIB)
    view, address = first[: nbytes // 2 + 1].view(np.int8), address_of(first)
    del first
    other = pool.empty(nbytes)
    assert address_of(other) != address
    del view
    assert address_of(pool.empty(nbytes)) == address
    assert driver.pins == (1 if nbytes < MIB // 2 else 2)


def test_small_arrays_share_what_is_pinned(pool, driver):
    arrays = [pool.empty(1000) for _ in range(1000)]
    assert driver.pins == 1
    for number, array in enumerate(arrays):
        array[:] = number % 256
    assert all((array == number % 256).all() for number, array in enumerate(arrays))


def test_nothing_needs_no_memory(pool, driver):
    assert pool.empty(0).nbytes == 0
    assert not driver.sizes


def test_the_pool_keeps_what_was_in_use_at_one_time(pool, driver):
    arrays = [pool.empty(size * MIB) for size in (4, 5, 6)]
    while arrays:
        del arrays[0]
    pool.empty(7 * MIB)
    assert list(driver.blocks.values()) == [6 * MIB, 7 * MIB]
    pool.empty(6 * MIB)
    assert driver.pins == 4


def test_sizes_that_alternate_are_pinned_once(pool, driver):
    for _ in range(5):
        for nbytes in (10 * MIB, 20 * MIB, 40 * MIB, 30 * MIB, 3 * MIB):
            assert pool.empty(nbytes).nbytes == nbytes
    assert driver.pins == 3
    assert [*driver.blocks.values()] == [40 * MIB]


def test_unused_memory_makes_room(pool, driver):
    driver.room = 10 * MIB
    del [pool.empty(4 * MIB), pool.empty(4 * MIB)][:]
    held = pool.empty(8 * MIB)
    with pytest.raises(UsageError, match="no room"):
        pool.empty(4 * MIB)
    del held
    pool.empty(4 * MIB)


def test_unused_memory_makes_room_where_others_take_it(pool, driver):
    """The pool keeps no more than was in use at one time, which has room no longer."""
    del [pool.empty(4 * MIB) for _ in range(4)][:]
    driver.room = 12 * MIB
    pool.empty(5 * MIB)
    assert list(driver.blocks.values()) == [5 * MIB]


def test_an_array_takes_the_smallest_block_that_has_room(pool, driver):
    del [pool.empty(size * MIB) for size in (4, 8)][:]
    held = pool.empty(3 * MIB)
    pool.empty(8 * MIB)
    assert driver.pins == 2
    del held


def test_memory_that_is_not_pinned_is_not_unpinned(pool, driver):
    driver.refuses = True
    assert pool.empty(MIB).nbytes == MIB
    assert not pool.is_pinned
    pool.empty(2 * MIB)
    pool.close()


def test_memory_of_the_driver_where_it_refuses_to_pin_that_of_ranks(pool, driver):
    driver.refuses = driver.has_own = True
    array, small = pool.empty(MIB), pool.empty(1000)
    assert pool.is_pinned
    assert all(any(0 <= address_of(each) - first < MIB for first in driver.blocks) for each in (array, small))
    first = address_of(array)
    del array
    assert address_of(pool.empty(MIB)) == first
    pool.close()
    assert not driver.blocks


def test_the_end(pool, driver):
    small, large = pool.empty(10), pool.empty(2 * MIB)
    pool.close()
    assert not driver.blocks
    small[:], large[:] = 1, 2
    del small, large
    pool.close()


@pytest.mark.parametrize("seed", range(20))
def test_copies_are_cut_where_pinned_ranges_begin_or_end(seed):
    """Ranges of 4 or 10 bytes, some of which touch, in any order."""
    rng, pins, owners = np.random.default_rng(seed), Pins(), np.zeros(120, int)
    for slot in rng.permutation(10).tolist():
        nbytes = int(rng.choice([4, 10]))
        pins.add(10 * slot, nbytes)
        owners[10 * slot : 10 * slot + nbytes] = slot + 1
    for slot in rng.permutation(10)[:3].tolist():
        pins.remove(10 * slot)
        owners[owners == slot + 1] = 0
    for start, nbytes in rng.integers(0, 60, (50, 2)).tolist():
        begun = [10 * (owner - 1) for owner in np.unique(owners) if owner]
        assert pins.within(start, nbytes) == [each for each in begun if start <= each < start + nbytes]
        at, last = 0, 0
        for piece in pins.pieces(start, nbytes, 7):
            assert piece.start == at < piece.stop <= min(at + 7, nbytes)
            [owner] = set(owners[start + at : start + piece.stop].tolist())
            assert piece.is_pinned == (owner > 0)
            assert at == 0 or last == 7 or owner != owners[start + at - 1]
            at, last = piece.stop, piece.stop - at
        assert at == nbytes


def test_pages_of_every_kind_of_memory():
    with arena.local_world(1) as arenas:
        for each in (None, arenas[0], inproc.arenas(1)[0]):
            memory = RegisteredMemory(each, None)
            for nbytes in (4096, 40960, 4096):
                pages = memory.pages(nbytes)
                assert (address_of(pages) % mmap.PAGESIZE, pages.nbytes) == (0, nbytes)
                pages[:] = 1
        for each in (None, arenas[0]):
            with pytest.raises(UsageError, match="cannot allocate"):
                RegisteredMemory(each, None).pages(1 << 50)
