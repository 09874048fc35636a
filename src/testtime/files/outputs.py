"""Outputs never overwrite inputs, and earlier outputs only with --force."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from testtime.errors import InputError
from testtime.files.identity import file_of, weights_of
from testtime.types import StoredImage

# metadata files that may be read with the images of a folder
METADATA = ("metadata.csv", "metadata.jsonl", "classnames.txt", "state.json", "dataset_dict.json", "dataset_info.json")


def distinct(
    outputs: Mapping[str, Path | None], inputs: Mapping[str, Path | Iterable[Path | None] | None] | None = None
) -> None:
    """Refuse two outputs to the same file, and an output that is also an input, however the paths are written.

    Both are keyed by their option; an option may have several inputs, or None. A device or a pipe may be given any
    number of times.
    """
    taken: dict[object, str] = {}
    for option, path in outputs.items():
        if path is None or (key := _file_key(path)) is None:
            continue
        if key in taken:
            raise InputError(f"{taken[key]} and {option} are the same file, {path}; give each its own.")
        taken[key] = option
    if not taken:
        return
    for option, given in (inputs or {}).items():
        for path in [given] if isinstance(given, Path) else given or ():
            if path is not None and (key := _file_key(path)) in taken:
                raise InputError(f"{taken[key]} would overwrite {option}, {path}; give {taken[key]} another path.")


def refuse_existing(outputs: Mapping[str, Path | None], force: bool = False, other_way: str = "") -> None:
    """Refuse to overwrite a file, unless with `force`; an empty file, a device or a pipe is fine.

    Outputs are keyed by their option; `other_way` is a way out besides --force and another name.
    """
    for option, path in outputs.items():
        if not force and path is not None and path.is_file() and path.stat().st_size:
            named = option if option.endswith(str(path)) else f"{option} {path}"
            raise InputError(f"{named} already exists: --force overwrites it{other_way}; or use another name.")


def _file_key(path: Path) -> object:
    """A key that all paths to one file or folder share, whether or not it exists; None for a device or a pipe."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return os.path.realpath(path)
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return None
    return status.st_dev, status.st_ino


def read_files(
    images: str,
    paths: Iterable[str | StoredImage],
    encoder: str,
    classes_file: Path | None = None,
    descriptions: Path | None = None,
    prompts: str | None = None,
) -> dict[str, Path | Iterable[Path | None] | None]:
    """The files that a command over images reads, by option, for `distinct`."""
    source = Path(os.path.expanduser(images))
    source_files = [source, *(source / name for name in METADATA)] if images and source.exists() else []
    return {
        "IMAGES": [*source_files, *dict.fromkeys(map(file_of, paths))],
        "--classes-file": classes_file,
        "--descriptions": descriptions,
        "--prompts": None if prompts is None else Path(prompts.removeprefix("coop:")),
        "--encoder": weights_of(encoder),
    }
