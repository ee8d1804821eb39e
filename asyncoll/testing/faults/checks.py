"""What must be true of every cell."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from asyncoll.testing.faults.cells import KINDS, Cell, Plan
from asyncoll.testing.faults.processes import Story, Told

_SHOWN = 1500  # characters of what a rank wrote
_FRAME = re.compile(r'File ".*/asyncoll/((?!testing).*)", line (\d+) in (\w+)')  # as faulthandler writes them
_FRAMES = 4


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is not as it must be in a cell, and how long after the fault each survivor that named the rank did so."""

    cell: Cell
    broken: tuple[str, ...]
    heard_s: tuple[float, ...]

    @property
    def late(self) -> tuple[str, ...]:
        """Who knew everything, but too late: the only part that depends on how busy the host is."""
        within_s = KINDS[self.cell.kind].within_s
        return tuple(f"heard after {1e3 * heard_s:.0f} ms" for heard_s in self.heard_s if heard_s > within_s)


def judge(cell: Cell, story: Story) -> Verdict:
    """Look at everything that the ranks told, and at what they left."""
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
        yield f"nothing struck rank {victim}"
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
    """A rank that should have noticed nothing."""
    if error := story.of(rank, "error"):
        yield f"rank {rank} was disturbed: {_said(error)}"
    elif not story.of(rank, "done") or story.codes[rank]:
        yield f"rank {rank} {_ended(rank, story)}"


def _misinformed(rank: int, cell: Cell, story: Story) -> Iterator[str]:
    """A rank that should have heard who is lost."""
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
    """The innermost frames of the runtime, in each thread that is in it."""
    threads = [_FRAME.findall(thread)[:_FRAMES] for thread in stacks.split("(most recent call first)")]
    return "; ".join(
        " < ".join(f"{function} {file}:{line}" for file, line, function in each) for each in threads if each
    )
