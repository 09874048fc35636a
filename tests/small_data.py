"""A small folder of labelled images that the tiny encoder tells apart no better than chance."""

from __future__ import annotations

import json
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


def make_textures(root: Path) -> Path:
    """`root` with DTD in it as CoOp lays it out: all 47 classes, one picture each."""
    names = [f"texture {number}" for number in range(47)]
    make_folders(root / "dtd" / "images", names, images=1)
    rows = [[f"{name}/0.png", label, name] for label, name in enumerate(names)]
    (root / "dtd" / "split_zhou_DescribableTextures.json").write_text(json.dumps({"test": rows}))
    return root
