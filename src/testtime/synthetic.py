"""A small synthetic stream for examples and tests: no images, no encoder, the same numbers every time."""

from __future__ import annotations

import torch
from torch import Tensor

from testtime.ops import unit
from testtime.types import Task


def toy(
    classes: int = 8,
    dim: int = 32,
    images: int = 160,
    views: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Task, Tensor, Tensor]:
    """A task, a stream of views (N, V, D) and its labels (N,).

    Text prototypes share a direction, as those of CLIP do, and image features lie around shifted copies of
    them, so the frozen classifier is often wrong and there is something to learn.

    >>> task, stream, labels = toy(classes=5, images=10)
    >>> stream.shape, labels.shape, task.classnames[:2]
    (torch.Size([10, 4, 32]), torch.Size([10]), ('class 0', 'class 1'))
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shared = 1.5 * unit(normal(dim))
    text = unit(shared + unit(normal(classes, dim)))
    centres = text + 0.7 * unit(normal(classes, dim)) + 0.5 * unit(normal(dim))
    labels = torch.randint(classes, (images,), generator=generator)
    features = centres[labels] + 0.8 * unit(normal(images, dim))
    stream = features[:, None] + 0.6 * unit(normal(images, views, dim))
    stream[:, 0] = features  # row 0 is the image itself
    task = Task(unit(text).to(dtype), tuple(f"class {c}" for c in range(classes)))
    return task, unit(stream).to(dtype), labels
