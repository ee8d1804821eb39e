"""The checks of a cell: no rank hangs, survivors raise the right error in time, and nothing is left behind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from asyncoll.testing.faults.cells import KINDS, Cell, Plan
from asyncoll.testing.faults.processes import Story, Told

_SHOWN = 1500  # trailing characters of a rank's output that a complaint shows
_FRAME = re.compile(r'File ".*/asyncoll/((?!testing).*)", line (\d+) in (\w+)')  # the format of faulthandler
_FRAMES = 4  # frames of each thread that a complaint shows


@dataclass(frozen=True, slots=True)
class Verdict:
    """The broken checks of a cell, and the seconds from the fault to each error of a survivor that names the victim."""

    cell: Cell
    broken: tuple[str, ...]
    heard_s: tuple[float, ...]

    @property
    def late(self) -> tuple[str, ...]:
        """Errors that were right but too late. Only this check depends on the load of the host."""
        within_s = KINDS[self.cell.kind].within_s
        return tuple(f"heard after {1e3 * heard_s:.0f} ms" for heard_s in self.heard_s if heard_s > within_s)


def judge(cell: Cell, story: Story) -> Verdict:
    """Check the reports of the ranks, and the processes and files that they left."""
    return Verdict(cell, tuple(_breaches(cell, story)), tuple(_heard(cell, story)))


def _heard(cell: Cell, story: Story) -> Iterator[float]:
    victim = Plan.draw(cell).victim
    struck = story.of(victim, "struck")
    for rank in range(cell.size):
        error = story.of(rank, "error")
        if struck and error and rank != victim and error["named"] == victim:
            yield error["at_s"] - struck["at_s"]


def _breaches(cell: Cell, story: Story) -> Iterator[str]:
    kind, victim = KINDS[cell.kind], Plan.draw(cell).victim
    if story.of(victim, "struck") is None:
        yield f"the fault did not strike rank {victim}"
    for rank in range(cell.size):
        if rank in story.hung:
            yield f"rank {rank} hung: {_where(story.hung[rank])}"
        elif not kind.told:
            yield from _disturbed(rank, story)
        elif rank != victim:
            yield from _misinformed(rank, cell, story)
    for left in story.left:
        yield f"left behind: {left}"


def _disturbed(rank: int, story: Story) -> Iterator[str]:
    """Breaches of a rank that must not notice the fault."""
    if error := story.of(rank, "error"):
        yield f"rank {rank} was disturbed: {_said(error)}"
    elif not story.of(rank, "done") or story.codes[rank]:
        yield f"rank {rank} {_ended(rank, story)}"


def _misinformed(rank: int, cell: Cell, story: Story) -> Iterator[str]:
    """Breaches of a rank that must raise an error naming the victim."""
    kind, victim = KINDS[cell.kind], Plan.draw(cell).victim
    error = story.of(rank, "error")
    if error is None:
        yield f"rank {rank} was told nothing of rank {victim}, and {_ended(rank, story)}"
        return
    if error["named"] != victim or error["type"] not in kind.told:
        yield f"rank {rank} was not told of rank {victim}, but: {_said(error)}"
    if story.codes[rank]:
        yield f"rank {rank} {_ended(rank, story)}"


def _ended(rank: int, story: Story) -> str:
    return f"ended with code {story.codes[rank]}\n{story.output[rank][-_SHOWN:]}"


def _said(error: Told) -> str:
    return f"{error['type']}: {error['text']}"


def _where(stacks: str) -> str:
    """The innermost frames of the library, for each thread that is inside the library."""

    threads = [_FRAME.findall(thread)[:_FRAMES] for thread in stacks.split("(most recent call first)")]
    return "; ".join(
        " < ".join(f"{function} {file}:{line}" for file, line, function in each) for each in threads if each
    )
