"""A lab: a dataset and an encoder, with the folder for their results.

folder/stores/     features by dataset, encoder, views and seed, in shards; no labels, which may be corrected
folder/text/       text prototypes
folder/cells/      results
folder/timings/    how long each of them took, and on which machine
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from testtime import __version__, files, registry
from testtime.datasets import Dataset
from testtime.encoding.encode import DTYPES, RECIPE, encode, made_with
from testtime.encoding.store import Features
from testtime.experiments.jobs import Executor, in_order
from testtime.files.identity import content, digest, identity, stamp, weights
from testtime.machine.devices import step_device
from testtime.session.order import shuffled
from testtime.steppers import aligned
from testtime.text.prompts import build_task, check_classes
from testtime.types import Encoder, InputError, Method, StoredImage, Task, ViewPlan

Record = dict[str, Any]  # plain data, as it is written to JSON
NOT_RUN = "not run"  # in a record: why there is no score

SHARD = 256  # images per shard; an interrupt loses at most one shard
SUBSET_SEED = 0  # of the images that a limit selects, which are the same for every seed of the stream
ONE_VIEW_SEED = 1  # without random views, all seeds share one store
DTYPE = "float16"  # of features, as stored


class Text(NamedTuple):
    """What the text prototypes are made of."""

    templates: tuple[str, ...] = ("a photo of a {}.",)
    descriptions: Path | None = None  # JSON of sentences by class
    learned: Path | None = None  # a learned prompt in place of both

    def conditions(self) -> Record:
        """The text as plain data; files by their content, so that two files of the same name are not confused."""
        return {
            "templates": list(self.templates) if self.learned is None else [],
            "descriptions": _digest(self.descriptions),
            "learned": _digest(self.learned),
        }


class Cell(NamedTuple):
    """One run: a method with its settings, on one kind of views, in the order of a seed."""

    method: Method
    text: Text = Text()
    views: ViewPlan = ViewPlan()
    seed: int = 1


@dataclass
class Lab:
    """A dataset and an encoder, and the folder for their results."""

    folder: Path
    encoder: Encoder
    dataset: Dataset
    limit: int | None = None
    shard: int = SHARD
    report: Callable[[str], None] = print
    executor: Executor = in_order  # of its cells
    tasks: dict[tuple[Text, bool], Task] = field(default_factory=dict, repr=False)
    stores: dict[Path, Features] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise InputError(f"limit={self.limit}: at least one image is needed.")
        if self.dataset.labels is None:
            raise InputError(f"{self.dataset.name} has no labels to score with.")
        self.folder = Path(self.folder)
        self.labels = list(self.dataset.labels)

    @property
    def indices(self) -> list[int]:
        """The images used, as rows of the dataset: all, or a random subset that is the same for every seed."""
        count = len(self.dataset)
        if self.limit is None or self.limit >= count:
            return list(range(count))
        chosen = shuffled(count, SUBSET_SEED)[: self.limit]
        return sorted(chosen.tolist())

    def conditions(self, cell: Cell) -> Record:
        """Everything that a cell's numbers depend on."""
        return {
            "dataset": self.dataset.name,
            "images": len(self.indices),
            "classes": len(self.dataset.classnames),
            "data": self.data,
            "encoder": self.encoder.name,
            "weights": self.weights,
            "recipe": RECIPE,
            "views": cell.views.count,
            "augmix": cell.views.augmix,
            "seed": cell.seed,
            "method": cell.method.name,
            "settings": registry.settings_of(cell.method),
            "text": cell.text.conditions(),
        }

    def path(self, cell: Cell) -> Path:
        """Where the cell's result is, or will be."""
        name = f"{slug(self.dataset.name)}-{slug(cell.method.name)}-{fingerprint(self.conditions(cell))}"
        return self.folder / "cells" / f"{name}.json"

    def store_path(self, views: ViewPlan, seed: int) -> Path:
        """Where the features are, or will be."""
        name = f"{slug(self.dataset.name)}-{slug(self.encoder.name)}-{views.count}{'-augmix' * views.augmix}"
        name += f"-seed{seed}" if views.count > 1 else ""
        name += f"-{len(self.indices)}" if len(self.indices) < len(self.dataset) else ""
        made = made_with(self.encoder, _seeded(views, seed), DTYPES[DTYPE], self.dataset.name)
        identified = digest([*(f"{key} {value}" for key, value in made.items()), *map(str, self._images())])
        return self.folder / "stores" / f"{name}-{identified}"

    def store(self, views: ViewPlan, seed: int) -> Features:
        """The features, encoded if they are missing; finished shards are reused.

        It waits for another process that makes the same.
        """
        out = self.store_path(views, seed)
        if out not in self.stores:
            with self._locked(out):
                self._encode(out, views, seed)
                self.stores[out] = Features(out)  # from here on, a replaced shard is detected
        return self.stores[out]

    def _encode(self, out: Path, views: ViewPlan, seed: int) -> None:
        before = set(_shards(out))
        start = time.perf_counter()
        images = self._images()
        encode(
            self.encoder,
            self.task(Text()),
            images,
            out,
            _seeded(views, seed),
            dtype=DTYPES[DTYPE],
            shard=self.shard,
            dataset=self.dataset.name,
            resume=True,
            retext=True,  # the prototypes are kept in folder/text, and may differ by now
            on_skip=lambda line: self.report(f"skipped {line}"),
            progress=self._encoding(len(images)),
            report=self.report,
        )
        if new := [shard for shard in _shards(out) if shard not in before]:
            count = sum(len(Features(shard)) for shard in new)
            self.note(f"encode-{out.name}", {"images": count, "views": views.count}, time.perf_counter() - start)

    @contextmanager
    def _locked(self, out: Path) -> Iterator[None]:
        """Lock a store for writing; if another process has the lock, report that and wait."""
        with ExitStack() as stack:
            try:
                stack.enter_context(files.locked(out))
            except InputError as in_use:
                self.report(f"waiting: {in_use}")
                stack.enter_context(files.locked(out, wait=True))
            yield

    def rows(self, store: Features) -> list[int]:
        """Which images of the dataset a store holds: those used, except those that could not be read."""
        used = self.indices
        return used if store.positions is None else [used[position] for position in store.positions]

    def labels_of(self, store: Features) -> Tensor:
        """The labels (N,) of a store's images, as the dataset has them now."""
        return torch.tensor([self.labels[row] for row in self.rows(store)])

    def task(self, text: Text, tower: bool = False) -> Task:
        """The task with prototypes of that text, cached in a file."""
        if (text, tower) not in self.tasks:
            self.tasks[text, tower] = self._task(text, tower)
        return self.tasks[text, tower]

    def _task(self, text: Text, tower: bool) -> Task:
        names = self.dataset.classnames
        if text.learned is not None:
            return build_task(self.encoder, names, prompts=f"coop:{text.learned}", allow_duplicates=True)
        if tower:
            return build_task(
                self.encoder, names, text.templates, text.descriptions, context=True, allow_duplicates=True
            )
        conditions = {
            "encoder": self.encoder.name,
            "weights": self.weights,
            "classnames": list(names),
        } | text.conditions()
        path = self.folder / "text" / f"{fingerprint(conditions)}.safetensors"
        if not path.exists():
            task = build_task(self.encoder, names, text.templates, text.descriptions, allow_duplicates=True)
            files.write_tensors(path, {"text": task.text}, {"text": json.dumps(conditions), "scale": repr(task.scale)})
            return task
        file = files.open_tensors(path)
        scale = float(file.metadata().get("scale") or self.encoder.scale)  # with it, the encoder need not be loaded
        prototypes = aligned(file.get_tensor("text")).to(step_device(self.encoder.device))
        return Task(prototypes, check_classes(names, allow_duplicates=True), scale, self.encoder.name)

    @cached_property
    def weights(self) -> str:
        """An identifier of the encoder's weights, since its name may stand for others."""
        return weights(self.encoder)

    @cached_property
    def data(self) -> str:
        """A digest of these images: names (without the folder's location), sizes, times and labels."""
        return self._digest(stamp)

    @cached_property
    def content(self) -> str:
        """As `data`, but by the images' bytes, so that a copy of them has the same. They are read once."""
        name = f"content-{self.data}"
        if (known := self.noted(name)) is None:
            start = time.perf_counter()
            found = self._digest(cache(content))
            self.note(name, known := {"content": found}, time.perf_counter() - start)
        return known["content"]

    def _digest(self, by: Callable[[str | Path], str]) -> str:
        paths = [self.dataset.paths[i] for i in self.indices]
        names = ["/".join(str(path).replace("\\", "/").split("/")[-2:]) for path in paths]
        each = (f"{identity(path, by)} {self.labels[i]}" for i, path in zip(self.indices, paths, strict=True))
        return digest([*names, *each])

    def _images(self) -> list[StoredImage]:
        return [_absolute(self.dataset.paths[i]) for i in self.indices]

    def _encoding(self, count: int) -> Callable[[int], None]:
        """Occasional progress reports; none for existing shards, which take no time."""
        reported, start = 0, time.perf_counter()

        def line(done: int) -> None:
            nonlocal reported
            if 10 * done // count > 10 * reported // count and time.perf_counter() - start > 1:
                reported = done
                self.report(f"{self.dataset.name}: {done} of {count} images encoded")

        return line

    def note(self, name: str, what: Record, seconds: float) -> None:
        """Record how long something took, and on which machine."""
        note(self.folder, name, what, seconds, provenance(self.encoder.device))

    def noted(self, name: str) -> Record | None:
        """How long something took, if that was recorded."""
        return noted(self.folder, name)


