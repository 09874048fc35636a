"""Observers of a run over image files: a tally, and a journal of rows and states, so that no finished work is lost."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TextIO, TypeAlias

import torch

from testtime import files
from testtime.errors import UNENCODABLE
from testtime.machine.interrupts import deferred_interrupts
from testtime.metrics import Accuracy
from testtime.session.session import Seen, Session
from testtime.types import UNKNOWN, Decision, InputError, Prediction, StateError, StoredImage

COLUMNS = (
    "index", "image", "label", "confidence", "calibrated_confidence", "entropy", "zero_shot", "zero_shot_confidence",
    "learned",
    "truth",  # the image's own class; None where it is unknown, as is `correct`
    "correct",
    "guard",  # what the guard decided, in words; None without one
)  # fmt: skip
NAMES = ("image", "label", "zero_shot", "truth", "guard")  # columns of text
JOURNAL = "run"  # metadata key of a saved state: which images it has seen, and which rows belong to it
AUTOSAVE = 200  # images between two saves of the state: the most that a crash can lose
FORMULAS = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet evaluates a cell that starts with one of these

Row: TypeAlias = dict[str, str | float | None]


def row(
    index: int, image: object, prediction: Prediction, label: int | None = None, classnames: Sequence[str] = ()
) -> Row:
    """One prediction as plain data, beside the image's own class where it is known; entropy in nats."""
    return {
        "index": index,
        "image": str(image),
        "label": prediction.label,
        "confidence": round(prediction.confidence, 6),
        "calibrated_confidence": round(prediction.calibrated, 6),
        "entropy": round(prediction.entropy, 6),
        "zero_shot": prediction.zero_shot,
        "zero_shot_confidence": round(prediction.zero_shot_confidence, 6),
        "learned": prediction.learned,
        "truth": None if label is None else classnames[label],
        "correct": None if label is None else prediction.is_right(label),
        "guard": None if prediction.decision is None else prediction.decision.words(prediction.classnames),
    }


class Tally:
    """An observer that counts: how a run is going, scored against the images' labels, None where unknown.

    `start` is the input index of the first label.
    """

    def __init__(self, labels: Sequence[int | None], start: int = 0) -> None:
        self._labels, self._start = labels, start
        self.images = self.learned = self.changed = self.skipped = 0  # changed: answers that differ from zero-shot
        self.accuracy, self.zero_shot_accuracy = Accuracy(), Accuracy()
        self.guard = GuardTally()

    def __call__(self, seen: Seen) -> None:
        """Count one image."""
        if (prediction := seen.prediction) is None:
            self.skipped += 1
            return
        self.images += 1
        self.learned += prediction.learned
        self.changed += prediction.index != prediction.zero_shot_index
        self.guard.count(prediction.decision)
        if (label := self._labels[seen.index - self._start]) is not None:
            self.accuracy.update(torch.tensor([prediction.is_right(label)]), torch.tensor([True]))
            self.zero_shot_accuracy.update(torch.tensor([prediction.zero_shot_index]), torch.tensor([label]))

    def summary(self) -> dict[str, object]:
        """The tally as plain data; accuracies are fractions, None if no image has a label."""
        labelled = self.accuracy.images
        return {
            "images": self.images,
            "skipped": self.skipped,
            "learned": self.learned,
            "changed": self.changed,
            "labelled": labelled,
            "unlabelled": self.images - labelled,
            "accuracy": self.accuracy.compute() if labelled else None,
            "zero_shot_accuracy": self.zero_shot_accuracy.compute() if labelled else None,
        }


class GuardTally:
    """What the guard did, in numbers."""

    def __init__(self) -> None:
        self.answers: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.alarms: list[int] = []  # positions in the input of the images that raised one

    def count(self, decision: Decision | None) -> None:
        """Count one decision."""
        if decision is None:
            return
        # a frozen answer where both agree is not the guard's doing
        self.answers[decision.answer if decision.disputed or decision.answer == UNKNOWN else "agreed"] += 1
        self.refused.update([decision.refused] if decision.refused else [])
        self.alarms += [decision.index] if decision.drift else []

    def summary(self) -> dict[str, object]:
        """The counts as plain data."""
        return {"answers": dict(self.answers), "refused": dict(self.refused), "alarms": self.alarms}

    def __str__(self) -> str:
        vetoed, refused = self.answers["frozen"], sum(self.refused.values())
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.refused.most_common())
        parts = [
            f"{vetoed:,} changed answer{'s' * (vetoed != 1)} taken back",
            f"{refused:,} image{'s' * (refused != 1)} kept from teaching{f' ({reasons})' if reasons else ''}",
            *([f"{self.answers[UNKNOWN]:,} answered unknown"] if self.answers[UNKNOWN] else []),
            *([f"alarm at image {', '.join(map(str, self.alarms))}: the stream changed"] if self.alarms else []),
        ]
        return "guard: " + "; ".join(parts)


