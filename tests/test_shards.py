from __future__ import annotations

import io
import pickle
import tarfile
from pathlib import Path

import pytest
from trees import png

from testtime.datasets import open_dataset
from testtime.datasets.shards import find_shards
from testtime.images.reading import read_image
from testtime.types import ImageError, InputError


def write_tar(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:
        for name, content in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))
    return path


def test_members_of_one_key_are_one_sample(tmp_path) -> None:
    file = write_tar(
        tmp_path / "a.tar",
        {"002.cls": b"1\n", "002.png": png("blue"), "x/001.PNG": png("red"), "x/001.cls": b"0", "notes.md": b"hello"},
    )
    data = open_dataset(file)
    assert data.labels == [1, 0] and data.name == "a" and [str(path) for path in data.paths] == [
        f"{file}/002.png", f"{file}/x/001.PNG",
    ]  # fmt: skip
    assert read_image(data.paths[0]).getpixel((0, 0)) == (0, 0, 255)
    assert read_image(data.paths[1]).getpixel((0, 0)) == (255, 0, 0)
    assert read_image(data.paths[1]).info["path"] == f"{file}/x/001.PNG"


def test_names_of_classes_come_from_text_or_json(tmp_path) -> None:
    text = write_tar(tmp_path / "t.tar", {"1.jpg": b"-", "1.txt": b"grand_piano\n", "2.jpg": b"-", "2.txt": b"cat"})
    assert open_dataset(text).classnames == ["cat", "grand piano"] and open_dataset(text).labels == [1, 0]
    as_json = write_tar(
        tmp_path / "j.tar",
        {
            "1.jpg": b"-",
            "1.json": b'{"label": 1}',
            "2.jpg": b"-",
            "2.json": b"0",
            "3.jpg": b"-",
            "3.json": b'{"cls":1}',
        },
    )
    assert open_dataset(as_json).labels == [1, 0, 1]


def test_numbers_are_named_from_beside_the_shards(tmp_path) -> None:
    write_tar(tmp_path / "s" / "0.tar", {"1.jpg": b"-", "1.cls": b"1"})
    (tmp_path / "s" / "classnames.txt").write_text("cat\ndog\n")
    assert open_dataset(tmp_path / "s").classnames == ["cat", "dog"]


def test_images_without_labels_are_unlabelled(tmp_path) -> None:
    file = write_tar(tmp_path / "a.tar", {"0.0001_shower cap_0.8.jpg": b"-", "0.0001_clock_0.9.jpg": b"-"})
    data = open_dataset(file)
    assert data.labels is None and len(data) == 2 and data.notes == ()


def test_dots_inside_a_name_do_not_separate_an_image_from_its_label(tmp_path) -> None:
    file = write_tar(tmp_path / "a.tar", {"0.01_a_0.8.jpg": b"-", "0.01_a_0.8.cls": b"0", "0.01_b_0.7.jpg": b"-",
                                          "0.01_b_0.7.cls": b"1"})  # fmt: skip
    assert open_dataset(file).labels == [0, 1]


def test_folders_globs_and_braces_name_the_same_shards_in_order(tmp_path) -> None:
    for number in (2, 0, 10, 1):
        write_tar(tmp_path / "w" / f"shard-{number:03d}.tar", {f"{number}.jpg": b"-", f"{number}.cls": b"0"})
    whole = open_dataset(tmp_path / "w")
    assert [path.member for path in whole.paths] == ["0.jpg", "1.jpg", "2.jpg", "10.jpg"]
    assert open_dataset(f"{tmp_path}/w/shard-*.tar").paths == whole.paths
    assert open_dataset(f"{tmp_path}/w/shard-{{000..002}}.tar").paths == whole.paths[:3]
    assert open_dataset(f"{tmp_path}/w/shard-{{010,001}}.tar").paths == [whole.paths[3], whole.paths[1]]
    with pytest.raises(InputError, match=r"No file .*shard-003\.tar, which"):
        find_shards(f"{tmp_path}/w/shard-{{000..003}}.tar")
    with pytest.raises(InputError, match=r"No file .*none-\*\.tar\."):
        open_dataset(tmp_path / "none-*.tar")


def test_a_stored_image_survives_pickling_to_another_process(tmp_path) -> None:
    image = open_dataset(write_tar(tmp_path / "a.tar", {"1.png": png()})).paths[0]
    assert pickle.loads(pickle.dumps(image)) == image


def test_a_damaged_image_is_named_by_its_path(tmp_path) -> None:
    data = open_dataset(write_tar(tmp_path / "a.tar", {"1.png": b"no image"}))
    with pytest.raises(ImageError, match=r"a\.tar/1\.png: is empty, damaged"):
        read_image(data.paths[0])
    (tmp_path / "a.tar").unlink()
    with pytest.raises(ImageError, match=r"a\.tar/1\.png: no such file"):
        read_image(data.paths[0])


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"1.jpg": b"-", "1.cls": b"cat"}, "should hold a class number; it holds 'cat'"),
        ({"1.jpg": b"-", "1.json": b"{"}, "is not a label"),
        ({"1.jpg": b"-", "1.txt": b"\xff"}, "is not a label"),
        ({"readme.md": b"-"}, "No image in"),
    ],
)
def test_damaged_samples_are_named(tmp_path, members, message) -> None:
    with pytest.raises(InputError, match=message):
        open_dataset(write_tar(tmp_path / "a.tar", members))


def test_a_shard_that_is_cut_short_or_compressed_is_refused(tmp_path) -> None:
    file = write_tar(tmp_path / "a.tar", {"1.png": png() * 100, "2.png": png() * 100})
    file.write_bytes(file.read_bytes()[:12000])
    with pytest.raises(InputError, match="cut short"):
        open_dataset(file)
    squeezed = write_tar(tmp_path / "b.tar", {"1.png": png()}, "w:gz")
    with pytest.raises(InputError, match="not a plain tar file"):
        open_dataset(squeezed)
    (tmp_path / "c.tar").mkdir()
    with pytest.raises(InputError, match=r"Cannot read .*c\.tar"):
        open_dataset(f"{tmp_path}/[c].tar")
