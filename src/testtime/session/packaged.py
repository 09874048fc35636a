"""The stream that comes with the package: features of real photographs, for the demo and the service's tour."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import as_file, files
from typing import Any, NamedTuple

import torch
from torch import Tensor

from testtime.encoding.store import Features
from testtime.session.order import shuffled
from testtime.types import Task

SEED = 1  # of the stream's order; the released code's seed


class Stream(NamedTuple):
    """What the methods run over, in the order of the run."""

    task: Task
    views: Tensor  # (N, 1, D)
    labels: Tensor  # (N,)
    images: Sequence[Any]  # the photographs; empty if there are none to show


def demo_stream(images: Sequence[Any] = ()) -> Stream:
    """The packaged features with their photographs, in an order shuffled once."""
    with as_file(files("testtime") / "data" / "caltech101.safetensors") as path:
        store = Features(path)
        task, views, labels = store.task(), store.read(0, len(store)), store.labels
    if labels is None:
        raise RuntimeError("The packaged features have no labels.")
    order = shuffled(len(views), SEED)
    return Stream(task, views[order], labels[order], [images[i] for i in order.tolist()] if images else [])


def largest(stream: Stream, count: int) -> Stream:
    """The part of a stream with its `count` most frequent classes; ties go to the lower index."""
    task, labels = stream.task, stream.labels
    frequency = labels.bincount(minlength=task.classes)
    classes = frequency.argsort(descending=True, stable=True)[:count].sort().values
    names = tuple(task.classnames[c] for c in classes.tolist())
    inside = torch.isin(labels, classes)
    return Stream(
        Task(task.text[classes], names, task.scale, task.encoder),
        stream.views[inside],
        torch.searchsorted(classes, labels[inside]),
        [stream.images[i] for i in inside.nonzero()[:, 0].tolist()] if stream.images else [],
    )
