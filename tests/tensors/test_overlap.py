"""Results go into tensors of any strides, but into none whose elements overlap."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import as_strided

from asyncoll.errors import UsageError
from asyncoll.testing import run_ranks
from tests.support.properties import example, given, st

REFUSED = "its elements overlap"
ROOM = 64  # elements of two bytes: four axes reach at most 4 * 3 * 7 of them or bytes in either direction
AXES = st.lists(st.tuples(st.integers(0, 4), st.integers(-7, 7)), max_size=4)
CALLS = {
    "allreduce": lambda comm, x: comm.allreduce(x),
    "broadcast": lambda comm, x: comm.broadcast(x),
    "recv": lambda comm, x: comm.recv(x, 1 - comm.rank),
}
OVERLAPPING = {
    "numpy": lambda: as_strided(np.arange(4.0), (3, 2), (8, 8)),
    "numpy, stride 0": lambda: as_strided(np.arange(1.0), (3,), (0,)),
    "numpy, part of an element": lambda: as_strided(np.arange(4.0), (3,), (4,)),
    "numpy, odd strides": lambda: as_strided(np.arange(13.0), (4, 3), (16, 24)),
    "torch": lambda: torch.arange(4.0).as_strided((3, 2), (1, 1)),
    "torch, odd strides": lambda: torch.arange(13.0).as_strided((4, 3), (2, 3)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("make", OVERLAPPING)
def test_a_result_into_overlapping_elements_is_refused(make, call):
    async def main(comm):
        x = OVERLAPPING[make]()
        with pytest.raises(UsageError, match=REFUSED):
            await CALLS[call](comm, x)
        return x

    for x in run_ranks(2, main):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(OVERLAPPING[make]()))  # and it is as it was


def places(axes):
    """The place of each element relative to that of index 0, counted one by one."""
    indices = itertools.product(*(range(size) for size, _ in axes))
    return [sum(i * stride for i, (_, stride) in zip(index, axes, strict=True)) for index in indices]


def check(make, does_overlap):
    """A result goes into what `make` makes, unless its elements overlap."""

    async def main(comm):
        x = make()
        if not does_overlap:
            doubled = 2 * np.asarray(x)
            np.testing.assert_array_equal(np.asarray(await comm.allreduce(x)), doubled)
            return
        with pytest.raises(UsageError, match=REFUSED):
            await comm.allreduce(x)

    run_ranks(2, main)


@given(AXES)
@example([(3, 4), (2, 6)])  # odd strides without overlap
@example([(4, 4), (3, 6)])
@example([(1, 0), (3, 2)])  # an axis of size 1 may have any stride
@example([(0, 0), (3, 0)])
def test_numpy_arrays_of_any_strides(axes):
    """Strides in bytes: elements of two bytes may overlap by one."""
    shape, strides = [size for size, _ in axes], [stride for _, stride in axes]
    nbytes = [place + byte for place in places(axes) for byte in range(2)]

    def make():
        memory = np.ones(2 * ROOM, np.int16)
        return as_strided(memory[ROOM:], shape, strides)

    check(make, len(set(nbytes)) < len(nbytes))


@given(AXES)
@example([(4, 2), (2, 3)])
@example([(4, 2), (3, 3)])
@example([(1, 0), (3, 1)])
@example([(0, 0), (3, 0)])
def test_torch_tensors_of_any_strides(axes):
    axes = [(size, abs(stride)) for size, stride in axes]  # torch has no negative ones
    shape, strides = [size for size, _ in axes], [stride for _, stride in axes]
    found = places(axes)
    check(lambda: torch.ones(2 * ROOM, dtype=torch.int16).as_strided(shape, strides), len(set(found)) < len(found))
