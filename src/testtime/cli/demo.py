"""The demo: adaptation live on features of real photographs, which come with the package."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from torch import Tensor

from testtime import __version__
from testtime.datasets import open_dataset
from testtime.files import write_atomic
from testtime.metrics import ExpectedCalibrationError
from testtime.report.data import StreamReport
from testtime.report.gather import Image, Runner, scored
from testtime.report.page import html
from testtime.report.running_accuracy import running_accuracy_svg
from testtime.session.packaged import SEED, Stream, demo_stream, largest
from testtime.session.session import Session
from testtime.types import InputError

METHODS = ("zeroshot", "tda", "dpe")
CHUNK = 25  # images between two updates of the table
IMAGES = 2465
CREDIT = "Li, Andreeto, Ranzato and Perona, Caltech 101, CaltechDATA 2022, CC BY 4.0; resized and cropped"
HIDDEN = "The package has their features only; testtime demo --images CALTECH101 shows them from your copy."


def photographs(folder: str) -> list[Image]:
    """The demo's photographs in a copy of Caltech101, by row of the features."""
    found = open_dataset(folder)
    if len(found) != IMAGES:
        raise InputError(
            f"--images {folder}: {len(found):,} images, but Caltech101's test split has {IMAGES:,}. Give the folder "
            "that holds 101_ObjectCategories and split_zhou_Caltech101.json."
        )
    return list(found.paths)


def run_streams(stream: Stream, console: Console) -> list[tuple[StreamReport, list[Runner]]]:
    """Both parts of the demo: the report of each, and its runs."""
    parts = {"The twenty most frequent classes": largest(stream, 20), "All hundred classes": stream}
    torch.set_num_threads(1)  # steps this small gain nothing from a second thread, and lose much on a busy machine
    found = []
    for title, part in parts.items():
        runners = _watch(title, part, console)
        heading = title, f"{len(part.views):,} photographs, {part.task.classes} classes, one view each"
        found.append((scored(part.task, heading, runners, part.labels.tolist(), part.images, None), runners))
    return found


def run_demo(folder: Path, console: Console, as_json: bool = False, images: str | None = None) -> None:
    """Run both streams with a live table, and write `report.html` and `accuracy.svg` into the folder.

    `images` is a copy of Caltech101, for the photographs on the page.
    """
    started = time.perf_counter()
    found = run_streams(demo_stream(photographs(images) if images else ()), console)
    sections = [report for report, _ in found]
    results = {
        report.title: {run.name: _scores(run, torch.tensor(report.labels)) for run in runners}
        | {"n": len(report.labels)}
        for report, runners in found
    }
    about = {
        "Images": "Caltech101, test split (2,465 photographs, 100 classes), one view each",
        "Photographs": CREDIT if images else f"{CREDIT}. {HIDDEN}",
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
            live.update(_table(heading, runners, labels), refresh=True)
        for start in range(0, len(views), CHUNK):
            for runner in runners:
                runner.advance(views[start : start + CHUNK], labels[start : start + CHUNK])
            if console.is_terminal:
                live.update(_table(heading, runners, labels), refresh=True)
        live.update(_table(heading, runners, labels), refresh=True)
    console.print("" if console.is_terminal else "\n")  # in a pipe, the table ends without a line break
    return runners


def _scores(runner: Runner, labels: Tensor) -> dict[str, float]:
    """The scores of a run so far, with the calibration error of both confidences; zeros before the first image."""
    answers = torch.tensor(runner.predictions, dtype=torch.long)
    right = answers == labels[: len(answers)]
    errors = {
        name: ExpectedCalibrationError().update_answers(torch.tensor(found), right).compute() if len(answers) else 0.0
        for name, found in (
            ("calibration_error", runner.confidences),
            ("calibrated_error", runner.calibrated),
        )
    }
    share = runner.accuracy.compute() if len(answers) else 0.0
    return {"accuracy": share, "seconds": runner.seconds} | errors


def _table(heading: str, runners: Sequence[Runner], labels: Tensor) -> Table:
    table = Table(title=heading, title_justify="left", title_style="bold", min_width=60)
    table.caption, table.caption_justify = "ECE: gap between confidence and accuracy, in points", "left"
    for name in ("method", "images", "accuracy", "gain", "ECE", "calibrated", "ms per image"):
        table.add_column(name, justify="left" if name == "method" else "right")
    scores = [_scores(runner, labels) for runner in runners]
    for runner, found in zip(runners, scores, strict=True):
        seen, gain = len(runner.predictions), 100 * (found["accuracy"] - scores[0]["accuracy"])
        table.add_row(
            runner.name,
            str(seen),
            f"{found['accuracy']:.1%}",
            "" if runner is runners[0] else f"[{'green' if gain > 0 else 'red'}]{gain:+.1f}[/]",
            f"{100 * found['calibration_error']:.1f}",
            f"{100 * found['calibrated_error']:.1f}",
            f"{1000 * runner.seconds / max(1, seen):.2f}",
        )
    return table
