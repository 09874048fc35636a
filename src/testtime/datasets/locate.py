"""Finding a benchmark on disk, in any layout and under any folder name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from testtime.datasets.benchmarks import BENCHMARKS, SPLITS, Benchmark, folded
from testtime.datasets.dataset import Dataset, subfolders
from testtime.datasets.imagenet import has_classes, is_flat, read_imagenet
from testtime.datasets.splits import SPLIT, read_aircraft, read_split
from testtime.types import InputError


class Location(NamedTuple):
    """Where a benchmark is on disk."""

    row: Benchmark
    home: Path  # the dataset's own folder
    images: Path  # its likely image folder
    layout: str  # CoOp, TPT, both (where they agree) or other
    split: Path | None  # the file that lists its images; None if it has none, or it is missing


def locate(row: Benchmark, root: Path, given: bool = False) -> Location | None:
    """Where a benchmark is in `root`, which holds all datasets or is the dataset's own folder.

    `given`: the caller says that the folder is this benchmark, so it may have any name.
    """
    if not root.is_dir():
        raise InputError(f"No folder {root}; give the one that holds the datasets, or the dataset's own.")
    locations = [location for home in _homes(row, root, given) if (location := inspect(row, home))]
    whole = [location for location in locations if location.split or not row.split]
    return next(iter(whole or locations), None)


def identify(home: Path) -> Location | None:
    """The benchmark whose own folder this is, by its name and contents; None if it is none."""
    for row in BENCHMARKS:
        if _has_known_name(row, home) and (location := inspect(row, home)) and (location.split or not row.split):
            return location
    return None


def inspect(row: Benchmark, home: Path) -> Location | None:
    """The benchmark in one folder, complete or not; None if it is not there."""
    insides = [home / name for name in row.inside if (home / name).is_dir()]
    if row.kind == "imagenet":
        found = [folder for folder in insides if has_classes(row, folder)]
        found += [folder for folder in insides if row.name == "imagenet" and is_flat(folder)]
        return Location(row, home, found[0], _layout(row, home, found[0]), None) if found else None
    if not insides:
        return None
    split = _split_file(row, home, insides[0])
    if split is None and insides[0] == home and not _has_known_name(row, home):
        return None  # nothing here identifies the benchmark
    return Location(row, home, insides[0], _layout(row, home, insides[0]), split)


def open_benchmark(row: Benchmark, root: Path, part: str) -> Dataset:
    """A part of a benchmark that should be in `root`, which holds all datasets or is the dataset's own folder."""
    location = locate(row, root, given=True)
    if location is None:
        raise InputError(
            f"{row.title} is not in {root}: looked for {row.coop} and {row.tpt}. Download {row.archive} "
            f"from {row.source}; 'testtime data check {root}' shows what it holds."
        )
    return read_benchmark(location, part)


def read_benchmark(location: Location, part: str = "test") -> Dataset:
    """The images of a benchmark, with notes if its test part differs in size from the published one."""
    row = location.row
    if row.kind == "imagenet":
        data = _imagenet_part(location, part)
    elif location.split is None:
        raise InputError(
            f"{location.home} has no {row.split}, and neither has data_splits/ beside it. "
            + (f"It is linked from {SPLITS}." if row.kind == "split" else f"It comes with {row.archive}.")
        )
    elif row.kind == "aircraft":
        data = read_aircraft(location.split.parent, location.images, part)
    else:
        insides = [location.home / name for name in row.inside]
        data = read_split(location.split, location.home, part, [folder for folder in insides if folder.is_dir()])
    counts = _size_notes(row, data) if part == "test" else []
    return replace(data, name=row.name, notes=(*counts, *data.notes))


def _size_notes(row: Benchmark, data: Dataset) -> list[str]:
    """How a test part differs from the published one, if it does."""
    notes = []
    if lacking := row.images - len(data):
        missing = f"{lacking:,} of its {row.images:,} test images are missing"
        notes.append(missing if lacking > 0 else f"{-lacking:,} more than the {row.images:,} images of its test part")
    if len(data.classnames) != row.classes:
        notes.append(f"{len(data.classnames):,} classes instead of {row.classes:,}")
    return notes


def _imagenet_part(location: Location, part: str) -> Dataset:
    row = location.row
    if part in ("test", "val"):
        return read_imagenet(row, location.home, location.images)
    train = location.images.with_name("train")
    if row.name != "imagenet" or part != "train" or not train.is_dir():
        raise InputError(f"{row.title} in {location.home} has no part '{part}'; it has test.")
    # training images have no such numbers, so only missing class folders are noted
    return read_imagenet(row, location.home, train)


def _homes(row: Benchmark, root: Path, given: bool) -> Iterator[Path]:
    """Folders that may be the benchmark's own, likeliest first."""
    if _has_known_name(row, root):
        yield root
    known = [Path(row.coop).parts[0], Path(row.tpt).parts[0]]
    children = [root / name for name in subfolders(root) if _has_known_name(row, root / name)]
    yield from sorted(children, key=lambda home: (known.index(home.name) if home.name in known else 2, home.name))
    # a folder with several splits holds several datasets
    if not _has_known_name(row, root) and (given or [file.name for file in root.glob(SPLIT)] == [row.split]):
        yield root


def _has_known_name(row: Benchmark, home: Path) -> bool:
    return folded(home.resolve().name) in map(folded, row.folders) or folded(home.name) in map(folded, row.folders)


def _split_file(row: Benchmark, home: Path, images: Path) -> Path | None:
    if row.kind == "aircraft":
        file = images.parent / row.split
        return file if file.is_file() else None
    beside = home.parent
    for folder in (home, beside, beside / "data_splits", beside / "data" / "data_splits"):
        if (folder / row.split).is_file():
            return folder / row.split
    return None


def _layout(row: Benchmark, home: Path, images: Path) -> str:
    path = (Path(home.name) / images.relative_to(home)).as_posix()
    for same in (str, folded):
        layouts = [n for n, known in (("CoOp", row.coop), ("TPT", row.tpt)) if same(path) == same(known)]
        if layouts:
            return layouts[0] if len(layouts) == 1 else "both"
    return "other"
