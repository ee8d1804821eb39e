"""The dense collectives of one call on several hosts: the ranks of a host meet in its memory, and hosts by message.

A host sends and receives what one rank would, however many ranks it has. The first ranks of a host are its leaders, as
many as the host with the fewest ranks has. Each leader has a share of the array: it gets the share's sum over the ranks
of its host, exchanges it with the leaders of the same place at the other hosts, and hands it out to the ranks of its
host. So all leaders use the network at the same time. Each element is reduced along one way, in an order that depends
on the placement alone, and the result is copied. So all ranks get the same bits.

A long array passes in windows: while some are between the hosts, the ranks of a host reduce the next one. A collective
that moves each block from one rank to one other goes by message as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from asyncoll.algorithms.dense.message_call import MessageCall
from asyncoll.algorithms.dense.on_lane import bounds
from asyncoll.algorithms.seam.collectives import Body, Collectives
from asyncoll.runtime.hosts import Hosts
from asyncoll.statistics import Traffic
from asyncoll.tensors import reductions
from asyncoll.tensors.reductions import Array, ReduceOp

_SHARE_BYTES = 1 << 14  # the least that is worth another leader
_WINDOW_BYTES = 1 << 22
EXCHANGES = 2  # windows that are between the hosts at a time: while the messages of one wait, the others fill the wire


class _Window(NamedTuple):
    """A part of an array, and what this host has of it."""

    turn: int  # the number of windows before
    shares: list[Array]  # of the array, by place; empty for a rank that is no leader of this window
    mine: Array  # the share of this rank: one of `shares`, or memory beside it
    whole: int  # the bytes of the part


class _BlockWindow:
    """A part of the block of each rank, and the memory in which leaders exchange these parts."""

    def __init__(self, turn: int, blocks: Sequence[Array], bounds: Sequence[tuple[int, int]]) -> None:
        """`bounds` has the begin and the end of the part in each of `blocks`."""
        self.turn = turn
        self.bounds = bounds
        self.blocks = [block[start:end] for block, (start, end) in zip(blocks, bounds, strict=True)]
        self.sizes = [block.size for block in self.blocks]
        self.mine = self.blocks[0][:0]  # at a leader: the blocks that it carries
        self.rooms: list[Array] = []  # the same for each place, where all ranks of a host get them


T = TypeVar("T")
W = TypeVar("W", _Window, _BlockWindow)
# A step of one window: within the host, or between hosts.
_Step = Callable[[W], Coroutine[Any, Any, None]]


class Drive(Protocol):
    """Makes coroutines of the runtime's loop from those that await the collectives within a host."""

    def __call__(self, work: Coroutine[Any, Any, T], /) -> Coroutine[Any, Any, T]: ...


