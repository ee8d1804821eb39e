"""The facade that people hold: checks, numbers, describes and starts every call.

Calls are numbered in program order when they are made, not when they are awaited, so tasks may await them in any order;
every rank must make the same calls on a communicator in the same order. A call starts at once, on the runtime's loop,
and the coroutine it returns waits for it. Arguments are checked before a number is taken: a UsageError sends nothing.
A call needs a running event loop: that of the program or one in another thread. `comm.rpc` needs that of the program.

Every collective raises, when awaited: MismatchError if ranks called different things, PeerLostError if a rank is gone,
AbortedError if one gave up, ClosedError after the communicator was closed. Cancelling a collective in flight aborts the
communicator, because its peers cannot be left waiting; cancelling a wait-avoiding call does not.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeVar

import numpy as np

from asyncoll.algorithms.backend import Collectives
from asyncoll.algorithms.core import Core
from asyncoll.algorithms.dense import on_lane
from asyncoll.algorithms.rounds.operation import Opening, Operation, check_operation
from asyncoll.algorithms.rounds.operations import Reduction
from asyncoll.algorithms.rounds.tally import OperationStatistics
from asyncoll.algorithms.sparse.oktopk import Rules
from asyncoll.algorithms.sparse.operations import SparseReduction, Specification
from asyncoll.algorithms.sparse.selection import Feedback
from asyncoll.arguments import digest, real, text, whole
from asyncoll.errors import NonFiniteError, UsageError, describe, text_of
from asyncoll.rpc.ranks import Rpc
from asyncoll.runtime.group import Group, Lane
from asyncoll.runtime.signature import Signature, Site
from asyncoll.statistics import CallStatistics
from asyncoll.tensors import reductions, shapes
from asyncoll.tensors.bundle import Bundle, Single, bundle
from asyncoll.tensors.operands import Operand, as_operand, build
from asyncoll.tensors.reductions import ReduceOp

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Statistics:
    """Totals since the start.

    Messages and bytes are those of the rank, in all of its communicators: of all messages, plus those of `calls` in
    shared memory that have ended (what a byte is there, `Traffic` says). So they are at least the sums of `calls` over
    the rank's communicators. In shared memory, wait-avoiding rounds and calls of functions are not counted.
    """

    rank: int
    messages_sent: int
    messages_received: int
    bytes_sent: int
    bytes_received: int
    operations: dict[str, OperationStatistics]  # the wait-avoiding operations of this communicator, by name
    calls: dict[str, CallStatistics]  # its other calls, by operation


class Communicator:
    """Ordered ranks that call collectives together. Get one from `asyncoll.run`, `asyncoll.connect` or `split`."""

    def __init__(self, core: Core, hosts: tuple[str, ...]) -> None:
        """`hosts` names the host of each rank."""
        self.rank = core.member.group.rank
        self.size = core.member.group.size
        self.hosts = hosts
        self._core = core
        self._calls = core.calls

    @property
    def rpc(self) -> Rpc:
        """Functions of every rank that the others may call."""
        return self._core.rpc

    @property
    def local_rank(self) -> int:
        """My place among the ranks of my host."""
        return self.hosts[: self.rank].count(self.hosts[self.rank])

    @property
    def local_size(self) -> int:
        """How many ranks of this communicator run on my host."""
        return self.hosts.count(self.hosts[self.rank])

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.size}>"

    # -- collectives ------------------------------------------------------------------------------

    def allreduce(self, x: T, op: ReduceOp = ReduceOp.SUM) -> Coroutine[Any, Any, T]:
        """Reduce `x` elementwise over all ranks, in place; returns `x`. Same shape and dtype at every rank.

        Every rank ends with the same bits. AVG is the sum divided by `size`, in the dtype of `x` (floats only).
        Of halves it is computed in float32 and rounded once, in every form. SUM of halves may overflow on the way: by
        message each partial sum is a half, in memory the sum alone.
        """
        operand = as_operand(x, writable=True)
        reductions.check_reduction(op, operand.dtype)

        async def body(collectives: Collectives) -> T:
            await collectives.allreduce(operand.flat, op, operand.dtype)
            operand.write_back()
            return x

        return self._calls.start(self._call("allreduce", operand, op.name), body, operand.flat.nbytes)

    def broadcast(self, x: T, root: int = 0) -> Coroutine[Any, Any, T]:
        """Copy the root's `x` into every rank's `x`; returns `x`. Same shape and dtype at every rank."""
        operand = as_operand(x, writable=True)
        root = self._place(root, "root")

        async def body(collectives: Collectives) -> T:
            await collectives.broadcast(operand.flat, root)
            operand.write_back()
            return x

        return self._calls.start(self._call("broadcast", operand, f"root {root}"), body, operand.flat.nbytes)

    def reduce(self, x: T, root: int = 0, op: ReduceOp = ReduceOp.SUM) -> Coroutine[Any, Any, T]:
        """Reduce `x` into the root's `x`, in place there and untouched elsewhere; returns `x`."""
        root = self._place(root, "root")
        operand = as_operand(x, writable=self.rank == root)
        reductions.check_reduction(op, operand.dtype)

        async def body(collectives: Collectives) -> T:
            await collectives.reduce(operand.flat, op, operand.dtype, root)
            if self.rank == root:
                operand.write_back()
            return x

        return self._calls.start(self._call("reduce", operand, f"{op.name}, root {root}"), body, operand.flat.nbytes)

    def reduce_scatter(self, x: T, op: ReduceOp = ReduceOp.SUM) -> Coroutine[Any, Any, T]:
        """Reduce `x` and return my shard of rows, as a new tensor; `x` is untouched.

        Rows (dimension 0) are split as evenly as they go, the first `rows mod size` ranks having one more.
        """
        operand = as_operand(x)
        reductions.check_reduction(op, operand.dtype)
        rows, row = self._rows(operand, "reduce_scatter")
        edges_of = on_lane.bounds(rows, self.size)

        async def body(collectives: Collectives) -> T:
            chunks = [operand.flat[start * row : end * row] for start, end in edges_of]
            shard = np.empty_like(chunks[self.rank])
            await collectives.reduce_scatter(chunks, shard, op, operand.dtype)
            start, end = edges_of[self.rank]
            mine: T = operand.like(shard, (end - start, *operand.shape[1:]))
            return mine

        return self._calls.start(self._call("reduce_scatter", operand, op.name), body, operand.flat.nbytes)

    def allgather(self, x: T) -> Coroutine[Any, Any, T]:
        """Stack every rank's `x` along a new first dimension; returns a new tensor of shape (size, *x.shape)."""
        operand = as_operand(x)

        async def body(collectives: Collectives) -> T:
            stacked, blocks = shapes.blocks(operand, self.size)
            blocks[self.rank][...] = operand.flat
            await collectives.allgather(blocks)
            result: T = operand.like(stacked, (self.size, *operand.shape))
            return result

        return self._calls.start(self._call("allgather", operand), body, operand.flat.nbytes)

    def allgatherv(self, x: T) -> Coroutine[Any, Any, list[T]]:
        """Collect every rank's `x`, of any shape and one dtype; returns the list of them by rank, as new tensors."""
        operand = as_operand(x)

        async def body(collectives: Collectives) -> list[T]:
            rows = shapes.rows(self.size)
            rows[self.rank][...] = shapes.encode_shape(operand.shape)
            await collectives.allgather(rows)
            blocks, extents = shapes.receptacles(operand.dtype, rows)
            blocks[self.rank][...] = operand.flat
            await collectives.allgather(blocks)
            return [operand.like(block, shape) for block, shape in zip(blocks, extents, strict=True)]

        return self._calls.start(self._call("allgatherv", operand, any_count=True), body, operand.flat.nbytes)

    def gather(self, x: T, root: int = 0) -> Coroutine[Any, Any, T | None]:
        """Stack every rank's `x` at the root, as a new tensor of shape (size, *x.shape); None elsewhere."""
        operand = as_operand(x)
        root = self._place(root, "root")

        async def body(collectives: Collectives) -> T | None:
            if self.rank != root:
                await collectives.gather(operand.flat, [], root)
                return None
            stacked, blocks = shapes.blocks(operand, self.size)
            await collectives.gather(operand.flat, blocks, root)
            result: T = operand.like(stacked, (self.size, *operand.shape))
            return result

        return self._calls.start(self._call("gather", operand, f"root {root}"), body, operand.flat.nbytes)

    def scatter(self, xs: Sequence[T] | None = None, root: int = 0) -> Coroutine[Any, Any, T]:
        """Give the root's `xs[rank]` to each rank, as a new tensor; `xs` is read at the root alone.

        `xs` holds `size` tensors of one dtype, whose shapes may differ.
        """
        root = self._place(root, "root")
        operands = self._operands(xs, "scatter") if self.rank == root else []

        async def body(collectives: Collectives) -> T:
            heads = [shapes.encode_head(operand) for operand in operands]
            head = np.empty(2 + shapes.SHAPE_WORDS, np.int64)
            await collectives.scatter(heads, head, root)
            dtype, as_torch, mine, shape = shapes.decode_head(head)
            await collectives.scatter([operand.flat for operand in operands], mine, root)
            result: T = build(mine, dtype, shape, as_torch=as_torch)
            return result

        return self._calls.start(
            self._call("scatter", None, f"root {root}"), body, sum(x.flat.nbytes for x in operands)
        )

    def alltoall(self, x: T) -> Coroutine[Any, Any, T]:
        """Send the i-th of `size` equal blocks of rows of `x` to rank i; returns what came, by rank, as a new tensor.

        The number of rows (dimension 0) must be a multiple of `size`.
        """
        operand = as_operand(x)
        rows, _ = self._rows(operand, "alltoall")
        if rows % self.size:
            raise UsageError(f"alltoall of {rows} rows among {self.size} ranks: use a multiple, or alltoallv")

        async def body(collectives: Collectives) -> T:
            received = np.empty_like(operand.flat)
            parts = on_lane.bounds(operand.flat.size, self.size)
            outgoing = [operand.flat[start:end] for start, end in parts]
            await collectives.alltoall(outgoing, [received[start:end] for start, end in parts])
            result: T = operand.like(received, operand.shape)
            return result

        return self._calls.start(self._call("alltoall", operand), body, operand.flat.nbytes)

    def alltoallv(self, xs: Sequence[T]) -> Coroutine[Any, Any, list[T]]:
        """Send `xs[i]` to rank i, of any shapes and one dtype; returns what came, by rank, as new tensors."""
        operands = self._operands(xs, "alltoallv")

        async def body(collectives: Collectives) -> list[T]:
            rows = shapes.rows(self.size)
            await collectives.alltoall([shapes.encode_shape(operand.shape) for operand in operands], rows)
            blocks, extents = shapes.receptacles(operands[0].dtype, rows)
            await collectives.alltoall([operand.flat for operand in operands], blocks)
            return [operands[0].like(block, shape) for block, shape in zip(blocks, extents, strict=True)]

        return self._calls.start(
            self._call("alltoallv", operands[0], any_count=True), body, sum(x.flat.nbytes for x in operands)
        )

    def barrier(self) -> Coroutine[Any, Any, None]:
        """Return once every rank has called it."""
        return self._calls.start(self._call("barrier", None), lambda collectives: collectives.barrier())

    # -- point to point ---------------------------------------------------------------------------

    def send(self, x: object, dest: int, tag: int = 0) -> Coroutine[Any, Any, None]:
        """Send `x` to `dest`. Messages of one tag between two ranks are received in the order in which they were sent.

        Returns when `x` may be reused: at once for a small tensor, and once the receive is posted above 1 MiB.
        """
        operand = as_operand(x)
        dest, tag = self._peer(dest, "dest"), whole(tag, "tag")

        async def body(lane: Lane) -> None:
            await lane.send(dest, 0, operand.flat)

        return self._pairwise(operand, self.rank, dest, tag, body)

    def recv(self, x: T, source: int, tag: int = 0) -> Coroutine[Any, Any, T]:
        """Receive from `source` into `x`, in place; returns `x`. Dtype and number of elements are those of the send."""
        operand = as_operand(x, writable=True)
        source, tag = self._peer(source, "source"), whole(tag, "tag")

        async def body(lane: Lane) -> T:
            await lane.recv(source, 0, operand.flat)
            operand.write_back()
            return x

        return self._pairwise(operand, source, self.rank, tag, body)

    # -- wait-avoiding ----------------------------------------------------------------------------

    def solo_allreduce(
        self, x: object, *, name: str = "solo", op: ReduceOp = ReduceOp.SUM, sync_every: int = 0, history: int = 0
    ) -> Coroutine[Any, Any, Reduction]:
        """Allreduce that the first rank to arrive starts for all (seed 000, section 4.2): quorum 1.

        `x` is this rank's contribution and comes back as the result of `Reduction.round`, the same bits at every rank.
        Ranks that have not arrived give what they staged before, or nothing. A contribution that comes too late is
        added to the next one and enters a later round: none is lost or counted twice. A caller that is behind gets the
        newest result at once, so it must count rounds (`Reduction.round`), never its own calls. What is still staged
        when the world ends is dropped. `x` may be a list of tensors, of any dtypes: buckets that share one round.

        `name` tells operations apart; each has its own rounds, and its dtypes, numbers of elements and options are
        fixed by the first call at any rank. Calls of one rank on one name take turns. AVG divides by `size`, as the
        paper does, whatever the number of contributors. Every `sync_every`-th round (0: none) waits for all ranks,
        which bounds staleness by that many rounds.

        Cancelling the wait leaves the contribution in, and the round goes on; the next call tells of it, as missed or
        skipped. If a round has begun that uses `x` itself (by message, a long one without `history`; in memory, a
        registered `x`), the cancellation waits for its end. `x` is the caller's again afterwards, and holds nothing to
        rely on.

        Every rank keeps the last `history` results before the newest. A rank that comes late by no more rounds gets
        them in `Reduction.missed`, so that it can apply every result exactly once, as the ranks in time did.

        A rank that has ended its program is there for every round that others would wait for it in, with nothing more
        to give: synchronous rounds and quorums then include fewer ranks, but nobody waits for ever. That is about
        programs: a rank that only calls other names from now on is waited for.
        """
        return self._wait_avoiding(x, name, op, Opening.SOLO, sync_every=sync_every, history=history)

    def majority_allreduce(
        self,
        x: object,
        *,
        candidates: int = 1,
        name: str = "majority",
        op: ReduceOp = ReduceOp.SUM,
        seed: int = 0,
        sync_every: int = 0,
        history: int = 0,
    ) -> Coroutine[Any, Any, Reduction]:
        """Allreduce that starts when a rank arrives that was drawn for the round (seed 000, section 4.3).

        All ranks draw the same `candidates` ranks for each round from `seed`; the first of these to arrive opens it.

        Guaranteed: one of the candidates was there. Not guaranteed: a majority. If the ranks' order of arrival is
        random, (size + 1) / (candidates + 1) of them have arrived on average, but with one candidate each number from
        1 to `size` is as likely as any other, so about half of the rounds have fewer than half of the ranks. And if
        all candidates are slow, everybody waits for the first of them. `quorum_allreduce` keeps a number instead. One
        candidate is the paper's majority; as many as ranks are solo (seed 000, section 8, asks for what is between).

        A candidate that comes late for an older round, while at least half of the ranks wait for it, opens the round
        at once. Otherwise as `solo_allreduce`.
        """
        rules: dict[str, Any] = {"candidates": candidates, "seed": seed, "sync_every": sync_every, "history": history}
        return self._wait_avoiding(x, name, op, Opening.MAJORITY, **rules)

    def quorum_allreduce(
        self,
        x: object,
        *,
        quorum: int,
        name: str = "quorum",
        op: ReduceOp = ReduceOp.SUM,
        seed: int = 0,
        sync_every: int = 0,
        history: int = 0,
    ) -> Coroutine[Any, Any, Reduction]:
        """Allreduce that starts when `quorum` ranks have arrived, always: 1 is solo, `size` a full allreduce.

        A rank drawn for each round from `seed` counts the arrivals; its caller need not be there. Ranks that have
        ended their program count as arrived. Otherwise as `solo_allreduce`.
        """
        rules: dict[str, Any] = {"quorum": quorum, "seed": seed, "sync_every": sync_every, "history": history}
        return self._wait_avoiding(x, name, op, Opening.QUORUM, **rules)

    def group_allreduce(
        self,
        x: object,
        *,
        group_size: int,
        name: str = "group",
        op: ReduceOp = ReduceOp.SUM,
        fixed: bool = False,
        sync_every: int = 0,
    ) -> Coroutine[Any, Any, Reduction]:
        """Allreduce within the groups of a round, started for all by the first rank to arrive (seed 002, section 3).

        For models rather than gradients: a contribution replaces this rank's earlier one and stays, so a rank that
        has not arrived gives its newest `x` again, or nothing before its first call. `x` comes back as the result of
        `Reduction.group`, the ranks of this rank's group; `Reduction.active` of them had something to give, and AVG
        divides by that. Unless `Reduction.included`, this rank's own part in it is an older `x`: it is stale. If nobody
        in the group had anything to give yet (`active` is 0), `x` stays as it is.

        The groups of a round are of `group_size` ranks, or, where that does not divide `size`, ceil(size / group_size)
        groups of nearly equal size. They change from round to round so that an update reaches all ranks in about
        log(size) / log(group_size) rounds (`asyncoll.algorithms.rounds.grouping`); `fixed` groups never change.
        Every `sync_every`-th round (0: none) waits for all ranks and reduces over all. Otherwise as `solo_allreduce`.
        """
        size = whole(group_size, "group_size")
        if not 1 <= size <= self.size:
            raise UsageError(f"group_size {size} is not between 1 and the number of ranks, {self.size}")
        return self._wait_avoiding(x, name, op, Opening.SOLO, fixed=bool(fixed), group_size=size, sync_every=sync_every)

    # -- sparse -----------------------------------------------------------------------------------

    def sparse_allreduce(
        self,
        x: object,
        *,
        density: float,
        algorithm: str = "oktopk",
        name: str = "sparse",
        thresholds_every: int = 1,
        regions_every: int = 64,
        feedback: Feedback | None = None,
        global_threshold: str = "auto",
        dense: bool = False,
    ) -> Coroutine[Any, Any, SparseReduction]:
        """Add up the largest elements of all ranks' accumulators `x`; `x` keeps the residual (seed 004, algorithm 2).

        k = density n of the n elements of `x` (floats of any shape; the same at every rank) are wanted. `x` comes back
        with 0 where its values are in the sum, and unchanged elsewhere, so nothing is lost: at every element, the
        sum of all ranks' `x` before is the result plus the sum of all ranks' `x` after, but for rounding and, with
        gTopk, `SparseReduction.lost_values`. Zeros are not sent, except by "dense". Sums may overflow to infinity.

        `algorithm`: "oktopk"; or "topka", "topkdsa", "gtopk", "gaussiank", "dense", which it is compared with.
        Ok-Topk's thresholds are exact in every `thresholds_every`-th round and reused in between, when more or fewer
        than k elements may be selected (the paper takes 32 or 128); it cuts the regions anew every `regions_every`
        rounds. `feedback` lets thresholds that are reused follow the counts, and Gaussiank adjust its own; the paper's
        do not.
        `global_threshold`: "histogram" finds the exact one by O(1) words, "allgather" as in the paper, by as many as
        there are sums; "auto" by whichever takes fewer. With `dense` the result holds the sum as a tensor like `x`,
        too. Halves are summed, and returned, in float32.

        What is kept from round to round belongs to the `name`; algorithm, density, options, shape and dtype are fixed
        by its first call, and one call at a time may be under way. Every rank must call it, in the order of its other
        calls. What to give is chosen at once, in the caller's thread; then it goes by message or through shared memory
        as other collectives do, and as they do it fails, or ends the communicator if it is cancelled: `x` is then as it
        was before, or the residual if the round was over.

        Raises NonFiniteError at every rank, and changes nothing, if `x` holds NaN or infinity at any. It still does
        then: a gradient that was added to the residual must be looked at before, or the residual restored.
        """
        operand = as_operand(x, writable=True)
        name, algorithm = text(name, "name"), text(algorithm, "algorithm")
        periods = whole(thresholds_every, "thresholds_every"), whole(regions_every, "regions_every")
        rules = Rules(*periods, feedback, text(global_threshold, "global_threshold"))
        share = real(density, "density")
        self._core.member.check_caller()
        operation = self._core.sparse.get(name, Specification(algorithm, share, operand.dtype, operand.shape, rules))
        if operation.is_busy:
            self._core.member.check_open()  # what ended the call that is under way, rather than that it is
            self._core.member.check()
        chosen = operation.choose(operand)
        call = self._call("sparse_allreduce", operand, str(operation))

        async def body(collectives: Collectives) -> SparseReduction:
            try:
                return await operation.reduce(collectives, operand, chosen, dense=dense)
            except NonFiniteError as error:
                raise NonFiniteError(tuple(self._core.member.group.ranks[place] for place in error.ranks)) from None

        def discarded() -> None:
            # Only this rank does not know the result.
            self._core.member.abort(f"{call} was cancelled, or never awaited")

        return self._calls.start(call, body, chosen.part.values.nbytes, discarded)

    # -- memory -----------------------------------------------------------------------------------

    def empty(self, shape: SupportsIndex | Sequence[SupportsIndex], dtype: Any) -> Any:
        """A tensor with arbitrary content in memory that the ranks of this host share ("registered").

        A numpy array for a numpy dtype (or its name), a torch tensor for a torch dtype. Collectives reduce it where it
        lies, without copies. Where ranks share no memory it is an ordinary tensor. Views of it are registered too; its
        memory is given back with this rank's next call after the last of them is gone. Local: others need not call it.
        A forked child has a copy of it as it was at the fork, which takes as much memory and some time.

        Raises UsageError if the host has not so much memory left.
        """
        return self._core.memory.empty(shape, dtype)

    # -- the communicator itself ------------------------------------------------------------------

    def split(self, color: int | None, key: int = 0) -> Coroutine[Any, Any, Communicator | None]:
        """A communicator of the ranks that gave the same `color`, ordered by (`key`, rank); None for color None.

        Every rank must call it. The new one numbers its own calls; it closes with the world, and what it uses of shared
        memory (some MiB once it has been used) is given back then: make few, and use them again.
        """
        color = None if color is None else whole(color, "color")
        key = whole(key, "key")
        call = self._call("split", None)

        async def body(collectives: Collectives) -> Communicator | None:
            rows = shapes.rows(self.size, 3)
            rows[self.rank][...] = (color is not None, color or 0, key)
            await collectives.allgather(rows)
            if color is None:
                return None
            places = [place for place, row in enumerate(rows) if row[0] and row[1] == color]
            places.sort(key=lambda place: (int(rows[place][2]), place))
            ranks = tuple(self._core.member.group.ranks[place] for place in places)
            context = digest(self._core.member.communicator, "split", call.number, color)
            group = Group(ranks, places.index(self.rank), context)
            hosts = tuple(self.hosts[place] for place in places)
            return Communicator(self._core.split(group), hosts)

        return self._calls.start(call, body)

    def statistics(self) -> Statistics:
        """Totals so far, as a value."""
        self._core.member.endpoint.check_not_forked()
        calls = self._calls.ledger.totals()  # before the rank's, which are to be no less
        endpoint = self._core.member.endpoint
        traffic = [endpoint.traffic, *endpoint.in_memory.totals().values()]
        return Statistics(
            rank=self.rank,
            messages_sent=sum(part.messages_sent for part in traffic),
            messages_received=sum(part.messages_received for part in traffic),
            bytes_sent=sum(part.bytes_sent for part in traffic),
            bytes_received=sum(part.bytes_received for part in traffic),
            operations=self._core.operations.statistics(),
            calls=calls,
        )

    def abort(self, reason: str) -> None:
        """Give up: every pending and later call on this communicator raises AbortedError, at every rank.

        Local, immediate, idempotent; never blocks.
        """
        self._core.member.endpoint.check_not_forked()
        self._core.member.abort(text_of(reason))

    # -- inside -----------------------------------------------------------------------------------

    def _call(self, operation: str, operand: Operand | None, detail: str = "", *, any_count: bool = False) -> Signature:
        self._core.memory.give_back()
        count = -1 if operand is None or any_count else operand.flat.size
        return self._calls.number(operation, operand.dtype if operand else "", count, detail, _site())

    def _pairwise(
        self, operand: Operand, source: int, dest: int, tag: int, body: Callable[[Lane], Awaitable[T]]
    ) -> Coroutine[Any, Any, T]:
        detail = f"from rank {source} to rank {dest}, tag {tag}"
        self._core.member.check_caller()
        try:
            number = self._calls.number_pair(source, dest, tag)
            call = Signature("send/recv", number, operand.dtype, operand.flat.size, detail, _site())
            return self._calls.start_pair(call, source, dest, tag, body)
        except BaseException as error:  # a signal handler's: this rank's next message is not what its peer waits for
            self._core.member.abort(f"send/recv {detail} was interrupted: {describe(error)}")
            raise

    def _wait_avoiding(
        self, x: object, name: str, op: ReduceOp, opening: Opening, *, fixed: bool = False, **rules: int
    ) -> Coroutine[Any, Any, Reduction]:
        core, contribution = self._core, bundle(x, op)
        if core.memory.unused:
            core.memory.give_back()
        given = (name, op, opening, fixed, contribution.layout, contribution.boundaries, *rules, *rules.values())
        try:
            spec = core.plans.get((given, *map(type, given)))
        except TypeError:  # an array without dimensions, for one, is a number, too, and has no hash
            spec = None
        if spec is None:
            spec = self._plan(given, name, op, opening, fixed, contribution, rules)
        return core.operations.start(spec, contribution, _site())

    def _plan(
        self,
        given: tuple[object, ...],
        name: str,
        op: ReduceOp,
        opening: Opening,
        fixed: bool,
        contribution: Bundle | Single,
        rules: dict[str, int],
    ) -> Operation:
        """The operation that these arguments stand for. Raises UsageError if it makes no sense.

        It is remembered for arguments of exact built-in types: others may equal them, and yet mean something else.
        """
        reductions.check_reduction(op, contribution.layout[0][0])
        exact = {rule: whole(value, rule) for rule, value in rules.items()}
        layout, buckets = contribution.layout, contribution.boundaries
        operation = Operation(text(name, "name"), layout, op, opening, fixed=fixed, buckets=buckets, **exact)
        check_operation(operation, self.size)
        if {*map(type, rules.values())} <= {int} and type(name) is str:
            self._core.remember((given, *map(type, given)), operation)
        return operation

    def _operands(self, xs: Sequence[T] | None, operation: str) -> list[Operand]:
        try:
            given = list(xs)  # type: ignore[arg-type]
        except TypeError:
            given = []
        if len(given) != self.size:
            what = f"{len(given)}" if given else f"{xs!r:.60}"
            raise UsageError(f"{operation} needs one tensor for each of the {self.size} ranks, got {what}")
        operands = [as_operand(x) for x in given]
        if len({operand.dtype for operand in operands}) > 1:
            raise UsageError(f"{operation} needs tensors of one dtype, got {sorted({o.dtype for o in operands})}")
        return operands

    def _rows(self, operand: Operand, operation: str) -> tuple[int, int]:
        """How many rows `operand` has, and elements in each."""
        if not operand.shape:
            raise UsageError(f"{operation} splits dimension 0, but this tensor has none: pass x.reshape(1)")
        rows = operand.shape[0]
        return rows, operand.flat.size // rows if rows else 0

    def _place(self, rank: object, what: str) -> int:
        place = whole(rank, what)
        if not 0 <= place < self.size:
            raise UsageError(f"{what} {place} is not one of the ranks 0 to {self.size - 1}")
        return place

    def _peer(self, rank: object, what: str) -> int:
        place = self._place(rank, what)
        if place == self.rank:
            raise UsageError(f"{what} {place} is this rank itself: keep the tensor instead")
        return place


def _site() -> Site:
    """Where the user's code made the call: the first frame outside this module."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return Site(frame.f_code.co_filename, frame.f_lineno)
