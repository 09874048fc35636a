"""The arithmetic that methods share: entropies, confident views, and residual steps in closed form.

Shapes: C classes, D features, V views, R rows of a loss. Entropies are in nats. Ties go to the lower index.
Nothing here branches on a tensor's value, so every function can be compiled, captured and batched.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def unit(x: Tensor) -> Tensor:
    """The rows of x at length one: (..., D) -> (..., D). A zero row stays zero."""
    return F.normalize(x, dim=-1)


class Prototypes(NamedTuple):
    """Vectors as directions and lengths: what a cosine needs, and what its gradient divides by."""

    direction: Tensor  # (C, D), unit rows; a zero row stays zero
    length: Tensor  # (C, 1)


def prototypes(x: Tensor) -> Prototypes:
    """The rows of x (C, D) taken apart."""
    length = x.norm(dim=1, keepdim=True).clamp_min_(torch.finfo(x.dtype).tiny)
    return Prototypes(x / length, length)


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of the softmax: (..., C) -> (...)."""
    log_p = logits.log_softmax(-1)  # p log p through its logarithm, so that a vanishing p has a gradient too
    return -(log_p.exp() * log_p).sum(-1)


def marginal_entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of the softmax averaged over rows: (V, C) -> ()."""
    log_p = logits.log_softmax(-1).logsumexp(0) - math.log(len(logits))
    return -(log_p.exp() * log_p).sum()


def kept(views: int, fraction: float) -> int:
    """How many of `views` a fraction keeps: rounded down, and at least one."""
    # released code keeps none of fewer than ten views at 0.1, and its mean is then NaN
    return max(1, int(views * fraction))


def confident(logits: Tensor, fraction: float) -> Tensor:
    """Indices of the views of lowest entropy, most confident first: (V, C) -> (kept,)."""
    return entropy(logits).argsort(stable=True)[: kept(len(logits), fraction)]


def affinity(similarity: Tensor, alpha: float, beta: float) -> Tensor:
    """alpha * exp(-beta (1 - similarity)): how much a prototype at that cosine adds to a logit."""
    return alpha * (beta * (similarity - 1)).exp()


def info_nce(queries: Tensor, keys: Tensor, temperature: float) -> Tensor:
    """Mean cross-entropy of telling each query's own key from the others: (N, D), (N, D) -> ()."""
    return F.cross_entropy(queries @ keys.T / temperature, torch.arange(len(keys), device=keys.device))


class Objective(NamedTuple):
    """What the residuals minimise: entropy over the rows, plus the alignment of the two prototype sets."""

    scale: float  # of the text logits
    alpha: float  # of the affinity, already times the scale where that is wanted
    beta: float
    entropy_weight: float
    align_weight: float
    align_temperature: float
    align_both: bool  # text-to-image as well as image-to-text


def logits(rows: Tensor, text: Tensor, visual: Tensor, seen: Tensor, objective: Objective) -> Tensor:
    """Prototype logits: rows (R, D), unit text and visual (C, D), seen (C,) -> (R, C)."""
    return objective.scale * (rows @ text.T) + seen * affinity(rows @ visual.T, objective.alpha, objective.beta)


def loss(rows: Tensor, text: Tensor, visual: Tensor, seen: Tensor, aligned: Tensor, objective: Objective) -> Tensor:
    """The objective at unnormalised prototypes, differentiable: the plain twin of `gradient`."""
    text, visual = unit(text), unit(visual)
    total = objective.entropy_weight * marginal_entropy(logits(rows, text, visual, seen, objective))
    chosen = aligned.nonzero().squeeze(1)
    if objective.align_weight and len(chosen):
        t, v = text[chosen], visual[chosen]
        total = total + objective.align_weight * info_nce(v, t, objective.align_temperature)
        if objective.align_both:
            total = total + objective.align_weight * info_nce(t, v, objective.align_temperature)
    return total


