"""Evaluation: methods x datasets x seeds, as mean and spread, from cells that are run once and kept."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from testtime import registry
from testtime.datasets import Dataset, open_dataset, templates
from testtime.datasets.benchmarks import folded
from testtime.experiments import recipes
from testtime.experiments.cells import SHARD, Cell, Lab, Text, run_cells
from testtime.experiments.recipes import Recipe
from testtime.files import write_atomic
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
        return Lab(self.folder, self.encoder, dataset, self.limit, self.shard, self.report)

    def method(self, name: str, found: Recipe | None, settings: Mapping[str, object] | None = None) -> Method:
        """A method, written NAME or NAME:PRESET, as the track sets it for a dataset; `settings` have the last word."""
        name, _, preset = name.partition(":")
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
        """The file of descriptions for a dataset: the one given, or the one of its name in the folder given."""
        if self.descriptions is None or not self.descriptions.is_dir():
            return self.descriptions
        found = recipes.find_recipe(dataset.name)
        names = {folded(dataset.name)} | (found.aliases if found else frozenset())
        for path in sorted(self.descriptions.glob("*.json")):
            if folded(path.stem.removeprefix("CuPL_prompts_")) in names:
                return path
        return None


def evaluate(plan: Plan, datasets: Sequence[Dataset], methods: Sequence[str]) -> dict[str, Any]:
    """Every method on every dataset: one row each, with the mean over seeds and the sample deviation.

    Text prototypes are the same for all methods: templates, and descriptions where there are some, or learned prompts.
    """
    if not methods or not datasets:
        raise InputError("Nothing to evaluate: give one method and one dataset, or more.")
    found = [recipe_of(dataset) for dataset in datasets]
    chosen = [[plan.method(name, entry) for name in methods] for entry in found]  # mistakes show before any work
    rows = []
    for dataset, entry, ready in zip(datasets, found, chosen, strict=True):
        lab = plan.lab(dataset)
        text = Text(plan.templates_of(entry), plan.descriptions_of(dataset), plan.learned)
        cells = [
            Cell(method, text, plan.views_of(name, entry), seed)
            for name, method in zip(methods, ready, strict=True)
            for seed in plan.seeds
        ]
        results = run_cells(lab, cells)
        for number, name in enumerate(methods):
            part = results[number * len(plan.seeds) : (number + 1) * len(plan.seeds)]
            rows.append({"dataset": dataset.name, "method": name} | summary(part, plan.seeds))
    facts = {
        "encoder": plan.encoder.name,
        "track": plan.track,
        "protocol": plan.protocol,
        "seeds": list(plan.seeds),
        "limit": plan.limit,
    }
    return {"facts": facts, "rows": rows}


def summary(results: Sequence[dict[str, Any]], seeds: Sequence[int]) -> dict[str, Any]:
    """Mean, spread and conditions of the cells of several seeds; accuracies are fractions."""
    if reasons := [result["not run"] for result in results if "not run" in result]:
        return {"not run": reasons[0]}
    values = [result["accuracy"] for result in results]
    first = results[0]
    return {
        "accuracy": mean(values),
        "spread": stdev(values) if len(values) > 1 else None,
        "accuracies": dict(zip(map(str, seeds), values, strict=True)),
        "macro_f1": mean(result["macro_f1"] for result in results),
        "calibration_error": mean(result["calibration_error"] for result in results),
        **{key: first[key] for key in ("images", "skipped", "classes", "views", "augmix", "settings", "text")},
    }


def recipe_of(dataset: Dataset) -> Recipe | None:
    """The recipe of a dataset that goes by a benchmark's name and has as many classes; None for one's own."""
    return recipes.find_recipe(dataset.name, len(dataset.classnames))


def find_dataset(what: str, root: Path | None = None, *, labelled: bool = True) -> Dataset:
    """A dataset by its path, or a benchmark by its short name in the folder `root` that holds it.

    One without labels is refused, unless `labelled` is False.
    """
    dataset = open_dataset(what) if os.path.exists(os.path.expanduser(what)) else open_dataset(what, root=root)
    if labelled and dataset.labels is None:
        why = f" ({'; '.join(dataset.notes)})" if dataset.notes else ""
        raise InputError(f"{what} has no labels to score with{why}: put images in folders named after their classes.")
    return dataset


def write_results(folder: Path, name: str, result: dict[str, Any], page: str) -> None:
    """`name`.json and `name`.md in a folder; no times in either, so that runs can be compared byte for byte."""
    write_atomic(folder / f"{name}.json", json.dumps(result, indent=1) + "\n")
    write_atomic(folder / f"{name}.md", page)


def markdown(result: dict[str, Any]) -> str:
    """An evaluation as a page: what it ran on, and one table."""
    facts = result["facts"]
    lines = [
        f"Encoder {facts['encoder']}, track {facts['track']}, protocol {facts['protocol']}, {seeds_of(facts)}. "
        "Accuracy in percent, mean and sample deviation over seeds.",
        "",
        "| dataset | method | images | views | accuracy | spread | macro F1 | calibration error |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        if "not run" in row:
            lines.append(f"| {row['dataset']} | {row['method']} | not run: {row['not run']} | | | | | |")
            continue
        shown = (percent(row[key]) for key in ("accuracy", "spread", "macro_f1", "calibration_error"))
        views = f"{row['views']}{' AugMix' * row['augmix']}"
        lines.append(f"| {row['dataset']} | {row['method']} | {row['images']} | {views} | {' | '.join(shown)} |")
    texts = {(row["dataset"], described(row["text"])) for row in result["rows"] if "text" in row}
    lines += ["", *(f"Text on {dataset}: {text}." for dataset, text in sorted(texts))]
    return "\n".join(lines) + "\n"


def seeds_of(facts: Mapping[str, Any]) -> str:
    """The seeds in words: seed 1, or seeds 1, 2, 3."""
    return f"seed{'s' * (len(facts['seeds']) > 1)} {', '.join(map(str, facts['seeds']))}"


def described(text: Mapping[str, Any]) -> str:
    """What text prototypes were made of, in words."""
    if text["learned"]:
        return f"learned prompt {text['learned']}"
    templates = text["templates"]
    parts = [f"'{templates[0]}'" if len(templates) == 1 else f"{len(templates)} templates"] if templates else []
    return " and ".join([*parts, *([f"descriptions {text['descriptions']}"] if text["descriptions"] else [])])


def percent(fraction: float | None) -> str:
    """A fraction in percent with two decimals, empty for None."""
    return "" if fraction is None else f"{100 * fraction:.2f}"
