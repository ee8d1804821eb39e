"""The signals of rounds between hosts, and which of them may come to an agent.

The events of a round (`engine`) go to the agents that open it. A signal of an attempt at a round has the number of the
attempt in the upper bits of its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import contains

import numpy as np

from asyncoll.algorithms.rounds import host_record
from asyncoll.algorithms.rounds.attempts import ATTEMPTS_MAX
from asyncoll.algorithms.rounds.engine import ARRIVED, GONE, JOINED, LATE
from asyncoll.errors import ProtocolError
from asyncoll.runtime.hosts import Hosts
from asyncoll.transport.wire import Buffer

AGENTS = 2  # of a host: its first ranks. Each event of a round wakes the agents of one host

OPEN = 252  # from the opener to all agents, and in later attempts to further ranks: the attempt has begun
CLAIM = 250  # from an agent to the opener: it takes part for its host
TEAM = 249  # from the opener to the agents that take part: who they are
RESULT = 248  # the same, instead of TEAM: the result of the round
AGAIN = 246  # from an agent to those that open the round: a rank that acts in this attempt does not answer any more
ASK, HERE = 245, 244  # a question of an agent to a rank that it waits for, and the answer
NEVER = 241  # from the opener to an agent that takes part, in place of TEAM and RESULT: the attempt is given up
WATCH, REMIND = 243, 242  # of an agent to itself: it is time to look for stopped ranks, or to tell further ones
END = 247  # from a rank to the agents of its host: it makes no more calls

EVENTS = (ARRIVED, LATE, GONE, JOINED)
_OF_ATTEMPTS = (OPEN, CLAIM, TEAM, RESULT, NEVER, AGAIN)
_KIND_BITS = 8

# The agents of a host tell which of its ranks make no more calls: their signals GONE and JOINED carry these ranks.
END_EVENTS = {host_record.GONE: GONE, host_record.JOINED: JOINED}
_LISTS = (GONE, JOINED, TEAM)  # the signals that carry ranks
_RANKS = np.dtype("<i4")


def step_of(kind: int, attempt: int) -> int:
    """The step of a signal of an attempt."""
    return kind | attempt << _KIND_BITS


def kind_of(step: int) -> tuple[int, int]:
    """The kind of a signal, and its attempt; 0 if it is of none."""
    return step & (1 << _KIND_BITS) - 1, step >> _KIND_BITS


def as_list(ranks: Sequence[int]) -> bytes:
    """Ranks as a payload."""
    return np.array(ranks, _RANKS).tobytes()


def ranks_of(payload: Buffer) -> list[int]:
    """The ranks in a payload."""
    ranks: list[int] = np.frombuffer(payload, _RANKS).tolist()
    return ranks


class SignalRules:
    """Which signals may come to the agents of one operation. The fields of a signal are untrusted."""

    def __init__(self, hosts: Hosts, short_bytes: int | None) -> None:
        """`short_bytes` is the size of the payload of CLAIM and RESULT; None if contributions are too long for that."""
        self._hosts = hosts
        self._short_bytes = short_bytes

    def check(self, rank: int, leading_host: int, step: int, payload: Buffer) -> None:
        """Raise ProtocolError if no such signal exists for a round that is opened on `leading_host`."""
        if not self._may_send(rank, leading_host, step) or not self._may_carry(rank, step, payload):
            raise ProtocolError(f"signal {step} has no meaning here")

    def _may_send(self, rank: int, leads: int, step: int) -> bool:
        kind, attempt = kind_of(step)
        if kind not in _OF_ATTEMPTS:
            return not attempt and (kind in (ASK, HERE) or (leads == self._hosts.mine and kind in EVENTS))
        if not 0 < attempt < ATTEMPTS_MAX:
            return False
        return self._hosts.mine == leads if kind in (CLAIM, AGAIN) else self._hosts.host[rank] == leads

    def _may_carry(self, rank: int, step: int, payload: Buffer) -> bool:
        kind, _ = kind_of(step)
        if self._short_bytes is not None and kind in (CLAIM, RESULT):
            return len(payload) == self._short_bytes
        if kind not in _LISTS:
            return kind != RESULT and not len(payload)
        if not len(payload) or len(payload) % _RANKS.itemsize:
            return False
        ranks = ranks_of(payload)
        if kind == TEAM:
            is_team = len(ranks) == len(self._hosts.ranks) and all(map(contains, self._hosts.ranks, ranks))
            return self._short_bytes is None and is_team
        return set(ranks) <= set(self._hosts.ranks[self._hosts.host[rank]])
