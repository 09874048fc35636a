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
from typing import NamedTuple

import torch
from torch import Tensor

from testtime import ops
from testtime.bank import Bank
from testtime.machine.capture import reason, warn_once
from testtime.methods.base import Nested, leaves
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
    "similarity": {"ROWS": 64, "COLUMNS": 64, "DEPTH": 64, "SPLIT": 1, "num_warps": 4, "num_stages": 3},
    "logit_gradient": {"ROWS": 2, "COLUMNS": 1024, "num_warps": 4},
    "pull": {"ROWS": 128, "COLUMNS": 128, "DEPTH": 32, "SPLIT": 2, "num_warps": 8, "num_stages": 4},
}
# overrides for few classes
SMALL: dict[str, dict[str, int]] = {
    "view_logits": {"CLASSES": 32},
    "choose": {"num_warps": 2},
    "rows": {"CELLS": 512, "num_warps": 1},
    "similarity": {"SPLIT": 1},
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


class Stacked(NamedTuple):
    """The states of S runs."""

    text: Tensor  # (S, C, D)
    updates: Tensor  # (S,)
    keys: Tensor  # (S, C, M, D)
    cost: Tensor  # (S, C, M)
    visual: Tensor  # (S, C, D)


def scratch_bytes(task: Task) -> int:
    """Bytes of a run's buffers beside its state, except those that depend on the number of views."""
    tall, wide, split = _round_up(task.classes, PAD), _round_up(task.dim, PAD), TILES["pull"]["SPLIT"]
    parts, pulls, moved = 2 * 2 * tall * wide * 2, 2 * split * tall * wide * 4, task.classes * task.dim * 4
    similarity = logit_gradients = tall * tall * 4
    return parts + pulls + moved + similarity + logit_gradients


class Kernels:
    """Steps of S methods side by side, for images with this many views: what `graph.Stepper` captures."""

    def __init__(self, methods: Sequence[DPE], task: Task, views: int) -> None:
        from testtime.steppers.gpu import dpe_alignment, dpe_kernels

        self.kernels, self.alignment = dpe_kernels, dpe_alignment
        self.method, self.runs = methods[0], len(methods)  # all agree with the first in `fast.DPE_TOGETHER`
        self.task = task
        state = self.state = Stacked(*map(torch.stack, zip(*(leaves(m.init(task)) for m in methods), strict=True)))
        self.answer = task.text.new_zeros(self.runs, task.classes)
        self.learned = torch.zeros(self.runs, dtype=torch.int32, device=task.text.device)
        self.count, self.keep = views, ops.kept(views, self.method.selection)
        numbers = fast.numbers(task, methods)
        self.numbers = task.text.new_tensor(list(zip(*numbers, strict=True)))  # (S, K)
        self.scale = float(task.scale)  # even if integral: Triton would recompile for an int
        self.pulled = self.method.steps > 0 and any(numbers.align_weight)
        self.evolves = any(numbers.evolves)
        classes, dim = task.text.shape
        self.tall, self.wide = _round_up(classes, PAD), _round_up(dim, PAD)
        self.shape = {"classes": classes, "dim": dim, "tall": self.tall, "wide": self.wide}
        # A fused multiply-add does not round the product: a logit minus itself would not be zero, and entropies wrong.
        self.tiles = {name: {**tile, "enable_fp_fusion": False} for name, tile in TILES.items()}
        self._fit_tiles()

        # each in its own allocation: Triton recompiles for pointers with a different alignment
        like, runs = task.text, self.runs
        counts = torch.zeros(runs, dtype=torch.int32, device=like.device)
        # derived from the state: see `refresh`
        self.text_length, self.visual_length = (like.new_ones(runs, classes) for _ in range(2))
        self.text_parts, self.visual_parts = (self._parts(self.wide) for _ in range(2))
        self.seen, self.stale = counts.clone(), counts.clone()
        # between kernels
        padded_views, tile = self.tiles["choose"]["VIEWS"], self.tiles["view_logits"]
        self.view_blocks = _ceil_div(classes, tile["CLASSES"])
        self.view_logits = like.new_empty(runs, padded_views, self.tall)
        self.view_summaries = like.new_empty(runs, 3, self.view_blocks, padded_views, dtype=torch.float64)
        self.parts = _ceil_div(max(classes, dim), self.tiles["choose"]["PART"])
        self.votes, self.labels = like.new_empty(runs, 2, self.parts), counts.new_empty(runs, self.parts)
        self.feature = like.new_empty(runs, dim)
        self.logit, self.boost = (like.new_empty(runs, classes) for _ in range(2))
        self.blocks = _ceil_div(classes, self.rows["ROWS"])
        self.summaries, self.answers = (like.new_empty(runs, 3, self.blocks, dtype=torch.float64) for _ in range(2))
        self.moved, self.moved_length = torch.empty_like(state.text), like.new_empty(runs, classes)
        self.updates_before = torch.zeros_like(state.updates)
        aligned = self.tall if self.pulled else 1  # unused then
        self.similarity = like.new_zeros(runs, self.tiles["similarity"]["SPLIT"], aligned, aligned)
        self.logit_gradients = self._parts(aligned)
        self.pulls = like.new_zeros(runs, 2, self.tiles["pull"]["SPLIT"], aligned, self.wide)
        self.refresh()

    def refresh(self) -> None:
        """Recompute what is derived from the state: lengths, directions in parts, the number of seen classes."""
        state = self.state
        with _device_context(self.task.text.device):
            for vectors, lengths, parts in (
                (state.text, self.text_length, self.text_parts),
                (state.visual, self.visual_length, self.visual_parts),
            ):
                self.kernels.normalise[(self.blocks, self.runs)](vectors, lengths, parts, **self.shape, **self.rows)
        self.seen.copy_((state.cost[:, :, 0] < torch.inf).sum(1))
        self.stale.fill_(1)

    def step(self, views: Tensor, logits: Tensor) -> None:
        with _device_context(views.device):
            self._choose(views)
            self._push()
            if self.pulled:
                self._pull()
            self._answer(views, logits)
            if self.evolves:
                self._evolve()

    def snapshot(self) -> list[State]:
        text, updates, keys, cost, visual = (part.clone() for part in self.state)
        return [State(text[run], updates[run], Bank(keys[run], cost[run]), visual[run]) for run in range(self.runs)]

    def restore(self, states: Sequence[Nested]) -> None:
        for target, values in zip(self.state, zip(*map(leaves, states), strict=True), strict=True):
            for run, value in enumerate(values):
                target[run].copy_(value)
        self.refresh()

    def _choose(self, views: Tensor) -> None:
        tile, shape = self.tiles["view_logits"], self.shape
        grid = self.view_blocks, self.view_logits.shape[1] // tile["VIEWS"], self.runs
        self.kernels.view_logits[grid](
            *(views, self.text_parts, self.view_logits, self.view_summaries),
            *(self.scale, self.count),
            **shape,
            **tile,
        )
        self.kernels.choose[(self.parts, self.runs)](
            *(views, self.view_logits, self.view_summaries, self.feature, self.logit, self.votes, self.labels),
            self.learned,
            *(self.view_blocks, self.count, self.keep, shape["classes"], shape["dim"], self.tall),
            **self.tiles["choose"],
        )

    def _push(self) -> None:
        state, slots = self.state, self.method.queue
        self.kernels.push[(self.blocks, self.runs)](
            *(self.feature, self.logit, self.votes, self.labels, state.keys, state.cost, state.visual),
            *(self.visual_length, self.visual_parts, self.boost, self.summaries, self.seen, self.stale, self.learned),
            *(self.numbers, self.parts),
            **self.shape,
            SLOTS=slots,
            SLOTS_ROUND=_next_power_of_two(slots),
            PARTS=_next_power_of_two(self.parts),
            **self.rows,
        )

    def _pull(self) -> None:
        classes, known = self.shape["classes"], (self.stale, self.numbers)
        tile = self.tiles["similarity"]
        grid = self.tall // tile["ROWS"], self.tall // tile["COLUMNS"], self.runs * tile["SPLIT"]
        self.alignment.similarity[grid](
            *(self.visual_parts, self.text_parts, self.similarity, *known, self.tall, self.wide),
            **tile,
        )
        self.alignment.logit_gradient[(_ceil_div(classes, self.tiles["logit_gradient"]["ROWS"]), self.runs)](
            *(self.similarity, self.state.cost, self.logit_gradients, *known, classes, self.tall),
            SLOTS=self.method.queue,
            SPLIT=tile["SPLIT"],
            **self.tiles["logit_gradient"],
        )
        tile = self.tiles["pull"]
        grid = self.tall // tile["ROWS"], self.wide // tile["COLUMNS"], self.runs * 2 * tile["SPLIT"]
        self.alignment.pull[grid](
            *(
                self.logit_gradients,
                self.text_parts,
                self.visual_parts,
                self.pulls,
                *known,
                classes,
                self.tall,
                self.wide,
            ),
            **tile,
        )

    def _answer(self, views: Tensor, out: Tensor) -> None:
        state = self.state
        self.kernels.answer[(self.blocks, self.runs)](
            *(views, state.text, self.text_length, state.visual, self.visual_length, state.cost),
            *(self.feature, self.logit, self.boost, self.summaries, self.pulls, self.moved, self.moved_length),
            *(out, self.answers, state.updates, self.updates_before, self.seen, self.stale),
            *(self.numbers, self.scale),
            **self.shape,
            SLOTS=self.method.queue,
            SPLIT=self.tiles["pull"]["SPLIT"],
            LEARNS=self.method.steps > 0,
            BLOCKS=_next_power_of_two(self.blocks),
            **self.rows,
        )

    def _evolve(self) -> None:
        state = self.state
        self.kernels.evolve[(self.blocks, self.runs)](
            *(state.text, self.text_length, self.text_parts, self.moved, self.moved_length, self.answers),
            *(state.updates, self.updates_before, self.stale, self.learned, self.numbers),
            **self.shape,
            BLOCKS=_next_power_of_two(self.blocks),
            **self.rows,
        )

    def _fit_tiles(self) -> None:
        """Fit the tiles to the shape of the task."""
        tiles, classes, dim = self.tiles, self.shape["classes"], self.shape["dim"]
        tiles["choose"]["VIEWS"] = max(16, _next_power_of_two(self.count))
        tiles["view_logits"]["VIEWS"] = min(tiles["view_logits"]["VIEWS"], tiles["choose"]["VIEWS"])
        if classes < SMALL_BELOW:
            for name, tile in SMALL.items():
                tiles[name].update(tile)
        rows = tiles["rows"]
        columns = _next_power_of_two(dim)
        self.rows = {"ROWS": max(1, rows.pop("CELLS") // columns), "DIM": columns, **rows}
        tiles["logit_gradient"]["COLUMNS"] = min(tiles["logit_gradient"]["COLUMNS"], _next_power_of_two(classes))
        for name, sides in (("similarity", (self.tall, self.tall)), ("pull", (self.tall, 2 * self.wide))):
            tile = tiles[name]
            if (sides[0] // tile["ROWS"]) * (sides[1] // tile["COLUMNS"]) > ENOUGH_PROGRAMS:
                tile["SPLIT"] = 1
            tile["num_stages"] = min(tile["num_stages"], _stages(tile, _shared_memory(self.task.text.device)))

    def _parts(self, wide: int) -> Tensor:
        """A zeroed buffer for half-precision parts of vectors: (S, 2, tall, wide); beyond C and D it stays zero."""
        return torch.zeros(self.runs, 2, self.tall, wide, dtype=torch.float16, device=self.task.text.device)


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
