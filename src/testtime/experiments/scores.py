"""Scores: an experiment's rows on every available dataset and encoder, with the paper's numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean, stdev

from testtime.datasets import Dataset
from testtime.experiments import recipes
from testtime.experiments.catalogue import Experiment, Row, evaluation
from testtime.experiments.cells import costs, run_labs
from testtime.experiments.lab import NOT_RUN, Cell, Lab, Record
from testtime.experiments.plan import Plan, Plans, Work, recipe_of
from testtime.experiments.recipes import Recipe
from testtime.experiments.tables import remarks as remarks  # these three show the measure
from testtime.experiments.tables import section as section
from testtime.experiments.tables import sheets as sheets
from testtime.types import InputError

SAME = "same dataset and backbone"
KEPT = ("images", "skipped", "classes", "views", "augmix", "settings", "text")  # of the first seed's cell


def run(work: Work) -> Record:
    """A record for each row, encoder and dataset."""
    experiment, plans, columns = work.experiment, work.plans, work.columns
    if work.moments is not None:
        raise InputError(f"'{work.name}' only looks at whole streams; leave out --after.")
    return {
        "bench": work.name,
        "title": experiment.title,
        "table": experiment.table,
        "axes": list(experiment.axes),
        "note": experiment.note,
        "columns": list(columns),
        "facts": next((plan.conditions() for plan in plans.values() if not isinstance(plan, str)), {}),
        "rows": list(_rows(experiment, plans, columns.items(), work.rows)),
    }


def evaluate(plan: Plan, datasets: Sequence[Dataset], methods: Sequence[str]) -> Record:
    """Every method on every dataset: one row each, with the mean over seeds and the sample deviation.

    Text prototypes are the same for all methods: templates, and descriptions if there are any, or learned prompts.
    """
    if not methods or not datasets:
        raise InputError("Nothing to evaluate: give at least one method and one dataset.")
    experiment = evaluation(methods)
    found = _rows(experiment, {plan.encoder.name: plan}, [(each.name, each) for each in datasets], experiment.rows)
    own = {NOT_RUN, "accuracy", "spread", "accuracies", "macro_f1", "calibration_error", *KEPT}
    rows = [{"dataset": row["column"], "method": row["row"]} | {k: row[k] for k in row if k in own} for row in found]
    return {"facts": {"encoder": plan.encoder.name} | plan.conditions(), "rows": rows}


def summary(results: Sequence[Record], seeds: Sequence[int]) -> Record:
    """Mean, spread and conditions of the cells of several seeds; accuracies are fractions."""
    if reasons := [result[NOT_RUN] for result in results if NOT_RUN in result]:
        return {NOT_RUN: reasons[0]}
    values = [result["accuracy"] for result in results]
    first = results[0]
    found = {
        "accuracy": mean(values),
        "spread": stdev(values) if len(values) > 1 else None,
        "accuracies": dict(zip(map(str, seeds), values, strict=True)),
        "macro_f1": mean(result["macro_f1"] for result in results),
        "calibration_error": mean(result["calibration_error"] for result in results),
        **{key: first[key] for key in KEPT},
    }
    if "oracle" in first:
        found |= {key: first[key] for key in ("method", "oracle")}
        for key in ("weight", "accuracy_by_weight"):
            found[key] = {str(seed): result[key] for seed, result in zip(seeds, results, strict=True)}
    return found


def _rows(
    experiment: Experiment, plans: Plans, columns: Iterable[tuple[str, Dataset | str]], rows: Sequence[Row]
) -> Iterable[Record]:
    """One record for each encoder, dataset and row, in this order; errors are raised before any work."""
    work = [
        (encoder, column, *_prepared(plan, dataset, column, rows))
        for encoder, plan in plans.items()
        for column, dataset in columns
    ]
    labs = [(lab, _flat(wanted)) for _, _, lab, _, wanted in work if lab is not None]
    ran = iter(run_labs(labs, alone=bool(experiment.costs)))
    for encoder, column, lab, entry, wanted in work:
        results = _results(experiment, lab, wanted, [] if lab is None else next(ran))
        base = next((result["accuracy"] for result in results if "accuracy" in result), None)
        for row, result in zip(rows, results, strict=True):
            head = {"row": row.label, "encoder": encoder, "column": column, "at": list(row.at), "line": row.line}
            if "accuracy" in result and base is not None:
                result["gain"] = result["accuracy"] - base
            yield head | result | _published(experiment, row, encoder, entry, result)


def _prepared(
    plan: Plan | str, dataset: Dataset | str, column: str, rows: Sequence[Row]
) -> tuple[Lab | None, Recipe | None, list[list[Cell] | str]]:
    """The lab, the recipe and each row's cells, or why there are none."""
    if isinstance(plan, str) or isinstance(dataset, str):
        reason = plan if isinstance(plan, str) else str(dataset)
        return None, recipes.find_recipe(column), [row.invalid or reason for row in rows]
    entry = recipe_of(dataset)
    return plan.lab(dataset), entry, [plan.cells(row, dataset, entry) for row in rows]


def _flat(wanted: Sequence[list[Cell] | str]) -> list[Cell]:
    return [cell for group in wanted if not isinstance(group, str) for cell in group]


def _results(
    experiment: Experiment, lab: Lab | None, wanted: Sequence[list[Cell] | str], results: Sequence[Record]
) -> list[Record]:
    """A record for each row, of the results of all its cells."""
    ran, found = iter(results), list[Record]()
    for group in wanted:
        if lab is None or isinstance(group, str):
            found.append({NOT_RUN: group})
            continue
        result = summary([next(ran) for _ in group], [cell.seed for cell in group])
        if experiment.costs and "accuracy" in result:
            result |= costs(lab, group[0])
        found.append(result)
    return found


def _published(experiment: Experiment, row: Row, encoder: str, entry: Recipe | None, result: Record) -> Record:
    """The paper's number for a row, and what it applies to: the same dataset and backbone, or its own."""
    if not experiment.table:
        return {"published": None, "published_for": "", "comparable": False}
    table = recipes.published()[experiment.table]
    label = row.published or row.label
    backbone = table.backbone(encoder)
    whole = entry is not None and result.get("images", entry.benchmark.images) == entry.benchmark.images
    dataset = entry.name if entry is not None and entry.name in table.columns else table.columns[0]
    same = whole and backbone == recipes.backbone_of(encoder) and entry is not None and dataset == entry.name
    spread = table.spread.get(backbone, {}).get(label)
    return {
        "published": table.value(backbone, label, dataset),
        "published_spread": spread[table.columns.index(dataset)] if spread else None,
        "published_for": SAME if same else f"{dataset}, {backbone}",
        "comparable": same,
        "published_gain": table.gain,
        "published_time": table.time.get(label),
    }
