"""A method's own steps, one after another: the reference for every other stepper."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from testtime.methods.base import Nested
from testtime.steppers import aligned, aligned_state, dummy_views, one_by_one, rows_aligned
from testtime.types import Method, Task


class Plain:
    """One run by the method's own steps; see `steppers.Stepper`."""

    def __init__(self, task: Task, methods: Sequence[Method], states: Sequence[Nested]) -> None:
        self.task, (self.method,) = task, methods
        self._state: Nested = ()
        self.restore(states)

    def step(self, views: Tensor) -> tuple[Tensor, Tensor]:
        logits, state = self.method.step(self.task, self._state, aligned(views))
        learned = torch.as_tensor(self.method.learned(self._state, state)).reshape(1)
        self._state = state
        return logits[None], learned

    def steps(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        return one_by_one(self.step, stream)

    def scan(self, stream: Tensor) -> Tensor:
        if not len(stream) or rows_aligned(stream):
            logits, self._state = self.method.scan(self.task, self._state, stream)
            return logits[None]
        # image by image, so that each is aligned the same wherever the stream is split
        return self.steps(stream)[0]

    def peek(self, views: Tensor) -> Tensor:
        return self.method.step(self.task, self._state, aligned(views))[0][None]

    def warm_up(self, views: int) -> None:
        self.peek(dummy_views(self.task, views))

    def snapshot(self) -> list[Nested]:
        return [self._state]  # steps are pure and never modify it

    def restore(self, states: Sequence[Nested]) -> None:
        (self._state,) = map(aligned_state, states)
