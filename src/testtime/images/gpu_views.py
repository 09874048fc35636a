"""Views on a GPU: the crops of an image as matrix products, and AugMix over all views at once.

What is random comes from `testtime.images.draw`, so a view is the one that Pillow makes, up to rounding.
Resizing is separable and linear: for each view there is a matrix that resamples rows and one that resamples
columns, with Pillow's weights, and the crops of an image are two products. Of AugMix's nine operations five move
pixels by an affine map and four change grey levels by a table, so a step of all chains is one of each.
On a GPU with Triton, `testtime.images.gpu_pixels` does the same in a few kernels for all images together.

Pixels here are grey levels from 0 to 255; whole numbers, but for what AugMix has mixed. The plain twin is
`testtime.images.views.views`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from testtime.images import views as plain
from testtime.images.draw import Drawn, draw, entries
from testtime.images.reading import MAX_PIXELS, seen
from testtime.images.views import CHAINS, Operation, ViewParameters
from testtime.machine.capture import reason, warn_once
from testtime.types import InputError, Preprocess

LONGEST = 8192  # pixels a side; beyond, the matrices would outgrow the work they save
ALIGNED = 8  # sides are padded to a multiple: half-precision products want it

MOVES = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
MEASURED = ("autocontrast", "equalize")  # their tables depend on the picture
FIXED = ("posterize", "solarize")
# Pillow cuts off what is behind the point; a level that rounding left just short of a whole one is meant to be it
SHORT = 0.01

_broken = False  # whether Triton has failed in this process


def views(
    image: Image.Image | Tensor,
    count: int,
    preprocess: Preprocess,
    *,
    seed: int,
    index: int,
    augmix: bool = False,
    scale: tuple[float, float] = (0.08, 1.0),
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The clean view and `count - 1` random ones: (count, 3, size, size), normalised, row 0 clean."""
    picture = as_picture(image)
    height, width = picture.shape[:2]
    sampled = draw((width, height), count, preprocess.size, seed=seed, index=index, augmix=augmix, scale=scale)
    return normalise(grey_views([picture.to(device)], [sampled], preprocess)[0], preprocess, dtype)


def as_picture(image: Image.Image | Tensor) -> Tensor:
    """Pixels (H, W, 3) uint8 of a Pillow image, or those given."""
    if isinstance(image, Tensor):
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != torch.uint8 or 0 in image.shape:
            raise InputError(f"Pixels must be (H, W, 3) uint8; got {image.dtype} {tuple(image.shape)}.")
        if image.shape[0] * image.shape[1] > MAX_PIXELS:
            raise InputError(f"Pixels {tuple(image.shape)} are more than {MAX_PIXELS:,}; scale them down first.")
        return image
    if not isinstance(image, Image.Image):
        raise InputError(f"Expected a Pillow image or pixels; got {type(image).__name__}.")
    return torch.from_numpy(np.array(seen(image)))


def grey_views(
    pictures: Sequence[Tensor],
    sampled: Sequence[Drawn],
    preprocess: Preprocess,
    *,
    precision: torch.dtype | None = None,
    kernels: bool | None = None,
) -> Tensor:
    """Views of several images (H, W, 3), on their device: (n, V, 3, size, size), grey levels in `precision`.

    `sampled` holds V - 1 rows for each image. Half precision, the default on a GPU, is exact for whole levels.
    `kernels` says whether Triton does the work, by default where it can.
    """
    device = pictures[0].device
    precision = precision or (torch.float16 if device.type == "cuda" else torch.float32)
    size = preprocess.size
    result = torch.empty(len(pictures), len(sampled[0]) + 1, 3, size, size, dtype=precision, device=device)
    short = [row for row, picture in enumerate(pictures) if max(picture.shape) <= LONGEST]
    for row in set(range(len(pictures))) - set(short):
        result[row] = _long_strip(pictures[row], entries(sampled[row]), preprocess).to(result)
    if kernels is None:
        kernels = device.type == "cuda" and find_spec("triton") is not None
    if kernels and _by_kernels(pictures, sampled, preprocess, result, short):
        return result
    if short:
        axes = np.stack([_axes(pictures[row].shape, sampled[row], preprocess) for row in short])
        weights, columns = _taps(_upload(axes, device), size, int(_reach(axes).max()))
        for place, row in enumerate(short):
            _resample(pictures[row], weights[place], columns[place], result[row])
    if len(sampled[0]) and sampled[0].mixes is not None:
        _augmix(result[:, 1:], [view for drawn in sampled for view in entries(drawn)])
    return result


