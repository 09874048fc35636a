"""Many settings of a method over one stream, in one pass.

Where the method has a fast twin, settings that fit together go through the stream by groups: on a CPU a core has a
group to itself, on a GPU a group shares each launch. The numbers are those of running the settings one by one: bit for
bit where a run has the kernels of `testtime.fast.fused` or steps so small that it keeps to one core (`fast.dpe.HEAVY`),
and elsewhere up to rounding, since a single run uses more cores for a product.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from testtime import fast
from testtime.engine import Session
from testtime.features import unit_views
from testtime.methods.base import leaves
from testtime.types import InputError, Method, Task

ABREAST = {"cpu": 2**23, "cuda": 2**32}  # bytes that a group of runs may take
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
    threads = torch.get_num_threads() if task.text.is_cpu else 1
    runs = [_Runs(task, methods, places) for places in _abreast(task, methods, threads)]
    parts: list[list[Tensor]] = [[] for _ in runs]
    count = 0
    # a core to each group of runs is better used than many cores to each small product
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for chunk in chunks:
            views = None if all(group.sessions for group in runs) else unit_views(chunk, task.text, count)
            for rows, part in zip(pool.map(partial(_Runs.scan, chunk=chunk, views=views), runs), parts, strict=True):
                part.append(rows)
            count += len(chunk)
    logits: dict[int, Tensor] = {}
    for group, part in zip(runs, parts, strict=True):
        logits.update(zip(group.places, torch.cat(part, 1), strict=True))
    return [logits[place] for place in range(len(methods))]


class _Runs:
    """Methods that go through the stream together: side by side in a fast twin, or one by one."""

    def __init__(self, task: Task, methods: Sequence[Any], places: Sequence[int]) -> None:
        self.task, self.places, self.methods = task, places, [methods[place] for place in places]
        self.runner = fast.runner(task, self.methods)
        self.graph: Any = None
        self.sessions: list[Session] = []
        if self.runner is None and fast.shape(task, self.methods[0]) is None:
            self.sessions = [Session(task, method) for method in self.methods]

    def scan(self, chunk: Tensor, views: Tensor | None) -> Tensor:
        """Logits (S, n, C) of a chunk, whose unit views are shared by all that take no sessions."""
        if views is None or self.sessions:
            return torch.stack([session.scan(chunk) for session in self.sessions])
        with torch.inference_mode():
            return self._side_by_side(views)

    def _side_by_side(self, views: Tensor) -> Tensor:
        """Logits (S, n, C) of unit views (n, V, D)."""
        if self.runner is not None:
            return self.runner.scan(views)
        if self.graph is None:
            from testtime.fast.abreast import Abreast
            from testtime.fast.graph import Runner

            together: Any = Abreast(self.task, self.methods)
            self.graph = Runner(together, self.task, views.shape[1], compile=False)
        return self.graph.run(views).transpose(0, 1)


def _abreast(task: Task, methods: Sequence[Method], threads: int) -> list[list[int]]:
    """Which methods, by place, run side by side: those that a fast twin takes together, as many as memory allows.

    On a CPU the groups of methods that fit together are about equal, and as many for each of several threads.
    """
    places: dict[object, list[int]] = {}
    for place, method in enumerate(methods):
        places.setdefault(fast.shape(task, method), []).append(place)
    groups = []
    for alike in places.values():
        total, most = len(alike), max(1, ABREAST[task.text.device.type] // max(1, _size(task, methods[alike[0]])))
        turns = math.ceil(total / most / threads)
        count = min(total, threads * (max(turns, TURNS) if threads > 1 else turns))
        groups += [alike[total * k // count : total * (k + 1) // count] for k in range(count)]
    return groups


def _size(task: Task, method: Method) -> int:
    """Bytes that a run's state takes, and on a GPU the buffers of its kernels."""
    state = sum(leaf.nbytes for leaf in leaves(method.init(task)))
    if task.text.is_cpu:
        return state
    from testtime.fast import fused

    return state + fused.room(task)
