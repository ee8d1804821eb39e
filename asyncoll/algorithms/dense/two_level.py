"""The dense collectives of one call on several hosts: the ranks of a host meet in its memory, and hosts by message.

Each byte crosses the network once per host, and not once per rank. The first ranks of each host are its agents, as
many as the host with the fewest ranks has. Each agent has a share of the array: it gets the share's sum over the ranks
of its host, exchanges it with the agents of the same place at the other hosts, and hands it out to the ranks of its
host. So all agents use the network at the same time. Each element is reduced along one way, in an order that depends on
the placement alone, and the result is copied. So all ranks get the same bits.

A long array passes in windows: while one is between the hosts, the ranks of a host reduce the next one. A collective
that moves each block from one rank to one other goes by message as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np

from asyncoll.algorithms.backend import Collectives
from asyncoll.algorithms.dense.on_lane import bounds
from asyncoll.runtime.hosts import Hosts
from asyncoll.statistics import Traffic
from asyncoll.tensors import reductions
from asyncoll.tensors.reductions import Array, ReduceOp

_SHARE_BYTES = 1 << 14  # the least that is worth another agent
_WINDOW_BYTES = 1 << 22
_WINDOWS = 2  # of a call that are between the hosts, or wait for that


class LocalCollectives(Protocol):
    """Those of `Collectives` that the ranks of a host use among each other. Ranks are places of `Hosts`."""

    @property
    def traffic(self) -> Traffic: ...

    async def __aenter__(self) -> LocalCollectives: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def barrier(self) -> None: ...

    async def reduce_scatter(self, chunks: list[Array], shard: Array, op: ReduceOp, dtype: str) -> None: ...

    async def gather(self, mine: Array, blocks: list[Array], root: int) -> None: ...

    async def scatter(self, blocks: list[Array], mine: Array, root: int) -> None: ...

    async def allgather(self, blocks: list[Array]) -> None: ...

    async def alltoall(self, outgoing: list[Array], incoming: list[Array]) -> None: ...


class _Window(NamedTuple):
    """A part of an array, and what this host has of it."""

    shares: list[Array]  # of the array, by place; empty for a rank that is no agent of this window
    mine: Array  # the share of this rank, in memory of its own


# A step of one window: within the host, or between hosts. The latter runs at agents that have a share.
_Step = Callable[[_Window], Coroutine[Any, Any, None]]


class TwoLevelCall:
    """The `Collectives` of one call."""

    def __init__(self, hosts: Hosts, whole: Collectives, within: LocalCollectives, between: Collectives | None) -> None:
        """`whole` is of all ranks, `within` of those of this host, and `between` of the agents of this rank's place."""
        self.hosts = hosts
        self._whole = whole
        self.within = within
        self.between = between
        self.rank = whole.rank
        self.size = whole.size
        self._levels = [level for level in (within, between, whole) if level is not None]
        self._open = contextlib.AsyncExitStack()

    @property
    def traffic(self) -> Traffic:
        return Traffic.total(level.traffic for level in self._levels)

    async def __aenter__(self) -> TwoLevelCall:
        for level in self._levels:
            await self._open.enter_async_context(level)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.__aexit__(kind, error, trace)

    async def barrier(self) -> None:
        await self.within.barrier()
        if self.between is not None and self.hosts.place == 0:
            await self.between.barrier()
        await self.within.barrier()

    # -- of one array -----------------------------------------------------------------------------

    async def allreduce(self, x: Array, op: ReduceOp, dtype: str) -> None:
        total, carried, summed = _accumulator(x, op, dtype)

        async def reduce_here(window: _Window) -> None:
            await self.within.reduce_scatter(window.shares, window.mine, summed, carried)

        async def exchange(window: _Window) -> None:
            await self._agents.allreduce(window.mine, summed, carried)

        await self._in_windows(total, reduce_here, exchange, self._hand_out)
        self._finish(x, total, op, dtype)

    async def reduce(self, x: Array, op: ReduceOp, dtype: str, root: int) -> None:
        hosts = self.hosts
        total, carried, summed = _accumulator(x, op, dtype)

        async def reduce_here(window: _Window) -> None:
            await self.within.reduce_scatter(window.shares, window.mine, summed, carried)

        async def exchange(window: _Window) -> None:
            await self._agents.reduce(window.mine, summed, carried, hosts.host(root))

        async def collect(window: _Window) -> None:
            if root in hosts.here:
                await self.within.gather(window.mine, window.shares, hosts.here.index(root))

        await self._in_windows(total, reduce_here, exchange, collect)
        if root == self.rank:
            self._finish(x, total, op, dtype)

    async def broadcast(self, x: Array, root: int) -> None:
        hosts = self.hosts

        async def share_out(window: _Window) -> None:
            if root in hosts.here:
                await self.within.scatter(window.shares, window.mine, hosts.here.index(root))

        async def exchange(window: _Window) -> None:
            await self._agents.broadcast(window.mine, hosts.host(root))

        await self._in_windows(x, share_out, exchange, self._hand_out)

    async def _hand_out(self, window: _Window) -> None:
        """Give each rank of this host the shares of all."""
        window.shares[self.hosts.place][...] = window.mine
        await self.within.allgather(window.shares)

    async def _in_windows(self, x: Array, before: _Step, between: _Step, after: _Step) -> None:
        """Take the steps for each window of `x`. The windows follow each other in each step, at all ranks alike."""
        under_way: deque[tuple[_Window, asyncio.Task[None] | None]] = deque()
        async with _in_turn() as start:
            for window in self._windows(x):
                await before(window)
                under_way.append((window, start(between, window) if window.mine.size else None))
                if len(under_way) == _WINDOWS:
                    await self._end(*under_way.popleft(), after)
            while under_way:
                await self._end(*under_way.popleft(), after)

    @staticmethod
    async def _end(window: _Window, exchange: asyncio.Task[None] | None, after: _Step) -> None:
        if exchange is not None:
            await exchange
        await after(window)

    def _windows(self, x: Array) -> list[_Window]:
        size = max(1, _WINDOW_BYTES // x.itemsize)
        windows = [self._shares(x[start : start + size]) for start in range(0, max(1, x.size), size)]
        rooms = [np.empty_like(shares[self.hosts.place]) for shares in windows[:_WINDOWS]]
        return [
            _Window(shares, rooms[turn % _WINDOWS][: shares[self.hosts.place].size])
            for turn, shares in enumerate(windows)
        ]

    def _shares(self, x: Array) -> list[Array]:
        """The share of each rank of this host in `x`. A short array is not worth all agents."""
        agents = min(self.hosts.agents, max(1, x.nbytes // _SHARE_BYTES))
        shares = [x[start:end] for start, end in bounds(x.size, agents)]
        return shares + [x[:0]] * (len(self.hosts.here) - agents)

    # -- of a block for each rank -----------------------------------------------------------------

    async def reduce_scatter(self, chunks: Sequence[Array], shard: Array, op: ReduceOp, dtype: str) -> None:
        hosts, carried = self.hosts, reductions.accumulator(op, dtype)
        summed = ReduceOp.SUM if op is ReduceOp.AVG else op
        wide = [chunk if carried == dtype else reductions.widened(chunk, dtype) for chunk in chunks]
        sizes = [chunk.size for chunk in chunks]
        plans = [_flat(hosts.carried(agent)) for agent in range(hosts.agents)]
        outgoing = [np.concatenate([wide[rank] for rank in plan]) for plan in plans]
        outgoing += [wide[0][:0]] * (len(hosts.here) - hosts.agents)
        mine = np.empty_like(outgoing[hosts.place])
        await self.within.reduce_scatter(outgoing, mine, summed, carried)
        handed = mine[:0]
        if self.between is not None:
            sections = _parts(mine, [sum(sizes[rank] for rank in ranks) for ranks in hosts.carried(hosts.place)])
            handed = np.empty_like(sections[hosts.mine])
            await self.between.reduce_scatter(sections, handed, summed, carried)
        total = np.empty(shard.size, mine.dtype) if carried != dtype else shard
        await self._deal(handed, sizes, total)
        self._finish(shard, total, op, dtype)

    async def _deal(self, handed: Array, sizes: Sequence[int], into: Array) -> None:
        """Each agent has the blocks of those ranks of its host that it carries, and gives each of them its block."""
        hosts = self.hosts
        outgoing, incoming = [into[:0]] * len(hosts.here), [into[:0]] * len(hosts.here)
        if self.between is not None:
            carried = hosts.carried(hosts.place)[hosts.mine]
            for rank, part in zip(carried, _parts(handed, [sizes[rank] for rank in carried]), strict=True):
                outgoing[hosts.here.index(rank)] = part
        incoming[hosts.place % hosts.agents] = into
        await self.within.alltoall(outgoing, incoming)

    async def allgather(self, blocks: Sequence[Array]) -> None:
        hosts, sizes = self.hosts, [block.size for block in blocks]
        nothing = blocks[0][:0]
        plans = [hosts.carried(agent) for agent in range(hosts.agents)]
        rooms = [np.empty(sum(sizes[rank] for rank in _flat(plan)), nothing.dtype) for plan in plans]
        rooms += [nothing] * (len(hosts.here) - hosts.agents)
        outgoing, incoming = [nothing] * len(hosts.here), [nothing] * len(hosts.here)
        outgoing[hosts.place % hosts.agents] = blocks[self.rank]
        sections: list[Array] = []
        if self.between is not None:
            plan = plans[hosts.place]
            sections = _parts(rooms[hosts.place], [sum(sizes[rank] for rank in ranks) for ranks in plan])
            carried = plan[hosts.mine]
            for rank, part in zip(carried, _parts(sections[hosts.mine], [sizes[r] for r in carried]), strict=True):
                incoming[hosts.here.index(rank)] = part
        await self.within.alltoall(outgoing, incoming)
        if self.between is not None:
            await self.between.allgather(sections)
        await self.within.allgather(rooms)
        for plan, room in zip(plans, rooms, strict=False):
            order = _flat(plan)
            for rank, part in zip(order, _parts(room, [sizes[rank] for rank in order]), strict=True):
                blocks[rank][...] = part

    # -- of blocks from one rank to one other -----------------------------------------------------

    async def gather(self, mine: Array, blocks: Sequence[Array], root: int) -> None:
        await self._whole.gather(mine, blocks, root)

    async def scatter(self, blocks: Sequence[Array], mine: Array, root: int) -> None:
        await self._whole.scatter(blocks, mine, root)

    async def alltoall(self, outgoing: Sequence[Array], incoming: Sequence[Array]) -> None:
        await self._whole.alltoall(outgoing, incoming)

    async def pass_on(self, mine: Array | None, dest: int, into: Array | None, source: int) -> None:
        await self._whole.pass_on(mine, dest, into, source)

    async def exchange(
        self, mine: Array, dests: Sequence[int], incoming: Sequence[Array], sources: Sequence[int]
    ) -> None:
        await self._whole.exchange(mine, dests, incoming, sources)

    @property
    def _agents(self) -> Collectives:
        assert self.between is not None, "only agents have a share"
        return self.between

    def _finish(self, x: Array, total: Array, op: ReduceOp, dtype: str) -> None:
        """Write the result into `x`, divided by the number of ranks for AVG."""
        if op is not ReduceOp.AVG:
            return
        if total is x:
            reductions.divide(x, dtype, self.size)
        else:
            reductions.put(x, dtype, total, self.size)


@contextlib.asynccontextmanager
async def _in_turn() -> AsyncIterator[Callable[[_Step, _Window], asyncio.Task[None]]]:
    """Yields what starts a step in the background, after those before. None is left when the context has ended."""
    exchanges: list[asyncio.Task[None]] = []

    async def follow(last: asyncio.Task[None] | None, step: _Step, window: _Window) -> None:
        if last is not None:
            await last
        await step(window)

    def start(step: _Step, window: _Window) -> asyncio.Task[None]:
        last = exchanges[-1] if exchanges else None
        exchanges.append(asyncio.get_running_loop().create_task(follow(last, step, window)))
        return exchanges[-1]

    try:
        yield start
    finally:
        for exchange in exchanges:
            exchange.cancel()
        await asyncio.gather(*exchanges, return_exceptions=True)


def _accumulator(x: Array, op: ReduceOp, dtype: str) -> tuple[Array, str, ReduceOp]:
    """The array to reduce in place, its dtype and the reduction.

    AVG of a half type is carried in float32, so that the quotient is rounded once.
    """
    carried = reductions.accumulator(op, dtype)
    total = x if carried == dtype else reductions.widened(x, dtype)
    return total, carried, ReduceOp.SUM if op is ReduceOp.AVG else op


def _flat(plan: Sequence[Sequence[int]]) -> list[int]:
    return [rank for ranks in plan for rank in ranks]


def _parts(x: Array, sizes: Sequence[int]) -> list[Array]:
    """Consecutive parts of `x`."""
    parts, start = [], 0
    for size in sizes:
        parts.append(x[start : start + size])
        start += size
    return parts
