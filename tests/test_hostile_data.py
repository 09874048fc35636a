"""Datasets, lists and tables from people who mean ill, or from a broken disk: read, or refused as bad input."""

from __future__ import annotations

import io
import json
import os
import socket
import sys
import tarfile
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import fuzz_data
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from trees import png

from testtime import load_encoder, registry
from testtime.datasets import open_dataset, shards
from testtime.datasets.dataset import MAX_CLASSES
from testtime.images.reading import find_images, read_image
from testtime.text.prompts import build_task, check_classes, read_classes, read_classes_file, read_descriptions
from testtime.types import ImageError, InputError

DEEP = b"[" * 100_000
LONG = "9" * 5000


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(png())
    return tmp_path


def write_tar(file: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(file, "w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file


def write_parquet(file: Path, labels: Any = (1, 0), metadata: dict[str, bytes] | None = None) -> Path:
    table = pa.table({"image": [png(), png()], "label": labels})
    pq.write_table(table.replace_schema_metadata(metadata), file)
    return file


# --- large numbers ---


def numbered(home: Path, form: str, label: str) -> Path:
    """A dataset of two images, the second with this label."""
    if form == "csv":
        (home / "t.csv").write_text(f"path,label\na.png,0\nb.png,{label}\n")
        return home / "t.csv"
    if form == "no header":
        (home / "t.csv").write_text(f"a.png,0\nb.png,{label}\n")
        return home / "t.csv"
    if form == "jsonl":
        (home / "t.jsonl").write_text(f'{{"path": "a.png", "class": 0}}\n{{"path": "b.png", "class": {label}}}\n')
        return home / "t.jsonl"
    if form == "cls":
        return write_tar(home / "t.tar", {"1.png": png(), "1.cls": b"0", "2.png": png(), "2.cls": label.encode()})
    if form == "json":
        return write_tar(home / "t.tar", {"1.png": png(), "1.json": label.encode()})
    return write_parquet(home / "t.parquet", pa.array([0, int(label)], pa.uint64()))


@pytest.mark.parametrize("form", ["csv", "no header", "jsonl", "cls", "json", "parquet"])
@pytest.mark.parametrize("label", ["100000", "99999999999", str(2**64 - 1)])
def test_an_id_in_place_of_a_label_is_refused_and_takes_no_memory(home: Path, form: str, label: str) -> None:
    file = numbered(home, form, label)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=f"holds {label}, but class numbers start at 0.*if it is an id, remove it"):
            open_dataset(file)
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
    assert open_dataset(numbered(home, form if form != "parquet" else "csv", str(MAX_CLASSES - 1))).labels is not None


def test_the_message_names_the_column(home: Path) -> None:
    for form, said in (
        ("csv", r"Column 'label' of .*t\.csv"),
        ("no header", "Column 2 of"),
        ("jsonl", "Label 'class' of"),
    ):
        with pytest.raises(InputError, match=said):
            open_dataset(numbered(home, form, "99999999999"))
    with pytest.raises(InputError, match=r"Column 'label' of .*t\.parquet"):
        open_dataset(numbered(home, "parquet", "99999999999"))


@pytest.mark.parametrize("form", ["csv", "jsonl", "cls", "json"])
def test_a_label_of_thousands_of_digits_is_bad_input(home: Path, form: str) -> None:
    with pytest.raises(InputError) as refused:
        open_dataset(numbered(home, form, LONG))
    assert len(str(refused.value)) < 500


def test_ids_with_classes_given_are_refused_by_the_command(home: Path, cli) -> None:
    code, _, said = cli("run", numbered(home, "csv", "99999999999"), "--classes", "cat,dog", "--encoder", "tiny")
    assert code == 2 and "99999999999" in said and "fault" not in said


def test_braces_of_a_pattern_are_bounded() -> None:
    for pattern in ("x-{0..99999999999}.tar", f"x-{{0..{LONG}}}.tar", f"x-{{{LONG}..1}}.tar"):
        with pytest.raises(InputError, match="expands to more than 100,000 files"):
            shards.find_shards(pattern)


# --- JSON, tables and tar files that are odd ---


@pytest.mark.parametrize(
    "line",
    [
        DEEP, b"5", b'"path"', b"null", b"[]", b"true", b'{"path": 5}', b'{"path": null}', b'{"path": ["a.png"]}',
        b'{"path": "a.png", "label": NaN}', b'{"path": "a.png", "label": Infinity}', b'{"path": "a.png", "label": 1.5}',
        b'{"path": "a.png", "label": -1e999}', b'{"path": "a.png", "label": []}',
        b'{"path": "a.png", "label": {"a": 1}}',
        b'{"path": "a\\u0000.png"}', b'{"path": "\\ud800"}', b'{"path": ""}', b'{"path": "' + b"a" * 5000 + b'"}',
        b'{"path": "a.png", "label": ' + LONG.encode() + b"}",
    ],
)  # fmt: skip
def test_an_odd_line_is_bad_input(home: Path, line: bytes) -> None:
    (home / "t.jsonl").write_bytes(line)
    with pytest.raises(InputError):
        open_dataset(home / "t.jsonl")


@pytest.mark.parametrize(
    "split",
    [
        DEEP, b'{"test": ' + DEEP, b"5", b"[]", b'"test"', b'{"test": 5}', b'{"test": null}', b'{"test": [5]}',
        b'{"test": [["a.png", 1e999, "cat"]]}', b'{"test": [["a.png", NaN, "cat"]]}', b'{"test": [["a.png", 0]]}',
        b'{"test": [["a.png", 0.5, "cat"]]}', b'{"test": [["a.png", true, "cat"]]}',
        b'{"test": [["a.png", "' + LONG.encode() + b'", "cat"]]}',
        b'{"test": [[["a.png"], 0, "cat"]]}', b'{"test": [["a.png", 0, {}]]}', b'{"test": [["a\\u0000", 0, "cat"]]}',
        b'{"test": [["\\ud800", 0, "cat"]]}', b"\xff",
    ],
)  # fmt: skip
def test_an_odd_split_is_bad_input(home: Path, split: bytes) -> None:
    (home / "split_zhou_X.json").write_bytes(split)
    with pytest.raises(InputError):
        open_dataset(home)


@pytest.mark.parametrize(
    "content", [DEEP, b'{"cat": ' + DEEP, b"5", b'{"cat": 5}', b'{"cat": ["\\ud800"], "dog": ["x"]}']
)
def test_odd_descriptions_are_bad_input(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "d.json").write_bytes(content)
    with pytest.raises(InputError):
        build_task(load_encoder("tiny"), ["cat", "dog"], descriptions=tmp_path / "d.json")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("1.json", DEEP), ("1.json", b"[1]"), ("1.json", b"NaN"), ("1.json", b'{"label": Infinity}'),
        ("1.json", b'{"label": {}}'), ("1.json", LONG.encode()), ("1.json", b"\xff\xfe"), ("1.cls", b"\xff"),
    ],
)  # fmt: skip
def test_an_odd_label_in_a_tar_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    with pytest.raises(InputError, match=r"t\.tar/1\."):
        open_dataset(write_tar(tmp_path / "t.tar", {"1.png": png(), name: content}))


