"""The carrier of RPC in shared memory: delivery, flow control, ownership of memory, and untrusted peers."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import threading
from collections import defaultdict

import numpy as np
import pytest
import torch
import uvloop

from asyncoll.errors import ClosedError, PeerLostError, ProtocolError, UsageError
from asyncoll.rpc import memory_carrier, packing
from asyncoll.rpc.carrier import HEAD_BYTES
from asyncoll.rpc.memory_carrier import INLINE_BYTES, MemoryCarrier
from asyncoll.testing import simulate
from asyncoll.transport.memory import arena as arena_module
from asyncoll.transport.memory import inproc, lending, ring
from asyncoll.transport.memory.ring import RETURNED, RING_BYTES
from asyncoll.transport.virtual_time import VirtualTimeLoop
from tests.support.places import SCRIPTS
from tests.support.processes import LIGHT, PATIENCE_S
from tests.support.properties import given, settings, st
from tests.support.ranks import Keeper

SIZES = [1, 2, 3, 4, 5, 13]
SCRIPT = SCRIPTS / "rpc/messages_of_all_lengths.py"
TAIL, HEAD, RING = 0, 1, 8  # words of an inbox's control_block


class Mail(Keeper):
    """Keeps the messages that a carrier delivers."""

    def __init__(self):
        super().__init__()
        self.broken = []

    def deliver(self, source, head, arrays):
        self.keep(self.messages, (source, head, arrays))

    def hear(self, source, error):
        self.keep(self.broken, (source, error))


class World:
    """The carriers of all ranks, with their arenas and their delivered messages."""

    def __init__(self, arenas, check):
        ranks = arenas[0].ranks
        self.arenas = arenas
        self.keepers = [Mail() for _ in arenas]
        self.carriers = [
            MemoryCarrier(arena, 7, ranks, check, keeper.hear)
            for arena, keeper in zip(arenas, self.keepers, strict=True)
        ]

    def open(self, *ranks):
        for rank in ranks:
            self.carriers[rank].open(self.keepers[rank].deliver)


def nothing():
    pass


def twin(size, main, check=nothing):
    """Virtual time, where every wait lets other tasks run."""
    draw = np.random.default_rng(size)
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(whole(inproc.arenas(size, lambda: asyncio.sleep(draw.uniform(0, 1e-3))), main, check))


def memory(size, main, check=nothing):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, arena_module.local_world(size) as arenas:
        runner.run(whole(arenas, main, check))


async def whole(arenas, main, check):
    world = World(arenas, check)
    try:
        await main(world)
    finally:
        for carrier in world.carriers:
            await carrier.close()


@pytest.fixture(params=[twin, memory], ids=["twin", "memory"])
def run(request):
    """`run(size, main)` runs `main(world)`."""
    return request.param


@pytest.fixture
def small(monkeypatch):
    """Small limits: messages above 1,000 bytes are long, and the window holds 16,000 bytes."""
    monkeypatch.setattr(memory_carrier, "INLINE_BYTES", 1000)
    monkeypatch.setattr(memory_carrier, "WINDOW_BYTES", 16_000)
    monkeypatch.setattr(packing, "_PIECE", 700)


def numbers(seed, nbytes):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def plain(message):
    source, head, arrays = message
    return source, head, [array.tobytes() for array in arrays]


def lender(world, rank=0):
    return world.carriers[rank]._lender


async def until(condition):
    while not condition():
        await asyncio.sleep(1e-6)  # not 0, so that virtual time advances


async def collect(world):
    """Return dropped memory from rank 1 to rank 0, whose lender is returned. Rank 1 does so when it reads."""
    await world.carriers[0].send(1, b"")
    await world.keepers[1].take()
    world.carriers[0]._lender._collect()
    return world.carriers[0]._lender


# -- delivery -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_send_to_all_ranks(run, size):
    async def main(world):
        world.open(*range(size))
        for rank, carrier in enumerate(world.carriers):
            for dest in range(size):
                await carrier.send(dest, bytes([rank, dest]), [numbers(rank, 10), numbers(dest, 40_000)])
        for rank, keeper in enumerate(world.keepers):
            expected = [
                (source, bytes([source, rank]), [numbers(source, 10).tobytes(), numbers(rank, 40_000).tobytes()])
                for source in range(size)
            ]
            assert sorted(map(plain, await keeper.take(size))) == expected

    run(size, main)


LENGTHS = [
    [],
    [0],
    [0, 0, 0],
    [1, 0, 63, 64, 65, 0],
    [INLINE_BYTES - 64],
    [INLINE_BYTES - 63],
    [INLINE_BYTES],
    [1] * 100,
    [3] * 5000,
    [0] * 5000,
    [(1 << 20) - 1, 1 << 20, (1 << 20) + 1, 0, (3 << 20) + 5],
]


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}-{sum(lengths)}")
def test_arrays_of_all_lengths(run, lengths):
    async def main(world):
        world.open(0, 1)
        sent = [numbers(index, length) for index, length in enumerate(lengths)]
        for number in range(3):
            await world.carriers[0].send(1, b"%d" % number, sent)
        for number, message in enumerate(await world.keepers[1].take(3)):
            assert plain(message) == (0, b"%d" % number, [array.tobytes() for array in sent])

    run(2, main)


@pytest.mark.parametrize("nbytes", [0, 1, 63, 1000, HEAD_BYTES - 1, HEAD_BYTES])
def test_heads_of_all_lengths(run, nbytes):
    """More heads than the ring holds, so they wrap around its end at different offsets."""

    async def main(world):
        world.open(1)
        sent = [numbers(number, nbytes).tobytes() for number in range(20)]
        for head in sent:
            await world.carriers[0].send(1, head, [numbers(1, 100)])
        assert [head for _, head, _ in await world.keepers[1].take(20)] == sent

    run(2, main)


@pytest.mark.parametrize("nbytes", [100, 50_000])
def test_delivered_arrays_belong_to_the_receiver(run, nbytes):
    async def main(world):
        world.open(1)
        sent = numbers(1, nbytes)
        await world.carriers[0].send(1, b"", [sent, sent])
        sent[:] = 0
        ((_, _, (first, second)),) = await world.keepers[1].take()
        assert first.tobytes() == second.tobytes() == numbers(1, nbytes).tobytes()
        for array in (first, second):
            assert (array.dtype, array.shape, array.flags.writeable) == (np.uint8, (nbytes,), True)
            assert array.ctypes.data % 16 == 0, "it can be seen as any dtype"
        first[:] = 1
        assert second.tobytes() == numbers(1, nbytes).tobytes()
        assert torch.from_numpy(first[:96].view(np.float64)).sum() > 0

    run(2, main)


STEPS = st.tuples(
    st.integers(0, 4),
    st.integers(0, 4),
    st.integers(0, 300),
    st.lists(st.sampled_from([0, 1, 64, 500, 1200, 5000]), max_size=4),
    st.booleans(),
)


@settings(max_examples=60)
@given(size=st.integers(2, 5), steps=st.lists(STEPS, max_size=60))
def test_messages_arrive_in_order(small, size, steps):
    """The messages of one task to one rank arrive in the order in which they were sent."""

    async def main(world):
        world.open(*range(size))
        expected = defaultdict(list)
        tasks = defaultdict(list)
        for number, (source, dest, head, lengths, other_task) in enumerate(steps):
            way = (source % size, dest % size, other_task)
            message = (bytes([other_task]) + numbers(number, head).tobytes(), [numbers(number, n) for n in lengths])
            tasks[way].append(message)
            expected[way].append((message[0], [array.tobytes() for array in message[1]]))

        async def send(way):
            for message in tasks[way]:
                await world.carriers[way[0]].send(way[1], *message)

        await asyncio.gather(*map(send, tasks))
        arrived = defaultdict(list)
        for rank, keeper in enumerate(world.keepers):
            count = sum(len(messages) for way, messages in expected.items() if way[1] == rank)
            for source, head, arrays in map(plain, await keeper.take(count)):
                arrived[source, rank, bool(head[0])].append((head, arrays))
        assert arrived == expected

    twin(size, main)


# -- in a plain call ------------------------------------------------------------------------------


async def acquainted(world):
    """Let rank 0 send to rank 1 in plain calls: its first message there is sent by `send`. Returns its carrier."""
    await world.carriers[0].send(1, b"first")
    return world.carriers[0]


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}-{sum(lengths)}")
def test_arrays_are_sent_in_a_plain_call_up_to_a_limit(run, lengths):
    async def main(world):
        world.open(1)
        carrier = await acquainted(world)
        sent = [numbers(index, length) for index, length in enumerate(lengths)]
        fits = sum(lengths) < memory_carrier.AT_ONCE_BYTES
        for number in range(3):
            assert carrier.send_nowait(1, b"%d" % number, sent) == fits
        assert not lender(world)._taken
        expected = [(0, b"%d" % number, [array.tobytes() for array in sent]) for number in range(3)]
        assert list(map(plain, await world.keepers[1].take(1 + 3 * fits)))[1:] == expected[: 3 * fits]

    run(2, main)


@pytest.mark.parametrize("nbytes", [500, 5000])
def test_a_plain_call_sends_nothing_if_it_would_have_to_wait(run, small, nbytes):
    """The receiver does not read, so the ring or the window fills up."""

    async def main(world):
        carrier, count = await acquainted(world), 0
        while carrier.send_nowait(1, b"%d" % count, [numbers(count, nbytes)]):
            count += 1
        assert count == (3 if nbytes == 5000 else RING_BYTES // 640)
        assert not lender(world)._taken
        waiting = asyncio.ensure_future(carrier.send(1, b"%d" % count, [numbers(count, nbytes)]))
        await asyncio.sleep(0)
        world.open(1)
        await waiting
        expected = [(0, b"%d" % number, [numbers(number, nbytes).tobytes()]) for number in range(count + 1)]
        assert list(map(plain, await world.keepers[1].take(count + 2)))[1:] == expected

    run(2, main)


def test_a_plain_call_leaves_the_error_to_send_if_no_memory_is_left(run, monkeypatch):
    def refuse(nbytes):
        raise UsageError("the host has not so much left")

    async def main(world):
        world.open(1)
        carrier = await acquainted(world)
        monkeypatch.setattr(world.arenas[0], "allocate", refuse)
        assert not carrier.send_nowait(1, b"", [numbers(1, 50_000)])
        with pytest.raises(UsageError, match="not so much left"):
            await carrier.send(1, b"", [numbers(1, 50_000)])
        assert carrier.send_nowait(1, b"last", [numbers(1, 50)])
        assert [head for _, head, _ in await world.keepers[1].take(2)] == [b"first", b"last"]

    run(2, main)


def test_long_messages_are_announced_before_they_are_complete(run, monkeypatch):
    async def main(world):
        carrier = await acquainted(world)
        inbox = world.carriers[1]._inbox
        for nbytes, announced in ((memory_carrier.ANNOUNCED_BYTES // 2, False), (memory_carrier.ANNOUNCED_BYTES, True)):
            inbox.hear()
            assert carrier.send_nowait(1, b"", [numbers(1, nbytes)])
            assert inbox.has_announcements() == announced
        world.open(1)  # announcements without news do not keep it busy
        await world.keepers[1].take(3)
        await until(lambda: not inbox.has_announcements())
        inbox.announce()
        await until(lambda: not inbox.has_announcements())

    run(2, main)


# -- flow control ---------------------------------------------------------------------------------


def test_a_slow_receiver_makes_senders_wait(run):
    """The inbox takes the messages that fit; the rest arrive in order once the receiver reads."""
    count, head = 400, 2000
    sent = []

    async def main(world):
        async def send():
            for number in range(count):
                await world.carriers[0].send(1, number.to_bytes(head, "big"))
                sent.append(number)

        sending = asyncio.create_task(send())
        await until(world.arenas[0].waiting)
        assert RING_BYTES // 2 < len(sent) * head < RING_BYTES
        world.open(1)
        heads = [head for _, head, _ in await world.keepers[1].take(count)]
        assert [int.from_bytes(head, "big") for head in heads] == list(range(count))
        await sending

    run(2, main)


@pytest.mark.parametrize("tasks", [1, 30])
def test_lent_memory_is_bounded_for_a_slow_receiver(run, small, tasks):
    async def main(world):
        async def send(task):
            for _ in range(20):
                await world.carriers[0].send(1, b"", [numbers(task, 3000)])

        sending = [asyncio.create_task(send(task)) for task in range(tasks)]
        await until(world.arenas[0].waiting)
        assert len(lender(world)._lent) == 16_000 // (3000 + 64)
        assert not lender(world)._taken
        world.open(1)
        for _ in range(20 * tasks):
            ((_, _, (array,)),) = await world.keepers[1].take()
            assert len(array) == 3000
            del array
        await asyncio.gather(*sending)

    run(2, main)


def test_one_message_may_be_longer_than_the_window(run, small):
    async def main(world):
        world.open(1)
        sending = [asyncio.create_task(world.carriers[0].send(1, b"", [numbers(n, 40_000)])) for n in range(3)]
        for number, message in enumerate(await world.keepers[1].take(3)):
            assert plain(message) == (0, b"", [numbers(number, 40_000).tobytes()])
        await asyncio.gather(*sending)

    run(2, main)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_send_to_all_more_than_the_inboxes_hold(run, small, size):
    """No rank reads before all ranks wait to send; then all messages arrive."""

    async def main(world):
        async def send(rank, dest):
            for number in range(100):
                await world.carriers[rank].send(dest, bytes(8000), [numbers(number, 2000)] * (number % 2))

        pairs = [(rank, dest) for rank in range(size) for dest in range(size)]
        sending = [asyncio.create_task(send(*pair)) for pair in pairs]
        await until(lambda: all(arena.waiting() for arena in world.arenas))
        world.open(*range(size))
        for keeper in world.keepers:
            messages = await keeper.take(100 * size)
            assert sum(len(arrays) for _, _, arrays in messages) == 50 * size
        await asyncio.gather(*sending)

    run(size, main)


def test_a_short_message_need_not_wait_behind_a_long_one(run, small):
    async def main(world):
        world.open(1)
        long = asyncio.create_task(world.carriers[0].send(1, b"long", [numbers(1, 50_000)]))
        await asyncio.sleep(0)
        await world.carriers[0].send(1, b"short")
        await long
        assert [head for _, head, _ in await world.keepers[1].take(2)] == [b"short", b"long"]

    run(2, main)


def test_a_sender_without_end_lets_other_tasks_run(run):
    async def main(world):
        turns = 0

        async def others():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(others())
        for _ in range(320):
            await world.carriers[0].send(1, b"")
        assert turns >= 10
        task.cancel()

    run(2, main)


def test_a_receiver_without_end_lets_other_tasks_run():
    async def main(world):
        turns = []

        async def others():
            while True:
                turns.append(len(world.keepers[1].messages))
                await asyncio.sleep(0)

        for _ in range(640):
            await world.carriers[0].send(1, b"")
        world.open(1)
        task = asyncio.create_task(others())
        await world.keepers[1].until(lambda: len(world.keepers[1].messages) == 640)
        assert max(later - before for before, later in itertools.pairwise(turns)) <= 64
        task.cancel()

    memory(2, main)


def test_a_polling_reader_lets_its_loop_turn(monkeypatch):
    """The reader polls without end here, and the other tasks of its loop run all the same."""
    monkeypatch.setattr(arena_module, "_YIELDING_POLL_S", 1e9)
    monkeypatch.setattr(arena_module, "_YIELDING_POLL_S_OVERSUBSCRIBED", 1e9)
    monkeypatch.setattr(arena_module, "_SLICE_S", 1e9)

    async def main(world):
        world.open(1)
        for number in range(10):
            await asyncio.sleep(0)
            assert world.arenas[1].waiting() == []
            await world.carriers[0].send(1, bytes([number]))
        assert [head for _, head, _ in await world.keepers[1].take(10)] == [bytes([number]) for number in range(10)]

    memory(2, main)


# -- ownership of memory --------------------------------------------------------------------------


def test_memory_is_lent_again(run):
    """A few blocks carry many messages, one after the other."""

    async def main(world):
        world.open(1)
        for number in range(50):
            await world.carriers[0].send(1, b"", [numbers(number, 100_000)])
            ((_, _, (array,)),) = await world.keepers[1].take()
            assert array.tobytes() == numbers(number, 100_000).tobytes()
            del array
            await collect(world)
        assert not lender(world)._lent
        assert [len(blocks) for blocks in lender(world)._free.values()] == [1]

    run(2, main)


def test_held_arrays_do_not_change(run):
    async def main(world):
        world.open(1)
        for number in range(30):
            await world.carriers[0].send(1, b"", [numbers(number, 40_000), numbers(-number % 31, 5)])
        held = await world.keepers[1].take(30)
        for number, (_, _, arrays) in enumerate(held):
            assert arrays[0].tobytes() == numbers(number, 40_000).tobytes()
            assert arrays[1].tobytes() == numbers(-number % 31, 5).tobytes()
        assert len(lender(world)._lent) == 30
        held.clear()
        del arrays
        assert not (await collect(world))._lent

    run(2, main)


@pytest.mark.parametrize(
    "part_of",
    [
        lambda array: array[10:20],
        lambda array: array.view(np.float64)[5:].reshape(-1, 1),
        lambda array: array.data[3:5],
        lambda array: torch.from_numpy(array)[6:].view(-1, 3),
        lambda array: np.asarray(array.data)[::1000],
    ],
    ids=["slice", "dtype", "buffer", "torch", "asarray"],
)
def test_a_reference_to_a_part_keeps_the_whole_block(run, part_of):
    async def main(world):
        world.open(1)
        await world.carriers[0].send(1, b"", [np.zeros(48_000, np.uint8), numbers(1, 17)])
        ((_, _, (array, _)),) = await world.keepers[1].take()
        part = part_of(array)
        del array, _
        assert len((await collect(world))._lent) == 1
        del part
        assert not (await collect(world))._lent

    run(2, main)


def test_arrays_may_be_dropped_in_other_threads_and_under_the_lock():
    async def main(world):
        world.open(1)
        for _ in range(20):
            for number in range(5):
                await world.carriers[0].send(1, b"", [numbers(number, 40_000)])
            held = await world.keepers[1].take(5)
            threads = [threading.Thread(target=held.pop) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            with world.carriers[0]._inbox.control_block, world.carriers[1]._inbox.control_block:
                held.clear()
            assert not (await collect(world))._lent
            assert sum(map(len, lender(world)._free.values())) == 5

    memory(2, main)


def test_kept_free_memory_is_bounded(run, monkeypatch):
    monkeypatch.setattr(lending, "KEPT_BYTES", 100_000)

    async def main(world):
        world.open(1)
        for nbytes in (40_000, 60_000, 90_000, 200_000, 50_000):
            await world.carriers[0].send(1, b"", [numbers(1, nbytes)])
            await world.keepers[1].take()
            await collect(world)
            assert lender(world)._free_bytes == sum(size * len(blocks) for size, blocks in lender(world)._free.items())
            assert lender(world)._free_bytes <= 100_000
        assert [len(blocks) for blocks in lender(world)._free.values()] == [1], "the last"

    run(2, main)


def test_send_without_free_memory_raises(run, monkeypatch):
    async def main(world):
        world.open(1)
        await world.carriers[0].send(1, b"", [numbers(1, 40_000)])
        await world.keepers[1].take()
        await collect(world)
        assert lender(world)._free_bytes > 0

        def refuse(nbytes):
            raise UsageError("the host has not so much left")

        monkeypatch.setattr(world.arenas[0], "allocate", refuse)
        with pytest.raises(UsageError, match="not so much left"):
            await world.carriers[0].send(1, b"", [numbers(1, 500_000)])
        assert lender(world)._free_bytes == 0, "it has tried what it could"
        await world.carriers[0].send(1, b"short")
        assert [head for _, head, _ in await world.keepers[1].take()] == [b"short"]

    run(2, main)


# -- cancellation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_a_cancelled_message_arrives_whole_or_not_at_all(small, seed):
    """The messages of other tasks arrive in any case, and no lent memory remains."""
    draw = np.random.default_rng(seed)
    sent = []

    async def main(world):
        async def send(number):
            lengths = draw.choice([0, 100, 1500, 6000], draw.integers(0, 3))
            await world.carriers[0].send(1, number.to_bytes(2000, "big"), [numbers(number, n) for n in lengths])
            sent.append(number)

        tasks = [asyncio.create_task(send(number)) for number in range(300)]
        opened = False
        for victim in draw.permutation(300)[:150]:
            await asyncio.sleep(float(draw.uniform(0, 2e-4)))
            tasks[victim].cancel()
            if not opened and draw.random() < 0.05:
                opened = world.open(1) is None
        if not opened:
            world.open(1)
        await asyncio.gather(*tasks, return_exceptions=True)
        await world.carriers[0].send(1, (1000).to_bytes(2000, "big"))
        await world.keepers[1].until(lambda: int.from_bytes(world.keepers[1].messages[-1][1], "big") == 1000)
        arrived = [int.from_bytes(head, "big") for _, head, _ in world.keepers[1].messages[:-1]]
        assert len(arrived) == len(set(arrived))
        assert set(sent) <= set(arrived)
        for _, head, arrays in world.keepers[1].messages:
            number = int.from_bytes(head, "big")
            assert all(array.tobytes() == numbers(number, len(array)).tobytes() for array in arrays)
        assert not lender(world)._taken
        del arrays
        world.keepers[1].messages.clear()
        assert not (await collect(world))._lent

    twin(2, main)


# -- the end --------------------------------------------------------------------------------------


def test_held_arrays_outlive_the_carriers(run):
    async def main(world):
        world.open(1)
        await world.carriers[0].send(1, b"", [numbers(1, 50_000)])
        ((_, _, (array,)),) = await world.keepers[1].take()
        for carrier in world.carriers:
            await carrier.close()
            await carrier.close()
        assert array.tobytes() == numbers(1, 50_000).tobytes()
        with pytest.raises(ClosedError):
            await world.carriers[0].send(1, b"")
        assert lender(world)._free_bytes == 0

    run(2, main)


def test_messages_after_the_end_are_dropped_and_their_memory_returned(run):
    async def main(world):
        for _ in range(40):
            await world.carriers[0].send(1, b"", [numbers(1, 40_000)])
        await world.carriers[1].close()
        lender(world)._collect()
        assert not lender(world)._lent
        for _ in range(3):
            await world.carriers[0].send(1, b"", [numbers(1, 40_000)])
        assert not lender(world)._lent
        assert not lender(world)._taken
        assert world.keepers[1].messages == []

    run(2, main)


@pytest.mark.parametrize("who", [0, 1])
def test_waiting_senders_wake_at_the_end(run, small, who):
    """A message to a closed receiver is dropped; a send of a closed sender raises ClosedError."""

    async def main(world):
        async def send(nbytes):
            for _ in range(200):
                await world.carriers[0].send(1, bytes(2000), [numbers(1, nbytes)])

        sending = [asyncio.create_task(send(nbytes)) for nbytes in (10, 10, 2000, 2000)]
        await until(world.arenas[0].waiting)
        await world.carriers[who].close()
        results = await asyncio.gather(*sending, return_exceptions=True)
        assert [type(result) for result in results] == [[ClosedError, type(None)][who]] * 4

    run(2, main)


def test_waiting_senders_and_readers_wake_at_a_failure_of_the_world(run, small):
    failure = []

    def check():
        if failure:
            raise failure[0]

    async def main(world):
        async def send(nbytes):
            for _ in range(200):
                await world.carriers[0].send(1, bytes(2000), [numbers(1, nbytes)])

        world.open(0)
        sending = [asyncio.create_task(send(nbytes)) for nbytes in (10, 2000)]
        await until(lambda: len(world.arenas[0].waiting()) == 2)
        failure.append(PeerLostError(1, "it was killed"))
        world.arenas[0].recheck()
        results = await asyncio.gather(*sending, return_exceptions=True)
        assert [getattr(result, "rank", None) for result in results] == [1, 1]
        await until(world.carriers[0]._reader.done)
        assert world.keepers[0].broken == []

    run(2, main, check)


def test_bad_arguments(run):
    async def main(world):
        world.open(1)
        with pytest.raises(UsageError, match="a head of 65537 bytes exceeds the limit of 65536"):
            await world.carriers[0].send(1, bytes(HEAD_BYTES + 1))
        for stranger in (-1, 2):
            with pytest.raises(UsageError, match=f"rank {stranger} is not one of"):
                await world.carriers[0].send(stranger, b"")
        await world.carriers[0].send(1, b"good")
        assert [head for _, head, _ in await world.keepers[1].take()] == [b"good"]

    run(2, main)


def test_in_a_simulated_world():
    async def main(comm):
        endpoint = comm._core.member.endpoint
        ranks = tuple(range(comm.size))
        keeper = Mail()
        carrier = MemoryCarrier(endpoint.arena, 1, ranks, lambda: endpoint.failures.check(0), keeper.hear)
        carrier.open(keeper.deliver)
        for dest in ranks:
            await carrier.send(dest, b"hello", [numbers(comm.rank, 50_000)])
        received = sorted(map(plain, await keeper.take(comm.size)))
        assert received == [(rank, b"hello", [numbers(rank, 50_000).tobytes()]) for rank in ranks]
        await comm.barrier()
        await carrier.close()

    simulate(5, main, shared_memory=True)


# -- untrusted peers ------------------------------------------------------------------------------


def header(world, *fields):
    """Pretend that rank 0 has sent one message with this header to rank 1."""
    control_block = world.carriers[1]._inbox.control_block
    with control_block:
        ring._HEADER.pack_into(control_block.cells[RING:].cast("B"), 0, *fields)
        control_block.cells[TAIL] = 64 * 20
        control_block.wake()


BAD_HEADERS = {
    # bytes, source, head, arrays, body, address
    "short": (1, 0, 0, 0, 0, 0),
    "no header": (-64, 0, 0, 0, 0, 0),
    "longer than the inbox": (64 * 21, 0, 0, 0, 0, 0),
    "endless": (1 << 62, 0, 0, 0, 0, 0),
    "unknown rank": (64, 2, 0, 0, 0, 0),
    "negative rank": (64, -1, 0, 0, 0, 0),
    "long head": (64, 0, 17, 0, 0, 0),
    "negative head": (64, 0, -1, 0, 0, 0),
    "huge head": (64, 0, (1 << 63) - 1, 0, 0, 0),
    "long body": (64, 0, 0, 1, 17, 0),
    "no body": (64, 0, 0, 1, 0, 0),
    "negative body": (64, 0, 0, 1, -8, 64),
    "negative arrays": (64, 0, 0, -1, 8, 0),
    "many arrays": (64, 0, 0, 1 << 60, 16, 0),
    "many arrays elsewhere": (64, 0, 0, 1 << 60, 1 << 16, 1 << 17),
    "negative address": (64, 0, 0, 1, 64, -64),
    "unaligned": (64, 0, 0, 1, 64, (1 << 17) + 1),
    "nowhere": (64, 0, 0, 1, 64, 1 << 62),
    "longer than memory": (64, 0, 0, 1, 1 << 62, 1 << 17),
    "no link": (64, 0, 0, 1, 4, 1 << 17),
}


@pytest.mark.parametrize("fields", BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_headers_are_not_trusted(run, fields):
    async def main(world):
        world.open(1)
        header(world, *fields)
        await world.keepers[1].until(lambda: world.keepers[1].broken)
        ((source, error),) = world.keepers[1].broken
        assert (source, type(error)) == (-1 if "nobody" in str(fields) or fields[1] else 0, ProtocolError)
        assert world.keepers[1].messages == []

    run(2, main)


def test_messages_of_ranks_outside_the_communicator_are_refused(run):
    async def main(world):
        world.carriers[1]._ranks = (0, 1)
        world.open(1)
        await world.carriers[2].send(1, b"", [numbers(1, 50_000)])
        await world.keepers[1].until(lambda: world.keepers[1].broken)
        assert [source for source, _ in world.keepers[1].broken] == [2]
        assert world.keepers[1].messages == []

    run(3, main)


def test_an_inbox_with_any_content_can_be_closed(run):
    async def main(world):
        await world.carriers[1].send(0, b"", [numbers(1, 50_000)])
        header(world, *BAD_HEADERS["unknown rank"])
        await world.carriers[1].close()
        assert world.keepers[1].broken == []
        assert lender(world, 1)._free_bytes == 0
        await world.carriers[0].send(1, b"dropped")

    run(2, main)


@pytest.mark.parametrize("lengths", [[-1, 1], [2001], [1 << 62, 1 << 62], [-(1 << 63), 8]])
@pytest.mark.parametrize("nbytes", [8, 2000])
def test_lengths_are_not_trusted(run, small, monkeypatch, lengths, nbytes):
    async def main(world):
        world.open(1)
        sent = packing.Packing([numbers(1, nbytes)] * len(lengths))
        sent._table = np.array(lengths).tobytes()
        monkeypatch.setattr(memory_carrier, "Packing", lambda arrays: sent)
        await world.carriers[0].send(1, b"", [numbers(1, nbytes)] * len(lengths))
        await world.keepers[1].until(lambda: world.keepers[1].broken)
        assert [source for source, _ in world.keepers[1].broken] == [0]

    run(2, main)


@pytest.mark.parametrize("tail", [-64, 1, RING_BYTES + 64, 1 << 62, -(1 << 63)])
@pytest.mark.parametrize("word", [TAIL, HEAD])
def test_the_ends_of_the_ring_are_not_trusted(run, word, tail):
    """Neither the owner, which keeps its own copy of the head, nor a writer trusts them."""

    async def main(world):
        with world.carriers[1]._inbox.control_block as control_block:
            control_block.cells[word] = tail
        with pytest.raises(ProtocolError, match="the inbox is corrupt"):
            await world.carriers[0].send(1, b"")
        if word == TAIL:
            world.open(1)
            await world.keepers[1].until(lambda: world.keepers[1].broken)
            assert world.keepers[1].messages == []

    run(2, main)


@settings(max_examples=300)
@given(
    noise=st.binary(max_size=700),
    blocks=st.integers(0, 12),
    fields=st.tuples(*[st.sampled_from([0, 1, -1, 48, 64, 128, 1 << 17, 1 << 40, (1 << 63) - 1])] * 6),
)
def test_random_bytes_in_an_inbox(noise, blocks, fields):
    """The content is delivered if it is a valid message, and refused otherwise."""

    async def main(world):
        world.open(1)
        control_block = world.carriers[1]._inbox.control_block
        with control_block:
            raw = control_block.cells[RING:].cast("B")
            raw[: len(noise)] = noise
            ring._HEADER.pack_into(raw, 64 * (blocks // 2), *fields)
            control_block.cells[TAIL] = 64 * blocks
            control_block.wake()
        reader, inbox_ = world.carriers[1]._reader, world.carriers[1]._inbox
        await until(lambda: reader.done() or not inbox_.has_messages())
        assert len(world.keepers[1].broken) == reader.done()
        assert all(type(error) is ProtocolError for _, error in world.keepers[1].broken)

    twin(2, main)


def test_a_message_that_its_receiver_refuses(run):
    async def main(world):
        def refuse(source, head, arrays):
            raise ProtocolError("it makes no sense")

        world.carriers[1].open(refuse)
        await world.carriers[0].send(1, b"", [])
        await world.keepers[1].until(lambda: world.keepers[1].broken)
        ((source, error),) = world.keepers[1].broken
        assert (source, str(error), error.source) == (0, "it makes no sense", 0)

    run(2, main)


@pytest.mark.parametrize("address", [64, 1 << 17, 1 << 62, -1, "twice", "cycle"])
def test_returned_addresses_are_not_trusted(run, caplog, address):
    """Only memory that is lent is taken back, and only once."""
    held = []

    async def main(world):
        world.open(1)
        for number in range(2):
            await world.carriers[0].send(1, b"", [numbers(number, 40_000)])
        held.extend(await world.keepers[1].take(2))
        first, second = lender(world)._lent
        with world.carriers[0]._inbox.control_block as control_block:
            following = {"twice": first, "cycle": second}.get(address, address)
            lending._link(world.arenas[1].view(first, 8))[0] = following
            control_block.cells[RETURNED] = first
            if address == "cycle":
                lending._link(world.arenas[1].view(second, 8))[0] = first
        lender(world)._collect()
        assert first not in lender(world)._lent
        assert (second in lender(world)._lent) == (address != "cycle")
        assert [sorted(blocks) for blocks in lender(world)._free.values()] == [
            sorted([first, second] if address == "cycle" else [first])
        ]

    run(2, main)
    assert "was returned that was not lent" in caplog.text


def test_a_rank_that_died_with_the_lock_of_an_inbox():
    """Ranks that write or read the inbox raise an error that names the dead rank; other inboxes still work."""

    async def main(world):
        world.open(0, 1)
        thread = threading.Thread(target=world.carriers[2]._open_outbox(1).inbox.control_block.__enter__)
        thread.start()  # the kernel treats a thread that ends as an owner of the lock that dies
        thread.join()
        for rank in (0, 2):
            with pytest.raises(PeerLostError, match="rank 2 is gone"):
                await world.carriers[rank].send(1, b"")
        await world.carriers[1].send(0, b"alive")
        assert [head for _, head, _ in await world.keepers[0].take()] == [b"alive"]

    memory(3, main)


# -- real processes -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 5])
def test_real_processes(tmp_path, size):
    temporary = tmp_path / "t"
    temporary.mkdir()
    command = [sys.executable, "-W", "error", "-m", "asyncoll", "launch", "-n", str(size), str(SCRIPT)]
    env = os.environ | LIGHT | {"TMPDIR": str(temporary)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(line.partition(": ")[2] for line in done.stdout.splitlines()) == [
        f"{rank}: all right" for rank in range(size)
    ]
