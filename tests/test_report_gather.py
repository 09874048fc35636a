"""From features to a report: what is run, matched and stored."""

from __future__ import annotations

import builtins

import pytest
import torch

import testtime as tt
from testtime import metrics, registry
from testtime.report import queues as queue_maps
from testtime.report.conditions import conditions
from testtime.report.data import Grid, Series
from testtime.report.gather import stream_report, sweep
from testtime.report.page import html
from testtime.session.session import Session
from testtime.types import InputError, MissingPart


@pytest.fixture(scope="module")
def toy():
    return tt.toy(images=120, views=1)


def test_answers_are_those_of_a_session_over_the_same_order(toy):
    task, stream, labels = toy
    order = torch.randperm(120, generator=torch.Generator().manual_seed(3))
    report = stream_report(task, stream, labels, ["tda", "dpe"], order=order.tolist(), snapshots=[50], place=False)
    logits = Session(task, "dpe").scan(stream[order])
    last = report.answers[-1]
    assert [answers.name for answers in report.answers] == ["zeroshot", "tda", "dpe"]
    assert last.predictions == logits.argmax(1).tolist()
    assert last.confidences == pytest.approx(logits.softmax(1).max(1).values.tolist(), abs=1e-6)
    assert report.labels == labels[order].tolist()
    assert report.curves[-1].accuracy == pytest.approx(metrics.accuracy(logits.argmax(1), labels[order]))
    assert last.brier == pytest.approx(metrics.brier(logits.softmax(1), labels[order]), abs=1e-6)
    assert last.settings["alpha"] == 6.0


def test_a_store_and_a_tensor_give_the_same_answers(toy, tmp_path):
    task, stream, labels = toy
    path = tt.save_features(tmp_path / "toy.safetensors", stream, task.text, labels=labels)
    store = tt.Features(path)
    one = stream_report(store.task(), store, store.labels, ["dpe"], place=False)
    two = stream_report(task, stream, labels, ["dpe"], place=False)
    assert one.answers[1].predictions == two.answers[1].predictions


def test_queue_entries_are_traced_to_their_images(toy):
    task, stream, labels = toy
    report = stream_report(task, stream, None, ["dpe"], snapshots=[40, 120], place=False)
    early, late = report.queues.snapshots
    assert (early.images, late.images) == (40, 120) and max(e.image for e in early.entries) < 40
    session = Session(task, "dpe")
    session.scan(stream)
    bank = session.state.queue
    assert len(late.entries) == int(bank.cost.isfinite().sum())
    held = {(e.label, e.image) for e in late.entries}
    for label in range(task.classes):
        for key in bank.keys[label][bank.cost[label].isfinite()]:
            image = int((stream[:, 0] @ key).argmax())
            assert (label, image) in held and torch.allclose(stream[image, 0], key, atol=1e-6)
    assert "equals that of exactly one image" in report.queues.text


def test_with_several_views_the_page_says_that_images_are_the_nearest():
    task, stream, _ = tt.toy(images=60, views=16)
    report = stream_report(task, stream, None, ["dpe"], place=False)
    assert "nearest by cosine" in report.queues.text


def test_features_taken_for_the_same_image_keep_places_of_their_own():
    pytest.importorskip("sklearn")
    task, stream, _ = tt.toy(images=40, views=16)
    bank = Session(task, "dpe").state.queue
    keys = torch.randn(bank.keys.shape, generator=torch.Generator().manual_seed(0))
    full = type(bank)(keys, torch.zeros(bank.cost.shape))
    found = queue_maps.queue_map("dpe", [queue_maps.Moment(1, full)], stream[:1, 0], [0])
    entries = found.snapshots[0].entries
    assert {entry.image for entry in entries} == {0}
    assert len({(entry.x, entry.y) for entry in entries}) == len(entries) == bank.cost.numel()


def test_the_map_is_one_for_all_moments_and_the_same_every_time(toy):
    pytest.importorskip("sklearn")
    task, stream, labels = toy
    first, second = (stream_report(task, stream, labels, ["dpe"], snapshots=[60, 120]).queues for _ in range(2))
    assert first == second and first.placed
    positions = [{e.image: (e.x, e.y) for e in snapshot.entries} for snapshot in first.snapshots]
    both = set(positions[0]) & set(positions[1])
    assert both and all(positions[0][image] == positions[1][image] for image in both)


