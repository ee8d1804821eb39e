"""The decisions of the sparse allreduces: selection, thresholds, regions and balance, against sorting."""

from __future__ import annotations

import contextlib
import math
from itertools import pairwise

import numpy as np
import pytest

from asyncoll import _core
from asyncoll.algorithms.sparse import selection
from asyncoll.algorithms.sparse.selection import (
    Feedback,
    KthSearch,
    adapted,
    balanced_sizes,
    consensus,
    gaussian_threshold,
    incoming_pieces,
    index_dtype,
    is_unbalanced,
    kth_largest,
    local_boundaries,
    outgoing_pieces,
    select,
    top_k,
)
from tests.support.properties import given, st

DTYPES = (np.float32, np.float64)
RANKS = (1, 2, 3, 5, 8, 13)
ROUNDS = {np.float32: 4, np.float64: 8}
ROUNDS_OF_MANY = {np.float32: 3, np.float64: 6}
LONG = 200_000  # several blocks, long enough for the guess by a sample, and for long digits of a search
BAND = Feedback(low=3 / 4, high=5 / 4, factor=1.02)


@st.composite
def arrays(draw):
    """Short arrays in which zeros, denormals and ties are common."""
    dtype = draw(st.sampled_from(DTYPES))
    info = np.finfo(dtype)
    tiny, least = float(info.smallest_normal), float(info.smallest_subnormal)
    special = st.sampled_from(
        [0.0, -0.0, 1.0, -1.0, 1.5, least, -least, 3 * least, tiny, tiny - least, float(info.max)]
    )
    width = 8 * np.dtype(dtype).itemsize
    elements = special | st.floats(width=width, allow_nan=False, allow_infinity=False)
    return np.array(draw(st.lists(elements, max_size=60)), dtype)


