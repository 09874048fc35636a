"""A history on disk: a folder with snapshots of a session, the images between them, and an index.

    history.json                         the index: the files that belong to the history
    snapshot-000000200-g0.safetensors    the session after 200 images, as `Session.save` writes it
    images-000000200-g0.safetensors      the next images: their names, times and views

Files are written once. A change writes new files, then replaces the index, then removes the files that it does not
name: whenever a process is killed, the index names a complete history, from before the change or after it. A change to
images or snapshots that are there begins a new generation (g1), so no file that an index names is ever overwritten.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from testtime import files
from testtime.session.session import Session
from testtime.types import InputError, StateError

INDEX = "history.json"
FORMAT, VERSION = "testtime.history", 1
NAME = re.compile(r"(snapshot|images)-\d{9,}-g\d+\.safetensors")
# what a process that was killed may have left, which may hold features
TEMPORARY = re.compile(rf"\.({NAME.pattern}|{re.escape(INDEX)})\.\d+\.[0-9a-f]+")
ANSWERED, SKIPPED, UNLEARNED = STATUSES = ("answered", "skipped", "unlearned")
DENSE = 8  # the latest snapshots, which are all kept


@dataclass(frozen=True, slots=True)
class Entry:
    """One image of the input."""

    index: int  # its position in the input
    name: str | None  # of its file; None for pixels or features, and once it is unlearned
    time: datetime  # when it was answered, UTC
    status: str  # answered, skipped (it could not be read), or unlearned


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A saved session, after the first `number` images of the history."""

    file: str
    sha256: str
    number: int
    count: int
    position: int
    time: datetime
    seam: bool = False  # whether steps before it were taken elsewhere, and would round differently here


@dataclass(frozen=True, slots=True)
class Part:
    """A file of consecutive images, the first of which is number `number` of the history."""

    file: str
    sha256: str
    number: int
    images: int


@dataclass(frozen=True, slots=True)
class Index:
    """The files that belong to a history. Its images are numbered from 0 on; some of the first may be gone."""

    generation: int
    every: int  # images between two snapshots
    limit: int  # most images
    reference: bool  # whether the session runs the method's own steps
    began: str  # why it begins at the first snapshot: a key of `BEGAN`
    snapshots: tuple[Snapshot, ...]
    parts: tuple[Part, ...]

    @property
    def end(self) -> int:
        """The number of the next image."""
        return self.parts[-1].number + self.parts[-1].images if self.parts else self.snapshots[0].number

    def before(self, number: int) -> Snapshot:
        """The last snapshot that does not include the image of this number."""
        return [snapshot for snapshot in self.snapshots if snapshot.number <= number][-1]


BEGAN = {
    "started": "the history was started there",
    "limit": "older images were dropped to keep it within its limit",
    "unrecorded": "the session had learned, or was set back, without this being recorded, as by Session.scan or reset",
}

Record = tuple[Entry, Tensor | None]  # an image and its views (V, D), if it has any


# Reading


def read_index(folder: Path) -> Index:
    """The index of a history, checked."""
    path = folder / INDEX
    if not path.is_file():
        what = f"{folder} is not a history: it has no {INDEX}" if folder.exists() else f"No folder {folder}"
        raise StateError(f"{what}. 'testtime run ... --history {folder}' starts one.")
    try:
        found = files.parse_json(files.read_bytes(path), path, StateError, dict)
    except OSError as problem:
        raise StateError(f"Cannot read {path}: {problem.strerror or problem}.") from None
    if found.get("format") != FORMAT:
        raise StateError(f"{path} is not the index of a history (no '{FORMAT}' in it).")
    if found.get("version") != VERSION:
        raise StateError(
            f"{path} has format version {found.get('version')}, this program reads {VERSION}. Use the version of "
            "testtime that wrote it."
        )
    try:
        index = Index(
            _whole(found["generation"]),
            _whole(found["every"], 1),
            _whole(found["limit"], 2),
            _of(bool, found["reference"]),
            _one_of(BEGAN, found["began"]),
            tuple(
                Snapshot(
                    *_file(entry),
                    _whole(entry["number"]),
                    _whole(entry["count"]),
                    _whole(entry["position"]),
                    _time(entry),
                )
                for entry in _of(list, found["snapshots"])
            ),
            tuple(
                Part(*_file(entry), _whole(entry["number"]), _whole(entry["images"], 1))
                for entry in _of(list, found["parts"])
            ),
        )
        _check_order(index)
    except (KeyError, TypeError, ValueError, OverflowError) as problem:
        raise StateError(f"{path} is damaged: {type(problem).__name__} {problem}.") from None
    return index


