"""Calls whose ranks read each other's device memory: the bits, the agreement, the hazards, and calls that end early."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
import pytest
import torch

import asyncoll
from asyncoll.algorithms.dense import shared_block
from asyncoll.errors import AbortedError, DeadlineError, DeviceError, PeerLostError, UsageError
from asyncoll.tensors.reductions import DTYPES, check_reduction
from asyncoll.testing import Crash, FakeDevice, Network, fake_device, run_ranks, simulate
from asyncoll.testing.devices.fake_exchange import blocks_in_use

SIZES = "short=64,device=64,device_window=1024,staged=4096,window=2048"
COUNTS = [65, 257, 1500]  # of float32
CALLS = ["allreduce", "broadcast", "allgather", "reduce_scatter"]
OPS = [asyncoll.SUM, asyncoll.AVG, asyncoll.PROD, asyncoll.MIN, asyncoll.MAX, asyncoll.BAND, asyncoll.BXOR]


@pytest.fixture(autouse=True)
def short_windows(monkeypatch):
    monkeypatch.setenv("ASYNCOLL_SIZES", SIZES)


@pytest.fixture
def nothing_is_shared():
    """In the end no block is left. After a failure ranks may keep theirs."""
    before = blocks_in_use()
    yield
    assert blocks_in_use() == before


class Watched(FakeDevice):
    """Counts its copies by stream."""

    def queue_copy(self, stream, *arguments, **more):
        self.copies[stream] += 1
        return super().queue_copy(stream, *arguments, **more)

    @property
    def route(self):
        return {"mirrors" if stream in ("in", "out") else "blocks" for stream in self.copies}


@contextmanager
def opened(*arguments):
    with fake_device(*arguments) as device:
        device.__class__, device.copies = Watched, Counter()
        yield device


def normal(dtype, seed, count):
    """Elements whose sums depend on the order of the additions."""
    values = np.random.default_rng(seed).standard_normal(count) * (100 if "int" in dtype else 1)
    return torch.tensor(values).to(getattr(torch, dtype))


def bits(device, x):
    values = device.values(x) if device.holds(x) else x.contiguous().view(-1).view(torch.uint8).numpy()
    return values.tobytes()


async def results(comm, make):
    """Of calls that are under way at the same time."""
    calls = [comm.allreduce(make()), comm.allreduce(make(), asyncoll.AVG), comm.broadcast(make(), root=comm.size // 2)]
    calls += [comm.allgather(make()), comm.reduce_scatter(make(), asyncoll.AVG), comm.reduce_scatter(make()[1::2])]
    return await asyncio.gather(*calls, comm.allreduce(make()[::2], asyncoll.MAX))


@pytest.mark.usefixtures("nothing_is_shared")
@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 9, 13, 17])
def test_the_bits_are_those_of_the_host(size):
    counts = COUNTS if size < 4 else COUNTS[1:2]
    with opened(size) as device:

        async def main(comm):
            for turn, count in enumerate(counts):
                dtype = ["float32", "bfloat16", "float16"][(turn + size) % 3]
                x = normal(dtype, [comm.rank, count], count * 2)
                expected = await results(comm, x.clone)
                found = await results(comm, lambda x=x: device.tensor(x.clone()))
                for one, other in zip(expected, found, strict=True):
                    assert device.holds(other)
                    assert bits(device, other) == bits(device, one), count

        run_ranks(size, main, "shm-mixed" if size % 4 == 3 else "shm")
    assert device.route == {"blocks"}


def is_defined(op, dtype):
    try:
        return check_reduction(op, dtype)
    except UsageError:
        return False


def test_every_dtype_and_reduction():
    with opened() as device:

        async def main(comm):
            for dtype in DTYPES:
                for op in (op for op in OPS if is_defined(op, dtype)):
                    x = normal(dtype, comm.rank, 200)
                    one, other = [await comm.allreduce(move(x.clone()), op) for move in (torch.clone, device.tensor)]
                    assert bits(device, other) == bits(device, one), (dtype, op)

        run_ranks(3, main, "shm")
    assert device.route == {"blocks"}


def increment(device, x):
    device.compute(lambda array: np.add(array, 1, out=array), x)


@pytest.mark.usefixtures("nothing_is_shared")
@pytest.mark.parametrize("seed", range(12))
def test_a_device_for_each_rank_in_virtual_time(seed):
    """Also in communicators of some ranks, which close. The program's work comes before and after its calls."""

    async def main(comm):
        with opened(seed, "loop", f"fake:{comm.rank}") as device:
            for each in (comm, await comm.split(comm.rank % 2)):
                x = device.tensor(torch.full((3000,), float(each.rank)))
                increment(device, x)
                with device.stream("side"):
                    y = device.tensor(torch.full((3000,), float(each.rank)))
                    increment(device, y)
                    other = each.broadcast(y, root=each.size - 1)
                await each.allreduce(x)
                increment(device, x)
                await other
                increment(device, y)
                assert (device.values(x) == each.size * (each.size + 1) / 2 + 1).all()
                assert (device.values(y) == each.size + 1).all()
                assert device.route == {"blocks"} or each.size == 1
            each.close()
            await comm.barrier()

    simulate(2 + seed % 6, main, seed=seed, shared_memory=True)


