"""A lease: the shared memory that one communicator uses, recorded so that all of it can be given back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from asyncoll.errors import AsyncollError, ClosedError
from asyncoll.transport import Arena, ControlBlock
from asyncoll.transport.control_block import RefusingMutex


class Lease:
    """An arena, with a record of the blocks and control blocks that one rank has made for one communicator.

    It has the parts of `Arena` that a communicator uses; all but `end` and `give_back` do what they do there.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._blocks: set[int] = set()  # addresses of blocks of this rank
        self._control_blocks: dict[int, ControlBlock] = {}  # by context
        self.native = arena.native
        self.segments = arena.segments
        self.polls = arena.polls
        self.local_rank = arena.local_rank
        self.ranks = arena.ranks
        self.cores = arena.cores
        # Bound once: calls use them, and another step would cost as much as they do.
        self.view = arena.view
        self.locate = arena.locate
        self.now_s = arena.now_s
        self.look = arena.look
        self.wait = arena.wait
        self.wait_for_turn = arena.wait_for_turn
        self.recheck = arena.recheck

    def allocate(self, nbytes: int) -> int:
        address = self._arena.allocate(nbytes)
        self._blocks.add(address)
        return address

    def free(self, address: int) -> None:
        self._blocks.discard(address)
        self._arena.free(address)

    def control_block(self, context: int, cells: int) -> ControlBlock:
        control_block = self._arena.control_block(context, cells)
        self._control_blocks[context] = control_block
        return control_block

    def end(self) -> Callable[[], None]:
        """This rank uses the memory no more. Returns what gives it back, to be called when that holds for all ranks.

        Until then the other ranks may use all of it. A later use by mistake finds locks that raise ClosedError.
        """
        arena, blocks = self._arena, list(self._blocks)
        made = [context for context, block in self._control_blocks.items() if block.created]
        for context, control_block in self._control_blocks.items():
            # Its memory may be that of another control block later.
            control_block.abandon(RefusingMutex(lambda: ClosedError("this communicator is closed")))
            arena.forget_control_block(context)
        self._control_blocks.clear()
        self._blocks.clear()

        def give_back() -> None:
            for address in blocks:
                arena.free(address)
            # If a rank has died while it had the lock, that is reported: the world fails, and its memory ends with it.
            with contextlib.suppress(AsyncollError):
                for context in made:
                    arena.free_control_block(context)

        return give_back
