"""TDA: a training-free dynamic adapter.

Karmanov, Guan, Lu, El Saddik and Xing, "Efficient Test-Time Adaptation of Vision-Language Models", CVPR 2024.

Two caches grow along the stream: a positive one of confident image features, each raising the logit of its
pseudo-label, and a negative one of moderately uncertain features, each lowering the logits of the classes
that it considers possible. Nothing is trained: both caches are queried by similarity, and the results are added to
the zero-shot logits.

Departures: selection keeps at least one view, where the released code keeps none of fewer than ten.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from testtime import bank as banks
from testtime import ops
from testtime.methods.base import Base, check_ranges, differ, require
from testtime.types import Task


class State(NamedTuple):
    positive: banks.Bank  # (C, M, D) features and (C, M) entropies in nats
    negative: banks.Bank
    negative_prob: Tensor  # (C, M, C) predicted probabilities of each feature in the negative cache


@dataclass(frozen=True)
class TDA(Base):
    """A training-free dynamic adapter; the defaults are the released ImageNet settings.

    A cache is switched off by its capacity: `pos_capacity=0`, `neg_capacity=0`.

    >>> import testtime as tt
    >>> task, stream, _ = tt.toy()
    >>> logits, state = TDA().scan(task, TDA().init(task), stream)
    >>> logits.shape, state.positive.cost.isfinite().sum(1).tolist()
    (torch.Size([160, 8]), [3, 3, 3, 3, 3, 3, 3, 3])
    """

    name: ClassVar[str] = "tda"
    summary: ClassVar[str] = "Training-free dynamic adapter: a cache of what images are, and one of what they are not"
    source: ClassVar[str] = (
        "Karmanov, Guan, Lu, El Saddik and Xing, Efficient Test-Time Adaptation of Vision-Language Models, CVPR 2024"
    )
    adapts: ClassVar[str] = "visual"
    remembers: ClassVar[bool] = True

    pos_alpha: float = 2.0  # weight of the positive cache in the logits
    pos_beta: float = 5.0  # how sharply that weight falls with distance
    pos_capacity: int = 3  # features kept per class
    neg_alpha: float = 0.117  # small: a negative item affects many classes at once
    neg_beta: float = 1.0  # blunt: uncertain features say little about what lies near them
    neg_capacity: int = 2
    neg_entropy_lower: float = 0.2  # below, an image is certain enough for the positive cache alone
    neg_entropy_upper: float = 0.5  # above, it says nothing, not even what it is not
    neg_mask_lower: float = 0.03  # classes of lower probability are not lowered
    neg_mask_upper: float = 1.0
    selection: float = 0.1  # fraction of the views that count as confident

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("pos_alpha", "pos_beta", "pos_capacity", "neg_alpha", "neg_beta", "neg_capacity"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "must be 0 or more")
        check_ranges(self, "neg_entropy", "neg_mask")
        require(0 < self.selection <= 1, "selection", self.selection, "must lie in (0, 1]")

    def init(self, task: Task) -> State:
        return State(
            banks.empty(task.text, self.pos_capacity),
            banks.empty(task.text, self.neg_capacity),
            task.text.new_zeros(task.classes, self.neg_capacity, task.classes),
        )

    def step(self, task: Task, state: State, views: Tensor) -> tuple[Tensor, State]:
        # 1. the image as the mean of its confident views, which is not renormalised
        feature, view_logits = ops.confident_mean(views, task.zero_shot(views), self.selection)  # (D,), (kept, C)
        frozen = task.zero_shot(feature)  # (C,)
        prob = view_logits.softmax(1).mean(0)
        label, entropy = frozen.argmax(), torch.special.entr(prob).sum()

        # 2. offer it to its class's positive cache, and if it is moderately uncertain to the negative one
        positive = banks.push(state.positive, label, feature, entropy)
        # released code: nats divided by bits, so this runs to ln 2 and not to 1
        normalised = entropy / math.log2(task.classes)
        moderate = (self.neg_entropy_lower < normalised) & (normalised < self.neg_entropy_upper)
        cost = torch.where(moderate, entropy, torch.inf)  # an infinite cost is never accepted
        negative = banks.push(state.negative, label, feature, cost)
        probs = banks.push(banks.Bank(state.negative_prob, state.negative.cost), label, prob, cost).keys

        # 3. zero-shot logits, raised by the positive cache and lowered by the negative one
        raised = self._affinity(positive, feature, self.pos_alpha, self.pos_beta).sum(1)
        possible = (self.neg_mask_lower < probs) & (probs < self.neg_mask_upper)  # (C, M, C)
        weight = self._affinity(negative, feature, self.neg_alpha, self.neg_beta)
        lowered = weight.flatten() @ possible.flatten(0, 1).to(weight)
        return frozen + raised - lowered, State(positive, negative, probs)

    def learned(self, before: State, after: State) -> Tensor:
        """Whether a cache accepted the image."""
        return differ((before.positive.cost, before.negative.cost), (after.positive.cost, after.negative.cost))

    @staticmethod
    def _affinity(cache: banks.Bank, feature: Tensor, alpha: float, beta: float) -> Tensor:
        """The weight of each item of a cache (C, M); zero for an empty slot."""
        return ops.affinity(cache.keys @ feature, alpha, beta) * cache.cost.isfinite()
