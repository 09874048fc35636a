"""The folder of a history: damaged, killed while it is written, out of space."""

from __future__ import annotations

import errno
import json
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from disk import Disk, restored
from moments import begun, moments, names_in, saved, spoilt

import testtime as tt
from testtime import Session, files
from testtime.session import history as histories
from testtime.session import history_files
from testtime.session.history import History, rollback, unlearn
from testtime.types import InputError, StateError


@pytest.fixture(scope="module", autouse=True)
def unsynced() -> Iterator[None]:
    """Nothing waits for the disk, which would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def toy() -> tuple[tt.Task, torch.Tensor]:
    return tt.toy(classes=4, dim=8, images=30, views=2)[:2]


# Damage


def test_a_folder_that_is_no_history_is_refused(toy: Any, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for call in (rollback, lambda folder: unlearn(folder, 3)):
        with pytest.raises(StateError, match="mine is not a history: it has no history.json"):
            call(tmp_path / "mine")
        with pytest.raises(StateError, match="No folder .*none"):
            call(tmp_path / "none")
        assert not (tmp_path / "none").exists()
    with pytest.raises(InputError, match="mine holds notes.txt, which is no file of a history"):
        History(Session(toy[0], "dpe"), tmp_path / "mine")
    with pytest.raises(InputError, match="it is a file, and a folder is needed"):
        History(Session(toy[0], "dpe"), tmp_path / "mine" / "notes.txt")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("kind", ["snapshot", "images"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "empty", "foreign"])
def test_a_damaged_file_is_refused_by_name_and_nothing_changes(
    toy: Any, tmp_path: Path, kind: str, damage: str
) -> None:
    begun(*toy, tmp_path / "h").close()
    path = tmp_path / "h" / names_in(tmp_path / "h", kind)[2]
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.unlink()
    if damage != "gone":
        other = Session(toy[0], "tda").save(tmp_path / "other").read_bytes()
        kinds = {"flipped": content, "cut": content[:-5], "empty": b"", "foreign": other}
        path.write_bytes(kinds[damage])
    before = {path: path.read_bytes() for path in (tmp_path / "h").iterdir()}
    number = int(path.name.split("-")[1])
    for attempt in (lambda: rollback(tmp_path / "h", before=number + 2), lambda: unlearn(tmp_path / "h", number + 1)):
        with pytest.raises(StateError, match=path.name):
            attempt()
    if kind == "snapshot":  # others are used where they can be
        assert rollback(tmp_path / "h", before=number - 1).count == number - 1
    assert before == {path: path.read_bytes() for path in (tmp_path / "h").iterdir()}


INDICES: list[Any] = [
    b"", b"{", b"[]", b"5", b"[" * 100_000, {"format": "other"}, {"version": 2}, {"every": 0}, {"every": "5"},
    {"limit": -1}, {"reference": 1}, {"began": "?"}, {"generation": True}, {"snapshots": []}, {"snapshots": {}},
    {"snapshots": [5]}, {"parts": None}, {"parts": []}, {"parts": [{}]},
]  # fmt: skip


@pytest.mark.parametrize("change", INDICES, ids=lambda change: str(change)[:30])
def test_a_damaged_index_is_refused(toy: Any, tmp_path: Path, change: Any) -> None:
    begun(*toy, tmp_path).close()
    path = tmp_path / "history.json"
    path.write_bytes(
        change if isinstance(change, bytes) else json.dumps(json.loads(path.read_text()) | change).encode()
    )
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for attempt in (
        lambda: rollback(tmp_path),
        lambda: unlearn(tmp_path, 3),
        lambda: History(Session(toy[0], "dpe"), tmp_path),
    ):
        with pytest.raises(StateError, match="history.json"):
            attempt()
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}


@pytest.mark.parametrize("file", ["../../etc/passwd", "/etc/passwd", "snapshot-000000000-g0.safetensors/..", "", "x"])
def test_an_index_leads_out_of_its_folder_nowhere(toy: Any, tmp_path: Path, file: str) -> None:
    begun(*toy, tmp_path).close()
    path = tmp_path / "history.json"
    content = json.loads(path.read_text())
    content["snapshots"][0]["file"] = file
    path.write_text(json.dumps(content))
    with pytest.raises(StateError, match="is no file of a history"):
        rollback(tmp_path, before=2)


# Killed processes, power cuts, full disks


def whole(folder: Path, known: list[bytes]) -> bool:
    """Whether a folder holds all of these moments."""
    return all(saved(rollback(folder, before=index)) == moment for index, moment in enumerate(known))


def lefts(disk: Disk) -> Iterator[Path]:
    """A folder for each state of the disk."""
    disk.close()
    for left in disk.left:
        with tempfile.TemporaryDirectory() as place:
            restored(left, Path(place))
            yield Path(place)


def test_an_unlearning_that_is_killed_leaves_the_history_with_the_image_or_without(
    toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, stream = toy[0], toy[1][:12]
    begun(task, stream, tmp_path / "h", every=3).close()
    old = moments(Session(task, "dpe"), list(stream))
    new = moments(Session(task, "dpe"), spoilt(stream, {4}))
    with monkeypatch.context() as patch:
        disk = Disk(tmp_path / "h", patch)
        unlearn(tmp_path / "h", 4)
    assert whole(tmp_path / "h", new) and len(disk.left) >= 10
    outcomes = []
    for folder in lefts(disk):
        outcomes.append("old" if whole(folder, old) else "new")
        if outcomes[-1] == "old":
            unlearn(folder, 4)  # again, over what the killed process left
        else:
            assert whole(folder, new)
            with pytest.raises(InputError, match="Image 4 has been unlearned already"):
                unlearn(folder, 4)
        assert whole(folder, new)
        assert names_in(folder, "") == names_in(tmp_path / "h", "")  # which has removed what was left
    assert {*outcomes} == {"old", "new"} and outcomes == sorted(outcomes, reverse=True)


def test_a_history_that_is_killed_while_it_writes_is_whole_up_to_some_image(
    toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(histories, "PART_IMAGES", 2)
    task, stream = toy[0], toy[1][:14]
    known = moments(Session(task, "dpe"), list(stream))
    (tmp_path / "h").mkdir()
    with monkeypatch.context() as patch:
        disk = Disk(tmp_path / "h", patch)
        begun(task, stream, tmp_path / "h", every=3, limit=6).close()
    reached = []
    for folder in lefts(disk):
        if not (folder / "history.json").exists():
            continue
        session = rollback(folder)
        assert saved(session) == known[session.position]
        reached.append(session.position)
        index = history_files.read_index(folder)
        for entry in history_files.read_entries(folder, index):
            assert saved(rollback(folder, before=entry.index)) == known[entry.index]
        with History(session, folder) as history:
            for views in stream[session.position :]:
                session.step(views)
            assert saved(session) == known[-1] == saved(history.rollback())
    assert reached[-1] == 14 and len({*reached}) >= 6 and len(reached) >= 20


def test_an_error_at_any_write_leaves_session_and_history_with_the_image_or_without(
    toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, stream = toy[0], toy[1][:12]
    old = moments(Session(task, "dpe"), list(stream))
    new = moments(Session(task, "dpe"), spoilt(stream, {4}))
    outcomes = []
    for last in count(1):
        calls, folder = iter(range(1, 1000)), tmp_path / str(last)

        def fails(descriptor: int, last: int = last, calls: Iterator[int] = calls) -> None:
            if next(calls) == last:
                raise OSError(errno.ENOSPC, "No space left on device")

        with begun(task, stream, folder, every=3) as history:
            history.flush()
            with monkeypatch.context() as patch:
                patch.setattr(files.os, "fsync", fails)
                with suppress(InputError, OSError):
                    history.unlearn(4)
            expected = new if history.session.count == 11 else old
            assert saved(history.session) == expected[-1] and whole(folder, expected)
            if expected is old:
                history.unlearn(4)
            assert saved(history.session) == new[-1] and whole(folder, new)
            outcomes.append("new" if expected is new else "old")
        assert len(names_in(folder, "")) == 1 + len(history.snapshots()) + len(history._index.parts)
        if next(calls) < last:  # all of them have failed once
            break
    assert outcomes.count("old") >= 8 and outcomes == sorted(outcomes, reverse=True)


def test_an_error_while_it_records_loses_no_image(toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, stream = toy[0], toy[1][:14]
    known = moments(Session(task, "dpe"), list(stream))
    for last in range(1, 30):
        calls, folder, session = iter(range(1, 1000)), tmp_path / str(last), Session(task, "dpe")

        def fails(descriptor: int, last: int = last, calls: Iterator[int] = calls) -> None:
            if next(calls) == last:
                raise OSError(errno.ENOSPC, "No space left on device")

        with History(session, folder, every=3, limit=6) as history, monkeypatch.context() as patch:
            patch.setattr(files.os, "fsync", fails)
            for views in stream:
                with suppress(InputError, OSError):
                    session.step(views)
            with suppress(InputError, OSError):
                history.flush()
            assert saved(session) == saved(history.rollback()) == known[-1]
            for entry in history.images():
                assert saved(history.rollback(before=entry.index)) == known[entry.index]


def test_a_process_killed_after_such_an_error_leaves_a_whole_history(
    toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, stream = toy[0], toy[1][:8]
    known = moments(Session(task, "dpe"), list(stream))
    checked = set()
    for last in range(1, 12):
        calls, folder, session = iter(range(1, 1000)), tmp_path / str(last), Session(task, "dpe")

        def fails(descriptor: int, last: int = last, calls: Iterator[int] = calls) -> None:
            if next(calls) == last:
                raise OSError(errno.EIO, "Input/output error")

        with History(session, folder, every=3) as history, monkeypatch.context() as patch:
            patch.setattr(files.os, "fsync", fails)
            disk = Disk(folder, patch)
            for views in stream:
                with suppress(InputError, OSError):
                    session.step(views)
                    history.flush()
        for left in lefts(disk):
            content = (
                (left / "history.json").read_bytes(),
                *(left.joinpath(name).read_bytes() for name in names_in(left, "images")),
            )
            if content not in checked:
                checked.add(content)
                session = rollback(left)
                assert saved(session) == known[session.position]
