"""The crops and AugMix of `gpu_views`: a few Triton kernels, each for all views of all images at once.

Crops equal Pillow's bit for bit: the same two passes, in the same 22-bit fixed point. AugMix takes two kernels per
step of the chains, one that builds the lookup tables of operations that depend on the whole image and one that
applies all nine, and a last one that mixes. Parameters of an image are a row of numbers that a kernel reads.
"""

# Triton parses the annotations of kernels itself, and accepts only its own
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from testtime.images.draw import CHAINS, Mixes
from testtime.images.gpu_views import KINDS, plan_steps

# as in Pillow, products are rounded before they are summed
ROUNDED = {"enable_fp_fusion": False}

# Columns of a view's axis after those of `testtime.images.gpu_views.Axis`: its filter and its image
FILTER, OFFSET, WIDTH = range(7, 10)
AXIS: tl.constexpr = tl.constexpr(10)
OPERATION: tl.constexpr = tl.constexpr(8)  # its columns in `plan_steps`
AFFINE, AUTOCONTRAST, EQUALIZE, POSTERIZE, SOLARIZE = (tl.constexpr(1 + kind) for kind in range(len(KINDS)))
# Pillow truncates levels; this keeps those that rounding left just below an integer
EPSILON: tl.constexpr = tl.constexpr(0.01)


