"""Identities of images and weights: what tells apart files of the same name.

By default by sizes and modification times (`stamp`), which read no file; by `content`, copies have the same identity.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from testtime.errors import InputError
from testtime.files.remote import RemoteImage
from testtime.registry import split_precision
from testtime.types import Encoder, StoredImage

# files beside an open_clip checkpoint that are read with it
CHECKPOINT_FILES = ("open_clip_config.json", "tokenizer.json", "tokenizer_config.json", "spiece.model", "vocab.txt")


def stamp(file: str | Path) -> str:
    """A file's size and modification time, as text."""
    try:
        status = os.stat(file)
    except (OSError, ValueError):
        return "missing"
    return f"{status.st_size} {status.st_mtime_ns}"


def content(file: str | Path) -> str:
    """A digest of a file's bytes, which are read."""
    try:
        with open(file, "rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except (OSError, ValueError):
        return "missing"


def identity(image: str | StoredImage, by: Callable[[str | Path], str] = stamp) -> str:
    """Identifies an image: its file, and its position in a shared file.

    A remote image is identified by what its server says, one that is in no file by a digest of its bytes.
    """
    if isinstance(image, RemoteImage):
        return " ".join(map(str, image[1:]))
    file = file_of(image)
    if file is not None:
        return " ".join([by(file), *(map(str, image[1:]) if isinstance(image, tuple) else [])])
    try:
        return digest([image.read_bytes()])  # type: ignore[union-attr]
    except (OSError, InputError):
        return "unreadable"


def file_of(image: str | StoredImage) -> Path | None:
    """The file that an image is read from, if any: its own, an archive or a table."""
    if isinstance(image, str | Path):
        return Path(image)
    return getattr(image, "archive", None) or getattr(image, "file", None)


def weights(encoder: Encoder, by: Callable[[str | Path], str] = stamp) -> str:
    """Identifies an encoder's weights if they are local files; empty if its name identifies them."""
    path = weights_of(encoder.name)
    if path is None:
        return ""
    files = sorted(path.iterdir()) if path.is_dir() else [path, *(path.with_name(name) for name in CHECKPOINT_FILES)]
    return digest(f"{file.name} {by(file)}" for file in files)


def weights_of(encoder: str) -> Path | None:
    """The file or folder of weights in an encoder's name, if it exists."""
    kind, _, rest = split_precision(encoder)[0].partition(":")
    name = rest.partition("/")[2] if kind == "open_clip" else rest if kind == "hf" else ""
    path = Path(os.path.expanduser(name))
    return path if name and path.exists() else None


def digest(parts: Iterable[str | bytes]) -> str:
    """A short digest of the parts in order; text may be anything, also names that are not UTF-8."""
    sha = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode(errors="surrogatepass")
        sha.update(len(data).to_bytes(8, "little") + data)
    return sha.hexdigest()[:12]
