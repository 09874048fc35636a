"""A run written down as it goes gives the page that a second pass over its features would give."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
from small_data import make_folders

import testtime as tt
from testtime.report.data import StreamReport, UnlabelledReport
from testtime.report.gather import stream_report
from testtime.report.page import html
from testtime.report.record import Record
from testtime.types import InputError

METHODS = ("dpe", "tda", "mcp", "dota", "zeroshot")


def recorded(method: str, images: int = 60, labelled: int = 60, views: int = 1, resumed: int = 0) -> Record:
    task, stream, labels = tt.toy(images=images, views=views)
    session = tt.Session(task, method, views=views)
    for image in stream[:resumed]:
        session.step(image)
    known = [label if number < labelled else None for number, label in enumerate(labels.tolist())]
    record = Record(session, known[resumed:])
    session.observers.append(record)
    for views_of_one in stream[resumed:]:
        session.step(views_of_one)
    return record


@pytest.mark.parametrize("method", METHODS)
def test_the_report_is_that_of_a_second_pass(method) -> None:
    task, stream, labels = tt.toy(images=60, views=1)
    ours = recorded(method).report("A stream", place=False)
    theirs = stream_report(task, stream, labels, [method], place=False)
    assert isinstance(ours, StreamReport) and ours.subtitle == theirs.subtitle == "60 images, 8 classes, 1 view each"
    assert [curve.name for curve in ours.curves] == [curve.name for curve in theirs.curves]
    assert [curve.correct for curve in ours.curves] == [curve.correct for curve in theirs.curves]
    for mine, other in zip(ours.answers, theirs.answers, strict=True):
        assert mine.predictions == other.predictions and mine.settings == other.settings
        assert mine.confidences == pytest.approx(other.confidences, abs=1e-5)
    assert (ours.queues is None) == (theirs.queues is None)
    if ours.queues and theirs.queues:
        assert [s.images for s in ours.queues.snapshots] == [12, 60]
        # of one view, the feature is the image's own, so both ways must find the same images
        assert [set(s.entries) for s in ours.queues.snapshots] == [set(s.entries) for s in theirs.queues.snapshots]
        assert "the image it came from" in ours.queues.text
    html([ours], {}, "A page")


def test_without_a_label_for_every_image_it_shows_what_changed() -> None:
    task, stream, _ = tt.toy(images=60, views=1)
    ours = recorded("dpe", labelled=59).report("A stream", place=False)
    theirs = stream_report(task, stream, None, ["dpe"], place=False)
    assert isinstance(ours, UnlabelledReport)
    assert [each.predictions for each in ours.answers] == [each.predictions for each in theirs.answers]


def test_features_from_before_the_run_are_left_out_with_a_note() -> None:
    report = recorded("dpe", resumed=30).report("A stream", place=False)
    assert report.queues is not None and "features from before this run are omitted" in report.queues.text
    held = [entry.image for entry in report.queues.snapshots[-1].entries]
    assert held and max(held) < 30 and "30 images" in report.subtitle
    html([report], {}, "A page")


def test_images_of_several_views_are_traced_to_the_one_that_brought_them() -> None:
    record = recorded("dpe", views=6)
    report = record.report("A stream", place=False)
    bank = record.session.state.queue
    assert report.queues is not None and len(report.queues.snapshots[-1].entries) == int(bank.cost.isfinite().sum())
    # a queue keeps an image in the class that it was taken for by the text, whatever the method says in the end
    assert len({entry.image for entry in report.queues.snapshots[-1].entries}) == int(bank.cost.isfinite().sum())


def test_a_run_without_images_has_nothing_to_report() -> None:
    task, _, _ = tt.toy(images=2)
    with pytest.raises(InputError, match="nothing to report"):
        Record(tt.Session(task, "dpe"), []).report("A stream")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_folders(tmp_path / "photos", images=4)


def test_a_run_writes_its_report(cli, photos, tmp_path) -> None:
    page = tmp_path / "pages" / "run.html"
    outcome = cli("run", photos, "-e", "tiny", "--shuffle", "--seed", 3, "--out", tmp_path / "a.csv", "--report", page)
    assert outcome.code == 0 and "page in" in outcome.err
    text = page.read_text()
    assert "Accuracy so far" in text and "shuffled, seed 3" in text and "data:image/jpeg;base64," in text
    assert "reading and encoding included" in text and "https://" not in text
    rows = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    wrong = [row for row in rows if row["label"] != Path(row["image"]).parent.name]
    shown = text[text.index("<h3>Wrong answers") : text.index("<h3>Calibration")]
    assert f"dpe is wrong on {len(wrong)} of {len(rows)} images" in shown and wrong
    assert re.findall(r'title="([^"]+)"', shown) == [
        Path(row["image"]).name for row in sorted(wrong, key=lambda row: -float(row["confidence"]))
    ]


def test_an_unlabelled_run_and_a_resumed_run_write_their_reports(cli, photos, tmp_path) -> None:
    page, state = tmp_path / "run.html", tmp_path / "s.safetensors"
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, path in enumerate(sorted(photos.glob("*/*.png"))):
        path.rename(flat / f"{number:02d}.png")
    (flat / "03.png").write_bytes(b"no image")
    common = ["--classes", "cat,dog,fox", "-e", "tiny", "--out", tmp_path / "a.csv", "--save", state]
    assert cli("run", flat, *common, "--limit", 5, "--report", page).code == 0
    assert "unknown which of the two is correct" in page.read_text() or "gives the same answer" in page.read_text()
    assert "4 images, 3 classes" in page.read_text()
    outcome = cli("run", flat, *common, "--resume", state, "--report", page)
    assert outcome.code == 0 and "after 4 images of an earlier run" in page.read_text()


def test_a_replay_writes_its_report(cli, tmp_path) -> None:
    task, stream, labels = tt.toy(images=40, views=1)
    for name, given in (("labelled", labels), ("bare", None)):
        store = tt.save_features(tmp_path / f"{name}.safetensors", stream, task.text, labels=given)
        page = tmp_path / f"{name}.html"
        outcome = cli("replay", store, "--method", "tda", "--limit", 30, "--report", page)
        assert outcome.code == 0 and str(page) in outcome.err
        assert "30 images, 8 classes" in page.read_text() and "tda" in page.read_text()
        assert ("Accuracy so far" in page.read_text()) == (given is not None)
    outcome = cli("replay", store, "--method", "dmn", "--oracle", "--report", page)
    assert outcome.code == 2 and "leave out one" in outcome.err
