"""The allocator of a segment: blocks never overlap, and freed blocks can be allocated again."""

from __future__ import annotations

import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from asyncoll.transport.memory.heap import ALIGNMENT, Heap
from tests.support.properties import st

PAGE = 4096
START, END = PAGE, 40 * PAGE


class HeapMachine(RuleBasedStateMachine):
    """Compares a heap with a plain list of the blocks in use."""

    def __init__(self):
        super().__init__()
        self.heap = Heap(START, END, PAGE)
        self.blocks: list[tuple[int, int]] = []

    @rule(nbytes=st.one_of(st.integers(0, 300), st.integers(PAGE - 1, 9 * PAGE)))
    def allocate(self, nbytes):
        try:
            offset = self.heap.allocate(nbytes)
        except MemoryError:
            assert self.largest_gap() < nbytes + 2 * PAGE, "a free extent was large enough, with alignment"
            return
        assert self.heap.extent(offset) >= nbytes
        self.blocks.append((offset, self.heap.extent(offset)))

    @rule(data=st.data())
    def free(self, data):
        if self.blocks:
            offset, _ = self.blocks.pop(data.draw(st.integers(0, len(self.blocks) - 1)))
            self.heap.free(offset)

    @invariant()
    def blocks_are_apart_and_aligned(self):
        ends = START
        for offset, nbytes in sorted(self.blocks):
            assert ends <= offset
            alignment = PAGE if nbytes >= PAGE else ALIGNMENT
            assert offset % alignment == 0
            assert nbytes % alignment == 0
            ends = offset + nbytes
        assert ends <= END

    def teardown(self):
        for offset, _ in self.blocks:
            self.heap.free(offset)
        assert self.heap.allocate(END - START) == START, "all free extents are merged"

    def largest_gap(self):
        edges = [START, *(edge for offset, nbytes in sorted(self.blocks) for edge in (offset, offset + nbytes)), END]
        return max(end - begin for begin, end in zip(edges[::2], edges[1::2], strict=True))


test_heap = HeapMachine.TestCase


def test_a_block_cannot_be_freed_twice():
    heap = Heap(START, END, PAGE)
    offset = heap.allocate(10)
    heap.free(offset)
    with pytest.raises(KeyError):
        heap.free(offset)
