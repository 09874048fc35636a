"""OGA: online Gaussian adaptation.

Fuchs, Zanella and De Vleeschouwer, "Online Gaussian Test-Time Adaptation of Vision-Language Models", CVPR Workshops
2025 (arXiv 2501.04352).

A small memory keeps the features of lowest zero-shot entropy of each class. They give every class a mean, and all
classes one covariance; the likelihood of an image under these Gaussians, flattened by `tau`, multiplies its zero-shot
probabilities (maximum a posteriori). One setting serves every dataset and encoder.

This follows the released code (cfuchs2023/OGA b91d449): means are sums over the capacity, not over the features held,
and the precision is shrunk towards the identity until there are four features per dimension. The released runs read a
`batch` of 32 images into the memory before they answer the first of them; here the default is 1, which answers every
image from itself and those before it.

Departures: the covariance is updated by the one class that changed, in double precision; memory and entropies have the
precision of the features (released: half). A memory of N slots, no more than D, never holds four features per
dimension. Its precision is then computed from the N x N inner products of the residuals (Woodbury's identity), which is
faster and the same up to rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from testtime import ops
from testtime.methods.base import Base, at_least, copied, differ
from testtime.types import Task

LOG_OFFSET = 1e-9  # inside the logarithm of the entropy, as released
JITTER = 1e-12  # of the trace, so that a covariance of low rank can be factored; released: a pseudo-inverse
WIDE = 1e12  # variance where all features held are alike: their Gaussians say nothing


class Scatter(NamedTuple):
    """The residuals r of the features held from the means of their classes, by their outer products."""

    outer: Tensor  # (D, D) float64, sum of r r'
    drift: Tensor  # (D,) float64, sum of r

    def update(self, label: Tensor, before: Tensor, after: Tensor, mean: Tensor, in_place: bool) -> Scatter:
        """With the new residuals (K, D) of one class, and its new mean (1, D)."""
        outer = torch.addmm(self.outer, torch.cat([after, -before]).T, torch.cat([after, before]))
        return Scatter(outer, self.drift + (after.sum(0) - before.sum(0)))

    def centred(self, held: Tensor) -> Tensor:
        """The sum of outer products (D, D) of the residuals minus their mean; `held` (N,) is 1 for a filled slot."""
        return torch.addr(self.outer, self.drift, self.drift / held.sum().clamp_min(1), alpha=-1)


class Gram(NamedTuple):
    """The same by their inner products, for no more slots than dimensions."""

    rows: Tensor  # (N + C, D) float64: the residuals, zero for an empty slot, and below them the means
    products: Tensor  # (N + C, N) float64, of all rows with the residuals

    def update(self, label: Tensor, before: Tensor, after: Tensor, mean: Tensor, in_place: bool) -> Gram:
        """As `Scatter.update`; with `in_place` these tensors are overwritten."""
        slots = self.products.shape[1]
        changed = label * len(after) + torch.arange(len(after), device=label.device)
        places, new = torch.cat([changed, slots + label]), torch.cat([after, mean])
        rows, products = self if in_place else (self.rows.clone(), self.products.clone())
        across = new @ rows.index_copy_(0, places, new).T  # (K + 1, N + C)
        products.index_copy_(0, places, across[:, :slots]).index_copy_(1, changed, across[:-1].T)
        return Gram(rows, products)

    def centred(self, held: Tensor) -> Tensor:
        """The inner products (N, N) of the residuals minus their mean."""
        gram = centre(self.products[: len(held)], held)
        return gram.addr_(held, held @ gram / held.sum().clamp_min(1), alpha=-1)


def centre(products: Tensor, held: Tensor) -> Tensor:
    """Inner products (n, N) of n vectors with the residuals, as they are once the residuals' mean is subtracted."""
    return torch.addr(products, products @ held, held / held.sum().clamp_min(1), alpha=-1)


class State(NamedTuple):
    features: Tensor  # (C, K, D), in the order of their slots; an empty slot is zero
    entropy: Tensor  # (C, K) in nats; inf marks an empty slot
    mean: Tensor  # (C, D) of each class; its prompt until it holds two features
    residuals: Scatter | Gram
    share: Tensor  # () float64; the covariance is `share` times the scatter of the centred residuals
    ridge: Tensor  # () float64, plus `ridge` times the identity
    factor: Tensor  # float64: its upper Cholesky factor or the root of its pseudo-inverse, (D, D); of `Gram`'s, (N, N)
    white: Tensor  # float64, the means in the coordinates of `_whiten`: (C, D), or (C, D + N)


