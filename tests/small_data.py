"""A small folder of labelled images that the tiny encoder tells apart no better than chance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image


def make_folders(root: Path, names: Sequence[str] = ("cat", "dog", "fox"), images: int = 4) -> Path:
    """`root` with a folder of `images` noisy pictures for each name."""
    noise = np.random.default_rng(0)
    for number, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for image in range(images):
            pixels = noise.integers(0, 255, (36, 40, 3), dtype=np.uint8)
            pixels[: 12 * (number + 1), :, number % 3] = 255
            Image.fromarray(pixels).save(root / name / f"{image}.png")
    return root
