from __future__ import annotations

import ast
import importlib
import re
import shutil
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import typer

import testtime as tt
from testtime import registry
from testtime.cli.app import app
from testtime.datasets import BENCHMARKS
from testtime.methods.dpe import DIFFERENCES

ROOT = Path(__file__).parents[1]


@pytest.fixture
def make_docs(monkeypatch):
    """scripts/make_docs.py as a module."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("make_docs")


def test_the_generated_pages_are_fresh(make_docs, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["make_docs.py", "--check"])
    make_docs.main()


def test_a_stale_part_of_a_page_is_detected_and_updated(make_docs, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(make_docs, "DOCS", shutil.copytree(ROOT / "docs", tmp_path / "docs"))
    page = tmp_path / "docs" / "dpe.md"
    page.write_text(page.read_text().replace("`scale_affinity` | `False`", "`scale_affinity` | `True`"))
    monkeypatch.setattr(sys, "argv", ["make_docs.py", "--check"])
    with pytest.raises(SystemExit, match="Stale: docs/dpe.md; run python scripts/make_docs.py"):
        make_docs.main()
    monkeypatch.setattr(sys, "argv", ["make_docs.py"])
    make_docs.main()
    assert page.read_text() == (ROOT / "docs" / "dpe.md").read_text()


def test_a_page_without_the_marker_of_a_part_is_rejected(make_docs) -> None:
    with pytest.raises(SystemExit, match="markers for"):
        make_docs.filled("No marker here.", {"table": lambda: ""}, "page.md")


def test_the_page_on_dpe_explains_every_difference() -> None:
    page = (ROOT / "docs" / "dpe.md").read_text()
    assert {difference.number for difference in DIFFERENCES} == set(range(1, 17))
    for difference in DIFFERENCES:
        assert f"\n**{difference.number}. " in page and f"| `{difference.option}` |" in page


def test_the_page_on_datasets_names_every_benchmark_with_its_terms() -> None:
    page = (ROOT / "docs" / "data.md").read_text()
    for row in BENCHMARKS:
        assert f"`{row.name}` | {row.classes:,} | {row.images:,} | {row.terms} |" in page
        assert f"`{row.coop}` | `{row.tpt}`" in page


def test_the_reference_has_every_public_name_and_every_command() -> None:
    names = set(re.findall(r"^::: testtime\.[\w.]*?(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE))
    assert set(tt.__all__) - {"__version__"} <= names
    page = (ROOT / "docs" / "commands.md").read_text()
    for name, command in typer.main.get_command(app).commands.items():
        for below in getattr(command, "commands", {"": command}):
            assert f"\n## testtime {name} {below}".rstrip() + "\n" in page


def test_the_page_on_methods_names_every_method_and_setting() -> None:
    page = (ROOT / "docs" / "methods.md").read_text()
    for name in registry.METHODS.ours:
        cls = registry.method_class(name)
        assert f"## {name}\n" in page
        assert cls.source != "Not published"
        for setting in fields(cls):
            assert f"`{setting.name}`" in page


def test_the_ten_lines_use_only_public_names_with_the_arguments_they_have() -> None:
    code = re.search(r"## In ten lines\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    used = {
        node.attr
        for node in ast.walk(ast.parse(code[1]))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tt"
    }
    assert used == {"load_encoder", "build_task", "Session", "folder"} and used <= set(tt.__all__)


def test_the_ten_lines_run_with_the_tiny_encoder(tmp_path, monkeypatch, capsys) -> None:
    from PIL import Image

    (tmp_path / "photos").mkdir()
    for number in range(2):
        Image.new("RGB", (40, 30), (90 * number, 60, 30)).save(tmp_path / "photos" / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    code = re.search(r"## In ten lines\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    plain = code[1].replace('"open_clip:ViT-B-16/openai", device="cuda"', '"tiny"').replace("views=64", "views=4")
    assert plain != code[1]
    exec(compile(plain, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert tt.Session.load(tmp_path / "pets.safetensors").count == 2
