"""What a report is made from: plain data, checked before anything is drawn."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from testtime import metrics
from testtime.report.words import plain
from testtime.types import InputError

PICTURE = re.compile(r"data:image/(jpeg|png|webp);base64,[A-Za-z0-9+/=]+")  # a picture inside the page


@dataclass(frozen=True)
class Curve:
    """One method over the stream.

    >>> Curve("DPE", [True, False, True, True], seconds=0.02).accuracy
    0.75
    """

    name: str
    correct: Sequence[bool]  # per image, in stream order
    seconds: float  # for the whole stream
    note: str = ""  # settings in short

    def right(self) -> Tensor:
        """Which answers are right: (N,) bool."""
        return torch.tensor(plain(self.correct), dtype=torch.bool)

    @property
    def accuracy(self) -> float:
        """Share of right answers, 0 to 1."""
        return metrics.accuracy(right := self.right(), torch.ones_like(right))

    def running(self) -> list[float]:
        """Share of right answers up to and including each image, 0 to 1."""
        return metrics.running_accuracy(right := self.right(), torch.ones_like(right)).tolist()


@dataclass(frozen=True)
class Answers:
    """What one method said of every image, in stream order."""

    name: str  # of the curve it belongs to, where there are curves
    predictions: Sequence[int]
    confidences: Sequence[float]  # probability of the answer, 0 to 1
    seconds: float = math.nan  # for the whole stream
    settings: Mapping[str, object] = field(default_factory=dict)
    brier: float | None = None  # 0 to 2; it needs every class's probability, so it is computed beforehand


class Queued(NamedTuple):
    """One feature in the queue of a class, and the image it came from."""

    label: int  # the class whose queue holds it
    image: int  # its place in the stream
    x: float | None = None  # its place on the map; any unit, the same in all snapshots
    y: float | None = None


class Snapshot(NamedTuple):
    """The queues of all classes after so many images."""

    images: int
    entries: Sequence[Queued]


@dataclass(frozen=True)
class QueueMap:
    """The queues of a method at one or more moments. Entries without a place are listed, not drawn."""

    method: str
    snapshots: Sequence[Snapshot]
    text: str = ""  # how images were found, what is left out

    @property
    def placed(self) -> bool:
        """Whether there is something to draw, all of it with a place."""
        entries = [entry for snapshot in self.snapshots for entry in snapshot.entries]
        return bool(entries) and all(entry.x is not None and entry.y is not None for entry in entries)


@dataclass(frozen=True)
class Grid:
    """Accuracy over two settings: `values[row][column]`, 0 to 1, for `ys[row]` and `xs[column]`; None where not run."""

    title: str
    x: str
    xs: Sequence[object]
    y: str
    ys: Sequence[object]
    values: Sequence[Sequence[float | None]]


@dataclass(frozen=True)
class Series:
    """Accuracy over one setting: a line for each name, its values 0 to 1 for `xs`."""

    title: str
    x: str
    xs: Sequence[object]
    lines: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class StreamReport:
    """One stream and the methods that were run over it; the first curve is the baseline (zero-shot)."""

    title: str
    subtitle: str
    curves: Sequence[Curve]
    classnames: Sequence[str]
    labels: Sequence[int]  # per image, in stream order
    facts: Mapping[str, str]  # encoder, dataset, images, seed, versions, machine, command
    text: str = ""  # plain; an empty line starts a new paragraph
    answers: Sequence[Answers] = ()  # in the order of the curves: confusion, reliability, settings
    queues: QueueMap | None = None
    grids: Sequence[Grid] = ()
    series: Sequence[Series] = ()
    names: Sequence[str] = ()  # of the images, in stream order
    thumbnails: Mapping[int, str] = field(default_factory=dict)  # place in the stream -> data URI


class Table(NamedTuple):
    """A table of text; the first cell of each row is its heading."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class TablesReport:
    """An experiment as tables and figures of its settings, without a stream of its own."""

    title: str
    subtitle: str
    tables: Sequence[Table]
    facts: Mapping[str, str]
    text: str = ""
    grids: Sequence[Grid] = ()
    series: Sequence[Series] = ()


@dataclass(frozen=True)
class QueuesReport:
    """What queues hold at some moments, without the stream that filled them: images are those held, numbered from 0."""

    title: str
    subtitle: str
    tables: Sequence[Table]
    queues: QueueMap
    classnames: Sequence[str]
    labels: Sequence[int]  # of the images held
    facts: Mapping[str, str] = field(default_factory=dict)
    text: str = ""
    names: Sequence[str] = ()
    thumbnails: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class UnlabelledReport:
    """One stream without labels: what the last method changed against the first, the baseline (zero-shot)."""

    title: str
    subtitle: str
    answers: Sequence[Answers]
    classnames: Sequence[str]
    facts: Mapping[str, str]
    text: str = ""
    queues: QueueMap | None = None
    names: Sequence[str] = ()
    thumbnails: Mapping[int, str] = field(default_factory=dict)