@pytest.mark.parametrize("is_refused", [False, True])
def test_tensors_that_pass_through_blocks_take_no_pinned_memory(is_refused, monkeypatch):
    """Those of at least 1 MiB: shorter ones share what is pinned once. If a rank refuses, they are pinned then."""
    monkeypatch.setenv("ASYNCOLL_SIZES", "device_window=1048576")
    count = 300_001

    async def main(comm):
        x, y = (device.tensor(torch.full((count,), float(comm.rank))) for _ in range(2))
        await comm.allreduce(x)
        await (comm.recv(y, 0) if comm.rank else comm.send(y, 1))
        gathered = await comm.allgather(x)
        assert (device.values(x) == 1).all()
        assert (device.values(y) == 0).all()
        assert (device.values(gathered) == 1).all()
        assert bool(device._pinned) == is_refused

    with opened() as device:
        if is_refused:
            device.refuse("open memory")
        run_ranks(2, main, "shm")


# -- the agreement --------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("seed", range(4))
def test_ranks_without_a_device(seed, call):
    """In every second call: the others use mirrors then."""
    size = 2 + seed % 4

    async def main(comm):
        with opened(seed, "loop", f"fake:{comm.rank}") as device:
            for turn, count in enumerate([3000, 3000, 500, 500, 3000]):
                x = normal("float32", [comm.rank, seed], count)
                expected = bits(device, await getattr(comm, call)(x.clone()))
                if turn % 2 == 0 or comm.rank != seed % size:
                    device.tensor(x)
                assert bits(device, await getattr(comm, call)(x)) == expected
                if turn == 0:
                    assert device.route == {"blocks"}
                elif turn == 1 and comm.rank != seed % size:
                    assert device.route == {"blocks", "mirrors"}
            await comm.barrier()

    simulate(size, main, seed=seed, shared_memory=True)


@pytest.mark.usefixtures("nothing_is_shared")
@pytest.mark.parametrize("what", ["share memory", "open memory"])
def test_a_refusal_is_heard_by_all_ranks_and_logged_once(what, caplog):
    with ExitStack() as stack:
        devices = [stack.enter_context(opened(rank, "thread", f"fake:{rank}")) for rank in range(4)]
        devices[2].refuse(what)

        async def main(comm):
            device = devices[comm.rank]
            for _ in range(3):
                x = normal("float32", comm.rank, 3000)
                expected = await results(comm, x.clone)
                found = await results(comm, lambda x=x: device.tensor(x.clone()))
                for one, other in zip(expected, found, strict=True):
                    assert bits(device, other) == bits(device, one)
                assert device.route == {"mirrors"}

        run_ranks(4, main, "shm")
    (record,) = caplog.records
    assert record.getMessage() == (
        f"rank 2: tensors of fake:2 go through memory of the host, at all ranks: fake:2 is told not to {what}"
    )


