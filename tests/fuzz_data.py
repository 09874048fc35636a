"""Broken files of every kind that is read from elsewhere: each is read, or refused as bad input, and nothing else.

    python tests/fuzz_data.py --cases 6000 --seed 0

A case is a small valid file with some of its bytes or parts changed, opened by the function that a command calls.
What is not an InputError, takes more than SECONDS, writes a file, or makes the process grow by more than GROWTH is
told with its seed and kept in --keep. Address space is limited as well, so that a wild allocation fails here.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tarfile
import tempfile
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from safetensors.torch import save_file

from testtime.datasets import open_dataset
from testtime.datasets import tables as table_reader
from testtime.encoding.encoders import open_clip as clip
from testtime.images.reading import read_image
from testtime.text.prompts import _checked_descriptions, check_classes, read_classes_file, read_descriptions
from testtime.types import ImageError, InputError

SECONDS = 5  # for a case
GROWTH = 400  # MB that a case may add to the most that the process has held
ADDRESSES = 16  # GB of address space beyond what the process has at first
IMAGES = 5  # of a dataset, whose bytes are read


def png(colour: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(buffer, "PNG")
    return buffer.getvalue()


PICTURES = {"a.png": png("red"), "b.png": png("blue")}
FEATURES = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["cat", "dog"]}}


class Kind(NamedTuple):
    """A kind of file: how a valid one is written into a folder, which file of it is changed, and how it is opened."""

    write: Callable[[Path], Path]
    open: Callable[[Path], object]


def dataset(path: Path) -> None:
    """Open a dataset as a command does, and read some images."""
    data = open_dataset(path)
    for image in data.paths[:IMAGES]:
        with contextlib.suppress(ImageError):
            read_image(image)
    if data.classnames:
        check_classes(data.classnames, allow_duplicates=True)


def folder(path: Path) -> None:
    """Open the dataset whose folder the file is in."""
    dataset(path.parent)


def text(name: str, content: str) -> Callable[[Path], Path]:
    def write(home: Path) -> Path:
        (home / name).write_text(content)
        return home / name

    return write


def shard(home: Path) -> Path:
    members = {"1.png": PICTURES["a.png"], "1.cls": b"1", "2.png": PICTURES["b.png"], "2.json": b'{"label": 0}'}
    with tarfile.open(home / "t.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size, member.pax_headers = len(content), {"comment": "é"}
            archive.addfile(member, io.BytesIO(content))
    return home / "t.tar"


def table() -> pa.Table:
    images = [{"bytes": content, "path": None} for content in PICTURES.values()]
    metadata = {"huggingface": json.dumps({"info": {"features": FEATURES}})}
    return pa.table({"image": images, "label": [1, 0]}).replace_schema_metadata(metadata)


def parquet(home: Path) -> Path:
    pq.write_table(table(), home / "t.parquet")
    return home / "t.parquet"


def described(home: Path) -> Path:
    """What `datasets` writes into a table, in a file of its own."""
    parquet(home)
    (home / "features.json").write_bytes(table().schema.metadata[b"huggingface"])
    return home / "features.json"


def described_table(path: Path) -> None:
    metadata = {"huggingface": path.read_bytes()}
    pq.write_table(table().replace_schema_metadata(metadata), path.parent / "t.parquet")
    dataset(path.parent / "t.parquet")


def saved(changed: str) -> Callable[[Path], Path]:
    def write(home: Path) -> Path:
        with pa.OSFile(str(home / "data.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table().schema) as stream:
            stream.write_table(table())
        state = {"_data_files": [{"filename": "data.arrow"}], "_fingerprint": "x", "_split": "test"}
        (home / "state.json").write_text(json.dumps(state))
        return home / changed

    return write


class Small(torch.nn.Module):
    """A module with parameters, buffers and other attributes, and one inside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside = torch.nn.ModuleList([torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)])
        self.scale = torch.nn.Parameter(torch.ones(2, 3).t())
        self.register_buffer("input_resolution", torch.tensor(224))
        self.sizes, self.mask = [1, 2], torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside[1](self.inside[0](x)) @ self.scale.t()[:2, :2]


def scripted(home: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(Small()), home / "w.pt")
    return home / "w.pt"


def zipped(home: Path) -> Path:
    torch.save({"state_dict": Small().state_dict(), "epoch": 3}, home / "w.pt")
    return home / "w.pt"


def legacy(home: Path) -> Path:
    buffer = io.BytesIO()
    torch.save(Small().state_dict(), buffer, _use_new_zipfile_serialization=False)
    content = buffer.getvalue()
    # storages are named after where they lay in memory, which would make every run another
    for place, key in enumerate(sorted(set(re.findall(rb"\d{7,16}", content)))):
        content = content.replace(key, b"%0*d" % (len(key), place))
    (home / "w.pt").write_bytes(content)
    return home / "w.pt"


def safe(home: Path) -> Path:
    save_file({name: value.contiguous() for name, value in Small().state_dict().items()}, home / "w.safetensors")
    return home / "w.safetensors"


