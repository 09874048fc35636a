"""Many settings of a method over one stream, in one pass.

Settings that a stepper takes side by side go through the stream by groups: on a CPU a core has a group to itself, on a
GPU a group shares each launch. The numbers are those of running the settings one by one: bit for bit where a run has
kernels of its own on a GPU or steps so small that it keeps to one core (`steppers.cpu.dpe.HEAVY`), and elsewhere up to
rounding, since a single run uses more cores for a product.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from testtime.machine.threads import workers
from testtime.ops import unit_views
from testtime.steppers import Stepper, lanes, memory_needed, open_stepper, together
from testtime.types import InputError, Method, Task

GROUP_BYTES = {"cpu": 2**23, "cuda": 2**32}  # bytes that a group of runs may take
TURNS = 16  # groups for each thread of a CPU, so that none waits long for the last one


def sweep(task: Task, methods: Sequence[Method], chunks: Iterable[Tensor]) -> list[Tensor]:
    """Logits (N, C) of every method over a stream that comes in chunks (n, V, D), in the order of `methods`.

    >>> import testtime as tt
    >>> task, stream, labels = tt.toy()
    >>> from testtime.methods.dpe import DPE
    >>> grid = [DPE(alpha=alpha) for alpha in (2.0, 4.0, 8.0)]
    >>> [logits.shape[0] for logits in sweep(task, grid, [stream[:100], stream[100:]])]
    [160, 160, 160]
    """
    if not methods:
        raise InputError("A sweep needs at least one setting.")
    for method in methods:
        method.check(task)
    groups = grouped(task, methods, lanes(task))
    steppers = [open_stepper(task, [methods[place] for place in places]) for places in groups]
    # a core to each group of runs is better used than many cores to each small product
    each = workers(lanes(task)).map if len(groups) > 1 < lanes(task) else map
    parts: list[list[Tensor]] = [[] for _ in groups]
    count = 0
    for chunk in chunks:
        views = unit_views(chunk, task.text, count)
        for rows, part in zip(each(_scan, steppers, [views] * len(steppers)), parts, strict=True):
            part.append(rows)
        count += len(chunk)
    logits: dict[int, Tensor] = {}
    for places, part in zip(groups, parts, strict=True):
        logits.update(zip(places, torch.cat(part, 1), strict=True))
    return [logits[place] for place in range(len(methods))]


def _scan(stepper: Stepper, views: Tensor) -> Tensor:
    with torch.inference_mode():
        logits = stepper.scan(views)
    return logits.clone()  # out of inference mode: an ordinary tensor


def grouped(task: Task, methods: Sequence[Method], threads: int) -> list[list[int]]:
    """Which methods, by place, share a stepper: those that one takes together, as many as memory allows.

    On a CPU the groups of methods that fit together are about equal, and as many for each of several threads.
    """
    places: dict[object, list[int]] = {}
    for place, method in enumerate(methods):
        key = together(task, method)
        places.setdefault(place if key is None else key, []).append(place)  # a place: one that runs by itself
    groups = []
    for alike in places.values():
        total, most = (
            len(alike),
            max(1, GROUP_BYTES[task.text.device.type] // max(1, memory_needed(task, methods[alike[0]]))),
        )
        turns = math.ceil(total / most / threads)
        count = min(total, threads * (max(turns, TURNS) if threads > 1 else turns))
        groups += [alike[total * k // count : total * (k + 1) // count] for k in range(count)]
    return groups
