"""Where the contributions are that no published round has, if a rank has died in the middle of a round.

The rank that opens or publishes a round changes the cells of all ranks, and can be killed between any two stores. So no
cell that is cleared tells to which round a contribution belongs. Tickets tell it, which number the contributions of a
rank. Two stores commit:

- `Head.latest`: the round is published, with the contributions of each rank up to the ticket in its `Kept.taken`. Its
  results are written before, and what it has used is cleared and dropped after.
- `RankCells.taken`, while a round runs: the contribution has passed from `staged` to `source`.
"""

from __future__ import annotations

from asyncoll.algorithms.rounds.round_cells import Head, RankCells


def unpublished(head: Head, row: RankCells, published: int) -> list[int]:
    """The addresses of the contributions of a rank that are in no published round, each in one of them.

    `head` and `row` are what the cells hold, `published` is the `Kept.taken` of the rank in round `head.latest`, or 0
    if there is no such round. No rank changes the cells meanwhile. Contributions add up: in groups they stay staged.
    """
    runs = head.running > head.latest
    taken = row.taken if runs else published
    # Otherwise the source is that of an earlier round.
    addresses = [row.source_at] if taken > published else []
    return [*addresses, row.staged_at] if row.ticket > taken else addresses
