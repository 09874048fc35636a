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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from testtime import ops
from testtime.bank import Bank
from testtime.methods.dpe import DPE, State
from testtime.steppers import example, forms, laid, laid_rows
from testtime.steppers.cpu import dpe_loops, gemm, loops
from testtime.steppers.cpu.dpe_loops import Kept, Room, Settings, Side
from testtime.steppers.cpu.loops import Array, aligned, owned, rounded
from testtime.types import Task

# Multiplications of a step from which it is spread over threads. With fewer (100 classes and 64 views are 18 million),
# threads would gain little, and lose more than that on a busy machine: each waits for the others many times a step.
HEAVY = 3 * 2**23


def fits(task: Task) -> bool:
    """Whether compiled loops can call torch's products of matrices."""
    return gemm.REACHED


class Stepper:
    """S runs of DPE over one stream; see `steppers.Stepper`."""

    def __init__(self, task: Task, methods: Sequence[DPE], states: Sequence[State]) -> None:
        self.task, self.methods = task, methods
        self.restore(states)

    def step(self, views: Tensor) -> tuple[Tensor, Tensor]:
        logits, learned = self._scan(laid(views)[None])
        return logits[:, 0], learned[:, 0]

    def scan(self, stream: Tensor) -> Tensor:
        if not len(stream) or laid_rows(stream):
            return self._scan(stream)[0]
        # image by image, so that each lies as it does wherever the stream is cut
        return torch.stack([self.step(views)[0] for views in stream], 1)

    def peek(self, views: Tensor) -> Tensor:
        return self._scan(laid(views)[None], looks=True)[0][:, 0]

    def warm_up(self, views: int) -> None:
        self.peek(example(self.task, views))

    def snapshot(self) -> list[State]:
        return [run.state() for run in self.runs]

    def restore(self, states: Sequence[State]) -> None:
        self.runs = [Run(self.task, *pair) for pair in zip(self.methods, states, strict=True)]

    def _scan(self, stream: Tensor, looks: bool = False) -> tuple[Tensor, Tensor]:
        """Logits (S, N, C), and whether each run learned from each image (S, N)."""
        images = stream.numpy()
        logits = np.empty((len(self.runs), len(images), self.task.classes), images.dtype)
        # one run after the other, so that its state stays in the cache
        learned = [run.scan(images, rows, looks) for run, rows in zip(self.runs, logits, strict=True)]
        return torch.from_numpy(logits), torch.from_numpy(np.stack(learned))


