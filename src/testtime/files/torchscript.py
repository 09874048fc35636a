"""The tensors of a TorchScript archive, as OpenAI published CLIP, without running anything in it.

Such an archive is a zip file: `data.pkl` is a pickle that describes the modules, `data/` holds the tensors' bytes, and
`code/` holds programs, some of which `torch.jit.load` would run. Here the pickle is read as data, by an interpreter for
the opcodes that TorchScript writes, which calls nothing that the file names. Of the programs, only the lines that list
parameters and buffers are read.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

MAX_TEXT = 64 * 2**20  # bytes of text read from an archive; ViT-L/14 has a few hundred thousand
MAX_NAMES = 100_000  # modules and tensors of an archive: modules that contain each other could yield infinitely many
LONGEST = 1_000  # characters of one dotted name
DIMENSIONS = 64  # torch's limit
KINDS = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}
TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
LITERALS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
ARGUMENTS = ("BINFLOAT", "BININT", "BININT1", "BININT2", "BINUNICODE", "LONG1")
# the start of a class in `code/`
CLASS = r"^class {}(\(Module\))?:\n(?:  __parameters__ = \[(.*)\]\n)?(?:  __buffers__ = \[(.*)\]\n)?"


# errors that torch.load lets through for a damaged file
DAMAGED = (
    ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError, RuntimeError, TypeError,
    ValueError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
LONGEST_NAME = 200  # most characters of a class name in a pickle


class ArchiveError(ValueError):
    """An archive that is damaged, or that could only be read by running its code."""


class Name(str):
    """A class or function named in the pickle, "module name"; it is never looked up."""


class StoredObject:
    """An object of the archive: its class and its state."""

    def __init__(self, kind: Name) -> None:
        if not isinstance(kind, Name):
            raise ArchiveError("an object has no class")
        self.kind, self.state = kind, None


def is_torchscript(path: Path) -> bool:
    """Whether torch.jit.save wrote the file: its archives, unlike those of torch.save, have constants.pkl."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return _top(archive) is not None


