"""Steppers: what moves one or many states of a method along a stream. `open_stepper` alone chooses between them.

A method file reads like its paper: it returns a new state for every image. A stepper holds the state of a run, or those
of several runs of the same method under different settings, and moves them along:

    plain.py         the method's own steps, one after another; always there
    cpu/*.py         compiled loops that change the state in place (extra: testtime[fast])
    gpu/graph.py     any method's steps, captured in a graph
    gpu/dpe.py       DPE's steps as kernels of its own, captured

`fast.py` lists what each fast one understands. Each is held to the plain one, one step at a time from the same state.
Ties go to the lower index in all of them. But what hangs on the last digit, such as which of two prototypes an image
halfway between is nearer to, they may decide otherwise, each the same every time.

What is promised on the CPU: on the same machine, with the same versions and the same number of threads, a run that is
snapshot, saved, loaded and resumed anywhere gives the same bits as one that was not. For this every tensor that takes
part in a product begins at a multiple of `ALIGNMENT` bytes, and every product an image takes part in has the same
shape wherever the stream is cut. Prompt tuning is left out: it takes images of a chunk in groups, and is the same up to
rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from testtime.files import ALIGNMENT as ALIGNMENT
from testtime.methods.base import leaves
from testtime.steppers.fast import FAST, Fast, supported
from testtime.types import Method, Task


class Stepper(Protocol):
    """S runs of one method over one stream, side by side. One thread at a time; two steppers share nothing.

    Views are unit rows in the precision and on the device of the task. What is returned is the caller's own.
    """

    def step(self, views: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (S, C) for one image's views (V, D), and which runs learned from it: (S,) bool."""

    def scan(self, stream: Tensor) -> Tensor:
        """Logits (S, N, C) for the views of N images (N, V, D), learning along the way."""

    def peek(self, views: Tensor) -> Tensor:
        """Logits (S, C) as `step` would give them; nothing is learned."""

    def warm_up(self, views: int) -> None:
        """Load, compile and capture what steps over images of so many views need; nothing is learned."""

    def snapshot(self) -> list[Any]:
        """The state of each run, as the method's own `step` would have left it; a copy."""

    def restore(self, states: Sequence[Any]) -> None:
        """Go on from these states, which are copied."""


def open_stepper(
    task: Task, methods: Sequence[Method], states: Sequence[Any] | None = None, *, reference: bool = False
) -> Stepper:
    """The fastest stepper for these runs that understands them; with `reference`, the plain one.

    They go on from `states`, or begin. Runs that cannot share a stepper have one each behind this one.

    >>> import testtime as tt
    >>> task, stream, _ = tt.toy()
    >>> stepper = open_stepper(task, [tt.make_method("dpe", settings={"alpha": alpha}) for alpha in (2, 4)])
    >>> stepper.scan(stream).shape
    torch.Size([2, 160, 8])
    """
    from testtime.steppers.plain import Plain, Row

    task = aligned_task(task)
    states = list(states) if states is not None else [method.init(task) for method in methods]
    fast = None if reference else fast_of(task, methods[0])
    if fast is not None and len({together(task, method) for method in methods}) == 1:
        return import_module(fast.module).Stepper(task, methods, states)
    if len(methods) > 1:
        return Row([open_stepper(task, [m], [s], reference=reference) for m, s in zip(methods, states, strict=True)])
    if task.text.is_cuda and not reference and not getattr(methods[0], "needs_tower", False):
        return import_module("testtime.steppers.gpu.graph").Stepper(task, methods, states)
    return Plain(task, methods, states)


def fast_of(task: Task, method: Any) -> Fast | None:
    """The fast stepper that understands the method on the task's device; None: its own steps, captured on a GPU."""
    for fast in FAST:
        if fast.device == task.text.device.type and find_spec(fast.needs) and supported(fast, method):
            return fast if _asked(fast, "fits", task, True) and _distinct(task) else None
    return None


def _distinct(task: Task) -> bool:
    """Whether there is anything to tell apart: otherwise every image ties, and rounding alone would decide."""
    return not task.text.is_cpu or bool((task.text != task.text[0]).any())


def together(task: Task, method: Any) -> Hashable:
    """What methods that share a stepper have in common; None where each has its own."""
    fast = fast_of(task, method)
    return None if fast is None else (fast.module, *(getattr(method, name) for name in fast.together))


def lanes(task: Task) -> int:
    """How many steppers are best moved along at the same time: one for each core, or one on a GPU."""
    return torch.get_num_threads() if task.text.is_cpu else 1


def memory_needed(task: Task, method: Method) -> int:
    """Bytes that a run takes: its state, and what its stepper keeps beside it."""
    state, fast = sum(leaf.nbytes for leaf in leaves(method.init(task))), fast_of(task, method)
    return state + (_asked(fast, "scratch_bytes", task, 0) if fast else 0)


def _asked(fast: Fast, question: str, task: Task, otherwise: Any) -> Any:
    """What a form's module says of a task, where it has something to say."""
    answer = getattr(import_module(fast.module), question, None)
    return answer(task) if answer else otherwise


def example(task: Task, views: int) -> Tensor:
    """Views (V, D) that stand for an image's."""
    return task.text[:1].expand(views, task.dim).contiguous()


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, copied unless it lies row by row and begins at a multiple of ALIGNMENT bytes."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)  # torch's own memory is so aligned


def aligned_task(task: Task) -> Task:
    """The task with its prototypes aligned."""
    text = aligned(task.text)
    if text is not task.text:
        task = copy.copy(task)
        object.__setattr__(task, "text", text)
    return task


def aligned_state(state: Any) -> Any:
    """A state whose tensors are aligned."""
    return aligned(state) if isinstance(state, Tensor) else type(state)(*map(aligned_state, state))


def rows_aligned(stream: Tensor) -> bool:
    """Whether every image of a stream (N, V, D) begins at a multiple of ALIGNMENT bytes, row after row."""
    image = stream[0].numel() * stream.element_size() if len(stream) else 0
    return stream.is_contiguous() and stream.data_ptr() % ALIGNMENT == 0 and image % ALIGNMENT == 0
