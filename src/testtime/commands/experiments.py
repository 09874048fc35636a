"""`testtime bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from testtime.commands.options import (
    AugMix,
    Device,
    EncoderName,
    Limit,
    Seed,
    Views,
)
from testtime.devices import find_device
from testtime.terminal import err, out, percent
from testtime.types import InputError

app = typer.Typer()


@app.command(epilog="Example:  testtime bench systems caltech-101/ --encoder offline --out runs/systems")
def bench(
    name: Annotated[str, typer.Argument(metavar="systems", help="Which experiment.")],
    data: Annotated[Path, typer.Argument(help="A folder of class folders, or one with a split_zhou_*.json.")],
    encoder: EncoderName = "offline",
    views: Views = 1,
    augmix: AugMix = False,
    seed: Seed = 1,
    limit: Limit = None,
    device: Device = "auto",
    learned: Annotated[
        Path | None, typer.Option("--prompts", help="Learned prompts (CoOp), for the systems that use them.")
    ] = None,
    output: Annotated[Path, typer.Option("--out", "-o", help="Folder for features and finished cells.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="The rows as JSON on standard output.")] = False,
) -> None:
    """Run every system over a dataset and print one table. Started again, it goes on where it was."""
    from testtime import load_encoder, registry
    from testtime.bench import Bench, run_systems
    from testtime.datasets import open_dataset

    if name != "systems":
        raise registry.unknown("experiment", name, ["systems"])
    dataset = open_dataset(data)
    for note in dataset.notes:
        err.print(f"[yellow]note[/] {escape(note)}", highlight=False, soft_wrap=True)
    if dataset.labels is None:
        raise InputError(f"{data} has no labels to score with: put images in folders named after their classes.")
    loaded = load_encoder(encoder, device=find_device(device))
    plan = Bench(output, loaded, dataset, views, augmix, seed, limit, lambda line: err.print(line, highlight=False))
    rows = run_systems(plan, prompts=learned)
    if as_json:
        print(json.dumps({"facts": plan.facts(), "rows": rows}))
        return
    table = Table(
        title=f"{dataset.name}, {encoder}, {views} view{'s' * (views > 1)}, seed {seed}", title_justify="left"
    )
    for column in ("system", "accuracy", "gain", "ms per image", "peak MB", "state MB"):
        table.add_column(column, justify="left" if column == "system" else "right")
    base = next((row["accuracy"] for row in rows if "accuracy" in row), 0.0)
    for row in rows:
        if "skipped" in row:
            table.add_row(row["system"], "[dim]not run[/]", "", "", "", "")
            continue
        table.add_row(
            row["system"],
            percent(row["accuracy"]),
            f"{100 * (row['accuracy'] - base):+.2f}",
            f"{row['milliseconds']:.2f}",
            f"{row['peak_megabytes']:.1f}",
            f"{row['state_megabytes']:.1f}",
        )
    out.print(table)
    for row in rows:
        if "skipped" in row:
            err.print(f"{row['system']}: {escape(row['skipped'])}", highlight=False, soft_wrap=True)
