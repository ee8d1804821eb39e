"""Checks many worlds in several processes, for the command `asyncoll laws`."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial

from rich.console import Console
from rich.progress import Progress

from asyncoll.errors import UsageError
from asyncoll.testing.laws import LawBroken, Lawful, check_laws
from asyncoll.testing.laws.methods import split
from asyncoll.testing.laws.story import ALL_KINDS

_BATCH = 20  # the most worlds that a process checks between two updates of the progress bar
_WORTH = 20  # worlds that take as long as the start of a process
_SHOWN = 3  # broken worlds that are shown; the others are counted, and usually have the same cause

_RANKS_MAX = 1024  # in a world
_SEEDS_MAX = 1_000_000  # of a sweep

World = tuple[str, int, int]  # kind, size, seed


Outcome = Lawful | str  # of a world; the text of the law that it breaks


def parse_kinds(text: str) -> list[str]:
    if text == "all":
        return list(ALL_KINDS)
    if split(text)[0] in ALL_KINDS:
        return [text]
    raise UsageError(f"unknown kind {text!r}: use all, {', '.join(ALL_KINDS)}")


def parse_ranks(text: str) -> list[int]:
    """The list that `text` stands for: `1-3,7` is 1, 2, 3 and 7."""
    sizes: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        found = _whole_numbers(first, last if dash else first)
        if not found or found[0] < 1 or found[-1] > _RANKS_MAX:
            raise UsageError(
                f"--ranks: {part!r:.80} is no number of ranks: use a list such as 1-9,12,13, up to {_RANKS_MAX}"
            )
        sizes += found
    return sizes


def parse_seeds(text: str) -> range:
    """The range that `text` stands for: `0:200` is 0 to 199."""
    first, _, end = text.partition(":")
    seeds = _whole_numbers(first, end)[:-1]
    if not 0 < len(seeds) <= _SEEDS_MAX:
        raise UsageError(
            f"--seeds: {text!r:.80} are no seeds: use FROM:TO, such as 0:200; at most {_SEEDS_MAX} seeds, of at most "
            "18 digits"
        )
    return seeds


def _whole_numbers(first: str, last: str) -> range:
    """The numbers from `first` to `last`, both included; an empty range if one of them is not 1 to 18 digits."""
    if not all(re.fullmatch(r"[0-9]{1,18}", number) for number in (first, last)):
        return range(0)
    return range(int(first), int(last) + 1)


def sweep(
    kinds: Sequence[str], sizes: Sequence[int], seeds: Sequence[int], jobs: int, transport: str, devices: bool
) -> bool:
    """Check a world of every kind and seed, at the sizes in turn, in up to `jobs` processes.

    Prints a line for each kind. Returns whether all laws hold.
    """
    jobs = max(1, min(jobs, len(kinds) * len(seeds) // _WORTH))
    console = Console(stderr=True)
    lawful = True
    spawning = multiprocessing.get_context("spawn")
    processes = ProcessPoolExecutor(jobs, spawning) if jobs > 1 else contextlib.nullcontext()
    with processes as pool, Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        for kind in kinds:
            began = bar.get_time()
            task = bar.add_task(kind, total=len(seeds))
            outcomes: list[Outcome] = []
            worlds = [(kind, sizes[seed % len(sizes)], seed) for seed in seeds]
            for batch in _check(worlds, partial(check_batch, transport=transport, devices=devices), pool, jobs):
                outcomes += batch
                bar.advance(task, len(batch))
            bar.remove_task(task)
            print(_line(kind, outcomes, bar.get_time() - began), flush=True)
            lawful = lawful and all(isinstance(outcome, Lawful) for outcome in outcomes)
    return lawful


def _check(
    worlds: list[World], check: Callable[[list[World]], list[Outcome]], pool: ProcessPoolExecutor | None, jobs: int
) -> Iterator[list[Outcome]]:
    count = min(_BATCH, math.ceil(len(worlds) / jobs))
    batches = [worlds[start : start + count] for start in range(0, len(worlds), count)]
    if pool is None:
        yield from map(check, batches)
    else:
        for done in as_completed([pool.submit(check, batch) for batch in batches]):
            yield done.result()


def check_batch(worlds: list[World], transport: str, devices: bool) -> list[Outcome]:
    """Check the laws in each of these worlds."""
    outcomes: list[Outcome] = []
    for world in worlds:
        try:
            outcomes.append(check_laws(*world, transport=transport, devices=devices))
        except LawBroken as broken:
            outcomes.append(str(broken))
    return outcomes


def _line(kind: str, outcomes: list[Outcome], wall_s: float) -> str:
    broken = [outcome for outcome in outcomes if isinstance(outcome, str)]
    lawful = [outcome for outcome in outcomes if isinstance(outcome, Lawful)]
    rounds, messages = sum(each.rounds for each in lawful), sum(each.messages for each in lawful)
    verdict = f"laws broken in {len(broken)}" if broken else "all laws hold"
    counts = f"{len(outcomes):>7,} worlds {rounds:>9,} rounds {messages:>11,} messages"
    return "\n".join([f"{kind:<10} {counts} {wall_s:>7.1f} s  {verdict}", *broken[:_SHOWN]])
