"""DPE on the CPU without copies: runs are updated in place.

Optimisations over `methods.dpe`, which reads like the paper:

- a queue that accepts an image changes one row of the queues and of the visual prototypes;
- the pull of the alignment loss, three C x C x D products, depends only on the prototypes. It is cached, and recomputed
  only after a prototype has changed: exact, not approximate;
- everything else is a few compiled loops (`dpe_loops`); those of size C x D make one pass over memory.

Results depend on the past only through the state, so a run that is saved and loaded resumes bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from testtime import ops
from testtime.bank import Bank
from testtime.methods.dpe import DPE, State
from testtime.steppers import fast
from testtime.steppers.cpu import dpe_loops, loops
from testtime.steppers.cpu.dpe_loops import Scratch, Settings, Side
from testtime.steppers.cpu.lanes import LOWEST
from testtime.steppers.cpu.loops import Array, ByImage, cast, to_array, zeros_aligned
from testtime.types import Task

# Multiplications per step above which it is split over threads. Below (100 classes and 64 views: 18 million), threads
# would gain little, and lose more than that on a busy machine: each waits for the others many times a step.
PARALLEL_THRESHOLD = 3 * 2**23


class Stepper(ByImage):
    """S runs of DPE over one stream; see `steppers.Stepper`."""

    def __init__(self, task: Task, methods: Sequence[DPE], states: Sequence[State]) -> None:
        self.task, self.methods = task, methods
        self.restore(states)

    def scan(self, stream: Tensor) -> Tensor:
        return self._scan(stream)[0]

    def snapshot(self) -> list[State]:
        return [run.state() for run in self.runs]

    def restore(self, states: Sequence[State]) -> None:
        self.runs = [Run(self.task, *pair) for pair in zip(self.methods, states, strict=True)]

    def _step(self, views: Tensor, peeking: bool) -> tuple[Tensor, Tensor]:
        logits, learned = self._scan(views[None], peeking)
        return logits[:, 0], learned[:, 0]

    def _scan(self, stream: Tensor, peeking: bool = False) -> tuple[Tensor, Tensor]:
        """Logits (S, N, C), and whether each run learned from each image (S, N)."""
        images = stream.contiguous().numpy()
        logits = np.empty((len(self.runs), len(images), self.task.classes), images.dtype)
        learned = np.empty(logits.shape[:2], bool)
        # one run after another, so that its state stays in the cache
        for run, rows, taken in zip(self.runs, logits, learned, strict=True):
            run.scan(images, rows, taken, peeking)
        return torch.from_numpy(logits), torch.from_numpy(learned)


class Run:
    """One run of DPE, updated in place."""

    def __init__(self, task: Task, method: DPE, state: State) -> None:
        self.method, self.real = method, task.text.numpy().dtype.type
        numbers = fast.Numbers(*(cast(value, self.real) for value in fast.numbers(task, method)))
        if not method.steps:
            numbers = numbers._replace(align_weight=self.real(0), lr_text=self.real(0), lr_visual=self.real(0))
        self.settings = Settings(numbers, keep=0, threads=None, peeking=False)
        classes, dim, seen = task.classes, task.dim, state.queue.cost.isfinite().any(1).numpy()
        pulled, evolving = classes if numbers.align_weight > 0 else 0, classes if numbers.evolves else 0
        self.run = dpe_loops.Run(
            text=_side(state.text, np.full(classes, cast(task.scale, self.real)), pulled, evolving),
            visual=_side(state.visual, np.where(seen, numbers.alpha, self.real(0)), pulled, 0),
            seen=seen,
            keys=to_array(state.queue.keys),
            cost=to_array(state.queue.cost),
            updates=np.array([int(state.updates)]),
            stale=np.array([bool(pulled)]),
        )
        per_line = loops.CACHE_LINE // self.run.cost.itemsize
        self.width = -(-classes // per_line) * per_line  # C' of `dpe_loops`
        self.scratch = Scratch(
            **self._zeros((0,), "entropy", "top", "total"),  # allocated once the number of views is known
            **self._zeros((0, self.width), "logits"),
            **self._zeros((classes,), "logit", "answer", "moved_length", "moved_cosine"),
            **self._zeros((self.width,), "prob", "factor", "shift"),
            **self._zeros((dim,), "feature", "probe"),
            **self._zeros((1,), "share", "scaled_eps"),
            **self._zeros((classes if method.multi_view_prediction else 0, dim), "moved"),
            **self._zeros((pulled, self.width), "similarity", "gradient"),
            **self._zeros((2, 0, dim), "pull"),
            **self._zeros((2, classes), "along"),
        )
        self.scratch.shift[classes:] = LOWEST
        self.consistent = True  # False during a step: a state left half updated by an exception is never returned

    def _zeros(self, shape: tuple[int, ...], *names: str) -> dict[str, Array]:
        """Scratch buffers of one shape."""
        return {name: zeros_aligned(*shape, dtype=self.real) for name in names}

    def scan(self, stream: Array, logits: Array, learned: Array, peeking: bool) -> None:
        """Fill the logits (N, C) of N images' unit views (N, V, D), and whether each was `learned` from (N,)."""
        views, text = stream.shape[1], self.run.text
        if len(self.scratch.logits) != views:
            per_view = self._zeros((views,), "entropy", "top", "total")
            self.scratch = self.scratch._replace(**per_view, **self._zeros((views, self.width), "logits"))
        if peeking and self.scratch.pull.shape[1:] != text.pull.shape:
            self.scratch = self.scratch._replace(**self._zeros((2, *text.pull.shape), "pull"))
        work = text.vectors.size * (views + 3 * len(self.scratch.similarity))
        threads = torch.get_num_threads() if work >= PARALLEL_THRESHOLD else 1
        keep, used = ops.kept(views, self.method.selection), threads if threads > 1 else None
        settings = self.settings._replace(keep=keep, threads=used, peeking=peeking)
        self.consistent, updates = False, int(self.run.updates[0])
        with loops.threads(threads):
            dpe_loops.scan(stream, self.run, self.scratch, settings, logits, learned)
        if (self.run.updates[0] - updates) % 2:
            evolved = {"evolved": text.vectors, "evolved_length": text.length}
            text = text._replace(vectors=text.evolved, length=text.evolved_length, **evolved)
            self.run = self.run._replace(text=text)
        self.consistent = True

    def state(self) -> State:
        """A copy of the current state."""
        if not self.consistent:
            raise RuntimeError("A step was interrupted midway; resume from a saved state.")
        run = self.run
        text, keys, cost, visual = map(loops.to_tensor, (run.text.vectors, run.keys, run.cost, run.visual.vectors))
        return State(text, torch.tensor(int(run.updates[0])), Bank(keys, cost), visual)


def _side(prototypes: Tensor, height: Array, pulled: int, evolving: int) -> Side:
    """One side of a run, text or visual; so many prototypes are pulled by the alignment, and evolve."""
    vectors = to_array(prototypes)
    along, weight, cosine, evolved_length = np.zeros((4, len(vectors)), vectors.dtype)
    pull, evolved = (zeros_aligned(count, vectors.shape[1], dtype=vectors.dtype) for count in (pulled, evolving))
    length = np.array([loops.length_at(vectors, c) for c in range(len(vectors))], vectors.dtype)
    return Side(vectors, length, pull, along, weight, cosine, height, evolved, evolved_length)
