"""What the service keeps: an SQLite database, and state files beside it.

    streams      one row per stream
    events       a numbered log per stream: every image with its features, every label, every change
    snapshots    states of a stream after an event, in files of their own

A stream is its last snapshot, and the live events after it. Everything that an answer promises is in one transaction,
committed to the disk before the answer is given. State files are written before the row that names them, and removed
after it is gone: at any moment every row has its file, and a file without a row is left over and removed at the start.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import struct
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from testtime import files
from testtime.errors import InputError, StateError
from testtime.serve.database import Database
from testtime.serve.types import DATABASE, STATES
from testtime.session.session import Session

VERSION = 1
MATRIX = struct.Struct("<iii")  # bytes of a number, rows, columns
SCHEMA = """
CREATE TABLE IF NOT EXISTS streams (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, spec TEXT NOT NULL, created TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY,
    stream INTEGER NOT NULL REFERENCES streams ON DELETE CASCADE,
    number INTEGER NOT NULL,  -- from 1 on in each stream
    kind TEXT NOT NULL,       -- image, label, classes, rollback, reset, unlearn
    live INTEGER NOT NULL,    -- whether the stream is still made of it
    time TEXT NOT NULL,
    key TEXT,                 -- idempotency
    position INTEGER,         -- of an image in the input; of a label, the number of its image
    name TEXT, sha256 TEXT, label TEXT, zero_shot TEXT, entropy REAL,
    learned INTEGER,          -- whether it changed a prototype or a queue
    rule TEXT,                -- by which rule it did not
    drift INTEGER,            -- whether it raised the alarm
    answer TEXT,              -- as it was given, in JSON
    detail TEXT,              -- of the other kinds, in JSON
    views BLOB, thumbnail BLOB,
    UNIQUE (stream, number));
CREATE UNIQUE INDEX IF NOT EXISTS keys ON events (stream, key) WHERE key IS NOT NULL;
CREATE TABLE IF NOT EXISTS snapshots (
    id INTEGER PRIMARY KEY,
    stream INTEGER NOT NULL REFERENCES streams ON DELETE CASCADE,
    number INTEGER NOT NULL,  -- of the last event that it includes
    title TEXT NOT NULL, automatic INTEGER NOT NULL, images INTEGER NOT NULL, time TEXT NOT NULL,
    file TEXT NOT NULL UNIQUE);
CREATE INDEX IF NOT EXISTS snapshots_of ON snapshots (stream, number);
"""


@dataclass(frozen=True, eq=False)
class Event:
    """One event of a stream; see the table."""

    number: int
    kind: str
    time: str
    live: bool = True
    key: str | None = None
    position: int | None = None
    name: str | None = None
    sha256: str | None = None
    label: str | None = None
    zero_shot: str | None = None
    entropy: float | None = None
    learned: bool | None = None
    rule: str | None = None
    drift: bool | None = None
    answer: str | None = None
    detail: str | None = None
    views: bytes | None = None
    thumbnail: bytes | None = None


COLUMNS = tuple(Event.__dataclass_fields__)
LIGHT = tuple(name for name in COLUMNS if name not in ("views", "thumbnail"))  # all but the large ones


@dataclass(frozen=True)
class Snapshot:
    """A state of a stream after an event."""

    id: int
    number: int
    title: str
    automatic: bool
    images: int
    time: str
    file: str


SNAPSHOT = "id, number, title, automatic, images, time, file"


def now() -> str:
    """The time in UTC, in ISO format."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def packed(array: np.ndarray) -> bytes:
    """A float32 or float64 matrix as bytes: its shape and type, then its numbers."""
    return MATRIX.pack(array.itemsize, *array.shape) + array.tobytes()


def unpacked(data: bytes) -> Tensor:
    """The matrix in such bytes."""
    size, rows, columns = MATRIX.unpack_from(data)
    numbers = np.frombuffer(data, "<f4" if size == 4 else "<f8", rows * columns, offset=MATRIX.size)
    return torch.from_numpy(numbers.reshape(rows, columns).copy())


