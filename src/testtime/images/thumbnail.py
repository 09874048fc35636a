"""A thumbnail: a small square JPEG of an image, and as text that a page can embed."""

from __future__ import annotations

import base64
import io

from PIL import Image, ImageOps


def thumbnail_jpeg(image: Image.Image, side: int) -> bytes:
    """An image's thumbnail, of `side` pixels a side."""
    data = io.BytesIO()
    small = ImageOps.fit(image.convert("RGB"), (side, side), Image.Resampling.LANCZOS)
    small.save(data, "JPEG", quality=72, optimize=True)
    return data.getvalue()


def thumbnail_uri(image: Image.Image, side: int) -> str:
    """The data URI of an image's thumbnail, of `side` pixels a side.

    >>> thumbnail_uri(Image.new("RGB", (640, 480)), 56)[:30]
    'data:image/jpeg;base64,/9j/4AA'
    """
    return "data:image/jpeg;base64," + base64.b64encode(thumbnail_jpeg(image, side)).decode()
