"""The input of a report: plain data, validated on creation."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from testtime import metrics
from testtime.display import line
from testtime.types import InputError

T = TypeVar("T")

DATA_URI = re.compile(r"data:image/(jpeg|png|webp);base64,[A-Za-z0-9+/=]+")  # an image embedded in the page


def plain(values: Sequence[T]) -> list[T]:
    """A list of plain values, from a tensor, an array or any sequence."""
    return values.tolist() if hasattr(values, "tolist") else list(values)


@dataclass(frozen=True)
class Curve:
    """One method over the stream.

    >>> Curve("DPE", [True, False, True, True], seconds=0.02).accuracy
    0.75
    """

    name: str
    correct: Sequence[bool]  # per image, in stream order
    seconds: float  # for the whole stream
    note: str = ""  # its settings, abbreviated

    def __post_init__(self) -> None:
        object.__setattr__(self, "correct", plain(self.correct))

    @property
    def accuracy(self) -> float:
        """Share of correct answers, 0 to 1."""
        return metrics.accuracy(right := self.right(), torch.ones_like(right))

    def right(self) -> Tensor:
        """Which answers are correct: (N,) bool."""
        return torch.tensor(self.correct, dtype=torch.bool)

    def running(self) -> list[float]:
        """Share of correct answers up to and including each image, 0 to 1."""
        return metrics.running_accuracy(right := self.right(), torch.ones_like(right)).tolist()


@dataclass(frozen=True)
class Answers:
    """The answers of one method to every image, in stream order."""

    name: str  # of its curve, if there are curves
    predictions: Sequence[int]
    confidences: Sequence[float]  # probability of the answer, 0 to 1
    seconds: float = math.nan  # for the whole stream
    settings: Mapping[str, object] = field(default_factory=dict)
    brier: float | None = None  # 0 to 2; it needs every class's probability, so it is computed beforehand
    calibrated: Sequence[float] = ()  # calibrated confidences; empty if unknown

    def __post_init__(self) -> None:
        for name in ("predictions", "confidences", "calibrated"):
            object.__setattr__(self, name, plain(getattr(self, name)))


class Queued(NamedTuple):
    """One feature in the queue of a class, and the image it came from."""

    label: int  # the class whose queue holds it
    image: int  # its index in the stream
    x: float | None = None  # its position on the map; any unit, the same in all snapshots
    y: float | None = None


class Snapshot(NamedTuple):
    """The queues of all classes after so many images."""

    images: int
    entries: Sequence[Queued]


@dataclass(frozen=True)
class QueueMap:
    """The queues of a method at one or more points of the stream. Entries without a position are listed, not drawn."""

    method: str
    snapshots: Sequence[Snapshot]
    text: str = ""  # how images were matched, what is omitted

    @property
    def entries(self) -> list[Queued]:
        """The entries of all snapshots."""
        return [entry for snapshot in self.snapshots for entry in snapshot.entries]

    @property
    def placed(self) -> bool:
        """Whether there are entries, and all have a position on the map."""
        return bool(self.entries) and all(entry.x is not None and entry.y is not None for entry in self.entries)


@dataclass(frozen=True)
class Grid:
    """Accuracy over two settings: `values[row][column]`, 0 to 1, for `ys[row]` and `xs[column]`; None if not run."""

    title: str
    x: str
    xs: Sequence[object]
    y: str
    ys: Sequence[object]
    values: Sequence[Sequence[float | None]]

    def __post_init__(self) -> None:
        shape = [len(row) for row in self.values]
        if not self.xs or not self.ys or shape != [len(self.xs)] * len(self.ys):
            raise InputError(
                f"'{self.title}': rows of {shape} values, but {len(self.ys)} rows of {len(self.xs)} are needed."
            )


@dataclass(frozen=True)
class Series:
    """Accuracy over one setting: a line for each name, its values 0 to 1 for `xs`."""

    title: str
    x: str
    xs: Sequence[object]
    lines: Mapping[str, Sequence[float]]

    def __post_init__(self) -> None:
        if not self.lines or not self.xs:
            raise InputError(f"'{self.title}' has no line, or no value of {self.x}, to draw.")
        for name, values in self.lines.items():
            if len(values) != len(self.xs):
                raise InputError(f"'{self.title}': {len(values)} values of {name} for {len(self.xs)} of {self.x}.")


@dataclass(frozen=True)
class Gaps:
    """Accuracy minus the baseline's (-1 to 1) of methods on several streams; None if not run.

    `guarded` are those with a guard, of some or all of the methods, or of none.
    """

    title: str
    streams: Sequence[str]
    plain: Mapping[str, Sequence[float | None]]  # by method, one for each stream
    guarded: Mapping[str, Sequence[float | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, values in [*self.plain.items(), *self.guarded.items()]:
            if len(values) != len(self.streams):
                raise InputError(f"'{self.title}': {len(values)} values of {name} for {len(self.streams)} streams.")

    @property
    def methods(self) -> list[str]:
        """The methods in order, with or without a guard."""
        return list(dict.fromkeys([*self.plain, *self.guarded]))


@dataclass(frozen=True)
class Table:
    """A table of text, or of `markup.Cell`s; the first cell of each row is its heading."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    apart: bool = False  # collapsed, at the end of the section

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.head):
                raise InputError(f"'{self.title}': a row of {len(row)} cells under a head of {len(self.head)}.")


