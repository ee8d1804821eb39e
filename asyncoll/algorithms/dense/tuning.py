"""The one table that chooses between forms in memory, by the number of ranks and the size of an array.

`asyncoll bench tune` measures it on a host. ASYNCOLL_SIZES, the same at all ranks, overrides single values:
`ASYNCOLL_SIZES=short=65536,window=2097152`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from asyncoll.errors import UsageError

VARIABLE = "ASYNCOLL_SIZES"
_ALIGNED = 64  # bytes: no element of any dtype lies across such a boundary


class Sizes(NamedTuple):
    """Bytes, and how many calls."""

    short: int  # arrays that the last rank to come reduces for all
    chunk: int  # what one rank reduces at a time of a longer one
    window: int  # what a rank shows at a time of an array that is not registered
    long: int = 1 << 22  # calls with more than this are the runtime's: they would block the caller's loop for too long
    calls: int = 4  # under way at once in a communicator; more wait for their turn


# From so many ranks on. Measured on 2 cores; see BENCHMARKS.md.
TABLE = {
    2: Sizes(short=1 << 18, chunk=1 << 18, window=1 << 21),
    5: Sizes(short=1 << 16, chunk=1 << 18, window=1 << 21),
}


def choose(ranks: int, environ: Mapping[str, str]) -> Sizes:
    """Raises UsageError for an override that makes no sense."""
    sizes = TABLE[max(least for least in TABLE if least <= ranks)]
    for entry in filter(None, environ.get(VARIABLE, "").split(",")):
        name, _, value = entry.partition("=")
        if name not in Sizes._fields or not value.isdecimal() or int(value) < 1:
            names = ", ".join(Sizes._fields)
            raise UsageError(f"{VARIABLE}: {entry!r} is not NAME=NUMBER; the names are {names}")
        if name != "calls" and int(value) % _ALIGNED:
            raise UsageError(f"{VARIABLE}: {entry!r} is not a multiple of {_ALIGNED} bytes")
        sizes = sizes._replace(**{name: int(value)})
    return sizes
