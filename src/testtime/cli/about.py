"""`testtime list`, `demo` and `version`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from testtime import __version__
from testtime.cli.options import flag
from testtime.cli.terminal import err, note, out

app = typer.Typer()


KINDS = {
    "methods": "testtime.registry:METHODS",
    "encoders": "testtime.registry:ENCODERS",
    "datasets": "testtime.datasets:DATASETS",
    "prompts": "testtime.text.templates:PROMPTS",
}
FORMS = [  # datasets that are given by path
    ("FOLDER", "Your own images; folders named after classes give labels for scoring"),
    ("FILE.tar, FILE.csv, ...", "webdataset shards, a table of paths and labels, Parquet, a saved dataset"),
    ("FILE.safetensors", "Features made by 'testtime encode', for 'testtime replay' and 'report'"),
]


@app.command("list", epilog="Example:  testtime list methods")
def list_(
    what: Annotated[
        str, typer.Argument(metavar="|".join(KINDS), help="What to list.", autocompletion=lambda: list(KINDS))
    ] = "methods",
) -> None:
    """List the available methods, encoders, datasets or prompt sets, including those of plug-ins."""
    from testtime import registry

    if what not in KINDS:
        raise registry.unknown("list", what, KINDS)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    kind: registry.Kind[object] = registry.load(KINDS[what])
    for name, summary in kind.listing(lambda line: note(f"note: {line}")) + FORMS * (what == "datasets"):
        table.add_row(escape(name), escape(summary))
    out.print(table)


@app.command(epilog="Example:  testtime demo --out demo")
def demo(
    output: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Folder for the HTML report.")] = Path(
        "demo"
    ),
    images: Annotated[
        str | None,
        typer.Option("--images", metavar="FOLDER", help="A copy of Caltech101, to show its photographs in the report."),
    ] = None,
    as_json: Annotated[bool, flag("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Watch adaptation on features of real photographs: a live table, then a report. No download, under a minute.

    The features of 2,465 Caltech101 photographs come with the package, the photographs do not: --images shows them.
    Settings are each method's defaults.
    """
    from testtime.cli.demo import run_demo
    from testtime.files import check_folder

    check_folder(output)
    run_demo(output, out if not as_json else err, as_json, images)


@app.command(epilog="Example:  testtime version")
def version() -> None:
    """Print the version, and those of the libraries that results depend on."""
    import platform

    out.print(
        f"testtime {__version__}, torch {_torch_version()}, Python {platform.python_version()}",
        highlight=False,
    )


def _torch_version() -> str:
    """`torch.__version__`, read from its file: importing torch takes seconds.

    The version of the installed package lacks the CUDA version: 2.6.0 instead of 2.6.0+cu124.
    """
    from importlib.util import find_spec
    from runpy import run_path

    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return "not installed"
    return run_path(str(Path(spec.origin).with_name("version.py")))["__version__"]
