"""Images classified in one call, as a table."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import numpy as np
import torch
from PIL import Image

from testtime.datasets import Dataset, find_dataset, with_classes
from testtime.display import listed
from testtime.registry import make_method
from testtime.session.display import SHOWN, table_html
from testtime.session.journal import Row, row
from testtime.session.session import Session
from testtime.text.prompts import build_task
from testtime.types import Encoder, InputError, Method, MissingPart, StoredImage, Variations

if TYPE_CHECKING:
    from testtime.encoding.stream import Source
    from testtime.text.prompts import Descriptions

    Images: TypeAlias = str | os.PathLike[str] | Dataset | Source | Iterable[Source]

CLASSES_NEEDED = "Name them, as in classify(images, ['cat', 'dog'])."


class Answers(Sequence[Row]):
    """A table of answers: a row for every image that was answered, with the columns of `testtime run`.

    `answers[0]` is a row, a dict; `answers["label"]` is a column, a list; iterating gives the rows. `session` has
    learned from the images, and can go on or be saved. `skipped` says which images could not be used, and why. `images`
    are those of the rows by their `index`, as they were given; of those in memory, only the first are kept.
    """

    def __init__(
        self, rows: Sequence[Row], images: Mapping[int, Source], session: Session, skipped: Sequence[str]
    ) -> None:
        self.rows, self.images, self.session, self.skipped = list(rows), images, session, list(skipped)

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self.rows[0]) if self.rows else []

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, which: int) -> Row: ...
    @overload
    def __getitem__(self, which: str) -> list[Any]: ...
    @overload
    def __getitem__(self, which: slice) -> Answers: ...
    def __getitem__(self, which: int | str | slice) -> Row | list[Any] | Answers:
        if isinstance(which, str):
            return [values[which] for values in self.rows]
        if isinstance(which, slice):
            return Answers(self.rows[which], self.images, self.session, self.skipped)
        return self.rows[which]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __repr__(self) -> str:
        return f"Answers({len(self):,} row{'s' * (len(self) != 1)} of {listed(self.columns, 80)})"

    def _repr_html_(self) -> str:
        return table_html(self.columns, self.rows[:SHOWN], self.images, len(self))

    def to_pandas(self) -> Any:
        """The table as a pandas DataFrame, whose `answers` is this table."""
        if not _has_pandas():
            raise MissingPart("A DataFrame needs the package pandas. Install it with: pip install pandas")
        from testtime.session.frame import Frame

        return Frame.of(self)


@overload
def classify(
    images: Images, classes: Sequence[str] | None = ..., *, pandas: Literal[False], **options: Any
) -> Answers: ...
@overload
def classify(images: Images, classes: Sequence[str] | None = ..., **options: Any) -> Any: ...
def classify(
    images: Images,
    classes: Sequence[str] | None = None,
    *,
    encoder: str | Encoder = "offline",
    method: str | Method = "dpe",
    preset: str | None = None,
    templates: str | Sequence[str] | None = None,
    descriptions: Descriptions | str | os.PathLike[str] | None = None,
    views: int = 1,
    augmix: bool = False,
    variations: Variations | None = None,
    seed: int = 0,
    device: str | torch.device = "auto",
    on_error: Literal["skip", "raise"] = "skip",
    progress: bool | None = None,
    pandas: bool | None = None,
    **settings: object,
) -> Any:
    """A table with a row for every image: its label and how sure it is, beside the zero-shot answer.

    `images` is anything that `testtime run` takes (a folder, a pattern, a list file, a CSV, shards), one image, or
    several: paths, Pillow images, pixels (H, W, 3) uint8. `classes` are by default the dataset's own, such as the names
    of its folders. The method learns from each image in turn. `settings` are those of the method: `alpha=4`.

    `encoder` is a name or an encoder that is already loaded, which is faster for many calls. An image that cannot be
    used is skipped with a warning, or with `on_error="raise"` an error. `progress` is as in `Session.run`.

    The table is a pandas DataFrame if pandas is installed, and `Answers` if not; `pandas=True` or `False` decides it.
    The frame's `answers` is the same table as `Answers`, with its `session`.

    >>> photographs = [Image.new("RGB", (60, 40), colour) for colour in ("red", "blue")]
    >>> answers = classify(photographs, ["cat", "dog"], encoder="tiny", pandas=False)
    >>> len(answers), answers[1]["index"], answers.session.count
    (2, 1, 2)
    """
    if on_error not in ("skip", "raise"):
        raise InputError(f"on_error={on_error!r}: must be 'skip' or 'raise'.")
    if pandas and not _has_pandas():
        raise MissingPart("pandas=True needs the package pandas. Install it with: pip install pandas")
    data, stream = _sources(images)
    names, labels, notes = with_classes(data, classes, CLASSES_NEEDED)
    for note in notes if stream is data.paths else ():  # images that are listed need no names of folders
        warnings.warn(f"{data.name}: {note}", stacklevel=2)
    if isinstance(method, str):  # a mistake in a setting shows before the encoder is loaded
        method, preset, settings = make_method(method, preset, settings), None, {}
    if settings or preset:
        raise InputError("Settings and presets need a method's name; a ready-made method has its own.")
    loaded = _load(encoder, device)
    needs_tower = getattr(method, "needs_tower", False)
    task = build_task(loaded, names, templates, descriptions, allow_duplicates=classes is None, context=needs_tower)
    session = Session(task, method, encoder=loaded, views=views, augmix=augmix, seed=seed, variations=variations)
    answers = _answers(session, stream, labels, on_error == "raise", progress)
    if answers.skipped:
        warnings.warn(_skipped(answers.skipped, session.position), stacklevel=2)
    return answers.to_pandas() if (_has_pandas() if pandas is None else pandas) else answers


def _has_pandas() -> bool:
    return find_spec("pandas") is not None


def _sources(images: Images) -> tuple[Dataset, Iterable[Any]]:
    """The images as a dataset, and as they are read; a dataset of images in memory is empty."""
    if isinstance(images, str | os.PathLike):
        images = find_dataset(os.fspath(images), labelled=False)
    if isinstance(images, Dataset):
        return images, images.paths
    alone = isinstance(images, Image.Image) or (isinstance(images, np.ndarray | torch.Tensor) and images.ndim <= 3)
    given: Any = [images] if alone or isinstance(images, StoredImage) else images
    if not isinstance(given, Iterable):
        raise InputError(f"Expected a folder, a pattern or images; got {type(images).__name__}.")
    listed = isinstance(given, list | tuple) and all(isinstance(image, str | StoredImage) for image in given)
    return Dataset("A list of images", list(given) if listed else [], None, []), given


def _load(encoder: str | Encoder, device: str | torch.device) -> Encoder:
    from testtime.encoding.encoders import load_encoder

    return load_encoder(encoder, device) if isinstance(encoder, str) else encoder


def _answers(
    session: Session, images: Iterable[Any], labels: Sequence[int | None], strict: bool, progress: bool | None
) -> Answers:
    rows: list[Row] = []
    kept: dict[int, Source] = {}
    skipped: list[str] = []

    def skip(_: object, error: InputError) -> None:
        skipped.append(str(error))

    for image, prediction in session.run(images, on_error=None if strict else skip, progress=progress):
        index = session.position - 1
        label = labels[index] if labels else None  # of images in memory, none is known
        rows.append(row(index, _name(image, index), prediction, label, session.task.classnames))
        if isinstance(image, str | StoredImage) or len(kept) < SHOWN:
            kept[index] = image
    if not rows:
        none = "No images given. Give a folder, a pattern or some images."
        raise InputError(_skipped(skipped, session.position) if skipped else none)
    return Answers(rows, kept, session, skipped)


def _name(image: Any, index: int) -> str:
    """What to call an image in the table: its path, or its number if it has none."""
    if isinstance(image, Image.Image):
        return str(image.info.get("path") or getattr(image, "filename", "") or f"image {index}")
    return str(image) if isinstance(image, str | StoredImage) else f"image {index}"


def _skipped(errors: Sequence[str], total: int, most: int = 3) -> str:
    more = f" (and {len(errors) - most:,} more)" if len(errors) > most else ""
    return f"{len(errors):,} of {total:,} images could not be used: {' '.join(errors[:most])}{more}"
