"""Thumbnails: small pictures inside the page, each stored once as a style and shown wherever it is named."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping
from pathlib import Path

from testtime.report.data import Section
from testtime.report.markup import safe, safe_characters
from testtime.types import ImageError, StoredImage

SIDE = 56  # pixels of a thumbnail
MOST = 600  # thumbnails in a report
BYTES = 1_500_000  # of all thumbnails together, as they stand in the page


def make_thumbnails(images: Mapping[int, str | StoredImage], most: int = MOST, total: int = BYTES) -> dict[int, str]:
    """Square JPEG pictures as data URIs, by the same keys; those that cannot be read are left out.

    Stops at `most` pictures, or before they take more than `total` bytes, so give the ones that matter first.
    """
    from PIL import Image, ImageOps

    from testtime.images.reading import read_image

    made: dict[int, str] = {}
    size = 0
    for key, image in images.items():
        if len(made) == most:
            break
        try:
            picture = ImageOps.fit(read_image(image), (SIDE, SIDE), Image.Resampling.LANCZOS)
        except ImageError:
            continue
        data = io.BytesIO()
        picture.save(data, "JPEG", quality=72, optimize=True)
        uri = "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode()
        size += len(uri)
        if size > total:
            break
        made[key] = uri
    return made


def styles(thumbnails: Mapping[int, str], section: int) -> str:
    """A style rule for each thumbnail, so that a picture shown in several places is in the page once."""
    return "".join(f".t{section}-{image}{{background-image:url({uri})}}\n" for image, uri in sorted(thumbnails.items()))


def image_name(report: Section, image: int) -> str:
    """What to call an image: its file, or its place in the stream."""
    return Path(safe_characters(report.names[image])).name if len(report.names) else f"image {image + 1:,}"


def thumbnail(report: Section, image: int, section: int) -> str:
    """The picture of an image, or its number where there is none."""
    name = safe(image_name(report, image))
    if image in report.thumbnails:
        return f'<span class="thumb t{section}-{image}" role="img" aria-label="{name}" title="{name}"></span>'
    return f'<span class="thumb none" role="img" aria-label="{name}" title="{name}">{image + 1}</span>'


def gallery(report: Section, images: Iterable[tuple[int, str]], section: int) -> str:
    """Pictures in a row that wraps, each with lines below it; the captions are HTML."""
    items = "".join(f"<li>{thumbnail(report, image, section)}<span>{caption}</span></li>" for image, caption in images)
    return f'<ul class="gallery">{items}</ul>'
