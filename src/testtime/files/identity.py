"""Identities of images and weights: file sizes and modification times, which tell apart files of the same name."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from testtime.errors import InputError
from testtime.files.remote import RemoteImage
from testtime.registry import split_precision
from testtime.types import Encoder, StoredImage

# files beside an open_clip checkpoint that are read with it
CHECKPOINT_FILES = ("open_clip_config.json", "tokenizer.json", "tokenizer_config.json", "spiece.model", "vocab.txt")


def identity(image: str | StoredImage) -> str:
    """Identifies an image's content: size and modification time of its file, and its position in a shared file.

    An image that is in no file is identified by a digest of its bytes.
    """
    if isinstance(image, RemoteImage):
        return " ".join(map(str, image[1:]))
    file = file_of(image)
    if file is not None:
        return " ".join([stamp(file), *(map(str, image[1:]) if isinstance(image, tuple) else [])])
    try:
        return digest([image.read_bytes()])  # type: ignore[union-attr]
    except (OSError, InputError):
        return "unreadable"


def file_of(image: str | StoredImage) -> Path | None:
    """The file that an image is read from, if any: its own, an archive or a table."""
    if isinstance(image, str | Path):
        return Path(image)
    return getattr(image, "archive", None) or getattr(image, "file", None)


def weights(encoder: Encoder) -> str:
    """Identifies an encoder's weights if they are local files; empty if its name identifies them."""
    path = weights_of(encoder.name)
    if path is None:
        return ""
    files = sorted(path.iterdir()) if path.is_dir() else [path, *(path.with_name(name) for name in CHECKPOINT_FILES)]
    return digest(f"{file.name} {stamp(file)}" for file in files)


def weights_of(encoder: str) -> Path | None:
    """The file or folder of weights in an encoder's name, if it exists."""
    kind, _, rest = split_precision(encoder)[0].partition(":")
    name = rest.partition("/")[2] if kind == "open_clip" else rest if kind == "hf" else ""
    path = Path(os.path.expanduser(name))
    return path if name and path.exists() else None


def stamp(file: str | Path) -> str:
    """A file's size and modification time, as text."""
    try:
        status = os.stat(file)
    except (OSError, ValueError):
        return "missing"
    return f"{status.st_size} {status.st_mtime_ns}"


def digest(parts: Iterable[str | bytes]) -> str:
    """A short digest of the parts in order; text may be anything, also names that are not UTF-8."""
    sha = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode(errors="surrogatepass")
        sha.update(len(data).to_bytes(8, "little") + data)
    return sha.hexdigest()[:12]