@pytest.mark.parametrize("suffix", [".txt", ".cls", ".json"])
def test_a_giant_label_is_not_read(tmp_path: Path, suffix: str) -> None:
    file = write_tar(tmp_path / "t.tar", {"1.png": png(), f"1{suffix}": b"1" * (shards.LONGEST_LABEL + 1)})
    with pytest.raises(InputError, match=rf"t\.tar/1\{suffix} has 1,048,577 bytes, but a label has at most 1,048,576"):
        open_dataset(file)


@pytest.mark.parametrize("name", ["1.png", "1.txt"])
@pytest.mark.parametrize(
    "headers",
    [
        {"GNU.sparse.map": "0,1", "GNU.sparse.size": "99999999999"},
        {"GNU.sparse.map": "x"},
        {"GNU.sparse.size": "x"},
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9" * 30, "GNU.sparse.name": "1.txt"},
        {"size": "x"},
        {"size": "-5"},
        {"size": "9" * 40},
        {"mtime": LONG},
    ],
)
def test_odd_headers_of_a_tar_file_are_bad_input(tmp_path: Path, name: str, headers: dict[str, str]) -> None:
    with tarfile.open(tmp_path / "t.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo(name)
        member.size, member.pax_headers = 4, headers
        archive.addfile(member, io.BytesIO(b"abcd"))
    with pytest.raises(InputError, match=r"t\.tar"):
        data = open_dataset(tmp_path / "t.tar")
        read_image(data.paths[0])


def test_a_tar_file_of_headers_alone_is_bad_input(tmp_path: Path) -> None:
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 512
    block = header.tobuf(tarfile.GNU_FORMAT) + b"a" * 511 + b"\x00"
    (tmp_path / "t.tar").write_bytes(block * 3000)
    with pytest.raises(InputError, match=r"t\.tar"):
        open_dataset(tmp_path / "t.tar")


CLASS = {"_type": "ClassLabel", "names": ["cat", "dog"]}


def features(**label: object) -> bytes:
    return json.dumps({"info": {"features": {"image": {"_type": "Image"}, "label": CLASS | label}}}).encode()


@pytest.mark.parametrize(
    "metadata",
    [
        b"", b"{", b"\xff\xfe\x00", DEEP, b"[]", b"5", b'"x"', b"null", b'{"info": 5}', b'{"info": [1]}',
        b'{"info": {"features": 5}}', b'{"info": {"features": [1]}}', b'{"info": {"features": "label"}}',
        features(names="ab"), features(names=5), features(names=[["cat"], ["dog"]]), features(names=[1, 2]),
        features(names=[None, None]), features(names={"cat": 0, "dog": 1}), features(names=["cat"]),
    ],
)  # fmt: skip
def test_odd_metadata_of_a_table_is_bad_input(tmp_path: Path, metadata: bytes) -> None:
    with pytest.raises(InputError, match=r"t\.parquet"):
        open_dataset(write_parquet(tmp_path / "t.parquet", metadata={"huggingface": metadata}))


@pytest.mark.parametrize(
    "metadata",
    [
        features(), features(_type=["ClassLabel"]), features(_type=None), features(names=None), features(names=[]),
        b"{}", b'{"info": null}', b'{"info": []}', b'{"info": {"features": null}}',
        b'{"info": {"features": {"label": [1]}}}',
        b'{"info": {"features": {"other": {"_type": "Image"}}}}', features(names=["cat", "dog", "\ud800"]),
    ],
)  # fmt: skip
def test_metadata_with_missing_entries_is_read(tmp_path: Path, metadata: bytes) -> None:
    data = open_dataset(write_parquet(tmp_path / "t.parquet", metadata={"huggingface": metadata}))
    assert data.labels == [1, 0]
    check_classes(data.classnames)


@pytest.mark.parametrize("width", [8, 16, 32, 64])
def test_unsigned_labels_are_numbers(tmp_path: Path, width: int) -> None:
    labels = pa.array([1, 0], getattr(pa, f"uint{width}")())
    assert open_dataset(write_parquet(tmp_path / "t.parquet", labels)).labels == [1, 0]


@pytest.mark.parametrize(
    "labels",
    [
        [[1], [0]], [{"a": 1}, {"a": 0}], [b"cat", b"dog"], [1.5, 2.5], [float("nan"), 1.0], [float("inf"), 1.0],
        pa.array(["x", "y"]).dictionary_encode().cast(pa.binary()), pa.array([1, 2], pa.timestamp("s")),
    ],
)  # fmt: skip
def test_a_column_that_holds_no_labels_is_named(tmp_path: Path, labels: Any) -> None:
    with pytest.raises(InputError, match=r"Column 'label' of .*t\.parquet holds .*; a label must be a name"):
        open_dataset(write_parquet(tmp_path / "t.parquet", labels))


def test_a_number_beyond_the_names_of_a_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="names 2 classes, but there is a label 7"):
        open_dataset(write_parquet(tmp_path / "t.parquet", [1, 7], {"huggingface": features()}))
    with pytest.raises(InputError, match="should hold the numbers of 2 classes; it holds 'cat'"):
        open_dataset(write_parquet(tmp_path / "u.parquet", ["cat", "dog"], {"huggingface": features()}))


