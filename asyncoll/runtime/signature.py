"""What a call is, in words that every rank of its communicator can compare and show."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from asyncoll.arguments import digest


class Site(NamedTuple):
    """A place in the user's code."""

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path.rpartition('/')[2]}:{self.line}"


class Signature(NamedTuple):
    """A call that the other ranks of the communicator must make, too."""

    operation: str
    number: int
    dtype: str
    elements: int  # -1: any
    detail: str
    site: Site

    def fingerprint(self) -> int:
        """Equal at two ranks that have made the same call."""
        return _fingerprint(self.operation, self.dtype, self.elements, self.detail)

    @property
    def key(self) -> str:
        return f"{self.operation} #{self.number} {self.detail}"

    def __str__(self) -> str:
        what = "" if self.elements < 0 else f" of {self.elements}"
        more = f", {self.detail}" if self.detail else ""
        return f"{self.operation} #{self.number}{what} {self.dtype}{more} at {self.site}".replace("  ", " ")


@lru_cache(maxsize=1024)
def _fingerprint(operation: str, dtype: str, count: int, detail: str) -> int:
    return digest(operation, dtype, count, detail)
