"""The demo: adaptation live on real photographs, from features that come with the package."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from torch import Tensor

from testtime import __version__
from testtime.datasets import open_dataset
from testtime.datasets.shards import read_shards
from testtime.encoding.store import Features
from testtime.files import write_atomic
from testtime.report.data import StreamReport
from testtime.report.gather import Image, Runner, scored
from testtime.report.page import html
from testtime.report.running_accuracy import running_accuracy_svg
from testtime.session.order import shuffled
from testtime.session.session import Session
from testtime.types import InputError, Task

METHODS = ("zeroshot", "tda", "dpe")
CHUNK = 25  # images between two updates of the table
SEED = 1  # of the stream's order; the released code's seed
IMAGES = 2465
THUMBNAILS = "caltech101-thumbnails.tar"  # small copies of some of the photographs, named by their row
CREDIT = "Li, Andreeto, Ranzato and Perona, Caltech 101, CaltechDATA 2022, CC BY 4.0; resized and cropped"
SOME = "Only some of the photographs come with the package, none of them of faces; --images CALTECH101 shows any."
HIDDEN = "The package has their features only; testtime demo --images CALTECH101 shows them from your copy."


class Stream(NamedTuple):
    """What the methods run over, in the order of the run."""

    task: Task
    views: Tensor  # (N, 1, D)
    labels: Tensor  # (N,)
    images: Sequence[Image]  # the photographs; empty for those that cannot be shown


def demo_stream(images: Sequence[Image]) -> Stream:
    """The packaged features with their photographs, in an order shuffled once."""
    with as_file(files("testtime") / "data" / "caltech101.safetensors") as path:
        store = Features(path)
        task, views, labels = store.task(), store.read(0, len(store)), store.labels
    if labels is None:
        raise RuntimeError("The packaged features have no labels.")
    order = shuffled(len(views), SEED)
    return Stream(task, views[order], labels[order], [images[i] for i in order.tolist()])


def photographs(folder: str | None, packaged: Path) -> list[Image]:
    """The demo's photographs by row: all those of a copy of Caltech101, or the packaged ones, if any."""
    if folder is None:
        members = read_shards([packaged], packaged.stem).paths if packaged.is_file() else []
        by_name = {Path(str(member)).stem: member for member in members}
        return [by_name.get(f"{row:04d}", "") for row in range(IMAGES)]
    found = open_dataset(folder)
    if len(found) != IMAGES:
        raise InputError(
            f"--images {folder}: {len(found):,} images, but Caltech101's test split has {IMAGES:,}. Give the folder "
            "that holds 101_ObjectCategories and split_zhou_Caltech101.json."
        )
    return list(found.paths)


def largest(stream: Stream, count: int) -> Stream:
    """The part of a stream with its `count` most frequent classes; ties go to the lower index."""
    task, labels = stream.task, stream.labels
    frequency = labels.bincount(minlength=task.classes)
    classes = frequency.argsort(descending=True, stable=True)[:count].sort().values
    names = tuple(task.classnames[c] for c in classes.tolist())
    inside = torch.isin(labels, classes)
    return Stream(
        Task(task.text[classes], names, task.scale, task.encoder),
        stream.views[inside],
        torch.searchsorted(classes, labels[inside]),
        [stream.images[i] for i in inside.nonzero()[:, 0].tolist()],
    )


def run_streams(stream: Stream, console: Console) -> list[tuple[StreamReport, list[Runner]]]:
    """Both parts of the demo: the report of each, and its runs."""
    parts = {"The twenty most frequent classes": largest(stream, 20), "All hundred classes": stream}
    torch.set_num_threads(1)  # steps this small gain nothing from a second thread, and lose much on a busy machine
    found = []
    for title, part in parts.items():
        runners = _watch(title, part, console)
        heading = title, f"{len(part.views):,} photographs, {part.task.classes} classes, one view each"
        report = scored(part.task, heading, runners, part.labels.tolist(), part.images, None)
        found.append((replace(report, text=SOME) if report.thumbnails and not all(part.images) else report, runners))
    return found


def run_demo(folder: Path, console: Console, as_json: bool = False, images: str | None = None) -> None:
    """Run both streams with a live table, and write `report.html` and `accuracy.svg` into the folder.

    `images` is a copy of Caltech101, for the photographs on the page.
    """
    started = time.perf_counter()
    with as_file(files("testtime") / "data" / THUMBNAILS) as packaged:
        found = run_streams(demo_stream(photographs(images, packaged)), console)
    sections = [report for report, _ in found]
    results = {
        report.title: {run.name: {"accuracy": run.accuracy.compute(), "seconds": run.seconds} for run in runners}
        | {"n": len(report.labels)}
        for report, runners in found
    }
    about = {
        "Images": "Caltech101, test split (2,465 photographs, 100 classes), one view each",
        "Photographs": CREDIT if any(report.thumbnails for report in sections) else f"{CREDIT}. {HIDDEN}",
        "Encoder": "offline: EfficientNet-Lite2 and MiniLM; it is not CLIP",
        "Order": f"shuffled, seed {SEED}",
        "Settings": "each method's defaults, the same for both streams; labels only score",
        "Versions": f"testtime {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "Machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "Command": "testtime demo",
    }
    path = write_atomic(folder / "report.html", html(sections, about, "testtime demo"))
    figure = running_accuracy_svg(sections[0].curves, standalone=True, title=sections[0].subtitle)
    write_atomic(folder / "accuracy.svg", figure)
    if as_json:
        print(json.dumps({"results": results, "report": str(path), "seconds": time.perf_counter() - started}))
    console.print(f"Report with the curves: [bold]{path}[/]", highlight=False)


def _watch(title: str, stream: Stream, console: Console) -> list[Runner]:
    """Run every method over the stream side by side, with a live table."""
    task, views, labels, _ = stream
    runners = [Runner(name, Session(task, name), brier=None) for name in METHODS]
    heading = f"{title}: {len(views)} photographs"
    with Live(console=console, refresh_per_second=10, auto_refresh=False) as live:
        if console.is_terminal:
            live.update(_table(heading, runners), refresh=True)
        for start in range(0, len(views), CHUNK):
            for runner in runners:
                runner.advance(views[start : start + CHUNK], labels[start : start + CHUNK])
            if console.is_terminal:
                live.update(_table(heading, runners), refresh=True)
        live.update(_table(heading, runners), refresh=True)
    console.print()
    return runners


def _table(heading: str, runners: Sequence[Runner]) -> Table:
    table = Table(title=heading, title_justify="left", title_style="bold", min_width=60)
    for name in ("method", "images", "accuracy", "gain", "ms per image"):
        table.add_column(name, justify="left" if name == "method" else "right")
    points = [100 * runner.accuracy.compute() if runner.predictions else 0.0 for runner in runners]
    for runner, share in zip(runners, points, strict=True):
        seen, gain = len(runner.predictions), share - points[0]
        table.add_row(
            runner.name,
            str(seen),
            f"{share:.1f}%",
            "" if runner is runners[0] else f"[{'green' if gain > 0 else 'red'}]{gain:+.1f}[/]",
            f"{1000 * runner.seconds / max(1, seen):.2f}",
        )
    return table
