"""The history of a session: go back to before an image or a time, or unlearn one image, exactly.

A history is a folder (`history_files`) with snapshots of the session and the views of the images between them. A
session of the past is the nearest earlier snapshot, and the steps on the images since, taken again (`history_replay`).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from testtime import files
from testtime.machine.interrupts import deferred_interrupts
from testtime.session import history_files
from testtime.session.history_files import ANSWERED, INDEX, SKIPPED, Entry, Index, Record, Snapshot
from testtime.session.history_replay import Image, Load, number_before, rebuilt, without
from testtime.session.session import Seen, Session
from testtime.types import InputError, StateError, StoredImage, Task

EVERY = 200  # images between two snapshots
LIMIT = 10_000  # images of a history
PART_IMAGES, PART_BYTES = 200, 2**24  # of images in memory, after which they are written
CLOSE = 1e-3  # how far another machine's or a GPU's rounding may take a session that is resumed


def now() -> datetime:
    """The time in UTC."""
    return datetime.now(UTC)


class History:
    """An observer that records a session in a folder, so that it can go back, or unlearn an image.

    A snapshot is written `every` so many images, and the views of all images since the oldest snapshot. Of the
    snapshots, the latest eight are kept, and of those before them half as many for every doubling of their age. There
    are at most `limit` images, each of V x D numbers; then the oldest snapshot goes, with the images up to the next.
    Without values, a folder's own are used, or `EVERY` and `LIMIT`. Images are written in parts, by `flush` and `close`
    too: a process that is killed loses at most 200 of them.

    A folder that holds a history already goes on with a session of it, at its end or earlier: what came after that is
    removed. Any other session is refused, or replaces the history with `overwrite`. While it is open, no other process
    may write to it; `close` it, or use it as a context manager.

    Images must be learned from by `step` or `run`. `Session.scan` calls no observer: if it has been used, the history
    starts again at the next image, and likewise after a late label (`Session.label`), which changes the guard. A state
    that is set by hand goes unnoticed: start a new history after it.

    >>> import tempfile
    >>> import testtime as tt
    >>> task, stream, labels = tt.toy()
    >>> session = tt.Session(task, "dpe")
    >>> with History(session, Path(tempfile.mkdtemp()) / "history", every=50) as history:
    ...     for views in stream:
    ...         answer = session.step(views)
    ...     earlier = history.rollback(before=120)
    ...     session.count, earlier.count
    ...     session = history.unlearn(7)
    ...     session.count, session.position, history.images()[7].status
    (160, 120)
    (159, 160, 'unlearned')
    """

    def __init__(
        self,
        session: Session,
        folder: str | Path,
        *,
        every: int | None = None,
        limit: int | None = None,
        overwrite: bool = False,
        clock: Callable[[], datetime] = now,
    ) -> None:
        self.session, self.folder, self.clock = session, Path(folder), clock
        self._pending: list[Record] = []  # images that are not written yet
        self._count, self._labels = session.count, session.labels_used  # after the last of them
        history_files.check_folder(self.folder)
        with ExitStack() as stack:
            stack.enter_context(files.locked(self.folder / INDEX))
            with session.paused():
                self._index = self._opened(every, limit, overwrite)
                session.observers.append(self)
            self._held = stack.pop_all()

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what is not written yet, stop observing the session, and let others write to the folder."""
        with self._held, self.session.paused():
            if self in self.session.observers:
                self.session.observers.remove(self)
                self.flush()

    def __call__(self, seen: Seen) -> None:
        """Record one image."""
        if seen.index >= self.session.position:
            return  # this image ends the run, and is run again when resumed
        answered = self.session.count - (seen.prediction is not None)
        if (answered, self.session.labels_used) != (self._count, self._labels):
            self._restart()
            return
        self._count = self.session.count
        name = str(seen.source) if isinstance(seen.source, str | StoredImage) else None
        views = None if seen.views is None else seen.views.to("cpu", copy=True)
        status = SKIPPED if views is None else ANSWERED
        self._pending.append((Entry(seen.index, name, self.clock(), status), views))
        if (self._index.end + len(self._pending)) % self._index.every == 0:
            self._write(snapshot=True)
        elif len(self._pending) >= PART_IMAGES or self._pending_bytes() >= PART_BYTES:
            self._write()

    def flush(self) -> None:
        """Write the images that are not written yet."""
        with self.session.paused():
            if self._pending:
                self._write()

    def images(self) -> list[Entry]:
        """The images of the history, oldest first: index, name, time and status."""
        with self.session.paused():
            return history_files.read_entries(self.folder, self._index) + [entry for entry, _ in self._pending]

    def snapshots(self) -> list[Snapshot]:
        """The snapshots, oldest first: each with the session's count and position then, and the time."""
        return list(self._index.snapshots)

    def rollback(self, before: Image | None = None, *, before_time: datetime | str | None = None) -> Session:
        """A second session, as this one was right before an image (its index or name), or before a time (UTC).

        The session and its history stay as they are. To go on from the second one, close this history and open it with
        that: what came after is then removed.
        """
        with self.session.paused():
            self.flush()
            number = number_before(self.folder, self._index, before, before_time)
            return rebuilt(self.folder, self._index, number, self._load)

    def unlearn(self, image: Image) -> Session:
        """The session, which is now as if this image (its index or name) could never be read; the history as well.

        Later images keep their positions, and `count` is one less. The image's name, features and influence are gone
        from the folder, but not from files elsewhere. If it is refused, everything stays as it was.
        """
        with self.session.paused():
            self.flush()
            if (self.session.count, self.session.labels_used) != (self._count, self._labels):
                raise StateError(
                    "The session has learned without being recorded, as by Session.scan or late labels; it is lost."
                )
            with _removing_leftovers(self.folder):
                session, index = without(self.folder, self._index, image, self._load)
                session.position = self.session.position
                self._follow(session, index)
            return self.session

    def _follow(self, session: Session, index: Index) -> None:
        """Make an index the current one, and the session what it says; an error may come before the switch or after."""
        with deferred_interrupts():
            try:
                history_files.switch(self.folder, index)
            finally:
                self._index = history_files.read_index(self.folder)
                if self._index.generation == index.generation:
                    self.session.adopt(session)
                    self._count = session.count

    def _load(self, path: Path) -> Session:
        """A snapshot, in the company of the session: its encoder, its device."""
        own = self.session
        return Session.load(
            path, own.task, encoder=own.encoder, variations=own.plan.variations, device=own.task.text.device,
            reference=own.reference,
        )  # fmt: skip

    def _opened(self, every: int | None, limit: int | None, overwrite: bool) -> Index:
        """The index of a new history, or of the one in the folder, brought to where the session is."""
        there = (self.folder / INDEX).exists() and not overwrite
        known = history_files.read_index(self.folder) if there else None
        every = every if every is not None else known.every if known else EVERY
        if every < 1:
            raise InputError(f"every={every}: at least one image is between two snapshots.")
        limit = limit if limit is not None else max(known.limit if known else LIMIT, 2 * every)
        if limit < 2 * every:
            raise InputError(f"limit={limit}: must be at least {2 * every}, twice the {every} images of a snapshot.")
        if known is None:
            generation = history_files.next_generation(self.folder)
            return self._started(Index(generation, every, limit, self.session.reference, "started", (), ()))
        return self._resumed(replace(known, every=every, limit=limit, reference=self.session.reference))

    def _started(self, index: Index) -> Index:
        """A history that begins here."""
        first = history_files.write_snapshot(self.folder, self.session, 0, self.clock(), index.generation)
        index = replace(index, snapshots=(first,), parts=())
        history_files.switch(self.folder, index)
        return index

    def _resumed(self, index: Index) -> Index:
        """The history up to where the session is, which must be a session of it."""
        folder, session, first = self.folder, self.session, index.snapshots[0]
        history_files.remove_others(folder, index)
        entries = history_files.read_entries(folder, index)
        later = (number for number, entry in enumerate(entries, first.number) if entry.index >= session.position)
        number = next(later, index.end)
        then = rebuilt(folder, index, number, self._load)
        then.position = max(session.position, first.position)
        if (difference := _difference(then, session)) > CLOSE:
            last = entries[-1].index + 1 if entries else first.position
            raise StateError(
                f"This session, after {session.count:,} images and at position {session.position:,}, is none of the "
                f"history in {folder}, which goes from position {first.position:,} to {last:,}; give another folder."
            )
        generation = index.generation + 1
        index = history_files.cut(folder, index, number, generation)
        if difference:  # of another machine: the next steps start from here
            here = history_files.write_snapshot(folder, session, number, self.clock(), generation, seam=True)
            kept = (snapshot for snapshot in index.snapshots if snapshot.number < number)
            index = replace(index, snapshots=(*kept, here))
        history_files.switch(folder, index)
        return index

    def _restart(self) -> None:
        """Begin again after this image: the session has changed in ways that are not recorded."""
        generation = history_files.next_generation(self.folder)
        self._index = self._started(replace(self._index, generation=generation, began="unrecorded"))
        self._pending = []  # after an error, the next image begins again
        self._count, self._labels = self.session.count, self.session.labels_used

    def _write(self, snapshot: bool = False) -> None:
        """Write the images that are not written yet, and a snapshot after them."""
        index, generation = self._index, self._index.generation
        end, time = index.end + len(self._pending), self._pending[-1][0].time
        # should it fail halfway, another attempt overwrites no file
        self._index = replace(index, generation=generation + 1)
        part = history_files.write_part(self.folder, self._pending, index.end, generation)
        index = replace(index, parts=(*index.parts, part))
        if snapshot:
            taken = history_files.write_snapshot(self.folder, self.session, end, time, generation)
            index = replace(index, snapshots=(*index.snapshots, taken))
        index = history_files.bounded(index)
        history_files.switch(self.folder, index)
        self._index, self._pending = index, []

    def _pending_bytes(self) -> int:
        return sum(views.nbytes for _, views in self._pending if views is not None)


