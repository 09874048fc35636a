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
from testtime.steppers import fast, rows_aligned
from testtime.steppers.cpu import dpe_loops, gemm, loops
from testtime.steppers.cpu.dpe_loops import Scratch, Settings, Text, Visual
from testtime.steppers.cpu.loops import Array, ByImage, cast, empty_aligned, lengths, to_array
from testtime.types import Task

# Multiplications per step above which it is split over threads. Below (100 classes and 64 views: 18 million), threads
# would gain little, and lose more than that on a busy machine: each waits for the others many times a step.
PARALLEL_THRESHOLD = 3 * 2**23


def fits(task: Task) -> bool:
    """Whether compiled loops can call torch's GEMM."""
    return gemm.AVAILABLE


class Stepper(ByImage):
    """S runs of DPE over one stream; see `steppers.Stepper`."""

    def __init__(self, task: Task, methods: Sequence[DPE], states: Sequence[State]) -> None:
        self.task, self.methods = task, methods
        self.restore(states)

    def scan(self, stream: Tensor) -> Tensor:
        if not len(stream) or rows_aligned(stream):
            return self._scan(stream)[0]
        return super().scan(stream)  # image by image, so that each is aligned the same wherever the stream is split

    def snapshot(self) -> list[State]:
        return [run.state() for run in self.runs]

    def restore(self, states: Sequence[State]) -> None:
        self.runs = [Run(self.task, *pair) for pair in zip(self.methods, states, strict=True)]

    def _step(self, views: Tensor, peeking: bool) -> tuple[Tensor, Tensor]:
        logits, learned = self._scan(views[None], peeking)
        return logits[:, 0], learned[:, 0]

    def _scan(self, stream: Tensor, peeking: bool = False) -> tuple[Tensor, Tensor]:
        """Logits (S, N, C), and whether each run learned from each image (S, N)."""
        images = stream.numpy()
        logits = np.empty((len(self.runs), len(images), self.task.classes), images.dtype)
        learned = np.empty(logits.shape[:2], bool)
        # one run after another, so that its state stays in the cache
        for run, rows, taken in zip(self.runs, logits, learned, strict=True):
            run.scan(images, rows, taken, peeking)
        return torch.from_numpy(logits), torch.from_numpy(learned)


class Run:
    """One run of DPE, updated in place."""

    def __init__(self, task: Task, method: DPE, state: State) -> None:
        self.method = method
        self.real = real = task.text.numpy().dtype.type
        numbers = {name: cast(values[0], real) for name, values in fast.numbers(task, [method])._asdict().items()}
        if not method.steps:
            numbers |= dict.fromkeys(("align_weight", "lr_text", "lr_visual"), real(0))
        switches = {name: bool(numbers[name]) for name in ("keeps_below", "evolves", "renormalises")}
        numbers |= {"scale": cast(task.scale, real), "threshold": method.entropy_threshold, **switches}
        self.settings = Settings(**numbers, keep=0, threads=None, peeking=False)
        classes, dim, pulled = task.classes, task.dim, bool(numbers["align_weight"] > 0)
        seen = state.queue.cost.isfinite().any(1).numpy()
        columns = _transposed(state.visual if pulled else state.visual[:0, :0])
        height = np.where(seen, numbers["alpha"], real(0))
        evolved = empty_aligned(classes if switches["evolves"] else 0, dim, dtype=real)
        self.run = dpe_loops.Run(
            text=Text(**_side_arrays(state.text, pulled), evolved=evolved, evolved_length=np.zeros(classes, real)),
            visual=Visual(**_side_arrays(state.visual, pulled), columns=columns, height=height, seen=seen),
            keys=to_array(state.queue.keys),
            cost=to_array(state.queue.cost),
            updates=np.array([int(state.updates)]),
            stale=np.array([pulled]),
        )
        shapes = {
            **dict.fromkeys(("entropy", "top", "total"), (0,)),  # allocated once the number of views is known
            **dict.fromkeys(("logit", "prob", "factor", "answer", "moved_length", "moved_cosine"), (classes,)),
            **dict.fromkeys(("feature", "probe"), (dim,)),
            **dict.fromkeys(("share", "scaled_eps"), (1,)),
            **dict.fromkeys(("text_pull", "visual_pull"), (0, dim)),
            "logits": (0, classes),
            "moved": (classes if method.multi_view_prediction else 0, dim),
            "similarity": (classes if pulled else 0, columns.shape[1]),
        }
        self.scratch = Scratch(**self._arrays(shapes))
        self.consistent = True  # False during a step: a state left half updated by an exception is never returned

    def _arrays(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, Array]:
        """Scratch buffers of these shapes."""
        return {name: empty_aligned(*shape, dtype=self.real) for name, shape in shapes.items()}

    def scan(self, stream: Array, logits: Array, learned: Array, peeking: bool) -> None:
        """Fill the logits (N, C) of N images' unit views (N, V, D), and whether each was `learned` from (N,)."""
        views = stream.shape[1]
        if len(self.scratch.logits) != views:
            shapes = {"logits": (views, logits.shape[1]), **dict.fromkeys(("entropy", "top", "total"), (views,))}
            self.scratch = self.scratch._replace(**self._arrays(shapes))
        if peeking and self.scratch.text_pull.shape != self.run.text.pull.shape:
            shapes = dict.fromkeys(("text_pull", "visual_pull"), self.run.text.pull.shape)
            self.scratch = self.scratch._replace(**self._arrays(shapes))
        work = self.run.text.vectors.size * (views + 3 * len(self.scratch.similarity))
        threads = torch.get_num_threads() if gemm.CAN_LIMIT_THREADS and work >= PARALLEL_THRESHOLD else 1
        options = ops.kept(views, self.method.selection), threads if threads > 1 else None, peeking
        if self.settings[-3:] != options:
            self.settings = Settings(*self.settings[:-3], *options)
        self.consistent, updates = False, int(self.run.updates[0])
        with loops.threads(threads), gemm.single_threaded():
            dpe_loops.scan(stream, self.run, self.scratch, self.settings, logits, learned)
        if (self.run.updates[0] - updates) % 2:
            self.run = self.run._replace(text=dpe_loops.swap_evolved.py_func(self.run.text))
        self.consistent = True

    def state(self) -> State:
        """A copy of the current state."""
        if not self.consistent:
            raise RuntimeError("A step was interrupted midway; resume from a saved state.")
        run = self.run
        text, keys, cost, visual = map(loops.to_tensor, (run.text.vectors, run.keys, run.cost, run.visual.vectors))
        return State(text, torch.tensor(int(run.updates[0])), Bank(keys, cost), visual)


def _side_arrays(prototypes: Tensor, pulled: bool) -> dict[str, Array]:
    """The arrays of one side, text or visual: a copy of its prototypes (C, D), their lengths, and gradient buffers."""
    vectors = to_array(prototypes)
    weight, cosine = np.zeros((2, len(vectors)), vectors.dtype)
    pull = empty_aligned(len(vectors) if pulled else 0, vectors.shape[1], dtype=vectors.dtype)
    return {"vectors": vectors, "length": lengths(vectors), "pull": pull, "weight": weight, "cosine": cosine}


def _transposed(prototypes: Tensor) -> Array:
    """Prototypes (C, D) as the first columns of an array (D, C') whose rows are aligned to cache lines."""
    classes, dim = prototypes.shape
    per_line = loops.CACHE_LINE // prototypes.element_size()
    columns = empty_aligned(dim, -(-classes // per_line) * per_line, dtype=prototypes.numpy().dtype)
    columns[:] = 0
    columns[:, :classes] = prototypes.numpy().T
    return columns