@dataclass(frozen=True)
class OGA(Base):
    """Online Gaussian adaptation. Scores are probabilities, not logits. `tau=0` switches the Gaussians off.

    >>> import testtime as tt
    >>> task, stream, labels = tt.toy(views=1)
    >>> scores, state = OGA().scan(task, OGA().init(task), stream)
    >>> adapted, frozen = scores.argmax(1), task.zero_shot(stream[:, 0]).argmax(1)
    >>> bool((adapted == labels).sum() > (frozen == labels).sum())
    True
    """

    name: ClassVar[str] = "oga"
    summary: ClassVar[str] = "Online Gaussian adaptation: a memory's Gaussians times the zero-shot probabilities"
    source: ClassVar[str] = (
        "Fuchs, Zanella and De Vleeschouwer, Online Gaussian Test-Time Adaptation of Vision-Language Models, CVPR "
        "Workshops 2025; released code cfuchs2023/OGA b91d449"
    )
    adapts: ClassVar[str] = "visual"
    remembers: ClassVar[bool] = True

    tau: float = 0.05  # weight of the Gaussians' log-likelihood
    capacity: int = 8  # K, features kept per class
    batch: int = 1  # images that enter the memory before the first of them is answered (released: 32)
    # The covariance: shrunk (Ridge), as it is (MoorePenrose), or shrunk up to four features per dimension
    inverse: Literal["RidgeMoorePenrose", "Ridge", "MoorePenrose"] = "RidgeMoorePenrose"
    normalise_mean: bool = False  # whether means have unit length

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, self, "tau")
        at_least(1, self, "capacity", "batch")

    @property
    def reads_ahead(self) -> int:
        """The batch."""
        return self.batch

    @property
    def capturable(self) -> bool:
        """Not with a pseudo-inverse; a capture that fails would break the solver for the steps after it."""
        return self.inverse != "MoorePenrose"

    def init(self, task: Task) -> State:
        classes, dim = task.text.shape
        slots, text = classes * self.capacity, task.text.double()
        residuals: Scatter | Gram = Scatter(text.new_zeros(dim, dim), text.new_zeros(dim))
        factored = dim
        if slots <= dim and self.inverse != "MoorePenrose":  # then the covariance is always shrunk
            rows = torch.cat([text.new_zeros(slots, dim), text])
            residuals, factored = Gram(rows, text.new_zeros(slots + classes, slots)), slots
        # the factor of a covariance of the identity over D
        factor = torch.eye(factored, dtype=text.dtype, device=text.device)
        factor *= math.sqrt(dim) if self.inverse == "MoorePenrose" else 1 / math.sqrt(dim)
        state = State(
            task.text.new_zeros(classes, self.capacity, dim),
            task.text.new_full((classes, self.capacity), torch.inf),
            task.text.clone(),
            residuals,
            text.new_zeros(()),
            text.new_full((), 1 / dim),
            factor,
            text,
        )
        return state._replace(white=self._whiten(state, text))

    def step(self, task: Task, state: State, views: Tensor) -> tuple[Tensor, State]:
        state = self._fit(task, state, self._remember(task, state, views[0]))
        return self._posterior(task, state, views[0]), state

    def step_in_place(self, task: Task, state: State, views: Tensor) -> tuple[Tensor, State, Tensor]:
        """As `step`, and whether the memory accepted the image, which is overwritten: it is large."""
        after = self._fit(task, state, self._remember(task, state, views[0], in_place=True))
        return self._posterior(task, after, views[0]), after, self.learned(state, after)

    def scan(self, task: Task, state: State, stream: Tensor) -> tuple[Tensor, State]:
        """As `step`, in batches: all images of one are learned from before the first of them is answered.

        In a copy of the state, whose memory is overwritten.
        """
        state, scores = copied(state), stream.new_empty(len(stream), task.classes)
        for start in range(0, len(stream), self.batch):
            images, before = stream[start : start + self.batch, 0], state
            for clean in images:
                state = self._remember(task, state, clean, in_place=True)
            state = self._fit(task, before, state)
            for row, clean in enumerate(images, start):
                scores[row] = self._posterior(task, state, clean)
        return scores, state

    def _remember(self, task: Task, state: State, clean: Tensor, in_place: bool = False) -> State:
        """Memory, mean and residuals after offering a feature (D,) to its zero-shot class."""
        prob = task.zero_shot(clean).softmax(0)
        entropy, label = -(prob * (prob + LOG_OFFSET).log()).sum(), prob.argmax().reshape(1)
        costs, mean = state.entropy[label][0], state.mean[label]  # (K,), (1, D)
        # empty slots have infinite entropy, so they fill up in order before anything is replaced
        slot = torch.arange(self.capacity, device=costs.device) == costs.argmax()
        written = slot & (entropy < costs) & (entropy < math.log(task.classes))  # (K,)
        if written.is_cpu and not written.any():
            return state  # on the CPU reading a number is free, and a rejected feature then copies nothing
        old = state.features[label][0]
        row, new_costs = torch.where(written[:, None], clean, old), torch.where(written, entropy, costs)
        held = new_costs.isfinite()
        new_mean = row.sum(0, keepdim=True) / self.capacity  # not over the number held, as released
        if self.normalise_mean:
            new_mean = new_mean / new_mean.norm(dim=1, keepdim=True).clamp_min(1e-12)
        new_mean = torch.where(held.sum() >= 2, new_mean, mean)
        before = (old.double() - mean) * costs.isfinite()[:, None]  # (K, D) residuals
        after = (row.double() - new_mean) * held[:, None]
        put = Tensor.index_copy_ if in_place else Tensor.index_copy
        return state._replace(
            features=put(state.features, 0, label, row[None]),
            entropy=state.entropy.index_copy(0, label, new_costs[None]),  # never in place: it says if anything changed
            mean=put(state.mean, 0, label, new_mean),
            residuals=state.residuals.update(label, before, after, new_mean.double(), in_place),
        )

    def _fit(self, task: Task, before: State, state: State) -> State:
        """The Gaussians of what the memory holds now."""
        if state.entropy is before.entropy:
            return state  # nothing was written
        held = state.entropy.isfinite()  # (C, K)
        number, dim = held.sum(), task.dim
        centred = state.residuals.centred(held.flatten().double())
        degrees = (number - 1).clamp_min(1).double()
        total, ready = centred.trace(), (held.sum(1) > 2).any()
        spread = total / degrees  # the trace of S
        zero, share, ridge = torch.zeros_like(total), 1 / degrees, JITTER * spread
        if self.inverse == "MoorePenrose":
            ridge = zero
        else:
            small = number <= (4 * dim if self.inverse == "RidgeMoorePenrose" else math.inf)
            share, ridge = torch.where(small, 1 / dim, share), torch.where(small, spread / dim, ridge)
            alike = ~(total > JITTER * number)  # features that are all alike leave a scatter of rounding errors
            share, ridge = torch.where(alike, zero, share), torch.where(alike, WIDE, ridge)
        share, ridge = torch.where(ready, share, zero), torch.where(ready, ridge, 1 / dim)
        matrix = centred.mul_(share)
        matrix.diagonal().add_(ridge)
        if self.inverse == "MoorePenrose":
            values, vectors = torch.linalg.eigh(matrix)
            kept = values > dim * torch.finfo(values.dtype).eps * values[-1]  # as torch's pseudo-inverse
            factor = vectors * torch.where(kept, values, torch.inf).rsqrt()  # (D, D)
        else:
            factor = ops.cholesky(matrix)
        state = state._replace(share=share, ridge=ridge, factor=factor)
        means = state.mean.double()
        products = state.residuals.products[-len(means) :] if isinstance(state.residuals, Gram) else None
        return state._replace(white=self._whiten(state, means, products))

    def _whiten(self, state: State, rows: Tensor, products: Tensor | None = None) -> Tensor:
        """Rows (n, D) in the coordinates where the precision is the identity.

        Those of `Gram`, which takes the `products` (n, N) of the rows with the residuals, are D + N, and the squares of
        the last N are subtracted.
        """
        if self.inverse == "MoorePenrose":
            return rows @ state.factor
        if isinstance(state.residuals, Scatter):
            return torch.linalg.solve_triangular(state.factor.mT, rows.mT, upper=False).mT.contiguous()
        held = state.entropy.isfinite().flatten().double()
        products = rows @ state.residuals.rows[: len(held)].T if products is None else products
        white = torch.linalg.solve_triangular(state.factor.mT, centre(products, held).mT, upper=False).mT
        return torch.cat([rows, state.share.sqrt() * white], 1) / state.ridge.sqrt()

    def log_likelihood(self, state: State, clean: Tensor) -> Tensor:
        """Log-density of a feature (D,) under each class's Gaussian, without the constant that all share: (C,)."""
        squares = (state.white - self._whiten(state, clean.double()[None])).square()
        return (squares[:, len(clean) :].sum(1) - squares[:, : len(clean)].sum(1)) / 2

    def precision(self, state: State) -> Tensor:
        """The inverse of the covariance (D, D)."""
        dim = state.mean.shape[1]
        root = self._whiten(state, torch.eye(dim, dtype=torch.float64, device=state.mean.device))
        return root[:, :dim] @ root[:, :dim].T - root[:, dim:] @ root[:, dim:].T

    def _posterior(self, task: Task, state: State, clean: Tensor) -> Tensor:
        """Zero-shot probabilities times the flattened likelihoods, normalised: (C,)."""
        return (task.zero_shot(clean) + (self.tau * self.log_likelihood(state, clean)).to(clean)).softmax(0)

    def learned(self, before: State, after: State) -> Tensor:
        """Whether the memory accepted the image."""
        return differ(before.entropy, after.entropy)

    def probabilities(self, logits: Tensor) -> Tensor:
        """The scores, which are probabilities already."""
        return logits
