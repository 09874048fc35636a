"""Replaying a feature store: a method over stored features, scored where there are labels."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from testtime import registry
from testtime.engine import Session
from testtime.features import Features
from testtime.metrics import accuracy
from testtime.streams import shuffled
from testtime.types import InputError

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Replay:
    """One method's run over a store."""

    logits: Tensor  # (N, C)
    zero_shot: Tensor  # (N,) predictions of the frozen classifier
    labels: Tensor | None  # (N,), in the order of the run
    order: Tensor  # (N,) rows of the store, in the order of the run
    seconds: float  # spent in the method
    session: Session

    @property
    def predictions(self) -> Tensor:
        """The predicted classes (N,)."""
        return self.logits.argmax(1)

    def summary(self) -> dict[str, Any]:
        """The run in plain data; accuracies are fractions, None without labels."""
        return {
            "method": self.session.method.name,
            "n": len(self.logits),
            "accuracy": None if self.labels is None else accuracy(self.predictions, self.labels),
            "zero_shot_accuracy": None if self.labels is None else accuracy(self.zero_shot, self.labels),
            "changed": int((self.predictions != self.zero_shot).sum()),
            "seconds": self.seconds,
            "settings": registry.settings_of(self.session.method),
        }


def replay(
    store: Features,
    method: str | Any = "dpe",
    *,
    preset: str | None = None,
    settings: dict[str, object] | None = None,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    limit: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    reference: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Replay:
    """Run a method over a store, in stored order or shuffled by `seed`; `progress` hears images done.

    `reference` runs the method's own steps, also where it has a fast twin.
    """
    if dtype not in DTYPES:
        raise registry.unknown("dtype", dtype, DTYPES)
    if limit is not None and limit < 1:
        raise InputError(f"limit={limit}: at least one image is needed.")
    if isinstance(method, str):
        method = registry.make_method(method, preset, settings)
    task = store.task(DTYPES[dtype], device, getattr(method, "needs_tower", False))
    session = Session(task, method, reference=reference)
    count = len(store)
    order = shuffled(count, seed) if shuffle else torch.arange(count)
    order = order[:limit]
    logits, frozen, seconds = [], [], 0.0
    for chunk in store.chunks(order.tolist() if shuffle or limit else None, dtype=DTYPES[dtype]):
        chunk = chunk.to(device)
        start = time.perf_counter()
        logits.append(session.scan(chunk).cpu())
        seconds += time.perf_counter() - start
        frozen.append(session.task.zero_shot(chunk[:, 0]).argmax(1).cpu())
        if progress:
            progress(session.count)
    labels = None if store.labels is None else store.labels[order]
    return Replay(torch.cat(logits), torch.cat(frozen), labels, order, seconds, session)


def recorded_settings(store: Features, method: str) -> dict[str, object]:
    """The settings that a trace's metadata gives under `hp.`, those that the method has."""
    names = [entry.name for entry in fields(registry.method_class(method))]
    return {name: store.metadata[f"hp.{name}"] for name in names if f"hp.{name}" in store.metadata}
