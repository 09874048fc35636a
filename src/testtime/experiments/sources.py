"""Where the images of the streams are from: encoded datasets, all domains of one, or a feature file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from testtime.datasets import Dataset
from testtime.datasets.dataset import listed_images, subfolders
from testtime.datasets.own import PARTS
from testtime.encoding.store import INDEX, Features
from testtime.experiments.jobs import Place
from testtime.experiments.lab import SUBSET_SEED, Cell, Record, Text
from testtime.experiments.plan import Plan, recipe_of
from testtime.experiments.recipes import Recipe
from testtime.experiments.scenarios import KINDS, Images
from testtime.files.identity import content, digest, weights
from testtime.methods.zeroshot import ZeroShot
from testtime.ops import unit
from testtime.session.order import shuffled
from testtime.types import InputError, Task, ViewPlan

ALL = "all domains"  # the column of the streams over several domains
SEVERAL = tuple(kind for kind in KINDS if kind.startswith("domains"))
SINGLE = tuple(kind for kind in KINDS if kind not in SEVERAL)
VIEWS_SEED = 1  # of random views, the same in every order of a stream


@dataclass(frozen=True)
class Stored(Dataset):
    """A feature file as a dataset, encoded already; every image's path is the file's."""

    file: Path = Path()


class Source(NamedTuple):
    """Images that streams are made of."""

    name: str
    about: Record  # everything that their features, labels and prototypes depend on
    kinds: Sequence[str]  # the streams made of them
    entry: Recipe | None
    locate: Callable[[], Located]  # it encodes them if need be, once

    def load(self) -> Images:
        """The images, read once."""
        return self.locate().images


class Part(NamedTuple):
    """Images of one dataset: rows of a feature store."""

    place: Place
    task: Task
    rows: Tensor | None  # of the store; None: all
    labels: Tensor  # (N,)
    views: int  # of each image, the first so many of the store
    foreign: Place | None = None  # images of none of the classes


@dataclass(frozen=True)
class Located:
    """Where the images of a source are: they can be read in any process that sees the stores."""

    parts: tuple[Part, ...]  # several: domains

    @cached_property
    def images(self) -> Images:
        """The images, in memory."""
        each = [_read(part) for part in self.parts]
        if len(each) == 1:
            return each[0]
        views, labels = torch.cat([x.views for x in each]), torch.cat([x.labels for x in each])
        domains = torch.cat([torch.full_like(x.labels, k) for k, x in enumerate(each)])
        return Images(each[0].task, views, labels, domains)

    def __getstate__(self) -> dict[str, Any]:
        return {"parts": self.parts}


def _read(part: Part) -> Images:
    store = part.place.store
    views = store.read(0, len(store))[:, : part.views].contiguous()
    foreign = None
    if part.foreign is not None:
        found = part.foreign.store
        foreign = unit(found.read(0, len(found))[:, : part.views])
    return Images(part.task, views if part.rows is None else views[part.rows], part.labels, None, foreign)


def is_stored(path: Path) -> bool:
    """Whether this is a feature file, or a folder of shards."""
    return path.suffix == ".safetensors" or (path / INDEX).is_file()


def open_stored(path: Path) -> Stored:
    """A labelled feature file."""
    features = Features(path)
    if features.labels is None:
        raise InputError(f"{path} has no labels to score with: encode folders named after classes.")
    return Stored(path.stem, [path] * len(features), features.labels.tolist(), features.classnames, file=path)


def find_domains(folder: Path) -> list[Path]:
    """The domains of a folder: its folders, if they hold folders of the same two or more classes; else none."""
    names = subfolders(folder) if folder.is_dir() else []
    parts = {name for group in PARTS.values() for name in group}
    if len(names) < 2 or listed_images(folder) or not parts.isdisjoint(names):
        return []
    classes = [subfolders(folder / name) for name in names]
    alike = len(classes[0]) > 1 and all(each == classes[0] for each in classes)
    return [folder / name for name in names] if alike and parts.isdisjoint(classes[0]) else []


def find_sources(plan: Plan, datasets: Sequence[Dataset], foreign: Path | None = None) -> list[Source]:
    """A source for each dataset; with several, which must have the same classes, one more for all together.

    `foreign` is a feature file of images of none of the classes.
    """
    found = [
        _stored(plan, each, foreign) if isinstance(each, Stored) else _encoded(plan, each, foreign) for each in datasets
    ]
    for other in datasets[1:]:
        if list(other.classnames) != list(datasets[0].classnames):
            raise InputError(f"{datasets[0].name} and {other.name} differ in their classes; give one at a time.")
    return [*found, _together(found)] if len(found) > 1 else found


def _encoded(plan: Plan, dataset: Dataset, foreign: Path | None) -> Source:
    """A dataset with the plan's views, by default one, and with the prompts given or those of its recipe."""
    lab, entry = plan.lab(dataset), recipe_of(dataset)
    text = cast(Text, plan.text("given", dataset, entry))  # which lacks nothing
    views = plan.views or ViewPlan()
    # by content, not by times of files: a source is the same wherever its images are copied
    about = lab.conditions(Cell(ZeroShot(), text, views))
    about |= {"data": lab.content, "weights": weights(plan.encoder, content)}

    def locate() -> Located:
        store = lab.store(views, VIEWS_SEED)
        task, other = lab.task(text).to("cpu"), _foreign(foreign, store, views.count, plan.encoder.name)
        return Located((Part(Place.of(store), task, None, lab.labels_of(store), views.count, other),))

    return _source(dataset.name, about, foreign, entry, locate)


