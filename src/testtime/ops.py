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


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of the softmax: (..., C) -> (...)."""
    log_p = logits.log_softmax(-1)
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
    rows: Tensor, text: Tensor, visual: Tensor, seen: Tensor, aligned: Tensor, objective: Objective
) -> tuple[Tensor, Tensor]:
    """Gradients of `loss` by text and by visual, without autograd: two tensors (C, D).

    `rows` (R, D) are the features whose predictions are averaged; `text` and `visual` (C, D) need not be
    normalised; `seen` and `aligned` (C,) are 0 or 1 and say which classes have a visual prototype and which
    take part in the alignment. Rows of `visual` where both are 0 may hold anything finite, zero included.
    """
    text_norm = text.norm(dim=1, keepdim=True)
    visual_norm = visual.norm(dim=1, keepdim=True).clamp_min(torch.finfo(visual.dtype).tiny)
    t, v = text / text_norm, visual / visual_norm
    boost = affinity(rows @ v.T, objective.alpha, objective.beta) * seen  # (R, C)
    log_p = torch.addmm(boost, rows, t.T, alpha=objective.scale).log_softmax(1)
    p = log_p.exp()
    # entropy of the averaged softmax, by each row's logits: rank R in the prototypes
    log_mean = log_p if len(rows) == 1 else log_p.logsumexp(0, keepdim=True) - math.log(len(rows))
    slope = p * ((p * log_mean).sum(1, keepdim=True) - log_mean) * (objective.entropy_weight / len(rows))
    by_text = (objective.scale * slope).T @ rows
    by_visual = (objective.beta * boost * slope).T @ rows
    if objective.align_weight:
        count = aligned.sum().clamp_min(1)
        absent = (aligned - 1) * torch.finfo(t.dtype).max  # finite, so that a row of nothing but absent is no NaN
        similarity = torch.addmm(absent, v, t.T, alpha=1 / objective.align_temperature)  # image by text
        pull = similarity.softmax(1)
        pull.diagonal().sub_(1)
        pull.mul_((aligned * (objective.align_weight / objective.align_temperature) / count)[:, None])
        if objective.align_both:
            similarity = torch.addmm(absent[:, None], v, t.T, alpha=1 / objective.align_temperature)
            back = similarity.softmax(0)
            back.diagonal().sub_(1)
            pull += back.mul_(aligned * (objective.align_weight / objective.align_temperature) / count)
        by_text.addmm_(pull.T, v)
        by_visual.addmm_(pull, t)
    # through the normalisation: the part along the prototype cannot change its direction
    by_text.sub_(t * (t * by_text).sum(1, keepdim=True)).div_(text_norm)
    by_visual.sub_(v * (v * by_visual).sum(1, keepdim=True)).div_(visual_norm)
    return by_text, by_visual


class AdamW(NamedTuple):
    """Settings of the optimiser that moves residuals. `state` is the precision its moments are kept in."""

    lr: float
    eps: float
    betas: tuple[float, float] = (0.9, 0.999)
    decay: float = 0.0
    state: Literal["exact", "fp16"] = "exact"

    def first(self, grad: Tensor) -> Tensor:
        """The residual after one step from zero, where the moments cancel and the decay acts on nothing."""
        if self.state == "fp16":
            return self.step(torch.zeros_like(grad), grad, None, 1)[0]
        return grad / grad.abs().add_(self.eps).mul_(-1 / self.lr) if self.lr else torch.zeros_like(grad)

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
