"""`testtime doctor`: what is wrong with the machine, the images, the classes or the encoder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from testtime.cli import options
from testtime.cli.terminal import counted, out, waiting

if TYPE_CHECKING:
    from testtime.doctor import Finding

app = typer.Typer()
LIMIT = 200
WIDEST = 100  # columns of a line that is read with ease
MARKS = {"problem": "[bold red]✗[/]", "warning": "[bold yellow]![/]", "note": "[bold blue]i[/]", "fine": "[green]✓[/]"}


@app.command(epilog="Example:  testtime doctor photos/ --classes cat,dog,fox")
def doctor(
    images: Annotated[
        str | None,
        typer.Argument(
            metavar="IMAGES",
            help="What 'testtime run' takes, or a feature file; without it, only the machine is judged.",
        ),
    ] = None,
    root: options.Root = None,
    classes: options.Classes = None,
    classes_file: options.ClassesFile = None,
    encoder: options.EncoderName = "offline",
    template: options.Templates = None,
    device: options.Device = "auto",
    limit: Annotated[int, typer.Option("--limit", help="Most images to look at, spread over the classes.")] = LIMIT,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the sample.")] = 0,
    as_json: Annotated[
        bool, options.flag("--json", help="The findings as one JSON object on standard output.")
    ] = False,
) -> None:
    """Say what is wrong with a machine, images, classes or an encoder, and what to do about it.

    Looks for classes without folders, labels in another order, random or wrong weights, wrong preprocessing, prompts
    that ignore the class, broken, tiny or repeated images, an idle GPU and packages that do not fit. Labels are only
    used for scoring. The exit code is 1 if there is a problem, and 0 for warnings and notes alone.
    """
    from testtime.doctor import doctor as judge
    from testtime.doctor.finding import worst_first

    names = options.class_names(classes, classes_file) if classes is not None or classes_file is not None else None
    found = worst_first(
        judge(
            images,
            names,
            root=root,
            encoder=encoder,
            templates=template,
            device=device,
            limit=limit,
            seed=seed,
            watch=waiting,
        )  # fmt: skip
    )
    if as_json:
        print(json.dumps({"images": images, "findings": [finding._asdict() for finding in found]}))
    else:
        _print_page(found)
    if any(finding.severity == "problem" for finding in found):
        raise typer.Exit(1)


def _print_page(findings: list[Finding]) -> None:
    """Print the findings, worst first: what was seen, why it matters, the way out; fine ones on one line each."""
    width = min(out.width, WIDEST)
    previous = findings[0].severity if findings else ""
    for finding in findings:
        if finding.severity != previous or finding.severity in ("problem", "warning"):
            out.print()
        previous = finding.severity
        table = Table.grid(padding=(0, 1))
        table.add_column(width=1)
        table.add_column(max_width=width - 2, overflow="fold")
        seen, why, fix = map(escape, finding[2:])
        if finding.severity == "fine":
            table.add_row(MARKS["fine"], f"[dim]{seen}[/]")
        elif finding.severity == "note":
            table.add_row(MARKS["note"], f"{seen} [dim]{why}[/] [cyan]{fix}[/]")
        else:
            table.add_row(MARKS[finding.severity], f"[bold]{seen}[/]")
            table.add_row("", why)
            table.add_row("[cyan]→[/]", f"[cyan]{fix}[/]")
        out.print(table, highlight=False)
    counts = {kind: sum(finding.severity == kind for finding in findings) for kind in ("problem", "warning", "note")}
    said = [counted(count, kind) for kind, count in counts.items() if count]
    style = "red" if counts["problem"] else "yellow" if counts["warning"] else "green"
    out.print(f"\n[bold {style}]{', '.join(said) or 'nothing found: all is well'}[/]", highlight=False)
