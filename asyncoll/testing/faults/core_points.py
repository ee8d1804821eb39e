"""The injection points of the compiled core: named steps of its primitives, which no method of Python passes.

asyncoll/_core/native.h lists and explains them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncoll import _core
from asyncoll.algorithms.dense.tuning import choose
from asyncoll.testing.faults.injection_points import CountedPoints

_LOCK = ("lock-taken", "lock-noted", "lock-released")
_SLEEPERS = ("doorbell-chosen", "doorbell-rung")
_ARRIVAL = ("meeting-opened", "meeting-arrived", "meeting-claimed")
_END = ("meeting-asleep", "futex-woken", "meeting-received", "meeting-left")
_MEETING = (*_ARRIVAL, "meeting-published", "meeting-not-woken", *_END)
_PIECE = ("piece-copied-in", "piece-reduced", "piece-copied-out", "piece-counted", "piece-awaited")
# Only if all ranks have the core, and they are few: `Sizes.private_max`.
_PEERS = ("peer-read", "peers-reduced", "peer-taken")
_ROUND = ("round-filled", "round-staged", "round-arrived", "round-opened", "round-taken", "round-reduced")
_RESULT = ("round-granted", "round-published", "round-left", "round-copied")
_LONG_ROUND = tuple(point for point in (*_ROUND, *_RESULT) if point != "round-reduced")
_CHUNK = ("round-claimed", "round-helped", "round-counted")

_PRIVATE = 600_000  # elements of an array that is read in private memory

# The operations of the matrix that pass them, with the number of elements of a rank's array.
PASSED: dict[tuple[str, int], tuple[str, ...]] = {
    ("barrier", 8): (*_LOCK, *_MEETING),
    ("allreduce", 8): (*_LOCK, "meeting-copied", *_MEETING, "meeting-reduced"),
    ("allreduce", 12_000): ("meeting-shown", "meeting-counted", "meeting-received"),
    ("registered_allreduce", 12_000): (*_LOCK, *_ARRIVAL, "meeting-shown", "meeting-counted", *_END),
    ("registered_allreduce", 4_400_000): (*_LOCK, *_SLEEPERS, "reduction-done"),
    ("allreduce", _PRIVATE): (*_LOCK, *_ARRIVAL, *_PEERS, "meeting-counted", "meeting-asleep", "meeting-left"),
    ("reduce", 300_000): (*_LOCK, *_SLEEPERS, *_PIECE),
    ("solo", 8): (*_LOCK, *_ROUND, *_RESULT),
    ("majority", 8): (*_ROUND, *_RESULT, *_SLEEPERS),
    ("quorum", 8): (*_LOCK, *_ROUND, *_RESULT, *_SLEEPERS),
    ("eager_step", 8): (*_ROUND, *_RESULT),
    **{(kind, 40_000): (*_CHUNK, *_LONG_ROUND) for kind in ("solo", "majority", "quorum", "eager_step")},
    ("group", 8): (*_ROUND, *_RESULT),
    ("synchronous_solo", 8): (*_ROUND, *_RESULT, *_SLEEPERS),
    ("rpc", 8): (*_LOCK, *_SLEEPERS),
}


def core_points() -> tuple[str, ...]:
    """The names of the injection points of the compiled core; none if this process does without it."""
    points: tuple[str, ...] = _core.native.points if _core.native is not None else ()
    return points


def operations_passing(point: str, size: int, *, mixed: bool) -> dict[str, list[int]]:
    """The operations of the matrix that pass `point`, each with the numbers of elements of a rank's array.

    There are `size` ranks; `mixed`: some of them do without the core.
    """
    sizes = choose(size, {})
    is_private = not mixed and sizes.whole < 4 * _PRIVATE <= sizes.private_max
    calls = {call: points for call, points in PASSED.items() if is_private or "peer-read" not in points}
    passing: dict[str, list[int]] = {}
    for (operation, elements), points in calls.items():
        if point in points:
            passing.setdefault(operation, []).append(elements)
    return passing


class CorePoint(CountedPoints):
    """Counts how often this process passes the point of this name.

    All ranks of a process are counted. Blocks in blocks watch alone: the outer one goes on when the inner one ends.
    """

    def __init__(self, name: str, passed: Callable[[int], None] = lambda number: None) -> None:
        super().__init__(passed)
        self._name = name

    def _watch(self) -> None:
        self._undo.callback(_native().watch, _native().watch(self._hear))

    def _hear(self, name: str) -> None:
        if name == self._name:
            self._pass()


def _native() -> Any:
    assert _core.native is not None, "the compiled core has injection points only where it is"
    return _core.native
