"""The policies of a program: when its rounds may begin, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from asyncoll.errors import UsageError


class RoundView(Protocol):
    """The next round of an operation, as one rank knows it. A rank that has ended its program is gone, not late."""

    @property
    def number(self) -> int:
        """Rounds count from 1."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def drawn(self) -> Sequence[int]:
        """The ranks that are drawn for this round."""

    @property
    def arrived(self) -> int:
        """How many ranks have arrived: a caller has come to wait for this round, even if it was cancelled since."""

    def count(self) -> int:
        """How many ranks have arrived, or are gone."""

    def has(self, rank: int) -> bool:
        """Whether `rank` has arrived, or is gone."""


Policy: TypeAlias = Callable[[RoundView], bool]
_policies: dict[str, Policy] = {}


def register_policy(name: str, policy: Policy) -> None:
    """Let `comm.policy_allreduce(x, policy=name)` begin its rounds by `policy`.

    Every rank registers the same policy under the name before any rank makes a call with it: as a module is imported.
    `policy(round)` gets a `RoundView`, and returns whether the round may begin. It is asked as ranks arrive or end, at
    least one of which waits. It must be a pure function, quick, and never turn false when more ranks arrive: a rank may
    know of fewer than have arrived. By message, the ranks that are drawn for a round know of all. A round in which all
    ranks have arrived, or are gone, begins in any case. Another policy under the same name replaces this one.

    Raises UsageError if `name` is empty or no str, or `policy` is not callable.
    """
    if not isinstance(name, str) or not name or not callable(policy):
        raise UsageError(f"register_policy takes a name and a function of a round, got {name!r:.50} and {policy!r:.50}")
    _policies[str(name)] = policy


def policy_of(name: str) -> Policy:
    """The policy of this name. Raises UsageError if this rank has none."""
    if name not in _policies:
        known = f"those are {', '.join(sorted(_policies))}" if _policies else "there are none"
        raise UsageError(
            f"no policy {name!r:.50} is registered at this rank ({known}): call asyncoll.extending.register_policy "
            "at every rank, before the first call"
        )
    return _policies[name]
