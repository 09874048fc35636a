"""Encoding: views of images through an encoder into a feature store, once, for any number of replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from testtime.features import save_features, write_index
from testtime.images import read_image
from testtime.types import Encoder, ImageError, InputError, Task
from testtime.views import views as make_views

DTYPES = {"float16": torch.float16, "float32": torch.float32}


def encode_views(
    encoder: Encoder, images: Sequence[Any], indices: Sequence[int], *, views: int, seed: int, augmix: bool
) -> Tensor:
    """Features (n, V, D) of Pillow images, the views of each seeded by (seed, its index in the stream)."""
    pixels = [
        make_views(image, views, encoder.preprocess, seed=seed, index=index, augmix=augmix)
        for image, index in zip(images, indices, strict=True)
    ]
    return encoder.encode_images(torch.cat(pixels)).unflatten(0, (len(images), views))


def encode(
    encoder: Encoder,
    task: Task,
    paths: Sequence[Path],
    out: str | Path,
    *,
    labels: Sequence[int | None] | None = None,
    views: int = 1,
    augmix: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float16,
    shard: int | None = None,
    dataset: str = "",
    batch: int = 32,
    on_skip: Callable[[str], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Write the features of images to a store, and return how many there are.

    `out` is one file, or, with `shard` images to each, a folder of them. The views of image i depend on (seed, i)
    alone, i counting every path given, readable or not. Labels are kept where every image has one. An image that
    cannot be read goes to `on_skip` as one line; without it, the error is raised.
    """
    if shard is not None and shard < 1:
        raise InputError(f"shard={shard}: at least one image to a shard.")
    out = Path(out)
    known = torch.tensor(labels) if labels is not None and None not in labels else None
    facts = {"encoder": encoder.name, "dataset": dataset, "seed": str(seed), "augmix": str(augmix).lower()}
    names: list[str] = []
    features: list[Tensor] = []
    kept: list[int] = []
    total = 0

    def flush() -> None:
        names.append(f"features-{len(names):05d}.safetensors")
        save_features(
            out if shard is None else out / names[-1],
            torch.cat(features).to(dtype),
            task.text,
            labels=None if known is None else known[kept],
            classnames=task.classnames,
            scale=task.scale,
            metadata=facts,
        )
        features.clear()
        kept.clear()

    def readable(start: int) -> Iterator[tuple[int, Any]]:
        for index in range(start, min(start + batch, len(paths))):
            try:
                yield index, read_image(paths[index])
            except ImageError as error:
                if on_skip is None:
                    raise
                on_skip(str(error))

    for start in range(0, len(paths), batch):
        good = list(readable(start))
        if good:
            indices, images = zip(*good, strict=True)
            features.append(encode_views(encoder, images, indices, views=views, seed=seed, augmix=augmix).cpu())
            kept.extend(indices)
            total += len(good)
        if shard is not None and len(kept) >= shard:
            flush()
        if progress:
            progress(min(start + batch, len(paths)))
    if total == 0:
        raise InputError(f"None of the {len(paths)} images could be read, so there is nothing to write to {out}.")
    if kept:
        flush()
    if shard is not None:
        write_index(out, names)
    return total
