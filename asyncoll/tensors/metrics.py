"""Numbers with names that ride along with a contribution, and are averaged over those of a round.

A `Metrics` is part of a contribution like a tensor, of one element: a table of names, sums and counts. To add two
tables unites their names. So metrics follow the contribution they belong to, wherever it is staged, added up, taken or
kept, on every carrier of rounds; and ranks need not have the same names.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncoll.arguments import text
from asyncoll.errors import UsageError, describe

if TYPE_CHECKING:
    from torch import Tensor

Table = np.ndarray[Any, np.dtype[Any]]  # of one element, which has ENTRIES

METRICS = "metrics"  # the name of the dtype of tables
KEYS_MAX = 64
NAME_BYTES = 112
_ENTRY = np.dtype([("name", f"S{NAME_BYTES}"), ("sum", "f8"), ("count", "f8")])  # an unused one is all zeros
TABLE = np.dtype(f"V{KEYS_MAX * _ENTRY.itemsize}")
_TOO_MANY = -1.0  # the count of the first entry of a table with more keys than it has room for

Sums = dict[bytes, tuple[float, float]]  # sum and count of each name


class Metrics:
    """Numbers of this rank's step, to be averaged over the contributions of a round: an entry of the list `x`.

    `values` are Python or numpy numbers, or tensors without dimensions, which are read now and kept as float64. Ranks,
    and calls, may have different keys. A late contribution adds up as gradients do: each of its calls counts one.
    The reduction and weights of the call do not apply.

    A contribution is 8 KiB longer with it, whatever keys it has, and the compiled core leaves the bookkeeping of its
    rounds to Python: a short round in memory takes 50 to 200 us longer.

    Raises UsageError if `values` is no mapping, for more than 64 keys, for a key that is no string of 1 to 112 bytes of
    UTF-8, and for a value that is no real number, or cannot be read, such as that of a tensor on the device "meta".

    Example:

        gradients, metrics = np.ones(1000), asyncoll.Metrics({"loss": 0.5 * comm.rank})
        reduction = await comm.solo_allreduce([gradients, metrics], op=asyncoll.AVG)
        print(f"round {reduction.round}: {metrics.means()}")
    """

    __slots__ = ("_table",)

    def __init__(self, values: Mapping[str, object] | None = None) -> None:
        values = {} if values is None else values
        if not isinstance(values, Mapping):
            kind = type(values).__name__
            raise UsageError(f'metrics are a dict of numbers by name, such as {{"loss": loss}}, and not a {kind}')
        if len(values) > KEYS_MAX:
            raise UsageError(f"{len(values)} metrics, which is more than {KEYS_MAX}: give fewer")
        self._table = _table({_name(key): (_number(key, value), 1.0) for key, value in values.items()})

    def copy(self) -> Metrics:
        """The same in memory of its own."""
        return self.unpacked(self.packed())

    def packed(self) -> Table:
        """The same as an array of bytes, of one length, for a collective."""
        return self._table.view(np.uint8).copy()

    @classmethod
    def unpacked(cls, array: Table) -> Metrics:
        """The metrics that were `packed` in `array`."""
        made = cls()
        made._table = array.copy().view(TABLE)
        return made

    def add(self, other: Metrics) -> None:
        """Count the values of `other`, too, each as one."""
        merge(self._table, other._table)

    def means(self) -> dict[str, float]:
        """After a call: the mean of each key over the contributions of the round that hold it.

        Raises UsageError if they hold more than 64 different keys.
        """
        sums = _sums(self._table)
        if sums is None:
            raise UsageError(f"the contributions of one round have more than {KEYS_MAX} different metrics: use fewer")
        return {name.decode(errors="replace"): total / count for name, (total, count) in sorted(sums.items())}

    def __repr__(self) -> str:
        return f"Metrics({self.means()})"


class MetricsOperand:
    """A `Metrics` as a call sees it: the counterpart of `Operand`."""

    dtype = METRICS
    shape = (1,)
    staged = None

    def __init__(self, source: Metrics) -> None:
        self.source = source
        self.flat = source._table

    def write_back(self) -> None:
        """The result is in the table already."""

    def room(self, count: int) -> Table:
        """A table, with undefined content."""
        return np.empty(count, TABLE)

    def like(self, flat: Table, shape: Sequence[int]) -> Metrics:
        """The metrics in the table `flat`."""
        return Metrics.unpacked(flat.view(np.uint8))


def merge(into: Table, other: Table) -> None:
    """Add the table `other` to the table `into`."""
    mine, theirs = _sums(into), _sums(other)
    into[...] = _table(None if mine is None or theirs is None else _united(mine, theirs))


def _united(one: Sums, other: Sums) -> Sums:
    united = dict(one)
    for name, (total, count) in other.items():
        before, times = united.get(name, (0.0, 0.0))
        united[name] = before + total, times + count
    return united


def _sums(table: Table) -> Sums | None:
    """The content of a table; None if it has too many keys. The bytes of a peer may be any."""
    entries = table.view(_ENTRY)
    if entries["count"][0] == _TOO_MANY:
        return None
    used = entries[entries["count"] > 0]
    return {name: (total, count) for name, total, count in used.tolist()}


def _table(sums: Sums | None) -> Table:
    table = np.zeros(1, TABLE)
    entries = table.view(_ENTRY)
    if sums is None or len(sums) > KEYS_MAX:
        entries["count"][0] = _TOO_MANY
    else:
        # In one order, whichever table came first.
        for index, name in enumerate(sorted(sums)):
            entries[index] = (name, *sums[name])
    return table


def _name(key: object) -> bytes:
    name = text(key, "the key of a metric").encode()
    if not 1 <= len(name) <= NAME_BYTES or b"\0" in name:
        raise UsageError(f"the key of a metric is a string of 1 to {NAME_BYTES} bytes, without zeros, not {key!r:.130}")
    return name


def _number(key: str, value: object) -> float:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _number_of(key, value)
    if isinstance(value, np.ndarray) and not value.ndim and value.dtype.kind in "biuf":
        return float(value)
    if not isinstance(value, (numbers.Real, np.bool_)):
        raise UsageError(f"the metric {key!r} is a {type(value).__name__}: give a real number, or a tensor of one")
    try:
        return float(value)
    except OverflowError:
        raise UsageError(f"the metric {key!r} is too large for a float64: {value!r:.50}") from None


def _number_of(key: str, x: Tensor) -> float:
    try:
        if not x.dim() and not x.is_complex():
            return float(x.detach())
        shape = list(x.shape)
    except (RuntimeError, ValueError) as error:  # on the device "meta", fake, nested, without memory yet
        reason = describe(error)
        raise UsageError(f"the metric {key!r} is a tensor that cannot be read: give a number ({reason:.300})") from None
    raise UsageError(f"the metric {key!r} is a tensor of shape {shape}: give one real number of it")
