"""Views of an image: the image itself, and random crops of it, seeded by (seed, index).

Random parameters are drawn first, as plain data (`testtime.images.draw`), and then applied with Pillow; another device
can apply the same draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from testtime.images.draw import NAMES, NOTHING, Drawn, Mixes, draw
from testtime.images.reading import checked_rgb, crop_box
from testtime.types import InputError, Preprocess

LONGEST = 16  # aspect ratio of the resized image from which only its centre is computed

FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


def clean(image: Image.Image, preprocess: Preprocess) -> Tensor:
    """The image preprocessed as in the model's training: (3, size, size) float32, normalised.

    Equal to torchvision's Resize, CenterCrop, ToTensor and Normalize on a Pillow image; only images more than
    `LONGEST` times as long as wide may differ by some grey levels, because resizing them whole would exhaust memory.
    """
    return views(image, 1, preprocess, seed=0, index=0)[0]


def views(
    image: Image.Image, count: int, preprocess: Preprocess, *, seed: int, index: int, augmix: bool = False
) -> Tensor:
    """The clean view and `count - 1` random ones: (count, 3, size, size) float32, normalised, row 0 clean.

    `index` is the image's position in the stream. A row depends on the image, `seed`, `index` and its own number, never
    on `count`; the crops are the same with and without AugMix.
    """
    if not isinstance(image, Image.Image):
        raise InputError(f"Expected a Pillow image, as from read_image; got {type(image).__name__}.")
    image = checked_rgb(image)
    drawn = draw(image.size, count, preprocess.size, seed=seed, index=index, augmix=augmix)
    pixels = grey_levels(image, drawn, preprocess).div_(255)
    mean, std = (pixels.new_tensor(values)[:, None, None] for values in (preprocess.mean, preprocess.std))
    return pixels.sub_(mean).div_(std)


def grey_levels(image: Image.Image, drawn: Drawn, preprocess: Preprocess) -> Tensor:
    """Views of an image in RGB by their random parameters: (V, 3, size, size) float32, from 0 to 255, row 0 clean.

    They are integers except after AugMix.
    """
    size = preprocess.size
    levels = torch.empty(len(drawn) + 1, 3, size, size)
    levels[0] = _planes(np.array(_centre(image, preprocess)))
    for row, box in enumerate(drawn.crops.tolist()):
        view = _crop(image, box, size)
        levels[row + 1] = _planes(np.array(view) if drawn.mixes is None else _augmix(view, drawn.mixes, row))
    return levels


def _affine(view: Image.Image, matrix: tuple[float, float, float, float, float, float]) -> Image.Image:
    return view.transform(view.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)


def _shifted(view: Image.Image, right: int, down: int) -> Image.Image:
    # for whole pixels a crop equals the affine map, and is about a hundred times faster
    return view.crop((right, down, right + view.width, down + view.height))


# pixels from outside the image are black
OPERATIONS: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "autocontrast": lambda view, _: ImageOps.autocontrast(view),
    "equalize": lambda view, _: ImageOps.equalize(view),
    "posterize": lambda view, bits: ImageOps.posterize(view, int(bits)),
    "rotate": lambda view, degrees: view.rotate(degrees, Image.Resampling.BILINEAR),
    "solarize": lambda view, threshold: ImageOps.solarize(view, int(threshold)),
    "shear_x": lambda view, slope: _affine(view, (1, slope, 0, 0, 1, 0)),
    "shear_y": lambda view, slope: _affine(view, (1, 0, 0, slope, 1, 0)),
    "translate_x": lambda view, pixels: _shifted(view, int(pixels), 0),
    "translate_y": lambda view, pixels: _shifted(view, 0, int(pixels)),
}


def _augmix(view: Image.Image, mixes: Mixes, row: int) -> np.ndarray:
    """The view mixed by a row of `mixes`, not rounded to integers: (size, size, 3) float32, from 0 to 255.

    The weights sum to 1, so normalising the mixture once is the same as mixing normalised views.
    """
    keep = mixes.keep[row].item()
    mixed = np.multiply(np.asarray(view), keep, dtype=np.float32)
    chains = (part[row].tolist() for part in (mixes.weights, mixes.operations, mixes.amounts))
    for weight, operations, amounts in zip(*chains, strict=True):
        changed = view
        for code, amount in zip(operations, amounts, strict=True):
            if code != NOTHING:
                changed = OPERATIONS[NAMES[code]](changed, amount)
        mixed += np.multiply(np.asarray(changed), (1 - keep) * weight, dtype=np.float32)
    return mixed


def _crop(image: Image.Image, box: Sequence[int], size: int) -> Image.Image:
    """One random resized crop; always bilinear, torchvision's default, whatever filter the model uses."""
    top, left, height, width, flip = box
    # not `resize(box=...)`: its filter would read pixels outside the box
    view = crop_box(image, (left, top, left + width, top + height)).resize((size, size), FILTERS["bilinear"])
    return view.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else view


def _centre(image: Image.Image, preprocess: Preprocess) -> Image.Image:
    """The resized image's central square, of `size` pixels a side; black outside the image."""
    size, filter = preprocess.size, FILTERS[preprocess.interpolation]
    width, height = resized(image.size, preprocess)
    left, top = margin(width, size), margin(height, size)
    if max(width, height) > LONGEST * max(size, preprocess.resize):
        # a strip of 1 x 10,000 pixels would become one of 224 x 2,240,000: compute only the kept part
        across, down = image.width / width, image.height / height
        keep = (max(left, 0), max(top, 0), min(left + size, width), min(top + size, height))
        box = (keep[0] * across, keep[1] * down, keep[2] * across, keep[3] * down)
        image = image.resize((keep[2] - keep[0], keep[3] - keep[1]), filter, box=box)
        left, top = min(left, 0), min(top, 0)
    elif (width, height) != image.size:
        image = image.resize((width, height), filter)
    return image.crop((left, top, left + size, top + size))


def resized(extent: tuple[int, int], preprocess: Preprocess) -> tuple[int, int]:
    """Width and height to which an image of `extent` (width, height) is resized before its centre is cropped."""
    if preprocess.mode == "squash":
        return preprocess.resize, preprocess.resize
    width, height = (int(preprocess.resize * side / min(extent)) for side in extent)
    return width, height


def margin(length: int, size: int) -> int:
    """The start of a crop of `size`; negative where it is padded. The two roundings are torchvision's."""
    return round((length - size) / 2) if length >= size else -((size - length) // 2)


def _planes(pixels: np.ndarray) -> Tensor:
    """One plane per colour: (H, W, 3) -> (3, H, W)."""
    return torch.from_numpy(pixels).permute(2, 0, 1)
