"""What `testtime run` and `testtime encode` accept: every form of a dataset, with the classes that it comes with."""

from __future__ import annotations

import csv
import tarfile
from pathlib import Path

import pytest
from small_data import make_folders, make_textures

from testtime import Features
from testtime.checks import check_dataset
from testtime.datasets import open_dataset

NAMES = ("cat", "dog", "fox")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_folders(tmp_path / "photos", NAMES, images=2)


def as_folder(photos: Path) -> list[str]:
    return [str(photos)]


def as_csv(photos: Path) -> list[str]:
    lines = [f"photos/{path.parent.name}/{path.name},{path.parent.name}" for path in sorted(photos.glob("*/*.png"))]
    (photos.parent / "list.csv").write_text("path,label\n" + "\n".join(lines))
    return [str(photos.parent / "list.csv")]


def as_shards(photos: Path) -> list[str]:
    for number, name in enumerate(NAMES):
        with tarfile.open(photos.parent / f"shard-{number}.tar", "w") as archive:
            for path in sorted((photos / name).iterdir()):
                archive.add(path, f"{name}{path.stem}.png")
                (photos.parent / "label").write_text(name)
                archive.add(photos.parent / "label", f"{name}{path.stem}.txt")
    return [f"{photos.parent}/shard-{{0..2}}.tar"]


def as_saved(photos: Path) -> list[str]:
    hub = pytest.importorskip("datasets", reason="the library datasets is not installed")
    rows = [({"bytes": path.read_bytes(), "path": None}, path.parent.name) for path in sorted(photos.glob("*/*.png"))]
    columns = {"image": [image for image, _ in rows], "label": [NAMES.index(name) for _, name in rows]}
    features = hub.Features({"image": hub.Image(), "label": hub.ClassLabel(names=list(NAMES))})
    hub.Dataset.from_dict(columns, features=features).save_to_disk(str(photos.parent / "saved"))
    return [str(photos.parent / "saved")]


def written(file: Path) -> list[tuple[str, str]]:
    with open(file, newline="") as lines:
        return [(row["label"], row["confidence"]) for row in csv.DictReader(lines)]


@pytest.mark.parametrize("form", [as_folder, as_csv, as_shards, as_saved])
def test_every_form_passes_every_check(photos, tmp_path, form, monkeypatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    check_dataset(open_dataset(form(photos)[0]))


@pytest.mark.parametrize("form", [as_csv, as_shards, as_saved])
def test_every_form_of_the_same_images_gives_the_same_results(cli, photos, tmp_path, form, monkeypatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    answers, stores = [], []
    for number, source in enumerate((as_folder(photos), form(photos))):
        out, store = tmp_path / f"{number}.csv", tmp_path / f"{number}.safetensors"
        outcome = cli("run", *source, "-e", "tiny", "--shuffle", "--out", out)
        assert outcome.code == 0, outcome.err
        assert "accuracy on 6 images" in outcome.err and "3 classes" in outcome.err and "cat, dog, fox" in outcome.err
        outcome = cli("encode", *source, "-e", "tiny", "--views", 3, "--out", store)
        assert outcome.code == 0, outcome.err
        answers.append(written(out))
        stores.append(Features(store))
    assert answers[0] == answers[1] and len(answers[0]) == 6
    first, second = stores
    assert first.classnames == second.classnames == NAMES
    assert first.labels is not None and first.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert second.labels is not None and second.labels.equal(first.labels)
    assert first.read(0, 6).equal(second.read(0, 6))


def test_a_benchmark_is_run_and_encoded_by_name(cli, tmp_path) -> None:
    root = make_textures(tmp_path / "sets")
    outcome = cli("run", "dtd", "--root", root, "-e", "tiny", "--out", tmp_path / "a.csv", "--limit", 9)
    assert outcome.code == 0 and "accuracy on 9 images" in outcome.err and "47 classes" in outcome.err
    outcome = cli("encode", "dtd", "--root", root, "-e", "tiny", "--out", tmp_path / "f.safetensors")
    store = Features(tmp_path / "f.safetensors")
    assert outcome.code == 0 and len(store) == 47 and store.labels is not None and len(store.classnames) == 47


def test_given_classes_take_precedence_and_labels_follow_them(cli, photos, tmp_path) -> None:
    store = tmp_path / "f.safetensors"
    assert cli("encode", *as_csv(photos), "--classes", "fox,Dog,cat", "-e", "tiny", "--out", store).code == 0
    found = Features(store)
    assert found.classnames == ("fox", "Dog", "cat") and found.labels is not None
    assert found.labels.tolist() == [2, 2, 1, 1, 0, 0]
    outcome = cli("run", *as_shards(photos), "--classes", "cat,owl", "-e", "tiny", "--out", tmp_path / "a.csv")
    assert outcome.code == 0 and "accuracy on 2 images" in outcome.err  # the cats; the others are in neither class


def test_number_labels_index_the_given_classes(cli, photos, tmp_path) -> None:
    (tmp_path / "n.csv").write_text("photos/fox/0.png,0\nphotos/cat/0.png,2\n")
    plain = cli("run", tmp_path / "n.csv", "-e", "tiny", "--out", tmp_path / "a.csv")
    assert plain.code == 0 and "numbers without names" in plain.err
    named = cli("run", tmp_path / "n.csv", "--classes", "fox,dog,cat", "-e", "tiny", "--out", tmp_path / "b.csv")
    assert named.code == 0 and "accuracy on 2 images" in named.err and "without names" not in named.err
    few = cli("run", tmp_path / "n.csv", "--classes", "fox,dog", "-e", "tiny")
    assert few.code == 2 and "label 2, but 2 classes" in few.err


def test_a_folder_without_structure_is_run_with_given_classes(cli, photos, tmp_path) -> None:
    (photos / "fox" / "0.png").rename(photos / "loose.png")
    outcome = cli("run", photos, "--classes", "cat,dog,fox", "-e", "tiny", "--out", tmp_path / "a.csv")
    assert outcome.code == 0 and len(written(tmp_path / "a.csv")) == 6
    assert "accuracy on 5 images" in outcome.err and "loose.png" in outcome.err
    one = cli("run", photos / "loose.png", "--classes", "cat,dog", "-e", "tiny")
    assert one.code == 0 and len(one.out.splitlines()) == 2


def test_a_run_over_shards_is_resumed(cli, photos, tmp_path) -> None:
    source, out, state = as_shards(photos), tmp_path / "a.csv", tmp_path / "s.safetensors"
    cli("run", *source, "-e", "tiny", "--out", tmp_path / "whole.csv")
    cli("run", *source, "-e", "tiny", "--out", out, "--limit", 4, "--save", state)
    outcome = cli("run", *source, "-e", "tiny", "--out", out, "--resume", state)
    assert outcome.code == 0 and "accuracy on 2 images" in outcome.err
    assert written(out) == written(tmp_path / "whole.csv")


def test_the_test_split_is_used_and_reported(cli, photos, tmp_path) -> None:
    (tmp_path / "set").mkdir()
    photos.rename(tmp_path / "set" / "test")
    make_folders(tmp_path / "set" / "train", NAMES, images=1)
    outcome = cli("run", tmp_path / "set", "-e", "tiny", "--out", tmp_path / "a.csv")
    assert outcome.code == 0 and len(written(tmp_path / "a.csv")) == 6
    assert f"note: the images are from {tmp_path / 'set' / 'test'}" in outcome.err
