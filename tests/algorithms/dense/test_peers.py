"""Reductions of arrays in private memory, which the ranks read through the kernel."""

from __future__ import annotations

import asyncio
import os
import random

import numpy as np
import pytest

from asyncoll import AbortedError, Communicator, _core
from asyncoll.algorithms.dense.compiled import meetings_of
from asyncoll.algorithms.dense.meeting_cells import PEER_CAN_READ, PEER_CELLS, PEER_TOKEN
from asyncoll.algorithms.dense.rendezvous import RendezvousArea, signed
from asyncoll.algorithms.dense.shared_call import SharedCall
from asyncoll.algorithms.seam.short_calls import Plan
from asyncoll.statistics import Traffic
from asyncoll.tensors.reductions import ReduceOp, kernel_number, reducer, reducer_in_python, storage
from asyncoll.testing import run_ranks
from asyncoll.testing.faults.core_points import CorePoint
from tests.algorithms.dense.test_meetings import NOT_FREE, withdraw
from tests.algorithms.dense.test_pieces import interleave, rendezvous_areas
from tests.support.places import SCRIPTS
from tests.support.properties import given, settings, st

pytestmark = pytest.mark.skipif(_core.native is None, reason="needs the compiled core")
LONG = 5 << 16  # elements of float32 that are too many for a meeting: a call of a communicator copies them as a whole
PRIVATE = 5 << 17  # so many are too many for that
shared = pytest.mark.parametrize("transport", ["shm", "shm-mixed"])


def can_read(areas: list[RendezvousArea]) -> list[bool]:
    """What each rank finds once all have tried."""
    for _ in range(2):  # all have shown their tokens, and all have read those of all
        for area in areas:
            area.peers.can_read()
    return [area.peers.can_read() for area in areas]


def cannot_read(area: RendezvousArea) -> None:
    """The rank of `area` shows slots from now on."""
    area.peers.can_read = lambda: False


def peer_cell(area: RendezvousArea, rank: int, cell: int) -> int:
    return area.device_cells + PEER_CELLS * (rank - area.size) + cell


@settings(max_examples=15, deadline=None)
@given(
    size=st.sampled_from([1, 2, 3, 4, 5, 8, 9, 13, 17]),
    dtype=st.sampled_from(["float32", "float64", "int16", "uint8", "bfloat16"]),
    kib=st.sampled_from([1, 511, 512, 513, 1100]),
    op=st.sampled_from([ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PROD]),
    unreadable=st.integers(-20, 16),
    seed=st.integers(0, 2**32),
)
def test_each_rank_gets_the_reduction_in_the_order_of_ranks_however_they_interleave(
    size, dtype, kib, op, unreadable, seed
):
    """Of two calls, the second with as many bytes less one element. One rank may show a slot: it cannot read."""
    if op is ReduceOp.AVG and dtype in ("int16", "uint8"):
        op = ReduceOp.SUM
    count, generator = kib * 1024 // storage(dtype).itemsize, np.random.default_rng(seed)
    given = [[generator.integers(0, 99, count - less).astype(storage(dtype)) for _ in range(size)] for less in (0, 1)]
    mine = [[x.copy() for x in call] for call in given]

    async def rank(area):
        for number in range(2):
            area.begin(number)
            await SharedCall(area, number, 5).allreduce(mine[number][area.rank], op, dtype)
            area.end(number)

    with rendezvous_areas(size, [_core.native], 1 << 16, private_max=1 << 24) as areas:
        assert all(can_read(areas))
        if 0 <= unreadable < size:
            cannot_read(areas[unreadable])
        interleave([rank(area) for area in areas], random.Random(seed))
    for call, before in zip(mine, given, strict=True):
        expected = np.empty_like(before[0])
        reducer_in_python(op, dtype)(expected, before, size if op is ReduceOp.AVG else 1)
        assert {x.tobytes() for x in call} == {expected.tobytes()}


