"""What a dataset is, and what every way of reading one shares."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from testtime.images import IMAGE_SUFFIXES
from testtime.types import InputError, StoredImage

CLASSNAMES = "classnames.txt"  # honoured beside images whose labels are numbers


@dataclass(frozen=True)
class Dataset:
    """Images and what is in them; labels score, and train where training is what was asked for."""

    name: str
    paths: Sequence[Path | StoredImage]  # whatever `read_image` reads
    labels: Sequence[int] | None  # None where the images are unlabelled
    classnames: Sequence[str]
    notes: tuple[str, ...] = ()  # what a reader of results should know: images missing, names made up

    def __len__(self) -> int:
        return len(self.paths)


def spaced(name: str) -> str:
    """A class name as it is read: `_` is a space."""
    return name.replace("_", " ")


def some(names: Sequence[str], most: int = 3) -> str:
    """The first few of many names."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def listed_images(folder: Path) -> list[str]:
    """Names of the images of one folder, sorted, so that no order depends on the file system."""
    try:
        names = os.listdir(folder)
    except OSError as problem:
        raise InputError(f"Cannot list {folder}: {problem.strerror or problem}.") from None
    return sorted(n for n in names if not n.startswith(".") and os.path.splitext(n)[1].lower() in IMAGE_SUFFIXES)


def subfolders(folder: Path) -> list[str]:
    """Names of the folders in a folder, sorted, without hidden ones."""
    try:
        return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    except OSError as problem:
        raise InputError(f"Cannot list {folder}: {problem.strerror or problem}.") from None


def present(folder: Path, names: Sequence[str]) -> list[bool]:
    """Which of the files `names` are below a folder; each folder is listed once, where a look at each file is slow."""
    listing: dict[str, set[str]] = {}
    found = []
    for name in names:
        parent, base = posixpath.split(name)
        if parent not in listing:
            try:
                listing[parent] = set(os.listdir(folder / parent))
            except OSError:
                listing[parent] = set()
        found.append(base in listing[parent])
    return found


def number_labels(values: Sequence[str | int | None], beside: Path) -> tuple[list[int] | None, list[str], list[str]]:
    """Labels, class names and notes for labels as they were written: names, or numbers from 0.

    Numbers are named by `classnames.txt` in the folder `beside`, if there is one. Where an image lacks its label,
    there are no labels at all: part of a stream cannot be scored.
    """
    texts = ["" if value is None else str(value).strip() for value in values]
    notes = []
    if unlabelled := texts.count(""):
        if unlabelled < len(texts):
            notes = [f"{unlabelled:,} of {len(texts):,} images have no label, so none is scored"]
        return None, _names(beside) or sorted({spaced(text) for text in texts if text and not text.isdecimal()}), notes
    if not all(text.isdecimal() for text in texts):
        folders = sorted(set(texts))
        position = {text: index for index, text in enumerate(folders)}
        return [position[text] for text in texts], [spaced(text) for text in folders], notes
    labels = [int(text) for text in texts]
    names = _names(beside)
    if names and max(labels, default=0) >= len(names):
        raise InputError(f"{beside / CLASSNAMES} names {len(names)} classes, but there is a label {max(labels)}.")
    if not names:
        names = [str(number) for number in range(max(labels, default=-1) + 1)]
        notes = [f"classes are numbers without names; write one a line in {beside / CLASSNAMES}"]
    return labels, names, notes


def _names(beside: Path) -> list[str]:
    try:
        lines = (beside / CLASSNAMES).read_text(encoding="utf-8-sig").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as problem:
        raise InputError(f"Cannot read {beside / CLASSNAMES}: {problem}.") from None
    return [spaced(line.strip()) for line in lines if line.strip()]
