"""The policies of a program: when its rounds may begin, by name."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from inspect import iscoroutine, iscoroutinefunction
from pathlib import Path
from typing import Protocol, TypeAlias

from asyncoll.errors import AsyncollError, UsageError, describe


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
        """Whether `rank` has arrived, or is gone. UsageError unless it is from 0 to below `size`."""


class PolicyError(AsyncollError):
    """A policy has no answer. Like all errors of the package it tells that shared memory is consistent."""


Policy: TypeAlias = Callable[[RoundView], bool]
_policies: dict[str, Policy] = {}


def register_policy(name: str, policy: Policy) -> None:
    """Let `comm.policy_allreduce(x, policy=name)` begin its rounds by `policy`, and so `EagerSGD(partial=name)`.

    Every rank registers the same policy under the name before any rank makes a call with it: as a module is imported.
    `policy(round)` gets a `RoundView`, and returns whether the round may begin. It is asked as ranks arrive or end, at
    least one of which waits. It must be a pure function, quick, and never turn false when more ranks arrive: a rank may
    know of fewer than have arrived. By message, the ranks that are drawn for a round know of all. A round in which all
    ranks have arrived, or are gone, begins in any case. Another policy under the same name replaces this one.

    An exception of the policy, or an awaitable as its answer, ends the communicator with an AbortedError that names the
    policy, the rank and the exception.

    Raises UsageError if `name` is empty or no str, or `policy` is not callable or is a coroutine function.
    """
    if not isinstance(name, str) or not name or not callable(policy):
        raise UsageError(f"register_policy takes a name and a function of a round, got {name!r:.50} and {policy!r:.50}")
    if iscoroutinefunction(policy) or iscoroutinefunction(getattr(policy, "__call__", None)):  # noqa: B004
        raise UsageError(f"the policy {name!r:.50} is a coroutine function: register a plain one, without async")
    _policies[str(name)] = policy


def policies() -> tuple[str, ...]:
    """The names of the policies that are registered at this rank."""
    return (*_policies,)


def policy_of(name: str) -> Policy:
    """The policy of this name. Raises UsageError if this rank has none."""
    if name not in _policies:
        known = f"those are {', '.join(sorted(_policies))}" if _policies else "there are none"
        raise UsageError(
            f"no policy {name!r:.50} is registered at this rank ({known}): call asyncoll.extending.register_policy "
            "at every rank, before the first call"
        )
    return _policies[name]


def allows(name: str, round: RoundView) -> bool:  # noqa: A002 (the papers' word)
    """Whether the policy of this name lets the round begin.

    Raises PolicyError, with which the caller ends the communicator, if the policy raises or returns an awaitable.
    """
    policy = policy_of(name)
    try:
        answer = policy(round)
        if not hasattr(answer, "__await__"):
            return bool(answer)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:2]  # those of the policy, if it is in Python
        place = "".join(f" at {Path(frame.filename).name}:{frame.lineno}" for frame in frames)
        raise PolicyError(f"the policy {name!r:.50} raised {describe(error)}{place}") from error
    if iscoroutine(answer):
        answer.close()  # so that it is not reported as never awaited
    raise PolicyError(f"the policy {name!r:.50} returned an awaitable, {answer!r:.80}: it has to return a bool")


def check_rank(rank: int, size: int) -> None:
    """Raise UsageError unless a policy may ask for `rank`."""
    if not 0 <= rank < size:
        raise UsageError(f"there is no rank {rank!r:.20} in a round of {size} ranks")
