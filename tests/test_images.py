"""Images: readable ones are read, others give a one-line error, and a folder is sorted by name."""

from __future__ import annotations

import io
import os
import random
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from testtime.images.reading import (
    IMAGE_SUFFIXES,
    MAX_PIXELS,
    as_rgb,
    find_images,
    folder,
    labels_from_folders,
    read_image,
)
from testtime.types import ImageError, InputError


def photo(width: int = 40, height: int = 30) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG whose header claims a size and whose data is one byte."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")


# reading


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "PPM"])
def test_lossless_image_comes_back_as_it_was(format: str, tmp_path: Path) -> None:
    path = tmp_path / f"image.{format.lower()}"
    path.write_bytes(encoded(photo(), format))
    for source in (path, str(path), path.read_bytes(), io.BytesIO(path.read_bytes())):
        image = read_image(source)
        assert type(image) is Image.Image and image.mode == "RGB"
        assert np.array_equal(np.array(image), np.array(photo()))
    assert read_image(path).info["path"] == str(path)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP"])
def test_one_pixel_is_an_image(format: str) -> None:
    assert read_image(encoded(Image.new("RGB", (1, 1), "red"), format)).size == (1, 1)


def test_first_frame_of_a_gif_is_read() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert read_image(data).getpixel((3, 3)) == (255, 0, 0)