SPLIT = json.dumps({"train": [], "test": [["a.png", 0, "cat"], ["b.png", 1, "grand_piano"]]})
ROWS = [{"path": "a.png", "label": "cat"}, {"file_name": "b.png", "label": 1}]
KINDS = {
    "csv": Kind(text("t.csv", 'path,label\na.png,cat\n"b.png","grand, piano"\n'), dataset),
    "numbers": Kind(text("t.csv", "id,file_name,label\n7,a.png,1\n8,b.png,0\n"), dataset),
    "tsv": Kind(text("t.tsv", "a.png\tcat\nb.png\tdog\n"), dataset),
    "jsonl": Kind(text("t.jsonl", "\n".join(map(json.dumps, ROWS))), dataset),
    "metadata": Kind(text("metadata.jsonl", '{"file_name": "a.png", "label": 3}\n'), folder),
    "split": Kind(text("split_zhou_X.json", SPLIT), folder),
    "tar": Kind(shard, dataset),
    "parquet": Kind(parquet, dataset),
    "features": Kind(described, described_table),
    "arrow": Kind(saved("data.arrow"), folder),
    "state": Kind(saved("state.json"), folder),
    "list": Kind(text("t.txt", "a.png\n# none\nb.png\n"), dataset),
    "classes": Kind(text("c.txt", "cat\n# none\ngrand piano\n"), lambda path: check_classes(read_classes_file(path))),
    "descriptions": Kind(
        text("d.json", json.dumps({"cat": ["It purrs.", "It is small."], "dog": ["It barks."]})),
        lambda path: _checked_descriptions(read_descriptions(path)),
    ),
    "safetensors": Kind(safe, clip.read),
    "torch": Kind(zipped, clip.read),
    "legacy": Kind(legacy, clip.read),
    "torchscript": Kind(scripted, clip.read),
}

# what a person who means ill writes into a field
UNENCODABLE = (
    b"99999999999", b"-1", b"9" * 5000, b"NaN", b"Infinity", b"1e999", b"1.5", b"null", b"[]", b"{}", b"true", b'""',
    b'"\\ud800"', b"\x00", b"\xff", b"[" * 3000, b'{"a":' * 3000, b'"../../etc/passwd"', b"0x10", b"\xd9\xa3",
    b"path", b'"path"', b"5", b"18446744073709551615", b"\r", b"\n", b"\t", b'"', b",", b"os system", b"\x7f" * 8,
)  # fmt: skip


def flip(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        changed[chance.randrange(len(changed))] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
    return bytes(changed)


def cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


def remove(content: bytes, chance: random.Random) -> bytes:
    start, stop = sorted(chance.choices(range(len(content) + 1), k=2))
    return content[:start] + content[min(stop, start + chance.choice((1, 8, 64, 512))) :]


def repeat(content: bytes, chance: random.Random) -> bytes:
    start, stop = sorted(chance.choices(range(len(content) + 1), k=2))
    chunk = content[start : min(stop, start + chance.choice((1, 8, 64, 512)))]
    return content[:start] + chunk * chance.choice((2, 3, 50)) + content[start:]


def splice(content: bytes, chance: random.Random) -> bytes:
    start, stop, where = (chance.randrange(len(content)) for _ in range(3))
    chunk = content[min(start, stop) : max(start, stop)][:512]
    return content[:where] + chunk + content[where + len(chunk) :]


def insert(content: bytes, chance: random.Random) -> bytes:
    where = chance.randrange(len(content) + 1)
    return content[:where] + chance.choice(UNENCODABLE) + content[where + chance.choice((0, 0, 1, 4)) :]


def number(content: bytes, chance: random.Random) -> bytes:
    """A field of 1 to 8 bytes set to an extreme of its range."""
    size, where = chance.choice((1, 2, 4, 8)), chance.randrange(len(content))
    value = chance.choice((0, 1, 2 ** (8 * size - 1) - 1, 2 ** (8 * size - 1), 2 ** (8 * size) - 1))
    return content[:where] + value.to_bytes(size, chance.choice(("little", "big"))) + content[where + size :]


def value(content: bytes, chance: random.Random) -> bytes:
    """One value of JSON, or one cell of a table, replaced."""
    fields = list(re.finditer(rb'"[^"\n]*"|[^\s,:"\[\]{}]+', content[:4000]))
    if not fields:
        return insert(content, chance)
    field = chance.choice(fields)
    return content[: field.start()] + chance.choice(UNENCODABLE) + content[field.end() :]


def record(content: bytes, chance: random.Random) -> bytes:
    """A zip file whose record is changed, the rest of it as it should be; other files as bytes."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as before:
            entries = {name: before.read(name) for name in before.namelist()}
    except Exception:  # no zip file, or one that an earlier change has broken
        return chance.choice((flip, value, number))(content, chance)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as after:
        names = [name for name in entries if entries[name]]
        likely = [name for name in names if name.endswith("data.pkl")]
        target = chance.choice(names + likely * len(names))
        entries[target] = chance.choice((flip, flip, number, insert, cut, splice, remove))(entries[target], chance)
        if chance.random() < 0.1:
            del entries[chance.choice(names)]
        squeezed = zipfile.ZIP_DEFLATED if chance.random() < 0.1 else zipfile.ZIP_STORED
        for name, data in entries.items():
            after.writestr(name, data, squeezed)
    return made.getvalue()


def header(content: bytes, chance: random.Random) -> bytes:
    """A tar file with a changed header whose checksum is right; other files as bytes."""
    places = [i for i in range(0, len(content) - 511, 512) if content[i + 257 : i + 262] == b"ustar"]
    if not places:
        return chance.choice((flip, value, number))(content, chance)
    place = chance.choice(places)
    block = bytearray(content[place : place + 512])
    where = chance.choice((0, 100, 124, 124, 136, 156, 156, 345, chance.randrange(512)))
    sizes = (b"\x80" + b"\xff" * 11, b"7" * 11, b"\x00" * 12)
    new = chance.choice((*sizes, b"g", b"x", b"L", b"S", b"K", bytes([chance.randrange(256)])))
    block[where : where + len(new)] = new[: 512 - where]
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\x00 " % sum(block)
    return content[:place] + bytes(block) + content[place + 512 :]


CHANGES: Sequence[Callable[[bytes, random.Random], bytes]] = (
    flip, flip, cut, remove, repeat, splice, insert, number, value, value, record, record, header,
)  # fmt: skip


class Finding(NamedTuple):
    """A case that did not go as it should."""

    case: int
    kind: str
    what: str
    content: bytes


class TooSlow(BaseException):
    """Out of reach of `except Exception`."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """At most SECONDS: by an alarm where Python runs, and the end of the process where it does not."""

    def stop(*_: object) -> None:
        raise TooSlow(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    faulthandler.dump_traceback_later(4 * SECONDS, exit=True)
    try:
        yield
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


def held() -> int:
    """The most memory that the process has held, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def limit_addresses() -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ADDRESSES * 2**30, resource.RLIM_INFINITY))


