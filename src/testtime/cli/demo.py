"""The demo: adaptation live on real photographs, from features that come with the package."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from torch import Tensor

from testtime import __version__
from testtime.encoding.store import Features
from testtime.files import write_atomic
from testtime.metrics import ExpectedCalibrationError
from testtime.report.gather import Runner, scored
from testtime.report.page import html
from testtime.report.running_accuracy import running_accuracy_svg
from testtime.session.order import shuffled
from testtime.session.session import Session
from testtime.types import Task

METHODS = ("zeroshot", "tda", "dpe")
CHUNK = 25  # images between two updates of the table
SEED = 1  # of the stream's order; the released code's seed


def demo_stream() -> tuple[Task, Tensor, Tensor]:
    """The packaged features: task, views (N, 1, D) and labels (N,), in an order shuffled once."""
    with as_file(files("testtime") / "data" / "caltech101.safetensors") as path:
        store = Features(path)
        task, views, labels = store.task(), store.read(0, len(store)), store.labels
    if labels is None:
        raise RuntimeError("The packaged features have no labels.")
    order = shuffled(len(views), SEED)
    return task, views[order], labels[order]


def largest(task: Task, views: Tensor, labels: Tensor, count: int) -> tuple[Task, Tensor, Tensor]:
    """The part of a stream with its `count` most frequent classes; ties go to the lower index."""
    frequency = labels.bincount(minlength=task.classes)
    classes = frequency.argsort(descending=True, stable=True)[:count].sort().values
    names = tuple(task.classnames[c] for c in classes.tolist())
    inside = torch.isin(labels, classes)
    return (
        Task(task.text[classes], names, task.scale, task.encoder),
        views[inside],
        torch.searchsorted(classes, labels[inside]),
    )


def run_demo(folder: Path, console: Console, as_json: bool = False) -> None:
    """Run both streams with a live table, and write `report.html` and `accuracy.svg` into the folder."""
    task, views, labels = demo_stream()
    parts = {
        "The twenty most frequent classes": largest(task, views, labels, 20),
        "All hundred classes": (task, views, labels),
    }
    torch.set_num_threads(1)  # steps this small gain nothing from a second thread, and lose much on a busy machine
    started = time.perf_counter()
    sections, results = [], {}
    for title, part in parts.items():
        runners = _watch(title, *part, console=console)
        heading = title, f"{len(part[1])} photographs, {part[0].classes} classes, one view each"
        sections.append(scored(part[0], heading, runners, part[2].tolist(), [], None))
        results[title] = {runner.name: _scores(runner, part[2]) for runner in runners} | {"n": len(part[1])}
    about = {
        "Images": "Caltech101, test split (2,465 photographs, 100 classes, CC BY 4.0), one view each",
        "Encoder": f"{task.encoder}: EfficientNet-Lite2 and MiniLM; it is not CLIP",
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


def _watch(title: str, task: Task, views: Tensor, labels: Tensor, *, console: Console) -> list[Runner]:
    """Run every method over the stream side by side, with a live table."""
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
    console.print()
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
