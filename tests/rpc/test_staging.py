"""Calls of functions with tensors on devices: the bits, the order and the errors, on devices without hardware."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from functools import partial
from itertools import cycle, product
from typing import Any

import numpy as np
import pytest
import torch

import asyncoll
from asyncoll.errors import AbortedError, DeadlineError, DeviceError, UsageError
from asyncoll.rpc import connect, serve
from asyncoll.tensors.reductions import DTYPES
from asyncoll.testing import fake_device, run_ranks, simulate
from tests.support.processes import PATIENCE_S
from tests.transport.staging.test_staging import LAYOUTS, TRANSPORTS, bits, increment, made


@dataclasses.dataclass
class Batch:
    inputs: torch.Tensor
    rest: dict[str, Any]


class Service:
    """What the ranks call. Its arguments are at the host, its results where it has got its tensors from `move`."""

    def __init__(self, move):
        self._move = move

    async def echo(self, batch: Batch) -> Batch:
        tensors = [batch.inputs, *batch.rest["more"]]
        assert all(type(x) is torch.Tensor and x.is_cpu for x in tensors)
        first, *more = [self._moved(x) for x in tensors]
        return Batch(first, {"more": (*more,), "array": batch.rest["array"]})

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return self._moved(x)

    async def each(self, x: torch.Tensor, times: int):
        for _ in range(times):
            yield [self._moved(x), times]

    def _moved(self, x):
        """`x` where `move` takes it, with the same elements; a matrix is not contiguous."""
        return self._move(x.t().clone()).t() if x.dim() == 2 else self._move(x.clone())


class Calls:
    """The calls of `Service`, described for a proxy."""

    async def echo(self, batch: Batch) -> Batch: ...
    async def plain(self, x: torch.Tensor) -> torch.Tensor: ...
    async def each(self, x: torch.Tensor, times: int) -> Any:
        yield


CASES = [*product(["float32", "bool"], LAYOUTS), *zip(DTYPES, cycle(LAYOUTS), strict=False)]


async def check_calls(device, peer):
    """All ways to call the `Service` that `peer` is a proxy of, with results on `device`, give the elements given."""
    for number, (dtype, layout) in enumerate(CASES):
        more = [made(device.tensor, dtype, layout, seed) for seed in range(number % 3)]
        x, expected = (made(move, dtype, layout, 9) for move in (device.tensor, lambda x: x))
        found = [await peer.plain(x)]
        batch = await peer.echo(Batch(x, {"more": more, "array": np.arange(number)}))
        assert (batch.rest["array"] == np.arange(number)).all()
        assert [bits(device, one) for one in batch.rest["more"]] == [bits(device, one) for one in more]
        found += [batch.inputs]
        found += [item async for item, _ in peer.each(x, number % 3)]
        for result in found:
            assert device.holds(result) or not result.numel()
            assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
            assert bits(device, result) == bits(device, expected), (dtype, layout)


@pytest.mark.parametrize(("size", "transport"), [(1, "inproc"), (2, "shm"), (3, "zmq"), (3, "shm"), (2, "inproc")])
def test_calls_give_the_elements_that_they_are_given(size, transport):
    with fake_device(size) as device:

        async def main(comm):
            comm.rpc.register(Service(device.tensor))
            await comm.barrier()
            other = (comm.rank + 1) % size
            await check_calls(device, comm.rpc.to("fake:0").proxy(other, Calls))
            with asyncoll.deadline(PATIENCE_S):
                result = await comm.rpc.to("fake:0").call(other, "plain", device.tensor(torch.ones(5000)))
            assert (device.values(result) == 1).all()
            assert torch.equal(await comm.rpc.call(other, "plain", device.tensor(torch.ones(3))), torch.ones(3))
            await comm.barrier()

        run_ranks(size, main, transport)


@pytest.mark.parametrize("url", ["ipc://{}/s", "tcp://127.0.0.1:0"])
def test_services_outside_of_a_world(url, tmp_path):
    async def main():
        with fake_device() as device:
            async with serve(Service(device.tensor), url.format(tmp_path)) as address, connect(address) as client:
                await check_calls(device, client.to("fake:0").proxy(Calls))
                result = await client.to("fake:0").call("plain", device.tensor(torch.ones(50_000)))
                assert (device.values(result) == 1).all()

    asyncio.run(main())


# -- order ----------------------------------------------------------------------------------------


class Counter:
    """Functions that queue work on a device before they return its tensors, and after that."""

    def __init__(self, device):
        self._device = device
        self._streams = []
        self._x = device.tensor(torch.zeros(30_000))

    def in_a_thread(self, x: torch.Tensor) -> torch.Tensor:
        y = self._device.tensor(x.clone())
        self._streams.append(self._device.stream("thread"))
        self._streams[-1].__enter__()  # for good
        increment(self._device, y)
        return y

    async def on_the_loop(self, x: torch.Tensor) -> torch.Tensor:
        await asyncio.sleep(0)
        y = self._device.tensor(x.clone())
        increment(self._device, y)
        return y

    async def each(self, times: int):
        """The same tensor again and again, of another value."""
        for _ in range(times):
            increment(self._device, self._x)
            yield self._x


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("seed", range(3))
def test_work_before_and_after_a_call_is_in_order(transport, seed):
    with fake_device(seed) as device:

        async def main(comm):
            comm.rpc.register(Counter(device))
            await comm.barrier()
            rpc, other = comm.rpc.to("fake:0"), (comm.rank + 1) % comm.size
            x = device.tensor(torch.full((30_000,), 1.0))
            for name in ("in_a_thread", "on_the_loop", "in_a_thread"):
                increment(device, x)
                with device.stream("side"):
                    y = await rpc.call(other, name, started(device, 4))
                    increment(device, y)
                await rpc.notify(other, name, x)
                increment(device, x)
                result = await rpc.call(other, name, x)
                with device.stream("side"):
                    increment(device, x)
                assert (device.values(y) == 7).all()
                x = result
                increment(device, x)
            assert (device.values(x) == 1 + 3 * 4).all()
            number = 0
            async for item in rpc.stream(other, "each", 4):
                number += 1
                increment(device, item)
                assert (device.values(item) == number + 1).all()

        run_ranks(2, main, transport)


@pytest.mark.parametrize("seed", range(10))
def test_devices_of_their_own_in_virtual_time(seed):
    async def main(comm):
        with fake_device(seed, "loop", f"fake:{comm.rank}") as device:
            comm.rpc.register(Counter(device))
            await comm.barrier()
            rpc, x = comm.rpc.to(device.name), started(device, 0)
            for other in range(comm.size):
                x = await rpc.call(other, "on_the_loop", x)
                increment(device, x)
            assert (device.values(x) == 1 + 2 * comm.size).all()
            await comm.barrier()

    simulate(2 + seed % 6, main, seed=seed)


def started(device, value):
    """A tensor of `value` + 1 at the end of work that is queued."""
    x = device.tensor(torch.full((30_000,), float(value)))
    increment(device, x)
    return x


# -- errors ---------------------------------------------------------------------------------------


async def items(rpc, x):
    return [item async for item in rpc.stream(1, "each", x, 2)]


async def forever(call):
    while True:
        await call()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_copy_to_the_host_fails(transport):
    """Nothing but the call fails."""
    with fake_device() as device:

        async def main(comm):
            comm.rpc.register(Service(device.tensor))
            await comm.barrier()
            if comm.rank == 0:
                x = device.tensor(torch.ones(100))
                device.fail_copy(0, OSError("no such bus"))
                with pytest.raises(DeviceError, match=r"^rank 0: fake:0 has failed: OSError: no such bus"):
                    await comm.rpc.call(1, "plain", x)
                device.fail_copy(2, OSError("no such bus"))
                with pytest.raises(DeviceError, match=r"^rank 1: fake:0 has failed: OSError: no such bus"):
                    await comm.rpc.call(1, "plain", x)
                device.fail_copy(4, OSError("no such bus"))
                with pytest.raises(DeviceError, match=r"^rank 1: fake:0 has failed: OSError: no such bus"):
                    await items(comm.rpc, x)
                assert torch.equal(await comm.rpc.call(1, "plain", x), torch.ones(100))
            await comm.barrier()

        run_ranks(2, main, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_copy_to_the_device_fails(transport):
    """No call waits for it, so it aborts the communicator."""
    with fake_device() as device:
        device.fail_copy(0, OSError("no such bus"))

        async def main(comm):
            comm.rpc.register(Service(lambda x: x))
            await comm.barrier()
            if comm.rank == 0:
                device.values(await comm.rpc.to("fake:0").call(1, "plain", torch.ones(1000)))
            with pytest.raises(AbortedError, match="fake:0 has failed: OSError: no such bus"):
                await forever(comm.barrier)

        with pytest.raises(DeviceError, match="fake:0 has failed: OSError: no such bus"):  # as rank 0 leaves the world
            run_ranks(2, main, transport)


def test_a_device_has_no_room_for_a_result(monkeypatch):
    """Nothing but the call fails."""
    with fake_device() as device:
        empty = device.empty

        def full(dtype, shape):
            if 1000 in shape:
                raise MemoryError("no room")
            return empty(dtype, shape)

        monkeypatch.setattr(device, "empty", full)

        async def main(comm):
            comm.rpc.register(Service(lambda x: x))
            await comm.barrier()
            rpc, other = comm.rpc.to("fake:0"), (comm.rank + 1) % comm.size
            with pytest.raises(DeviceError, match=rf"^rank {comm.rank}: fake:0 has failed: MemoryError: no room"):
                await rpc.call(other, "plain", torch.ones(1000))
            assert (device.values(await rpc.call(other, "plain", torch.ones(10))) == 1).all()
            await comm.barrier()

        run_ranks(2, main, "shm")


def test_a_copy_to_the_device_fails_outside_of_a_world(tmp_path):
    async def main():
        with fake_device() as device:
            device.fail_copy(0, OSError("no such bus"))
            async with serve(Service(lambda x: x), f"ipc://{tmp_path}/s") as url, connect(url) as client:
                device.values(await client.to("fake:0").call("plain", torch.ones(1000)))
                with pytest.raises(DeviceError, match="fake:0 has failed: OSError: no such bus"):
                    await forever(partial(client.call, "plain", torch.ones(1)))

    asyncio.run(main())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_another_coroutine_changes_a_result_that_is_not_sent(transport):
    """On the stream of the function, so after the copy to the host."""

    async def main(comm):
        x = device.tensor(torch.zeros(50_000))

        def change():
            increment(device, x)
            return x

        async def changes():
            asyncio.get_running_loop().call_soon(increment, device, x)
            return x

        async def items():
            asyncio.get_running_loop().call_soon(increment, device, x)
            yield x

        for function in (change, changes, items):
            comm.rpc.register(function)
        await comm.barrier()
        other = 1 - comm.rank
        got = [await comm.rpc.call(other, "change"), await comm.rpc.call(other, "changes")]
        got += [item async for item in comm.rpc.stream(other, "items")]
        assert [each.unique().tolist() for each in got] == [[1], [1], [2]]
        await comm.barrier()

    with fake_device(5) as device:
        run_ranks(2, main, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("gives_up", ["deadline", "cancellation"])
def test_a_device_that_stands_still(transport, gives_up):
    """The caller stops waiting, and nothing is left of the call at either end."""
    with fake_device(0, "program") as device:
        device.refuse_pins()  # pinned memory would have to wait for the end of its copies
        x = device.tensor(torch.ones(1000))
        ends = {}

        async def stopped(call, error="did not answer"):
            if gives_up == "deadline":
                with pytest.raises(DeadlineError, match=error), asyncoll.deadline(0.1):
                    await call
            else:
                task = asyncio.ensure_future(call)
                while not device.turn():  # the copy is under way
                    await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            while ends[0].client._pending or ends[1].server._calls:
                await asyncio.sleep(0)
            assert not ends[1].server._fetching

        async def main(comm):
            comm.rpc.register(Service(lambda _: increment(device, x) or x))
            ends[comm.rank] = comm.rpc._exchange
            await comm.barrier()
            if comm.rank == 0:
                await stopped(comm.rpc.call(1, "plain", x), "its arguments have not arrived from fake:0")
                increment(device, x)
                await stopped(comm.rpc.call(1, "plain", torch.ones(1)))
                await stopped(comm.rpc.call(1, "echo", Batch(torch.ones(1), {"more": [], "array": None})))
                await stopped(items(comm.rpc, torch.ones(1)))
                increment(device, x)
            await comm.barrier()

        run_ranks(2, main, transport)


@pytest.mark.parametrize("has_deadline", [True, False])
def test_a_function_returns_after_its_caller_has_given_up(has_deadline):
    """Its tensor, which is being copied then, is released."""
    with fake_device(0, "program") as device:
        device.refuse_pins()  # pinned memory would have to wait for the end of its copies
        x = device.tensor(torch.ones(1000))
        begun, may_return = threading.Event(), threading.Event()

        def held() -> torch.Tensor:
            begun.set()
            may_return.wait(PATIENCE_S)
            increment(device, x)
            return x

        async def until(happened):
            while not happened():
                await asyncio.sleep(0)

        async def main(comm):
            comm.rpc.register(held)
            server = comm.rpc._exchange.server
            with asyncoll.deadline(PATIENCE_S) if has_deadline else contextlib.nullcontext():
                call = asyncio.ensure_future(comm.rpc.call(0, "held"))
            await until(begun.is_set)
            call.cancel()
            await until(lambda: not server._calls)
            may_return.set()
            await until(lambda: not server._threads._unsettled)
            increment(device, x)

        run_ranks(1, main, "inproc")


def test_a_call_that_is_refused_has_not_begun():
    with fake_device(0, "program") as device:
        device.refuse_pins()  # pinned memory would have to wait for the end of its copies

        async def main(comm):
            comm.rpc.register(Service(device.tensor))
            x = device.tensor(torch.ones(5))
            with pytest.raises(UsageError, match="a tensor on 'cuda:7' cannot be made"):
                comm.rpc.to("cuda:7")
            with pytest.raises(UsageError, match="f: argument 2 is a <class 'object'>"):
                await comm.rpc.call(0, "f", x, object())
            with pytest.raises(UsageError, match=r"f: argument 1.*conjugate"):
                await comm.rpc.call(0, "f", device.tensor(torch.ones(5, dtype=torch.complex64)).conj())
            assert not device.turn()

        run_ranks(1, main, "inproc")
