"""Messages between two ranks through device memory: the bits, who uses it, the hazards, and messages that end early."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest
import torch

import asyncoll
from asyncoll.algorithms.dense import pair_memory, shared_block
from asyncoll.algorithms.dense.windows import Windows
from asyncoll.errors import AbortedError, DeadlineError, DeviceError, PeerLostError, ProtocolError
from asyncoll.runtime import executions
from asyncoll.tensors.reductions import DTYPES
from asyncoll.testing import Kill, Network, fake_device, fault, run_ranks, simulate
from asyncoll.transport.messages.simulated import Pause
from asyncoll.transport.staging import RefusedError
from tests.algorithms.dense.test_device_collectives import bits, increment, normal, opened
from tests.algorithms.dense.test_device_collectives import nothing_is_shared as nothing_is_shared

SIZES = "device=64,device_window=1024"
LONG = 1 << 12  # bytes: arrays up to this do not wait for their receive
COUNT = 3001  # of float32: 12 windows


@pytest.fixture(autouse=True)
def short_messages(monkeypatch):
    """Long arrays begin at LONG bytes."""
    monkeypatch.setenv("ASYNCOLL_SIZES", SIZES)
    monkeypatch.setattr(executions, "SEGMENT_BYTES", LONG)
    monkeypatch.setattr(pair_memory, "SEGMENT_BYTES", LONG)


def zeros_like(x):
    """A tensor of the same kind, also in its layout."""
    return torch.zeros_like(x) if x.is_contiguous() else torch.zeros(2 * x.numel(), dtype=x.dtype)[1::2]


async def ring(comm, device, make):
    """Each rank sends two tensors to each other one, and receives them in the other order. `make(rank, tag)`."""
    sends, receives, others = [], [], [rank for rank in range(comm.size) if rank != comm.rank]
    for tag in (1, 2):
        sends += [comm.send(device.tensor(make(comm.rank, tag)), dest, tag) for dest in others]
    for tag in (2, 1):
        receives += [comm.recv(device.tensor(zeros_like(make(rank, tag))), rank, tag) for rank in others]
    await asyncio.gather(*sends)
    found = await asyncio.gather(*receives)
    expected = [make(rank, tag) for tag in (2, 1) for rank in others]
    for one, other in zip(found, expected, strict=True):
        assert device.holds(one)
        assert bits(device, one) == bits(device, other), other.dtype


@pytest.mark.usefixtures("nothing_is_shared")
@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_bits_arrive(size):
    """Of more messages than there are places. Every second one has gaps between its elements."""
    with opened(size) as device:

        async def main(comm):
            half = await comm.split(comm.rank // 2)
            for number, dtype in enumerate(DTYPES if size == 2 else ["float32", "bfloat16"]):
                count = LONG // getattr(torch, dtype).itemsize + 1 + 700 * (number % 3)

                def make(rank, tag, dtype=dtype, count=count):
                    x = normal(dtype, [rank, tag, count], count * 2)
                    return x[:count] if tag == 1 else x.clone()[1::2]

                await asyncio.gather(ring(comm, device, make), ring(half, device, make))
            half.close()
            await comm.barrier()

        # A view of a longer tensor is made on the device from a whole one.
        tensor, device.tensor = device.tensor, lambda x: _on_device(tensor, x)
        run_ranks(size, main, "shm-mixed" if size == 3 else "shm")
    assert device.route == {"blocks"}


def _on_device(tensor, x):
    """`x`, with its layout, on the device: the whole of its memory moves."""
    whole = x.new_empty(0).set_(x.untyped_storage())
    tensor(whole)
    return x


@pytest.mark.usefixtures("nothing_is_shared")
@pytest.mark.parametrize("seed", range(12))
def test_a_device_for_each_rank_in_virtual_time(seed):
    """The program's work comes before and after its messages, some of which are in the memory of the host."""
    draw = np.random.default_rng(seed)
    size = 2 + seed % 4
    plan = [(int(a), int(b), tag) for tag in range(12) if (a := draw.integers(size)) != (b := draw.integers(size))]
    on_host = set(draw.integers(2 * len(plan), size=len(plan) // 3).tolist())

    async def main(comm):
        async def part(number, source, dest, tag):
            x, is_here = torch.full((COUNT,), float(number)), 2 * number + (comm.rank == dest) in on_host
            if not is_here:
                device.tensor(x)
                increment(device, x)
            else:
                x += 1
            if comm.rank == dest:
                await asyncio.sleep(number % 4 * 1e-4)
                await comm.recv(x, source, tag)
                if number % 3 == 0:
                    increment(device, x) if not is_here else x.add_(1)
                values = x.numpy() if is_here else device.values(x)
                assert (values == number + 1 + (number % 3 == 0)).all()
            else:
                await comm.send(x, dest, tag)
                increment(device, x) if not is_here else x.add_(1)

        with opened(seed, "loop", f"fake:{comm.rank}") as device:
            mine = [part(number, *each) for number, each in enumerate(plan) if comm.rank in each[:2]]
            await asyncio.gather(*mine)
            await comm.barrier()

    simulate(size, main, Network(jitter_s=1e-4), seed=seed, shared_memory=True)


# -- who uses it ----------------------------------------------------------------------------------


def world(names, main, prepare=lambda devices: None):
    """Run `main(comm, device)` at ranks with the devices of these names. Returns their routes."""
    with ExitStack() as stack:
        devices = [stack.enter_context(opened(rank, "thread", name)) for rank, name in enumerate(names)]
        prepare(devices)
        run_ranks(len(names), lambda comm: main(comm, devices[comm.rank]), "shm")
        return [device.route for device in devices]


@pytest.mark.usefixtures("nothing_is_shared")
@pytest.mark.parametrize("receive", ["device", "host", "any"])
def test_the_two_ranks_decide_in_each_message(receive):
    """A receive in the memory of the host, or of any rank, takes bytes. The next message uses device memory again."""

    async def main(comm, device):
        for number, how in enumerate(["device", receive, "device"]):
            x = torch.full((COUNT,), float(comm.rank * 9 + number))
            if comm.rank == 0:
                await comm.send(device.tensor(x), 1)
                assert device.route == ({"blocks"} if receive == "device" or not number else mixed)
                continue
            if how == "any":
                found, _ = await comm.recv_any(device.tensor(x))
            else:
                found = await comm.recv(device.tensor(x) if how == "device" else x, 0)
            assert (np.asarray(found if how == "host" else device.values(found)) == number).all()

    mixed = {"blocks", "mirrors"}
    routes = world(["fake:0", "fake:1"], main)
    assert routes[0] == ({"blocks"} if receive == "device" else mixed)


def test_a_sender_in_the_memory_of_the_host_and_short_messages():
    async def main(comm, device):
        for count in (COUNT, LONG // 4):
            if comm.rank == 0:
                x = torch.full((count,), 5.0)
                await comm.send(x if count == COUNT else device.tensor(x), 1)
            else:
                assert (device.values(await comm.recv(device.tensor(torch.zeros(count)), 0)) == 5).all()

    assert world(["fake:0", "fake:1"], main) == [{"mirrors"}, {"mirrors"}]


@pytest.mark.parametrize(
    ("what", "who", "text"),
    [
        (
            "share memory",
            0,
            "rank 0: tensors of fake:0 go through memory of the host, in its messages and RPC: fake:0 is told",
        ),
        (
            "share memory",
            1,
            "rank 1: tensors of fake:1 go through memory of the host, in its messages and RPC: fake:1 is told",
        ),
        (
            "open memory",
            1,
            "rank 1: tensors of fake:1 go through memory of the host, in messages and RPC from rank 0: fake:1",
        ),
    ],
)
def test_a_refusal_is_logged_once(what, who, text, caplog):
    """Rank 2 goes on through device memory, unless it is rank 0 that shares none."""

    async def main(comm, device):
        for number in range(3):
            x = torch.full((COUNT,), float(number))
            if comm.rank == 0:
                await asyncio.gather(*[comm.send(device.tensor(x.clone()), dest) for dest in (1, 2)])
            else:
                assert (device.values(await comm.recv(device.tensor(x * 0 - 1), 0)) == number).all()

    routes = world(["fake:0", "fake:1", "fake:2"], main, lambda devices: devices[who].refuse(what))
    (record,) = caplog.records
    assert record.getMessage().startswith(text)
    assert routes[1] == {"mirrors"}
    assert routes[2] == ({"blocks"} if who else {"mirrors"})


@pytest.mark.usefixtures("nothing_is_shared")
def test_more_ranks_refuse_than_there_are_places():
    """The last rank goes on through device memory. Nothing of the refused messages stays in the windows."""
    size = 6

    async def main(comm, device):
        if comm.rank == 0:
            await asyncio.gather(*[comm.send(device.tensor(torch.ones(COUNT)), dest) for dest in range(1, size)])
        else:
            assert received(device, await comm.recv(device.tensor(torch.zeros(COUNT)), 0))
        await comm.barrier()
        assert not any(link.early_bytes for link in comm._core.member.endpoint.executions._links.values())

    def refuse(devices):
        for device in devices[1:-1]:
            device.refuse("open memory")

    routes = world([f"fake:{rank}" for rank in range(size)], main, refuse)
    assert routes == [{"blocks", "mirrors"}, *[{"mirrors"}] * (size - 2), {"blocks"}]


def test_a_second_device_of_a_rank(caplog):
    with opened(1) as device, opened(2, "thread", "fake:1") as other:

        async def main(comm):
            for each in (device, other, device):
                x = each.tensor(torch.full((COUNT,), float(comm.rank)))
                if comm.rank == 0:
                    await comm.send(x, 1)
                else:
                    assert (each.values(await comm.recv(x, 0)) == 0).all()

        run_ranks(2, main, "shm")
    assert (device.route, other.route) == ({"blocks"}, {"mirrors"})
    assert sorted(record.getMessage() for record in caplog.records) == [
        f"rank {rank}: tensors of fake:1 go through memory of the host, in its messages and RPC: "
        "this communicator uses memory of fake:0"
        for rank in (0, 1)
    ]


# -- messages that end early ----------------------------------------------------------------------


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("number", [0, 3])
def test_a_copy_fails(number, who):
    async def calls(comm, device):
        x = device.tensor(torch.ones(COUNT))
        await (comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0))
        await comm.barrier()

    async def main(comm, device):
        with pytest.raises((DeviceError, AbortedError), match=f"fake:{who} has failed: OSError: no bus") as caught:
            await calls(comm, device)
        assert type(caught.value) is (DeviceError if comm.rank == who else AbortedError)

    world(["fake:0", "fake:1"], main, lambda devices: devices[who].fail_copy(number, OSError("no bus")))


def received(device, x):
    """Whether the message, of ones, is whole."""
    return (device.values(x) == 1).all()


def test_messages_that_are_cancelled_at_any_time():
    """Of the sender or of the receiver. The program goes on with its tensors; what is received is right."""
    ends = set()

    async def main(comm, seed):
        with opened(seed, "loop", f"fake:{comm.rank}") as device:
            x = [device.tensor(torch.full((2000,), 1.0 - comm.rank)) for _ in range(6)]
            calls = [comm.recv(x[tag], 0, tag) if comm.rank else comm.send(x[tag], 1, tag) for tag in range(6)]
            tasks = [asyncio.ensure_future(call) for call in calls]
            if comm.rank == seed % 2:
                await asyncio.sleep(seed // 2 * 4e-4)
                tasks[0].cancel()
            for task, mine in zip(tasks, x, strict=True):
                try:
                    await task
                    assert received(device, mine)
                    ends.add((comm.rank, "over"))
                except asyncio.CancelledError:
                    ends.add((comm.rank, "cancelled"))
                except AbortedError:
                    ends.add((comm.rank, "aborted"))
                increment(device, mine)
            assert device.route <= {"blocks"}

    for seed in range(60):
        simulate(2, lambda comm, seed=seed: main(comm, seed), seed=seed, shared_memory=True)
    assert ends == {(rank, end) for rank in (0, 1) for end in ("over", "cancelled", "aborted")}


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_dies_at_every_passage(who):
    ends, points = set(), 0

    async def main(comm, point):
        with opened(point, "loop", f"fake:{comm.rank}") as device:
            x = device.tensor(torch.full((2000,), 1.0 - comm.rank))
            try:
                with fault(comm, Kill(), rank=who, injection_point=point):
                    for _ in range(2):
                        await (comm.recv(x, 0) if comm.rank else comm.send(x, 1))
                        assert received(device, x)
                        ends.add("over")
                    if comm.rank == who:
                        ends.add("all points")
                await comm.barrier()
            except PeerLostError:
                increment(device, x)
                ends.add("lost")
            assert device.route <= {"blocks"}

    while "all points" not in ends:
        points += 1
        try:
            simulate(2, partial(main, point=points), seed=points, shared_memory=True)
        except PeerLostError:  # raised by the end of the other rank, whose barrier was over
            assert "all points" in ends  # so the rank has died at the end of the block, and not at a passage
    assert ends == {"over", "lost", "all points"}
    assert points > 40


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_stands_still_and_goes_on_later(who):
    """Its peer gives it up, and uses its own tensor. What the rank does later spoils nothing."""
    ends = set()

    async def main(comm, seed):
        with opened(seed, "loop", f"fake:{comm.rank}") as device:
            x = [device.tensor(torch.full((2000,), 1.0 - comm.rank)) for _ in range(3)]
            try:
                with asyncoll.deadline(60 if comm.rank == who else 1.0):
                    for mine in x:
                        await (comm.recv(mine, 0) if comm.rank else comm.send(mine, 1))
                        assert received(device, mine)
                        ends.add("over")
            except DeadlineError:
                ends.add("overdue")
            for mine in x:
                increment(device, mine)
            await asyncio.sleep(4)

    for seed in range(25):
        network = Network(faults=[Pause(who, 1e-4 + seed * 4e-4, 3.0)])
        simulate(2, lambda comm, seed=seed: main(comm, seed), network, seed, shared_memory=True)
    assert ends == {"over", "overdue"}


@pytest.mark.parametrize("moment", ["before", "inside", "after"])
def test_a_rank_that_stops_while_it_opens_a_block(moment):
    """The owner, which has given it up, frees its block before, or keeps it."""
    blocks = []

    async def main(comm):
        block = comm._core.backend._pairs.block
        block.takes(device)
        block.offer()
        blocks.append(block)
        await comm.barrier()
        if comm.rank:
            (owner,) = (each for each in blocks if each is not block)
            opens = block.exchange.open
            block.exchange.open = lambda handles: (owner.close() if moment == "inside" else None, opens(handles))
            if moment == "before":
                owner.close()
                with pytest.raises(RefusedError, match="a rank has ended its calls"):
                    block.open([0])
            else:
                block.open([0])
                owner.close()
                assert owner.exchange.handle
        await comm.barrier()

    with opened() as device:
        run_ranks(2, main, "shm")


def test_nothing_is_read_from_a_rank_that_is_lost(monkeypatch):
    """The communicator fails here after an answer. The next window is shown already, at least once."""

    async def main(comm, index):
        with opened(index, "loop", f"fake:{comm.rank}") as device:
            x = [device.tensor(torch.ones(COUNT)) for _ in range(2)]
            await (comm.recv(x[0], 0) if comm.rank else comm.send(x[0], 1))
            before, failing[:] = device.copies["exchange: read"], [comm, index] if comm.rank else failing
            with pytest.raises(AbortedError, match="enough"):
                await (comm.recv(x[1], 0) if comm.rank else comm.send(x[1], 1))
            assert device.copies["exchange: read"] - before == comm.rank * (index + 1)

    async def answer_and_fail(windows, index, how):
        await answer(windows, index, how)
        if failing and index == failing[1]:
            failing.pop(0).abort("enough")
            failing.clear()

    answer, failing = Windows.answer, []  # the communicator, and the window after whose answer it fails
    monkeypatch.setattr(Windows, "answer", answer_and_fail)
    for index in range(8):
        simulate(2, partial(main, index=index), seed=index, shared_memory=True)


def test_a_sender_that_names_no_place_of_its_block(monkeypatch):
    async def main(comm, device):
        x = device.tensor(torch.ones(COUNT))
        with pytest.raises(ProtocolError if comm.rank else AbortedError, match="of a block of device memory"):
            await (comm.recv(x, 0) if comm.rank else comm.send(x, 1))

    async def nowhere(memory):
        return memory.nbytes

    monkeypatch.setattr(pair_memory.PairMemory, "place", nowhere)
    world(["fake:0", "fake:1"], main)


@pytest.mark.parametrize("who", [0, 1])
def test_messages_whose_streams_stand_still_hold_up_no_others(who):
    """Neither the streams of the sender nor of the receiver."""

    async def main(comm, devices):
        device = devices[comm.rank]

        def call(tag):
            x = device.tensor(torch.full((COUNT,), 1.0 - comm.rank))
            return x, comm.recv(x, 0, tag) if comm.rank else comm.send(x, 1, tag)

        with device.stream("still" if comm.rank == who else "default"):
            release = device.hold() if comm.rank == who else lambda: None
            held = [call(tag) for tag in range(6)]
        x, other = call(6)
        await other
        assert received(device, x)
        release()
        for x, each in held:
            await each
            assert received(device, x)

    with ExitStack() as stack:
        devices = [stack.enter_context(opened(rank, "loop", f"fake:{rank}")) for rank in range(2)]
        simulate(2, lambda comm: main(comm, devices), shared_memory=True)
        assert [device.route for device in devices] == [{"blocks"}] * 2


@pytest.mark.parametrize("who", [0, 1])
def test_a_device_that_stands_still(who, monkeypatch):
    """The messages notice a deadline, and that the communicator is aborted."""
    monkeypatch.setattr(shared_block, "_PATIENCE_S", 0.01)

    async def overdue(comm, device):
        x = device.tensor(torch.ones(COUNT))
        with asyncoll.deadline(0.1 if comm.rank == who else 60), pytest.raises(DeadlineError) as raised:
            await (comm.recv(x, 0) if comm.rank else comm.send(x, 1))
        assert raised.value.missing == (who,)
        assert "its tensor has not arrived from fake:0" in str(raised.value)

    async def aborted(comm, device):
        x = device.tensor(torch.ones(COUNT))
        work = asyncio.ensure_future(comm.recv(x, 0) if comm.rank else comm.send(x, 1))
        await asyncio.sleep(0)
        if comm.rank == who:
            comm.abort("enough")
        with pytest.raises(AbortedError, match="enough"):
            await work

    for main in (overdue, aborted):
        with fake_device(0, "program", "fake:0") as still, fake_device(1, "thread", "fake:1") as device:
            devices = [still, device] if who == 0 else [device, still]
            run_ranks(2, lambda comm, main=main, devices=devices: main(comm, devices[comm.rank]), "shm")
