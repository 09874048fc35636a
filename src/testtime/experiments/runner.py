"""Running an experiment: its rows on every dataset and encoder that is there, published beside measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from testtime import registry
from testtime.datasets import Dataset
from testtime.experiments import recipes
from testtime.experiments.catalogue import EXPERIMENTS, Experiment, Row
from testtime.experiments.cells import Cell, Lab, Text, run_cells, timing
from testtime.experiments.evaluate import SINGLE, Plan, find_dataset, recipe_of, summary
from testtime.experiments.recipes import Recipe
from testtime.text.prompts import find_templates
from testtime.types import InputError

DEFAULT = "imagenet"  # the dataset of the paper's ablations
SAME = "same dataset and backbone"


def find_experiment(name: str) -> Experiment:
    """The experiment of that name."""
    if name not in EXPERIMENTS:
        raise registry.unknown("experiment", name, [*EXPERIMENTS, "systems", "tsne"])
    return EXPERIMENTS[name]


def find_columns(experiment: Experiment, data: Path | None) -> dict[str, Dataset | str]:
    """The datasets of an experiment by name: those that are in `data`, and why the others are not.

    An experiment without datasets of its own runs on the one given.
    """
    if not experiment.datasets:
        if data is None:
            raise InputError("This experiment runs on a dataset of yours: give its folder, as in bench NAME FOLDER.")
        dataset = find_dataset(str(data))
        return {dataset.name: dataset}
    columns: dict[str, Dataset | str] = {}
    for name in experiment.datasets:
        try:
            if data is None:
                raise InputError("no folder of benchmarks was given: bench NAME FOLDER")
            columns[name] = find_dataset(name, data)
        except InputError as reason:
            columns[name] = str(reason)
    return columns


def run_bench(
    name: str, plans: Mapping[str, Plan | str], columns: Mapping[str, Dataset | str], keep: Sequence[str] | None = None
) -> dict[str, Any]:
    """The experiment's rows for each encoder and dataset; an encoder or a dataset may be a reason why it is missing.

    `keep` names the rows to run; all, if left out.
    """
    experiment = find_experiment(name)
    rows = _kept(experiment, keep)
    found: list[dict[str, Any]] = []
    for encoder, plan in plans.items():
        for column, dataset in columns.items():
            results: list[dict[str, Any]]
            if isinstance(plan, str) or isinstance(dataset, str):
                reason = plan if isinstance(plan, str) else str(dataset)
                results = [{"not run": row.invalid or reason} for row in rows]
                entry = recipes.find_recipe(column)
            else:
                entry = recipe_of(dataset)
                results = _run(experiment, rows, plan, dataset, entry)
            base = next((result["accuracy"] for result in results if "accuracy" in result), None)
            for row, result in zip(rows, results, strict=True):
                head = {"row": row.label, "encoder": encoder, "column": column, "at": list(row.at), "line": row.line}
                if "accuracy" in result and base is not None:
                    result["gain"] = result["accuracy"] - base
                found.append(head | result | _published(experiment, row, encoder, entry, result, column))
    return {
        "bench": name,
        "title": experiment.title,
        "table": experiment.table,
        "axes": list(experiment.axes),
        "note": experiment.note,
        "columns": list(columns),
        "facts": _facts(plans),
        "rows": found,
    }


def cells_of(row: Row, plan: Plan, lab: Lab, entry: Recipe | None) -> list[Cell] | str:
    """The cells of a row, one for each seed, or why there are none."""
    if row.invalid:
        return row.invalid
    text = _text(row.text, plan, lab.dataset, entry)
    if isinstance(text, str):
        return text
    method = plan.method(row.method, entry, row.settings)
    return [Cell(method, text, plan.views_of(row.method, entry), seed) for seed in plan.seeds]


def _run(
    experiment: Experiment, rows: Sequence[Row], plan: Plan, dataset: Dataset, entry: Recipe | None
) -> list[dict[str, Any]]:
    lab = plan.lab(dataset)
    wanted = [cells_of(row, plan, lab, entry) for row in rows]
    cells = [cell for group in wanted if not isinstance(group, str) for cell in group]
    results = iter(run_cells(lab, cells, alone=experiment.alone))
    found = []
    for group in wanted:
        if isinstance(group, str):
            found.append({"not run": group})
            continue
        result = summary([next(results) for _ in group], plan.seeds)
        if experiment.alone and "accuracy" in result:
            result |= _times(lab, group)
        found.append(result)
    return found


def _text(kind: str, plan: Plan, dataset: Dataset, entry: Recipe | None) -> Text | str:
    """What a row's prototypes are made of, or what is missing for it."""
    descriptions = plan.descriptions_of(dataset)
    if kind == "learned":
        if plan.learned is None:
            return "needs learned prompts: give --prompts FILE, made by 'testtime train-prompts'"
        return Text(learned=plan.learned)
    if kind in ("descriptions", "both") and descriptions is None:
        return f"needs descriptions of the classes of {dataset.name}: give --descriptions FILE, JSON in the CuPL format"
    return {
        "single": Text((SINGLE,)),
        "ensemble": Text(find_templates("imagenet7")),
        "ensemble80": Text(find_templates("imagenet80")),
        "templates": Text(plan.templates_of(entry)),
        "descriptions": Text((), descriptions),
        "both": Text(plan.templates_of(entry), descriptions),
        "full": Text(plan.templates_of(entry), descriptions),
    }[kind]


