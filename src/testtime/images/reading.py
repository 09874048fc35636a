"""Images: finding them, and reading them into Pillow, or saying in one line why not."""

from __future__ import annotations

import codecs
import glob
import io
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from testtime.files import NotRegular, opened, read_bytes
from testtime.registry import folded_name
from testtime.types import ImageError, InputError, StoredImage

MAX_PIXELS = 200_000_000  # an image has no more, wherever it is from; a header can promise far more in a few bytes
ORDINARY = 2**24  # pixels up to which Pillow's own limit is no matter
PIXEL = 12  # bytes that a pixel takes at most while an image is decoded, turned and brought to RGB

IMAGE_SUFFIXES = (".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
LIST_SUFFIXES = (".lst", ".txt")

# the formats of those suffixes; Pillow knows others, and one of them (EPS) starts a program on the file
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "MPO", "PNG", "PPM", "TIFF", "WEBP")


def read_image(
    source: str | Path | StoredImage | bytes | BinaryIO, admit: Callable[[tuple[int, int]], object] | None = None
) -> Image.Image:
    """The image in a file, in RGB, upright by its EXIF orientation, fully loaded; the first frame of several.

    Transparency is dropped and not composited, as in CLIP's own `convert("RGB")`. `info["path"]` is the path, or the
    name of a stored image, where there is one. Whatever is wrong with the file is an ImageError; more than
    `MAX_PIXELS` are noticed before decoding. `admit` hears width and height once they are known, and may wait, or raise
    what it likes: nothing is decoded before.
    """
    if not isinstance(source, (str, bytes, StoredImage)) and not hasattr(source, "read"):
        raise ImageError(f"Expected a path, bytes or an open file; got {type(source).__name__}.")
    file: BinaryIO | None = None
    try:
        with blamed(name_of(source)), _pillow_limits():
            file = _file(source)
            image = _header(file)
        if admit is not None:
            admit(image.size)
        with blamed(name_of(source)), _pillow_limits():
            image.load()
            upright = _upright(image)
            Image.Image.close(image)  # its pixels, which are as many, but not its file
            result = as_rgb(upright)
        if file is not source and not isinstance(source, bytes):
            result.info["path"] = str(source)
        return result
    finally:
        if file is not None and file is not source:
            file.close()


def _file(source: str | StoredImage | bytes | BinaryIO) -> BinaryIO:
    """A source opened; what is a path but no regular file is refused at once, where a pipe would be waited for."""
    if isinstance(source, (str, Path)):
        return opened(source)
    if isinstance(source, StoredImage):
        source = source.read_bytes()
    return io.BytesIO(source) if isinstance(source, bytes) else source


def _header(file: BinaryIO) -> Image.Image:
    Image.init()
    image = Image.open(file, formats=[name for name in FORMATS if name in Image.OPEN])
    if image.width * image.height > MAX_PIXELS:
        raise Image.DecompressionBombError
    return image


@contextmanager
def blamed(name: str) -> Iterator[None]:
    """Say what is wrong with the file of that name, whatever it is."""
    try:
        yield
    # Pillow's decoders raise nearly anything on a damaged file: SyntaxError, struct.error, KeyError, ...
    except Exception as error:
        raise ImageError(f"{name}: {_wrong(error)}") from error