def test_more_rows_than_bytes_are_refused(tmp_path: Path) -> None:
    rows = 3_000_000
    table = pa.table({"image": pa.nulls(rows, pa.binary()), "label": pa.array([0] * rows, pa.int8())})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=rows)
    with pytest.raises(InputError, match=r"claims to have 3,000,000 rows in [\d,]+ bytes"):
        open_dataset(tmp_path / "t.parquet")


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.table([[png()], [1], [2]], names=["image", "label", "label"])
    pq.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(InputError, match="has the column 'label' more than once"):
        open_dataset(tmp_path / "t.parquet")


def test_a_row_that_holds_no_image_is_an_image_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    for number, value in enumerate(([5], [[1, 2]], [None], ["pipe.png"], ["gone.png"], ["a\x00b"])):
        pq.write_table(pa.table({"image": value}), tmp_path / f"{number}.parquet")
        data = open_dataset(tmp_path / f"{number}.parquet")
        with fuzz_data.bounded(), pytest.raises(ImageError):
            read_image(data.paths[0])


@pytest.mark.parametrize(
    "state",
    [
        DEEP, b"[]", b"5", b'{"_data_files": 5}', b'{"_data_files": [5]}', b'{"_data_files": [{}]}',
        b'{"_data_files": [{"filename": 5}]}', b'{"_data_files": [{"filename": "a\\u0000"}]}',
        b'{"_data_files": [{"filename": "."}]}', b'{"_data_files": [{"filename": "pipe.arrow"}]}',
    ],
)  # fmt: skip
def test_an_odd_saved_dataset_is_bad_input(tmp_path: Path, state: bytes) -> None:
    os.mkfifo(tmp_path / "pipe.arrow")
    (tmp_path / "state.json").write_bytes(state)
    with fuzz_data.bounded(), pytest.raises(InputError):
        open_dataset(tmp_path)
    for parts in (b'{"splits": 5}', b'{"splits": [5]}', b'{"splits": "test"}', DEEP):
        (tmp_path / "dataset_dict.json").write_bytes(parts)
        with pytest.raises(InputError):
            open_dataset(tmp_path)


