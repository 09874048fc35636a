"""Running an experiment of the catalogue, and writing its results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol

import torch

from testtime import registry
from testtime.datasets import Dataset, find_dataset
from testtime.experiments.catalogue import EXPERIMENTS, Experiment, Row
from testtime.experiments.lab import Record
from testtime.experiments.plan import Columns, Plans, Work
from testtime.experiments.sources import find_domains, is_stored, open_stored
from testtime.experiments.tables import Sheet, markdown
from testtime.files import write_atomic
from testtime.report.conditions import machine, versions
from testtime.report.page import Section, html
from testtime.types import InputError

ON_REQUEST = "chooses a setting with the test labels; run it with --row '{}'"
SLOW = "takes hours; run it with --row '{}'"


class Measure(Protocol):
    """The interface of a module that an experiment names as its measure."""

    def run(self, work: Work) -> Record:
        """The result as plain data."""

    def sheets(self, result: Record) -> list[Sheet]:
        """The result as tables of text."""

    def remarks(self, result: Record) -> list[str]:
        """The text below the tables."""

    def section(self, result: Record, columns: Columns) -> tuple[Section, dict[str, str]]:
        """The result as a section of a page, and what its footer adds to versions, machine and command."""


def measure_of(experiment: Experiment) -> Measure:
    """What runs and shows an experiment."""
    return import_module(f"testtime.experiments.{experiment.measure}")  # type: ignore[return-value]


def find_experiment(name: str) -> Experiment:
    """The experiment of that name."""
    if name not in EXPERIMENTS:
        raise registry.unknown("experiment", name, EXPERIMENTS)
    return EXPERIMENTS[name]


def find_columns(experiment: Experiment, data: Path | None) -> dict[str, Dataset | str]:
    """The datasets of an experiment by name: those found in `data`, and why the others are missing.

    An experiment without its own datasets runs on the one given; streams also on several domains or a feature file.
    """
    if not experiment.datasets:
        if data is None:
            raise InputError("This experiment runs on your own dataset: give its folder, as in bench NAME FOLDER.")
        if experiment.measure == "streams" and is_stored(data):
            stored = open_stored(data)
            return {stored.name: stored}
        domains = find_domains(data) if experiment.measure == "streams" else []
        return {found.name: found for found in map(find_dataset, map(str, domains or [data]))}
    columns: dict[str, Dataset | str] = {}
    for name in experiment.datasets:
        try:
            if data is None:
                raise InputError("no folder of benchmarks was given: bench NAME FOLDER")
            columns[name] = find_dataset(name, data)
        except InputError as reason:
            columns[name] = str(reason)
    return columns


def run_experiment(
    name: str,
    plans: Plans,
    columns: Columns,
    keep: Sequence[str] | None = None,
    moments: Sequence[int] | None = None,
    foreign: Path | None = None,
) -> Record:
    """An experiment's result, for each encoder and dataset; either may be a reason why it is missing.

    `keep` names the rows to run; by default all except those that run only on request. `moments` are for experiments
    that look into the stream; `foreign` is a feature file of images of none of the classes, for the streams.
    """
    experiment = find_experiment(name)
    if foreign is not None and experiment.measure != "streams":
        raise InputError(f"'{name}' has no foreign images; leave out --foreign.")
    plans = {encoder: plan if isinstance(plan, str) else plan.of(experiment) for encoder, plan in plans.items()}
    rows = selected(experiment, keep)
    return measure_of(experiment).run(Work(name, experiment, plans, columns, rows, moments, foreign))


def selected(experiment: Experiment, keep: Sequence[str] | None) -> list[Row]:
    """The rows of these names, ignoring case and spaces; for None all, with oracles and slow ones marked as not run."""
    known = {row.label.lower().replace(" ", ""): row for row in experiment.rows}
    if keep is None:
        return [_unless_requested(row) for row in experiment.rows]
    wanted = {label.lower().replace(" ", "") for label in keep}
    for label in wanted - known.keys():
        raise registry.unknown("row", label, known)
    return [row for label, row in known.items() if label in wanted]


def _unless_requested(row: Row) -> Row:
    reason = ON_REQUEST if row.oracle else SLOW if row.slow else ""
    return row._replace(invalid=reason.format(row.label)) if reason else row


def write_results(folder: Path, name: str, result: Record, page: str) -> None:
    """`name`.json and `name`.md in a folder; unless it measures costs, the same run writes the same bytes."""
    write_atomic(folder / f"{name}.json", json.dumps(result, indent=1) + "\n")
    write_atomic(folder / f"{name}.md", page)


def write_experiment(folder: Path, result: Record, columns: Columns, command: str = "") -> None:
    """A result in a folder, under its experiment's name: as JSON, as Markdown and as one self-contained HTML page."""
    name = result["bench"]
    experiment = EXPERIMENTS[name]
    measure = measure_of(experiment)
    write_results(folder, name, result, markdown(experiment.heading, measure.sheets(result), measure.remarks(result)))
    write_atomic(folder / f"{name}.html", page(result, columns, command))


def page(result: Record, columns: Columns, command: str = "") -> str:
    """A result as one self-contained HTML page."""
    made, about = measure_of(EXPERIMENTS[result["bench"]]).section(result, columns)
    about |= {"Versions": versions(), "Machine": machine(torch.device("cpu")), "Command": command}
    return html([made], {key: value for key, value in about.items() if value}, f"bench {result['bench']}")
