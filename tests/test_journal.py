"""Rows and state of a run belong together, whatever happens to it: killed, cut off from power, out of disk, raced."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk import Disk, restored
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

from testtime import files
from testtime.encoding.encoders.tiny import tiny
from testtime.session import Session
from testtime.session import journal as journals

ENCODERS: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def one_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same encoder for every command: making it takes longer than using it."""
    encoder = ENCODERS.setdefault("tiny", tiny())
    monkeypatch.setattr("testtime.encoding.encoders.tiny.tiny", lambda *given: encoder)


def picture(path: Path, number: int) -> Path:
    noise = np.random.default_rng(number)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise.integers(0, 256, (24, 30, 3), dtype=np.uint8)).save(path, "PNG")
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Six images, the third of which is not an image."""
    for number in range(6):
        picture(tmp_path / "photos" / f"{number}.png", number)
    (tmp_path / "photos" / "2.png").write_text("no image")
    return tmp_path / "photos"


class Run:
    """`testtime run` into two files."""

    def __init__(self, cli: Callable[..., Any], folder: Path, style: str = "csv") -> None:
        self.cli, self.rows, self.state = cli, folder / f"rows.{style}", folder / "state.safetensors"
        folder.mkdir(exist_ok=True)

    def __call__(self, images: object, *more: object, resume: bool = False, code: int = 0) -> Any:
        common = ["--encoder", "tiny", "--classes", "cat,dog,fox", "--out", self.rows, "--save", self.state]
        found = self.cli("run", images, *common, *(["--resume", self.state] if resume else []), *more)
        assert found.code == code, found.err
        return found

    def bytes(self) -> tuple[bytes, bytes]:
        return self.rows.read_bytes(), self.state.read_bytes()


@pytest.fixture
def run(cli: Callable[..., Any], tmp_path: Path) -> Callable[..., Run]:
    return lambda name, style="csv": Run(cli, tmp_path / name, style)


# Killed processes and power cuts


@pytest.mark.parametrize("style", ["csv", "parquet"])
@pytest.mark.parametrize("resumed", [False, True], ids=["from the start", "resumed"])
def test_a_run_killed_after_any_write_resumes_to_the_same_bytes(
    run: Callable[..., Run], photos: Path, monkeypatch: pytest.MonkeyPatch, resumed: bool, style: str
) -> None:
    monkeypatch.setattr(journals, "AUTOSAVE", 2)
    whole = run("whole", style)
    whole(photos)
    first = run("first", style)
    if resumed:
        first(photos, "--limit", 2)
        if style == "csv":
            with open(first.rows, "ab") as rows:
                rows.write(b"2,half a row")
    with monkeypatch.context() as patch:
        disk = Disk(first.rows.parent, patch)
        first(photos, resume=resumed)
    disk.close()
    assert first.bytes() == whole.bytes()
    assert len(disk.left) >= (7 if resumed else 10)
    states = 0
    for number, left in enumerate(disk.left):
        again = run(f"again {number}", style)
        restored(left, again.rows.parent)
        # without a state there is nothing to resume
        again(photos, *([] if again.state.exists() else ["--force"]), resume=again.state.exists())
        assert again.bytes() == whole.bytes(), [(name, len(data)) for name, data in left]
        states += again.state.name in dict(left)
    assert states >= 7


def test_a_new_run_is_never_confused_with_an_earlier_one(
    run: Callable[..., Run], photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are old rows and an old state before a new run, which is killed at any point."""
    monkeypatch.setattr(journals, "AUTOSAVE", 2)
    whole, old = run("whole"), run("old")
    whole(photos)
    old(photos, "--method", "tda")
    with monkeypatch.context() as patch:
        disk = Disk(old.rows.parent, patch)
        old(photos, "--force")
    disk.close()
    outcomes = set()
    for number, left in enumerate(disk.left):
        again = run(f"again {number}")
        restored(left, again.rows.parent)
        try:
            again(photos, resume=True)
        except AssertionError:
            before = dict(left)
            assert again.rows.read_bytes() == before[again.rows.name]  # refused, and nothing changed
            outcomes.add("refused")
            continue
        text = again.rows.read_text()
        outcomes.add("whole" if again.bytes() == whole.bytes() else "old")
        assert len(text.splitlines()) == 6  # a header and five images, once each
    assert "whole" in outcomes and "refused" in outcomes


