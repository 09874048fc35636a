"""Triton kernels of `testtime.steppers.gpu.dpe`: the gradient of DPE's alignment by the prototypes, in three launches.

Three products of C x C x D. The result depends only on the prototypes, so the kernels return at once unless it is
`stale`, and in runs without alignment. The sums of a pull may be split in SPLIT parts, for more programs; readers of
the result add them up. The last axis of its launch counts these parts as well as runs.
"""

# Triton reads the annotations of kernels itself, and knows only its own
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from testtime.steppers.gpu.dpe_kernels import ALIGN_WEIGHT, HALF_SCALE, LOWEST, SHARPNESS, number, product, store_parts


@triton.jit
def _up_to_date(stale, numbers, run):
    """Whether there is nothing to compute for a run."""
    return (tl.load(stale + run) == 0) | (number(numbers, run, ALIGN_WEIGHT) == 0)


@triton.jit
def similarity(
    visual_parts, text_parts, similarities, stale, numbers, tall, wide,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A tile of the cosines (tall, tall) of visual and text prototypes."""
    run = tl.program_id(2).to(tl.int64)
    if _up_to_date(stale, numbers, run):
        return
    visual_parts, text_parts = visual_parts + run * 2 * tall * wide, text_parts + run * 2 * tall * wide
    out = similarities + run * tall * tall
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    a = visual_parts + rows[:, None] * wide + depth[None, :]
    b = text_parts + columns[None, :] * wide + depth[:, None]
    small = tall * wide
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for _ in range(0, wide, DEPTH):
        total = product(tl.load(a), tl.load(a + small), tl.load(b), tl.load(b + small), total)
        a += DEPTH
        b += DEPTH
    tl.store(out + rows[:, None] * tall + columns[None, :], total / (HALF_SCALE * HALF_SCALE))


@triton.jit
def logit_gradient(
    similarities, cost, logit_gradients, stale, numbers, classes, tall,
    SLOTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The softmax of some rows of similarities over seen classes, minus the identity, in parts (2, tall, tall)."""
    run = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)  # backwards
    if _up_to_date(stale, numbers, run):
        return
    similarities, logit_gradients = similarities + run * tall * tall, logit_gradients + run * 2 * tall * tall
    cost, sharpness = cost + run * classes * SLOTS, number(numbers, run, SHARPNESS)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    top = tl.full([ROWS], LOWEST, dtype=tl.float32)
    others, own = tl.zeros([ROWS], dtype=tl.float32), tl.zeros([ROWS], dtype=tl.float32)
    for start in range(0, tall, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        value = _similarities(similarities, cost, rows, columns, sharpness, classes, tall, SLOTS)
        diagonal = rows[:, None] == columns[None, :]
        highest = tl.maximum(top, tl.max(value, 1))
        prob = tl.exp(value - highest[:, None])
        others = others * tl.exp(top - highest) + tl.sum(tl.where(diagonal, 0.0, prob), 1)
        own = own * tl.exp(top - highest) + tl.sum(tl.where(diagonal, prob, 0.0), 1)
        top = highest
    total = others + own
    for start in range(0, tall, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        value = _similarities(similarities, cost, rows, columns, sharpness, classes, tall, SLOTS)
        diagonal = rows[:, None] == columns[None, :]
        # the own probability minus 1 is minus the sum of the others: exact to the last digit, even if that is small
        prob = tl.where(diagonal, -others[:, None], tl.exp(value - top[:, None])) / total[:, None]
        mask = (rows < classes)[:, None] & (columns < tall)[None, :]
        store_parts(logit_gradients, tall, tall, rows, columns, prob, mask)


@triton.jit
def _similarities(similarities, cost, rows, columns, sharpness, classes, tall, SLOTS: tl.constexpr):
    """Similarities over the temperature; LOWEST for unseen classes."""
    pointers = similarities + rows[:, None] * tall + columns[None, :]
    value = tl.load(pointers, mask=(columns < tall)[None, :], other=0.0)
    known = tl.load(cost + columns * SLOTS, mask=columns < classes, other=float("inf")) < float("inf")
    return tl.where(known[None, :], value * sharpness, LOWEST)


@triton.jit
def pull(
    logit_gradients, text_parts, visual_parts, pulls, stale, numbers, classes, tall, wide,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """A tile of the alignment's pull on text, then visual prototypes: one of SPLIT parts of (2, SPLIT, tall, wide)."""
    layers = tl.num_programs(2) - 1 - tl.program_id(2)  # backwards
    run, layer = (layers // (2 * SPLIT)).to(tl.int64), layers % (2 * SPLIT)
    if _up_to_date(stale, numbers, run):
        return
    visual_parts, text_parts = visual_parts + run * 2 * tall * wide, text_parts + run * 2 * tall * wide
    logit_gradients, out = logit_gradients + run * 2 * tall * tall, pulls + (run * 2 * SPLIT + layer) * tall * wide
    if layer < SPLIT:
        _pull(logit_gradients, visual_parts, out, layer, classes, tall, wide, True, ROWS, COLUMNS, DEPTH, SPLIT)
    else:
        _pull(logit_gradients, text_parts, out, layer, classes, tall, wide, False, ROWS, COLUMNS, DEPTH, SPLIT)


@triton.jit
def _pull(
    logit_gradients, parts, out, layer, classes, tall, wide,
    TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """A tile of the product of `logit_gradients` (tall, tall), or its transpose, with `parts` (tall, wide)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    span = tall // SPLIT
    depth = (layer % SPLIT) * span + tl.arange(0, DEPTH)
    b = parts + depth[:, None] * wide + columns[None, :]
    if TRANSPOSED:
        a = logit_gradients + depth[:, None] * tall + rows[None, :]
    else:
        a = logit_gradients + rows[:, None] * tall + depth[None, :]
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for _ in range(0, span, DEPTH):
        a_large, a_small = tl.load(a), tl.load(a + tall * tall)
        if TRANSPOSED:
            total = product(tl.trans(a_large), tl.trans(a_small), tl.load(b), tl.load(b + tall * wide), total)
            a += DEPTH * tall
        else:
            total = product(a_large, a_small, tl.load(b), tl.load(b + tall * wide), total)
            a += DEPTH
        b += DEPTH * wide
    pointers = out + rows[:, None] * wide + columns[None, :]
    tl.store(pointers, total / (HALF_SCALE * HALF_SCALE), mask=(rows < classes)[:, None])
