"""What a killed process, or a machine without power, leaves of a folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from testtime.session import journal as journals

Left = tuple[tuple[str, bytes], ...]  # files by their names from a folder on


class Disk:
    """What would be left of a folder after every change to it: of a killed process, and of a machine without power.

    A power cut leaves of a file what it held when it was last synced, under the names that its folder had when that was
    last synced, or already under later ones.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.left: dict[Left, None] = {}
        there = [path for path in folder.rglob("*") if path.is_file()]
        self.held = [os.open(path, os.O_RDONLY) for path in there]  # keeps the numbers of files from being reused
        self.synced = {path.stat().st_ino: path.read_bytes() for path in there}
        self.names = {path: self._entries(path) for path in (folder, *folder.rglob("*")) if path.is_dir()}
        for owner, name in (
            (os, "fsync"), (os, "replace"), (os, "truncate"), (os, "unlink"), (journals.Rows, "_write"),
        ):  # fmt: skip
            patch.setattr(owner, name, self._watched(getattr(owner, name), name == "fsync"))

    def _watched(self, call: Callable[..., Any], syncs: bool) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            self._look()
            found = call(*arguments, **options)
            if syncs:
                self._sync(arguments[0])
            self._look()
            return found

        return watched

    def _sync(self, descriptor: int) -> None:
        place = Path(f"/proc/self/fd/{descriptor}")
        if place.is_dir():
            self.names[place.resolve()] = self._entries(place.resolve())
            return
        self.held.append(os.dup(descriptor))
        self.synced[os.fstat(descriptor).st_ino] = place.read_bytes()

    def _entries(self, folder: Path) -> dict[str, int]:
        """What a folder lists now, except hidden files: locks, and files that are being written."""
        return {path.name: path.stat().st_ino for path in folder.iterdir() if not path.name.startswith(".")}

    def _look(self) -> None:
        now = {path: self._entries(path) for path in (self.folder, *self.folder.rglob("*")) if path.is_dir()}
        for names, held in ((now, None), (now, self.synced), (self.names, self.synced)):
            self.left[tuple(sorted(self._files(self.folder, names, held)))] = None

    def _files(
        self, folder: Path, names: dict[Path, dict[str, int]], held: dict[int, bytes] | None
    ) -> Iterator[tuple[str, bytes]]:
        for name, number in names.get(folder, {}).items():
            path = folder / name
            if path.is_dir():
                yield from self._files(path, names, held)
            else:
                content = path.read_bytes() if held is None else held.get(number, b"")
                yield str(path.relative_to(self.folder)), content

    def close(self) -> None:
        for descriptor in self.held:
            os.close(descriptor)


def restored(left: Left, folder: Path) -> None:
    for name, content in left:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
