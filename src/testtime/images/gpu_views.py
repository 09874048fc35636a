"""Views on a GPU: the crops of an image as matrix products, and AugMix over all views at once.

Random parameters come from `testtime.images.draw`, so views equal Pillow's up to rounding. Resizing is separable and
linear: each view has a matrix that resamples rows and one that resamples columns, with Pillow's weights, and the crops
of an image are two products. Five of AugMix's nine operations are affine maps and four are lookup tables, so a step of
all chains is one of each. On a GPU with Triton, `testtime.images.gpu_pixels` does the same in a few kernels for all
images together.

Pixels here are grey levels from 0 to 255, integers except after AugMix. The reference implementation is
`testtime.images.views.views`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from testtime.images import views as plain
from testtime.images.draw import CHAINS, NAMES, NOTHING, STEPS, Drawn, Mixes
from testtime.images.reading import MAX_PIXELS, checked_rgb
from testtime.machine.capture import reason, warn_once
from testtime.types import InputError, Preprocess

LONGEST = 8192  # pixels a side; beyond it, the matrices cost more than they save
ALIGNED = 8  # sides are padded to a multiple of it, for fast half-precision products

# kinds of operations: affine (those not in KINDS), a table by the image's own levels (two), a fixed table (two)
AFFINE, AUTOCONTRAST, EQUALIZE, POSTERIZE, SOLARIZE = range(1, 6)
KINDS = {"autocontrast": AUTOCONTRAST, "equalize": EQUALIZE, "posterize": POSTERIZE, "solarize": SOLARIZE}
# Pillow truncates levels; this keeps those that rounding left just below an integer
EPSILON = 0.01

_broken = False  # whether Triton has failed in this process


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


def grey_views(
    images: Sequence[Tensor],
    sampled: Sequence[Drawn],
    preprocess: Preprocess,
    *,
    precision: torch.dtype | None = None,
    kernels: bool | None = None,
) -> Tensor:
    """Views of several images (H, W, 3), on their device: (n, V, 3, size, size), grey levels in `precision`.

    `sampled` holds V - 1 rows per image. Half precision, the default on a GPU, is exact for integer levels.
    `kernels` selects Triton; the default is to use it where it is available.
    """
    global _broken
    device, size = images[0].device, preprocess.size
    precision = precision or (torch.float16 if device.type == "cuda" else torch.float32)
    result = torch.empty(len(images), len(sampled[0]) + 1, 3, size, size, dtype=precision, device=device)
    short = [row for row, image in enumerate(images) if max(image.shape) <= LONGEST]
    for row in set(range(len(images))) - set(short):
        result[row] = _long_strip(images[row], sampled[row], preprocess).to(result)
    axes = [_axes(images[row].shape, sampled[row], preprocess) for row in short]
    mixes = [drawn.mixes for drawn in sampled if drawn.mixes is not None and len(drawn)]

    def fill(crop: Callable[..., None], mix: Callable[..., None]) -> Tensor:
        if short:
            crop([images[row] for row in short], np.stack(axes), result, short)
        if mixes:
            mix(result, mixes)
        return result

    if kernels is None:
        kernels = device.type == "cuda" and find_spec("triton") is not None
    if kernels and not _broken:
        try:
            from testtime.images import gpu_pixels

            return fill(gpu_pixels.crop, gpu_pixels.mix)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler's errors have no common base class
            _broken = True
            warn_once(f"Triton cannot make the views; using a slower implementation ({reason(error)}).")
    return fill(crop, mix)


def normalise(grey: Tensor, preprocess: Preprocess, dtype: torch.dtype) -> Tensor:
    """Grey levels (..., 3, H, W) normalised by the model's mean and standard deviation."""
    mean, std = (grey.new_tensor(x, dtype=torch.float32)[:, None, None] for x in (preprocess.mean, preprocess.std))
    return torch.addcmul(-mean / std, grey.float(), 1 / (255 * std)).to(dtype)


# Crops


class Axis(NamedTuple):
    """How one side of a view is resampled from the same side of the image."""

    start: float  # of the box, in pixels of the image
    length: float  # of the box
    ratio: float  # pixels of the image per pixel of the resized box
    first: float  # pixel of the resized box where the view starts
    total: float  # pixels of the resized box
    support: float  # half-width of the filter at ratio 1: 1 is bilinear, 2 bicubic
    mirrored: float


