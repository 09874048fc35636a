"""What the commands that run experiments share: their options, the plan that these describe, tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from testtime.cli.options import flag, presets
from testtime.cli.terminal import note, out
from testtime.errors import InputError

if TYPE_CHECKING:
    from testtime.datasets import Dataset
    from testtime.experiments.jobs import Executor
    from testtime.experiments.plan import Plan
    from testtime.types import Encoder

WIDE = 240  # characters per line in a pipe
TABLES = ("json", "md", "html")

Seeds = Annotated[
    str | None,
    typer.Option("--seeds", metavar="N,N,...", help="Comma-separated seeds; by default the protocol's."),
]
Track = Annotated[
    str, typer.Option("--track", metavar="NAME", help="Settings: one-setting for all datasets, or per-dataset.")
]
Protocol = Annotated[
    str,
    typer.Option(
        "--protocol",
        metavar="NAME",
        help="released or paper: views, templates and DPE as in the code or the paper.",
        autocompletion=presets,
    ),
]
RecipeViews = Annotated[
    int | None,
    typer.Option(
        "--views", help="Views per image; by default those of the dataset's recipe, or 1 for your own images."
    ),
]
RecipeAugMix = Annotated[bool, flag("--augmix", help="With --views: apply AugMix to the random crops.")]
Described = Annotated[
    Path | None,
    typer.Option(
        "--descriptions", help="JSON file of class name -> sentences (CuPL), or a folder with one per dataset."
    ),
]
Learned = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="coop:FILE",
        parser=lambda text: Path(str(text).removeprefix("coop:")),  # coop:FILE as in 'run', or FILE alone
        help="A learned prompt, for rows that use one; see 'testtime train-prompts'.",
    ),
]
Out = Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Folder for features, cells and tables.")]
Limit = Annotated[
    int | None, typer.Option("--limit", help="Use only this many images, chosen at random but the same for every seed.")
]
Json = Annotated[bool, flag("--json", help="Print the rows as JSON on standard output.")]
Shard = Annotated[int, typer.Option("--shard", help="Images per shard of features; an interrupt loses one at most.")]


def stopped(output: Path) -> str:
    """The message after an interrupt."""
    return f"Interrupted. Finished work is kept in {output}; run the same command again to resume."


def print_notes(datasets: Iterable[Dataset]) -> None:
    for line in (line for dataset in datasets for line in dataset.notes):
        note(f"note: {line}")


def plan_of(
    encoder: Encoder,
    output: Path,
    *,
    seeds: str | None,
    track: str,
    protocol: str,
    views: int | None,
    augmix: bool,
    descriptions: Path | None,
    learned: Path | None,
    limit: int | None,
    executor: Executor,
    template: list[str] | None = None,
    shard: int = 256,
) -> Plan:
    """The plan that the options describe."""
    from testtime.experiments import recipes
    from testtime.experiments.plan import Plan
    from testtime.text.prompts import find_templates
    from testtime.types import ViewPlan

    if limit is not None and limit < 1:
        raise InputError(f"--limit {limit}: at least one image is needed.")
    if views is not None and views < 1:
        raise InputError(f"--views {views}: must be 1 or more, since the image itself counts.")
    if shard < 1:
        raise InputError(f"--shard {shard}: must be 1 or more.")
    if augmix and views is None:
        raise InputError("--augmix needs --views N; without it, the recipe sets both.")
    return Plan(
        output,
        encoder,
        tuple(numbers_of(seeds, "--seeds") if seeds else recipes.seeds_of(protocol)),
        track,
        protocol,
        None if views is None else ViewPlan(views, augmix),
        find_templates(template) if template else None,
        descriptions,
        learned,
        limit,
        shard,
        note,
        executor,
    )


@contextmanager
def executor_of(on: str | None) -> Iterator[Executor]:
    """What runs the cells: this process, or Ray, with a live table of what runs where."""
    from testtime.experiments.jobs import in_order

    if on is None:
        yield in_order
        return
    from testtime.cli.live import Jobs
    from testtime.cluster.connect import connected
    from testtime.cluster.jobs import on_ray

    with connected(on):
        yield on_ray(Jobs)


def check_out(
    output: Path, name: str, data: Sequence[str], encoder: str, descriptions: Path | None, learned: Path | None
) -> None:
    """Refuse a folder whose tables would overwrite an input."""
    from testtime.files.outputs import distinct, read_files

    outputs = {"--out": output} | {f"{name}.{kind} in --out": output / f"{name}.{kind}" for kind in TABLES}
    for what in data:
        distinct(outputs, read_files(what, [], encoder, None, descriptions, str(learned) if learned else None))


def numbers_of(text: str, option: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{option} {text}: must be comma-separated whole numbers, such as 1,2,3.") from None
    return numbers


def print_table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> None:
    """Print a table; in a pipe, as wide as it needs to be."""
    console = out if out.is_terminal else Console(width=WIDE)
    if title:  # a table would wrap it to its own width
        console.print(f"[bold]{escape(title)}[/]", highlight=False)
    table = Table()
    if not header[-1] and not any(line[-1] for line in lines):  # no remarks: drop their column
        header, lines = header[:-1], [line[:-1] for line in lines]
    for index, column in enumerate(header):
        table.add_column(escape(column), justify="left" if index < left else "right", no_wrap=index < left)
    for line in lines:
        table.add_row(*map(escape, line))
    console.print(table)
