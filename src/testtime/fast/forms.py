"""Which settings of DPE the fast twins are written for, and the numbers they take from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from testtime.methods.dpe import DPE
from testtime.types import Task

# the options whose released value they are written for
FORM = {
    "view_average": "logits",
    "view_choice": "text",
    "align_both": False,
    "align_classes": "seen",
    "queue_text": "evolved",
    "queue_feature": "mean",
    "queue_update": "before",
    "text_gate": "adapted",
    "empty_queue": "zero",
    "adam_state": "exact",
}


def fits(method: DPE) -> bool:
    """Whether they compute what the method's settings ask for."""
    return method.steps <= 1 and all(getattr(method, option) == value for option, value in FORM.items())


def shape(method: DPE) -> tuple[object, ...]:
    """What settings that run side by side must agree in: all that decides a shape or which views are read."""
    return method.queue, method.steps, method.selection, method.multi_view_prediction


class Numbers(NamedTuple):
    """What S settings that run side by side differ in: S values of each."""

    alpha: list[float]  # already times the logit scale where that is wanted
    beta: list[float]
    entropy_weight: list[float]
    align_weight: list[float]  # over the temperature; 0 without queues, which leave nothing to align with
    eps: list[float]
    lr_text: list[float]
    lr_visual: list[float]
    per_nat: list[float]  # what turns an entropy in nats into the unit of the thresholds
    sharpness: list[float]  # of the alignment: 1 over its temperature
    threshold: list[float]
    share: list[float]  # how far text prototypes move to the nudged ones; below 0: as a cumulative average does
    prompt_count: list[float]
    keeps_below: list[float]  # 1 or 0, as what follows
    evolves: list[float]
    renormalises: list[float]


def numbers(task: Task, methods: Sequence[DPE]) -> Numbers:
    """The numbers of settings that run side by side over a task."""
    return Numbers(
        [m.alpha * (task.scale if m.scale_affinity else 1.0) for m in methods],
        [m.beta for m in methods],
        [m.entropy_weight for m in methods],
        [m.align_weight / m.align_temperature if m.queue else 0.0 for m in methods],
        [m.adamw_eps for m in methods],
        [m.lr_text for m in methods],
        [m.lr_image for m in methods],
        [1 / math.log(task.classes, 2 if m.entropy_unit == "log2" else math.e) for m in methods],
        [1 / m.align_temperature for m in methods],
        [m.entropy_threshold for m in methods],
        [{"full": 1.0, "exponential": 1 - m.text_decay}.get(m.text_update, -1.0) for m in methods],
        [float(m.prompt_count) for m in methods],
        [float(m.gate_keeps == "below") for m in methods],
        [float(m.text_update != "none") for m in methods],
        [float(m.renormalise_text) for m in methods],
    )