def files(root: Path) -> set[str]:
    return {os.path.join(here, name) for here, _, names in os.walk(root) for name in names}


def change(content: bytes, case: int, seed: int) -> bytes:
    """The case's content: one to three changes of a valid file."""
    chance = random.Random(f"{seed}-{case}")
    for _ in range(chance.choice((1, 1, 2, 3))):
        content = chance.choice(CHANGES)(content, chance) if content else content
    return content


def fuzz(
    kinds: Sequence[str], cases: int, seed: int, home: Path, note: Callable[[int, str, Path], None] | None = None
) -> tuple[Counter[str], list[Finding]]:
    """Run cases over kinds in turn: how they ended, and those that did not go as they should."""
    ended: Counter[str] = Counter()
    findings: list[Finding] = []
    valid: dict[str, Path] = {}
    for name in kinds:
        (home / name).mkdir(parents=True)
        for picture, pixels in PICTURES.items():
            (home / name / picture).write_bytes(pixels)
        valid[name] = KINDS[name].write(home / name)
        KINDS[name].open(valid[name])
    for case in range(cases):
        name = kinds[case % len(kinds)]
        kind = KINDS[name]
        place = home / f"{case}"
        shutil.copytree(home / name, place)
        path = place / valid[name].name
        content = change(path.read_bytes(), case, seed)
        path.write_bytes(content)
        there, most = files(home), held()
        if note:
            note(case, name, path)
        what = ""
        try:
            with bounded(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                kind.open(path)
            ended["read"] += 1
        except InputError as problem:
            ended["refused"] += 1
            if not str(problem).strip():
                what = "says nothing"
        except BaseException as problem:
            if isinstance(problem, KeyboardInterrupt):
                raise
            what = "".join(traceback.format_exception(problem))
        if not what and files(home) != there:
            what = f"wrote {files(home) - there}"
        if not what and held() > most + GROWTH:
            what = f"grew from {most} to {held()} MB"
        if what:
            ended["wrong"] += 1
            findings.append(Finding(case, name, what, content))
        shutil.rmtree(place)
    table_reader._open.cache_clear()
    table_reader._group.cache_clear()
    return ended, findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS), help="names with commas between")
    parser.add_argument("--keep", type=Path, help="a folder for the files that were not read as they should be")
    given = parser.parse_args()
    faulthandler.enable()
    limit_addresses()
    with tempfile.TemporaryDirectory() as home:

        def note(case: int, name: str, path: Path) -> None:
            if given.keep:  # a crash of the process leaves the file that it came from
                given.keep.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, given.keep / f"current-{name}{path.suffix}")

        ended, findings = fuzz(given.kinds.split(","), given.cases, given.seed, Path(home), note)
    for finding in findings:
        print(f"--- case {finding.case}, seed {given.seed}, {finding.kind}: {finding.what}")
        if given.keep:
            (given.keep / f"{finding.kind}-{given.seed}-{finding.case}").write_bytes(finding.content)
    print(f"{given.cases} cases: {dict(ended)}; at most {held()} MB")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
