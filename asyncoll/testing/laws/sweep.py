"""Checks many worlds in several processes, for the command `asyncoll laws`."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import repeat

from rich.console import Console
from rich.progress import Progress

from asyncoll.errors import UsageError
from asyncoll.testing.laws import LawBroken, check_laws
from asyncoll.testing.laws.story import KINDS

_BATCH = 20  # the most worlds that a process checks between two updates of the progress bar
_SHOWN = 3  # broken worlds that are shown; the others are counted, and usually have the same cause

World = tuple[str, int, int]  # kind, size, seed


@dataclass(slots=True)
class Batch:
    """The totals of some worlds, and the texts of their broken laws."""

    worlds: int = 0
    rounds: int = 0
    messages: int = 0
    broken: list[str] = field(default_factory=list)

    def add(self, other: Batch) -> None:
        self.worlds += other.worlds
        self.rounds += other.rounds
        self.messages += other.messages
        self.broken += other.broken


def parse_kinds(text: str) -> list[str]:
    if text == "all":
        return list(KINDS)
    if text in KINDS:
        return [text]
    raise UsageError(f"unknown kind {text!r}: use all, {', '.join(KINDS)}")


def parse_ranks(text: str) -> list[int]:
    """The list that `text` stands for: `1-3,7` is 1, 2, 3 and 7."""
    sizes: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        found = _whole_numbers(first, last if dash else first)
        if not found or found[0] < 1:
            raise UsageError(f"{part!r} is no number of ranks: use a list such as 1-9,12,13")
        sizes += found
    return sizes


def parse_seeds(text: str) -> range:
    """The range that `text` stands for: `0:200` is 0 to 199."""
    first, _, end = text.partition(":")
    seeds = _whole_numbers(first, end)[:-1]
    if not seeds:
        raise UsageError(f"{text!r} are no seeds: use FROM:TO, such as 0:200")
    return seeds


def _whole_numbers(first: str, last: str) -> range:
    """The numbers from `first` to `last`, both included; an empty range if one of them is no whole number."""
    if not (first.isdecimal() and last.isdecimal()):
        return range(0)
    return range(int(first), int(last) + 1)


def sweep(kinds: Iterable[str], sizes: Sequence[int], seeds: Sequence[int], jobs: int, transport: str) -> bool:
    """Check a world of every kind and seed, at the sizes in turn. Prints a line for each kind. Returns whether all laws
    hold."""

    console = Console(stderr=True)
    lawful = True
    with _processes(jobs) as pool, Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        for kind in kinds:
            began = bar.get_time()
            task = bar.add_task(kind, total=len(seeds))
            total = Batch()
            for batch in _check([(kind, sizes[seed % len(sizes)], seed) for seed in seeds], transport, pool, jobs):
                total.add(batch)
                bar.advance(task, batch.worlds)
            bar.remove_task(task)
            print(_line(kind, total, bar.get_time() - began), flush=True)
            lawful = lawful and not total.broken
    return lawful


def _processes(jobs: int) -> contextlib.AbstractContextManager[ProcessPoolExecutor | None]:
    if jobs == 1:
        return contextlib.nullcontext()
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))


def _check(worlds: list[World], transport: str, pool: ProcessPoolExecutor | None, jobs: int) -> Iterator[Batch]:
    count = min(_BATCH, math.ceil(len(worlds) / jobs))
    batches = [worlds[start : start + count] for start in range(0, len(worlds), count)]
    if pool is None:
        yield from map(check_batch, batches, repeat(transport))
    else:
        for done in as_completed([pool.submit(check_batch, batch, transport) for batch in batches]):
            yield done.result()


def check_batch(worlds: list[World], transport: str) -> Batch:
    """Check the laws in each of these worlds."""
    batch = Batch()
    for world in worlds:
        batch.worlds += 1
        try:
            lawful = check_laws(*world, transport=transport)
        except LawBroken as broken:
            batch.broken.append(str(broken))
        else:
            batch.rounds += lawful.rounds
            batch.messages += lawful.messages
    return batch


def _line(kind: str, total: Batch, wall_s: float) -> str:
    verdict = f"laws broken in {len(total.broken)}" if total.broken else "all laws hold"
    line = (
        f"{kind:<10} {total.worlds:>7,} worlds {total.rounds:>9,} rounds {total.messages:>11,} messages "
        f"{wall_s:>7.1f} s  {verdict}"
    )
    return "\n".join([line, *total.broken[:_SHOWN]])
