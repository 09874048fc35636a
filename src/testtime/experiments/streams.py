"""The stream lab: where online adaptation hurts, with and without the guard.

A cell is one method over all orders of one stream: a JSON file, as in `cells`. What it cost is in `timings`.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from testtime import __version__, files, metrics, registry
from testtime.experiments.catalogue import Row
from testtime.experiments.jobs import Job, Where, occasional
from testtime.experiments.lab import NOT_RUN, Record, fingerprint, note, provenance, read_bytes, slug
from testtime.experiments.oracle import Oracle
from testtime.experiments.plan import Plan, Work
from testtime.experiments.scenarios import FOREIGN, RECIPE, Images, make_stream
from testtime.experiments.sources import Located, Source, find_sources
from testtime.experiments.stream_runs import LOOKS, PROBES, TRIED, WINDOW, run_stream, score, task_of
from testtime.experiments.stream_tables import remarks as remarks  # these three show the measure
from testtime.experiments.stream_tables import section as section
from testtime.experiments.stream_tables import sheets as sheets
from testtime.guard import Guard
from testtime.machine.devices import step_device
from testtime.machine.threads import workers
from testtime.methods.base import leaves
from testtime.session.session import Session
from testtime.steppers import parallel_steppers
from testtime.types import InputError, Method, MissingPart, Task

TOLERATED = 0.01  # a cell no more than one point under zero-shot does no harm
HELPED = 0.005  # a cell more than half a point above it shows what adaptation gains


class Cell(NamedTuple):
    """One method over all orders of one stream."""

    source: Source
    kind: str
    row: Row
    guarded: bool
    method: Method
    about: Record  # everything that its scores depend on


def run(work: Work) -> Record:
    """A record for each dataset, stream and method, with the guard off and on, and a summary."""
    if work.moments is not None:
        raise InputError(f"'{work.name}' only looks at whole streams; leave out --after.")
    ((plan,), datasets) = work.plans.values(), list(work.columns.values())
    if isinstance(plan, str):
        raise InputError(plan)
    sources = find_sources(plan, [each for each in datasets if not isinstance(each, str)], work.foreign)
    guard = registry.settings_of(Guard())
    cells = list(_cells(plan, sources, [row for row in work.rows if not row.invalid], guard))
    results = [{NOT_RUN: found} if isinstance(found, str) else summary(found) for found in run_cells(plan, cells)]
    rows = [_head(cell) | result for cell, result in zip(cells, results, strict=True)]
    return {
        "bench": work.name,
        "title": work.experiment.title,
        "note": work.experiment.note,
        "facts": plan.conditions() | {"encoder": sources[0].about["encoder"], "window": WINDOW},
        "columns": [source.name for source in sources],
        "guard": guard,
        "omitted": {row.label: row.invalid for row in work.rows if row.invalid},
        "text": {source.name: source.about["text"] for source in sources if "text" in source.about},
        "summary": overview(rows),
        "rows": rows,
    }


def overview(rows: Sequence[Record]) -> list[Record]:
    """For each method and for all, with the guard off and on: the share of cells without harm, the gap, the gain kept.

    The gain kept is that of cells where the method helps without the guard, as a share of it. None: no such cell.
    """
    ran = [row for row in rows if NOT_RUN not in row and row["method"] != "zeroshot"]
    plain = {_place(row): row["gap"] for row in ran if not row["guard"]}
    found = []
    for label in [*dict.fromkeys(row["row"] for row in ran), ""]:
        for guarded in (False, True):
            mine = [row for row in ran if label in ("", row["row"]) and row["guard"] == guarded]
            if not mine:
                continue
            helped = [row for row in mine if plain.get(_place(row), 0.0) > HELPED]
            gain = sum(plain[_place(row)] for row in helped)
            found.append(
                {
                    "row": label,
                    "guard": guarded,
                    "cells": len(mine),
                    "harmless": mean(row["gap"] >= -TOLERATED for row in mine),
                    "gap": mean(row["gap"] for row in mine),
                    "lowest_gap": min(row["gap"] for row in mine),
                    "worst_gap": min(row["worst_gap"] for row in mine),
                    "gain_kept": sum(row["gap"] for row in helped) / gain if helped else None,
                }
            )
    return found


def _place(row: Record) -> tuple[str, str, str]:
    return row["column"], row["stream"], row["row"]


def _cells(plan: Plan, sources: Sequence[Source], rows: Sequence[Row], guard: Record) -> Iterator[Cell]:
    """Every cell, with the guard off and on; a method that remembers nothing has nothing to guard."""
    for source in sources:
        for kind in source.kinds:
            for row in rows:
                method = plan.method(row.method, source.entry, row.settings)
                yield cell_of(plan, source, kind, row, method)
                if getattr(method, "remembers", True):
                    yield cell_of(plan, source, kind, row, method, guard)


def cell_of(plan: Plan, source: Source, kind: str, row: Row, method: Method, guard: Record | None = None) -> Cell:
    """The cell of a method on one stream of a source, guarded if the guard's settings are given."""
    about = source.about | {"stream": kind, "made": RECIPE, "orders": list(plan.seeds)}
    about |= {"attacker": [LOOKS, TRIED, PROBES]} if kind.startswith("attacker") else {}
    about |= {"method": method.name, "settings": registry.settings_of(method), "guard": guard}
    return Cell(source, kind, row, guard is not None, method, about)


