"""The models of imbalance: schedules that all ranks agree on, their texts, and the moments of the traces."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

import asyncoll
from asyncoll.testing import expected_round_s
from tests.support.cases import SIZES, looped
from trainers.imbalance import (
    IMBALANCES,
    AllSkewed,
    Balanced,
    FixedSkewed,
    Imbalance,
    KRandom,
    OneRandom,
    Real,
    Rotating,
    Trace,
    TraceName,
    parse_duration,
    parse_imbalance,
)

MODELS: list[Imbalance] = [
    Balanced(),
    Real(),
    OneRandom(0.2),
    KRandom(2, 0.32),
    Rotating(0.2, 10),
    AllSkewed(0.05, 0.4),
    FixedSkewed(0.05, 0.4),
    Trace("video", 0.1),
    Trace("language", 1.0),
    Trace("cloud", 0.25),
]


def delays(model: Imbalance, round_: int, size: int, seed: int = 7) -> list[float]:
    """The delays of all ranks in one round."""
    return [model.delay_s(seed, round_, rank, size) for rank in range(size)]


def test_durations_and_models_are_parsed() -> None:
    assert parse_duration("100ms") == pytest.approx(0.1)
    assert parse_duration("0.2s") == pytest.approx(0.2)
    assert parse_imbalance("none") == Balanced()
    assert parse_imbalance("real") == Real()
    assert parse_imbalance("one-random:200ms") == OneRandom(0.2)
    assert parse_imbalance("k-random:4:0.3s") == KRandom(4, 0.3)
    assert parse_imbalance("rotating:200ms:10") == Rotating(0.2, 10)
    assert parse_imbalance("all-skewed:50ms-0.4s") == AllSkewed(0.05, 0.4)
    assert parse_imbalance("fixed-skewed:50ms-0.4s") == FixedSkewed(0.05, 0.4)
    assert parse_imbalance("trace-video:0.1") == Trace("video", 0.1)
    assert parse_imbalance("trace-cloud") == Trace("cloud", 1.0)


@looped("text", ["100", "ms", "-1s", "1 s", "1m", "", "1e3ms", "nans"])
def test_bad_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration such as 100ms"):
        parse_duration(text)


@looped(
    ("text", "words"),
    [
        ("", "is none of: none, real, one-random:200ms"),
        ("some", "'some' is none of"),
        ("none:1s", "'none' has no argument, and '1s' was given"),
        ("real:1s", "'real' has no argument"),
        ("one-random", "not a duration"),
        ("k-random:200ms", "'200ms' is not a positive number"),
        ("k-random:0:200ms", "'0' is not a positive number"),
        ("rotating:200ms", "'' is not a positive number"),
        ("rotating:200ms:x", "'x' is not a positive number"),
        ("all-skewed:50ms", "not a duration"),
        ("all-skewed:400ms-50ms", "longer to a shorter"),
        ("fixed-skewed:400ms-50ms", "longer to a shorter"),
        ("trace-video:0", "'0' is not a factor above 0"),
        ("trace-video:fast", "'fast' is not a factor above 0"),
        ("trace-audio:1", "'trace-audio:1' is none of"),
    ],
)
def test_bad_models_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_imbalance(text)


@looped("model", MODELS)
def test_a_model_prints_as_it_is_parsed(model: Imbalance) -> None:
    assert parse_imbalance(str(model)) == model


@looped("form", IMBALANCES)
def test_every_listed_form_is_parsed_and_printed(form: str) -> None:
    assert str(parse_imbalance(form)) == form


def test_every_model_is_listed() -> None:
    assert {type(model) for model in MODELS} == {type(parse_imbalance(form)) for form in IMBALANCES}


@looped("model", MODELS)
def test_a_draw_is_a_function_of_seed_round_and_rank_alone(model: Imbalance) -> None:
    for size in SIZES:
        if isinstance(model, KRandom) and size < model.count:
            continue
        rounds = [delays(model, round_, size) for round_ in range(1, 8)]
        assert [delays(model, round_, size) for round_ in reversed(range(1, 8))] == rounds[::-1]
        assert all(delay_s >= 0.0 for of_round in rounds for delay_s in of_round)


@looped("model", [OneRandom(0.2), KRandom(3, 0.2), Trace("video", 1.0)])
def test_other_seeds_draw_otherwise(model: Imbalance) -> None:
    one, other = ([delays(model, round_, 8, seed) for round_ in range(1, 20)] for seed in (1, 2))
    assert one != other


@looped("count", [1, 2, 4])
def test_k_random_delays_k_ranks_and_all_equally_often(count: int) -> None:
    late: Counter[int] = Counter()
    rounds, size = 1000, 5
    for model in (KRandom(count, 0.2), *([OneRandom(0.2)] if count == 1 else [])):
        late.clear()
        for round_ in range(1, rounds + 1):
            of_round = delays(model, round_, size)
            assert sorted(of_round) == [0.0] * (size - count) + [0.2] * count
            late.update(rank for rank, delay_s in enumerate(of_round) if delay_s)
        share = count / size  # Binomial(1000, share)
        deviation = (rounds * share * (1 - share)) ** 0.5
        assert all(abs(late[rank] - rounds * share) < 5 * deviation for rank in range(size))


def test_k_random_needs_k_ranks() -> None:
    with pytest.raises(asyncoll.UsageError, match="k-random:4:300ms delays 4 ranks of each round, and there are 3"):
        KRandom(4, 0.3).delay_s(0, 1, 0, 3)


@looped("size", SIZES)
def test_the_straggler_moves_every_n_rounds(size: int) -> None:
    model = Rotating(0.2, 3)
    for round_ in range(1, 6 * size + 1):
        late = [rank for rank, delay_s in enumerate(delays(model, round_, size)) if delay_s == 0.2]
        assert late == [(round_ - 1) // 3 % size]


def test_all_skewed_spreads_evenly_and_shifts_by_one_rank() -> None:
    skew, size = AllSkewed(0.05, 0.4), 8
    rounds = [delays(skew, round_, size) for round_ in range(1, size + 1)]
    for before, after in pairwise(rounds):
        assert sorted(before) == pytest.approx([0.05 * (1 + k) for k in range(size)])
        assert after == before[1:] + before[:1]
    assert [sum(of_rank) / size for of_rank in zip(*rounds, strict=True)] == pytest.approx([0.225] * size)


def test_fixed_skewed_spreads_evenly_and_stays() -> None:
    for round_ in range(1, 5):
        assert delays(FixedSkewed(0.05, 0.4), round_, 8) == pytest.approx([0.05 * (1 + k) for k in range(8)])


@looped(
    ("name", "least_ms", "most_ms", "mean_ms", "deviation_ms"),
    [("video", 201, 3410, 1235, 706), ("language", 179, 3482, 475, 144), ("cloud", 399, 1892, 454, 116)],
)
def test_traces_have_the_papers_moments(
    name: TraceName, least_ms: float, most_ms: float, mean_ms: float, deviation_ms: float
) -> None:
    """20,000 steps; their deviation varies by 2 % over seeds, because long steps are rare."""
    drawn = 1000 * np.array([Trace(name, 1.0).step_s(3, round_, rank) for round_ in range(5000) for rank in range(4)])
    assert drawn.mean() == pytest.approx(mean_ms, rel=0.02)
    assert drawn.std() == pytest.approx(deviation_ms, rel=0.03)
    assert drawn.min() == pytest.approx(least_ms, rel=0.01)
    assert drawn.max() == pytest.approx(most_ms, rel=0.01)
    assert drawn.min() >= least_ms - 1e-9
    assert drawn.max() <= most_ms + 1e-9
    tenth = 1000 * np.array([Trace(name, 0.1).step_s(3, round_, 0) for round_ in range(10)])
    assert tenth == pytest.approx(drawn[::4][:10] / 10)


def test_a_trace_is_the_whole_step_and_a_delay_comes_on_top() -> None:
    trace, delay = Trace("cloud", 1.0), FixedSkewed(0.05, 0.4)
    for round_ in range(1, 50):
        for computed_s in (0.0, 0.1, 0.399, 1.0, 2.0):
            taken_s = computed_s + trace.delay_s(0, round_, 1, 4, computed_s)
            assert taken_s == pytest.approx(max(computed_s, trace.step_s(0, round_, 1)))
            assert delay.delay_s(0, round_, 0, 4, computed_s) == 0.05


def test_the_time_model_takes_traces_as_whole_steps() -> None:
    """Rounds of one rank take its steps, whatever part of them is computation."""
    trace, rounds = Trace("cloud", 1.0), 500
    mean_s = sum(trace.step_s(0, round_, 0) for round_ in range(1, rounds + 1)) / rounds
    for compute_s in (0.0, 0.1, 0.39):
        assert expected_round_s("synchronous", compute_s, trace, 1, 0, rounds) == pytest.approx(mean_s)
