"""Options from a file and into one."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from small_data import make_folders
from typer.models import OptionInfo

from testtime.cli import config
from testtime.cli.app import app
from testtime.cli.options import NUMBER
from testtime.types import InputError

KEYS = st.from_regex(r"[a-z][a-z-]{0,8}", fullmatch=True)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
VALUES = st.one_of(TEXT, st.integers(), st.booleans(), st.lists(TEXT, max_size=4))


@given(st.dictionaries(KEYS, VALUES, max_size=6))
def test_what_is_written_is_read_again(values: dict[str, Any]) -> None:
    assert tomllib.loads(config.to_toml(values)) == values


@given(TEXT)
def test_any_name_can_be_in_the_comment(name: str) -> None:
    assert tomllib.loads(config._comment(name) + "a = 1\n") == {"a": 1}


@pytest.mark.parametrize("text", ["\x7f\x00\x1b", 'a "quoted" \\ word', "two\nlines\r\n", "\u2028\ufeff", "'''"])
def test_odd_text_is_read_again(text: str) -> None:
    assert tomllib.loads(config.to_toml({"a": text})) == {"a": text}


def test_a_name_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(InputError, match="not UTF-8"):
        config.to_toml({"out": Path("\udcff.csv")})


def commands(command: Any) -> list[Any]:
    below = getattr(command, "commands", {}).values()
    return [each for group in below for each in commands(group)] or [command]


def test_whole_numbers_and_nothing_else_have_the_metavar_of_numbers() -> None:
    """The type that a file must hold is read from it."""
    groups = [group.typer_instance for group in app.registered_groups]
    callbacks = [command.callback for group in groups for command in group.registered_commands]
    assert len(callbacks) > 10
    for callback in callbacks:
        for hint in get_type_hints(callback, include_extras=True).values():
            for about in getattr(hint, "__metadata__", ()):
                if isinstance(about, OptionInfo):
                    kinds = (hint.__origin__, *get_args(hint.__origin__))
                    assert (about.metavar == NUMBER) == (int in kinds), (callback, about.param_decls)


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A few images in the current folder."""
    monkeypatch.chdir(tmp_path)
    return make_folders(tmp_path / "photos", images=2)


def write(text: str) -> str:
    Path("c.toml").write_text(text, encoding="utf-8")
    return "c.toml"


def test_a_run_takes_its_options_from_a_file_and_the_command_line_takes_precedence(cli, photos) -> None:
    file = write('images = "photos"\nencoder = "tiny"\nviews = 2\nout = "a.csv"\nset = ["alpha=3"]\nstrict = true\n')
    assert cli("run", "--config", file).code == 0
    kept = tomllib.loads(Path("a.toml").read_text())
    assert (kept["views"], kept["set"], kept["strict"], kept["images"]) == (2, ["alpha=3"], True, "photos")
    assert cli("run", "-c", file, "--force", "--views", 3, "--set", "alpha=4").code == 0
    kept = tomllib.loads(Path("a.toml").read_text())
    assert (kept["views"], kept["set"]) == (3, ["alpha=4"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('clases = "a,b"', "Did you mean 'classes'?"),
        ('views = "3"', "must be a whole number, as in views = 3"),
        ("views = 3.5", "must be a whole number"),
        ("views = true", "must be a whole number"),
        ("seed = [1]", "must be a whole number"),
        ("shuffle = 1", "must be true or false"),
        ("out = 3", 'must be text, as in out = "FILE"'),
        ('classes = ["cat", "dog"]', 'as in classes = "cat,dog"'),
        ('set = "alpha=3"', 'must be a list of text, as in set = ["KEY=VALUE"]'),
        ("set = [3]", "must be a list of text"),
        ("[set]\nalpha = 3", "must be a list of text"),
        ('config = "c.toml"', "Unknown option 'config'"),
        ("force = true", "Unknown option 'force'"),
        ("images = photos", "is not TOML: Invalid value (at line 1"),
        ("a = " + "[" * 5000, "is not TOML"),
    ],
)
def test_a_wrong_file_is_an_error_that_says_what_to_write(cli, photos, text, said) -> None:
    found = cli("run", "-c", write(text))
    assert found.code == 2 and "--config c.toml" in found.err and said in found.err, found.err


def test_a_file_that_is_missing_or_a_folder_is_an_error(cli, photos) -> None:
    assert "none.toml: No such file" in cli("run", "-c", "none.toml").err
    assert cli("run", "-c", photos).code == 2


