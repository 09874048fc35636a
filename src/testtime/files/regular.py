"""Files from elsewhere, read whole: regular ones, and nothing that would be waited for."""

from __future__ import annotations

import os
import stat
from errno import EINVAL, EISDIR
from typing import BinaryIO


class NotRegular(OSError):
    """A pipe, a socket or a device, which would be waited for."""


def opened(path: str | os.PathLike[str]) -> BinaryIO:
    """A file for reading. What is no regular file is an OSError at once; so is a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return open(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(EISDIR, os.strerror(EISDIR), path)
    raise NotRegular(EINVAL, "it is a pipe or a device, and not a file", path)


def read_bytes(path: str | os.PathLike[str], piped: bool = False) -> bytes:
    """A regular file's bytes; a path that no file can have is an OSError too.

    With `piped` a pipe that a shell has opened, as for `<(sort names.txt)`, is read to its end.
    """
    try:
        with open(path, "rb") if piped and os.fspath(path).startswith("/dev/fd/") else opened(path) as file:
            return file.read()
    except ValueError:  # a NUL, or half a character
        raise OSError(EINVAL, "no file can be called that", path) from None
