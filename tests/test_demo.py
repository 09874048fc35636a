from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path

import pytest
import torch

from testtime.cli import demo
from testtime.cli.app import main
from testtime.cli.demo import IMAGES, demo_stream, largest, photographs
from testtime.encoding.store import Features
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


def test_the_demo_prints_gains_and_writes_a_page(run, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(demo, "THUMBNAILS", str(tmp_path / "none.tar"))
    summary, page = run()
    small = summary["results"]["The twenty most frequent classes"]
    assert small["n"] == 1177
    assert small["dpe"]["accuracy"] > small["tda"]["accuracy"] > small["zeroshot"]["accuracy"]
    assert page.startswith("<!doctype html>") and "Caltech101" in page and "dpe" in page
    assert "Wrong answers" not in page and "--images CALTECH101" in page  # and how to see them
    assert (tmp_path / "accuracy.svg").read_text().startswith("<svg")


def picture(path: Path, colour: int) -> Path:
    from PIL import Image

    Image.new("RGB", (40, 30), (colour % 256, colour // 256, 90)).save(path)
    return path


def test_packaged_photographs_stand_beside_the_answers(run, tmp_path, monkeypatch) -> None:
    """Every fifth photograph is in the archive; only those are shown, with the credit that their licence asks for."""
    with tarfile.open(tmp_path / "some.tar", "w") as archive:
        for row in range(0, IMAGES, 5):
            archive.add(picture(tmp_path / "one.png", row), f"{row:04d}.png")
    monkeypatch.setattr(demo, "THUMBNAILS", str(tmp_path / "some.tar"))
    found = photographs(None, tmp_path / "some.tar")
    assert len(found) == IMAGES and [str(image).rsplit("/")[-1] for image in found[5:11]] == [
        "0005.png",
        *[""] * 4,
        "0010.png",
    ]
    _, page = run()
    wrong = page[page.index("<h3>Wrong answers") : page.index("<h3>Calibration")]
    rows = [int(name.removesuffix(".png")) for name in re.findall(r'title="([^"]+)"', wrong)]
    assert len(rows) == 24 and all(row % 5 == 0 for row in rows) and "thumb none" not in wrong
    assert "CC BY 4.0" in page and "Only some of the photographs" in page
    # the label in a caption is that of the photograph beside it
    store = Features(Path(demo.__file__).parents[1] / "data" / "caltech101.safetensors")
    labels = re.findall(r"label: ([^<]+)</em>", wrong)
    assert labels == [store.classnames[store.labels[row]] for row in rows]


def test_a_folder_that_is_not_caltech101_is_refused(tmp_path) -> None:
    picture(tmp_path / "one.png", 1)
    with pytest.raises(InputError, match=r"1 images, but Caltech101's test split has 2,465.*101_ObjectCategories"):
        photographs(str(tmp_path), tmp_path / "none.tar")


def test_photographs_come_from_a_copy_of_caltech101(data) -> None:
    found = photographs(str(data / "caltech-101"), data / "none.tar")
    store = Features(Path(demo.__file__).parents[1] / "data" / "caltech101.safetensors")
    folders = {store.classnames[label]: set() for label in store.labels.tolist()}
    for path, label in zip(found, store.labels.tolist(), strict=True):
        folders[store.classnames[label]].add(Path(str(path)).parent.name)
    assert all(len(names) == 1 for names in folders.values()) and folders["bonsai"] == {"bonsai"}


def test_packaged_photographs_are_few_small_and_not_of_faces() -> None:
    archive = Path(demo.__file__).parents[1] / "data" / demo.THUMBNAILS
    if not archive.is_file():
        pytest.skip("this package comes without photographs")
    store = Features(archive.with_name("caltech101.safetensors"))
    shown = {store.classnames[store.labels[row]] for row, image in enumerate(photographs(None, archive)) if image}
    assert shown and "face" not in shown and archive.stat().st_size < 700_000
