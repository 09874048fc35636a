from __future__ import annotations

import os
import subprocess
import sys

import pytest

import testtime as tt

PROBE = """
import atexit, sys

def loaded():
    print(sorted({"fastapi", "numpy", "PIL", "torch"} & set(sys.modules)), file=sys.stderr)

atexit.register(loaded)
from testtime.__main__ import main
main()
"""


def light(*arguments: str, **environment: str) -> str:
    """What a command prints, in a process of its own that must not load torch, numpy or PIL."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"COLUMNS": "200"} | environment,
    )
    assert done.stderr.splitlines() == ["[]"]
    return done.stdout


def complete(line: str) -> list[str]:
    """What bash is offered for the last word of a line."""
    words = line.split(" ")
    return light(_TESTTIME_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1)).split()


@pytest.mark.parametrize(
    "command",
    [
        "",
        *"run encode replay report serve train-prompts eval bench list doctor demo version data history token".split(),
        "leaderboard",
        "data check",
        "history unlearn",
        "leaderboard make",
        "token add",
    ],
)
def test_help_loads_nothing_heavy(command) -> None:
    assert "Usage: testtime" in light(*command.split(), "--help")


@pytest.mark.parametrize("word", ["version", "--version", "-V"])
def test_the_version_loads_nothing_heavy(word) -> None:
    assert light(word).startswith(f"testtime {tt.__version__}, torch ")


@pytest.mark.parametrize(
    "line, offered",
    [
        ("testtime re", ["replay", "report"]),
        ("testtime --version re", ["replay", "report"]),  # and the version is not printed among them
        ("testtime run --enc", ["--encoder"]),
        ("testtime run photos --method tp", ["tps", "tpt"]),
        ("testtime data c", ["check"]),
        ("testtime history ", ["show", "rollback", "unlearn"]),
        ("testtime history rollback h --bef", ["--before"]),
        ("testtime run photos --encoder o", ["offline", "open_clip:"]),
        ("testtime run photos --device c", ["cpu", "cuda"]),
        ("testtime run photos --preset ", ["released", "quick", "paper", "unknown_length"]),
        ("testtime run photos --template imagenet", ["imagenet7", "imagenet80"]),
        ("testtime run -c none.toml --met", ["--method"]),  # the file is not read
        ("testtime run --root data food", ["food101"]),
        ("testtime run food", []),  # the shell completes file names
        ("testtime data info dt", ["dtd"]),
        ("testtime bench comp", ["components"]),
        ("testtime list en", ["encoders"]),
    ],
)
def test_completion_offers_what_fits_and_loads_nothing_heavy(line, offered) -> None:
    assert complete(line) == offered


def test_the_script_for_a_shell_is_there_and_loads_nothing_heavy() -> None:
    assert "_TESTTIME_COMPLETE" in light(_TESTTIME_COMPLETE="source_bash")


def test_completion_knows_every_preset_and_every_benchmark() -> None:
    """They are listed without importing what defines them."""
    from testtime import registry
    from testtime.cli import options
    from testtime.datasets import BENCHMARKS

    defined = [preset for name in registry.METHODS.ours for preset in registry.method_class(name).presets]
    assert options.presets() == list(dict.fromkeys(defined))
    assert {row.name for row in BENCHMARKS} <= set(options.benchmarks())
