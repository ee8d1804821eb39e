"""The time of a round in theory, with free communication: a bound and an expectation for measurements.

With A_r the moment when rank r calls round t and X the end of the previous round, round t ends at

    synchronous: max_r A_r       solo: max(X, min_r A_r)       majority: max(X, A_i), i drawn for t

and rank r starts its next step at max(A_r, end). Let each step compute c, and one rank drawn for each round d more:

* synchronous: every round contains the drawn rank: exactly c + d.
* solo: no round without one step: at least c. (That is below c + d/P, the mean step of a rank, which bounds a system
  where every rank computes a gradient for every round; here a late rank skips rounds.)
* majority: initiator and late rank are drawn independently and uniformly, so they coincide with probability 1/P: at
  least c + d/P.

Solo and majority reach these bounds only if no rank carries lateness into the next round. But a rank that is late by d
does so for d/c rounds: it may be drawn as initiator while it still computes. A late call opens no round, unless at
least half of the ranks wait for that caller. This cost has no short formula; `expected_round_s` runs the recursion over
many draws.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from trainers.imbalance import Imbalance

Rule = Literal["synchronous", "solo", "majority"]


def least_round_s(rule: Rule, compute_s: float, late_s: float, ranks: int) -> float:
    """The bound above for one random late rank per round, in seconds per round."""
    return compute_s + {"synchronous": late_s, "solo": 0.0, "majority": late_s / ranks}[rule]


def expected_round_s(
    rule: Rule, compute_s: float, imbalance: Imbalance, ranks: int, average_every: int, rounds: int = 4000
) -> float:
    """Mean seconds per round of the recursion above; models are averaged every `average_every` rounds (0: never)."""
    initiators = np.random.default_rng(0).integers(ranks, size=rounds + 1)
    newest, end_s = 0, 0.0
    aims = [1] * ranks
    calls_s = [compute_s + imbalance.delay_s(0, 1, rank, ranks, compute_s) for rank in range(ranks)]
    waiting: set[int] = set()

    def step(rank: int) -> None:
        """`rank` starts the step for the next round when its own step and the newest round are over."""
        aims[rank] = newest + 1
        step_s = compute_s + imbalance.delay_s(0, newest + 1, rank, ranks, compute_s)
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