def _times(lab: Lab, cells: Sequence[Cell]) -> dict[str, Any]:
    """Milliseconds per image, of the method and of encoding, as they were noted; None where they were not."""
    first = cells[0]
    step = timing(lab, lab.path(first).stem)
    encoding = timing(lab, f"encode-{lab.store_path(first.views, first.seed).name}")
    return {
        "milliseconds": step and 1000 * step["seconds"] / step["images"],
        "encoding_milliseconds": encoding and 1000 * encoding["seconds"] / encoding["images"],
        "machine": step and step["machine"],
    }


def _published(
    experiment: Experiment, row: Row, encoder: str, entry: Recipe | None, result: Mapping[str, Any], column: str
) -> dict[str, Any]:
    """The paper's number for a row, and what it holds for: the same dataset and backbone, or its own."""
    if not experiment.table:
        return {"published": None, "published_for": ""}
    table = recipes.published()[experiment.table]
    label = row.published or row.label
    here = recipes.BACKBONES.get(encoder)
    backbone = here if here in table.rows else next(iter(table.rows))
    whole = entry is not None and result.get("images", entry.benchmark.images) == entry.benchmark.images
    dataset = entry.name if entry is not None and entry.name in table.columns else table.columns[0]
    value = table.value(str(backbone), label, dataset)
    same = whole and backbone == here and entry is not None and dataset == entry.name
    spread = table.spread.get(str(backbone), {}).get(label)
    return {
        "published": value,
        "published_spread": spread[table.columns.index(dataset)] if spread else None,
        "published_for": SAME if same else f"{dataset}, {backbone}",
        "published_gain": table.gain,
        "published_time": table.time.get(label),
    }


def _kept(experiment: Experiment, keep: Sequence[str] | None) -> list[Row]:
    labels = [row.label for row in experiment.rows]
    for label in keep or []:
        if label not in labels:
            raise registry.unknown("row", label, labels)
    return [row for row in experiment.rows if keep is None or row.label in keep]


def _facts(plans: Mapping[str, Plan | str]) -> dict[str, Any]:
    plan = next((plan for plan in plans.values() if not isinstance(plan, str)), None)
    if plan is None:
        return {}
    return {"track": plan.track, "protocol": plan.protocol, "seeds": list(plan.seeds), "limit": plan.limit}
