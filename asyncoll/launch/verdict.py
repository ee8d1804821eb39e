"""The report on a job that has failed: the root cause first, then its consequences."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator, Mapping, Sequence

from asyncoll.launch.supervisor import Failure, Supervisor, is_same_loss


def explain(
    supervisor: Supervisor,
    last_lines: Sequence[Sequence[bytes]],
    pids: Mapping[int, int],
    hosts: Mapping[int, str],
) -> Iterator[str]:
    """The lines to print.

    `last_lines` are the last lines of each rank's stderr; `hosts` are the names of their hosts, if there are several.
    """
    root = supervisor.root
    if root is None:
        return
    if root.code == -signal.SIGSTOP:
        yield from _left_stopped(supervisor, root, pids, hosts)
        return
    # The rank that is blamed may have been frozen, and so could not fail by itself.
    accused = root.blames if root.blames in supervisor.stopped else None
    if accused is not None:
        yield f"{_ranks([accused], hosts=hosts)} is the root cause, as the other ranks report: {root.summary}"
    if root.is_lost:
        lost = [failure.rank for failure in supervisor.failures.values() if is_same_loss(failure, root)]
        yield _loss(lost, root)
    else:
        name = _ranks([root.rank], hosts=hosts)
        yield f"{name} {fate(root)} after {root.after_s:.1f} s" + (":" if root.traceback else "")
    if root.traceback:
        yield root.traceback.rstrip("\n")
    elif last := [line.decode(errors="replace") for line in last_lines[root.rank]]:
        yield f"the last lines of its stderr ({len(last)}):"
        yield from (f"    {line}" for line in last)
    if supervisor.is_too_small:
        yield f"fewer than {supervisor.min_ranks} ranks were left (--min-ranks)"
    yield from followers(supervisor, root)
    if supervisor.exit_code is None and supervisor.stopped:
        if accused is None:
            cause = f"because rank {root.rank} {'was lost' if root.is_lost else 'failed'}"
            yield f"{were(supervisor.stopped)} stopped {cause}"
        else:  # its program may have ended, and its interpreter not yet
            yield f"processes that had not ended yet were stopped: {_ranks(supervisor.stopped)}"


def tell_deaths(deaths: Sequence[Failure], living: int, pids: Mapping[int, int], hosts: Mapping[int, str]) -> str:
    """The message for the user when ranks have died, of one cause, and the job goes on."""
    first = deaths[0]
    if first.is_lost:
        told = _loss([death.rank for death in deaths], first)
    else:
        told = f"{_ranks([first.rank], pids, hosts)} {fate(first)} after {first.after_s:.1f} s"
    return f"{told}; the job goes on with {living} rank{'s' * (living > 1)}"


def tell_stopped(ranks: Sequence[int], pids: Mapping[int, int], grace_s: float, hosts: Mapping[int, str]) -> str:
    """The message for the user when every rank that still runs is stopped."""
    are, them = ("is", "it") if len(ranks) == 1 else ("are", "them")
    numbers = " ".join(str(pids[rank]) for rank in ranks)
    found = f"{_ranks(ranks, pids, hosts)} {are} stopped and every other rank has ended"
    if grace_s == math.inf:
        plan = f"the launcher waits. To end {them}: kill -KILL {numbers}"
    else:
        plan = f"the launcher ends {them} after {grace_s:g} s (ASYNCOLL_STOPPED_S)"
    return f"{found}: {plan}. To continue {them}: kill -CONT {numbers}"


def _left_stopped(
    supervisor: Supervisor, root: Failure, pids: Mapping[int, int], hosts: Mapping[int, str]
) -> Iterator[str]:
    """All failures of such a job are stopped ranks: if another rank fails, stopped ranks do not count as failed."""
    ranks = sorted(supervisor.failures)
    they, were, them = ("it", "was", "it") if len(ranks) == 1 else ("they", "were", "them")
    yield (
        f"{_ranks(ranks, pids, hosts)} {were} stopped by a signal (SIGSTOP, say), and the launcher ended {them} "
        f"after {root.after_s:.1f} s: every other rank had ended, and {they} did not continue "
        f"within {supervisor.stopped_grace_s:g} s"
    )
    yield (
        "find out who sent the signal; if that was intended, continue a stopped rank in time (kill -CONT PID), "
        "or set ASYNCOLL_STOPPED_S to more seconds (0: the launcher waits for ever)"
    )


def followers(supervisor: Supervisor, root: Failure) -> Iterator[str]:
    """The lines that name the other ranks that have failed, alike ones together."""
    alike: dict[str, list[int]] = {}
    for failure in supervisor.failures.values():
        if not is_same_loss(failure, root):
            what = failure.summary or fate(failure)
            alike.setdefault(what, []).append(failure.rank)
    for what, members in alike.items():
        yield f"{_ranks(members)} failed too: {what}"


def _loss(members: Sequence[int], failure: Failure) -> str:
    return f"{were(members)} lost after {failure.after_s:.1f} s: {failure.summary}"


def were(members: Sequence[int]) -> str:
    return f"{_ranks(members)} {'was' if len(members) == 1 else 'were'}"


def _ranks(
    members: Sequence[int], pids: Mapping[int, int] | None = None, hosts: Mapping[int, str] | None = None
) -> str:
    """The ranks, each with its host and its pid as far as they are given."""

    def name(rank: int) -> str:
        host = [f"host {hosts[rank]}"] if hosts else []
        pid = [f"pid {pids[rank]}"] if pids else []
        return f"{rank} ({', '.join(host + pid)})" if host or pid else str(rank)

    return f"rank{'s' * (len(members) > 1)} {', '.join(map(name, sorted(members)))}"


def fate(failure: Failure) -> str:
    if failure.code >= 0:
        return f"failed (exit code {failure.code})"
    if failure.code == -signal.SIGSTOP:
        return "was stopped by a signal"
    return f"was killed by {signal_name(-failure.code)}"


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"  # real-time signals have no name
