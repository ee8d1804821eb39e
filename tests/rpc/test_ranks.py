"""RPC between ranks, in every world: values, threads, limits, ends of calls, and refused input."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import dataclasses
import functools
import gc
import math
import mmap
import random
import sys
import threading
import typing
from collections.abc import AsyncIterator
from typing import Any, Protocol

import numpy as np
import pytest
import torch

from asyncoll import (
    AbortedError,
    AsyncollError,
    ClosedError,
    Communicator,
    DeadlineError,
    DeadlockError,
    MismatchError,
    PeerLostError,
    ProtocolError,
    RemoteError,
    UsageError,
    deadline,
)
from asyncoll.arguments import digest
from asyncoll.rpc import protocol, segments, window
from asyncoll.rpc.service import Method
from asyncoll.rpc.stub import Proxy
from asyncoll.runtime.deadlines import expiry, remaining_s
from asyncoll.testing import Crash, Network, run_ranks, simulate
from asyncoll.transport import wire
from tests.support.cases import SIZES, looped
from tests.support.processes import DEBUG, PATIENCE_S

NETWORK = Network(latency_s=1e-3, jitter_s=1e-3)


@dataclasses.dataclass
class Batch:
    inputs: torch.Tensor
    names: list[str]


@dataclasses.dataclass
class Unexpected:
    x: int


class Service:
    """The functions that ranks call in these tests."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.begun: list[Any] = []
        self.ended: list[Any] = []

    async def echo(self, x: Any) -> Any:
        return x

    async def add(self, a: int, b: int = 1, *more: int, **named: int) -> int:
        """The sum."""
        return a + b + sum(more) + sum(named.values())

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    async def double(self, batch: Batch) -> Batch:
        return Batch(batch.inputs * 2, batch.names * 2)

    async def fail(self, text: str) -> None:
        raise LookupError(text)

    async def unsendable(self) -> dict[str, object]:
        return {"x": [1, 2, 3, object()]}

    async def sleep(self, seconds: float) -> str:
        self.begun.append(seconds)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.ended.append(seconds)
        return "slept"

    async def count(self, n: int) -> AsyncIterator[int]:
        try:
            for i in range(n):
                self.begun.append(i)
                yield i
        finally:
            self.ended.append("count")

    async def stumble(self) -> AsyncIterator[int]:
        yield 1
        raise LookupError("stumbled")

    async def bounce(self, times: int) -> int:
        """Make a chain of `times` nested calls, each from one rank to the next."""
        if not times:
            return 0
        return 1 + await self._comm.rpc.call((self._comm.rank + 1) % self._comm.size, "bounce", times - 1)

    async def _private(self) -> None:
        raise AssertionError


def served(act):
    """A `main` that registers a Service at every rank, then runs `act(comm, service, next rank)` at rank 0."""

    async def main(comm: Communicator) -> Any:
        service = Service(comm)
        comm.rpc.register(service)
        result = None
        if comm.rank == 0:
            result = await act(comm, service, 1 % comm.size)
        await comm.barrier()
        return service if result is None else result

    return main


# -- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
def test_values_round_trip(run, size):
    value = {"t": torch.arange(12.0).reshape(3, 4).t(), "n": [np.ones((2, 3)), np.float16(3)], ("k", 1): {1, 2.5, b"x"}}

    async def act(comm, service, other):
        for rank in range(comm.size):
            arrived = await comm.rpc.call(rank, "echo", value)
            assert torch.equal(arrived["t"], value["t"])
            assert np.array_equal(arrived["n"][0], value["n"][0])
            assert arrived["n"][1] == 3
            assert arrived["k", 1] == {1, 2.5, b"x"}
            assert await comm.rpc.call(rank, "add", 1, 2, 3, more=4) == 10
            assert await comm.rpc.call(rank, "add", 1) == 2

    run(size, served(act))


