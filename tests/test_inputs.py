"""Files that are not plain images: HEIF and AVIF are read, and whatever is left out is named with the reason."""

from __future__ import annotations

import io
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_shards import write_tar

from testtime.datasets import open_dataset
from testtime.images import formats
from testtime.images.reading import find_images, read_image, search
from testtime.types import ImageError, InputError, MissingPart

pillow_heif = pytest.importorskip("pillow_heif", reason="needs testtime[heif]")


def photo(width: int = 64, height: int = 48) -> Image.Image:
    rows, columns = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([columns * 3, rows * 4, columns * 0 + 90], -1).astype(np.uint8))


def heic(image: Image.Image | None = None, **options: Any) -> bytes:
    buffer = io.BytesIO()
    pillow_heif.from_pillow(image or photo()).save(buffer, quality=95, **options)
    return buffer.getvalue()


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a module one that is not installed."""
    return lambda name: monkeypatch.setitem(sys.modules, name, None)


# HEIF and AVIF


def test_heif_is_read_like_any_image(tmp_path: Path) -> None:
    (tmp_path / "a.HEIC").write_bytes(heic())
    image = read_image(tmp_path / "a.HEIC")
    assert type(image) is Image.Image and image.mode == "RGB" and image.info["path"] == str(tmp_path / "a.HEIC")
    assert np.abs(np.asarray(image).astype(int) - np.asarray(photo())).mean() < 8
    assert read_image(heic(photo().convert("L"))).mode == "RGB"
    assert read_image(heic(photo().convert("RGBA"))).size == (64, 48)


def test_heif_is_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, clockwise
    turned = np.asarray(photo().transpose(Image.Transpose.ROTATE_270)).astype(int)
    assert np.abs(np.asarray(read_image(heic(exif=exif.tobytes()))).astype(int) - turned).mean() < 8


def test_avif_is_read() -> None:
    if formats.missing(".avif"):
        pytest.skip("this Pillow reads no AVIF")
    buffer = io.BytesIO()
    photo().save(buffer, "AVIF")
    assert read_image(buffer.getvalue()).size == (64, 48)


def test_heif_is_not_registered_with_pillow_and_not_imported_before_it_is_met(tmp_path: Path) -> None:
    (tmp_path / "a.heic").write_bytes(heic())
    photo().save(tmp_path / "b.png")
    code = f"""
import sys
from PIL import Image
from testtime.datasets import open_dataset
from testtime.images.reading import read_image
data = open_dataset({str(tmp_path)!r})
read_image(data.paths[1])
print(len(data), "pillow_heif" in sys.modules, "av" in sys.modules)
read_image(data.paths[0])
print("pillow_heif" in sys.modules, "HEIF" in Image.OPEN)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["2 False False", "True False"]


def test_threads_read_heif_at_once() -> None:
    data = heic()
    expected = read_image(data).tobytes()
    with ThreadPoolExecutor(8) as pool:
        assert {image.tobytes() for image in pool.map(read_image, [data] * 40)} == {expected}


