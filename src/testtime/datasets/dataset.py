"""What a dataset is, and what every way of reading one shares."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from testtime.images import IMAGE_SUFFIXES, class_numbers, folded_name, labels_from_folders
from testtime.types import InputError, StoredImage

CLASSNAMES = "classnames.txt"  # honoured beside images whose labels are numbers
NAMELESS = "classes are numbers without names"


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
        notes = [f"{NAMELESS}; write one a line in {beside / CLASSNAMES}"]
    return labels, names, notes


def labels_among(data: Dataset, classnames: Sequence[str]) -> list[int | None]:
    """For each image, which of the classes asked for it shows; None where it shows none of them, or it is not known.

    Names are compared without case, and `_` counts as a space. A dataset without names has numbers, which count
    through the classes asked for. Where a dataset has no labels, or none of these classes, an image's own folder
    may still be named after one.

    >>> labels_among(Dataset("pets", [Path("a"), Path("b")], [1, 0], ["Cat", "red_fox"]), ["red fox", "dog"])
    [0, None]
    """
    if data.labels is not None and len(data.labels):
        if [folded_name(name) for name in data.classnames] == [folded_name(name) for name in classnames]:
            return list(data.labels)  # also where two classes share a name
        if list(data.classnames) == [str(number) for number in range(len(data.classnames))]:
            if (most := max(data.labels)) >= len(classnames):
                raise InputError(f"{data.name} has a label {most}, where {len(classnames)} classes are asked for.")
            return list(data.labels)
        numbers = class_numbers(classnames)
        known = [numbers.get(folded_name(name)) for name in data.classnames]
        if any(number is not None for number in known):
            return [known[label] for label in data.labels]
    return labels_from_folders([str(path) for path in data.paths], classnames)


def _names(beside: Path) -> list[str]:
    try:
        lines = (beside / CLASSNAMES).read_text(encoding="utf-8-sig").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as problem:
        raise InputError(f"Cannot read {beside / CLASSNAMES}: {problem}.") from None
    return [spaced(line.strip()) for line in lines if line.strip()]
