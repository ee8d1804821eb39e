"""Calls of tensors on devices: the bits, the order and the errors, on devices without hardware."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import warnings
import weakref
from functools import partial
from itertools import chain, cycle, product

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.masked import masked_tensor

import asyncoll
from asyncoll.errors import AbortedError, DeadlineError, DeviceError, UsageError
from asyncoll.forks import address_of
from asyncoll.tensors.operands import Operand, as_operand
from asyncoll.tensors.reductions import DTYPES, is_divisible
from asyncoll.tensors.registered import RegisteredMemory
from asyncoll.tensors.staged import check_plain, stagers
from asyncoll.testing import Hazard, fake_device, run_ranks, simulate
from asyncoll.torch.memory import copyable, reducible, writable
from asyncoll.transport.staging import mirrors
from asyncoll.transport.staging.mirrors import DeviceStager, Mirror
from asyncoll.world import world
from tests.support.cancelling import nothing_is_pending
from tests.support.emulated_cuda import emulated_cuda
from tests.support.places import SCRIPTS

WINDOWS = "short=64,staged=1024"  # a tensor of 1,000 float32 has several
SCRIPT = SCRIPTS / "transport/staging/device_tensors.py"
TRANSPORTS = ["inproc", "zmq", "shm"]
OPENED = [fake_device, emulated_cuda]
LAYOUTS = {
    "flat": lambda x: x,
    "rows": lambda x: x.view(-1, 4)[::2],
    "transposed": lambda x: x.view(4, -1).t(),
    "one": lambda x: x[3],
    "empty": lambda x: x[:0],
}


@pytest.fixture(params=[*TRANSPORTS, "windows"])
def way(request, monkeypatch):
    """A transport; with "windows" tensors of devices are reduced while they arrive."""
    if request.param != "windows":
        return request.param
    monkeypatch.setenv("ASYNCOLL_SIZES", WINDOWS)
    return "shm"


def tensor(dtype, seed, count=240):
    """Elements of which sums are exact in every dtype, in any order."""
    values = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 8, count)
    return torch.tensor(values).to(getattr(torch, dtype))


def bits(device, x):
    """The elements of a tensor as bytes, wherever it is."""
    if device.holds(x):
        return device.values(x).tobytes()
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


def made(move, dtype, layout, seed):
    return LAYOUTS[layout](move(tensor(dtype, seed)))


async def all_calls(comm, make):
    """The results of every dense call, and of messages, of tensors that `make(seed)` gives."""
    rank, size = comm.rank, comm.size
    results = [
        await comm.allreduce(make(rank)),
        await comm.broadcast(make(rank), root=size - 1),
        await comm.reduce(make(rank), root=0),
        *await comm.allgatherv(make(rank)),
        await comm.allgather(make(rank)),
        await comm.gather(make(rank), root=size - 1),
        *await comm.alltoallv([make(rank * size + dest) for dest in range(size)]),
    ]
    if make(0).dim():
        results.append(await comm.reduce_scatter(make(rank)))
        if len(make(0)) % size == 0:
            results.append(await comm.alltoall(make(rank)))
    if size > 1:
        sent = comm.send(make(rank), dest=(rank + 1) % size)
        results.append(await comm.recv(make(0), source=(rank - 1) % size))
        await sent
        sent = comm.send(make(rank), dest=(rank + 1) % size, tag=1)
        results.append((await comm.recv_any(make(0), tag=1))[0])
        await sent
    results.append(await comm.scatter([make(dest) for dest in range(size)], root=size - 1))
    return [result for result in results if result is not None]


@pytest.mark.parametrize(
    ("size", "transport", "opened"),
    [
        (1, "inproc", fake_device),
        (2, "shm", fake_device),
        (3, "zmq", emulated_cuda),
        (3, "shm", emulated_cuda),
        (7, "shm", fake_device),
    ],
)
def test_every_call_gives_the_bits_of_the_host(size, transport, opened):
    with opened(size) as device:
        moves = (lambda x: x), device.tensor

        async def main(comm):
            for dtype, layout in [*product(["float32"], LAYOUTS), *zip(DTYPES, cycle(LAYOUTS), strict=False)]:
                expected, found = [await all_calls(comm, partial(made, move, dtype, layout)) for move in moves]
                scattered = found[-1] if comm.rank < size - 1 else None  # in memory of the host
                for one, other in zip(expected, found, strict=True):
                    assert device.holds(other) == (other is not scattered) or not other.numel()
                    assert (other.dtype, other.shape) == (one.dtype, one.shape)
                    assert bits(device, other) == bits(device, one), (dtype, layout)

        run_ranks(size, main, transport)


@pytest.mark.parametrize(("size", "transport"), [(2, "zmq"), (5, "shm")])
def test_every_call_of_ranks_with_and_without_a_device(size, transport):
    with fake_device(size) as device:

        async def main(comm):
            move = device.tensor if comm.rank % 2 else lambda x: x
            for dtype, layout in [("float32", "transposed"), ("bfloat16", "rows")]:
                expected = await all_calls(comm, partial(made, lambda x: x, dtype, layout))
                found = await all_calls(comm, partial(made, move, dtype, layout))
                assert [bits(device, x) for x in found] == [bits(device, x) for x in expected]

        run_ranks(size, main, transport)


def test_a_tensor_that_is_scattered_stays_on_the_device_of_its_own():
    """Only the root has tensors, and with them a device."""
    with fake_device() as device:

        async def main(comm):
            xs = [device.tensor(torch.full((3,), float(dest))) for dest in range(3)]
            got = [await comm.scatter(xs, root=root) for root in range(3)]
            assert [device.holds(x) for x in got] == [root == comm.rank for root in range(3)]
            assert all((device.values(x) if device.holds(x) else x.numpy()).tolist() == [comm.rank] * 3 for x in got)

        run_ranks(3, main, "inproc")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("opened", OPENED)
def test_averages(opened, transport):
    with opened() as device:

        async def main(comm):
            for dtype in filter(is_divisible, DTYPES):
                results = []
                for move in (lambda x: x, device.tensor):
                    x = move(tensor(dtype, comm.rank))
                    results.append(bits(device, await comm.allreduce(x, asyncoll.AVG)))
                assert results[0] == results[1]

        run_ranks(3, main, transport)


def increment(device, x):
    device.compute(lambda array: np.add(array, 1, out=array), x)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("opened", OPENED)
def test_work_before_and_after_a_call_is_in_order(opened, transport, seed):
    with opened(seed) as device:

        async def main(comm):
            x = device.tensor(torch.full((50_000,), float(comm.rank)))
            for turn in range(4):
                y = device.tensor(torch.full((50_000,), float(comm.rank)))
                increment(device, x)
                with device.stream("side"):
                    increment(device, y)
                    increment(device, y)
                    other = comm.allreduce(y, asyncoll.AVG)
                await comm.allreduce(x, asyncoll.MAX)
                increment(device, x)
                gathered = await comm.allgather(x)
                increment(device, gathered)
                await other
                with device.stream("side" if turn % 2 else "default"):
                    increment(device, y)
                assert (device.values(y) == (comm.size - 1) / 2 + 3).all()
            assert (device.values(x) == comm.size - 1 + 8).all()

        run_ranks(3, main, transport)


@pytest.mark.parametrize("opened", OPENED)
def test_work_on_one_stream_holds_up_no_call_of_another(opened, way):
    with opened() as device:

        async def main(comm):
            with device.stream(f"side of rank {comm.rank}"):
                x, into = (device.tensor(torch.ones(1000)) for _ in range(2))
                release = device.hold()
                held = [comm.allreduce(x), comm.recv(into, source=(comm.rank - 1) % comm.size)]
            y = device.tensor(torch.full((1000,), 2.0))
            try:
                async with asyncio.timeout(20):
                    await comm.send(torch.full((1000,), 3.0), dest=(comm.rank + 1) % comm.size)
                    for call in (comm.allreduce, comm.solo_allreduce):
                        await call(y)
                    gathered = await comm.allgather(y)
            finally:
                release()
            await asyncio.gather(*held)
            assert (device.values(x) == comm.size).all()
            assert (device.values(into) == 3).all()
            assert device.values(gathered).shape == (comm.size, 1000)

        run_ranks(3, main, way)


@pytest.mark.parametrize("seed", range(40))
def test_ranks_with_and_without_a_device_in_virtual_time(seed):
    """Rank 0 has ordinary tensors."""

    async def main(comm):
        with fake_device(seed, "loop", f"fake:{comm.rank}") as device:
            move = device.tensor if comm.rank else lambda x: x
            x = move(torch.full((1000,), float(comm.rank)))
            gathered = await comm.allgather(x)
            total = await comm.allreduce(x)
            values = device.values if comm.rank else torch.Tensor.numpy
            assert (values(total) == comm.size * (comm.size - 1) / 2).all()
            assert (values(gathered) == np.arange(comm.size)[:, None]).all()
            await comm.barrier()

    simulate(2 + seed % 6, main, seed=seed)


def test_a_call_that_is_refused_has_not_begun():
    with fake_device(0, "program") as device:

        async def main(comm):
            x = device.tensor(torch.ones(5, dtype=torch.int32))
            with pytest.raises(UsageError, match="AVG is not defined"):
                comm.allreduce(x, asyncoll.AVG)
            assert not device.turn()
            with pytest.raises(UsageError, match="expanded"):
                comm.allreduce(device.tensor(torch.ones(1)).expand(3))

        run_ranks(1, main, "inproc")


class Wrapper(torch.Tensor):
    """Has its elements elsewhere."""

    @staticmethod
    def __new__(cls, device="cpu"):
        return torch.Tensor._make_wrapper_subclass(cls, (3,), dtype=torch.float32, device=device)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


class Named(torch.Tensor):
    """Is the memory alone."""


def without_plain_memory():
    inside = []
    torch.func.vmap(lambda x: inside.append(x) or x)(torch.ones(2, 3))
    torch.func.grad(lambda x: inside.append(x) or x.sum())(torch.ones(3))
    with FakeTensorMode(), warnings.catch_warnings():
        inside.append(torch.empty(3))
        inside.append(torch.empty(0))
    with warnings.catch_warnings(action="ignore"):
        inside.append(masked_tensor(torch.ones(2), torch.tensor([True, False])))
        inside.append(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    return [*inside, Wrapper(), torch._efficientzerotensor(3)]


def test_which_tensors_have_plain_memory():
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    for x in [*without_plain_memory(), freed]:
        with pytest.raises(UsageError, match=f"a {type(x).__name__} without plain memory on cpu is not supported"):
            check_plain(x)
    plain = torch.ones(4)
    for x in (plain, torch.nn.Parameter(plain), plain.as_subclass(Named), plain[:0], plain.to_sparse()):
        check_plain(x)


def test_a_nested_tensor_of_the_host_is_refused():
    with warnings.catch_warnings(action="ignore"):
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(UsageError, match="a Tensor without plain memory"):
        as_operand(nested)


def test_a_tensor_without_plain_memory_is_refused_before_the_call():
    with emulated_cuda() as device:

        async def main(comm):
            x = Wrapper("cuda:0")
            calls = [comm.allreduce, comm.allgather, comm.solo_allreduce, partial(comm.sparse_allreduce, density=0.5)]
            calls += [lambda x: comm.send(x, dest=0), lambda x: comm.rpc.call(0, "f", x), reducible, copyable, writable]
            for call in calls:
                with pytest.raises(UsageError, match="a Wrapper without plain memory on cuda:0 is not supported"):
                    await call(x)
            await comm.allreduce(device.tensor(torch.ones(3)))

        run_ranks(1, main, "shm")


def test_a_copy_to_the_host_fails(way):
    with fake_device() as device:
        device.fail_copy(0, OSError("no such bus"))

        async def main(comm):
            x = torch.ones(1000)
            with pytest.raises(
                (DeviceError, AbortedError), match="rank 1: fake:0 has failed: OSError: no such bus"
            ) as caught:
                await comm.allreduce(device.tensor(x) if comm.rank == 1 else x)
            return type(caught.value)

        assert run_ranks(3, main, way) == [AbortedError, DeviceError, AbortedError]


def test_nothing_is_logged_of_a_call_that_fails_and_is_held(caplog):
    """The program hears of the failure from its other calls."""
    with fake_device() as device:
        device.fail_copy(0, OSError("no such bus"))

        async def main(comm):
            call = comm.allreduce(device.tensor(torch.ones(1000)))

            async def others():
                while True:
                    await comm.barrier()
                    await asyncio.sleep(0)

            with pytest.raises(AbortedError, match="no such bus"):
                await asyncio.wait_for(others(), 20)
            call.close()

        run_ranks(1, main, "inproc")
    gc.collect()
    assert not caplog.messages


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_contribution_does_not_arrive(transport):
    with fake_device() as device:
        device.fail_copy(0, OSError("no such bus"))

        async def calls(comm):
            while True:
                await comm.solo_allreduce(np.ones(1000, np.float32), name="r")
                await asyncio.sleep(0)

        async def main(comm):
            if comm.rank == 1:
                with pytest.raises(DeviceError, match="fake:0 has failed: OSError: no such bus"):
                    await comm.solo_allreduce(device.tensor(torch.ones(1000)), name="r")
            with pytest.raises(AbortedError, match="fake:0 has failed: OSError: no such bus"):
                await calls(comm)
            await nothing_is_pending(comm)

        run_ranks(3, main, transport)


def test_a_copy_to_the_device_fails(way):
    """No call waits for it, so it aborts the communicator."""
    with fake_device() as device:
        device.fail_copy(1, OSError("no such bus"))

        async def calls(comm):
            x = torch.ones(1000)
            await comm.allreduce(device.tensor(x) if comm.rank == 1 else x)  # it may not be over at another rank
            if comm.rank == 1:
                device.values(x)
            while True:
                await comm.barrier()
                await asyncio.sleep(0)

        async def main(comm):
            with pytest.raises(AbortedError, match="fake:0 has failed: OSError: no such bus"):
                await calls(comm)

        with pytest.raises(DeviceError, match="fake:0 has failed: OSError: no such bus"):  # as rank 1 leaves the world
            run_ranks(3, main, way)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("is_split", [False, True])
def test_a_copy_to_the_device_fails_after_the_last_call(is_split, transport):
    """Leaving the world waits for the copies. The call may not be over at another rank, which then hears of it."""

    async def calls(comm):
        part = await comm.split(0) if is_split else comm
        x = torch.ones(1000)
        with contextlib.suppress(AbortedError) if comm.rank != 1 else contextlib.nullcontext():
            await part.allreduce(device.tensor(x) if comm.rank == 1 else x)

    with fake_device() as device:
        device.fail_copy(1, OSError("no such bus"))
        with pytest.raises(DeviceError, match="fake:0 has failed: OSError: no such bus"):
            run_ranks(3, calls, transport)


@pytest.mark.parametrize("call", ["allreduce", "solo_allreduce", "send", "sparse_allreduce"])
def test_a_device_that_stands_still(call, way):
    """The call notices a deadline, and that the communicator is aborted."""

    def start(comm, x):
        options = {"send": {"dest": 1}, "sparse_allreduce": {"density": 0.01}}.get(call, {})
        return getattr(comm, call)(x, **options)

    async def waiting(comm):
        await (start(comm, device.tensor(torch.ones(1000))) if comm.rank == 0 else other(comm))

    def other(comm):
        if call == "solo_allreduce":
            return comm.barrier()
        return comm.recv(torch.ones(1000), source=0) if call == "send" else start(comm, torch.ones(1000))

    async def overdue(late, comm):
        reason = r"missing: rank 0\b[^;]*, and its tensor has not arrived from fake:0"
        with asyncoll.deadline(0.1 if comm.rank == late else 60), pytest.raises(DeadlineError, match=reason) as caught:
            await waiting(comm)
        has_not_called = call == "solo_allreduce" and late == 0
        assert caught.value.missing == ((0, 1) if has_not_called else (0,))

    async def aborted(comm):
        if comm.rank:
            comm.abort("enough")
        with pytest.raises(AbortedError, match="enough"):
            await waiting(comm)

    for main in (partial(overdue, 0), partial(overdue, 1), aborted):
        with fake_device(0, "program") as device:
            device.refuse_pins()  # pinned memory would have to wait for the end of its copies
            run_ranks(2, main, way)


def test_a_rank_is_missing_while_the_first_of_its_calls_has_no_tensor():
    """The second call of the operation, of an ordinary tensor, waits for its turn."""

    async def main(comm):
        x = torch.ones(10)
        if comm.rank == 0:
            calls = [comm.majority_allreduce(each, name="r") for each in (device.tensor(torch.ones(10)), x)]
        with asyncoll.deadline(0.1 if comm.rank else 60), pytest.raises(DeadlineError) as caught:
            await (asyncio.gather(*calls) if comm.rank == 0 else comm.majority_allreduce(x, name="r"))
        assert (caught.value.arrived, caught.value.missing) == ((1,), (0,))

    with fake_device(0, "program") as device:
        device.refuse_pins()
        run_ranks(2, main, "inproc")


async def inside_of_a_task(call):
    return await call


def test_a_cancelled_call_has_released_its_tensor(way):
    with fake_device(0, "program") as device:
        device.refuse_pins()

        async def main(comm):
            x = device.tensor(torch.ones(1000))
            if comm.rank:
                call = asyncio.ensure_future(inside_of_a_task(comm.allreduce(x)))
                await asyncio.sleep(0)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                increment(device, x)  # while it is copied
            else:
                with pytest.raises(AbortedError):
                    await comm.allreduce(torch.ones(1000))

        run_ranks(2, main, way)


def memory_of(array):
    """The array whose end is the end of the memory."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


