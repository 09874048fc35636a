"""Encoding: views of images through an encoder into a feature store, once, for any number of replays."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from testtime.encoding.stream import readable, stream
from testtime.features import Features, save_features, write_index
from testtime.types import Encoder, InputError, StoredImage, Task, ViewPlan

DTYPES = {"float16": torch.float16, "float32": torch.float32}


def encode(
    encoder: Encoder,
    task: Task,
    paths: Sequence[StoredImage],
    out: str | Path,
    plan: ViewPlan = ViewPlan(),
    *,
    labels: Sequence[int | None] | None = None,
    dtype: torch.dtype = torch.float16,
    shard: int | None = None,
    dataset: str = "",
    resume: bool = False,
    on_skip: Callable[[str], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Write the features of images to a store, and return how many there are.

    `out` is one file, or, with `shard` images to each, a folder of them. The views of image i depend on (seed, i)
    alone, i counting every path given, readable or not. Labels are kept where every image has one. An image that
    cannot be read goes to `on_skip` as one line; without it, the error is raised. With `resume`, shards that an
    interrupted run of the same images has finished are kept.
    """
    if shard is not None and shard < 1:
        raise InputError(f"shard={shard}: at least one image to a shard.")
    out, size = Path(out), shard or len(paths)
    known = torch.tensor(labels) if labels is not None and None not in labels else None
    facts = {"encoder": encoder.name, "dataset": dataset, "seed": str(plan.seed), "augmix": str(plan.augmix).lower()}
    facts |= plan.facts()
    parts = [range(begin, min(begin + size, len(paths))) for begin in range(0, len(paths), size)]
    places = [out if shard is None else out / _name(paths, part) for part in parts]
    counts = [_finished(place, facts, plan.total, task) if resume and shard else None for place in places]

    def write(number: int, kept: list[int], features: list[Tensor]) -> None:
        save_features(
            places[number],
            torch.stack(features).cpu(),
            task.text,
            labels=None if known is None else known[kept],
            classnames=task.classnames,
            scale=task.scale,
            metadata=facts | {"images": json.dumps([str(paths[index]) for index in kept])},
        )

    todo = [index for part, done in zip(parts, counts, strict=True) if done is None for index in part]
    entries = stream(encoder, (paths[i] for i in todo), plan, indices=todo)
    finished = sum(len(part) for part, done in zip(parts, counts, strict=True) if done is not None)
    if progress and finished:
        progress(finished)
    with ThreadPoolExecutor(1, "testtime-write") as writer:  # the next images are encoded meanwhile
        writing: Future[object] = writer.submit(lambda: None)
        kept: list[int] = []
        features: list[Tensor] = []
        for entry in readable(entries, on_skip):
            if entry.features is not None:
                kept.append(entry.index)
                features.append(entry.features.to(dtype))
            finished += 1
            if progress:
                progress(finished)
            number = entry.index // size
            if entry.index == parts[number][-1]:
                counts[number] = len(kept)
                writing.result()  # one at a time, so that memory is bounded
                if kept:
                    writing = writer.submit(write, number, kept, features)
                kept, features = [], []
        writing.result()
    total = sum(count or 0 for count in counts)
    if total == 0:
        raise InputError(f"None of the {len(paths)} images could be read, so there is nothing to write to {out}.")
    if shard is not None:
        write_index(out, [place.name for place, count in zip(places, counts, strict=True) if count])
    return total


def _name(paths: Sequence[StoredImage], part: range) -> str:
    """A shard's file: it says which images, so that one left by a run over other images is never taken for ours."""
    mark = hashlib.sha256("\n".join(str(paths[i]) for i in part).encode()).hexdigest()[:8]
    return f"features-{part.start:08d}-{mark}.safetensors"


def _finished(path: Path, facts: dict[str, str], views: int, task: Task) -> int | None:
    """How many images a finished shard holds, if it is there and was made with the same things."""
    if not path.exists():
        return None
    store = Features(path)
    same = all(store.metadata.get(key) == value for key, value in facts.items()) and store.views == views
    if not (same and store.classnames == task.classnames and torch.equal(store.text, task.text.cpu())):
        raise InputError(f"{path} was made with other settings, classes or prompts; remove it, or write elsewhere.")
    return len(store)
