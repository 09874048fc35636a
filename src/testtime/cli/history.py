"""`testtime history`: look at the history of a run, go back in it, unlearn an image."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from testtime.cli import options
from testtime.cli.terminal import counted, note, out, waiting
from testtime.errors import InputError

if TYPE_CHECKING:
    from testtime.session.history_files import Index

app = typer.Typer(no_args_is_help=True, help="Look at the history of a run, go back in it, or unlearn an image.")
SHOWN = 20  # images in a table, unless all are asked for

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder given to 'testtime run --history'.")]
Output = Annotated[Path, typer.Option("--out", "-o", help="File for the state (.safetensors), for 'run --resume'.")]


@app.command(epilog="Example:  testtime history show pets-history/")
def show(
    folder: Folder,
    everything: Annotated[bool, options.flag("--all", help=f"All images, not only the latest {SHOWN}.")] = False,
    as_json: Annotated[
        bool, options.flag("--json", help="One JSON object on standard output, with all images.")
    ] = False,
) -> None:
    """List the snapshots and images of a history, with their times (UTC)."""
    from testtime.session.history_files import BEGAN, read_history, snapshot_file
    from testtime.session.saved_state import Saved

    index, entries = read_history(folder)
    saved = Saved(snapshot_file(folder, index.snapshots[-1]), "cpu")
    if as_json:
        about = {
            "folder": str(folder),
            "method": saved.method.name,
            "encoder": saved.task.encoder,
            "classes": list(saved.task.classnames),
            "every": index.every,
            "limit": index.limit,
            "began": BEGAN[index.began],
            "bytes": _size(folder, index),
            "snapshots": [
                {"position": each.position, "count": each.count, "time": each.time.isoformat()}
                for each in index.snapshots
            ],
            "images": [
                {"index": each.index, "image": each.name, "time": each.time.isoformat(), "status": each.status}
                for each in entries
            ],
        }
        print(json.dumps(about))
        return
    start = f"{counted(len(entries), 'image')} since position {index.snapshots[0].position:,}: {BEGAN[index.began]}"
    names = f"{saved.task.classes} classes, {escape(saved.task.encoder or 'features')}"
    size = f"{_size(folder, index) / 1e6:,.2f} MB"
    out.print(f"[bold]{escape(saved.method.name)}[/], {names}; {start}; {size}", highlight=False)
    table = _table("snapshot before image", "images answered", "time (UTC)")
    for snapshot in index.snapshots:
        table.add_row(f"{snapshot.position}", f"{snapshot.count}", _time(snapshot.time))
    out.print("", table, "", sep="\n")
    shown = entries if everything else entries[-SHOWN:]
    table = _table("image", "status", "time (UTC)", "name")
    for entry in shown:
        table.add_row(f"{entry.index}", entry.status, _time(entry.time), escape(entry.name or ""))
    out.print(table)
    if len(shown) < len(entries):
        out.print(f"[dim]and {len(entries) - len(shown):,} before them; --all shows them[/]", highlight=False)


@app.command(epilog="Example:  testtime history rollback pets-history/ --before 120 --out before.safetensors")
def rollback(
    folder: Folder,
    output: Output,
    before: Annotated[
        str | None,
        typer.Option(
            "--before",
            metavar="WHEN",
            help="The index or the name of an image, or a time such as 2026-01-31T12:00, in UTC unless it ends in an "
            "offset such as +02:00.",
            show_default="the end of the history",
        ),
    ] = None,
    device: options.Device = "auto",
    force: options.Force = False,
) -> None:
    """Write the state as it was right before an image or a time.

    The history stays as it is. If the state is resumed with the same --history, what came after it is removed there.
    """
    from testtime.session.history import rollback as go_back

    _check_output(folder, output, force)
    with waiting("replaying images"):
        session = go_back(folder, **_moment(before), device=options.steps_on(device))
        session.save(output)
    note(f"The state after {counted(session.count, 'image')}, before image {session.position}, is in {output}.")


@app.command(epilog="Example:  testtime history unlearn pets-history/ photos/me.jpg --out without.safetensors")
def unlearn(
    folder: Folder,
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="The index or the name of an image.")],
    output: Output,
    device: options.Device = "auto",
    force: options.Force = False,
) -> None:
    """Make the history as if an image could never be read, and write the state without it.

    All later images are learned from again, from their stored features. On the CPU the state is, bit for bit, that of a
    run without the image; other images keep their indices. The image's name and features are removed from the folder.
    """
    from testtime.session.history import unlearn as forget

    _check_output(folder, output, force)
    with waiting("replaying images"):
        session = forget(folder, _image(image), save=output, device=options.steps_on(device))
    others = counted(session.count, "other")
    note(
        f"Image {image} is unlearned: the history is without it, and the state after the {others} is in {output}. "
        "States saved before, rows and reports still hold what was made with it."
    )


def _image(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _moment(text: str | None) -> dict[str, Any]:
    """What `--before` means: an image's index, a time, or an image's name."""
    from testtime.session.history_replay import as_time

    if text is None or text.isdecimal():
        return {"before": None if text is None else int(text)}
    try:
        return {"before_time": as_time(text)}
    except InputError:
        return {"before": text}


def _check_output(folder: Path, output: Path, force: bool) -> None:
    from testtime.files import check_place
    from testtime.files.outputs import refuse_existing
    from testtime.session.history_files import check_outputs, read_index

    read_index(folder)
    check_outputs(folder, {"--out": output}, may_exist=True)
    check_place(output)
    refuse_existing({"--out": output}, force)


def _size(folder: Path, index: Index) -> int:
    return sum((folder / each.file).stat().st_size for items in (index.snapshots, index.parts) for each in items)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        right = column in ("snapshot before image", "images answered", "image")
        table.add_column(column, justify="right" if right else "left", no_wrap=column != "name", overflow="fold")
    return table


def _time(time: Any) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S}"
