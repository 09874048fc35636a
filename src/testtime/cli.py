"""The command line: parse, call, print. Everything it does is a few calls of the library."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from testtime import __version__
from testtime.devices import find_device
from testtime.types import InputError, TesttimeError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Zero-shot image classifiers that get better while they are in use.\n\n"
    "[bold]testtime demo[/] shows it in a minute; [bold]testtime run PHOTOS --classes cat,dog[/] does it with yours.",
    epilog="Exit codes: 0 done, 1 failed while working, 2 wrong input or options. --debug shows tracebacks.",
)
out = Console()
err = Console(stderr=True)

Classes = Annotated[str | None, typer.Option("--classes", help="Class names with commas between: cat,dog,fox.")]
ClassesFile = Annotated[Path | None, typer.Option("--classes-file", help="Class names, one to a line.")]
EncoderName = Annotated[
    str,
    typer.Option("--encoder", "-e", help="offline, open_clip:MODEL/PRETRAINED or hf:REPO; see 'list encoders'."),
]
MethodName = Annotated[str, typer.Option("--method", "-m", help="See 'testtime list methods'.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting of the method; may be given again and again."),
]
Preset = Annotated[str | None, typer.Option("--preset", help="A named set of settings: released or paper for dpe.")]
Templates = Annotated[
    list[str] | None,
    typer.Option("--template", help="A prompt with {} for the class, or a named set; may be given again."),
]
Descriptions = Annotated[
    Path | None,
    typer.Option("--descriptions", help="JSON of class name -> sentences (CuPL), added to the templates."),
]
Prompts = Annotated[
    str | None,
    typer.Option("--prompts", help="coop:FILE, a learned prompt in place of templates; see 'testtime train-prompts'."),
]
Views = Annotated[int, typer.Option("--views", help="Views per image: itself and random crops.")]
AugMix = Annotated[bool, typer.Option("--augmix", help="Mix the random crops with AugMix.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of views and of --shuffle.")]
Shuffle = Annotated[bool, typer.Option("--shuffle", help="Shuffle the stream by --seed.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, or auto.")]
Limit = Annotated[int | None, typer.Option("--limit", help="Stop after this many images.")]
Strict = Annotated[bool, typer.Option("--strict", help="Stop at an image that cannot be read, and do not skip it.")]


@app.callback()
def _common(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Options of every command; `main` has already seen --debug wherever it stood."""


@app.command(epilog="Example:  testtime run photos/ --classes cat,dog,fox --out answers.csv --save pets.safetensors")
def run(
    images: Annotated[str, typer.Argument(help="A folder, a glob in quotes, a .txt of paths, an image, or - .")],
    classes: Classes = None,
    classes_file: ClassesFile = None,
    encoder: EncoderName = "offline",
    method: MethodName = "dpe",
    settings: Settings = None,
    preset: Preset = None,
    template: Templates = None,
    descriptions: Descriptions = None,
    prompts: Prompts = None,
    views: Views = 1,
    augmix: AugMix = False,
    seed: Seed = 0,
    shuffle: Shuffle = False,
    limit: Limit = None,
    device: Device = "auto",
    output: Annotated[Path | None, typer.Option("--out", "-o", help="CSV or .jsonl; else standard output.")] = None,
    style: Annotated[str | None, typer.Option("--format", help="csv or jsonl; else by the name of --out.")] = None,
    save: Annotated[Path | None, typer.Option("--save", help="Where to keep what was learned (.safetensors).")] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Go on from a saved state; images already in --out are left out.")
    ] = None,
    strict: Strict = False,
    json_summary: Annotated[bool, typer.Option("--json", help="Summary as a JSON object on standard error.")] = False,
) -> None:
    """Classify images and learn from each one as it passes.

    Every row holds the label, its confidence and entropy (nats), the zero-shot label, and whether the image was
    learned from. Where folders are named after classes, the accuracy of both is shown too; labels only score.
    """
    from testtime import load_encoder
    from testtime.engine import Session
    from testtime.images import find_images, labels_from_folders
    from testtime.runs import Rows, Tally, reopen, row, run_images

    style = _style(style, output)
    paths = find_images(images, sys.stdin)
    names = _class_names(classes, classes_file)
    # mistakes in names and settings show before the encoder is loaded
    chosen = _method(method, preset, settings)
    loaded = load_encoder(encoder, device=find_device(device))
    task = _task(loaded, names, template, descriptions, prompts, getattr(chosen, "needs_tower", False))
    if resume is None:
        session = Session(task, chosen, encoder=loaded, views=views, augmix=augmix, seed=seed)
    else:
        session = Session.load(resume, task, encoder=loaded, device=find_device(device))
        err.print(f"Going on after {session.count} images from {escape(str(resume))} with its own settings.")
    paths = _ordered(paths, shuffle, seed, limit)
    if resume is not None and output is not None:
        done = reopen(output, style, session.count)
        paths = [path for path in paths if str(path) not in done]
    tally = Tally()
    labels = labels_from_folders(paths, task.classnames)
    appending = resume is not None and output is not None and output.exists()
    watching = output is None and sys.stdout.isatty()
    with _opened(output, appending) as file:
        rows = Rows(file, style, header=not appending) if not watching else _Watch(task.classnames)
        with _progress("images", len(paths), quiet=output is None) as advance:
            stream = run_images(
                session,
                paths,
                labels,
                tally,
                strict=strict,
                save=save,
                on_skip=lambda line: err.print(f"[yellow]skipped[/] {escape(line)}", soft_wrap=True),
            )
            try:
                for index, path, prediction in stream:
                    rows.write(row(index, path, prediction))
                    advance(tally.images + len(tally.skipped))
            finally:
                stream.close()  # saves the state, also when interrupted
    _print_tally(tally, session, save, output, json_summary)


