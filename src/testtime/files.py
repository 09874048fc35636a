"""Files that are whole or not there: atomic writes, and safetensors with readable errors."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from testtime.types import InputError


def write_atomic(path: str | Path, content: bytes | str) -> Path:
    """Write a file that others see either as it was or complete: write aside, flush to disk, rename."""
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(aside, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        raise InputError(f"Cannot write {path}: {error.strerror or error}.") from None
    finally:
        with suppress(OSError):  # the parent may be no folder, and the first error is the one to tell
            aside.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself must survive a power cut
    finally:
        os.close(folder)
    return path


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Path:
    """Write a safetensors file atomically."""
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return write_atomic(path, to_bytes(stored, dict(metadata)))


def open_tensors(path: str | Path, error: type[InputError] = InputError) -> Any:
    """A safetensors file opened for lazy reading; what is wrong with it is said as `error`."""
    path = Path(path)
    if path.is_dir():
        raise error(f"{path} is a folder; a .safetensors file is needed.")
    if not path.exists():
        raise error(f"No file {path}.")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as problem:
        raise error(f"{path} is not a safetensors file, or is cut short ({problem}). Write it again.") from None
    except OSError as problem:
        raise error(f"Cannot read {path}: {problem.strerror or problem}.") from None
