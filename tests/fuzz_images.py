"""Damaged image files through `read_image`: each is an image, or an ImageError of one line, in bounded memory.

python tests/fuzz_images.py --cases 3000 --seed 0
"""

from __future__ import annotations

import argparse
import io
import random
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
from PIL import Image

from testtime.images import reading as images
from testtime.types import ImageError

FORMATS = ("AVIF", "BMP", "GIF", "HEIF", "JPEG", "MPO", "PNG", "PPM", "TIFF", "WEBP")
MODES = {
    "BMP": ("RGB", "P", "1", "L"),
    "GIF": ("P", "L", "1"),
    "JPEG": ("RGB", "L", "CMYK"),
    "PNG": ("RGB", "RGBA", "P", "LA", "I;16", "1"),
    "PPM": ("RGB", "L", "I;16", "1"),
    "TIFF": ("RGB", "RGBA", "P", "CMYK", "I;16", "F", "1", "LAB"),
}
OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "TIFF": tuple({"compression": name} for name in ("raw", "tiff_lzw", "tiff_deflate", "packbits", "jpeg")),
    "JPEG": ({}, {"progressive": True}),
    "WEBP": ({}, {"lossless": True}),
}
MOST = 4_000_000  # pixels here, so that headers that claim more are refused and memory stays small


@cache
def whole(format: str, mode: str, option: int) -> bytes:
    """A small image, with an orientation where the format has one; b"" where this Pillow cannot write it."""
    numbers = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)
    image = Image.fromarray(numbers)
    if mode == "LAB":
        image = Image.frombytes("LAB", image.size, image.tobytes())
    else:
        image = image.convert("I").convert(mode) if mode == "I;16" else image.convert(mode)
    exif, buffer = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    choices = OPTIONS.get(format, ({},))
    extra = {"exif": exif} if format in ("JPEG", "PNG", "TIFF", "WEBP", "AVIF") else {}
    if format == "HEIF":
        import pillow_heif

        pillow_heif.from_pillow(image).save(buffer)
        return buffer.getvalue()
    try:
        image.save(buffer, format, **choices[option % len(choices)], **extra)
    except (OSError, KeyError, ValueError):  # a mode that the compression does not support
        return b""
    return buffer.getvalue()


def damaged(data: bytes, dice: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(dice.choice((0, 1, 1, 2, 8, 40))):
        position = dice.randrange(min(len(changed), dice.choice((16, 64, 400, len(changed)))))
        match dice.randrange(5):
            case 0:
                changed[position] = dice.randrange(256)
            case 1:
                changed[position] ^= 1 << dice.randrange(8)
            case 2:
                size = dice.choice((2, 4, 8))
                changed[position : position + size] = dice.choice((b"\0", b"\xff", b"\x7f", b"\x80")) * size
            case 3:
                changed[position:position] = changed[position : position + dice.randrange(1, 40)]
            case _:
                del changed[position : position + dice.randrange(1, 40)]
        if not changed:
            break
    if changed and dice.random() < 0.3:
        del changed[dice.randrange(len(changed)) :]
    return bytes(changed)


def outcome(data: bytes) -> str:
    try:
        image = images.read_image(data)
    except ImageError as error:
        assert "\n" not in str(error), str(error)
        str(error).encode()
        return "refused"
    assert type(image) is Image.Image and image.mode == "RGB" and image.width * image.height <= MOST
    assert np.asarray(image).shape == (image.height, image.width, 3)
    return "image"


def run(cases: int, seed: int) -> Counter[str]:
    """How many files had which outcome; any other error is raised with its case number and seed."""
    Image.init()
    found: Counter[str] = Counter()
    formats = [format for format in FORMATS if format in Image.SAVE or (format == "HEIF" and find_spec("pillow_heif"))]
    before, images.MAX_PIXELS = images.MAX_PIXELS, MOST
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number in range(cases):
                dice = random.Random(f"{seed} {number}")
                format = dice.choice(formats)
                data = whole(format, dice.choice(MODES.get(format, ("RGB",))), dice.randrange(8))
                try:
                    found[f"{format} {outcome(damaged(data, dice)) if data else 'left out'}"] += 1
                except Exception as error:
                    error.add_note(f"case {number} of seed {seed}: {format}")
                    raise
    finally:
        images.MAX_PIXELS = before
    return found


def main(run: Callable[[int, int], Counter[str]], about: str | None) -> None:
    """A fuzzer as a program: prints the number of cases by outcome."""
    reader = argparse.ArgumentParser(description=about)
    reader.add_argument("--cases", type=int, default=3000)
    reader.add_argument("--seed", type=int, default=0)
    given = reader.parse_args()
    for ending, count in sorted(run(given.cases, given.seed).items()):
        print(f"{count:6,} {ending}")


if __name__ == "__main__":
    main(run, __doc__)
