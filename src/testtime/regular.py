"""Files from elsewhere, read whole: regular ones, and nothing that would be waited for."""

from __future__ import annotations

import os
import stat
from errno import EINVAL


def read_bytes(path: str | os.PathLike[str], piped: bool = False) -> bytes:
    """A file's bytes. A pipe, a socket or a device is an OSError at once; so is a path that no file can have.

    With `piped` a pipe that a shell has opened, as for `<(sort names.txt)`, is read to its end.
    """
    try:
        if piped and os.fspath(path).startswith("/dev/fd/"):
            with open(path, "rb") as pipe:
                return pipe.read()
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError:  # a NUL, or half a character
        raise OSError(EINVAL, "no file can be called that", path) from None
    with open(descriptor, "rb") as file:  # which refuses a folder
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(EINVAL, "it is a pipe or a device, and not a file", path)
        return file.read()
