"""What is told of an answer beside its logits: probabilities, best classes, entropy, and what calibrates it.

On a GPU it is captured as one graph. These are fifty small operations on a few rows, and in a service each of them
would wait for other threads to let Python run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from testtime.calibration import levels
from testtime.machine.capture import capture, reason, warn_once
from testtime.types import Method, Task, log_of

ROWS = 32  # of a graph; fewer are summarised among rows of no meaning, since each row stands alone
PRIORITY = -1  # a caller waits for the answer


class Summaries:
    """Summarises the answers of one task and method; with a guard, they are logits whatever the method."""

    def __init__(self, task: Task, method: Method, guarded: bool) -> None:
        self._task, self._method, self._guarded = task, method, guarded
        self._launch: Callable[[], object] | None = None  # of a graph over these:
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []

    def __call__(self, logits: Tensor, features: Tensor, learned: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers (N, 14) for `Prediction.of` and, of each image, logits and probabilities (N, 2, A); on the CPU.

        From logits (N, A), clean views (N, D), and whether the images were learned from (N,).
        """
        # on a CPU one by one: a sum over one row and over one of several might round differently
        inputs = logits, features, learned.to(logits.device)
        size, found = (1, self._summary) if logits.is_cpu else (ROWS, self._captured)
        if len(logits) <= size:
            return found(*inputs)
        parts = [found(*part) for part in zip(*(each.split(size) for each in inputs), strict=True)]
        numbers, shares = map(torch.cat, zip(*parts, strict=True))
        return numbers, shares

    def copy(self) -> Summaries:
        """A second one for another thread: what is captured is not shared."""
        return Summaries(self._task, self._method, self._guarded)

    def warm_up(self) -> None:
        """Capture what there is to capture."""
        text = self._task.text
        self(text.new_zeros(1, len(text)), text[:1], text.new_zeros(1, dtype=torch.bool))

    def _summary(self, logits: Tensor, features: Tensor, learned: Tensor) -> tuple[Tensor, Tensor]:
        frozen = self._task.zero_shot(features.squeeze(0)).view(len(features), -1)
        probabilities = logits.softmax(-1) if self._guarded else self._method.probabilities(logits)
        finite = torch.cat([logits, frozen, probabilities], -1).isfinite().all(-1)  # each may overflow by itself
        log_p = log_of(probabilities)
        best, frozen_best = logits.argmax(-1, keepdim=True), frozen.argmax(-1, keepdim=True)
        confidence, frozen_confidence = probabilities.gather(-1, best), frozen.softmax(-1).gather(-1, frozen_best)
        entropy = -(probabilities * log_p).sum(-1, keepdim=True).clamp_max(0)
        flags = torch.stack([finite, learned], -1)
        columns = flags, best, frozen_best, confidence, frozen_confidence, entropy
        numbers = torch.cat([*(column.double() for column in columns), levels(log_p, frozen_confidence)], -1)
        return numbers, torch.stack([logits, probabilities], 1)

    def _captured(self, logits: Tensor, features: Tensor, learned: Tensor) -> tuple[Tensor, Tensor]:
        count, inputs = len(logits), (logits, features, learned)
        if self._launch is None:
            self._launch = self._make_launch(inputs)
        for buffer, values in zip(self._inputs, inputs, strict=True):
            buffer[:count].copy_(values)
        self._launch()
        numbers, shares = (each[:count].cpu() for each in self._outputs)
        return numbers, shares

    def _make_launch(self, examples: tuple[Tensor, ...]) -> Callable[[], object]:
        with torch.inference_mode(False), torch.no_grad():
            # like real ones, but for the number of rows: a graph holds their addresses
            self._inputs = [each.new_zeros(ROWS, *each.shape[1:]) for each in examples]

            def summarise() -> None:
                self._outputs = list(self._summary(*self._inputs))

            try:
                return capture(summarise, priority=PRIORITY, exact=True).replay
            except Exception as error:
                name = self._method.name
                warn_once(f"Answers of '{name}' cannot be captured, so they are summarised slowly ({reason(error)}).")
                return summarise
