"""The cells of the matrix: what strikes, in the middle of what, and when; and all that a seed decides about one."""

from __future__ import annotations

import fnmatch
import itertools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from asyncoll.errors import UsageError
from asyncoll.testing.faults.calls import OPERATIONS
from asyncoll.testing.faults.injectors import (
    MOMENTS,
    Disconnect,
    Exit,
    Fault,
    HoldGil,
    Kill,
    Moment,
    Orphan,
    Raise,
    Signal,
    Slow,
    Stop,
)

DEATH_S = 0.1  # within which everybody knows
FREEZE_S = 1.0
_ELEMENTS = (8, 20_000, 300_000)  # of a rank's array: short and long, in memory and by message


class TroubleError(Exception):
    """What a rank's program raises in a cell."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What strikes, and what the others must make of it."""

    make: Callable[[], Fault]
    # What every survivor raises, one of these, which names the rank; none: nobody notices anything.
    told: tuple[str, ...] = ()
    within_s: float = 0.0
    lasts_s: float = 0.0
    leaves_a_child: bool = False  # of the victim, for the driver to end


KINDS: dict[str, Kind] = {
    "kill": Kind(Kill, ("PeerLostError",), DEATH_S),
    "orphan": Kind(Orphan, ("PeerLostError",), DEATH_S, leaves_a_child=True),
    "exit": Kind(lambda: Exit(3), ("PeerLostError",), DEATH_S),
    "raise": Kind(lambda: Raise(TroubleError("a fault")), ("AbortedError",), DEATH_S),
    "signal": Kind(
        Signal, ("AbortedError", "PeerLostError"), DEATH_S
    ),  # the latter if it came between two words of RPC
    "disconnect": Kind(Disconnect, ("PeerLostError",), DEATH_S),
    "stop": Kind(Stop, ("PeerLostError",), FREEZE_S),
    "gil": Kind(lambda: HoldGil(5.0), lasts_s=5.0),
    "slow": Kind(lambda: Slow(10.0, 1.0), lasts_s=1.0),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell in one world. The same cell, the same choices."""

    kind: str
    operation: str
    moment: Moment
    transport: str
    size: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.operation}/{self.moment}"

    def __str__(self) -> str:
        return f"--cells {self.name} --transport {self.transport} -n {self.size} --seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What the seed decides."""

    victim: int
    elements: int
    depth: float  # how far into the call "inside" is, in [0, 1)

    @classmethod
    def draw(cls, cell: Cell) -> Plan:
        random = np.random.default_rng([cell.seed, zlib.crc32(cell.name.encode())])
        elements = int(random.choice(_ELEMENTS)) // cell.size * cell.size
        return cls(int(random.integers(cell.size)), max(elements, cell.size), float(random.random()))


def select(pattern: str, sample: int, repeat: int, seed: int, transport: str, size: int) -> list[Cell]:
    """The cells that `pattern` names (several with commas), `sample` of them (0: all), drawn anew `repeat` times."""
    triples = list(itertools.product(KINDS, OPERATIONS, MOMENTS))
    patterns = pattern.split(",")
    chosen = [triple for triple in triples if any(fnmatch.fnmatch("/".join(triple), each) for each in patterns)]
    if not chosen:
        raise UsageError(f"{pattern!r} names no cell: use FAULT/OPERATION/MOMENT, such as 'kill/*/inside'")
    cells: list[Cell] = []
    for turn in range(seed, seed + repeat):
        cells += [Cell(*triple, transport, size, turn) for triple in _sampled(chosen, sample, turn)]
    return cells


def _sampled(triples: Sequence[tuple[str, str, Moment]], sample: int, seed: int) -> Sequence[tuple[str, str, Moment]]:
    if not 0 < sample < len(triples):
        return triples
    chosen = np.random.default_rng(seed).choice(len(triples), sample, replace=False)
    return [triples[index] for index in sorted(chosen)]
