"""`testtime report` from the command line."""

from __future__ import annotations

import json

import pytest
import torch

import testtime as tt
from testtime.cli.app import main
from testtime.encoding.encode import encode
from testtime.types import Preprocess


class Colour:
    """An encoder that uses the mean colour of an image as its feature."""

    name, dim, scale, preprocess = "colour", 3, 100.0, Preprocess(size=8, resize=8)
    device = torch.device("cpu")

    def encode_images(self, pixels):
        colour = pixels.mean((2, 3)) + 2
        return colour / colour.norm(dim=1, keepdim=True)

    def encode_texts(self, texts):
        raise NotImplementedError


@pytest.fixture
def store(tmp_path):
    task, stream, labels = tt.toy(images=60, views=1)
    return tt.save_features(
        tmp_path / "toy.safetensors", stream, task.text, labels=labels, metadata={"dataset": "Toys", "encoder": "none"}
    )


def run(capsys, *words):
    code = 0
    try:
        main(["report", *map(str, words)])
    except SystemExit as stop:
        code = stop.code or 0
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_it_writes_a_page_with_the_command_that_makes_it_again(store, tmp_path, capsys):
    page = tmp_path / "out" / "page.html"
    words = (
        store,
        "--methods",
        "tda,dpe",
        "--set",
        "dpe.alpha=4",
        "--shuffle",
        "--seed",
        "3",
        "--limit",
        "40",
        "--no-map",
    )
    code, out, _ = run(capsys, *words, "--out", page, "--json")
    summary, text = json.loads(out), page.read_text()
    assert code == 0 and summary == {"report": str(page), "n": 40, "bytes": len(text.encode())}
    command = f"testtime report {store} --methods tda,dpe --set dpe.alpha=4 --no-map --limit 40 --shuffle --seed 3"
    assert command in text and "Toys" in text and "shuffled, seed 3" in text and "alpha=4.0" in text


def test_a_sweep_over_two_settings_is_a_heat_map_and_over_one_a_line(store, tmp_path, capsys):
    page = tmp_path / "page.html"
    words = (store, "--methods", "dpe", "--no-map", "--out", page, "--sweep", "alpha=1,6")
    assert run(capsys, *words, "--sweep", "beta=2,4")[0] == 0
    assert page.read_text().count('class="heat') >= 4 and "dpe over alpha and beta" in page.read_text()
    assert run(capsys, *words)[0] == 2  # it is not overwritten
    assert run(capsys, *words, "--force")[0] == 0
    assert "dpe over alpha." in page.read_text()


def test_without_labels_it_shows_what_changed(tmp_path, capsys):
    task, stream, _ = tt.toy(images=60, views=1)
    path = tt.save_features(tmp_path / "bare.safetensors", stream, task.text)
    code, _, err = run(capsys, path, "--out", tmp_path / "page.html", "--no-map")
    text = (tmp_path / "page.html").read_text()
    assert code == 0 and "60 images" in err
    assert "What changed" in text and "unknown which of the two is correct" in text and "Accuracy so far" not in text


def test_images_come_from_the_store_or_from_a_folder(tmp_path, capsys):
    from PIL import Image

    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(8):
        Image.new("RGB", (50, 40), (30 * number, 60, 30)).save(photos / f"{number}.png")
    (photos / "5.png").write_bytes(b"no image")
    task = tt.Task(torch.eye(3), ("red", "green", "blue"))
    paths, skipped = sorted(photos.iterdir()), []
    encode(Colour(), task, paths, tmp_path / "photos.safetensors", on_skip=skipped.append)
    (photos / "5.png").unlink()
    store = tt.Features(tmp_path / "photos.safetensors")
    assert len(skipped) == 1 and store.images == tuple(str(path) for path in paths if path.name != "5.png")
    for words in ([], ["--images", photos]):
        code, _, _ = run(capsys, store.path, "--no-map", "--force", "--out", tmp_path / "page.html", *words)
        assert code == 0 and "data:image/jpeg;base64," in (tmp_path / "page.html").read_text()
    (photos / "7.png").unlink()
    code, _, err = run(capsys, store.path, "--images", photos, "--out", tmp_path / "other.html")
    assert code == 2 and "6 images for features of 7" in " ".join(err.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", ","], "--methods is empty"),
        (["--methods", "dpee"], "Did you mean 'dpe'"),
        (["--set", "alpha=4"], "METHOD.KEY=VALUE"),
        (["--set", "mta.alpha=4"], "one of zeroshot, tda, dpe"),
        (["--sweep", "alfa=1,2"], "Unknown setting of dpe 'alfa'"),
        (["--sweep", "alpha=1,x"], "alpha='x'"),
        (["--sweep", "alpha=1", "--sweep", "beta=1", "--sweep", "queue=1"], "leave out the rest"),
        (["--snapshots", "few"], "--snapshots few"),
        (["--snapshots", "900"], "after 900 images"),
        (["--limit", "0"], "--limit 0"),
        (["--images", "nowhere"], "nowhere"),
    ],
)
def test_wrong_options_are_reported_in_a_line(store, tmp_path, capsys, words, message):
    code, _, err = run(capsys, store, "--out", tmp_path / "page.html", *words)
    assert code == 2 and message in " ".join(err.split()) and "Traceback" not in err
    assert not (tmp_path / "page.html").exists()


def test_a_sweep_needs_labels(tmp_path, capsys):
    task, stream, _ = tt.toy(images=10)
    path = tt.save_features(tmp_path / "bare.safetensors", stream, task.text)
    code, _, err = run(capsys, path, "--sweep", "alpha=1,2")
    assert code == 2 and "needs labels" in err
