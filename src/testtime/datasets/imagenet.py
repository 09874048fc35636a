"""ImageNet and its four variants: images in folders named after classes, by WordNet id or by number."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

from testtime.datasets.benchmarks import Benchmark, data_text
from testtime.datasets.dataset import CLASSNAMES, Dataset, listed_images, read_text, shortened, spaced, subfolders
from testtime.types import InputError

VALIDATION = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG", re.IGNORECASE)


@cache
def class_table() -> dict[str, str]:
    """Class names by WordNet id, in the order of the 1000 labels, which is that of the sorted ids.

    The names are those of CLIP's ImageNet notebook, as DPE, TDA and TPT use them. "missile" (657 and 744) and
    "sunglasses" (836 and 837) name two classes each.
    """
    return _table(data_text("imagenet.txt"))


@cache
def mask(name: str) -> tuple[int, ...]:
    """The positions of a variant's classes among the 1000: 200 of them for imagenet-a and imagenet-r."""
    position = {wnid: index for index, wnid in enumerate(class_table())}
    if name in ("imagenet-a", "imagenet-r"):
        return tuple(position[wnid] for wnid in data_text(f"{name}.txt").split())
    return tuple(position.values())


def class_folders(row: Benchmark) -> list[str]:
    """The names of a variant's class folders, in the order of its labels."""
    if row.name == "imagenet-v2":  # named 0 to 999, in numeric order; sorted names would put 10 before 2
        return [str(number) for number in range(1000)]
    return _wnids(row)


def has_classes(row: Benchmark, folder: Path) -> bool:
    """Whether a folder holds class folders of this variant."""
    return folder.is_dir() and not set(class_folders(row)).isdisjoint(subfolders(folder))


def is_flat(folder: Path) -> bool:
    """Whether ImageNet's validation images are in a folder unsorted, as the archive unpacks them."""
    return folder.is_dir() and any(VALIDATION.fullmatch(name) for name in listed_images(folder))


def read_imagenet(row: Benchmark, home: Path, images: Path) -> Dataset:
    """The images of a variant, class by class. Missing folders and images are noted."""
    if not has_classes(row, images):
        if is_flat(images):
            raise InputError(
                f"{images} holds {len(listed_images(images)):,} images and no class folders, so they have no labels. "
                "Sort them into folders named n01440764, ...; torchvision.datasets.ImageNet does so from the archive."
            )
        raise InputError(f"{images} holds no class folders of {row.title}, such as {class_folders(row)[0]}.")
    folders = class_folders(row)
    present = set(subfolders(images))
    paths: list[Path] = []
    labels: list[int] = []
    for label, folder in enumerate(folders):
        if folder in present:
            found = listed_images(images / folder)
            paths += [images / folder / name for name in found]
            labels += [label] * len(found)
    if not paths:
        raise InputError(f"{images} has class folders of {row.title}, but no image in any of them.")
    notes = []
    if absent := [folder for folder in folders if folder not in present]:
        notes.append(f"{len(absent):,} of {len(folders):,} class folders are missing: {shortened(absent)}")
    if others := sorted(present.difference(folders)):
        notes.append(f"folders that are not a class of {row.title} are left out: {shortened(others)}")
    if row.name == "imagenet-v2":  # ten images per class, under arbitrary names
        incomplete = [label for label, count in sorted(Counter(labels).items()) if count < 10]
        if incomplete:
            first, count = folders[incomplete[0]], labels.count(incomplete[0])
            notes.append(f"{len(incomplete):,} class folders lack images: {first} has {count} of 10 images")
    if row.name == "imagenet" and (gap := _first_gap(paths, row.images)):
        notes.append(f"{gap} is the first image missing")
    return Dataset(row.name, paths, labels, _names(row, home, images), tuple(notes))


def _names(row: Benchmark, home: Path, images: Path) -> list[str]:
    """Class names: those of a classnames.txt in the dataset, or else of the built-in table."""
    table = class_table()
    for file in (home / CLASSNAMES, images / CLASSNAMES):
        if file.is_file():
            table = _table(read_text(file))
            if lacking := [wnid for wnid in _wnids(row) if not table.get(wnid)]:
                raise InputError(
                    f"{file} lacks {len(lacking):,} of {row.classes:,} classes, {lacking[0]} first; "
                    "its lines read 'n01440764 tench'. Fix it, or remove it to use the released names."
                )
            break
    return [spaced(table[wnid]) for wnid in _wnids(row)]


def _wnids(row: Benchmark) -> list[str]:
    wnids = list(class_table())
    return [wnids[index] for index in mask(row.name)]


def _table(text: str) -> dict[str, str]:
    pairs = (line.strip().partition(" ") for line in text.splitlines() if line.strip())
    return {wnid: name.strip() for wnid, _, name in pairs}


def _first_gap(paths: list[Path], count: int) -> str | None:
    """The first of the numbered validation images that is missing, if all files have such names."""
    matches = [VALIDATION.fullmatch(path.name) for path in paths]
    numbers = {int(match[1]) for match in matches if match}
    if len(numbers) < len(paths):
        return None
    return next((f"ILSVRC2012_val_{n:08d}.JPEG" for n in range(1, count + 1) if n not in numbers), None)