def _axes(shape: Sequence[int], sampled: Drawn, preprocess: Preprocess) -> np.ndarray:
    """The axes of each view, horizontal and vertical: (V, 2, 7)."""
    height, width, size, resize = *shape[:2], preprocess.size, preprocess.resize
    support = 2.0 if preprocess.interpolation == "bicubic" else 1.0
    short = min(width, height)
    sides = (
        [resize, resize] if preprocess.mode == "squash" else [int(resize * side / short) for side in (width, height)]
    )
    axes = np.zeros((len(sampled) + 1, 2, len(Axis._fields)))
    axes[0] = [
        Axis(0, length, length / total, plain._margin(total, size), total, support, False)
        for length, total in zip((width, height), sides, strict=True)
    ]
    top, left, tall, wide, flip = sampled.crops.T
    for axis, (start, length, mirrored) in enumerate(((left, wide, flip), (top, tall, 0))):
        rows = axes[1:, axis].T
        rows[0], rows[1], rows[2], rows[4], rows[5], rows[6] = start, length, length / size, size, 1, mirrored
    return axes


def filter_widths(axes: np.ndarray) -> np.ndarray:
    """The width of each axis' filter in pixels of the image: (..., 7) -> (...)."""
    return 2 * np.ceil(axes[..., 5] * axes[..., 2].clip(1)) + 1


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """An array copied to the device, without waiting for the copy."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def crop(images: Sequence[Tensor], axes: np.ndarray, out: Tensor, rows: Sequence[int]) -> None:
    """Fill `rows` of `out` (n, V, 3, size, size) with the views of images (H, W, 3), by their axes (n, V, 2, 7)."""
    weights, columns = _taps(upload(axes, out.device), out.shape[-1], int(filter_widths(axes).max()))
    for number, row in enumerate(rows):
        _resample(images[number], weights[number], columns[number], out[row])


def _taps(axes: Tensor, size: int, max_taps: int) -> tuple[Tensor, Tensor]:
    """Filter weights and the pixels of the image they apply to, for each view: two (n, V, 2, size, max_taps)."""
    start, length, ratio, first, total, support, mirrored = (part[..., None] for part in axes.unbind(-1))
    position = torch.arange(size, dtype=axes.dtype, device=axes.device)
    position = torch.where(mirrored > 0, size - 1 - position, position) + first  # (n, V, 2, size)
    stretch = ratio.clamp_min(1)
    centre, reach = (position + 0.5) * ratio, support * stretch
    low = (centre - reach + 0.5).floor().clamp_min(0)
    high = torch.minimum((centre + reach + 0.5).floor(), length)
    pixel = low[..., None] + torch.arange(max_taps, dtype=axes.dtype, device=axes.device)
    weight = _filter((pixel + 0.5 - centre[..., None]) / stretch[..., None], support[..., None] > 1)
    inside = (pixel < high[..., None]) & (position >= 0)[..., None] & (position < total)[..., None]
    weight = weight * inside
    weight = weight / torch.where(inside.any(-1), weight.sum(-1), 1)[..., None]
    return weight, (start[..., None] + torch.minimum(pixel, length[..., None] - 1)).long()


def _filter(x: Tensor, cubic: Tensor) -> Tensor:
    """Pillow's filters: the triangle, or with `cubic`, the cubic convolution with a = -0.5."""
    x = x.abs()
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    smooth = torch.where(x < 1, near, torch.where(x < 2, far, 0))
    return torch.where(cubic, smooth, (1 - x).clamp_min(0))


