"""A thumbnail: a small square JPEG of an image, as text that a page can embed."""

from __future__ import annotations

import base64
import io

from PIL import Image, ImageOps


def thumbnail_uri(image: Image.Image, side: int) -> str:
    """The data URI of an image's thumbnail, of `side` pixels a side.

    >>> thumbnail_uri(Image.new("RGB", (640, 480)), 56)[:30]
    'data:image/jpeg;base64,/9j/4AA'
    """
    data = io.BytesIO()
    small = ImageOps.fit(image.convert("RGB"), (side, side), Image.Resampling.LANCZOS)
    small.save(data, "JPEG", quality=72, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode()
