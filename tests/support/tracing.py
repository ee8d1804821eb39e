"""A program whose calls are traced, and the laws of the events of all of its ranks."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from asyncoll import AVG, Communicator
from asyncoll.runtime.trace import Event, What, events_of

OUTCOMES = (What.END, What.CANCEL, What.FAIL)
DENSE = ("allreduce", "barrier", "broadcast", "allgather", "reduce_scatter", "neighbor_average", "sparse_allreduce")


class Told(NamedTuple):
    """An event as plain values, which processes can print."""

    what: int
    at_s: float
    rank: int
    verb: str
    name: str
    key: int
    number: int
    ranks: Sequence[int]
    nbytes: int
    included: bool
    epoch: int
    site: str


def told(event: Event) -> Told:
    what, at_s, rank, about, *rest = event
    return Told(what, at_s, rank, about.verb, about.name, *rest, about.epoch, str(about.site))


async def traced(comm: Communicator, main: Callable[[Communicator], Any]) -> list[Told]:
    """The events of `main(comm)` at this rank."""
    ring: deque[Any] = deque(maxlen=100_000)
    with comm._core.member.trace.into(ring):
        await main(comm)
    return [told(event) for event in events_of(ring)]


async def in_step(comm: Communicator) -> None:
    """Calls in which every rank waits for all others, so that all ranks have the same events."""
    for _ in range(3):  # the core learns a call from the first one of its kind
        for elements in (8, 3000, 40_000):
            await comm.allreduce(np.ones(elements))
        await comm.barrier()
        await comm.broadcast(np.ones(8), 0)
        await comm.allgather(np.ones(8))
        await comm.reduce_scatter(np.ones(8 * comm.size))
        await comm.solo_allreduce(np.ones(8), name="short", sync_every=1)
        await comm.majority_allreduce(np.ones(30_000), name="long", sync_every=1)
        await comm.group_allreduce(np.ones(8), group_size=comm.size, op=AVG, sync_every=1)


async def at_will(comm: Communicator) -> None:
    """Calls of all kinds, by ranks that come at different times, and some of which are cancelled."""
    draw = np.random.default_rng([comm.rank, comm.size])

    async def later() -> None:
        await asyncio.sleep(float(draw.exponential(1e-3)))

    for _ in range(3):
        await comm.neighbor_average(np.ones(8), graph="ring")
        await comm.sparse_allreduce(np.arange(64.0), density=0.25)
        for elements in (8, 30_000):
            await later()
            await comm.solo_allreduce(np.ones(elements), name=f"solo {elements}")
            await comm.solo_allreduce(np.ones(elements), name=f"kept {elements}", history=2)
            await later()
            await comm.majority_allreduce(np.ones(elements), name=f"majority {elements}")
            await comm.quorum_allreduce(np.ones(elements), name=f"quorum {elements}")
            pairs = min(2, comm.size)
            await comm.group_allreduce(np.ones(elements), group_size=pairs, name=f"group {elements}", op=AVG)
        call = asyncio.ensure_future(_once(comm.quorum_allreduce(np.ones(8), name="given up", quorum=comm.size)))
        await later()
        call.cancel()
        await asyncio.wait([call])
        if comm.size > 1:
            after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
            await asyncio.gather(comm.send(np.ones(8), after), comm.recv(np.ones(8), before))
            await asyncio.gather(comm.send(np.ones(8), after, tag=1), comm.recv_any(np.ones(8), tag=1))
    await comm.barrier()
    await comm.join("given up", np.ones(8))
    await comm.barrier()


async def _once(call: Any) -> Any:
    return await call


def check(events: list[list[Told]]) -> None:
    """The laws, for the events of all ranks."""
    for mine in events:
        ends_once(mine)
        counts_on(mine)
    follow_contributions(events)
    open_before(events)
    agree(events)


def ends_once(mine: list[Told]) -> None:
    """Each call begins once, takes part at most once, and ends in one way, in this order."""
    calls = defaultdict(list)
    for event in mine:
        if event.key:
            calls[event.verb, event.key].append(event)
    assert calls
    for call, its in calls.items():
        assert [event.at_s for event in its] == sorted(event.at_s for event in its)
        kinds = [What(event.what) for event in its if event.what != What.REDUCE]
        assert kinds[0] is What.BEGIN, (call, kinds)
        assert kinds[-1] in OUTCOMES, (call, kinds)
        assert kinds[1:-1] in ([], [What.ARRIVE]), (call, kinds)
        assert len({(event.name, event.site, event.epoch) for event in its}) == 1, call


def counts_on(mine: list[Told]) -> None:
    """The numbers of numbered calls follow each other, and each of their events has the number."""
    numbers = [event.number for event in mine if event.what == What.BEGIN and event.verb in DENSE]
    assert numbers == sorted(set(numbers))
    assert all(event.key == event.number for event in mine if event.verb in DENSE)


def follow_contributions(events: list[list[Told]]) -> None:
    """A result is there after all ranks whose contributions it has have come."""
    came = defaultdict(list)
    for event in (event for mine in events for event in mine if event.what == What.ARRIVE):
        number = event.number if event.verb in DENSE else 0
        came[event.verb, event.name, number, event.rank].append(event.at_s)
    for event in (event for mine in events for event in mine if event.what == What.REDUCE):
        number = event.number if event.verb in DENSE else 0
        for rank in event.ranks:
            assert min(came[event.verb, event.name, number, rank]) <= event.at_s, (rank, event)


def open_before(events: list[list[Told]]) -> None:
    """Each round is opened before a rank has its result. A rank that is given one has been told of it."""
    opened: dict[tuple[str, str, int], float] = {}
    for event in (event for mine in events for event in mine if event.what == What.OPEN):
        round_ = event.verb, event.name, event.number
        opened[round_] = min(event.at_s, opened.get(round_, event.at_s))
    for mine in events:
        reduced = set()
        for event in mine:
            if event.verb.endswith(" allreduce") and event.what == What.REDUCE:
                assert opened[event.verb, event.name, event.number] <= event.at_s, event
                reduced.add((event.verb, event.name, event.number))
            elif event.verb.endswith(" allreduce") and event.what == What.END:
                assert (event.verb, event.name, event.number) in reduced, event


def agree(events: list[list[Told]]) -> None:
    """All ranks that have the result of a round name the same contributors, and numbered calls are the same."""
    contributors = defaultdict(set)
    for event in (event for mine in events for event in mine if event.what == What.REDUCE):
        if not event.verb.startswith("group"):
            contributors[event.verb, event.name, event.number].add(tuple(event.ranks))
    assert {key: found for key, found in contributors.items() if len(found) > 1} == {}
    begun = [[event for event in mine if event.what == What.BEGIN and event.verb in DENSE] for mine in events]
    numbered = [[(event.verb, event.name, event.number) for event in mine] for mine in begun]
    assert all(each == numbered[0] for each in numbered)


def alike(events: list[list[Told]]) -> None:
    """All ranks have the same events but for times, ranks and openers."""

    def of(mine: list[Told]) -> list[Any]:
        mine = [event for event in mine if event.what != What.OPEN]
        own = [tuple(event.ranks) if event.what == What.REDUCE else () for event in mine]
        return [event._replace(at_s=0, rank=0, ranks=ranks) for event, ranks in zip(mine, own, strict=True)]

    for mine in events[1:]:
        assert of(mine) == of(events[0])
