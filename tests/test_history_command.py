"""`testtime run --history` and `testtime history`: what people do with a run afterwards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk import Disk, restored
from PIL import Image

from testtime import files
from testtime.encoding.encoders.tiny import tiny
from testtime.session import Session
from testtime.session import journal as journals
from testtime.session.history import rollback
from testtime.session.history_files import read_history

ENCODERS: dict[str, Any] = {}
COUNT = 8


@pytest.fixture(autouse=True)
def one_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same encoder for every command, and no waiting for the disk."""
    encoder = ENCODERS.setdefault("tiny", tiny())
    monkeypatch.setattr("testtime.encoding.encoders.tiny.tiny", lambda *given: encoder)
    monkeypatch.setattr(files.os, "fsync", lambda descriptor: None)


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight images, the third of which is not an image."""
    monkeypatch.chdir(tmp_path)
    noise = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    for number in range(COUNT):
        pixels = noise.integers(0, 256, (24, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
    (tmp_path / "photos" / "2.png").write_text("no image")
    return Path("photos")


@pytest.fixture
def run(cli: Callable[..., Any], photos: Path) -> Callable[..., Any]:
    def call(*more: object, images: Path = photos, code: int = 0) -> Any:
        common = ["--encoder", "tiny", "--classes", "cat,dog,fox", "--views", 2]
        found = cli("run", images, *common, *(["--snapshot-every", 3] if "--history" in more else []), *more)
        assert found.code == code, found.err
        return found

    return call


def without(run: Callable[..., Any], photos: Path, number: int) -> bytes:
    """The state of a run that cannot read one image."""
    others = Path(shutil.copytree(photos, f"without-{number}"))
    (others / f"{number}.png").write_text("no image")
    run("--history", f"h-{number}", "--save", f"{number}.safetensors", "--out", f"{number}.csv", images=others)
    assert rollback(f"h-{number}").save(Path("s")).exists()
    return Path("s").read_bytes()


def test_an_image_is_unlearned_and_the_run_goes_on(run: Callable[..., Any], cli: Any, photos: Path) -> None:
    expected = without(run, photos, 4)
    said = run("--history", "h", "--save", "s.safetensors", "--out", "a.csv").err
    assert "history in h" in said
    done = cli("history", "unlearn", "h", "photos/4.png", "--out", "u.safetensors")
    assert done.code == 0 and "Image photos/4.png is unlearned" in done.err and "after the 6 others" in done.err
    assert Path("u.safetensors").read_bytes() == expected
    Path("t").mkdir()
    shutil.copy(photos / "0.png", "t/more.png")
    run("--resume", "u.safetensors", "--history", "h", "--save", "s2.safetensors", images=Path("t"))
    assert [(entry.index, entry.status) for entry in read_history(Path("h"))[1][3:]] == [
        (3, "answered"), (4, "unlearned"), (5, "answered"), (6, "answered"), (7, "answered"), (8, "answered"),
    ]  # fmt: skip
    refused = run("--resume", "s.safetensors", "--history", "h", code=2)
    assert "is none of the history in h" in refused.err and "--force starts a new history" in refused.err
    run("--resume", "s.safetensors", "--history", "h", "--force", images=Path("t"))
    assert [entry.index for entry in read_history(Path("h"))[1]] == [8]


@pytest.mark.parametrize("before, position", [("5", 5), ("photos/3.png", 3), ("2.5 s", None), ("8", 8)])
def test_a_rollback_is_the_state_of_a_shorter_run(
    run: Callable[..., Any], cli: Any, before: str, position: int | None
) -> None:
    run("--history", "h", "--save", "s.safetensors")
    if position is None:  # a time
        position, before = 6, read_history(Path("h"))[1][6].time.isoformat()
    done = cli("history", "rollback", "h", "--before", before, "--out", "r.safetensors")
    assert done.code == 0 and f"before image {position}," in done.err
    run("--history", "g", "--save", "g.safetensors", "--limit", position)
    rollback("g").save("short.safetensors")
    assert Path("r.safetensors").read_bytes() == Path("short.safetensors").read_bytes()
    again = cli("history", "rollback", "h", "--before", before, "--out", "r.safetensors")
    assert again.code == 2 and "--force overwrites it" in again.err
    run("--history", "h", "--resume", "r.safetensors", "--limit", 1)
    assert [entry.index for entry in read_history(Path("h"))[1]] == list(range(position + 1))


def test_the_history_is_enough_to_resume_from(run: Callable[..., Any], cli: Any) -> None:
    run("--history", "h")
    run("--save", "s.safetensors")
    assert cli("history", "rollback", "h", "--out", "r.safetensors").code == 0
    Session.load("s.safetensors").save("s2.safetensors")
    assert Path("r.safetensors").read_bytes() == Path("s2.safetensors").read_bytes()


def test_snapshots_and_images_are_listed(run: Callable[..., Any], cli: Any) -> None:
    run("--history", "h", "--history-limit", 50)
    table = cli("history", "show", "h")
    assert table.code == 0 and "dpe, 3 classes, tiny; 8 images since position 0: the history was started" in table.out
    assert "photos/7.png" in table.out and "skipped" in table.out
    found = json.loads(cli("history", "show", "h", "--json").out)
    assert [(each["position"], each["count"]) for each in found["snapshots"]] == [(0, 0), (3, 2), (6, 5)]
    assert [each["image"] for each in found["images"]] == [f"photos/{number}.png" for number in range(COUNT)]
    assert found["limit"] == 50 and found["every"] == 3 and found["bytes"] > 1000 and found["encoder"] == "tiny"
    assert [each["time"] for each in found["images"]] == sorted(each["time"] for each in found["images"])


def test_a_long_list_is_cut_unless_all_is_asked_for(
    run: Callable[..., Any], cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("--history", "h")
    monkeypatch.setattr("testtime.cli.history.SHOWN", 3)
    short, long = cli("history", "show", "h").out, cli("history", "show", "h", "--all").out
    assert "photos/4.png" not in short and "and 5 before them; --all shows them" in short and "photos/5.png" in short
    assert "photos/0.png" in long and "before them" not in long


def test_mistakes_are_errors_that_name_the_way_out(run: Callable[..., Any], cli: Any, photos: Path) -> None:
    run("--history", "h")
    for arguments, said in (
        (["unlearn", "h", "99"], "has no image 99; it has images 0 to 7"),
        (["unlearn", "h", "2"], "Image 2 could not be read"),
        (["unlearn", "h", "me.png"], "has no image 'me.png'"),
        (["rollback", "h", "--before", "2020-01-01"], "is before the history in h"),
        (["rollback", "h", "--before", "yesterday"], "has no image 'yesterday'"),
        (["rollback", "none"], "No folder none"),
        (["rollback", photos], "photos is not a history"),
        (["rollback", photos / "0.png"], "is not a history"),
    ):
        found = cli("history", *arguments, "--out", "o.safetensors")
        assert found.code == 2 and said in found.err, found.err
    assert not Path("o.safetensors").exists() and not Path("none").exists()
    assert "already exists: --force overwrites it, --resume STATE" in run("--history", "h", code=2).err
    assert "is in the folder of the history" in cli("history", "rollback", "h", "--out", "h/s.safetensors").err
    assert "is in the folder of the history" in run("--history", "g", "--save", "g/s.safetensors", code=2).err
    assert "photos holds 0.png, which is no file of a history" in run("--history", photos, code=2).err
    assert "need --history FOLDER" in run("--history-limit", 9, code=2).err
    assert "limit=4: must be at least 6" in run("--history", "g", "--history-limit", 4, code=2).err
    run("--history", "h", "--force", "--limit", 4)
    assert len(read_history(Path("h"))[1]) == 4


@pytest.mark.parametrize("resumed", [False, True], ids=["from the start", "resumed"])
def test_a_run_killed_after_any_write_goes_on_with_its_history(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> None:
    monkeypatch.setattr(journals, "AUTOSAVE", 2)

    def go(place: Path, *more: object) -> None:
        run("--out", place / "a.csv", "--save", place / "s.safetensors", "--history", place / "h", *more)

    def bytes_of(place: Path) -> list[bytes]:
        moments = [rollback(place / "h", before=index).save(Path("m")).read_bytes() for index in range(COUNT + 1)]
        return [*moments, (place / "a.csv").read_bytes(), (place / "s.safetensors").read_bytes()]

    for name in ("whole", "first"):
        Path(name).mkdir()
    go(Path("whole"))
    whole = bytes_of(Path("whole"))
    if resumed:
        go(Path("first"), "--limit", 4)
    with monkeypatch.context() as patch:
        disk = Disk(Path("first").resolve(), patch)
        go(Path("first"), *(["--resume", "first/s.safetensors"] if resumed else []))
    disk.close()
    assert bytes_of(Path("first")) == whole
    lefts = list(dict.fromkeys(tuple(file for file in left if not file[0].endswith(".toml")) for left in disk.left))
    states = 0
    for number, left in enumerate(lefts):
        again = Path(f"again-{number}")
        restored(left, again)
        there = (again / "s.safetensors").exists()
        states += there
        go(again, *(["--resume", again / "s.safetensors"] if there else ["--force"]))
        assert bytes_of(again) == whole, [(name, len(data)) for name, data in left]
    assert states >= 15
