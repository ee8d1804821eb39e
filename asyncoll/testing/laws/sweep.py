"""Checks many worlds in several processes, for the command `asyncoll laws`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field

from asyncoll.testing.checking import answers, serve
from asyncoll.testing.laws import LawBroken, check_laws
from asyncoll.testing.laws.methods import split
from asyncoll.testing.progress_bar import progress

_WORTH = 20  # worlds that take as long as the start of a process
_SHOWN = 3  # broken worlds that are shown; the others are counted, and usually have the same cause

World = tuple[str, int, int, str, bool]  # kind, size, seed, transport, and whether there are devices
Outcome = tuple[int, int] | str  # the rounds and messages of a world; the text of the law that it breaks


def sweep(
    kinds: Sequence[str],
    sizes: Sequence[int],
    seeds: Sequence[int],
    jobs: int,
    transport: str,
    *,
    devices: bool = False,
    as_json: bool = False,
) -> bool:
    """Check a world of every kind and seed, at the sizes in turn, in up to `jobs` processes.

    Prints a line for each kind; Ctrl-C prints those of the kinds that have worlds. Returns whether all laws hold.
    Raises UsageError for an unknown method of a kind.
    """
    for kind in kinds:
        split(kind)
    worlds = ((kind, sizes[seed % len(sizes)], seed, transport, devices) for kind in kinds for seed in seeds)
    total = len(kinds) * len(seeds)
    found = answers("asyncoll.testing.laws.sweep", worlds, max(1, min(jobs, total // _WORTH)), os.environ)
    pending, lawful, began_s = {kind: KindSum(kind) for kind in kinds}, True, time.perf_counter()
    with progress(kinds[0], total) as advance, closing(found):
        try:
            for kind, outcome in found:
                advance(kind)
                pending[kind].outcomes.append(outcome)
                lawful = lawful and not isinstance(outcome, str)
                if len(pending[kind].outcomes) == len(seeds):
                    print(pending.pop(kind).line(time.perf_counter() - began_s, as_json=as_json), flush=True)
                    began_s = time.perf_counter()
        finally:
            for begun in pending.values():
                if begun.outcomes:
                    print(begun.line(time.perf_counter() - began_s, as_json=as_json), flush=True)
    return lawful


def check(world: World) -> tuple[str, Outcome]:
    """The kind of the world, and its outcome."""
    kind, size, seed, transport, devices = world
    try:
        lawful = check_laws(kind, size, seed, transport=transport, devices=devices)
    except LawBroken as broken:
        return kind, str(broken)
    return kind, (lawful.rounds, lawful.messages)


@dataclass(slots=True)
class KindSum:
    """The outcomes of the worlds of a kind."""

    kind: str
    outcomes: list[Outcome] = field(default_factory=list)

    def line(self, wall_s: float, *, as_json: bool) -> str:
        """A line of the table, with the first broken worlds below it; or one of JSON, with all of them."""
        broken = [outcome for outcome in self.outcomes if isinstance(outcome, str)]
        lawful = [outcome for outcome in self.outcomes if not isinstance(outcome, str)]
        worlds, rounds, messages = len(self.outcomes), sum(each[0] for each in lawful), sum(each[1] for each in lawful)
        if as_json:
            counts = {"worlds": worlds, "rounds": rounds, "messages": messages}
            return json.dumps({"kind": self.kind, **counts, "seconds": wall_s, "broken": broken})
        verdict = f"laws broken in {len(broken)}" if broken else "all laws hold"
        numbers = f"{worlds:>7,} worlds {rounds:>9,} rounds {messages:>11,} messages"
        return "\n".join([f"{self.kind:<10} {numbers} {wall_s:>7.1f} s  {verdict}", *broken[:_SHOWN]])


if __name__ == "__main__":
    serve(check)
