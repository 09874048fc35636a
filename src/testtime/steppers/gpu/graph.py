"""Steps captured in graphs: many steps of a method in one launch.

A step is a few dozen small kernels, which a GPU finishes sooner than Python can ask for them. Here several steps in a
row are captured, and a stream is replayed through the graph: inputs, state and logits stay at fixed places in memory,
and nothing is read back. What is captured is a body: the method's own step, or kernels of its own
(`testtime.steppers.gpu.dpe`). On the CPU, for tests, the same steps run in a plain loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from testtime.machine.capture import capture, reason, warn_once
from testtime.methods.base import leaves
from testtime.steppers import example
from testtime.steppers.plain import Plain
from testtime.types import FeatureError, Method, Task

PRIORITY = -1  # somebody waits for the answer, and an encoder that works ahead has time
STEPS = 32  # to a graph: launching it costs about what one kernel does


class Body(Protocol):
    """What a graph captures: S runs whose states lie at fixed places."""

    answer: Tensor  # (S, A), like what a step answers: A is C, unless a method answers otherwise
    learned: Tensor  # (S,), whether the last step learned: 0 if not
    state: Any  # tensors and tuples of such: where the states lie

    def step(self, views: Tensor, logits: Tensor) -> None:
        """Fill the logits (S, A) of one image's views (V, D), and move the states on."""

    def snapshot(self) -> list[Any]:
        """The states, copied."""

    def restore(self, states: Sequence[Any]) -> None:
        """Overwrite the states."""

    def refresh(self) -> None:
        """Find anew what is kept beside the states, after they were overwritten."""