@pytest.mark.parametrize("name", ["allreduce", "allgather", "solo_allreduce"])
def test_a_call_that_is_over_keeps_no_memory(name):
    """Not even until Python looks for cycles."""

    async def main(comm):
        x = device.tensor(torch.ones(1000))
        call = getattr(comm, name)(x)  # is kept, as a handle may be
        gone = [weakref.ref(x)]
        await call
        while not await asyncio.sleep(0) and device.turn():
            pass
        gone += [weakref.ref(memory_of(copy.host)) for copy in device._copying]
        device._copying.clear()
        del x
        await comm.barrier()
        assert [each() for each in gone] == [None] * len(gone)
        del call

    with fake_device(0, "loop") as device:
        gc.collect()
        gc.disable()
        try:
            run_ranks(2, main)
        finally:
            gc.enable()


def test_a_call_of_which_a_tensor_cannot_begin(monkeypatch):
    """What the program queues comes after the copies of the tensors before it, as the device notices."""
    with fake_device(0, "program") as device:
        device.refuse_pins()
        mark = device.mark

        def mark_once(x):
            monkeypatch.setattr(device, "mark", fail)
            return mark(x)

        def fail(x):
            raise OSError("no such bus")

        async def main(comm):
            xs = [device.tensor(torch.ones(1000)) for _ in range(2)]
            monkeypatch.setattr(device, "mark", mark_once)
            with pytest.raises(DeviceError, match="fake:0 has failed: OSError: no such bus"):
                comm.solo_allreduce(xs)
            increment(device, xs[0])

        run_ranks(1, main, "inproc")


