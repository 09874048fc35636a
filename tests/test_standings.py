"""The statistics of a leaderboard, against references of their own: simulation, SciPy, plain loops."""

from __future__ import annotations

import math
from random import Random
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testtime.experiments.standings import Cell, Interval, mean_of, ranks, standing, t_quantile

PETS, CARS = ("pets", "sorted"), ("cars", "shuffled")


def cells(*accuracies: float, zero_shot: float = 0.5) -> list[Cell]:
    return [Cell(seed, value, zero_shot, 0.1 * seed) for seed, value in enumerate(accuracies, start=1)]


@pytest.mark.parametrize("freedom", [1, 1.7, 2, 5, 19, 60.5, 400, 1e5, 1e9])
def test_the_quantiles_are_scipys(freedom: float) -> None:
    stats = pytest.importorskip("scipy.stats", reason="SciPy is not installed")
    assert t_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, min(freedom, 1e6)), rel=1e-6)


def test_the_quantiles_are_those_of_a_printed_table() -> None:
    printed = {1: 12.706, 2: 4.303, 5: 2.571, 10: 2.228, 19: 2.093, 30: 2.042, 120: 1.980, 10**6: 1.960}
    assert {freedom: round(t_quantile(freedom), 3) for freedom in printed} == printed


def test_one_group_has_the_t_interval_of_a_sample() -> None:
    stats = pytest.importorskip("scipy.stats", reason="SciPy is not installed")
    values = [0.3, 0.5, 0.45, 0.61, 0.38]
    found = mean_of([values])
    assert found.error == pytest.approx(stats.sem(values))
    expected = stats.t.interval(0.95, len(values) - 1, fmean(values), stats.sem(values))
    assert (found.low, found.high) == pytest.approx(expected, rel=1e-6)


def test_two_groups_of_one_size_have_welchs_degrees_of_freedom() -> None:
    """The mean of two groups' means has the error of half their difference, for which SciPy has Welch's test."""
    stats = pytest.importorskip("scipy.stats", reason="SciPy is not installed")
    one, two = [0.3, 0.5, 0.45, 0.61, 0.38], [0.9, 0.91, 0.89, 0.92, 0.9]
    found, welch = mean_of([one, two]), stats.ttest_ind(one, two, equal_var=False).confidence_interval(0.95)
    assert found.high - found.low == pytest.approx((welch.high - welch.low) / 2, rel=1e-6)
    assert found.mean == pytest.approx(fmean(one + two))


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    draw, inside, rounds = np.random.default_rng(0), 0, 1500
    for _ in range(rounds):
        groups = [draw.normal(mean, spread, 6).tolist() for mean, spread in ((0.2, 0.01), (0.6, 0.05), (0.9, 0.02))]
        found = mean_of(groups)
        inside += found.low <= (0.2 + 0.6 + 0.9) / 3 <= found.high
    assert 0.935 < inside / rounds < 0.975


def test_the_error_is_over_orders_and_not_over_streams() -> None:
    same = standing({PETS: cells(0.2, 0.2, 0.2), CARS: cells(0.9, 0.9, 0.9)})
    assert same.error == 0 and same.accuracy == pytest.approx(0.55) and same.gap[1:] == (0, *[same.gap.mean] * 2)


def test_one_order_has_no_interval_and_no_rank() -> None:
    alone = standing({PETS: cells(0.2), CARS: cells(0.9, 0.8)})
    assert alone.error is None and alone.gap.low is None and alone.gap.mean == pytest.approx((0.2 + 0.85) / 2 - 0.5)
    assert ranks([alone.gap, Interval(0, 0, 0, 0)]) == [None, 1]


def test_more_orders_of_a_stream_make_it_surer_and_not_weightier() -> None:
    few = standing({PETS: cells(0.2, 0.4), CARS: cells(0.9, 0.8)})
    many = standing({PETS: cells(*[0.2, 0.4] * 10), CARS: cells(0.9, 0.8)})
    assert many.accuracy == pytest.approx(few.accuracy) and many.gap.mean == pytest.approx(few.gap.mean)
    assert many.below == few.below == 0.5 and many.error < few.error


def test_differences_are_paired_cell_by_cell() -> None:
    """The accuracy varies much between orders, zero-shot's with it: their difference hardly at all."""
    draw = Random(1)
    base = [draw.uniform(0.3, 0.7) for _ in range(20)]
    found = standing({PETS: [Cell(k, value + 0.01 + 0.0001 * (k % 2), value, 0.1) for k, value in enumerate(base)]})
    assert found.error > 0.01 and 0.01 < found.gap.low < found.gap.high < 0.0102


def test_the_tail_is_the_mean_of_the_worst_tenth_of_all_cells() -> None:
    draw = Random(2)
    groups = {("d", str(k)): cells(*(draw.random() for _ in range(10))) for k in range(3)}
    every = sorted(cell.accuracy for each in groups.values() for cell in each)
    found = standing(groups)
    assert found.tail == pytest.approx(sum(every[:3]) / 3) and found.worst == every[0] and found.cells == 30
    dataset, stream, seed = found.where
    assert groups[dataset, stream][seed - 1].accuracy == found.worst


def test_cells_below_zero_shot_are_counted_and_ties_are_not() -> None:
    found = standing({PETS: cells(0.4, 0.5, 0.6, 0.49)})
    assert found.below == 0.5 and found.calibration_error == pytest.approx(0.25)


@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(0, 0.3)), min_size=1, max_size=8))
def test_a_rank_is_one_more_than_those_that_are_surely_better(drawn: list[tuple[float, float]]) -> None:
    gaps = [Interval(mean, half / 2, mean - half, mean + half) for mean, half in drawn]
    found = ranks(gaps)
    assert min(found) == 1
    for mine, rank in zip(gaps, found, strict=True):
        assert rank == 1 + sum(other.low > mine.high for other in gaps)
    for a, b in zip(gaps, gaps[1:], strict=False):
        if math.isclose(a.mean, b.mean) and a == b:
            assert found[gaps.index(a)] == found[gaps.index(b)]


def test_who_has_not_all_cells_neither_has_a_rank_nor_takes_one() -> None:
    sure = [Interval(mean, 0.001, mean - 0.002, mean + 0.002) for mean in (0.3, 0.2, 0.1)]
    assert ranks([None, sure[1], sure[2]]) == [None, 1, 2] and ranks(sure) == [1, 2, 3]
