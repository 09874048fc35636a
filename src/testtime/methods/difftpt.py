"""DiffTPT: test-time prompt tuning on diffusion views.

Feng, Yu, Liu, Khan and Zuo, "Diverse Data Augmentation with Diffusions for Effective Test-time Prompt Tuning",
ICCV 2023.

TPT whose views are not only crops of the image but also variations of it drawn by a diffusion model. Variations may
show something else, so views are first filtered by the similarity of their logits to the image's own; the confident
ones of the rest tune the prompt, in four steps. `testtime.images.diffusion` makes the views: the clean one,
crops, then variations.

Departures: those of TPT.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from testtime import ops
from testtime.methods.base import require
from testtime.methods.tpt import TPT


@dataclass(frozen=True)
class DiffTPT(TPT):
    """Test-time prompt tuning on diffusion views; the defaults are the released settings.

    >>> method = DiffTPT()
    >>> logits = torch.randn(127, 10, generator=torch.Generator().manual_seed(0))
    >>> len(method.alike(logits)), len(method.select(logits))
    (101, 30)
    """

    name: ClassVar[str] = "difftpt"
    summary: ClassVar[str] = "TPT on diffusion views: filtered by likeness to the image, then by confidence; four steps"
    source: ClassVar[str] = (
        "Feng, Yu, Liu, Khan and Zuo, Diverse Data Augmentation with Diffusions for Effective Test-time Prompt "
        "Tuning, ICCV 2023"
    )

    steps: int = 4
    selection: float = 0.3  # fraction of the similar views that count as confident
    likeness: float = 0.8  # fraction of the other views that count as similar to the image

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.likeness <= 1, "likeness", self.likeness, "must lie in (0, 1]")

    def select(self, logits: Tensor) -> Tensor:
        alike = self.alike(logits)
        return alike[ops.confident(logits[alike], self.selection)]

    def alike(self, logits: Tensor) -> Tensor:
        """Indices of the image and the views with the most similar logits, most similar first: (V, C) -> (kept,)."""
        image = torch.zeros(1, dtype=torch.int64, device=logits.device)
        if len(logits) == 1:
            return image
        cosine = ops.unit(logits[1:]) @ ops.unit(logits[0])
        order = cosine.argsort(descending=True, stable=True)
        return torch.cat([image, 1 + order[: ops.kept(len(order), self.likeness)]])
