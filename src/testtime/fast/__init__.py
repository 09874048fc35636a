"""Fast twins of methods: the same numbers up to rounding, from buffers that are updated in place.

A method file reads like its paper and returns a new state for every image. A twin here holds the state of one run,
or of several runs of the same method under different settings, and moves it along. `runner` finds it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from torch import Tensor

from testtime.types import Method, Task


class Runner(Protocol):
    """S runs of one method over one stream, side by side."""

    def step(self, views: Tensor) -> tuple[Tensor, list[bool]]:
        """Logits (S, C) for one image's unit views (V, D), and which runs learned from it."""

    def states(self) -> list[Any]:
        """The state of each run, as the method's own `step` would have left it; a copy."""


def shape(task: Task, method: Method) -> Hashable:
    """What methods that run side by side have in common, or None where a method has no fast twin here."""
    from testtime.fast import forms
    from testtime.methods.dpe import DPE

    # a class derived from DPE may do something else
    if type(method) is not DPE or not forms.fits(method):
        return None
    if task.text.is_cuda:
        return None if method.multi_view_prediction else forms.shape(method)
    return forms.shape(method) if find_spec("numba") else None  # numba is an extra


def runner(task: Task, methods: Sequence[Any], states: Sequence[Any] | None = None) -> Runner | None:
    """A fast twin on the CPU of methods of one `shape` that goes on from `states`, or None where there is none."""
    shapes = {shape(task, method) for method in methods}
    if task.text.is_cuda or len(shapes) > 1 or None in shapes:
        return None
    from testtime.fast import dpe

    return dpe.Runner(task, methods, states)
