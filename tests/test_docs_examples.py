"""Code and commands in the documentation run, with a tiny encoder and synthetic photographs.

The code of a page runs from top to bottom in one namespace, in a folder with all files that the pages mention. Blocks
that cannot run here are marked in the page, in a comment before the block, with the reason:

    <!-- compiled only: needs the benchmarks -->
    <!-- parsed only: takes minutes on real photographs -->

The plug-ins in `docs/extend.md`, in blocks with a file name, are installed with the entry points given there,
and so is the package in `examples/own-method`.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import typer
from fuzz_videos import write_video
from PIL import Image

import testtime.encoding.encoders
from testtime import registry
from testtime.cli.app import app, main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CLASSES = ("cat", "dog", "fox")
PHOTOS = 2  # of each class
FENCE = re.compile(
    r"(?:<!-- (?P<mark>compiled|parsed) only: [^\n]+ -->\n+)?"
    r"^(?P<indent> *)```(?P<language>\w+)\n(?P<body>.*?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)
SHELL = ("sh", "bash", "console")
EXTEND = ROOT / "docs" / "extend.md"
OWN = ROOT / "examples" / "own-method"
FILE = re.compile(r'^```python title="(?P<name>\w+\.py)"\n(?P<body>.*?)^```', re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """One fenced block of a page."""

    language: str
    body: str
    runs: bool  # not marked as compiled or parsed only

    @property
    def commands(self) -> list[list[str]]:
        """The `testtime` commands of a shell block, as lists of words."""
        lines = self.body.replace("\\\n", " ").splitlines()
        words = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
        return [line[1:] for line in words if line[:1] == ["testtime"]]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order, without their indentation."""
    found = []
    for match in FENCE.finditer(page.read_text()):
        body = re.sub(f"^{match['indent']}", "", match["body"], flags=re.MULTILINE)
        found.append(Block(match["language"], body, match["mark"] is None))
    return found


def pages_with(*languages: str) -> list[Path]:
    return [page for page in PAGES if any(block.language in languages for block in blocks(page))]


def names(page: Path) -> str:
    return page.name


@pytest.fixture(scope="module")
def example_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all files that the pages mention."""
    folder = tmp_path_factory.mktemp("examples")
    noise = np.random.default_rng(0)
    for part in ("photos", "tomorrow", "train"):
        for name in CLASSES:
            (folder / part / name).mkdir(parents=True)
            for number in range(PHOTOS):
                pixels = noise.integers(0, 255, (24, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{number}.png")
    photos = [f"photos/{name}/{number}.png" for name in CLASSES for number in range(PHOTOS)]
    (folder / "list.txt").write_text("\n".join(photos))
    (folder / "classes.txt").write_text("\n".join(CLASSES))
    (folder / "photos.csv").write_text("path,label\n" + "\n".join(f"{path},{path.split('/')[1]}" for path in photos))
    (folder / "cupl.json").write_text(json.dumps({name: [f"A {name} has four legs."] for name in CLASSES}))
    (folder / "broken.png").write_bytes(b"not a picture")
    (folder / "clips").mkdir()
    shutil.copy(write_video(folder / "clip.mp4"), folder / "clips" / "1.mp4")
    (folder / "collection" / "herd" / "test").mkdir(parents=True)
    for path in photos:
        name, number = path.split("/")[1:]
        shutil.copy(folder / path, folder / "collection" / "herd" / "test" / f"{name}_{number}")
    # the results of the first hour, for pages that continue from there
    with pytest.MonkeyPatch.context() as patch:
        set_up(patch, folder)
        call(["encode", "photos/", "--classes", "cat,dog,fox", "--views", "8", "--out", "photos.safetensors"])
        call(["run", "photos/", "--classes", "cat,dog,fox", "--out", "first.csv", "--save", "pets.safetensors"])
    return folder


@pytest.fixture
def workdir(example_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder is a copy of the example files."""
    set_up(monkeypatch, shutil.copytree(example_files, tmp_path / "workdir"))


