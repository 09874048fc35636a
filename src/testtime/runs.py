"""A stream of image files through a session, written down row by row so that nothing done is lost."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from testtime import files
from testtime.engine import Session
from testtime.types import InputError, Prediction, StoredImage

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
BEGUN = "input"  # of a saved state's metadata: where the input of its run began
AUTOSAVE = 200  # images between two saves of the state, so that a crash costs at most these


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
    """Rows as CSV or JSON lines, each flushed as it is written, so that an interrupt loses none."""

    def __init__(self, out: TextIO, style: str, header: bool = True) -> None:
        self.out, self.style = out, style
        self._csv = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        if style == "csv" and header:
            self._csv.writeheader()
            out.flush()

    def write(self, values: dict[str, Any]) -> None:
        """Write one row."""
        if self.style == "csv":
            self._csv.writerow(values)
        else:
            self.out.write(json.dumps(values, ensure_ascii=False) + "\n")
        self.out.flush()


def read_rows(path: Path, style: str) -> list[dict[str, Any]]:
    """The rows of an earlier run; a last line that was cut off is dropped."""
    text = path.read_text(encoding="utf-8")
    if not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
    try:
        if style == "csv":
            rows: list[dict[str, Any]] = list(csv.DictReader(io.StringIO(text)))
        else:
            rows = [json.loads(line) for line in text.splitlines()]
        return [values | {"index": int(values["index"])} for values in rows]
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path} is not the {style} output of an earlier run; give another --out.") from None


def reopen(path: Path, style: str, position: int) -> list[dict[str, Any]]:
    """Cut an earlier run's rows back to those before the session's position, and return them.

    Rows from there on were written after the state was last saved: those images come again.
    """
    kept = [values for values in read_rows(path, style) if values["index"] < position]
    text = io.StringIO()
    rows = Rows(text, style)
    for values in kept:
        rows.write(values)
    files.write_atomic(path, text.getvalue())
    return kept


def done_before(paths: Sequence[StoredImage], rows: Sequence[dict[str, Any]], state: Path, position: int) -> int | None:
    """How many of the images an earlier run of the same input has met, readable or not; None for another input.

    The saved state says which image that run began with, and at which index; rows tell too, of a state that does not.
    """
    begun = json.loads((files.open_tensors(state).metadata() or {}).get(BEGUN, "{}"))
    places = {str(path): place for place, path in reversed(list(enumerate(paths)))}
    if begun.get("image") == str(paths[0]):
        return min(position - int(begun["index"]), len(paths))
    met = [places[str(row["image"])] for row in rows if str(row["image"]) in places]
    return max(met) + 1 if met else None


def run_images(
    session: Session,
    paths: Sequence[StoredImage],
    labels: Sequence[int | None],
    tally: Tally,
    *,
    strict: bool = False,
    save: Path | None = None,
    record: Record | None = None,
    on_skip: Callable[[str], None] | None = None,
    begun: tuple[int, StoredImage] | None = None,
) -> Generator[tuple[int, StoredImage, Prediction], None, None]:
    """Stream index, path and prediction of every image that can be read, in order.

    With `save`, the state is written every `AUTOSAVE` images and whenever the stream ends, also by an interrupt.
    `begun` is the index and the image that the input began with, where this run goes on with an earlier one's: the
    state says it, so that the next one can. `record` takes down what a report of the run needs.
    """
    index, image = begun or (session.position, paths[0] if paths else "")
    begins = {BEGUN: json.dumps({"index": index, "image": str(image)})}

    def skip(path: Any, error: InputError) -> None:
        tally.skipped.append(str(error))
        if on_skip:
            on_skip(str(error))

    start = session.position
    try:
        for path, prediction in session.run(paths, on_error=None if strict else skip):
            index = session.position - 1
            label = labels[index - start]
            tally.add(prediction, label)
            if record:
                record.add(path, prediction, label)
            yield index, path, prediction
            if save and session.count % AUTOSAVE == 0:
                session.save(save, begins)
    finally:
        if save:
            session.save(save, begins)