@app.command(epilog="Example:  testtime encode photos/ --classes cat,dog,fox --views 64 --out photos.safetensors")
def encode(
    images: Annotated[str, typer.Argument(help="A folder, a glob in quotes, a .txt of paths, an image, or - .")],
    output: Annotated[Path, typer.Option("--out", "-o", help="Feature file, or with --shard a folder.")],
    classes: Classes = None,
    classes_file: ClassesFile = None,
    encoder: EncoderName = "offline",
    template: Templates = None,
    descriptions: Descriptions = None,
    prompts: Prompts = None,
    views: Views = 1,
    augmix: AugMix = False,
    seed: Seed = 0,
    limit: Limit = None,
    device: Device = "auto",
    dtype: Annotated[str, typer.Option("--dtype", help="float16 or float32, as stored.")] = "float16",
    shard: Annotated[int | None, typer.Option("--shard", help="Images to a shard; --out is then a folder.")] = None,
    strict: Strict = False,
) -> None:
    """Encode images once into a feature file that 'testtime replay' runs any method over.

    Where every image lies in a folder named after a class, these become the labels that replays are scored with.
    """
    from testtime import encode as encoding
    from testtime import load_encoder, registry
    from testtime.images import find_images, labels_from_folders

    paths = find_images(images, sys.stdin)[:limit]
    names = _class_names(classes, classes_file)
    if dtype not in encoding.DTYPES:
        raise registry.unknown("dtype", dtype, encoding.DTYPES)
    loaded = load_encoder(encoder, device=find_device(device))
    task = _task(loaded, names, template, descriptions, prompts)
    skipped: list[str] = []

    def skip(line: str) -> None:
        skipped.append(line)
        err.print(f"[yellow]skipped[/] {escape(line)}", soft_wrap=True)

    with _progress("images", len(paths)) as advance:
        count = encoding.encode(
            loaded, task, paths, output,
            labels=labels_from_folders(paths, task.classnames), views=views, augmix=augmix, seed=seed,
            dtype=encoding.DTYPES[dtype], shard=shard, resume=True, dataset=images,
            on_skip=None if strict else skip, progress=advance,
        )  # fmt: skip
    err.print(f"{count} images x {views} views in {escape(str(output))}, {len(skipped)} skipped.")


