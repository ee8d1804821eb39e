"""Nodes that send messages, as a model for the explorer: every order of messages, and every crash.

Each ordered pair of nodes has a channel that keeps the order of its messages, as the sockets of two ranks do. A node
acts in steps; a step of the program is a pure function. A crash comes between two steps. Of what the node has sent, the
end of each channel may be lost, independently of the others. So a crash in the middle of a step is one of these, too.

Nodes are not interchangeable where the program has rules by rank, so states that differ by a permutation of nodes are
different ones. What a crashed node knew, and what is on the way to it, is no part of a state.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple, Protocol, TypeAlias

Outcome: TypeAlias = tuple[Hashable, Iterable[tuple[int, Hashable]]]  # the state after a step; each (dest, message)
Nodes: TypeAlias = Sequence[Any]  # the state of each node; None after its crash
Packed: TypeAlias = tuple[int, ...]


class NodeProgram(Protocol):
    """What the nodes do. Pure functions: the same arguments give the same answer. States, messages and events hash."""

    @property
    def mortal(self) -> Sequence[int]:
        """The nodes that may crash."""
        ...

    def begin(self) -> Nodes:
        """The first state of each node."""
        ...

    def receive(self, node: int, state: Any, source: int, message: Any) -> Outcome:
        """`node` receives a message. May raise BrokenError(what, rule), as `happen` may."""
        ...

    def events(self, node: int, nodes: Nodes) -> Iterable[tuple[Hashable, bool]]:
        """What else may happen at `node`, which lives: each event, and whether it is a fault."""
        ...

    def happen(self, node: int, state: Any, event: Any) -> Outcome:
        """An event of `events` happens at `node`."""
        ...

    def broken(self, nodes: Nodes) -> str:
        """The rule that the states of all nodes break, in words; empty if they break none."""
        ...

    def is_settled(self, nodes: Nodes) -> bool:
        """Whether no node waits for anything."""
        ...

    def words(self, node: int, event: Any, source: int | None = None) -> str:
        """An event at `node`, or a message that it gets from `source`, in plain words."""
        ...


class NodeCrash(NamedTuple):
    node: int
    kept: tuple[tuple[int, int], ...]  # dest, and the number of messages on the way to it that still arrive


class MessageArrives(NamedTuple):
    node: int
    source: int
    message: int


class Happening(NamedTuple):
    node: int
    event: int


class _Interned:
    """Values with a number each: the number of an equal value is the same."""

    def __init__(self, *values: Hashable) -> None:
        self.values: list[Any] = list(values)
        self._numbers: dict[Any, int] = {value: number for number, value in enumerate(values)}

    def number(self, value: Hashable) -> int:
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


class NodeNetwork:
    """A `Model` of the nodes of a program, with at most so many crashes, and faults of `NodeProgram.events`.

    A state is a tuple of numbers, of the state of each node, of the messages in each channel, and the faults that are
    left. Since the program is pure, each of its answers is asked for once.
    """

    def __init__(self, program: NodeProgram, crashes: int, faults: int = 0) -> None:
        self._program = program
        self._first = program.begin()
        self._size = len(self._first)
        self._left = (crashes, faults)
        self._states = _Interned(None)  # number 0: crashed
        self._messages, self._events = _Interned(), _Interned()
        self._channels = _Interned(())  # number 0: empty
        self._received: dict[tuple[int, ...], tuple[int, tuple[tuple[int, int], ...]]] = {}
        self._happened: dict[tuple[int, ...], tuple[int, tuple[tuple[int, int], ...]]] = {}
        self._enabled: dict[Packed, list[list[tuple[int, bool]]]] = {}
        self._broken: dict[Packed, str] = {}
        self._settled: dict[Packed, bool] = {}

    # -- as a model --

    def begin(self) -> Packed:
        states = (self._states.number(state) for state in self._first)
        return (*states, *[0] * self._size**2, *self._left)

    def moves(self, state: Packed) -> Iterator[tuple[Any, bool, Packed]]:
        size, nodes = self._size, state[: self._size]
        enabled = self._enabled.get(nodes)
        if enabled is None:
            enabled = self._enabled[nodes] = [[*self._events_of(node, nodes)] for node in range(size)]
        for node, number in enumerate(nodes):
            if not number:
                continue
            for source in range(size):
                channel = state[size + source * size + node]
                if channel:
                    yield self._receipt(state, node, source, self._channels.values[channel])
            for event, is_fault in enabled[node]:
                if is_fault and not state[-1]:
                    continue
                outcome = self._happened.get((node, number, event)) or self._happen(node, number, event)
                after = self._after(state, node, *outcome)
                yield Happening(node, event), is_fault, (*after[:-1], after[-1] - 1) if is_fault else after
        if state[-2]:
            for node in self._program.mortal:
                if nodes[node]:
                    yield from self._crashes(state, node)

    def words(self, what: Any) -> str:
        match what:
            case NodeCrash(node, kept):
                late = ", ".join(f"{count} to {dest}" for dest, count in kept) or "none"
                return f"{node} crashes; of its messages on the way arrive: {late}"
            case MessageArrives(node, source, message):
                return self._program.words(node, self._messages.values[message], source)
            case _:
                return self._program.words(what.node, self._events.values[what.event])

    def broken(self, state: Packed) -> str:
        nodes = state[: self._size]
        if nodes not in self._broken:
            self._broken[nodes] = self._program.broken(self.nodes(nodes))
        return self._broken[nodes]

    def is_settled(self, state: Packed) -> bool:
        nodes = state[: self._size]
        if nodes not in self._settled:
            self._settled[nodes] = self._program.is_settled(self.nodes(nodes))
        return self._settled[nodes]

    def nodes(self, state: Packed) -> tuple[Any, ...]:
        """The state of each node in `state`."""
        return tuple(self._states.values[number] for number in state[: self._size])

    # -- moves --

    def _events_of(self, node: int, nodes: Packed) -> Iterator[tuple[int, bool]]:
        if nodes[node]:
            for event, is_fault in self._program.events(node, self.nodes(nodes)):
                yield self._events.number(event), is_fault

    def _receipt(self, state: Packed, node: int, source: int, channel: tuple[int, ...]) -> tuple[Any, bool, Packed]:
        message, at = channel[0], self._size + source * self._size + node
        rest = (*state[:at], self._channels.number(channel[1:]), *state[at + 1 :])
        key = (node, state[node], source, message)
        if key not in self._received:
            args = node, self._states.values[state[node]], source, self._messages.values[message]
            self._received[key] = self._numbered(self._program.receive(*args))
        return MessageArrives(node, source, message), False, self._after(rest, node, *self._received[key])

    def _happen(self, node: int, number: int, event: int) -> tuple[int, tuple[tuple[int, int], ...]]:
        outcome = self._program.happen(node, self._states.values[number], self._events.values[event])
        return self._happened.setdefault((node, number, event), self._numbered(outcome))

    def _numbered(self, outcome: Outcome) -> tuple[int, tuple[tuple[int, int], ...]]:
        state, sent = outcome
        return self._states.number(state), tuple((dest, self._messages.number(message)) for dest, message in sent)

    def _after(self, state: Packed, node: int, number: int, sent: tuple[tuple[int, int], ...]) -> Packed:
        """The state in which `node` has made a step to the state of that number, and has sent these messages."""
        if not sent:
            return (*state[:node], number, *state[node + 1 :])
        cells = [*state]
        cells[node] = number
        for dest, message in sent:
            if cells[dest]:  # it lives
                at = self._size + node * self._size + dest
                cells[at] = self._channels.number((*self._channels.values[cells[at]], message))
        return tuple(cells)

    def _crashes(self, state: Packed, node: int) -> Iterator[tuple[Any, bool, Packed]]:
        size = self._size
        cells = [*state]
        cells[node], cells[-2] = 0, cells[-2] - 1
        for source in range(size):
            cells[size + source * size + node] = 0
        first = size + node * size
        busy = [dest for dest in range(size) if cells[first + dest]]
        sent = [self._channels.values[cells[first + dest]] for dest in busy]
        for kept in product(*(range(len(messages) + 1) for messages in sent)):
            for dest, messages, count in zip(busy, sent, kept, strict=True):
                cells[first + dest] = self._channels.number(messages[:count])
            what = NodeCrash(node, tuple((dest, count) for dest, count in zip(busy, kept, strict=True) if count))
            yield what, True, tuple(cells)
