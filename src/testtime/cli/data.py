"""`testtime data check` and `data info`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from testtime.cli.options import benchmarks, flag
from testtime.cli.terminal import out, waiting
from testtime.errors import InputError

if TYPE_CHECKING:
    from testtime.datasets.benchmarks import Benchmark
    from testtime.datasets.check import Finding

app = typer.Typer(no_args_is_help=True, help="Show which datasets you have, and where to get the others.")

STYLES = {"complete": "green", "found": "green", "half copied": "yellow", "differs": "yellow", "broken": "red"}

Json = Annotated[bool, flag("--json", help="One JSON object on standard output.")]


@app.command(epilog="Example:  testtime data check ~/datasets")
def check(
    root: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder that holds the datasets, or one dataset's own folder.")
    ],
    as_json: Json = False,
) -> None:
    """Look for the fifteen benchmarks in a folder: where each is, how many images it has, what is missing.

    Both CoOp's and TPT's layouts are recognised, and datasets of plug-ins. The exit code is 0 if at least one dataset
    is usable and none is broken.
    """
    from testtime.datasets.check import check_datasets

    with waiting("searching") as status:
        findings = check_datasets(root.expanduser(), lambda name: status.update(f"checking {name}"))
    if as_json:
        print(json.dumps({"root": str(root), "datasets": [_finding(finding) for finding in findings]}))
    else:
        _print_findings(findings, root.expanduser())
    if all(finding.state == "missing" for finding in findings):
        raise InputError(f"None of the {len(findings)} benchmarks is in {root}; give the folder that holds them.")
    if any(finding.state == "broken" for finding in findings) or not any(finding.usable for finding in findings):
        raise typer.Exit(1)


@app.command(epilog="Example:  testtime data info imagenet-a")
def info(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A benchmark's short name; see 'testtime list datasets'.",
            autocompletion=benchmarks,
        ),
    ],
    as_json: Json = False,
) -> None:
    """Show a benchmark's size, source, terms, expected folders and prompts."""
    from testtime.datasets import benchmark, templates

    row = benchmark(name)
    prompts = {track: list(templates(row.name, track)) for track in ("released", "paper")}
    if as_json:
        print(json.dumps(row._asdict() | {"templates": prompts}))
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in _rows(row, prompts):
        table.add_row(key, escape(value))
    out.print(f"[bold]{escape(row.title)}[/]")
    out.print(table)


def _rows(row: Benchmark, prompts: dict[str, list[str]]) -> list[tuple[str, str]]:
    rows = [
        ("name", row.name),
        ("test split", f"{row.images:,} images, {row.classes:,} classes"),
        ("download", row.archive),
        ("from", row.source),
        ("terms", row.terms),
        ("CoOp layout", row.coop),
        ("TPT layout", row.tpt),
    ]
    if row.split:
        rows.append(("listed in", row.split))
    for track, texts in prompts.items():
        more = [f"and {len(texts) - 7} more"] if len(texts) > 7 else []
        rows.append((f"prompts, {track}", "\n".join(texts[:7] + more)))
    return rows


def _finding(finding: Finding) -> dict[str, object]:
    row = finding.row
    return {
        "name": finding.name,
        "state": finding.state,
        "folder": None if finding.folder is None else str(finding.folder),
        "layout": finding.layout or None,
        "images": finding.images,
        "expected_images": row.images if row else None,
        "classes": finding.classes,
        "expected_classes": row.classes if row else None,
        "notes": list(finding.notes),
    }


def _print_findings(findings: list[Finding], root: Path) -> None:
    """Print the datasets found, notes on them, and then those to download."""
    found = [finding for finding in findings if finding.folder is not None]
    if found:
        gap = 2 if out.width >= 100 else 1  # keeps a folder's name on one line
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, gap, 0, 0))
        table.add_column("dataset", style="bold", no_wrap=True)
        table.add_column("state", no_wrap=True)
        for column in ("images", "of", "classes"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("layout", no_wrap=True)
        table.add_column("found in", overflow="fold")
        for finding in found:
            table.add_row(
                finding.name,
                f"[{STYLES[finding.state]}]{finding.state}[/]",
                f"{finding.images:,}",
                f"{finding.row.images:,}" if finding.row else "",
                f"{finding.classes:,}",
                finding.layout,
                escape(_relative(finding.folder, root)),
            )
        out.print(table)
    for finding in found:
        if finding.notes:
            notes = escape("; ".join(finding.notes))
            out.print(f"[{STYLES[finding.state]}]{finding.name}[/]: {notes}", highlight=False)
    missing = [finding for finding in findings if finding.folder is None]
    if missing:
        out.print(f"\n[bold]Missing[/]: {len(missing)} of {len(findings)}", highlight=False)
        wide = out.width >= 120  # a URL is only useful on one line
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in ("dataset", "download", "from")[: 3 if wide else 2]:
            table.add_column(column, style="bold" if column == "dataset" else "", no_wrap=True)
        for finding in missing:
            where = [finding.row.archive, finding.row.source] if finding.row else [*finding.notes, ""]
            table.add_row(finding.name, *(map(escape, where if wide else ["\n".join(where)])))
        out.print(table)
        if any(finding.row and finding.row.kind == "split" for finding in missing):
            from testtime.datasets.benchmarks import SPLITS

            out.print(f"[dim]split_zhou_*.json files are linked from {SPLITS}[/]", highlight=False)


def _relative(folder: Path | None, root: Path) -> str:
    if folder is None:
        return ""
    return str(folder.relative_to(root)) if folder.is_relative_to(root) else str(folder)