def gradient(
    rows: Tensor, text: Prototypes, visual: Prototypes, seen: Tensor, aligned: Tensor, objective: Objective
) -> tuple[Tensor, Tensor]:
    """Gradients of `loss` by text and by visual prototypes, without autograd: two tensors (C, D).

    `rows` (R, D) are the features whose predictions are averaged; `seen` and `aligned` (C,) are 0 or 1 and say
    which classes have a visual prototype and which take part in the alignment.
    """
    t, v = text.direction, visual.direction
    boost = affinity(rows @ v.T, objective.alpha, objective.beta) * seen  # (R, C)
    p = torch.addmm(boost, rows, t.T, alpha=objective.scale).softmax(1)
    # entropy of the averaged softmax, by each row's logits: rank R in the prototypes
    log_mean = p.mean(0).clamp_min(torch.finfo(p.dtype).tiny).log()
    slope = p * ((p @ log_mean)[:, None] - log_mean) * (objective.entropy_weight / len(rows))
    by_text = (objective.scale * slope).T @ rows
    by_visual = (objective.beta * boost * slope).T @ rows
    if objective.align_weight:
        share = aligned * (objective.align_weight / objective.align_temperature) / aligned.sum().clamp_min(1)
        absent = (aligned - 1) * torch.finfo(t.dtype).max  # finite, so that a row of nothing but absent is no NaN
        pull = _misplaced(torch.addmm(absent, v, t.T, alpha=1 / objective.align_temperature), 1)
        pull.mul_(share[:, None])
        if objective.align_both:
            similarity = torch.addmm(absent[:, None], v, t.T, alpha=1 / objective.align_temperature)
            pull.addcmul_(_misplaced(similarity, 0), share)
        by_text.addmm_(pull.T, v)
        by_visual.addmm_(pull, t)
    return _across(by_text, text), _across(by_visual, visual)


def _misplaced(similarity: Tensor, dim: int) -> Tensor:
    """Softmax less the identity: how much each pair attracts (below 0) or repels. (N, N) -> (N, N)."""
    chance = similarity.softmax(dim)
    chance.diagonal().sub_(1)
    return chance


def _across(grad: Tensor, at: Prototypes) -> Tensor:
    """A gradient by directions as one by vectors, in place: the part along a vector cannot turn it."""
    along = (grad * at.direction).sum(1, keepdim=True)
    return grad.addcmul_(at.direction, along, value=-1).div_(at.length)


class AdamW(NamedTuple):
    """Settings of the optimiser that moves residuals. `state` is the precision its moments are kept in."""

    lr: float
    eps: float
    betas: tuple[float, float] = (0.9, 0.999)
    decay: float = 0.0
    state: Literal["exact", "fp16"] = "exact"

    def first(self, start: Tensor, grad: Tensor) -> Tensor:
        """`start` plus the residual after one step from zero: the moments cancel, the decay acts on nothing."""
        if self.state == "fp16":
            return start + self.step(torch.zeros_like(grad), grad, None, 1)[0]
        return torch.addcdiv(start, grad, grad.abs().add_(self.eps), value=-self.lr)

    def step(
        self, residual: Tensor, grad: Tensor, moments: tuple[Tensor, Tensor] | None, number: int
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The residual and the moments after step `number` (from 1).

        With `state="fp16"` every operation rounds to half precision, as it does where residuals and moments
        are half tensors: the second moment of a gradient below 5.46e-3 is then zero, and the step -lr g / eps.
        """
        dtype = residual.dtype
        if self.state == "fp16":
            residual, grad = residual.half(), grad.half()
        first, second = moments or (torch.zeros_like(grad), torch.zeros_like(grad))
        b1, b2 = self.betas
        residual = residual * (1 - self.lr * self.decay)
        first = torch.lerp(first, grad, 1 - b1)
        second = torch.addcmul(second * b2, grad, grad, value=1 - b2)
        spread = (second.sqrt() / math.sqrt(1 - b2**number)).add_(self.eps)
        residual = torch.addcdiv(residual, first, spread, value=-self.lr / (1 - b1**number))
        return residual.to(dtype), (first, second)
