"""DPE on the CPU without copies: S settings side by side over one stream, in place.

What it does beyond `methods.dpe`, the twin that reads like the paper:

- a queue that takes an image in changes one row of the queues, of the visual prototypes and of their directions;
- the pull of the alignment loss, three C x C x D products, is a function of the prototypes alone. It is kept, and
  computed anew only after a prototype has changed: exact, not approximate;
- all else of size C x D is one pass over memory (`nudge`, `evolve`), compiled where numba is installed;
- products are made one setting at a time and all else row by row, so a setting's numbers do not depend on what
  runs beside it.

Nothing here depends on the past except through the state, so a run that is saved and loaded goes on bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from testtime import ops
from testtime.bank import Bank
from testtime.methods.dpe import DPE, State
from testtime.types import Task

try:
    from testtime.fast import kernels
except ImportError:  # numba is an extra
    kernels = None  # type: ignore[assignment]

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
    at: Tensor,
    pull: Tensor,
    pulled: Tensor,
    weight: Tensor,
    feature: Tensor,
    soft: Tensor,
    lr: Tensor,
    probe: Tensor,
    moved: Tensor,
    length: Tensor,
    dot: Tensor,
) -> None:
    """Fill `moved` (S, C, D) with prototypes after one step of AdamW from zero residuals.

    `start` (S, C, D) are the prototypes, `at` their directions. The slope is `pull` (S, C, D), in runs that are
    `pulled` (S,), plus `weight` (S, C) times `feature` (S, D), less what lies along `at`, which turns nothing. The
    residual is -lr slope / (|slope| + soft): `soft` (S, C) is eps in the slope's own units. `length` and `dot` (S, C)
    become the lengths of the result and its products with `probe` (S, D). A `moved` of one row is scratch.
    """
    if kernels is not None:
        given = start, at, pull, pulled, weight, feature, soft, lr, probe, moved, length, dot
        kernels.nudge(*(tensor.numpy() for tensor in given))
        return
    rows = max(1, ops.BLOCK // start.shape[2])  # as many as fit a cache
    for s in range(len(start)):
        for c in range(0, start.shape[1], rows):
            block = s, slice(c, c + rows)
            slope = torch.outer(weight[block], feature[s])
            if pulled[s]:
                slope += pull[block]
            slope.addcmul_(at[block], (slope * at[block]).sum(1, keepdim=True), value=-1)
            result = start[block] - lr[s] * slope / slope.abs().add_(soft[block][:, None])
            length[block], dot[block] = result.norm(dim=1), result @ probe[s]
            if moved.shape[1] == start.shape[1]:
                moved[block] = result


def evolve(text: Tensor, at: Tensor, length: Tensor, moved: Tensor, moved_length: Tensor, share: float) -> None:
    """Move `text` (C, D) a `share` of the way towards `moved` at length one; aim `at` and `length` (C,) along it."""
    if kernels is not None:
        kernels.evolve(*(tensor.numpy() for tensor in (text, at, length, moved, moved_length)), share)
        return
    text.lerp_(moved / moved_length[:, None], share)
    torch.linalg.vector_norm(text, dim=1, out=length)
    torch.div(text, length[:, None], out=at)


class Runner:
    """S runs of DPE over one stream; see `fast.Runner`."""

    def __init__(self, task: Task, methods: Sequence[DPE], states: Sequence[State] | None = None) -> None:
        self.task, self.methods = task, methods
        states = states or [method.init(task) for method in methods]
        queue = methods[0].queue

        def column(*values: float) -> Tensor:
            return task.text.new_tensor(values)[:, None]  # (S, 1)

        self.alpha = column(*(m.alpha * (task.scale if m.scale_affinity else 1.0) for m in methods))
        self.beta = column(*(m.beta for m in methods))
        self.entropy_weight = column(*(m.entropy_weight for m in methods))
        self.align_weight = column(*(m.align_weight / m.align_temperature if queue else 0.0 for m in methods))
        self.eps = column(*(m.adamw_eps for m in methods))
        self.bits = column(*(1 / math.log(task.classes, 2 if m.entropy_unit == "log2" else math.e) for m in methods))
        self.lr_text = column(*(m.lr_text for m in methods))[:, 0]
        self.lr_visual = column(*(m.lr_image for m in methods))[:, 0]
        self.pulled = self.align_weight[:, 0] > 0

        self.text = torch.stack([state.text for state in states])  # (S, C, D)
        self.updates = [int(state.updates) for state in states]
        self.keys = torch.stack([state.queue.keys for state in states])  # (S, C, M, D)
        self.cost = torch.stack([state.queue.cost for state in states])  # (S, C, M)
        self.visual = torch.stack([state.visual for state in states])  # (S, C, D)
        self.seen = torch.zeros_like(self.text[..., 0])  # (S, C) of 0 and 1

        # what follows from the state, kept beside it: directions, lengths and the pull of the alignment
        self.at_text, self.text_length = torch.empty_like(self.text), torch.ones_like(self.seen)
        for s, text in enumerate(self.text):
            evolve(text, self.at_text[s], self.text_length[s], text, self.text_length[s].clone(), 0.0)
        self.at_visual, self.visual_length = torch.zeros_like(self.visual), torch.ones_like(self.seen)
        if queue:
            self.seen += self.cost[..., 0].isfinite()
            self._aim(*self.seen.nonzero(as_tuple=True))
        self._count()
        self.pull_text, self.pull_visual = torch.empty_like(self.text), torch.empty_like(self.visual)
        self.stale = self.pulled.tolist()

        # room to work in
        self.similarity = self.text.new_empty(task.classes, task.classes)
        self.logits = self.text.new_empty(len(methods), 0, task.classes)  # (S, V, C)
        self.moved = torch.empty_like(self.text)
        self.moved_visual = torch.empty_like(self.text[:, : None if methods[0].multi_view_prediction else 1])
        self.length, self.dot = torch.empty_like(self.seen), torch.empty_like(self.seen)
        self.length_visual, self.dot_visual = torch.empty_like(self.seen), torch.empty_like(self.seen)
        self.whole = True  # False within a step: what an exception leaves half done is not given out

    def step(self, views: Tensor) -> tuple[Tensor, list[bool]]:
        """Logits (S, C) for one image's unit views (V, D), and which runs learned from it."""
        self.whole = False
        # 1. which queue the image belongs to, and how confidently
        feature, logit, entropy = self._confident(views, self.at_text)

        # 2. evolve the visual prototypes
        learned = [False] * len(self.methods)
        if self.methods[0].queue:
            learned = self._push(logit.argmax(1), feature, entropy * self.bits[:, 0])

        # 3. prototype residual learning
        if self.methods[0].steps:
            self._nudge(feature, logit, views[0])
            moved, visual, length, dots = self.moved, self.moved_visual, self.length, (self.dot, self.dot_visual)
            visual_length = self.length_visual.clamp_min_(1e-12)
        else:
            moved, visual, length = self.at_text, self.at_visual, torch.ones_like(self.text_length)
            visual_length = length
            dots = _dots(moved, views[0].expand_as(feature)), _dots(visual, views[0].expand_as(feature))

        # 4. prototype-based inference with both sets
        if self.methods[0].multi_view_prediction:  # from views chosen again
            again = self._confident(views, moved, length)[0]
            dots = _dots(moved, again), _dots(visual, again)
        logits = self.task.scale * (dots[0] / length) + self._affinity(dots[1] / visual_length)

        # 5. evolve the text prototypes with images that are confident enough
        spread = (ops.entropy(logits) * self.bits[:, 0]).tolist()
        for s, method in enumerate(self.methods):
            accepted = (spread[s] < method.entropy_threshold) is (method.gate_keeps == "below")
            if accepted and method.text_update != "none":
                self._evolve(s, moved[s], length[s])
                learned[s] = True
        self.whole = True
        return logits, learned

    def states(self) -> list[State]:
        """The state of each run; a copy."""
        if not self.whole:
            raise RuntimeError("A step was broken off half way; go on from a saved state.")
        return [
            State(text.clone(), torch.tensor(updates), Bank(keys.clone(), cost.clone()), visual.clone())
            for text, updates, keys, cost, visual in zip(
                self.text, self.updates, self.keys, self.cost, self.visual, strict=True
            )
        ]

    def _confident(self, views: Tensor, text: Tensor, length: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The mean feature (S, D) of each run's confident views, its logit (S, C), and their votes' entropy (S,)."""
        if self.logits.shape[1] != len(views):
            self.logits = self.text.new_empty(len(text), len(views), self.task.classes)
        logits = self.logits
        for s, rows in enumerate(text):
            torch.addmm(logits[s], views, rows.T, beta=0, alpha=self.task.scale, out=logits[s])
        if length is not None:
            logits.div_(length[:, None])
        if len(views) == 1:
            return views.expand(len(text), -1), logits[:, 0], ops.entropy(logits[:, 0])
        log_p = logits.log_softmax(-1)
        uncertain = (log_p.exp() * log_p).sum(-1)  # (S, V), below 0
        keep = ops.kept(len(views), self.methods[0].selection)
        chosen = uncertain.argsort(dim=1, descending=True, stable=True)[:, :keep]  # (S, k)
        rows = chosen[..., None].expand(-1, -1, logits.shape[2])
        vote = log_p.gather(1, rows).logsumexp(1) - math.log(keep)
        return views[chosen].mean(1), logits.gather(1, rows).mean(1), -(vote.exp() * vote).sum(-1)

    def _push(self, label: Tensor, feature: Tensor, cost: Tensor) -> list[bool]:
        """Offer each run's feature to its class's queue; which runs took it in."""
        runs = torch.arange(len(label))
        taken = cost < self.cost[runs, label, -1]
        told = taken.tolist()
        if any(told):
            s, c, slots = runs[taken], label[taken], self.cost.shape[2]
            # the newcomer stands last, so a stable sort leaves it behind its equals; then the last one falls out
            costs, order = torch.cat([self.cost[s, c], cost[s, None]], 1).sort(dim=1, stable=True)
            rows = torch.cat([self.keys[s, c], feature[s, None]], 1)
            rows = rows.gather(1, order[:, :slots, None].expand(-1, -1, rows.shape[2]))
            self.cost[s, c], self.keys[s, c] = costs[:, :slots], rows
            self.visual[s, c] = rows.sum(1) / costs[:, :slots].isfinite().sum(1, keepdim=True)
            self._aim(s, c)
            self.seen[s, c] = 1
            self._count()
            for run in s.tolist():
                self.stale[run] = bool(self.pulled[run])
        return told

    def _aim(self, s: Tensor, c: Tensor) -> None:
        """Directions and lengths of the visual prototypes of classes c in runs s."""
        rows = self.visual[s, c]
        length = rows.norm(dim=1)
        length.masked_fill_(length == 0, 1)
        self.at_visual[s, c], self.visual_length[s, c] = rows / length[:, None], length

    def _count(self) -> None:
        """What depends on how many classes have been seen."""
        gain = self.align_weight / self.seen.sum(1, keepdim=True).clamp_min_(1)
        gain.masked_fill_(gain == 0, 1)  # (S, 1)
        self.soft = self.eps / gain
        self.steepness = self.entropy_weight / gain
        self.height = self.alpha * self.seen  # (S, C)

    def _affinity(self, cosine: Tensor) -> Tensor:
        """What visual prototypes at these cosines (S, C) add to the logits."""
        return torch.addcmul(-self.beta, self.beta, cosine).exp_().mul_(self.height)

    def _nudge(self, feature: Tensor, logit: Tensor, probe: Tensor) -> None:
        """Nudge both sets of prototypes to lower the entropy at `feature` (S, D) and to align them."""
        # entropy of the softmax by the logits, then by each prototype: rank one
        boost = self._affinity(_dots(self.at_visual, feature))
        log_p = (logit + boost).log_softmax(1)
        p = log_p.exp()
        slope = ((p * log_p).sum(1, keepdim=True) - log_p).mul_(p).mul_(self.steepness)
        self._refresh()
        feature, probe = feature.contiguous(), probe.expand_as(feature).contiguous()
        nudge(
            *(self.text, self.at_text, self.pull_text, self.pulled, self.task.scale * slope, feature),
            *(self.soft * self.text_length, self.lr_text, probe, self.moved, self.length, self.dot),
        )
        nudge(
            *(self.visual, self.at_visual, self.pull_visual, self.pulled, slope.mul_(boost).mul_(self.beta), feature),
            *(self.soft * self.visual_length, self.lr_visual, probe),
            *(self.moved_visual, self.length_visual, self.dot_visual),
        )

    def _refresh(self) -> None:
        """Compute the pull of the alignment anew in the runs whose prototypes have changed."""
        for s, stale in enumerate(self.stale):
            if not stale:
                continue
            t, v, seen = self.at_text[s], self.at_visual[s], self.seen[s]
            absent = (seen - 1) * torch.finfo(t.dtype).max  # finite, so that a row of nothing but absent is no NaN
            masked = 0 if seen.all() else 1  # without the mask, once it masks nothing
            torch.addmm(absent, v, t.T, beta=masked, alpha=1 / self.methods[s].align_temperature, out=self.similarity)
            pull = torch.softmax(self.similarity, 1, out=self.similarity)
            pull.diagonal().sub_(1)
            torch.mm(pull.T, v, out=self.pull_text[s])
            torch.mm(pull, t, out=self.pull_visual[s])
            self.stale[s] = False

    def _evolve(self, s: int, moved: Tensor, length: Tensor) -> None:
        """Move the text prototypes of run s towards the adapted ones."""
        method = self.methods[s]
        share = 1 / (self.updates[s] + method.prompt_count + 1)
        if method.text_update == "full":
            share = 1.0
        elif method.text_update == "exponential":
            share = 1 - method.text_decay
        text, at, lengths = self.text[s], self.at_text[s], self.text_length[s]
        evolve(text, at, lengths, moved, length, share)
        if method.renormalise_text:
            text.copy_(at)
            evolve(text, at, lengths, text, torch.ones_like(lengths), 0.0)
        self.updates[s] += 1
        self.stale[s] = bool(self.pulled[s])


def _dots(prototypes: Tensor, features: Tensor) -> Tensor:
    """Each run's prototypes (S, C, D) with its own feature (S, D): (S, C)."""
    return torch.stack([rows @ feature for rows, feature in zip(prototypes, features, strict=True)])