@looped("nbytes", [0, 1, 100_000, 140_000, 1 << 20, (1 << 20) + 1, 20 << 20])
def test_tensors_of_any_length(run, nbytes):
    async def act(comm, service, other):
        x = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
        first, second = await comm.rpc.call(other, "echo", [x, x[: nbytes // 2]])
        assert torch.equal(first, x)
        assert torch.equal(second, x[: nbytes // 2])

    run(2, served(act))


def test_long_structures(run):
    async def act(comm, service, other):
        value = [float(i) for i in range(100_000)]
        assert await comm.rpc.call(other, "echo", value) == value

    run(2, served(act))


def test_a_call_of_a_rank_to_itself_copies(run):
    async def act(comm, service, other):
        x = {"x": np.ones(3), "long": np.ones(100_000)}
        arrived = await comm.rpc.call(0, "echo", x)
        arrived["x"] += 1
        arrived["long"] += 1
        assert x["x"][0] == x["long"][0] == 1

    run(1, served(act))


def test_dataclasses_arrive_where_annotations_name_them(run):
    async def act(comm, service, other):
        doubled = await comm.rpc.call(other, "double", Batch(torch.ones(2), ["a"]))
        assert isinstance(doubled, Batch)
        assert doubled.inputs.tolist() == [2, 2]
        assert doubled.names == ["a", "a"]

    run(2, served(act))


@pytest.fixture
def debug(monkeypatch):
    """Loops check that calls from other threads are safe."""
    for name, value in DEBUG.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("debug")
def test_plain_functions_run_off_the_loop_and_coroutines_on_it():
    async def main(comm):
        loop_runs = threading.Event()

        @comm.rpc.register
        def wait() -> int:
            assert loop_runs.wait(PATIENCE_S)
            return threading.get_ident()

        @comm.rpc.register
        async def go() -> int:
            loop_runs.set()
            return threading.get_ident()

        waiting = asyncio.ensure_future(comm.rpc.call(0, "wait"))
        await asyncio.sleep(0)
        here = await comm.rpc.call(0, "go")
        assert here == threading.get_ident() != await waiting

    run_ranks(1, main)


@pytest.mark.usefixtures("debug")
def test_many_plain_functions_can_wait_for_each_other():
    """There are more of them than threads in the default executor of a loop."""
    together = threading.Barrier(40, timeout=PATIENCE_S)

    async def main(comm):
        comm.rpc.register(lambda: together.wait() >= 0, name="meet")
        await comm.barrier()
        if comm.rank == 0:
            assert all(await asyncio.gather(*(comm.rpc.call(1, "meet") for _ in range(together.parties))))
        await comm.barrier()

    run_ranks(2, main)


def test_inline_functions_run_on_the_loop(run):
    async def main(comm):
        here = threading.get_ident()

        class Store:
            def where(self) -> bool:
                return threading.get_ident() == here

            def left(self) -> float | None:
                return remaining_s()

            def fail(self) -> None:
                raise ValueError("inline")

            def stop(self) -> None:
                raise StopIteration

        comm.rpc.register(Store(), name="store", inline=True)
        comm.rpc.register(lambda x, *, times: [x] * times, name="repeat", inline=True)
        await comm.barrier()
        other = (comm.rank + 1) % comm.size
        assert await comm.rpc.call(other, "store.where")
        assert await comm.rpc.call(other, "store.left") is None
        with deadline(PATIENCE_S):
            assert 0 < await comm.rpc.call(other, "store.left") <= PATIENCE_S
        assert await comm.rpc.call(other, "repeat", (1, "x"), times=2) == [(1, "x")] * 2
        with pytest.raises(RemoteError, match=r"ValueError.*inline"):
            await comm.rpc.call(other, "store.fail")
        with pytest.raises(RemoteError, match="StopIteration"):
            await comm.rpc.call(other, "store.stop")
        await comm.rpc.notify(other, "store.where")
        await comm.barrier()

    run(3, main)


def test_only_plain_functions_are_inline(run):
    async def main(comm):
        async def coroutine() -> None: ...

        async def items() -> AsyncIterator[int]:
            yield 1

        for what in (coroutine, items, Service(comm)):
            with pytest.raises(UsageError, match="it runs on the loop anyway: `inline` is for plain functions"):
                comm.rpc.register(what, inline=True)
        assert [method.name for method in await comm.rpc.methods(comm.rank)] == []

    run(1, main)


@pytest.mark.parametrize("size", SIZES)
def test_a_function_has_one_task_and_a_context_of_its_own(run, size):
    """Also if its first step is made together with those of other calls."""
    mine: contextvars.ContextVar[int] = contextvars.ContextVar("mine", default=-1)

    async def main(comm):
        @comm.rpc.register
        async def keep(number: int, turns: int) -> tuple[int, bool, int]:
            before, task = mine.get(), asyncio.current_task()
            mine.set(number)
            for _ in range(turns):
                await asyncio.sleep(0)
            return before, asyncio.current_task() is task, mine.get()

        await comm.barrier()
        other = (comm.rank + 1) % comm.size
        calls = [(number, number % 3) for number in range(20)]
        found = await asyncio.gather(*(comm.rpc.call(other, "keep", *call) for call in calls))
        assert found == [(-1, True, number) for number, _ in calls]
        await comm.barrier()

    run(size, main)


def test_a_timeout_in_a_function_ends_no_other_call(run):
    async def main(comm):
        @comm.rpc.register
        async def hurry(seconds: float) -> str:
            try:
                async with asyncio.timeout(seconds):
                    await asyncio.Event().wait()
            except TimeoutError:
                return "late"
            return "never"

        @comm.rpc.register
        async def echo(x: int) -> int:
            return x

        await comm.barrier()
        other = (comm.rank + 1) % comm.size
        late = [asyncio.ensure_future(comm.rpc.call(other, "hurry", 0.001 * n)) for n in range(5)]
        assert [await comm.rpc.call(other, "echo", n) for n in range(50)] == list(range(50))
        assert await asyncio.gather(*late) == ["late"] * 5
        await comm.barrier()

    run(2, main)


def test_a_function_that_cancels_its_own_task_ends_no_other_call(run):
    async def main(comm):
        @comm.rpc.register
        async def give_up(waits: bool) -> str:
            asyncio.current_task().cancel()
            if waits:
                await asyncio.Event().wait()
            return "over"

        @comm.rpc.register
        async def echo(x: int) -> int:
            await asyncio.sleep(0)
            return x

        await comm.barrier()
        if comm.rank == 0:
            calls = [comm.rpc.call(1, *call) for n in range(9) for call in (("give_up", n % 2 == 0), ("echo", n))]
            found = await asyncio.gather(*calls, return_exceptions=True)
            assert found[1::2] == list(range(9))
            assert all(isinstance(error, RemoteError) for error in found[::4])
        await comm.barrier()

    run(2, main)


@looped("world", ["simulated", "inproc", "zmq", "shm"])
def test_a_call_that_the_program_of_its_callee_cancels_is_answered_by_an_error(world):
    """The program cancels the tasks of functions, as asyncio.run does at its end, after any number of turns.

    A function may be sending its result or its exception then, and a stream its last item: it is not over.
    """

    async def main(comm):
        def cancel_after(turns: int) -> None:
            task, loop = asyncio.current_task(), asyncio.get_running_loop()

            def turn(left: int) -> None:
                if left:
                    loop.call_soon(turn, left - 1)
                else:
                    task.cancel()

            turn(turns)

        @comm.rpc.register
        async def result(turns: int, elements: int) -> np.ndarray:
            cancel_after(turns)
            return np.full(elements, turns)

        @comm.rpc.register
        async def refusal(turns: int, elements: int) -> None:
            cancel_after(turns)
            raise ValueError("x" * elements)

        @comm.rpc.register
        async def items(turns: int, elements: int) -> AsyncIterator[np.ndarray]:
            cancel_after(turns)
            for _ in range(3):
                yield np.full(elements, turns)

        async def ask(name: str, turns: int, elements: int) -> None:
            with contextlib.suppress(RemoteError):
                if name == "items":
                    found = [item async for item in comm.rpc.stream(1, name, turns, elements)]
                    assert len(found) == 3
                else:
                    assert (await comm.rpc.call(1, name, turns, elements) == turns).all()

        await comm.barrier()
        if comm.rank == 0:
            names, lengths = ("result", "refusal", "items"), (1, 1 << 16, 1 << 20)
            await asyncio.gather(*[ask(name, n, x) for name in names for x in lengths for n in range(12)])
        await comm.barrier()

    if world == "simulated":
        simulate(2, main, Network(latency_s=1e-3, bandwidth_bytes_per_s=1e9))
    else:
        run_ranks(2, main, world)


def test_a_coroutine_function_behind_a_plain_decorator_is_awaited(run):
    def decorated(fn):
        @functools.wraps(fn)
        def wrapper(*args):
            return fn(*args)

        return wrapper

    async def main(comm):
        @decorated
        async def double(x: int) -> int:
            await asyncio.sleep(0)
            return 2 * x

        comm.rpc.register(double)
        comm.rpc.register(double, name="inline", inline=True)
        await comm.barrier()
        assert await comm.rpc.call(1 - comm.rank, "double", 4) == 8
        assert await comm.rpc.call(1 - comm.rank, "inline", 4) == 8
        await comm.barrier()

    run(2, main)


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_call_all_ranks_at_once(run, size):
    async def main(comm):
        comm.rpc.register(Service(comm))
        found = await comm.rpc.call_all(range(comm.size), "add", comm.rank, b=10)
        assert found == dict.fromkeys(range(comm.size), comm.rank + 10)
        await comm.barrier()

    run(size, main)


def test_call_all_raises_all_errors_as_one_group(run):
    async def main(comm):
        @comm.rpc.register
        async def odd() -> None:
            if comm.rank % 2:
                raise LookupError(f"I am {comm.rank}")

        await comm.barrier()
        with pytest.raises(ExceptionGroup, match="odd failed at ranks 1, 3") as raised:
            await comm.rpc.call_all(range(5), "odd")
        assert [error.rank for error in raised.value.exceptions] == [1, 3]
        with pytest.raises(ExceptionGroup, match=r"odd failed at rank 1$"):
            await comm.rpc.call_all([0, 1], "odd")
        await comm.barrier()

    run(5, main)


def test_call_all_refuses_a_rank_named_twice():
    async def act(comm, service, other):
        with pytest.raises(UsageError, match="sleep: rank 1 is named 2 times"):
            await comm.rpc.call_all([0, 1, 1], "sleep", 0)

    assert simulate(2, served(act)).results[1].begun == []


def test_a_call_waits_for_a_rank_that_has_not_opened_rpc():
    async def main(comm):
        if comm.rank == 1:
            await asyncio.sleep(5)
            comm.rpc.register(Service(comm))
        else:
            assert await comm.rpc.call(1, "add", 1) == 2
        await comm.barrier()

    simulate(2, main)


def test_a_rank_that_never_opens_rpc_answers_as_it_leaves():
    async def main(comm):
        if comm.rank == 0:
            with pytest.raises(UsageError, match="rank 1: no function 'add': nothing is registered there"):
                await comm.rpc.call(1, "add", 1)

    simulate(2, main)


def test_each_communicator_has_its_own_functions(run):
    async def main(comm):
        comm.rpc.register(lambda: None, name="whole")
        half = await comm.split(comm.rank % 2)

        @half.rpc.register
        async def place() -> tuple[int, int]:
            return comm.rank, half.rank

        assert await half.rpc.call_all(range(half.size), "place") == {
            rank: (comm.rank % 2 + 2 * rank, rank) for rank in range(half.size)
        }
        with pytest.raises(UsageError, match="no function 'whole': there is place"):
            await half.rpc.call(0, "whole")
        await comm.barrier()

    run(4, main)


# -- notifications -------------------------------------------------------------------------------


def test_notifications_begin_in_order_and_are_bounded(run, caplog):
    async def main(comm):
        seen, running, most = [], 0, 0

        @comm.rpc.register
        async def note(number: int) -> None:
            nonlocal running, most
            seen.append(number)
            running += 1
            most = max(most, running)
            await asyncio.sleep(1e-4)
            running -= 1

        if comm.rank == 0:
            for number in range(1000):
                await comm.rpc.notify(1, "note", number)
            await comm.rpc.notify(1, "note", "wrong")
            while "of which its caller is not told" not in caplog.text:
                await asyncio.sleep(1e-3)
        await comm.barrier()
        if comm.rank == 1:
            assert seen == list(range(1000))
            assert 1 < most <= protocol.CALLS_MAX

    run(2, main)
    (record,) = (record for record in caplog.records if record.name == "asyncoll")
    assert "note failed, of which its caller is not told: note: number must be int, got str" in record.getMessage()
    caplog.clear()  # its traceback holds the world


def test_a_chain_of_notifications_may_be_infinite(simulated):
    """A notification has no waiting caller, so the limit of nested calls does not apply to it."""

    async def main(comm):
        arrived = asyncio.Event()

        @comm.rpc.register
        async def hand_on(hops: int) -> None:
            if hops:
                await comm.rpc.notify(1 - comm.rank, "hand_on", hops - 1)
            else:
                arrived.set()

        if comm.rank == 0:
            await comm.rpc.notify(0, "hand_on", 100)
            await arrived.wait()
        await comm.barrier()

    simulated(2, main)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_notifications_begin_before_their_sender_has_left(run, size):
    async def main(comm):
        begun = []

        @comm.rpc.register
        async def note(rank: int, number: int) -> None:
            begun.append((rank, number))

        for number in range(20):
            for rank in range(size):
                await comm.rpc.notify(rank, "note", comm.rank, number)
        return begun

    for begun in run(size, main):
        assert sorted(begun) == [(rank, number) for rank in range(size) for number in range(20)]


@pytest.mark.parametrize("how", ["stop", "stop_and_go_on", "stop_in_thread"])
def test_a_notification_may_end_the_program_of_its_rank(run, how):
    """Its caller leaves without an error, too."""

    async def main(comm):
        ended, loop = asyncio.Event(), asyncio.get_running_loop()

        @comm.rpc.register
        async def stop() -> None:
            ended.set()

        @comm.rpc.register
        async def stop_and_go_on() -> None:
            ended.set()
            await asyncio.Event().wait()

        @comm.rpc.register
        def stop_in_thread() -> None:
            loop.call_soon_threadsafe(ended.set)

        if comm.rank == 0:
            await comm.rpc.notify(1, how)
        else:
            await ended.wait()

    run(2, main)


# -- streams -------------------------------------------------------------------------------------


@looped("n", [0, 1, 16, 17, 500])
def test_streams(run, n):
    async def act(comm, service, other):
        assert [item async for item in comm.rpc.stream(other, "count", n)] == list(range(n))

    run(2, served(act))


def test_any_async_iterator_streams(run):
    class Countdown:
        def __init__(self, n: int) -> None:
            self._left = n

        def __aiter__(self):
            return self

        async def __anext__(self) -> int:  # it has no `aclose`, unlike a generator
            if not self._left:
                raise StopAsyncIteration
            self._left -= 1
            return self._left

    def count_down(n: int) -> AsyncIterator[int]:
        return Countdown(n)

    async def main(comm):
        comm.rpc.register(count_down)
        await comm.barrier()
        assert [item async for item in comm.rpc.stream(1 - comm.rank, "count_down", 3)] == [2, 1, 0]
        await comm.barrier()

    run(2, main)


def test_a_stream_waits_for_its_reader():
    async def act(comm, service, other):
        items = comm.rpc.stream(other, "count", 1000)
        async for item in items:
            await asyncio.sleep(10)
            if item == 100:
                break
        await items.aclose()

    service = simulate(2, served(act), NETWORK).results[1]
    assert 100 < len(service.begun) <= 100 + protocol.ITEMS_MAX + 1
    assert service.ended == ["count"]


def test_a_stream_of_long_items_waits_sooner():
    async def main(comm):
        begun = 0

        @comm.rpc.register
        async def tensors() -> AsyncIterator[np.ndarray]:
            nonlocal begun
            for _ in range(10):
                begun += 1
                yield np.ones(5 << 20, np.uint8)

        if comm.rank == 0:
            async with contextlib.aclosing(comm.rpc.stream(1, "tensors")) as items:
                await anext(items)
                await asyncio.sleep(10)
        else:
            await asyncio.sleep(5)
            assert begun == 2
        await comm.barrier()

    simulate(2, main)


def test_leaving_a_stream_early_cancels_it(run):
    async def act(comm, service, other):
        async for item in comm.rpc.stream(other, "count", 10**9):
            if item == 20:
                break
        gc.collect()
        while not await comm.rpc.call(other, "has_ended"):
            await asyncio.sleep(1e-3)

    async def main(comm):
        service = Service(comm)
        comm.rpc.register(lambda: bool(service.ended), name="has_ended")
        comm.rpc.register(service)
        if comm.rank == 0:
            await act(comm, service, 1)
        await comm.barrier()

    run(2, main)


def test_errors_in_streams(run):
    async def act(comm, service, other):
        items = comm.rpc.stream(other, "stumble")
        assert await anext(items) == 1
        with pytest.raises(RemoteError, match="LookupError at rank 1: stumbled"):
            await anext(items)
        with pytest.raises(UsageError, match="count streams: use `stream`"):
            await comm.rpc.call(other, "count", 3)
        with pytest.raises(UsageError, match="echo does not stream: use `call`"):
            await anext(comm.rpc.stream(other, "echo", 3))

    run(2, served(act))


# -- cancellation and deadlines ------------------------------------------------------------------


def test_cancelling_a_call_cancels_the_function():
    async def act(comm, service, other):
        call = asyncio.ensure_future(comm.rpc.call(other, "sleep", 1e6))
        await asyncio.sleep(1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.sleep(1)

    report = simulate(2, served(act), NETWORK)
    assert report.results[1].ended == [1e6]
    assert report.virtual_s < 10


def test_a_deadline_ends_the_call_at_both_ends():
    async def act(comm, service, other):
        with pytest.raises(DeadlineError, match="sleep at rank 1 did not answer before the deadline"):
            with deadline(2):
                await comm.rpc.call(other, "sleep", 1e6)
        assert await comm.rpc.call(other, "sleep", 1) == "slept"

    report = simulate(2, served(act), NETWORK)
    assert report.results[1].ended == [1e6, 1]
    assert report.virtual_s < 4


def test_nested_calls_inherit_the_deadline():
    ends = {}

    async def main(comm):
        @comm.rpc.register
        async def chain(rank: int) -> None:
            if rank == comm.size:
                await asyncio.sleep(1e6)
            try:
                await comm.rpc.call(rank, "chain", rank + 1)
            except DeadlineError:
                ends[comm.rank] = asyncio.get_running_loop().time()
                raise

        if comm.rank == 0:
            with pytest.raises(DeadlineError), deadline(3):
                await comm.rpc.call(1, "chain", 2)
        await asyncio.sleep(10)

    simulate(4, main, NETWORK)
    assert all(2.9 < end < 3.1 for end in ends.values())


USES = {
    "call": lambda rpc: rpc.call(1, "sleep", 0),
    "notification": lambda rpc: rpc.notify(1, "sleep", 0),
    "stream": lambda rpc: anext(rpc.stream(1, "count", 1)),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_an_expired_deadline_sends_nothing(use):
    async def act(comm, service, other):
        with deadline(1):
            await asyncio.sleep(2)
            with pytest.raises(DeadlineError):
                await use(comm.rpc)
        await asyncio.sleep(1)  # a message would have arrived by then

    assert simulate(2, served(act)).results[1].begun == []


def test_a_function_has_only_the_deadline_of_its_caller(simulated):
    async def main(comm):
        async def left() -> float | None:
            return remaining_s()

        with deadline(1):
            comm.rpc.register(left)  # the first use of comm.rpc, which continues after this block
        await comm.barrier()
        assert await comm.rpc.call(1 - comm.rank, "left") is None
        with deadline(100):
            assert 99 < await comm.rpc.call(1 - comm.rank, "left") <= 100
        await comm.barrier()

    simulated(2, main)


@pytest.mark.parametrize("seconds", [math.inf, 1e3])
def test_a_deadline_inside_the_function_is_a_remote_error(simulated, seconds):
    """The caller has no deadline, or time left, so this is not the deadline of the caller."""

    async def act(comm, service, other):
        failed = pytest.raises(RemoteError, match="DeadlineError at rank 1: sleep at rank 1 did not answer")
        with deadline(seconds), failed:
            await comm.rpc.call(1, "hurry")

    async def main(comm):
        @comm.rpc.register
        async def hurry() -> None:
            with deadline(1):
                await comm.rpc.call(1, "sleep", 1e6)

        return await served(act)(comm)

    simulated(2, main)


def test_an_infinite_deadline_is_no_deadline():
    """It sets no timer: a timer would hide the deadlock."""

    async def main(comm):
        comm.rpc.register(asyncio.Event().wait, name="wait")
        with deadline(5), deadline(math.inf):
            assert 4 < remaining_s() <= 5
        with deadline(math.inf):
            assert expiry.get() is None
            await comm.rpc.call(1 - comm.rank, "wait")

    with pytest.raises(DeadlockError):
        simulate(2, main)


def test_streams_and_notifications_have_deadlines_too():
    async def act(comm, service, other):
        with deadline(1), pytest.raises(DeadlineError):
            async for _ in comm.rpc.stream(other, "forever"):
                pass
        with deadline(1), pytest.raises(DeadlineError):
            await asyncio.gather(*(comm.rpc.notify(other, "sleep", 1e6) for _ in range(2 * protocol.CALLS_MAX)))

    async def main(comm):
        @comm.rpc.register
        async def forever() -> AsyncIterator[int]:
            yield 1
            await asyncio.sleep(1e6)

        return await served(act)(comm)

    assert simulate(2, main, NETWORK).virtual_s < 10


@looped("seed", range(40))
def test_the_call_after_a_cancelled_call_is_right(seed):
    """25 calls for each seed, 1,000 in all, cancelled at random points of virtual time."""
    draw = random.Random(seed)

    async def main(comm):
        service = Service(comm)
        comm.rpc.register(service)
        other = (comm.rank + 1) % comm.size
        for number in range(25):
            x = np.full(draw.choice([1, 1000, 300_000]), number)
            kind = draw.choice(["echo", "sleep", "count", "bounce"])
            victim = asyncio.ensure_future(use(comm, other, kind, x))
            await asyncio.sleep(draw.uniform(0, 8e-3))
            victim.cancel()
            await asyncio.wait([victim])
            if not victim.cancelled():
                victim.result()
            assert np.array_equal(await comm.rpc.call(other, "echo", x), x)
            assert [i async for i in comm.rpc.stream(other, "count", 3)] == [0, 1, 2]
        await comm.barrier()
        await asyncio.sleep(1)
        exchange = comm.rpc._exchange
        assert not exchange.client._pending
        assert not exchange.server._calls
        assert not exchange.server._counts
        await comm.barrier()

    simulate(3, main, Network(latency_s=1e-3, jitter_s=1e-3, bandwidth_bytes_per_s=1e9), seed=seed)


@looped("turns", range(0, 60, 3))
def test_cancelling_after_any_number_of_turns_of_a_real_loop(turns):
    async def act(comm, service, other):
        for kind in ("echo", "sleep", "count", "bounce") * 3:
            for x in (np.ones(1), np.ones(300_000)):
                victim = asyncio.ensure_future(use(comm, other, kind, x))
                for _ in range(turns):
                    await asyncio.sleep(0)
                victim.cancel()
                await asyncio.wait([victim])
                assert victim.cancelled() or victim.result() is None
                assert np.array_equal(await comm.rpc.call(other, "echo", x), x)
        while comm.rpc._exchange.client._pending:
            await asyncio.sleep(0)

    run_ranks(2, served(act))


async def use(comm, other, kind, x):
    if kind == "echo":
        assert np.array_equal(await comm.rpc.call(other, "echo", x), x)
    elif kind == "count":
        assert [i async for i in comm.rpc.stream(other, "count", 50)] == list(range(50))
    else:
        await comm.rpc.call(other, kind, 5)


# -- bounds --------------------------------------------------------------------------------------


def test_calls_under_way_to_one_rank_are_bounded():
    async def main(comm):
        running = most = 0

        @comm.rpc.register
        async def work() -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(1)
            running -= 1

        if comm.rank == 0:
            await asyncio.gather(*(comm.rpc.call(1, "work") for _ in range(3 * protocol.CALLS_MAX)))
        await comm.barrier()
        return most

    assert simulate(2, main).results[1] == protocol.CALLS_MAX


def test_arguments_under_way_to_a_slow_rank_are_bounded():
    async def main(comm):
        held = most = 0

        @comm.rpc.register
        async def keep(x: np.ndarray) -> None:
            nonlocal held, most
            held += x.nbytes
            most = max(most, held)
            await asyncio.sleep(1)
            held -= x.nbytes

        if comm.rank == 0:
            x = np.ones(10 << 20, np.uint8)
            await asyncio.gather(*(comm.rpc.call(1, "keep", x) for _ in range(20)))
            await comm.rpc.call(1, "keep", np.ones(window.BYTES_MAX + 1, np.uint8))
        await comm.barrier()
        return most

    assert simulate(2, main).results[1] == window.BYTES_MAX + 1


def test_ranks_that_call_each_other_back_and_forth(run):
    async def act(comm, service, other):
        assert await comm.rpc.call(other, "bounce", 20) == 20

    for size in (1, 2, 3):
        run(size, served(act))


def test_endless_recursion_is_an_error():
    async def act(comm, service, other):
        with pytest.raises(RemoteError, match="bounce: 32 calls wait for each other already: does one call itself"):
            await comm.rpc.call(other, "bounce", 1000)

    simulate(2, served(act))


def test_nested_calls_do_not_deadlock_over_slots():
    async def act(comm, service, other):
        calls = (comm.rpc.call(other, "bounce", 5) for _ in range(2 * protocol.CALLS_MAX))
        assert set(await asyncio.gather(*calls)) == {5}

    simulate(2, served(act))


# -- bad input -----------------------------------------------------------------------------------


BAD = {
    "unknown": (("ech",), UsageError, r"rank 1: no function 'ech': there is echo"),
    "private": (("_private",), UsageError, r"rank 1: no function '_private'"),
    "too few": (
        ("add",),
        UsageError,
        r"rank 1: add\(a: int, b: int = ..., \*more: int, \*\*named: int\) -> int: missing",
    ),
    "too many": (("echo", 1, 2), UsageError, r"rank 1: echo\(x: Any\) -> Any: too many positional"),
    "wrong": (("add", "x"), UsageError, r"rank 1: add: a must be int, got str"),
    "wrong more": (("add", 1, 2, 3.5), UsageError, r"rank 1: add: more must be int, got float"),
    "wrong dataclass": (("double", 3), UsageError, r"rank 1: double: batch must be Batch, got int"),
    "unexpected dataclass": (
        ("echo", Unexpected(1)),
        UsageError,
        r"rank 1: a dataclass Unexpected was received, which no annotation here",
    ),
    "unsendable": (("echo", [object()]), UsageError, r"echo: argument 1\[0\] is a <class 'object'>"),
    "unsendable result": (
        ("unsendable",),
        RemoteError,
        r"UsageError at rank 1: the result of unsendable\['x'\]\[3\] is a <class 'object'>, which cannot be sent",
    ),
    "raises": (
        ("fail", "no such key"),
        RemoteError,
        r"(?s)LookupError at rank 1: no such key.*raise LookupError\(text\)",
    ),
}


@looped(("arguments", "kind", "message"), BAD.values())
def test_bad_calls(run, arguments, kind, message):
    async def act(comm, service, other):
        with pytest.raises(kind, match=message):
            await comm.rpc.call(other, *arguments)
        assert await comm.rpc.call(other, "add", 1, 2) == 3

    run(2, served(act))


@pytest.mark.parametrize("elements", [4, 4000])
def test_a_tensor_whose_memory_was_released_is_refused(run, elements):
    """FSDP releases the storages of parameters. What is at their addresses then belongs to others."""

    async def act(comm, service, other):
        x = torch.ones(elements)
        x.untyped_storage().resize_(0)
        with pytest.raises(UsageError, match=r"echo: argument 1: the memory of this tensor was released"):
            await comm.rpc.call(other, "echo", x)
        x.untyped_storage().resize_(x.nbytes)
        assert torch.equal(await comm.rpc.call(other, "echo", x.fill_(2.0)), x)

    run(2, served(act))


def test_bad_ranks_and_registrations():
    def hidden() -> NotThere:  # type: ignore[name-defined]  # noqa: F821
        raise AssertionError

    def generator():
        yield 1

    async def main(comm):
        for rank in (-1, 2):
            with pytest.raises(UsageError, match=f"rank {rank} is not one of the ranks 0 to 1"):
                await comm.rpc.call(rank, "echo")
        for rank in ("0", 1.0, None):
            with pytest.raises(UsageError, match=f"a rank must be a whole number, got {rank!r}"):
                await comm.rpc.call(rank, "echo")
        register = comm.rpc.register
        register(Service(comm))
        for what, message in [
            (lambda: None, "a name is an identifier .* got '<lambda>': give `name`"),
            (Service(comm).echo, "echo is registered already"),
            (hidden, "annotations of hidden cannot be resolved .*NotThere"),
            (generator, "generator is a generator: make it `async def`"),
            (Calculator, "Calculator is a class: register an object of it"),
        ]:
            with pytest.raises(UsageError, match=message):
                register(what)
        register(Service(comm), name="second")
        assert await comm.rpc.call(comm.rank, "second.add", 1) == 2

    simulate(2, main)


def test_ranks_may_be_numbers_of_numpy(run):
    async def act(comm, service, other):
        assert await comm.rpc.call_all(np.arange(2), "add", 1) == {0: 2, 1: 2}

    run(2, served(act))


def test_an_exception_of_a_function_is_a_remote_error():
    async def main(comm):
        @comm.rpc.register
        async def deceive() -> None:
            raise ProtocolError("from somewhere else")

        for name in (3, "x" * 300):
            with pytest.raises(UsageError, match="a function is called by its name"):
                await comm.rpc.call(0, name)
        with pytest.raises(RemoteError, match="ProtocolError at rank 0: from somewhere else"):
            await comm.rpc.call(0, "deceive")

    simulate(2, main)


def test_the_traceback_begins_at_the_function():
    async def act(comm, service, other):
        with pytest.raises(RemoteError) as raised:
            await comm.rpc.call(other, "fail", "x")
        error = raised.value
        assert (error.rank, error.type_name, error.message) == (1, "LookupError", "x")
        assert "in fail" in error.traceback
        assert "in _outcome" not in error.traceback

    simulate(2, served(act))


# -- stubs ---------------------------------------------------------------------------------------


class Calculator:
    """Plain functions, which run in threads."""

    def add(self, a: int, b: int = 0) -> int:
        return a + b

    async def count(self, n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i


class RemoteCalculator(Protocol):
    """The same service, as a caller describes it."""

    async def add(self, a: int, b: int = 0) -> int: ...

    def count(self, n: int) -> AsyncIterator[int]: ...


class Fewer(Protocol):
    async def add(self, a: int) -> int: ...


class Renamed(Protocol):
    async def add(self, a: int, c: int = 0) -> int: ...


class Retyped(Protocol):
    async def add(self, a: int, b: int = 0) -> str: ...


class Missing(Protocol):
    async def subtract(self, a: int) -> int: ...


class Streamed(Protocol):
    def add(self, a: int, b: int = 0) -> AsyncIterator[int]: ...


class Demanding(Protocol):
    async def add(self, a: int, b: int, c: int) -> int: ...


def test_a_stub_stands_for_a_service(run):
    async def main(comm):
        comm.rpc.register(Calculator())
        comm.rpc.register(Service(comm), name="service")
        other: Proxy[RemoteCalculator] = comm.rpc.proxy((comm.rank + 1) % comm.size, RemoteCalculator)
        assert await other.add(1, 2) == 3
        assert await other.add(1, b=2) == 3
        assert [i async for i in other.count(4)] == [0, 1, 2, 3]
        assert await comm.rpc.proxy(0, Fewer).add(5) == 5
        with pytest.raises(AttributeError, match="RemoteCalculator has no public method 'ad'"):
            other.ad(1)  # type: ignore[attr-defined]
        assert "RemoteCalculator at rank" in repr(other)
        with pytest.raises(UsageError, match=r"Calculator.add is a plain function, .* make it `async def`"):
            comm.rpc.proxy(0, Calculator)
        await comm.barrier()

    run(2, main)


class Static:
    """Methods that need no object."""

    @staticmethod
    async def double(x: int) -> int:
        return 2 * x

    @classmethod
    async def triple(cls, x: int) -> int:
        return 3 * x

    @staticmethod
    async def count(n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i


def test_a_stub_has_static_and_class_methods_and_can_be_copied(run):
    async def main(comm):
        comm.rpc.register(Static())
        await comm.barrier()
        proxy = comm.rpc.proxy(1 - comm.rank, Static)
        for other in (proxy, copy.copy(proxy)):
            assert (await other.double(4), await other.triple(4)) == (8, 12)
            assert [item async for item in other.count(3)] == [0, 1, 2]
        await comm.barrier()

    run(2, main)


class Spelt:
    async def first(self, x: typing.Optional[int], more: typing.List[int]) -> typing.Dict[str, int]:  # noqa: UP006, UP045
        return dict.fromkeys(map(str, more), x or 0)


class SpeltOtherwise(Protocol):
    async def first(self, x: int | None, more: list[int]) -> dict[str, int]: ...


def test_a_stub_may_spell_its_types_differently():
    async def main(comm):
        comm.rpc.register(Spelt())
        await comm.barrier()
        assert await comm.rpc.proxy(1 - comm.rank, SpeltOtherwise).first(3, [1, 2]) == {"1": 3, "2": 3}
        await comm.barrier()

    simulate(2, main)


async def use_once(proxy):
    call = proxy.subtract if "Missing" in repr(proxy) else proxy.add
    await (anext(call(1)) if "Streamed" in repr(proxy) else call(1))


@pytest.mark.parametrize("stub", [Renamed, Retyped, Missing, Streamed, Demanding], ids=lambda stub: stub.__name__)
def test_a_stub_that_does_not_match(stub):
    async def main(comm):
        comm.rpc.register(Calculator())
        proxy = comm.rpc.proxy(1, stub)
        with pytest.raises(MismatchError, match=f"the stub {stub.__name__} says .* but at rank 1 there is"):
            await use_once(proxy)
        await comm.barrier()

    simulate(2, main)


def test_results_that_do_not_match_their_annotations():
    class Liar:
        async def add(self, a: int) -> int:
            return "no"  # type: ignore[return-value]

    async def main(comm):
        comm.rpc.register(Liar())
        with pytest.raises(UsageError, match="the result of add must be int, got str"):
            await comm.rpc.proxy(0, Fewer).add(1)

    simulate(1, main)


def test_methods_are_found():
    async def main(comm):
        comm.rpc.register(Service(comm))
        found: list[Method] = await comm.rpc.methods(0)
        shown = {method.name: str(method) for method in found}
        assert shown["count"] == "count(n: int) -> stream of int"
        assert shown["add"] == "add(a: int, b: int = ..., *more: int, **named: int) -> int"
        assert next(method for method in found if method.name == "add").doc == "The sum."
        assert "_private" not in shown

    simulate(1, main)


# -- when the world ends -------------------------------------------------------------------------


def test_a_call_to_a_rank_that_dies_raises():
    raised = []

    async def main(comm):
        comm.rpc.register(Service(comm))
        try:
            if comm.rank == 0:
                await comm.rpc.call(1, "sleep", 1e6)
            elif comm.rank == 2:
                async for _ in comm.rpc.stream(0, "count", 10**9):
                    await asyncio.sleep(1)
            else:
                await asyncio.sleep(1e6)
        except AsyncollError as error:
            raised.append((comm.rank, type(error), error.rank))
            with pytest.raises(PeerLostError):
                await comm.rpc.call(0, "echo", 1)
            raise

    with contextlib.suppress(AsyncollError):
        simulate(3, main, Network(latency_s=1e-3, faults=[Crash(rank=1, at_s=5.0)]))
    assert sorted(raised, key=str) == [(0, PeerLostError, 1), (2, PeerLostError, 1)]


def test_the_task_that_notices_a_loss_is_not_cancelled():
    """It ends all calls of its rank, among them its own, which must raise and not be cancelled."""
    raised = []

    async def main(comm):
        comm.rpc.register(Service(comm))
        await comm.barrier()
        if comm.rank == 0:
            await comm.rpc.call(1, "echo", 1)
            inbox = comm.rpc._exchange._carrier._outboxes[1].inbox
            thread = threading.Thread(target=inbox.control_block.__enter__)
            thread.start()  # the kernel treats a thread that ends as an owner of the lock that dies
            thread.join()
            with pytest.raises(PeerLostError) as caught:
                await comm.rpc.call(1, "echo", 1)
            raised.append(caught.value)
            assert not asyncio.current_task().cancelling()
            await asyncio.sleep(0)  # a wrong cancellation would be raised here
        await comm.barrier()

    with pytest.raises(PeerLostError):
        run_ranks(2, main, "shm")
    assert raised


def test_a_call_that_waits_to_send_raises_after_a_loss():
    async def main(comm):
        if comm.rank == 0:
            calls = [asyncio.ensure_future(comm.rpc.call(1, "x", np.ones(30 << 20, np.uint8))) for _ in range(5)]
            await asyncio.sleep(1)
            comm.abort("enough")
            for call in calls:
                with pytest.raises(AbortedError, match="enough"):
                    await call
        else:
            await asyncio.sleep(10)  # it never opens RPC

    simulate(2, main)


def test_functions_that_run_at_the_end_of_the_world_are_cancelled(run):
    services = {}

    async def main(comm):
        service = services[comm.rank] = Service(comm)
        comm.rpc.register(service)
        comm.rpc.register(lambda: len(service.begun), name="begun")
        if comm.rank == 0:
            await comm.rpc.notify(1, "sleep", 1e6)
            while not await comm.rpc.call(1, "begun"):
                await asyncio.sleep(1e-3)
        return comm

    comm = run(2, main)[0]
    assert services[1].ended == [1e6]
    with pytest.raises(ClosedError):
        asyncio.run(comm.rpc.call(0, "echo", 1))


@pytest.mark.parametrize(
    "segment",
    [
        (segments._WHOLE, 0, b""),
        (segments._WHOLE, 0, b"\1\0\0\0\0\0\0\0" + b"\xff" * 8),
        (segments._WHOLE, 0, b"\0\0\0\0\4\0\0\0abcd"),
        (segments._FIRST, 0, b"\1\0\0\0\0\0\0\0" + b"\xff" * 8),
        (segments._FIRST, 0, b"\xff" * 8),
        (segments._PART, 7, b"x"),
        (segments._DROP, 7, b""),
        (segments._CREDIT, 1, b""),
        (99, 1, b""),
    ],
    ids=repr,
)
def test_invalid_segments_end_the_world(segment):
    async def main(comm):
        assert comm.rpc
        kind, number, payload = segment
        if comm.rank == 0:
            header = wire.encode(wire.SIGNAL, 1, digest(comm._core.member.group.communicator, "rpc"), number, kind)
            comm._core.member.endpoint.router.send(1, [header, payload])
        await comm.rpc.call(comm.rank, "asyncoll.methods")
        await asyncio.sleep(1)
        await comm.barrier()

    with pytest.raises((ProtocolError, AbortedError), match="broke the protocol"):
        simulate(2, main, NETWORK)


@pytest.mark.parametrize(
    "message",
    [
        (protocol.CALL, 1, b"\xc1", "add"),
        (protocol.CALL, 1, b"\x01", "add"),
        (protocol.SHOW_RESULT, 1, b"\x01", ""),
        (protocol.CALL, 1, b"\x92\x90\x81\x01\x02", "add"),
    ],
    ids=repr,
)
def test_invalid_calls_end_the_world(message):
    async def main(comm):
        comm.rpc.register(Service(comm))
        kind, call, body, name = message
        if comm.rank == 0:
            await comm.rpc._exchange._carrier.send(1, *protocol.encode(kind, call, body, name=name))
        await asyncio.sleep(1)
        await comm.barrier()

    with pytest.raises((ProtocolError, AbortedError), match="broke the protocol"):
        simulate(2, main, NETWORK)


# -- regressions ---------------------------------------------------------------------------------


def test_calls_that_end_in_one_turn_free_as_many_slots(run):
    """There are more calls than slots, and all handlers wait for the same event."""

    async def main(comm):
        opened, waiting = asyncio.Event(), 0

        @comm.rpc.register
        async def wait_together(number: int) -> int:
            nonlocal waiting, opened
            waiting += 1
            if waiting % protocol.CALLS_MAX == 0:
                opened.set()
                opened = asyncio.Event()
            else:
                await opened.wait()
            return number

        await comm.barrier()
        if comm.rank == 0:
            numbers = range(4 * protocol.CALLS_MAX)
            assert await asyncio.gather(*(comm.rpc.call(1, "wait_together", number) for number in numbers)) == [
                *numbers
            ]

    run(2, main)


def test_a_slot_that_was_assigned_just_before_the_cancellation_is_free_again():
    async def main():
        slots = window.Slots()
        for _ in range(protocol.CALLS_MAX):
            assert slots.take_nowait(0)
        waiting = asyncio.ensure_future(slots.take(0))
        await asyncio.sleep(0)
        slots.give_back(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert slots.take_nowait(0)
        assert not slots.take_nowait(0)

    asyncio.run(main())


def test_a_call_cancelled_in_the_queue_does_not_block_the_next(run):
    async def main(comm):
        release = asyncio.Event()

        @comm.rpc.register
        async def hold(x: np.ndarray) -> None:
            await release.wait()

        @comm.rpc.register
        async def let_go() -> None:
            release.set()

        await comm.barrier()
        if comm.rank == 0:
            long = asyncio.ensure_future(comm.rpc.call(1, "hold", np.zeros(10 << 20, np.uint8)))
            larger = asyncio.ensure_future(comm.rpc.call(1, "hold", np.zeros(60 << 20, np.uint8)))
            room = comm.rpc._exchange.client._slots[1, 0]
            while not room._waiters:
                await asyncio.sleep(0)
            short = asyncio.ensure_future(comm.rpc.call(1, "let_go"))
            while len(room._waiters) < 2:
                await asyncio.sleep(0)
            larger.cancel()
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(short, long)

    run(2, main)


@dataclasses.dataclass
class Moody:
    value: int

    def __post_init__(self) -> None:
        if self.value < 0:
            raise ValueError("never below 0")


def test_a_dataclass_that_refuses_its_fields_is_a_usage_error(run):
    async def main(comm):
        @comm.rpc.register
        async def take(moody: Moody) -> int:
            return moody.value

        await comm.barrier()
        if comm.rank == 0:
            moody = Moody(1)
            moody.value = -1
            with pytest.raises(
                UsageError,
                match=r"no .*Moody can be made of the fields that were received: ValueError\('never below 0'\)",
            ):
                await comm.rpc.call(1, "take", moody)
            assert await comm.rpc.call(1, "take", Moody(2)) == 2

    run(2, main)


class UtterError(BaseException):
    pass


class HollowError(Exception):
    """An exception whose attributes cannot be read: `__getattr__` recurses without end."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


async def utter() -> None:
    raise UtterError("x")


async def hollow() -> None:
    raise HollowError("x")


async def leave() -> None:
    sys.exit(3)


ODD = {
    "StopIteration": (lambda: next(iter(())), "RuntimeError|StopIteration"),
    "no Exception": (utter, "UtterError"),
    "no attributes": (hollow, "HollowError"),
    "the end of the process": (leave, "SystemExit at rank 1: 3"),
    "that, in a thread": (lambda: sys.exit(3), "SystemExit at rank 1: 3"),
}


@pytest.mark.parametrize(("function", "kind"), ODD.values(), ids=ODD.keys())
def test_the_caller_is_answered_whatever_a_function_raises(run, caplog, function, kind):
    async def act(comm, service, other):
        for _ in range(2):  # the callee continues after the first exception
            with pytest.raises(RemoteError, match=kind), deadline(PATIENCE_S):
                await comm.rpc.call(other, "raise_it")

    async def main(comm):
        comm.rpc.register(function, name="raise_it")
        await comm.barrier()
        await served(act)(comm)

    run(2, main)
    caplog.clear()  # its traceback holds the world


def test_a_result_that_does_not_fit_into_memory_is_a_remote_error():
    memory = mmap.mmap(-1, 1 << 43, mmap.MAP_PRIVATE, mmap.PROT_READ)  # no page of it is ever provided

    async def huge() -> np.ndarray:
        return np.frombuffer(memory, np.uint8)

    async def act(comm, service, other):
        with pytest.raises(RemoteError, match="UsageError at rank 1: cannot allocate"), deadline(PATIENCE_S):
            await comm.rpc.call(other, "huge")
        assert await comm.rpc.call(other, "add", 1) == 2

    async def main(comm):
        comm.rpc.register(huge)
        await comm.barrier()
        await served(act)(comm)

    run_ranks(2, main, "shm")


@looped("name", ["\ud800", "", "a b", "a..b", "x" * 10_000, 5])
def test_an_invalid_name_takes_no_slot(name):
    async def main(comm):
        @comm.rpc.register
        async def fine() -> int:
            return 1

        await comm.barrier()
        if comm.rank == 0:
            for _ in range(protocol.CALLS_MAX + 1):
                with pytest.raises(UsageError, match="called by its name"):
                    await comm.rpc.call(1, name)
            assert await comm.rpc.call(1, "fine") == 1

    run_ranks(2, main)


def with_deadline(comm, patience_s=0.5):
    """As if ASYNCOLL_DEADLINE_S were set for this rank; before the first use of `comm.rpc`."""
    comm._core.member.endpoint.patience_s = patience_s


def test_calls_have_the_deadline_of_the_world():
    async def main(comm):
        with_deadline(comm)

        @comm.rpc.register
        async def slow() -> None:
            await asyncio.sleep(100)

        if comm.rank == 0:
            with pytest.raises(DeadlineError, match="slow at rank 1 did not answer before the deadline"):
                await comm.rpc.call(1, "slow")

    simulate(2, main)


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_a_call_that_waits_for_a_slot_has_the_deadline_of_the_world(use):
    async def main(comm):
        with_deadline(comm, math.inf if comm.rank else 0.5)
        service = Service(comm)
        comm.rpc.register(service)
        if comm.rank == 0:
            for _ in range(protocol.CALLS_MAX):
                await comm.rpc.notify(1, "sleep", 100)
            with pytest.raises(DeadlineError, match="at rank 1 did not answer before the deadline"):
                await use(comm.rpc)
        return service.begun

    assert simulate(2, main).results[1] == [100] * protocol.CALLS_MAX


def test_a_stream_that_waits_for_a_slot_has_its_callers_deadline():
    async def act(comm, service, other):
        for _ in range(protocol.CALLS_MAX):
            await comm.rpc.notify(1, "sleep", 100)
        with deadline(1), pytest.raises(DeadlineError):
            await anext(comm.rpc.stream(1, "count", 1))

    assert simulate(2, served(act)).results[1].begun == [100] * protocol.CALLS_MAX


def test_items_of_streams_have_the_deadline_of_the_world():
    async def main(comm):
        with_deadline(comm, math.inf if comm.rank else 0.5)

        @comm.rpc.register
        async def slow_down() -> AsyncIterator[int]:
            for item in range(10):
                yield item
                await asyncio.sleep(0.1 * item)

        if comm.rank == 0:
            items = comm.rpc.stream(1, "slow_down")
            assert [await anext(items) for _ in range(5)] == [0, 1, 2, 3, 4]  # takes longer than the deadline in total
            await anext(items)
            with pytest.raises(DeadlineError, match="slow_down at rank 1 did not answer before the deadline"):
                await anext(items)

    simulate(2, main)
