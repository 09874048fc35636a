"""DMN-ZS as its numbers were published: the fusion weight chosen on the test set, by its labels.

No honest system can do this: it shows what the memory could give if the right weight were known beforehand. So it is
not a setting of `dmn`; it has its own name, which is in every table, JSON object and file of such a run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from testtime import registry
from testtime.encoding.store import Features
from testtime.methods.dmn import DMN, State
from testtime.session import replay as replays
from testtime.types import InputError, Method, Task

# of the memory, relative to a text weight of 1: the grid of the released code
WEIGHTS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


@dataclass(frozen=True)
class Oracle(DMN):
    """DMN without its fusion weight: scores (2C,) of both classifiers, the text's and then the memory's.

    The memory does not depend on the weight, so one pass over the stream serves all weights.
    """

    name: ClassVar[str] = "dmn (oracle: fusion weight chosen with test labels)"

    def step(self, task: Task, state: State, views: Tensor) -> tuple[Tensor, State]:
        state = self.remember(task, state, views)
        return torch.cat(self.parts(task, state, views)), state

    def scan(self, task: Task, state: State, stream: Tensor) -> tuple[Tensor, State]:
        scores = stream.new_empty(len(stream), 2 * task.classes)
        for row, views in enumerate(stream):
            scores[row], state = self.step(task, state, views)
        return scores, state

    def chosen(self, scores: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Scores (N, C) with the weight that gets most images right, ties to the smallest, and a record of the choice.

        `scores` (N, 2C) are those of both classifiers.
        """
        text, memory = scores.chunk(2, dim=1)
        right = [int(((self.fusion_text * text + w * memory).argmax(1) == labels).sum()) for w in WEIGHTS]
        weight = WEIGHTS[right.index(max(right))]
        return self.fusion_text * text + weight * memory, {
            "method": self.name,
            "settings": registry.settings_of(self) | {"fusion_memory": weight},
            "oracle": True,
            "weight": weight,
            "accuracy_by_weight": {f"{w:g}": count / len(labels) for w, count in zip(WEIGHTS, right, strict=True)},
        }


def oracle_of(method: Method) -> Oracle:
    """The method without its fusion weight."""
    if type(method) is not DMN:
        raise InputError(f"Only the method 'dmn' has an oracle, not '{method.name}'.")
    return Oracle(**registry.settings_of(method))


@dataclass(frozen=True)
class OracleReplay(replays.Replay):
    """A run over a store that used its labels."""

    chosen: dict[str, Any]  # as `Oracle.chosen` gives it

    def summary(self) -> dict[str, Any]:
        """The run in plain data, under its own name."""
        return super().summary() | self.chosen


def replay(store: Features, method: Method | None = None, **options: Any) -> OracleReplay:
    """DMN over a store with the best fusion weight for its labels; `options` are those of `replay.replay`."""
    oracle = oracle_of(method or DMN())
    if store.labels is None:
        raise InputError(f"{store.path} has no labels, which an oracle needs.")
    run = replays.replay(store, oracle, **options)
    logits, chosen = oracle.chosen(run.logits, store.labels[run.order])
    return OracleReplay(**vars(replace(run, logits=logits, predictions=logits.argmax(1))), chosen=chosen)