class LateLabels:
    """An observer that gives the guard the labels of some images, as a person who is asked for them would.

    They are spent on images where the method and the frozen classifier differ: only those say which is better.
    """

    def __init__(self, session: Session, labels: Sequence[int | None], budget: int, start: int = 0) -> None:
        """`labels` begin at the image of index `start` in the input; None where unknown."""
        self.session, self._labels, self.budget, self._start = session, labels, budget, start
        self.spent = 0

    def __call__(self, seen: Seen) -> None:
        """Spend a label on an image, if it is worth one."""
        if seen.prediction is not None:
            self.offer(seen.prediction.decision)

    def offer(self, decision: Decision | None) -> None:
        """Spend a label on the image that was decided on, if it is worth one."""
        if decision is not None and decision.disputed and self.spent < self.budget:
            label = self._labels[decision.index - self._start]
            self.spent += label is not None and self.session.label(decision.index, label)

    def __str__(self) -> str:
        labels = f"{self.spent:,} label{'s' * (self.spent != 1)} of {self.budget:,} used"
        return f"{labels}: {self.session.proven or 'nothing proven yet'}"


class Rows:
    """Rows as CSV, TSV or JSON lines, each flushed as it is written, so that an interrupt loses none.

    `before` is the file's existing content; if there is any, no header is written.
    """

    def __init__(self, out: TextIO, style: str, before: bytes = b"") -> None:
        self.out, self.style = out, style
        self.size, self._digest = len(before), hashlib.sha256(before)
        if style != "jsonl" and not before:
            self._write(_csv_line(COLUMNS, style))

    def write(self, values: Row) -> None:
        """Write one row."""
        if self.style == "jsonl":
            self._write(json_line(values))
        else:
            cells = values | {name: _escape_formula(name, str(values[name] or "")) for name in NAMES}
            self._write(_csv_line([cells[name] for name in COLUMNS], self.style))

    def synced(self) -> list[int | str]:
        """The number of bytes written and their digest, synced to disk so that they survive a power cut."""
        os.fsync(self.out.fileno())
        files.sync_folder(Path(self.out.name).parent)
        return [self.size, self._digest.hexdigest()]

    def _write(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()
        data = text.encode("utf-8", UNENCODABLE)
        self.size += len(data)
        self._digest.update(data)


DELIMITERS = {"csv": ",", "tsv": "\t"}


def json_line(values: Row) -> str:
    """A row as a line of JSON."""
    return json.dumps(values, ensure_ascii=False) + "\n"


def _csv_line(values: Iterable[object], style: str) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n", delimiter=DELIMITERS[style]).writerow(values)
    return text.getvalue()


def _escape_formula(name: str, text: str) -> str:
    """A cell that no spreadsheet takes for a formula; a path stays a valid path."""
    return ("./" if name == "image" else "'") + text if text.startswith(FORMULAS) else text


# Resuming a run


class EarlierRun(NamedTuple):
    """How far an earlier run got."""

    rows: bytes  # those that its state covers
    remaining: list[int]  # indices of the images still to do
    start: int  # the index of the input's first image
    names: hashlib._Hash  # the digest of the image names so far


class Journal:
    """An observer that writes a row for every answer, and saves states that record the images and rows they cover.

    A state is first saved before there are any rows, and each time after the rows that it covers. So the rows of a
    killed run reach at least as far as its state: those beyond are cut off, and their images run again.
    """

    def __init__(
        self,
        session: Session,
        write: Callable[[Row], None],
        before: EarlierRun,
        save: Path | None,
        rows: Rows | None,
        labels: Sequence[int | None],
        before_save: Callable[[], object] = lambda: None,
    ) -> None:
        """`rows` is the file that `write` fills, None for a terminal or a pipe; `labels` begin at the next image.

        `before_save` is called before a state is saved, to write what must not fall behind it.
        """
        self.session, self.write, self.save, self.rows = session, write, save, rows
        self.before_save = before_save
        self._start, self._names = before.start, before.names
        self._labels, self._first = labels, session.position
        self._position = session.position  # of the next image

    def __call__(self, seen: Seen) -> None:
        """Write the row of one image."""
        if seen.index >= self.session.position:
            return  # this image ends the run, and is run again when resumed
        if seen.prediction is not None:
            label = self._labels[seen.index - self._first]
            self.write(row(seen.index, seen.source, seen.prediction, label, self.session.task.classnames))
        self._position += 1
        self._names.update(_image_key(seen.source))
        if seen.prediction is not None and self.session.count % AUTOSAVE == 0:
            self._save()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Save the state at the start and the end of the block, even on an error, and every `AUTOSAVE` images."""
        self._save()
        try:
            yield
        finally:
            self._save()

    def _save(self) -> None:
        """Save the state, unless it is ahead of the rows: then the previous state, with fewer rows, is right."""
        if self.save and (self.rows is None or self.session.position == self._position):
            written = self.rows.synced() if self.rows else None
            record = {"begun": self._start, "input": self._names.hexdigest(), "rows": written}
            with deferred_interrupts():
                self.before_save()
                self.session.save(self.save, {JOURNAL: json.dumps(record)})


def _image_key(image: object) -> bytes:
    """An image's absolute name, the same from any working directory."""
    return os.path.abspath(str(image)).encode("utf-8", UNENCODABLE) + b"\0"


def no_earlier_run(paths: Sequence[StoredImage], position: int) -> EarlierRun:
    """A run that starts here: no rows yet, and all images still to do."""
    return EarlierRun(b"", list(range(len(paths))), position, hashlib.sha256())


def read_earlier_run(state: Path, out: Path, style: str, paths: Sequence[StoredImage], position: int) -> EarlierRun:
    """How far a run over these images got, from its state and rows; rows beyond the state are cut off.

    If the input starts like the earlier one, the run resumes after it. Otherwise images that have a row are left out.
    """
    record = files.parse_json((files.open_tensors(state, StateError).metadata() or {}).get(JOURNAL, "{}"), state)
    start, names, written = (
        record.get(key) if isinstance(record, dict) else None for key in ("begun", "input", "rows")
    )
    rows = out.read_bytes()
    if not (isinstance(written, list) and written and isinstance(written[0], int) and written[0] >= 0):
        raise InputError(f"{state} does not record which rows belong to it, so {out} cannot be resumed; use another.")
    rows = rows[: written[0]]
    if [len(rows), hashlib.sha256(rows).hexdigest()] != written:
        raise InputError(f"{out} does not start with the rows of the run that saved {state}; use another --out.")
    check_columns(_columns_of(rows, style, out), out)
    if os.path.getsize(out) > len(rows):
        os.truncate(out, len(rows))
    done = position - start if isinstance(start, int) and 0 <= start <= position else 0
    digest = hashlib.sha256(b"".join(map(_image_key, paths[:done])))
    if done <= len(paths) and digest.hexdigest() == names:
        return EarlierRun(rows, list(range(done, len(paths))), position - done, digest)
    answered, remaining = Counter(_images_in(rows, style, out)), []
    for index, path in enumerate(paths):
        if answered[key := _image_key(path)]:
            answered[key] -= 1
        else:
            remaining.append(index)
    return no_earlier_run(paths, position)._replace(rows=rows, remaining=remaining)


def _columns_of(rows: bytes, style: str, out: Path) -> list[str]:
    """The columns that rows have, from their first line; ours if there is none."""
    first = rows.decode("utf-8", "replace").partition("\n")[0]
    if style == "jsonl":
        return list(files.parse_json(first, out, kind=dict)) if first else list(COLUMNS)
    return first.split(DELIMITERS[style])


def check_columns(columns: Sequence[str], out: Path) -> None:
    """Refuse rows of other columns than ours, such as an older version wrote: more rows would not line up with them."""
    if tuple(columns) != COLUMNS:
        raise InputError(
            f"{out} has the columns {', '.join(columns)}, and this version writes {', '.join(COLUMNS)}. To go on from "
            "the saved state, use another --out."
        )


def _images_in(rows: bytes, style: str, out: Path) -> Iterator[bytes]:
    """The images that rows are about, as `_image_key` writes them."""
    text = rows.decode("utf-8", "replace")
    try:
        if style == "jsonl":
            found = [str(files.parse_json(line, out)["image"]) for line in text.split("\n") if line]
        else:
            table = csv.DictReader(io.StringIO(text, newline=""), delimiter=DELIMITERS[style])
            found = [str(values["image"]) for values in table]
    except (csv.Error, KeyError, TypeError):
        raise InputError(f"{out} is not the {style} output of an earlier run; use another --out.") from None
    return map(_image_key, found)
