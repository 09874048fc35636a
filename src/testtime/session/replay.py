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
from testtime.guard import Guard
from testtime.methods.base import batch_of
from testtime.metrics import accuracy
from testtime.session.journal import GuardTally, LateLabels
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
    guard: GuardTally
    late: LateLabels | None  # labels that the guard was given

    def summary(self) -> dict[str, Any]:
        """The run in plain data; accuracies are fractions, None without labels."""
        return (
            {
                "method": self.session.method.name,
                "n": len(self.predictions),
                "accuracy": None if self.labels is None else accuracy(self.predictions, self.labels),
                "zero_shot_accuracy": None if self.labels is None else accuracy(self.zero_shot, self.labels),
                "changed": int((self.predictions != self.zero_shot).sum()),
                "seconds": self.seconds,
                "loading_seconds": self.loading,
                "settings": registry.settings_of(self.session.method),
            }
            | self._batch_summary()
            | self._guard_summary()
        )

    def _batch_summary(self) -> dict[str, Any]:
        batch = batch_of(self.session.method)
        said = f"each image was answered after its whole batch of {batch} had been read"
        return {"batch": batch, "reads_ahead": said} if batch > 1 else {}

    def _guard_summary(self) -> dict[str, Any]:
        if self.session.guard is None:
            return {}
        late = {"labels_used": self.late.spent, "proven": self.session.proven} if self.late else {}
        return {"guard": registry.settings_of(self.session.guard) | self.guard.summary() | late}


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
    guard: Guard | bool | None = None,
    labelled: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Replay:
    """Run a method over a store, in stored order or shuffled by `seed`; `progress` receives the images done.

    `reference` runs the method's own steps, even if there is a faster stepper. The store is read in chunks; only
    predictions, labels and, unless `keep_logits` is off, the logits (by far the largest) grow with it.

    With a `guard`, up to `labelled` of the labels are given to it, after the chunk that their image is in.
    """
    if dtype not in DTYPES:
        raise registry.unknown("dtype", dtype, DTYPES)
    if limit is not None and limit < 1:
        raise InputError(f"limit={limit}: at least one image is needed.")
    if isinstance(method, str):
        method = registry.make_method(method, preset, settings)
    task = store.task(DTYPES[dtype], device, getattr(method, "needs_tower", False))
    session = Session(task, method, reference=reference, guard=guard)
    order = (shuffled(len(store), seed) if shuffle else torch.arange(len(store)))[:limit]
    baseline = Session(task, "zeroshot", reference=reference)
    loading = session.warm_up(store.views) + baseline.warm_up(store.views)
    tally, late = GuardTally(), None
    if labelled:
        if store.labels is None or session.guard is None:
            raise InputError(f"labelled={labelled}: needs a guard, and features with labels.")
        late = LateLabels(session, store.labels[order].tolist(), labelled)
    predictions, frozen = torch.empty_like(order), torch.empty_like(order)
    logits, done, seconds = torch.empty(0), 0, 0.0
    for chunk in store.chunks(order, dtype=DTYPES[dtype], batch=batch_of(method)):
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
        for decision in session.decisions:
            tally.count(decision)
            if late:
                late.offer(decision)
        if progress:
            progress(done)
    labels = None if store.labels is None else store.labels[order]
    return Replay(logits, predictions, frozen, labels, order, seconds, loading, session, tally, late)


def recorded_method(store: Features) -> str:
    """The method that a trace's metadata names, as its authors may write it; empty if it names none."""
    told = store.metadata.get("method", "")
    name = told.lower().replace("-", "").removesuffix("zs")  # DMN-ZS
    if told and registry.METHODS.known(name) is None:
        raise InputError(f"--recorded: the file's metadata names an unknown method, '{told}'; add --method NAME.")
    return name


def recorded_settings(store: Features, method: str) -> dict[str, object]:
    """The method's settings that a trace's metadata records under `hp.`, and the length of its stream."""
    facts = {"hp.stream_length": str(len(store))} | store.metadata
    names = [entry.name for entry in fields(registry.method_class(method))]
    return {name: facts[f"hp.{name}"] for name in names if f"hp.{name}" in facts}
