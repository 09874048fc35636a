"""Encoding: views of images through an encoder into a feature store, once, for any number of replays."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from testtime.features import Features, save_features, write_index
from testtime.images import read_image
from testtime.types import Encoder, ImageError, InputError, StoredImage, Task
from testtime.views import views as make_views

if TYPE_CHECKING:
    from testtime.diffusion import Variations

AT_ONCE = 64  # views that are made and encoded together: thousands would take more memory than a machine has

DTYPES = {"float16": torch.float16, "float32": torch.float32}


def encode_views(
    encoder: Encoder,
    images: Sequence[Any],
    indices: Sequence[int],
    *,
    views: int,
    seed: int,
    augmix: bool,
    variations: Variations | None = None,
) -> Tensor:
    """Features (n, V, D) of Pillow images, the views of each seeded by (seed, its index in the stream).

    With `variations`, as many of them follow as there are crops, so that V is 2 * views - 1.
    """
    if variations is not None:
        from testtime.diffusion import diffusion_views

        counts = {"crops": views - 1, "count": views - 1}
        pairs = zip(images, indices, strict=True)
        return torch.stack(
            [
                diffusion_views(encoder, image, variations, seed=seed, index=index, augmix=augmix, **counts)
                for image, index in pairs
            ]
        )
    features = []
    for start in range(0, len(images), _together(views)):
        part = slice(start, start + _together(views))
        pixels = [
            make_views(image, views, encoder.preprocess, seed=seed, index=index, augmix=augmix)
            for image, index in zip(images[part], indices[part], strict=True)
        ]
        features += [encoder.encode_images(some) for some in torch.cat(pixels).split(AT_ONCE)]
    return torch.cat(features).unflatten(0, (len(images), views))


def _together(views: int) -> int:
    """How many images of so many views each are encoded together."""
    return max(1, AT_ONCE // views)


def encode(
    encoder: Encoder,
    task: Task,
    paths: Sequence[StoredImage],
    out: str | Path,
    *,
    labels: Sequence[int | None] | None = None,
    views: int = 1,
    augmix: bool = False,
    variations: Variations | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float16,
    shard: int | None = None,
    dataset: str = "",
    batch: int = 32,
    resume: bool = False,
    on_skip: Callable[[str], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Write the features of images to a store, and return how many there are.

    `out` is one file, or, with `shard` images to each, a folder of them. The views of image i depend on (seed, i)
    alone, i counting every path given, readable or not. Labels are kept where every image has one. An image that
    cannot be read goes to `on_skip` as one line; without it, the error is raised. `variations` add as many views as
    there are crops. With `resume`, shards that an
    interrupted run of the same images has finished are kept.
    """
    if shard is not None and shard < 1:
        raise InputError(f"shard={shard}: at least one image to a shard.")
    out = Path(out)
    known = torch.tensor(labels) if labels is not None and None not in labels else None
    facts = {"encoder": encoder.name, "dataset": dataset, "seed": str(seed), "augmix": str(augmix).lower()}
    stored_views = views
    if variations is not None:
        facts["variations"], stored_views = getattr(variations, "name", "own"), 2 * views - 1
    total, names = 0, []
    for begin in range(0, len(paths), shard or len(paths)):
        part = range(begin, min(begin + (shard or len(paths)), len(paths)))
        # the name says which images, so a shard left by another run over other images is never taken for ours
        mark = hashlib.sha256("\n".join(str(paths[i]) for i in part).encode()).hexdigest()[:8]
        name = f"features-{begin:08d}-{mark}.safetensors"
        path = out if shard is None else out / name
        if resume and shard is not None and (count := _finished(path, facts, stored_views, task)) is not None:
            total += count
            if progress:
                progress(part.stop)
        else:
            looks: dict[str, Any] = dict(views=views, seed=seed, augmix=augmix, variations=variations)
            features, kept = _encode_part(encoder, paths, part, looks, batch, on_skip, progress)
            count = len(kept)
            total += count
            if kept:
                save_features(
                    path,
                    features.to(dtype),
                    task.text,
                    labels=None if known is None else known[kept],
                    classnames=task.classnames,
                    scale=task.scale,
                    metadata=facts | {"images": json.dumps([str(paths[index]) for index in kept])},
                )
        if count:
            names.append(name)
    if total == 0:
        raise InputError(f"None of the {len(paths)} images could be read, so there is nothing to write to {out}.")
    if shard is not None:
        write_index(out, names)
    return total


def _encode_part(
    encoder: Encoder,
    paths: Sequence[StoredImage],
    part: range,
    looks: dict[str, Any],
    batch: int,
    on_skip: Callable[[str], None] | None,
    progress: Callable[[int], None] | None,
) -> tuple[Tensor, list[int]]:
    """Features (n, V, D) of the readable images of a part, and their indices; `looks` go to `encode_views`."""
    features: list[Tensor] = []
    kept: list[int] = []
    batch = min(batch, _together(looks["views"]))  # so that progress is told as it is made
    for start in part[::batch]:
        indices: list[int] = []
        images: list[Any] = []
        for index in range(start, min(start + batch, part.stop)):
            try:
                images.append(read_image(paths[index]))
                indices.append(index)
            except ImageError as error:
                if on_skip is None:
                    raise
                on_skip(str(error))
        if images:
            features.append(encode_views(encoder, images, indices, **looks).cpu())
            kept.extend(indices)
        if progress:
            progress(min(start + batch, part.stop))
    return torch.cat(features) if features else torch.empty(0), kept


def _finished(path: Path, facts: dict[str, str], views: int, task: Task) -> int | None:
    """How many images a finished shard holds, if it is there and was made with the same things."""
    if not path.exists():
        return None
    store = Features(path)
    same = all(store.metadata.get(key) == value for key, value in facts.items()) and store.views == views
    if not (same and store.classnames == task.classnames and torch.equal(store.text, task.text.cpu())):
        raise InputError(f"{path} was made with other settings, classes or prompts; remove it, or write elsewhere.")
    return len(store)
