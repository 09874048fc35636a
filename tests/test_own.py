from __future__ import annotations

import json

import pytest
from trees import write_image

from testtime.datasets import open_dataset
from testtime.types import InputError


@pytest.fixture
def images(tmp_path):
    for name in ("a.png", "b.png", "c.png"):
        write_image(tmp_path / "own" / "pictures" / name)
    return tmp_path / "own"


def test_a_folder_of_images_has_no_labels(images) -> None:
    data = open_dataset(images / "pictures")
    assert [path.name for path in data.paths] == ["a.png", "b.png", "c.png"]
    assert data.labels is None and data.classnames == [] and data.name == "pictures"


def test_patterns_and_lists_of_images_have_no_labels(images) -> None:
    assert len(open_dataset(f"{images}/pictures/[ab].png")) == 2
    (images / "list.txt").write_text("pictures/c.png\npictures/a.png\n")
    assert [path.name for path in open_dataset(images / "list.txt").paths] == ["c.png", "a.png"]


def test_folders_of_wordnet_ids_are_named_from_the_table(tmp_path) -> None:
    for wnid in ("n15075141", "n01443537"):
        write_image(tmp_path / "mine" / wnid / "x.jpg")
    data = open_dataset(tmp_path / "mine")
    assert data.classnames == ["goldfish", "toilet paper"] and data.labels == [0, 1]


def test_folders_named_after_parts_are_parts(tmp_path) -> None:
    for path in ("train/cat/1.png", "train/dog/1.png", "validation/cat/2.png", "validation/dog/2.png"):
        write_image(tmp_path / "pets" / path)
    data = open_dataset(tmp_path / "pets", part="val")
    assert [path.name for path in data.paths] == ["2.png", "2.png"] and data.name == "pets"
    with pytest.raises(InputError, match="no part 'test'; it has train, validation"):
        open_dataset(tmp_path / "pets")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", "pictures/b.png,grand_piano\npictures/a.png,cat\n"),
        ("t.csv", "\ufefflabel,id,path\ngrand_piano,1,pictures/b.png\n\ncat,2,pictures/a.png\n"),
        ("t.csv", 'file_name,label\n"pictures/b.png","grand piano"\npictures/a.png,cat\n'),
        ("t.tsv", "pictures/b.png\tgrand_piano\npictures/a.png\tcat\n"),
        ("t.jsonl", '{"path": "pictures/b.png", "label": "grand_piano"}\n\n{"file": "pictures/a.png", "label": "cat"}'),
    ],
)  # fmt: skip
def test_a_table_gives_paths_from_its_own_folder_and_named_labels(images, name, text, monkeypatch, tmp_path) -> None:
    (images / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    data = open_dataset(images / name)
    assert [path.name for path in data.paths] == ["b.png", "a.png"] and all(path.is_file() for path in data.paths)
    assert data.classnames == ["cat", "grand piano"] and data.labels == [1, 0] and data.name == "t"


def test_metadata_in_a_folder_of_images_labels_them(images) -> None:
    (images / "pictures" / "metadata.csv").write_text("file_name,label\na.png,cat\nc.png,dog\n")
    data = open_dataset(images / "pictures")
    assert data.labels == [0, 1] and data.name == "pictures"
    (images / "pictures" / "metadata.csv").unlink()
    (images / "pictures" / "metadata.jsonl").write_text(json.dumps({"file_name": "b.png", "label": 1}))
    assert open_dataset(images / "pictures").labels == [1]


def test_numbered_labels_take_their_names_from_beside(images) -> None:
    (images / "t.csv").write_text("pictures/b.png,1\npictures/a.png,0\n")
    plain = open_dataset(images / "t.csv")
    assert plain.classnames == ["0", "1"] and "numbers without names" in plain.notes[0]
    (images / "classnames.txt").write_text("cat\ngrand_piano\nfox\n")
    data = open_dataset(images / "t.csv")
    assert data.classnames == ["cat", "grand piano", "fox"] and data.labels == [1, 0] and data.notes == ()
    (images / "classnames.txt").write_text("cat\n")
    with pytest.raises(InputError, match=r"classnames\.txt names 1 classes, but there is a label 1"):
        open_dataset(images / "t.csv")
    (images / "classnames.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(InputError, match=r"Cannot read .*classnames\.txt"):
        open_dataset(images / "t.csv")


def test_partial_labels_are_dropped_with_a_note(images) -> None:
    (images / "t.csv").write_text("pictures/b.png,cat\npictures/a.png,\n")
    data = open_dataset(images / "t.csv")
    assert data.labels is None and data.notes == ("1 of 2 images have no label, so none is scored",)
    (images / "t.csv").write_text("path\npictures/b.png\n")
    assert open_dataset(images / "t.csv").labels is None


def test_a_listed_image_that_is_missing_is_counted(images) -> None:
    (images / "t.csv").write_text("pictures/z.png,fox\npictures/a.png,cat\n")
    data = open_dataset(images / "t.csv")
    assert len(data) == 1 and data.classnames == ["cat", "fox"] and data.labels == [0]
    assert data.notes == ("1 of 2 listed images are missing, pictures/z.png first",)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", b"", "lists no images"),
        ("t.csv", b"pictures/a.png,cat\nb\n", "the row 'b' is too short"),
        ("t.csv", b"gone.png,cat\n", "None of the 1 images"),
        ("t.csv", b"\xff\xfe\xfa", "not UTF-8"),
        ("t.csv", b'pictures/a.png,"cat\n', "not a table of images"),
        ("t.jsonl", b"{", "not a table of images"),
        ("t.jsonl", b'{"x": 1}', "line 1 has none of path"),
        ("t.jsonl", b"[1]", "not a table of images"),
        ("t.bin", b"x", "is not a dataset"),
    ],
)
def test_a_damaged_table_is_named(images, name, content, message) -> None:
    (images / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        open_dataset(images / name)


def test_a_folder_with_nothing_in_it_says_what_a_dataset_is(tmp_path) -> None:
    with pytest.raises(InputError, match=r"holds no dataset: class folders.*CSV"):
        open_dataset(tmp_path)
