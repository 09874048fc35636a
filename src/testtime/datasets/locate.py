"""Finding a benchmark on disk, by looking: whichever layout it is in, and whatever its folder is called."""

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


class Place(NamedTuple):
    """Where a benchmark lies."""

    row: Benchmark
    home: Path  # the dataset's own folder
    images: Path  # where its images start, as far as can be seen from outside
    layout: str  # CoOp, TPT, both (where they agree) or other
    split: Path | None  # the file that lists its images; None where it has none, or it is missing


def locate(row: Benchmark, root: Path, given: bool = False) -> Place | None:
    """Where a benchmark lies in `root`, which holds all datasets or is the dataset's own folder.

    `given` says that the folder is meant to be this benchmark, so it may be called anything.
    """
    if not root.is_dir():
        raise InputError(f"No folder {root}; give the one that holds the datasets, or the dataset's own.")
    places = [place for home in _homes(row, root, given) if (place := look(row, home))]
    whole = [place for place in places if place.split or not row.split]
    return next(iter(whole or places), None)


def identify(home: Path) -> Place | None:
    """The benchmark whose own folder this is, by its name and by what it holds; None if it is of another kind."""
    for row in BENCHMARKS:
        if _called(row, home) and (place := look(row, home)) and (place.split or not row.split):
            return place
    return None


def look(row: Benchmark, home: Path) -> Place | None:
    """The benchmark in one folder, if it is there, or what is there of it."""
    insides = [home / name for name in row.inside if (home / name).is_dir()]
    if row.kind == "imagenet":
        found = [folder for folder in insides if has_classes(row, folder)]
        found += [folder for folder in insides if row.name == "imagenet" and is_flat(folder)]
        return Place(row, home, found[0], _layout(row, home, found[0]), None) if found else None
    if not insides:
        return None
    split = _split_file(row, home, insides[0])
    if split is None and insides[0] == home and not _called(row, home):
        return None  # nothing in this folder speaks for the benchmark
    return Place(row, home, insides[0], _layout(row, home, insides[0]), split)


def open_benchmark(row: Benchmark, root: Path, part: str) -> Dataset:
    """A part of a benchmark that should lie in `root`, which holds all datasets or is the dataset's own folder."""
    place = locate(row, root, given=True)
    if place is None:
        raise InputError(
            f"{row.title} is not in {root}: looked for {row.coop} and {row.tpt}. Download {row.archive} "
            f"from {row.source}; 'testtime data check {root}' shows what is there."
        )
    return read_benchmark(place, part)


def read_benchmark(place: Place, part: str = "test") -> Dataset:
    """The images of a benchmark, counted against what its test part is known to hold."""
    row = place.row
    if row.kind == "imagenet":
        data = _imagenet_part(place, part)
    elif place.split is None:
        raise InputError(
            f"{place.home} has no {row.split}, nor has data_splits/ beside it. "
            + (f"It is linked from {SPLITS}." if row.kind == "split" else f"It comes with {row.archive}.")
        )
    elif row.kind == "aircraft":
        data = read_aircraft(place.split.parent, place.images, part)
    else:
        insides = [place.home / name for name in row.inside]
        data = read_split(place.split, place.home, part, [folder for folder in insides if folder.is_dir()])
    counts = _counted(row, data) if part == "test" else []
    return replace(data, name=row.name, notes=(*counts, *data.notes))


def _counted(row: Benchmark, data: Dataset) -> list[str]:
    """How a test part differs from the published one, if it does."""
    notes = []
    if lacking := row.images - len(data):
        missing = f"{lacking:,} of its {row.images:,} test images are missing"
        notes.append(missing if lacking > 0 else f"{-lacking:,} more than the {row.images:,} images of its test part")
    if len(data.classnames) != row.classes:
        notes.append(f"{len(data.classnames):,} classes where it has {row.classes:,}")
    return notes


def _imagenet_part(place: Place, part: str) -> Dataset:
    row = place.row
    if part in ("test", "val"):
        return read_imagenet(row, place.home, place.images)
    train = place.images.with_name("train")
    if row.name != "imagenet" or part != "train" or not train.is_dir():
        raise InputError(f"{row.title} in {place.home} has no part '{part}'; it has test.")
    # the validation images' numbers mean nothing here, so what is missing is said by class folder alone
    return read_imagenet(row, place.home, train)


def _homes(row: Benchmark, root: Path, given: bool) -> Iterator[Path]:
    """Folders that may be the benchmark's own, likeliest first."""
    if _called(row, root):
        yield root
    known = [Path(row.coop).parts[0], Path(row.tpt).parts[0]]
    children = [root / name for name in subfolders(root) if _called(row, root / name)]
    yield from sorted(children, key=lambda home: (known.index(home.name) if home.name in known else 2, home.name))
    # a folder with several splits is one that datasets lie beside
    if not _called(row, root) and (given or [file.name for file in root.glob(SPLIT)] == [row.split]):
        yield root


def _called(row: Benchmark, home: Path) -> bool:
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
