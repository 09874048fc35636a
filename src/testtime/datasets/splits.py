"""Images listed in a file: the few-shot splits of CoOp, and the text files of FGVC-Aircraft."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from testtime.datasets.dataset import Dataset, content, existing, present, read_text, spaced, subfolders
from testtime.files import parse_json
from testtime.types import InputError

SPLIT = "split_zhou_*.json"  # [path, label, class name] under train, val and test
SAMPLE = 64  # rows that decide which folder a split's paths are relative to


def read_split(file: str | Path, root: str | Path, part: str = "test", folders: Sequence[Path] = ()) -> Dataset:
    """One part of a split file. Listed images that are missing are left out, with a note.

    Paths are relative to one of `folders`, by default `root` or a folder in it: to the one that has most of them.
    Class names are those of all parts, so that every part numbers them the same way.
    """
    file, root = Path(file), Path(root)
    parts = _read(file)
    if part not in parts:
        raise InputError(f"{file} has no part '{part}'; it has {', '.join(parts)}.")
    rows = parts[part]
    if not rows:
        raise InputError(f"{file}: part '{part}' is empty.")
    names: dict[int, str] = {}
    for _, label, name in (row for rows_of_part in parts.values() for row in rows_of_part):
        if names.setdefault(label, name) != name:
            raise InputError(f"{file} is damaged: label {label} is called both '{names[label]}' and '{name}'.")
    numbers = sorted(names)
    position = {label: index for index, label in enumerate(numbers)}
    listed = [path for path, _, _ in rows]
    folder = _image_folder(list(folders) or [root, *(root / name for name in subfolders(root))], listed, root)
    kept, notes = existing(folder, listed, f"{folder} has none of the {len(listed):,} images listed")
    labels = [position[rows[i][1]] for i in kept]
    return Dataset(
        root.name, [folder / listed[i] for i in kept], labels, [spaced(names[n]) for n in numbers], tuple(notes)
    )


def read_aircraft(lists: Path, images: Path, part: str = "test") -> Dataset:
    """FGVC-Aircraft: `variants.txt` has the class names in order, `images_variant_PART.txt` "number class name"."""
    names = _lines(lists / "variants.txt")
    position = {name: index for index, name in enumerate(names)}
    file = lists / f"images_variant_{part}.txt"
    listed, labels = [], []
    for line in _lines(file):
        number, _, name = line.partition(" ")
        if name not in position:
            raise InputError(f"{file} is damaged: '{name}' in the line '{line}' is not in {lists / 'variants.txt'}.")
        listed.append(f"{number}.jpg")
        labels.append(position[name])
    if not listed:
        raise InputError(f"{file} is empty.")
    kept, notes = existing(images, listed, f"{images} has none of the {len(listed):,} images listed")
    return Dataset(lists.name, [images / listed[i] for i in kept], [labels[i] for i in kept], names, tuple(notes))


def _image_folder(folders: Sequence[Path], listed: Sequence[str], root: Path) -> Path:
    """The folder that has most of a sample of the images."""
    sample = listed[:: max(1, len(listed) // SAMPLE)]
    counts = [sum(present(folder, sample)) for folder in folders]
    if not any(counts):
        raise InputError(
            f"{root}: no image {sample[0]} here or one folder down; give the folder that the paths are relative to."
        )
    return folders[counts.index(max(counts))]


def _read(file: Path) -> dict[str, list[tuple[str, int, str]]]:
    try:
        split = parse_json(content(file), f"{file} is not a split file: its text", kind=dict)
        return {part: [_row(*row) for row in rows] for part, rows in split.items()}
    except (ValueError, TypeError):
        raise InputError(f"{file} is not a split file: JSON with lists of [path, label, class name].") from None


def _row(path: object, label: object, name: object) -> tuple[str, int, str]:
    if not (isinstance(path, str) and isinstance(label, (int, str)) and isinstance(name, (int, str))):
        raise TypeError
    # a leading slash would make a path absolute
    return path.lstrip("/"), int(str(label)), str(name)


def _lines(file: Path) -> list[str]:
    return [line.strip() for line in read_text(file).splitlines() if line.strip()]
