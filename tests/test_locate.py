from __future__ import annotations

import json
from pathlib import Path

import pytest
from trees import TREES, write_image, write_tree

from testtime.checks import check_dataset
from testtime.datasets import benchmark, identify, locate, open_dataset
from testtime.types import InputError

LAYOUTS = {"coop": "CoOp", "tpt": "TPT"}


def seen(data, folder: Path) -> list[tuple[str, int, str]]:
    """Paths from the image folder, labels and class names of a stream."""
    return [
        (path.relative_to(folder).as_posix(), label, data.classnames[label])
        for path, label in zip(data.paths, data.labels, strict=True)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TREES)
def test_a_benchmark_is_read_in_either_layout(tmp_path, name, layout) -> None:
    images = write_tree(tmp_path, name, layout)
    data = open_dataset(name, root=tmp_path)
    check_dataset(data)
    expected = [(path, label, called.replace("_", " ")) for path, label, called in TREES[name].samples]
    assert seen(data, images) == expected
    assert data.name == name and f"{benchmark(name).images:,}" in data.notes[0]
    place = locate(benchmark(name), tmp_path)
    assert place is not None and place.layout in (LAYOUTS[layout], "both")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TREES)
def test_the_datasets_own_folder_serves_as_root_and_as_path(tmp_path, name, layout) -> None:
    write_tree(tmp_path, name, layout)
    home = tmp_path / Path(TREES[name].coop if layout == "coop" else TREES[name].tpt).parts[0]
    whole = open_dataset(name, root=tmp_path)
    assert open_dataset(name, root=home) == whole
    assert open_dataset(home) == whole


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_fifteen_are_found_side_by_side(tmp_path, layout) -> None:
    for name in TREES:
        write_tree(tmp_path, name, layout)
    for name, tree in TREES.items():
        assert len(open_dataset(name, root=tmp_path)) == len(tree.samples)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("oxford-pets", "oxfordpets/images"),
        ("stanford-cars", "stanfordcars"),
        ("flowers102", "flowers102/jpg"),
        ("flowers102", "flower102/jpg"),
        ("food101", "food101/images"),
        ("caltech101", "caltech-101/images"),
        ("sun397", "sun397/images"),
    ],
)
def test_folders_of_the_released_codes_are_found_under_their_other_names(tmp_path, name, folder) -> None:
    images = write_tree(tmp_path, name, "coop")
    split = next((tmp_path).rglob(TREES[name].split))
    moved = tmp_path / "elsewhere" / folder
    moved.parent.mkdir(parents=True)
    images.rename(moved)
    if split.exists():
        split.rename(tmp_path / "elsewhere" / Path(folder).parts[0] / split.name)
    data = open_dataset(name, root=tmp_path / "elsewhere")
    assert len(data) == len(TREES[name].samples)


def test_imagenet_is_found_in_the_plain_layout(tmp_path) -> None:
    write_tree(tmp_path, "imagenet", "coop").rename(tmp_path / "imagenet" / "val")
    assert len(open_dataset("imagenet", root=tmp_path)) == 4
    place = locate(benchmark("imagenet"), tmp_path)
    assert place is not None and place.layout == "TPT"


@pytest.mark.parametrize("where", [".", "data_splits", "data/data_splits"])
def test_a_split_may_lie_beside_the_dataset(tmp_path, where) -> None:
    write_tree(tmp_path, "dtd", "coop")
    (tmp_path / where).mkdir(parents=True, exist_ok=True)
    split = TREES["dtd"].split
    (tmp_path / "dtd" / split).rename(tmp_path / where / split)
    assert len(open_dataset("dtd", root=tmp_path)) == 2


def test_a_dataset_without_its_split_says_where_to_get_it(tmp_path) -> None:
    write_tree(tmp_path, "stanford-cars", "coop")
    (tmp_path / "stanford_cars" / TREES["stanford-cars"].split).unlink()
    with pytest.raises(InputError, match=r"no split_zhou_StanfordCars\.json.*DATASETS\.md"):
        open_dataset("stanford-cars", root=tmp_path)
    write_tree(tmp_path, "fgvc-aircraft", "coop")
    (tmp_path / "fgvc_aircraft" / "images_variant_test.txt").unlink()
    with pytest.raises(InputError, match=r"no images_variant_test\.txt.*comes with fgvc-aircraft-2013b"):
        open_dataset("fgvc-aircraft", root=tmp_path)


