"""The dataset type, and what all readers share."""

from __future__ import annotations

import os
import posixpath
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from testtime.display import line, listed
from testtime.files import read_bytes
from testtime.images.reading import IMAGE_SUFFIXES, class_numbers, labels_from_folders
from testtime.registry import folded_name
from testtime.types import InputError, StoredImage

CLASSNAMES = "classnames.txt"  # names the classes of images whose labels are numbers
UNNAMED = "classes are numbers without names"
MAX_CLASSES = 100_000  # for numbers without names; a larger number is an id, and would make as many names


@dataclass(frozen=True)
class Dataset:
    """Images and their classes; labels are used for scoring, and for training if that is requested."""

    name: str
    paths: Sequence[Path | StoredImage]  # whatever `read_image` reads
    labels: Sequence[int] | None  # None where the images are unlabelled
    classnames: Sequence[str]
    notes: tuple[str, ...] = ()  # caveats for the results: missing images, made-up names

    def __post_init__(self) -> None:
        # names are printed, encoded and stored, even if a folder's name is not UTF-8
        object.__setattr__(self, "name", _printable(self.name))
        object.__setattr__(self, "classnames", [_printable(name) for name in self.classnames])

    def __len__(self) -> int:
        return len(self.paths)

    def __repr__(self) -> str:
        classes = f"{len(self.classnames)} classes: {listed(self.classnames)}" if self.classnames else "no class names"
        labelled = "no labels" if self.labels is None else "labelled"
        return f"Dataset({line(self.name, 24)}, {len(self):,} images, {labelled}, {classes})"


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def spaced(name: str) -> str:
    """A class name as it is read: `_` is a space."""
    return name.replace("_", " ")


def shortened(names: Sequence[str], most: int = 3) -> str:
    """The first few names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def listed_images(folder: Path, suffixes: Sequence[str] = IMAGE_SUFFIXES) -> list[str]:
    """Names of the images of one folder, sorted, so that no order depends on the file system."""
    try:
        names = os.listdir(folder)
    except OSError as problem:
        raise InputError(f"Cannot list {folder}: {problem.strerror or problem}.") from None
    return sorted(n for n in names if not n.startswith(".") and os.path.splitext(n)[1].lower() in suffixes)


def subfolders(folder: Path) -> list[str]:
    """Names of the folders in a folder, sorted, without hidden ones."""
    try:
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except OSError as problem:
        raise InputError(f"Cannot list {folder}: {problem.strerror or problem}.") from None
    return sorted(entry.name for entry in entries if _is_folder(entry))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def present(folder: Path, names: Sequence[str]) -> list[bool]:
    """Which of the files `names` are below a folder; each folder is listed once, since a stat of each file is slow."""
    listing: dict[str, set[str]] = {}
    found = []
    for name in names:
        parent, base = posixpath.split(name)
        if parent not in listing:
            try:
                listing[parent] = set(os.listdir(folder / parent))
            except (OSError, ValueError):  # not a valid file name: a NUL, a lone surrogate
                listing[parent] = set()
        found.append(base in listing[parent])
    return found


def existing(folder: Path, listed: Sequence[str], none: str) -> tuple[list[int], list[str]]:
    """Which of the images listed are below a folder, and a note on those that are not; `none` starts the error."""
    there = present(folder, listed)
    missing = [name for name, found in zip(listed, there, strict=True) if not found]
    if len(missing) == len(listed):
        raise InputError(f"{none}, {listed[0]} first.")
    notes = [f"{len(missing):,} of {len(listed):,} listed images are missing, {missing[0]} first"] if missing else []
    return [index for index, found in enumerate(there) if found], notes


def content(file: Path) -> bytes:
    """The bytes of a dataset's file; the error says why it cannot be read."""
    try:
        return read_bytes(file)
    except OSError as problem:
        raise InputError(f"Cannot read {file}: {problem.strerror or problem}.") from None


def read_text(file: Path) -> str:
    """Likewise, as text."""
    try:
        return content(file).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"Cannot read {file}: it is not text, or not UTF-8.") from None


