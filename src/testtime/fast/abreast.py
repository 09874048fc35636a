"""Settings of DPE side by side on a GPU: one step with a leading settings axis, for graphs to capture.

One step of one setting leaves most of a GPU idle, so S of them cost little more. `graph.Runner` takes the kernels of
`fused` for it where they fit, and otherwise the step here: in float64, or without queues or Triton. It computes what
`methods.dpe` does in its released form. Like a method, this has `init` and `step`, and its state is a NamedTuple of
tensors (S, ...); but a step writes to the state it is given: at this size, copies would cost more than the step.
Nothing looks at a tensor's value. S runs, V views, C classes, D features, M slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from testtime import ops
from testtime.fast import forms
from testtime.methods import dpe
from testtime.methods.base import leaves
from testtime.types import Task


class State(NamedTuple):
    text: Tensor  # (S, C, D)
    updates: Tensor  # (S,)
    keys: Tensor  # (S, C, M, D)
    cost: Tensor  # (S, C, M)
    visual: Tensor  # (S, C, D)


def alone(state: dpe.State) -> State:
    """The state of one run as that of several, S being 1; the tensors are the same."""
    return State(*(leaf[None] for leaf in leaves(state)))


class Abreast:
    """DPE under S settings at once; a method for `graph.Runner`, whose answers are logits (S, C)."""

    name = "dpe, side by side"

    def __init__(self, task: Task, methods: Sequence[dpe.DPE]) -> None:
        like = task.text

        def each(*values: float) -> Tensor:
            return like.new_tensor(values)[:, None]  # (S, 1)

        self.methods = tuple(methods)
        (
            self.alpha,
            self.beta,
            self.entropy_weight,
            self.align_weight,
            self.eps,
            self.lr_text,
            self.lr_visual,
            self.bits,
            self.sharpness,
            self.threshold,
            self.share,
            self.prompt_count,
            keeps_below,
            evolves,
            renormalises,
        ) = (each(*values) for values in forms.numbers(task, methods))
        self.keeps_below, self.evolves, self.renormalises = keeps_below > 0, evolves > 0, renormalises[..., None] > 0
        self.runs = torch.arange(len(methods), device=like.device)
        self.same = torch.eye(task.classes, device=like.device, dtype=like.dtype)

    def init(self, task: Task) -> State:
        """Every run before the first image."""
        first = alone(self.methods[0].init(task))  # settings of one shape begin alike
        return State(*(leaf.repeat(len(self.methods), *[1] * (leaf.ndim - 1)) for leaf in first))

    def step(self, task: Task, state: State, views: Tensor) -> tuple[Tensor, State]:
        """Logits (S, C) for one image's unit views (V, D), and the state, which has moved on in place."""
        method, scale = self.methods[0], task.scale
        text_length = state.text.norm(dim=2, keepdim=True)
        t = state.text / text_length
        # 1. which queue the image belongs to, and how confidently
        feature, logit, entropy = self._confident(views, scale * (views @ t.mT))

        # 2. evolve the visual prototypes
        visual = state.visual
        if method.queue:
            self._push(state, logit.argmax(1), feature, entropy * self.bits[:, 0])
        seen = (state.cost < torch.inf).any(2).to(t)  # (S, C)
        visual_length = visual.norm(dim=2, keepdim=True)
        visual_length = torch.where(visual_length == 0, 1, visual_length)
        v = visual / visual_length

        # 3. prototype residual learning
        clean, height = views[0], self.alpha * seen
        adapted, adapted_visual = t, v
        if method.steps:
            boost = height * (self.beta * ((v @ feature[..., None])[..., 0] - 1)).exp()
            log_p = (logit + boost).log_softmax(1)
            p = log_p.exp()
            gain = self.align_weight / seen.sum(1, keepdim=True).clamp_min(1)
            gain = torch.where(gain == 0, 1, gain)
            slope = p * ((p * log_p).sum(1, keepdim=True) - log_p) * (self.entropy_weight / gain)
            pull_text, pull_visual = self._pulls(t, v, seen)
            eps = (self.eps / gain)[..., None]
            by_text = pull_text.addcmul_((scale * slope)[..., None], feature[:, None])
            by_visual = pull_visual.addcmul_((self.beta * boost * slope)[..., None], feature[:, None])
            adapted = _nudged(state.text, t, by_text, eps * text_length, self.lr_text)
            adapted_visual = _nudged(visual, v, by_visual, eps * visual_length, self.lr_visual)

        # 4. prototype-based inference with both sets
        near = adapted_visual @ clean
        logits = scale * (adapted @ clean) + height * (self.beta * (near - 1)).exp()

        # 5. evolve the text prototypes with images that are confident enough
        calm = ops.entropy(logits)[:, None] * self.bits < self.threshold
        accepted = (calm == self.keeps_below) & self.evolves  # (S, 1)
        share = torch.where(self.share < 0, 1 / (state.updates[:, None] + self.prompt_count + 1), self.share)
        state.text.lerp_(adapted, (share * accepted).to(t)[..., None])
        if any(method.renormalise_text for method in self.methods):
            text = torch.where(self.renormalises & accepted[..., None], ops.unit(state.text), state.text)
            state.text.copy_(text)
        state.updates.add_(accepted[:, 0])
        return logits, state

    def _confident(self, views: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The mean feature (S, D) of each run's confident views, its logit (S, C), and their votes' entropy (S,)."""
        if len(views) == 1:
            return views.expand(len(logits), -1), logits[:, 0], ops.entropy(logits[:, 0])
        keep = ops.kept(len(views), self.methods[0].selection)
        chosen = ops.entropy(logits).argsort(dim=1, stable=True)[:, :keep]  # (S, k)
        logits = logits.gather(1, chosen[..., None].expand(-1, -1, logits.shape[2]))
        vote = logits.log_softmax(-1).logsumexp(1) - math.log(keep)
        return views[chosen].mean(1), logits.mean(1), -(vote.exp() * vote).sum(-1)

    def _push(self, state: State, label: Tensor, feature: Tensor, price: Tensor) -> None:
        """Offer each run's feature to its class's queue; the class's visual prototype follows."""
        slots = state.cost.shape[2]
        place = self.runs, label
        # the newcomer stands last, so a stable sort leaves it behind its equals; then the last one falls out
        costs, order = torch.cat([state.cost[place], price[:, None]], 1).sort(dim=1, stable=True)
        rows = torch.cat([state.keys[place], feature[:, None]], 1)
        rows = rows.gather(1, order[:, :slots, None].expand(-1, -1, rows.shape[2]))
        costs = costs[:, :slots]
        state.keys.index_put_(place, rows)
        state.cost.index_put_(place, costs)
        state.visual.index_put_(place, rows.sum(1) / (costs < torch.inf).sum(1, keepdim=True).clamp_min(1))

    def _pulls(self, t: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """How the alignment pulls each text and each visual prototype: (S, C, D) both; zero in runs without it."""
        absent = (seen - 1) * torch.finfo(t.dtype).max
        pull = torch.baddbmm(absent[:, None], v * self.sharpness[..., None], t.mT).softmax(2).sub_(self.same)
        pull.mul_((self.align_weight > 0)[..., None])
        return pull.mT @ v, pull @ t


def _nudged(start: Tensor, at: Tensor, slope: Tensor, soft: Tensor, lr: Tensor) -> Tensor:
    """Unit prototypes (S, C, D) after one step of AdamW from zero residuals, down `slope`, which is used up."""
    slope.addcmul_(at, (slope * at).sum(2, keepdim=True), value=-1)
    moved = torch.addcdiv(start, slope * lr[..., None], slope.abs().add_(soft), value=-1)
    return moved.div_(moved.norm(dim=2, keepdim=True).clamp_min_(1e-12))
