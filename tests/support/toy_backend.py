"""A third backend: the ranks of one process exchange whole values through a table. For tests of the seam."""

from __future__ import annotations

import itertools

from asyncoll.algorithms.message_backend import MessageBackend
from asyncoll.statistics import Traffic
from asyncoll.tensors.reductions import ReduceOp, reducer


class ToyCollectives:
    overlaps = False  # a tensor of a device arrives before they use it

    def __init__(self, member, table, call):
        self.rank, self.size, self.traffic = member.group.rank, member.group.size, Traffic()
        self._member, self._table, self._call, self._steps = member, table, call, itertools.count()

    async def __aenter__(self):
        return self

    async def __aexit__(self, kind, error, trace):
        if error is not None:
            self._member.failed(self._call, error)

    async def _exchange(self, value):
        """The values of all ranks, by rank."""
        values = self._table[self._member.communicator, self._call.number, next(self._steps)]
        with self._member.endpoint.failures.watch(self._member.communicator, "the other ranks") as complete:
            values[self.rank] = value, complete
            if len(values) == self.size:
                for _, future in values.values():
                    future.done() or future.set_result(None)
            await complete
        return [values[rank][0] for rank in range(self.size)]

    async def barrier(self):
        await self._exchange(None)

    async def allreduce(self, x, op, dtype):
        await self.reduce_scatter([x] * self.size, x, op, dtype)

    async def reduce(self, x, op, dtype, root):
        await self.allreduce(x if self.rank == root else x.copy(), op, dtype)

    async def reduce_scatter(self, chunks, shard, op, dtype):
        rows = await self._exchange([chunk.copy() for chunk in chunks])
        reducer(op, dtype)(shard, [row[self.rank] for row in rows], self.size if op is ReduceOp.AVG else 1)

    async def broadcast(self, x, root):
        x[...] = (await self._exchange(x.copy()))[root]

    async def gather(self, mine, blocks, root):
        for block, value in zip(blocks, await self._exchange(mine.copy()), strict=False):
            block[...] = value

    async def scatter(self, blocks, mine, root):
        mine[...] = (await self._exchange([block.copy() for block in blocks]))[root][self.rank]

    async def allgather(self, blocks):
        await self.gather(blocks[self.rank], blocks, 0)

    async def alltoall(self, outgoing, incoming):
        for source, row in enumerate(await self._exchange([block.copy() for block in outgoing])):
            incoming[source][...] = row[self.rank]

    async def pass_on(self, mine, dest, into, source):
        values = await self._exchange(None if mine is None else mine.copy())
        if into is not None:
            into[...] = values[source]

    async def exchange(self, mine, dests, incoming, sources):
        values = await self._exchange(mine.copy())
        for source, into in zip(sources, incoming, strict=True):
            into[...] = values[source]


class ToyBackend(MessageBackend):
    """Rounds and RPC are those by message. `table` holds the values: by communicator, call and step, then by rank."""

    def __init__(self, table, member):
        super().__init__(member)
        self._table = table

    def collectives(self, call):
        return ToyCollectives(self._member, self._table, call.signature)
