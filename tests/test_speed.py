"""The speed program runs every stage in small, writes its file, and goes on where a stage fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "benchmarks" / "speed.py"

pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="the benchmarks are not beside the tests")


def run(*options: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), "--quick", "--device", "cpu", *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def test_every_stage_runs_in_small(tmp_path: Path) -> None:
    out, svg = tmp_path / "speed.json", tmp_path / "speed.svg"
    done = run("--out", str(out), "--svg", str(svg))
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["errors"] == {}
    stages = {"step", "encoder", "views", "whole", "decode", "rn50", "released", "growth"}
    assert set(report["results"]) == stages
    assert report["machine"]["torch"] == torch.__version__
    step = report["results"]["step"]
    assert step["dpe, runner"] > 0 and step["dpe, runner: largest difference of a logit"] < 1e-3
    assert report["results"]["views"]["AugMix: mean difference from Pillow"] < 1
    assert svg.read_text().startswith("<svg") and "ms</text>" in svg.read_text()


def test_failed_stage_is_reported_and_the_next_one_runs(tmp_path: Path) -> None:
    out = tmp_path / "speed.json"
    code = (
        "import sys; sys.path.insert(0, 'benchmarks'); import speed\n"
        "def broken(bench): raise RuntimeError('no such kernel')\n"
        "speed.STAGES['step'] = broken\n"
        f"sys.exit(speed.main(['--quick', '--device', 'cpu', '--stages', 'step,views', '--out', {str(out)!r}]))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    report = json.loads(out.read_text())
    assert "no such kernel" in report["errors"]["step"] and "views" in report["results"]


def test_unknown_stage_is_refused() -> None:
    done = run("--stages", "warp")
    assert done.returncode == 2 and "unknown stages warp" in done.stderr
