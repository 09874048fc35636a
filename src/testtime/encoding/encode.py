"""Encoding: views of images encoded once into a feature store, for any number of replays."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from testtime.encoding.store import Features, save_features, write_index
from testtime.encoding.stream import Encoded, stream
from testtime.files.identity import digest, identity, stamp, weights
from testtime.types import Encoder, InputError, StoredImage, Task, ViewPlan

DTYPES = {"float16": torch.float16, "float32": torch.float32}
Report: TypeAlias = Callable[[str], None] | None
Progress: TypeAlias = Callable[[int], None] | None
RECIPE = 1  # version of views and features: incremented when the same images give other numbers, beyond rounding


class Streamed(Protocol):
    """From images to features, as `stream`: here, or on other machines."""

    def __call__(
        self, encoder: Encoder, images: Iterable[StoredImage], plan: ViewPlan, *, indices: Sequence[int]
    ) -> Iterable[Encoded]: ...


class _Done(NamedTuple):
    """A shard whose features are up to date."""

    kept: tuple[int, ...]  # positions of its images in the input
    current: bool  # whether labels, classes and prompts are up to date too


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
    on_skip: Report = None,
    progress: Progress = None,
    report: Report = None,
    streamed: Streamed = stream,
) -> int:
    """Write the features of images to a store, and return how many there are.

    `out` is one file, or with `shard`, a folder of files of that many images. The views of image i depend on (seed, i)
    alone; i counts every path given, readable or not. Labels are kept if every image has one. An image that cannot
    be read is reported to `on_skip` in one line; without it, the error is raised.

    With `resume`, finished shards of an earlier run of the same images are kept. A shard whose images have changed is
    encoded again and reported to `report`; one with other labels gets the new ones without encoding. Shards made with
    other settings are refused, and so are other classes or prompts, unless `retext` replaces them too.

    `streamed` encodes the images, in order and with the features of `stream`, maybe elsewhere.
    """
    if shard is not None and shard < 1:
        raise InputError(f"shard={shard}: a shard needs at least one image.")
    out, size = Path(out), shard or len(paths)
    known = torch.tensor(labels) if labels is not None and None not in labels else None
    made = made_with(encoder, plan, dtype, dataset)
    parts = [range(begin, min(begin + size, len(paths))) for begin in range(0, len(paths), size)]
    files = [out if shard is None else out / _shard_name(paths, part) for part in parts]
    contents = [_content(paths, part, plan) for part in parts]  # before reading: an image may be replaced meanwhile
    done: list[_Done | None] = [None] * len(parts)
    if resume and shard:
        for number, (file, part) in enumerate(zip(files, parts, strict=True)):
            done[number] = _find_done(file, made, contents[number], part, plan.total, task, known, retext, report)
    counts = [0 if ready is None else len(ready.kept) for ready in done]

    def write(number: int, kept: Sequence[int], features: Tensor) -> None:
        rows = list(kept)
        images, positions = json.dumps([str(paths[index]) for index in rows]), json.dumps(rows)
        save_features(
            files[number],
            features.cpu(),
            task.text,
            labels=None if known is None else known[rows],
            classnames=task.classnames,
            scale=task.scale,
            metadata=made | {"content": contents[number], "images": images, "positions": positions},
        )

    for number, ready in enumerate(done):
        if ready is not None and not ready.current:
            write(number, ready.kept, Features(files[number]).stored(0, len(ready.kept)))
    todo = [index for part, ready in zip(parts, done, strict=True) if ready is None for index in part]
    entries = streamed(encoder, (paths[i] for i in todo), plan, indices=todo)
    finished = len(paths) - len(todo)
    if progress and finished:
        progress(finished)
    with ThreadPoolExecutor(1, "testtime-write") as writer:  # the next images are encoded meanwhile
        writing: Future[object] = writer.submit(lambda: None)
        kept: list[int] = []
        features: list[Tensor] = []
        for entry in _readable(entries, on_skip, progress, finished):
            if entry.features is not None:
                kept.append(entry.index)
                features.append(entry.features.to(dtype))
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
        raise InputError(f"None of the {len(paths)} images could be read, so nothing is written to {out}.")
    if shard is not None:
        write_index(out, [file.name for file, count in zip(files, counts, strict=True) if count])
    return total


def made_with(encoder: Encoder, plan: ViewPlan, dtype: torch.dtype, dataset: str) -> dict[str, str]:
    """Everything that features depend on besides the images, as metadata of their file."""
    metadata = {
        "encoder": encoder.name,
        "weights": weights(encoder),
        "dataset": dataset,
        "seed": str(plan.seed),
        "augmix": str(plan.augmix).lower(),
        "dtype": str(dtype).removeprefix("torch."),
        "recipe": str(RECIPE),
    } | plan.metadata()
    # names that are not UTF-8 are written as they are shown
    return {key: value.encode(errors="backslashreplace").decode() for key, value in metadata.items()}


def _shard_name(paths: Sequence[StoredImage], part: range) -> str:
    """A shard's file name, with a digest of its paths: shards left by a run over other images are never reused."""
    return f"features-{part.start:08d}-{digest(str(paths[i]) for i in part)[:8]}.safetensors"


def _content(paths: Sequence[StoredImage], part: range, plan: ViewPlan) -> str:
    """A digest that identifies the content of a shard's images and of their ready-made variations."""
    found = [identity(paths[i]) for i in part]
    if (find := getattr(plan.variations, "find", None)) is not None:
        for i in part:
            try:
                found += [f"{file} {stamp(file)}" for file in find(str(paths[i]), plan.count - 1)]
            except InputError:  # reported when the image is read
                found.append("missing")
    return digest(found)


def _find_done(
    path: Path,
    made: dict[str, str],
    content: str,
    part: range,
    views: int,
    task: Task,
    known: Tensor | None,
    retext: bool,
    report: Report,
) -> _Done | None:
    """A finished shard, if it exists and its features are those of these images."""
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
            why = "has no record of its images" if before is None else "holds images that have changed"
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
    on_skip: Report = None,
    progress: Progress = None,
) -> tuple[Tensor, list[int]]:
    """Features (n, V, D) of the images that can be read, and their indices in `paths`.

    An image that cannot be read is reported to `on_skip` in one line; without it, the error is raised.
    """
    entries = _readable(stream(encoder, paths, plan), on_skip, progress)
    found = {entry.index: entry.features for entry in entries if entry.features is not None}
    if not found:
        raise InputError(f"None of the {len(paths)} images could be read.")
    return torch.stack(list(found.values())), list(found)


def _readable(entries: Iterable[Encoded], on_skip: Report, progress: Progress, finished: int = 0) -> Iterator[Encoded]:
    """All entries; errors are reported to `on_skip`, or raised without it. `finished` images were done before."""
    for number, entry in enumerate(entries, start=finished + 1):
        if entry.error is not None:
            if on_skip is None:
                raise entry.error
            on_skip(str(entry.error))
        if progress:
            progress(number)
        yield entry
