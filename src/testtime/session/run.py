"""A stream of image files through a session, written down row by row so that nothing done is lost."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from testtime import files
from testtime.errors import ODD
from testtime.machine.interrupts import held_back
from testtime.session.session import Session
from testtime.types import InputError, Prediction, StateError, StoredImage

if TYPE_CHECKING:
    from testtime.report.record import Record

COLUMNS = (
    "index",
    "image",
    "label",
    "confidence",
    "entropy",
    "zero_shot",
    "zero_shot_confidence",
    "learned",
)
JOURNAL = "run"  # of a saved state's metadata: what it has met, and which rows are its own
AUTOSAVE = 200  # images between two saves of the state, so that a crash costs at most these
FORMULAS = ("=", "+", "-", "@", "\t", "\r")  # a cell that begins so is one to a spreadsheet, which computes it


def row(index: int, path: StoredImage, prediction: Prediction) -> dict[str, Any]:
    """One prediction as plain data; entropy in nats."""
    return {
        "index": index,
        "image": str(path),
        "label": prediction.label,
        "confidence": round(prediction.confidence, 6),
        "entropy": round(prediction.entropy, 6),
        "zero_shot": prediction.zero_shot,
        "zero_shot_confidence": round(prediction.zero_shot_confidence, 6),
        "learned": prediction.learned,
    }


@dataclass
class Tally:
    """How a run is going; accuracies count images whose class is known."""

    images: int = 0
    learned: int = 0
    changed: int = 0  # answers other than the zero-shot one
    labelled: int = 0
    correct: int = 0
    zero_shot_correct: int = 0
    skipped: list[str] = field(default_factory=list)  # one line per image that could not be read

    def add(self, prediction: Prediction, label: int | None) -> None:
        """Count one prediction."""
        self.images += 1
        self.learned += prediction.learned
        self.changed += prediction.index != prediction.zero_shot_index
        if label is not None:
            self.labelled += 1
            self.correct += prediction.index == label
            self.zero_shot_correct += prediction.zero_shot_index == label

    def summary(self) -> dict[str, Any]:
        """The tally as plain data; accuracies are fractions, None where no image's class is known."""
        return {
            "images": self.images,
            "skipped": len(self.skipped),
            "learned": self.learned,
            "changed": self.changed,
            "labelled": self.labelled,
            "accuracy": self.correct / self.labelled if self.labelled else None,
            "zero_shot_accuracy": self.zero_shot_correct / self.labelled if self.labelled else None,
        }


