"""DPE on the CPU without copies: runs that are moved along in place.

What it does beyond `methods.dpe`, the twin that reads like the paper:

- a queue that takes an image in changes one row of the queues and of the visual prototypes;
- the pull of the alignment loss, three C x C x D products, is a function of the prototypes alone. It is kept, and
  computed anew only after a prototype has changed: exact, not approximate;
- everything else is a few compiled loops (`kernels`), those of size C x D passing over memory once.

Nothing here depends on the past except through the state, so a run that is saved and loaded goes on bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from testtime import fast, ops
from testtime.bank import Bank
from testtime.fast import blas, forms, kernels, loops
from testtime.fast.kernels import Room, Settings, Side
from testtime.fast.loops import Array, owned
from testtime.methods.dpe import DPE, State
from testtime.types import Task

LARGE = 2**17  # numbers in a set of prototypes from which a second thread is worth it outside products
# Multiplications of a step from which products have all threads. With fewer, threads would gain little by sharing them,
# and may lose more than that on a busy machine: whoever is ready first waits for the others, many times a step.
HEAVY = 2**24


class Runner(fast.Runner):
    """S runs of DPE over one stream; see `fast.Runner`."""

    def __init__(self, task: Task, methods: Sequence[DPE], states: Sequence[State] | None = None) -> None:
        states = states or [method.init(task) for method in methods]
        self.classes = task.classes
        self.runs = [Run(task, method, state) for method, state in zip(methods, states, strict=True)]

    def step(self, views: Tensor) -> tuple[Tensor, list[bool]]:
        """Logits (S, C) for one image's unit views (V, D), and which runs learned from it."""
        logits, learned = self._scan(views[None])
        return logits[:, 0], [bool(taken) for (taken,) in learned]

    def scan(self, stream: Tensor) -> Tensor:
        """Logits (S, N, C) for the unit views of N images (N, V, D)."""
        return self._scan(stream)[0]

    def _scan(self, stream: Tensor) -> tuple[Tensor, list[Array]]:
        images = stream.contiguous().numpy()
        logits = np.empty((len(self.runs), len(images), self.classes), images.dtype)
        # one run after the other, so that its state stays in the cache
        learned = [run.scan(images, rows) for run, rows in zip(self.runs, logits, strict=True)]
        return torch.from_numpy(logits), learned

    def states(self) -> list[State]:
        """The state of each run; a copy."""
        return [run.state() for run in self.runs]


class Run:
    """One run of DPE, moved along in place."""

    def __init__(self, task: Task, method: DPE, state: State) -> None:
        self.method = method
        self.real = real = task.text.numpy().dtype.type
        numbers = {name: real(values[0]) for name, values in forms.numbers(task, [method])._asdict().items()}
        if not method.steps:
            numbers |= dict.fromkeys(("align_weight", "lr_text", "lr_visual"), real(0))
        self.settings = Settings(
            scale=real(task.scale),
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
            threads=1,
            shared_by=1,
            keeps_below=method.gate_keeps == "below",
            evolves=method.text_update != "none",
            renormalise=method.renormalise_text,
        )
        seen = state.queue.cost.isfinite().any(1).numpy()
        aligned = bool(numbers["align_weight"] > 0)
        self.run = kernels.Run(
            text=_side(state.text, aligned, self.settings.evolves),
            visual=_side(state.visual, aligned, False),
            columns=_columns(state.visual if aligned else state.visual[:0, :0]),
            keys=owned(state.queue.keys),
            cost=owned(state.queue.cost),
            height=numbers["alpha"] * seen,
            seen=seen,
            updates=np.array([int(state.updates)]),
            stale=np.array([aligned]),
        )
        row, classes = self.run.text.vectors[0], task.classes
        self.room = Room(
            logits=np.empty((0, classes), real),
            entropy=np.empty(0, real),
            top=np.empty(0, real),
            total=np.empty(0, real),
            logit=np.empty(classes, real),
            chance=np.empty(classes, real),
            factor=np.empty(classes, real),
            feature=np.empty_like(row),
            probe=np.empty_like(row),
            length=np.empty(classes, real),
            similarity=loops.aligned(classes if aligned else 0, self.run.columns.shape[1], dtype=real),
            moved=np.empty((classes if method.multi_view_prediction else 0, task.dim), real),
            share=np.empty(1, real),
        )
        self.large = self.run.text.vectors.size >= LARGE
        self.whole = True  # False within a step: what an exception leaves half done is not given out

    def scan(self, stream: Array, logits: Array) -> Array:
        """Fill `logits` (N, C) for the unit views of N images (N, V, D); whether each was learned from (N,)."""
        learned, views = np.empty(len(stream), bool), stream.shape[1]
        if len(self.room.logits) != views:
            entropy, top, total = np.empty((3, views), self.real)
            self.room = self.room._replace(
                logits=np.empty((views, logits.shape[1]), self.real), entropy=entropy, top=top, total=total
            )
            self.settings = self.settings._replace(keep=ops.kept(views, self.method.selection))
        self.whole, updates = False, int(self.run.updates[0])
        if self.large:
            threads = torch.get_num_threads()
            settings = self.settings._replace(threads=threads, shared_by=threads if blas.SPREADS else 1)
            with loops.threads(threads):
                kernels.scan(stream, self.run, self.room, settings, logits, learned)
        else:
            heavy = self.run.text.vectors.size * (views + 3 * len(self.room.similarity)) >= HEAVY
            with contextlib.nullcontext() if heavy else blas.one_thread():
                kernels.scan(stream, self.run, self.room, self.settings, logits, learned)
        if (self.run.updates[0] - updates) % 2:
            self.run = self.run._replace(text=kernels.evolved.py_func(self.run.text))
        self.whole = True
        return learned

    def state(self) -> State:
        """The state reached; a copy."""
        if not self.whole:
            raise RuntimeError("A step was broken off half way; go on from a saved state.")
        run = self.run
        text, keys, cost, visual = (
            torch.from_numpy(array.copy()) for array in (run.text.vectors, run.keys, run.cost, run.visual.vectors)
        )
        return State(text, torch.tensor(int(run.updates[0])), Bank(keys, cost), visual)


def _side(prototypes: Tensor, pulled: bool, evolves: bool) -> Side:
    """A set of prototypes (C, D) of its own, with room for what nudges it and for what it may become."""
    vectors = owned(prototypes)
    length, weight, cosine, evolved_length = np.zeros((4, len(vectors)), vectors.dtype)
    pull, evolved = (
        loops.aligned(*vectors.shape, dtype=vectors.dtype) if wanted else vectors[:0] for wanted in (pulled, evolves)
    )
    side = Side(vectors, length, pull, weight, cosine, evolved, evolved_length)
    kernels.measure(side)
    return side


def _columns(prototypes: Tensor) -> Array:
    """Prototypes (C, D) as the first columns of an array (D, C') in which each row begins a line of the cache."""
    classes, dim = prototypes.shape
    line = loops.LINE // prototypes.element_size()
    columns = loops.aligned(dim, -(-classes // line) * line, dtype=prototypes.numpy().dtype)
    columns[:, :classes] = prototypes.numpy().T
    return columns
