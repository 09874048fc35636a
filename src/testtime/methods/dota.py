"""DOTA: distributional test-time adaptation.

Han et al., "DOTA: Distributional Test-Time Adaptation of Vision-Language Models", 2024 (arXiv 2409.19375).

Instead of keeping some of the images it has seen, DOTA keeps their distribution: a mean for each class and a
covariance, estimated along the stream with the zero-shot probabilities as soft labels. Bayes' rule turns them
into a classifier in closed form, which joins the zero-shot logits with a weight that grows as images pass.

The paper's equations were not available. This follows a public copy of the released code: soft labels,
one pseudo-image of variance `sigma` per class to start from, each confident view a sample, one Lambda for all
classes, the inverse of (1 - epsilon) Sigma + epsilon I with Sigma the classes' mean covariance, logits
x' Lambda mu - mu' Lambda mu / 2, and their weight min(rho * mean count / views used, eta); an image is predicted,
then learned. The defaults of eta, rho, sigma and epsilon are those of a public re-run (TTABC), one set for all
datasets; the authors' own are per dataset.

Our reading:
- The one covariance is the classes' mean weighted by their counts, the pooled covariance of discriminant analysis, so
  the state holds (D, D) and not (C, D, D), a gigabyte at 1000 classes; with equal counts the two means agree.
- Deviations are from the present means. The released update takes each image's from the mean before it.
- The classifier is recomputed every `refresh` images (released: every image), and reused in between.
- Statistics are in double precision for any input: a soft label of 1e-6 would vanish in a float32 count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from testtime import ops
from testtime.methods.base import Base, require
from testtime.types import Task

FAINT = 1e-3  # every coordinate of the initial means with `start="faint"`, as released


class State(NamedTuple):
    mean: Tensor  # (C, D) float64, of each class's features and its starting mean
    counts: Tensor  # (C,) float64, soft labels so far; the starting mean counts for one
    moment: Tensor  # (D, D) float64, sum of x x' over all features so far
    images: Tensor  # () int64
    weight: Tensor  # (C, D), of the current classifier
    bias: Tensor  # (C,)


@dataclass(frozen=True)
class DOTA(Base):
    """A Gaussian classifier estimated along the stream, beside the zero-shot one. `eta=0` switches it off.

    >>> import testtime as tt
    >>> task, stream, labels = tt.toy(views=1)
    >>> logits, state = DOTA().scan(task, DOTA().init(task), stream)
    >>> adapted, frozen = logits.argmax(1), task.zero_shot(stream[:, 0]).argmax(1)
    >>> bool((adapted == labels).sum() > (frozen == labels).sum())
    True
    """

    name: ClassVar[str] = "dota"
    summary: ClassVar[str] = "Distributional adaptation: Gaussians estimated along the stream, and Bayes' rule"
    source: ClassVar[str] = (
        "Han et al., DOTA: Distributional Test-Time Adaptation of Vision-Language Models, 2024 (arXiv 2409.19375)"
    )
    adapts: ClassVar[str] = "visual"
    remembers: ClassVar[bool] = True

    eta: float = 0.3  # the largest weight of the Gaussian classifier
    rho: float = 0.02  # how fast that weight grows with the images seen per class
    sigma: float = 2e-3  # variance to start from; 1/512 is that of a unit feature in 512 dimensions
    epsilon: float = 1e-4  # share of the identity in the covariance, which gives it full rank
    start: Literal["faint", "text"] = "faint"  # initial means: close to zero (released), or the prompts'
    # A classifier costs D^3 + C D^2, an image C D + D^2; at 16 it is at most 15 images old. 1 is exact.
    refresh: int = 16
    selection: float = 0.1  # fraction of the views that count as confident

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("eta", "rho", "sigma"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "must be 0 or more")
        # below, rounding errors of the features would dominate the inverse
        require(1e-6 <= self.epsilon <= 1, "epsilon", self.epsilon, "must lie in [1e-6, 1]")
        require(self.refresh >= 1, "refresh", self.refresh, "must be 1 or more")
        require(0 < self.selection <= 1, "selection", self.selection, "must lie in (0, 1]")

    def init(self, task: Task) -> State:
        mean = self._start(task)
        count = mean.new_ones(task.classes)
        moment = mean.new_zeros(task.dim, task.dim)
        no_images = torch.zeros((), dtype=torch.int64, device=mean.device)
        return State(mean, count, moment, no_images, *self.classifier(task, mean, count, moment))

    def step(self, task: Task, state: State, views: Tensor) -> tuple[Tensor, State]:
        due = (state.images + 1) % self.refresh == 0
        return self._step(task, state, views, bool(due) if due.is_cpu else due)

    def scan(self, task: Task, state: State, stream: Tensor) -> tuple[Tensor, State]:
        """As `step`, image by image; the number of images is read from the device only once."""
        logits, images = stream.new_empty(len(stream), task.classes), int(state.images)
        for row, views in enumerate(stream):
            logits[row], state = self._step(task, state, views, (images + row + 1) % self.refresh == 0)
        return logits, state

    def _step(self, task: Task, state: State, views: Tensor, due: bool | Tensor) -> tuple[Tensor, State]:
        # 1. the confident views, and their zero-shot logits
        view_logits = task.zero_shot(views)  # (V, C)
        chosen = ops.confident(view_logits, self.selection)
        rows, frozen = views[chosen], view_logits[chosen]  # (R, D), (R, C)

        # 2. predict: Bayes' rule beside the zero-shot logits
        gaussian = state.weight @ rows.mean(0) - state.bias  # (C,)
        trust = (self.rho * state.counts.mean() / len(rows)).clamp_max(self.eta)
        logits = frozen.mean(0) + trust.to(gaussian) * gaussian

        # 3. learn: every view belongs to each class as much as it is likely to be of it
        label, rows = frozen.double().softmax(1), rows.double()
        received = label.sum(0)  # (C,)
        count = state.counts + received
        mean = state.mean + (label.T @ rows - received[:, None] * state.mean) / count[:, None]
        moment = torch.addmm(state.moment, rows.T, rows)
        return logits, State(
            mean, count, moment, state.images + 1, *self._refreshed(task, state, mean, count, moment, due)
        )

    def _refreshed(
        self, task: Task, state: State, mean: Tensor, count: Tensor, moment: Tensor, due: bool | Tensor
    ) -> tuple[Tensor, Tensor]:
        """The classifier, recomputed if it is `due`."""
        if isinstance(due, Tensor):
            # always computed: reading `due` would stall the GPU and abort a capture
            weight, bias = self.classifier(task, mean, count, moment)
            return torch.where(due, weight, state.weight), torch.where(due, bias, state.bias)
        return self.classifier(task, mean, count, moment) if due else (state.weight, state.bias)

    def covariance(self, task: Task, mean: Tensor, count: Tensor, moment: Tensor) -> Tensor:
        """The pooled covariance within classes (D, D), each with its one pseudo-image of variance `sigma`."""
        start = self._start(task)
        # scatter of all samples about zero, minus that of their means: the soft labels of a sample sum to one
        scatter = torch.addmm(moment, start.T, start).addmm_(mean.T * count, mean, alpha=-1)
        scatter.diagonal().add_(task.classes * self.sigma)
        return scatter / count.sum()

    def classifier(self, task: Task, mean: Tensor, count: Tensor, moment: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (C, D) and biases (C,) of the Gaussian logits `weight @ x - bias`."""
        shrunk = (1 - self.epsilon) * self.covariance(task, mean, count, moment)
        shrunk.diagonal().add_(self.epsilon)
        factor = torch.linalg.cholesky_ex(shrunk).L  # not the inverse itself, which costs more and is less accurate
        weight = torch.cholesky_solve(mean.T, factor).T
        return weight.to(task.text), ((weight * mean).sum(1) / 2).to(task.text)

    def _start(self, task: Task) -> Tensor:
        text = task.text.double()
        return text.clone() if self.start == "text" else torch.full_like(text, FAINT)
