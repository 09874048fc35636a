"""What a prompt and a notebook show of each object: one short line, and escaped HTML without scripts."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_data import make_folders

import testtime as tt
from testtime import display, registry
from testtime.datasets import open_dataset
from testtime.datasets.dataset import Dataset
from testtime.encoding.encoders import Deferred
from testtime.methods.dpe import DPE
from testtime.report.data import Table, TablesReport
from testtime.report.record import Record
from testtime.session import display as session_display
from testtime.types import Task

HOSTILE = "<script>alert(1)</script>\nfox" + "x" * 200


def toy_session(**options) -> tuple[tt.Session, torch.Tensor, torch.Tensor]:
    task, stream, labels = tt.toy(classes=4, dim=16, images=20, views=2)
    return tt.Session(task, "dpe", **options), stream, labels


def hostile_task() -> Task:
    return Task(torch.eye(4), tuple(f"{number}{HOSTILE}" for number in range(4)), encoder=HOSTILE)


class Tags(HTMLParser):
    """The elements of a fragment, which must all be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in ("img", "progress"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("img", "progress"):
            assert self.open.pop() == tag


def test_every_object_is_one_short_line(tmp_path: Path) -> None:
    session, stream, labels = toy_session()
    record = Record(session, labels.tolist())
    session.observers.append(record)
    predictions = [session.step(views) for views in stream]
    features = tt.save_features(tmp_path / f"{'long' * 40}.safetensors", stream, session.task.text, labels=labels)
    deferred, photos = Deferred("tiny"), make_folders(tmp_path / "photos")
    hostile = tt.Session(hostile_task())
    shown = {
        "Session(dpe, 4 classes, features, 20 images seen)": session,
        "Task(4 classes: class 0, class 1, class 2, class 3; dim 16)": session.task,
        "Prediction(class": predictions[-1],
        "OpenClip(tiny, dim 32, cpu, float32)": tt.load_encoder("tiny"),
        "Deferred(tiny, not loaded, cpu)": deferred,
        "Features(longlong": tt.Features(features),
        "Dataset(photos, 12 images, labelled, 3 classes: cat, dog, fox)": open_dataset(photos),
        "Dataset(<script>": Dataset(HOSTILE, [Path(HOSTILE)] * 1000, None, [HOSTILE] * 1000),
        "StreamReport(A title: 20 images": record.report("A title", place=False),
        "Session(dpe, 4 classes, <script>": hostile,
        "Task(4 classes: 0<script>": hostile.task,
        "Prediction(2<script>": hostile.step(torch.eye(4)[2]),
    }
    for start, thing in shown.items():
        assert repr(thing).startswith(start)
        assert len(repr(thing)) < 120 and "\n" not in repr(thing), thing
    assert not deferred.is_loaded
    assert deferred.dim == 32 and repr(deferred) == "Deferred(tiny, dim 32, cpu)"
    assert "zero-shot" in repr(predictions[0]) and "tensor" not in repr(predictions[0])


def test_a_method_shows_what_differs_from_its_nearest_preset() -> None:
    assert repr(DPE()) == repr(DPE.released()) == "DPE()"
    assert repr(DPE(alpha=4.0)) == "DPE(alpha=4.0)"
    assert repr(DPE.paper()) == "DPE.paper()"
    assert repr(DPE.paper(beta=2.0)) == "DPE.paper(beta=2.0)"
    assert eval(repr(DPE.paper(beta=2.0))) == DPE.paper(beta=2.0)
    for name in registry.METHODS.ours:
        assert len(repr(registry.make_method(name))) < 120


def test_looking_for_html_does_not_load_a_deferred_encoder() -> None:
    encoder = Deferred("tiny")
    assert not hasattr(encoder, "_repr_html_") and not hasattr(encoder, "__deepcopy__")
    assert not encoder.is_loaded


def test_a_prediction_is_drawn_with_its_most_probable_classes() -> None:
    session, stream, _ = toy_session()
    prediction = session.step(stream[0])
    top = prediction.top(3)
    assert top[0] == (prediction.label, pytest.approx(prediction.confidence))
    assert [share for _, share in top] == sorted((share for _, share in top), reverse=True)
    assert sum(share for _, share in prediction.top(100)) == pytest.approx(1)
    page = prediction._repr_html_()
    assert page.count("px;height:10px") == 4  # all classes: there are fewer than five
    assert f"zero-shot: {prediction.zero_shot} {prediction.zero_shot_confidence:.1%}" in page
    assert Tags(page).seen == {"div", "b", "span"}


def test_class_names_are_escaped() -> None:
    session = tt.Session(hostile_task())
    page = session.step(torch.eye(4)[1])._repr_html_() + session._repr_html_()
    assert "script" not in Tags(page).seen and "&lt;script&gt;" in page


def test_a_session_shows_what_it_has_learned(tmp_path: Path) -> None:
    session, stream, _ = toy_session()
    assert "nothing yet" in session._repr_html_() and "DPE()" in session._repr_html_()
    session.scan(stream)
    kept = int(session.state.queue.cost.isfinite().sum())
    for each in (session, tt.Session.load(session.save(tmp_path / "s.safetensors"))):
        page = each._repr_html_()
        assert f"{kept} features kept in queues" in page and ">20<" in page and "class 3" in page
        assert Tags(page).seen == {"table", "caption", "b", "tbody", "tr", "th", "td"}
    assert "nothing yet" in tt.Session(session.task, "zeroshot")._repr_html_()


def test_reports_are_drawn_in_a_frame_of_their_own() -> None:
    report = TablesReport(HOSTILE, "two cells", [Table("t", ["a", "b"], [["1", '"><script>']])], {})
    assert repr(report).startswith("TablesReport(<script>") and len(repr(report)) < 120
    page = report._repr_html_()
    assert page.startswith('<iframe sandbox="allow-scripts"') and Tags(page).seen == {"iframe"}
    inside = re.search('srcdoc="([^"]*)"', page)
    assert inside and "&lt;!doctype html&gt;" in inside[1] and page.endswith('"></iframe>')


class Notebook:
    """Stands in for IPython in a notebook, and collects what is displayed."""

    def __init__(self, kernel: object = True) -> None:
        self.pages: list[str] = []
        self.kernel = kernel

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Notebook:
        shown = SimpleNamespace(HTML=str, display=lambda page, display_id: self.pages.append(page) or self)
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: self, display=shown))
        monkeypatch.setitem(sys.modules, "IPython.display", shown)
        monkeypatch.setattr(session_display, "REFRESH", 0)
        return self

    def update(self, page: str) -> None:
        self.pages.append(page)