def note(folder: Path, name: str, what: Record, seconds: float, made: dict[str, str]) -> None:
    """Record in a folder of results how long something took, and on which machine: a `provenance`."""
    record = what | {"seconds": seconds} | made
    files.write_atomic(folder / "timings" / f"{name}.json", json.dumps(record, indent=1) + "\n")


def noted(folder: Path, name: str) -> Record | None:
    """How long something took, if that was recorded."""
    path = folder / "timings" / f"{name}.json"
    return files.parse_json(read_bytes(path), path, kind=dict) if path.exists() else None


def provenance(device: torch.device) -> dict[str, str]:
    """What times depend on besides the run: versions and the machine, with its GPU if that is used."""
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads"
    if device.type != "cpu":
        machine = f"{torch.cuda.get_device_name(device) if device.type == 'cuda' else device.type}; {machine}"
    return {"version": __version__, "torch": torch.__version__, "machine": machine}


def encoded(store: Path) -> int:
    """How many images a store holds so far, finished or not."""
    return sum(len(Features(shard)) for shard in _shards(store))


def _shards(store: Path) -> list[Path]:
    return sorted(store.glob("features-*.safetensors"))


def _seeded(views: ViewPlan, seed: int) -> ViewPlan:
    return replace(views, seed=seed if views.count > 1 else ONE_VIEW_SEED)


def _absolute(image: StoredImage) -> StoredImage:
    """An image under its absolute name, so that its shard is found from any working directory."""
    return Path(os.path.abspath(image)) if isinstance(image, Path) else image


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as problem:
        raise InputError(f"Cannot read {path}: {problem.strerror or problem}.") from None


def _digest(path: Path | None) -> str | None:
    if path is None:
        return None
    return hashlib.sha256(read_bytes(Path(path))).hexdigest()[:12]


def fingerprint(conditions: Record) -> str:
    """A short digest of plain data."""
    return hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()[:12]


def slug(name: str) -> str:
    """A name as part of a file name; a long one is truncated, since a fingerprint follows that distinguishes it."""
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in name)[:60]
