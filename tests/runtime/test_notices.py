"""Notices of a loss: the rule in every order of messages, deaths, stops and departures, and what a death costs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import pytest

from asyncoll import PeerLostError
from asyncoll.communicator import Communicator
from asyncoll.runtime.notices import (
    FirstSilent,
    Knowing,
    MemberLeft,
    MembersLost,
    NoticeHeard,
    Step,
    begin,
    step,
    waits,
)
from asyncoll.testing import Crash, Network, Pause, simulate
from asyncoll.testing.explore import explore
from asyncoll.transport import Loss
from asyncoll.transport.messages.simulated import Fault

NEWS = "news"
LEFT = "left"
Channels: TypeAlias = tuple[tuple[tuple[int, int], tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of the model: what it knows, and what has become of it."""

    fate: str = ""  # "dead", "stopped", "left"; empty: it lives
    knowing: Knowing | None = None
    gone: frozenset[int] = frozenset()  # before it knows of a loss: those that have left


@dataclass(frozen=True, slots=True)
class World:
    """All ranks, the messages under way between them, in order, and the faults that may still come.

    Every rank notices a death. A stop is noticed by `watchers` ranks before it, or by none.
    """

    ranks: tuple[Rank, ...]
    channels: Channels = ()
    faults: int = 0
    watchers: int = 0
    noticers: tuple[int, ...] | None = None  # of the first death; None: all ranks
    waits: bool = True  # as long as `FirstSilent`

    def moves(self, draw: random.Random | None = None) -> Iterator[tuple[bool, World]]:
        """All that can happen next: whether it is a fault, and the world after it. `draw` chooses a death of each."""
        for (source, dest), messages in self.channels:
            yield False, self._receive(source, dest, messages)
        for rank, each in enumerate(self.ranks):
            if each.fate:
                continue
            for lost in range(len(self.ranks)):
                if self._notices(rank, lost):
                    yield False, self._lose(rank, lost)
            if self.waits and each.knowing is not None and waits(each.knowing):
                yield False, self._step(rank, step(each.knowing, FirstSilent()))
            if self.faults:
                fewer = replace(self, faults=self.faults - 1)
                yield True, fewer._with(rank, "stopped")
                yield True, fewer._leave(rank)
                yield from ((True, world) for world in fewer._deaths(rank, draw))

    def is_told(self) -> bool:
        """Whether all that live know, or none does."""
        return len({each.knowing is None for each in self.ranks if not each.fate}) < 2

    def _notices(self, rank: int, lost: int) -> bool:
        knowing, fate = self.ranks[rank].knowing, self.ranks[lost].fate
        if lost == rank or (knowing is not None and lost in knowing.gone):
            return False
        if fate == "stopped":
            return (lost - rank) % len(self.ranks) <= self.watchers
        return fate == "dead" and (lost != 0 or self.noticers is None or rank in self.noticers)

    def _lose(self, rank: int, lost: int) -> World:
        each = self.ranks[rank]
        if each.knowing is not None:
            return self._step(rank, step(each.knowing, MembersLost(frozenset({lost}))))
        members = tuple(range(len(self.ranks)))
        return self._step(rank, begin(rank, members, each.gone | {lost}, None))

    def _receive(self, source: int, dest: int, messages: tuple[str, ...]) -> World:
        channels = dict(self.channels)
        channels[source, dest] = messages[1:]
        after, each = self._sending(channels), self.ranks[dest]
        if each.fate:
            return after
        if messages[0] == NEWS:
            if each.knowing is not None:
                return after._step(dest, step(each.knowing, NoticeHeard(source)))
            # The message names the first lost rank, as far as its sender knows; here that is all it knows.
            lost = each.gone | {0}
            return after._step(dest, begin(dest, tuple(range(len(self.ranks))), lost, source))
        if each.knowing is not None:
            return after._step(dest, step(each.knowing, MemberLeft(source)))
        return after._with(dest, "", gone=each.gone | {source})

    def _step(self, rank: int, outcome: Step) -> World:
        state, targets = outcome
        channels = dict(self.channels)
        for target in targets:
            channels[rank, target] = (*channels.get((rank, target), ()), NEWS)
        return self._with(rank, "", knowing=state)._sending(channels)

    def _leave(self, rank: int) -> World:
        """It tells all others what it knows, and then that it leaves."""
        channels = dict(self.channels)
        news = () if self.ranks[rank].knowing is None else (NEWS,)
        for other in range(len(self.ranks)):
            if other != rank:
                channels[rank, other] = (*channels.get((rank, other), ()), *news, LEFT)
        return self._with(rank, "left")._sending(channels)

    def _deaths(self, rank: int, draw: random.Random | None) -> Iterator[World]:
        """It dies; of the messages to each other rank the last ones may be lost."""
        own = [(key, messages) for key, messages in self.channels if key[0] == rank]
        counts = [range(len(messages) + 1) for _, messages in own]
        for kept in product(*counts) if draw is None else [[draw.choice(each) for each in counts]]:
            channels = dict(self.channels)
            for (key, messages), count in zip(own, kept, strict=True):
                channels[key] = messages[:count]
            yield self._with(rank, "dead")._sending(channels)

    def _with(self, rank: int, fate: str, **changes: Any) -> World:
        each = replace(self.ranks[rank], fate=fate, **changes)
        if fate:  # what it knows matters no more
            each = Rank(fate)
        return replace(self, ranks=(*self.ranks[:rank], each, *self.ranks[rank + 1 :]))

    def _sending(self, channels: dict[tuple[int, int], tuple[str, ...]]) -> World:
        there = ((key, messages) for key, messages in channels.items() if messages and not self.ranks[key[1]].fate)
        return replace(self, channels=tuple(sorted(there)))