# -- rounds ---------------------------------------------------------------------------------------


ROUNDS = {
    "solo": lambda comm, x, **rules: comm.solo_allreduce(x, name="r", **rules),
    "majority": lambda comm, x, **rules: comm.majority_allreduce(x, name="r", **rules),
    "quorum": lambda comm, x, **rules: comm.quorum_allreduce(x, name="r", quorum=2, **rules),
}


async def contributed(comm, call, make, values, calls, rng):
    """The sum of the results of all rounds, to which this rank has contributed `calls` times."""
    total = 0.0
    for number in range(calls):
        await asyncio.sleep(rng.random() * 0.003)
        reduction = await call(comm, make(number), history=200)
        total += sum(values(result)[0] for result in reduction.results())
    last = await comm.join("r", make(0))
    return total + sum(values(result)[0] for result in last.results()) if last is not None else total


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("call", ROUNDS.values(), ids=ROUNDS)
def test_every_contribution_enters_one_round(call, seed):
    """Every second call of rank 1, and every call of the others, has tensors of a device."""
    size, calls = 2 + seed % 5, 12

    async def main(comm):
        with fake_device(seed, "loop", f"fake:{comm.rank}") as device:

            def make(number):
                x = torch.full((40_000 if seed % 2 else 10,), float(number + 1))
                if comm.rank == 1 and number % 2:
                    return x
                device.tensor(x)
                increment(device, x)
                return x

            def values(x):
                return device.values(x) if device.holds(x) else x.numpy()

            rng = np.random.default_rng([seed, comm.rank])
            total = await contributed(comm, call, make, values, calls, rng)
            await comm.barrier()
        return total

    of_rank = sum(range(1, calls + 1)) + calls
    expected = of_rank * size - calls // 2
    assert simulate(size, main, seed=seed).results == [expected] * size


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("opened", OPENED)
def test_a_rank_joins_after_its_calls(opened, transport):
    """Its own calls are under way, with tensors that have not arrived."""
    with opened(2) as device:

        def values(x):
            return device.values(x) if device.holds(x) else x.numpy()

        async def total(comm, name, given):
            calls = [comm.solo_allreduce(started(device, 0), name=name, history=9) for _ in range(3)]
            last = await comm.join(name, given)
            of_calls = [sum(values(x)[0] for x in (await call).results()) for call in calls]
            return sum(of_calls) + sum(values(x)[0] for x in (last.results() if last else ()))

        async def main(comm):
            return [await total(comm, "r", started(device, 0)), await total(comm, "s", torch.zeros(30_000))]

        assert run_ranks(3, main, transport) == [[3 * 3 * 2] * 2] * 3


