"""A world whose programs end by an exception, the record of the errors of all ranks, and the laws of that.

One rank raises, or two do: before a call, beside one, or after the begin of a long message that nobody receives. The
others make calls until one fails, and raise because of that. In a simulation of programs of torch.distributed, each
rank leaves on its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from asyncoll.communicator import Communicator
from asyncoll.errors import AsyncollError, ClosedError, describe
from asyncoll.testing.laws.rounds import Breach
from asyncoll.testing.laws.story import Case, CaseRank, WorldStory

_CALLS = 8  # a barrier follows them
_OPERATIONS = ("allreduce", "barrier", "exchange", "solo_allreduce", "allreduce of a split")
_COUNTS = (1, 50_000)  # elements of float64
_LONG = 100_000  # elements of the message that nobody receives


class ProgramError(Exception):
    """Ends the program of a rank."""


class _ReturnError(ClosedError, ProgramError):
    """The end of a program of torch.distributed that does not leave its world."""


@dataclass(frozen=True, slots=True)
class Raiser:
    """A rank whose program raises."""

    rank: int
    at: int  # the call
    beside: bool  # while that is under way
    returns: bool  # where ranks leave on their own: as a program that has made its last call
    sends_to: int | None  # the rank to which it has begun to send a long message


class EndingProgram:
    """The calls of all ranks, and which of these raise."""

    def __init__(self, case: Case) -> None:
        draw = np.random.default_rng([case.seed, case.size])
        self.calls = [
            (_OPERATIONS[draw.integers(len(_OPERATIONS))], _COUNTS[draw.integers(len(_COUNTS))]) for _ in range(_CALLS)
        ]
        self.colors = draw.integers(2, size=case.size).tolist()
        self.departs = bool(np.random.default_rng([case.seed, case.size, 1]).integers(2))
        ranks = draw.choice(case.size, 1 + draw.integers(min(case.size, 2)), replace=False).tolist()
        self.raisers = {rank: self._raiser(draw, rank, case.size) for rank in ranks}

    def _raiser(self, draw: np.random.Generator, rank: int, size: int) -> Raiser:
        at, beside, sends, by, returns = draw.integers((_CALLS, 2, 2, max(size - 1, 1), 2)).tolist()
        sends_to = (rank + 1 + by) % size if sends and size > 1 else None
        return Raiser(rank, at, bool(beside), self.departs and bool(returns), sends_to)


@dataclass(frozen=True, slots=True)
class EndingPart:
    """How the program of one rank has ended."""

    calls: int  # that have returned
    raised: bool  # its own exception has ended it
    error: str = ""  # else that of a call
    culprit: int | None = None  # the rank that this names


EndingStory = WorldStory[EndingProgram, EndingPart]


async def live(mortal: Mortal, parts: dict[int, EndingPart]) -> None:
    """Make the calls of a rank, and leave its part in `parts`. Raises ProgramError if the rank raises, or a call.

    The test world cancels all ranks once one has raised. Processes would live on, so this rank does.
    """
    program = asyncio.ensure_future(mortal.run())
    while not program.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([program])
    parts[mortal.rank] = program.result()
    if mortal.failure is not None:
        raise mortal.failure


def _last_words(rank: int) -> str:
    return f"rank {rank} has had enough"


class Mortal(CaseRank):
    """One rank of a case."""

    def __init__(self, comm: Communicator, case: Case) -> None:
        super().__init__(comm, case, case.size)
        self.rank = comm.rank
        self._program = EndingProgram(case)
        self._raiser = self._program.raisers.get(comm.rank)
        self._over = 0
        self.failure: ProgramError | None = None  # that ends the program

    async def run(self) -> EndingPart:
        try:
            await self._make_calls()
        except ProgramError as error:
            self.failure = error
            return EndingPart(self._over, raised=True)
        except AsyncollError as error:
            self.failure = ProgramError("a call has failed")
            self.failure.__cause__ = error
            return EndingPart(self._over, False, describe(error), getattr(error, "rank", None))
        return EndingPart(self._over, False)

    async def _make_calls(self) -> None:
        part = await self._comm.split(self._program.colors[self._comm.rank])
        assert part is not None, "all ranks have a color"
        for index, (operation, count) in enumerate(self._program.calls):
            await self._compute()
            call = asyncio.ensure_future(self._call(part, operation, count))
            if self._raiser is not None and self._raiser.at == index:
                await self._end(self._raiser, call)
            await call
            self._over += 1
        await self._comm.barrier()

    async def _call(self, part: Communicator, operation: str, count: int) -> None:
        comm, x = self._comm, np.ones(count)
        if operation == "allreduce":
            await comm.allreduce(x)
        elif operation == "barrier":
            await comm.barrier()
        elif operation == "solo_allreduce":
            await comm.solo_allreduce(x, name=f"{count} elements")
        elif operation == "allreduce of a split":
            await part.allreduce(x)
        elif comm.size > 1:
            sending = asyncio.ensure_future(comm.send(x, (comm.rank + 1) % comm.size))
            await asyncio.gather(sending, comm.recv(np.empty(count), (comm.rank - 1) % comm.size))

    async def _end(self, raiser: Raiser, call: asyncio.Future[None]) -> None:
        """Raise, before `call` has made a step or after. A program that ends leaves its tasks."""
        left = [call]
        if raiser.sends_to is not None:
            left.append(asyncio.ensure_future(self._comm.send(np.ones(_LONG), raiser.sends_to, tag=1)))
        if raiser.beside:
            await self._compute()
        else:
            call.cancel()
        for each in left:
            each.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        raise (_ReturnError if raiser.returns else ProgramError)(_last_words(self._comm.rank))


# -- the laws ------------------------------------------------------------------------------------


def heard(story: EndingStory) -> Iterator[Breach]:
    """No rank goes on to its end after another one has raised."""
    for rank, part in enumerate(story.parts):
        if not part.raised and not part.error:
            yield Breach(0, rank, "its calls returned, and no error came")


def root_cause(story: EndingStory) -> Iterator[Breach]:
    """The error of every other rank names a rank that has raised, and its exception."""
    for rank, part in enumerate(story.parts):
        raised = [rank for rank, its in enumerate(story.parts) if its.raised]
        if part.error and (part.culprit not in raised or _last_words(part.culprit) not in part.error):
            yield Breach(0, rank, f"its error was {part.error!r}, and {raised} had raised")


LAWS: tuple[Callable[[EndingStory], Iterator[Breach]], ...] = (heard, root_cause)
