"""Replaying a feature store: a method over stored features, scored where there are labels."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from testtime import registry
from testtime.encoding.store import Features
from testtime.metrics import accuracy
from testtime.session.order import shuffled
from testtime.session.session import Session
from testtime.types import InputError

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Replay:
    """One method's run over a store."""

    logits: Tensor  # (N, C), or (0, C) where they were not to be kept
    predictions: Tensor  # (N,) classes
    zero_shot: Tensor  # (N,) predictions of the frozen classifier
    labels: Tensor | None  # (N,), in the order of the run
    order: Tensor  # (N,) rows of the store, in the order of the run
    seconds: float  # spent in the method
    loading: float  # seconds before the first image: what is loaded, compiled and captured once
    session: Session

    def summary(self) -> dict[str, Any]:
        """The run in plain data; accuracies are fractions, None without labels."""
        return {
            "method": self.session.method.name,
            "n": len(self.predictions),
            "accuracy": None if self.labels is None else accuracy(self.predictions, self.labels),
            "zero_shot_accuracy": None if self.labels is None else accuracy(self.zero_shot, self.labels),
            "changed": int((self.predictions != self.zero_shot).sum()),
            "seconds": self.seconds,
            "loading_seconds": self.loading,
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
    keep_logits: bool = True,
    progress: Callable[[int], None] | None = None,
) -> Replay:
    """Run a method over a store, in stored order or shuffled by `seed`; `progress` hears images done.

    `reference` runs the method's own steps, also where there is something faster. The store is read a chunk at a time;
    what grows with it are predictions, labels and, unless `keep_logits` is off, the logits, which take the most.
    """
    if dtype not in DTYPES:
        raise registry.unknown("dtype", dtype, DTYPES)
    if limit is not None and limit < 1:
        raise InputError(f"limit={limit}: at least one image is needed.")
    if isinstance(method, str):
        method = registry.make_method(method, preset, settings)
    task = store.task(DTYPES[dtype], device, getattr(method, "needs_tower", False))
    session = Session(task, method, reference=reference)
    order = (shuffled(len(store), seed) if shuffle else torch.arange(len(store)))[:limit]
    beside = Session(task, "zeroshot", reference=reference)
    loading = session.warm_up(store.views) + beside.warm_up(store.views)
    predictions, frozen = torch.empty_like(order), torch.empty_like(order)
    logits, done, seconds = torch.empty(0), 0, 0.0
    for chunk in store.chunks(order, dtype=DTYPES[dtype]):
        chunk, here = chunk.to(device), slice(done, done + len(chunk))
        start = time.perf_counter()
        scores = session.scan(chunk).cpu()
        seconds += time.perf_counter() - start
        if not done:  # one piece from the start: to join many at the end would take twice the room
            logits = scores.new_empty(len(order) if keep_logits else 0, scores.shape[1])
        if keep_logits:
            logits[here] = scores
        predictions[here] = scores.argmax(1)
        frozen[here] = beside.scan(chunk[:, :1]).argmax(1).cpu()
        done = session.count
        if progress:
            progress(done)
    labels = None if store.labels is None else store.labels[order]
    return Replay(logits, predictions, frozen, labels, order, seconds, loading, session)


def recorded_settings(store: Features, method: str) -> dict[str, object]:
    """The settings that a trace's metadata gives under `hp.`, those that the method has."""
    names = [entry.name for entry in fields(registry.method_class(method))]
    return {name: store.metadata[f"hp.{name}"] for name in names if f"hp.{name}" in store.metadata}
