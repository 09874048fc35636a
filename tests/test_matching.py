"""What is said before a run about folders, labels and classes that did not find each other."""

from __future__ import annotations

import json
from pathlib import Path

from small_data import make_folders

from testtime.datasets import Dataset, labels_among
from testtime.datasets.matching import MOST, describe


def of_folders(sizes: dict[str, int], top: str = "photos") -> Dataset:
    """A dataset of class folders."""
    names = sorted(sizes)
    paths = [Path(top, name, f"{number}.jpg") for name in names for number in range(sizes[name])]
    return Dataset(top, paths, [names.index(path.parent.name) for path in paths], names)


def lines(data: Dataset, *classes: str) -> list[str]:
    return describe(data, classes, labels_among(data, classes))


def test_nothing_is_said_where_all_match() -> None:
    assert lines(of_folders({"cat": 2, "Red_Fox": 1}), "red fox", "cat") == []


def test_folders_and_classes_without_a_partner_are_named_with_the_nearest_and_the_counts() -> None:
    folders, classes = lines(of_folders({"cat": 2, "dog": 3, "mouse": 1}), "cat", "dogs", "zebra")
    assert folders == (
        "2 of 3 folders are named after no class, so their 4 images are not scored: "
        "dog (3 images, nearest class: dogs), mouse (1 image)"
    )
    assert classes == "2 of 3 classes have no images: dogs (nearest folder: dog), zebra"


def test_where_no_folder_matches_there_is_one_line() -> None:
    (line,) = lines(of_folders({"dog": 3, "horse": 1}), "zebra", "car")
    assert line == "no folder is named after a class, so nothing is scored; folders: dog (3 images), horse (1 image)"
    (line,) = lines(of_folders({"2024-06": 3, "2024-07": 1}), "cat", "dog")
    assert line.endswith("folders: 2024-06 (3 images), 2024-07 (1 image)")


def test_images_in_one_folder_without_labels_are_nothing_to_remark_on() -> None:
    assert lines(Dataset("photos", [Path("inbox", f"{n}.jpg") for n in range(3)], None, []), "cat", "dog") == []


def test_images_in_albums_are_matched_by_their_own_folder() -> None:
    paths = [Path("photos", year, name, "1.jpg") for year in ("2023", "2024") for name in ("cat", "misc")]
    folders, classes = lines(Dataset("photos", paths, [0, 0, 1, 1], ["2023", "2024"]), "cat", "dog")
    assert folders.startswith("1 of 2 folders is named after no class, so its 2 images are not scored: misc")
    assert classes == "1 of 2 classes has no images: dog"


def test_labels_of_a_table_are_called_labels() -> None:
    data = Dataset("t", [Path("a/1.jpg"), Path("a/2.jpg")], [0, 1], ["cat", "hound"])
    assert lines(data, "cat", "dog")[0].startswith("1 of 2 labels is the name of no class, so its 1 image is not")
    assert lines(data, "zebra", "dog")[0].startswith("no label is the name of a class, so nothing is scored; labels:")


def test_numbers_without_names_match_by_position() -> None:
    data = Dataset("t", [Path("a/1.jpg"), Path("a/2.jpg")], [0, 1], ["0", "1"])
    assert lines(data, "cat", "dog", "fox") == ["1 of 3 classes has no images: fox"]


def test_lines_are_bounded() -> None:
    many = of_folders({f"folder number {number}": 1 for number in range(500)} | {"cat": 1})
    found = lines(many, "cat", *(f"unlikely {number}" for number in range(900)))
    assert all(len(line) < 120 * MOST for line in found)
    assert "and 495 more" in found[0] and "and 895 more" in found[1]


def test_a_run_says_it_first_and_counts_what_it_could_not_score(cli, tmp_path: Path) -> None:
    photos = make_folders(tmp_path / "photos", images=2)
    names = sorted(path.name for path in photos.iterdir())
    common = [photos, "--classes", f"{names[0]},zebra", "-e", "tiny"]
    found = cli("run", *common, "--json")
    first, last = found.err.splitlines()[0], json.loads(found.err.splitlines()[-1])
    assert first.startswith(f"note: {len(names) - 1} of {len(names)} folders")
    assert (last["labelled"], last["unlabelled"]) == (2, 2 * len(names) - 2)
    plain = cli("run", *common).err
    assert f", {2 * len(names) - 2} without a known class" in plain and "accuracy on 2 images" in plain
    assert first in cli("encode", *common, "--out", tmp_path / "f.safetensors").err