def test_invalid_offsets_of_an_arrow_file_are_refused(tmp_path: Path) -> None:
    file = fuzz_data.saved("data.arrow")(tmp_path)
    content = bytearray(file.read_bytes())
    size = len(png()).to_bytes(4, "little")
    first = content.index(b"\x00" * 4 + size)
    content[first + 4 : first + 8] = (2**31 - 1).to_bytes(4, "little")
    file.write_bytes(content)
    data = open_dataset(tmp_path)
    with pytest.raises(ImageError):
        read_image(data.paths[0])


# --- names, links and pipes ---


def test_names_that_are_not_utf8_are_found_and_read(tmp_path: Path, capsys) -> None:
    for name in (b"caf\xe9", b"dog"):
        folder = os.path.join(os.fsencode(tmp_path / "pets"), name)
        os.makedirs(folder)
        with open(os.path.join(folder, b"\xff.png"), "wb") as file:
            file.write(png())
    data = open_dataset(tmp_path / "pets")
    assert data.labels == [0, 1] and len(data) == 2
    for name in (data.name, *data.classnames):
        name.encode()
    for path in data.paths:
        read_image(path)
    named = open_dataset(os.fsdecode(os.path.join(os.fsencode(tmp_path / "pets"), b"caf\xe9")))
    named.name.encode()
    (tmp_path / "list.txt").write_bytes(os.fsencode(data.paths[0]) + b"\n")
    assert find_images(tmp_path / "list.txt") == [data.paths[0]]


