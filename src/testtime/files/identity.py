"""What tells an image or an encoder's weights from others of the same name: their files' sizes and times of change."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from testtime.errors import InputError
from testtime.types import Encoder, StoredImage

# beside a checkpoint file of open_clip, what else is read with it
BESIDE = ("open_clip_config.json", "tokenizer.json", "tokenizer_config.json", "spiece.model", "vocab.txt")


def identity(image: str | StoredImage) -> str:
    """What an image's content goes by: the size and the time of its file, and its place there where it shares one.

    An image that lies in no file goes by a digest of its bytes.
    """
    file = file_of(image)
    if file is not None:
        return " ".join([stamp(file), *(map(str, image[1:]) if isinstance(image, tuple) else [])])
    try:
        return digest([image.read_bytes()])  # type: ignore[union-attr]
    except (OSError, InputError):
        return "unreadable"


def file_of(image: str | StoredImage) -> Path | None:
    """The file that an image is read from, where it has one: its own, an archive or a table."""
    if isinstance(image, str | Path):
        return Path(image)
    return getattr(image, "archive", None) or getattr(image, "file", None)


def weights(encoder: Encoder) -> str:
    """What an encoder's weights go by where they are files of one's own; empty where its name says which they are."""
    place = weights_of(encoder.name)
    if place is None:
        return ""
    files = sorted(place.iterdir()) if place.is_dir() else [place, *(place.with_name(name) for name in BESIDE)]
    return digest(f"{file.name} {stamp(file)}" for file in files)


def weights_of(encoder: str) -> Path | None:
    """The file or the folder that an encoder's name gives as its weights, if it is there."""
    kind, _, rest = encoder.partition(":")
    name = rest.partition("/")[2] if kind == "open_clip" else rest if kind == "hf" else ""
    place = Path(os.path.expanduser(name))
    return place if name and place.exists() else None


def stamp(file: str | Path) -> str:
    """A file's size and time of change, in words that are other once it is."""
    try:
        status = os.stat(file)
    except (OSError, ValueError):
        return "missing"
    return f"{status.st_size} {status.st_mtime_ns}"


def digest(parts: Iterable[str | bytes]) -> str:
    """A short mark of what was given, in its order; text of any kind, also names that are no UTF-8."""
    whole = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode(errors="surrogatepass")
        whole.update(len(data).to_bytes(8, "little") + data)
    return whole.hexdigest()[:12]
