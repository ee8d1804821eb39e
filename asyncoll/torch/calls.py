"""The collective calls of one process group on blocks of memory: results go straight into the outputs.

Each method begins a call and returns its handle. All ranks make the same calls in the same order, and each call has a
signature that the ranks compare: operation, dtype, number of elements, and a detail such as the root. Where a rank
cannot know the sizes of all blocks, the ranks first tell each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np

from asyncoll.algorithms.seam.call import Call
from asyncoll.algorithms.seam.collectives import Body, Collectives
from asyncoll.arguments import digest
from asyncoll.blocking import BlockingCommunicator
from asyncoll.errors import MismatchError, describe
from asyncoll.runtime.handles import Handle
from asyncoll.runtime.signature import Signature, Site
from asyncoll.tensors.operands import check_devices, staged_parts
from asyncoll.tensors.reductions import Array, ReduceOp
from asyncoll.tensors.staged import Staged, stagers
from asyncoll.torch.memory import Block, Row, overlap, row_of
from asyncoll.torch.sites import LIBRARIES, site_of_user

_SHOWN = 64  # characters: a longer list of sizes is replaced by its digest


class GroupCalls:
    """The calls of one group at one rank. They may be made in any thread."""

    def __init__(self, comm: BlockingCommunicator) -> None:
        self.rank = comm.rank
        self.size = comm.size
        self._core = comm._core
        self._calls = comm._core.calls
        self._short = comm._core.calls.short
        if self._short is not None:
            self._short.libraries = LIBRARIES
        self._order = comm._order
        self._runner = cast(Any, comm._core.member.runner)  # a `HandleRunner`
        self.waiting: Any = self._runner.waiting  # of the calling thread: `now` if it waits for the call that it makes

    # -- reductions -------------------------------------------------------------------------------

    def allreduce(self, block: Block, op: ReduceOp) -> Handle[Any]:
        """Reduce `block` over all ranks, in place."""
        x, flat = block.packed, block.flat
        with self._in_order():
            if self._short is not None and not block.copied:
                short = self._short.allreduce_view(x, op, flat, block.dtype)
                if short is not None:
                    return self._handle(short)
            call = self._number("allreduce", block.dtype, flat.size, op.name)

            async def body(collectives: Collectives) -> None:
                await collectives.allreduce(flat, op, block.dtype)
                block.write_back()

            return self._start_alone(call, body, block)

    def allreduce_together(self, blocks: Sequence[Block], op: ReduceOp) -> Handle[Any]:
        """Reduce all `blocks`, in place, as one call."""

        async def body(collectives: Collectives) -> None:
            for block in blocks:
                await collectives.allreduce(block.flat, op, block.dtype)
                block.write_back()

        rows = [row_of([block]) for block in blocks]
        return self._start("allreduce_coalesced", rows, body, f"{op.name}, ")

    def average_integers(self, block: Block) -> Handle[Any]:
        """Replace `block` by its sum over all ranks, divided by their number and rounded towards 0."""

        async def body(collectives: Collectives) -> None:
            await collectives.allreduce(block.flat, ReduceOp.SUM, block.dtype)
            if block.flat.dtype.kind == "u":  # torch does not divide most of these
                block.flat[...] //= self.size
            else:
                block.packed.detach().div_(self.size, rounding_mode="trunc")
            block.write_back()

        return self._start("allreduce", [row_of([block])], body, f"{ReduceOp.AVG.name}, ")

    def reduce(self, block: Block, root: int, op: ReduceOp) -> Handle[Any]:
        """Reduce into the root's `block`; the others are only read."""

        async def body(collectives: Collectives) -> None:
            await collectives.reduce(block.flat, op, block.dtype, root)
            if self.rank == root:
                block.write_back()

        with self._in_order():
            call = self._number("reduce", block.dtype, block.flat.size, f"{op.name}, root {root}")
            return self._start_alone(call, body, block)

    def reduce_scatter(self, calls: Sequence[tuple[Row, Block]], op: ReduceOp) -> Handle[Any]:
        """For each of `calls`, inputs by rank and an output: reduce the inputs for this rank of all ranks into it.

        The inputs may differ in size, and those for one rank are of the same size at all ranks.
        """

        async def body(collectives: Collectives) -> None:
            for inputs, output in calls:
                is_apart = not any(overlap(chunk, output.flat) for chunk in inputs.arrays)
                shard = output.flat if is_apart else np.empty_like(output.flat)
                await collectives.reduce_scatter(inputs.arrays, shard, op, output.dtype)
                if not is_apart:
                    output.flat[...] = shard
                output.write_back()

        others = [output for _, output in calls]
        return self._start("reduce_scatter", [inputs for inputs, _ in calls], body, f"{op.name}, ", others)

    # -- copies -----------------------------------------------------------------------------------

    def broadcast(self, block: Block, root: int) -> Handle[Any]:
        """Copy the root's `block` into all others."""

        async def body(collectives: Collectives) -> None:
            await collectives.broadcast(block.flat, root)
            if self.rank != root:
                block.write_back()

        with self._in_order():
            call = self._number("broadcast", block.dtype, block.packed.numel(), f"root {root}")
            return self._start_alone(call, body, block)

    def allgather(self, calls: Sequence[tuple[Block, Row]]) -> Handle[Any]:
        """For each of `calls`, this rank's input and the outputs by rank: copy the inputs of all ranks there."""

        async def body(collectives: Collectives) -> None:
            for given, outputs in calls:
                own = outputs.arrays[self.rank]
                if own.ctypes.data != given.flat.ctypes.data:
                    own[...] = given.flat
                await collectives.allgather(outputs.arrays)
                outputs.write_back()

        return self._start("allgather", [outputs for _, outputs in calls], body, others=[given for given, _ in calls])

    def gather(self, given: Block, outputs: Row, root: int) -> Handle[Any]:
        """Copy the inputs of all ranks into the root's `outputs`; those of other ranks are empty."""

        async def body(collectives: Collectives) -> None:
            told = _words(len(outputs.arrays))
            await collectives.gather(_sizes([given.flat])[0], told, root)
            self._compare(call, range(self.size), told, outputs.arrays)
            await collectives.gather(given.flat, outputs.arrays, root)
            outputs.write_back()

        staged = _staged([given, *outputs.blocks])
        with self._in_order():
            call = self._number("gather", given.dtype, -1, f"root {root}")
            return self._handle(self._calls.start(Call(call, body, given.flat.nbytes, staged)))

    def scatter(self, inputs: Row, output: Block, root: int) -> Handle[Any]:
        """Copy the root's inputs into the outputs of all ranks; the inputs of other ranks are empty."""

        async def body(collectives: Collectives) -> None:
            (told,) = _words(1)
            await collectives.scatter(_sizes(inputs.arrays), told, root)
            self._compare(call, [root], [told], [output.flat])
            outgoing = [x.copy() if overlap(x, output.flat) else x for x in inputs.arrays]
            await collectives.scatter(outgoing, output.flat, root)
            output.write_back()

        staged = _staged([output, *inputs.blocks])
        with self._in_order():
            call = self._number("scatter", output.dtype, -1, f"root {root}")
            return self._handle(self._calls.start(Call(call, body, output.flat.nbytes, staged)))

    def alltoall(self, inputs: Row, outputs: Row) -> Handle[Any]:
        """Copy each input to the rank with its index, into the output with the index of this rank."""

        async def body(collectives: Collectives) -> None:
            told = _words(self.size)
            await collectives.alltoall(_sizes(inputs.arrays), told)
            self._compare(call, range(self.size), told, outputs.arrays)
            outgoing = inputs.arrays
            if any(overlap(out, into) for out in outgoing for into in outputs.arrays):
                outgoing = [out.copy() for out in outgoing]
            await collectives.alltoall(outgoing, outputs.arrays)
            outputs.write_back()

        staged = _staged([*inputs.blocks, *outputs.blocks])
        with self._in_order():
            call = self._number("alltoall", inputs.dtype, -1, "")
            return self._handle(self._calls.start(Call(call, body, inputs.nbytes, staged)))

    def barrier(self) -> Handle[Any]:
        """End once all ranks have come."""
        with self._in_order():
            if self._short is not None and (short := self._short.barrier()) is not None:
                return self._handle(short)
            call = self._number("barrier", "", -1, "")
            return self._handle(self._calls.start(Call(call, lambda collectives: collectives.barrier())))

    def refuse(self, operation: str, reason: str) -> None:
        """Take the place of a call of `operation` that this rank refuses, for this reason.

        The other ranks raise a MismatchError, which tells the reason, unless they all refuse a call of this operation,
        too. Nothing waits here.
        """
        others = [rank for rank in range(self.size) if rank != self.rank]

        async def body(collectives: Collectives) -> None:
            # To each rank directly: one that has left already passes nothing on.
            (word,) = _words(1)
            await collectives.exchange(word, others, _words(len(others)), others)

        site = site_of_user()._replace(remark=reason)
        with self._in_order():
            self._handle(self._calls.start(Call(self._calls.number(operation, "", -1, "refused", site), body)))

    def run(
        self, name: str, dtype: str, detail: str, body: Body[Any], nbytes: int, staged: Sequence[Staged] = ()
    ) -> Handle[Any]:
        """A call of any `body`, which runs once `staged` have arrived."""
        with self._in_order():
            return self._handle(self._calls.start(Call(self._number(name, dtype, -1, detail), body, nbytes, staged)))

    # -- messages ---------------------------------------------------------------------------------

    def send(self, block: Block, dest: int, tag: int) -> Handle[Any]:
        """Send `block` to another rank."""

        async def body(pair: Collectives) -> None:
            await pair.pass_on(block.flat, dest, None, dest)

        def start() -> Any:
            call = self._message(block, self._calls.number_send(dest, tag), detail)
            if block.staged is None and self._calls.send_directly(call, dest, tag, block.flat):
                return self._core.member.runner.done(None)
            return self._calls.start_send(call, dest, tag, body, _staged([block]))

        detail = f"from rank {self.rank} to rank {dest}, tag {tag}"
        return self._pass(detail, start)

    def recv(self, block: Block, source: int, tag: int) -> Handle[int]:
        """Receive `block` from another rank. The result is `source`."""

        async def body(pair: Collectives) -> int:
            await pair.pass_on(None, source, block.flat, source)
            block.write_back()
            return source

        def start() -> Any:
            return self._calls.start_receive(self._message(block, 0, detail), source, tag, body, _staged([block]))

        detail = f"from rank {source} to rank {self.rank}, tag {tag}"
        return self._pass(detail, start)

    def recv_any(self, block: Block, tag: int) -> Handle[int]:
        """Receive `block` from any other rank. The result is the sender."""

        def call(source: int | None, number: int) -> Signature:
            sender = "any rank" if source is None else f"rank {source}"
            return self._message(block, number, f"from {sender} to rank {self.rank}, tag {tag}", site)

        def result(source: int) -> int:
            block.write_back()
            return source

        site = site_of_user()
        with self._in_order():
            self._core.member.check_caller()
            started = self._calls.start_receive_from_any(call, tag, block.flat, result, _staged([block]))
            handle = self._handle(started)
        handle.claim()
        return handle

    def _in_order(self) -> threading.RLock:
        """The lock under which calls begin. Raises UsageError in a forked child, where it may be locked for ever."""
        self._core.member.check_open()
        return self._order

    def _handle(self, call: Any) -> Handle[Any]:
        """The handle of `call`, which has begun."""
        handle: Handle[Any] = self._runner.handle(call)
        return handle

    def _message(self, block: Block, number: int, detail: str, site: Site | None = None) -> Signature:
        site, epoch = site or site_of_user(), self._core.member.group.epoch
        return Signature("send/recv", number, block.dtype, block.packed.numel(), detail, site, epoch)

    def _pass(self, detail: str, start: Callable[[], Any]) -> Handle[Any]:
        """Start a call of two ranks."""
        member = self._core.member
        with self._in_order():
            member.check_caller()
            try:
                return self._handle(start())
            except BaseException as error:
                # Of a signal handler, between the number and the start: the other rank waits for this number.
                member.abort(f"send/recv {detail} was interrupted: {describe(error)}")
                raise

    # -- inside -----------------------------------------------------------------------------------

    def last(self) -> int:
        """The number of the last collective call."""
        return self._calls.last

    def _start(
        self, name: str, rows: Sequence[Row], body: Body[Any], detail: str = "", others: Sequence[Block] = ()
    ) -> Handle[Any]:
        """A call whose ranks know all sizes: they compare those of `rows`. It uses the blocks `others`, too."""
        staged = _staged([*others, *(block for row in rows for block in row.blocks)]) if stagers else ()
        return self.run(name, rows[0].dtype, detail + _described(rows), body, sum(row.nbytes for row in rows), staged)

    def _start_alone(self, call: Signature, body: Body[Any], block: Block) -> Handle[Any]:
        """Start a call of one block, which is one collective: it may use the block while that arrives."""
        return self._handle(self._calls.start(Call(call, body, block.flat.nbytes, _staged([block]), block.staged)))

    def _number(self, name: str, dtype: str, elements: int, detail: str) -> Signature:
        core = self._core
        if core.memory.unused:
            core.memory.give_back()
        return self._calls.number(name, dtype, elements, detail, site_of_user())

    def _compare(
        self, call: Signature, sources: Iterable[int], told: Sequence[Array], expected: Sequence[Array]
    ) -> None:
        """End the group if a rank sends another number of bytes than is expected here."""
        for source, sent, wanted in zip(sources, told, expected, strict=False):
            if sent[0] != wanted.nbytes:
                text = (
                    f"rank {source} of the group sends {sent[0]} bytes, and rank {self.rank} has room for "
                    f"{wanted.nbytes} of it, in {call}"
                )
                self._core.member.mismatch(text)
                raise MismatchError(text)


def _staged(blocks: Sequence[Block]) -> Sequence[Staged]:
    """Those of the tensors of a call that are on devices. Raises UsageError if they are not all on one device."""
    if not stagers:
        return ()
    check_devices(blocks)
    return staged_parts(blocks)


def _words(count: int) -> list[Array]:
    """Room for one number of each of `count` ranks."""
    return list(np.zeros((count, 1), np.int64))


def _sizes(arrays: Sequence[Array]) -> list[Array]:
    return [np.array([array.nbytes]) for array in arrays]


def _described(rows: Sequence[Row]) -> str:
    """The sizes of rows in bytes, and their dtypes if they differ, as a text that the ranks compare."""
    text = "; ".join("+".join(str(array.nbytes) for array in row.arrays) for row in rows)
    if len({row.dtype for row in rows}) > 1:
        text += " of " + ", ".join(row.dtype for row in rows)
    return f"{text} bytes" if len(text) <= _SHOWN else f"sizes {digest(text):x}"
