"""Hugging Face datasets on disk: `save_to_disk` folders of Arrow files, and Parquet files. Needs pyarrow alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from testtime.datasets.dataset import Dataset, number_labels, spaced
from testtime.datasets.own import LABEL_COLUMNS, part_names
from testtime.types import ImageError, InputError, MissingPart

IMAGE_COLUMNS = ("image", "img", "jpg", "png")


class TableImage(NamedTuple):
    """An image in a row of a table; its bytes are read when asked for."""

    file: Path
    column: str
    group: int  # a batch of an Arrow file, a row group of a Parquet file
    row: int

    def read_bytes(self) -> bytes:
        value = _group(self.file, self.column, self.group)[self.row].as_py()
        if isinstance(value, dict):  # the bytes themselves, or the path of a file
            value = value.get("bytes") or value.get("path")
        if isinstance(value, str):
            return (self.file.parent / value).read_bytes()
        if value is None:
            raise ImageError(f"{self}: the row holds no image.")
        return value

    def __str__(self) -> str:
        return f"{self.file}/{self.group}-{self.row}"


class Columns(NamedTuple):
    """Which columns of a table hold the images and their labels."""

    image: str
    label: str | None
    names: Sequence[str] | None  # class names that the table itself gives to its numbers


def is_saved(folder: Path) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def read_saved(folder: Path, part: str) -> Dataset:
    """A dataset that `datasets` has saved: one part of it, where it has parts."""
    home = folder
    if (folder / "dataset_dict.json").is_file():
        parts = _json(folder / "dataset_dict.json").get("splits", [])
        chosen = next((name for name in part_names(part) if name in parts), None)
        if chosen is None:
            raise InputError(f"{folder} has no part '{part}'; it has {', '.join(parts) or 'none'}.")
        home = folder / chosen
    state = _json(home / "state.json")
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise InputError(f"{home} keeps a selection beside its data; call flatten_indices() and save it again.")
    files = [home / entry["filename"] for entry in state.get("_data_files", [])]
    return read_tables(files, folder.name, folder)


def find_parquet(folder: Path, part: str) -> list[Path]:
    """The Parquet files of a part, in a folder or its folder `data`; all of them where names speak of no part."""
    files = sorted([*folder.glob("*.parquet"), *folder.glob("data/*.parquet")])
    by_part = [file for file in files if file.name.startswith(tuple(f"{name}-" for name in part_names(part)))]
    known = tuple(f"{name}-" for kind in ("train", "val", "test") for name in part_names(kind))
    if files and not by_part and all(file.name.startswith(known) for file in files):
        there = sorted({file.name.split("-")[0] for file in files})
        raise InputError(f"{folder} has no part '{part}'; it has {', '.join(there)}.")
    return by_part or files


def read_tables(files: Sequence[Path], name: str, beside: Path) -> Dataset:
    """The images of Arrow or Parquet files, in their order; only labels are read here."""
    if not files:
        raise InputError(f"{beside} lists no data files.")
    columns = _columns(files[0])
    images: list[TableImage] = []
    values: list[Any] = []
    for file in files:
        for group in range(_groups(file)):
            if columns.label is None:
                count = len(_group(file, columns.image, group))
                found: list[Any] = [None] * count
            else:
                found = _group(file, columns.label, group).to_pylist()
            images += [TableImage(file, columns.image, group, row) for row in range(len(found))]
            values += found
    if not images:
        raise InputError(f"{files[0]} holds no rows.")
    # ClassLabel writes -1 where a label is hidden, as in many test parts
    values = [None if value == -1 else value for value in values]
    labels, names, notes = number_labels(values, beside)
    if columns.names:
        names, notes = [spaced(text) for text in columns.names], [note for note in notes if "no label" in note]
    return Dataset(name, images, labels, names, tuple(notes))


def _columns(file: Path) -> Columns:
    schema = _open(file).schema if file.suffix == ".arrow" else _open(file).schema_arrow
    described = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = described.get("info", {}).get("features", {})
    kinds = {name: value.get("_type") for name, value in features.items() if isinstance(value, dict)}
    image = next((name for name in schema.names if kinds.get(name) == "Image"), None)
    image = image or next((name for name in IMAGE_COLUMNS if name in schema.names), None)
    if image is None:
        raise InputError(f"{file} has no column of images; it has {', '.join(schema.names)}.")
    classes = [name for name in schema.names if kinds.get(name) == "ClassLabel"]
    label = next((name for name in LABEL_COLUMNS if name in schema.names), next(iter(classes), None))
    return Columns(image, label, features[label].get("names") if label in classes else None)


def _json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as problem:
        raise InputError(f"Cannot read {file}: {problem.strerror or problem}.") from None
    except ValueError:
        raise InputError(f"{file} is damaged: it is not JSON.") from None


def _groups(file: Path) -> int:
    opened = _open(file)
    return len(opened.batches) if file.suffix == ".arrow" else opened.num_row_groups


@lru_cache(maxsize=4)  # a stream asks for one row after another of the same group
def _group(file: Path, column: str, group: int) -> Any:
    opened = _open(file)
    if file.suffix == ".arrow":
        return opened.batches[group].column(column)
    return opened.read_row_group(group, columns=[column]).column(column)


class _Arrow(NamedTuple):
    schema: Any
    batches: Sequence[Any]


@lru_cache(maxsize=32)
def _open(file: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingPart(
            f"{file.name} is read with pyarrow, which is not installed: pip install 'testtime[datasets]'."
        ) from None
    try:
        if file.suffix == ".arrow":
            with pyarrow.ipc.open_stream(pyarrow.memory_map(str(file))) as reader:
                return _Arrow(reader.schema, list(reader))  # views of the mapped file, not copies
        return pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowInvalid, OSError) as problem:
        raise InputError(f"Cannot read {file}: {str(problem).splitlines()[0]}.") from None
