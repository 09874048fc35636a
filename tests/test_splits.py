from __future__ import annotations

import json

import pytest
from trees import TREES, write_image, write_tree

from testtime.datasets import open_dataset, read_split
from testtime.types import InputError


@pytest.fixture
def folder(tmp_path):
    for name in ("cat/0.png", "cat/1.png", "grand_piano/0.png"):
        write_image(tmp_path / "d" / "images" / name)
    return tmp_path / "d"


def write(folder, **parts) -> None:
    (folder / "split_zhou_X.json").write_text(json.dumps(parts))


def test_labels_are_positions_among_the_classes_of_all_parts(folder) -> None:
    write(folder, test=[["cat/1.png", 7, "cat"]], train=[["grand_piano/0.png", 3, "grand_piano"]])
    test, train = open_dataset(folder), open_dataset(folder, part="train")
    assert test.classnames == train.classnames == ["grand piano", "cat"]
    assert (test.labels, train.labels) == ([1], [0])


def test_a_missing_image_is_counted_and_left_out(folder) -> None:
    rows = [["gone/9.png", 0, "cat"], ["cat/0.png", 0, "cat"], ["cat/8.png", 0, "cat"], ["grand_piano/0.png", 1, "p"]]
    write(folder, test=rows)
    data = open_dataset(folder)
    assert [path.name for path in data.paths] == ["0.png", "0.png"] and data.labels == [0, 1]
    assert data.notes == ("2 of 4 listed images are missing, gone/9.png first",)


def test_paths_start_from_the_folder_that_has_most_of_them(folder) -> None:
    write_image(folder / "thumbnails" / "cat" / "0.png")
    write(folder, test=[["cat/0.png", 0, "cat"], ["cat/1.png", 0, "cat"], ["grand_piano/0.png", 1, "piano"]])
    data = open_dataset(folder)
    assert len(data) == 3 and all("images" in path.parts for path in data.paths)


def test_a_leading_slash_does_not_leave_the_folder(folder) -> None:
    write(folder, test=[["/cat/0.png", 0, "cat"], ["/grand_piano/0.png", 1, "piano"]])
    assert all(path.is_file() and path.is_relative_to(folder) for path in open_dataset(folder).paths)


def test_one_label_with_two_names_is_damage(folder) -> None:
    write(folder, test=[["cat/0.png", 0, "cat"], ["cat/1.png", 0, "dog"]])
    with pytest.raises(InputError, match="label 0 is called both 'cat' and 'dog'"):
        open_dataset(folder)


def test_two_split_files_are_refused(folder) -> None:
    for name in ("split_zhou_A.json", "split_zhou_B.json"):
        (folder / name).write_text("{}")
    with pytest.raises(InputError, match="2 split files"):
        open_dataset(folder)


def test_a_split_file_may_be_given_itself(folder) -> None:
    write(folder, test=[["cat/0.png", 0, "cat"], ["grand_piano/0.png", 1, "piano"]])
    assert open_dataset(folder / "split_zhou_X.json").classnames == ["cat", "piano"]


def test_a_missing_or_binary_split_is_named(folder) -> None:
    with pytest.raises(InputError, match=r"Cannot read .*none\.json: No such file"):
        read_split(folder / "none.json", folder)
    (folder / "split.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is not a split file"):
        read_split(folder / "split.json", folder)


def test_aircraft_names_keep_their_spaces_and_the_order_of_variants(tmp_path) -> None:
    write_tree(tmp_path, "fgvc-aircraft", "coop")
    data = open_dataset("fgvc-aircraft", root=tmp_path)
    assert data.classnames == ["Cessna 172", "707-320", "A300B4"] and data.labels == [1, 0, 2]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("images_variant_test.txt", "0034309 Concorde\n", "'Concorde' in the line"),
        ("images_variant_test.txt", "\n", "is empty"),
        ("images_variant_test.txt", "0000001 A300B4\n", "none of the 1 images listed, 0000001.jpg first"),
        ("variants.txt", None, r"Cannot read .*variants\.txt"),
    ],
)
def test_damaged_lists_of_aircraft_are_named(tmp_path, file, text, message) -> None:
    write_tree(tmp_path, "fgvc-aircraft", "coop")
    path = tmp_path / "fgvc_aircraft" / file
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=message):
        open_dataset("fgvc-aircraft", root=tmp_path)


def test_lists_of_aircraft_that_are_not_text_are_named(tmp_path) -> None:
    write_tree(tmp_path, "fgvc-aircraft", "coop")
    (tmp_path / "fgvc_aircraft" / "variants.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(InputError, match="not text"):
        open_dataset("fgvc-aircraft", root=tmp_path)


def test_scenes_keep_their_nested_class_paths(tmp_path) -> None:
    images = write_tree(tmp_path, "sun397", "coop")
    data = open_dataset("sun397", root=tmp_path)
    assert data.paths[1] == images / "a" / "apartment_building" / "outdoor" / "sun_aaa.jpg"
    assert data.classnames[1:] == ["outdoor apartment building", "indoor seats theater"]
    assert len(TREES["sun397"].samples) == len(data)
