"""The ranks that reduce together in a round of the group allreduce.

Source: Li, Ben-Nun, Nadiradze, Di Girolamo, Dryden, Alistarh, Hoefler, "Breaking (global) barriers in parallel
stochastic optimization with wait-avoiding group averaging", TPDS 2021 (WAGMA-SGD), section III-B, algorithm 1,
corrected: line 6 as printed shifts a mask that is shifted already. With P = 8, S = 4 and t = 1 both phases then use
bit 2, and the groups have two ranks instead of the four of the paper's example.

The groups of a round partition the ranks. They change from round to round, so that an update of one rank reaches all
ranks. In round t the paper joins ranks that differ only in log2 S bits, which begin at bit t log2 S and wrap around. An
equivalent rule is to rotate these bits to the end of the rank's number; consecutive numbers then form a group. To
rotate a number of base S by one digit is to multiply it by S modulo P - 1. That works for every S that divides P. Other
sizes are padded to a multiple of S, and the padding is left out of the groups.

For powers of two an update reaches all ranks in exactly ceil(log_S P) rounds, from any rank. For other sizes it takes
that number or one more with groups of at least 5, and up to two more with smaller groups (computed for all P < 70).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise

Groups = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=256)
def partition(size: int, group_size: int, number: int) -> Groups:
    """The groups of round `number`, counted from 1, among `size` ranks. Each group is in order of ranks.

    There are ceil(size / group_size) groups. Their sizes differ by at most one.
    """
    groups = -(-size // group_size)
    small, larger = divmod(size, groups)
    ends = accumulate(small + (group < larger) for group in range(groups))
    order = _order(size, group_size, number - 1)
    return tuple(tuple(sorted(order[start:end])) for start, end in pairwise([0, *ends]))


def _order(size: int, group_size: int, turn: int) -> tuple[int, ...]:
    """The ranks in the order in which round `turn`, counted from 0, cuts them into groups."""
    padded = -(-size // group_size) * group_size
    if padded <= 2:  # modulo 1 or 0 nothing is left to rotate
        return tuple(range(size))
    # The last number stands still: modulo P - 1 it would be the same as 0, although its digits (all S - 1) are not.
    factor = pow(group_size, turn, padded - 1)
    order = (*(position * factor % (padded - 1) for position in range(padded - 1)), padded - 1)
    return tuple(rank for rank in order if rank < size)
