"""What must be true of every cell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from asyncoll.testing.faults.cells import KINDS, Cell, Plan
from asyncoll.testing.faults.worlds import Story, Told

_SHOWN = 1500  # characters of what a rank wrote


@dataclass(frozen=True, slots=True)
class Verdict:
    """`broken` says what is not as it must be; `heard_s`, after how long each survivor named the right rank."""

    cell: Cell
    broken: tuple[str, ...]
    heard_s: tuple[float, ...]


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
    struck = story.of(victim, "struck")
    if struck is None:
        yield f"nothing struck rank {victim}"
    for rank in range(cell.size):
        if rank in story.hung:
            yield f"rank {rank} hung\n{story.hung[rank][-_SHOWN:]}"
        elif not kind.told:
            yield from _disturbed(rank, story)
        elif rank != victim:
            yield from _misinformed(rank, cell, struck, story)
    for left in story.left:
        yield f"left behind: {left}"


def _disturbed(rank: int, story: Story) -> Iterator[str]:
    """A rank that should have noticed nothing."""
    if error := story.of(rank, "error"):
        yield f"rank {rank} was disturbed: {_said(error)}"
    elif not story.of(rank, "done") or story.codes[rank]:
        yield f"rank {rank} ended with code {story.codes[rank]}\n{story.output[rank][-_SHOWN:]}"


def _misinformed(rank: int, cell: Cell, struck: Told | None, story: Story) -> Iterator[str]:
    """A rank that should have heard who is lost."""
    kind, victim = KINDS[cell.kind], Plan.draw(cell).victim
    error = story.of(rank, "error")
    if error is None:
        yield f"rank {rank} was told nothing of rank {victim}, and ended with code {story.codes[rank]}\n{story.output[rank][-_SHOWN:]}"
        return
    if error["named"] != victim or error["type"] != kind.told:
        yield f"rank {rank} was not told of rank {victim}, but: {_said(error)}"
    elif struck and error["at_s"] - struck["at_s"] > kind.within_s:
        yield f"rank {rank} heard after {1e3 * (error['at_s'] - struck['at_s']):.0f} ms: {_said(error)}"
    if story.codes[rank]:
        yield f"rank {rank} ended with code {story.codes[rank]}\n{story.output[rank][-_SHOWN:]}"


def _said(error: Told) -> str:
    return f"{error['type']}: {error['text']}"
