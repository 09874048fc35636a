"""TPS: test-time prototype shifting.

Sui, Wang and Yeung-Levy, "Just Shift It: Test-Time Prototype Shifting for Zero-Shot Generalization with
Vision-Language Models", WACV 2025.

Every class prototype is shifted in feature space, by a vector learned for the one image at hand so that its
confident views agree: the entropy of their mean prediction falls. The shift starts at zero for each image and
is forgotten after it, so no text encoder is run and nothing is remembered.

Departures: selection keeps at least one view, where the released code keeps none of fewer than ten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from testtime import ops
from testtime.methods.tuning import Tuning
from testtime.types import Task


class State(NamedTuple):
    """Nothing is remembered."""


def gradient(rows: Tensor, text: ops.Prototypes, scale: float) -> Tensor:
    """Gradient of the entropy of the mean softmax over rows (R, D), by the prototypes' vectors: (C, D)."""
    p = (scale * (rows @ text.direction.T)).softmax(1)  # (R, C)
    log_mean = p.mean(0).clamp_min(torch.finfo(p.dtype).tiny).log()
    slope = p * ((p @ log_mean)[:, None] - log_mean) * (scale / len(rows))
    by_direction = slope.T @ rows
    # the part along a prototype cannot turn it
    along = (by_direction * text.direction).sum(1, keepdim=True)
    return (by_direction - along * text.direction) / text.length


@dataclass(frozen=True)
class TPS(Tuning):
    """Test-time prototype shifting; the defaults are the released settings.

    >>> import testtime as tt
    >>> task, stream, _ = tt.toy(views=32)
    >>> logits, _ = TPS().step(task, State(), stream[0])
    >>> bool(tt.ops.entropy(logits) < tt.ops.entropy(task.zero_shot(stream[0, 0])))
    True
    """

    name: ClassVar[str] = "tps"
    summary: ClassVar[str] = "Test-time prototype shifting: one step per image on the class prototypes themselves"
    source: ClassVar[str] = (
        "Sui, Wang and Yeung-Levy, Just Shift It: Test-Time Prototype Shifting for Zero-Shot Generalization "
        "with Vision-Language Models, WACV 2025"
    )
    assumes: ClassVar[tuple[str, ...]] = ("views", "LLM texts")
    adapts: ClassVar[str] = "text"
    gradients: ClassVar[str] = "closed form"

    def init(self, task: Task) -> State:
        return State()

    def step(self, task: Task, state: State, views: Tensor) -> tuple[Tensor, State]:
        shifted = ops.unit(task.text + self.shift(task, views))
        return task.scale * (shifted @ views[0]), state

    def shift(self, task: Task, views: Tensor) -> Tensor:
        """The shift of the text prototypes for one image (V, D): (C, D)."""
        # In double precision for any input: the first step is nearly a sign, so where a gradient is about zero
        # its rounding error alone moves a coordinate by twice the learning rate.
        start, views = task.text.double(), views.double()
        shift, moments = torch.zeros_like(start), None
        for number in range(1, self.steps + 1):
            text = ops.prototypes(start + shift)
            # released code, unlike TPT: the views are reselected at every step, by the shifted prototypes
            rows = views[ops.confident(task.scale * (views @ text.direction.T), self.selection)]
            grad = gradient(rows, text, task.scale)
            if self.steps == 1:
                shift = self.adam.first(shift, grad)
            else:
                shift, moments = self.adam.step(shift, grad, moments, number)
        return shift.to(task.text.dtype)
