"""Results of RPC through device memory: the bits, who uses it, the hazards, and calls that end early."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from functools import partial

import numpy as np
import pytest
import torch

import asyncoll
from asyncoll.algorithms.dense import pair_memory
from asyncoll.errors import AbortedError, AsyncollError, DeadlineError, DeviceError, PeerLostError, ProtocolError
from asyncoll.rpc import protocol
from asyncoll.tensors.reductions import DTYPES
from asyncoll.testing import Kill, Network, fake_device, fault, run_ranks, simulate
from asyncoll.transport.messages.simulated import Pause
from tests.algorithms.dense.test_device_collectives import bits, increment, normal, opened
from tests.algorithms.dense.test_device_collectives import nothing_is_shared as nothing_is_shared
from tests.algorithms.dense.test_device_pairs import COUNT, LONG, world
from tests.algorithms.dense.test_device_pairs import short_messages as short_messages


def served(comm, device):
    """Functions that return tensors of `device`, which they change as soon as they have returned."""

    def made(dtype: str, seed: list, count: int, strided: bool):
        x = normal(dtype, seed, count)
        return on_device(device, x)[1::2] if strided else device.tensor(x)

    async def several(seed: int, counts: list):
        tensors = [device.tensor(normal("float32", [seed, count], count)) for count in counts]
        for x in tensors:
            asyncio.get_running_loop().call_soon(increment, device, x)
        return {"tensors": tensors, "array": np.arange(seed)}

    async def each(times: int, count: int):
        x = device.tensor(torch.zeros(count))
        for number in range(1, times + 1):
            increment(device, x)
            yield x if number % 2 else device.tensor(torch.full((5,), float(number)))

    for function in (made, several, each):
        comm.rpc.register(function)


def on_device(device, x):
    """`x` on the device, such that half of its memory may be a tensor there."""
    device.tensor(x)
    return x


async def check_calls(comm, device, peer, seed):
    """Calls of all kinds, at once."""
    rpc = comm.rpc.to(device.name)

    async def one(number, dtype):
        count, strided = LONG // getattr(torch, dtype).itemsize + 1 + 700 * (number % 3), number % 2 == 1
        x = normal(dtype, [seed, number], count * (1 + strided))
        y = await rpc.call(peer, "made", dtype, [seed, number], count * (1 + strided), strided)
        assert device.holds(y)
        expected = x[1::2] if strided else x
        assert (y.dtype, y.shape) == (expected.dtype, expected.shape)
        assert bits(device, y) == bits(device, expected), dtype

    async def some(counts):
        found = await rpc.call(peer, "several", seed, counts)
        assert (found["array"] == np.arange(seed)).all()
        for count, y in zip(counts, found["tensors"], strict=True):
            increment(device, y)
            expected = normal("float32", [seed, count], count) + 1
            assert bits(device, y) == bits(device, expected), count

    async def stream():
        number = 0
        async for item in rpc.stream(peer, "each", 4, COUNT):
            number += 1
            increment(device, item)
            assert (device.values(item) == number + 1).all()
        assert number == 4

    calls = [one(number, dtype) for number, dtype in enumerate(DTYPES if comm.size == 2 else ["float32", "bfloat16"])]
    async with asyncio.timeout(60):
        await asyncio.gather(*calls, some([7, COUNT, 0, COUNT - 5]), some([COUNT]), stream())


async def settled(comm, places=4):
    """Nothing is shown any more, and all places are free."""
    async with asyncio.timeout(60):
        exchange = comm.rpc._exchange
        while exchange._sender._tasks or exchange._reader._tasks:
            await asyncio.sleep(1e-4)
    assert free(comm) == places


def free(comm):
    """How many places of the block of this rank are free."""
    return len(comm._core.backend._pairs._free)


@pytest.mark.usefixtures("nothing_is_shared")
@pytest.mark.parametrize("seed", range(8))
def test_a_device_for_each_rank_in_virtual_time(seed):
    async def main(comm):
        with opened(seed, "loop", f"fake:{comm.rank}") as device:
            served(comm, device)
            await comm.barrier()
            await asyncio.gather(*(check_calls(comm, device, peer, 3) for peer in range(comm.size)))
            await comm.barrier()
            assert "exchange: read" in device.copies

    simulate(2 + seed % 2, main, Network(jitter_s=1e-4), seed=seed, shared_memory=True)


@pytest.mark.usefixtures("nothing_is_shared")
@pytest.mark.parametrize("size", [2, 3])
def test_the_bits_arrive(size):
    """In all directions at once."""
    with opened(size) as device:

        async def main(comm):
            served(comm, device)
            await comm.barrier()
            await asyncio.gather(*(check_calls(comm, device, peer, 7 + peer) for peer in range(comm.size)))
            await comm.barrier()

        run_ranks(size, main, "shm")
    assert device.copies["exchange: read"] > 100


# -- who uses it ----------------------------------------------------------------------------------


async def ask(comm, device, peer, count=COUNT):
    """A result of `peer` that is right."""
    async with asyncio.timeout(60):
        y = await comm.rpc.to(device.name).call(peer, "made", "float32", [5], count, False)
    assert bits(device, y) == bits(device, normal("float32", [5], count))
    return y


@pytest.mark.usefixtures("nothing_is_shared")
def test_a_caller_that_wants_tensors_at_the_host_and_short_results():
    async def main(comm, device):
        served(comm, device)
        await comm.barrier()
        y = await comm.rpc.call(1 - comm.rank, "made", "float32", [5], COUNT, False)
        assert torch.equal(y, normal("float32", [5], COUNT))
        await ask(comm, device, 1 - comm.rank, LONG // 4)
        await comm.barrier()
        await comm.rpc.to(device.name).notify(1 - comm.rank, "made", "float32", [5], COUNT, False)
        await comm.rpc.flush()

    assert world(["fake:0", "fake:1"], main) == [{"mirrors"}, {"mirrors"}]


@pytest.mark.usefixtures("nothing_is_shared")
@pytest.mark.parametrize(
    ("what", "who", "shown"), [("share memory", 0, 3), ("share memory", 1, 0), ("open memory", 0, 3)]
)
def test_a_refusal_is_logged_once_and_mirrors_take_its_place(caplog, what, who, shown):
    """Rank 0 calls rank 1, three times at once and once more. `shown`: windows of rank 1."""

    async def main(comm, device):
        served(comm, device)
        await comm.barrier()
        if comm.rank == 0:
            await asyncio.gather(*(ask(comm, device, 1) for _ in range(3)))
            await ask(comm, device, 1)
        await comm.barrier()
        assert device.copies["exchange: write"] == (shown if comm.rank else 0)

    routes = world(["fake:0", "fake:1"], main, lambda devices: devices[who].refuse(what))
    assert "mirrors" in routes[0]
    (record,) = caplog.records
    assert record.getMessage().startswith(f"rank {who}: tensors of fake:{who} go through memory of the host, in ")


def test_messages_and_results_that_are_refused_at_the_same_time(caplog):
    async def main(comm, device):
        served(comm, device)
        await comm.barrier()
        x = device.tensor(torch.zeros(COUNT))
        other = comm.recv(x, 1) if comm.rank == 0 else comm.send(x, 0)
        await asyncio.gather(other, *([ask(comm, device, 1)] if comm.rank == 0 else []))
        await comm.barrier()

    world(["fake:0", "fake:1"], main, lambda devices: devices[0].refuse("open memory"))
    assert len(caplog.records) == 1


def test_a_device_without_memory_for_a_copy_or_a_landing(monkeypatch):
    """The result goes by its mirror. The next one does not."""

    async def main(comm, device):
        served(comm, device)
        await comm.barrier()
        for what in ("clone", "empty"):
            routes = []
            for is_full in (True, False):
                device.copies.clear()
                await comm.barrier()
                with monkeypatch.context() as patch:
                    if is_full and comm.rank == (what == "clone"):
                        patch.setattr(device, what, fails_once(getattr(device, what)))
                    await comm.barrier()
                    if comm.rank == 0:
                        await ask(comm, device, 1)
                    await comm.barrier()
                routes.append(device.route)
            assert "mirrors" in routes[0]
            assert routes[1] == {"blocks"}

    def fails_once(function):
        def failing(*arguments):
            if len(failed) < 1 and arguments != ("uint8", (0,)):
                failed.append(arguments)
                raise MemoryError("full")
            return function(*arguments)

        failed = []
        return failing

    world(["fake:0", "fake:1"], main)


@pytest.mark.usefixtures("nothing_is_shared")
def test_a_result_is_used_in_another_thread():
    """That has not seen the ends of the copies itself."""

    async def main(comm, device):
        served(comm, device)
        await comm.barrier()
        if comm.rank == 0:
            y = await comm.rpc.to(device.name).call(1, "made", "float32", [5], COUNT, False)
            await asyncio.to_thread(increment, device, y)
            assert bits(device, y) == bits(device, normal("float32", [5], COUNT) + 1)
        await comm.barrier()

    assert world(["fake:0", "fake:1"], main) == [{"blocks"}, {"blocks"}]


@pytest.mark.usefixtures("nothing_is_shared")
def test_bools_become_0_or_1():
    async def main(comm, device):
        def bools() -> torch.Tensor:
            return device.tensor((torch.arange(2 * LONG) % 256).to(torch.uint8)).view(torch.bool)

        comm.rpc.register(bools)
        await comm.barrier()
        found = await comm.rpc.to(device.name).call(1 - comm.rank, "bools")
        assert found.dtype == torch.bool
        assert (device.values(found).view(np.uint8) == (np.arange(2 * LONG) % 256 > 0)).all()
        await comm.barrier()

    assert world(["fake:0", "fake:1"], main) == [{"blocks"}, {"blocks"}]


# -- calls that end early -------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_is_shared")
def test_a_caller_gives_up_at_any_moment():
    """Nothing is left of the call: all places are free, and later calls are right."""
    reads = set()

    async def main(comm, seed):
        with opened(seed, "loop", f"fake:{comm.rank}") as device:
            served(comm, device)
            await comm.barrier()
            if comm.rank == 0:
                await ask(comm, device, 1)
                before = device.copies["exchange: read"]
                calls = [asyncio.ensure_future(ask(comm, device, 1)) for _ in range(3)]
                await asyncio.sleep(seed * 1.5e-4)
                for call in calls[:2]:
                    call.cancel()
                await asyncio.gather(*calls, return_exceptions=True)
                calls[2].result()
                reads.add(device.copies["exchange: read"] - before)
                await ask(comm, device, 1)
                over.append(seed)
            while seed not in over:
                least.add(free(comm))
                await asyncio.sleep(1e-5)
            await comm.barrier()
            await settled(comm)

    over, least = [], set()  # seeds, and free places
    for seed in range(0, 40, 3):
        simulate(2, partial(main, seed=seed), seed=seed, shared_memory=True)
    assert min(reads) == 12  # the windows of the call that goes on
    assert max(reads) > 24
    assert min(least) == 1  # three tensors at a time
    assert len(reads) > 5


@pytest.mark.usefixtures("nothing_is_shared")
def test_the_rest_of_a_result_that_nobody_waits_for_is_not_shown():
    async def main(comm):
        with opened(0, "loop", f"fake:{comm.rank}") as device:
            served(comm, device)
            await comm.barrier()
            if comm.rank == 0:
                call = asyncio.ensure_future(ask(comm, device, 1, 10 * COUNT))
                while device.copies["exchange: read"] < 10:
                    await asyncio.sleep(1e-5)
                call.cancel()
                await settled(comm)
                assert device.copies["exchange: read"] < 20
            await comm.barrier()
            await settled(comm)

    simulate(2, main, shared_memory=True)


def test_a_place_is_taken_while_it_is_read():
    """The second window cannot be shown, and the device of the reader stands still in the first."""

    async def main(comm):
        with opened(0, "loop" if comm.rank else "program", f"fake:{comm.rank}") as device:
            served(comm, device)
            comm._core.backend._pairs.answered(0, has_read=True)  # two windows at a time
            await comm.barrier()
            if comm.rank:
                device.fail_copy(1, OSError("no such bus"))
            else:
                call = asyncio.ensure_future(ask(comm, device, 1))
                while not device.copies["exchange: read"]:
                    device.turn()
                    await asyncio.sleep(1e-4)
                await asyncio.sleep(1)
            await comm.barrier()
            assert free(comm) == (3 if comm.rank else 4)
            await comm.barrier()
            if comm.rank == 0:
                device.finish()
                with pytest.raises(DeviceError, match="rank 1: fake:1 has failed: OSError: no such bus"):
                    await call
            await comm.barrier()
            await settled(comm)

    simulate(2, main, shared_memory=True)


@pytest.mark.parametrize("stream", ["exchange: read", "exchange: write"])
def test_a_copy_of_a_window_fails(monkeypatch, stream):
    """At the callee the call fails; at the caller the result comes by a mirror. Nothing else fails."""

    async def main(comm, device):
        served(comm, device)
        await comm.barrier()
        if comm.rank == 0:
            for number in (0, 1, 5, 11):
                failing[:] = [number]
                if stream == "exchange: write":
                    with pytest.raises(DeviceError, match="rank 1: fake:1 has failed: OSError: no such bus"):
                        await ask(comm, device, 1)
                else:
                    await ask(comm, device, 1)
                assert not failing
                await ask(comm, device, 1)
        await comm.barrier()
        await settled(comm)

    def prepare(devices):
        device = devices[stream == "exchange: write"]
        queue_copy = device.queue_copy

        def queue(kind, *arguments, **more):
            if kind == stream and failing:
                failing[0] -= 1
                if failing[0] < 0:
                    failing.clear()
                    raise OSError("no such bus")
            return queue_copy(kind, *arguments, **more)

        monkeypatch.setattr(device, "queue_copy", queue)

    failing = []
    world(["fake:0", "fake:1"], main, prepare)


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_stands_still_and_goes_on_later(who):
    """Its peer gives the calls up, or ends them. What the rank does later spoils nothing."""
    ends = set()

    async def main(comm, seed):
        with opened(seed, "loop", f"fake:{comm.rank}") as device:
            served(comm, device)
            await comm.barrier()
            if comm.rank == 0:
                try:
                    with asyncoll.deadline(60 if who == 0 else 1.0):
                        for _ in range(3):
                            await ask(comm, device, 1)
                            ends.add("over")
                except DeadlineError:
                    ends.add("overdue")
                await asyncio.sleep(4)
                await ask(comm, device, 1)
            await comm.barrier()
            await settled(comm)

    for seed in range(20):
        network = Network(faults=[Pause(who, 1e-4 + seed * 4e-4, 3.0)])
        simulate(2, lambda comm, seed=seed: main(comm, seed), network, seed, shared_memory=True)
    assert ends == ({"over", "overdue"} if who == 1 else {"over"})


def test_a_device_that_stands_still():
    """The caller gives up, and the callee ends with its device."""
    with fake_device(0, "thread", "fake:0") as device, fake_device(1, "program", "fake:1") as still:
        still.refuse_pins()

        async def main(comm):
            served(comm, [device, still][comm.rank])
            await comm.barrier()
            if comm.rank == 0:
                with asyncoll.deadline(0.1), pytest.raises(DeadlineError):
                    await ask(comm, device, 1)
                comm.abort("enough")
            with pytest.raises(AsyncollError):
                await comm.barrier()

        run_ranks(2, main, "shm")


def test_nothing_is_read_from_a_rank_that_is_lost():
    """The communicator fails here when a window is shown."""

    async def main(comm):
        with opened(0, "loop", f"fake:{comm.rank}") as device:
            served(comm, device)
            await comm.barrier()
            route = comm._core.backend.device_route
            copy = route._copy

            async def fail_and_copy(*arguments):
                comm.abort("enough")
                return await copy(*arguments)

            route._copy = fail_and_copy
            with pytest.raises(AbortedError, match="enough"):
                await (comm.barrier() if comm.rank else ask(comm, device, 1))
            assert not device.copies["exchange: read"]

    simulate(2, main, shared_memory=True)


# -- arguments ------------------------------------------------------------------------------------


def takes_on_device(comm, device):
    """Functions whose arguments are on `device`, and which change them."""

    async def same(*tensors: torch.Tensor, array: np.ndarray | None = None):
        for x in tensors:
            assert device.holds(x)
            if x.dtype == torch.float32:
                increment(device, x)
        return [*tensors, array]

    def plain(x: torch.Tensor):
        increment(device, x)
        return x

    async def repeated(x: torch.Tensor):
        for _ in range(2):
            increment(device, x)
            yield x

    for function in (same, plain, repeated):
        comm.rpc.to(device.name).register(function)
    comm.rpc.register(at_the_host)


def at_the_host(x: torch.Tensor) -> float:
    return float(x.sum())


async def pass_on(comm, device, peer, counts=(COUNT,), name="same"):
    """Tensors of the device to `peer` and back. The caller changes its own ones as soon as it may."""
    tensors = [device.tensor(normal("float32", [count], count)) for count in counts]
    try:
        async with asyncio.timeout(60):
            found = await comm.rpc.to(device.name).call(peer, name, *tensors)
    finally:
        for x in tensors:
            increment(device, x)
    for count, y in zip(counts, found if name == "same" else [found], strict=False):
        assert device.holds(y)
        assert bits(device, y) == bits(device, normal("float32", [count], count) + 1), count


async def check_arguments(comm, device, peer):
    """Of all kinds, at once."""

    async def of(dtype, number):
        count = LONG // getattr(torch, dtype).itemsize + 1 + 700 * (number % 3)
        x = normal(dtype, [number], 2 * count)
        mine, array = on_device(device, x.clone())[number % 2 :: 2], np.arange(number)
        *found, back = await comm.rpc.to(device.name).call(peer, "same", mine, x, array=array)
        for y, expected in zip(found, (x[number % 2 :: 2], x), strict=True):
            assert bits(device, y) == bits(device, expected + 1 if dtype == "float32" else expected)
        assert (back == array).all()

    async def streamed():
        number = 0
        async for item in comm.rpc.stream(peer, "repeated", device.tensor(torch.zeros(COUNT))):
            number += 1
            assert (item == number).all()
        assert number == 2

    async with asyncio.timeout(60):
        await pass_on(comm, device, peer, [5])  # from here on this rank knows that the function takes them
        calls = [of(dtype, number) for number, dtype in enumerate(DTYPES if comm.size == 2 else ["float32", "int8"])]
        calls += [pass_on(comm, device, peer, counts) for counts in ([COUNT], [7, COUNT, 0, COUNT - 5])]
        await asyncio.gather(*calls, streamed())


@pytest.mark.usefixtures("nothing_is_shared")
@pytest.mark.parametrize("seed", range(4))
def test_the_bits_of_arguments(seed):
    async def main(comm):
        with opened(seed, "loop", f"fake:{comm.rank}") as device:
            takes_on_device(comm, device)
            await comm.barrier()
            await asyncio.gather(*(check_arguments(comm, device, peer) for peer in range(comm.size)))
            await comm.barrier()
            await settled(comm)

    simulate(2 + seed % 2, main, Network(jitter_s=1e-4), seed=seed, shared_memory=True)


@pytest.mark.usefixtures("nothing_is_shared")
def test_which_arguments_are_shown():
    """Rank 0 calls rank 1. Functions run in threads, and the caller goes on in another one, too."""

    async def main(comm, device):
        takes_on_device(comm, device)
        await comm.barrier()
        if comm.rank == 0:
            for name, counts, is_shown in [
                ("plain", [COUNT], False),  # the first call
                ("plain", [COUNT], True),
                ("plain", [LONG // 4], False),
                ("same", [COUNT, COUNT], False),
                ("same", [COUNT, COUNT], True),
            ]:
                before = device.copies["exchange: write"]
                await pass_on(comm, device, 1, counts, name)
                assert (device.copies["exchange: write"] > before) == is_shown
            before = device.copies["exchange: write"]
            for _ in range(2):
                assert await comm.rpc.to(device.name).call(1, "at_the_host", device.tensor(torch.ones(COUNT))) == COUNT
            assert device.copies["exchange: write"] == before
            x = device.tensor(torch.ones(COUNT))
            await comm.rpc.notify(1, "plain", x)
            await asyncio.to_thread(increment, device, x)
            assert device.copies["exchange: write"] > before
            assert torch.equal(await comm.rpc.call(1, "plain", x), torch.full((COUNT,), 3.0))
        await comm.barrier()
        await settled(comm)

    world(["fake:0", "fake:1"], main)


@pytest.mark.usefixtures("nothing_is_shared")
def test_a_caller_that_shows_arguments_gives_up_at_any_moment():
    ends = set()

    async def main(comm, seed):
        with opened(seed, "loop", f"fake:{comm.rank}") as device:
            takes_on_device(comm, device)
            await comm.barrier()
            if comm.rank == 0:
                await pass_on(comm, device, 1)
                calls = [asyncio.ensure_future(pass_on(comm, device, 1, [COUNT, COUNT])) for _ in range(3)]
                await asyncio.sleep(seed * 3e-3)
                for call in calls[:2]:
                    call.cancel()
                found = await asyncio.gather(*calls, return_exceptions=True)
                assert found[2] is None
                ends.add(type(found[0]))
                await pass_on(comm, device, 1)
                await asyncio.sleep(0.1)
                assert not comm.rpc._exchange.client._pending
            await comm.barrier()
            await settled(comm)
            assert not comm.rpc._exchange.server._arrivals

    for seed in range(0, 30, 3):
        simulate(2, partial(main, seed=seed), seed=seed, shared_memory=True)
    assert ends == {asyncio.CancelledError, type(None)}


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("number", [0, 1, 8, 15])
def test_a_copy_of_an_argument_fails(who, number):
    """At the caller the call fails; at the callee the argument comes by a mirror. Nothing else fails."""

    async def main(comm):
        with opened(0, "loop", f"fake:{comm.rank}") as device:
            takes_on_device(comm, device)
            await comm.barrier()
            if comm.rank == 0:
                await pass_on(comm, device, 1)
            await comm.barrier()
            if comm.rank == who:
                device.fail_copy(device._count + number, OSError("no such bus"))
            await comm.barrier()
            if comm.rank == 0:
                failing = (
                    pytest.raises(DeviceError, match="fake:0 has failed") if who == 0 else contextlib.nullcontext()
                )
                with failing:
                    await pass_on(comm, device, 1, [COUNT, COUNT])
                await pass_on(comm, device, 1, [COUNT, COUNT])
                await asyncio.sleep(0.1)
                assert not comm.rpc._exchange.client._pending
            await comm.barrier()
            await settled(comm)
            assert not comm.rpc._exchange.server._arrivals

    simulate(2, main, shared_memory=True)


@pytest.mark.parametrize("is_shown", [False, True])
def test_a_callee_whose_device_is_full(monkeypatch, is_shown):
    """What cannot be shown goes by its mirror, and what cannot go by that either fails the call."""

    async def main(comm, device):
        takes_on_device(comm, device)
        await comm.barrier()
        if comm.rank == 0:
            if is_shown:
                await pass_on(comm, device, 1)
            full.append(True)
            with pytest.raises(DeviceError, match="rank 1: fake:1 has failed: MemoryError: full"):
                await pass_on(comm, device, 1)
            full.clear()
            await pass_on(comm, device, 1)
        await comm.barrier()
        await settled(comm)

    def prepare(devices):
        def may_fail(dtype, shape):
            if full and shape != (0,):
                raise MemoryError("full")
            return empty(dtype, shape)

        empty = devices[1].empty
        monkeypatch.setattr(devices[1], "empty", may_fail)

    full = []
    world(["fake:0", "fake:1"], main, prepare)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("of", ["results", "arguments"])
def test_a_rank_dies_at_every_passage(of, who):
    ends, points = set(), 0
    register, call = (served, ask) if of == "results" else (takes_on_device, pass_on)

    async def main(comm, point):
        with opened(point, "loop", f"fake:{comm.rank}") as device:
            register(comm, device)
            await comm.barrier()
            try:
                if comm.rank == 0 and of == "arguments":  # from here on this rank knows that the function takes them
                    await pass_on(comm, device, 1, [5])
                await comm.barrier()
                with fault(comm, Kill(), rank=who, injection_point=point):
                    if comm.rank == 0:
                        await call(comm, device, 1)
                        ends.add("over")
                    await comm.barrier()
                    if comm.rank == who:
                        ends.add("all points")
                await comm.barrier()
            except PeerLostError:
                ends.add("lost")

    while "all points" not in ends and points < 200:
        points += 1
        try:
            simulate(2, partial(main, point=points), seed=points, shared_memory=True)
        except PeerLostError:  # as the other rank leaves the world
            ends.add("lost")
    assert ends == {"over", "lost", "all points"}


def test_a_rank_that_stands_still_while_arguments_are_shown():
    """The caller gives up. The call is withdrawn once the callee goes on."""

    async def main(comm, seed):
        with opened(seed, "loop", f"fake:{comm.rank}") as device:
            takes_on_device(comm, device)
            await comm.barrier()
            if comm.rank == 0:
                with asyncoll.deadline(1.0), contextlib.suppress(DeadlineError):
                    for _ in range(3):
                        await pass_on(comm, device, 1)
                await asyncio.sleep(4)
                await pass_on(comm, device, 1)
                assert not comm.rpc._exchange.client._pending
            await comm.barrier()
            await settled(comm)
            assert not comm.rpc._exchange.server._arrivals

    for seed in range(12):
        network = Network(faults=[Pause(1, 1e-3 + seed * 7e-4, 3.0)])
        simulate(2, lambda comm, seed=seed: main(comm, seed), network, seed, shared_memory=True)


@pytest.mark.usefixtures("nothing_is_shared")
def test_a_plain_function_whose_thread_has_another_stream_than_the_loop():
    async def main(comm, device):
        with device.stream("of the loop") if comm.rank else contextlib.nullcontext():
            takes_on_device(comm, device)
            await comm.barrier()
            if comm.rank == 0:
                for _ in range(2):  # by a mirror, and through device memory
                    await pass_on(comm, device, 1, name="plain")
            await comm.barrier()
            await settled(comm)

    world(["fake:0", "fake:1"], main)


def test_a_call_is_withdrawn_after_what_it_has_shown():
    """The news that a tensor comes is on its way for longer than the cancellation takes."""

    async def main(comm):
        with opened(0, "loop", f"fake:{comm.rank}") as device:
            takes_on_device(comm, device)
            await comm.barrier()
            if comm.rank == 0:
                await pass_on(comm, device, 1)
                carrier = comm.rpc._exchange._carrier
                send = carrier.send

                async def delayed(*message):
                    await asyncio.sleep(0.1)
                    await send(*message)

                carrier.send = delayed
                call = asyncio.ensure_future(pass_on(comm, device, 1))
                await asyncio.sleep(0.05)
                call.cancel()
                await asyncio.wait([call])
                await asyncio.sleep(1)
                assert not comm.rpc._exchange.client._pending
                carrier.send = send
            await comm.barrier()
            await settled(comm)
            assert not comm.rpc._exchange.server._arrivals

    simulate(2, main, shared_memory=True)


@pytest.mark.parametrize("name", ["at_the_host", "unknown"])
def test_an_argument_that_a_function_does_not_want(name):
    async def main(comm):
        with opened(0, "loop", f"fake:{comm.rank}") as device:
            takes_on_device(comm, device)
            await comm.barrier()
            if comm.rank == 0:
                message = protocol.encode(protocol.SHOW_ARGUMENT, 7, struct.pack("<IQ", 0, 9), name=name)
                await comm.rpc._exchange._carrier.send(1, *message)
                assert await comm.rpc.call(1, "at_the_host", torch.ones(5)) == 5
                assert not comm.rpc._exchange.server._arrivals
            await comm.barrier()

    simulate(2, main, shared_memory=True)


def test_an_argument_that_is_shown_twice():
    async def main(comm):
        with opened(0, "loop", f"fake:{comm.rank}") as device:
            takes_on_device(comm, device)
            await comm.barrier()
            if comm.rank == 0:
                message = protocol.encode(protocol.SHOW_ARGUMENT, 7, struct.pack("<IQ", 0, 9), name="same")
                for _ in range(2):
                    await comm.rpc._exchange._carrier.send(1, *message)
            await comm.barrier()
            await asyncio.sleep(1)
            await comm.barrier()

    with pytest.raises((ProtocolError, AbortedError), match="array 0 is shown twice"):
        simulate(2, main, shared_memory=True)


@pytest.mark.usefixtures("nothing_is_shared")
@pytest.mark.parametrize("who", [0, 1])
def test_results_whose_streams_stand_still_hold_up_no_others(who):
    """Neither the stream of the caller, rank 0, nor that on which the function has returned."""

    async def main(comm, devices):
        device, releases, stream = devices[comm.rank], [], contextlib.ExitStack()

        def of_stream(name):
            stream.close()
            stream.enter_context(device.stream(name))  # it is the current one where the function returns
            if comm.rank == who and name == "still" and not releases:
                releases.append(device.hold())
            return device.tensor(torch.ones(COUNT))

        comm.rpc.register(of_stream, inline=True)
        await comm.barrier()
        if comm.rank == 0:
            calls = comm.rpc.to(device.name)
            with device.stream("still" if who == 0 else "default"):
                releases += [device.hold()] if who == 0 else []
                held = [asyncio.ensure_future(calls.call(1, "of_stream", "still")) for _ in range(6)]
                await asyncio.sleep(0.1)  # they begin
            async with asyncio.timeout(60):
                assert bits(device, await calls.call(1, "of_stream", "free")) == bits(device, torch.ones(COUNT))
            assert not any(call.done() for call in held)
        await comm.barrier()
        for release in (stream.close, *releases):
            release()
        if comm.rank == 0:
            for y in await asyncio.gather(*held):
                assert bits(device, y) == bits(device, torch.ones(COUNT))
        await comm.barrier()
        await settled(comm)

    with contextlib.ExitStack() as stack:
        devices = [stack.enter_context(opened(rank, "loop", f"fake:{rank}")) for rank in range(2)]
        simulate(2, lambda comm: main(comm, devices), shared_memory=True)


# -- peers that break the protocol ----------------------------------------------------------------


@pytest.mark.parametrize("body", [b"\1", struct.pack("<IQ", 0, 0), struct.pack("<IQ", 0, 1 << 60)])
def test_a_callee_that_shows_no_tensor(body):
    async def main(comm):
        with opened(0, "loop", f"fake:{comm.rank}") as device:
            served(comm, device)
            await comm.barrier()
            if comm.rank == 1:
                await comm.rpc._exchange._carrier.send(0, *protocol.encode(protocol.SHOW_RESULT, 0, body))
            else:
                await asyncio.sleep(1)
            await comm.barrier()

    with pytest.raises((ProtocolError, AbortedError), match="broke the protocol"):
        simulate(2, main, shared_memory=True)


def test_a_callee_that_names_no_place_of_its_block(monkeypatch):
    async def main(comm):
        with opened(0, "loop", f"fake:{comm.rank}") as device:
            served(comm, device)
            await comm.barrier()
            with pytest.raises(AbortedError, match="of a block of device memory"):
                await (comm.barrier() if comm.rank else ask(comm, device, 1))

    async def nowhere(memory):
        return memory.nbytes

    monkeypatch.setattr(pair_memory.PairMemory, "place", nowhere)
    simulate(2, main, shared_memory=True)