def test_a_missing_dataset_says_what_to_download(tmp_path) -> None:
    write_tree(tmp_path, "dtd", "coop")
    with pytest.raises(InputError, match=r"UCF101.*is not in .*Download UCF-101-midframes\.zip"):
        open_dataset("ucf101", root=tmp_path)
    with pytest.raises(InputError, match="No folder"):
        open_dataset("ucf101", root=tmp_path / "nowhere")
    with pytest.raises(InputError, match="is a benchmark: give --root"):
        open_dataset("ucf101")


def test_a_folder_of_any_name_is_taken_for_what_it_is_said_to_be(tmp_path) -> None:
    write_tree(tmp_path, "imagenet-a", "tpt").rename(tmp_path / "hard")
    assert len(open_dataset("imagenet-a", root=tmp_path / "hard")) == 5
    with pytest.raises(InputError, match="is not in"):
        open_dataset("caltech101", root=tmp_path / "hard")


def test_split_files_without_their_datasets_are_no_datasets(tmp_path) -> None:
    write_tree(tmp_path, "food101", "coop")
    for name in ("food101", "ucf101", "dtd"):
        (tmp_path / TREES[name].split).write_text("{}")
    assert locate(benchmark("ucf101"), tmp_path) is None and locate(benchmark("food101"), tmp_path) is not None


def test_a_folder_of_any_name_is_known_by_its_split(tmp_path) -> None:
    write_tree(tmp_path, "dtd", "coop")
    (tmp_path / "dtd").rename(tmp_path / "textures")
    place = locate(benchmark("dtd"), tmp_path / "textures")
    assert place is not None and place.home.name == "textures" and place.layout == "other"


def test_one_variants_folder_is_not_taken_for_another(tmp_path) -> None:
    write_tree(tmp_path, "imagenet-a", "tpt")
    place = identify(tmp_path / "imagenet-a")
    assert place is not None and place.row.name == "imagenet-a"
    assert locate(benchmark("imagenet-r"), tmp_path / "imagenet-a") is None


def test_own_class_folders_under_a_benchmarks_name_stay_own(tmp_path) -> None:
    for path in ("dtd/cat/1.png", "dtd/dog/2.png"):
        write_image(tmp_path / path)
    assert identify(tmp_path / "dtd") is None
    assert open_dataset(tmp_path / "dtd").classnames == ["cat", "dog"]


def test_the_whole_one_of_two_copies_is_taken(tmp_path) -> None:
    write_image(tmp_path / "caltech-101" / "101_ObjectCategories" / "Faces" / "image_0426.jpg")
    write_tree(tmp_path / "other", "caltech101", "coop")
    (tmp_path / "other" / "caltech-101").rename(tmp_path / "Caltech101")
    data = open_dataset("caltech101", root=tmp_path)
    assert len(data) == 3 and all("Caltech101" in str(path) for path in data.paths)


def test_a_half_copied_dataset_goes_on_with_what_there_is(tmp_path) -> None:
    images = write_tree(tmp_path, "caltech101", "coop")
    (images / "Faces" / "image_0426.jpg").unlink()  # the very first of the split
    data = open_dataset("caltech101", root=tmp_path)
    assert list(data.labels or ()) == [1, 2] and data.classnames == ["face", "motorbike", "airplane"]
    assert data.notes[0] == "2,463 of its 2,465 test images are missing"
    assert data.notes[-1] == "1 of 3 listed images are missing, Faces/image_0426.jpg first"


def test_a_benchmarks_other_parts_are_not_held_to_the_size_of_its_test_part(tmp_path) -> None:
    write_tree(tmp_path, "dtd", "coop")
    file = tmp_path / "dtd" / TREES["dtd"].split
    split = json.loads(file.read_text())
    split["train"] = split["test"][:1]
    file.write_text(json.dumps(split))
    data = open_dataset("dtd", root=tmp_path, part="train")
    assert len(data) == 1 and data.notes == () and data.classnames == ["banded", "polka-dotted"]


def test_the_order_does_not_depend_on_the_file_system(tmp_path, monkeypatch) -> None:
    import os

    write_tree(tmp_path, "imagenet-sketch", "coop")
    write_tree(tmp_path, "imagenet-a", "coop")
    before = [open_dataset(name, root=tmp_path).paths for name in ("imagenet-a", "imagenet-sketch")]
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path=".": listdir(path)[::-1])
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path=".": list(scandir(path))[::-1])
    assert [open_dataset(name, root=tmp_path).paths for name in ("imagenet-a", "imagenet-sketch")] == before


def test_caltech_is_found_whole(data) -> None:
    dataset = open_dataset("caltech101", root=data)
    assert len(dataset) == 2465 and len(dataset.classnames) == 100 and dataset.notes == ()
    assert {"face", "leopard", "motorbike", "airplane"} <= set(dataset.classnames)
