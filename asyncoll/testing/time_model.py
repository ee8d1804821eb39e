"""The time of a round in theory, with free communication: a bound and an expectation for measurements.

With A_r the moment when rank r calls round t and X the end of the previous round, round t ends at

    synchronous: max_r A_r       solo: max(X, min_r A_r)       majority: max(X, A_i), i drawn for t
    quorum: max(X, the q-th smallest A_r)

and rank r starts its next step at max(A_r, end). A call opens no round if its step began before X: it gets the newest
result instead. So no round is shorter than the shortest, the drawn rank's, the q-th shortest or the longest step that
aims at it. Let each step compute c, and one rank drawn for each round d more:

* synchronous: every round contains the drawn rank: exactly c + d.
* solo: no round without one step: at least c. (That is below c + d/P, the mean step of a rank, which bounds a system
  where every rank computes a gradient for every round; here a late rank skips rounds.)
* majority: initiator and late rank are drawn independently and uniformly, so they coincide with probability 1/P: at
  least c + d/P.

Solo and majority reach these bounds only if no rank carries lateness into the next round. But a rank that is late by d
does so for d/c rounds: it may be drawn as initiator while it still computes. A late call opens no round, unless at
least half of the ranks wait for that caller. This cost has no short formula; `expected_round_s` runs the recursion over
many draws.

The bound of majority needs delays that are drawn for each round anew. If one rank is late in many rounds, the late
calls that open rounds make them shorter: such a round is at least as long as half of the ranks' steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

StartRule = Literal["synchronous", "solo", "majority", "quorum"]


class Delays(Protocol):
    """How late the ranks are: a pure function of its arguments."""

    def delay_s(self, seed: int, round_: int, rank: int, size: int, computed_s: float = 0.0) -> float:
        """The seconds that `rank` of `size` waits in the step that aims at `round_`, after `computed_s` of computation.

        Rounds count from 1.
        """


@dataclass(frozen=True, slots=True)
class Waiting:
    """The ranks that a round waits for.

    `quorum` and `candidates` are those of the rules of these names. Every `sync_every`-th round is synchronous (0:
    none). Synchronous ranks wait for each other after every `steps` steps (0: at the end only, so that a rank may be
    late as long as it catches up).
    """

    rule: StartRule
    quorum: int = 1
    candidates: int = 1
    sync_every: int = 0
    steps: int = 1


def least_round_s(
    waiting: Waiting,
    compute_s: float,
    delays: Delays,
    ranks: int,
    *,
    rounds: int = 4000,
    seed: int = 0,
    are_drawn: bool = False,
) -> float:
    """The least time of a round: mean seconds over `rounds`, of `ranks` ranks that compute `compute_s` in a step.

    `are_drawn` says that the delays of a round do not depend on those of the round before. The bound of "majority" is
    longer then.
    """
    steps_s = np.array(
        [
            [compute_s + delays.delay_s(seed, round_, rank, ranks, compute_s) for rank in range(ranks)]
            for round_ in range(1, rounds + 1)
        ]
    )
    if waiting.rule == "synchronous":
        together = waiting.steps or rounds
        starts = range(0, rounds, together)
        return float(sum(steps_s[start : start + together].sum(axis=0).max() for start in starts)) / rounds
    ascending = np.sort(steps_s, axis=1)
    opening_s = ascending
    if waiting.rule == "majority" and not are_drawn:
        opening_s = np.minimum(ascending, ascending[:, [(ranks - 1) // 2]])
    least_s = opening_s @ _openers(waiting, ranks)
    if waiting.sync_every:
        every = waiting.sync_every
        least_s[every - 1 :: every] = ascending[every - 1 :: every, -1]
    return float(least_s.mean())


def _openers(waiting: Waiting, ranks: int) -> list[float]:
    """The probability that the rank with the k-th shortest step opens the round, for each k."""
    if waiting.rule == "majority":  # all of the candidates are among the ranks from the k-th on, and it is one
        drawn = min(waiting.candidates, ranks)
        return [math.comb(ranks - k, drawn - 1) / math.comb(ranks, drawn) for k in range(1, ranks + 1)]
    opener = 1 if waiting.rule == "solo" else waiting.quorum
    return [float(k == min(opener, ranks)) for k in range(1, ranks + 1)]


def expected_round_s(
    rule: StartRule, compute_s: float, delays: Delays, ranks: int, average_every: int = 0, rounds: int = 4000
) -> float:
    """The expected time of a round: mean seconds over `rounds`, of `ranks` ranks that compute `compute_s` in a step.

    `rule` is "synchronous", "solo" or "majority" with one candidate. Models are averaged every `average_every` rounds
    (0: never). Communication takes no time.
    """
    initiators = np.random.default_rng(0).integers(ranks, size=rounds + 1)
    newest, end_s = 0, 0.0
    aims = [1] * ranks
    calls_s = [compute_s + delays.delay_s(0, 1, rank, ranks, compute_s) for rank in range(ranks)]
    waiting: set[int] = set()

    def step(rank: int) -> None:
        """`rank` starts the step for the next round when its own step and the newest round are over."""
        aims[rank] = newest + 1
        step_s = compute_s + delays.delay_s(0, newest + 1, rank, ranks, compute_s)
        calls_s[rank] = max(calls_s[rank], end_s) + step_s

    while newest < rounds:
        caller = min((rank for rank in range(ranks) if rank not in waiting), key=lambda rank: calls_s[rank])
        awaited = rule == "majority" and caller == initiators[newest + 1] and 2 * len(waiting) >= ranks
        if aims[caller] <= newest and not awaited:  # a late call gets the newest round at once and opens nothing
            step(caller)
            continue
        waiting.add(caller)
        opens = {
            "solo": True,
            "majority": caller == initiators[newest + 1],
            "synchronous": len(waiting) == ranks,
        }
        if opens[rule]:
            newest, end_s = newest + 1, calls_s[caller]
            if average_every and newest % average_every == 0:  # an average of the models is a synchronous allreduce
                waiting, end_s = set(range(ranks)), max(calls_s)
            for rank in waiting:
                step(rank)
            waiting = set()
    return end_s / rounds
