"""One stream of the service: a session, and the log from which it can be rebuilt bit for bit.

Methods run in one thread at a time. An image is stepped on, written to the log, and only then answered. If the log
cannot be written, what was learned since the last commit is forgotten.
"""

from __future__ import annotations

import json
import logging
import math
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from testtime.serve.database import Fenced
from testtime.serve.store import Event, Snapshot, Store, now, packed, unpacked
from testtime.serve.types import ServiceError, Settings
from testtime.session.classes import with_classes
from testtime.session.journal import row
from testtime.session.session import Session
from testtime.types import Prediction, Task

RECENT = 200  # images in the running numbers
SPREAD = 8  # automatic snapshots that are kept, spread over the images whose features are kept
NOTHING = "method: nothing to learn"  # the rule of images that the guard let pass

log = logging.getLogger("testtime.serve")
Load = Callable[[str], Session]  # the session in a state file


@dataclass(eq=False)
class Work:
    """One image on its way: encoded, to be answered in its turn."""

    views: Tensor = field(repr=False)  # (V, D)
    index: int  # position in the input
    learn: bool
    name: str
    sha256: str
    key: str | None
    thumbnail: bytes | None
    top: int


class Learning:
    """A stream's session with its log."""

    def __init__(
        self, store: Store, stream: int, settings: Settings, load: Load, session: Session | None = None
    ) -> None:
        """`session` is that of the log, if it is at hand."""
        self.store, self.stream, self.settings, self._load = store, stream, settings, load
        self._session, self._lock = session, threading.Lock()
        self.number = store.last_number(stream)
        self._snapshot_at = store.snapshots(stream)[-1].number  # the event of the last automatic one, or near it
        self._saving: Future[None] | None = None  # a snapshot that is being written
        self.seconds_writing = 0.0  # of the last images
        self.alarms: list[int] = []
        self._entropies: deque[float] = deque(maxlen=RECENT)
        self._changes: deque[bool] = deque(maxlen=RECENT)
        self._recount()

    @property
    def session(self) -> Session:
        """The session as the log says; rebuilt if it is not in memory."""
        with self._lock:  # else two threads might rebuild it, and one of them keep what is out of date
            if self._session is None:
                self._session = self._rebuilt(self.number)
            return self._session

    # Images

    def advance(self, works: Sequence[Work], learning: bool = True) -> list[dict[str, Any]]:
        """The answers to images in order, after they are in the log; with `learning` off, nothing is learned."""
        answers: list[dict[str, Any]] = []
        events: list[Event] = []
        for learn, group in _runs(works, learning):
            if not learn:
                predictions = [self.session.peek(work.views) for work in group]
                answers += [_answer(*each, None, "predict only") for each in _with_best(group, predictions)]
                continue
            features = torch.stack([work.views for work in group])
            predictions = self.session.replay_all(features, group[0].index)
            rows = zip(_with_best(group, predictions), features.cpu().numpy(), strict=True)  # one read from a GPU
            for (work, prediction, best), views in rows:
                number = self.number + len(events) + 1
                answer = _answer(work, prediction, best, number, _rule(prediction))
                events.append(_image(number, work, answer, views))
                answers.append(answer)
        began = time.perf_counter()
        if events:
            self._append(events)
            for event, answer in zip(events, (each for each in answers if each["id"] is not None), strict=True):
                self._count(event, answer["entropy"], answer["drift"])
            self._snapshot_if_due()
        self.seconds_writing = time.perf_counter() - began
        return answers

    def _count(self, event: Event, entropy: float, drift: bool) -> None:
        self.images += 1
        self.learned += bool(event.learned)
        self.refused.update([event.rule] if event.rule else [])
        self._entropies.append(entropy)
        self._changes.append(event.label != event.zero_shot)
        self.changed += self._changes[-1]
        self.alarms = [*self.alarms[-99:], event.number] if drift else self.alarms

    def _recount(self) -> None:
        """Set the running numbers from the log."""
        rows = self.store.counts(self.stream)
        self.images, self.learned = sum(row["images"] for row in rows), sum(row["learned"] or 0 for row in rows)
        self.refused = Counter({row["rule"]: row["images"] for row in rows if row["rule"]})
        self.changed = sum(row["changed"] or 0 for row in rows)
        recent = [event for event in self.store.latest(self.stream, None, RECENT) if event.kind == "image"]
        self._entropies.clear()
        self._changes.clear()
        for event in reversed([event for event in recent if event.live]):
            self._entropies.append(event.entropy or 0.0)
            self._changes.append(event.label != event.zero_shot)
        self.alarms = [event.number for event in self.store.alarms(self.stream, 100)]
        self.feedback: Counter[str] = Counter()
        for event in self.store.labels(self.stream):
            self._count_label(json.loads(event.detail or "{}"))

    def _count_label(self, detail: dict[str, Any]) -> None:
        self.feedback.update(["labels", *(name for name in ("right", "zero_shot_right") if detail[name])])

    def numbers(self) -> dict[str, Any]:
        """The running numbers of the stream."""
        changes, entropies = list(self._changes), list(self._entropies)  # copies: images may come meanwhile
        recent = len(changes)
        return {
            "images": self.images,
            "events": self.number,
            "learned": self.learned,
            "refused": dict(self.refused),
            "changed": self.changed,
            "disagreement": round(sum(changes) / recent, 4) if recent else 0.0,
            "mean_entropy": round(math.fsum(entropies) / len(entropies), 6) if recent else 0.0,
            "alarms": list(self.alarms),
            "feedback": {name: self.feedback[name] for name in ("labels", "right", "zero_shot_right")},
        }

    # Labels and classes

    def label(self, image: int, label: str) -> dict[str, Any]:
        """Take the true label of an image that was answered."""
        event = self._image(image)
        if label not in self.session.task.classnames:
            raise ServiceError(422, f"'{label}' is none of the stream's classes.")
        detail = {"image": image, "label": label, "right": event.label == label}
        detail["zero_shot_right"] = event.zero_shot == label
        given = Event(self.number + 1, "label", now(), position=image, label=label, detail=json.dumps(detail))
        detail["used"] = self._apply_label(self.session, event, label)
        self._append([given])
        self._count_label(detail)
        return detail

    def change_classes(self, task: Task, added: Sequence[str], removed: Sequence[str]) -> None:
        """Go on with other classes, those of a task."""
        session = with_classes(self.session, task)
        detail = {"classes": list(task.classnames), "added": list(added), "removed": list(removed)}
        views = packed(task.text.cpu().numpy())
        self._switch(
            session, self.number, Event(self.number + 1, "classes", now(), detail=json.dumps(detail), views=views)
        )

    # Snapshots, and going back

    def snapshot(self, title: str = "") -> Snapshot:
        """Keep the state as it is now."""
        file = self.store.write_state(self.session)
        with self.store.transaction():
            return self.store.add_snapshot(self.stream, self.number, title, False, self.session.count, file)

    def delete_snapshot(self, snapshot: int) -> None:
        """Delete a snapshot that someone took; automatic ones are needed."""
        found = self.find_snapshot(snapshot)
        if found.automatic:
            raise ServiceError(409, f"Snapshot {snapshot} is automatic: the stream is rebuilt from it.")
        with self.store.transaction():
            self.store.drop_snapshots([found])
        self.store.remove_states([found.file])

    def find_snapshot(self, snapshot: int) -> Snapshot:
        """The snapshot of a number."""
        for found in self.store.snapshots(self.stream):
            if found.id == snapshot:
                return found
        raise ServiceError(404, f"This stream has no snapshot {snapshot}.")

    def load_snapshot(self, snapshot: int | None) -> Session:
        """The session of a snapshot, or as it is now."""
        return self.session if snapshot is None else self._load(self.find_snapshot(snapshot).file)

    def roll_back(self, snapshot: int | None, before: int | None, kind: str = "rollback") -> None:
        """Go back to a snapshot, or to before an image."""
        if (snapshot is None) == (before is None):
            raise ServiceError(422, "Give either 'snapshot' or 'before', the id of an image.")
        if snapshot is not None:
            target = self.find_snapshot(snapshot)
            session, number = self._load(target.file), target.number
        else:
            number = self._image(int(before or 0)).number - 1
            session = self._rebuilt(number)
        detail = {"to": number, "snapshot": snapshot, "before": before}
        self._switch(session, number, Event(self.number + 1, kind, now(), detail=json.dumps(detail)))

    def reset(self) -> None:
        """Forget everything that was learned."""
        session = self.session.fork()
        session.reset()
        self._switch(session, -1, Event(self.number + 1, "reset", now(), detail="{}"))

    def unlearn(self, image: int) -> None:
        """Go on as if an image had never come: the stream is replayed without it, and it is erased from the log."""
        event = self._image(image)
        snapshots = self.store.snapshots(self.stream)
        gone = [image, *(label.number for label in self.store.labels(self.stream) if label.position == image)]
        later = [snapshot for snapshot in snapshots if snapshot.number >= event.number]
        session, at, renewed = self._rebuilt(event.number - 1), event.number - 1, dict[int, tuple[str, int]]()
        try:
            for snapshot in later:
                session = self._replay(session, at, snapshot.number, gone)
                at = snapshot.number
                renewed[snapshot.id] = self.store.write_state(session), session.count
            session = self._replay(session, at, self.number, gone)
            detail = json.dumps({"image": image})
            with self.store.transaction():
                self.store.forget(self.stream, gone)
                self.store.replace_states(renewed)
                self.store.add_events(self.stream, [Event(self.number + 1, "unlearn", now(), detail=detail)])
        except BaseException:
            self.store.remove_states(file for file, _ in renewed.values())
            raise
        self.number, self._session = self.number + 1, session
        self.store.remove_states(snapshot.file for snapshot in later)
        self.store.checkpoint()
        self._recount()

    def _switch(self, session: Session, number: int, event: Event) -> None:
        """Go on from another session: events after `number` no longer count, and `event` says why.

        With a number of -1, not even the first state counts.
        """
        file = self.store.write_state(session)
        gone = [snapshot for snapshot in self.store.snapshots(self.stream) if snapshot.number > number]
        try:
            with self.store.transaction():
                self.store.end_events(self.stream, number)
                self.store.drop_snapshots(gone)
                self.store.add_events(self.stream, [event])
                self.store.add_snapshot(self.stream, event.number, event.kind, True, session.count, file)
        except BaseException:
            self.store.remove_states([file])
            raise
        self.number, self._session = event.number, session
        self.store.remove_states(snapshot.file for snapshot in gone)
        self._recount()

    # The log

    def _append(self, events: Sequence[Event]) -> None:
        """Write events that the session includes already; if they cannot be written, it forgets them."""
        try:
            with self.store.transaction():
                self.store.add_events(self.stream, events)
        except BaseException:
            self.forget_unwritten()
            raise
        self.number = events[-1].number

    def forget_unwritten(self) -> None:
        """Forget what is not in the log: the session is rebuilt when it is needed."""
        self._session = None

    def _image(self, number: int) -> Event:
        event = self.store.event(self.stream, number)
        if event is None or event.kind != "image":
            raise ServiceError(404, f"This stream has no image {number}.")
        if not event.live:
            raise ServiceError(409, f"Image {number} was rolled back or unlearned before.")
        if event.views is None:
            kept = self.settings.keep_images
            raise ServiceError(409, f"Image {number} is too old: features are kept of the last {kept:,} images.")
        return event

    def _rebuilt(self, number: int) -> Session:
        """The session after the event of a number."""
        start = [snapshot for snapshot in self.store.snapshots(self.stream) if snapshot.number <= number][-1]
        return self._replay(self._load(start.file), start.number, number)

    def _replay(self, session: Session, after: int, until: int, without: Sequence[int] = ()) -> Session:
        """The session after the live events after one number, until another, are repeated in it."""
        images: dict[int, Event] = {}
        for event in self.store.live_events(self.stream, after, until):
            if event.number in without:
                continue
            if event.kind == "classes":
                detail, text = json.loads(event.detail or ""), unpacked(event.views or b"").to(session.task.text)
                names = tuple(detail["classes"])
                session = with_classes(session, replace(session.task, text=text, classnames=names))
            elif event.kind == "label":
                number = int(event.position or 0)
                image = images.get(number) or self.store.event(self.stream, number)
                if image is not None:
                    self._apply_label(session, image, event.label or "")
            else:
                if event.views is None:
                    raise ServiceError(409, f"Image {event.number} is too old to go back beyond it.")
                session.replay(unpacked(event.views), int(event.position or 0))
                images[event.number] = event
        return session

    @staticmethod
    def _apply_label(session: Session, image: Event, label: str) -> bool:
        """Give the guard a late label; whether it was of use."""
        if session.guard is None or label not in session.task.classnames:
            return False
        return session.label(int(image.position or 0), session.task.classnames.index(label))

    # Retention

    def _snapshot_if_due(self) -> None:
        """Start a snapshot when enough images have passed since the last; another thread writes it meanwhile."""
        due = self.number - self._snapshot_at >= self.settings.snapshot_every
        if due and (self._saving is None or self._saving.done()):
            self._snapshot_at = self.number
            self._saving = self.store.saver.submit(self._save, self.session.fork(), self.number)

    def wait_until_saved(self) -> None:
        """Wait for a snapshot that is being written."""
        if self._saving is not None:
            self._saving.result()

    def _save(self, session: Session, number: int) -> None:
        """Keep the state after an event; old features, rows and snapshots go."""
        try:
            file = self.store.write_state(session)
            with self.store.transaction():
                self.store.add_snapshot(self.stream, number, "", True, session.count, file)
            self._drop_old(number)
        except (sqlite3.Error, OSError, Fenced) as error:
            log.error("a snapshot could not be written; the log is complete without it: %s", error)

    def _drop_old(self, number: int) -> None:
        snapshots = self.store.snapshots(self.stream)
        window = number - self.settings.keep_images
        base = [snapshot for snapshot in snapshots if snapshot.number <= max(window, snapshots[0].number)][-1]
        automatic = [snapshot for snapshot in snapshots if snapshot.automatic]
        inside = [snapshot for snapshot in automatic if snapshot.number >= base.number]
        gone = [snapshot for snapshot in automatic if snapshot.number < base.number]
        if len(inside) > 2 * SPREAD:
            gone += inside[1:-1:2]
        with self.store.transaction():
            self.store.drop_snapshots(gone)
            self.store.drop_old(self.stream, base.number, min(base.number, number - self.settings.keep_log))
        self.store.remove_states(snapshot.file for snapshot in gone)


