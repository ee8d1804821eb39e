"""Which ranks reduce together in a round of the group allreduce (WAGMA-SGD, section 4; algorithm 1, corrected).

The groups of a round partition the ranks, and change from round to round so that what one rank contributes reaches all.
Write a rank in base S. In round t the paper pairs ranks that differ in log2 S bits, starting at bit t log2 S and going
round: those bits are turned to the end, and neighbours then form the groups. (Printed, the shift is cumulative, which
is right for t = 0 alone.) Turning digits of base S is multiplying by S modulo P - 1, and that works whenever S divides
P; so other sizes are padded to a multiple of S, and the padding left out again.

For powers of two an update reaches everyone in exactly ceil(log_S P) rounds, wherever it starts. For other sizes it is
that or one more with groups of 5 or larger, and up to two more with smaller ones (computed for all P < 70).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise

Groups = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=256)
def partition(size: int, group_size: int, number: int) -> Groups:
    """The groups of round `number`, counted from 1, among `size` ranks.

    There are ceil(size / group_size) of them, of sizes that differ by at most one.
    """
    groups = -(-size // group_size)
    small, larger = divmod(size, groups)
    ends = accumulate(small + (group < larger) for group in range(groups))
    order = _order(size, group_size, number - 1)
    return tuple(tuple(sorted(order[start:end])) for start, end in pairwise([0, *ends]))


def _order(size: int, group_size: int, turn: int) -> tuple[int, ...]:
    """The ranks in the order in which round `turn`, counted from 0, cuts them into groups."""
    padded = -(-size // group_size) * group_size
    if padded <= 2:
        return tuple(range(size))
    factor = pow(group_size, turn, padded - 1)
    order = (*(place * factor % (padded - 1) for place in range(padded - 1)), padded - 1)
    return tuple(rank for rank in order if rank < size)


def propagation(size: int, group_size: int, first: int = 1) -> int:
    """Rounds, beginning with round `first`, until every rank has something of every other's contribution.

    `group_size` must be at least 2 (or `size` 1): otherwise that never happens.
    """
    everybody = (1 << size) - 1
    reached = [1 << rank for rank in range(size)]
    rounds = 0
    while any(mask != everybody for mask in reached):
        for group in partition(size, group_size, first + rounds):
            union = 0
            for rank in group:
                union |= reached[rank]
            for rank in group:
                reached[rank] = union
        rounds += 1
    return rounds
