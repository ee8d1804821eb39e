"""Which rank has failed first, which ranks to stop and when, and how the job ends.

A rank that dies, by a signal or with its host, has failed if fewer than `min_ranks` are left. Else the job goes on. So
does one that raises EvictedError.

No process, no clock: events come in as calls, and orders go out.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

# From the first failure to the stop: reports of other ranks may be under way.
SETTLE_S = 0.1
# The same, if the failure names a rank whose own report has not come yet.
BLAME_S = 1.0
STOP_GRACE_S = 5.0
INTERRUPT_GRACE_S = 10.0
# After this time a host that has not killed its ranks does not answer, and is told to again.
GIVE_UP_S = 15.0
TIMEOUT_CODE = 124
# A rank that is stopped when every other rank has ended is given this time.
STOPPED_GRACE_S = 10.0
# A longer gap between two looks means that the launcher was stopped, too (Ctrl-Z): the grace period restarts.
LOOK_GAP_MAX_S = 2.0
STOPPED = "T"  # the state of a process that a signal has stopped; a debugger's is "t"


EVICTED = "EvictedError"  # of a rank that the others took for lost: a death for them


class Failure(NamedTuple):
    """The end of a rank that has failed.

    `code` is negative if a signal has ended, or stopped, the rank. `blames` is the rank that its exception names.
    `is_lost`: its host has ended, for the reason that `summary` tells. `kind` is the class of its exception, and
    `place` the line of the program that has raised it, as far as they are known.
    """

    rank: int
    code: int
    after_s: float
    traceback: str = ""
    summary: str = ""
    blames: int | None = None
    is_lost: bool = False
    kind: str = ""
    place: str = ""

    @property
    def exit_code(self) -> int:
        return exit_code(self.code)


def is_same_loss(failure: Failure, other: Failure) -> bool:
    """Whether both are the same failure, or of ranks that were lost with the same host."""
    return failure is other or (failure.is_lost and other.is_lost and failure.summary == other.summary)


def exit_code(code: int) -> int:
    """The exit code as a shell shows it: 128 plus the signal for a negative `code`."""
    return 128 - code if code < 0 else code


class Outcome(NamedTuple):
    """How a job has ended. `words` are the lines to print; `stopped_by` is the user's signal, if one has ended it."""

    exit_code: int
    words: list[str]
    root: Failure | None
    stopped_by: int | None
    pids: Mapping[int, int]  # by rank
    ends: Mapping[int, tuple[int, float]]  # as those of Supervisor
    deaths: Sequence[Failure]
    seconds: float  # after the start of the ranks


