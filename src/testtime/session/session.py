"""Session: the one loop. Command line, service, benchmark and sweep all call it."""

from __future__ import annotations

import copy
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from testtime import files, registry
from testtime.machine.interrupts import held_back
from testtime.methods.base import leaves
from testtime.ops import unit_views
from testtime.steppers import Stepper, laid, laid_task, open_stepper
from testtime.types import (
    MOST_VIEWS,
    Encoder,
    FeatureError,
    InputError,
    Method,
    Prediction,
    SettingError,
    StateError,
    StoredImage,
    Task,
    Variations,
    ViewPlan,
)

if TYPE_CHECKING:
    from PIL.Image import Image

    from testtime.encoding.stream import Encoded

FORMAT = "testtime.session"
VERSION = "1"

COUNTS = 2**53  # what is counted is less; up to there a float is exact too


def _json(kind: type) -> Callable[[str], Any]:
    return lambda text: files.parse_json(text, "it", StateError, kind)


def _whole(least: int, end: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not least <= (number := int(text)) < end:
            raise ValueError
        return number

    return read


def _names(text: str) -> tuple[str, ...]:
    names = _json(list)(text)
    if not all(isinstance(name, str) for name in names):
        raise ValueError
    return tuple(names)


# how each entry of a saved session's metadata is read
READERS: dict[str, Callable[[str], Any]] = {
    "method": str,
    "settings": _json(dict),
    "classnames": _names,
    "encoder": str,
    "scale": float,
    "views": _whole(1, MOST_VIEWS + 1),
    "augmix": _json(bool),
    "seed": _whole(0, 2**64),
    "count": _whole(0, COUNTS),
    "position": _whole(0, COUNTS),
}


class Session:
    """A task, a method and what it has learned so far.

    `step` predicts, then adapts; `predict` only predicts. Both take an image (a Pillow image or a path, with an
    encoder) or features: (D,) for one view, (V, D) for several, row 0 the image itself. `variations` of an image
    (`testtime.images.diffusion`) follow its views, as many as there are crops. The fastest stepper that understands the
    method does the work (`testtime.steppers`), unless `reference` asks for the method's own steps.

    `count` images have been answered. `position` is the index of the next one in the input, which counts those that
    could not be read too; an image's views are drawn by it.

    Threads may share a session: calls take turns, and each meets the state whole. An answer that is not finite is an
    InputError, and is not counted; where the image was learned from, the session then does and saves nothing more,
    until it is reset.

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
        self._turn = threading.RLock()
        self._spoilt = ""  # why the state is not to be used
        self.reset()

    def __repr__(self) -> str:
        return f"Session({self.method!r}, {self.task.classes} classes, {self.count} images seen)"

    def reset(self) -> None:
        """Forget the stream: back to before the first image."""
        with self._turn:
            self.state = _begin(self.method, self.task)
            self._infinite = {name: bool(part.isinf().any()) for name, part in _named("state", self._state)}
            self.count = self.position = 0

    @property
    def state(self) -> Any:
        """What has been learned so far, as the method's own `step` takes and returns it."""
        with self._turn:
            return self._state if self._stepper is None else self._stepper.snapshot()[0]

    @state.setter
    def state(self, state: Any) -> None:
        with self._turn:
            self._state, self._spoilt = state, ""
            self._stepper: Stepper | None = None  # opened when the next image comes

    def fork(self) -> Session:
        """A second session that starts from here and learns on its own."""
        return copy.copy(self)

    def __getstate__(self) -> dict[str, Any]:
        with self._turn:
            return {**vars(self), "_state": self.state, "_stepper": None, "_turn": None}

    def __setstate__(self, members: dict[str, Any]) -> None:
        vars(self).update(members, _turn=threading.RLock())  # a copy has turns of its own

    def step(self, image: Image | str | StoredImage | Tensor) -> Prediction:
        """Predict one image, then learn from it. A refused image leaves everything as it was."""
        with self._turn:
            return self._advance(self._features(image))

    def predict(self, image: Image | str | StoredImage | Tensor) -> Prediction:
        """Predict one image from what has been learned so far, learning nothing."""
        views = self._features(image)
        with self._turn:
            with torch.inference_mode():
                logits = self._steps().peek(views)
            return self._prediction(logits, torch.zeros(1, dtype=torch.bool), views)

    def warm_up(self, views: int | None = None) -> float:
        """Do now what is done once, for images of so many views: loading, compiling, capturing; the seconds it took."""
        start = time.perf_counter()
        with self._turn, torch.inference_mode():
            self._steps().warm_up(views or self.plan.total)
        return time.perf_counter() - start

    def scan(self, stream: Tensor) -> Tensor:
        """Logits (N, C) of a chunk of features (N, V, D), learning along the way; all or nothing."""
        with self._turn, held_back():  # a stepper works in place
            views = unit_views(stream, self.task.text, self.position)
            with torch.inference_mode(), self._spoiling():
                logits = self._steps().scan(views)[0]
                self._check_answers(logits)
            self.count += len(stream)
            self.position += len(stream)
        return logits.clone()  # out of inference mode: an ordinary tensor

    def run(
        self, images: Iterable[Any], *, on_error: Callable[[Any, InputError], None] | None = None
    ) -> Iterator[tuple[Any, Prediction]]:
        """Each image with its prediction, in order; images are read and encoded ahead of the adaptation.

        A bad image goes to `on_error` and is left out; without it, the error is raised when its turn comes. Either way
        it has its place in the input: the views of those that follow do not depend on whether it could be read.

        An interrupt that comes while an image is answered is raised when the next is asked for, or the run is closed:
        there is an answer for every image that is counted. One that comes in the caller's turn is the caller's.
        """
        for entry in self._encoded(images):
            if entry.error is not None and on_error is not None:
                self.position = entry.index + 1
                on_error(entry.source, entry.error)
                continue
            views, prediction, interrupt = entry.usable(), None, None
            try:
                with held_back():
                    prediction = self._advance(views)
            except BaseException as error:
                if prediction is None:
                    raise
                interrupt = error
            try:
                yield entry.source, prediction
            finally:
                if interrupt is not None:
                    raise interrupt

    def save(self, path: str | Path, extra: dict[str, str] | None = None) -> Path:
        """Write everything needed to go on bit for bit, atomically. `extra` metadata is kept as it is.

        A state that cannot be gone on from is refused, and the file left as it was.
        """
        with self._turn:
            return self._save(path, extra or {})

    def _save(self, path: str | Path, extra: dict[str, str]) -> Path:
        self._check_sound(f" It was not written to {path}.")
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
        state = dict(_named("state", self.state))
        for name, tensor in state.items():
            if wrong := _wrong(tensor, self._infinite[name]):
                raise StateError(f"'{name}' {wrong}, so the state cannot be used; it was not written to {path}.")
        return files.write_tensors(path, {"task.text": self.task.text} | state, extra | facts)

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
        try:
            saved = Task(text, facts["classnames"], facts["scale"], facts["encoder"])
            method = registry.make_method(facts["method"], None, facts["settings"])
        except (FeatureError, SettingError, OverflowError) as error:
            raise StateError(f"{path} is damaged: {error}") from None
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
        for name, tensor in _named("state", session.state):
            if wrong := _wrong(tensor, session._infinite[name]):
                raise StateError(f"{path} is damaged: '{name}' {wrong}. Go on from another state, or start anew.")
        session.count, session.position = facts["count"], facts["position"]
        return session

    def _steps(self) -> Stepper:
        self._check_sound()
        if self._stepper is None:
            self._stepper = open_stepper(self.task, [self.method], [self._state], reference=self.reference)
        return self._stepper

    def _advance(self, views: Tensor) -> Prediction:
        """Predict and learn from unit views (V, D)."""
        with self._turn, held_back():
            with self._spoiling():
                with torch.inference_mode():
                    logits, learned = self._steps().step(views)
                prediction = self._prediction(logits, learned, views)
            self.count += 1
            self.position += 1
        return prediction

    def _prediction(self, logits: Tensor, learned: Tensor, views: Tensor) -> Prediction:
        """The answer of logits (1, C): fetched from the device at once, with all that goes with them."""
        with torch.inference_mode():
            parts = torch.cat([logits[0], self.task.zero_shot(views[0]), learned.to(logits)]).cpu()
        self._check_answers(parts[None])
        answer, frozen, learns = parts.split([logits.shape[1], self.task.classes, 1])
        prediction = Prediction.of(self.task, self.method, answer.clone(), frozen, bool(learns))
        if not math.isfinite(prediction.confidence):  # probabilities may overflow where logits do not
            raise self._endless(0)
        return prediction

    def _check_answers(self, logits: Tensor) -> None:
        """Refuse logits (N, C) that are not finite."""
        if not torch.isfinite(logits).all():
            raise self._endless(int((~torch.isfinite(logits)).any(1).nonzero()[0]))

    def _endless(self, row: int) -> _NotFinite:
        return _NotFinite(
            f"Method '{self.method.name}' gives NaN or infinity for image {self.position + row}. Give it settings and "
            "a logit scale of ordinary size, and start anew or from a state saved before."
        )

    @contextmanager
    def _spoiling(self) -> Iterator[None]:
        """Remember that an answer was not finite, since the state has moved on with it."""
        try:
            yield
        except _NotFinite as error:
            self._spoilt = str(error)
            raise

    def _check_sound(self, then: str = "") -> None:
        if self._spoilt:
            raise StateError(f"{self._spoilt}{then}")

    def _features(self, image: Any) -> Tensor:
        """Unit views (V, D) of the next image."""
        (entry,) = self._encoded([image])
        return entry.usable()

    def _encoded(self, images: Iterable[Any]) -> Iterator[Encoded]:
        from testtime.encoding.stream import stream  # Pillow is loaded only where there are images

        return stream(self.encoder, images, self.plan, indices=count(self.position), like=self.task.text)


class _NotFinite(InputError):
    """An answer holds NaN or infinity."""


def _begin(method: Method, task: Task) -> Any:
    """The state before the first image; one that would fill the memory is refused before it is made."""
    shapes = copy.copy(task)
    object.__setattr__(shapes, "text", task.text.to("meta"))
    with torch.inference_mode(False):
        try:
            size = sum(leaf.nbytes for leaf in leaves(method.init(shapes)))
        except (NotImplementedError, RuntimeError):
            size = 0  # a method that looks at its numbers shows when it is made
        if size > (most := _memory(task.text.device)):
            raise SettingError(
                f"Method '{method.name}' would keep {size / 1e9:,.0f} GB for {task.classes:,} classes, and there are "
                f"{most / 1e9:,.0f}; give it smaller queues, caches or memories."
            )
        return method.init(task)


def _memory(device: torch.device) -> int:
    """Bytes that a device has in all."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _wrong(tensor: Tensor, infinite: bool) -> str:
    """What no method leaves in a tensor of its state; infinity is right only where the state begins with some."""
    if not tensor.is_floating_point():
        return "" if ((tensor >= 0) & (tensor < COUNTS)).all() else "holds what is no count"
    if tensor.isfinite().all():
        return ""
    if tensor.isnan().any():
        return "holds NaN"
    return "" if infinite and not tensor.isneginf().any() else "holds infinity"


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
        except (ValueError, TypeError, KeyError, StateError):
            raise StateError(f"{path} is damaged: its metadata '{key}' is {_short(stored.get(key))}.") from None
    return facts


def _short(text: str | None) -> str:
    return repr(text if text is None or len(text) <= 60 else text[:60] + "...")


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
