"""What is written never lies on what is read."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from testtime.errors import InputError
from testtime.files.identity import file_of, weights_of
from testtime.types import StoredImage

# beside the images of a folder, what may be read with them
BESIDE = ("metadata.csv", "metadata.jsonl", "classnames.txt", "state.json", "dataset_dict.json", "dataset_info.json")


def distinct(
    outputs: Mapping[str, Path | None], inputs: Mapping[str, Path | Iterable[Path | None] | None] | None = None
) -> None:
    """Refuse two outputs in one place, and an output in the place of an input, however they are spelled.

    Both are by the option that names them; an option may stand for many inputs, and None for none. A device or a pipe
    may be given any number of times.
    """
    taken: dict[object, str] = {}
    for option, path in outputs.items():
        if path is None or (place := _place(path)) is None:
            continue
        if place in taken:
            raise InputError(f"{taken[place]} and {option} are one file, {path}; give each a file of its own.")
        taken[place] = option
    if not taken:
        return
    for option, given in (inputs or {}).items():
        for path in [given] if isinstance(given, Path) else given or ():
            if path is not None and (place := _place(path)) in taken:
                raise InputError(
                    f"{taken[place]} would be written over {option}, {path}; give {taken[place]} another place."
                )


def _place(path: Path) -> object:
    """What two names of one file or folder share, whether it is there or not; None for a device or a pipe."""
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
    """What a command over images reads, by the options that name it, for `distinct`."""
    source = Path(os.path.expanduser(images))
    beside = [source, *(source / name for name in BESIDE)] if images and source.exists() else []
    return {
        "IMAGES": [*beside, *dict.fromkeys(map(file_of, paths))],
        "--classes-file": classes_file,
        "--descriptions": descriptions,
        "--prompts": None if prompts is None else Path(prompts.removeprefix("coop:")),
        "--encoder": weights_of(encoder),
    }
