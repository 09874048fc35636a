"""The tensors of a TorchScript archive, as OpenAI published CLIP, without running anything in it.

Such an archive is a zip file: `data.pkl` is a pickle that describes the modules, `data/` holds the tensors' bytes, and
`code/` holds programs, some of which `torch.jit.load` would run. Here the pickle is read as data, by a machine that
knows the instructions that TorchScript writes and calls nothing that the file names; of the programs, only the lines
that tell parameters and buffers from other attributes are looked at.
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

WORDS = 64 * 2**20  # bytes of an archive that are read as text; those of ViT-L/14 have a few hundred thousand
NAMES = 100_000  # of modules and tensors in an archive: a few modules that share each other could have endless ones
NAME = 1_000  # characters of the longest
DIMENSIONS = 64  # as many as torch takes
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
# how a class starts in `code/`
CLASS = r"^class {}(\(Module\))?:\n(?:  __parameters__ = \[(.*)\]\n)?(?:  __buffers__ = \[(.*)\]\n)?"


# what torch.load lets through, of a file that is damaged
DAMAGED = (
    ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError, RuntimeError, TypeError,
    ValueError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
LONGEST_NAME = 200  # characters of a class in a pickle


class ArchiveError(ValueError):
    """An archive that is damaged, or holds what could only be read by running it."""


class Name(str):
    """A class or function that the pickle names, "module name"; it is never looked up."""


class Held:
    """An object of the archive: its class and what was stored in it."""

    def __init__(self, kind: Name) -> None:
        if not isinstance(kind, Name):
            raise ArchiveError("an object is of no class")
        self.kind, self.state = kind, None


def is_torchscript(path: Path) -> bool:
    """Whether torch.jit.save wrote the file: its archives, unlike those of torch.save, have constants.pkl."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return _top(archive) is not None


def check_names(path: Path) -> None:
    """Refuse a pickle that is damaged or names something at length, over which torch.load would brood for minutes."""
    with path.open("rb") as file:
        pickles: list[BinaryIO] = [file] * 4  # a file from before torch 1.6 has its tensors' names in the fourth
        if file.read(4) == b"PK\x03\x04":
            with zipfile.ZipFile(file) as archive:
                names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
                pickles = [io.BytesIO(archive.open(name).read(WORDS)) for name in names]
        else:
            file.seek(0)
        for content in pickles:
            if not content.read(1):  # what is lacking, torch.load says
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
        except (AttributeError, LookupError, OverflowError, TypeError):  # what its instructions work on is not there
            raise ArchiveError("it is damaged") from None
        if not isinstance(root, Held):
            raise ArchiveError("it holds no module")
        return dict(archive.named(root))


def _top(archive: zipfile.ZipFile) -> str | None:
    """The folder inside the zip file that all is in."""
    ends = (name for name in archive.namelist() if name.endswith("/constants.pkl"))
    return next((name.removesuffix("/constants.pkl") for name in ends), None)