def _runs(works: Sequence[Work], learning: bool) -> list[tuple[bool, list[Work]]]:
    """Images in runs that are answered together: learned from and of consecutive indices, or not learned from."""
    runs: list[tuple[bool, list[Work]]] = []
    for work in works:
        learn = learning and work.learn
        if runs and runs[-1][0] == learn and (not learn or runs[-1][1][-1].index + 1 == work.index):
            runs[-1][1].append(work)
        else:
            runs.append((learn, [work]))
    return runs


def _with_best(
    works: Sequence[Work], predictions: Sequence[Prediction]
) -> Iterator[tuple[Work, Prediction, list[tuple[str, float]]]]:
    """Each image with its answer and its most probable classes, which are found for all of them at once."""
    shares = torch.stack([prediction.probabilities for prediction in predictions])
    best = shares.topk(min(max(work.top for work in works), shares.shape[1]))
    rows = zip(works, predictions, best.indices.tolist(), best.values.tolist(), strict=True)
    for work, prediction, classes, values in rows:
        names = [prediction.classnames[index] for index in classes[: work.top]]
        yield work, prediction, list(zip(names, values, strict=False))


def _answer(
    work: Work, prediction: Prediction, best: Sequence[tuple[str, float]], number: int | None, rule: str
) -> dict[str, Any]:
    values, decision = row(work.index, work.name, prediction), prediction.decision
    return {
        "id": number,
        **{name: values[name] for name in values if name not in ("truth", "correct")},
        "reason": rule,
        "probabilities": [{"label": label, "probability": round(share, 6)} for label, share in best],
        "drift": bool(decision and decision.drift),
        "disagreement": None if decision is None else round(decision.disagreement, 4),
        "repeated": False,
    }


def _rule(prediction: Prediction) -> str:
    """Why an image taught nothing; empty if it did."""
    if prediction.decision is not None and prediction.decision.refused:
        return f"guard: {prediction.decision.refused}"
    return "" if prediction.learned else NOTHING


def _image(number: int, work: Work, answer: dict[str, Any], views: np.ndarray) -> Event:
    return Event(
        number, "image", now(), key=work.key, position=work.index, name=work.name, sha256=work.sha256,
        label=answer["label"], zero_shot=answer["zero_shot"], entropy=answer["entropy"], learned=answer["learned"],
        rule=answer["reason"], drift=answer["drift"], answer=json.dumps(answer), views=packed(views),
        thumbnail=work.thumbnail,
    )  # fmt: skip


def new_task(old: Task, built: Task) -> Task:
    """The task of other classes, `built`, with the prototypes that `old` has for those that stay, bit for bit."""
    places = {name: place for place, name in enumerate(old.classnames)}
    rows = [
        old.text[places[name]] if name in places else new
        for name, new in zip(built.classnames, built.text.to(old.text), strict=True)
    ]
    return replace(built, text=torch.stack(rows), scale=old.scale)
