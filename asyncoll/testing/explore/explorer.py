"""Exploration of all states that a model can reach, with the shortest way to one that breaks a rule.

A model is a state and its moves, as values: what the processes of a protocol know, what is under way between them, and
all that can happen next. The explorer visits states in the order of their distance from the first one (breadth first),
so the trace of a counterexample is as short as any.

- *Safety*: `Model.broken` says of no state that it breaks a rule.
- *Liveness*: from every state, moves that are no faults lead to a state in which nothing waits (`Model.is_settled`). So
  no state is a deadlock, nor a circle that is never left.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from time import process_time
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

S = TypeVar("S", bound=Hashable)


class BrokenError(Exception):
    """Raised by `Model.moves` if what happens next breaks a rule of the model: what, and the rule, in words."""


class CounterexampleError(AssertionError):
    """A model breaks a rule. The message is the rule, and the shortest trace in words."""


class Model(Protocol[S]):
    """What is explored. All methods are pure: the same state gives the same answer."""

    def begin(self) -> S:
        """The first state."""
        ...

    def moves(self, state: S) -> Iterable[tuple[Any, bool, S]]:
        """All that can happen next: what, whether that is a fault, and the state after it. Equal states may repeat."""
        ...

    def words(self, what: Any) -> str:
        """A move in plain words."""
        ...

    def broken(self, state: S) -> str:
        """The rule that `state` breaks, in words; empty if it breaks none."""
        ...

    def is_settled(self, state: S) -> bool:
        """Whether nothing in `state` waits for what is still to happen."""
        ...


@dataclass(frozen=True, slots=True)
class Exploration:
    """What an exploration has visited."""

    states: int  # distinct
    moves: int  # between them, to a different state
    depth: int  # moves to the farthest state
    settled: int  # states in which nothing waits
    seconds: float  # of processor time


class _Visits(Generic[S]):
    """The states that were reached, in order of their distance, and the moves between them."""

    def __init__(self, model: Model[S]) -> None:
        first = model.begin()
        self._model = model
        self._index = {first: 0}
        self.states = [first]
        self.parents = array("i", [-1])
        self.settled = array("b")
        self.starts, self.ends = array("i"), array("i")  # of each move that is no fault
        self.moves = 0

    def visit(self, at: int) -> None:
        """Visit all states that are one move from state `at`."""
        state, model = self.states[at], self._model
        if rule := model.broken(state):
            raise CounterexampleError(self.told(at, rule))
        self.settled.append(model.is_settled(state))
        try:
            for _, is_fault, after in model.moves(state):
                if after == state:
                    continue
                self.moves += 1
                there = self._index.setdefault(after, len(self.states))
                if there == len(self.states):
                    self.states.append(after)
                    self.parents.append(at)
                if not is_fault:
                    self.starts.append(at)
                    self.ends.append(there)
        except BrokenError as error:
            raise CounterexampleError(self.told(at, *map(str, reversed(error.args)))) from None

    def trapped(self) -> int | None:
        """The first state from which no moves but faults lead to a settled one."""
        is_free, starts, ends = np.array(self.settled, bool), np.array(self.starts), np.array(self.ends)
        while (hits := is_free[ends] & ~is_free[starts]).any():
            is_free[starts[hits]] = True
        return None if is_free.all() else int(np.argmin(is_free))

    def told(self, at: int, rule: str, *last: str) -> str:
        """The rule that is broken, and the moves that lead to state `at`, and then to its end."""
        return _told(rule, [*self._way(at), *last])

    def _way(self, at: int) -> list[str]:
        way: list[str] = []
        while (before := self.parents[at]) >= 0:
            moves = self._model.moves(self.states[before])
            way.append(next(self._model.words(what) for what, _, after in moves if after == self.states[at]))
            at = before
        return way[::-1]

    def depth(self) -> int:
        at, moves = len(self.states) - 1, 0
        while (at := self.parents[at]) >= 0:
            moves += 1
        return moves


def wander(model: Model[S], draw: np.random.Generator, faults: float = 0.1, most: int = 100_000) -> list[str]:
    """One way through a model that is too large to explore: moves are drawn, until nothing waits and no fault is left.

    `faults` is the probability of a fault where one may happen. Returns the moves in words. Raises CounterexampleError
    if a rule is broken, or if something still waits after `most` moves.
    """
    state = model.begin()
    way: list[str] = []
    while len(way) < most:
        if rule := model.broken(state):
            raise CounterexampleError(_told(rule, way))
        found: dict[bool, list[tuple[Any, S]]] = {False: [], True: []}
        try:
            for what, is_fault, after in model.moves(state):
                if after != state:
                    found[is_fault].append((what, after))
        except BrokenError as error:
            raise CounterexampleError(_told(error.args[1], [*way, error.args[0]])) from None
        if not found[True] and model.is_settled(state):
            return way
        moves = found[bool(found[True]) and (not found[False] or draw.random() < faults)]
        if not moves:
            break
        what, state = moves[draw.integers(len(moves))]
        way.append(model.words(what))
    raise CounterexampleError(_told(f"something still waits after {len(way)} moves", way))


def _told(rule: str, way: Iterable[str]) -> str:
    return "\n".join([f"broken: {rule}", *(f"  {number}. {each}" for number, each in enumerate(way, 1))])


def explore(model: Model[S], most: int | None = None) -> Exploration:
    """Visit every state that `model` can reach. Raises CounterexampleError if a rule is broken.

    With `most`, raises ValueError if there are more states: part of them shows nothing.
    """
    begun_s = process_time()
    visits = _Visits(model)
    at = 0
    while at < len(visits.states):
        visits.visit(at)
        at += 1
        if most is not None and len(visits.states) > most:
            raise ValueError(f"the model has more than {most} states, at least {len(visits.states)}")
    if (trapped := visits.trapped()) is not None:
        raise CounterexampleError(visits.told(trapped, "from here nothing but a fault can end all waits"))
    return Exploration(len(visits.states), visits.moves, visits.depth(), sum(visits.settled), process_time() - begun_s)
