"""The feature store: views encoded once, replayed with any method.

A store is one `.safetensors` file with `views` [N, V, D], `text` [C, D] and optional `labels` [N], or a folder of
such shards with an `index.json`. Views are read a chunk at a time, so a store may be larger than memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from testtime import files
from testtime.display import line
from testtime.ops import unit, unit_views
from testtime.types import FeatureError, Task

FORMAT = "testtime.features"
VERSION = "1"
INDEX = "index.json"
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)  # dtypes of labels
T = TypeVar("T")


def save_features(
    path: str | Path,
    views: Tensor,
    text: Tensor,
    *,
    labels: Tensor | None = None,
    classnames: Sequence[str] | None = None,
    scale: float = 100.0,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write a feature file, atomically. `metadata` may add `encoder`, `dataset`, `seed` or anything else."""
    unit_views(views, text.float())
    names = list(map(str, range(len(text)))) if classnames is None else list(classnames)
    Task(text.float(), tuple(names), scale)  # checks that they fit together
    tensors = {"views": views, "text": text}
    if labels is not None:
        tensors["labels"] = _labels(labels, len(views), len(text), path)
    described = {"classnames": json.dumps(names), "scale": repr(float(scale)), "version": VERSION}
    return files.write_tensors(path, tensors, described | dict(metadata or {}))


def write_index(folder: str | Path, shards: Sequence[str]) -> Path:
    """Make a folder of shards a store; `shards` are file names in stream order."""
    index = {"format": FORMAT, "version": VERSION, "shards": list(shards)}
    return files.write_atomic(Path(folder) / INDEX, json.dumps(index, indent=1) + "\n")


