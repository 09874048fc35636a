"""Images inside other files. Torch is not imported here: processes that only read images do without it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class StoredImage(Protocol):
    """An image inside another file: a member of an archive, a row of a table. A Path is one too.

    Its `str()` is a stable name, as for a path.
    """

    def read_bytes(self) -> bytes:
        """The image file's bytes."""
