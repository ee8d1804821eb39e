"""Conversion of arguments that all ranks must agree on into values of exact built-in types.

A numpy string, a member of a StrEnum or a numpy integer equals its built-in value, but has another type and another
`repr`. Each public call converts such arguments once, before they are hashed, compared, cached or sent.
"""

from __future__ import annotations

import hashlib
import math
import operator

import numpy as np

from asyncoll.errors import UsageError

_DIGESTED = frozenset((int, str))
_BOOLS = (bool, np.bool_)
_REALS = (int, float, np.integer, np.floating)


def text(value: object, what: str) -> str:
    """`value` as an exact `str`. Raises UsageError if it is no string, or cannot be encoded in UTF-8."""
    if not isinstance(value, str):
        raise UsageError(f"{what} must be a string, got {value!r:.50}")
    exact = str.__str__(value)  # not str(value): a subclass may print as something else
    try:
        exact.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} must be Unicode text, but {exact[:50]!r} has lone surrogates: use another") from None
    return exact


def whole(value: object, what: str) -> int:
    """`value` as an exact `int`. Raises UsageError if it is no integer, a bool, or does not fit into 64 bits.

    A bool is refused, as by numpy and torch where they expect an integer: most often it is a misplaced argument.
    """
    try:
        if isinstance(value, _BOOLS):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{what} must be a whole number, got {value!r:.50}") from None
    if not -(1 << 63) <= number < 1 << 63:
        raise UsageError(f"{what} {number} does not fit into 64 bits")
    return number


def flag(value: object, what: str) -> bool:
    """`value` as an exact `bool`. Raises UsageError for anything else, also for what Python takes for true or false."""
    if not isinstance(value, _BOOLS):
        raise UsageError(f"{what} must be True or False, got {value!r:.50}")
    return bool(value)


def real(value: object, what: str) -> float:
    """`value` as an exact `float`. Raises UsageError if it is no real number, or a bool."""
    if isinstance(value, _BOOLS) or not isinstance(value, _REALS):
        raise UsageError(f"{what} must be a number, got {value!r:.50}")
    try:
        return float(value)
    except OverflowError:
        raise UsageError(f"{what} must be a number that a float can hold, got {value!r:.50}") from None


def number_of_samples(value: object, what: str) -> float:
    """`value` as the weight of a contribution. Raises UsageError unless it is a finite number of at least 0."""
    number = real(value, what)
    if not 0 <= number < math.inf:
        raise UsageError(f"{what} {number} is no number of samples: give a finite number that is not negative")
    return number


def digest(*parts: int | str) -> int:
    """A 64-bit hash of `parts` that is the same at every rank. Contexts and fingerprints are made of it.

    Raises TypeError for a part that is not exactly an int or a str: a subclass may equal one and yet differ in `repr`.
    """
    if not _DIGESTED.issuperset(map(type, parts)):
        raise TypeError(f"a digest is made of exact ints and strs, got {[type(part).__name__ for part in parts]}")
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")