def run_cells(plan: Plan, cells: Sequence[Cell]) -> list[list[Record] | str]:
    """The scores of each order of each cell, those of earlier runs are read; or why a cell has none."""
    paths = [path_of(plan.folder, cell) for cell in cells]
    results: dict[int, list[Record] | str] = {}
    if todo := sum(not path.exists() for path in paths):
        orders = sorted({len(cell.about["orders"]) for cell in cells})
        plan.report(f"{todo} of {len(cells)} cells to run, {' or '.join(map(str, orders))} orders each")
    report = occasional(plan.report)

    def jobs() -> Iterator[Job]:
        for number, (path, cell) in enumerate(zip(paths, cells, strict=True)):
            if path.exists():
                results[number] = _read(path, cell)
                continue
            try:
                job = job_of(number, cell, plan, f"cell {number + 1} of {len(cells)}: ", report)
            except MissingPart as reason:
                results[number] = str(reason)
            else:
                yield job

    for number, ran in plan.executor(jobs()):
        if isinstance(ran, MissingPart):
            results[number] = str(ran)
            continue
        path, cell = paths[number], cells[number]
        cost = {"images": sum(each.images for each in ran), "state_bytes": max(each.state for each in ran)}
        seconds, made = sum(each.seconds for each in ran), ran[0].provenance
        note(plan.folder, path.stem, cost, seconds, made)  # first: a cell has its cost
        record = cell.about | {"version": __version__, "scores": [each.scores for each in ran]}
        files.write_atomic(path, json.dumps(record, indent=1) + "\n")
        results[number] = _read(path, cell)
    return [results[number] for number in range(len(cells))]


class Ran(NamedTuple):
    """One order that was run: its scores, and what it cost."""

    scores: Record
    seconds: float  # of the one core that it ran on; on a GPU, by the clock
    images: int
    state: int  # bytes
    provenance: dict[str, str]


def job_of(key: object, cell: Cell, plan: Plan, place: str, report: Callable[[str], None]) -> Job:
    """A cell as a job, which returns what it `Ran`; its images are encoded if need be. `place` begins its reports."""
    what = f"{cell.source.name}, {cell.kind}, {cell.row.label}{', guarded' * cell.guarded}"
    own = cell.kind, cell.method, cell.guarded, cell.about["orders"], place + what
    return Job(key, what, run_orders, cell.source.locate(), own, Where(step_device(plan.encoder.device), report))


def run_orders(
    where: Where, located: Located, kind: str, method: Method, guarded: bool, seeds: Sequence[int], what: str
) -> list[Ran]:
    """The scores of each order. On a CPU, orders run side by side, one core each.

    So a cell's numbers do not depend on the number of cores, nor on which cells were run before.
    """
    images, idle, found = located.images, list[Session](), list[Ran]()
    task = images.task.to(where.device)
    order = partial(_order, kind, method, guarded, images, task, idle)
    for ran in workers(parallel_steppers(task.text.device)).map(order, seeds):
        found.append(ran)
        where.report(f"{what}, {len(found)} of {len(seeds)} orders")
    return found


def _order(kind: str, method: Method, guarded: bool, images: Images, task: Task, idle: list[Session], seed: int) -> Ran:
    """The scores of one order; sessions of the whole task go on from one order to another, loaded and captured."""
    stream = make_stream(kind, images, seed)
    if isinstance(stream, str):
        raise MissingPart(stream)
    mine = task_of(task, stream)
    if idle and mine is task:
        session = idle.pop()
    else:
        session = Session(mine, method, guard=guarded)
        session.warm_up(images.views.shape[1])
    clock = time.thread_time if task.text.is_cpu else time.perf_counter
    start = clock()
    answers = run_stream(session, stream)
    seconds, state = clock() - start, sum(leaf.nbytes for leaf in leaves(session.state))
    if mine is task:
        idle.append(session)
    if isinstance(method, Oracle):  # chosen by the labels of the images that are scored
        told = stream.labels.where(stream.scored, FOREIGN)
        answers = answers._replace(logits=method.chosen(answers.logits, told)[0])
    scores = {"seed": seed} | score(task_of(images.task, stream), method, stream, answers)
    return Ran(scores, seconds, len(stream.rows), state, provenance(task.text.device))


def summary(scores: Sequence[Record]) -> Record:
    """Means over orders, the sample deviation of the accuracy, the worst tenth of the orders, and the worst window."""
    numbers = [key for key in scores[0] if key not in ("seed", "refused", "worst", "worst_gap")]
    found: Record = {key: mean(order[key] for order in scores) for key in numbers}
    found |= {key: min(order[key] for order in scores) for key in ("worst", "worst_gap")}
    found["spread"] = stdev(order["accuracy"] for order in scores) if len(scores) > 1 else None
    found |= {f"tail_{key}": metrics.tail_mean([order[key] for order in scores]) for key in ("accuracy", "gap")}
    if "refused" in scores[0]:
        found["refused"] = dict(sorted(sum((Counter(order["refused"]) for order in scores), Counter[str]()).items()))
    return found


def _head(cell: Cell) -> Record:
    place = {"row": cell.row.label, "column": cell.source.name, "stream": cell.kind, "guard": cell.guarded}
    return place | {"method": cell.method.name, "settings": cell.about["settings"]}


def path_of(folder: Path, cell: Cell) -> Path:
    """Where a cell is, or will be."""
    parts = (cell.source.name, cell.kind, cell.method.name, *(["guarded"] if cell.guarded else []))
    return folder / "cells" / f"{'-'.join(map(slug, parts))}-{fingerprint(cell.about)}.json"


def _read(path: Path, cell: Cell) -> list[Record]:
    record = files.parse_json(read_bytes(path), f"{path} (remove it to compute it again)", kind=dict)
    scores = record.get("scores")
    whole = isinstance(scores, list) and len(scores) == len(cell.about["orders"])
    if not whole or not all(isinstance(each, dict) and "worst_gap" in each for each in scores):
        raise InputError(f"{path} is damaged; remove it to compute it again.")
    return scores
