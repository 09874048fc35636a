"""What tests share: the command line, and the folders of stored traces and of real data, where they are there."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import settings

# the prototypes of every task begin 8 bytes past a multiple of 64: there, libraries may multiply in another way
MISPLACED = bool(os.environ.get("TESTTIME_TESTS_MISPLACED"))

SHARED = Path(__file__).parents[2] / "shared"

# the machine that runs these may be busy: a slow example is no failure, and the same examples come every time
settings.register_profile("testtime", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("testtime")


if MISPLACED:
    import torch

    from testtime.types import Task

    _whole = Task.__post_init__

    def _misplaced(task: Task) -> None:
        text = task.text
        if text.is_cpu and text.is_floating_point() and text.ndim == 2:
            room = torch.empty(text.nbytes + 128, dtype=torch.uint8)
            start = -room.data_ptr() % 64 + 8
            moved = room[start : start + text.nbytes].view(text.dtype).view(text.shape)
            object.__setattr__(task, "text", moved.copy_(text.detach()))
        _whole(task)

    Task.__post_init__ = _misplaced  # type: ignore[method-assign]


def _shared(name: str) -> Path:
    folder = SHARED / name
    if not folder.is_dir():
        pytest.skip(f"no folder {folder}")
    return folder


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of stored traces of the authors' released code."""
    return _shared("golden")


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real images and prompts."""
    return _shared("data")


@pytest.fixture
def pillow_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, Pillow makes the views that Triton's kernels make on a GPU."""
    import torch
    from PIL import Image

    from testtime.encoding import stream
    from testtime.images.views import grey_levels

    def grey_views(images: Any, drawn: Any, preprocess: Any) -> torch.Tensor:
        pairs = zip(images, drawn, strict=True)
        return torch.stack([grey_levels(Image.fromarray(image.numpy()), rows, preprocess) for image, rows in pairs])

    monkeypatch.setattr(stream, "grey_views", grey_views)


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """The programs that measure, as modules by their names."""

    def load(name: str) -> Any:
        folder = Path(__file__).parents[1] / "benchmarks"
        if not (folder / f"{name}.py").exists():
            pytest.skip("the benchmarks are not beside the tests")
        monkeypatch.syspath_prepend(str(folder))
        return importlib.import_module(name)

    return load


class Outcome(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


def command(*arguments: object) -> int:
    """The exit code of a command, run in this process."""
    from testtime.cli.app import main

    try:
        main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """The command line in this process: its arguments in, its exit code and what it printed out."""
    import testtime.cli.terminal  # noqa: F401, first: a console that is made under COLUMNS keeps that width for good

    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = command(*arguments)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Outcome(code, captured.out, captured.err)

    return call
