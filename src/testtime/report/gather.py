"""From features to a report: runs every method over one stream and collects its answers.

task, stream, labels = testtime.toy()
report = stream_report(task, stream, labels, ["tda", "dpe"])
page = html([report], conditions(task), "A made-up stream")
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from testtime import registry
from testtime.calibration import Calibration
from testtime.encoding.store import Features
from testtime.methods.base import need_single
from testtime.metrics import Accuracy, Brier, accuracy
from testtime.ops import unit, unit_views
from testtime.report import changed_answers, thumbnails, unlabelled
from testtime.report.data import Answers, Curve, Grid, QueueMap, Series, StreamReport, UnlabelledReport
from testtime.report.formatting import count
from testtime.report.queues import Moment, bank_of, need_tsne, queue_map
from testtime.session.session import Session
from testtime.steppers import sweep as sweeps
from testtime.types import InputError, Method, StoredImage, Task, log_of

CHUNK = 128  # images read and run at a time
BASELINE = "zeroshot"

Stream = Tensor | Features  # views (N, V, D), or a store of them
Image = str | StoredImage  # anything that `read_image` reads; empty: there is no picture of it


@dataclass
class Runner:
    """One method running over the stream, with its answers so far."""

    name: str
    session: Session
    predictions: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    calibrated: list[float] = field(default_factory=list)
    calibration: Calibration = field(default_factory=Calibration)
    seconds: float = 0.0  # spent in the method
    accuracy: Accuracy = field(default_factory=Accuracy)
    brier: Brier | None = field(default_factory=Brier)  # None if not requested, or not computable
    moments: list[Moment] = field(default_factory=list)

    def advance(self, chunk: Tensor, labels: Tensor | None) -> None:
        """Predict and learn from a chunk of images (n, V, D)."""
        if not self.predictions:
            self.session.warm_up(chunk.shape[1])  # one-time work is not counted as an image's cost
        start = time.perf_counter()
        logits = self.session.scan(chunk)
        answers = logits.argmax(1).cpu()
        self.seconds += time.perf_counter() - start
        probabilities = self.session.method.probabilities(logits).cpu()
        self.predictions += answers.tolist()
        self.confidences += probabilities.gather(1, answers[:, None])[:, 0].clamp(0, 1).tolist()
        frozen = self.session.task.zero_shot(unit(chunk[:, 0])).softmax(1).amax(1)
        self.calibrated += self.calibration.update(log_of(probabilities), frozen.cpu()).tolist()
        if labels is not None:
            self.accuracy.update(answers, labels)
        if labels is not None and self.brier is not None:
            self.brier.update(probabilities, labels)

    def answers(self) -> Answers:
        """Its answers to every image."""
        return Answers(
            self.name,
            self.predictions,
            self.confidences,
            self.seconds,
            registry.settings_of(self.session.method),
            self.brier.compute() if self.brier is not None and self.brier.images else None,
            self.calibrated,
        )


def stream_report(
    task: Task,
    stream: Stream,
    labels: Tensor | None,
    methods: Sequence[str | Method],
    *,
    order: Sequence[int] | None = None,
    images: Sequence[Image] | None = None,
    snapshots: Sequence[int] | None = None,
    place: bool = True,
    progress: Callable[[int], None] | None = None,
) -> StreamReport | UnlabelledReport:
    """The report of a stream: with accuracies if there are `labels` (N,), used only for scoring, else what changed.

    Labels, and `images` for thumbnails, are in the order of the stream; `order` lists the rows of the stream, all or
    some, in the order of the run. Zero-shot always comes first, whether it is in `methods` or not. `snapshots` are the
    numbers of images after which the queues are recorded: by default a fifth of the stream and all of it. `place` makes
    the map (scikit-learn).

    >>> import testtime as tt
    >>> task, stream, labels = tt.toy()
    >>> report = stream_report(task, stream, labels, ["dpe"], place=False)
    >>> [f"{curve.name} {curve.accuracy:.2f}" for curve in report.curves]
    ['zeroshot 0.72', 'dpe 0.78']
    """
    need_single(methods, "A report")
    rows = _rows(stream, order)
    if labels is not None and len(labels) != len(stream):
        raise InputError(f"{len(labels)} labels for a stream of {len(stream)} images.")
    truth, ordered = None if labels is None else labels.cpu()[rows], _in_order(images, stream, rows)
    runners, queues = _run(task, stream, rows, truth, methods, snapshots, place, progress)
    heading = _title(stream), subtitle(len(rows), task, _views(stream))
    if truth is None:
        return unscored(task, heading, runners, ordered, queues)
    return scored(task, heading, runners, truth.tolist(), ordered, queues)


def scored(
    task: Task,
    heading: tuple[str, str],
    runners: Sequence[Runner],
    labels: Sequence[int],
    images: Sequence[Image],
    queues: QueueMap | None,
) -> StreamReport:
    """The report of finished runs, with labels and images in the order of the run; `heading` is title and subtitle."""
    truth = torch.tensor(labels)
    curves = [
        Curve(runner.name, (torch.tensor(runner.predictions) == truth).tolist(), runner.seconds, _note(runner))
        for runner in runners
    ]
    report = StreamReport(
        *heading,
        curves,
        task.classnames,
        labels,
        {},
        answers=[runner.answers() for runner in runners],
        queues=queues,
        names=list(map(str, images)),
    )
    return replace(report, thumbnails=_thumbnails(images, changed_answers.shown(report), queues))


def unscored(
    task: Task,
    heading: tuple[str, str],
    runners: Sequence[Runner],
    images: Sequence[Image],
    queues: QueueMap | None,
) -> UnlabelledReport:
    """The report of finished runs over images without labels; otherwise as `scored`."""
    report = UnlabelledReport(
        *heading,
        [runner.answers() for runner in runners],
        task.classnames,
        {},
        queues=queues,
        names=list(map(str, images)),
    )
    most, least = unlabelled.confident(report)
    moves = unlabelled.moves(report)[: unlabelled.MOVES]
    moved = [image for move in moves for image in move.images[: unlabelled.EXAMPLES]]
    return replace(report, thumbnails=_thumbnails(images, [*most, *least, *moved], queues))


def sweep(
    task: Task,
    stream: Stream,
    labels: Tensor,
    method: str,
    settings: Mapping[str, Sequence[object]],
    *,
    others: Mapping[str, object] | None = None,
    order: Sequence[int] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Grid | Series:
    """The accuracy of a method for every value of one setting, or every pair of values of two.

    It shows how much a setting matters. A setting picked by its accuracy here is chosen with labels.

    >>> import testtime as tt
    >>> task, stream, labels = tt.toy()
    >>> sweep(task, stream, labels, "dpe", {"alpha": [0, 6]}).lines["dpe"]
    [0.73125, 0.78125]
    """
    if not 1 <= len(settings) <= 2 or not all(settings.values()):
        raise InputError(f"A sweep needs one setting or two, with values for each; got {dict(settings)}.")
    rows = _rows(stream, order)
    truth = labels.cpu()[rows]
    choices = [dict(zip(settings, chosen, strict=True)) for chosen in product(*settings.values())]
    made = [registry.make_method(method, None, dict(others or {}) | choice) for choice in choices]

    def chunks() -> Iterator[Tensor]:
        for start, chunk in _chunks(stream, rows, ()):
            yield chunk.to(task.text)
            if progress:
                progress(start + len(chunk))

    values = [accuracy(logits.argmax(1).cpu(), truth) for logits in sweeps.sweep(task, made, chunks())]
    (x, xs), *second = settings.items()
    if not second:
        return Series(f"{method} over {x}", x, list(xs), {method: values})
    y, ys = second[0]
    grid = [[values[column * len(ys) + row] for column in range(len(xs))] for row in range(len(ys))]
    return Grid(f"{method} over {x} and {y}", x, list(xs), y, list(ys), grid)


def _run(
    task: Task,
    stream: Stream,
    rows: Tensor,
    truth: Tensor | None,
    methods: Sequence[str | Method],
    snapshots: Sequence[int] | None,
    place: bool,
    progress: Callable[[int], None] | None,
) -> tuple[list[Runner], QueueMap | None]:
    """Run every method over the stream; the runs, and the queues of the last method that has any."""
    stops = _snapshot_stops(snapshots, len(rows))
    runners = _runners(task, methods)
    with_queues = next((runner for runner in reversed(runners) if bank_of(runner.session.state)), None)
    if with_queues and place:
        need_tsne()  # fails before the run, not after it
    features = []
    for start, chunk in _chunks(stream, rows, stops):
        stop = start + len(chunk)
        for runner in runners:
            runner.advance(chunk.to(task.text), None if truth is None else truth[start:stop])
        # normalised as in the session, so that a queued feature can be equal
        features.append(unit_views(chunk, task.text, start)[:, 0].cpu())
        if with_queues and stop in stops and (bank := bank_of(with_queues.session.state)):
            with_queues.moments.append(Moment(stop, bank))
        if progress:
            progress(stop)
    if with_queues is None:
        return runners, None
    name, moments, answers = with_queues.name, with_queues.moments, with_queues.predictions
    return runners, queue_map(name, moments, torch.cat(features), answers, place)


def _runners(task: Task, methods: Sequence[str | Method]) -> list[Runner]:
    made = [registry.make_method(method) if isinstance(method, str) else method for method in methods]
    if not made or made[0].name != BASELINE:
        made = [registry.make_method(BASELINE), *(method for method in made if method.name != BASELINE)]
    runners: list[Runner] = []
    for method in made:
        earlier = sum(runner.session.method.name == method.name for runner in runners)
        runners.append(Runner(f"{method.name} {earlier + 1}" if earlier else method.name, Session(task, method)))
    return runners


def _chunks(stream: Stream, rows: Tensor, stops: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Chunks (n, V, D) with the index of their first image; no chunk crosses one of the `stops`."""
    edges = sorted({*range(0, len(rows), CHUNK), *stops, len(rows)})
    for start, stop in zip(edges, edges[1:], strict=False):
        chosen = rows[start:stop]
        if isinstance(stream, Features):
            yield start, next(stream.chunks(chosen.tolist(), size=stop - start))
        else:
            yield start, stream[chosen.to(stream.device)]


