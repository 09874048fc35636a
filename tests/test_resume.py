"""A run that is stopped and resumed is, to the last byte, the run that was not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import testtime as tt
from testtime.encoding.encoders.tiny import tiny

COUNT = 20
BROKEN = {"in the middle": (6, 7, 13), "at both ends": (0, 1, 19)}


@pytest.fixture(autouse=True)
def one_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same encoder for every command: to make it takes longer than to use it."""
    encoder = ENCODERS.setdefault("tiny", tiny())
    monkeypatch.setattr("testtime.encoding.encoders.tiny.tiny", lambda *given: encoder)


ENCODERS: dict[str, Any] = {}


@pytest.fixture(params=BROKEN.values(), ids=BROKEN)
def photos(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Twenty images of two classes, some of which are none."""
    noise = np.random.default_rng(0)
    for number in range(COUNT):
        path = tmp_path / "photos" / f"{number:02d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(noise.integers(0, 256, (30 + number, 40, 3), dtype=np.uint8)).save(path)
        if number in request.param:
            path.write_text("no image")
    return tmp_path / "photos"


@pytest.fixture
def run(cli: Callable[..., Any], photos: Path, tmp_path: Path) -> Callable[..., Any]:
    """Runs into files that are named after the run."""

    def call(name: str, style: str, *extra: object) -> tuple[bytes, bytes]:
        rows, state = tmp_path / f"{name}.{style}", tmp_path / f"{name}.safetensors"
        common = ["--encoder", "tiny", "--classes", "cat,dog,fox", "--views", 3, "--out", rows, "--save", state]
        resumed = ["--resume", state] if state.exists() else []
        done = cli("run", photos, *common, *resumed, *extra)
        # where every image so far is broken, that is an error, and the state is kept all the same
        assert done.code == 0 or "None of the images could be read" in done.err, done.err
        return rows.read_bytes(), state.read_bytes()

    return call


@pytest.mark.parametrize("style", ["csv", "jsonl"])
def test_run_stopped_after_any_image_ends_in_the_same_bytes(run: Callable[..., Any], style: str) -> None:
    rows, state = run("whole", style)
    assert len(rows.splitlines()) > 16
    for stop in range(1, COUNT + 1):
        run(f"after {stop}", style, "--limit", stop)
        again = run(f"after {stop}", style)
        assert again[0] == rows, stop
        assert again[1] == state, stop


def test_run_stopped_repeatedly_ends_in_the_same_bytes(run: Callable[..., Any]) -> None:
    whole = run("whole", "csv")
    for stop in range(1, COUNT + 1):
        parts = run("parts", "csv", "--limit", stop)
    assert parts == whole
    assert run("parts", "csv") == whole  # with nothing left to do


def test_rows_written_after_the_state_was_saved_are_written_again(run: Callable[..., Any], tmp_path: Path) -> None:
    whole = run("whole", "csv")
    run("crash", "csv", "--limit", 9)
    state = (tmp_path / "crash.safetensors").read_bytes()
    run("crash", "csv", "--limit", 15)
    (tmp_path / "crash.safetensors").write_bytes(state)  # the last save was lost
    with open(tmp_path / "crash.csv", "ab") as rows:
        rows.write(b"15,half a ro")
    assert run("crash", "csv") == whole


def test_position_of_a_state_is_where_the_input_resumes(run: Callable[..., Any], photos: Path, tmp_path: Path) -> None:
    run("part", "csv", "--limit", 9)
    session = tt.Session.load(tmp_path / "part.safetensors")
    readable = [path for path in sorted(photos.iterdir())[:9] if path.read_bytes() != b"no image"]
    assert (session.position, session.count) == (9, len(readable))
