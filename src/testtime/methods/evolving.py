"""Shared by DPE and the methods that build on it: text and visual prototypes that evolve, and residuals on both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from testtime import bank as banks
from testtime import ops
from testtime.methods.base import Base, at_least, check_adamw, require
from testtime.types import Task


@dataclass(frozen=True)
class Evolving(Base):
    """The settings of both kinds of prototypes; the defaults are those of DPE's released code for ImageNet."""

    alpha: float = 6.0  # weight of the visual prototypes in the logits
    beta: float = 5.0  # how sharply that weight falls with distance
    queue: int = 3  # M, features kept per class
    align_weight: float = 0.5  # lambda, weight of the alignment loss
    align_temperature: float = 0.01
    entropy_weight: float = 1.0  # weight of the entropy loss
    lr_text: float = 6e-4  # about the size of one coordinate's change: AdamW's first step is nearly a sign
    steps: int = 1  # residual updates per image
    entropy_threshold: float = 0.1  # tau, below which an image teaches the text prototypes
    selection: float = 0.1  # fraction of the views that count as confident
    multi_view_prediction: bool = False  # predict from reselected views (released: ImageNet-A only)
    text_update: Literal["none", "full", "exponential", "cumulative"] = "cumulative"
    text_decay: float = 0.99  # of the exponential average
    prompt_count: int = 1  # samples that the prompt's own prototype counts for in the cumulative average
    adamw_eps: float = 1e-3
    adamw_betas: tuple[float, float] = (0.9, 0.999)
    adamw_weight_decay: float = 0.1
    adam_state: Literal["exact", "fp16"] = "exact"  # fp16: as shipped, its second moment underflows

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, self, "alpha", "beta", "queue", "align_weight", "entropy_weight", "lr_text", "entropy_threshold")
        at_least(0, self, "prompt_count")
        check_adamw(self)
        require(self.align_temperature > 0, "align_temperature", self.align_temperature, "must be above 0")
        require(0 < self.selection <= 1, "selection", self.selection, "must lie in (0, 1]")
        require(0 <= self.text_decay <= 1, "text_decay", self.text_decay, "must lie in [0, 1]")

    def _start(self, task: Task) -> tuple[Tensor, Tensor, banks.Bank, Tensor]:
        """Before the first image: text prototypes, the count of their updates, empty queues, no visual prototypes."""
        updates = torch.zeros((), dtype=torch.int64, device=task.text.device)
        return task.text.clone(), updates, banks.empty(task.text, self.queue), torch.zeros_like(task.text)

    def _objective(self, scale: float | Tensor, alpha: float, align_both: bool = False) -> ops.Objective:
        """What the residuals minimise."""
        aligns = self.align_weight if self.queue else 0.0  # without queues there is nothing to align with
        return ops.Objective(scale, alpha, self.beta, self.entropy_weight, aligns, self.align_temperature, align_both)

    def _adam(self, lr: float) -> ops.AdamW:
        """The optimiser of residuals."""
        return ops.AdamW(lr, self.adamw_eps, self.adamw_betas, self.adamw_weight_decay, self.adam_state)

    def _average(self, text: Tensor, updates: Tensor, adapted: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
        """The text prototypes (C, D) and the count of updates, moved to the adapted where `accepted` () says so."""
        if self.text_update == "none" or (accepted.is_cpu and not accepted):
            return text, updates
        if self.text_update == "full":
            share = torch.ones_like(text[0, 0])
        elif self.text_update == "exponential":
            share = torch.full_like(text[0, 0], 1 - self.text_decay)
        else:
            share = 1 / (updates + self.prompt_count + 1).to(adapted.dtype)
        return torch.lerp(text, adapted, share * accepted), updates + accepted


def over_bits(entropy: Tensor, classes: int) -> Tensor:
    """An entropy in nats divided by the largest in bits, as released code has it: it runs to ln 2 and not to 1."""
    return entropy / math.log2(classes)
