"""What each fast stepper supports: every setting of its method by name, with the values it is written for.

A setting or value that is not listed here is left to the plain loop. Methods run side by side if they agree on the
settings in `group_by`, which decide shapes and which views are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from testtime.methods.dpe import DPE
    from testtime.types import Method, Task

Values = Callable[[Any], bool] | tuple[object, ...]  # which values of a setting are supported


def number(value: object) -> bool:
    """Any number, or pair of numbers, that the method itself accepts."""
    return isinstance(value, int | float | tuple) and not isinstance(value, bool)


class Fast(NamedTuple):
    """A fast stepper of one method on one kind of device."""

    method: str  # its module and class; a subclass may behave differently
    device: str
    module: str  # holds a class `Stepper`
    supports: dict[str, Values]
    group_by: tuple[str, ...] = ()
    needs: str = ""  # an optional package


def numeric(names: str) -> dict[str, Values]:
    """Settings of which any number is supported."""
    return dict.fromkeys(names.split(), number)


DPE_ON_CPU = numeric(
    "alpha beta queue align_weight align_temperature entropy_weight lr_text lr_image entropy_threshold selection "
    "text_decay prompt_count adamw_eps "
    "adamw_betas adamw_weight_decay"  # the moments of a first step cancel, and its decay acts on nothing
) | {
    "steps": (0, 1),
    "multi_view_prediction": (False, True),
    "text_update": ("none", "full", "exponential", "cumulative"),
    "adam_state": ("exact",),
    "scale_affinity": (False, True),
    "view_average": ("logits",),
    "view_choice": ("text",),
    "align_both": (False,),
    "align_classes": ("seen",),
    "queue_text": ("evolved",),
    "queue_feature": ("mean",),
    "queue_update": ("before",),
    "text_gate": ("adapted",),
    "gate_keeps": ("below", "above"),
    "entropy_unit": ("log2", "ln"),
    "renormalise_text": (False, True),
    "empty_queue": ("zero",),
}
DPE_ON_GPU = DPE_ON_CPU | {"queue": lambda queue: number(queue) and queue >= 1, "multi_view_prediction": (False,)}
DPE_GROUP_BY = ("queue", "steps", "selection", "multi_view_prediction")
TDA = numeric(
    "pos_capacity pos_alpha pos_beta neg_capacity neg_alpha neg_beta neg_entropy_lower neg_entropy_upper "
    "neg_mask_lower neg_mask_upper selection"
)
TPS = numeric("lr selection adamw_eps adamw_betas adamw_weight_decay") | {"steps": (0, 1)}  # shifts start at zero
DMN = numeric("memory_size beta fusion_text fusion_memory selection")

FAST = (
    Fast("testtime.methods.dpe.DPE", "cpu", "testtime.steppers.cpu.dpe", DPE_ON_CPU, DPE_GROUP_BY, "numba"),
    Fast("testtime.methods.tda.TDA", "cpu", "testtime.steppers.cpu.tda", TDA, ("selection",), "numba"),
    Fast("testtime.methods.tps.TPS", "cpu", "testtime.steppers.cpu.tps", TPS, ("selection", "steps"), "numba"),
    Fast("testtime.methods.dmn.DMN", "cpu", "testtime.steppers.cpu.dmn", DMN, ("selection",), "numba"),
    Fast("testtime.methods.dpe.DPE", "cuda", "testtime.steppers.gpu.dpe", DPE_ON_GPU, DPE_GROUP_BY, "triton"),
)


def supported(fast: Fast, method: Method) -> bool:
    """Whether the fast stepper is for exactly this class and supports every setting and its value."""
    kind = type(method)
    if f"{kind.__module__}.{kind.__qualname__}" != fast.method:
        return False
    settings = {field.name: getattr(method, field.name) for field in fields(method)}  # type: ignore[arg-type]
    return settings.keys() <= fast.supports.keys() and all(
        known(settings[name]) if callable(known) else settings[name] in known for name, known in fast.supports.items()
    )


class Numbers(NamedTuple):
    """The settings in which runs of DPE side by side may differ."""

    alpha: float  # already times the logit scale if `scale_affinity` is set
    beta: float
    entropy_weight: float
    align_weight: float  # over the temperature; 0 without queues, as there is nothing to align with
    eps: float
    lr_text: float
    lr_visual: float
    per_nat: float  # converts an entropy in nats to the unit of the thresholds
    sharpness: float  # of the alignment: 1 / temperature
    threshold: float
    share: float  # fraction by which text prototypes move to the nudged ones; below 0: a cumulative average
    prompt_count: float
    keeps_below: float  # 1 or 0, as are the next two
    evolves: float
    renormalises: float


def numbers(task: Task, method: DPE) -> Numbers:
    """The values of a method's settings on a task."""
    return Numbers(
        alpha=method.alpha * (task.scale if method.scale_affinity else 1.0),
        beta=method.beta,
        entropy_weight=method.entropy_weight,
        align_weight=method.align_weight / method.align_temperature if method.queue else 0.0,
        eps=method.adamw_eps,
        lr_text=method.lr_text,
        lr_visual=method.lr_image,
        per_nat=1 / math.log(task.classes, {"log2": 2, "ln": math.e}[method.entropy_unit]),
        sharpness=1 / method.align_temperature,
        threshold=method.entropy_threshold,
        share=SHARES[method.text_update](method),
        prompt_count=float(method.prompt_count),
        keeps_below=float(method.gate_keeps == "below"),
        evolves=float(method.text_update != "none"),
        renormalises=float(method.renormalise_text),
    )


# by name, so that a new update rule raises an error instead of being mistaken for one of these
SHARES: dict[str, Callable[[DPE], float]] = {
    "none": lambda method: 0.0,
    "full": lambda method: 1.0,
    "exponential": lambda method: 1 - method.text_decay,
    "cumulative": lambda method: -1.0,
}