class Run:
    """One run of DPE, moved along in place."""

    def __init__(self, task: Task, method: DPE, state: State) -> None:
        self.method = method
        self.real = real = task.text.numpy().dtype.type
        numbers = {name: rounded(values[0], real) for name, values in forms.numbers(task, [method])._asdict().items()}
        if not method.steps:
            numbers |= dict.fromkeys(("align_weight", "lr_text", "lr_visual"), real(0))
        self.settings = Settings(
            scale=rounded(task.scale, real),
            alpha=numbers["alpha"],
            beta=numbers["beta"],
            entropy_weight=numbers["entropy_weight"],
            align_weight=numbers["align_weight"],
            sharpness=numbers["sharpness"],
            eps=numbers["eps"],
            lr_text=numbers["lr_text"],
            lr_visual=numbers["lr_visual"],
            per_nat=numbers["per_nat"],
            threshold=method.entropy_threshold,
            share=numbers["share"],
            keep=0,  # of as many views as come
            prompt_count=method.prompt_count,
            threads=None,
            keeps_below=method.gate_keeps == "below",
            evolves=method.text_update != "none",
            renormalise=method.renormalise_text,
            looks=False,
        )
        seen = state.queue.cost.isfinite().any(1).numpy()
        pulled = bool(numbers["align_weight"] > 0)
        self.run = dpe_loops.Run(
            text=_side(state.text, pulled, self.settings.evolves),
            visual=_side(state.visual, pulled, False),
            columns=_columns(state.visual if pulled else state.visual[:0, :0]),
            keys=owned(state.queue.keys),
            cost=owned(state.queue.cost),
            height=np.where(seen, numbers["alpha"], real(0)),
            seen=seen,
            updates=np.array([int(state.updates)]),
            stale=np.array([pulled]),
        )
        classes, slots, dim = self.run.keys.shape

        def room(*shape: int, dtype: Any = real) -> Array:
            return aligned(*shape, dtype=dtype)

        self.room = Room(
            logits=room(0, classes),
            entropy=room(0),
            top=room(0),
            total=room(0),
            logit=room(classes),
            chance=room(classes),
            factor=room(classes),
            feature=room(dim),
            probe=room(dim),
            length=room(classes),
            similarity=room(classes if pulled else 0, self.run.columns.shape[1]),
            moved=room(classes if method.multi_view_prediction else 0, dim),
            share=room(1),
        )
        self.kept = Kept(
            label=room(1, dtype=np.int64),
            keys=room(slots, dim),
            cost=room(slots),
            visual=room(dim),
            numbers=room(2),
            flags=room(2, dtype=np.bool_),
            text_pull=room(0, dim),
            visual_pull=room(0, dim),
        )
        self.whole = True  # False within a step: what an exception leaves half done is not given out

    def scan(self, stream: Array, logits: Array, looks: bool = False) -> Array:
        """Fill `logits` (N, C) for the unit views of N images (N, V, D); whether each was learned from (N,)."""
        learned, (_, views, _) = np.empty(len(stream), bool), stream.shape
        if len(self.room.logits) != views:
            some = {name: aligned(views, dtype=self.real) for name in ("entropy", "top", "total")}
            self.room = self.room._replace(logits=aligned(views, logits.shape[1], dtype=self.real), **some)
            self.settings = self.settings._replace(keep=ops.kept(views, self.method.selection))
        if looks and len(self.kept.text_pull) < len(self.room.similarity):
            text_pull, visual_pull = (aligned(*self.run.text.pull.shape, dtype=self.real) for _ in range(2))
            self.kept = self.kept._replace(text_pull=text_pull, visual_pull=visual_pull)
        work = self.run.text.vectors.size * (views + 3 * len(self.room.similarity))
        threads = torch.get_num_threads() if gemm.SPREADS and work >= HEAVY else 1
        settings = self.settings._replace(threads=threads if threads > 1 else None, looks=looks)
        self.whole, updates = False, int(self.run.updates[0])
        with loops.threads(threads), gemm.one_thread():
            dpe_loops.scan(stream, self.run, self.room, self.kept, settings, logits, learned)
        if (self.run.updates[0] - updates) % 2:
            self.run = self.run._replace(text=dpe_loops.evolved.py_func(self.run.text))
        self.whole = True
        return learned

    def state(self) -> State:
        """The state reached; a copy."""
        if not self.whole:
            raise RuntimeError("A step was broken off half way; go on from a saved state.")
        run = self.run
        text, keys, cost, visual = map(loops.copied, (run.text.vectors, run.keys, run.cost, run.visual.vectors))
        return State(text, torch.tensor(int(run.updates[0])), Bank(keys, cost), visual)


def _side(prototypes: Tensor, pulled: bool, evolves: bool) -> Side:
    """A set of prototypes (C, D) of its own, with room for what nudges it and for what it may become."""
    vectors = owned(prototypes)
    length, weight, cosine, evolved_length = np.zeros((4, len(vectors)), vectors.dtype)
    pull, evolved = (
        aligned(*vectors.shape, dtype=vectors.dtype) if wanted else vectors[:0] for wanted in (pulled, evolves)
    )
    side = Side(vectors, length, pull, weight, cosine, evolved, evolved_length)
    dpe_loops.measure(side)
    return side


def _columns(prototypes: Tensor) -> Array:
    """Prototypes (C, D) as the first columns of an array (D, C') in which each row begins a line of the cache."""
    classes, dim = prototypes.shape
    line = loops.LINE // prototypes.element_size()
    columns = aligned(dim, -(-classes // line) * line, dtype=prototypes.numpy().dtype)
    columns[:, :classes] = prototypes.numpy().T
    return columns
