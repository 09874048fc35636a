"""Commands are timed alone and beside a busy process, which is gone afterwards; and beside a plain zero-shot loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from testtime import Features


@pytest.fixture
def neighbour(benchmark: Callable[[str], Any]) -> Any:
    return benchmark("neighbour")


def test_commands_are_timed_alone_and_beside_a_neighbour(neighbour: Any, tmp_path: Path) -> None:
    out = tmp_path / "neighbour.json"
    assert neighbour.main(["--quick", "--only", "replay,denormal", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    (row,) = report["cases"].values()
    for what in ("seconds", "ms an image"):
        assert row[f"{what}, ratio"] == pytest.approx(row[f"{what}, beside"] / row[f"{what}, alone"])
    assert {"ordinary", "nearly equal, --reference", "ratio", "ratio, --reference"} <= set(report["denormal"])


def test_a_command_that_fails_says_why_and_leaves_no_neighbour(
    neighbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, popen = [], neighbour.subprocess.Popen

    def remembered(*arguments: Any, **more: Any) -> Any:
        started.append(popen(*arguments, **more))
        return started[-1]

    runner = neighbour.Runner(1)
    monkeypatch.setattr(neighbour.subprocess, "Popen", remembered)
    with pytest.raises(RuntimeError, match="testtime replay failed .*nothing.safetensors"), runner.neighbour():
        runner.call("replay", tmp_path / "nothing.safetensors")
    assert [process.poll() is not None for process in started] == [True, True]


def test_photographs_are_run_and_encoded(neighbour: Any, tmp_path: Path, cli: Callable[..., Any]) -> None:
    found = neighbour.cases(tmp_path, SimpleNamespace(only=("photographs",), quick=True))
    assert [words[0] for words in found.values()] == ["run", "encode"]
    assert [cli(*words).code for words in found.values()] == [0, 0]


def test_features_are_alike_where_they_should_be(neighbour: Any, tmp_path: Path) -> None:
    for alike in (False, True):
        store = Features(neighbour.stored(tmp_path / "stored.safetensors", 10, 4, 6, alike=alike))
        text = store.task().text
        least = float((text @ text.T).min())
        assert (store.views, len(store), store.dim) == (4, 6, 512) and (least > 0.99) is alike


def test_a_plain_loop_gives_the_same_zero_shot_answers(
    benchmark: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "loop.json"
    assert benchmark("zero_shot_loop").main(["--quick", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["zero-shot answers alike"] == 1 and report["images"] == 20
    assert all(ms > 0 for ms in report["ms an image"].values()) and "ratio" in capsys.readouterr().out
    assert f"{torch.get_num_threads()} threads" in report["machine"]