@app.command(epilog="Example:  testtime replay photos.safetensors --method dpe --set alpha=4 --json")
def replay(
    file: Annotated[Path, typer.Argument(help="A feature file, or a folder of shards.")],
    method: MethodName = "dpe",
    settings: Settings = None,
    preset: Preset = None,
    recorded: Annotated[
        bool, typer.Option("--recorded", help="Take the settings that the file's metadata gives under 'hp.'.")
    ] = False,
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or float64.")] = "float32",
    device: Device = "cpu",
    limit: Limit = None,
    seed: Seed = 0,
    shuffle: Shuffle = False,
    output: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Where to write logits [N,C] and pred [N] (.safetensors)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Run a method over a feature file; no encoder, no images."""
    from testtime import replay as replays
    from testtime.features import Features
    from testtime.files import write_tensors

    store = Features(file)
    chosen = replays.recorded_settings(store, method) if recorded else {}
    made = _method(method, preset, settings, chosen)
    with _progress("images", min(len(store), limit or len(store)), quiet=as_json) as advance:
        result = replays.replay(
            store,
            made,
            dtype=dtype,
            device=find_device(device),
            limit=limit,
            shuffle=shuffle,
            seed=seed,
            progress=advance,
        )
    if output is not None:
        facts = {"method": made.name, "settings": json.dumps(result.summary()["settings"])}
        write_tensors(output, {"logits": result.logits, "pred": result.predictions, "order": result.order}, facts)
    summary = result.summary() | {"file": str(file), "dtype": dtype, "device": device, "version": __version__}
    if as_json:
        print(json.dumps(summary))
        return
    per_image = 1000 * result.seconds / summary["n"]
    err.print(f"{summary['n']} images of {store.task().classes} classes, {per_image:.2f} ms each in the method.")
    table = Table("", "accuracy", box=None, pad_edge=False)
    table.add_row("zero-shot", _percent(summary["zero_shot_accuracy"]))
    table.add_row(f"[bold]{made.name}[/]", f"[bold]{_percent(summary['accuracy'])}[/]")
    out.print(table)


@app.command(
    "train-prompts",
    epilog="Example:  testtime train-prompts train/ --classes cat,dog,fox --shots 16 --out pets.safetensors",
)
def train_prompts(
    output: Annotated[Path, typer.Option("--out", "-o", help="The prompt; written after every epoch.")],
    images: Annotated[
        str | None, typer.Argument(help="Images in folders named after their classes; not with --split.")
    ] = None,
    classes: Classes = None,
    classes_file: ClassesFile = None,
    split: Annotated[
        Path | None, typer.Option("--split", help="A split_zhou_X.json whose 'train' names the images.")
    ] = None,
    root: Annotated[Path | None, typer.Option("--root", help="The folder that paths in --split start from.")] = None,
    encoder: EncoderName = "offline",
    shots: Annotated[int, typer.Option("--shots", help="Images of each class, drawn by --seed.")] = 16,
    epochs: Annotated[int, typer.Option("--epochs", help="Times that every image is seen.")] = 50,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the images, the start and the order.")] = 1,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Another setting: lr, batch, n_ctx, class_specific, init, ..."),
    ] = None,
    views: Annotated[
        int, typer.Option("--views", help="Views per image, itself and random crops; an epoch draws one of them.")
    ] = 1,
    device: Device = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on from --out where it was interrupted.")] = False,
    strict: Strict = False,
) -> None:
    """Learn the words of a prompt (CoOp) from a few labelled images of each class.

    The prompt then serves any method: testtime run photos/ --prompts coop:pets.safetensors. Interrupted and resumed
    training ends in the same prompt as training in one go.
    """
    from dataclasses import replace

    from testtime import build_task, coop, load_encoder, registry

    given = {"shots": shots, "epochs": epochs, "seed": seed} | _pairs(settings)
    chosen = coop.CoOpSettings(
        **{key: registry.read_setting(coop.CoOpSettings, key, value) for key, value in given.items()}  # type: ignore
    )
    if output.exists() and not resume:
        raise InputError(f"{output} is there already; go on from it with --resume, or give another --out.")
    paths, labels, names = _training_images(images, split, root, classes, classes_file)
    places, truth = coop.pick_images(labels, names, chosen)
    loaded = load_encoder(encoder, device=find_device(device))
    words = coop.blank_words(chosen.n_ctx) if chosen.init == "random" else chosen.init
    task = build_task(loaded, names, context=words)
    if chosen.init != "random" and "n_ctx" not in given and task.context is not None:
        chosen = replace(chosen, n_ctx=len(task.context.start))
    if output.exists():  # what cannot be resumed shows before the images are encoded
        coop.check_checkpoint(output, names, loaded.name, chosen)
    with _progress("images", len(places)) as advance:
        features, kept = coop.encode_images(
            loaded, [paths[i] for i in places], views=views, seed=chosen.seed, progress=advance,
            on_skip=None if strict else lambda line: err.print(f"[yellow]skipped[/] {escape(line)}", soft_wrap=True),
        )  # fmt: skip
    log: list[Any] = []
    with _progress("epochs", chosen.epochs, quiet=not err.is_terminal) as advance:

        def note(epoch: Any) -> None:
            log.append(epoch)
            advance(epoch.epoch)
            if 10 * epoch.epoch // chosen.epochs > 10 * (epoch.epoch - 1) // chosen.epochs:
                err.print(
                    f"epoch {epoch.epoch} of {chosen.epochs}: loss {epoch.loss:.4f}, "
                    f"{_percent(epoch.accuracy)} of the training images right",
                    highlight=False,
                )

        labels_kept = [truth[i] for i in kept]
        coop.train(task, features, labels_kept, chosen, checkpoint=output, resume=resume, progress=note)
    done = f"{len(log)} epochs" if log else "no epochs left to do"
    err.print(f"{done} on {len(kept)} images of {len(names)} classes; the prompt is in {escape(str(output))}.")


@app.command("list", epilog="Example:  testtime list methods")
def list_(
    what: Annotated[str, typer.Argument(metavar="methods|encoders|datasets", help="What to list.")] = "methods",
) -> None:
    """List the methods, encoders or datasets there are."""
    from testtime import registry

    tables: dict[str, Callable[[], list[tuple[str, str]]]] = {
        "methods": lambda: [(name, registry.method_class(name).summary) for name in registry.method_names()],
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
            _percent(row["accuracy"]),
            f"{100 * (row['accuracy'] - base):+.2f}",
            f"{row['milliseconds']:.2f}",
            f"{row['peak_megabytes']:.1f}",
            f"{row['state_megabytes']:.1f}",
        )
    out.print(table)
    for row in rows:
        if "skipped" in row:
            err.print(f"{row['system']}: {escape(row['skipped'])}", highlight=False, soft_wrap=True)


@app.command(epilog="Example:  testtime demo --out demo")
def demo(
    output: Annotated[Path, typer.Option("--out", "-o", help="Folder for the HTML report.")] = Path("demo"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Watch adaptation on real photographs: a live table, then a report. No download, under a minute.

    The features of 2,465 Caltech101 photographs come with the package. Settings are each method's defaults.
    """
    from testtime.demo import run_demo

    run_demo(output, out if not as_json else err, as_json)


@app.command(epilog="Example:  testtime version")
def version() -> None:
    """Print the version, and those of the libraries that numbers depend on."""
    import platform

    import torch

    out.print(
        f"testtime {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        highlight=False,
    )


def main(argv: list[str] | None = None) -> None:
    """The `testtime` command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments or bool(os.environ.get("TESTTIME_DEBUG"))
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        app(arguments, prog_name="testtime")
    except TesttimeError as error:
        if debug:
            traceback.print_exc()
        err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        err.print("Interrupted; what was written is complete up to here.")
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(0)
    except Exception as error:
        if debug:
            traceback.print_exc()
        err.print(
            f"[bold red]failed:[/] {escape(f'{type(error).__name__}: {error}')}\n"
            "This is a fault in testtime or in a library under it; --debug shows where.",
            soft_wrap=True,
            highlight=False,
        )
        sys.exit(1)


def _method(name: str, preset: str | None, settings: list[str] | None, start: dict[str, object] | None = None) -> Any:
    from testtime import registry

    return registry.make_method(name, preset, dict(start or {}) | _pairs(settings))


def _pairs(settings: list[str] | None) -> dict[str, object]:
    """What --set gave, by name."""
    chosen: dict[str, object] = {}
    for entry in settings or []:
        key, equals, value = entry.partition("=")
        if not equals:
            raise InputError(f"--set {entry}: write it as KEY=VALUE, for example --set alpha=4.")
        chosen[key.strip()] = value.strip()
    return chosen


def _training_images(
    images: str | None, split: Path | None, root: Path | None, classes: str | None, file: Path | None
) -> tuple[list[Path], list[int | None], tuple[str, ...]]:
    """Paths, labels (None where no class is named) and class names, from folders or from a split."""
    from testtime.datasets import read_split
    from testtime.images import find_images, labels_from_folders
    from testtime.prompts import check_classes

    if (images is None) == (split is None):
        raise InputError("Say what to train on: a folder of images, or --split FILE --root FOLDER (one of the two).")
    if split is None:
        if root is not None:
            raise InputError("--root goes with --split; it is where the paths in the split start.")
        names = _class_names(classes, file)
        paths = find_images(images or "", sys.stdin)
        return paths, labels_from_folders(paths, names), names
    data = read_split(split, root or split.parent, "train")
    given = classes is not None or file is not None
    names = _class_names(classes, file) if given else check_classes(data.classnames)
    # a class's name reads as a folder of that name would
    called = [Path(data.classnames[label]) / "image" for label in data.labels]
    return list(data.paths), labels_from_folders(called, names), names


def _class_names(classes: str | None, file: Path | None) -> tuple[str, ...]:
    from testtime.prompts import check_classes, parse_classes, read_classes_file

    if classes is not None and file is None:
        return check_classes(parse_classes(classes))
    if file is not None and classes is None:
        return check_classes(read_classes_file(file))
    raise InputError("Say what to tell apart: --classes cat,dog,fox or --classes-file FILE (one of the two).")


def _task(
    encoder: Any,
    names: tuple[str, ...],
    templates: list[str] | None,
    descriptions: Path | None,
    prompts: str | None = None,
    context: bool = False,
) -> Any:
    from testtime.prompts import build_task

    one = templates[0] if templates and len(templates) == 1 else templates  # one may be the name of a set
    return build_task(encoder, names, templates=one, descriptions=descriptions, prompts=prompts, context=context)


def _style(style: str | None, output: Path | None) -> str:
    if style is None:
        return "jsonl" if output is not None and output.suffix in (".jsonl", ".json", ".ndjson") else "csv"
    if style not in ("csv", "jsonl"):
        raise InputError(f"Unknown --format '{style}'; it is csv or jsonl.")
    return style


def _ordered(paths: list[Path], shuffle: bool, seed: int, limit: int | None) -> list[Path]:
    import torch

    if limit is not None and limit < 1:
        raise InputError(f"--limit {limit}: at least one image is needed.")
    if shuffle:
        order = torch.randperm(len(paths), generator=torch.Generator().manual_seed(seed))
        paths = [paths[i] for i in order.tolist()]
    return paths[:limit]


class _Watch:
    """Rows for a person at a terminal: ours beside the zero-shot answer, marked where they differ."""

    def __init__(self, classnames: tuple[str, ...]) -> None:
        self.width = min(24, max(map(len, classnames)))
        out.print(f"[dim]{'':>6}  {'label':<{self.width + 7}}  {'zero-shot':<{self.width + 7}}  learned  image[/]")

    def write(self, values: dict[str, Any]) -> None:
        """Print one row."""
        label, frozen = (f"{values[key][: self.width]:<{self.width}}" for key in ("label", "zero_shot"))
        mark = "bold green" if values["label"] != values["zero_shot"] else "bold"
        out.print(
            f"[dim]{values['index']:>6}[/]  [{mark}]{escape(label)}[/] {values['confidence']:>6.1%}  "
            f"{escape(frozen)} {values['zero_shot_confidence']:>6.1%}  {'yes' if values['learned'] else '':<7}  "
            f"[dim]{escape(values['image'])}[/]",
            highlight=False,
            no_wrap=True,
            overflow="ellipsis",
        )


@contextmanager
def _opened(path: Path | None, append: bool) -> Iterator[Any]:
    if path is None:
        yield sys.stdout
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a" if append else "w", encoding="utf-8", newline="")
    except OSError as error:
        raise InputError(f"Cannot write {path}: {error.strerror or error}.") from None
    with file:
        yield file


@contextmanager
def _progress(unit: str, total: int, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; in a pipe, a plain line now and then."""
    if quiet:
        yield lambda done: None
        return
    if err.is_terminal:
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
        with Progress(*columns, console=err, transient=True) as bar:
            job = bar.add_task("", total=total)
            yield lambda done: bar.update(job, completed=done)
        return
    reported = 0

    def line(done: int) -> None:
        nonlocal reported
        if 10 * done // total > 10 * reported // total:
            reported = done
            err.print(f"{done} of {total} {unit}", highlight=False)

    yield line


def _percent(fraction: float | None) -> str:
    return "no labels" if fraction is None else f"{100 * fraction:.2f}%"


def _print_tally(tally: Any, session: Any, save: Path | None, output: Path | None, as_json: bool) -> None:
    facts = tally.summary() | {"method": session.method.name, "state": str(save) if save else None}
    if as_json:
        print(json.dumps(facts), file=sys.stderr)
        return
    err.print(
        f"{tally.images} images, {tally.learned} learned from, {tally.changed} answers other than zero-shot"
        + (f", {len(tally.skipped)} skipped" if tally.skipped else "")
        + (f"; rows in {escape(str(output))}" if output else "")
        + (f"; state in {escape(str(save))}" if save else ""),
        highlight=False,
        soft_wrap=True,
    )
    if tally.labelled:
        err.print(
            f"accuracy on {tally.labelled} images in folders named after a class: "
            f"{_percent(facts['accuracy'])} ({session.method.name}), "
            f"{_percent(facts['zero_shot_accuracy'])} (zero-shot)",
            highlight=False,
            soft_wrap=True,
        )


def _encoders() -> list[tuple[str, str]]:
    from testtime.encoders import describe

    return describe()


def _datasets() -> list[tuple[str, str]]:
    return [
        ("FOLDER", "Your own images; folders named after a class give labels to score with"),
        ("FILE.safetensors", "A feature file made by 'testtime encode'"),
        ("demo", "Features of the Caltech101 test split that come with the package"),
    ]


if __name__ == "__main__":
    main()
