from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import testtime as tt
from testtime import registry

ROOT = Path(__file__).parents[1]


def test_the_generated_pages_are_fresh() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "make_docs.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_page_on_methods_names_every_method_and_setting() -> None:
    page = (ROOT / "docs" / "methods.md").read_text()
    for name in registry.METHODS:
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
