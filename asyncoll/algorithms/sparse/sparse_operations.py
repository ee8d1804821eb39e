"""The sparse allreduces of one communicator, by name: their options, their state, and their results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from asyncoll.algorithms.seam.collectives import Collectives
from asyncoll.algorithms.sparse.accumulators import Accumulator, accumulator
from asyncoll.algorithms.sparse.baselines import Dense, Gaussiank, GTopk, TopkA, TopkDSA
from asyncoll.algorithms.sparse.oktopk import OkTopk, Rules, is_count, is_state
from asyncoll.algorithms.sparse.own import SparseAlgorithm
from asyncoll.algorithms.sparse.parts import SparseMethod
from asyncoll.algorithms.sparse.selection import Feedback, index_dtype
from asyncoll.errors import UsageError
from asyncoll.tensors import reductions
from asyncoll.tensors.operands import Operand, Resident

ALGORITHMS = ("oktopk", "topka", "topkdsa", "gtopk", "gaussiank", "dense")
_FLOATS = ("float64", "float32", "float16", reductions.BFLOAT16)
_GLOBAL_THRESHOLDS = ("auto", "histogram", "allgather")
_KEPT_TIMES = 8  # the elements that a rank gives: about what a round takes
_KEPT_MAX_BYTES = 30 << 20  # glibc learns from blocks below 32 MiB only


_own: dict[str, Callable[[int, int], SparseAlgorithm]] = {}


def register_sparse_algorithm(name: str, make: Callable[[int, int], SparseAlgorithm]) -> None:
    """Let `sparse_allreduce(x, algorithm=name)`, `OkTopkSGD` and the hook use a sparse allreduce of the program's own.

    Every rank registers the same one under the name: as a module is imported. `make(count, k)` is a subclass of
    `SparseAlgorithm`, or a function that returns an instance. Another one under the same name replaces it for
    operations that have had no call yet.

    Raises UsageError if `name` is empty, no str or that of an algorithm of the library, or `make` is not callable.
    """
    if not isinstance(name, str) or not name or not callable(make):
        raise UsageError(f"register_sparse_algorithm takes a name and a class, got {name!r:.50} and {make!r:.50}")
    if name in ALGORITHMS:
        raise UsageError(f"{name!r} is a sparse algorithm of the library: use another name")
    _own[str(name)] = make


def _made(name: str, count: int, k: int) -> SparseAlgorithm:
    made = _own[name](count, k)
    if not isinstance(made, SparseAlgorithm):
        raise UsageError(
            f"what is registered as {name!r:.50} has to return an instance of SparseAlgorithm when it is called with "
            f"count and k, got {made!r:.80}"
        )
    return made


def sparse_algorithms() -> tuple[str, ...]:
    """The names of all sparse algorithms."""
    return (*ALGORITHMS, *_own)


@dataclass(frozen=True, slots=True)
class SparseReduction:
    """The result of a sparse allreduce, and its cost at this rank.

    Arrays are one-dimensional, and numpy arrays or torch tensors as `x` is. Indices count the elements of `x` in
    row-major order; they are int32, or int64 if `x` has more than 2**31 elements. Values are float32, or float64 if
    `x` is. A word is 4 bytes, as in the paper.
    """

    round: int
    """The round of this `name`. Rounds count from 1."""

    indices: Any
    """The indices of the sum, ascending; the same at every rank."""

    values: Any
    """The values of the sum at `indices`, not divided by the number of ranks; the same bits at every rank."""

    included: Any
    """The indices selected by this rank whose values are in the sum, ascending. `x` is 0 there now."""

    selected: int
    """The number of elements that this rank has selected and given."""

    threshold_local: float
    """The magnitude that an element had to reach to be selected by this rank."""

    threshold_global: float
    """The magnitude that a sum had to reach to be in the result; 0.0 if the algorithm has no such threshold."""

    words_sent: float
    """Words that this rank has sent in this round, including counts and thresholds."""

    words_received: float
    """Words that this rank has received in this round, including counts and thresholds."""

    threshold_words: float
    """Words among `words_received` by which Ok-Topk has found an exact `threshold_global`; 0.0 if it was reused."""

    messages_sent: int
    """Messages that this rank has sent in this round."""

    messages_received: int
    """Messages that this rank has received in this round."""

    lost_indices: Any
    """gTopk: the indices of elements of the sum that lack a part which this rank has dropped. Otherwise empty."""

    lost_values: Any
    """gTopk: the dropped parts, at `lost_indices`. Otherwise empty."""

    dense: Any = None
    """With `dense=True`: the sum as a tensor of the shape of `x`, with 0 where it has no element. Otherwise None."""


class Specification(NamedTuple):
    """The options on which all calls of one name must agree."""

    algorithm: str
    density: float
    dtype: str
    shape: tuple[int, ...]
    rules: Rules

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        """A text with the rules that differ from the defaults."""
        rules = zip(Rules._fields, self.rules, Rules(), strict=True)
        chosen = [f"{name}={value!r}" for name, value, usual in rules if value != usual]
        what = [self.algorithm, f"density {self.density}", f"{self.dtype} of shape {self.shape}"]
        return ", ".join(what + chosen)

    def check(self) -> None:
        """Raise UsageError unless the options are possible."""
        if self.algorithm not in sparse_algorithms():
            raise UsageError(f"unknown algorithm {self.algorithm!r:.50}: use one of {', '.join(sparse_algorithms())}")
        if not 0 < self.density <= 1:
            raise UsageError(f"density {self.density} is not above 0 and at most 1: it is the share that is sent")
        if self.dtype not in _FLOATS:
            raise UsageError(
                f"a sparse allreduce of {self.dtype} is not defined: convert to one of {', '.join(_FLOATS)}"
            )
        if self.rules.thresholds_every < 1 or self.rules.regions_every < 1:
            raise UsageError("thresholds_every and regions_every are numbers of rounds, at least 1")
        if self.rules.global_threshold not in _GLOBAL_THRESHOLDS:
            raise UsageError(f"global_threshold must be one of {', '.join(_GLOBAL_THRESHOLDS)}")
        if self.rules.feedback is not None and not isinstance(self.rules.feedback, Feedback):
            raise UsageError("feedback must be an asyncoll.Feedback, or None")

    @property
    def wanted(self) -> int:
        """k, the number of elements that a rank gives."""
        return max(1, round(self.density * self.elements))

    @property
    def element_bytes(self) -> int:
        """The bytes of an element that is sent: an index and a value."""
        return index_dtype(self.elements).itemsize + (8 if self.dtype == "float64" else 4)

    def method(self) -> SparseMethod:
        """A new method for these options, at its first round."""
        k = self.wanted
        if self.algorithm in _own:
            return _made(self.algorithm, self.elements, k)
        if self.algorithm == "oktopk":
            return OkTopk(self.elements, k, self.rules)
        if self.algorithm == "gaussiank":
            return Gaussiank(self.elements, self.density, self.rules.feedback)
        if self.algorithm == "dense":
            return Dense()
        by_topk: dict[str, Callable[[int, int], SparseMethod]] = {"topka": TopkA, "topkdsa": TopkDSA, "gtopk": GTopk}
        return by_topk[self.algorithm](self.elements, k)


def _keep_memory(nbytes: int) -> None:
    """Let the C library keep about so much freed memory, for the next rounds.

    glibc keeps twice the largest block that was freed. Otherwise each round takes its memory anew from the kernel, and
    a third of its processor time is page faults.
    """
    np.empty(min(nbytes, _KEPT_MAX_BYTES), np.uint8)  # freed at once


class SparseOperation:
    """The rounds of one name; one call at a time."""

    def __init__(self, name: str, specification: Specification) -> None:
        self.specification = specification
        self._name = name
        self._method = specification.method()
        _keep_memory(_KEPT_TIMES * specification.wanted * specification.element_bytes)
        self._round = 0
        self.is_busy = False

    def __str__(self) -> str:
        return f"{self._name!r}: {self.specification}"

    def state(self) -> dict[str, Any]:
        """The state after the last round, as plain values."""
        return {"specification": str(self.specification), "round": self._round, "method": self._method.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on after the round at which `state` was taken. Raises UsageError if that was another operation."""
        if state["specification"] != str(self.specification):
            raise UsageError(
                f"the sparse allreduce {self._name!r} was {state['specification']} when its state was saved, and is "
                f"{self.specification} now: call it with the same options, or do not load its state"
            )
        if state["method"].keys() != self._method.state().keys():
            raise UsageError(f"the state of the sparse allreduce {self._name!r} is damaged: go back to an older one")
        self._round = state["round"]
        self._method.restore(state["method"])

    def begin(self, x: Operand | Resident) -> Accumulator:
        """Begin the next round with the accumulator `x`: select the elements that this rank gives.

        Raises UsageError if the last round is still under way.
        """
        if self.is_busy:
            raise UsageError(
                f"a sparse allreduce named {self._name!r} is under way: await it first, or use another name"
            )
        begun = accumulator(self._method, x)
        self.is_busy = True
        return begun

    async def reduce(self, collectives: Collectives, begun: Accumulator, *, dense: bool) -> SparseReduction:
        """Carry out the round that has begun."""
        try:
            chosen = begun.chosen()
            outcome = await self._method.reduce(collectives, chosen)
        finally:
            self.is_busy = False
        self._round += 1
        told, traffic = begun.become_residual(outcome, dense=dense), collectives.traffic
        return SparseReduction(
            round=self._round,
            selected=chosen.part.size,
            threshold_local=chosen.threshold,
            threshold_global=outcome.threshold,
            words_sent=traffic.words_sent,
            words_received=traffic.words_received,
            threshold_words=outcome.threshold_words,
            messages_sent=traffic.messages_sent,
            messages_received=traffic.messages_received,
            **told._asdict(),
        )


