"""Calls of tensors on devices, cancelled in each state of their copies: order, memory, and the next call are right."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref

import numpy as np
import pytest
import torch

from asyncoll import AbortedError
from asyncoll.testing import FakeDevice, fake_device, run_ranks
from tests.support.cancelling import nothing_is_pending, pending

COUNT = 50_000
TURNS = 50  # of the loop: as many as a call can use before it waits for another rank
TRANSPORTS = ["inproc", "zmq", "shm"]


class Watched(FakeDevice):
    """Tells when a result is copied back, and remembers the memory of the host that it has copied."""

    def watch(self):
        self.blocks = []
        self.when_put = lambda: None

    def fetch(self, mark, start, into):
        self.blocks.append(weakref.ref(owner(into)))
        return super().fetch(mark, start, into)

    def put(self, source, mark, start):
        self.blocks.append(weakref.ref(owner(source)))
        transfer = super().put(source, mark, start)
        self.when_put()
        return transfer


def owner(array):
    """The array whose end is the end of the memory."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


@contextlib.contextmanager
def watched():
    with fake_device(3, "program") as device:
        device.__class__ = Watched
        device.watch()
        yield device


def increment(device, x):
    device.compute(lambda array: np.add(array, 1, out=array), x)


def made(device):
    """Ones, once the device has done its work."""
    x = device.tensor(torch.zeros(COUNT))
    increment(device, x)
    return x


def drain(device):
    while device.turn():
        pass


# -- the states: the program has stopped the device in one when it cancels the call ------------------


def marked(device):
    """The work before the call is not done."""


def queued(device):
    """It is done, and no byte has been copied."""
    while device._streams._queues["default"]:
        assert device.turn()


def arriving(device):
    copy = device._copying[-1]
    while not copy.done:
        assert device.turn()
    assert copy.done < copy.nbytes


def arrived(device):
    """All bytes are there, and the library has not heard of it."""
    copy = device._copying[-1]
    while copy.done < copy.nbytes:
        assert device.turn()


def published(device):
    """It has, and waits for the other rank."""
    drain(device)


def returning(device):
    """The result is on its way, and the caller has not gone on."""


def returned(device):
    """The result is there, and the caller has not gone on."""
    drain(device)


OF_CONTRIBUTIONS = [marked, queued, arriving, arrived, published]
OF_RESULTS = [returning, returned]


async def cancelled(device, state, call, *, is_turned):
    """Cancel `call` in this state. Unless `is_turned`, the device stands still from then on."""
    task = asyncio.ensure_future(call)
    if state in OF_RESULTS:

        def cancel():
            state(device)
            task.cancel()

        device.when_put = cancel
        while not task.done():
            device.turn()
            await asyncio.sleep(0)
        device.when_put = lambda: None
    else:
        await asyncio.sleep(0)
        state(device)
        if state is published:
            for _ in range(TURNS):
                await asyncio.sleep(0)
        assert not task.done()
        task.cancel()
        while not task.done():
            _ = is_turned and device.turn()
            await asyncio.sleep(0)
    assert task.cancelled()


async def released(device):
    """The device has done its work, and nothing keeps the memory of the host."""
    drain(device)
    device._copying.clear()
    await asyncio.sleep(0)
    gc.collect()
    assert [each() for each in device.blocks if each() is not None] == []
    device.blocks.clear()


# -- calls of which a cancelled one ends its communicator ----------------------------------------------

host = np.ones(COUNT, np.float32)
CALLS = {  # by name: the call of rank 0, and that of rank 1, whose tensor is on a device
    "allreduce": (lambda comm: comm.allreduce(host.copy()), lambda comm, x: comm.allreduce(x)),
    "allgather": (lambda comm: comm.allgather(host), lambda comm, x: comm.allgather(x)),
    "alltoallv": (lambda comm: comm.alltoallv([host] * 2), lambda comm, x: comm.alltoallv([x, x])),
    "send": (lambda comm: comm.recv(host.copy(), source=1), lambda comm, x: comm.send(x, dest=0)),
    "recv": (lambda comm: comm.send(host, dest=1), lambda comm, x: comm.recv(x, source=0)),
    "recv_any": (lambda comm: comm.send(host, dest=1), lambda comm, x: comm.recv_any(x)),
}
STATES = {"send": OF_CONTRIBUTIONS[:-1], "recv": [marked, *OF_RESULTS], "recv_any": [marked, *OF_RESULTS]}


