"""The checks of a cell: no rank hangs, survivors raise the right error in time, and nothing is left behind.

And no contribution of a survivor to a round in memory is lost or doubled: it is in a published round, or still staged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from asyncoll.testing.faults.cell_processes import CellStory, Told
from asyncoll.testing.faults.cells import JOINING, KINDS, Cell, CellPlan

_IN_JOINING = ("PeerLostError", "DeadlineError")  # errors of ranks that miss others before they are connected to them
_SHOWN = 1500  # trailing characters of a rank's output that a complaint shows
_FRAME = re.compile(r'File ".*/asyncoll/((?!testing).*)", line (\d+) in (\w+)')  # the format of faulthandler
_FRAMES = 4  # frames of each thread that a complaint shows


@dataclass(frozen=True, slots=True)
class Verdict:
    """The broken checks of a cell, and the seconds from the fault to each error of a survivor that names the victim."""

    cell: Cell
    broken: tuple[str, ...]
    heard_s: tuple[float, ...]
    said: tuple[str, ...]  # the rank and the text of each of these errors

    @property
    def late(self) -> tuple[str, ...]:
        """Errors that were right but too late. Only this check depends on the load of the host."""
        within_s = KINDS[self.cell.kind].within_s
        heard = zip(self.heard_s, self.said, strict=True)
        return tuple(f"heard after {1e3 * heard_s:.0f} ms by {said}" for heard_s, said in heard if heard_s > within_s)


def judge(cell: Cell, story: CellStory) -> Verdict:
    """Check the reports of the ranks, and the processes and files that they left."""
    kind, victim, lost = KINDS[cell.kind], CellPlan.draw(cell).victim, cell.lost
    struck = story.of(victim, "struck")
    broken = [] if struck else [f"the fault did not strike rank {victim}"]
    heard_s, said = [], []
    for rank in range(cell.size):
        error = story.of(rank, "error")
        if rank in story.hung:
            broken.append(f"rank {rank} hung: {_where(story.hung[rank])}")
        elif not kind.told:
            broken += _disturbed(rank, error, story)
        elif rank not in lost:
            broken += _misinformed(rank, error, cell, story)
        elif kind.leaves_running and error is None:
            broken.append(f"rank {rank}, which is cut off, raised nothing, and {_ended(rank, story)}")
        if (lost_or_doubled := story.of(rank, "record")) and rank not in lost:
            broken.append(f"rank {rank}: {lost_or_doubled['text']}")
        if struck and error and rank not in lost and error["named"] in lost:
            heard_s.append(error["at_s"] - struck["at_s"])
            said.append(f"rank {rank}: {_said(error)}")
    broken += [f"left behind: {left}" for left in story.left if not _dies_with_host(left, cell)]
    return Verdict(cell, tuple(broken), tuple(heard_s), tuple(said))


def _dies_with_host(left: str, cell: Cell) -> bool:
    """Whether this is the folder of sockets of a host that was killed while its ranks joined: nobody is left there."""
    host = cell.placement.host_of(cell.lost[0])
    return (cell.kind, cell.operation) == ("kill-host", JOINING) and left.startswith(f"{host}/")


def _disturbed(rank: int, error: Told | None, story: CellStory) -> Iterator[str]:
    """Breaches of a rank that must not notice the fault."""
    if error is not None:
        yield f"rank {rank} was disturbed: {_said(error)}"
    elif not story.of(rank, "done") or story.codes[rank]:
        yield f"rank {rank} {_ended(rank, story)}"


def _misinformed(rank: int, error: Told | None, cell: Cell, story: CellStory) -> Iterator[str]:
    """Breaches of a rank that must raise an error naming the lost ranks, and their host if there are several hosts."""
    kind, lost = KINDS[cell.kind], cell.lost
    whom = f"rank {lost[0]}" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))}"
    if error is None:
        yield f"rank {rank} was told nothing of {whom}, and {_ended(rank, story)}"
        return
    if cell.operation == JOINING:
        if error["type"] not in _IN_JOINING or not set(lost).intersection(error["ranks"] + error["missing"]):
            yield f"rank {rank} was not told of {whom}, but: {_said(error)}"
        return
    named = (error["named"], error.get("ranks", [error["named"]])) == (lost[0], list(lost))
    if error["type"] == "PeerLostError" and cell.hosts > 1:
        named = named and error["host"] == cell.placement.host_of(lost[0])
    if error["type"] not in kind.told or not named:
        yield f"rank {rank} was not told of {whom}, but: {_said(error)}"
    if story.codes[rank]:
        yield f"rank {rank} {_ended(rank, story)}"


def _ended(rank: int, story: CellStory) -> str:
    return f"ended with code {story.codes[rank]}\n{story.output[rank][-_SHOWN:]}"


def _said(error: Told) -> str:
    return f"{error['type']}: {error['text']}"


def _where(stacks: str) -> str:
    """The innermost frames of the library, for each thread that is inside the library."""

    threads = [_FRAME.findall(thread)[:_FRAMES] for thread in stacks.split("(most recent call first)")]
    return "; ".join(
        " < ".join(f"{function} {file}:{line}" for file, line, function in each) for each in threads if each
    )