def _resample(image: Tensor, weights: Tensor, columns: Tensor, out: Tensor) -> None:
    """Fill `out` (V, 3, size, size) with the views of one image (H, W, 3)."""
    count, _, size, _ = out.shape
    height, width = (-(-side // ALIGNED) * ALIGNED for side in image.shape[:2])
    pixels = out.new_zeros(3, height, width)
    pixels[:, : image.shape[0], : image.shape[1]] = image.permute(2, 0, 1)
    across, down = (
        out.new_zeros(count, size, side).scatter_add_(2, columns[:, axis], weights[:, axis].to(out.dtype))
        for axis, side in ((0, width), (1, height))
    )
    # One product for all rows of all channels and all columns of all views. Pillow rounds after each of its two
    # passes; the bias of one half turns truncation into rounding.
    half = out.new_full((count * size,), 0.5)
    rows = torch.addmm(half, pixels.flatten(0, 1), across.flatten(0, 1).T).floor_().clamp_(0, 255)
    rows = rows.view(3, height, count, size)
    for colour in range(3):
        out[:, colour] = torch.bmm(down, rows[colour].transpose(0, 1))
    out.add_(0.5).floor_().clamp_(0, 255)


def _long_strip(image: Tensor, sampled: Drawn, preprocess: Preprocess) -> Tensor:
    """Views (V, 3, size, size) in grey levels, by Pillow, of an image too long for matrices; without AugMix."""
    pillow, size = Image.fromarray(image.cpu().numpy()), preprocess.size
    made = [plain._centre(pillow, preprocess), *(plain._crop(pillow, box, size) for box in sampled.crops.tolist())]
    return torch.from_numpy(np.stack([np.array(view) for view in made])).permute(0, 3, 1, 2)


# AugMix


def plan_steps(mixes: Sequence[Mixes], size: int) -> tuple[np.ndarray, np.ndarray]:
    """The operations of each step on each chain (steps, n * V * CHAINS, 8), and shares (n * V, 1 + CHAINS).

    Columns of an operation: its kind, its source coordinates (x' = a x + b y + c, y' = d x + e y + f), its amount.
    """
    codes = np.concatenate([part.operations for part in mixes]).reshape(-1, STEPS).T  # (STEPS, images)
    codes = codes[: int((codes != NOTHING).any(1).sum())]
    amounts = np.concatenate([part.amounts for part in mixes]).reshape(-1, STEPS).T[: len(codes)]
    kinds = np.array([KINDS.get(name, AFFINE) for name in NAMES] + [0])  # NOTHING indexes the last
    plan = np.zeros((*codes.shape, 8), dtype=np.float32)
    plan[..., 0] = kinds[codes]
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


def mix(grey: Tensor, mixes: Sequence[Mixes]) -> None:
    """Mix all views but the first of each image (n, V, 3, size, size) in position."""
    views = grey[:, 1:]
    steps, shares = plan_steps(mixes, grey.shape[-1])
    base = views.flatten(0, 1).to(torch.uint8)
    changed = base.repeat_interleave(CHAINS, 0)  # (n * V * CHAINS, 3, size, size)
    for step in steps:
        operate(changed, step)
    parts = changed.unflatten(0, (-1, CHAINS))
    weights = upload(shares, grey.device)[..., None, None, None]
    mixed = base * weights[:, 0]
    for number in range(CHAINS):
        mixed.addcmul_(parts[:, number], weights[:, 1 + number])
    views.copy_(mixed.view(views.shape))


def operate(images: Tensor, operations: np.ndarray) -> None:
    """Apply an operation to each of `images` (n, 3, size, size) uint8, in position: a step (n, 8) of a plan."""
    device, kinds = images.device, operations[:, 0]
    if len(moved := np.flatnonzero(kinds == AFFINE)):
        rows, matrices = upload(moved, device), upload(operations[moved, 1:7], device)
        images.index_copy_(0, rows, _warp(images[rows], matrices))
    if len(toned := np.flatnonzero(kinds > AFFINE)):
        rows, chosen = upload(toned, device), upload(operations[toned], device)
        levels = images[rows].flatten(2).long()  # (n, 3, pixels)
        tables = _tables(levels, chosen[:, 0, None, None], chosen[:, 7, None, None].long())
        images.index_copy_(0, rows, tables.gather(2, levels).view(-1, *images.shape[1:]))


def _warp(images: Tensor, matrices: Tensor) -> Tensor:
    """Pictures (n, 3, size, size) uint8 through affine maps (n, 6), bilinear, black outside."""
    size = images.shape[-1]
    middle = torch.arange(size, dtype=torch.float32, device=images.device) + 0.5
    a, b, c, d, e, f = (part[:, None, None] for part in matrices.unbind(1))
    x = a * middle + b * middle[:, None] + c  # (n, size, size)
    y = d * middle + e * middle[:, None] + f
    inside = (x >= 0) & (x < size) & (y >= 0) & (y < size)
    grid = torch.stack([x, y], -1) * (2 / size) - 1
    # border pixels are extended to the edge of the image, as in Pillow
    moved = F.grid_sample(images.float(), grid, "bilinear", "border", align_corners=False)
    return moved.add_(EPSILON).mul_(inside[:, None]).to(torch.uint8)


def _tables(levels: Tensor, kind: Tensor, amount: Tensor) -> Tensor:
    """Lookup tables (n, 3, 256) uint8 of operations of a kind and amount (n, 1, 1) on images (n, 3, pixels).

    In integers and float64, as in Pillow: both truncate.
    """
    count = levels.new_zeros(*levels.shape[:2], 256).scatter_add_(2, levels, torch.ones_like(levels))
    level = torch.arange(256, device=levels.device)
    present = count > 0
    low = torch.where(present, level, 256).amin(2, keepdim=True)
    high = torch.where(present, level, -1).amax(2, keepdim=True)
    # equalize: the same number of pixels for each new level, not counting those of the highest one
    step = (count.sum(2, keepdim=True) - count.gather(2, high)) // 255
    even = torch.where(step > 0, (step // 2 + count.cumsum(2) - count) // step.clamp_min(1), level)
    # autocontrast: the darkest level becomes 0 and the lightest 255
    gain = 255 / (high - low).clamp_min(1).double()
    stretched = (level * gain + -low * gain).long()
    table = torch.where(high > low, torch.where(kind == EQUALIZE, even, stretched), level)
    table = torch.where(kind == POSTERIZE, level & amount, table)
    table = torch.where(kind == SOLARIZE, torch.where(level < amount, level, 255 - level), table)
    return table.clamp_(0, 255).to(torch.uint8)
