"""Session: the one loop. Command line, service, benchmark and sweep all call it."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from testtime import files, registry
from testtime.features import unit_views
from testtime.interrupts import held_back
from testtime.steppers import Stepper, laid, laid_task, open_stepper
from testtime.types import Encoder, InputError, Method, Prediction, StateError, StoredImage, Task, ViewPlan

if TYPE_CHECKING:
    from PIL.Image import Image

    from testtime.diffusion import Variations
    from testtime.encoding.stream import Encoded

FORMAT = "testtime.session"
VERSION = "1"

# how each entry of a saved session's metadata is read
READERS: dict[str, Callable[[str], Any]] = {
    "method": str,
    "settings": lambda text: dict(json.loads(text)),
    "classnames": lambda text: tuple(json.loads(text)),
    "encoder": str,
    "scale": float,
    "views": int,
    "augmix": lambda text: bool(json.loads(text)),
    "seed": int,
    "count": int,
    "position": int,
}


class Session:
    """A task, a method and what it has learned so far.

    `step` predicts, then adapts; `predict` only predicts. Both take an image (a Pillow image or a path, with an
    encoder) or features: (D,) for one view, (V, D) for several, row 0 the image itself. `variations` of an image
    (`testtime.diffusion`) follow its views, as many as there are crops. The fastest stepper that understands the method
    does the work (`testtime.steppers`), unless `reference` asks for the method's own steps.

    `count` images have been answered. `position` is the index of the next one in the input, which counts those that
    could not be read too; an image's views are drawn by it.

    >>> import testtime as tt
    >>> task, stream, labels = tt.toy()
    >>> session = Session(task, "dpe", alpha=4)
    >>> prediction = session.step(stream[0])
    >>> prediction.label, prediction.learned, session.count
    ('class 2', True, 1)
    """

    def __init__(
        self,
        task: Task,
        method: str | Method = "dpe",
        *,
        encoder: Encoder | None = None,
        views: int = 1,
        augmix: bool = False,
        seed: int = 0,
        variations: Variations | None = None,
        preset: str | None = None,
        reference: bool = False,
        **settings: object,
    ) -> None:
        if isinstance(method, str):
            method = registry.make_method(method, preset, settings)
        elif settings or preset:
            raise InputError("Settings and presets go with a method's name; a ready-made method has its own.")
        if encoder is not None and encoder.dim != task.dim:
            raise InputError(f"Encoder {encoder.name} gives {encoder.dim} features, the task has {task.dim}.")
        method.check(task)
        self.task = laid_task(task)
        self.method = method
        self.encoder = encoder
        self.plan = ViewPlan(views, augmix, seed, variations)
        self.reference = reference
        self.reset()

    def __repr__(self) -> str:
        return f"Session({self.method!r}, {self.task.classes} classes, {self.count} images seen)"

    def reset(self) -> None:
        """Forget the stream: back to before the first image."""
        with torch.inference_mode(False):
            self.state = self.method.init(self.task)
        self.count = self.position = 0

    @property
    def state(self) -> Any:
        """What has been learned so far, as the method's own `step` takes and returns it."""
        return self._state if self._stepper is None else self._stepper.snapshot()[0]

    @state.setter
    def state(self, state: Any) -> None:
        self._state = state
        self._stepper: Stepper | None = None  # opened when the next image comes

    def fork(self) -> Session:
        """A second session that starts from here and learns on its own."""
        twin = copy.copy(self)
        twin.state = self.state
        return twin

    def step(self, image: Image | str | StoredImage | Tensor) -> Prediction:
        """Predict one image, then learn from it. A refused image leaves everything as it was."""
        return self._advance(self._features(image))

    def predict(self, image: Image | str | StoredImage | Tensor) -> Prediction:
        """Predict one image from what has been learned so far, learning nothing."""
        views = self._features(image)
        with torch.inference_mode():
            logits = self._steps().peek(views)
        return self._prediction(logits, torch.zeros(1, dtype=torch.bool), views)

    def warm_up(self, views: int | None = None) -> float:
        """Do now what is done once, for images of so many views: loading, compiling, capturing; the seconds it took."""
        start = time.perf_counter()
        with torch.inference_mode():
            self._steps().warm_up(views or self.plan.total)
        return time.perf_counter() - start

    def scan(self, stream: Tensor) -> Tensor:
        """Logits (N, C) of a chunk of features (N, V, D), learning along the way; all or nothing."""
        views = unit_views(stream, self.task.text, self.position)
        with torch.inference_mode(), held_back():  # a stepper works in place
            logits = self._steps().scan(views)[0]
            self.count += len(stream)
            self.position += len(stream)
        return logits.clone()  # out of inference mode: an ordinary tensor

    def run(
        self, images: Iterable[Any], *, on_error: Callable[[Any, InputError], None] | None = None
    ) -> Iterator[tuple[Any, Prediction]]:
        """Each image with its prediction, in order; images are read and encoded ahead of the adaptation.

        A bad image goes to `on_error` and is left out; without it, the error is raised when its turn comes. Either way
        it has its place in the input: the views of those that follow do not depend on whether it could be read.
        """
        for entry in self._encoded(images):
            if entry.error is not None and on_error is not None:
                self.position = entry.index + 1
                on_error(entry.source, entry.error)
                continue
            views = entry.usable()
            with held_back():  # whoever asked has the answer in hand before an interrupt is raised
                yield entry.source, self._advance(views)

    def save(self, path: str | Path, extra: dict[str, str] | None = None) -> Path:
        """Write everything needed to go on bit for bit, atomically. `extra` metadata is kept as it is."""
        facts = {
            "format": FORMAT,
            "version": VERSION,
            "method": self.method.name,
            "settings": json.dumps(registry.settings_of(self.method)),
            "classnames": json.dumps(self.task.classnames),
            "encoder": self.task.encoder,
            "scale": repr(self.task.scale),
            "views": str(self.plan.count),
            "augmix": json.dumps(self.plan.augmix),
            "seed": str(self.plan.seed),
            "count": str(self.count),
            "position": str(self.position),
        } | self.plan.facts()
        tensors = {"task.text": self.task.text} | dict(_named("state", self.state))
        return files.write_tensors(path, tensors, (extra or {}) | facts)

    @classmethod
    def load(
        cls,
        path: str | Path,
        task: Task | None = None,
        *,
        encoder: Encoder | None = None,
        variations: Variations | None = None,
        device: torch.device | str = "cpu",
        reference: bool = False,
    ) -> Session:
        """A saved session. With a `task`, an encoder or variations, they must be those that it was made with."""
        file = files.open_tensors(path, StateError)
        facts = _facts(file, path)
        if "task.text" not in file.keys():
            raise StateError(f"{path} lacks 'task.text'; it is damaged.")
        text = laid(file.get_tensor("task.text").to(device))
        saved = Task(text, facts["classnames"], facts["scale"], facts["encoder"])
        method = registry.make_method(facts["method"], None, facts["settings"])
        if encoder is not None and encoder.name != saved.encoder:
            raise StateError(f"{path} was made with encoder '{saved.encoder}', not '{encoder.name}'.")
        if task is not None:
            _same_task(path, saved, task)
            saved = replace(saved, context=task.context)
        looks = {key: facts[key] for key in ("views", "augmix", "seed")}
        session = cls(saved, method, encoder=encoder, variations=variations, reference=reference, **looks)
        before, now = ((what or {}).get("variations") for what in (file.metadata(), session.plan.facts()))
        if encoder is not None and before != now:
            raise StateError(f"{path} was made with variations {before}, not {now}; give the same.")
        session.state = _filled("state", session.state, file, path, device)
        session.count, session.position = facts["count"], facts["position"]
        return session

    def _steps(self) -> Stepper:
        if self._stepper is None:
            self._stepper = open_stepper(self.task, [self.method], [self._state], reference=self.reference)
        return self._stepper

    def _advance(self, views: Tensor) -> Prediction:
        """Predict and learn from unit views (V, D)."""
        with torch.inference_mode(), held_back():
            logits, learned = self._steps().step(views)
            self.count += 1
            self.position += 1
        return self._prediction(logits, learned, views)

    def _prediction(self, logits: Tensor, learned: Tensor, views: Tensor) -> Prediction:
        """The answer of logits (1, C): fetched from the device at once, with all that goes with them."""
        with torch.inference_mode():
            parts = torch.cat([logits[0], self.task.zero_shot(views[0]), learned.to(logits)])
        answer, frozen, learns = parts.cpu().split([logits.shape[1], self.task.classes, 1])
        return Prediction.of(self.task, self.method, answer.clone(), frozen, bool(learns))

    def _features(self, image: Any) -> Tensor:
        """Unit views (V, D) of the next image."""
        (entry,) = self._encoded([image])
        return entry.usable()

    def _encoded(self, images: Iterable[Any]) -> Iterator[Encoded]:
        from testtime.encoding.stream import stream  # Pillow is loaded only where there are images

        return stream(self.encoder, images, self.plan, indices=count(self.position), like=self.task.text)