def _check_order(index: Index) -> None:
    """Raise ValueError unless images follow each other from the first snapshot on, and snapshots are among them."""
    numbers = [snapshot.number for snapshot in index.snapshots]
    starts, ends = [p.number for p in index.parts], [p.number + p.images for p in index.parts]
    if not numbers or numbers != sorted(set(numbers)) or numbers[-1] > index.end:
        raise ValueError("its snapshots are not in order")
    if starts != [numbers[0], *ends][: len(starts)] or not {*numbers} <= {numbers[0], *ends}:
        raise ValueError("images are missing")


def _of(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not a {kind.__name__}")
    return value


def _whole(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 2**53:
        raise ValueError(f"{value!r} is not a count")
    return value


def _one_of(known: Iterable[str], value: Any) -> str:
    if value not in tuple(known):
        raise ValueError(f"{value!r} is none of {', '.join(known)}")
    return value


def _time(entry: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(_of(str, entry["time"])).astimezone(UTC)


def _file(entry: dict[str, Any]) -> tuple[str, str]:
    """The name and digest of a file; the name leads nowhere else."""
    if not NAME.fullmatch(_of(str, entry["file"])):
        raise ValueError(f"{entry['file']!r} is no file of a history")
    return entry["file"], _of(str, entry["sha256"])


def snapshot_file(folder: Path, snapshot: Snapshot) -> Path:
    """The file of a snapshot, checked to be as it was written."""
    return _checked(folder, snapshot)


def _checked(folder: Path, item: Snapshot | Part) -> Path:
    path = folder / item.file
    try:
        same = _digest(path) == item.sha256
    except OSError as problem:
        why = "it is missing" if isinstance(problem, FileNotFoundError) else problem.strerror or problem
        raise StateError(f"{path} cannot be read: {why}. If a run is writing the history, try again.") from None
    if not same:
        raise StateError(f"{path} is damaged: it is not what was written. Use a copy of the history, or a new one.")
    return path


def _digest(path: Path) -> str:
    return hashlib.sha256(files.read_bytes(path)).hexdigest()


def read_history(folder: Path) -> tuple[Index, list[Entry]]:
    """The index and all images of a history; one that a run is writing is read as it is at some moment."""
    while True:
        index = read_index(folder)
        try:
            return index, read_entries(folder, index)
        except StateError:
            if read_index(folder) == index:
                raise


def read_entries(folder: Path, index: Index) -> list[Entry]:
    """All images of a history, without their views."""
    return [entry for part in index.parts for entry in _entries(folder, part)[0]]


def read_records(folder: Path, part: Part) -> list[Record]:
    """The images of a part with their views, checked to be as they were written."""
    _checked(folder, part)
    entries, file = _entries(folder, part)
    stored = file.keys()
    wanted = [str(number) for number, entry in enumerate(entries) if entry.status == ANSWERED]
    if sorted(stored) != sorted(wanted):
        raise StateError(f"{folder / part.file} is damaged: it lacks views.")
    return [
        (entry, file.get_tensor(str(number)) if entry.status == ANSWERED else None)
        for number, entry in enumerate(entries)
    ]


def _entries(folder: Path, part: Part) -> tuple[list[Entry], Any]:
    path = folder / part.file
    file = files.open_tensors(path, StateError)
    found = files.parse_json((file.metadata() or {}).get("images", ""), path, StateError, list)
    try:
        entries = [
            Entry(
                _whole(entry["index"]),
                None if entry["name"] is None else _of(str, entry["name"]),
                _time(entry),
                _one_of(STATUSES, entry["status"]),
            )
            for entry in found
        ]
    except (KeyError, TypeError, ValueError, OverflowError) as problem:
        raise StateError(f"{path} is damaged: {type(problem).__name__} {problem}.") from None
    if len(entries) != part.images:
        raise StateError(f"{path} is damaged: it has {len(entries)} images; expected {part.images}.")
    return entries, file


# Writing


def write_snapshot(
    folder: Path, session: Session, number: int, time: datetime, generation: int, seam: bool = False
) -> Snapshot:
    """Write a snapshot of a session, after `number` images; no index names it yet."""
    path = session.save(folder / f"snapshot-{number:09d}-g{generation}.safetensors")
    return Snapshot(path.name, _digest(path), number, session.count, session.position, time, seam)


def write_part(folder: Path, records: Sequence[Record], number: int, generation: int) -> Part:
    """Write a part, whose first image is number `number` of the history; no index names it yet."""
    tensors = {str(place): views for place, (_, views) in enumerate(records) if views is not None}
    entries = [asdict(entry) for entry, _ in records]
    path = folder / f"images-{number:09d}-g{generation}.safetensors"
    files.write_tensors(path, tensors, {"format": FORMAT, "images": json.dumps(entries, default=datetime.isoformat)})
    return Part(path.name, _digest(path), number, len(records))


def switch(folder: Path, index: Index) -> None:
    """Make an index the current one, and remove what it does not name."""
    content = {"format": FORMAT, "version": VERSION} | asdict(index)
    files.write_atomic(folder / INDEX, json.dumps(content, indent=1, default=datetime.isoformat) + "\n")
    remove_others(folder, index)


def remove_others(folder: Path, index: Index) -> None:
    """Remove files of a history that its index does not name: of an earlier state of it, or of a killed process."""
    named = {item.file for items in (index.snapshots, index.parts) for item in items}
    others = [path for path in _own_files(folder) if path.name not in named]
    for path in others:
        with suppress(FileNotFoundError):
            path.unlink()
    if others:
        files.sync_folder(folder)


def _own_files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if NAME.fullmatch(path.name) or TEMPORARY.fullmatch(path.name))


def next_generation(folder: Path) -> int:
    """A generation of which a folder has no files."""
    found = (re.search(r"-g(\d+)\.", path.name) for path in _own_files(folder))
    return 1 + max((int(match[1]) for match in found if match), default=-1)


def check_folder(folder: Path) -> None:
    """Refuse a folder of other files: a history has its own."""
    files.check_folder(folder)
    visible = (path for path in sorted(folder.iterdir()) if not path.name.startswith("."))
    if other := next((path for path in visible if path.name != INDEX and not NAME.fullmatch(path.name)), None):
        raise InputError(f"{folder} holds {other.name}, which is no file of a history; give a folder of its own.")


def check_outputs(folder: Path, outputs: Mapping[str, Path | None], may_exist: bool) -> None:
    """Refuse a folder for a history that holds other files or one already, and other outputs in it, by option."""
    if (folder / INDEX).exists() and not may_exist:
        raise InputError(
            f"--history {folder} already exists: --force overwrites it, --resume STATE continues it; or use another."
        )
    check_folder(folder)
    for option, path in outputs.items():
        if path is not None and path.resolve().parent == folder.resolve():
            raise InputError(f"{option} {path} is in the folder of the history, which has its own files; use another.")


def bounded(index: Index) -> Index:
    """The index without the snapshots that are too many, and the images that are too old.

    Of each doubling of a snapshot's age beyond the latest `DENSE`, every other one is kept of those of the doubling
    before. If there are more images than the limit, the oldest snapshot goes with the images up to the next one.
    """
    snapshots = [index.snapshots[0], *(s for s in index.snapshots[1:] if s.seam or _stays(s.number, index))]
    while len(snapshots) > 1 and index.end - snapshots[0].number > index.limit:
        del snapshots[0]
    first = snapshots[0].number
    return replace(
        index,
        began=index.began if first == index.snapshots[0].number else "limit",
        snapshots=tuple(snapshots),
        parts=tuple(part for part in index.parts if part.number >= first),
    )


def _stays(number: int, index: Index) -> bool:
    age, step = index.end - number, index.every
    while age > DENSE * step:
        step *= 2
    return number % step == 0


def cut(folder: Path, index: Index, number: int, generation: int) -> Index:
    """The index up to the image of this number, without it; the part that holds it is written again."""
    parts = [part for part in index.parts if part.number < number]
    if parts and parts[-1].number + parts[-1].images > number:
        last = parts.pop()
        parts.append(write_part(folder, read_records(folder, last)[: number - last.number], last.number, generation))
    return replace(
        index,
        generation=generation,
        snapshots=tuple(snapshot for snapshot in index.snapshots if snapshot.number <= number),
        parts=tuple(parts),
    )
