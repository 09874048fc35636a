"""Chunks of the input, and reading and decoding them in tasks of Ray Data: blocks of decoded images, in order.

A block is at most about `BLOCK` bytes, or one image, however many images a task reads; Ray starts no further tasks
while the blocks that wait fill its memory.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow

from testtime.errors import InputError
from testtime.images import reading
from testtime.stored import StoredImage

BLOCK = 2**26  # bytes of decoded images


class Decoded(NamedTuple):
    """One image of a block: its pixels (H, W, 3), or why there are none."""

    position: int  # in the input
    name: str
    pixels: np.ndarray
    error: str


Chunk: TypeAlias = list[tuple[int, StoredImage]]  # images with their positions in the input


def chunked(images: Iterable[StoredImage], indices: Iterable[int], size: int) -> Iterator[Chunk]:
    """Images in order, in chunks of those whose index // `size` is the same."""
    numbered = zip(indices, images, strict=True)
    return (list(group) for _, group in groupby(numbered, lambda entry: entry[0] // size))


def decoded_blocks(chunks: Iterable[Chunk], cpus: int, tasks: int | None) -> Iterator[Any]:
    """References to blocks of decoded images in order; a task, which reserves `cpus`, reads a chunk.

    At most so many `tasks` run at a time.
    """
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.ERROR)  # it logs the plan of every run
    rows = [
        {"index": [index for index, _ in chunk], "source": [pickle.dumps(image) for _, image in chunk]}
        for chunk in chunks
    ]
    # not from_arrow, which runs tasks of its own that need CPUs
    data = ray.data.from_items(rows, override_num_blocks=len(rows))
    data.context.enable_progress_bars = False
    data.context.execution_options.preserve_order = True
    data.context.target_max_block_size = BLOCK
    pool = ray.data.TaskPoolStrategy(size=tasks)
    decoded = data.map_batches(_decode, batch_size=None, batch_format="pyarrow", num_cpus=cpus, compute=pool)
    for bundle in decoded.iter_internal_ref_bundles():
        yield from bundle.block_refs


def _decode(rows: pyarrow.Table) -> Iterator[pyarrow.Table]:
    """Each image of a row of indices and sources decoded, as a table of its own; Ray joins them into blocks."""
    (chunk,) = rows.to_pylist()
    for index, stored in zip(chunk["index"], chunk["source"], strict=True):
        source = pickle.loads(stored)  # from the driver, by Ray's transport; never from a file
        extent, pixels, problem = (0, 0), b"", ""
        try:
            with reading.image_errors(reading.source_name(source), MemoryError):
                image = reading.read_image(source)
                extent, pixels = image.size, image.tobytes()
        except InputError as error:
            problem = str(error)
        texts = {"name": os.fsencode(str(source)), "error": os.fsencode(problem)}  # a name may not be UTF-8
        row = {"index": index, "width": extent[0], "height": extent[1], "pixels": pixels} | texts
        yield pyarrow.table({key: [value] for key, value in row.items()})


def images_of(block: pyarrow.Table) -> list[Decoded]:
    """The images of a block; their pixels are views of it."""
    found = []
    for row, pixels in zip(block.drop_columns("pixels").to_pylist(), block["pixels"], strict=True):
        flat = np.frombuffer(pixels.as_buffer(), dtype=np.uint8)
        name, error = os.fsdecode(row["name"]), os.fsdecode(row["error"])
        found.append(Decoded(row["index"], name, flat.reshape(row["height"], row["width"], 3), error))
    return found
