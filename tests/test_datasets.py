from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from testtime.datasets import find_dataset, labels_among, open_dataset, read_folders, read_split
from testtime.types import InputError


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for name in ("grand_piano", "cat"):
        (tmp_path / "d" / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (8, 8)).save(tmp_path / "d" / name / f"{number}.png")
    return tmp_path / "d"


def test_class_folders_give_names_and_labels_in_sorted_order(folders) -> None:
    data = open_dataset(folders)
    assert list(data.classnames) == ["cat", "grand piano"]
    assert [(path.parent.name, label) for path, label in zip(data.paths, data.labels, strict=True)] == [
        ("cat", 0), ("cat", 0), ("grand_piano", 1), ("grand_piano", 1),
    ]  # fmt: skip


def test_a_split_file_decides_where_there_is_one(folders) -> None:
    rows = {"test": [["cat/1.png", 7, "cat"], ["grand_piano/0.png", 3, "grand_piano"]], "train": []}
    images = folders / "images"
    images.mkdir()
    for name in ("cat", "grand_piano"):
        (folders / name).rename(images / name)
    (folders / "split_zhou_X.json").write_text(json.dumps(rows))
    data = open_dataset(folders)
    assert list(data.classnames) == ["grand piano", "cat"] and list(data.labels) == [1, 0]
    assert all(path.exists() for path in data.paths) and len(data) == 2
    with pytest.raises(InputError, match="'train' is empty"):
        open_dataset(folders, part="train")
    with pytest.raises(InputError, match="no part 'val'"):
        open_dataset(folders, part="val")


@pytest.mark.parametrize("text", ["{", "[1, 2]", '{"test": [["a", "b"]]}', '{"test": 3}'])
def test_a_broken_split_file_is_named(folders, text) -> None:
    (folders / "split_zhou_X.json").write_text(text)
    with pytest.raises(InputError, match="split_zhou_X.json"):
        open_dataset(folders)


def test_missing_images_and_folders_are_named(folders, tmp_path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        open_dataset(tmp_path / "nowhere")
    (folders / "split.json").write_text('{"test": [["gone.png", 0, "a"], ["x.png", 1, "b"]]}')
    with pytest.raises(InputError, match=r"gone\.png"):
        read_split(folders / "split.json", folders)
    (tmp_path / "single" / "one").mkdir(parents=True)
    with pytest.raises(InputError, match="No images in"):
        open_dataset(tmp_path / "single")


def test_folders_that_are_not_classes_hold_images_without_labels(folders) -> None:
    Image.new("RGB", (8, 8)).save(folders / "loose.png")
    mixed = open_dataset(folders)
    assert len(mixed) == 5 and mixed.labels is None and mixed.classnames == []
    assert mixed.notes == ("1 images are in no class folder, loose.png first",)
    with pytest.raises(InputError, match=r"1 images are in no class folder, loose\.png first"):
        read_folders(folders)
    with pytest.raises(InputError, match=r"no labels to score with \(.*loose\.png first\)"):
        find_dataset(str(folders))
    (folders.parent / "nest").mkdir()
    folders.rename(folders.parent / "nest" / "d")
    alone = open_dataset(folders.parent / "nest")
    assert len(alone) == 5 and alone.labels is None


def test_labels_are_matched_to_the_names_given(folders) -> None:
    data = open_dataset(folders)
    assert labels_among(data, ["Grand Piano", "dog", "cat"]) == [2, 2, 0, 0]
    assert labels_among(data, ["cat", "dog"]) == [0, 0, None, None]
    assert labels_among(replace(data, labels=None), ["dog", "grand piano"]) == [None, None, 1, 1]
    # folders above the ones that are named after classes
    nested = replace(data, labels=[0, 0, 1, 1], classnames=["2024", "2025"])
    assert labels_among(nested, ["cat", "grand piano"]) == [0, 0, 1, 1]
    # two classes of one name, as ImageNet has them
    assert labels_among(replace(data, classnames=["sunglasses"] * 2), ["sunglasses"] * 2) == [0, 0, 1, 1]
    numbered = replace(data, classnames=["0", "1"])
    assert labels_among(numbered, ["cat", "piano", "dog"]) == [0, 0, 1, 1]
    with pytest.raises(InputError, match="label 1, but 1 classes"):
        labels_among(numbered, ["cat"])


def test_images_in_shards_are_encoded_as_files_are(tmp_path, folders) -> None:
    import tarfile

    from testtime import Features, Session, build_task, load_encoder
    from testtime.encoding.encode import encode
    from testtime.types import ViewPlan

    files = open_dataset(folders)
    with tarfile.open(tmp_path / "d.tar", "w") as archive:
        for number, (path, label) in enumerate(zip(files.paths, files.labels or (), strict=True)):
            archive.add(path, f"{number}.png")
            (tmp_path / "label").write_text(files.classnames[label])
            archive.add(tmp_path / "label", f"{number}.txt")
    stored = open_dataset(tmp_path / "d.tar")
    assert stored.classnames == files.classnames and stored.labels == files.labels
    encoder = load_encoder("tiny")
    task = build_task(encoder, files.classnames)
    for name, dataset in (("files", files), ("stored", stored)):
        encode(encoder, task, dataset.paths, tmp_path / name, ViewPlan(2), labels=dataset.labels, shard=3)
    ours, theirs = Features(tmp_path / "stored"), Features(tmp_path / "files")
    assert ours.labels is not None and ours.labels.equal(theirs.labels)
    assert all(a.equal(b) for a, b in zip(ours.chunks(range(4)), theirs.chunks(range(4)), strict=True))
    one, other = (Session(task, "zeroshot", encoder=encoder).step(d.paths[2]).logits for d in (stored, files))
    assert one.equal(other)
    # resumed, the names of shards are found again
    assert encode(encoder, task, stored.paths, tmp_path / "stored", ViewPlan(2), labels=stored.labels, shard=3,
                  resume=True, on_skip=None) == 4  # fmt: skip


def test_an_unknown_name_is_told_what_a_dataset_is() -> None:
    with pytest.raises(InputError, match="No folder, file or benchmark"):
        open_dataset("imagenett")


def test_the_caltech_split_is_found_whole(data) -> None:
    dataset = open_dataset(data / "caltech-101")
    assert len(dataset) == 2465 and len(dataset.classnames) == 100
    assert all(path.exists() for path in dataset.paths)
