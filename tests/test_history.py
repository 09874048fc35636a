"""A history goes back to any of its images, and unlearns one, to the last bit; whatever happens to its folder."""

from __future__ import annotations

import errno
import json
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import fuzz_states
import pytest
import torch
from disk import Disk, restored
from hypothesis import given, settings
from hypothesis import strategies as st

import testtime as tt
from testtime import Session, files
from testtime.session import history as histories
from testtime.session import history_files
from testtime.session.history import History, rollback, unlearn
from testtime.types import InputError, StateError

METHODS = sorted(set(fuzz_states.METHODS.ours) - set(fuzz_states.TOWERED))
START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module", autouse=True)
def unsynced() -> Iterator[None]:
    """Nothing waits for the disk, which would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.os, "fsync", lambda descriptor: None)
        yield


class Clock:
    """A second passes with every look at it."""

    def __init__(self) -> None:
        self.time = START

    def __call__(self) -> datetime:
        self.time += timedelta(seconds=1)
        return self.time


def saved(session: Session) -> bytes:
    """All that a session holds."""
    with tempfile.TemporaryDirectory() as folder:
        return session.save(Path(folder) / "s").read_bytes()


def feed(session: Session, views: torch.Tensor) -> None:
    """One image; one of NaN is skipped, like a file that cannot be read."""
    list(session.run([views], on_error=lambda *_: None))


def spoilt(stream: torch.Tensor, bad: set[int]) -> list[torch.Tensor]:
    return [torch.full_like(views, torch.nan) if n in bad else views for n, views in enumerate(stream)]


def moments(session: Session, stream: list[torch.Tensor]) -> list[bytes]:
    """What the session holds before each image, and after the last."""
    found = [saved(session)]
    for views in stream:
        feed(session, views)
        found.append(saved(session))
    return found


@pytest.fixture
def toy() -> tuple[tt.Task, torch.Tensor]:
    return tt.toy(classes=4, dim=8, images=30, views=2)[:2]


def begun(task: tt.Task, stream: torch.Tensor, folder: Path, **options: Any) -> History:
    """The history of a session that has seen a stream."""
    history = History(Session(task, "dpe"), folder, **({"clock": Clock(), "every": 5} | options))
    for views in stream:
        history.session.step(views)
    return history


# Exactness


@settings(max_examples=60)
@given(
    method=st.sampled_from(METHODS),
    seed=st.integers(0, 9),
    images=st.integers(1, 14),
    views=st.integers(1, 3),
    every=st.integers(1, 6),
    bad=st.sets(st.integers(0, 13), max_size=3),
    chosen=st.integers(0, 13),
    reference=st.booleans(),
    double=st.booleans(),
    parts=st.integers(1, 5),
)
def test_going_back_and_unlearning_are_exact(
    method: str, seed: int, images: int, views: int, every: int, bad: set[int], chosen: int, reference: bool,
    double: bool, parts: int,
) -> None:  # fmt: skip
    dtype = torch.float64 if double else torch.float32
    task, stream, _ = tt.toy(classes=4, dim=7, images=images + 3, views=views, seed=seed, dtype=dtype)
    given = spoilt(stream, bad)
    chosen %= images
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(histories, "PART_IMAGES", parts)
        session = Session(task, method, reference=reference)
        with History(session, place, every=every, clock=Clock()) as history:
            known = moments(session, given[:images])
            times = [entry.time for entry in history.images()]
            for index in range(images + 1):
                assert saved(history.rollback(before=index)) == known[index]
            for index, time in enumerate(times):
                assert saved(history.rollback(before_time=time)) == known[index]
            assert saved(session) == known[-1]
            if chosen in bad:
                with pytest.raises(InputError, match=f"Image {chosen} could not be read"):
                    history.unlearn(chosen)
                assert saved(session) == known[-1]
                return
            without = Session(task, method, reference=reference)
            expected = moments(without, spoilt(stream, {*bad, chosen})[:images])
            assert history.unlearn(chosen) is session and saved(session) == expected[-1]
            for index in range(images + 1):
                assert saved(history.rollback(before=index)) == expected[index]
            assert session.count == images - len({*bad, chosen} & {*range(images)}) and session.position == images
            for rest in given[images:]:  # and it goes on like one that never saw it
                feed(session, rest)
                feed(without, rest)
                assert saved(session) == saved(without)
            assert [entry.index for entry in history.images()] == list(range(images + 3))
        assert saved(rollback(place)) == saved(without)


def test_images_may_have_different_numbers_of_views(toy: Any, tmp_path: Path) -> None:
    task, stream = toy
    given = [views[: 1 + n % 2] for n, views in enumerate(stream)]
    session, without = Session(task, "dpe"), Session(task, "dpe")
    with History(session, tmp_path, every=7) as history:
        for views in given:
            session.step(views)
        history.unlearn(11)
    moments(without, spoilt(given, {11}))
    assert saved(session) == saved(without)


def test_several_images_are_unlearned_in_any_order(toy: Any, tmp_path: Path) -> None:
    task, stream = toy
    folders = tmp_path / "one", tmp_path / "other"
    for folder, order in zip(folders, ((3, 17, 9, 29), (29, 9, 3, 17)), strict=True):
        with begun(task, stream, folder) as history:
            for index in order:
                history.unlearn(index)
            without = Session(task, "dpe")
            known = moments(without, spoilt(stream, {3, 9, 17, 29}))
            assert saved(history.session) == known[-1] and history.session.count == 26
            assert all(saved(history.rollback(before=index)) == known[index] for index in range(31))


def test_normalised_views_are_not_normalised_again(toy: Any) -> None:
    """This is why a session has a step of its own for them."""
    task, stream = toy
    seen: list[Any] = []
    session, again = Session(task, "dpe", observers=[seen.append]), Session(task, "dpe")
    for views in stream:
        session.step(3 * views)
    assert any(not torch.equal(torch.nn.functional.normalize(each.views, dim=-1), each.views) for each in seen)
    for each in seen:
        again.replay(each.views, each.index)
    assert saved(again) == saved(session)


def test_a_session_that_starts_late_keeps_its_positions(toy: Any, tmp_path: Path) -> None:
    task, stream = toy
    session = Session(task, "tda")
    session.scan(stream[:10])
    session.position = 100
    start = saved(session)
    with History(session, tmp_path, every=4) as history:
        for views in stream[10:]:
            session.step(views)
        assert [entry.index for entry in history.images()] == list(range(100, 120))
        assert saved(history.rollback(before=100)) == start
        history.unlearn(105)
        assert session.position == 120 and session.count == 29
        with pytest.raises(StateError, match="Image 7 is older than .* begins at image 100: the history was started"):
            history.unlearn(7)


def test_a_history_may_be_of_a_session_in_use_by_threads(toy: Any, tmp_path: Path) -> None:
    from threading import Thread

    task, stream = toy
    session = Session(task, "dpe")
    with History(session, tmp_path, every=5) as history:
        threads = [Thread(target=lambda: [session.step(views) for views in stream]) for _ in range(3)]
        for thread in threads:
            thread.start()
        history.rollback()
        for thread in threads:
            thread.join()
        assert saved(history.rollback()) == saved(session) and session.count == 90
        history.unlearn(40)
        assert saved(history.rollback()) == saved(session) and session.count == 89


def test_the_variations_of_a_session_are_not_forgotten(toy: Any, tmp_path: Path) -> None:
    class Mirror:
        name = "mirror"

        def __call__(self, image: Any, count: int, seed: int) -> Any:
            raise AssertionError

    task, stream = toy
    session = Session(task, "dpe", variations=Mirror())
    with History(session, tmp_path, every=4):
        session.step(stream[0])
    assert saved(rollback(tmp_path)) == saved(session)


# What it holds on to


def names_in(folder: Path, kind: str) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(kind))


def test_the_features_of_an_unlearned_image_are_nowhere_in_the_folder(toy: Any, tmp_path: Path) -> None:
    task, stream = toy
    seen: list[Any] = []
    session = Session(task, "tda", observers=[seen.append])  # its cache holds features
    left = tmp_path / ".images-000000000-g0.safetensors.77.0123abcd"
    with History(session, tmp_path, every=4) as history:
        for views in stream:
            session.step(views)
        history.flush()
        found = [feature.numpy().tobytes() for feature in seen[9].views]
        for feature in found:
            assert any(feature in path.read_bytes() for path in tmp_path.iterdir())
        left.write_bytes(b"".join(found))  # of a process that was killed
        history.unlearn(9)
        for feature in found:
            assert not any(feature in path.read_bytes() for path in tmp_path.iterdir())
    assert not left.exists()


def test_the_name_of_an_unlearned_image_is_nowhere_in_the_folder(tmp_path: Path) -> None:
    from small_data import make_folders

    photos = sorted(make_folders(tmp_path / "photos", images=2).glob("*/*"))
    encoder = tt.load_encoder("tiny")
    session = Session(tt.build_task(encoder, ["cat", "dog", "fox"]), "tda", encoder=encoder, views=2)
    with History(session, tmp_path / "history", every=4) as history:
        list(session.run(photos))
        assert [entry.name for entry in history.images()] == list(map(str, photos))
        history.unlearn(photos[2])
        assert [entry.name for entry in history.images()] == [str(p) if p != photos[2] else None for p in photos]
    assert not any(str(photos[2]).encode() in path.read_bytes() for path in (tmp_path / "history").iterdir())
    expected = Session(session.task, "tda", encoder=encoder, views=2)
    photos[2].write_text("no image")
    list(expected.run(photos, on_error=lambda *_: None))
    assert saved(session) == saved(expected)


def test_a_long_stream_takes_bounded_space(toy: Any, tmp_path: Path) -> None:
    task, stream = toy
    session, sizes = Session(task, "tda"), []
    with History(session, tmp_path, every=5, limit=200) as history:
        for number in range(1000):
            session.step(stream[number % 30])
            if number % 7 == 0:
                history.flush()
                sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
                assert len(history.images()) <= 200 and len(history.snapshots()) <= 8 + 4 * 3 + 1
        assert len(history.images()) >= 150
        assert max(sizes[: len(sizes) // 2]) >= 0.95 * max(sizes)
        first = history.images()[0].index
        with pytest.raises(
            StateError, match=f"Image {first - 1} is older .* begins at image {first}: older images were"
        ):
            history.unlearn(first - 1)
        history.unlearn(first)
        assert session.count == 999


def test_snapshots_thin_out_with_their_age() -> None:
    now = datetime.now(UTC)
    index = history_files.Index(0, 10, 10**9, False, "started", (), ())
    for number in range(0, 4010, 10):
        taken = history_files.Snapshot("", "", number, number, number, now)
        part = history_files.Part("", "", number - 10, 10)
        index = history_files.replace(
            index, snapshots=(*index.snapshots, taken), parts=(*index.parts, part)[number < 10 :]
        )
        index = history_files.bounded(index)
        numbers = [snapshot.number for snapshot in index.snapshots]
        assert numbers[0] == 0 and numbers[-1] == number
        for earlier, later in zip(numbers, numbers[1:], strict=False):  # never further apart than a quarter of the age
            assert later - earlier <= max(10, (number - earlier) / 4)
    ages = [4000 - number for number in numbers[::-1]]
    assert ages[:9] == list(range(0, 90, 10)) and len(ages) <= 8 + 4 * 6 + 1


@pytest.mark.parametrize("setting", [{"every": 0}, {"every": -3}, {"every": 10, "limit": 19}])
def test_settings_that_make_no_sense_are_refused(toy: Any, tmp_path: Path, setting: dict[str, int]) -> None:
    with pytest.raises(InputError, match=next(reversed(setting))):
        History(Session(toy[0], "dpe"), tmp_path / "h", **setting)
    assert not list((tmp_path / "h").glob("*"))


# Finding images


def test_an_image_is_found_by_its_name_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from small_data import make_folders

    monkeypatch.chdir(make_folders(tmp_path / "photos", images=2))
    encoder = tt.load_encoder("tiny")
    session = Session(tt.build_task(encoder, ["cat", "dog", "fox"]), "dpe", encoder=encoder)
    with History(session, tmp_path / "history") as history:
        list(session.run(["cat/0.png", "cat/1.png", "dog/0.png", "cat/1.png"]))
        assert history.rollback(before=tmp_path / "photos" / "dog" / "0.png").count == 2
        assert history.rollback(before="./dog/0.png").count == 2
        with pytest.raises(InputError, match="has image 'cat/1.png' 2 times: 1, 3. Give one of these"):
            history.unlearn("cat/1.png")
        with pytest.raises(InputError, match="has no image 'fox/0.png'; it has images 0 to 3"):
            history.unlearn("fox/0.png")
        for none in (4, -1, 99):
            with pytest.raises(InputError, match=f"has no image {none}; it has images 0 to 3"):
                history.unlearn(none)
        history.unlearn("cat/0.png")
        with pytest.raises(InputError, match="Image 0 has been unlearned already"):
            history.unlearn(0)


def test_times_are_utc_unless_they_say_otherwise(toy: Any, tmp_path: Path) -> None:
    with begun(*toy, tmp_path) as history:  # the first image at 2 seconds past midnight
        assert history.rollback(before_time="2026-01-01T00:00:05").count == 3
        assert history.rollback(before_time="2026-01-01T02:00:05+02:00").count == 3
        assert history.rollback(before_time="2026-01-01T00:00:05.5Z").count == 4
        assert history.rollback(before_time=datetime(2027, 1, 1)).count == 30
        with pytest.raises(StateError, match="2025-12-31.* is before the history .* begins at 2026-01-01"):
            history.rollback(before_time="2025-12-31")
        with pytest.raises(InputError, match="'noon' is not a time"):
            history.rollback(before_time="noon")
        with pytest.raises(InputError, match="give one of the two"):
            history.rollback(before=3, before_time=START)


# What is not recorded


@pytest.mark.parametrize("way", ["scan", "reset"])
def test_what_a_history_has_not_seen_ends_it_and_starts_another(toy: Any, tmp_path: Path, way: str) -> None:
    task, stream = toy
    with begun(task, stream, tmp_path) as history:
        session = history.session
        session.reset() if way == "reset" else session.scan(stream[:3])
        with pytest.raises(StateError, match="without being recorded"):
            history.unlearn(2)
        session.step(stream[3])
        assert history.images() == [] and saved(history.rollback()) == saved(session)
        with pytest.raises(InputError, match="without this being recorded" if way == "scan" else "has no image 2"):
            history.unlearn(2)
        known = moments(session, list(stream[4:9]))
        first = session.position - 5
        assert [saved(history.rollback(before=first + number)) for number in range(6)] == known


def test_an_image_that_ends_a_run_is_not_recorded(toy: Any, tmp_path: Path) -> None:
    task, stream = toy
    with begun(task, stream[:3], tmp_path) as history:
        with pytest.raises(InputError):
            history.session.step(torch.full_like(stream[0], torch.nan))
        history.session.step(stream[3])
        assert [entry.index for entry in history.images()] == [0, 1, 2, 3]


# Going on with a folder


def test_a_history_goes_on_at_its_end(toy: Any, tmp_path: Path) -> None:
    task, stream = toy
    session = Session(task, "dpe")
    known = moments(Session(task, "dpe"), list(stream))
    for start in range(0, 30, 7):
        with History(session, tmp_path, clock=Clock(), every=4):
            for views in stream[start : start + 7]:
                session.step(views)
        session = Session.load(session.save(tmp_path.parent / "s.safetensors"))
    with History(session, tmp_path) as history:
        assert history._index.every == 4
        assert [saved(history.rollback(before=index)) for index in range(31)] == known


@pytest.mark.parametrize("back", [0, 3, 5, 13, 29])
def test_a_history_that_goes_on_earlier_drops_what_came_after(toy: Any, tmp_path: Path, back: int) -> None:
    task, stream = toy
    begun(task, stream, tmp_path).close()
    session = rollback(tmp_path, before=back)
    known = moments(Session(task, "dpe"), [*stream[:back], *stream[:6]])
    with History(session, tmp_path) as history:
        assert len(history.images()) == back
        for views in stream[:6]:
            session.step(views)
        assert [saved(history.rollback(before=index)) for index in range(back + 7)] == known


def test_a_session_of_another_stream_is_refused_and_the_history_stays(toy: Any, tmp_path: Path) -> None:
    task, stream = toy
    begun(task, stream, tmp_path / "h").close()
    before = {path: path.read_bytes() for path in (tmp_path / "h").iterdir()}
    others = [Session(task, "dpe"), Session(task, "dpe"), Session(task, "dpe", alpha=3), Session(task, "tda")]
    for other, chunk in zip(others, (stream.flip(0), stream.repeat(2, 1, 1), stream, stream), strict=True):
        for views in chunk:
            other.step(views)
        with pytest.raises(StateError, match="is none of the history in .* from position 0 to 30; give another folder"):
            History(other, tmp_path / "h")
        assert other.observers == []
    with pytest.raises(StateError, match="classes"):
        History(Session(tt.toy(classes=5, dim=8)[0], "dpe"), tmp_path / "h")
    assert before == {path: path.read_bytes() for path in (tmp_path / "h").iterdir()}
    with History(others[0], tmp_path / "h", overwrite=True) as history:
        assert history.images() == [] and saved(history.rollback()) == saved(others[0])


def test_a_session_from_before_an_unlearning_is_refused(toy: Any, tmp_path: Path) -> None:
    task, stream = toy
    with begun(task, stream, tmp_path) as history:
        old = history.session.fork()
        history.unlearn(4)
    with pytest.raises(StateError, match="after 30 images and at position 30, is none of the history"):
        History(old, tmp_path)


def test_a_session_that_differs_by_rounding_goes_on_from_where_it_is(toy: Any, tmp_path: Path) -> None:
    """As one does that was run on another machine."""
    task, stream = toy
    begun(task, stream[:13], tmp_path).close()
    session = Session(task, "dpe", reference=True)
    for views in stream[:13]:
        session.step(views)
    start = saved(session)
    if start == saved(rollback(tmp_path)):
        pytest.skip("both steppers give the same bits here")
    with History(session, tmp_path) as history:
        known = moments(session, list(stream[13:]))
        assert [saved(history.rollback(before=index)) for index in range(13, 31)] == known and known[0] == start


def test_only_one_writes_to_a_folder(toy: Any, tmp_path: Path) -> None:
    task, stream = toy
    with begun(task, stream, tmp_path) as history:
        for attempt in (lambda: History(history.session.fork(), tmp_path), lambda: unlearn(tmp_path, 3)):
            with pytest.raises(InputError, match="is being written by process"):
                attempt()
        assert rollback(tmp_path, before=3).count == 3  # but it can be read
    assert unlearn(tmp_path, 3).count == 29


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