def _by_kernels(
    pictures: Sequence[Tensor], sampled: Sequence[Drawn], preprocess: Preprocess, result: Tensor, short: list[int]
) -> bool:
    """Whether Triton has filled `result`, but for the rows not in `short`, and mixed all of it."""
    global _broken
    if _broken:
        return False
    try:
        from testtime.images import gpu_pixels as pixels

        if short:
            axes = np.stack([_axes(pictures[row].shape, sampled[row], preprocess) for row in short])
            pixels.crop([pictures[row] for row in short], axes, _reach(axes), result, short)
        if len(sampled[0]):
            pixels.mix(result, [drawn.mixes for drawn in sampled if drawn.mixes is not None])
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler fails in its own ways, and they have no common root
        _broken = True
        warn_once(f"Views cannot be made by Triton, and are made slower ({reason(error)}).")
    return not _broken


def normalise(grey: Tensor, preprocess: Preprocess, dtype: torch.dtype) -> Tensor:
    """Grey levels (..., 3, H, W) less the model's mean over its deviation, as it wants its images."""
    mean, std = (grey.new_tensor(x, dtype=torch.float32)[:, None, None] for x in (preprocess.mean, preprocess.std))
    return torch.addcmul(-mean / std, grey.float(), 1 / (255 * std)).to(dtype)


# Crops


class Axis(NamedTuple):
    """How one side of a view is resampled from the same side of the image."""

    start: float  # of the box, in pixels of the image
    length: float  # of the box
    ratio: float  # pixels of the image to one of the resized box
    first: float  # pixel of the resized box that is the view's first
    total: float  # pixels of the resized box
    support: float  # reach of the filter at ratio 1: 1 is bilinear, 2 bicubic
    mirrored: float


def _axes(shape: Sequence[int], sampled: Drawn, preprocess: Preprocess) -> np.ndarray:
    """The axes of each view, across and down: (V, 2, 7)."""
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


def _reach(axes: np.ndarray) -> np.ndarray:
    """The width of each axis' filter in pixels of the image: (..., 7) -> (...)."""
    return 2 * np.ceil(axes[..., 5] * axes[..., 2].clip(1)) + 1


def _upload(array: np.ndarray, device: torch.device) -> Tensor:
    """An array on the device, without waiting for it there."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _taps(axes: Tensor, size: int, most: int) -> tuple[Tensor, Tensor]:
    """Weights, and the pixels of the image they are for, of each pixel of each view: two (n, V, 2, size, most)."""
    start, length, ratio, first, total, support, mirrored = (part[..., None] for part in axes.unbind(-1))
    place = torch.arange(size, dtype=axes.dtype, device=axes.device)
    place = torch.where(mirrored > 0, size - 1 - place, place) + first  # (n, V, 2, size)
    stretch = ratio.clamp_min(1)
    centre, reach = (place + 0.5) * ratio, support * stretch
    low = (centre - reach + 0.5).floor().clamp_min(0)
    high = torch.minimum((centre + reach + 0.5).floor(), length)
    pixel = low[..., None] + torch.arange(most, dtype=axes.dtype, device=axes.device)
    weight = _filter((pixel + 0.5 - centre[..., None]) / stretch[..., None], support[..., None] > 1)
    inside = (pixel < high[..., None]) & (place >= 0)[..., None] & (place < total)[..., None]
    weight = weight * inside
    weight = weight / torch.where(inside.any(-1), weight.sum(-1), 1)[..., None]
    return weight, (start[..., None] + torch.minimum(pixel, length[..., None] - 1)).long()


def _filter(x: Tensor, cubic: Tensor) -> Tensor:
    """Pillow's filters: the triangle, or where `cubic`, the cubic convolution with a = -0.5."""
    x = x.abs()
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    smooth = torch.where(x < 1, near, torch.where(x < 2, far, 0))
    return torch.where(cubic, smooth, (1 - x).clamp_min(0))


