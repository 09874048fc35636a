"""Logs of a run where people look: TensorBoard, Weights & Biases, JSON lines. Each is an observer of a session."""

from __future__ import annotations

import json
import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any, Protocol

import torch

from testtime import __version__, files, registry
from testtime.machine.capture import reason, warn_once
from testtime.session.session import Seen, Session
from testtime.types import InputError, MissingPart

WINDOW = 200  # images of the recent means
POINTS = 500  # the most points of a run whose number of images is known, besides the last
UNSIZED = 20  # images between two points where it is not
FORMS = "tensorboard:FOLDER, jsonl:FILE (or FILE.jsonl), wandb, wandb:PROJECT, wandb-offline or wandb-offline:PROJECT"
PACKAGES = {
    "jsonl": "",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "wandb-offline": "wandb",
}  # needed by each kind

Point = dict[str, float]


def check_logs(specs: Iterable[str] | None) -> dict[str, Path]:
    """The files and folders that logs write to, by option; missing packages and bad places are refused."""
    places: dict[str, Path] = {}
    for spec in specs or ():
        kind, target = _parse(spec)
        _package(kind)
        if kind in ("jsonl", "tensorboard"):
            option, path = f"--log {spec}", Path(os.path.expanduser(target))
            if option in places:
                raise InputError(f"{option} is given twice; leave out one.")
            places[option] = path
            if kind == "tensorboard":
                files.check_folder(path)
            elif not files.is_stream(path):
                files.check_place(path)
    return places


