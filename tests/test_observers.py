"""Observers of a session see every image that it answers or skips, once, and leave it consistent."""

from __future__ import annotations

import copy
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from small_data import make_folders

import testtime as tt
from testtime.session import Session
from testtime.session import session as sessions
from testtime.session.journal import Tally
from testtime.session.session import Seen
from testtime.types import ImageError, InputError


def toy(**options: Any) -> tuple[Session, torch.Tensor, torch.Tensor]:
    task, stream, labels = tt.toy(classes=6, dim=16, images=30, views=2)
    return Session(task, "dpe", **options), stream, labels


def state_of(session: Session) -> list[bytes]:
    from testtime.methods.base import leaves

    return [leaf.numpy().tobytes() for leaf in leaves(session.state)]


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    """Six photographs, the second of which is not an image."""
    paths = sorted(make_folders(tmp_path / "photos", images=2).glob("*/*"))
    paths[1].write_text("no image")
    return paths


def tiny(**options: Any) -> Session:
    encoder = tt.load_encoder("tiny")
    return Session(tt.build_task(encoder, ["cat", "dog", "fox"]), "tda", encoder=encoder, **options)


@pytest.mark.parametrize("way", ["step", "run"])
def test_observers_receive_every_answer_once_and_in_order(way: str) -> None:
    seen: list[Seen] = []
    session, stream, _ = toy(observers=[seen.append])
    answers = [session.step(x) for x in stream] if way == "step" else [answer for _, answer in session.run(stream)]
    assert [each.index for each in seen] == list(range(30))
    assert [each.prediction for each in seen] == answers
    for each, views in zip(seen, stream, strict=True):
        assert torch.equal(torch.as_tensor(each.source), views) and each.error is None
        assert each.views is not None and torch.allclose(each.views, views, atol=1e-6)
        with pytest.raises(AttributeError):
            each.index = 0  # type: ignore[misc]


def test_an_observer_sees_the_session_after_the_image() -> None:
    session, stream, _ = toy()
    met: list[tuple[int, int, list[bytes]]] = []
    session.observers.append(lambda seen: met.append((session.count, session.position, state_of(session))))
    alone, _, _ = toy()
    for number, views in enumerate(stream[:5], start=1):
        session.step(views)
        alone.step(views)
        assert met[-1] == (number, number, state_of(alone))


def test_skipped_images_are_reported_with_their_error_and_position(photos: list[Path]) -> None:
    seen: list[Seen] = []
    bad: list[Path] = []
    session = tiny(observers=[seen.append])
    found = list(session.run(photos, on_error=lambda source, _: bad.append(source)))
    assert [each.source for each in seen] == photos and [each.index for each in seen] == list(range(6))
    assert bad == [photos[1]] and len(found) == 5
    assert isinstance(seen[1].error, ImageError) and seen[1].prediction is None and seen[1].views is None


def test_an_image_that_raises_is_reported_and_does_not_move_the_position(photos: list[Path]) -> None:
    seen: list[Seen] = []
    session = tiny(observers=[seen.append])
    with pytest.raises(ImageError) as raised:
        session.step(photos[1])
    assert seen[0].error is raised.value and seen[0].index == session.position == 0
    with pytest.raises(ImageError):
        list(session.run(photos))
    assert [each.source for each in seen[1:]] == photos[:2] and session.position == session.count == 1


def test_an_observer_that_raises_at_a_bad_image_leaves_the_session_consistent(photos: list[Path]) -> None:
    session = tiny(observers=[lambda seen: 1 / (seen.prediction is not None)])
    with pytest.raises(ZeroDivisionError):
        list(session.run(photos, on_error=lambda *_: None))
    assert (session.count, session.position) == (1, 2)
    assert len(list(session.run(photos[2:]))) == 4