async def ended(device, call):
    """The result of `call`, for which the device works."""
    task = asyncio.ensure_future(call)
    while not task.done():
        device.turn()
        await asyncio.sleep(0)
    return await task


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_cancelled(name, transport):
    """It waits for no device, and ends its communicator, unless another receive takes the message."""
    of_host, of_device = CALLS[name]

    async def rank_0(part, state, is_over):
        if state in OF_CONTRIBUTIONS:
            await is_over.wait()
        with contextlib.suppress(AbortedError):
            await of_host(part)

    async def rank_1(part, state, is_over):
        x = made(device)
        await cancelled(device, state, of_device(part, x), is_turned=False)
        increment(device, x)
        await asyncio.sleep(0)
        if state in OF_CONTRIBUTIONS:  # otherwise the other rank may be in its next call
            assert not [task for task in asyncio.all_tasks() if "Arrival." in repr(task)]
        is_over.set()
        if name == "recv_any":
            y = made(device)
            await ended(device, part.recv_any(y))
            assert (device.values(y) == 1).all()

    async def main(comm):
        for state, is_over in states.items():
            part = await comm.split(0, key=comm.rank)
            await (rank_1 if comm.rank else rank_0)(part, state, is_over)
            y = made(device)
            await ended(device, comm.allreduce(y))
            assert (device.values(y) == 2).all()
            del y
            await nothing_is_pending(comm)
            await comm.barrier()
            if comm.rank:
                await released(device)
            await comm.barrier()

    with watched() as device:
        states = {state: asyncio.Event() for state in STATES.get(name, OF_CONTRIBUTIONS + OF_RESULTS)}
        run_ranks(2, main, transport)


# -- rounds, in which the contribution of a cancelled call stays ----------------------------------------

ROUNDS = {
    "solo": lambda comm, x: comm.solo_allreduce(x, name="r", history=99),
    "quorum": lambda comm, x: comm.quorum_allreduce(x, name="r", history=99, quorum=2),
    "group": lambda comm, x: comm.group_allreduce(x, name="r", group_size=2),
}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", ROUNDS)
def test_a_call_of_a_round_is_cancelled(name, transport):
    """It contributes what arrives."""
    call = ROUNDS[name]

    def zeros():
        return np.zeros(COUNT, np.float32)

    async def main(comm):
        total = 0.0
        await call(comm, zeros())
        await comm.barrier()
        for number, (state, is_over) in enumerate(states.items(), 1):
            if comm.rank:
                x = made(device)
                await cancelled(device, state, call(comm, x), is_turned=True)
                increment(device, x)
                del x
                is_over.set()
            if name == "quorum" and state in OF_RESULTS:  # at the cancelled rank the answer that it has not been given
                total += sum(float(each[0]) for each in (await call(comm, zeros())).results())
            await is_over.wait()
            if name == "group" and comm.rank == 0:
                for _ in range(3):
                    await call(comm, x := zeros())
                assert x[0] > 0
            for _ in range(3):  # late for a round; includes all staged contributions; returns that result
                await comm.barrier()
                reduction = await call(comm, zeros())
                total += sum(float(each[0]) for each in reduction.results())
            assert total == number or name == "group"
            while name == "group" and await pending(comm):  # a rank that was late has opened one more round
                await asyncio.sleep(0)
            await nothing_is_pending(comm)
            del reduction
            await comm.barrier()
            if comm.rank:
                await released(device)
            await comm.barrier()

    with watched() as device:
        waits = name == "quorum"
        states = {state: asyncio.Event() for state in OF_CONTRIBUTIONS + OF_RESULTS if waits or state is not published}
        run_ranks(2, main, transport)
