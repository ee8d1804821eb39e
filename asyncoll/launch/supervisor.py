"""Who failed first, whom to stop and when, how the job ends. No process, no clock: events in, orders out."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

SETTLE_S = 0.1  # after the first failure, for others that were on their way
BLAME_S = 1.0  # the same, if the failure names a rank that has not failed yet
STOP_GRACE_S = 5.0
INTERRUPT_GRACE_S = 10.0
TIMEOUT_CODE = 124
LOOKS = (
    5  # at a stopped rank before the job ends: the launcher may have been stopped with it, and go on a little sooner
)


@dataclass(frozen=True, slots=True)
class Failure:
    """`code` is negative if a signal ended, or stopped, the rank; `blames` is the rank that its exception names."""

    rank: int
    code: int
    after_s: float
    traceback: str = ""
    summary: str = ""
    blames: int | None = None

    @property
    def exit_code(self) -> int:
        return 128 - self.code if self.code < 0 else self.code


class Supervisor:
    """Feed it what happens; `order(signal, ranks)` is called for what to do about it, also out of `tick`."""

    def __init__(self, size: int, now: float, order: Callable[[int, Sequence[int]], None]) -> None:
        self.running = set(range(size))
        self.failures: dict[int, Failure] = {}  # in the order in which they were heard of
        self.stopped: list[int] = []
        self.stopping = False
        self.exit_code: int | None = None  # set if the job is being stopped from outside
        self.started_at = now
        self._order = order
        self._plan: deque[tuple[float, int]] = deque()
        self._size = size
        self._looks = 0  # in a row that found nothing but stopped ranks
        self._stopped_since = now

    @property
    def root(self) -> Failure | None:
        """The failure that the others follow from, as far as is known."""
        if not self.failures:
            return None
        # Nothing a rank does makes a peer die of SIGKILL, so such a death is never a consequence.
        failure = min(self.failures.values(), key=lambda failure: failure.code != -signal.SIGKILL)
        seen = {failure.rank}
        while failure.blames in self.failures and failure.blames not in seen:
            failure = self.failures[failure.blames]
            seen.add(failure.rank)
        return failure

    def failed(self, failure: Failure) -> None:
        """The rank says that it is about to fail, or has failed without a word."""
        if not self.stopping:
            self.failures.setdefault(failure.rank, failure)

    def exited(self, rank: int, code: int, now: float) -> None:
        if code:
            self.failed(Failure(rank, code, now - self.started_at))
        self.running.discard(rank)

    @property
    def has_stragglers(self) -> bool:
        """Whether some ranks have ended well and others run: if these are stopped, nobody waits for them."""
        return 0 < len(self.running) < self._size and not self.failures and not self.stopping

    def looked(self, stopped: Collection[int], patience_s: float, now: float) -> None:
        """At the stragglers; `stopped` are those whose processes are, as by SIGSTOP. If all are for long, they fail."""
        if not self.has_stragglers or not self.running <= set(stopped):
            self._looks = 0
            return
        if not self._looks:
            self._stopped_since = now
        self._looks += 1
        if self._looks >= LOOKS and now >= self._stopped_since + patience_s:
            for rank in sorted(self.running):
                self.failed(Failure(rank, -signal.SIGSTOP, now - self.started_at))

    def stop(self, signum: int, exit_code: int, now: float) -> None:
        """Somebody outside wants the job to end; asking a second time is final."""
        if self.stopping:
            self._plan = deque([(now, signal.SIGKILL)])
        else:
            self.exit_code = exit_code
            self._begin(signum, now)
        self.tick(now)

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self.root and not self.stopping and self._settled(now):
            self._begin(signal.SIGTERM, now)
        while self._plan and self._plan[0][0] <= now:
            _, signum = self._plan.popleft()
            spared = self._leaving() if signum != signal.SIGKILL else ()
            self._order(signum, sorted(self.running.difference(spared)))

    def wake_at(self) -> float | None:
        """When `tick` is due next."""
        if self._plan:
            return self._plan[0][0]
        if self.failures and not self.stopping:
            return self._first_failure_at + (BLAME_S if self._awaits_blamed else SETTLE_S)
        return None

    def _begin(self, signum: int, now: float) -> None:
        self.stopping = True
        self.stopped = sorted(self.running.difference(self.failures))
        grace = INTERRUPT_GRACE_S if signum == signal.SIGINT else 0.0
        if grace:
            self._plan.append((now, signum))
        self._plan.append((now + grace, signal.SIGTERM))
        self._plan.append((now + grace + STOP_GRACE_S, signal.SIGKILL))

    def _leaving(self) -> list[int]:
        """The ranks that are on their way out, and need no signal."""
        return [rank for rank, failure in self.failures.items() if failure.code != -signal.SIGSTOP]

    def _settled(self, now: float) -> bool:
        return now >= self._first_failure_at + (BLAME_S if self._awaits_blamed else SETTLE_S)

    @property
    def _first_failure_at(self) -> float:
        return self.started_at + next(iter(self.failures.values())).after_s

    @property
    def _awaits_blamed(self) -> bool:
        root = self.root
        return root is not None and root.blames in self.running and root.blames not in self.failures
