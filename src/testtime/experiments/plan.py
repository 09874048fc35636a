"""A plan: how any experiment is run, and by which recipe on which dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from testtime import registry
from testtime.datasets import Dataset, templates
from testtime.datasets.benchmarks import folded
from testtime.experiments import recipes
from testtime.experiments.catalogue import Experiment, Row
from testtime.experiments.jobs import Executor, in_order
from testtime.experiments.lab import SHARD, Cell, Lab, Record, Text
from testtime.experiments.oracle import oracle_of
from testtime.experiments.recipes import Recipe
from testtime.text.prompts import find_templates
from testtime.types import Encoder, InputError, Method, ViewPlan

SINGLE = "a photo of a {}."


@dataclass(frozen=True)
class Plan:
    """How to run: everything that is the same for all datasets and methods."""

    folder: Path
    encoder: Encoder
    seeds: tuple[int, ...] = (1,)
    track: str = "one-setting"
    protocol: str = "released"
    views: ViewPlan | None = None  # the recipe's, if left out
    templates: tuple[str, ...] | None = None  # the recipe's, if left out
    descriptions: Path | None = None  # a file, or a folder with one for each dataset
    learned: Path | None = None  # a prompt learned by CoOp
    limit: int | None = None
    shard: int = SHARD
    report: Callable[[str], None] = print
    executor: Executor = in_order  # of the cells

    def __post_init__(self) -> None:
        for kind, value, known in (
            ("track", self.track, recipes.TRACKS),
            ("protocol", self.protocol, recipes.PROTOCOLS),
        ):
            if value not in known:
                raise registry.unknown(kind, value, known)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise InputError(f"Seeds {list(self.seeds)}: give one or more, each once.")

    def lab(self, dataset: Dataset) -> Lab:
        """The dataset with this plan's encoder and folder."""
        return Lab(self.folder, self.encoder, dataset, self.limit, self.shard, self.report, self.executor)

    def conditions(self) -> Record:
        """The plan as recorded in results."""
        return {"track": self.track, "protocol": self.protocol, "seeds": list(self.seeds), "limit": self.limit}

    def of(self, experiment: Experiment) -> Plan:
        """The plan with the experiment's views, unless others were given."""
        return replace(self, views=self.views or (ViewPlan(experiment.views) if experiment.views else None))

    def cells(self, row: Row, dataset: Dataset, found: Recipe | None) -> list[Cell] | str:
        """The cells of an experiment's row on a dataset, one for each seed, or why there are none."""
        if row.invalid:
            return row.invalid
        text = self.text(row.text, dataset, found)
        if isinstance(text, str):
            return text
        method = self.method(row.method, found, row.settings)
        method = oracle_of(method) if row.oracle else method
        return [Cell(method, text, self.views_of(row.method, found), seed) for seed in self.seeds]

    def text(self, kind: str, dataset: Dataset, found: Recipe | None) -> Text | str:
        """What a row's text prototypes are made of (`catalogue.TEXTS`), or what is missing for it."""
        descriptions = self.descriptions_of(dataset)
        if kind == "learned" or (kind == "given" and self.learned is not None):
            if self.learned is None:
                return "needs learned prompts: give --prompts FILE, made by 'testtime train-prompts'"
            return Text(learned=self.learned)
        if kind in ("descriptions", "both") and descriptions is None:
            needed = f"needs descriptions of the classes of {dataset.name}"
            return f"{needed}: give --descriptions FILE, JSON in the CuPL format"
        return {
            "single": Text((SINGLE,)),
            "ensemble": Text(find_templates("imagenet7")),
            "ensemble80": Text(find_templates("imagenet80")),
            "templates": Text(self.templates_of(found)),
            "descriptions": Text((), descriptions),
        }.get(kind) or Text(self.templates_of(found), descriptions)

    def method(self, name: str, found: Recipe | None, settings: Mapping[str, object] | None = None) -> Method:
        """A method, written NAME or NAME:PRESET, as the track sets it for a dataset; `settings` take precedence."""
        name, colon, preset = name.partition(":")
        if colon and not preset:
            raise InputError(f"'{name}:' names no preset after the colon; write {name}, or {name}:PRESET.")
        if not preset and self.protocol in registry.method_class(name).presets:
            preset = self.protocol
        chosen = recipes.track_settings(name, self.track, found) | dict(settings or {})
        return registry.make_method(name, preset or None, chosen)

    def views_of(self, method: str, found: Recipe | None) -> ViewPlan:
        """The views that a method gets on a dataset."""
        if self.views is not None:
            return self.views
        return recipes.views_of(method.partition(":")[0], found, self.protocol)

    def templates_of(self, found: Recipe | None) -> tuple[str, ...]:
        """The templates given, or those of the dataset's recipe."""
        if self.templates is not None:
            return self.templates
        return (
            (SINGLE,) if found is None else templates(found.name, "paper" if self.protocol == "paper" else "released")
        )

    def descriptions_of(self, dataset: Dataset) -> Path | None:
        """The file of descriptions for a dataset: the one given, or the one with its name in the folder given."""
        if self.descriptions is None or not self.descriptions.is_dir():
            return self.descriptions
        found = recipes.find_recipe(dataset.name)
        names = {folded(dataset.name)} | (found.aliases if found else frozenset())
        for path in sorted(self.descriptions.glob("*.json")):
            if folded(path.stem.removeprefix("CuPL_prompts_")) in names:
                return path
        return None


Columns = Mapping[str, Dataset | str]  # a dataset by its name, or why it is missing
Plans = Mapping[str, Plan | str]  # a plan by its encoder's name, or why that is missing


class Work(NamedTuple):
    """What is to be run: some rows of an experiment, with each encoder on each dataset."""

    name: str
    experiment: Experiment
    plans: Plans
    columns: Columns
    rows: Sequence[Row]
    moments: Sequence[int] | None = None  # numbers of images, for experiments that look into the stream
    foreign: Path | None = None  # a feature file of images of none of the classes, for the streams


def recipe_of(dataset: Dataset) -> Recipe | None:
    """The recipe of a dataset with a benchmark's name and number of classes; None for your own."""
    return recipes.find_recipe(dataset.name, len(dataset.classnames))
