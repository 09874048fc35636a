"""Views drawn all at once equal those drawn one by one, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from sampled import AugMixParameters, CropParameters, Operation, ViewParameters, entries

from testtime.images.draw import CHAINS, NAMES, RATIO, TRIES, draw
from testtime.types import InputError

# The reference


def sample_views(
    extent: tuple[int, int],
    count: int,
    size: int,
    *,
    seed: int,
    index: int,
    augmix: bool = False,
    scale: tuple[float, float] = (0.08, 1.0),
) -> list[ViewParameters]:
    """Random parameters of each view, drawn one by one in the order in which they are needed."""
    sampled = []
    for row in range(1, count):
        key = np.array([seed, index], dtype=np.uint64)
        counter = np.array([0, 0, 0, row], dtype=np.uint64)
        random = np.random.Generator(np.random.Philox(key=key, counter=counter)).random
        crop = sample_crop(extent, random, scale)
        sampled.append(ViewParameters(crop, sample_augmix(size, random) if augmix else None))
    return sampled


def sample_crop(extent: tuple[int, int], random: Callable[[], float], scale: tuple[float, float]) -> CropParameters:
    """A box in an image of `extent` (width, height), by RandomResizedCrop's rule; `random` gives [0, 1)."""
    width, height = extent
    low, high = math.log(RATIO[0]), math.log(RATIO[1])
    for _ in range(TRIES):
        area = width * height * (scale[0] + (scale[1] - scale[0]) * random())
        ratio = math.exp(low + (high - low) * random())
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = int(random() * (height - h + 1)), int(random() * (width - w + 1))
            return CropParameters(top, left, h, w, random() < 0.5)
    # nothing fitted, the image being long or tiny: the largest box at its centre whose ratio is allowed
    w = min(width, round(height * RATIO[1]))
    h = min(height, round(width / RATIO[0]))
    return CropParameters((height - h) // 2, (width - w) // 2, h, w, random() < 0.5)


def sample_augmix(size: int, random: Callable[[], float]) -> AugMixParameters:
    """Chains, weights ~ Dirichlet(1, 1, 1) and a share kept ~ Beta(1, 1) for a view of side `size`."""
    spacings = [-math.log1p(-random()) for _ in range(CHAINS)]  # exponentials; their shares are Dirichlet
    total = math.fsum(spacings)
    weights = tuple(s / total if total else 1 / CHAINS for s in spacings)
    keep = random()
    chains = []
    for _ in range(CHAINS):
        length = 1 + int(random() * 3)
        picks = [NAMES[int(random() * len(NAMES))] for _ in range(length)]
        chains.append(tuple(Operation(name, _amount(name, size, random)) for name in picks))
    return AugMixParameters(tuple(chains), weights, keep)


def _amount(name: str, size: int, random: Callable[[], float]) -> float:
    """How much of an operation at severity 1: a tenth of its most, times a number from 0.1 to 1."""
    level = (0.1 + 0.9 * random()) / 10
    sign = -1 if random() < 0.5 else 1
    match name:
        case "posterize":
            return 4 - int(4 * level)  # always 4 bits at severity 1, as in the released code
        case "rotate":
            return sign * int(30 * level)
        case "solarize":
            return 256 - int(256 * level)
        case "shear_x" | "shear_y":
            return sign * 0.3 * level
        case "translate_x" | "translate_y":
            return sign * int(size / 3 * level)
    return 0.0


# What is drawn


@pytest.mark.parametrize("augmix", [False, True])
@pytest.mark.parametrize("extent", [(500, 375), (375, 500), (1, 1), (7, 300), (33, 2), (224, 224), (4000, 3000)])
def test_draw_is_that_of_sample_views(extent: tuple[int, int], augmix: bool) -> None:
    for seed, index in ((0, 0), (1, 4711), (2**64 - 1, 2**64 - 1)):
        options = dict(seed=seed, index=index, augmix=augmix)
        expected = sample_views(extent, 64, 224, **options)
        assert entries(draw(extent, 64, 224, **options)) == expected


@pytest.mark.parametrize("scale", [(0.9, 1.0), (0.5, 0.5), (0.01, 0.02)])
@pytest.mark.parametrize("size", [32, 336])
def test_draw_is_that_of_sample_views_at_other_scales_and_sizes(
    scale: tuple[float, float], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("testtime.images.draw.SCALE", scale)
    options = dict(seed=5, index=6, augmix=True)
    expected = sample_views((300, 200), 200, size, **options, scale=scale)
    assert entries(draw((300, 200), 200, size, **options)) == expected


def test_image_without_random_views_has_nothing_drawn() -> None:
    drawn = draw((30, 20), 1, 32, seed=0, index=0, augmix=True)
    assert len(drawn) == 0 and entries(drawn) == []


@pytest.mark.parametrize("wrong", [{"count": 0}, {"seed": -1}, {"index": 2**64}])
def test_what_no_views_can_be_drawn_with_is_refused(wrong: dict) -> None:
    options: dict = dict(count=4, seed=0, index=0) | wrong
    with pytest.raises(InputError, match="must be"):
        draw((30, 20), options.pop("count"), 32, **options)
