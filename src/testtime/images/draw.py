"""The random parameters of an image's views, drawn for all views at once as plain data.

Crops are those of torchvision's RandomResizedCrop and RandomHorizontalFlip. AugMix (Hendrycks et al., ICLR 2020) is as
TPT and its descendants use it: severity 1. Each view has its own random numbers; more are drawn than it may need.
Exponentials and logarithms are those of `math`: numpy's may differ in the last bit between machines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from testtime.types import InputError

SCALE = (0.08, 1.0)  # a random crop's share of the image
RATIO = (3 / 4, 4 / 3)  # width over height of a random crop
TRIES = 10  # attempts at a crop before falling back to the centre
CHAINS = 3  # mixed by AugMix
STEPS = 3  # most operations in a chain
NAMES = (
    "autocontrast", "equalize", "posterize", "rotate", "solarize", "shear_x", "shear_y", "translate_x", "translate_y",
)  # fmt: skip
NOTHING = -1  # after the end of a chain
BLOCK = 4  # numbers per counter value of the generator
CROP_NUMBERS = 24  # numbers that a crop may need, a multiple of BLOCK
AUGMIX_NUMBERS = 60  # numbers that a crop and its AugMix may need

Array = np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Mixes:
    """AugMix of n views: each becomes `keep * view + (1 - keep) * sum(weight * chain(view))`."""

    operations: Array  # (n, CHAINS, STEPS) indices into `NAMES`, or NOTHING
    amounts: Array  # (n, CHAINS, STEPS) bits, degrees, a threshold, a slope or pixels, by name; maybe signed
    weights: Array  # (n, CHAINS), summing to 1
    keep: Array  # (n,)


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """All random parameters of n views, as arrays."""

    crops: Array  # (n, 5) integers: top, left, height and width in pixels, and whether it is mirrored
    mixes: Mixes | None

    def __len__(self) -> int:
        return len(self.crops)


NONE = Drawn(np.empty((0, 5), dtype=np.int64), None)


def draw(extent: tuple[int, int], count: int, size: int, *, seed: int, index: int, augmix: bool = False) -> Drawn:
    """The parameters of `views` for an image of `extent` (width, height): count - 1 rows, from view 1 on."""
    if count < 1:
        raise InputError(f"The number of views must be 1 or more; got {count}.")
    for name, value in (("seed", seed), ("index", index)):
        if not 0 <= value < 2**64:
            raise InputError(f"The {name} of the views must be from 0 to 2**64 - 1; got {value}.")
    if count == 1:  # the image alone: nothing is drawn, and one view a time should cost no more than it must
        return NONE
    numbers = _random_numbers(count - 1, AUGMIX_NUMBERS if augmix else CROP_NUMBERS, seed, index)
    crops, used = _crops(extent, numbers)
    return Drawn(crops, _mixes(size, numbers, used) if augmix else None)


def _random_numbers(views: int, count: int, seed: int, index: int) -> Array:
    """The first `count` random numbers of each view: (views, count), from 0 to below 1."""
    key = np.array([seed, index], dtype=np.uint64)
    philox = np.random.Philox(key=key, counter=np.array([0, 0, 0, 1], dtype=np.uint64))
    random = np.random.Generator(philox).random
    numbers = np.empty((views, count))
    for row in numbers:
        random(out=row)  # unlike `dirichlet` or `integers`, its stream has never changed in numpy
        philox.advance(2**192 - count // BLOCK)  # to the start of the next view's numbers
    return numbers


def _crops(extent: tuple[int, int], numbers: Array) -> tuple[Array, Array]:
    """Boxes (n, 5) by RandomResizedCrop's rule, and how many random numbers each used (n,)."""
    width, height = extent
    low, high = math.log(RATIO[0]), math.log(RATIO[1])
    # fallback: the largest centred box whose ratio is allowed
    w, h = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
    crops = np.tile(np.array([(height - h) // 2, (width - w) // 2, h, w, 0]), (len(numbers), 1))
    used = np.full(len(numbers), 2 * TRIES)
    open_rows = np.arange(len(numbers))
    for trial in range(TRIES):
        tried = numbers[open_rows, 2 * trial : 2 * trial + 2]
        area = width * height * (SCALE[0] + (SCALE[1] - SCALE[0]) * tried[:, 0])
        ratio = np.array([math.exp(x) for x in (low + (high - low) * tried[:, 1]).tolist()])
        wide, tall = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
        fits = (0 < wide) & (wide <= width) & (0 < tall) & (tall <= height)
        rows, wide, tall = open_rows[fits], wide[fits], tall[fits]
        crops[rows, 0] = numbers[rows, 2 * trial + 2] * (height - tall + 1)
        crops[rows, 1] = numbers[rows, 2 * trial + 3] * (width - wide + 1)
        crops[rows, 2], crops[rows, 3] = tall, wide
        used[rows] = 2 * trial + 4
        open_rows = open_rows[~fits]
        if not len(open_rows):
            break
    crops[:, 4] = numbers[np.arange(len(numbers)), used] < 0.5
    return crops, used + 1


def _mixes(size: int, numbers: Array, used: Array) -> Mixes:
    """AugMix for views of side `size`; each row of `numbers` is read from its offset in `used`."""
    row = np.arange(len(numbers))[:, None]
    weights = np.empty((len(numbers), CHAINS))
    for view, drawn in enumerate(numbers[row, used[:, None] + np.arange(CHAINS)].tolist()):
        spacings = [-math.log1p(-number) for number in drawn]
        total = math.fsum(spacings)
        weights[view] = [spacing / total if total else 1 / CHAINS for spacing in spacings]
    keep = numbers[row[:, 0], used + CHAINS]
    start = used + CHAINS + 1
    step = np.arange(STEPS)
    operations = np.empty((len(numbers), CHAINS, STEPS), dtype=np.int64)
    amounts = np.empty((len(numbers), CHAINS, STEPS))
    last = numbers.shape[1] - 1  # missing steps of a chain may point beyond it; what they read is not used
    for chain in range(CHAINS):
        length = 1 + (numbers[row[:, 0], start] * 3).astype(np.int64)
        picked = numbers[row, np.minimum(start[:, None] + 1 + step, last)]
        operations[:, chain] = np.where(step < length[:, None], (picked * len(NAMES)).astype(np.int64), NOTHING)
        position = (start + 1 + length)[:, None] + 2 * step
        level = (0.1 + 0.9 * numbers[row, np.minimum(position, last)]) / 10
        sign = np.where(numbers[row, np.minimum(position + 1, last)] < 0.5, -1, 1)
        amounts[:, chain] = _amounts(operations[:, chain], level, sign, size)
        start = start + 1 + 3 * length
    return Mixes(operations, amounts, weights, keep)


def _amounts(operations: Array, level: Array, sign: Array, size: int) -> Array:
    """The amount of each operation, by the rules of `testtime.images.views`."""
    trunc = np.trunc
    slope, pixels = sign * 0.3 * level, sign * trunc(size / 3 * level)
    rules = {
        "posterize": 4 - trunc(4 * level),
        "rotate": sign * trunc(30 * level),
        "solarize": 256 - trunc(256 * level),
        "shear_x": slope,
        "shear_y": slope,
        "translate_x": pixels,
        "translate_y": pixels,
    }
    nothing = np.zeros_like(level)
    table = np.stack([rules.get(name, nothing) for name in NAMES] + [nothing])  # NOTHING indexes the last
    return np.take_along_axis(table, operations[None] % len(table), axis=0)[0]
