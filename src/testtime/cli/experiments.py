"""`testtime eval` and `testtime bench`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from testtime.cli import config
from testtime.cli.options import (
    Device,
    EncoderName,
    Every,
    On,
    Root,
    Templates,
    benchmarks_with_root,
    encoder_of,
    encoders,
    experiment_names,
    flag,
)
from testtime.cli.plans import (
    Described,
    Json,
    Learned,
    Limit,
    Out,
    Protocol,
    RecipeAugMix,
    RecipeViews,
    Seeds,
    Shard,
    Track,
    check_out,
    executor_of,
    numbers_of,
    plan_of,
    print_notes,
    print_table,
    stopped,
)
from testtime.cli.terminal import note, percent
from testtime.errors import InputError
from testtime.machine.interrupts import on_interrupt

if TYPE_CHECKING:
    from testtime.experiments.catalogue import Experiment
    from testtime.experiments.jobs import Executor
    from testtime.experiments.plan import Plan, Plans

app = typer.Typer()


@app.command(
    "eval",
    epilog="Example:  testtime eval caltech-101/ --encoder offline --methods zeroshot,tda,dpe --seeds 1,2,3",
)
def eval_(
    context: typer.Context,
    data: Annotated[
        list[str],
        typer.Argument(
            metavar="DATA",
            help="Folders of labelled images, or benchmark names with --root.",
            autocompletion=benchmarks_with_root,
        ),
    ],
    methods: Annotated[
        str, typer.Option("--methods", "-m", metavar="NAMES", help="Comma-separated; dpe:paper selects a preset.")
    ] = "zeroshot,dpe",
    root: Root = None,
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
    every: Every = "1s",
    shard: Shard = 256,
    device: Device = "auto",
    on: On = None,
    output: Out = Path("runs"),
    as_json: Json = False,
    config_file: config.Config = None,
    save_config: config.SaveConfig = None,
) -> None:
    """Score methods on labelled images: mean and spread over seeds. Run the command again to resume it.

    Views are encoded once and kept in --out; every method then runs over them. results.json and results.md there
    contain no timings: the same command writes the same bytes, however often it is interrupted.
    """
    from testtime.datasets import find_dataset
    from testtime.experiments.run import write_results
    from testtime.experiments.scores import evaluate
    from testtime.experiments.tables import evaluation_markdown
    from testtime.files import check_folder, check_place

    datasets = [find_dataset(what, root, every=every) for what in data]
    check_out(output, "results", data, encoder, descriptions, learned)
    print_notes(datasets)
    check_folder(output)
    check_place(save_config)
    config.save(context, save_config)
    with on_interrupt(lambda: stopped(output)), executor_of(on) as executor:
        plan = plan_of(
            encoder_of(encoder, device), output, seeds=seeds, track=track, protocol=protocol, views=views,
            augmix=augmix, template=template, descriptions=descriptions, learned=learned, limit=limit, shard=shard,
            executor=executor,
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
    print_table(f"{encoder}, {track}, {plan.protocol}", ["dataset", "method", "accuracy", "spread"], lines, left=2)
    for row in result["rows"]:
        if "not run" in row:
            note(f"{row['method']} on {row['dataset']}: {row['not run']}")
    note(f"Written to {output}/results.json and results.md.")


@app.command(epilog="Example:  testtime bench components caltech-101/ --encoder offline --out runs/caltech")
def bench(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="The experiment; see 'testtime bench list'.", autocompletion=experiment_names
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Argument(
            metavar="DATA",
            help="A dataset's folder; for tables of benchmarks, the folder that holds them; for streams also a folder "
            "of domains, or a feature file.",
        ),
    ] = None,
    encoder: Annotated[
        str | None,
        typer.Option(
            "--encoder",
            "-e",
            metavar="NAME",
            help="See 'list encoders'; by default the experiment's own.",
            autocompletion=encoders,
        ),
    ] = None,
    seeds: Seeds = None,
    track: Track = "one-setting",
    protocol: Protocol = "released",
    views: RecipeViews = None,
    augmix: RecipeAugMix = False,
    descriptions: Described = None,
    learned: Learned = None,
    rows: Annotated[
        list[str] | None, typer.Option("--row", metavar="ROW", help="Run only this row of the table; can be repeated.")
    ] = None,
    after: Annotated[
        str | None, typer.Option("--after", metavar="N,N,...", help="tsne: comma-separated numbers of images.")
    ] = None,
    foreign: Annotated[
        Path | None, typer.Option("--foreign", help="streams: a feature file of images of none of the classes.")
    ] = None,
    limit: Limit = None,
    device: Device = "auto",
    on: On = None,
    dry_run: Annotated[bool, flag("--dry-run", help="Estimate the cost without running anything.")] = False,
    output: Out = Path("runs"),
    as_json: Json = False,
) -> None:
    """Run one of the paper's tables or figures. Run the command again to resume it.

    Experiments with the same --out share features; NAME.json, NAME.md and NAME.html are written there too.
    """
    from testtime.experiments.catalogue import EXPERIMENTS

    if name == "list":
        lines = [[key, entry.title, entry.place] for key, entry in EXPERIMENTS.items()]
        print_table("", ["name", "what it shows", "in the paper"], lines, left=3)
        return
    from testtime.experiments.jobs import in_order
    from testtime.experiments.run import (
        find_columns,
        find_experiment,
        measure_of,
        run_experiment,
        selected,
        write_experiment,
    )
    from testtime.files import check_folder

    experiment = find_experiment(name)
    experiment = experiment._replace(rows=tuple(selected(experiment, rows)))  # errors come before the encoder is loaded
    if on is not None and (dry_run or experiment.measure == "queues"):
        reason = "--dry-run runs no cells" if dry_run else f"'{name}' is one run over one stream"
        raise InputError(f"--on {on}: {reason}; leave it out.")
    if experiment.measure == "streams":
        _check_streams(data, dry_run, views, encoder=encoder, descriptions=descriptions, prompts=learned)
        seeds = seeds or ",".join(map(str, experiment.seeds))

    def plans(executor: Executor) -> Plans:
        given = [encoder] if encoder is not None else experiment.encoders
        allow_missing = encoder is None and (len(given) > 1 or bool(experiment.datasets))
        return _plans(
            given, allow_missing, dry_run, device, output, seeds=seeds, track=track, protocol=protocol, views=views,
            augmix=augmix, descriptions=descriptions, learned=learned, limit=limit, executor=executor,
        )  # fmt: skip

    with on_interrupt(lambda: stopped(output)):
        if dry_run:
            _dry_run(experiment, data, lambda: plans(in_order), as_json)
            return
        columns = find_columns(experiment, data)
        check_out(
            output, name, [str(data or ""), *([str(foreign)] if foreign else [])], encoder or "", descriptions, learned
        )
        if all(isinstance(column, str) for column in columns.values()):
            raise InputError(
                f"None of the {len(columns)} datasets of '{name}' is available. {next(iter(columns.values()))}"
            )
        print_notes(column for column in columns.values() if not isinstance(column, str))
        moments = None if after is None else numbers_of(after, "--after")
        check_folder(output)
        with executor_of(on) as executor:
            result = run_experiment(name, plans(executor), columns, rows, moments, foreign)
        write_experiment(output, result, columns, "testtime " + shlex.join(sys.argv[1:]))
    if as_json:
        print(json.dumps(result))
    else:
        measure = measure_of(experiment)
        found = measure.sheets(result)
        for sheet in found:
            if not sheet.apart:
                print_table(sheet.title, sheet.header, sheet.rows)
        apart = [f"{sheet.title}, so listed only in {name}.md and {name}.html." for sheet in found if sheet.apart]
        for line in [*measure.remarks(result), *apart]:
            note(line)
        note(f"Written to {output}/{name}.json, {name}.md and {name}.html.")
    if "rows" in result and not any("accuracy" in row for row in result["rows"]):
        raise InputError(f"No row of '{name}' could run. {result['rows'][0]['not run']}")


def _check_streams(data: Path | None, dry_run: bool, views: int | None, **encoding: object) -> None:
    """Refuse options that the streams have no use for; `encoding` are those that a feature file has no use for."""
    from testtime.experiments.sources import is_stored

    if dry_run:
        raise InputError("--dry-run: 'streams' has no estimate; try it with --seeds 1 and --limit 200.")
    if views not in (None, 1):
        raise InputError(f"--views {views}: 'streams' has one view of each image.")
    for option, value in encoding.items():
        if value is not None and data is not None and is_stored(data):
            raise InputError(f"--{option}: {data} has its own features and prototypes; leave it out.")


def _dry_run(experiment: Experiment, data: Path | None, plans: Callable[[], Plans], as_json: bool) -> None:
    from testtime.experiments.cost import cost_lines, estimate, paper_columns
    from testtime.experiments.run import find_columns

    costs = estimate(experiment, plans(), find_columns(experiment, data) if data else paper_columns(experiment))
    if as_json:
        print(json.dumps([cost._asdict() for cost in costs]))
        return
    header, *lines = cost_lines(costs)
    print_table("Remaining work", header, lines, left=2)


def _plans(names: Sequence[str], allow_missing: bool, load: bool, device: str, output: Path, **options: Any) -> Plans:
    """A plan for each encoder, or the reason if there is none but others, or other datasets, can still run.

    Rows that are still to run get the reason too; an estimate needs it now, so `load` loads the encoder.
    """
    plans: dict[str, Plan | str] = {}
    for name in names:
        try:
            encoder = encoder_of(name, device, allow_missing)
            plans[encoder.name] = plan_of(encoder, output, **options)
            if load and allow_missing:
                encoder.loaded  # noqa: B018
        except InputError as reason:
            if not allow_missing:
                raise
            plans[name] = str(reason)
    return plans
