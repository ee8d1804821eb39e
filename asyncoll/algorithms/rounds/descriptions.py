"""The operations that the arguments of calls describe.

Programs repeat the same few calls, so the arguments of these are checked once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncoll.algorithms.rounds.operation import Opening, Operation, check_operation
from asyncoll.algorithms.rounds.policies import policy_of
from asyncoll.arguments import text, whole
from asyncoll.runtime.group import Group
from asyncoll.tensors import reductions
from asyncoll.tensors.operands import Bundle, Single

_DESCRIPTIONS_MAX = 1024


class Descriptions:
    """Those of one communicator."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.known: dict[tuple[object, ...], Operation] = {}  # by the arguments of calls

    def add(
        self,
        given: tuple[object, ...],
        name: str,
        weighted: bool,
        contribution: Bundle | Single,
        arguments: Sequence[Any],
        rules: tuple[str, ...],
    ) -> Operation:
        """The operation that these arguments describe, of which `given` has all. Raises UsageError for no such one.

        `arguments` are the reduction, the `Opening` or a policy, whether groups are fixed, and the values of `rules`.
        The operation is remembered for arguments of exact built-in types: others may equal them, and yet mean something
        else.
        """
        op, opening, fixed, *values = arguments
        reductions.check_reduction(op, contribution.layout[0][0], in_rounds=True)
        exact = {rule: whole(value, rule) for rule, value in zip(rules, values, strict=True)}
        layout, buckets = contribution.layout, contribution.boundaries
        options: dict[str, Any] = {**exact, "fixed": fixed, "weighted": weighted, "buckets": buckets}
        if not isinstance(opening, Opening):
            opening, options["policy"] = Opening.POLICY, opening
            policy_of(options["policy"])
        operation = Operation(text(name, "name"), layout, op, opening, epoch=self._group.epoch, **options)
        check_operation(operation, self._group.size)
        if {*map(type, values)} <= {int} and type(name) is str:
            # A program that uses ever new arguments must not fill the memory. It pays with the checks only.
            if len(self.known) == _DESCRIPTIONS_MAX:
                self.known.clear()
            self.known[given] = operation
        return operation