def test_heif_pixel_limit_is_checked_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("testtime.images.reading.MAX_PIXELS", 1_000)
    monkeypatch.setattr(pillow_heif.HeifImageFile, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(ImageError, match="more than 1,000 pixels"):
        read_image(heic())


def test_heif_whose_header_claims_another_size_is_refused() -> None:
    data = heic()
    place = data.index(b"ispe") + 8
    for size in ((8, 8), (14_000, 14_000), (60_000, 60_000), (0, 0)):
        with pytest.raises(ImageError, match="is damaged|more than"):
            read_image(data[:place] + struct.pack(">II", *size) + data[place + 8 :])


def test_heif_cut_anywhere_is_an_image_or_refused() -> None:
    data, dice, outcomes = heic(), random.Random(0), set()
    for size in (*range(0, 64), *dice.sample(range(len(data)), 100), len(data)):
        try:
            outcomes.add(read_image(data[:size]).size)
        except ImageError as error:
            assert "\n" not in str(error)
            outcomes.add("refused")
    assert outcomes == {(64, 48), "refused"}


def test_heif_without_the_extra_says_how_to_get_it(tmp_path: Path, absent: Any, cli: Any) -> None:
    file = tmp_path / "a.heic"
    file.write_bytes(heic())
    absent("pillow_heif")
    with pytest.raises(ImageError, match=r"is a HEIF image, which needs pillow-heif: pip install 'testtime\[heif\]'"):
        read_image(file)
    with pytest.raises(MissingPart, match=r"pip install 'testtime\[heif\]'"):
        open_dataset(file)
    done = cli("run", file, "--classes", "cat,dog", "--encoder", "tiny")
    assert done.code == 2 and "testtime[heif]" in done.err


def test_avif_without_support_in_pillow_says_how_to_get_it(tmp_path: Path, absent: Any) -> None:
    photo().save(tmp_path / "b.png")
    (tmp_path / "a.avif").write_bytes(b"")
    absent("PIL._avif")
    assert search(tmp_path).notes == ("left out 1 file: 1 .avif (pip install 'pillow>=11.3')",)


# what is left out


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """One image among files of many kinds."""
    folder = tmp_path / "mixed"
    (folder / "deep").mkdir(parents=True)
    photo().save(folder / "z.png")
    for name in ("a.heic", "deep/b.HEIC", "c.mp4", "d.docx", "e", "f.jxl", "g.wmv"):
        (folder / name).write_bytes(b"")
    companions = (
        ".hidden.docx Thumbs.db README LICENSE readme.md labels.csv list.txt IMG.AAE meta.json a.xmp desktop.ini"
    )
    for name in companions.split():
        (folder / name).write_bytes(b"")
    return folder


NOTE = (
    "left out 7 files: 2 .heic (pip install 'testtime[heif]'), 1 .mp4 (pip install 'testtime[video]'), "
    "1 without a suffix (not an image), 1 .docx (not an image), 1 .jxl (not read; convert to .png or .jpg), "
    "1 .wmv (not read; convert to .mp4)"
)


def test_files_left_out_are_named_with_the_reason(mixed: Path, absent: Any) -> None:
    absent("pillow_heif")
    absent("av")
    found = search(mixed)
    assert found.paths == find_images(mixed) == [mixed / "z.png"] and found.notes == (NOTE,)
    assert open_dataset(mixed).notes[-1] == NOTE
    assert open_dataset(f"{mixed}/**").notes == (NOTE,)
    assert open_dataset(f"{mixed}/*.[pd]*").notes == ("left out 1 file: 1 .docx (not an image)",)
    assert search(mixed / "z.png").notes == ()


def test_note_is_printed_once_on_standard_error(mixed: Path, absent: Any, cli: Any) -> None:
    absent("pillow_heif")
    absent("av")
    done = cli("run", mixed, "--classes", "cat,dog", "--encoder", "tiny")
    assert done.code == 0 and done.err.count("left out") == 1 and f"note: {NOTE}" in " ".join(done.err.split())
    assert "left out" not in done.out


def test_class_folders_keep_their_labels_and_name_what_is_left_out(tmp_path: Path, absent: Any) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        photo().save(tmp_path / "pets" / name / "1.png")
    (tmp_path / "pets" / "dog" / "2.heic").write_bytes(heic())
    assert open_dataset(tmp_path / "pets").labels == [0, 1, 1]
    absent("pillow_heif")
    data = open_dataset(tmp_path / "pets")
    assert data.labels == [0, 1] and data.notes == ("left out 1 file: 1 .heic (pip install 'testtime[heif]')",)


@pytest.mark.parametrize("source", ["folder", "folder/*", "deep"])
def test_nothing_but_files_left_out_is_an_error_that_names_them(tmp_path: Path, absent: Any, source: str) -> None:
    (tmp_path / "deep" / "folder").mkdir(parents=True)
    (tmp_path / "folder").symlink_to(tmp_path / "deep" / "folder")
    for number in range(3):
        (tmp_path / "folder" / f"{number}.heic").write_bytes(heic())
    assert len(open_dataset(tmp_path / source)) == 3
    absent("pillow_heif")
    with pytest.raises(InputError, match=r"left out 3 files: 3 .heic \(pip install 'testtime\[heif\]'\)\.$"):
        open_dataset(tmp_path / source)


def test_many_kinds_are_counted_and_not_listed(tmp_path: Path) -> None:
    photo().save(tmp_path / "z.png")
    for letter in "abcdefghij":
        (tmp_path / f"x.{letter}{letter}").write_bytes(b"")
    (note,) = search(tmp_path).notes
    assert note.startswith("left out 10 files: 1 .aa (not an image), ") and note.endswith(", and 4 more kinds")


def test_companions_alone_are_no_note_and_no_dataset(tmp_path: Path) -> None:
    (tmp_path / "README").write_bytes(b"")
    (tmp_path / "list.txt").write_bytes(b"")
    with pytest.raises(InputError, match="holds no dataset: class folders"):
        open_dataset(tmp_path)
    photo().save(tmp_path / "z.png")
    assert open_dataset(tmp_path).notes == ()


def test_members_of_shards_that_are_left_out_are_named(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    photo().save(buffer, "PNG")
    members = {"1.png": buffer.getvalue(), "1.cls": b"0", "2.heic": heic(), "2.cls": b"1", "3.mp4": b"", "4.docx": b""}
    data = open_dataset(write_tar(tmp_path / "a.tar", members))
    assert [str(path).rpartition("/")[2] for path in data.paths] == ["1.png", "2.heic"]
    assert read_image(data.paths[1]).size == (64, 48) and "left out 2 files" in data.notes[-1]
    with pytest.raises(InputError, match="No image in .*left out 1 file: 1 .mp4"):
        open_dataset(write_tar(tmp_path / "b.tar", {"3.mp4": b""}))