def _named(prefix: str, state: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state under dotted names."""
    if isinstance(state, Tensor):
        yield prefix, state
        return
    for field, part in state._asdict().items():
        yield from _named(f"{prefix}.{field}", part)


def _filled(prefix: str, fresh: Any, file: Any, path: Any, device: torch.device | str) -> Any:
    """A state of the shape of `fresh` with the tensors of a file."""
    if not isinstance(fresh, Tensor):
        parts = fresh._asdict().items()
        return type(fresh)(*(_filled(f"{prefix}.{field}", part, file, path, device) for field, part in parts))
    if prefix not in file.keys():
        raise StateError(f"{path} lacks '{prefix}'; it was written by another version, or is damaged.")
    stored = laid(file.get_tensor(prefix).to(device))
    if stored.shape != fresh.shape or stored.dtype != fresh.dtype:
        raise StateError(
            f"{path}: '{prefix}' is {stored.dtype} {tuple(stored.shape)}, "
            f"where this task needs {fresh.dtype} {tuple(fresh.shape)}."
        )
    return stored


def _facts(file: Any, path: Any) -> dict[str, Any]:
    """The metadata of a saved session, read; what is missing or damaged is named."""
    stored: dict[str, str] = dict(file.metadata() or {})
    if stored.get("format") != FORMAT:
        raise StateError(f"{path} is not a saved session (no '{FORMAT}' in its metadata).")
    if stored.get("version") != VERSION:
        raise StateError(
            f"{path} has format version {stored.get('version')}, this program reads {VERSION}. "
            "Use the version of testtime that wrote it, or start the session anew."
        )
    stored.setdefault("position", stored.get("count", ""))  # files of before there was one have no gaps
    facts = {}
    for key, read in READERS.items():
        try:
            facts[key] = read(stored[key])
        except (ValueError, TypeError, KeyError):
            raise StateError(f"{path} is damaged: its metadata '{key}' is {stored.get(key)!r}.") from None
    return facts


def _same_task(path: Any, saved: Task, given: Task) -> None:
    """Refuse a task other than the one in the file, saying what differs first."""
    if saved.classnames != given.classnames:
        pairs = zip(saved.classnames, given.classnames, strict=False)
        first = next((f"'{a}' there, '{b}' here" for a, b in pairs if a != b), "one list is longer")
        raise StateError(
            f"{path} holds {saved.classes} classes, this task has {given.classes}, and they differ ({first}). "
            "Give the same class list in the same order, or start without the file."
        )
    if saved.dim != given.dim:
        raise StateError(f"{path} has features of {saved.dim} dimensions, this task of {given.dim}.")
    if saved.encoder != given.encoder:
        raise StateError(f"{path} was made with encoder '{saved.encoder}', this task with '{given.encoder}'.")
    if saved.scale != given.scale or not torch.allclose(saved.text.cpu(), given.text.to(saved.text).cpu(), atol=1e-4):
        raise StateError(f"{path} was made with other text prototypes or another logit scale: same prompts needed.")