def number_labels(
    values: Sequence[object], beside: Path, where: str, given: Sequence[str] = ()
) -> tuple[list[int] | None, list[str], list[str]]:
    """Labels, class names and notes from raw labels: names, or numbers from 0.

    Numbers are named by `given`, or else by `classnames.txt` in the folder `beside`, if there is one. If any image
    lacks its label, there are no labels at all: part of a stream cannot be scored. `where` names the source of the
    values.
    """
    texts = [written(value, where) for value in values]
    notes = []
    if unlabelled := texts.count(""):
        if unlabelled < len(texts):
            notes = [f"{unlabelled:,} of {len(texts):,} images have no label, so none is scored"]
        found = sorted({spaced(text) for text in texts if text and not text.isdecimal()})
        return None, [spaced(name) for name in given] or _names(beside) or found, notes
    if not all(text.isdecimal() for text in texts):
        if given:
            odd = next(text for text in texts if not text.isdecimal())
            raise InputError(f"{where} should hold the numbers of {len(given)} classes; it holds {odd[:40]!r}.")
        folders = sorted(set(texts))
        position = {text: index for index, text in enumerate(folders)}
        return [position[text] for text in texts], [spaced(text) for text in folders], notes
    # a number too long to be a class is not parsed
    labels = [int(text) if len(text) < 19 else sys.maxsize for text in texts]
    most = max(labels, default=-1)
    largest = texts[labels.index(most)][:40] if texts else ""
    names = [spaced(name) for name in given] or _names(beside)
    if names and most >= len(names):
        source = where if given else beside / CLASSNAMES
        raise InputError(
            f"{source} names {len(names)} classes, but there is a label {largest}.{_from_one(labels, len(names))}"
        )
    if not names and most >= MAX_CLASSES:
        raise InputError(
            f"{where} holds {largest}, but class numbers start at 0 and must be below {MAX_CLASSES:,}. "
            "If it is a class, write the class's name; if it is an id, remove it or do not call it a label."
        )
    if not names:
        names = [str(number) for number in range(most + 1)]
        notes = [f"{UNNAMED}; write one name per line in {beside / CLASSNAMES}"]
    return labels, names, notes


def written(value: object, where: str) -> str:
    """A label as text: a name or a whole number; empty if it is missing."""
    match value:
        case None:
            return ""
        case str():
            return value.strip()
        case int():
            return str(value)
        case float() if value.is_integer():
            return str(int(value))
    found = value if isinstance(value, float) else f"a {type(value).__name__}"
    raise InputError(f"{where} holds {found}; a label must be a name, or a whole number from 0.")


def labels_among(data: Dataset, classnames: Sequence[str]) -> list[int | None]:
    """Each image's class as an index into `classnames`; None if it is none of them, or unknown.

    Names are compared without case, and `_` counts as a space. A dataset without names has numbers, which index
    `classnames`. If a dataset has no labels, or none of these classes, an image's own folder may still be named after
    one.

    >>> labels_among(Dataset("pets", [Path("a"), Path("b")], [1, 0], ["Cat", "red_fox"]), ["red fox", "dog"])
    [0, None]
    """
    if data.labels is not None and len(data.labels):
        if [folded_name(name) for name in data.classnames] == [folded_name(name) for name in classnames]:
            return list(data.labels)  # also where two classes share a name
        if list(data.classnames) == [str(number) for number in range(len(data.classnames))]:
            if (most := max(data.labels)) >= len(classnames):
                hint = _from_one(data.labels, len(classnames))
                raise InputError(f"{data.name} has a label {most}, but {len(classnames)} classes are given.{hint}")
            return list(data.labels)
        numbers = class_numbers(classnames)
        known = [numbers.get(folded_name(name)) for name in data.classnames]
        if any(number is not None for number in known):
            return [known[label] for label in data.labels]
    return labels_from_folders([str(path) for path in data.paths], classnames)


def _from_one(labels: Sequence[int], classes: int) -> str:
    """A hint if numbers from 1 to C were given as labels."""
    starts_at_one = min(labels) == 1 and max(labels) == classes
    return " The labels seem to start at 1: subtract 1 from each, since they start at 0." if starts_at_one else ""


def _names(beside: Path) -> list[str]:
    if not (beside / CLASSNAMES).exists():
        return []
    return [spaced(line.strip()) for line in read_text(beside / CLASSNAMES).splitlines() if line.strip()]
