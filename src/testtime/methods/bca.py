"""BCA: Bayesian class adaptation.

Zhou et al., "Bayesian Test-Time Adaptation for Vision-Language Models", CVPR 2025 (arXiv 2503.09248).

By Bayes' rule, a label's probability is the sum over class embeddings of how likely an image is of each (the
likelihood) times how likely that embedding is of the label (the prior). Both are learned: the embedding of the
predicted class moves towards the image, and its row of the prior towards the prediction. An image is answered, then
learned.

The authors' code could not be read here. This follows accounts of the paper and the port in TTABC
(walawalagoose/TTABC 65eae158), whose settings are the defaults; there are no recorded runs to compare with.

Departure: selection keeps at least one view, where the port keeps none of fewer than ten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from testtime import ops
from testtime.methods.base import Base, at_least, differ, require
from testtime.types import Task


class State(NamedTuple):
    mean: Tensor  # (C, D) unit class embeddings
    prior: Tensor  # (C, C) a distribution over labels for each embedding
    embedded: Tensor  # (C,) images in each mean; the prompt counts for several
    weighed: Tensor  # (C,) predictions in each row of the prior; the first counts for several


@dataclass(frozen=True)
class BCA(Base):
    """Class embeddings and priors that are updated by Bayes' rule. Scores are probabilities, not logits.

    A part is switched off by its own threshold of 1: the embeddings by `mean_threshold`, the priors by
    `prior_threshold`.

    >>> import testtime as tt
    >>> task, stream, _ = tt.toy(views=1)
    >>> scores, state = BCA().scan(task, BCA().init(task), stream)
    >>> bool((scores.sum(1) - 1).abs().max() < 1e-5), bool((state.prior.sum(1) - 1).abs().max() < 1e-5)
    (True, True)
    """

    name: ClassVar[str] = "bca"
    summary: ClassVar[str] = "Bayesian class adaptation: class embeddings, and a prior over labels for each"
    source: ClassVar[str] = (
        "Zhou et al., Bayesian Test-Time Adaptation for Vision-Language Models, CVPR 2025 (arXiv 2503.09248); "
        "a port, walawalagoose/TTABC 65eae158"
    )
    adapts: ClassVar[str] = "text"
    remembers: ClassVar[bool] = True

    mean_threshold: float = 0.05  # probability above which the predicted class's embedding learns
    mean_count: int = 20_000  # images that a prompt counts for, so that embeddings move slowly
    prior_threshold: float = 0.65  # probability above which its row of the prior learns
    prior_count: int = 1  # predictions that the prior to start from, the identity, counts for
    selection: float = 0.1  # fraction of the views that count as confident

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, self, "mean_count", "prior_count")
        for name in ("mean_threshold", "prior_threshold"):
            require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "must lie in [0, 1]")
        require(0 < self.selection <= 1, "selection", self.selection, "must lie in (0, 1]")

    def init(self, task: Task) -> State:
        mean, one = ops.unit(task.text), task.text.new_ones(task.classes)
        return State(mean, torch.diag(one), self.mean_count * one, self.prior_count * one)

    def step(self, task: Task, state: State, views: Tensor) -> tuple[Tensor, State]:
        return self._step(task, state, views, in_place=False)[:2]

    def step_in_place(self, task: Task, state: State, views: Tensor) -> tuple[Tensor, State, Tensor]:
        """As `step`, and whether it learned; the state, which has C squared numbers, is overwritten."""
        return self._step(task, state, views, in_place=True)

    def _step(self, task: Task, state: State, views: Tensor, in_place: bool) -> tuple[Tensor, State, Tensor]:
        # 1. predict: the likelihood of the confident views, and the priors
        view_logits = task.scale * (views @ state.mean.T)  # (V, C)
        feature, logits = ops.confident_mean(views, view_logits, self.selection)
        scores = logits.mean(0).softmax(0) @ state.prior  # (C,)

        # 2. learn: the embedding of the predicted class, and its prior if the prediction is confident
        confidence, label = scores.max(0, keepdim=True)
        moves, weighs = confidence > self.mean_threshold, confidence > self.prior_threshold  # (1,)
        put = Tensor.index_copy_ if in_place else Tensor.index_copy
        mean, row = state.mean[label], state.prior[label]  # (1, D), (1, C)
        images, times = state.embedded[label], state.weighed[label]
        moved = ops.unit((images * mean + feature) / (images + 1))
        weighed = (times * row + scores) / (times + 1)
        after = State(
            put(state.mean, 0, label, torch.where(moves, moved, mean)),
            put(state.prior, 0, label, torch.where(weighs, weighed, row)),
            put(state.embedded, 0, label, images + moves),
            put(state.weighed, 0, label, times + weighs),
        )
        return scores, after, (moves | weighs)[0]

    def learned(self, before: State, after: State) -> Tensor:
        """Whether the image was sure enough for either."""
        return differ(before[2:], after[2:])

    def probabilities(self, logits: Tensor) -> Tensor:
        """The scores, which are probabilities already."""
        return logits
