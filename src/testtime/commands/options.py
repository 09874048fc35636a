"""Options that several commands share, and what they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from testtime.types import InputError

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
ViewsOrPaper = Annotated[
    int | None,
    typer.Option("--views", help="Views per image: itself and random crops.", show_default="1; 64 with --variations"),
]
Variations = Annotated[
    str | None,
    typer.Option(
        "--variations",
        metavar="FOLDER|diffusers:WEIGHTS",
        help="Also views drawn by a diffusion model, as many as crops: made earlier, a folder an image, or made now.",
    ),
]
PAPER_VIEWS = 64  # beside which DiffTPT has 63 variations
AugMix = Annotated[bool, typer.Option("--augmix", help="Mix the random crops with AugMix.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of views and of --shuffle.")]
Shuffle = Annotated[bool, typer.Option("--shuffle", help="Shuffle the stream by --seed.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, or auto.")]
Limit = Annotated[int | None, typer.Option("--limit", help="Stop after this many images.")]
Reference = Annotated[
    bool, typer.Option("--reference", help="Run the method's own steps, not its fast twin; same answers, slower.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Stop at an image that cannot be read, and do not skip it.")]


def method_of(name: str, preset: str | None, settings: list[str] | None, start: dict[str, object] | None = None) -> Any:
    from testtime import registry

    return registry.make_method(name, preset, dict(start or {}) | pairs(settings))


def pairs(settings: list[str] | None) -> dict[str, object]:
    """What --set gave, by name."""
    chosen: dict[str, object] = {}
    for entry in settings or []:
        key, equals, value = entry.partition("=")
        if not equals:
            raise InputError(f"--set {entry}: write it as KEY=VALUE, for example --set alpha=4.")
        chosen[key.strip()] = value.strip()
    return chosen


def class_names(classes: str | None, file: Path | None) -> tuple[str, ...]:
    from testtime.prompts import check_classes, parse_classes, read_classes_file

    if classes is not None and file is None:
        return check_classes(parse_classes(classes))
    if file is not None and classes is None:
        return check_classes(read_classes_file(file))
    raise InputError("Say what to tell apart: --classes cat,dog,fox or --classes-file FILE (one of the two).")


def task_of(
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


def variations_of(spec: str | None, views: int | None, paths: list[Path], device: Any) -> tuple[Any, int]:
    """The source of variations that --variations names, if it does, and how many views --views stands for.

    Ready-made ones are looked for at once, for every image.
    """
    if spec is None:
        return None, 1 if views is None else views
    from testtime.diffusion import FolderVariations, open_variations

    views = PAPER_VIEWS if views is None else views
    if views < 2:
        raise InputError(f"--views {views} with --variations: they are as many as the crops, so 2 or more are needed.")
    source = open_variations(spec, device)
    if isinstance(source, FolderVariations):
        source.check(paths, views - 1)
    return source, views


def ordered(paths: list[Path], shuffle: bool, seed: int, limit: int | None) -> list[Path]:
    from testtime.streams import shuffled

    if limit is not None and limit < 1:
        raise InputError(f"--limit {limit}: at least one image is needed.")
    if shuffle:
        paths = [paths[i] for i in shuffled(len(paths), seed).tolist()]
    return paths[:limit]
