"""The calls of one process group on blocks of memory: results go straight into the outputs.

Each method begins a call and returns its handle. All ranks make the same calls in the same order, and each call has a
signature that the ranks compare: operation, dtype, number of elements, and a detail such as the root. Where a rank
cannot know the sizes of all blocks, the ranks first tell each other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

from asyncoll.algorithms.seam.call import Call
from asyncoll.algorithms.seam.collectives import Body
from asyncoll.blocking import BlockingCommunicator
from asyncoll.errors import MismatchError
from asyncoll.runtime.handles import Handle
from asyncoll.tensors.operands import check_devices, staged_parts
from asyncoll.tensors.reductions import Array, ReduceOp
from asyncoll.tensors.staged import Staged, stagers
from asyncoll.torch import bodies
from asyncoll.torch.memory import Block, Row, described, row_of
from asyncoll.torch.sites import LIBRARIES, site_of_user


class GroupCalls:
    """The calls of one group at one rank. They may be made in any thread."""

    def __init__(self, comm: BlockingCommunicator) -> None:
        self.rank = comm.rank
        self.size = comm.size
        self._core = comm._core
        self._calls = comm._core.calls
        self._short = comm._core.calls.short
        self._short.libraries = LIBRARIES
        self._order = comm._order
        self._runner = cast(Any, comm._core.member.runner)  # a `HandleRunner`
        self.waiting: Any = self._runner.waiting  # of the calling thread: `now` if it waits for the call that it makes

    def allreduce(self, block: Block, op: ReduceOp) -> Handle[Any]:
        """Reduce `block` over all ranks, in place."""
        with self._in_order():
            if not block.copied:
                call = self._short.allreduce_view(block.packed, op, block.flat, block.dtype)
                if call is not None:
                    return self._handle(call)
        return self._start_alone("allreduce", block, op.name, partial(bodies.allreduce, [block], op))

    def allreduce_together(self, blocks: Sequence[Block], op: ReduceOp) -> Handle[Any]:
        """Reduce all `blocks`, in place, as one call."""
        rows, body = [row_of([block]) for block in blocks], partial(bodies.allreduce, blocks, op)
        return self._start_of_known_sizes("allreduce_coalesced", rows, body, f"{op.name}, ")

    def average_integers(self, block: Block) -> Handle[Any]:
        """Replace `block` by its sum over all ranks, divided by their number and rounded towards 0."""
        body = partial(bodies.average_integers, block)
        return self._start_of_known_sizes("allreduce", [row_of([block])], body, f"{ReduceOp.AVG.name}, ")

    def reduce(self, block: Block, root: int, op: ReduceOp) -> Handle[Any]:
        """Reduce into the root's `block`; the others are only read."""
        return self._start_alone("reduce", block, f"{op.name}, root {root}", partial(bodies.reduce, block, root, op))

    def reduce_scatter(self, calls: Sequence[tuple[Row, Block]], op: ReduceOp) -> Handle[Any]:
        """For each of `calls`, inputs by rank and an output: reduce the inputs for this rank of all ranks into it.

        The inputs may differ in size, and those for one rank are of the same size at all ranks.
        """
        rows, outputs = [inputs for inputs, _ in calls], [output for _, output in calls]
        body = partial(bodies.reduce_scatter, calls, op)
        return self._start_of_known_sizes("reduce_scatter", rows, body, f"{op.name}, ", outputs)

    def broadcast(self, block: Block, root: int) -> Handle[Any]:
        """Copy the root's `block` into all others."""
        return self._start_alone("broadcast", block, f"root {root}", partial(bodies.broadcast, block, root))

    def allgather(self, calls: Sequence[tuple[Block, Row]]) -> Handle[Any]:
        """For each of `calls`, this rank's input and the outputs by rank: copy the inputs of all ranks there."""
        rows, inputs = [outputs for _, outputs in calls], [given for given, _ in calls]
        return self._start_of_known_sizes("allgather", rows, partial(bodies.allgather, calls), others=inputs)

    def gather(self, given: Block, outputs: Row, root: int) -> Handle[Any]:
        """Copy the inputs of all ranks into the root's `outputs`; those of other ranks are empty."""
        move: bodies.Move = lambda collectives, out, into: collectives.gather(out[0], into, root)  # noqa: E731
        return self._exchange("gather", move, row_of([given]), outputs, range(self.size), f"root {root}")

    def scatter(self, inputs: Row, output: Block, root: int) -> Handle[Any]:
        """Copy the root's inputs into the outputs of all ranks; the inputs of other ranks are empty."""
        move: bodies.Move = lambda collectives, out, into: collectives.scatter(out, into[0], root)  # noqa: E731
        return self._exchange("scatter", move, inputs, row_of([output]), [root], f"root {root}")

    def alltoall(self, inputs: Row, outputs: Row) -> Handle[Any]:
        """Copy each input to the rank with its index, into the output with the index of this rank."""
        move: bodies.Move = lambda collectives, out, into: collectives.alltoall(out, into)  # noqa: E731
        return self._exchange("alltoall", move, inputs, outputs, range(self.size))

    def barrier(self) -> Handle[Any]:
        """End once all ranks have come."""
        with self._in_order():
            if (call := self._short.barrier()) is not None:
                return self._handle(call)
        return self.run("barrier", "", "", lambda collectives: collectives.barrier(), 0)

    def refuse(self, operation: str, reason: str) -> None:
        """Take the place of a call of `operation` that this rank refuses, for this reason.

        The other ranks raise a MismatchError, which tells the reason, unless they all refuse a call of this operation,
        too. Nothing waits here.
        """
        site = site_of_user()._replace(remark=reason)
        with self._in_order():
            self._start(Call(self._calls.number(operation, "", -1, "refused", site), bodies.refuse))

    def run(
        self, name: str, dtype: str, detail: str, body: Body[Any], nbytes: int, staged: Sequence[Staged] = ()
    ) -> Handle[Any]:
        """A call of any `body`, which runs once `staged` have arrived."""
        with self._in_order():
            return self._start(Call(self._calls.number(name, dtype, -1, detail, site_of_user()), body, nbytes, staged))

    def send(self, block: Block, dest: int, tag: int) -> Handle[None]:
        """Send `block` to another rank."""
        with self._in_order():
            return self._handle(self._core.messages.send(block, dest, tag, site_of_user()))

    def recv(self, block: Block, source: int, tag: int) -> Handle[int]:
        """Receive `block` from another rank. The result is `source`."""
        with self._in_order():
            return self._handle(self._core.messages.recv(block, source, tag, site_of_user(), source))

    def recv_any(self, block: Block, tag: int) -> Handle[int]:
        """Receive `block` from any other rank. The result is the sender."""
        with self._in_order():
            handle = self._handle(self._core.messages.recv_any(block, tag, site_of_user(), lambda source: source))
        handle.claim()
        return handle

    def last(self) -> int:
        """The number of the last collective call."""
        return self._calls.last

    def _in_order(self) -> threading.RLock:
        """The lock under which calls begin. Raises UsageError in a forked child, where it may be locked for ever."""
        self._core.member.check_open()
        return self._order

    def _handle(self, call: Any) -> Handle[Any]:
        """The handle of `call`, which has begun."""
        return self._runner.handle(call)  # type: ignore[no-any-return]

    def _start(self, call: Call[Any]) -> Handle[Any]:
        return self._handle(self._calls.start(call))

    def _start_alone(self, name: str, block: Block, detail: str, body: Body[Any]) -> Handle[Any]:
        """Start a call of one block, which is one collective: it may use the block while that arrives."""
        with self._in_order():
            call = self._calls.number(name, block.dtype, block.elements, detail, site_of_user())
            return self._start(Call(call, body, block.flat.nbytes, _staged([block]), block.staged))

    def _start_of_known_sizes(
        self, name: str, rows: Sequence[Row], body: Body[Any], detail: str = "", others: Sequence[Block] = ()
    ) -> Handle[Any]:
        """Start a call whose ranks compare the sizes of `rows`. It uses the blocks `others`, too."""
        staged = _staged([*others, *(block for row in rows for block in row.blocks)]) if stagers else ()
        return self.run(name, rows[0].dtype, detail + described(rows), body, sum(row.nbytes for row in rows), staged)

    def _exchange(
        self, name: str, move: bodies.Move, inputs: Row, outputs: Row, sources: Iterable[int], detail: str = ""
    ) -> Handle[Any]:
        """Start a call of one collective, `move`, whose ranks first tell each other the sizes of their inputs."""

        def check(told: Sequence[Array]) -> None:
            for source, sent, wanted in zip(sources, told, outputs.arrays, strict=False):
                if sent[0] != wanted.nbytes:
                    text = (
                        f"rank {source} of the group sends {sent[0]} bytes, and rank {self.rank} has room for "
                        f"{wanted.nbytes} of it, in {call}"
                    )
                    self._core.member.mismatch(text)
                    raise MismatchError(text)

        staged = _staged([*inputs.blocks, *outputs.blocks])
        body = partial(bodies.exchange, move, inputs, outputs, check)
        with self._in_order():
            call = self._calls.number(name, inputs.dtype or outputs.dtype, -1, detail, site_of_user())
            return self._start(Call(call, body, inputs.nbytes or outputs.nbytes, staged))


def _staged(blocks: Sequence[Block]) -> Sequence[Staged]:
    """Those of the tensors of a call that are on devices. Raises UsageError if they are not all on one device."""
    check_devices(blocks)
    return staged_parts(blocks)