def first(size: int, faults: int, watchers: int, noticers: tuple[int, ...] | None = None) -> World:
    """A world in which rank 0 is dead."""
    return World((Rank("dead"), *[Rank()] * (size - 1)), faults=faults, watchers=watchers, noticers=noticers)


class Notified:
    """A `Model`: from every state, without a further fault, all that live come to know of a loss, or none does."""

    def __init__(self, first_world: World) -> None:
        self._first = first_world

    def begin(self) -> World:
        return self._first

    def moves(self, state: World) -> Iterator[tuple[World, bool, World]]:
        return ((after, is_fault, after) for is_fault, after in state.moves())

    def words(self, what: World) -> str:
        return str(what)

    def broken(self, state: World) -> str:
        return ""

    def is_settled(self, state: World) -> bool:
        return state.is_told()


@pytest.mark.parametrize(
    ("size", "faults", "watchers", "noticers"),
    [(3, 2, 0, None), (3, 2, 2, (1,)), (4, 1, 0, (1,)), (4, 1, 0, (3,)), (4, 2, 0, (2,)), (4, 1, 2, None)],
)
def test_all_that_live_hear_of_a_loss_in_any_order(size, faults, watchers, noticers):
    assert explore(Notified(first(size, faults, watchers, noticers))).states > 50


@pytest.mark.parametrize("noticer", [1, 2, 3])
def test_one_rank_that_stops_unnoticed_delays_no_other(noticer):
    """Also if it is the first member, or the neighbour of the only rank that has noticed the loss."""
    assert explore(Notified(replace(first(4, 1, 0, (noticer,)), waits=False))).states > 50


@pytest.mark.parametrize("size", [5, 6, 7, 9, 13])
def test_all_that_live_hear_of_a_loss_among_more_ranks(size):
    for seed in range(60):
        draw = random.Random(seed)
        noticers = tuple(draw.sample(range(1, size), draw.randint(1, 3)))
        world = first(size, draw.randint(1, size - 2), draw.choice([0, 2]), noticers)
        while moves := list(world.moves(draw)):
            if all(is_fault for is_fault, _ in moves) and draw.random() < 0.5:
                break
            world = draw.choice(moves)[1]
        assert world.is_told(), (seed, world)


# -- what a loss costs a simulated world ----------------------------------------------------------

