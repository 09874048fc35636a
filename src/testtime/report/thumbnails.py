"""Thumbnails: small images embedded in the page, each stored once as a style and shown wherever it is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from testtime.report.data import Section
from testtime.report.markup import safe, safe_characters
from testtime.types import ImageError, StoredImage

SIDE = 88  # pixels; galleries show them so large, lists of queues smaller
MOST = 600  # thumbnails per report
BYTES = 1_500_000  # of all thumbnails together, as encoded in the page


def make_thumbnails(images: Mapping[int, str | StoredImage], most: int = MOST, total: int = BYTES) -> dict[int, str]:
    """Square JPEG thumbnails as data URIs, by the same keys; unreadable images are skipped.

    Stops at `most` thumbnails, or before they exceed `total` bytes, so give the important ones first.
    """
    from testtime.images.reading import read_image
    from testtime.images.thumbnail import thumbnail_uri

    made: dict[int, str] = {}
    size = 0
    for key, image in images.items():
        if len(made) == most:
            break
        try:
            uri = thumbnail_uri(read_image(image), SIDE)
        except ImageError:
            continue
        size += len(uri)
        if size > total:
            break
        made[key] = uri
    return made


def styles(thumbnails: Mapping[int, str], section: int) -> str:
    """A style rule for each thumbnail, so that one shown several times is in the page once."""
    return "".join(f".t{section}-{image}{{background-image:url({uri})}}\n" for image, uri in sorted(thumbnails.items()))


def image_name(report: Section, image: int) -> str:
    """The display name of an image: its file name, or its number in the stream."""
    name = Path(safe_characters(report.names[image])).name if report.names else ""
    return name or f"image {image + 1:,}"


def thumbnail(report: Section, image: int, section: int) -> str:
    """The thumbnail of an image, or its number if there is none."""
    name = safe(image_name(report, image))
    if image in report.thumbnails:
        return f'<span class="thumb t{section}-{image}" role="img" aria-label="{name}" title="{name}"></span>'
    return f'<span class="thumb none" role="img" aria-label="{name}" title="{name}">{image + 1}</span>'


def gallery(report: Section, images: Iterable[tuple[int, str]], section: int) -> str:
    """Thumbnails in a row that wraps, each with a caption, which is HTML."""
    items = "".join(f"<li>{thumbnail(report, image, section)}<span>{caption}</span></li>" for image, caption in images)
    return f'<ul class="gallery">{items}</ul>'
