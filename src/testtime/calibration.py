"""Calibrated confidence: as sure, on average, as the frozen classifier.

Adapted answers are right a little more often than the frozen ones, but far more sure. `Calibration` softens them by a
temperature that keeps their mean confidence at the frozen classifier's. It uses no labels, changes no answer, and
is no better calibrated than the frozen classifier is.

>>> from testtime.synthetic import toy
>>> task, stream, labels = toy()
>>> frozen = task.zero_shot(stream[:, 0]).softmax(-1).amax(-1)
>>> sure = (4 * task.zero_shot(stream[:, 0])).softmax(-1)
>>> softened = Calibration().update(sure, frozen)
>>> f"{sure.amax(-1).mean():.2f} {softened.mean():.2f} {frozen.mean():.2f}"
'0.99 0.94 0.94'
"""

from __future__ import annotations

import torch
from torch import Tensor

TEMPERATURES = (16.0, 8.0, 4.0, 2.0, 1.0, 0.5, 0.25)  # each half of the one before it
MEMORY = 0.995  # an image's weight falls by this factor with every later one: the last 200 or so count


class Calibration:
    """Running mean confidences along a stream: the frozen classifier's, and the method's at each temperature.

    An image's confidence is interpolated between the two temperatures whose means enclose the frozen classifier's.
    """

    def __init__(self, sums: Tensor | None = None) -> None:
        """`sums` (8,) resumes an earlier stream: weighted sums of the frozen confidence, then at each temperature."""
        self.sums = torch.zeros(1 + len(TEMPERATURES), dtype=torch.float64) if sums is None else sums

    def copy(self) -> Calibration:
        """A second one that continues from here on its own."""
        return Calibration(self.sums)

    def update(self, probabilities: Tensor, frozen: Tensor) -> Tensor:
        """The calibrated confidence (N,) of each answer, by its probabilities (N, C) and the frozen confidence (N,)."""
        found = torch.cat([frozen[:, None].to(probabilities), _confidences(probabilities)], 1).double().cpu()
        sums = []
        for row in found:
            self.sums = MEMORY * self.sums + row
            sums.append(self.sums)
        means = torch.stack(sums) if sums else found
        target, means, found = means[:, :1], means[:, 1:], found[:, 1:]
        above = (means < target).sum(1, keepdim=True).clamp(1, len(TEMPERATURES) - 1)  # the first mean that is enough
        low, high = means.gather(1, above - 1), means.gather(1, above)
        weight = ((target - low) / (high - low).clamp_min(1e-12)).clamp(0, 1)
        return found.gather(1, above - 1).lerp(found.gather(1, above), weight)[:, 0]


def _confidences(probabilities: Tensor) -> Tensor:
    """The confidence of each answer at every temperature: (N, C) -> (N, 7), ascending."""
    logits = probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()
    powers = ((logits - logits.amax(-1, keepdim=True)) / TEMPERATURES[0]).exp()
    found = []
    for _ in TEMPERATURES:
        found.append(powers.sum(-1).reciprocal())
        powers = powers * powers  # half the temperature
    return torch.stack(found, -1)