LATENCY_S = 1e-4
LOST_AT_S = 0.05


def spread(
    size: int, lost: Sequence[int], faults: Sequence[Fault], noticer: int | None = None, hosts: int = 0
) -> tuple[int, float]:
    """Some ranks are lost from 50 ms on. Returns the messages, and the seconds until the last error of those that live.

    With a `noticer` that rank alone notices the loss of the first of them. With `hosts`, ranks are on so many hosts.
    """

    async def main(comm: Communicator) -> tuple[int, float, int]:
        endpoint, loop = comm._core.member.endpoint, asyncio.get_running_loop()
        await comm.barrier()
        await asyncio.sleep(LOST_AT_S / 2)
        sent = endpoint.traffic.messages_sent
        if comm.rank == noticer:
            loop.call_at(LOST_AT_S, endpoint.lost, Loss(lost[0], "it is silent", 0.5))
        try:
            await comm.recv(np.empty(1), lost[0] if comm.rank != lost[0] else (lost[0] + 1) % size)
        except PeerLostError as error:
            heard_s = loop.time()
            await asyncio.sleep(LOST_AT_S + 0.1 - heard_s)  # for what is told later; no rank leaves before
            return endpoint.traffic.messages_sent - sent, heard_s, error.rank
        raise AssertionError("it is not lost")

    network = Network(LATENCY_S, faults=faults, hosts=[rank * hosts // size for rank in range(size)] if hosts else None)
    results = simulate(size, main, network, hosts=network.hosts).results
    told = [result for rank, result in enumerate(results) if rank not in lost]
    assert {rank for *_, rank in told} <= set(lost)
    return sum(count for count, *_ in told), max(at_s for _, at_s, _ in told) - LOST_AT_S


SIZES = [*range(2, 10), 13, 17, 64]


@pytest.mark.parametrize("size", [*SIZES, pytest.param(256, marks=pytest.mark.slow)])
def test_a_death_costs_four_messages_a_rank(size):
    messages, seconds = spread(size, [size // 2], [Crash(size // 2, LOST_AT_S)])
    assert messages <= 4 * size
    assert seconds <= 2 * LATENCY_S


@pytest.mark.parametrize("size", SIZES[1:])
def test_several_deaths_cost_a_few_messages_more(size):
    lost = sorted({0, size // 2, size // 2 + 1, size - 1} - {1})[: size - 1]
    messages, seconds = spread(size, lost, [Crash(rank, LOST_AT_S + 3e-5 * n) for n, rank in enumerate(lost)])
    assert messages <= 6 * size
    assert seconds <= 4 * LATENCY_S


@pytest.mark.parametrize("size", SIZES[1:])
def test_a_loss_that_one_rank_has_noticed_is_known_by_all_in_two_steps(size):
    victim = size // 2
    faults = [Pause(victim, LOST_AT_S - 0.01, 1.0), Crash(victim, 1.0)]
    messages, seconds = spread(size, [victim], faults, noticer=size - 1)
    assert messages <= 4 * size
    assert seconds <= 2.1 * LATENCY_S


@pytest.mark.parametrize("size", SIZES[1:])
def test_a_first_member_that_has_stopped_too_delays_nothing(size):
    """No rank has noticed that. The news goes along the neighbours."""
    victim = size // 2
    faults = [Pause(rank, LOST_AT_S - 0.01, 1.0) for rank in (0, victim)] + [Crash(rank, 1.0) for rank in (0, victim)]
    messages, seconds = spread(size, [victim, 0], faults, noticer=size - 1)
    assert messages <= 4 * size
    assert seconds <= size * LATENCY_S


@pytest.mark.parametrize(("size", "hosts"), [(4, 2), (17, 4), (64, 2), (64, 8)])
def test_a_death_on_another_host_costs_six_messages_a_rank(size, hosts):
    messages, seconds = spread(size, [size // 2], [Crash(size // 2, LOST_AT_S)], hosts=hosts)
    assert messages <= 6 * size
    assert seconds <= 4 * LATENCY_S