def test_a_run_is_repeated_from_the_file_beside_its_output(cli, photos) -> None:
    run = ["run", photos, "-e", "tiny", "--method", "tda", "--template", 'a "photo" of\na {}', "--shuffle"]
    assert cli(*run, "--seed", 3, "--out", "a.jsonl").code == 0
    rows, options = Path("a.jsonl").read_bytes(), Path("a.toml").read_bytes()
    refused = cli("run", "-c", "a.toml")
    assert refused.code == 2 and "--force overwrites it" in refused.err
    assert cli("run", "-c", "a.toml", "--force").code == 0
    assert (Path("a.jsonl").read_bytes(), Path("a.toml").read_bytes()) == (rows, options)


def test_the_file_of_a_run_and_its_continuation_repeats_both(cli, photos) -> None:
    run = ["run", photos, "--out", "a.csv", "--save", "s.safetensors"]
    assert cli(*run, "-e", "tiny", "--method", "tda", "--views", 2, "--limit", 3).code == 0
    assert cli(*run, "--resume", "s.safetensors").code == 0
    rows = Path("a.csv").read_bytes()
    kept = tomllib.loads(Path("a.toml").read_text())
    assert (kept["method"], kept["views"]) == ("tda", 2) and not {"limit", "resume"} & kept.keys()
    assert cli("run", "-c", "a.toml", "--force").code == 0 and Path("a.csv").read_bytes() == rows


def test_a_file_of_yours_beside_the_output_is_left_alone(cli, photos) -> None:
    Path("a.toml").write_text("mine = 1\n")
    found = cli("run", photos, "-e", "tiny", "--out", "a.csv")
    assert found.code == 0 and "a.toml is not a file of an earlier run" in found.err
    assert Path("a.toml").read_text() == "mine = 1\n"
    own = 'images = "photos"  # mine\nencoder = "tiny"\nout = "b.csv"\n'
    Path("b.toml").write_text(own)
    found = cli("run", "-c", "b.toml")  # it holds them
    assert found.code == 0 and "b.toml" not in found.err and Path("b.toml").read_text() == own


def test_no_file_is_left_beside_a_device_or_standard_output(cli, photos) -> None:
    assert cli("run", photos, "-e", "tiny", "--out", "/dev/null").code == 0
    assert cli("run", photos, "-e", "tiny").code == 0
    assert not list(Path().glob("*.toml")) and not Path("/dev/null.toml").exists()


def test_a_run_over_a_name_that_is_not_utf8_goes_on_without_its_file(cli, photos) -> None:
    photos.rename(os.fsdecode(b"photos\xff"))
    found = cli("run", os.fsdecode(b"photos\xff"), "-e", "tiny", "--out", "a.csv")
    assert found.code == 0 and "not kept in a.toml" in found.err and not Path("a.toml").exists()


@pytest.mark.parametrize(
    "words",
    [["run", "--limit", 2], ["encode", "--out", "f.safetensors"], ["eval", "--seeds", "1", "--limit", 4]],
    ids=lambda words: words[0],
)
def test_options_are_saved_and_used_again(cli, photos, words) -> None:
    name, *more = words
    saving = [name, photos, "-e", "tiny", *more, "--save-config", "c.toml"]
    assert cli(*saving).code == 0
    saved = Path("c.toml").read_bytes()
    force = [] if name == "eval" else ["--force"]
    assert cli(name, "-c", "c.toml", *force).code == 0
    assert cli(*saving, *force).code == 0 and Path("c.toml").read_bytes() == saved  # the same again is no loss
    Path("c.toml").write_text("# mine")
    Path("f.safetensors").unlink(missing_ok=True)
    refused = cli(*saving)
    assert refused.code == 2 and "--save-config c.toml already exists, with other options" in refused.err
    assert ("--force" in refused.err) == bool(force) and Path("c.toml").read_text() == "# mine"


def test_a_mistake_leaves_no_file(cli, photos) -> None:
    assert cli("run", photos, "--method", "dpee", "--save-config", "c.toml", "--out", "a.csv").code == 2
    assert not Path("c.toml").exists() and not Path("a.toml").exists()


def test_keys_are_the_long_names_of_options_and_arguments() -> None:
    found = {command.name: config._options(command) for command in commands(typer.main.get_command(app))}
    assert {"images", "classes", "set", "out", "json"} <= found["run"].keys()
    assert {"data", "methods", "prompts"} <= found["eval"].keys()
