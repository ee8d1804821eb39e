"""Messages of each tag are numbered exactly, in memory that does not grow with tags that count steps."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections import Counter

import numpy as np

from asyncoll.runtime.numbering import Numbering
from asyncoll.testing import run_ranks
from tests.support.cases import looped
from tests.support.properties import given, st

LEAST, GREATEST = -(1 << 63), (1 << 63) - 1
near = st.sampled_from([*range(-4, 9), LEAST, LEAST + 1, LEAST + 2, GREATEST - 2, GREATEST - 1, GREATEST])


@given(st.lists(near, max_size=120), st.integers(0, 4))
def test_each_tag_has_its_own_count(tags, recent):
    expected, numbers = Counter(), Numbering(recent)
    for tag in tags:
        expected[tag] += 1
        assert numbers.next(tag) == expected[tag]


@looped("seed", range(3))
def test_runs_of_tags_are_cut_and_joined(seed):
    """Ranges of tags that overlap: a merge cuts older runs, and removes some of them."""
    draw, expected, numbers = random.Random(seed), Counter(), Numbering(16)
    for _ in range(3000):
        first = draw.randrange(300)
        for tag in range(first, first + draw.randrange(1, 8)):
            expected[tag] += 1
            assert numbers.next(tag) == expected[tag]


def test_tags_that_count_steps_take_no_memory():
    """A dict entry for each tag would take 150 bytes for ever, at both ends."""

    async def main(comm):
        async def pass_on(tags):
            for tag in tags:
                if comm.rank == 0:
                    await comm.send(np.ones(1), 1, tag)
                else:
                    await comm.recv(np.ones(1), 0, tag)
            await comm.barrier()

        await pass_on(range(1100))  # fills all caches of bounded size
        grown = []
        for first in range(1100, 3200, 700):
            before = traced()
            await pass_on(range(first, first + 700))
            grown.append(traced() - before)
        return min(grown)  # recent tags have dict entries until they are merged, some time in a later pass

    tracemalloc.start(1)
    try:
        grown = run_ranks(2, main)
    finally:
        tracemalloc.stop()
    assert max(grown) < 2 * 700 * 30  # at both ranks together


def traced() -> int:
    """The bytes of memory that Python has allocated."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]
