"""Which settings of DPE the fast twins are written for."""

from __future__ import annotations

from testtime.methods.dpe import DPE

# the options whose released value this twin is written for
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
    """Whether this twin computes what the method's settings ask for."""
    return method.steps <= 1 and all(getattr(method, option) == value for option, value in FORM.items())


def shape(method: DPE) -> tuple[object, ...]:
    """What settings that run side by side must agree in: all that decides a shape or which views are read."""
    return method.queue, method.steps, method.selection, method.multi_view_prediction
