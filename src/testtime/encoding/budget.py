"""The memory budget of a stream: what the images that are being processed may take together."""

from __future__ import annotations

import ctypes
import threading

from testtime.images import reading

LARGE = 2**28  # bytes of an image from which its memory is returned to the system afterwards


class MemoryBudget:
    """Memory budget in bytes, shared by the images in progress."""

    def __init__(self, total: int) -> None:
        self.total, self.taken = total, 0
        self._changed = threading.Condition()

    def take(self, size: int, *, wait: bool = False, force: bool = False) -> None:
        """Reserve bytes: by `force`, after a `wait` until they fit or none are taken, or else raise Full."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: not self.taken or self._fits(size))
            elif not force and not self._fits(size):
                raise Full
            self.taken += size

    def release(self, size: int) -> None:
        """Release bytes."""
        if size >= LARGE and (trim := getattr(ctypes.pythonapi, "malloc_trim", None)):
            trim(0)  # glibc keeps freed memory in per-thread arenas
        with self._changed:
            self.taken -= size
            self._changed.notify_all()

    def _fits(self, size: int) -> bool:
        return self.taken + size <= self.total


class Full(Exception):
    """An image does not fit the memory budget yet."""


class Share:
    """One image's share of a memory budget; `take` are options of `MemoryBudget.take`."""

    def __init__(self, budget: MemoryBudget, **take: bool) -> None:
        self.budget, self.size, self._take = budget, 0, take

    def admit(self, extent: tuple[int, int]) -> None:
        """Reserve what an image of this width and height needs while it is processed."""
        size = extent[0] * extent[1] * reading.BYTES_PER_PIXEL
        self.budget.take(size, **self._take)
        self.size = size

    def keep(self, size: int) -> None:
        """Release all but `size` bytes."""
        if size < self.size:
            self.budget.release(self.size - size)
            self.size = size
