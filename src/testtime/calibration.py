"""Calibrated confidence: as sure, on average, as the frozen classifier.

Adapted answers are right a little more often than the frozen ones, but far more sure. `Calibration` softens them by a
temperature that keeps their mean confidence at the frozen classifier's. It uses no labels and
changes no answer. Where the frozen classifier is far too sure, so are these.

>>> from testtime.synthetic import toy
>>> task, stream, labels = toy()
>>> frozen = task.zero_shot(stream[:, 0]).softmax(-1).amax(-1)
>>> sure = (4 * task.zero_shot(stream[:, 0])).log_softmax(-1)
>>> softened = Calibration().update(sure, frozen)
>>> f"{sure.amax(-1).exp().mean():.2f} {softened.mean():.2f} {frozen.mean():.2f}"
'0.99 0.94 0.94'
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

TEMPERATURES = (16.0, 8.0, 4.0, 2.0, 1.0, 0.5)  # each half of the one before it
MEMORY = 0.995  # an image's weight falls by this factor with every later one: the last 200 or so count


class Calibration:
    """Running mean confidences along a stream: the frozen classifier's, and the method's at each temperature.

    An image's confidence is interpolated between the two temperatures whose means enclose the frozen classifier's.
    """

    def __init__(self, sums: Tensor | None = None) -> None:
        """`sums` (7,) resumes an earlier stream: weighted sums of the frozen confidence, then at each temperature."""
        self.sums = torch.zeros(1 + len(TEMPERATURES), dtype=torch.float64) if sums is None else sums

    def copy(self) -> Calibration:
        """A second one that continues from here on its own."""
        return Calibration(self.sums)

    def update(self, log_probabilities: Tensor, frozen: Tensor) -> Tensor:
        """The calibrated confidence (N,) of each answer.

        `log_probabilities` (N, C) are the method's, all finite; `frozen` (N,) is the frozen classifier's confidence.
        """
        return torch.tensor(self.follow(levels(log_probabilities, frozen[:, None]).tolist()), dtype=torch.float64)

    def follow(self, rows: Sequence[Sequence[float]]) -> list[float]:
        """The same for answers whose `levels` are known."""
        sums, found = self.sums.tolist(), []
        for row in rows:  # plain numbers: a row is too short for tensors to be faster
            sums = [MEMORY * total + value for total, value in zip(sums, row, strict=True)]
            above = min(max(bisect_left(sums, sums[0], lo=1), 2), len(TEMPERATURES))  # the first that is sure enough
            low, high = sums[above - 1], sums[above]
            share = min(max((sums[0] - low) / max(high - low, 1e-12), 0.0), 1.0)
            found.append((1 - share) * row[above - 1] + share * row[above])
        self.sums = torch.tensor(sums, dtype=torch.float64)
        return found


def levels(log_probabilities: Tensor, frozen: Tensor) -> Tensor:
    """Confidences (N, 7) in float64: the frozen classifier's (N, 1), then the method's at each temperature."""
    powers = ((log_probabilities - log_probabilities.amax(-1, keepdim=True)) / TEMPERATURES[0]).exp()
    columns = [frozen.reciprocal()]
    for _ in TEMPERATURES:
        columns.append(powers.sum(-1, keepdim=True))
        powers = powers * powers  # half the temperature
    return torch.cat(columns, -1).double().reciprocal()