def _difference(one: Session, other: Session) -> float:
    """How much the numbers of two sessions differ at most, relative to 1 if smaller; infinity if anything else does."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = (
            files.open_tensors(session.save(Path(folder) / name)) for session, name in ((one, "one"), (other, "other"))
        )
        if first.metadata() != second.metadata() or {*first.keys()} != {*second.keys()}:
            return math.inf
        return max(_distance(first.get_tensor(name), second.get_tensor(name)) for name in first.keys())


def _distance(one: Tensor, other: Tensor) -> float:
    if torch.equal(one, other):
        return 0.0
    if one.shape != other.shape or one.dtype != other.dtype or not one.is_floating_point():
        return math.inf
    apart = torch.where(one == other, 0, (one - other).abs() / one.abs().clamp_min(1))  # infinity equals itself
    return float(apart.amax())


def rollback(
    folder: str | Path,
    before: Image | None = None,
    *,
    before_time: datetime | str | None = None,
    task: Task | None = None,
    device: torch.device | str = "cpu",
) -> Session:
    """The session of a history in a folder, as `History.rollback` returns it; by default as it was at the end.

    A method that tunes prompts needs the `task` it was made with.
    """
    folder = Path(folder)
    index = history_files.read_index(folder)
    number = number_before(folder, index, before, before_time)
    return rebuilt(folder, index, number, _loading(task, device, index))


def unlearn(
    folder: str | Path,
    image: Image,
    *,
    save: str | Path | None = None,
    task: Task | None = None,
    device: torch.device | str = "cpu",
) -> Session:
    """The session of a history in a folder without one image, as `History.unlearn` leaves it, and the folder as well.

    It is written to the file `save` before the folder changes.
    """
    folder = Path(folder)
    history_files.read_index(folder)
    with files.locked(folder / INDEX):
        index = history_files.read_index(folder)
        with _removing_leftovers(folder):
            session, index = without(folder, index, image, _loading(task, device, index))
            with deferred_interrupts():
                if save is not None:
                    session.save(save)
                history_files.switch(folder, index)
    return session


@contextmanager
def _removing_leftovers(folder: Path) -> Iterator[None]:
    """Remove files of an attempt that failed, and those of a process that was killed."""
    try:
        yield
    finally:
        history_files.remove_others(folder, history_files.read_index(folder))


def _loading(task: Task | None, device: torch.device | str, index: Index) -> Load:
    return lambda path: Session.load(path, task, device=device, reference=index.reference)
