"""Watching the ranks of a world of Ray: which one failed first, which to stop, and the error for the driver."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Sequence
from typing import Any

import ray

from asyncoll.errors import AsyncollError, PeerLostError, RemoteError, describe, text_of
from asyncoll.launch.supervisor import Failure, Supervisor
from asyncoll.launch.verdict import followers
from asyncoll.ray.actor import ActorPlace, Raised

_CAUSE_CHARACTERS = 1000  # of Ray's account of a death
_TURN_S = 1.0


class RankWatch:
    """The ranks' calls of `Rank.run`, from their start to their end."""

    def __init__(self, actors: Sequence[Any], places: Sequence[ActorPlace], calls: Sequence[Any]) -> None:
        self._actors = actors
        self._places = places
        self._calls = calls
        self._raised: dict[int, Raised] = {}
        self._results: dict[int, Any] = {}
        self._began_s = time.monotonic()
        self._supervisor = Supervisor(len(calls), self._began_s, self._order)

    def results(self) -> list[Any]:
        """Wait until all ranks have ended: their results. Raises the error that is the root cause."""
        try:
            self._await_end()
        except BaseException:  # Ctrl-C, say; a second one leaves the ranks to the end of their actors
            self._supervisor.stop(signal.SIGTERM, 1, time.monotonic())
            self._await_end()
            raise
        if self._supervisor.root is not None:
            raise self._error(self._supervisor.root)
        return [self._results[rank] for rank in range(len(self._calls))]

    def _await_end(self) -> None:
        while self._supervisor.running:
            due_s, now_s = self._supervisor.wake_at(), time.monotonic()
            pause_s = _TURN_S if due_s is None else min(max(due_s - now_s, 0.0), _TURN_S)
            calls = {self._calls[rank]: rank for rank in self._supervisor.running}
            ended, _ = ray.wait(list(calls), timeout=pause_s, fetch_local=False)
            for call in ended:
                self._take(calls[call])
            self._supervisor.tick(time.monotonic())

    def _take(self, rank: int) -> None:
        """The call of `rank` is over."""
        now_s = time.monotonic()
        after_s = now_s - self._began_s
        try:
            self._results[rank], raised = ray.get(self._calls[rank])
        except ray.exceptions.RayActorError as error:  # its process is gone
            summary = f"its process has ended: {_one_line(error)}"
            self._supervisor.failed(Failure(rank, -signal.SIGKILL, after_s, summary=summary))
        except Exception as error:  # its result cannot be sent, or not be read here
            cause = getattr(error, "cause", None) or error
            raised = Raised(type(cause).__name__, text_of(cause), str(error), describe(cause).partition("\n")[0], None)
            self._fail(rank, raised, after_s)
        else:
            if raised is not None and not (self._supervisor.stopping and raised.type_name == "CancelledError"):
                self._fail(rank, raised, after_s)
        self._supervisor.exited(rank, 0, now_s)

    def _fail(self, rank: int, raised: Raised, after_s: float) -> None:
        self._raised[rank] = raised
        self._supervisor.failed(Failure(rank, 1, after_s, raised.traceback, raised.summary, raised.blames))

    def _order(self, signum: int, ranks: Sequence[int]) -> None:
        """End the calls of `ranks`: by their cancellation, or with their processes."""
        for rank in ranks:
            with contextlib.suppress(ray.exceptions.RayError):
                if signum == signal.SIGKILL:
                    ray.kill(self._actors[rank])
                else:
                    ray.cancel(self._calls[rank])

    def _error(self, root: Failure) -> AsyncollError:
        error: AsyncollError
        raised = self._raised.get(root.rank)
        is_lost = raised is not None and raised.type_name == PeerLostError.__name__
        if is_lost and root.blames is not None and root.blames not in self._supervisor.failures:
            error = self._lost(root.blames, f"as rank {root.rank} reports: {root.summary}")  # which could not by itself
        elif raised is not None:  # its own, or that of a rank which has aborted and then ended well
            error = RemoteError(root.rank, raised.type_name, raised.message, raised.traceback)
            place = self._places[root.rank]
            error.add_note(f"rank {root.rank} ran on host {place.host} (pid {place.pid})")
        else:
            error = self._lost(root.rank, root.summary)
        for line in followers(self._supervisor, root):
            error.add_note(line)
        return error

    def _lost(self, rank: int, cause: str) -> PeerLostError:
        return PeerLostError(rank, cause, self._places[rank].host, self._places[rank].pid)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:_CAUSE_CHARACTERS]
