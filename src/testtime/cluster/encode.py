"""Encoding on Ray: a pool of workers encodes images, and the features come back in the order of the input.

    images -> read and decode (tasks of Ray Data) -> views and encoder (workers, each with a GPU) -> features
    images -> read, decode, views and encoder (workers, each with CPUs) -> features

Without GPUs the workers have all CPUs, and reading is little beside encoding: to read in other processes would only
move pixels from one to the next.

It takes the place of `encoding.stream.stream`, which each worker runs on its part: the features of an image depend on
the image, the seed and its index alone, so they are the same bits with any number of workers. Everything else (shards,
what is finished, the index) is `encoding.encode`, on the machine of the command.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from testtime.cluster.decoding import chunked, decoded_blocks, images_of
from testtime.cluster.planning import TASK_VIEWS
from testtime.cluster.pool import Pool
from testtime.encoding.encoders import load_encoder
from testtime.encoding.stream import MAX_IMAGES, Encoded, stream
from testtime.errors import ImageError, InputError, MissingPart
from testtime.images.diffusion import open_variations
from testtime.types import Encoder, StoredImage, ViewPlan

TASKS = 4  # such tasks per worker, at least
DEVICES = ("auto", "cpu", "cuda")


class Place(NamedTuple):
    """Where to encode: how many workers, on which device, and what each has for itself."""

    workers: int
    device: str
    cpus: int
    gpus: int


class Block(NamedTuple):
    """The features of the readable images of a block (n, V, D), their indices, and the errors of the others."""

    kept: list[int]
    features: np.ndarray
    errors: dict[int, str]


class Worker:
    """An encoder in a process of its own."""

    def __init__(self, encoder: str, plan: ViewPlan, variations: str | None, dtype: torch.dtype, place: Place) -> None:
        self.name, self.plan, self.variations, self.dtype, self.place = encoder, plan, variations, dtype, place

    def start(self) -> None:
        """Load the encoder; not in `__init__`, whose errors Ray reports as a death."""
        self.encoder = load_encoder(self.name, self.place.device)
        if self.variations is not None:
            self.plan = replace(self.plan, variations=open_variations(self.variations, self.encoder.device))

    def work(self, piece: Any) -> Block:
        """The features of a chunk of the input, or of a block of decoded images."""
        torch.set_num_threads(self.place.cpus)  # for each of the threads in which Ray calls
        images, errors = (piece, {}) if isinstance(piece, list) else _decoded(piece)
        kept, features = [], []
        indices = [index for index, _ in images]
        for entry in stream(self.encoder, (image for _, image in images), self.plan, indices=indices):
            if entry.features is None:
                errors[entry.index] = str(entry.error)
            else:
                kept.append(entry.index)
                features.append(entry.features.to(self.dtype).cpu())
        return Block(kept, torch.stack(features).numpy() if features else np.empty(0), errors)


def _decoded(block: Any) -> tuple[list[tuple[int, Image.Image]], dict[int, str]]:
    """The images of a block with their positions, and by position the errors of those that could not be read."""
    images = images_of(block)
    readable = [(image.position, _named(image.pixels, image.name)) for image in images if not image.error]
    return readable, {image.position: image.error for image in images if image.error}


def _named(pixels: np.ndarray, name: str) -> Image.Image:
    """A Pillow image that knows its path, by which its variations are found."""
    image = Image.fromarray(pixels)
    image.info["path"] = name
    return image


@dataclass(frozen=True)
class RayStream:
    """`encoding.stream.stream` on the Ray cluster that this process is connected to.

    The features are returned in `dtype`. By default there is a worker for each GPU, or else for each machine, and
    tasks read where workers have GPUs.
    """

    device: str = "auto"  # of the workers
    workers: int | None = None
    dtype: torch.dtype = torch.float32
    tasks: bool | None = None  # whether tasks of Ray Data read and decode, or workers do

    def __call__(
        self, encoder: Encoder, images: Iterable[StoredImage], plan: ViewPlan, *, indices: Sequence[int]
    ) -> Iterator[Encoded]:
        """The features of each image, in order."""
        import ray

        place = placed(self.device, self.workers, [node["Resources"] for node in ray.nodes() if node["Alive"]])
        actor = ray.remote(Worker).options(
            num_cpus=place.cpus, num_gpus=place.gpus, max_restarts=0, max_concurrency=2, scheduling_strategy="SPREAD"
        )
        variations = plan.metadata().get("variations")  # opened again by each worker
        sent = encoder.name, replace(plan, variations=None), variations, self.dtype, place
        sources = list(images)
        numbered = zip(indices, sources, strict=True)
        pieces: Iterator[Any] = chunked(sources, indices, _chunk(len(sources), plan, place))
        if self.tasks or (self.tasks is None and place.gpus):
            # where workers have all CPUs, tasks must do with none of their own
            pieces = decoded_blocks(pieces, *((1, None) if place.gpus else (0, place.workers)))
        pool = Pool(lambda: actor.remote(*sent), place.workers)
        try:
            for block in pool.map(pieces):
                rows = dict(zip(block.kept, torch.from_numpy(block.features.copy()), strict=True))
                for index in sorted(rows.keys() | block.errors.keys()):
                    expected, source = next(numbered)
                    if index != expected:
                        raise RuntimeError(f"Ray returned image {index} in place of image {expected}.")
                    error = ImageError(block.errors[index]) if index in block.errors else None
                    yield Encoded(index, source, rows.get(index), error)
        finally:
            pool.close()


def placed(device: str, workers: int | None, machines: Sequence[dict[str, float]]) -> Place:
    """Where to encode on machines with these resources; as many workers as asked for, with all the CPUs they can have.

    >>> placed("auto", None, [{"CPU": 8.0}, {"CPU": 8.0}])
    Place(workers=2, device='cpu', cpus=8, gpus=0)
    >>> placed("auto", 4, [{"CPU": 8.0}, {"CPU": 8.0}])
    Place(workers=4, device='cpu', cpus=4, gpus=0)
    >>> placed("auto", None, [{"CPU": 16.0, "GPU": 4.0}, {"CPU": 8.0}])
    Place(workers=4, device='cuda', cpus=1, gpus=1)
    """
    if device not in DEVICES:
        raise InputError(f"--device {device}: on Ray, write {', '.join(DEVICES)}; Ray chooses the GPU of a worker.")
    if workers is not None and workers < 1:
        raise InputError(f"--workers {workers}: must be 1 or more.")
    cpus = [int(machine.get("CPU", 0)) for machine in machines]
    gpus = int(sum(machine.get("GPU", 0) for machine in machines))
    if device == "cuda" and not gpus:
        raise MissingPart("--device cuda: no machine of the Ray cluster has a GPU; use --device cpu.")
    if gpus and device != "cpu":
        if (workers or 1) > gpus:
            raise InputError(f"--workers {workers}: the Ray cluster has {gpus} GPUs, and a worker takes one.")
        return Place(workers or gpus, "cuda", 1, 1)
    wanted = workers or max(1, sum(count > 0 for count in cpus))
    if wanted > sum(cpus):
        raise InputError(f"--workers {wanted}: the Ray cluster has {sum(cpus)} CPUs, and a worker takes one or more.")
    share = max(each for each in range(1, max(cpus) + 1) if sum(count // each for count in cpus) >= wanted)
    return Place(wanted, "cpu", share, 0)


def _chunk(images: int, plan: ViewPlan, place: Place) -> int:
    """How many images a task reads: a multiple of those that a GPU encodes together.

    For CPUs, as few as keep them busy: two chunks are in work at a time, and an image of one view occupies one CPU.
    """
    most = min(TASK_VIEWS // plan.total, images // (TASKS * place.workers)) if place.gpus else place.cpus
    return MAX_IMAGES * max(1, most // MAX_IMAGES)