def test_a_communicator_uses_memory_of_one_device_at_each_rank(caplog):
    with opened(1) as device, opened(2, "thread", "fake:1") as other:

        async def main(comm):
            for each in [device, other] if comm.rank else [device, device]:
                for _ in range(2):
                    x = each.tensor(torch.full((3000,), float(comm.rank)))
                    assert (each.values(await comm.allreduce(x)) == 3).all()

        run_ranks(3, main, "shm")
    assert (device.route, other.route) == ({"blocks", "mirrors"}, {"mirrors"})
    assert sorted(record.getMessage() for record in caplog.records) == [
        f"rank {rank}: tensors of fake:1 go through memory of the host, at all ranks: "
        "this communicator uses memory of fake:0"
        for rank in (1, 2)
    ]


@pytest.mark.parametrize("what", ["share memory", "open memory"])
def test_blocks_are_given_back_after_a_refusal(what):
    """At the next call, while the communicator is there."""
    before = blocks_in_use()
    with ExitStack() as stack:
        devices = [stack.enter_context(opened(rank, "thread", f"fake:{rank}")) for rank in range(3)]
        devices[1].refuse(what)

        async def main(comm):
            for _ in range(3):
                await comm.allreduce(devices[comm.rank].tensor(torch.ones(3000)))
            await comm.barrier()
            return blocks_in_use() - before

        assert run_ranks(3, main, "shm") == [0, 0, 0]


# -- calls that end early -------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("number", range(3))
def test_a_copy_fails(number, call):
    with ExitStack() as stack:
        devices = [stack.enter_context(fake_device(rank, "thread", f"fake:{rank}")) for rank in range(3)]
        devices[1].fail_copy(number, OSError("no such bus"))

        async def calls(comm, device):
            await getattr(comm, call)(device.tensor(torch.ones(3000)), *[1] * (call == "broadcast"))
            await comm.barrier()

        async def main(comm):
            with pytest.raises((DeviceError, AbortedError), match="fake:1 has failed: OSError: no such bus") as caught:
                await calls(comm, devices[comm.rank])
            return type(caught.value)

        assert run_ranks(3, main, "shm") == [AbortedError, DeviceError, AbortedError]


def test_a_call_that_is_cancelled_at_any_time():
    """The program goes on with its tensor, and the others get no wrong result."""
    ends = set()

    async def main(comm, seed):
        with opened(seed, "loop", f"fake:{comm.rank}") as device:
            x = device.tensor(torch.ones(2000))
            try:
                async with asyncio.timeout(seed * 3e-4 if comm.rank == 1 else None):
                    total = await getattr(comm, CALLS[seed % 4])(x)
                ends.add("over")
                assert (device.values(total) == (comm.size if "reduce" in CALLS[seed % 4] else 1)).all()
            except TimeoutError:
                ends.add("cancelled")
                increment(device, x)
            except AbortedError:
                ends.add("aborted")
                increment(device, x)
            assert device.route <= {"blocks"}

    for seed in range(60):
        with suppress(AbortedError):  # of a rank whose call is over, and which leaves as the others hear of the end
            simulate(3, lambda comm, seed=seed: main(comm, seed), seed=seed, shared_memory=True)
    assert ends == {"over", "cancelled", "aborted"}


def test_a_rank_dies_at_any_time():
    ends = set()

    async def main(comm, seed):
        with opened(seed, "loop", f"fake:{comm.rank}") as device:
            x = device.tensor(torch.full((2000,), 2.0))
            try:
                for _ in range(2):
                    await comm.allreduce(x, asyncoll.AVG)
                    assert (device.values(x) == 2).all()
                    ends.add("over")
            except PeerLostError:
                increment(device, x)
                ends.add("lost")
            assert device.route <= {"blocks"}

    for seed in range(40):
        network = Network(faults=[Crash(1, 1e-3 + seed * 3e-4)])
        simulate(3, lambda comm, seed=seed: main(comm, seed), network, seed, shared_memory=True)
    assert ends == {"over", "lost"}