@pytest.mark.parametrize(("size", "transport"), [(1, "shm"), (2, "zmq"), (2, "shm")])
def test_a_call_does_not_overtake_one_whose_tensor_is_arriving(size, transport):
    """Arrays of numpy, of which the operation has seen several, take the shortest way otherwise."""

    async def main(comm):
        with fake_device(0, "program", f"fake:{comm.rank}") as device:
            device.refuse_pins()
            for _ in range(4):
                await comm.solo_allreduce(np.ones(10), name="r")
            x = device.tensor(torch.ones(10, dtype=torch.float64))
            first = comm.solo_allreduce(x, name="r")
            later = [asyncio.ensure_future(comm.solo_allreduce(np.ones(10), name="r")) for _ in range(3)]
            for _ in range(10):
                await asyncio.sleep(0)
            assert not any(call.done() for call in later)
            while device.turn():
                pass
            rounds = [(await call).round for call in (first, *later)]
            assert rounds == sorted(set(rounds))
            assert device.values(x)[0]
            await comm.barrier()

    run_ranks(size, main, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("opened", OPENED)
def test_rounds_on_a_thread(opened, transport):
    with opened(3) as device:

        async def main(comm):
            rng = np.random.default_rng(comm.rank)
            make = partial(started, device)
            return await contributed(comm, ROUNDS["solo"], make, device.values, 10, rng)

        assert run_ranks(3, main, transport) == [3 * (55 + 10)] * 3


def started(device, number):
    x = device.tensor(torch.full((30_000,), float(number + 1)))
    increment(device, x)
    return x


# -- the end of a world -----------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_world_ends_after_the_collectives_that_nothing_awaits(size, transport):
    with fake_device() as device:

        async def main(comm):
            part = await comm.split(0)
            xs = [move(torch.ones(30_000)) for move in (lambda x: x, device.tensor) for _ in range(2)]
            return [(x, (part if number % 2 else comm).allreduce(x)) for number, x in enumerate(xs)]

        for x, call in chain.from_iterable(run_ranks(size, main, transport)):
            assert ((device.values(x) if device.holds(x) else x.numpy()) == size).all()
            call.close()


@pytest.mark.parametrize("shared_memory", [False, True])
def test_a_rank_that_leaves_hears_of_a_collective_that_fails_and_that_nothing_awaits(shared_memory):
    started = []

    async def main(comm):
        if comm.rank == 0:
            await asyncio.sleep(1.0)  # of virtual time: the other ranks wait in the end of the world
            comm.abort("enough")
        else:
            started.append(comm.allreduce(torch.ones(1000)))

    with pytest.raises(asyncoll.AbortedError, match="enough"):
        simulate(3, main, shared_memory=shared_memory)
    for call in started:
        call.close()


@pytest.mark.parametrize("shared_memory", [False, True])
def test_a_collective_that_one_rank_does_not_make_fails_as_that_rank_leaves(shared_memory):
    started = []

    async def main(comm):
        part = await comm.split(0)
        if comm.rank == 0:
            started.append(part.allreduce(torch.ones(100_000)))

    with pytest.raises(asyncoll.PeerLostError, match="rank 1 is gone: it has left: its program has ended"):
        simulate(2, main, shared_memory=shared_memory)
    for call in started:
        call.close()


@pytest.mark.parametrize("of_world", [False, True])
def test_a_copy_back_of_a_collective_that_nothing_awaits_fails(of_world):
    started = []
    with fake_device() as device:

        async def main(comm):
            part = comm if of_world else await comm.split(0)
            if comm.rank == 0:
                device.fail_copy(1, OSError("no such bus"))  # the first fetches the tensor
            started.append(part.allreduce(device.tensor(torch.ones(1000)) if comm.rank == 0 else torch.ones(1000)))

        with pytest.raises(asyncoll.DeviceError, match="rank 0: fake:0 has failed: OSError: no such bus"):
            run_ranks(2, main, "shm")
        for call in started:
            call.close()


async def leaves_with_a_copy_under_way(comm, device):
    """The copy back to the device has not begun."""
    call = asyncio.ensure_future(comm.allreduce(device.tensor(torch.ones(1000))))
    while not call.done():
        device.turn()
        await asyncio.sleep(0)
    await call


def test_a_world_ends_after_the_copies_that_are_under_way():
    """Otherwise the memory that they use would be unpinned, which the device notices."""
    with fake_device(0, "program") as device:

        async def turn():
            for _ in range(20):  # the rank is leaving meanwhile
                await asyncio.sleep(0)
                assert stagers
            while device.turn():
                await asyncio.sleep(0)

        async def main(comm):
            await leaves_with_a_copy_under_way(comm, device)
            return asyncio.ensure_future(turn())

        assert run_ranks(1, main, "inproc")[0].done()


def test_memory_stays_pinned_when_its_copies_do_not_end(monkeypatch, caplog):
    monkeypatch.setattr(mirrors, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(world, "_RETURN_S", 0.0)
    with pytest.raises(Hazard, match="1 blocks were never unpinned"), fake_device(0, "program") as device:
        with pytest.raises(DeviceError, match="rank 0: fake:0 has not taken all results 0 s after the last call"):
            run_ranks(1, lambda comm: leaves_with_a_copy_under_way(comm, device), "shm")
    assert "fake:0 has not ended its work 0 s after rank 0 has left the world" in caplog.text


class Back:
    """What it was told, as `tensors.staged.CopiesBack`."""

    def __init__(self):
        self.under_way, self.errors = 0, []

    def begun(self):
        self.under_way += 1

    def ended(self, error):
        self.under_way -= 1
        self.errors += [error] if error else []


@contextlib.contextmanager
def staged_tensor(device):
    """A tensor, its mirror, and what its copies have told. All copies are over in the end, and no memory is pinned."""
    stager, x, back = DeviceStager(device, RegisteredMemory(None, None).pages), device.tensor(torch.zeros(1000)), Back()
    mirror = stager.stage(x, is_read=False)
    mirror.begin(back)
    yield x, mirror, back
    device.finish()
    asyncio.run(stager.close())


def test_work_that_is_queued_is_under_way_until_its_end():
    with fake_device(0, "program") as device, staged_tensor(device) as (x, mirror, back):
        for number in (1, 2):
            mirror.queue(lambda x: x.add_(1), x)
            made = mirror.made(lambda into, x: into.copy_(x), "float32", (1000,), [x])
            assert (back.under_way, len(mirror._stager._under_way)) == (2, 2)
            mirror.join()
            assert (device.values(made) == number).all()
            assert (back.under_way, back.errors, mirror._stager._under_way) == (0, [], set())


def test_work_that_is_queued_and_fails_is_told():
    with fake_device(0, "program") as device, staged_tensor(device) as (x, mirror, back):
        mirror.queue(lambda x: x.add_(torch.zeros(3)), x)
        mirror.join()
        device.finish()
        assert [type(error) for error in back.errors] == [DeviceError]
        assert "fake:0 has failed: RuntimeError: The size of tensor" in str(back.errors[0])


def test_results_go_from_the_memory_that_they_were_made_in():
    """Other arrays are copied once, into memory that is pinned."""
    with fake_device(0, "program") as device, staged_tensor(device) as (x, mirror, _):
        operand, pinned = Operand(x, mirror.mirror.view(np.float32), "float32", (1000,), copied=True, staged=mirror), []
        rooms = [mirror.room(400), operand.room(100).view(np.uint8)]
        for each in (*rooms, np.zeros(400, np.uint8)):
            each[:] = 1
            made = mirror.like(each, "uint8", (400,))
            host = device._copying[-1].host
            assert np.shares_memory(host, each) == any(each is room for room in rooms)
            pinned.append(any(first <= address_of(host) < first + size for first, size in device._pinned.items()))
            mirror.join()
            assert (device.values(made) == 1).all()
        assert pinned == [True] * 3
        for may_share in (False, True):
            mirror.defer(may_share=may_share)
            known = set(mirror._rooms)
            assert (address_of(mirror.room(400)) in mirror._rooms - known) != may_share


def test_results_need_memory_of_the_host_where_ranks_share_none_of_devices(monkeypatch):
    monkeypatch.setenv("ASYNCOLL_SIZES", WINDOWS)
    asked, defer = {}, Mirror.defer

    def spied(mirror, *, may_share):
        asked.setdefault(id(mirror._stager), []).append(may_share)
        defer(mirror, may_share=may_share)

    monkeypatch.setattr(Mirror, "defer", spied)

    async def main(comm):
        for _ in range(2):
            x = await comm.allgather(device.tensor(torch.ones(400_000)))
            assert (device.values(x) == 1).all()

    with fake_device() as device:
        device.refuse("share memory")
        run_ranks(2, main, "shm")
    firsts, seconds = zip(*asked.values(), strict=True)
    assert any(firsts)  # the first rank that asks, since none has refused before
    assert seconds == (False, False)


# -- in worlds of real processes ------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("case", "transport"), [("awaited", "shm"), ("waited", "zmq")])
def test_processes(forked_world, case, transport):
    """Fake devices share no memory between processes. In memory that is logged, once."""
    sizes = "short=8192,staged=65536"  # the longest tensors go in windows
    environment = os.environ | {"ASYNCOLL_FREEZE_S": "20", "ASYNCOLL_TRANSPORT": transport, "ASYNCOLL_SIZES": sizes}
    errors = ""
    for rank, each in enumerate(forked_world(environment, 3, SCRIPT, case)):
        code, out, err = each.end()
        assert (code, out) == (0, "passed\n"), (rank, err)
        errors += err
    refusals = re.findall(
        "(?m)^rank .: tensors of fake:0 go through memory of the host, (.*): a block is in another process, .*$", errors
    )
    calls = ["at all ranks", *(f"in messages and RPC from rank {rank}" for rank in range(3))]  # each logged at one rank
    assert sorted(refusals) == (calls if transport == "shm" else [])
    assert len(errors.splitlines()) == len(refusals)
