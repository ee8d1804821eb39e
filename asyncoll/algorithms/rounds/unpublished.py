"""Which results are whole, and where the contributions are that none has, if a rank has died in the middle of a round.

The rank that opens or publishes a round changes the cells of all ranks, and can be killed between any two stores. So no
cell that is cleared tells to which round a contribution belongs. Tickets tell it, which number the contributions of a
rank. Two stores commit:

- `Head.latest`: the round is published, with the contributions of each rank up to the ticket in its `Kept.taken`. Its
  results are written before, and what it has used is cleared and dropped after.
- `RankCells.taken`, while a round runs: the contribution has passed from `staged` to `source`.

These functions read a record that no rank changes any more: its lock is lost, or it is closed (`Head.closed`), and all
survivors have left their calls.
"""

from __future__ import annotations

from asyncoll.algorithms.rounds.round_cells import Head, RankCells, oldest_whole


def whole_results(latest: int, history: int) -> range:
    """The published rounds whose results are kept whole: `latest`, the newest one, and `history` before it.

    One more is kept, whose blocks may be used again.
    """
    return range(oldest_whole(latest, history), latest + 1)


def unpublished(head: Head, row: RankCells, published: int) -> list[int]:
    """The addresses of the contributions of a rank that are in no published round, each in one of them.

    `head` and `row` are what the cells hold, `published` is the `Kept.taken` of the rank in round `head.latest`, or 0
    if there is no such round. Contributions add up: in groups they stay staged.
    """
    runs = head.running > head.latest
    taken = row.taken if runs else published
    # Otherwise the source is that of an earlier round.
    addresses = [row.source_at] if taken > published else []
    return [*addresses, row.staged_at] if row.ticket > taken else addresses
