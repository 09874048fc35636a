"""The arithmetic that methods share: entropies, confident views, and residual steps in closed form.

Shapes: C classes, D features, V views, R rows of a loss. Entropies are in nats. Ties go to the lower index.
Only `unit_views`, which rejects what no method can use, branches on a tensor's values; everything else can be compiled,
captured and batched.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from testtime.errors import FeatureError

# Probabilities and slopes below it count as zero. They change nothing, and become denormals in products, which would
# slow these down by up to a hundred times.
NEGLIGIBLE = 1e-30
BLOCK = 2**18  # numbers per block where rows are independent: 1 MB in float32
FACTORED = 64  # rows of a Cholesky factor that are found together


def unit(x: Tensor) -> Tensor:
    """The rows of x, normalised: (..., D) -> (..., D). A zero row stays zero."""
    return F.normalize(x, dim=-1)


class Prototypes(NamedTuple):
    """Vectors as directions, for cosines, and lengths, by which gradients of cosines are divided."""

    direction: Tensor  # (C, D), unit rows; a zero row stays zero
    length: Tensor  # (C, 1); 1 for a zero row


def prototypes(x: Tensor) -> Prototypes:
    """Directions and lengths of the rows of x (C, D)."""
    length = x.norm(dim=1, keepdim=True)
    length.masked_fill_(length == 0, 1)
    return Prototypes(x / length, length)


def onednn() -> Any:
    """oneDNN's matrix product; None where torch lacks it.

    `f(x, weight, bias, "none", [], "")` is x weight.T + bias; `f.binary(x, more, weight, bias, "add")` adds a matrix.
    In float32 torch's own are MKL's, which take twice as long on AMD's processors; in half precision they are oneDNN's.
    """
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None


def product(x: Tensor, y: Tensor, bias: Tensor | None = None, alpha: float = 1) -> Tensor:
    """alpha x y + bias: (M, K), (K, N) and (N,) -> (M, N). Without gradients."""
    fast = onednn() if x.is_cpu and x.dtype == torch.float32 else None
    if fast is not None:
        return fast(x if alpha == 1 else alpha * x, y.T, bias, "none", [], "")
    return (x if alpha == 1 else alpha * x) @ y if bias is None else torch.addmm(bias, x, y, alpha=alpha)


def cholesky(x: Tensor) -> Tensor:
    """The upper factor U of x = U' U, row by row in memory: (N, N) -> (N, N). Overwrites x; raises nothing.

    On a CPU by blocks of rows, whose sums are matrix products: torch's takes up to twice as long.
    """
    if not x.is_cpu:
        return torch.linalg.cholesky_ex(x).L.mT.contiguous()
    for start in range(0, len(x), FACTORED):
        stop = start + FACTORED
        rows = x[start:stop, start:]
        if start:
            rows.addmm_(x[:start, start:stop].mT, x[:start, start:], alpha=-1)
            x[start:stop, :start] = 0
        own = torch.linalg.cholesky_ex(rows[:, :FACTORED]).L
        rows[:, :FACTORED] = own.mT
        rows[:, FACTORED:] = torch.linalg.solve_triangular(own, rows[:, FACTORED:], upper=False)
    return x


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of the softmax: (..., C) -> (...)."""
    log_p = logits.log_softmax(-1)  # p log p through its logarithm, so that a vanishing p has a gradient too
    return -(log_p.exp() * log_p).sum(-1)


def tsallis_entropy(logits: Tensor, order: float) -> Tensor:
    """Tsallis entropy of the softmax, of an order above 0 that is not 1: (..., C) -> (...)."""
    return (1 - (order * logits.log_softmax(-1)).exp().sum(-1)) / (order - 1)


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
    if len(logits) == 1:
        return torch.zeros(1, dtype=torch.int64, device=logits.device)
    doubt = entropy(logits)
    # negligible entropies tie: among denormals, the order of summation would decide
    doubt = doubt.masked_fill(doubt < NEGLIGIBLE, 0)
    return doubt.argsort(stable=True)[: kept(len(logits), fraction)]


