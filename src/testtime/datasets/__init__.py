"""Labelled images on disk: folders named after classes, or a folder with a split file beside the images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from testtime.images import find_images, labels_from_folders
from testtime.types import InputError

SPLIT = "split_zhou_*.json"  # the few-shot splits of CoOp: [path, label, class name] under train, val and test


class Dataset(NamedTuple):
    """Images and what is in them; labels score, and train where training is what was asked for."""

    name: str
    paths: Sequence[Path]
    labels: Sequence[int]
    classnames: Sequence[str]

    def __len__(self) -> int:
        return len(self.paths)


def open_dataset(root: str | Path, part: str = "test") -> Dataset:
    """The images of a folder: as its split file says, if it has one, else as its class folders do."""
    root = Path(root)
    if not root.is_dir():
        raise InputError(f"No folder {root}; a dataset is a folder of class folders, or has a {SPLIT}.")
    splits = sorted(root.glob(SPLIT))
    if len(splits) > 1:
        raise InputError(f"{root} has {len(splits)} split files ({', '.join(s.name for s in splits)}); keep one.")
    return read_split(splits[0], root, part) if splits else read_folders(root)


def read_split(file: str | Path, root: str | Path, part: str = "test") -> Dataset:
    """One part of a split file; images lie in the folder of `root` that holds them."""
    try:
        split = json.loads(Path(file).read_text(encoding="utf-8"))
        rows = [(str(path), int(label), str(name)) for path, label, name in split[part]]
    except OSError as problem:
        raise InputError(f"Cannot read {file}: {problem.strerror or problem}.") from None
    except KeyError:
        raise InputError(f"{file} has no part '{part}'; it has {', '.join(split)}.") from None
    except (ValueError, TypeError):
        raise InputError(f"{file} is not a split file: JSON with lists of [path, label, class name].") from None
    if not rows:
        raise InputError(f"{file}: part '{part}' is empty.")
    names = dict(sorted({label: name for _, label, name in rows}.items()))
    position = {label: index for index, label in enumerate(names)}
    folder = _image_folder(Path(root), rows[0][0])
    return Dataset(
        Path(root).name,
        [folder / path for path, _, _ in rows],
        [position[label] for _, label, _ in rows],
        [name.replace("_", " ") for name in names.values()],
    )


def read_folders(root: str | Path) -> Dataset:
    """A folder of class folders; names come sorted."""
    root = Path(root)
    names = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(names) < 2:
        raise InputError(f"{root} holds {len(names)} class folders; two or more are needed.")
    paths = find_images(root)
    labels = [names.index(path.relative_to(root).parts[0]) for path in paths if len(path.relative_to(root).parts) > 1]
    if len(labels) != len(paths):
        loose = [path for path, label in zip(paths, labels_from_folders(paths, names), strict=True) if label is None]
        raise InputError(f"{root}: {len(loose)} images lie in no class folder, {loose[0].name} first.")
    return Dataset(root.name, paths, labels, [name.replace("_", " ") for name in names])


def _image_folder(root: Path, first: str) -> Path:
    """The folder under which a split's paths are found: the root, or the one folder in it that has the first."""
    places = [root, *sorted(path for path in root.iterdir() if path.is_dir())]
    for place in places:
        if (place / first).exists():
            return place
    raise InputError(
        f"{root}: no image {first} here or one folder down; give the folder that the split's paths start from."
    )
