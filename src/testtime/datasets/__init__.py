"""Images to classify: the field's benchmarks by name, and your own in any of six forms."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from testtime.datasets import own, remote, shards, tables
from testtime.datasets.benchmarks import BENCHMARKS, DATASETS, Benchmark, benchmark, templates
from testtime.datasets.dataset import UNNAMED, Dataset, labels_among, listed_images, subfolders
from testtime.datasets.locate import Location, identify, locate, open_benchmark, read_benchmark
from testtime.datasets.matching import describe
from testtime.datasets.own import read_folders
from testtime.datasets.splits import SPLIT, read_split
from testtime.files.remote import is_url
from testtime.images import formats
from testtime.images.formats import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from testtime.text.prompts import check_classes
from testtime.types import InputError, MissingPart

__all__ = [
    "BENCHMARKS", "DATASETS", "Benchmark", "Dataset", "Location", "benchmark", "find_dataset", "identify",
    "labels_among", "locate", "open_dataset", "read_benchmark", "read_folders", "read_split", "templates",
    "with_classes",
]  # fmt: skip

FORMS = (
    "class folders, images, videos, a split_zhou_*.json, .tar shards, Parquet, a saved Hugging Face dataset or a CSV"
)
STANDARD_INPUT = "-"


def open_dataset(what: str | Path, *, root: str | Path | None = None, part: str = "test", every: str = "1s") -> Dataset:
    """The images that `what` names, with their labels if there are any.

    `what` is the short name of a benchmark, with `root` the folder that holds the datasets or the benchmark's own (or
    of a plug-in's dataset, with the folder that it needs); or a path, whose contents decide:

    - a benchmark's own folder, in CoOp's or TPT's layout, or any folder with a `split_zhou_*.json`
    - a folder of class folders, or of the parts train, val and test with class folders in them
    - a folder, a pattern or a list (.txt) of images without labels; one image; `-` for a list on standard input
    - .tar shards in webdataset's form: a file, a folder of them, or a pattern such as `shard-{000..009}.tar`
    - a folder that `datasets` has saved (`save_to_disk`), or Parquet files
    - a CSV, TSV or JSON-lines file of path and label
    - a URL of images or .tar shards that fsspec reads, such as `s3://bucket/photos`

    A video, wherever it is, stands for its frames: one `every` so often ("1s", "500ms"), or every n-th ("10f"). They
    have the video's label. Problems that do not stop the stream are listed in `notes`, and so are files left out.
    """
    from testtime.images.video import describe, expand, parse_every

    interval, data = parse_every(every), _open(what, root, part)
    if not any(map(formats.is_video, data.paths)):
        return data
    groups = [expand(path, interval) for path in data.paths]
    labels = data.labels and [label for label, group in zip(data.labels, groups, strict=True) for _ in group]
    paths = [image for group in groups for image in group]
    return replace(data, paths=paths, labels=labels, notes=(*describe(paths, every), *data.notes))


def _open(what: str | Path, root: str | Path | None, part: str) -> Dataset:
    """The dataset with videos as they are."""
    text = os.path.expanduser(what)
    if not str(what).strip():
        raise InputError(f"No images given: an empty name. A dataset is {FORMS}.")
    if root is not None:
        found, folder = DATASETS.find(str(what)), Path(os.path.expanduser(root))
        return open_benchmark(found, folder, part) if isinstance(found, Benchmark) else found(folder, part)
    if is_url(text):
        return remote.read_url(text)
    path = Path(text)
    if text == STANDARD_INPUT:
        return own.read_unlabelled(text)
    if path.is_dir():
        return _open_folder(path, part)
    if path.is_file():
        return _open_file(path, part)
    if os.path.exists(text):
        raise InputError(f"{text} is neither a file nor a folder, but a pipe, a socket or a device.")
    if text.endswith(".tar") and ("{" in text or glob.has_magic(text)):
        return shards.read_shards(archives := shards.find_shards(text), path.stem, archives[0].parent)
    if glob.has_magic(text):
        return own.read_unlabelled(text)
    if DATASETS.known(text):
        raise InputError(
            f"{text} is a benchmark: give --root FOLDER, the folder of all datasets or the benchmark's own."
        )
    raise InputError(f"No folder, file or benchmark {text}. A dataset is {FORMS}.")


def find_dataset(what: str, root: Path | None = None, *, labelled: bool = True, every: str = "1s") -> Dataset:
    """A dataset by its path, or a benchmark by its short name in the folder `root` that holds it.

    One without labels is refused, unless `labelled` is False.
    """
    where = None if os.path.exists(os.path.expanduser(what)) else root
    dataset = open_dataset(what, root=where, every=every)
    if labelled and dataset.labels is None:
        why = f" ({'; '.join(dataset.notes)})" if dataset.notes else ""
        raise InputError(f"{what} has no labels to score with{why}: put images in folders named after their classes.")
    return dataset


def with_classes(
    data: Dataset, given: Sequence[str] | None, way_out: str
) -> tuple[tuple[str, ...], list[int | None], list[str]]:
    """The classes to tell apart, each image's class where it is known, and notes, on names without a partner too.

    Classes are those given, or else the dataset's own; the error for one that has none ends with `way_out`.
    """
    if given is None and not data.classnames:
        raise InputError(f"{data.name} has no class names. {way_out}")
    if given is None:
        names = check_classes(data.classnames, allow_duplicates=True)
        return names, labels_among(data, names), list(data.notes)
    names = check_classes(given, allow_duplicates=tuple(given) == tuple(data.classnames))
    labels = labels_among(data, names)
    notes = [note for note in data.notes if not note.startswith(UNNAMED)]
    return names, labels, notes + describe(data, names, labels)


def _open_file(file: Path, part: str) -> Dataset:
    match file.suffix.lower():
        case ".json":
            return read_split(file, file.parent, part)
        case suffix if suffix in own.TABLES:
            return own.read_table(file)
        case ".tar":
            return shards.read_shards([file], file.stem, file.parent)
        case ".parquet":
            return tables.read_tables([file], file.stem, file.parent)
        case suffix if command := formats.missing(suffix):
            raise MissingPart(f"{file} is left out: what reads {suffix} is not installed. Try {command}.")
        case suffix if suffix in ("", ".txt", ".lst", *IMAGE_SUFFIXES, *VIDEO_SUFFIXES):
            return own.read_unlabelled(file)
    raise InputError(f"{file} is not a dataset. A dataset is {FORMS}.")


def _open_folder(folder: Path, part: str) -> Dataset:
    if tables.is_saved(folder):
        return tables.read_saved(folder, part)
    if location := identify(folder):
        return read_benchmark(location, part)
    splits = sorted(folder.glob(SPLIT))
    if len(splits) > 1:
        raise InputError(f"{folder} has {len(splits)} split files ({', '.join(s.name for s in splits)}); keep one.")
    if splits:
        return read_split(splits[0], folder, part)
    if files := tables.find_parquet(folder, part):
        return tables.read_tables(files, folder.name, folder)
    if archives := shards.find_shards(folder):
        return shards.read_shards(archives, folder.name, folder)
    if part_folder := own.part_folder(folder, part):
        inside = _open_folder(part_folder, part)
        return replace(inside, name=folder.name, notes=(f"the images are from {part_folder}", *inside.notes))
    for name in ("metadata.csv", "metadata.jsonl"):
        if (folder / name).is_file():
            return own.read_table(folder / name)
    folders, loose = subfolders(folder), listed_images(folder, formats.readable_suffixes())
    if len(folders) > 1 and not loose:
        return read_folders(folder)
    if folders or loose:
        mixed = (f"{len(loose)} images are in no class folder, {loose[0]} first",) if folders and loose else ()
        data = own.read_unlabelled(folder)
        return replace(data, notes=(*mixed, *data.notes))
    rest = formats.left_out(name for name in os.listdir(folder) if not name.startswith("."))
    raise InputError(f"{folder} holds no dataset: {'; '.join(rest) or FORMS}.")
