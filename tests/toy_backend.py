"""A third backend: the ranks of one process exchange whole values at a table. For tests of the seam."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict

import numpy as np

from asyncoll.algorithms.by_message import MessageBackend
from asyncoll.statistics import Traffic
from asyncoll.tensors.reductions import ReduceOp, reducer


class ToyCollectives:
    def __init__(self, member, table, number):
        self.rank, self.size, self.traffic = member.group.rank, member.group.size, Traffic()
        self._member, self._table, self._number, self._steps = member, table, number, itertools.count()

    async def _exchange(self, value):
        """What every rank gives, by rank."""
        seats = self._table[self._number, next(self._steps)]
        with self._member.endpoint.failures.watch(self._member.communicator, "the other ranks") as complete:
            seats[self.rank] = value, complete
            if len(seats) == self.size:
                for _, future in seats.values():
                    future.done() or future.set_result(None)
            await complete
        return [seats[rank][0] for rank in range(self.size)]

    async def barrier(self):
        await self._exchange(None)

    async def allreduce(self, x, op, dtype):
        arrays = await self._exchange(x.copy())
        reducer(op, dtype)(x, [array.copy() for array in arrays], self.size if op is ReduceOp.AVG else 1)

    async def reduce(self, x, op, dtype, root):
        await self.allreduce(x if self.rank == root else x.copy(), op, dtype)

    async def reduce_scatter(self, chunks, shard, op, dtype):
        rows = await self._exchange([chunk.copy() for chunk in chunks])
        mine = [row[self.rank] for row in rows]
        reducer(op, dtype)(shard, mine, self.size if op is ReduceOp.AVG else 1)

    async def broadcast(self, x, root):
        x[...] = (await self._exchange(x.copy()))[root]

    async def gather(self, mine, blocks, root):
        _copy(await self._exchange(mine.copy()), blocks)

    async def scatter(self, blocks, mine, root):
        mine[...] = (await self._exchange([block.copy() for block in blocks]))[root][self.rank]

    async def allgather(self, blocks):
        _copy(await self._exchange(blocks[self.rank].copy()), blocks)

    async def alltoall(self, outgoing, incoming, taken=lambda source: None):
        rows = await self._exchange([block.copy() for block in outgoing])
        _copy([row[self.rank] for row in rows], incoming)
        for source in range(self.size):
            taken(source)

    async def pass_on(self, mine, dest, into, source):
        given = await self._exchange(None if mine is None else mine.copy())
        if into is not None:
            into[...] = given[source]


def _copy(given, into):
    for block, value in zip(into, given, strict=False):
        np.copyto(block, value)


class ToyBackend:
    """Rounds and RPC are those by message."""

    def __init__(self, tables, member):
        self._member, self._table, self._messages = member, tables[member.communicator], MessageBackend(member)
        self.operations, self.open, self.carrier = (
            getattr(self._messages, name) for name in ("operations", "open", "carrier")
        )
        self.memory, self.start_round = None, self._messages.start_round

    def start(self, call, body, nbytes, ended, discarded):
        collectives = ToyCollectives(self._member, self._table, call.number)

        async def work():
            try:
                return await body(collectives)
            except (Exception, asyncio.CancelledError) as error:
                self._member.failed(call, error)
                raise
            finally:
                ended(collectives.traffic)

        return self._member.runner.start(work(), discarded)


def tables():
    """For all ranks of a world: by communicator, and by call and step."""
    return defaultdict(lambda: defaultdict(dict))
