"""The facade: `Communicator` checks, numbers, describes and starts every call.

The order of the steps of a call matters. Arguments are checked before the call takes a number, so that a UsageError
leaves the numbers of all ranks equal. The number is taken when the call is made, not when it is awaited, so that the
order in which tasks run does not matter. The docstring of each method states its guarantees.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from sys import intern
from types import TracebackType
from typing import Any, Self, SupportsIndex, TypeVar

import numpy as np

from asyncoll.algorithms.core import Core
from asyncoll.algorithms.dense import on_lane
from asyncoll.algorithms.gossip import graphs, neighbors
from asyncoll.algorithms.gossip.graphs import Graph
from asyncoll.algorithms.gossip.pairwise import Gossip
from asyncoll.algorithms.guarantees import (
    CANCELLATION,
    CANCELLATION_IN_PLACE,
    COLLECTIVE,
    COLLECTIVE_IF_AWAITED,
    COLLECTIVE_IN_GRAPH,
    LEAVE_ALONE,
    READS,
    ROUNDS,
    ROUNDS_IN_GROUPS,
    guarantees,
    round_guarantees,
)
from asyncoll.algorithms.rounds.operation import Opening
from asyncoll.algorithms.rounds.reduction import Reduction
from asyncoll.algorithms.rounds.repeats import NO_REPEAT
from asyncoll.algorithms.seam.call import Call
from asyncoll.algorithms.seam.collectives import Body, Collectives
from asyncoll.algorithms.seam.short_calls import NoShortCalls
from asyncoll.algorithms.sparse.oktopk import Rules
from asyncoll.algorithms.sparse.selection import Feedback
from asyncoll.algorithms.sparse.sparse_operations import SparseReduction, Specification
from asyncoll.algorithms.totals import Statistics
from asyncoll.arguments import digest, number_of_samples, real, text, whole
from asyncoll.errors import NonFiniteError, Reason, UsageError, describe, text_of
from asyncoll.rpc.ranks import Rpc
from asyncoll.runtime.group import Group
from asyncoll.runtime.signature import site_outside
from asyncoll.runtime.uncopied import Uncopied
from asyncoll.tensors import reductions, shapes
from asyncoll.tensors.operands import (
    Operand,
    as_operand,
    bundle,
    one_for_each,
    resident_of,
    staged_parts,
)
from asyncoll.tensors.reductions import ReduceOp, build

T = TypeVar("T")


class Communicator(Uncopied):
    """An ordered set of ranks that communicate.

    `asyncoll.run` and `asyncoll.connect` give the communicator of all ranks, `split` gives one of a subset. The
    attributes `rank` and `size` are this rank's number, from 0, and the number of ranks; `hosts` has the name of each
    rank's host. Ranks in arguments and results are ranks of this communicator; those in errors are ranks of the world,
    as it was in the first epoch.

    *Starting.* A call checks its arguments and starts at once. The coroutine that it returns only waits for its end. A
    call needs a running event loop: that of the program, or one in another thread.

    *Order.* Collective calls are numbered when they are made, not when they are awaited. Every rank makes the same
    collective calls in the same order; tasks may await them in any order. Messages (`send`, `recv`) are numbered by
    sender, receiver and tag. Wait-avoiding calls are not numbered: ranks may make different numbers of them.

    *Errors.* A call that raises UsageError does not count as a call: nothing is sent, and the other ranks go on waiting
    for this rank. In a forked child of a rank's process every call is a UsageError.
    All other errors are raised when a call is awaited, except ClosedError, which may come at either time.
    MismatchError, AbortedError and DeadlineError end the communicator; PeerLostError, and ProtocolError (a rank has
    sent forbidden bytes), end all communicators of the world. All ranks raise the same first error, in every pending
    and later call. If several ranks fail at the same time, each raises the error that it has known first. What a
    PeerLostError says of its cause may differ between ranks.

    *Cancellation.* Cancelling a collective or a message under way aborts the communicator, because other ranks wait for
    this one. Cancelling a wait-avoiding call does not: its contribution stays in.

    Example:

        async def main(comm):
            x = np.full(4, float(comm.rank))
            await comm.allreduce(x)

        asyncoll.run(main)
    """

    rank: int
    """This rank's number in the communicator, from 0 to `size` - 1."""

    size: int
    """The number of ranks."""

    hosts: tuple[str, ...]
    """The name of each rank's host."""

    def __init__(self, core: Core, hosts: tuple[str, ...]) -> None:
        """`hosts` has the name of each rank's host."""
        self.rank = core.member.group.rank
        self.size = core.member.group.size
        self.hosts = hosts
        self._core = core
        self._calls = core.calls
        self._short = core.calls.short
        self._epoch = core.member.group.epoch

    @property
    def rpc(self) -> Rpc:
        """Calls of functions of other ranks: an `asyncoll.rpc.Rpc`.

        Local. From its first use on, this rank answers the calls of the others. It is used on the event loop of the
        program, the one that joined the world.

        Raises:
            UsageError: this process is a forked child of a rank; or, at the first use, this thread runs no event loop.
            ClosedError: at the first use, if this rank has left the world.

        Example:

            comm.rpc.register(len)
            await comm.barrier()
            assert await comm.rpc.call(0, "len", [1, 2, 3]) == 3
        """
        return self._core.rpc

    @property
    def local_rank(self) -> int:
        """This rank's index among the ranks of this communicator that run on its host, from 0.

        Ranks are on one host if they can share its memory. Containers and network namespaces may have the same name in
        `hosts`, and are hosts of their own.
        """
        return self._ranks_here.index(self.rank)

    @property
    def local_size(self) -> int:
        """The number of ranks of this communicator that run on this rank's host, as in `local_rank`."""
        return len(self._ranks_here)

    @property
    def _ranks_here(self) -> list[int]:
        member = self._core.member
        host_of = [member.endpoint.host_of[rank] for rank in member.group.ranks]
        return [rank for rank, host in enumerate(host_of) if host == host_of[self.rank]]

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.size}>"

    # -- collectives ------------------------------------------------------------------------------

    @guarantees(COLLECTIVE, LEAVE_ALONE, CANCELLATION_IN_PLACE)
    def allreduce(self, x: T, op: ReduceOp = ReduceOp.SUM) -> Coroutine[Any, Any, T]:
        """Reduce `x` element by element over all ranks, in place. Every rank gets the same bits.

        AVG is the sum divided by `size`. AVG of float16 and bfloat16 is computed in float32 and rounded once. Their SUM
        may overflow: by message each partial sum is rounded to the half type, in shared memory only the final one.

        Args:
            x: numpy array or torch tensor of any layout, writable. Dtype and number of elements are the same at
                every rank. It is used in place if it is contiguous, otherwise copied in and out.
            op: SUM, PROD; AVG, not for integers and bool; MIN and MAX, not for complex numbers; BAND, BOR and BXOR, for
                integers and bool.

        Returns:
            `x` itself, which holds the result.

        Example:

            gradients = torch.full((1000,), float(comm.rank))
            await comm.allreduce(gradients, op=asyncoll.AVG)  # (size - 1) / 2 everywhere
        """
        if (call := self._short.allreduce(x, op)) is not None:
            return call
        operand = as_operand(x, writable=True, may_stage=True)
        if operand.is_torch and not operand.copied:
            call = self._short.allreduce_view(x, op, operand.flat, intern(operand.dtype))
            if call is not None:
                return call
        reductions.check_reduction(op, operand.dtype)

        async def body(collectives: Collectives) -> T:
            await collectives.allreduce(operand.flat, op, operand.dtype)
            operand.write_back()
            return x

        return self._start("allreduce", operand, op.name, body, overlaps=True)

    @guarantees(COLLECTIVE, LEAVE_ALONE, CANCELLATION_IN_PLACE)
    def broadcast(self, x: T, root: int = 0) -> Coroutine[Any, Any, T]:
        """Copy the root's `x` into every rank's `x`, in place.

        Args:
            x: numpy array or torch tensor of any layout, writable at every rank. Dtype and number of elements are
                the same at every rank.
            root: the rank whose content is copied; the same at every rank.

        Returns:
            `x` itself, which holds the root's content.

        Example:

            weights = np.full(1000, float(comm.rank))
            await comm.broadcast(weights, root=0)  # zeros everywhere
        """
        root = self._rank(root, "root")
        operand = as_operand(x, writable=True, may_stage=True, is_read=self.rank == root)

        async def body(collectives: Collectives) -> T:
            await collectives.broadcast(operand.flat, root)
            if self.rank != root:
                operand.write_back()
            return x

        return self._start("broadcast", operand, f"root {root}", body, overlaps=True)

    @guarantees(COLLECTIVE, LEAVE_ALONE, CANCELLATION_IN_PLACE)
    def reduce(self, x: T, root: int = 0, op: ReduceOp = ReduceOp.SUM) -> Coroutine[Any, Any, T]:
        """Reduce `x` element by element over all ranks, into the root's `x`; the other ranks' `x` stays as it is.

        Args:
            x: numpy array or torch tensor of any layout, writable at the root. Dtype and number of elements are the
                same at every rank.

        Returns:
            `x` itself; at the root it holds the result.

        Example:

            loss = np.array([0.25 * comm.rank])
            await comm.reduce(loss, root=0, op=asyncoll.MAX)
            if comm.rank == 0:
                print(loss[0])  # 0.25 * (size - 1)
        """
        root = self._rank(root, "root")
        operand = as_operand(x, writable=self.rank == root, may_stage=True)
        reductions.check_reduction(op, operand.dtype)

        async def body(collectives: Collectives) -> T:
            await collectives.reduce(operand.flat, op, operand.dtype, root)
            if self.rank == root:
                operand.write_back()
            return x

        return self._start("reduce", operand, f"{op.name}, root {root}", body, overlaps=True)

    @guarantees(COLLECTIVE, READS, CANCELLATION)
    def reduce_scatter(self, x: T, op: ReduceOp = ReduceOp.SUM) -> Coroutine[Any, Any, T]:
        """Reduce `x` element by element over all ranks, and give each rank its shard of the rows of the result.

        Rows (dimension 0) are split into `size` shards, as evenly as possible: each of the first `rows mod size` ranks
        gets one row more than the others.

        Args:
            x: numpy array or torch tensor of any layout with at least one dimension. Dtype and shape are the same
                at every rank.

        Returns:
            A new tensor of the kind and dtype of `x` and of shape (rows of this rank, *x.shape[1:]).

        Example:

            gradients = np.ones((2 * comm.size, 8))
            mine = await comm.reduce_scatter(gradients)  # shape (2, 8), each element is `size`
        """
        operand = as_operand(x, may_stage=True)
        reductions.check_reduction(op, operand.dtype)
        rows, row = self._rows(operand, "reduce_scatter")
        edges_of = on_lane.bounds(rows, self.size)

        async def body(collectives: Collectives) -> T:
            chunks = [operand.flat[start * row : end * row] for start, end in edges_of]
            shard = operand.room(chunks[self.rank].size)
            await collectives.reduce_scatter(chunks, shard, op, operand.dtype)
            start, end = edges_of[self.rank]
            result: T = operand.like(shard, (end - start, *operand.shape[1:]))
            return result

        return self._start("reduce_scatter", operand, op.name, body, overlaps=True)

    @guarantees(COLLECTIVE, READS, CANCELLATION)
    def allgather(self, x: T) -> Coroutine[Any, Any, T]:
        """Collect every rank's `x` at every rank, stacked along a new first dimension.

        Args:
            x: numpy array or torch tensor of any layout. Dtype and shape are the same at every rank.

        Returns:
            A new tensor of the kind and dtype of `x` and of shape (size, *x.shape); `stacked[r]` is the `x` of rank r.

        Example:

            ranks = await comm.allgather(np.array(comm.rank))  # array([0, 1, ...])
        """
        operand = as_operand(x, may_stage=True)

        async def body(collectives: Collectives) -> T:
            stacked, blocks = shapes.blocks(operand, self.size)
            if operand.staged is None or not operand.staged.is_deferred:
                blocks[self.rank][...] = operand.flat
            await collectives.allgather(blocks)
            result: T = operand.like(stacked, (self.size, *operand.shape))
            return result

        return self._start("allgather", operand, "", body, overlaps=True)

    @guarantees(COLLECTIVE, READS, CANCELLATION)
    def allgatherv(self, x: T) -> Coroutine[Any, Any, list[T]]:
        """Collect every rank's `x`, of any shape, at every rank.

        Args:
            x: numpy array or torch tensor of any layout. The dtype is the same at every rank; the shapes may differ.

        Returns:
            A list of `size` new tensors of the kind and dtype of `x`; the r-th has content and shape of the `x` of rank
            r.

        Raises:
            MismatchError: other operation or dtype.

        Example:

            parts = await comm.allgatherv(np.ones(comm.rank))
            print([part.size for part in parts])  # [0, 1, ...]
        """
        operand = as_operand(x, may_stage=True)

        async def body(collectives: Collectives) -> list[T]:
            rows = shapes.rows(self.size)
            rows[self.rank][...] = shapes.encode_shape(operand.shape)
            await collectives.allgather(rows)  # the shapes first: memory for the content depends on them
            blocks, extents = shapes.receptacles(operand.dtype, rows, operand.room)
            blocks[self.rank][...] = operand.flat
            await collectives.allgather(blocks)
            return [operand.like(block, shape) for block, shape in zip(blocks, extents, strict=True)]

        return self._start("allgatherv", operand, "", body, any_count=True)

    @guarantees(COLLECTIVE, READS, CANCELLATION)
    def gather(self, x: T, root: int = 0) -> Coroutine[Any, Any, T | None]:
        """Collect every rank's `x` at the root, stacked along a new first dimension.

        Args:
            x: numpy array or torch tensor of any layout. Dtype and shape are the same at every rank.

        Returns:
            At the root, a new tensor of the kind and dtype of `x` and of shape (size, *x.shape); None at the other
            ranks.

        Example:

            losses = await comm.gather(np.array([0.5 * comm.rank]), root=0)
            if comm.rank == 0:
                print(losses.shape)  # (size, 1)
        """
        operand = as_operand(x, may_stage=True)
        root = self._rank(root, "root")

        async def body(collectives: Collectives) -> T | None:
            if self.rank != root:
                await collectives.gather(operand.flat, [], root)
                return None
            stacked, blocks = shapes.blocks(operand, self.size)
            await collectives.gather(operand.flat, blocks, root)
            result: T = operand.like(stacked, (self.size, *operand.shape))
            return result

        return self._start("gather", operand, f"root {root}", body)

    @guarantees(COLLECTIVE, CANCELLATION)
    def scatter(self, xs: Sequence[T] | None = None, root: int = 0) -> Coroutine[Any, Any, T]:
        """Give each rank its element of the root's list of tensors.

        Args:
            xs: at the root, a sequence of `size` tensors (numpy arrays or torch tensors) of one dtype, whose shapes
                may differ. They must not change from the call until the coroutine has ended. The argument is ignored at
                the other ranks.
            root: the rank that has the list; the same at every rank.

        Returns:
            A new tensor with dtype, shape and content of the root's `xs[rank]`; the root's tensors also say whether it
            is a numpy array or a torch tensor. The root's is on the device of `xs[root]`. The tensors of
            the other ranks are in memory of the host, because these ranks name no device.

        Raises:
            UsageError: at the root, `xs` is not such a sequence; or `root` is no rank.
            MismatchError: other operation or root.

        Example:

            shards = [np.full(3, rank) for rank in range(comm.size)] if comm.rank == 0 else None
            mine = await comm.scatter(shards, root=0)  # three times this rank's number
        """
        root = self._rank(root, "root")
        operands = one_for_each(xs, self.size, "scatter") if self.rank == root else []
        own = operands[root] if operands else None

        async def body(collectives: Collectives) -> T:
            heads = [shapes.encode_head(operand) for operand in operands]
            head = np.empty(2 + shapes.SHAPE_WORDS, np.int64)
            await collectives.scatter(heads, head, root)  # first, because only the root knows dtype and shapes
            dtype, as_torch, mine, shape = shapes.decode_head(head)
            await collectives.scatter([operand.flat for operand in operands], mine, root)
            if own is not None:
                return own.like(mine, shape)  # type: ignore[no-any-return]
            result: T = build(mine, dtype, shape, as_torch=as_torch)
            return result

        call = self._calls.number("scatter", "", -1, f"root {root}", site_outside())
        nbytes = sum(operand.flat.nbytes for operand in operands)
        return self._calls.start(Call(call, body, nbytes, staged_parts(operands)))

    @guarantees(COLLECTIVE, READS, CANCELLATION)
    def alltoall(self, x: T) -> Coroutine[Any, Any, T]:
        """Send the i-th of `size` equal blocks of the rows of `x` to rank i, and receive one block from each rank.

        Args:
            x: numpy array or torch tensor of any layout, whose number of rows (dimension 0) is a multiple of
                `size`. Dtype and shape are the same at every rank.

        Returns:
            A new tensor of the kind, dtype and shape of `x`: the block of rank 0, then that of rank 1, and so on.

        Example:

            outgoing = np.full((comm.size, 4), comm.rank)
            incoming = await comm.alltoall(outgoing)  # row r holds the number r
        """
        operand = as_operand(x, may_stage=True)
        rows, _ = self._rows(operand, "alltoall")
        if rows % self.size:
            raise UsageError(f"alltoall of {rows} rows among {self.size} ranks: use a multiple, or alltoallv")

        async def body(collectives: Collectives) -> T:
            received = operand.room(operand.flat.size)
            parts = on_lane.bounds(operand.flat.size, self.size)
            outgoing = [operand.flat[start:end] for start, end in parts]
            await collectives.alltoall(outgoing, [received[start:end] for start, end in parts])
            result: T = operand.like(received, operand.shape)
            return result

        return self._start("alltoall", operand, "", body)

    @guarantees(COLLECTIVE, CANCELLATION)
    def alltoallv(self, xs: Sequence[T]) -> Coroutine[Any, Any, list[T]]:
        """Send `xs[i]` to rank i, for every i, and receive one tensor from each rank; the shapes may differ.

        Args:
            xs: a sequence of `size` tensors (numpy arrays or torch tensors). The dtype is the same for all of them
                and at every rank. They must not change from the call until the coroutine has ended.

        Returns:
            A list of `size` new tensors of the kind of `xs[0]`; the r-th has content and shape of the tensor that rank
            r had for this one.

        Example:

            outgoing = [np.full(dest, comm.rank) for dest in range(comm.size)]
            incoming = await comm.alltoallv(outgoing)  # each of length `rank`; the r-th holds the number r
        """
        operands = one_for_each(xs, self.size, "alltoallv")

        async def body(collectives: Collectives) -> list[T]:
            rows = shapes.rows(self.size)
            await collectives.alltoall(
                [shapes.encode_shape(operand.shape) for operand in operands], rows
            )  # shapes first
            blocks, extents = shapes.receptacles(operands[0].dtype, rows, operands[0].room)
            await collectives.alltoall([operand.flat for operand in operands], blocks)
            return [operands[0].like(block, shape) for block, shape in zip(blocks, extents, strict=True)]

        call = self._calls.number("alltoallv", operands[0].dtype, -1, "", site_outside())
        nbytes = sum(operand.flat.nbytes for operand in operands)
        return self._calls.start(Call(call, body, nbytes, staged_parts(operands)))

    @guarantees(COLLECTIVE, CANCELLATION)
    def barrier(self) -> Coroutine[Any, Any, None]:
        """Wait until every rank has called it.

        Raises:
            UsageError: this process is a forked child of a rank.
            MismatchError: another operation.

        Example:

            comm.rpc.register(len)
            await comm.barrier()  # now every rank has registered its function
        """
        if (started := self._short.barrier()) is not None:
            return started
        call = self._calls.number("barrier", "", -1, "", site_outside())
        return self._calls.start(Call(call, lambda collectives: collectives.barrier()))

    # -- point to point ---------------------------------------------------------------------------

    @guarantees(READS)
    def send(self, x: object, dest: int, tag: int = 0) -> Coroutine[Any, Any, None]:
        """Send `x` to rank `dest`, which receives it with `recv`.

        Point to point: this rank calls `send`, and `dest` calls `recv`. The other ranks take no part. Messages of one
        tag from one rank to another are received in the order in which they were sent. Messages of different tags may
        be received in any order. The call starts at once; the coroutine ends when `x` may be reused. Up to 1 MiB, it
        does not wait for the receive, unless some 64 MiB that `dest` has not received yet are on the way to it. Above 1
        MiB, it waits until the receive has been posted.

        Cancellation of a call under way aborts the communicator, because `dest` waits for the message: pending and
        later calls of all its ranks raise AbortedError.

        Args:
            x: numpy array or torch tensor of any layout.
            dest: the receiver, another rank than this one.
            tag: any 64-bit integer.

        Raises:
            MismatchError: when awaited: `dest` receives this message into a tensor of another dtype or number of
                elements.
            PeerLostError: when awaited: a rank of the world is gone or frozen, or the program of `dest` has ended.

        Example:

            if comm.rank == 0:
                await comm.send(np.arange(4), dest=1)
            elif comm.rank == 1:
                x = await comm.recv(np.empty(4, int), source=0)
        """
        operand = as_operand(x, may_stage=True)
        return self._core.messages.send(operand, self._peer(dest, "dest"), whole(tag, "tag"), site_outside())

    @guarantees(LEAVE_ALONE)
    def recv(self, x: T, source: int, tag: int = 0) -> Coroutine[Any, Any, T]:
        """Receive a message that rank `source` sends with `send` into `x`, in place.

        Point to point: `source` calls `send`, and this rank calls `recv`. The other ranks take no part. Messages of one
        tag from one rank to another are received in the order in which they were sent. The call starts at once, so
        several may be under way.

        Cancellation of a call under way aborts the communicator, because the message may be on its way: pending and
        later calls of all its ranks raise AbortedError. `x` is no longer in use when CancelledError is raised; its
        content is undefined.

        Args:
            x: numpy array or torch tensor of any layout, writable. Dtype and number of elements are those of the
                tensor that is sent.
            source: the sender, another rank than this one.
            tag: the 64-bit integer that the message was sent with.

        Returns:
            `x` itself, which holds the message.

        Raises:
            MismatchError: when awaited: `source` has sent a tensor of another dtype or number of elements.
            PeerLostError: when awaited: a rank of the world is gone or frozen, or the program of `source` has ended.

        Example:

            if comm.rank == 0:
                await comm.send(np.arange(4), dest=1, tag=7)
            elif comm.rank == 1:
                x = await comm.recv(np.empty(4, int), source=0, tag=7)
        """
        operand = as_operand(x, writable=True, may_stage=True, is_read=False)
        source, tag = self._peer(source, "source"), whole(tag, "tag")
        return self._core.messages.recv(operand, source, tag, site_outside(), x)

    @guarantees(LEAVE_ALONE)
    def recv_any(self, x: T, tag: int = 0) -> Coroutine[Any, Any, tuple[T, int]]:
        """Receive a message that any other rank sends with `send` into `x`, in place, and tell which rank that is.

        Point to point: one other rank calls `send`, and this rank calls `recv_any`. It is a method of its own, and not
        an argument of `recv`, because its result has two parts: as `torch.distributed.recv` without `src`, which
        returns the sender, and as `MPI_Recv` with MPI_ANY_SOURCE, whose status holds it.

        A receive takes the message that came first, of those with its tag that no receive has taken. So no sender waits
        for ever behind others. Messages of one tag from one rank are taken in the order in which they were sent.
        Receives of one tag, by `recv` and `recv_any`, take messages in the order in which they were made, as in MPI:
        while a `recv_any` waits, the later receives of its tag on this communicator wait behind it. The call starts at
        once, so several may be under way.

        Cancellation does not abort the communicator, and no message is lost: one that this call has taken, or was
        receiving, goes to the next receive of its tag from its sender that is made, or to one that already waits. If
        later receives have taken later messages of that sender meanwhile, it comes after those. The same holds for a
        call whose coroutine is dropped without being awaited. `x` is no longer in use when CancelledError is raised;
        its content is undefined.

        Every rank of the communicator may send. So the loss of any rank ends the call, as it ends all others.

        Args:
            x: numpy array or torch tensor of any layout, writable. Dtype and number of elements are those of the
                tensor that is sent.
            tag: the 64-bit integer that the message was sent with.

        Returns:
            A pair: `x` itself, which holds the message, and the rank of its sender.

        Raises:
            UsageError: when called: `x` is not such a tensor, `tag` is no such integer, or this rank is the only one;
                or this thread runs no event loop. No message has been taken, and this rank may call again.
            MismatchError: when awaited: the sender has sent a tensor of another dtype or number of elements.
            PeerLostError: when awaited: a rank of the world is gone or frozen, or the program of every other rank has
                ended.

        Example:

            if comm.rank != 0:
                await comm.send(np.full(4, comm.rank), dest=0)
            else:
                for _ in range(1, comm.size):
                    x, sender = await comm.recv_any(np.empty(4, int))
                    assert (x == sender).all()
        """
        operand, tag = as_operand(x, writable=True, may_stage=True, is_read=False), whole(tag, "tag")
        if self.size == 1:
            raise UsageError("recv_any has no rank to receive from: this communicator has one rank")
        return self._core.messages.recv_any(operand, tag, site_outside(), lambda source: (x, source))

    # -- wait-avoiding ----------------------------------------------------------------------------

    @round_guarantees(*ROUNDS)
    def solo_allreduce(
        self,
        x: object,
        *,
        name: str = "solo",
        op: ReduceOp = ReduceOp.SUM,
        sync_every: int = 0,
        sync_offset: int = 0,
        history: int = 0,
        weight: float | None = None,
    ) -> Coroutine[Any, Any, Reduction]:
        """Wait-avoiding allreduce in rounds: the first rank to arrive starts the round for all (a quorum of 1).

        With `history`, every rank keeps the last `history` results before the newest. A rank that is late by at most
        that many rounds gets them in `Reduction.missed`. It can apply every result exactly once, as the ranks in time
        did, and so stay equal to them.

        Args:
            sync_every: each round whose number is a multiple of it waits for all ranks, which bounds staleness by that
                many rounds; 0: no round does.
            history: number of results to keep. Costs as many times the memory of `x` at every rank.

        Source: Li, Ben-Nun, Di Girolamo, Alistarh, Hoefler, "Taming unbalanced training workloads in deep learning with
        partial collective operations", PPoPP 2020, section 4.1 (solo) and section 5 (stale gradients).

        Example:

            newest = 0
            while newest < 100:
                gradients = torch.ones(1000)  # of the next batch
                reduction = await comm.solo_allreduce(gradients, op=asyncoll.AVG, history=100)
                for result in (*reduction.missed, gradients):
                    pass  # apply it: one step of the optimizer for each round
                newest = reduction.round
        """
        return self._wait_avoiding(x, name, weight, (op, _SOLO, False, sync_every, sync_offset, history), _SOLO_RULES)

    @round_guarantees(*ROUNDS)
    def majority_allreduce(
        self,
        x: object,
        *,
        candidates: int = 1,
        name: str = "majority",
        op: ReduceOp = ReduceOp.SUM,
        seed: int = 0,
        sync_every: int = 0,
        sync_offset: int = 0,
        history: int = 0,
        weight: float | None = None,
    ) -> Coroutine[Any, Any, Reduction]:
        """Wait-avoiding allreduce in rounds: a round starts when one of the ranks arrives that were drawn for it.

        All ranks draw the same `candidates` ranks for each round from `seed`, without communication. The first of them
        to arrive starts the round. A candidate that comes late for an older round, while at least half of the ranks
        wait for it, starts its round at once.

        Guaranteed: at least one candidate has arrived. Not guaranteed: a majority. If the ranks' order of arrival is
        random, (size + 1) / (candidates + 1) ranks have arrived in the mean; but with one candidate each number from 1
        to `size` is equally likely, so about half of the rounds have fewer than half of the ranks. If all candidates
        are slow, all ranks wait for the first of them. `quorum_allreduce` guarantees a number. One candidate is the
        paper's majority; `size` candidates are `solo_allreduce`; the paper asks for the range between the two in
        section 8.

        Args:
            candidates: number of ranks drawn for each round, from 1 to `size`.

        Source: Li, Ben-Nun, Di Girolamo, Alistarh, Hoefler, "Taming unbalanced training workloads in deep learning with
        partial collective operations", PPoPP 2020, section 4.2.

        Example:

            gradients = np.ones(1000)
            reduction = await comm.majority_allreduce(gradients, op=asyncoll.AVG, sync_every=10)
            print(reduction.round, reduction.active, reduction.included)
        """
        arguments = (op, Opening.MAJORITY, False, sync_every, sync_offset, history, candidates, seed)
        return self._wait_avoiding(x, name, weight, arguments, (*_SOLO_RULES, "candidates", "seed"))

    @round_guarantees(*ROUNDS)
    def quorum_allreduce(
        self,
        x: object,
        *,
        quorum: int | None = None,
        name: str = "quorum",
        op: ReduceOp = ReduceOp.SUM,
        seed: int = 0,
        sync_every: int = 0,
        sync_offset: int = 0,
        history: int = 0,
        weight: float | None = None,
    ) -> Coroutine[Any, Any, Reduction]:
        """Wait-avoiding allreduce in rounds: a round starts when `quorum` ranks have arrived, always.

        By default the quorum is a true majority, `size // 2 + 1`. A quorum of 1 is `solo_allreduce`, a quorum of `size`
        waits for all ranks like `allreduce`. By message a rank that is drawn for each round from `seed` counts the
        arrivals; its own caller need not have arrived. Ranks that have left their program count as arrived.

        Args:
            quorum: number of ranks whose arrival starts a round, from 1 to `size`; None: `size // 2 + 1`.

        Source: Li, Ben-Nun, Di Girolamo, Alistarh, Hoefler, "Taming unbalanced training workloads in deep learning with
        partial collective operations", PPoPP 2020; section 8 asks for other quorums than solo, majority and full.

        Example:

            weight, bias = np.ones((3, 2), "f4"), np.ones(2)
            reduction = await comm.quorum_allreduce([weight, bias])
            assert reduction.active > comm.size // 2
        """
        needed = self.size // 2 + 1 if quorum is None else quorum
        arguments = (op, Opening.QUORUM, False, sync_every, sync_offset, history, needed, seed)
        return self._wait_avoiding(x, name, weight, arguments, (*_SOLO_RULES, "quorum", "seed"))

    @round_guarantees(*ROUNDS)
    def policy_allreduce(
        self,
        x: object,
        *,
        policy: str,
        candidates: int = 1,
        name: str = "policy",
        op: ReduceOp = ReduceOp.SUM,
        seed: int = 0,
        sync_every: int = 0,
        sync_offset: int = 0,
        history: int = 0,
        weight: float | None = None,
    ) -> Coroutine[Any, Any, Reduction]:
        """Wait-avoiding allreduce in rounds: a round starts when a function of the program says so.

        `asyncoll.extending.register_policy` gives that function a name, at every rank. A round starts in any case when
        all ranks have arrived, or have left their program. Rounds of policies are carried out in Python.

        Args:
            policy: the name of the function.
            candidates: number of ranks drawn for each round, from `seed`, which the function sees; from 1 to `size`.

        Example:

            from asyncoll.extending import register_policy

            register_policy("half", lambda round: 2 * round.count() >= round.size)  # the same at every rank
            reduction = await comm.policy_allreduce(np.ones(3), policy="half")
            assert 2 * reduction.active >= comm.size
        """
        arguments = (op, text(policy, "policy"), False, sync_every, sync_offset, history, candidates, seed)
        return self._wait_avoiding(x, name, weight, arguments, (*_SOLO_RULES, "candidates", "seed"))

    @round_guarantees(*ROUNDS_IN_GROUPS)
    def group_allreduce(
        self,
        x: object,
        *,
        group_size: int,
        name: str = "group",
        op: ReduceOp = ReduceOp.SUM,
        fixed: bool = False,
        sync_every: int = 0,
        sync_offset: int = 0,
        weight: float | None = None,
    ) -> Coroutine[Any, Any, Reduction]:
        """Wait-avoiding allreduce within the groups of a round, which the first rank to arrive starts for all.

        It reduces models rather than gradients. A contribution replaces this rank's earlier one and stays: a rank that
        has not arrived gives its newest contribution again, or nothing before its first call. `x` is reduced in place:
        it comes back as the result of `Reduction.group`, the ranks of this rank's group in that round.
        `Reduction.active` of them had a contribution, and AVG divides by that number. Unless `Reduction.included`, this
        rank's own part of the result is an older `x`. If no rank of the group had a contribution (`active` is 0), `x`
        stays as it is.

        A round has groups of `group_size` ranks. If that does not divide `size`, it has ceil(size / group_size) groups
        of nearly equal size. The groups change from round to round, so that an update reaches all ranks within about
        log(size) / log(group_size) rounds.

        Args:
            group_size: from 1 to `size`.
            op: the reduction, as for `allreduce`; AVG and AVG_ACTIVE divide by the number of contributors.
            fixed: whether all rounds have the same groups.
            sync_every: each round whose number is a multiple of it waits for all ranks and reduces over all of them; 0:
                no round does.

        Returns:
            A `Reduction`: which round and group `x` holds, and whether this contribution is in it.

        Source: Li, Ben-Nun, Nadiradze, Di Girolamo, Dryden, Alistarh, Hoefler, "Breaking (global) barriers in parallel
        stochastic optimization with wait-avoiding group averaging", IEEE TPDS 2021, section III.

        Example:

            model = np.full(1000, float(comm.rank))
            total = model.copy()
            reduction = await comm.group_allreduce(total, group_size=2, sync_every=10)
            if reduction.included:
                model = total / reduction.active
            elif reduction.active:
                model = (total + model) / (reduction.active + 1)  # `total` has an older model of this rank
        """
        size = whole(group_size, "group_size")
        if not 1 <= size <= self.size:
            raise UsageError(f"group_size {size} is not between 1 and the number of ranks, {self.size}")
        arguments = (op, _SOLO, bool(fixed), sync_every, sync_offset, size)
        return self._wait_avoiding(x, name, weight, arguments, ("sync_every", "sync_offset", "group_size"))

    @guarantees(LEAVE_ALONE)
    def join(self, name: str, x: object) -> Coroutine[Any, Any, Reduction | None]:
        """This rank has no more contributions for the rounds of `name`: wait until no rank has.

        From this call on no round waits for this rank: it counts as arrived. Rounds still take what it has staged. When
        all ranks have joined, one more round takes what is still staged at any of them. So all contributions are in
        exactly one round, and every rank gets the same newest round, with the same bits. So ranks that leave their
        training loops at different rounds end with equal models.

        Every rank calls it once for a `name`, after its last call of that name, at any point of its program: it is not
        numbered among the collective calls. It starts at once, and takes its turn after the earlier calls of that name.
        A rank that has left its program counts as joined. The name cannot be used again on this communicator.

        In groups there is no result of all ranks. The call then waits for no rank, changes nothing in `x`, and returns
        None; the model that this rank contributed last stays in the rounds of its groups.

        Cancellation of a call under way aborts the communicator, as for a collective.

        Args:
            name: of wait-avoiding allreduces of which this rank has made at least one call.
            x: a tensor, or a list of tensors, as in those calls. It is overwritten with the newest result; its content
                is not a contribution.

        Returns:
            A `Reduction`, as of a late call: with the rounds since this rank's last one, and `x` as their newest
            result. `included` is true. If this rank had the newest result before, `x` stays as it is, and
            `Reduction.result` is None: `skipped` counts the rounds of calls that were cancelled, or never awaited, once
            a later call had its answer. None if this rank has got all rounds before.

        Raises:
            UsageError: this rank has not called `name`, or `x` is not as in those calls.
            MismatchError: when awaited: `name` stands for another operation at another rank.
            AbortedError: when awaited: a rank has aborted the communicator, has cancelled a collective call or a
                `join`, or has left the world with an exception.

        Source: the name is that of Horovod's `join` and of the context manager of torch.distributed.algorithms, which
        let ranks with fewer batches shadow the collectives of the others.

        Example:

            gradients, applied = np.ones(1000), 0
            for _ in range(3 + comm.rank):  # a different number of batches at each rank
                reduction = await comm.quorum_allreduce(gradients, op=asyncoll.AVG, history=100)
                applied += len(reduction.results())  # one step of the optimizer each
            if (last := await comm.join("quorum", gradients)) is not None:
                applied += len(last.results())
        """
        if self._core.memory.unused:
            self._core.memory.give_back()
        return self._core.operations.join(text(name, "name"), x, site_outside())

    # -- sparse -----------------------------------------------------------------------------------

    @guarantees(COLLECTIVE_IF_AWAITED, LEAVE_ALONE)
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
        """Add up the largest elements of all ranks' accumulators `x`; `x` keeps the residual.

        About k = density * n of the n elements are in the sum. `x` is changed in place: it comes back with 0 where its
        values are in the sum, and unchanged elsewhere. So nothing is lost: at every element, the sum of all ranks' `x`
        before the call is the result plus the sum of all ranks' `x` after it, except for rounding and, with "gtopk",
        `SparseReduction.lost_values`. Zeros are not sent, except by "dense". Sums may overflow to infinity. float16 and
        bfloat16 are summed, and returned, in float32.

        The elements to send are selected at once, in the caller's thread. Each name has one call under way at a time.
        Thresholds and regions are kept from round to round under the name.

        Cancellation, and a call that is never awaited, abort the communicator, because this rank alone does not know
        the result. `x` is then as it was before the call, or the residual if the round was over.

        Args:
            x: the accumulator: a numpy array or torch tensor of floats, of any shape and layout, writable. Dtype
                and shape are the same at every rank and in every call of the name.
            density: k / n, above 0 and at most 1.
            algorithm: "oktopk"; or "topka", "topkdsa", "gtopk", "gaussiank" or "dense", which the paper compares it
                with; or one of the program's own (`asyncoll.extending.register_sparse_algorithm`).
            name: tells operations apart. Algorithm, density, options, dtype and shape are fixed by its first call.
            thresholds_every: of "oktopk": the thresholds are exact in every so many rounds, and reused in between,
                where more or fewer than k elements may be selected. The paper has 32 or 128.
            regions_every: of "oktopk": the regions that the ranks reduce are cut anew every so many rounds.
            feedback: lets reused thresholds follow the number of elements that they select, and lets "gaussiank" adjust
                its own; the paper's do not.
            global_threshold: of "oktopk", how the exact one is found: "histogram" takes O(1) words; "allgather", as in
                the paper, as many words as there are sums; "auto" the one that takes fewer words.
            dense: whether the result also has the sum as a tensor of the shape of `x`.

        Returns:
            A `SparseReduction`: indices and values of the sum, which is not divided by `size`, and what it cost.

        Raises:
            UsageError: `x` or an option is not as described, the name stands for other options at this rank, or its
                last call is still under way.
            MismatchError: other operation, name, dtype, number of elements or options.
            NonFiniteError: when awaited, at every rank, if any rank's `x` holds NaN or infinity. Nothing has changed,
                and the next call may follow. `x` still holds them: take the gradient out of the accumulator, or restore
                the residual.

        Source: Li, Hoefler, "Near-optimal sparse allreduce for distributed deep learning", PPoPP 2022, section 3 and
        algorithm 1; the residual: section 4 and algorithm 2; the other algorithms: section 2 and table 1.

        Example:

            residual = np.zeros(10_000)
            for _ in range(3):
                residual += np.random.default_rng(comm.rank).standard_normal(10_000)  # the step of this rank
                found = await comm.sparse_allreduce(residual, density=0.01)
                print(found.round, found.indices.size, "elements in the sum")
        """
        tensor = resident_of(x, writable=True) or as_operand(x, writable=True)
        name, algorithm = text(name, "name"), text(algorithm, "algorithm")
        periods = whole(thresholds_every, "thresholds_every"), whole(regions_every, "regions_every")
        rules = Rules(*periods, feedback, text(global_threshold, "global_threshold"))
        share = real(density, "density")
        self._core.member.check_caller()
        specification = Specification(algorithm, share, tensor.dtype, tensor.shape, rules)
        operation = self._core.sparse.get(name, specification)
        if operation.is_busy:
            # The error that has ended the call under way tells more than that the name is busy.
            self._core.member.check_open()
            self._core.member.check()
        begun = operation.begin(tensor)
        self._core.memory.give_back()
        details = tensor.dtype, specification.elements, str(operation)
        call = self._calls.number("sparse_allreduce", *details, site_outside())

        async def body(collectives: Collectives) -> SparseReduction:
            try:
                return await operation.reduce(collectives, begun, dense=dense)
            except NonFiniteError as error:
                raise NonFiniteError(tuple(self._core.member.group.ranks[rank] for rank in error.ranks)) from None

        def discarded() -> None:
            # The other ranks go on with a result, and thresholds, that this rank's caller does not know.
            self._core.member.abort(f"{call} was cancelled, or never awaited")

        return self._calls.start(Call(call, body, begun.nbytes, begun.staged, discarded=discarded))

    def sparse_state(self, name: str = "sparse") -> dict[str, Any] | None:
        """The state of this rank's sparse allreduces of `name`, for a checkpoint: round, thresholds and regions.

        Plain numbers, strings, lists and dicts. None if the name has had no call. Save it together with the residual.
        Local: sends nothing. Raises UsageError while a call of the name is under way, and if `name` is no text.
        """
        return self._core.sparse.state(text(name, "name"))

    def load_sparse_state(self, name: str, state: dict[str, Any] | None) -> None:
        """Let the sparse allreduces of `name` go on from a `state` that `sparse_state` has returned; None: from anew.

        Call it at every rank, with states of the same round, before the first call of the name. Local: sends nothing.
        Raises UsageError if the name has had a call, or is no text. The first call raises UsageError if its options are
        others.
        """
        name = text(name, "name")
        if state is not None:
            self._core.sparse.load(name, state)

    # -- gossip -----------------------------------------------------------------------------------

    @guarantees(COLLECTIVE_IN_GRAPH, LEAVE_ALONE, CANCELLATION_IN_PLACE)
    def neighbor_average(
        self, x: T, *, graph: str = "ring", iteration: int = 0, peers: int = 1
    ) -> Coroutine[Any, Any, T]:
        """Replace `x` by the mean of this rank's `x` and those of its neighbours in a graph, in place.

        This is the exchange of D-PSGD. Each rank has as many sources as destinations, and all weights are 1 / (number
        of sources + 1), so the weights are doubly stochastic: the mean of `x` over all ranks stays the same, up to
        rounding. Sums are in the order of ranks. Those of float16 and bfloat16 are computed in float32, and the mean is
        rounded once.

        A call that is never awaited runs to its end all the same. The call takes memory for one more `x` for each
        source.

        Args:
            x: numpy array or torch tensor of any layout, writable, of a float or complex dtype. Dtype and number of
                elements are the same at every rank.
            graph: "ring": the ranks before and after this one; one rank if there are only two. "exponential": see
                `push_sum`. `graph`, `iteration` and `peers` are the same at every rank.
            iteration: the number of the iteration, from 0; it selects the distances in the exponential graph.
            peers: the number of sources of a rank in the exponential graph.

        Returns:
            `x` itself, which holds the mean.

        Source: Lian, Zhang, Zhang, Hsieh, Zhang, Liu, "Can decentralized algorithms outperform centralized algorithms?
        A case study for decentralized parallel stochastic gradient descent" (D-PSGD), NeurIPS 2017, algorithm 1.

        Example:

            weights = np.full(1000, float(comm.rank))
            for _ in range(3):
                gradient = 0.1 * weights  # at the weights before the average
                await comm.neighbor_average(weights)
                weights -= gradient
        """
        operand = as_operand(x, writable=True, may_stage=True)
        neighbors.check_dtype(operand, "neighbor_average")
        chosen = self._graph(graph, iteration, peers)

        async def body(collectives: Collectives) -> T:
            await neighbors.average(collectives, operand.flat, operand.dtype, chosen)
            operand.write_back()
            return x

        return self._start("neighbor_average", operand, str(chosen), body)

    @guarantees(COLLECTIVE_IN_GRAPH, CANCELLATION)
    def push_sum(
        self, x: T, weight: object, *, graph: str = "exponential", iteration: int = 0, peers: int = 1
    ) -> Coroutine[Any, Any, tuple[T, float]]:
        """Keep a part of (`x`, `weight`), push equal parts to the destinations in a graph, and return what is received.

        This is the exchange of SGP. `x` is the numerator of push-sum and `weight` its weight; x / weight is the
        de-biased value. With d destinations, `x` and `weight` are divided by d + 1, in place, before this call returns
        its coroutine. The destinations get a copy of the result. So `x` and `weight` are the part that is kept, and may
        be used and changed while the call is under way. The caller adds what the coroutine returns: at once, or some
        iterations later, to overlap the exchange with computation.

        Mass is conserved: the sums over all ranks of `x` and of `weight`, together with what is under way, stay the
        same. They do so to the bit if no quotient and no sum is rounded, as for multiples of (d + 1)^(iterations) that
        are small enough. Sums of what comes from several sources are in the order of ranks; those of float16 and
        bfloat16 are computed in float32 and rounded once. In both graphs each rank has as many sources as destinations,
        so weights that begin as 1 stay 1 up to rounding, if all ranks add what they receive in the same iteration.

        Await every call: a call that is never awaited loses the mass that it receives, and aborts the communicator when
        its coroutine is destroyed. The division takes place in the caller's thread. The call takes memory for one more
        `x`, and one for each source.

        Args:
            x: numpy array or torch tensor of any layout, writable, of a float or complex dtype. Dtype and number of
                elements are the same at every rank. A tensor of a device is divided there.
            weight: numpy array or torch CPU tensor of one element of float64, writable. Begin with 1.
            graph: "exponential": the directed exponential graph: rank r sends to r + j * (peers + 1)^i, modulo the
                number of ranks, for j = 1 to `peers`, where i is `iteration` modulo the number of powers of peers + 1
                that are below the number of ranks. With one peer the distances are 1, 2, 4 and so on in turn. "ring":
                to the ranks before and after this one. A rank that two distances reach gets one part. `graph`,
                `iteration` and `peers` are the same at every rank.
            iteration: the number of the iteration, from 0.
            peers: the number of destinations of a rank in the exponential graph; from the number of other ranks on, all
                of them.

        Returns:
            The sum of the parts of `x` that came, a new tensor of the kind, dtype and shape of `x`, and the sum of the
            weights that came. Zeros if there is only one rank.

        Raises:
            UsageError: when called: `x` or `weight` is not such a tensor, there is no such graph, `iteration` is
                negative, or `peers` is below 1, or not 1 for a ring; or this thread runs no event loop. Nothing has
                been sent, `x` and `weight` are as before, and this rank may call again.

        Source: Assran, Loizou, Ballas, Rabbat, "Stochastic gradient push for distributed deep learning" (SGP), ICML
        2019, algorithm 1; the overlap: algorithm 2 of its appendix.

        Example:

            x, weight = np.full(1000, float(comm.rank)), np.ones(1)
            for iteration in range(3):
                pushing = comm.push_sum(x, weight, iteration=iteration)
                gradient = 0.1 * x / weight  # this rank computes while the parts are under way
                received, received_weight = await pushing
                x += received
                weight += received_weight
                x -= gradient
            print(x / weight)
        """
        tensor = resident_of(x, writable=True) or as_operand(x, writable=True)
        scalar = as_operand(weight, writable=True)
        neighbors.check_dtype(tensor, "push_sum")
        if scalar.dtype != "float64" or scalar.flat.size != 1:
            raise UsageError(
                f"weight must be one float64, got {scalar.flat.size} of {scalar.dtype}: pass numpy.ones(1)"
            )
        chosen = self._graph(graph, iteration, peers)
        push = neighbors.Push(tensor, scalar)
        call = self._calls.number("push_sum", push.operand.dtype, push.operand.elements, str(chosen), site_outside())
        # After the number: from here on the call takes place, and the mass that leaves `x` arrives.
        push.take(len(chosen.destinations(self.size, self.rank)) + 1)

        async def body(collectives: Collectives) -> tuple[T, float]:
            received, received_weight = await push.exchange(collectives, chosen)
            return push.operand.like(received, push.operand.shape), received_weight

        def discarded() -> None:
            self._core.member.abort(f"{call} was cancelled, or never awaited: the mass that it received is lost")

        return self._calls.start(Call(call, body, push.nbytes, push.staged, discarded=discarded))

    @guarantees(COLLECTIVE_IF_AWAITED, CANCELLATION)
    def gossip(self, x: object, *, graph: str = "ring", seed: int = 0) -> Coroutine[Any, Any, Gossip]:
        """Make a `Gossip`: a copy of `x` at each rank, which other ranks average with theirs while programs compute.

        This is the exchange of AD-PSGD. Ranks average in pairs of an active rank, which is even, and a passive one,
        which is odd. So no circle of ranks waits.

        The calls of the gossip itself are not collective, except `close`. The gossip takes memory for three more `x`.
        In shared memory its averages go by message, too.

        Args:
            x: numpy array or torch tensor of any layout, of a float or complex dtype: the model. Dtype and number
                of elements are the same at every rank. It is only read, before this call returns its coroutine.
            graph: "ring": a rank averages with the ranks before and after it. "exponential": with those at distance 1
                and 1 + 2^i, for i from 1 on. If the number of ranks is odd, no edge goes across the end of the ranks,
                because it would join two even ranks. `graph` and `seed` are the same at every rank.
            seed: a 64-bit integer: which passive rank an active one averages with next is drawn from it.

        Returns:
            A `Gossip` of this rank.

        Source: Lian, Zhang, Zhang, Liu, "Asynchronous decentralized parallel stochastic gradient descent" (AD-PSGD),
        ICML 2018. The distances of the exponential graph are those of the authors of SGP.

        Example:

            gossip = await comm.gossip(np.full(1000, float(comm.rank)), seed=7)
            await gossip.exchange()
            model = await gossip.close()
        """
        operand = as_operand(x, may_stage=True)
        neighbors.check_dtype(operand, "gossip")
        chosen, seed = graphs.graph_of(text(graph, "graph")).name, whole(seed, "seed")
        detail = f"{chosen} graph, seed {seed}"
        call = self._calls.number("gossip", operand.dtype, operand.elements, detail, site_outside())
        gossip = self._make_gossip(self._core, call, operand, chosen, seed)
        if operand.staged is None:
            gossip.begin(operand.flat)

        async def body(collectives: Collectives) -> Gossip:
            if operand.staged is not None:
                gossip.begin(operand.flat)
            await collectives.barrier()
            return gossip

        return self._calls.start(Call(call, body, staged=staged_parts([operand])))

    def neighbors(self, *, graph: str = "ring", iteration: int = 0, peers: int = 1) -> tuple[int, ...]:
        """The ranks that this rank receives from in a graph of `neighbor_average` or `push_sum`, ascending.

        Local: sends nothing. Raises UsageError for arguments that those calls do not take.
        """
        return self._graph(graph, iteration, peers).sources(self.size, self.rank)

    # -- memory -----------------------------------------------------------------------------------

    def empty(self, shape: SupportsIndex | Sequence[SupportsIndex], dtype: Any, *, device: object | None = None) -> Any:
        """A tensor of undefined content in memory that the ranks of this host share (*registered* memory).

        Allreduces, broadcasts, gathers and rounds use long registered tensors where they are, without copies. If not
        all ranks of the communicator share memory, the result is an ordinary tensor. Views of it are registered, too.
        The memory is freed by this rank's next call after the last view is gone.

        Local: the other ranks need not call it, and no event loop is needed. A forked child of this process has a copy
        of the content at the time of the fork, which takes as much memory, and 1 to 2 s per GB.

        Args:
            shape: an integer, or a sequence of integers; 0 or more each.
            dtype: a numpy dtype or its name, for a numpy array; a torch dtype, for a torch tensor.
            device: of a torch tensor: a name such as "cuda:0", or a `torch.device`. Memory of a device other than the
                CPU is not registered: each call of its tensors uses a mirror at the host.

        Returns:
            A contiguous numpy array or torch tensor.

        Raises:
            UsageError: the shape or the dtype is not supported, this host has too little memory left, or calls of this
                process take no tensors of `device`.
            DeviceError: the device has too little memory left, for instance.
            ClosedError: this rank has left the world, whose ranks shared memory.

        Example:

            gradients = comm.empty(1000, torch.float32)
            gradients.zero_()
            await comm.allreduce(gradients)
        """
        return self._core.memory.empty(shape, dtype, device)

    # -- the communicator itself ------------------------------------------------------------------

    @guarantees(COLLECTIVE, CANCELLATION)
    def split(self, color: int | None, key: int = 0) -> Coroutine[Any, Any, Communicator | None]:
        """Make communicators of disjoint subsets of the ranks: one for each color.

        The new communicator numbers its own calls, and an error that ends it (except PeerLostError, which ends the
        world) leaves this one intact. It ends with the world, or when its ranks `close` it, or drop it: a rank whose
        program keeps no reference to it leaves it, as by `close`. Only then is its memory (some MiB of shared memory
        once it has been used) freed.

        Args:
            color: a 64-bit integer: ranks that give the same one get a communicator together. None: this rank gets
                none.
            key: a 64-bit integer: the ranks of a communicator are ordered by (`key`, rank in this communicator).

        Returns:
            A `Communicator` of the ranks that gave `color`; None for color None.

        Raises:
            UsageError: `color` or `key` is no such integer.
            MismatchError: another operation.

        Example:

            half = await comm.split(color=comm.rank % 2)
            await half.allreduce(np.ones(3))  # over the ranks with the same parity
        """
        color = None if color is None else whole(color, "color")
        key = whole(key, "key")
        call = self._calls.number("split", "", -1, "", site_outside())

        async def body(collectives: Collectives) -> Communicator | None:
            rows = shapes.rows(self.size, 3)
            rows[self.rank][...] = (color is not None, color or 0, key)
            await collectives.allgather(rows)
            if color is None:
                return None
            members = [rank for rank, row in enumerate(rows) if row[0] and row[1] == color]
            members.sort(key=lambda rank: (int(rows[rank][2]), rank))
            world_ranks = tuple(self._core.member.group.ranks[rank] for rank in members)
            # The same at all members without communication, and different for every split and color.
            context = digest(self._core.member.communicator, "split", call.number, color)
            group = Group(world_ranks, members.index(self.rank), context, epoch=self._epoch)
            hosts = tuple(self.hosts[rank] for rank in members)
            return type(self)(self._core.split(group), hosts)

        return self._calls.start(Call(call, body))

    @property
    def epoch(self) -> int:
        """The membership of the world that this communicator is of: 1, and more after a `shrink` or `grow`."""
        return self._epoch

    async def shrink(self) -> Communicator:
        """Go on without the ranks that are lost or have left: make a communicator of the survivors, in a new epoch.

        Collective: every survivor calls it, after a PeerLostError or `abort`, on any communicator of its epoch. It
        begins when it is awaited, and waits for the others, unless this rank is in a later epoch already. The survivors
        keep their order and get new ranks. Ranks that are lost meanwhile are not in the new epoch, or fail its calls at
        once: then call `shrink` again.

        All communicators of the epoch before end with it, also if no rank is lost. Of one made by `split` this gives
        that of its survivors; other ones are made by `split` anew. Tensors of `empty` stay valid, and the functions
        that are registered with `rpc` stay registered, until others get their names. The survivors agree through a
        store that outlives them (page Failures). A collective that was under way at the death may be over at some
        survivors and have failed at others. Cancelling `shrink` stops the wait only; a later call goes on.

        Returns:
            The communicator of the survivors, whose calls go by message.

        Raises:
            EvictedError: the others have gone on without this rank.
            UsageError: the ranks have no store of epochs.
            ServiceLostError: the store does not answer; `shrink` may be called again.
            DeadlineError: a survivor has not called it in time; `shrink` may be called again.

        Example:

            try:
                await comm.barrier()
            except asyncoll.PeerLostError:
                comm = await comm.shrink()
        """
        return self._in(await self._core.next_epoch("shrink"))

    @property
    def waiting(self) -> int:
        """The number of processes that wait to join the world, and that this rank is connected to: share it.

        Rank 0 looks for them from its first use on. Raises UsageError if the ranks have no store of epochs.
        """
        return self._core.waiting

    async def grow(self) -> Communicator:
        """Go on with the processes that wait to join the world: make a communicator with them, in a new epoch.

        Collective: every rank calls it, at a moment that all agree on. Newcomers come after the ranks, which keep their
        order; without any, the ranks are the same. If a rank is lost, it is left out, and no process joins. A
        communicator made by `split` gets none. With newcomers the ranks share memory again, if they can. All else,
        cancellation and errors included, is as for `shrink`. `asyncoll.run` says how a process joins.

        Example:

            if await comm.allreduce(torch.tensor(comm.waiting), op=asyncoll.MIN):
                comm = await comm.grow()
        """
        return self._in(await self._core.next_epoch("grow", grows=True))

    def _in(self, core: Core) -> Communicator:
        """This communicator in a later epoch."""
        before = self._core.member.endpoint.membership.numbers
        names = dict(zip((before[rank] for rank in self._core.member.group.ranks), self.hosts, strict=True))
        now, ranks = core.member.endpoint.membership, core.member.group.ranks
        return self._renewed(core, tuple(names.get(now.numbers[rank]) or now.process(rank).host for rank in ranks))

    def _renewed(self, core: Core, hosts: tuple[str, ...]) -> Communicator:
        return type(self)(core, hosts)

    def close(self) -> None:
        """Make no more calls on this communicator, which `split` has made. Its memory is freed when no rank needs it.

        Local and immediate: it waits for nothing, may be called in any thread, and needs no event loop. Each rank
        closes at any time and in any order. So it can be used as `MPI_Comm_free`, which all ranks call, and as
        `torch.distributed.destroy_process_group`, which they need not call at the same time. Calls under way go on, and
        the other ranks may await theirs. In wait-avoiding operations a rank that has closed counts as one that has left
        its program. Once all ranks have closed, and their calls are over, the shared memory, the tables and the names
        of this communicator are free for others. Tensors of `empty` stay valid. Idempotent.

        `async with` closes at the end of its block. If the block raises an exception, it first aborts the communicator.
        Later calls raise ClosedError, or AbortedError if this rank has aborted the communicator.

        Some communicators take no new calls, but keep their memory until the world ends: one whose `rpc` was used,
        because other ranks may call functions of this one; one with a gossip that was not closed; and one with
        wait-avoiding operations by message (several hosts among them), because the runtimes of all ranks take part in
        those. Communicators that a program has dropped keep it, too.

        Raises:
            UsageError: this is the communicator of all ranks, which closes with the world; or this process is a forked
                child of a rank.

        Example:

            async with await comm.split(color=comm.rank % 2) as half:
                await half.allreduce(np.ones(3))
        """
        self._end(None)

    def _end(self, error: Reason | None) -> None:
        """Close the communicator. With an `error`, calls under way end, and the other ranks are told of it."""
        self._core.close(error)
        self._short = NoShortCalls()  # new calls go the general way, which refuses them

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(describe(error))
        self.close()

    def statistics(self) -> Statistics:
        """What this rank has sent and received since it joined the world, and the totals of this communicator.

        Local and immediate: the other ranks need not call it, and no event loop is needed. The result is a value that
        does not change.

        Returns:
            A `Statistics`.

        Raises:
            UsageError: this process is a forked child of a rank.

        Example:

            await comm.solo_allreduce(np.ones(1000), name="layer 1")
            print(comm.statistics().operations["layer 1"].active)  # contributors: number of rounds
        """
        return self._core.statistics()

    def abort(self, reason: str) -> None:
        """End this communicator at all of its ranks: every pending and later call raises AbortedError with `reason`.

        Local and immediate: it never blocks, may be called from any thread, and needs no event loop. If the
        communicator has already ended, it has no effect: the first reason stays.

        Args:
            reason: any text; the other ranks see it in their errors.

        Raises:
            UsageError: this process is a forked child of a rank.

        Example:

            try:
                data = load(comm.rank)
            except OSError as error:
                comm.abort(f"no data: {error}")
                raise
        """
        self._core.member.endpoint.check_not_forked()
        if not self._core.lifetime.is_forgotten:
            self._core.member.abort(text_of(reason))

    # -- inside -----------------------------------------------------------------------------------

    def _make_gossip(self, *parts: Any) -> Gossip:
        return Gossip(*parts)

    def _start(
        self,
        operation: str,
        operand: Operand,
        detail: str,
        body: Body[T],
        *,
        any_count: bool = False,
        overlaps: bool = False,
    ) -> Coroutine[Any, Any, T]:
        """Start a call of one tensor. With `overlaps`, it is one collective, which may use it while it arrives."""
        count, staged = -1 if any_count else operand.flat.size, operand.staged
        call = self._calls.number(operation, operand.dtype, count, detail, site_outside())
        parts = () if staged is None else (staged,)
        return self._calls.start(Call(call, body, operand.flat.nbytes, parts, staged if overlaps else None))

    def _wait_avoiding(
        self, x: object, name: str, weight: float | None, arguments: tuple[Any, ...], rules: tuple[str, ...]
    ) -> Coroutine[Any, Any, Reduction]:
        """`arguments`: the reduction, the `Opening` or a policy, whether groups are fixed, the values of `rules`."""
        core, weighted = self._core, weight is not None
        if core.memory.unused:
            core.memory.give_back()
        if type(name) is str and not weighted:
            answer = core.operations.repeats.get(name, NO_REPEAT).start(x, arguments)
            if answer is not None:
                return answer
        op = arguments[0]
        contribution = bundle(x, op, 1.0 if weight is None else number_of_samples(weight, "weight"))
        given = (name, weighted, contribution.layout, contribution.boundaries, *rules, *arguments)
        spec = None
        # Only these types: an equal value of another type may mean something else.
        if type(name) is str and {*map(type, arguments[3:])} <= _INTEGERS and isinstance(op, ReduceOp):
            spec = core.descriptions.known.get(given)
        if spec is None:
            spec = core.descriptions.add(given, name, weighted, contribution, arguments, rules)
        if not weighted and name not in core.operations.repeats:
            core.operations.expect(spec, arguments, x)
        return core.operations.start(spec, contribution, site_outside())

    def _rows(self, operand: Operand, operation: str) -> tuple[int, int]:
        """The number of rows of `operand`, and the number of elements of a row."""
        if not operand.shape:
            raise UsageError(f"{operation} splits dimension 0, but this tensor has none: pass x.reshape(1)")
        rows = operand.shape[0]
        return rows, operand.flat.size // rows if rows else 0

    def _graph(self, name: object, iteration: object, peers: object) -> Graph:
        """The graph of these arguments. Raises UsageError if there is none."""
        return graphs.graph_of(text(name, "graph"), whole(iteration, "iteration"), whole(peers, "peers"))

    def _rank(self, value: object, what: str) -> int:
        """`value` as a rank of this communicator. `what` names the argument in the UsageError for any other value."""
        rank = whole(value, what)
        if not 0 <= rank < self.size:
            raise UsageError(f"{what} {rank} is not one of the ranks 0 to {self.size - 1}")
        return rank

    def _peer(self, value: object, what: str) -> int:
        """The same for a rank other than this one."""
        rank = self._rank(value, what)
        if rank == self.rank:
            raise UsageError(f"{what} {rank} is this rank itself: keep the tensor instead")
        return rank


_INTEGERS = {int}
_SOLO = Opening.SOLO  # each access through the class costs 0.1 us
_SOLO_RULES = ("sync_every", "sync_offset", "history")