def check_names(path: Path) -> None:
    """Refuse a pickle that is damaged or holds a very long name, on which torch.load would spend minutes."""
    with path.open("rb") as file:
        pickles: list[BinaryIO] = [file] * 4  # before torch 1.6, tensor names are in the fourth pickle
        if file.read(4) == b"PK\x03\x04":
            with zipfile.ZipFile(file) as archive:
                names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
                pickles = [io.BytesIO(archive.open(name).read(MAX_TEXT)) for name in names]
        else:
            file.seek(0)
        for content in pickles:
            if not content.read(1):  # torch.load reports what is missing
                break
            content.seek(-1, io.SEEK_CUR)
            for operation, argument, _ in pickletools.genops(content):
                if operation.name == "GLOBAL" and len(str(argument)) > LONGEST_NAME:
                    raise pickle.UnpicklingError


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Parameters and buffers by their dotted names, as `torch.jit.load(path).state_dict()` has them."""
    with zipfile.ZipFile(path) as file:
        archive = Archive(file, path.stat().st_size)
        try:
            root = archive.unpickle(archive.text("data.pkl"))
        except (AttributeError, LookupError, OverflowError, TypeError):  # opcodes without their operands
            raise ArchiveError("it is damaged") from None
        if not isinstance(root, StoredObject):
            raise ArchiveError("it contains no module")
        return dict(archive.named_tensors(root))


def _top(archive: zipfile.ZipFile) -> str | None:
    """The top folder of the zip file."""
    ends = (name for name in archive.namelist() if name.endswith("/constants.pkl"))
    return next((name.removesuffix("/constants.pkl") for name in ends), None)


class Archive:
    """An open archive of `size` bytes."""

    def __init__(self, file: zipfile.ZipFile, size: int) -> None:
        self.file, self.top, self.data_left, self.text_left = file, _top(file), size, MAX_TEXT
        self.storages: dict[str, bytearray] = {}
        if f"{self.top}/byteorder" in file.namelist() and self.text("byteorder") != b"little":
            raise ArchiveError("it was written on a big-endian machine; save it there as .safetensors")

    def text(self, name: str) -> bytes:
        """A text record; all together are limited to MAX_TEXT, whatever sizes they declare."""
        entry = self.file.getinfo(f"{self.top}/{name}")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ArchiveError(f"{name} uses a compression that TorchScript does not support")
        try:
            with self.file.open(entry) as record:
                content = record.read(self.text_left + 1)
        except zlib.error:
            raise ArchiveError(f"{name} is damaged") from None
        self.text_left -= len(content)
        if self.text_left < 0:
            raise ArchiveError(f"its text records are longer than {MAX_TEXT:,} bytes")
        return content

    def storage(self, key: object) -> bytearray:
        """The bytes of a tensor record; all together are limited to the size of the file."""
        if not isinstance(key, str):
            raise ArchiveError("a storage has no name")
        if key not in self.storages:
            entry = self.file.getinfo(f"{self.top}/data/{key}")
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > self.data_left:
                raise ArchiveError(f"data/{key} is compressed, or declares a size larger than the file")
            self.data_left -= entry.file_size
            self.storages[key] = bytearray(self.file.read(entry))
        return self.storages[key]

    def tensor(self, storage: object, offset: int, size: Sequence[int], stride: Sequence[int], *_: object) -> Tensor:
        """A tensor view of a storage; it must lie within it."""
        fits = len(size) == len(stride) <= DIMENSIONS and min(0, offset, *size, *stride) == 0
        if not isinstance(storage, Tensor) or not fits:
            raise ArchiveError("a tensor has an impossible shape")
        last = 0 if 0 in size else 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        if offset + last > storage.numel() or math.prod(size) > storage.numel():
            raise ArchiveError(f"a tensor of shape {tuple(size)} is larger than the {storage.numel()} numbers stored")
        return storage.as_strided(size, stride, offset)

    def storage_tensor(self, description: object) -> Tensor:
        """All numbers of a storage that the pickle describes."""
        match description:
            case ("storage", Name() as kind, key, _, int(count)) if kind.removeprefix("torch ") in KINDS:
                dtype, content = KINDS[kind.removeprefix("torch ")], self.storage(key)
                if not 0 <= count * dtype.itemsize <= len(content):
                    raise ArchiveError(f"data/{key} is cut short")
                return torch.frombuffer(content, dtype=dtype, count=count) if count else torch.empty(0, dtype=dtype)
        raise ArchiveError("a tensor has an unknown kind of storage")

    def result_of(self, function: object, arguments: tuple[Any, ...]) -> object:
        """The result of one of the few functions that TorchScript writes, without calling it."""
        if not isinstance(function, Name):
            raise ArchiveError("it wants to run something that is not a function")
        match function:
            case "torch._utils _rebuild_tensor_v2":
                return self.tensor(*arguments)
            case "collections OrderedDict":
                return {}
            case "torch device" | "torch.jit._pickle restore_type_tag":
                return arguments[0]
            case _ if re.fullmatch(r"torch\.jit\._pickle build_\w+list", function):
                return arguments[0]
        raise ArchiveError(f"it wants to run '{function.replace(' ', '.')[:80]}', and code in a file is never run")

    def unpickle(self, content: bytes) -> object:
        """The object that a TorchScript pickle describes."""
        stack: list[Any] = []
        marks: list[int] = []
        memo: dict[Any, Any] = {}

        def pop_to_mark() -> list[Any]:
            start = marks.pop()
            items = stack[start:]
            del stack[start:]
            return items

        for operation, argument, _ in pickletools.genops(content):
            match operation.name:
                case "PROTO":
                    pass
                case "STOP":
                    return stack.pop()
                case "MARK":
                    marks.append(len(stack))
                case "GLOBAL":
                    stack.append(Name(argument))
                case "BINPUT" | "LONG_BINPUT":
                    memo[argument] = stack[-1]
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[argument])
                case "EMPTY_LIST":
                    stack.append([])
                case "EMPTY_DICT":
                    stack.append({})
                case "TUPLE":
                    stack.append(tuple(pop_to_mark()))
                case "APPEND":
                    item = stack.pop()
                    stack[-1].append(item)
                case "APPENDS":
                    items = pop_to_mark()
                    stack[-1].extend(items)
                case "SETITEMS":
                    items = pop_to_mark()
                    pairs = zip(items[::2], items[1::2], strict=True)
                    # attributes have names; values under other keys are not weights
                    stack[-1].update((key, value) for key, value in pairs if isinstance(key, str))
                case "NEWOBJ":
                    stack.pop()
                    stack.append(StoredObject(stack.pop()))
                case "BUILD":
                    state = stack.pop()
                    stack[-1].state = state
                case "BINPERSID":
                    stack.append(self.storage_tensor(stack.pop()))
                case "REDUCE":
                    arguments = stack.pop()
                    stack.append(self.result_of(stack.pop(), arguments))
                case kind if kind in TUPLES:
                    start = len(stack) - TUPLES[kind]
                    stack[start:] = [tuple(stack[start:])]
                case kind if kind in LITERALS:
                    stack.append(LITERALS[kind])
                case kind if kind in ARGUMENTS:
                    stack.append(argument)
                case kind:
                    raise ArchiveError(f"it has the opcode {kind}, which TorchScript does not write")
        raise ArchiveError("it is cut short")

    def named_tensors(self, root: StoredObject) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a module and its submodules, by dotted name."""
        waiting, count = [("", root)], 0
        known: dict[Name, set[str] | None] = {}
        while waiting:
            prefix, module = waiting.pop()
            if not isinstance(module.state, dict):
                kind = module.kind.replace(" ", ".")[:80]
                raise ArchiveError(f"'{kind}' has its own serialization, and code in a file is never run")
            if module.kind not in known:
                known[module.kind] = self.weight_names(module.kind)
            names = known[module.kind]
            for name, value in module.state.items():
                if not isinstance(value, (StoredObject, Tensor)):
                    continue
                count += 1
                if count > MAX_NAMES or len(prefix) + len(name) > LONGEST:
                    raise ArchiveError(
                        f"it has more than {MAX_NAMES:,} names, or one of more than {LONGEST:,} characters"
                    )
                if isinstance(value, StoredObject):
                    waiting.append((f"{prefix}{name}.", value))
                elif names is None or name in names:
                    yield prefix + name, value

    def weight_names(self, kind: Name) -> set[str] | None:
        """The attributes of a class that are parameters or buffers; None if the archive does not list them."""
        module, _, name = kind.partition(" ")
        try:
            code = self.text(f"code/{module.replace('.', '/')}.py").decode()
        except (KeyError, UnicodeDecodeError):
            return None
        found = re.search(CLASS.format(re.escape(name)), code, re.MULTILINE)
        if found is None or (found[1] and found[3] is None):  # before torch 1.5, buffers were not listed
            return None
        return set(re.findall(r'"([^"]*)"', f"{found[2]}{found[3]}"))
