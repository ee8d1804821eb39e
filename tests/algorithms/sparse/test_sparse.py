"""Sparse allreduces: laws at every element of every round, words against closed forms, and bad input.

The laws: the sum of all accumulators is the result plus all residuals plus what gTopk loses; all ranks get the same
bits; an accumulator is 0 exactly where its values are in the sum, and keeps its bits elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import threading
from functools import partial
from itertools import cycle, pairwise

import numpy as np
import pytest
import torch

from asyncoll import AbortedError, DeviceError, Feedback, MismatchError, NonFiniteError, UsageError
from asyncoll.algorithms.dense import on_lane
from asyncoll.algorithms.dense.on_lane import bounds
from asyncoll.algorithms.seam.call import Call
from asyncoll.algorithms.sparse import oktopk, selection
from asyncoll.algorithms.sparse import parts as algorithms
from asyncoll.algorithms.sparse.sparse_operations import ALGORITHMS
from asyncoll.runtime.signature import site_outside
from asyncoll.statistics import WORD_BYTES, Ledger, Traffic
from asyncoll.testing import FakeDevice, Network, fake_device, run_ranks, simulate
from tests.support.cases import SIZES, looped
from tests.support.emulated_cuda import emulated_cuda
from tests.support.properties import example, given, settings, st
from tests.support.ranks import failures as failures_in

sizes = pytest.mark.parametrize("size", SIZES)
algorithm_names = pytest.mark.parametrize("algorithm", ALGORITHMS)
JITTERY = Network(latency_s=1e-5, jitter_s=5e-5)


# -- the laws ------------------------------------------------------------------------------------


class Round:
    """The accumulators of every rank before a round and after it, and the results."""

    def __init__(self, befores, afters, reductions):
        self.before = np.stack(befores)
        self.after = np.stack(afters)
        self.reductions = reductions

    def dense(self, indices, values) -> np.ndarray:
        whole = np.zeros(self.before.shape[1])
        whole[indices] = values
        return whole

    @property
    def result(self) -> np.ndarray:
        return self.dense(self.reductions[0].indices, self.reductions[0].values)


async def play(comm, gradients, keep=True, **options) -> list:
    """The rounds of one rank: a residual, and a gradient on top of it in each."""
    x = np.zeros_like(gradients[0][0])
    story = []
    for gradient in gradients:
        x = x + gradient[comm.rank] if keep else gradient[comm.rank].copy()
        before = x.copy()
        reduction = await comm.sparse_allreduce(x, **options)
        story.append((before, x.copy(), reduction))
    return story


def rounds_of(stories) -> list[Round]:
    return [Round(*zip(*told, strict=True)) for told in zip(*stories, strict=True)]


def check_laws(round_: Round, number: int, algorithm: str, exact: bool) -> None:
    first = round_.reductions[0]
    count = round_.before.shape[1]
    lost = np.zeros(count)
    for before, after, reduction in zip(round_.before, round_.after, round_.reductions, strict=True):
        assert reduction.round == number
        assert reduction.indices.tobytes() == first.indices.tobytes()
        assert reduction.values.tobytes() == first.values.tobytes()
        assert reduction.threshold_global == first.threshold_global
        assert reduction.values.dtype == before.dtype
        for indices in (reduction.indices, reduction.included, reduction.lost_indices):
            assert indices.dtype == np.int32
            assert (np.diff(indices, prepend=-1) > 0).all()
            assert not indices.size or indices[-1] < count
        unchanged = before.copy()
        unchanged[reduction.included] = 0
        assert after.tobytes() == unchanged.tobytes()
        check_choice(before, reduction, algorithm)
        assert algorithm == "gtopk" or not reduction.lost_indices.size
        assert np.isin(reduction.lost_indices, first.indices).all()
        lost += round_.dense(reduction.lost_indices, reduction.lost_values)
    wanted = round_.before.sum(0, dtype=np.float64)
    found = round_.result + round_.after.sum(0, dtype=np.float64) + lost
    if exact:
        np.testing.assert_array_equal(found, wanted)
    else:
        scale = np.abs(round_.before).sum(0, dtype=np.float64)
        tiny = np.finfo(round_.before.dtype).smallest_subnormal
        assert (np.abs(found - wanted) <= len(round_.before) * (np.finfo(round_.before.dtype).eps * scale + tiny)).all()


def check_choice(before, reduction, algorithm: str) -> None:
    """A rank gives its largest elements, and clears those of them that are in the sum."""
    if algorithm == "dense":
        assert reduction.selected == reduction.included.size == before.size
        return
    given = selection.select(before, reduction.threshold_local).indices
    assert reduction.selected <= given.size
    assert np.isin(reduction.included, given).all()
    if reduction.selected == given.size:
        np.testing.assert_array_equal(reduction.included, np.intersect1d(given, reduction.indices))
    if algorithm == "oktopk":
        assert (np.abs(reduction.values) >= reduction.threshold_global).all()


def topk(x: np.ndarray, k: int) -> np.ndarray:
    """`x` with 0 everywhere except at the k largest elements; of equal ones, the first."""
    kept = np.zeros_like(x)
    order = np.argsort(-np.abs(x), kind="stable")[:k]
    kept[order] = x[order]
    return kept


def expected(algorithm: str, before: np.ndarray, k: int) -> np.ndarray:
    """The result of a round whose thresholds are exact, for whole numbers."""
    if algorithm == "dense":
        return before.sum(0, dtype=np.float64)
    total = np.stack([topk(row, k) for row in before]).sum(0, dtype=np.float64)
    if algorithm == "oktopk":
        threshold = np.sort(np.abs(total))[-k] if total.size >= k else 0
        return np.where(np.abs(total) >= threshold, total, 0)
    return topk(total, k) if algorithm == "gtopk" else total


def whole_numbers(size: int, count: int, rounds: int, top: int = 9) -> list[np.ndarray]:
    draw = np.random.default_rng([size, count, top])
    return [draw.integers(-top, top + 1, (size, count)).astype("f4") for _ in range(rounds)]


def densities(size: int) -> list[tuple[int, float]]:
    """Elements and density: fewer than ranks, dense enough for vectors, sparse enough to sort; none, one, k = n."""
    cases = [(max(size - 2, 1), 0.5), (200, 0.1), (4000, 0.0005)]
    return cases if size > 9 else [(0, 0.5), (1, 1.0), (60, 1.0), *cases]


@sizes
def test_every_law_to_the_bit_with_whole_numbers(size, run):
    cases = [(algorithm, *case) for algorithm in ALGORITHMS for case in densities(size)]
    gradients = {count: whole_numbers(size, count, 4, 9 if count < 4000 else 9999) for _, count, _ in cases}

    async def main(comm):
        return [
            await play(
                comm,
                gradients[count][: 4 if algorithm == "oktopk" else 1],
                density=density,
                algorithm=algorithm,
                name=f"{algorithm} {count} {density}",
                thresholds_every=3,
                regions_every=2,
            )
            for algorithm, count, density in cases
        ]

    for (algorithm, count, density), stories in zip(cases, zip(*run(size, main), strict=True), strict=True):
        k = max(1, round(density * count))
        for number, round_ in enumerate(rounds_of(stories), 1):
            check_laws(round_, number, algorithm, exact=True)
            is_exact = (algorithm != "oktopk" or number in (1, 4)) and algorithm != "gaussiank"
            if is_exact and (algorithm != "gtopk" or size <= 2):
                np.testing.assert_array_equal(round_.result, expected(algorithm, round_.before, k))
            if algorithm == "gtopk":
                assert round_.reductions[0].indices.size <= k
            if density == 1.0 and is_exact:
                np.testing.assert_array_equal(round_.result, round_.before.sum(0, dtype=np.float64))


KINDS = ("normal", "zeros", "zeros at some", "equal", "scales", "denormal", "skewed", "signed zeros", "cancelling")


def gradient(kind: str, draw: np.random.Generator, size: int, count: int, dtype: str) -> np.ndarray:
    x = draw.standard_normal((size, count))
    if kind == "zeros":
        x[:] = 0
    elif kind == "zeros at some":
        x[draw.random(size) < 0.5] = 0
    elif kind == "equal":
        x[:] = 3
    elif kind == "scales":
        x *= 10.0 ** draw.integers(-12, 12)
    elif kind == "denormal":
        x *= float(np.finfo(dtype).smallest_subnormal) * 9
    elif kind == "skewed":
        x[:, : 1 + count // (2 * size)] *= 1e3
    elif kind == "signed zeros":
        x = np.where(x > 0, x, -0.0)
    elif kind == "cancelling":
        x = np.broadcast_to(x[:1] if size else x, x.shape) * np.where(np.arange(size) % 2, -1, 1)[:, None]
    return x.astype(dtype)


@st.composite
def worlds(draw):
    rounds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=5))
    return {
        "size": draw(st.sampled_from(SIZES)),
        "count": draw(st.sampled_from([0, 1, 2, 7, 40, 333, 3000])),
        "density": draw(st.sampled_from([1.0, 0.3, 0.02, 0.001])),
        "algorithm": draw(st.sampled_from(("oktopk", "oktopk", *ALGORITHMS))),
        "dtype": draw(st.sampled_from(["f4", "f8"])),
        "kinds": rounds,
        "keep": draw(st.booleans()),
        "feedback": draw(st.sampled_from([None, Feedback(), Feedback(0.75, 1.25, 1.3)])),
        "thresholds_every": draw(st.sampled_from([1, 3, 32])),
        "regions_every": draw(st.sampled_from([1, 2, 64])),
        "global_threshold": draw(st.sampled_from(["histogram", "allgather"])),
        "in_memory": draw(st.booleans()),
        "hosts": draw(st.sampled_from([1, 1, 2, 3, 5])),
        "seed": draw(st.integers(0, 99)),
    }


@settings(max_examples=30)
@given(worlds())
@example(
    {
        "size": 5,
        "count": 333,
        "density": 0.3,
        "algorithm": "oktopk",
        "dtype": "f4",
        "kinds": ["zeros", "normal", "scales", "zeros at some", "denormal"],
        "keep": False,
        "feedback": Feedback(),
        "thresholds_every": 32,
        "regions_every": 64,
        "global_threshold": "histogram",
        "in_memory": True,
        "hosts": 2,
        "seed": 1,
    }
)
def test_every_law_in_any_world(world):
    draw = np.random.default_rng(world["seed"])
    size, algorithm = world["size"], world["algorithm"]
    gradients = [gradient(kind, draw, size, world["count"], world["dtype"]) for kind in world["kinds"]]
    options = ("density", "algorithm", "feedback", "thresholds_every", "regions_every", "global_threshold")
    kept = {option: world[option] for option in options}

    async def main(comm):
        return await play(comm, gradients, world["keep"], **kept)

    hosts = draw.integers(0, world["hosts"], size).tolist()
    stories = simulate(size, main, JITTERY, world["seed"], shared_memory=world["in_memory"], hosts=hosts).results
    for number, round_ in enumerate(rounds_of(stories), 1):
        check_laws(round_, number, algorithm, exact=False)


@looped("size", [1, 3, 8])
@pytest.mark.parametrize("feedback", [None, Feedback()])
def test_a_threshold_that_is_reused_selects_everything_or_nothing_after_a_jump(size, feedback, simulated):
    draw = np.random.default_rng(size)
    scales = [1, 1e6, 1e-6, 0, 1]
    gradients = [scale * draw.choice([-1, 1], (size, 100)) * draw.uniform(1, 2, (size, 100)) for scale in scales]

    async def main(comm):
        return await play(comm, gradients, keep=False, density=0.1, feedback=feedback, thresholds_every=32)

    rounds = rounds_of(simulated(size, main).results)
    for number, round_ in enumerate(rounds, 1):
        check_laws(round_, number, "oktopk", exact=False)
    selected = [[reduction.selected for reduction in round_.reductions] for round_ in rounds]
    assert selected[:4] == [[10] * size, [100] * size, [0] * size, [0] * size]
    local = [round_.reductions[0].threshold_local for round_ in rounds]
    factor = feedback.factor if feedback else 1
    assert local[1] == local[0]
    assert local[2] == pytest.approx(local[0] * factor)
    assert local[3] == pytest.approx(local[0])
    assert [round_.reductions[0].indices.size for round_ in rounds[1:4]] == [100, 0, 0]


def test_thresholds_and_regions_are_kept_for_their_periods(simulated, monkeypatch):
    gradients = [distinct(3, 200) * scale for scale in (1, 1.5, 2, 2.5, 3, 3.5)]
    cuts = []
    consensus = selection.consensus
    monkeypatch.setattr(selection, "consensus", lambda *given: cuts.append(1) or consensus(*given))

    async def main(comm):
        periods = {"thresholds_every": 2, "regions_every": 4}
        return await play(comm, gradients, keep=False, density=0.1, **periods)

    rounds = rounds_of(simulated(3, main).results)
    assert [round_.reductions[0].threshold_local for round_ in rounds] == [181, 181, 362, 362, 543, 543]
    thresholds = [round_.reductions[0].threshold_global for round_ in rounds]
    assert thresholds[::2] == thresholds[1::2]
    assert len(set(thresholds)) == 3
    assert len(cuts) == 2 * 3


@looped("size", [size for size in SIZES if size >= 5])
def test_sums_that_lie_in_one_region_are_spread_evenly_first(size, simulated, monkeypatch):
    """The regions are those of the first round; in the second, all sums above the threshold lie in the last one."""
    count = 100 * size
    gradients = whole_numbers(size, count, rounds=3)
    gradients[1][:, : -count // (4 * size)] = 0
    gradients[1][:, -count // (4 * size) :] *= 100

    async def main(comm):
        return await play(comm, gradients, keep=False, density=0.2, thresholds_every=32)

    triggers = []
    is_unbalanced = selection.is_unbalanced

    def spy(given):
        triggers.append((is_unbalanced(given), given.tolist()))
        return triggers[-1][0]

    monkeypatch.setattr(selection, "is_unbalanced", spy)
    spread = rounds_of(simulated(size, main).results)
    assert [fired for fired, _ in triggers] == [False] * size + [True] * size + [False] * size
    assert triggers[size][1][:-1] == [0] * (size - 1)
    for number, round_ in enumerate(spread, 1):
        check_laws(round_, number, "oktopk", exact=True)
    monkeypatch.setattr(selection, "is_unbalanced", lambda given: False)
    for one, other in zip(spread, rounds_of(simulated(size, main).results), strict=True):
        np.testing.assert_array_equal(one.result, other.result)
        np.testing.assert_array_equal(one.after, other.after)


@looped("size", [1, 2, 3, 6, 13])
@pytest.mark.parametrize(("thresholds_every", "regions_every"), [(1, 1), (3, 2)])
def test_results_do_not_depend_on_the_threshold_search_or_the_backend(size, thresholds_every, regions_every):
    draw = np.random.default_rng(size)
    gradients = [draw.standard_normal((size, 500)).astype("f4") for _ in range(4)]

    def bits(global_threshold, in_memory):
        async def main(comm):
            return await play(
                comm,
                gradients,
                density=0.05,
                thresholds_every=thresholds_every,
                regions_every=regions_every,
                global_threshold=global_threshold,
            )

        rounds = rounds_of(simulate(size, main, JITTERY, shared_memory=in_memory).results)
        return [
            (told.indices.tobytes(), told.values.tobytes(), told.threshold_local, told.threshold_global)
            for round_ in rounds
            for told in round_.reductions
        ]

    wanted = bits("histogram", False)
    assert bits("allgather", False) == bits("histogram", True) == bits("allgather", True) == wanted


@algorithm_names
def test_each_name_and_communicator_has_its_own_rounds(algorithm, run):
    async def main(comm):
        half = await comm.split(comm.rank % 2)
        told = []
        for where, name in ((comm, "a"), (comm, "b"), (half, "a"), (comm, "a")):
            x = np.ones(20, "f4")
            reduction = await where.sparse_allreduce(x, density=1, algorithm=algorithm, name=name)
            told.append((reduction.round, set(reduction.values.tolist())))
        return told

    for rank, told in enumerate(run(5, main)):
        assert told == [(1, {5.0}), (1, {5.0}), (1, {3.0 if rank % 2 == 0 else 2.0}), (2, {5.0})]


# -- tensors -------------------------------------------------------------------------------------

LAYOUTS = {
    "numpy f4": lambda: np.arange(-6, 6, dtype="f4"),
    "numpy f8": lambda: np.arange(-6, 6, dtype="f8"),
    "numpy f2": lambda: np.arange(-6, 6, dtype="f2"),
    "numpy big-endian": lambda: np.arange(-6, 6, dtype=">f4"),
    "numpy transposed": lambda: np.arange(-6.0, 6).reshape(3, 4).T,
    "numpy every other": lambda: np.arange(-12, 12, dtype="f4")[::2],
    "numpy reversed": lambda: np.arange(-6, 6, dtype="f2")[::-1],
    "numpy 0-d": lambda: np.array(3.0),
    "numpy empty": lambda: np.zeros((0, 3), "f4"),
    "torch f4": lambda: torch.arange(-6.0, 6).reshape(2, 6),
    "torch f8": lambda: torch.arange(-6.0, 6, dtype=torch.float64),
    "torch f2": lambda: torch.arange(-6.0, 6).half(),
    "torch bf16": lambda: torch.arange(-6.0, 6).bfloat16(),
    "torch bf16 column": lambda: torch.arange(-12.0, 12).bfloat16().reshape(12, 2)[:, 1],
    "torch transposed": lambda: torch.arange(-6.0, 6).reshape(3, 4).t(),
    "torch 0-d": lambda: torch.tensor(3.0).half(),
    "torch leaf": lambda: torch.arange(-6.0, 6).requires_grad_(),
    "torch empty": lambda: torch.zeros(0, 5).bfloat16(),
}


def plain(x) -> np.ndarray:
    return x.astype("f8") if isinstance(x, np.ndarray) else x.detach().double().numpy()


@looped("layout", LAYOUTS)
def test_every_layout_keeps_its_residual_in_place(layout, simulated):
    async def main(comm):
        told = []
        for name in ALGORITHMS:
            x = LAYOUTS[layout]()
            told.append((x, await comm.sparse_allreduce(x, density=0.4, algorithm=name, name=name, dense=True)))
        return told

    for ranks in zip(*simulated(3, main).results, strict=True):
        check_layout(LAYOUTS[layout], ranks)


def check_layout(build, ranks) -> None:
    residuals = np.zeros(plain(build()).shape)
    for x, reduction in ranks:
        original = build()
        assert type(x) is type(original)
        assert (x.dtype, x.shape) == (original.dtype, original.shape)
        told = [reduction.indices, reduction.values, reduction.included, reduction.lost_indices, reduction.lost_values]
        assert {type(one) for one in [*told, reduction.dense]} == {type(original)}
        wide = "float64" if original.dtype in (np.dtype("f8"), torch.float64) else "float32"
        names = [str(one.dtype).removeprefix("torch.") for one in [*told, reduction.dense]]
        assert names == ["int32", wide, "int32", "int32", wide, wide]
        assert {one.ndim for one in told} == {1}
        assert reduction.dense.shape == original.shape
        scattered = np.zeros(plain(original).size)
        scattered[plain(reduction.indices).astype(int)] = plain(reduction.values)
        np.testing.assert_array_equal(plain(reduction.dense).ravel(), scattered)
        expected_x = plain(original).copy()
        expected_x.ravel()[plain(reduction.included).astype(int)] = 0
        np.testing.assert_array_equal(plain(x), expected_x)
        residuals += plain(x)
        lost = np.zeros(plain(original).size)
        lost[plain(reduction.lost_indices).astype(int)] = plain(reduction.lost_values)
        residuals += lost.reshape(residuals.shape)
    np.testing.assert_array_equal(plain(reduction.dense) + residuals, len(ranks) * plain(build()))


def test_memory_between_the_elements_of_a_strided_tensor_is_unchanged(simulated):
    async def main(comm):
        base = np.ones((4, 4), "f4")
        await comm.sparse_allreduce(base[1:3, ::2], density=1)
        return base

    for base in simulated(2, main).results:
        assert base.sum() == 12
        assert not base[1:3, ::2].any()


def test_halves_are_summed_in_float32(simulated):
    async def main(comm):
        x = torch.tensor([256.0 if comm.rank == 0 else 1.0]).bfloat16()
        return [
            (await comm.sparse_allreduce(x.clone(), density=1, algorithm=algorithm, name=algorithm)).values.item()
            for algorithm in ALGORITHMS
        ]

    assert simulated(4, main).results == [[259.0] * len(ALGORITHMS)] * 4  # between two numbers that bfloat16 has


def test_large_parts_are_sent_in_pieces(simulated):
    """Larger than one window of shared memory, and than one message without a posted receive."""
    count = 700_000
    draw = np.random.default_rng(3)
    gradients = [draw.permuted(np.tile(np.arange(1.0, count + 1), (3, 1)), axis=1).astype("f4")]

    async def main(comm):
        return [
            await play(comm, gradients, density=density, algorithm=algorithm, name=f"{algorithm} {density}")
            for algorithm, density in (("oktopk", 0.6), ("topka", 0.6), ("topkdsa", 0.6), ("gtopk", 0.3), ("dense", 1))
        ]

    for stories, name in zip(
        zip(*simulated(3, main).results, strict=True), ("oktopk", "topka", "topkdsa", "gtopk", "dense"), strict=True
    ):
        for round_ in rounds_of(stories):
            wanted = round_.before.sum(0, dtype=np.float64)
            lost = sum(round_.dense(told.lost_indices, told.lost_values) for told in round_.reductions)
            np.testing.assert_array_equal(round_.result + round_.after.sum(0, dtype=np.float64) + lost, wanted)
            assert name == "gtopk" or not np.any(lost)


@looped("index", [np.int32, np.int64])
@looped("value", [np.float32, np.float64])
@looped("count", [0, 1, 2, 7])
def test_packed_parts_are_aligned_and_whole(index, value, count):
    part = algorithms.Part(np.arange(count, dtype=index) * 3, np.arange(count, dtype=value) / 7)
    packing = algorithms.SparsePacking(part)
    back = packing.unpack(packing.pack(part))
    assert packing.pack(part).size == count * packing.element_bytes
    for one, other in zip(back, part, strict=True):
        assert one.dtype == other.dtype
        assert one.flags.aligned
        np.testing.assert_array_equal(one, other)


@algorithm_names
def test_indices_are_int64_if_int32_is_too_small(algorithm, simulated, monkeypatch):
    """Vectors that need int64 do not fit into memory, so the test lowers the limit."""
    monkeypatch.setattr(selection, "index_dtype", lambda count: np.dtype(np.int64))
    gradients = whole_numbers(3, 300, rounds=2)

    async def main(comm):
        return [
            await play(comm, gradients, density=density, algorithm=algorithm, name=f"{density}")
            for density in (0.005, 0.4)
        ]

    for stories in zip(*simulated(3, main).results, strict=True):
        for round_ in rounds_of(stories):
            told = round_.reductions[0]
            assert {told.indices.dtype, told.included.dtype, told.lost_indices.dtype} == {np.dtype(np.int64)}
            lost = sum(round_.dense(told.lost_indices, told.lost_values) for told in round_.reductions)
            np.testing.assert_array_equal(round_.result + round_.after.sum(0) + lost, round_.before.sum(0))


# -- tensors of devices --------------------------------------------------------------------------


LAID_OUT = {
    "flat": lambda x: x,
    "strided": lambda x: x.repeat_interleave(2)[::2],
    "transposed": lambda x: x.view(3, -1).t().contiguous().t() if len(x) % 3 == 0 else x,
}


async def play_on_device(comm, device, gradients, layout, keep=True, **options) -> list:
    """As `play`, with the accumulator on a device, and work on two streams of it. Shows all as arrays."""
    story, x = [], None
    for gradient in gradients:
        if x is None or not keep:
            view = LAID_OUT[layout](torch.zeros(gradient.shape[1], dtype=torch.from_numpy(gradient).dtype))
            whole = view if view._base is None else view._base
            x = device.tensor(whole).as_strided(view.shape, view.stride())
        with device.stream("side"):
            device.compute(partial(add, gradient[comm.rank].reshape(x.shape)), x)
        before = device.values(x).reshape(-1)
        with device.stream("side"):
            device.compute(partial(add, 0), x)
            call = comm.sparse_allreduce(x, **options)
        reduction = await call
        with device.stream("side"):
            device.compute(partial(add, 0), x)
        device.compute(partial(add, 0), reduction.values)
        fields = {field.name: getattr(reduction, field.name) for field in dataclasses.fields(reduction)}
        tensors = {name: device.values(each).reshape(-1) for name, each in fields.items() if torch.is_tensor(each)}
        assert set(tensors) >= {"indices", "values", "included", "lost_indices", "lost_values"}
        story.append((before, device.values(x).reshape(-1), dataclasses.replace(reduction, **tensors)))
    return story


def add(values, x):
    np.add(x, values, out=x)


def bits(told) -> list:
    """A round of one rank to the bit, without its costs: in memory they depend on which rank comes last."""
    before, after, reduction = told
    fields = dataclasses.replace(
        reduction, words_sent=0, words_received=0, threshold_words=0, messages_sent=0, messages_received=0
    )
    return [x.tobytes() if isinstance(x, np.ndarray) else x for x in (before, after, *dataclasses.astuple(fields))]


@pytest.mark.parametrize(("size", "transport"), [(1, "inproc"), (2, "shm"), (3, "zmq"), (9, "inproc")])
def test_tensors_of_devices_have_the_bits_of_the_host(size, transport):
    layouts = ["flat", "strided", "transposed", "transposed", "flat"]
    cases = list(zip(ALGORITHMS * 2, [60, 333, 0, 1] * 9, cycle(["f4", "f8"]), cycle(layouts), strict=False))
    draw = np.random.default_rng(size)
    gradients = {
        dtype: [
            gradient("zeros at some", draw, size, 333, dtype),
            draw.choice([0, 1, -2, 2, 9], (size, 333), p=[0.3, 0.3, 0.2, 0.15, 0.05]).astype(dtype),
            *(gradient(kind, draw, size, 333, dtype) for kind in ("equal", "normal", "cancelling")),
        ]
        for dtype in ("f4", "f8")
    }

    with fake_device(size) as device:

        async def main(comm):
            stories = []
            for number, (algorithm, count, dtype, layout) in enumerate(cases):
                given = [each[:, :count] for each in gradients[dtype]]
                options = {"density": 0.1, "algorithm": algorithm, "thresholds_every": 3}
                options |= {"keep": number % 2 == 0, "dense": number % 2 == 1}
                on_host = await play(comm, given, name=f"{number}", **options)
                story = await play_on_device(comm, device, given, layout, name=f"{number} on a device", **options)
                assert [bits(told) for told in story] == [bits(told) for told in on_host], cases[number]
                stories.append(story)
            return stories

        told = run_ranks(size, main, transport)
    for (algorithm, *_), stories in zip(cases, zip(*told, strict=True), strict=True):
        for number, round_ in enumerate(rounds_of(stories), 1):
            check_laws(round_, number, algorithm, exact=False)


class Counting(FakeDevice):
    """Counts the bytes that the host fetches."""

    fetched = 0

    def fetch(self, mark, start, into):
        self.fetched += into.nbytes
        return super().fetch(mark, start, into)


@looped("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("algorithm", ["oktopk", "topka", "topkdsa", "gtopk"])
def test_a_device_gives_what_it_has_selected(algorithm, dtype):
    """An index, a value and the threshold, or the count of those that reach one; the other 99 % stay there."""
    count, k = 20_000, 200
    element_bytes = 12 if dtype is torch.float64 else 8
    with fake_device() as device:
        device.__class__ = Counting

        async def main(comm):
            draw = np.random.default_rng(comm.rank)
            for number in range(4):
                gradient = torch.from_numpy(draw.standard_normal(count)).to(dtype)
                before = device.fetched
                found = await comm.sparse_allreduce(
                    device.tensor(gradient), density=k / count, algorithm=algorithm, thresholds_every=3, dense=True
                )
                is_reused = algorithm == "oktopk" and number % 3
                assert found.selected == k or is_reused
                assert device.fetched - before == found.selected * element_bytes + (
                    8 if is_reused else element_bytes - 4
                )

        run_ranks(1, main)


@pytest.mark.parametrize("opened", [fake_device, emulated_cuda])
def test_a_selection_waits_for_no_work_that_is_queued_after_the_call(opened):
    with opened() as device:

        async def main(comm):
            for _ in range(2):  # the second one reuses the threshold, so it selects once it knows how many reach it
                x = device.tensor(torch.arange(1000.0))
                with device.stream("side"):
                    call = comm.sparse_allreduce(x, density=0.01, algorithm="oktopk", thresholds_every=3)
                    releases = [device.hold()]
                releases.append(device.hold())
                try:
                    async with asyncio.timeout(20):
                        found = await call
                finally:
                    for release in releases:
                        release()
                assert device.values(found.indices).tolist() == list(range(990, 1000))
                assert device.values(x).tolist() == [*range(990), *[0] * 10]

        run_ranks(1, main, "shm")


@pytest.mark.parametrize("algorithm", ["gaussiank", "dense"])
def test_a_device_gives_all_elements_to_algorithms_that_look_at_all(algorithm):
    with fake_device() as device:
        device.__class__ = Counting

        async def main(comm):
            await comm.sparse_allreduce(device.tensor(torch.randn(500).half()), density=0.01, algorithm=algorithm)
            assert device.fetched == 1000

        run_ranks(1, main)


@algorithm_names
@pytest.mark.parametrize("seed", range(4))
def test_every_law_of_ranks_with_and_without_a_device(algorithm, seed):
    """In virtual time. Every third rank has arrays of numpy."""
    size, draw = 2 + seed, np.random.default_rng(seed)
    gradients = [gradient(kind, draw, size, 333, "f4") for kind in KINDS]

    async def main(comm):
        options = {"density": 0.05, "algorithm": algorithm, "thresholds_every": 1 + seed, "feedback": Feedback()}
        if comm.rank % 3 == 2:
            return await play(comm, gradients, **options)
        with fake_device(seed, "loop", f"fake:{comm.rank}") as device:
            return await play_on_device(comm, device, gradients, ["flat", "strided"][seed % 2], **options)

    for number, round_ in enumerate(rounds_of(simulate(size, main, JITTERY, seed=seed).results), 1):
        check_laws(round_, number, algorithm, exact=False)


@pytest.mark.parametrize("algorithm", ["oktopk", "dense"])
def test_a_round_of_a_device_whose_result_nobody_gets_ends_the_communicator(algorithm):
    with fake_device() as device:

        async def main(comm):
            call = comm.sparse_allreduce(device.tensor(torch.ones(100)), density=0.1, algorithm=algorithm)
            if comm.rank == 1:
                del call
            else:
                await asyncio.wait([asyncio.ensure_future(call)])
            with pytest.raises(AbortedError, match="was cancelled, or never awaited"):
                await comm.barrier()

        with pytest.warns(RuntimeWarning, match="never awaited"):
            run_ranks(2, main)


@pytest.mark.parametrize("algorithm", ["oktopk", "dense"])
def test_nan_on_a_device_is_refused_everywhere_and_changes_nothing(algorithm):
    with fake_device() as device:

        async def main(comm):
            x = device.tensor(torch.arange(100.0))
            options = {"density": 0.1, "algorithm": algorithm}
            if comm.rank == 1:
                device.compute(partial(np.copyto, where=np.arange(100) == 7), x, reads=[nan])
            before = device.values(x)
            with pytest.raises(NonFiniteError) as raised:
                await comm.sparse_allreduce(x, **options)
            assert raised.value.ranks == (1,)
            assert device.values(x).tobytes() == before.tobytes()
            device.compute(lambda values: np.nan_to_num(values, copy=False), x)
            assert (await comm.sparse_allreduce(x, **options)).round == 1

        nan = device.tensor(torch.full((100,), math.nan))
        run_ranks(3, main)


@pytest.mark.parametrize("thresholds_every", [1, 2])
@pytest.mark.parametrize("number", range(6))
def test_any_copy_of_a_round_fails(number, thresholds_every):
    """Three to the host, then three to the device, for which no call waits: these abort the communicator later."""
    raised = {}
    with fake_device() as device:

        async def main(comm):
            def given():
                return device.tensor(torch.arange(100.0)) if comm.rank == 1 else np.arange(100, dtype="f4")

            async def until_it_fails():
                await comm.sparse_allreduce(given(), **options)
                while True:
                    await comm.barrier()
                    await asyncio.sleep(0)

            options = {"density": 0.1, "thresholds_every": thresholds_every}
            await comm.sparse_allreduce(given(), **options)
            if comm.rank == 1:
                device.fail_copy(device._count + number, OSError("no such bus"))
            with pytest.raises((DeviceError, AbortedError), match="fake:0 has failed: OSError: no such bus") as caught:
                await until_it_fails()
            raised[comm.rank] = type(caught.value)

        with pytest.raises(DeviceError) if number >= 3 else contextlib.nullcontext():  # as rank 1 leaves the world
            run_ranks(2, main)
        assert raised == {0: AbortedError, 1: DeviceError if number < 3 else AbortedError}


# -- bad input -----------------------------------------------------------------------------------


def read_only() -> np.ndarray:
    x = np.ones(3)
    x.flags.writeable = False
    return x


ONES = partial(np.ones, 4, "f4")
REFUSED = {
    "density 0": (ONES, {"density": 0}, "above 0"),
    "negative density": (ONES, {"density": -0.1}, "above 0"),
    "density above 1": (ONES, {"density": 1.0001}, "at most 1"),
    "density nan": (ONES, {"density": math.nan}, "above 0"),
    "density bool": (ONES, {"density": True}, "density must be a number"),
    "density string": (ONES, {"density": "0.1"}, "density must be a number"),
    "density none": (ONES, {"density": None}, "density must be a number"),
    "algorithm": (ONES, {"algorithm": "topk"}, "unknown algorithm 'topk': use one of oktopk"),
    "algorithm none": (ONES, {"algorithm": None}, "algorithm must be a string"),
    "name": (ONES, {"name": 3}, "name must be a string"),
    "integers": (lambda: np.ones(4, int), {}, "int64 is not defined: convert"),
    "complex": (lambda: np.ones(4, complex), {}, "complex128 is not defined: convert"),
    "torch integers": (lambda: torch.ones(4, dtype=torch.int32), {}, "int32 is not defined: convert"),
    "bool": (lambda: np.ones(4, bool), {}, "bool is not defined: convert"),
    "read-only": (read_only, {}, "read-only"),
    "expanded": (lambda: torch.ones(1).expand(4), {}, "overlap"),
    "list": (lambda: [1.0, 2.0], {}, "expected a numpy array"),
    "thresholds_every 0": (ONES, {"thresholds_every": 0}, "at least 1"),
    "regions_every negative": (ONES, {"regions_every": -1}, "at least 1"),
    "thresholds_every half": (ONES, {"thresholds_every": 1.5}, "whole number"),
    "global_threshold": (ONES, {"global_threshold": "guess"}, "global_threshold must be one of"),
    "feedback": (ONES, {"feedback": True}, "feedback must be an asyncoll.Feedback"),
    "other count": (lambda: np.ones(5, "f4"), {"name": "kept"}, "use another name"),
    "other dtype": (lambda: np.ones(4, "f8"), {"name": "kept"}, "use another name"),
    "other density": (ONES, {"name": "kept", "density": 0.25}, "use another name"),
    "other algorithm": (ONES, {"name": "kept", "algorithm": "topka"}, "use another name"),
    "other period": (ONES, {"name": "kept", "thresholds_every": 31}, "use another name"),
    "other feedback": (ONES, {"name": "kept", "feedback": Feedback()}, "use another name"),
}


def test_bad_input_is_refused_with_advice_and_takes_no_number(simulated):
    async def main(comm):
        kept = np.arange(4, dtype="f4")
        await comm.sparse_allreduce(kept, density=0.5, name="kept")
        for build, options, advice in REFUSED.values():
            x = build()
            with pytest.raises(UsageError, match=advice):
                comm.sparse_allreduce(x, **{"density": 0.5, **options})
            assert not isinstance(x, np.ndarray) or not (x != build()).any()
        reduction = await comm.sparse_allreduce(kept, density=0.5, name="kept")
        assert reduction.round == 2
        assert comm.statistics().calls["sparse_allreduce"].calls == 2

    simulated(2, main)


@looped("density", [1, np.int64(1), np.float64(0.5), np.float32(0.1), np.float16(0.01)])
def test_densities_of_numpy_are_numbers(density):
    async def main(comm):
        x = np.ones(100_000, "f4")
        return (await comm.sparse_allreduce(x, density=density, algorithm="topka")).selected

    assert simulate(1, main).results == [round(float(density) * 100_000)]


@algorithm_names
def test_one_call_at_a_time_under_a_name(algorithm, run):
    async def main(comm):
        first = comm.sparse_allreduce(np.ones(4, "f4"), density=1, algorithm=algorithm)
        y = np.ones(4, "f4")
        is_over = comm.size == 1
        if not is_over:
            with pytest.raises(UsageError, match="'sparse' is under way: await it first, or use another name"):
                comm.sparse_allreduce(y, density=1, algorithm=algorithm)
        assert (y == 1).all()
        other = comm.sparse_allreduce(y, density=1, algorithm=algorithm, name="other")
        assert (await other).round == (await first).round == 1
        assert (await comm.sparse_allreduce(np.ones(4, "f4"), density=1, algorithm=algorithm)).round == 2

    run(3, main)


BAD = {"nan": [math.nan], "inf": [math.inf], "both infinities": [math.inf, -math.inf], "-nan": [-math.nan, 1e38]}


@algorithm_names
@looped("who", ["one", "some", "all"])
def test_nan_and_infinity_are_refused_everywhere_and_change_nothing(who, algorithm, run):
    size = 5
    culprits = {"one": [3], "some": [0, 2, 3], "all": list(range(size))}[who]
    gradients = whole_numbers(size, 90, rounds=4)

    async def main(comm):
        story = []
        x = np.zeros(90, "f4")
        options = {"density": 0.1, "algorithm": algorithm, "thresholds_every": 2, "regions_every": 2}
        for number, update in enumerate(gradients, 1):
            x += update[comm.rank]
            for kind in BAD:
                bad = x.copy()
                if comm.rank in culprits:
                    bad[7 : 7 + len(BAD[kind])] = BAD[kind]
                before = bad.tobytes()
                with pytest.raises(NonFiniteError) as raised:
                    await comm.sparse_allreduce(bad, **options)
                assert bad.tobytes() == before
                ranks = raised.value.ranks
                assert ranks
                assert set(ranks) <= set(culprits)
                assert algorithm == "gtopk" or list(ranks) == culprits
                assert str(ranks[0]) in str(raised.value)
            before = x.copy()
            reduction = await comm.sparse_allreduce(x, **options)
            assert reduction.round == number
            story.append((before, x.copy(), reduction))
        return story

    async def undisturbed(comm):
        return await play(comm, gradients, density=0.1, algorithm=algorithm, thresholds_every=2, regions_every=2)

    rounds = rounds_of(run(size, main))
    wanted = rounds_of(simulate(size, undisturbed).results)
    for number, (round_, want) in enumerate(zip(rounds, wanted, strict=True), 1):
        check_laws(round_, number, algorithm, exact=True)
        np.testing.assert_array_equal(round_.result, want.result)
        np.testing.assert_array_equal(round_.after, want.after)


@sizes
def test_nan_at_any_number_of_ranks_while_messages_overtake_each_other(size, simulated):
    culprits = [0, size - 1, size // 2]

    async def main(comm):
        found = []
        for algorithm in ALGORITHMS:
            options = {"density": 0.2, "algorithm": algorithm, "name": algorithm}
            for culprit in culprits:
                x = torch.ones(9).half()
                if comm.rank == culprit:
                    x[4] = math.nan
                try:
                    await comm.sparse_allreduce(x, **options)
                except NonFiniteError as error:
                    found += error.ranks
            reduction = await comm.sparse_allreduce(torch.ones(9).half(), **options)
            assert reduction.round == 1
            assert algorithm == "gaussiank" or set(reduction.values.tolist()) == {float(size)}
        return found

    assert simulated(size, main, JITTERY).results == [culprits * len(ALGORITHMS)] * size


@algorithm_names
def test_infinities_far_apart_are_refused_too(algorithm):
    """Further apart than the blocks in which vectors are scanned."""

    async def main(comm):
        x = np.ones(200_000, "f4")
        if comm.rank == 1:
            x[0], x[-1] = math.inf, -math.inf
        with pytest.raises(NonFiniteError) as raised:
            await comm.sparse_allreduce(x, density=0.01, algorithm=algorithm)
        return raised.value.ranks

    assert simulate(2, main).results == [(1,)] * 2


@algorithm_names
def test_sums_that_overflow_are_infinite_without_a_warning(algorithm, simulated):
    async def main(comm):
        told = []
        for name, count in (("as a vector", 10), ("by sorting", 1000)):
            x = np.zeros(count, "f4")
            x[:3] = [3e38, -3e38, 3e38 if comm.rank else 1]
            options = {"density": 3 / count, "algorithm": algorithm, "name": name}
            told.append((await comm.sparse_allreduce(x, **options, dense=True)).dense[:2].tolist())
        return told

    assert simulated(2, main).results == [[[math.inf, -math.inf]] * 2] * 2


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "gaussiank"])
def test_the_largest_finite_numbers_are_no_infinity(algorithm):
    """Feedback raises their threshold above the largest finite number."""

    async def main(comm):
        largest = np.finfo("f8").max
        rounds = []
        for _ in range(3):
            x = np.full(20, largest / 4)
            options = {"algorithm": algorithm, "feedback": Feedback(0.8, 1.0, 9), "thresholds_every": 4}
            rounds.append((await comm.sparse_allreduce(x, density=0.1, **options)).round)
        return rounds

    assert simulate(2, main).results == [[1, 2, 3]] * 2


# -- failures ------------------------------------------------------------------------------------


def failures(size, act, in_memory, seed=0):
    world = partial(simulate, network=JITTERY, seed=seed, shared_memory=in_memory)
    return failures_in(size, act, world)


in_either_form = pytest.mark.parametrize("in_memory", [False, True], ids=["messages", "memory"])
DISAGREEMENTS = {
    "algorithm": ({"algorithm": "topka"}, {"algorithm": "oktopk"}, "topka", "oktopk"),
    "density": ({"density": 0.25}, {"density": 0.5}, "density 0.25", "density 0.5"),
    "name": ({"name": "one"}, {"name": "two"}, "'one'", "'two'"),
    "period": ({"thresholds_every": 4}, {"thresholds_every": 5}, "thresholds_every=4", "thresholds_every=5"),
    "threshold": ({"global_threshold": "allgather"}, {}, "'allgather'", "float32 of shape (6,) at"),
    "feedback": ({"feedback": Feedback()}, {}, "Feedback(", "float32 of shape (6,) at"),
}


@in_either_form
@looped("size", [2, 5])
@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_a_mismatch_names_the_calls_of_both_ranks(what, size, in_memory):
    odd, usual, zero, others = DISAGREEMENTS[what]
    vectors = {rank: np.arange(6, dtype="f4") for rank in range(size)}

    async def act(comm):
        options = {"density": 0.5, **(odd if comm.rank == 0 else usual)}
        await comm.sparse_allreduce(vectors[comm.rank], **options)
        await comm.barrier()

    raised = failures(size, act, in_memory)
    assert sorted(raised) == list(range(size))
    for error in raised.values():
        assert type(error) is MismatchError
        assert zero in str(error)
        assert others in str(error)
        assert str(error).count("test_sparse.py:") == 2
    for x in vectors.values():
        np.testing.assert_array_equal(x, np.arange(6))


@in_either_form
@algorithm_names
def test_a_cancelled_call_aborts_the_communicator_and_leaves_x_as_it_was(algorithm, in_memory):
    outcomes = set()
    for seed in range(10):
        patience_s = float(np.random.default_rng(seed).uniform(0, 3e-4))
        kept = []

        async def attempt(comm, wait=None, kept=kept):
            x = np.arange(-50, 50, dtype="f4") * (comm.rank + 1)
            before = x.copy()
            call = comm.sparse_allreduce(x, density=0.1, algorithm=algorithm)
            try:
                await (asyncio.wait_for(call, wait) if wait else call)
            except BaseException:
                kept.append(x.tobytes() == before.tobytes())
                raise

        async def act(comm, attempt=attempt, patience_s=patience_s):
            if comm.rank == 1:
                try:
                    await attempt(comm, patience_s)
                except TimeoutError:
                    outcomes.add("cancelled")
                else:
                    outcomes.add("in time")
                    comm.abort("came in time")
            while True:
                await attempt(comm)

        raised = failures(3, act, in_memory, seed)
        assert sorted(raised) == [0, 1, 2]
        assert {type(error) for error in raised.values()} <= {AbortedError, MismatchError}
        assert {error.rank for error in raised.values() if type(error) is AbortedError} <= {1}
        assert kept
        assert all(kept)
    assert "cancelled" in outcomes


@in_either_form
def test_a_call_that_is_cancelled_when_its_round_is_over_ends_the_communicator(in_memory):
    async def act(comm):
        call = comm.sparse_allreduce(np.ones(9, "f4"), density=0.5)
        await asyncio.sleep(1)
        task = asyncio.create_task(call)
        if comm.rank == 1:
            task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() == (comm.rank == 1)
        await comm.barrier()

    raised = failures(3, act, in_memory)
    assert sorted(raised) == [0, 1, 2]
    assert all("was cancelled" in error.reason for error in raised.values())


@in_either_form
def test_every_call_after_an_abort_raises_it(in_memory):
    async def act(comm):
        comm.abort("enough")
        for _ in range(3):
            with pytest.raises(AbortedError, match="enough"):
                await comm.sparse_allreduce(np.ones(4, "f4"), density=0.5)

    assert not failures(1, act, in_memory)


# -- counters ------------------------------------------------------------------------------------


def distinct(size: int, count: int, seed: int = 0) -> np.ndarray:
    """No two magnitudes of a rank are equal, and hardly any two sums."""
    draw = np.random.default_rng([size, count, seed])
    magnitudes = draw.permuted(np.tile(np.arange(1.0, count + 1), (size, 1)), axis=1)
    return (magnitudes * draw.choice([-1, 1], (size, count))).astype("f4")


def told(size, gradients, simulated, **options) -> list[Round]:
    async def main(comm):
        story = await play(comm, gradients, keep=False, **options)
        total = comm.statistics().calls["sparse_allreduce"]
        assert total.calls == len(gradients)
        assert total.words_received == sum(reduction.words_received for *_, reduction in story)
        assert total.words_sent == sum(reduction.words_sent for *_, reduction in story)
        return story

    return rounds_of(simulated(size, main).results)


def mean_words(round_: Round) -> float:
    return sum(reduction.words_received for reduction in round_.reductions) / len(round_.reductions)


def travelling(before: np.ndarray, k: int, edges) -> float:
    """Words that a rank receives in the mean: the elements in its region that others have selected."""
    size = len(before)
    cuts = [np.searchsorted(np.flatnonzero(topk(row, k)), edges) for row in before]
    return 2 * sum(np.diff(cut).sum() - np.diff(cut)[rank] for rank, cut in enumerate(cuts)) / size


@pytest.mark.parametrize("size", [1, 2, 5, 13])
def test_costs_of_results_add_up_to_the_statistics(size, run):
    gradients = whole_numbers(size, 300, rounds=3)

    async def main(comm):
        reductions = []
        for name in ALGORITHMS:
            story = await play(comm, gradients, density=0.1, algorithm=name, name=name, thresholds_every=2)
            searched = [reduction.threshold_words > 0 for *_, reduction in story]
            assert searched == [name == "oktopk" and comm.size > 1 and index % 2 == 0 for index in range(3)]
            assert all(reduction.threshold_words <= reduction.words_received for *_, reduction in story)
            reductions += [reduction for *_, reduction in story]
        return comm.statistics().calls["sparse_allreduce"], reductions

    for total, reductions in run(size, main):
        assert total.calls == len(reductions)
        assert total.words_received == sum(reduction.words_received for reduction in reductions)
        assert total.words_sent == sum(reduction.words_sent for reduction in reductions)
        assert all((reduction.words_received > 0) == (size > 1) for reduction in reductions)


@pytest.mark.parametrize("size", [2, 3, 5, 13])
def test_by_message_words_that_are_sent_are_received(size):
    for name in ALGORITHMS:
        by_message = partial(simulate, network=JITTERY)
        for round_ in told(size, whole_numbers(size, 300, 3), by_message, density=0.1, algorithm=name):
            sent = sum(reduction.words_sent for reduction in round_.reductions)
            assert sent == sum(reduction.words_received for reduction in round_.reductions)


@looped("size", [2, 3, 5, 8, 13])
@pytest.mark.parametrize("algorithm", ["topka", "gaussiank"])
def test_words_of_topka(size, algorithm, simulated):
    for round_ in told(size, [distinct(size, 1000)] * 2, simulated, density=0.02, algorithm=algorithm):
        selected = [reduction.selected for reduction in round_.reductions]
        assert algorithm == "gaussiank" or selected == [20] * size
        for rank, reduction in enumerate(round_.reductions):
            assert reduction.words_received == 2 * (sum(selected) - selected[rank]) + 2 * (size - 1)


@looped("size", [2, 3, 5, 8, 13])
@looped("k", [10, 600])
def test_words_of_topkdsa(size, k, simulated):
    count = 1920
    (round_,) = told(size, [distinct(size, count)], simulated, density=k / count, algorithm="topkdsa")
    edges = [0, *(end for _, end in bounds(count, size))]
    sums = np.count_nonzero(round_.result)
    is_dense = 2 * sums >= count
    counts = 4 * (size - 1)
    gathered = min(2 * sums, count) * (size - 1) / size
    assert mean_words(round_) == pytest.approx(travelling(round_.before, k, edges) + gathered + counts)
    assert is_dense == (k == 600)
    assert mean_words(round_) - counts <= 1.1 * (2 * k + count) * (size - 1) / size


@looped("size", [2, 3, 5, 8, 13])
def test_words_of_gtopk(size, simulated):
    k, levels = 20, math.ceil(math.log2(size))
    (round_,) = told(size, [distinct(size, 1000)], simulated, density=k / 1000, algorithm="gtopk")
    words = [reduction.words_received for reduction in round_.reductions]
    assert words[0] == (2 * k + 2) * levels
    for received in words:
        assert 2 * k <= received <= 4 * k * levels + 2 * (levels + 1)
    assert sum(words) == 2 * (size - 1) * (2 * k + 2)


@looped("size", [2, 3, 5, 8])
def test_words_of_dense(size, simulated):
    count = 120 * 6000
    (round_,) = told(size, [np.ones((size, count), "f4")], simulated, density=0.5, algorithm="dense")
    counts = 2 * (size - 1)
    assert mean_words(round_) == 2 * count * (size - 1) / size + counts


def agreed_edges(before: np.ndarray, k: int) -> np.ndarray:
    size, count = before.shape
    chosen = [np.flatnonzero(topk(row, k)) for row in before]
    return selection.consensus(sum(selection.local_boundaries(indices, size, count) for indices in chosen), size, count)


@pytest.mark.parametrize("size", [5, 8, 13, 32])
def test_words_of_oktopk_where_thresholds_are_exact(size, simulated):
    count, k = 20_000, 640
    allreduced = 2 * (size - 1) / size  # words a rank for each word that a tree, or the last to come, reduces
    gradients = [distinct(size, count, seed) for seed in range(2)]
    for round_ in told(size, gradients, simulated, density=k / count, thresholds_every=1, regions_every=1):
        found = round_.reductions[0].indices.size
        assert found >= k
        counts = 4 * (size - 1)
        histograms = 4 * 256 * allreduced
        boundaries = 2 * (size - 1) * allreduced
        bulk = travelling(round_.before, k, agreed_edges(round_.before, k)) + 2 * found * (size - 1) / size
        assert mean_words(round_) == pytest.approx(bulk + counts + histograms + boundaries)
        assert 2 * k * (size - 1) / size <= bulk <= 6 * k * (size - 1) / size


@pytest.mark.parametrize("size", [2, 4, 32])
def test_words_of_oktopk_on_average_over_a_period(size, simulated):
    count, k, period = 8192, 512, 4
    gradients = [distinct(size, count, seed) for seed in range(period)]
    rounds = told(size, gradients, simulated, density=k / count, thresholds_every=period)
    selected = {reduction.selected for round_ in rounds for reduction in round_.reductions}
    assert selected == {k}
    histogram_and_boundaries = (4 * 256 + 2 * (size - 1)) * 2 * (size - 1) / size
    if size == 4:  # by message these few double, and exchange all words twice
        histogram_and_boundaries = (4 * 256 + 2 * (size - 1)) * 2
    bulk = sum(map(mean_words, rounds)) / period - 4 * (size - 1) - histogram_and_boundaries / period
    assert 2 * k * (size - 1) / size <= bulk <= 6 * k * (size - 1) / size


def test_the_papers_way_to_the_global_threshold_takes_words_by_the_thousand(simulated):
    (ours,) = told(8, [distinct(8, 20_000)], simulated, density=0.1)
    (papers,) = told(8, [distinct(8, 20_000)], simulated, density=0.1, global_threshold="allgather")
    np.testing.assert_array_equal(ours.result, papers.result)
    sums = np.count_nonzero(np.stack([topk(row, 2000) for row in papers.before]).sum(0))
    histograms = 4 * 256 * 2 * 7 / 8
    assert mean_words(papers) - mean_words(ours) == pytest.approx(sums * 7 / 8 + 2 * 7 - histograms)


# -- what it is made of --------------------------------------------------------------------------


async def in_its_form(comm, body):
    """Run `body(form)` as a call of its own."""
    return await comm._calls.start(Call(comm._calls.number("a test", "", -1, "", site_outside()), body))


@sizes
def test_alltoall_of_blocks_of_any_sizes(size, run):
    def piece(source, dest, length):
        return np.full((source * 3 + dest * 5) % 7 * length, 100 * source + dest, "i4")

    async def main(comm):
        rank = comm.rank
        for length in (1, 20_000):
            incoming = [np.full_like(piece(source, rank, length), -1) for source in range(size)]

            async def body(form, length=length, incoming=incoming):
                await form.alltoall([piece(rank, dest, length) for dest in range(size)], incoming)

            await in_its_form(comm, body)
            for source, block in enumerate(incoming):
                np.testing.assert_array_equal(block, piece(source, rank, length))

    run(size, main)


def test_alltoall_has_a_bounded_number_of_messages_under_way():
    size = 13
    pending = []

    async def main(comm):
        incoming = [np.empty(3) for _ in range(size)]

        async def body(form):
            lane = form._lane
            under_way = 0

            class Spy:
                rank, size = lane.rank, lane.size
                send = staticmethod(lane.send)

                def post(self, *arguments):
                    nonlocal under_way
                    under_way += 1
                    pending.append(under_way)
                    return lane.post(*arguments)

                async def wait(self, receive):
                    nonlocal under_way
                    await lane.wait(receive)
                    under_way -= 1

            await on_lane.alltoall(Spy(), [np.full(3, float(comm.rank))] * size, incoming)

        await in_its_form(comm, body)
        assert [x[0] for x in incoming] == list(range(size))

    simulate(size, main, JITTERY)
    assert max(pending) == on_lane.ALLTOALL_AHEAD


@sizes
def test_allgather_of_blocks_of_any_sizes(size, run):
    shapes = {
        "irregular": [(5 * place) % 7 for place in range(size)],
        "one has all": [9 * (place == size // 2) for place in range(size)],
        "one has nothing": [4 * (place != size - 1) for place in range(size)],
        "all empty": [0] * size,
        "long": [(1 << 18) * (place == 0) + place for place in range(size)],
    }

    async def main(comm):
        for lengths in shapes.values():
            blocks = [np.full(length, -1.0) for length in lengths]
            blocks[comm.rank][:] = comm.rank

            async def body(form, blocks=blocks):
                await form.allgather(blocks)
                return form.traffic.bytes_received

            received = await in_its_form(comm, body)
            for place, block in enumerate(blocks):
                np.testing.assert_array_equal(block, np.full(lengths[place], place, "f8"))
            assert received == 8 * (sum(lengths) - lengths[comm.rank])

    run(size, main)


@looped("common", [algorithms.common, algorithms._common_in_python])
def test_common_indices_of_two_parts(common):
    draw = np.random.default_rng(0)
    for end in (30, 5000, 50_000, 1 << 31) * 20:  # in some of the last a block has one index
        both = draw.integers(0, end, draw.integers(0, 200))
        one, other = (np.unique([*both, *draw.integers(0, end, draw.integers(0, 200))]).astype("i4") for _ in range(2))
        np.testing.assert_array_equal(common(one, other), np.intersect1d(one, other))


def drawn_parts(draw, first, end, index, value):
    parts = []
    for _ in range(draw.integers(1, 6)):
        indices = np.unique(draw.integers(first, end, draw.integers(0, 400))).astype(index)
        parts.append(
            algorithms.Part(indices, draw.choice([0.1, -0.1, 1e30, 3e-9, math.inf], indices.size).astype(value))
        )
    return parts


@looped("index", [np.int32, np.int64])
@looped("value", [np.float32, np.float64])
@looped("length", [1, 300, 40_000, 1 << 30])
def test_parts_are_added_in_their_order(index, value, length):
    """Into one dense vector in Python, or by sorting; block by block in the compiled core."""
    draw = np.random.default_rng(length)
    for first in (0, 1, 70_001):
        parts = drawn_parts(draw, first, first + length, index, value)
        wanted = {}
        with np.errstate(all="ignore"):
            for part in parts:
                for place, each in zip(part.indices.tolist(), part.values, strict=True):
                    wanted[place] = wanted[place] + each if place in wanted else each
        wanted = {place: wanted[place] for place in sorted(wanted) if wanted[place] != 0}
        for add in (algorithms.sum_parts, algorithms._sum_in_python):
            found = add(parts, first, first + length)
            assert found.indices.tolist() == list(wanted)
            assert found.values.tobytes() == np.array([*wanted.values()], value).tobytes()
            assert (found.indices.dtype, found.values.dtype) == (index, value)


@looped("indices", [[4], [-1], [0, 9], [0, 1 << 30]])
def test_an_index_in_another_region_is_an_error(indices):
    part = algorithms.Part(np.array(indices, np.int32), np.ones(len(indices), "f4"))
    for add in (algorithms.sum_parts, algorithms._sum_in_python):
        with pytest.raises(ValueError, match="region"):
            add([algorithms.nothing(part), part], 0, 4)


# -- several hosts -------------------------------------------------------------------------------

PLACED = ["01", "0010", "01101", "000111", "0120120", "00000001", "0100110100101", "0" * 9 + "1" * 8]


@pytest.mark.parametrize("hosts", PLACED)
def test_ranks_on_several_hosts_have_the_results_of_one(hosts):
    """To the bit, for whole numbers; with gTopk the tree is another one, so it drops other elements."""
    size = len(hosts)
    cases = [(algorithm, *case) for algorithm in ALGORITHMS for case in ((60, 1.0), (200, 0.1), (3, 0.5))]
    gradients = {count: whole_numbers(size, count, rounds=3) for _, count, _ in cases}

    async def main(comm):
        return [
            await play(comm, gradients[count], density=density, algorithm=name, name=f"{name} {count}", regions_every=2)
            for name, count, density in cases
        ]

    stories = simulate(size, main, JITTERY, shared_memory=True, hosts=hosts).results
    for (algorithm, count, density), of_case in zip(cases, zip(*stories, strict=True), strict=True):
        for number, round_ in enumerate(rounds_of(of_case), 1):
            check_laws(round_, number, algorithm, exact=True)
            if algorithm not in ("gtopk", "gaussiank"):
                wanted = expected(algorithm, round_.before, max(1, round(density * count)))
                np.testing.assert_array_equal(round_.result, wanted)


@looped("algorithm", ["oktopk", "topka", "topkdsa", "gtopk", "gaussiank"])
def test_what_the_ranks_of_a_host_have_in_common_crosses_the_network_once(algorithm):
    def crossed(hosts):
        async def main(comm):
            x = np.random.default_rng(7).standard_normal(20_000)
            await comm.sparse_allreduce(x, density=0.1, algorithm=algorithm)

        trace = simulate(len(hosts), main, Network(), shared_memory=True, hosts=hosts).trace
        return sum(payload for _, source, dest, payload in trace if hosts[source] != hosts[dest])

    assert crossed("00001111") == pytest.approx(crossed("01"), rel=0.1)
    assert crossed("01010101") == crossed("00001111")


def test_a_host_with_nan_is_refused_by_all_hosts():
    """Also by ranks that are no leaders, and hear nothing from other hosts."""

    async def main(comm):
        found = []
        for name in ALGORITHMS:
            for culprit in range(comm.size):
                x = np.ones(9)
                x[4] = math.nan if comm.rank == culprit else 1
                with pytest.raises(NonFiniteError) as raised:
                    await comm.sparse_allreduce(x, density=0.2, algorithm=name, name=name)
                found += raised.value.ranks
        return found

    for found in simulate(5, main, JITTERY, shared_memory=True, hosts="00010").results:
        assert found == [*range(5)] * len(ALGORITHMS)


def test_a_state_goes_on_where_ranks_are_on_other_hosts():
    """Regions are those of other ranks there, so they are cut anew."""
    gradients = [distinct(4, 200, seed) for seed in range(4)]

    def run(hosts, numbers, states):
        async def main(comm):
            comm.load_sparse_state("sparse", states[comm.rank])
            story = await play(comm, [gradients[number] for number in numbers], keep=False, density=0.1)
            return story, comm.sparse_state()

        return zip(*simulate(4, main, JITTERY, shared_memory=True, hosts=hosts).results, strict=True)

    _, states = run("0000", [0, 1], [None] * 4)
    stories, _ = run("0001", [2, 3], states)
    for number, round_ in enumerate(rounds_of(stories), 3):
        check_laws(round_, number, "oktopk", exact=True)
        np.testing.assert_array_equal(round_.result, expected("oktopk", round_.before, 20))


def test_hosts_in_real_memory_and_over_sockets():
    gradients = whole_numbers(5, 200, rounds=2)

    async def main(comm):
        return [await play(comm, gradients, density=0.1, algorithm=name, name=name) for name in ALGORITHMS]

    stories = run_ranks(5, main, "shm", hosts="01101")
    for algorithm, of_case in zip(ALGORITHMS, zip(*stories, strict=True), strict=True):
        for number, round_ in enumerate(rounds_of(of_case), 1):
            check_laws(round_, number, algorithm, exact=True)


def test_balancing_keeps_the_order_for_any_sizes(simulated):
    async def main(comm):
        for lengths in ([0, 0, 0, 0, 11], [17, 0, 0, 1, 0], [0, 2, 0, 0, 0], [3, 3, 3, 3, 3]):
            ends = np.cumsum([0, *lengths])
            indices = np.arange(ends[comm.rank], ends[comm.rank + 1], dtype="i4")
            mine = algorithms.Part(indices, indices.astype("f4"))

            async def body(form, mine=mine, lengths=lengths):
                return await oktopk._balance(form, mine, np.array(lengths, np.int64))

            part = await in_its_form(comm, body)
            edges = np.cumsum([0, *selection.balanced_sizes(np.array(lengths, np.int64))])
            wanted = np.arange(edges[comm.rank], edges[comm.rank + 1])
            np.testing.assert_array_equal(part.indices, wanted)
            np.testing.assert_array_equal(part.values, wanted)

    simulated(5, main)


# -- the ledger ----------------------------------------------------------------------------------


def call_of(number: int) -> Traffic:
    traffic = Traffic()
    for _ in range(number % 3):
        traffic.sent(4 * number)
    traffic.received(number)
    return traffic


def test_a_ledger_adds_up_calls_by_operation():
    ledger = Ledger()
    assert ledger.totals() == {}
    for number in range(1000):
        ledger.enter("even" if number % 2 == 0 else "odd", call_of(number))
    totals = ledger.totals()
    assert set(totals) == {"even", "odd"}
    for operation, numbers in (("even", range(0, 1000, 2)), ("odd", range(1, 1000, 2))):
        total = totals[operation]
        assert total.calls == total.messages_received == len(numbers)
        assert total.messages_sent == sum(number % 3 for number in numbers)
        assert total.bytes_sent == sum(number % 3 * 4 * number for number in numbers)
        assert total.bytes_received == sum(numbers)
        assert total.words_sent == total.bytes_sent / WORD_BYTES
        assert total.words_received == total.bytes_received / WORD_BYTES
    totals["even"].add(call_of(1))
    assert ledger.totals()["even"].calls == 500, "totals are values"


def test_a_ledger_loses_no_call_of_any_thread():
    ledger = Ledger()
    begin = threading.Barrier(5)
    seen = []

    def enter():
        begin.wait()
        for _ in range(3000):
            ledger.enter("call", call_of(1))

    def read():
        begin.wait()
        for _ in range(300):
            total = ledger.totals().get("call")
            if total is not None:
                seen.append((total.calls, total.messages_sent, total.bytes_received))

    threads = [threading.Thread(target=enter) for _ in range(4)] + [threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.totals()["call"].calls == ledger.totals()["call"].bytes_received == 12_000
    assert all(calls == sent == received for calls, sent, received in seen), "a reader sees whole calls"
    assert all(one <= other for one, other in pairwise(seen))
