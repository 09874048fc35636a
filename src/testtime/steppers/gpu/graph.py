"""Steps captured in CUDA graphs: many steps of a method in one launch.

A step is a few dozen small kernels, which a GPU finishes faster than Python can launch them. Here several steps in a
row are captured, and a stream is replayed through the graph: inputs, state and logits stay at fixed addresses, and
nothing is read back. What is captured is a body: the method's own step, or custom kernels (in `steppers.gpu.dpe`).
On the CPU, for tests, the same steps run in a plain loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from testtime.machine.capture import capture, reason, warn_once
from testtime.methods.base import Nested, advance, copied, leaves
from testtime.steppers import dummy_views
from testtime.steppers.plain import Plain
from testtime.types import FeatureError, Method, Task

PRIORITY = -1  # a caller waits for the answer, while the encoder only reads ahead
STEPS = 32  # per graph, at most: launching it costs about as much as one kernel


class Body(Protocol):
    """What a graph captures: S runs whose states have fixed addresses."""

    answer: Tensor  # (S, A), shaped like the logits of a step: A is C, unless a method returns something else
    learned: Tensor  # (S,), nonzero if the last step learned

    @property
    def states(self) -> tuple[Nested, ...]:
        """The state of each run."""

    def step(self, views: Tensor, logits: Tensor) -> None:
        """Fill the logits (S, A) of one image's views (V, D), and advance the states."""

    def refresh(self) -> None:
        """Recompute what is derived from the states, after they were overwritten."""