def test_neighbours_by_cosine_are_neighbours_on_the_map():
    pytest.importorskip("sklearn")
    noise = torch.Generator().manual_seed(0)
    centres = torch.eye(3, 16).repeat_interleave(10, 0)
    positions = torch.tensor(queue_maps.tsne(centres + 0.02 * torch.randn(30, 16, generator=noise), seed=0))
    nearest = (torch.cdist(positions, positions) + 1e9 * torch.eye(30)).argmin(1)
    assert torch.equal(nearest // 10, torch.arange(30) // 10)


def test_many_classes_are_cut_to_those_most_often_answered(toy, monkeypatch):
    task, stream, labels = toy
    monkeypatch.setattr(queue_maps, "PLACED", 7)
    report = stream_report(task, stream, None, ["dpe"], snapshots=[120], place=False)
    shown = {e.label for e in report.queues.snapshots[0].entries}
    answers = torch.tensor(report.answers[-1].predictions).bincount(minlength=task.classes)
    assert 0 < len(report.queues.snapshots[0].entries) <= 7
    assert min(answers[c] for c in shown) >= max(answers[c] for c in range(task.classes) if c not in shown)
    assert "more are omitted" in report.queues.text


def test_a_method_without_queues_has_no_map(toy):
    task, stream, labels = toy
    report = stream_report(task, stream, labels, ["zeroshot"])
    assert report.queues is None and len(report.curves) == 1
    assert "hold" not in html([report], {}, "t")


def test_the_same_method_twice_gets_two_names(toy):
    task, stream, _ = toy
    methods = [registry.make_method("dpe", None, {"alpha": alpha}) for alpha in (1, 6)]
    report = stream_report(task, stream[:20], torch.zeros(20, dtype=torch.long), methods, place=False)
    assert [curve.name for curve in report.curves] == ["zeroshot", "dpe", "dpe 2"]
    assert [curve.note for curve in report.curves] == ["no settings", "alpha=1.0", "defaults"]


def test_a_sweep_gives_the_accuracy_of_each_setting(toy):
    task, stream, labels = toy
    grid = sweep(task, stream, labels, "dpe", {"alpha": [0, 6], "beta": [1, 3, 5]}, others={"steps": 0})
    assert isinstance(grid, Grid) and (grid.x, grid.y) == ("alpha", "beta")
    answers = Session(task, "dpe", alpha=6, beta=3, steps=0).scan(stream).argmax(1)
    assert grid.values[1][1] == pytest.approx(metrics.accuracy(answers, labels))
    line = sweep(task, stream, labels, "dpe", {"alpha": [0, 6]}, others={"steps": 0, "beta": 3})
    assert isinstance(line, Series) and line.lines["dpe"] == pytest.approx(grid.values[1])
    with pytest.raises(InputError, match="one setting or two"):
        sweep(task, stream, labels, "dpe", {})


def test_thumbnails_follow_the_order_of_the_stream(toy, tmp_path):
    from PIL import Image

    task, stream, _ = toy
    paths = []
    for number in range(6):
        paths.append(tmp_path / f"{number}.png")
        Image.new("RGB", (60, 60), (40 * number, 0, 0)).save(paths[-1])
    order = [5, 3, 1]
    report = stream_report(task, stream[:6], None, ["dpe"], order=order, images=paths, place=False)
    assert [name.rsplit("/")[-1] for name in report.names] == ["5.png", "3.png", "1.png"]
    assert set(report.thumbnails) == {0, 1, 2} and len(set(report.thumbnails.values())) == 3
    assert "background-image" in html([report], {}, "t")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"images": ["a.jpg"]}, "1 images for features of 120"),
        ({"snapshots": [121]}, "after 121 images"),
        ({"order": [120]}, "0 to 119"),
        ({"order": []}, "at least one"),
    ],
)
def test_what_does_not_fit_the_stream_is_refused_before_the_run(toy, options, words):
    task, stream, labels = toy
    with pytest.raises(InputError, match=words):
        stream_report(task, stream, labels, ["dpe"], **options)
    with pytest.raises(InputError, match="3 labels"):
        stream_report(task, stream, labels[:3], ["dpe"])


def test_without_scikit_learn_the_map_says_how_to_come_by_it(toy, monkeypatch):
    real = builtins.__import__

    def absent(name, *rest):
        if name.startswith("sklearn"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    task, stream, labels = toy
    with pytest.raises(MissingPart, match=r"testtime\[report\].*--no-map"):
        stream_report(task, stream, labels, ["dpe"])


def test_conditions_end_with_the_command(toy):
    found = conditions(toy[0], "testtime report x", Dataset="Pets", Labels="")
    assert list(found) == ["Encoder", "Dataset", "Versions", "Machine", "Command"]
    assert torch.__version__ in found["Versions"] and "threads" in found["Machine"]
