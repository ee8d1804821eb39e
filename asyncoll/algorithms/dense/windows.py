"""A tensor passes from the device of one rank to that of another in windows, through device memory that both read.

The sender shows the tensor in its block (`PairMemory`), window by window, and tells its peer where each of them is. The
peer copies it from there, and answers. The sender takes a place of the block once the streams of both tensors have come
to them. So work of the program that stands still there, such as a call of NCCL that waits for another rank, holds up no
other tensor.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from asyncoll.algorithms.dense.pair_memory import PairMemory
from asyncoll.errors import AsyncollError, ProtocolError
from asyncoll.runtime.group import Lane
from asyncoll.runtime.matching import Receive
from asyncoll.runtime.member import Member
from asyncoll.tensors.reductions import Array
from asyncoll.transport.staging import BlockPart, Transfer, set_when_moved

_END = -1  # in the place of a window


class Answer(IntEnum):
    """The reader's answer to one window."""

    REFUSED = 0  # it cannot open the block: both ranks use mirrors from now on
    READ = 1
    UNREAD = 2  # the tensor is not wanted any more, or the reader's copy has failed: says nothing about the block


async def until_moved(member: Member, transfer: Transfer) -> BaseException | None:
    """Return once it is over: its error. Raises the failure of the communicator."""
    with member.watch("a copy of device memory") as ended:
        set_when_moved(transfer, transfer.nbytes, ended)
        await ended
    return transfer.error if transfer.moved < transfer.nbytes else None


@dataclass(eq=False)
class Windows:
    """One tensor, at its sender or at its reader. On the runtime's loop."""

    _member: Member
    _memory: PairMemory
    _lane: Lane
    _peer: int
    _nbytes: int
    # The step of the first window, in both directions: where it is, and the answer. The reader grants the step before
    # when its stream has come to its tensor.
    _first: int
    _shown: int = 0  # windows that were shown, or END
    _unanswered: deque[tuple[Receive, Array]] = field(default_factory=deque)
    _where: Array = field(default_factory=lambda: np.empty(1, np.int64))  # of the window that is read

    @property
    def _starts(self) -> range:
        return range(0, self._nbytes, self._memory.window)

    def _part(self, rank: int, offset: int, start: int) -> BlockPart:
        return BlockPart(rank, offset, start, min(self._memory.window, self._nbytes - start))

    # -- the sender -------------------------------------------------------------------------------

    async def place(self) -> int:
        """The stream of the tensor has come to it: wait for that of the peer, and for a place of the block."""
        await self._lane.offer(self._peer, self._first - 1)
        return await self._memory.place()

    async def show(self, place: int, write: Callable[[BlockPart], Coroutine[Any, Any, bool]]) -> bool:
        """Show the tensor, to the last window if all goes well. Returns whether the peer has read all of it.

        `write` copies a window to the block. It returns False if no more are to be shown.
        """
        # Two windows are shown at a time, so that one is written while the other is read. Until the peer has read a
        # first one, it may refuse, and a second window would be copied in vain.
        ahead = 2 if self._memory.is_read_by(self._peer) else 1
        for index, start in enumerate(self._starts):
            if len(self._unanswered) == ahead and not await self._take_answer():
                return False
            part = self._part(self._lane.rank, place + index % 2 * self._memory.window, start)
            if not await write(part):
                return False
            await self._announce(part.offset)
        while self._unanswered:
            if not await self._take_answer():
                return False
        return True

    async def end(self) -> None:
        """Show no more windows, and return once the peer reads none."""
        if self._shown < len(self._starts):
            await self._announce(_END)
        while self._unanswered:
            await self._take_answer()

    async def _announce(self, where: int) -> None:
        """Tell the peer where the next window is, or END, and expect its answer."""
        step, self._shown = self._first + self._shown, self._shown + 1
        if where != _END:
            answer = np.empty(1, np.int64)
            self._unanswered.append((self._lane.post(self._peer, step, answer), answer))
        await self._lane.send(self._peer, step, np.array([where]))

    async def _take_answer(self) -> bool:
        """Wait for the oldest answer, and tell it to `PairMemory`. Returns whether the peer has read the window."""
        receive, answer = self._unanswered.popleft()
        await self._lane.wait(receive)
        has_read = bool(answer[0] == Answer.READ)
        if answer[0] != Answer.UNREAD:
            self._memory.answered(self._peer, has_read=has_read)
        return has_read

    # -- the reader -------------------------------------------------------------------------------

    async def grant_once_ready(self, come: Callable[[], Transfer] | None) -> None:
        """Let the peer show its windows once the stream has come to the tensor here. None: there is no tensor.

        An error of the device shows in the copy that follows, and a failure of the communicator in every other wait.
        """
        with contextlib.suppress(AsyncollError):
            if come is not None:
                await until_moved(self._member, come())
            self._lane.grant(self._peer, self._first - 1)

    def expect(self, index: int = 0) -> Receive:
        """Post the receive of window `index`."""
        return self._lane.post(self._peer, self._first + index, self._where)

    async def read(
        self, expected: Receive, copy: Callable[[BlockPart], Coroutine[Any, Any, Answer]], *, may_end: bool
    ) -> None:
        """Answer each window by `copy`, which reads it, or as before once one is not read. `expected` is the first one.

        `may_end`: the peer may show fewer windows.
        """
        answer = Answer.READ
        for index, start in enumerate(self._starts):
            await self._lane.wait(expected if index == 0 else self.expect(index))
            if may_end and self._where[0] == _END:
                return
            part, size = self._part(self._peer, int(self._where[0]), start), self._memory.nbytes
            # A peer that breaks the protocol must not make this rank read outside of the block.
            if not 0 <= part.offset <= size - part.nbytes:
                raise ProtocolError(f"byte {part.offset} of a block of device memory that has {size}", self._peer)
            if answer == Answer.READ:
                answer = await copy(part)
            await self.answer(index, answer)

    async def answer(self, index: int, answer: Answer) -> None:
        await self._lane.send(self._peer, self._first + index, np.array([answer]))
