"""Short meetings and control blocks, with the compiled core, without it, and with both kinds of ranks in one world."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from types import ModuleType

import numpy as np
import pytest

from asyncoll import _core
from asyncoll.algorithms.dense.compiled import meetings_of
from asyncoll.algorithms.dense.meeting_cells import CLAIMED, RECORD_HEAD
from asyncoll.algorithms.dense.rendezvous import DisagreementError, Rendezvous, RendezvousArea
from asyncoll.algorithms.dense.tuning import Sizes
from asyncoll.tensors.reductions import Array, ReduceOp, into_all, kernel_number, reducer_in_python
from asyncoll.transport.memory.arena import local_world
from tests.support.properties import given, st

SIZES = Sizes(
    shown=1 << 11, short=1 << 14, chunk=1 << 12, window=1 << 12, piece=1 << 12, whole=0, private_max=0, calls=2
)
CORES: dict[str, list[ModuleType | None]] = {"python": [None]}
if _core.native is not None:
    CORES |= {"c": [_core.native], "mixed": [_core.native, None], "mixed, python first": [None, _core.native]}
cores = pytest.mark.parametrize("natives", CORES.values(), ids=CORES)


WAITING, NOT_FREE, OVER, LAST = range(4)  # what `arrive` returns; LAST only in Python: this rank is to reduce


class PythonMeetings:
    """The methods of `Meetings` in the steps of the general way, of arrays that are copied or registered."""

    def __init__(self, area: RendezvousArea) -> None:
        self._area = area

    def arrive(
        self,
        number: int,
        fingerprint: int,
        array: Array | None,
        address: int,
        kernel: int,
        divisor: int,
        is_clear: bool,
        /,
    ) -> int:
        del kernel, divisor, is_clear
        area = self._area
        rendezvous = area.rendezvous(number, 0, fingerprint)
        with area.control_block:
            if not rendezvous.is_free():
                return NOT_FREE
        area.begin(number)
        area.end(number)  # the turns of calls are those of `ShortCalls`
        return LAST if rendezvous.arrive_shortly(array, address) else WAITING

    def publish(self, number: int, done: int, is_clear: bool, /) -> None:
        del is_clear  # the rendezvous area knows
        self._area.rendezvous(number, 0, 0).leave(reduced=done)

    def complete(self, number: int, done: int, array: Array | None, is_clear: bool, /) -> bool:
        del is_clear
        rendezvous = self._area.rendezvous(number, 0, 0)
        with self._area.control_block:
            if not rendezvous.is_reduced(done):
                return False
        if array is not None:
            rendezvous.receive_shortly(array)
        rendezvous.leave()
        return True

    def look(self, number: int, done: int, polls: int, sleep_ns: int, kernel: int, divisor: int, /) -> bool:
        del polls, sleep_ns, kernel, divisor  # the arena's own numbers
        rendezvous = self._area.rendezvous(number, 0, 0)
        return self._area.arena.look(lambda: rendezvous.is_reduced(done))


class Rank:
    """One rank of the meetings: it arrives, reduces if it is the last, and completes."""

    def __init__(self, area: RendezvousArea) -> None:
        self.area = area
        native = area.arena.native
        self.meetings = PythonMeetings(area) if native is None else meetings_of(area, native)
        area.short_array(area.rank, 0, np.dtype(np.uint8), 1)  # allocates

    def arrive(self, number: int, x: Array | None, op: ReduceOp = ReduceOp.SUM, fingerprint: int = 5) -> int:
        dtype = "" if x is None else x.dtype.name
        kernel = kernel_number(op, dtype, self.area.arena.native) if x is not None else 0
        divisor = self.area.size if op is ReduceOp.AVG else 1
        address = 0 if x is None else self.area.address_of_short(x)
        state = self.meetings.arrive(number, fingerprint, x, address, kernel, divisor, True)
        if state != LAST:
            return state
        rendezvous = self.area.rendezvous(number, 0, fingerprint)
        if x is not None and rendezvous.is_shown(x.nbytes):
            self.reduce_chunks(number, x, op)
            return state if self.complete(number, x) else WAITING  # another rank still reduces a chunk
        if x is not None:
            rendezvous.reduce_copies(x, reducer_in_python(op, dtype), divisor)
        self.meetings.publish(number, _done(x), True)
        return state

    def reduce_chunks(self, number: int, x: Array, op: ReduceOp, count: int = sys.maxsize) -> None:
        """Claim and reduce at most `count` chunks, in Python."""
        rendezvous = self.area.rendezvous(number, 0, 5)
        reduce = into_all(reducer_in_python(op, x.dtype.name), 0, None)
        while count and (chunk := rendezvous.claim(x.nbytes)):
            divisor = self.area.size if op is ReduceOp.AVG else 1
            rendezvous.reduce_chunk(chunk, rendezvous.arrays(x.nbytes, x.dtype), reduce, divisor)
            count -= 1

    def look(self, number: int, x: Array | None, polls: int = 1, sleep_ns: int = 1000) -> bool:
        kernel = 0 if x is None else kernel_number(ReduceOp.SUM, x.dtype.name, self.area.arena.native)
        return self.meetings.look(number, _done(x), polls, sleep_ns, kernel, 1)

    def array(self, values: Array, is_registered: bool) -> Array:
        """A copy of `values`, in the arena if it is to be registered."""
        if not is_registered:
            return values.copy()
        arena = self.area.arena
        copy: Array = arena.view(arena.allocate(values.nbytes), values.nbytes).view(values.dtype)
        copy[...] = values
        return copy

    def complete(self, number: int, x: Array | None) -> bool:
        return self.meetings.complete(number, _done(x), x, True)


def withdraw(rendezvous: Rendezvous) -> None:
    """Withdraw the memory that was shown there; fails if that has to wait."""
    rendezvous.withdraw()
    with pytest.raises(StopIteration):
        rendezvous.given_back(lambda rank: False).send(None)


def _done(x: Array | None) -> int:
    return 1 if x is None else x.nbytes


@contextlib.contextmanager
def ranks(size: int, natives: Sequence[ModuleType | None]) -> Iterator[list[Rank]]:
    with local_world(size, natives) as arenas:
        yield [Rank(RendezvousArea(arena, size, rank, 7, SIZES)) for rank, arena in enumerate(arenas)]


@cores
@given(
    size=st.sampled_from([1, 2, 3, 4, 5, 8, 9, 13]),
    calls=st.lists(
        st.tuples(
            st.sampled_from(["float32", "float64", "int16", "uint8"]),
            st.sampled_from([1, 3, 64, 1500]),  # the last is shown where it is, if it is registered
            st.sampled_from([ReduceOp.SUM, ReduceOp.MAX, ReduceOp.PROD]),
        ),
        min_size=1,
        max_size=6,
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_rank_gets_the_reduction_in_the_order_of_ranks(natives, size, calls, seed):
    """What each rank does comes from one seed: a draw of Hypothesis for each takes most of the time."""
    draw = np.random.default_rng(seed)
    with ranks(size, natives) as world:
        for number, (dtype, count, op) in enumerate(calls, 1):
            registered = draw.random(size) < draw.choice([0, 0.5, 1])
            values = draw.integers(0, 7, (size, count)).astype(dtype)
            arrays = [rank.array(x, is_so) for rank, x, is_so in zip(world, values, registered, strict=True)]
            expected = arrays[0].copy()
            reducer_in_python(op, dtype)(expected, [expected, *arrays[1:]], 1)
            order = draw.permutation(size).tolist()
            states = [world[rank].arrive(number, arrays[rank], op) for rank in order]
            assert states[:-1] == [WAITING] * (size - 1)
            assert states[-1] in (LAST, OVER)
            for rank in draw.permutation(order[:-1]).tolist():
                assert world[rank].complete(number, arrays[rank])
            assert all(np.array_equal(array, expected) for array in arrays)


@cores
def test_barriers_and_reductions_use_the_records_in_turn(natives):
    with ranks(3, natives) as world:
        for number in range(1, 12):
            x = [None] * 3 if number % 2 else [np.full(2, float(rank)) for rank in range(3)]
            for rank in (1, 2):
                assert world[rank].arrive(number, x[rank]) == WAITING
                assert not world[rank].complete(number, x[rank])
                assert not world[rank].look(number, x[rank])
            assert world[0].arrive(number, x[0]) in (LAST, OVER)
            for rank in (1, 2):
                assert world[rank].look(number, x[rank])
                assert world[rank].complete(number, x[rank])
            assert number % 2 or all(array.tolist() == [3.0, 3.0] for array in x)


@cores
def test_a_record_is_free_when_all_ranks_have_left(natives):
    with ranks(2, natives) as (first, second):
        for number in (1, 2):
            assert first.arrive(number, None) == WAITING
            assert second.arrive(number, None) in (LAST, OVER)
        assert second.arrive(3, None) == NOT_FREE  # `first` has not left call 1, and calls 1 and 3 share a record
        assert first.complete(1, None)
        assert second.arrive(3, None) == WAITING
        assert first.arrive(4, None) == NOT_FREE
        assert first.complete(2, None)
        assert first.arrive(3, None) in (LAST, OVER)
        assert second.complete(3, None)


@cores
@pytest.mark.parametrize("early", [0, 1])
def test_different_calls_with_one_number_disagree(natives, early):
    with ranks(2, natives) as world:
        assert world[early].arrive(1, None, fingerprint=5) == WAITING
        with pytest.raises(DisagreementError) as caught:
            world[1 - early].arrive(1, None, fingerprint=6)
        assert caught.value.rank == early


@cores
def test_an_array_that_is_too_long_is_refused(natives):
    if natives == [None]:
        pytest.skip("only the compiled core copies without numpy's check of the length")
    compiled = [native is not None for native in natives].index(True)
    with ranks(2, natives) as world, pytest.raises(ValueError, match="16385 bytes are not short"):
        world[compiled].arrive(1, np.zeros((1 << 14) + 1, np.uint8))


compiled = pytest.mark.skipif(_core.native is None, reason="needs the compiled core")
LONG = SIZES.short * 2 + 3 * 64  # bytes, of some chunks and a part of one


@compiled
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_registered_arrays_that_are_too_long_to_be_copied_meet_where_they_are(size):
    with ranks(size, [_core.native]) as world:
        for number in range(1, 8):
            x = [rank.array(np.arange(LONG // 4, dtype=np.float32) + number * i, True) for i, rank in enumerate(world)]
            expected = sum(array.astype(np.float64) for array in x)
            order = [(number + rank) % size for rank in range(size)]
            states = [world[rank].arrive(number, x[rank]) for rank in order]
            assert states == [WAITING] * (size - 1) + [OVER]
            for rank in order[:-1]:
                assert world[rank].look(number, x[rank])
                assert world[rank].complete(number, x[rank])
            assert all((array == expected).all() for array in x)


@compiled
@pytest.mark.parametrize("nbytes", [SIZES.shown, SIZES.short, LONG])
def test_a_rank_that_looks_reduces_the_chunks_that_no_rank_has_claimed(nbytes):
    """The other rank, in Python, has arrived last and has reduced one chunk."""
    with ranks(2, [_core.native, None]) as (first, second):
        x, y = (rank.array(np.arange(nbytes // 8, dtype=np.float64), True) for rank in (first, second))
        expected = 2 * x
        assert first.arrive(1, x) == WAITING
        rendezvous = second.area.rendezvous(1, 0, 5)
        if nbytes > SIZES.short:
            rendezvous.arrive(second.area.arena.locate(y), nbytes, direct=True)
        else:
            assert rendezvous.arrive_shortly(y, second.area.arena.locate(y))
        second.reduce_chunks(1, y, ReduceOp.SUM, count=1)
        assert not second.complete(1, y) or nbytes <= SIZES.chunk
        assert first.look(1, x)
        assert (x == expected).all()
        assert (y == expected).all()
        assert first.complete(1, x)


@compiled
def test_a_long_array_is_not_reduced_in_place_if_another_rank_shows_a_slot():
    with ranks(2, [_core.native]) as (first, second):
        x = first.array(np.ones(LONG), True)
        assert first.arrive(1, x) == WAITING
        second.area.rendezvous(1, 0, 5).arrive(second.area.slot(0, 64)[0], 64)
        assert not first.look(1, x, sleep_ns=10_000_000_000)  # at once
        assert not first.complete(1, x)
        assert (x == 1).all()


@compiled
@pytest.mark.parametrize("garbage", [-1, -64, 3, 1 << 62, -(1 << 63)])
def test_chunks_that_do_not_exist_are_not_reduced(garbage):
    with ranks(2, [_core.native]) as (first, second):
        x, y = (rank.array(np.ones(LONG // 8), True) for rank in (first, second))
        assert first.arrive(1, x) == WAITING
        cells = first.area.control_block.cells
        cells[first.area.base(2 * (1 % SIZES.calls)) + CLAIMED] = garbage
        assert second.arrive(1, y) == WAITING
        assert not first.look(1, x)
        assert (x == 1).all()


@compiled
@pytest.mark.parametrize("cell", [0, 1])  # the address, and the bytes
@pytest.mark.parametrize("garbage", [0, -(1 << 50), 1 << 62, -(1 << 63)])
def test_memory_that_does_not_exist_is_not_used(cell, garbage):
    with ranks(2, [_core.native]) as (first, second):
        x, y = (rank.array(np.ones(LONG // 8), True) for rank in (first, second))
        assert first.arrive(1, x) == WAITING
        cells, base = first.area.control_block.cells, first.area.base(2 * (1 % SIZES.calls))
        cells[base + RECORD_HEAD + cell] = garbage
        with pytest.raises((ValueError, IndexError, OverflowError)):
            second.arrive(1, y)
        assert (y == 1).all()


@cores
def test_threads_of_all_ranks_share_the_chunks_many_times(natives):
    size, rounds, sums = 3, 60, []
    with ranks(size, natives) as world:

        def run(rank: int) -> None:
            x = world[rank].array(np.empty(SIZES.short // 8), True)
            for number in range(1, rounds + 1):
                x[...] = rank + number
                while (state := world[rank].arrive(number, x)) == NOT_FREE:
                    pass
                while state == WAITING and not world[rank].complete(number, x):
                    world[rank].look(number, x, 2, 100_000)
                sums.append(set((x - 3 * number).tolist()))

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sums == [{3.0}] * size * rounds


@cores
def test_a_sleeping_thread_wakes_when_the_result_is_published(natives):
    """It sleeps without the GIL for up to ten seconds, which a test that fails would take."""
    with ranks(2, natives) as (first, second):
        assert first.arrive(1, None) == WAITING
        woken: list[bool] = []

        def sleep() -> None:
            while not first.look(1, None, 0, 10_000_000_000):
                pass
            woken.append(first.complete(1, None))

        thread = threading.Thread(target=sleep)
        thread.start()
        second.arrive(1, None)
        thread.join()
        assert woken == [True]


@cores
def test_threads_of_all_ranks_meet_many_times(natives):
    """Real threads: the locks, the records and the futexes under contention."""
    size, rounds = 3, 200
    results: list[list[float]] = [[] for _ in range(size)]
    with ranks(size, natives) as world:

        def run(rank: int) -> None:
            for number in range(1, rounds + 1):
                x = np.full(8, float(rank + number))
                while (state := world[rank].arrive(number, x)) == NOT_FREE:
                    pass
                while state == WAITING and not world[rank].complete(number, x):
                    world[rank].look(number, x, 2, 100_000)
                results[rank].append(x[0])

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [[float(3 * number + 3) for number in range(1, rounds + 1)]] * size
