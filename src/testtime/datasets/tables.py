"""Hugging Face datasets on disk: `save_to_disk` folders of Arrow files, and Parquet files. Needs only pyarrow."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from testtime.datasets.dataset import Dataset, content, number_labels
from testtime.datasets.own import LABEL_COLUMNS, part_names
from testtime.files import parse_json, read_bytes
from testtime.types import ImageError, InputError, MissingPart

T = TypeVar("T")
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
            return read_bytes(self.file.parent / value)
        if not isinstance(value, bytes):
            raise ImageError(f"{self}: the row holds no image.")
        return value

    def __str__(self) -> str:
        return f"{self.file}/{self.group}-{self.row}"


class Columns(NamedTuple):
    """Which columns of a table hold the images and their labels."""

    image: str
    label: str | None
    names: Sequence[str]  # class names that the table itself gives to its numbers; empty if it gives none


def is_saved(folder: Path) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def read_saved(folder: Path, part: str) -> Dataset:
    """A dataset saved by `datasets`: one part of it, if it has parts."""
    home = folder
    if (folder / "dataset_dict.json").is_file():
        parts = _listed(folder / "dataset_dict.json", _json(folder / "dataset_dict.json"), "splits", str)
        chosen = next((name for name in part_names(part) if name in parts), None)
        if chosen is None:
            raise InputError(f"{folder} has no part '{part}'; it has {', '.join(parts) or 'none'}.")
        home = folder / chosen
    state = _json(home / "state.json")
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise InputError(f"{home} stores a selection of its rows; call flatten_indices() and save it again.")
    entries = _listed(home / "state.json", state, "_data_files", dict)
    if not all(isinstance(entry.get("filename"), str) for entry in entries):
        raise InputError(f"{home / 'state.json'} is damaged: an entry of _data_files has no filename.")
    files = [home / entry["filename"] for entry in entries]
    return read_tables(files, folder.name, folder)


def find_parquet(folder: Path, part: str) -> list[Path]:
    """The Parquet files of a part, in a folder or its folder `data`; all of them if the names do not tell the part."""
    files = sorted([*folder.glob("*.parquet"), *folder.glob("data/*.parquet")])
    by_part = [file for file in files if file.name.startswith(tuple(f"{name}-" for name in part_names(part)))]
    known = tuple(f"{name}-" for kind in ("train", "val", "test") for name in part_names(kind))
    if files and not by_part and all(file.name.startswith(known) for file in files):
        parts = sorted({file.name.split("-")[0] for file in files})
        raise InputError(f"{folder} has no part '{part}'; it has {', '.join(parts)}.")
    return by_part or files


def read_tables(files: Sequence[Path], name: str, beside: Path) -> Dataset:
    """The images of Arrow or Parquet files, in their order; only labels are read here."""
    if not files:
        raise InputError(f"{beside} lists no data files.")
    columns = _columns(files[0])
    images: list[TableImage] = []
    values: list[object] = []
    for file in files:
        counts, size = _counts(file), os.path.getsize(file)
        if sum(counts) > size:
            raise InputError(f"{file} is damaged: it claims to have {sum(counts):,} rows in {size:,} bytes.")
        for group, count in enumerate(counts):
            images += [TableImage(file, columns.image, group, row) for row in range(count)]
            values += [None] * count if columns.label is None else _values(file, columns.label, group)
    if len(values) != len(images):
        raise InputError(f"{files[0]} is damaged: {len(values):,} labels for {len(images):,} images.")
    if not images:
        raise InputError(f"{files[0]} holds no rows.")
    # ClassLabel writes -1 where a label is hidden, as in many test parts
    values = [None if value == -1 else value for value in values]
    labels, names, notes = number_labels(values, beside, f"Column '{columns.label}' of {files[0]}", columns.names)
    return Dataset(name, images, labels, names, tuple(notes))


def _columns(file: Path) -> Columns:
    opened = _open(file)
    with _reading(file):
        schema = opened.schema if file.suffix == ".arrow" else opened.schema_arrow
        duplicates = sorted({name for name in schema.names if schema.names.count(name) > 1})
    what = f"The metadata of {file}"
    info = _object(parse_json((schema.metadata or {}).get(b"huggingface", b"{}"), what, kind=dict), "info", what)
    features = _object(info, "features", what)
    kinds = {name: value.get("_type") for name, value in features.items() if isinstance(value, dict)}
    image = next((name for name in schema.names if kinds.get(name) == "Image"), None)
    image = image or next((name for name in IMAGE_COLUMNS if name in schema.names), None)
    if image is None:
        raise InputError(f"{file} has no column of images; it has {', '.join(schema.names)}.")
    classes = [name for name in schema.names if kinds.get(name) == "ClassLabel"]
    label = next((name for name in LABEL_COLUMNS if name in schema.names), next(iter(classes), None))
    if ambiguous := [name for name in (image, label) if name in duplicates]:
        raise InputError(f"{file} has the column '{ambiguous[0]}' more than once.")
    feature = _object(features, label, what) if label is not None and label in classes else {}
    return Columns(image, label, _listed(what, feature, "names", str))


def _json(file: Path) -> Mapping[str, object]:
    return parse_json(content(file), file, kind=dict)


def _object(within: Mapping[str, object], name: str, what: object) -> Mapping[str, object]:
    """An object inside a JSON object; empty if it is missing."""
    value = within.get(name) or {}
    if not isinstance(value, dict):
        raise InputError(f"{what} is damaged: '{name}' should be an object; it is a {type(value).__name__}.")
    return value


def _listed(what: object, within: Mapping[str, object], name: str, kind: type[T]) -> list[T]:
    """A list of one type inside a JSON object; empty if it is missing."""
    value = within.get(name) or []
    if not isinstance(value, list) or not all(isinstance(entry, kind) for entry in value):
        raise InputError(f"{what} is damaged: '{name}' should be a list, each entry a {kind.__name__}.")
    return value


def _counts(file: Path) -> list[int]:
    """Rows of each group."""
    opened = _open(file)
    if file.suffix == ".arrow":
        return [batch.num_rows for batch in opened.batches]
    with _reading(file):
        return [opened.metadata.row_group(group).num_rows for group in range(opened.num_row_groups)]


def _values(file: Path, column: str, group: int) -> list[object]:
    with _reading(file):
        return _group(file, column, group).to_pylist()


@lru_cache(maxsize=4)  # a stream reads one row after another of the same group
def _group(file: Path, column: str, group: int) -> Any:
    opened = _open(file)
    if file.suffix == ".arrow":
        found = opened.batches[group].column(column)
        found.validate(full=True)  # its offsets may point anywhere
        return found
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
    if not os.path.isfile(file):
        raise InputError(f"Cannot read {file}: there is no such file.")
    with _reading(file):
        if file.suffix == ".arrow":
            with pyarrow.ipc.open_stream(pyarrow.memory_map(str(file))) as reader:
                return _Arrow(reader.schema, list(reader))  # views of the mapped file, not copies
        return pyarrow.parquet.ParquetFile(file)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Turn read errors into an InputError; on damaged files pyarrow raises its own errors, and Python's."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError, ValueError, LookupError, TypeError, OverflowError, MemoryError) as problem:
        reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        raise InputError(f"Cannot read {file}: {reason[:200]}.") from None
