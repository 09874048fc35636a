"""DPE on the CPU without copies: runs that are moved along in place.

What it does beyond `methods.dpe`, which reads like the paper:

- a queue that takes an image in changes one row of the queues and of the visual prototypes;
- the pull of the alignment loss, three C x C x D products, is a function of the prototypes alone. It is kept, and
  computed anew only after a prototype has changed: exact, not approximate;
- everything else is a few compiled loops (`dpe_loops`), those of size C x D passing over memory once.

Nothing here depends on the past except through the state, so a run that is saved and loaded goes on bit for bit.
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
from testtime.steppers.cpu.loops import Array, ByImage, empty_aligned, lengths, owned, rounded
from testtime.types import Task

# Multiplications of a step from which it is spread over threads. With fewer (100 classes and 64 views are 18 million),
# threads would gain little, and lose more than that on a busy machine: each waits for the others many times a step.
HEAVY = 3 * 2**23


def fits(task: Task) -> bool:
    """Whether compiled loops can call torch's products of matrices."""
    return gemm.REACHED


class Stepper(ByImage):
    """S runs of DPE over one stream; see `steppers.Stepper`."""

    def __init__(self, task: Task, methods: Sequence[DPE], states: Sequence[State]) -> None:
        self.task, self.methods = task, methods
        self.restore(states)

    def scan(self, stream: Tensor) -> Tensor:
        if not len(stream) or rows_aligned(stream):
            return self._scan(stream)[0]
        return super().scan(stream)  # image by image, so that each lies as it does wherever the stream is cut

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
        # one run after the other, so that its state stays in the cache
        for run, rows, taken in zip(self.runs, logits, learned, strict=True):
            run.scan(images, rows, taken, peeking)
        return torch.from_numpy(logits), torch.from_numpy(learned)


class Run:
    """One run of DPE, moved along in place."""

    def __init__(self, task: Task, method: DPE, state: State) -> None:
        self.method = method
        self.real = real = task.text.numpy().dtype.type
        numbers = {name: rounded(values[0], real) for name, values in fast.numbers(task, [method])._asdict().items()}
        if not method.steps:
            numbers |= dict.fromkeys(("align_weight", "lr_text", "lr_visual"), real(0))
        switches = {name: bool(numbers[name]) for name in ("keeps_below", "evolves", "renormalises")}
        numbers |= {"scale": rounded(task.scale, real), "threshold": method.entropy_threshold, **switches}
        self.settings = Settings(**numbers, keep=0, threads=None, peeking=False)
        classes, dim, pulled = task.classes, task.dim, bool(numbers["align_weight"] > 0)
        seen = state.queue.cost.isfinite().any(1).numpy()
        columns = _columns(state.visual if pulled else state.visual[:0, :0])
        height = np.where(seen, numbers["alpha"], real(0))
        evolved = empty_aligned(classes if switches["evolves"] else 0, dim, dtype=real)
        self.run = dpe_loops.Run(
            text=Text(**_side(state.text, pulled), evolved=evolved, evolved_length=np.zeros(classes, real)),
            visual=Visual(**_side(state.visual, pulled), columns=columns, height=height, seen=seen),
            keys=owned(state.queue.keys),
            cost=owned(state.queue.cost),
            updates=np.array([int(state.updates)]),
            stale=np.array([pulled]),
        )
        shapes = {
            **dict.fromkeys(("entropy", "top", "total"), (0,)),  # of as many views as come
            **dict.fromkeys(("logit", "chance", "factor", "answer", "moved_length", "moved_cosine"), (classes,)),
            **dict.fromkeys(("feature", "probe"), (dim,)),
            **dict.fromkeys(("share", "soft"), (1,)),
            **dict.fromkeys(("text_pull", "visual_pull"), (0, dim)),
            "logits": (0, classes),
            "moved": (classes if method.multi_view_prediction else 0, dim),
            "similarity": (classes if pulled else 0, columns.shape[1]),
        }
        self.scratch = Scratch(**self._arrays(shapes))
        self.whole = True  # False within a step: what an exception leaves half done is not given out

    def _arrays(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, Array]:
        """Scratch buffers of these shapes."""
        return {name: empty_aligned(*shape, dtype=self.real) for name, shape in shapes.items()}

    def scan(self, stream: Array, logits: Array, learned: Array, peeking: bool) -> None:
        """Fill the logits (N, C) for the unit views of N images (N, V, D), and whether each was `learned` from (N,)."""
        views = stream.shape[1]
        if len(self.scratch.logits) != views:
            shapes = {"logits": (views, logits.shape[1]), **dict.fromkeys(("entropy", "top", "total"), (views,))}
            self.scratch = self.scratch._replace(**self._arrays(shapes))
        if peeking and self.scratch.text_pull.shape != self.run.text.pull.shape:
            shapes = dict.fromkeys(("text_pull", "visual_pull"), self.run.text.pull.shape)
            self.scratch = self.scratch._replace(**self._arrays(shapes))
        work = self.run.text.vectors.size * (views + 3 * len(self.scratch.similarity))
        threads = torch.get_num_threads() if gemm.SPREADS and work >= HEAVY else 1
        chosen = ops.kept(views, self.method.selection), threads if threads > 1 else None, peeking
        if self.settings[-3:] != chosen:
            self.settings = Settings(*self.settings[:-3], *chosen)
        self.whole, updates = False, int(self.run.updates[0])
        with loops.threads(threads), gemm.one_thread():
            dpe_loops.scan(stream, self.run, self.scratch, self.settings, logits, learned)
        if (self.run.updates[0] - updates) % 2:
            self.run = self.run._replace(text=dpe_loops.evolved.py_func(self.run.text))
        self.whole = True

    def state(self) -> State:
        """The state reached; a copy."""
        if not self.whole:
            raise RuntimeError("A step was broken off half way; go on from a saved state.")
        run = self.run
        text, keys, cost, visual = map(loops.copied, (run.text.vectors, run.keys, run.cost, run.visual.vectors))
        return State(text, torch.tensor(int(run.updates[0])), Bank(keys, cost), visual)


def _side(prototypes: Tensor, pulled: bool) -> dict[str, Array]:
    """What both sides have: prototypes (C, D) of its own, their lengths, and room for what nudges them."""
    vectors = owned(prototypes)
    weight, cosine = np.zeros((2, len(vectors)), vectors.dtype)
    pull = empty_aligned(len(vectors) if pulled else 0, vectors.shape[1], dtype=vectors.dtype)
    return {"vectors": vectors, "length": lengths(vectors), "pull": pull, "weight": weight, "cosine": cosine}


def _columns(prototypes: Tensor) -> Array:
    """Prototypes (C, D) as the first columns of an array (D, C') in which each row begins a line of the cache."""
    classes, dim = prototypes.shape
    line = loops.LINE // prototypes.element_size()
    columns = empty_aligned(dim, -(-classes // line) * line, dtype=prototypes.numpy().dtype)
    columns[:] = 0
    columns[:, :classes] = prototypes.numpy().T
    return columns
