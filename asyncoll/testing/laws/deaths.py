"""A world that goes on after deaths, the record of what its ranks have done in each epoch, and the laws of that.

Ranks crash, or others take them for lost while they live. The survivors shrink and go on. They also do at some calls
where no rank is lost. In real time no rank dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from asyncoll.communicator import Communicator
from asyncoll.errors import AbortedError, EvictedError, PeerLostError
from asyncoll.tensors.reductions import ReduceOp
from asyncoll.testing.laws.rounds import Breach
from asyncoll.testing.laws.story import Case, CaseRank, WorldStory
from asyncoll.transport.messages.simulated import Crash, Silence

_CALLS = 24
_OPERATIONS = ("allreduce", "barrier", "exchange", "allreduce of a split", "rpc", "solo_allreduce", "abort")
_COUNTS = (0, 50_000)  # elements of float64 beside one for each rank
_QUIET_S = 0.2  # after the last fault


class EpochsProgram:
    """The calls of all ranks, those before which all shrink, and the ranks that die or are taken for lost."""

    def __init__(self, case: Case) -> None:
        draw = np.random.default_rng([case.seed, case.size])
        self.size = case.size
        self.calls = [
            (_OPERATIONS[draw.integers(len(_OPERATIONS))], _COUNTS[draw.integers(len(_COUNTS))]) for _ in range(_CALLS)
        ]
        self.shrinks = frozenset(np.flatnonzero(draw.integers(12, size=_CALLS) == 0).tolist())
        self.colors = draw.integers(2, size=case.size).tolist()
        faults = case.network.faults
        self.dead = frozenset(fault.rank for fault in faults if isinstance(fault, Crash))
        self.suspected = frozenset(fault.rank for fault in faults if isinstance(fault, Silence))
        self.ends_s = max((fault.at_s for fault in faults), default=-_QUIET_S) + _QUIET_S


@dataclass(slots=True)
class EpochsPart:
    """What one rank has done."""

    entered: list[tuple[int, list[int]]] = field(default_factory=list)  # epochs, and their members
    sums: list[tuple[int, int, list[int]]] = field(default_factory=list)  # epoch, call, and the contributors of its sum
    is_evicted: bool = False
    is_over: bool = False  # its program has ended


EpochsStory = WorldStory[EpochsProgram, EpochsPart]


async def live(survivor: Survivor, parts: dict[int, EpochsPart]) -> None:
    """Make the calls of a rank. What it has done until it dies is in `parts`."""
    parts[survivor.number] = survivor.part
    try:
        await survivor.run()
    except EvictedError:
        survivor.part.is_evicted = True
    survivor.part.is_over = True


class Survivor(CaseRank):
    """One rank of a case."""

    def __init__(self, comm: Communicator, case: Case) -> None:
        super().__init__(comm, case, case.size)
        self.number = comm.rank
        self.part = EpochsPart([(1, list(range(case.size)))])
        self._program = EpochsProgram(case)

    async def run(self) -> None:
        self._comm.rpc.register(lambda number: [self.number, number], name="answer")
        index, is_over = 0, False
        half: Communicator | None = None
        while not is_over:
            try:
                await self._compute()
                if index in self._program.shrinks:
                    index, half = await self._shrink(index), None
                    continue
                half = half or await self._comm.split(self._program.colors[self.number])
                await self._call(index, half, *self._program.calls[index % _CALLS])
                index += 1
                is_over = await self._all_are_over(index)
            except (PeerLostError, AbortedError):
                index, half = await self._recover(index), None

    async def _recover(self, index: int) -> int:
        while True:
            try:
                return await self._shrink(index)
            except PeerLostError:
                await self._compute()

    async def _shrink(self, index: int) -> int:
        """Go on in the next epoch. Returns the call that comes next there: some ranks may have one more behind them."""
        self._comm = await self._comm.shrink()
        await self._comm.allreduce(furthest := np.array([index]), ReduceOp.MAX)
        self.part.entered.append((self._comm.epoch, await self._contributors(0)))
        return int(furthest[0]) + 1

    async def _all_are_over(self, index: int) -> bool:
        is_late = index >= _CALLS and asyncio.get_running_loop().time() >= self._program.ends_s
        await self._comm.allreduce(latest := np.array([is_late], np.int64), ReduceOp.MAX)
        return bool(latest[0])

    async def _contributors(self, count: int) -> list[int]:
        """The ranks of the first epoch that have contributed to a sum of all, each once."""
        x = np.zeros(self._program.size + count)
        x[self.number] = 1
        await self._comm.allreduce(x)
        return np.repeat(np.arange(x.size), x.astype(int)).tolist()

    async def _call(self, index: int, half: Communicator | None, operation: str, count: int) -> None:
        comm = self._comm
        if operation == "allreduce":
            self.part.sums.append((comm.epoch, index, await self._contributors(count)))
        elif operation == "solo_allreduce":
            await comm.solo_allreduce(np.ones(1 + count), name=f"{count} elements", sync_every=3)
        elif operation == "allreduce of a split":
            assert half is not None, "all ranks have a color"
            await half.allreduce(np.ones(1 + count))
        elif operation == "rpc":
            answer = await comm.rpc.call((comm.rank + 1) % comm.size, "answer", self.number)
            assert answer[1] == self.number
        elif operation == "exchange" and comm.size > 1:
            sending = asyncio.ensure_future(comm.send(np.ones(1 + count), (comm.rank + 1) % comm.size))
            await asyncio.gather(sending, comm.recv(np.empty(1 + count), (comm.rank - 1) % comm.size))
        elif operation == "abort" and index < _CALLS:
            await comm.barrier()
            comm.abort("the program wants a new epoch")
            await comm.barrier()
        else:
            await comm.barrier()


# -- the laws ------------------------------------------------------------------------------------


def agreed(story: EpochsStory) -> Iterator[Breach]:
    """All ranks that enter an epoch have the same members in it, and are among these."""
    known: dict[int, Any] = {}
    for rank, part in enumerate(story.parts):
        for epoch, members in part.entered:
            if known.setdefault(epoch, members) != members or rank not in members:
                yield Breach(0, rank, f"epoch {epoch} has {members} here, and {known[epoch]} at another rank")


def forward(story: EpochsStory) -> Iterator[Breach]:
    """A rank enters later epochs only, and no rank comes back."""
    for rank, part in enumerate(story.parts):
        for (epoch, members), (later, left) in zip(part.entered, part.entered[1:], strict=False):
            if later <= epoch or not set(left) <= set(members):
                yield Breach(0, rank, f"epoch {epoch} of {members}, and then {later} of {left}")


def whole(story: EpochsStory) -> Iterator[Breach]:
    """Every sum has one contribution of each member of its epoch, and no other."""
    for rank, part in enumerate(story.parts):
        members = dict(part.entered)
        for epoch, call, contributors in part.sums:
            if contributors != members[epoch]:
                yield Breach(0, rank, f"call {call} in epoch {epoch} of {members[epoch]} is the sum of {contributors}")


def survival(story: EpochsStory) -> Iterator[Breach]:
    """A rank that lives ends in the last epoch, unless others have taken it for lost."""
    last = max(epoch for part in story.parts for epoch, _ in part.entered)
    for rank, part in enumerate(story.parts):
        if rank in story.program.dead:
            continue
        if not part.is_over:
            yield Breach(0, rank, "its program has not ended")
        elif part.is_evicted and rank not in story.program.suspected:
            yield Breach(0, rank, "it was evicted, and no rank had taken it for lost")
        elif not part.is_evicted and part.entered[-1][0] != last:
            yield Breach(0, rank, f"its last epoch was {part.entered[-1][0]}, and that of another rank {last}")


LAWS: tuple[Callable[[EpochsStory], Iterator[Breach]], ...] = (agreed, forward, whole, survival)
