"""Files behind URLs such as s3://bucket/folder, gs://, memory:// or file://, through fsspec. Nothing is stored here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from testtime.errors import InputError, MissingPart

URL = re.compile(r"[a-z][a-z0-9+.-]+://\S", re.IGNORECASE)
LARGEST = 2**30  # bytes of an image that are read at most
STAMPS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")  # by file system


def is_url(text: str) -> bool:
    """Whether a text is a URL, and not a path."""
    return URL.match(text) is not None


class RemoteImage(NamedTuple):
    """An image behind a URL: a file, or a member of an archive. Read each time, so any number may be held."""

    url: str
    member: str
    offset: int
    size: int
    stamp: str  # of the file, as it was found

    def read_bytes(self) -> bytes:
        if self.size > LARGEST:
            raise InputError(f"has {self.size:,} bytes, more than {LARGEST:,}")
        system, path = _system(self.url)
        return system.cat_file(path, start=self.offset, end=self.offset + self.size)

    def __str__(self) -> str:
        return f"{self.url}/{self.member}" if self.member else self.url


class RemoteFile(NamedTuple):
    """A file behind a URL."""

    url: str
    size: int
    stamp: str

    def image(self, member: str = "", offset: int = 0, size: int | None = None) -> RemoteImage:
        """The file as an image, or a part of it that is one."""
        return RemoteImage(self.url, member, offset, self.size if size is None else size, self.stamp)

    def open(self, mode: str = "rb") -> Any:
        """The file opened for reading; it can be sought in."""
        system, path = _system(self.url)
        return system.open(path, mode)

    def __str__(self) -> str:
        return self.url


def remote_files(url: str) -> list[RemoteFile]:
    """The files that a URL names: itself, all below a folder, or those that a pattern with * or ? matches; sorted."""
    with remote_errors(url):
        system, path = _system(url)
        if "*" in path or "?" in path:
            found = system.glob(path, detail=True)
        elif system.isdir(path):
            found = system.find(path, detail=True)
        else:
            found = {path: system.info(path)}
        return [
            RemoteFile(system.unstrip_protocol(name), int(entry["size"] or 0), _stamp(entry))
            for name, entry in sorted(found.items())
            if entry.get("type") == "file"
        ]


@contextmanager
def remote_errors(url: str) -> Iterator[None]:
    """Raise any error as an InputError that names the URL."""
    try:
        yield
    except InputError:
        raise
    except ImportError as problem:  # fsspec says which package the protocol needs
        raise MissingPart(f"Cannot read {url}: {problem}") from None
    except FileNotFoundError:
        raise InputError(f"Cannot read {url}: there is no such file or folder.") from None
    except Exception as problem:  # errors of the libraries behind fsspec have no common base class
        reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        raise InputError(f"Cannot read {url}: {reason[:200]}") from None


def _system(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    try:
        import fsspec
    except ImportError:
        raise MissingPart(f"{url} is read with fsspec, which is not installed: pip install 'testtime[ray]'.") from None
    return fsspec.core.url_to_fs(url)


def _stamp(entry: dict[str, Any]) -> str:
    """What tells a file from an earlier one of its name: its size, and the tag or time that its system gives."""
    return " ".join(str(entry[key]) for key in ("size", *STAMPS) if entry.get(key) is not None)
