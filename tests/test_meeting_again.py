"""A rank that is interrupted while the ranks meet: all of them end this attempt at once, with nothing left open."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from asyncoll.errors import ClosedError, DeadlineError, PeerLostError
from asyncoll.transport.joining import Joining
from asyncoll.world import rendezvous
from asyncoll.world.environment import Environment

SIZE = 3


class UntilInterrupted(Joining):
    """Its time is over as soon as the rank that is interrupted has ended its attempt."""

    def __init__(self, rank, over):
        super().__init__(rank, SIZE, 60.0)
        self._over = over

    def check(self, *arguments, **more):
        if self._over.is_set():
            self._limit_s = 0.0
        super().check(*arguments, **more)


@pytest.fixture
def opened(monkeypatch):
    """All transports that the ranks have made."""
    transports = []

    class Recorded(rendezvous.ZeroMQTransport):
        def __init__(self, *arguments, **more):
            super().__init__(*arguments, **more)
            transports.append(self)

    monkeypatch.setattr(rendezvous, "ZeroMQTransport", Recorded)
    return transports


def interrupt(monkeypatch, rank):
    """Have the joining of `rank` cancelled as it comes to share memory."""
    share = rendezvous._share_memory

    def cancelled(environment, folder, ranks, joining, **more):
        if environment.rank == rank:
            joining.cancel()
            joining.check(list, "")
        return share(environment, folder, ranks, joining, **more)

    monkeypatch.setattr(rendezvous, "_share_memory", cancelled)


@pytest.mark.parametrize("interrupted", range(SIZE))
def test_the_others_hear_at_once_of_an_interrupt(monkeypatch, opened, interrupted):
    distributed = pytest.importorskip("torch.distributed")
    store = distributed.HashStore()
    store.set_timeout(timedelta(seconds=60))
    interrupt(monkeypatch, interrupted)
    over, errors = threading.Event(), {}

    def be_rank(rank):
        try:
            rendezvous.meet(Environment.of_store(store, rank, SIZE, {}), UntilInterrupted(rank, over))
        except Exception as error:
            errors[rank] = error
        if rank == interrupted:
            over.set()

    ranks = [threading.Thread(target=be_rank, args=(rank,)) for rank in range(SIZE)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert isinstance(errors.pop(interrupted), ClosedError)
    assert len(errors) == SIZE - 1
    for error in errors.values():
        assert isinstance(error, PeerLostError)
        assert (error.rank, error.cause) == (interrupted, "it was interrupted before all ranks had joined")
        # The rank may have noticed first that the folder of the interrupted one is gone.
        assert not isinstance(error.__cause__, DeadlineError), "it has waited for its deadline"
    assert len(opened) == SIZE
    assert all(transport._closed and transport._context.closed for transport in opened)
