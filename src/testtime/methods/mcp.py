"""MCP: multi-cache enhanced prototype learning (MCP++, the variant with residuals).

Chen, Zhai, Zhang, Shi and Li, "Multi-Cache Enhanced Prototype Learning for Test-Time Generalization of
Vision-Language Models", ICCV 2025 (arXiv 2508.01225).

Three caches grow along the stream. The entropy cache keeps the most confident features of each class, and with
the prompt they make the class's centre; the align cache keeps the features nearest to that centre, so that
classes become compact; the negative cache keeps uncertain features, which lower the classes they consider possible.
Residuals on text and visual prototypes are then learned for each image, as in DPE.

The paper's (its abstract and the overview in its Figure 3): the three caches and what each is for, prototypes of
text and image with residuals, losses of entropy, alignment and contrast, and a prediction from prototypes, align cache
and negative cache together. Its equations and settings were not available.

Our reading:
- The centre is the mean direction of the prompt and of the entropy cache's mean, the prompt alone where it is empty.
  The align cache's distances from it are recomputed whenever its class receives an image.
- The visual prototype is the mean of both caches' features: one that is confident and near counts twice.
- The residual step is DPE's (entropy of confident views, contrastive alignment of the seen classes), its settings
  DPE's defaults. One contrastive loss stands in for the paper's alignment and contrastive losses. Residuals are
  forgotten after the image, and the text prototypes do not evolve.
- "Reflecting" of the negative cache: an uncertain image is stored with the probabilities that the prototypes give
  it, not the frozen classifier. Gate and masks are TDA's, with TDA's defaults.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from testtime import bank as banks
from testtime import ops
from testtime.methods.base import Base, differ, require
from testtime.types import Task


class State(NamedTuple):
    entropy: banks.Bank  # (C, M, D) features and (C, M) entropies in nats
    align: banks.Bank  # (C, M, D) features and (C, M) cosine distances from the class's centre
    negative: banks.Bank
    negative_prob: Tensor  # (C, M, C) predicted probabilities of each feature in the negative cache


def draw_near(bank: banks.Bank, label: Tensor, feature: Tensor, centre: Tensor) -> banks.Bank:
    """The bank after offering class `label` () a feature (D,): its row keeps those nearest to `centre` (D,).

    Costs are cosine distances, recomputed for the whole row, since the centre moves. A feature takes a free slot, or
    replaces the farthest if it is nearer; among equals the older comes first.
    """
    slots = bank.cost.shape[1]
    index = label.reshape(1)  # a scalar index would be read back from the GPU
    row = torch.cat([bank.keys[index][0], feature[None]])  # (M + 1, D)
    present = torch.cat([bank.cost[index][0].isfinite(), row.new_ones(1, dtype=torch.bool)])
    cost, order = torch.where(present, 1 - ops.unit(row) @ centre, torch.inf).sort(stable=True)
    return banks.Bank(
        bank.keys.index_copy(0, index, row[order[:slots]][None]), bank.cost.index_copy(0, index, cost[None, :slots])
    )


@dataclass(frozen=True)
class MCP(Base):
    """Multi-cache prototypes with residuals.

    A part is switched off by its own setting: a cache by its capacity of 0, residual learning by `steps=0`
    (MCP without "++").

    >>> import testtime as tt
    >>> task, stream, labels = tt.toy()
    >>> logits, state = MCP().scan(task, MCP().init(task), stream)
    >>> adapted, frozen = logits.argmax(1), task.zero_shot(stream[:, 0]).argmax(1)
    >>> bool((adapted == labels).sum() > (frozen == labels).sum())
    True
    """

    name: ClassVar[str] = "mcp"
    summary: ClassVar[str] = "Multi-cache prototypes (MCP++): confident, central and uncertain features, and residuals"
    source: ClassVar[str] = (
        "Chen, Zhai, Zhang, Shi and Li, Multi-Cache Enhanced Prototype Learning for Test-Time Generalization of "
        "Vision-Language Models, ICCV 2025"
    )
    adapts: ClassVar[str] = "both"
    remembers: ClassVar[bool] = True
    gradients: ClassVar[str] = "closed form"

    alpha: float = 6.0  # weight of the visual prototypes in the logits (DPE's)
    beta: float = 5.0  # how sharply that weight falls with distance
    entropy_capacity: int = 3  # confident features kept per class
    align_capacity: int = 3  # central features kept per class
    align_alpha: float = 2.0  # weight of each central feature in the logits (TDA's of a positive one)
    align_beta: float = 5.0
    neg_capacity: int = 2
    neg_alpha: float = 0.117  # these six are TDA's
    neg_beta: float = 1.0
    neg_entropy_lower: float = 0.2
    neg_entropy_upper: float = 0.5
    neg_mask_lower: float = 0.03
    neg_mask_upper: float = 1.0
    entropy_weight: float = 1.0  # of the entropy loss; from here on, DPE's
    align_weight: float = 0.5  # of the alignment loss
    align_temperature: float = 0.01
    lr_text: float = 6e-4
    lr_image: float = 6e-4
    steps: int = 1  # residual updates per image
    adamw_eps: float = 1e-3
    adamw_betas: tuple[float, float] = (0.9, 0.999)
    adamw_weight_decay: float = 0.1
    selection: float = 0.1  # fraction of the views that count as confident

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("alpha", "beta", "align_alpha", "align_beta", "neg_alpha", "neg_beta", "lr_text", "lr_image"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "must be 0 or more")
        for name in ("entropy_capacity", "align_capacity", "neg_capacity", "steps"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "must be 0 or more")
        for name in ("entropy_weight", "align_weight", "adamw_weight_decay"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "must be 0 or more")
        for name in ("neg_entropy", "neg_mask"):
            lower, upper = getattr(self, f"{name}_lower"), getattr(self, f"{name}_upper")
            require(lower <= upper, f"{name}_lower", lower, f"must not exceed {name}_upper={upper!r}")
        require(self.align_temperature > 0, "align_temperature", self.align_temperature, "must be above 0")
        require(self.adamw_eps > 0, "adamw_eps", self.adamw_eps, "must be above 0")
        betas_fit = len(self.adamw_betas) == 2 and all(0 <= beta < 1 for beta in self.adamw_betas)
        require(betas_fit, "adamw_betas", self.adamw_betas, "must be two numbers in [0, 1)")
        require(0 < self.selection <= 1, "selection", self.selection, "must lie in (0, 1]")

    def init(self, task: Task) -> State:
        return State(
            banks.empty(task.text, self.entropy_capacity),
            banks.empty(task.text, self.align_capacity),
            banks.empty(task.text, self.neg_capacity),
            task.text.new_zeros(task.classes, self.neg_capacity, task.classes),
        )

    def step(self, task: Task, state: State, views: Tensor) -> tuple[Tensor, State]:
        # 1. the image as the mean of its confident views, which is not renormalised
        feature, view_logits = ops.confident_mean(views, task.zero_shot(views), self.selection)  # (D,), (kept, C)
        label, cost = task.zero_shot(feature).argmax(), ops.marginal_entropy(view_logits)

        # 2. entropy cache: the most confident features, which with the prompt make the class's centre
        confident = banks.push(state.entropy, label, feature, cost)
        prompt = task.text[label.reshape(1)][0]
        centre = ops.unit(prompt + ops.unit(banks.row_mean(confident, label)))  # (D,)

        # 3. align cache: the features nearest to that centre
        central = draw_near(state.align, label, feature, centre)

        # 4. prototype residual learning
        both = banks.Bank(torch.cat([confident.keys, central.keys], 1), torch.cat([confident.cost, central.cost], 1))
        visual, seen = banks.prototypes(both), (banks.filled(confident) | banks.filled(central)).to(task.text)
        remembers = self.entropy_capacity + self.align_capacity > 0  # without either there is nothing to align with
        objective = ops.Objective(
            task.scale,
            self.alpha,
            self.beta,
            self.entropy_weight,
            self.align_weight if remembers else 0.0,
            self.align_temperature,
            align_both=False,
        )
        adam = ops.AdamW(0.0, self.adamw_eps, self.adamw_betas, self.adamw_weight_decay)
        adams = adam._replace(lr=self.lr_text), adam._replace(lr=self.lr_image)
        text, visual = ops.learn(
            feature[None], task.text, ops.prototypes(task.text), visual, seen, seen, objective, adams, self.steps
        )

        # 5. both sets of prototypes, raised by the central features
        clean = views[0]
        logits = ops.logits(clean[None], text, visual, seen, objective)[0]
        logits = logits + self._affinity(central, clean, self.align_alpha, self.align_beta).sum(1)

        # 6. negative cache: images the prototypes are moderately uncertain about lower the classes they may be
        prob, entropy = logits.softmax(0), ops.entropy(logits)
        # nats divided by bits, as TDA's gate is
        normalised = entropy / math.log2(task.classes)
        moderate = (self.neg_entropy_lower < normalised) & (normalised < self.neg_entropy_upper)
        cost = torch.where(moderate, entropy, torch.inf)  # an infinite cost is never accepted
        negative = banks.push(state.negative, logits.argmax(), feature, cost)
        probs = banks.push(banks.Bank(state.negative_prob, state.negative.cost), logits.argmax(), prob, cost).keys
        possible = (self.neg_mask_lower < probs) & (probs < self.neg_mask_upper)  # (C, M, C)
        weight = self._affinity(negative, clean, self.neg_alpha, self.neg_beta)
        lowered = weight.flatten() @ possible.flatten(0, 1).to(weight)
        return logits - lowered, State(confident, central, negative, probs)

    def learned(self, before: State, after: State) -> Tensor:
        """Whether a cache accepted the image."""
        return differ(*(tuple(cache.keys for cache in state[:3]) for state in (before, after)))

    @staticmethod
    def _affinity(cache: banks.Bank, feature: Tensor, alpha: float, beta: float) -> Tensor:
        """The weight of each item of a cache (C, M); zero for an empty slot."""
        return ops.affinity(cache.keys @ feature, alpha, beta) * cache.cost.isfinite()
