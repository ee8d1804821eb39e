"""Elementwise reductions: the compiled kernels have the bits of numpy and torch, and the laws hold for both."""

from __future__ import annotations

import functools
import platform

import numpy as np
import pytest
import torch

from asyncoll import UsageError
from asyncoll._core import native
from asyncoll.tensors.reductions import (
    BFLOAT16,
    DTYPES,
    ReduceOp,
    check_reduction,
    reducer,
    reducer_in_python,
    storage,
)
from tests.support.properties import given, settings, st

HALVES = ("float16", BFLOAT16)
FLOATS = ("float64", "float32", *HALVES)
MANTISSAS = {"float64": 52, "float32": 23, "float16": 10, BFLOAT16: 7}
ORDERS = (ReduceOp.MIN, ReduceOp.MAX)
BLOCK = 4096  # bytes: longer arrays are reduced block by block

needs_core = pytest.mark.skipif(native is None, reason="needs the compiled core")
lengths = st.one_of(st.sampled_from([0, 1, 2, 7, 15, 16, 17, 63, BLOCK // 2 + 1, BLOCK + 3]), st.integers(0, 70))


def is_defined(op, dtype):
    try:
        check_reduction(op, dtype, in_rounds=True)
    except UsageError:
        return False
    return True


PAIRS = [(op, dtype) for op in ReduceOp for dtype in DTYPES if is_defined(op, dtype)]
COMPILED = [(op, dtype) for op, dtype in PAIRS if not dtype.startswith("complex")]
REDUCERS = [reducer_in_python, reducer]


def bits_type(dtype):
    return np.dtype(f"u{storage(dtype).itemsize}")


def special_bits(dtype):
    """Zeros, subnormals, limits, infinities, and quiet and signalling NaN, of both signs; for integers the limits."""
    unsigned = bits_type(dtype)
    width, top = unsigned.itemsize * 8, np.iinfo(unsigned).max
    if dtype == "bool":
        return np.array([0, 1], unsigned)
    if dtype not in FLOATS:
        return np.array([0, 1, 2, 3, top, top - 1, top // 2, top // 2 + 1], unsigned)
    mantissa = MANTISSAS[dtype]
    infinite = (1 << (width - 1)) - (1 << mantissa)
    one = (1 << (width - 2)) - (1 << mantissa)
    quiet = infinite + (1 << (mantissa - 1))
    nans = [infinite + 1, quiet, quiet + 5, infinite + (1 << mantissa) - 1]
    positive = [0, 1, (1 << mantissa) - 1, 1 << mantissa, one, one + 1, infinite - 1, infinite, *nans]
    return np.array([*positive, *(each | 1 << (width - 1) for each in positive)], unsigned)


def is_nan(bits, dtype):
    if dtype not in FLOATS:
        return np.zeros(bits.shape, bool)
    width, mantissa = bits.dtype.itemsize * 8, MANTISSAS[dtype]
    infinite = (1 << (width - 1)) - (1 << mantissa)
    return (bits & ((1 << (width - 1)) - 1)) > infinite


def draw_bits(generator, dtype, shape):
    """Of each operand a third special values, a third any bits, a third numbers near one another."""
    unsigned = bits_type(dtype)
    if dtype == "bool":
        return generator.integers(0, 2, shape).astype(unsigned)
    special = generator.choice(special_bits(dtype), shape)
    any_bits = np.frombuffer(generator.bytes(int(np.prod(shape)) * unsigned.itemsize), unsigned).reshape(shape)
    near = special_bits(dtype)[4] + generator.integers(0, 100, shape).astype(unsigned)
    return np.choose(generator.integers(0, 3, shape), [special, any_bits, near])


def place(bits, dtype, offset):
    """A copy of `bits` as an array of `dtype` that begins `offset` bytes after an aligned address."""
    raw = np.zeros(bits.nbytes + 64, np.uint8)[offset : offset + bits.nbytes]
    raw[...] = bits.reshape(-1).view(np.uint8)
    return raw.view(storage(dtype))


def undetermined(op, dtype, operands, result):
    """Where numpy or torch give bits that depend on the position of an element, or on the processor.

    `operands` are the bits, one row for each rank, and `result` those of the reduction.
    """
    nan = is_nan(result, dtype)
    if op in ORDERS:
        zeros = (operands << 1) == 0
        is_exact = dtype not in HALVES and platform.machine() == "x86_64"
        return np.full(nan.shape, not is_exact) & (nan | ((result << 1 == 0) & (zeros.sum(0) > 1)))
    # Of two NaN that meet either may be the result. One of them may come from infinities of both signs, or inf * 0.
    nans = is_nan(operands, dtype)
    neutral = 0 if op is not ReduceOp.PROD else special_bits(dtype)[4]
    others = [place(row, dtype, 0) for row in np.where(nans, neutral, operands).astype(operands.dtype)]
    of_others = np.empty(result.shape, storage(dtype))
    reducer_in_python(op, dtype)(of_others, others, 1)
    meet = (nans.sum(0) > 1) | ((nans.sum(0) == 1) & is_nan(of_others.view(result.dtype), dtype))
    return nan & (meet | (dtype in HALVES))


def same_bits(op, dtype, operands, expected, found):
    """Whether the bits are equal; where they are undetermined, whether the values are."""
    equal = expected == found
    if dtype not in FLOATS:
        return equal.all()
    both_nan = is_nan(expected, dtype) & is_nan(found, dtype)
    both_zero = (expected << 1 == 0) & (found << 1 == 0)
    return np.where(undetermined(op, dtype, operands, expected), equal | both_nan | both_zero, equal).all()


def divisor_of(op, dtype, count):
    return count if op in (ReduceOp.AVG, ReduceOp.AVG_ACTIVE) else 1


@needs_core
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if not dtype.startswith("complex")])
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 17),
    length=lengths,
    offset=st.integers(0, 9),
    in_place=st.booleans(),
)
def test_compiled_kernels_have_the_bits_of_numpy_and_torch(dtype, portable, seed, count, length, offset, in_place):
    generator = np.random.default_rng(seed)
    operands = draw_bits(generator, dtype, (count, length))
    for op in [op for op, each in COMPILED if each == dtype]:
        divisor = divisor_of(op, dtype, count)
        expected = np.empty(length, storage(dtype))
        reducer_in_python(op, dtype)(expected, [place(row, dtype, 0) for row in operands], divisor)
        arrays = [place(row, dtype, (offset * rank) % 11) for rank, row in enumerate(operands)]
        into = arrays[0] if in_place else place(operands[0], dtype, offset)
        native.reduce(native.find_kernel(op.value, dtype, portable), into, arrays, divisor)
        bits = bits_type(dtype)
        found = np.frombuffer(into.tobytes(), bits)
        assert same_bits(op, dtype, operands, expected.view(bits), found), op
        assert [array.tobytes() for array in arrays[in_place:]] == [row.tobytes() for row in operands[in_place:]]
        arrays = [place(row, dtype, (offset * rank) % 11) for rank, row in enumerate(operands)]
        native.reduce_to_all(native.find_kernel(op.value, dtype, portable), arrays, divisor)
        assert {array.tobytes() for array in arrays} == {found.tobytes()}


@needs_core
@pytest.mark.parametrize("portable", [False, True])
def test_all_numbers_of_half_types_are_widened_and_rounded_as_torch_does(portable):
    """All halves are among the operands; their sums and products lie between halves, on ties and beyond the limits."""
    every = np.arange(1 << 16, dtype=np.uint16)
    for dtype in HALVES:
        for op in (ReduceOp.SUM, ReduceOp.PROD):
            for shift in (1, 255, 31_000):
                operands = np.stack([every, np.roll(every, shift)])
                expected = np.empty_like(every)
                reducer_in_python(op, dtype)(expected.view(storage(dtype)), [*operands.view(storage(dtype))], 1)
                found = np.empty_like(every)
                native.reduce(native.find_kernel(op.value, dtype, portable), found, [*operands], 1)
                assert same_bits(op, dtype, operands, expected, found)


@needs_core
def test_the_core_has_kernels_for_all_dtypes_but_complex_ones():
    assert {pair for pair in PAIRS if native.find_kernel(pair[0].value, pair[1])} == set(COMPILED)
    assert native.find_kernel("sum", "object") == native.find_kernel("mean", "int8") == 0
    assert native.find_kernel("avg", "int8") == native.find_kernel("band", "float32") == 0


@needs_core
def test_operands_are_checked():
    number, x = native.find_kernel("sum", "float32"), np.zeros(4, np.float32)
    reduce = native.reduce
    for kernel in (-1, 0, 10_000):
        with pytest.raises(ValueError, match="kernel"):
            reduce(kernel, x, [x], 1)
    with pytest.raises(ValueError, match="divisor"):
        reduce(number, x, [x], 0)
    with pytest.raises(ValueError, match="at least one"):
        reduce(number, x, [], 1)
    for other in (np.zeros(5, np.float32), np.zeros(3, np.float32)):
        with pytest.raises(ValueError, match="same size"):
            reduce(number, x, [x, other], 1)
    raw = np.zeros(7, np.uint8)
    with pytest.raises(ValueError, match="whole elements"):
        reduce(number, raw, [raw], 1)
    with pytest.raises(ValueError, match="contiguous"):
        reduce(number, x, [x, np.zeros(8, np.float32)[::2]], 1)
    with pytest.raises(ValueError, match="kernel"):
        native.reduce_to_all(0, [x], 1)
    with pytest.raises(IndexError):
        native.reduce_to_all(number, [], 1)
    with pytest.raises(ValueError, match="same size"):
        native.reduce_to_all(number, [x, np.zeros(5, np.float32)], 1)
    frozen = np.zeros(4, np.float32)
    frozen.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        native.reduce_to_all(number, [x, frozen], 1)
    with pytest.raises((ValueError, BufferError), match="read-only"):
        reduce(number, frozen, [x], 1)
    reduce(number, x, [frozen, x + 1], 1)
    assert x.tolist() == [1.0] * 4


@pytest.mark.parametrize("make", REDUCERS)
@pytest.mark.parametrize("dtype", ["float32", "int64", "complex64"])
def test_reductions_go_in_the_order_of_the_arrays(make, dtype):
    """Of many arrays, into the first of them and into another array; longer than one block, and at odd addresses."""
    generator = np.random.default_rng(1)
    for count in (1, 2, 3, 17):
        values = (generator.standard_normal((count, 3000)) * 10.0 ** generator.integers(0, 9, (count, 3000))).astype(
            dtype
        )
        rows = [place(row, dtype, 1) for row in values]
        expected = functools.reduce(np.add, values)
        into = np.empty_like(expected)
        make(ReduceOp.SUM, dtype)(into, rows, 1)
        make(ReduceOp.SUM, dtype)(rows[0], rows, 1)
        assert into.tobytes() == rows[0].tobytes() == expected.tobytes()


@pytest.mark.parametrize("make", REDUCERS)
def test_averages_are_divided_once(make):
    for dtype in FLOATS:
        for op in (ReduceOp.AVG, ReduceOp.AVG_ACTIVE):
            ones = [torch.full((5,), value).to(getattr(torch, dtype)) for value in (1.0, 2.0, 4.0)]
            arrays = [
                (each.view(torch.int16) if dtype == BFLOAT16 else each).numpy().view(storage(dtype)) for each in ones
            ]
            make(op, dtype)(arrays[0], arrays, 3)
            third = torch.tensor(7.0, dtype=torch.float64 if dtype == "float64" else torch.float32) / 3
            assert torch.equal(ones[0], third.to(ones[0].dtype).expand(5))


@pytest.mark.parametrize("make", REDUCERS)
def test_halves_do_not_overflow_between_operands(make):
    arrays = [np.full(3, value, np.float16) for value in (60000, 60000, -60000)]
    make(ReduceOp.SUM, "float16")(arrays[0], arrays, 1)
    assert arrays[0].tolist() == [60000] * 3


@pytest.mark.parametrize("make", REDUCERS)
def test_bools_are_reduced_as_truth_values(make):
    truth = {
        "SUM": any,
        "MAX": any,
        "BOR": any,
        "PROD": all,
        "MIN": all,
        "BAND": all,
        "BXOR": lambda x: sum(x) % 2 == 1,
    }
    rows = np.array([[bool(number >> rank & 1) for number in range(8)] for rank in range(3)])
    for name, expected in truth.items():
        into = np.empty(8, bool)
        make(ReduceOp[name], "bool")(into, list(rows), 1)
        assert into.tolist() == [expected(rows[:, i].tolist()) for i in range(8)]


@needs_core
def test_the_reducer_is_compiled_where_there_is_a_kernel():
    for op, dtype in PAIRS:
        assert isinstance(reducer(op, dtype), functools.partial) == ((op, dtype) in COMPILED)
