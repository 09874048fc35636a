"""An SQLite database that one process writes at a time, and that another process can take over.

Whoever opens it counts its epoch up and remembers it. Every transaction first checks that the epoch is still its own,
under the lock that it writes with: after a take-over, the process before it writes nothing more, however late it wakes.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testtime import files
from testtime.errors import StateError
from testtime.serve.types import ServiceError

PATIENCE = 30.0  # seconds to wait for a transaction of the process before
EPOCH = "CREATE TABLE IF NOT EXISTS writer (epoch INTEGER NOT NULL);"
PRAGMAS = ("synchronous=FULL", "foreign_keys=ON", "secure_delete=ON")
LOCAL = ("journal_mode=WAL", *PRAGMAS)
# a write-ahead log needs memory that all who open it share, so one machine; a journal needs only locks on files
SHARED = ("auto_vacuum=FULL", "journal_mode=TRUNCATE", *PRAGMAS)


class Fenced(ServiceError):
    """This process wrote a folder that another one has taken over; nothing was written."""

    def __init__(self, path: Path) -> None:
        super().__init__(503, f"{path.parent} was taken over by another process; this one writes nothing more.", 1.0)


class Database:
    """One connection that writes, and one for each thread that reads.

    Without `take_over`, a lock file refuses a second process on this machine. With it, the newest process has the
    database, from whichever machine, and nothing but SQLite's own locks on shared storage are relied on.
    """

    def __init__(self, path: Path, schema: str, version: int, take_over: bool = False) -> None:
        self.path, self.fenced = path, False  # fenced: whether another process has taken over
        self._held = contextlib.ExitStack()
        self._lock = threading.RLock()  # of the one connection that writes
        self._readers = threading.local()  # a connection for each thread that reads: reading waits for no write
        self._open_readers: list[sqlite3.Connection] = []
        if not take_over:
            self._held.enter_context(files.locked(path))
        try:
            self._open(schema, version, SHARED if take_over else LOCAL)
        except sqlite3.DatabaseError as error:
            self._held.close()
            raise StateError(f"{path} cannot be used: {error}. Give another folder, or restore a backup.") from None
        except BaseException:
            self._held.close()
            raise

    def _open(self, schema: str, version: int, pragmas: tuple[str, ...]) -> None:
        self._base = self._connected()
        for pragma in pragmas:
            self._base.execute(f"PRAGMA {pragma}")
        (found,) = self._base.execute("PRAGMA user_version").fetchone()
        if found not in (0, version):
            raise StateError(f"{self.path} has version {found}, this program reads {version}; give another folder.")
        self._base.executescript(schema + EPOCH)
        self._base.execute(f"PRAGMA user_version={version}")
        with self._written():
            (last,) = self._base.execute("SELECT coalesce(max(epoch), 0) FROM writer").fetchone()
            self._base.execute("DELETE FROM writer")
            self._base.execute("INSERT INTO writer VALUES (?)", (last + 1,))
        self._epoch = last + 1

    def _connected(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, PATIENCE, isolation_level=None, check_same_thread=False)

    def close(self) -> None:
        """Close the database and let another process use it."""
        with self._lock:
            for connection in (*self._open_readers, self._base):
                connection.close()
            self._held.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """A block whose changes are on the disk when it ends, all of them or none; `Fenced` after a take-over."""
        with self._lock:
            if self.fenced:
                raise Fenced(self.path)
            with self._written():
                (epoch,) = self._base.execute("SELECT epoch FROM writer").fetchone()
                if epoch != self._epoch:
                    self.fenced = True
                    raise Fenced(self.path)
                yield

    @contextmanager
    def _written(self) -> Iterator[None]:
        self._base.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._base.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # a full disk may have ended it already
                self._base.execute("ROLLBACK")
            raise

    def probe(self) -> None:
        """Raise if nothing can be written."""
        with self.transaction():
            self._base.execute("CREATE TABLE probe (content BLOB)")
            self._base.execute("INSERT INTO probe VALUES (zeroblob(65536))")
            self._base.execute("DROP TABLE probe")

    def checkpoint(self) -> None:
        """Move everything from the write-ahead log into the database, so that erased data is gone from both."""
        with self._lock:
            self._base.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _all(self, query: str, *values: object) -> list[sqlite3.Row]:
        reader: sqlite3.Connection | None = getattr(self._readers, "connection", None)
        if reader is None:
            reader = self._connected()
            reader.row_factory = sqlite3.Row
            self._readers.connection = reader
            with self._lock:
                self._open_readers.append(reader)
        return reader.execute(query, values).fetchall()
