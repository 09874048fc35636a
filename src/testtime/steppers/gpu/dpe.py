"""DPE's step on a GPU as eight Triton kernels: the state is updated in place, and nothing is read back.

A launch is for S runs side by side with different settings: a single run leaves most of a GPU idle. The settings are
read from a table, and no tile or argument depends on S, so a run gives bit for bit the same results as alone.

Optimisations over `methods.dpe`, which reads like the paper:

- a step is a few kernels, each of which does as much as possible before programs must synchronise;
- lengths of prototypes, and their directions in half-precision parts, are cached beside the state: a queue that accepts
  an image changes one row of them;
- the pull of the alignment loss, three C x C x D products, depends only on the prototypes. Its kernels return at once
  if no prototype has changed since they last ran: exact, not approximate.

The kernels are in `dpe_kernels` and `dpe_alignment`. Cached values depend only on the state, and are computed by the
same arithmetic everywhere, so a run that is saved and loaded continues as if uninterrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from testtime import ops
from testtime.bank import Bank
from testtime.machine.capture import reason, warn_once
from testtime.methods.base import leaves
from testtime.methods.dpe import DPE, State
from testtime.steppers import fast
from testtime.steppers.gpu import graph
from testtime.types import Task

MOST_VIEWS = 256  # every pair is compared in one program
MOST_CLASSES = 2**15  # beyond, an index into a C x C matrix exceeds 32 bits
MOST_RUNS = 2**13  # limit of a grid's last axis, with several layers per run
PAD = 128  # sides of padded buffers are multiples of it: the largest tile and split depth of a product
SMALL_BELOW = 512  # classes; below, products have small tiles, for more programs
ENOUGH_PROGRAMS = 96  # above, sums are not split: about as many as a GPU has multiprocessors

# Tile sizes of each kernel, powers of two, and compiler options. Tiles of rows hold CELLS numbers.
TILES: dict[str, dict[str, int]] = {
    "view_logits": {"VIEWS": 32, "CLASSES": 16, "DEPTH": 128, "num_warps": 4, "num_stages": 3},
    "choose": {"PART": 128, "num_warps": 4},
    "rows": {"CELLS": 2048, "num_warps": 4},  # normalise, push, answer and evolve
    "similarity": {"ROWS": 64, "COLUMNS": 64, "DEPTH": 64, "num_warps": 4, "num_stages": 3},
    "logit_gradient": {"ROWS": 2, "COLUMNS": 1024, "num_warps": 4},
    "pull": {"ROWS": 128, "COLUMNS": 128, "DEPTH": 32, "SPLIT": 2, "num_warps": 8, "num_stages": 4},
}
# overrides for few classes
SMALL: dict[str, dict[str, int]] = {
    "view_logits": {"CLASSES": 32},
    "choose": {"num_warps": 2},
    "rows": {"CELLS": 512, "num_warps": 1},
    "logit_gradient": {"ROWS": 8},
    "pull": {"ROWS": 64, "SPLIT": 1, "num_warps": 4, "num_stages": 2},
}


def fits(task: Task) -> bool:
    """Whether the kernels support a task's shape and precision."""
    return task.text.dtype == torch.float32 and task.classes <= MOST_CLASSES


class Stepper(graph.Stepper):
    """S runs of DPE over one stream by custom kernels, captured; see `steppers.Stepper`."""

    def _make_body(self, views: int) -> graph.Body:
        if views <= MOST_VIEWS and len(self.methods) <= MOST_RUNS:
            try:
                body = Kernels(self.methods, self.task, views)  # type: ignore[arg-type]
                body.step(self._views[0], torch.empty_like(body.answer))  # compiles them
                return body
            except Exception as error:  # a compiler fails in many ways, and memory for buffers may run out
                warn_once(
                    f"The kernels of '{self.name}' cannot be launched; it runs slower without them ({reason(error)})."
                )
        return super()._make_body(views)


def scratch_bytes(task: Task) -> int:
    """Bytes of a run's buffers beside its state, except those that depend on the number of views."""
    tall, wide, split = _round_up(task.classes, PAD), _round_up(task.dim, PAD), TILES["pull"]["SPLIT"]
    parts, pulls, moved = 2 * 2 * tall * wide * 2, 2 * split * tall * wide * 4, task.classes * task.dim * 4
    similarity = logit_gradients = tall * tall * 4
    return parts + pulls + moved + similarity + logit_gradients


