"""MTA: mean shift for test-time augmentation.

Zanella and Ben Ayed, "On the Test-Time Zero-Shot Generalization of Vision-Language Models: Do We Really Need
Prompt Learning?", CVPR 2024.

The image is represented by the mode of its views' density, found by mean shift. Each view has an inlierness
score, optimised along with the mode, that is high where the density is high and where views with similar
predictions score high; it replaces a threshold on confidence. Nothing is trained and nothing is remembered.

Departures: a bandwidth uses at least one neighbour, where the released code uses none with fewer than five
views and gives NaN; a single view is its own mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from testtime import ops
from testtime.methods.base import Base, require
from testtime.types import Task


class State(NamedTuple):
    """Nothing is remembered."""


def settled(update: Callable[[Tensor], Tensor], start: Tensor, limit: int, threshold: float) -> Tensor:
    """`start` after `limit` updates, or after the first that moves it by less than `threshold`."""
    x, moving = start, torch.ones((), dtype=torch.bool, device=start.device)
    for _ in range(limit):
        new = update(x)
        x, moving = torch.where(moving, new, x), moving & ((new - x).norm() >= threshold)
    return x


@dataclass(frozen=True)
class MTA(Base):
    """Mean shift over the views; the defaults are the released settings.

    >>> import testtime as tt
    >>> task, stream, labels = tt.toy(views=16)
    >>> logits, _ = MTA().scan(task, State(), stream)
    >>> logits.shape == (len(stream), task.classes)
    True
    """

    name: ClassVar[str] = "mta"
    summary: ClassVar[str] = "Mean shift over the views, with inlierness scores; learns nothing"
    source: ClassVar[str] = (
        "Zanella and Ben Ayed, On the Test-Time Zero-Shot Generalization of Vision-Language Models: Do We "
        "Really Need Prompt Learning?, CVPR 2024"
    )
    assumes: ClassVar[tuple[str, ...]] = ("views",)
    adapts: ClassVar[str] = "visual"

    lambda_y: float = 0.2  # weight of the entropy barrier: higher makes inlierness more even
    lambda_q: float = 4.0  # weight of the agreement between views with similar predictions
    bandwidth_fraction: float = 0.3  # fraction of the other views, the nearest, that a view's bandwidth uses
    max_iter: int = 5  # rounds, and iterations on each of the two unknowns in a round
    threshold: float = 1e-6  # a change below it ends these iterations

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.lambda_y > 0, "lambda_y", self.lambda_y, "must be above 0")
        require(self.lambda_q >= 0, "lambda_q", self.lambda_q, "must be 0 or more")
        fraction = self.bandwidth_fraction
        require(0 < fraction <= 1, "bandwidth_fraction", fraction, "must lie in (0, 1]")
        require(self.max_iter >= 0, "max_iter", self.max_iter, "must be 0 or more")
        require(self.threshold >= 0, "threshold", self.threshold, "must be 0 or more")

    def init(self, task: Task) -> State:
        return State()

    def step(self, task: Task, state: State, views: Tensor) -> tuple[Tensor, State]:
        prob = task.zero_shot(views).softmax(1)  # (V, C)
        agreement = prob @ prob.T  # (V, V)
        width = self._width(views)

        def log_kernel(mode: Tensor) -> Tensor:  # (V,)
            return -(views - mode).square().sum(1) / width

        inlierness, mode = views.new_full((len(views),), 1 / len(views)), views[0]
        for _ in range(self.max_iter):
            # 1. inlierness scores at this mode
            density = log_kernel(mode).exp()

            def weigh(y: Tensor, density: Tensor = density) -> Tensor:
                return ((density + self.lambda_q * (agreement @ y)) / self.lambda_y).softmax(0)

            inlierness = settled(weigh, inlierness, self.max_iter, self.threshold)

            # 2. the mode under these scores, by mean shift on the sphere
            log_score = inlierness.log()

            def climb(mode: Tensor, log_score: Tensor = log_score) -> Tensor:
                # a softmax of logarithms is the same weighted mean, and no 0/0 where every density underflows
                return ops.unit((log_kernel(mode) + log_score).softmax(0) @ views)

            mode = settled(climb, mode, self.max_iter, self.threshold)
        return task.scale * (task.text @ mode), state

    def _width(self, views: Tensor) -> Tensor:
        """Twice each view's squared bandwidth: its mean squared distance to its nearest neighbours, (V,)."""
        others = len(views) - 1
        near = min(max(1, int(self.bandwidth_fraction * others)), others)
        # not by inner products, whose rounding error is as large as the distance of nearly equal views
        distance = torch.cdist(views, views, compute_mode="donot_use_mm_for_euclid_dist").square()
        nearest = distance.sort(dim=1).values[:, 1 : near + 1]  # the nearest of all is the view itself
        # duplicate views would have no width
        return (nearest.sum(1) / max(near, 1)).clamp_min(torch.finfo(views.dtype).eps)
