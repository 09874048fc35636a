"""Thumbnails: small pictures inside the page, each stored once as a style and shown wherever it is named."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from testtime.report.data import QueuesReport, StreamReport, UnlabelledReport
from testtime.report.words import plain, safe, safe_characters
from testtime.types import ImageError, StoredImage

Pictured = StreamReport | QueuesReport | UnlabelledReport

SIDE = 56  # pixels of a thumbnail
MOST = 600  # thumbnails in a report
BYTES = 1_500_000  # of all thumbnails together, as they stand in the page
ROW = 8  # pictures in a gallery of one kind


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


def image_name(report: Pictured, image: int) -> str:
    """What to call an image: its file, or its place in the stream."""
    return Path(safe_characters(report.names[image])).name if len(report.names) else f"image {image + 1:,}"


def thumbnail(report: Pictured, image: int, section: int) -> str:
    """The picture of an image, or its number where there is none."""
    name = safe(image_name(report, image))
    if image in report.thumbnails:
        return f'<span class="thumb t{section}-{image}" role="img" aria-label="{name}" title="{name}"></span>'
    return f'<span class="thumb none" role="img" aria-label="{name}" title="{name}">{image + 1}</span>'


def gallery(report: Pictured, images: Iterable[tuple[int, str]], section: int) -> str:
    """Pictures in a row that wraps, each with lines below it; the captions are HTML."""
    items = "".join(f"<li>{thumbnail(report, image, section)}<span>{caption}</span></li>" for image, caption in images)
    return f'<ul class="gallery">{items}</ul>'


def righted_and_spoilt(report: StreamReport, most: int = ROW) -> tuple[list[int], list[int]]:
    """Images that the last method put right against the baseline, and those it spoilt, most confident first."""
    if len(report.answers) < 2:
        return [], []
    labels, new = plain(report.labels), report.answers[-1]
    before, after = plain(report.answers[0].predictions), plain(new.predictions)
    order = _by_confidence(plain(new.confidences))
    righted = [i for i in order if before[i] != labels[i] == after[i]]
    spoilt = [i for i in order if before[i] == labels[i] != after[i]]
    return righted[:most], spoilt[:most]


def examples(report: StreamReport, section: int) -> str:
    """The pictures of images that were put right, and of those that were spoilt."""
    righted, spoilt = righted_and_spoilt(report)
    if not report.thumbnails or not (righted or spoilt):
        return ""
    old, new = (plain(report.answers[k].predictions) for k in (0, -1))
    names = report.classnames

    def shown(images: Sequence[int]) -> str:
        captions = [(i, f"<s>{safe(names[old[i]])}</s><b>{safe(names[new[i]])}</b>") for i in images]
        return gallery(report, captions, section) if captions else "<p>None.</p>"

    return (
        "<h3>Answers that changed</h3>"
        f"<h4>Put right by {safe(report.answers[-1].name)}, most confident first</h4>{shown(righted)}"
        f"<h4>Spoilt by it</h4>{shown(spoilt)}"
    )


def _by_confidence(confidences: Sequence[float]) -> list[int]:
    return sorted(range(len(confidences)), key=lambda i: (-confidences[i], i))
