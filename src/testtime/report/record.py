"""Records a run for its report while it runs: no second pass, and no features are stored."""

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
    """A session observer that records each answer, and the queues after a fifth of the images and at the end.

    `labels` are those of the next images, None if unknown.

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
        # no seconds, as time includes encoding; no Brier score, as only the frozen classifier's answer is known
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
        """Record one image, right after the session has processed it."""
        if (prediction := seen.prediction) is None:
            return
        self.baseline.predictions.append(prediction.zero_shot_index)
        self.baseline.confidences.append(prediction.zero_shot_confidence)
        self.baseline.calibrated.append(prediction.zero_shot_confidence)
        self.method.predictions.append(prediction.index)
        self.method.confidences.append(prediction.confidence)
        self.method.calibrated.append(prediction.calibrated)
        self.images.append(seen.source if isinstance(seen.source, str | StoredImage) else f"image {seen.index}")
        self.labels.append(self._given[seen.index - self._first])
        # reading the state costs a copy, so skip it if the state did not change
        if self._tracer and prediction.learned and (bank := bank_of(self.session.state)):
            self._tracer.follow(bank, len(self.images) - 1)
        if len(self.images) == self._early:
            self._snapshot()

    def report(self, title: str, place: bool | None = None) -> StreamReport | UnlabelledReport:
        """The report so far: with accuracies if every image has a label, else what changed.

        `place` makes a map of the queues; by default, if scikit-learn is installed.
        """
        if not self.images:
            raise InputError("No image could be read, so there is nothing to report.")
        if not self.method.moments or self.method.moments[-1].images < len(self.images):
            self._snapshot()
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
        """Milliseconds per image since the start of the record, including reading and encoding."""
        return 1000 * (time.perf_counter() - self._start) / max(1, len(self.images))

    def _snapshot(self) -> None:
        if self._tracer and (bank := bank_of(self.session.state)):
            self.method.moments.append(Moment(len(self.images), bank, self._tracer.places.clone()))
