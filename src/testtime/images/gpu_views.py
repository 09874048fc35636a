"""Views on a GPU: what was drawn at random as rows of numbers, for the Triton kernels of `testtime.images.gpu_pixels`.

Random parameters come from `testtime.images.draw`, so views equal Pillow's (`testtime.images.views`) up to rounding.
Resizing is separable: each view has an axis that resamples columns and one that resamples rows, with Pillow's weights.
Five of AugMix's nine operations are affine maps and four are lookup tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from testtime.images.draw import NAMES, NOTHING, STEPS, Drawn, Mixes, draw
from testtime.images.reading import MAX_PIXELS, checked_rgb
from testtime.images.views import margin, resized
from testtime.machine.capture import reason, warn_once
from testtime.types import InputError, Preprocess

LONGEST = 8192  # pixels a side; beyond it, the kernels' buffers of rows and weights would fill the GPU

# kinds of operations, from 1 on: affine maps, tables by the image's own levels (two), fixed tables (two)
KINDS = ("affine", "autocontrast", "equalize", "posterize", "solarize")


def as_tensor(array: np.ndarray) -> Tensor:
    """A NumPy array as a tensor: a copy, since torch takes no array that is read-only, flipped or of foreign bytes."""
    return torch.from_numpy(np.array(array, array.dtype.newbyteorder("="), order="C"))


def as_pixels(image: Image.Image | Tensor | np.ndarray) -> Tensor:
    """Pixels (H, W, 3) uint8 of a Pillow image or a NumPy array; a tensor is checked and returned as it is."""
    if isinstance(image, np.ndarray) and image.dtype == np.uint8:
        image = as_tensor(image)
    if isinstance(image, Tensor):
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != torch.uint8 or 0 in image.shape:
            raise InputError(f"Pixels must be (H, W, 3) uint8; got {image.dtype} {tuple(image.shape)}.")
        if image.shape[0] * image.shape[1] > MAX_PIXELS:
            raise InputError(f"Pixels {tuple(image.shape)} are more than {MAX_PIXELS:,}; scale them down first.")
        return image
    if not isinstance(image, Image.Image):
        raise InputError(f"Expected a Pillow image or pixels; got {type(image).__name__}.")
    return torch.from_numpy(np.array(checked_rgb(image)))


@cache
def works(device: torch.device, preprocess: Preprocess, augmix: bool) -> bool:
    """Whether Triton makes views on this device, tried on one pixel; if not, a warning says why."""
    drawn = draw((1, 1), 2, preprocess.size, seed=0, index=0, augmix=augmix)
    try:
        grey_views([torch.zeros(1, 1, 3, dtype=torch.uint8, device=device)], [drawn], preprocess)
        return True
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler's errors have no common base class
        warn_once(f"Triton cannot make the views; Pillow makes them on the CPU, more slowly ({reason(error)}).")
        return False


def grey_views(images: Sequence[Tensor], drawn: Sequence[Drawn], preprocess: Preprocess) -> Tensor:
    """Views of several images (H, W, 3) by V - 1 rows of random parameters each: (n, V, 3, size, size).

    They are grey levels from 0 to 255 on the images' device, integers except after AugMix. Half precision, on a GPU, is
    exact for integers. No side of an image may be longer than `LONGEST`.
    """
    from testtime.images import gpu_pixels  # loads Triton

    device, size = images[0].device, preprocess.size
    precision = torch.float16 if device.type == "cuda" else torch.float32
    grey = torch.empty(len(images), len(drawn[0]) + 1, 3, size, size, dtype=precision, device=device)
    axes = [_axes(image.shape, rows, preprocess) for image, rows in zip(images, drawn, strict=True)]
    mixes = [rows.mixes for rows in drawn if rows.mixes is not None and len(rows)]
    with torch.cuda.device_of(grey):
        gpu_pixels.crop(images, np.stack(axes), grey)
        if mixes:
            gpu_pixels.mix(grey, mixes)
    return grey


class Axis(NamedTuple):
    """How one side of a view is resampled from the same side of the image."""

    start: float  # of the box, in pixels of the image
    length: float  # of the box
    ratio: float  # pixels of the image per pixel of the resized box
    first: float  # pixel of the resized box where the view starts
    total: float  # pixels of the resized box
    support: float  # half-width of the filter at ratio 1: 1 is bilinear, 2 bicubic
    mirrored: float


@lru_cache(256)
def _clean_axes(extent: tuple[int, int], preprocess: Preprocess) -> tuple[Axis, ...]:
    """Those of the first view, the image itself: of one size for the images of a camera."""
    support = 2.0 if preprocess.interpolation == "bicubic" else 1.0
    return tuple(
        Axis(0, length, length / total, margin(total, preprocess.size), total, support, False)
        for length, total in zip(extent, resized(extent, preprocess), strict=True)
    )


def _axes(shape: Sequence[int], drawn: Drawn, preprocess: Preprocess) -> np.ndarray:
    """The axes of each view, horizontal and vertical: (V, 2, 7)."""
    height, width, size = *shape[:2], preprocess.size
    axes = np.zeros((len(drawn) + 1, 2, len(Axis._fields)))
    axes[0] = _clean_axes((width, height), preprocess)
    if not len(drawn):
        return axes
    top, left, tall, wide, flip = drawn.crops.T
    for axis, (start, length, mirrored) in enumerate(((left, wide, flip), (top, tall, 0))):
        rows = axes[1:, axis].T
        rows[0], rows[1], rows[2], rows[4], rows[5], rows[6] = start, length, length / size, size, 1, mirrored
    return axes


def plan_steps(mixes: Sequence[Mixes], size: int) -> tuple[np.ndarray, np.ndarray]:
    """The operations of each step on each chain (steps, n * V * CHAINS, 8), and shares (n * V, 1 + CHAINS).

    Columns of an operation: its kind, its source coordinates (x' = a x + b y + c, y' = d x + e y + f), its amount.
    """
    codes = np.concatenate([part.operations for part in mixes]).reshape(-1, STEPS).T  # (STEPS, images)
    codes = codes[: int((codes != NOTHING).any(1).sum())]
    amounts = np.concatenate([part.amounts for part in mixes]).reshape(-1, STEPS).T[: len(codes)]
    kinds = np.array([1 + KINDS.index(name if name in KINDS else "affine") for name in NAMES] + [0])
    plan = np.zeros((*codes.shape, 8), dtype=np.float32)
    plan[..., 0] = kinds[codes]  # NOTHING indexes the last
    plan[..., 1] = plan[..., 5] = 1
    for name, column in (("shear_x", 2), ("translate_x", 3), ("shear_y", 4), ("translate_y", 6)):
        plan[..., column] = np.where(codes == NAMES.index(name), amounts, 0)
    turned = codes == NAMES.index("rotate")
    angle, middle = np.radians(amounts[turned]), size / 2
    cos, sin = np.cos(angle), np.sin(angle)
    affine = cos, -sin, middle * (1 - cos + sin), sin, cos, middle * (1 - cos - sin)
    plan[turned, 1:7] = np.stack(affine, -1)
    posterized = codes == NAMES.index("posterize")
    plan[..., 7] = np.where(posterized, -(2.0 ** (8 - amounts)), amounts)
    keep = np.concatenate([part.keep for part in mixes])[:, None]
    shares = np.concatenate([keep, (1 - keep) * np.concatenate([part.weights for part in mixes])], 1)
    return plan, shares.astype(np.float32)
