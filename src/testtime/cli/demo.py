"""The demo: adaptation watched on real photographs, from features that come with the package."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from pathlib import Path

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from torch import Tensor

from testtime import __version__, registry
from testtime.encoding.store import Features
from testtime.files import write_atomic
from testtime.report import Answers, Curve, StreamReport, html, running_accuracy_svg
from testtime.session.order import shuffled
from testtime.session.session import Session
from testtime.types import Task

METHODS = ("zeroshot", "tda", "dpe")
CHUNK = 25  # images between two updates of the table
SEED = 1  # of the stream's order; the released code's seed


@dataclass
class Runner:
    """One method on its way through the stream."""

    session: Session
    correct: list[bool] = field(default_factory=list)
    predictions: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def advance(self, chunk: Tensor, labels: Tensor) -> None:
        """Predict and learn from a chunk of images."""
        start = time.perf_counter()
        logits = self.session.scan(chunk)
        predictions = logits.argmax(1)
        self.seconds += time.perf_counter() - start
        confidences = self.session.method.probabilities(logits).gather(1, predictions[:, None])[:, 0]
        self.correct += (predictions == labels).tolist()
        self.predictions += predictions.tolist()
        self.confidences += confidences.tolist()

    @property
    def accuracy(self) -> float:
        return sum(self.correct) / max(1, len(self.correct))


def demo_stream() -> tuple[Task, Tensor, Tensor]:
    """The packaged features: task, views (N, 1, D) and labels (N,), in an order shuffled once."""
    with as_file(files("testtime") / "data" / "caltech101.safetensors") as path:
        store = Features(path)
        task, views, labels = store.task(), store.read(0, len(store)), store.labels
    if labels is None:
        raise RuntimeError("The packaged features have lost their labels.")
    order = shuffled(len(views), SEED)
    return task, views[order], labels[order]


def largest(task: Task, views: Tensor, labels: Tensor, count: int) -> tuple[Task, Tensor, Tensor]:
    """The part of a stream that shows its `count` most frequent classes; ties go to the lower index."""
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
        sections.append(_section(title, part, runners))
        results[title] = {r.session.method.name: {"accuracy": r.accuracy, "seconds": r.seconds} for r in runners} | {
            "n": len(part[1])
        }
    facts = {
        "Images": "Caltech101, test split (2,465 photographs, 100 classes, CC BY 4.0), one view each",
        "Encoder": f"{task.encoder}: EfficientNet-Lite2 and MiniLM; it is not CLIP",
        "Order": f"shuffled, seed {SEED}",
        "Settings": "each method's defaults, the same for both streams; labels only score",
        "Versions": f"testtime {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "Machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "Command": "testtime demo",
    }
    path = write_atomic(folder / "report.html", html(sections, facts, "testtime demo"))
    picture = running_accuracy_svg(sections[0].curves, standalone=True, title=sections[0].subtitle)
    write_atomic(folder / "accuracy.svg", picture)
    if as_json:
        print(json.dumps({"results": results, "report": str(path), "seconds": time.perf_counter() - started}))
    console.print(f"Report with the curves: [bold]{path}[/]", highlight=False)


def _watch(title: str, task: Task, views: Tensor, labels: Tensor, *, console: Console) -> list[Runner]:
    """Run every method over the stream side by side, the table keeping up."""
    runners = [Runner(Session(task, name)) for name in METHODS]
    heading = f"{title}: {len(views)} photographs"
    with Live(console=console, refresh_per_second=10, auto_refresh=False) as live:
        if console.is_terminal:
            live.update(_table(heading, runners), refresh=True)
        for runner in runners:  # what is loaded and compiled once is no image's cost
            runner.session.warm_up(views.shape[1])
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
    base = runners[0]
    for runner in runners:
        seen = len(runner.correct)
        gain = 100 * (runner.accuracy - base.accuracy)
        table.add_row(
            runner.session.method.name,
            str(seen),
            f"{100 * runner.accuracy:.1f}%",
            "" if runner is base else f"[{'green' if gain > 0 else 'red'}]{gain:+.1f}[/]",
            f"{1000 * runner.seconds / max(1, seen):.2f}",
        )
    return table


def _section(title: str, part: tuple[Task, Tensor, Tensor], runners: Sequence[Runner]) -> StreamReport:
    task, views, labels = part
    curves = [
        Curve(
            name=runner.session.method.name,
            correct=runner.correct,
            seconds=runner.seconds,
            note="defaults" if registry.settings_of(runner.session.method) else "nothing to set",
        )
        for runner in runners
    ]
    answers = [
        Answers(
            runner.session.method.name,
            runner.predictions,
            runner.confidences,
            runner.seconds,
            registry.settings_of(runner.session.method),
        )
        for runner in runners
    ]
    return StreamReport(
        title=title,
        subtitle=f"{len(views)} photographs, {task.classes} classes, one view each",
        curves=curves,
        classnames=task.classnames,
        labels=labels.tolist(),
        facts={},
        answers=answers,
    )