def _rows(stream: Stream, order: Sequence[int] | None) -> Tensor:
    """The rows of the stream in the order of the run, validated."""
    if order is None:
        return torch.arange(len(stream))
    rows = torch.as_tensor(order, dtype=torch.long)
    if not len(rows) or int(rows.min()) < 0 or int(rows.max()) >= len(stream):
        raise InputError(f"The order must list rows of the stream, 0 to {len(stream) - 1}, at least one.")
    return rows


def _snapshot_stops(snapshots: Sequence[int] | None, images: int) -> list[int]:
    """The numbers of images after which queues are recorded, ascending."""
    if snapshots is None:
        return sorted({max(1, images // 5), images})
    invalid = next((number for number in snapshots if not 1 <= number <= images), None)
    if invalid is not None:
        raise InputError(f"A snapshot after {invalid} images, but the stream has {images}.")
    return sorted(set(snapshots))


def _in_order(images: Sequence[Image] | None, stream: Stream, rows: Tensor) -> list[Image]:
    """The images in the order of the run; empty if none are given."""
    if images is None:
        return []
    if len(images) != len(stream):
        raise InputError(
            f"{len(images)} images for features of {len(stream)}; give the list that was encoded, in its order."
        )
    return [images[row] for row in rows.tolist()]


def _thumbnails(images: Sequence[Image], first: Sequence[int], queues: QueueMap | None) -> dict[int, str]:
    """Thumbnails of the images on the page: those in `first`, then those in the queues, latest snapshot first."""
    if not any(images):
        return {}
    held = [entry.image for snapshot in reversed(queues.snapshots if queues else ()) for entry in snapshot.entries]
    wanted = dict.fromkeys([*first, *held])
    return thumbnails.make_thumbnails({index: images[index] for index in wanted if images[index]})


def _note(runner: Runner) -> str:
    """The settings that differ from the defaults."""
    method = runner.session.method
    defaults = {entry.name: entry.default for entry in fields(method)}  # type: ignore[arg-type]
    settings = {name: getattr(method, name) for name in defaults}
    changed = [f"{name}={value}" for name, value in settings.items() if value != defaults[name]]
    return ", ".join(changed) or ("defaults" if settings else "no settings")


def _title(stream: Stream) -> str:
    dataset = Path(stream.metadata.get("dataset", "")).name if isinstance(stream, Features) else ""  # it may be a path
    return dataset or (stream.path.name if isinstance(stream, Features) else "A stream")


def _views(stream: Stream) -> int:
    return stream.views if isinstance(stream, Features) else stream.shape[1]


def subtitle(images: int, task: Task, views: int) -> str:
    """The number of images, classes and views of a report."""
    return f"{count(images, 'image')}, {count(task.classes, 'class')}, {count(views, 'view')} each"