class Rows:
    """Rows as CSV or JSON lines, each flushed as it is written, so that an interrupt loses none.

    `before` is what the file holds already; with it, no header is written.
    """

    def __init__(self, out: TextIO, style: str, before: bytes = b"") -> None:
        self.out, self.style = out, style
        self.size, self._digest = len(before), hashlib.sha256(before)
        if style == "csv" and not before:
            self._write(_csv_line(COLUMNS))

    def write(self, values: dict[str, Any]) -> None:
        """Write one row."""
        if self.style == "csv":
            cells = values | {name: _harmless(name, values[name]) for name in ("image", "label", "zero_shot")}
            self._write(_csv_line([cells[name] for name in COLUMNS]))
        else:
            self._write(json.dumps(values, ensure_ascii=False) + "\n")

    def synced(self) -> list[Any]:
        """How many bytes there are and their digest, once they would survive a power cut."""
        os.fsync(self.out.fileno())
        files.sync_folder(Path(self.out.name).parent)
        return [self.size, self._digest.hexdigest()]

    def _write(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()
        data = text.encode("utf-8", ODD)
        self.size += len(data)
        self._digest.update(data)


def _csv_line(values: Sequence[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()


def _harmless(name: str, text: str) -> str:
    """A cell that no spreadsheet takes for a formula; a path stays one."""
    return ("./" if name == "image" else "'") + text if text.startswith(FORMULAS) else text


# A run that goes on


@dataclass
class Journal:
    """What a state says of its run: which images it has met, and which rows are its own.

    A state is first saved when there are no rows yet, and each time after the rows that it knows of. So the rows of a
    run that is killed reach at least as far as its state: those beyond are cut off, and their images come again.
    """

    save: Path | None
    rows: Rows | None  # None where they go to a terminal
    begun: int  # the index of the input's first image
    position: int  # of the next image
    met: Any  # the digest of the names so far

    def meet(self, image: StoredImage) -> None:
        """An image is done with: its row is written, or it could not be read."""
        self.position += 1
        self.met.update(_known(image))

    def write(self, session: Session) -> None:
        """Save the state, unless it is ahead of the rows: then the one before, with fewer rows, is right."""
        if self.save and (self.rows is None or session.position == self.position):
            place = self.rows.synced() if self.rows else None
            told = {"begun": self.begun, "input": self.met.hexdigest(), "rows": place}
            with held_back():
                session.save(self.save, {JOURNAL: json.dumps(told)})


def _known(image: StoredImage | str) -> bytes:
    """An image's name, wherever it is asked for from."""
    return os.path.abspath(str(image)).encode("utf-8", ODD) + b"\0"


class Before(NamedTuple):
    """What is there of an earlier run."""

    rows: bytes  # its own
    left: list[int]  # which of the images are still to come
    begun: int  # the index of the input's first image
    met: Any  # the digest of the names so far


def nothing_before(paths: Sequence[StoredImage], position: int) -> Before:
    """What there is before a run that begins here: no rows, and all images are still to come."""
    return Before(b"", list(range(len(paths))), position, hashlib.sha256())


def earlier(state: Path, out: Path, style: str, paths: Sequence[StoredImage], position: int) -> Before:
    """What a state and its rows say of a run over these images; rows beyond the state are cut off.

    An input that begins as the earlier one did goes on after it. Of another, images that have a row are left out.
    """
    told = files.parse_json((files.open_tensors(state, StateError).metadata() or {}).get(JOURNAL, "{}"), state)
    begun, met, place = (told.get(key) if isinstance(told, dict) else None for key in ("begun", "input", "rows"))
    rows = out.read_bytes()
    if not (isinstance(place, list) and place and isinstance(place[0], int) and place[0] >= 0):
        raise InputError(f"{state} does not say which rows are its own, so {out} cannot be gone on with; give another.")
    rows = rows[: place[0]]
    if [len(rows), hashlib.sha256(rows).hexdigest()] != place:
        raise InputError(f"{out} does not begin with the rows of the run that {state} is from; give another --out.")
    if os.path.getsize(out) > len(rows):
        os.truncate(out, len(rows))
    done = position - begun if isinstance(begun, int) and 0 <= begun <= position else 0
    digest = hashlib.sha256(b"".join(map(_known, paths[:done])))
    if done <= len(paths) and digest.hexdigest() == met:
        return Before(rows, list(range(done, len(paths))), position - done, digest)
    named, left = Counter(_named(rows, style, out)), []
    for number, path in enumerate(paths):
        if named[name := _known(path)]:
            named[name] -= 1
        else:
            left.append(number)
    return nothing_before(paths, position)._replace(rows=rows, left=left)


def _named(rows: bytes, style: str, out: Path) -> Iterator[bytes]:
    """The images of rows, as `_known` writes them."""
    text = rows.decode("utf-8", "replace")
    try:
        if style == "csv":
            found = [str(values["image"]) for values in csv.DictReader(io.StringIO(text, newline=""))]
        else:
            found = [str(files.parse_json(line, out)["image"]) for line in text.split("\n") if line]
    except (csv.Error, KeyError, TypeError):
        raise InputError(f"{out} is not the {style} output of an earlier run; give another --out.") from None
    return map(_known, found)


def run_images(
    session: Session,
    paths: Sequence[StoredImage],
    labels: Sequence[int | None],
    tally: Tally,
    journal: Journal,
    *,
    rows: Any = None,
    strict: bool = False,
    record: Record | None = None,
    on_skip: Callable[[str], None] | None = None,
) -> Generator[Prediction, None, None]:
    """Stream the prediction of every image that can be read, in order, each written as a row before it is given out.

    The state is written at the start, every `AUTOSAVE` images, and whenever the stream ends, also by an interrupt.
    `record` takes down what a report of the run needs.
    """
    journal.write(session)
    start = session.position
    try:
        for entry in session._encoded(paths):
            path = paths[entry.index - start]
            if entry.error is not None and not strict:
                tally.skipped.append(str(entry.error))
                if on_skip:
                    on_skip(str(entry.error))
                session.position = entry.index + 1
                journal.meet(path)
                continue
            views, label = entry.usable(), labels[entry.index - start]
            with held_back():  # an image that was learned from has its row
                prediction = session._advance(views)
                if rows is not None:
                    rows.write(row(entry.index, path, prediction))
                journal.meet(path)
            tally.add(prediction, label)
            if record:
                record.add(path, prediction, label)
            yield prediction
            if session.count % AUTOSAVE == 0:
                journal.write(session)
    finally:
        journal.write(session)
