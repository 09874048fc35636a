"""Session: the one loop. Command line, service, benchmark and sweep all call it."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from testtime import registry
from testtime.calibration import Calibration
from testtime.display import in_notebook, line
from testtime.guard.course import Course
from testtime.guard.memory import Memory, fresh_memory
from testtime.guard.settings import Guard, make_guard
from testtime.guard.stepper import Guarded
from testtime.machine.interrupts import deferred_interrupts
from testtime.methods.base import need_single
from testtime.ops import unit_views
from testtime.session import saved_state
from testtime.session.initial_state import initial_state
from testtime.session.summaries import Summaries
from testtime.steppers import Stepper, aligned, aligned_task, open_stepper
from testtime.types import (
    Decision,
    Encoder,
    InputError,
    Method,
    Prediction,
    StateError,
    Task,
    Variations,
    ViewPlan,
    check_finite,
)

if TYPE_CHECKING:
    from testtime.encoding.stream import Encoded, Source

S = TypeVar("S", bound="Source")


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """One image that a session has seen, and its answer; the state already includes what was learned."""

    index: int  # the image's position in the input
    source: Source  # as it was given
    views: Tensor | None = field(repr=False)  # (V, D) unit rows
    prediction: Prediction | None  # which says whether the image was learned from
    error: InputError | None  # why there are no views and no prediction


Observer: TypeAlias = Callable[[Seen], object]


class Session:
    """A task, a method and what it has learned so far.

    `step` predicts, then adapts; `predict` only predicts. Both take an image (a path, a Pillow image or pixels
    (H, W, 3) uint8, with an encoder) or features: (D,) for one view, (V, D) for several, row 0 the image itself.
    Pixels and features may be tensors or NumPy arrays. `variations` of an image
    (`testtime.images.diffusion`) follow its views, as many as there are crops. The fastest stepper that supports the
    method does the work (`testtime.steppers`), unless `reference` asks for the method's own steps.

    `count` is the number of images answered. `position` is the index of the next image in the input, which also counts
    those that could not be read; an image's views are seeded by it.

    Threads may share a session: calls are serialised, and each sees a consistent state. An answer that is not finite
    raises an InputError and is not counted; if the image was learned from, the session then refuses to run or save
    until it is reset.

    Each of `observers` is called with a `Seen` for every image of `step` and `run`: after it is answered, or when it
    cannot be used. Such an image moves `position` if `run` skips it, but not if the error is raised. Observers are
    called under the session's lock with interrupts deferred, so they see a consistent state, and should be quick. If
    one raises, the error is raised after all have been called, and the session stays as it is after that image.
    `predict` and `scan` notify no observers: the first leaves no trace, the second has no answer for each image.
    Observers are not saved, and not copied with a session.

    `guard` protects the answers from harmful adaptation (`testtime.guard`): `True`, or a `Guard` with settings. Its
    memory is part of the session and saved with it; `decisions` holds what it decided on the images of the last call.

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
        guard: Guard | bool | None = None,
        observers: Iterable[Observer] = (),
        **settings: object,
    ) -> None:
        if isinstance(method, str):
            method = registry.make_method(method, preset, settings)
        elif settings or preset:
            raise InputError("Settings and presets need a method's name; a ready-made method has its own.")
        if encoder is not None and encoder.dim != task.dim:
            raise InputError(f"Encoder {encoder.name} has feature size {encoder.dim}, the task has {task.dim}.")
        method.check(task)
        self.task = aligned_task(task)
        self.guard = make_guard(guard)
        self.method = self.guard.anchored(method) if self.guard else method
        if self.guard:
            need_single([method], "The guard")
        self.encoder = encoder
        self.plan = ViewPlan(views, augmix, seed, variations)
        self.reference = reference
        self.observers = list(observers)
        self._lock = threading.RLock()
        self._unusable = ""  # why the state must not be used
        self._stepper: Stepper | None = None  # opened at the next image
        self._guard_memory: Memory | None = None
        self._summaries = Summaries(self.task, self.method, self.guard is not None)
        self.reset()

    def __repr__(self) -> str:
        encoder = line(self.task.encoder, 30) or "features"
        images = f"{self.count:,} image{'' if self.count == 1 else 's'} seen"
        return f"Session({line(self.method.name, 30)}, {self.task.classes} classes, {encoder}, {images})"

    def _repr_html_(self) -> str:
        from testtime.session.display import session_html

        return session_html(self)

    def reset(self) -> None:
        """Forget the stream: back to before the first image."""
        with self._lock:
            state = initial_state(self.method, self.task)
            memory = fresh_memory(self.guard, self.task, state) if self.guard else None
            self._infinite = saved_state.infinite_parts(state) | saved_state.infinite_parts(memory, "guard")
            if self._stepper is None:
                self._state, self._guard_memory = state, memory
            else:  # which stays loaded, compiled and captured
                self._stepper.restore([state])
                if isinstance(self._stepper, Guarded) and memory is not None:
                    self._stepper.memory = memory
            self._unusable, self.calibration = "", Calibration()
            self.count = self.position = 0

    @property
    def state(self) -> Any:
        """What has been learned so far, as the method's own `step` takes and returns it."""
        with self._lock:
            return self._state if self._stepper is None else self._stepper.snapshot()[0]

    @state.setter
    def state(self, state: Any) -> None:
        with self._lock:
            self._guard_memory = self.guard_memory
            self._state, self._unusable = state, ""
            self._stepper = None

    @property
    def guard_memory(self) -> Memory | None:
        """What the guard remembers of the stream; None without a guard."""
        with self._lock:
            return self._stepper.memory if isinstance(self._stepper, Guarded) else self._guard_memory

    @guard_memory.setter
    def guard_memory(self, memory: Memory | None) -> None:
        with self._lock:
            self.state = self.state
            self._guard_memory = memory

    @property
    def decisions(self) -> list[Decision]:
        """The guard's decisions on the images of the last call; none without a guard."""
        return self._stepper.decisions if isinstance(self._stepper, Guarded) else []

    @property
    def proven(self) -> str:
        """What late labels have proven: "adapting helps", "adapting harms", or nothing."""
        proven = self._course.proven
        return proven and f"adapting {proven}"

    @property
    def labels_used(self) -> int:
        """How many late labels have counted."""
        return int(self._course.labels)

    @property
    def _course(self) -> Course:
        """The guard's running numbers; not to be changed."""
        with self._lock:
            if isinstance(self._stepper, Guarded):
                return self._stepper.course
            return Course() if self._guard_memory is None else Course.of(self._guard_memory.course)

    def label(self, index: int, label: int) -> bool:
        """Give the guard the late label of an image, by its position in the input; whether it was of use.

        Only images on which the method and the frozen classifier differ are of use. Once the labels have proven that
        adapting helps or harms, they decide which answers are given (`guard.course`).
        """
        with self._lock:
            if self.guard is None:
                raise InputError("Late labels are for the guard, and this session has none: use Session(guard=True).")
            if not 0 <= label < self.task.classes:
                raise InputError(f"Label {label}: must be the index of one of {self.task.classes} classes.")
            with torch.inference_mode():
                return isinstance(stepper := self._steps(), Guarded) and stepper.label(index, label)

    def fork(self) -> Session:
        """A second session that starts from here and learns on its own."""
        return copy.copy(self)

    def adopt(self, other: Session) -> None:
        """Go on from where another session of this task and method is; encoder, views and observers stay."""
        with self._lock:
            own = {name: vars(self)[name] for name in ("task", "encoder", "plan", "reference", "observers", "_lock")}
            vars(self).update(other.__getstate__() | own)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block in which no other thread changes the session."""
        with self._lock:
            yield

    def __getstate__(self) -> dict[str, object]:
        with self._lock:
            own = {"_state": self.state, "_guard_memory": self.guard_memory, "_stepper": None, "_lock": None}
            copies = {"calibration": self.calibration.copy(), "_summaries": self._summaries.copy()}
            return {**vars(self), **own, **copies, "observers": []}

    def __setstate__(self, members: dict[str, object]) -> None:
        vars(self).update(members, _lock=threading.RLock())  # a copy has its own lock

    def step(self, image: Source) -> Prediction:
        """Predict one image, then learn from it. A refused image leaves everything as it was."""
        with self._lock:
            ((_, prediction),) = self._run([image], None)
        return prediction

    def replay(self, views: Tensor, index: int) -> Prediction:
        """Step on views (V, D) of the encoding stream, as image `index` of the input; no observer is called.

        They are used as they are: normalised once more, they would differ in their last bits.
        """
        return self.replay_all(views[None], index)[0]

    def replay_all(self, images: Tensor, index: int) -> list[Prediction]:
        """The same for several images (N, V, D) of consecutive indices; all or nothing, and read from a GPU at once."""
        with self._lock, deferred_interrupts():
            self.position = index
            return self._advance(images.to(self.task.text))

    def peek(self, views: Tensor) -> Prediction:
        """Predict from views (V, D) of the encoding stream, used as they are, learning nothing."""
        with self._lock:
            views = aligned(views.to(self.task.text))
            with torch.inference_mode():
                logits = self._steps().peek(views)
            return self._predictions(logits, views[:1], torch.zeros(1, dtype=torch.bool), self.calibration.copy())[0]

    def predict(self, image: Source) -> Prediction:
        """Predict one image from what has been learned so far, learning nothing."""
        (entry,) = self._encoded([image])
        return self.peek(entry.usable())

    def warm_up(self, views: int | None = None) -> float:
        """Seconds of the warm-up, run now for images of so many views: loading, compiling, graph capture."""
        start = time.perf_counter()
        with self._lock, torch.inference_mode():
            self._steps().warm_up(views or self.plan.total)
            self._summaries.warm_up()
        return time.perf_counter() - start

    def scan(self, stream: Tensor) -> Tensor:
        """Logits (N, C) of a chunk of features (N, V, D), learning along the way; all or nothing.

        It gives no confidences, and leaves the calibration as it is.
        """
        with self._lock, deferred_interrupts():  # a stepper works in place
            views = unit_views(stream, self.task.text, self.position)
            with torch.inference_mode():
                logits = self._steps().scan(views)[0]
            with self._marking_unusable():
                check_finite(self.method, logits, self.position)
            self.count += len(stream)
            self.position += len(stream)
        return logits.clone()  # out of inference mode: an ordinary tensor

    def run(
        self,
        images: Iterable[S],
        *,
        on_error: Callable[[S, InputError], None] | None = None,
        progress: bool | None = None,
    ) -> Generator[tuple[S, Prediction], None, None]:
        """Each image with its prediction, in order; images are read and encoded ahead of the adaptation.

        A bad image is passed to `on_error` and skipped; without it, the error is raised when the run reaches the image.
        Either way it keeps its position in the input: later images have the same views whether or not it can be read.

        An interrupt while an image is being answered is raised when the next one is requested or the run is closed, and
        so is an observer's error: every image that is counted has an answer. An interrupt in the caller's own code is
        raised there.

        `progress` draws a bar, in a notebook or on standard error; by default, only in a notebook.
        """
        answers = self._run(images, on_error)
        return self._watched(answers, images) if (in_notebook() if progress is None else progress) else answers

    def _watched(
        self, answers: Generator[tuple[S, Prediction], None, None], images: Iterable[S]
    ) -> Generator[tuple[S, Prediction], None, None]:
        """The answers of a run, with a progress bar."""
        from testtime.session.display import bar

        start = self.position
        with bar(len(images) if isinstance(images, Sized) else None) as advance, closing(answers):
            for answer in answers:
                advance(self.position - start)
                yield answer
            advance(self.position - start)  # the last images may have been skipped

    def _run(
        self, images: Iterable[S], on_error: Callable[[S, InputError], None] | None
    ) -> Generator[tuple[S, Prediction], None, None]:
        for entry in self._encoded(images):
            if entry.error is not None:
                with self._lock, deferred_interrupts():
                    if on_error is not None:
                        self.position = entry.index + 1
                    self._notify(entry, None)
                if on_error is None:
                    raise entry.error
                on_error(entry.source, entry.error)
                continue
            views, prediction, deferred = entry.usable(), None, None
            try:
                with self._lock, deferred_interrupts():
                    (prediction,) = self._advance(views[None])
                    self._notify(entry, prediction)
            except BaseException as error:
                if prediction is None:
                    raise
                deferred = error
            try:
                yield entry.source, prediction
            finally:
                if deferred is not None:
                    raise deferred

    def save(self, path: str | Path, extra: dict[str, str] | None = None) -> Path:
        """Write everything needed to resume bit for bit, atomically. `extra` metadata is stored as given.

        A state that cannot be resumed is refused, and the file left as it was.
        """
        with self._lock:
            self._check_usable(f" It was not written to {path}.")
            return saved_state.write(path, self, self._infinite, extra or {})

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
        """A saved session. If a `task`, an encoder or variations are given, they must be those it was made with."""
        file = saved_state.Saved(path, device)
        task, plan = file.fit(task, encoder, variations), file.plan
        session = cls(
            task, file.method, encoder=encoder, views=plan.count, augmix=plan.augmix, seed=plan.seed,
            variations=plan.variations if encoder is None and variations is None else variations, reference=reference,
            guard=file.guard,
        )  # fmt: skip
        session.guard_memory = file.state(session.guard_memory, "guard")
        session.state = file.state(session.state)
        session.calibration = file.calibration
        session.count, session.position = file.count, file.position
        return session

    def _encoded(self, images: Iterable[Source]) -> Iterator[Encoded]:
        from testtime.encoding.stream import stream  # Pillow is loaded only where there are images

        return stream(self.encoder, images, self.plan, indices=count(self.position), like=self.task.text)

    def _advance(self, images: Tensor) -> list[Prediction]:
        """Predict and learn from the unit views (N, V, D) of one image after another."""
        with torch.inference_mode():
            logits, learned = self._steps().steps(images)
        with self._marking_unusable():
            predictions = self._predictions(logits[0], images[:, 0], learned[0], self.calibration)
        self.count += len(images)
        self.position += len(images)
        return predictions

    def _predictions(
        self, logits: Tensor, features: Tensor, learned: Tensor, calibration: Calibration
    ) -> list[Prediction]:
        """The answers to images from this position in the input on, from the method's logits (N, A)."""
        with torch.inference_mode():
            numbers, shares = self._summaries(logits, features, learned)
        decisions = self.decisions if self.guard else [None] * len(logits)
        shares = shares.clone()  # out of inference mode: ordinary tensors
        return Prediction.of(self.task, self.method, numbers, shares, self.position, calibration, decisions)

    def _notify(self, entry: Encoded, prediction: Prediction | None) -> None:
        """Call every observer; errors are raised after all have been called."""
        if self.observers:
            seen = Seen(entry.index, entry.source, entry.features, prediction, entry.error)
            with ExitStack() as calls:  # it makes them on exit, last first
                for observer in reversed(self.observers):
                    calls.callback(observer, seen)

    def _steps(self) -> Stepper:
        self._check_usable()
        if self._stepper is None:
            stepper = open_stepper(self.task, [self.method], [self._state], reference=self.reference)
            if self.guard is not None and self._guard_memory is not None:
                stepper = Guarded(self.task, self.method, self.guard, stepper, self._guard_memory)
            self._stepper = stepper
        if isinstance(self._stepper, Guarded):
            self._stepper.index = self.position
        return self._stepper

    @contextmanager
    def _marking_unusable(self) -> Iterator[None]:
        """Remember that an answer was refused as not finite, since the state has already changed."""
        try:
            yield
        except InputError as error:
            self._unusable = str(error)
            raise

    def _check_usable(self, then: str = "") -> None:
        if self._unusable:
            raise StateError(f"{self._unusable}{then}")
