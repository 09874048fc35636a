"""`testtime report`: a page about a run."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from testtime.cli.options import Device, Force, Limit, Seed, Shuffle, flag, ordered, pairs, steps_on
from testtime.cli.terminal import err, progress
from testtime.errors import InputError

if TYPE_CHECKING:
    from testtime.encoding.store import Features
    from testtime.types import Method, StoredImage

app = typer.Typer()

TITLE = "testtime report"
EXAMPLE = "Example:  testtime report photos.safetensors --methods zeroshot,tda,dpe --out report.html"


@app.command(epilog=EXAMPLE)
def report(
    features: Annotated[Path, typer.Argument(metavar="FEATURES", help="A feature file, or a folder of shards.")],
    output: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
    methods: Annotated[
        str, typer.Option("--methods", "-m", metavar="NAMES", help="Comma-separated names.")
    ] = "zeroshot,tda,dpe",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="METHOD.KEY=VALUE", help="A setting of one method; can be repeated."),
    ] = None,
    images: Annotated[
        str | None,
        typer.Option(
            "--images",
            metavar="IMAGES",
            help="The images that were encoded, for thumbnails; by default as recorded in the file.",
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option("--sweep", metavar="KEY=V1,V2,...", help="Vary a setting of the last method; give one or two."),
    ] = None,
    snapshots: Annotated[
        str | None,
        typer.Option(
            "--snapshots",
            metavar="N,N,...",
            help="Show the queues after these numbers of images, such as 300,2000.",
        ),
    ] = None,
    with_map: Annotated[bool, flag("--map/--no-map", help="Draw the queues as a map (needs scikit-learn).")] = True,
    title: Annotated[str, typer.Option("--title", help="Heading of the page.")] = TITLE,
    seed: Seed = 0,
    shuffle: Shuffle = False,
    limit: Limit = None,
    device: Device = "cpu",
    force: Force = False,
    as_json: Annotated[bool, flag("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Write one HTML page about methods run over a feature file: curves, classes, calibration, queues, images.

    The page is self-contained. Without labels it shows what changed from zero-shot.
    """
    from testtime import registry
    from testtime.encoding.store import Features
    from testtime.files import check_place, write_atomic
    from testtime.files.outputs import distinct, refuse_existing
    from testtime.report import gather
    from testtime.report.conditions import conditions
    from testtime.report.data import Grid, StreamReport
    from testtime.report.page import html

    store = Features(features)
    distinct({"--out": output}, {"FEATURES": [features, *store.files, features / "index.json"]})
    check_place(output)
    refuse_existing({"--out": output}, force)
    made = _methods(methods, settings)
    varied = _varied(sweep, store, made[-1])
    shown = _images(images, store)
    rows = ordered(len(store), shuffle, seed, limit)
    tower = any(getattr(method, "needs_tower", False) for method in made)
    task = store.task(device=steps_on(device), context=tower)
    with progress("images", len(rows), quiet=as_json) as advance:
        section = gather.stream_report(
            task,
            store,
            store.labels,
            made,
            order=rows,
            images=shown,
            snapshots=_numbers(snapshots),
            place=with_map,
            progress=advance,
        )
    if varied and isinstance(section, StreamReport) and store.labels is not None:
        others = {key: value for key, value in registry.settings_of(made[-1]).items() if key not in varied}
        with progress("images of the sweep", len(rows), quiet=as_json) as advance:
            figure = gather.sweep(
                task, store, store.labels, made[-1].name, varied, others=others, order=rows, progress=advance
            )
        section = replace(section, grids=[figure]) if isinstance(figure, Grid) else replace(section, series=[figure])
    about = conditions(
        task,
        command=_command(
            features,
            {"--methods": methods, "--set": settings, "--sweep": sweep, "--images": images, "--snapshots": snapshots}
            | {"--no-map": not with_map, "--limit": limit, "--shuffle": shuffle, "--seed": seed if shuffle else None}
            | {"--device": None if device == "cpu" else device, "--title": title if title != TITLE else None}
            | {"--out": output},
        ),
        Features=str(features),
        Dataset=store.metadata.get("dataset", ""),
        Order=f"shuffled, seed {seed}" if shuffle else "as stored",
        Views=f"{store.views}, seed {store.metadata.get('seed', 'unknown')}",
        Labels="only score" if store.labels is not None else "none",
    )
    write_atomic(output, html([section], about, title))
    if as_json:
        print(json.dumps({"report": str(output), "n": len(rows), "bytes": output.stat().st_size}))
        return
    err.print(f"{len(rows)} images, {output.stat().st_size / 1e6:.1f} MB: {escape(str(output))}", highlight=False)


def _methods(names: str, settings: list[str] | None) -> list[Method]:
    """The methods by name, each with its settings from --set."""
    from testtime import registry

    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise InputError("--methods is empty; name one or more, for example --methods tda,dpe.")
    chosen: dict[str, dict[str, object]] = {name: {} for name in wanted}
    for key, value in pairs(settings).items():
        name, dot, setting = key.partition(".")
        if not dot or name not in chosen:
            raise InputError(f"--set {key}={value}: write it as METHOD.KEY=VALUE with one of {', '.join(chosen)}.")
        chosen[name][setting] = value
    return [registry.make_method(name, None, chosen[name]) for name in dict.fromkeys(wanted)]


def _varied(sweep: list[str] | None, store: Features, method: Method) -> dict[str, list[object]]:
    """The values of --sweep by setting, each valid for the method."""
    from testtime import registry

    varied: dict[str, list[object]] = {}
    for key, values in pairs(sweep, "--sweep", "alpha=2,4,6").items():
        varied[key] = [registry.read_setting(type(method), key, value.strip()) for value in str(values).split(",")]
    if len(varied) > 2:
        raise InputError(f"--sweep {', '.join(varied)}: one setting makes a line, two a heat map; leave out the rest.")
    if varied and store.labels is None:
        raise InputError(f"--sweep needs labels to score with, and {store.path} has none.")
    return varied


def _command(features: Path, options: dict[str, object]) -> str:
    """The command that reproduces the page; options that are None or False were not given."""
    words = ["testtime", "report", str(features)]
    for option, value in options.items():
        if value is True:
            words.append(option)
        elif value is not None and value is not False:
            for each in value if isinstance(value, list) else [value]:
                words += [option, str(each)]
    return shlex.join(words)


def _images(source: str | None, store: Features) -> list[str | StoredImage] | None:
    """The images behind the features, in their order: from --images, or as recorded in the store."""
    from testtime.datasets import open_dataset

    if source is None:
        return None if store.images is None else list(store.images)
    return list(open_dataset(source).paths)


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--snapshots {text}: must be comma-separated whole numbers, such as 300,2000.") from None
