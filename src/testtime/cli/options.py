"""Options that several commands share, and what they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from testtime.cli.terminal import note, waiting
from testtime.errors import InputError

if TYPE_CHECKING:
    import torch

    from testtime import types
    from testtime.datasets import Dataset
    from testtime.encoding.encoders import Deferred


def flag(*names: str, help: str, **others: Any) -> Any:
    """An option that is there or not; without this, its help asks for a <bool>."""
    return typer.Option(*names, help=help, metavar="", **others)


def _methods() -> list[str]:
    """What a shell may complete a method's name to."""
    from testtime.registry import method_names

    return method_names()


Images = Annotated[
    str,
    typer.Argument(
        metavar="IMAGES",
        help="A folder, a pattern in quotes, a .txt of paths, an image, - for paths on standard input; a CSV, .tar "
        "shards, a saved dataset; or a benchmark by name with --root.",
    ),
]
Root = Annotated[Path | None, typer.Option("--root", help="The folder that holds the benchmarks.")]
Classes = Annotated[
    str | None,
    typer.Option("--classes", help="Class names with commas between, cat,dog,fox; else those of the images given."),
]
ClassesFile = Annotated[Path | None, typer.Option("--classes-file", help="Class names, one to a line.")]
EncoderName = Annotated[
    str,
    typer.Option("--encoder", "-e", help="offline, open_clip:MODEL/PRETRAINED or hf:REPO; see 'list encoders'."),
]
MethodName = Annotated[
    str, typer.Option("--method", "-m", help="See 'testtime list methods'.", autocompletion=_methods)
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting of the method; may be given again and again."),
]
Preset = Annotated[str | None, typer.Option("--preset", help="A named set of settings: released or paper for dpe.")]
Templates = Annotated[
    list[str] | None,
    typer.Option(
        "--template",
        metavar="TEXT",
        help="A prompt with {} for the class, or a named set (see 'list prompts'); may be given again.",
    ),
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
ViewsOrPaper = Annotated[
    int | None,
    typer.Option("--views", help="Views per image: itself and random crops.", show_default="1; 64 with --variations"),
]
Variations = Annotated[
    str | None,
    typer.Option(
        "--variations",
        metavar="SOURCE",
        help="Also views drawn by a diffusion model, as many as crops: FOLDER of those made earlier, in a folder for "
        "each image, or diffusers:WEIGHTS to make them now.",
    ),
]
SAY_CLASSES = "Say what to tell apart: --classes cat,dog,fox or --classes-file FILE (one of the two)."
PAPER_VIEWS = 64  # beside which DiffTPT has 63 variations
AugMix = Annotated[bool, flag("--augmix", help="Mix the random crops with AugMix.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of views and of --shuffle.")]
Shuffle = Annotated[bool, flag("--shuffle", help="Shuffle the stream by --seed.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, or auto.")]
Limit = Annotated[int | None, typer.Option("--limit", help="Stop after this many images.")]
Reference = Annotated[
    bool, flag("--reference", help="Run the method's own steps, and nothing faster; same answers up to rounding.")
]
Report = Annotated[
    Path | None, typer.Option("--report", help="Write an HTML page about it that needs nothing else, as 'report' does.")
]
Strict = Annotated[bool, flag("--strict", help="Stop at an image that cannot be read, and do not skip it.")]


def method_of(name: str, preset: str | None, settings: list[str] | None, start: dict[str, object] | None = None) -> Any:
    from testtime import registry

    return registry.make_method(name, preset, dict(start or {}) | pairs(settings))


def encoder_of(name: str, device: str) -> Deferred:
    """The encoder, loaded when it is first needed."""
    from testtime.encoding.encoders import Deferred

    return Deferred(name, device, lambda: waiting(f"loading the encoder {name}"))


def pairs(settings: list[str] | None, option: str = "--set", example: str = "alpha=4") -> dict[str, object]:
    """What an option of the form KEY=VALUE gave, by name."""
    chosen: dict[str, object] = {}
    for entry in settings or []:
        key, equals, value = entry.partition("=")
        if not equals:
            raise InputError(f"{option} {entry}: write it as KEY=VALUE, for example {option} {example}.")
        chosen[key.strip()] = value.strip()
    return chosen


def source_of(
    what: str, root: Path | None, classes: str | None, file: Path | None
) -> tuple[Dataset, tuple[str, ...], list[int | None]]:
    """The images that an argument stands for, the classes to tell apart, and each image's class where it is known.

    Classes are those given, or else those that the images come with.
    """
    from testtime.datasets import find_dataset, labels_among
    from testtime.datasets.dataset import NAMELESS, some
    from testtime.text.prompts import check_classes

    data = find_dataset(what, root, labelled=False)
    given = classes is not None or file is not None
    for line in data.notes:
        if not (given and line.startswith(NAMELESS)):
            note(f"note: {line}")
    if not given and not data.classnames:
        raise InputError(f"{what} comes without class names. {SAY_CLASSES}")
    if given:
        names = class_names(classes, file)
    else:
        names = check_classes(data.classnames, allow_duplicates=True)
        note(f"{len(names)} classes, as {data.name} has them: {some(names)}")
    return data, names, labels_among(data, names)


def class_names(classes: str | None, file: Path | None) -> tuple[str, ...]:
    from testtime.text.prompts import check_classes, parse_classes, read_classes_file

    if classes is not None and file is None:
        return check_classes(parse_classes(classes))
    if file is not None and classes is None:
        return check_classes(read_classes_file(file))
    raise InputError(SAY_CLASSES)


def task_of(
    encoder: types.Encoder,
    names: tuple[str, ...],
    templates: list[str] | None,
    descriptions: Path | None,
    prompts: str | None = None,
    context: bool = False,
) -> types.Task:
    from testtime.text.prompts import build_task

    # names given twice have been refused; a benchmark may have two classes of one name
    with waiting("encoding the class names"):
        return build_task(
            encoder, names, templates=templates, descriptions=descriptions, prompts=prompts, context=context,
            allow_duplicates=True,
        )  # fmt: skip


def variations_of(
    spec: str | None, views: int | None, images: Sequence[types.StoredImage], device: torch.device
) -> tuple[types.Variations | None, int]:
    """The source of variations that --variations names, if it does, and how many views --views stands for.

    Ready-made ones are looked for at once, for every image.
    """
    if spec is None:
        return None, 1 if views is None else views
    from testtime.images.diffusion import FolderVariations, open_variations

    views = PAPER_VIEWS if views is None else views
    if views < 2:
        raise InputError(f"--views {views} with --variations: they are as many as the crops, so 2 or more are needed.")
    source = open_variations(spec, device)
    if isinstance(source, FolderVariations):
        source.check([Path(str(image)) for image in images], views - 1)
    return source, views


def ordered(count: int, shuffle: bool, seed: int, limit: int | None) -> list[int]:
    """The places of the images that a stream of `count` takes, in its order."""
    from testtime.session.order import shuffled

    if limit is not None and limit < 1:
        raise InputError(f"--limit {limit}: at least one image is needed.")
    return (shuffled(count, seed).tolist() if shuffle else list(range(count)))[:limit]
