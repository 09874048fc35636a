"""The residual step of MCP++, in closed form: entropy, alignment of coordinates, and distance from the negative cache.

    L = H(softmax s) + align_weight InfoNCE(v, t) + contrast_weight mean_c -log(1 - cos(v_c, g_c) + 1e-7)

with t and v the unit prototypes of text and image, s their logits, and g_c the mean of the negative cache of a class.
As in the released code, the alignment compares coordinates and not classes, s holds the visual term and what the
negative cache takes away once per step and once more after the last, and the adapted text acts only in the views' vote.
With more than one step only the latest visual term has a gradient: how the released code would do it is not known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from testtime import bank, ops
from testtime.bank import Bank
from testtime.methods.base import Base, at_least, check_adamw, require
from testtime.types import Task

ROWS = 256  # of a block
OFFSET = 1e-7  # inside the logarithm of the contrast, as released


@dataclass(frozen=True)
class Residuals(Base):
    """The settings of the visual prototypes and of MCP++; the defaults are released ones, for ImageNet."""

    alpha: float = 5.5  # weight of the visual prototypes in the logits
    beta: float = 8.0  # how sharply that weight falls with distance
    residual: bool = False  # MCP++; the settings from here to AdamW's are its
    align_weight: float = 0.5  # of the alignment of text and visual prototypes
    align_temperature: float = 0.01
    contrast_weight: float = 0.2  # of the distance from the negative cache
    lr_text: float = 6e-5
    lr_image: float = 6e-5
    steps: int = 1  # residual updates per image
    adamw_eps: float = 1e-3
    adamw_betas: tuple[float, float] = (0.9, 0.999)
    adamw_weight_decay: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, self, "alpha", "beta", "align_weight", "contrast_weight", "lr_text", "lr_image")
        check_adamw(self)
        require(self.align_temperature > 0, "align_temperature", self.align_temperature, "must be above 0")

    def learn(
        self,
        task: Task,
        feature: Tensor,
        frozen: Tensor,
        visual: Tensor,
        seen: Tensor,
        lowered: Tensor,
        negative: Bank,
    ) -> tuple[Tensor, Tensor]:
        """Unit text prototypes (C, D) after the steps, and the logits (C,) of a feature (D,) by visual ones (C, D).

        `frozen` (C,) are the text's logits and `lowered` (C,) what the negative cache takes away; `seen` (C,) is 1 for
        classes with a visual prototype; the rows of the `negative` cache begin with a feature.
        """
        for_text, for_visual = (
            ops.AdamW(lr, self.adamw_eps, self.adamw_betas, self.adamw_weight_decay)
            for lr in (self.lr_text, self.lr_image)
        )
        start = at_text = ops.prototypes(task.text)
        at_visual, row, one = ops.prototypes(visual), feature[None], seen.new_ones(())
        uncertain = bank.filled(negative)  # on the CPU, where reading them is free, only these classes are looked at
        some = uncertain.is_cpu and not uncertain.all()
        index: Tensor | slice = uncertain.nonzero()[:, 0] if some else slice(None)
        repelling = ops.unit(negative.keys[..., : task.dim][index].sum(1))
        d_text = d_visual = torch.zeros_like(visual) if self.steps > 1 else visual
        m_text = m_visual = None
        text, image, logits = start.direction, at_visual.direction, frozen
        for number in range(1, self.steps + 1):
            boost = seen * ops.affinity(image @ feature, self.alpha, self.beta)
            logits = logits + boost - lowered  # of all steps so far: as released, they add up
            log_p = logits.log_softmax(0)
            slope = -log_p.exp() * (log_p + ops.entropy(logits))  # of the entropy, by the logits
            by_logits, by_boost = (task.scale * slope)[:, None], (self.beta * boost * slope)[:, None]
            # both have zero rows for classes that are not seen, and so have their gradients
            aligned = text if seen.is_cpu and seen.all() else text * seen[:, None]
            by_text, by_visual = coordinate_alignment(aligned, image, self.align_temperature, self.align_weight)
            nearness = (image[index] * repelling).sum(1)
            push = seen[index] * self.contrast_weight / seen.sum().clamp_min(1) / (1 - nearness + OFFSET)
            by_visual[index] += push[:, None] * repelling
            if self.steps == 1:
                text = ops.first_step(start, ops.Slope(one, by_logits, row, by_text), for_text)
                image = ops.first_step(at_visual, ops.Slope(one, by_boost, row, by_visual), for_visual)
            else:
                # the text's logits keep the gradient of the prompts, from which they were computed
                by_text = across(by_text, at_text) + across(by_logits @ row, start)
                by_visual = across(by_visual.addmm_(by_boost, row), at_visual)
                d_text, m_text = for_text.step(d_text, by_text, m_text, number)
                d_visual, m_visual = for_visual.step(d_visual, by_visual, m_visual, number)
                at_text, at_visual = ops.prototypes(task.text + d_text), ops.prototypes(visual + d_visual)
                text, image = at_text.direction, at_visual.direction
        boost = seen * ops.affinity(image @ feature, self.alpha, self.beta)
        return text, logits + boost - lowered


def across(slope: Tensor, at: ops.Prototypes) -> Tensor:
    """The gradient by prototypes of a function with this slope (C, D) by their directions."""
    along = (slope * at.direction).sum(1, keepdim=True)
    return slope.addcmul(at.direction, along, value=-1).div_(at.length)


def coordinate_alignment(text: Tensor, visual: Tensor, temperature: float, weight: float) -> tuple[Tensor, Tensor]:
    """Gradients (C, D), times `weight`, of InfoNCE by unit text and visual prototypes (C, D).

    As released, coordinates are compared: each of the visual prototypes, normalised over the classes, is to match the
    same one of the text's. Rows of zeros in both have no gradient.
    """
    of_visual, of_text = _squares(visual), _squares(text)
    lengths = torch.outer(of_visual.sqrt(), of_text.sqrt())
    cosine = ops.product(visual.T, text).div_(lengths)  # (D, D)
    pull = (cosine / temperature).softmax(1)
    pull.diagonal().sub_(1)
    pull *= weight / (temperature * len(pull))
    along, pull = cosine.mul_(pull), pull.div_(lengths)
    by_text = ops.product(visual, pull).addcmul_(text, along.sum(0) / of_text, value=-1)
    by_visual = ops.product(text, pull.T).addcmul_(visual, along.sum(1) / of_visual, value=-1)
    return by_text, by_visual


def _squares(x: Tensor) -> Tensor:
    """Squared lengths (D,) of the columns of x (C, D), 1 for zero; in blocks that fit the cache of a CPU's core."""
    length = torch.stack([block.square().sum(0) for block in x.split(ROWS)]).sum(0)
    return length.masked_fill_(length == 0, 1)
