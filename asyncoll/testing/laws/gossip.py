"""A world of `Communicator.gossip`, the record of what its calls gave, and the laws of that.

The model has an element for each update of each rank, to which that update adds 1. Averages spread it over the models,
which show so where it is. A rank's first update is the model that it begins with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncoll.algorithms.gossip.graphs import GRAPHS, is_active, partners
from asyncoll.communicator import Communicator
from asyncoll.tensors.reductions import Array
from asyncoll.testing.devices import FakeDevice
from asyncoll.testing.laws.rounds import Breach
from asyncoll.testing.laws.story import NAP_S, Case, CaseRank, WorldStory
from asyncoll.testing.laws.tensors import Tensors

_EXACT = 1e-9  # an average rounds, and a lost update is more than that


@dataclass(frozen=True, slots=True, repr=False)
class Update:
    """An update that has returned."""

    index: int
    model: Array  # that it gave, by [number of the update, rank]
    before: int  # the averages of its rank that were over before the call
    after: int  # and after its return
    alone: bool  # no other call of its rank was in flight


@dataclass(frozen=True, slots=True, repr=False)
class GossipPart:
    """What one rank did."""

    updates: list[Update]  # in order
    submitted: list[int]  # the updates that it began, those that were cancelled among them
    partners: list[int | None]  # that its calls of `exchange` returned
    longest_s: float  # of these calls, each alone
    exchanges: int  # calls of `exchange`, those that were cancelled among them
    averages: int  # in which its model has been
    model: Array  # in the end


GossipStory = WorldStory[Case, GossipPart]


def graph_of(case: Case) -> str:
    return GRAPHS[case.seed % len(GRAPHS)]


class Gossiper(CaseRank):
    """One rank of a case."""

    def __init__(self, comm: Communicator, case: Case, device: FakeDevice | None = None) -> None:
        super().__init__(comm, case)
        self._tensors = Tensors(case.layout, comm, device)
        self._submitted = [0]
        self._updates: list[Update] = []
        self._partners: list[int | None] = []
        self._longest_s = 0.0
        self._exchanges = 0

    async def run(self) -> GossipPart:
        case, comm = self._case, self._comm
        first = self._tensors.contribution(0)
        self._gossip = gossip = await comm.gossip(first, graph=graph_of(case), seed=case.seed)
        for turn in range(case.rounds):
            await self._compute()
            if comm.rank == case.sleeper and turn == case.nap_before:
                await asyncio.sleep(NAP_S)
            await self._call_together(int(self._generator.integers(1, case.overlap + 1)))
        model = self._tensors.counts(await gossip.close())[0]
        updates = sorted(self._updates, key=lambda update: update.index)
        return GossipPart(
            updates, self._submitted, self._partners, self._longest_s, self._exchanges, gossip.averages, model
        )

    async def _call_together(self, count: int) -> None:
        """Make `count` calls that are in flight at the same time. The impatient rank may cancel one of them."""
        calls = [asyncio.ensure_future(self._call(alone=count == 1)) for _ in range(count)]
        await asyncio.sleep(0)  # all calls are made
        if self._comm.rank == self._case.impatient and self._generator.random() < 0.5:
            await asyncio.wait(calls, timeout=float(self._generator.exponential(self._case.network.jitter_s)))
            calls[int(self._generator.integers(count))].cancel()
        await self._finish(calls)

    def _call(self, *, alone: bool) -> Coroutine[Any, Any, None]:
        if self._generator.random() < 0.5 and self._submitted[-1] + 1 < self._case.calls:
            self._submitted.append(self._submitted[-1] + 1)
            return self._update(self._submitted[-1], alone=alone)
        self._exchanges += self._gossip.active
        return self._exchange(alone=alone)

    async def _update(self, index: int, *, alone: bool) -> None:
        tensors, before = self._tensors, self._gossip.averages
        with tensors.stream(index):
            x = tensors.contribution(index)
            call = self._gossip.update(x)
        try:
            await call
            self._updates.append(Update(index, tensors.counts(x)[0], before, self._gossip.averages, alone))
        finally:
            tensors.scribble(x)

    async def _exchange(self, *, alone: bool) -> None:
        now = asyncio.get_running_loop().time
        began_s = now()
        self._partners.append(await self._gossip.exchange())
        if alone:
            self._longest_s = max(self._longest_s, now() - began_s)


# -- the laws ------------------------------------------------------------------------------------


def whole(story: GossipStory) -> Iterator[Breach]:
    """The models together hold every update once, also if its call was cancelled, and nothing else."""
    total = np.sum([part.model for part in story.parts], axis=0)
    for rank, part in enumerate(story.parts):
        total[part.submitted, rank] -= 1
    for index, rank in np.argwhere(abs(total) > _EXACT).tolist():
        yield Breach(0, rank, f"the models hold {total[index, rank]:+g} too much of its update {index}")


def read(story: GossipStory) -> Iterator[Breach]:
    """The model that an update gives holds this update as a whole, and of no other more than that or less than 0."""
    for rank, part in enumerate(story.parts):
        for update in part.updates:
            model = update.model
            if model[update.index, rank] != 1 or model.min() < 0 or model.max() > 1:
                yield Breach(0, rank, f"update {update.index} gave a model that no order of updates and averages makes")


def alone(story: GossipStory) -> Iterator[Breach]:
    """While a model is in no average, only the updates of its own rank change it."""
    for rank, part in enumerate(story.parts):
        for first, second in zip(part.updates, part.updates[1:], strict=False):
            if first.before == second.after and first.alone and second.alone and second.index == first.index + 1:
                change = second.model - first.model
                change[second.index, rank] -= 1
                if change.any():
                    yield Breach(0, rank, f"something else than update {second.index} changed its model")


def pairs(story: GossipStory) -> Iterator[Breach]:
    """An exchange is one average of an active rank with a passive neighbour, also if its call was cancelled."""
    case = story.program
    for rank, part in enumerate(story.parts):
        neighbours = partners(graph_of(case), case.size, rank) if is_active(rank) else ()
        if not set(part.partners) <= set(neighbours or [None]):
            yield Breach(0, rank, f"it averaged with {part.partners}")
        if is_active(rank) and part.averages != part.exchanges:
            yield Breach(0, rank, f"it was in {part.averages} averages, and had begun {part.exchanges}")
        told = sum(other.partners.count(rank) for other in story.parts)
        if told > part.averages:
            yield Breach(0, rank, f"it was in {part.averages} averages, and {told} exchanges returned it")
    begun = sum(part.exchanges for part in story.parts)
    if (ended := sum(part.averages for part in story.parts)) != 2 * begun:
        yield Breach(0, 0, f"{begun} averages were begun, and ranks were in {ended}, not in twice as many")


def prompt(story: GossipStory) -> Iterator[Breach]:
    """A sleeping trainer delays no average."""
    for rank, part in enumerate(story.parts):
        if part.longest_s > NAP_S / 2:
            yield Breach(0, rank, f"an exchange took {part.longest_s:.0f} s")


LAWS: tuple[Callable[[GossipStory], Iterator[Breach]], ...] = (read, alone, whole, pairs, prompt)