def crop(images: Sequence[Tensor], axes: np.ndarray, out: Tensor) -> None:
    """Fill `out` (n, V, 3, size, size) with the views of images (H, W, 3), by their axes (n, V, 2, 7)."""
    count, views, size, device = len(images), out.shape[1], out.shape[-1], out.device
    tall = max(image.shape[0] for image in images)
    pixels = torch.cat([image.reshape(-1) for image in images])
    sizes = np.array([image.numel() for image in images])
    reach = 2 * np.ceil(axes[..., 5] * axes[..., 2].clip(1)) + 1  # filter widths in pixels of the image
    plan = np.empty((count, views, 2, AXIS.value))
    plan[..., :FILTER], plan[..., FILTER] = axes, reach
    plan[..., OFFSET] = (sizes.cumsum() - sizes)[:, None, None]
    plan[..., WIDTH] = np.array([image.shape[1] for image in images])[:, None, None]
    max_taps = int(reach.max())
    on_device = _upload(plan, device)
    weights = torch.empty(count * views * 2, max_taps, size, dtype=torch.int32, device=device)
    first = torch.empty(count * views * 2, size, dtype=torch.int32, device=device)
    across = torch.empty(count * views, 3, tall, size, dtype=torch.uint8, device=device)
    block = triton.next_power_of_2(size)
    high = max(1, 2048 // block)  # rows per program
    options = {"BLOCK": block, **ROUNDED}
    _weigh[(count * views * 2,)](on_device, weights, first, size, max_taps, **options)
    passed = weights, first, across
    strips = count * views, triton.cdiv(tall, high)
    _resample_across[strips](pixels, on_device, *passed, size, max_taps, tall, HIGH=high, **options)
    grid = count * views, triton.cdiv(size, high), 3
    _resample_down[grid](on_device, *passed, out, size, max_taps, tall, HIGH=high, **options)


def mix(grey: Tensor, mixes: Sequence[Mixes]) -> None:
    """Mix all views but the first of each image (n, V, 3, size, size) in place."""
    size, device, views = grey.shape[-1], grey.device, grey.shape[1] - 1
    plan, shares = plan_steps(mixes, size)
    numbers = _upload(np.concatenate([plan.ravel(), shares.ravel()]), device)
    steps, weights = numbers[: plan.size].view(plan.shape), numbers[plan.size :]
    images = plan.shape[1]
    # two buffers alternate: an affine map cannot work in place
    buffers = [torch.empty(images, 3, size * size, dtype=torch.uint8, device=device) for _ in range(2)]
    tables = torch.empty(images, 3, 256, dtype=torch.uint8, device=device)
    source = grey
    for number, step in enumerate(steps):
        target, options = buffers[number % 2], {"FIRST": number == 0, **ROUNDED}
        _tabulate[(images, 3)](source, step, tables, size, views, BLOCK=2048, **options)
        grid = images, triton.cdiv(size * size, 1024)
        _operate[grid](source, step, tables, target, size, views, BLOCK=1024, **options)
        source = target
    grid = images // CHAINS, triton.cdiv(3 * size * size, 2048)
    _blend[grid](grey, source, weights, size, views, CHAINS=CHAINS, BLOCK=2048, **ROUNDED)


def _upload(array: np.ndarray, device: torch.device) -> Tensor:
    """An array copied to the device, without waiting for the copy."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


# Crops


@triton.jit
def _kernel_value(x, cubic):
    """Pillow's filters: the triangle, or with `cubic`, the cubic convolution with a = -0.5."""
    x = tl.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    smooth = tl.where(x < 1, near, tl.where(x < 2, far, 0.0))
    return tl.where(cubic, smooth, tl.maximum(1 - x, 0.0))


@triton.jit(do_not_specialize=["size", "max_taps"])
def _weigh(axes, weights, first, size, max_taps, BLOCK: tl.constexpr):
    """Weights (max_taps, size) with 22 fractional bits along one axis, and the box's pixel (size,) of the first one."""
    axis = tl.program_id(0).to(tl.int64)
    row = axes + axis * AXIS
    length, ratio = tl.load(row + 1), tl.load(row + 2)
    start, total = tl.load(row + 3), tl.load(row + 4)
    support, mirrored = tl.load(row + 5), tl.load(row + 6)
    reach = tl.load(row + 7).to(tl.int32)
    pixel = tl.arange(0, BLOCK)
    kept = pixel < size
    position = tl.where(mirrored > 0, size - 1 - pixel, pixel).to(tl.float64) + start
    stretch = tl.maximum(ratio, 1.0)
    centre = (position + 0.5) * ratio
    low = tl.maximum(tl.floor(centre - support * stretch + 0.5), 0.0)
    high = tl.minimum(tl.floor(centre + support * stretch + 0.5), length)
    high = tl.where((position >= 0) & (position < total), high, 0.0)
    whole = tl.zeros([BLOCK], dtype=tl.float64)
    for tap in range(reach):
        value = _kernel_value((low + tap + 0.5 - centre) / stretch, support > 1)
        whole += tl.where(low + tap < high, value, 0.0)
    whole = tl.where(whole == 0, 1.0, whole)
    for tap in range(reach):
        value = _kernel_value((low + tap + 0.5 - centre) / stretch, support > 1)
        value = tl.where(low + tap < high, value, 0.0) / whole * 4194304.0
        value += tl.where(value < 0, -0.5, 0.5)
        tl.store(weights + (axis * max_taps + tap) * size + pixel, value.to(tl.int32), mask=kept)
    tl.store(first + axis * size + pixel, low.to(tl.int32), mask=kept)


@triton.jit
def _level(total):
    """The grey level of a sum with 22 fractional bits, to which one half has been added."""
    return tl.minimum(tl.maximum(total >> 22, 0), 255)


@triton.jit(do_not_specialize=["size", "max_taps", "tall"])
def _resample_across(pixels, axes, weights, first, out, size, max_taps, tall, HIGH: tl.constexpr, BLOCK: tl.constexpr):
    """Some rows of a view's box, resampled horizontally: part of (3, tall, size) uint8."""
    view = tl.program_id(0).to(tl.int64)
    across, down = axes + 2 * view * AXIS, axes + (2 * view + 1) * AXIS
    rows = tl.program_id(1) * HIGH + tl.arange(0, HIGH)
    height = tl.load(down + 1).to(tl.int32)
    if tl.program_id(1) * HIGH < height:
        left, length = tl.load(across).to(tl.int32), tl.load(across + 1).to(tl.int32)
        reach, width = tl.load(across + 7).to(tl.int32), tl.load(across + 9).to(tl.int64)
        base = pixels + tl.load(across + 8).to(tl.int64)
        top = tl.load(down).to(tl.int32)
        column = tl.arange(0, BLOCK)
        kept = column < size
        low = tl.load(first + 2 * view * size + column, mask=kept, other=0)
        real = rows < height
        lines = base + ((top + rows).to(tl.int64) * width * 3)[:, None]
        red = tl.full([HIGH, BLOCK], 2097152, dtype=tl.int32)
        green = tl.full([HIGH, BLOCK], 2097152, dtype=tl.int32)
        blue = tl.full([HIGH, BLOCK], 2097152, dtype=tl.int32)
        for tap in range(reach):
            inside = kept & (low + tap < length)
            weight = tl.load(weights + (2 * view * max_taps + tap) * size + column, mask=inside, other=0)[None, :]
            points = lines + ((left + low + tap) * 3)[None, :]
            mask = real[:, None] & inside[None, :]
            red += weight * tl.load(points, mask=mask, other=0).to(tl.int32)
            green += weight * tl.load(points + 1, mask=mask, other=0).to(tl.int32)
            blue += weight * tl.load(points + 2, mask=mask, other=0).to(tl.int32)
        targets = out + (view * 3 * tall + rows)[:, None] * size + column[None, :]
        mask = real[:, None] & kept[None, :]
        plane = tl.cast(tall, tl.int64) * size
        tl.store(targets, _level(red).to(tl.uint8), mask=mask)
        tl.store(targets + plane, _level(green).to(tl.uint8), mask=mask)
        tl.store(targets + 2 * plane, _level(blue).to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["size", "max_taps", "tall"])
def _resample_down(axes, weights, first, across, out, size, max_taps, tall, HIGH: tl.constexpr, BLOCK: tl.constexpr):
    """Some rows of one channel of a view, resampled vertically: part of (size, size)."""
    view, colour = tl.program_id(0).to(tl.int64), tl.program_id(2)
    axis = 2 * view + 1
    height, reach = tl.load(axes + axis * AXIS + 1).to(tl.int32), tl.load(axes + axis * AXIS + 7).to(tl.int32)
    rows, column = tl.program_id(1) * HIGH + tl.arange(0, HIGH), tl.arange(0, BLOCK)
    real, kept = rows < size, column < size
    low = tl.load(first + axis * size + rows, mask=real, other=0)
    lines = across + (view * 3 + colour) * tall * size
    total = tl.full([HIGH, BLOCK], 2097152, dtype=tl.int32)
    for tap in range(reach):
        inside = real & (low + tap < height)
        weight = tl.load(weights + (axis * max_taps + tap) * size + rows, mask=inside, other=0)
        points = lines + ((low + tap) * size)[:, None] + column[None, :]
        # a zero weight may belong to a row that was never written
        mask = (inside & (weight != 0))[:, None] & kept[None, :]
        total += weight[:, None] * tl.load(points, mask=mask, other=0).to(tl.int32)
    targets = out + ((view * 3 + colour) * size + rows)[:, None] * size + column[None, :]
    tl.store(targets, _level(total).to(out.dtype.element_ty), mask=real[:, None] & kept[None, :])


# AugMix


@triton.jit
def _row(image, views, FIRST: tl.constexpr):
    """The row of a chain's image: in the first step among the views, without the clean one of each image."""
    if FIRST:
        view = image // 3
        return view + view // views + 1
    else:
        return image


@triton.jit(do_not_specialize=["size", "views"])
def _tabulate(source, steps, tables, size, views, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """Pillow's lookup table (256,) for one channel of a image whose operation depends on all of its pixels."""
    image, colour = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kind = tl.load(steps + image * OPERATION).to(tl.int32)
    if (kind == AUTOCONTRAST) | (kind == EQUALIZE):
        pixels = size * size
        start = source + (_row(image, views, FIRST) * 3 + colour) * pixels
        level = tl.arange(0, 256)
        count = tl.zeros([256], dtype=tl.int32)
        for first in range(0, pixels, BLOCK):
            pixel = first + tl.arange(0, BLOCK)
            found = tl.load(start + pixel, mask=pixel < pixels, other=0).to(tl.int32)
            count += tl.histogram(found, 256)
        beyond = (pixels + BLOCK - 1) // BLOCK * BLOCK - pixels  # counted as black
        count -= tl.where(level == 0, beyond, 0)
        low = tl.min(tl.where(count > 0, level, 256), 0)
        high = tl.max(tl.where(count > 0, level, -1), 0)
        # equalize: the same number of pixels for each new level, not counting those of the highest one
        step = (pixels - tl.sum(tl.where(level == high, count, 0), 0)) // 255
        even = (step // 2 + tl.cumsum(count, 0) - count) // tl.maximum(step, 1)
        even = tl.where(step > 0, even, level)
        # autocontrast: the darkest level becomes 0 and the lightest 255
        span = tl.maximum(high - low, 1).to(tl.float64)
        gain = 255.0 / span
        offset = -low.to(tl.float64) * gain
        stretched = (level.to(tl.float64) * gain + offset).to(tl.int32)
        table = tl.where(kind == EQUALIZE, even, stretched)
        table = tl.where(high > low, table, level)
        table = tl.minimum(tl.maximum(table, 0), 255)
        tl.store(tables + (image * 3 + colour) * 256 + level, table.to(tl.uint8))


@triton.jit(do_not_specialize=["size", "views"])
def _operate(source, steps, tables, out, size, views, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """Some pixels of a image (3, size * size) uint8 after its operation."""
    image = tl.program_id(0).to(tl.int64)
    row = steps + image * OPERATION
    kind = tl.load(row).to(tl.int32)
    pixels = size * size
    pixel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = pixel < pixels
    start, target = source + _row(image, views, FIRST) * 3 * pixels, out + image * 3 * pixels
    if kind == AFFINE:
        x, y = (pixel % size).to(tl.float32) + 0.5, (pixel // size).to(tl.float32) + 0.5
        across = tl.load(row + 1) * x + tl.load(row + 2) * y + tl.load(row + 3)
        down = tl.load(row + 4) * x + tl.load(row + 5) * y + tl.load(row + 6)
        inside = kept & (across >= 0) & (across < size) & (down >= 0) & (down < size)
        across, down = across - 0.5, down - 0.5
        left, top = tl.floor(across), tl.floor(down)
        right_share, low_share = across - left, down - top
        # border pixels are extended to the edge of the image
        x0, x1 = tl.maximum(left.to(tl.int32), 0), tl.minimum(left.to(tl.int32) + 1, size - 1)
        y0, y1 = tl.maximum(top.to(tl.int32), 0) * size, tl.minimum(top.to(tl.int32) + 1, size - 1) * size
        for colour in tl.static_range(3):
            plane = start + colour * pixels
            upper = tl.load(plane + y0 + x0, mask=inside, other=0).to(tl.float32)
            upper += right_share * (tl.load(plane + y0 + x1, mask=inside, other=0).to(tl.float32) - upper)
            lower = tl.load(plane + y1 + x0, mask=inside, other=0).to(tl.float32)
            lower += right_share * (tl.load(plane + y1 + x1, mask=inside, other=0).to(tl.float32) - lower)
            moved = tl.where(inside, upper + low_share * (lower - upper) + EPSILON, 0.0)
            tl.store(target + colour * pixels + pixel, moved.to(tl.int32).to(tl.uint8), mask=kept)
    else:
        amount = tl.load(row + 7).to(tl.int32)
        for colour in tl.static_range(3):
            level = tl.load(start + colour * pixels + pixel, mask=kept, other=0).to(tl.int32)
            if (kind == AUTOCONTRAST) | (kind == EQUALIZE):
                level = tl.load(tables + (image * 3 + colour) * 256 + level, mask=kept, other=0).to(tl.int32)
            if kind == POSTERIZE:
                level = level & amount
            if kind == SOLARIZE:
                level = tl.where(level < amount, level, 255 - level)
            tl.store(target + colour * pixels + pixel, level.to(tl.uint8), mask=kept)


@triton.jit(do_not_specialize=["size", "views"])
def _blend(grey, chains, shares, size, views, CHAINS: tl.constexpr, BLOCK: tl.constexpr):
    """Some levels of a view, mixed with its chains by their shares."""
    view = tl.program_id(0).to(tl.int64)
    levels = 3 * size * size
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = index < levels
    target = grey + (view + view // views + 1) * levels + index
    share = shares + view * (CHAINS + 1)
    mixed = tl.load(target, mask=kept, other=0).to(tl.float32) * tl.load(share)
    for chain in tl.static_range(CHAINS):
        part = tl.load(chains + (view * CHAINS + chain) * levels + index, mask=kept, other=0).to(tl.float32)
        mixed += part * tl.load(share + 1 + chain)
    tl.store(target, mixed.to(grey.dtype.element_ty), mask=kept)