def test_predicting_scanning_and_warming_up_notify_no_observer() -> None:
    seen: list[Seen] = []
    session, stream, _ = toy(observers=[seen.append])
    session.warm_up(2)
    session.predict(stream[0])
    session.scan(stream[:4])
    assert not seen
    session.step(stream[4])
    assert [each.index for each in seen] == [4]


def test_an_observer_that_raises_leaves_the_session_consistent_and_the_others_notified() -> None:
    def fails(seen: Seen) -> None:
        if seen.index == 2:
            raise OSError("no space")

    before, after = [], []
    session, stream, _ = toy(observers=[before.append, fails, after.append])
    alone, _, _ = toy()
    session.step(stream[0])
    session.step(stream[1])
    with pytest.raises(OSError, match="no space"):
        session.step(stream[2])
    assert session.count == session.position == len(before) == len(after) == 3
    for views in stream[:3]:
        alone.step(views)
    assert state_of(session) == state_of(alone)
    assert torch.equal(session.step(stream[3]).logits, alone.step(stream[3]).logits)


def test_a_run_yields_the_answer_at_which_an_observer_raised() -> None:
    session, stream, _ = toy()
    session.observers.append(lambda seen: 1 / (2 - seen.index))
    answers = []
    with pytest.raises(ZeroDivisionError):
        for _, answer in session.run(stream):
            answers.append(answer)
    assert len(answers) == session.count == 3


def test_an_interrupt_waits_for_the_observers() -> None:
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    told = []

    def press(seen: Seen) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        told.append(seen.index)

    session, stream, _ = toy(observers=[press, lambda seen: told.append(seen.index)])
    try:
        with pytest.raises(KeyboardInterrupt):
            session.step(stream[0])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, usual)
    assert told == [0, 0] and session.count == 1


@pytest.mark.parametrize("twin", [Session.fork, copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_has_no_observers(twin: Any) -> None:
    seen: list[Seen] = []
    session, stream, _ = toy(observers=[lambda each: seen.append(each)])
    other = twin(session)
    other.step(stream[0])
    assert not seen and other.observers == [] and len(session.observers) == 1


def test_observers_are_not_saved(tmp_path: Path) -> None:
    (watched, stream, _), (alone, _, _) = toy(observers=[lambda seen: None]), toy()
    for session in (watched, alone):
        session.step(stream[0])
    files = [each.save(tmp_path / name) for each, name in ((watched, "a.safetensors"), (alone, "b.safetensors"))]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert Session.load(files[0]).observers == []


def test_without_observers_no_event_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "Seen", None)
    session, stream, _ = toy()
    session.step(stream[0])
    session.observers.append(print)
    with pytest.raises(TypeError):
        session.step(stream[1])


def test_a_tally_counts_answered_skipped_and_correct_images(photos: list[Path]) -> None:
    session = tiny()
    session.position = 4  # as in a resumed run
    labels = [0, None, 1, None, 2, 2]
    tally = Tally(labels, start=4)
    session.observers.append(tally)
    answers = dict(session.run(photos, on_error=lambda *_: None))
    known = [(answers[path], label) for path, label in zip(photos, labels, strict=True) if label is not None]
    assert tally.summary() == {
        "images": 5,
        "skipped": 1,
        "learned": sum(answer.learned for answer in answers.values()),
        "changed": sum(answer.index != answer.zero_shot_index for answer in answers.values()),
        "labelled": 4,
        "unlabelled": 1,
        "accuracy": sum(answer.index == label for answer, label in known) / 4,
        "zero_shot_accuracy": sum(answer.zero_shot_index == label for answer, label in known) / 4,
    }
    assert Tally([]).summary()["accuracy"] is None


def test_observers_are_not_called_for_a_refused_answer() -> None:
    seen: list[Seen] = []
    session, stream, _ = toy(alpha=1e300, observers=[seen.append])
    with pytest.raises(InputError, match="NaN or infinity for image 0"):
        session.step(stream[0])
    assert not seen and session.count == 0
