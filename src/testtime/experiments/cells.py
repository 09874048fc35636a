"""Cells: one method's run over one stream, run once and kept, so that an interrupted experiment can resume.

A cell is a JSON file, written atomically when its run is done. It holds the results and what they depend on, but no
times and no machine: the same experiment writes the same bytes, however often it is interrupted. Times are separate.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from testtime import __version__, files, registry
from testtime.encoding.store import Features
from testtime.experiments.lab import NOT_RUN, Cell, Lab, Record, read_bytes
from testtime.experiments.oracle import Oracle
from testtime.machine.memory import Peak
from testtime.methods.base import leaves
from testtime.metrics import Latency, Scores
from testtime.session.order import shuffled
from testtime.session.session import Session
from testtime.steppers.sweep import sweep
from testtime.types import InputError, Method, MissingPart, Task

CHUNK = 64  # images read at a time
LOGITS = 2**28  # bytes of logits kept while several settings run side by side
REPORT_INTERVAL = 20  # seconds between two progress reports of a run
SHOWN = ("macro_f1", "calibration_error", "images", "skipped", "classes", "views", "augmix", "settings", "text")
COSTS = ("loading_seconds", "peak_megabytes", "state_megabytes")  # recorded for a run on its own


def run_cells(lab: Lab, cells: Sequence[Cell], alone: bool = False) -> list[Record]:
    """Each cell's result, including those of earlier runs; a cell that cannot run has the reason under "not run".

    Settings of one method run side by side over the stream. With `alone` they run one by one, so that each has its own
    time and memory, and a cell that was run side by side is run again.
    """
    results: dict[int, Record] = {}

    def missing(numbers: Sequence[int]) -> list[int]:
        """Those still to run; existing results are used, including those of another process."""
        found = {number: lab.path(cells[number]) for number in numbers}
        done = {n: p for n, p in found.items() if p.exists() and (not alone or _ran_alone(lab, cells[n]))}
        results.update({number: _read(path) for number, path in done.items()})
        return [number for number in numbers if number not in done]

    def shared(number: int) -> tuple[object, ...]:
        """What cells that run side by side have in common; prompt tuning is slow, and comes last."""
        method, text, views, seed = cells[number]
        tuned = getattr(method, "needs_tower", False)
        return tuned, views.count, views.augmix, seed, repr(text), method.name

    if pending := missing(range(len(cells))):
        lab.report(f"{lab.dataset.name}: {len(pending)} of {len(cells)} cells to run")
    for _, group in groupby(sorted(pending, key=shared), key=shared):
        numbers = list(group)
        most = 1 if alone else max(1, LOGITS // (4 * len(lab.indices) * len(lab.dataset.classnames)))
        for start in range(0, len(numbers), most):
            if part := missing(numbers[start : start + most]):
                together = [cells[number] for number in part]
                try:
                    results |= dict(zip(part, _run(lab, together, alone), strict=True))
                except MissingPart as reason:
                    results |= {number: {NOT_RUN: str(reason)} for number in part}
    return [results[number] for number in range(len(cells))]


def costs(lab: Lab, cell: Cell) -> Record:
    """Milliseconds per image of the method and of encoding, and memory, as recorded; None if they were not."""
    step = lab.noted(lab.path(cell).stem) or {}
    encoding = lab.noted(f"encode-{lab.store_path(cell.views, cell.seed).name}")
    return {
        "milliseconds": 1000 * step["seconds"] / step["images"] if step else None,
        "encoding_milliseconds": encoding and 1000 * encoding["seconds"] / encoding["images"],
        "machine": step.get("machine"),
    } | {key: step.get(key) for key in COSTS}


def _ran_alone(lab: Lab, cell: Cell) -> bool:
    """Whether the costs of a run on its own are recorded for a cell."""
    noted = lab.noted(lab.path(cell).stem)
    return noted is not None and all(key in noted for key in COSTS)


def _run(lab: Lab, cells: Sequence[Cell], alone: bool) -> list[Record]:
    """Results of cells that differ only in their settings."""
    first, methods = cells[0], [cell.method for cell in cells]
    task = lab.task(first.text, getattr(first.method, "needs_tower", False))
    first.method.check(task)
    store = lab.store(first.views, first.seed)
    paths = [lab.path(cell) for cell in cells]
    if not alone and all(path.exists() for path in paths):  # another process ran them while this one waited
        return [_read(path) for path in paths]
    order = shuffled(len(store), first.seed)
    labels = lab.labels_of(store)[order]
    names = [store.images[row] if store.images else f"image {row}" for row in order.tolist()]
    scorers = [Scorer(method, task.classes, names) for method in methods]
    stream = stream_views(lab, first, store, order, task)
    if alone:
        seconds, noted = _measured(task, scorers[0], stream, store.views, labels)
    else:
        start = time.perf_counter()
        answers = sweep(task, methods, stream)
        seconds, noted = (time.perf_counter() - start) / len(cells), {}
        for scorer, logits in zip(scorers, answers, strict=True):
            scorer.update(logits.cpu(), labels)
    results = []
    for cell, path, scorer in zip(cells, paths, scorers, strict=True):
        skipped = {"version": __version__, "skipped": len(lab.indices) - len(order)}
        results.append(lab.conditions(cell) | skipped | scorer.compute())
        files.write_atomic(path, json.dumps(results[-1], indent=1) + "\n")
        lab.note(path.stem, {"images": len(order), "together": len(cells)} | noted, seconds)
    return results


def stream_views(lab: Lab, cell: Cell, store: Features, order: Tensor, task: Task) -> Iterator[Tensor]:
    """The store's views in an order, in chunks on the task's device, with progress reports if it takes long."""
    reported, done = time.perf_counter(), 0
    for chunk in store.chunks(order.tolist(), size=CHUNK):
        if time.perf_counter() - reported > REPORT_INTERVAL:
            reported = time.perf_counter()
            lab.report(f"{lab.dataset.name}, {cell.method.name}: {done} of {len(order)}")
        yield chunk.to(task.text.device)
        done += len(chunk)


def _measured(
    task: Task, scorer: Scorer, stream: Iterator[Tensor], views: int, labels: Tensor
) -> tuple[float, dict[str, float]]:
    """Seconds of one run, scored along the way, and its other costs; the warm-up is not in the seconds."""
    session = Session(task, scorer.method)
    loading, clock = session.warm_up(views), Latency()
    with Peak() as peak:
        for chunk in stream:
            start = time.perf_counter()
            logits = session.scan(chunk).cpu()
            clock.update(time.perf_counter() - start, len(chunk))
            scorer.update(logits, labels[clock.images - len(chunk) : clock.images])
    state = sum(leaf.nbytes for leaf in leaves(session.state)) / 1e6
    return clock.seconds, dict(zip(COSTS, (loading, peak.megabytes, state), strict=True))


class Scorer:
    """The scores of a run, updated chunk by chunk; an answer that is not finite is refused, naming the image."""

    def __init__(self, method: Method, classes: int, names: Sequence[str]) -> None:
        self.method, self.names, self.scores = method, names, Scores(classes)
        self._pending: list[tuple[Tensor, Tensor]] = []  # of an oracle, which chooses at the end

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add the logits (N, C) of a chunk."""
        if isinstance(self.method, Oracle):
            self._pending.append((logits, labels))
        else:
            self._add(logits, labels)

    def _add(self, logits: Tensor, labels: Tensor) -> None:
        probabilities = self.method.probabilities(logits)
        if not (finite := torch.isfinite(logits) & torch.isfinite(probabilities)).all():
            name = self.names[self.scores.accuracy.images + int((~finite).any(1).nonzero()[0, 0])]
            settings = ", ".join(f"{key}={value}" for key, value in registry.settings_of(self.method).items())
            raise InputError(
                f"Method '{self.method.name}' gives NaN or infinity for {name}"
                f"{f' with {settings}' if settings else ''}. Use settings of moderate size, or leave it out."
            )
        self.scores.update(probabilities, labels, predictions=logits.argmax(1))

    def compute(self) -> Record:
        """The scores, and for an oracle what it chose."""
        chosen: Record = {}
        if isinstance(self.method, Oracle):
            logits, labels = map(torch.cat, zip(*self._pending, strict=True))
            logits, chosen = self.method.chosen(logits, labels)
            self._add(logits, labels)
        found = self.scores.compute()
        return {key: found[key] for key in ("right", "accuracy", "macro_f1", "calibration_error")} | chosen


def _read(path: Path) -> Record:
    record = files.parse_json(read_bytes(path), f"{path} (remove it to compute it again)", kind=dict)
    score = record.get("accuracy")
    if not isinstance(score, float | int) or not all(key in record for key in SHOWN):
        raise InputError(f"{path} is damaged; remove it to compute it again.")
    return record | {"accuracy": float(score)}
