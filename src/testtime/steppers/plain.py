"""A method's own steps, one after another: the reference for every other stepper."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from testtime.methods.base import Nested, advance, batch_of, copied, overwrites
from testtime.steppers import aligned, aligned_state, dummy_views, one_by_one, rows_aligned
from testtime.types import InputError, Method, Task


class Plain:
    """One run by the method's own steps; see `steppers.Stepper`."""

    def __init__(self, task: Task, methods: Sequence[Method], states: Sequence[Nested]) -> None:
        self.task, (self.method,) = task, methods
        self.batch, self._images = batch_of(self.method), 0
        self._state: Nested = ()
        self.restore(states)

    def step(self, views: Tensor) -> tuple[Tensor, Tensor]:
        self._check_single()
        logits, self._state, learned = advance(self.method, self.task, self._state, aligned(views))
        return logits[None], torch.as_tensor(learned).reshape(1)

    def steps(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        return one_by_one(self.step, stream)

    def scan(self, stream: Tensor) -> Tensor:
        if self._images % self.batch:
            raise InputError(
                f"Method '{self.method.name}' with batch={self.batch} was given part of a batch, which ends its "
                "stream. Give it whole batches, or use batch=1."
            )
        self._images += len(stream)
        if not len(stream) or rows_aligned(stream) or self.batch > 1:
            logits, self._state = self.method.scan(self.task, self._state, stream)
            return logits[None]
        # image by image, so that each is aligned the same wherever the stream is split
        return self.steps(stream)[0]

    def peek(self, views: Tensor) -> Tensor:
        self._check_single()
        return self.method.step(self.task, self._state, aligned(views))[0][None]

    def peeks(self, stream: Tensor) -> Tensor:
        return torch.stack([self.peek(views) for views in stream], 1)

    def warm_up(self, views: int) -> None:
        self.method.step(self.task, self._state, dummy_views(self.task, views))

    def snapshot(self) -> list[Nested]:
        return [copied(self._state) if overwrites(self.method) else self._state]  # other steps never modify it

    def restore(self, states: Sequence[Nested]) -> None:
        (state,) = map(aligned_state, states)
        self._state = copied(state) if overwrites(self.method) else state
        self._images = 0

    def _check_single(self) -> None:
        if self.batch > 1:
            raise InputError(
                f"Method '{self.method.name}' with batch={self.batch} reads {self.batch} images before it answers one. "
                "Use batch=1 to answer one image at a time, or replay stored features."
            )
