"""A world of dense calls, beside rounds; the record of what its calls gave; and the laws of that.

All ranks carry out the same `DenseProgram`. They begin its calls one after another or several at once, at random
moments, with tensors of any layout, some by a way of the program's own. In a crowded program single ranks await an
early call before they make the others. Ranks drop communicators after their last call on them, some while it is under
way. At the end one rank may cancel a call of a communicator that has nothing else to do.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncoll.algorithms.seam.collectives import Collectives
from asyncoll.algorithms.seam.ways import Way, added
from asyncoll.communicator import Communicator
from asyncoll.errors import AbortedError
from asyncoll.tensors.reductions import Array, ReduceOp, reducer
from asyncoll.testing.laws.dense_program import AT_ALL, DenseCall, DenseProgram, decoded, members
from asyncoll.testing.laws.layouts import laid_out, stored
from asyncoll.testing.laws.rounds import Breach
from asyncoll.testing.laws.story import STEP_S, Case, CaseRank, WorldStory

_ROUNDS = 3  # beside the calls
_LAST_COUNTS = (1, 2000, 200_000)  # elements of the last message of a rank
_CANCELLED_COUNTS = (1, 2000, 200_000)  # elements of the call that may be cancelled
_IN_PLACE = ("allreduce", "reduce", "broadcast", "neighbor_average")
_AWAITS = 1 / 8  # of the calls of a crowded program, those before which a rank awaits one that is under way
_DROPS = 1 / 2  # of the communicators, those that a rank drops while its last call is under way
_FORGOTTEN_S = 60.0  # time limit until all ranks have forgotten what they have dropped
_OF_MANY = ("scatter", "alltoallv")  # calls of a tensor for each rank


@dataclass(frozen=True, slots=True, repr=False)
class CallGot:
    """What a call gave to a rank."""

    index: int
    tensors: list[Array]  # their bits
    came_s: float
    ended_s: float
    spoiled: bool  # the call wrote into memory that it only reads


@dataclass(frozen=True, slots=True)
class LastCall:
    """A call of a communicator of its own, and whether that has failed afterwards."""

    came_s: float
    given_up_s: float | None  # when it had stopped, if this rank has cancelled it
    failed: bool


@dataclass(frozen=True, slots=True, repr=False)
class DensePart:
    """What one rank did."""

    gots: list[CallGot]  # in the order of the calls
    counts: Array  # of the rounds beside: contributions by rank, in all results
    contributed: int  # the calls of these
    last: LastCall
    left: int  # communicators, but for that of the world, which the rank has not forgotten
    farewell: Array  # the last message that this rank has received


DenseStory = WorldStory[DenseProgram, DensePart]


class DenseCaller(CaseRank):
    """One rank of a case."""

    def __init__(self, comm: Communicator, case: Case) -> None:
        super().__init__(comm, case, case.size)
        self._program = DenseProgram(case)
        self._counts = np.zeros(comm.size, np.int64)
        self._contributed = 0

    async def run(self) -> DensePart:
        beside = asyncio.ensure_future(self._take_rounds())
        comms = [self._comm, *[await self._comm.split(*split[self._comm.rank]) for split in self._program.splits]]
        last_calls = {call.split: call.index for call in self._program.calls}
        gots: list[CallGot] = []
        under_way: list[asyncio.Future[CallGot]] = []
        for call in self._program.calls:
            if not call.is_beside:
                gots += await asyncio.gather(*under_way)
                under_way.clear()
            comm = comms[call.split]
            if comm is not None:
                await self._pause(under_way)
                under_way.append(asyncio.ensure_future(self._begin(comm, call)))
                if call.index == last_calls[call.split] and self._generator.random() < _DROPS:
                    comms[call.split] = comm = None
        gots += await asyncio.gather(*under_way)
        comm = None
        comms.clear()
        # Before a communicator fails: the trace of its error refers to it for some time.
        left = await self._left()
        last = await self._give_up()
        await beside
        return DensePart(gots, self._counts, self._contributed, last, left, await self._take_leave())

    async def _pause(self, under_way: list[asyncio.Future[CallGot]]) -> None:
        """Before a call: compute, or in a crowded program perhaps await one of the calls under way."""
        if not self._program.is_crowded:
            await self._compute()
        elif under_way and self._generator.random() < _AWAITS:
            await under_way[self._generator.integers(len(under_way))]

    # -- calls ------------------------------------------------------------------------------------

    def _begin(self, comm: Communicator, call: DenseCall) -> Coroutine[Any, Any, CallGot]:
        """Make a call now."""
        size, root = comm.size, call.root(comm.size)
        parts = range(size) if call.operation in _OF_MANY else range(1)
        values = [self._program.given(call, self._comm.rank, part) for part in parts]
        tensors = [laid_out(self._comm, self._generator, value, call.dtype) for value in values]
        x, came_s = tensors[0], asyncio.get_running_loop().time()
        calls: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
            "allreduce": lambda: comm.allreduce(x, call.op),
            "reduce": lambda: comm.reduce(x, root, call.op),
            "broadcast": lambda: comm.broadcast(x, root),
            "reduce_scatter": lambda: comm.reduce_scatter(x, call.op),
            "allgather": lambda: comm.allgather(x),
            "allgatherv": lambda: comm.allgatherv(x),
            "gather": lambda: comm.gather(x, root),
            "scatter": lambda: comm.scatter(tensors if comm.rank == root else None, root),
            "alltoall": lambda: comm.alltoall(x),
            "alltoallv": lambda: comm.alltoallv(tensors),
            "barrier": comm.barrier,
            "neighbor_average": lambda: comm.neighbor_average(x),
        }
        with added(_GATHERED) if call.has_own_way else contextlib.nullcontext():
            work = calls[call.operation]()

        async def end() -> CallGot:
            result = await work
            ended_s = asyncio.get_running_loop().time()
            listed = result if isinstance(result, list) else [] if result is None else [result]
            in_place = call.operation in _IN_PLACE
            kept = in_place or all(map(_is_same, tensors, values))
            spoiled = not kept or (in_place and result is not x)
            return CallGot(call.index, list(map(stored, listed)), came_s, ended_s, spoiled)

        return end()

    # -- rounds beside ----------------------------------------------------------------------------

    async def _take_rounds(self) -> None:
        """Contribute until the last round, which waits for all ranks, and count what all rounds hold."""
        number = 0
        while number < _ROUNDS:
            await self._compute()
            x = np.zeros(self._comm.size, np.int64)
            x[self._comm.rank] = 1
            self._contributed += 1
            reduction = await self._comm.solo_allreduce(x, name="beside", history=_ROUNDS, sync_every=_ROUNDS)
            number = reduction.round
            self._counts += sum(reduction.missed, x if reduction.active else 0)

    # -- a call that is cancelled -----------------------------------------------------------------

    async def _give_up(self) -> LastCall:
        """Make a call of a communicator of its own, which the impatient rank may cancel, and another one after it."""
        case, colors, now = self._case, self._program.last_split, asyncio.get_running_loop().time
        last = await self._comm.split(*colors[self._comm.rank])
        assert last is not None, "all ranks have a color"
        await self._compute()
        came_s = now()
        call = asyncio.ensure_future(last.allreduce(np.ones(_CANCELLED_COUNTS[case.seed % len(_CANCELLED_COUNTS)])))
        if case.impatient == self._comm.rank:
            await asyncio.wait([call], timeout=self._generator.exponential(self._step_s))
            call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        gave_up_s = now()  # the last rank may come while a call stops: then it is over, as if it had come before
        try:
            await last.barrier()
            failed = False
        except AbortedError:
            failed = True
        await self._comm.barrier()
        return LastCall(came_s, gave_up_s if call.cancelled() else None, failed)

    # -- the end ----------------------------------------------------------------------------------

    async def _left(self) -> int:
        """Wait until this rank has forgotten all that it has dropped. Returns how many it has not."""
        departures, now = self._comm._core.member.endpoint.departures, asyncio.get_running_loop().time
        until_s = now() + _FORGOTTEN_S
        while len(departures.open) > 1 and now() < until_s:
            await asyncio.sleep(STEP_S)
        return len(departures.open) - 1

    async def _take_leave(self) -> Array:
        """Send a last message to the next rank, without an await, and receive that of the rank before."""
        comm, count = self._comm, _LAST_COUNTS[self._case.seed % len(_LAST_COUNTS)]
        if comm.size == 1:
            return np.zeros(1)
        sending = comm.send(np.full(count, float(comm.rank)), (comm.rank + 1) % comm.size)
        self._beyond_the_end = asyncio.ensure_future(sending)
        await self._compute()
        return (await comm.recv(np.empty(count), (comm.rank - 1) % comm.size))[:1]


def _gather_and_reduce(collectives: Collectives, x: Array, op: ReduceOp, dtype: str) -> Coroutine[Any, Any, None]:
    async def carry_out() -> None:
        blocks = [x.copy() for _ in range(collectives.size)]
        await collectives.allgather(blocks)
        reducer(op, dtype)(x, blocks, len(blocks) if op is ReduceOp.AVG else 1)

    return carry_out()


_GATHERED = Way("allreduce", "gathered", _gather_and_reduce, "a way of the program")


def _is_same(tensor: Any, value: Array) -> bool:
    return stored(tensor).tobytes() == value.tobytes()


# -- the laws ------------------------------------------------------------------------------------


def formula(story: DenseStory) -> Iterator[Breach]:
    """Every rank gets what the operation is defined to give: the same bits, or a sum that differs by rounding only."""
    program = story.program
    for rank, part in enumerate(story.parts):
        for got in part.gots:
            call = program.calls[got.index]
            expected = program.expected(call, rank)
            if [x.shape for x in got.tensors] != [x.shape for x in expected.tensors]:
                yield Breach(0, rank, f"{call} gave tensors of shapes {[x.shape for x in got.tensors]}")
            elif expected.at_most is not None:
                if (abs(decoded(got.tensors[0], call.dtype) - expected.tensors[0]) > expected.at_most).any():
                    yield Breach(0, rank, f"{call} gave a sum that is off by more than rounding")
            elif [x.tobytes() for x in got.tensors] != [x.tobytes() for x in expected.tensors]:
                yield Breach(0, rank, f"{call} gave other bits than its definition")


def agreement(story: DenseStory) -> Iterator[Breach]:
    """A result that all ranks get has the same bits at all of them."""
    program = story.program
    first: dict[tuple[int, tuple[int, ...]], list[bytes]] = {}
    for rank, part in enumerate(story.parts):
        for got in part.gots:
            call = program.calls[got.index]
            if call.operation in AT_ALL:
                bits = [x.tobytes() for x in got.tensors]
                if first.setdefault((call.index, program.members(call.split, rank)), bits) != bits:
                    yield Breach(0, rank, f"{call} gave other bits than at the first rank")


def once(story: DenseStory) -> Iterator[Breach]:
    """Every rank carries out each call of its communicators once, and a call changes no memory that it only reads."""
    program = story.program
    for rank, part in enumerate(story.parts):
        if [got.index for got in part.gots] != [c.index for c in program.calls if program.members(c.split, rank)]:
            yield Breach(0, rank, f"it carried out the calls {[got.index for got in part.gots]}")
        for got in part.gots:
            if got.spoiled:
                yield Breach(0, rank, f"{program.calls[got.index]} changed a tensor that it only reads")


def meeting(story: DenseStory) -> Iterator[Breach]:
    """No rank leaves a barrier before all ranks of its communicator have come."""
    program = story.program
    for call in (call for call in program.calls if call.operation == "barrier"):
        gots = {rank: got for rank, part in enumerate(story.parts) for got in part.gots if got.index == call.index}
        for rank, got in gots.items():
            if got.ended_s < max(gots[member].came_s for member in program.members(call.split, rank)):
                yield Breach(0, rank, f"it left the {call} before all ranks had come")


def conservation(story: DenseStory) -> Iterator[Breach]:
    """The rounds beside give every contribution of every rank once to every rank."""
    contributed = [part.contributed for part in story.parts]
    for rank, part in enumerate(story.parts):
        if part.counts.tolist() != contributed:
            yield Breach(0, rank, f"its results hold {part.counts.tolist()} contributions, of {contributed}")


def ending(story: DenseStory) -> Iterator[Breach]:
    """A cancelled call ends its communicator at all of its ranks, and no other. Nothing else ends one."""
    for rank, part in enumerate(story.parts):
        group = members(story.program.last_split, rank)
        calls = [story.parts[member].last for member in group]
        given_up_s = [call.given_up_s for call in calls if call.given_up_s is not None]
        under_way = any(at_s < max(call.came_s for call in calls) for at_s in given_up_s)
        if part.last.failed != calls[0].failed:
            yield Breach(0, rank, f"the communicator of {group} has ended at some of its ranks")
        if (under_way and not part.last.failed) or (part.last.failed and not given_up_s):
            yield Breach(
                0, rank, f"the communicator of {group}: failed {part.last.failed}, given up {bool(given_up_s)}"
            )


def oblivion(story: DenseStory) -> Iterator[Breach]:
    """No rank keeps a communicator that all of its ranks have dropped."""
    for rank, part in enumerate(story.parts):
        if part.left:
            yield Breach(0, rank, f"it keeps {part.left} communicators that its program has dropped")


def farewell(story: DenseStory) -> Iterator[Breach]:
    """A message arrives that its sender has left under way at the end of its program."""
    for rank, part in enumerate(story.parts):
        if part.farewell.tolist() != [float((rank - 1) % len(story.parts))]:
            yield Breach(0, rank, f"the last message holds {part.farewell.tolist()}")


LAWS: tuple[Callable[[DenseStory], Iterator[Breach]], ...] = (
    once,
    formula,
    agreement,
    meeting,
    conservation,
    ending,
    oblivion,
    farewell,
)