def long_arrays(dtype):
    """Named distributions: some for which the sampled threshold is good, some for which it is wrong, some empty."""
    draw = np.random.default_rng(4)
    normal = draw.standard_normal(LONG).astype(dtype)
    alternating = np.full(LONG, 0.5, dtype)
    alternating[:: LONG // (1 << 16) | 1] = 2  # just where the sample looks
    return {
        "normal": normal,
        "layers": normal * np.repeat(np.array([1e-6, 1, 1e4, 1], dtype), LONG // 4),
        "sparse": np.where(draw.random(LONG) < 0.02, normal, dtype(0)),
        "equal": np.full(LONG, -3, dtype),
        "zero": np.zeros(LONG, dtype),
        "few values": np.round(normal),
        "denormal": (normal * 64).astype(np.int32).astype(dtype) * np.finfo(dtype).smallest_subnormal,
        "alternating": alternating,
    }


LONG_ARRAYS = [(name, dtype) for dtype in DTYPES for name in long_arrays(dtype)]


def reference_kth(x, k):
    """By sorting; 0 if there are fewer than k elements."""
    magnitudes = np.sort(np.abs(x))[::-1]
    return float(magnitudes[k - 1]) if k <= x.size else 0.0


def reference_top_k(x, k):
    order = np.argsort(-np.abs(x), kind="stable")[:k]  # stable: the lowest index first
    return np.sort(order[x[order] != 0])


@contextlib.contextmanager
def in_python():
    """Without the compiled core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_core, "native", None)
        yield


def check_all(x, k):
    check_selection(x, k)
    with in_python():
        check_selection(x, k)


def check_selection(x, k):
    largest, threshold = top_k(x, k)
    assert largest.indices.tolist() == reference_top_k(x, k).tolist()
    assert threshold == reference_kth(x, k) == kth_largest(x, k)
    selected = select(x, threshold)
    assert selected.indices.tolist() == np.flatnonzero((np.abs(x) >= threshold) & (x != 0)).tolist()
    for part in (largest, selected):
        assert part.indices.dtype == index_dtype(x.size)
        assert (part.values.dtype, part.values.tobytes()) == (x.dtype, x[part.indices].tobytes())


# -- selection -----------------------------------------------------------------------------------


@given(arrays(), st.integers(1, 70))
def test_a_selection_is_the_one_that_sorting_finds(x, k):
    check_all(x, k)


@pytest.mark.parametrize(("name", "dtype"), LONG_ARRAYS)
def test_a_selection_from_a_long_array_is_the_one_that_sorting_finds(name, dtype):
    x = long_arrays(dtype)[name]
    for k in (1, LONG // 1000, LONG // 100, LONG // 2, LONG):
        check_all(x, k)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_array_of_any_length_is_cut_into_blocks_without_a_seam(dtype):
    x = np.random.default_rng(5).standard_normal(3 << 16).astype(dtype)
    for size in (1, (1 << 16) - 1, 1 << 16, (1 << 16) + 1, 1 << 17, (1 << 17) + 1):
        check_all(x[:size], size // 7 + 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_that_are_not_contiguous_are_selected_from(dtype):
    x = np.random.default_rng(6).standard_normal(3000).astype(dtype)
    check_all(x[::3], 17)
    check_all(x[::-1], 17)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_compiled_core_selects_what_python_selects(dtype):
    x = long_arrays(dtype)["normal"]
    x[[0, 1, 15, 16, -1]] = [np.nan, np.inf, -np.inf, -0.0, np.nan]
    for cut in (x, x[:15], x[:16], x[1:18]):
        for threshold in (0.0, 1.0, 2.5, np.inf):
            wanted = selection._select_in_python(cut, selection.least_magnitude(threshold, cut.dtype))
            for room in (None, 0, 1, cut.size):
                found = select(cut, threshold, room)
                assert [each.tobytes() for each in found] == [each.tobytes() for each in wanted]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_empty_array_selects_no_elements(dtype):
    empty = np.empty(0, dtype)
    assert kth_largest(empty, 1) == 0.0
    assert top_k(empty, 3)[0].size == select(empty, 0.0).size == 0


def test_the_kth_is_selected_which_a_strict_comparison_leaves_out():
    x = np.array([5, -4, 3, -2, 1], np.float32)
    k = 3
    threshold = kth_largest(x, k)
    authors = np.flatnonzero(np.abs(x) > threshold)
    assert authors.size == k - 1
    assert select(x, threshold).indices.tolist() == [0, 1, 2]


def test_of_equals_the_lowest_indices_are_taken():
    x = np.array([1, -2, 2, 3, 2, -2], np.float32)
    largest, threshold = top_k(x, 3)
    assert largest.indices.tolist() == [1, 2, 3]
    assert select(x, threshold).indices.tolist() == [1, 2, 3, 4, 5], "a threshold cannot tell them apart"


def test_equal_elements_are_not_all_selected():
    largest, threshold = top_k(np.ones(LONG, np.float32), 10)
    assert largest.indices.tolist() == list(range(10))
    assert threshold == 1.0


def test_zeros_are_never_selected():
    x = np.array([0.0, 2.0, -0.0, -1.0], np.float32)
    for k in (3, 4, 9):
        largest, threshold = top_k(x, k)
        assert largest.indices.tolist() == select(x, threshold).indices.tolist() == [1, 3]
        assert threshold == 0.0


def test_a_threshold_is_rounded_to_the_dtype():
    x = np.array([0.1, 0.2], np.float32)
    assert select(x, 0.1).indices.tolist() == [0, 1]
    assert select(x, 1e300).size == 0


def test_indices_are_as_short_as_their_array_allows():
    assert index_dtype(0) == index_dtype(1 << 31) == np.int32
    assert index_dtype((1 << 31) + 1) == np.int64


# -- thresholds that are reused ------------------------------------------------------------------


def test_a_threshold_is_reused_unchanged_without_feedback():
    assert adapted(0.3, 10**6, 10) == 0.3


@pytest.mark.parametrize(
    ("count", "expected"), [(74, 1 / 1.02), (75, 1.0), (100, 1.0), (125, 1.0), (126, 1.02), (0, 1 / 1.02)]
)
def test_feedback_moves_a_threshold_one_step_outside_of_its_band(count, expected):
    assert adapted(1.0, count, 100, BAND) == expected


def test_feedback_follows_values_that_shrink():
    x = np.random.default_rng(7).standard_normal(10_000)
    k = 100
    reused = followed = kth_largest(x, k)
    for _ in range(60):
        x *= 0.99
        followed = adapted(followed, select(x, followed).size, k, BAND)
    assert select(x, reused).size < k / 4
    assert k / 2 < select(x, followed).size < 2 * k


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 1.0])
def test_the_normal_fit_is_mean_and_deviation(dtype, density):
    x = (3 + np.random.default_rng(8).standard_normal(200_000) / 8).astype(dtype)
    z = {0.001: 3.2905267314919255, 0.01: 2.5758293035489004, 0.1: 1.6448536269514722, 1.0: 0.0}[density]
    assert gaussian_threshold(x, density) == pytest.approx(x.mean(dtype=np.float64) + z * x.std(dtype=np.float64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_normal_fit_selects_its_density_of_normal_values(dtype):
    x = np.random.default_rng(9).standard_normal(200_000).astype(dtype)
    assert select(x, gaussian_threshold(x, 0.01)).size == pytest.approx(2000, rel=0.1)


def test_a_normal_fit_is_adjusted_until_the_count_is_within_the_band():
    x = np.random.default_rng(10).laplace(size=200_000).astype(np.float32)
    assert select(x, gaussian_threshold(x, 0.01)).size > 4000
    threshold = gaussian_threshold(x, 0.01, BAND)
    assert 1500 <= select(x, threshold).size <= 2500


def test_the_adjustment_of_a_normal_fit_ends():
    equal = np.ones(1000, np.float32)
    assert gaussian_threshold(equal, 0.01, BAND) == pytest.approx(1), "to and fro, 20 steps: all are selected, or none"
    spiky = np.zeros(1000, np.float32)
    spiky[0] = 1
    assert gaussian_threshold(spiky, 1.0, BAND) < gaussian_threshold(spiky, 1.0), "20 steps, and never enough"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_normal_fit_of_constant_or_empty_arrays(dtype):
    assert gaussian_threshold(np.empty(0, dtype), 0.01) == 0.0
    assert gaussian_threshold(np.empty(0, dtype), 0.01, BAND) == 0.0
    assert gaussian_threshold(np.full(1000, 0.1, dtype), 0.01) == pytest.approx(dtype(0.1))
    assert gaussian_threshold(np.full(1000, -0.1, dtype), 0.01) == 0.0


# -- the k-th of all ranks -----------------------------------------------------------------------


def search_among(parts, k):
    """The threshold that the searches of all ranks find, and the number of their rounds."""
    searches = [KthSearch(part, k) for part in parts]
    rounds = 0
    while not searches[0].done:
        counts = [search.counts() for search in searches]
        with in_python():
            np.testing.assert_array_equal(counts, [search.counts() for search in searches])
        totals = sum(counts)
        for search in searches:
            assert not search.done
            search.narrow(totals)
        rounds += 1
    assert all(search.done for search in searches)
    assert len({search.threshold for search in searches}) == 1
    return searches[0].threshold, rounds


def cut(x, size, draw):
    """`x` in `size` parts, some of which are empty."""
    return np.split(x, np.sort(draw.integers(0, x.size + 1, size - 1)))


@given(arrays(), st.integers(1, 70), st.sampled_from(RANKS), st.integers(0, 1000))
def test_ranks_find_the_kth_of_all_their_values(x, k, size, seed):
    threshold, rounds = search_among(cut(x, size, np.random.default_rng(seed)), k)
    assert threshold == reference_kth(x, k)
    assert rounds == (ROUNDS[x.dtype.type] if k <= x.size else 1)


@pytest.mark.parametrize(("name", "dtype"), LONG_ARRAYS)
def test_ranks_find_the_kth_of_many_values(name, dtype):
    x = long_arrays(dtype)[name]
    for k, size in zip((1, LONG // 1000, LONG // 100, LONG // 2, LONG, LONG + 1), RANKS, strict=True):
        threshold, rounds = search_among(cut(x, size, np.random.default_rng(size)), k)
        assert threshold == reference_kth(x, k)
        assert rounds == (1 if k > LONG else (ROUNDS_OF_MANY if k == LONG else ROUNDS)[dtype])


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_with_fewer_than_k_values_all_that_are_not_zero_are_selected(dtype, size):
    parts = [np.array([0, rank + 1], dtype) for rank in range(size)]
    threshold, _ = search_among(parts, size + 1)
    assert [select(part, threshold).indices.tolist() for part in parts] == [[1]] * size
    assert search_among([np.empty(0, dtype)] * size, 1) == (0.0, 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kth_is_never_below_what_is_known_of_it(dtype):
    x = np.random.default_rng(11).standard_normal(1000).astype(dtype)
    search, last = KthSearch(x, 10), -1.0
    while not search.done:
        assert last <= search.threshold <= kth_largest(x, 10)
        last = search.threshold
        counts = search.counts()
        assert (counts.dtype, counts.shape) == (np.int64, (256,))
        search.narrow(counts)


def test_a_search_leaves_the_values_as_they_are():
    x = np.random.default_rng(12).standard_normal(1000).astype(np.float32)
    before = x.copy()
    search_among([x], 10)
    assert np.array_equal(x, before)


# -- regions -------------------------------------------------------------------------------------


@st.composite
def selections(draw):
    """Selected indices of each of several ranks, among `count` elements."""
    count = draw(st.integers(0, 200))
    size = draw(st.integers(1, 17))
    one = st.sets(st.integers(0, count - 1)) if count else st.just(set())
    return [np.array(sorted(draw(one)), np.int32) for _ in range(size)], count


@given(selections())
def test_edges_ascend_from_the_first_element_to_the_last(drawn):
    selected, count = drawn
    size = len(selected)
    boundaries = [local_boundaries(indices, size, count) for indices in selected]
    edges = consensus(np.sum(boundaries, axis=0), size, count)
    assert all((cuts.dtype, cuts.shape) == (np.int64, (size - 1,)) for cuts in boundaries)
    assert (edges.dtype, edges.shape) == (np.int64, (size + 1,))
    assert (edges[0], edges[-1]) == (0, count)
    assert np.all(np.diff(edges) >= 0)


@given(selections())
def test_boundaries_of_one_rank_balance_its_own_selection(drawn):
    selected, count = drawn
    size, indices = len(selected), selected[0]
    edges = consensus(size * local_boundaries(indices, size, count), size, count)
    shares = [np.count_nonzero((indices >= start) & (indices < stop)) for start, stop in pairwise(edges)]
    if indices.size:
        assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("size", RANKS)
def test_with_nothing_selected_regions_are_equally_long(size):
    edges = consensus(size * local_boundaries(np.empty(0, np.int32), size, 100), size, 100)
    assert np.diff(edges).max() - np.diff(edges).min() <= 1


def test_boundaries_of_long_arrays_are_summed_without_overflow():
    size, count = 1024, 1 << 31
    indices = np.arange(count - 2 * size, count, dtype=np.int64).astype(index_dtype(count))
    total = size * local_boundaries(indices, size, count)
    assert consensus(total, size, count)[1] == count - 2 * size + 2


# -- balance -------------------------------------------------------------------------------------

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=20).map(lambda sizes: np.array(sizes, np.int64))


@given(SIZES)
def test_balancing_moves_only_the_cuts(sizes):
    ranks, ends = range(sizes.size), np.cumsum(sizes)
    everything = np.arange(ends[-1])
    before = np.split(everything, ends[:-1])
    after = [np.full(size, -1) for size in balanced_sizes(sizes)]
    for rank in ranks:
        for piece in incoming_pieces(sizes, rank):
            (sent,) = [other for other in outgoing_pieces(sizes, piece.rank) if other.rank == rank]
            after[rank][piece.start : piece.stop] = before[piece.rank][sent.start : sent.stop]
    assert np.array_equal(np.concatenate(after), everything)
    small, larger = divmod(everything.size, sizes.size)
    assert [part.size for part in after] == [small + (rank < larger) for rank in ranks]


@given(SIZES)
def test_sent_pieces_equal_expected_pieces(sizes):
    ranks = range(sizes.size)
    sent = {(rank, to, stop - start) for rank in ranks for to, start, stop in outgoing_pieces(sizes, rank)}
    expected = {(source, rank, stop - start) for rank in ranks for source, start, stop in incoming_pieces(sizes, rank)}
    assert sent == expected
    assert all(length > 0 for *_, length in sent)


def test_one_rank_with_all_elements_gives_each_rank_a_share():
    sizes = np.array([0, 7, 0], np.int64)
    assert outgoing_pieces(sizes, 1) == [(0, 0, 3), (1, 3, 5), (2, 5, 7)]
    assert outgoing_pieces(sizes, 0) == []
    assert incoming_pieces(sizes, 2) == [(1, 0, 2)]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([4, 0, 0, 0, 0], True),
        ([4, 0, 0, 0], False),
        ([8, 1, 1, 1, 1, 1, 1, 1, 1], True),
        ([4, 1, 1, 1, 1, 0, 0, 0], False),
        ([0, 0, 0, 0, 0, 0], False),
        ([9], False),
    ],
)
def test_more_than_four_times_the_average_is_unbalanced(sizes, expected):
    assert is_unbalanced(np.array(sizes, np.int64)) is expected
    assert expected is (max(sizes) > 4 * math.fsum(sizes) / len(sizes))
