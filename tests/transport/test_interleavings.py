"""Every interleaving of a few ranks that share a control block: no wake-up is lost, whichever core a rank has.

A rank is a generator over real control blocks on the same memory. It yields wherever another rank may come in between;
with what it yields it says what it waits for. `explore` runs all schedules, each from new memory, in one thread.
"""

from __future__ import annotations

import contextlib
import os
from itertools import product

import pytest

from asyncoll import _core
from asyncoll.errors import AsyncollError
from asyncoll.transport.control_block import DOORBELLS, PythonControlBlock, control_block_bytes
from asyncoll.transport.lock_cells import MUTEX_BYTES
from asyncoll.transport.memory.mutex import RobustMutex
from tests.support.cases import case

ITEMS = 0  # the cell with the number of items that nobody has taken
CELLS = 1
CORES = (None, _core.native) if _core.native else (None,)

# What a rank yields.
GO = "goes on"  # it can always continue
LOCK = "locks"  # it can continue while nobody holds the lock
SLEEP = "sleeps"  # it can continue once its doorbell rings


class LostWakeUpError(Exception):
    """Ranks sleep, and no rank is left to wake them."""


class Host:
    """The shared memory of ranks with the given cores, and their doorbells.

    A block releases its lock and then rings. Here it rings at doorbells of its own, and `deliver` passes that on later.
    """

    def __init__(self, cores, undo):
        memory = memoryview(bytearray(MUTEX_BYTES + control_block_bytes(CELLS, len(cores))))
        RobustMutex.initialize(memory[:MUTEX_BYTES])
        self.holder = None
        self.rung = set()
        self.blocks = []
        self.outboxes = []
        for rank, core in enumerate(cores):
            outbox = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(DOORBELLS * len(cores))]
            for descriptor in outbox:
                undo.callback(os.close, descriptor)
            mutex = RobustMutex(memory[:MUTEX_BYTES], rank, range(len(cores)))
            if core is None:
                block = PythonControlBlock(memory[MUTEX_BYTES:], len(cores), mutex, Outbox(outbox), created=True)
            else:
                block = core.ControlBlock(memory, tuple(outbox), mutex, rank, AsyncollError, True)
            self.blocks.append(block)
            self.outboxes.append(outbox)

    def can_continue(self, rank, what):
        return what == GO or (self.holder is None if what == LOCK else DOORBELLS * rank in self.rung)

    def deliver(self, rank):
        for doorbell, descriptor in enumerate(self.outboxes[rank]):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(descriptor)
                self.rung.add(doorbell)

    def locked(self, rank, change):
        """Call `change` under the lock, and ring the doorbells some time after its release."""
        yield LOCK
        self.holder = rank
        with self.blocks[rank]:
            change()
            yield GO
        self.holder = None
        yield GO
        self.deliver(rank)

    def asleep(self, rank):
        """Sleep until the doorbell rings, and silence it."""
        yield SLEEP
        self.rung.discard(DOORBELLS * rank)


class Outbox:
    def __init__(self, eventfds):
        self._eventfds = eventfds

    def ring(self, doorbells):
        for doorbell in doorbells:
            os.eventfd_write(self._eventfds[doorbell], 1)


def adder(at_most):
    """A role: adds an item, and wakes at most so many ranks."""

    def run(host, rank):
        block = host.blocks[rank]

        def add():
            block.cells[ITEMS] += 1
            block.wake(at_most)

        yield from host.locked(rank, add)

    return run


def waiter(taken):
    """A role: waits for an item and takes `taken` of them. As in `HostArena.wait`, it looks and arms under the lock."""

    def run(host, rank):
        block, done = host.blocks[rank], []

        def look_or_arm():
            if block.cells[ITEMS]:
                block.cells[ITEMS] -= taken
                done.append(rank)
            else:
                block.ring_at_next_wake(DOORBELLS * rank)

        while True:
            yield from host.locked(rank, look_or_arm)
            if done:
                return
            yield from host.asleep(rank)

    return run


producer, taker = adder(at_most=1), waiter(taken=1)
opener, visitor = adder(at_most=9), waiter(taken=0)


def careless_visitor(host, rank):
    """Looks for an item without the lock, and arms its doorbell under it."""
    block = host.blocks[rank]
    while not block.cells[ITEMS]:
        yield GO
        yield from host.locked(rank, lambda: block.ring_at_next_wake(DOORBELLS * rank))
        yield from host.asleep(rank)


def run(roles, cores, schedule):
    """Run one schedule: at each step with a choice, the rank that `schedule` says, or else the first one.

    Returns, for each step with a choice, the choice and the number of ranks that could have continued.
    """
    with contextlib.ExitStack() as undo:
        host = Host(cores, undo)
        ranks = {rank: role(host, rank) for rank, role in enumerate(roles)}
        undo.callback(lambda: [each.close() for each in ranks.values()])
        wants = {rank: next(each) for rank, each in ranks.items()}
        choices = []
        while wants:
            able = [rank for rank, what in wants.items() if host.can_continue(rank, what)]
            if not able:
                raise LostWakeUpError(wants, [choice for choice, _ in choices])
            chosen = 0
            if len(able) > 1:
                chosen = schedule[len(choices)] if len(choices) < len(schedule) else 0
                choices.append((chosen, len(able)))
            try:
                wants[able[chosen]] = next(ranks[able[chosen]])
            except StopIteration:
                del wants[able[chosen]]
        assert host.blocks[0].cells[ITEMS] == roles.count(producer) + roles.count(opener) - roles.count(taker)
        return choices


def explore(roles, cores):
    """Run all schedules; returns their number."""
    schedule, count = [], 0
    while True:
        choices = run(roles, cores, schedule)
        count += 1
        while choices and choices[-1][0] + 1 == choices[-1][1]:
            choices.pop()
        if not choices:
            return count
        schedule = [choice for choice, _ in choices[:-1]] + [choices[-1][0] + 1]


@pytest.mark.parametrize("roles", [(producer, taker), (producer, producer, taker), (opener, visitor, visitor)])
def test_no_wake_up_is_lost(roles):
    for cores in {(one, other, one)[: len(roles)] for one, other in product(CORES, repeat=2)}:
        with case(cores=cores):
            assert explore(roles, cores) > len(roles)


@pytest.mark.parametrize("core", CORES)
def test_the_search_finds_a_lost_wake_up(core):
    with pytest.raises(LostWakeUpError, match="1: 'sleeps'"):
        explore((opener, careless_visitor), (core, core))
