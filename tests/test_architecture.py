"""Imports follow the subpackages and arrows in docs/architecture.md, and the paths it names exist."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "testtime"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
OUTSIDE = ("__init__", "__main__", "checks")  # top-level modules that only look names up, or that nothing imports

sys.path.insert(0, str(ROOT / "scripts"))
from pages.architecture import LAYERS, subpackages  # noqa: E402

DEPENDS_ON = subpackages(PAGE)


def subpackage(module: str) -> str:
    """The subpackage of a module, given its dotted name without `testtime.`."""
    first = module.partition(".")[0]
    return first if (SOURCE / first).is_dir() else "core"


def reached(name: str) -> set[str]:
    """The subpackage itself, and all that it depends on, directly or indirectly."""
    return {name}.union(*map(reached, DEPENDS_ON[name]))


def modules() -> dict[str, Path]:
    paths = {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in SOURCE.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in paths.items() if name not in OUTSIDE}


def imports(path: Path) -> set[str]:
    """The modules of the package that a file imports anywhere, as dotted names without `testtime.`."""
    known, found = modules(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name.removeprefix("testtime.") for name in found} & known.keys()


def test_the_table_names_every_subpackage_and_the_diagram_shows_them() -> None:
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert DEPENDS_ON.keys() == {*packages, "core"} == {name for layer in LAYERS for name in layer}
    for name, below in DEPENDS_ON.items():
        assert name == "core" or below, f"{name} depends on nothing"


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_point_one_way(name) -> None:
    allowed = reached(subpackage(name))
    wrong = {other for other in imports(modules()[name]) if subpackage(other) not in allowed}
    assert not wrong, f"{name} may not import {sorted(wrong)}: {subpackage(name)} depends on {sorted(allowed)}"


def test_an_import_against_the_arrows_would_be_noticed(tmp_path) -> None:
    odd = tmp_path / "odd.py"
    odd.write_text("def late():\n    from testtime.session import run\n    import testtime.cli.app\n")
    assert {subpackage(other) for other in imports(odd)} == {"session", "cli"} and "cli" not in reached("session")


def test_every_change_names_files_that_are_there() -> None:
    table = PAGE.partition("## To change X, open Y")[2]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 12
    for change, files in rows:
        paths = re.findall(r"`([^`]+)`", files)
        assert paths, change
        for path in paths:
            assert (SOURCE / path).exists() or (ROOT / path).exists(), f"{change.strip()}: there is no {path}"
