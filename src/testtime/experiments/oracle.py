"""DMN-ZS and MCP as their numbers were published: fusion weights chosen on the test set, by its labels.

No honest system can do this: it shows what the memory could give if the right weights were known beforehand. So it is
not a setting of `dmn` or `mcp`; it has its own name, which is in every table, JSON object and file of such a run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor

from testtime import registry
from testtime.encoding.store import Features
from testtime.methods import dmn, mcp
from testtime.methods.base import Base
from testtime.session import replay as replays
from testtime.types import InputError, Method, Task

# of a part, relative to a text weight of 1: the grid of both released codes
WEIGHTS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


@dataclass(frozen=True)
class Oracle(Base):
    """A method without its fusion weights: scores are those of its parts side by side, the text's first.

    What is learned does not depend on the weights, so one pass over the stream serves all of them.
    """

    searched: ClassVar[tuple[str, ...]]  # the settings that are chosen, one for each part after the first

    def columns(self, task: Task) -> int:
        return (1 + len(self.searched)) * task.classes

    def chosen(self, scores: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Scores (N, C) with the weights that get most images right, ties to the first, and a record of the choice.

        `scores` (N, parts C) are those of the parts.
        """
        text, *parts = scores.chunk(1 + len(self.searched), dim=1)
        text = getattr(self, "fusion_text", 1.0) * text

        def fused(weights: tuple[float, ...]) -> Tensor:
            return text + sum(weight * part for weight, part in zip(weights, parts, strict=True))

        tried = list(product(WEIGHTS, repeat=len(parts)))
        right = [int((fused(weights).argmax(1) == labels).sum()) for weights in tried]
        best = tried[right.index(max(right))]
        named = [", ".join(f"{weight:g}" for weight in weights) for weights in tried]
        return fused(best), {
            "method": self.name,
            "settings": registry.settings_of(self) | dict(zip(self.searched, best, strict=True)),
            "oracle": True,
            "weight": best[0] if len(best) == 1 else list(best),
            "accuracy_by_weight": {name: count / len(labels) for name, count in zip(named, right, strict=True)},
        }


@dataclass(frozen=True)
class DMNOracle(Oracle, dmn.DMN):
    """DMN's two classifiers: scores (2C,), the text's and then the memory's."""

    name: ClassVar[str] = "dmn (oracle: fusion weight chosen with test labels)"
    searched: ClassVar[tuple[str, ...]] = ("fusion_memory",)

    def step(self, task: Task, state: dmn.State, views: Tensor) -> tuple[Tensor, dmn.State]:
        state = self.remember(task, state, views)
        return torch.cat(self.parts(task, state, views)), state


@dataclass(frozen=True)
class MCPOracle(Oracle, mcp.MCP):
    """MCP's three classifiers: scores (3C,), the text's, the memory's and the prototypes'."""

    name: ClassVar[str] = "mcp (oracle: fusion weights chosen with test labels)"
    searched: ClassVar[tuple[str, ...]] = ("fusion_memory", "fusion_prototype")

    def fused(self, parts: Tensor) -> Tensor:
        """The parts (3, C) side by side: (3C,)."""
        return parts.flatten()


ORACLES: dict[type[Method], type[Oracle]] = {dmn.DMN: DMNOracle, mcp.MCP: MCPOracle}


def oracle_of(method: Method) -> Oracle:
    """The method without its fusion weights."""
    if type(method) not in ORACLES:
        names = " and ".join(f"'{kind.name}'" for kind in ORACLES)
        raise InputError(f"Only the methods {names} have an oracle, not '{method.name}'.")
    return ORACLES[type(method)](**registry.settings_of(method))


@dataclass(frozen=True)
class OracleReplay(replays.Replay):
    """A run over a store that used its labels."""

    chosen: dict[str, Any]  # as `Oracle.chosen` gives it

    def summary(self) -> dict[str, Any]:
        """The run in plain data, under its own name."""
        return super().summary() | self.chosen


def replay(store: Features, method: Method | None = None, **options: Any) -> OracleReplay:
    """DMN or MCP over a store with the best fusion weights for its labels; `options` are those of `replay.replay`."""
    oracle = oracle_of(method or dmn.DMN())
    if store.labels is None:
        raise InputError(f"{store.path} has no labels, which an oracle needs.")
    run = replays.replay(store, oracle, **options)
    logits, chosen = oracle.chosen(run.logits, store.labels[run.order])
    return OracleReplay(**vars(replace(run, logits=logits, predictions=logits.argmax(1))), chosen=chosen)
