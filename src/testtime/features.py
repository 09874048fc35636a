"""The feature store: views encoded once, replayed under any method.

A store is one `.safetensors` file with `views` [N, V, D], `text` [C, D] and optional `labels` [N], or a folder of
such shards with an `index.json`. Views are read a chunk at a time, so a store may be larger than memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from testtime import files
from testtime.ops import unit
from testtime.types import FeatureError, Task

VERSION = "1"
INDEX = "index.json"


def unit_views(views: Tensor, like: Tensor, first: int = 0) -> Tensor:
    """Views (N, V, D) with unit rows, in the dtype and on the device of the prototypes `like` (C, D).

    Refuses what no method can use; `first` is the stream index of row 0, for the message.
    """
    directions, good = checked_views(views, like)
    if not good.all():
        raise refuse_views(views, first)
    return directions


def checked_views(views: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Views (N, V, D) with unit rows as `unit_views` gives them, and which images can be used (N,); nobody waits."""
    dim = like.shape[-1]
    if views.ndim != 3 or 0 in views.shape[:2] or views.shape[2] != dim:
        raise FeatureError(f"Views must be (N, V, {dim}) with at least one view; got {tuple(views.shape)}.")
    if not views.is_floating_point():
        raise FeatureError(f"Views must be floating point; got {views.dtype}.")
    directions = unit(views.detach().to(like))
    return directions, _usable(directions).all(1)


def _usable(directions: Tensor) -> Tensor:
    """Which rows (..., D) have become unit rows: not NaN, not zero, and not what overflowed."""
    return (directions.norm(dim=-1) - 1).abs() < 0.1


def refuse_views(views: Tensor, first: int = 0) -> FeatureError:
    """What is wrong with the first of these views (N, V, D) that cannot be used."""
    image, view = (~_usable(unit(views.detach().float()))).nonzero()[0].tolist()
    row = views[image, view]
    what = "hold NaN or infinity" if not torch.isfinite(row).all() else "cannot be normalised"
    return FeatureError(
        f"Features of image {first + image}, view {view}, {'are all zero' if not row.any() else what}; such an "
        "image cannot be learned from. Encode it again, or leave it out."
    )


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
    Task(text.float(), tuple(names), scale)  # refuses what does not fit together
    tensors = {"views": views, "text": text}
    if labels is not None:
        tensors["labels"] = _labels(labels, len(views), len(text), path)
    facts = {"classnames": json.dumps(names), "scale": repr(float(scale)), "version": VERSION}
    facts |= dict(metadata or {})
    return files.write_tensors(path, tensors, facts)