class Meeting:
    """One rank at a meeting with private arrays in the compiled core, step by step; then perhaps in Python."""

    def __init__(self, area: RendezvousArea, x, op: ReduceOp, number: int) -> None:
        divisor = area.size if op is ReduceOp.AVG else 1
        kernel = kernel_number(op, str(x.dtype), _core.native)
        self.plan = Plan(
            ("allreduce", str(x.dtype), x.size, op.value),
            signed(5),
            reducer(op, str(x.dtype), _core.native),
            kernel,
            divisor,
            True,
            x.nbytes,
            Traffic(),
            Traffic(),
            epoch=0,
        )
        self.meetings, self.area, self.x, self.number = meetings_of(area, _core.native), area, x, number
        self.has_arrived = self.is_over = False
        self.rest = None
        self.wait = None

    def step(self, *, in_python: bool) -> bool:
        """Take a step, in Python if `in_python`, and for ever after. Returns whether anything may have changed."""
        if not self.has_arrived:
            self.area.begin(self.number)
            plan, x = self.plan, self.x
            address = -x.ctypes.data if self.area.peers.can_read() else None
            if address is None:
                self.rest = SharedCall(self.area, self.number, 5).allreduce(x, ReduceOp(plan.kind[3]), plan.kind[1])
            else:
                arguments = plan.fingerprint, x, address, plan.kernel, plan.divisor, True
                if self.meetings.arrive(self.number, *arguments) == NOT_FREE:
                    return False
            self.has_arrived = True
            return True
        if self.rest is None and in_python:
            call = SharedCall(self.area, self.number, 5)
            call.rejoin(self.x, self.plan)
            assert len(call._lent) == 1
            self.rest = call.finish_shortly(self.x, self.plan)
        if self.rest is None:
            looked = self.meetings.look(self.number, self.x.nbytes, 0, 0, self.plan.kernel, self.plan.divisor)
            self.is_over = looked and self.meetings.complete(self.number, self.x.nbytes, self.x, True)
        elif self.wait is None or self.wait.ready():
            try:
                self.wait = self.rest.send(None)
            except StopIteration:
                self.is_over = True
        if self.is_over:
            self.area.end(self.number)
        return True


@settings(max_examples=40, deadline=None)
@given(
    size=st.sampled_from([1, 2, 3, 4, 5, 8, 9, 13]),
    dtype=st.sampled_from(["float32", "int16", "uint8"]),
    kib=st.sampled_from([1, 255, 256, 257, 1100]),
    op=st.sampled_from([ReduceOp.SUM, ReduceOp.MAX]),
    slot=st.integers(-30, 12),
    leaves_core=st.sampled_from([0.0, 0.1, 0.5]),
    seed=st.integers(0, 2**32),
)
def test_meetings_with_private_arrays_end_with_the_reduction_wherever_a_rank_goes_on_in_python(
    size, dtype, kib, op, slot, leaves_core, seed
):
    """Of three calls, which use each record twice. A rank of number `slot` cannot read, and shows a slot.

    A rank spoils its array as soon as a call is over: one that still read it would have a wrong result.
    """
    count, generator, draw = kib * 1024 // np.dtype(dtype).itemsize, np.random.default_rng(seed), random.Random(seed)
    with rendezvous_areas(size, [_core.native], 1 << 16, private_max=1 << 24) as areas:
        assert all(can_read(areas))
        if 0 <= slot < size:
            cannot_read(areas[slot])
        given = [[generator.integers(0, 99, count).astype(dtype) for _ in range(size)] for _ in range(3)]
        calls = [[Meeting(areas[rank], x.copy(), op, number) for number, x in enumerate(range_)] for rank, range_ in
                 enumerate(zip(*given, strict=True))]  # fmt: skip
        expected = [np.empty_like(call[0]) for call in given]
        for total, call in zip(expected, given, strict=True):
            reducer_in_python(op, dtype)(total, call, 1)
        stepping: set[int] = set()

        def step(_: int) -> None:
            """A step of one rank. After each chunk that it reduces, others may take theirs."""
            free = [rank for rank in range(size) if calls[rank] and rank not in stepping]
            if not free or len(stepping) == 3:
                return
            rank = draw.choice(free)
            meeting = calls[rank][0]
            stepping.add(rank)
            meeting.step(in_python=draw.random() < (leaves_core or 0.1 * (slot >= 0)))
            stepping.discard(rank)
            if meeting.is_over:
                assert meeting.x.tobytes() == expected[meeting.number].tobytes()
                meeting.x[...] = 77
                del calls[rank][0]

        with CorePoint("peers-reduced", step):
            for number in range(5000):
                if any(calls):
                    step(number)
        assert not any(calls)


