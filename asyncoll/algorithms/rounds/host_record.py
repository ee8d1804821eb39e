"""The part of one host in the rounds between hosts, on a control block of that host.

The ranks of the host stage and wait as in `round_record`. Only an agent opens a round here, once the round is open
between hosts: it takes all that is staged. Once that is reduced, it exchanges it with the other hosts, and concludes
the round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from asyncoll.algorithms.rounds.attempts import Attempts
from asyncoll.algorithms.rounds.block_layout import BlockLayout
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.algorithms.rounds.round_cells import COLUMN, NONE
from asyncoll.algorithms.rounds.round_record import Groups, Memory, RoundRecord
from asyncoll.runtime.hosts import Hosts
from asyncoll.runtime.trace import Trace
from asyncoll.tensors.reductions import Array

GONE, JOINED = 1, 2  # in the cell of a rank that makes no more calls; JOINED: it waits until no rank does


class Section(NamedTuple):
    """The part of a group that is on this host."""

    members: tuple[int, ...]  # of the group: ranks of any host
    places: tuple[int, ...]  # of those that are here
    rows: slice | Array  # of these places


class Share(NamedTuple):
    """What a host gives to a group of a round, and what becomes of it."""

    members: tuple[int, ...]  # of the group: ranks of any host
    block: int  # the reduction of this host's contributions, once that is done; NONE if there are none
    contributors: tuple[int, ...]  # ranks
    weight: float  # of their contributions together


class Taken(NamedTuple):
    """What a host gives to a round."""

    shares: tuple[Share, ...]  # of the groups that have members here, in the order of groups
    ends: tuple[int, ...]  # by place on the host: 0, GONE or JOINED
    times_s: Array  # [2, place]: how long callers have waited for rounds to begin, and how late they have been


class RoundOutcome(NamedTuple):
    """The results of a round of all hosts, as one of them sees them."""

    shares: tuple[Share, ...]  # as of `Taken`, with the contributors and the results of the groups
    ends: tuple[int, ...]  # by rank: 0, GONE or JOINED
    times_s: Array  # [2, rank]: as in `Taken`; 0 for ranks that this host is not told of

    @property
    def is_last(self) -> bool:
        """Whether no rank makes calls any more, and those that have joined wait for this round."""
        return all(self.ends) and JOINED in self.ends


class _More(NamedTuple):
    """The cells of a `HostRecord` beyond those of a `RoundRecord`."""

    reduced: int  # the newest round whose contributions are reduced here
    over: int  # 1 if the last round is over
    ends: int  # the first of [rank]: those of the last `RoundOutcome`


_MORE = _More(*range(len(_More._fields)))


class HostRecord(RoundRecord):
    """The rounds of one operation, as one rank of a host sees them."""

    def __init__(
        self,
        memory: Memory,
        operation: Operation,
        layout: BlockLayout,
        reduce: Callable[[int, Sequence[int]], None],
        trace: Trace,
        hosts: Hosts,
    ) -> None:
        """`memory` is that in which the ranks of this host meet. Raises DisagreementError if they disagree."""
        ranks, here = sum(map(len, hosts.ranks)), len(hosts.here)
        attempts = _MORE.ends + 3 * ranks
        more = attempts + Attempts.cells(here)
        super().__init__(memory, operation, layout, reduce, trace, contributors=ranks, more=more)
        self.reduces_at_once = False
        self._here = hosts.here
        self._ranks = ranks
        self._divided: tuple[int, list[Section]] = (0, [])  # for the round of that number
        self._at = _More(*[self.more + cell for cell in _MORE])
        self.attempts = Attempts(self.cells, self.more + attempts, here, hosts.place)
        ends, times = self._at.ends, self._at.ends + ranks
        self._ends = np.frombuffer(self.cells[ends:times], np.int64)
        self._times = np.frombuffer(self.cells[times : times + 2 * ranks], np.float64).reshape(2, ranks)

    @staticmethod
    def _context(operation: Operation) -> tuple[str | int, ...]:
        # With the fingerprint: ranks that know different operations of one name find that out by message.
        return "rounds of a host", operation.name, operation.fingerprint()

    # -- for the ranks of the host ----------------------------------------------------------------

    def may_open(self) -> bool:
        return False

    def late_call_opens(self) -> bool:
        return False

    def may_close(self) -> bool:
        return False

    def is_over(self) -> bool:
        return self.cells[self._at.over] > 0

    def join(self) -> None:
        # In groups it waits for nothing, because they have no result of all ranks.
        self.cells[self._rank] = GONE if self._keeps else JOINED

    def totals(self) -> tuple[dict[int, int], list[float], list[float]]:
        active, _, _ = super().totals()
        waited, late = self._times.tolist()
        return active, waited, late

    # -- for agents -------------------------------------------------------------------------------

    def ends(self) -> tuple[int, ...]:
        """By place, now: 0, GONE or JOINED."""
        return tuple(self.cells[: self.size].tolist())

    def known_ends(self) -> tuple[int, ...]:
        """By rank, as the last round has told: 0, GONE or JOINED."""
        return tuple(self._ends.tolist())

    def open_for_all(self, number: int) -> bool:
        """The rule of the operation lets round `number` begin. Returns whether this agent is the first to say so."""
        return self.latest + 1 == number and self.attempts.open(number)

    def blocks_needed(self, number: int) -> int:
        """How many blocks have to be free for `take`, if there are fewer; otherwise 0."""
        needed = len(self.sections(number)) if self._is_next(number) else 0
        return needed if self.blocks.free_count() < needed else 0

    def take(self, number: int, attempt: int, now_ns: int) -> Taken | None:
        """This agent takes part in `attempt` at round `number`. The first attempt opens the round on this host.

        None if another agent of this host takes part, or this host has no part in the round any more. The caller keeps
        the blocks of the shares.
        """
        if self._is_next(number):
            self._open_here(number, now_ns)
        given = self.attempts.given(number)
        if given is None or not self.attempts.claim(number, attempt):
            return None
        blocks = given.blocks.tolist()
        shares = [self._share(section.members, blocks[section.places[0]]) for section in self.sections(number)]
        return Taken(tuple(shares), tuple(given.ends.tolist()), given.times_s.copy())

    def _open_here(self, number: int, now_ns: int) -> None:
        """Open round `number` on this host, and take all that is staged."""
        self._start(now_ns)  # its opener tells of that
        times_s = self._table[:, COLUMN.waited_ns : COLUMN.late_ns + 1].T / 1e9
        blocks = [NONE] * self.size
        for _, places, _ in self.sections(number):
            # Until the round is over, this block is the reduction of what the host gives, and not a result.
            blocks[places[0]] = block = self.cells[self._row[places[0]].block]
            if block:
                bitmap = self.blocks.contributors(block)
                here = [self._here[place] for place in places if bitmap >> place & 1]
                self.blocks.sign(block, _bitmap(here), self.blocks.weight(block))
        self.attempts.give(number, blocks, self.ends(), times_s)

    def _share(self, members: tuple[int, ...], block: int) -> Share:
        """What this host gives to a group, in `block`, which the caller keeps from now on."""
        if not block:
            return Share(members, NONE, (), 0.0)
        self.blocks.keep(block)
        bitmap = self.blocks.contributors(block)
        return Share(members, block, tuple([rank for rank in members if bitmap >> rank & 1]), self.blocks.weight(block))

    def _is_next(self, number: int) -> bool:
        return self._is_free() and self.latest + 1 == number and not self.is_over()

    def sections(self, number: int) -> list[Section]:
        """The groups of round `number` that have members here, in their order. Also without the lock."""
        if not self._keeps:
            number = -1  # all rounds have the same one
        of, sections = self._divided  # read once: a caller's thread and the runtime's may both be here
        if of != number:
            sections = self._divide(number)
            self._divided = number, sections
        return sections

    def _divide(self, number: int) -> list[Section]:
        sections = []
        for group in self._operation.groups(number, self._ranks):
            its = set(group)
            places = tuple([place for place, rank in enumerate(self._here) if rank in its])
            if places:
                sections.append(Section(group, places, np.array(places) if self._keeps else slice(None)))
        return sections

    def _groups_of(self, number: int) -> Groups:
        return [(places, rows) for _, places, rows in self.sections(number)]

    def _may_be_result(self, block: int) -> bool:
        # A contribution that stays is in later rounds too, with other contributors.
        return super()._may_be_result(block) and not self._keeps

    def is_reduced(self, number: int) -> bool:
        """Whether what this host gives to round `number` is reduced."""
        return self.cells[self._at.reduced] >= number

    def _publish(self) -> None:
        """All chunks are reduced: the callers' memory is their own again."""
        self.cells[self._at.reduced] = self.running  # before what has been used is cleared: see `unpublished`
        for block in self._table[:, COLUMN.source].tolist():
            self.blocks.drop(block)
        self._table[:, COLUMN.source : COLUMN.source_at + 1] = NONE
        self.control_block.wake()

    def conclude(self, number: int, outcome: RoundOutcome) -> None:
        """An attempt at round `number` is over: keep its result, and wake the callers that wait for it.

        It is no result if another attempt was over before, and the last round is none if no rank has contributed to it.
        """
        if self.running != number:
            for share in outcome.shares:
                self.blocks.drop(share.block)
            return
        for block in self.attempts.forget(number - 1):
            self.blocks.drop(block)
        # In groups, hosts are not told of all ranks.
        if not self._keeps:
            self._ends[:] = outcome.ends
        np.maximum(self._times, outcome.times_s, out=self._times)
        is_last = outcome.is_last
        self.cells[self._at.over] = is_last
        absent = len(outcome.ends) - outcome.ends.count(0)
        for share, (_, index) in zip(outcome.shares, self._groups_of(number), strict=True):
            active, block = len(share.contributors), share.block
            if not active:
                self.blocks.drop(block)
                block = NONE
            self.blocks.sign(block, _bitmap(share.contributors), share.weight)
            self._table[index, COLUMN.block : COLUMN.taken] = block, active, absent
            is_last = is_last and not active
        if is_last:
            self.cells[self._head.running] = 0
            self.control_block.wake()
        else:
            super()._publish()


def _bitmap(ranks: Sequence[int]) -> int:
    return sum([1 << rank for rank in ranks])