def test_an_evaluation_killed_after_any_write_resumes_to_the_same_bytes(
    cli: Callable[..., Any], photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its results, cells and features; timings may differ."""
    table = tmp_path / "table.csv"
    table.write_text("path,label\n" + "".join(f"photos/{n}.png,{'cat' if n % 2 else 'dog'}\n" for n in range(6)))

    def evaluate(out: Path) -> dict[str, bytes]:
        common = ["--methods", "zeroshot,dpe", "--seeds", "1,2", "--shard", 2, "--views", 2]
        found = cli("eval", table, "-e", "tiny", *common, "--out", out)
        assert found.code == 0, found.err
        kept = [path for path in out.rglob("*") if path.is_file() and "timings" not in path.parts]
        return {str(path.relative_to(out)): path.read_bytes() for path in kept}

    whole = evaluate(tmp_path / "whole")
    (tmp_path / "first").mkdir()
    with monkeypatch.context() as patch:
        disk = Disk(tmp_path / "first", patch)
        assert evaluate(tmp_path / "first") == whole
    disk.close()
    lefts = list(dict.fromkeys(tuple(file for file in left if "timings" not in file[0]) for left in disk.left))
    assert len(lefts) >= 12
    for number, left in enumerate(lefts):
        restored(left, tmp_path / f"again {number}")
        assert evaluate(tmp_path / f"again {number}") == whole, [(name, len(data)) for name, data in left]


# Rows and state go together


def test_a_full_disk_leaves_a_state_that_can_be_resumed(
    run: Callable[..., Run], photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, full = run("whole"), run("full")
    whole(photos)
    written = journals.Rows._write

    def fails(self: journals.Rows, text: str) -> None:
        if text.startswith("3,"):
            raise OSError(errno.ENOSPC, "No space left on device")
        written(self, text)

    with monkeypatch.context() as patch:
        patch.setattr(journals.Rows, "_write", fails)
        assert "No space left" in full(photos, code=2).err
    full(photos, resume=True)
    assert full.bytes() == whole.bytes()


def test_a_strict_run_resumes_at_the_image_that_stopped_it(run: Callable[..., Run], photos: Path) -> None:
    stopped, whole = run("stopped"), run("whole")
    assert "2.png" in stopped(photos, "--strict", code=2).err
    assert Session.load(stopped.state).position == 2
    picture(photos / "2.png", 2)
    stopped(photos, "--strict", resume=True)
    whole(photos)
    assert stopped.bytes() == whole.bytes()


def test_rows_of_another_state_are_refused_and_kept(run: Callable[..., Run], photos: Path) -> None:
    one = run("one")
    one(photos, "--limit", 2)
    one.rows.write_text("index,image\n0,mine\n")
    found = one(photos, resume=True, code=2)
    assert f"{one.rows} does not start with the rows of the run that saved {one.state}" in found.err
    assert one.rows.read_text() == "index,image\n0,mine\n"


def test_a_state_without_its_own_rows_does_not_touch_a_file(run: Callable[..., Run], photos: Path) -> None:
    one = run("one")
    assert one.cli("run", photos, "-e", "tiny", "--classes", "a,b", "--save", one.state).code == 0
    one.rows.write_text("mine")
    found = one.cli("run", photos, "-e", "tiny", "--classes", "a,b", "--resume", one.state, "--out", one.rows)
    assert found.code == 2 and "does not record which rows belong to it" in found.err and one.rows.read_text() == "mine"


@pytest.mark.parametrize(
    "told", ["{", "5", "[]", '{"rows": 3}', '{"rows": [-1, ""]}', "[" * 100_000, '{"rows": ["", 1]}']
)
def test_a_damaged_journal_is_an_error_that_says_so(run: Callable[..., Run], photos: Path, told: str) -> None:
    one = run("one")
    one(photos, "--limit", 2)
    before = one.rows.read_bytes()
    with safe_open(one.state, "pt") as file:
        tensors, facts = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
    save_file(tensors, one.state, facts | {journals.JOURNAL: told})
    one(photos, resume=True, code=2)
    assert one.rows.read_bytes() == before


def test_rows_hold_the_truth_where_it_is_known(run: Callable[..., Run], photos: Path, tmp_path: Path) -> None:
    table, one, lines = tmp_path / "table.csv", run("one"), run("lines", "jsonl")
    table.write_text("path,label\nphotos/0.png,cat\nphotos/1.png,owl\nphotos/3.png,dog\n")
    one(table, "--limit", 1)
    one(table, resume=True)  # labels go on where the rows do
    lines(table)
    rows = list(csv.DictReader(io.StringIO(one.rows.read_text(), newline="")))
    assert [row["truth"] for row in rows] == ["cat", "", "dog"]
    assert [row["correct"] for row in rows] == [str(rows[0]["label"] == "cat"), "", str(rows[2]["label"] == "dog")]
    written = [json.loads(line) for line in lines.rows.read_text().splitlines()]
    assert [row["truth"] for row in written] == ["cat", None, "dog"]
    assert [row["correct"] for row in written] == [
        row["label"] == row["truth"] if row["truth"] else None for row in written
    ]
    assert all(tuple(row) == journals.COLUMNS for row in written)


@pytest.mark.parametrize("style", ["csv", "tsv", "jsonl"])
def test_rows_of_an_older_version_are_refused_and_kept(
    run: Callable[..., Run], photos: Path, monkeypatch: pytest.MonkeyPatch, style: str
) -> None:
    one, row = run("one", style), journals.row
    with monkeypatch.context() as patch:
        patch.setattr(journals, "COLUMNS", journals.COLUMNS[:-2])
        patch.setattr(journals, "NAMES", journals.NAMES[:-1])
        patch.setattr(journals, "row", lambda *given: {key: row(*given)[key] for key in journals.COLUMNS})
        one(photos, "--limit", 2)
    before = one.rows.read_bytes()
    found = one(photos, resume=True, code=2)
    assert f"{one.rows} has the columns index, image," in found.err and "this version writes" in found.err
    assert one.rows.read_bytes() == before
    one(photos, "--force", resume=True)  # all images again, with what the state has learned, as into a new file
    assert len(list(names(one.rows))) == 5


# Parquet


def test_parquet_holds_the_rows_with_their_types(run: Callable[..., Run], photos: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    lines, table = run("lines", "jsonl"), run("table", "parquet")
    lines(photos)
    table(photos)
    found = parquet.read_table(table.rows)
    assert found.to_pylist() == [json.loads(line) for line in lines.rows.read_text().splitlines()]
    assert [str(found.schema.field(name).type) for name in ("index", "confidence", "truth", "correct")] == [
        "int64", "double", "string", "bool",
    ]  # fmt: skip
    assert sorted(path.name for path in table.rows.parent.iterdir()) == ["rows.parquet", "rows.toml", table.state.name]


def test_an_interrupted_run_leaves_its_rows_as_parquet(
    run: Callable[..., Run], photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    whole, one = run("whole", "parquet"), run("one", "parquet")
    whole(photos)
    advance, calls = Session._advance, iter(range(9))

    def stops(self: Session, views: Any) -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return advance(self, views)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "_advance", stops)
        one(photos, code=130)
    assert len(parquet.read_table(one.rows)) == 3
    one(photos, resume=True)
    assert one.bytes() == whole.bytes()


def test_rows_of_a_killed_run_are_not_lost_to_a_new_one(run: Callable[..., Run], photos: Path) -> None:
    one = run("one", "parquet")
    left = one.rows.with_name("rows.parquet.partial.jsonl")
    left.write_text('{"index": 0}\n')
    found = one(photos, code=2)
    assert str(left) in found.err and "--force overwrites it" in found.err and left.read_text() == '{"index": 0}\n'
    one(photos, "--force")
    assert not left.exists()


def test_a_parquet_file_of_something_else_is_refused_and_kept(run: Callable[..., Run], photos: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    one = run("one", "parquet")
    one(photos, "--limit", 2)
    for content in (pyarrow.table({"mine": [1, 2]}), None):
        one.rows.write_bytes(b"no parquet") if content is None else parquet.write_table(content, one.rows)
        before = one.rows.read_bytes()
        one(photos, resume=True, code=2)
        assert one.rows.read_bytes() == before and not list(one.rows.parent.glob("*.jsonl"))


def test_parquet_without_its_library_is_an_error_that_names_it(
    run: Callable[..., Run], photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("testtime.session.answers.find_spec", lambda name: None)
    assert "pip install 'testtime[datasets]'" in run("one", "parquet")(photos, code=2).err


# The input


def test_a_path_listed_several_times_has_as_many_rows(run: Callable[..., Run], photos: Path, tmp_path: Path) -> None:
    listed = tmp_path / "list.txt"
    listed.write_text("\n".join(str(photos / f"{number}.png") for number in (0, 1, 0, 3, 0, 1, 4)))
    whole, parts = run("whole"), run("parts")
    whole(listed)
    parts(listed, "--limit", 3)
    parts(listed, resume=True)
    assert parts.bytes() == whole.bytes() and len(whole.rows.read_text().splitlines()) == 8


def test_the_same_folder_by_another_name_resumes(
    run: Callable[..., Run], photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(photos.parent)
    one = run("one")
    one("photos", "--limit", 4)
    one(photos, resume=True)
    assert [line.split(",")[0] for line in one.rows.read_text().splitlines()[1:]] == ["0", "1", "3", "4", "5"]


@pytest.mark.parametrize("style", ["csv", "jsonl"])
def test_only_new_images_of_a_grown_folder_are_run(run: Callable[..., Run], photos: Path, style: str) -> None:
    one = run("one", style)
    one(photos)
    picture(photos / "1b.png", 7)
    found = one(photos, resume=True)
    rows = one.rows.read_text().splitlines()
    assert len(rows) == (6 if style == "csv" else 5) + 1 and "1b.png" in rows[-1]
    assert "1 image," in found.err and "skipped" in found.err  # what could not be read is tried again


def test_an_image_has_one_name_as_a_file_in_an_archive_and_in_a_row(tmp_path: Path, monkeypatch) -> None:
    class Stored:
        def __str__(self) -> str:
            return "shards/a.tar/1\udcff.png"

    monkeypatch.chdir(tmp_path)
    known = journals._image_key(Stored())
    for style in ("csv", "tsv", "jsonl"):
        text = io.StringIO()
        prediction = dict.fromkeys(journals.COLUMNS, 0) | {"image": str(Stored()), "label": "a", "zero_shot": "a"}
        journals.Rows(text, style).write(prediction)
        assert list(journals._images_in(text.getvalue().encode("utf-8", "backslashreplace"), style, tmp_path)) == [
            known
        ]
    assert journals._image_key(tmp_path / str(Stored())) == known


def test_the_same_path_with_two_labels_is_scored_by_each(run: Callable[..., Run], photos: Path, tmp_path: Path) -> None:
    table, one = tmp_path / "table.csv", run("one")
    table.write_text("path,label\nphotos/0.png,cat\nphotos/0.png,dog\nphotos/0.png,fox\n")
    told = json.loads(one(table, "--json", "--method", "zeroshot").err.splitlines()[-1])
    assert told["labelled"] == 3 and told["zero_shot_accuracy"] == pytest.approx(1 / 3)


# Each output has its own file


def test_no_output_overwrites_an_input_or_another_output(run: Callable[..., Run], tmp_path: Path) -> None:
    table, one = tmp_path / "table.csv", run("one")
    table.write_text(f"path,label\n{picture(tmp_path / '0.png', 0)},cat\n{picture(tmp_path / '1.png', 1)},dog\n")
    (tmp_path / "link.csv").symlink_to(table)
    one(table)
    odd = shutil.copy(one.state, tmp_path / "state.jsonl")
    before = {path: path.read_bytes() for path in (table, tmp_path / "0.png", one.rows, one.state, odd)}
    for more, said in (
        (["--out", table], "--out would overwrite IMAGES"),
        (["--out", tmp_path / "link.csv"], "--out would overwrite IMAGES"),
        (["--save", tmp_path / "0.png"], "--save would overwrite IMAGES"),
        (["--save", one.rows], "--out and --save are the same file"),
        (["--report", one.rows], "--out and --report are the same file"),
        (
            ["--save", tmp_path / "new", "--out", odd, "--resume", odd],
            "--out would overwrite --resume",
        ),
    ):
        assert said in one(table, *more, code=2).err, more
    assert before == {path: path.read_bytes() for path in before}


def test_rows_may_go_to_a_device(cli: Callable[..., Any], photos: Path, tmp_path: Path) -> None:
    common = ["run", photos, "-e", "tiny", "--classes", "a,b", "--save", tmp_path / "state"]
    assert cli(*common, "--out", "/dev/null").code == 0 and (tmp_path / "state").exists()


# One at a time


def test_a_second_run_into_the_same_files_is_refused(run: Callable[..., Run], photos: Path) -> None:
    one = run("one")
    one(photos)
    before = one.bytes()
    for place in (one.rows, one.state):
        with files.locked(place):
            assert f"{place} is being written by process {os.getpid()} on " in one(photos, code=2).err
    assert one.bytes() == before
    assert sorted(path.name for path in one.rows.parent.iterdir()) == ["rows.csv", "rows.toml", "state.safetensors"]


def test_a_lock_does_not_outlive_its_process(tmp_path: Path) -> None:
    code = f"import os\nfrom testtime.files import locked\nwith locked({str(tmp_path / 'a')!r}):\n    os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert (tmp_path / ".a.lock").exists()
    with files.locked(tmp_path / "a"):
        pass
    assert not (tmp_path / ".a.lock").exists()


# Names


def names(rows: Path) -> Iterator[str]:
    text = rows.read_text(encoding="utf-8")
    if rows.suffix in (".csv", ".tsv"):
        table = csv.DictReader(io.StringIO(text, newline=""), delimiter="," if rows.suffix == ".csv" else "\t")
        return (row["image"] for row in table)
    return (json.loads(line)["image"] for line in text.split("\n") if line)


@pytest.mark.parametrize("style", ["csv", "jsonl"])
def test_rows_with_any_image_name_can_be_resumed(run: Callable[..., Run], tmp_path: Path, style: str) -> None:
    folder, odd = tmp_path / "odd", ["a\u2028b", "c\nd", 'e"f,g', "h\x1b[2Ji", "j\udcffk", "l\x85m"]
    for number, name in enumerate(odd):
        picture(folder / f"{name}.png", number)
    whole, parts = run("whole", style), run("parts", style)
    whole(folder)
    found = list(names(whole.rows))
    assert len(found) == len(odd)
    expected = [str(folder / f"{name}.png") for name in odd]
    if style == "csv":
        expected = [text.encode("utf-8", "backslashreplace").decode() for text in expected]
    assert sorted(found) == sorted(expected)
    for stop in range(1, len(odd)):
        parts(folder, "--limit", stop, resume=stop > 1)
    parts(folder, resume=True)
    assert parts.bytes() == whole.bytes()


def test_no_cell_is_a_formula_and_a_path_stays_valid(
    run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = picture(tmp_path / '=HYPERLINK("http:' / "x.png", 0).relative_to(tmp_path)
    one = run("one")
    one(file, "--classes", "=1+1,@SUM(A1)")
    (row,) = csv.DictReader(io.StringIO(one.rows.read_text(), newline=""))
    assert row["label"] in ("'=1+1", "'@SUM(A1)") and row["zero_shot"].startswith("'")
    assert row["image"] == f"./{file}" and Path(row["image"]).is_file()


def test_control_characters_are_escaped_on_a_terminal(cli: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    picture(folder / "good.png", 0)
    (folder / "bad\x1b]0;mine\x07.png").write_text("no image")
    found = cli("run", folder, "-e", "tiny", "--classes", "a,b")
    assert found.code == 0 and "\x1b" not in found.err and "\x07" not in found.err
    assert "bad\\x1b]0;mine\\x07.png" in found.err


def test_help_into_a_closed_pipe_is_not_a_failure() -> None:
    testtime = shutil.which("testtime", path=str(Path(sys.executable).parent))
    for words in ("--help", "run --help", "list methods"):
        shell = f"set -o pipefail; {testtime} {words} | head -1"
        done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
        assert done.returncode == 0 and not done.stderr, words
