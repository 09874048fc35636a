"""What each fast stepper supports: every setting of its method by name, with the values it is written for.

A setting or value that is not listed here is left to the plain loop. Methods run side by side if they agree on the
settings in `group_by`, which decide shapes and which views are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from testtime.methods.dpe import DPE
    from testtime.types import Method, Task

Values = Callable[[Any], bool] | tuple[object, ...]  # which values of a setting are supported


def number(value: object) -> bool:
    """Any number, or pair of numbers, that the method itself accepts."""
    return isinstance(value, int | float | tuple) and not isinstance(value, bool)


def one_or_more(value: Any) -> bool:
    """A number of at least one."""
    return number(value) and value >= 1


class Fast(NamedTuple):
    """A fast stepper of one method on one kind of device."""

    method: str  # its module and class; a subclass may behave differently
    device: str
    module: str  # holds a class `Stepper`
    supports: dict[str, Values]
    group_by: tuple[str, ...] = ()
    needs: str = ""  # an optional package


DPE_ON_CPU: dict[str, Values] = {
    "alpha": number,
    "beta": number,
    "queue": number,
    "align_weight": number,
    "align_temperature": number,
    "entropy_weight": number,
    "lr_text": number,
    "lr_image": number,
    "steps": (0, 1),
    "entropy_threshold": number,
    "selection": number,
    "multi_view_prediction": (False, True),
    "text_update": ("none", "full", "exponential", "cumulative"),
    "text_decay": number,
    "adamw_eps": number,
    "adamw_betas": number,  # the moments of a first step cancel
    "adamw_weight_decay": number,  # and its decay acts on nothing
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
    "prompt_count": number,
    "empty_queue": ("zero",),
}
DPE_ON_GPU = DPE_ON_CPU | {"queue": one_or_more, "multi_view_prediction": (False,)}
DPE_GROUP_BY = ("queue", "steps", "selection", "multi_view_prediction")

TDA: dict[str, Values] = dict.fromkeys(
    (
        "pos_capacity",
        "pos_alpha",
        "pos_beta",
        "neg_capacity",
        "neg_alpha",
        "neg_beta",
        "neg_entropy_lower",
        "neg_entropy_upper",
        "neg_mask_lower",
        "neg_mask_upper",
        "selection",
    ),
    number,
)
TPS: dict[str, Values] = {
    "lr": number,
    "steps": (0, 1),
    "selection": number,
    "adamw_eps": number,
    "adamw_betas": number,
    "adamw_weight_decay": number,  # shifts start at zero
}
DMN: dict[str, Values] = dict.fromkeys(("memory_size", "beta", "fusion_text", "fusion_memory", "selection"), number)

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
    """The settings in which S runs of DPE side by side may differ: S values of each."""

    alpha: list[float]  # already times the logit scale if `scale_affinity` is set
    beta: list[float]
    entropy_weight: list[float]
    align_weight: list[float]  # over the temperature; 0 without queues, as there is nothing to align with
    eps: list[float]
    lr_text: list[float]
    lr_visual: list[float]
    per_nat: list[float]  # converts an entropy in nats to the unit of the thresholds
    sharpness: list[float]  # of the alignment: 1 / temperature
    threshold: list[float]
    share: list[float]  # fraction by which text prototypes move to the nudged ones; below 0: a cumulative average
    prompt_count: list[float]
    keeps_below: list[float]  # 1 or 0, as are the next two
    evolves: list[float]
    renormalises: list[float]


def numbers(task: Task, methods: Sequence[DPE]) -> Numbers:
    """The values of settings that run side by side on a task."""
    return Numbers(
        [m.alpha * (task.scale if m.scale_affinity else 1.0) for m in methods],
        [m.beta for m in methods],
        [m.entropy_weight for m in methods],
        [m.align_weight / m.align_temperature if m.queue else 0.0 for m in methods],
        [m.adamw_eps for m in methods],
        [m.lr_text for m in methods],
        [m.lr_image for m in methods],
        [1 / math.log(task.classes, {"log2": 2, "ln": math.e}[m.entropy_unit]) for m in methods],
        [1 / m.align_temperature for m in methods],
        [m.entropy_threshold for m in methods],
        [SHARES[m.text_update](m) for m in methods],
        [float(m.prompt_count) for m in methods],
        [float(m.gate_keeps == "below") for m in methods],
        [float(m.text_update != "none") for m in methods],
        [float(m.renormalise_text) for m in methods],
    )


# by name, so that a new update rule raises an error instead of being mistaken for one of these
SHARES: dict[str, Callable[[DPE], float]] = {
    "none": lambda method: 0.0,
    "full": lambda method: 1.0,
    "exponential": lambda method: 1 - method.text_decay,
    "cumulative": lambda method: -1.0,
}
