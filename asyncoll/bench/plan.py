"""The plan of a benchmark, and the parsers of its options: sizes and durations."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any

Row = dict[str, Any]

ITEM_BYTES = 4  # float32
FACTOR = 4  # between the sizes of a range
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}  # binary, as in nccl-tests
MODES = ("full", "majority", "quorum", "solo")  # of the benchmark solo, each a row
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The parameters of one benchmark, the same at every rank."""

    benchmark: str  # a command: allreduce, pingpong or solo
    ranks: int
    sizes: tuple[int, ...]  # bytes
    transport: str = "shm"  # a key of `runs.TRANSPORTS`
    registered: bool = False  # whether allreduce reduces a tensor of `comm.empty`
    device: str = "cpu"  # of the tensor that allreduce reduces: cpu or cuda
    skew_s: float = 0.0  # of solo: rank r arrives r times this late
    iterations: int = 0  # of solo: measured calls

    @property
    def rows(self) -> int:
        """The number of rows that it gives."""
        return len(self.sizes) * (len(MODES) if self.benchmark == "solo" else 1)

    def to_json(self) -> str:
        """The plan as one argument of the program of a rank."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> BenchPlan:
        """The plan that `to_json` has written."""
        fields = json.loads(text)
        return cls(**{**fields, "sizes": tuple(fields["sizes"])})


def parse_sizes(text: str) -> tuple[int, ...]:
    """Bytes of `4,1K,1M` (a list) or `4:100M` (from 4 by factors of 4, ending with 100M). Raises ValueError."""
    if ":" not in text:
        return tuple(_size(part) for part in text.split(","))
    first, _, final = text.partition(":")
    size, last = _size(first), _size(final)
    if size > last:
        raise ValueError(f"{text!r} goes down: give the smaller size first")
    sizes = []
    while size < last:
        sizes.append(size)
        size *= FACTOR
    return (*sizes, last)


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,15})([KMG]?)", text.strip(), re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r} is not a size such as 4, 16K or 1M")
    size = int(match[1]) * UNITS[match[2].upper()]
    if size < ITEM_BYTES or size % ITEM_BYTES:
        raise ValueError(f"{text!r} is not a positive multiple of {ITEM_BYTES} bytes, one float32")
    return size


def parse_duration(text: str) -> float:
    """Seconds of `1ms`, `500us`, `0.1s`. Raises ValueError."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)(us|ms|s)", text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a duration such as 1ms, 500us or 0.1s")
    return float(match[1]) * SECONDS[match[2]]


def repeats(size: int) -> int:
    """The number of counted calls of `size` bytes: enough for a median, in a few seconds at most."""

    if size <= 16 << 10:
        return 300
    if size <= 256 << 10:
        return 60
    return 10 if size <= 16 << 20 else 5