class Kernels:
    """Steps of S methods side by side, for images with this many views: what `graph.Stepper` captures.

    The arguments of a kernel are the attributes of the same names; an attribute with a shape is a buffer for all runs.
    """

    def __init__(self, methods: Sequence[DPE], task: Task, views: int) -> None:
        from testtime.steppers.gpu import dpe_alignment, dpe_kernels

        self.kernels, self.alignment = dpe_kernels, dpe_alignment
        method, like, runs = methods[0], task.text, len(methods)  # all agree with the first in `fast.DPE_GROUP_BY`
        numbers = [fast.numbers(task, method) for method in methods]
        self.numbers = like.new_tensor(numbers)  # (S, K)
        self.pulled = method.steps > 0 and any(row.align_weight for row in numbers)
        self.evolves = any(row.evolves for row in numbers)
        self.scale = float(task.scale)  # even if integral: Triton would recompile for an int
        self.count, self.keep = views, ops.kept(views, method.selection)
        self.classes, self.dim = classes, dim = like.shape
        self.tall, self.wide = tall, wide = _round_up(classes, PAD), _round_up(dim, PAD)
        self.tiles = tiles = _fit_tiles(classes, dim, views, _shared_memory(like.device))
        self.view_blocks = _ceil_div(classes, tiles["view_logits"]["CLASSES"])
        self.parts = _ceil_div(max(classes, dim), tiles["choose"]["PART"])
        self.blocks, padded_views = _ceil_div(classes, tiles["rows"]["ROWS"]), tiles["choose"]["VIEWS"]
        views_tile, pair, pull = tiles["view_logits"], tiles["similarity"], tiles["pull"]
        self.grids = {
            "view_logits": (self.view_blocks, padded_views // views_tile["VIEWS"], runs),
            "choose": (self.parts, runs),
            "rows": (self.blocks, runs),
            "similarity": (tall // pair["ROWS"], tall // pair["COLUMNS"], runs),
            "logit_gradient": (_ceil_div(classes, tiles["logit_gradient"]["ROWS"]), runs),
            "pull": (tall // pull["ROWS"], wide // pull["COLUMNS"], runs * 2 * pull["SPLIT"]),
        }
        self.constants = {
            "SLOTS": method.queue,
            "SLOTS_ROUND": _next_power_of_two(method.queue),
            "PARTS": _next_power_of_two(self.parts),
            "BLOCKS": _next_power_of_two(self.blocks),
            "SPLIT": pull["SPLIT"],
            "LEARNS": method.steps > 0,
        }

        def halves(columns: int) -> Tensor:
            """Half-precision parts of vectors (S, 2, tall, columns), zero beyond C and D."""
            return torch.zeros(runs, 2, tall, columns, dtype=torch.float16, device=like.device)

        # each in its own allocation: Triton recompiles for pointers with a different alignment
        starts = map(torch.stack, zip(*(leaves(method.init(task)) for method in methods), strict=True))
        self.text, self.updates, self.keys, self.cost, self.visual = starts
        states = zip(self.text, self.updates, map(Bank, self.keys, self.cost), self.visual, strict=True)
        self.states = tuple(State(*state) for state in states)
        # derived from the states: see `refresh`
        self.text_lengths, self.visual_lengths = (like.new_ones(runs, classes) for _ in range(2))
        self.text_parts, self.visual_parts = (halves(wide) for _ in range(2))
        self.seen, self.stale, self.learned = (like.new_zeros(runs, dtype=torch.int32) for _ in range(3))
        # between kernels
        self.view_logits = like.new_empty(runs, padded_views, tall)
        self.view_summaries = like.new_empty(runs, 3, self.view_blocks, padded_views, dtype=torch.float64)
        self.votes, self.labels = like.new_empty(runs, 2, self.parts), self.seen.new_empty(runs, self.parts)
        self.feature = like.new_empty(runs, dim)
        self.logit, self.boosts, self.moved_lengths, self.answer = (like.new_zeros(runs, classes) for _ in range(4))
        self.summaries, self.answers = (like.new_empty(runs, 3, self.blocks, dtype=torch.float64) for _ in range(2))
        self.moved, self.updates_before = torch.empty_like(self.text), torch.zeros_like(self.updates)
        aligned = tall if self.pulled else 1  # unused then
        self.similarities, self.logit_gradients = like.new_zeros(runs, aligned, aligned), halves(aligned)
        self.pulls = like.new_zeros(runs, 2, pull["SPLIT"], aligned, wide)
        self.refresh()

    def refresh(self) -> None:
        """Recompute what is derived from the states: lengths, directions in parts, the number of seen classes."""
        for side in ("text", "visual"):
            vectors, lengths, parts = (getattr(self, side + part) for part in ("", "_lengths", "_parts"))
            self._launch(self.kernels.normalise, "rows", vectors=vectors, lengths=lengths, parts=parts)
        self.seen.copy_((self.cost[:, :, 0] < torch.inf).sum(1))
        self.stale.fill_(1)

    def step(self, views: Tensor, logits: Tensor) -> None:
        kernels, alignment = self.kernels, self.alignment
        self._launch(kernels.view_logits, "view_logits", views=views)
        self._launch(kernels.choose, "choose", views=views)
        self._launch(kernels.push, "rows")
        if self.pulled:
            self._launch(alignment.similarity, "similarity")
            self._launch(alignment.logit_gradient, "logit_gradient")
            self._launch(alignment.pull, "pull")
        self._launch(kernels.answer, "rows", views=views, logits=logits)
        if self.evolves:
            self._launch(kernels.evolve, "rows")

    def _launch(self, kernel: Any, name: str, **arguments: Tensor) -> None:
        """Launch a kernel with the grid and tile of this name."""
        known = vars(self) | self.constants | arguments
        named = {each: known[each] for each in signature(kernel.fn).parameters if each in known}
        with _device_context(self.text.device):
            kernel[self.grids[name]](**named | self.tiles[name])


def _fit_tiles(classes: int, dim: int, views: int, shared_memory: int) -> dict[str, dict[str, int]]:
    """Tiles that fit the shape of a task."""
    # A fused multiply-add does not round the product: a logit minus itself would not be zero, and entropies wrong.
    few = SMALL if classes < SMALL_BELOW else {}
    tiles = {name: {**tile, **few.get(name, {}), "enable_fp_fusion": False} for name, tile in TILES.items()}
    tiles["choose"]["VIEWS"] = max(16, _next_power_of_two(views))
    tiles["view_logits"]["VIEWS"] = min(tiles["view_logits"]["VIEWS"], tiles["choose"]["VIEWS"])
    rows, columns = tiles["rows"], _next_power_of_two(dim)
    rows |= {"ROWS": max(1, rows.pop("CELLS") // columns), "DIM": columns}
    tiles["logit_gradient"]["COLUMNS"] = min(tiles["logit_gradient"]["COLUMNS"], _next_power_of_two(classes))
    pull = tiles["pull"]
    for tile in (tiles["similarity"], pull):
        tile["num_stages"] = min(tile["num_stages"], _stages(tile, shared_memory))
    if (_round_up(classes, PAD) // pull["ROWS"]) * (2 * _round_up(dim, PAD) // pull["COLUMNS"]) > ENOUGH_PROGRAMS:
        pull["SPLIT"] = 1
    return tiles


def _device_context(device: torch.device) -> AbstractContextManager[object]:
    """A context that launches kernels on this device; the CPU is for Triton's interpreter."""
    return torch.cuda.device(device) if device.type == "cuda" else torch.no_grad()


def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory per block."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 2**17


def _stages(tile: dict[str, int], shared_memory: int) -> int:
    """How many pipeline stages, with tiles of both factors in two half-precision parts each, fit in shared memory."""
    return max(1, shared_memory // (2 * 2 * (tile["ROWS"] + tile["COLUMNS"]) * tile["DEPTH"]))


def _ceil_div(count: int, size: int) -> int:
    """count / size, rounded up."""
    return -(-count // size)


def _round_up(count: int, size: int) -> int:
    """The next multiple of `size`."""
    return _ceil_div(count, size) * size


def _next_power_of_two(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()