def set_up(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Change into a folder, install the plug-ins, and replace every encoder that is not a plug-in by the tiny one."""
    load = testtime.encoding.encoders.load_encoder
    patch.chdir(folder)
    for file in FILE.finditer(EXTEND.read_text()):
        (folder / file["name"]).write_text(file["body"])
    patch.syspath_prepend(OWN)
    patch.syspath_prepend(folder)
    points = [*entry_points(), *points_in((OWN / "pyproject.toml").read_text())]
    patch.setattr(registry, "entry_points", lambda group: [point for point in points if point.group == group])

    def tiny_under_that_name(name: str, device: str = "cpu", dtype: object = None) -> object:
        if name in testtime.encoding.encoders.ENCODERS.plug_ins():
            return load(name, device)
        encoder = load("tiny")
        encoder.name = name
        return encoder

    patch.setattr(testtime.encoding.encoders, "load_encoder", tiny_under_that_name)
    patch.setenv("COLUMNS", "120")


def entry_points() -> list[EntryPoint]:
    """The entry points in the page on plug-ins."""
    return [point for block in blocks(EXTEND) if block.language == "toml" for point in points_in(block.body)]


def points_in(project: str) -> list[EntryPoint]:
    """The entry points in a pyproject.toml."""
    groups = tomllib.loads(project)["project"]["entry-points"].items()
    return [EntryPoint(name, value, group) for group, points in groups for name, value in points.items()]


def call(arguments: list[str]) -> None:
    """Run one command; any exit code other than 0 is a failure."""
    try:
        main(arguments)
    except SystemExit as stop:
        assert not stop.code, f"testtime {shlex.join(arguments)} ended with exit code {stop.code}"


def parse(arguments: list[str]) -> None:
    """Check that a command and its options exist, without running it."""
    command, name = typer.main.get_command(app), "testtime"
    words = list(arguments)
    while hasattr(command, "commands"):
        if words and words[0] not in command.commands and hasattr(command, "default"):
            words.insert(0, command.default)
        assert words and words[0] in command.commands, f"no command '{' '.join([name, *words[:1]])}'"
        name = f"{name} {words[0]}"
        command = command.commands[words.pop(0)]
    if "--config" in words:  # a file that is not there, with the required argument in it
        place = words.index("--config")
        words[place : place + 2] = ["IMAGES"]
    command.make_context(name, words)


@pytest.mark.parametrize("page", pages_with("python"), ids=names)
def test_code_in_the_documents_runs(page: Path, workdir: None, capsys: pytest.CaptureFixture[str]) -> None:
    space = {"__name__": "__main__"}
    for number, block in enumerate(block for block in blocks(page) if block.language == "python"):
        code = compile(block.body, f"{page.name}, block {number}", "exec", dont_inherit=True)
        if block.runs:
            exec(code, space)


@pytest.mark.parametrize("page", pages_with(*SHELL), ids=names)
def test_commands_in_the_documents_exist_with_their_options(page: Path) -> None:
    for block in blocks(page):
        if block.language in SHELL:
            for arguments in block.commands:
                parse(arguments)


@pytest.mark.parametrize(
    "page",
    [p for p in pages_with(*SHELL) if any(b.commands for b in blocks(p) if b.language in SHELL and b.runs)],
    ids=names,
)
def test_commands_in_the_documents_run(page: Path, workdir: None, capsys: pytest.CaptureFixture[str]) -> None:
    commands = [words for block in blocks(page) if block.language in SHELL and block.runs for words in block.commands]
    for arguments in commands:
        for option, value in zip(arguments, arguments[1:], strict=False):
            if option in ("--out", "--save") and Path(value).is_file():
                Path(value).unlink()  # of the first hour; commands of a page do not overwrite each other's files
    for arguments in commands:
        call(arguments)


def test_the_page_on_plug_ins_has_one_of_each_kind_and_all_are_listed(workdir: None, capsys) -> None:
    groups = {f"testtime.{kind}": kind for kind in ("methods", "encoders", "datasets", "prompts")}
    assert {point.group for point in entry_points()} == set(groups)
    for point in entry_points():
        call(["list", groups[point.group]])
        assert point.name in capsys.readouterr().out


def test_a_command_or_an_option_that_does_not_exist_is_noticed() -> None:
    parse(["replay", "photos.safetensors", "--method", "dpe"])
    with pytest.raises(AssertionError, match="no command 'testtime repaly'"):
        parse(["repaly", "photos.safetensors"])
    with pytest.raises(Exception, match="--metod"):
        parse(["replay", "photos.safetensors", "--metod", "dpe"])


def test_blocks_that_do_not_run_are_marked_with_a_reason() -> None:
    marked = [(page.name, block) for page in PAGES for block in blocks(page) if not block.runs]
    several = {"README.md", "commands.md", "data.md", "doctor.md", "experiments.md", "leaderboard.md"}
    several |= {"cluster.md", "serve.md", "streams.md"}
    assert {name for name, _ in marked} <= several
    assert all(block.language in ("python", *SHELL) for _, block in marked)