def confident_mean(views: Tensor, logits: Tensor, fraction: float) -> tuple[Tensor, Tensor]:
    """The mean (D,) of the confident views, not renormalised, and their logits (kept, C): from (V, D) and (V, C)."""
    chosen = confident(logits, fraction)
    return views[chosen].mean(0), logits[chosen]


def vote(logits: Tensor, fraction: float) -> Tensor:
    """The mean probability of the confident views: (V, C) -> (C,). DMN's released code, whose entropy has an offset."""
    prob = logits.softmax(1)
    if len(prob) == 1:
        return prob[0]
    doubt = -(prob * (prob + 1e-6).log()).sum(1)
    return prob[doubt.argsort(stable=True)[: kept(len(logits), fraction)]].mean(0)


def affinity(similarity: Tensor, alpha: float, beta: float) -> Tensor:
    """alpha * exp(-beta (1 - similarity)): how much a prototype at that cosine adds to a logit."""
    return alpha * (beta * (similarity - 1)).exp()


def info_nce(queries: Tensor, keys: Tensor, temperature: float) -> Tensor:
    """Mean cross-entropy of matching each query to its own key: (N, D), (N, D) -> ()."""
    return F.cross_entropy(queries @ keys.T / temperature, torch.arange(len(keys), device=keys.device))


class Objective(NamedTuple):
    """What the residuals minimise: entropy over the rows, plus the alignment of the two prototype sets."""

    scale: float | Tensor  # of the text logits; (C,) if each class has its own
    alpha: float  # of the affinity, already times the scale if requested
    beta: float
    entropy_weight: float
    align_weight: float
    align_temperature: float
    align_both: bool  # text-to-image as well as image-to-text


def logits(rows: Tensor, text: Tensor, visual: Tensor, seen: Tensor, objective: Objective) -> Tensor:
    """Prototype logits: rows (R, D), unit text and visual (C, D), seen (C,) -> (R, C)."""
    return objective.scale * (rows @ text.T) + seen * affinity(rows @ visual.T, objective.alpha, objective.beta)


def loss(rows: Tensor, text: Tensor, visual: Tensor, seen: Tensor, aligned: Tensor, objective: Objective) -> Tensor:
    """The objective at unnormalised prototypes, differentiable: the reference implementation of `gradient`."""
    text, visual = unit(text), unit(visual)
    total = objective.entropy_weight * marginal_entropy(logits(rows, text, visual, seen, objective))
    chosen = aligned.nonzero().squeeze(1)
    if objective.align_weight and len(chosen):
        t, v = text[chosen], visual[chosen]
        total = total + objective.align_weight * info_nce(v, t, objective.align_temperature)
        if objective.align_both:
            total = total + objective.align_weight * info_nce(t, v, objective.align_temperature)
    return total


class Slope(NamedTuple):
    """A gradient by directions (C, D), in factored form: `gain` times (`pull` plus `weights` @ `rows`)."""

    gain: Tensor  # ()
    weights: Tensor  # (C, R), of the entropy
    rows: Tensor  # (R, D)
    pull: Tensor | None = None  # (C, D), of the alignment

    def across(self, start: int, stop: int, direction: Tensor, scratch: Tensor) -> Tensor:
        """Rows start to stop (n, D), without `gain` and the component along `direction`, which cannot turn it.

        Overwrites those rows of `pull`, and `scratch` (n, D).
        """
        weights = self.weights[start:stop]
        slope = weights @ self.rows if self.pull is None else self.pull[start:stop].addmm_(weights, self.rows)
        along = torch.mul(slope, direction, out=scratch).sum(1, keepdim=True)
        return slope.addcmul_(direction, along, value=-1)