@pytest.mark.parametrize("text", ["caf\udce9", "\ud800"])
def test_text_that_no_encoder_can_read_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="Class name .* is not UTF-8 text"):
        check_classes(["dog", text])
    with pytest.raises(InputError, match="Template .* is not UTF-8 text"):
        build_task(load_encoder("tiny"), ["cat", "dog"], templates=[f"{text} {{}}"])


def test_a_link_to_itself_is_skipped(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        (tmp_path / "pets" / name / "1.png").write_bytes(png())
    for place in ("loop", "loop.png", "cat/loop.png", "cat/loop"):
        (tmp_path / "pets" / place).symlink_to(tmp_path / "pets" / place)
    (tmp_path / "pets" / "loop.png").unlink()
    assert len(find_images(tmp_path / "pets")) == 2
    assert open_dataset(tmp_path / "pets").classnames == ["cat", "dog"]


def test_folders_nested_a_thousand_deep_are_walked(tmp_path: Path) -> None:
    depths = [tmp_path.joinpath("top", *"d" * depth) for depth in range(1200)]
    for folder in depths:
        folder.mkdir()
    (depths[-1] / "1.png").write_bytes(png())
    assert find_images(tmp_path) == [depths[-1] / "1.png"]
    (depths[-1] / "1.png").unlink()
    for folder in reversed(depths):  # pytest's own clean-up does not reach that deep
        folder.rmdir()


@pytest.fixture
def pipe(tmp_path: Path):
    """A folder with a pipe under each name that is searched for, and a socket."""
    for name in (
        "list.txt", "t.csv", "t.jsonl", "t.tar", "t.parquet", "split.json", "classnames.txt", "d.json", "1.png",
        "variants.txt", "state.json",
    ):  # fmt: skip
        os.mkfifo(tmp_path / name)
    listening = socket.socket(socket.AF_UNIX)
    place = os.getcwd()
    os.chdir(tmp_path)  # the name of a socket is short
    listening.bind("socket.txt")
    os.chdir(place)
    yield tmp_path
    listening.close()


@pytest.mark.parametrize("name", ["list.txt", "t.csv", "t.jsonl", "t.tar", "t.parquet", "split.json", "socket.txt"])
def test_a_pipe_is_refused_and_not_waited_for(pipe: Path, name: str) -> None:
    with fuzz_data.bounded():
        with pytest.raises(InputError, match="pipe"):
            open_dataset(pipe / name)
        with pytest.raises(InputError):
            read_image(find_images(pipe / name)[0])


def test_pipes_beside_images_are_not_waited_for(pipe: Path) -> None:
    with fuzz_data.bounded():
        for read in (read_classes_file, read_descriptions, lambda path: shards.read_shards([path], "x", path.parent)):
            with pytest.raises(InputError):
                read(pipe / "t.tar")
        with pytest.raises(InputError):
            read_classes(pipe / "t.csv")
        (pipe / "u.csv").write_text("2.png,0\n1.png,1\n")
        (pipe / "2.png").write_bytes(png())
        with pytest.raises(InputError, match=r"classnames\.txt.*pipe"):
            open_dataset(pipe / "u.csv")
        (pipe / "listed.txt").write_text(f"{pipe}/1.png\n")
        listed = find_images(pipe / "listed.txt")
        assert listed == [pipe / "1.png"]
        with pytest.raises(ImageError):
            read_image(listed[0])


def test_a_device_is_no_list(tmp_path: Path) -> None:
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    with fuzz_data.bounded(), pytest.raises(InputError, match="pipe"):
        open_dataset(tmp_path / "zero.txt")
    with fuzz_data.bounded(), pytest.raises(InputError, match="not a file"):
        find_images(tmp_path / "zero.txt")


def test_standard_input_that_is_closed_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.TextIOWrapper(io.BytesIO())
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr(sys, "stdin", stream)
        with pytest.raises(InputError, match="standard input: it is closed"):
            find_images("-")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9.png\n"), encoding="utf-8"))
    assert [os.fsencode(path) for path in find_images("-")] == [b"caf\xe9.png"]


def test_a_path_of_classes_that_no_file_can_have_is_a_list() -> None:
    names = [f"name {number}" for number in range(2000)]
    assert read_classes(",".join(names)) == names


# --- plug-ins ---


@pytest.mark.parametrize(
    "fault", ["raise RuntimeError('broken\\nin two')", "import no_such_module", "import sys; sys.exit(3)"]
)
def test_a_broken_plug_in_leaves_the_others(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    from importlib.metadata import EntryPoint

    (tmp_path / "broken_plug_in.py").write_text(fault)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_plug_in", raising=False)
    point = EntryPoint("bad", "broken_plug_in:Bad", "testtime.methods")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    code, out, said = cli("list", "methods")
    assert code == 0 and "dpe" in out and "zeroshot" in out and "bad" not in out
    assert "Method 'bad' is a plug-in that cannot be imported, broken_plug_in:Bad" in " ".join(said.split())
    with pytest.raises(InputError, match="Fix or uninstall its package"):
        registry.make_method("bad")


# --- broken at random ---


def test_files_broken_at_random_are_read_or_refused(tmp_path: Path) -> None:
    ended, findings = fuzz_data.fuzz(list(fuzz_data.KINDS), 162, 5, tmp_path / "fuzz")
    assert not findings, findings[0].what
    assert ended["read"] > 10 and ended["refused"] > 80


def with_code_that_does_not_inflate(content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entry = next(entry for entry in archive.infolist() if entry.filename.endswith("code/__torch__/fuzz_data.py"))
    assert entry.compress_type == zipfile.ZIP_DEFLATED
    end = content.index(entry.filename.encode(), entry.header_offset) + len(entry.filename)
    start = end + int.from_bytes(content[entry.header_offset + 28 : entry.header_offset + 30], "little")
    return content[:start] + b"\xff" * entry.compress_size + content[start + entry.compress_size :]


# what running many cases found, made small
FOUND = {
    "code that does not inflate": ("torchscript", with_code_that_does_not_inflate),
    "a storage of no name": ("legacy", lambda content: content.replace(b"0001", b"0009", 1)),
    "a tensor of too many parts": ("legacy", lambda content: content.replace(b"QK\x00", b"QK\x00" + b"N" * 30, 1)),
    "a tensor of what is no storage": ("legacy", lambda content: content.replace(b"QK", b"0)K", 1)),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_broken_is_refused(tmp_path: Path, name: str) -> None:
    kind, change = FOUND[name]
    file = fuzz_data.KINDS[kind].write(tmp_path)
    before = file.read_bytes()
    file.write_bytes(change(before))
    assert file.read_bytes() != before
    with pytest.raises(InputError, match="cannot be read as a checkpoint|is not a checkpoint"):
        fuzz_data.KINDS[kind].open(file)


def test_a_pipe_that_a_shell_has_opened_is_read() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as names:
        names.write("cat\ndog\n")
    try:
        assert read_classes_file(f"/dev/fd/{reading}") == ["cat", "dog"]
    finally:
        os.close(reading)