class TwoLevelCall:
    """The `Collectives` of one call."""

    overlaps = False

    def __init__(
        self, hosts: Hosts, whole: Collectives, within: Collectives, drive: Drive, between: Sequence[MessageCall]
    ) -> None:
        """`whole` is of all ranks, and `within` of those of this host: `drive` drives what awaits these.

        `between` has EXCHANGES lanes of the leaders of this rank's place, and none if this rank is no leader.
        """
        self.hosts = hosts
        self._whole = whole
        self._within = within
        self._drive = drive
        self.between = between
        self.rank = whole.rank
        self.size = whole.size
        self._levels = [within, *between, whole]
        self._open = contextlib.AsyncExitStack()

    @property
    def traffic(self) -> Traffic:
        return Traffic.total(level.traffic for level in self._levels)

    async def __aenter__(self) -> TwoLevelCall:
        within, *others = self._levels
        await within.__aenter__()  # waits for no rank
        self._open.push_async_exit(lambda *error: self._drive(within.__aexit__(*error)))
        for level in others:
            await self._open.enter_async_context(level)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.__aexit__(kind, error, trace)

    def on_host(self, body: Body[T]) -> Coroutine[Any, Any, T]:
        """`body`, with the collectives of the ranks of this host."""
        return self._drive(body(self._within))

    async def barrier(self) -> None:
        await self.on_host(lambda within: within.barrier())
        if self.between and self.hosts.place == 0:
            await self.between[0].barrier()
        # The ranks of a host go on once their leader has met those of the other hosts.
        await self.on_host(lambda within: within.barrier())

    # -- of one array -----------------------------------------------------------------------------

    async def allreduce(self, x: Array, op: ReduceOp, dtype: str) -> None:
        total, carried, summed = _accumulator(x, op, dtype)

        async def reduce_here(window: _Window) -> None:
            await self.on_host(lambda within: within.reduce_scatter(window.shares, window.mine, summed, carried))

        async def exchange(window: _Window) -> None:
            await self._leaders(window).allreduce(window.mine, summed, carried, window.whole)

        await self._in_windows(total, reduce_here, exchange, self._hand_out)
        self._finish(x, total, op, dtype)

    async def reduce(self, x: Array, op: ReduceOp, dtype: str, root: int) -> None:
        hosts = self.hosts
        total, carried, summed = _accumulator(x, op, dtype)

        async def reduce_here(window: _Window) -> None:
            await self.on_host(lambda within: within.reduce_scatter(window.shares, window.mine, summed, carried))

        async def exchange(window: _Window) -> None:
            await self._leaders(window).reduce(window.mine, summed, carried, hosts.host[root], window.whole)

        async def collect(window: _Window) -> None:
            if root in hosts.here:
                await self.on_host(lambda within: within.gather(window.mine, window.shares, hosts.here.index(root)))

        await self._in_windows(total, reduce_here, exchange, collect, in_place=False)
        if root == self.rank:
            self._finish(x, total, op, dtype)

    async def broadcast(self, x: Array, root: int) -> None:
        hosts = self.hosts

        async def share_out(window: _Window) -> None:
            if root in hosts.here:
                await self.on_host(lambda within: within.scatter(window.shares, window.mine, hosts.here.index(root)))

        async def exchange(window: _Window) -> None:
            await self._leaders(window).broadcast(window.mine, hosts.host[root], window.whole)

        await self._in_windows(x, share_out, exchange, self._hand_out)

    async def _hand_out(self, window: _Window) -> None:
        """Give each rank of this host the shares of all."""
        await self.on_host(lambda within: within.allgather(window.shares))

    async def _in_windows(
        self,
        x: Array,
        before: _Step[_Window],
        between: _Step[_Window],
        after: _Step[_Window],
        *,
        in_place: bool = True,
    ) -> None:
        """Take the steps for each window of `x`.

        Shares are exchanged in `x` itself, or with `in_place` False in memory beside it.
        """

        async def exchange(window: _Window) -> None:
            if self._exchanges(window):
                await between(window)

        await _pipelined(self._windows(x, in_place=in_place), before, exchange, after)

    def _exchanges(self, window: _Window) -> bool:
        """Whether this rank has a share of `window`. In a call without elements the first leaders meet nevertheless."""
        return window.mine.size > 0 or (not window.whole and self.hosts.place == 0)

    def _windows(self, x: Array, *, in_place: bool) -> list[_Window]:
        size = max(1, _WINDOW_BYTES // x.itemsize)
        windows = [self._shares(x[start : start + size]) for start in range(0, max(1, x.size), size)]
        place = self.hosts.place
        if in_place:
            mine = [shares[place] for shares in windows]
        else:
            # A short window has fewer and larger shares. EXCHANGES windows are between the hosts at a time, and one
            # more is handed out: they use so many rooms in turn.
            room = max(shares[place].size for shares in windows)
            rooms = [np.empty(room, x.dtype) for _ in windows[: EXCHANGES + 1]]
            mine = [rooms[turn % len(rooms)][: shares[place].size] for turn, shares in enumerate(windows)]
        return [
            _Window(turn, shares, mine[turn], sum(share.nbytes for share in shares))
            for turn, shares in enumerate(windows)
        ]

    def _shares(self, x: Array) -> list[Array]:
        """The share of each rank of this host in `x`. A short array is not worth all leaders."""
        leaders = min(self.hosts.leaders, max(1, x.nbytes // _SHARE_BYTES))
        shares = [x[start:end] for start, end in bounds(x.size, leaders)]
        return shares + [x[:0]] * (len(self.hosts.here) - leaders)

    # -- of a block for each rank -----------------------------------------------------------------

    async def reduce_scatter(self, chunks: Sequence[Array], shard: Array, op: ReduceOp, dtype: str) -> None:
        hosts, carried = self.hosts, reductions.accumulator(op, dtype)
        summed = ReduceOp.SUM if op is ReduceOp.AVG else op
        plans = self._plans()

        async def reduce_here(window: _BlockWindow) -> None:
            wide = [block if carried == dtype else reductions.widened(block, dtype) for block in window.blocks]
            outgoing = self._for_leaders([np.concatenate([wide[rank] for rank in plan]) for plan in plans])
            window.mine = np.empty_like(outgoing[hosts.place])
            await self.on_host(lambda within: within.reduce_scatter(outgoing, window.mine, summed, carried))

        async def exchange(window: _BlockWindow) -> None:
            if self.between:
                sections = self._sections(window)
                window.mine = np.empty_like(sections[hosts.mine])
                await self._leaders(window).reduce_scatter(sections, window.mine, summed, carried)

        async def deal(window: _BlockWindow) -> None:
            start, end = window.bounds[self.rank]
            mine = shard[start:end]
            total = mine if carried == dtype else np.empty(mine.size, window.mine.dtype)
            outgoing, incoming = [total[:0]] * len(hosts.here), [total[:0]] * len(hosts.here)
            if self.between:
                for place, part in self._own(window, window.mine):
                    outgoing[place] = part
            incoming[hosts.place % hosts.leaders] = total
            await self._swap(outgoing, incoming)
            self._finish(mine, total, op, dtype)

        await _pipelined(_block_windows(chunks), reduce_here, exchange, deal)

    async def allgather(self, blocks: Sequence[Array]) -> None:
        hosts, plans, nothing = self.hosts, self._plans(), blocks[0][:0]

        async def collect(window: _BlockWindow) -> None:
            rooms = [np.empty(sum(window.sizes[rank] for rank in plan), nothing.dtype) for plan in plans]
            window.rooms = self._for_leaders(rooms)
            window.mine = window.rooms[hosts.place]
            outgoing, incoming = [nothing] * len(hosts.here), [nothing] * len(hosts.here)
            outgoing[hosts.place % hosts.leaders] = window.blocks[self.rank]
            if self.between:
                for place, part in self._own(window, self._sections(window)[hosts.mine]):
                    incoming[place] = part
            await self._swap(outgoing, incoming)

        async def exchange(window: _BlockWindow) -> None:
            if self.between:
                await self._leaders(window).allgather(self._sections(window))

        async def hand_out(window: _BlockWindow) -> None:
            await self.on_host(lambda within: within.allgather(window.rooms))
            for plan, room in zip(plans, window.rooms, strict=False):
                for rank, part in zip(plan, _parts(room, [window.sizes[rank] for rank in plan]), strict=True):
                    window.blocks[rank][...] = part

        await _pipelined(_block_windows(blocks), collect, exchange, hand_out)

    async def _swap(self, outgoing: list[Array], incoming: list[Array]) -> None:
        """Between the ranks of this host and the leaders that carry their blocks."""
        hosts = self.hosts
        # If all ranks are leaders, each carries its own blocks.
        if hosts.leaders == len(hosts.here):
            incoming[hosts.place][...] = outgoing[hosts.place]
        else:
            await self.on_host(lambda within: within.alltoall(outgoing, incoming))

    def _plans(self) -> list[list[int]]:
        """For each leader, the ranks whose blocks it carries, in the order in which these lie in its memory."""
        return [_flat(self.hosts.carried[leader]) for leader in range(self.hosts.leaders)]

    def _for_leaders(self, rooms: list[Array]) -> list[Array]:
        """`rooms` of the leaders, and empty ones of the other ranks of this host."""
        return rooms + [rooms[0][:0]] * (len(self.hosts.here) - self.hosts.leaders)

    def _sections(self, window: _BlockWindow) -> list[Array]:
        """For each host, the blocks of its ranks that this leader carries."""
        carried = self.hosts.carried[self.hosts.place]
        return _parts(window.mine, [sum(window.sizes[rank] for rank in ranks) for ranks in carried])

    def _own(self, window: _BlockWindow, section: Array) -> Iterator[tuple[int, Array]]:
        """The places of the ranks of this host that this leader carries, and the block of each in `section`."""
        hosts = self.hosts
        ranks = hosts.carried[hosts.place][hosts.mine]
        return zip(map(hosts.here.index, ranks), _parts(section, [window.sizes[rank] for rank in ranks]), strict=True)

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

    def _leaders(self, window: _Window | _BlockWindow) -> MessageCall:
        """The lane in which `window` is exchanged. The window before in the same lane has been exchanged."""
        return self.between[window.turn % EXCHANGES]

    def _finish(self, x: Array, total: Array, op: ReduceOp, dtype: str) -> None:
        """Write the result into `x`, divided by the number of ranks for AVG."""
        if op is not ReduceOp.AVG:
            return
        if total is x:
            reductions.divide(x, dtype, self.size)
        else:
            reductions.put(x, dtype, total, self.size)


async def _pipelined(windows: Iterable[W], before: _Step[W], between: _Step[W], after: _Step[W]) -> None:
    """Take the steps for each window. The windows follow each other in each step, at all ranks alike."""
    under_way: deque[tuple[W, asyncio.Task[None]]] = deque()
    async with _background() as start:
        for window in windows:
            await before(window)
            exchanged = None
            # The oldest exchange ends before the next one begins, which uses its lane. What follows it comes later: the
            # network has the new one to carry meanwhile.
            if len(under_way) == EXCHANGES:
                exchanged, exchange = under_way.popleft()
                await exchange
            under_way.append((window, start(between(window))))
            if exchanged is not None:
                await after(exchanged)
        for window, exchange in under_way:
            await exchange
            await after(window)


@contextlib.asynccontextmanager
async def _background() -> AsyncIterator[Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]]:
    """Yields what starts a coroutine in the background. None is left when the context has ended."""
    tasks: list[asyncio.Task[None]] = []

    def start(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        tasks.append(asyncio.get_running_loop().create_task(work))
        return tasks[-1]

    try:
        yield start
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _accumulator(x: Array, op: ReduceOp, dtype: str) -> tuple[Array, str, ReduceOp]:
    """The array to reduce in place, its dtype and the reduction.

    AVG of a half type is carried in float32, so that the quotient is rounded once.
    """
    carried = reductions.accumulator(op, dtype)
    total = x if carried == dtype else reductions.widened(x, dtype)
    return total, carried, ReduceOp.SUM if op is ReduceOp.AVG else op


def _block_windows(blocks: Sequence[Array]) -> Iterator[_BlockWindow]:
    """Made one by one: each has memory of its own."""
    count = max(1, -(-sum(block.nbytes for block in blocks) // _WINDOW_BYTES))
    for turn, parts in enumerate(zip(*(bounds(block.size, count) for block in blocks), strict=True)):
        yield _BlockWindow(turn, blocks, parts)


def _flat(plan: Sequence[Sequence[int]]) -> list[int]:
    return [rank for ranks in plan for rank in ranks]


def _parts(x: Array, sizes: Sequence[int]) -> list[Array]:
    """Consecutive parts of `x`."""
    parts, start = [], 0
    for size in sizes:
        parts.append(x[start : start + size])
        start += size
    return parts
