from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from testtime.cli import demo
from testtime.cli.app import main
from testtime.cli.demo import IMAGES, photographs
from testtime.encoding.store import Features
from testtime.session.packaged import demo_stream, largest
from testtime.types import InputError


def test_the_packaged_stream_is_the_test_split() -> None:
    task, views, labels, images = demo_stream([f"{row}.jpg" for row in range(IMAGES)])
    assert len(set(images)) == IMAGES and images[0] != "0.jpg"
    assert views.shape == (2465, 1, 1664) and task.classes == 100
    assert torch.allclose(views.norm(dim=-1), torch.ones(()))
    assert labels.bincount(minlength=100).min() > 0
    assert not torch.equal(labels, labels.sort().values)  # shuffled


def test_the_largest_classes_keep_their_names_and_labels() -> None:
    whole = demo_stream([f"{row}.jpg" for row in range(IMAGES)])
    task, views, labels, images = whole
    part, part_views, part_labels, part_images = largest(whole, 20)
    where = images.index(part_images[7])
    assert torch.equal(views[where], part_views[7])
    assert task.classnames[labels[where]] == part.classnames[part_labels[7]]
    assert part.classes == 20 and len(part_views) == 1177
    kept = {part.classnames[i] for i in part_labels.tolist()}
    assert kept == set(part.classnames) <= set(task.classnames)
    counts = {name: int((labels == i).sum()) for i, name in enumerate(task.classnames)}
    assert min(counts[name] for name in kept) >= max(counts[n] for n in counts if n not in kept)


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Runs the demo on its twenty largest classes; its summary and its page."""
    real = demo.demo_stream
    monkeypatch.setattr(demo, "demo_stream", lambda images: largest(real(images), 20))

    def go(*words: object) -> tuple[dict, str]:
        threads = torch.get_num_threads()
        try:
            main(["demo", "--out", str(tmp_path), "--json", *map(str, words)])
        except SystemExit as stop:
            assert not stop.code
        finally:
            torch.set_num_threads(threads)
        return json.loads(capsys.readouterr().out), (tmp_path / "report.html").read_text()

    return go


def test_the_demo_prints_gains_and_writes_a_page(run, tmp_path) -> None:
    summary, page = run()
    small = summary["results"]["The twenty most frequent classes"]
    assert small["n"] == 1177
    assert small["dpe"]["accuracy"] > small["tda"]["accuracy"] > small["zeroshot"]["accuracy"]
    assert page.startswith("<!doctype html>") and "Caltech101" in page and "dpe" in page
    assert "Wrong answers" not in page and "--images CALTECH101" in page  # and how to see them
    assert (tmp_path / "accuracy.svg").read_text().startswith("<svg")


class Picture:
    """A photograph of one colour, named by its row."""

    def __init__(self, row: int) -> None:
        self.row = row

    def __str__(self) -> str:
        return f"{self.row:04d}.png"

    def read_bytes(self) -> bytes:
        data = io.BytesIO()
        Image.new("RGB", (40, 30), (self.row % 256, self.row // 256, 90)).save(data, "PNG")
        return data.getvalue()


def test_photographs_stand_beside_the_answers(run, monkeypatch) -> None:
    monkeypatch.setattr(demo, "photographs", lambda folder: [Picture(row) for row in range(IMAGES)])
    _, page = run("--images", "caltech-101")
    wrong = page[page.index("<h3>Wrong answers") : page.index("<h3>Calibration")]
    rows = [int(name.removesuffix(".png")) for name in re.findall(r'title="([^"]+)"', wrong)]
    assert len(rows) == 24 and "thumb none" not in wrong
    assert "CC BY 4.0" in page  # the credit that the licence asks for
    # the label in a caption is that of the photograph beside it
    store = Features(Path(demo.__file__).parents[1] / "data" / "caltech101.safetensors")
    labels = re.findall(r"label: ([^<]+)</em>", wrong)
    assert labels == [store.classnames[store.labels[row]] for row in rows]


def test_a_folder_that_is_not_caltech101_is_refused(tmp_path) -> None:
    (tmp_path / "one.png").write_bytes(Picture(1).read_bytes())
    with pytest.raises(InputError, match=r"1 images, but Caltech101's test split has 2,465.*101_ObjectCategories"):
        photographs(str(tmp_path))


def test_photographs_come_from_a_copy_of_caltech101(data) -> None:
    found = photographs(str(data / "caltech-101"))
    store = Features(Path(demo.__file__).parents[1] / "data" / "caltech101.safetensors")
    folders = {store.classnames[label]: set() for label in store.labels.tolist()}
    for path, label in zip(found, store.labels.tolist(), strict=True):
        folders[store.classnames[label]].add(Path(str(path)).parent.name)
    assert all(len(names) == 1 for names in folders.values()) and folders["bonsai"] == {"bonsai"}
