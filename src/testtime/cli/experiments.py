"""`testtime eval` and `testtime bench`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from testtime.cli.options import Device, EncoderName, Templates, encoder_of, flag
from testtime.cli.terminal import note, out, percent
from testtime.errors import InputError
from testtime.machine.interrupts import on_interrupt

if TYPE_CHECKING:
    from testtime.datasets import Dataset
    from testtime.experiments.catalogue import Experiment
    from testtime.experiments.plan import Plan, Plans
    from testtime.types import Encoder

app = typer.Typer()
WIDE = 240  # characters of a line in a pipe
TABLES = ("json", "md", "html")

Seeds = Annotated[str | None, typer.Option("--seeds", help="Seeds with commas between; else the protocol's.")]
Track = Annotated[str, typer.Option("--track", help="Settings: one-setting for all datasets, or per-dataset.")]
Protocol = Annotated[
    str, typer.Option("--protocol", help="Views, templates and DPE as released, or as in the paper: released, paper.")
]
RecipeViews = Annotated[
    int | None, typer.Option("--views", help="Views per image; else as the dataset's recipe says, 1 for your own.")
]
RecipeAugMix = Annotated[bool, flag("--augmix", help="With --views: mix the random crops with AugMix.")]
Described = Annotated[
    Path | None,
    typer.Option("--descriptions", help="JSON of class name -> sentences (CuPL), or a folder with one per dataset."),
]
Learned = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="coop:FILE",
        parser=lambda text: Path(str(text).removeprefix("coop:")),  # as 'run' has it, and the file's name alone
        help="A learned prompt, for what uses it; see 'testtime train-prompts'.",
    ),
]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder for features, cells and tables.")]
Limit = Annotated[
    int | None, typer.Option("--limit", help="Only this many images, drawn at random, the same for every seed.")
]
Json = Annotated[bool, flag("--json", help="The rows as JSON on standard output.")]
Shard = Annotated[int, typer.Option("--shard", help="Images to a shard of features; an interrupt loses one.")]


@app.command(
    "eval",
    epilog="Example:  testtime eval caltech-101/ --encoder offline --methods zeroshot,tda,dpe --seeds 1,2,3",
)
def eval_(
    data: Annotated[
        list[str],
        typer.Argument(metavar="DATA", help="Folders of labelled images, or benchmarks by name with --root."),
    ],
    methods: Annotated[str, typer.Option("--methods", "-m", help="With commas between; dpe:paper for a preset.")] = (
        "zeroshot,dpe"
    ),
    root: Annotated[Path | None, typer.Option("--root", help="The folder that holds the benchmarks.")] = None,
    encoder: EncoderName = "offline",
    seeds: Seeds = None,
    track: Track = "one-setting",
    protocol: Protocol = "released",
    views: RecipeViews = None,
    augmix: RecipeAugMix = False,
    template: Templates = None,
    descriptions: Described = None,
    learned: Learned = None,
    limit: Limit = None,
    shard: Shard = 256,
    device: Device = "auto",
    output: Out = Path("runs"),
    as_json: Json = False,
) -> None:
    """Score methods on labelled images: mean and spread over seeds. Started again, it goes on where it was.

    Views are encoded once and kept in --out; every method then runs over them. results.json and results.md there
    hold no times: the same command gives the same bytes, however often it was interrupted.
    """
    from testtime.datasets import find_dataset
    from testtime.experiments.run import write_results
    from testtime.experiments.scores import evaluate
    from testtime.experiments.tables import evaluation_markdown
    from testtime.files import check_folder

    datasets = [find_dataset(what, root) for what in data]
    _check_out(output, "results", data, encoder, descriptions, learned)
    _tell_notes(datasets)
    check_folder(output)
    with on_interrupt(lambda: _stopped(output)):
        plan = _plan(
            encoder_of(encoder, device), output, seeds=seeds, track=track, protocol=protocol, views=views,
            augmix=augmix, template=template, descriptions=descriptions, learned=learned, limit=limit, shard=shard,
        )  # fmt: skip
        result = evaluate(plan, datasets, [name.strip() for name in methods.split(",") if name.strip()])
        write_results(output, "results", result, evaluation_markdown(result))
    if as_json:
        print(json.dumps(result))
        return
    lines = []
    for row in result["rows"]:
        spread = "" if row.get("spread") is None else f"{100 * row['spread']:.2f}"
        shown = percent(row["accuracy"]) if "accuracy" in row else "not run"
        lines.append([row["dataset"], row["method"], shown, spread])
    _print(f"{encoder}, {track}, {plan.protocol}", ["dataset", "method", "accuracy", "spread"], lines, left=2)
    for row in result["rows"]:
        if "not run" in row:
            note(f"{row['method']} on {row['dataset']}: {row['not run']}")
    note(f"Written to {output}/results.json and results.md.")


@app.command(epilog="Example:  testtime bench components caltech-101/ --encoder offline --out runs/caltech")
def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which experiment; 'testtime bench list' names them.")],
    data: Annotated[
        Path | None,
        typer.Argument(
            metavar="DATA", help="A dataset's folder; for tables of benchmarks, the folder that holds them."
        ),
    ] = None,
    encoder: Annotated[
        str | None, typer.Option("--encoder", "-e", help="See 'list encoders'; else the experiment's own.")
    ] = None,
    seeds: Seeds = None,
    track: Track = "one-setting",
    protocol: Protocol = "released",
    views: RecipeViews = None,
    augmix: RecipeAugMix = False,
    descriptions: Described = None,
    learned: Learned = None,
    rows: Annotated[
        list[str] | None, typer.Option("--row", metavar="ROW", help="Only this row of the table; may be given again.")
    ] = None,
    after: Annotated[str | None, typer.Option("--after", help="tsne: numbers of images, with commas between.")] = None,
    limit: Limit = None,
    device: Device = "auto",
    dry_run: Annotated[bool, flag("--dry-run", help="Say what it will cost, and do nothing.")] = False,
    output: Out = Path("runs"),
    as_json: Json = False,
) -> None:
    """Run one of the paper's tables or figures. Started again, it goes on where it was.

    Experiments over one folder given as --out share its features; NAME.json, NAME.md and NAME.html appear there too.
    """
    from testtime.experiments.catalogue import EXPERIMENTS

    if name == "list":
        _print("", ["name", "what it shows"], [[key, entry.title] for key, entry in EXPERIMENTS.items()], left=2)
        return
    from testtime.experiments.run import (
        find_columns,
        find_experiment,
        kept,
        measure_of,
        run_experiment,
        write_experiment,
    )
    from testtime.files import check_folder

    experiment = find_experiment(name)
    experiment = experiment._replace(rows=tuple(kept(experiment, rows)))  # mistakes show before the encoder is loaded

    def plans() -> Plans:
        given = [encoder] if encoder is not None else experiment.encoders
        may_lack = encoder is None and (len(given) > 1 or bool(experiment.datasets))
        return _plans(
            given, may_lack, device, output, seeds=seeds, track=track, protocol=protocol, views=views, augmix=augmix,
            descriptions=descriptions, learned=learned, limit=limit,
        )  # fmt: skip

    with on_interrupt(lambda: _stopped(output)):
        if dry_run:
            _dry_run(experiment, data, plans, as_json)
            return
        columns = find_columns(experiment, data)
        _check_out(output, name, [str(data or "")], encoder or "", descriptions, learned)
        if all(isinstance(column, str) for column in columns.values()):
            raise InputError(f"None of the {len(columns)} datasets of '{name}' is here. {next(iter(columns.values()))}")
        _tell_notes(column for column in columns.values() if not isinstance(column, str))
        moments = None if after is None else _numbers(after, "--after")
        check_folder(output)
        result = run_experiment(name, plans(), columns, rows, moments)
        write_experiment(output, result, columns, "testtime " + shlex.join(sys.argv[1:]))
    if as_json:
        print(json.dumps(result))
    else:
        measure = measure_of(experiment)
        for sheet in measure.sheets(result):
            _print(sheet.title, sheet.header, sheet.rows)
        for line in measure.remarks(result):
            note(line)
        note(f"Written to {output}/{name}.json, {name}.md and, to look at, {name}.html.")
    if "rows" in result and not any("accuracy" in row for row in result["rows"]):
        raise InputError(f"No row of '{name}' could run. {result['rows'][0]['not run']}")


def _stopped(output: Path) -> str:
    """What to say of an interrupt."""
    return f"Interrupted. What was finished is kept in {output}; the same command goes on from there."


def _dry_run(experiment: Experiment, data: Path | None, plans: Callable[[], Plans], as_json: bool) -> None:
    from testtime.experiments.cost import cost_lines, estimate, paper_columns
    from testtime.experiments.run import find_columns

    costs = estimate(experiment, plans(), find_columns(experiment, data) if data else paper_columns(experiment))
    if as_json:
        print(json.dumps([cost._asdict() for cost in costs]))
        return
    header, *lines = cost_lines(costs)
    _print("Still to do", header, lines, left=2)


def _tell_notes(datasets: Iterable[Dataset]) -> None:
    for line in (line for dataset in datasets for line in dataset.notes):
        note(f"note: {line}")


def _plan(
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
    template: list[str] | None = None,
    shard: int = 256,
) -> Plan:
    """The plan that the options say."""
    from testtime.experiments import recipes
    from testtime.experiments.plan import Plan
    from testtime.text.prompts import find_templates
    from testtime.types import ViewPlan

    if limit is not None and limit < 1:
        raise InputError(f"--limit {limit}: at least one image is needed.")
    if views is not None and views < 1:
        raise InputError(f"--views {views}: at least the image itself is needed, so 1 or more.")
    if shard < 1:
        raise InputError(f"--shard {shard}: at least one image to a shard.")
    if augmix and views is None:
        raise InputError("--augmix goes with --views N; without it, the recipe decides on both.")
    return Plan(
        output,
        encoder,
        tuple(_numbers(seeds, "--seeds") if seeds else recipes.seeds_of(protocol)),
        track,
        protocol,
        None if views is None else ViewPlan(views, augmix),
        find_templates(template) if template else None,
        descriptions,
        learned,
        limit,
        shard,
        note,
    )


def _plans(names: Sequence[str], may_lack: bool, device: str, output: Path, **options: Any) -> Plans:
    """A plan for each encoder; where one cannot be loaded and others, or other datasets, may go on, why."""
    plans: dict[str, Plan | str] = {}
    for name in names:
        try:
            encoder = encoder_of(name, device)
            plans[encoder.name] = _plan(encoder, output, **options)
            if may_lack:
                encoder.loaded  # noqa: B018, what is missing shows now, and leaves a reason in every row
        except InputError as reason:
            if not may_lack:
                raise
            plans[name] = str(reason)
    return plans


def _check_out(
    output: Path, name: str, data: Sequence[str], encoder: str, descriptions: Path | None, learned: Path | None
) -> None:
    """Refuse a folder whose tables would be written over what is read."""
    from testtime.files.outputs import distinct, read_files

    outputs = {"--out": output} | {f"{name}.{kind} in --out": output / f"{name}.{kind}" for kind in TABLES}
    for what in data:
        distinct(outputs, read_files(what, [], encoder, None, descriptions, str(learned) if learned else None))


def _numbers(text: str, option: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{option} {text}: whole numbers with commas between, as in 1,2,3.") from None
    return numbers


def _print(title: str, header: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> None:
    """A table; in a pipe as wide as it needs to be."""
    console = out if out.is_terminal else Console(width=WIDE)
    if title:  # a table would break it to its own width
        console.print(f"[bold]{escape(title)}[/]", highlight=False)
    table = Table()
    if not header[-1] and not any(line[-1] for line in lines):  # a column for remarks, and none to make
        header, lines = header[:-1], [line[:-1] for line in lines]
    for place, column in enumerate(header):
        table.add_column(escape(column), justify="left" if place < left else "right", no_wrap=place < left)
    for line in lines:
        table.add_row(*map(escape, line))
    console.print(table)
