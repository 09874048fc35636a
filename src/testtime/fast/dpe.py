"""DPE on the CPU without copies: S settings side by side over one stream, in place.

What it does beyond `methods.dpe`, the twin that reads like the paper:

- a queue that takes an image in changes one row of the queues, of the visual prototypes and of their directions;
- the pull of the alignment loss, three C x C x D products, is a function of the prototypes alone. It is kept, and
  computed anew only after a prototype has changed: exact, not approximate;
- everything of size C x D around those products is one pass (`nudge`, `evolve`), compiled where the stream is long
  enough to repay the compiler;
- products are made one setting at a time and all else for all settings at once, so a setting's numbers do not
  depend on what runs beside it.

Nothing here depends on the past except through the state, so a run that is saved and loaded goes on bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from testtime import ops
from testtime.bank import Bank
from testtime.fast.compiled import compiled
from testtime.methods.dpe import DPE, State
from testtime.types import Task

PATIENCE = 2**31  # numbers nudged before compiling pays: 4,000 images of 1000 classes x 512, 40,000 of 100

# the options whose released value this twin is written for
FORM = {
    "view_average": "logits",
    "view_choice": "text",
    "align_both": False,
    "align_classes": "seen",
    "queue_text": "evolved",
    "queue_feature": "mean",
    "queue_update": "before",
    "text_gate": "adapted",
    "empty_queue": "zero",
    "adam_state": "exact",
}


def fits(method: DPE) -> bool:
    """Whether this twin computes what the method's settings ask for."""
    return method.steps <= 1 and all(getattr(method, option) == value for option, value in FORM.items())


def shape(method: DPE) -> tuple[object, ...]:
    """What settings that run side by side must agree in: all that decides a shape or which views are read."""
    return method.queue, method.steps, method.selection, method.multi_view_prediction


