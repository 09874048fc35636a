from __future__ import annotations

import json

import pytest
from trees import TREES, write_image, write_tree

import testtime.datasets.check as check
from testtime.datasets.benchmarks import BENCHMARKS


@pytest.fixture
def cli(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    return cli


@pytest.fixture
def small(monkeypatch) -> None:
    """The benchmarks, held to the sizes of their miniatures."""
    sizes = {name: (len({label for _, label, _ in tree.samples}), len(tree.samples)) for name, tree in TREES.items()}
    rows = []
    for row in BENCHMARKS:
        classes, images = sizes[row.name]
        rows.append(row._replace(images=images, classes=row.classes if row.kind == "imagenet" else classes))
    monkeypatch.setattr(check, "BENCHMARKS", tuple(rows))


@pytest.mark.parametrize("layout", ["coop", "tpt"])
def test_a_whole_tree_is_complete(cli, small, tmp_path, layout) -> None:
    for name in TREES:
        write_tree(tmp_path, name, layout)
    code, out, _ = cli("data", "check", tmp_path, "--json")
    found = json.loads(out)["datasets"]
    assert code == 0 and {row["state"] for row in found} == {"complete"}
    assert [row["name"] for row in found] == list(TREES)
    assert all(row["layout"].lower() in (layout, "both") and row["images"] == row["expected_images"] for row in found)
    code, out, _ = cli("data", "check", tmp_path)
    assert code == 0 and out.count("complete") == 15 and "Missing" not in out


def test_each_state_is_reported_with_what_to_do(cli, small, tmp_path) -> None:
    write_tree(tmp_path, "dtd", "coop")
    images = write_tree(tmp_path, "caltech101", "tpt")
    (images / "Faces" / "image_0426.jpg").unlink()
    write_image(write_tree(tmp_path, "imagenet-v2", "coop") / "7" / "more.jpeg")
    write_tree(tmp_path, "food101", "coop")
    (tmp_path / "food-101" / TREES["food101"].split).write_text("{")
    code, out, _ = cli("data", "check", tmp_path, "--json")
    found = {row["name"]: row for row in json.loads(out)["datasets"]}
    assert code == 1  # something is broken
    states = {name: row["state"] for name, row in found.items() if row["state"] != "missing"}
    assert states == {
        "dtd": "complete", "caltech101": "half copied", "imagenet-v2": "differs", "food101": "broken",
    }  # fmt: skip
    assert "1 of 3 listed images are missing, Faces/image_0426.jpg first" in found["caltech101"]["notes"]
    assert "is not a split file" in found["food101"]["notes"][0]
    assert "UCF-101-midframes.zip from https://" in found["ucf101"]["notes"][0]
    code, out, _ = cli("data", "check", tmp_path)
    assert code == 1 and "Missing: 11 of 15" in out and "UCF-101-midframes.zip" in out
    assert "caltech101: 1 of its 3 test images are missing; 1 of 3 listed images" in " ".join(out.split())
    assert "imagenet-v2: 1 more than the 5 images of its test part" in " ".join(out.split())


def test_half_copied_is_usable(cli, tmp_path) -> None:
    write_tree(tmp_path, "eurosat", "coop")
    code, out, _ = cli("data", "check", tmp_path)
    assert code == 0 and "half copied" in out and "8,100" in out


def test_a_flat_validation_folder_is_broken(cli, tmp_path) -> None:
    write_image(tmp_path / "imagenet" / "val" / "ILSVRC2012_val_00000001.JPEG")
    code, out, _ = cli("data", "check", tmp_path)
    assert code == 1 and "broken" in out and "no class folders" in " ".join(out.split())


def test_a_wrong_root_is_wrong_input(cli, tmp_path) -> None:
    code, out, err = cli("data", "check", tmp_path / "nowhere")
    assert code == 2 and "No folder" in err and out == ""
    code, out, err = cli("data", "check", tmp_path)
    assert code == 2 and "None of the 15 benchmarks" in err and "Missing: 15 of 15" in out


@pytest.mark.parametrize("width", [80, 120])
def test_lines_fit_the_terminal_and_addresses_stay_whole(cli, tmp_path, monkeypatch, width) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for name in ("imagenet-a", "imagenet-v2", "fgvc-aircraft"):
        write_tree(tmp_path, name, "coop")
    _, out, _ = cli("data", "check", tmp_path)
    assert max(map(len, out.splitlines())) <= width
    missing = [row for row in BENCHMARKS if row.name not in ("imagenet-a", "imagenet-v2", "fgvc-aircraft")]
    assert all(row.source in out for row in missing)


def test_info_says_what_there_is_to_know(cli) -> None:
    code, out, _ = cli("data", "info", "imagenet_r")
    assert code == 0 and "30,000 images, 200 classes" in out and "imagenet-rendition/imagenet-r" in out
    assert "and 73 more" in out and "art of the {}." in out
    code, out, _ = cli("data", "info", "dtd", "--json")
    row = json.loads(out)
    assert row["images"] == 1692 and row["templates"] == {"released": ["{} texture."], "paper": ["{} texture."]}
    assert "split_zhou_DescribableTextures.json" in cli("data", "info", "dtd")[1]
    code, _, err = cli("data", "info", "dttd")
    assert code == 2 and "Did you mean 'dtd'" in err


def test_the_list_of_datasets_names_all_fifteen(cli) -> None:
    _, out, _ = cli("list", "datasets")
    assert all(row.name in out and f"{row.images:,} images" in out for row in BENCHMARKS)


def test_real_caltech_is_complete(cli, data) -> None:
    code, out, _ = cli("data", "check", data, "--json")
    found = next(row for row in json.loads(out)["datasets"] if row["name"] == "caltech101")
    assert code == 0 and (found["state"], found["images"], found["classes"]) == ("complete", 2465, 100)
