"""Images behind a URL: a folder with or without class folders, or .tar shards, read where they are."""

from __future__ import annotations

import os
import posixpath
from pathlib import Path

from testtime.datasets.dataset import UNNAMED, Dataset, spaced
from testtime.datasets.imagenet import class_table
from testtime.datasets.shards import expand, read_shards
from testtime.files.remote import RemoteFile, remote_files
from testtime.images.formats import IMAGE_SUFFIXES, left_out, missing
from testtime.types import InputError


def read_url(url: str) -> Dataset:
    """The images that a URL names: a file, a folder, or a pattern with {000..009}, {a,b}, * or ?.

    Images in two or more folders, and none beside these, have the folders' names as labels. Archives are .tar shards in
    webdataset's form.
    """
    files = [file for name in expand(url) for file in remote_files(name)]
    name = posixpath.basename(url.rstrip("/")).partition(".")[0] or "images"
    if archives := [file for file in files if file.url.lower().endswith(".tar")]:
        data = read_shards(archives, name, Path(name))
        notes = tuple(UNNAMED if note.startswith(UNNAMED) else note for note in data.notes)
        return Dataset(name, data.paths, data.labels, data.classnames, notes)
    readable = tuple(suffix for suffix in IMAGE_SUFFIXES if not missing(suffix))
    images, others = list[RemoteFile](), list[str]()
    for file in files:
        base = posixpath.basename(file.url)
        if base.lower().endswith(readable) and not base.startswith("."):
            images.append(file)
        elif not base.startswith("."):
            others.append(base)
    rest = left_out(others)
    if not images:
        raise InputError(f"No images or .tar shards behind {'; '.join([url, *rest])}.")
    folders = _class_folders(url, images)
    if folders is None:
        return Dataset(name, [file.image() for file in images], None, [], rest)
    names, known = sorted(set(folders)), class_table()
    classes = [known[name] for name in names] if all(name in known for name in names) else list(map(spaced, names))
    position = {name: label for label, name in enumerate(names)}
    return Dataset(name, [file.image() for file in images], [position[name] for name in folders], classes, rest)


def _class_folders(url: str, images: list[RemoteFile]) -> list[str] | None:
    """The folder of each image below the one that all share, if all have one and there are several."""
    parts = [posixpath.dirname(file.url).split("/") for file in images]
    depth = len(os.path.commonprefix(parts))  # type: ignore[type-var]
    below = [folders[depth] if len(folders) > depth else "" for folders in parts]
    is_folder = not any(mark in url for mark in "*?{")
    return below if is_folder and all(below) and len(set(below)) > 1 else None