def _upright(image: Image.Image) -> Image.Image:
    """The image turned by its EXIF orientation; always a new one, which holds no file."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # damaged EXIF says nothing about the pixels, which are fine
        return image.copy()


def name_of(source: object) -> str:
    """What to call a source in a message."""
    if isinstance(source, (str, StoredImage)):
        return _line(source) or "''"
    if isinstance(source, bytes):
        return f"image of {len(source):,} bytes"
    name = getattr(source, "name", None) or getattr(source, "filename", None)
    return _line(name) if isinstance(name, (str, Path)) and name else "image"


def _wrong(error: Exception) -> str:
    """What is wrong, in words for whoever supplied the file."""
    match error:
        case FileNotFoundError():
            return "no such file."
        case IsADirectoryError():
            return "is a folder; give an image file in it."
        case NotRegular():
            return "is a pipe, a socket or a device; give an image file."
        case PermissionError():
            return "may not be read (permission denied)."
        case Image.DecompressionBombError():
            return f"has more than {MAX_PIXELS:,} pixels; scale it down first."
        case UnidentifiedImageError():
            return f"is empty, damaged or not an image (read: {', '.join(FORMATS)})."
        case MemoryError():
            return "is damaged, or too large for the memory."
        case OSError(strerror=str(reason)):
            return f"cannot be read ({_line(reason)})."
    return f"is damaged ({_line(error) or type(error).__name__})."


def _line(text: object) -> str:
    """On one line, and printable even where a file name is not UTF-8."""
    return " ".join(str(text).encode("utf-8", "backslashreplace").decode().split())


_limits = threading.Lock()
_readers = 0
_undo = ExitStack()  # the warning filters and Pillow's limit as they were


@contextmanager
def _pillow_limits() -> Iterator[None]:
    """While any thread is inside, Pillow refuses above MAX_PIXELS and does not warn; then all is as it was.

    Pillow asks for its limit when it opens a file, and again when it cuts a box out of an image.

    Both are settings of the whole process. Threads that each set them back could restore what another had
    set, so the first to enter sets them and the last to leave sets them back.
    """
    global _readers
    with _limits:
        if _readers == 0:
            _undo.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
            warnings.filterwarnings("ignore", module=r"PIL\.")
            _undo.callback(setattr, Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
            Image.MAX_IMAGE_PIXELS = MAX_PIXELS // 2  # Pillow warns above it and refuses above twice that
        _readers += 1
    try:
        yield
    finally:
        with _limits:
            _readers -= 1
            if _readers == 0:
                _undo.close()


def cut(image: Image.Image, box: tuple[int, int, int, int]) -> Image.Image:
    """A box of an image (left, top, right, bottom), also where it is larger than Pillow likes files to be."""
    left, top, right, bottom = box
    if (right - left) * (bottom - top) <= min(ORDINARY, Image.MAX_IMAGE_PIXELS or ORDINARY):
        return image.crop(box)
    with _pillow_limits():
        return image.crop(box)


def seen(image: Image.Image) -> Image.Image:
    """The image in RGB, if there is something to see, and not more than MAX_PIXELS."""
    if not image.width or not image.height:
        raise ImageError(f"An image of {image.width} x {image.height} pixels has nothing to see.")
    if image.width * image.height > MAX_PIXELS:
        raise ImageError(f"An image of {image.width} x {image.height} pixels {_wrong(Image.DecompressionBombError())}")
    with blamed(name_of(image)):
        image.load()  # it may be a file that Pillow has not read yet
        return as_rgb(image)


def as_rgb(image: Image.Image) -> Image.Image:
    """The image in RGB: itself where it is already.

    Deep greyscale is scaled to 8 bits, where Pillow would clip: integers from 0..65535 (Pillow's convention
    for modes I;16 and I), floats from 0..1, or from 0..255 where any is above 1.
    """
    if image.mode == "RGB":
        return image
    if image.mode == "I" or image.mode.startswith("I;16"):
        deep = np.asarray(image).astype(np.int32)
        np.clip(deep, 0, 65535, out=deep)  # in place, as what follows: an image may be large
        deep += 128
        deep //= 257
        return Image.fromarray(deep.astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        real = np.nan_to_num(np.asarray(image), nan=0.0)
        if real.max(initial=0) <= 1:
            real *= 255
        return Image.fromarray(real.clip(0, 255, out=real).round(out=real).astype(np.uint8)).convert("RGB")
    if image.mode in ("P", "PA", "RGBa", "La"):  # by way of RGBA: directly Pillow warns, or cannot
        image = image.convert("LA" if image.mode == "La" else "RGBA")
    return image.convert("RGB")


def find_images(source: str | Path, stdin: Iterable[str] | None = None) -> list[Path]:
    """The image files that `source` stands for.

    - a folder: every image in it and below, sorted by path; what starts with a dot is left out
    - a pattern, such as `photos/**/*.jpg`: likewise
    - a list (.txt or .lst): the paths in it, one a line, in its order, as seen from the current folder or
      else from the list's; blank lines and # comments are skipped, and a path need not exist
    - `-`: such lines on standard input
    - any other file: itself
    """
    text = str(source)
    if text == "-":
        return _listed(_standard_input() if stdin is None else stdin, "standard input", Path())
    if not text:
        raise InputError("No images given: an empty path. Give a folder, a pattern, a file, a list or '-'.")
    path = Path(source)
    if os.path.isdir(path):
        return _sorted_images(_walk(path), f"in {text!r}")
    if os.path.exists(path):
        if path.suffix.lower() not in LIST_SUFFIXES:
            return [path]
        return _listed(_lines(path), repr(text), path.parent)
    if glob.has_magic(text):
        matches = (Path(match) for match in glob.iglob(text, recursive=True) if os.path.isfile(match))
        return _sorted_images(matches, f"match {text!r}")
    raise InputError(f"No such file or folder: {text!r}.")


def folder(source: str | Path) -> Iterator[Image.Image]:
    """The images that `source` stands for, in the order of `find_images`, each with its `info["path"]`.

    A source without images is an error at once; a bad image is one when its turn comes.
    """
    return map(read_image, find_images(source))


def labels_from_folders(paths: Sequence[str | Path], classnames: Sequence[str]) -> list[int | None]:
    """For each path, the class that its folder is named after, or None; for scoring only.

    Case does not matter, and `_` counts as a space.

    >>> labels_from_folders(["pets/Maine_Coon/1.jpg", "pets/new/2.jpg"], ["beagle", "maine coon"])
    [1, None]
    """
    numbers = class_numbers(classnames)
    return [numbers.get(folded_name(Path(path).parent.name)) for path in paths]


def class_numbers(classnames: Sequence[str]) -> dict[str, int]:
    """The place of each class by its folded name; the first of several that share one."""
    return {folded_name(name): number for number, name in reversed(list(enumerate(classnames)))}


def _sorted_images(paths: Iterable[Path], where: str) -> list[Path]:
    found = {path.as_posix(): path for path in paths if path.suffix.lower() in IMAGE_SUFFIXES}
    if not found:
        raise InputError(f"No images {where}; looked for {', '.join(IMAGE_SUFFIXES)}.")
    return [found[name] for name in sorted(found)]


def _walk(top: Path) -> Iterator[Path]:
    """Files below a folder; links to folders are followed, except back to one that they lie in."""
    waiting: list[tuple[Path, tuple[str, ...]]] = [(top, (os.path.realpath(top),))]
    while waiting:
        here, above = waiting.pop()
        try:
            names = [entry.name for entry in os.scandir(here) if not entry.name.startswith(".")]
        except OSError as error:
            raise InputError(f"Cannot list the folder {str(here)!r}: {error.strerror}.") from error
        for name in names:
            path = here / name
            if os.path.isdir(path):
                real = os.path.realpath(path) if os.path.islink(path) else os.path.join(above[-1], name)
                if real not in above:
                    waiting.append((path, (*above, real)))
            elif os.path.isfile(path):
                yield path


def _lines(path: Path) -> list[str]:
    try:
        return _decoded(read_bytes(path))
    except OSError as error:
        raise InputError(f"Cannot read the list {str(path)!r}: {error.strerror}.") from error


def _standard_input() -> Iterable[str]:
    try:
        data = getattr(sys.stdin, "buffer", sys.stdin).read()
    except (AttributeError, ValueError):  # there is none, or it is closed
        raise InputError("Nothing can be read from standard input: it is closed. Give a folder or a list.") from None
    return _decoded(data) if isinstance(data, bytes) else data.split("\n")


def _decoded(data: bytes) -> list[str]:
    # PowerShell writes UTF-16; file names that are not UTF-8 come through as the system hands them out
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = data.decode("utf-16", "replace") if wide else data.decode("utf-8-sig", "surrogateescape")
    return text.split("\n")


def _listed(lines: Iterable[str], where: str, beside: Path) -> list[Path]:
    stripped = (line.removeprefix("\ufeff").strip() for line in lines)
    paths = [Path(line) for line in stripped if line and not line.startswith("#")]
    if not paths:
        raise InputError(f"No images in {where}; expected a path on each line.")
    # a path that is nowhere stays as it is written, for the message when it is read
    return [beside / path if not os.path.exists(path) and os.path.exists(beside / path) else path for path in paths]