def test_cmyk_jpeg_becomes_rgb() -> None:
    red = read_image(encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG")).getpixel((8, 8))
    assert np.allclose(red, (255, 0, 0), atol=6)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_is_dropped_as_clip_drops_it(mode: str) -> None:
    image = Image.new("RGBA", (4, 4), (200, 100, 50, 0)).convert(mode)
    assert np.array_equal(np.array(read_image(encoded(image, "PNG"))), np.array(image.convert("RGB")))


@pytest.mark.parametrize("transparency", [0, b"\x00\x80\xff"])
def test_palette_with_transparency_keeps_its_colours(transparency: int | bytes) -> None:
    image = Image.new("P", (3, 1))
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    image.putdata([0, 1, 2])
    result = read_image(encoded(image, "PNG", transparency=transparency))
    assert np.array(result).tolist() == [[[10, 20, 30], [40, 50, 60], [70, 80, 90]]]


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_sixteen_bit_grey_is_scaled_and_not_clipped(format: str) -> None:
    deep = np.array([[0, 256, 257, 32768, 65535]], dtype=np.uint16)
    result = np.array(read_image(encoded(Image.fromarray(deep), format)))
    assert result[0, :, 0].tolist() == [0, 1, 1, 128, 255]
    assert (result == result[..., :1]).all()


def test_other_deep_modes_are_scaled_too() -> None:
    assert as_rgb(Image.fromarray(np.array([[-5, 65535, 70000]], np.int32))).getpixel((2, 0)) == (255,) * 3
    assert as_rgb(Image.fromarray(np.array([[0.0, 1.0, np.nan]], np.float32))).getpixel((1, 0)) == (255,) * 3
    assert as_rgb(Image.fromarray(np.array([[0.0, 100.0]], np.float32))).getpixel((1, 0)) == (100,) * 3


def test_photograph_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held on its side
    sideways = photo(40, 30)
    image = read_image(encoded(sideways, "PNG", exif=exif))
    assert np.array_equal(np.array(image), np.rot90(np.array(sideways), -1))


def test_damaged_exif_does_not_cost_the_image() -> None:
    data = encoded(photo(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff" + b"\xff" * 40)
    assert read_image(data).size == (40, 30)


def test_file_is_closed_and_may_be_removed(tmp_path: Path) -> None:
    path = tmp_path / "image.jpg"
    path.write_bytes(encoded(photo(), "JPEG"))
    image = read_image(path)
    path.unlink()
    assert image.getpixel((0, 0)) and image.copy().size == (40, 30)


# unreadable files


def message(source: object) -> str:
    with pytest.raises(ImageError) as caught:
        read_image(source)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_bad_files_are_named_with_what_is_wrong(tmp_path: Path) -> None:
    jpeg = encoded(photo(), "JPEG")
    cases = {
        "text.jpg": (b"not an image at all\n", "not an image"),
        "cut.jpg": (jpeg[: len(jpeg) // 2], "truncated"),
        "empty.png": (b"", "empty"),
        "huge.png": (png_header(60_000, 60_000), "200,000,000 pixels"),
        "program.eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EOF\n", "not an image"),
    }
    for name, (data, expected) in cases.items():
        path = tmp_path / name
        path.write_bytes(data)
        assert message(path).startswith(f"{path}: ") and expected in message(path)
    assert "no such file" in message(tmp_path / "missing.jpg")
    assert "is a folder" in message(tmp_path)
    assert "image of 3 bytes" in message(b"abc")


@pytest.mark.parametrize("source", ["", "a\0b.jpg", "x" * 5000, "line\nbreak.jpg", "\udcff.jpg", None, 3, ["a.jpg"]])
def test_impossible_source_is_an_image_error(source: object) -> None:
    message(source).encode()  # printable, too


def test_pixels_are_counted_before_decoding_and_nothing_stays_changed() -> None:
    before = Image.MAX_IMAGE_PIXELS, list(warnings.filters)
    side = int(MAX_PIXELS**0.5)
    assert "pixels" in message(png_header(side + 1, side + 1))
    assert "damaged" in message(png_header(9_500, 9_500)).replace("truncated", "damaged")  # Pillow only warns here
    assert (Image.MAX_IMAGE_PIXELS, list(warnings.filters)) == before


def test_reading_in_threads_leaves_nothing_changed() -> None:
    before = Image.MAX_IMAGE_PIXELS, list(warnings.filters)
    data = encoded(photo(), "JPEG")
    with ThreadPoolExecutor(8) as pool:
        images = list(pool.map(read_image, [data] * 200))
    assert all(np.array_equal(np.array(image), np.array(images[0])) for image in images)
    assert (Image.MAX_IMAGE_PIXELS, list(warnings.filters)) == before


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "MPO", "PPM", "AVIF"])
def test_damaged_file_gives_an_image_or_an_image_error(format: str) -> None:
    Image.init()
    if format not in Image.SAVE:
        pytest.skip(f"this Pillow cannot write {format}")
    exif = Image.Exif()
    exif[0x0112] = 8
    options = {} if format in ("GIF", "BMP", "PPM") else {"exif": exif}
    if format == "TIFF":
        options |= {"compression": "tiff_lzw"}
    whole = encoded(photo(), format, **options)
    dice = random.Random(0)
    outcomes = set()
    for _ in range(150):
        data = bytearray(whole)
        if dice.random() < 0.4:
            del data[dice.randrange(len(data)) :]
        for _ in range(dice.choice([0, 1, 3, 30])):
            if data:
                # headers are where the surprises are
                data[dice.randrange(min(len(data), dice.choice([64, 1000, len(whole)])))] = dice.randrange(256)
        try:
            outcomes.add(read_image(bytes(data)).mode)
        except ImageError as error:
            assert "\n" not in str(error)
            outcomes.add("error")
    assert outcomes == {"RGB", "error"}


# finding


def test_folder_is_searched_below_and_sorted_by_name(tmp_path: Path) -> None:
    touch(tmp_path, "b/2.jpg", "b/10.JPG", "a.png", "B.webp", "b.gif", "notes.txt", "b/c/x.Tiff", ".hidden.jpg")
    touch(tmp_path, ".git/y.jpg", "b/.thumbs/z.jpg", "b/readme.md")
    found = [path.relative_to(tmp_path).as_posix() for path in find_images(tmp_path)]
    assert found == ["B.webp", "a.png", "b.gif", "b/10.JPG", "b/2.jpg", "b/c/x.Tiff"]
    assert find_images(str(tmp_path)) == find_images(tmp_path)


def test_linked_folder_is_followed_and_a_circle_ends(tmp_path: Path) -> None:
    touch(tmp_path, "data/cats/1.jpg", "photos/2.jpg")
    os.symlink(tmp_path / "data", tmp_path / "photos" / "linked")
    os.symlink(tmp_path / "photos", tmp_path / "data" / "back")
    found = [path.relative_to(tmp_path).as_posix() for path in find_images(tmp_path / "photos")]
    assert found == ["photos/2.jpg", "photos/linked/cats/1.jpg"]


def test_folder_named_like_an_image_is_searched(tmp_path: Path) -> None:
    touch(tmp_path, "album.jpg/1.png")
    assert find_images(tmp_path) == [tmp_path / "album.jpg" / "1.png"]


def test_pattern_is_sorted_and_keeps_to_images(tmp_path: Path) -> None:
    touch(tmp_path, "b/2.jpg", "b/1.jpg", "a/3.jpg", "a/.4.jpg", "a/5.txt", "b/6.png")
    found = [path.relative_to(tmp_path).as_posix() for path in find_images(f"{tmp_path}/**/*.jpg")]
    assert found == ["a/3.jpg", "b/1.jpg", "b/2.jpg"]
    assert len(find_images(f"{tmp_path}/**/*")) == 4


def test_file_whose_name_looks_like_a_pattern_is_itself(tmp_path: Path) -> None:
    touch(tmp_path, "cat[1].jpg", "cat1.jpg")
    assert find_images(tmp_path / "cat[1].jpg") == [tmp_path / "cat[1].jpg"]


def test_single_file_is_taken_whatever_it_is_called(tmp_path: Path) -> None:
    touch(tmp_path, "photo", "one.jpg")
    assert find_images(tmp_path / "photo") == [tmp_path / "photo"]
    assert find_images(tmp_path / "one.jpg") == [tmp_path / "one.jpg"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_list_keeps_its_order_and_looks_beside_itself(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    touch(tmp_path, "here/z.jpg", "lists/b é.jpg", "lists/z.jpg")
    text = "z.jpg\r\n\n# a comment\r\n  b é.jpg  \nmissing.jpg\nz.jpg"
    (tmp_path / "lists" / "all.TXT").write_bytes(text.encode(encoding))
    expected = [Path("z.jpg"), tmp_path / "lists" / "b é.jpg", Path("missing.jpg"), Path("z.jpg")]
    assert find_images(tmp_path / "lists" / "all.TXT") == expected


def test_dash_reads_paths_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "b.jpg\n\n# no\na.jpg\n"
    assert find_images("-", stdin=io.StringIO(lines)) == [Path("b.jpg"), Path("a.jpg")]
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert find_images("-") == [Path("b.jpg"), Path("a.jpg")]


def test_nothing_found_says_where_and_what_for(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("# nothing\n\n")
    (tmp_path / "empty").mkdir()
    touch(tmp_path, "empty/.hidden.jpg", "empty/notes.md")
    cases = {
        str(tmp_path / "missing"): "No such file or folder",
        str(tmp_path / "missing.jpg"): "No such file or folder",
        str(tmp_path / "empty"): ", ".join(IMAGE_SUFFIXES),
        f"{tmp_path}/*.jpg": "No images match",
        str(tmp_path / "list.txt"): "No images in",
        "x" * 5000: "No such file or folder",
        "a\0b": "No such file or folder",
    }
    for source, expected in cases.items():
        with pytest.raises(InputError) as caught:
            find_images(source)
        assert expected in str(caught.value) and repr(source) in str(caught.value)
    with pytest.raises(InputError, match="standard input"):
        find_images("-", stdin=[])
    with pytest.raises(InputError, match="empty path"):
        find_images("")


def test_folder_yields_images_in_order_and_stops_at_a_bad_one(tmp_path: Path) -> None:
    for name, colour in (("2.png", "lime"), ("1.png", "red")):
        (tmp_path / name).write_bytes(encoded(Image.new("RGB", (4, 4), colour), "PNG"))
    touch(tmp_path, "3.png")
    images = folder(tmp_path)
    first, second = next(images), next(images)
    assert first.info["path"] == str(tmp_path / "1.png") and first.getpixel((0, 0)) == (255, 0, 0)
    assert second.getpixel((0, 0)) == (0, 255, 0)
    with pytest.raises(ImageError, match=r"3\.png"):
        next(images)


def test_folder_without_images_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        folder(tmp_path)


def test_labels_come_from_folder_names() -> None:
    paths = [Path("x/Maine_Coon/1.jpg"), "x/BEAGLE/2.jpg", "x/unknown/3.jpg", "4.jpg"]
    assert labels_from_folders(paths, ["beagle", "maine coon"]) == [1, 0, None, None]
    assert labels_from_folders(["a/cat/1.jpg"], ["cat", "Cat"]) == [0]
