from __future__ import annotations

from pathlib import Path

import pytest
from trees import write_image, write_tree

from testtime.datasets import open_dataset
from testtime.datasets.benchmarks import benchmark
from testtime.datasets.imagenet import class_folders, class_table, mask
from testtime.types import InputError


def test_the_thousand_ids_are_sorted_and_unique() -> None:
    wnids = list(class_table())
    assert len(wnids) == 1000 and wnids == sorted(set(wnids))
    assert all(len(wnid) == 9 and wnid[0] == "n" and wnid[1:].isdecimal() for wnid in wnids)
    assert (wnids[0], wnids[-1]) == ("n01440764", "n15075141")


def test_names_are_the_released_ones_with_their_two_pairs_of_twins() -> None:
    names = list(class_table().values())
    twins = {name: [i for i, other in enumerate(names) if other == name] for name in names if names.count(name) > 1}
    assert twins == {"missile": [657, 744], "sunglasses": [836, 837]}
    assert (names[0], names[134], names[517], names[999]) == (
        "tench", "crane bird", "construction crane", "toilet paper",
    )  # fmt: skip


def test_names_agree_with_those_that_open_clip_carries() -> None:
    metadata = pytest.importorskip("open_clip.zero_shot_metadata")
    assert list(class_table().values()) == list(metadata.IMAGENET_CLASSNAMES)


def test_masks_of_a_and_r_have_200_classes_each_and_share_86() -> None:
    a, r = mask("imagenet-a"), mask("imagenet-r")
    assert len(set(a)) == len(set(r)) == 200 and len(set(a) & set(r)) == 86
    assert a[:6] == (6, 11, 13, 15, 17, 22) and r[:6] == (1, 2, 4, 6, 8, 9)
    assert a == tuple(sorted(a)) and r == tuple(sorted(r))
    assert mask("imagenet-sketch") == tuple(range(1000))


def test_class_folders_of_v2_are_numbers_in_numeric_order() -> None:
    assert class_folders(benchmark("imagenet-v2"))[8:12] == ["8", "9", "10", "11"]


def test_no_image_is_lost_for_its_name(tmp_path) -> None:
    write_tree(tmp_path, "imagenet-a", "coop")
    names = [Path(str(path)).name for path in open_dataset("imagenet-a", root=tmp_path).paths]
    assert len(names) == 5 and sum("sh" in name for name in names) == 3


def test_classnames_that_lie_with_the_dataset_are_honoured(tmp_path) -> None:
    images = write_tree(tmp_path, "imagenet-r", "coop")
    lines = [f"{wnid} my {name}" for wnid, name in class_table().items()]
    (images.parent / "classnames.txt").write_text("\n".join(lines))
    data = open_dataset("imagenet-r", root=tmp_path)
    assert data.classnames[:2] == ["my goldfish", "my great white shark"] and len(data.classnames) == 200


def test_classnames_that_lack_a_class_are_refused(tmp_path) -> None:
    images = write_tree(tmp_path, "imagenet", "tpt")
    (images.parent / "classnames.txt").write_text("n01440764 tench\n")
    with pytest.raises(InputError, match=r"classnames\.txt lacks 999 of 1,000 classes, n01443537 first"):
        open_dataset("imagenet", root=tmp_path)


def test_classnames_that_are_not_text_are_refused(tmp_path) -> None:
    images = write_tree(tmp_path, "imagenet-a", "tpt")
    (images / "classnames.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(InputError, match=r"Cannot read .*classnames\.txt"):
        open_dataset("imagenet-a", root=tmp_path)


@pytest.mark.parametrize("folder", ["imagenet/images/val", "ImageNet/val", "imagenet"])
def test_a_flat_validation_folder_is_explained(tmp_path, folder) -> None:
    for number in (1, 2):
        write_image(tmp_path / folder / f"ILSVRC2012_val_{number:08d}.JPEG")
    with pytest.raises(InputError, match="2 images and no class folders.*Sort them"):
        open_dataset("imagenet", root=tmp_path)


def test_what_is_missing_and_what_is_foreign_is_noted(tmp_path) -> None:
    images = write_tree(tmp_path, "imagenet", "coop")
    write_image(images / "my_photos" / "a.jpg")
    notes = " | ".join(open_dataset("imagenet", root=tmp_path).notes)
    assert "49,996 of its 50,000 test images are missing" in notes
    assert "997 of 1,000 class folders are missing: n01484850" in notes
    assert "not a class of ImageNet are left out: my_photos" in notes
    assert "ILSVRC2012_val_00000005.JPEG is the first image missing" in notes


def test_a_class_of_v2_that_lacks_images_is_named(tmp_path) -> None:
    images = write_tree(tmp_path, "imagenet-v2", "coop")
    for number in range(9):
        write_image(images / "0" / f"more{number}.jpeg")
    notes = open_dataset("imagenet-v2", root=tmp_path).notes
    assert "3 class folders lack images: 2 has 1 of 10 images" in notes


def test_class_folders_without_images_are_an_error(tmp_path) -> None:
    (tmp_path / "imagenet-a" / "n01498041").mkdir(parents=True)
    with pytest.raises(InputError, match="no image in any"):
        open_dataset("imagenet-a", root=tmp_path)


def test_imagenet_has_a_training_part_and_its_variants_have_none(tmp_path) -> None:
    images = write_tree(tmp_path, "imagenet", "coop")
    with pytest.raises(InputError, match="no part 'train'"):
        open_dataset("imagenet", root=tmp_path, part="train")
    write_image(images.parent / "train" / "n01443537" / "n01443537_7.JPEG")
    data = open_dataset("imagenet", root=tmp_path, part="train")
    assert list(data.labels or ()) == [1] and not any("first image missing" in note for note in data.notes)
    write_tree(tmp_path, "imagenet-a", "coop")
    with pytest.raises(InputError, match="ImageNet-A in .* has no part 'train'"):
        open_dataset("imagenet-a", root=tmp_path, part="train")