def _resample(picture: Tensor, weights: Tensor, columns: Tensor, out: Tensor) -> None:
    """Fill `out` (V, 3, size, size) with the views of one picture (H, W, 3)."""
    count, _, size, _ = out.shape
    height, width = (-(-side // ALIGNED) * ALIGNED for side in picture.shape[:2])
    pixels = out.new_zeros(3, height, width)
    pixels[:, : picture.shape[0], : picture.shape[1]] = picture.permute(2, 0, 1)
    across, down = (
        out.new_zeros(count, size, side).scatter_add_(2, columns[:, axis], weights[:, axis].to(out.dtype))
        for axis, side in ((0, width), (1, height))
    )
    # One product for all rows of all colours and all columns of all views. Pillow rounds after each of its two
    # passes; the half that makes rounding of cutting off rides along with this one.
    half = out.new_full((count * size,), 0.5)
    rows = torch.addmm(half, pixels.flatten(0, 1), across.flatten(0, 1).T).floor_().clamp_(0, 255)
    rows = rows.view(3, height, count, size)
    for colour in range(3):
        out[:, colour] = torch.bmm(down, rows[colour].transpose(0, 1))
    out.add_(0.5).floor_().clamp_(0, 255)


def _long_strip(picture: Tensor, sampled: Sequence[ViewParameters], preprocess: Preprocess) -> Tensor:
    """Views (V, 3, size, size) in grey levels, by Pillow, of an image too long for matrices; AugMix left out."""
    image, size = Image.fromarray(picture.cpu().numpy()), preprocess.size
    made = [plain._centre(image, preprocess), *(plain._crop(image, view.crop, size) for view in sampled)]
    return torch.from_numpy(np.stack([np.array(view) for view in made])).permute(0, 3, 1, 2)


# AugMix


def _augmix(grey: Tensor, sampled: Sequence[ViewParameters]) -> None:
    """Mix views (n, V, 3, size, size) in place, each as its parameters say."""
    size, device = grey.shape[-1], grey.device
    plans = [view.augmix for view in sampled if view.augmix is not None]
    chains = [plan.chains[number] for number in range(CHAINS) for plan in plans]
    base = grey.flatten(0, 1).to(torch.uint8)
    changed = base.repeat(CHAINS, 1, 1, 1)  # (CHAINS * n * V, 3, size, size), a chain at a time
    for step in range(max(map(len, chains))):
        operate(changed, {row: chain[step] for row, chain in enumerate(chains) if step < len(chain)})
    keep = np.array([plan.keep for plan in plans])
    shares = np.stack([keep, *((1 - keep) * np.array([plan.weights for plan in plans]).T)])
    weights = _upload(shares.astype(np.float32), device)[:, :, None, None, None]
    parts = changed.view(CHAINS, len(plans), 3, size, size)
    mixed = base * weights[0]
    for number in range(CHAINS):
        mixed.addcmul_(parts[number], weights[1 + number])
    grey.copy_(mixed.view(grey.shape))


def operate(pictures: Tensor, operations: dict[int, Operation]) -> None:
    """Carry out one operation on each of some rows of `pictures` (n, 3, size, size) uint8, in place."""
    size, device = pictures.shape[-1], pictures.device
    moved = [row for row, operation in operations.items() if operation.name in MOVES]
    measured = [row for row, operation in operations.items() if operation.name in MEASURED]
    fixed = [row for row, operation in operations.items() if operation.name in FIXED]
    if moved:
        rows = _upload(np.array(moved), device)
        matrices = _upload(np.array([_matrix(operations[row], size) for row in moved], dtype=np.float32), device)
        pictures.index_copy_(0, rows, _move(pictures[rows], matrices))
    if measured or fixed:
        rows = _upload(np.array(measured + fixed), device)
        levels = pictures[rows].flatten(2).long()  # (n, 3, pixels)
        tables = []
        if measured:
            equal = np.array([operations[row].name == "equalize" for row in measured])
            tables.append(_measured_tables(levels[: len(measured)], _upload(equal, device)))
        if fixed:
            bits = np.stack([_fixed_table(operations[row]) for row in fixed])
            tables.append(_upload(bits, device)[:, None].expand(-1, 3, -1))
        toned = torch.cat(tables).gather(2, levels)
        pictures.index_copy_(0, rows, toned.view(-1, 3, size, size))


def _matrix(operation: Operation, size: int) -> tuple[float, ...]:
    """Where a pixel of the result comes from: x' = a x + b y + c, y' = d x + e y + f."""
    name, amount = operation
    match name:
        case "shear_x":
            return 1, amount, 0, 0, 1, 0
        case "shear_y":
            return 1, 0, 0, amount, 1, 0
        case "translate_x":
            return 1, 0, amount, 0, 1, 0
        case "translate_y":
            return 1, 0, 0, 0, 1, amount
    cos, sin, middle = math.cos(math.radians(amount)), math.sin(math.radians(amount)), size / 2
    return cos, -sin, middle * (1 - cos + sin), sin, cos, middle * (1 - cos - sin)


def _move(pictures: Tensor, matrices: Tensor) -> Tensor:
    """Pictures (n, 3, size, size) uint8 through affine maps (n, 6), bilinear, black outside."""
    size = pictures.shape[-1]
    middle = torch.arange(size, dtype=torch.float32, device=pictures.device) + 0.5
    a, b, c, d, e, f = (part[:, None, None] for part in matrices.unbind(1))
    x = a * middle + b * middle[:, None] + c  # (n, size, size)
    y = d * middle + e * middle[:, None] + f
    inside = (x >= 0) & (x < size) & (y >= 0) & (y < size)
    grid = torch.stack([x, y], -1) * (2 / size) - 1
    # within the picture the outermost pixels go on to its edge, as in Pillow
    moved = F.grid_sample(pictures.float(), grid, "bilinear", "border", align_corners=False)
    return moved.add_(SHORT).mul_(inside[:, None]).to(torch.uint8)


def _measured_tables(levels: Tensor, equal: Tensor) -> Tensor:
    """Tables (n, 3, 256) uint8 that equalise pictures (n, 3, pixels) where `equal` (n,), else stretch their contrast.

    In whole numbers and in double, as Pillow computes them: both cut off what is behind the point.
    """
    count = levels.new_zeros(*levels.shape[:2], 256).scatter_add_(2, levels, torch.ones_like(levels))
    level = torch.arange(256, device=levels.device)
    present = count > 0
    low = torch.where(present, level, 256).amin(2, keepdim=True)
    high = torch.where(present, level, -1).amax(2, keepdim=True)
    several = high > low
    # equalize: as many pixels to each new level, those of the highest one left out of the account
    step = (count.sum(2, keepdim=True) - count.gather(2, high)) // 255
    even = (step // 2 + count.cumsum(2) - count) // step.clamp_min(1)
    # autocontrast: the darkest becomes 0 and the lightest 255
    gain = 255 / (high - low).clamp_min(1).double()
    stretched = (level * gain + -low * gain).long()
    table = torch.where(equal[:, None, None], torch.where(step > 0, even, level), stretched)
    return torch.where(several, table, level).clamp_(0, 255).to(torch.uint8)


def _fixed_table(operation: Operation) -> np.ndarray:
    """The table (256,) uint8 of an operation that is the same for every picture."""
    level, amount = np.arange(256), int(operation.amount)
    if operation.name == "posterize":
        return (level & -(1 << (8 - amount))).astype(np.uint8)
    return np.where(level < amount, level, 255 - level).astype(np.uint8)
