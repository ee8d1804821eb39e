"""Reductions by pieces, with the compiled core, without it, and with both kinds of ranks in one world."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Coroutine, Iterator, Sequence
from types import ModuleType

import numpy as np
import pytest

from asyncoll import UsageError, _core
from asyncoll.algorithms.dense.pieces import needed
from asyncoll.algorithms.dense.rendezvous import RendezvousArea
from asyncoll.algorithms.dense.shared_call import SharedCall
from asyncoll.algorithms.dense.tuning import Sizes
from asyncoll.tensors.reductions import ReduceOp, reducer_in_python, storage
from asyncoll.transport.memory.arena import local_world
from tests.support.properties import given, settings, st

CORES: dict[str, list[ModuleType | None]] = {"python": [None]}
if _core.native is not None:
    CORES |= {"c": [_core.native], "mixed": [_core.native, None], "mixed, python first": [None, _core.native]}
cores = pytest.mark.parametrize("natives", CORES.values(), ids=CORES)
CALLS = 2


@contextlib.contextmanager
def rendezvous_areas(
    size: int, natives: Sequence[ModuleType | None], piece: int, private_max: int = 0, whole: int = 0
) -> Iterator[list[RendezvousArea]]:
    sizes = Sizes(short=64, chunk=256, window=256, piece=piece, whole=whole, private_max=private_max, calls=CALLS)
    with local_world(size, natives) as arenas:
        yield [RendezvousArea(arena, size, rank, 7, sizes) for rank, arena in enumerate(arenas)]


def refuse(nbytes: int) -> tuple[int, int]:
    raise UsageError("there is no room")


def interleave(coroutines: Sequence[Coroutine], draw: random.Random) -> None:
    """Run all to their ends. Whenever one waits, any one whose condition is met goes on."""
    waits = dict.fromkeys(coroutines)
    while waits:
        ready = [each for each, wait in waits.items() if wait is None or wait.ready()]
        assert ready, "all wait for one another"
        coroutine = draw.choice(ready)
        try:
            waits[coroutine] = coroutine.send(None)
        except StopIteration:
            del waits[coroutine]


@cores
@settings(max_examples=25)
@given(
    size=st.sampled_from([1, 2, 3, 4, 5, 8, 9, 13]),
    dtype=st.sampled_from(["float32", "float64", "int16", "uint8", "bfloat16", "complex64"]),
    count=st.integers(65, 3000),
    piece=st.sampled_from([64, 192, 1024, 4096]),
    roots=st.lists(st.integers(-1, 12), min_size=1, max_size=6),
    op=st.sampled_from([ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PROD]),
    whole=st.sampled_from([0, 1 << 12]),
    without_room=st.integers(-13, 12),
    seed=st.integers(0, 2**32),
)
def test_each_rank_gets_the_reduction_in_the_order_of_ranks_however_they_interleave(
    natives, size, dtype, count, piece, roots, op, whole, without_room, seed
):
    """Of several calls one after another, each an allreduce (-1) or a reduce to a root. Ranks may be calls apart.

    Whole arrays may be copied; there may be a rank that has no room for them.
    """
    if op is ReduceOp.AVG and dtype in ("int16", "uint8"):
        op = ReduceOp.SUM
    generator = np.random.default_rng(seed)
    given = [[generator.integers(0, 99, count).astype(storage(dtype)) for _ in range(size)] for _ in roots]
    mine = [[x.copy() for x in call] for call in given]

    async def rank(area):
        for number, root in enumerate(roots):
            area.begin(number)
            call, x = SharedCall(area, number, 5), mine[number][area.rank]
            if root < 0:
                await call.allreduce(x, op, dtype)
            else:
                await call.reduce(x, op, dtype, root % size)
            area.end(number)

    with rendezvous_areas(size, natives, piece, whole=whole) as areas:
        if 0 <= without_room < size:
            areas[without_room].block = refuse
        interleave([rank(area) for area in areas], random.Random(seed))
    for number, root in enumerate(roots):
        expected = np.empty_like(given[number][0])
        reducer_in_python(op, dtype)(expected, given[number], size if op is ReduceOp.AVG else 1)
        for each in range(size):
            wanted = root < 0 or root % size == each
            assert mine[number][each].tobytes() == (expected if wanted else given[number][each]).tobytes()


@pytest.mark.parametrize("size", [2, 3])
def test_no_half_is_written_while_it_is_read(size):
    """In every state that ranks can reach: a rank may be in the middle of a step while others go on."""
    pieces = 4
    states, seen = [(0,) * size], set()
    while states:
        steps = states.pop()
        if steps in seen:
            continue
        seen.add(steps)
        at_work = [rank for rank, step in enumerate(steps) if step < 3 * pieces and min(steps) >= needed(step)]
        assert at_work or min(steps) == 3 * pieces
        for writer in at_work:
            index, kind = divmod(steps[writer], 3)
            for reader in at_work:
                read, how = divmod(steps[reader], 3)
                if reader != writer and how != 0:  # it reads the slots of all ranks, of piece `read`
                    assert not (kind == 0 and (index + 1 - read) % 2 == 0 and index + 1 < pieces), steps
                    assert not (kind == 1 and how == 2 and index == read), steps
        states += [tuple(step + (rank == mover) for rank, step in enumerate(steps)) for mover in at_work]


@pytest.mark.skipif(_core.native is None, reason="needs the compiled core")
def test_the_compiled_steps_check_what_they_are_given():
    with rendezvous_areas(2, [_core.native], 256) as areas:
        block = areas[0].control_block
        array, slots = np.zeros(600, np.uint8), [np.zeros(512, np.uint8) for _ in range(2)]
        good = {"first": 0, "stride": 4, "rank": 0, "slots": slots, "array": array, "piece": 256, "kernel": 1}
        make = lambda **other: _core.native.Pieces(block, *(good | other).values(), 1, True, 1)  # noqa: E731
        assert make().perform(0, 9) == 2  # it stops before the step that needs the other rank's share
        kernels = _core.native.find_kernel("sum", "float64"), _core.native.find_kernel("sum", "float32")
        assert make(kernel=kernels[0])
        frozen = np.zeros(600, np.uint8)
        frozen.flags.writeable = False
        for wrong in (
            {"first": -1},
            {"first": 10**6},
            {"stride": 0},
            {"stride": 10**6},
            {"rank": 2},
            {"rank": -1},
            {"slots": []},
            {"slots": [slots[0], slots[1][:511]]},
            {"array": array[:599]},
            {"array": frozen},
            {"piece": 0},
            {"piece": 100},
            {"kernel": 0},
            {"kernel": 10**6},
        ):
            with pytest.raises((ValueError, BufferError)):
                make(**wrong)
        with pytest.raises(TypeError):
            _core.native.Pieces(object(), *good.values(), 1, True, 1, 1)
        with pytest.raises(ValueError, match="control block"):
            _core.native.Pieces(object(), *good.values(), 1, True, 1)
        assert make().perform(-1, 9) == -1
        assert make().perform(10**6, 10**9) == 10**6
        assert make().perform(0, 1) == 1