def write_index(folder: str | Path, shards: Sequence[str]) -> Path:
    """Make a folder of shards a store; `shards` are file names in stream order."""
    index = {"format": "testtime.features", "version": VERSION, "shards": list(shards)}
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
        paths = _shard_paths(self.path)
        self._shards = [files.open_tensors(shard, FeatureError) for shard in paths]
        shapes = [_shape(shard, self.path) for shard in self._shards]
        self._rows = [files.Rows(shard, "views", FeatureError) for shard in paths]
        if len({shape[1:] for shape in shapes}) > 1:
            raise FeatureError(f"{self.path}: shards differ in views or dimension: {sorted(set(shapes))}.")
        self._ends = list(accumulate(shape[0] for shape in shapes))
        _, self.views, self.dim = shapes[0]
        self.metadata: dict[str, str] = dict(self._shards[0].metadata() or {})
        self.text: Tensor = self._shards[0].get_tensor("text")
        self._check_text()
        self.classnames = self._read_classnames()
        self.scale = self._read_scale()
        self.labels = self._read_labels()
        self.images = self._read_images()

    def __len__(self) -> int:
        return self._ends[-1]

    def task(
        self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", context: bool = False
    ) -> Task:
        """The task of this store, its prototypes cast and then normalised.

        With `context`, prompts can be tuned where the file carries a text tower of its own, as stored runs of TPT do.
        """
        text = unit(self.text.to(device=device, dtype=dtype))
        task = Task(text, self.classnames, self.scale, self.metadata.get("encoder", ""))
        shard = self._shards[0]
        if not context or "ctx_init" not in shard.keys():
            return task
        from testtime.contexts import stored_context  # open_clip is loaded only for this

        names = [name for name in shard.keys() if name not in ("views", "labels")]
        tower = stored_context({name: shard.get_tensor(name) for name in names}, self.metadata)
        return replace(task, context=tower)

    def read(self, start: int, stop: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Views of the images from start to stop (n, V, D), checked, cast and then normalised."""
        if not 0 <= start < stop <= len(self):
            raise FeatureError(f"No images {start} to {stop} in {self.path}; it holds {len(self)}.")
        parts, begin = [], 0
        for rows, end in zip(self._rows, self._ends, strict=True):
            if start < end and stop > begin:
                parts.append(rows.read(max(start - begin, 0), min(stop, end) - begin))
            begin = end
        views = torch.cat(parts) if len(parts) != 1 else parts[0]
        return unit_views(views, self.text.to(dtype), start)

    def chunks(
        self, order: Sequence[int] | Tensor | None = None, *, size: int = 0, dtype: torch.dtype = torch.float32
    ) -> Iterator[Tensor]:
        """The stream as chunks (n, V, D) of at most `size` images, in the given order or as stored."""
        order = range(len(self)) if order is None else order
        # by default about 16 MB of float32 at a time
        size = size if size > 0 else max(1, min(1024, 2**22 // (self.views * self.dim)))
        for start in range(0, len(order), size):
            places = torch.as_tensor(order[start : start + size]).tolist()
            if places == list(range(places[0], places[0] + len(places))):  # neighbours are read together
                yield self.read(places[0], places[-1] + 1, dtype)
            else:
                yield torch.cat([self.read(place, place + 1, dtype) for place in places])

    def _check_text(self) -> None:
        for number, shard in enumerate(self._shards[1:], start=1):
            if not torch.equal(shard.get_tensor("text"), self.text):
                raise FeatureError(f"{self.path}: shard {number} has other text prototypes than shard 0.")
        if self.text.ndim != 2 or self.text.shape[1] != self.dim or not self.text.is_floating_point():
            raise FeatureError(
                f"{self.path}: text must be (C, {self.dim}) to fit the views; got {tuple(self.text.shape)}."
            )

    def _read_classnames(self) -> tuple[str, ...]:
        stored = self.metadata.get("classnames")
        if stored is None:
            return tuple(map(str, range(len(self.text))))
        try:
            names = json.loads(stored)
            if not isinstance(names, list):
                raise ValueError
        except ValueError:
            raise FeatureError(f"{self.path}: metadata 'classnames' is not a JSON list: {stored[:60]!r}.") from None
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
        having = ["labels" in shard.keys() for shard in self._shards]
        if not any(having):
            return None
        if not all(having):
            raise FeatureError(f"{self.path}: shard {having.index(False)} has no labels, others have.")
        labels = torch.cat([shard.get_tensor("labels") for shard in self._shards])
        return _labels(labels, len(self), len(self.text), self.path)

    def _read_images(self) -> tuple[str, ...] | None:
        """The paths that were encoded, in order, where the store says them; for showing only."""
        found: list[str] = []
        for shard in self._shards:
            stored = (shard.metadata() or {}).get("images")
            if stored is None:
                return None
            try:
                paths = json.loads(stored)
            except ValueError:
                paths = None
            if not isinstance(paths, list) or len(paths) != shard.get_slice("views").get_shape()[0]:
                raise FeatureError(f"{self.path}: metadata 'images' is not a JSON list with one path for each image.")
            found.extend(map(str, paths))
        return tuple(found)


def _labels(labels: Tensor, images: int, classes: int, path: str | Path) -> Tensor:
    """Labels (N,) as int64, checked."""
    if labels.shape != (images,):
        raise FeatureError(f"{path}: labels must be ({images},), one for each image; got {tuple(labels.shape)}.")
    if labels.is_floating_point() or not ((labels >= 0) & (labels < classes)).all():
        raise FeatureError(f"{path}: labels must be whole numbers from 0 to {classes - 1}.")
    return labels.long()


def _shard_paths(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    index = path / INDEX
    if not index.exists():
        raise FeatureError(f"{path} is a folder without {INDEX}; it is not a feature store, or not finished.")
    try:
        shards = json.loads(index.read_text())["shards"]
        paths = [path / Path(name).name for name in shards]  # never a file elsewhere
    except (ValueError, KeyError, TypeError):
        raise FeatureError(f"{index} is not the index of a feature store.") from None
    if not paths:
        raise FeatureError(f"{index} names no shards.")
    return paths


def _shape(shard: Any, path: Path) -> tuple[int, int, int]:
    names = set(shard.keys())
    if missing := {"views", "text"} - names:
        raise FeatureError(
            f"{path}: no tensor '{sorted(missing)[0]}'; a feature file holds views [N,V,D] and text [C,D]."
        )
    shape = tuple(shard.get_slice("views").get_shape())
    if len(shape) != 3 or 0 in shape:
        raise FeatureError(f"{path}: views must be [N,V,D] with none of them 0; got {list(shape)}.")
    return shape  # type: ignore[return-value]
