"""The end of a lease: its memory comes back, or goes with the world."""

from __future__ import annotations

import pytest

from asyncoll.errors import ClosedError, PeerLostError
from asyncoll.transport.lease import Lease
from asyncoll.transport.lock_cells import signed_by
from asyncoll.transport.memory.arena import local_world
from asyncoll.transport.memory.mutex import RobustMutex


def test_a_rank_that_died_with_the_lock_of_the_directory_is_reported_and_nothing_is_raised():
    losses = []

    def report(loss):
        losses.append(loss)
        return PeerLostError(loss.rank, loss.cause)

    with local_world(2) as (arena, _):
        arena.on_loss(report)
        lease = Lease(arena)
        lease.allocate(100)
        for context in (7, 8):
            lease.control_block(context, 3)
        give_back = lease.end()
        directory = RobustMutex(arena._lock_of_directory(), arena.local_rank, arena.ranks)
        directory._holder[0] = ~signed_by(1)  # rank 1 has died
        give_back()
    assert [loss.rank for loss in losses] == [1]


def test_a_control_block_of_a_lease_that_has_ended_is_closed():
    with local_world(1) as (arena,):
        lease = Lease(arena)
        block = lease.control_block(7, 3)
        lease.end()()
        with pytest.raises(ClosedError), block:
            pass
