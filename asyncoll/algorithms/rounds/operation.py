"""The description of a persistent operation, the same at all ranks: opening, reduction, groups, history."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache, cached_property
from typing import Any, ClassVar, NamedTuple

from asyncoll.algorithms.rounds.grouping import partition
from asyncoll.algorithms.rounds.round_cells import is_synchronous
from asyncoll.arguments import digest
from asyncoll.errors import UsageError
from asyncoll.runtime.signature import Site
from asyncoll.tensors import reductions
from asyncoll.tensors.metrics import METRICS
from asyncoll.tensors.reductions import HOST_BYTES, ReduceOp, storage

_MAX_NAME = 200
_ROUNDS_MAX = 1 << 31

Layout = tuple[tuple[str, int], ...]  # (dtype, number of elements) of each array that a contribution consists of


class Opening(enum.Enum):
    """The rank that may open a round.

    SOLO and MAJORITY are from Li, Ben-Nun, Di Girolamo, Alistarh, Hoefler, "Taming unbalanced training workloads in
    deep learning with partial collective operations", PPoPP 2020, sections 4.1 and 4.2.
    """

    SOLO = "solo"  # the first rank that arrives
    MAJORITY = "majority"  # any of the ranks that the shared seed draws for the round
    QUORUM = "quorum"  # the Q-th rank that arrives, as counted by the drawn rank
    POLICY = "policy"  # any of which a function of the program says so


class Rule(NamedTuple):
    """When a round may begin that does not wait for all ranks. All that the compiled core knows of a kind of rounds."""

    ranks: int = 1  # so many have arrived, or are gone
    drawn: bool = False  # and one that is drawn for the round is among them; late calls of these count


@dataclass(frozen=True)  # without slots: `cached_property` needs a dictionary
class Operation:
    """A persistent operation. All ranks have an equal value: ranks that differ in a field fail with MismatchError."""

    name: str
    layout: Layout
    op: ReduceOp
    opening: Opening
    quorum: int = 1
    candidates: int = 1  # ranks drawn for each round
    seed: int = 0
    policy: str = ""  # the name of that function
    sync_every: int = 0  # every so many rounds wait for all ranks; 0: none does
    sync_offset: int = 0  # rounds that a program counts before the first one
    history: int = 0  # results kept for ranks that are late
    group_size: int = 0  # at most so many ranks reduce together, and a contribution replaces the last; 0: all, they add
    fixed: bool = False  # the same groups in every round
    weighted: bool = False  # each contribution has a weight, by which AVG multiplies, and by whose sum it divides
    buckets: str = ""  # the boundaries between tensors, if a contribution consists of several
    epoch: int = 1  # that of `Group`
    site: ClassVar[None] = None  # a round has no place in the program

    @property
    def verb(self) -> str:
        return f"{'group' if self.group_size else self.opening.value} allreduce"

    @cached_property
    def rule(self) -> Rule:
        match self.opening:
            case Opening.SOLO | Opening.POLICY:
                return Rule()
            case Opening.MAJORITY:
                return Rule(drawn=True)
            case Opening.QUORUM:
                return Rule(self.quorum)

    @cached_property
    def first_caller_opens(self) -> bool:
        """Whether each round may begin as soon as one caller waits for it."""
        return self.rule == Rule() and not self.sync_every and not self.policy

    @cached_property
    def nbytes(self) -> int:
        """The size of a contribution."""
        return sum(count * storage(dtype).itemsize for dtype, count in self.layout)

    @cached_property
    def divides(self) -> bool:
        """Whether the sum of a round is divided by a number."""
        return self.weighted or self.op in (ReduceOp.AVG, ReduceOp.AVG_ACTIVE)

    @classmethod
    @cache
    def defaults(cls) -> dict[str, Any]:
        """The fields that have defaults, by name: the options of operations."""
        return {rule.name: rule.default for rule in fields(cls) if rule.default is not MISSING}

    @cached_property
    def options(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        return {name: value for name, default in self.defaults().items() if (value := getattr(self, name)) != default}

    def fingerprint(self) -> int:
        """A hash of all fields, which ranks compare instead of the operation."""
        return digest(str(self))

    def is_synchronous(self, number: int) -> bool:
        """Whether round `number` waits for every rank."""
        return is_synchronous(number, self.sync_every, self.sync_offset)

    def drawn(self, number: int, size: int) -> tuple[int, ...]:
        """The distinct ranks that all ranks draw for round `number` (Floyd's sampling).

        The draw is a hash of (seed, round), so it needs neither state nor messages. Section 4.2 of the paper draws one
        rank for each round in the same way.
        """
        return tuple(self._draws(number, size))

    def first_drawn(self, number: int, size: int) -> int:
        """The first rank of `drawn`, without the work for the others: each signal of a round asks for it."""
        return next(self._draws(number, size))

    def _draws(self, number: int, size: int) -> Iterator[int]:
        chosen: set[int] = set()
        for last in range(size - self.candidates, size):
            rank = digest("initiator", self.seed, number, last) % (last + 1)
            chosen.add(rank := last if rank in chosen else rank)
            yield rank

    def members(self, number: int, size: int, rank: int) -> tuple[int, ...]:
        """The ranks that reduce together with `rank`, which is one of them, in round `number`."""
        return next(group for group in self.groups(number, size) if rank in group)

    def groups(self, number: int, size: int) -> Sequence[tuple[int, ...]]:
        """The groups of round `number`, each in order of ranks: one of all ranks unless the round is in groups."""
        if not self.group_size or self.is_synchronous(number):
            return [tuple(range(size))]
        return partition(size, self.group_size, 1 if self.fixed else number)

    @cached_property
    def _text(self) -> str:
        arrays = " + ".join(f"{count} {dtype}" for dtype, count in self.layout)
        more = "".join(f", {name}={value}" for name, value in self.options.items())
        return f"{self.verb} {self.name!r} of {arrays}, {self.op.name}{more}"

    def __str__(self) -> str:
        return self._text


class RoundCall(NamedTuple):
    """One call of a wait-avoiding operation, or the one by which a rank joins it."""

    operation: Operation
    site: Site
    joins: bool = False

    @property
    def verb(self) -> str:
        return "join" if self.joins else self.operation.verb

    @property
    def name(self) -> str:
        return self.operation.name

    @property
    def epoch(self) -> int:
        return self.operation.epoch

    @property
    def key(self) -> str:
        """What the report of an overdue call identifies it by: the name in quotes. To join is another call."""
        return f"{'join ' if self.joins else ''}{self.operation.name!r}"

    def __str__(self) -> str:
        return f"{'join' if self.joins else 'a round'} of {self.operation} at {self.site}"


def check_operation(spec: Operation, size: int) -> None:
    """Raise UsageError unless `size` ranks can carry out `spec`."""
    if not isinstance(spec.name, str) or len(spec.name) > _MAX_NAME:
        raise UsageError(f"name must be a string of at most {_MAX_NAME} characters, got {str(spec.name)[:50]!r}")
    for dtype, count in spec.layout:
        reductions.check_reduction(spec.op, dtype, in_rounds=True)
        if dtype not in (*reductions.DTYPES, METRICS) or count < 0:
            raise UsageError(f"{count} elements of {dtype}")
    if not isinstance(spec.buckets, str) or len(spec.buckets) > _MAX_NAME:
        raise UsageError(f"boundaries of tensors must be a short string, got {str(spec.buckets)[:50]!r}")
    if spec.weighted and spec.op is not ReduceOp.AVG:
        raise UsageError(f"a weight is for averages: with {spec.op.name} leave it out, or use AVG")
    if spec.nbytes > HOST_BYTES:
        raise UsageError(f"{spec} is of {spec.nbytes} bytes, and this host has {HOST_BYTES}")
    if not all(0 <= rounds < _ROUNDS_MAX for rounds in (spec.sync_every, spec.sync_offset, spec.history)):
        raise UsageError(f"sync_every, sync_offset and history are numbers of rounds, or 0 for none: {spec}")
    if (spec.opening is Opening.POLICY) != bool(spec.policy) or len(spec.policy) > _MAX_NAME:
        raise UsageError(
            f"the name of a policy must be a string of 1 to {_MAX_NAME} characters, got {spec.policy!r:.50}"
        )
    _check_ranks("quorum", spec.quorum, size)
    _check_ranks("candidates", spec.candidates, size)
    if spec.group_size:
        _check_ranks("group_size", spec.group_size, size)


def _check_ranks(option: str, number: int, size: int) -> None:
    if not 1 <= number <= size:
        raise UsageError(f"{option} {number} is not between 1 and the number of ranks, {size}")
