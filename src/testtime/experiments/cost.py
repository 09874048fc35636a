"""The cost of an experiment before it is run: images, encoder passes, disk and hours."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from testtime.datasets import Dataset
from testtime.encoding.stream import stream
from testtime.experiments import recipes
from testtime.experiments.catalogue import Experiment, Row
from testtime.experiments.lab import Lab, encoded
from testtime.experiments.plan import Plan, recipe_of
from testtime.experiments.recipes import Recipe
from testtime.machine.devices import step_device
from testtime.ops import unit
from testtime.session.session import Session
from testtime.types import Encoder, InputError, Task, ViewPlan

DEFAULT = "imagenet"  # the dataset of the paper's ablations
BYTES = 2  # features are kept in half precision
TIMED = 4  # images, or steps, that a speed is measured on


class Cost(NamedTuple):
    """What one dataset with one encoder still needs; None where it is unknown."""

    encoder: str
    dataset: str
    images: int
    passes: int  # views still to encode
    gigabytes: float | None  # of features still to write
    encoding_hours: float | None
    cells: int  # still to run
    running_hours: float | None
    why: str = ""  # what is unknown, or where speeds come from


def estimate(
    experiment: Experiment, plans: Mapping[str, Plan | str], columns: Mapping[str, Dataset | str]
) -> list[Cost]:
    """The cost of each encoder and dataset; a missing dataset is estimated from its recipe."""
    found = []
    for name, plan in plans.items():
        for column, dataset in columns.items():
            if isinstance(plan, str):
                found.append(_unknown(experiment, name, column, dataset, plan))
            elif isinstance(dataset, str):
                found.append(_absent(experiment, name, plan.of(experiment), column))
            else:
                found.append(_here(experiment, name, plan.of(experiment), column, dataset))
    return found


def paper_columns(experiment: Experiment) -> dict[str, Dataset | str]:
    """The datasets that the paper ran an experiment on, all marked as missing."""
    return {name: "not given" for name in experiment.datasets or (DEFAULT,)}


def _here(experiment: Experiment, name: str, plan: Plan, column: str, dataset: Dataset) -> Cost:
    lab, entry = plan.lab(dataset), recipe_of(dataset)
    rows = [(row, cells) for row in experiment.rows if not isinstance(cells := plan.cells(row, dataset, entry), str)]
    count = len(lab.indices)
    stores = {lab.store_path(cell.views, cell.seed): cell.views for _, cells in rows for cell in cells}
    passes, seconds = 0, 0.0
    for path, views in stores.items():
        todo = (count - min(count, encoded(path))) * views.count
        passes += todo
        noted = lab.noted(f"encode-{path.name}")
        per_pass = noted["seconds"] / noted["images"] / noted["views"] if noted else 0.0
        seconds += todo * (per_pass or (_pass_seconds(plan.encoder) if todo else 0.0))
    pending, running = 0, 0.0
    for row, cells in rows:
        todo = sum(not lab.path(cell).exists() for cell in cells)
        pending += todo
        running += todo * count * _step_seconds(row, plan, entry, lab) if todo else 0.0
    size = passes * plan.encoder.dim * BYTES / 1e9
    return Cost(name, column, count, passes, size, seconds / 3600, pending, running / 3600)


def _absent(experiment: Experiment, name: str, plan: Plan, column: str) -> Cost:
    entry = recipes.recipe(column)
    rows = [row for row in experiment.rows if not row.invalid]
    stores = _stores(rows, plan.seeds, entry, plan)
    passes = entry.benchmark.images * sum(views.count for views, _ in stores)
    seconds = passes * _pass_seconds(plan.encoder)
    running = sum(_step_seconds(row, plan, entry) for row in rows) * entry.benchmark.images * len(plan.seeds)
    size = passes * plan.encoder.dim * BYTES / 1e9
    cells = len(rows) * len(plan.seeds)
    return Cost(
        name, column, entry.benchmark.images, passes, size, seconds / 3600, cells, running / 3600, "dataset missing"
    )


def _unknown(experiment: Experiment, name: str, column: str, dataset: Dataset | str, reason: str) -> Cost:
    entry = recipes.find_recipe(column) if isinstance(dataset, str) else recipe_of(dataset)
    rows = [row for row in experiment.rows if not row.invalid]
    images = entry.benchmark.images if isinstance(dataset, str) and entry else len(dataset)
    passes = images * sum(views.count for views, _ in _stores(rows, (1,), entry))
    return Cost(name, column, images, passes, None, None, len(rows), None, reason)


def _stores(
    rows: Sequence[Row], seeds: Sequence[int], entry: Recipe | None, plan: Plan | None = None
) -> set[tuple[ViewPlan, int]]:
    """The kinds of views that rows need, by seed if views are random."""
    kinds = {plan.views_of(row.method, entry) if plan else recipes.views_of(row.method, entry) for row in rows}
    return {(views, seed if views.count > 1 else 0) for views in kinds for seed in seeds}


_PASSES: dict[str, float] = {}  # seconds by encoder: one measurement serves all datasets


def _pass_seconds(encoder: Encoder) -> float:
    """Seconds to make and encode one view on this machine."""
    if encoder.name not in _PASSES:
        import numpy as np
        from PIL import Image

        pixels = np.random.default_rng(0).integers(0, 255, (256, 256, 3), dtype=np.uint8)
        images = [Image.fromarray(pixels)] * TIMED
        for _ in range(2):  # the first one warms up
            start = time.perf_counter()
            list(stream(encoder, images, ViewPlan(count=2)))
            _PASSES[encoder.name] = (time.perf_counter() - start) / (2 * TIMED)
    return _PASSES[encoder.name]


def _step_seconds(row: Row, plan: Plan, entry: Recipe | None, lab: Lab | None = None) -> float:
    """Seconds that one image takes: as recorded by an earlier cell of this method, or on synthetic features."""
    if lab is not None:
        for path in sorted((lab.folder / "cells").glob(f"{lab.dataset.name}-{row.method}-*.json")):
            if noted := lab.noted(path.stem):
                return noted["seconds"] / noted["images"]
    classes = len(lab.dataset.classnames) if lab else (entry.benchmark.classes if entry else 2)
    random = torch.Generator().manual_seed(0)
    text = unit(torch.randn(classes, plan.encoder.dim, generator=random))
    views = unit(torch.randn(TIMED, plan.views_of(row.method, entry).count, plan.encoder.dim, generator=random))
    device = step_device(plan.encoder.device)
    try:
        session = Session(
            Task(text.to(device), tuple(map(str, range(classes)))), plan.method(row.method, entry, row.settings)
        )
    except InputError:  # prompt tuning: its cost is the text tower's, at least two passes over all classes
        return _text_seconds(plan.encoder, classes)
    session.warm_up(views.shape[1])
    start = time.perf_counter()
    session.scan(views.to(device))
    return (time.perf_counter() - start) / TIMED


def _text_seconds(encoder: Encoder, classes: int) -> float:
    """Seconds of prompt tuning, from the text tower's speed: forward, backward (twice forward), and forward again."""
    texts = [f"a photo of a thing {number}." for number in range(8)]
    encoder.encode_texts(texts)
    start = time.perf_counter()
    encoder.encode_texts(texts)
    return 4 * (time.perf_counter() - start) / len(texts) * classes


def cost_lines(costs: Sequence[Cost]) -> list[list[Any]]:
    """The costs as rows of text, with a total below; the header comes first."""
    lines: list[list[Any]] = [
        ["encoder", "dataset", "images", "passes", "GB", "hours encoding", "cells", "hours running", ""]
    ]

    def shown(value: float | None) -> str:
        return "?" if value is None else f"{value:.2f}" if value >= 0.01 or value == 0 else "< 0.01"

    for cost in costs:
        lines.append(
            [cost.encoder, cost.dataset, str(cost.images), str(cost.passes), shown(cost.gigabytes),
             shown(cost.encoding_hours), str(cost.cells), shown(cost.running_hours), cost.why]
        )  # fmt: skip
    if len(costs) > 1:

        def total(name: str) -> str:
            values = [getattr(cost, name) for cost in costs]
            return shown(None if None in values else sum(values))

        lines.append(
            ["all", "", str(sum(cost.images for cost in costs)), str(sum(cost.passes for cost in costs)),
             total("gigabytes"), total("encoding_hours"), str(sum(cost.cells for cost in costs)),
             total("running_hours"), ""]
        )  # fmt: skip
    return lines