def open_log(
    spec: str,
    session: Session,
    labels: Sequence[int | None] | None = None,
    *,
    every: int | None = None,
    on_failure: Callable[[str], None] = warn_once,
) -> Log:
    """A log of the session's next images: `tensorboard:FOLDER`, `jsonl:FILE`, `wandb:PROJECT`, `wandb-offline:PROJECT`.

    `labels` are those of the next images, None where unknown. A point is written `every` so many images (by default
    at most 500 for as many images as there are labels, or every 20), and for the last one. A session that has already
    seen images continues an existing log; otherwise it is replaced. A log that fails is reported to `on_failure` in one
    line and left out; the session goes on.

    >>> import tempfile
    >>> import testtime as tt
    >>> task, stream, labels = tt.toy()
    >>> session = tt.Session(task, "dpe")
    >>> file = Path(tempfile.mkdtemp()) / "log.jsonl"
    >>> with open_log(f"jsonl:{file}", session, labels.tolist(), every=80):
    ...     answers = [session.step(views) for views in stream]
    >>> for line in file.read_text().splitlines()[1:]:
    ...     point = json.loads(line)
    ...     print(point["step"], point["all/accuracy"], point["all/zero_shot_accuracy"])
    80 0.8 0.75
    160 0.78125 0.725
    """
    kind, target = _parse(spec)
    if every is not None and every < 1:
        raise InputError(f"every={every}: a point needs at least one image.")
    if every is None:
        every = UNSIZED if labels is None else max(1, -(-len(labels) // POINTS))
    package, about = _package(kind), _about(session)
    log = Log(session, labels or (), every, lambda line: on_failure(f"The log {spec} {line}"))
    if kind == "jsonl":
        log._writer = _JsonLines(Path(os.path.expanduser(target)), about, session.position)
    elif kind == "tensorboard":
        log._writer = _TensorBoard(Path(os.path.expanduser(target)), about, session.position)
    else:
        try:
            log._writer = _WandB(package, target or "testtime", about, kind == "wandb-offline")
        except getattr(package, "UsageError", ()) as error:  # no key: nothing has been done yet, so it can be set right
            raise InputError(f"The log {spec} cannot start ({reason(error)}); or use wandb-offline.") from None
        except Exception as error:
            log._fail("could not be opened", error)
    return log


class Log:
    """A log as a context manager: in the block, it observes the session; at its end, it is written out and closed.

    Every point holds means over all images since the log was opened (`all/...`) and over the last 200
    (`last_200/...`): accuracy and zero-shot accuracy of images whose label is known, the shares of images learned from
    and of answers changed from zero-shot, the confidence of both, entropy in nats, and milliseconds between two
    answers, with reading and encoding. A point's step is its image's number in the input, from 1 on; a resumed session
    continues the numbers.
    """

    def __init__(
        self, session: Session, labels: Sequence[int | None], every: int, on_failure: Callable[[str], None]
    ) -> None:
        self.session, self.every = session, every
        self._labels, self._start, self._on_failure = labels, session.position, on_failure
        self._writer: _Writer | None = None
        self._failed = False
        self._sums: dict[str, tuple[int, float]] = {}  # number and sum of all values
        self._recent: dict[str, deque[float]] = {}
        self._skipped, self._step, self._written = 0, session.position, session.position
        self._last: float | None = None  # when the last image was seen

    def __enter__(self) -> Log:
        self.session.observers.append(self)
        return self

    def __exit__(self, problem: object, *_: object) -> None:
        self.session.observers.remove(self)
        if self._step > self._written:
            self._write()
        if self._writer is None:
            return
        try:
            self._writer.close(problem is not None)
        except Exception as error:
            self._fail("could not be closed", error)

    def __call__(self, seen: Seen) -> None:
        """Count one image, and write a point if it is due."""
        if seen.index >= self.session.position:
            return  # this image ends the run, and is run again when resumed
        now = time.perf_counter()
        if (answer := seen.prediction) is None:
            self._skipped += 1
        else:
            number = seen.index - self._start
            label = self._labels[number] if number < len(self._labels) else None
            self._add("learned", answer.learned)
            self._add("changed", answer.index != answer.zero_shot_index)
            self._add("confidence", answer.confidence)
            self._add("zero_shot_confidence", answer.zero_shot_confidence)
            self._add("entropy", answer.entropy)
            if label is not None:
                self._add("accuracy", answer.index == label)
                self._add("zero_shot_accuracy", answer.zero_shot_index == label)
            if self._last is not None:  # the first one includes warm-up
                self._add("milliseconds", 1000 * (now - self._last))
        self._last, self._step = now, seen.index + 1
        if self._step % self.every == 0:
            self._write()

    def point(self) -> Point:
        """The values now."""
        means = {f"all/{name}": total / count for name, (count, total) in self._sums.items()}
        recent = {f"last_{WINDOW}/{name}": fmean(values) for name, values in self._recent.items()}
        return {name: round(value, 6) for name, value in (means | recent).items()} | {"all/skipped": self._skipped}

    def _add(self, name: str, value: float) -> None:
        count, total = self._sums.get(name, (0, 0.0))
        self._sums[name] = count + 1, total + value
        self._recent.setdefault(name, deque(maxlen=WINDOW)).append(value)

    def _write(self) -> None:
        self._written = self._step
        if self._writer is None or self._failed:
            return
        try:
            self._writer.write(self._step, self.point())
        except Exception as error:  # whatever a log's package raises must not lose the run
            self._fail("cannot be written", error)

    def _fail(self, what: str, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            self._on_failure(f"{what} ({reason(error)}); the run goes on without it.")


def _parse(spec: str) -> tuple[str, str]:
    """The kind of a log, and where it goes."""
    kind, _, target = spec.partition(":")
    if kind not in PACKAGES and Path(spec).suffix in (".jsonl", ".ndjson"):
        kind, target = "jsonl", spec
    if kind not in PACKAGES:
        raise InputError(f"Unknown log '{spec}'. Write {FORMS}.")
    if not target and kind in ("jsonl", "tensorboard"):
        what = "file, as in jsonl:log.jsonl" if kind == "jsonl" else "folder, as in tensorboard:runs/1"
        raise InputError(f"The log '{spec}' names no {what}.")
    return kind, target


def _package(kind: str) -> Any:
    """The package that writes logs of a kind; None if it needs none."""
    if not (name := PACKAGES[kind]):
        return None
    try:
        found: ModuleType | None = import_module(name)
    except ImportError:
        found = None
    if getattr(found, "__file__", None) is None:  # a folder of that name here, such as wandb makes, imports too
        raise MissingPart(
            f"Logs of the kind '{kind}' need the package {name}. Install it with: pip install 'testtime[{name}]'"
        )
    return found


def _about(session: Session) -> dict[str, Any]:
    """What is logged once."""
    task, plan = session.task, session.plan
    return {
        "method": session.method.name,
        "settings": registry.settings_of(session.method),
        "encoder": task.encoder,
        "classes": task.classes,
        "classnames": list(task.classnames),
        "views": plan.count,
        "augmix": plan.augmix,
        "seed": plan.seed,
        "device": str(task.text.device),
        "seen": session.position,  # images of the input before this log
        "versions": {"testtime": __version__, "torch": torch.__version__, "python": platform.python_version()},
    } | plan.metadata()


class _Writer(Protocol):
    """Where points go; anything that it raises is reported once."""

    def write(self, step: int, values: Point) -> None: ...

    def close(self, failed: bool) -> None: ...


class _JsonLines:
    """A line of JSON about the run, then one for each point."""

    def __init__(self, path: Path, about: dict[str, Any], position: int) -> None:
        with ExitStack() as stack:
            if not files.is_stream(path):
                stack.enter_context(files.locked(path))
            try:
                if position and path.is_file():
                    os.truncate(path, _covered(path, position))
                self._file = stack.enter_context(open(path, "ab" if position else "wb"))
                self._line({"about": about})
            except OSError as error:
                raise InputError(f"Cannot write {path}: {error.strerror or error}.") from None
            self._stack = stack.pop_all()

    def write(self, step: int, values: Point) -> None:
        self._line({"step": step} | values)

    def close(self, failed: bool) -> None:
        self._stack.close()

    def _line(self, values: dict[str, Any]) -> None:
        self._file.write(json.dumps(values).encode() + b"\n")
        self._file.flush()


def _covered(path: Path, position: int) -> int:
    """The bytes of an earlier log's whole lines up to a position; images after it are run again."""
    size = 0
    for line in files.read_bytes(path).splitlines(keepends=True):
        entry = files.parse_json(line, path, kind=dict) if line.endswith(b"\n") else {"step": position + 1}
        step = entry.get("step", 0)
        if not isinstance(step, int) or step > position:
            break
        size += len(line)
    return size


class _TensorBoard:
    """TensorBoard's event file, written at once: its own writer's thread would print a traceback if a disk is full."""

    def __init__(self, folder: Path, about: dict[str, Any], position: int) -> None:
        self._events = import_module("tensorboard.compat.proto.event_pb2")
        self._summaries = import_module("torch.utils.tensorboard.summary")
        name = f"events.out.tfevents.{int(time.time()):010d}.{platform.node()}.{os.getpid()}.{time.monotonic_ns()}"
        try:
            files.make_folder(folder)
            self._file = open(folder / name, "xb")
        except OSError as error:
            raise InputError(f"Cannot write {folder}: {error.strerror or error}.") from None
        self._records = import_module("tensorboard.summary.writer.record_writer").RecordWriter(self._file)
        self._event(0, file_version="brain.Event:2")
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._event(position + 1, session_log=start)  # of an earlier run, points from this step on are not shown
        self._event(position, summary=self._summaries.text("about", _fenced(about)))
        self._file.flush()

    def write(self, step: int, values: Point) -> None:
        for name, value in values.items():
            self._event(step, summary=self._summaries.scalar(name, value))
        self._file.flush()

    def close(self, failed: bool) -> None:
        self._file.close()

    def _event(self, step: int, **content: Any) -> None:
        event = self._events.Event(wall_time=time.time(), step=step, **content)
        self._records.write(event.SerializeToString())


def _fenced(about: dict[str, Any]) -> str:
    """Plain data as a block of code in Markdown."""
    return "```\n" + json.dumps(about, indent=1, ensure_ascii=False) + "\n```"


class _WandB:
    """A run of Weights & Biases. `offline` writes it to a folder, for `wandb sync`; so does WANDB_MODE=offline."""

    def __init__(self, package: Any, project: str, about: dict[str, Any], offline: bool) -> None:
        settings = package.Settings(console="off", quiet=True)  # rows on standard output stay as they are
        self._run = package.init(
            project=project,
            config=about,
            mode="offline" if offline else None,
            settings=settings,
            reinit="create_new",  # beside a run of the caller's own
        )

    def write(self, step: int, values: Point) -> None:
        self._run.log(values, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
