"""Schedules: directed acyclic graphs of operations, each of which fires at most once. Nothing here waits or sends.

After Li, Ben-Nun, Di Girolamo, Alistarh, Hoefler, "Taming unbalanced training workloads in deep learning with partial
collective operations", PPoPP 2020, section 4.1. An operation fires after all of its predecessors, or after any one of
them, and at most once in an execution of its schedule: the paper calls it *consumable*. That is how several initiators
start one collective once. A schedule serves one execution; a persistent operation makes a new one for each round. The
caller fires the operations that have happened and executes those that `fire` returns.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Op = TypeVar("Op", bound=Hashable)


class Schedule(Generic[Op]):
    """A schedule for one execution. Operations are hashable values of the caller's choice."""

    __slots__ = ("_missing", "_successors", "fired")

    def __init__(self) -> None:
        self._missing: dict[Op, int] = {}  # predecessors that must still fire before the operation does
        self._successors: dict[Op, list[Op]] = {}
        self.fired: set[Op] = set()

    def add(self, op: Op, *, after: Iterable[Op] = (), after_any: Iterable[Op] = ()) -> Op:
        """Add `op` and return it. It fires once all of `after` have fired, or once any one of `after_any` has.

        Without predecessors only the caller fires it. Predecessors must have been added before, so there are no cycles.
        Raises ValueError for an operation that is there already, for both kinds of predecessors, and for unknown ones.
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
        """The same operations for another execution, none of them fired. This schedule must not have fired any.

        The successors are shared with this schedule: add nothing to either of them afterwards.
        """
        assert not self.fired, "this schedule has been used"
        copy: Schedule[Op] = Schedule()
        copy._missing = self._missing.copy()
        copy._successors = self._successors
        return copy

    def __contains__(self, op: Op) -> bool:
        return op in self._missing

    def fire(self, op: Op) -> list[Op]:
        """Fire `op` and all operations that become ready by it; returns them in the order in which they fired.

        Does nothing and returns an empty list if `op` has fired before.
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
