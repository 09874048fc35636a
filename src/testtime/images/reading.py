"""Images: finding them and reading them with Pillow, with one-line errors."""

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
from typing import BinaryIO, NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from testtime.errors import ImageError, InputError
from testtime.files import NotRegular, opened, read_bytes
from testtime.images import formats
from testtime.images.formats import IMAGE_SUFFIXES as IMAGE_SUFFIXES
from testtime.registry import folded_name
from testtime.stored import StoredImage

MAX_PIXELS = 200_000_000  # limit for any image; a few bytes of header can claim far more
SMALL_CROP = 2**24  # pixels up to which Pillow's own limit does not matter
BYTES_PER_PIXEL = 12  # peak memory while an image is decoded, rotated and converted to RGB

LIST_SUFFIXES = (".lst", ".txt")

# the formats of the suffixes; Pillow reads others, and for one of them (EPS) it runs a program on the file
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "MPO", "PNG", "PPM", "TIFF", "WEBP")
HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1")


def read_image(
    source: str | Path | StoredImage | bytes | BinaryIO, admit: Callable[[tuple[int, int]], object] | None = None
) -> Image.Image:
    """The image in a file, in RGB, upright by its EXIF orientation, fully loaded; the first frame of several.

    Transparency is dropped and not composited, as in CLIP's own `convert("RGB")`. `info["path"]` is the path or the
    name of a stored image, if any. Any problem with the file is an ImageError; more than `MAX_PIXELS` is detected
    before decoding. `admit` is called with (width, height) before anything is decoded; it may wait or raise anything.
    A path that does not exist may be the name of a frame of a video, such as `clip.mp4@00:00:12.000`.
    """
    if not isinstance(source, (str, bytes, StoredImage)) and not hasattr(source, "read"):
        raise ImageError(f"Expected a path, bytes or an open file; got {type(source).__name__}.")
    file: BinaryIO | None = None
    try:
        with image_errors(source_name(source)):
            source = _frame_or(source)
        extent = getattr(source, "extent", None)  # known where reading the bytes is decoding, as for a frame of a video
        if admit is not None and extent is not None:
            admit(extent)
        with image_errors(source_name(source)), _pillow_limits():
            file = _open_source(source)
            image = _read_header(file)
        if admit is not None and extent is None:
            admit(image.size)
        with image_errors(source_name(source)), _pillow_limits():
            image.load()
            _check_size(image)  # again: a HEIF file may hold more than its header says
            upright = _upright(image)
            Image.Image.close(image)  # frees its pixels, which are a second copy, but keeps its file
            result = as_rgb(upright)
        if file is not source and not isinstance(source, bytes):
            result.info["path"] = str(source)
        return result
    finally:
        if file is not None and file is not source:
            file.close()


def _frame_or(source: str | StoredImage | bytes | BinaryIO) -> str | StoredImage | bytes | BinaryIO:
    """The frame of a video that a path names, if there is no such file; else the source itself."""
    if not isinstance(source, (str, Path)) or "@" not in os.path.basename(source) or os.path.lexists(source):
        return source
    from testtime.images.video import frame_named

    return frame_named(str(source)) or source


def _open_source(source: str | StoredImage | bytes | BinaryIO) -> BinaryIO:
    """A source opened for reading; a path to anything but a regular file is refused, since a pipe would block."""
    if isinstance(source, (str, Path)):
        return opened(source)
    if isinstance(source, StoredImage):
        source = source.read_bytes()
    return io.BytesIO(source) if isinstance(source, bytes) else source


def _read_header(file: BinaryIO) -> Image.Image:
    Image.init()
    try:
        image: Image.Image = Image.open(file, formats=[name for name in FORMATS if name in Image.OPEN])
    except UnidentifiedImageError:
        file.seek(0)
        head = file.read(12)
        if head[4:8] != b"ftyp" or head[8:] not in HEIF_BRANDS:
            raise
        image = _open_heif(file)
    _check_size(image)
    return image


def _open_heif(file: BinaryIO) -> Image.Image:
    """A HEIF image, not decoded yet. Pillow's own list of formats stays as it is, in this and every thread."""
    try:
        from pillow_heif import HeifImageFile
    except ImportError:
        raise _NeedsHeif from None
    file.seek(0)
    return HeifImageFile(file)


class _NeedsHeif(Exception):
    """A HEIF image, and nothing here that reads it."""


def _check_size(image: Image.Image) -> None:
    if image.width * image.height > MAX_PIXELS:
        raise Image.DecompressionBombError


