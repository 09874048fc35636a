"""Your own images: folders named after classes, a folder without labels, or a table of paths and labels."""

from __future__ import annotations

import csv
from pathlib import Path

from testtime.datasets.dataset import Dataset, existing, listed_images, number_labels, read_text, spaced, subfolders
from testtime.datasets.imagenet import class_table
from testtime.files import parse_json
from testtime.images.formats import readable_suffixes
from testtime.images.reading import search
from testtime.types import InputError

PARTS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing", "eval"),
}
PATH_COLUMNS = ("path", "file_name", "filename", "file", "image", "image_path", "filepath")
LABEL_COLUMNS = ("label", "class", "classname", "class_name", "category", "target", "labels")
TABLES = (".csv", ".tsv", ".jsonl")


def part_names(part: str) -> tuple[str, ...]:
    """The names that a part may have: 'val' is also 'validation'."""
    return next((names for names in PARTS.values() if part in names), (part,))


def read_folders(root: str | Path) -> Dataset:
    """A folder of class folders, sorted by name. WordNet ids are read as ImageNet's classes."""
    root = Path(root)
    names = subfolders(root)
    if len(names) < 2:
        raise InputError(f"{root} holds {len(names)} class folders; two or more are needed.")
    if loose := listed_images(root, readable_suffixes()):
        raise InputError(f"{root}: {len(loose)} images are in no class folder, {loose[0]} first.")
    paths, notes = search(root)
    position = {name: label for label, name in enumerate(names)}
    labels = [position[path.relative_to(root).parts[0]] for path in paths]
    known = class_table()
    if all(name in known for name in names):
        return Dataset(root.name, paths, labels, [known[name] for name in names], notes)
    return Dataset(root.name, paths, labels, [spaced(name) for name in names], notes)


def read_unlabelled(source: str | Path) -> Dataset:
    """The images and videos of a folder, a pattern, a list or one file, without labels."""
    name = Path(source).stem
    paths, notes = search(source)
    return Dataset(name if name.strip("-.*") else "images", paths, None, [], notes)


def part_folder(root: Path, part: str) -> Path | None:
    """The folder of one part, if all folders of `root` are named after parts; else None."""
    folders = subfolders(root)
    known = {name for names in PARTS.values() for name in names}
    if not folders or not known.issuperset(folders):
        return None
    for name in part_names(part):
        if name in folders:
            return root / name
    raise InputError(f"{root} has no part '{part}'; it has {', '.join(folders)}.")


def read_table(file: Path) -> Dataset:
    """Paths and labels from a CSV, TSV or JSON-lines file. Paths are relative to the file's own folder.

    A CSV has columns path and label, by a header or in that order; a label is a name or a number from 0. Missing
    images are left out, with a note.
    """
    text = read_text(file)
    try:
        rows, column = _json_rows(file, text) if file.suffix.lower() == ".jsonl" else _csv_rows(file, text)
    except (csv.Error, ValueError) as problem:
        raise InputError(f"{file} is not a table of images: {problem}.") from None
    if not rows:
        raise InputError(f"{file} lists no images; its lines read path,label.")
    listed = [path for path, _ in rows]
    kept, missing = existing(file.parent, listed, f"None of the {len(rows):,} images in {file} exists")
    labels, names, notes = number_labels([label for _, label in rows], file.parent, f"{column} of {file}")
    return Dataset(
        file.parent.name if file.stem == "metadata" else file.stem,
        [file.parent / listed[i] for i in kept],
        None if labels is None else [labels[i] for i in kept],
        names,
        (*missing, *notes),
    )


def _csv_rows(file: Path, text: str) -> tuple[list[tuple[str, object]], str]:
    """Paths and labels, and the column of the labels."""
    delimiter = "\t" if file.suffix.lower() == ".tsv" else ","
    rows = [row for row in csv.reader(text.splitlines(), delimiter=delimiter, strict=True) if any(row)]
    head = [cell.strip().lower() for cell in rows[0]] if rows else []
    if not set(head).isdisjoint(PATH_COLUMNS):
        path = next(head.index(name) for name in PATH_COLUMNS if name in head)
        label = next((head.index(name) for name in LABEL_COLUMNS if name in head), None)
        column = f"Column '{head[label or 0]}'"
        rows = rows[1:]
    else:
        path, label, column = 0, 1 if len(head) > 1 else None, "Column 2"
    if incomplete := [row for row in rows if len(row) <= max(path, label or 0)]:
        raise ValueError(f"the row {delimiter.join(incomplete[0])!r} is too short")
    return [(row[path].strip(), None if label is None else row[label]) for row in rows], column


def _json_rows(file: Path, text: str) -> tuple[list[tuple[str, object]], str]:
    """Paths and labels, and the key of the labels."""
    rows, column = [], "Label"
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            values = parse_json(line, f"{file} is not a table of images: line {number}", kind=dict)
            path = next((values[name] for name in PATH_COLUMNS if name in values), None)
            if not isinstance(path, str):
                raise ValueError(f"line {number} has none of {', '.join(PATH_COLUMNS)}, or one that is not text")
            label = next((name for name in LABEL_COLUMNS if name in values), None)
            column = column if label is None else f"Label '{label}'"
            rows.append((path, None if label is None else values[label]))
    return rows, column
