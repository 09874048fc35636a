"""Fencing: of two processes that write one folder, the newer one has it, and the older one writes nothing more."""

from __future__ import annotations

import asyncio
import io
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")

import testtime as tt  # noqa: E402
from testtime.serve.database import Fenced  # noqa: E402
from testtime.serve.service import Service  # noqa: E402
from testtime.serve.store import Event, Store, now  # noqa: E402
from testtime.serve.types import DATABASE, STATES, StreamSpec, Upload  # noqa: E402

CLASSES = ("cat", "dog", "fox")


@pytest.fixture(scope="module")
def session() -> tt.Session:
    encoder = tt.load_encoder("tiny")
    return tt.Session(tt.build_task(encoder, CLASSES), "dpe", encoder=encoder)


def with_stream(folder: Path, session: tt.Session) -> tuple[Store, int]:
    store = Store(folder, take_over=True)
    return store, store.add_stream("pets", {}, session, "start")[0]


def append(store: Store, stream: int, number: int) -> None:
    with store.transaction():
        store.add_events(stream, [Event(number, "image", now())])


def content(folder: Path) -> list[list[Any]]:
    base = sqlite3.connect(folder / DATABASE)
    try:
        return [base.execute(f"SELECT * FROM {table}").fetchall() for table in ("streams", "events", "snapshots")]
    finally:
        base.close()


def test_the_older_of_two_writers_writes_nothing_more(tmp_path: Path, session: tt.Session) -> None:
    older, stream = with_stream(tmp_path, session)
    append(older, stream, 1)
    newer = Store(tmp_path, take_over=True)
    before = content(tmp_path)
    changes = (
        lambda: append(older, stream, 2),
        lambda: older.add_stream("zoo", {}, session, "start"),
        lambda: older.delete_stream(stream),
        older.probe,
    )
    for change in changes:
        with pytest.raises(Fenced, match="taken over"):
            change()
    assert older.fenced and not newer.fenced
    assert content(tmp_path) == before
    append(newer, stream, 2)  # the same number: the older one took no place
    assert newer.last_number(stream) == 2
    older.close()
    newer.close()


def test_a_transaction_that_is_open_ends_before_a_take_over(tmp_path: Path, session: tt.Session) -> None:
    older, stream = with_stream(tmp_path, session)
    program = "import sys, pathlib; from testtime.serve.store import Store; Store(pathlib.Path(sys.argv[1]), True)"
    with older.transaction():
        older.add_events(stream, [Event(1, "image", now())])
        other = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(6)
    assert other.wait(30) == 0
    with pytest.raises(Fenced):
        append(older, stream, 2)
    assert older.last_number(stream) == 1
    older.close()


def test_files_of_a_fenced_writer_are_left_over_and_those_with_a_row_stay(tmp_path: Path, session: tt.Session) -> None:
    older, stream = with_stream(tmp_path, session)
    coming = older.write_state(session)  # and before the row that names it, another takes over
    newer = Store(tmp_path, take_over=True)
    with pytest.raises(Fenced), older.transaction():
        older.add_snapshot(stream, 0, "late", False, 0, coming)
    assert [path.name for path in (tmp_path / STATES).iterdir()] == [each.file for each in newer.snapshots(stream)]
    late = older.write_state(session)
    older.close()
    newer.close()
    newest = Store(tmp_path, take_over=True)
    assert not newest.state_path(late).exists()
    assert all(newest.state_path(each.file).exists() for each in newest.snapshots(stream))
    newest.close()


def test_a_store_that_takes_nothing_over_is_refused_and_fences_nobody(tmp_path: Path, session: tt.Session) -> None:
    first = Store(tmp_path)
    stream, _ = first.add_stream("pets", {}, session, "start")
    with pytest.raises(tt.InputError, match="being written by process"):
        Store(tmp_path)
    append(first, stream, 1)
    first.close()


def test_a_fenced_service_acknowledges_nothing_and_the_other_goes_on_from_the_log(tmp_path: Path) -> None:
    encoder = tt.load_encoder("tiny")

    def photograph(number: int) -> Upload:
        data = io.BytesIO()
        pixels = np.random.default_rng(number).integers(0, 256, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(data, "PNG")
        return Upload(data.getvalue(), str(number), f"key {number}")

    async def main() -> None:
        older, newer = (Service(encoder, tmp_path, take_over=True) for _ in range(2))
        await older.start()
        await older.create(StreamSpec("pets", CLASSES))
        await older.answer("pets", [photograph(0)])
        await newer.start()
        (refused,) = await older.answer("pets", [photograph(1)])
        assert refused["status"] == 503 and older.fenced
        with pytest.raises(Fenced):
            await older.reset("pets")
        again, new = await newer.answer("pets", [photograph(0), photograph(1)])
        assert again["repeated"] and not new["repeated"]
        assert (new["id"], new["index"]) == (2, 1)
        assert [row["image"] for row in await newer.images("pets")] == ["1", "0"]
        await older.close()
        await newer.close()

    asyncio.run(main())
