"""Which streams there are: one folder each, in a folder that all machines see."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any
from urllib.parse import quote

from testtime.errors import InputError
from testtime.serve.types import DATABASE

FOLDER = Path("streams")  # inside the service's folder


def folder_of(folder: Path, name: str) -> Path:
    """Where a stream is kept; its name was checked before, and is a plain name of a file."""
    return folder / FOLDER / name


def streams_in(folder: Path) -> dict[str, dict[str, Any]]:
    """The descriptions of the streams in a service's folder, by name."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted((folder / FOLDER).glob(f"*/{DATABASE}")):
        found |= _described(path)
    return found


def has_stream(folder: Path, name: str) -> bool:
    """Whether there is a stream of that name."""
    path = folder_of(folder, name) / DATABASE
    return path.exists() and name in _described(path)


def check_layout(folder: Path, on_ray: bool) -> None:
    """Refuse a folder of the other kind of service: on Ray, every stream has a folder of its own."""
    other = folder / (DATABASE if on_ray else FOLDER)
    if other.exists():
        where = "on one machine" if on_ray else "on Ray (--on ray)"
        raise InputError(
            f"{folder} holds the streams of a service {where}; give another --folder. A stream moves as an exported "
            "state: get /v1/streams/NAME/state there, and put it here."
        )


def _described(path: Path) -> dict[str, dict[str, Any]]:
    """The stream in a database, if it has one; a deleted stream leaves an empty database, so that it stays fenced."""
    try:
        base = sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True)
        try:
            return {name: json.loads(spec) for name, spec in base.execute("SELECT name, spec FROM streams")}
        finally:
            base.close()
    except sqlite3.DatabaseError as problem:
        if "no such table" in str(problem):  # it is being made
            return {}
        return {path.parent.name: {}}  # its process died while it wrote, and the next one sees to it; or it is damaged