class Features:
    """A feature file, or a folder of shards, read lazily.

    >>> import tempfile, testtime as tt
    >>> task, stream, labels = tt.toy()
    >>> path = save_features(f"{tempfile.mkdtemp()}/toy.safetensors", stream, task.text, labels=labels)
    >>> store = Features(path)
    >>> len(store), store.views, store.dim, store.classnames[:2]
    (160, 4, 32, ('0', '1'))
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.files = _shard_paths(self.path)
        self._shards = [files.open_tensors(shard, FeatureError) for shard in self.files]
        self._metadata: list[dict[str, str]] = [dict(shard.metadata() or {}) for shard in self._shards]
        for file, metadata in zip(self.files, self._metadata, strict=True):
            _check_version(file, metadata)
        shapes = [_shape(shard, self.path) for shard in self._shards]
        self._rows = [files.Rows(shard, "views", FeatureError) for shard in self.files]
        if len({shape[1:] for shape in shapes}) > 1:
            raise FeatureError(f"{self.path}: shards differ in views or dimension: {sorted(set(shapes))}.")
        self._ends = list(accumulate(shape[0] for shape in shapes))
        _, self.views, self.dim = shapes[0]
        self.metadata = self._metadata[0]
        self.text = self._tensor(self._shards[0], "text")
        self._check_text()
        self.classnames = self._read_classnames()
        self.scale = self._read_scale()
        self.labels = self._read_labels()
        # the encoded paths, for display only, and their positions in the input; None if not stored
        self.images = self._read_each("images", str, "path")
        self.positions = self._read_each("positions", int, "position")

    def __len__(self) -> int:
        return self._ends[-1]

    def __repr__(self) -> str:
        labelled = "no labels" if self.labels is None else "labelled"
        sizes = f"{len(self):,} images, views {self.views}, dim {self.dim}, {len(self.text)} classes"
        return f"Features({line(self.path.name, 32)}: {sizes}, {labelled})"

    def task(
        self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", context: bool = False
    ) -> Task:
        """The task of this store, its prototypes cast and then normalised.

        With `context`, prompts can be tuned if the file has its own text tower, as stored runs of TPT do.
        """
        text = unit(self.text.to(device=device, dtype=dtype))
        task = Task(text, self.classnames, self.scale, self.metadata.get("encoder", ""))
        shard = self._shards[0]
        if not context or "ctx_init" not in shard.keys():
            return task
        from testtime.text.contexts import stored_context  # loads open_clip

        names = [name for name in shard.keys() if name not in ("views", "labels")]
        try:
            tower = stored_context({name: self._tensor(shard, name) for name in names}, self.metadata)
            with torch.no_grad():
                fits = tower(tower.start).shape == task.text.shape
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as problem:
            reason = (str(problem) or type(problem).__name__).splitlines()[0]
            raise FeatureError(f"{self.path}: its text tower cannot be used ({reason}). Write it again.") from None
        if not fits:
            raise FeatureError(f"{self.path}: the prototypes of its text tower are not (C, D) = {tuple(text.shape)}.")
        return replace(task, context=tower)

    def read(self, start: int, stop: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Views of the images from start to stop (n, V, D), checked, cast and then normalised."""
        return unit_views(self.stored(start, stop), self.text.to(dtype), start)

    def stored(self, start: int, stop: int) -> Tensor:
        """Views of the images from start to stop (n, V, D) as stored in the file."""
        if not 0 <= start < stop <= len(self):
            raise FeatureError(f"No images {start} to {stop} in {self.path}; it holds {len(self)}.")
        parts, begin = [], 0
        for rows, end in zip(self._rows, self._ends, strict=True):
            if start < end and stop > begin:
                parts.append(rows.read(max(start - begin, 0), min(stop, end) - begin))
            begin = end
        return torch.cat(parts) if len(parts) != 1 else parts[0]

    def chunks(
        self,
        order: Sequence[int] | Tensor | None = None,
        *,
        size: int = 0,
        dtype: torch.dtype = torch.float32,
        batch: int = 1,
    ) -> Iterator[Tensor]:
        """The stream as chunks (n, V, D) of at most `size` images, in the given order or as stored.

        All but the last are whole batches, even if one is larger than `size`.
        """
        order = range(len(self)) if order is None else order
        # by default about 16 MB of float32 at a time
        size = size if size > 0 else max(1, min(1024, 2**22 // (self.views * self.dim)))
        size = max(batch, size - size % batch)
        for start in range(0, len(order), size):
            indices = torch.as_tensor(order[start : start + size]).tolist()
            if indices == list(range(indices[0], indices[0] + len(indices))):  # consecutive images are read together
                yield self.read(indices[0], indices[-1] + 1, dtype)
            else:
                yield torch.cat([self.read(index, index + 1, dtype) for index in indices])

    def _check_text(self) -> None:
        if self.text.ndim != 2 or self.text.shape[1] != self.dim or self.text.dtype not in files.float_types().values():
            kind = f"{str(self.text.dtype)[6:]} {tuple(self.text.shape)}"
            raise FeatureError(f"{self.path}: text must be (C, {self.dim}) floats to fit the views; got {kind}.")
        for number, shard in enumerate(self._shards[1:], start=1):
            other = self._tensor(shard, "text")
            if other.dtype != self.text.dtype or not torch.equal(other, self.text):
                raise FeatureError(f"{self.path}: shard {number} has other text prototypes than shard 0.")

    def _tensor(self, shard: safe_open, name: str) -> Tensor:
        """A whole tensor of a shard."""
        try:
            return shard.get_tensor(name)
        except SafetensorError as problem:  # a dtype that torch does not have
            raise FeatureError(f"{self.path}: tensor '{name}' cannot be read ({problem}). Write it again.") from None

    def _read_classnames(self) -> tuple[str, ...]:
        stored = self.metadata.get("classnames")
        if stored is None:
            return tuple(map(str, range(len(self.text))))
        names = _json_list(stored, str, int, float)
        if names is None or not _printable(names):
            raise FeatureError(f"{self.path}: metadata 'classnames' is not a JSON list of names: {stored[:60]!r}.")
        if len(names) != len(self.text):
            raise FeatureError(f"{self.path}: {len(names)} class names for {len(self.text)} text prototypes.")
        return tuple(map(str, names))

    def _read_scale(self) -> float:
        # older traces call it logit_scale
        stored = self.metadata.get("scale", self.metadata.get("logit_scale", "100"))
        try:
            scale = float(stored)
        except ValueError:
            scale = math.nan
        if not (math.isfinite(scale) and scale > 0):
            raise FeatureError(f"{self.path}: metadata 'scale' must be a positive number; got {stored!r}.")
        return scale

    def _read_labels(self) -> Tensor | None:
        has_labels = ["labels" in shard.keys() for shard in self._shards]
        if not any(has_labels):
            return None
        if not all(has_labels):
            raise FeatureError(f"{self.path}: shard {has_labels.index(False)} has no labels, but others have.")
        counts = [rows.shape[0] for rows in self._rows]
        pairs = zip(self._shards, counts, strict=True)
        return torch.cat([_labels(self._tensor(s, "labels"), n, len(self.text), self.path) for s, n in pairs])

    def _read_each(self, key: str, kind: type[T], what: str) -> tuple[T, ...] | None:
        """The metadata of each image under a key, in order; None if a shard has none."""
        found: list[T] = []
        for rows, metadata in zip(self._rows, self._metadata, strict=True):
            if key not in metadata:
                return None
            values = _json_list(metadata[key], kind)
            if values is not None and kind is str and not all(map(_is_name, values)):
                values = None
            if values is None or len(values) != rows.shape[0]:
                raise FeatureError(f"{self.path}: metadata '{key}' is not a JSON list with one {what} for each image.")
            found.extend(values)
        return tuple(found)


def _labels(labels: Tensor, images: int, classes: int, path: str | Path) -> Tensor:
    """Labels (N,) as int64, checked."""
    if labels.shape != (images,):
        raise FeatureError(f"{path}: labels must be ({images},), one for each image; got {tuple(labels.shape)}.")
    whole = labels.long()
    if labels.dtype not in INTEGERS or not ((whole >= 0) & (whole < classes)).all():
        raise FeatureError(f"{path}: labels must be whole numbers from 0 to {classes - 1}.")
    return whole


def _shard_paths(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    index = path / INDEX
    try:
        text = index.read_bytes()
    except FileNotFoundError:
        raise FeatureError(f"{path} is a folder without {INDEX}; it is not a feature store, or not finished.") from None
    except OSError as problem:
        raise FeatureError(f"Cannot read {index}: {problem.strerror or problem}.") from None
    found = files.parse_json(text, index, FeatureError, dict)
    shards = found.get("shards")
    if found.get("format", FORMAT) != FORMAT or not isinstance(shards, list) or not all(map(_is_name, shards)):
        raise FeatureError(f"{index} is not the index of a feature store.")
    _check_version(index, found)
    paths = [path / Path(name).name for name in shards]  # never a file in another folder
    if not paths:
        raise FeatureError(f"{index} lists no shards.")
    return paths


def _check_version(path: Path, metadata: Mapping[str, object]) -> None:
    """Refuse files of another format version; files made elsewhere have none."""
    if (found := metadata.get("version", VERSION)) != VERSION:
        raise FeatureError(
            f"{path} has format version {str(found)[:40]!r}, this program reads {VERSION}. "
            "Use the version of testtime that wrote it, or encode again."
        )


def _json_list(text: str, *kinds: type[T]) -> list[T] | None:
    """A JSON list of values of these types; None for anything else."""
    try:
        values = files.parse_json(text, "", FeatureError, list)
    except FeatureError:
        return None
    return values if all(isinstance(value, kinds) and not isinstance(value, bool) for value in values) else None


def _printable(names: Sequence[object]) -> bool:
    """Whether names can be printed: none has a lone surrogate, which JSON allows."""
    try:
        "".join(map(str, names)).encode()
        return True
    except UnicodeEncodeError:
        return False


def _is_name(name: object) -> bool:
    """Whether this can be a file name, also one that is not UTF-8."""
    try:
        return isinstance(name, str) and b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        return False


def _shape(shard: safe_open, path: Path) -> tuple[int, int, int]:
    names = set(shard.keys())
    if missing := {"views", "text"} - names:
        raise FeatureError(
            f"{path}: no tensor '{sorted(missing)[0]}'; a feature file holds views [N,V,D] and text [C,D]."
        )
    shape = tuple(shard.get_slice("views").get_shape())
    if len(shape) != 3 or 0 in shape:
        raise FeatureError(f"{path}: views must be [N,V,D], none of them 0; got {list(shape)}.")
    return shape  # type: ignore[return-value]