@pytest.mark.usefixtures("nothing_is_shared")
@pytest.mark.parametrize("closes", [False, True])
def test_blocks_are_freed_after_the_copies_of_a_call_that_was_cancelled(closes):
    """Of its rank, and of the other ones, with the world, or with the communicator."""
    size = 3

    async def main(comm, devices):
        device, part = devices[comm.rank], await comm.split(0) if closes else comm
        await part.allreduce(device.tensor(torch.ones(1000)))
        if comm.rank == 1:
            release = device.hold()
            asyncio.get_running_loop().call_later(1, release)
        work = asyncio.ensure_future(part.allreduce(device.tensor(torch.ones(1000))))
        await asyncio.sleep(0.1)
        if comm.rank == 1:
            work.cancel()
        with pytest.raises((asyncio.CancelledError, AbortedError)):
            await work
        if closes:
            part.close()
            await asyncio.sleep(2)
            assert not part._core.backend._blocks[0]._exchange
        elif comm.rank == 2:
            await asyncio.sleep(20)  # no rank that leaves waits for it

    with ExitStack() as stack:
        devices = [stack.enter_context(opened(rank, "loop", f"fake:{rank}")) for rank in range(size)]
        simulate(size, lambda comm: main(comm, devices), shared_memory=True)


@pytest.mark.usefixtures("nothing_is_shared")
@pytest.mark.parametrize("size", [2, 63])
def test_blocks_are_freed_although_a_reader_has_died(size):
    """The last rank."""

    async def main(comm):
        block, last = comm._core.backend._devices.block, comm.size - 1
        block.takes(device)
        block.offer()
        await comm.barrier()
        block.open([0, last])
        await comm.barrier()
        if comm.rank == last:
            block.exchange.shut()  # as the system does for a process that has died
        elif comm.rank:
            block.shut()
        await comm.barrier()
        if not comm.rank:
            assert block._readers() == {last}
            block.close()
            assert block._exchange is not None
            comm._core.member.endpoint.membership.is_gone = {last}.__contains__
            block.close()
            assert block._exchange is None
        await comm.barrier()

    with opened() as device:
        simulate(size, main, shared_memory=True)


def test_memory_that_cannot_be_closed(caplog, monkeypatch):
    """It stays, and that of the others with it; the world ends all the same."""
    monkeypatch.setattr(shared_block, "_PATIENCE_S", 0.01)
    with ExitStack() as stack:
        devices = [stack.enter_context(opened(rank, "thread", f"fake:{rank}")) for rank in range(2)]
        devices[1].refuse("close memory")

        async def main(comm):
            await comm.allreduce(devices[comm.rank].tensor(torch.ones(1000)))

        run_ranks(2, main, "shm")
    (record,) = caplog.records
    assert record.getMessage() == "rank 1 keeps memory of its device until it ends: fake:1 is told not to close memory"


@pytest.mark.parametrize("call", CALLS)
def test_a_device_that_stands_still(call, monkeypatch):
    """The call notices a deadline, and that the communicator is aborted."""
    monkeypatch.setattr(shared_block, "_PATIENCE_S", 0.01)

    async def overdue(comm):
        with asyncoll.deadline(0.1 if comm.rank == 0 else 60):
            with pytest.raises(DeadlineError, match=r"missing: rank 0.* has not arrived from fake:0"):
                await getattr(comm, call)(device.tensor(torch.ones(1000)))

    async def aborted(comm):
        work = asyncio.ensure_future(getattr(comm, call)(device.tensor(torch.ones(1000))))
        await asyncio.sleep(0)
        if comm.rank:
            comm.abort("enough")
        with pytest.raises(AbortedError, match="enough"):
            await work

    for main in (overdue, aborted):
        with opened(0, "program") as device:
            run_ranks(2, main, "shm")
        assert device.route <= {"blocks"}
