"""Going back in a history: the session before an image or a time, and the session without one image."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from torch import Tensor

from testtime.session.history_files import (
    ANSWERED,
    BEGAN,
    SKIPPED,
    UNLEARNED,
    Entry,
    Index,
    read_entries,
    read_records,
    snapshot_file,
    write_part,
    write_snapshot,
)
from testtime.session.session import Session
from testtime.types import InputError, StateError

Load = Callable[[Path], Session]  # a saved session, on the device and with the task it goes on with
Image = int | str | os.PathLike[str]  # an image's index in the input, or its name


# Finding an image


def number_of(folder: Path, index: Index, image: Image) -> int:
    """The number in the history of the image of an index or a name; it must be one image."""
    entries, first = read_entries(folder, index), index.snapshots[0]
    if isinstance(image, str | os.PathLike):
        name = os.fspath(image)
        found = [number for number, entry in enumerate(entries) if entry.name is not None and _same(entry.name, name)]
        what = f"image '{name}'"
    else:
        found = [number for number, entry in enumerate(entries) if entry.index == operator.index(image)]
        what = f"image {image}"
        if not found and 0 <= image < first.position:
            raise StateError(
                f"Image {image} is older than the history in {folder}, which begins at image {first.position}: "
                f"{BEGAN[index.began]}."
            )
    if not found:
        raise InputError(f"The history in {folder} has no {what}; it has {_extent(entries)}.")
    if len(found) > 1:
        indices = ", ".join(str(entries[number].index) for number in found[:10])
        raise InputError(
            f"The history in {folder} has {what} {len(found)} times: {indices}. Give one of these indices."
        )
    return first.number + found[0]


def _same(one: str, other: str) -> bool:
    return one == other or os.path.abspath(one) == os.path.abspath(other)


def _extent(entries: Sequence[Entry]) -> str:
    return f"images {entries[0].index} to {entries[-1].index}" if entries else "no images yet"


def number_before(folder: Path, index: Index, before: Image | None, before_time: datetime | str | None) -> int:
    """The number of the first image that a rollback leaves out."""
    entries, first = read_entries(folder, index), index.snapshots[0]
    if before is not None and before_time is not None:
        raise InputError(f"before={before} and before_time={before_time}: give one of the two.")
    if before is not None:
        following = entries[-1].index + 1 if entries else first.position
        return index.end if before == following else number_of(folder, index, before)
    if before_time is None:
        return index.end
    moment = as_time(before_time)
    if moment < first.time:
        raise StateError(
            f"{moment.isoformat()} is before the history in {folder}, which begins at {first.time.isoformat()}: "
            f"{BEGAN[index.began]}."
        )
    later = (number for number, entry in enumerate(entries, first.number) if entry.time >= moment)
    return next(later, index.end)


def as_time(time: datetime | str) -> datetime:
    """A time in UTC; one that names no time zone is taken as UTC."""
    try:
        time = datetime.fromisoformat(time) if isinstance(time, str) else time
        return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    except (ValueError, OverflowError):
        raise InputError(f"'{time}' is not a time; write it like 2026-01-31T12:00, in UTC, or with +02:00.") from None


# Replaying


def rebuilt(folder: Path, index: Index, number: int, load: Load) -> Session:
    """The session right before the image of this number, or at the end."""
    start = index.before(number)
    session = load(snapshot_file(folder, start))
    for part in index.parts:
        if start.number <= part.number <= number:
            for place, (entry, views) in enumerate(read_records(folder, part), part.number):
                if place == number:
                    session.position = entry.index
                    return session
                _repeat(session, entry, views)
    return session


def _repeat(session: Session, entry: Entry, views: Tensor | None) -> None:
    if views is None:
        session.position = entry.index + 1
        return
    text = session.task.text
    if views.ndim != 2 or not len(views) or views.shape[1] != text.shape[1] or views.dtype != text.dtype:
        raise StateError(
            f"The views of image {entry.index} are {views.dtype} {tuple(views.shape)}; this session has "
            f"{text.dtype} (V, {text.shape[1]}). The history is damaged."
        )
    session.replay(views, entry.index)


def without(folder: Path, index: Index, image: Image, load: Load) -> tuple[Session, Index]:
    """The session without one image, and the index of the history without it: its files are written, but it is not
    the current one yet."""
    number = number_of(folder, index, image)
    start, generation = index.before(number), index.generation + 1
    session = load(snapshot_file(folder, start))
    stale = {snapshot.number: snapshot for snapshot in index.snapshots if snapshot.number > number}
    snapshots = [snapshot for snapshot in index.snapshots if snapshot.number <= number]
    parts = [part for part in index.parts if part.number < start.number]
    for part in index.parts[len(parts) :]:
        records = read_records(folder, part)
        if part.number <= number < part.number + part.images:
            entry = records[number - part.number][0]
            _check_learned(folder, entry)
            records[number - part.number] = replace(entry, name=None, status=UNLEARNED), None
            part = write_part(folder, records, part.number, generation)
        parts.append(part)
        for place, (entry, views) in enumerate(records, part.number + 1):
            _repeat(session, entry, views)
            if old := stale.get(place):
                snapshots.append(write_snapshot(folder, session, place, old.time, generation, old.seam))
    return session, replace(index, generation=generation, snapshots=tuple(snapshots), parts=tuple(parts))


def _check_learned(folder: Path, entry: Entry) -> None:
    if entry.status == SKIPPED:
        raise InputError(f"Image {entry.index} could not be read, so nothing was learned from it.")
    if entry.status != ANSWERED:
        raise InputError(f"Image {entry.index} has been unlearned already; the history in {folder} is without it.")
