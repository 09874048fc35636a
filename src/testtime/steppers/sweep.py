"""Many settings of a method over one stream, in one pass.

Settings that can share a stepper run in groups: on a CPU each group has its own core, on a GPU a group shares each
launch. Results equal those of running the settings one by one: bit for bit in DPE's loops and kernels, and otherwise up
to rounding, since a single run uses more cores for a product.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from testtime.machine.threads import workers
from testtime.methods.base import need_single
from testtime.ops import unit_views
from testtime.steppers import Stepper, group_key, memory_needed, open_stepper, parallel_steppers
from testtime.types import InputError, Method, Task

GROUP_BYTES = {"cpu": 2**23, "cuda": 2**32}  # memory budget of a group of runs
GROUPS_PER_THREAD = 16  # on a CPU, so that no thread waits long for the last one


def sweep(task: Task, methods: Sequence[Method], chunks: Iterable[Tensor]) -> list[Tensor]:
    """Logits (N, C) of every method over a stream given in chunks (n, V, D), in the order of `methods`.

    >>> import testtime as tt
    >>> task, stream, labels = tt.toy()
    >>> from testtime.methods.dpe import DPE
    >>> grid = [DPE(alpha=alpha) for alpha in (2.0, 4.0, 8.0)]
    >>> [logits.shape[0] for logits in sweep(task, grid, [stream[:100], stream[100:]])]
    [160, 160, 160]
    """
    if not methods:
        raise InputError("A sweep needs at least one setting.")
    need_single(methods, "A sweep")
    for method in methods:
        method.check(task)
    together = parallel_steppers(task.text.device)
    groups = grouped(task, methods, together)
    steppers = [open_stepper(task, [methods[index] for index in group]) for group in groups]
    # one core per group of runs is more efficient than several cores for each small product
    each = workers(together).map if len(groups) > 1 < together else map
    parts: list[list[Tensor]] = [[] for _ in groups]
    count = 0
    for chunk in chunks:
        views = unit_views(chunk, task.text, count)
        for rows, part in zip(each(_scan, steppers, [views] * len(steppers)), parts, strict=True):
            part.append(rows)
        count += len(chunk)
    logits: dict[int, Tensor] = {}
    for group, part in zip(groups, parts, strict=True):
        logits.update(zip(group, torch.cat(part, 1), strict=True))
    return [logits[index] for index in range(len(methods))]


def _scan(stepper: Stepper, views: Tensor) -> Tensor:
    with torch.inference_mode():
        logits = stepper.scan(views)
    return logits.clone()  # outside inference mode: an ordinary tensor


def grouped(task: Task, methods: Sequence[Method], threads: int) -> list[list[int]]:
    """Indices of the methods that share a stepper, in groups as large as memory allows.

    On a CPU, groups are about equal in size, and every thread gets the same number of them.
    """
    by_key: dict[object, list[int]] = {}
    for index, method in enumerate(methods):
        key = group_key(task, method)
        by_key.setdefault(index if key is None else key, []).append(index)  # no key: the method runs alone
    groups = []
    for alike in by_key.values():
        budget, each = GROUP_BYTES[task.text.device.type], max(1, memory_needed(task, methods[alike[0]]))
        total, most = len(alike), max(1, budget // each)
        rounds = math.ceil(total / most / threads)
        count = min(total, threads * (max(rounds, GROUPS_PER_THREAD) if threads > 1 else rounds))
        groups += [alike[total * k // count : total * (k + 1) // count] for k in range(count)]
    return groups
