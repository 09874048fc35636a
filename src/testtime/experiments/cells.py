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
from typing import NamedTuple

import torch
from torch import Tensor

from testtime import __version__, files, registry
from testtime.encoding.store import Features
from testtime.experiments.jobs import Job, Place, Where, in_order, occasional
from testtime.experiments.lab import NOT_RUN, Cell, Lab, Record, note, provenance, read_bytes
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
SHOWN = ("macro_f1", "calibration_error", "images", "skipped", "classes", "views", "augmix", "settings", "text")
COSTS = ("loading_seconds", "peak_megabytes", "state_megabytes")  # recorded for a run on its own


def run_cells(lab: Lab, cells: Sequence[Cell], alone: bool = False) -> list[Record]:
    """Each cell's result, as in `run_labs`."""
    return run_labs([(lab, cells)], alone)[0]


def run_labs(work: Sequence[tuple[Lab, Sequence[Cell]]], alone: bool = False) -> list[list[Record]]:
    """Each lab's results, including those of earlier runs; a cell that cannot run has the reason under "not run".

    Settings of one method run side by side over the stream. With `alone` they run one by one in this process, so that
    each has its own time and memory, and a cell that was run side by side is run again.
    """
    runs = [_Run(lab, cells, alone) for lab, cells in work]
    executor = work[0][0].executor if work else in_order  # a plan's, the same for all its labs
    if alone and executor is not in_order:
        executor = in_order  # of other machines, or beside other cells, times could not be compared
        work[0][0].report("times are measured: cells run on this machine, one after another")
    for (run, numbers), ran in executor(job for each in runs for job in each.jobs()):
        run.keep(numbers, ran)
    return [[run.results[number] for number in range(len(run.cells))] for run in runs]


class _Run:
    """The cells of a lab: the results there are, and jobs for the others."""

    def __init__(self, lab: Lab, cells: Sequence[Cell], alone: bool) -> None:
        self.lab, self.cells, self.alone = lab, cells, alone
        self.results: dict[int, Record] = {}
        self._stages: dict[tuple[object, ...], Stage] = {}

    def jobs(self) -> Iterator[Job]:
        """A job for cells that differ only in their settings; whatever it needs is encoded when its turn comes."""
        lab, numbers = self.lab, range(len(self.cells))
        if pending := self._missing(numbers):
            lab.report(f"{lab.dataset.name}: {len(pending)} of {len(numbers)} cells to run")
        most = 1 if self.alone else max(1, LOGITS // (4 * len(lab.indices) * len(lab.dataset.classnames)))
        for _, group in groupby(sorted(pending, key=self._shared), key=self._shared):
            alike = list(group)
            for start in range(0, len(alike), most):
                if part := self._missing(alike[start : start + most]):
                    try:
                        yield from self._job(part)
                    except MissingPart as reason:
                        self.keep(part, reason)

    def _job(self, numbers: list[int]) -> Iterator[Job]:
        lab, first = self.lab, self.cells[numbers[0]]
        task = lab.task(first.text, getattr(first.method, "needs_tower", False))
        first.method.check(task)
        store = lab.store(first.views, first.seed)
        if numbers := self._missing(numbers):  # another process may have run them while this one waited for the store
            same = id(task), id(store), first.seed
            if same not in self._stages:
                self._stages[same] = Stage(task.to("cpu"), Place.of(store), lab.labels_of(store), first.seed)
            methods = [self.cells[number].method for number in numbers]
            what = f"{lab.dataset.name}, {first.method.name}, seed {first.seed}"
            what += f", {len(methods)} settings" if len(methods) > 1 else ""
            own, where = (methods, self.alone, what), Where(task.text.device, lab.report)
            threads = torch.get_num_threads()
            yield Job((self, numbers), what, run_together, self._stages[same], own, where, threads)

    def _shared(self, number: int) -> tuple[object, ...]:
        """What cells that run side by side have in common; prompt tuning is slow, and comes last."""
        method, text, views, seed = self.cells[number]
        tuned = getattr(method, "needs_tower", False)
        return tuned, views.count, views.augmix, seed, repr(text), method.name

    def _missing(self, numbers: Sequence[int]) -> list[int]:
        """Those still to run; existing results are used, including those of another process."""
        found = {number: self.lab.path(self.cells[number]) for number in numbers}
        done = {
            n: p for n, p in found.items() if p.exists() and (not self.alone or _ran_alone(self.lab, self.cells[n]))
        }
        self.results.update({number: _read(path) for number, path in done.items()})
        return [number for number in numbers if number not in done]

    def keep(self, numbers: Sequence[int], ran: Ran | MissingPart) -> None:
        """Write what a job found, or remember why it could not run."""
        if isinstance(ran, MissingPart):
            self.results |= {number: {NOT_RUN: str(ran)} for number in numbers}
            return
        for number, scores in zip(numbers, ran.scores, strict=True):
            cell, path = self.cells[number], self.lab.path(self.cells[number])
            skipped = {"version": __version__, "skipped": len(self.lab.indices) - ran.images}
            self.results[number] = self.lab.conditions(cell) | skipped | scores
            files.write_atomic(path, json.dumps(self.results[number], indent=1) + "\n")
            noted = {"images": ran.images, "together": len(numbers)} | ran.costs
            note(self.lab.folder, path.stem, noted, ran.seconds, ran.provenance)


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


class Stage(NamedTuple):
    """What cells of the same text, views and seed have in common."""

    task: Task  # on the CPU
    place: Place
    labels: Tensor  # (N,) in the store's order
    seed: int


class Ran(NamedTuple):
    """What a job found: each cell's scores, and what a cell cost."""

    scores: list[Record]
    images: int
    seconds: float
    costs: dict[str, float]  # `COSTS`, of a run on its own
    provenance: dict[str, str]


def run_together(where: Where, stage: Stage, methods: Sequence[Method], alone: bool, what: str) -> Ran:
    """The scores of methods that differ only in their settings, over one stream."""
    task, store = stage.task.to(where.device), stage.place.store
    order = shuffled(len(store), stage.seed)
    labels = stage.labels[order]
    names = [store.images[row] if store.images else f"image {row}" for row in order.tolist()]
    scorers = [Scorer(method, task.classes, names) for method in methods]
    stream = stream_views(store, order, where, what)
    if alone:
        seconds, costs = _measured(task, scorers[0], stream, store.views, labels)
    else:
        start = time.perf_counter()
        answers = sweep(task, methods, stream)
        seconds, costs = (time.perf_counter() - start) / len(methods), {}
        for scorer, logits in zip(scorers, answers, strict=True):
            scorer.update(logits.cpu(), labels)
    return Ran([scorer.compute() for scorer in scorers], len(order), seconds, costs, provenance(task.text.device))


def stream_views(store: Features, order: Tensor, where: Where, what: str) -> Iterator[Tensor]:
    """The store's views in an order, in chunks on a device, with progress reports if it takes long."""
    report, done = occasional(where.report), 0
    for chunk in store.chunks(order.tolist(), size=CHUNK):
        report(f"{what}: {done} of {len(order)}")
        yield chunk.to(where.device)
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