class Stepper:
    """Runs whose steps are captured; see `steppers.Stepper`.

    `graphs` defaults to whether the task is on a GPU. What cannot be captured runs step by step, and a warning says so
    once.
    """

    def __init__(
        self, task: Task, methods: Sequence[Method], states: Sequence[Any], *, graphs: bool | None = None
    ) -> None:
        self.name = methods[0].name
        self.methods = methods
        self._graphs = task.text.is_cuda if graphs is None else graphs
        with torch.inference_mode(False), torch.no_grad():
            self.task = replace(task, text=task.text.clone(), context=None)
            self._pending: Sequence[Any] | None = states
        self._body: Body | None = None
        self._views = self._logits = task.text[:0]  # (STEPS, V, D) and (STEPS, S, A), once V is known
        self._launches: dict[tuple[int, bool], Callable[[], object]] = {}
        self._held: list[Any] = []  # what graphs use, and nothing else keeps
        self._stream = torch.cuda.Stream(task.text.device, priority=PRIORITY) if task.text.is_cuda else None

    def step(self, views: Tensor) -> tuple[Tensor, Tensor]:
        body = self._ready(views)
        with self._urgent():
            logits = self._launch(views[None])[0].clone()
            return logits, body.learned != 0  # a tensor of its own

    def scan(self, stream: Tensor) -> Tensor:
        if not len(stream):
            return Plain(self.task, self.methods[:1], self.snapshot()[:1]).scan(stream).expand(len(self.methods), 0, -1)
        self._ready(stream[0])
        return torch.cat([self._launch(part).clone() for part in self._parts(stream)]).transpose(0, 1)

    def peek(self, views: Tensor) -> Tensor:
        self._ready(views)
        with self._urgent():
            return self._launch(views[None], peeking=True)[0].clone()

    def warm_up(self, views: int) -> None:
        self._ready(example(self.task, views))
        for count in (STEPS, 1):
            self._prepared(count, False)

    def snapshot(self) -> list[Any]:
        return list(self._pending or []) if self._body is None else self._body.snapshot()

    def restore(self, states: Sequence[Any]) -> None:
        if self._body is None:
            self._pending = list(states)
        else:
            self._body.restore(states)

    @contextmanager
    def _urgent(self) -> Iterator[None]:
        """While inside, launches go before those of an encoder that works ahead; whoever comes after waits for them."""
        if self._stream is None:
            yield
            return
        caller = torch.cuda.current_stream(self.task.text.device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            yield
        caller.wait_stream(self._stream)

    def _make(self, views: int) -> Body:
        """What is captured, for images of so many views."""
        return Own(self.task, self.methods, self._views[0])

    def _ready(self, views: Tensor) -> Body:
        """The body for images of this shape; one of another number of views takes over the states."""
        if self._body is None or self._views.shape[1:] != views.shape:
            if views.ndim != 2 or views.shape[1] != self.task.dim:
                raise FeatureError(f"Views must be (V, {self.task.dim}); got {tuple(views.shape)}.")
            states = self.snapshot()
            with torch.inference_mode(False), torch.no_grad():
                self._views = self.task.text[:1].expand(STEPS, *views.shape).clone()
                self._body = self._make(len(views))
                self._logits = self._body.answer.new_zeros(STEPS, *self._body.answer.shape)
                self._body.restore(states)
            self._launches, self._held, self._pending = {}, [], None
        return self._body

    def _parts(self, stream: Tensor) -> list[Tensor]:
        """The stream in pieces that are one launch each."""
        many = len(stream) // STEPS
        return [*stream[: many * STEPS].unflatten(0, (many, STEPS)), *stream[many * STEPS :, None]]

    def _launch(self, images: Tensor, peeking: bool = False) -> Tensor:
        """The logits (n, S, A) of one launch, at the place where the next will overwrite them."""
        count = len(images)
        launch = self._prepared(count, peeking)
        self._views[:count].copy_(images, non_blocking=True)
        with torch.no_grad():
            launch()
        return self._logits[:count]

    def _prepared(self, count: int, peeking: bool) -> Callable[[], object]:
        """The way to launch so many steps, made once; making it warms up, and so writes to the buffers."""
        if (count, peeking) not in self._launches:
            self._launches[count, peeking] = self._launcher(count, peeking)
        return self._launches[count, peeking]

    def _launcher(self, count: int, peeking: bool) -> Callable[[], object]:
        """A way to launch so many steps, which where they are `peeking` leave the states as they were."""
        body = self._body
        assert body is not None
        with torch.inference_mode(False):
            before = _copied(body.state)

        def steps(count: int = count) -> None:
            if peeking:
                overwrite(before, body.state)
            for views, logits in zip(self._views[:count], self._logits[:count], strict=True):
                body.step(views, logits)
            if peeking:
                overwrite(body.state, before)
                body.refresh()

        if not self._graphs:
            return steps
        try:
            with torch.inference_mode(False), torch.no_grad():
                graph = capture(steps, warm_up=lambda: steps(1), priority=PRIORITY, exact=True)
            self._held.append(before)  # looks read and write it at each launch
            return graph.replay
        except Exception as error:
            warn_once(f"Steps of '{self.name}' cannot be captured, and run one by one ({reason(error)}).")
            self._graphs = False
            return steps
        finally:
            overwrite(body.state, before)
            body.refresh()


class Own:
    """Runs by their methods' own steps, one after another, their states overwritten."""

    def __init__(self, task: Task, methods: Sequence[Method], example: Tensor) -> None:
        self.task, self.methods = task, methods
        self.state = tuple(_copied(method.init(task)) for method in methods)
        answer = methods[0].step(task, _copied(self.state[0]), example)[0]
        self.answer = answer.new_zeros(len(methods), *answer.shape)
        self.learned = torch.zeros(len(methods), dtype=torch.bool, device=example.device)

    def step(self, views: Tensor, logits: Tensor) -> None:
        for run, (method, state) in enumerate(zip(self.methods, self.state, strict=True)):
            answer, after = method.step(self.task, state, views)
            logits[run].copy_(answer)
            learned = method.learned(state, after)
            if isinstance(learned, Tensor) and learned.device == self.learned.device:
                self.learned[run].copy_(learned)
            else:  # known without looking: it remembers nothing, say
                self.learned[run].fill_(bool(learned))
            overwrite(state, after)

    def snapshot(self) -> list[Any]:
        return list(_copied(self.state))

    def restore(self, states: Sequence[Any]) -> None:
        overwrite(self.state, tuple(states))

    def refresh(self) -> None:
        """Nothing is kept beside them."""


def overwrite(state: Any, with_this: Any) -> None:
    """Put the numbers of one state at the places of another."""
    for place, value in zip(leaves(state), leaves(with_this), strict=True):
        if value is not place:
            place.copy_(value)


def _copied(state: Any) -> Any:
    """A state with tensors of its own."""
    if isinstance(state, Tensor):
        return state.clone()
    parts = map(_copied, state)
    return tuple(parts) if type(state) is tuple else type(state)(*parts)