@pytest.mark.parametrize("point", ["peer-read", "peers-reduced", "peer-taken", "meeting-counted", "meeting-left"])
def test_meetings_with_private_arrays_pass_their_points(point):
    with rendezvous_areas(2, [_core.native], 1 << 12, private_max=1 << 24) as areas, CorePoint(point) as passed:
        assert all(can_read(areas))
        ranks = [Meeting(area, np.ones(LONG, np.float32), ReduceOp.SUM, 0) for area in areas]
        while not all(each.is_over for each in ranks):
            for each in ranks:
                if not each.is_over:
                    each.step(in_python=False)
    assert passed.count


def test_a_meeting_in_the_core_leaves_it_to_python_when_memory_cannot_be_read():
    with rendezvous_areas(2, [_core.native], 1 << 12, private_max=1 << 24) as areas:
        assert all(can_read(areas))
        mine = Meeting(areas[1], np.ones(LONG, np.float32), ReduceOp.SUM, 0)
        areas[0].rendezvous(0, 0, signed(5)).arrive(16, 4 * LONG, private=True)  # no array is there
        mine.step(in_python=False)  # it is the last to arrive, and reduces
        rendezvous = areas[1].rendezvous(0, 0, signed(5))
        assert rendezvous.could_not_read()
        assert not mine.meetings.look(0, mine.x.nbytes, 0, 0, mine.plan.kernel, 1)
        with pytest.raises(OSError, match="cannot be read"):
            mine.step(in_python=True)


def test_a_rank_that_takes_its_array_back_is_not_waited_for_by_readers():
    """One has reduced all, and withdraws. The other gives up in Python, where it waits for the failure."""
    with rendezvous_areas(2, [_core.native], 1 << 12, private_max=1 << 24) as areas:
        assert all(can_read(areas))
        first, last = (Meeting(area, np.ones(LONG, np.float32), ReduceOp.SUM, 0) for area in areas)
        first.step(in_python=False)
        last.step(in_python=False)
        withdraw(areas[1].rendezvous(0, 0, signed(5)))
        last.x[...] = -7
        first.step(in_python=False)
        assert not first.is_over
        first.step(in_python=True)
        assert not first.is_over
        assert first.wait is not None
        assert not first.wait.ready()
        first.rest.close()


def test_no_rank_shows_private_memory_before_all_can_read_that_of_all():
    with rendezvous_areas(3, [_core.native], 1 << 12) as areas:
        first, second, third = (area.peers for area in areas)
        assert not first.can_read()
        assert not second.can_read()
        assert not third.can_read()  # it has read all, and the others have not yet seen all tokens
        assert not first.can_read()
        assert second.can_read()
        assert first.can_read()


@pytest.mark.parametrize("token", [7, -1])
def test_a_process_without_the_token_is_not_read(token):
    """It may have the number of a process in another namespace."""
    with rendezvous_areas(2, [_core.native], 1 << 12) as areas:
        areas[0].control_block.cells[peer_cell(areas[0], 1, PEER_TOKEN)] = token
        assert can_read(areas) == [False, False]
        assert areas[0].control_block.cells[peer_cell(areas[0], 0, PEER_CAN_READ)] == -1


def test_a_world_with_a_rank_without_the_core_uses_slots():
    async def rank(area):
        area.begin(1)
        x = np.ones(1 << 12, np.float32)
        await SharedCall(area, 1, 5).allreduce(x, ReduceOp.SUM, "float32")
        assert (x == 2).all()

    with rendezvous_areas(2, [_core.native, None], 1 << 12, private_max=1 << 24) as areas:
        first, second = areas
        interleave([rank(area) for area in areas], random.Random(1))
        assert not first.peers.can_read()
        assert not first.control_block.cells[peer_cell(first, second.rank, PEER_TOKEN)]


