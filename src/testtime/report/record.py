"""A run written down as it goes, for the page about it: no second pass, and no features kept."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from importlib.util import find_spec

from testtime.report.data import StreamReport, UnlabelledReport
from testtime.report.gather import BASELINE, Runner, scored, subtitle, unscored
from testtime.report.queues import Moment, Tracer, bank_of, queue_map
from testtime.session.session import Seen, Session
from testtime.types import InputError, StoredImage


class Record:
    """An observer of a session: what it says of each image, and what its queues hold a fifth of the way and at the end.

    `labels` are those of the images to come, None where not known.

    >>> import testtime as tt
    >>> task, stream, labels = tt.toy()
    >>> session = tt.Session(task, "dpe")
    >>> record = Record(session, labels.tolist())
    >>> session.observers.append(record)
    >>> answers = [session.step(views) for views in stream]
    >>> [f"{curve.name} {curve.accuracy:.2f}" for curve in record.report("Toys", place=False).curves]
    ['zeroshot 0.72', 'dpe 0.78']
    """

    def __init__(self, session: Session, labels: Sequence[int | None]) -> None:
        self.session = session
        self.images: list[str | StoredImage] = []
        self.labels: list[int | None] = []
        # time goes into encoding too, and of the frozen classifier a prediction has no more than its answer
        self.baseline, self.method = (
            Runner(name, of, seconds=math.nan, brier=None)
            for name, of in ((BASELINE, Session(session.task, BASELINE)), (session.method.name, session))
        )
        self._given, self._first = labels, session.position
        self._early = max(1, len(labels) // 5)
        bank = bank_of(session.state)
        self._tracer = Tracer(bank) if bank else None
        self._start = time.perf_counter()

    def __call__(self, seen: Seen) -> None:
        """Note one image, right after the session has met it."""
        if (prediction := seen.prediction) is None:
            return
        self.baseline.predictions.append(prediction.zero_shot_index)
        self.baseline.confidences.append(prediction.zero_shot_confidence)
        self.method.predictions.append(prediction.index)
        self.method.confidences.append(prediction.confidence)
        self.images.append(seen.source if isinstance(seen.source, str | StoredImage) else f"image {seen.index}")
        self.labels.append(self._given[seen.index - self._first])
        # a state that did not change need not be looked at, which costs a copy of it
        if self._tracer and prediction.learned and (bank := bank_of(self.session.state)):
            self._tracer.follow(bank, len(self.images) - 1)
        if len(self.images) == self._early:
            self._look()

    def report(self, title: str, place: bool | None = None) -> StreamReport | UnlabelledReport:
        """The report so far: with accuracies where every image has a label, else of what changed.

        `place` makes a map of the queues (scikit-learn); by default, where it is installed.
        """
        if not self.images:
            raise InputError("No image could be read, so there is nothing to report.")
        if not self.method.moments or self.method.moments[-1].images < len(self.images):
            self._look()
        queues = None
        if self._tracer:
            place = find_spec("sklearn") is not None if place is None else place
            queues = queue_map(self.method.name, self.method.moments, None, self.method.predictions, place)
        views = self.session.plan.total
        task, runners = self.session.task, [self.baseline, self.method]
        if self.session.method.name == BASELINE:
            runners = [self.baseline]
        heading = title, subtitle(len(self.images), task, views)
        known = [label for label in self.labels if label is not None]
        if len(known) == len(self.labels):
            return scored(task, heading, runners, known, self.images, queues)
        return unscored(task, heading, runners, self.images, queues)

    @property
    def milliseconds(self) -> float:
        """Milliseconds per image since the record began, reading and encoding included."""
        return 1000 * (time.perf_counter() - self._start) / max(1, len(self.images))

    def _look(self) -> None:
        if self._tracer and (bank := bank_of(self.session.state)):
            self.method.moments.append(Moment(len(self.images), bank, self._tracer.places.clone()))
