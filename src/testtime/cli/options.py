"""Options that several commands share, and how to interpret them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer
from typer.models import OptionInfo

from testtime.cli.terminal import note, waiting
from testtime.errors import InputError
from testtime.registry import Entry

if TYPE_CHECKING:
    import torch

    from testtime import types
    from testtime.datasets import Dataset
    from testtime.encoding.encoders import Deferred
    from testtime.guard import Guard


def flag(*names: str, help: str, **others: Any) -> Any:
    """A flag; without the empty metavar, its help would ask for a <bool>."""
    return typer.Option(*names, help=help, metavar="", **others)


NUMBER = "N"  # the metavar of whole numbers, and of nothing else
METAVARS: dict[object, str] = {bool: "", int: NUMBER, Path: "FILE", str: "TEXT"}


def name_metavars(command: Callable[..., Any]) -> None:
    """Name the values of a command's options by their types, where they have no name; typer would write <path>."""
    # no longer text, of which typer would make other options
    command.__annotations__ = get_type_hints(command, include_extras=True)
    for hint in command.__annotations__.values():
        for about in getattr(hint, "__metadata__", ()):
            if isinstance(about, OptionInfo) and about.metavar is None:
                kinds = [kind for kind in (hint.__origin__, *get_args(hint.__origin__)) if kind in METAVARS]
                about.metavar = METAVARS[kinds[0]]


# Shell completions. They import neither torch nor the modules that do.


def _methods() -> list[str]:
    from testtime.registry import method_names

    return method_names()


def encoders() -> list[str]:
    """The encoders; a colon ends those that take a model."""
    from testtime.registry import ENCODERS

    return [name + ":" * (":" in ENCODERS.ours.get(name, Entry(None)).usage) for name in ENCODERS.names()]


def _devices() -> list[str]:
    return ["auto", "cpu", "cuda"]


def presets() -> list[str]:
    """The presets of all methods."""
    return ["released", "quick", "paper", "unknown_length"]


def _prompt_sets() -> list[str]:
    from testtime.text.templates import PROMPTS

    return PROMPTS.names()


def experiment_names() -> list[str]:
    """The experiments of 'testtime bench'."""
    from testtime.experiments.catalogue import EXPERIMENTS

    return ["list", *EXPERIMENTS]


def benchmarks() -> list[str]:
    """The benchmarks by name, and datasets of plug-ins."""
    from testtime.experiments.catalogue import CROSS, NATURAL

    return [*NATURAL, *CROSS, *(point.name for point in entry_points(group="testtime.datasets"))]


def benchmarks_with_root(context: typer.Context) -> list[str]:
    """The benchmarks after --root; otherwise the shell completes file names."""
    return benchmarks() if context.params.get("root") else []


