"""Session: the one loop. Command line, service, benchmark and sweep all call it."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from testtime import registry
from testtime.machine.interrupts import deferred_interrupts
from testtime.ops import unit_views
from testtime.session import saved
from testtime.session.initial_state import initial_state
from testtime.steppers import Stepper, aligned_task, open_stepper
from testtime.types import (
    Encoder,
    InputError,
    Method,
    Prediction,
    StateError,
    StoredImage,
    Task,
    Variations,
    ViewPlan,
    check_finite,
)

if TYPE_CHECKING:
    from PIL.Image import Image

    from testtime.encoding.stream import Encoded

    Source: TypeAlias = Image | str | StoredImage | Tensor

S = TypeVar("S", bound="Source")


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """One image that a session has met, and what it answered; what it learned is in the state by now."""

    index: int  # the image's place in the input
    source: Source  # as it was given
    views: Tensor | None  # (V, D) unit rows
    prediction: Prediction | None  # which says whether the image was learned from
    error: InputError | None  # why there is neither views nor a prediction


Observer: TypeAlias = Callable[[Seen], object]


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

    Each of `observers` is called with what was `Seen` of every image of `step` and `run`: after it is answered, or when
    it cannot be used. That moves `position` where `run` passes the image over, and not where the error is raised.
    Observers are called in the image's turn with interrupts held back, so they meet the state whole, and should be
    quick. What one raises comes out once all have been called, and leaves the session as it is after that image.
    `predict` and `scan` tell nobody: the one leaves no trace, the other has no answer for each image. Observers are not
    saved, and stay behind when a session is copied.

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
        observers: Iterable[Observer] = (),
        **settings: object,
    ) -> None:
        if isinstance(method, str):
            method = registry.make_method(method, preset, settings)
        elif settings or preset:
            raise InputError("Settings and presets go with a method's name; a ready-made method has its own.")
        if encoder is not None and encoder.dim != task.dim:
            raise InputError(f"Encoder {encoder.name} gives {encoder.dim} features, the task has {task.dim}.")
        method.check(task)
        self.task = aligned_task(task)
        self.method = method
        self.encoder = encoder
        self.plan = ViewPlan(views, augmix, seed, variations)
        self.reference = reference
        self.observers = list(observers)
        self._turn = threading.RLock()
        self._unusable = ""  # why the state is not to be used
        self.reset()

    def __repr__(self) -> str:
        return f"Session({self.method!r}, {self.task.classes} classes, {self.count} images seen)"

    def reset(self) -> None:
        """Forget the stream: back to before the first image."""
        with self._turn:
            self.state = initial_state(self.method, self.task)
            self._infinite = saved.infinite_parts(self._state)
            self.count = self.position = 0

    @property
    def state(self) -> Any:
        """What has been learned so far, as the method's own `step` takes and returns it."""
        with self._turn:
            return self._state if self._stepper is None else self._stepper.snapshot()[0]

    @state.setter
    def state(self, state: Any) -> None:
        with self._turn:
            self._state, self._unusable = state, ""
            self._stepper: Stepper | None = None  # opened when the next image comes

    def fork(self) -> Session:
        """A second session that starts from here and learns on its own."""
        return copy.copy(self)

    def __getstate__(self) -> dict[str, object]:
        with self._turn:
            return {**vars(self), "_state": self.state, "_stepper": None, "_turn": None, "observers": []}

    def __setstate__(self, members: dict[str, object]) -> None:
        vars(self).update(members, _turn=threading.RLock())  # a copy has turns of its own

    def step(self, image: Source) -> Prediction:
        """Predict one image, then learn from it. A refused image leaves everything as it was."""
        with self._turn:
            ((_, prediction),) = self.run([image])
        return prediction

    def predict(self, image: Source) -> Prediction:
        """Predict one image from what has been learned so far, learning nothing."""
        (entry,) = self._encoded([image])
        views = entry.usable()
        with self._turn:
            with torch.inference_mode():
                logits = self._steps().peek(views)
            return Prediction.of(self.task, self.method, logits[0], views[0], False, self.position)

    def warm_up(self, views: int | None = None) -> float:
        """Do now what is done once, for images of so many views: loading, compiling, capturing; the seconds it took."""
        start = time.perf_counter()
        with self._turn, torch.inference_mode():
            self._steps().warm_up(views or self.plan.total)
        return time.perf_counter() - start

    def scan(self, stream: Tensor) -> Tensor:
        """Logits (N, C) of a chunk of features (N, V, D), learning along the way; all or nothing."""
        with self._turn, deferred_interrupts():  # a stepper works in place
            views = unit_views(stream, self.task.text, self.position)
            with torch.inference_mode():
                logits = self._steps().scan(views)[0]
            with self._marking_unusable():
                check_finite(self.method, logits, self.position)
            self.count += len(stream)
            self.position += len(stream)
        return logits.clone()  # out of inference mode: an ordinary tensor

    def run(
        self, images: Iterable[S], *, on_error: Callable[[S, InputError], None] | None = None
    ) -> Generator[tuple[S, Prediction], None, None]:
        """Each image with its prediction, in order; images are read and encoded ahead of the adaptation.

        A bad image goes to `on_error` and is left out; without it, the error is raised when its turn comes. Either way
        it has its place in the input: the views of those that follow do not depend on whether it could be read.

        An interrupt that comes while an image is answered is raised when the next is asked for, or the run is closed,
        and so is what an observer raises: there is an answer for every image that is counted. An interrupt that comes
        in the caller's turn is the caller's.
        """
        for entry in self._encoded(images):
            if entry.error is not None:
                with self._turn, deferred_interrupts():
                    if on_error is not None:
                        self.position = entry.index + 1
                    self._tell(entry, None)
                if on_error is None:
                    raise entry.error
                on_error(entry.source, entry.error)
                continue
            views, prediction, late = entry.usable(), None, None
            try:
                with self._turn, deferred_interrupts():
                    prediction = self._advance(views)
                    self._tell(entry, prediction)
            except BaseException as error:
                if prediction is None:
                    raise
                late = error
            try:
                yield entry.source, prediction
            finally:
                if late is not None:
                    raise late

    def save(self, path: str | Path, extra: dict[str, str] | None = None) -> Path:
        """Write everything needed to go on bit for bit, atomically. `extra` metadata is kept as it is.

        A state that cannot be gone on from is refused, and the file left as it was.
        """
        with self._turn:
            self._check_usable(f" It was not written to {path}.")
            return saved.write(path, self, self._infinite, extra or {})

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
        file = saved.Saved(path, device)
        task, plan = file.fit(task, encoder, variations), file.plan
        session = cls(
            task, file.method, encoder=encoder, views=plan.count, augmix=plan.augmix, seed=plan.seed,
            variations=variations, reference=reference,
        )  # fmt: skip
        session.state = file.state(session.state)
        session.count, session.position = file.count, file.position
        return session

    def _encoded(self, images: Iterable[Source]) -> Iterator[Encoded]:
        from testtime.encoding.stream import stream  # Pillow is loaded only where there are images

        return stream(self.encoder, images, self.plan, indices=count(self.position), like=self.task.text)

    def _advance(self, views: Tensor) -> Prediction:
        """Predict and learn from unit views (V, D)."""
        with torch.inference_mode():
            logits, learned = self._steps().step(views)
        with self._marking_unusable():
            prediction = Prediction.of(self.task, self.method, logits[0], views[0], learned, self.position)
        self.count += 1
        self.position += 1
        return prediction

    def _tell(self, entry: Encoded, prediction: Prediction | None) -> None:
        """Call every observer; what they raise comes out once all have been called."""
        if self.observers:
            seen = Seen(entry.index, entry.source, entry.features, prediction, entry.error)
            with ExitStack() as calls:  # which it makes on leaving, last first
                for observer in reversed(self.observers):
                    calls.callback(observer, seen)

    def _steps(self) -> Stepper:
        self._check_usable()
        if self._stepper is None:
            self._stepper = open_stepper(self.task, [self.method], [self._state], reference=self.reference)
        return self._stepper

    @contextmanager
    def _marking_unusable(self) -> Iterator[None]:
        """Remember that an answer was refused as not finite, since the state has moved on with it."""
        try:
            yield
        except InputError as error:
            self._unusable = str(error)
            raise

    def _check_usable(self, then: str = "") -> None:
        if self._unusable:
            raise StateError(f"{self._unusable}{then}")
