"""Which files are read as images, what each kind needs, and what is said of the files that are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from importlib.util import find_spec
from pathlib import PurePath

HEIF_SUFFIXES = (".heic", ".heif", ".hif")
IMAGE_SUFFIXES = (
    ".avif", ".bmp", ".gif", *HEIF_SUFFIXES, ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp",
)  # fmt: skip
VIDEO_SUFFIXES = (".3gp", ".avi", ".m4v", ".mkv", ".mov", ".mp4", ".webm")

HEIF_COMMAND, VIDEO_COMMAND = "pip install 'testtime[heif]'", "pip install 'testtime[video]'"
# the module that reads a suffix, and how to get it; Pillow reads the others
NEEDED = {
    ".avif": ("PIL._avif", "pip install 'pillow>=11.3'"),
    **dict.fromkeys(HEIF_SUFFIXES, ("pillow_heif", HEIF_COMMAND)),
    **dict.fromkeys(VIDEO_SUFFIXES, ("av", VIDEO_COMMAND)),
}

# pictures in other formats, so that they are not called something else
OTHER_IMAGES = frozenset(
    ".arw .cr2 .cr3 .dng .eps .exr .hdr .ico .jfif .jp2 .jxl .nef .orf .pcx .pdf .psd .raf .raw .rw2 .svg .tga".split()
)
OTHER_VIDEOS = frozenset(".flv .m2ts .mpeg .mpg .mts .ogv .vob .wmv".split())
# labels, texts and metadata that often lie beside images: left out without a word
COMPANIONS = frozenset(
    ".aae .cfg .cls .csv .db .html .ini .json .jsonl .log .lst .mat .md .npy .npz .rst .tsv .txt .xml .xmp .yaml "
    ".yml".split()
)
COMPANION_NAMES = frozenset("authors changelog checksums copying license licence manifest md5sums readme".split())
LIVE_PHOTO = "Live Photos: their images are beside them"
MOST_KINDS = 6  # of files in a note


def missing(suffix: str) -> str:
    """The command that installs what files of this suffix need; empty if nothing is missing."""
    module, command = NEEDED.get(suffix, ("", ""))
    return command if module and find_spec(module) is None else ""


def readable_suffixes() -> tuple[str, ...]:
    """The suffixes of images and videos that can be read here; nothing is imported to find out."""
    return tuple(suffix for suffix in (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES) if not missing(suffix))


def is_video(path: object) -> bool:
    """Whether a path is that of a video, by its suffix."""
    return isinstance(path, str | PurePath) and str(path).lower().endswith(VIDEO_SUFFIXES)


def live_photos(paths: Collection[str]) -> set[str]:
    """Those that are the few seconds of video that a telephone stores beside an image, under its name."""
    stems = {path.rpartition(".")[0] for path in paths if path.lower().endswith(IMAGE_SUFFIXES)}
    return {path for path in paths if path.lower().endswith(".mov") and path.rpartition(".")[0] in stems}


def left_out(names: Iterable[str], live_photos: int = 0) -> tuple[str, ...]:
    """One note on the files that are left out, by suffix with the reason; none if there are only companions."""
    counts = Counter({(".mov", LIVE_PHOTO): live_photos} if live_photos else {})
    for name in names:
        path = PurePath(name)
        suffix = path.suffix.lower()
        if suffix not in COMPANIONS and not (suffix == "" and path.name.lower() in COMPANION_NAMES):
            counts[suffix, ""] += 1
    if not counts:
        return ()
    kinds = [(f"{count:,} {suffix or 'without a suffix'}", why or _why(suffix)) for (suffix, why), count in
             sorted(counts.items(), key=lambda item: (not missing(item[0][0]), -item[1], item[0]))]  # fmt: skip
    parts = [f"{what} ({why})" for what, why in kinds[:MOST_KINDS]]
    if len(kinds) > MOST_KINDS:
        parts.append(f"and {len(kinds) - MOST_KINDS} more kinds")
    total = counts.total()
    return (f"left out {total:,} {'file' if total == 1 else 'files'}: {', '.join(parts)}",)


def _why(suffix: str) -> str:
    if suffix in OTHER_IMAGES:
        return "not read; convert to .png or .jpg"
    if suffix in OTHER_VIDEOS:
        return "not read; convert to .mp4"
    return missing(suffix) or "not an image"
