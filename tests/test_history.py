"""A history goes back to any of its images, and unlearns one, to the last bit."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fuzz_states
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moments import START, Clock, begun, feed, moments, saved, spoilt

import testtime as tt
from testtime import Session, files
from testtime.guard import Guard
from testtime.session import history as histories
from testtime.session import history_files
from testtime.session.history import History, rollback, unlearn
from testtime.types import InputError, StateError

METHODS = sorted(set(fuzz_states.METHODS.ours) - set(fuzz_states.TOWERED))


@pytest.fixture(scope="module", autouse=True)
def unsynced() -> Iterator[None]:
    """Nothing waits for the disk, which would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def toy() -> tuple[tt.Task, torch.Tensor]:
    return tt.toy(classes=4, dim=8, images=30, views=2)[:2]


# Exactness


@settings(max_examples=40)
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
    guard=st.sampled_from([None, Guard(), Guard(drift="restart", budget=1, period=4, slots=1, recent=3)]),
)
def test_going_back_and_unlearning_are_exact(
    method: str, seed: int, images: int, views: int, every: int, bad: set[int], chosen: int, reference: bool,
    double: bool, parts: int, guard: Guard | None,
) -> None:  # fmt: skip
    dtype = torch.float64 if double else torch.float32
    task, stream, _ = tt.toy(classes=4, dim=7, images=images + 3, views=views, seed=seed, dtype=dtype)
    given = spoilt(stream, bad)
    chosen %= images
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(histories, "PART_IMAGES", parts)
        session = Session(task, method, reference=reference, guard=guard)
        with History(session, place, every=every, clock=Clock()) as history:
            known = moments(session, given[:images])
            times = [entry.time for entry in history.images()]
            for index in range(images + 1):
                assert saved(history.rollback(before=index)) == known[index]
            assert saved(history.rollback(before_time=times[chosen])) == known[chosen]
            assert saved(session) == known[-1]
            if chosen in bad:
                with pytest.raises(InputError, match=f"Image {chosen} could not be read"):
                    history.unlearn(chosen)
                assert saved(session) == known[-1]
                return
            without = Session(task, method, reference=reference, guard=guard)
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", METHODS)
def test_on_a_gpu_they_are_the_same_up_to_rounding(method: str, tmp_path: Path) -> None:
    task, stream, _ = tt.toy(classes=4, dim=16, images=30, views=2, dtype=torch.float64)
    session, without = (Session(task.to("cuda"), method) for _ in range(2))
    with History(session, tmp_path, every=7) as history:
        for views in stream:
            session.step(views)
        earlier = history.rollback(before=20)
        history.unlearn(11)
    for views in spoilt(stream, {11}):
        feed(without, views)
    assert histories._difference(session, without) < 1e-9 and earlier.state is not None
    assert history.rollback(before=20).count == 19 and session.task.text.is_cuda


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


def test_late_labels_are_not_replayed_so_the_history_starts_again(tmp_path: Path) -> None:
    task, stream, _ = tt.toy(classes=20, views=1, images=80)
    session = Session(replace(task, scale=10.0), "tda", guard=True)
    with History(session, tmp_path / "h", every=10) as history:
        decisions = [session.step(views).decision for views in stream[:60]]
        disputed = next(each for each in decisions if each is not None and each.disputed)
        assert session.label(disputed.index, disputed.frozen)
        with pytest.raises(StateError, match="late labels"):
            history.unlearn(0)
        session.step(stream[60])
        with pytest.raises(StateError, match="older than the history"):
            history.unlearn(0)
        for views in stream[61:]:
            session.step(views)
        expected = session.fork()
        history.unlearn(70)
        assert session.count == expected.count - 1 and session.labels_used == 1