class Value(NamedTuple):
    """A cell of a board: what it shows, what it is sorted by (None comes last), and a line below it."""

    shown: str
    order: float | None
    below: str = ""


class Ranked(NamedTuple):
    """A row of a board: its name, a line below it, what it assumes, and a value for each column."""

    name: str
    note: str
    assumes: Sequence[str]
    values: Sequence[Value]


@dataclass(frozen=True)
class Board:
    """Tables with the same columns and choices of cells, that a reader sorts and filters.

    `tables` have a title, a line below it, and rows for each of the `choices`, the first of which is shown at first.
    """

    columns: Mapping[str, str]  # what each means, by its heading
    choices: Sequence[str]
    tables: Sequence[tuple[str, str, Sequence[Sequence[Ranked]]]]

    def __post_init__(self) -> None:
        for title, _, bodies in self.tables:
            if len(bodies) != len(self.choices):
                raise InputError(f"'{title}': {len(bodies)} groups of rows for {len(self.choices)} choices of cells.")
            wrong = [row.name for body in bodies for row in body if len(row.values) != len(self.columns)]
            if wrong:
                raise InputError(f"'{title}': {wrong[0]} needs a value for each of {len(self.columns)} columns.")

    @property
    def assumed(self) -> list[str]:
        """Everything that a row assumes, sorted."""
        return sorted({each for _, _, bodies in self.tables for body in bodies for row in body for each in row.assumes})


class _Page:
    """What the reports share: one line of text, and in a notebook their page, in a frame of its own."""

    title: str
    subtitle: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}({line(self.title, 40)}: {line(self.subtitle, 50)})"

    def _repr_html_(self: Section) -> str:  # type: ignore[misc]
        from testtime.report.page import framed

        return framed(self)


@dataclass(frozen=True, repr=False)
class StreamReport(_Page):
    """One stream and the methods that were run over it; the first curve is the baseline (zero-shot)."""

    title: str
    subtitle: str
    curves: Sequence[Curve]
    classnames: Sequence[str]
    labels: Sequence[int]  # per image, in stream order
    conditions: Mapping[str, str]  # encoder, dataset, images, seed, versions, machine, command
    text: str = ""  # plain; an empty line starts a new paragraph
    answers: Sequence[Answers] = ()  # in the order of the curves: confusion, reliability, settings
    queues: QueueMap | None = None
    grids: Sequence[Grid] = ()
    series: Sequence[Series] = ()
    names: Sequence[str] = ()  # of the images, in stream order
    thumbnails: Mapping[int, str] = field(default_factory=dict)  # index in the stream -> data URI

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", plain(self.labels))
        check_curves(self.curves)
        images = len(self.curves[0].correct)
        if len(self.labels) != images:
            raise InputError(f"'{self.title}': {len(self.labels)} labels for {images} images.")
        names = [curve.name for curve in self.curves]
        if self.answers and [answers.name for answers in self.answers] != names:
            given = ", ".join(answers.name for answers in self.answers)
            raise InputError(f"'{self.title}': answers of {given}, but curves of {', '.join(names)}; both must match.")
        _check_images(self, images)