def _stored(plan: Plan, dataset: Stored, foreign: Path | None) -> Source:
    """A feature file, with its own prototypes; of several views of an image the plan's number, by default the first."""
    features, views = Features(dataset.file), plan.views.count if plan.views else 1
    _check_views(features, views)
    count = min(plan.limit or len(features), len(features))
    about = {
        "dataset": dataset.name,
        "images": count,
        "classes": len(dataset.classnames),
        "data": digest(map(content, features.files)),
        "encoder": features.metadata.get("encoder", ""),
        "views": views,
    }

    def locate() -> Located:
        rows = shuffled(len(features), SUBSET_SEED)[:count].sort().values
        labels, other = torch.tensor(dataset.labels)[rows], _foreign(foreign, features, views, str(about["encoder"]))
        return Located((Part(Place.of(features), features.task(), rows, labels, views, other),))

    return _source(dataset.name, about, foreign, None, locate)


def _source(
    name: str, about: Record, foreign: Path | None, entry: Recipe | None, locate: Callable[[], Located]
) -> Source:
    about = {key: value for key, value in about.items() if key not in ("seed", "method", "settings")}
    return Source(
        name,
        about | {"foreign": foreign and digest(map(content, Features(foreign).files))},
        SINGLE,
        entry,
        cache(locate),
    )


def _together(sources: Sequence[Source]) -> Source:
    """All images of several domains."""

    def locate() -> Located:
        parts = (part for source in sources for part in source.locate().parts)
        return Located(tuple(part._replace(foreign=None) for part in parts))

    about = {
        "dataset": ALL,
        "images": sum(source.about["images"] for source in sources),
        "encoder": sources[0].about["encoder"],
        "domains": [source.about for source in sources],
    }
    return Source(ALL, about, SEVERAL, sources[0].entry, cache(locate))


def _check_views(features: Features, views: int) -> None:
    if features.views < views:
        raise InputError(f"--views {views}: {features.path} has {features.views} of each image; encode it with more.")


def _foreign(path: Path | None, features: Features, views: int, encoder: str) -> Place | None:
    """A file of foreign images, from the same encoder."""
    if path is None:
        return None
    found = Features(path)
    _check_views(found, views)
    made = found.metadata.get("encoder", encoder)
    if found.dim != features.dim or (encoder and made != encoder):
        raise InputError(
            f"{path} holds features of size {found.dim} from {made or 'an unknown encoder'}; the images' have size "
            f"{features.dim}, from {encoder or 'an unknown encoder'}. Encode both with the same."
        )
    return Place.of(found)
