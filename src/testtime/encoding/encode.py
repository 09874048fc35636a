"""Encoding: views of images through an encoder into a feature store, once, for any number of replays."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from testtime.encoding.store import Features, save_features, write_index
from testtime.encoding.stream import readable, stream
from testtime.files.identity import digest, identity, stamp, weights
from testtime.types import Encoder, InputError, StoredImage, Task, ViewPlan

DTYPES = {"float16": torch.float16, "float32": torch.float32}
RECIPE = 1  # of views and features: one more whenever the same images come to give other numbers


class _Done(NamedTuple):
    """A shard whose features are right."""

    kept: tuple[int, ...]  # its images, by their places in the input
    current: bool  # whether labels, classes and prompts are right too


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
    retext: bool = False,
    on_skip: Callable[[str], None] | None = None,
    progress: Callable[[int], None] | None = None,
    report: Callable[[str], None] | None = None,
) -> int:
    """Write the features of images to a store, and return how many there are.

    `out` is one file, or, with `shard` images to each, a folder of them. The views of image i depend on (seed, i)
    alone, i counting every path given, readable or not. Labels are kept where every image has one. An image that
    cannot be read goes to `on_skip` as one line; without it, the error is raised.

    With `resume`, shards that an earlier run of the same images has finished are kept. One whose images have changed
    is encoded again, which `report` is told; one that has other labels gets these, and nothing is encoded for it. What
    was made with other settings is refused, and so are other classes or prompts, unless they are to be replaced too
    (`retext`).
    """
    if shard is not None and shard < 1:
        raise InputError(f"shard={shard}: at least one image to a shard.")
    out, size = Path(out), shard or len(paths)
    known = torch.tensor(labels) if labels is not None and None not in labels else None
    made = made_with(encoder, plan, dtype, dataset)
    parts = [range(begin, min(begin + size, len(paths))) for begin in range(0, len(paths), size)]
    places = [out if shard is None else out / _name(paths, part) for part in parts]
    contents = [_content(paths, part, plan) for part in parts]  # before an image is read: it may be replaced meanwhile
    done: list[_Done | None] = [None] * len(parts)
    if resume and shard:
        for number, (place, part) in enumerate(zip(places, parts, strict=True)):
            done[number] = _done(place, made, contents[number], part, plan.total, task, known, retext, report)
    counts = [0 if shown is None else len(shown.kept) for shown in done]

    def write(number: int, kept: Sequence[int], features: Tensor) -> None:
        rows = list(kept)
        images, positions = json.dumps([str(paths[index]) for index in rows]), json.dumps(rows)
        save_features(
            places[number],
            features.cpu(),
            task.text,
            labels=None if known is None else known[rows],
            classnames=task.classnames,
            scale=task.scale,
            metadata=made | {"content": contents[number], "images": images, "positions": positions},
        )

    for number, shown in enumerate(done):
        if shown is not None and not shown.current:
            write(number, shown.kept, Features(places[number]).stored(0, len(shown.kept)))
    todo = [index for part, shown in zip(parts, done, strict=True) if shown is None for index in part]
    entries = stream(encoder, (paths[i] for i in todo), plan, indices=todo)
    finished = len(paths) - len(todo)
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
                    writing = writer.submit(write, number, kept, torch.stack(features))
                kept, features = [], []
        writing.result()
    total = sum(counts)
    if total == 0:
        raise InputError(f"None of the {len(paths)} images could be read, so there is nothing to write to {out}.")
    if shard is not None:
        write_index(out, [place.name for place, count in zip(places, counts, strict=True) if count])
    return total


def made_with(encoder: Encoder, plan: ViewPlan, dtype: torch.dtype, dataset: str) -> dict[str, str]:
    """What features depend on besides the images, as their file says it."""
    metadata = {
        "encoder": encoder.name,
        "weights": weights(encoder),
        "dataset": dataset,
        "seed": str(plan.seed),
        "augmix": str(plan.augmix).lower(),
        "dtype": str(dtype).removeprefix("torch."),
        "recipe": str(RECIPE),
    } | plan.metadata()
    # a name given by a file that is no UTF-8 is written as it is shown
    return {key: value.encode(errors="backslashreplace").decode() for key, value in metadata.items()}


def _name(paths: Sequence[StoredImage], part: range) -> str:
    """A shard's file: it says which images, so that one left by a run over other images is never taken for ours."""
    return f"features-{part.start:08d}-{digest(str(paths[i]) for i in part)[:8]}.safetensors"


def _content(paths: Sequence[StoredImage], part: range, plan: ViewPlan) -> str:
    """What the content of a shard's images goes by, and of ready-made variations of them."""
    found = [identity(paths[i]) for i in part]
    if (find := getattr(plan.variations, "find", None)) is not None:
        for i in part:
            try:
                found += [f"{file} {stamp(file)}" for file in find(str(paths[i]), plan.count - 1)]
            except InputError:  # said when the image has its turn
                found.append("missing")
    return digest(found)


def _done(
    path: Path,
    made: dict[str, str],
    content: str,
    part: range,
    views: int,
    task: Task,
    known: Tensor | None,
    retext: bool,
    report: Callable[[str], None] | None,
) -> _Done | None:
    """What a finished shard holds, if it is there and its features are those of these images."""
    if not path.exists():
        return None
    store = Features(path)
    other = [key for key, value in made.items() if store.metadata.get(key, value) != value]
    other += ["views"] if store.views != views else []
    same_task = store.classnames == task.classnames and store.scale == task.scale
    same_task = same_task and store.text.dtype == task.text.dtype and torch.equal(store.text, task.text.cpu())
    if other or not (same_task or retext):
        what = other[0] if other else "classes or prompts"
        raise InputError(
            f"{path} was made with other settings, classes or prompts ({what}); remove it, or write elsewhere."
        )
    kept, before = store.positions, store.metadata.get("content")
    if before != content or not made.keys() <= store.metadata.keys() or kept is None or not set(kept) <= set(part):
        if report:
            why = "does not say what it was made from" if before is None else "holds images that have changed"
            report(f"{path} {why}; they are encoded again")
        return None
    truth = None if known is None else known[list(kept)]
    same_labels = truth is None if store.labels is None else truth is not None and torch.equal(store.labels, truth)
    return _Done(kept, same_task and same_labels)


def encode_images(
    encoder: Encoder,
    paths: Sequence[StoredImage],
    plan: ViewPlan = ViewPlan(),
    *,
    on_skip: Callable[[str], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[Tensor, list[int]]:
    """Features (n, V, D) of the images that can be read, and their places among `paths`.

    An image that cannot be read goes to `on_skip` as one line; without it, the error is raised.
    """
    features: list[Tensor] = []
    kept: list[int] = []
    for entry in readable(stream(encoder, paths, plan), on_skip):
        if entry.features is not None:
            features.append(entry.features)
            kept.append(entry.index)
        if progress:
            progress(entry.index + 1)
    if not kept:
        raise InputError(f"None of the {len(paths)} images could be read.")
    return torch.stack(features), kept
