"""TPS on the CPU in one pass: each class's prototype is shifted, used and discarded while it is in the cache.

Optimisations over `methods.tps`, which reads like the paper: the directions of the text prototypes, from which every
image starts, are cached; and the shifts, which are as large as the prototypes, are never stored. One step of AdamW from
zero, in double precision as there. S settings side by side, R confident views, C classes, D features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from testtime import ops
from testtime.methods.tps import TPS, State
from testtime.steppers.cpu.loops import Array, ByImage, compiled, dot
from testtime.types import Task


class Stepper(ByImage):
    """S runs of TPS over one stream; see `steppers.Stepper`."""

    def __init__(self, task: Task, methods: Sequence[TPS], states: Sequence[State]) -> None:
        self.task, self.methods, self.text = task, methods, task.text.numpy()
        self.at = ops.prototypes(task.text.double())
        self.rates = np.array([method.lr if method.steps else 0.0 for method in methods])
        self.eps = np.array([method.adamw_eps for method in methods])

    def _step(self, views: Tensor, peeking: bool) -> tuple[Tensor, list[bool]]:
        task, direction = self.task, self.at.direction
        logits = views.new_empty(len(self.methods), task.classes)
        doubles = views.double()
        scores = task.scale * (doubles @ direction.T)  # (V, C)
        chosen = ops.confident(scores, self.methods[0].selection)
        rows, p = doubles[chosen], scores[chosen].softmax(1)
        log_mean = p.mean(0).clamp_min(torch.finfo(p.dtype).tiny).log()
        slope = p * ((p @ log_mean)[:, None] - log_mean) * (task.scale / len(rows))
        numbers = self.rates, self.eps, task.scale, logits.numpy()
        predict(self.text, *(part.numpy() for part in (*self.at, slope.T.contiguous(), rows, views[0])), *numbers)
        return logits, [False] * len(self.methods)

    def snapshot(self) -> list[State]:
        return [State() for _ in self.methods]  # nothing is remembered

    def restore(self, states: Sequence[State]) -> None:
        """Nothing is remembered."""


@compiled
def predict(
    text: Array,
    direction: Array,
    length: Array,
    slope: Array,
    rows: Array,
    clean: Array,
    rates: Array,
    eps: Array,
    scale: float,
    logits: Array,
) -> None:
    """Fill the logits (S, C) of the clean view (D,) for text prototypes (C, D) after one step down the entropy.

    `direction` (C, D) and `length` (C, 1) are those of the prototypes, in double; the gradient by a direction is
    `slope` (C, R) times `rows` (R, D), minus its component along the direction, which cannot turn it.
    """
    classes, dim = text.shape
    gradient, moved = np.empty(dim, direction.dtype), np.empty(dim, text.dtype)
    for c in range(classes):
        gradient[:] = 0
        for r in range(len(rows)):
            weight = slope[c, r]
            for d in range(dim):
                gradient[d] += weight * rows[r, d]
        along, inverse = dot(gradient, direction[c]), 1 / length[c, 0]
        for d in range(dim):
            gradient[d] = (gradient[d] - along * direction[c, d]) * inverse
        for s in range(len(rates)):
            rate, epsilon = rates[s], eps[s]
            for d in range(dim):
                # rounded like a stored shift before it is added
                moved[d] = text[c, d] + text.dtype.type(-rate * gradient[d] / (abs(gradient[d]) + epsilon))
            logits[s, c] = scale * dot(moved, clean) / max(math.sqrt(dot(moved, moved)), 1e-12)