def check_curves(curves: Sequence[Curve]) -> None:
    """Refuse curves that do not run over the same stream."""
    if not curves:
        raise InputError("A report needs at least one curve, the baseline first.")
    for curve in curves:
        if len(curve.correct) != len(curves[0].correct):
            raise InputError(
                f"Curve '{curve.name}' has {len(curve.correct)} images, '{curves[0].name}' has "
                f"{len(curves[0].correct)}; all must run over the same stream."
            )
    if not len(curves[0].correct):
        raise InputError(f"Curve '{curves[0].name}' has no images; there is nothing to report.")


def check(report: StreamReport | TablesReport | QueuesReport | UnlabelledReport) -> None:
    """Refuse a report whose parts do not fit together, naming the first that does not."""
    if isinstance(report, StreamReport | TablesReport):
        for grid in report.grids:
            _check_grid(grid)
        for series in report.series:
            _check_series(series)
    if isinstance(report, TablesReport | QueuesReport):
        for table in report.tables:
            _check_table(table)
    if isinstance(report, TablesReport):
        return
    where, classes = f"'{report.title}'", len(report.classnames)
    if isinstance(report, StreamReport):
        check_curves(report.curves)
        images = len(report.curves[0].correct)
        labels = plain(report.labels)
        if len(labels) != images:
            raise InputError(f"{where}: {len(labels)} labels for {images} images.")
        _in_range(labels, classes, f"{where}: label")
        names = [curve.name for curve in report.curves]
        if report.answers and [answers.name for answers in report.answers] != names:
            given = ", ".join(answers.name for answers in report.answers)
            raise InputError(f"{where}: answers of {given}, where the curves are {', '.join(names)}; give the same.")
    elif isinstance(report, QueuesReport):
        images = len(report.labels)
        _in_range(plain(report.labels), classes, f"{where}: label")
    else:
        if not report.answers:
            raise InputError(f"{where}: a report needs answers, those of the baseline first.")
        images = len(report.answers[0].predictions)
        if not images:
            raise InputError(f"{where} has no images; there is nothing to report.")
    for answers in () if isinstance(report, QueuesReport) else report.answers:
        _check_answers(answers, images, classes, where)
    if report.names and len(report.names) != images:
        raise InputError(f"{where}: {len(report.names)} image names for {images} images.")
    for image, picture in report.thumbnails.items():
        if not 0 <= image < images:
            raise InputError(f"{where}: a thumbnail of image {image}, where there are {images} images.")
        if not PICTURE.fullmatch(picture):
            raise InputError(f"{where}: the thumbnail of image {image} is no base64 data URI of a JPEG, PNG or WebP.")
    for snapshot in report.queues.snapshots if report.queues else ():
        _in_range([entry.label for entry in snapshot.entries], classes, f"{where}: queue of class")
        if any(not 0 <= entry.image < images for entry in snapshot.entries):
            raise InputError(f"{where}: a queue holds an image that is not among the {images} of the stream.")


def _check_answers(answers: Answers, images: int, classes: int, where: str) -> None:
    predictions, confidences = plain(answers.predictions), plain(answers.confidences)
    if not len(predictions) == len(confidences) == images:
        raise InputError(
            f"{where}: {answers.name} has {len(predictions)} answers and {len(confidences)} confidences "
            f"for {images} images."
        )
    _in_range(predictions, classes, f"{where}: {answers.name} answers class")
    wrong = next((value for value in confidences if not 0 <= value <= 1.0001), None)
    if wrong is not None:
        raise InputError(f"{where}: {answers.name} has confidence {wrong}; a probability lies between 0 and 1.")


def _check_table(table: Table) -> None:
    for row in table.rows:
        if len(row) != len(table.head):
            raise InputError(f"'{table.title}': a row of {len(row)} cells under a head of {len(table.head)}.")


def _check_grid(grid: Grid) -> None:
    shape = [len(row) for row in grid.values]
    if not grid.xs or not grid.ys or shape != [len(grid.xs)] * len(grid.ys):
        raise InputError(
            f"'{grid.title}': rows of {shape} values, where {len(grid.ys)} rows of {len(grid.xs)} are needed."
        )


def _check_series(series: Series) -> None:
    if not series.lines or not series.xs:
        raise InputError(f"'{series.title}' has no line, or no value of {series.x}, to draw.")
    for name, values in series.lines.items():
        if len(values) != len(series.xs):
            raise InputError(f"'{series.title}': {len(values)} values of {name} for {len(series.xs)} of {series.x}.")


def _in_range(values: Sequence[int], classes: int, what: str) -> None:
    wrong = next((value for value in values if not 0 <= value < classes), None)
    if wrong is not None:
        raise InputError(f"{what} {wrong}, where {classes} class names are given.")
