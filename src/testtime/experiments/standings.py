"""What a leaderboard says of a method: statistics over cells, with intervals, and ranks where the intervals separate.

A cell is one order of one stream of one dataset. Datasets and streams are chosen, and only orders are drawn at random:
so the spread is taken within each stream of a dataset (a group), over its orders. Every group counts the same, also on
a board where some have more orders than others.

>>> groups = {("pets", "sorted"): [Cell(1, 0.50, 0.48, 0.1), Cell(2, 0.54, 0.49, 0.1)]}
>>> found = standing(groups)
>>> round(found.accuracy, 3), round(found.gap.mean, 3), found.below
(0.52, 0.035, 0.0)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, variance
from typing import NamedTuple

import numpy as np

from testtime import metrics

SURE = 0.95  # of an interval
ANGLES = 20_001  # points of the integral below, which ends
FARTHEST = 40.0  # where nothing is left, if it does not end before


class Cell(NamedTuple):
    """The scores of a method on one order of a stream, beside zero-shot's on the same; fractions."""

    seed: int
    accuracy: float
    zero_shot: float
    calibration_error: float


Group = tuple[str, str]  # a dataset and a stream
Groups = Mapping[Group, Sequence[Cell]]


class Interval(NamedTuple):
    """A mean and its 95% interval; without bounds if a group has only one order."""

    mean: float
    error: float | None  # the standard error of the mean
    low: float | None
    high: float | None


class Standing(NamedTuple):
    """A method over all its cells."""

    cells: int
    accuracy: float
    error: float | None  # the standard error of the mean accuracy
    tail: float  # expected tail accuracy: the mean accuracy over the worst tenth of the cells
    worst: float  # the lowest accuracy of any cell,
    where: tuple[str, str, int]  # and which cell: dataset, stream, order
    gap: Interval  # of the paired differences to zero-shot, on the same cell
    below: float  # the share of cells below zero-shot
    calibration_error: float


def standing(groups: Groups) -> Standing:
    """The statistics of a method's cells."""
    found = [(cell.accuracy, (*group, cell.seed)) for group, cells in groups.items() for cell in cells]
    every = [cell for cells in groups.values() for cell in cells]
    accuracy = mean_of([[cell.accuracy for cell in cells] for cells in groups.values()])
    worst, where = min(found)
    return Standing(
        len(every),
        accuracy.mean,
        accuracy.error,
        metrics.tail_mean([cell.accuracy for cell in every]),
        worst,
        where,
        mean_of([[cell.accuracy - cell.zero_shot for cell in cells] for cells in groups.values()]),
        fmean(fmean(cell.accuracy < cell.zero_shot for cell in cells) for cells in groups.values()),
        fmean(fmean(cell.calibration_error for cell in cells) for cells in groups.values()),
    )


def mean_of(groups: Sequence[Sequence[float]]) -> Interval:
    """The mean of the groups' means with its t interval, from the variance within each group of independent draws.

    Groups may differ in size and in variance, so the degrees of freedom are Satterthwaite's.
    """
    mean = fmean(map(fmean, groups))
    if min(map(len, groups)) < 2:
        return Interval(mean, None, None, None)
    parts = [variance(group) / len(group) / len(groups) ** 2 for group in groups]
    squared = math.fsum(parts)
    if squared == 0:
        return Interval(mean, 0.0, mean, mean)
    freedom = squared**2 / math.fsum(part**2 / (len(group) - 1) for part, group in zip(parts, groups, strict=True))
    half = t_quantile(freedom) * math.sqrt(squared)
    return Interval(mean, math.sqrt(squared), mean - half, mean + half)


def t_quantile(freedom: float) -> float:
    """How far a t variable of so many degrees of freedom, one or more, lies from 0 in 95% of cases.

    With t = sqrt(freedom) * tan(angle), the angle has a density on a finite range: cos(angle) ** (freedom - 1).

    >>> round(t_quantile(1), 3), round(t_quantile(19), 3)
    (12.706, 2.093)
    """
    freedom = min(freedom, 1e6)  # there, it is the normal distribution's
    angles = np.linspace(0, min(math.pi / 2, FARTHEST / math.sqrt(freedom)), ANGLES)
    density = np.cos(angles) ** (freedom - 1)
    mass = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(float(np.interp(SURE, mass / mass[-1], angles)))


def ranks(gaps: Sequence[Interval | None]) -> list[int | None]:
    """Each one's rank: 1, and one more for every other whose whole interval lies above its own. So ties share a rank.

    None, which has no rank, is left out, and so is one without bounds.

    >>> ranks([Interval(0.03, 0.005, 0.02, 0.04), Interval(0.02, 0.005, 0.01, 0.03), Interval(0, 0, 0, 0)])
    [1, 1, 3]
    """
    bounds = [(gap.low, gap.high) if gap and gap.low is not None and gap.high is not None else None for gap in gaps]
    return [
        None if own is None else 1 + sum(other is not None and other[0] > own[1] for other in bounds) for own in bounds
    ]
