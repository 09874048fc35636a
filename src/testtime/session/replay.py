"""Replaying a feature store: a method over stored features, scored if there are labels."""

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

    logits: Tensor  # (N, C), or (0, C) if they are not kept
    predictions: Tensor  # (N,) classes
    zero_shot: Tensor  # (N,) predictions of the frozen classifier
    labels: Tensor | None  # (N,), in the order of the run
    order: Tensor  # (N,) rows of the store, in the order of the run
    seconds: float  # spent in the method
    loading: float  # seconds of warm-up before the first image: loading, compiling, graph capture
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
    """Run a method over a store, in stored order or shuffled by `seed`; `progress` receives the images done.

    `reference` runs the method's own steps, even if there is a faster stepper. The store is read in chunks; only
    predictions, labels and, unless `keep_logits` is off, the logits (by far the largest) grow with it.
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
    baseline = Session(task, "zeroshot", reference=reference)
    loading = session.warm_up(store.views) + baseline.warm_up(store.views)
    predictions, frozen = torch.empty_like(order), torch.empty_like(order)
    logits, done, seconds = torch.empty(0), 0, 0.0
    for chunk in store.chunks(order, dtype=DTYPES[dtype]):
        chunk, rows = chunk.to(device), slice(done, done + len(chunk))
        start = time.perf_counter()
        scores = session.scan(chunk).cpu()
        seconds += time.perf_counter() - start
        if not done:  # allocated once: joining chunks at the end would need twice the memory
            logits = scores.new_empty(len(order) if keep_logits else 0, scores.shape[1])
        if keep_logits:
            logits[rows] = scores
        predictions[rows] = scores.argmax(1)
        frozen[rows] = baseline.scan(chunk[:, :1]).argmax(1).cpu()
        done = session.count
        if progress:
            progress(done)
    labels = None if store.labels is None else store.labels[order]
    return Replay(logits, predictions, frozen, labels, order, seconds, loading, session)


def recorded_settings(store: Features, method: str) -> dict[str, object]:
    """The method's settings that a trace's metadata records under `hp.`."""
    names = [entry.name for entry in fields(registry.method_class(method))]
    return {name: store.metadata[f"hp.{name}"] for name in names if f"hp.{name}" in store.metadata}
