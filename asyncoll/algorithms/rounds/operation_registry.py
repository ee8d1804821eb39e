"""The roster of a communicator in memory: its wait-avoiding operations, and the ranks that make no more calls."""

from __future__ import annotations

from asyncoll.algorithms.dense.staging import DisagreementError
from asyncoll.arguments import digest
from asyncoll.errors import UsageError
from asyncoll.transport import Arena, Board
from asyncoll.transport.control_block import failure

MAX_OPERATIONS = 1024
_ENTRY = 4  # context, fingerprint, the rank that made it, words of its board
_HALF = 1 << 63  # what makes a number of 64 bits fit into a word with a sign


class Roster:
    """As one of the ranks sees it. The first words of each operation's board say which ranks are gone."""

    def __init__(self, arena: Arena, size: int, rank: int, communicator: int) -> None:
        self._arena = arena
        self._size = size
        self._rank = rank
        self._count = size  # the word that counts the entries; before it, who is gone
        self._board = arena.board(digest(communicator, "roster"), size + 1 + MAX_OPERATIONS * _ENTRY)

    def enter(self, context: int, fingerprint: int, words: int) -> Board:
        """The board of an operation. Raises DisagreementError if it is known, but as something else."""
        roster = self._board.words
        with self._board:
            entry = self._find(context - _HALF)
            if entry is not None:
                if roster[entry + 1] != fingerprint - _HALF:
                    raise DisagreementError(roster[entry + 2])
                return self._arena.board(context, words)
            entry = self._count + 1 + roster[self._count] * _ENTRY
            if roster[self._count] == MAX_OPERATIONS:
                raise UsageError(f"a communicator has at most {MAX_OPERATIONS} operations: use their names again")
            board = self._arena.board(context, words)
            with board:
                board.words[: self._size] = roster[: self._size]
            for place, value in enumerate((context - _HALF, fingerprint - _HALF, self._rank, words)):
                roster[entry + place] = value
            roster[self._count] += 1
            return board

    async def failure(self) -> None:
        """Wait for the communicator to fail."""
        await failure(self._board)

    def depart(self) -> None:
        """This rank makes no more calls: whoever waits for it need not."""
        roster = self._board.words
        with self._board:
            roster[self._rank] = 1
            first = self._count + 1
            entries = [first + number * _ENTRY for number in range(roster[self._count])]
            known = [(roster[entry] + _HALF, roster[entry + 3]) for entry in entries]
        for context, words in known:
            with self._arena.board(context, words) as board:
                board.words[self._rank] = 1
                board.wake()

    def _find(self, context: int) -> int | None:
        first = self._count + 1
        for number in range(self._board.words[self._count]):
            if self._board.words[first + number * _ENTRY] == context:
                return first + number * _ENTRY
        return None
