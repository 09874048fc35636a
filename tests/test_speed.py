"""The speed program runs every stage in small, writes its file, and goes on where a stage fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture
def speed(benchmark: Callable[[str], Any]) -> Any:
    return benchmark("speed")


def test_every_stage_runs_in_small(speed: Any, tmp_path: Path) -> None:
    out, svg = tmp_path / "speed.json", tmp_path / "speed.svg"
    assert speed.main(["--quick", "--device", "cpu", "--out", str(out), "--svg", str(svg)]) == 0
    report = json.loads(out.read_text())
    assert report["errors"] == {}
    assert set(report["results"]) == set(speed.STAGES) - {"kernels"}  # there are none on the CPU
    assert report["machine"]["torch"] == torch.__version__
    step = report["results"]["step"]
    assert step["dpe, stepper"] > 0 and step["dpe, stepper: largest difference of a logit"] < 1e-3
    assert report["results"]["views"]["AugMix: Pillow, one core"] > 0
    assert report["results"]["whole"]["ViT-B-16, AugMix: least cosine with the plain features"] > 0.99
    assert report["results"]["commands"]["run, crops"] > 0 and report["results"]["commands"]["replay, dpe"] > 0
    assert svg.read_text().startswith("<svg") and "ms</text>" in svg.read_text()


def test_failed_stage_is_reported_and_the_next_one_runs(
    speed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(bench: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(speed.STAGES, "step", broken)
    out = tmp_path / "speed.json"
    assert speed.main(["--quick", "--device", "cpu", "--stages", "step,decode", "--out", str(out)]) == 1
    report = json.loads(out.read_text())
    assert "no such kernel" in report["errors"]["step"] and "decode" in report["results"]


def test_targets_name_what_is_measured(speed: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--quick", "--device", "cpu", "--stages", "rn50"]
    parsed = speed.options_of(options)
    bench = speed.Bench(parsed)
    speed.STAGES["rn50"](bench)
    speed.compare(bench)
    named = {row["entry"] for row in bench.report["targets"]}
    assert named == {name for stage, name, _ in speed.TARGETS if stage == "rn50"}
    assert "of 4" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "said"), [("--stages warp", "unknown stages warp"), ("--images 9", "at least 52")])
def test_what_cannot_be_measured_is_refused(
    speed: Any, words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        speed.main(words.split())
    assert said in capsys.readouterr().err