class SparseOperations:
    """The sparse operations of one communicator at one rank."""

    def __init__(self) -> None:
        self._operations: dict[str, SparseOperation] = {}
        self._saved: dict[str, dict[str, Any]] = {}  # states of operations that have not been called yet

    def get(self, name: str, specification: Specification) -> SparseOperation:
        """The operation `name`, made at its first call.

        Raises UsageError if `specification` is impossible, or differs from that of the first call.
        """
        specification.check()
        operation = self._operations.get(name)
        if operation is None:
            operation = SparseOperation(name, specification)
            if name in self._saved:
                operation.restore(self._saved[name])
                del self._saved[name]
            self._operations[name] = operation
        if operation.specification != specification:
            raise UsageError(
                f"the sparse allreduce {name!r} is {operation.specification}, and this call is {specification}: "
                "use another name for it"
            )
        return operation

    def state(self, name: str) -> dict[str, Any] | None:
        """The state of the operation `name`; None if it has had no call. UsageError while one is under way."""
        operation = self._operations.get(name)
        if operation is None:
            return self._saved.get(name)
        if operation.is_busy:
            raise UsageError(f"a sparse allreduce named {name!r} is under way: await it before its state is saved")
        return operation.state()

    def load(self, name: str, state: dict[str, Any]) -> None:
        """Let the first call of `name` go on from `state`. UsageError if there was a call, or `state` is damaged."""
        if name in self._operations:
            raise UsageError(f"the sparse allreduce {name!r} has begun: load its state before its first call")
        if not _is_state(state):
            raise UsageError(f"the state of the sparse allreduce {name!r} is damaged: go back to an older one")
        self._saved[name] = state


def _is_state(state: object) -> bool:
    """Whether `state` has the form of what `SparseOperation.state` returns."""
    match state:
        case {"specification": str(), "round": round_, "method": dict(method)}:
            return is_count(round_) and (not method or is_state(method) or method == {"round": round_})
    return False