Images = Annotated[
    str,
    typer.Argument(
        metavar="IMAGES",
        help="A folder, a quoted glob pattern, a .txt list of paths, an image or a video, or - for paths on standard "
        "input; a CSV, .tar shards or a saved dataset; a URL such as s3://bucket/photos; or a benchmark's name with "
        "--root.",
        autocompletion=benchmarks_with_root,
    ),
]
Root = Annotated[Path | None, typer.Option("--root", metavar="FOLDER", help="Folder that holds the benchmarks.")]
Classes = Annotated[
    str | None,
    typer.Option(
        "--classes",
        metavar="NAMES",
        help="Comma-separated class names, such as cat,dog,fox; by default the dataset's own.",
    ),
]
ClassesFile = Annotated[Path | None, typer.Option("--classes-file", help="File of class names, one per line.")]
EncoderName = Annotated[
    str,
    typer.Option(
        "--encoder",
        "-e",
        metavar="NAME",
        help="offline, open_clip:MODEL/PRETRAINED or hf:REPO; see 'list encoders'. NAME@bfloat16 computes in bfloat16.",
        autocompletion=encoders,
    ),
]
MethodName = Annotated[
    str,
    typer.Option(
        "--method",
        "-m",
        metavar="NAME",
        help="A method's name; see 'testtime list methods'.",
        autocompletion=_methods,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting of the method; can be repeated."),
]
Preset = Annotated[
    str | None,
    typer.Option(
        "--preset",
        metavar="NAME",
        help="A named set of settings: released or paper for dpe.",
        autocompletion=presets,
    ),
]
Templates = Annotated[
    list[str] | None,
    typer.Option(
        "--template",
        metavar="TEXT",
        help="A prompt with {} for the class, or a named set (see 'list prompts'); can be repeated.",
        autocompletion=_prompt_sets,
    ),
]
Descriptions = Annotated[
    Path | None,
    typer.Option("--descriptions", help="JSON file of class name -> sentences (CuPL), added to the templates."),
]
Prompts = Annotated[
    str | None,
    typer.Option(
        "--prompts",
        metavar="coop:FILE",
        help="A learned prompt instead of templates; see 'testtime train-prompts'.",
    ),
]
Views = Annotated[int, typer.Option("--views", help="Views per image: itself and random crops.")]
ViewsOrPaper = Annotated[
    int | None,
    typer.Option(
        "--views", help="Views per image: the image itself and random crops.", show_default="1; 64 with --variations"
    ),
]
Variations = Annotated[
    str | None,
    typer.Option(
        "--variations",
        metavar="SOURCE",
        help="Add views generated by a diffusion model, one per crop: a FOLDER with a subfolder of existing ones for "
        "each image, or diffusers:WEIGHTS to generate them now.",
    ),
]
CLASSES_NEEDED = "Name the classes with --classes cat,dog,fox or --classes-file FILE (one of the two)."
PAPER_VIEWS = 64  # to which DiffTPT adds 63 variations
AugMix = Annotated[bool, flag("--augmix", help="Apply AugMix to the random crops.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the views and of --shuffle.")]
Shuffle = Annotated[bool, flag("--shuffle", help="Shuffle the stream with --seed.")]
Device = Annotated[
    str,
    typer.Option(
        "--device", metavar="NAME", help="cpu, cuda, cuda:1, mps (an Apple GPU) or auto.", autocompletion=_devices
    ),
]
On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="ray[:ADDRESS]",
        help="Run on Ray: the cluster at ADDRESS or of RAY_ADDRESS, or else Ray on this machine.",
    ),
]
Limit = Annotated[int | None, typer.Option("--limit", help="Stop after this many images.")]
Reference = Annotated[
    bool, flag("--reference", help="Run the reference implementation, not a faster one; same answers up to rounding.")
]
Report = Annotated[
    Path | None, typer.Option("--report", help="Also write a self-contained HTML report, like 'testtime report'.")
]
Every = Annotated[
    str, typer.Option("--every", metavar="INTERVAL", help="Frames of a video: one every 1s, 500ms, or 10f (frames).")
]
Logs = Annotated[
    list[str] | None,
    typer.Option(
        "--log",
        metavar="WHERE",
        help="Log the course of the run: tensorboard:FOLDER, wandb[:PROJECT], wandb-offline[:PROJECT] or jsonl:FILE; "
        "can be repeated.",
    ),
]
History = Annotated[
    Path | None,
    typer.Option(
        "--history",
        metavar="FOLDER",
        help="Folder for the history of the run, with which 'testtime history' goes back or unlearns an image.",
    ),
]
SnapshotEvery = Annotated[
    int | None,
    typer.Option("--snapshot-every", help="Images between two snapshots of the history.", show_default="200"),
]
HistoryLimit = Annotated[
    int | None,
    typer.Option("--history-limit", help="Most images in the history; the oldest are dropped.", show_default="10,000"),
]
Force = Annotated[bool, flag("--force", help="Overwrite files that exist.")]
Strict = Annotated[bool, flag("--strict", help="Stop at an image that cannot be read instead of skipping it.")]


GuardOn = Annotated[
    bool,
    flag("--guard", help="Guard against harm: bad images teach nothing, and unsupported answers are taken back."),
]
GuardSettings = Annotated[
    list[str] | None,
    typer.Option("--guard-set", metavar="KEY=VALUE", help="A setting of the guard, such as budget=0; can be repeated."),
]
Reject = Annotated[
    bool, flag("--reject", help="Answer 'unknown' for images that look like none of the classes; turns the guard on.")
]
Labelled = Annotated[
    int,
    typer.Option(
        "--labelled",
        metavar="N",
        help="Give the guard up to N true labels, of images where adapted and frozen answers differ; turns it on.",
    ),
]


def guard_of(guard: bool, settings: list[str] | None, reject: bool, labelled: int) -> Guard | None:
    """The guard that these options ask for, if any does."""
    from testtime import guard as guards
    from testtime.registry import read_setting

    if labelled < 0:
        raise InputError(f"--labelled {labelled}: must be 0 or more.")
    chosen = pairs(settings, "--guard-set", "budget=0") | ({"reject": True} if reject else {})
    if not (guard or chosen or labelled):
        return None
    read: dict[str, Any] = {key: read_setting(guards.Guard, key, value) for key, value in chosen.items()}
    return guards.Guard(**read)