@dataclass(frozen=True, repr=False)
class UnlabelledReport(_Page):
    """One stream without labels: what the last method changed relative to the first, the baseline (zero-shot)."""

    title: str
    subtitle: str
    answers: Sequence[Answers]
    classnames: Sequence[str]
    conditions: Mapping[str, str]
    text: str = ""
    queues: QueueMap | None = None
    names: Sequence[str] = ()
    thumbnails: Mapping[int, str] = field(default_factory=dict)
    labels: ClassVar[None] = None

    def __post_init__(self) -> None:
        if not self.answers:
            raise InputError(f"'{self.title}': a report needs answers, those of the baseline first.")
        images = len(self.answers[0].predictions)
        if not images:
            raise InputError(f"'{self.title}' has no images; there is nothing to report.")
        _check_images(self, images)


@dataclass(frozen=True, repr=False)
class TablesReport(_Page):
    """An experiment as tables, figures of its settings and contents of queues, without its own stream."""

    title: str
    subtitle: str
    tables: Sequence[Table]
    conditions: Mapping[str, str]
    text: str = ""
    grids: Sequence[Grid] = ()
    series: Sequence[Series] = ()
    board: Board | None = None  # above the tables
    gaps: Gaps | None = None  # likewise
    queues: QueueMap | None = None
    classnames: Sequence[str] = ()
    labels: Sequence[int] = ()  # of the images in the queues, which are numbered from 0
    names: Sequence[str] = ()
    thumbnails: Mapping[int, str] = field(default_factory=dict)
    notes: Sequence[str] = ()  # below the tables and figures
    answers: ClassVar[Sequence[Answers]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", plain(self.labels))
        _check_images(self, len(self.labels))


Section = StreamReport | UnlabelledReport | TablesReport


def check_curves(curves: Sequence[Curve]) -> None:
    """Reject curves that do not run over the same stream."""
    if not curves:
        raise InputError("A report needs at least one curve, the baseline first.")
    for curve in curves:
        if len(curve.correct) != len(curves[0].correct):
            raise InputError(
                f"Curve '{curve.name}' has {len(curve.correct)} images, '{curves[0].name}' has "
                f"{len(curves[0].correct)}; all must run over the same stream."
            )
    if not curves[0].correct:
        raise InputError(f"Curve '{curves[0].name}' has no images; there is nothing to report.")


def _check_images(report: Section, images: int) -> None:
    """Reject a report that refers to an image or a class that does not exist."""
    title, classes = f"'{report.title}'", len(report.classnames)
    _in_range(report.labels or (), classes, f"{title}: label")
    for answers in report.answers:
        if not len(answers.predictions) == len(answers.confidences) == images:
            raise InputError(
                f"{title}: {answers.name} has {len(answers.predictions)} answers and {len(answers.confidences)} "
                f"confidences for {images} images."
            )
        _in_range(answers.predictions, classes, f"{title}: {answers.name} answers class")
        wrong = next((value for value in answers.confidences if not 0 <= value <= 1.0001), None)
        if wrong is not None:
            raise InputError(f"{title}: {answers.name} has confidence {wrong}; a probability lies between 0 and 1.")
    if report.names and len(report.names) != images:
        raise InputError(f"{title}: {len(report.names)} image names for {images} images.")
    for image, uri in report.thumbnails.items():
        if not 0 <= image < images:
            raise InputError(f"{title}: a thumbnail of image {image}, but there are {images} images.")
        if not DATA_URI.fullmatch(uri):
            raise InputError(f"{title}: the thumbnail of image {image} is not a base64 data URI (JPEG, PNG or WebP).")
    entries = report.queues.entries if report.queues else []
    _in_range([entry.label for entry in entries], classes, f"{title}: queue of class")
    if any(not 0 <= entry.image < images for entry in entries):
        raise InputError(f"{title}: a queue holds an image that is not among the {images} of the stream.")


def _in_range(values: Sequence[int], classes: int, what: str) -> None:
    wrong = next((value for value in values if not 0 <= value < classes), None)
    if wrong is not None:
        raise InputError(f"{what} {wrong}, but there are {classes} class names.")
