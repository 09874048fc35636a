"""What is built for a package index: the wheel, the sdist and their metadata, compared with the tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

import testtime as tt

ROOT = Path(__file__).parents[1]
NOT_SHIPPED = {".ci/run", ".gitignore"}
BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # the first build replaces the arguments
build_meta.build_wheel(out)
build_meta.build_sdist(out)
assert not {"torch", "testtime"} & set(sys.modules), "building imports the package"
"""


def tracked() -> set[str]:
    """Every file of the repository, or of an unpacked sdist."""
    if (ROOT / ".git").exists():
        command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
        return {name for name in listed if name and (ROOT / name).is_file()}
    made = re.compile(
        r"\.egg-info/|__pycache__/|^(\.venvs?|build|dist|site|demo)/|/?\.[a-z_]+cache/|^\.coverage|^PKG-INFO|^setup\.cfg"
    )
    names = (path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.is_file())
    return {name for name in names if not made.search(name)}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[zipfile.ZipFile, tarfile.TarFile]:
    """A wheel and an sdist, built in a copy of the tree by the setuptools of this environment."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in tracked():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    (tree / "scratch").mkdir()
    (tree / "scratch" / "notes.md").touch()
    (tree / "shared").mkdir()
    (tree / "shared" / "photo.jpg").touch()
    done = subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(next(out.glob("*.whl"))), tarfile.open(next(out.glob("*.tar.gz")))


@pytest.fixture(scope="module")
def metadata(built) -> Message:
    return message_from_bytes(built[0].read(f"testtime-{tt.__version__}.dist-info/METADATA"))


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(built) -> None:
    wheel, _ = built
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    ours = {name.removeprefix("src/") for name in tracked() if name.startswith("src/testtime/")}
    assert inside == ours
    for name in ours:
        assert wheel.read(name) == (ROOT / "src" / name).read_bytes(), name


def test_the_wheel_holds_the_licence_and_the_command(built) -> None:
    wheel, _ = built
    folder = f"testtime-{tt.__version__}.dist-info"
    assert wheel.read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert b"testtime = testtime.__main__:main" in wheel.read(f"{folder}/entry_points.txt")


def test_the_sdist_holds_what_the_repository_does_and_no_scratch(built) -> None:
    _, sdist = built
    inside = {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}
    made = {name for name in inside if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    assert inside - made == tracked() - NOT_SHIPPED


def test_the_metadata_names_version_licence_and_pythons(metadata) -> None:
    assert metadata["Version"] == tt.__version__
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.11"
    assert "Project-URL" not in metadata  # none is public
    classifiers = metadata.get_all("Classifier")
    assert "Typing :: Typed" in classifiers
    assert [f"Programming Language :: Python :: 3.{n}" in classifiers for n in range(10, 16)] == [0, 1, 1, 1, 1, 0]


def test_the_description_has_no_link_that_an_index_cannot_follow(metadata) -> None:
    text = metadata.get_payload(decode=True).decode()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)]*)\)", readme)
    assert any(not target.startswith("http") for target in targets)  # there are some to remove
    assert [target for target in re.findall(r"\]\(([^)]*)\)", text) if not target.startswith("http")] == []
    assert "docs/methods.md lists the methods" in text  # a link leaves its text
    assert re.findall("^## .*", text, re.MULTILINE) == re.findall("^## .*", readme, re.MULTILINE)
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_the_packages_for_use_and_for_development_are_apart() -> None:
    """`make demo` installs the package alone; `make test` and `make docs` add the rest."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of `make test`

    def commands(target: str) -> str:
        words = ["make", "--dry-run", "--always-make", target]
        return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout

    assert "-e '.'" in commands("demo") and "-e '.[" not in commands("demo")
    for target in ("test", "docs", "setup"):
        assert "-e '.[offline,report,dev]'" in commands(target)
