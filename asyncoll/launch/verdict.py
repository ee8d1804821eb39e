"""The last words of a job that did not end well: the root cause first, then what followed from it."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence

from asyncoll.launch.supervisor import Failure, Supervisor


def explain(supervisor: Supervisor, last_lines: Sequence[Sequence[bytes]]) -> Iterator[str]:
    """The lines to print. `last_lines` are the ends of what the ranks wrote to stderr."""
    root = supervisor.root
    if root is None:
        return
    accused = root.blames if root.blames in supervisor.stopped else None  # it is frozen, say, and will not fail itself
    if accused is not None:
        yield f"rank {accused} is the root cause, as the others tell: {root.summary}"
    yield f"rank {root.rank} {_fate(root)} after {root.after_s:.1f} s" + (":" if root.traceback else "")
    if root.traceback:
        yield root.traceback.rstrip("\n")
    elif last := [line.decode(errors="replace") for line in last_lines[root.rank]]:
        yield f"the last lines of its stderr ({len(last)}):"
        yield from (f"    {line}" for line in last)
    yield from _followers(supervisor, root)
    if supervisor.exit_code is None and supervisor.stopped:
        why = f"because rank {root.rank} failed" if accused is None else "in the end"
        yield f"{were(supervisor.stopped)} stopped {why}"


def _followers(supervisor: Supervisor, root: Failure) -> Iterator[str]:
    alike: dict[str, list[int]] = {}
    for failure in supervisor.failures.values():
        if failure is not root:
            what = failure.summary or _fate(failure)
            alike.setdefault(what, []).append(failure.rank)
    for what, members in alike.items():
        yield f"rank{'s' * (len(members) > 1)} {_listed(members)} failed too: {what}"


def were(members: Sequence[int]) -> str:
    return f"rank {members[0]} was" if len(members) == 1 else f"ranks {_listed(members)} were"


def _listed(members: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(members)))


def _fate(failure: Failure) -> str:
    if failure.code == -signal.SIGSTOP:
        return "was found stopped (SIGSTOP, or a debugger) after others had ended"
    if failure.code >= 0:
        return f"failed (exit code {failure.code})"
    return f"was killed by {signal_name(-failure.code)}"


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"  # the real-time ones have no name