def slopes(
    rows: Tensor,
    text: Prototypes,
    visual: Prototypes,
    seen: Tensor,
    aligned: Tensor,
    objective: Objective,
) -> tuple[Slope, Slope]:
    """Gradients of `loss` by the directions of text and of visual prototypes.

    `rows` (R, D) are the features whose predictions are averaged; `seen` and `aligned` (C,) are 0 or 1: which
    classes have a visual prototype, and which take part in the alignment. Visual prototypes of unseen classes must
    be zero, and their gradient is meaningless.
    """
    t, v = text.direction, visual.direction
    boost = affinity(rows @ v.T, objective.alpha, objective.beta) * seen  # (R, C)
    if isinstance(objective.scale, Tensor):
        p = torch.addcmul(boost, rows @ t.T, objective.scale).softmax(1)
    else:
        p = torch.addmm(boost, rows, t.T, alpha=objective.scale).softmax(1)
    # gradient of the averaged softmax's entropy by each row's logits: rank R in the prototypes
    log_mean = p.mean(0).clamp_min_(torch.finfo(p.dtype).tiny).log_()
    gain = aligned.new_ones(())
    if objective.align_weight:
        gain = (objective.align_weight / objective.align_temperature) / aligned.sum().clamp_min(1)
    slope = p * ((p @ log_mean)[:, None] - log_mean) * (objective.entropy_weight / len(rows) / gain)
    slope = slope.masked_fill(slope.abs() < NEGLIGIBLE, 0)
    by_text, by_visual = (objective.scale * slope).T, (objective.beta * boost * slope).T  # (C, R)
    if not objective.align_weight:
        return Slope(gain, by_text, rows), Slope(gain, by_visual, rows)
    absent = (aligned - 1) * torch.finfo(t.dtype).max  # finite, so that a row of absent classes gives no NaN
    # on the CPU the check is free, and once every class is present nothing is masked
    mask = None if aligned.is_cpu and aligned.all() else absent
    similarity = product(v, t.T, mask, alpha=1 / objective.align_temperature)
    pull = _logit_gradient(similarity, 1)  # image by text
    if aligned is not seen:
        pull.mul_(aligned[:, None])  # otherwise their visual prototypes are zero and pull nothing
    if objective.align_both:
        back = torch.addmm(absent[:, None], v, t.T, alpha=1 / objective.align_temperature)
        pull.mul_(aligned[:, None]).addcmul_(_logit_gradient(back, 0), aligned)
    return Slope(gain, by_text, rows, product(pull.T, v)), Slope(gain, by_visual, rows, product(pull, t))


def gradient(
    rows: Tensor,
    text: Prototypes,
    visual: Prototypes,
    seen: Tensor,
    aligned: Tensor,
    objective: Objective,
) -> tuple[Tensor, Tensor]:
    """Gradients of `loss` by text and by visual prototypes, without autograd: two tensors (C, D)."""
    scratch = torch.empty_like(text.direction)
    by_text, by_visual = slopes(rows, text, visual, seen, aligned, objective)
    return (
        by_text.across(0, len(seen), text.direction, scratch).mul_(by_text.gain / text.length),
        by_visual.across(0, len(seen), visual.direction, scratch).mul_(by_visual.gain * seen[:, None] / visual.length),
    )


def _logit_gradient(similarity: Tensor, dim: int) -> Tensor:
    """Softmax minus identity, InfoNCE's gradient: below 0 a pair attracts, above it repels. (N, N) -> (N, N)."""
    prob = torch.softmax(similarity, dim, out=similarity)
    torch.threshold_(prob, NEGLIGIBLE, 0)
    prob.diagonal().sub_(1)
    return prob


