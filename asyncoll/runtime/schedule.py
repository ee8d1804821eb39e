"""A DAG of consumable operations: what became ready after this one fired?

Seed 000, section 4.1: an operation fires at most once in an execution of its schedule (it is *consumed*), after all of
its predecessors or after any one of them. A schedule is a value for one execution; a persistent operation makes a new
one for its next round. Nothing here waits or sends: callers fire what happened and carry out what comes back.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Op = TypeVar("Op", bound=Hashable)


class Schedule(Generic[Op]):
    """Operations are whatever hashable names the caller likes."""

    __slots__ = ("_missing", "_successors", "fired")

    def __init__(self) -> None:
        self._missing: dict[Op, int] = {}  # predecessors still needed before the operation is ready
        self._successors: dict[Op, list[Op]] = {}
        self.fired: set[Op] = set()

    def add(self, op: Op, *, after: Iterable[Op] = (), after_any: Iterable[Op] = ()) -> Op:
        """Add `op`: ready once all of `after` have fired, or one of `after_any`.

        With neither, it waits for the outside to fire it. Predecessors must have been added before.
        """
        every, some = tuple(after), tuple(after_any)
        if op in self._missing:
            raise ValueError(f"{op!r} is already in the schedule")
        if every and some:
            raise ValueError("an operation waits for all of its predecessors or for any one, not both")
        for predecessor in every or some:
            if predecessor not in self._missing:
                raise ValueError(f"{op!r} comes after {predecessor!r}, which is not in the schedule")
            self._successors[predecessor].append(op)
        self._missing[op] = len(every) if every else 1
        self._successors[op] = []
        return op

    def fresh(self) -> Schedule[Op]:
        """The same operations for another execution, none of them fired. Only a schedule that never fired has this."""
        assert not self.fired, "this schedule has been used"
        copy: Schedule[Op] = Schedule()
        copy._missing = self._missing.copy()
        copy._successors = self._successors
        return copy

    def __contains__(self, op: Op) -> bool:
        return op in self._missing

    def fire(self, op: Op) -> list[Op]:
        """Fire `op` and all that it makes ready; returns them in the order in which they fired.

        Firing what has been consumed does nothing and returns nothing.
        """
        if op in self.fired:
            return []
        self.fired.add(op)
        order = [op]
        for done in order:
            for successor in self._successors[done]:
                self._missing[successor] -= 1
                if self._missing[successor] <= 0 and successor not in self.fired:
                    self.fired.add(successor)
                    order.append(successor)
        return order