class Supervisor:
    """Methods report events. `order(signal, ranks)` is called, by `stop` and `tick`, to send signals."""

    def __init__(
        self,
        size: int,
        now: float,
        order: Callable[[int, Sequence[int]], None],
        stopped_grace_s: float = STOPPED_GRACE_S,
        min_ranks: int | None = None,
    ) -> None:
        """The job goes on after a death while at least `min_ranks` of the `size` ranks have not died; None: `size`."""
        self.running = set(range(size))
        self.failures: dict[int, Failure] = {}  # in the order of the reports
        self._evicted: dict[int, Failure] = {}  # that have said so, and have not ended
        self.deaths: dict[int, Failure] = {}  # before the ranks were stopped; the job may have gone on after them
        self.ends: dict[int, tuple[int, float]] = {}  # the exit codes of processes, and the seconds after the start
        self.stopped: list[int] = []
        self.stopping = False
        self.exit_code: int | None = None  # set if the user, or a timeout, ends the job
        self.started_at = now
        self.stopped_grace_s = stopped_grace_s
        self.min_ranks = size if min_ranks is None else min_ranks
        self._order = order
        self._plan: deque[tuple[float, int]] = deque()
        self._size = size
        self._looks = 0  # consecutive ones that found only stopped ranks
        self._looked_at = now
        self._stopped_since = now

    @property
    def root(self) -> Failure | None:
        """The failure that the others follow from, as far as is known."""
        if not self.failures:
            return None
        # Nothing a rank does makes a peer die of SIGKILL, or its host end: such a death is never a consequence.
        failures = self.failures.values()
        failure = min(failures, key=lambda failure: failure.code != -signal.SIGKILL and not failure.is_lost)
        seen = {failure.rank}
        while failure.blames in self.failures and failure.blames not in seen:
            failure = self.failures[failure.blames]
            seen.add(failure.rank)
        return failure

    def failed(self, failure: Failure) -> None:
        """A rank has reported its failure, or has failed without a report.

        Once ranks are being stopped, only the report of the rank that the root cause blames counts: it came late.
        """
        if failure.kind == EVICTED and self.min_ranks < self._size and not self.failures:
            self._evicted[failure.rank] = failure
            return
        is_late = self.root is not None and failure.rank == self.root.blames and bool(failure.traceback)
        if not self.stopping or (is_late and failure.rank not in self.failures):
            self.failures.setdefault(failure.rank, failure)
            self.stopped = [rank for rank in self.stopped if rank != failure.rank]
            # The job has gone on after a death, and a program has not.
            if failure.blames in self.deaths and failure.blames not in self.failures:
                death = self.deaths[failure.blames]
                self.failures.update((each.rank, each) for each in self.deaths.values() if is_same_loss(each, death))

    def exited(self, rank: int, code: int, now: float) -> list[Failure]:
        """The process of `rank` has ended with exit code `code`. Returns its death, if the job goes on after it."""
        self.running.discard(rank)
        self.ends[rank] = code, now - self.started_at
        end = Failure(rank, code, now - self.started_at)
        if (code < 0 or rank in self._evicted) and rank not in self.failures:
            return self._died([self._evicted.get(rank, end)])
        if code:
            self.failed(end)
        return []

    def lost(self, ranks: Sequence[int], why: str, now: float) -> list[Failure]:
        """The host of these ranks, which ran, has ended. Returns their deaths, if the job goes on after them."""
        self.running.difference_update(ranks)
        ends = [Failure(rank, 1, now - self.started_at, summary=why, is_lost=True) for rank in ranks]
        return self._died([end for end in ends if end.rank not in self.failures])

    def _died(self, deaths: list[Failure]) -> list[Failure]:
        if self.stopping:
            return []
        self.deaths.update((death.rank, death) for death in deaths)
        if self.living >= self.min_ranks and not self.failures:
            return deaths
        for death in deaths:
            self.failed(death)
        return []

    @property
    def living(self) -> int:
        """The number of ranks that have not died. They run, or have ended by themselves."""
        return self._size - len(self.deaths)

    @property
    def is_too_small(self) -> bool:
        """Whether too few ranks live in a job that goes on after some deaths."""
        return self.living < self.min_ranks < self._size

    @property
    def has_stragglers(self) -> bool:
        """Whether some ranks have ended, none has failed, and others run.

        If these are stopped, no rank is left to continue them.
        """
        return 0 < len(self.running) < self._size and not self.failures and not self.stopping

    def looked(self, states: Mapping[int, str], now: float) -> list[int]:
        """The launcher has read the `states` of the stragglers: the letters that `ps` shows for their processes.

        The stragglers fail if every look within `stopped_grace_s` finds all of them stopped by a signal. A straggler
        that runs may continue the others, and a debugger continues its own process, so both restart the grace period.
        Returns the ranks to report to the user: once, before they fail.
        """
        if not self.has_stragglers or any(states.get(rank) != STOPPED for rank in self.running):
            self._looks = 0
            return []
        if not self._looks or now > self._looked_at + LOOK_GAP_MAX_S:
            self._looks = 0
            self._stopped_since = now
        self._looks += 1
        self._looked_at = now
        # Not at the first look, which may come at the end of a pause of the whole job.
        if self._looks == 2:
            return sorted(self.running)
        if self._looks > 2 and now >= self._stopped_since + self.stopped_grace_s:
            if self.min_ranks < self._size:
                self._order(signal.SIGKILL, sorted(self.running))  # a death as any other
                return []
            for rank in sorted(self.running):
                self.failed(Failure(rank, -signal.SIGSTOP, now - self.started_at))
        return []

    def stop(self, signum: int, exit_code: int, now: float) -> None:
        """The user, or a timeout, ends the job. A second call kills the ranks at once."""
        if self.stopping:
            self._plan = deque([(now, signal.SIGKILL)])
        else:
            self.exit_code = exit_code
            self._begin(signum, now)
        self.tick(now)

    def tick(self, now: float) -> None:
        """Send the signals that are due."""
        if self.failures and not self.stopping and now >= self._settled_at:
            self._begin(signal.SIGTERM, now)
        while self._plan and self._plan[0][0] <= now:
            _, signum = self._plan.popleft()
            # Ranks that have failed are ending by themselves, unless they are stopped.
            ending = [rank for rank, failure in self.failures.items() if failure.code != -signal.SIGSTOP]
            self._order(signum, sorted(self.running.difference(ending if signum != signal.SIGKILL else ())))

    def wake_at(self) -> float | None:
        """When the next `tick` is due; None if none is."""
        if self._plan:
            return self._plan[0][0]
        if self.failures and not self.stopping:
            return self._settled_at
        return None

    def _begin(self, signum: int, now: float) -> None:
        self.stopping = True
        self.stopped = sorted(self.running.difference(self.failures))
        grace = INTERRUPT_GRACE_S if signum == signal.SIGINT else 0.0
        if grace:
            self._plan.append((now, signum))
        self._plan.append((now + grace, signal.SIGTERM))
        killed = now + grace + STOP_GRACE_S
        self._plan.extend([(killed, signal.SIGKILL), (killed + GIVE_UP_S, signal.SIGKILL)])

    @property
    def _settled_at(self) -> float:
        """When the first failure is old enough for the root cause to be known."""
        root, first = self.root, next(iter(self.failures.values()))
        awaits_blamed = root is not None and root.blames in self.running and root.blames not in self.failures
        return self.started_at + first.after_s + (BLAME_S if awaits_blamed else SETTLE_S)
