"""A rank that is interrupted while the ranks meet: all of them end this attempt at once, with nothing left open."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta

import pytest

from asyncoll.errors import AbortedError, ClosedError, DeadlineError, PeerLostError, UsageError
from asyncoll.runtime.progress import SharedLoop
from asyncoll.transport.joining import Joining
from asyncoll.world import join, meeting, rank_links
from asyncoll.world.environment import Environment
from tests.support.processes import PATIENCE_S

SIZE = 3
INTERRUPTED = "it was interrupted before all ranks had joined"


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

    class Recorded(meeting.ZeroMQTransport):
        def __init__(self, *arguments, **more):
            super().__init__(*arguments, **more)
            transports.append(self)

    monkeypatch.setattr(meeting, "ZeroMQTransport", Recorded)
    return transports


def interrupt(monkeypatch, rank):
    """Have the joining of `rank` cancelled as it comes to share memory."""
    share = meeting._share_memory

    def cancelled(environment, folder, ranks, joining, **more):
        if environment.rank == rank:
            joining.cancel()
            joining.check(list, "")
        return share(environment, folder, ranks, joining, **more)

    monkeypatch.setattr(meeting, "_share_memory", cancelled)


@pytest.mark.parametrize("interrupted", range(SIZE))
def test_the_others_hear_at_once_of_an_interrupt(monkeypatch, opened, interrupted):
    distributed = pytest.importorskip("torch.distributed")
    store = distributed.HashStore()
    store.set_timeout(timedelta(seconds=60))
    interrupt(monkeypatch, interrupted)
    over, errors = threading.Event(), {}

    def be_rank(rank):
        try:
            meeting.meet(Environment.of_store(store, rank, SIZE, {}), UntilInterrupted(rank, over))
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
        assert (error.rank, error.cause) == (interrupted, INTERRUPTED)
        # The rank may have noticed first that the folder of the interrupted one is gone.
        assert not isinstance(error.__cause__, DeadlineError), "it has waited for its deadline"
    assert len(opened) == SIZE
    assert all(transport._closed and transport._context.closed for transport in opened)


# -- after the ranks have met -----------------------------------------------------------------------


class NotedStore:
    """A store of torch that notes which threads have called it, and what they have written."""

    def __init__(self):
        distributed = pytest.importorskip("torch.distributed")
        self._store = distributed.HashStore()
        self._store.set_timeout(timedelta(seconds=60))
        self.callers, self.written = set(), set()

    def __getattr__(self, name):
        if name not in ("add", "check", "get", "set"):
            raise AttributeError(name)

        def call(*arguments):
            self.callers.add(threading.current_thread())
            if name == "set":
                self.written.add(arguments[0])
            return getattr(self._store, name)(*arguments)

        return call


class CancelledAsItHasMet(Joining):
    """The joining of a task of the loop that runs here, which is cancelled in the last step of its meeting."""

    def __init__(self, rank, size):
        super().__init__(rank, size)
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._is_cancelled = threading.Event()

    def fails_by(self, tell):
        super().fails_by(tell)
        self._loop.call_soon_threadsafe(self._task.cancel)
        assert self._is_cancelled.wait(PATIENCE_S)

    def cancel(self):
        super().cancel()
        self._is_cancelled.set()


class CancelledAsItHasJoined(SharedLoop):
    """The runner of a rank that is cancelled when it has joined, before its task goes on."""

    is_inside = False

    async def within(self, work):
        result = await super().within(work)
        if not self.is_inside:
            self.is_inside = True
            raise asyncio.CancelledError
        return result


async def one_gives_up(store, cancelled):
    """Rank `cancelled` of two is cancelled as all have met, and the other one hears of it."""

    async def give_up():
        await rank_links.meeting(Environment.of_store(store, cancelled, 2, {}), CancelledAsItHasMet(cancelled, 2))

    giving_up = asyncio.create_task(give_up())
    with pytest.raises(PeerLostError) as lost:
        async with join.joined(SharedLoop(), Environment.of_store(store, 1 - cancelled, 2, {})):
            pass
    assert (lost.value.rank, lost.value.cause) == (cancelled, INTERRUPTED)
    await asyncio.wait([giving_up])
    assert giving_up.cancelled()


@pytest.mark.parametrize("cancelled", [0, 1])
def test_a_rank_that_is_cancelled_as_all_have_met_tells_it_and_blocks_no_loop(cancelled):
    """The other rank is on its loop, and waits for connections."""
    store = NotedStore()

    asyncio.run(one_gives_up(store, cancelled))
    assert threading.current_thread() not in store.callers


@pytest.mark.parametrize("cancelled", [0, 1])
def test_a_rank_that_connects_after_the_other_has_closed_its_socket_hears_why(cancelled, monkeypatch):
    """The other rank is cancelled in the last step of its meeting, and the file of its socket is gone."""
    store, is_closed = NotedStore(), threading.Event()

    class Noted(meeting.ZeroMQTransport):
        def _close(self, **more):
            super()._close(**more)
            if self.rank == cancelled:
                is_closed.set()

    class MeetsLast(Joining):
        def fails_by(self, tell):
            super().fails_by(tell)
            assert is_closed.wait(PATIENCE_S)

    monkeypatch.setattr(meeting, "ZeroMQTransport", Noted)
    monkeypatch.setattr(join, "_joining", lambda environment: MeetsLast(environment.rank, 2))

    asyncio.run(one_gives_up(store, cancelled))


@pytest.mark.parametrize("cancelled", [0, 1])
def test_a_rank_that_is_cancelled_as_all_have_joined_leaves_the_world_and_tells_nothing_in_the_store(cancelled):
    store = NotedStore()

    async def rank(runner, number):
        async with join.joined(runner, Environment.of_store(store, number, 2, {})) as comm:
            await comm.barrier()

    async def main():
        leaving = asyncio.create_task(rank(CancelledAsItHasJoined(), cancelled))
        with pytest.raises(AbortedError, match=f"rank {cancelled} aborted: CancelledError"):
            await rank(SharedLoop(), 1 - cancelled)
        await asyncio.wait([leaving])
        assert leaving.cancelled()

    asyncio.run(main())
    assert not [name for name in store.written if name.endswith("/failed")]


class FailsAtItsEnd(Joining):
    """The last step of its meeting raises an error."""

    def fails_by(self, tell):
        raise UsageError("at the end")


def test_an_error_in_the_last_step_of_a_meeting_closes_all_connections(opened):
    store = NotedStore()

    async def main():
        ranks = [Environment.of_store(store, rank, 2, {}) for rank in range(2)]
        meetings = [rank_links.meeting(environment, FailsAtItsEnd(environment.rank, 2)) for environment in ranks]
        errors = await asyncio.gather(*meetings, return_exceptions=True)
        failed = [rank for rank, error in enumerate(errors) if isinstance(error, UsageError)]
        assert failed
        for rank in {0, 1}.difference(failed):  # it has heard of the other before its own last step
            assert isinstance(errors[rank], PeerLostError), errors[rank]
            assert (errors[rank].rank, errors[rank].cause) == (1 - rank, "it could not join: UsageError: at the end")

    asyncio.run(main())
    assert len(opened) == 2
    assert all(transport._closed and transport._context.closed for transport in opened)
