"""`testtime encode`: images to features."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from testtime.cli import config, options
from testtime.cli.terminal import counted, err, note, progress, waiting
from testtime.errors import InputError
from testtime.machine.interrupts import on_interrupt

app = typer.Typer()
SHARD = 1000  # images per shard, as suggested after an interrupt


@app.command(epilog="Example:  testtime encode photos/ --classes cat,dog,fox --views 64 --out photos.safetensors")
def encode(
    context: typer.Context,
    images: options.Images,
    output: Annotated[Path, typer.Option("--out", "-o", help="Feature file, or a folder with --shard.")],
    root: options.Root = None,
    classes: options.Classes = None,
    classes_file: options.ClassesFile = None,
    encoder: options.EncoderName = "offline",
    template: options.Templates = None,
    descriptions: options.Descriptions = None,
    prompts: options.Prompts = None,
    views: options.ViewsOrPaper = None,
    augmix: options.AugMix = False,
    variations: options.Variations = None,
    seed: options.Seed = 0,
    limit: options.Limit = None,
    every: options.Every = "1s",
    device: options.Device = "auto",
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="NAME", help="Stored precision: float16 or float32.")
    ] = "float16",
    shard: Annotated[int | None, typer.Option("--shard", help="Images per shard; --out is then a folder.")] = None,
    on: options.On = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", help="Workers on Ray, each with its encoder.", show_default="one per GPU or machine"),
    ] = None,
    force: options.Force = False,
    strict: options.Strict = False,
    config_file: config.Config = None,
    save_config: config.SaveConfig = None,
) -> None:
    """Encode images once into a feature file, for 'testtime replay' with any method.

    If every image has a label, or is in a folder named after a class, replays are scored.
    """
    from testtime import registry
    from testtime.encoding import encode as encoding
    from testtime.files import check_folder, check_place, locked
    from testtime.files.outputs import distinct, read_files, refuse_existing
    from testtime.machine.devices import find_device
    from testtime.types import ViewPlan

    data, names, labels = options.source_of(images, root, classes, classes_file, every)
    order = options.ordered(len(data), False, seed, limit)
    paths = [data.paths[i] for i in order]
    distinct(
        {"--out": output, "--save-config": save_config},
        read_files(images, data.paths, encoder, classes_file, descriptions, prompts) | {"--config": config_file},
    )
    if dtype not in encoding.DTYPES:
        raise registry.unknown("dtype", dtype, encoding.DTYPES)
    if shard is not None and shard < 1:
        raise InputError(f"--shard {shard}: must be 1 or more.")
    if workers is not None and on is None:
        raise InputError(f"--workers {workers} is for --on ray; without Ray, one process uses all cores or a GPU.")
    here = "auto" if on is not None and device == "cuda" else device  # the class names are encoded on this machine
    source, count = options.variations_of(variations, views, paths, find_device(here))
    plan = ViewPlan(count, augmix, seed, source)
    check_place(output) if shard is None else check_folder(output)
    check_place(save_config)
    context.with_resource(locked(output))
    refuse_existing({"--out": output}, force)  # a folder of shards is resumed
    config.save(context, save_config)
    streamed: encoding.Streamed = encoding.stream
    if on is not None:
        from testtime.cluster.connect import connected

        with waiting("connecting to Ray"):
            context.with_resource(connected(on))
        from testtime.cluster.encode import RayStream

        streamed = RayStream(device, workers, encoding.DTYPES[dtype])
    loaded = options.encoder_of(encoder, here)
    task = options.task_of(loaded, names, template, descriptions, prompts)
    skipped: list[str] = []

    def skip(line: str) -> None:
        skipped.append(line)
        err.print(f"[yellow]skipped[/] {escape(line)}", soft_wrap=True)

    def stopped() -> str:
        if shard is None:
            return (
                f"Interrupted; nothing was saved. With --shard {SHARD}, every {SHARD} images are saved along the way."
            )
        return f"Interrupted. Finished shards are kept in {output}; run the same command again to resume."

    with on_interrupt(stopped), progress("images", len(paths)) as advance:
        done = encoding.encode(
            loaded, task, paths, output, plan,
            labels=[labels[i] for i in order], dtype=encoding.DTYPES[dtype], shard=shard, resume=True, dataset=images,
            on_skip=None if strict else skip, progress=advance, report=note,
            streamed=streamed,
        )  # fmt: skip
    note(f"{counted(done, 'image')} x {counted(plan.total, 'view')} in {output}, {len(skipped)} skipped.")
