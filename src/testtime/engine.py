"""Session: the one loop. Command line, service, benchmark and sweep all call it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from testtime import fast, files, registry
from testtime.fast import Runner
from testtime.features import unit_views
from testtime.interrupts import held_back
from testtime.types import (
    Encoder,
    FeatureError,
    ImageError,
    InputError,
    Method,
    Prediction,
    StateError,
    StoredImage,
    Task,
)

if TYPE_CHECKING:
    from PIL.Image import Image

    from testtime.diffusion import Variations

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
}


class Session:
    """A task, a method and what it has learned so far.

    `step` predicts, then adapts; `predict` only predicts. Both take an image (a Pillow image or a path, with an
    encoder) or features: (D,) for one view, (V, D) for several, row 0 the image itself. `variations` of an image
    (`testtime.diffusion`) follow its views, as many as there are crops. Where the method has a fast twin
    (`testtime.fast`) that does the work, unless `reference` asks for the method's own steps.

    >>> import testtime as tt
    >>> task, stream, labels = tt.toy()
    >>> session = Session(task, "dpe", alpha=4)
    >>> prediction = session.step(stream[0])
    >>> prediction.label, prediction.learned, session.count
    ('class 2', True, 1)
    """

    _encoder: Any  # the encoder compiled and captured, once it is needed

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
        if views < 1:
            raise InputError(f"views={views}: at least the image itself is needed, so 1 or more.")
        if encoder is not None and encoder.dim != task.dim:
            raise InputError(f"Encoder {encoder.name} gives {encoder.dim} features, the task has {task.dim}.")
        method.check(task)
        self.task = task
        self.method = method
        self.encoder = encoder
        self.views = views
        self.augmix = augmix
        self.seed = seed
        self.reference = reference
        self._encoder = None
        self.variations = variations
        self.reset()

    def __repr__(self) -> str:
        return f"Session({self.method!r}, {self.task.classes} classes, {self.count} images seen)"

    def reset(self) -> None:
        """Forget the stream: back to before the first image."""
        with torch.inference_mode(False):
            self.state = self.method.init(self.task)
        self.count = 0

    @property
    def state(self) -> Any:
        """What has been learned so far, as the method's own `step` takes and returns it."""
        return self._state if self._runner is None else self._runner.states()[0]

    @state.setter
    def state(self, state: Any) -> None:
        self._state = state
        self._runner: Runner | None = None  # made from the state when the next image comes

    def fork(self) -> Session:
        """A second session that starts from here and learns on its own."""
        twin = copy.copy(self)
        twin.state = self.state  # of its own; steps are pure, so it can be shared until either moves on
        return twin

    def step(self, image: Image | str | StoredImage | Tensor) -> Prediction:
        """Predict one image, then learn from it. A refused image leaves everything as it was."""
        return self._advance(self._features([image])[0])

    def predict(self, image: Image | str | StoredImage | Tensor) -> Prediction:
        """Predict one image from what has been learned so far, learning nothing."""
        return self.fork().step(image)

    def scan(self, stream: Tensor) -> Tensor:
        """Logits (N, C) of a chunk of features (N, V, D), learning along the way; all or nothing."""
        views = unit_views(stream, self.task.text, self.count)
        with torch.inference_mode():
            if (runner := self._fast()) is not None:
                with held_back():  # it works in place
                    logits = runner.scan(views)[0]
                    self.count += len(stream)
            else:
                logits, self.state = self._captured(views) or self.method.scan(self.task, self._state, views)
                self.count += len(stream)
        return logits.clone()  # out of inference mode: an ordinary tensor

    def run(
        self,
        images: Iterable[Any],
        *,
        batch: int = 16,
        on_error: Callable[[Any, InputError], None] | None = None,
    ) -> Iterator[tuple[Any, Prediction]]:
        """Each image with its prediction, in order. Views are encoded `batch` images at a time.

        A bad image goes to `on_error` and is left out; without it, the error is raised when its turn comes.
        """
        if batch < 1:
            raise InputError(f"batch={batch}: at least one image at a time.")
        source = iter(images)
        if self._overlaps():
            head = list(islice(source, 1))
            source = chain(head, source)
            if not any(isinstance(image, Tensor) for image in head):  # features need no encoder
                yield from self._run_ahead(source, on_error)
        while group := list(islice(source, batch)):
            good, failure = self._readable(group, on_error)
            if good:
                features = self._features([image for _, image in good])
                for (original, _), views in zip(good, features, strict=True):
                    with held_back():  # whoever asked has the answer in hand before an interrupt is raised
                        yield original, self._advance(views)
            if failure:
                raise failure

    def _overlaps(self) -> bool:
        """Whether images can be read and encoded on a GPU while earlier ones are adapted to."""
        device = getattr(self.encoder, "device", None)
        made_there = device is not None and device.type == "cuda" and hasattr(self.encoder, "model")
        return made_there and self.variations is None and not self.reference

    def _run_ahead(
        self, images: Iterator[Any], on_error: Callable[[Any, InputError], None] | None
    ) -> Iterator[tuple[Any, Prediction]]:
        """`run` with decoding, views and encoding ahead of the adaptation."""
        from testtime.fast import pipeline
        from testtime.fast.encoder import FastEncoder

        if self._encoder is None:
            self._encoder = FastEncoder(self.encoder)
        kind = {"views": self.views, "seed": self.seed, "augmix": self.augmix}
        for entry in pipeline.stream(self._encoder, images, **kind, first=self.count, gaps=False):  # type: ignore
            if entry.features is None:
                problem = entry.error or ImageError(f"{entry.source}: not encoded.")
                if on_error is None:
                    raise problem
                on_error(entry.source, problem)
                continue
            views = unit_views(entry.features[None].to(self.task.text), self.task.text, self.count)[0]
            with held_back():
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
            "views": str(self.views),
            "augmix": json.dumps(self.augmix),
            "seed": str(self.seed),
            "count": str(self.count),
        } | _varied(self.variations)
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
    ) -> Session:
        """A saved session. With a `task`, an encoder or variations, they must be those that it was made with."""
        file = files.open_tensors(path, StateError)
        facts = _facts(file, path)
        if "task.text" not in file.keys():
            raise StateError(f"{path} lacks 'task.text'; it is damaged.")
        text = file.get_tensor("task.text").to(device)
        saved = Task(text, facts["classnames"], facts["scale"], facts["encoder"])
        method = registry.make_method(facts["method"], None, facts["settings"])
        if encoder is not None and encoder.name != saved.encoder:
            raise StateError(f"{path} was made with encoder '{saved.encoder}', not '{encoder.name}'.")
        if task is not None:
            _same_task(path, saved, task)
            saved = replace(saved, context=task.context)
        before, now = ((what or {}).get("variations") for what in (file.metadata(), _varied(variations)))
        if encoder is not None and before != now:
            raise StateError(f"{path} was made with variations {before}, not {now}; give the same.")
        looks = {key: facts[key] for key in ("views", "augmix", "seed")}
        session = cls(saved, method, encoder=encoder, variations=variations, **looks)
        session.state = _filled("state", session.state, file, path, device)
        session.count = facts["count"]
        return session

    def _advance(self, views: Tensor) -> Prediction:
        """Predict and learn from unit views (V, D)."""
        with torch.inference_mode(), held_back():
            if (runner := self._fast()) is not None:
                (logits,), (learned,) = runner.step(views)
            else:
                if (captured := self._captured(views[None])) is not None:
                    (logits,), state = captured
                else:
                    logits, state = self.method.step(self.task, self._state, views)
                learned = self.method.learned(self._state, state)
                self.state = state
            self.count += 1
        logits = logits.clone()  # out of inference mode: an ordinary tensor
        frozen = self.task.zero_shot(views[0])
        probabilities, zero_shot = self.method.probabilities(logits), frozen.softmax(-1)
        index, zero_index = int(logits.argmax()), int(frozen.argmax())
        log_p = probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()
        return Prediction(
            label=self.task.classnames[index],
            confidence=float(probabilities[index]),
            entropy=float(-(probabilities * log_p).sum().clamp_max(0)) or 0.0,
            zero_shot=self.task.classnames[zero_index],
            zero_shot_confidence=float(zero_shot[zero_index]),
            learned=learned,
            index=index,
            zero_shot_index=zero_index,
            logits=logits,
        )

    def _fast(self) -> Runner | None:
        """The method's fast twin at this session's state, if it has one."""
        if self._runner is None and not self.reference:
            self._runner = fast.runner(self.task, [self.method], [self._state])
        return self._runner

    def _captured(self, stream: Tensor) -> tuple[Tensor, Any] | None:
        """Logits (n, C) and the next state for n images (n, V, D) in one launch; None where there is no GPU."""
        if self.reference or not self.task.text.is_cuda:
            return None
        from testtime.fast import graph

        return graph.scan(self.method, self.task, self._state, stream, compile=self.count >= graph.PATIENCE)

    def _features(self, images: list[Any]) -> list[Tensor]:
        """Unit views (V, D) of each image; the first has stream index `self.count`."""
        if all(isinstance(image, Tensor) for image in images):
            features = [image[None] if image.ndim == 1 else image for image in images]
        else:
            features = list(self._encode(images))
        return [
            unit_views(views[None], self.task.text, self.count + offset)[0] for offset, views in enumerate(features)
        ]

    def _encode(self, images: list[Any]) -> Tensor:
        """Features (n, V, D) of images."""
        if self.encoder is None:
            raise InputError("This session has no encoder; give features, or make it with Session(..., encoder=).")
        from testtime.encode import encode_views  # Pillow is loaded only where there are images

        opened = [_opened(image) for image in images]
        indices = range(self.count, self.count + len(images))
        looks: dict[str, Any] = dict(views=self.views, seed=self.seed, augmix=self.augmix)
        return encode_views(self.encoder, opened, indices, variations=self.variations, **looks)

    def _readable(
        self, group: list[Any], on_error: Callable[[Any, InputError], None] | None
    ) -> tuple[list[tuple[Any, Any]], InputError | None]:
        """The images of a group that can be used, each with its source, and the error to stop at, if any."""
        good: list[tuple[Any, Any]] = []
        for source in group:
            try:
                image = _opened(source)
                if isinstance(image, Tensor):
                    self._features([image])  # refuses what cannot be learned from
                good.append((source, image))
            except (ImageError, FeatureError) as error:
                if on_error is None:
                    return good, error
                on_error(source, error)
        return good, None


def _varied(variations: Variations | None) -> dict[str, str]:
    """What a saved session says of variations: nothing, where there are none."""
    return {} if variations is None else {"variations": getattr(variations, "name", "own")}


def _opened(image: Any) -> Any:
    """An image as it is, or read from where it is stored."""
    if isinstance(image, str | StoredImage):
        from testtime.images import read_image

        return read_image(image)
    return image


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
    stored = file.get_tensor(prefix).to(device)
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
