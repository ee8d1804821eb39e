"""The rank that may open a round: pure functions, the same for every carrier of rounds.

Rounds of solo, majority and quorum allreduces: Li, Ben-Nun, Di Girolamo, Alistarh, Hoefler, "Taming unbalanced training
workloads in deep learning with partial collective operations", PPoPP 2020, section 4.
"""

from __future__ import annotations

from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.algorithms.rounds.policies import RoundView, allows
from asyncoll.algorithms.rounds.round_cells import are_enough, needs_drawn, ranks_needed


def may_open(operation: Operation, round: RoundView) -> bool:  # noqa: A002 (the papers' word)
    """Whether the round, for which at least one caller waits, may begin."""
    if operation.first_caller_opens:
        return True
    (ranks, drawn), synchronous = operation.rule, operation.is_synchronous(round.number)
    if operation.policy and not synchronous:
        return round.count() == round.size or allows(operation.policy, round)
    needed = ranks_needed(ranks, round.size, synchronous)
    if needed > 1 and round.count() < needed:
        return False
    return not needs_drawn(drawn, synchronous) or any(map(round.has, round.drawn))


def counts_gone_ranks(operation: Operation) -> bool:
    """Whether the first drawn rank of a round must be told of ranks that are gone, before a caller waits for it.

    A quorum counts them. In the other kinds that rank opens the last round, when it knows that no rank makes calls any
    more. Rounds in groups have no last one.
    """
    return not operation.group_size


def late_call_opens(operation: Operation, round: RoundView, rank: int) -> bool:  # noqa: A002
    """Whether a late call of `rank` opens the round at once, instead of taking the newest result.

    It does if the round waits for a drawn rank, `rank` is drawn for it, and at least half of the ranks wait for that:
    another step of computation would only keep them waiting. If fewer wait, the round would come too early for the
    rest.
    """
    return (
        needs_drawn(operation.rule.drawn, operation.is_synchronous(round.number))
        and are_enough(round.arrived, round.size)
        and rank in round.drawn
    )