def test_a_run_draws_a_bar_in_a_notebook_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = Notebook().install(monkeypatch)
    session, stream, _ = toy_session()
    answers = list(session.run(list(stream[:3])))
    assert len(answers) == 3 and answers[0][0] is not None
    assert "3 of 3 images" in notebook.pages[-1] and 'value="3" max="3"' in notebook.pages[-1]
    assert "1 of 3 images" in " ".join(notebook.pages)
    notebook.pages.clear()
    session.step(stream[3])
    list(session.run(stream[4:6], progress=False))
    assert not notebook.pages
    list(session.run(iter(stream[6:8])))  # no length: a count
    assert "2 images" in notebook.pages[-1]


def test_images_that_are_skipped_advance_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = Notebook().install(monkeypatch)
    session, stream, _ = toy_session()
    list(session.run([stream[0], stream[1] * 0, stream[2] * 0], on_error=lambda *_: None))
    assert "3 of 3 images" in notebook.pages[-1] and session.count == 1


def test_a_run_that_is_closed_early_ends_its_bar_and_keeps_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = Notebook().install(monkeypatch)
    session, stream, _ = toy_session()
    answers = session.run(list(stream))
    next(answers), next(answers)
    answers.close()
    assert "2 of 20 images" in notebook.pages[-1] and session.count == 2


def test_outside_a_notebook_there_is_a_bar_only_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session, stream, _ = toy_session()
    assert not display.in_notebook()
    list(session.run(list(stream[:2])))
    assert capsys.readouterr() == ("", "")
    list(session.run(list(stream[2:5]), progress=True))
    captured = capsys.readouterr()
    assert captured.out == "" and "3/3 images" in captured.err
    Notebook(kernel=None).install(monkeypatch)  # IPython in a terminal
    assert not display.in_notebook()
