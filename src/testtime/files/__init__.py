"""Files: atomic writes, reads of regular files, safetensors with readable errors."""

from __future__ import annotations

import fcntl
import json
import math
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from errno import EINVAL, EISDIR
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from safetensors import SafetensorError, safe_open

from testtime.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor  # loaded where tensors are: processes that only read images do without


def write_atomic(path: str | Path, content: bytes | str, private: bool = False) -> Path:
    """Write a file atomically, by temporary file, flush and rename: readers see the old file or the whole new one.

    Only its owner can read a `private` one.
    """
    path = Path(path)
    # text may contain file names that are not UTF-8
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    temporary = _temporary(path)
    try:
        make_folder(path.parent)
        mode = 0o600 if private else 0o666
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"Cannot write {path}: {error.strerror or error}.") from None
    finally:
        with suppress(OSError):  # the parent may not be a folder; the first error is the one to report
            temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return path


def make_folder(path: Path) -> None:
    """Create a folder and its parents where missing, so that they survive a power cut."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make names created or changed in a folder survive a power cut."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def is_stream(path: Path) -> bool:
    """Whether a path is a pipe or a device, which can be written to but not replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


def check_place(path: Path | None) -> None:
    """Refuse an output file that cannot be written, before the work starts; None is fine."""
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"Cannot write {path}: it is a folder; give the name of a file.")
    try:
        make_folder(path.parent)
        temporary = _temporary(path)
        open(temporary, "xb").close()
        temporary.unlink()
    except OSError as error:
        raise InputError(f"Cannot write {path}: {error.strerror or error}.") from None


def check_folder(path: Path) -> None:
    """Refuse an output folder that cannot be written to, before the work starts."""
    if path.exists() and not path.is_dir():
        raise InputError(f"Cannot write to {path}: it is a file, and a folder is needed.")
    check_place(path / "any")


def _temporary(path: Path) -> Path:
    """A unique hidden name beside a file."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")


@contextmanager
def locked(path: str | Path, wait: bool = False) -> Iterator[None]:
    """Hold an exclusive lock on an output path; if another process holds it, raise naming it, or with `wait`, wait.

    The lock is a hidden file beside it, which the system releases when a process ends, however it ends.
    """
    path = Path(path)
    lock_file = path.with_name(f".{path.name}.lock")
    descriptor = _lock(path, lock_file, wait)
    try:
        os.truncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode())
        yield
    finally:
        lock_file.unlink(missing_ok=True)  # while we hold it: a process that opened it meanwhile retries
        os.close(descriptor)


def _lock(path: Path, lock_file: Path, wait: bool) -> int:
    while True:
        try:
            make_folder(path.parent)
            descriptor = os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise InputError(f"Cannot write {path}: {error.strerror or error}.") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise InputError(f"{path} is being written by {holder}; wait for it, or write elsewhere.") from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last holder has removed it


class NotRegular(OSError):
    """A pipe, a socket or a device, on which a read could block."""


def opened(path: str | os.PathLike[str]) -> BinaryIO:
    """A file opened for reading. Anything but a regular file is an OSError at once."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return open(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(EISDIR, os.strerror(EISDIR), path)
    raise NotRegular(EINVAL, "it is a pipe or a device, not a file", path)


def read_bytes(path: str | os.PathLike[str], piped: bool = False) -> bytes:
    """A regular file's bytes; an impossible path is an OSError too.

    With `piped`, a pipe opened by a shell, as in `<(sort names.txt)`, is read to its end.
    """
    try:
        with open(path, "rb") if piped and os.fspath(path).startswith("/dev/fd/") else opened(path) as file:
            return file.read()
    except ValueError:  # a NUL or a lone surrogate
        raise OSError(EINVAL, "no file can have that name", path) from None


def parse_json(text: str | bytes, what: object, error: type[InputError] = InputError, kind: type = object) -> Any:
    """Untrusted JSON, of any depth and length: a value or an `error`, whose message calls it `what`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise error(f"{what} is damaged: it is not JSON.") from None
    if not isinstance(value, kind):
        raise error(f"{what} is damaged: it holds a {type(value).__name__}; expected a {kind.__name__}.")
    return value


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Path:
    """Write a safetensors file atomically. The same tensors and metadata give the same bytes."""
    from safetensors.torch import save

    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return write_atomic(path, _with_sorted_header(save(stored, dict(metadata))))


def _with_sorted_header(content: bytes) -> bytes:
    """A safetensors file with its data aligned and its header sorted, which the library writes in any order."""
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8:begin]), sort_keys=True, ensure_ascii=False).encode()
    header += b" " * (-(8 + len(header)) % ALIGNMENT)
    return len(header).to_bytes(8, "little") + header + content[begin:]


def open_tensors(path: str | Path, error: type[InputError] = InputError) -> safe_open:
    """A safetensors file opened for lazy reading; problems are raised as `error`."""
    path = Path(path)
    if path.is_dir():
        raise error(f"{path} is a folder; a .safetensors file is needed.")
    if not path.exists():
        raise error(f"No file {path}.")
    if not path.is_file():
        raise error(f"{path} is a pipe or a device; a .safetensors file is needed.")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as problem:
        raise error(f"{path} is not a safetensors file, or is cut short ({problem}). Write it again.") from None
    except OSError as problem:
        raise error(f"Cannot read {path}: {problem.strerror or problem}.") from None


# Bytes; tensor data starts at a multiple of it, in files and in memory: at other addresses, libraries may pick another
# GEMM kernel, which rounds differently.
ALIGNMENT = 64


def float_types() -> dict[str, torch.dtype]:
    """The floating-point types of tensors in a file, by their names in it."""
    import torch

    return {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


class Rows:
    """The rows of one floating-point tensor of a safetensors file, read on demand.

    They are read and not memory-mapped: pages of a mapped file count as the process's memory once touched.
    Problems are raised as `error`.
    """

    def __init__(self, path: str | Path, name: str, error: type[InputError] = InputError) -> None:
        self.path, self.error = Path(path), error
        with open(self.path, "rb") as file:  # `open_tensors` has checked its header
            length = int.from_bytes(file.read(8), "little")
            entry = json.loads(file.read(length))[name]
            self._identity = _identity(file.fileno())
        if entry["dtype"] not in float_types():
            raise error(f"{self.path}: {name} must be floating point; got {entry['dtype']}.")
        self.dtype, self.shape = float_types()[entry["dtype"]], tuple(entry["shape"])
        self._begin = 8 + length + entry["data_offsets"][0]

    def read(self, start: int, stop: int) -> Tensor:
        """The rows from start to stop, in their own memory."""
        import torch

        rows = torch.empty(stop - start, *self.shape[1:], dtype=self.dtype)
        buffer = rows.view(torch.uint8).numpy().data.cast("B")
        done, width = 0, math.prod(self.shape[1:]) * rows.element_size()
        try:
            with open(self.path, "rb", buffering=0) as file:
                if _identity(file.fileno()) != self._identity:
                    raise self.error(f"{self.path} has changed since it was opened. Start again.")
                file.seek(self._begin + start * width)
                while count := file.readinto(buffer[done:]):
                    done += count
        except OSError as problem:
            raise self.error(f"Cannot read {self.path}: {problem.strerror or problem}.") from None
        if done < len(buffer):
            raise self.error(f"{self.path} is cut short. Write it again.")
        return rows


def _identity(descriptor: int) -> tuple[int, int, int]:
    """What distinguishes an open file from one that replaces it."""
    status = os.fstat(descriptor)
    return status.st_ino, status.st_size, status.st_mtime_ns
