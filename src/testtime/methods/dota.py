"""DOTA: distributional test-time adaptation.

Han et al., "DOTA: Distributional Test-Time Adaptation of Vision-Language Models", NeurIPS 2025 (arXiv 2409.19375).

Instead of keeping some of the images it has seen, DOTA keeps their distribution: a mean for each class and a
covariance, estimated along the stream with the zero-shot probabilities as soft labels. Bayes' rule turns them
into a classifier in closed form, which joins the zero-shot logits with a weight that grows as images pass.

This follows the released code (skylineeeeen/DOTA bc67d44), with its settings for DTD as the defaults: each confident
view is a sample; means start at 0.001 in every coordinate; deviations are from the mean before the image; one Lambda
for all classes, from the plain mean of their covariances; an image is predicted, then learned.

Departures:
- The mean over classes weighs each class's past by its own count, and all counts move with every image. So no sum over
  classes can be carried along in its place: the release keeps a (D, D) covariance per class, a gigabyte at 1000 classes
  of 512 features. We keep them up to `class_memory` MiB. Above that, one mean covariance is carried along, exact if the
  covariances of the classes agree, and updated by the `TOP` classes that receive most of the image.
- Means and counts are in double precision for any input: a soft label of 1e-6 would vanish in a float32 count.
- Selection keeps at least one view, where the released code keeps none of fewer than ten.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from testtime import ops
from testtime.methods.base import Base, at_least, differ, require
from testtime.types import Task

FAINT = 1e-3  # every coordinate of the initial means with `start="faint"`, as released
TOP = 64  # classes that update a covariance which all share


class State(NamedTuple):
    mean: Tensor  # (C, D) float64, of each class's features and its starting mean
    counts: Tensor  # (C,) float64, soft labels so far; the starting mean counts for one
    covariance: Tensor  # (C, D, D), of each class; or (1, D, D), their mean
    images: Tensor  # () int64
    factor: Tensor  # (D, D) float64, upper Cholesky factor U of the covariance U' U that Lambda inverts
    white: Tensor  # (C, D) float64, the means divided by U
    bias: Tensor  # (C,) float64, half the squared length of each


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
        "Han et al., DOTA: Distributional Test-Time Adaptation of Vision-Language Models, NeurIPS 2025 "
        "(arXiv 2409.19375); released code skylineeeeen/DOTA bc67d44"
    )
    adapts: ClassVar[str] = "visual"
    remembers: ClassVar[bool] = True
    presets: ClassVar[tuple[str, ...]] = ("released", "quick")

    eta: float = 0.3  # the largest weight of the Gaussian classifier
    rho: float = 0.02  # how fast that weight grows with the images seen per class
    sigma: float = 2e-3  # variance to start from; 1/512 is that of a unit feature in 512 dimensions
    epsilon: float = 1e-4  # share of the identity in the covariance, which gives it full rank
    start: Literal["faint", "text"] = "faint"  # initial means: close to zero (released), or the prompts'
    # A classifier costs D^3 / 3 + C D^2 products, an image C D + D^2. 1 is exact, as released.
    refresh: int = 1
    class_memory: int = 64  # MiB for a covariance per class, as released: 64 classes of 512 float32 features
    selection: float = 0.1  # fraction of the views that count as confident

    @classmethod
    def released(cls, **settings: Any) -> DOTA:
        """DOTA as the authors' code has it, with its settings for DTD."""
        return cls(**settings)

    @classmethod
    def quick(cls, **settings: Any) -> DOTA:
        """Ours: one covariance for all classes, and a classifier that is up to 15 images old."""
        return replace(cls(refresh=16, class_memory=0), **settings)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, self, "eta", "rho", "class_memory")
        require(self.sigma > 0, "sigma", self.sigma, "must be above 0")
        # below, rounding errors of the features would dominate the inverse
        require(1e-6 <= self.epsilon <= 1, "epsilon", self.epsilon, "must lie in [1e-6, 1]")
        require(self.refresh >= 1, "refresh", self.refresh, "must be 1 or more")
        require(0 < self.selection <= 1, "selection", self.selection, "must lie in (0, 1]")

    def init(self, task: Task) -> State:
        mean = task.text.double() if self.start == "text" else torch.full_like(task.text, FAINT, dtype=torch.float64)
        own = task.classes * task.dim**2 * task.text.element_size() <= self.class_memory * 2**20
        identity = torch.eye(task.dim, dtype=torch.float64, device=mean.device)
        covariance = (self.sigma * identity).to(task.text).repeat(task.classes if own else 1, 1, 1)
        no_images = torch.zeros((), dtype=torch.int64, device=mean.device)
        classifier = self.classifier(mean, self.sigma**0.5 * identity)  # not shrunk by epsilon, as released
        return State(mean.clone(), mean.new_ones(task.classes), covariance, no_images, *classifier)

    def step(self, task: Task, state: State, views: Tensor) -> tuple[Tensor, State]:
        due = (state.images + 1) % self.refresh == 0
        return self._step(task, state, views, self.refresh == 1 or (bool(due) if due.is_cpu else due))

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
        rows, frozen = views[chosen].double(), view_logits[chosen]  # (R, D), (R, C)

        # 2. predict: Bayes' rule beside the zero-shot logits
        feature = torch.linalg.solve_triangular(state.factor.mT, rows.mean(0)[:, None], upper=False)  # (D, 1)
        gaussian = (state.white @ feature)[:, 0] - state.bias  # (C,)
        trust = (self.rho * state.counts.mean() / len(rows)).clamp_max(self.eta)
        logits = frozen.mean(0) + (trust * gaussian).to(frozen)

        # 3. learn: every view belongs to each class as much as it is likely to be of it
        label = frozen.double().softmax(1)
        received = label.sum(0)  # (C,)
        counts = state.counts + received
        covariance = self._widened(state, rows, label, counts)
        mean = (state.mean * (state.counts / counts)[:, None]).addmm_((label / counts).T, rows)
        classifier = self._refreshed(state, mean, covariance, due)
        return logits, State(mean, counts, covariance, state.images + 1, *classifier)

    @staticmethod
    def _widened(state: State, rows: Tensor, label: Tensor, counts: Tensor) -> Tensor:
        """The covariances after rows (R, D) with labels (R, C): deviations are from the means before them."""
        each = (label / counts).T  # (C, R), weights of the rows in each class
        kept = state.covariance
        if len(kept) == len(counts):
            deviation = (rows - state.mean[:, None]).to(kept)  # (C, R, D)
            kept = kept * (state.counts / counts).to(kept)[:, None, None]
            return kept.baddbmm_((deviation * each[:, :, None].to(kept)).mT, deviation)
        share, top = each.sum(1).topk(min(TOP, len(each)))
        share, each = share / len(counts), (each[top] / len(counts)).reshape(-1, 1).to(kept)
        deviation = (rows - state.mean[top][:, None]).flatten(0, 1).to(kept)  # (TOP * R, D)
        return (kept[0] * (1 - share.sum()).to(kept)).addmm_((deviation * each).T, deviation)[None]

    def _refreshed(
        self, state: State, mean: Tensor, covariance: Tensor, due: bool | Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The classifier, recomputed if it is `due`."""
        old = state.factor, state.white, state.bias
        if isinstance(due, bool) and not due:
            return old
        shared = covariance[0] if len(covariance) == 1 else covariance.mean(0)
        shrunk = shared.to(torch.float64, copy=True).mul_(1 - self.epsilon)
        shrunk.diagonal().add_(self.epsilon)
        new = self.classifier(mean, ops.cholesky(shrunk))
        if isinstance(due, bool):
            return new
        # always computed: reading `due` would stall the GPU and abort a capture
        factor, white, bias = (torch.where(due, *pair) for pair in zip(new, old, strict=True))
        return factor, white, bias

    @staticmethod
    def classifier(mean: Tensor, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What gives the logits x' Lambda mu - mu' Lambda mu / 2, for Lambda the inverse of factor' factor.

        Not the inverse itself, which costs more and is less accurate: `factor`, the means divided by it (C, D), and
        half of their squared lengths (C,).
        """
        white = torch.linalg.solve_triangular(factor.mT, mean.mT, upper=False).mT.contiguous()
        return factor, white, white.norm(dim=1).square() / 2

    def learned(self, before: State, after: State) -> Tensor:
        """Always: every image widens the Gaussians."""
        return differ(before.images, after.images)
