"""What `testtime plan` prints, for the page on clusters."""

from __future__ import annotations

import shlex
from contextlib import redirect_stdout
from io import StringIO

import typer

from pages import table
from testtime.cli.app import app
from testtime.cluster import figures

EXAMPLE = "plan --images 1e9 --model ViT-L-14 --views 64 --gpus 64 --gpu h200"


def plan() -> str:
    """The tables of the example, as the command prints them."""
    printed = StringIO()
    with redirect_stdout(printed):
        typer.main.get_command(app)([*shlex.split(EXAMPLE), "--markdown"], standalone_mode=False)
    title, *lines = printed.getvalue().splitlines()
    return "\n".join([f"**{title.removeprefix('# ')}**", *lines]) + "\n"


def gpus() -> str:
    """The GPUs that can be planned with."""
    rows = [
        [
            f"`{name}`",
            f"{peak['tflops']:,g}",
            f"{peak['bandwidth']:,g}",
            f"{peak['memory']:g}",
            "measured" if name == figures.stages()["measured_gpu"] else "estimate",
        ]
        for name, peak in figures.gpus().items()
    ]
    return table(["GPU", "TFLOP/s, float16", "GB/s", "GB", "figures"], rows) + "\n"
