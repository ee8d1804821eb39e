"""The operations of the matrix: the public coroutine functions of this module.

Each makes one call at every rank and checks its result.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from asyncoll.algorithms.rounds.reduction import Reduction
from asyncoll.communicator import Communicator
from asyncoll.tensors.reductions import Array, ReduceOp

Operation = Callable[[Communicator, int], Awaitable[None]]  # the number of elements is a multiple of that of ranks


class CallMemory:
    """Where the tensors of a call are: on the host, unless a subclass puts them elsewhere."""

    def full(self, elements: int, value: float) -> Any:
        """A tensor whose elements have this value."""
        return np.full(elements, float(value))

    def values(self, x: Any) -> Array:
        return np.asarray(x)


_HOST = CallMemory()


async def allreduce(comm: Communicator, elements: int, memory: CallMemory = _HOST) -> None:
    all_are(memory.values(await comm.allreduce(memory.full(elements, 1))), comm.size)


async def registered_allreduce(comm: Communicator, elements: int) -> None:
    x = comm.empty(elements, np.dtype("f4"))
    x[:] = 1
    all_are(await comm.allreduce(x), comm.size)


async def broadcast(comm: Communicator, elements: int) -> None:
    all_are(await comm.broadcast(np.full(elements, float(comm.rank)), root=1), 1)


async def reduce(comm: Communicator, elements: int) -> None:
    all_are(await comm.reduce(np.ones(elements), root=0), 1 if comm.rank else comm.size)


async def reduce_scatter(comm: Communicator, elements: int) -> None:
    all_are(await comm.reduce_scatter(np.ones(elements)), comm.size)


async def allgather(comm: Communicator, elements: int, memory: CallMemory = _HOST) -> None:
    rows = await comm.allgather(memory.full(elements, comm.rank))
    for rank in range(comm.size):
        all_are(memory.values(rows[rank]), rank)


async def allgatherv(comm: Communicator, elements: int) -> None:
    for rank, row in enumerate(await comm.allgatherv(np.full(elements + comm.rank, float(comm.rank)))):
        assert len(row) == elements + rank
        all_are(row, rank)


async def gather(comm: Communicator, elements: int) -> None:
    rows = await comm.gather(np.full(elements, float(comm.rank)), root=1)
    for rank, row in enumerate(rows if rows is not None else ()):
        all_are(row, rank)


async def scatter(comm: Communicator, elements: int) -> None:
    rows = [np.full(elements, float(rank)) for rank in range(comm.size)] if comm.rank == 0 else None
    all_are(await comm.scatter(rows, root=0), comm.rank)


async def alltoall(comm: Communicator, elements: int) -> None:
    x = await comm.alltoall(np.full(elements, float(comm.rank)))
    for rank, part in enumerate(np.split(x, comm.size)):
        all_are(part, rank)


async def alltoallv(comm: Communicator, elements: int) -> None:
    parts = await comm.alltoallv([np.full(elements + dest, float(comm.rank)) for dest in range(comm.size)])
    for rank, part in enumerate(parts):
        assert len(part) == elements + comm.rank
        all_are(part, rank)


async def barrier(comm: Communicator, elements: int) -> None:
    await comm.barrier()


async def send_recv(comm: Communicator, elements: int, memory: CallMemory = _HOST) -> None:
    """Send to the next rank of a ring, and receive from the one before: a rank talks to its neighbours only."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sending = comm.send(memory.full(elements, comm.rank), after)
    received, _ = await _all_of(comm.recv(memory.full(elements, 0), before), sending)
    all_are(memory.values(received), before)


async def neighbor_average(comm: Communicator, elements: int) -> None:
    all_are(await comm.neighbor_average(np.full(elements, 6.0), graph="ring"), 6)


async def push_sum(comm: Communicator, elements: int) -> None:
    """Push half of a number to the next rank of a ring, and receive half of that of the rank before."""
    x, weight = np.full(elements, 2.0 * comm.rank), np.ones(1)
    received, received_weight = await comm.push_sum(x, weight)
    all_are(x, comm.rank)
    all_are(received, (comm.rank - 1) % comm.size)
    assert weight == received_weight == 0.5, "a wrong weight"


async def solo(comm: Communicator, elements: int, memory: CallMemory = _HOST) -> None:
    await _rounds(comm.size, comm.solo_allreduce(x := memory.full(elements, 1)), x, memory)


async def majority(comm: Communicator, elements: int) -> None:
    await _rounds(comm.size, comm.majority_allreduce(x := np.ones(elements), history=2), x)


async def quorum(comm: Communicator, elements: int) -> None:
    await _rounds(comm.size, comm.quorum_allreduce(x := np.ones(elements), quorum=comm.size - 1), x)


async def group(comm: Communicator, elements: int) -> None:
    await _rounds(comm.size, comm.group_allreduce(x := np.ones(elements), group_size=2), x)


async def synchronous_solo(comm: Communicator, elements: int) -> None:
    """A solo allreduce in which every second round is synchronous."""
    call = comm.solo_allreduce(x := np.ones(elements), name="synchronous", sync_every=2)
    await _rounds(comm.size, call, x)


async def sparse(comm: Communicator, elements: int) -> None:
    x = np.arange(1.0, elements + 1.0)
    reduction = await comm.sparse_allreduce(x, density=0.25)
    for index, value in zip(reduction.indices, reduction.values, strict=True):
        assert value == comm.size * (index + 1), "a wrong sum"


async def rpc(comm: Communicator, elements: int) -> None:
    """Every rank calls `echo` at the next rank. The caller of this function has registered `echo`."""
    x = np.full(elements, float(comm.rank))
    all_are(await comm.rpc.call((comm.rank + 1) % comm.size, "echo", x), comm.rank)


async def ddp_step(comm: Communicator, elements: int) -> None:
    """A synchronous training step: a bucket of gradients is averaged while the next ones are computed."""
    buckets, calls = [np.empty(elements) for _ in range(3)], []
    for bucket in buckets:
        bucket[:] = np.sqrt(np.full(elements, float(comm.rank) ** 2))
        calls.append(comm.allreduce(bucket, ReduceOp.AVG))
    await _all_of(*calls)
    for bucket in buckets:
        all_are(bucket, (comm.size - 1) / 2)


async def eager_step(comm: Communicator, elements: int) -> None:
    """A step of eager-SGD (Li et al., PPoPP 2020) with the gradients of the ranks that have arrived."""
    gradient = np.sqrt(np.full(elements, 1.0))
    reduction = await comm.solo_allreduce(gradient, name="gradients", history=4)
    parameters = np.zeros(elements)
    for missed in (*reduction.missed, gradient):
        parameters -= 0.1 * missed / comm.size
    assert np.ptp(parameters) == 0, "parts of different rounds"


async def _all_of(*calls: Awaitable[Any]) -> list[Any]:
    """Wait for all calls. Returns their results, or raises the first exception in the order of `calls`."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def echo(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return x


async def _rounds(size: int, call: Awaitable[Reduction], x: Any, memory: CallMemory = _HOST) -> None:
    """Check a round. Every contribution is 1, so all elements of a result equal the number of contributions."""

    reduction = await call
    assert np.ptp(memory.values(x)) == 0, "parts of different rounds"
    assert 0 <= reduction.active <= size


def all_are(x: Array, value: float) -> None:
    """Check that all elements of `x` have this value."""
    assert (x == value).all(), f"a wrong result: {x[x != value][:3]} instead of {value}"


OPERATIONS: dict[str, Operation] = {
    name: each for name, each in list(globals().items()) if inspect.iscoroutinefunction(each) and name[0] != "_"
}
