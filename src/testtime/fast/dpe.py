"""DPE on the CPU without copies: S settings side by side over one stream, in place.

What it does beyond `methods.dpe`, the twin that reads like the paper:

- a queue that takes an image in changes one row of the queues, of the visual prototypes and of their directions;
- the pull of the alignment loss, three C x C x D products, is a function of the prototypes alone. It is kept, and
  computed anew only after a prototype has changed: exact, not approximate;
- everything else is a few compiled loops (`kernels`), those of size C x D passing over memory once;
- products are made one setting at a time and all else row by row, so a setting's numbers do not depend on what
  runs beside it.

Nothing here depends on the past except through the state, so a run that is saved and loaded goes on bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from testtime import ops
from testtime.bank import Bank
from testtime.fast import forms, kernels
from testtime.fast.kernels import Array
from testtime.methods.dpe import DPE, State
from testtime.types import Task


class Runner:
    """S runs of DPE over one stream; see `fast.Runner`."""

    def __init__(self, task: Task, methods: Sequence[DPE], states: Sequence[State] | None = None) -> None:
        self.task, self.methods = task, methods
        states = states or [method.init(task) for method in methods]
        like = task.text.numpy()
        numbers = forms.numbers(task, methods)
        self.bits = numbers.per_nat
        self.alpha, self.beta, self.entropy_weight, self.align_weight, self.eps, self.lr_text, self.lr_visual = (
            np.array(values, like.dtype)
            for values in numbers[:-1]  # (S,)
        )
        self.pulled = self.align_weight > 0

        self.text = _stacked([state.text for state in states])  # (S, C, D)
        self.updates = [int(state.updates) for state in states]
        self.keys = _stacked([state.queue.keys for state in states])  # (S, C, M, D)
        self.cost = _stacked([state.queue.cost for state in states])  # (S, C, M)
        self.visual = _stacked([state.visual for state in states])  # (S, C, D)

        # what follows from the state, kept beside it: directions, lengths, the pull of the alignment
        classes = task.classes
        self.seen = np.isfinite(self.cost).any(2).astype(like.dtype)  # (S, C) of 0 and 1
        self.at_text, self.at_visual = np.zeros_like(self.text), np.zeros_like(self.visual)
        self.text_length, self.visual_length = np.ones_like(self.seen), np.ones_like(self.seen)
        kernels.aim_all(self.text, self.at_text, self.text_length)
        kernels.aim_all(self.visual, self.at_visual, self.visual_length)
        self.pull_text, self.pull_visual = np.empty_like(self.text), np.empty_like(self.visual)
        self.stale = self.pulled.copy()
        self._count()

        # room to work in
        self.logits = torch.empty(0)  # (S, V, C)
        self.feature, self.logit = np.empty_like(self.text[:, 0]), np.empty_like(self.seen)
        self.entropy, self.taken = np.empty_like(self.beta), np.zeros_like(self.pulled)
        self.by_text, self.by_visual = np.empty_like(self.seen), np.empty_like(self.seen)
        self.moved = np.empty_like(self.text)
        self.moved_visual = np.empty_like(self.visual[:, : None if methods[0].multi_view_prediction else 1])
        both = (2, *self.seen.shape)  # text and visual
        self.lengths, self.dots = np.empty(both, like.dtype), np.empty(both, like.dtype)
        self.similarity = torch.empty(classes, classes, dtype=task.text.dtype)
        self.whole = True  # False within a step: what an exception leaves half done is not given out

    def step(self, views: Tensor) -> tuple[Tensor, list[bool]]:
        """Logits (S, C) for one image's unit views (V, D), and which runs learned from it."""
        self.whole = False
        method, rows = self.methods[0], views.numpy()
        # 1. which queue the image belongs to, and how confidently
        self._confident(views, self.at_text)

        # 2. evolve the visual prototypes
        if method.queue:
            self._push()

        # 3. prototype residual learning
        moved, visual = self.moved, self.moved_visual
        if method.steps:
            self._nudge(rows[0])
        else:
            moved, visual, self.lengths[:] = self.at_text, self.at_visual, 1
            clean = np.broadcast_to(rows[0], self.feature.shape)
            self.dots[0], self.dots[1] = _dots(moved, clean), _dots(visual, clean)

        # 4. prototype-based inference with both sets
        if method.multi_view_prediction:  # from views chosen again
            self._confident(views, moved, self.lengths[0])
            self.dots[0], self.dots[1] = _dots(moved, self.feature), _dots(visual, self.feature)
        logits = np.empty_like(self.seen)
        sides = self.dots[0], self.lengths[0], self.dots[1], self.lengths[1]
        kernels.answer(*sides, self.height, self.beta, self.task.scale, logits, self.entropy)

        # 5. evolve the text prototypes with images that are confident enough
        learned = self.taken.tolist()
        for s, method in enumerate(self.methods):
            accepted = (self.entropy[s] * self.bits[s] < method.entropy_threshold) == (method.gate_keeps == "below")
            if accepted and method.text_update != "none":
                self._evolve(s, moved[s])
                learned[s] = True
        self.whole = True
        return torch.from_numpy(logits), learned

    def states(self) -> list[State]:
        """The state of each run; a copy."""
        if not self.whole:
            raise RuntimeError("A step was broken off half way; go on from a saved state.")
        text, keys, cost, visual = (torch.from_numpy(a.copy()) for a in (self.text, self.keys, self.cost, self.visual))
        return [
            State(text[s], torch.tensor(updates), Bank(keys[s], cost[s]), visual[s])
            for s, updates in enumerate(self.updates)
        ]

    def _confident(self, views: Tensor, text: Array, length: Array | None = None) -> None:
        """Average each run's confident views: `feature` (S, D), `logit` (S, C) and their votes' `entropy` (S,)."""
        shape = len(text), len(views), self.task.classes
        if self.logits.shape != shape:
            self.logits = torch.empty(shape, dtype=views.dtype)
        for logits, rows in zip(self.logits, torch.from_numpy(text), strict=True):
            torch.addmm(logits, views, rows.T, beta=0, alpha=self.task.scale, out=logits)
        if length is not None:
            self.logits.div_(torch.from_numpy(length)[:, None])
        log_p = self.logits.log_softmax(-1)
        chances = log_p.exp()
        if len(views) == 1:
            chosen = torch.zeros(len(text), 1, dtype=torch.int64)
        else:
            certain = log_p.mul_(chances).sum(-1)  # (S, V): entropies below 0
            chosen = certain.argsort(dim=1, descending=True, stable=True)
            chosen = chosen[:, : ops.kept(len(views), self.methods[0].selection)]
        kernels.average(
            *(views.numpy(), self.logits.numpy(), chances.numpy(), chosen.contiguous().numpy()),
            *(self.feature, self.logit, self.entropy),
        )

    def _push(self) -> None:
        """Offer each run's feature to the queue of the class it looks like."""
        label, price = self.logit.argmax(1), self.entropy * self.bits
        follow = self.visual, self.at_visual, self.visual_length, self.seen, self.taken
        kernels.push(label, self.feature, price.astype(self.cost.dtype), self.keys, self.cost, *follow)
        if self.taken.any():
            self.stale |= self.taken & self.pulled
            self._count()

    def _count(self) -> None:
        """What depends on which classes have been seen."""
        gain = np.where(self.pulled, self.align_weight / np.maximum(self.seen.sum(1), 1), 1).astype(self.beta.dtype)
        self.soft, self.steepness = self.eps / gain, self.entropy_weight / gain
        self.height = self.alpha[:, None] * self.seen  # (S, C)

    def _nudge(self, probe: Array) -> None:
        """Nudge both sets of prototypes to lower the entropy at `feature` and to align them."""
        # entropy of the softmax by the logits, then by each prototype: rank one
        near = _dots(self.at_visual, self.feature)
        factors = self.by_text, self.by_visual
        kernels.slopes(self.logit, near, self.height, self.beta, self.steepness, self.task.scale, *factors)
        for s in self.stale.nonzero()[0].tolist():
            self._refresh(s)
        kernels.nudge(
            *(self.text, self.at_text, self.pull_text, self.pulled, self.by_text, self.feature, self.soft),
            *(self.text_length, self.lr_text, probe, self.moved, self.lengths[0], self.dots[0]),
        )
        kernels.nudge(
            *(self.visual, self.at_visual, self.pull_visual, self.pulled, self.by_visual, self.feature, self.soft),
            *(self.visual_length, self.lr_visual, probe, self.moved_visual, self.lengths[1], self.dots[1]),
        )

    def _refresh(self, s: int) -> None:
        """Compute the pull of the alignment anew in run s, whose prototypes have changed."""
        t, v, seen = (torch.from_numpy(part[s]) for part in (self.at_text, self.at_visual, self.seen))
        absent = (seen - 1) * torch.finfo(t.dtype).max  # finite, so that a row of nothing but absent is no NaN
        masked = 0 if seen.all() else 1  # without the mask, once it masks nothing
        torch.addmm(absent, v, t.T, beta=masked, alpha=1 / self.methods[s].align_temperature, out=self.similarity)
        pull = torch.softmax(self.similarity, 1, out=self.similarity)
        pull.diagonal().sub_(1)
        torch.mm(pull.T, v, out=torch.from_numpy(self.pull_text[s]))
        torch.mm(pull, t, out=torch.from_numpy(self.pull_visual[s]))
        self.stale[s] = False

    def _evolve(self, s: int, moved: Array) -> None:
        """Move the text prototypes of run s towards the adapted ones."""
        method = self.methods[s]
        share = 1 / (self.updates[s] + method.prompt_count + 1)
        if method.text_update == "full":
            share = 1.0
        elif method.text_update == "exponential":
            share = 1 - method.text_decay
        text, at, length = self.text[s], self.at_text[s], self.text_length[s]
        kernels.evolve(text, at, length, moved, self.lengths[0, s], share)
        if method.renormalise_text:
            text[:] = at
            kernels.evolve(text, at, length, text, np.ones_like(length), 0.0)
        self.updates[s] += 1
        self.stale[s] = self.pulled[s]


def _stacked(tensors: Sequence[Tensor]) -> Array:
    """Tensors of S runs as one array (S, ...) of its own."""
    return torch.stack(list(tensors)).numpy()


def _dots(prototypes: Array, features: Array) -> Array:
    """Each run's prototypes (S, C, D) with its own feature (S, D): (S, C)."""
    pairs = zip(torch.from_numpy(prototypes), torch.tensor(features), strict=True)
    return torch.stack([rows @ feature for rows, feature in pairs]).numpy()