@contextmanager
def image_errors(name: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """Raise any error, or any of a `kind`, as an ImageError that names the file."""
    try:
        yield
    except ImageError:
        raise
    # Pillow's decoders raise nearly anything on a damaged file: SyntaxError, struct.error, KeyError, ...
    except kind as error:
        raise ImageError(f"{name}: {_reason(error)}") from error


def _upright(image: Image.Image) -> Image.Image:
    """The image rotated by its EXIF orientation; always a new one that holds no file."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # damaged EXIF does not affect the pixels
        return image.copy()


def source_name(source: object) -> str:
    """The name of a source, for messages."""
    if isinstance(source, (str, StoredImage)):
        return _one_line(source) or "''"
    if isinstance(source, bytes):
        return f"image of {len(source):,} bytes"
    name = getattr(source, "name", None) or getattr(source, "filename", None)
    return _one_line(name) if isinstance(name, (str, Path)) and name else "image"


def _reason(error: Exception) -> str:
    """What is wrong with the file, for the user."""
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
        case _NeedsHeif():
            return f"is a HEIF image, which needs pillow-heif: {formats.HEIF_COMMAND}."
        case UnidentifiedImageError():
            return f"is empty, damaged or not an image (read: {', '.join(FORMATS)} and HEIF)."
        case MemoryError():
            return "is damaged, or too large for the memory."
        case OSError(strerror=str(reason)):
            return f"cannot be read ({_one_line(reason)})."
    return f"is damaged ({_one_line(getattr(error, 'strerror', None) or error) or type(error).__name__})."


def _one_line(text: object) -> str:
    """Text on one line, printable even if a file name is not UTF-8."""
    return " ".join(str(text).encode("utf-8", "backslashreplace").decode().split())


_limits_lock = threading.Lock()
_readers = 0
_restore = ExitStack()  # the warning filters and Pillow's limit as they were


@contextmanager
def _pillow_limits() -> Iterator[None]:
    """While any thread is inside, Pillow refuses above MAX_PIXELS and does not warn; settings are restored after.

    Pillow checks its limit when it opens a file, and again when it crops an image.

    Both are process-wide settings. If each thread restored them, one could restore what another had set, so the
    first to enter sets them and the last to leave restores them.
    """
    global _readers
    with _limits_lock:
        if _readers == 0:
            _restore.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
            warnings.filterwarnings("ignore", module=r"PIL\.")
            _restore.callback(setattr, Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
            Image.MAX_IMAGE_PIXELS = MAX_PIXELS // 2  # Pillow warns above it and refuses above twice that
        _readers += 1
    try:
        yield
    finally:
        with _limits_lock:
            _readers -= 1
            if _readers == 0:
                _restore.close()


def crop_box(image: Image.Image, box: tuple[int, int, int, int]) -> Image.Image:
    """A box of an image (left, top, right, bottom), even if it is above Pillow's limit for files."""
    left, top, right, bottom = box
    if (right - left) * (bottom - top) <= min(SMALL_CROP, Image.MAX_IMAGE_PIXELS or SMALL_CROP):
        return image.crop(box)
    with _pillow_limits():
        return image.crop(box)


def checked_rgb(image: Image.Image) -> Image.Image:
    """The image in RGB; refused if it is empty or has more than MAX_PIXELS."""
    if not image.width or not image.height:
        raise ImageError(f"An image of {image.width} x {image.height} pixels is empty.")
    if image.width * image.height > MAX_PIXELS:
        raise ImageError(f"An image of {image.width} x {image.height} pixels {_reason(Image.DecompressionBombError())}")
    with image_errors(source_name(image)):
        image.load()  # Pillow may not have read its file yet
        return as_rgb(image)


def as_rgb(image: Image.Image) -> Image.Image:
    """The image in RGB: itself if it is already.

    Deep greyscale is scaled to 8 bits, where Pillow would clip: integers from 0..65535 (Pillow's convention
    for modes I;16 and I), floats from 0..1, or from 0..255 where any is above 1.
    """
    if image.mode == "RGB":
        return image
    if image.mode == "I" or image.mode.startswith("I;16"):
        deep = np.asarray(image).astype(np.int32)
        np.clip(deep, 0, 65535, out=deep)  # in place, like what follows: an image may be large
        deep += 128
        deep //= 257
        return Image.fromarray(deep.astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        real = np.nan_to_num(np.asarray(image), nan=0.0)
        if real.max(initial=0) <= 1:
            real *= 255
        return Image.fromarray(real.clip(0, 255, out=real).round(out=real).astype(np.uint8)).convert("RGB")
    if image.mode in ("P", "PA", "RGBa", "La"):  # through RGBA: a direct conversion warns or fails
        image = image.convert("LA" if image.mode == "La" else "RGBA")
    return image.convert("RGB")


class Found(NamedTuple):
    """Images and videos, and notes on what was left out."""

    paths: list[Path]
    notes: tuple[str, ...] = ()


def find_images(source: str | Path, stdin: Iterable[str] | None = None) -> list[Path]:
    """The image files and videos that `source` stands for, as `search` finds them."""
    return search(source, stdin).paths


def search(source: str | Path, stdin: Iterable[str] | None = None) -> Found:
    """The image files and videos that `source` stands for, and notes on the files that are left out.

    - a folder: everything in it and below that can be read here, sorted by path; names that start with a dot are
      skipped, and other files are left out with a note
    - a pattern, such as `photos/**/*.jpg`: likewise
    - a list (.txt or .lst): the paths in it, one per line, in its order, relative to the current folder or
      else to the list's; blank lines and # comments are skipped, and a path need not exist
    - `-`: such lines on standard input
    - any other file: itself
    """
    text = str(source)
    if text == "-":
        return Found(_parse_list(_standard_input() if stdin is None else stdin, "standard input", Path()))
    if not text:
        raise InputError("No images given: an empty path. Give a folder, a pattern, a file, a list or '-'.")
    path = Path(source)
    if os.path.isdir(path):
        return _sorted_images(_walk(path), f"in {text!r}")
    if os.path.exists(path):
        if path.suffix.lower() not in LIST_SUFFIXES:
            return Found([path])
        return Found(_parse_list(_read_lines(path), repr(text), path.parent))
    if glob.has_magic(text):
        matches = (Path(match) for match in glob.iglob(text, recursive=True) if os.path.isfile(match))
        return _sorted_images(matches, f"match {text!r}")
    raise InputError(f"No such file or folder: {text!r}.")


def folder(source: str | Path, every: str = "1s") -> Iterator[Image.Image]:
    """The images that `source` stands for, in the order of `find_images`, each with its `info["path"]`.

    Of a video, a frame `every` so often: "1s", "500ms", or "10f" for every tenth. A source without images is an error
    at once; a bad image raises when it is reached.
    """
    from testtime.images.video import frames_of

    return map(read_image, frames_of(find_images(source), every))


def labels_from_folders(paths: Sequence[str | Path], classnames: Sequence[str]) -> list[int | None]:
    """For each path, the class that its folder is named after, or None; for scoring only.

    Case does not matter, and `_` counts as a space.

    >>> labels_from_folders(["pets/Maine_Coon/1.jpg", "pets/new/2.jpg"], ["beagle", "maine coon"])
    [1, None]
    """
    numbers = class_numbers(classnames)
    return [numbers.get(folded_name(Path(path).parent.name)) for path in paths]


def class_numbers(classnames: Sequence[str]) -> dict[str, int]:
    """The index of each class by its folded name; the first of several that share one."""
    return {folded_name(name): number for number, name in reversed(list(enumerate(classnames)))}


def _sorted_images(paths: Iterable[Path], where: str) -> Found:
    readable, found, others = formats.readable_suffixes(), dict[str, Path](), list[str]()
    for path in paths:
        if path.suffix.lower() in readable:
            found[path.as_posix()] = path
        else:
            others.append(path.name)
    live = formats.live_photos(found)
    notes = formats.left_out(others, len(live))
    if not found:
        looked = f"looked for {', '.join(formats.IMAGE_SUFFIXES)} and videos ({', '.join(formats.VIDEO_SUFFIXES)})"
        raise InputError(f"No images {where}; {notes[0] if notes else looked}.")
    return Found([found[name] for name in sorted(found.keys() - live)], notes)


def _walk(top: Path) -> Iterator[Path]:
    """Files below a folder; links to folders are followed, except to a folder that contains them."""
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


def _read_lines(path: Path) -> list[str]:
    try:
        return _decode_lines(read_bytes(path))
    except OSError as error:
        raise InputError(f"Cannot read the list {str(path)!r}: {error.strerror}.") from error


def _standard_input() -> Iterable[str]:
    try:
        data = getattr(sys.stdin, "buffer", sys.stdin).read()
    except (AttributeError, ValueError):  # missing or closed
        raise InputError("Cannot read standard input: it is closed. Give a folder or a list.") from None
    return _decode_lines(data) if isinstance(data, bytes) else data.split("\n")


def _decode_lines(data: bytes) -> list[str]:
    # PowerShell writes UTF-16; file names that are not UTF-8 are decoded as the system does
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = data.decode("utf-16", "replace") if wide else data.decode("utf-8-sig", "surrogateescape")
    return text.split("\n")


def _parse_list(lines: Iterable[str], where: str, beside: Path) -> list[Path]:
    stripped = (line.removeprefix("\ufeff").strip() for line in lines)
    paths = [Path(line) for line in stripped if line and not line.startswith("#")]
    if not paths:
        raise InputError(f"No images in {where}; expected a path on each line.")
    # a path that does not exist is kept as written, for the message when it is read
    return [beside / path if not os.path.exists(path) and os.path.exists(beside / path) else path for path in paths]