def nudge(
    start: Tensor,
    direction: Tensor,
    pull: Tensor,
    weight: Tensor,
    feature: Tensor,
    soft: Tensor,
    lr: Tensor,
    probe: Tensor,
    keep: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Prototypes after one step of AdamW from zero residuals: (S, C, D), their lengths and dots with `probe` (S, C, 1).

    The slope is `pull` plus `weight` (S, C, 1) times `feature` (S, 1, D), less what lies along `direction`, which
    turns nothing. The residual is -lr slope / (|slope| + soft): eps in the slope's own units, `soft` (S, C, 1).
    Without `keep` the prototypes themselves are not wanted.
    """
    slope = pull + weight * feature
    slope = slope - direction * (slope * direction).sum(2, keepdim=True)
    moved = start - lr * (slope / (slope.abs() + soft))
    length, dot = moved.norm(dim=2, keepdim=True), (moved * probe).sum(2, keepdim=True)
    return moved if keep else None, length, dot


def nudge_in_blocks(
    start: Tensor,
    direction: Tensor,
    pull: Tensor,
    weight: Tensor,
    feature: Tensor,
    soft: Tensor,
    lr: Tensor,
    probe: Tensor,
    keep: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """`nudge` for an interpreter: in blocks that fit a cache, in place."""
    settings, classes, dim = start.shape
    some = max(1, ops.BLOCK // (classes * dim))  # settings at a time, and classes where one setting is too large
    rows = classes if some > 1 else max(1, ops.BLOCK // dim)
    moved = torch.empty_like(start) if keep else start.new_empty(min(some, settings), min(rows, classes), dim)
    length, dot = start.new_empty(settings, classes, 1), start.new_empty(settings, classes, 1)
    for s in range(0, settings, some):
        for c in range(0, classes, rows):
            block = slice(s, s + some), slice(c, c + rows)
            at = direction[block]
            out = moved[block] if keep else moved[: at.shape[0], : at.shape[1]]
            slope = torch.addcmul(pull[block], weight[block], feature[s : s + some])
            along = torch.mul(slope, at, out=out).sum(2, keepdim=True)
            slope.addcmul_(at, along, value=-1)
            torch.abs(slope, out=out).add_(soft[block])
            slope.mul_(lr[s : s + some])
            torch.addcdiv(start[block], slope, out, value=-1, out=out)
            torch.linalg.vector_norm(out, dim=2, keepdim=True, out=length[block])
            torch.sum(torch.mul(out, probe[s : s + some], out=slope), 2, keepdim=True, out=dot[block])
    return moved if keep else None, length, dot


def evolve(text: Tensor, at: Tensor, length: Tensor, moved: Tensor, moved_length: Tensor, share: Tensor) -> None:
    """Move `text` (C, D) a `share` () of the way towards `moved` at length one; aim `at` and `length` along it."""
    text.lerp_(moved / moved_length, share)
    torch.linalg.vector_norm(text, dim=1, keepdim=True, out=length)
    torch.div(text, length, out=at)


def _dots(prototypes: Tensor, features: Tensor) -> Tensor:
    """Each run's prototypes (S, C, D) with its own feature (S, D): (S, C, 1)."""
    dots = [rows @ feature for rows, feature in zip(prototypes, features, strict=True)]
    return torch.stack(dots)[..., None]


class Runner:
    """S runs of DPE over one stream; see `fast.Runner`."""

    def __init__(
        self, task: Task, methods: Sequence[DPE], states: Sequence[State] | None = None, images: int = 0
    ) -> None:
        self.task, self.methods = task, methods
        self.images = images  # since the start of the stream
        first = methods[0]
        states = states or [method.init(task) for method in methods]

        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=task.text.dtype)[:, None]  # (S, 1)

        self.alpha = column([m.alpha * (task.scale if m.scale_affinity else 1.0) for m in methods])
        self.beta = column([m.beta for m in methods])
        self.entropy_weight = column([m.entropy_weight for m in methods])
        self.align_weight = column([m.align_weight / m.align_temperature if first.queue else 0.0 for m in methods])
        self.eps = column([m.adamw_eps for m in methods])
        self.lr_text, self.lr_visual = column([m.lr_text for m in methods]), column([m.lr_image for m in methods])
        self.unit = column([math.log2(task.classes) if m.entropy_unit == "log2" else math.log(task.classes)
                            for m in methods])  # fmt: skip

        self.text = torch.stack([state.text for state in states])  # (S, C, D)
        self.updates = [int(state.updates) for state in states]
        self.keys = torch.stack([state.queue.keys for state in states])  # (S, C, M, D)
        self.cost = torch.stack([state.queue.cost for state in states])  # (S, C, M)
        self.visual = torch.stack([state.visual for state in states])  # (S, C, D)
        self.at_text, self.text_length = torch.empty_like(self.text), self.text.new_empty(*self.text.shape[:2], 1)
        for s, text in enumerate(self.text):
            self._evolve(s, text, torch.ones_like(self.text_length[s]), 0.0)
        self.at_visual, self.visual_length = torch.zeros_like(self.visual), torch.ones_like(self.text_length)
        self.seen = torch.zeros_like(self.text_length[..., 0])  # (S, C) of 0 and 1
        if first.queue:
            self.seen = self.cost[..., 0].isfinite().to(self.seen)
            # as pushes do it, row by row, so that a loaded run has the very bits of one that went on
            for s, c in self.seen.nonzero().tolist():
                self._aim(torch.tensor([s]), torch.tensor([c]))
        self.filled = self.seen.sum(1, keepdim=True)  # (S, 1)
        self.pull_text, self.pull_visual = torch.zeros_like(self.text), torch.zeros_like(self.visual)
        self.stale = [True] * len(methods)
        self.similarity = self.text.new_empty(task.classes, task.classes)
        self.logits = self.text.new_empty(0)
        self.whole = True  # False within a step: what an exception leaves half done is not given out

    def step(self, views: Tensor) -> tuple[Tensor, list[bool]]:
        """Logits (S, C) for one image's unit views (V, D), and which runs learned from it."""
        self.whole = False
        settings, method, scale = len(self.methods), self.methods[0], self.task.scale
        # 1. which queue the image belongs to, and how confidently
        if self.logits.shape[1:2] != views.shape[:1]:
            self.logits = self.text.new_empty(settings, len(views), self.task.classes)
        for s in range(settings):
            torch.addmm(self.logits[s], views, self.at_text[s].T, beta=0, alpha=scale, out=self.logits[s])
        feature, logit, entropy = self._confident(views, self.logits)
        label = logit.argmax(1)  # (S,)
        cost = entropy / self.unit[:, 0]

        # 2. evolve the visual prototypes
        learned = self._push(label, feature, cost) if method.queue else [False] * settings

        # 3. prototype residual learning, 4. inference with both sets
        logits, adapted = self._adapt(views, feature, logit)

        # 5. evolve the text prototypes with images that are confident enough
        spread = (ops.entropy(logits) / self.unit[:, 0]).tolist()
        for s, m in enumerate(self.methods):
            accepted = (spread[s] < m.entropy_threshold) is (m.gate_keeps == "below")
            if accepted and m.text_update != "none":
                self._evolve(s, adapted[0][s], adapted[1][s], _share(m, self.updates[s]))
                if m.renormalise_text:
                    self._evolve(s, self.at_text[s].clone(), torch.ones_like(self.text_length[s]), 1.0)
                self.updates[s] += 1
                learned[s] = self.stale[s] = True
        self.images += 1
        self.whole = True
        return logits, learned

    def states(self) -> list[State]:
        """The state of each run; a copy."""
        if not self.whole:
            raise RuntimeError("A step was broken off half way; go on from a saved state.")
        return [
            State(
                self.text[s].clone(),
                torch.tensor(self.updates[s]),
                Bank(self.keys[s].clone(), self.cost[s].clone()),
                self.visual[s].clone(),
            )
            for s in range(len(self.methods))
        ]

    def _confident(self, views: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The mean feature (S, D) of each run's confident views, its logit (S, C), and their votes' entropy (S,)."""
        if len(views) == 1:
            return views.expand(len(logits), -1), logits[:, 0].clone(), ops.entropy(logits[:, 0])
        log_p = logits.log_softmax(-1)
        uncertain = -(log_p.exp() * log_p).sum(-1)  # (S, V)
        keep = ops.kept(len(views), self.methods[0].selection)
        chosen = uncertain.argsort(dim=1, stable=True)[:, :keep]  # (S, k)
        rows = chosen[..., None].expand(-1, -1, logits.shape[2])
        vote = log_p.gather(1, rows).logsumexp(1) - math.log(keep)
        return views[chosen].mean(1), logits.gather(1, rows).mean(1), -(vote.exp() * vote).sum(-1)

    def _push(self, label: Tensor, feature: Tensor, cost: Tensor) -> list[bool]:
        """Offer each run's feature to its class's queue; which runs took it in."""
        runs = torch.arange(len(label))
        taken = cost < self.cost[runs, label, -1]
        if taken.any():
            s, c = runs[taken], label[taken]
            slots = self.cost.shape[2]
            # the newcomer stands last, so a stable sort leaves it behind its equals; then the last one falls out
            costs, order = torch.cat([self.cost[s, c], cost[s, None]], 1).sort(dim=1, stable=True)
            rows = torch.cat([self.keys[s, c], feature[s, None]], 1)
            self.cost[s, c] = costs[:, :slots]
            kept = rows.gather(1, order[:, :slots, None].expand(-1, -1, rows.shape[2]))
            self.keys[s, c] = kept
            self.visual[s, c] = kept.sum(1) / self.cost[s, c].isfinite().sum(1, keepdim=True)
            self._aim(s, c)
            self.seen[s, c] = 1
            self.filled = self.seen.sum(1, keepdim=True)
            for run in s.tolist():
                self.stale[run] = True
        return taken.tolist()

    def _aim(self, s: Tensor, c: Tensor) -> None:
        """Directions and lengths of the visual prototypes of classes c in runs s."""
        row = self.visual[s, c]
        length = row.norm(dim=1, keepdim=True)
        length.masked_fill_(length == 0, 1)
        self.at_visual[s, c], self.visual_length[s, c] = row / length, length

    def _adapt(self, views: Tensor, feature: Tensor, logit: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Logits (S, C) with adapted prototypes, and the adapted text prototypes (S, C, D) with their lengths."""
        probe = views[0].expand(len(feature), -1)  # (S, D)
        if self.methods[0].steps == 0:
            text, visual = self.at_text, self.at_visual
            length, visual_length = torch.ones_like(self.text_length), torch.ones_like(self.visual_length)
            dot, visual_dot = _dots(text, probe), _dots(visual, probe)
        else:
            # entropy of the softmax by the logits, then by each prototype: rank one
            boost = self._affinity(_dots(self.at_visual, feature))
            log_p = (logit + boost).log_softmax(1)
            p = log_p.exp()
            gain = torch.where(self.align_weight > 0, self.align_weight / self.filled.clamp_min(1), 1.0)
            slope = p * ((p * log_p).sum(1, keepdim=True) - log_p) * (self.entropy_weight / gain)
            self._refresh()
            soft, along, through = (self.eps / gain)[..., None], feature[:, None], probe[:, None]
            again = self.methods[0].multi_view_prediction
            text, length, dot = self._nudge(
                *(self.text, self.at_text, self.pull_text, (self.task.scale * slope)[..., None], along),
                *(soft * self.text_length, self.lr_text[..., None], through, True),
            )
            visual, visual_length, visual_dot = self._nudge(
                *(self.visual, self.at_visual, self.pull_visual, (self.beta * boost * slope)[..., None], along),
                *(soft * self.visual_length, self.lr_visual[..., None], through, again),
            )
        if self.methods[0].multi_view_prediction:  # from views chosen again, with the adapted text prototypes
            for s in range(len(text)):
                torch.mm(views, text[s].T, out=self.logits[s])
            probe = self._confident(views, self.logits.mul_(self.task.scale).div_(length.mT))[0]
            dot, visual_dot = _dots(text, probe), _dots(visual, probe)
        logits = self.task.scale * (dot / length)[..., 0] + self._affinity(visual_dot / visual_length.clamp_min(1e-12))
        return logits, (text, length)

    def _affinity(self, cosine: Tensor) -> Tensor:
        """What visual prototypes at these cosines (S, C, 1) add to the logits: (S, C)."""
        return self.seen * self.alpha * (self.beta * (cosine[..., 0] - 1)).exp()

    def _nudge(self, *arguments: Any) -> Any:
        return (compiled(nudge, nudge_in_blocks) if self.long else nudge_in_blocks)(*arguments)

    @property
    def long(self) -> bool:
        """Whether the stream is long enough for the compiler; by its length alone, so that runs can be repeated."""
        return self.images * self.task.text.numel() >= PATIENCE

    def _refresh(self) -> None:
        """Compute the pull of the alignment anew in the runs whose prototypes have changed."""
        for s, stale in enumerate(self.stale):
            if not stale or not self.align_weight[s]:
                continue
            t, v, seen = self.at_text[s], self.at_visual[s], self.seen[s]
            absent = (seen - 1) * torch.finfo(t.dtype).max
            masked = 0 if seen.all() else 1
            torch.addmm(absent, v, t.T, beta=masked, alpha=1 / self.methods[s].align_temperature, out=self.similarity)
            pull = torch.softmax(self.similarity, 1, out=self.similarity)
            pull.diagonal().sub_(1)
            torch.mm(pull.T, v, out=self.pull_text[s])
            torch.mm(pull, t, out=self.pull_visual[s])
            self.stale[s] = False

    def _evolve(self, s: int, moved: Tensor, length: Tensor, share: float) -> None:
        """Move the text prototypes of run s a share of the way to the adapted ones, in place."""
        apply = compiled(evolve, evolve) if self.long else evolve
        amount = torch.tensor(share, dtype=moved.dtype)
        apply(self.text[s], self.at_text[s], self.text_length[s], moved, length, amount)


def _share(method: DPE, updates: int) -> float:
    """How far the text prototypes move towards the adapted ones, after `updates` such moves."""
    if method.text_update == "full":
        return 1.0
    if method.text_update == "exponential":
        return 1 - method.text_decay
    return 1 / (updates + method.prompt_count + 1)
