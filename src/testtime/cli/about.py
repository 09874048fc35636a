"""`testtime list`, `demo` and `version`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from testtime import __version__
from testtime.cli.options import flag
from testtime.cli.terminal import err, note, out
from testtime.errors import MissingPart

app = typer.Typer()


@app.command("list", epilog="Example:  testtime list methods")
def list_(
    what: Annotated[str, typer.Argument(metavar="methods|encoders|datasets", help="What to list.")] = "methods",
) -> None:
    """List the methods, encoders or datasets there are."""
    from testtime import registry

    tables: dict[str, Callable[[], list[tuple[str, str]]]] = {
        "methods": _methods,
        "encoders": _encoders,
        "datasets": _datasets,
    }
    if what not in tables:
        raise registry.unknown("list", what, tables)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, summary in tables[what]():
        table.add_row(escape(name), escape(summary))
    out.print(table)


@app.command(epilog="Example:  testtime demo --out demo")
def demo(
    output: Annotated[Path, typer.Option("--out", "-o", help="Folder for the HTML report.")] = Path("demo"),
    as_json: Annotated[bool, flag("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Watch adaptation on real photographs: a live table, then a report. No download, under a minute.

    The features of 2,465 Caltech101 photographs come with the package. Settings are each method's defaults.
    """
    from testtime.cli.demo import run_demo
    from testtime.files import check_folder

    check_folder(output)
    run_demo(output, out if not as_json else err, as_json)


@app.command(epilog="Example:  testtime version")
def version() -> None:
    """Print the version, and those of the libraries that numbers depend on."""
    import platform

    out.print(
        f"testtime {__version__}, torch {_torch_version()}, Python {platform.python_version()}",
        highlight=False,
    )


def _torch_version() -> str:
    """What `torch.__version__` is, read from its file: importing torch takes seconds.

    The version of the installed package will not do. It has no CUDA in it: 2.6.0 where torch says 2.6.0+cu124.
    """
    from importlib.util import find_spec
    from runpy import run_path

    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return "not installed"
    return run_path(str(Path(spec.origin).with_name("version.py")))["__version__"]


def _methods() -> list[tuple[str, str]]:
    from testtime import registry

    rows = []
    for name in registry.method_names():
        try:
            rows.append((name, str(getattr(registry.method_class(name), "summary", ""))))
        except MissingPart as problem:
            note(f"note: {problem}")
    return rows


def _encoders() -> list[tuple[str, str]]:
    from testtime.encoding.encoders import describe

    return describe()


def _datasets() -> list[tuple[str, str]]:
    from testtime.datasets import BENCHMARKS

    return [
        *((row.name, f"{row.title}: {row.images:,} images, {row.classes:,} classes") for row in BENCHMARKS),
        ("FOLDER", "Your own images; folders named after a class give labels to score with"),
        ("FILE.tar, FILE.csv, ...", "Shards of webdataset, a table of paths and labels, Parquet, a saved dataset"),
        ("FILE.safetensors", "Features made by 'testtime encode', for 'testtime replay' and 'report'"),
    ]
