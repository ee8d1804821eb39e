"""What the calls of a process group do with the collectives of a call, which is the last argument of each."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from asyncoll.algorithms.seam.collectives import Collectives
from asyncoll.tensors.reductions import Array, ReduceOp
from asyncoll.torch.memory import Block, Row, overlap

# One collective, from arrays of this rank into arrays of this rank.
Move = Callable[[Collectives, Sequence[Array], Sequence[Array]], Coroutine[Any, Any, None]]


async def allreduce(blocks: Sequence[Block], op: ReduceOp, collectives: Collectives) -> None:
    """Reduce each block in place."""
    for block in blocks:
        await collectives.allreduce(block.flat, op, block.dtype)
        block.write_back()


async def average_integers(block: Block, collectives: Collectives) -> None:
    """Replace the block by the mean of all ranks, rounded towards 0."""
    await collectives.allreduce(block.flat, ReduceOp.SUM, block.dtype)
    if block.flat.dtype.kind == "u":  # torch does not divide most of these
        block.flat[...] //= collectives.size
    else:
        block.packed.detach().div_(collectives.size, rounding_mode="trunc")
    block.write_back()


async def reduce(block: Block, root: int, op: ReduceOp, collectives: Collectives) -> None:
    """Reduce into the root's block."""
    await collectives.reduce(block.flat, op, block.dtype, root)
    if collectives.rank == root:
        block.write_back()


async def broadcast(block: Block, root: int, collectives: Collectives) -> None:
    """Copy the root's block into all others."""
    await collectives.broadcast(block.flat, root)
    if collectives.rank != root:
        block.write_back()


async def reduce_scatter(calls: Sequence[tuple[Row, Block]], op: ReduceOp, collectives: Collectives) -> None:
    """For each of `calls`, reduce the inputs for this rank into the output."""
    for inputs, output in calls:
        is_apart = not any(overlap(chunk, output.flat) for chunk in inputs.arrays)
        shard = output.flat if is_apart else np.empty_like(output.flat)
        await collectives.reduce_scatter(inputs.arrays, shard, op, output.dtype)
        if not is_apart:
            output.flat[...] = shard
        output.write_back()


async def allgather(calls: Sequence[tuple[Block, Row]], collectives: Collectives) -> None:
    """For each of `calls`, copy the inputs of all ranks into the outputs."""
    for given, outputs in calls:
        own = outputs.arrays[collectives.rank]
        if own.ctypes.data != given.flat.ctypes.data:
            own[...] = given.flat
        await collectives.allgather(outputs.arrays)
        outputs.write_back()


async def exchange(
    move: Move, inputs: Row, outputs: Row, check: Callable[[Sequence[Array]], None], collectives: Collectives
) -> None:
    """Move the inputs of all ranks to their outputs. Before, `check` is given the sizes in bytes of what will come."""
    told = words(len(outputs.arrays))
    await move(collectives, [np.array([array.nbytes]) for array in inputs.arrays], told)
    check(told)
    outgoing = [out.copy() if any(overlap(out, into) for into in outputs.arrays) else out for out in inputs.arrays]
    await move(collectives, outgoing, outputs.arrays)
    outputs.write_back()


async def refuse(collectives: Collectives) -> None:
    """Send a word to each rank directly: one that has left already passes nothing on."""
    (word,), others = words(1), [rank for rank in range(collectives.size) if rank != collectives.rank]
    await collectives.exchange(word, others, words(len(others)), others)


def words(count: int) -> list[Array]:
    """Room for one number of each of `count` ranks."""
    return list(np.zeros((count, 1), np.int64))
