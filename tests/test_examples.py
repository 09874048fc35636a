"""The examples run: the scripts as they are, and the notebook in a kernel, both with the tiny encoder."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from small_data import make_folders

from testtime import registry, save_features, toy
from testtime.checks import check_method

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NAMES = ("cat", "dog", "fox")
EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[1])
"""

pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the examples are not beside the tests")


def python(*arguments: object, cwd: Path, **environment: str) -> str:
    """What a Python process prints; it must end well."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=300,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_classify_folder_writes_a_row_for_each_image(tmp_path: Path) -> None:
    make_folders(tmp_path / "photos", NAMES, images=2)
    said = python(EXAMPLES / "classify_folder.py", "photos", "--encoder", "tiny", cwd=tmp_path)
    assert "6 images, " in said
    with open(tmp_path / "answers.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 and {row["label"] for row in rows} <= set(NAMES)
    assert f"{sum(row['label'] != row['zero_shot'] for row in rows)} answers changed" in said


def test_watch_folder_goes_on_where_it_stopped(tmp_path: Path) -> None:
    inbox = make_folders(tmp_path / "photos", ("inbox",), images=3) / "inbox"
    (inbox / "broken.png").write_text("no image")
    call = (EXAMPLES / "watch_folder.py", inbox, *NAMES, "--encoder", "tiny", "--once")
    first = python(*call, cwd=tmp_path)
    assert "0 images seen" in first and "3 images seen" in first and "skipped" in first
    (inbox / "2.png").rename(inbox / "new.png")
    second = python(*call, cwd=tmp_path)
    assert "3 images seen" in second and "new.png: Prediction(" in second and "4 images seen" in second
    assert [line.split("\t")[0] for line in (tmp_path / "watch.tsv").read_text().splitlines()] == [
        "0.png", "1.png", "2.png", "new.png",
    ]  # fmt: skip


def test_compare_methods_scores_each_and_writes_a_page(tmp_path: Path) -> None:
    said = python(EXAMPLES / "compare_methods.py", "--images", 40, "--classes", 5, cwd=tmp_path)
    for name in ("zeroshot", "tda", "dpe", "dpe 2", "drift"):
        assert f"\n{name:<12} " in said
    assert (tmp_path / "comparison.html").read_text().startswith("<!doctype html>")


def test_the_scripts_own_method_passes_the_checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = str(tmp_path / "x.html")
    monkeypatch.setattr(sys, "argv", ["compare_methods.py", "--images", "5", "--classes", "3", "--out", out])
    monkeypatch.syspath_prepend(EXAMPLES)
    method = import_module("compare_methods").Drift
    monkeypatch.setitem(registry.METHODS.ours, "drift", registry.Entry(method))  # as a plug-in would be
    check_method(method())


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example of a package in it, as its wheel would be installed."""
    tree, out = tmp_path_factory.mktemp("tree") / "own", tmp_path_factory.mktemp("installed")
    shutil.copytree(EXAMPLES / "own-method", tree, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    python("-c", build, cwd=tree)
    (wheel,) = out.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(out)
    return out


def test_a_package_with_a_method_passes_its_own_tests(installed: Path, tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "own-method" / "test_balanced.py", tmp_path)
    assert "3 passed" in python("-m", "pytest", "-p", "no:cacheprovider", tmp_path, cwd=tmp_path, **found(installed))


def test_a_package_with_a_method_has_its_row_in_the_board(installed: Path, tmp_path: Path) -> None:
    task, stream, labels = toy(classes=6, images=60, dim=32, views=1)
    save_features(tmp_path / "toy.safetensors", stream, task.text, classnames=task.classnames, labels=labels)
    call = "-m testtime leaderboard toy.safetensors --streams shuffled,sorted --orders 2 --out board".split()
    python(*call, "--methods", "tda", cwd=tmp_path, **found(installed))
    cells = {path: path.stat().st_mtime_ns for path in (tmp_path / "board" / "cells").iterdir()}
    said = python(*call, "--methods", "tda,balanced", "--json", cwd=tmp_path, **found(installed))
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "board" / "cells").iterdir()}
    assert cells.items() <= after.items() and len(after) == len(cells) + 2  # its own cells alone
    rows = {row["label"]: row for row in json.loads(said)["standings"]["one-setting"]["all cells"]}
    assert rows["balanced"]["package"] == "testtime-balanced 0.1.0" and rows["balanced"]["cells"] == 4
    assert rows["balanced"]["assumes"] == ["class balance"] and rows.keys() == {"zeroshot", "tda", "balanced"}
    verify = python("-m", "testtime", "leaderboard", "verify", "board/leaderboard.json", "--json", cwd=tmp_path,
                    **found(installed))  # fmt: skip
    assert json.loads(verify)["differ"] == 0


def found(installed: Path) -> dict[str, str]:
    """The environment in which a package in that folder is installed."""
    return {"PYTHONPATH": os.pathsep.join([str(installed), str(ROOT / "src")])}


def test_the_notebook_runs_and_draws(tmp_path: Path) -> None:
    for package in ("nbclient", "ipykernel", "sklearn", "pandas"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    text = (EXAMPLES / "first-hour.ipynb").read_text()
    tiny = text.replace('ENCODER = \\"offline\\"', 'ENCODER = \\"tiny\\"')
    assert tiny != text
    (tmp_path / "notebook.ipynb").write_text(tiny)
    folders = {name: str(tmp_path / name) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR")}
    python("-c", EXECUTE, "notebook.ipynb", cwd=tmp_path, **folders)
    cells = {cell["id"]: cell for cell in json.loads((tmp_path / "notebook.ipynb").read_text())["cells"]}
    assert cells["classify"]["outputs"], "no output"
    drawn = {
        "classify": '<img src="data:image/jpeg;base64,',
        "make-session": "zero-shot: ",
        "run": "8 of 8 images",
        "show-session": "features kept in queues",
        "resume": "Images seen",
        "report": "<iframe sandbox",
    }
    for cell, part in drawn.items():
        assert part in json.dumps(cells[cell]["outputs"], ensure_ascii=False).replace('\\"', '"'), cell
    outputs = [output for cell in cells.values() for output in cell.get("outputs", [])]
    warned = ["".join(output["text"]) for output in outputs if output.get("name") == "stderr"]
    assert not [text for text in warned if "TqdmWarning" not in text]  # that is open_clip's, about ipywidgets


def test_the_notebook_is_stored_without_outputs() -> None:
    for cell in json.loads((EXAMPLES / "first-hour.ipynb").read_text())["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None


def test_every_example_is_listed() -> None:
    page = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.iterdir():
        assert path.name == "README.md" or path.name.startswith((".", "__")) or f"]({path.name})" in page
