"""`testtime train-prompts`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from testtime.cli.options import (
    Classes,
    ClassesFile,
    Device,
    EncoderName,
    Force,
    Strict,
    class_names,
    encoder_of,
    flag,
    pairs,
)
from testtime.cli.terminal import counted, err, percent, progress
from testtime.errors import InputError
from testtime.machine.interrupts import on_interrupt

if TYPE_CHECKING:
    from testtime.types import StoredImage

app = typer.Typer()


@app.command(
    "train-prompts",
    epilog="Example:  testtime train-prompts train/ --classes cat,dog,fox --shots 16 --out pets.safetensors",
)
def train_prompts(
    context: typer.Context,
    output: Annotated[Path, typer.Option("--out", "-o", help="File for the prompt; written after every epoch.")],
    images: Annotated[
        str | None,
        typer.Argument(
            metavar="IMAGES",
            help="Labelled images, in folders named after their classes, or a dataset; not with --split.",
        ),
    ] = None,
    classes: Classes = None,
    classes_file: ClassesFile = None,
    split: Annotated[
        Path | None, typer.Option("--split", help="A split_zhou_X.json whose 'train' lists the images.")
    ] = None,
    root: Annotated[
        Path | None,
        typer.Option("--root", metavar="FOLDER", help="Folder that paths in --split are relative to."),
    ] = None,
    encoder: EncoderName = "offline",
    shots: Annotated[int, typer.Option("--shots", help="Images per class, chosen by --seed.")] = 16,
    epochs: Annotated[int, typer.Option("--epochs", help="Passes over the training images.")] = 50,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the choice of images, the start and the order.")] = 1,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Another setting: lr, batch, n_ctx, class_specific, init, ..."),
    ] = None,
    views: Annotated[
        int, typer.Option("--views", help="Views per image: itself and random crops; each epoch uses one of them.")
    ] = 1,
    device: Device = "auto",
    resume: Annotated[bool, flag("--resume", help="Resume interrupted training from --out.")] = False,
    force: Force = False,
    strict: Strict = False,
) -> None:
    """Learn the words of a prompt (CoOp) from a few labelled images of each class.

    Any method can use the prompt: testtime run photos/ --prompts coop:pets.safetensors. Interrupted and resumed
    training gives the same prompt as uninterrupted training.
    """
    from dataclasses import replace

    from testtime import build_task, registry
    from testtime.encoding.encode import encode_images
    from testtime.files import check_place, locked
    from testtime.files.outputs import refuse_existing
    from testtime.text import coop
    from testtime.types import ViewPlan

    given = {"shots": shots, "epochs": epochs, "seed": seed} | pairs(settings)
    chosen = coop.CoOpSettings(
        **{key: registry.read_setting(coop.CoOpSettings, key, value) for key, value in given.items()}  # type: ignore
    )
    if not resume:
        refuse_existing({"--out": output}, force, ", --resume continues it")
    paths, labels, names = _training_images(images, split, root, classes, classes_file)
    picked, truth = coop.pick_images(labels, names, chosen)
    check_place(output)
    context.with_resource(locked(output))
    loaded = encoder_of(encoder, device)
    words = coop.blank_words(chosen.n_ctx) if chosen.init == "random" else chosen.init
    task = build_task(loaded, names, context=words)
    if chosen.init != "random" and "n_ctx" not in given and task.context is not None:
        chosen = replace(chosen, n_ctx=len(task.context.start))
    if resume and output.exists():  # fails before the images are encoded if it cannot be resumed
        coop.check_checkpoint(output, names, loaded.name, chosen)
    with on_interrupt(lambda: _stopped(output)), progress("images", len(picked)) as advance:
        features, kept = encode_images(
            loaded, [paths[i] for i in picked], ViewPlan(views, seed=chosen.seed), progress=advance,
            on_skip=None if strict else lambda line: err.print(f"[yellow]skipped[/] {escape(line)}", soft_wrap=True),
        )  # fmt: skip
    log: list[Any] = []
    with (
        on_interrupt(lambda: _stopped(output)),
        progress("epochs", chosen.epochs, quiet=not err.is_terminal) as advance,
    ):

        def note(epoch: Any) -> None:
            log.append(epoch)
            advance(epoch.epoch)
            if 10 * epoch.epoch // chosen.epochs > 10 * (epoch.epoch - 1) // chosen.epochs:
                err.print(
                    f"epoch {epoch.epoch} of {chosen.epochs}: loss {epoch.loss:.4f}, "
                    f"{percent(epoch.accuracy)} of the training images correct",
                    highlight=False,
                )

        labels_kept = [truth[i] for i in kept]
        coop.train(task, features, labels_kept, chosen, checkpoint=output, resume=resume, progress=note)
    done = counted(len(log), "epoch") if log else "no epochs left to do"
    err.print(
        f"{done} on {counted(len(kept), 'image')} of {len(names)} classes; the prompt is in {escape(str(output))}."
    )


def _stopped(output: Path) -> str:
    """The message after an interrupt."""
    if not output.exists():
        return "Interrupted before the end of an epoch; nothing was saved."
    return f"Interrupted. The prompt after the last full epoch is in {output}; add --resume to the command to continue."


def _training_images(
    images: str | None, split: Path | None, root: Path | None, classes: str | None, file: Path | None
) -> tuple[Sequence[StoredImage], list[int | None], tuple[str, ...]]:
    """Paths, labels (None where no class is named) and class names, from folders or from a split."""
    from testtime.datasets import labels_among, open_dataset, read_split
    from testtime.text.prompts import check_classes

    if (images is None) == (split is None):
        raise InputError("Give the training images: a folder, or --split FILE --root FOLDER (one of the two).")
    if split is None:
        if root is not None:
            raise InputError("--root needs --split, whose paths are relative to it.")
        data = open_dataset(images or "", part="train")
    else:
        data = read_split(split, root or split.parent, "train")
    given = classes is not None or file is not None or not data.classnames
    names = class_names(classes, file) if given else check_classes(data.classnames)
    return data.paths, labels_among(data, names), names
