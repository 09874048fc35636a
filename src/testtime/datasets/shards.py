"""Images in tar files, in webdataset's layout: members with the same key are one sample. Nothing is unpacked."""

from __future__ import annotations

import glob
import os
import posixpath
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from testtime.datasets.dataset import Dataset, number_labels, written
from testtime.files import parse_json
from testtime.files.remote import RemoteFile, RemoteImage, remote_errors
from testtime.images.formats import IMAGE_SUFFIXES, left_out
from testtime.types import InputError

LABELS = (".cls", ".txt", ".json")  # a number; a class name; an object with either under `label` or `cls`
BRACES = re.compile(r"\{([^{}]*)\}")
LONGEST_LABEL = 2**20  # bytes of a member that is read for its label
MAX_SHARDS = 100_000  # that one pair of braces may expand to


class TarImage(NamedTuple):
    """An image inside a tar file: where its bytes are. Read from disk each time, so any number may be held."""

    archive: Path
    member: str
    offset: int
    size: int

    def read_bytes(self) -> bytes:
        with open(self.archive, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size)

    def __str__(self) -> str:
        return f"{self.archive}/{self.member}"


def find_shards(pattern: str | Path) -> list[Path]:
    """The tar files that a file, a folder, or a pattern with {000..012}, {a,b}, * or ? matches, sorted."""
    text = str(pattern)
    if os.path.isdir(text):
        return sorted(Path(text).glob("*.tar"))
    found: list[Path] = []
    for name in expand(text):
        matches = [name] if os.path.exists(name) else sorted(glob.glob(name)) if glob.has_magic(name) else []
        if not matches:
            raise InputError(f"No file {name}" + (f", which '{text}' names." if name != text else "."))
        found += map(Path, matches)
    return found


def read_shards(shards: Sequence[Path | RemoteFile], name: str, beside: Path) -> Dataset:
    """The images of tar files in their order, with the labels beside them; `beside` may hold the classes' names."""
    images: list[TarImage | RemoteImage] = []
    values: list[str | None] = []
    others: list[str] = []
    for shard in shards:
        for image, label in _samples(shard, others):
            images.append(image)
            values.append(label)
    rest = left_out(others)
    if not images:
        where = f"{shards[0]}" + (f" or the {len(shards) - 1} after it" if shards[1:] else "")
        raise InputError(f"No image in {'; '.join([where, *rest])}.")
    where = f"A label of {shards[0]}" + (f" or the {len(shards) - 1} after it" if shards[1:] else "")
    labels, names, notes = number_labels(values, beside, where)
    return Dataset(name, images, labels, names, (*notes, *rest))


def _samples(shard: Path | RemoteFile, others: list[str]) -> Iterator[tuple[TarImage | RemoteImage, str | None]]:
    """Images and labels of one tar file; only headers and labels are read. Names of other members go to `others`."""
    images: dict[str, TarImage | RemoteImage] = {}
    labels: dict[str, str] = {}
    if isinstance(shard, Path) and not os.path.isfile(shard):
        raise InputError(f"Cannot read {shard}: it is not a file.")
    try:
        with _open(shard) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                key, suffix = _key(member.name)
                if not member.isfile() or not suffix:
                    if member.isfile() and not posixpath.basename(member.name).startswith("."):
                        others.append(member.name)
                    continue
                if member.issparse():
                    raise InputError(f"{shard}/{member.name} is sparse; write the file again without --sparse.")
                if suffix in LABELS:
                    if member.size > LONGEST_LABEL:
                        raise InputError(
                            f"{shard}/{member.name} has {member.size:,} bytes, but a label has at most "
                            f"{LONGEST_LABEL:,}; if it is not a label, avoid the suffixes {', '.join(LABELS)}."
                        )
                    stream = archive.extractfile(member)
                    labels[key] = _label(stream.read() if stream else b"", suffix, f"{shard}/{member.name}")
                elif key not in images:
                    where = member.name, member.offset_data, member.size
                    images[key] = TarImage(shard, *where) if isinstance(shard, Path) else shard.image(*where)
    except OSError as problem:
        raise InputError(f"Cannot read {shard}: {problem.strerror or problem}.") from None
    # Python's reader lets these through if a header's numbers or texts are damaged, or there are too many
    except (tarfile.TarError, ValueError, OverflowError, LookupError, MemoryError, RecursionError) as problem:
        raise InputError(
            f"{shard} is not a plain tar file, or is cut short ({problem}). Copy it again; unpack a .tar.gz to a .tar."
        ) from None
    return ((image, labels.get(key)) for key, image in images.items())


def _open(shard: Path | RemoteFile) -> BinaryIO:
    if isinstance(shard, Path):
        return open(shard, "rb")
    with remote_errors(shard.url):
        return shard.open()


def _key(member: str) -> tuple[str, str]:
    """A sample's key and this file's suffix; no suffix for a file that is neither image nor label."""
    folder, base = posixpath.split(member)
    known = (*IMAGE_SUFFIXES, *LABELS)
    # webdataset splits at the first dot; names such as 0.000116_clock.jpg have others before the suffix
    for stem, suffix in (base.partition(".")[::2], base.rpartition(".")[::2]):
        if stem and f".{suffix.lower()}" in known:
            return posixpath.join(folder, stem), f".{suffix.lower()}"
    return member, ""


def _label(content: bytes, suffix: str, where: str) -> str:
    if suffix == ".json":
        value = parse_json(content, f"{where} is not a label: its text")
        if isinstance(value, dict):
            value = next((value[name] for name in ("label", "cls", "class", "classname") if name in value), None)
        return written(value, where)
    try:
        text = content.decode("utf-8").strip()
    except ValueError:
        raise InputError(f"{where} is not a label: text, a number, or JSON with 'label' in it.") from None
    if suffix == ".cls" and not text.isdecimal():
        raise InputError(f"{where} should hold a class number; it holds {text[:40]!r}.")
    return text


def expand(pattern: str) -> list[str]:
    """All the names that a pattern with braces expands to."""
    match = BRACES.search(pattern)
    if not match:
        return [pattern]
    if ends := re.fullmatch(r"(\d+)\.\.(\d+)", match[1]):
        width = len(ends[1])
        if max(width, len(ends[2])) > 18 or int(ends[2]) - int(ends[1]) >= MAX_SHARDS:
            raise InputError(f"'{match[0]}' expands to more than {MAX_SHARDS:,} files.")
        choices = [f"{number:0{width}d}" for number in range(int(ends[1]), int(ends[2]) + 1)]
    else:
        choices = match[1].split(",")
    return [name for choice in choices for name in expand(pattern[: match.start()] + choice + pattern[match.end() :])]