def first_step(at: Prototypes, slope: Slope, adam: AdamW) -> Tensor:
    """Unit rows (C, D) of the prototypes `at` after one step of `adam` from zero residuals. Overwrites `slope`.

    Rows are independent, so they are processed in place, in blocks that fit the cache. Only directions are needed, so
    directions are moved by residuals over lengths, and the prototypes themselves are not read again.
    """
    result = torch.empty_like(at.direction)
    # on a GPU blocks would not fit a cache, and one block is the fewest kernels
    rows = max(1, BLOCK // result.shape[1]) if result.is_cpu else len(result)
    flatness = at.length / slope.gain  # a slope divided by it is a gradient
    for begin in range(0, len(result), rows):
        block = slice(begin, begin + rows)
        out, direction = result[block], at.direction[block]
        across = slope.across(begin, begin + rows, direction, out)
        adam.first(direction, across, flatness[block], at.length[block], out)
        out.div_(out.norm(dim=1, keepdim=True).clamp_min_(1e-12))
    return result


def learn(
    rows: Tensor,
    text: Tensor,
    at_text: Prototypes,
    visual: Tensor,
    seen: Tensor,
    aligned: Tensor,
    objective: Objective,
    adams: tuple[AdamW, AdamW],
    steps: int,
) -> tuple[Tensor, Tensor]:
    """Unit text and visual prototypes (C, D) after `steps` updates of residuals on them that start at zero.

    `at_text` holds the directions and lengths of `text`; `adams` move the residuals of text and of visual prototypes.
    """
    for_text, for_visual = adams
    if steps == 1:
        at_visual = prototypes(visual)
        down_text, down_visual = slopes(rows, at_text, at_visual, seen, aligned, objective)
        return first_step(at_text, down_text, for_text), first_step(at_visual, down_visual, for_visual)
    d_text, d_visual = torch.zeros_like(text), torch.zeros_like(visual)
    m_text = m_visual = None
    for number in range(1, steps + 1):
        at_text, at_visual = prototypes(text + d_text), prototypes(visual + d_visual)
        by_text, by_visual = gradient(rows, at_text, at_visual, seen, aligned, objective)
        d_text, m_text = for_text.step(d_text, by_text, m_text, number)
        d_visual, m_visual = for_visual.step(d_visual, by_visual, m_visual, number)
    return unit(text + d_text), unit(visual + d_visual)


class AdamW(NamedTuple):
    """Settings of the optimiser of the residuals. `state` is the precision of its moments."""

    lr: float
    eps: float
    betas: tuple[float, float] = (0.9, 0.999)
    decay: float = 0.0
    state: Literal["exact", "fp16"] = "exact"

    def first(
        self,
        start: Tensor,
        slope: Tensor,
        flatness: Tensor | float = 1.0,
        length: Tensor | float = 1.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """`start` plus, over `length`, the residual after one step from zero down the gradient slope / flatness.

        The moments cancel and the decay acts on nothing: the residual is -lr g / (|g| + eps), g the gradient.
        """
        if self.state == "fp16":
            residual = self.step(torch.zeros_like(slope), slope / flatness, None, 1)[0]
            return torch.add(start, residual / length, out=out)
        spread = torch.abs(slope, out=out).add_(self.eps * flatness).mul_(length)
        return torch.addcdiv(start, slope, spread, value=-self.lr, out=out)

    def step(
        self, residual: Tensor, grad: Tensor, moments: tuple[Tensor, Tensor] | None, number: int
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The residual and the moments after step `number` (from 1).

        With `state="fp16"` every operation rounds to half precision, as with residuals and moments in half tensors:
        the second moment of a gradient below 5.46e-3 is then zero, and the step -lr g / eps.
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


def unit_views(views: Tensor, like: Tensor, first: int = 0) -> Tensor:
    """Views (N, V, D) with unit rows, in the dtype and on the device of the prototypes `like` (C, D).

    Rejects what no method can use; `first` is the stream index of row 0, for the message.
    """
    directions, good = checked_views(views, like)
    if not good.all():
        raise refuse_views(views, first)
    return directions


def checked_views(views: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Views (N, V, D) with unit rows as in `unit_views`, and which images are usable (N,); does not synchronise."""
    dim = like.shape[-1]
    if views.ndim != 3 or 0 in views.shape[:2] or views.shape[2] != dim:
        raise FeatureError(f"Views must be (N, V, {dim}) with at least one view; got {tuple(views.shape)}.")
    if not views.is_floating_point():
        raise FeatureError(f"Views must be floating point; got {views.dtype}.")
    directions = unit(views.detach().to(like))
    return directions, _usable(directions).all(1)


def _usable(directions: Tensor) -> Tensor:
    """Which rows (..., D) are unit rows: not NaN, zero or overflowed."""
    return (directions.norm(dim=-1) - 1).abs() < 0.1


def refuse_views(views: Tensor, first: int = 0) -> FeatureError:
    """The error for the first unusable one of these views (N, V, D)."""
    image, view = (~_usable(unit(views.detach().float()))).nonzero()[0].tolist()
    row = views[image, view]
    problem = "hold NaN or infinity" if not torch.isfinite(row).all() else "cannot be normalised"
    return FeatureError(
        f"Features of image {first + image}, view {view}, {'are all zero' if not row.any() else problem}; the "
        "image cannot be used. Encode it again, or leave it out."
    )
