"""Fast twins of methods: the same numbers up to rounding, from buffers that are updated in place.

A method file reads like its paper and returns a new state for every image. A twin here holds the state of one run,
or of several runs of the same method under different settings, and moves it along. `runner` finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from testtime.types import Method, Task


class Runner(Protocol):
    """S runs of one method over one stream, side by side."""

    def step(self, views: Tensor) -> tuple[Tensor, list[bool]]:
        """Logits (S, C) for one image's unit views (V, D), and which runs learned from it."""

    def scan(self, stream: Tensor) -> Tensor:
        """Logits (S, N, C) for the unit views of N images (N, V, D)."""
        return torch.stack([self.step(image)[0] for image in stream], 1)

    def states(self) -> list[Any]:
        """The state of each run, as the method's own `step` would have left it; a copy."""


class Twin(NamedTuple):
    """Where a method's fast twin on the CPU is, and which settings it is for."""

    module: str  # of this folder; it holds a `Runner`
    fits: Callable[[Any], bool]  # whether it computes what a method's settings ask for
    shape: Callable[[Any], tuple[object, ...]]  # what settings that run side by side agree in


def _dpe_fits(method: Any) -> bool:
    from testtime.fast import forms

    return forms.fits(method)


def _dpe_shape(method: Any) -> tuple[object, ...]:
    from testtime.fast import forms

    return forms.shape(method)


# by module and class: a class derived from a method may do something else
TWINS = {
    "testtime.methods.dpe.DPE": Twin("dpe", _dpe_fits, _dpe_shape),
    "testtime.methods.dmn.DMN": Twin("memory", lambda method: True, lambda method: (method.selection,)),
    "testtime.methods.tda.TDA": Twin("caches", lambda method: True, lambda method: (method.selection,)),
    "testtime.methods.tps.TPS": Twin(
        "shifts", lambda method: method.steps <= 1, lambda method: (method.selection, method.steps)
    ),
}


def shape(task: Task, method: Method) -> Hashable:
    """What methods that run side by side have in common, or None where a method has no fast twin here."""
    twin = _twin(method)
    if twin is None or not twin.fits(method):
        return None
    if task.text.is_cuda:  # where settings of DPE alone run side by side
        together = twin.module == "dpe" and not method.multi_view_prediction  # type: ignore[attr-defined]
    else:
        together = find_spec("numba") is not None and (twin.module != "dpe" or _products())  # numba is an extra
    return (twin.module, *twin.shape(method)) if together else None


def runner(task: Task, methods: Sequence[Any], states: Sequence[Any] | None = None) -> Runner | None:
    """A fast twin on the CPU of methods of one `shape` that goes on from `states`, or None where there is none."""
    shapes = {shape(task, method) for method in methods}
    twin = _twin(methods[0])
    if twin is None or task.text.is_cuda or len(shapes) > 1 or None in shapes:
        return None
    return import_module(f"testtime.fast.{twin.module}").Runner(task, methods, states)


def _products() -> bool:
    """Whether compiled loops can call torch's products of matrices."""
    from testtime.fast import blas

    return blas.REACHED


def _twin(method: Any) -> Twin | None:
    kind = type(method)
    return TWINS.get(f"{kind.__module__}.{kind.__qualname__}")