class Archive:
    """An open archive of `size` bytes."""

    def __init__(self, file: zipfile.ZipFile, size: int) -> None:
        self.file, self.top, self.left, self.words = file, _top(file), size, WORDS
        self.storages: dict[str, bytearray] = {}
        if f"{self.top}/byteorder" in file.namelist() and self.text("byteorder") != b"little":
            raise ArchiveError("it was written on a big-endian machine; save it there as .safetensors")

    def text(self, name: str) -> bytes:
        """A record of text; together they may be as long as WORDS, whatever they say of their size."""
        entry = self.file.getinfo(f"{self.top}/{name}")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ArchiveError(f"{name} is compressed in a way that TorchScript does not know")
        try:
            with self.file.open(entry) as record:
                content = record.read(self.words + 1)
        except zlib.error:
            raise ArchiveError(f"{name} is damaged") from None
        self.words -= len(content)
        if self.words < 0:
            raise ArchiveError(f"its descriptions are longer than {WORDS:,} bytes")
        return content

    def storage(self, key: object) -> bytearray:
        """The bytes of one of the tensors' records; together they are no more than the file."""
        if not isinstance(key, str):
            raise ArchiveError("a storage has no name")
        if key not in self.storages:
            entry = self.file.getinfo(f"{self.top}/data/{key}")
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > self.left:
                raise ArchiveError(f"data/{key} is compressed, or says that it is larger than the file")
            self.left -= entry.file_size
            self.storages[key] = bytearray(self.file.read(entry))
        return self.storages[key]

    def tensor(self, storage: object, offset: int, size: Sequence[int], stride: Sequence[int], *_: object) -> Tensor:
        """A tensor of a storage, which it must lie within."""
        fits = len(size) == len(stride) <= DIMENSIONS and min(0, offset, *size, *stride) == 0
        if not isinstance(storage, Tensor) or not fits:
            raise ArchiveError("a tensor is not of a shape that one can have")
        last = 0 if 0 in size else 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        if offset + last > storage.numel() or math.prod(size) > storage.numel():
            raise ArchiveError(f"a tensor of shape {tuple(size)} is larger than the {storage.numel()} numbers stored")
        return storage.as_strided(size, stride, offset)

    def stored(self, what: object) -> Tensor:
        """All numbers of a storage, by what the pickle says of it."""
        match what:
            case ("storage", Name() as kind, key, _, int(count)) if kind.removeprefix("torch ") in KINDS:
                dtype, content = KINDS[kind.removeprefix("torch ")], self.storage(key)
                if not 0 <= count * dtype.itemsize <= len(content):
                    raise ArchiveError(f"data/{key} is cut short")
                return torch.frombuffer(content, dtype=dtype, count=count) if count else torch.empty(0, dtype=dtype)
        raise ArchiveError("a tensor is stored in a way that is not known")

    def made(self, function: object, given: tuple[Any, ...]) -> object:
        """What one of the few functions that TorchScript writes would have made; none is called."""
        if not isinstance(function, Name):
            raise ArchiveError("it wants to run what is no function")
        match function:
            case "torch._utils _rebuild_tensor_v2":
                return self.tensor(*given)
            case "collections OrderedDict":
                return {}
            case "torch device" | "torch.jit._pickle restore_type_tag":
                return given[0]
            case _ if re.fullmatch(r"torch\.jit\._pickle build_\w+list", function):
                return given[0]
        raise ArchiveError(f"it wants to run '{function.replace(' ', '.')[:80]}', and code in a file is never run")

    def unpickle(self, content: bytes) -> object:
        """What a pickle of TorchScript describes."""
        stack: list[Any] = []
        marks: list[int] = []
        memo: dict[Any, Any] = {}

        def above() -> list[Any]:
            place = marks.pop()
            items = stack[place:]
            del stack[place:]
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
                    stack.append(tuple(above()))
                case "APPEND":
                    item = stack.pop()
                    stack[-1].append(item)
                case "APPENDS":
                    items = above()
                    stack[-1].extend(items)
                case "SETITEMS":
                    items = above()
                    pairs = zip(items[::2], items[1::2], strict=True)
                    # attributes have names; what lies under other keys is no weight
                    stack[-1].update((key, value) for key, value in pairs if isinstance(key, str))
                case "NEWOBJ":
                    stack.pop()
                    stack.append(Held(stack.pop()))
                case "BUILD":
                    state = stack.pop()
                    stack[-1].state = state
                case "BINPERSID":
                    stack.append(self.stored(stack.pop()))
                case "REDUCE":
                    given = stack.pop()
                    stack.append(self.made(stack.pop(), given))
                case kind if kind in TUPLES:
                    place = len(stack) - TUPLES[kind]
                    stack[place:] = [tuple(stack[place:])]
                case kind if kind in LITERALS:
                    stack.append(LITERALS[kind])
                case kind if kind in ARGUMENTS:
                    stack.append(argument)
                case kind:
                    raise ArchiveError(f"it has the instruction {kind}, which TorchScript does not write")
        raise ArchiveError("it is cut short")

    def named(self, root: Held) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a module and of those in it."""
        waiting, count = [("", root)], 0
        known: dict[Name, set[str] | None] = {}
        while waiting:
            prefix, module = waiting.pop()
            if not isinstance(module.state, dict):
                kind = module.kind.replace(" ", ".")[:80]
                raise ArchiveError(f"'{kind}' stores itself in a way of its own, and code in a file is never run")
            if module.kind not in known:
                known[module.kind] = self.weights(module.kind)
            names = known[module.kind]
            for name, value in module.state.items():
                if not isinstance(value, (Held, Tensor)):
                    continue
                count += 1
                if count > NAMES or len(prefix) + len(name) > NAME:
                    raise ArchiveError(f"it has more than {NAMES:,} names, or one of more than {NAME:,} characters")
                if isinstance(value, Held):
                    waiting.append((f"{prefix}{name}.", value))
                elif names is None or name in names:
                    yield prefix + name, value

    def weights(self, kind: Name) -> set[str] | None:
        """The attributes of a class that are parameters or buffers; None where the archive does not say."""
        module, _, name = kind.partition(" ")
        try:
            code = self.text(f"code/{module.replace('.', '/')}.py").decode()
        except (KeyError, UnicodeDecodeError):
            return None
        found = re.search(CLASS.format(re.escape(name)), code, re.MULTILINE)
        if found is None or (found[1] and found[3] is None):  # before torch 1.5, buffers were not listed
            return None
        return set(re.findall(r'"([^"]*)"', f"{found[2]}{found[3]}"))