@shared
@pytest.mark.parametrize("count", [LONG, PRIVATE])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_many_calls_of_long_arrays_follow_each_other(transport, size, count):
    """Ranks change their arrays at once after a call; a rank that still read them would get other results."""

    async def main(comm: Communicator) -> bool:
        x, good = np.empty(count, np.float32), True
        for call in range(12):
            x[...] = np.arange(count) % 1021 + comm.rank * call
            await comm.allreduce(x)
            good &= bool((x == size * (np.arange(count) % 1021) + call * (size * (size - 1) // 2)).all())
            x[...] = -1
        return good

    assert run_ranks(size, main, transport) == [True] * size


@pytest.mark.slow
def test_calls_that_two_threads_reduce_at_the_same_time_do_not_mix(forked_world):
    for rank in forked_world(dict(os.environ), 2, SCRIPTS / "algorithms/dense/several_long_allreduces.py"):
        assert rank.end() == (0, "all right\n", "")


@shared
@pytest.mark.parametrize("count", [LONG, PRIVATE])
@pytest.mark.parametrize("leaver", [0, 1])
def test_a_cancelled_caller_gets_its_array_back(transport, leaver, count):
    async def main(comm: Communicator) -> bool:
        x = np.ones(count, np.float32)
        for _ in range(2):
            await comm.allreduce(x)
        if comm.rank == leaver:
            task = asyncio.ensure_future(comm.allreduce(x))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            x[...] = -7
            return bool((x == -7).all())
        with pytest.raises(AbortedError):
            await comm.recv(x, leaver)
        return True

    assert run_ranks(2, main, transport) == [True] * 2


def test_a_rank_that_reads_memory_that_was_withdrawn_waits_for_the_failure():
    """It does not report the error of the system call: the other rank has returned its array to its caller."""
    with rendezvous_areas(2, [_core.native], 1 << 12, private_max=1 << 24) as areas:
        can_read(areas)
        x, wait = np.ones(LONG, np.float32), None

        async def late() -> None:
            await SharedCall(areas[1], 0, 5).allreduce(x, ReduceOp.SUM, "float32")

        rendezvous = areas[0].rendezvous(0, 0, signed(5))
        rendezvous.arrive(16, x.nbytes, private=True)  # no array is there
        call = late()
        with pytest.raises(OSError):  # noqa: PT011 (of any number: the kernel refuses the address)
            call.send(None)
        rendezvous = areas[0].rendezvous(1, 0, signed(5))
        rendezvous.arrive(16, x.nbytes, private=True)
        withdraw(rendezvous)
        call = SharedCall(areas[1], 1, 5).allreduce(x, ReduceOp.SUM, "float32")
        wait = call.send(None)
        assert not wait.ready()
        call.close()


def test_the_compiled_functions_check_what_they_are_given():
    number, x = _core.native.find_kernel("sum", "float32"), np.arange(4096, dtype=np.float32)
    raw, scratch, pid, address = x.view(np.uint8), np.zeros(8192, np.uint8), os.getpid(), x.ctypes.data
    reduce = _core.native.reduce_from_peers
    good = [number, (pid, pid), (address, address), 1, raw, 0, raw.size, scratch, 1]
    reduce(*good)
    assert (x == 2 * np.arange(4096)).all()
    for index, wrong in (
        (0, 0),
        (0, 10**6),
        (1, (pid,)),
        (2, ()),
        (3, 2),
        (3, -1),
        (5, -4),
        (5, 2),
        (5, raw.size + 4),
        (6, raw.size + 4),
        (6, 6),
        (7, scratch[:4095]),
        (8, 0),
    ):
        with pytest.raises(ValueError, match="no reduction of peers"):
            reduce(*good[:index], wrong, *good[index + 1 :])
    for pids in ((0, pid), (-1, pid), (1 << 40, pid)):
        with pytest.raises(ProcessLookupError):
            reduce(number, pids, *good[2:])
    with pytest.raises(OSError, match="Bad address"):
        reduce(number, (pid, pid), (16, address), *good[3:])
    with pytest.raises(ProcessLookupError):
        _core.native.read_memory(0, address, raw)
    with pytest.raises(TypeError):
        reduce(number, [pid, pid], *good[2:])
    assert (x == 2 * np.arange(4096)).all()