def method_of(name: str, preset: str | None, settings: list[str] | None, start: dict[str, object] | None = None) -> Any:
    from testtime import registry

    return registry.make_method(name, preset, dict(start or {}) | pairs(settings))


def encoder_of(name: str, device: str, optional: bool = False) -> Deferred:
    """The encoder, loaded when it is first needed; an `optional` one may be missing."""
    from testtime.encoding.encoders import Deferred

    return Deferred(name, device, lambda: waiting(f"loading the encoder {name}"), optional)


def steps_on(device: str) -> torch.device:
    """The device for a command that only runs methods."""
    from testtime.machine.devices import find_device, step_device

    found = find_device(device)
    if found.type == "mps":
        note("note: an Apple GPU (mps) is for encoders; methods run on the CPU.")
    return step_device(found)


def pairs(settings: list[str] | None, option: str = "--set", example: str = "alpha=4") -> dict[str, object]:
    """The values of a KEY=VALUE option by key."""
    chosen: dict[str, object] = {}
    for entry in settings or []:
        key, equals, value = entry.partition("=")
        if not equals:
            raise InputError(f"{option} {entry}: write it as KEY=VALUE, for example {option} {example}.")
        chosen[key.strip()] = value.strip()
    return chosen


def given(context: typer.Context, name: str) -> bool:
    """Whether a parameter was given, on the command line or in a --config file."""
    return getattr(context.get_parameter_source(name), "name", "") in ("COMMANDLINE", "DEFAULT_MAP")


def source_of(
    what: str,
    root: Path | None,
    classes: str | None,
    file: Path | None,
    every: str = "1s",
    saved: Sequence[str] | None = None,
) -> tuple[Dataset, tuple[str, ...], list[int | None]]:
    """The images that an argument names, the classes, and each image's class where it is known.

    Classes are those given, else those of a `saved` state, or by default the dataset's own. Folders, labels and classes
    that found no partner are printed.
    """
    from testtime.datasets import find_dataset, with_classes
    from testtime.datasets.dataset import shortened

    data = find_dataset(what, root, labelled=False, every=every)
    given = saved if classes is None and file is None else class_names(classes, file)
    names, labels, notes = with_classes(data, given, CLASSES_NEEDED)
    for line in notes:
        note(f"note: {line}")
    if given is None:
        note(f"{len(names)} classes of {data.name}: {shortened(names)}")
    return data, names, labels


def class_names(classes: str | None, file: Path | None) -> tuple[str, ...]:
    from testtime.text.prompts import check_classes, parse_classes, read_classes_file

    if classes is not None and file is None:
        return check_classes(parse_classes(classes))
    if file is not None and classes is None:
        return check_classes(read_classes_file(file))
    raise InputError(CLASSES_NEEDED)


def task_of(
    encoder: types.Encoder,
    names: tuple[str, ...],
    templates: list[str] | None,
    descriptions: Path | None,
    prompts: str | None = None,
    context: bool = False,
) -> types.Task:
    from testtime.text.prompts import build_task

    # duplicates on the command line have been refused; a benchmark may have two classes of one name
    with waiting("encoding the class names"):
        return build_task(
            encoder, names, templates=templates, descriptions=descriptions, prompts=prompts, context=context,
            allow_duplicates=True,
        )  # fmt: skip


def variations_of(
    spec: str | None, views: int | None, images: Sequence[types.StoredImage], device: torch.device
) -> tuple[types.Variations | None, int]:
    """The source of variations that --variations names, if any, and the number of views that --views means.

    Existing variations are checked now, for every image.
    """
    if spec is None:
        return None, 1 if views is None else views
    from testtime.images.diffusion import FolderVariations, open_variations

    views = PAPER_VIEWS if views is None else views
    if views < 2:
        raise InputError(f"--views {views} with --variations: must be 2 or more, since each crop gets one variation.")
    source = open_variations(spec, device)
    if isinstance(source, FolderVariations):
        source.check([Path(str(image)) for image in images], views - 1)
    return source, views


def ordered(count: int, shuffle: bool, seed: int, limit: int | None) -> list[int]:
    """The indices, in order, of the images that a stream takes from `count`."""
    from testtime.session.order import shuffled

    if limit is not None and limit < 1:
        raise InputError(f"--limit {limit}: at least one image is needed.")
    return (shuffled(count, seed).tolist() if shuffle else list(range(count)))[:limit]
