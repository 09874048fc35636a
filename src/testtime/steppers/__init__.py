"""Steppers run one or several states of a method over a stream. `open_stepper` chooses the implementation.

A method file reads like its paper: it returns a new state for every image. A stepper holds the state of a run, or those
of several runs of the same method with different settings, and advances them:

    plain.py         the method's own steps, one after another; always available
    cpu/*.py         compiled loops that update the state in place (extra: testtime[fast])
    gpu/graph.py     any method's steps, captured in a CUDA graph
    gpu/dpe.py       DPE's steps as custom kernels, captured

`fast.py` lists the settings that each fast stepper supports. Tests compare each with the plain one, step by step from
the same state. Ties go to the lower index in all of them. But steppers may differ where rounding decides, as when an
image lies halfway between two prototypes; each always decides the same way.

On the CPU, results are reproducible: on the same machine, with the same versions and the same number of threads, a run
that is snapshot, saved, loaded and resumed anywhere gives the same bits as an uninterrupted one. For this, every
operand of torch's matrix products is aligned to `ALIGNMENT` bytes, and the products for an image have the same shapes
wherever the stream is split; those of `cpu/gemm.py` need neither. Prompt tuning is excluded: it processes the images of
a chunk in groups, and is the same up to rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from testtime.files import ALIGNMENT as ALIGNMENT
from testtime.methods.base import Nested, batch_of, leaves
from testtime.steppers.fast import FAST, Fast, supported
from testtime.types import InputError, Method, Task

Result = TypeVar("Result")


class Stepper(Protocol):
    """S runs of one method over one stream, side by side. Not thread-safe; two steppers share nothing.

    Views are unit rows in the task's dtype and on its device. Returned tensors belong to the caller.
    """

    def step(self, views: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (S, C) for one image's views (V, D), and which runs learned from it: (S,) bool."""

    def steps(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (S, N, C) for the views of N images (N, V, D), at least one, and which runs learned: (S, N) bool."""

    def scan(self, stream: Tensor) -> Tensor:
        """Logits (S, N, C) for the views of N images (N, V, D), learning along the way."""

    def peek(self, views: Tensor) -> Tensor:
        """Logits (S, C) as `step` would return them; nothing is learned."""

    def peeks(self, stream: Tensor) -> Tensor:
        """Logits (S, N, C) for the views of N images (N, V, D), at least one, each as `peek` returns them."""

    def warm_up(self, views: int) -> None:
        """Load, compile and capture everything for steps on images with this many views; nothing is learned."""

    def snapshot(self) -> Sequence[Nested]:
        """A copy of each run's state, in the form that the method's own `step` returns."""

    def restore(self, states: Sequence[Nested]) -> None:
        """Continue from copies of these states."""


def open_stepper(
    task: Task, methods: Sequence[Method], states: Sequence[Nested] | None = None, *, reference: bool = False
) -> Stepper:
    """The fastest stepper that supports these runs; with `reference`, the plain one.

    Runs continue from `states`, or start fresh. Several must agree on their `group_key`.

    >>> import testtime as tt
    >>> task, stream, _ = tt.toy()
    >>> stepper = open_stepper(task, [tt.make_method("dpe", settings={"alpha": alpha}) for alpha in (2, 4)])
    >>> stepper.scan(stream).shape
    torch.Size([2, 160, 8])
    """
    from testtime.steppers.plain import Plain

    task = aligned_task(task)
    states = list(states) if states is not None else [method.init(task) for method in methods]
    fast = None if reference else fast_of(task, methods[0])
    if fast is not None and len({group_key(task, method) for method in methods}) == 1:
        return import_module(fast.module).Stepper(task, methods, states)
    if len(methods) > 1:
        raise InputError(f"{len(methods)} runs that cannot share a stepper; open one for each.")
    alone = batch_of(methods[0]) == 1 and getattr(methods[0], "capturable", True)
    if task.text.is_cuda and not reference and alone:
        return import_module("testtime.steppers.gpu.graph").Stepper(task, methods, states)
    return Plain(task, methods, states)


def fast_of(task: Task, method: Method) -> Fast | None:
    """The fast stepper for the method on the task's device; None: its own steps, captured on a GPU."""
    for fast in FAST:
        if fast.device == task.text.device.type and find_spec(fast.needs) and supported(fast, method):
            return fast if _call_hook(fast, "fits", task, True) and _has_distinct_classes(task) else None
    return None


def _has_distinct_classes(task: Task) -> bool:
    """Whether any two prototypes differ: otherwise all classes tie for every image, and rounding would decide."""
    return not task.text.is_cpu or bool((task.text != task.text[0]).any())


def group_key(task: Task, method: Method) -> Hashable:
    """The key on which methods must agree to share a stepper; None if the method always gets its own."""
    fast = fast_of(task, method)
    return None if fast is None else (fast.module, *(getattr(method, name) for name in fast.group_by))


def parallel_steppers(device: torch.device) -> int:
    """How many steppers to run at the same time: one per core, or one on a GPU."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def memory_needed(task: Task, method: Method) -> int:
    """Bytes per run: its state and its stepper's buffers."""
    state, fast = sum(leaf.nbytes for leaf in leaves(method.init(task))), fast_of(task, method)
    return state + (_call_hook(fast, "scratch_bytes", task, 0) if fast else 0)


def _call_hook(fast: Fast, name: str, task: Task, default: Result) -> Result:
    """Call an optional function of a fast stepper's module; `default` if the module does not define it."""
    hook = getattr(import_module(fast.module), name, None)
    return hook(task) if hook else default


def one_by_one(step: Callable[[Tensor], tuple[Tensor, Tensor]], stream: Tensor) -> tuple[Tensor, Tensor]:
    """The `steps` of a stepper that takes them one by one."""
    logits, learned = zip(*map(step, stream), strict=True)
    return torch.stack(logits, 1), torch.stack(learned, 1)


def dummy_views(task: Task, views: int) -> Tensor:
    """Placeholder views (V, D) for warm-up."""
    return task.text[:1].expand(views, task.dim).contiguous()


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, copied unless it is contiguous and aligned to ALIGNMENT bytes."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)  # torch's allocator aligns its memory


def aligned_task(task: Task) -> Task:
    """The task with its prototypes aligned."""
    text = aligned(task.text)
    if text is not task.text:
        task = copy.copy(task)
        object.__setattr__(task, "text", text)
    return task


def aligned_state(state: Nested) -> Nested:
    """A state whose tensors are aligned."""
    return aligned(state) if isinstance(state, Tensor) else type(state)(*map(aligned_state, state))


def rows_aligned(stream: Tensor) -> bool:
    """Whether a stream (N, V, D) is contiguous and every image is aligned to ALIGNMENT bytes."""
    image = stream[0].numel() * stream.element_size() if len(stream) else 0
    return stream.is_contiguous() and stream.data_ptr() % ALIGNMENT == 0 and image % ALIGNMENT == 0
