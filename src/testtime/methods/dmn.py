"""DMN-ZS: dual memory networks, without training data.

Zhang, Zhu, Tang, Ma, Zhou and Zhang, "Dual Memory Networks: A Versatile Adaptation Approach for
Vision-Language Models", CVPR 2024.

A dynamic memory keeps the features of past test images under their pseudo-labels. Each image reads its own
classifier from it, class vectors weighted towards the memories most similar to it, whose probabilities are
added to the zero-shot ones. (The static memory of the paper needs labelled images and is not part of DMN-ZS.)

Departures: the published numbers pick the fusion weight of each dataset with its test labels; here it is a
setting, and that search, in `testtime.experiments.oracle`, is a different system. Selection keeps at least one view,
where the released code keeps none of fewer than ten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from testtime import ops
from testtime.methods.base import Base, differ, require
from testtime.types import Task


class State(NamedTuple):
    features: Tensor  # (C, M, D) in the order of their slots; an empty slot is zero
    entropy: Tensor  # (C, M) in nats; inf marks an empty slot


@dataclass(frozen=True)
class DMN(Base):
    """Dual memory networks, zero-shot. Scores are weighted probabilities, not logits.

    `memory_size=0` switches the memory off.

    >>> import testtime as tt
    >>> task, stream, _ = tt.toy()
    >>> scores, state = DMN().scan(task, DMN().init(task), stream)
    >>> scores.shape, state.entropy.isfinite().sum().item()
    (torch.Size([160, 8]), 160)
    """

    name: ClassVar[str] = "dmn"
    summary: ClassVar[str] = "Dual memory networks (DMN-ZS): each image reads its own classifier from a memory"
    source: ClassVar[str] = (
        "Zhang, Zhu, Tang, Ma, Zhou and Zhang, Dual Memory Networks: A Versatile Adaptation Approach for "
        "Vision-Language Models, CVPR 2024"
    )
    assumes: ClassVar[tuple[str, ...]] = ("views", "LLM texts")
    adapts: ClassVar[str] = "visual"
    remembers: ClassVar[bool] = True

    memory_size: int = 50  # features kept per class; the text prototype is one more
    fusion_memory: float = 1.0  # equal weights: without labels there is no way to tell which is better
    fusion_text: float = 1.0
    beta: float = 5.5  # how sharply a memory's weight falls with its distance from the image
    selection: float = 0.1  # fraction of the views that vote on the pseudo-label

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("memory_size", "fusion_memory", "fusion_text", "beta"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "must be 0 or more")
        positive = self.fusion_memory + self.fusion_text > 0
        require(positive, "fusion_memory", self.fusion_memory, "must be above 0 where fusion_text is 0")
        require(0 < self.selection <= 1, "selection", self.selection, "must lie in (0, 1]")

    def init(self, task: Task) -> State:
        classes, dim = task.text.shape
        return State(
            task.text.new_zeros(classes, self.memory_size, dim),
            task.text.new_full((classes, self.memory_size), torch.inf),
        )

    def step(self, task: Task, state: State, views: Tensor) -> tuple[Tensor, State]:
        state = self.remember(task, state, views)
        text_prob, memory_prob = self.parts(task, state, views)
        return self.fusion_text * text_prob + self.fusion_memory * memory_prob, state

    def vote(self, task: Task, views: Tensor) -> Tensor:
        """The mean probability of the confident views: (V, D) -> (C,)."""
        return ops.vote(task.zero_shot(views), self.selection)

    def remember(self, task: Task, state: State, views: Tensor) -> State:
        """The memory after one image (V, D): it keeps the clean view, under the label that views vote for."""
        if self.memory_size == 0:
            return state
        vote = self.vote(task, views)
        label = vote.argmax().reshape(1)
        entropy = -(vote * (vote + 1e-8).log()).sum()  # as released: not the constant used for the views
        row, costs = state.features[label][0], state.entropy[label][0]  # (M, D), (M,)
        # empty slots have infinite entropy, so they fill up in order before anything is replaced
        slot = costs.argmax()
        here = (torch.arange(len(costs), device=costs.device) == slot) & (entropy < costs)  # (M,)
        row, costs = torch.where(here[:, None], views[0], row), torch.where(here, entropy, costs)
        return State(state.features.index_copy(0, label, row[None]), state.entropy.index_copy(0, label, costs[None]))

    def parts(self, task: Task, state: State, views: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities from the text and from a memory that already includes the image (V, D): two tensors (C,)."""
        clean = views[0]
        cosine = task.text @ clean  # (C,)
        # a class's keys are its memories and its text prototype; an empty slot is zero and contributes nothing
        weight = ops.affinity(state.features @ clean, 1.0, self.beta)  # (C, M)
        vector = torch.einsum("cm,cmd->cd", weight, state.features)
        vector = vector + ops.affinity(cosine, 1.0, self.beta)[:, None] * task.text
        memory_logits = task.scale * (ops.unit(vector) @ clean)
        return (task.scale * cosine).softmax(0), memory_logits.softmax(0)

    def learned(self, before: State, after: State) -> Tensor:
        """Whether the memory accepted the image."""
        return differ(before.entropy, after.entropy)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Weighted sums of probabilities, normalised."""
        return logits / logits.sum(-1, keepdim=True)