class Stepper:
    """Runs whose steps are captured; see `steppers.Stepper`.

    `graphs` defaults to whether the task is on a GPU. Steps that cannot be captured run one by one, with one warning.
    """

    def __init__(
        self, task: Task, methods: Sequence[Method], states: Sequence[Nested], *, graphs: bool | None = None
    ) -> None:
        self.name, self.methods = methods[0].name, methods
        self._graphs = task.text.is_cuda if graphs is None else graphs
        with torch.inference_mode(False), torch.no_grad():
            self.task = replace(task, text=task.text.clone(), context=None)
        self._pending = states  # until there is a body
        self._body: Body | None = None
        # (STEPS, V, D), (STEPS, S, A) and (STEPS, S), once V is known
        self._views = self._logits = self._learned = task.text[:0]
        self._launches: dict[tuple[int, bool], Callable[[], object]] = {}
        self._kept_alive: list[Nested] = []  # tensors that only the graphs refer to, by address
        self._stream = torch.cuda.Stream(task.text.device, priority=PRIORITY) if task.text.is_cuda else None

    def step(self, views: Tensor) -> tuple[Tensor, Tensor]:
        body = self._body_for(views)
        with self._high_priority():
            logits = self._launch(views[None])[0].clone()
            return logits, body.learned != 0  # a new tensor

    def steps(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        self._body_for(stream[0])
        with self._high_priority():
            parts = [(self._launch(part).clone(), self._learned[: len(part)].clone()) for part in self._parts(stream)]
            logits, learned = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        return logits.transpose(0, 1), learned.T

    def scan(self, stream: Tensor) -> Tensor:
        if not len(stream):
            return Plain(self.task, self.methods[:1], self.snapshot()[:1]).scan(stream).expand(len(self.methods), 0, -1)
        self._body_for(stream[0])
        return torch.cat([self._launch(part).clone() for part in self._parts(stream)]).transpose(0, 1)

    def peek(self, views: Tensor) -> Tensor:
        self._body_for(views)
        with self._high_priority():
            return self._launch(views[None], peeking=True)[0].clone()

    def peeks(self, stream: Tensor) -> Tensor:
        self._body_for(stream[0])
        with self._high_priority():
            parts = [self._launch(part, peeking=True).clone() for part in self._parts(stream)]
            return torch.cat(parts).transpose(0, 1)

    def warm_up(self, views: int) -> None:
        self._body_for(dummy_views(self.task, views))
        for count in _sizes():
            self._cached_launch(count, False)

    def snapshot(self) -> Sequence[Nested]:
        return list(self._pending if self._body is None else map(copied, self._body.states))

    def restore(self, states: Sequence[Nested]) -> None:
        if self._body is None:
            self._pending = list(states)
        else:
            overwrite(self._body.states, tuple(states))
            self._body.refresh()

    @contextmanager
    def _high_priority(self) -> Iterator[None]:
        """Within the block, launches have priority over those of an encoder that reads ahead; later work waits."""
        if self._stream is None:
            yield
            return
        caller = torch.cuda.current_stream(self.task.text.device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            yield
        caller.wait_stream(self._stream)

    def _make_body(self, views: int) -> Body:
        """The body to capture, for images with this many views."""
        return MethodSteps(self.task, self.methods, self._views[0])

    def _body_for(self, views: Tensor) -> Body:
        """The body for images of this shape; if the number of views changes, a new body takes over the states."""
        if self._body is None or self._views.shape[1:] != views.shape:
            if views.ndim != 2 or views.shape[1] != self.task.dim:
                raise FeatureError(f"Views must be (V, {self.task.dim}); got {tuple(views.shape)}.")
            states = self.snapshot()
            with torch.inference_mode(False), torch.no_grad():
                self._views = self.task.text[:1].expand(STEPS, *views.shape).clone()
                self._body = self._make_body(len(views))
                self._logits = self._body.answer.new_zeros(STEPS, *self._body.answer.shape)
                self._learned = self._body.learned.new_zeros(STEPS, len(self.methods), dtype=torch.bool)
                self.restore(states)
            self._launches, self._kept_alive, self._pending = {}, [], []
        return self._body

    def _parts(self, stream: Tensor) -> list[Tensor]:
        """The stream in parts of one launch each."""
        rest, counts = len(stream), list[int]()
        for size in _sizes():
            counts += [size] * (rest // size)
            rest %= size
        return list(stream.split(counts)) if counts else []

    def _launch(self, images: Tensor, peeking: bool = False) -> Tensor:
        """The logits (n, S, A) of one launch, in a buffer that the next launch overwrites."""
        count = len(images)
        launch = self._cached_launch(count, peeking)
        self._views[:count].copy_(images, non_blocking=True)
        with torch.no_grad():
            launch()
        return self._logits[:count]

    def _cached_launch(self, count: int, peeking: bool) -> Callable[[], object]:
        """A function that launches this many steps, cached; creating it warms up, which overwrites the buffers."""
        if (count, peeking) not in self._launches:
            self._launches[count, peeking] = self._make_launch(count, peeking)
        return self._launches[count, peeking]

    def _make_launch(self, count: int, peeking: bool) -> Callable[[], object]:
        """A function that launches this many steps; with `peeking`, they leave the states unchanged."""
        body = self._body
        assert body is not None
        with torch.inference_mode(False):
            before = copied(body.states)

        def steps(count: int = count) -> None:
            if peeking:
                overwrite(before, body.states)
            for place in range(count):
                body.step(self._views[place], self._logits[place])
                self._learned[place].copy_(body.learned != 0)
                if peeking:
                    self.restore(before)

        if not self._graphs:
            return steps
        try:
            with torch.inference_mode(False), torch.no_grad():
                graph = capture(steps, warm_up=lambda: steps(1), priority=PRIORITY, exact=True)
            self._kept_alive.append(before)  # peeks read and write it at each launch
            return graph.replay
        except Exception as error:
            warn_once(f"Steps of '{self.name}' cannot be captured, so they run one by one ({reason(error)}).")
            self._graphs = False
            return steps
        finally:
            self.restore(before)


def _sizes() -> list[int]:
    """How many steps graphs have: few sizes, since each is captured, but up to 16 images take at most two launches."""
    return [STEPS, *(size for size in (16, 12, 8, 6, 4, 3, 2, 1) if size < STEPS)]


class MethodSteps:
    """Runs by their methods' own steps, one after another, with states overwritten in place."""

    def __init__(self, task: Task, methods: Sequence[Method], example: Tensor) -> None:
        self.task, self.methods = task, methods
        self.states = tuple(copied(method.init(task)) for method in methods)
        answer = methods[0].step(task, copied(self.states[0]), example)[0]
        self.answer = answer.new_zeros(len(methods), *answer.shape)
        self.learned = torch.zeros(len(methods), dtype=torch.bool, device=example.device)

    def step(self, views: Tensor, logits: Tensor) -> None:
        for run, (method, state) in enumerate(zip(self.methods, self.states, strict=True)):
            answer, after, learned = advance(method, self.task, state, views)
            logits[run].copy_(answer)
            if isinstance(learned, Tensor) and learned.device == self.learned.device:
                self.learned[run].copy_(learned)
            else:  # known on the host, for example if the method remembers nothing
                self.learned[run].fill_(bool(learned))
            overwrite(state, after)

    def refresh(self) -> None:
        """Nothing is derived from the states."""


def overwrite(state: Nested, source: Nested) -> None:
    """Copy the numbers of one state into the tensors of another."""
    for target, value in zip(leaves(state), leaves(source), strict=True):
        if value is not target:
            target.copy_(value)