class Store(Database):
    """The database and the state files of a service, in a folder that one process writes at a time.

    With `take_over`, a process that writes it loses it to this one; otherwise that is an InputError.
    """

    def __init__(self, folder: Path, take_over: bool = False) -> None:
        files.make_folder(folder / STATES)
        os.chmod(folder, 0o700)
        super().__init__(folder / DATABASE, SCHEMA, VERSION, take_over)
        self.folder = folder
        self.saver = ThreadPoolExecutor(1, "testtime-saver")  # writes states while images go on
        self._remove_leftovers()

    def close(self) -> None:
        """Close the database and let another process use the folder."""
        self.saver.shutdown()
        super().close()

    # Streams

    def streams(self) -> list[tuple[int, str, dict[str, Any], str]]:
        """Number, name, description and time of creation of every stream."""
        rows = self._all("SELECT id, name, spec, created FROM streams ORDER BY name")
        return [(row["id"], row["name"], json.loads(row["spec"]), row["created"]) for row in rows]

    def add_stream(self, name: str, spec: dict[str, Any], session: Session, title: str) -> tuple[int, str]:
        """A new stream that starts from a session; its number and time of creation."""
        file, created = self.write_state(session), now()
        with self.transaction():
            cursor = self._base.execute(
                "INSERT INTO streams (name, spec, created) VALUES (?, ?, ?)", (name, json.dumps(spec), created)
            )
            stream = int(cursor.lastrowid or 0)
            self.add_snapshot(stream, 0, title, True, session.count, file)
        return stream, created

    def delete_stream(self, stream: int) -> None:
        """Delete a stream, its log and its states."""
        gone = [snapshot.file for snapshot in self.snapshots(stream)]
        with self.transaction():
            self._base.execute("DELETE FROM streams WHERE id = ?", (stream,))
        self.remove_states(gone)

    # Events

    def last_number(self, stream: int) -> int:
        """The number of a stream's last event; 0 before the first."""
        return int(self._all("SELECT coalesce(max(number), 0) FROM events WHERE stream = ?", stream)[0][0])

    def add_events(self, stream: int, events: Sequence[Event]) -> None:
        """Append events, inside a transaction."""
        row = f"({', '.join('?' * (len(COLUMNS) + 1))})"
        # one statement: after each, this thread would wait for the others to let it run
        self._base.execute(
            f"INSERT INTO events (stream, {', '.join(COLUMNS)}) VALUES {', '.join([row] * len(events))}",
            [value for event in events for value in (stream, *(getattr(event, name) for name in COLUMNS))],
        )

    def event(self, stream: int, number: int) -> Event | None:
        """One event, or None."""
        rows = self._all(f"SELECT {', '.join(COLUMNS)} FROM events WHERE stream = ? AND number = ?", stream, number)
        return _event(rows[0]) if rows else None

    def with_key(self, stream: int, key: str) -> Event | None:
        """The image that came with an idempotency key."""
        rows = self._all(f"SELECT {', '.join(LIGHT)} FROM events WHERE stream = ? AND key = ?", stream, key)
        return _event(rows[0]) if rows else None

    def latest(self, stream: int, before: int | None, limit: int) -> list[Event]:
        """The latest events, newest first, without their features; `thumbnail` is empty bytes where there is one."""
        rows = self._all(
            f"SELECT {', '.join(LIGHT)}, CASE WHEN thumbnail IS NULL THEN NULL ELSE x'' END AS thumbnail FROM events "
            "WHERE stream = ? AND number < ? ORDER BY number DESC LIMIT ?",
            stream, before if before is not None else 2**62, limit,
        )  # fmt: skip
        return [_event(row) for row in rows]

    def live_events(self, stream: int, after: int, until: int) -> Iterator[Event]:
        """The live events of numbers `after` < n <= `until`, in order, a few at a time."""
        while True:
            rows = self._all(
                f"SELECT {', '.join(LIGHT)}, views FROM events WHERE stream = ? AND number > ? AND number <= ? "
                "AND live AND kind IN ('image', 'label', 'classes') ORDER BY number LIMIT 256",
                stream, after, until,
            )  # fmt: skip
            if not rows:
                return
            yield from map(_event, rows)
            after = rows[-1]["number"]

    def recent_images(self, stream: int, limit: int) -> list[Event]:
        """The latest live images whose features are kept, newest first."""
        rows = self._all(
            f"SELECT {', '.join(LIGHT)}, views FROM events WHERE stream = ? AND live AND kind = 'image' "
            "AND views IS NOT NULL ORDER BY number DESC LIMIT ?",
            stream, limit,
        )  # fmt: skip
        return [_event(row) for row in rows]

    def labels(self, stream: int) -> list[Event]:
        """The live labels, oldest first."""
        rows = self._all(
            f"SELECT {', '.join(LIGHT)} FROM events WHERE stream = ? AND live AND kind = 'label' ORDER BY number",
            stream,
        )
        return [_event(row) for row in rows]

    def alarms(self, stream: int, limit: int) -> list[Event]:
        """The latest live images that raised an alarm, oldest first."""
        rows = self._all(
            f"SELECT {', '.join(LIGHT)} FROM events WHERE stream = ? AND live AND drift ORDER BY number DESC LIMIT ?",
            stream, limit,
        )  # fmt: skip
        return [_event(row) for row in reversed(rows)]

    def end_events(self, stream: int, after: int) -> None:
        """Mark the events after a number as no longer live, and drop their features, inside a transaction."""
        self._base.execute(
            "UPDATE events SET live = 0, views = NULL WHERE stream = ? AND number > ? AND live", (stream, after)
        )

    def forget(self, stream: int, numbers: Sequence[int]) -> None:
        """Erase what events say of their images, inside a transaction; that they happened stays known."""
        self._base.executemany(
            "UPDATE events SET live = 0, views = NULL, thumbnail = NULL, name = NULL, sha256 = NULL, answer = NULL, "
            "label = NULL, zero_shot = NULL, detail = NULL WHERE stream = ? AND number = ?",
            [(stream, number) for number in numbers],
        )

    def drop_old(self, stream: int, features: int, rows: int) -> None:
        """Drop the features up to one number and the rows up to another, inside a transaction."""
        self._base.execute(
            "UPDATE events SET views = NULL, thumbnail = NULL WHERE stream = ? AND number <= ? AND views IS NOT NULL",
            (stream, features),
        )
        self._base.execute("DELETE FROM events WHERE stream = ? AND number <= ?", (stream, rows))

    def counts(self, stream: int) -> list[sqlite3.Row]:
        """How often each rule refused a live image, or none did; how many answers differ from zero-shot."""
        return self._all(
            "SELECT rule, count(*) AS images, sum(learned) AS learned, sum(label != zero_shot) AS changed FROM events "
            "WHERE stream = ? AND live AND kind = 'image' GROUP BY rule",
            stream,
        )

    # Snapshots

    def snapshots(self, stream: int) -> list[Snapshot]:
        """The snapshots of a stream, oldest first."""
        rows = self._all(f"SELECT {SNAPSHOT} FROM snapshots WHERE stream = ? ORDER BY number, id", stream)
        return [Snapshot(**{**dict(row), "automatic": bool(row["automatic"])}) for row in rows]

    def add_snapshot(self, stream: int, number: int, title: str, automatic: bool, images: int, file: str) -> Snapshot:
        """A snapshot whose state is in a file already, inside a transaction."""
        time = now()
        cursor = self._base.execute(
            "INSERT INTO snapshots (stream, number, title, automatic, images, time, file) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (stream, number, title, automatic, images, time, file),
        )
        return Snapshot(int(cursor.lastrowid or 0), number, title, automatic, images, time, file)

    def replace_states(self, renewed: dict[int, tuple[str, int]]) -> None:
        """Give snapshots other files and numbers of images, inside a transaction."""
        self._base.executemany(
            "UPDATE snapshots SET file = ?, images = ? WHERE id = ?",
            [(file, images, snapshot) for snapshot, (file, images) in renewed.items()],
        )

    def drop_snapshots(self, snapshots: Sequence[Snapshot]) -> None:
        """Remove the rows of snapshots, inside a transaction; their files go afterwards."""
        self._base.executemany("DELETE FROM snapshots WHERE id = ?", [(snapshot.id,) for snapshot in snapshots])

    # State files

    def write_state(self, session: Session) -> str:
        """A session written to a new file, whose name it returns; raises OSError if the disk does not take it."""
        name = f"{uuid.uuid4().hex}.safetensors"
        try:
            session.save(self.state_path(name))
        except StateError:  # the session, not the disk
            raise
        except InputError as error:
            raise OSError(str(error)) from None
        return name

    def state_path(self, file: str) -> Path:
        """Where a state file is."""
        return self.folder / STATES / file

    def remove_states(self, names: Iterable[str]) -> None:
        """Remove files; one that is gone, or cannot be removed now, is no problem."""
        for name in names:
            with contextlib.suppress(OSError):
                self.state_path(name).unlink()

    def _remove_leftovers(self) -> None:
        # a process that lost the folder to this one may be about to name such a file: it will not be allowed to
        known = {row["file"] for row in self._all("SELECT file FROM snapshots")}
        self.remove_states(path.name for path in (self.folder / STATES).iterdir() if path.name not in known)


def _event(row: sqlite3.Row) -> Event:
    values = dict(row)
    for name in ("live", "learned", "drift"):
        values[name] = None if values[name] is None else bool(values[name])
    return Event(**values)
