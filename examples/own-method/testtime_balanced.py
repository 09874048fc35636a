"""Balanced: answers that were given often so far weigh less, as if every class came equally often.

An example of a method outside testtime, to be copied: one file, found by its entry point in pyproject.toml.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from testtime.methods.base import Base, require
from testtime.types import Task


class State(NamedTuple):
    answers: Tensor  # (C,) the zero-shot probabilities of all images so far, summed


@dataclass(frozen=True)
class Balanced(Base):
    """Divide each class's probability by its mean over the stream so far."""

    name: ClassVar[str] = "balanced"
    summary: ClassVar[str] = "Zero-shot, with classes that are answered too often made less probable"
    source: ClassVar[str] = "An example; not published"
    adapts: ClassVar[str] = "text"
    remembers: ClassVar[bool] = True
    assumes: ClassVar[tuple[str, ...]] = ("class balance",)

    strength: float = 0.5  # 0 is zero-shot, 1 the whole correction; half, since no stream is quite balanced
    prior: float = 1.0  # images of each class that count as seen before the first

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.strength <= 1, "strength", self.strength, "must lie in [0, 1]")
        require(self.prior > 0, "prior", self.prior, "must be above 0")

    def init(self, task: Task) -> State:
        return State(torch.full_like(task.text[:, 0], self.prior))

    def step(self, task: Task, state: State, views: Tensor) -> tuple[Tensor, State]:
        logits = task.zero_shot(views[0])
        answers = state.answers + logits.softmax(-1)
        return logits - self.strength * (answers / answers.mean()).log(), State(answers)
