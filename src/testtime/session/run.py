"""What watches the run of a stream of image files: a tally, and rows and states, so that nothing done is lost."""

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
from testtime.types import InputError, Prediction, StateError, StoredImage

COLUMNS = ("index", "image", "label", "confidence", "entropy", "zero_shot", "zero_shot_confidence", "learned")
JOURNAL = "run"  # of a saved state's metadata: what it has met, and which rows are its own
AUTOSAVE = 200  # images between two saves of the state, so that a crash costs at most these
FORMULAS = ("=", "+", "-", "@", "\t", "\r")  # a cell that begins so is one to a spreadsheet, which computes it

Row: TypeAlias = dict[str, str | float]


def row(index: int, image: object, prediction: Prediction) -> Row:
    """One prediction as plain data; entropy in nats."""
    return {
        "index": index,
        "image": str(image),
        "label": prediction.label,
        "confidence": round(prediction.confidence, 6),
        "entropy": round(prediction.entropy, 6),
        "zero_shot": prediction.zero_shot,
        "zero_shot_confidence": round(prediction.zero_shot_confidence, 6),
        "learned": prediction.learned,
    }


class Tally:
    """An observer that counts: how a run is going, against the labels of the images to come, None where not known.

    `start` is the place in the input of the first of these.
    """

    def __init__(self, labels: Sequence[int | None], start: int = 0) -> None:
        self._labels, self._start = labels, start
        self.images = self.learned = self.changed = self.skipped = 0  # changed: answers other than the zero-shot one
        self.accuracy, self.zero_shot_accuracy = Accuracy(), Accuracy()

    def __call__(self, seen: Seen) -> None:
        """Count one image."""
        if (prediction := seen.prediction) is None:
            self.skipped += 1
            return
        self.images += 1
        self.learned += prediction.learned
        self.changed += prediction.index != prediction.zero_shot_index
        if (label := self._labels[seen.index - self._start]) is not None:
            truth = torch.tensor([label])
            self.accuracy.update(torch.tensor([prediction.index]), truth)
            self.zero_shot_accuracy.update(torch.tensor([prediction.zero_shot_index]), truth)

    def summary(self) -> dict[str, float | None]:
        """The tally as plain data; accuracies are fractions, None where no image's class is known."""
        labelled = self.accuracy.images
        return {
            "images": self.images,
            "skipped": self.skipped,
            "learned": self.learned,
            "changed": self.changed,
            "labelled": labelled,
            "accuracy": self.accuracy.compute() if labelled else None,
            "zero_shot_accuracy": self.zero_shot_accuracy.compute() if labelled else None,
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

    def write(self, values: Row) -> None:
        """Write one row."""
        if self.style == "csv":
            cells = values | {name: _harmless(name, str(values[name])) for name in ("image", "label", "zero_shot")}
            self._write(_csv_line([cells[name] for name in COLUMNS]))
        else:
            self._write(json.dumps(values, ensure_ascii=False) + "\n")

    def synced(self) -> list[int | str]:
        """How many bytes there are and their digest, once they would survive a power cut."""
        os.fsync(self.out.fileno())
        files.sync_folder(Path(self.out.name).parent)
        return [self.size, self._digest.hexdigest()]

    def _write(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()
        data = text.encode("utf-8", UNENCODABLE)
        self.size += len(data)
        self._digest.update(data)


def _csv_line(values: Iterable[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()


def _harmless(name: str, text: str) -> str:
    """A cell that no spreadsheet takes for a formula; a path stays one."""
    return ("./" if name == "image" else "'") + text if text.startswith(FORMULAS) else text


# A run that goes on


class Before(NamedTuple):
    """What is there of an earlier run."""

    rows: bytes  # its own
    left: list[int]  # which of the images are still to come
    begun: int  # the index of the input's first image
    met: hashlib._Hash  # the digest of the names so far


class Journal:
    """An observer that writes a row for every answer, and states that say which images and which rows are theirs.

    A state is first saved when there are no rows yet, and each time after the rows that it knows of. So the rows of a
    run that is killed reach at least as far as its state: those beyond are cut off, and their images come again.
    """

    def __init__(
        self, session: Session, write: Callable[[Row], None], before: Before, save: Path | None, rows: Rows | None
    ) -> None:
        """`rows` are what `write` writes to a file; None where they go to a terminal or a pipe."""
        self.session, self.write, self.save, self.rows = session, write, save, rows
        self._begun, self._met = before.begun, before.met
        self._position = session.position  # of the next image

    def __call__(self, seen: Seen) -> None:
        """Write what became of an image."""
        if seen.index >= self.session.position:
            return  # it ends the run, and comes again in the next
        if seen.prediction is not None:
            self.write(row(seen.index, seen.source, seen.prediction))
        self._position += 1
        self._met.update(_known(seen.source))
        if seen.prediction is not None and self.session.count % AUTOSAVE == 0:
            self._save()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Save the state at the start of the block and at its end, however it ends; every `AUTOSAVE` images besides."""
        self._save()
        try:
            yield
        finally:
            self._save()

    def _save(self) -> None:
        """Save the state, unless it is ahead of the rows: then the one before, with fewer rows, is right."""
        if self.save and (self.rows is None or self.session.position == self._position):
            place = self.rows.synced() if self.rows else None
            told = {"begun": self._begun, "input": self._met.hexdigest(), "rows": place}
            with deferred_interrupts():
                self.session.save(self.save, {JOURNAL: json.dumps(told)})


def _known(image: object) -> bytes:
    """An image's name, wherever it is asked for from."""
    return os.path.abspath(str(image)).encode("utf-8", UNENCODABLE) + b"\0"


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
