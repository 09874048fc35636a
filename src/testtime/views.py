"""Views of an image: the image itself, and random crops of it, seeded by (seed, index)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Preprocess:
    """How a model wants its images; the clean view is made by exactly this."""

    size: int = 224  # side of the square that the model sees
    resize: int = 224  # what the image is scaled to before the centre crop
    mode: Literal["shortest", "squash"] = "shortest"  # the shortest side becomes `resize`, or both do
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
